//! The number of flows to use: fewer where the hosts are the limit and not the paths.

use std::time::Duration;

/// How often the rate is measured.
const PERIOD: Duration = Duration::from_millis(20);
/// Number of consecutive periods that a number of flows is measured before a decision: a single one says little about paths that
/// lose packets.
const MEASURED_PERIODS: u32 = 3;
/// A period that lasted longer than this had a pause in it and is ignored.
const MAX_PERIOD: Duration = Duration::from_millis(60);
/// Above this load the hosts may be the limit. The load is the share of the time that a writing thread works on average.
const BUSY: f64 = 0.5;
/// Consecutive failed trials of fewer flows after which the paths are taken for the limit.
const MIN_FAILED_TRIALS: u32 = 2;
/// One is enough, and the next comes later, when fewer flows carry less than this share.
const FAR_LESS: f64 = 0.75;
/// Fewer flows are kept when they carry at least this share of what more did, since they cost less.
const ENOUGH: f64 = 0.9;
/// More flows are kept when they carry at least this many times what fewer did.
const GAIN: f64 = 1.1;
/// Where a part of the flows carries less than this share of what it did at the last decision, that is out of date.
const FALLEN: f64 = 0.7;
/// Backoff after a trial that did not help; doubled each time, up to the limit.
const MIN_BACKOFF: Duration = Duration::from_millis(200);
const MAX_BACKOFF: Duration = Duration::from_secs(20);

/// Finds by trial how many of a connection's flows are worth their cost.
///
/// Several flows reach more paths. Where the processors are the limit, each further flow only makes every byte more
/// expensive: system calls move less, and caches and interrupts are shared. While the writing threads are busy, half as many
/// flows are tried, and kept if they carry as much. While the threads are idle, twice as many are tried, and kept if they
/// carry more. Busy threads may work for other connections, so after a number of flows that did not help, the other direction
/// is tried.
///
/// Times are given as durations since any fixed moment.
#[derive(Debug)]
pub struct FlowCount {
    /// Flows that the connection has.
    max: usize,
    /// Flows that are in use.
    in_use: usize,
    /// Beginning of the period.
    since: Option<Duration>,
    /// Bytes carried and time worked up to the beginning of the period.
    carried: u64,
    worked: Duration,
    measured: Measured,
    trial: Option<Trial>,
    backoff: Duration,
    /// No trial begins before this.
    not_before: Duration,
    /// Whether more flows are tried next, and not fewer, also while the threads are busy.
    tries_more: bool,
    /// Bytes per second at the last decision.
    decided: Option<f64>,
    /// Share of the last periods in which a writing thread worked.
    load: f64,
    /// Consecutive trials in which fewer flows carried less.
    failed_trials: u32,
}

/// What the flows in use have done since the last decision.
#[derive(Debug, Default)]
struct Measured {
    periods: u32,
    time: Duration,
    bytes: u64,
    worked: Duration,
}

#[derive(Debug)]
struct Trial {
    /// Number of flows before it.
    in_use: usize,
    /// Bytes per second before it.
    rate: f64,
    /// Whether the first period is over, in which bytes of the former flows arrive.
    settled: bool,
}

impl FlowCount {
    /// For a connection with this many flows, all of which are used at first.
    pub fn new(flows: usize) -> Self {
        Self {
            max: flows,
            in_use: flows,
            since: None,
            carried: 0,
            worked: Duration::ZERO,
            measured: Measured::default(),
            trial: None,
            backoff: MIN_BACKOFF,
            not_before: Duration::ZERO,
            tries_more: false,
            decided: None,
            load: 0.0,
            failed_trials: 0,
        }
    }

    /// The number of flows to use.
    pub fn in_use(&self) -> usize {
        self.in_use
    }

    /// The connection has this many flows from now on, if that is more than before. All of them are used at first.
    pub fn grow(&mut self, flows: usize) {
        if flows > self.max {
            (self.max, self.in_use, self.trial, self.decided) = (flows, flows, None, None);
            self.measured = Measured::default();
        }
    }

    /// Whether the paths limit the rate, as far as is known.
    pub fn is_limited_by_paths(&self) -> bool {
        self.in_use == self.max && (self.load <= BUSY || self.failed_trials >= MIN_FAILED_TRIALS)
    }

    /// To be called at intervals. `carried`: bytes that all flows have carried so far. `worked`: the writing threads' total
    /// time of work so far. `threads`: how many of them may work at once. Returns whether the number has changed.
    pub fn tick(&mut self, now: Duration, carried: u64, worked: Duration, threads: usize) -> bool {
        let time = self.since.map(|since| now.saturating_sub(since));
        let Some(time) = time.filter(|time| *time <= MAX_PERIOD) else {
            self.begin(now, carried, worked);
            self.measured = Measured::default();
            return self.trial.take().is_some_and(|trial| self.set(trial.in_use));
        };
        if time < PERIOD {
            return false;
        }
        let (bytes, work) =
            (carried.saturating_sub(self.carried), worked.saturating_sub(self.worked));
        self.begin(now, carried, worked);
        if let Some(trial) = &mut self.trial
            && !std::mem::replace(&mut trial.settled, true)
        {
            return false;
        }
        let measured = &mut self.measured;
        measured.periods += 1;
        measured.time += time;
        measured.bytes += bytes;
        measured.worked += work;
        if measured.periods < MEASURED_PERIODS {
            return false;
        }
        let Measured { time, bytes, worked, .. } = std::mem::take(measured);
        let rate = bytes as f64 / time.as_secs_f64();
        self.load = worked.as_secs_f64() / time.as_secs_f64() / threads.max(1) as f64;
        let decided = *self.decided.get_or_insert(rate);
        if let Some(trial) = self.trial.take() {
            let reduced = self.in_use < trial.in_use;
            let helped = rate >= trial.rate * if reduced { ENOUGH } else { GAIN };
            let is_clear = reduced && rate < trial.rate * FAR_LESS;
            if reduced {
                let failed = if is_clear { MIN_FAILED_TRIALS } else { 1 };
                self.failed_trials =
                    if helped { 0 } else { self.failed_trials.saturating_add(failed) };
            }
            self.backoff = match helped {
                true => MIN_BACKOFF,
                false => (self.backoff * if is_clear { 4 } else { 2 }).min(MAX_BACKOFF),
            };
            self.tries_more = reduced != helped;
            self.decided = Some(if helped { rate } else { trial.rate });
            if !helped {
                self.not_before = now + self.backoff;
                return self.set(trial.in_use);
            }
        } else if self.in_use < self.max && rate < decided * FALLEN {
            (self.decided, self.tries_more) = (Some(rate), true);
            (self.backoff, self.not_before) = (MIN_BACKOFF, now);
        }
        let may_reduce = self.load > BUSY && self.in_use > 1;
        let count = match may_reduce && !(self.tries_more && self.in_use < self.max) {
            true => self.in_use / 2,
            false => (self.in_use * 2).min(self.max),
        };
        if now < self.not_before || count == self.in_use {
            return false;
        }
        self.trial = Some(Trial { in_use: self.in_use, rate, settled: false });
        self.set(count)
    }

    fn set(&mut self, count: usize) -> bool {
        std::mem::replace(&mut self.in_use, count) != count
    }

    fn begin(&mut self, now: Duration, carried: u64, worked: Duration) {
        (self.since, self.carried, self.worked) = (Some(now), carried, worked);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes per second and load of a connection by its number of flows.
    type Model = fn(usize) -> (u64, f64);

    /// Paths that lose packets: in each step, each flow of a few carries from nothing to twice its mean.
    fn lossy(flows: usize, random: &mut u64) -> u64 {
        let mut next = || {
            *random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(7);
            (*random >> 33) % 200_000_000
        };
        (0..flows).map(|_| next()).sum()
    }

    /// Each flow makes every byte more expensive.
    const HOSTS_ARE_THE_LIMIT: Model = |flows| (3_000_000_000 / (1 + flows as u64 / 4), 0.9);
    /// Each flow has a path of its own.
    const PATHS_ARE_THE_LIMIT: Model = |flows| (100_000_000 * flows as u64, 0.1);
    /// The same, on slow hosts.
    const BOTH: Model = |flows| (100_000_000 * flows as u64, 0.15 * flows as f64);

    struct Run {
        flow_count: FlowCount,
        now: Duration,
        carried: u64,
        worked: Duration,
    }

    impl Run {
        fn new(flows: usize) -> Self {
            let zero = Duration::ZERO;
            Self { flow_count: FlowCount::new(flows), now: zero, carried: 0, worked: zero }
        }

        /// Returns the share of the time in which each number of flows was used.
        fn go(&mut self, model: impl Fn(usize) -> (u64, f64), length: Duration) -> Vec<f64> {
            const STEP: Duration = Duration::from_millis(5);
            let steps = length.as_millis() / STEP.as_millis();
            let mut used = vec![0.0; 65];
            for _ in 0..steps {
                let (rate, load) = model(self.flow_count.in_use());
                used[self.flow_count.in_use()] += 1.0 / steps as f64;
                self.now += STEP;
                self.carried += (rate as f64 * STEP.as_secs_f64()) as u64;
                self.worked += STEP.mul_f64(load);
                self.flow_count.tick(self.now, self.carried, self.worked, 1);
            }
            used
        }
    }

    #[test]
    fn flow_count_is_one_where_hosts_are_the_limit() {
        let mut run = Run::new(8);
        run.go(HOSTS_ARE_THE_LIMIT, Duration::from_millis(400));
        let used = run.go(HOSTS_ARE_THE_LIMIT, Duration::from_secs(10));
        // Now and then more are tried.
        assert!(used[1] > 0.95, "{used:?}");
    }

    #[test]
    fn flow_count_is_full_where_paths_are_the_limit() {
        for model in [PATHS_ARE_THE_LIMIT, BOTH] {
            let mut run = Run::new(4);
            run.go(model, Duration::from_millis(600));
            assert!(run.flow_count.is_limited_by_paths());
            let used = run.go(model, Duration::from_secs(20));
            assert!(used[4] > 0.98, "{used:?}");
        }
    }

    #[test]
    fn flow_count_is_full_where_paths_lose_packets() {
        const STEP: Duration = Duration::from_millis(5);
        let (mut full, mut steps) = (0, 0);
        for seed in 1..=50 {
            let mut random = seed * 7919;
            let mut run = Run::new(4);
            for _ in 0..1000 {
                let rate = lossy(run.flow_count.in_use(), &mut random);
                run.now += STEP;
                run.carried += (rate as f64 * STEP.as_secs_f64()) as u64;
                run.worked += STEP.mul_f64(0.6);
                run.flow_count.tick(run.now, run.carried, run.worked, 1);
                full += u32::from(run.flow_count.in_use() == 4);
                steps += 1;
            }
        }
        assert!(f64::from(full) > 0.9 * f64::from(steps), "{full} of {steps}");
    }

    #[test]
    fn flow_count_takes_one_clear_failure_for_the_answer() {
        let mut run = Run::new(4);
        run.go(BOTH, Duration::from_millis(200));
        assert!(run.flow_count.is_limited_by_paths());
    }

    #[test]
    fn flow_count_follows_changes() {
        let mut run = Run::new(4);
        run.go(HOSTS_ARE_THE_LIMIT, Duration::from_secs(1));
        assert_eq!(run.flow_count.in_use(), 1);
        assert!(!run.flow_count.is_limited_by_paths());
        run.go(PATHS_ARE_THE_LIMIT, Duration::from_millis(600));
        assert_eq!(run.flow_count.in_use(), 4);
        run.go(HOSTS_ARE_THE_LIMIT, Duration::from_secs(1));
        assert_eq!(run.flow_count.in_use(), 1);
    }

    /// A path degrades while other connections keep the threads busy.
    #[test]
    fn flow_count_comes_up_again_under_load_when_the_rate_falls() {
        for load in [0.6, 1.5] {
            let mut run = Run::new(4);
            run.go(HOSTS_ARE_THE_LIMIT, Duration::from_secs(10));
            let model = |flows| (100_000_000 * flows as u64, load);
            run.go(model, Duration::from_secs(1));
            let used = run.go(model, Duration::from_secs(30));
            assert!(used[4] > 0.9, "{used:?}");
        }
    }

    /// Other paths get better while other connections keep the threads busy.
    #[test]
    fn flow_count_comes_up_again_under_load_when_more_flows_carry_more() {
        let mut run = Run::new(4);
        run.go(HOSTS_ARE_THE_LIMIT, Duration::from_secs(10));
        let better: Model = |flows| (3_000_000_000 * flows as u64, 0.9);
        run.go(better, Duration::from_secs(30));
        let used = run.go(better, Duration::from_secs(30));
        assert!(used[4] > 0.9, "{used:?}");
    }

    /// Four threads of which none works half of the time are not the limit, though together they work for longer than that.
    #[test]
    fn flow_count_asks_whether_the_threads_are_busy_on_average() {
        let is_limited = |threads| {
            let mut flow_count = FlowCount::new(4);
            for step in 0..40 {
                let now = Duration::from_millis(5) * step;
                let rate = 100_000_000 * flow_count.in_use() as u64;
                flow_count.tick(now, rate * u64::from(step), now.mul_f64(1.5), threads);
                if flow_count.in_use() < 4 {
                    return false;
                }
            }
            flow_count.is_limited_by_paths()
        };
        assert!(is_limited(4) && !is_limited(1));
    }

    #[test]
    fn flow_count_grows_with_the_flows_and_follows_the_limit_again() {
        let mut run = Run::new(4);
        run.go(HOSTS_ARE_THE_LIMIT, Duration::from_secs(1));
        run.flow_count.grow(3);
        assert_eq!(run.flow_count.in_use(), 1, "no more than there were");
        run.flow_count.grow(16);
        assert_eq!(run.flow_count.in_use(), 16);
        run.go(PATHS_ARE_THE_LIMIT, Duration::from_secs(1));
        assert!(run.flow_count.is_limited_by_paths());
        run.go(HOSTS_ARE_THE_LIMIT, Duration::from_secs(2));
        assert_eq!(run.flow_count.in_use(), 1);
    }

    #[test]
    fn flow_count_ignores_pauses() {
        let mut run = Run::new(4);
        for _ in 0..100 {
            run.go(HOSTS_ARE_THE_LIMIT, Duration::from_millis(25));
            run.now += Duration::from_secs(1);
        }
        run.go(HOSTS_ARE_THE_LIMIT, Duration::from_millis(5));
        assert_eq!(run.flow_count.in_use(), 4);
    }
}
