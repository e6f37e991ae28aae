//! Re-pathing: when to try other paths, and which flows to close for them.

use std::num::NonZeroUsize;
use std::time::Duration;

/// How long the flows are measured before a decision.
const PERIOD: Duration = Duration::from_millis(90);
/// Minimum gain of the total rate that counts as one.
const GAIN: f64 = 1.05;
/// When the total rate falls below this share in this number of consecutive periods, the paths have changed.
const LOSS: f64 = 0.85;
const MIN_LOSSES: u32 = 3;
/// Share of a period in which flows had bytes to deliver, above which their paths were the limit. It is above `LOSS`: a
/// rank that runs at the speed of a slower one has that much less to send, and must not mistake this for a loss of its own.
const BUSY: f64 = 0.9;
/// Backoff after a trial that did not help; doubled each time, up to the limit.
const MIN_BACKOFF: Duration = Duration::from_millis(400);
const MAX_BACKOFF: Duration = Duration::from_secs(120);
/// A trial during which the rate falls below this share ends at once.
const HARM: f64 = 0.6;
/// With a few flows, the first trials open this many. Of four paths, eight more flows miss one in a tenth of the trials.
const MAX_OPENED: usize = 12;
/// The number is limited so that the paths carry the initial windows of all (RFC 6928) in this time: all flows may be on
/// one path, in one short queue.
const INITIAL_WINDOW: f64 = 14_600.0;
const BURST: Duration = Duration::from_micros(2500);
/// After this number of failed trials, a trial opens only as many flows as there were at first, since flows that start
/// together disturb each other.
const THOROUGH_TRIALS: u32 = 2;
/// A connection whose trials help keeps up to this many flows: with fewer, a slow path would have none.
const MAX_KEPT: usize = 16;
/// It has no more than this many times the flows that it began with.
const MAX_GROWTH: usize = 4;
/// Flows that each carry fewer bytes than this in a period are not limited by their paths.
const MIN_BYTES: u64 = 128 << 10;

/// What a flow has carried so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FlowStats {
    /// The flow's number.
    pub(crate) flow: u32,
    /// Payload bytes.
    pub(crate) bytes: u64,
    /// Time in which it had bytes to deliver and the peer's window was open.
    pub(crate) busy: Duration,
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RepathAction {
    /// Keep the flows.
    Nothing,
    /// Open this many more flows: they may find other paths.
    Open(usize),
    /// The new flows carry more: keep this many more than before, or fewer, by [`Repath::keep`].
    Keep(usize),
    /// Let these flows drain, then close them.
    Close(Vec<u32>),
}

/// Finds by trial paths that no flow uses.
///
/// The rate of a path shows only when it is used. A trial opens more flows, up to three times as many as the connection
/// has, and measures whether all together deliver more. If they don't, they are closed again. If they do, the connection
/// keeps up to 16 flows from now on. With so few as it had, it could not use every path: there may be more paths than flows, and
/// the slowest flow may be the only one on its path. Beyond that, the slowest flows are closed, one at a time. A flow that
/// shares its path with others is slow, and closing it makes the others faster, so that the remaining flows spread over the
/// available paths. A trial that does not help delays the next one.
///
/// The ranks of a ring all run at the speed of the slowest, so a trial of one rank is a loss for all. A rank whose paths
/// are not the limit must not start a trial then, or trials would trigger trials for ever. Periods in which flows ran out
/// of bytes, or in which the peer's window was closed, are therefore ignored.
///
/// Times are given as durations since any fixed moment.
#[derive(Debug)]
pub(crate) struct Repath {
    /// Number of flows that the connection should have.
    flows: usize,
    /// What that was at first, and its maximum.
    first_flows: usize,
    max_flows: usize,
    /// What each flow had carried at the beginning of the period.
    before: Vec<FlowStats>,
    since: Option<Duration>,
    trial: Option<Trial>,
    /// Whether a flow was closed in the last period.
    unsettled: bool,
    /// Maximum rate in bytes per second, since the last change of paths.
    best: f64,
    /// Number of consecutive periods with a lower rate.
    losses: u32,
    backoff: Duration,
    /// No trial begins before this.
    not_before: Duration,
    /// Number of trials that did not help.
    failed_trials: u32,
}

#[derive(Clone, Copy, Debug)]
struct Trial {
    /// Maximum rate in bytes per second before it.
    rate: f64,
    /// Highest number of a flow that was open before it.
    newest: u32,
    stage: TrialStage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TrialStage {
    /// The new flows are just opened.
    Started,
    /// The new flows have had a period to come up to speed.
    Settled,
    /// The new flows have increased the rate.
    Helpful,
}

impl FlowStats {
    /// What the flow has carried since an earlier moment.
    fn since(&self, before: &Self) -> Self {
        let bytes = self.bytes.saturating_sub(before.bytes);
        Self { flow: self.flow, bytes, busy: self.busy.saturating_sub(before.busy) }
    }
}

impl Repath {
    /// For a connection that should have this many flows.
    pub(crate) fn new(flows: NonZeroUsize) -> Self {
        let flows = flows.get();
        Self {
            flows,
            first_flows: flows,
            max_flows: (flows * MAX_GROWTH).min(MAX_KEPT).max(flows),
            before: Vec::new(),
            since: None,
            trial: None,
            unsettled: false,
            best: 0.0,
            losses: 0,
            backoff: MIN_BACKOFF,
            not_before: Duration::ZERO,
            failed_trials: 0,
        }
    }

    /// To be called at intervals. `busy`: there are messages to send. `carried`: what each flow has carried.
    pub(crate) fn tick(
        &mut self,
        now: Duration,
        busy: bool,
        carried: &[FlowStats],
    ) -> RepathAction {
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
            // The others need a moment to take over the closed flow's share.
            return RepathAction::Nothing;
        }
        if let Some(trial) = self.trial.take() {
            let helped = rate > trial.rate * GAIN;
            self.backoff = if helped { MIN_BACKOFF } else { (self.backoff * 2).min(MAX_BACKOFF) };
            self.not_before = now + self.backoff;
            self.failed_trials = self.failed_trials.saturating_add(u32::from(!helped));
        }
        let busy = moved.iter().map(|flow| flow.busy).sum::<Duration>() / moved.len() as u32;
        if busy < time.mul_f64(BUSY) {
            self.losses = 0;
            return RepathAction::Nothing;
        }
        self.losses = if rate < self.best * LOSS { self.losses + 1 } else { 0 };
        self.best = self.best.max(rate);
        if self.losses == MIN_LOSSES {
            self.losses = 0;
            self.best = rate;
            self.backoff = MIN_BACKOFF;
            self.not_before = now;
        }
        if now < self.not_before {
            return RepathAction::Nothing;
        }
        let newest = carried.iter().map(|flow| flow.flow).max().unwrap_or_default();
        self.trial = Some(Trial { rate: self.best, newest, stage: TrialStage::Started });
        let harmless = (self.best * BURST.as_secs_f64() / INITIAL_WINDOW) as usize;
        let is_thorough = self.failed_trials < THOROUGH_TRIALS && self.flows == self.first_flows;
        let opened = if is_thorough { MAX_OPENED.min(3 * self.flows).min(harmless) } else { 0 };
        RepathAction::Open(self.first_flows.max(opened))
    }

    /// Number of flows that the connection should have.
    #[cfg(test)]
    pub(crate) fn flows(&self) -> usize {
        self.flows
    }

    /// The connection should have this many more flows from now on.
    pub(crate) fn keep(&mut self, more: usize) {
        self.flows += more;
    }

    /// Whether a trial is running.
    pub(crate) fn is_trial_running(&self) -> bool {
        self.trial.is_some()
    }

    /// Whether this flow was open before the running trial.
    pub(crate) fn predates_trial(&self, flow: u32) -> bool {
        self.trial.is_none_or(|trial| flow <= trial.newest)
    }

    /// Which flows to close while there are more than the connection should have. `moved`: what each flow has carried in the
    /// period, at this total rate.
    fn thin_out(&mut self, rate: f64, moved: &[FlowStats]) -> RepathAction {
        let slowest = |moved: &[FlowStats]| {
            let slowest = moved.iter().min_by_key(|flow| flow.bytes);
            slowest.map_or(RepathAction::Nothing, |slowest| RepathAction::Close(vec![slowest.flow]))
        };
        // Replacements of lost flows may have been opened after others.
        let Some(trial) = &mut self.trial else { return slowest(moved) };
        match trial.stage {
            TrialStage::Started if rate >= trial.rate * HARM => {
                trial.stage = TrialStage::Settled;
                RepathAction::Nothing
            }
            TrialStage::Started | TrialStage::Settled if rate <= trial.rate * GAIN => {
                let new = moved.iter().map(|flow| flow.flow).filter(|flow| *flow > trial.newest);
                let new: Vec<_> = new.take(moved.len() - self.flows).collect();
                // There may have been too many flows before the trial.
                if new.is_empty() { slowest(moved) } else { RepathAction::Close(new) }
            }
            TrialStage::Started | TrialStage::Settled if self.flows < self.max_flows => {
                trial.stage = TrialStage::Helpful;
                RepathAction::Keep((moved.len() - self.flows).min(self.max_flows - self.flows))
            }
            TrialStage::Started | TrialStage::Settled | TrialStage::Helpful => {
                trial.stage = TrialStage::Helpful;
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

    const FOUR: NonZeroUsize = NonZeroUsize::new(4).unwrap();

    /// The interval at which connections call `tick`.
    const TICK: Duration = Duration::from_millis(125);

    /// Flows that are hashed onto links, which their flows share evenly.
    struct Network {
        links: Vec<f64>,
        /// What each flow has carried, and its link.
        flows: Vec<(FlowStats, usize)>,
        next: u32,
        random: u64,
        /// Number of flows that there should be.
        should_have: usize,
    }

    impl Network {
        fn new(links: &[f64], flows: usize, seed: u64) -> Self {
            let (links, flows_before) = (links.to_vec(), Vec::new());
            let mut network =
                Self { links, flows: flows_before, next: 0, random: seed, should_have: flows };
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

        /// Carries this total rate in bytes per second, with bytes to deliver during this share of the time.
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

        /// Whether there are more flows than the connection should have.
        fn is_crowded(&self) -> bool {
            self.flows.len() > self.should_have
        }

        /// Executes the re-pathing's action. Returns the number of flows that were opened.
        fn apply_tick(&mut self, repath: &mut Repath, now: Duration) -> usize {
            let carried: Vec<_> = self.flows.iter().map(|flow| flow.0).collect();
            match repath.tick(now, true, &carried) {
                RepathAction::Nothing => {}
                RepathAction::Open(count) => {
                    self.open(count);
                    return count;
                }
                RepathAction::Keep(more) => {
                    repath.keep(more);
                    self.should_have = repath.flows();
                }
                RepathAction::Close(numbers) => {
                    self.flows.retain(|flow| !numbers.contains(&flow.0.flow))
                }
            }
            0
        }
    }

    /// Runs for this long. Returns the mean rate of the last second, and the share of the time in which there
    /// were more flows than the connection should have.
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
            network.apply_tick(repath, now);
            crowded += usize::from(network.is_crowded());
            assert!((4..=20).contains(&network.flows.len()));
        }
        let rate = rates.iter().rev().take(10).sum::<f64>() / 10.0;
        (rate, crowded as f64 / rates.len() as f64)
    }

    /// Connections each of which forwards what the one before it delivers, so that all run at the speed of the slowest.
    struct Ring {
        ranks: Vec<(Network, Repath)>,
        now: Duration,
        /// Delay of each rank's ticks after those of the one before it.
        phase: Duration,
        /// Share of a rank's rate that is left during its trial.
        left: f64,
    }

    impl Ring {
        fn new(ranks: usize, links: &[f64], phase: Duration, left: f64) -> Self {
            let rank = |rank| (Network::new(links, 4, rank as u64 * 7919 + 1), Repath::new(FOUR));
            Self { ranks: (0..ranks).map(rank).collect(), now: Duration::ZERO, phase, left }
        }

        /// Runs for this long. Returns the mean rate, and the share of the time in which any rank had more flows
        /// than it should have.
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
                        network.apply_tick(repath, self.now);
                    }
                }
            }
            (rate, f64::from(crowded) / f64::from(steps))
        }
    }

    #[test]
    fn repath_finds_unused_links() {
        let (mut before, mut after) = (0.0, 0.0);
        for seed in 1..=200 {
            let mut network = Network::new(&[125e6; 4], 4, seed * 7919);
            before += network.rate() / 500e6;
            let mut repath = Repath::new(FOUR);
            after +=
                run(&mut network, &mut repath, Duration::ZERO, Duration::from_secs(5)).0 / 500e6;
        }
        assert!(before / 200.0 < 0.75, "{before}");
        assert!(after / 200.0 > 0.98, "{after}");
    }

    /// With one flow less than paths, or with the slowest closed, each seed would lose at least one path.
    #[test]
    fn repath_uses_unequal_links_that_outnumber_the_flows() {
        let links = [1000, 700, 400, 150, 50].map(|mbit| f64::from(mbit) * 125e3);
        let sum: f64 = links.iter().sum();
        let rates: Vec<_> = (1..=200)
            .map(|seed| {
                let mut network = Network::new(&links, 4, seed * 7919);
                let mut repath = Repath::new(FOUR);
                let five = Duration::from_secs(5);
                run(&mut network, &mut repath, Duration::ZERO, five).0 / sum
            })
            .collect();
        let mean = rates.iter().sum::<f64>() / rates.len() as f64;
        let low = rates.iter().filter(|rate| **rate < 0.9).count();
        assert!(mean > 0.97 && low <= 10, "{mean}, {low} of {} below 0.9", rates.len());
    }

    #[test]
    fn repath_keeps_no_more_flows_than_are_granted() {
        let mut network = Network::new(&[125e6; 4], 4, 3);
        network.flows.iter_mut().for_each(|flow| flow.1 = 0);
        let mut repath = Repath::new(FOUR);
        let mut asked = Vec::new();
        for step in 1..100 {
            network.pass(TICK, network.rate(), 1.0);
            let carried: Vec<_> = network.flows.iter().map(|flow| flow.0).collect();
            match repath.tick(step * TICK, true, &carried) {
                RepathAction::Keep(more) => {
                    asked.push(more);
                    repath.keep(if asked.len() == 1 { 2 } else { 0 });
                }
                RepathAction::Open(count) => network.open(count),
                RepathAction::Close(numbers) => {
                    network.flows.retain(|flow| !numbers.contains(&flow.0.flow));
                }
                RepathAction::Nothing => {}
            }
        }
        assert_eq!(asked.first(), Some(&12));
        assert_eq!((repath.flows(), network.flows.len()), (6, 6));
    }

    #[test]
    fn repath_backs_off_after_failed_trials() {
        let mut network = Network::new(&[125e6], 4, 1);
        let mut repath = Repath::new(FOUR);
        let ten = Duration::from_secs(10);
        let (_, crowded) = run(&mut network, &mut repath, Duration::ZERO, ten);
        assert!(crowded < 0.25, "{crowded}");
        run(&mut network, &mut repath, ten, Duration::from_secs(20));
        let opened = network.next;
        run(&mut network, &mut repath, Duration::from_secs(30), Duration::from_secs(60));
        assert!(network.next - opened <= 6 * 12, "{} flows opened", network.next - opened);
    }

    #[test]
    fn repath_trials_do_not_trigger_each_other() {
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
    fn repath_of_the_slowest_rank_finds_better_paths() {
        let mut ring = Ring::new(4, &[125e6; 4], Duration::from_millis(30), 0.75);
        for (rank, (network, _)) in ring.ranks.iter_mut().enumerate() {
            let links = network.flows.iter_mut().enumerate();
            links.for_each(|(link, flow)| flow.1 = if rank == 0 { 0 } else { link });
        }
        ring.run(Duration::from_millis(500));
        assert!(
            ring.ranks[1..].iter().all(|(network, _)| network.next == 4),
            "other ranks start trials, too"
        );
        ring.run(Duration::from_secs(9));
        let (rate, _) = ring.run(Duration::from_secs(10));
        assert!(rate > 0.9 * 500e6, "{rate}");
    }

    #[test]
    fn repath_reacts_soon_to_a_lower_rate() {
        let mut network = Network::new(&[125e6; 4], 4, 3);
        let mut repath = Repath::new(FOUR);
        run(&mut network, &mut repath, Duration::ZERO, Duration::from_secs(60));
        // All flows end up on one link, as after an outage of the others.
        network.flows.iter_mut().for_each(|flow| flow.1 = 0);
        let seconds = Duration::from_secs(60);
        let (rate, _) = run(&mut network, &mut repath, seconds, Duration::from_secs(4));
        assert!(rate > 300e6, "{rate}");
    }

    #[test]
    fn repath_ignores_a_dip() {
        // Share of the link's rate, and of the time in which there were bytes to deliver.
        let (full, dip, starved) = ((1.0, 1.0), (0.5, 1.0), (0.5, 0.5));
        for (periods, opened) in [
            ([dip, dip, full, dip, dip], 0),
            ([dip, dip, starved, dip, dip], 0),
            ([starved, starved, starved, starved, starved], 0),
            ([full, dip, dip, dip, full], 4),
        ] {
            let mut network = Network::new(&[125e6], 4, 1);
            let mut repath = Repath::new(FOUR);
            let mut now = Duration::from_secs(60);
            run(&mut network, &mut repath, Duration::ZERO, now);
            let opened_by_period = periods.map(|(rate, busy)| {
                now += TICK;
                network.pass(TICK, rate * 125e6, busy);
                network.apply_tick(&mut repath, now)
            });
            assert_eq!(opened_by_period.iter().sum::<usize>(), opened, "{periods:?}");
        }
    }

    #[test]
    fn repath_ends_a_harmful_trial_at_once() {
        let mut repath = Repath::new(FOUR);
        let mut network = Network::new(&[125e6], 4, 1);
        let mut now = Duration::ZERO;
        let mut step = |network: &mut Network, rate: f64| {
            now += TICK;
            network.pass(TICK, rate, 1.0);
            let carried: Vec<_> = network.flows.iter().map(|flow| flow.0).collect();
            repath.tick(now, true, &carried)
        };
        assert_eq!(step(&mut network, 0.0), RepathAction::Nothing);
        assert_eq!(step(&mut network, 100e6), RepathAction::Open(12), "trials may help");
        network.open(12);
        assert_eq!(step(&mut network, 50e6), RepathAction::Nothing, "the new flows start");
        assert_eq!(step(&mut network, 50e6), RepathAction::Close((4..16).collect()));
    }

    #[test]
    fn repath_opens_fewer_flows_after_failed_trials() {
        let mut network = Network::new(&[125e6], 4, 1);
        let mut repath = Repath::new(FOUR);
        let opened: Vec<_> = (1..100)
            .filter_map(|step| {
                network.pass(TICK, 125e6, 1.0);
                let opened = network.apply_tick(&mut repath, step * TICK);
                (opened > 0).then_some(opened)
            })
            .collect();
        assert_eq!(opened[..3], [12, 12, 4]);
    }

    #[test]
    fn repath_opens_few_flows_on_a_slow_path() {
        let mut network = Network::new(&[30e6], 4, 1);
        let mut repath = Repath::new(FOUR);
        let opened = (1..4).map(|step| {
            network.pass(TICK, 30e6, 1.0);
            network.apply_tick(&mut repath, step * TICK)
        });
        assert_eq!(opened.max(), Some(5));
    }

    #[test]
    fn repath_waits_while_all_flows_are_lost() {
        let mut repath = Repath::new(FOUR);
        for step in 0..10 {
            assert_eq!(repath.tick(step * TICK, true, &[]), RepathAction::Nothing);
        }
    }

    #[test]
    fn repath_leaves_idle_connections_alone() {
        let mut repath = Repath::new(FOUR);
        let network = Network::new(&[125e6], 4, 1);
        let flows: Vec<_> = network.flows.iter().map(|flow| flow.0).collect();
        for step in 0..100 {
            let now = Duration::from_millis(200 * step);
            assert_eq!(repath.tick(now, step % 2 == 0, &flows), RepathAction::Nothing);
        }
    }
}
