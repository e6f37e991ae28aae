//! The sending side of a TCP connection with several flows.

use std::any::Any;
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use evenkeel_protocol::{
    AdvertisedTags, Deferral, FRAME_BYTES, FlowChoice, Frame, Pacer, PathInfo, RoundTrips,
    Scheduler, Situation, TagGate, WriteLimits, WriteMode, Writer, writer,
};

use crate::connection::base::{Base, Direction, InFlight, TransportKind, WORKER_QUANTUM};
use crate::connection::request::{MAX_REQUESTS, Operation, Owner, Request};
use crate::connection::send::{LINGER, Outbound};
use crate::error::{Error, ErrorKind};
use crate::handshake::dial::Destination;
use crate::memory::buffers::SendBuffer;
use crate::rdma::MrHandle;
use crate::runtime::caller_polling::SeenTurn;
use crate::runtime::flow_count::FlowCountController;
use crate::runtime::reactor::{Readiness, Registration, Source};
use crate::runtime::work_lock::WorkLock;
use crate::stream::Stream;
use crate::sync::lock;
use crate::sys::{self};
use crate::tcp::MAX_FLOW_SLOTS;
use crate::tcp::lone_pacing::LonePacing;
use crate::tcp::repair::RepairState;
use crate::tcp::retransmit_buffer::RetransmitBuffer;
use crate::tcp::send_flow::{FrameReader, SendFlow, WriteState};
use crate::tcp::send_queue::{Outgoing, SendCompletion, SendQueue};
use crate::telemetry::counters::FlowCounters;
use crate::telemetry::metrics::{ConnectionObservation, FlowObservation, Observed};

impl Outbound for TcpSender {
    fn base(&self) -> &Base {
        &self.base
    }

    fn send(self: Arc<Self>, buffer: SendBuffer) -> Result<Option<Request>, Error> {
        Self::send(&self, buffer, None, WriteMode::AtOnce)
    }

    fn send_tagged(
        self: Arc<Self>,
        buffer: SendBuffer,
        tag: i32,
        _registration: Option<&MrHandle>,
    ) -> Result<Option<Request>, Error> {
        Self::send(&self, buffer, Some(tag), WriteMode::Batched)
    }

    fn send_ahead(self: Arc<Self>, buffer: SendBuffer) -> Result<Option<Request>, Error> {
        Self::send(&self, buffer, None, WriteMode::Ahead)
    }

    fn owner_closed(self: Arc<Self>) {
        Self::close_gracefully(&self);
    }

    fn is_delivered(&self) -> bool {
        self.is_over() || lock(&self.queue).scheduler.is_empty()
    }

    #[cfg(test)]
    fn break_path(&self, index: usize) {
        let flows = Self::flows(self);
        if let Some(flow) = flows.get(index % flows.len().max(1)) {
            flow.shutdown();
        }
    }

    #[cfg(test)]
    fn wear_keys(&self) {
        for flow in Self::flows(self) {
            let mut writer = flow.writer.lock();
            let used = writer.half.key_use().expect("an encrypted flow");
            while !used.is_nearly_used_up() {
                used.add(0, 1 << 30).expect("a key that is not used up");
            }
        }
    }

    #[cfg(test)]
    fn queue_pairs(&self) -> usize {
        0
    }

    #[cfg(test)]
    fn id(&self) -> evenkeel_protocol::ConnectionId {
        self.destination.connection
    }
}

/// Lock order: a flow's `frame_reader`, then a flow's `writer`, then `queue`.
pub(crate) struct TcpSender {
    pub(crate) base: Base,
    pub(crate) destination: Arc<Destination>,
    pub(crate) queue: Mutex<SendQueue>,
    pub(super) repair: Mutex<RepairState>,
    /// For timeouts of the connection. Flows have none.
    pub(super) clock: Registration,
    /// When the connection was opened. Pacing times count from here.
    pub(super) epoch: Instant,
    seen_turn: SeenTurn,
    /// Small messages may wait for the caller's next poll. It needs no lock where none do.
    has_deferred: AtomicBool,
    pub(crate) flow_count: Arc<FlowCountController>,
}

impl TcpSender {
    /// Opens a connection with flows that were accepted.
    pub(crate) fn open(
        destination: Arc<Destination>,
        streams: Vec<Stream>,
    ) -> io::Result<Arc<Self>> {
        let context = destination.context.clone();
        let pool = &destination.workers.retransmit_pool;
        let retransmit_buffer =
            RetransmitBuffer::new(context.settings.retransmit_buffer_bytes, pool);
        let schedule = context.settings.schedule;
        let flow_count = destination.workers.flow_counts.of(destination.peer.ip(), streams.len());
        let sender = Arc::new(Self {
            base: Base::new(context, Direction::Send, TransportKind::Tcp, destination.peer),
            clock: destination.workers.registration(),
            queue: Mutex::new(SendQueue {
                scheduler: Scheduler::new(schedule),
                gate: TagGate::default(),
                advertised_tags: AdvertisedTags::default(),
                flows: Vec::new(),
                choice: FlowChoice::new(flow_count.flows(), streams.len()),
                deferral: Deferral::default(),
                has_timer: false,
                round_trips: RoundTrips::default(),
                carried: None,
                requests: 0,
                retransmit_buffer,
                uncopied: VecDeque::new(),
                closed: false,
                lingering: None,
            }),
            repair: Mutex::new(RepairState::new(&destination, streams.len() as u32)),
            destination,
            epoch: Instant::now(),
            seen_turn: SeenTurn::default(),
            has_deferred: AtomicBool::new(false),
            flow_count,
        });
        sender.base.set_id(sender.destination.connection);
        sender.clock.watch_ticks(Arc::new(Clock(Arc::clone(&sender))));
        let observed: Weak<Self> = Arc::downgrade(&sender);
        sender.base.context.metrics.watch(observed);
        for (number, stream) in streams.into_iter().enumerate() {
            if let Err(error) = sender.begin_with(number as u32, stream, Pacer::default()) {
                sender.close();
                return Err(error);
            }
        }
        Ok(sender)
    }

    /// Adds a flow of the beginning.
    fn begin_with(self: &Arc<Self>, number: u32, stream: Stream, pace: Pacer) -> io::Result<()> {
        let acked = sys::path_info(&stream.socket).map_or(0, |info| info.acked);
        lock(&self.repair).engine.handle_flow(number, acked);
        self.add_flow(number, stream, pace)
    }

    /// Adds a flow that was accepted, which starts with this pacer.
    pub(super) fn add_flow(
        self: &Arc<Self>,
        number: u32,
        stream: Stream,
        pace: Pacer,
    ) -> io::Result<()> {
        let (flow, waiting) = {
            let mut queue = lock(&self.queue);
            if queue.closed || self.base.failed() {
                return Ok(());
            }
            let slot = queue.flows.iter().position(Option::is_none).unwrap_or(queue.flows.len());
            if slot >= MAX_FLOW_SLOTS {
                return Err(io::Error::other("too many flows"));
            }
            let Stream { socket, send, recv: mut half } = stream;
            half.read_ahead();
            let frames = [0; 8 * FRAME_BYTES];
            let flow = Arc::new(SendFlow {
                sender: Arc::clone(self),
                number,
                slot,
                socket,
                registration: self.destination.workers.registration(),
                counters: FlowCounters::default(),
                is_full: AtomicBool::new(false),
                // It becomes idle, or takes work, when it is first called.
                is_woken: AtomicBool::new(true),
                has_ended: AtomicBool::new(false),
                writer: WorkLock::new(WriteState::new(
                    send,
                    pace,
                    self.base.context.settings.checksum,
                )),
                frame_reader: WorkLock::new(FrameReader { half, frames, have: 0 }),
            });
            if slot == queue.flows.len() {
                queue.flows.push(None);
            }
            queue.flows[slot] = Some(Arc::clone(&flow));
            queue.scheduler.flow_opened(slot);
            let waiting = queue.choose(|choice, carried| choice.handle_flow(slot, carried));
            (flow, waiting)
        };
        waiting.iter().for_each(|flow| flow.wake_worker());
        flow.registration.watch(&flow.socket, Arc::<SendFlow>::clone(&flow))?;
        if lock(&self.queue).closed {
            // The connection may have been closed before the watch began.
            flow.registration.end(&flow.socket);
        }
        Ok(())
    }

    /// The flow with this number.
    pub(super) fn flow(&self, number: u32) -> Option<Arc<SendFlow>> {
        let queue = lock(&self.queue);
        queue.flows.iter().flatten().find(|flow| flow.number == number).map(Arc::clone)
    }

    /// The present flows.
    pub(crate) fn flows(&self) -> Vec<Arc<SendFlow>> {
        lock(&self.queue).flows.iter().flatten().cloned().collect()
    }

    fn send(
        this: &Arc<Self>,
        buffer: SendBuffer,
        tag: Option<i32>,
        mode: WriteMode,
    ) -> Result<Option<Request>, Error> {
        let length = buffer.length() as u64;
        let settings = &this.base.context.settings;
        let inline = length <= settings.inline_bytes;
        let now = sys::coarse_time();
        let mut guard = lock(&this.queue);
        let queue = &mut *guard;
        if queue.requests >= MAX_REQUESTS {
            return Ok(None);
        }
        let next = queue.scheduler.next_message();
        if let Some(tag) = tag
            && !queue.gate.admits(tag, next, || queue.advertised_tags.tag(next))
        {
            this.base.waits.unposted.set(true, now);
            this.base.set_outstanding(true, now);
            drop(guard);
            // A caller without requests to test can read the frame that it waits for here.
            this.progress();
            return Ok(None);
        }
        let operation = Operation::new();
        let request = SendCompletion::Pending(Arc::clone(&operation));
        let ack_wanted = !inline || queue.retransmit_buffer.is_short(length);
        queue.scheduler.push(length, ack_wanted, Outgoing { buffer, request });
        queue.requests += 1;
        this.base.waits.unposted.set(false, now);
        this.base.set_outstanding(true, now);
        this.clock.request_tick();
        let request = Request::new(operation, Arc::clone(this) as Arc<dyn Owner>);
        this.start_writing(guard, length, mode);
        Ok(Some(request))
    }

    /// Has a queued message of this length written.
    fn start_writing<'a>(
        &'a self,
        mut guard: MutexGuard<'a, SendQueue>,
        length: u64,
        mode: WriteMode,
    ) {
        let settings = &self.base.context.settings;
        let limits = WriteLimits {
            caller_bytes: settings.caller_bytes,
            quantum: WORKER_QUANTUM,
            is_static: settings.is_static(),
        };
        match writer(length, mode, &limits, self.destination.workers.callers_lead()) {
            Writer::Caller { bytes, flows: 1 } => {
                let flow = guard.take_idle();
                drop(guard);
                if let Some(flow) = flow {
                    flow.write(bytes);
                }
            }
            Writer::Caller { bytes, flows } => {
                for _ in 0..flows {
                    if !guard.scheduler.has_work() {
                        return;
                    }
                    let Some(flow) = guard.take_idle() else { return };
                    drop(guard);
                    flow.write_as_caller(bytes);
                    guard = lock(&self.queue);
                }
            }
            Writer::Deferred { bytes } => {
                if guard.deferral.is_pending() {
                    // It is written with the one that waits.
                    return;
                }
                let Some(flow) = guard.take_idle() else { return };
                if guard.deferral.handle_message(flow.slot, || self.epoch.elapsed()) {
                    self.has_deferred.store(true, Ordering::Relaxed);
                    self.set_timer(guard);
                } else {
                    drop(guard);
                    flow.write(bytes);
                }
            }
            Writer::Threads(flows) => {
                let idle = std::iter::from_fn(|| guard.take_idle());
                idle.take(flows).for_each(|flow| flow.wake_worker());
            }
            Writer::Later => {}
        }
    }

    /// Writes the small messages that wait for this poll.
    fn write_deferred(&self) {
        if !self.has_deferred.load(Ordering::Relaxed) {
            return;
        }
        let flow = {
            let mut queue = lock(&self.queue);
            self.has_deferred.store(false, Ordering::Relaxed);
            let slot = queue.deferral.handle_poll();
            slot.and_then(|slot| queue.flows.get(slot)?.clone())
        };
        if let Some(flow) = flow {
            flow.write_as_caller(self.base.context.settings.caller_bytes);
        }
    }

    /// Sets the timer for the end of a deferral, since the caller may not poll again. One that is set is early enough.
    fn set_timer(&self, mut queue: MutexGuard<'_, SendQueue>) {
        let Some(at) = queue.deferral.next_timeout() else { return };
        if !std::mem::replace(&mut queue.has_timer, true) {
            drop(queue);
            self.clock.set_timer(self.epoch + at);
        }
    }

    /// The timer has fired. Writes the small messages that have waited for too long.
    fn write_overdue(&self) {
        let now = self.epoch.elapsed();
        let mut queue = lock(&self.queue);
        queue.has_timer = false;
        let slot = queue.deferral.handle_timeout(now);
        let flow = slot.and_then(|slot| queue.flows.get(slot)?.clone());
        self.set_timer(queue);
        if let Some(flow) = flow {
            flow.write(WORKER_QUANTUM);
        }
    }
}

/// What its flows need.
impl TcpSender {
    /// Whether flows are paced that are alone in their connections.
    pub(super) fn lone_pacing(&self) -> &LonePacing {
        &self.destination.workers.lone_pacing
    }

    /// A flow has written chunks with this many bytes.
    pub(super) fn on_chunks_written(&self, bytes: u64) {
        self.flow_count.carried(bytes);
    }

    /// A caller has written for this time.
    pub(super) fn add_caller_work(&self, time: Duration) {
        self.destination.workers.add_caller_work(time);
    }

    /// Whether callers do the work of workers. They write on idle flows themselves.
    pub(super) fn callers_lead(&self) -> bool {
        self.destination.workers.callers_lead()
    }

    /// Adapts the number of flows in use. The leader does it for all flows.
    pub(super) fn adapt(&self, flow: &SendFlow) {
        if self.base.context.settings.is_static() {
            return;
        }
        let waiting = {
            let mut queue = lock(&self.queue);
            if !queue.choice.is_leader(flow.slot) {
                return;
            }
            if queue.choice.is_complete() {
                let workers = &self.destination.workers;
                self.flow_count.tick(workers.worked(), workers.threads());
            }
            let count = self.flow_count.flows();
            queue.choose(|choice, carried| choice.use_flows(count, carried))
        };
        waiting.iter().for_each(|flow| flow.wake_worker());
    }

    /// A flow has failed. What it may not have delivered is sent on others.
    pub(super) fn flow_failed(self: &Arc<Self>, flow: &SendFlow, why: &str) {
        let copies = {
            let mut writer = flow.writer.lock();
            if std::mem::replace(&mut writer.closed, true) {
                return;
            }
            writer.take_copies()
        };
        flow.end();
        let (waiting, over) = {
            let mut queue = lock(&self.queue);
            copies.into_iter().flatten().for_each(|copy| queue.retransmit_buffer.release(copy));
            let mut waiting = queue.remove(flow);
            let again = queue.scheduler.flow_failed(flow.slot, flow.number);
            self.base.counters.repeated.add(again);
            let over = self.complete_acked(&mut queue);
            waiting.extend(std::iter::from_fn(|| queue.take_idle()));
            (waiting, over)
        };
        self.base.counters.lost.add(1);
        // All of them report the failure, and share the retransmission.
        waiting.iter().for_each(|flow| flow.wake_worker());
        if over {
            self.close();
        } else {
            self.on_flow_lost(flow, why);
        }
    }

    /// Completes what the peer has. True if that was the last message of a closed connection.
    pub(super) fn complete_acked(&self, queue: &mut SendQueue) -> bool {
        let before = queue.requests;
        while let Some(sent) = queue.scheduler.pop_sent() {
            self.base.counters.message(sent.total);
            match sent.payload.request {
                SendCompletion::Pending(operation) => {
                    operation.complete(sent.total);
                    queue.requests -= 1;
                }
                SendCompletion::Copied(copy) => queue.retransmit_buffer.release(copy),
            }
        }
        // Now there may be room. These messages need no early acknowledgement any more.
        while let Some(message) = queue.uncopied.front().copied()
            && (message < queue.scheduler.first() || queue.copy_message(message))
        {
            queue.uncopied.pop_front();
        }
        if queue.requests < before {
            self.base.notify();
        }
        if queue.requests == 0 && !self.base.waits.unposted.runs() {
            self.base.set_outstanding(false, sys::coarse_time());
        }
        queue.lingering.is_some() && queue.scheduler.is_empty()
    }

    /// The peer has all messages below this number.
    pub(super) fn on_ack(&self, below: u64) -> Result<(), String> {
        let (over, waiting) = {
            let mut queue = lock(&self.queue);
            queue.scheduler.acked(below).map_err(|error| format!("protocol error: {error}"))?;
            let over = self.complete_acked(&mut queue);
            // Flows without later chunks in flight may take retransmissions.
            let repeats = queue.scheduler.must_retransmit();
            let idle = std::iter::from_fn(|| if repeats { queue.take_idle() } else { None });
            (over, idle.collect::<Vec<_>>())
        };
        waiting.iter().for_each(|flow| flow.wake_worker());
        if over {
            self.close();
        }
        Ok(())
    }

    /// The peer has buffers with different tags, from this number on.
    pub(super) fn on_tags_differ(&self, from: u64) {
        let mut queue = lock(&self.queue);
        let next = queue.scheduler.next_message();
        queue.gate.tags_differ_from(from, next);
        // Each flow answers, since any of them may be lost. A flow that waits for work is woken too.
        queue.choice.end_idle();
        let flows: Vec<_> = queue.flows.iter().flatten().cloned().collect();
        drop(queue);
        flows.iter().for_each(|flow| flow.wake_worker());
    }

    /// The peer has posted this buffer with this tag.
    pub(super) fn on_buffer_tag(&self, number: u64, tag: i32) -> Result<(), String> {
        let mut guard = lock(&self.queue);
        let queue = &mut *guard;
        let next = queue.scheduler.next_message();
        if queue.advertised_tags.insert(number, tag, next) {
            return Ok(());
        }
        Err(format!("protocol error: the peer has posted buffer {number}, and {next} are sent"))
    }

    /// The peer reports a dead flow.
    pub(super) fn on_flow_dead(self: &Arc<Self>, number: u32) {
        if let Some(flow) = self.flow(number) {
            self.flow_failed(&flow, "the peer reported it as dead");
        }
    }

    pub(super) fn fail(&self, kind: ErrorKind, what: &str) {
        // First, as the thread that has written a message may not have accounted for that yet, and the peer has it. It also
        // informs the peer now, not when this side closes.
        self.quiesce();
        self.base.fail(kind, what, &self.in_flight());
        self.stop_repair();
    }
}

impl TcpSender {
    fn in_flight(&self) -> InFlight {
        let queue = lock(&self.queue);
        let bytes = queue
            .scheduler
            .unacked()
            .filter(|outgoing| matches!(outgoing.request, SendCompletion::Pending(_)))
            .map(|outgoing| outgoing.buffer.length() as u64)
            .sum();
        InFlight { requests: queue.requests, bytes }
    }

    /// Returns when no buffer is being read, and none will be. Informs the peer if possible. Waits only for system calls
    /// that do not block.
    pub(super) fn quiesce(&self) {
        for flow in self.flows() {
            let mut writer = flow.writer.lock();
            if !std::mem::replace(&mut writer.closed, true) {
                // The peer may have it, and have closed for that reason.
                let midway = writer.codec.is_midway();
                let delivered = {
                    let mut queue = lock(&self.queue);
                    if writer.report_written(flow.slot, &mut queue) {
                        self.complete_acked(&mut queue);
                    }
                    let copies = writer.take_copies().into_iter().flatten();
                    copies.for_each(|copy| queue.retransmit_buffer.release(copy));
                    queue.scheduler.first()
                };
                if !midway && !writer.flow.has_sent_close() {
                    let nothing = SendBuffer::from_static(&[]);
                    let close = self.base.encode(Frame::Close(delivered));
                    // If the buffer is full, the end of the stream informs the peer.
                    let _ = writer.half.send_with_header(&flow.socket, &close, nothing);
                }
                flow.shutdown();
            }
        }
    }

    /// The owner closes the connection: delivers what is left, then closes.
    fn close_gracefully(self: &Arc<Self>) {
        let flows: Vec<Arc<SendFlow>> = {
            let mut queue = lock(&self.queue);
            let promised = queue.requests == 0 && !queue.scheduler.is_empty();
            if promised && !self.base.failed() {
                let linger = self.destination.workers.linger();
                queue.lingering = Some((linger, Instant::now() + LINGER));
                self.clock.request_tick();
                std::iter::from_fn(|| queue.take_idle()).collect()
            } else {
                drop(queue);
                self.close();
                return;
            }
        };
        // They send a close frame, so that the peer acknowledges what it has.
        flows.iter().for_each(|flow| flow.wake_worker());
    }

    /// Closes the connection.
    pub(crate) fn close(&self) {
        // Set first, so that every flow is quiesced, also one that is being added. A second call to close waits for that
        // too.
        let closed = std::mem::replace(&mut lock(&self.queue).closed, true);
        self.quiesce();
        if closed {
            return;
        }
        let (flows, lingering) = {
            let mut queue = lock(&self.queue);
            (std::mem::take(&mut queue.flows), queue.lingering.take())
        };
        for flow in flows.iter().flatten() {
            flow.end();
        }
        self.stop_repair();
        self.clock.end_ticks();
        self.base.log_closed();
        drop(lingering);
    }

    /// The connection keeps this many more flows than before. Of these too, no more are used than are worth their cost.
    pub(crate) fn grow(&self, more: usize) {
        let waiting = {
            let mut queue = lock(&self.queue);
            self.flow_count.grow(queue.choice.grow(more));
            let count = self.flow_count.flows();
            queue.choose(|choice, carried| choice.use_flows(count, carried))
        };
        waiting.iter().for_each(|flow| flow.wake_worker());
    }

    /// Whether the connection is over and needs no flows.
    pub(crate) fn is_over(&self) -> bool {
        self.base.failed() || lock(&self.queue).closed
    }

    /// Checks timeouts and flows. Returns whether there is something to check at the next tick.
    fn tick(self: &Arc<Self>, now: Instant) -> bool {
        let mut situation = Situation {
            is_limited_by_paths: self.flow_count.is_limited_by_paths(),
            ..Situation::default()
        };
        {
            let mut queue = lock(&self.queue);
            situation.is_busy = !queue.scheduler.is_empty();
            situation.must_retransmit = queue.scheduler.must_retransmit();
            let carried = situation.is_busy.then(|| self.base.counters.carried());
            let before = std::mem::replace(&mut queue.carried, carried);
            situation.has_stopped = situation.is_busy && carried == before;
        }
        let Situation { is_busy, has_stopped, .. } = situation;
        let reports = self.report_flows(is_busy);
        // The peer may only be slow to read.
        let is_stuck = has_stopped && reports.iter().any(|report| report.path.unanswered > 0);
        let (lingers_until, uses_all, waiting) = {
            let mut queue = lock(&self.queue);
            let until = queue.lingering.as_ref().map(|(_, deadline)| *deadline);
            let time = now.saturating_duration_since(self.epoch);
            let waiting =
                queue.choose(|choice, carried| choice.handle_check(time, is_stuck, carried));
            if !is_busy {
                queue.retransmit_buffer.shrink();
            }
            (until, queue.choice.uses_all(), waiting)
        };
        waiting.iter().for_each(|flow| flow.wake_worker());
        if let Some(deadline) = lingers_until {
            let given_up = now >= deadline || self.base.failed();
            if is_busy && given_up {
                self.base.info("closed with messages that the peer has not received");
            }
            if !is_busy || given_up {
                self.close();
                return false;
            }
        }
        self.check_flows(&situation, &reports) || uses_all || lingers_until.is_some()
    }
}

impl Observed for TcpSender {
    fn observe(&self) -> ConnectionObservation<'_> {
        self.base.observe(&Self::in_flight(self))
    }

    fn base(&self) -> &Base {
        &self.base
    }

    fn paths(&self) -> Vec<PathInfo> {
        let paths = Self::flows(self);
        paths.iter().filter_map(|flow| sys::path_info(&flow.socket).ok()).collect()
    }

    fn observe_flows(&self) -> Vec<FlowObservation> {
        let observe = |flow: &Arc<SendFlow>| FlowObservation {
            number: flow.number,
            bytes: flow.counters.bytes(),
            path: sys::path_figures(&flow.socket).unwrap_or_default(),
        };
        Self::flows(self).iter().map(observe).collect()
    }
}

impl Owner for TcpSender {
    fn retain_memory(&self, memory: Box<dyn Any + Send + Sync>) {
        self.base.retain_memory(memory);
    }

    fn failure(&self) -> Option<Error> {
        let error = self.base.failure()?;
        self.quiesce();
        Some(error)
    }

    fn progress(&self) {
        self.write_deferred();
        self.destination.workers.caller_polls(&self.seen_turn);
    }
}

/// Registers the connection with a worker, for its timer and its timeouts.
struct Clock(Arc<TcpSender>);

impl Source for Clock {
    fn ready(&self, _readiness: Readiness) {
        self.0.write_overdue();
    }

    fn tick(&self, now: Instant) -> bool {
        self.0.tick(now)
    }

    fn abandoned(&self, why: &str) {
        self.0.fail(ErrorKind::Internal, why);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{SocketAddr, TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::thread;

    use evenkeel_protocol::{ConnectionId, Handle, Nonce, Welcome};

    use super::*;
    use crate::memory::buffers::RecvBuffer;
    use crate::runtime::reactor::Runtime;
    use crate::{MemoryTypes, NullLog, Settings, Transport, test_support};

    /// A connection of this transport over the near ends of so many pairs of sockets, and the far ends.
    fn open(
        transport: &Transport,
        runtime: &Runtime,
        flows: usize,
    ) -> (Arc<TcpSender>, Vec<UnixStream>) {
        open_to(transport, runtime, "127.0.0.1:1".parse().unwrap(), flows)
    }

    /// The same, with a peer that listens at this address for further flows.
    fn open_to(
        transport: &Transport,
        runtime: &Runtime,
        peer: SocketAddr,
        flows: usize,
    ) -> (Arc<TcpSender>, Vec<UnixStream>) {
        let (near, far): (Vec<_>, Vec<_>) = (0..flows).map(|_| stream()).unzip();
        (open_over(transport, runtime, peer, near), far)
    }

    /// The same, over these streams.
    fn open_over(
        transport: &Transport,
        runtime: &Runtime,
        peer: SocketAddr,
        streams: Vec<Stream>,
    ) -> Arc<TcpSender> {
        let (addresses, port) = (vec![peer.ip()], peer.port());
        let destination = Destination {
            context: transport.context(0, "").unwrap(),
            workers: Arc::clone(runtime.workers()),
            handle: Handle { addresses, port, nonce: Nonce([7; 16]) },
            peer,
            connection: ConnectionId([7; 16]),
        };
        TcpSender::open(Arc::new(destination), streams).unwrap()
    }

    /// A stream, and its other end.
    fn stream() -> (Stream, UnixStream) {
        let (near, far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        (Stream::plain(near.into()), far)
    }

    #[test]
    fn connection_with_one_flow_leaves_later_ones_their_flows() {
        let transport = test_support::transport();
        let runtime = transport.runtime().unwrap();
        let (one, _far_of_one) = open(&transport, &runtime, 1);
        let (four, _far_of_four) = open(&transport, &runtime, 4);
        let used = |sender: &TcpSender| lock(&sender.queue).choice.used();
        assert_eq!((used(&one), used(&four)), (1, 4));
        [one, four].iter().for_each(|sender| sender.close());
    }

    const CHUNK: usize = 512 << 10;

    fn send(sender: &Arc<TcpSender>, bytes: usize) {
        let buffer = SendBuffer::from_static(vec![7; bytes].leak());
        TcpSender::send(sender, buffer, None, WriteMode::AtOnce).unwrap().unwrap();
    }

    /// Returns once this many flows are idle.
    fn wait_for_idle_flows(sender: &TcpSender, flows: usize) {
        test_support::until(|| (lock(&sender.queue).choice.idle() == flows).then_some(()));
    }

    #[test]
    fn message_that_one_flow_takes_wakes_one_flow() {
        let transport = test_support::transport();
        let runtime = transport.runtime().unwrap();
        let (sender, _far) = open(&transport, &runtime, 4);
        wait_for_idle_flows(&sender, 4);
        let flows = sender.flows();
        // No flow takes anything meanwhile.
        let writers: Vec<_> = flows.iter().map(|flow| flow.writer.lock()).collect();
        send(&sender, CHUNK);
        let idle = lock(&sender.queue).choice.idle();
        drop(writers);
        assert_eq!(idle, 3);
        sender.close();
    }

    #[test]
    fn message_for_several_flows_wakes_all_of_them() {
        let transport = test_support::transport();
        let runtime = transport.runtime().unwrap();
        let (sender, _far) = open(&transport, &runtime, 4);
        wait_for_idle_flows(&sender, 4);
        // What is not read keeps each flow from more than one chunk.
        send(&sender, 4 * CHUNK);
        wait_for_idle_flows(&sender, 0);
        sender.close();
    }

    #[test]
    fn flow_with_too_much_outstanding_leaves_a_message_to_another() {
        let transport = test_support::transport();
        let runtime = transport.runtime().unwrap();
        let (sender, _far) = open(&transport, &runtime, 0);
        let _far: Vec<_> = (0..2)
            .map(|number| {
                let (near, far) = stream();
                sender.begin_with(number, near, Pacer::slow_start()).unwrap();
                far
            })
            .collect();
        let carried = |slot: usize| sender.flows()[slot].counters.bytes();
        wait_for_idle_flows(&sender, 2);
        send(&sender, 16 << 10);
        test_support::until(|| (carried(0) > 0).then_some(()));
        wait_for_idle_flows(&sender, 2);
        send(&sender, 20 << 10);
        test_support::until(|| (carried(1) > 0).then_some(()));
        sender.close();
    }

    /// Bytes of a message that is small enough to be deferred.
    const SMALL: usize = 100;

    fn send_batched(sender: &Arc<TcpSender>) {
        let buffer = SendBuffer::from_static(&[7; SMALL]);
        TcpSender::send(sender, buffer, None, WriteMode::Batched).unwrap().unwrap();
    }

    /// A connection of so many flows with a message that waits for the caller's next poll, and their far ends.
    fn deferred(
        transport: &Transport,
        runtime: &Runtime,
        flows: usize,
    ) -> (Arc<TcpSender>, Vec<UnixStream>) {
        test_support::until(|| {
            let (sender, far) = open(transport, runtime, flows);
            wait_for_idle_flows(&sender, flows);
            let seen = SeenTurn::default();
            test_support::until(|| {
                runtime.workers().caller_polls(&seen);
                runtime.workers().callers_lead().then_some(())
            });
            send_batched(&sender);
            if lock(&sender.queue).deferral.is_pending() {
                return Some((sender, far));
            }
            // This thread was preempted, and callers lead no more or the message is written.
            sender.close();
            None
        })
    }

    /// Waits for this many bytes and reads them.
    fn read(far: &mut UnixStream, bytes: usize) -> Vec<u8> {
        // Reached only when something is broken.
        far.set_read_timeout(Some(Duration::from_secs(40))).unwrap();
        let mut read = vec![0; bytes];
        far.read_exact(&mut read).unwrap();
        read
    }

    /// The caller does not poll again.
    #[test]
    fn deferred_message_is_written_without_a_poll() {
        let transport = test_support::transport();
        let runtime = transport.runtime().unwrap();
        let (sender, mut far) = deferred(&transport, &runtime, 1);
        assert_eq!(read(&mut far[0], FRAME_BYTES + SMALL)[FRAME_BYTES..], [7; SMALL]);
        wait_for_idle_flows(&sender, 1);
        assert!(!lock(&sender.queue).deferral.is_pending());
        sender.close();
    }

    /// The flow that was to write at the next poll is gone then.
    #[test]
    fn message_after_a_deferred_one_whose_flow_fails_is_written() {
        let transport = test_support::transport();
        let runtime = transport.runtime().unwrap();
        let (sender, mut far) = deferred(&transport, &runtime, 2);
        let flow = sender.flow(0).unwrap();
        sender.flow_failed(&flow, "a reset");
        // Another flow reports it, and writes what was deferred. Callers lead all the time, and poll other connections.
        let seen = SeenTurn::default();
        test_support::until(|| {
            runtime.workers().caller_polls(&seen);
            (lock(&sender.queue).choice.idle() == 1).then_some(())
        });
        read(&mut far[1], FRAME_BYTES + FRAME_BYTES + SMALL);
        send_batched(&sender);
        Owner::progress(&*sender);
        assert_eq!(read(&mut far[1], FRAME_BYTES + SMALL)[FRAME_BYTES..], [7; SMALL]);
        sender.close();
    }

    /// The socket does not take all of a small message whose copy has a place already.
    #[test]
    fn place_of_a_copy_is_released_when_its_flow_fails() {
        const MESSAGES: u64 = 8;
        let transport = test_support::transport();
        let runtime = transport.runtime().unwrap();
        let (near, far) = stream();
        near.socket.set_send_buffer_size(4 << 10).unwrap();
        let sender = open_over(&transport, &runtime, "127.0.0.1:1".parse().unwrap(), vec![near]);
        wait_for_idle_flows(&sender, 1);
        (0..MESSAGES).for_each(|_| send(&sender, 4 << 10));
        assert!(sender.flow(0).unwrap().is_full.load(Ordering::Relaxed));
        drop(far);
        test_support::until(|| sender.flow(0).is_none().then_some(()));
        let (near, mut far) = stream();
        let mut unread = far.try_clone().unwrap();
        let reader = thread::spawn(move || io::copy(&mut unread, &mut io::sink()));
        sender.begin_with(100, near, Pacer::default()).unwrap();
        wait_for_idle_flows(&sender, 1);
        far.write_all(&Frame::Ack(MESSAGES, 0).encode()).unwrap();
        test_support::until(|| (runtime.workers().retransmit_pool.used() == 0).then_some(()));
        sender.close();
        reader.join().unwrap().unwrap();
    }

    /// All flows open, and the peer's host gets small packets only.
    #[test]
    fn flows_that_deliver_nothing_are_replaced_by_flows_with_shorter_segments() {
        let settings = |name: &str| {
            let value = match name {
                "NCCL_SOCKET_IFNAME" => "lo",
                "EVENKEEL_FLOWS" => "2",
                "EVENKEEL_PEER_TIMEOUT" => "1",
                _ => return None,
            };
            Some(value.to_owned())
        };
        let settings = Settings::from_lookup(settings).unwrap();
        let transport = Transport::new(settings, Arc::new(NullLog)).unwrap();
        let runtime = transport.runtime().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (near, far): (Vec<_>, Vec<socket2::Socket>) = (0..2)
            .map(|_| {
                let near = TcpStream::connect(address).unwrap();
                near.set_nonblocking(true).unwrap();
                let (far, _) = listener.accept().unwrap();
                let far = far.into();
                sys::drop_longer_packets(&far, 600).unwrap();
                (Stream::plain(near.into()), far)
            })
            .unzip();
        let sender = open_over(&transport, &runtime, address, near);
        send(&sender, CHUNK);
        let longest = far[0].tcp_mss().unwrap();
        listener.set_nonblocking(true).unwrap();
        let mut later = vec![];
        let shorter = test_support::until(|| {
            let (mut stream, _) = listener.accept().ok()?;
            let far = socket2::Socket::from(stream.try_clone().unwrap());
            sys::drop_longer_packets(&far, 600).unwrap();
            let welcome = Welcome { connection: sender.destination.connection, verdict: Ok(()) };
            stream.write_all(&welcome.encode()).unwrap();
            let bytes = far.tcp_mss().unwrap();
            later.push(far);
            Some(bytes).filter(|bytes| *bytes < longest)
        });
        assert!(shorter <= 1400, "{shorter} bytes");
        sender.close();
    }

    /// A connection whose only flow ends, with a peer at a port at which nobody listens.
    fn refused(transport: &Transport, runtime: &Runtime) -> (Arc<TcpSender>, SocketAddr) {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let (sender, far) = open_to(transport, runtime, address, 1);
        send(&sender, CHUNK);
        drop(far);
        test_support::until(|| (lock(&sender.repair).engine.dial_failures() > 0).then_some(()));
        (sender, address)
    }

    #[test]
    fn flow_is_dialed_again_after_a_refusal() {
        let transport = test_support::transport();
        let runtime = transport.runtime().unwrap();
        let (sender, address) = refused(&transport, &runtime);
        let listener = TcpListener::bind(address).unwrap();
        listener.set_nonblocking(true).unwrap();
        test_support::until(|| {
            assert!(sender.base.failure().is_none(), "{:?}", sender.base.failure());
            listener.accept().ok()
        });
        sender.close();
    }

    #[test]
    fn connection_fails_where_all_dials_are_refused() {
        let transport = test_support::transport();
        let runtime = transport.runtime().unwrap();
        let (sender, _) = refused(&transport, &runtime);
        let error = test_support::until(|| sender.base.failure());
        assert!(error.to_string().contains("refused"), "{error}");
    }

    /// After a trial that helped, the hosts become the limit.
    #[test]
    fn kept_flows_are_used_only_while_they_are_worth_their_cost() {
        let transport = test_support::transport();
        let runtime = transport.runtime().unwrap();
        let (sender, _) = open(&transport, &runtime, 0);
        let _far: Vec<_> = (0..8)
            .map(|number| {
                let (near, far) = stream();
                sender.begin_with(number, near, Pacer::default()).unwrap();
                far
            })
            .collect();
        sender.grow(8);
        assert_eq!(lock(&sender.queue).choice.used(), 8);
        let mut before = Instant::now();
        test_support::until(|| {
            let now = Instant::now();
            let time = now - std::mem::replace(&mut before, now);
            sender.add_caller_work(time * runtime.workers().threads() as u32);
            sender.on_chunks_written(1000);
            sender.flows().iter().for_each(|flow| sender.adapt(flow));
            (lock(&sender.queue).choice.used() < 8).then_some(())
        });
        sender.close();
    }

    /// Without a gap, and without being counted as lost or changed on the way.
    #[test]
    fn flows_whose_keys_are_nearly_used_up_are_replaced() {
        for flows in ["1", "4"] {
            let settings = |name: &str| {
                let value = match name {
                    "NCCL_SOCKET_IFNAME" => "lo".to_owned(),
                    "EVENKEEL_TRANSPORT" => "tcp".to_owned(),
                    "EVENKEEL_ENCRYPTION" => "required".to_owned(),
                    "EVENKEEL_JOB_KEY" => "5".repeat(64),
                    "EVENKEEL_FLOWS" => flows.to_owned(),
                    _ => return None,
                };
                Some(value)
            };
            let settings = Settings::from_lookup(settings).unwrap();
            let transport = Transport::new(settings, Arc::new(NullLog)).unwrap();
            let listener = transport.listen(0, "", MemoryTypes::HOST).unwrap();
            let (send, recv) = test_support::connected(&transport, &listener, listener.handle());
            let sender = {
                let mut all = transport.metrics.connections().into_iter();
                all.find(|other| other.base().direction_of() == Direction::Send).unwrap()
            };
            let numbers =
                || -> Vec<u32> { sender.observe_flows().iter().map(|flow| flow.number).collect() };
            let before = numbers();
            send.sender.wear_keys();
            let message: &'static [u8] = vec![7; 1 << 20].leak();
            test_support::until(|| {
                let into = RecvBuffer::from_static(vec![0; 1 << 20].leak());
                let received = recv.recv(into).unwrap().unwrap();
                let sent = send.send(SendBuffer::from_static(message)).unwrap().unwrap();
                test_support::until(|| received.test().unwrap());
                test_support::until(|| sent.test().unwrap());
                let now = numbers();
                let is_new =
                    now.len() == before.len() && now.iter().all(|flow| !before.contains(flow));
                is_new.then_some(())
            });
            let counters = &sender.base().counters;
            assert_eq!(counters.replaced.get(), before.len() as u64);
            assert_eq!((counters.lost.get(), counters.recovered.get()), (0, 0));
        }
    }
}
