//! NCCL's own choice, for comparison: its model of times, for an all-reduce between nodes of one
//! GPU over a network without GPUDirect.
//!
//! Source: `src/graph/tuning.cc` and the speeds of `src/graph/search.cc` of NCCL 2.30.7, for an
//! Ampere GPU on an Intel host. Written from their numbers and formulas. LL128 is left out: NCCL
//! does not use it there.

use evenkeel_tuner::{Algorithm, IGNORED, Protocol};

/// What NCCL knows of a communicator.
pub(super) struct Model {
    /// Number of nodes, each with one rank.
    pub(super) nodes: usize,
    /// What the device of a node says of its speed, GB/s.
    pub(super) speed: f64,
    /// Whether NCCL may use reduction servers.
    pub(super) collnet: bool,
}

/// Speeds of a channel that NCCL's search tries, GB/s.
const SPEEDS: [f64; 19] = [
    48.0, 30.0, 28.0, 24.0, 20.0, 18.0, 15.0, 12.0, 10.0, 9.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.4, 1.2,
    0.24, 0.12,
];
/// `llMaxBws` of two nodes and of more, GB/s.
const LL_LIMITS: [f64; 2] = [39.0, 20.4];
/// `perChMaxTreeBws` of two nodes and of more, GB/s.
const TREE_LIMITS: [f64; 2] = [23.6, 17.8];
/// `hwLatencies` of the network with a tree, which count for nodes of one GPU: LL and Simple,
/// microseconds.
const HOP: [f64; 2] = [5.0, 14.0];
/// How far trees are from the model by size, from 64 bytes in powers of two: LL and Simple.
const TREE_CORRECTION: [[f64; 23]; 2] = [
    [
        1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8,
        0.9, 1.0, 1.0, 1.0, 1.0,
    ],
    [
        0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8,
        0.7, 0.7, 0.8, 0.9, 0.9,
    ],
];

impl Model {
    /// The bandwidth of all channels that NCCL makes, GB/s: as many of one of its speeds as the
    /// device can carry. From the first speed that fits, the search goes down to half of it at
    /// most.
    fn channels(&self) -> f64 {
        let (mut best, mut all) = (0.0, 0.0);
        for speed in SPEEDS {
            if all > 0.0 && speed / best <= 0.49 {
                break;
            }
            let fits = (self.speed / speed).floor() * speed;
            if fits > all {
                (best, all) = (speed, fits);
            }
        }
        all
    }

    /// NCCL's estimate in microseconds, or [`IGNORED`].
    pub(super) fn micros(&self, algorithm: usize, protocol: usize, bytes: usize) -> f32 {
        let pair = (Algorithm::from_number(algorithm), Protocol::from_number(protocol));
        let row = match pair.1 {
            Some(Protocol::Ll) => 0,
            Some(Protocol::Simple) => 1,
            _ => return IGNORED,
        };
        let (n, depth) = (self.nodes as f64, f64::from(self.nodes.ilog2()));
        let more = usize::from(self.nodes > 2);
        let length = bytes as f64;
        let inter = self.channels();
        // The search lets what is inside a node have twice the network's speed. It counts for
        // CollNet, and between two nodes.
        let intra = 2.0 * inter;
        let (latency, bandwidth) = match pair.0 {
            Some(Algorithm::Ring) => {
                let bus = if row == 0 { (inter / 2.0).min(LL_LIMITS[more]) } else { inter };
                // "Plateau effect of ring", for chunks that are not tiny.
                let is_long = row == 1 && length / (2.0 * n) >= 64.0;
                let plateau = if is_long { 1.4 } else { 1.0 };
                let latency = [6.6, 8.4][row] + 2.0 * (n - 1.0) * HOP[row];
                (latency * plateau, bus * n / (2.0 * (n - 1.0)))
            }
            Some(Algorithm::Tree) => {
                let bus = if self.nodes == 2 { intra } else { inter };
                let bus = (bus * 0.92).min(2.0 * TREE_LIMITS[more]);
                let bus = if row == 0 { (bus / 3.8).min(LL_LIMITS[more]) } else { bus };
                let size = (bytes >> 6).checked_ilog2().map_or(usize::MAX, |size| size as usize);
                let correction = TREE_CORRECTION[row].get(size).copied().unwrap_or(1.0);
                ([6.8, 8.4][row] + 2.0 * depth * HOP[row], bus * 0.5 * correction)
            }
            Some(Algorithm::CollNetChain) if self.collnet && row == 1 => (HOP[1], intra * 0.5),
            _ => return IGNORED,
        };
        (latency + length / (1000.0 * bandwidth)) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nccl_model_gives_the_speeds_that_its_search_finds() {
        let channels = |speed| Model { nodes: 2, speed, collnet: false }.channels();
        assert!((channels(1.25) - 1.2).abs() < 1e-9);
        assert!((channels(0.5) - 0.48).abs() < 1e-9);
        assert!((channels(12.5) - 12.0).abs() < 1e-9);
    }

    /// Times that follow from NCCL's formulas by hand.
    #[test]
    fn nccl_model_gives_its_times() {
        let model = Model { nodes: 8, speed: 1.25, collnet: true };
        let micros = |algorithm, protocol, bytes| {
            f64::from(model.micros(algorithm as usize, protocol as usize, bytes))
        };
        let near =
            |value: f64, wanted: f64| assert!((value / wanted - 1.0).abs() < 1e-3, "{value}");
        near(micros(Algorithm::Ring, Protocol::Ll, 64), 6.6 + 14.0 * 5.0 + 0.064 / 0.343);
        near(micros(Algorithm::Tree, Protocol::Ll, 64), 6.8 + 6.0 * 5.0 + 0.064 / 0.1453);
        let ring = (8.4 + 14.0 * 14.0) * 1.4 + 1_048.576 / (1.2 * 8.0 / 14.0);
        near(micros(Algorithm::Ring, Protocol::Simple, 1 << 20), ring);
        near(micros(Algorithm::CollNetChain, Protocol::Simple, 1 << 20), 14.0 + 1_048.576 / 1.2);
        assert_eq!(model.micros(4, 2, 64), IGNORED);
        assert_eq!(model.micros(1, 1, 64), IGNORED);
    }
}
