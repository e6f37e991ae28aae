//! Memory for bytes that must be verified before they go where they belong.

use std::sync::{Arc, Mutex};

use super::block::Block;
use super::buffers::RecvBuffer;
use crate::sync::lock;

/// Maximum number of bytes that are kept for later use.
const MAX_IDLE_BYTES: usize = 32 << 20;
/// Minimum length of a block, so that blocks can be used for chunks of other lengths.
const MIN_BLOCK_BYTES: usize = 64 << 10;

/// Blocks that are not in use. Shared by all flows of a process, so that idle flows hold nothing. A
/// flow has at most one, of at most twice the longest chunk.
#[derive(Default)]
pub(crate) struct StagingPool {
    idle: Mutex<IdleBlocks>,
}

#[derive(Default)]
struct IdleBlocks {
    blocks: Vec<Block>,
    bytes: usize,
}

impl StagingPool {
    /// Memory for this number of bytes, which returns to the pool when it is dropped.
    pub(crate) fn take(self: &Arc<Self>, length: usize) -> StagingBlock {
        let idle = {
            let mut idle = lock(&self.idle);
            // Chunks are nearly all of the same length, so the first block nearly always fits.
            let fits = idle.blocks.iter().rposition(|block| block.bytes().len() >= length);
            fits.map(|at| {
                let block = idle.blocks.swap_remove(at);
                idle.bytes -= block.bytes().len();
                block
            })
        };
        let new = || Block::new(length.next_power_of_two().max(MIN_BLOCK_BYTES));
        StagingBlock { block: Some(idle.unwrap_or_else(new)), pool: Arc::clone(self) }
    }
}

/// Memory of a [`StagingPool`].
pub(crate) struct StagingBlock {
    /// `None` once it is dropped.
    block: Option<Block>,
    pool: Arc<StagingPool>,
}

impl StagingBlock {
    /// Its first bytes.
    ///
    /// # Panics
    /// When it is shorter.
    pub(crate) fn bytes(&self, length: usize) -> &[u8] {
        self.block.as_ref().map_or(&[][..], Block::bytes).split_at(length).0
    }

    /// A part of it to receive into, at once.
    ///
    /// # Panics
    /// When it is shorter.
    pub(crate) fn place(&mut self, from: usize, to: usize) -> RecvBuffer {
        match &mut self.block {
            Some(block) => block.lend_mut(to).part(from, to - from),
            None => RecvBuffer::from_static(&mut []),
        }
    }
}

impl Drop for StagingBlock {
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        let length = block.bytes().len();
        let mut idle = lock(&self.pool.idle);
        if idle.bytes + length <= MAX_IDLE_BYTES {
            idle.bytes += length;
            idle.blocks.push(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn staging_memory_is_used_again_and_bounded() {
        let pool = Arc::new(StagingPool::default());
        let idle = || {
            let idle = lock(&pool.idle);
            (idle.blocks.len(), idle.bytes)
        };
        let mut block = pool.take(100_000);
        block.place(10, 13).copy_from(b"abc");
        assert_eq!(block.bytes(13)[10..], *b"abc");
        drop(block);
        assert_eq!(idle(), (1, 131_072));
        let (same, other) = (pool.take(131_072), pool.take(1));
        assert_eq!(idle(), (0, 0));
        drop((same, other));
        assert_eq!(idle(), (2, 131_072 + MIN_BLOCK_BYTES));
        // Too short for it.
        drop(pool.take(200_000));
        assert_eq!(idle().0, 3);
        drop((0..10).map(|_| pool.take(16 << 20)).collect::<Vec<_>>());
        assert!(idle().1 <= MAX_IDLE_BYTES && idle().1 > MAX_IDLE_BYTES / 2, "{:?}", idle());
    }
}
