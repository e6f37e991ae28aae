//! Cutting messages into chunks on demand, and knowing what must be sent again.

use std::collections::VecDeque;

use super::frame::ChunkHeader;
use crate::limits::{CHUNK_ALIGN, MAX_MESSAGE_BYTES};

/// Which flow takes what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Schedule {
    /// Whichever flow can take bytes takes the next chunk.
    #[default]
    Pull,
    /// Each message is dealt to all flows in equal shares, in strict turns, however fast they are. What a flow was dealt
    /// goes to others only when it dies.
    Static {
        /// Minimum bytes of a share, except the last one of a message.
        min_share: u64,
    },
}

/// What a flow is to send next.
#[derive(Debug, PartialEq, Eq)]
pub enum NextFrame<'a, T> {
    /// Tell the peer that a flow is dead.
    FlowDead(u32),
    /// Send a piece of a message; the message was pushed with this value.
    Chunk(ChunkHeader, &'a T),
}

/// A message that the peer has, and that no flow is writing any more.
#[derive(Debug, PartialEq, Eq)]
pub struct SentMessage<T> {
    /// What the message was pushed with.
    pub payload: T,
    /// Its length in bytes.
    pub total: u64,
}

/// The peer acknowledged what was never sent: the two sides disagree.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer acknowledged messages below {below}, but only those below {sent} were sent")]
pub struct AckError {
    below: u64,
    sent: u64,
}

/// The messages of one connection that the peer has not acknowledged.
///
/// Flows pull: a flow that can take bytes calls [`Scheduler::next`] and later
/// [`Scheduler::chunk_written`]. All of a message is handed out before any of the next. What a flow was
/// given is remembered until the peer acknowledges the message; when the flow dies
/// ([`Scheduler::flow_failed`]), it is handed out again to others, each of which first tells of the death.
///
/// A flow is known by its place, a small number that is used again when the flow is gone.
#[derive(Debug)]
pub struct Scheduler<T> {
    /// Messages not acknowledged, or still being written; the front is the oldest.
    messages: VecDeque<Outgoing<T>>,
    /// Number of the front message.
    first: u64,
    /// The peer has all messages below this number.
    acked: u64,
    /// Index in `messages` of the one to cut next.
    cutting: usize,
    /// Bytes of messages that are not handed out yet, resent ones aside.
    uncut: u64,
    flows: Vec<Flow>,
    /// What dead flows may not have delivered, oldest first.
    again: VecDeque<Piece>,
    /// Dead flows of which the peer may not know yet.
    deaths: VecDeque<Death>,
    /// Number of the front of `deaths`, counting all deaths.
    first_death: u64,
    schedule: Schedule,
    /// The place whose turn it is to be dealt a share.
    turn: usize,
}

#[derive(Debug)]
struct Outgoing<T> {
    total: u64,
    /// Bytes handed out in chunks.
    cut: u64,
    /// Bytes that flows have written, repeated ones included.
    written: u64,
    /// Flows that are writing a chunk of it just now.
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
    /// What it was given, of messages that may not be acknowledged.
    given: VecDeque<Piece>,
    /// The latest message of which it was given something.
    latest: u64,
    /// What it was dealt and has not been given.
    dealt: VecDeque<Piece>,
    /// What it is writing, in this order.
    writing: VecDeque<Piece>,
    /// Number of the first death that it has not told of.
    next_death: u64,
}

#[derive(Debug)]
struct Death {
    flow: u32,
    /// What the flow carried belongs to messages below this number.
    until: u64,
    told: bool,
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
            cutting: 0,
            uncut: 0,
            flows: Vec::new(),
            again: VecDeque::new(),
            deaths: VecDeque::new(),
            first_death: 0,
            schedule,
            turn: 0,
        }
    }

    /// A flow takes this place, which no flow has.
    pub fn flow_opened(&mut self, place: usize) {
        if self.flows.len() <= place {
            self.flows.resize_with(place + 1, Flow::default);
        }
        let flow = &mut self.flows[place];
        debug_assert!(!flow.open && flow.given.is_empty());
        *flow = Flow { open: true, next_death: self.first_death, ..Flow::default() };
    }

    /// Queues a message of `total` bytes (at most [`MAX_MESSAGE_BYTES`]; 0 is a message too) and
    /// returns its number. `ack_wanted`: somebody waits for it to be acknowledged.
    pub fn push(&mut self, total: u64, ack_wanted: bool, payload: T) -> u64 {
        debug_assert!(total <= MAX_MESSAGE_BYTES);
        let min_share = match self.schedule {
            Schedule::Pull => None,
            Schedule::Static { min_share } => Some(min_share),
        };
        // What is dealt is not cut any more by who asks.
        let cut = min_share.map_or(0, |_| total);
        self.uncut += total - cut;
        self.messages.push_back(Outgoing {
            total,
            cut,
            written: 0,
            writers: 0,
            ack_wanted,
            payload,
        });
        let number = self.next_message() - 1;
        if let Some(min_share) = min_share {
            self.cutting += 1;
            self.deal(number, total, min_share);
        }
        number
    }

    /// Deals a message to the flows in turn.
    fn deal(&mut self, message: u64, total: u64, min_share: u64) {
        let flows = self.flows.iter().filter(|flow| flow.open).count() as u64;
        let share = total.div_ceil(flows.max(1)).max(min_share).next_multiple_of(CHUNK_ALIGN);
        let mut offset = 0;
        loop {
            let length = share.min(total - offset);
            let piece = Piece { message, offset: offset as u32, length: length as u32 };
            let order = (self.turn..self.flows.len()).chain(0..self.turn);
            match order.into_iter().find(|place| self.flows[*place].open) {
                Some(place) => {
                    self.flows[place].dealt.push_back(piece);
                    self.turn = place + 1;
                }
                // Whatever flow comes next takes it.
                None => self.again.push_back(piece),
            }
            offset += length;
            if offset == total {
                return;
            }
        }
    }

    /// What the flow in this place is to send; `None` when there is nothing. A chunk is being
    /// written from now on, until [`Scheduler::chunk_written`]; further ones may be asked for before.
    ///
    /// `limit` is the longest chunk wanted, in bytes, rounded down to a multiple of 128, but never
    /// below 128. The last chunk of a message takes what is left.
    pub fn next(&mut self, place: usize, limit: u64) -> Option<NextFrame<'_, T>> {
        let flow = &mut self.flows[place];
        debug_assert!(flow.open);
        flow.next_death = flow.next_death.max(self.first_death);
        if let Some(death) = self.deaths.get_mut((flow.next_death - self.first_death) as usize) {
            flow.next_death += 1;
            death.told = true;
            let dead = death.flow;
            self.forget_deaths();
            return Some(NextFrame::FlowDead(dead));
        }
        let limit = (limit - limit % CHUNK_ALIGN).clamp(CHUNK_ALIGN, MAX_MESSAGE_BYTES) as u32;
        let piece = match self.schedule {
            Schedule::Pull => self.cut_again(place, limit).or_else(|| self.cut_new(limit)),
            Schedule::Static { .. } => self.cut_dealt(place, limit),
        }?;
        let flow = &mut self.flows[place];
        while flow.given.front().is_some_and(|given| given.message < self.acked) {
            flow.given.pop_front();
        }
        flow.given.push_back(piece);
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

    /// A piece to be sent again, unless the flow carries something of a later message: the peer may
    /// have no buffer for that before it has this one, and would wait for ever.
    fn cut_again(&mut self, place: usize, limit: u32) -> Option<Piece> {
        while self.again.front().is_some_and(|piece| piece.message < self.acked) {
            self.again.pop_front();
        }
        let latest = self.flows[place].latest;
        let piece = self.again.front_mut()?;
        if latest >= self.acked && latest > piece.message {
            return None;
        }
        cut_front(&mut self.again, limit)
    }

    /// What the flow was dealt, or something to be sent again that comes before it: nothing goes behind a later message.
    fn cut_dealt(&mut self, place: usize, limit: u32) -> Option<Piece> {
        let acked = self.acked;
        let dealt = &mut self.flows[place].dealt;
        // The peer says that it has what was never sent.
        while dealt.front().is_some_and(|piece| piece.message < acked) {
            dealt.pop_front();
        }
        let next = dealt.front().copied();
        let repeats = self.again.iter().find(|piece| piece.message >= acked);
        if repeats.is_some_and(|piece| next.is_none_or(|next| *piece < next)) {
            let piece = self.cut_again(place, limit);
            if piece.is_some() {
                return piece;
            }
        }
        cut_front(&mut self.flows[place].dealt, limit)
    }

    fn cut_new(&mut self, limit: u32) -> Option<Piece> {
        let message = self.messages.get_mut(self.cutting)?;
        let offset = message.cut;
        let length = u64::from(limit).min(message.total - offset);
        message.cut += length;
        self.uncut -= length;
        let number = self.first + self.cutting as u64;
        if message.cut == message.total {
            self.cutting += 1;
        }
        Some(Piece { message: number, offset: offset as u32, length: length as u32 })
    }

    /// Tells that the flow in this place has written the first of its chunks in full. Returns the message's number
    /// when all of it is written and nobody waits for the peer to have it: as long as nothing of it
    /// is handed out again, its payload may be changed ([`Scheduler::payload_mut`]).
    pub fn chunk_written(&mut self, place: usize) -> Option<u64> {
        let piece = self.flows.get_mut(place)?.writing.pop_front()?;
        let index = usize::try_from(piece.message.checked_sub(self.first)?).ok()?;
        let message = self.messages.get_mut(index)?;
        message.writers -= 1;
        message.written += u64::from(piece.length);
        let whole = message.written >= message.total && message.writers == 0;
        (whole && !message.ack_wanted).then_some(piece.message)
    }

    /// What a message was pushed with, unless it is taken or being written.
    pub fn payload_mut(&mut self, message: u64) -> Option<&mut T> {
        let index = usize::try_from(message.checked_sub(self.first)?).ok()?;
        let message = self.messages.get_mut(index).filter(|message| message.writers == 0)?;
        Some(&mut message.payload)
    }

    /// The flow in this place will not write the rest of its chunks.
    fn broke_off(&mut self, place: usize) {
        while let Some(piece) = self.flows[place].writing.pop_front() {
            let index = piece.message.checked_sub(self.first).map(|index| index as usize);
            if let Some(message) = index.and_then(|index| self.messages.get_mut(index)) {
                message.writers -= 1;
            }
        }
    }

    /// The peer has all messages below this number. [`Scheduler::pop_sent`] gives them.
    ///
    /// # Errors
    /// [`AckError`] when some of them cannot have reached it.
    pub fn acked(&mut self, below: u64) -> Result<(), AckError> {
        let sent = self.first + self.cutting as u64;
        if below > sent {
            return Err(AckError { below, sent });
        }
        self.acked = self.acked.max(below);
        self.forget_deaths();
        Ok(())
    }

    /// Takes the oldest message, if the peer has it and no flow is writing a chunk of it: its
    /// memory is not needed any more. To be called until there is none after
    /// [`Scheduler::acked`], [`Scheduler::chunk_written`] and [`Scheduler::flow_failed`].
    pub fn pop_sent(&mut self) -> Option<SentMessage<T>> {
        if self.first >= self.acked || self.messages.front()?.writers > 0 {
            return None;
        }
        let message = self.messages.pop_front()?;
        self.first += 1;
        // It was cut in full, or the peer could not have it.
        self.cutting -= 1;
        Some(SentMessage { payload: message.payload, total: message.total })
    }

    /// The flow in this place, which the peer knows by this number, is dead: what it was given and
    /// the peer has not acknowledged is handed out again. The place is free. Returns how many bytes
    /// that is.
    pub fn flow_failed(&mut self, place: usize, number: u32) -> u64 {
        self.broke_off(place);
        let until = self.begun();
        let flow = &mut self.flows[place];
        flow.open = false;
        let (acked, before) = (self.acked, self.again.len());
        self.again.extend(flow.given.drain(..).filter(|piece| piece.message >= acked));
        let bytes = self.again.range(before..).map(|piece| u64::from(piece.length)).sum();
        // Not again: it was never sent.
        self.again.extend(flow.dealt.drain(..).filter(|piece| piece.message >= acked));
        self.again.make_contiguous().sort_unstable();
        self.deaths.push_back(Death { flow: number, until, told: false });
        bytes
    }

    /// Whether the peer has all that the flow in this place was given.
    pub fn is_drained(&mut self, place: usize) -> bool {
        let acked = self.acked;
        let flow = &mut self.flows[place];
        flow.given.retain(|piece| piece.message >= acked);
        flow.given.is_empty() && flow.dealt.is_empty() && flow.writing.is_empty()
    }

    /// The flow in this place, which is clear, is gone. The place is free.
    pub fn flow_closed(&mut self, place: usize) {
        debug_assert!(self.is_drained(place));
        self.flows[place].open = false;
    }

    /// Whether [`Scheduler::next`] has something for a new flow that has told of all deaths.
    pub fn has_work(&self) -> bool {
        self.cutting < self.messages.len() || self.must_retransmit()
    }

    /// Length in bytes of the message that is cut next, if nothing of it is handed out yet and nothing is to be sent again.
    pub fn next_unstarted_message(&self) -> Option<u64> {
        let next = self.messages.get(self.cutting).filter(|message| message.cut == 0);
        next.filter(|_| !self.must_retransmit()).map(|message| message.total)
    }

    /// Whether the flow in this place was dealt something that it has not been given yet.
    pub fn has_static_share(&self, place: usize) -> bool {
        self.flows.get(place).is_some_and(|flow| !flow.dealt.is_empty())
    }

    /// Whether something is to be sent again. Flows that carry later messages cannot take it: when
    /// it stays, a new flow is needed.
    pub fn must_retransmit(&self) -> bool {
        self.again.back().is_some_and(|piece| piece.message >= self.acked)
    }

    /// Bytes that no flow has taken yet, those to be sent again aside.
    pub fn unassigned_bytes(&self) -> u64 {
        self.uncut
    }

    /// Number of the message that is pushed next.
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

    /// Number of the first message of which nothing was handed out.
    fn begun(&self) -> u64 {
        let partly = self.messages.get(self.cutting).is_some_and(|message| message.cut > 0);
        self.first + self.cutting as u64 + u64::from(partly)
    }

    /// Forgets deaths after which nothing is left to be sent again. One flow has told of each.
    fn forget_deaths(&mut self) {
        let acked = self.acked;
        while self.deaths.front().is_some_and(|death| death.told && death.until <= acked) {
            self.deaths.pop_front();
            self.first_death += 1;
        }
    }
}

/// Takes at most this much from the front.
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
        (0..flows).for_each(|place| scheduler.flow_opened(place));
        scheduler
    }

    /// Takes and writes the next chunk: message, offset, length.
    fn take(scheduler: &mut Scheduler<char>, place: usize, limit: u64) -> (u64, u64, u32) {
        let Some(NextFrame::Chunk(header, _)) = scheduler.next(place, limit) else {
            panic!("no chunk")
        };
        scheduler.chunk_written(place);
        (header.message, header.offset, header.length)
    }

    #[test]
    fn an_empty_message_is_one_empty_chunk() {
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
    fn what_is_being_written_is_not_given_back() {
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
    fn what_nobody_waits_for_is_given_back_when_it_is_written() {
        let mut scheduler = scheduler(2);
        scheduler.push(200, false, 'a');
        scheduler.next(0, 128).unwrap();
        scheduler.next(1, 128).unwrap();
        assert_eq!(scheduler.chunk_written(1), None);
        assert_eq!(scheduler.chunk_written(0), Some(0));
        assert_eq!(scheduler.payload_mut(0), Some(&mut 'a'));
        *scheduler.payload_mut(0).unwrap() = 'b';
        // Should the flow die, it is the new payload that is sent.
        scheduler.flow_failed(0, 0);
        assert_eq!(scheduler.next(1, 128), Some(NextFrame::FlowDead(0)));
        assert!(matches!(scheduler.next(1, 128), Some(NextFrame::Chunk(_, 'b'))));
    }

    #[test]
    fn an_acknowledgement_of_what_was_not_sent_is_refused() {
        let mut scheduler = scheduler(1);
        scheduler.push(200, true, 'a');
        scheduler.push(200, true, 'b');
        take(&mut scheduler, 0, 128);
        assert_eq!(scheduler.acked(1), Err(AckError { below: 1, sent: 0 }));
        take(&mut scheduler, 0, 128);
        scheduler.acked(1).unwrap();
    }

    #[test]
    fn a_dead_flows_chunks_go_to_others_after_the_news() {
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
        // A flow that comes later tells it too: it cannot know which of them is heard first.
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

    fn dealing(flows: usize) -> Scheduler<char> {
        let mut scheduler = Scheduler::new(Schedule::Static { min_share: 256 });
        (0..flows).for_each(|place| scheduler.flow_opened(place));
        scheduler
    }

    #[test]
    fn static_shares_are_equal_however_fast_a_flow_asks() {
        let mut scheduler = dealing(3);
        scheduler.push(1500, true, 'a');
        scheduler.push(300, true, 'b');
        scheduler.push(0, true, 'c');
        assert_eq!(take(&mut scheduler, 1, 4096), (0, 512, 512));
        assert_eq!(take(&mut scheduler, 1, 4096), (1, 256, 44));
        assert_eq!(scheduler.next(1, 4096), None, "the rest is dealt to others");
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
        assert!((0..3).all(|place| scheduler.next(place, 4096).is_none()));
    }

    #[test]
    fn what_a_dead_flow_was_dealt_goes_to_others() {
        let mut scheduler = dealing(2);
        scheduler.push(1024, true, 'a');
        scheduler.push(1024, true, 'b');
        assert_eq!(take(&mut scheduler, 0, 256), (0, 0, 256));
        assert_eq!(scheduler.flow_failed(0, 7), 256, "repeated is what was sent");
        assert_eq!(scheduler.next(1, 4096), Some(NextFrame::FlowDead(7)));
        assert_eq!(take(&mut scheduler, 1, 4096), (0, 0, 256));
        assert_eq!(take(&mut scheduler, 1, 4096), (0, 256, 256));
        assert_eq!(take(&mut scheduler, 1, 4096), (0, 512, 512));
        assert_eq!(take(&mut scheduler, 1, 4096), (1, 0, 512));
        assert_eq!(take(&mut scheduler, 1, 4096), (1, 512, 512));
        // Without any flow it is for the first that comes.
        scheduler.flow_failed(1, 8);
        scheduler.acked(2).unwrap();
        scheduler.push(600, true, 'c');
        scheduler.flow_opened(0);
        assert_eq!(scheduler.next(0, 4096), Some(NextFrame::FlowDead(8)));
        assert_eq!(take(&mut scheduler, 0, 4096), (2, 0, 600));
    }

    #[test]
    fn nothing_is_repeated_behind_a_later_message() {
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
    fn a_death_is_told_even_if_nothing_is_to_be_sent_again() {
        let mut scheduler = scheduler(2);
        scheduler.flow_failed(0, 0);
        assert_eq!(scheduler.next(1, 128), Some(NextFrame::FlowDead(0)));
        assert_eq!(scheduler.next(1, 128), None);
    }

    #[test]
    fn a_flow_may_take_several_messages_before_it_has_written_any() {
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
        assert_eq!(
            scheduler.next_unstarted_message(),
            None,
            "what is to be sent again comes first"
        );
        (0..3).for_each(|message| assert_eq!(take(&mut scheduler, 1, 128), (message, 0, 100)));
    }

    proptest! {
        #[test]
        fn chunks_cover_each_message_once_in_order(
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
