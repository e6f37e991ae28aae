//! The numbers of `mpi.h`: communicators, data types and operations. Their ranges differ, so that an argument at the wrong place is
//! an error.

use std::ffi::c_int;

use evenkeel_collectives::{DataType, Op, Reduction};

use crate::error::{Error, Result};

/// `MPI_SUCCESS`.
pub(crate) const SUCCESS: c_int = 0;
/// `MPI_UNDEFINED`.
pub(crate) const UNDEFINED: c_int = -1;
/// `MPI_COMM_NULL`.
pub(crate) const COMM_NULL: c_int = 0;
/// `MPI_COMM_WORLD`.
pub(crate) const COMM_WORLD: c_int = 1;

const DATATYPE_NULL: c_int = 0x100;
const BYTE: c_int = 0x101;
const INT: c_int = 0x102;
const LONG: c_int = 0x103;
const LONG_LONG: c_int = 0x104;
const INT64_T: c_int = 0x105;
const DOUBLE: c_int = 0x106;

const SUM: c_int = 0x201;
const MIN: c_int = 0x202;
const MAX: c_int = 0x203;

// MPI_LONG is a number of 64 bits.
const _: () = assert!(size_of::<std::ffi::c_long>() == 8);

/// The length of `count` elements in bytes.
pub(crate) fn length(count: c_int, datatype: c_int) -> Result<usize> {
    let element = number(datatype)?.map_or(1, DataType::bytes);
    let count =
        usize::try_from(count).map_err(|_| Error(format!("a count of {count}: 0 or more")))?;
    // Less than 2^31 elements of at most 8 bytes: it does not overflow.
    Ok(count * element)
}

/// The reduction of elements of a type by an operation.
pub(crate) fn reduction(datatype: c_int, op: c_int) -> Result<Reduction<'static>> {
    let op = match op {
        SUM => Op::Sum,
        MIN => Op::Min,
        MAX => Op::Max,
        other => return Err(unknown(other, "operation")),
    };
    let number = number(datatype)?
        .ok_or_else(|| Error("MPI_BYTE is no number, and cannot be reduced".to_owned()))?;
    Ok(Reduction::of(number, op))
}

/// What kind of number a data type is; `None` for bytes.
fn number(datatype: c_int) -> Result<Option<DataType>> {
    match datatype {
        BYTE => Ok(None),
        INT => Ok(Some(DataType::Int32)),
        LONG | LONG_LONG | INT64_T => Ok(Some(DataType::Int64)),
        DOUBLE => Ok(Some(DataType::Float64)),
        DATATYPE_NULL => Err(Error("MPI_DATATYPE_NULL, where a data type is needed".to_owned())),
        other => Err(unknown(other, "data type")),
    }
}

/// The error for a number that is not in the header.
pub(crate) fn unknown(number: c_int, what: &str) -> Error {
    Error(format!(
        "{number:#x} is no {what}: only those of Evenkeel's mpi.h, with which the program has to be compiled"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mpi_lengths_are_those_of_the_types() {
        let types = [(BYTE, 1), (INT, 4), (LONG, 8), (LONG_LONG, 8), (INT64_T, 8), (DOUBLE, 8)];
        for (datatype, bytes) in types {
            assert!(length(3, datatype).is_ok_and(|length| length == 3 * bytes), "{datatype:#x}");
        }
    }

    #[test]
    fn mpi_arguments_at_the_wrong_place_are_errors() {
        for (datatype, op) in [(SUM, INT), (DATATYPE_NULL, SUM), (BYTE, SUM), (0, SUM), (INT, 0)] {
            assert!(reduction(datatype, op).is_err(), "{datatype:#x} {op:#x}");
        }
        assert!(length(-1, INT).is_err() && length(1, DATATYPE_NULL).is_err());
    }
}
