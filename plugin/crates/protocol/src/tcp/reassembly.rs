//! Which bytes of which message have arrived, and what the peer is to be told of it.

use std::collections::VecDeque;

use super::frame::ChunkHeader;
use crate::ranges::Ranges;

/// A sender that does not wait hears of its messages at the latest when this many bytes...
const LAZY_ACK_BYTES: u64 = 256 << 10;
/// ...or this many messages are complete.
const LAZY_ACK_MESSAGES: u64 = 64;

/// Why a chunk cannot be taken. Each means that the peer and this side disagree, so the
/// connection cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReassemblyError {
    /// The message does not fit into the buffer posted for it.
    #[error(
        "message {message} truncated: the peer sends {total} bytes, the receive buffer holds {capacity}"
    )]
    TooLong {
        /// Number of the message.
        message: u64,
        /// What the peer sends, in bytes.
        total: u64,
        /// What was posted, in bytes.
        capacity: u64,
    },
    /// Two chunks of a message disagree on its length.
    #[error("message {message}: a chunk says {total} bytes in all, an earlier one {earlier}")]
    TotalChanged {
        /// Number of the message.
        message: u64,
        /// What this chunk says.
        total: u64,
        /// What an earlier chunk said.
        earlier: u64,
    },
}

/// What to do with the next bytes of a chunk.
#[derive(Debug, PartialEq, Eq)]
pub enum ChunkAction<T> {
    /// The bytes up to `end` belong into the buffer that was posted with this value. They are
    /// reserved: report each as arrived or give it back.
    Deliver {
        /// What the buffer was posted with.
        payload: T,
        /// One past the last byte, counted from the message's first.
        end: u64,
    },
    /// The bytes up to `end` came before: they must not be written again.
    Discard {
        /// One past the last byte, counted from the message's first.
        end: u64,
    },
    /// No buffer is posted for the message yet: ask again after the next post.
    NotPosted,
}

/// A message whose last byte has arrived.
#[derive(Debug, PartialEq, Eq)]
pub struct CompletedMessage<T> {
    /// What its buffer was posted with.
    pub payload: T,
    /// Its length in bytes.
    pub total: u64,
}

/// The receive buffers posted on one connection and what has arrived in them.
///
/// The n-th posted buffer takes the n-th message. A chunk may bring bytes that came before: the
/// sender repeats what a dead flow may not have delivered. For each part of a chunk,
/// [`Reassembly::reserve`] reserves what is missing and [`Reassembly::received`] reports bytes that
/// are in place, so that each byte is written once.
#[derive(Debug)]
pub struct Reassembly<T> {
    /// Posted and not complete, or complete behind one that is not.
    posted: VecDeque<Incoming<T>>,
    /// Number of the front message: all below are complete.
    first: u64,
    /// What the peer was told last.
    acked: u64,
    /// Bytes complete that the peer was not told of.
    unacked_bytes: u64,
    /// The first incomplete message when it was last asked for late acknowledgements.
    seen: u64,
    /// Whether the peer waits for one of the messages that it was not told of.
    ack_wanted: bool,
    /// Sets to be used again, so that a message needs no new memory.
    spare: Vec<Ranges>,
}

#[derive(Debug)]
struct Incoming<T> {
    capacity: u64,
    /// Known from the first chunk on.
    total: Option<u64>,
    ack_wanted: bool,
    /// Bytes that have arrived or are reserved.
    reserved: Ranges,
    arrived: u64,
    done: bool,
    payload: T,
}

impl<T> Default for Reassembly<T> {
    fn default() -> Self {
        Self {
            posted: VecDeque::new(),
            first: 0,
            acked: 0,
            unacked_bytes: 0,
            seen: 0,
            ack_wanted: false,
            spare: Vec::new(),
        }
    }
}

impl<T: Clone> Reassembly<T> {
    /// Adds a buffer of `capacity` bytes for the next message; returns that message's number.
    pub fn post(&mut self, capacity: u64, payload: T) -> u64 {
        self.posted.push_back(Incoming {
            capacity,
            total: None,
            ack_wanted: false,
            reserved: self.spare.pop().unwrap_or_default(),
            arrived: 0,
            done: false,
            payload,
        });
        self.next() - 1
    }

    /// Number of the message that the next buffer is for.
    pub fn next(&self) -> u64 {
        self.first + self.posted.len() as u64
    }

    /// What to do with the bytes of a chunk from `at` on, counted from the message's first byte;
    /// they are not past the chunk's end, or the chunk is empty.
    ///
    /// # Errors
    /// [`ReassemblyError`] when the chunk does not fit the posted buffer or others of its message.
    pub fn reserve(
        &mut self,
        chunk: &ChunkHeader,
        at: u64,
    ) -> Result<ChunkAction<T>, ReassemblyError> {
        let ChunkHeader { message, total, ack_wanted, .. } = *chunk;
        let end = chunk.end();
        let Some(index) = message.checked_sub(self.first) else {
            return Ok(ChunkAction::Discard { end });
        };
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        let Some(incoming) = self.posted.get_mut(index) else { return Ok(ChunkAction::NotPosted) };
        if incoming.done {
            return Ok(ChunkAction::Discard { end });
        }
        let capacity = incoming.capacity;
        if total > capacity {
            return Err(ReassemblyError::TooLong { message, total, capacity });
        }
        match incoming.total {
            None => incoming.total = Some(total),
            Some(earlier) if earlier != total => {
                return Err(ReassemblyError::TotalChanged { message, total, earlier });
            }
            Some(_) => {}
        }
        incoming.ack_wanted |= ack_wanted;
        let (known, end) = incoming.reserved.run(at, end);
        if known {
            return Ok(ChunkAction::Discard { end });
        }
        incoming.reserved.add(at, end);
        Ok(ChunkAction::Deliver { payload: incoming.payload.clone(), end })
    }

    /// Tells that this many bytes of a message, reserved before, are in place. Returns the message
    /// when it is complete; an empty one is complete with nothing in place.
    pub fn received(&mut self, message: u64, bytes: u64) -> Option<CompletedMessage<T>> {
        let incoming = self.incoming(message)?;
        incoming.arrived += bytes;
        let total = incoming.total?;
        if incoming.arrived < total || incoming.done {
            return None;
        }
        incoming.done = true;
        let completed = CompletedMessage { payload: incoming.payload.clone(), total };
        while self.posted.front().is_some_and(|incoming| incoming.done) {
            let Some(mut incoming) = self.posted.pop_front() else { break };
            self.first += 1;
            self.unacked_bytes += incoming.total.unwrap_or_default();
            self.ack_wanted |= incoming.ack_wanted;
            incoming.reserved.clear();
            self.spare.push(incoming.reserved);
        }
        Some(completed)
    }

    /// Gives back reserved bytes that will not arrive where they were expected.
    pub fn release(&mut self, message: u64, start: u64, end: u64) {
        if let Some(incoming) = self.incoming(message) {
            incoming.reserved.remove(start, end);
        }
    }

    fn incoming(&mut self, message: u64) -> Option<&mut Incoming<T>> {
        let index = usize::try_from(message.checked_sub(self.first)?).ok()?;
        self.posted.get_mut(index)
    }

    /// What to acknowledge now, if anything: all messages below this number are complete. Counts as
    /// told.
    pub fn ack_due(&mut self) -> Option<u64> {
        let due = self.ack_wanted
            || self.unacked_bytes >= LAZY_ACK_BYTES
            || self.first - self.acked >= LAZY_ACK_MESSAGES;
        due.then(|| self.ack())
    }

    /// What to acknowledge, if anything, when asked now and then: what is complete since it was last asked and not
    /// followed by more, so that a sender that rests has nothing left to wait for. Counts as acknowledged from then on.
    pub fn ack_if_idle(&mut self) -> Option<u64> {
        let before = std::mem::replace(&mut self.seen, self.first);
        (before == self.first && self.acked < self.first).then(|| self.ack())
    }

    /// All messages below this number are complete. Counts as told.
    pub fn ack(&mut self) -> u64 {
        (self.acked, self.unacked_bytes, self.ack_wanted) = (self.first, 0, false);
        self.first
    }

    /// What the buffers were posted with whose messages are not complete, and those messages' numbers.
    pub fn posted(&self) -> impl Iterator<Item = (u64, &T)> {
        let numbered = (self.first..).zip(&self.posted);
        numbered
            .filter(|(_, incoming)| !incoming.done)
            .map(|(number, incoming)| (number, &incoming.payload))
    }

    /// Posted buffers whose message is not complete.
    pub fn outstanding(&self) -> usize {
        self.posted.iter().filter(|incoming| !incoming.done).count()
    }

    /// Bytes that outstanding messages still lack, as far as their lengths are known.
    pub fn missing_bytes(&self) -> u64 {
        self.posted.iter().filter_map(|incoming| Some(incoming.total? - incoming.arrived)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(message: u64, offset: u64, length: u32, total: u64) -> ChunkHeader {
        ChunkHeader { message, offset, length, total, ack_wanted: false }
    }

    #[test]
    fn waits_for_the_post() {
        let mut reassembly = Reassembly::default();
        let header = chunk(0, 0, 10, 10);
        assert_eq!(reassembly.reserve(&header, 0), Ok(ChunkAction::NotPosted));
        assert_eq!(reassembly.post(64, 'a'), 0);
        assert_eq!(
            reassembly.reserve(&header, 0),
            Ok(ChunkAction::Deliver { payload: 'a', end: 10 })
        );
        assert_eq!(reassembly.missing_bytes(), 10);
        assert_eq!(reassembly.received(0, 4), None);
        assert_eq!(reassembly.received(0, 6), Some(CompletedMessage { payload: 'a', total: 10 }));
        assert_eq!(reassembly.outstanding(), 0);
        assert_eq!(reassembly.reserve(&header, 0), Ok(ChunkAction::Discard { end: 10 }));
    }

    #[test]
    fn too_long_a_message_is_refused_whole() {
        let mut reassembly = Reassembly::default();
        reassembly.post(100, ());
        assert_eq!(
            reassembly.reserve(&chunk(0, 0, 101, 101), 0),
            Err(ReassemblyError::TooLong { message: 0, total: 101, capacity: 100 })
        );
        reassembly.reserve(&chunk(0, 0, 100, 100), 0).unwrap();
    }

    #[test]
    fn contradictions_are_refused() {
        let mut reassembly = Reassembly::default();
        reassembly.post(1024, ());
        reassembly.reserve(&chunk(0, 256, 256, 1024), 256).unwrap();
        let refused = reassembly.reserve(&chunk(0, 0, 128, 512), 0);
        assert!(matches!(refused, Err(ReassemblyError::TotalChanged { .. })));
    }

    #[test]
    fn what_came_before_is_discarded_part_by_part() {
        let mut reassembly = Reassembly::default();
        reassembly.post(1024, 'a');
        reassembly.reserve(&chunk(0, 256, 256, 1024), 256).unwrap();
        // The flow dies after 56 bytes.
        reassembly.received(0, 56);
        reassembly.release(0, 312, 512);
        let again = chunk(0, 128, 512, 1024);
        let deliver = |end| Ok(ChunkAction::Deliver { payload: 'a', end });
        assert_eq!(reassembly.reserve(&again, 128), deliver(256));
        assert_eq!(reassembly.reserve(&again, 256), Ok(ChunkAction::Discard { end: 312 }));
        assert_eq!(reassembly.reserve(&again, 312), deliver(640));
        assert_eq!(reassembly.missing_bytes(), 1024 - 56);
    }

    #[test]
    fn an_empty_message_arrives_once() {
        let mut reassembly = Reassembly::default();
        reassembly.post(8, 'a');
        reassembly.post(8, 'b');
        let second = chunk(1, 0, 0, 0);
        assert_eq!(
            reassembly.reserve(&second, 0),
            Ok(ChunkAction::Deliver { payload: 'b', end: 0 })
        );
        assert_eq!(reassembly.received(1, 0), Some(CompletedMessage { payload: 'b', total: 0 }));
        assert_eq!(reassembly.reserve(&second, 0), Ok(ChunkAction::Discard { end: 0 }));
    }

    #[test]
    fn acknowledgements_come_at_once_when_wanted_and_else_together() {
        let mut reassembly = Reassembly::default();
        let mut receive = |message, total, ack_wanted| {
            reassembly.post(total, ());
            let header = ChunkHeader { ack_wanted, ..chunk(message, 0, total as u32, total) };
            reassembly.reserve(&header, 0).unwrap();
            reassembly.received(message, total).unwrap();
            reassembly.ack_due()
        };
        assert_eq!(receive(0, 10, false), None);
        assert_eq!(receive(1, 10, true), Some(2));
        let tiny: Vec<_> = (2..66).map(|message| receive(message, 10, false)).collect();
        assert!(tiny[..63].iter().all(Option::is_none));
        assert_eq!(tiny[63], Some(66));
        assert_eq!(receive(66, 140_000, false), None);
        assert_eq!(receive(67, 140_000, false), Some(68));
        assert_eq!(reassembly.ack(), 68);
        reassembly.post(10, ());
        reassembly.reserve(&chunk(68, 0, 10, 10), 0).unwrap();
        reassembly.received(68, 10).unwrap();
        assert_eq!(reassembly.ack_if_idle(), None, "more may follow");
        assert_eq!(reassembly.ack_if_idle(), Some(69));
        assert_eq!(reassembly.ack_if_idle(), None, "all is acknowledged");
    }
}
