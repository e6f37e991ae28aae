//! Frames: what a flow carries after the handshake. They have a fixed size, and some have a payload.

use std::ops::Range;

use crate::limits::{CHUNK_ALIGN, MAX_MESSAGE_BYTES};

/// Encoded length of a [`Frame`] without its payload, in bytes.
pub const FRAME_BYTES: usize = 32;

/// Where a sealed frame has the checksum of its payload, and the checksum of the frame itself up to there. These are the
/// upper halves of numbers that fit into the lower ones.
const PAYLOAD_SUM: Range<usize> = 20..24;
const FRAME_SUM: Range<usize> = 28..32;

const KIND_CHUNK: u16 = 1;
const KIND_FLOW_DEAD: u16 = 2;
const KIND_ACK: u16 = 3;
const KIND_CLOSE: u16 = 4;
const KIND_TAG: u16 = 5;
const KIND_TAGS_DIFFER_FROM: u16 = 6;
const KIND_SAME_TAG_BELOW: u16 = 7;
const KIND_BUFFER_TAG: u16 = 8;

/// Flag of a chunk: the sender waits for its message's acknowledgement.
const FLAG_ACK_WANTED: u16 = 1;

/// A message of the protocol on a flow.
///
/// Layout: kind u16, flags u16, length u32 (a buffer's tag in [`Frame::BufferTag`]), then three u64: a chunk's message,
/// offset and total; else one number, which is a message's, a dead flow's or a tag. An acknowledgement has milliseconds in
/// the second. Unused fields are zero, including the
/// upper halves of offset and total. With checksums ([`Frame::seal`]), those two halves have them.
///
/// Messages and buffers may have tags, which are sent only where they matter. The n-th message goes to the n-th buffer, and
/// as long as all have the same tag nothing more is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// To the receiver: a piece of a message follows.
    Chunk(ChunkHeader),
    /// Another flow is dead. It carries nothing more, and its undelivered bytes must not be used: they are
    /// retransmitted after this frame. A receiver answers with its latest acknowledgement, which may have
    /// been lost with the flow. A receiver reports flows that it has lost in the same way.
    FlowDead(u32),
    /// To the sender: every message below this number is complete. Also how long messages have waited so far for a buffer that
    /// the receiver had not posted, in milliseconds, modulo 2^32.
    Ack(u64, u32),
    /// The connection is closed on purpose. From a sender: it delivers the messages below this number, on other flows if
    /// it loses this one, and no others. From a receiver: it has those below this number, and takes no others.
    Close(u64),
    /// To the receiver, before a flow's first chunk: the tag of the messages, if it is not 0.
    Tag(i32),
    /// To the sender: from the buffer of this number on, tags differ. The sender answers with the number up to which it
    /// has ignored that ([`Frame::SameTagBelow`]), and sends further messages in the order of the buffers' tags
    /// ([`Frame::BufferTag`]).
    TagsDifferFrom(u64),
    /// To the receiver: all messages below this number have the first one's tag.
    SameTagBelow(u64),
    /// To the sender: the buffer for the message of this number is posted, and has this tag.
    BufferTag(u64, i32),
}

/// Which bytes of which message follow on this flow. The flow implies the connection.
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
    /// Whether the sender waits for the message's acknowledgement. Else it may be delayed and
    /// combined with others.
    pub ack_wanted: bool,
}

/// Why 32 bytes are not a valid frame.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// A kind that this version does not have.
    #[error("unknown frame kind {kind:#06x} (flags {flags:#06x})")]
    UnknownKind {
        /// The kind field.
        kind: u16,
        /// The flags field.
        flags: u16,
    },
    /// A field that the kind does not use is not zero.
    #[error("frame kind {kind:#06x} with unused fields that are not zero")]
    Unused {
        /// The kind field.
        kind: u16,
    },
    /// The bytes have changed on the way.
    #[error("a frame that does not match its checksum")]
    Checksum,
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

impl Frame {
    /// The bytes to send.
    pub fn encode(&self) -> [u8; FRAME_BYTES] {
        let (kind, flags, length, fields) = match *self {
            Self::Chunk(chunk) => {
                let flags = if chunk.ack_wanted { FLAG_ACK_WANTED } else { 0 };
                (KIND_CHUNK, flags, chunk.length, [chunk.message, chunk.offset, chunk.total])
            }
            Self::FlowDead(flow) => (KIND_FLOW_DEAD, 0, 0, [flow.into(), 0, 0]),
            Self::Ack(below, unposted) => (KIND_ACK, 0, 0, [below, unposted.into(), 0]),
            Self::Close(below) => (KIND_CLOSE, 0, 0, [below, 0, 0]),
            Self::Tag(tag) => (KIND_TAG, 0, 0, [tag.cast_unsigned().into(), 0, 0]),
            Self::TagsDifferFrom(from) => (KIND_TAGS_DIFFER_FROM, 0, 0, [from, 0, 0]),
            Self::SameTagBelow(below) => (KIND_SAME_TAG_BELOW, 0, 0, [below, 0, 0]),
            Self::BufferTag(message, tag) => {
                (KIND_BUFFER_TAG, 0, tag.cast_unsigned(), [message, 0, 0])
            }
        };
        let mut out = [0; FRAME_BYTES];
        out[0..2].copy_from_slice(&kind.to_le_bytes());
        out[2..4].copy_from_slice(&flags.to_le_bytes());
        out[4..8].copy_from_slice(&length.to_le_bytes());
        for (place, field) in out[8..].chunks_exact_mut(8).zip(fields) {
            place.copy_from_slice(&field.to_le_bytes());
        }
        out
    }

    /// Reads a frame and checks that a correct peer could have sent it.
    ///
    /// # Errors
    /// [`FrameError`] when the bytes are not such a frame.
    pub fn decode(bytes: &[u8; FRAME_BYTES]) -> Result<Self, FrameError> {
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u64_at = |at: usize| {
            let mut raw = [0; 8];
            raw.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(raw)
        };
        let (kind, flags) = (u16_at(0), u16_at(2));
        let length = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
        let fields = [u64_at(8), u64_at(16), u64_at(24)];
        let frame = match (kind, flags) {
            (KIND_CHUNK, 0 | FLAG_ACK_WANTED) => {
                let [message, offset, total] = fields;
                let ack_wanted = flags == FLAG_ACK_WANTED;
                let chunk = ChunkHeader { message, offset, length, total, ack_wanted };
                if !chunk.is_possible() {
                    return Err(FrameError::Impossible { offset, length, total });
                }
                return Ok(Self::Chunk(chunk));
            }
            // The upper half must be zero, which is checked below.
            (KIND_FLOW_DEAD, 0) => Self::FlowDead(fields[0] as u32),
            (KIND_ACK, 0) => Self::Ack(fields[0], fields[1] as u32),
            (KIND_CLOSE, 0) => Self::Close(fields[0]),
            (KIND_TAG, 0) => Self::Tag((fields[0] as u32).cast_signed()),
            (KIND_TAGS_DIFFER_FROM, 0) => Self::TagsDifferFrom(fields[0]),
            (KIND_SAME_TAG_BELOW, 0) => Self::SameTagBelow(fields[0]),
            (KIND_BUFFER_TAG, 0) => Self::BufferTag(fields[0], length.cast_signed()),
            _ => return Err(FrameError::UnknownKind { kind, flags }),
        };
        if frame.encode() == *bytes { Ok(frame) } else { Err(FrameError::Unused { kind }) }
    }
}

/// The CRC-32C of bytes that follow others, whose checksum is `before`; 0 for the first.
pub fn checksum(before: u32, bytes: &[u8]) -> u32 {
    crc32c::crc32c_append(before, bytes)
}

impl Frame {
    /// The bytes to send with checksums; `payload` is the checksum of the chunk's bytes.
    pub fn seal(&self, payload: u32) -> [u8; FRAME_BYTES] {
        let mut out = self.encode();
        out[PAYLOAD_SUM].copy_from_slice(&payload.to_le_bytes());
        let sum = checksum(0, &out[..FRAME_SUM.start]);
        out[FRAME_SUM].copy_from_slice(&sum.to_le_bytes());
        out
    }

    /// Reads a sealed frame. Also returns the checksum of the payload that follows.
    ///
    /// # Errors
    /// [`FrameError::Checksum`] when the frame has changed on the way; else as [`Frame::decode`].
    pub fn open(bytes: &[u8; FRAME_BYTES]) -> Result<(Self, u32), FrameError> {
        let sum_at = |place: Range<usize>| {
            let mut sum = [0; 4];
            sum.copy_from_slice(&bytes[place]);
            u32::from_le_bytes(sum)
        };
        if sum_at(FRAME_SUM) != checksum(0, &bytes[..FRAME_SUM.start]) {
            return Err(FrameError::Checksum);
        }
        let payload = sum_at(PAYLOAD_SUM);
        let mut plain = *bytes;
        plain[PAYLOAD_SUM].fill(0);
        plain[FRAME_SUM].fill(0);
        let frame = Self::decode(&plain)?;
        if payload != 0 && !matches!(frame, Self::Chunk(_)) {
            return Err(FrameError::Unused { kind: u16::from_le_bytes([bytes[0], bytes[1]]) });
        }
        Ok((frame, payload))
    }
}

impl ChunkHeader {
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

    const CHUNK: ChunkHeader =
        ChunkHeader { message: 7, offset: 128, length: 5, total: 133, ack_wanted: true };
    const TAGS: [Frame; 4] = [
        Frame::Tag(i32::MIN),
        Frame::TagsDifferFrom(u64::MAX),
        Frame::SameTagBelow(u64::MAX),
        Frame::BufferTag(u64::MAX, -1),
    ];

    #[test]
    fn frame_layout_is_fixed() {
        let mut expected = [0; FRAME_BYTES];
        expected[0] = 1;
        expected[2] = 1;
        expected[4] = 5;
        expected[8] = 7;
        expected[16] = 128;
        expected[24] = 133;
        assert_eq!(Frame::Chunk(CHUNK).encode(), expected);
        assert_eq!(Frame::decode(&expected), Ok(Frame::Chunk(CHUNK)));
        for frame in
            [Frame::FlowDead(u32::MAX), Frame::Ack(u64::MAX, u32::MAX), Frame::Close(u64::MAX)]
                .iter()
                .chain(&TAGS)
        {
            assert_eq!(Frame::decode(&frame.encode()), Ok(*frame));
        }
    }

    #[test]
    fn checksum_detects_any_changed_bit_of_a_frame() {
        assert_eq!(checksum(0, b"123456789"), 0xe306_9283, "the check value of CRC-32C");
        assert_eq!(checksum(checksum(0, b"1234"), b"56789"), 0xe306_9283);
        let others = [
            Frame::Chunk(CHUNK),
            Frame::FlowDead(3),
            Frame::Ack(u64::MAX, u32::MAX),
            Frame::Close(u64::MAX),
        ];
        for frame in others.into_iter().chain(TAGS) {
            let sum = if matches!(frame, Frame::Chunk(_)) { 0x1234_5678 } else { 0 };
            let sealed = frame.seal(sum);
            assert_eq!(Frame::open(&sealed), Ok((frame, sum)));
            for bit in 0..8 * FRAME_BYTES {
                let mut changed = sealed;
                changed[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(Frame::open(&changed), Err(FrameError::Checksum));
            }
        }
        assert!(matches!(Frame::open(&Frame::Close(2).seal(1)), Err(FrameError::Unused { .. })));
    }

    #[test]
    fn frame_with_an_impossible_chunk_is_refused() {
        let good =
            ChunkHeader { message: 0, offset: 128, length: 128, total: 256, ack_wanted: false };
        assert_eq!(Frame::decode(&Frame::Chunk(good).encode()), Ok(Frame::Chunk(good)));
        for bad in [
            ChunkHeader { total: 255, ..good },
            ChunkHeader { offset: 1, total: 512, ..good },
            ChunkHeader { length: 100, ..good },
            ChunkHeader { length: 0, ..good },
            ChunkHeader { offset: u64::MAX - 127, ..good },
            ChunkHeader { total: MAX_MESSAGE_BYTES + 1, ..good },
        ] {
            let refused = Frame::decode(&Frame::Chunk(bad).encode());
            assert!(matches!(refused, Err(FrameError::Impossible { .. })), "{bad:?}");
        }
    }

    #[test]
    fn frame_of_unknown_kind_or_with_unused_fields_is_refused() {
        let mut bytes = Frame::Chunk(CHUNK).encode();
        bytes[0] = 9;
        assert!(matches!(Frame::decode(&bytes), Err(FrameError::UnknownKind { .. })));
        let mut bytes = Frame::FlowDead(1).encode();
        bytes[13] = 1;
        assert_eq!(Frame::decode(&bytes), Err(FrameError::Unused { kind: 2 }));
    }

    proptest! {
        #[test]
        fn frame_decodes_any_bytes_without_panic(mut bytes: [u8; FRAME_BYTES], kind in 0u8..10) {
            for known in [false, true] {
                if known {
                    bytes[..4].copy_from_slice(&[kind, 0, 0, 0]);
                }
                if let Ok(frame) = Frame::decode(&bytes) {
                    prop_assert_eq!(frame.encode(), bytes);
                }
            }
        }
    }
}
