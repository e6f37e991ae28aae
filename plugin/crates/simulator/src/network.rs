//! Links with drop-tail queues, and which of them a flow takes.

use std::rc::Rc;

use evenkeel_testkit::TestRng;

use crate::events::{MICROSECOND, SECOND, Time};

/// Bytes of a packet beside its payload, on Ethernet: IP, TCP with timestamps, and the Ethernet
/// header.
const HEADER_BYTES: u64 = 66;
/// Payload of a packet of 1,500 bytes.
pub(crate) const PACKET_BYTES: u64 = 1448;

/// A rate of a million bits per second, in bytes per second.
pub(crate) const MBIT: f64 = 125_000.0;

/// The payload's share of what a link carries.
pub(crate) fn payload_share() -> f64 {
    PACKET_BYTES as f64 / (PACKET_BYTES + HEADER_BYTES) as f64
}

/// An output of a card or a switch, with the link behind it.
#[derive(Clone, Debug)]
pub(crate) struct Port {
    /// Bytes per second on the wire.
    pub(crate) rate: f64,
    /// Propagation delay of the link.
    pub(crate) delay: Time,
    /// Bytes that the queue holds; what does not fit is dropped.
    pub(crate) queue: u64,
    /// Share of the packets that the link loses at random.
    pub(crate) loss: f64,
    /// Everything is lost.
    pub(crate) is_down: bool,
    /// When all that is queued has left.
    busy_until: Time,
}

impl Port {
    /// A port of this rate in bytes per second, whose queue holds what it sends in the time
    /// `queue`.
    pub(crate) fn new(rate: f64, delay: Time, queue: Time) -> Self {
        let queue = (rate * queue as f64 / SECOND as f64) as u64;
        Self { rate, delay, queue: queue.max(30_000), loss: 0.0, is_down: false, busy_until: 0 }
    }

    /// The port of a host's own card. The host waits for it and drops nothing.
    pub(crate) fn card(rate: f64, delay: Time) -> Self {
        Self { queue: u64::MAX, ..Self::new(rate, delay, 0) }
    }

    /// The same with a link that loses this share of the packets.
    pub(crate) fn losing(self, loss: f64) -> Self {
        Self { loss, ..self }
    }

    /// How long a packet that comes now waits.
    pub(crate) fn wait(&self, now: Time) -> Time {
        self.busy_until.saturating_sub(now)
    }

    /// A packet with this payload comes now. Returns when it is at the other end of the link,
    /// unless it is lost.
    pub(crate) fn pass(&mut self, now: Time, payload: u64, rng: &mut TestRng) -> Option<Time> {
        let bytes = payload + HEADER_BYTES * payload.div_ceil(PACKET_BYTES).max(1);
        let wait = self.wait(now);
        let queued = self.rate * wait as f64 / SECOND as f64;
        if self.is_down || queued + bytes as f64 > self.queue as f64 {
            return None;
        }
        self.busy_until = now + wait + (bytes as f64 / self.rate * SECOND as f64) as Time;
        if self.loss > 0.0 && (rng.below(1 << 32) as f64) < self.loss * (1_u64 << 32) as f64 {
            return None;
        }
        Some(self.busy_until + self.delay)
    }
}

/// The ports that a flow's packets pass, one after the other.
pub(crate) type Route = Rc<[u32]>;

/// How hosts are joined.
#[derive(Clone, Debug)]
pub(crate) enum Layout {
    /// Two hosts, 0 and 1, with this number of links between them in each direction, of which a
    /// hash chooses one. Their cards are not the limit.
    Parallel(usize),
    /// Hosts at leaf switches, which have this many uplinks, one to each spine. A hash chooses
    /// among those.
    Clos {
        /// Number of hosts.
        hosts: usize,
        /// Hosts at a leaf.
        per_leaf: usize,
        /// Uplinks of a leaf, which is the number of spines.
        uplinks: usize,
    },
}

/// All ports of a network.
#[derive(Clone, Debug)]
pub(crate) struct Network {
    layout: Layout,
    pub(crate) ports: Vec<Port>,
}

impl Network {
    /// Two hosts with links between them. In the other direction they are the same.
    pub(crate) fn parallel(links: &[Port]) -> Self {
        let ports = links.iter().chain(links).cloned().collect();
        Self { layout: Layout::Parallel(links.len()), ports }
    }

    /// A leaf-spine network in which hosts have cards of this rate in bytes per second, and a
    /// leaf's uplinks together carry what its hosts do. Each queue holds what its port sends in the
    /// time `queue`.
    pub(crate) fn clos(
        hosts: usize,
        per_leaf: usize,
        uplinks: usize,
        rate: f64,
        queue: Time,
    ) -> Self {
        let delay = MICROSECOND;
        let uplink = Port::new(rate * per_leaf as f64 / uplinks as f64, delay, queue);
        let crossings = 2 * hosts.div_ceil(per_leaf) * uplinks;
        let mut ports = vec![Port::card(rate, delay); hosts];
        ports.extend(vec![Port::new(rate, delay, queue); hosts]);
        ports.extend(vec![uplink; crossings]);
        Self { layout: Layout::Clos { hosts, per_leaf, uplinks }, ports }
    }

    /// The ports from a leaf to a spine and from that spine to the leaf.
    pub(crate) fn uplink(&self, leaf: usize, spine: usize) -> Option<[usize; 2]> {
        let Layout::Clos { hosts, per_leaf, uplinks } = self.layout else { return None };
        let up = 2 * hosts + leaf * uplinks + spine;
        Some([up, up + hosts.div_ceil(per_leaf) * uplinks])
    }

    /// The route of a flow between two hosts. Its addresses and ports have this hash.
    pub(crate) fn route(&self, from: usize, to: usize, hash: u64) -> Route {
        match self.layout {
            Layout::Parallel(links) => {
                let link = (hash % links as u64) as usize + if from == 0 { 0 } else { links };
                Rc::new([link as u32])
            }
            Layout::Clos { hosts, per_leaf, uplinks } => {
                let (first, last) = (from as u32, (hosts + to) as u32);
                let spine = (hash % uplinks as u64) as usize;
                let up = self.uplink(from / per_leaf, spine).map_or(0, |[up, _]| up as u32);
                let down = self.uplink(to / per_leaf, spine).map_or(0, |[_, down]| down as u32);
                match from / per_leaf == to / per_leaf {
                    true => Rc::new([first, last]),
                    false => Rc::new([first, up, down, last]),
                }
            }
        }
    }

    /// How long something small takes on a route. It passes queues, but does not lengthen them.
    /// `None`: it is lost.
    pub(crate) fn transit(&self, now: Time, route: &[u32]) -> Option<Time> {
        let mut at = now;
        for port in route {
            let port = &self.ports[*port as usize];
            if port.is_down {
                return None;
            }
            at += port.wait(at) + port.delay;
        }
        Some(at - now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::MILLISECOND;

    #[test]
    fn port_delays_by_its_rate_and_drops_what_its_queue_does_not_hold() {
        let mut rng = TestRng::new(0);
        // 30,000 bytes of queue: 19 packets.
        let mut port = Port::new(1514e6, 7, 0);
        let mut pass = |now| port.pass(now, PACKET_BYTES, &mut rng);
        let arrivals: Vec<_> = (0..30).filter_map(|_| pass(0)).collect();
        let expected: Vec<_> = (1..=19).map(|packet| packet * 1000 + 7).collect();
        assert_eq!(arrivals, expected);
        assert_eq!(pass(1000), Some(20_007));
        port.is_down = true;
        assert_eq!(port.pass(MILLISECOND, PACKET_BYTES, &mut rng), None);
    }

    #[test]
    fn links_lose_their_share_of_the_packets() {
        let mut rng = TestRng::new(1);
        let mut port = Port { loss: 0.1, ..Port::card(1e9, 0) };
        let lost = (0..10_000).filter(|_| port.pass(0, 100, &mut rng).is_none()).count();
        assert!((900..1100).contains(&lost), "{lost} of 10,000");
    }

    #[test]
    fn routes_stay_within_a_leaf_or_cross_one_spine() {
        let network = Network::clos(64, 16, 4, 1e9, MILLISECOND);
        assert_eq!(*network.route(1, 15, 3), [1, 64 + 15]);
        let [up, _] = network.uplink(0, 3).unwrap();
        let [_, down] = network.uplink(3, 3).unwrap();
        assert_eq!(*network.route(1, 63, 7), [1, up as u32, down as u32, 64 + 63]);
        assert_eq!(network.ports.len(), 2 * 64 + 2 * 4 * 4);
        assert!(network.ports[up].rate == 4e9 && down < network.ports.len());
    }
}
