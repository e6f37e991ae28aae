//! Element-wise reductions of NCCL's types, as fast as memory and bit-identical everywhere.
//!
//! ```
//! use evenkeel_reduction_kernels::{DataType, Op, reduce};
//!
//! let (one, two) = (1f32.to_ne_bytes(), 2f32.to_ne_bytes());
//! let mut sum = [0; 4];
//! reduce(DataType::Float32, Op::Sum, &[&one, &two], &mut sum)?;
//! assert_eq!(f32::from_ne_bytes(sum), 3.0);
//! # Ok::<(), evenkeel_reduction_kernels::ReduceError>(())
//! ```
//!
//! Buffers are bytes of any alignment that hold elements in the processor's byte order. Sources are
//! combined in the given order: `((a + b) + c) + d`. A result depends on nothing else, such as the
//! processor, the alignment of a buffer, or how a message is split.
//!
//! * **Integers** wrap.
//! * **float32 and float64** are accumulated in their own type. **float16, bfloat16 and both fp8**
//!   are accumulated in float32 over all sources and rounded once. Rounding is to nearest, ties to
//!   even; subnormal numbers are kept. That is the processor's default: a caller's thread must not
//!   have set it to another rounding or to flush subnormals.
//! * **Overflow** of a sum or product gives infinity. Only fp8 saturates: to ±448 for E4M3, which
//!   has no infinity, and to ±57344 for E5M2, also when the sum is infinite. That is the saturating
//!   conversion of the OCP 8-bit floating point specification (revision 1.0, 5.2), and what NCCL
//!   does on a GPU.
//! * **NaN** in any source of a sum or product gives NaN, as do infinity minus infinity and
//!   infinity times zero. **Minimum and maximum** skip NaN, as NCCL does on a GPU: the result is
//!   NaN only if all sources are. -0 is less than +0. They return one of the sources' elements
//!   unchanged.
//! * **Every NaN that is stored is the same one**: positive and quiet, with no other bit of the
//!   mantissa set (`0x7fc00000` in float32); `0x7f` in E4M3, which has no other. Processors
//!   disagree on sign and payload, so those of the sources are not kept.

mod dispatch;
mod float;
mod kernel;
mod kind;
mod partial;
pub mod reference;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::sync::OnceLock;

use dispatch::InstructionSet;
use kernel::Sources;
pub use kind::{DataType, Op};
pub use partial::{partial_type, reduce_partial, round_partial};

/// Buffers that cannot be reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReduceError {
    /// There is no source.
    #[error("no source given, at least one is needed")]
    NoSource,
    /// A source is longer or shorter than the result.
    #[error("source {source_index} has {has} bytes, the result has {want}: they must be equal")]
    Length {
        /// Position among all sources; in place, the result itself is number 0.
        source_index: usize,
        /// Bytes of that source.
        has: usize,
        /// Bytes of the result.
        want: usize,
    },
    /// The result does not hold a whole number of elements.
    #[error("{bytes} bytes are no whole number of elements of {element} bytes")]
    PartialElement {
        /// Bytes of the result.
        bytes: usize,
        /// Bytes of an element.
        element: usize,
    },
}

/// Reduces `sources`, in this order, into `into`.
///
/// # Errors
/// When there is no source, a source is not as long as `into`, or `into` does not hold a whole
/// number of elements. Nothing is written then.
pub fn reduce(
    kind: DataType,
    op: Op,
    sources: &[&[u8]],
    into: &mut [u8],
) -> Result<(), ReduceError> {
    check(kind, sources, into.len(), 0)?;
    let (first, rest) = sources.split_first().ok_or(ReduceError::NoSource)?;
    let sources = Sources { first: Some(first), rest };
    best().reduce(kind, op, sources, into);
    Ok(())
}

/// Reduces `into` and then `others`, in this order, into `into`.
///
/// # Errors
/// When one of `others` is not as long as `into`, or `into` does not hold a whole number of
/// elements. Nothing is written then.
pub fn reduce_in_place(
    kind: DataType,
    op: Op,
    into: &mut [u8],
    others: &[&[u8]],
) -> Result<(), ReduceError> {
    check(kind, others, into.len(), 1)?;
    best().reduce(kind, op, Sources { first: None, rest: others }, into);
    Ok(())
}

/// The name of the instruction set that reductions use on this processor, such as `AVX-512`.
pub fn instruction_set() -> &'static str {
    best().name()
}

fn best() -> InstructionSet {
    static BEST: OnceLock<InstructionSet> = OnceLock::new();
    *BEST
        .get_or_init(|| InstructionSet::available().next_back().unwrap_or(InstructionSet::Baseline))
}

fn check(kind: DataType, sources: &[&[u8]], want: usize, first: usize) -> Result<(), ReduceError> {
    for (source_index, source) in (first..).zip(sources) {
        if source.len() != want {
            return Err(ReduceError::Length { source_index, has: source.len(), want });
        }
    }
    if !want.is_multiple_of(kind.bytes()) {
        return Err(ReduceError::PartialElement { bytes: want, element: kind.bytes() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f32s(op: Op, sources: &[&[f32]]) -> Vec<u32> {
        let bytes =
            |values: &[f32]| values.iter().flat_map(|v| v.to_ne_bytes()).collect::<Vec<_>>();
        let sources: Vec<_> = sources.iter().map(|source| bytes(source)).collect();
        let slices: Vec<_> = sources.iter().map(Vec::as_slice).collect();
        let mut into = vec![0; sources[0].len()];
        reduce(DataType::Float32, op, &slices, &mut into).unwrap();
        into.as_chunks().0.iter().map(|chunk| u32::from_ne_bytes(*chunk)).collect()
    }

    fn bytes(kind: DataType, op: Op, sources: &[&[u8]]) -> Vec<u8> {
        let mut into = vec![0; sources[0].len()];
        reduce(kind, op, sources, &mut into).unwrap();
        into
    }

    #[test]
    fn sums_are_in_the_order_of_sources() {
        let (big, small) = (2f32.powi(24), 1.0);
        assert_eq!(f32s(Op::Sum, &[&[big], &[small], &[small]]), [big.to_bits()]);
        assert_eq!(f32s(Op::Sum, &[&[small], &[small], &[big]]), [(big + 2.0).to_bits()]);
    }

    #[test]
    fn float16_and_bfloat16_sums_round_once() {
        // 2048 + 1 + 1 is 2050 in float16, but 2048 + 1 alone rounds to 2048.
        let [start, one, sum] = [0x6800u16, 0x3c00, 0x6801].map(u16::to_ne_bytes);
        assert_eq!(bytes(DataType::Float16, Op::Sum, &[&start, &one, &one]), sum);
        // 65504 + 65504 - 65504 has an intermediate sum beyond float16's range.
        let [max, min] = [0x7bffu16, 0xfbff].map(u16::to_ne_bytes);
        assert_eq!(bytes(DataType::Float16, Op::Sum, &[&max, &max, &min]), max);
        // 256 + 1 + 1 in bfloat16.
        let [start, one, sum] = [0x4380u16, 0x3f80, 0x4381].map(u16::to_ne_bytes);
        assert_eq!(bytes(DataType::Bfloat16, Op::Sum, &[&start, &one, &one]), sum);
    }

    #[test]
    fn nan_is_stored_in_canonical_form() {
        let (nan, inf) = (f32::from_bits(0xff80_0001), f32::INFINITY);
        let canonical = 0x7fc0_0000;
        assert_eq!(f32s(Op::Sum, &[&[nan, 1.0, inf], &[1.0, nan, -inf]]), [canonical; 3]);
        assert_eq!(f32s(Op::Prod, &[&[nan, 1.0, inf], &[1.0, nan, 0.0]]), [canonical; 3]);
        assert_eq!(f32s(Op::Min, &[&[nan], &[nan]]), [canonical]);
        assert_eq!(bytes(DataType::Float8E4m3, Op::Sum, &[&[0xff], &[0]]), [0x7f]);
        assert_eq!(bytes(DataType::Float8E5m2, Op::Sum, &[&[0xff], &[0]]), [0x7e]);
    }

    #[test]
    fn minimum_and_maximum_skip_nan_and_order_zeros() {
        let nan = [f32::NAN, -f32::NAN];
        for op in [Op::Min, Op::Max] {
            assert_eq!(f32s(op, &[&nan, &[7.0, 7.0]]), [7f32.to_bits(); 2]);
            assert_eq!(f32s(op, &[&[7.0, 7.0], &nan]), [7f32.to_bits(); 2]);
        }
        let zeros: [&[f32]; 2] = [&[0.0, -0.0], &[-0.0, 0.0]];
        assert_eq!(f32s(Op::Min, &zeros), [0x8000_0000; 2]);
        assert_eq!(f32s(Op::Max, &zeros), [0; 2]);
        let ends: [&[f32]; 2] = [&[f32::INFINITY], &[f32::NEG_INFINITY]];
        assert_eq!(f32s(Op::Min, &ends), [f32::NEG_INFINITY.to_bits()]);
        assert_eq!(f32s(Op::Max, &ends), [f32::INFINITY.to_bits()]);
    }

    #[test]
    fn integers_wrap_and_fp8_saturates() {
        assert_eq!(bytes(DataType::Int8, Op::Sum, &[&[127], &[1]]), [128]);
        assert_eq!(bytes(DataType::Uint8, Op::Prod, &[&[16], &[17]]), [16]);
        assert_eq!(bytes(DataType::Float8E4m3, Op::Sum, &[&[0x7e], &[0x7e]]), [0x7e]);
        assert_eq!(bytes(DataType::Float8E5m2, Op::Sum, &[&[0xfb], &[0xfb]]), [0xfb]);
        assert_eq!(bytes(DataType::Float8E5m2, Op::Sum, &[&[0x7c], &[0]]), [0x7b]);
        assert_eq!(bytes(DataType::Float8E5m2, Op::Max, &[&[0x7c], &[0]]), [0x7c]);
    }

    #[test]
    fn in_place_reduction_includes_the_buffer() {
        let mut into = [5, 6];
        reduce_in_place(DataType::Uint8, Op::Sum, &mut into, &[&[1, 2], &[10, 20]]).unwrap();
        assert_eq!(into, [16, 28]);
        reduce_in_place(DataType::Uint8, Op::Sum, &mut into, &[]).unwrap();
        assert_eq!(into, [16, 28]);
    }

    #[test]
    fn wrong_length_is_an_error_and_writes_nothing() {
        let mut into = [9; 4];
        let sum =
            |sources: &[&[u8]], into: &mut [u8]| reduce(DataType::Int32, Op::Sum, sources, into);
        assert_eq!(sum(&[], &mut into), Err(ReduceError::NoSource));
        let error = ReduceError::Length { source_index: 1, has: 8, want: 4 };
        assert_eq!(sum(&[&[0; 4], &[0; 8]], &mut into), Err(error));
        let error = ReduceError::PartialElement { bytes: 3, element: 4 };
        assert_eq!(sum(&[&[0; 3]], &mut into[..3]), Err(error));
        let error = ReduceError::Length { source_index: 1, has: 3, want: 4 };
        let others: &[&[u8]] = &[&[0; 3]];
        assert_eq!(reduce_in_place(DataType::Int32, Op::Sum, &mut into, others), Err(error));
        assert_eq!(into, [9; 4]);
        assert_eq!(
            reference::reduce(DataType::Int32, Op::Sum, &[], &mut into),
            Err(ReduceError::NoSource)
        );
    }
}
