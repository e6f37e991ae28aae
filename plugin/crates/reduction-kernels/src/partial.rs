//! Partial results, which are not rounded: a tree of servers reduces in several places, and rounds
//! once, at the end.

use crate::float::{BFLOAT16, E4M3, E5M2, FLOAT16, NAN32};
use crate::{DataType, Op, ReduceError, check};

/// Number of elements whose accumulators fit into the L1 cache.
const TILE: usize = 1024;

/// The type of partial results, so that nothing is rounded before the end: float32 for sums and
/// products of narrower floats. `None` where partial results have the elements' own type.
pub fn partial_type(kind: DataType, op: Op) -> Option<DataType> {
    let rounds = matches!(op, Op::Sum | Op::Prod);
    let narrow = matches!(
        kind,
        DataType::Float16 | DataType::Bfloat16 | DataType::Float8E4m3 | DataType::Float8E5m2
    );
    (rounds && narrow).then_some(DataType::Float32)
}

/// As [`crate::reduce`], without rounding: `into` holds an element of type [`partial_type`] for
/// each element of a source.
///
/// # Errors
/// As [`crate::reduce`]; lengths are compared in elements.
///
/// # Panics
/// When there is no partial type.
pub fn reduce_partial(
    kind: DataType,
    op: Op,
    sources: &[&[u8]],
    into: &mut [u8],
) -> Result<(), ReduceError> {
    assert!(partial_type(kind, op).is_some(), "{op:?} of {kind:?} has no partial type");
    let widened = size_of::<f32>() / kind.bytes();
    if !into.len().is_multiple_of(size_of::<f32>()) {
        let element = size_of::<f32>();
        return Err(ReduceError::PartialElement { bytes: into.len(), element });
    }
    check(kind, sources, into.len() / widened, 0)?;
    if sources.is_empty() {
        return Err(ReduceError::NoSource);
    }
    match kind {
        DataType::Float16 => {
            fold(op, sources, into, |code| FLOAT16.decode(u16::from_ne_bytes(code).into()));
        }
        DataType::Bfloat16 => {
            fold(op, sources, into, |code| BFLOAT16.decode(u16::from_ne_bytes(code).into()));
        }
        DataType::Float8E4m3 => fold(op, sources, into, |[code]| E4M3.decode(code.into())),
        _ => fold(op, sources, into, |[code]| E5M2.decode(code.into())),
    }
    Ok(())
}

/// Rounds the result of [`reduce_partial`], or a reduction of such results, to elements of type
/// `kind`.
///
/// # Errors
/// When `into` does not hold a whole number of elements, or `from` holds another number of them.
/// Nothing is written then.
///
/// # Panics
/// When `kind` is not narrower than float32.
pub fn round_partial(kind: DataType, from: &[u8], into: &mut [u8]) -> Result<(), ReduceError> {
    assert!(partial_type(kind, Op::Sum).is_some(), "{kind:?} is not narrow");
    let (bytes, element) = (into.len(), kind.bytes());
    if !bytes.is_multiple_of(element) {
        return Err(ReduceError::PartialElement { bytes, element });
    }
    check(DataType::Float32, &[from], bytes / element * size_of::<f32>(), 0)?;
    match kind {
        DataType::Float16 => {
            round(from, into, |value| (FLOAT16.encode(value) as u16).to_ne_bytes())
        }
        DataType::Bfloat16 => {
            round(from, into, |value| (BFLOAT16.encode(value) as u16).to_ne_bytes());
        }
        DataType::Float8E4m3 => round(from, into, |value| [E4M3.encode(value) as u8]),
        _ => round(from, into, |value| [E5M2.encode(value) as u8]),
    }
    Ok(())
}

/// The compiler makes a loop for each format and reduction.
#[inline(always)]
fn fold<const N: usize>(
    op: Op,
    sources: &[&[u8]],
    into: &mut [u8],
    load: impl Fn([u8; N]) -> f32 + Copy,
) {
    match op {
        Op::Prod => fold_by(sources, into, load, |a, b| a * b),
        _ => fold_by(sources, into, load, |a, b| a + b),
    }
}

#[inline(always)]
fn fold_by<const N: usize>(
    sources: &[&[u8]],
    into: &mut [u8],
    load: impl Fn([u8; N]) -> f32 + Copy,
    combine: impl Fn(f32, f32) -> f32 + Copy,
) {
    let Some((first, rest)) = sources.split_first() else { return };
    let mut accumulators = [0f32; TILE];
    for (tile, into) in into.as_chunks_mut::<4>().0.chunks_mut(TILE).enumerate() {
        let accumulators = &mut accumulators[..into.len()];
        let begin = tile * TILE;
        for (acc, code) in accumulators.iter_mut().zip(&first.as_chunks::<N>().0[begin..]) {
            *acc = load(*code);
        }
        for source in rest {
            for (acc, code) in accumulators.iter_mut().zip(&source.as_chunks::<N>().0[begin..]) {
                *acc = combine(*acc, load(*code));
            }
        }
        for (into, acc) in into.iter_mut().zip(accumulators) {
            *into = if acc.is_nan() { NAN32 } else { acc.to_bits() }.to_ne_bytes();
        }
    }
}

#[inline(always)]
fn round<const N: usize>(from: &[u8], into: &mut [u8], store: impl Fn(f32) -> [u8; N]) {
    for (from, into) in from.as_chunks().0.iter().zip(into.as_chunks_mut::<N>().0) {
        *into = store(f32::from_ne_bytes(*from));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference;

    const NARROW: [DataType; 4] =
        [DataType::Float16, DataType::Bfloat16, DataType::Float8E4m3, DataType::Float8E5m2];

    /// Two steps give the result of one step: all codes are combined with all special ones, over
    /// several tiles.
    #[test]
    fn partial_results_round_to_the_reference() {
        let codes = 3 * TILE + 7;
        for kind in NARROW {
            let of = |step: usize, top: &[u8]| -> Vec<u8> {
                (0..codes)
                    .flat_map(|i| {
                        let low = (i * step % 251) as u8;
                        let high =
                            if i % 3 == 0 { top[i % top.len()] } else { (i * step % 256) as u8 };
                        [low, high][2 - kind.bytes()..].to_vec()
                    })
                    .collect()
            };
            let tops = [0x7c, 0x7f, 0xff, 0x00, 0x80, 0x3c, 0x7e, 0xfc];
            let sources = [of(1, &tops), of(7, &tops), of(13, &tops[2..])];
            let sources = sources.each_ref().map(Vec::as_slice);
            for op in [Op::Sum, Op::Prod] {
                for count in 1..=sources.len() {
                    let mut partial = vec![0xee; codes * 4];
                    reduce_partial(kind, op, &sources[..count], &mut partial).unwrap();
                    let mut got = vec![0xee; codes * kind.bytes()];
                    round_partial(kind, &partial, &mut got).unwrap();
                    let mut want = vec![0; got.len()];
                    reference::reduce(kind, op, &sources[..count], &mut want).unwrap();
                    assert!(got == want, "{op:?} of {count} of {kind:?}");
                }
            }
        }
    }

    #[test]
    fn partial_results_are_not_rounded() {
        // float16 has no 2049, but 2050.
        let [start, one, sum] = [0x6800u16, 0x3c00, 0x6801].map(u16::to_ne_bytes);
        let (mut left, mut right) = ([0; 4], [0; 4]);
        reduce_partial(DataType::Float16, Op::Sum, &[&start, &one], &mut left).unwrap();
        reduce_partial(DataType::Float16, Op::Sum, &[&one], &mut right).unwrap();
        crate::reduce_in_place(DataType::Float32, Op::Sum, &mut left, &[&right]).unwrap();
        let mut rounded = [0; 2];
        round_partial(DataType::Float16, &left, &mut rounded).unwrap();
        assert_eq!(rounded, sum);
    }

    #[test]
    fn partial_type_is_for_sums_and_products_of_narrow_floats() {
        for kind in DataType::ALL {
            for op in Op::ALL {
                let want = NARROW.contains(&kind) && matches!(op, Op::Sum | Op::Prod);
                assert_eq!(
                    partial_type(kind, op),
                    want.then_some(DataType::Float32),
                    "{op:?} of {kind:?}"
                );
            }
        }
    }

    #[test]
    fn partial_results_of_wrong_length_are_errors() {
        let sum = |sources: &[&[u8]], into: &mut [u8]| {
            reduce_partial(DataType::Float16, Op::Sum, sources, into).unwrap_err()
        };
        let mut into = [0; 8];
        assert_eq!(sum(&[], &mut into), ReduceError::NoSource);
        let error = ReduceError::Length { source_index: 0, has: 8, want: 4 };
        assert_eq!(sum(&[&[0; 8]], &mut into), error);
        let error = ReduceError::PartialElement { bytes: 6, element: 4 };
        assert_eq!(sum(&[&[0; 3]], &mut into[..6]), error);
        let error = ReduceError::Length { source_index: 0, has: 4, want: 16 };
        assert_eq!(round_partial(DataType::Float16, &[0; 4], &mut into), Err(error));
        let error = ReduceError::PartialElement { bytes: 3, element: 2 };
        assert_eq!(round_partial(DataType::Float16, &[0; 4], &mut into[..3]), Err(error));
        assert_eq!(into, [0; 8]);
    }
}
