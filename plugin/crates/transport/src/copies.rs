//! Copies of small messages, kept until the peer has them.

use std::collections::VecDeque;

use crate::sys::{Memory, SendBuffer};

/// Least room, in bytes. More than a receiver leaves unacknowledged, so that room comes back.
const LEAST_BYTES: usize = 256 << 10;
/// Most messages kept. As above.
const MOST_MESSAGES: usize = 128;

/// A ring of messages, given back in the order in which they were stored.
pub(crate) struct Copies {
    bytes: usize,
    /// Allocated with the first message.
    memory: Option<Memory>,
    /// Where the next message goes.
    next: usize,
    /// Where each message begins and ends, oldest first.
    stored: VecDeque<(usize, usize)>,
}

impl Copies {
    /// For messages of up to `longest` bytes.
    pub(crate) fn new(longest: u64) -> Self {
        let bytes = LEAST_BYTES.max(4 * longest as usize);
        Self { bytes, memory: None, next: 0, stored: VecDeque::new() }
    }

    /// Copies a message, if there is room: the copy, which stays until it is released.
    pub(crate) fn store(&mut self, message: SendBuffer) -> Option<SendBuffer> {
        let length = message.length();
        if self.stored.len() >= MOST_MESSAGES {
            return None;
        }
        let oldest = self.stored.front().map(|(start, _)| *start);
        let start = match oldest {
            None => 0,
            Some(oldest) if self.next < oldest => {
                (length < oldest - self.next).then_some(self.next)?
            }
            Some(_) if length <= self.bytes - self.next => self.next,
            Some(oldest) => (length < oldest).then_some(0)?,
        };
        if length > self.bytes - start {
            return None;
        }
        let memory = self.memory.get_or_insert_with(|| Memory::new(self.bytes));
        let copy = memory.store(start, message);
        self.next = start + length;
        self.stored.push_back((start, self.next));
        Some(copy)
    }

    /// Forgets the oldest message.
    pub(crate) fn release(&mut self) {
        self.stored.pop_front();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_used_again_and_never_twice() {
        let mut copies = Copies::new(0);
        let message = SendBuffer::from_static(&[7; 10_000]);
        let mut kept: VecDeque<(usize, usize)> = VecDeque::new();
        for round in 0..1000 {
            while copies.store(message).is_some() {
                let new = *copies.stored.back().unwrap();
                assert!(new.1 <= copies.bytes);
                assert!(kept.iter().all(|old| old.1 <= new.0 || new.1 <= old.0), "{new:?}");
                kept.push_back(new);
            }
            assert!(kept.len() >= 24, "{} messages fit", kept.len());
            for _ in 0..1 + round % 25 {
                copies.release();
                kept.pop_front();
            }
        }
    }

    #[test]
    fn the_number_is_bounded_too() {
        let mut copies = Copies::new(0);
        let stored = (0..1000).filter(|_| copies.store(SendBuffer::from_static(b"x")).is_some());
        assert_eq!(stored.count(), MOST_MESSAGES);
    }
}
