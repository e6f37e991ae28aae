//! The networks, loads and contenders that are measured.

use std::str::FromStr;

use evenkeel_protocol::Schedule;
use serde::Serialize;

use crate::collectives::{Collective, Pattern};
use crate::congestion::Algorithm;
use crate::evenkeel::EvenkeelSettings;
use crate::events::{MICROSECOND, MILLISECOND, SECOND, Time};
use crate::kernel::Kernel;
use crate::load::{Contender, Transfer};
use crate::network::{MBIT, Network, PACKET_BYTES, Port, payload_share};
use crate::sockets::Sharing;
use crate::tcp::TcpSettings;

/// Of the shaped links of the TCP benchmark, as `hack/lab/net` makes them.
const LAB_DELAY: Time = 20 * MICROSECOND;
const LAB_QUEUE: Time = 10 * MILLISECOND;
/// Of a leaf-spine network: Mbit/s of a card, hosts at a leaf, its uplinks, the length of queues,
/// and payload of a packet. Single packets of 1,000 hosts take hours.
const CARD: f64 = 1000.0 * MBIT;
const PER_LEAF: usize = 16;
const UPLINKS: usize = 4;
const CLOS_QUEUE: Time = 4 * MILLISECOND;
const CLOS_SEGMENT: u64 = 8 * PACKET_BYTES;

/// All cases.
pub(crate) const CASES: [Case; 15] = [
    Case { name: "four-links", load: Load::Pair(&[1000.0; 4], Trouble::None) },
    Case { name: "slow-link", load: Load::Pair(&[1000.0, 1000.0, 1000.0, 200.0], Trouble::None) },
    Case {
        name: "unequal-links",
        load: Load::Pair(&[1000.0, 700.0, 400.0, 150.0, 50.0], Trouble::None),
    },
    Case { name: "lossy-links", load: Load::Pair(&[1000.0; 4], Trouble::Loss(0.005)) },
    Case { name: "one-link", load: Load::Pair(&[500.0], Trouble::None) },
    Case { name: "foreign-flows", load: Load::Pair(&[1000.0], Trouble::Foreign(4)) },
    Case { name: "ring-64", load: Load::Clos(Pattern::Ring, 64, Trouble::None) },
    Case { name: "ring-64-slow-link", load: Load::Clos(Pattern::Ring, 64, Trouble::Slow) },
    Case { name: "ring-64-lossy-link", load: Load::Clos(Pattern::Ring, 64, Trouble::Loss(0.01)) },
    Case { name: "ring-64-foreign", load: Load::Clos(Pattern::Ring, 64, Trouble::Foreign(4)) },
    Case { name: "ring-256", load: Load::Clos(Pattern::Ring, 256, Trouble::None) },
    Case { name: "ring-1024", load: Load::Clos(Pattern::Ring, 1024, Trouble::None) },
    Case { name: "all-to-all-64", load: Load::Clos(Pattern::AllToAll, 64, Trouble::None) },
    Case { name: "all-to-all-256", load: Load::Clos(Pattern::AllToAll, 256, Trouble::None) },
    Case { name: "all-to-all-1024", load: Load::Clos(Pattern::AllToAll, 1024, Trouble::None) },
];

/// A network and a load on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    load: Load,
}

#[derive(Clone, Copy, Debug)]
enum Load {
    /// Two hosts, with links of these rates in Mbit/s.
    Pair(&'static [f64], Trouble),
    /// So many hosts of a leaf-spine network.
    Clos(Pattern, usize, Trouble),
}

/// What is wrong with a link: with each of a pair, or with the first uplink of the first leaf.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Trouble {
    None,
    /// It loses this share of the packets.
    Loss(f64),
    /// It has a tenth of the rate.
    Slow,
    /// It carries so many flows of others, with CUBIC.
    Foreign(usize),
}

/// A contender by its name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Named {
    contender: Contender,
    /// Connections, each with messages of its own.
    connections: usize,
    /// Packets are spread evenly over all links.
    sprays: bool,
}

impl FromStr for Named {
    type Err = String;

    /// `evenkeel` and with so many flows `evenkeel-8`, either without trials of paths
    /// `evenkeel-8-fixed`; `evenkeel-static`; `equal-16`, `pull-16` and `plain-16` sockets;
    /// `spraying`.
    fn from_str(name: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "contender {name:?}: evenkeel, evenkeel-8, evenkeel-8-fixed, evenkeel-static, \
                equal-16, \
                 pull-16, plain-16 or spraying"
            )
        };
        let count = |text: &str| {
            let count = text.parse::<usize>().ok();
            count.filter(|count| (1..=16).contains(count)).ok_or_else(wrong)
        };
        let (mut connections, mut sprays) = (1, false);
        let contender = match name.split('-').collect::<Vec<_>>()[..] {
            ["evenkeel"] => Contender::Evenkeel(EvenkeelSettings::default()),
            ["evenkeel", "static"] => Contender::Evenkeel(EvenkeelSettings {
                schedule: Schedule::Static { min_share: 64 << 10 },
                ..EvenkeelSettings::default()
            }),
            ["evenkeel", flows, ref rest @ ..] if matches!(rest, [] | ["fixed"]) => {
                let (flows, tries_paths) = (count(flows)?, rest.is_empty());
                let settings = EvenkeelSettings::default();
                Contender::Evenkeel(EvenkeelSettings { flows, tries_paths, ..settings })
            }
            ["equal", sockets] => Contender::Sockets(count(sockets)?, Sharing::Equal),
            ["pull", sockets] => Contender::Sockets(count(sockets)?, Sharing::Pull),
            ["plain", sockets] => {
                connections = count(sockets)?;
                Contender::Sockets(1, Sharing::Equal)
            }
            ["spraying"] => {
                sprays = true;
                Contender::Sockets(1, Sharing::Equal)
            }
            _ => return Err(wrong()),
        };
        Ok(Self { contender, connections, sprays })
    }
}

/// What a run has measured.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Report {
    /// GB/s of payload: of the pair, or of the slowest host.
    pub(crate) rate: f64,
    /// Its share of what the links carry, or of what a host's card does.
    pub(crate) share: f64,
    /// GB/s of an average host.
    pub(crate) average: f64,
    /// Most flows of a connection at a time.
    pub(crate) flows: usize,
    /// Flows that a connection has opened.
    pub(crate) opened: usize,
    /// Events that were handled.
    pub(crate) events: u64,
}

impl Case {
    /// The case with this name.
    pub(crate) fn find(name: &str) -> Result<Self, String> {
        let names: Vec<_> = CASES.iter().map(|case| case.name).collect();
        let found = CASES.into_iter().find(|case| case.name == name);
        found.ok_or_else(|| format!("case {name:?}: one of {}", names.join(", ")))
    }

    /// Runs it once. All that is random follows from the seed.
    ///
    /// # Errors
    /// What must hold and does not.
    pub(crate) fn run(
        &self,
        named: &Named,
        algorithm: Algorithm,
        seed: u64,
        length: Option<Time>,
    ) -> Result<Report, String> {
        match self.load {
            Load::Pair(rates, trouble) => {
                self.run_pair(rates, trouble, named, algorithm, seed, length)
            }
            Load::Clos(pattern, hosts, trouble) => {
                Self::run_clos(pattern, hosts, trouble, named, algorithm, seed, length)
            }
        }
    }

    fn run_pair(
        &self,
        rates: &[f64],
        trouble: Trouble,
        named: &Named,
        algorithm: Algorithm,
        seed: u64,
        length: Option<Time>,
    ) -> Result<Report, String> {
        let loss = if let Trouble::Loss(loss) = trouble { loss } else { 0.0 };
        let link = |rate: f64| Port::new(rate * MBIT, LAB_DELAY, LAB_QUEUE).losing(loss);
        let sum = rates.iter().sum::<f64>();
        let links: Vec<_> = match named.sprays {
            true => vec![link(sum)],
            false => rates.iter().copied().map(link).collect(),
        };
        let mut kernel = Kernel::new(Network::parallel(&links), seed);
        if let Trouble::Foreign(count) = trouble {
            for _ in 0..count {
                kernel.open_greedy([0, 1], TcpSettings::plain(Algorithm::Cubic, PACKET_BYTES));
            }
        }
        let is_cold = self.name == "four-links";
        let length = length.unwrap_or(if is_cold { 4 * SECOND } else { 6 * SECOND });
        let transfer = Transfer {
            connections: named.connections,
            size: 512 << 10,
            depth: 8,
            warm_up: if is_cold { 0 } else { length / 2 },
            length,
        };
        let tcp = TcpSettings::plain(algorithm, PACKET_BYTES);
        let measured = transfer.run(&mut kernel, tcp, named.contender)?;
        Ok(Report {
            rate: measured.rate / 1e9,
            share: measured.rate / (sum * MBIT * payload_share()),
            average: measured.rate / 1e9,
            flows: measured.flows.0,
            opened: measured.flows.1,
            events: measured.events,
        })
    }

    fn run_clos(
        pattern: Pattern,
        hosts: usize,
        trouble: Trouble,
        named: &Named,
        algorithm: Algorithm,
        seed: u64,
        length: Option<Time>,
    ) -> Result<Report, String> {
        let uplinks = if named.sprays { 1 } else { UPLINKS };
        let mut network = Network::clos(hosts, PER_LEAF, uplinks, CARD, CLOS_QUEUE);
        let first = network.uplink(0, 0);
        for port in first.into_iter().flatten() {
            // Spraying uses a bad link as little as it can, and has what the others carry.
            let port = &mut network.ports[port];
            let whole = port.rate;
            match trouble {
                Trouble::Slow if named.sprays => port.rate = whole - 0.9 * whole / UPLINKS as f64,
                Trouble::Slow => port.rate = 0.1 * whole,
                Trouble::Loss(_) if named.sprays => port.rate = whole - whole / UPLINKS as f64,
                Trouble::Loss(loss) => port.loss = loss,
                Trouble::None | Trouble::Foreign(_) => {}
            }
        }
        let mut kernel = Kernel::new(network, seed);
        if let Trouble::Foreign(count) = trouble {
            let tcp = TcpSettings::plain(Algorithm::Cubic, CLOS_SEGMENT);
            // Storage traffic of others, from one leaf to the next.
            for flow in 0..count {
                kernel.open_greedy([flow, PER_LEAF + flow], tcp);
            }
        }
        let collective = Collective {
            pattern,
            hosts,
            size: 512 << 10,
            depth: if pattern == Pattern::Ring { 8 } else { 4 },
            warm_up: length.unwrap_or(2 * SECOND) / 2,
            length: length.unwrap_or(2 * SECOND),
        };
        let tcp = TcpSettings::plain(algorithm, CLOS_SEGMENT);
        let progress = collective.run(&mut kernel, tcp, named.contender)?;
        Ok(Report {
            rate: progress.slowest / 1e9,
            share: progress.slowest / (CARD * payload_share()),
            average: progress.average / 1e9,
            events: progress.events,
            ..Report::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(case: &str, contender: &str, length: Time) -> f64 {
        let contender = contender.parse().unwrap();
        let case = Case::find(case).unwrap();
        case.run(&contender, Algorithm::Bbr, 1, Some(length)).unwrap().share
    }

    #[test]
    fn one_flow_fills_one_link_of_four() {
        let share = share("four-links", "equal-1", SECOND / 2);
        assert!((0.2..=0.25).contains(&share), "{share}");
    }

    #[test]
    fn spraying_fills_all_links() {
        let share = share("four-links", "spraying", SECOND / 2);
        assert!((0.85..=1.0).contains(&share), "{share}");
    }

    #[test]
    fn collectives_of_all_contenders_move_on_every_host() {
        for contender in ["evenkeel", "equal-1", "pull-4"] {
            for case in ["ring-64", "all-to-all-64"] {
                let share = share(case, contender, SECOND / 10);
                assert!(share > 0.0 && share <= 1.0, "{contender} in {case}: {share}");
            }
        }
    }

    #[test]
    fn contenders_and_cases_have_names() {
        for name in ["evenkeel-8-fixed", "evenkeel-static", "plain-16", "pull-8"] {
            assert!(name.parse::<Named>().is_ok(), "{name}");
        }
        for name in ["", "evenkeel-0", "evenkeel-8-", "pull", "plain-x", "equal-17"] {
            let error = name.parse::<Named>().unwrap_err();
            assert!(error.contains("evenkeel-8-fixed"), "{error}");
        }
        assert!(Case::find("ring").unwrap_err().contains("ring-64"));
    }
}
