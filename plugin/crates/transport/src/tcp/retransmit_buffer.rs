//! Copies of small messages, kept until the peer acknowledges them.

use std::collections::VecDeque;

use crate::memory::buffers::{Memory, SendBuffer};

/// Maximum number of messages. Receivers leave fewer unacknowledged, so that room becomes free.
const MAX_MESSAGES: usize = 256;

/// A ring of messages. Room becomes free when the oldest ones are released.
pub(crate) struct RetransmitBuffer {
    bytes: usize,
    /// Allocated with the first message.
    memory: Option<Memory>,
    /// Where the next message is stored.
    next: usize,
    /// Oldest first.
    stored: VecDeque<StoredCopy>,
    /// Bytes of those.
    used: usize,
    /// Number of the oldest.
    first: u64,
}

struct StoredCopy {
    start: usize,
    length: usize,
    released: bool,
}

/// The copy of a message, to be released.
#[derive(Debug)]
pub(crate) struct CopyId(u64);

impl RetransmitBuffer {
    /// With this number of bytes.
    pub(crate) fn new(bytes: usize) -> Self {
        Self { bytes, memory: None, next: 0, stored: VecDeque::new(), used: 0, first: 0 }
    }

    /// Whether the peer should acknowledge soon: room for a message of this length is short, or will be.
    pub(crate) fn is_short(&self, length: u64) -> bool {
        self.used as u64 + length > self.bytes as u64 / 2 || self.stored.len() >= MAX_MESSAGES / 2
    }

    /// Copies a message if there is room. The copy stays until it is released.
    pub(crate) fn store(&mut self, message: SendBuffer) -> Option<(SendBuffer, CopyId)> {
        let length = message.length();
        let start = self.room_for(length)?;
        let memory = self.memory.get_or_insert_with(|| Memory::new(self.bytes));
        let buffer = memory.store(start, message);
        self.next = start + length;
        self.used += length;
        self.stored.push_back(StoredCopy { start, length, released: false });
        Some((buffer, CopyId(self.first + self.stored.len() as u64 - 1)))
    }

    fn room_for(&self, length: usize) -> Option<usize> {
        if self.stored.len() >= MAX_MESSAGES {
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
    pub(crate) fn release(&mut self, copy: CopyId) {
        let index = copy.0.checked_sub(self.first).map(|index| index as usize);
        if let Some(stored) = index.and_then(|index| self.stored.get_mut(index)) {
            stored.released = true;
        }
        while let Some(oldest) = self.stored.front().filter(|stored| stored.released) {
            self.used -= oldest.length;
            self.stored.pop_front();
            self.first += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retransmit_buffer_reuses_released_room() {
        let mut copies = RetransmitBuffer::new(1 << 20);
        let message = SendBuffer::from_static(&[7; 10_000]);
        let mut kept: VecDeque<(usize, CopyId)> = VecDeque::new();
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
        kept.into_iter().for_each(|(_, copy)| copies.release(copy));
        assert_eq!(copies.used, 0);
    }

    #[test]
    fn retransmit_buffer_is_short_before_it_is_full() {
        for (room, length) in [(1 << 20, 1), (1 << 15, 64), (1 << 15, 8256)] {
            let mut copies = RetransmitBuffer::new(room);
            let message = SendBuffer::from_static(&[7; 8256]).part(0, length);
            assert!(!copies.is_short(length as u64));
            let mut short = 0;
            while copies.store(message).is_some() {
                short += usize::from(copies.is_short(length as u64));
            }
            assert!(short > 0, "{length} bytes in {room}");
        }
        assert!(RetransmitBuffer::new(1000).is_short(501), "there may never be room for it");
    }

    #[test]
    fn retransmit_buffer_bounds_the_number_of_messages() {
        let mut copies = RetransmitBuffer::new(1 << 20);
        let stored = (0..1000).filter(|_| copies.store(SendBuffer::from_static(b"x")).is_some());
        assert_eq!(stored.count(), MAX_MESSAGES);
    }
}
