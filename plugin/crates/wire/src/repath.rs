//! When to look for other paths, and which flows to give up for them.

use std::time::Duration;

/// How long the flows are observed before anything is concluded.
const PERIOD: Duration = Duration::from_millis(200);
/// A change of the whole rate by less than this is no change.
const NOTICEABLE: f64 = 1.05;
/// How long nothing is tried after it has not helped; doubled each time, up to the limit.
const FIRST_REST: Duration = Duration::from_millis(400);
const LONGEST_REST: Duration = Duration::from_secs(60);
/// Rates at which this is about the host, not the path: bytes per second and flow.
const LEAST_BYTES: u64 = 256 << 10;

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Go on as it is.
    Nothing,
    /// Open this many more flows: they may find other paths.
    Open(usize),
    /// Let this flow drain, then close it.
    Close(u32),
}

/// Finds paths that no flow uses, by trying.
///
/// What a path yields shows only when it is used, so it goes in rounds: open as many flows more as
/// the connection has, see whether all together deliver more, and close the slowest ones, one at a
/// time, until there are as many as before. A flow that shares its path with others is slow, and
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
    /// Bytes per second before the round, while there is one.
    round: Option<f64>,
    rest: Duration,
    not_before: Duration,
}

impl Repath {
    /// For a connection that is to have this many flows.
    pub fn new(flows: usize) -> Self {
        Self {
            flows,
            before: Vec::new(),
            since: None,
            round: None,
            rest: FIRST_REST,
            not_before: Duration::ZERO,
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
        if total < LEAST_BYTES * carried.len() as u64 {
            return Step::Nothing;
        }
        if carried.len() > self.flows {
            let slowest = moved.iter().min_by_key(|(_, bytes)| *bytes);
            return slowest.map_or(Step::Nothing, |(flow, _)| Step::Close(*flow));
        }
        if let Some(before) = self.round.take() {
            self.rest = if rate > before * NOTICEABLE {
                FIRST_REST
            } else {
                (self.rest * 2).min(LONGEST_REST)
            };
            self.not_before = now + self.rest;
        }
        if carried.len() < self.flows || now < self.not_before {
            return Step::Nothing;
        }
        self.round = Some(rate);
        Step::Open(self.flows)
    }

    fn begin(&mut self, now: Duration, carried: &[(u32, u64)]) {
        self.since = Some(now);
        self.before.clear();
        self.before.extend_from_slice(carried);
    }
}
