//! Pacing: how many bytes a flow may have outstanding, and how many it takes at once.

use std::time::Duration;

/// A flow may have outstanding what it delivers in this time, plus two round trips. That is enough to stay
/// busy, and too little for the end of a message to wait long on one flow.
const DEPTH: Duration = Duration::from_millis(3);
/// The same of a flow without others. Where many hosts send to one (incast), the queues in front of it make the round trip longer
/// than the minimum that is known. With less than they add, a flow would never get its share.
const DEPTH_ALONE: Duration = Duration::from_millis(6);
/// A flow takes at once what it delivers in this time.
const GRAIN: Duration = Duration::from_millis(1);
/// How often a flow's progress is sampled.
const INTERVAL: Duration = Duration::from_millis(5);
/// Samples over less busy time than this are ignored.
const MIN_BUSY: Duration = Duration::from_micros(500);
/// Minimum of the bytes that a flow may have outstanding. With more, a few flows that share a slow path would delay a chunk for
/// longer than all messages in flight take on fast paths, and all flows would wait for it.
const MIN_OUTSTANDING: u64 = 8 << 10;
/// The same of a flow without others, which delays no others' chunks. Less is not enough to come up to speed.
const MIN_OUTSTANDING_ALONE: u64 = 48 << 10;
/// Minimum of the bytes that a flow takes at once.
const MIN_CHUNK: u64 = 8 << 10;
/// A path is congested if more than one byte in this many is sent again.
const LOSS: u64 = 50;
/// So is one whose queues make the round trip this much longer than its minimum. On loopback, a thousand busy connections make
/// it 3 ms longer, because the processors are late.
const CONGESTION: Duration = Duration::from_millis(6);
/// Bytes of a segment that is sent again, at most: that of Ethernet's usual frames.
const SEGMENT_BYTES: u64 = 1460;
/// Bytes that a flow may have outstanding while its rate is not known.
const FIRST_OUTSTANDING: u64 = 512 << 10;

/// A flow's progress up to some moment.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// Bytes that the peer's host has acknowledged.
    pub acked: u64,
    /// Time in which the flow had bytes to deliver and the peer's window was open.
    pub busy: Duration,
    /// Minimum round-trip time.
    pub round_trip: Duration,
    /// Smoothed round-trip time.
    pub usual_round_trip: Duration,
    /// Segments that were sent again.
    pub retransmitted: u64,
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
    /// Whether the flow could have taken more since the last sample.
    was_full: bool,
    /// Whether it is its connection's only flow.
    is_alone: bool,
}

impl Pacer {
    /// For a flow that is added to others: it starts with the minimum. Many flows that start at once with the initial limit
    /// would overrun the path they share, and the losses would delay all of them.
    pub fn slow_start() -> Self {
        Self { rate: Some(0.0), ..Self::default() }
    }

    /// Whether the flow's progress is to be sampled.
    pub fn sample_due(&self, now: Duration) -> bool {
        now >= self.next_sample
    }

    /// No sample is due for a while.
    pub fn postpone_sample(&mut self, now: Duration) {
        self.next_sample = now + INTERVAL;
    }

    /// Whether the flow is its connection's only one, from now on.
    pub fn set_alone(&mut self, is_alone: bool) {
        self.is_alone = is_alone;
    }

    /// The flow's socket took no more.
    pub fn set_full(&mut self) {
        self.was_full = true;
    }

    /// Whether the rate is worth a sample. That of a flow that delivers everything at once is not needed. But a flow that had
    /// to wait may have done so because its rate is not known yet, and all of it may be delivered by now.
    pub fn is_backlogged(&self, outstanding: u64) -> bool {
        self.was_full || outstanding > self.max_outstanding() / 2
    }

    /// Updates the rate from the flow's progress. Returns whether its path is congested: too much was lost since the
    /// last sample, or waits in queues.
    pub fn sample(&mut self, now: Duration, progress: Progress) -> bool {
        self.postpone_sample(now);
        self.round_trip = progress.round_trip;
        self.was_full = false;
        let busy = progress.busy.saturating_sub(self.last.busy);
        if busy < MIN_BUSY {
            return false;
        }
        let acked = progress.acked.saturating_sub(self.last.acked);
        let rate = acked as f64 / busy.as_secs_f64();
        self.rate = Some(self.rate.map_or(rate, |before| (before + rate) / 2.0));
        let again = progress.retransmitted.saturating_sub(self.last.retransmitted);
        self.last = progress;
        again * SEGMENT_BYTES > acked / LOSS
            || progress.usual_round_trip > progress.round_trip + CONGESTION
    }

    /// Delivery rate in bytes per second, once it is known.
    pub fn rate(&self) -> Option<f64> {
        self.rate
    }

    /// Maximum of the bytes that the flow should have outstanding.
    pub fn max_outstanding(&self) -> u64 {
        let (depth, min) = match self.is_alone {
            true => (DEPTH_ALONE, MIN_OUTSTANDING_ALONE),
            false => (DEPTH, MIN_OUTSTANDING),
        };
        let bytes = self.in_time(depth + 2 * self.round_trip);
        bytes.map_or(FIRST_OUTSTANDING, |bytes| bytes.max(min))
    }

    /// How many bytes the flow should take at once, at most `max`.
    pub fn chunk(&self, max: u64) -> u64 {
        self.in_time(GRAIN).map_or(max, |bytes| bytes.clamp(MIN_CHUNK.min(max), max))
    }

    /// How long to wait until a flow with too many bytes outstanding may take more.
    pub fn wait(&mut self, outstanding: u64) -> Duration {
        self.was_full = true;
        let excess = outstanding.saturating_sub(self.max_outstanding() / 4 * 3);
        let wait = match self.rate {
            Some(rate) if rate > 0.0 => Duration::try_from_secs_f64(excess as f64 / rate),
            _ => Ok(GRAIN),
        };
        let wait = wait.unwrap_or(DEPTH);
        wait.clamp(GRAIN / 4, DEPTH)
    }

    fn in_time(&self, time: Duration) -> Option<u64> {
        self.rate.map(|rate| (rate * time.as_secs_f64()) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pacer of a flow that has delivered at this rate, in Mbit/s.
    fn paced(mbit: u64) -> Pacer {
        let mut pacer = Pacer::default();
        sample(&mut pacer, mbit, 20);
        pacer
    }

    /// Samples a flow this many times while it delivers at this rate, in Mbit/s.
    fn sample(pacer: &mut Pacer, mbit: u64, times: u32) {
        for step in 0..times {
            let now = INTERVAL * step;
            assert!(pacer.sample_due(now));
            let acked = mbit * 125_000 * now.as_micros() as u64 / 1_000_000;
            pacer.sample(now, Progress { acked, busy: now, ..Progress::default() });
            assert!(!pacer.sample_due(now));
        }
    }

    #[test]
    fn pacing_limits_slow_flows_to_fewer_bytes() {
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

    /// Four flows that share a link of 50 Mbit/s, beside links on which 8 messages of 512 KiB take 15 ms.
    #[test]
    fn pacing_delays_chunks_little_where_flows_share_a_slow_link() {
        let pacer = paced(12);
        let ahead = pacer.max_outstanding() + pacer.chunk(131_072);
        let delay = Duration::from_secs_f64(4.0 * ahead as f64 / 50e6 * 8.0);
        assert!(delay < Duration::from_millis(15), "{delay:?}");
    }

    /// Four hosts with a flow each send to one over a link of 250 Mbit/s. Its queue, of 6 ms, makes the round trip longer than the
    /// 10 us that are known as its minimum. Each flow has to get its share of the link all the same.
    #[test]
    fn pacing_alone_fills_a_link_that_others_share() {
        const ROUND_TRIP: f64 = 6e-3;
        let share = 250e6 / 8.0 / 4.0;
        let reached = |is_alone| {
            let mut pacer = paced(40);
            pacer.set_alone(is_alone);
            let mut progress = pacer.last;
            for step in 0..100 {
                let rate = (pacer.max_outstanding() as f64 / ROUND_TRIP).min(share);
                progress.acked += (rate * INTERVAL.as_secs_f64()) as u64;
                progress.busy += INTERVAL;
                pacer.sample(progress.busy + step * INTERVAL, progress);
            }
            pacer.rate().unwrap() / share
        };
        assert!(reached(true) > 0.99, "{}", reached(true));
        // Many flows of one message do without: they have other paths.
        assert!(reached(false) < 0.5, "{}", reached(false));
    }

    #[test]
    fn pacing_tells_of_congestion() {
        let mut pacer = Pacer::default();
        let mut progress = Progress::default();
        let mut is_congested = |lost, millis| {
            progress.acked += 10_000_000;
            progress.busy += Duration::from_secs(1);
            progress.retransmitted += lost;
            progress.round_trip = Duration::from_millis(20);
            progress.usual_round_trip = Duration::from_millis(millis);
            pacer.sample(progress.busy, progress)
        };
        assert!(!is_congested(0, 22));
        assert!(!is_congested(120, 22));
        assert!(is_congested(160, 22));
        assert!(!is_congested(0, 22));
        assert!(is_congested(0, 27));
    }

    #[test]
    fn pacing_wait_is_short_but_never_zero() {
        let mut pacer = paced(200);
        assert!(pacer.wait(0) > Duration::ZERO);
        assert!(pacer.wait(75_000) < Duration::from_micros(1000));
        assert_eq!(pacer.wait(u64::MAX), DEPTH);
        assert!(Pacer::default().wait(u64::MAX) <= DEPTH);
    }

    #[test]
    fn pacing_slow_start_comes_up_to_speed() {
        let mut pacer = Pacer::slow_start();
        assert_eq!(pacer.max_outstanding(), MIN_OUTSTANDING);
        assert_eq!(pacer.chunk(131_072), MIN_CHUNK);
        assert!(pacer.wait(MIN_OUTSTANDING) <= DEPTH);
        sample(&mut pacer, 1000, 10);
        assert!(pacer.max_outstanding() > paced(1000).max_outstanding() / 10 * 9, "{pacer:?}");
    }

    /// A flow that is sampled only if the pacer asks for it, on a fast path: when it may go on, all is delivered.
    #[test]
    fn pacing_comes_up_to_speed_where_all_is_delivered_meanwhile() {
        const RATE: f64 = 125e6;
        let mut pacer = Pacer::slow_start();
        let (mut now, mut progress) = (Duration::ZERO, Progress::default());
        let (mut outstanding, mut acked_before) = (0, 0);
        while now < Duration::from_millis(400) {
            if pacer.sample_due(now) {
                pacer.postpone_sample(now);
                if pacer.is_backlogged(outstanding) {
                    pacer.sample(now, progress);
                }
            }
            if outstanding <= pacer.max_outstanding() {
                outstanding += pacer.chunk(131_072);
                continue;
            }
            let wait = pacer.wait(outstanding);
            let moved = outstanding.min((RATE * wait.as_secs_f64()) as u64);
            outstanding -= moved;
            progress.acked += moved;
            progress.busy += Duration::from_secs_f64(moved as f64 / RATE);
            now += wait;
            if now < Duration::from_millis(200) {
                acked_before = progress.acked;
            }
        }
        let rate = (progress.acked - acked_before) as f64 / 0.2;
        assert!(rate > 0.9 * RATE, "{rate}, {pacer:?}");
    }

    #[test]
    fn pacing_ignores_idle_time() {
        let mut pacer = paced(1000);
        let last = pacer.last;
        for step in 0..100 {
            pacer.sample(INTERVAL * (100 + step), last);
        }
        assert_eq!(pacer.chunk(131_072) / 1000, 125);
    }
}
