//! Frames of a flow, in clear and sealed. A peer can compute checksums as well.
#![no_main]

use evenkeel_fuzz::{fuzz_target, padded, within, write_seeds};
use evenkeel_protocol::{
    CHUNK_ALIGN, ChunkHeader, FRAME_BYTES, Frame, MAX_MESSAGE_BYTES, checksum,
};

fn seeds() -> Vec<Vec<u8>> {
    let chunk = |offset, length, total| {
        Frame::Chunk(ChunkHeader { message: 5, offset, length, total, ack_wanted: offset > 0 })
    };
    let frames = [
        chunk(0, 0, 0),
        chunk(128, 1000, 1128),
        chunk(0, 1 << 20, MAX_MESSAGE_BYTES),
        Frame::FlowDead(7),
        Frame::Ack(1 << 40, 99),
        Frame::Close(3),
        Frame::Tag(-5),
        Frame::TagsDifferFrom(1 << 33),
        Frame::SameTagBelow(17),
        Frame::BufferTag(9, -1),
    ];
    let is_chunk = |frame: &Frame| matches!(frame, Frame::Chunk(_));
    frames
        .iter()
        .flat_map(|frame| {
            [frame.encode(), frame.seal(if is_chunk(frame) { 0x1234_5678 } else { 0 })]
        })
        .map(|bytes| bytes.to_vec())
        .collect()
}

fuzz_target!(init: write_seeds(seeds()), |input: &[u8]| {
    let bytes = padded::<FRAME_BYTES>(input);
    if let Ok(frame) = within(0, || Frame::decode(&bytes)) {
        assert_eq!(frame.encode(), bytes);
        if let Frame::Chunk(chunk) = frame {
            assert!(chunk.end() <= chunk.total && chunk.total <= MAX_MESSAGE_BYTES);
            assert!(chunk.offset.is_multiple_of(CHUNK_ALIGN));
        }
    }
    let mut sealed = bytes;
    sealed[28..].copy_from_slice(&checksum(0, &bytes[..28]).to_le_bytes());
    let opened = within(0, || Frame::open(&sealed));
    assert_eq!(Frame::open(&bytes).is_ok(), opened.is_ok() && sealed == bytes);
    if let Ok((frame, payload)) = opened {
        assert_eq!(frame.seal(payload), sealed);
        assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
    }
});
