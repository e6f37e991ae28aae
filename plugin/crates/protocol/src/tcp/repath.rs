//! When to look for other paths, and which flows to give up for them.

use std::time::Duration;

/// How long the flows are observed before anything is concluded.
const PERIOD: Duration = Duration::from_millis(90);
/// A gain of the whole rate by less than this is none.
const GAIN: f64 = 1.05;
/// A loss of the whole rate by more than this, in so many periods one after the other, means that the paths have changed.
const LOSS: f64 = 0.85;
const BELIEVED: u32 = 3;
/// Share of a period in which flows had something to deliver, from which on their paths were the limit. More than `LOSS`:
/// who goes at the pace of another, and has as much less to do, must not take that one's loss for its own.
const BUSY: f64 = 0.9;
/// How long nothing is tried after it has not helped; doubled each time, up to the limit.
const FIRST_REST: Duration = Duration::from_millis(400);
const LONGEST_REST: Duration = Duration::from_secs(120);
/// A round during which less than this share gets through is over at once.
const HARM: f64 = 0.6;
/// With a few flows, this many are opened in a round at first: of four paths, eight more flows miss one every tenth time.
const MANY: usize = 12;
/// But no more than whose first bytes, of which each sends so many at once (RFC 6928), the paths carry in this time: they
/// all may be on one path, in one short queue.
const FIRST_BYTES: f64 = 14_600.0;
const BURST: Duration = Duration::from_micros(2500);
/// After so many rounds in vain it is as many as there are, since all that begin at once disturb each other.
const THOROUGH: u32 = 2;
/// Flows that carry less than this in a period, in bytes each, are not limited by their paths.
const MIN_BYTES: u64 = 128 << 10;

/// What a flow has done in all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowStats {
    /// The flow's number.
    pub flow: u32,
    /// Payload bytes.
    pub bytes: u64,
    /// Time in which it had something to deliver and the peer let it.
    pub busy: Duration,
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RepathAction {
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
/// The ranks of a ring all go at the pace of the slowest, so that a round of one is a loss for all. Whose paths are not the
/// limit must not look for others then, or rounds would wake rounds for ever: a period in which flows ran out of work, or
/// the peer did not let them deliver, says nothing.
///
/// Times are given as durations since any fixed moment.
#[derive(Debug)]
pub struct Repath {
    /// Flows that the connection is to have.
    flows: usize,
    /// What each flow had carried when the period began.
    before: Vec<FlowStats>,
    since: Option<Duration>,
    round: Option<Round>,
    /// A flow was closed in the last period.
    unsettled: bool,
    /// Most bytes per second so far, or since they fell.
    best: f64,
    /// Periods in a row with less than that.
    losses: u32,
    rest: Duration,
    not_before: Duration,
    /// Rounds that did not help.
    vain: u32,
}

#[derive(Clone, Copy, Debug)]
struct Round {
    /// Most bytes per second before it.
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

impl FlowStats {
    /// What the flow has done since it had done that.
    fn since(&self, before: &Self) -> Self {
        let bytes = self.bytes.saturating_sub(before.bytes);
        Self { flow: self.flow, bytes, busy: self.busy.saturating_sub(before.busy) }
    }
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
            best: 0.0,
            losses: 0,
            rest: FIRST_REST,
            not_before: Duration::ZERO,
            vain: 0,
        }
    }

    /// Some time has passed. `busy`: there are messages to send. `carried`: what each flow has done.
    pub fn tick(&mut self, now: Duration, busy: bool, carried: &[FlowStats]) -> RepathAction {
        let known = carried.len() == self.before.len()
            && carried.iter().zip(&self.before).all(|(new, old)| new.flow == old.flow);
        let Some(since) = self.since.filter(|_| busy && known) else {
            self.begin(now, carried);
            if !busy {
                self.since = None;
            }
            return RepathAction::Nothing;
        };
        let time = now.saturating_sub(since);
        if time < PERIOD {
            return RepathAction::Nothing;
        }
        let moved: Vec<_> =
            carried.iter().zip(&self.before).map(|(new, old)| new.since(old)).collect();
        let total: u64 = moved.iter().map(|flow| flow.bytes).sum();
        let rate = total as f64 / time.as_secs_f64();
        self.begin(now, carried);
        if carried.len() > self.flows {
            self.unsettled = true;
            return self.thin_out(rate, &moved);
        }
        if carried.len() < self.flows || total < MIN_BYTES * carried.len() as u64 {
            return RepathAction::Nothing;
        }
        if std::mem::take(&mut self.unsettled) {
            // The others need a moment to take over what the last one had.
            return RepathAction::Nothing;
        }
        if let Some(round) = self.round.take() {
            let helped = rate > round.rate * GAIN;
            self.rest = if helped { FIRST_REST } else { (self.rest * 2).min(LONGEST_REST) };
            self.not_before = now + self.rest;
            self.vain = self.vain.saturating_add(u32::from(!helped));
        }
        let busy = moved.iter().map(|flow| flow.busy).sum::<Duration>() / moved.len() as u32;
        if busy < time.mul_f64(BUSY) {
            self.losses = 0;
            return RepathAction::Nothing;
        }
        self.losses = if rate < self.best * LOSS { self.losses + 1 } else { 0 };
        self.best = self.best.max(rate);
        if self.losses == BELIEVED {
            self.losses = 0;
            self.best = rate;
            self.rest = FIRST_REST;
            self.not_before = now;
        }
        if now < self.not_before {
            return RepathAction::Nothing;
        }
        let newest = carried.iter().map(|flow| flow.flow).max().unwrap_or_default();
        self.round = Some(Round { rate: self.best, newest, stage: Stage::Begun });
        let harmless = (self.best * BURST.as_secs_f64() / FIRST_BYTES) as usize;
        let many = if self.vain < THOROUGH { MANY.min(3 * self.flows).min(harmless) } else { 0 };
        RepathAction::Open(self.flows.max(many))
    }

    /// Whether a round is going on.
    pub fn is_trial_running(&self) -> bool {
        self.round.is_some()
    }

    /// Whether this flow was there before the round that is going on.
    pub fn predates_trial(&self, flow: u32) -> bool {
        self.round.is_none_or(|round| flow <= round.newest)
    }

    /// What to close while there are more flows than the connection is to have. `moved`: what each flow has done in the
    /// period, at this rate together.
    fn thin_out(&mut self, rate: f64, moved: &[FlowStats]) -> RepathAction {
        let slowest = |moved: &[FlowStats]| {
            let slowest = moved.iter().min_by_key(|flow| flow.bytes);
            slowest.map_or(RepathAction::Nothing, |slowest| RepathAction::Close(vec![slowest.flow]))
        };
        // Flows in place of lost ones may have come after others were opened.
        let Some(round) = &mut self.round else { return slowest(moved) };
        match round.stage {
            Stage::Begun if rate >= round.rate * HARM => {
                round.stage = Stage::Settled;
                RepathAction::Nothing
            }
            Stage::Begun | Stage::Settled if rate <= round.rate * GAIN => {
                let new = moved.iter().map(|flow| flow.flow).filter(|flow| *flow > round.newest);
                let new: Vec<_> = new.take(moved.len() - self.flows).collect();
                // There may have been more old ones than it is to have.
                if new.is_empty() { slowest(moved) } else { RepathAction::Close(new) }
            }
            Stage::Begun | Stage::Settled | Stage::Helps => {
                round.stage = Stage::Helps;
                slowest(moved)
            }
        }
    }

    fn begin(&mut self, now: Duration, carried: &[FlowStats]) {
        self.since = Some(now);
        self.before.clear();
        self.before.extend_from_slice(carried);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As often as connections look after their flows.
    const TICK: Duration = Duration::from_millis(125);

    /// Flows that are hashed onto links, which their flows share evenly.
    struct Network {
        links: Vec<f64>,
        /// What each flow has done, and its link.
        flows: Vec<(FlowStats, usize)>,
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
                let flow = FlowStats { flow: self.next, bytes: 0, busy: Duration::ZERO };
                self.flows.push((flow, link));
                self.next += 1;
            }
        }

        /// Bytes per second that all flows can carry.
        fn rate(&self) -> f64 {
            let used = |link: &usize| self.flows.iter().any(|flow| flow.1 == *link);
            (0..self.links.len()).filter(used).map(|link| self.links[link]).sum()
        }

        /// Carries so many bytes per second in all, with something to deliver during this share of the time.
        fn pass(&mut self, time: Duration, rate: f64, busy: f64) {
            let share = rate * time.as_secs_f64() / self.rate();
            for (link, rate) in self.links.iter().enumerate() {
                let flows: Vec<_> = self.flows.iter_mut().filter(|flow| flow.1 == link).collect();
                let each = rate * share / flows.len().max(1) as f64;
                for (flow, _) in flows {
                    flow.bytes += each as u64;
                    flow.busy += time.mul_f64(busy);
                }
            }
        }

        /// Whether there are more flows than the connection is to have.
        fn is_crowded(&self) -> bool {
            self.flows.len() > 4
        }

        /// Does as it is told. Returns how many flows it has opened.
        fn look_after(&mut self, repath: &mut Repath, now: Duration) -> usize {
            let carried: Vec<_> = self.flows.iter().map(|flow| flow.0).collect();
            match repath.tick(now, true, &carried) {
                RepathAction::Nothing => {}
                RepathAction::Open(count) => {
                    self.open(count);
                    return count;
                }
                RepathAction::Close(numbers) => {
                    self.flows.retain(|flow| !numbers.contains(&flow.0.flow))
                }
            }
            0
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
            let rate = network.rate();
            rates.push(rate);
            network.pass(step, rate, 1.0);
            network.look_after(repath, now);
            crowded += usize::from(network.is_crowded());
            assert!((4..=16).contains(&network.flows.len()));
        }
        let rate = rates.iter().rev().take(10).sum::<f64>() / 10.0;
        (rate, crowded as f64 / rates.len() as f64)
    }

    /// Connections each of which sends on what the one before it brings, so that all go at the pace of the slowest.
    struct Ring {
        ranks: Vec<(Network, Repath)>,
        now: Duration,
        /// How much later than the one before it each begins to look after its flows.
        phase: Duration,
        /// What a round leaves of the rate of the rank that has it.
        left: f64,
    }

    impl Ring {
        fn new(ranks: usize, links: &[f64], phase: Duration, left: f64) -> Self {
            let rank = |rank| (Network::new(links, 4, rank as u64 * 7919 + 1), Repath::new(4));
            Self { ranks: (0..ranks).map(rank).collect(), now: Duration::ZERO, phase, left }
        }

        /// Lets it work for this long. Returns the mean rate, and the share of the time in which any rank had more flows
        /// than it is to have.
        fn run(&mut self, time: Duration) -> (f64, f64) {
            let step = Duration::from_millis(5);
            let steps = time.div_duration_f64(step) as u32;
            let (mut rate, mut crowded) = (0.0, 0);
            for _ in 0..steps {
                self.now += step;
                let able = |network: &Network| {
                    network.rate() * if network.is_crowded() { self.left } else { 1.0 }
                };
                let all = self.ranks.iter().map(|(network, _)| able(network));
                let pace = all.reduce(f64::min).unwrap_or_default();
                rate += pace / f64::from(steps);
                crowded += u32::from(self.ranks.iter().any(|(network, _)| network.is_crowded()));
                for (rank, (network, repath)) in self.ranks.iter_mut().enumerate() {
                    network.pass(step, pace, pace / able(network));
                    let late = self.now.checked_sub(self.phase * rank as u32);
                    if late.is_some_and(|late| late.as_nanos() % TICK.as_nanos() == 0) {
                        network.look_after(repath, self.now);
                    }
                }
            }
            (rate, f64::from(crowded) / f64::from(steps))
        }
    }

    #[test]
    fn links_that_no_flow_was_hashed_to_are_found() {
        let (mut before, mut after) = (0.0, 0.0);
        for seed in 1..=200 {
            let mut network = Network::new(&[125e6; 4], 4, seed * 7919);
            before += network.rate() / 500e6;
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
    fn ranks_of_a_ring_do_not_wake_each_other() {
        for (ranks, phase) in [(2, 30), (4, 125), (8, 700)] {
            for left in [0.75, 0.85, 0.95] {
                let mut ring = Ring::new(ranks, &[125e6], Duration::from_millis(phase), left);
                ring.run(Duration::from_secs(60));
                let (rate, crowded) = ring.run(Duration::from_secs(120));
                assert!(crowded < 0.05, "{ranks} ranks, {phase} ms apart, {left}: {crowded}");
                assert!(rate > 0.98 * 125e6, "{ranks} ranks, {phase} ms apart, {left}: {rate}");
            }
        }
    }

    #[test]
    fn who_holds_up_a_ring_finds_better_paths() {
        let mut ring = Ring::new(4, &[125e6; 4], Duration::from_millis(30), 0.75);
        for (rank, (network, _)) in ring.ranks.iter_mut().enumerate() {
            let links = network.flows.iter_mut().enumerate();
            links.for_each(|(link, flow)| flow.1 = if rank == 0 { 0 } else { link });
        }
        ring.run(Duration::from_secs(1));
        assert!(ring.ranks[1..].iter().all(|(network, _)| network.next == 4), "others look, too");
        ring.run(Duration::from_secs(9));
        let (rate, _) = ring.run(Duration::from_secs(10));
        assert!(rate > 0.9 * 500e6, "{rate}");
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
    fn a_dip_is_no_change() {
        // Share of the link's rate, and of the time in which there was something to deliver.
        let (full, dip, starved) = ((1.0, 1.0), (0.5, 1.0), (0.5, 0.5));
        for (periods, opened) in [
            ([dip, dip, full, dip, dip], 0),
            ([dip, dip, starved, dip, dip], 0),
            ([starved, starved, starved, starved, starved], 0),
            ([full, dip, dip, dip, full], 4),
        ] {
            let mut network = Network::new(&[125e6], 4, 1);
            let mut repath = Repath::new(4);
            let mut now = Duration::from_secs(60);
            run(&mut network, &mut repath, Duration::ZERO, now);
            let looked = periods.map(|(rate, busy)| {
                now += TICK;
                network.pass(TICK, rate * 125e6, busy);
                network.look_after(&mut repath, now)
            });
            assert_eq!(looked.iter().sum::<usize>(), opened, "{periods:?}");
        }
    }

    #[test]
    fn a_round_that_does_harm_is_over_at_once() {
        let mut repath = Repath::new(4);
        let mut network = Network::new(&[125e6], 4, 1);
        let mut now = Duration::ZERO;
        let mut step = |network: &mut Network, rate: f64| {
            now += TICK;
            network.pass(TICK, rate, 1.0);
            let carried: Vec<_> = network.flows.iter().map(|flow| flow.0).collect();
            repath.tick(now, true, &carried)
        };
        assert_eq!(step(&mut network, 0.0), RepathAction::Nothing);
        assert_eq!(step(&mut network, 100e6), RepathAction::Open(12), "rounds may help");
        network.open(12);
        assert_eq!(step(&mut network, 50e6), RepathAction::Nothing, "there are new ones");
        assert_eq!(step(&mut network, 50e6), RepathAction::Close((4..16).collect()));
    }

    #[test]
    fn fewer_are_opened_after_rounds_in_vain() {
        let mut network = Network::new(&[125e6], 4, 1);
        let mut repath = Repath::new(4);
        let opened: Vec<_> = (1..100)
            .filter_map(|step| {
                network.pass(TICK, 125e6, 1.0);
                let opened = network.look_after(&mut repath, step * TICK);
                (opened > 0).then_some(opened)
            })
            .collect();
        assert_eq!(opened[..3], [12, 12, 4]);
    }

    #[test]
    fn a_thin_path_gets_few_at_once() {
        let mut network = Network::new(&[30e6], 4, 1);
        let mut repath = Repath::new(4);
        let opened = (1..4).map(|step| {
            network.pass(TICK, 30e6, 1.0);
            network.look_after(&mut repath, step * TICK)
        });
        assert_eq!(opened.max(), Some(5));
    }

    #[test]
    fn who_has_lost_all_flows_waits_for_others() {
        let mut repath = Repath::new(4);
        for step in 0..10 {
            assert_eq!(repath.tick(step * TICK, true, &[]), RepathAction::Nothing);
        }
    }

    #[test]
    fn idle_connections_are_left_alone() {
        let mut repath = Repath::new(4);
        let network = Network::new(&[125e6], 4, 1);
        let flows: Vec<_> = network.flows.iter().map(|flow| flow.0).collect();
        for step in 0..100 {
            let now = Duration::from_millis(200 * step);
            assert_eq!(repath.tick(now, step % 2 == 0, &flows), RepathAction::Nothing);
        }
    }
}
