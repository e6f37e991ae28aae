//! Reassembly: which bytes of which message have been received, and which acknowledgements are due.

use std::collections::VecDeque;

use super::frame::ChunkHeader;
use crate::ranges::Ranges;
use crate::tags::TooLong;

/// Messages whose sender does not wait are acknowledged at the latest when this many bytes...
const LAZY_ACK_BYTES: u64 = 256 << 10;
/// ...or this many messages are complete.
const LAZY_ACK_MESSAGES: u64 = 64;

/// Maximum number of separate ranges of a message. A sender whose flows fail now and then leaves few. The time to add one
/// grows with their number.
const MAX_FRAGMENTS: usize = 1 << 16;

/// Why a chunk is refused. In each case the two sides disagree, so the connection cannot continue.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReassemblyError {
    /// The message does not fit into the buffer posted for it.
    #[error(
        "message {message} truncated: the peer sends {total} bytes, the receive buffer holds {capacity}"
    )]
    TooLong {
        /// Number of the message.
        message: u64,
        /// Length of the peer's message, in bytes.
        total: u64,
        /// Size of the posted buffer, in bytes.
        capacity: u64,
    },
    /// Two chunks of a message disagree on its length.
    #[error("message {message}: a chunk gives a length of {total} bytes, an earlier one {earlier}")]
    TotalChanged {
        /// Number of the message.
        message: u64,
        /// Length according to this chunk.
        total: u64,
        /// Length according to an earlier chunk.
        earlier: u64,
    },
    /// The chunks of a message leave too many gaps.
    #[error("message {message}: its chunks leave more than {MAX_FRAGMENTS} gaps")]
    TooFragmented {
        /// Number of the message.
        message: u64,
    },
}

impl From<TooLong> for ReassemblyError {
    fn from(TooLong { message, length, capacity }: TooLong) -> Self {
        Self::TooLong { message, total: length, capacity }
    }
}

/// What to do with the next bytes of a chunk.
#[derive(Debug, PartialEq, Eq)]
pub enum ChunkAction<T> {
    /// The bytes up to `end` belong into the buffer that was posted with this value. They are
    /// reserved: each must be reported as received or released.
    Deliver {
        /// The value that the buffer was posted with.
        payload: T,
        /// One past the last byte, counted from the message's first.
        end: u64,
    },
    /// The bytes up to `end` were received before: they must not be written again.
    Discard {
        /// One past the last byte, counted from the message's first.
        end: u64,
    },
    /// No buffer is posted for the message yet: retry after the next post.
    NotPosted,
}

impl<T> ChunkAction<T> {
    /// The same with this value in place of the one that the buffer was posted with.
    pub fn map<U>(self, value: impl FnOnce(T) -> U) -> ChunkAction<U> {
        match self {
            Self::Deliver { payload, end } => ChunkAction::Deliver { payload: value(payload), end },
            Self::Discard { end } => ChunkAction::Discard { end },
            Self::NotPosted => ChunkAction::NotPosted,
        }
    }
}

/// A message of which all bytes have been received.
#[derive(Debug, PartialEq, Eq)]
pub struct CompletedMessage<T> {
    /// The value that its buffer was posted with.
    pub payload: T,
    /// Its length in bytes.
    pub total: u64,
}

/// The receive buffers posted on one connection and the bytes received in them.
///
/// The n-th posted buffer takes the n-th message. A chunk may repeat bytes: the sender retransmits what
/// a dead flow may not have delivered. For each part of a chunk, [`Reassembly::reserve`] reserves the
/// missing bytes and [`Reassembly::received`] reports those that are in place, so that each byte is
/// written once.
#[derive(Debug)]
pub struct Reassembly<T> {
    /// Messages that are incomplete, or complete behind an incomplete one.
    posted: VecDeque<Incoming<T>>,
    /// Number of the front message: all below are complete.
    first: u64,
    /// The last acknowledgement sent.
    acked: u64,
    /// Bytes of complete messages that are not acknowledged.
    unacked_bytes: u64,
    /// Whether the peer waits for a message that is not acknowledged.
    ack_wanted: bool,
    /// Empty sets for reuse, so that a message needs no allocation.
    spare: Vec<Ranges>,
}

#[derive(Debug)]
struct Incoming<T> {
    capacity: u64,
    /// Known from the first chunk on.
    total: Option<u64>,
    ack_wanted: bool,
    /// Bytes that are received or reserved.
    reserved: Ranges,
    received: u64,
    /// `None` once it is complete.
    payload: Option<T>,
}

impl<T> Default for Reassembly<T> {
    fn default() -> Self {
        Self {
            posted: VecDeque::new(),
            first: 0,
            acked: 0,
            unacked_bytes: 0,
            ack_wanted: false,
            spare: Vec::new(),
        }
    }
}

impl<T> Reassembly<T> {
    /// Adds a buffer of `capacity` bytes for the next message; returns that message's number.
    pub fn post(&mut self, capacity: u64, payload: T) -> u64 {
        self.posted.push_back(Incoming {
            capacity,
            total: None,
            ack_wanted: false,
            reserved: self.spare.pop().unwrap_or_default(),
            received: 0,
            payload: Some(payload),
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
    ) -> Result<ChunkAction<&T>, ReassemblyError> {
        let ChunkHeader { message, total, ack_wanted, .. } = *chunk;
        let end = chunk.end();
        let Some(index) = message.checked_sub(self.first) else {
            return Ok(ChunkAction::Discard { end });
        };
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        let Some(incoming) = self.posted.get_mut(index) else { return Ok(ChunkAction::NotPosted) };
        let Some(payload) = &incoming.payload else { return Ok(ChunkAction::Discard { end }) };
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
        if incoming.reserved.count() >= MAX_FRAGMENTS {
            return Err(ReassemblyError::TooFragmented { message });
        }
        incoming.reserved.add(at, end);
        Ok(ChunkAction::Deliver { payload, end })
    }

    /// Reports that this many reserved bytes of a message are in place. Returns the message when it is
    /// complete; an empty one is complete with zero bytes.
    pub fn received(&mut self, message: u64, bytes: u64) -> Option<CompletedMessage<T>> {
        let incoming = self.incoming(message)?;
        incoming.received += bytes;
        let total = incoming.total?;
        if incoming.received < total {
            return None;
        }
        let completed = CompletedMessage { payload: incoming.payload.take()?, total };
        while self.posted.front().is_some_and(|incoming| incoming.payload.is_none()) {
            let Some(mut incoming) = self.posted.pop_front() else { break };
            self.first += 1;
            self.unacked_bytes += incoming.total.unwrap_or_default();
            self.ack_wanted |= incoming.ack_wanted;
            incoming.reserved.clear();
            self.spare.push(incoming.reserved);
        }
        Some(completed)
    }

    /// Releases reserved bytes that will not be received where they were expected.
    pub fn release(&mut self, message: u64, start: u64, end: u64) {
        if let Some(incoming) = self.incoming(message) {
            incoming.reserved.remove(start, end);
        }
    }

    fn incoming(&mut self, message: u64) -> Option<&mut Incoming<T>> {
        let index = usize::try_from(message.checked_sub(self.first)?).ok()?;
        self.posted.get_mut(index)
    }

    /// Whether an acknowledgement is to be sent before more is read.
    pub fn is_ack_overdue(&self) -> bool {
        self.unacked_bytes >= LAZY_ACK_BYTES || self.first - self.acked >= LAZY_ACK_MESSAGES
    }

    /// Whether an acknowledgement is to be sent when there is nothing more to read. One for several messages costs less.
    pub fn is_ack_due(&self) -> bool {
        self.ack_wanted && self.is_ack_left() || self.is_ack_overdue()
    }

    /// Whether complete messages are not acknowledged yet.
    pub fn is_ack_left(&self) -> bool {
        self.acked < self.first
    }

    /// An acknowledgement to send: all messages below this number are complete.
    pub fn ack(&mut self) -> u64 {
        (self.acked, self.unacked_bytes, self.ack_wanted) = (self.first, 0, false);
        self.first
    }

    /// The number of the first incomplete message: all below are complete.
    pub fn first_incomplete(&self) -> u64 {
        self.first
    }

    /// The numbers of incomplete messages, and the values of their buffers.
    pub fn posted(&self) -> impl Iterator<Item = (u64, &T)> {
        let numbered = (self.first..).zip(&self.posted);
        numbered.filter_map(|(number, incoming)| Some((number, incoming.payload.as_ref()?)))
    }

    /// Number of posted buffers whose message is incomplete.
    pub fn outstanding(&self) -> usize {
        self.posted.iter().filter(|incoming| incoming.payload.is_some()).count()
    }

    /// Bytes that incomplete messages still lack, as far as their lengths are known.
    pub fn missing_bytes(&self) -> u64 {
        self.posted.iter().filter_map(|incoming| Some(incoming.total? - incoming.received)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(message: u64, offset: u64, length: u32, total: u64) -> ChunkHeader {
        ChunkHeader { message, offset, length, total, ack_wanted: false }
    }

    #[test]
    fn reassembly_waits_for_the_posted_buffer() {
        let mut reassembly = Reassembly::default();
        let header = chunk(0, 0, 10, 10);
        assert_eq!(reassembly.reserve(&header, 0), Ok(ChunkAction::NotPosted));
        assert_eq!(reassembly.post(64, 'a'), 0);
        assert_eq!(
            reassembly.reserve(&header, 0),
            Ok(ChunkAction::Deliver { payload: &'a', end: 10 })
        );
        assert_eq!(reassembly.missing_bytes(), 10);
        assert_eq!(reassembly.received(0, 4), None);
        assert_eq!(reassembly.received(0, 6), Some(CompletedMessage { payload: 'a', total: 10 }));
        assert_eq!(reassembly.outstanding(), 0);
        assert_eq!(reassembly.reserve(&header, 0), Ok(ChunkAction::Discard { end: 10 }));
    }

    #[test]
    fn reassembly_refuses_too_long_a_message() {
        let mut reassembly = Reassembly::default();
        reassembly.post(100, ());
        assert_eq!(
            reassembly.reserve(&chunk(0, 0, 101, 101), 0),
            Err(ReassemblyError::TooLong { message: 0, total: 101, capacity: 100 })
        );
        reassembly.reserve(&chunk(0, 0, 100, 100), 0).unwrap();
    }

    #[test]
    fn reassembly_refuses_contradictory_lengths() {
        let mut reassembly = Reassembly::default();
        reassembly.post(1024, ());
        reassembly.reserve(&chunk(0, 256, 256, 1024), 256).unwrap();
        let refused = reassembly.reserve(&chunk(0, 0, 128, 512), 0);
        assert!(matches!(refused, Err(ReassemblyError::TotalChanged { .. })));
    }

    #[test]
    fn reassembly_refuses_too_many_fragments() {
        let mut reassembly = Reassembly::default();
        reassembly.post(1 << 30, ());
        let mut alternate = (0..).map(|index| chunk(0, 256 * index, 128, 1 << 30));
        for header in alternate.by_ref().take(MAX_FRAGMENTS) {
            reassembly.reserve(&header, header.offset).unwrap();
        }
        let header = alternate.next().unwrap();
        assert_eq!(
            reassembly.reserve(&header, header.offset),
            Err(ReassemblyError::TooFragmented { message: 0 })
        );
    }

    #[test]
    fn reassembly_discards_repeated_bytes() {
        let mut reassembly = Reassembly::default();
        reassembly.post(1024, 'a');
        reassembly.reserve(&chunk(0, 256, 256, 1024), 256).unwrap();
        // The flow dies after 56 bytes.
        reassembly.received(0, 56);
        reassembly.release(0, 312, 512);
        let again = chunk(0, 128, 512, 1024);
        let deliver = |end| Ok(ChunkAction::Deliver { payload: &'a', end });
        assert_eq!(reassembly.reserve(&again, 128), deliver(256));
        assert_eq!(reassembly.reserve(&again, 256), Ok(ChunkAction::Discard { end: 312 }));
        assert_eq!(reassembly.reserve(&again, 312), deliver(640));
        assert_eq!(reassembly.missing_bytes(), 1024 - 56);
    }

    #[test]
    fn reassembly_completes_an_empty_message_once() {
        let mut reassembly = Reassembly::default();
        reassembly.post(8, 'a');
        reassembly.post(8, 'b');
        let second = chunk(1, 0, 0, 0);
        assert_eq!(
            reassembly.reserve(&second, 0),
            Ok(ChunkAction::Deliver { payload: &'b', end: 0 })
        );
        assert_eq!(reassembly.received(1, 0), Some(CompletedMessage { payload: 'b', total: 0 }));
        assert_eq!(reassembly.reserve(&second, 0), Ok(ChunkAction::Discard { end: 0 }));
    }

    #[test]
    fn reassembly_delays_acknowledgements_unless_wanted() {
        let mut reassembly = Reassembly::default();
        let mut receive = |message, total, ack_wanted| {
            reassembly.post(total, ());
            let header = ChunkHeader { ack_wanted, ..chunk(message, 0, total as u32, total) };
            reassembly.reserve(&header, 0).unwrap();
            reassembly.received(message, total).unwrap();
            reassembly.is_ack_due().then(|| reassembly.ack())
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
        assert!(!reassembly.is_ack_due() && reassembly.is_ack_left());
        assert_eq!((reassembly.ack(), reassembly.is_ack_left()), (69, false));
    }
}
