//! Cutting messages into chunks, on demand.

use std::collections::VecDeque;

use crate::{CHUNK_ALIGN, ChunkHeader, MAX_MESSAGE_BYTES};

/// A piece of a message that one flow has taken to send.
#[derive(Debug, PartialEq, Eq)]
pub struct Chunk<T> {
    /// What to put in front of it.
    pub header: ChunkHeader,
    /// What the message was pushed with.
    pub payload: T,
}

/// The messages of one connection that wait to be sent, or are being sent.
///
/// Flows pull: a flow that can take bytes calls [`Scheduler::next_chunk`] and later
/// [`Scheduler::written`]. All of a message is handed out before any of the next, so a flow that
/// carries a chunk of message k+1 will never again carry one of message k. Each message carries a
/// `T`, given back with each chunk.
#[derive(Debug)]
pub struct Scheduler<T> {
    /// Messages with bytes not yet written; the front is the oldest.
    messages: VecDeque<Outgoing<T>>,
    /// Number of the front message.
    first: u64,
    /// Index in `messages` of the one to cut next.
    cutting: usize,
}

#[derive(Debug)]
struct Outgoing<T> {
    total: u64,
    /// Bytes handed out in chunks.
    cut: u64,
    /// Bytes that flows have written.
    written: u64,
    done: bool,
    payload: T,
}

impl<T: Clone> Default for Scheduler<T> {
    fn default() -> Self {
        Self { messages: VecDeque::new(), first: 0, cutting: 0 }
    }
}

impl<T: Clone> Scheduler<T> {
    /// Queues a message of `total` bytes (at most [`MAX_MESSAGE_BYTES`]; 0 is a message too) and
    /// returns its number.
    pub fn push(&mut self, total: u64, payload: T) -> u64 {
        debug_assert!(total <= MAX_MESSAGE_BYTES);
        self.messages.push_back(Outgoing { total, cut: 0, written: 0, done: false, payload });
        self.first + self.messages.len() as u64 - 1
    }

    /// The next chunk for a flow that wants at most `limit` bytes; `None` when all is handed out.
    ///
    /// `limit` is rounded down to a multiple of 128, but never below 128. The last chunk of a
    /// message takes what is left.
    pub fn next_chunk(&mut self, limit: u64) -> Option<Chunk<T>> {
        let limit = (limit - limit % CHUNK_ALIGN).clamp(CHUNK_ALIGN, 1 << 31);
        let message = self.messages.get_mut(self.cutting)?;
        let offset = message.cut;
        let length = limit.min(message.total - offset);
        message.cut += length;
        let header = ChunkHeader {
            message: self.first + self.cutting as u64,
            offset,
            length: length as u32,
            total: message.total,
        };
        let chunk = Chunk { header, payload: message.payload.clone() };
        if message.cut == message.total {
            self.cutting += 1;
        }
        Some(chunk)
    }

    /// Tells that a chunk is written in full. Returns its message's payload when that was the
    /// message's last missing chunk.
    pub fn written(&mut self, chunk: &ChunkHeader) -> Option<T> {
        let index = usize::try_from(chunk.message.checked_sub(self.first)?).ok()?;
        let message = self.messages.get_mut(index)?;
        message.written += u64::from(chunk.length);
        debug_assert!(message.written <= message.cut);
        if message.written < message.total {
            return None;
        }
        message.done = true;
        let payload = message.payload.clone();
        while self.messages.front().is_some_and(|message| message.done) {
            self.messages.pop_front();
            self.first += 1;
            self.cutting -= 1;
        }
        Some(payload)
    }

    /// Messages not yet written in full.
    pub fn outstanding(&self) -> usize {
        self.messages.iter().filter(|message| !message.done).count()
    }

    /// Bytes of outstanding messages that no flow has reported as written.
    pub fn unwritten_bytes(&self) -> u64 {
        self.messages.iter().map(|message| message.total - message.written).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_empty_message_is_one_empty_chunk() {
        let mut scheduler = Scheduler::default();
        assert_eq!(scheduler.push(0, 'a'), 0);
        let chunk = scheduler.next_chunk(4096).unwrap();
        assert_eq!(chunk.header, ChunkHeader { message: 0, offset: 0, length: 0, total: 0 });
        assert_eq!(scheduler.next_chunk(4096), None);
        assert_eq!(scheduler.outstanding(), 1);
        assert_eq!(scheduler.written(&chunk.header), Some('a'));
        assert_eq!(scheduler.outstanding(), 0);
    }

    #[test]
    fn messages_may_complete_out_of_order() {
        let mut scheduler = Scheduler::default();
        scheduler.push(200, 'a');
        scheduler.push(1, 'b');
        let first = scheduler.next_chunk(128).unwrap();
        let second = scheduler.next_chunk(128).unwrap();
        let third = scheduler.next_chunk(128).unwrap();
        assert_eq!((second.header.offset, second.header.length), (128, 72));
        assert_eq!(third.header.message, 1);
        assert_eq!(scheduler.written(&third.header), Some('b'));
        assert_eq!(scheduler.written(&first.header), None);
        assert_eq!(scheduler.unwritten_bytes(), 72);
        assert_eq!(scheduler.written(&second.header), Some('a'));
        assert_eq!(scheduler.push(5, 'c'), 2);
    }

    proptest! {
        #[test]
        fn chunks_cover_each_message_once_in_order(
            totals in proptest::collection::vec(0u64..5000, 1..20),
            limits in proptest::collection::vec(0u64..3000, 1..20),
        ) {
            let mut scheduler = Scheduler::default();
            for total in &totals {
                scheduler.push(*total, *total);
            }
            let mut limits = limits.iter().cycle();
            let (mut message, mut offset) = (0, 0);
            let mut chunks = Vec::new();
            while let Some(chunk) = scheduler.next_chunk(*limits.next().unwrap()) {
                let header = chunk.header;
                prop_assert_eq!(ChunkHeader::decode(&header.encode()), Ok(header));
                prop_assert_eq!((header.message, header.offset), (message, offset));
                prop_assert_eq!(header.total, totals[message as usize]);
                offset = header.end();
                if offset == header.total {
                    (message, offset) = (message + 1, 0);
                }
                chunks.push(header);
            }
            prop_assert_eq!(message, totals.len() as u64);
            let mut completed: Vec<u64> =
                chunks.iter().rev().filter_map(|chunk| scheduler.written(chunk)).collect();
            completed.reverse();
            prop_assert_eq!(completed, totals);
            prop_assert_eq!(scheduler.outstanding(), 0);
        }
    }
}
