//! Collective operations with a reduction.

use std::ffi::c_void;

use evenkeel_collectives::{self as collectives, DataType, Op, Reduction};

use crate::call::{Call, collectives_of, operate};
use crate::error::Error;
use crate::group::Group;
use crate::pointers;
use crate::status::Status;

/// Signed, 8 bits. (Types and reductions have the same numbers as in NCCL.)
pub const EVENKEEL_INT8: i32 = 0;
/// Unsigned, 8 bits.
pub const EVENKEEL_UINT8: i32 = 1;
/// Signed, 32 bits.
pub const EVENKEEL_INT32: i32 = 2;
/// Unsigned, 32 bits.
pub const EVENKEEL_UINT32: i32 = 3;
/// Signed, 64 bits.
pub const EVENKEEL_INT64: i32 = 4;
/// Unsigned, 64 bits.
pub const EVENKEEL_UINT64: i32 = 5;
/// IEEE 754 binary16.
pub const EVENKEEL_FLOAT16: i32 = 6;
/// IEEE 754 binary32: float.
pub const EVENKEEL_FLOAT32: i32 = 7;
/// IEEE 754 binary64: double.
pub const EVENKEEL_FLOAT64: i32 = 8;
/// The upper half of a binary32.
pub const EVENKEEL_BFLOAT16: i32 = 9;
/// OCP FP8 E4M3: no infinity, largest number 448.
pub const EVENKEEL_FLOAT8_E4M3: i32 = 10;
/// OCP FP8 E5M2: largest number 57344.
pub const EVENKEEL_FLOAT8_E5M2: i32 = 11;

/// Sum.
pub const EVENKEEL_SUM: i32 = 0;
/// Product.
pub const EVENKEEL_PROD: i32 = 1;
/// Maximum.
pub const EVENKEEL_MAX: i32 = 2;
/// Minimum.
pub const EVENKEEL_MIN: i32 = 3;

/// A custom reduction: combines `count` elements of `other` into those of `into`. Elements may have any alignment. The reduction must
/// be associative and commutative. It is called from any thread, by several at a time, and must return.
pub type Combine = Option<
    unsafe extern "C" fn(
        into: *mut c_void,
        other: *const c_void,
        count: usize,
        context: *mut c_void,
    ),
>;

/// Reduces the `count` elements of all ranks. Afterwards all ranks have the same result, bitwise. After an error the contents of the
/// buffer are undefined.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_allreduce(
    group: *const Group,
    data: *mut c_void,
    count: usize,
    datatype: i32,
    op: i32,
    call: *const Call,
) -> Status {
    // SAFETY: as the header requires.
    unsafe {
        reduce_with(group, "allreduce", (data, count), (datatype, op), call, |_| {
            Ok(collectives::Group::allreduce)
        })
    }
}

/// evenkeel_allreduce with a custom reduction on elements of `element` bytes. `context` is passed to it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_allreduce_custom(
    group: *const Group,
    data: *mut c_void,
    count: usize,
    element: usize,
    combine: Combine,
    context: *mut c_void,
    call: *const Call,
) -> Status {
    // SAFETY: the header requires a group, a buffer of its elements, a function and a call or NULL.
    unsafe {
        operate(group, collectives_of, "allreduce", call, |_| {
            let custom = Custom::new(element, combine, context)?;
            let data = elements(data, count, element)?;
            Ok(move |group: &collectives::Group, call: &collectives::Call| {
                let combine = |into: &mut [u8], other: &[u8]| custom.call(into, other);
                group.allreduce(data, &Reduction::custom(element, &combine), call)
            })
        })
    }
}

/// Reduces the `count` elements of all ranks to rank `root`. Afterwards the contents of the other ranks' buffers are undefined.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_reduce(
    group: *const Group,
    data: *mut c_void,
    count: usize,
    datatype: i32,
    op: i32,
    root: usize,
    call: *const Call,
) -> Status {
    // SAFETY: as the header requires.
    unsafe {
        reduce_with(group, "reduce", (data, count), (datatype, op), call, |_| {
            Ok(
                move |group: &collectives::Group,
                      data: &mut [u8],
                      reduction: &Reduction<'_>,
                      call: &collectives::Call| {
                    group.reduce(data, root, reduction, call)
                },
            )
        })
    }
}

/// Reduces the elements of all ranks and scatters the result. Afterwards rank i has part i, at its place in the buffer; the rest of
/// the buffer is undefined. `counts` are the numbers of elements of the parts, one for each rank; NULL: equal parts of `count`. Their
/// sum must be `count`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_reduce_scatter(
    group: *const Group,
    data: *mut c_void,
    count: usize,
    counts: *const usize,
    datatype: i32,
    op: i32,
    call: *const Call,
) -> Status {
    // SAFETY: as the header requires, which also requires a number for each rank.
    unsafe {
        reduce_with(group, "reduce_scatter", (data, count), (datatype, op), call, |group| {
            let parts = parts(group, counts, count, "elements")?;
            Ok(
                move |group: &collectives::Group,
                      data: &mut [u8],
                      reduction: &Reduction<'_>,
                      call: &collectives::Call| {
                    group.reduce_scatter(data, &parts, reduction, call).map(drop)
                },
            )
        })
    }
}

/// Runs an operation with a buffer of elements and a reduction of their type.
///
/// # Safety
/// A group, a buffer of that many elements, and a call or null.
unsafe fn reduce_with<O>(
    group: *const Group,
    name: &'static str,
    (data, count): (*mut c_void, usize),
    (datatype, op): (i32, i32),
    call: *const Call,
    prepare: impl FnOnce(&collectives::Group) -> Result<O, Error>,
) -> Status
where
    O: FnOnce(
            &collectives::Group,
            &mut [u8],
            &Reduction<'_>,
            &collectives::Call,
        ) -> collectives::Result<()>
        + Send
        + 'static,
{
    // SAFETY: the caller guarantees it.
    unsafe {
        operate(group, collectives_of, name, call, |group| {
            let reduction = reduction(datatype, op)?;
            let data = elements(data, count, reduction.element())?;
            let operation = prepare(group)?;
            Ok(move |group: &collectives::Group, call: &collectives::Call| {
                operation(group, data, &reduction, call)
            })
        })
    }
}

/// The lengths of a buffer's parts: the given ones, or equal ones.
///
/// # Safety
/// `given` is null or a number for each rank.
pub(crate) unsafe fn parts(
    group: &collectives::Group,
    given: *const usize,
    all: usize,
    what: &str,
) -> Result<Vec<usize>, Error> {
    let size = group.size();
    if !given.is_null() {
        // SAFETY: the caller guarantees it.
        return Ok(unsafe { pointers::slice("list of parts", given, size) }?.to_vec());
    }
    if !all.is_multiple_of(size) {
        let text = format!("{all} {what} are not divisible by {size} ranks");
        return Err(Error::argument(text));
    }
    Ok(vec![all / size; size])
}

fn reduction(datatype: i32, op: i32) -> Result<Reduction<'static>, Error> {
    let datatype = u8::try_from(datatype)
        .ok()
        .and_then(DataType::from_code)
        .ok_or_else(|| Error::argument(format!("there is no type {datatype}: 0 to 11")))?;
    let op = u8::try_from(op)
        .ok()
        .and_then(Op::from_code)
        .ok_or_else(|| Error::argument(format!("there is no reduction {op}: 0 to 3")))?;
    Ok(Reduction::of(datatype, op))
}

/// # Safety
/// `data` is that many elements, which only this call uses.
unsafe fn elements<'a>(
    data: *mut c_void,
    count: usize,
    element: usize,
) -> Result<&'a mut [u8], Error> {
    let bytes = count.checked_mul(element);
    let bytes =
        bytes.ok_or_else(|| Error::argument(format!("{count} elements are more than memory")))?;
    // SAFETY: the caller guarantees it.
    unsafe { pointers::bytes_mut("data", data, bytes) }
}

/// A caller's custom reduction.
struct Custom {
    element: usize,
    combine: unsafe extern "C" fn(*mut c_void, *const c_void, usize, *mut c_void),
    context: *mut c_void,
}

// SAFETY: the header states that any thread calls the function, with the context.
unsafe impl Send for Custom {}
// SAFETY: as above, several at a time.
unsafe impl Sync for Custom {}

impl Custom {
    fn new(element: usize, combine: Combine, context: *mut c_void) -> Result<Self, Error> {
        let combine =
            combine.ok_or_else(|| Error::argument("the reduction is NULL, not a function"))?;
        if element == 0 {
            return Err(Error::argument("elements of 0 bytes: 1 or more"));
        }
        Ok(Self { element, combine, context })
    }

    fn call(&self, into: &mut [u8], other: &[u8]) {
        let count = into.len().min(other.len()) / self.element;
        // SAFETY: both hold that many elements; the header states what the function may do with them.
        unsafe {
            (self.combine)(into.as_mut_ptr().cast(), other.as_ptr().cast(), count, self.context);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn type_and_reduction_numbers_match_the_library() {
        let types = [
            (EVENKEEL_INT8, DataType::Int8),
            (EVENKEEL_UINT8, DataType::Uint8),
            (EVENKEEL_INT32, DataType::Int32),
            (EVENKEEL_UINT32, DataType::Uint32),
            (EVENKEEL_INT64, DataType::Int64),
            (EVENKEEL_UINT64, DataType::Uint64),
            (EVENKEEL_FLOAT16, DataType::Float16),
            (EVENKEEL_FLOAT32, DataType::Float32),
            (EVENKEEL_FLOAT64, DataType::Float64),
            (EVENKEEL_BFLOAT16, DataType::Bfloat16),
            (EVENKEEL_FLOAT8_E4M3, DataType::Float8E4m3),
            (EVENKEEL_FLOAT8_E5M2, DataType::Float8E5m2),
        ];
        assert_eq!(types.map(|(_, kind)| kind), DataType::ALL);
        assert!(types.iter().all(|(number, kind)| *number == i32::from(kind.code())));
        let ops = [
            (EVENKEEL_SUM, Op::Sum),
            (EVENKEEL_PROD, Op::Prod),
            (EVENKEEL_MAX, Op::Max),
            (EVENKEEL_MIN, Op::Min),
        ];
        assert_eq!(ops.map(|(_, op)| op), Op::ALL);
        assert!(ops.iter().all(|(number, op)| *number == i32::from(op.code())));
        assert!(reduction(-1, 0).is_err() && reduction(12, 0).is_err() && reduction(0, 4).is_err());
    }
}
