//! The checksum of a chunk that is being received. Until it is verified, no byte of the chunk counts as received, and none
//! is in the posted buffer: NCCL's kernels may poll that, and take what they see (see [`crate::memory::polled_copy`]).

use std::sync::Arc;

use evenkeel_protocol::{ChunkHeader, checksum};

use crate::memory::buffers::RecvBuffer;
use crate::memory::staging::{StagingBlock, StagingPool};

/// The current chunk's bytes, and whether they match its checksum.
pub(crate) struct ChunkChecksum {
    pool: Arc<StagingPool>,
    message: u64,
    /// Where the chunk begins in its message.
    offset: u64,
    length: usize,
    expected: u32,
    sum: u32,
    /// The chunk's bytes, at their places in it. `None` before the first, and for an empty chunk.
    staging: Option<StagingBlock>,
    /// Parts of the message that are reserved and received.
    parts: Vec<Part>,
}

struct Part {
    /// The message's buffer.
    buffer: RecvBuffer,
    from: u64,
    to: u64,
}

impl ChunkChecksum {
    pub(crate) fn new(pool: &Arc<StagingPool>) -> Self {
        Self {
            pool: Arc::clone(pool),
            message: 0,
            offset: 0,
            length: 0,
            expected: 0,
            sum: 0,
            staging: None,
            parts: Vec::new(),
        }
    }

    /// A chunk begins, with this checksum.
    pub(crate) fn begin(&mut self, chunk: &ChunkHeader, expected: u32) {
        (self.message, self.offset) = (chunk.message, chunk.offset);
        (self.length, self.expected, self.sum) = (chunk.length as usize, expected, 0);
        self.parts.clear();
    }

    /// Where to receive these bytes of the message, which belong to the chunk. To be used at once.
    ///
    /// # Panics
    /// When they do not belong to the chunk.
    pub(crate) fn place(&mut self, from: u64, to: u64) -> RecvBuffer {
        let (length, pool) = (self.length, &self.pool);
        let (from, to) = ((from - self.offset) as usize, (to - self.offset) as usize);
        assert!(to <= length);
        self.staging.get_or_insert_with(|| pool.take(length)).place(from, to)
    }

    /// Bytes from here on were received into their place.
    pub(crate) fn received(&mut self, from: u64, length: u64) {
        let bytes = self.staged(from, from + length);
        self.sum = checksum(self.sum, bytes);
    }

    /// Adds bytes that were received before and are dropped.
    pub(crate) fn discarded(&mut self, bytes: &[u8]) {
        self.sum = checksum(self.sum, bytes);
    }

    /// This part of the message is complete, and belongs into this buffer of the message.
    pub(crate) fn part_received(&mut self, buffer: RecvBuffer, from: u64, to: u64) {
        self.parts.push(Part { buffer, from, to });
    }

    /// Whether the whole chunk matches its checksum.
    pub(crate) fn matches(&self) -> bool {
        self.sum == self.expected
    }

    /// Copies the parts into their buffers. Calls `delivered` after each, with its message and its length.
    pub(crate) fn deliver(&mut self, mut delivered: impl FnMut(u64, u64)) {
        for &Part { buffer, from, to } in &self.parts {
            let bytes = self.staged(from, to);
            buffer.part(from as usize, bytes.len()).copy_from(bytes);
            delivered(self.message, to - from);
        }
        self.parts.clear();
        self.staging = None;
    }

    /// Drops the chunk. Calls `release` for each part, with its message, begin and end.
    pub(crate) fn drop_parts(&mut self, mut release: impl FnMut(u64, u64, u64)) {
        let message = self.message;
        self.parts.drain(..).for_each(|part| release(message, part.from, part.to));
        self.staging = None;
    }

    fn staged(&self, from: u64, to: u64) -> &[u8] {
        let (from, to) = ((from - self.offset) as usize, (to - self.offset) as usize);
        self.staging.as_ref().map_or(&[][..], |staging| &staging.bytes(to)[from..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::block::Block;

    #[test]
    fn checksum_of_a_chunk_decides_whether_its_bytes_are_delivered() {
        let mut checksum = ChunkChecksum::new(&Arc::default());
        let sum = evenkeel_protocol::checksum(0, b"123456");
        let chunk =
            ChunkHeader { message: 7, offset: 128, length: 6, total: 134, ack_wanted: true };
        for (first, expected) in [(b"12", true), (b"13", false)] {
            let mut memory = Block::new(134);
            let buffer = memory.lend_mut(134);
            checksum.begin(&chunk, sum);
            checksum.discarded(first);
            assert!(!checksum.matches());
            checksum.place(130, 134).copy_from(b"3456");
            checksum.received(130, 3);
            checksum.received(133, 1);
            checksum.part_received(buffer, 130, 134);
            assert_eq!(checksum.matches(), expected);
            assert_eq!(memory.bytes(), [0; 134], "before the verdict");
            let mut parts = Vec::new();
            if expected {
                checksum.deliver(|message, length| parts.push((message, length)));
                assert_eq!((&memory.bytes()[130..], parts), (&b"3456"[..], vec![(7, 4)]));
            } else {
                checksum.drop_parts(|message, from, to| parts.push((message, from * 1000 + to)));
                assert_eq!((memory.bytes(), parts), (&[0; 134][..], vec![(7, 130_134)]));
            }
        }
    }
}
