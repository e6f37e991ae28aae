//! The header in front of every chunk.

use crate::{CHUNK_ALIGN, MAX_MESSAGE_BYTES};

/// Encoded length of a [`ChunkHeader`], in bytes.
pub const HEADER_BYTES: usize = 32;

/// The only kind of frame so far. Others can be added without a new layout.
const KIND_DATA: u16 = 1;

/// Says which bytes of which message follow on this flow.
///
/// Layout: kind u16, zero u16, length u32, message u64, offset u64, total u64. The connection is
/// implied by the flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkHeader {
    /// Number of the message in its connection, from 0.
    pub message: u64,
    /// First byte of the chunk in the message.
    pub offset: u64,
    /// Bytes in this chunk; 0 only for the one chunk of an empty message.
    pub length: u32,
    /// Bytes in the whole message.
    pub total: u64,
}

/// Why 32 bytes are not a valid chunk header.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// Not a frame this version knows.
    #[error("unknown frame kind {kind:#06x} (reserved {reserved:#06x})")]
    UnknownKind {
        /// The kind field.
        kind: u16,
        /// The field that must be zero.
        reserved: u16,
    },
    /// The numbers contradict each other.
    #[error("impossible chunk: offset {offset}, length {length}, message of {total} bytes")]
    Impossible {
        /// Claimed offset.
        offset: u64,
        /// Claimed length.
        length: u32,
        /// Claimed message length.
        total: u64,
    },
}

impl ChunkHeader {
    /// The bytes to put in front of the chunk.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[0..2].copy_from_slice(&KIND_DATA.to_le_bytes());
        out[4..8].copy_from_slice(&self.length.to_le_bytes());
        out[8..16].copy_from_slice(&self.message.to_le_bytes());
        out[16..24].copy_from_slice(&self.offset.to_le_bytes());
        out[24..32].copy_from_slice(&self.total.to_le_bytes());
        out
    }

    /// Reads a header and checks that it describes a chunk a correct peer could have cut.
    ///
    /// # Errors
    /// [`HeaderError`] when the bytes are not such a header.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, HeaderError> {
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u64_at = |at: usize| {
            let mut raw = [0; 8];
            raw.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(raw)
        };
        let (kind, reserved) = (u16_at(0), u16_at(2));
        if kind != KIND_DATA || reserved != 0 {
            return Err(HeaderError::UnknownKind { kind, reserved });
        }
        let length = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        let header = Self { message: u64_at(8), offset: u64_at(16), length, total: u64_at(24) };
        if header.is_possible() {
            Ok(header)
        } else {
            Err(HeaderError::Impossible { offset: header.offset, length, total: header.total })
        }
    }

    /// One past the last byte of the chunk.
    pub fn end(&self) -> u64 {
        self.offset + u64::from(self.length)
    }

    fn is_possible(&self) -> bool {
        let Some(end) = self.offset.checked_add(u64::from(self.length)) else { return false };
        self.total <= MAX_MESSAGE_BYTES
            && end <= self.total
            && (self.length > 0 || self.total == 0)
            && self.offset.is_multiple_of(CHUNK_ALIGN)
            && (end == self.total || end.is_multiple_of(CHUNK_ALIGN))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn layout_is_fixed() {
        let header = ChunkHeader { message: 7, offset: 128, length: 5, total: 133 };
        let mut expected = [0; HEADER_BYTES];
        expected[0] = 1;
        expected[4] = 5;
        expected[8] = 7;
        expected[16] = 128;
        expected[24] = 133;
        assert_eq!(header.encode(), expected);
        assert_eq!(ChunkHeader::decode(&expected), Ok(header));
    }

    #[test]
    fn impossible_chunks_are_refused() {
        let good = ChunkHeader { message: 0, offset: 128, length: 128, total: 256 };
        assert_eq!(ChunkHeader::decode(&good.encode()), Ok(good));
        for bad in [
            ChunkHeader { total: 255, ..good },
            ChunkHeader { offset: 1, total: 512, ..good },
            ChunkHeader { length: 100, ..good },
            ChunkHeader { length: 0, ..good },
            ChunkHeader { offset: u64::MAX - 127, ..good },
            ChunkHeader { total: MAX_MESSAGE_BYTES + 1, ..good },
        ] {
            assert!(
                matches!(ChunkHeader::decode(&bad.encode()), Err(HeaderError::Impossible { .. })),
                "{bad:?}"
            );
        }
    }

    #[test]
    fn unknown_kinds_are_refused() {
        let mut bytes = ChunkHeader { message: 0, offset: 0, length: 1, total: 1 }.encode();
        bytes[0] = 9;
        assert!(matches!(ChunkHeader::decode(&bytes), Err(HeaderError::UnknownKind { .. })));
    }

    proptest! {
        #[test]
        fn any_bytes_decode_or_fail_without_panic(bytes: [u8; HEADER_BYTES]) {
            if let Ok(header) = ChunkHeader::decode(&bytes) {
                prop_assert_eq!(header.encode(), bytes);
            }
        }
    }
}
