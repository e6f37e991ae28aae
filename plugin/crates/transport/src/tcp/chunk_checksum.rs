//! The checksum of a chunk that is being received. Until it is verified, no byte of the chunk counts as received.

use evenkeel_protocol::checksum;

use crate::memory::buffers::RecvBuffer;

/// What is stored of the current chunk, and whether it matches its checksum.
#[derive(Debug, Default)]
pub(crate) struct ChunkChecksum {
    message: u64,
    expected: u32,
    sum: u32,
    /// Parts of the message that are reserved and written: from, to.
    parts: Vec<(u64, u64)>,
}

impl ChunkChecksum {
    /// A chunk of this message begins, with this checksum.
    pub(crate) fn begin(&mut self, message: u64, expected: u32) {
        (self.message, self.expected, self.sum) = (message, expected, 0);
        self.parts.clear();
    }

    /// Adds bytes that were received into a buffer.
    pub(crate) fn received(&mut self, bytes: RecvBuffer) {
        self.sum = bytes.checksum(self.sum);
    }

    /// Adds bytes that were received before and are dropped.
    pub(crate) fn discarded(&mut self, bytes: &[u8]) {
        self.sum = checksum(self.sum, bytes);
    }

    /// This part of the message is written.
    pub(crate) fn written(&mut self, from: u64, to: u64) {
        self.parts.push((from, to));
    }

    /// Whether the whole chunk matches its checksum. [`ChunkChecksum::take_parts`] gives the parts to complete or to
    /// release.
    pub(crate) fn matches(&self) -> bool {
        self.sum == self.expected
    }

    /// The message, and the parts of it that were reserved and written.
    pub(crate) fn take_parts(&mut self) -> (u64, Vec<(u64, u64)>) {
        (self.message, std::mem::take(&mut self.parts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunk_checksum_covers_all_bytes_in_order() {
        let mut checksum = ChunkChecksum::default();
        let sum = evenkeel_protocol::checksum(0, b"123456");
        for (first, expected) in [(b"12", true), (b"13", false)] {
            checksum.begin(7, sum);
            checksum.discarded(first);
            assert!(!checksum.matches());
            checksum.received(RecvBuffer::from_static(Box::leak(Box::new(*b"3456"))));
            checksum.written(130, 134);
            assert_eq!(checksum.matches(), expected);
            assert_eq!(checksum.take_parts(), (7, vec![(130, 134)]));
        }
    }
}
