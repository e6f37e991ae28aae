//! Copies of small messages, kept until the peer acknowledges them.

use std::sync::{Arc, Mutex};

use evenkeel_protocol::{COPY_BLOCK_BYTES, CopyId, CopyReservation, CopyRings};

use crate::memory::buffers::{Memory, RecvBuffer, SendBuffer};
use crate::sync::lock;

/// Maximum bytes of all blocks of a process. A message that finds none is done once the peer has it.
const MAX_BYTES: usize = 64 << 20;
/// Maximum bytes of the blocks that are kept for later use.
const MAX_IDLE_BYTES: usize = 16 << 20;

/// The memory of all retransmit buffers of a process. An idle connection holds none of it.
#[derive(Default)]
pub(crate) struct RetransmitPool(Mutex<Blocks>);

#[derive(Default)]
struct Blocks {
    /// Of [`COPY_BLOCK_BYTES`] each.
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
            if length == COPY_BLOCK_BYTES { blocks.idle.pop() } else { None }
        };
        Some(idle.unwrap_or_else(|| Memory::new(length)))
    }

    fn give_back(&self, block: Memory) {
        let mut blocks = lock(&self.0);
        blocks.used -= block.length();
        if block.length() == COPY_BLOCK_BYTES
            && blocks.idle.len() < MAX_IDLE_BYTES / COPY_BLOCK_BYTES
        {
            blocks.idle.push(block);
        }
    }

    /// Bytes of the blocks in use.
    #[cfg(test)]
    pub(crate) fn used(&self) -> usize {
        lock(&self.0).used
    }
}

/// Where a message is copied, without the lock of its connection. To be released.
#[derive(Debug)]
pub(crate) struct CopyPlace {
    memory: RecvBuffer,
    copy: CopyId,
}

impl CopyPlace {
    /// Copies the message.
    pub(crate) fn fill(&self, message: SendBuffer) {
        self.memory.copy_message(message);
    }

    /// The copy, once the place is filled.
    pub(crate) fn message(&self) -> SendBuffer {
        self.memory.as_send()
    }
}

/// The copies of one connection, in blocks of the pool.
pub(crate) struct RetransmitBuffer {
    pool: Arc<RetransmitPool>,
    /// Where they are.
    rings: CopyRings,
    /// By number.
    blocks: Vec<Option<Memory>>,
}

impl RetransmitBuffer {
    /// For this number of bytes.
    pub(crate) fn new(bytes: usize, pool: &Arc<RetransmitPool>) -> Self {
        Self { pool: Arc::clone(pool), rings: CopyRings::new(bytes), blocks: Vec::new() }
    }

    /// Whether the peer should acknowledge soon: room for a message of this length is short, or will be.
    pub(crate) fn is_short(&self, length: u64) -> bool {
        self.rings.is_short(length)
    }

    /// A place for the copy of a message of this length, if there is room. It stays until it is released.
    pub(crate) fn reserve(&mut self, length: usize) -> Option<CopyPlace> {
        loop {
            match self.rings.reserve(length) {
                CopyReservation::Place { block, start, copy } => {
                    let block = self.blocks.get_mut(block)?.as_mut()?;
                    return Some(CopyPlace { memory: block.lend(start, length), copy });
                }
                CopyReservation::NeedsBlock(bytes) => {
                    self.give_back();
                    let memory = self.pool.take(bytes)?;
                    let block = self.rings.add_block(bytes);
                    if self.blocks.len() <= block {
                        self.blocks.resize_with(block + 1, || None);
                    }
                    self.blocks[block] = Some(memory);
                }
                CopyReservation::Full => {
                    self.give_back();
                    return None;
                }
            }
        }
    }

    /// The copy is not needed any more.
    pub(crate) fn release(&mut self, place: CopyPlace) {
        self.rings.release(place.copy);
        self.give_back();
    }

    /// Gives back what an idle connection does not need.
    pub(crate) fn shrink(&mut self) {
        self.rings.shrink();
        self.give_back();
    }

    /// Gives back the blocks that are not needed any more.
    fn give_back(&mut self) {
        while let Some(block) = self.rings.next_unused() {
            if let Some(memory) = self.blocks.get_mut(block).and_then(Option::take) {
                self.pool.give_back(memory);
            }
        }
    }
}

impl Drop for RetransmitBuffer {
    fn drop(&mut self) {
        self.blocks.drain(..).flatten().for_each(|memory| self.pool.give_back(memory));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::memory::block::Block;

    /// Copies a message if there is room.
    fn store(copies: &mut RetransmitBuffer, message: SendBuffer) -> Option<CopyPlace> {
        let place = copies.reserve(message.length())?;
        place.fill(message);
        Some(place)
    }

    #[test]
    fn retransmit_buffer_keeps_messages_until_they_are_released() {
        let mut copies = RetransmitBuffer::new(100_000, &Arc::default());
        let mut kept: VecDeque<(u8, CopyPlace)> = VecDeque::new();
        for round in 0..1000_usize {
            let (value, length) = (round as u8, 100 + round * 97 % 16_000);
            let mut message = Block::new(length);
            message.bytes_mut().fill(value);
            while let Some(copy) = store(&mut copies, message.lend(length)) {
                kept.push_back((value, copy));
            }
            for _ in 0..(1 + round % 5).min(kept.len()) {
                let at = round % kept.len().min(3);
                let (value, copy) = kept.remove(at).unwrap();
                let mut bytes = vec![0; copy.message().length()];
                copy.message().copy_to(&mut bytes);
                assert!(bytes.iter().all(|byte| *byte == value), "another one was stored there");
                copies.release(copy);
            }
        }
        kept.into_iter().for_each(|(_, copy)| copies.release(copy));
        copies.shrink();
        assert_eq!(copies.pool.used(), 0);
    }

    #[test]
    fn retransmit_pool_is_bounded_and_gets_its_memory_back() {
        let pool = Arc::new(RetransmitPool::default());
        let message = SendBuffer::from_static(&[7; 16_384]);
        let mut senders: Vec<_> =
            (0..3000).map(|_| RetransmitBuffer::new(1 << 20, &pool)).collect();
        let stored = senders.iter_mut().filter_map(|sender| store(sender, message));
        assert_eq!(stored.count(), MAX_BYTES / COPY_BLOCK_BYTES);
        assert_eq!(pool.used(), MAX_BYTES);
        // A message longer than a block.
        let long = SendBuffer::from_static(&[7; 100_000]);
        assert!(store(&mut senders[2999], long).is_none());
        senders.truncate(10);
        senders.push(RetransmitBuffer::new(1 << 20, &pool));
        let copy = store(&mut senders[10], long).unwrap();
        assert_eq!(pool.used(), 10 * COPY_BLOCK_BYTES + 100_000);
        senders[10].release(copy);
        drop(senders);
        let blocks = lock(&pool.0);
        assert_eq!((blocks.used, blocks.idle.len()), (0, MAX_IDLE_BYTES / COPY_BLOCK_BYTES));
    }
}
