//! How many flows to use where the hosts are the limit, and not the paths.

use std::time::Duration;

/// How long a number of flows is observed before anything is concluded.
const PERIOD: Duration = Duration::from_millis(20);
/// A period that lasted longer than this had a pause in it and says nothing.
const LONGEST_PERIOD: Duration = Duration::from_millis(60);
/// Share of the time in which those who write work, from which on the hosts may be the limit.
const BUSY: f64 = 0.5;
/// So many times fewer flows have carried less, one after the other, before that is believed.
const BELIEVED: u32 = 2;
/// Fewer flows are kept when they carry at least this share of what more did: they cost less.
const ENOUGH: f64 = 0.9;
/// More flows are kept when they carry at least this many times what fewer did.
const GAIN: f64 = 1.1;
/// How long nothing is tried after it has not helped; doubled each time, up to the limit.
const FIRST_REST: Duration = Duration::from_millis(200);
const LONGEST_REST: Duration = Duration::from_secs(20);

/// Finds out, by trying, how many of a connection's flows are worth their cost.
///
/// Several flows reach more paths. Where the processors are the limit, each further one only makes every byte more
/// expensive: system calls move less, and caches and interrupts are shared. So while those who write have hardly
/// any rest, half as many flows are tried, and kept if they carry as much; once they have rest, twice as many, kept if they
/// carry more.
///
/// Times are given as durations since any fixed moment.
#[derive(Debug)]
pub struct FlowCount {
    /// Flows that the connection has.
    most: usize,
    /// Flows that are in use.
    width: usize,
    since: Option<Duration>,
    /// Bytes carried in all, and time worked in all, when the period began.
    carried: u64,
    worked: Duration,
    trial: Option<Trial>,
    rest: Duration,
    not_before: Duration,
    /// Share of the last period in which those who write worked.
    load: f64,
    /// Times that fewer flows carried less, since more were last as good as fewer.
    rejected: u32,
}

#[derive(Debug)]
struct Trial {
    /// What there was before it.
    width: usize,
    /// Bytes per second before it.
    rate: f64,
    /// The first period has what was on its way already.
    settled: bool,
}

impl FlowCount {
    /// For a connection that has this many flows, all of which are used at first.
    pub fn new(flows: usize) -> Self {
        Self {
            most: flows,
            width: flows,
            since: None,
            carried: 0,
            worked: Duration::ZERO,
            trial: None,
            rest: FIRST_REST,
            not_before: Duration::ZERO,
            load: 0.0,
            rejected: 0,
        }
    }

    /// How many flows are to be used.
    pub fn in_use(&self) -> usize {
        self.width
    }

    /// Whether it is the paths that limit what is carried, as far as is known.
    pub fn paths_matter(&self) -> bool {
        self.width == self.most && (self.load <= BUSY || self.rejected >= BELIEVED)
    }

    /// Some time has passed. `carried`: bytes that all flows have carried so far. `worked`: how long those
    /// who write have not waited for anything so far. Returns whether the width has changed.
    pub fn tick(&mut self, now: Duration, carried: u64, worked: Duration) -> bool {
        let time = self.since.map(|since| now.saturating_sub(since));
        let Some(time) = time.filter(|time| *time <= LONGEST_PERIOD) else {
            self.begin(now, carried, worked);
            return self.trial.take().is_some_and(|trial| self.set(trial.width));
        };
        if time < PERIOD {
            return false;
        }
        let rate = carried.saturating_sub(self.carried) as f64 / time.as_secs_f64();
        self.load = worked.saturating_sub(self.worked).as_secs_f64() / time.as_secs_f64();
        self.begin(now, carried, worked);
        if let Some(trial) = &mut self.trial {
            if !std::mem::replace(&mut trial.settled, true) {
                return false;
            }
            let (before, needed) =
                (trial.width, if self.width < trial.width { ENOUGH } else { GAIN });
            let narrowed = self.width < trial.width;
            let helped = rate >= trial.rate * needed;
            match (narrowed, helped) {
                (true, false) => self.rejected = self.rejected.saturating_add(1),
                (true, true) => self.rejected = 0,
                (false, _) => {}
            }
            self.trial = None;
            self.rest = if helped { FIRST_REST } else { (self.rest * 2).min(LONGEST_REST) };
            if helped {
                return false;
            }
            self.not_before = now + self.rest;
            return self.set(before);
        }
        let width =
            if self.load > BUSY { self.width / 2 } else { self.width * 2 }.clamp(1, self.most);
        if now < self.not_before || width == self.width {
            return false;
        }
        self.trial = Some(Trial { width: self.width, rate, settled: false });
        self.set(width)
    }

    fn set(&mut self, width: usize) -> bool {
        std::mem::replace(&mut self.width, width) != width
    }

    fn begin(&mut self, now: Duration, carried: u64, worked: Duration) {
        (self.since, self.carried, self.worked) = (Some(now), carried, worked);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes per second and load of a connection that uses this many flows.
    type Model = fn(usize) -> (u64, f64);

    /// Each flow makes every byte more expensive.
    const HOSTS_ARE_THE_LIMIT: Model = |width| (3_000_000_000 / (1 + width as u64 / 4), 0.9);
    /// Each flow has a path of its own.
    const PATHS_ARE_THE_LIMIT: Model = |width| (100_000_000 * width as u64, 0.1);
    /// The same, on slow hosts.
    const BOTH: Model = |width| (100_000_000 * width as u64, 0.15 * width as f64);

    struct Run {
        width: FlowCount,
        now: Duration,
        carried: u64,
        worked: Duration,
    }

    impl Run {
        fn new(flows: usize) -> Self {
            let zero = Duration::ZERO;
            Self { width: FlowCount::new(flows), now: zero, carried: 0, worked: zero }
        }

        /// Returns the share of the time in which each width was used.
        fn go(&mut self, model: Model, length: Duration) -> Vec<f64> {
            const STEP: Duration = Duration::from_millis(5);
            let steps = length.as_millis() / STEP.as_millis();
            let mut used = vec![0.0; 65];
            for _ in 0..steps {
                let (rate, load) = model(self.width.in_use());
                used[self.width.in_use()] += 1.0 / steps as f64;
                self.now += STEP;
                self.carried += (rate as f64 * STEP.as_secs_f64()) as u64;
                self.worked += STEP.mul_f64(load);
                self.width.tick(self.now, self.carried, self.worked);
            }
            used
        }
    }

    #[test]
    fn one_flow_is_enough_where_hosts_are_the_limit() {
        let mut run = Run::new(8);
        run.go(HOSTS_ARE_THE_LIMIT, Duration::from_millis(300));
        let used = run.go(HOSTS_ARE_THE_LIMIT, Duration::from_secs(10));
        assert!(used[1] > 0.99, "{used:?}");
    }

    #[test]
    fn all_flows_are_used_where_paths_are_the_limit() {
        for model in [PATHS_ARE_THE_LIMIT, BOTH] {
            let mut run = Run::new(4);
            run.go(model, Duration::from_millis(600));
            assert!(run.width.paths_matter());
            let used = run.go(model, Duration::from_secs(20));
            assert!(used[4] > 0.98, "{used:?}");
        }
    }

    #[test]
    fn what_changes_is_noticed() {
        let mut run = Run::new(4);
        run.go(HOSTS_ARE_THE_LIMIT, Duration::from_secs(1));
        assert_eq!(run.width.in_use(), 1);
        assert!(!run.width.paths_matter());
        run.go(PATHS_ARE_THE_LIMIT, Duration::from_millis(600));
        assert_eq!(run.width.in_use(), 4);
        run.go(HOSTS_ARE_THE_LIMIT, Duration::from_secs(1));
        assert_eq!(run.width.in_use(), 1);
    }

    #[test]
    fn a_pause_says_nothing() {
        let mut run = Run::new(4);
        for _ in 0..100 {
            run.go(HOSTS_ARE_THE_LIMIT, Duration::from_millis(25));
            run.now += Duration::from_secs(1);
        }
        run.go(HOSTS_ARE_THE_LIMIT, Duration::from_millis(5));
        assert_eq!(run.width.in_use(), 4);
    }
}
