//! Copies of small messages, kept until the peer has them.

use std::collections::VecDeque;

use crate::sys::{Memory, SendBuffer};

/// Least room, in bytes. More than a receiver leaves unacknowledged, so that room comes back.
const LEAST_BYTES: usize = 1 << 20;
/// Most messages kept. As above.
const MOST_MESSAGES: usize = 256;

/// A ring of messages. Room comes back when the oldest ones are released.
pub(crate) struct Copies {
    bytes: usize,
    /// Allocated with the first message.
    memory: Option<Memory>,
    /// Where the next message goes.
    next: usize,
    /// Oldest first.
    stored: VecDeque<Stored>,
    /// Number of the oldest.
    first: u64,
}

struct Stored {
    start: usize,
    released: bool,
}

/// A message's copy, to be released.
#[derive(Debug)]
pub(crate) struct Copy(u64);

impl Copies {
    /// For messages of up to `longest` bytes.
    pub(crate) fn new(longest: u64) -> Self {
        let bytes = LEAST_BYTES.max(4 * longest as usize);
        Self { bytes, memory: None, next: 0, stored: VecDeque::new(), first: 0 }
    }

    /// Copies a message, if there is room: the copy, which stays until it is released.
    pub(crate) fn store(&mut self, message: SendBuffer) -> Option<(SendBuffer, Copy)> {
        let length = message.length();
        let start = self.room_for(length)?;
        let memory = self.memory.get_or_insert_with(|| Memory::new(self.bytes));
        let buffer = memory.store(start, message);
        self.next = start + length;
        self.stored.push_back(Stored { start, released: false });
        Some((buffer, Copy(self.first + self.stored.len() as u64 - 1)))
    }

    fn room_for(&self, length: usize) -> Option<usize> {
        if self.stored.len() >= MOST_MESSAGES {
            return None;
        }
        let Some(oldest) = self.stored.front().map(|stored| stored.start) else {
            return (length <= self.bytes).then_some(0);
        };
        if self.next < oldest {
            (length < oldest - self.next).then_some(self.next)
        } else if length <= self.bytes - self.next {
            Some(self.next)
        } else {
            (length < oldest).then_some(0)
        }
    }

    /// The copy is not needed any more.
    pub(crate) fn release(&mut self, copy: Copy) {
        let index = copy.0.checked_sub(self.first).map(|index| index as usize);
        if let Some(stored) = index.and_then(|index| self.stored.get_mut(index)) {
            stored.released = true;
        }
        while self.stored.front().is_some_and(|stored| stored.released) {
            self.stored.pop_front();
            self.first += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_used_again_and_never_twice() {
        let mut copies = Copies::new(0);
        let message = SendBuffer::from_static(&[7; 10_000]);
        let mut kept: VecDeque<(usize, Copy)> = VecDeque::new();
        for round in 0..1000 {
            while let Some((_, copy)) = copies.store(message) {
                let start = copies.stored.back().unwrap().start;
                assert!(start + 10_000 <= copies.bytes);
                assert!(kept.iter().all(|(other, _)| other.abs_diff(start) >= 10_000), "{start}");
                kept.push_back((start, copy));
            }
            assert!(kept.len() >= 80, "{} messages fit", kept.len());
            for step in 0..1 + round % 100 {
                // Not always in order.
                let index = (round + step) % kept.len().min(3);
                copies.release(kept.remove(index).unwrap().1);
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
