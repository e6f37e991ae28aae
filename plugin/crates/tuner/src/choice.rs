//! What to tell NCCL.

use crate::algorithm::{Algorithm, Collective, Protocol};
use crate::cost::{Network, depth, seconds};

/// What NCCL's cost table has for an algorithm that must not be chosen: `NCCL_ALGO_PROTO_IGNORE`.
pub const IGNORED: f32 = -1.0;

/// NCCL's own choice stays unless another is estimated to take less than this part of its time. An
/// estimate is not a measurement.
const MUST_SAVE: f64 = 0.8;

/// Estimates that differ by this factor count as the same.
const AS_GOOD: f64 = 1.05;

/// The algorithm and protocol that NCCL should use instead of its own choice, which is that of the
/// least time in its cost table; none if its own is as good, or cannot be judged. `table` gives
/// NCCL's microseconds by its numbers of algorithm (of `algorithms`) and protocol (of `protocols`).
pub fn choose(
    network: &Network,
    collective: Collective,
    bytes: usize,
    (algorithms, protocols): (usize, usize),
    table: impl Fn(usize, usize) -> f32,
) -> Option<(Algorithm, Protocol)> {
    let numbers = (0..algorithms)
        .flat_map(|algorithm| (0..protocols).map(move |protocol| (algorithm, protocol)));
    // What NCCL does not offer is negative.
    let offered = numbers.filter(|(algorithm, protocol)| table(*algorithm, *protocol) >= 0.0);
    let own = offered.clone().min_by(|a, b| table(a.0, a.1).total_cmp(&table(b.0, b.1)))?;
    let known = |number: (usize, usize)| {
        let pair = (Algorithm::from_number(number.0)?, Protocol::from_number(number.1)?);
        Some((pair, seconds(network, collective, pair.0, pair.1, bytes)?, number))
    };
    let (own, own_cost, _) = known(own)?;
    let costs = offered.filter_map(known);
    let least = costs.clone().map(|(_, cost, _)| cost).min_by(f64::total_cmp)?;
    if least >= MUST_SAVE * own_cost {
        return None;
    }
    // Of those that are as good, the one that NCCL itself prefers.
    let as_good = costs.filter(|(_, cost, _)| *cost <= AS_GOOD * least);
    let (best, ..) =
        as_good.min_by(|(.., a), (.., b)| table(a.0, a.1).total_cmp(&table(b.0, b.1)))?;
    (best != own).then_some(best)
}

/// The limits of the chunks below, bytes. NCCL goes down to the first itself; a slot of its buffers
/// has the second.
const CHUNKS: std::ops::RangeInclusive<usize> = 32 << 10..=512 << 10;

/// The chunk size with which a collective should go through a channel, if NCCL's own should be
/// replaced; a power of two. Chunks are received as a whole before they are sent on. Small ones
/// fill the pipeline soon, large ones have the latency less often.
pub fn chunk_bytes(
    network: &Network,
    collective: Collective,
    algorithm: Algorithm,
    protocol: Protocol,
    bytes: usize,
    channels: usize,
) -> Option<usize> {
    if collective != Collective::AllReduce || protocol != Protocol::Simple {
        return None;
    }
    let hops = match algorithm {
        Algorithm::Tree => 2.0 * depth(network.nodes) - 1.0,
        Algorithm::CollNetDirect | Algorithm::CollNetChain => 1.0,
        _ => return None,
    };
    // (hops + bytes / chunk) * (overhead + chunk / bandwidth) has its least value there. The
    // overhead of a chunk is what the hosts take for it: several are on their way at a time, so the
    // network's latency counts in the hops alone.
    let length = bytes as f64 / channels.max(1) as f64;
    let bandwidth = network.bandwidth / channels.max(1) as f64;
    let best = (length * CHUNK_OVERHEAD * bandwidth / hops).sqrt();
    // The chunks that NCCL lets be on their way, one in each of its buffer's slots, must cover a
    // round trip.
    let round_trip = 2.0 * network.latency * bandwidth / SLOTS;
    let wanted = (best.max(round_trip) as usize).clamp(*CHUNKS.start(), *CHUNKS.end());
    Some(1 << wanted.ilog2())
}

/// Seconds that hosts and GPUs take for a chunk, beside its bytes.
const CHUNK_OVERHEAD: f64 = 14e-6;
/// `NCCL_STEPS`: chunks of a channel that are on their way at a time.
const SLOTS: f64 = 8.0;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::Servers;
    use evenkeel_testkit::TestRng;

    type Table = [[f32; 3]; 7];

    fn pick(
        network: &Network,
        collective: Collective,
        bytes: usize,
        table: &Table,
    ) -> Option<(Algorithm, Protocol)> {
        choose(network, collective, bytes, (7, 3), |algorithm, protocol| table[algorithm][protocol])
    }

    fn any_network(rng: &mut TestRng) -> Network {
        let nodes = 2 + rng.below(600) as usize;
        let servers = Servers { count: 1 + rng.below(64) as usize, bandwidth: 1e9 };
        Network {
            nodes,
            ranks: nodes * (1 + rng.below(8) as usize),
            bandwidth: 1e7 * (1 + rng.below(5000)) as f64,
            latency: 1e-6 * rng.below(2000) as f64,
            servers: (rng.below(2) == 0).then_some(servers),
        }
    }

    fn any_table(rng: &mut TestRng) -> Table {
        std::array::from_fn(|_| {
            std::array::from_fn(|_| match rng.below(3) {
                0 => IGNORED,
                _ => rng.below(100_000) as f32,
            })
        })
    }

    #[test]
    fn choice_is_offered_and_never_costs_more_than_nccls_own() {
        let mut rng = TestRng::new(1);
        let mut changed = 0;
        for _ in 0..20_000 {
            let (network, table) = (any_network(&mut rng), any_table(&mut rng));
            let collective = *rng.choose(&Collective::ALL);
            let bytes = 1 << rng.below(31);
            let Some((algorithm, protocol)) = pick(&network, collective, bytes, &table) else {
                continue;
            };
            changed += 1;
            assert!(table[algorithm as usize][protocol as usize] >= 0.0, "not offered");
            let mut own = (f32::MAX, 0, 0);
            for (a, row) in table.iter().enumerate() {
                for (p, time) in row.iter().enumerate() {
                    if *time >= 0.0 && *time < own.0 {
                        own = (*time, a, p);
                    }
                }
            }
            let own =
                (Algorithm::from_number(own.1).unwrap(), Protocol::from_number(own.2).unwrap());
            let cost = |(algorithm, protocol)| {
                seconds(&network, collective, algorithm, protocol, bytes).unwrap()
            };
            assert!(cost((algorithm, protocol)) < cost(own));
        }
        assert!(changed > 1000, "{changed}");
    }

    #[test]
    fn choice_that_cannot_be_judged_is_nccls_own() {
        const NVLS: usize = 4;
        let network =
            Network { nodes: 64, ranks: 512, bandwidth: 1e9, latency: 1e-4, servers: None };
        let mut table = [[100.0; 3]; 7];
        table[NVLS][2] = 1.0;
        assert_eq!(pick(&network, Collective::AllReduce, 1 << 20, &table), None);
        let nothing = [[IGNORED; 3]; 7];
        assert_eq!(pick(&network, Collective::AllReduce, 1 << 20, &nothing), None);
    }

    /// One server for many nodes is their bottleneck; one for each node is not.
    #[test]
    fn choice_of_reduction_servers_needs_enough_of_them() {
        let mut table = [[IGNORED; 3]; 7];
        // NCCL's own opinion: servers first.
        table[Algorithm::CollNetChain as usize][2] = 1.0;
        table[Algorithm::Ring as usize][2] = 2.0;
        let with = |count| {
            let servers = Some(Servers { count, bandwidth: 1.25e9 });
            let network =
                Network { nodes: 16, ranks: 16, bandwidth: 1.25e9, latency: 30e-6, servers };
            pick(&network, Collective::AllReduce, 64 << 20, &table)
        };
        assert_eq!(with(1), Some((Algorithm::Ring, Protocol::Simple)));
        assert_eq!(with(16), None, "NCCL's own choice is right");
    }

    /// The more latency, the more a tree is worth, which has fewer hops.
    #[test]
    fn choice_of_a_tree_where_hops_are_long() {
        let mut table = [[IGNORED; 3]; 7];
        table[Algorithm::Ring as usize] = [1.0, IGNORED, 2.0];
        table[Algorithm::Tree as usize] = [3.0, IGNORED, 4.0];
        let at = |latency| {
            let network =
                Network { nodes: 64, ranks: 64, bandwidth: 12.5e9, latency, servers: None };
            pick(&network, Collective::AllReduce, 64 << 10, &table).map(|(algorithm, _)| algorithm)
        };
        assert_eq!(at(100e-6), Some(Algorithm::Tree));
    }

    #[test]
    fn chunks_are_powers_of_two_within_the_buffers_and_grow_with_the_message() {
        let mut rng = TestRng::new(3);
        for _ in 0..5000 {
            let network = any_network(&mut rng);
            let channels = 1 + rng.below(16) as usize;
            let bytes = 1 << rng.below(31);
            let chunk = |bytes| {
                let algorithm = Algorithm::CollNetChain;
                let (reduce, simple) = (Collective::AllReduce, Protocol::Simple);
                chunk_bytes(&network, reduce, algorithm, simple, bytes, channels).unwrap()
            };
            assert!(CHUNKS.contains(&chunk(bytes)) && chunk(bytes).is_power_of_two());
            assert!(chunk(2 * bytes) >= chunk(bytes));
        }
        let network = any_network(&mut rng);
        let (reduce, ring) = (Collective::AllReduce, Algorithm::Ring);
        assert_eq!(chunk_bytes(&network, reduce, ring, Protocol::Simple, 1 << 20, 2), None);
    }
}
