//! The sending side of a connection.

use std::any::Any;
use std::cmp::Reverse;
use std::collections::VecDeque;
use std::io::{self, Read};
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use evenkeel_protocol::{
    ChunkHeader, FRAME_BYTES, FlowStats, Frame, FrameError, MAX_MESSAGE_BYTES, NextFrame, Pacer,
    Progress, Scheduler,
};
use socket2::Socket;

use crate::connection::base::{Base, Direction, InFlight, Medium, TURN_BYTES, not_now};
use crate::connection::request::{MAX_REQUESTS, Operation, Owner, Request};
use crate::connection::send::{LINGER, Outbound};
use crate::connection::tag_matching::{Gate, Told};
use crate::error::{Error, ErrorKind};
use crate::handshake::dial::Destination;
use crate::memory::buffers::SendBuffer;
use crate::runtime::caller_polling::{Attendance, Focus};
use crate::runtime::flow_count::Breadth;
use crate::runtime::reactor::{Linger, Readiness, Registration, Source};
use crate::runtime::work_lock::Turn;
use crate::sync::lock;
use crate::sys::{self, MAX_FRAMES};
use crate::tcp::PLACES;
use crate::tcp::repair::Mending;
use crate::tcp::retransmit_buffer::{Copies, Copy};
use crate::telemetry::counters::FlowCounters;
use crate::telemetry::metrics::{FlowObservation, Observed};

/// Most bytes that a caller writes at a time.
const CALLER_BYTES: u64 = 128 << 10;
/// Bytes of a message for which another idle flow is woken: what a flow takes at once is known only when it does.
const SPREAD: u64 = 128 << 10;
/// Bytes of small messages that are enough for one system call.
const BATCH_BYTES: u64 = 64 << 10;
/// So many small messages are written at once after one that was left to the caller's next visit was alone then.
const ALONE: u32 = 64;
/// How long all flows are used after nothing moved: by then one with a dead path is found out.
const WIDE: Duration = Duration::from_secs(1);

impl Outbound for Sender {
    fn base(&self) -> &Base {
        &self.base
    }

    fn send(self: Arc<Self>, buffer: SendBuffer) -> Result<Option<Request>, Error> {
        Self::send(&self, buffer, None, Manner::AtOnce)
    }

    fn send_tagged(
        self: Arc<Self>,
        buffer: SendBuffer,
        tag: i32,
    ) -> Result<Option<Request>, Error> {
        Self::send(&self, buffer, Some(tag), Manner::Batched)
    }

    fn send_ahead(self: Arc<Self>, buffer: SendBuffer) -> Result<Option<Request>, Error> {
        Self::send(&self, buffer, None, Manner::Ahead)
    }

    fn leave(self: Arc<Self>) {
        Self::leave(&self);
    }

    fn is_delivered(&self) -> bool {
        self.is_over() || lock(&self.queue).scheduler.is_empty()
    }

    #[cfg(test)]
    fn break_lane(&self, lane: usize) {
        let flows = Self::flows(self);
        if let Some(flow) = flows.get(lane % flows.len().max(1)) {
            flow.shutdown();
        }
    }

    #[cfg(test)]
    fn lanes(&self) -> usize {
        0
    }

    #[cfg(test)]
    fn id(&self) -> evenkeel_protocol::ConnectionId {
        self.destination.connection
    }
}

/// Locks are taken in this order: a flow's `hearing`, `mending`, a flow's `writing`, `queue`.
pub(crate) struct Sender {
    pub(crate) base: Base,
    pub(crate) destination: Arc<Destination>,
    pub(crate) queue: Mutex<Queue>,
    pub(crate) mending: Mutex<Mending>,
    /// For deadlines of the connection, not of a flow.
    clock: Registration,
    /// When the connection was opened: flows' paces count from here.
    epoch: Instant,
    /// The place to listen at next when a caller has time.
    attention: AtomicUsize,
    focus: Focus,
    pub(crate) breadth: Arc<Breadth>,
}

pub(crate) struct Queue {
    pub(crate) scheduler: Scheduler<Outgoing>,
    gate: Gate,
    /// Buffers that the peer has told of.
    told: Told,
    /// By place.
    pub(crate) flows: Vec<Option<Arc<SendFlow>>>,
    /// Flows (as bits) that can take bytes and found nothing to send. Whoever queues a message
    /// takes some bits out and sees to it that those flows look again.
    idle: u128,
    /// Flows (as bits) that take messages. The others have nothing to do as long as nothing is to be repeated.
    used: u128,
    /// How many flows take messages, and at most do.
    width: usize,
    most: usize,
    /// Nothing moved: all are used until then.
    wide_until: Option<Instant>,
    /// Bytes carried when the clock last looked.
    carried: u64,
    /// Messages whose requests are not done.
    requests: usize,
    copies: Copies,
    /// Small messages that are written and for which there was no room.
    unkept: VecDeque<u64>,
    /// No flow may be added any more.
    closed: bool,
    /// The connection is closed by its owner and still delivers what was promised.
    lingering: Option<(Linger, Instant)>,
}

pub(crate) struct Outgoing {
    buffer: SendBuffer,
    request: Promise,
}

/// When a message is written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Manner {
    AtOnce,
    /// The caller comes soon to move bytes.
    Batched,
    /// With the next message, which the caller sends now.
    Ahead,
}

/// Who waits for a message.
enum Promise {
    /// The request, which is done when the buffer is not needed any more.
    Pending(Arc<Operation>),
    /// Nobody: the request is done and the buffer is a copy.
    Kept(Copy),
}

/// One TCP connection of a connection.
pub(crate) struct SendFlow {
    sender: Arc<Sender>,
    pub(crate) number: u32,
    pub(crate) place: usize,
    pub(crate) socket: Socket,
    registration: Registration,
    pub(crate) counters: FlowCounters,
    /// It is to take no more chunks.
    pub(crate) retiring: AtomicBool,
    /// Its socket did not take all it had.
    is_full: AtomicBool,
    /// Held while the socket is written to.
    writing: Turn<Writing>,
    /// Held while the socket is read from.
    hearing: Turn<Hearing>,
}

struct Writing {
    /// Nothing may be written any more.
    closed: bool,
    /// What is to be written now, in this order; some of the first may be written. At most [`MAX_FRAMES`].
    frames: VecDeque<PartlyWritten>,
    /// So many chunks have been written that the scheduler does not know of.
    chunks_written: usize,
    /// The peer knows that no more messages come.
    bye_said: bool,
    /// The peer knows what tag messages have.
    tag_said: bool,
    /// The peer knows up to which message they all do.
    end_said: bool,
    pace: Pacer,
    /// Most bytes that can be outstanding: what there was when it was last asked, and what has
    /// been written since.
    outstanding: u64,
    attendance: Attendance,
    /// So many small messages are written at once before a caller who attends leaves one to its next visit again.
    at_once: u32,
}

struct PartlyWritten {
    frame: Frame,
    encoded: [u8; FRAME_BYTES],
    payload: SendBuffer,
    /// Bytes written of frame and payload together.
    written: usize,
}

impl PartlyWritten {
    /// Nothing of it is written or encoded.
    fn new((frame, payload): (Frame, SendBuffer)) -> Self {
        Self { frame, encoded: [0; FRAME_BYTES], payload, written: 0 }
    }

    /// What is not written yet of the frame and of its payload.
    fn rest(&self) -> (&[u8], SendBuffer) {
        let header = &self.encoded[self.written.min(FRAME_BYTES)..];
        let offset = self.written.saturating_sub(FRAME_BYTES);
        (header, self.payload.part(offset, self.payload.length() - offset))
    }
}

/// Why what a peer said cannot be acted on.
enum Misheard {
    /// It changed on its way: another flow may do better.
    Garbled(String),
    /// The connection cannot go on.
    Final(String),
}

impl From<String> for Misheard {
    fn from(what: String) -> Self {
        Self::Final(what)
    }
}

struct Hearing {
    frames: [u8; 8 * FRAME_BYTES],
    have: usize,
}

impl Writing {
    fn new(place: usize, pace: Pacer) -> Self {
        Self {
            closed: false,
            frames: VecDeque::with_capacity(MAX_FRAMES),
            chunks_written: 0,
            bye_said: false,
            tag_said: false,
            end_said: false,
            pace,
            outstanding: 0,
            attendance: Attendance::new(place),
            at_once: 0,
        }
    }

    /// What the peer has to hear on this flow of the messages' tags before it hears of any that is cut from now on.
    fn introduction(&mut self, gate: &Gate) -> Option<Frame> {
        if !self.tag_said
            && let Some(tag) = gate.tag()
        {
            self.tag_said = true;
            // The peer takes a flow that says nothing for one whose messages have the tag 0.
            if tag != 0 {
                return Some(Frame::Tag(tag));
            }
        }
        if !self.end_said
            && let Some(until) = gate.plain_until()
        {
            self.end_said = true;
            return Some(Frame::SameTagBelow(until));
        }
        None
    }
}

impl Sender {
    /// Makes a connection of flows that have been welcomed.
    pub(crate) fn open(
        destination: Arc<Destination>,
        sockets: Vec<Socket>,
    ) -> io::Result<Arc<Self>> {
        let context = destination.context.clone();
        let copies = Copies::new(context.settings.copies_bytes);
        let schedule = context.settings.schedule;
        let breadth = destination.workers.breadths.of(destination.peer.ip(), sockets.len());
        let sender = Arc::new(Self {
            base: Base::new(context, Direction::Send, Medium::Tcp, destination.peer),
            clock: destination.workers.registration(),
            queue: Mutex::new(Queue {
                scheduler: Scheduler::new(schedule),
                gate: Gate::default(),
                told: Told::default(),
                flows: Vec::new(),
                idle: 0,
                used: 0,
                width: breadth.flows(),
                most: sockets.len(),
                wide_until: None,
                carried: 0,
                requests: 0,
                copies,
                unkept: VecDeque::new(),
                closed: false,
                lingering: None,
            }),
            mending: Mutex::new(Mending::new(sockets.len() as u32)),
            destination,
            epoch: Instant::now(),
            attention: AtomicUsize::new(0),
            focus: Focus::new(),
            breadth,
        });
        sender.clock.watch_time(Arc::new(Clock(Arc::clone(&sender))));
        let observed: Weak<Self> = Arc::downgrade(&sender);
        sender.base.context.metrics.watch(observed);
        for (number, socket) in sockets.into_iter().enumerate() {
            if let Err(error) = sender.adopt(number as u32, socket, Pacer::default()) {
                sender.close();
                return Err(error);
            }
        }
        Ok(sender)
    }

    /// Takes in a flow that has been welcomed, which begins at this pace.
    pub(crate) fn adopt(
        self: &Arc<Self>,
        number: u32,
        socket: Socket,
        pace: Pacer,
    ) -> io::Result<()> {
        let (flow, waiting) = {
            let mut queue = lock(&self.queue);
            if queue.closed || self.base.failed() {
                return Ok(());
            }
            let place = queue.flows.iter().position(Option::is_none).unwrap_or(queue.flows.len());
            if place >= PLACES {
                return Err(io::Error::other("too many flows"));
            }
            let flow = Arc::new(SendFlow {
                sender: Arc::clone(self),
                number,
                place,
                socket,
                registration: self.destination.workers.registration(),
                counters: FlowCounters::default(),
                retiring: AtomicBool::new(false),
                is_full: AtomicBool::new(false),
                writing: Turn::new(Writing::new(place, pace)),
                hearing: Turn::new(Hearing { frames: [0; 8 * FRAME_BYTES], have: 0 }),
            });
            if place == queue.flows.len() {
                queue.flows.push(None);
            }
            queue.flows[place] = Some(Arc::clone(&flow));
            queue.scheduler.flow_opened(place);
            let waiting = queue.choose();
            (flow, waiting)
        };
        waiting.iter().for_each(|flow| flow.kick());
        // It becomes idle, or takes work, when its worker first looks at it.
        flow.registration.watch(&flow.socket, Arc::<SendFlow>::clone(&flow))?;
        if lock(&self.queue).closed {
            // What ends the watch may have come before it began.
            flow.registration.end(&flow.socket);
        }
        Ok(())
    }

    /// The flows there are.
    pub(crate) fn flows(&self) -> Vec<Arc<SendFlow>> {
        lock(&self.queue).flows.iter().flatten().cloned().collect()
    }

    fn send(
        this: &Arc<Self>,
        buffer: SendBuffer,
        tag: Option<i32>,
        manner: Manner,
    ) -> Result<Option<Request>, Error> {
        let length = buffer.length() as u64;
        if length > MAX_MESSAGE_BYTES {
            return Err(Error::argument(format!(
                "message of {length} bytes: at most {MAX_MESSAGE_BYTES} can be sent"
            )));
        }
        if let Some(error) = this.failure() {
            return Err(error);
        }
        let settings = &this.base.context.settings;
        let inline = length <= settings.inline_bytes;
        let mut guard = lock(&this.queue);
        let queue = &mut *guard;
        if queue.requests >= MAX_REQUESTS {
            return Ok(None);
        }
        let next = queue.scheduler.next_message();
        if let Some(tag) = tag
            && !queue.gate.opens(tag, next, || queue.told.tag(next))
        {
            drop(guard);
            // Who has nothing to test is here, and may read what opens the gate.
            this.progress();
            return Ok(None);
        }
        let operation = Operation::new();
        let request = Promise::Pending(Arc::clone(&operation));
        let ack_wanted = !inline || queue.copies.is_short(length);
        queue.scheduler.push(length, ack_wanted, Outgoing { buffer, request });
        queue.requests += 1;
        let request = Request::new(operation, Arc::clone(this) as Arc<dyn Owner>);
        if manner == Manner::Ahead {
            return Ok(Some(request));
        }
        let batched = manner == Manner::Batched;
        // What is dealt may be any flow's.
        let is_static = settings.is_static();
        let mut wanted = if is_static { u64::MAX } else { length.div_ceil(SPREAD) };
        if length <= settings.caller_bytes && !is_static {
            let attended = this.focus.attended().filter(|_| batched);
            let flow = match attended.and_then(|place| queue.free(place)) {
                Some((flow, is_idle)) => {
                    queue.idle &= !(1 << flow.place);
                    is_idle.then_some(flow)
                }
                None => queue.take_idle(),
            };
            drop(guard);
            if let Some(flow) = flow {
                flow.write_small(settings.caller_bytes, batched);
            }
            return Ok(Some(request));
        }
        let place = this.focus.place();
        let mut attended = None;
        while wanted > 0
            && let Some(flow) = queue.take_idle()
        {
            if place == Some(flow.place) {
                attended = Some(flow);
            } else {
                flow.kick();
            }
            wanted -= 1;
        }
        drop(guard);
        if let Some(flow) = attended {
            flow.start();
        }
        Ok(Some(request))
    }

    /// A flow has died: what it may not have delivered goes to others.
    pub(crate) fn lose(self: &Arc<Self>, flow: &SendFlow, why: &str) {
        {
            let mut writing = flow.writing.wait();
            if std::mem::replace(&mut writing.closed, true) {
                return;
            }
            flow.dismiss(&mut writing);
            writing.frames.clear();
        }
        flow.end();
        let (waiting, over) = {
            let mut queue = lock(&self.queue);
            let mut waiting = queue.remove(flow);
            let again = queue.scheduler.flow_failed(flow.place, flow.number);
            self.base.counters.repeated.add(again);
            let over = self.collect(&mut queue);
            waiting.extend(std::iter::from_fn(|| queue.take_idle()));
            (waiting, over)
        };
        self.base.counters.lost.add(1);
        // All tell of the death, and share what is to be sent again.
        waiting.iter().for_each(|flow| flow.kick());
        if over {
            self.close();
        } else {
            self.lost_one(why);
        }
    }

    /// Takes a flow out that has nothing to deliver any more.
    pub(crate) fn retire(&self, flow: &SendFlow) {
        let waiting = {
            let mut writing = flow.writing.wait();
            if !writing.closed {
                flow.dismiss(&mut writing);
            }
            let mut queue = lock(&self.queue);
            if writing.closed
                || !writing.frames.is_empty()
                || !queue.scheduler.is_drained(flow.place)
            {
                // Somebody may have wanted to write meanwhile; the worker hears of it, since no caller attends the flow.
                flow.kick();
                return;
            }
            writing.closed = true;
            queue.scheduler.flow_closed(flow.place);
            queue.remove(flow)
        };
        waiting.iter().for_each(|flow| flow.kick());
        flow.end();
    }

    /// Completes what the peer has. True when that was the last of a connection that lingers.
    fn collect(&self, queue: &mut Queue) -> bool {
        let before = queue.requests;
        while let Some(sent) = queue.scheduler.pop_sent() {
            self.base.counters.message(sent.total);
            match sent.payload.request {
                Promise::Pending(operation) => {
                    operation.complete(sent.total);
                    queue.requests -= 1;
                }
                Promise::Kept(copy) => queue.copies.release(copy),
            }
        }
        // Now there may be room. Their acknowledgements need not come soon.
        while let Some(message) = queue.unkept.front().copied()
            && (message < queue.scheduler.first() || queue.keep(message))
        {
            queue.unkept.pop_front();
        }
        if queue.requests < before {
            self.base.notify();
        }
        queue.lingering.is_some() && queue.scheduler.is_empty()
    }

    fn acked(&self, below: u64) -> Result<(), String> {
        let (over, waiting) = {
            let mut queue = lock(&self.queue);
            queue.scheduler.acked(below).map_err(|error| format!("protocol error: {error}"))?;
            let over = self.collect(&mut queue);
            // Flows that have nothing later on their way any more may take what is to be repeated.
            let repeats = queue.scheduler.must_retransmit();
            let idle = std::iter::from_fn(|| if repeats { queue.take_idle() } else { None });
            (over, idle.collect::<Vec<_>>())
        };
        waiting.iter().for_each(|flow| flow.kick());
        if over {
            self.close();
        }
        Ok(())
    }

    /// The peer has buffers with different tags, from that of this number on.
    fn mixed(&self, from: u64) {
        let mut queue = lock(&self.queue);
        let next = queue.scheduler.next_message();
        queue.gate.mix(from, next);
        // Each flow answers: any of them may be lost. A flow that waits for work hears of this one.
        queue.idle = 0;
        let flows: Vec<_> = queue.flows.iter().flatten().cloned().collect();
        drop(queue);
        flows.iter().for_each(|flow| flow.kick());
    }

    /// The peer has a buffer of this number with this tag.
    fn told_slot(&self, number: u64, tag: i32) -> Result<(), String> {
        let mut guard = lock(&self.queue);
        let queue = &mut *guard;
        let next = queue.scheduler.next_message();
        if queue.told.hear(number, tag, next) {
            return Ok(());
        }
        Err(format!("protocol error: the peer has posted buffer {number}, and {next} are sent"))
    }

    /// The peer has lost a flow.
    fn told_dead(self: &Arc<Self>, number: u32) {
        let flow = self.flows().into_iter().find(|flow| flow.number == number);
        if let Some(flow) = flow {
            self.lose(&flow, "the peer lost it");
        }
    }

    pub(crate) fn fail(&self, kind: ErrorKind, what: &str) {
        if self.base.fail(kind, what, &self.in_flight()) {
            // The peer must hear of it now, not when this side closes.
            self.come_to_rest();
        }
    }

    fn in_flight(&self) -> InFlight {
        let queue = lock(&self.queue);
        let bytes = queue
            .scheduler
            .unacked()
            .filter(|outgoing| matches!(outgoing.request, Promise::Pending(_)))
            .map(|outgoing| outgoing.buffer.length() as u64)
            .sum();
        InFlight { requests: queue.requests, bytes }
    }

    /// Returns when no buffer is being read and none will be again, and the peer is told as far as
    /// that is possible. Waits at most for system calls that do not block.
    fn come_to_rest(&self) {
        for flow in self.flows() {
            let mut writing = flow.writing.wait();
            if !std::mem::replace(&mut writing.closed, true) {
                flow.dismiss(&mut writing);
                // The peer may have it, and have closed for that reason.
                let written = std::mem::take(&mut writing.chunks_written);
                if written > 0 {
                    let mut queue = lock(&self.queue);
                    (0..written).for_each(|_| queue.written(flow.place));
                    self.collect(&mut queue);
                }
                let midway = writing.frames.front().is_some_and(|frame| frame.written > 0);
                writing.frames.clear();
                if !midway && !writing.bye_said {
                    let nothing = SendBuffer::from_static(&[]);
                    let bye = self.base.encode(Frame::Close);
                    // Sockets whose buffers are full tell the peer by closing.
                    let _ = sys::send_with_header(&flow.socket, &bye, nothing);
                }
                flow.shutdown();
            }
        }
    }

    /// The owner has closed the connection.
    fn leave(self: &Arc<Self>) {
        let flows: Vec<Arc<SendFlow>> = {
            let mut queue = lock(&self.queue);
            let promised = queue.requests == 0 && !queue.scheduler.is_empty();
            if promised && !self.base.failed() {
                let linger = self.destination.workers.linger();
                queue.lingering = Some((linger, Instant::now() + LINGER));
                std::iter::from_fn(|| queue.take_idle()).collect()
            } else {
                drop(queue);
                self.close();
                return;
            }
        };
        // They say that no more comes, so that the peer acknowledges what it has.
        flows.iter().for_each(|flow| flow.kick());
    }

    /// Ends everything.
    pub(crate) fn close(&self) {
        // First, so that all flows there will ever be come to rest. Whoever closes waits for that, the second one too.
        let closed = std::mem::replace(&mut lock(&self.queue).closed, true);
        self.come_to_rest();
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
        self.stop_mending();
        self.clock.end_time();
        self.base.last_words();
        drop(lingering);
    }

    /// The moment from which the connection's times count.
    pub(crate) fn epoch(&self) -> Instant {
        self.epoch
    }

    /// A flow is to take no more chunks.
    pub(crate) fn begin_to_retire(&self, flow: &SendFlow) {
        flow.retiring.store(true, Ordering::Relaxed);
        let waiting = lock(&self.queue).choose();
        waiting.iter().for_each(|flow| flow.kick());
    }

    /// Whether the connection is over: there is no use in flows.
    pub(crate) fn is_over(&self) -> bool {
        self.base.failed() || lock(&self.queue).closed
    }

    /// Sees to it that as many flows are used as are worth it. One of them does so for all.
    fn adapt(&self, flow: &SendFlow) {
        if self.base.context.settings.is_static() {
            return;
        }
        let waiting = {
            let mut queue = lock(&self.queue);
            if !queue.leads(flow.place) {
                return;
            }
            // While other paths are tried, there are more.
            let all = queue.flows.iter().flatten().count();
            if all == queue.most {
                self.breadth.tick(self.destination.workers.worked());
            }
            if queue.wide_until.is_some() {
                return;
            }
            queue.widen_or_narrow(self.breadth.flows())
        };
        waiting.iter().for_each(|flow| flow.kick());
    }

    fn tick(self: &Arc<Self>, now: Instant) {
        let (lingers_until, busy, waiting) = {
            let mut queue = lock(&self.queue);
            let until = queue.lingering.as_ref().map(|(_, deadline)| *deadline);
            let busy = !queue.scheduler.is_empty();
            let carried = self.base.counters.carried();
            let stuck = busy && carried == std::mem::replace(&mut queue.carried, carried);
            if stuck {
                queue.wide_until = Some(now + WIDE);
            } else if queue.wide_until.is_some_and(|until| now >= until) {
                queue.wide_until = None;
            }
            let waiting = match queue.wide_until {
                Some(_) => {
                    let most = queue.most;
                    queue.widen_or_narrow(most)
                }
                None => Vec::new(),
            };
            (until, busy, waiting)
        };
        waiting.iter().for_each(|flow| flow.kick());
        if let Some(deadline) = lingers_until {
            let given_up = now >= deadline || self.base.failed();
            if busy && given_up {
                self.base.info("closed with messages that the peer has not taken");
            }
            if !busy || given_up {
                self.close();
                return;
            }
        }
        self.mend(now, busy);
    }
}

impl Queue {
    /// Takes out a flow that waits for work and may have some.
    fn take_idle(&mut self) -> Option<Arc<SendFlow>> {
        let idle = self.idle & self.wanted();
        let place = (idle != 0).then(|| idle.trailing_zeros() as usize)?;
        self.idle &= !(1 << place);
        self.flows[place].clone()
    }

    /// The flow in this place, if it takes messages and its socket took all it had; and whether nobody has told it of work.
    fn free(&self, place: usize) -> Option<(Arc<SendFlow>, bool)> {
        let bit = 1 << place;
        let flow = self.flows.get(place)?.as_ref()?;
        let free = self.used & bit != 0 && !flow.is_full.load(Ordering::Relaxed);
        free.then(|| (Arc::clone(flow), self.idle & bit != 0))
    }

    /// The flows (as bits) that there may be work for. What is to be repeated cannot go on each, and all say goodbye.
    fn wanted(&self) -> u128 {
        let all = self.scheduler.must_retransmit() || self.lingering.is_some();
        if all { u128::MAX } else { self.used }
    }

    /// Chooses the flows to use: all, or those that have carried most. Returns those that have work which nobody told them of.
    #[must_use]
    fn choose(&mut self) -> Vec<Arc<SendFlow>> {
        let live = self.flows.iter().flatten();
        let mut live: Vec<_> = live.filter(|flow| !flow.retiring.load(Ordering::Relaxed)).collect();
        if self.width < self.most {
            live.sort_by_key(|flow| Reverse(flow.counters.bytes()));
            live.truncate(self.width);
        }
        self.used = live.iter().fold(0, |used, flow| used | 1 << flow.place);
        let work = self.scheduler.has_work();
        std::iter::from_fn(|| if work { self.take_idle() } else { None }).collect()
    }

    /// Uses so many flows from now on. Returns those that have work which nobody told them of.
    #[must_use]
    fn widen_or_narrow(&mut self, width: usize) -> Vec<Arc<SendFlow>> {
        if std::mem::replace(&mut self.width, width) == width {
            return Vec::new();
        }
        self.choose()
    }

    /// Whether the flow in this place is the one that looks after the width.
    fn leads(&self, place: usize) -> bool {
        self.used.trailing_zeros() as usize == place
    }

    /// The flow in this place has written its chunk. A small message that is written is kept as a
    /// copy, and its request is done.
    fn written(&mut self, place: usize) {
        if let Some(message) = self.scheduler.chunk_written(place)
            && !self.keep(message)
        {
            self.unkept.push_back(message);
        }
    }

    /// Keeps a copy of a small message, unless there is no room or a flow is writing it again.
    fn keep(&mut self, message: u64) -> bool {
        let Some(outgoing) = self.scheduler.payload_mut(message) else { return false };
        let Promise::Pending(operation) = &outgoing.request else { return true };
        let Some((buffer, copy)) = self.copies.store(outgoing.buffer) else { return false };
        operation.complete(outgoing.buffer.length() as u64);
        *outgoing = Outgoing { buffer, request: Promise::Kept(copy) };
        self.requests -= 1;
        true
    }

    /// Takes a flow out. Returns those that have work which nobody told them of.
    #[must_use]
    fn remove(&mut self, flow: &SendFlow) -> Vec<Arc<SendFlow>> {
        // Not there when the connection was closed in between.
        if let Some(place) = self.flows.get_mut(flow.place) {
            *place = None;
        }
        self.idle &= !(1 << flow.place);
        self.choose()
    }
}

impl Observed for Sender {
    fn base(&self) -> &Base {
        &self.base
    }

    fn in_flight(&self) -> InFlight {
        Self::in_flight(self)
    }

    fn flows(&self) -> Vec<FlowObservation> {
        let observe = |flow: &Arc<SendFlow>| FlowObservation {
            number: flow.number,
            bytes: flow.counters.bytes(),
            path: sys::path_figures(&flow.socket).unwrap_or_default(),
        };
        Self::flows(self).iter().map(observe).collect()
    }
}

impl Owner for Sender {
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
        let flow = {
            let queue = lock(&self.queue);
            let turn = || self.attention.fetch_add(1, Ordering::Relaxed) % queue.flows.len().max(1);
            queue.flows.get(place.unwrap_or_else(turn)).and_then(Option::clone)
        };
        if let Some(flow) = flow {
            if place.is_some() {
                flow.visit();
            }
            flow.hearing.take_if_free(|hearing, _| flow.hear_with(hearing));
        }
    }
}

impl SendFlow {
    /// Lets the flow's worker have a look at it.
    fn kick(&self) {
        self.registration.kick(&self.socket);
    }

    /// What it has done so far.
    pub(crate) fn carried(&self) -> FlowStats {
        let busy = sys::path_info(&self.socket).unwrap_or_default().busy;
        FlowStats { flow: self.number, bytes: self.counters.bytes(), busy }
    }

    /// No caller attends it any more.
    fn dismiss(&self, writing: &mut Writing) {
        writing.attendance.end(&self.sender.focus, &self.registration, &self.socket);
    }

    fn shutdown(&self) {
        // Fails only when the peer was faster.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    fn end(&self) {
        self.sender.base.ended(self.counters.bytes());
        self.registration.end(&self.socket);
        self.shutdown();
    }

    /// A caller is here, and writes if it is the one who does, or in place of somebody who has come meanwhile.
    fn visit(&self) {
        self.writing.take_if_free(|mut writing, asked| {
            if !writing.closed {
                let focus = &self.sender.focus;
                writing.attendance.visit(focus, &self.registration, &self.socket);
            }
            if asked || writing.attendance.is_callers() {
                self.write_as_caller(writing);
            }
        });
    }

    /// There is something to write, and callers come here.
    fn start(&self) {
        self.writing.take(|writing| {
            if writing.attendance.is_callers() {
                self.write_as_caller(writing);
            } else {
                self.kick();
            }
        });
    }

    fn write_as_caller(&self, writing: MutexGuard<'_, Writing>) {
        let begin = Instant::now();
        if self.write_with(writing, CALLER_BYTES) > 0 {
            self.sender.destination.workers.helped(begin.elapsed());
        }
    }

    /// There is a small message to write. `batched`: a caller who attends writes it at its next visit, with what it adds until
    /// then, if it does add to it.
    fn write_small(&self, limit: u64, batched: bool) {
        self.writing.take(|mut writing| {
            if batched && !writing.closed {
                let focus = &self.sender.focus;
                writing.attendance.visit(focus, &self.registration, &self.socket);
                if writing.attendance.is_callers() {
                    if writing.at_once <= 1 {
                        writing.at_once = 0;
                        return;
                    }
                    writing.at_once -= 1;
                }
            }
            self.write_with(writing, limit);
        });
    }

    /// Writes until the socket takes no more, nothing is left, or more than `limit` bytes are
    /// written; in the last case the worker goes on, or the caller who attends. Returns how many bytes it has written.
    fn write_with(&self, mut guard: MutexGuard<'_, Writing>, limit: u64) -> u64 {
        guard.attendance.renew(&self.registration);
        let mut moved = 0;
        let error = loop {
            let writing = &mut *guard;
            if writing.closed || self.sender.base.failed() {
                return moved;
            }
            if writing.frames.is_empty() {
                self.is_full.store(false, Ordering::Relaxed);
                self.take_frames(writing);
                if writing.frames.is_empty() {
                    return moved;
                }
                continue;
            }
            if moved > limit {
                // A caller who attends comes again.
                if !writing.attendance.is_callers() {
                    self.kick();
                }
                return moved;
            }
            match sys::send_frames(&self.socket, writing.frames.iter().map(PartlyWritten::rest)) {
                Ok(sent) => {
                    moved += sent as u64;
                    writing.outstanding += sent as u64;
                    self.wrote(writing, sent);
                }
                Err(error) if not_now(&error) => {
                    self.is_full.store(true, Ordering::Relaxed);
                    return moved;
                }
                Err(error) => break error,
            }
        };
        drop(guard);
        // The peer may have said why.
        self.hear();
        self.sender.lose(self, &error.to_string());
        moved
    }

    /// So many bytes have been written of the frames.
    fn wrote(&self, writing: &mut Writing, mut sent: usize) {
        while sent > 0
            && let Some(frame) = writing.frames.front_mut()
        {
            let whole = FRAME_BYTES + frame.payload.length();
            let part = sent.min(whole - frame.written);
            frame.written += part;
            sent -= part;
            if frame.written < whole {
                return;
            }
            if let Frame::Chunk(ChunkHeader { length, .. }) = frame.frame {
                self.counters.chunk(&self.sender.base.counters, length.into());
                self.sender.breadth.carried(length.into());
                writing.chunks_written += 1;
            }
            writing.frames.pop_front();
        }
    }

    /// Takes what to write next. Nothing: there is nothing, or too much is on its way; in both cases
    /// somebody will see to it that this is asked again.
    fn take_frames(&self, writing: &mut Writing) {
        let Some(first) = self.next_frame(writing) else { return };
        let settings = &self.sender.base.context.settings;
        let (small, most) = (settings.caller_bytes, settings.chunk_bytes);
        let mut bytes = first.1.length() as u64;
        writing.frames.push_back(PartlyWritten::new(first));
        if bytes <= small {
            // What is small and there already goes with it: a system call costs as much as a small message.
            let mut queue = lock(&self.sender.queue);
            while writing.frames.len() < MAX_FRAMES
                && bytes < BATCH_BYTES
                && queue.scheduler.next_unstarted_message().is_some_and(|length| length <= small)
                && let Some(frame) = self.cut(&mut queue, small.min(most))
            {
                bytes += frame.1.length() as u64;
                writing.frames.push_back(PartlyWritten::new(frame));
            }
            if writing.frames.len() == 1 && writing.at_once == 0 {
                writing.at_once = ALONE;
            }
        }
        // A checksum takes its time. The messages stay as they are while a flow writes them.
        for frame in &mut writing.frames {
            frame.encoded = self.sender.base.encode_with(frame.frame, frame.payload);
        }
    }

    /// What to write next, if there is something and it may go.
    fn next_frame(&self, writing: &mut Writing) -> Option<(Frame, SendBuffer)> {
        let sender = &self.sender;
        let now = sender.epoch.elapsed();
        let look = writing.pace.sample_due(now);
        if look && let Ok(info) = sys::path_info(&self.socket) {
            let sys::PathInfo { acked, busy, round_trip, .. } = info;
            writing.pace.sample(now, Progress { acked, busy, round_trip });
        }
        let most = writing.pace.max_outstanding();
        if writing.outstanding > most {
            writing.outstanding = sys::unacknowledged(&self.socket);
        }
        let limit = writing.pace.chunk(sender.base.context.settings.chunk_bytes);
        if look {
            sender.adapt(self);
        }
        let mut guard = lock(&sender.queue);
        let queue = &mut *guard;
        let mut over = false;
        let written = std::mem::take(&mut writing.chunks_written);
        if written > 0 {
            let before = queue.requests;
            (0..written).for_each(|_| queue.written(self.place));
            if queue.requests < before {
                self.sender.base.notify();
            }
            over = sender.collect(queue);
        }
        if over {
            // The tick closes the connection; here the flow is locked.
            return None;
        }
        if let Some(frame) = writing.introduction(&queue.gate) {
            queue.idle &= !(1 << self.place);
            return Some((frame, SendBuffer::from_static(&[])));
        }
        let retiring = self.retiring.load(Ordering::Relaxed);
        if retiring || queue.wanted() & 1 << self.place == 0 {
            if !retiring {
                queue.idle |= 1 << self.place;
            }
            // It may be the one that was told of the work.
            let other = if queue.scheduler.has_work() { queue.take_idle() } else { None };
            drop(guard);
            if let Some(other) = other {
                other.kick();
            }
            return None;
        }
        let work = queue.scheduler.has_work() || queue.scheduler.has_static_share(self.place);
        if writing.outstanding > most && work {
            drop(guard);
            let wait = writing.pace.wait(writing.outstanding);
            self.registration.alarm(Instant::now() + wait);
            return None;
        }
        let next = self.cut(queue, limit).or_else(|| {
            let bye = queue.lingering.is_some() && !writing.bye_said;
            writing.bye_said |= bye;
            bye.then(|| (Frame::Close, SendBuffer::from_static(&[])))
        });
        match next {
            Some(_) => queue.idle &= !(1 << self.place),
            None => queue.idle |= 1 << self.place,
        }
        next
    }

    /// What the scheduler has for this flow, in chunks of so many bytes at most.
    fn cut(&self, queue: &mut Queue, limit: u64) -> Option<(Frame, SendBuffer)> {
        match queue.scheduler.next(self.place, limit)? {
            NextFrame::Chunk(header, outgoing) => {
                self.sender.focus.chunk(self.place);
                let ChunkHeader { offset, length, .. } = header;
                let payload = outgoing.buffer.part(offset as usize, length as usize);
                Some((Frame::Chunk(header), payload))
            }
            NextFrame::FlowDead(number) => {
                Some((Frame::FlowDead(number), SendBuffer::from_static(&[])))
            }
        }
    }

    /// Reads what the peer says.
    fn hear(&self) {
        self.hearing.take(|hearing| self.hear_with(hearing));
    }

    fn hear_with(&self, mut hearing: MutexGuard<'_, Hearing>) {
        let sender = &self.sender;
        let ended = loop {
            let Hearing { frames, have } = &mut *hearing;
            let room = frames.len() - *have;
            match sys::uninterrupted(|| (&self.socket).read(&mut frames[*have..])) {
                Ok(0) => break "the peer closed it".to_owned(),
                Ok(received) => {
                    *have += received;
                    let full = received == room;
                    match self.understand(&mut hearing) {
                        Ok(()) => {}
                        Err(Misheard::Garbled(what)) => break what,
                        Err(Misheard::Final(what)) => {
                            drop(hearing);
                            sender.fail(ErrorKind::Remote, &what);
                            return;
                        }
                    }
                    if !full {
                        return;
                    }
                }
                Err(error) if not_now(&error) => return,
                Err(error) => break error.to_string(),
            }
        };
        drop(hearing);
        sender.lose(self, &ended);
    }

    /// Acts on the whole frames that were read; the text says what is wrong with one.
    fn understand(&self, hearing: &mut Hearing) -> Result<(), Misheard> {
        let Hearing { frames, have } = hearing;
        let whole = *have - *have % FRAME_BYTES;
        let mut acked = None;
        for bytes in frames[..whole].chunks_exact(FRAME_BYTES) {
            let mut frame = [0; FRAME_BYTES];
            frame.copy_from_slice(bytes);
            let (frame, _) = self.sender.base.decode(&frame).map_err(|error| match error {
                FrameError::Checksum => Misheard::Garbled(error.to_string()),
                error => Misheard::Final(format!("protocol error: {error}")),
            })?;
            match frame {
                Frame::Ack(below) => acked = acked.max(Some(below)),
                Frame::FlowDead(number) => self.sender.told_dead(number),
                Frame::TagsDifferFrom(from) => self.sender.mixed(from),
                Frame::BufferTag(number, tag) => self.sender.told_slot(number, tag)?,
                Frame::Close => {
                    if let Some(below) = acked {
                        self.sender.acked(below)?;
                    }
                    return Err("the peer closed the connection".to_owned().into());
                }
                Frame::Chunk(_) | Frame::Tag(_) | Frame::SameTagBelow(_) => {
                    return Err("protocol error: the receiver sent data".to_owned().into());
                }
            }
        }
        frames.copy_within(whole..*have, 0);
        *have -= whole;
        acked.map_or(Ok(()), |below| Ok(self.sender.acked(below)?))
    }
}

impl Source for SendFlow {
    fn ready(&self, readiness: Readiness) {
        if readiness.readable || readiness.ended {
            self.hear();
        }
        if readiness.writable {
            self.writing.take(|mut writing| {
                let focus = &self.sender.focus;
                writing.attendance.look_after(focus, &self.registration, &self.socket);
                if !writing.attendance.is_callers() {
                    self.write_with(writing, TURN_BYTES);
                }
            });
        }
    }

    fn has_deadlines(&self) -> bool {
        false
    }

    fn abandoned(&self, why: &str) {
        self.sender.fail(ErrorKind::Internal, why);
    }
}

/// The connection itself, as its worker sees it.
struct Clock(Arc<Sender>);

impl Source for Clock {
    fn ready(&self, _readiness: Readiness) {}

    fn tick(&self, now: Instant) {
        self.0.tick(now);
    }

    fn abandoned(&self, why: &str) {
        self.0.fail(ErrorKind::Internal, why);
    }
}
