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
/// Where all flows are late, their best rates are those of the last two cycles of so many rounds. A round is the shortest round
/// trip, within these limits.
const CYCLE_ROUNDS: u32 = 16;
const MIN_ROUND: Duration = INTERVAL;
const MAX_ROUND: Duration = Duration::from_millis(20);
/// For so many rounds at the end of a cycle, they try to deliver more.
const PROBE_ROUNDS: u32 = 2;
/// The best rate is taken for at most this many times the present one.
const MAX_DROP: f64 = 2.0;
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
    /// The shortest smoothed round-trip time of the connection's flows, this one included.
    pub shortest_round_trip: Duration,
    /// Segments that were sent again.
    pub retransmitted: u64,
}

/// The delivery rate of a flow, and what follows from it.
///
/// Where even the earliest of a connection's flows is later than pacing makes it, something else fills the queues: transfers of
/// others, or the flows themselves before they were paced. Less outstanding lets the former take this connection's share, and is
/// right for the latter. What differs is the rate, which falls in the first case alone. So a flow may then have outstanding what
/// it delivers at its best recent rate in half of the additional time too. Now and then it is twice that time, which raises a
/// rate of which others have taken a part.
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
    /// The shortest round trip of the connection's flows.
    shortest_round_trip: Duration,
    /// The best rates of the present cycle and of the last one, and when the present one began.
    best: [f64; 2],
    cycle: Duration,
    is_probing: bool,
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
        let rate = self.rate.map_or(rate, |before| (before + rate) / 2.0);
        self.rate = Some(rate);
        self.shortest_round_trip = progress.shortest_round_trip;
        self.note_best(now, rate);
        let again = progress.retransmitted.saturating_sub(self.last.retransmitted);
        self.last = progress;
        again * SEGMENT_BYTES > acked / LOSS
            || progress.usual_round_trip > progress.round_trip + CONGESTION
    }

    fn note_best(&mut self, now: Duration, rate: f64) {
        let round = self.shortest_round_trip.clamp(MIN_ROUND, MAX_ROUND);
        let mut time = now.saturating_sub(self.cycle);
        if time >= CYCLE_ROUNDS * round {
            (self.best, self.cycle) = ([rate, self.best[0]], now);
            time = Duration::ZERO;
        }
        self.best[0] = self.best[0].max(rate);
        self.is_probing = time >= (CYCLE_ROUNDS - PROBE_ROUNDS) * round;
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
        let depth = depth + 2 * self.round_trip;
        let Some(rate) = self.rate else { return FIRST_OUTSTANDING };
        let late = self.shortest_round_trip.saturating_sub(depth);
        let rate = match late.is_zero() {
            true => rate,
            false => self.best[0].max(self.best[1]).min(MAX_DROP * rate),
        };
        let time = depth + if self.is_probing { 2 * late } else { late / 2 };
        min.max((rate * time.as_secs_f64()) as u64)
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
    }

    /// Flows of one connection over one link, with a queue that others fill.
    struct Link {
        pacers: Vec<Pacer>,
        progress: Vec<Progress>,
        outstanding: Vec<f64>,
        now: Duration,
    }

    impl Link {
        fn new(flows: usize) -> Self {
            let mut pacer = Pacer::default();
            pacer.set_alone(flows == 1);
            Self {
                pacers: vec![pacer; flows],
                progress: vec![Progress::default(); flows],
                outstanding: vec![0.0; flows],
                now: Duration::ZERO,
            }
        }

        /// The flows have as much outstanding as they may for this time. They get at most `bytes_per_second`. Others' bytes delay
        /// theirs by `queue`. Returns the share of these bytes that they have delivered, and their round trip.
        fn go(
            &mut self,
            bytes_per_second: f64,
            queue: Duration,
            time: Duration,
        ) -> (f64, Duration) {
            const BASE: Duration = Duration::from_micros(100);
            const STEP: Duration = Duration::from_micros(500);
            let begin = (self.now, self.delivered());
            let mut round_trip = BASE;
            while self.now < begin.0 + time {
                self.now += STEP;
                let limits = self.pacers.iter().map(|pacer| pacer.max_outstanding() as f64);
                self.outstanding = limits.collect();
                let sum: f64 = self.outstanding.iter().sum();
                let delay = (BASE + queue).max(Duration::from_secs_f64(sum / bytes_per_second));
                // Smoothed, as the kernel does.
                round_trip = (round_trip * 7 + delay) / 8;
                for ((pacer, progress), outstanding) in
                    self.pacers.iter_mut().zip(&mut self.progress).zip(&self.outstanding)
                {
                    progress.acked +=
                        (outstanding * (STEP.as_secs_f64() / delay.as_secs_f64())) as u64;
                    progress.busy += STEP;
                    progress.round_trip = BASE;
                    (progress.usual_round_trip, progress.shortest_round_trip) =
                        (round_trip, round_trip);
                    if pacer.sample_due(self.now) {
                        pacer.sample(self.now, *progress);
                    }
                }
            }
            let bytes = (self.delivered() - begin.1) as f64;
            (bytes / bytes_per_second / time.as_secs_f64(), round_trip)
        }

        fn delivered(&self) -> u64 {
            self.progress.iter().map(|progress| progress.acked).sum()
        }
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn pacing_keeps_the_share_of_a_link_whose_queue_others_fill() {
        for (flows, millis) in
            [(4, 4), (4, 10), (4, 20), (4, 50), (1, 8), (1, 10), (1, 20), (1, 50)]
        {
            let mut link = Link::new(flows);
            link.go(1.25e9, Duration::ZERO, SECOND);
            let queue = Duration::from_millis(millis);
            link.go(625e6, queue, 30 * SECOND);
            let (share, _) = link.go(625e6, queue, 10 * SECOND);
            assert!(share > 0.5, "{flows} flows, {queue:?}: {share}");
        }
    }

    #[test]
    fn pacing_comes_up_to_speed_in_a_queue_that_others_fill() {
        let queue = Duration::from_millis(10);
        let mut link = Link::new(4);
        link.pacers.iter_mut().for_each(|pacer| *pacer = Pacer::slow_start());
        link.go(625e6, queue, 5 * SECOND);
        let (share, _) = link.go(625e6, queue, 5 * SECOND);
        assert!(share > 0.5, "{share}");
    }

    /// Whatever they had outstanding before: at first too much for a slow link, then what a faster link delivers.
    #[test]
    fn pacing_empties_the_queue_that_its_own_flows_fill() {
        for flows in [1, 4] {
            let most = if flows == 1 { DEPTH_ALONE } else { DEPTH };
            let mut link = Link::new(flows);
            for bytes_per_second in [25e6, 250e6, 50e6] {
                link.go(bytes_per_second, Duration::ZERO, 3 * SECOND);
                let (share, round_trip) = link.go(bytes_per_second, Duration::ZERO, SECOND);
                assert!(share > 0.95 && round_trip < 2 * most, "{flows}: {share} {round_trip:?}");
            }
        }
    }

    #[test]
    fn pacing_cuts_a_late_flow_while_a_sibling_is_early() {
        let mut pacer = paced(1000);
        let outstanding = pacer.max_outstanding();
        let mut progress = pacer.last;
        let mut late_by = |usual, shortest| {
            for _ in 0..100 {
                progress.acked += 625_000;
                progress.busy += INTERVAL;
                progress.usual_round_trip = Duration::from_millis(usual);
                progress.shortest_round_trip = Duration::from_millis(shortest);
                pacer.sample(progress.busy, progress);
            }
            pacer.max_outstanding()
        };
        assert_eq!(late_by(20, 2) / 10_000, outstanding / 10_000);
        assert!(late_by(20, 19) > 2 * outstanding);
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
