//! Where a chunk with a checksum is received. Until it is verified, no byte of it counts as received, and none is in the
//! posted buffer: NCCL's kernels may poll that, and take what they see (see [`crate::memory::polled_copy`]).

use std::sync::Arc;

use crate::memory::buffers::RecvBuffer;
use crate::memory::staging::{StagingBlock, StagingPool};

/// Memory for one chunk. It holds some only while a chunk is there.
pub(crate) struct ChunkStage {
    pool: Arc<StagingPool>,
    /// The chunk's bytes, at their places in it. `None` before the first.
    block: Option<StagingBlock>,
}

impl ChunkStage {
    pub(crate) fn new(pool: &Arc<StagingPool>) -> Self {
        Self { pool: Arc::clone(pool), block: None }
    }

    /// Where to receive these bytes of a chunk of this length. To be used at once.
    ///
    /// # Panics
    /// When they are not inside the chunk.
    pub(crate) fn place(&mut self, length: usize, start: usize, end: usize) -> RecvBuffer {
        assert!(end <= length);
        self.block.get_or_insert_with(|| self.pool.take(length)).place(start, end)
    }

    /// These bytes of the chunk; none before the first is received.
    pub(crate) fn bytes(&self, start: usize, end: usize) -> &[u8] {
        self.block.as_ref().map_or(&[][..], |block| &block.bytes(end)[start..])
    }

    /// The chunk is not needed any more.
    pub(crate) fn clear(&mut self) {
        self.block = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunk_stage_keeps_bytes_until_it_is_cleared() {
        let mut stage = ChunkStage::new(&Arc::default());
        assert!(stage.bytes(0, 0).is_empty());
        stage.place(6, 2, 6).copy_from(b"3456");
        stage.place(6, 0, 2).copy_from(b"12");
        assert_eq!((stage.bytes(0, 6), stage.bytes(1, 3)), (&b"123456"[..], &b"23"[..]));
        stage.clear();
        assert!(stage.bytes(0, 0).is_empty());
    }

    #[test]
    #[should_panic(expected = "end <= length")]
    fn chunk_stage_has_no_place_behind_the_chunk() {
        ChunkStage::new(&Arc::default()).place(6, 2, 7);
    }
}
