//! The hosts' kernels and the network between them: sockets, without bytes, clocks and processors.
//!
//! Frames against the direction of a flow's bytes are small and rare, so they are modelled without
//! windows: each takes the time of the route back, in order, and longer if it is lost.

use std::collections::VecDeque;
use std::time::Duration;

use evenkeel_protocol::{FRAME_BYTES, PathInfo};
use evenkeel_testkit::TestRng;

use crate::events::{Events, MILLISECOND, Time};
use crate::network::{Network, Route};
use crate::stream::{Bytes, Stream};
use crate::tcp::{Next, Packet, TcpReceiver, TcpSender, TcpSettings};

/// A frame that is lost is sent again after two round trips and this time.
const FRAME_TIMEOUT: Time = 20 * MILLISECOND;
/// Frames on a dead route are tried again after this time.
const FRAME_RETRY: Time = 100 * MILLISECOND;

/// The sender is told of the window when it grows from less than this.
const SHORT_WINDOW: u64 = 1 << 20;

/// A flow. None that is opened later has the same.
pub(crate) type FlowKey = usize;

/// What the user of a flow learns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// The handshake of a flow that was dialed is complete.
    Connected(FlowKey),
    /// A flow that was full takes bytes again.
    Writable(FlowKey),
    /// There are bytes to read at the receiver.
    Readable(FlowKey),
    /// A frame from the receiver has arrived at the sender.
    Reply(FlowKey, [u8; FRAME_BYTES]),
    /// A timer that was set with this value.
    Timer(u64),
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// A packet comes to the port with this place in its route.
    Hop {
        flow: u32,
        hop: u8,
        packet: Packet,
    },
    Ack {
        flow: u32,
        below: u64,
        packet: Packet,
    },
    /// A flow may send again.
    Send(u32),
    Timeout(u32),
    Reply(u32, [u8; FRAME_BYTES]),
    Connected(u32),
    Timer(u32, u64),
    SetDown {
        port: u32,
        is_down: bool,
    },
}

#[derive(Debug)]
struct Flow {
    owner: u32,
    route: Route,
    back: Route,
    sender: TcpSender,
    receiver: TcpReceiver,
    stream: Stream,
    is_open: bool,
    /// Its user has found it full.
    is_full: bool,
    /// It has no user: it always has bytes to send, and they are read at once.
    is_greedy: bool,
    /// There is an event for the timeout, or for sending.
    has_timeout: bool,
    has_send: bool,
    /// When the last frame arrives.
    last_reply: Time,
}

/// All sockets, and the network.
#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) network: Network,
    pub(crate) rng: TestRng,
    events: Events<Event>,
    now: Time,
    flows: Vec<Flow>,
    notices: VecDeque<(usize, Notice)>,
    handled: u64,
}

impl Kernel {
    /// A network without flows. All that is random follows from the seed.
    pub(crate) fn new(network: Network, seed: u64) -> Self {
        Self {
            network,
            rng: TestRng::new(seed),
            events: Events::default(),
            now: 0,
            flows: Vec::new(),
            notices: VecDeque::new(),
            handled: 0,
        }
    }

    pub(crate) fn now(&self) -> Time {
        self.now
    }

    /// The present time, as the protocol's code gets it.
    pub(crate) fn time(&self) -> Duration {
        Duration::from_nanos(self.now)
    }

    /// Number of events that were handled.
    pub(crate) fn handled(&self) -> u64 {
        self.handled
    }

    /// Number of events that are still to happen.
    pub(crate) fn pending(&self) -> usize {
        self.events.len()
    }

    /// The next thing that happens and whom it concerns, unless that is later than `until`.
    pub(crate) fn next(&mut self, until: Time) -> Option<(usize, Notice)> {
        loop {
            if let Some(notice) = self.notices.pop_front() {
                return Some(notice);
            }
            if self.events.next_time().is_none_or(|at| at > until) {
                self.now = self.now.max(until);
                return None;
            }
            let (at, event) = self.events.pop()?;
            self.now = at;
            self.handled += 1;
            self.handle(event);
        }
    }

    /// Opens a flow between two hosts. A hash of random ports chooses its route. Notices are for
    /// its owner.
    pub(crate) fn open(
        &mut self,
        owner: usize,
        [from, to]: [usize; 2],
        settings: TcpSettings,
    ) -> FlowKey {
        let (hash, other) = (self.rng.next_u64(), self.rng.next_u64());
        let route = self.network.route(from, to, hash);
        // Answers of the other host have ports in turn, and another hash.
        let back = self.network.route(to, from, other);
        let delay = |route: &Route| -> Time {
            route.iter().map(|port| self.network.ports[*port as usize].delay).sum()
        };
        let round_trip = delay(&route) + delay(&back);
        let sender = TcpSender::new(self.now, settings, round_trip);
        self.flows.push(Flow {
            owner: owner as u32,
            route,
            back,
            sender,
            receiver: TcpReceiver::default(),
            stream: Stream::default(),
            is_open: true,
            is_full: false,
            is_greedy: false,
            has_timeout: false,
            has_send: false,
            last_reply: 0,
        });
        self.flows.len() - 1
    }

    /// Dials a flow. After two round trips, of TCP's and the protocol's handshakes,
    /// [`Notice::Connected`] follows, unless its route is dead.
    pub(crate) fn dial(
        &mut self,
        owner: usize,
        hosts: [usize; 2],
        settings: TcpSettings,
    ) -> FlowKey {
        let key = self.open(owner, hosts, settings);
        let flow = &self.flows[key];
        let forth = self.network.transit(self.now, &flow.route);
        let back = self.network.transit(self.now, &flow.back);
        if let (Some(forth), Some(back)) = (forth, back) {
            self.events.add(self.now + 2 * (forth + back), Event::Connected(key as u32));
        }
        key
    }

    /// Opens a flow that sends as fast as it can, for ever.
    pub(crate) fn open_greedy(&mut self, hosts: [usize; 2], settings: TcpSettings) -> FlowKey {
        let key = self.open(0, hosts, settings);
        self.flows[key].is_greedy = true;
        self.send(key);
        key
    }

    /// The same on the route that a hash of this value gives.
    pub(crate) fn open_greedy_by(&mut self, hash: usize, settings: TcpSettings) {
        let key = self.open(0, [0, 1], settings);
        self.flows[key].route = self.network.route(0, 1, hash as u64);
        self.flows[key].is_greedy = true;
        self.send(key);
    }

    /// Closes a flow. What is on its way is lost.
    pub(crate) fn close(&mut self, key: FlowKey) {
        let flow = &mut self.flows[key];
        flow.is_open = false;
        (flow.stream, flow.receiver) = (Stream::default(), TcpReceiver::default());
        flow.sender.close();
    }

    /// A port loses everything from then on, or no more.
    pub(crate) fn set_down(&mut self, at: Time, port: usize, is_down: bool) {
        self.events.add(at, Event::SetDown { port: port as u32, is_down });
    }

    /// [`Notice::Timer`] with this value comes to this owner then.
    pub(crate) fn set_timer(&mut self, at: Time, owner: usize, value: u64) {
        self.events.add(at.max(self.now), Event::Timer(owner as u32, value));
    }

    /// Bytes that a flow's socket takes now.
    pub(crate) fn room(&self, key: FlowKey) -> u64 {
        self.flows[key].sender.room()
    }

    /// Writes bytes, not more than there is room for. [`Kernel::send`] follows.
    pub(crate) fn write(&mut self, key: FlowKey, bytes: Bytes) {
        let flow = &mut self.flows[key];
        flow.sender.write(bytes.len());
        flow.stream.push(bytes);
    }

    /// [`Notice::Writable`] comes when the flow takes bytes again.
    pub(crate) fn set_full(&mut self, key: FlowKey) {
        self.flows[key].is_full = true;
    }

    /// Bytes that can be read of a flow.
    pub(crate) fn available(&self, key: FlowKey) -> u64 {
        self.flows[key].receiver.available()
    }

    /// Reads bytes that are available, by `read`, which returns how many it takes.
    pub(crate) fn read(&mut self, key: FlowKey, read: impl FnOnce(&mut Stream) -> u64) -> u64 {
        let flow = &mut self.flows[key];
        let bytes = read(&mut flow.stream);
        let was_short = flow.receiver.window() <= flow.receiver.next() + SHORT_WINDOW;
        flow.receiver.take(bytes);
        if was_short {
            self.wake_sender(key);
        }
        bytes
    }

    fn wake_sender(&mut self, key: FlowKey) {
        let flow = &mut self.flows[key];
        if !std::mem::replace(&mut flow.has_send, true) {
            let delay = self.network.transit(self.now, &flow.back).unwrap_or(FRAME_RETRY);
            self.events.add(self.now + delay, Event::Send(key as u32));
        }
    }

    /// The receiver writes a frame to the sender.
    pub(crate) fn reply(&mut self, key: FlowKey, frame: [u8; FRAME_BYTES]) {
        let flow = &self.flows[key];
        let mut at = self.now;
        let loss: f64 = flow.back.iter().map(|port| self.network.ports[*port as usize].loss).sum();
        if loss > 0.0 && (self.rng.below(1 << 32) as f64) < loss * (1_u64 << 32) as f64 {
            at += 2 * flow.sender.round_trips().1 + FRAME_TIMEOUT;
        }
        match self.network.transit(self.now, &flow.back) {
            Some(time) => {
                let flow = &mut self.flows[key];
                flow.last_reply = flow.last_reply.max(at + time);
                self.events.add(flow.last_reply, Event::Reply(key as u32, frame));
            }
            None => {
                self.flows[key].last_reply = self.now + FRAME_RETRY;
                self.events.add(self.now + FRAME_RETRY, Event::Reply(key as u32, frame));
            }
        }
    }

    /// Bytes that were written to a flow and are not acknowledged.
    pub(crate) fn unacknowledged(&self, key: FlowKey) -> u64 {
        self.flows[key].sender.unacknowledged()
    }

    /// Bytes of a flow that were acknowledged.
    pub(crate) fn acked(&self, key: FlowKey) -> u64 {
        self.flows[key].sender.acked()
    }

    /// Bytes that both sides of a flow hold.
    pub(crate) fn held(&self, key: FlowKey) -> u64 {
        let flow = &self.flows[key];
        flow.sender.unacknowledged() + flow.receiver.held()
    }

    /// What the sender's kernel knows of a flow's path.
    pub(crate) fn path_info(&self, key: FlowKey) -> PathInfo {
        let sender = &self.flows[key].sender;
        let (unanswered, asked, silent) = sender.silence(self.now);
        let (round_trip, usual_round_trip) = sender.round_trips();
        PathInfo {
            unanswered: unanswered.min(255) as u8,
            asked: Duration::from_nanos(asked),
            silent: Duration::from_nanos(silent),
            acked: sender.acked(),
            busy: Duration::from_nanos(sender.busy(self.now)),
            round_trip: Duration::from_nanos(round_trip),
            usual_round_trip: Duration::from_nanos(usual_round_trip),
            retransmitted: sender.retransmitted(),
        }
    }

    /// Sends what a flow may send.
    pub(crate) fn send(&mut self, key: FlowKey) {
        let now = self.now;
        let flow = &mut self.flows[key];
        if !flow.is_open {
            return;
        }
        if flow.is_greedy && flow.sender.room() > 0 {
            flow.sender.write(flow.sender.room());
        }
        loop {
            match flow.sender.poll(now, flow.receiver.window()) {
                Next::Packet(packet) => {
                    let port = &mut self.network.ports[flow.route[0] as usize];
                    if let Some(at) = port.pass(now, packet.length.into(), &mut self.rng) {
                        self.events.add(at, Event::Hop { flow: key as u32, hop: 1, packet });
                    }
                }
                Next::At(at) => {
                    if !std::mem::replace(&mut flow.has_send, true) {
                        self.events.add(at, Event::Send(key as u32));
                    }
                    break;
                }
                Next::Nothing => break,
            }
        }
        if let Some(at) = flow.sender.deadline().filter(|_| !flow.has_timeout) {
            flow.has_timeout = true;
            self.events.add(at, Event::Timeout(key as u32));
        }
        if flow.is_full && flow.sender.is_writable() {
            flow.is_full = false;
            self.notices.push_back((flow.owner as usize, Notice::Writable(key)));
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Hop { flow, hop, packet } => self.hop(flow, hop, packet),
            Event::Ack { flow, below, packet } => {
                let entry = &mut self.flows[flow as usize];
                if entry.is_open {
                    entry.sender.handle_ack(self.now, below, packet);
                    self.send(flow as usize);
                }
            }
            Event::Send(flow) => {
                self.flows[flow as usize].has_send = false;
                self.send(flow as usize);
            }
            Event::Timeout(flow) => {
                let entry = &mut self.flows[flow as usize];
                entry.has_timeout = false;
                if entry.is_open && entry.sender.deadline().is_some_and(|at| at <= self.now) {
                    entry.sender.handle_timeout(self.now);
                }
                self.send(flow as usize);
            }
            Event::Reply(flow, frame) => {
                let Flow { back, is_open, .. } = &self.flows[flow as usize];
                let is_down = |port: &u32| self.network.ports[*port as usize].is_down;
                match back.iter().any(is_down) {
                    true if *is_open => {
                        self.events.add(self.now + FRAME_RETRY, Event::Reply(flow, frame));
                    }
                    false if *is_open => self.notify(flow, Notice::Reply(flow as usize, frame)),
                    _ => {}
                }
            }
            Event::Connected(flow) => {
                if self.flows[flow as usize].is_open {
                    self.notify(flow, Notice::Connected(flow as usize));
                }
            }
            Event::Timer(owner, value) => {
                self.notices.push_back((owner as usize, Notice::Timer(value)));
            }
            Event::SetDown { port, is_down } => {
                self.network.ports[port as usize].is_down = is_down;
            }
        }
    }

    fn notify(&mut self, flow: u32, notice: Notice) {
        self.notices.push_back((self.flows[flow as usize].owner as usize, notice));
    }

    fn hop(&mut self, key: u32, hop: u8, packet: Packet) {
        let flow = &mut self.flows[key as usize];
        if !flow.is_open {
            return;
        }
        if let Some(port) = flow.route.get(usize::from(hop)) {
            let port = &mut self.network.ports[*port as usize];
            if let Some(at) = port.pass(self.now, packet.length.into(), &mut self.rng) {
                self.events.add(at, Event::Hop { flow: key, hop: hop + 1, packet });
            }
            return;
        }
        let is_new = flow.receiver.handle_packet(packet);
        if flow.is_greedy {
            flow.receiver.take(flow.receiver.available());
        } else if is_new {
            let notice = Notice::Readable(key as usize);
            self.notices.push_back((flow.owner as usize, notice));
        }
        let below = flow.receiver.next();
        if let Some(time) = self.network.transit(self.now, &flow.back) {
            self.events.add(self.now + time, Event::Ack { flow: key, below, packet });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::congestion::Algorithm;
    use crate::events::SECOND;
    use crate::network::{MBIT, PACKET_BYTES, Port, payload_share};

    const RATE: f64 = 100.0 * MBIT;

    /// Bytes per second that each of these flows delivers over a link of 100 Mbit/s with a round
    /// trip of 10 ms, in seconds 2 to 8.
    fn rates(algorithms: &[Algorithm], loss: f64, queue: Time) -> Vec<f64> {
        let link = Port::new(RATE, 5 * MILLISECOND, queue).losing(loss);
        // Frames back are not lost.
        let mut network = Network::parallel(&[link]);
        network.ports[1].loss = 0.0;
        let mut kernel = Kernel::new(network, 7);
        let open =
            |of: &Algorithm| kernel.open_greedy([0, 1], TcpSettings::plain(*of, PACKET_BYTES));
        let flows: Vec<_> = algorithms.iter().map(open).collect();
        let acked = |kernel: &Kernel| -> Vec<u64> {
            flows.iter().map(|flow| kernel.acked(*flow)).collect()
        };
        assert_eq!(kernel.next(2 * SECOND), None);
        let before = acked(&kernel);
        assert_eq!(kernel.next(8 * SECOND), None);
        let after = acked(&kernel);
        after.iter().zip(before).map(|(after, before)| (after - before) as f64 / 6.0).collect()
    }

    #[test]
    fn flow_of_each_algorithm_fills_a_link() {
        for algorithm in [Algorithm::Cubic, Algorithm::Bbr] {
            let share = rates(&[algorithm], 0.0, 10 * MILLISECOND)[0] / RATE / payload_share();
            assert!((0.93..=1.001).contains(&share), "{algorithm:?}: {share}");
        }
    }

    #[test]
    fn flows_of_one_algorithm_share_a_link() {
        for algorithm in [Algorithm::Cubic, Algorithm::Bbr] {
            let rates = rates(&[algorithm; 2], 0.0, 10 * MILLISECOND);
            let ratio = rates[0] / rates[1];
            assert!((0.4..=2.5).contains(&ratio), "{algorithm:?}: {rates:?}");
        }
    }

    /// RFC 9438, 4.3: CUBIC is as fast as Reno there, which has a window of 1.22 / sqrt(loss)
    /// packets (RFC 3649).
    #[test]
    fn cubic_is_as_fast_as_reno_where_round_trips_are_short() {
        let rate = rates(&[Algorithm::Cubic], 0.01, 10 * MILLISECOND)[0];
        let reno = 1.22 / 0.1 * PACKET_BYTES as f64 / 0.01;
        assert!((0.6..=1.6).contains(&(rate / reno)), "{rate} of {reno}");
    }

    /// It does not take losses for congestion.
    #[test]
    fn bbr_fills_a_link_that_loses_packets() {
        let share = rates(&[Algorithm::Bbr], 0.01, 10 * MILLISECOND)[0] / RATE / payload_share();
        assert!((0.85..=1.0).contains(&share), "{share}");
    }

    #[test]
    fn flow_goes_on_when_its_link_is_back() {
        let mut kernel = Kernel::new(Network::parallel(&[Port::new(RATE, MILLISECOND, 0)]), 7);
        let flow = kernel.open_greedy([0, 1], TcpSettings::plain(Algorithm::Cubic, PACKET_BYTES));
        kernel.set_down(SECOND, 0, true);
        kernel.set_down(2 * SECOND, 0, false);
        kernel.next(1990 * MILLISECOND);
        let (before, info) = (kernel.acked(flow), kernel.path_info(flow));
        assert!(info.unanswered > 1 && info.silent > Duration::from_millis(900), "{info:?}");
        kernel.next(4 * SECOND);
        assert!(kernel.acked(flow) > before + 1_000_000);
        assert_eq!(kernel.path_info(flow).unanswered, 0);
    }
}
