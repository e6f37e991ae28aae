//! What must hold on any network: drawn from a seed, and judged.

use evenkeel_protocol::Schedule;
use evenkeel_testkit::TestRng;

use crate::congestion::Algorithm;
use crate::evenkeel::EvenkeelSettings;
use crate::events::{MICROSECOND, MILLISECOND, SECOND, Time};
use crate::kernel::Kernel;
use crate::load::{Contender, Measured, Transfer};
use crate::network::{MBIT, Network, PACKET_BYTES, Port};
use crate::tcp::TcpSettings;

/// No message may take longer than this to follow another one.
const MAX_GAP: Time = 3 * SECOND;
/// A connection gets at least this share of what plain TCP with as many flows gets.
const MIN_SHARE: f64 = 0.5;

/// A network of two hosts, its faults, and what is sent over it.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    seed: u64,
    links: Vec<Port>,
    tcp: TcpSettings,
    settings: EvenkeelSettings,
    transfer: Transfer,
    /// The links of endless flows of others.
    foreign: Vec<usize>,
    /// A link that loses everything from the first time to the second.
    outages: Vec<(usize, Time, Time)>,
}

impl Case {
    /// The case of this seed.
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = TestRng::new(seed);
        let count = 1 + rng.index(5);
        let delay = *rng.choose(&[20, 100, 500, 2000]) * MICROSECOND;
        let queue = *rng.choose(&[2, 5, 10, 20]) * MILLISECOND;
        let loss = if rng.one_in(4) { *rng.choose(&[0.001, 0.005, 0.01]) } else { 0.0 };
        let link = |_| {
            let rate = *rng.choose(&[50, 100, 200, 400]);
            Port::new(f64::from(rate) * MBIT, delay, queue).losing(loss)
        };
        let links: Vec<_> = (0..count).map(link).collect();
        let algorithm = *rng.choose(&[Algorithm::Cubic, Algorithm::Bbr]);
        let schedule = match rng.one_in(6) {
            true => Schedule::Static { min_share: 64 << 10 },
            false => Schedule::Pull,
        };
        let settings = EvenkeelSettings {
            flows: *rng.choose(&[1, 2, 4, 4, 8]),
            schedule,
            tries_paths: !rng.one_in(4),
        };
        let size = *rng.choose(&[64 << 10, 128 << 10, 200_000, 512 << 10]);
        let transfer = Transfer {
            connections: 1 + rng.index(2),
            size,
            depth: 1 + rng.below(8),
            warm_up: SECOND / 2,
            length: 4 * SECOND,
        };
        let foreign = match rng.one_in(3) {
            true => (0..rng.index(5)).map(|_| rng.index(count)).collect(),
            false => Vec::new(),
        };
        let outage = |_| {
            let begin = SECOND / 2 + rng.below(2 * SECOND);
            (rng.index(count), begin, begin + (50 + rng.below(750)) * MILLISECOND)
        };
        let outages =
            if seed.is_multiple_of(3) { (0..2).map(outage).collect() } else { Vec::new() };
        let tcp = TcpSettings::plain(algorithm, PACKET_BYTES);
        Self { seed, links, tcp, settings, transfer, foreign, outages }
    }

    /// The network with its faults and foreign flows.
    fn kernel(&self) -> Kernel {
        let mut kernel = Kernel::new(Network::parallel(&self.links), self.seed);
        for (link, begin, end) in &self.outages {
            for port in [*link, *link + self.links.len()] {
                kernel.set_down(*begin, port, true);
                kernel.set_down(*end, port, false);
            }
        }
        for link in &self.foreign {
            let tcp = TcpSettings::plain(Algorithm::Cubic, PACKET_BYTES);
            kernel.open_greedy_by(*link, tcp);
        }
        kernel
    }

    /// Runs it, and judges it.
    ///
    /// # Errors
    /// What does not hold.
    pub(crate) fn check(&self) -> Result<Measured, String> {
        let mut kernel = self.kernel();
        let contender = Contender::Evenkeel(self.settings);
        let measured = self.transfer.run(&mut kernel, self.tcp, contender)?;
        if measured.longest_gap > MAX_GAP {
            let gap = measured.longest_gap / MILLISECOND;
            return Err(format!("no message was complete for {gap} ms"));
        }
        let in_progress = self.transfer.size * self.transfer.depth;
        let is_static = self.settings.schedule != Schedule::Pull;
        if self.outages.is_empty() && in_progress >= 1 << 20 && !is_static {
            let plain = self.plain_rate();
            if measured.rate < MIN_SHARE * plain {
                return Err(format!(
                    "{:.1} MB/s, and plain TCP has {:.1} MB/s with as many flows",
                    measured.rate / 1e6,
                    plain / 1e6
                ));
            }
        }
        Ok(measured)
    }

    /// Bytes per second that as many plain flows get in the same place.
    fn plain_rate(&self) -> f64 {
        let mut kernel = self.kernel();
        let flows = self.settings.flows * self.transfer.connections;
        let open = |_| kernel.open_greedy([0, 1], self.tcp);
        let flows: Vec<_> = (0..flows).map(open).collect();
        kernel.next(self.transfer.warm_up);
        let acked = |kernel: &Kernel| flows.iter().map(|flow| kernel.acked(*flow)).sum::<u64>();
        let before = acked(&kernel);
        kernel.next(self.transfer.length);
        let time = (self.transfer.length - self.transfer.warm_up) as f64 / 1e9;
        (acked(&kernel) - before) as f64 / time
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Thousands are checked by `evenkeel-simulate check --seeds N`.
    #[test]
    fn connections_on_drawn_networks_deliver_each_byte_once_and_never_starve() {
        for seed in 0..12 {
            let case = Case::new(seed);
            if let Err(failure) = case.check() {
                panic!("seed {seed}: {failure}: {case:?}");
            }
        }
    }

    #[test]
    fn same_seed_gives_the_same_run() {
        let run = || Case::new(3).check().map(|measured| (measured.rate, measured.events));
        assert_eq!(run(), run());
    }
}
