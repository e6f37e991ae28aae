//! A TCP connection: one direction carries bytes, the other one acknowledgements.
//!
//! Packets of a flow take one route and do not overtake each other, so a packet is lost when one
//! that was sent later has arrived; real stacks wait for three of those, or a quarter of a round
//! trip. There is a probe for a lost tail (RFC 8985) and a retransmission timeout (RFC 6298). Each
//! packet is acknowledged by itself, and acknowledgements are lost on dead links only.

use std::collections::VecDeque;

use crate::congestion::{AckSample, Algorithm, Congestion};
use crate::events::{MILLISECOND, SECOND, Time};
use crate::network::PACKET_BYTES;

/// Maxima of Linux's `tcp_wmem` and `tcp_rmem`.
const MAX_SEND_BUFFER: u64 = 4 << 20;
const MAX_RECV_BUFFER: u64 = 6 << 20;
/// What a socket's send buffer holds at first.
const MIN_SEND_BUFFER: u64 = 87_040;
const MAX_BACKOFF: u32 = 8;

/// What a flow's owner sets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TcpSettings {
    pub(crate) algorithm: Algorithm,
    /// Payload of a packet. More than fits into one models several that a card sends at once.
    pub(crate) segment: u64,
    /// Minimum of the retransmission timeout beyond the round trip.
    pub(crate) min_timeout: Time,
    /// The socket takes nothing while this many bytes in it are unsent (`TCP_NOTSENT_LOWAT`).
    pub(crate) unsent_limit: u64,
}

impl TcpSettings {
    /// Of a plain socket.
    pub(crate) fn plain(algorithm: Algorithm, segment: u64) -> Self {
        Self { algorithm, segment, min_timeout: 200 * MILLISECOND, unsent_limit: u64::MAX }
    }
}

/// A packet that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packet {
    /// The first byte of the stream in it, and the number of bytes.
    pub(crate) start: u64,
    pub(crate) length: u32,
    /// Number of the transmission.
    pub(crate) order: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    InFlight,
    Delivered,
    Lost,
}

#[derive(Clone, Copy, Debug)]
struct Sent {
    packet: Packet,
    at: Time,
    state: State,
    /// Bytes delivered when it was sent, and when the last of them was.
    delivered: u64,
    delivered_at: Time,
    is_app_limited: bool,
    /// It was sent before.
    is_again: bool,
}

/// When the sender is to be called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// This packet is sent now.
    Packet(Packet),
    /// The next packet may be sent then.
    At(Time),
    /// After an acknowledgement.
    Nothing,
}

/// The sending side.
#[derive(Debug)]
pub(crate) struct TcpSender {
    settings: TcpSettings,
    congestion: Congestion,
    /// Packets that are not acknowledged, in the order of the stream.
    sent: VecDeque<Sent>,
    /// One past the last byte written, sent, and acknowledged.
    written: u64,
    next: u64,
    acked: u64,
    /// Bytes in flight, and number of packets to be sent again.
    in_flight: u64,
    lost: usize,
    orders: u64,
    /// The highest number of a transmission that was delivered.
    newest: Option<u64>,
    delivered: u64,
    delivered_at: Time,
    /// Losses before this byte belong to the same round trip.
    recovery: u64,
    next_send: Time,
    deadline: Option<Time>,
    has_probed: bool,
    backoff: u32,
    last_ack: Time,
    last_probe: Time,
    round_trip: Option<RoundTrip>,
    retransmitted: u64,
    busy: Time,
    busy_since: Option<Time>,
}

#[derive(Clone, Copy, Debug)]
struct RoundTrip {
    least: Time,
    smoothed: Time,
    variation: Time,
}

impl TcpSender {
    /// A flow whose handshake took this time.
    pub(crate) fn new(now: Time, settings: TcpSettings, round_trip: Time) -> Self {
        Self {
            settings,
            congestion: Congestion::new(settings.algorithm, settings.segment),
            sent: VecDeque::new(),
            written: 0,
            next: 0,
            acked: 0,
            in_flight: 0,
            lost: 0,
            orders: 0,
            newest: None,
            delivered: 0,
            delivered_at: now,
            recovery: 0,
            next_send: now,
            deadline: None,
            has_probed: false,
            backoff: 0,
            last_ack: now,
            last_probe: now,
            round_trip: Some(RoundTrip {
                least: round_trip,
                smoothed: round_trip,
                variation: round_trip / 2,
            }),
            retransmitted: 0,
            busy: 0,
            busy_since: None,
        }
    }

    fn buffer(&self) -> u64 {
        (2 * self.congestion.window()).clamp(MIN_SEND_BUFFER, MAX_SEND_BUFFER)
    }

    /// Bytes that the socket takes now.
    pub(crate) fn room(&self) -> u64 {
        let unsent = self.settings.unsent_limit.saturating_sub(self.written - self.next);
        self.buffer().saturating_sub(self.unacknowledged()).min(unsent)
    }

    /// Whether a socket that was full is reported as writable.
    pub(crate) fn is_writable(&self) -> bool {
        let unsent = self.written - self.next;
        let free = self.buffer().saturating_sub(self.unacknowledged());
        free >= self.unacknowledged() / 2 && 2 * unsent < self.settings.unsent_limit
    }

    /// Bytes that were written and are not acknowledged.
    pub(crate) fn unacknowledged(&self) -> u64 {
        self.written - self.acked
    }

    /// Nothing is sent any more.
    pub(crate) fn close(&mut self) {
        (self.sent, self.deadline) = (VecDeque::new(), None);
    }

    /// Bytes that were acknowledged.
    pub(crate) fn acked(&self) -> u64 {
        self.acked
    }

    /// So many bytes are written.
    pub(crate) fn write(&mut self, bytes: u64) {
        self.written += bytes;
    }

    /// What to send. `window`: the receiver takes bytes below this one.
    pub(crate) fn poll(&mut self, now: Time, window: u64) -> Next {
        let next = self.poll_send(now, window);
        let is_busy = self.acked < self.next;
        match self.busy_since {
            None if is_busy => self.busy_since = Some(now),
            Some(since) if !is_busy => {
                self.busy += now - since;
                self.busy_since = None;
            }
            _ => {}
        }
        next
    }

    fn poll_send(&mut self, now: Time, window: u64) -> Next {
        let length = self.settings.segment.min(self.written - self.next);
        let is_new = length > 0 && self.next + length <= window;
        if self.lost == 0 && !is_new {
            return Next::Nothing;
        }
        if self.in_flight > 0 && self.in_flight + self.settings.segment > self.congestion.window() {
            return Next::Nothing;
        }
        if now < self.next_send {
            return Next::At(self.next_send);
        }
        let is_lost = |sent: &&mut Sent| sent.state == State::Lost;
        let lost = if self.lost > 0 { self.sent.iter_mut().find(is_lost) } else { None };
        let packet = match lost {
            Some(lost) => {
                self.lost -= 1;
                self.retransmitted += 1;
                lost.packet.order = self.orders;
                (lost.state, lost.is_again) = (State::InFlight, true);
                (lost.at, lost.delivered) = (now, self.delivered);
                lost.delivered_at = self.delivered_at;
                lost.packet
            }
            None => {
                let packet = Packet { start: self.next, length: length as u32, order: self.orders };
                if self.in_flight == 0 {
                    self.delivered_at = now;
                }
                self.next += length;
                let is_last = self.next == self.written;
                self.sent.push_back(Sent {
                    packet,
                    at: now,
                    state: State::InFlight,
                    delivered: self.delivered,
                    delivered_at: self.delivered_at,
                    is_app_limited: is_last
                        && self.in_flight + 2 * self.settings.segment < self.congestion.window(),
                    is_again: false,
                });
                packet
            }
        };
        self.orders += 1;
        self.in_flight += u64::from(packet.length);
        if let Some(rate) = self.congestion.pacing_rate() {
            let time = f64::from(packet.length) / rate * SECOND as f64;
            self.next_send = self.next_send.max(now) + time as Time;
        }
        if self.deadline.is_none() {
            self.deadline = Some(now + self.timeout());
        }
        Next::Packet(packet)
    }

    /// The transmission with this number has arrived, and the receiver has all bytes below `below`.
    pub(crate) fn handle_ack(&mut self, now: Time, below: u64, packet: Packet) {
        self.last_ack = now;
        (self.backoff, self.has_probed) = (0, false);
        let before = self.delivered;
        let index = self.sent.partition_point(|sent| sent.packet.start < packet.start);
        let mut sample = None;
        if let Some(sent) = self.sent.get_mut(index)
            && sent.packet.start == packet.start
            && sent.state != State::Delivered
        {
            if sent.state == State::InFlight {
                self.in_flight -= u64::from(sent.packet.length);
            } else {
                self.lost -= 1;
            }
            sent.state = State::Delivered;
            self.delivered += u64::from(packet.length);
            if sent.packet.order == packet.order {
                sample = Some(*sent);
            }
        }
        while let Some(front) = self.sent.front().copied()
            && front.packet.start < below
        {
            match front.state {
                State::Delivered => {}
                State::InFlight => self.in_flight -= u64::from(front.packet.length),
                State::Lost => self.lost -= 1,
            }
            if front.state != State::Delivered {
                self.delivered += u64::from(front.packet.length);
            }
            self.sent.pop_front();
        }
        self.acked = self.acked.max(below);
        if self.delivered > before {
            self.delivered_at = now;
        }
        self.find_losses(packet.order);
        if let Some(sent) = sample {
            self.measure(now - sent.at);
            let time = (now - sent.delivered_at).max(now - sent.at).max(1);
            let bytes = self.delivered - sent.delivered;
            self.congestion.handle_ack(&AckSample {
                now,
                bytes: self.delivered - before,
                round_trip: now - sent.at,
                delivered_before: sent.delivered,
                delivered: self.delivered,
                rate: bytes as f64 / time as f64 * SECOND as f64,
                is_app_limited: sent.is_app_limited,
                in_flight: self.in_flight,
                is_recovering: self.acked < self.recovery,
            });
        }
        self.deadline = (!self.sent.is_empty()).then(|| now + self.timeout());
    }

    /// What was sent before this transmission, and has not arrived, is lost.
    fn find_losses(&mut self, order: u64) {
        self.newest = self.newest.max(Some(order));
        if self.sent.front().is_none_or(|front| front.packet.order > order && !front.is_again) {
            // Nothing is missing.
            return;
        }
        let mut first = None;
        for sent in &mut self.sent {
            if sent.state == State::InFlight && Some(sent.packet.order) < self.newest {
                sent.state = State::Lost;
                self.in_flight -= u64::from(sent.packet.length);
                self.lost += 1;
                first = first.or(Some(sent.packet.start));
            }
        }
        if first.is_some_and(|start| start >= self.recovery) {
            self.recovery = self.next;
            self.congestion.handle_loss(self.in_flight);
        }
    }

    fn measure(&mut self, time: Time) {
        self.round_trip = Some(match self.round_trip {
            None => RoundTrip { least: time, smoothed: time, variation: time / 2 },
            Some(RoundTrip { least, smoothed, variation }) => RoundTrip {
                least: least.min(time),
                smoothed: (7 * smoothed + time) / 8,
                variation: (3 * variation + smoothed.abs_diff(time)) / 4,
            },
        });
    }

    /// After this time without an acknowledgement, the tail is probed, or everything is sent again.
    fn timeout(&self) -> Time {
        let RoundTrip { smoothed, variation, .. } = self.round_trip();
        let timeout = smoothed + self.settings.min_timeout.max(4 * variation);
        if self.has_probed || self.lost > 0 || self.backoff > 0 {
            return timeout << self.backoff;
        }
        let one = self.sent.len() == 1;
        let probe = 2 * smoothed + if one { self.settings.min_timeout } else { 2 * MILLISECOND };
        probe.min(timeout)
    }

    fn round_trip(&self) -> RoundTrip {
        let unknown = RoundTrip { least: 0, smoothed: 0, variation: 0 };
        self.round_trip.unwrap_or(unknown)
    }

    /// When [`TcpSender::handle_timeout`] is due.
    pub(crate) fn deadline(&self) -> Option<Time> {
        self.deadline
    }

    /// Nothing was acknowledged until the deadline. [`TcpSender::poll`] follows.
    pub(crate) fn handle_timeout(&mut self, now: Time) {
        self.last_probe = now;
        let is_probe = !self.has_probed && self.lost == 0 && self.backoff == 0;
        let last = self.sent.iter_mut().rev().find(|sent| sent.state == State::InFlight);
        if is_probe && let Some(last) = last {
            last.state = State::Lost;
            self.in_flight -= u64::from(last.packet.length);
            self.lost += 1;
            self.has_probed = true;
        } else {
            for sent in self.sent.iter_mut().filter(|sent| sent.state == State::InFlight) {
                sent.state = State::Lost;
                self.in_flight -= u64::from(sent.packet.length);
                self.lost += 1;
            }
            if self.backoff == 0 {
                self.congestion.handle_timeout();
                self.recovery = self.next;
            }
            self.backoff = (self.backoff + 1).min(MAX_BACKOFF);
        }
        self.next_send = now;
        self.deadline = Some(now + self.timeout());
    }

    /// Unanswered probes and timeouts, and the times since the last of them and since the last
    /// acknowledgement.
    pub(crate) fn silence(&self, now: Time) -> (u32, Time, Time) {
        let unanswered = self.backoff + u32::from(self.has_probed);
        (unanswered, now - self.last_probe, now - self.last_ack)
    }

    /// The minimum and the smoothed round trip.
    pub(crate) fn round_trips(&self) -> (Time, Time) {
        let RoundTrip { least, smoothed, .. } = self.round_trip();
        (least, smoothed)
    }

    /// Packets that were sent again, in units of usual ones.
    pub(crate) fn retransmitted(&self) -> u64 {
        self.retransmitted * self.settings.segment.div_ceil(PACKET_BYTES)
    }

    /// Time with unacknowledged bytes so far.
    pub(crate) fn busy(&self, now: Time) -> Time {
        self.busy + self.busy_since.map_or(0, |since| now - since)
    }
}

/// The receiving side.
#[derive(Debug, Default)]
pub(crate) struct TcpReceiver {
    /// It has all bytes below this one, and its user has read those below `read`.
    next: u64,
    read: u64,
    /// Ranges behind a gap, in order.
    later: Vec<(u64, u64)>,
}

impl TcpReceiver {
    /// A packet arrives. Returns whether there is something new to read.
    pub(crate) fn handle_packet(&mut self, packet: Packet) -> bool {
        let (start, end) = (packet.start, packet.start + u64::from(packet.length));
        if end <= self.next {
            return false;
        }
        if start > self.next {
            let index = self.later.partition_point(|range| range.0 < start);
            if self.later.get(index).is_none_or(|range| range.0 != start) {
                self.later.insert(index, (start, end));
            }
            return false;
        }
        let mut next = end;
        let known = self.later.iter().take_while(|range| {
            let follows = range.0 <= next;
            next = next.max(if follows { range.1 } else { 0 });
            follows
        });
        let known = known.count();
        self.next = next;
        self.later.drain(..known);
        true
    }

    /// All bytes below this one have arrived.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// Bytes that can be read.
    pub(crate) fn available(&self) -> u64 {
        self.next - self.read
    }

    /// So many bytes were read.
    pub(crate) fn take(&mut self, bytes: u64) {
        self.read += bytes;
    }

    /// Bytes below this one fit into the buffer.
    pub(crate) fn window(&self) -> u64 {
        self.read + MAX_RECV_BUFFER
    }

    /// Bytes that are held.
    pub(crate) fn held(&self) -> u64 {
        self.available() + self.later.iter().map(|(start, end)| end - start).sum::<u64>()
    }
}
