//! Which algorithm an operation uses unless the call names one.
//!
//! The cost model is the usual one (alpha, beta, gamma). An operation takes as long as its messages in a row, each of which costs
//! `STEP`. To that it adds the bytes that the busiest rank sends and receives (`BYTE`) and the bytes that it combines (`COMBINE`).
//! The three figures are about what `evenkeel-bench collective` measures for processes of one host over TCP. Only their ratios
//! matter for the choice.

use crate::algorithms::algorithm::Algorithm;
use crate::algorithms::plan::factors;
use crate::algorithms::shares::relative_time;

impl Algorithm {
    /// Microseconds for this number of bytes, by the model. `between_hosts`: ranks are on different hosts.
    fn cost(self, size: usize, bytes: usize, between_hosts: bool) -> f64 {
        let (n, s) = (size as f64, bytes as f64);
        // All parts but one: once in the reduce-scatter, once in the all-gather.
        let min_bytes = s * (n - 1.0) / n;
        let log = f64::from(size.ilog2());
        // Ranks beyond a power of two send their buffer to another rank and get the result back.
        let (folds, folded) = if size.is_power_of_two() { (0.0, 0.0) } else { (2.0, 2.0 * s) };
        let (steps, sent, combined) = match self {
            // Without pieces, a rank must have received a whole part before it forwards it.
            Self::Ring => (2.0 * (n - 1.0), 2.2 * min_bytes, min_bytes),
            Self::RingChunked => (2.0 * (n - 1.0), 2.0 * min_bytes, min_bytes),
            Self::HalvingDoubling => {
                (2.0 * log + folds, 2.0 * min_bytes + folded, min_bytes + folded / 2.0)
            }
            Self::RecursiveDoubling => (log + folds, log * s + folded, log * s + folded / 2.0),
            // Only the traffic between hosts: within hosts it is fast.
            Self::Hierarchical => (2.0 * log, 2.0 * min_bytes, min_bytes),
            // The messages of a step are concurrent, but each costs its sender and receiver time.
            Self::Direct => (n, 2.0 * min_bytes, min_bytes),
            Self::Bcube { base } => {
                // The messages of a step are concurrent, but each costs its sender and receiver time.
                let messages: usize = factors(size, base).iter().map(|factor| factor - 1).sum();
                let levels = factors(size, base).len();
                (
                    2.0 * (levels as f64 + 0.5 * (messages - levels.min(messages)) as f64),
                    2.0 * min_bytes,
                    min_bytes,
                )
            }
        };
        let factor = match self {
            Self::Ring | Self::RingChunked => 1.0,
            Self::Direct => MANY_CONNECTIONS_FACTOR,
            _ => IDLE_CONNECTION_FACTOR,
        };
        let sent = if between_hosts { factor * sent } else { sent };
        steps * STEP + sent * BYTE + combined * COMBINE
    }
}

/// Microseconds of a message, from one rank to the next.
const STEP: f64 = 15.0;
/// Microseconds per byte sent and received: 2.5 GB/s.
const BYTE: f64 = 1.0 / 2500.0;
/// Microseconds per byte combined: 10 GB/s.
const COMBINE: f64 = 1.0 / 10_000.0;

/// Factor for bytes between hosts if each step goes to another rank than the last: they go over connections that have been idle.
/// A ring uses one connection.
const IDLE_CONNECTION_FACTOR: f64 = 1.12;

/// Factor for bytes between hosts if a rank sends to several others at a time: their bursts share the queue of its link.
const MANY_CONNECTIONS_FACTOR: f64 = 1.25;

/// The algorithm with the lowest cost for these numbers of ranks, bytes and hosts, and for links of these rates if they are known.
pub(crate) fn default_allreduce(
    size: usize,
    bytes: usize,
    hosts: usize,
    rates: Option<&[u64]>,
) -> Algorithm {
    if hosts > 1 && hosts < size {
        return Algorithm::Hierarchical;
    }
    let best = even_allreduce(size, bytes, hosts);
    match rates {
        Some(rates) if is_direct_faster(rates, best, bytes, hosts) => Algorithm::Direct,
        _ => best,
    }
}

/// Whether shares that fit the links' rates take less than another algorithm, which goes at the pace of the slowest link.
fn is_direct_faster(rates: &[u64], other: Algorithm, bytes: usize, hosts: usize) -> bool {
    let (size, between_hosts) = (rates.len(), hosts > 1);
    let (Some(lowest), Some(highest)) = (rates.iter().min(), rates.iter().max()) else {
        return false;
    };
    // The model has the costs of links as fast as the fastest one here. What is beyond the messages takes longer.
    let cost = |algorithm: Algorithm, times: f64| {
        let messages = algorithm.cost(size, 0, between_hosts);
        messages + (algorithm.cost(size, bytes, between_hosts) - messages) * times
    };
    let even = 2.0 * (size as f64 - 1.0) / size as f64;
    let direct = cost(Algorithm::Direct, relative_time(rates) / even);
    direct < cost(other, *highest as f64 / *lowest as f64)
}

/// The algorithm with the lowest cost where all links have the same rate.
fn even_allreduce(size: usize, bytes: usize, hosts: usize) -> Algorithm {
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

/// Whether a chain costs less than a tree for bytes to or from one root.
pub(crate) fn prefers_chain(size: usize, bytes: usize, piece: usize) -> bool {
    let (n, s, piece) = (size as f64, bytes as f64, piece.min(bytes) as f64);
    let levels = n.log2().ceil();
    let tree = levels * (STEP + s * BYTE);
    let chain = (n - 1.0) * (STEP + piece * BYTE) + s * BYTE;
    chain < tree
}

/// Whether concurrent small messages cost less than a few steps with larger ones.
pub(crate) fn prefers_direct(size: usize, bytes: usize) -> bool {
    size <= 2 || bytes / size <= 16 << 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_buffers_take_few_steps_large_ones_few_bytes() {
        for size in 2..=64 {
            let small = default_allreduce(size, 4, 1, None);
            let max_steps = 2.0 * f64::from(size.ilog2()) + 4.0;
            assert!(small.cost(size, 0, false) <= max_steps * STEP, "{size}: {small:?}");
            assert_ne!(small, Algorithm::RingChunked);
            let large = default_allreduce(size, 1 << 30, 1, None);
            if size > 2 {
                assert_ne!(large, Algorithm::RecursiveDoubling, "{size}");
            }
        }
        assert_eq!(default_allreduce(8, 4, 2, None), Algorithm::Hierarchical);
        assert_ne!(
            default_allreduce(8, 4, 8, None),
            Algorithm::Hierarchical,
            "one rank on each host"
        );
        assert_eq!(
            default_allreduce(4, 20 << 20, 4, None),
            Algorithm::RingChunked,
            "no two ranks share a host"
        );
        assert!(!prefers_chain(4, 4, 1 << 18) && prefers_chain(16, 64 << 20, 1 << 18));
    }

    #[test]
    fn uneven_links_make_large_buffers_direct() {
        let chosen = |bytes, rates: &[u64]| default_allreduce(8, bytes, 8, Some(rates));
        let slow = [100, 100, 100, 60, 100, 100, 100, 100];
        assert_eq!(chosen(64 << 20, &slow), Algorithm::Direct);
        assert_eq!(chosen(64 << 20, &[100; 8]), Algorithm::RingChunked, "there is nothing to gain");
        let nearly_even = [100, 100, 100, 85, 100, 100, 100, 100];
        assert_eq!(
            chosen(64 << 20, &nearly_even),
            Algorithm::RingChunked,
            "gains less than it costs"
        );
        assert_eq!(chosen(4, &slow), Algorithm::RecursiveDoubling, "steps are what costs");
        assert_eq!(
            default_allreduce(8, 64 << 20, 4, Some(&slow)),
            Algorithm::Hierarchical,
            "hosts have several ranks"
        );
        for size in 1..=2 {
            let rates = &[100, 10][..size];
            assert_ne!(default_allreduce(size, 64 << 20, size, Some(rates)), Algorithm::Direct);
        }
    }
}
