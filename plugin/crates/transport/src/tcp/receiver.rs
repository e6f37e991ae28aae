//! The receiving side of a TCP connection with several flows.

use std::any::Any;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use evenkeel_protocol::{
    ChunkAction, ChunkHeader, MatchStep, Reassembly, ReassemblyError, RecvCodec, Refusal, TooLong,
};

use socket2::Socket;

use crate::connection::base::{Base, Direction, InFlight, TransportKind, WORKER_QUANTUM};
use crate::connection::recv::{Inbound, TaggedBuffer};
use crate::connection::request::{MAX_REQUESTS, Operation, Owner, Request, Target};
use crate::connection::unexpected::{TagMatcher, UnexpectedMemory, deliver};
use crate::context::Context;
use crate::error::{Error, ErrorKind};
use crate::memory::buffers::RecvBuffer;
use crate::runtime::caller_polling::SeenTurn;
use crate::runtime::reactor::{Readiness, Registration, Source, Workers};
use crate::runtime::work_lock::WorkLock;
use crate::settings::Settings;
use crate::stream::{SendHalf, Stream};
use crate::sync::lock;
use crate::sys;
use crate::tcp::MAX_FLOW_SLOTS;
use crate::tcp::chunk_stage::ChunkStage;
use crate::tcp::recv_flow::{self, FlowEnd, ReadState, RecvFlowOwner, ReplyState};
use crate::tcp::recv_queue::{self, CLOSED_TIMEOUT, FlowEntry, RESET_TIMEOUT};
use crate::telemetry::counters::FlowCounters;
use crate::telemetry::metrics::{ConnectionObservation, FlowObservation, Observed};

impl Inbound for TcpReceiver {
    fn base(&self) -> &Base {
        &self.base
    }

    fn recv(self: Arc<Self>, buffer: RecvBuffer) -> Result<Option<Request>, Error> {
        Self::recv(&self, buffer)
    }

    fn recv_group(self: Arc<Self>, group: &[TaggedBuffer<'_>]) -> Result<Option<Request>, Error> {
        Self::recv_group(&self, group)
    }

    fn set_awaited(&self, is_awaited: bool) {
        let queue = lock(&self.queue);
        self.base.set_awaited(is_awaited);
        self.update_waits(&queue);
    }

    fn flows(&self) -> usize {
        Self::flows(self).len()
    }

    fn close(&self) {
        Self::close(self);
    }

    #[cfg(test)]
    fn break_path(&self, index: usize) {
        unreachable!("TCP has no queue pair {index}");
    }
}

type RecvFlow = recv_flow::RecvFlow<TcpReceiver>;
type RecvQueue = recv_queue::RecvQueue<RecvFlow>;

/// Lock order: a flow's `reading`, then `delivering`, then `queue`, then a flow's `replies`.
pub(crate) struct TcpReceiver {
    base: Base,
    workers: Arc<Workers>,
    queue: Mutex<RecvQueue>,
    /// Held while unexpected messages are copied into their buffers.
    delivering: WorkLock<()>,
    /// For timeouts of the connection. Flows have none.
    clock: Registration,
    /// The slot that received the last bytes.
    last_active: AtomicUsize,
    seen_turn: SeenTurn,
}

/// What to do without locks after buffers with tags have changed.
#[derive(Default)]
struct TagActions {
    /// Flows with frames to write.
    repliers: Vec<Arc<RecvFlow>>,
    /// Flows that waited for a buffer and need not any more.
    to_wake: Vec<Arc<RecvFlow>>,
    /// Whether unexpected messages are to be copied into their buffers.
    is_delivery_due: bool,
}

impl TcpReceiver {
    /// Opens a connection with flows that were accepted.
    pub(crate) fn open(
        context: Context,
        workers: &Arc<Workers>,
        peer: SocketAddr,
        streams: Vec<Stream>,
    ) -> io::Result<Arc<Self>> {
        let receiver = Arc::new(Self {
            base: Base::new(context, Direction::Recv, TransportKind::Tcp, peer),
            workers: Arc::clone(workers),
            queue: Mutex::new(RecvQueue {
                reassembly: Reassembly::default(),
                tags: TagMatcher::default(),
                deliveries: VecDeque::new(),
                undelivered: 0,
                is_quiesced: false,
                flows: Vec::new(),
                stuck_since: None,
                replacement_timeout: CLOSED_TIMEOUT,
                is_sender_open: false,
                opened: Instant::now(),
                highest: 0,
                last_suspect: 0,
                last_trouble: None,
                is_starved: false,
                cause: String::new(),
                closes_at: None,
                closed: false,
            }),
            delivering: WorkLock::default(),
            clock: workers.registration(),
            last_active: AtomicUsize::new(0),
            seen_turn: SeenTurn::default(),
        });
        receiver.clock.watch_ticks(Arc::new(Clock(Arc::clone(&receiver))));
        let observed: Weak<Self> = Arc::downgrade(&receiver);
        receiver.base.context.metrics.watch(observed);
        // All are there before any is read: the sender may report one as dead on another.
        let flows = streams.into_iter().enumerate().map(|(number, stream)| {
            let flow = receiver.insert_flow(number as u32, stream, true);
            flow.map_err(|(refusal, _)| io::Error::other(refusal.to_string()))
        });
        let watched = flows
            .collect::<io::Result<Vec<_>>>()
            .and_then(|flows| flows.iter().try_for_each(|flow| receiver.watch_flow(flow)));
        if let Err(error) = watched {
            receiver.close();
            return Err(error);
        }
        Ok(receiver)
    }

    /// Whether another flow can be added.
    pub(crate) fn is_open(&self) -> bool {
        !self.base.failed() && !lock(&self.queue).closed
    }

    /// Adds a flow, and answers its dialer by `answer`. The flow is there before the dialer knows that it is accepted. The
    /// sender may use it and lose it at once, and the report must find it: its chunks are sent again on another flow.
    pub(crate) fn join(
        self: &Arc<Self>,
        number: u32,
        stream: Stream,
        answer: impl FnOnce(&Socket, &mut SendHalf, Result<(), Refusal>) -> io::Result<()>,
    ) -> Result<(), Refusal> {
        let flow = match self.insert_flow(number, stream, false) {
            Ok(flow) => flow,
            Err((refusal, mut stream)) => {
                // If the dialer is gone, nobody misses the answer.
                let _ = answer(&stream.socket, &mut stream.send, Err(refusal));
                return Err(refusal);
            }
        };
        flow.reply(|replies| {
            let answered = answer(&flow.socket, &mut replies.half, Ok(()));
            (replies.is_answered, replies.error) = (true, answered.err());
        });
        self.resend_tags(Some(&flow));
        self.watch_flow(&flow).map_err(|error| {
            self.flow_ended(&flow, FlowEnd::Lost(error.to_string()));
            Refusal::Busy
        })
    }

    /// Registers a flow with its worker.
    fn watch_flow(&self, flow: &Arc<RecvFlow>) -> io::Result<()> {
        flow.registration.watch(&flow.socket, Arc::<RecvFlow>::clone(flow))?;
        if flow.reading.lock().closed {
            // The flow may have been closed before the watch began.
            flow.registration.end(&flow.socket);
        }
        Ok(())
    }

    /// Assigns a slot to a flow, unless the connection is over, has too many flows, or has this one already. Nothing is
    /// written to the flow before its dialer is answered.
    fn insert_flow(
        self: &Arc<Self>,
        number: u32,
        stream: Stream,
        is_answered: bool,
    ) -> Result<Arc<RecvFlow>, (Refusal, Stream)> {
        let mut queue = lock(&self.queue);
        if queue.closed || self.base.failed() {
            return Err((Refusal::Gone, stream));
        }
        if queue.flows.iter().flatten().any(|entry| entry.flow.number == number) {
            return Err((Refusal::Inconsistent, stream));
        }
        let slot = queue.flows.iter().position(Option::is_none).unwrap_or(queue.flows.len());
        // Twice as many as a sender has: this side may not know yet that some are dead.
        if slot >= 2 * MAX_FLOW_SLOTS {
            return Err((Refusal::Busy, stream));
        }
        let Stream { socket, send, recv: mut half } = stream;
        half.read_ahead();
        // While an acknowledgement is unacknowledged, the kernel sends no keepalive probes, and repeats it for a quarter of an
        // hour. Not for flows that send: a peer that does not read would end them. Fails only where there is no TCP.
        let _ = socket.set_tcp_user_timeout(Some(self.base.context.settings.peer_timeout));
        let flow = Arc::new(RecvFlow {
            receiver: Arc::clone(self),
            number,
            slot,
            socket,
            registration: self.workers.registration(),
            counters: FlowCounters::default(),
            has_ended: AtomicBool::new(false),
            is_woken: AtomicBool::new(false),
            reading: WorkLock::new(ReadState {
                half,
                closed: false,
                codec: RecvCodec::new(self.base.context.settings.checksum),
                stage: ChunkStage::new(&self.workers.staging),
                has_received: false,
                event: None,
            }),
            replies: Mutex::new(ReplyState { half: send, is_answered, ..ReplyState::default() }),
        });
        if slot == queue.flows.len() {
            queue.flows.push(None);
        }
        // A flow that is dialed again keeps its number.
        queue.is_sender_open |= !is_answered && number > queue.highest;
        queue.highest = queue.highest.max(number);
        let entry = FlowEntry { flow: Arc::clone(&flow), waits_for: None, ended: false };
        queue.flows[slot] = Some(entry);
        if queue.stuck_since.take().is_some() {
            self.base.counters.recovered.add(1);
            // The sender lives. It may give this flow up before it knows that it is accepted, and tries again.
            queue.replacement_timeout = self.base.context.settings.recovery_timeout;
        }
        Ok(flow)
    }

    fn flows(&self) -> Vec<Arc<RecvFlow>> {
        let queue = lock(&self.queue);
        queue.flows.iter().flatten().map(|entry| Arc::clone(&entry.flow)).collect()
    }

    fn recv(this: &Arc<Self>, buffer: RecvBuffer) -> Result<Option<Request>, Error> {
        if let Some(error) = this.failure() {
            return Err(error);
        }
        let operation = Operation::new();
        let guard = lock(&this.queue);
        if guard.requests() >= MAX_REQUESTS {
            return Ok(None);
        }
        this.post(guard, Target::new(buffer, &operation, 0), 0);
        Ok(Some(Request::new(operation, Arc::clone(this) as Arc<dyn Owner>)))
    }

    fn recv_group(this: &Arc<Self>, group: &[TaggedBuffer<'_>]) -> Result<Option<Request>, Error> {
        if let Some(error) = this.failure() {
            return Err(error);
        }
        let operation = Operation::of_group(group.len());
        let mut guard = lock(&this.queue);
        if guard.requests() + group.len() > MAX_REQUESTS {
            return Ok(None);
        }
        match group {
            [TaggedBuffer { buffer, tag, .. }] if guard.tags.has_common_tag(*tag) => {
                this.post(guard, Target::new(*buffer, &operation, 0), *tag);
            }
            _ => {
                for (index, TaggedBuffer { buffer, tag, .. }) in group.iter().enumerate() {
                    let target = Target::new(*buffer, &operation, index);
                    guard.tags.post(*tag, buffer.length() as u64, target);
                }
                drop(guard);
                this.update_tags(|_| true);
                this.update_waits(&lock(&this.queue));
                this.check_unrecoverable(Instant::now());
            }
        }
        Ok(Some(Request::new(operation, Arc::clone(this) as Arc<dyn Owner>)))
    }

    /// Posts a buffer for the next message, and reads the message if it waits for the buffer.
    pub(super) fn post<'a>(
        &'a self,
        mut guard: MutexGuard<'a, RecvQueue>,
        target: Target,
        tag: i32,
    ) {
        let message = guard.post(target, tag);
        let max = if self.workers.callers_lead() {
            WORKER_QUANTUM
        } else {
            self.base.context.settings.caller_bytes
        };
        while let Some(flow) = guard.take_waiting(message) {
            drop(guard);
            flow.read(max);
            guard = lock(&self.queue);
        }
        let open = guard.is_open();
        self.update_waits(&guard);
        drop(guard);
        if !open {
            self.check_unrecoverable(Instant::now());
        }
    }

    /// Posts the buffers with tags that are next.
    fn match_tags(&self, queue: &mut RecvQueue, actions: &mut TagActions) -> Result<(), TooLong> {
        while let Some(step) = queue.tags.next_step(queue.reassembly.next())? {
            match step {
                MatchStep::Post { tag, buffer: target, is_advertised } => {
                    let number = queue.post(target, tag);
                    if is_advertised && let Some(flow) = self.reply_flow(queue) {
                        lock(&flow.replies).buffer_tags.push_back((number, tag));
                        actions.repliers.push(flow);
                        actions.repliers.dedup_by(|a, b| Arc::ptr_eq(a, b));
                    }
                }
                MatchStep::AskSender => {
                    let flows = queue.flows.iter().flatten();
                    for flow in flows.map(|entry| Arc::clone(&entry.flow)) {
                        lock(&flow.replies).tags_differ_from = queue.tags.asked_from();
                        actions.repliers.push(flow);
                    }
                }
                MatchStep::Deliver(delivery) => {
                    queue.push_delivery(delivery);
                    actions.is_delivery_due = true;
                }
            }
        }
        Self::take_unblocked(queue, &mut actions.to_wake);
        Ok(())
    }

    /// Takes the flows that need not wait any more: there is a buffer for their next message, or it may be unexpected.
    fn take_unblocked(queue: &mut RecvQueue, to_wake: &mut Vec<Arc<RecvFlow>>) {
        let (next, tags, is_starved) = (queue.reassembly.next(), &queue.tags, queue.is_starved);
        for entry in queue.flows.iter_mut().flatten() {
            let has_buffer = |message| {
                let may_be_unexpected = !is_starved && tags.accepts_unexpected(next);
                message < next || message == next && may_be_unexpected
            };
            if entry.waits_for.is_some_and(has_buffer) {
                entry.waits_for = None;
                to_wake.push(Arc::clone(&entry.flow));
            }
        }
    }

    /// Copies unexpected messages into their buffers. If another thread is at it, that thread goes on.
    fn deliver_unexpected(&self) {
        let (mut to_wake, mut is_any) = (Vec::new(), false);
        self.delivering.run(|_delivering| is_any |= self.copy_unexpected(&mut to_wake));
        if is_any {
            self.base.notify();
        }
        to_wake.iter().for_each(|flow| flow.wake_worker());
    }

    /// Copies the unexpected messages that have buffers, and takes the flows that waited for their memory. Called with
    /// `delivering`. Returns whether there were any.
    fn copy_unexpected(&self, to_wake: &mut Vec<Arc<RecvFlow>>) -> bool {
        let mut is_any = false;
        let mut queue = lock(&self.queue);
        while !queue.is_quiesced
            && let Some(delivery) = queue.deliveries.pop_front()
        {
            // Without the lock: it may be long.
            drop(queue);
            let freed = deliver(delivery);
            is_any = true;
            queue = lock(&self.queue);
            if queue.delivered(freed) {
                Self::take_unblocked(&mut queue, to_wake);
            }
            self.update_waits(&queue);
        }
        is_any
    }

    /// Accounts for what the connection waits for now.
    fn update_waits(&self, queue: &RecvQueue) {
        let is_outstanding = queue.requests() > 0;
        self.base.set_outstanding(is_outstanding);
        let waits = &self.base.waits;
        waits.unposted.set(!is_outstanding && !queue.closed && queue.is_buffer_wanted());
        if !is_outstanding {
            waits.arriving.set(false);
        }
    }

    fn run_actions(&self, actions: TagActions) {
        actions.repliers.iter().for_each(|flow| flow.reply(|_| {}));
        actions.to_wake.iter().for_each(|flow| flow.wake_worker());
        if actions.is_delivery_due {
            self.deliver_unexpected();
        }
    }

    /// A flow for frames to the sender: the one that received the last bytes, if it is there.
    fn reply_flow(&self, queue: &RecvQueue) -> Option<Arc<RecvFlow>> {
        let fits = |entry: &&FlowEntry<RecvFlow>| !entry.ended;
        let last_active =
            queue.flows.get(self.last_active.load(Ordering::Relaxed)).and_then(Option::as_ref);
        let entry = last_active.filter(fits).or_else(|| queue.flows.iter().flatten().find(fits));
        entry.map(|entry| Arc::clone(&entry.flow))
    }

    /// Sends tag frames again that may be lost with a flow, on this flow or another one.
    fn resend_tags(&self, on: Option<&Arc<RecvFlow>>) {
        let flow = {
            let queue = lock(&self.queue);
            if queue.tags.asked_from().is_none() && !queue.tags.advertises() {
                return;
            }
            let Some(flow) = on.cloned().or_else(|| self.reply_flow(&queue)) else { return };
            let mut replies = lock(&flow.replies);
            replies.tags_differ_from = queue.tags.asked_from();
            if queue.tags.advertises() {
                let posted =
                    queue.reassembly.posted().filter(|(_, posted)| posted.target.is_some());
                replies.buffer_tags = posted.map(|(number, posted)| (number, posted.tag)).collect();
            }
            drop(replies);
            flow
        };
        flow.reply(|_| {});
    }
}

impl RecvFlowOwner for TcpReceiver {
    fn base(&self) -> &Base {
        &self.base
    }

    fn queue(&self) -> &Mutex<RecvQueue> {
        &self.queue
    }

    fn reserve(
        &self,
        slot: usize,
        chunk: &ChunkHeader,
        at: u64,
    ) -> Result<ChunkAction<RecvBuffer>, ReassemblyError> {
        let mut memory = None;
        let mut queue = lock(&self.queue);
        queue.is_sender_open = true;
        let number = queue.flows.get(slot).and_then(|entry| Some(entry.as_ref()?.flow.number));
        queue.heard_from(number.unwrap_or(0));
        Ok(loop {
            break match queue.reassembly.reserve(chunk, at)? {
                ChunkAction::Deliver { payload, end } => {
                    self.base.waits.arriving.set(true);
                    ChunkAction::Deliver { payload: payload.buffer, end }
                }
                ChunkAction::Discard { end } => {
                    self.base.counters.repeated.add(end - at);
                    ChunkAction::Discard { end }
                }
                ChunkAction::NotPosted => {
                    // A flow on which no tag was sent: the tag is 0.
                    queue.tags.set_common_tag(0);
                    if queue.tags.is_idle() {
                        queue.wait(slot, chunk.message);
                        self.update_waits(&queue);
                        break ChunkAction::NotPosted;
                    }
                    let mut actions = TagActions::default();
                    self.match_tags(&mut queue, &mut actions)?;
                    if queue.wants_unexpected(chunk) {
                        if let Some(memory) = memory.take() {
                            queue.post_unexpected(chunk, memory);
                            self.match_tags(&mut queue, &mut actions)?;
                        } else {
                            // Without the lock: it may be large.
                            drop(queue);
                            self.run_actions(actions);
                            memory = UnexpectedMemory::new(chunk.total as usize);
                            queue = lock(&self.queue);
                            if memory.is_none() && queue.reassembly.next() <= chunk.message {
                                queue.is_starved = true;
                                queue.wait(slot, chunk.message);
                                break ChunkAction::NotPosted;
                            }
                            continue;
                        }
                    }
                    let has_buffer = queue.reassembly.next() > chunk.message;
                    if !has_buffer {
                        queue.wait(slot, chunk.message);
                        self.update_waits(&queue);
                    }
                    if queue.is_starved {
                        self.clock.request_tick();
                    }
                    drop(queue);
                    self.run_actions(actions);
                    if !has_buffer {
                        return Ok(ChunkAction::NotPosted);
                    }
                    queue = lock(&self.queue);
                    continue;
                }
            };
        })
    }

    fn ack_due(&self) -> Option<u64> {
        lock(&self.queue).reassembly.ack_due()
    }

    fn on_received(&self, flow: &RecvFlow, message: u64, bytes: u64) {
        self.last_active.store(flow.slot, Ordering::Relaxed);
        let mut is_delivery_due = false;
        let (ack, failure) = {
            let mut queue = lock(&self.queue);
            let Some(completed) = queue.reassembly.received(message, bytes) else { return };
            self.base.counters.message(completed.total);
            self.base.waits.arriving.set(false);
            let failure = match completed.payload.target {
                Some(target) => {
                    target.complete(completed.total);
                    self.base.notify();
                    None
                }
                None => match queue.tags.unexpected_received(message, completed.total) {
                    Ok(delivery) => {
                        is_delivery_due = delivery.is_some();
                        delivery.into_iter().for_each(|delivery| queue.push_delivery(delivery));
                        None
                    }
                    Err(too_long) => Some(too_long),
                },
            };
            self.update_waits(&queue);
            // A peer that has closed may wait for all remaining acknowledgements.
            let ack = if queue.closes_at.is_some() {
                Some(queue.reassembly.ack())
            } else {
                queue.reassembly.ack_overdue()
            };
            if queue.reassembly.is_ack_left() {
                self.clock.request_tick();
            }
            (ack, failure)
        };
        if let Some(below) = ack {
            flow.reply(|replies| replies.ack = Some(below));
        }
        if is_delivery_due {
            self.deliver_unexpected();
        }
        if let Some(too_long) = failure {
            self.fail(ErrorKind::Truncated, &too_long.to_string());
        }
    }

    fn update_tags(&self, change: impl FnOnce(&mut TagMatcher) -> bool) {
        let mut actions = TagActions::default();
        let outcome = {
            let mut queue = lock(&self.queue);
            if change(&mut queue.tags) {
                let matched = self.match_tags(&mut queue, &mut actions);
                matched.map_err(|too_long| (ErrorKind::Truncated, too_long.to_string()))
            } else {
                let what = "protocol error: the peer sent SameTagBelow without being asked";
                Err((ErrorKind::Remote, what.to_owned()))
            }
        };
        self.run_actions(actions);
        if let Err((kind, what)) = outcome {
            self.fail(kind, &what);
        }
    }

    fn flow_ended(self: &Arc<Self>, flow: &RecvFlow, end: FlowEnd) {
        if !flow.quiesce() {
            return;
        }
        flow.close();
        let others: Vec<Arc<RecvFlow>> = {
            let mut queue = lock(&self.queue);
            // Not there if the connection was closed in between.
            if let Some(slot) = queue.flows.get_mut(flow.slot) {
                *slot = None;
            }
            let Settings { recovery_timeout, connect_timeout, .. } = *self.base.context.settings;
            let timeout = match &end {
                FlowEnd::Expected | FlowEnd::Lost(_) => None,
                FlowEnd::Reset(_) => Some(RESET_TIMEOUT.min(recovery_timeout)),
                FlowEnd::Unreachable(_) => Some(recovery_timeout),
            };
            if let Some(timeout) = timeout {
                // Until then it may try to open the connection.
                let opening = match queue.is_sender_open {
                    true => Duration::ZERO,
                    false => connect_timeout.saturating_sub(queue.opened.elapsed()),
                };
                queue.prolong(timeout.max(opening));
            }
            match &end {
                FlowEnd::Expected => Vec::new(),
                FlowEnd::Lost(why) | FlowEnd::Reset(why) | FlowEnd::Unreachable(why) => {
                    why.clone_into(&mut queue.cause);
                    queue.flows.iter().flatten().map(|entry| Arc::clone(&entry.flow)).collect()
                }
            }
        };
        if !matches!(end, FlowEnd::Expected) {
            self.base.counters.lost.add(1);
        }
        // The sender may not notice by itself if it has nothing to write. One frame is enough, but this side does not know
        // which flows still work.
        for other in others {
            other.reply(|replies| replies.dead_flows.push_back(flow.number));
        }
        self.resend_tags(None);
        self.check_unrecoverable(Instant::now());
    }

    fn on_flow_dead(self: &Arc<Self>, number: u32) {
        Self::on_flow_dead(self, number);
    }

    fn check_unrecoverable(&self, now: Instant) {
        let (what, kind) = {
            let mut queue = lock(&self.queue);
            let queue = &mut *queue;
            if queue.is_open() {
                queue.stuck_since = None;
                return;
            }
            let waiting = queue.flows.iter().flatten().any(|entry| !entry.ended);
            let outstanding = queue.outstanding() > 0;
            if waiting && !outstanding {
                return;
            }
            let since = *queue.stuck_since.get_or_insert(now);
            let timeout = match (waiting, queue.is_peer_done()) {
                (true, _) => self.base.context.settings.recovery_timeout,
                (false, true) => Duration::ZERO,
                // The sender may not get through either, and tries as long.
                (false, false) => queue.replacement_timeout,
            };
            if !outstanding {
                return;
            }
            if now.saturating_duration_since(since) < timeout {
                self.clock.request_tick();
                return;
            }
            if queue.is_peer_done() || !waiting && queue.cause.is_empty() {
                ("the peer closed the connection".to_owned(), ErrorKind::Remote)
            } else if waiting {
                let message = queue.reassembly.posted().next().map_or(0, |(number, _)| number);
                let what = format!(
                    "flows wait for buffers of later messages, and none delivered message {message} within {} ms",
                    timeout.as_millis()
                );
                (what, ErrorKind::Remote)
            } else {
                let what = format!(
                    "all flows are lost ({}) and the peer opened no other within {} ms",
                    queue.cause,
                    timeout.as_millis()
                );
                (what, ErrorKind::Remote)
            }
        };
        self.fail(kind, &what);
    }

    fn fail(&self, kind: ErrorKind, what: &str) {
        if self.base.fail(kind, what, &self.in_flight()) {
            // The peer must be informed now, not when this side closes.
            let below = lock(&self.queue).reassembly.ack();
            self.flows().iter().for_each(|flow| flow.send_close(below));
        }
    }
}

impl TcpReceiver {
    /// The peer reports a dead flow. It will send again what the flow had not delivered.
    pub(crate) fn on_flow_dead(self: &Arc<Self>, number: u32) {
        let flow = self.flows().into_iter().find(|flow| flow.number == number);
        if let Some(flow) = flow
            && flow.quiesce()
        {
            flow.close();
            self.base.counters.lost.add(1);
            {
                let mut queue = lock(&self.queue);
                if let Some(slot) = queue.flows.get_mut(flow.slot) {
                    *slot = None;
                }
                let recovery_timeout = self.base.context.settings.recovery_timeout;
                queue.flow_reported_dead(RESET_TIMEOUT.min(recovery_timeout));
            }
            self.resend_tags(None);
        }
    }

    /// Reads flows again that wait for memory of unexpected messages. Other connections may have given theirs back.
    fn retry_unexpected(&self) {
        if std::mem::take(&mut lock(&self.queue).is_starved) {
            self.update_tags(|_| true);
        }
    }

    /// Acknowledges messages if no acknowledgement is under way and nothing followed them.
    fn ack_if_idle(&self) {
        let last_active = self.last_active.load(Ordering::Relaxed);
        let (below, flow) = {
            let mut queue = lock(&self.queue);
            let Some(below) = queue.reassembly.ack_if_idle() else {
                if queue.reassembly.is_ack_left() {
                    self.clock.request_tick();
                }
                return;
            };
            let at = queue.flows.get(last_active).and_then(Option::as_ref);
            let entry = at.or_else(|| queue.flows.iter().flatten().next());
            (below, entry.map(|entry| Arc::clone(&entry.flow)))
        };
        if let Some(flow) = flow {
            flow.reply(|replies| replies.ack = Some(below));
        }
    }

    fn in_flight(&self) -> InFlight {
        let queue = lock(&self.queue);
        InFlight { requests: queue.requests(), bytes: queue.reassembly.missing_bytes() }
    }

    /// Returns when no buffer is being written, and none will be. Waits only for system calls that do not block.
    pub(super) fn quiesce(&self) {
        for flow in self.flows() {
            flow.quiesce();
        }
        // Messages that are there are still delivered, and none after them.
        let _delivering = self.delivering.lock();
        self.copy_unexpected(&mut Vec::new());
        lock(&self.queue).is_quiesced = true;
    }

    /// Closes the connection.
    pub(super) fn close(&self) {
        // Set first, so that every flow is quiesced, also one that is being added. A second call to close waits for that
        // too.
        let closed = std::mem::replace(&mut lock(&self.queue).closed, true);
        self.quiesce();
        if closed {
            return;
        }
        let (flows, below) = {
            let mut queue = lock(&self.queue);
            (std::mem::take(&mut queue.flows), queue.reassembly.ack())
        };
        for entry in flows.iter().flatten() {
            entry.flow.send_close(below);
            entry.flow.close();
        }
        self.clock.end_ticks();
        self.base.log_closed();
    }
}

impl Observed for TcpReceiver {
    fn observe(&self) -> ConnectionObservation<'_> {
        self.base.observe(&Self::in_flight(self))
    }

    fn base(&self) -> &Base {
        &self.base
    }

    fn paths(&self) -> Vec<sys::PathInfo> {
        let paths = Self::flows(self);
        paths.iter().filter_map(|flow| sys::path_info(&flow.socket).ok()).collect()
    }

    fn observe_flows(&self) -> Vec<FlowObservation> {
        let observe = |flow: &Arc<RecvFlow>| FlowObservation {
            number: flow.number,
            bytes: flow.counters.bytes(),
            path: sys::path_figures(&flow.socket).unwrap_or_default(),
        };
        Self::flows(self).iter().map(observe).collect()
    }
}

impl Owner for TcpReceiver {
    fn retain_memory(&self, memory: Box<dyn Any + Send + Sync>) {
        self.base.retain_memory(memory);
    }

    fn failure(&self) -> Option<Error> {
        let error = self.base.failure()?;
        self.quiesce();
        Some(error)
    }

    fn progress(&self) {
        self.workers.caller_polls(&self.seen_turn);
    }
}

/// Registers the connection with a worker, for its timeouts.
struct Clock(Arc<TcpReceiver>);

impl Source for Clock {
    fn ready(&self, _readiness: Readiness) {}

    fn tick(&self, now: Instant) -> bool {
        if self.0.base.failed() {
            return false;
        }
        // Each requests the next tick itself if something is left.
        self.0.check_unrecoverable(now);
        self.0.ack_if_idle();
        self.0.retry_unexpected();
        false
    }

    fn abandoned(&self, why: &str) {
        self.0.fail(ErrorKind::Internal, why);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::sync::Barrier;
    use std::thread;

    use evenkeel_protocol::{FRAME_BYTES, Frame, MAX_UNEXPECTED_BYTES};
    use rustix::event::{PollFd, PollFlags, poll};
    use socket2::{SockFilter, SockRef};

    use super::*;
    use crate::{NullLog, Transport, test_support};

    /// After a close nothing is written to the buffers, whatever flows are added meanwhile.
    #[test]
    fn close_quiesces_flows_that_are_being_added() {
        let transport = test_support::transport();
        let runtime = transport.runtime().unwrap();
        for _ in 0..200 {
            let context = transport.context(0, "").unwrap();
            let peer = "127.0.0.1:1".parse().unwrap();
            let receiver = TcpReceiver::open(context, runtime.workers(), peer, Vec::new()).unwrap();
            let sockets: Vec<_> = (0..64).map(|_| UnixStream::pair().unwrap().0).collect();
            let begin = Barrier::new(2);
            let entered = thread::scope(|scope| {
                let entering = scope.spawn(|| {
                    begin.wait();
                    let sockets = sockets.into_iter().enumerate();
                    let insert_flow = |(number, socket): (usize, UnixStream)| {
                        receiver.insert_flow(number as u32, Stream::plain(socket.into()), true).ok()
                    };
                    sockets.map_while(insert_flow).collect::<Vec<_>>()
                });
                begin.wait();
                // Some are there, and more are being added.
                while lock(&receiver.queue).flows.len() < 8 {
                    thread::yield_now();
                }
                receiver.close();
                entering.join().unwrap()
            });
            assert!(entered.iter().all(|flow| flow.reading.lock().closed));
        }
    }

    /// A chunk of message 0, without its bytes.
    fn chunk(length: u32) -> [u8; FRAME_BYTES] {
        let total = length.into();
        Frame::Chunk(ChunkHeader { message: 0, offset: 0, length, total, ack_wanted: true })
            .encode()
    }

    /// Reads frames until there is an acknowledgement.
    fn wait_for_ack(mut flow: &UnixStream) {
        let mut frame = [0; FRAME_BYTES];
        while !matches!(Frame::decode(&frame), Ok(Frame::Ack(..))) {
            flow.read_exact(&mut frame).unwrap();
        }
    }

    /// A sender that is told of a new flow may lose it, report that on another one, and send the bytes again there, all
    /// before the thread that has told it goes on. What the lost flow still holds must not count.
    #[test]
    fn flow_that_dies_while_it_joins_delivers_nothing() {
        let transport = test_support::transport();
        let runtime = transport.runtime().unwrap();
        let context = transport.context(0, "").unwrap();
        let peer = "127.0.0.1:1".parse().unwrap();
        let (near, mut far) = UnixStream::pair().unwrap();
        let receiver =
            TcpReceiver::open(context, runtime.workers(), peer, vec![Stream::plain(near.into())])
                .unwrap();
        let memory = Box::leak(vec![0; 2000].into_boxed_slice());
        let request =
            TcpReceiver::recv(&receiver, RecvBuffer::from_static(memory)).unwrap().unwrap();
        let (joining, mut lost) = UnixStream::pair().unwrap();
        let _ = receiver.join(4, Stream::plain(joining.into()), |_, _, verdict| {
            assert_eq!(verdict, Ok(()));
            lost.write_all(&chunk(2000)).unwrap();
            lost.write_all(&[1; 1000]).unwrap();
            far.write_all(&Frame::FlowDead(4).encode()).unwrap();
            wait_for_ack(&far);
            Ok(())
        });
        receiver.flows().iter().for_each(|flow| flow.read(1 << 20));
        far.write_all(&chunk(2000)).unwrap();
        far.write_all(&[2; 2000]).unwrap();
        assert_eq!(test_support::until(|| request.test().unwrap()), 2000);
        receiver.close();
    }

    /// A TCP connection from a peer.
    fn flow() -> (Socket, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let near = Socket::from(listener.accept().unwrap().0);
        near.set_nonblocking(true).unwrap();
        (near, far)
    }

    fn reset(flow: TcpStream) {
        SockRef::from(&flow).set_linger(Some(Duration::ZERO)).unwrap();
    }

    /// What resets all flows may let nothing through for a while, and the sender gives up some attempts before it gets through.
    #[test]
    fn reset_receiver_waits_for_a_sender_that_does_not_get_through() {
        let transport = test_support::transport();
        let runtime = transport.runtime().unwrap();
        let context = transport.context(0, "").unwrap();
        let peer = "127.0.0.1:1".parse().unwrap();
        let (near, far) = flow();
        let receiver =
            TcpReceiver::open(context, runtime.workers(), peer, vec![Stream::plain(near)]).unwrap();
        let memory = Box::leak(vec![0; 2000].into_boxed_slice());
        let request =
            TcpReceiver::recv(&receiver, RecvBuffer::from_static(memory)).unwrap().unwrap();
        let no_flow_is_left = || test_support::until(|| receiver.flows().is_empty().then_some(()));
        let fails_after = |time| {
            // The time counts from the first check.
            receiver.check_unrecoverable(Instant::now());
            receiver.check_unrecoverable(Instant::now() + time);
            receiver.base.failed()
        };
        reset(far);
        no_flow_is_left();
        assert!(!fails_after(RESET_TIMEOUT / 2), "after a reset");
        // The sender has given it up before it was accepted.
        let (near, far) = flow();
        drop(far);
        receiver.join(4, Stream::plain(near), |_, _, _| Ok(())).unwrap();
        no_flow_is_left();
        assert!(!fails_after(RESET_TIMEOUT), "after a flow that carried nothing");
        let ((near, mut far), (other_near, other)) = (flow(), flow());
        receiver.join(5, Stream::plain(near), |_, _, _| Ok(())).unwrap();
        receiver.join(6, Stream::plain(other_near), |_, _, _| Ok(())).unwrap();
        reset(other);
        test_support::until(|| (receiver.flows().len() == 1).then_some(()));
        let part = |offset, length: u32| {
            let header = ChunkHeader { message: 0, offset, length, total: 2000, ack_wanted: true };
            [&Frame::Chunk(header).encode()[..], &vec![1; length as usize]].concat()
        };
        // It was there before another one was reset.
        far.write_all(&part(0, 1024)).unwrap();
        far.shutdown(Shutdown::Write).unwrap();
        no_flow_is_left();
        assert!(!fails_after(RESET_TIMEOUT / 2), "after a chunk on an older flow");
        let (near, mut far) = flow();
        receiver.join(7, Stream::plain(near), |_, _, _| Ok(())).unwrap();
        far.write_all(&part(1024, 976)).unwrap();
        assert_eq!(test_support::until(|| request.test().unwrap()), 2000);
        let _next = post(&receiver, 2000);
        // The sender got through, and may still take flows for alive that were reset here.
        far.shutdown(Shutdown::Write).unwrap();
        no_flow_is_left();
        assert!(!fails_after(RESET_TIMEOUT / 2), "soon after a reset");
        let (near, mut far) = flow();
        receiver.join(8, Stream::plain(near), |_, _, _| Ok(())).unwrap();
        lock(&receiver.queue).last_trouble = Instant::now().checked_sub(RESET_TIMEOUT);
        far.write_all(&part_of(1, 2000, 0, 1024)).unwrap();
        test_support::until(|| {
            (lock(&receiver.queue).replacement_timeout == CLOSED_TIMEOUT).then_some(())
        });
        // Now its process is gone.
        far.shutdown(Shutdown::Write).unwrap();
        no_flow_is_left();
        assert!(fails_after(2 * CLOSED_TIMEOUT), "after a flow that was closed");
        receiver.close();
    }

    /// A receiver with one flow, and the flow's other end.
    fn receiver(transport: &Transport) -> (Arc<TcpReceiver>, TcpStream) {
        let context = transport.context(0, "").unwrap();
        let peer = "127.0.0.1:1".parse().unwrap();
        let (near, far) = flow();
        let runtime = transport.runtime().unwrap();
        (
            TcpReceiver::open(context, runtime.workers(), peer, vec![Stream::plain(near)]).unwrap(),
            far,
        )
    }

    /// Posts a buffer of this length.
    fn post(receiver: &Arc<TcpReceiver>, length: usize) -> Request {
        let memory = Box::leak(vec![0; length].into_boxed_slice());
        TcpReceiver::recv(receiver, RecvBuffer::from_static(memory)).unwrap().unwrap()
    }

    /// Whether a receiver fails that has no flow left, and gets none for this time.
    fn fails_after(receiver: &Arc<TcpReceiver>, time: Duration) -> bool {
        test_support::until(|| receiver.flows().is_empty().then_some(()));
        // The time counts from the first check.
        receiver.check_unrecoverable(Instant::now());
        receiver.check_unrecoverable(Instant::now() + time);
        receiver.base.failed()
    }

    /// Part of a message of this length, from this offset, as the sender writes it.
    fn part_of(message: u64, total: u64, offset: u64, length: u32) -> Vec<u8> {
        let header = ChunkHeader { message, offset, length, total, ack_wanted: true };
        [&Frame::Chunk(header).encode()[..], &vec![1; length as usize]].concat()
    }

    /// The sender may not have got the answers of all flows, and tries to open the connection.
    #[test]
    fn reset_receiver_waits_as_long_as_its_sender_tries_to_open_the_connection() {
        let transport = test_support::transport();
        let _runtime = transport.runtime().unwrap();
        let Settings { connect_timeout, recovery_timeout, .. } = *transport.settings;
        let longest = connect_timeout.max(recovery_timeout);
        assert!(longest > RESET_TIMEOUT);
        let (silent, far) = receiver(&transport);
        let _request = post(&silent, 2000);
        reset(far);
        assert!(!fails_after(&silent, longest / 2) && fails_after(&silent, longest));
        // It has given up by now if it has not opened the connection.
        let (old, far) = receiver(&transport);
        let _request = post(&old, 2000);
        let opened = Instant::now().checked_sub(connect_timeout).expect("an uptime");
        lock(&old.queue).opened = opened;
        reset(far);
        assert!(!fails_after(&old, RESET_TIMEOUT / 2) && fails_after(&old, RESET_TIMEOUT));
        // The sender's process has ended.
        let (closed, far) = receiver(&transport);
        let _request = post(&closed, 2000);
        drop(far);
        assert!(fails_after(&closed, 2 * CLOSED_TIMEOUT));
        // It has opened the connection.
        let (spoken, mut far) = receiver(&transport);
        let request = post(&spoken, 1);
        far.write_all(&part_of(0, 1, 0, 1)).unwrap();
        test_support::until(|| request.test().unwrap());
        let _request = post(&spoken, 2000);
        reset(far);
        assert!(!fails_after(&spoken, RESET_TIMEOUT / 2) && fails_after(&spoken, RESET_TIMEOUT));
    }

    /// A sender that has closed the connection still delivers, on other flows if it loses some.
    #[test]
    fn receiver_waits_for_what_a_closing_sender_delivers() {
        let transport = test_support::transport();
        let _runtime = transport.runtime().unwrap();
        let (receiver, mut far) = receiver(&transport);
        let (first, _next) = (post(&receiver, 2000), post(&receiver, 8));
        far.write_all(&Frame::Close(1).encode()).unwrap();
        test_support::until(|| lock(&receiver.queue).closes_at);
        reset(far);
        assert!(!fails_after(&receiver, RESET_TIMEOUT / 2), "before its message is delivered");
        let (near, mut far) = flow();
        receiver.join(4, Stream::plain(near), |_, _, _| Ok(())).unwrap();
        far.write_all(&part_of(0, 2000, 0, 2000)).unwrap();
        assert_eq!(test_support::until(|| first.test().unwrap()), 2000);
        reset(far);
        assert!(fails_after(&receiver, Duration::ZERO), "when nothing follows");
        let error = receiver.base.failure().unwrap().to_string();
        assert!(error.contains("the peer closed the connection"), "{error}");
    }

    /// What the only flow brings has no buffer yet, and what is due does not come.
    #[test]
    fn receiver_whose_flows_wait_for_later_buffers_names_the_message_that_is_due() {
        let transport = test_support::transport();
        let _runtime = transport.runtime().unwrap();
        let (receiver, mut far) = receiver(&transport);
        let _request = post(&receiver, 2000);
        far.write_all(&part_of(1, 8, 0, 8)).unwrap();
        test_support::until(|| (!lock(&receiver.queue).is_open()).then_some(()));
        let timeout = transport.settings.recovery_timeout;
        receiver.check_unrecoverable(Instant::now());
        receiver.check_unrecoverable(Instant::now() + timeout / 2);
        assert!(!receiver.base.failed());
        receiver.check_unrecoverable(Instant::now() + timeout);
        let error = receiver.base.failure().unwrap().to_string();
        assert!(error.contains("none delivered message 0 within"), "{error}");
    }

    /// The reset of a flow that waits for a buffer is not noticed here, and the sender reports it.
    #[test]
    fn receiver_waits_for_a_sender_that_has_reported_a_dead_flow() {
        let transport = test_support::transport();
        let _runtime = transport.runtime().unwrap();
        let (receiver, mut far) = receiver(&transport);
        let request = post(&receiver, 1);
        far.write_all(&part_of(0, 1, 0, 1)).unwrap();
        test_support::until(|| request.test().unwrap());
        let (near, mut second) = flow();
        receiver.join(4, Stream::plain(near), |_, _, _| Ok(())).unwrap();
        second.write_all(&Frame::FlowDead(0).encode()).unwrap();
        test_support::until(|| (receiver.flows().len() == 1).then_some(()));
        let _request = post(&receiver, 2000);
        // The sender has given it up, and dials again.
        second.shutdown(Shutdown::Write).unwrap();
        assert!(!fails_after(&receiver, RESET_TIMEOUT / 2), "soon after the report");
        assert!(fails_after(&receiver, RESET_TIMEOUT));
    }

    /// No acknowledgement gets through, and the kernel probes no flow with unacknowledged bytes. The report of the first flow
    /// that ends is such bytes on the other one.
    #[test]
    fn outage_after_an_acknowledgement_ends_all_flows() {
        let settings = Settings::from_lookup(|name: &str| match name {
            "NCCL_SOCKET_IFNAME" => Some("lo".to_owned()),
            "EVENKEEL_PEER_TIMEOUT" => Some("1".to_owned()),
            _ => None,
        });
        let transport = Transport::new(settings.unwrap(), Arc::new(NullLog)).unwrap();
        let _runtime = transport.runtime().unwrap();
        let (receiver, mut far) = receiver(&transport);
        let (near, other) = flow();
        receiver.join(4, Stream::plain(near), |_, _, _| Ok(())).unwrap();
        let (first, _next) = (post(&receiver, 1), post(&receiver, 2000));
        let drop_all = [SockFilter::new((libc::BPF_RET | libc::BPF_K) as u16, 0, 0, 0)];
        for silent in [&far, &other] {
            SockRef::from(silent).attach_filter(&drop_all).unwrap();
        }
        far.write_all(&part_of(0, 1, 0, 1)).unwrap();
        test_support::until(|| first.test().unwrap());
        test_support::until(|| receiver.flows().is_empty().then_some(()));
        assert_eq!(receiver.base.counters.lost.get(), 2);
        let cause = lock(&receiver.queue).cause.clone();
        assert!(cause.contains("timed out"), "{cause}");
        receiver.close();
    }

    /// The kernel reports the reset to whoever uses the flow first: here to an acknowledgement, as when flows report each other.
    #[test]
    fn reset_that_a_write_notices_is_no_orderly_end() {
        let transport = test_support::transport();
        let runtime = transport.runtime().unwrap();
        let context = transport.context(0, "").unwrap();
        let peer = "127.0.0.1:1".parse().unwrap();
        let (near, far) = flow();
        let receiver =
            TcpReceiver::open(context, runtime.workers(), peer, vec![Stream::plain(near)]).unwrap();
        let flow = receiver.flows().remove(0);
        let reading = flow.reading.lock();
        reset(far);
        let hang_up = &mut [PollFd::new(&flow.socket, PollFlags::empty())];
        assert_eq!(poll(hang_up, None), Ok(1));
        flow.reply(|replies| replies.ack = Some(0));
        drop(reading);
        flow.read(1);
        test_support::until(|| receiver.flows().is_empty().then_some(()));
        assert_eq!(receiver.base.counters.lost.get(), 1);
        assert!(lock(&receiver.queue).replacement_timeout > CLOSED_TIMEOUT);
        receiver.close();
    }

    /// Posts a buffer of this length and with this tag.
    fn post_tagged(receiver: &Arc<TcpReceiver>, length: usize, tag: i32) -> Request {
        let buffer = RecvBuffer::from_static(Box::leak(vec![0; length].into_boxed_slice()));
        let group = [TaggedBuffer { buffer, tag, registration: None }];
        TcpReceiver::recv_group(receiver, &group).unwrap().unwrap()
    }

    /// The copy may be long. Meanwhile others use the connection, and when it fails the message is not lost.
    #[test]
    fn unexpected_message_is_copied_without_the_lock_of_its_connection() {
        let transport = test_support::transport();
        let _runtime = transport.runtime().unwrap();
        let (receiver, mut far) = receiver(&transport);
        let _another_tag = post_tagged(&receiver, 8, 5);
        far.write_all(&part_of(0, 1000, 0, 1000)).unwrap();
        test_support::until(|| lock(&receiver.queue).reassembly.has_all_below(1).then_some(()));
        let delivering = receiver.delivering.lock();
        let request = post_tagged(&receiver, 1000, 0);
        assert_eq!(request.peek().unwrap(), None, "another thread copies");
        let requests = |queue: &RecvQueue| (queue.requests(), queue.undelivered);
        assert_eq!(requests(&lock(&receiver.queue)), (2, 1));
        receiver.fail(ErrorKind::Remote, "the test ends it");
        drop(delivering);
        assert_eq!(request.peek().unwrap(), Some(1000));
        assert_eq!(requests(&lock(&receiver.queue)), (1, 0));
        receiver.close();
    }

    /// The sender's next message has no memory, and waits with its flow until the one before has a buffer.
    #[test]
    fn unexpected_messages_beyond_the_limit_wait() {
        const LONG: usize = MAX_UNEXPECTED_BYTES as usize;
        const PART: usize = 1 << 20;
        let transport = test_support::transport();
        let runtime = transport.runtime().unwrap();
        let context = transport.context(0, "").unwrap();
        let peer = "127.0.0.1:1".parse().unwrap();
        let ((near, mut far), (other_near, mut other)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let streams = [near, other_near].map(|socket| Stream::plain(socket.into())).into();
        let receiver = TcpReceiver::open(context, runtime.workers(), peer, streams).unwrap();
        let post = |length, tag| post_tagged(&receiver, length, tag);
        let _another_tag = post(8, 5);
        let header = |message, offset: usize, length: usize, total: usize| {
            let (offset, length, total) = (offset as u64, length as u32, total as u64);
            Frame::Chunk(ChunkHeader { message, offset, length, total, ack_wanted: true }).encode()
        };
        far.write_all(&header(0, 0, PART, LONG)).unwrap();
        test_support::until(|| lock(&receiver.queue).tags.asked_from());
        other.write_all(&Frame::SameTagBelow(2).encode()).unwrap();
        other.write_all(&header(1, 0, 1000, 1000)).unwrap();
        other.write_all(&[2; 1000]).unwrap();
        // It is retried from time to time, and waits again.
        test_support::until(|| lock(&receiver.queue).is_starved.then_some(()));
        assert_eq!(lock(&receiver.queue).reassembly.next(), 1, "messages with memory");
        let (first, second) = (post(LONG, 0), post(1000, 0));
        for at in (0..LONG).step_by(PART) {
            if at > 0 {
                far.write_all(&header(0, at, PART, LONG)).unwrap();
            }
            far.write_all(&vec![1; PART]).unwrap();
        }
        assert_eq!(test_support::until(|| first.test().unwrap()), LONG as u64);
        assert_eq!(test_support::until(|| second.test().unwrap()), 1000);
        receiver.close();
    }
}
