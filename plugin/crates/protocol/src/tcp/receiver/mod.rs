//! The receiving side of a connection, without its sockets, locks, clocks and memory.

mod life;
mod replies;
mod slots;

use std::collections::VecDeque;
use std::time::Duration;

pub use life::{FlowEnd, RecvFailure, RecvTimeouts};
use life::{Life, Situation};
use replies::{Replies, Reply};
use slots::SlotSet;

use super::frame::{ChunkHeader, Frame};
use super::reassembly::{ChunkAction, Reassembly, ReassemblyError};
use super::recv_codec::Abandoned;
use crate::handshake::hello::Refusal;
use crate::limits::{MAX_FLOWS, MAX_MESSAGE_BYTES};
use crate::tags::{MatchStep, TagMatcher, TooLong, UnexpectedDelivery};

/// A time, counted from any moment that stays the same. Those of two threads may come a little out of order.
type Time = Duration;

/// Maximum number of flows at a time. A sender has half as many, each with a replacement. This side may not know yet that some
/// are dead.
const MAX_SLOTS: usize = 4 * MAX_FLOWS;

/// How long complete messages stay unacknowledged if nothing follows them.
const IDLE_ACK_DELAY: Duration = Duration::from_millis(125);

/// After what time a flow that waits for memory of an unexpected message is read again: other connections may have given
/// theirs back.
const MEMORY_RETRY: Duration = Duration::from_millis(125);

/// A flow of one receiver. None that is added later has the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowId {
    slot: u16,
    serial: u32,
}

impl FlowId {
    /// An index. Only a flow that is added when this one has ended may have the same.
    pub fn slot(self) -> usize {
        self.slot.into()
    }
}

/// A flow that was added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddedFlow {
    /// What the receiver knows it by.
    pub id: FlowId,
    /// No flow could deliver anything before.
    pub has_recovered: bool,
}

/// A buffer for a message.
#[derive(Clone, Debug)]
pub struct PostedBuffer<B, R> {
    /// The buffer.
    pub buffer: B,
    /// Bytes that it holds.
    pub capacity: u64,
    /// What is complete when the message is in the buffer.
    pub request: R,
}

/// What to do with the next bytes of a chunk.
#[derive(Debug, PartialEq, Eq)]
pub enum Reserve<B> {
    /// The outcome for the flow's codec ([`RecvCodec::reserved`](crate::RecvCodec::reserved)). A flow whose message has no
    /// buffer is not read before [`RecvEvent::Read`].
    Chunk(ChunkAction<B>),
    /// The message is unexpected. Report memory for this many bytes by [`Receiver::handle_memory`].
    Memory(u64),
    /// Nothing is received any more.
    Stop,
}

/// The outcome of [`Receiver::handle_received`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Received {
    /// Length of the message in bytes, if it is complete now.
    pub completed: Option<u64>,
    /// When there is nothing more to read on the flow, [`Receiver::poll_reply`] has an acknowledgement.
    pub is_ack_due: bool,
}

/// What to do after a step, without the connection's lock.
#[derive(Debug, PartialEq, Eq)]
pub enum RecvEvent<R> {
    /// This request is complete. Its message has this many bytes.
    Complete(R, u64),
    /// Write the frames that [`Receiver::poll_reply`] has for this flow.
    Reply(FlowId),
    /// Read this flow, which waited for a buffer.
    Read(FlowId),
    /// Copy unexpected messages into their buffers ([`Receiver::poll_delivery`]).
    Deliver,
    /// The connection cannot continue. End it by [`Receiver::handle_failure`].
    Failed(RecvFailure),
}

/// What a receiver waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecvWaits {
    /// Requests are not complete.
    pub outstanding: bool,
    /// A flow has bytes of a message, and no buffer is posted for any.
    pub unposted: bool,
    /// A message has begun to arrive, and none was completed since.
    pub arriving: bool,
}

/// The receiving side of a connection: which message a frame belongs to, which bytes are missing, what is to be acknowledged,
/// and what ends the connection. It has no sockets, locks, clocks or memory, and its methods return at once.
///
/// There are four kinds of methods:
/// * `handle_*` tell it what has happened.
/// * `poll_*` ask what to do next. After each `handle_*` or [`Receiver::poll_reserve`], [`Receiver::poll_event`] is called
///   until there is nothing.
/// * [`Receiver::next_timeout`] says when [`Receiver::handle_timeout`] is due.
/// * The others are queries.
///
/// `B` is the buffer of a message, `R` a request, `M` the memory of an unexpected message. A flow that is read has a
/// [`RecvCodec`](crate::RecvCodec). Bytes are read between [`Receiver::poll_reserve`], which says where they belong, and
/// [`Receiver::handle_received`] or [`Receiver::handle_abandoned`]. Meanwhile other flows may be read.
#[derive(Debug)]
pub struct Receiver<B, R, M> {
    reassembly: Reassembly<Posted<B, R>>,
    tags: TagMatcher<PostedBuffer<B, R>, M>,
    /// Unexpected messages that are to be copied into their buffers.
    deliveries: VecDeque<UnexpectedDelivery<R, M>>,
    /// Number of those, and of those that are being copied.
    undelivered: usize,
    /// No message is copied any more.
    is_quiesced: bool,
    /// By slot.
    flows: Vec<Option<Flow>>,
    /// What the next flow is known by.
    next_serial: u32,
    /// The slot that received the last bytes.
    last_active: usize,
    life: Life,
    waits: RecvWaits,
    /// While messages may be unacknowledged.
    idle: Option<Idle>,
    /// When flows that wait for memory of unexpected messages are read again.
    memory_retry: Option<Time>,
    complete: Option<(R, u64)>,
    to_reply: SlotSet,
    to_read: SlotSet,
    is_delivery_due: bool,
    failure: Option<RecvFailure>,
}

/// A flow.
#[derive(Debug)]
struct Flow {
    number: u32,
    serial: u32,
    /// The message whose buffer is not posted yet. The flow delivers nothing before that.
    waits_for: Option<u64>,
    /// The peer has ended it. What it still holds can be read.
    has_ended: bool,
    replies: Replies,
}

/// The payload of a posted message.
#[derive(Debug)]
struct Posted<B, R> {
    buffer: B,
    tag: i32,
    /// `None` for an unexpected message.
    request: Option<R>,
}

#[derive(Clone, Copy, Debug)]
struct Idle {
    /// When the messages are acknowledged.
    at: Time,
    /// If this is still the first incomplete one.
    first: u64,
}

/// What happens to flows.
impl<B: Copy, R, M> Receiver<B, R, M> {
    /// A connection without flows, which is opened at this time.
    pub fn new(now: Time, timeouts: RecvTimeouts) -> Self {
        Self {
            reassembly: Reassembly::default(),
            tags: TagMatcher::default(),
            deliveries: VecDeque::new(),
            undelivered: 0,
            is_quiesced: false,
            flows: Vec::new(),
            next_serial: 0,
            last_active: 0,
            life: Life::new(now, timeouts),
            waits: RecvWaits::default(),
            idle: None,
            memory_retry: None,
            complete: None,
            to_reply: SlotSet::default(),
            to_read: SlotSet::default(),
            is_delivery_due: false,
            failure: None,
        }
    }

    /// A flow was dialed that has this number. Nothing is written to it before its dialer is answered.
    ///
    /// # Errors
    /// The connection is over, has too many flows, or has this one already.
    pub fn handle_flow(&mut self, number: u32, is_answered: bool) -> Result<AddedFlow, Refusal> {
        if !self.life.is_open() {
            return Err(Refusal::Gone);
        }
        if self.flow_with_number(number).is_some() {
            return Err(Refusal::Inconsistent);
        }
        let slot = self.flows.iter().position(Option::is_none).unwrap_or(self.flows.len());
        if slot >= MAX_SLOTS {
            return Err(Refusal::Busy);
        }
        if slot == self.flows.len() {
            self.flows.push(None);
        }
        let serial = self.next_serial;
        self.next_serial = self.next_serial.wrapping_add(1);
        let replies = Replies::new(is_answered);
        self.flows[slot] =
            Some(Flow { number, serial, waits_for: None, has_ended: false, replies });
        let has_recovered = self.life.flow_added(number, is_answered);
        Ok(AddedFlow { id: FlowId { slot: slot as u16, serial }, has_recovered })
    }

    /// The dialer of this flow knows that it is accepted.
    pub fn handle_answered(&mut self, flow: FlowId) {
        if let Some(entry) = self.flow_mut(flow) {
            entry.replies.answered();
            self.to_reply.insert(flow.slot());
            self.resend_tags(Some(flow.slot()));
        }
    }

    /// The peer has ended its direction of this flow. What the flow holds can still be read.
    pub fn handle_hang_up(&mut self, now: Time, flow: FlowId) {
        if let Some(entry) = self.flow_mut(flow) {
            entry.has_ended = true;
        }
        self.check(now);
    }

    /// This flow has ended, and is not read any more. What was reserved for it is reported. The sender sends its chunks again on
    /// others.
    pub fn handle_ended(&mut self, now: Time, flow: FlowId, end: &FlowEnd) {
        let Some(number) = self.flow_mut(flow).map(|entry| entry.number) else { return };
        self.flows[flow.slot()] = None;
        self.to_reply.remove(flow.slot());
        self.to_read.remove(flow.slot());
        self.life.flow_ended(now, end);
        if !matches!(end, FlowEnd::Expected | FlowEnd::Reported) {
            // The sender may not notice by itself if it has nothing to write. One frame is enough, but this side does not know
            // which flows still work.
            for (slot, entry) in self.flows.iter_mut().enumerate() {
                if let Some(entry) = entry {
                    entry.replies.dead_flows.push_back(number);
                    self.to_reply.insert(slot);
                }
            }
        }
        self.resend_tags(None);
        self.update_waits();
        // One that is reported is dialed again.
        if *end != FlowEnd::Reported {
            self.check(now);
        }
    }

    /// The peer has reported a dead flow by this one. The other one has ended ([`FlowEnd::Reported`]), or was not there.
    pub fn handle_report(&mut self, flow: FlowId) {
        self.life.sender_is_open();
        self.acknowledge(flow.slot());
    }

    /// The peer closes the connection once the messages below this number are delivered, and says so by this flow.
    pub fn handle_peer_close(&mut self, flow: FlowId, messages: u64) {
        self.life.peer_closes(messages);
        self.acknowledge(flow.slot());
    }

    /// The peer's messages have this tag, or this common one.
    pub fn handle_tag(&mut self, tag: i32) {
        self.tags.set_common_tag(tag);
        self.match_tags();
    }

    /// The peer's messages below this number have the common tag.
    pub fn handle_same_tag_below(&mut self, below: u64) {
        match self.tags.set_same_tag_below(below) {
            true => self.match_tags(),
            false => self.fail(RecvFailure::NotAsked),
        }
    }

    fn flow_mut(&mut self, flow: FlowId) -> Option<&mut Flow> {
        let entry = self.flows.get_mut(flow.slot())?.as_mut()?;
        (entry.serial == flow.serial).then_some(entry)
    }

    fn id(&self, slot: usize) -> Option<FlowId> {
        let entry = self.flows.get(slot)?.as_ref()?;
        Some(FlowId { slot: slot as u16, serial: entry.serial })
    }
}

/// What happens to messages.
impl<B: Copy, R, M> Receiver<B, R, M> {
    /// A buffer is posted for the next message: one without a tag, or with the common one ([`Receiver::has_common_tag`]).
    pub fn handle_buffer(&mut self, now: Time, posted: PostedBuffer<B, R>, tag: i32) {
        let message = self.post(posted, tag);
        for (slot, entry) in self.flows.iter_mut().enumerate() {
            if let Some(entry) = entry
                && entry.waits_for == Some(message)
            {
                entry.waits_for = None;
                self.to_read.insert(slot);
            }
        }
        self.update_waits();
        self.check(now);
    }

    /// Buffers are posted for messages with these tags.
    pub fn handle_tagged_buffers(
        &mut self,
        now: Time,
        group: impl IntoIterator<Item = (i32, PostedBuffer<B, R>)>,
    ) {
        for (tag, posted) in group {
            self.tags.post(tag, posted.capacity, posted);
        }
        self.match_tags();
        self.update_waits();
        self.check(now);
    }

    /// What to do with the next bytes of a chunk, which a flow has: those from `at` on, counted from the message's first.
    pub fn poll_reserve(
        &mut self,
        now: Time,
        flow: FlowId,
        chunk: &ChunkHeader,
        at: u64,
    ) -> Reserve<B> {
        if !self.life.is_open() {
            return Reserve::Stop;
        }
        let Some(number) = self.flow_mut(flow).map(|entry| entry.number) else {
            return Reserve::Stop;
        };
        self.life.chunk_came(now, number);
        self.reserve(now, flow, chunk, at).unwrap_or_else(|error| {
            self.fail(error.into());
            Reserve::Stop
        })
    }

    fn reserve(
        &mut self,
        now: Time,
        flow: FlowId,
        chunk: &ChunkHeader,
        at: u64,
    ) -> Result<Reserve<B>, ReassemblyError> {
        let buffer = |posted: &Posted<B, R>| posted.buffer;
        let mut action = self.reassembly.reserve(chunk, at)?.map(buffer);
        if matches!(action, ChunkAction::NotPosted) {
            // A flow on which no tag was sent: the tag is 0.
            self.tags.set_common_tag(0);
            if !self.tags.is_idle() {
                self.try_match_tags()?;
                action = self.reassembly.reserve(chunk, at)?.map(buffer);
            }
        }
        Ok(match action {
            ChunkAction::Deliver { .. } => {
                self.waits.arriving = true;
                Reserve::Chunk(action)
            }
            ChunkAction::Discard { .. } => Reserve::Chunk(action),
            ChunkAction::NotPosted if self.wants_unexpected(now, chunk) => {
                Reserve::Memory(chunk.total)
            }
            ChunkAction::NotPosted => self.wait(now, flow, chunk.message),
        })
    }

    /// The outcome of [`Reserve::Memory`]: memory and the buffer in it, unless the process has too much. Returns what
    /// [`Receiver::poll_reserve`] does.
    pub fn handle_memory(
        &mut self,
        now: Time,
        flow: FlowId,
        chunk: &ChunkHeader,
        at: u64,
        memory: Option<(M, B)>,
    ) -> Reserve<B> {
        if !self.life.is_open() || self.flow_mut(flow).is_none() {
            return Reserve::Stop;
        }
        match memory {
            // Meanwhile a buffer may have been posted.
            Some((memory, buffer)) if self.wants_unexpected(now, chunk) => {
                self.tags.push_unexpected(chunk.message, chunk.total, memory);
                self.reassembly.post(chunk.total, Posted { buffer, tag: 0, request: None });
                self.match_tags();
            }
            None if self.reassembly.next() <= chunk.message => {
                self.memory_retry.get_or_insert(now + MEMORY_RETRY);
                return self.wait(now, flow, chunk.message);
            }
            Some(_) | None => {}
        }
        self.poll_reserve(now, flow, chunk, at)
    }

    /// This flow waits for this message's buffer.
    fn wait(&mut self, now: Time, flow: FlowId, message: u64) -> Reserve<B> {
        if let Some(entry) = self.flow_mut(flow) {
            entry.waits_for = Some(message);
        }
        self.update_waits();
        self.check(now);
        Reserve::Chunk(ChunkAction::NotPosted)
    }

    /// A flow has received this many bytes of a message. They are in the buffer.
    pub fn handle_received(
        &mut self,
        now: Time,
        flow: FlowId,
        message: u64,
        bytes: u64,
    ) -> Received {
        self.last_active = flow.slot();
        let Some(completed) = self.reassembly.received(message, bytes) else {
            return Received::default();
        };
        self.waits.arriving = false;
        debug_assert!(self.complete.is_none(), "events are taken after each step");
        match completed.payload.request {
            Some(request) => self.complete = Some((request, completed.total)),
            None => match self.tags.unexpected_received(message, completed.total) {
                Ok(delivery) => delivery.into_iter().for_each(|delivery| self.deliver(delivery)),
                Err(too_long) => self.fail(ReassemblyError::from(too_long).into()),
            },
        }
        self.update_waits();
        let is_overdue = self.reassembly.is_ack_overdue();
        if self.life.is_peer_closing() {
            // It may wait for all remaining acknowledgements.
            self.acknowledge(flow.slot());
        } else if is_overdue {
            self.to_reply.insert(flow.slot());
        }
        if self.idle.is_none() && self.reassembly.is_ack_left() {
            self.idle = Some(self.idle_from(now));
        }
        let is_ack_due = !is_overdue && self.reassembly.is_ack_due();
        Received { completed: Some(completed.total), is_ack_due }
    }

    /// A part of a message is not received as it was reserved.
    pub fn handle_abandoned(&mut self, part: Abandoned) {
        let Abandoned { message, start, received, end } = part;
        // This does not complete the message: more is missing.
        if received > start {
            self.reassembly.received(message, received - start);
        }
        self.reassembly.release(message, received, end);
    }

    /// Posts a buffer for the next message. Returns the message's number.
    fn post(&mut self, posted: PostedBuffer<B, R>, tag: i32) -> u64 {
        let PostedBuffer { buffer, capacity, request } = posted;
        let capacity = capacity.min(MAX_MESSAGE_BYTES);
        self.reassembly.post(capacity, Posted { buffer, tag, request: Some(request) })
    }

    /// Posts the buffers with tags that are next. Fails if a message is too long for its buffer.
    fn match_tags(&mut self) {
        if let Err(too_long) = self.try_match_tags() {
            self.fail(ReassemblyError::from(too_long).into());
        }
    }

    fn try_match_tags(&mut self) -> Result<(), TooLong> {
        while let Some(step) = self.tags.next_step(self.reassembly.next())? {
            match step {
                MatchStep::Post { tag, buffer, is_advertised } => {
                    let number = self.post(buffer, tag);
                    if is_advertised && let Some(slot) = self.reply_slot() {
                        self.reply(slot, |replies| replies.buffer_tags.push_back((number, tag)));
                    }
                }
                MatchStep::AskSender => {
                    let from = self.tags.asked_from();
                    for slot in 0..self.flows.len() {
                        self.reply(slot, |replies| replies.tags_differ_from = from);
                    }
                }
                MatchStep::Deliver(delivery) => self.deliver(delivery),
            }
        }
        self.unblock();
        Ok(())
    }

    /// Reads the flows that need not wait any more: there is a buffer for their next message, or it may be unexpected.
    fn unblock(&mut self) {
        let next = self.reassembly.next();
        let takes_unexpected = self.memory_retry.is_none() && self.tags.accepts_unexpected(next);
        for (slot, entry) in self.flows.iter_mut().enumerate() {
            let is_ready = |message| message < next || message == next && takes_unexpected;
            if let Some(entry) = entry
                && entry.waits_for.is_some_and(is_ready)
            {
                entry.waits_for = None;
                self.to_read.insert(slot);
            }
        }
    }

    /// Whether this chunk's message is the next one, is unexpected, and may have memory.
    fn wants_unexpected(&mut self, now: Time, chunk: &ChunkHeader) -> bool {
        let message = chunk.message;
        if message != self.reassembly.next() || !self.tags.accepts_unexpected(message) {
            return false;
        }
        let has_room = self.tags.has_unexpected_room(chunk.total);
        if !has_room {
            self.memory_retry.get_or_insert(now + MEMORY_RETRY);
        }
        has_room
    }

    /// An unexpected message is to be copied into its buffer.
    fn deliver(&mut self, delivery: UnexpectedDelivery<PostedBuffer<B, R>, M>) {
        let UnexpectedDelivery { buffer, length, memory, bytes } = delivery;
        let buffer = buffer.request;
        self.deliveries.push_back(UnexpectedDelivery { buffer, length, memory, bytes });
        self.undelivered += 1;
        self.is_delivery_due = true;
    }

    /// The next unexpected message that is to be copied into its buffer, after which its request is complete. One at a time:
    /// [`Receiver::handle_delivered`] follows.
    pub fn poll_delivery(&mut self) -> Option<UnexpectedDelivery<R, M>> {
        if self.is_quiesced { None } else { self.deliveries.pop_front() }
    }

    /// An unexpected message is copied, and its memory is free again: `bytes` of its [`UnexpectedDelivery`].
    pub fn handle_delivered(&mut self, bytes: u64) {
        self.undelivered -= 1;
        self.tags.memory_freed(bytes);
        if self.memory_retry.take().is_some() {
            self.unblock();
        }
        self.update_waits();
    }
}

/// Replies, timeouts and the end.
impl<B: Copy, R, M> Receiver<B, R, M> {
    /// The next thing to do.
    pub fn poll_event(&mut self) -> Option<RecvEvent<R>> {
        if let Some((request, bytes)) = self.complete.take() {
            return Some(RecvEvent::Complete(request, bytes));
        }
        if let Some(flow) = self.to_reply.pop().and_then(|slot| self.id(slot)) {
            return Some(RecvEvent::Reply(flow));
        }
        if let Some(flow) = self.to_read.pop().and_then(|slot| self.id(slot)) {
            return Some(RecvEvent::Read(flow));
        }
        if std::mem::take(&mut self.is_delivery_due) {
            return Some(RecvEvent::Deliver);
        }
        self.failure.take().map(RecvEvent::Failed)
    }

    /// The next frame to write by this flow. `unposted_ms` is how long messages have waited for a buffer so far
    /// ([`Frame::Ack`]).
    pub fn poll_reply(&mut self, flow: FlowId, unposted_ms: u32) -> Option<Frame> {
        let is_ack_due = self.reassembly.is_ack_due();
        let reply = self.flow_mut(flow)?.replies.next(is_ack_due)?;
        Some(match reply {
            Reply::Frame(frame) => frame,
            Reply::Ack => Frame::Ack(self.reassembly.ack(), unposted_ms),
            Reply::Close => Frame::Close(self.reassembly.ack()),
        })
    }

    /// When [`Receiver::handle_timeout`] is due.
    pub fn next_timeout(&self) -> Option<Time> {
        if !self.life.is_open() {
            return None;
        }
        // Rarely more than the first one.
        let stuck = self.life.is_stuck().then(|| self.life.deadline(&self.situation())).flatten();
        let idle = self.idle.map(|idle| idle.at);
        idle.into_iter().chain(self.memory_retry).chain(stuck).min()
    }

    /// It is this time.
    pub fn handle_timeout(&mut self, now: Time) {
        if !self.life.is_open() {
            return;
        }
        self.check(now);
        if let Some(idle) = self.idle.filter(|idle| idle.at <= now) {
            self.acknowledge_idle(now, idle);
        }
        if self.memory_retry.is_some_and(|at| at <= now) {
            self.memory_retry = None;
            self.match_tags();
        }
    }

    /// Acknowledges messages if nothing has followed them.
    fn acknowledge_idle(&mut self, now: Time, idle: Idle) {
        self.idle = None;
        if !self.reassembly.is_ack_left() {
            return;
        }
        if idle.first < self.reassembly.first_incomplete() {
            self.idle = Some(self.idle_from(now));
            return;
        }
        // Without a flow, the sender asks when it has dialed one: it reports those that it has lost.
        let is_there = |slot: &usize| self.flows.get(*slot).is_some_and(Option::is_some);
        let other = || (0..self.flows.len()).find(is_there);
        let slot = Some(self.last_active).filter(is_there).or_else(other);
        slot.into_iter().for_each(|slot| self.acknowledge(slot));
    }

    fn idle_from(&self, now: Time) -> Idle {
        Idle { at: now + IDLE_ACK_DELAY, first: self.reassembly.first_incomplete() }
    }

    /// The connection has failed, here or by what its owner has found. Nothing is received any more. All flows tell the peer.
    pub fn handle_failure(&mut self) {
        self.life.fail();
        self.close_flows();
    }

    /// The owner closes the connection. Nothing more is reserved, and no flow is added. When no flow is read any more and no
    /// message is copied, [`Receiver::handle_quiesced`] follows. Returns whether that is new.
    pub fn handle_close(&mut self) -> bool {
        let is_new = !self.life.is_closed();
        self.life.close();
        self.update_waits();
        is_new
    }

    /// No flow is read any more, and no message is copied from now on: requests that are not complete never will be.
    pub fn handle_quiesced(&mut self) {
        self.is_quiesced = true;
    }

    /// Writes to all flows what has been received, and that nothing more is taken.
    pub fn close_flows(&mut self) {
        for slot in 0..self.flows.len() {
            self.reply(slot, Replies::close);
        }
    }

    /// Acknowledges by the flow in this slot, in any case.
    fn acknowledge(&mut self, slot: usize) {
        self.reply(slot, |replies| replies.wants_ack = true);
    }

    fn reply(&mut self, slot: usize, change: impl FnOnce(&mut Replies)) {
        if let Some(entry) = self.flows.get_mut(slot).and_then(Option::as_mut) {
            change(&mut entry.replies);
            self.to_reply.insert(slot);
        }
    }

    /// A flow for frames to the sender: the one that received the last bytes, if it is there.
    fn reply_slot(&self) -> Option<usize> {
        let fits = |slot: &usize| {
            let entry = self.flows.get(*slot).and_then(Option::as_ref);
            entry.is_some_and(|entry| !entry.has_ended)
        };
        Some(self.last_active).filter(fits).or_else(|| (0..self.flows.len()).find(fits))
    }

    /// Sends tag frames again that may be lost with a flow, by the flow in this slot or another one.
    fn resend_tags(&mut self, slot: Option<usize>) {
        let (asked_from, advertises) = (self.tags.asked_from(), self.tags.advertises());
        if asked_from.is_none() && !advertises {
            return;
        }
        let Some(slot) = slot.or_else(|| self.reply_slot()) else { return };
        let Some(entry) = self.flows[slot].as_mut() else { return };
        entry.replies.tags_differ_from = asked_from;
        if advertises {
            let posted = self.reassembly.posted().filter(|(_, posted)| posted.request.is_some());
            entry.replies.buffer_tags =
                posted.map(|(number, posted)| (number, posted.tag)).collect();
        }
        self.to_reply.insert(slot);
    }

    fn fail(&mut self, failure: RecvFailure) {
        if self.life.is_open() {
            self.life.fail();
            self.failure = Some(failure);
        }
    }

    /// Fails if the posted buffers can never be filled.
    fn check(&mut self, now: Time) {
        if !self.life.is_open() {
            return;
        }
        let situation = self.situation();
        let due = || self.reassembly.posted().next().map_or(0, |(number, _)| number);
        if let Some(failure) = self.life.check(now, &situation, due) {
            self.fail(failure);
        }
    }

    fn situation(&self) -> Situation {
        let mut flows = self.flows.iter().flatten();
        let has_open_flow = flows.any(|entry| entry.waits_for.is_none());
        Situation {
            has_open_flow,
            has_live_flow: has_open_flow
                || self.flows.iter().flatten().any(|entry| !entry.has_ended),
            is_outstanding: !has_open_flow && self.outstanding() > 0,
            complete_below: self.reassembly.first_incomplete(),
        }
    }

    fn update_waits(&mut self) {
        let outstanding = self.requests() > 0;
        let is_wanted = || self.flows.iter().flatten().any(|entry| entry.waits_for.is_some());
        self.waits = RecvWaits {
            outstanding,
            unposted: !outstanding && !self.life.is_closed() && is_wanted(),
            arriving: outstanding && self.waits.arriving,
        };
    }
}

/// Queries.
impl<B: Copy, R, M> Receiver<B, R, M> {
    /// Whether it is neither closed nor failed: flows may be added.
    pub fn is_open(&self) -> bool {
        self.life.is_open()
    }

    /// The flow that has this number.
    pub fn flow_with_number(&self, number: u32) -> Option<FlowId> {
        let has_number =
            |entry: &Option<Flow>| entry.as_ref().is_some_and(|entry| entry.number == number);
        self.id(self.flows.iter().position(has_number)?)
    }

    /// Whether a buffer with this tag can be posted for the next message at once.
    pub fn has_common_tag(&self, tag: i32) -> bool {
        self.tags.has_common_tag(tag)
    }

    /// Number of buffers that wait for their messages.
    fn outstanding(&self) -> usize {
        self.reassembly.outstanding() + self.tags.waiting()
    }

    /// Number of buffers whose requests are not complete.
    pub fn requests(&self) -> usize {
        self.outstanding() + self.undelivered
    }

    /// Bytes that the messages still lack for which buffers are posted, as far as their lengths are known.
    pub fn missing_bytes(&self) -> u64 {
        self.reassembly.missing_bytes()
    }

    /// What it waits for.
    pub fn waits(&self) -> RecvWaits {
        self.waits
    }
}

#[cfg(test)]
mod tests;
