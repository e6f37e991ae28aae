//! How much a flow may have outstanding, and how much it takes at once.

use std::time::Duration;

/// A flow holds what it delivers in this time, beyond what its round trip takes: enough to stay
/// busy, not enough to keep a message waiting for its end.
const DEPTH: Duration = Duration::from_millis(3);
/// A flow takes at once what it delivers in this time.
const GRAIN: Duration = Duration::from_millis(1);
/// How often to look at a flow's progress.
const INTERVAL: Duration = Duration::from_millis(5);
/// A progress over less than this much busy time says nothing.
const MIN_BUSY: Duration = Duration::from_micros(500);
/// Bytes that even the slowest flow may have outstanding.
const MIN_OUTSTANDING: u64 = 32 << 10;
/// Bytes that even the slowest flow takes at once.
const MIN_CHUNK: u64 = 8 << 10;
/// Bytes that a flow may have outstanding while nothing is known about it.
const FIRST_OUTSTANDING: u64 = 512 << 10;

/// What is known about a flow's progress at some moment.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// Bytes that the peer's host has acknowledged in all.
    pub acked: u64,
    /// Time in which the flow had something to deliver and the peer let it.
    pub busy: Duration,
    /// Shortest round trip seen.
    pub round_trip: Duration,
}

/// The delivery rate of a flow, and what follows from it.
///
/// Times are given as durations since any fixed moment.
#[derive(Clone, Debug, Default)]
pub struct Pacer {
    /// Bytes per second; `None` while nothing is known.
    rate: Option<f64>,
    round_trip: Duration,
    last: Progress,
    next_sample: Duration,
}

impl Pacer {
    /// Of a flow that joins others: it begins with the least. Many that join at once, each with what a flow may have
    /// outstanding of which nothing is known, overrun the path they share, and what is lost there holds up all.
    pub fn slow_start() -> Self {
        Self { rate: Some(0.0), ..Self::default() }
    }

    /// Whether it is time to look at the flow's progress.
    pub fn sample_due(&self, now: Duration) -> bool {
        now >= self.next_sample
    }

    /// Takes in the flow's progress.
    pub fn sample(&mut self, now: Duration, progress: Progress) {
        self.next_sample = now + INTERVAL;
        self.round_trip = progress.round_trip;
        let busy = progress.busy.saturating_sub(self.last.busy);
        if busy < MIN_BUSY {
            return;
        }
        let acked = progress.acked.saturating_sub(self.last.acked);
        let rate = acked as f64 / busy.as_secs_f64();
        self.rate = Some(self.rate.map_or(rate, |before| (before + rate) / 2.0));
        self.last = progress;
    }

    /// Delivery rate in bytes per second, once it is known.
    pub fn rate(&self) -> Option<f64> {
        self.rate
    }

    /// Most bytes that the flow should have outstanding.
    pub fn max_outstanding(&self) -> u64 {
        let depth = DEPTH + 2 * self.round_trip;
        self.in_time(depth).map_or(FIRST_OUTSTANDING, |bytes| bytes.max(MIN_OUTSTANDING))
    }

    /// How many bytes the flow should take at once, at most `most`.
    pub fn chunk(&self, most: u64) -> u64 {
        self.in_time(GRAIN).map_or(most, |bytes| bytes.clamp(MIN_CHUNK.min(most), most))
    }

    /// How long to wait until a flow with too much outstanding has room again.
    pub fn wait(&self, outstanding: u64) -> Duration {
        let excess = outstanding.saturating_sub(self.max_outstanding() / 4 * 3);
        let rate = self.rate.unwrap_or_default().max(1.0);
        let wait = Duration::try_from_secs_f64(excess as f64 / rate).unwrap_or(DEPTH);
        wait.clamp(GRAIN / 4, DEPTH)
    }

    fn in_time(&self, time: Duration) -> Option<u64> {
        self.rate.map(|rate| (rate * time.as_secs_f64()) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A flow that has delivered at this rate, in Mbit/s, for a while.
    fn paced(mbit: u64) -> Pacer {
        let mut pace = Pacer::default();
        look(&mut pace, mbit, 20);
        pace
    }

    /// Looks at it so often while it delivers at this rate, in Mbit/s.
    fn look(pace: &mut Pacer, mbit: u64, times: u32) {
        for step in 0..times {
            let now = INTERVAL * step;
            assert!(pace.sample_due(now));
            let acked = mbit * 125_000 * now.as_micros() as u64 / 1_000_000;
            pace.sample(now, Progress { acked, busy: now, round_trip: Duration::ZERO });
            assert!(!pace.sample_due(now));
        }
    }

    #[test]
    fn slow_flows_hold_less_and_take_less() {
        let (fast, slow) = (paced(1000), paced(200));
        assert!((fast.rate().unwrap() - 125e6).abs() < 1e6, "{fast:?}");
        assert_eq!(fast.max_outstanding() / 10_000, 37);
        assert_eq!(slow.max_outstanding() / 10_000, 7);
        assert_eq!(fast.chunk(131_072) / 1000, 125);
        assert_eq!(slow.chunk(131_072) / 1000, 25);
        assert_eq!(paced(100_000).chunk(131_072), 131_072);
        assert_eq!(paced(1).chunk(131_072), MIN_CHUNK);
        assert_eq!(paced(1).chunk(4096), 4096);
    }

    #[test]
    fn the_wait_is_short_and_never_nothing() {
        let pace = paced(200);
        assert!(pace.wait(0) > Duration::ZERO);
        assert!(pace.wait(75_000) < Duration::from_micros(1000));
        assert_eq!(pace.wait(u64::MAX), DEPTH);
        assert!(Pacer::default().wait(u64::MAX) <= DEPTH);
    }

    #[test]
    fn who_joins_others_begins_with_the_least_and_comes_up_to_speed() {
        let mut pace = Pacer::slow_start();
        assert_eq!(pace.max_outstanding(), MIN_OUTSTANDING);
        assert_eq!(pace.chunk(131_072), MIN_CHUNK);
        assert!(pace.wait(MIN_OUTSTANDING) <= DEPTH);
        look(&mut pace, 1000, 10);
        assert!(pace.max_outstanding() > paced(1000).max_outstanding() / 10 * 9, "{pace:?}");
    }

    #[test]
    fn idle_time_does_not_make_a_flow_slow() {
        let mut pace = paced(1000);
        let last = pace.last;
        for step in 0..100 {
            pace.sample(INTERVAL * (100 + step), last);
        }
        assert_eq!(pace.chunk(131_072) / 1000, 125);
    }
}
