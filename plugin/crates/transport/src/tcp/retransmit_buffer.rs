//! Copies of small messages, kept until the peer acknowledges them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use crate::memory::buffers::{Memory, SendBuffer};
use crate::sync::lock;

/// Maximum number of messages. Receivers leave fewer unacknowledged, so that room becomes free.
const MAX_MESSAGES: usize = 256;
/// Bytes of a block of memory. A longer message has one of its own length.
const BLOCK_BYTES: usize = 32 << 10;
/// Bytes of the first block, if that has room for several messages. Most connections have few short messages at a time, and
/// there may be thousands of them.
const FIRST_BLOCK_BYTES: usize = 4 << 10;
/// Maximum bytes of all blocks of a process. A message that finds none is done once the peer has it.
const MAX_BYTES: usize = 64 << 20;
/// Maximum bytes of the blocks that are kept for later use.
const MAX_IDLE_BYTES: usize = 16 << 20;

/// The memory of all retransmit buffers of a process. An idle connection holds none of it.
#[derive(Default)]
pub(crate) struct RetransmitPool(Mutex<Blocks>);

#[derive(Default)]
struct Blocks {
    /// Of [`BLOCK_BYTES`] each.
    idle: Vec<Memory>,
    /// Bytes of the blocks in use.
    used: usize,
}

impl RetransmitPool {
    /// A block of this many bytes, if the process may have one more.
    fn take(&self, length: usize) -> Option<Memory> {
        let idle = {
            let mut blocks = lock(&self.0);
            if blocks.used + length > MAX_BYTES {
                return None;
            }
            blocks.used += length;
            if length == BLOCK_BYTES { blocks.idle.pop() } else { None }
        };
        Some(idle.unwrap_or_else(|| Memory::new(length)))
    }

    fn give_back(&self, block: Memory) {
        let mut blocks = lock(&self.0);
        blocks.used -= block.length();
        if block.length() == BLOCK_BYTES && blocks.idle.len() < MAX_IDLE_BYTES / BLOCK_BYTES {
            blocks.idle.push(block);
        }
    }

    /// Bytes of the blocks in use.
    #[cfg(test)]
    pub(crate) fn used(&self) -> usize {
        lock(&self.0).used
    }
}

/// The copies of one connection, in blocks of the pool.
pub(crate) struct RetransmitBuffer {
    pool: Arc<RetransmitPool>,
    /// Maximum bytes of the messages, and of more than one block.
    bytes: usize,
    /// Messages go to the first with room, so that later ones become empty and are given back.
    rings: Vec<Option<Ring>>,
    /// Bytes and number of the messages, and bytes of the rings.
    used: usize,
    messages: usize,
    held: usize,
}

/// Messages in one block. Room becomes free when the oldest ones are released.
struct Ring {
    memory: Memory,
    /// Where the next message is stored.
    next: usize,
    /// Oldest first.
    stored: VecDeque<StoredCopy>,
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
pub(crate) struct CopyId {
    ring: usize,
    number: u64,
}

impl RetransmitBuffer {
    /// For this number of bytes.
    pub(crate) fn new(bytes: usize, pool: &Arc<RetransmitPool>) -> Self {
        let pool = Arc::clone(pool);
        Self { pool, bytes, rings: Vec::new(), used: 0, messages: 0, held: 0 }
    }

    /// Whether the peer should acknowledge soon: room for a message of this length is short, or will be.
    pub(crate) fn is_short(&self, length: u64) -> bool {
        self.used as u64 + length > self.bytes as u64 / 2 || self.messages >= MAX_MESSAGES / 2
    }

    /// Copies a message if there is room. The copy stays until it is released.
    pub(crate) fn store(&mut self, message: SendBuffer) -> Option<(SendBuffer, CopyId)> {
        let length = message.length();
        if self.messages >= MAX_MESSAGES || length > self.bytes - self.used {
            return None;
        }
        let mut rings = self.rings.iter_mut().enumerate();
        let stored = rings.find_map(|(at, ring)| Some((at, ring.as_mut()?.store(message)?)));
        let (ring, (buffer, number)) = match stored {
            Some(stored) => stored,
            None => {
                let ring = self.add_ring(length)?;
                (ring, self.rings[ring].as_mut()?.store(message)?)
            }
        };
        self.used += length;
        self.messages += 1;
        Some((buffer, CopyId { ring, number }))
    }

    /// A new ring with room for a message of this length.
    fn add_ring(&mut self, length: usize) -> Option<usize> {
        // Those without messages are too short for this one.
        (0..self.rings.len()).for_each(|ring| self.give_back_if_empty(ring));
        let is_first = self.held == 0 && self.bytes >= 2 * BLOCK_BYTES;
        let length = match is_first && length <= FIRST_BLOCK_BYTES / 4 {
            true => FIRST_BLOCK_BYTES,
            false => length.max(BLOCK_BYTES),
        };
        if self.held > 0 && self.held + length > self.bytes {
            return None;
        }
        let memory = self.pool.take(length)?;
        self.held += length;
        let ring = Ring { memory, next: 0, stored: VecDeque::new(), first: 0 };
        let at = self.rings.iter().position(Option::is_none).unwrap_or(self.rings.len());
        if at == self.rings.len() {
            self.rings.push(None);
        }
        self.rings[at] = Some(ring);
        Some(at)
    }

    /// The copy is not needed any more.
    pub(crate) fn release(&mut self, copy: CopyId) {
        let Some(Some(ring)) = self.rings.get_mut(copy.ring) else { return };
        for oldest in ring.release(copy.number) {
            self.used -= oldest.length;
            self.messages -= 1;
        }
        // One block is kept while messages follow each other, and no short one beside it.
        let is_short = ring.memory.length() < BLOCK_BYTES;
        let is_block = |ring: &Ring| ring.memory.length() >= BLOCK_BYTES;
        let others = if is_short { &self.rings[..] } else { &self.rings[..copy.ring] };
        if others.iter().flatten().any(is_block) {
            self.give_back_if_empty(copy.ring);
        }
    }

    /// Gives back what an idle connection does not need.
    pub(crate) fn shrink(&mut self) {
        if self.messages == 0 {
            (0..self.rings.len()).for_each(|ring| self.give_back(ring));
        }
    }

    fn give_back_if_empty(&mut self, ring: usize) {
        if self.rings[ring].as_ref().is_some_and(|ring| ring.stored.is_empty()) {
            self.give_back(ring);
        }
    }

    fn give_back(&mut self, ring: usize) {
        if let Some(Ring { memory, .. }) = self.rings[ring].take() {
            self.held -= memory.length();
            self.pool.give_back(memory);
        }
    }
}

impl Drop for RetransmitBuffer {
    fn drop(&mut self) {
        (0..self.rings.len()).for_each(|ring| self.give_back(ring));
    }
}

impl Ring {
    /// The copy of a message, and its number, if there is room.
    fn store(&mut self, message: SendBuffer) -> Option<(SendBuffer, u64)> {
        let length = message.length();
        let start = self.room_for(length)?;
        let buffer = self.memory.store(start, message);
        self.next = start + length;
        self.stored.push_back(StoredCopy { start, length, released: false });
        Some((buffer, self.first + self.stored.len() as u64 - 1))
    }

    fn room_for(&self, length: usize) -> Option<usize> {
        let bytes = self.memory.length();
        let Some(oldest) = self.stored.front().map(|stored| stored.start) else {
            return (length <= bytes).then_some(0);
        };
        if self.next < oldest {
            (length < oldest - self.next).then_some(self.next)
        } else if length <= bytes - self.next {
            Some(self.next)
        } else {
            (length < oldest).then_some(0)
        }
    }

    /// Removes the oldest copies that are not needed any more, now that this one is not.
    fn release(&mut self, number: u64) -> impl Iterator<Item = StoredCopy> + '_ {
        let index = number.checked_sub(self.first).map(|index| index as usize);
        if let Some(stored) = index.and_then(|index| self.stored.get_mut(index)) {
            stored.released = true;
        }
        std::iter::from_fn(|| {
            self.stored.front().filter(|stored| stored.released)?;
            self.first += 1;
            self.stored.pop_front()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buffer(bytes: usize) -> RetransmitBuffer {
        RetransmitBuffer::new(bytes, &Arc::default())
    }

    #[test]
    fn retransmit_buffer_reuses_released_room() {
        for (bytes, least) in [(1 << 20, 80), (BLOCK_BYTES, 2), (20_000, 2)] {
            let mut copies = buffer(bytes);
            let message = SendBuffer::from_static(&[7; 10_000]);
            let mut kept: VecDeque<(usize, CopyId)> = VecDeque::new();
            for round in 0..1000 {
                while let Some((copy, id)) = copies.store(message) {
                    let start = copy.start_address();
                    assert!(kept.iter().all(|(other, _)| other.abs_diff(start) >= 10_000));
                    kept.push_back((start, id));
                }
                assert!(kept.len() >= least, "{} messages fit into {bytes}", kept.len());
                assert!(copies.held <= bytes.max(BLOCK_BYTES) && copies.used <= bytes);
                for step in 0..(1 + round % 100).min(kept.len()) {
                    // Not always in order.
                    let index = (round + step) % kept.len().min(3);
                    copies.release(kept.remove(index).unwrap().1);
                }
            }
            kept.into_iter().for_each(|(_, copy)| copies.release(copy));
            assert_eq!((copies.used, copies.messages), (0, 0));
            assert!(copies.held <= BLOCK_BYTES, "{} bytes are held", copies.held);
            copies.shrink();
            assert_eq!((copies.held, copies.pool.used()), (0, 0));
        }
    }

    #[test]
    fn retransmit_buffer_is_short_before_it_is_full() {
        for (room, length) in [(1 << 20, 1), (1 << 15, 64), (1 << 15, 8256)] {
            let mut copies = buffer(room);
            let message = SendBuffer::from_static(&[7; 8256]).part(0, length);
            assert!(!copies.is_short(length as u64));
            let mut short = 0;
            while copies.store(message).is_some() {
                short += usize::from(copies.is_short(length as u64));
            }
            assert!(short > 0, "{length} bytes in {room}");
        }
        assert!(buffer(1000).is_short(501), "there may never be room for it");
    }

    #[test]
    fn retransmit_buffer_of_few_short_messages_is_small() {
        let mut copies = buffer(1 << 20);
        let message = |length| SendBuffer::from_static(&[7; 16_384]).part(0, length);
        let stored: Vec<_> = (0..3).map(|_| copies.store(message(1024)).unwrap().1).collect();
        assert_eq!(copies.held, FIRST_BLOCK_BYTES);
        stored.into_iter().for_each(|copy| copies.release(copy));
        // Longer ones follow: it does not stay beside their block, and theirs stays.
        for length in [16_384, 1024] {
            let (_, copy) = copies.store(message(length)).unwrap();
            assert_eq!(copies.held, BLOCK_BYTES);
            copies.release(copy);
        }
        assert_eq!((copies.rings.len(), copies.held), (1, BLOCK_BYTES));
    }

    #[test]
    fn retransmit_buffer_keeps_a_block_for_short_messages_that_follow_each_other() {
        let mut copies = buffer(1 << 20);
        let message = SendBuffer::from_static(&[7; 1024]);
        for burst in 0..5 {
            let mut stored = Vec::new();
            for _ in 0..12 {
                stored.push(copies.store(message).unwrap().1);
                assert!(burst == 0 || copies.held == BLOCK_BYTES, "{} are held", copies.held);
            }
            stored.into_iter().for_each(|copy| copies.release(copy));
        }
        copies.shrink();
        assert_eq!((copies.held, copies.pool.used()), (0, 0));
    }

    #[test]
    fn retransmit_buffer_bounds_the_number_of_messages() {
        let mut copies = buffer(1 << 20);
        let stored = (0..1000).filter(|_| copies.store(SendBuffer::from_static(b"x")).is_some());
        assert_eq!(stored.count(), MAX_MESSAGES);
    }

    #[test]
    fn retransmit_pool_is_bounded_and_gets_its_memory_back() {
        let pool = Arc::new(RetransmitPool::default());
        let message = SendBuffer::from_static(&[7; 16_384]);
        let mut senders: Vec<_> =
            (0..3000).map(|_| RetransmitBuffer::new(1 << 20, &pool)).collect();
        let stored = senders.iter_mut().filter_map(|sender| sender.store(message));
        assert_eq!(stored.count(), MAX_BYTES / BLOCK_BYTES);
        assert_eq!(pool.used(), MAX_BYTES);
        // A message longer than a block.
        let long = SendBuffer::from_static(&[7; 100_000]);
        assert!(senders[2999].store(long).is_none());
        senders.truncate(10);
        senders.push(RetransmitBuffer::new(1 << 20, &pool));
        let (_, copy) = senders[10].store(long).unwrap();
        assert_eq!(pool.used(), 10 * BLOCK_BYTES + 100_000);
        senders[10].release(copy);
        drop(senders);
        let blocks = lock(&pool.0);
        assert_eq!((blocks.used, blocks.idle.len()), (0, MAX_IDLE_BYTES / BLOCK_BYTES));
    }
}
