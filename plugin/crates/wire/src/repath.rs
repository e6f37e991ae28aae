//! When to look for other paths, and which flows to give up for them.

use std::time::Duration;

/// How long the flows are observed before anything is concluded.
const PERIOD: Duration = Duration::from_millis(90);
/// A gain of the whole rate by less than this is none.
const GAIN: f64 = 1.05;
/// A loss of the whole rate by more than this means that the paths have changed.
const LOSS: f64 = 0.85;
/// How long nothing is tried after it has not helped; doubled each time, up to the limit.
const FIRST_REST: Duration = Duration::from_millis(400);
const LONGEST_REST: Duration = Duration::from_secs(10);
/// A round during which less than this share gets through is over at once.
const HARM: f64 = 0.6;
/// With a few flows, this many are opened in a round at first: of four paths, eight more flows miss one every tenth time.
const MANY: usize = 12;
/// After so many rounds in vain it is as many as there are, since all that begin at once disturb each other.
const THOROUGH: u32 = 2;
/// Flows that carry less than this in a period, in bytes each, are not limited by their paths.
const LEAST_BYTES: u64 = 128 << 10;

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Go on as it is.
    Nothing,
    /// Open this many more flows: they may find other paths.
    Open(usize),
    /// Let these flows drain, then close them.
    Close(Vec<u32>),
}

/// Finds paths that no flow uses, by trying.
///
/// What a path yields shows only when it is used, so it goes in rounds: open more flows, up to three
/// times as many as the connection has, and see whether all together deliver more. If they don't, they
/// are closed again. If they do, the slowest ones are closed, one at a time, until there are as many
/// as before. A flow that shares its path with others is slow, and
/// closing it makes the others faster, so what is left spreads over the paths there are. Rounds
/// that don't help make the next one come later.
///
/// Times are given as durations since any fixed moment.
#[derive(Debug)]
pub struct Repath {
    /// Flows that the connection is to have.
    flows: usize,
    /// What each flow had carried when the period began.
    before: Vec<(u32, u64)>,
    since: Option<Duration>,
    round: Option<Round>,
    /// A flow was closed in the last period.
    unsettled: bool,
    /// Bytes per second after the last round, or since they fell.
    settled: f64,
    rest: Duration,
    not_before: Duration,
    /// Rounds that did not help.
    vain: u32,
}

#[derive(Clone, Copy, Debug)]
struct Round {
    /// Bytes per second before it.
    rate: f64,
    /// Highest number of the flows there were before it.
    newest: u32,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The new flows have just begun.
    Begun,
    /// They have had a period to come up to speed.
    Settled,
    /// They are worth it.
    Helps,
}

impl Repath {
    /// For a connection that is to have this many flows.
    pub fn new(flows: usize) -> Self {
        Self {
            flows,
            before: Vec::new(),
            since: None,
            round: None,
            unsettled: false,
            settled: 0.0,
            rest: FIRST_REST,
            not_before: Duration::ZERO,
            vain: 0,
        }
    }

    /// Some time has passed. `busy`: there are messages to send. `carried`: each flow's number and
    /// the bytes it has carried in all.
    pub fn tick(&mut self, now: Duration, busy: bool, carried: &[(u32, u64)]) -> Step {
        let known = carried.len() == self.before.len()
            && carried.iter().zip(&self.before).all(|(new, old)| new.0 == old.0);
        let Some(since) = self.since.filter(|_| busy && known) else {
            self.begin(now, carried);
            if !busy {
                self.since = None;
            }
            return Step::Nothing;
        };
        let time = now.saturating_sub(since);
        if time < PERIOD {
            return Step::Nothing;
        }
        let bytes = |(new, old): (&(u32, u64), &(u32, u64))| (new.0, new.1 - old.1);
        let moved: Vec<(u32, u64)> = carried.iter().zip(&self.before).map(bytes).collect();
        let total: u64 = moved.iter().map(|(_, bytes)| bytes).sum();
        let rate = total as f64 / time.as_secs_f64();
        self.begin(now, carried);
        if carried.len() > self.flows {
            self.unsettled = true;
            return self.thin_out(rate, &moved);
        }
        if total < LEAST_BYTES * carried.len() as u64 {
            return Step::Nothing;
        }
        if std::mem::take(&mut self.unsettled) {
            // The others need a moment to take over what the last one had.
            return Step::Nothing;
        }
        if let Some(round) = self.round.take() {
            let helped = rate > round.rate * GAIN;
            self.rest = if helped { FIRST_REST } else { (self.rest * 2).min(LONGEST_REST) };
            self.not_before = now + self.rest;
            self.settled = rate;
            self.vain = self.vain.saturating_add(u32::from(!helped));
        } else if rate < self.settled * LOSS {
            self.rest = FIRST_REST;
            self.not_before = self.not_before.min(now + self.rest);
            self.settled = rate;
        }
        if carried.len() < self.flows || now < self.not_before {
            return Step::Nothing;
        }
        let newest = carried.iter().map(|(flow, _)| *flow).max().unwrap_or_default();
        self.round = Some(Round { rate, newest, stage: Stage::Begun });
        let many = if self.vain < THOROUGH { MANY.min(3 * self.flows) } else { 0 };
        Step::Open(self.flows.max(many))
    }

    /// Whether a round is going on.
    pub fn is_trying(&self) -> bool {
        self.round.is_some()
    }

    /// Whether this flow was there before the round that is going on.
    pub fn is_old(&self, flow: u32) -> bool {
        self.round.is_none_or(|round| flow <= round.newest)
    }

    /// What to close while there are more flows than the connection is to have. `moved`: each flow's number and the bytes
    /// it has carried in the period, at this rate together.
    fn thin_out(&mut self, rate: f64, moved: &[(u32, u64)]) -> Step {
        let slowest = |moved: &[(u32, u64)]| {
            let slowest = moved.iter().min_by_key(|(_, bytes)| *bytes);
            slowest.map_or(Step::Nothing, |(flow, _)| Step::Close(vec![*flow]))
        };
        // Flows in place of lost ones may have come after others were opened.
        let Some(round) = &mut self.round else { return slowest(moved) };
        match round.stage {
            Stage::Begun if rate >= round.rate * HARM => {
                round.stage = Stage::Settled;
                Step::Nothing
            }
            Stage::Begun | Stage::Settled if rate <= round.rate * GAIN => {
                let new = moved.iter().map(|(flow, _)| *flow).filter(|flow| *flow > round.newest);
                let new: Vec<_> = new.take(moved.len() - self.flows).collect();
                // There may have been more old ones than it is to have.
                if new.is_empty() { slowest(moved) } else { Step::Close(new) }
            }
            Stage::Begun | Stage::Settled | Stage::Helps => {
                round.stage = Stage::Helps;
                slowest(moved)
            }
        }
    }

    fn begin(&mut self, now: Duration, carried: &[(u32, u64)]) {
        self.since = Some(now);
        self.before.clear();
        self.before.extend_from_slice(carried);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Flows that are hashed onto links, which their flows share evenly.
    struct Network {
        links: Vec<f64>,
        /// Number, link and bytes carried of each flow.
        flows: Vec<(u32, usize, u64)>,
        next: u32,
        random: u64,
    }

    impl Network {
        fn new(links: &[f64], flows: usize, seed: u64) -> Self {
            let (links, flows_before) = (links.to_vec(), Vec::new());
            let mut network = Self { links, flows: flows_before, next: 0, random: seed };
            network.open(flows);
            network
        }

        fn open(&mut self, count: usize) {
            for _ in 0..count {
                self.random = self.random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(7);
                let link = (self.random >> 33) as usize % self.links.len();
                self.flows.push((self.next, link, 0));
                self.next += 1;
            }
        }

        /// Bytes per second of all flows.
        fn pass(&mut self, time: Duration) -> f64 {
            let mut total = 0.0;
            for (link, rate) in self.links.iter().enumerate() {
                let share = self.flows.iter_mut().filter(|flow| flow.1 == link);
                let flows: Vec<_> = share.collect();
                let each = rate / flows.len().max(1) as f64;
                for flow in flows {
                    flow.2 += (each * time.as_secs_f64()) as u64;
                    total += each;
                }
            }
            total
        }
    }

    /// Lets it work for this long. Returns the mean rate of the last second, and the share of the time in which there
    /// were more flows than the connection is to have.
    fn run(
        network: &mut Network,
        repath: &mut Repath,
        begin: Duration,
        time: Duration,
    ) -> (f64, f64) {
        let step = Duration::from_millis(100);
        let mut rates = Vec::new();
        let mut crowded = 0;
        let mut now = begin;
        while now < begin + time {
            now += step;
            rates.push(network.pass(step));
            let carried: Vec<_> = network.flows.iter().map(|flow| (flow.0, flow.2)).collect();
            match repath.tick(now, true, &carried) {
                Step::Nothing => {}
                Step::Open(count) => network.open(count),
                Step::Close(numbers) => network.flows.retain(|flow| !numbers.contains(&flow.0)),
            }
            crowded += usize::from(network.flows.len() > 4);
            assert!((4..=16).contains(&network.flows.len()));
        }
        let rate = rates.iter().rev().take(10).sum::<f64>() / 10.0;
        (rate, crowded as f64 / rates.len() as f64)
    }

    #[test]
    fn links_that_no_flow_was_hashed_to_are_found() {
        let (mut before, mut after) = (0.0, 0.0);
        for seed in 1..=200 {
            let mut network = Network::new(&[125e6; 4], 4, seed * 7919);
            before += network.pass(Duration::ZERO) / 500e6;
            let mut repath = Repath::new(4);
            after +=
                run(&mut network, &mut repath, Duration::ZERO, Duration::from_secs(5)).0 / 500e6;
        }
        assert!(before / 200.0 < 0.75, "{before}");
        assert!(after / 200.0 > 0.98, "{after}");
    }

    #[test]
    fn trying_in_vain_becomes_rare() {
        let mut network = Network::new(&[125e6], 4, 1);
        let mut repath = Repath::new(4);
        let ten = Duration::from_secs(10);
        let (_, crowded) = run(&mut network, &mut repath, Duration::ZERO, ten);
        assert!(crowded < 0.25, "{crowded}");
        run(&mut network, &mut repath, ten, Duration::from_secs(20));
        let opened = network.next;
        run(&mut network, &mut repath, Duration::from_secs(30), Duration::from_secs(60));
        assert!(network.next - opened <= 6 * 12, "{} flows opened", network.next - opened);
    }

    #[test]
    fn a_change_for_the_worse_is_answered_soon() {
        let mut network = Network::new(&[125e6; 4], 4, 3);
        let mut repath = Repath::new(4);
        run(&mut network, &mut repath, Duration::ZERO, Duration::from_secs(60));
        // All flows end up on one link, as after an outage of the others.
        network.flows.iter_mut().for_each(|flow| flow.1 = 0);
        let seconds = Duration::from_secs(60);
        let (rate, _) = run(&mut network, &mut repath, seconds, Duration::from_secs(4));
        assert!(rate > 300e6, "{rate}");
    }

    #[test]
    fn a_round_that_does_harm_is_over_at_once() {
        let mut repath = Repath::new(4);
        let mut carried: Vec<(u32, u64)> = (0..4).map(|flow| (flow, 0)).collect();
        let mut now = Duration::ZERO;
        let mut step = |carried: &mut Vec<(u32, u64)>, bytes: u64| {
            now += Duration::from_millis(100);
            carried.iter_mut().for_each(|flow| flow.1 += bytes);
            repath.tick(now, true, carried)
        };
        assert_eq!(step(&mut carried, 0), Step::Nothing);
        assert_eq!(step(&mut carried, 8 << 20), Step::Open(12), "rounds may help");
        carried.extend((4..16).map(|flow| (flow, 0)));
        assert_eq!(step(&mut carried, 1 << 20), Step::Nothing, "there are new ones");
        assert_eq!(step(&mut carried, 1 << 20), Step::Close((4..16).collect()));
    }

    #[test]
    fn fewer_are_opened_after_rounds_in_vain() {
        let mut network = Network::new(&[125e6], 4, 1);
        let mut repath = Repath::new(4);
        let mut opened = Vec::new();
        for step in 1..100 {
            let time = Duration::from_millis(100);
            network.pass(time);
            let carried: Vec<_> = network.flows.iter().map(|flow| (flow.0, flow.2)).collect();
            match repath.tick(step * time, true, &carried) {
                Step::Nothing => {}
                Step::Open(count) => {
                    network.open(count);
                    opened.push(count);
                }
                Step::Close(numbers) => network.flows.retain(|flow| !numbers.contains(&flow.0)),
            }
        }
        assert_eq!(opened[..3], [12, 12, 4]);
    }

    #[test]
    fn idle_connections_are_left_alone() {
        let mut repath = Repath::new(4);
        let flows: Vec<(u32, u64)> = (0..4).map(|flow| (flow, 0)).collect();
        for step in 0..100 {
            let now = Duration::from_millis(200 * step);
            assert_eq!(repath.tick(now, step % 2 == 0, &flows), Step::Nothing);
        }
    }
}
