//! The scheduler: cuts messages into chunks on demand, and keeps track of bytes to retransmit.

use std::collections::VecDeque;

use super::frame::ChunkHeader;
use crate::limits::{CHUNK_ALIGN, MAX_MESSAGE_BYTES};

/// How messages are shared out to flows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Schedule {
    /// Whichever flow can take bytes takes the next chunk.
    #[default]
    Pull,
    /// Each message is shared out equally, round-robin over all flows, however fast they are. A flow's share goes to
    /// others only when the flow fails.
    Static {
        /// Minimum bytes of a share, except the last one of a message.
        min_share: u64,
    },
}

/// The frame that a flow sends next.
#[derive(Debug, PartialEq, Eq)]
pub enum NextFrame<'a, T> {
    /// Report a dead flow to the peer.
    FlowDead(u32),
    /// Send a chunk of the message that was pushed with this value.
    Chunk(ChunkHeader, &'a T),
}

/// A message that the peer has received, and that no flow is writing any more.
#[derive(Debug, PartialEq, Eq)]
pub struct SentMessage<T> {
    /// The value that the message was pushed with.
    pub payload: T,
    /// Its length in bytes.
    pub total: u64,
}

/// The peer acknowledged a message that was never sent: the two sides disagree.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer acknowledged messages below {below}, but only those below {sent} were sent")]
pub struct AckError {
    below: u64,
    sent: u64,
}

/// The messages of one connection that the peer has not acknowledged.
///
/// Flows pull: a flow that can take bytes calls [`Scheduler::next`] and later
/// [`Scheduler::chunk_written`]. All of a message is assigned to flows before any of the next. The scheduler
/// remembers a flow's pieces until the peer acknowledges the message. When the flow fails
/// ([`Scheduler::flow_failed`]), they are assigned to others, each of which first reports the dead flow.
///
/// A flow is identified by its slot, a small number that is reused when the flow is gone.
#[derive(Debug)]
pub struct Scheduler<T> {
    /// Messages not acknowledged, or still being written; the front is the oldest.
    messages: VecDeque<Outgoing<T>>,
    /// Number of the front message.
    first: u64,
    /// The peer has received all messages below this number.
    acked: u64,
    /// Index in `messages` of the one to cut next.
    current: usize,
    /// Bytes of messages that are not assigned yet, without retransmitted ones.
    unassigned: u64,
    flows: Vec<Flow>,
    /// Pieces that dead flows may not have delivered, oldest first.
    retransmit: VecDeque<Piece>,
    /// Dead flows that may not have been reported yet.
    dead_flows: VecDeque<DeadFlow>,
    /// Number of the front of `dead_flows`, counting all flows that failed.
    first_dead: u64,
    schedule: Schedule,
    /// The slot that gets the next share.
    next_share: usize,
}

#[derive(Debug)]
struct Outgoing<T> {
    total: u64,
    /// Bytes assigned.
    assigned: u64,
    /// Bytes that flows have written, including retransmitted ones.
    written: u64,
    /// Number of flows that are writing a chunk of it.
    writers: u32,
    ack_wanted: bool,
    payload: T,
}

/// A range of a message. Messages are short enough for 32 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Piece {
    message: u64,
    offset: u32,
    length: u32,
}

#[derive(Debug, Default)]
struct Flow {
    open: bool,
    /// Pieces assigned to it, of messages that may not be acknowledged.
    assigned: VecDeque<Piece>,
    /// The latest message of which a piece was assigned to it.
    latest: u64,
    /// Its static shares that are not assigned yet.
    static_share: VecDeque<Piece>,
    /// Pieces that it is writing, in this order.
    writing: VecDeque<Piece>,
    /// Number of the first dead flow that it has not reported.
    next_dead: u64,
}

#[derive(Debug)]
struct DeadFlow {
    flow: u32,
    /// The flow's pieces belong to messages below this number.
    until: u64,
    reported: bool,
}

impl<T> Default for Scheduler<T> {
    fn default() -> Self {
        Self::new(Schedule::default())
    }
}

impl<T> Scheduler<T> {
    /// A scheduler without flows and messages.
    pub fn new(schedule: Schedule) -> Self {
        Self {
            messages: VecDeque::new(),
            first: 0,
            acked: 0,
            current: 0,
            unassigned: 0,
            flows: Vec::new(),
            retransmit: VecDeque::new(),
            dead_flows: VecDeque::new(),
            first_dead: 0,
            schedule,
            next_share: 0,
        }
    }

    /// A flow takes this slot, which must be free.
    pub fn flow_opened(&mut self, slot: usize) {
        if self.flows.len() <= slot {
            self.flows.resize_with(slot + 1, Flow::default);
        }
        let flow = &mut self.flows[slot];
        debug_assert!(!flow.open && flow.assigned.is_empty());
        *flow = Flow { open: true, next_dead: self.first_dead, ..Flow::default() };
    }

    /// Queues a message of `total` bytes (at most [`MAX_MESSAGE_BYTES`]; 0 is a message too) and
    /// returns its number. `ack_wanted`: its sender waits for the acknowledgement.
    pub fn push(&mut self, total: u64, ack_wanted: bool, payload: T) -> u64 {
        debug_assert!(total <= MAX_MESSAGE_BYTES);
        let min_share = match self.schedule {
            Schedule::Pull => None,
            Schedule::Static { min_share } => Some(min_share),
        };
        // Static shares are all assigned now, and not on demand.
        let assigned = min_share.map_or(0, |_| total);
        self.unassigned += total - assigned;
        self.messages.push_back(Outgoing {
            total,
            assigned,
            written: 0,
            writers: 0,
            ack_wanted,
            payload,
        });
        let number = self.next_message() - 1;
        if let Some(min_share) = min_share {
            self.current += 1;
            self.share_out(number, total, min_share);
        }
        number
    }

    /// Shares a message out to the flows, round-robin.
    fn share_out(&mut self, message: u64, total: u64, min_share: u64) {
        let flows = self.flows.iter().filter(|flow| flow.open).count() as u64;
        let share = total.div_ceil(flows.max(1)).max(min_share).next_multiple_of(CHUNK_ALIGN);
        let mut offset = 0;
        loop {
            let length = share.min(total - offset);
            let piece = Piece { message, offset: offset as u32, length: length as u32 };
            let order = (self.next_share..self.flows.len()).chain(0..self.next_share);
            match order.into_iter().find(|slot| self.flows[*slot].open) {
                Some(slot) => {
                    self.flows[slot].static_share.push_back(piece);
                    self.next_share = slot + 1;
                }
                // The next flow that opens takes it.
                None => self.retransmit.push_back(piece),
            }
            offset += length;
            if offset == total {
                return;
            }
        }
    }

    /// What the flow in this slot must send; `None` when there is nothing. A chunk counts as being
    /// written until [`Scheduler::chunk_written`]; further ones may be taken before.
    ///
    /// `limit` is the longest chunk wanted, in bytes, rounded down to a multiple of 128, but never
    /// below 128. The last chunk of a message takes what is left.
    pub fn next(&mut self, slot: usize, limit: u64) -> Option<NextFrame<'_, T>> {
        let flow = &mut self.flows[slot];
        debug_assert!(flow.open);
        flow.next_dead = flow.next_dead.max(self.first_dead);
        if let Some(dead) = self.dead_flows.get_mut((flow.next_dead - self.first_dead) as usize) {
            flow.next_dead += 1;
            dead.reported = true;
            let number = dead.flow;
            self.remove_dead_flows();
            return Some(NextFrame::FlowDead(number));
        }
        let limit = (limit - limit % CHUNK_ALIGN).clamp(CHUNK_ALIGN, MAX_MESSAGE_BYTES) as u32;
        let piece = match self.schedule {
            Schedule::Pull => self.cut_retransmit(slot, limit).or_else(|| self.cut_new(limit)),
            Schedule::Static { .. } => self.cut_static_share(slot, limit),
        }?;
        let flow = &mut self.flows[slot];
        while flow.assigned.front().is_some_and(|piece| piece.message < self.acked) {
            flow.assigned.pop_front();
        }
        flow.assigned.push_back(piece);
        flow.latest = flow.latest.max(piece.message);
        flow.writing.push_back(piece);
        let message = &mut self.messages[(piece.message - self.first) as usize];
        message.writers += 1;
        let header = ChunkHeader {
            message: piece.message,
            offset: piece.offset.into(),
            length: piece.length,
            total: message.total,
            ack_wanted: message.ack_wanted,
        };
        Some(NextFrame::Chunk(header, &message.payload))
    }

    /// A piece to retransmit, unless the flow carries a piece of a later message: the peer may
    /// have no buffer for that before it has received this one, and would wait for ever.
    fn cut_retransmit(&mut self, slot: usize, limit: u32) -> Option<Piece> {
        while self.retransmit.front().is_some_and(|piece| piece.message < self.acked) {
            self.retransmit.pop_front();
        }
        let latest = self.flows[slot].latest;
        let piece = self.retransmit.front_mut()?;
        if latest >= self.acked && latest > piece.message {
            return None;
        }
        cut_front(&mut self.retransmit, limit)
    }

    /// A piece of the flow's static share, or an earlier one to retransmit: nothing goes behind a later message.
    fn cut_static_share(&mut self, slot: usize, limit: u32) -> Option<Piece> {
        let acked = self.acked;
        let share = &mut self.flows[slot].static_share;
        // The peer has acknowledged what was never sent.
        while share.front().is_some_and(|piece| piece.message < acked) {
            share.pop_front();
        }
        let next = share.front().copied();
        let repeated = self.retransmit.iter().find(|piece| piece.message >= acked);
        if repeated.is_some_and(|piece| next.is_none_or(|next| *piece < next)) {
            let piece = self.cut_retransmit(slot, limit);
            if piece.is_some() {
                return piece;
            }
        }
        cut_front(&mut self.flows[slot].static_share, limit)
    }

    fn cut_new(&mut self, limit: u32) -> Option<Piece> {
        let message = self.messages.get_mut(self.current)?;
        let offset = message.assigned;
        let length = u64::from(limit).min(message.total - offset);
        message.assigned += length;
        self.unassigned -= length;
        let number = self.first + self.current as u64;
        if message.assigned == message.total {
            self.current += 1;
        }
        Some(Piece { message: number, offset: offset as u32, length: length as u32 })
    }

    /// The flow in this slot has written the first of its chunks in full. Returns the message's number
    /// when all of it is written and its sender does not wait for the acknowledgement. As long as nothing of it
    /// is retransmitted, its payload may be changed ([`Scheduler::payload_mut`]).
    pub fn chunk_written(&mut self, slot: usize) -> Option<u64> {
        let piece = self.flows.get_mut(slot)?.writing.pop_front()?;
        let index = usize::try_from(piece.message.checked_sub(self.first)?).ok()?;
        let message = self.messages.get_mut(index)?;
        message.writers -= 1;
        message.written += u64::from(piece.length);
        let whole = message.written >= message.total && message.writers == 0;
        (whole && !message.ack_wanted).then_some(piece.message)
    }

    /// The value that a message was pushed with, unless it is taken or being written.
    pub fn payload_mut(&mut self, message: u64) -> Option<&mut T> {
        let index = usize::try_from(message.checked_sub(self.first)?).ok()?;
        let message = self.messages.get_mut(index).filter(|message| message.writers == 0)?;
        Some(&mut message.payload)
    }

    /// The flow in this slot will not write the rest of its chunks.
    fn stop_writing(&mut self, slot: usize) {
        while let Some(piece) = self.flows[slot].writing.pop_front() {
            let index = piece.message.checked_sub(self.first).map(|index| index as usize);
            if let Some(message) = index.and_then(|index| self.messages.get_mut(index)) {
                message.writers -= 1;
            }
        }
    }

    /// The peer has received all messages below this number. [`Scheduler::pop_sent`] returns them.
    ///
    /// # Errors
    /// [`AckError`] when some of them were not sent.
    pub fn acked(&mut self, below: u64) -> Result<(), AckError> {
        let sent = self.first + self.current as u64;
        if below > sent {
            return Err(AckError { below, sent });
        }
        self.acked = self.acked.max(below);
        self.remove_dead_flows();
        Ok(())
    }

    /// Takes the oldest message, if the peer has received it and no flow is writing a chunk of it: its
    /// memory is not needed any more. To be called until it returns none, after
    /// [`Scheduler::acked`], [`Scheduler::chunk_written`] and [`Scheduler::flow_failed`].
    pub fn pop_sent(&mut self) -> Option<SentMessage<T>> {
        if self.first >= self.acked || self.messages.front()?.writers > 0 {
            return None;
        }
        let message = self.messages.pop_front()?;
        self.first += 1;
        // It was assigned in full, or the peer could not have received it.
        self.current -= 1;
        Some(SentMessage { payload: message.payload, total: message.total })
    }

    /// The flow in this slot, which the peer knows by this number, is dead. Its pieces that the peer has not
    /// acknowledged are assigned again. The slot is free. Returns the number of bytes to retransmit.
    pub fn flow_failed(&mut self, slot: usize, number: u32) -> u64 {
        self.stop_writing(slot);
        let until = self.first_unassigned();
        let flow = &mut self.flows[slot];
        flow.open = false;
        let (acked, before) = (self.acked, self.retransmit.len());
        self.retransmit.extend(flow.assigned.drain(..).filter(|piece| piece.message >= acked));
        let bytes = self.retransmit.range(before..).map(|piece| u64::from(piece.length)).sum();
        // Not counted as retransmitted: it was never sent.
        self.retransmit.extend(flow.static_share.drain(..).filter(|piece| piece.message >= acked));
        self.retransmit.make_contiguous().sort_unstable();
        self.dead_flows.push_back(DeadFlow { flow: number, until, reported: false });
        bytes
    }

    /// Whether the peer has acknowledged all that was assigned to the flow in this slot.
    pub fn is_drained(&mut self, slot: usize) -> bool {
        let acked = self.acked;
        let flow = &mut self.flows[slot];
        flow.assigned.retain(|piece| piece.message >= acked);
        flow.assigned.is_empty() && flow.static_share.is_empty() && flow.writing.is_empty()
    }

    /// The flow in this slot, which is drained, is closed. The slot is free.
    pub fn flow_closed(&mut self, slot: usize) {
        debug_assert!(self.is_drained(slot));
        self.flows[slot].open = false;
    }

    /// Whether [`Scheduler::next`] has a chunk for a new flow.
    pub fn has_work(&self) -> bool {
        self.current < self.messages.len() || self.must_retransmit()
    }

    /// Length in bytes of the message that is cut next, if nothing of it is assigned yet and nothing must be retransmitted.
    pub fn next_unstarted_message(&self) -> Option<u64> {
        let next = self.messages.get(self.current).filter(|message| message.assigned == 0);
        next.filter(|_| !self.must_retransmit()).map(|message| message.total)
    }

    /// Whether the flow in this slot has a static share that is not assigned yet.
    pub fn has_static_share(&self, slot: usize) -> bool {
        self.flows.get(slot).is_some_and(|flow| !flow.static_share.is_empty())
    }

    /// Whether something must be retransmitted. Flows that carry later messages cannot take it: if
    /// none takes it, a new flow is needed.
    pub fn must_retransmit(&self) -> bool {
        self.retransmit.back().is_some_and(|piece| piece.message >= self.acked)
    }

    /// Bytes that no flow has taken yet, without those to retransmit.
    pub fn unassigned_bytes(&self) -> u64 {
        self.unassigned
    }

    /// Number of the message that will be pushed next.
    pub fn next_message(&self) -> u64 {
        self.first + self.messages.len() as u64
    }

    /// Number of the oldest message that is not taken.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// Whether there is no message.
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// The messages that are not acknowledged, oldest first.
    pub fn unacked(&self) -> impl Iterator<Item = &T> {
        let done = self.acked.saturating_sub(self.first) as usize;
        self.messages.iter().skip(done).map(|message| &message.payload)
    }

    /// Number of the first message of which nothing was assigned.
    fn first_unassigned(&self) -> u64 {
        let partly = self.messages.get(self.current).is_some_and(|message| message.assigned > 0);
        self.first + self.current as u64 + u64::from(partly)
    }

    /// Removes dead flows that were reported and of which nothing is left to retransmit.
    fn remove_dead_flows(&mut self) {
        let acked = self.acked;
        while self.dead_flows.front().is_some_and(|dead| dead.reported && dead.until <= acked) {
            self.dead_flows.pop_front();
            self.first_dead += 1;
        }
    }
}

/// Takes at most `limit` bytes from the front.
fn cut_front(pieces: &mut VecDeque<Piece>, limit: u32) -> Option<Piece> {
    let piece = pieces.front_mut()?;
    if piece.length <= limit {
        return pieces.pop_front();
    }
    let cut = Piece { length: limit, ..*piece };
    piece.offset += limit;
    piece.length -= limit;
    Some(cut)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::frame::Frame;
    use proptest::prelude::*;

    fn scheduler(flows: usize) -> Scheduler<char> {
        let mut scheduler = Scheduler::default();
        (0..flows).for_each(|slot| scheduler.flow_opened(slot));
        scheduler
    }

    /// Takes and writes the next chunk: message, offset, length.
    fn take(scheduler: &mut Scheduler<char>, slot: usize, limit: u64) -> (u64, u64, u32) {
        let Some(NextFrame::Chunk(header, _)) = scheduler.next(slot, limit) else {
            panic!("no chunk")
        };
        scheduler.chunk_written(slot);
        (header.message, header.offset, header.length)
    }

    #[test]
    fn scheduler_sends_an_empty_message_as_one_chunk() {
        let mut scheduler = scheduler(1);
        assert_eq!(scheduler.push(0, true, 'a'), 0);
        assert_eq!(take(&mut scheduler, 0, 4096), (0, 0, 0));
        assert_eq!(scheduler.next(0, 4096), None);
        assert_eq!(scheduler.pop_sent(), None);
        scheduler.acked(1).unwrap();
        assert_eq!(scheduler.pop_sent(), Some(SentMessage { payload: 'a', total: 0 }));
        assert!(scheduler.is_empty());
    }

    #[test]
    fn scheduler_keeps_messages_that_are_being_written() {
        let mut scheduler = scheduler(2);
        scheduler.push(200, true, 'a');
        assert_eq!(take(&mut scheduler, 0, 128), (0, 0, 128));
        assert!(matches!(scheduler.next(1, 128), Some(NextFrame::Chunk(..))));
        scheduler.acked(1).unwrap();
        assert_eq!(scheduler.pop_sent(), None);
        scheduler.chunk_written(1);
        assert_eq!(scheduler.pop_sent(), Some(SentMessage { payload: 'a', total: 200 }));
    }

    #[test]
    fn scheduler_releases_messages_without_ack_when_written() {
        let mut scheduler = scheduler(2);
        scheduler.push(200, false, 'a');
        scheduler.next(0, 128).unwrap();
        scheduler.next(1, 128).unwrap();
        assert_eq!(scheduler.chunk_written(1), None);
        assert_eq!(scheduler.chunk_written(0), Some(0));
        assert_eq!(scheduler.payload_mut(0), Some(&mut 'a'));
        *scheduler.payload_mut(0).unwrap() = 'b';
        // If the flow fails, the new payload is retransmitted.
        scheduler.flow_failed(0, 0);
        assert_eq!(scheduler.next(1, 128), Some(NextFrame::FlowDead(0)));
        assert!(matches!(scheduler.next(1, 128), Some(NextFrame::Chunk(_, 'b'))));
    }

    #[test]
    fn scheduler_refuses_acks_of_unsent_messages() {
        let mut scheduler = scheduler(1);
        scheduler.push(200, true, 'a');
        scheduler.push(200, true, 'b');
        take(&mut scheduler, 0, 128);
        assert_eq!(scheduler.acked(1), Err(AckError { below: 1, sent: 0 }));
        take(&mut scheduler, 0, 128);
        scheduler.acked(1).unwrap();
    }

    #[test]
    fn scheduler_retransmits_after_reporting_the_dead_flow() {
        let mut scheduler = scheduler(3);
        scheduler.push(1000, true, 'a');
        scheduler.push(100, true, 'b');
        assert_eq!(take(&mut scheduler, 0, 512), (0, 0, 512));
        assert_eq!(take(&mut scheduler, 1, 512), (0, 512, 488));
        assert_eq!(take(&mut scheduler, 0, 512), (1, 0, 100));
        assert!(!scheduler.has_work());
        scheduler.flow_failed(0, 70);
        assert!(scheduler.has_work());
        assert_eq!(scheduler.next(1, 256), Some(NextFrame::FlowDead(70)));
        assert_eq!(take(&mut scheduler, 1, 256), (0, 0, 256));
        assert!(scheduler.must_retransmit());
        // A later flow reports it too, since the order in which the peer reads the flows is not known.
        scheduler.flow_opened(0);
        assert_eq!(scheduler.next(0, 256), Some(NextFrame::FlowDead(70)));
        assert_eq!(take(&mut scheduler, 0, 256), (0, 256, 256));
        scheduler.acked(1).unwrap();
        assert_eq!(scheduler.next(2, 256), Some(NextFrame::FlowDead(70)));
        assert_eq!(take(&mut scheduler, 2, 256), (1, 0, 100));
        scheduler.acked(2).unwrap();
        assert!(scheduler.is_drained(0) && scheduler.is_drained(1) && scheduler.is_drained(2));
        scheduler.flow_opened(3);
        assert_eq!(scheduler.next(3, 256), None, "all that the dead flow carried is acknowledged");
    }

    fn static_scheduler(flows: usize) -> Scheduler<char> {
        let mut scheduler = Scheduler::new(Schedule::Static { min_share: 256 });
        (0..flows).for_each(|slot| scheduler.flow_opened(slot));
        scheduler
    }

    #[test]
    fn static_shares_are_equal_for_flows_of_any_speed() {
        let mut scheduler = static_scheduler(3);
        scheduler.push(1500, true, 'a');
        scheduler.push(300, true, 'b');
        scheduler.push(0, true, 'c');
        assert_eq!(take(&mut scheduler, 1, 4096), (0, 512, 512));
        assert_eq!(take(&mut scheduler, 1, 4096), (1, 256, 44));
        assert_eq!(scheduler.next(1, 4096), None, "the rest is the share of others");
        assert!(
            !scheduler.has_static_share(1)
                && scheduler.has_static_share(0)
                && scheduler.has_static_share(2)
        );
        assert_eq!(take(&mut scheduler, 0, 256), (0, 0, 256));
        assert_eq!(take(&mut scheduler, 0, 4096), (0, 256, 256));
        assert_eq!(take(&mut scheduler, 0, 4096), (1, 0, 256));
        assert_eq!(take(&mut scheduler, 2, 4096), (0, 1024, 476));
        assert_eq!(take(&mut scheduler, 2, 4096), (2, 0, 0));
        assert!((0..3).all(|slot| scheduler.next(slot, 4096).is_none()));
    }

    #[test]
    fn static_share_of_a_dead_flow_goes_to_others() {
        let mut scheduler = static_scheduler(2);
        scheduler.push(1024, true, 'a');
        scheduler.push(1024, true, 'b');
        assert_eq!(take(&mut scheduler, 0, 256), (0, 0, 256));
        assert_eq!(scheduler.flow_failed(0, 7), 256, "only what was sent is retransmitted");
        assert_eq!(scheduler.next(1, 4096), Some(NextFrame::FlowDead(7)));
        assert_eq!(take(&mut scheduler, 1, 4096), (0, 0, 256));
        assert_eq!(take(&mut scheduler, 1, 4096), (0, 256, 256));
        assert_eq!(take(&mut scheduler, 1, 4096), (0, 512, 512));
        assert_eq!(take(&mut scheduler, 1, 4096), (1, 0, 512));
        assert_eq!(take(&mut scheduler, 1, 4096), (1, 512, 512));
        // Without any flow it is for the first that opens.
        scheduler.flow_failed(1, 8);
        scheduler.acked(2).unwrap();
        scheduler.push(600, true, 'c');
        scheduler.flow_opened(0);
        assert_eq!(scheduler.next(0, 4096), Some(NextFrame::FlowDead(8)));
        assert_eq!(take(&mut scheduler, 0, 4096), (2, 0, 600));
    }

    #[test]
    fn scheduler_never_retransmits_behind_a_later_message() {
        let mut scheduler = scheduler(2);
        scheduler.push(100, true, 'a');
        scheduler.push(100, true, 'b');
        assert_eq!(take(&mut scheduler, 0, 128), (0, 0, 100));
        assert_eq!(take(&mut scheduler, 1, 128), (1, 0, 100));
        scheduler.flow_failed(0, 0);
        assert_eq!(scheduler.next(1, 128), Some(NextFrame::FlowDead(0)));
        assert_eq!(scheduler.next(1, 128), None);
        assert!(scheduler.must_retransmit());
        scheduler.flow_opened(2);
        assert_eq!(scheduler.next(2, 128), Some(NextFrame::FlowDead(0)));
        assert_eq!(take(&mut scheduler, 2, 128), (0, 0, 100));
        assert!(!scheduler.must_retransmit());
    }

    #[test]
    fn scheduler_reports_dead_flows_without_retransmission() {
        let mut scheduler = scheduler(2);
        scheduler.flow_failed(0, 0);
        assert_eq!(scheduler.next(1, 128), Some(NextFrame::FlowDead(0)));
        assert_eq!(scheduler.next(1, 128), None);
    }

    #[test]
    fn scheduler_assigns_several_messages_to_a_flow_at_once() {
        let mut scheduler = scheduler(2);
        "abc".chars().for_each(|payload| {
            scheduler.push(100, false, payload);
        });
        assert_eq!(scheduler.next_unstarted_message(), Some(100));
        for _ in 0..3 {
            assert!(matches!(scheduler.next(0, 128), Some(NextFrame::Chunk(..))));
        }
        assert_eq!(scheduler.next_unstarted_message(), None);
        assert_eq!(scheduler.chunk_written(0), Some(0));
        assert!(scheduler.payload_mut(0).is_some());
        assert!(scheduler.payload_mut(1).is_none(), "being written");
        assert_eq!(scheduler.flow_failed(0, 0), 300);
        assert_eq!(scheduler.next(1, 128), Some(NextFrame::FlowDead(0)));
        assert_eq!(scheduler.next_unstarted_message(), None, "retransmission comes first");
        (0..3).for_each(|message| assert_eq!(take(&mut scheduler, 1, 128), (message, 0, 100)));
    }

    proptest! {
        #[test]
        fn scheduler_chunks_cover_each_message_once(
            totals in proptest::collection::vec(0u64..5000, 1..20),
            limits in proptest::collection::vec(0u64..3000, 1..20),
        ) {
            let mut scheduler = Scheduler::default();
            scheduler.flow_opened(0);
            for total in &totals {
                scheduler.push(*total, true, *total);
            }
            let mut limits = limits.iter().cycle();
            let (mut message, mut offset) = (0, 0);
            while let Some(next) = scheduler.next(0, *limits.next().unwrap()) {
                let NextFrame::Chunk(header, payload) = next else { panic!("{next:?}") };
                prop_assert_eq!(Frame::decode(&Frame::Chunk(header).encode()), Ok(Frame::Chunk(header)));
                prop_assert_eq!((header.message, header.offset), (message, offset));
                prop_assert_eq!(header.total, totals[message as usize]);
                prop_assert_eq!(header.total, *payload);
                offset = header.end();
                if offset == header.total {
                    (message, offset) = (message + 1, 0);
                }
                scheduler.chunk_written(0);
            }
            prop_assert_eq!(message, totals.len() as u64);
            prop_assert_eq!(scheduler.unassigned_bytes(), 0);
            scheduler.acked(message).unwrap();
            for total in totals {
                prop_assert_eq!(scheduler.pop_sent(), Some(SentMessage { payload: total, total }));
            }
            prop_assert!(scheduler.is_empty());
        }
    }
}
