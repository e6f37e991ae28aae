//! Published models of TCP's congestion control: CUBIC (RFC 9438) and BBR
//! (draft-cardwell-iccrg-bbr-congestion-control-00, the version that Linux has as `bbr`).

use crate::events::{MILLISECOND, SECOND, Time};
use crate::network::PACKET_BYTES;

/// RFC 6928.
const INITIAL_WINDOW: u64 = 10 * PACKET_BYTES;

/// Which one a flow has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Algorithm {
    Cubic,
    Bbr,
}

/// An acknowledgement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AckSample {
    pub(crate) now: Time,
    /// Bytes that are newly delivered.
    pub(crate) bytes: u64,
    /// Round trip of the packet.
    pub(crate) round_trip: Time,
    /// Bytes delivered when the packet was sent, and so far.
    pub(crate) delivered_before: u64,
    pub(crate) delivered: u64,
    /// Bytes per second, since the packet was sent.
    pub(crate) rate: f64,
    /// There was too little to send for the rate to say what the path carries.
    pub(crate) is_app_limited: bool,
    /// Bytes that are neither delivered nor lost.
    pub(crate) in_flight: u64,
    /// What is lost is being sent again.
    pub(crate) is_recovering: bool,
}

/// Window and pacing of a flow.
#[derive(Debug)]
pub(crate) enum Congestion {
    Cubic(Cubic),
    Bbr(Box<Bbr>),
}

impl Congestion {
    pub(crate) fn new(algorithm: Algorithm, segment: u64) -> Self {
        match algorithm {
            Algorithm::Cubic => Self::Cubic(Cubic::new(segment)),
            Algorithm::Bbr => Self::Bbr(Box::new(Bbr::new(segment))),
        }
    }

    /// Bytes that may be in flight.
    pub(crate) fn window(&self) -> u64 {
        match self {
            Self::Cubic(cubic) => cubic.window as u64,
            Self::Bbr(bbr) => bbr.window,
        }
    }

    /// Bytes per second at which packets are sent; without a limit if `None`.
    pub(crate) fn pacing_rate(&self) -> Option<f64> {
        match self {
            Self::Cubic(_) => None,
            Self::Bbr(bbr) => bbr.pacing_rate(),
        }
    }

    pub(crate) fn handle_ack(&mut self, ack: &AckSample) {
        match self {
            Self::Cubic(cubic) => cubic.handle_ack(ack),
            Self::Bbr(bbr) => bbr.handle_ack(ack),
        }
    }

    /// Something is lost, for the first time in this round trip.
    pub(crate) fn handle_loss(&mut self, in_flight: u64) {
        match self {
            Self::Cubic(cubic) => cubic.handle_loss(),
            Self::Bbr(bbr) => bbr.window = bbr.window.min(in_flight.max(bbr.min_window())),
        }
    }

    /// Nothing was acknowledged for the retransmission timeout.
    pub(crate) fn handle_timeout(&mut self) {
        match self {
            Self::Cubic(cubic) => {
                cubic.handle_loss();
                cubic.window = cubic.segment;
            }
            Self::Bbr(bbr) => bbr.window = bbr.segment,
        }
    }
}

/// RFC 9438, without HyStart++.
#[derive(Debug)]
pub(crate) struct Cubic {
    segment: f64,
    /// All in bytes.
    window: f64,
    threshold: f64,
    max: f64,
    /// What Reno would have (4.3).
    reno: f64,
    /// When the present growth began, and how long it takes to the former maximum, in seconds.
    epoch: Option<Time>,
    origin: f64,
}

const CUBIC_C: f64 = 0.4;
const CUBIC_BETA: f64 = 0.7;

impl Cubic {
    fn new(segment: u64) -> Self {
        let (segment, window) = (segment as f64, INITIAL_WINDOW.max(segment) as f64);
        Self { segment, window, threshold: f64::MAX, max: 0.0, reno: 0.0, epoch: None, origin: 0.0 }
    }

    fn handle_ack(&mut self, ack: &AckSample) {
        let bytes = ack.bytes as f64;
        // A window that is not used says nothing about the path (RFC 9438, 4.2).
        if ack.is_recovering || ack.is_app_limited {
            return;
        }
        if self.window < self.threshold {
            self.window += bytes;
            return;
        }
        let packet = PACKET_BYTES as f64;
        let epoch = *self.epoch.get_or_insert_with(|| {
            self.reno = self.window;
            self.max = self.max.max(self.window);
            self.origin = ((self.max - self.window) / packet / CUBIC_C).cbrt();
            ack.now
        });
        let round_trip = ack.round_trip as f64 / SECOND as f64;
        let time = ack.now.saturating_sub(epoch) as f64 / SECOND as f64 + round_trip;
        let target = self.max + CUBIC_C * (time - self.origin).powi(3) * packet;
        let target = target.clamp(self.window, 1.5 * self.window);
        self.window += (target - self.window) * bytes / self.window;
        let alpha = 3.0 * (1.0 - CUBIC_BETA) / (1.0 + CUBIC_BETA);
        self.reno += alpha * packet * bytes / self.window;
        self.window = self.window.max(self.reno);
    }

    fn handle_loss(&mut self) {
        // Fast convergence (4.7).
        self.max = match self.window < self.max {
            true => self.window * (1.0 + CUBIC_BETA) / 2.0,
            false => self.window,
        };
        let least = self.segment.max(2.0 * PACKET_BYTES as f64);
        self.window = (self.window * CUBIC_BETA).max(least);
        (self.threshold, self.epoch) = (self.window, None);
    }
}

const STARTUP_GAIN: f64 = 2.885;
const CYCLE: [f64; 8] = [1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
const RATE_ROUNDS: u64 = 10;
const MIN_ROUND_TRIP_TIME: Time = 10 * SECOND;
const PROBE_TIME: Time = 200 * MILLISECOND;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Startup,
    Drain,
    ProbeRate { cycle: usize, since: Time },
    ProbeRoundTrip { until: Time },
}

/// The first version of BBR: it paces at the highest rate of the last 10 round trips, and does not
/// react to losses.
#[derive(Debug)]
pub(crate) struct Bbr {
    segment: u64,
    window: u64,
    phase: Phase,
    /// The highest rates of rounds, in bytes per second, by number.
    rates: std::collections::VecDeque<(u64, f64)>,
    round: u64,
    /// A packet that was sent with this number of delivered bytes ends the round.
    round_end: u64,
    /// The shortest round trip, and when it was measured.
    round_trip: Option<(Time, Time)>,
    /// The highest rate when it last grew by a quarter, and rounds since then.
    full: (f64, u32),
    is_full: bool,
}

impl Bbr {
    fn new(segment: u64) -> Self {
        Self {
            segment,
            window: INITIAL_WINDOW.max(segment),
            phase: Phase::Startup,
            rates: std::collections::VecDeque::new(),
            round: 0,
            round_end: 0,
            round_trip: None,
            full: (0.0, 0),
            is_full: false,
        }
    }

    fn rate(&self) -> f64 {
        self.rates.front().map_or(0.0, |(_, rate)| *rate)
    }

    fn pacing_rate(&self) -> Option<f64> {
        let rate = self.rate();
        let gain = match self.phase {
            Phase::Startup => STARTUP_GAIN,
            Phase::Drain => 1.0 / STARTUP_GAIN,
            Phase::ProbeRate { cycle, .. } => CYCLE[cycle],
            Phase::ProbeRoundTrip { .. } => 1.0,
        };
        // The first window goes out at once.
        (rate > 0.0).then_some(rate * gain * 0.99)
    }

    fn min_window(&self) -> u64 {
        (4 * PACKET_BYTES).max(self.segment)
    }

    /// Bytes that the path holds.
    fn product(&self) -> f64 {
        let round_trip = self.round_trip.map_or(0, |(time, _)| time);
        self.rate() * round_trip as f64 / SECOND as f64
    }

    fn handle_ack(&mut self, ack: &AckSample) {
        let is_new_round = ack.delivered_before >= self.round_end;
        if is_new_round {
            (self.round, self.round_end) = (self.round + 1, ack.delivered);
        }
        if !ack.is_app_limited || ack.rate >= self.rate() {
            while self.rates.back().is_some_and(|(_, rate)| *rate <= ack.rate) {
                self.rates.pop_back();
            }
            self.rates.push_back((self.round, ack.rate));
        }
        while self.rates.len() > 1
            && self.rates.front().is_some_and(|(round, _)| round + RATE_ROUNDS < self.round)
        {
            self.rates.pop_front();
        }
        let is_expired = self.round_trip.is_some_and(|(_, at)| ack.now > at + MIN_ROUND_TRIP_TIME);
        if is_expired || self.round_trip.is_none_or(|(time, _)| ack.round_trip <= time) {
            self.round_trip = Some((ack.round_trip, ack.now));
        }
        if !self.is_full && is_new_round && !ack.is_app_limited {
            let (before, rounds) = self.full;
            self.full = match self.rate() >= 1.25 * before {
                true => (self.rate(), 0),
                false => (before, rounds + 1),
            };
            self.is_full = self.full.1 >= 3;
        }
        self.next_phase(ack, is_expired);
        let gain = if self.is_full { 2.0 } else { STARTUP_GAIN };
        // Three bursts of what a host sends at once (`3 * tso_segs_goal`).
        let burst = (self.rate() / 1000.0).clamp(2.0 * PACKET_BYTES as f64, 65_536.0);
        let target = (self.product() * gain + 3.0 * burst) as u64;
        self.window = match self.phase {
            Phase::ProbeRoundTrip { .. } => self.min_window(),
            _ if self.is_full => (self.window + ack.bytes).min(target),
            _ if self.window < target || ack.delivered < INITIAL_WINDOW => self.window + ack.bytes,
            _ => self.window,
        };
        self.window = self.window.max(self.min_window());
    }

    fn next_phase(&mut self, ack: &AckSample, is_expired: bool) {
        let now = ack.now;
        let probe = Phase::ProbeRate { cycle: 2, since: now };
        self.phase = match self.phase {
            Phase::ProbeRoundTrip { until } if now < until => self.phase,
            Phase::ProbeRoundTrip { .. } if self.is_full => probe,
            Phase::ProbeRoundTrip { .. } => Phase::Startup,
            _ if is_expired => Phase::ProbeRoundTrip { until: now + PROBE_TIME },
            Phase::Startup if self.is_full => Phase::Drain,
            Phase::Startup => Phase::Startup,
            Phase::Drain if (ack.in_flight as f64) <= self.product() => probe,
            Phase::Drain => Phase::Drain,
            Phase::ProbeRate { cycle, since } => {
                let round_trip = self.round_trip.map_or(0, |(time, _)| time);
                let is_over = now > since + round_trip;
                let product = self.product();
                let ends = match cycle {
                    0 => is_over && ack.in_flight as f64 >= 1.25 * product,
                    1 => is_over || ack.in_flight as f64 <= product,
                    _ => is_over,
                };
                // Another flow may keep the queue so full that nothing more gets in flight.
                let ends = ends || is_over && ack.is_recovering;
                match ends {
                    true => Phase::ProbeRate { cycle: (cycle + 1) % CYCLE.len(), since: now },
                    false => self.phase,
                }
            }
        };
    }
}
