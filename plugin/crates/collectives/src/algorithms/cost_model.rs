//! Which algorithm an operation uses unless the call names one.
//!
//! The cost model is the usual one (alpha, beta, gamma). An operation takes as long as its messages in a row, each of which costs
//! `STEP`. To that it adds the bytes that the busiest rank sends and receives (`BYTE`) and the bytes that it combines (`COMBINE`).
//! The three figures are about what `evenkeel-bench collective` measures for processes of one host over TCP. Only their ratios
//! matter for the choice.

use crate::algorithms::algorithm::Algorithm;
use crate::algorithms::plan::factors;

impl Algorithm {
    /// Microseconds that it takes for so many bytes, by the model; `apart`: between hosts.
    fn cost(self, size: usize, bytes: usize, apart: bool) -> f64 {
        let (n, s) = (size as f64, bytes as f64);
        // All but one n-th, once to be combined and once to be told.
        let least = s * (n - 1.0) / n;
        let log = f64::from(size.ilog2());
        // Ranks beyond a power of two send all to another one and get all back.
        let (folds, folded) = if size.is_power_of_two() { (0.0, 0.0) } else { (2.0, 2.0 * s) };
        let (steps, sent, combined) = match self {
            // Each part of a ring must be there whole before it goes on, but for pieces.
            Self::Ring => (2.0 * (n - 1.0), 2.2 * least, least),
            Self::RingChunked => (2.0 * (n - 1.0), 2.0 * least, least),
            Self::HalvingDoubling => {
                (2.0 * log + folds, 2.0 * least + folded, least + folded / 2.0)
            }
            Self::RecursiveDoubling => (log + folds, log * s + folded, log * s + folded / 2.0),
            // Only what goes between hosts: what happens inside is fast.
            Self::Hierarchical => (2.0 * log, 2.0 * least, least),
            Self::Bcube { base } => {
                // Messages of a step go at the same time, but each costs its sender and receiver something.
                let messages: usize = factors(size, base).iter().map(|factor| factor - 1).sum();
                let levels = factors(size, base).len();
                (
                    2.0 * (levels as f64 + 0.5 * (messages - levels.min(messages)) as f64),
                    2.0 * least,
                    least,
                )
            }
        };
        let around = matches!(self, Self::Ring | Self::RingChunked);
        let sent = if apart && !around { RESTED * sent } else { sent };
        steps * STEP + sent * BYTE + combined * COMBINE
    }
}

/// Microseconds of a message, from calling to being called.
const STEP: f64 = 15.0;
/// Microseconds of a byte that is sent and received: 2.5 GB/s.
const BYTE: f64 = 1.0 / 2500.0;
/// Microseconds of a byte that is combined: 10 GB/s.
const COMBINE: f64 = 1.0 / 10_000.0;

/// How much longer bytes take between hosts where each step goes to another rank than the last one: over connections that have
/// rested. A ring has one.
const RESTED: f64 = 1.12;

/// The algorithm for so many bytes among so many ranks on so many hosts.
pub(crate) fn default_allreduce(size: usize, bytes: usize, hosts: usize) -> Algorithm {
    if hosts > 1 && hosts < size {
        return Algorithm::Hierarchical;
    }
    let candidates = [
        Algorithm::RecursiveDoubling,
        Algorithm::HalvingDoubling,
        Algorithm::RingChunked,
        Algorithm::Bcube { base: 4 },
    ];
    let cost = |algorithm: &Algorithm| algorithm.cost(size.max(1), bytes, hosts > 1);
    let best = candidates.into_iter().min_by(|a, b| cost(a).total_cmp(&cost(b)));
    best.unwrap_or(Algorithm::RecursiveDoubling)
}

/// Whether bytes to or from one root go along a chain rather than a tree.
pub(crate) fn prefers_chain(size: usize, bytes: usize, piece: usize) -> bool {
    let (n, s, piece) = (size as f64, bytes as f64, piece.min(bytes) as f64);
    let levels = n.log2().ceil();
    let tree = levels * (STEP + s * BYTE);
    let chain = (n - 1.0) * (STEP + piece * BYTE) + s * BYTE;
    chain < tree
}

/// Whether many small messages at once are better than a few steps with larger ones.
pub(crate) fn prefers_direct(size: usize, bytes: usize) -> bool {
    size <= 2 || bytes / size <= 16 << 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_ones_take_few_steps_and_large_ones_few_bytes() {
        for size in 2..=64 {
            let small = default_allreduce(size, 4, 1);
            let most = 2.0 * f64::from(size.ilog2()) + 4.0;
            assert!(small.cost(size, 0, false) <= most * STEP, "{size}: {small:?}");
            assert_ne!(small, Algorithm::RingChunked);
            let large = default_allreduce(size, 1 << 30, 1);
            if size > 2 {
                assert_ne!(large, Algorithm::RecursiveDoubling, "{size}");
            }
        }
        assert_eq!(default_allreduce(8, 4, 2), Algorithm::Hierarchical);
        assert_ne!(default_allreduce(8, 4, 8), Algorithm::Hierarchical, "one rank on each host");
        assert_eq!(default_allreduce(4, 20 << 20, 4), Algorithm::RingChunked, "links of their own");
        assert!(!prefers_chain(4, 4, 1 << 18) && prefers_chain(16, 64 << 20, 1 << 18));
    }
}
