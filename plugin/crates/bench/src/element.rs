//! Element types, reductions over them, and the data that every rank can check alone.

use clap::ValueEnum;

use crate::cli;

/// A type of element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "lower")]
pub(crate) enum Type {
    #[value(name = "float", alias = "float32")]
    Float32,
    #[value(name = "double", alias = "float64")]
    Float64,
    Int32,
}

/// A reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "lower")]
pub(crate) enum Op {
    Sum,
    Min,
    Max,
}

impl Type {
    /// Bytes of one element.
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::Float32 | Self::Int32 => 4,
            Self::Float64 => 8,
        }
    }

    /// As NCCL numbers it.
    pub(crate) const fn code(self) -> i32 {
        match self {
            Self::Int32 => 2,
            Self::Float32 => 7,
            Self::Float64 => 8,
        }
    }

    /// As nccl-tests writes it.
    pub(crate) fn name(self) -> String {
        cli::name(&self)
    }

    /// `into[i] = op(own[i], other[i])`; all three hold the same number of elements.
    pub(crate) fn reduce(self, op: Op, own: Option<&[u8]>, other: &[u8], into: &mut [u8]) {
        match self {
            Self::Float32 => reduce(op, own, other, into, f32::from_ne_bytes, f32::to_ne_bytes),
            Self::Float64 => reduce(op, own, other, into, f64::from_ne_bytes, f64::to_ne_bytes),
            Self::Int32 => reduce(op, own, other, into, i32::from_ne_bytes, i32::to_ne_bytes),
        }
    }

    /// Fills `into` with what rank `rank` contributes in a round.
    pub(crate) fn fill(self, into: &mut [u8], rank: usize, round: u64) {
        self.write(into, |i| contribution(i, rank, round));
    }

    /// Counts elements that differ from the reduction of what all ranks contributed.
    pub(crate) fn wrong(self, op: Op, result: &[u8], ranks: usize, round: u64) -> u64 {
        let mut want = vec![0; self.bytes()];
        let mut wrong = 0;
        for (i, got) in result.chunks_exact(self.bytes()).enumerate() {
            let all = (0..ranks).map(|rank| contribution(i, rank, round));
            let value = match op {
                Op::Sum => all.sum(),
                Op::Min => all.min().unwrap_or_default(),
                Op::Max => all.max().unwrap_or_default(),
            };
            self.write(&mut want, |_| value);
            wrong += u64::from(got != want);
        }
        wrong
    }

    fn write(self, into: &mut [u8], value: impl Fn(usize) -> u32) {
        for (i, element) in into.chunks_exact_mut(self.bytes()).enumerate() {
            let value = value(i);
            match self {
                Self::Float32 => element.copy_from_slice(&(value as f32).to_ne_bytes()),
                Self::Float64 => element.copy_from_slice(&f64::from(value).to_ne_bytes()),
                Self::Int32 => element.copy_from_slice(&value.to_ne_bytes()),
            }
        }
    }
}

impl Op {
    /// As NCCL numbers it.
    pub(crate) const fn code(self) -> i32 {
        match self {
            Self::Sum => 0,
            Self::Max => 2,
            Self::Min => 3,
        }
    }

    /// As nccl-tests writes it.
    pub(crate) fn name(self) -> String {
        cli::name(&self)
    }
}

/// A small whole number, so that sums over any number of ranks that fits a test are exact in
/// float32.
fn contribution(i: usize, rank: usize, round: u64) -> u32 {
    ((i as u64).wrapping_mul(31).wrapping_add(rank as u64 * 17).wrapping_add(round * 7) % 97) as u32
}

trait Number: Copy + PartialOrd + std::ops::Add<Output = Self> {}
impl Number for f32 {}
impl Number for f64 {}
impl Number for i32 {}

fn reduce<T: Number, const N: usize>(
    op: Op,
    own: Option<&[u8]>,
    other: &[u8],
    into: &mut [u8],
    read: impl Fn([u8; N]) -> T,
    write: impl Fn(T) -> [u8; N],
) {
    let apply = |a: T, b: T| match op {
        Op::Sum => a + b,
        Op::Min if b < a => b,
        Op::Max if b > a => b,
        Op::Min | Op::Max => a,
    };
    let (into, _) = into.as_chunks_mut::<N>();
    let (other, _) = other.as_chunks::<N>();
    match own {
        Some(own) => {
            let (own, _) = own.as_chunks::<N>();
            for ((into, own), other) in into.iter_mut().zip(own).zip(other) {
                *into = write(apply(read(*own), read(*other)));
            }
        }
        None => {
            for (into, other) in into.iter_mut().zip(other) {
                *into = write(apply(read(*into), read(*other)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn element_check_matches_the_reduction() {
        for kind in [Type::Float32, Type::Float64, Type::Int32] {
            for op in [Op::Sum, Op::Min, Op::Max] {
                let mut result = vec![0; 100 * kind.bytes()];
                kind.fill(&mut result, 0, 3);
                for rank in 1..5 {
                    let mut other = vec![0; result.len()];
                    kind.fill(&mut other, rank, 3);
                    kind.reduce(op, None, &other, &mut result);
                }
                assert_eq!(kind.wrong(op, &result, 5, 3), 0, "{kind:?} {op:?}");
                assert_ne!(kind.wrong(op, &result, 5, 4), 0, "another round's data must not pass");
                result[kind.bytes() * 7] ^= 1;
                assert_eq!(kind.wrong(op, &result, 5, 3), 1, "{kind:?} {op:?}");
            }
        }
    }

    #[test]
    fn out_of_place_reads_the_send_buffer() {
        let (own, other) = (2f32.to_ne_bytes(), 3f32.to_ne_bytes());
        let mut into = [0; 4];
        Type::Float32.reduce(Op::Sum, Some(&own), &other, &mut into);
        assert_eq!(f32::from_ne_bytes(into), 5.0);
    }
}
