//! The sending side of a flow: its frames from the time when they are cut until they are written.

use super::frame::{FRAME_BYTES, Frame};

/// Maximum number of frames of one write.
pub const MAX_FRAMES: usize = 16;

/// Writes the frames of one flow, without its socket. `P` is the payload of a chunk, and empty for other frames.
///
/// Its user adds frames when there are none ([`SendCodec::push`]), encodes them ([`SendCodec::encode`]), writes
/// [`SendCodec::slices`] and reports the number of bytes by [`SendCodec::wrote`], until there are none again.
#[derive(Debug)]
pub struct SendCodec<P> {
    /// Those from `first` to `end` are not written in full.
    entries: [Option<Entry<P>>; MAX_FRAMES],
    first: usize,
    end: usize,
    /// Bytes of the first that are written, of its header and payload together.
    written: usize,
    has_checksums: bool,
}

#[derive(Debug)]
struct Entry<P> {
    frame: Frame,
    header: [u8; FRAME_BYTES],
    payload: P,
}

/// What is left to write of a frame.
#[derive(Debug)]
pub struct FrameSlice<'a, P> {
    /// The rest of the header.
    pub header: &'a [u8],
    /// The payload.
    pub payload: &'a P,
    /// The first byte of the payload that is left.
    pub start: usize,
    /// One past the last byte of the payload.
    pub end: usize,
}

/// What has been written in full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Number of chunks.
    pub chunks: usize,
    /// Bytes of their payloads.
    pub bytes: u64,
}

impl<P> Entry<P> {
    fn payload_bytes(&self) -> usize {
        match self.frame {
            Frame::Chunk(chunk) => chunk.length as usize,
            _ => 0,
        }
    }
}

impl<P> SendCodec<P> {
    /// For a flow whose handshake is complete. `has_checksums`: the peers have agreed on checksums.
    pub fn new(has_checksums: bool) -> Self {
        let entries = [const { None }; MAX_FRAMES];
        Self { entries, first: 0, end: 0, written: 0, has_checksums }
    }

    /// Whether all frames are written.
    pub fn is_empty(&self) -> bool {
        self.first == self.end
    }

    /// Number of frames that are not written in full.
    pub fn len(&self) -> usize {
        self.end - self.first
    }

    /// Whether no other frame can be added before all are written.
    pub fn is_full(&self) -> bool {
        self.end == MAX_FRAMES
    }

    /// Whether a part of a frame is written and the rest is not.
    pub fn is_midway(&self) -> bool {
        self.written > 0
    }

    /// Adds a frame, which is to be encoded before it is written.
    ///
    /// # Panics
    /// When it is full.
    pub fn push(&mut self, frame: Frame, payload: P) {
        self.entries[self.end] = Some(Entry { frame, header: [0; FRAME_BYTES], payload });
        self.end += 1;
    }

    /// The payloads of the frames that are not written in full.
    pub fn payloads_mut(&mut self) -> impl Iterator<Item = &mut P> {
        let entries = self.entries[self.first..self.end].iter_mut().flatten();
        entries.map(|entry| &mut entry.payload)
    }

    /// Encodes the headers of the frames. With checksums, `checksum_of` is called for each payload: it computes the CRC-32C of
    /// its bytes ([`crate::checksum`]), so no lock should be held.
    pub fn encode(&mut self, mut checksum_of: impl FnMut(&P) -> u32) {
        for entry in self.entries[self.first..self.end].iter_mut().flatten() {
            entry.header = match self.has_checksums {
                false => entry.frame.encode(),
                true => entry.frame.seal(checksum_of(&entry.payload)),
            };
        }
    }

    /// What to write next, in this order.
    pub fn slices(&self) -> impl Iterator<Item = FrameSlice<'_, P>> {
        let mut written = self.written;
        self.entries[self.first..self.end].iter().flatten().map(move |entry| {
            let of_this = std::mem::take(&mut written);
            let header = &entry.header[of_this.min(FRAME_BYTES)..];
            let start = of_this.saturating_sub(FRAME_BYTES);
            FrameSlice { header, payload: &entry.payload, start, end: entry.payload_bytes() }
        })
    }

    /// This many bytes of the slices were written. Calls `take` for the payload of each chunk that is written in full.
    pub fn wrote(&mut self, count: usize, mut take: impl FnMut(P)) -> Written {
        let mut done = Written::default();
        self.written += count;
        while let Some(entry) = self.entries.get_mut(self.first)
            && let Some(Entry { frame, payload, .. }) =
                entry.take_if(|entry| self.written >= FRAME_BYTES + entry.payload_bytes())
        {
            self.written -= FRAME_BYTES;
            if let Frame::Chunk(chunk) = frame {
                self.written -= chunk.length as usize;
                done.chunks += 1;
                done.bytes += u64::from(chunk.length);
                take(payload);
            }
            self.first += 1;
        }
        if self.is_empty() {
            debug_assert_eq!(self.written, 0, "more than there was");
            (self.first, self.end) = (0, 0);
        }
        done
    }

    /// Removes all frames: the flow writes nothing more of them. Calls `take` for each payload.
    pub fn clear(&mut self, mut take: impl FnMut(P)) {
        let entries = self.entries[self.first..self.end].iter_mut();
        entries.filter_map(Option::take).for_each(|entry| take(entry.payload));
        (self.first, self.end, self.written) = (0, 0, 0);
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use proptest::prelude::*;

    use super::*;
    use crate::tcp::frame::{ChunkHeader, checksum};
    use crate::tcp::recv_codec::test_reader::{Event, Messages, Reader};

    type Payload = Rc<Vec<u8>>;

    fn bytes(codec: &SendCodec<Payload>) -> Vec<u8> {
        let slices = codec.slices().flat_map(|slice| {
            let FrameSlice { header, payload, start, end } = slice;
            [header, &payload[start..end]].concat()
        });
        slices.collect()
    }

    /// A chunk that is a whole message of these bytes.
    fn chunk(message: u64, payload: &[u8]) -> (Frame, Payload) {
        let length = payload.len() as u32;
        let total = length.into();
        let header = ChunkHeader { message, offset: 0, length, total, ack_wanted: false };
        (Frame::Chunk(header), Rc::new(payload.to_vec()))
    }

    fn sum(payload: &Payload) -> u32 {
        checksum(0, payload)
    }

    #[test]
    fn send_codec_continues_a_partly_written_frame() {
        let mut codec = SendCodec::new(false);
        let (first, payload) = chunk(0, b"abcdef");
        codec.push(first, Rc::clone(&payload));
        codec.push(Frame::Close(1), Payload::default());
        codec.encode(sum);
        let whole = [&first.encode()[..], b"abcdef", &Frame::Close(1).encode()].concat();
        assert_eq!((bytes(&codec), codec.is_midway()), (whole.clone(), false));
        assert_eq!(codec.wrote(10, drop), Written::default());
        assert_eq!((bytes(&codec), codec.is_midway()), (whole[10..].to_vec(), true));
        assert_eq!(codec.wrote(FRAME_BYTES - 10 + 5, drop), Written::default());
        assert_eq!((bytes(&codec), Rc::strong_count(&payload)), (whole[37..].to_vec(), 2));
        assert_eq!(codec.wrote(1, drop), Written { chunks: 1, bytes: 6 });
        assert_eq!((codec.len(), codec.is_midway(), Rc::strong_count(&payload)), (1, false, 1));
        assert_eq!(codec.wrote(FRAME_BYTES, drop), Written::default(), "a frame that is no chunk");
        assert!(codec.is_empty());
    }

    #[test]
    fn send_codec_takes_as_many_frames_as_one_write() {
        let mut codec = SendCodec::new(true);
        for round in 0..3 {
            while !codec.is_full() {
                codec.push(Frame::Close(round), Payload::default());
            }
            assert_eq!(codec.len(), MAX_FRAMES);
            codec.encode(sum);
            assert_eq!(bytes(&codec), Frame::Close(round).seal(0).repeat(MAX_FRAMES));
            match round {
                0 => assert_eq!(codec.wrote(MAX_FRAMES * FRAME_BYTES, drop), Written::default()),
                _ => {
                    codec.wrote(FRAME_BYTES + 1, drop);
                    codec.clear(drop);
                }
            }
            assert!(codec.is_empty() && !codec.is_midway() && !codec.is_full());
        }
    }

    #[test]
    fn send_codec_drops_the_payloads_of_frames_that_will_not_be_written() {
        let mut codec = SendCodec::new(false);
        let (frame, payload) = chunk(0, b"abc");
        (0..3).for_each(|_| codec.push(frame, Rc::clone(&payload)));
        codec.encode(sum);
        codec.wrote(FRAME_BYTES + 4, drop);
        assert_eq!(Rc::strong_count(&payload), 3);
        codec.clear(drop);
        assert_eq!((Rc::strong_count(&payload), bytes(&codec)), (1, Vec::new()));
    }

    proptest! {
        /// And the peer reads them.
        #[test]
        fn send_codec_writes_the_same_however_much_the_socket_takes(
            payloads in proptest::collection::vec(
                proptest::option::weighted(0.8, proptest::collection::vec(any::<u8>(), 0..300)),
                1..60,
            ),
            batches in proptest::collection::vec(1..=MAX_FRAMES, 1..10),
            takes in proptest::collection::vec(1usize..700, 1..30),
            has_checksums: bool,
        ) {
            let (mut messages, mut sent) = (Messages::default(), Vec::new());
            let frames: Vec<(Frame, Payload)> = payloads
                .iter()
                .map(|payload| match payload {
                    None => (Frame::FlowDead(sent.len() as u32), Payload::default()),
                    Some(payload) => {
                        messages.post(payload.len());
                        sent.push(payload.clone());
                        chunk(sent.len() as u64 - 1, payload)
                    }
                })
                .collect();
            let direct = frames.iter().flat_map(|(frame, payload)| match has_checksums {
                false => [&frame.encode()[..], payload].concat(),
                true => [&frame.seal(sum(payload))[..], payload].concat(),
            });
            let direct: Vec<u8> = direct.collect();
            let mut codec = SendCodec::new(has_checksums);
            let (mut batches, mut takes) = (batches.iter().cycle(), takes.iter().cycle());
            let (mut wire, mut written, mut next) = (Vec::new(), Written::default(), frames.iter());
            loop {
                if codec.is_empty() {
                    for (frame, payload) in next.by_ref().take(*batches.next().unwrap()) {
                        codec.push(*frame, Rc::clone(payload));
                    }
                    codec.encode(sum);
                }
                let left = bytes(&codec);
                if left.is_empty() {
                    break;
                }
                let count = left.len().min(*takes.next().unwrap());
                wire.extend_from_slice(&left[..count]);
                let Written { chunks, bytes } = codec.wrote(count, drop);
                written = Written { chunks: written.chunks + chunks, bytes: written.bytes + bytes };
            }
            prop_assert!(wire == direct, "the bytes differ");
            let bytes = sent.iter().map(|payload| payload.len() as u64).sum();
            prop_assert_eq!(written, Written { chunks: sent.len(), bytes });
            prop_assert!(frames.iter().all(|(_, payload)| Rc::strong_count(payload) == 1));
            let mut reader = Reader::new(has_checksums);
            prop_assert!(reader.read(&mut messages, &wire).is_empty(), "{:?}", reader.events);
            prop_assert_eq!(&messages.memory, &sent);
            let is_dead = |event: &&Event| matches!(event, Event::Frame(Frame::FlowDead(_)));
            let dead = reader.events.iter().filter(is_dead).count();
            prop_assert_eq!(dead, payloads.len() - sent.len());
        }
    }
}
