//! The receiving side of a connection.

use std::any::Any;
use std::collections::VecDeque;
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use evenkeel_protocol::{
    ChunkAction, ChunkHeader, FRAME_BYTES, Frame, FrameError, MAX_MESSAGE_BYTES, Reassembly,
    ReassemblyError,
};
use socket2::Socket;

use crate::Context;
use crate::connection::base::{Base, Direction, InFlight, Medium, TURN_BYTES, not_now};
use crate::connection::recv::{Inbound, Tagged};
use crate::connection::request::{MAX_REQUESTS, Operation, Owner, Request, Target};
use crate::connection::tag_matching::{Order, Step, TooLong};
use crate::error::{Error, ErrorKind};
use crate::memory::buffers::{RecvBuffer, SendBuffer};
use crate::runtime::caller_polling::{Attendance, Focus};
use crate::runtime::reactor::{Readiness, Registration, Source, Workers};
use crate::runtime::work_lock::Turn;
use crate::sync::lock;
use crate::sys;
use crate::tcp::PLACES;
use crate::tcp::chunk_checksum::Check;
use crate::telemetry::counters::FlowCounters;
use crate::telemetry::metrics::{FlowObservation, Observed};

/// How long a receiver whose flows have all ended waits for another one. A sender that lives opens
/// one as soon as it hears of the loss.
const REPLACEMENT: Duration = Duration::from_millis(500);

/// Most bytes that a caller who asks for small messages reads at a time.
const CALLER_BYTES: u64 = 64 << 10;

impl Inbound for Receiver {
    fn base(&self) -> &Base {
        &self.base
    }

    fn recv(self: Arc<Self>, buffer: RecvBuffer) -> Result<Option<Request>, Error> {
        Self::recv(&self, buffer)
    }

    fn recv_group(self: Arc<Self>, group: &[Tagged]) -> Result<Option<Request>, Error> {
        Self::recv_group(&self, group)
    }

    fn flows(&self) -> usize {
        Self::flows(self).len()
    }

    fn close(&self) {
        Self::close(self);
    }

    #[cfg(test)]
    fn break_lane(&self, lane: usize) {
        unreachable!("TCP has no lane {lane}");
    }
}

/// Locks are taken in this order: a flow's `reading`, then `queue`; a flow's `answering` last.
pub(crate) struct Receiver {
    base: Base,
    workers: Arc<Workers>,
    queue: Mutex<Queue>,
    /// For deadlines of the connection, not of a flow.
    clock: Registration,
    /// The place that brought the last bytes, where a caller with time looks first.
    warm: AtomicUsize,
    focus: Focus,
}

struct Queue {
    reassembly: Reassembly<Posted>,
    order: Order,
    /// By place.
    flows: Vec<Option<Entry>>,
    /// Since when nothing can come for the buffers that are posted, and why.
    stuck: Option<Instant>,
    /// Why the last flow ended.
    cause: String,
    /// The peer sends no more messages.
    bye: bool,
    /// No flow may be added any more.
    closed: bool,
}

struct Entry {
    flow: Arc<RecvFlow>,
    /// The message whose buffer the flow waits for: it brings nothing before that is posted.
    waits_for: Option<u64>,
    /// The peer has ended it; what it still holds can be read.
    ended: bool,
}

#[derive(Clone)]
struct Posted {
    buffer: RecvBuffer,
    tag: i32,
    /// Whose buffer it is; nobody's for a message that goes aside.
    target: Option<Target>,
}

/// What is to be done without a lock after buffers with tags were looked after.
#[derive(Default)]
struct Aftermath {
    /// Flows that have something to say.
    speakers: Vec<Arc<RecvFlow>>,
    /// Flows that wait for a buffer and need not any more.
    woken: Vec<Arc<RecvFlow>>,
    /// Whether a request may be done.
    is_news: bool,
}

/// One TCP connection of a connection.
struct RecvFlow {
    receiver: Arc<Receiver>,
    number: u32,
    place: usize,
    socket: Socket,
    registration: Registration,
    counters: FlowCounters,
    /// Held while the socket is read.
    reading: Turn<Reading>,
    /// Held while the socket is written to.
    answering: Mutex<Answering>,
}

struct Reading {
    /// Nothing may be read any more.
    closed: bool,
    stage: Stage,
    header: [u8; FRAME_BYTES],
    /// Where peers have agreed on checksums.
    check: Option<Check>,
    attendance: Attendance,
}

#[derive(Clone, Copy)]
enum Stage {
    /// `have` bytes of the next frame are read.
    Header { have: usize },
    /// The peer says that a flow is dead.
    Dead { number: u32 },
    /// The bytes of a chunk from `at` on come next; its message may or may not have a buffer.
    Claim { chunk: ChunkHeader, at: u64 },
    /// The bytes from `start` up to `end` belong into the buffer; those before `at` are there.
    Deliver { chunk: ChunkHeader, buffer: RecvBuffer, start: u64, at: u64, end: u64 },
    /// The bytes up to `end` came before.
    Discard { chunk: ChunkHeader, at: u64, end: u64 },
    /// The chunk was not what was sent.
    Corrupt,
}

impl Stage {
    /// Whether there is nothing to be done before more bytes come.
    fn wants_bytes(&self) -> bool {
        match self {
            Self::Header { have } => *have < FRAME_BYTES,
            Self::Deliver { .. } | Self::Discard { .. } => true,
            Self::Dead { .. } | Self::Claim { .. } | Self::Corrupt => false,
        }
    }
}

/// What is to be said on a flow.
#[derive(Default)]
struct Answering {
    closed: bool,
    /// Frames, and how much of them is written.
    bytes: Vec<u8>,
    written: usize,
    ack: Option<u64>,
    dead: VecDeque<u32>,
    /// From which buffer on tags differ.
    mixed: Option<u64>,
    /// Buffers by number, and their tags.
    slots: VecDeque<(u64, i32)>,
}

impl Answering {
    /// The next frame to write. An acknowledgement is the last: who hears it has heard the others.
    fn next(&mut self) -> Option<Frame> {
        let dead = self.dead.pop_front().map(Frame::FlowDead);
        dead.or_else(|| self.mixed.take().map(Frame::TagsDifferFrom))
            .or_else(|| self.slots.pop_front().map(|(number, tag)| Frame::BufferTag(number, tag)))
            .or_else(|| self.ack.take().map(Frame::Ack))
    }

    /// Whether all that was begun is written.
    fn is_between(&self) -> bool {
        self.written == self.bytes.len()
    }
}

impl Receiver {
    /// Makes a connection of flows that have been welcomed.
    pub(crate) fn open(
        context: Context,
        workers: &Arc<Workers>,
        peer: SocketAddr,
        sockets: Vec<Socket>,
    ) -> io::Result<Arc<Self>> {
        let receiver = Arc::new(Self {
            base: Base::new(context, Direction::Recv, Medium::Tcp, peer),
            workers: Arc::clone(workers),
            queue: Mutex::new(Queue {
                reassembly: Reassembly::default(),
                order: Order::default(),
                flows: Vec::new(),
                stuck: None,
                cause: String::new(),
                bye: false,
                closed: false,
            }),
            clock: workers.registration(),
            warm: AtomicUsize::new(0),
            focus: Focus::new(),
        });
        receiver.clock.watch_time(Arc::new(Clock(Arc::clone(&receiver))));
        let observed: Weak<Self> = Arc::downgrade(&receiver);
        receiver.base.context.metrics.watch(observed);
        for (number, socket) in sockets.into_iter().enumerate() {
            if let Err(error) = receiver.adopt(number as u32, socket) {
                receiver.close();
                return Err(error);
            }
        }
        Ok(receiver)
    }

    /// Whether another flow can be taken in.
    pub(crate) fn is_open(&self) -> bool {
        !self.base.failed() && !lock(&self.queue).closed
    }

    /// Takes in a flow that has been welcomed.
    ///
    /// # Errors
    /// When the connection is over, has the flow already or cannot watch it.
    pub(crate) fn adopt(self: &Arc<Self>, number: u32, socket: Socket) -> io::Result<()> {
        let flow = self.enter(number, socket)?;
        self.tell_again(Some(&flow));
        flow.registration.watch(&flow.socket, Arc::<RecvFlow>::clone(&flow))?;
        if lock(&self.queue).closed {
            // What ends the watch may have come before it began.
            flow.registration.end(&flow.socket);
        }
        Ok(())
    }

    /// Gives a flow a place.
    fn enter(self: &Arc<Self>, number: u32, socket: Socket) -> io::Result<Arc<RecvFlow>> {
        let mut queue = lock(&self.queue);
        if queue.closed || self.base.failed() {
            return Err(io::Error::other("the connection is over"));
        }
        if queue.flows.iter().flatten().any(|entry| entry.flow.number == number) {
            return Err(io::Error::other("the flow is there already"));
        }
        let place = queue.flows.iter().position(Option::is_none).unwrap_or(queue.flows.len());
        // Twice as many as a sender has: this side may not know yet of some that are dead.
        if place >= 2 * PLACES {
            return Err(io::Error::other("too many flows"));
        }
        let flow = Arc::new(RecvFlow {
            receiver: Arc::clone(self),
            number,
            place,
            socket,
            registration: self.workers.registration(),
            counters: FlowCounters::default(),
            reading: Turn::new(Reading {
                closed: false,
                stage: Stage::Header { have: 0 },
                header: [0; FRAME_BYTES],
                check: self.base.context.settings.checksum.then(Check::default),
                attendance: Attendance::new(place),
            }),
            answering: Mutex::default(),
        });
        if place == queue.flows.len() {
            queue.flows.push(None);
        }
        let entry = Entry { flow: Arc::clone(&flow), waits_for: None, ended: false };
        queue.flows[place] = Some(entry);
        if queue.stuck.take().is_some() {
            self.base.counters.recovered.add(1);
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
        if guard.outstanding() >= MAX_REQUESTS {
            return Ok(None);
        }
        this.post(guard, Target::new(buffer, &operation, 0), 0);
        Ok(Some(Request::new(operation, Arc::clone(this) as Arc<dyn Owner>)))
    }

    fn recv_group(this: &Arc<Self>, group: &[Tagged]) -> Result<Option<Request>, Error> {
        if let Some(error) = this.failure() {
            return Err(error);
        }
        let operation = Operation::of_group(group.len());
        let mut guard = lock(&this.queue);
        if guard.outstanding() + group.len() > MAX_REQUESTS {
            return Ok(None);
        }
        match group {
            [Tagged { buffer, tag }] if guard.order.is_plain(*tag) => {
                this.post(guard, Target::new(*buffer, &operation, 0), *tag);
            }
            _ => {
                for (index, Tagged { buffer, tag }) in group.iter().enumerate() {
                    guard.order.hold(*tag, Target::new(*buffer, &operation, index));
                }
                drop(guard);
                this.look_after_tags(|_| true);
                this.judge(Instant::now());
            }
        }
        Ok(Some(Request::new(operation, Arc::clone(this) as Arc<dyn Owner>)))
    }

    /// Posts a buffer for the next message, and reads what waits for it.
    fn post<'a>(&'a self, mut guard: MutexGuard<'a, Queue>, target: Target, tag: i32) {
        let message = guard.post(target, tag);
        let most = self.base.context.settings.caller_bytes;
        while let Some(flow) = guard.take_waiting(message) {
            drop(guard);
            flow.read(most);
            guard = lock(&self.queue);
        }
        let open = guard.is_open();
        drop(guard);
        if !open {
            self.judge(Instant::now());
        }
    }

    /// Changes the order of messages with tags, and does what comes of it. `change` says whether it can be.
    fn look_after_tags(&self, change: impl FnOnce(&mut Order) -> bool) {
        let mut aftermath = Aftermath::default();
        let outcome = {
            let mut queue = lock(&self.queue);
            if change(&mut queue.order) {
                self.order(&mut queue, &mut aftermath).map_err(|too_long| {
                    (ErrorKind::Truncated, ReassemblyError::from(too_long).to_string())
                })
            } else {
                let what = "protocol error: the peer says how far it has gone on unasked";
                Err((ErrorKind::Remote, what.to_owned()))
            }
        };
        self.finish(aftermath);
        if let Err((kind, what)) = outcome {
            self.fail(kind, &what);
        }
    }

    /// Posts the buffers with tags whose turn it is.
    fn order(&self, queue: &mut Queue, aftermath: &mut Aftermath) -> Result<(), TooLong> {
        while let Some(step) = queue.order.step(queue.reassembly.next())? {
            match step {
                Step::Post(tag, target, is_told) => {
                    let number = queue.post(target, tag);
                    if is_told && let Some(flow) = self.speaker(queue, None) {
                        lock(&flow.answering).slots.push_back((number, tag));
                        aftermath.speakers.push(flow);
                        aftermath.speakers.dedup_by(|a, b| Arc::ptr_eq(a, b));
                    }
                }
                Step::Ask => {
                    let flows = queue.flows.iter().flatten();
                    for flow in flows.map(|entry| Arc::clone(&entry.flow)) {
                        lock(&flow.answering).mixed = queue.order.asks();
                        aftermath.speakers.push(flow);
                    }
                }
                Step::Filled => aftermath.is_news = true,
            }
        }
        let (next, order) = (queue.reassembly.next(), &queue.order);
        for entry in queue.flows.iter_mut().flatten() {
            let has_place = |message| message < next || message == next && order.takes_aside(next);
            if entry.waits_for.is_some_and(has_place) {
                entry.waits_for = None;
                aftermath.woken.push(Arc::clone(&entry.flow));
            }
        }
        Ok(())
    }

    fn finish(&self, aftermath: Aftermath) {
        aftermath.speakers.iter().for_each(|flow| flow.answer(|_| {}));
        aftermath.woken.iter().for_each(|flow| flow.registration.kick(&flow.socket));
        if aftermath.is_news {
            self.base.notify();
        }
    }

    /// A flow by which the peer can be told something: that which brought the last bytes, if it is there.
    fn speaker(&self, queue: &Queue, besides: Option<&RecvFlow>) -> Option<Arc<RecvFlow>> {
        let fits = |entry: &&Entry| {
            !entry.ended && besides.is_none_or(|other| other.number != entry.flow.number)
        };
        let warm = queue.flows.get(self.warm.load(Ordering::Relaxed)).and_then(Option::as_ref);
        let entry = warm.filter(fits).or_else(|| queue.flows.iter().flatten().find(fits));
        entry.map(|entry| Arc::clone(&entry.flow))
    }

    /// Says again of tags what may have been lost with a flow, on this flow or another one that is there.
    fn tell_again(&self, on: Option<&Arc<RecvFlow>>) {
        let flow = {
            let queue = lock(&self.queue);
            if queue.order.asks().is_none() && !queue.order.is_mixed() {
                return;
            }
            let Some(flow) = on.cloned().or_else(|| self.speaker(&queue, None)) else { return };
            let mut answering = lock(&flow.answering);
            answering.mixed = queue.order.asks();
            if queue.order.is_mixed() {
                let posted =
                    queue.reassembly.posted().filter(|(_, posted)| posted.target.is_some());
                answering.slots = posted.map(|(number, posted)| (number, posted.tag)).collect();
            }
            drop(answering);
            flow
        };
        flow.answer(|_| {});
    }

    /// A flow has ended: what it was bringing can come on another.
    fn end(self: &Arc<Self>, flow: &RecvFlow, why: Option<&str>) {
        if !flow.come_to_rest() {
            return;
        }
        flow.close();
        let others: Vec<Arc<RecvFlow>> = {
            let mut queue = lock(&self.queue);
            // Not there when the connection was closed in between.
            if let Some(place) = queue.flows.get_mut(flow.place) {
                *place = None;
            }
            match why {
                None => Vec::new(),
                Some(why) => {
                    why.clone_into(&mut queue.cause);
                    queue.flows.iter().flatten().map(|entry| Arc::clone(&entry.flow)).collect()
                }
            }
        };
        if why.is_some() {
            self.base.counters.lost.add(1);
        }
        // The sender may not notice by itself, if it has nothing to write. One is enough; which
        // ones still work is not known here.
        for other in others {
            other.answer(|answering| answering.dead.push_back(flow.number));
        }
        self.tell_again(None);
        self.judge(Instant::now());
    }

    /// The peer says that a flow is dead, and will send again what it had not delivered.
    fn told_dead(self: &Arc<Self>, number: u32) {
        let flow = self.flows().into_iter().find(|flow| flow.number == number);
        if let Some(flow) = flow
            && flow.come_to_rest()
        {
            flow.close();
            self.base.counters.lost.add(1);
            if let Some(place) = lock(&self.queue).flows.get_mut(flow.place) {
                *place = None;
            }
            self.tell_again(None);
        }
    }

    /// Fails the connection when what is posted can never be filled.
    fn judge(&self, now: Instant) {
        let (what, kind) = {
            let mut queue = lock(&self.queue);
            let queue = &mut *queue;
            if queue.is_open() {
                queue.stuck = None;
                return;
            }
            let waiting = queue.flows.iter().flatten().any(|entry| !entry.ended);
            let outstanding = queue.outstanding() > 0;
            if waiting && !outstanding {
                return;
            }
            let since = *queue.stuck.get_or_insert(now);
            let patience = match (waiting, queue.bye) {
                (true, _) => self.base.context.settings.recovery_timeout,
                (false, true) => Duration::ZERO,
                (false, false) => REPLACEMENT,
            };
            if !outstanding || now.saturating_duration_since(since) < patience {
                return;
            }
            if queue.bye || queue.cause.is_empty() {
                ("the peer closed the connection".to_owned(), ErrorKind::Remote)
            } else {
                (format!("all flows are lost ({})", queue.cause), ErrorKind::Remote)
            }
        };
        self.fail(kind, &what);
    }

    /// Acknowledges what nothing has followed.
    fn acknowledge_late(&self) {
        let warm = self.warm.load(Ordering::Relaxed);
        let (below, flow) = {
            let mut queue = lock(&self.queue);
            let Some(below) = queue.reassembly.ack_if_idle() else { return };
            let at = queue.flows.get(warm).and_then(Option::as_ref);
            let entry = at.or_else(|| queue.flows.iter().flatten().next());
            (below, entry.map(|entry| Arc::clone(&entry.flow)))
        };
        if let Some(flow) = flow {
            flow.answer(|answering| answering.ack = Some(below));
        }
    }

    fn fail(&self, kind: ErrorKind, what: &str) {
        if self.base.fail(kind, what, &self.in_flight()) {
            // The peer must hear of it now, not when this side closes.
            let below = lock(&self.queue).reassembly.ack();
            self.flows().iter().for_each(|flow| flow.say_bye(below));
        }
    }

    fn in_flight(&self) -> InFlight {
        let queue = lock(&self.queue);
        InFlight { requests: queue.outstanding(), bytes: queue.reassembly.missing_bytes() }
    }

    /// Returns when no buffer is being written and none will be again. Waits at most for system
    /// calls that do not block.
    fn come_to_rest(&self) {
        for flow in self.flows() {
            flow.come_to_rest();
        }
    }

    /// Ends everything.
    fn close(&self) {
        // First, so that all flows there will ever be come to rest. Whoever closes waits for that, the second one too.
        let closed = std::mem::replace(&mut lock(&self.queue).closed, true);
        self.come_to_rest();
        if closed {
            return;
        }
        let (flows, below) = {
            let mut queue = lock(&self.queue);
            (std::mem::take(&mut queue.flows), queue.reassembly.ack())
        };
        for entry in flows.iter().flatten() {
            entry.flow.say_bye(below);
            entry.flow.close();
        }
        self.clock.end_time();
        self.base.last_words();
    }
}

impl Queue {
    /// Buffers that wait for their messages.
    fn outstanding(&self) -> usize {
        self.reassembly.outstanding() + self.order.waiting()
    }

    /// Posts a buffer for the next message; its number.
    fn post(&mut self, target: Target, tag: i32) -> u64 {
        let capacity = (target.buffer.length() as u64).min(MAX_MESSAGE_BYTES);
        let buffer = target.buffer;
        self.reassembly.post(capacity, Posted { buffer, tag, target: Some(target) })
    }

    /// Posts memory for this message, which goes aside, if it is the next one.
    fn set_aside(&mut self, chunk: &ChunkHeader) {
        let message = chunk.message;
        if self.order.takes_aside(message) && message == self.reassembly.next() {
            let buffer = self.order.set_aside(message, chunk.total as usize);
            self.reassembly.post(chunk.total, Posted { buffer, tag: 0, target: None });
        }
    }

    /// The flow in this place waits for this message's buffer.
    fn wait(&mut self, place: usize, message: u64) {
        if let Some(entry) = self.flows.get_mut(place).and_then(Option::as_mut) {
            entry.waits_for = Some(message);
        }
    }

    /// Whether any flow can bring something for the buffers that are posted.
    fn is_open(&self) -> bool {
        self.flows.iter().flatten().any(|entry| entry.waits_for.is_none())
    }

    /// A flow that waits for this message's buffer. It does not wait any more.
    fn take_waiting(&mut self, message: u64) -> Option<Arc<RecvFlow>> {
        let entry =
            self.flows.iter_mut().flatten().find(|entry| entry.waits_for == Some(message))?;
        entry.waits_for = None;
        Some(Arc::clone(&entry.flow))
    }
}

impl Observed for Receiver {
    fn base(&self) -> &Base {
        &self.base
    }

    fn in_flight(&self) -> InFlight {
        Self::in_flight(self)
    }

    fn flows(&self) -> Vec<FlowObservation> {
        let observe = |flow: &Arc<RecvFlow>| FlowObservation {
            number: flow.number,
            bytes: flow.counters.bytes(),
            path: sys::path_figures(&flow.socket).unwrap_or_default(),
        };
        Self::flows(self).iter().map(observe).collect()
    }
}

impl Owner for Receiver {
    fn keep(&self, lent: Box<dyn Any + Send + Sync>) {
        self.base.keep(lent);
    }

    fn failure(&self) -> Option<Error> {
        let error = self.base.failure()?;
        self.come_to_rest();
        Some(error)
    }

    fn progress(&self) {
        let place = self.focus.place();
        self.visit(place.unwrap_or_else(|| self.warm.load(Ordering::Relaxed)));
    }
}

impl Receiver {
    /// A caller reads what has come on the flow in this place.
    fn visit(&self, place: usize) {
        let flow = {
            let queue = lock(&self.queue);
            queue.flows.get(place).and_then(Option::as_ref).map(|entry| Arc::clone(&entry.flow))
        };
        let Some(flow) = flow else { return };
        let most = self.base.context.settings.caller_bytes;
        flow.reading.take_if_free(|mut reading, _| {
            if !reading.closed {
                reading.attendance.visit(&self.focus, &flow.registration, &flow.socket);
            }
            let attends = reading.attendance.is_callers();
            flow.read_with(reading, if attends { CALLER_BYTES.max(most) } else { most });
        });
    }
}

impl RecvFlow {
    fn read(&self, limit: u64) {
        self.reading.take(|reading| self.read_with(reading, limit));
    }

    /// Reads until the socket has no more, the next chunk has no buffer, or more than `limit` bytes
    /// are read and all of them are dealt with; in the last case the worker goes on.
    fn read_with<'a>(&'a self, mut guard: MutexGuard<'a, Reading>, limit: u64) {
        let receiver = &self.receiver;
        guard.attendance.renew(&self.registration);
        let mut moved = 0;
        let ended = loop {
            let reading = &mut *guard;
            if reading.closed || receiver.base.failed() {
                return;
            }
            // What is read already is nothing that the worker would hear of.
            if moved > limit && reading.stage.wants_bytes() {
                // A caller who attends comes again.
                if !reading.attendance.is_callers() {
                    self.registration.kick(&self.socket);
                }
                return;
            }
            let result = match reading.stage {
                Stage::Header { have: FRAME_BYTES } => {
                    match receiver.base.decode(&reading.header) {
                        Ok((Frame::Chunk(chunk), sum)) => {
                            if let Some(check) = &mut reading.check {
                                check.begin(chunk.message, sum);
                            }
                            reading.stage = Stage::Claim { chunk, at: chunk.offset };
                            receiver.focus.chunk(self.place);
                            continue;
                        }
                        Ok((Frame::FlowDead(number), _)) => {
                            reading.stage = Stage::Dead { number };
                            continue;
                        }
                        Ok((Frame::Close, _)) => {
                            reading.stage = Stage::Header { have: 0 };
                            let below = {
                                let mut queue = lock(&receiver.queue);
                                queue.bye = true;
                                queue.reassembly.ack()
                            };
                            self.answer(|answering| answering.ack = Some(below));
                            continue;
                        }
                        Ok((Frame::Tag(tag), _)) => {
                            reading.stage = Stage::Header { have: 0 };
                            receiver.look_after_tags(|order| {
                                order.hear_tag(tag);
                                true
                            });
                            continue;
                        }
                        Ok((Frame::SameTagBelow(until), _)) => {
                            reading.stage = Stage::Header { have: 0 };
                            receiver.look_after_tags(|order| order.hear_plain_until(until));
                            continue;
                        }
                        Ok((
                            Frame::Ack(_) | Frame::TagsDifferFrom(_) | Frame::BufferTag(..),
                            _,
                        )) => {
                            drop(guard);
                            let what = "protocol error: the sender says what receivers say";
                            return receiver.fail(ErrorKind::Remote, what);
                        }
                        Err(error @ FrameError::Checksum) => break Some(error.to_string()),
                        Err(error) => {
                            drop(guard);
                            let what = format!("protocol error: {error}");
                            return receiver.fail(ErrorKind::Remote, &what);
                        }
                    }
                }
                Stage::Dead { number } => {
                    // That flow's lock is needed; two at a time could wait for each other.
                    drop(guard);
                    receiver.told_dead(number);
                    let below = lock(&receiver.queue).reassembly.ack();
                    self.answer(|answering| answering.ack = Some(below));
                    guard = self.reading.wait();
                    // Another thread may have been here in between.
                    if matches!(guard.stage, Stage::Dead { number: still } if still == number) {
                        guard.stage = Stage::Header { have: 0 };
                    }
                    continue;
                }
                Stage::Header { have } => {
                    let nowhere = RecvBuffer::from_static(&mut []);
                    sys::recv_with_header(&self.socket, nowhere, &mut reading.header[have..])
                }
                Stage::Claim { chunk, at } => match receiver.claim(self.place, &chunk, at) {
                    Ok(Some(stage)) => {
                        reading.stage = stage;
                        self.step_over(reading);
                        continue;
                    }
                    Ok(None) => {
                        drop(guard);
                        return receiver.judge(Instant::now());
                    }
                    Err(error) => {
                        drop(guard);
                        let kind = match error {
                            ReassemblyError::TooLong { .. } => ErrorKind::Truncated,
                            ReassemblyError::TotalChanged { .. } => ErrorKind::Remote,
                        };
                        return receiver.fail(kind, &error.to_string());
                    }
                },
                Stage::Deliver { chunk, buffer, at, end, .. } => {
                    let rest = buffer.part(at as usize, (end - at) as usize);
                    // With the chunk's end comes the next frame, often in the same call.
                    let next = if end == chunk.end() { FRAME_BYTES } else { 0 };
                    sys::recv_with_header(&self.socket, rest, &mut reading.header[..next])
                }
                Stage::Discard { at, end, .. } => match &mut reading.check {
                    None => sys::discard(&self.socket, (end - at) as usize),
                    Some(check) => self.discard_checked(check, (end - at) as usize),
                },
                Stage::Corrupt => {
                    receiver.base.counters.corrupt.add(1);
                    break Some("a chunk that does not match its checksum".to_owned());
                }
            };
            match result {
                Ok(0) => break self.end_of_stream(reading),
                Ok(received) => {
                    moved += received as u64;
                    self.take(reading, received);
                }
                Err(error) if not_now(&error) => return,
                Err(error) => break Some(error.to_string()),
            }
        };
        drop(guard);
        receiver.end(self, ended.as_deref());
    }

    /// Reads bytes that came before, since the checksum is of all.
    fn discard_checked(&self, check: &mut Check, length: usize) -> io::Result<usize> {
        let mut bytes = [0; 4096];
        let room = length.min(bytes.len());
        let nowhere = RecvBuffer::from_static(&mut []);
        let received = sys::recv_with_header(&self.socket, nowhere, &mut bytes[..room])?;
        check.discarded(&bytes[..received]);
        Ok(received)
    }

    /// Why the flow ended; `None` where the peer may end a flow that it does not need any more.
    fn end_of_stream(&self, reading: &Reading) -> Option<String> {
        let between = matches!(reading.stage, Stage::Header { have: 0 });
        (!between).then(|| "the peer closed it in the middle of a message".to_owned())
    }

    /// Counts bytes that have been read.
    fn take(&self, reading: &mut Reading, received: usize) {
        if let (Some(check), Stage::Deliver { buffer, at, end, .. }) =
            (&mut reading.check, &reading.stage)
        {
            let taken = (received as u64).min(end - at);
            check.received(buffer.part(*at as usize, taken as usize));
        }
        match &mut reading.stage {
            Stage::Header { have } => *have += received,
            Stage::Deliver { at, end, .. } | Stage::Discard { at, end, .. } => {
                let taken = (received as u64).min(*end - *at);
                *at += taken;
                if at == end {
                    let have = received - taken as usize;
                    self.step_over(reading);
                    if let Stage::Header { have: none } = &mut reading.stage {
                        *none = have;
                    }
                }
            }
            Stage::Dead { .. } | Stage::Claim { .. } | Stage::Corrupt => {}
        }
    }

    /// Goes on when the part of a chunk that was dealt with is over.
    fn step_over(&self, reading: &mut Reading) {
        let (chunk, at) = match reading.stage {
            Stage::Deliver { chunk, start, at, end, .. } if at == end => {
                match &mut reading.check {
                    None => self.receiver.arrived(self, chunk.message, end - start),
                    Some(check) => check.written(start, end),
                }
                (chunk, end)
            }
            Stage::Discard { chunk, at, end } if at == end => (chunk, end),
            _ => return,
        };
        reading.stage = if at == chunk.end() {
            if let Some(check) = &mut reading.check {
                if !check.is_right() {
                    reading.stage = Stage::Corrupt;
                    return;
                }
                let (message, parts) = check.take_parts();
                parts.iter().for_each(|(from, to)| self.receiver.arrived(self, message, to - from));
            }
            self.counters.chunk(&self.receiver.base.counters, chunk.length.into());
            Stage::Header { have: 0 }
        } else {
            Stage::Claim { chunk, at }
        };
    }

    /// Reads nothing any more, and gives back what was reserved for it. False when that was so
    /// already.
    fn come_to_rest(&self) -> bool {
        let mut reading = self.reading.wait();
        if std::mem::replace(&mut reading.closed, true) {
            return false;
        }
        reading.attendance.end(&self.receiver.focus, &self.registration, &self.socket);
        let stage = std::mem::replace(&mut reading.stage, Stage::Header { have: 0 });
        let unchecked = reading.check.as_mut().map(Check::take_parts);
        let is_checked = unchecked.is_some();
        if let Some((message, parts)) = unchecked {
            let mut queue = lock(&self.receiver.queue);
            let give_back = |(from, to)| queue.reassembly.release(message, from, to);
            parts.into_iter().for_each(give_back);
        }
        if let Stage::Deliver { chunk, start, mut at, end, .. } = stage {
            if is_checked {
                // Nobody knows whether they are right.
                at = start;
            }
            let mut queue = lock(&self.receiver.queue);
            // Not complete with this: more is missing.
            queue.reassembly.received(chunk.message, at - start);
            queue.reassembly.release(chunk.message, at, end);
        }
        true
    }

    /// Says something to the sender, now or as soon as the socket takes it.
    fn answer(&self, change: impl FnOnce(&mut Answering)) {
        let mut answering = lock(&self.answering);
        change(&mut answering);
        self.write(&mut answering);
    }

    fn write(&self, answering: &mut Answering) {
        while !answering.closed {
            if answering.is_between() {
                answering.bytes.clear();
                answering.written = 0;
                while let Some(frame) = answering.next() {
                    answering.bytes.extend(self.receiver.base.encode(frame));
                }
                if answering.bytes.is_empty() {
                    return;
                }
            }
            let nothing = SendBuffer::from_static(&[]);
            let rest = &answering.bytes[answering.written..];
            match sys::send_with_header(&self.socket, rest, nothing) {
                Ok(sent) => answering.written += sent,
                // Later, or the reading side will notice.
                Err(_) => return,
            }
        }
    }

    /// Tells the sender that the connection is over, if the socket takes it, and ends the flow. Before that it tells that all
    /// messages below this one have come: the sender did not fail to deliver them.
    fn say_bye(&self, below: u64) {
        let mut answering = lock(&self.answering);
        answering.ack = Some(below);
        self.write(&mut answering);
        if !std::mem::replace(&mut answering.closed, true) && answering.is_between() {
            let nothing = SendBuffer::from_static(&[]);
            // Sockets whose buffers are full tell the peer by closing.
            let bye = self.receiver.base.encode(Frame::Close);
            let _ = sys::send_with_header(&self.socket, &bye, nothing);
        }
        self.shutdown();
    }

    fn shutdown(&self) {
        // Fails only when the peer was faster.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    fn close(&self) {
        self.receiver.base.ended(self.counters.bytes());
        self.registration.end(&self.socket);
        self.shutdown();
    }
}

impl Receiver {
    /// What to do with the next bytes of a chunk; `None`, and the flow waits, when no buffer is
    /// posted for it yet.
    fn claim(
        &self,
        place: usize,
        chunk: &ChunkHeader,
        at: u64,
    ) -> Result<Option<Stage>, ReassemblyError> {
        let chunk = *chunk;
        let mut queue = lock(&self.queue);
        Ok(loop {
            break match queue.reassembly.reserve(&chunk, at)? {
                ChunkAction::Deliver { payload, end } => {
                    Some(Stage::Deliver { chunk, buffer: payload.buffer, start: at, at, end })
                }
                ChunkAction::Discard { end } => {
                    self.base.counters.repeated.add(end - at);
                    Some(Stage::Discard { chunk, at, end })
                }
                ChunkAction::NotPosted => {
                    // A flow on which no tag was said.
                    queue.order.hear_tag(0);
                    if queue.order.is_at_rest() {
                        queue.wait(place, chunk.message);
                        break None;
                    }
                    queue.set_aside(&chunk);
                    let mut aftermath = Aftermath::default();
                    self.order(&mut queue, &mut aftermath)?;
                    let has_place = queue.reassembly.next() > chunk.message;
                    if !has_place {
                        queue.wait(place, chunk.message);
                    }
                    drop(queue);
                    self.finish(aftermath);
                    if !has_place {
                        return Ok(None);
                    }
                    queue = lock(&self.queue);
                    continue;
                }
            };
        })
    }

    fn arrived(&self, flow: &RecvFlow, message: u64, bytes: u64) {
        self.warm.store(flow.place, Ordering::Relaxed);
        let (ack, failure) = {
            let mut queue = lock(&self.queue);
            let Some(completed) = queue.reassembly.received(message, bytes) else { return };
            self.base.counters.message(completed.total);
            let failure = match completed.payload.target {
                Some(target) => {
                    target.complete(completed.total);
                    None
                }
                None => queue.order.came_aside(message, completed.total).err(),
            };
            self.base.notify();
            // Who sends no more may wait for all that is left.
            let ack =
                if queue.bye { Some(queue.reassembly.ack()) } else { queue.reassembly.ack_due() };
            (ack, failure)
        };
        if let Some(below) = ack {
            flow.answer(|answering| answering.ack = Some(below));
        }
        if let Some(too_long) = failure {
            self.fail(ErrorKind::Truncated, &ReassemblyError::from(too_long).to_string());
        }
    }
}

impl From<TooLong> for ReassemblyError {
    fn from(TooLong { message, length, capacity }: TooLong) -> Self {
        Self::TooLong { message, total: length, capacity }
    }
}

impl Source for RecvFlow {
    fn ready(&self, readiness: Readiness) {
        if readiness.ended {
            // A flow that waits for a buffer is not read, so its end would not be noticed there.
            let mut queue = lock(&self.receiver.queue);
            if let Some(entry) = queue.flows.get_mut(self.place).and_then(Option::as_mut)
                && entry.flow.number == self.number
            {
                entry.ended = true;
            }
        }
        self.reading.take(|mut reading| {
            let (receiver, registration) = (&self.receiver, &self.registration);
            reading.attendance.look_after(&receiver.focus, registration, &self.socket);
            if reading.attendance.is_callers() {
                return;
            }
            self.read_with(reading, TURN_BYTES);
        });
        if readiness.ended {
            self.receiver.judge(Instant::now());
        }
        if readiness.writable {
            self.answer(|_| {});
        }
    }

    fn has_deadlines(&self) -> bool {
        false
    }

    fn abandoned(&self, why: &str) {
        self.receiver.fail(ErrorKind::Internal, why);
    }
}

/// The connection itself, as its worker sees it.
struct Clock(Arc<Receiver>);

impl Source for Clock {
    fn ready(&self, _readiness: Readiness) {}

    fn tick(&self, now: Instant) {
        if !self.0.base.failed() {
            self.0.judge(now);
            self.0.acknowledge_late();
        }
    }

    fn abandoned(&self, why: &str) {
        self.0.fail(ErrorKind::Internal, why);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::Barrier;
    use std::thread;

    use super::*;
    use crate::test_support;

    /// After it is closed nothing is written to the buffers, whatever flows come meanwhile.
    #[test]
    fn a_flow_that_comes_while_it_is_closed_comes_to_rest_too() {
        let transport = test_support::transport();
        let engine = transport.engine().unwrap();
        for _ in 0..200 {
            let context = transport.context(0, "").unwrap();
            let peer = "127.0.0.1:1".parse().unwrap();
            let receiver = Receiver::open(context, engine.workers(), peer, Vec::new()).unwrap();
            let sockets: Vec<_> = (0..64).map(|_| UnixStream::pair().unwrap().0).collect();
            let begin = Barrier::new(2);
            let entered = thread::scope(|scope| {
                let entering = scope.spawn(|| {
                    begin.wait();
                    let sockets = sockets.into_iter().enumerate();
                    let enter = |(number, socket): (usize, UnixStream)| {
                        receiver.enter(number as u32, socket.into()).ok()
                    };
                    sockets.map_while(enter).collect::<Vec<_>>()
                });
                begin.wait();
                // Some are there, and more are coming.
                while lock(&receiver.queue).flows.len() < 8 {
                    thread::yield_now();
                }
                receiver.close();
                entering.join().unwrap()
            });
            assert!(entered.iter().all(|flow| flow.reading.wait().closed));
        }
    }
}
