//! How long a collective takes over a network: the alpha-beta model, in which a message of `b`
//! bytes takes `latency + b / bandwidth`.
//!
//! Sources. Ring: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
//! Operations in MPICH" (2005). Tree: Sanders, Speck and Träff, "Two-tree algorithms for full
//! bandwidth broadcast, reduction and scan" (2009). Times inside a GPU and its node: the constants
//! of NCCL 2.30.7's `src/graph/tuning.cc`, which are medians over NVIDIA's own systems.

use crate::algorithm::{Algorithm, Collective, Protocol};

/// A communicator's network. All values are the same on all its ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Network {
    /// Number of nodes, at least 2.
    pub nodes: usize,
    /// Number of ranks, at least as many.
    pub ranks: usize,
    /// Bytes a second that a node sends, while it receives as many.
    pub bandwidth: f64,
    /// Seconds from one node to another, of a message of a few bytes.
    pub latency: f64,
    /// The reduction servers, if there are any.
    pub servers: Option<Servers>,
}

/// Reduction servers, among which operations are divided.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Servers {
    /// Their number.
    pub count: usize,
    /// Bytes a second that each receives and sums, while it sends as many.
    pub bandwidth: f64,
}

/// Seconds of GPU and host in a hop between nodes, beside the network's latency: `hwLatencies`,
/// NET.
fn hop(algorithm: Algorithm, protocol: Protocol) -> f64 {
    let micros = match (algorithm, protocol) {
        (Algorithm::CollNetDirect, _) => 31.0,
        (Algorithm::CollNetChain, _) => 30.0,
        (_, Protocol::Ll) => 5.0,
        (_, Protocol::Ll128) => 8.5,
        (_, Protocol::Simple) => 14.0,
    };
    micros * 1e-6
}

/// Seconds of a step inside a node, over NVLink: `hwLatencies`, NVLINK.
fn inner_step(algorithm: Algorithm, protocol: Protocol) -> f64 {
    let micros = match (algorithm, protocol) {
        (Algorithm::CollNetDirect, _) => 3.7,
        (Algorithm::CollNetChain, _) => 2.8,
        (_, Protocol::Ll) => 0.6,
        (Algorithm::Ring, Protocol::Ll128) => 1.9,
        (_, Protocol::Ll128) => 1.25,
        (Algorithm::Ring, Protocol::Simple) => 3.4,
        (_, Protocol::Simple) => 4.0,
    };
    micros * 1e-6
}

/// Seconds to start a collective: `baseLatencies`.
fn start(algorithm: Algorithm, protocol: Protocol) -> f64 {
    let micros = match (algorithm, protocol) {
        (Algorithm::CollNetDirect | Algorithm::CollNetChain, _) => 0.0,
        (Algorithm::Pat, _) => 8.0,
        (Algorithm::Tree, Protocol::Ll) => 6.8,
        (_, Protocol::Ll) => 6.6,
        (_, Protocol::Ll128) => 14.0,
        (_, Protocol::Simple) => 8.4,
    };
    micros * 1e-6
}

/// Bytes on the wire for each byte of data.
fn expansion(protocol: Protocol) -> f64 {
    match protocol {
        Protocol::Ll => 2.0,
        Protocol::Ll128 => 128.0 / 120.0,
        Protocol::Simple => 1.0,
    }
}

/// Channels of a communicator over TCP or one RDMA port. NCCL makes two at least.
const CHANNELS: f64 = 2.0;

/// Bytes that a node passes on at once, in all channels. They are received as a whole before they
/// are sent on.
fn piece(algorithm: Algorithm, protocol: Protocol) -> f64 {
    let channel = match (algorithm, protocol) {
        (_, Protocol::Ll) => 32 << 10,
        (_, Protocol::Ll128) => 128 << 10,
        // NCCL makes them smaller for collectives that are not much longer.
        (Algorithm::CollNetDirect | Algorithm::CollNetChain, _) => 64 << 10,
        (_, Protocol::Simple) => 512 << 10,
    };
    f64::from(channel) * CHANNELS
}

/// Number of levels below the root of a binary tree of so many nodes.
pub(crate) fn depth(nodes: usize) -> f64 {
    f64::from(nodes.max(1).ilog2() + u32::from(!nodes.is_power_of_two()))
}

/// Seconds that a collective takes, or none if the algorithm does not have it. `bytes` is the
/// longer of what a rank puts in and gets out, as NCCL counts.
pub fn seconds(
    network: &Network,
    collective: Collective,
    algorithm: Algorithm,
    protocol: Protocol,
    bytes: usize,
) -> Option<f64> {
    let Network { nodes, ranks, bandwidth, latency, servers } = *network;
    let is_all_reduce = collective == Collective::AllReduce;
    let (n, p, length) = (nodes as f64, ranks as f64, bytes as f64);
    let per_node = p / n;
    let hop = latency + hop(algorithm, protocol);
    let inner = inner_step(algorithm, protocol);
    // What is on the wire for one byte of data, as seconds.
    let byte = expansion(protocol) / bandwidth;
    // How often the data goes around: an all-reduce is a reduce-scatter and an all-gather.
    let rounds = if is_all_reduce { 2.0 } else { 1.0 };
    let (steps, transfer) = match algorithm {
        Algorithm::Ring => {
            let steps = rounds * ((n - 1.0) * hop + (p - n) * inner);
            (steps, rounds * (p - 1.0) / p * length * byte)
        }
        Algorithm::Tree if is_all_reduce => {
            let hops = 2.0 * depth(nodes);
            // A node is a leaf of one tree and has two children in the other: all together it sends
            // everything twice. The root of two nodes has one child.
            let volume = if nodes == 2 { 1.0 } else { 2.0 };
            // The first piece is received as a whole at every hop, the others follow it.
            let first = piece(algorithm, protocol).min(length);
            let steps = hops * hop + 2.0 * (per_node - 1.0) * inner + (hops - 1.0) * first * byte;
            (steps, volume * (length - first) * byte)
        }
        Algorithm::CollNetDirect | Algorithm::CollNetChain
            if is_all_reduce && protocol == Protocol::Simple =>
        {
            let servers = servers?;
            // To the server and back. The second half can begin when the server has the first piece
            // of all.
            let fill = piece(algorithm, protocol).min(length) * byte;
            let inner_steps = match algorithm {
                Algorithm::CollNetDirect => 2.0 * (per_node - 1.0).min(1.0),
                _ => 2.0 * (per_node - 1.0),
            };
            let capacity = servers.count as f64 * servers.bandwidth;
            (hop + latency + inner_steps * inner + fill, length * byte.max(n / capacity))
        }
        Algorithm::Pat if !is_all_reduce && protocol == Protocol::Simple && nodes == ranks => {
            // NCCL's model: a part that grows with the ranks, and three quarters of the bandwidth.
            let linear = p * 2.8e-6;
            let steps = depth(nodes) * hop + linear;
            (steps, (p - 1.0) / p * length * byte / 0.75)
        }
        _ => return None,
    };
    Some(start(algorithm, protocol) + steps + transfer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use evenkeel_testkit::TestRng;

    /// A network of any size and speed.
    pub(crate) fn any_network(rng: &mut TestRng) -> Network {
        let nodes = 2 + rng.below(600) as usize;
        let servers = (rng.below(2) == 0).then(|| Servers {
            count: 1 + rng.below(64) as usize,
            bandwidth: 1e7 * (1 + rng.below(5000)) as f64,
        });
        Network {
            nodes,
            ranks: nodes * (1 + rng.below(8) as usize),
            bandwidth: 1e7 * (1 + rng.below(5000)) as f64,
            latency: 1e-6 * rng.below(2000) as f64,
            servers,
        }
    }

    fn every(mut check: impl FnMut(Collective, Algorithm, Protocol)) {
        for collective in Collective::ALL {
            for algorithm in Algorithm::ALL {
                Protocol::ALL.iter().for_each(|protocol| check(collective, algorithm, *protocol));
            }
        }
    }

    #[test]
    fn cost_grows_with_bytes_and_latency_and_falls_with_bandwidth() {
        let mut rng = TestRng::new(7);
        for _ in 0..500 {
            let network = any_network(&mut rng);
            let bytes = 1 << rng.below(31);
            let slower = Network { bandwidth: network.bandwidth / 2.0, ..network };
            let farther = Network { latency: network.latency + 1e-3, ..network };
            every(|collective, algorithm, protocol| {
                let cost =
                    |network, bytes| seconds(network, collective, algorithm, protocol, bytes);
                let Some(usual) = cost(&network, bytes) else { return };
                assert!(usual.is_finite() && usual > 0.0, "{usual}");
                assert!(cost(&network, 2 * bytes).unwrap() >= usual);
                assert!(cost(&slower, bytes).unwrap() >= usual);
                assert!(cost(&farther, bytes).unwrap() > usual);
            });
        }
    }

    /// No algorithm on the ranks can be faster: every node sends what the others lack.
    #[test]
    fn cost_is_at_least_the_bound_of_the_bandwidth() {
        let mut rng = TestRng::new(8);
        for _ in 0..500 {
            let network = any_network(&mut rng);
            let bytes = 1usize << (10 + rng.below(21));
            every(|collective, algorithm, protocol| {
                let cost = seconds(&network, collective, algorithm, protocol, bytes);
                let p = network.ranks as f64;
                let least = bytes as f64 * (p - 1.0) / p / network.bandwidth;
                assert!(cost.is_none_or(|cost| cost >= least), "{algorithm:?} {protocol:?}");
            });
        }
    }

    #[test]
    fn cost_of_reduction_servers_counts_how_many_there_are() {
        let cost = |count| {
            let servers = Some(Servers { count, bandwidth: 1.25e9 });
            let network =
                Network { nodes: 64, ranks: 64, bandwidth: 1.25e9, latency: 30e-6, servers };
            let (chain, bytes) = (Algorithm::CollNetChain, 256 << 20);
            seconds(&network, Collective::AllReduce, chain, Protocol::Simple, bytes).unwrap()
        };
        assert!((cost(1) / cost(8) - 8.0).abs() < 0.1);
        assert!((cost(64) - cost(640)).abs() < 1e-9, "then the nodes' own links are the limit");
    }

    /// What is forwarded piece by piece, hop by hop, through two trees: an independent check of the
    /// closed form.
    #[test]
    fn cost_of_a_tree_is_that_of_a_simulated_one() {
        for nodes in [4, 8, 16, 64] {
            for bytes in [1 << 20, 16 << 20, 256 << 20] {
                let network = Network {
                    nodes,
                    ranks: nodes,
                    bandwidth: 1.25e9,
                    latency: 50e-6,
                    servers: None,
                };
                let (tree, simple) = (Algorithm::Tree, Protocol::Simple);
                let model = seconds(&network, Collective::AllReduce, tree, simple, bytes).unwrap();
                let simulated = simulated_trees(&network, bytes);
                let ratio = model / simulated;
                assert!((0.7..1.4).contains(&ratio), "{nodes} nodes, {bytes}: {model} {simulated}");
            }
        }
    }

    /// A piece that a node can send, in the order of time.
    #[derive(PartialEq)]
    struct Ready {
        at: f64,
        tree: usize,
        piece: usize,
        node: usize,
        up: bool,
    }

    impl Eq for Ready {}

    impl Ord for Ready {
        fn cmp(&self, other: &Self) -> std::cmp::Ordering {
            // The heap's greatest is the earliest.
            other.at.total_cmp(&self.at).then_with(|| other.piece.cmp(&self.piece))
        }
    }

    impl PartialOrd for Ready {
        fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
            Some(self.cmp(other))
        }
    }

    /// Seconds of an all-reduce through two binary trees, the second of which has the nodes in
    /// reverse order. A node's sends go one after the other, as do its receives, each piece as soon
    /// as it is there.
    fn simulated_trees(network: &Network, bytes: usize) -> f64 {
        let n = network.nodes;
        let piece = (512 << 10).min(bytes / 2);
        let pieces = bytes / 2 / piece;
        let wire = piece as f64 / network.bandwidth;
        let hop = network.latency + hop(Algorithm::Tree, Protocol::Simple);
        // A node's level is its number of trailing zeroes, so one tree's leaves are inner nodes of
        // the other.
        let parent = |node: usize| {
            let low = node & node.wrapping_neg();
            let up = (node ^ low) | (low << 1);
            if up < n { up } else { node ^ low }
        };
        let children = |node: usize| (1..n).filter(move |child| parent(*child) == node);
        let place = |tree: usize, node: usize| if tree == 0 { node } else { n - 1 - node };
        let (mut sends, mut receives) = (vec![0.0f64; n], vec![0.0f64; n]);
        // How many children's pieces each node lacks.
        let lacking: Vec<usize> = (0..n).map(|node| children(node).count()).collect();
        let mut lacking = vec![vec![lacking; pieces]; 2];
        let mut heap = std::collections::BinaryHeap::new();
        for tree in 0..2 {
            for piece in 0..pieces {
                for node in (1..n).step_by(2) {
                    heap.push(Ready { at: 0.0, tree, piece, node, up: true });
                }
            }
        }
        let mut end = 0.0f64;
        while let Some(Ready { at, tree, piece, node, up }) = heap.pop() {
            let to: Vec<usize> = if up { vec![parent(node)] } else { children(node).collect() };
            for to in to {
                let (source, target) = (place(tree, node), place(tree, to));
                let begin = at.max(sends[source]);
                sends[source] = begin + wire;
                receives[target] = (receives[target] + wire).max(begin + wire);
                let at = receives[target] + hop;
                if up {
                    let lacks = &mut lacking[tree][piece][to];
                    *lacks -= 1;
                    if *lacks > 0 {
                        continue;
                    }
                } else {
                    end = end.max(at);
                }
                heap.push(Ready { at, tree, piece, node: to, up: up && to != 0 });
            }
        }
        end
    }
}
