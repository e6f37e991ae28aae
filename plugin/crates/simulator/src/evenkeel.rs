//! A connection of the protocol over simulated sockets.
//!
//! The decisions are those that are shipped: [`Scheduler`], [`Pacer`], [`FlowChoice`],
//! [`FlowCount`], [`Repair`] with its trials of paths, [`Receiver`] and both codecs. What composes
//! them here imitates the transport's `tcp::sender`, `tcp::send_flow`,
//! `tcp::recv_flow` and `tcp::repair` as they work while callers poll: whoever has a message writes
//! it on idle flows.
//!
//! It leaves out: processors, so nothing takes time and hosts are never the limit; messages that
//! are copied (up to 16 KiB), tags, checksums, encryption, threads, lingering, the handshake's
//! frames; and other connections of the process, with which a real one shares its extra flows, its
//! number of flows and whether lone flows are paced.

use std::collections::VecDeque;
use std::time::Duration;

use evenkeel_protocol::{
    ChunkAction, DialFailure, FRAME_BYTES, FlowChoice, FlowCount, FlowDial, FlowEnd, FlowId,
    FlowReport, Frame, FrameSlice, NextFrame, Pacer, PathInfo, PostedBuffer, Progress, Receiver,
    RecvCodec, RecvEvent, RecvStep, RecvTimeouts, Repair, RepairEvent, RepairSettings, Reserve,
    Room, RoundTrips, Schedule, Scheduler, SendCodec, Situation,
};

use crate::ends::Ends;
use crate::events::{MILLISECOND, Time};
use crate::kernel::{FlowKey, Kernel, Notice};
use crate::stream::Bytes;
use crate::tcp::TcpSettings;

/// The defaults of `EVENKEEL_CHUNK_BYTES` and of the socket options that flows get.
const CHUNK_BYTES: u64 = 512 << 10;
const MIN_TIMEOUT: Time = 20 * MILLISECOND;
const MAX_SLOTS: usize = 128;
/// How often flows are checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(125);
const PEER_TIMEOUT: Duration = Duration::from_secs(30);
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(60);
/// Extra flows of a process.
const MAX_EXTRA_FLOWS: usize = 48;
/// Flows that are alone are paced for this time at first, and for this time after a path was
/// congested.
const LONE_AT_FIRST: Duration = Duration::from_millis(250);
const LONE_MEMORY: Duration = Duration::from_secs(300);

/// What a connection's owner sets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EvenkeelSettings {
    pub(crate) flows: usize,
    pub(crate) schedule: Schedule,
    /// Whether other paths are tried.
    pub(crate) tries_paths: bool,
}

impl Default for EvenkeelSettings {
    fn default() -> Self {
        Self { flows: 4, schedule: Schedule::Pull, tries_paths: true }
    }
}

/// The timers of a connection.
const CHECK_TIMER: u64 = 0;
const RECEIVER_TIMER: u64 = 1;
/// These and above are a flow's, by slot, then those of dials, by number.
const PACE_TIMERS: u64 = 2;
const DIAL_TIMERS: u64 = PACE_TIMERS + MAX_SLOTS as u64;

/// A part of a message: its number and first byte.
#[derive(Clone, Copy, Debug)]
struct Payload {
    message: u64,
    offset: u64,
}

#[derive(Debug)]
struct SendFlow {
    key: FlowKey,
    number: u32,
    codec: SendCodec<Payload>,
    pace: Pacer,
    outstanding: u64,
    carried: u64,
    has_timer: bool,
}

#[derive(Debug)]
struct RecvFlow {
    key: FlowKey,
    id: FlowId,
    codec: RecvCodec<u64>,
}

/// Both sides.
#[derive(Debug)]
pub(crate) struct EvenkeelConnection {
    owner: usize,
    hosts: [usize; 2],
    tcp: TcpSettings,
    settings: EvenkeelSettings,
    scheduler: Scheduler<()>,
    choice: FlowChoice,
    count: FlowCount,
    round_trips: RoundTrips,
    repair: Repair,
    flows: Vec<Option<SendFlow>>,
    dials: Vec<(FlowDial, FlowKey)>,
    /// Flows to call, by slot.
    woken: VecDeque<usize>,
    carried: u64,
    carried_at_check: Option<u64>,
    extra_flows: usize,
    lone_until: Option<Duration>,
    next_check: Option<Time>,
    receiver: Receiver<u64, u64, ()>,
    readers: Vec<RecvFlow>,
    receiver_timer: Option<Time>,
    posted: u64,
    /// Most flows at a time, and all that were opened.
    pub(crate) most_flows: usize,
    pub(crate) opened: usize,
}

impl EvenkeelConnection {
    /// A connection between two hosts. Its notices have this owner. `tcp` is what plain sockets
    /// have.
    pub(crate) fn open(
        kernel: &mut Kernel,
        owner: usize,
        hosts: [usize; 2],
        tcp: TcpSettings,
        settings: EvenkeelSettings,
    ) -> Self {
        let tcp = TcpSettings { min_timeout: MIN_TIMEOUT, unsent_limit: CHUNK_BYTES, ..tcp };
        let flows = settings.flows;
        let repair = RepairSettings {
            flows,
            max_flows: MAX_SLOTS,
            addresses: 1,
            peer_timeout: PEER_TIMEOUT,
            recovery_timeout: RECOVERY_TIMEOUT,
            tries_paths: settings.tries_paths && settings.schedule == Schedule::Pull,
            pings: false,
        };
        let timeouts = RecvTimeouts { connect: PEER_TIMEOUT, recovery: RECOVERY_TIMEOUT };
        let mut connection = Self {
            owner,
            hosts,
            tcp,
            settings,
            scheduler: Scheduler::new(settings.schedule),
            choice: FlowChoice::new(flows, flows),
            count: FlowCount::new(flows),
            round_trips: RoundTrips::default(),
            repair: Repair::new(repair, flows as u32),
            flows: Vec::new(),
            dials: Vec::new(),
            woken: VecDeque::new(),
            carried: 0,
            carried_at_check: None,
            extra_flows: 0,
            lone_until: None,
            next_check: None,
            receiver: Receiver::new(kernel.time(), timeouts),
            readers: Vec::new(),
            receiver_timer: None,
            posted: 0,
            most_flows: flows,
            opened: flows,
        };
        for number in 0..flows as u32 {
            let key = kernel.open(owner, hosts, tcp);
            connection.repair.handle_flow(number, 0);
            connection.add_flow(number, key, Pacer::default());
        }
        connection
    }

    /// Posts a buffer for the next message.
    pub(crate) fn post(&mut self, kernel: &mut Kernel, capacity: u64, ends: &mut Ends) {
        let number = self.posted;
        self.posted += 1;
        let posted = PostedBuffer { buffer: number, capacity, request: number };
        self.receiver.handle_buffer(kernel.time(), posted, 0);
        self.handle_receiver_events(kernel, ends);
        self.write_woken(kernel, ends);
    }

    /// Sends the next message.
    pub(crate) fn send(&mut self, kernel: &mut Kernel, bytes: u64, ends: &mut Ends) {
        self.scheduler.push(bytes, true, ());
        self.request_check(kernel);
        let is_static = matches!(self.settings.schedule, Schedule::Static { .. });
        // Each is called once: what must be sent again may suit none of them, and they are idle
        // again.
        let idle: Vec<_> = std::iter::from_fn(|| self.take_idle()).collect();
        for slot in idle {
            if is_static || self.scheduler.has_work() {
                self.write(kernel, slot, ends);
            } else {
                self.choice.set_idle(slot, true);
            }
        }
        self.write_woken(kernel, ends);
    }

    /// Something happened that concerns this connection.
    pub(crate) fn handle(&mut self, kernel: &mut Kernel, notice: Notice, ends: &mut Ends) {
        match notice {
            Notice::Writable(key) => {
                if let Some(slot) = self.slot_of(key) {
                    self.write(kernel, slot, ends);
                }
            }
            Notice::Readable(key) => self.read(kernel, key, ends),
            Notice::Reply(key, frame) => self.handle_reply(kernel, key, frame, ends),
            Notice::Connected(key) => self.handle_connected(kernel, key, ends),
            Notice::Timer(CHECK_TIMER) => self.check(kernel, ends),
            Notice::Timer(RECEIVER_TIMER) => {
                self.receiver_timer = None;
                self.receiver.handle_timeout(kernel.time());
                self.handle_receiver_events(kernel, ends);
            }
            Notice::Timer(timer) if timer < DIAL_TIMERS => {
                let slot = (timer - PACE_TIMERS) as usize;
                if let Some(flow) = self.flows.get_mut(slot).and_then(Option::as_mut) {
                    flow.has_timer = false;
                    self.write(kernel, slot, ends);
                }
            }
            Notice::Timer(timer) => self.handle_dial_timeout(kernel, timer - DIAL_TIMERS, ends),
        }
        self.write_woken(kernel, ends);
    }

    /// Closes all flows.
    pub(crate) fn close(&mut self, kernel: &mut Kernel) {
        self.repair.handle_close();
        let dials = self.dials.drain(..).map(|(_, key)| key);
        let readers = self.readers.drain(..).map(|reader| reader.key);
        dials.chain(readers).for_each(|key| kernel.close(key));
        self.flows.drain(..).flatten().for_each(|flow| kernel.close(flow.key));
    }

    /// Messages that the sender keeps, and bytes that all sockets hold.
    pub(crate) fn held(&self, kernel: &Kernel) -> (u64, u64) {
        let messages = self.scheduler.next_message() - self.scheduler.first();
        let keys = self.flows.iter().flatten().map(|flow| flow.key);
        (messages, keys.map(|key| kernel.held(key)).sum())
    }

    /// Number of flows that there are.
    pub(crate) fn flows(&self) -> usize {
        self.flows.iter().flatten().count()
    }
}

/// The sender's flows.
impl EvenkeelConnection {
    fn slot_of(&self, key: FlowKey) -> Option<usize> {
        self.flows.iter().position(|flow| flow.as_ref().is_some_and(|flow| flow.key == key))
    }

    fn slot_of_number(&self, number: u32) -> Option<usize> {
        self.flows.iter().position(|flow| flow.as_ref().is_some_and(|flow| flow.number == number))
    }

    fn add_flow(&mut self, number: u32, key: FlowKey, pace: Pacer) {
        let slot = self.flows.iter().position(Option::is_none).unwrap_or(self.flows.len());
        if slot == self.flows.len() {
            self.flows.push(None);
        }
        let codec = SendCodec::new(false);
        let flow =
            SendFlow { key, number, codec, pace, outstanding: 0, carried: 0, has_timer: false };
        self.flows[slot] = Some(flow);
        self.most_flows = self.most_flows.max(self.flows());
        self.scheduler.flow_opened(slot);
        self.choose(|choice, carried| choice.handle_flow(slot, carried));
        self.woken.push_back(slot);
        if let Ok(added) = self.receiver.handle_flow(number, true) {
            self.readers.push(RecvFlow { key, id: added.id, codec: RecvCodec::new(false) });
        }
    }

    /// Makes a change that decides which flows are used.
    fn choose(&mut self, change: impl FnOnce(&mut FlowChoice, &dyn Fn(usize) -> u64) -> bool) {
        let flows = &self.flows;
        let flow = |slot: usize| flows.get(slot).and_then(Option::as_ref);
        let carried = |slot| flow(slot).map_or(0, |flow| flow.carried);
        if change(&mut self.choice, &carried) && self.scheduler.has_work() {
            self.wake_all_idle();
        }
    }

    fn wake_all_idle(&mut self) {
        while let Some(slot) = self.take_idle() {
            self.woken.push_back(slot);
        }
    }

    fn take_idle(&mut self) -> Option<usize> {
        self.choice.take_idle(self.scheduler.must_retransmit())
    }

    fn write_woken(&mut self, kernel: &mut Kernel, ends: &mut Ends) {
        while let Some(slot) = self.woken.pop_front() {
            self.write(kernel, slot, ends);
        }
    }

    /// Writes until the socket takes no more or nothing is left.
    fn write(&mut self, kernel: &mut Kernel, slot: usize, ends: &mut Ends) {
        loop {
            let Some(flow) = self.flows[slot].as_ref() else { return };
            let key = flow.key;
            if flow.codec.is_empty() {
                match self.next_frame(kernel, slot, ends) {
                    Some((frame, payload)) => {
                        let Some(flow) = self.flows[slot].as_mut() else { return };
                        flow.codec.push(frame, payload);
                        flow.codec.encode(|_| 0);
                    }
                    None => break,
                }
            }
            let Some(flow) = self.flows[slot].as_mut() else { return };
            let mut room = kernel.room(key);
            let mut sent = 0;
            for FrameSlice { header, payload, start, end } in flow.codec.slices() {
                let mut all = [0; FRAME_BYTES];
                let from = FRAME_BYTES - header.len();
                all[from..].copy_from_slice(header);
                if room < header.len() as u64 {
                    break;
                }
                kernel.write(key, Bytes::Header { header: all, start: from as u8 });
                room -= header.len() as u64;
                let length = ((end - start) as u64).min(room);
                let start = payload.offset + start as u64;
                let message = payload.message;
                kernel.write(key, Bytes::Payload { message, start, end: start + length });
                room -= length;
                sent += header.len() as u64 + length;
            }
            flow.outstanding += sent;
            let mut written = 0;
            let done = flow.codec.wrote(sent as usize, |_| written += 1);
            flow.carried += done.bytes;
            self.carried += done.bytes;
            let is_blocked = !flow.codec.is_empty();
            if is_blocked {
                flow.pace.set_full();
                kernel.set_full(key);
            }
            for _ in 0..written {
                self.scheduler.chunk_written(slot);
            }
            kernel.send(key);
            if is_blocked {
                return;
            }
        }
    }

    /// The next frame, if there is one and it may be sent.
    fn next_frame(
        &mut self,
        kernel: &mut Kernel,
        slot: usize,
        ends: &mut Ends,
    ) -> Option<(Frame, Payload)> {
        let now = kernel.time();
        let flow = self.flows[slot].as_mut()?;
        let sample_due = flow.pace.sample_due(now);
        if sample_due {
            flow.pace.postpone_sample(now);
            self.adapt(now, slot);
        }
        self.complete(ends);
        if !self.choice.takes_messages(slot, self.scheduler.must_retransmit()) {
            let is_idle = !self.choice.is_retiring(slot);
            self.choice.set_idle(slot, is_idle);
            self.pass_work_on();
            return None;
        }
        let mut limit = CHUNK_BYTES;
        if self.scheduler.has_work() || self.scheduler.has_static_share(slot) {
            let is_alone = self.choice.used() <= 1;
            if !is_alone || self.lone_until.is_none_or(|until| now < until) {
                let Some(bytes) = self.pace(kernel, slot, is_alone, sample_due, limit) else {
                    self.pass_work_on();
                    return None;
                };
                limit = bytes;
            } else if sample_due {
                let flow = self.flows[slot].as_mut()?;
                if flow.pace.is_backlogged(flow.outstanding) {
                    flow.outstanding = 0;
                    self.sample(kernel, slot);
                }
            }
        }
        let frame = self.scheduler.next(slot, limit).map(|next| match next {
            NextFrame::Chunk(chunk, ()) => {
                let payload = Payload { message: chunk.message, offset: chunk.offset };
                (Frame::Chunk(chunk), payload)
            }
            NextFrame::FlowDead(number) => {
                (Frame::FlowDead(number), Payload { message: 0, offset: 0 })
            }
        });
        self.choice.set_idle(slot, frame.is_none());
        frame
    }

    fn pass_work_on(&mut self) {
        if self.scheduler.has_work()
            && let Some(other) = self.take_idle()
        {
            self.woken.push_back(other);
        }
    }

    fn adapt(&mut self, now: Duration, slot: usize) {
        if matches!(self.settings.schedule, Schedule::Static { .. }) || !self.choice.is_leader(slot)
        {
            return;
        }
        if self.choice.is_complete() {
            // Nothing takes time here.
            self.count.tick(now, self.carried, Duration::ZERO, 1);
        }
        let count = self.count.in_use();
        self.choose(|choice, carried| choice.use_flows(count, carried));
    }

    /// How many bytes the flow may take. `None`, and a timer is set, if too many are in flight.
    fn pace(
        &mut self,
        kernel: &mut Kernel,
        slot: usize,
        is_alone: bool,
        sample_due: bool,
        limit: u64,
    ) -> Option<u64> {
        let flow = self.flows[slot].as_mut()?;
        flow.pace.set_alone(is_alone);
        let mut most = flow.pace.max_outstanding();
        let mut is_exact = false;
        if flow.outstanding > most {
            flow.outstanding = kernel.unacknowledged(flow.key);
            is_exact = true;
        }
        if sample_due && self.sample(kernel, slot) {
            let flow = self.flows[slot].as_mut()?;
            most = flow.pace.max_outstanding();
            if !is_exact && flow.outstanding > most {
                flow.outstanding = kernel.unacknowledged(flow.key);
            }
        }
        let flow = self.flows[slot].as_mut()?;
        if flow.outstanding > most {
            let wait = flow.pace.wait(flow.outstanding);
            if !std::mem::replace(&mut flow.has_timer, true) {
                let at = kernel.now() + wait.as_nanos() as Time;
                kernel.set_timer(at, self.owner, PACE_TIMERS + slot as u64);
            }
            return None;
        }
        Some(flow.pace.chunk(limit))
    }

    fn sample(&mut self, kernel: &Kernel, slot: usize) -> bool {
        let now = kernel.time();
        let Some(flow) = self.flows[slot].as_mut() else { return false };
        let info = kernel.path_info(flow.key);
        let PathInfo { acked, busy, round_trip, usual_round_trip, retransmitted, .. } = info;
        let shortest_round_trip = self.round_trips.note(now, slot, usual_round_trip);
        if !flow.pace.is_backlogged(flow.outstanding) {
            return false;
        }
        let progress = Progress {
            acked,
            busy,
            round_trip,
            usual_round_trip,
            shortest_round_trip,
            retransmitted,
        };
        if flow.pace.sample(now, progress) {
            self.lone_until = Some(now + LONE_MEMORY);
        } else {
            self.lone_until.get_or_insert(now + LONE_AT_FIRST);
        }
        true
    }

    /// Completes what the peer has.
    fn complete(&mut self, ends: &mut Ends) {
        while self.scheduler.pop_sent().is_some() {
            ends.sent += 1;
        }
    }

    fn handle_reply(
        &mut self,
        kernel: &mut Kernel,
        key: FlowKey,
        frame: [u8; FRAME_BYTES],
        ends: &mut Ends,
    ) {
        match Frame::decode(&frame) {
            Ok(Frame::Ack(below, _)) => {
                if let Err(error) = self.scheduler.acked(below) {
                    ends.fail(error.to_string());
                }
                self.complete(ends);
                if self.scheduler.must_retransmit() {
                    self.wake_all_idle();
                }
            }
            Ok(Frame::FlowDead(number)) => {
                if let Some(slot) = self.slot_of_number(number) {
                    self.flow_failed(kernel, slot, "the peer reported it as dead", ends);
                }
            }
            other => ends.fail(format!("flow {key} got {other:?} from the receiver")),
        }
    }

    fn flow_failed(&mut self, kernel: &mut Kernel, slot: usize, why: &str, ends: &mut Ends) {
        let Some(flow) = self.flows[slot].take() else { return };
        let path = kernel.path_info(flow.key);
        self.choose(|choice, carried| choice.handle_ended(slot, carried));
        self.scheduler.flow_failed(slot, flow.number);
        self.complete(ends);
        self.wake_all_idle();
        let repeats = self.scheduler.must_retransmit();
        self.repair.handle_ended(kernel.time(), flow.number, Some(&path), why, repeats);
        self.run_repair(kernel, ends);
    }
}

/// Repair.
impl EvenkeelConnection {
    fn request_check(&mut self, kernel: &mut Kernel) {
        if self.next_check.is_none() {
            let at = kernel.now() + CHECK_INTERVAL.as_nanos() as Time;
            self.next_check = Some(at);
            kernel.set_timer(at, self.owner, CHECK_TIMER);
        }
    }

    fn check(&mut self, kernel: &mut Kernel, ends: &mut Ends) {
        self.next_check = None;
        let is_busy = !self.scheduler.is_empty();
        let carried = is_busy.then_some(self.carried);
        let before = std::mem::replace(&mut self.carried_at_check, carried);
        let situation = Situation {
            is_busy,
            has_stopped: is_busy && carried == before,
            must_retransmit: self.scheduler.must_retransmit(),
            is_limited_by_paths: self.count.is_limited_by_paths(),
        };
        let scheduler = &mut self.scheduler;
        let report = |(slot, flow): (usize, &SendFlow)| FlowReport {
            number: flow.number,
            is_drained: scheduler.is_drained(slot),
            is_worn: false,
            bytes: flow.carried,
            path: if is_busy { kernel.path_info(flow.key) } else { PathInfo::default() },
        };
        let flows = self.flows.iter().enumerate();
        let flows = flows.filter_map(|(slot, flow)| Some((slot, flow.as_ref()?)));
        let reports: Vec<_> = flows.map(report).collect();
        let is_stuck =
            situation.has_stopped && reports.iter().any(|report| report.path.unanswered > 0);
        let now = kernel.time();
        self.choose(|choice, carried| choice.handle_check(now, is_stuck, carried));
        self.repair.handle_timeout(now, &situation, &reports);
        self.run_repair(kernel, ends);
        if self.repair.next_timeout().is_some() || self.choice.uses_all() {
            self.request_check(kernel);
        }
    }

    fn run_repair(&mut self, kernel: &mut Kernel, ends: &mut Ends) {
        while let Some(event) = self.repair.poll_event() {
            match event {
                RepairEvent::Dial(dial) => {
                    let key = kernel.dial(self.owner, self.hosts, self.tcp);
                    self.opened += 1;
                    self.dials.push((dial, key));
                    let at = kernel.now() + dial.timeout.as_nanos() as Time;
                    kernel.set_timer(at, self.owner, DIAL_TIMERS + u64::from(dial.number));
                }
                RepairEvent::CancelDial(number) => {
                    if let Some(key) = self.take_dial(number) {
                        kernel.close(key);
                    }
                }
                RepairEvent::End(number, death) => {
                    if let Some(slot) = self.slot_of_number(number) {
                        self.flow_failed(kernel, slot, &death.to_string(), ends);
                    }
                }
                RepairEvent::Retire { number, .. } => {
                    if let Some(slot) = self.slot_of_number(number) {
                        self.choose(|choice, carried| choice.retire(slot, carried));
                    }
                }
                RepairEvent::Close(number) => self.close_drained(kernel, number),
                RepairEvent::WantFlows(count) => {
                    let granted = count.min(MAX_EXTRA_FLOWS - self.extra_flows);
                    self.extra_flows += granted;
                    self.repair.handle_extra_flows(granted);
                    self.count.grow(self.choice.grow(granted));
                    let count = self.count.in_use();
                    self.choose(|choice, carried| choice.use_flows(count, carried));
                }
                RepairEvent::Ping | RepairEvent::SegmentsLimited(_) => {}
                RepairEvent::Failed(failure) => ends.fail(failure.to_string()),
            }
        }
        if self.repair.next_timeout().is_some() {
            self.request_check(kernel);
        }
    }

    fn take_dial(&mut self, number: u32) -> Option<FlowKey> {
        let index = self.dials.iter().position(|(dial, _)| dial.number == number)?;
        Some(self.dials.swap_remove(index).1)
    }

    fn handle_dial_timeout(&mut self, kernel: &mut Kernel, number: u64, ends: &mut Ends) {
        let number = number as u32;
        if let Some(key) = self.take_dial(number) {
            kernel.close(key);
            let (now, failure) = (kernel.time(), DialFailure::Unanswered);
            self.repair.handle_dial_failed(now, number, failure, "no answer");
            self.run_repair(kernel, ends);
        }
    }

    fn handle_connected(&mut self, kernel: &mut Kernel, key: FlowKey, ends: &mut Ends) {
        let dial = self.dials.iter().find(|(_, dialed)| *dialed == key);
        let Some(number) = dial.map(|(dial, _)| dial.number) else { return };
        self.take_dial(number);
        match self.repair.handle_accepted(kernel.time(), number, 0) {
            Some(_) => self.add_flow(number, key, Pacer::slow_start()),
            None => kernel.close(key),
        }
        self.run_repair(kernel, ends);
    }

    /// Closes a flow that has nothing to deliver any more. The receiver reads its end.
    fn close_drained(&mut self, kernel: &mut Kernel, number: u32) {
        let Some(slot) = self.slot_of_number(number) else { return };
        let is_written = self.flows[slot].as_ref().is_some_and(|flow| flow.codec.is_empty());
        if !is_written || !self.scheduler.is_drained(slot) {
            self.woken.push_back(slot);
            return;
        }
        self.scheduler.flow_closed(slot);
        if let Some(flow) = self.flows[slot].take() {
            self.choose(|choice, carried| choice.handle_ended(slot, carried));
            if let Some(index) = self.readers.iter().position(|reader| reader.key == flow.key) {
                let reader = self.readers.swap_remove(index);
                self.receiver.handle_ended(kernel.time(), reader.id, &FlowEnd::Expected);
            }
            kernel.close(flow.key);
        }
        self.repair.handle_closed(number);
    }
}

/// The receiver.
impl EvenkeelConnection {
    /// Reads until the socket has no more or the next chunk has no buffer.
    fn read(&mut self, kernel: &mut Kernel, key: FlowKey, ends: &mut Ends) {
        let mut is_ack_due = false;
        while let Some(index) = self.readers.iter().position(|reader| reader.key == key) {
            let now = kernel.time();
            let RecvFlow { id, codec, .. } = &mut self.readers[index];
            let id = *id;
            match codec.next_step() {
                Ok(RecvStep::Read) => {
                    if kernel.available(key) == 0 || !read_once(kernel, key, codec, ends) {
                        break;
                    }
                }
                Ok(RecvStep::Reserve { chunk, at }) => {
                    match self.receiver.poll_reserve(now, id, &chunk, at) {
                        Reserve::Chunk(ChunkAction::NotPosted) | Reserve::Stop => break,
                        Reserve::Chunk(action) => codec.reserved(action),
                        Reserve::Memory(_) => {
                            ends.fail("a message without a buffer has no tag".to_owned());
                            break;
                        }
                    }
                }
                Ok(RecvStep::Received(part)) => {
                    let received =
                        self.receiver.handle_received(now, id, part.message, part.end - part.start);
                    is_ack_due |= received.is_ack_due;
                }
                Ok(RecvStep::ChunkEnd { .. }) => {}
                Ok(RecvStep::FlowDead(number)) => {
                    codec.flow_dead_handled(number);
                    self.end_reported(kernel, number);
                    self.receiver.handle_report(id);
                }
                other => {
                    ends.fail(format!("the receiver got {other:?}"));
                    break;
                }
            }
            self.handle_receiver_events(kernel, ends);
        }
        let reader = self.readers.iter().find(|reader| is_ack_due && reader.key == key);
        if let Some(id) = reader.map(|reader| reader.id) {
            self.reply(kernel, id);
        }
        self.handle_receiver_events(kernel, ends);
    }

    /// A flow that the sender reported as dead is not read any more.
    fn end_reported(&mut self, kernel: &mut Kernel, number: u32) {
        let Some(id) = self.receiver.flow_with_number(number) else { return };
        if let Some(index) = self.readers.iter().position(|reader| reader.id == id) {
            let mut reader = self.readers.swap_remove(index);
            reader.codec.abandon(|part| self.receiver.handle_abandoned(part));
            kernel.close(reader.key);
        }
        self.receiver.handle_ended(kernel.time(), id, &FlowEnd::Reported);
    }

    fn reply(&mut self, kernel: &mut Kernel, id: FlowId) {
        let Some(reader) = self.readers.iter().find(|reader| reader.id == id) else { return };
        let key = reader.key;
        while let Some(frame) = self.receiver.poll_reply(id, 0) {
            kernel.reply(key, frame.encode());
        }
    }

    fn handle_receiver_events(&mut self, kernel: &mut Kernel, ends: &mut Ends) {
        while let Some(event) = self.receiver.poll_event() {
            match event {
                RecvEvent::Complete(message, bytes) => ends.complete(message, bytes),
                RecvEvent::Reply(id) => self.reply(kernel, id),
                RecvEvent::Read(id) => {
                    let reader = self.readers.iter().find(|reader| reader.id == id);
                    if let Some(key) = reader.map(|reader| reader.key) {
                        self.read(kernel, key, ends);
                    }
                }
                RecvEvent::Deliver => {}
                RecvEvent::Failed(failure) => ends.fail(failure.to_string()),
            }
        }
        let due = self.receiver.next_timeout().map(|at| at.as_nanos() as Time);
        if let Some(at) = due.filter(|at| self.receiver_timer.is_none_or(|before| *at < before)) {
            self.receiver_timer = Some(at);
            kernel.set_timer(at, self.owner, RECEIVER_TIMER);
        }
    }
}

/// Reads what a flow has into the room of its codec. False if the stream does not have what is
/// expected there.
fn read_once(
    kernel: &mut Kernel,
    key: FlowKey,
    codec: &mut RecvCodec<u64>,
    ends: &mut Ends,
) -> bool {
    let available = kernel.available(key);
    let mut wrong = None;
    let count = kernel.read(key, |stream| match codec.room() {
        Room::Header(header) => {
            let count = header.len().min(available as usize);
            if stream.read_header(&mut header[..count]).is_none() {
                wrong = Some("payload in place of a header".to_owned());
            }
            count as u64
        }
        Room::Buffer { buffer, start, end, .. } => {
            let most = (end - start).min(available);
            match stream.read_payload(most) {
                Some(read) if (read.0, read.1) == (buffer, start) => {
                    ends.place(buffer, start, read.2);
                    read.2 - read.1
                }
                read => {
                    wrong = Some(format!("{read:?} in place of byte {start} of message {buffer}"));
                    0
                }
            }
        }
        Room::Discard(most) => {
            let read = stream.read_payload(available.min(most as u64));
            read.map_or(0, |(_, start, end)| end - start)
        }
        Room::Stage { .. } | Room::DiscardChecked(_) => 0,
    });
    codec.received(count as usize, &[]);
    if let Some(wrong) = wrong {
        ends.fail(wrong);
        return false;
    }
    count > 0
}
