//! The receiving side of a flow: where its next bytes go, and what they mean.
//!
//! A flow carries frames, and a chunk's payload follows its header. One read takes the rest of a payload and the header
//! behind it, so a flow of chunks needs one system call for each.

use super::frame::{ChunkHeader, FRAME_BYTES, Frame, FrameError, checksum};
use super::reassembly::ChunkAction;
use crate::limits::MAX_CHUNK_BYTES;

/// Reads the frames of one flow, without its socket. `B` is the buffer of a message.
///
/// Its user calls [`RecvCodec::next_step`] and does what that says. Where a read is due, it reads into
/// [`RecvCodec::room`] and reports the number of bytes by [`RecvCodec::received`].
///
/// With checksums, no byte of a chunk may be seen in its buffer before the whole chunk is verified. The user then receives
/// chunks into a *stage*, memory of its own for one chunk, and the steps say what to copy from there.
#[derive(Debug)]
pub struct RecvCodec<B> {
    stage: Stage<B>,
    header: [u8; FRAME_BYTES],
    /// Bytes of the header that are there. Some may be read together with the payload before it.
    have: usize,
    /// If the peers have agreed on checksums.
    checked: Option<Checked<B>>,
}

#[derive(Clone, Copy, Debug)]
enum Stage<B> {
    /// The next bytes are a header.
    Header,
    /// The peer reports a dead flow.
    FlowDead(u32),
    /// The next bytes of the chunk start at `at`. Its message may not have a buffer yet.
    Reserve { chunk: ChunkHeader, at: u64 },
    /// The bytes from `start` to `end` belong into the buffer; those before `at` are there.
    Deliver { chunk: ChunkHeader, buffer: B, start: u64, at: u64, end: u64 },
    /// The bytes up to `end` were received before.
    Discard { chunk: ChunkHeader, at: u64, end: u64 },
    /// All of the chunk is there, and verified if it has a checksum.
    ChunkEnd { chunk: ChunkHeader },
    /// The chunk does not match its checksum.
    Corrupt,
    /// The peer has sent a frame of the other direction.
    WrongDirection,
}

/// The checksum of the present chunk.
#[derive(Debug)]
struct Checked<B> {
    expected: u32,
    /// Of the bytes so far.
    sum: u32,
    /// The parts of the chunk that belong into buffers, to be delivered once the chunk is verified.
    parts: Vec<Part<B>>,
    /// Number of those that are delivered.
    delivered: usize,
}

/// A part of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part<B> {
    /// Number of the message.
    pub message: u64,
    /// The message's buffer.
    pub buffer: B,
    /// Its first byte, counted from the message's first.
    pub start: u64,
    /// One past its last byte. An empty message has an empty part.
    pub end: u64,
    /// With checksums, where it begins in the stage. Else it is in its buffer already.
    pub staged_at: Option<usize>,
}

/// What to do next.
#[derive(Debug, PartialEq, Eq)]
pub enum RecvStep<B> {
    /// Read into [`RecvCodec::room`].
    Read,
    /// The peer closes the connection: it delivers the messages below this number, and no others.
    Close(u64),
    /// The messages' tag, or the common one.
    Tag(i32),
    /// All messages below this number have the common tag.
    SameTagBelow(u64),
    /// The peer reports this flow as dead. Nothing of it may count any more before [`RecvCodec::flow_dead_handled`].
    FlowDead(u32),
    /// Reserve the next bytes of the chunk, from `at` on, and report the outcome by [`RecvCodec::reserved`].
    Reserve {
        /// The chunk.
        chunk: ChunkHeader,
        /// The first byte to reserve, counted from the message's first.
        at: u64,
    },
    /// This part of a message is received. If it is staged, copy it into its buffer first.
    Received(Part<B>),
    /// The flow has carried a chunk of this many bytes. The stage is not needed any more.
    ChunkEnd {
        /// Length of the chunk, in bytes.
        length: u32,
    },
}

/// Where the next bytes go.
#[derive(Debug, PartialEq, Eq)]
pub enum Room<'a, B> {
    /// Into the buffer of a message, from byte `start` to byte `end`, then into the header behind it.
    Buffer {
        /// The buffer.
        buffer: B,
        /// The first byte, counted from the message's first.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// The next frame's header; empty if more of the chunk follows.
        header: &'a mut [u8],
    },
    /// Into the stage of a chunk of `length` bytes, from byte `start` to byte `end`, then into the header behind it.
    Stage {
        /// Length of the chunk, in bytes.
        length: usize,
        /// The first byte, counted from the chunk's first.
        start: usize,
        /// One past the last byte.
        end: usize,
        /// The next frame's header; empty if more of the chunk follows.
        header: &'a mut [u8],
    },
    /// Into the header.
    Header(&'a mut [u8]),
    /// Nowhere: up to this many bytes are to be dropped.
    Discard(usize),
    /// As [`Room::Discard`], but the checksum covers them.
    DiscardChecked(usize),
}

/// A part of a message that will not be received as it was reserved ([`RecvCodec::abandon`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abandoned {
    /// Number of the message.
    pub message: u64,
    /// The first reserved byte, counted from the message's first.
    pub start: u64,
    /// One past the last byte that is in the buffer.
    pub received: u64,
    /// One past the last reserved byte.
    pub end: u64,
}

/// Why nothing more can be read of a flow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecvError {
    /// Bytes have changed on the way. Another flow may work.
    #[error("{}", FrameError::Checksum)]
    CorruptFrame,
    /// As [`RecvError::CorruptFrame`].
    #[error("a chunk that does not match its checksum")]
    CorruptChunk,
    /// No peer sends these bytes.
    #[error("protocol error: {0}")]
    Frame(FrameError),
    /// A chunk that is too long to be held back until it is verified.
    #[error("protocol error: a chunk of {length} bytes, but the limit is {MAX_CHUNK_BYTES}")]
    ChunkTooLong {
        /// Its length, in bytes.
        length: u32,
    },
    /// A frame of the other direction.
    #[error("protocol error: the sender sent a frame that only receivers send")]
    WrongDirection,
}

impl RecvError {
    /// Whether bytes have changed on the way. Else the two sides disagree, and the connection cannot continue.
    pub fn is_corrupt(&self) -> bool {
        matches!(self, Self::CorruptFrame | Self::CorruptChunk)
    }
}

impl<B: Copy> RecvCodec<B> {
    /// For a flow whose handshake is complete. `has_checksums`: the peers have agreed on checksums.
    pub fn new(has_checksums: bool) -> Self {
        let checked =
            has_checksums.then(|| Checked { expected: 0, sum: 0, parts: Vec::new(), delivered: 0 });
        Self { stage: Stage::Header, header: [0; FRAME_BYTES], have: 0, checked }
    }

    /// What to do next.
    ///
    /// # Errors
    /// [`RecvError`], and again at each call.
    pub fn next_step(&mut self) -> Result<RecvStep<B>, RecvError> {
        loop {
            match self.stage {
                Stage::Header if self.have < FRAME_BYTES => return Ok(RecvStep::Read),
                Stage::Header => match self.decode()? {
                    Frame::Chunk(chunk) => self.stage = Stage::Reserve { chunk, at: chunk.offset },
                    Frame::FlowDead(number) => self.stage = Stage::FlowDead(number),
                    Frame::Close(below) => return Ok(RecvStep::Close(below)),
                    Frame::Tag(tag) => return Ok(RecvStep::Tag(tag)),
                    Frame::SameTagBelow(below) => return Ok(RecvStep::SameTagBelow(below)),
                    Frame::Ack(..) | Frame::TagsDifferFrom(_) | Frame::BufferTag(..) => {
                        self.stage = Stage::WrongDirection;
                    }
                },
                Stage::FlowDead(number) => return Ok(RecvStep::FlowDead(number)),
                Stage::Reserve { chunk, at } => return Ok(RecvStep::Reserve { chunk, at }),
                Stage::Deliver { chunk, buffer, start, at, end } if at == end => {
                    self.end_part(chunk, end);
                    let message = chunk.message;
                    let mut part = Part { message, buffer, start, end, staged_at: None };
                    let Some(checked) = &mut self.checked else {
                        return Ok(RecvStep::Received(part));
                    };
                    part.staged_at = Some((start - chunk.offset) as usize);
                    checked.parts.push(part);
                }
                Stage::Discard { chunk, at, end } if at == end => self.end_part(chunk, end),
                Stage::Deliver { .. } | Stage::Discard { .. } => return Ok(RecvStep::Read),
                Stage::ChunkEnd { chunk } => {
                    if let Some(checked) = &mut self.checked {
                        if let Some(part) = checked.parts.get(checked.delivered) {
                            checked.delivered += 1;
                            return Ok(RecvStep::Received(*part));
                        }
                        checked.parts.clear();
                        checked.delivered = 0;
                    }
                    self.stage = Stage::Header;
                    return Ok(RecvStep::ChunkEnd { length: chunk.length });
                }
                Stage::Corrupt => return Err(RecvError::CorruptChunk),
                Stage::WrongDirection => return Err(RecvError::WrongDirection),
            }
        }
    }

    /// Reads the frame whose header is complete.
    fn decode(&mut self) -> Result<Frame, RecvError> {
        let opened = match &self.checked {
            None => Frame::decode(&self.header).map(|frame| (frame, 0)),
            Some(_) => Frame::open(&self.header),
        };
        let (frame, expected) = opened.map_err(|error| match error {
            FrameError::Checksum => RecvError::CorruptFrame,
            error => RecvError::Frame(error),
        })?;
        if let (Frame::Chunk(ChunkHeader { length, .. }), Some(checked)) =
            (frame, &mut self.checked)
        {
            if u64::from(length) > MAX_CHUNK_BYTES {
                return Err(RecvError::ChunkTooLong { length });
            }
            (checked.expected, checked.sum) = (expected, 0);
        }
        self.have = 0;
        Ok(frame)
    }

    /// The bytes of the chunk up to `end` are there.
    fn end_part(&mut self, chunk: ChunkHeader, end: u64) {
        let is_corrupt = |checked: &Checked<B>| checked.sum != checked.expected;
        self.stage = if end < chunk.end() {
            Stage::Reserve { chunk, at: end }
        } else if self.checked.as_ref().is_some_and(is_corrupt) {
            Stage::Corrupt
        } else {
            Stage::ChunkEnd { chunk }
        };
    }

    /// Where the next bytes go. There is no room after any step but [`RecvStep::Read`].
    pub fn room(&mut self) -> Room<'_, B> {
        match self.stage {
            Stage::Header => Room::Header(&mut self.header[self.have..]),
            Stage::Deliver { chunk, buffer, at, end, .. } => {
                // The next frame follows the chunk's end, often in the same read.
                let next = if end == chunk.end() { FRAME_BYTES } else { 0 };
                let header = &mut self.header[..next];
                if self.checked.is_none() {
                    return Room::Buffer { buffer, start: at, end, header };
                }
                let [start, end] = [at, end].map(|place| (place - chunk.offset) as usize);
                Room::Stage { length: chunk.length as usize, start, end, header }
            }
            Stage::Discard { at, end, .. } if self.checked.is_some() => {
                Room::DiscardChecked((end - at) as usize)
            }
            Stage::Discard { at, end, .. } => Room::Discard((end - at) as usize),
            Stage::FlowDead(_)
            | Stage::Reserve { .. }
            | Stage::ChunkEnd { .. }
            | Stage::Corrupt
            | Stage::WrongDirection => Room::Discard(0),
        }
    }

    /// This many bytes were read into the room, or dropped. `payload` has those of the chunk among them, if there are
    /// checksums.
    pub fn received(&mut self, count: usize, payload: &[u8]) {
        match &mut self.stage {
            Stage::Header => self.have = FRAME_BYTES.min(self.have + count),
            Stage::Deliver { at, end, .. } | Stage::Discard { at, end, .. } => {
                let taken = (count as u64).min(*end - *at);
                *at += taken;
                self.have = FRAME_BYTES.min(count - taken as usize);
                if let Some(checked) = &mut self.checked {
                    debug_assert_eq!(payload.len() as u64, taken);
                    checked.sum = checksum(checked.sum, payload);
                }
            }
            Stage::FlowDead(_)
            | Stage::Reserve { .. }
            | Stage::ChunkEnd { .. }
            | Stage::Corrupt
            | Stage::WrongDirection => {}
        }
    }

    /// The outcome of [`RecvStep::Reserve`]. The step is repeated when no buffer is posted.
    pub fn reserved(&mut self, action: ChunkAction<B>) {
        let Stage::Reserve { chunk, at } = self.stage else { return };
        self.stage = match action {
            ChunkAction::Deliver { payload: buffer, end } => {
                Stage::Deliver { chunk, buffer, start: at, at, end }
            }
            ChunkAction::Discard { end } => Stage::Discard { chunk, at, end },
            ChunkAction::NotPosted => return,
        };
    }

    /// The flow of this number is ended, as the peer has asked for ([`RecvStep::FlowDead`]).
    pub fn flow_dead_handled(&mut self, number: u32) {
        if matches!(self.stage, Stage::FlowDead(reported) if reported == number) {
            self.stage = Stage::Header;
        }
    }

    /// Whether the peer may end the flow here: all that it has begun is read.
    pub fn is_between_frames(&self) -> bool {
        matches!(self.stage, Stage::Header) && self.have == 0
    }

    /// Nothing more is read. Calls `release` for each part of a message that is reserved and not reported as received.
    pub fn abandon(&mut self, mut release: impl FnMut(Abandoned)) {
        if let Some(checked) = &mut self.checked {
            let delivered = std::mem::take(&mut checked.delivered);
            // They are not verified.
            for Part { message, start, end, .. } in checked.parts.drain(..).skip(delivered) {
                release(Abandoned { message, start, received: start, end });
            }
        }
        if let Stage::Deliver { chunk, start, at, end, .. } = self.stage {
            let received = if self.checked.is_some() { start } else { at };
            release(Abandoned { message: chunk.message, start, received, end });
        }
        (self.stage, self.have) = (Stage::Header, 0);
    }
}

/// Test only: a flow's user, with the messages' buffers.
#[cfg(test)]
pub(super) mod test_reader {
    use super::*;
    use crate::tcp::reassembly::{Reassembly, ReassemblyError};

    /// What a flow has reported.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub(in crate::tcp) enum Event {
        Frame(Frame),
        Received { message: u64, start: u64, end: u64 },
        ChunkEnd(u32),
        Refused(ReassemblyError),
        Failed(RecvError),
    }

    /// The messages of a connection, and how often each byte was written.
    #[derive(Default)]
    pub(in crate::tcp) struct Messages {
        pub(in crate::tcp) reassembly: Reassembly<usize>,
        pub(in crate::tcp) memory: Vec<Vec<u8>>,
        pub(in crate::tcp) writes: Vec<Vec<u8>>,
        /// Messages that are complete, and their lengths.
        pub(in crate::tcp) completed: Vec<(usize, u64)>,
    }

    impl Messages {
        pub(in crate::tcp) fn post(&mut self, capacity: usize) {
            self.reassembly.post(capacity as u64, self.memory.len());
            self.memory.push(vec![0; capacity]);
            self.writes.push(vec![0; capacity]);
        }

        fn write(&mut self, buffer: usize, start: usize, bytes: &[u8]) {
            self.memory[buffer][start..start + bytes.len()].copy_from_slice(bytes);
            self.writes[buffer][start..start + bytes.len()]
                .iter_mut()
                .for_each(|count| *count += 1);
        }

        fn received(&mut self, message: u64, bytes: u64) {
            if let Some(completed) = self.reassembly.received(message, bytes) {
                self.completed.push((completed.payload, completed.total));
            }
        }
    }

    /// One flow.
    pub(in crate::tcp) struct Reader {
        pub(in crate::tcp) codec: RecvCodec<usize>,
        stage: Vec<u8>,
        pub(in crate::tcp) events: Vec<Event>,
    }

    impl Reader {
        pub(in crate::tcp) fn new(has_checksums: bool) -> Self {
            let codec = RecvCodec::new(has_checksums);
            Self { codec, stage: Vec::new(), events: Vec::new() }
        }

        /// Reads bytes as one read of the socket after the other would give them. Returns those that are left when a buffer
        /// is missing or the flow fails.
        pub(in crate::tcp) fn read<'a>(
            &mut self,
            messages: &mut Messages,
            mut bytes: &'a [u8],
        ) -> &'a [u8] {
            loop {
                match self.codec.next_step() {
                    Ok(RecvStep::Read) if bytes.is_empty() => return bytes,
                    Ok(RecvStep::Read) => {
                        let count = self.read_once(messages, bytes);
                        assert!(count > 0, "a read that is due has room");
                        bytes = &bytes[count..];
                    }
                    Ok(RecvStep::Close(below)) => {
                        self.events.push(Event::Frame(Frame::Close(below)));
                    }
                    Ok(RecvStep::Tag(tag)) => self.events.push(Event::Frame(Frame::Tag(tag))),
                    Ok(RecvStep::SameTagBelow(below)) => {
                        self.events.push(Event::Frame(Frame::SameTagBelow(below)));
                    }
                    Ok(RecvStep::FlowDead(number)) => {
                        self.events.push(Event::Frame(Frame::FlowDead(number)));
                        self.codec.flow_dead_handled(number);
                    }
                    Ok(RecvStep::Reserve { chunk, at }) => {
                        match messages.reassembly.reserve(&chunk, at) {
                            Ok(ChunkAction::NotPosted) => return bytes,
                            Ok(action) => self.codec.reserved(action.map(|buffer| *buffer)),
                            Err(error) => {
                                self.events.push(Event::Refused(error));
                                return bytes;
                            }
                        }
                    }
                    Ok(RecvStep::Received(Part { message, buffer, start, end, staged_at })) => {
                        if let Some(staged_at) = staged_at {
                            let staged = &self.stage[staged_at..staged_at + (end - start) as usize];
                            messages.write(buffer, start as usize, staged);
                        }
                        messages.received(message, end - start);
                        self.events.push(Event::Received { message, start, end });
                    }
                    Ok(RecvStep::ChunkEnd { length }) => {
                        self.stage.clear();
                        self.events.push(Event::ChunkEnd(length));
                    }
                    Err(error) => {
                        assert_eq!(self.codec.next_step(), Err(error.clone()), "it is final");
                        self.events.push(Event::Failed(error));
                        return bytes;
                    }
                }
            }
        }

        /// Reads at most these bytes; returns the number of those read.
        fn read_once(&mut self, messages: &mut Messages, bytes: &[u8]) -> usize {
            let split = |payload: usize, header: &mut [u8]| {
                let payload = payload.min(bytes.len());
                let next = header.len().min(bytes.len() - payload);
                header[..next].copy_from_slice(&bytes[payload..payload + next]);
                (payload, payload + next)
            };
            let (payload, count) = match self.codec.room() {
                Room::Buffer { buffer, start, end, header } => {
                    let (payload, count) = split((end - start) as usize, header);
                    messages.write(buffer, start as usize, &bytes[..payload]);
                    (payload, count)
                }
                Room::Stage { length, start, end, header } => {
                    let (payload, count) = split(end - start, header);
                    self.stage.resize(length, 0);
                    self.stage[start..start + payload].copy_from_slice(&bytes[..payload]);
                    (payload, count)
                }
                Room::Header(header) => split(0, header),
                Room::Discard(length) | Room::DiscardChecked(length) => split(length, &mut []),
            };
            self.codec.received(count, &bytes[..payload]);
            count
        }

        /// Ends the flow: what it has not delivered may come again on another one.
        pub(in crate::tcp) fn end(&mut self, messages: &mut Messages) {
            self.codec.abandon(|Abandoned { message, start, received, end }| {
                if received > start {
                    messages.received(message, received - start);
                }
                messages.reassembly.release(message, received, end);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::test_reader::{Event, Messages, Reader};
    use super::*;

    /// The byte of a message at this place.
    fn byte_of(message: u64, at: u64) -> u8 {
        (message * 31 + at * 7 + at / 251) as u8
    }

    fn payload(chunk: &ChunkHeader) -> Vec<u8> {
        (chunk.offset..chunk.end()).map(|at| byte_of(chunk.message, at)).collect()
    }

    /// A frame and its payload, as they are on the wire.
    fn on_wire(frame: Frame, has_checksums: bool) -> Vec<u8> {
        let payload = match &frame {
            Frame::Chunk(chunk) => payload(chunk),
            _ => Vec::new(),
        };
        let header = match has_checksums {
            false => frame.encode(),
            true => frame.seal(checksum(0, &payload)),
        };
        [&header[..], &payload].concat()
    }

    fn chunk(message: u64, offset: u64, length: u32, total: u64) -> Frame {
        Frame::Chunk(ChunkHeader { message, offset, length, total, ack_wanted: false })
    }

    /// Frames of a flow: all chunks of messages of these lengths in this order, and others between them.
    fn frames(lengths: &[u16], limit: u64) -> Vec<Frame> {
        let others = [Frame::Tag(-5), Frame::FlowDead(7), Frame::SameTagBelow(3), Frame::Close(9)];
        let mut frames = Vec::new();
        for (message, total) in lengths.iter().enumerate() {
            let (message, total) = (message as u64, u64::from(*total));
            let mut offset = 0;
            loop {
                let length = limit.min(total - offset);
                frames.push(chunk(message, offset, length as u32, total));
                offset += length;
                if offset == total {
                    break;
                }
            }
            frames.extend(others.get(message as usize % 7));
        }
        frames
    }

    /// Buffers for messages of these lengths, in which these parts are there already.
    fn messages(lengths: &[u16], known: &[(Index, Index)]) -> Messages {
        let mut messages = Messages::default();
        lengths.iter().for_each(|length| messages.post(usize::from(*length) + 3));
        for (message, start) in known {
            let message = message.index(lengths.len());
            let total = u64::from(lengths[message]);
            let offset = start.index(usize::from(lengths[message]) / 128 + 1) as u64 * 128;
            let length = 128.min(total - offset);
            let Frame::Chunk(part) = chunk(message as u64, offset, length as u32, total) else {
                continue;
            };
            if length > 0 {
                let wire = on_wire(Frame::Chunk(part), false);
                assert!(Reader::new(false).read(&mut messages, &wire).is_empty());
            }
        }
        messages
    }

    /// Each byte of each message is there, was written once, and nothing else was written.
    fn check(messages: &Messages, lengths: &[u16]) {
        for (message, length) in lengths.iter().enumerate() {
            let (memory, writes) = (&messages.memory[message], &messages.writes[message]);
            for (at, (byte, writes)) in memory.iter().zip(writes).enumerate() {
                let is_inside = at < usize::from(*length);
                let expected = if is_inside { byte_of(message as u64, at as u64) } else { 0 };
                assert_eq!((*byte, *writes), (expected, is_inside.into()), "{message} at {at}");
            }
        }
        let mut completed = messages.completed.clone();
        completed.sort_unstable();
        let lengths = lengths.iter().map(|length| u64::from(*length));
        assert_eq!(completed, lengths.enumerate().collect::<Vec<_>>());
    }

    #[test]
    fn recv_codec_reads_the_next_header_behind_the_last_bytes_of_a_chunk() {
        let mut codec = RecvCodec::new(false);
        let Frame::Chunk(first) = chunk(0, 0, 256, 300) else { panic!("a chunk") };
        assert_eq!(codec.next_step(), Ok(RecvStep::Read));
        let Room::Header(header) = codec.room() else { panic!("{:?}", codec.room()) };
        header.copy_from_slice(&Frame::Chunk(first).encode());
        codec.received(FRAME_BYTES, &[]);
        assert_eq!(codec.next_step(), Ok(RecvStep::Reserve { chunk: first, at: 0 }));
        codec.reserved(ChunkAction::NotPosted);
        assert_eq!(codec.next_step(), Ok(RecvStep::Reserve { chunk: first, at: 0 }));
        assert_eq!(codec.room(), Room::Discard(0));
        // Bytes from 100 to 128 are there.
        codec.reserved(ChunkAction::Deliver { payload: 'a', end: 100 });
        assert_eq!(codec.next_step(), Ok(RecvStep::Read));
        let header = &mut [];
        assert_eq!(codec.room(), Room::Buffer { buffer: 'a', start: 0, end: 100, header });
        codec.received(60, &[]);
        let header = &mut [];
        assert_eq!(codec.room(), Room::Buffer { buffer: 'a', start: 60, end: 100, header });
        codec.received(40, &[]);
        let part = |start, end| Part { message: 0, buffer: 'a', start, end, staged_at: None };
        assert_eq!(codec.next_step(), Ok(RecvStep::Received(part(0, 100))));
        assert_eq!(codec.next_step(), Ok(RecvStep::Reserve { chunk: first, at: 100 }));
        codec.reserved(ChunkAction::Discard { end: 128 });
        assert_eq!((codec.next_step(), codec.room()), (Ok(RecvStep::Read), Room::Discard(28)));
        codec.received(28, &[]);
        assert_eq!(codec.next_step(), Ok(RecvStep::Reserve { chunk: first, at: 128 }));
        codec.reserved(ChunkAction::Deliver { payload: 'a', end: 256 });
        assert_eq!(codec.next_step(), Ok(RecvStep::Read));
        let Room::Buffer { start: 128, end: 256, header, .. } = codec.room() else {
            panic!("{:?}", codec.room())
        };
        header.copy_from_slice(&Frame::Close(1).encode());
        codec.received(128 + FRAME_BYTES, &[]);
        assert!(!codec.is_between_frames());
        assert_eq!(codec.next_step(), Ok(RecvStep::Received(part(128, 256))));
        assert_eq!(codec.next_step(), Ok(RecvStep::ChunkEnd { length: 256 }));
        assert_eq!(codec.next_step(), Ok(RecvStep::Close(1)));
        assert_eq!((codec.next_step(), codec.is_between_frames()), (Ok(RecvStep::Read), true));
    }

    #[test]
    fn recv_codec_continues_after_a_dead_flow_only_when_it_is_handled() {
        let mut codec = RecvCodec::<char>::new(false);
        let Room::Header(header) = codec.room() else { panic!("{:?}", codec.room()) };
        header.copy_from_slice(&Frame::FlowDead(7).encode());
        codec.received(FRAME_BYTES, &[]);
        for _ in 0..2 {
            assert_eq!(codec.next_step(), Ok(RecvStep::FlowDead(7)));
            codec.flow_dead_handled(8);
        }
        codec.flow_dead_handled(7);
        assert_eq!(codec.next_step(), Ok(RecvStep::Read));
    }

    #[test]
    fn recv_codec_refuses_what_no_sender_sends() {
        let receivers = [Frame::Ack(1, 2), Frame::TagsDifferFrom(3), Frame::BufferTag(4, 5)];
        let long = chunk(0, 0, MAX_CHUNK_BYTES as u32 + 128, MAX_CHUNK_BYTES + 256);
        let mut unknown = Frame::Close(1).encode();
        unknown[0] = 99;
        for has_checksums in [false, true] {
            let fails = |bytes: &[u8]| {
                let mut reader = Reader::new(has_checksums);
                reader.read(&mut Messages::default(), bytes);
                reader.events.pop()
            };
            for frame in receivers {
                let expected = Event::Failed(RecvError::WrongDirection);
                assert_eq!(fails(&on_wire(frame, has_checksums)), Some(expected));
            }
            let Some(Event::Failed(error)) = fails(&unknown) else { panic!("it is accepted") };
            assert_eq!(error.is_corrupt(), has_checksums, "{error}");
        }
        // It is held back until it is verified.
        let mut sealed = Reader::new(true);
        sealed.read(&mut Messages::default(), &long.seal(0));
        let length = MAX_CHUNK_BYTES as u32 + 128;
        assert_eq!(sealed.events, [Event::Failed(RecvError::ChunkTooLong { length })]);
        let mut plain = Reader::new(false);
        plain.read(&mut Messages::default(), &long.encode());
        assert_eq!(plain.events, []);
    }

    #[test]
    fn recv_codec_shows_nothing_of_a_chunk_before_it_is_verified() {
        let lengths = [300];
        let wire: Vec<u8> =
            frames(&lengths, 256).iter().flat_map(|frame| on_wire(*frame, true)).collect();
        for changed in 0..wire.len() {
            let mut messages = messages(&lengths, &[]);
            let mut reader = Reader::new(true);
            let mut wire = wire.clone();
            wire[changed] ^= 4;
            reader.read(&mut messages, &wire);
            let Some(Event::Failed(error)) = reader.events.last() else {
                panic!("byte {changed}: {:?}", reader.events)
            };
            assert!(error.is_corrupt(), "byte {changed}: {error}");
            let verified = match changed {
                _ if changed < FRAME_BYTES + 256 => 0,
                _ if changed < 2 * FRAME_BYTES + 300 => 256,
                // The frame behind the message.
                _ => 300,
            };
            assert!(messages.writes[0][verified..].iter().all(|writes| *writes == 0));
            // On another flow it is sent again.
            reader.end(&mut messages);
            let mut other = Reader::new(true);
            for frame in frames(&lengths, 512) {
                other.read(&mut messages, &on_wire(frame, true));
            }
            check(&messages, &lengths);
        }
    }

    fn any_lengths() -> impl Strategy<Value = Vec<u16>> {
        proptest::collection::vec(prop_oneof![Just(0), 1u16..40, 100u16..1500], 1..8)
    }

    fn any_known() -> impl Strategy<Value = Vec<(Index, Index)>> {
        proptest::collection::vec(any::<(Index, Index)>(), 0..6)
    }

    proptest! {
        #[test]
        fn recv_codec_reads_the_same_however_the_bytes_are_split(
            lengths in any_lengths(),
            limit in 1u64..8,
            known in any_known(),
            splits in proptest::collection::vec(1usize..200, 1..50),
            has_checksums: bool,
        ) {
            let frames = frames(&lengths, 128 * limit);
            let wire: Vec<u8> =
                frames.iter().flat_map(|frame| on_wire(*frame, has_checksums)).collect();
            let read = |splits: &[usize]| {
                let (mut messages, mut reader) =
                    (messages(&lengths, &known), Reader::new(has_checksums));
                let (mut rest, mut splits) = (&wire[..], splits.iter().cycle());
                while !rest.is_empty() {
                    let (now, later) = rest.split_at(rest.len().min(*splits.next().unwrap()));
                    assert!(reader.read(&mut messages, now).is_empty(), "{:?}", reader.events);
                    rest = later;
                }
                assert!(reader.codec.is_between_frames());
                check(&messages, &lengths);
                reader.events
            };
            let whole = read(&[usize::MAX]);
            prop_assert_eq!(&read(&[1]), &whole);
            prop_assert_eq!(&read(&splits), &whole);
            let ends = whole.iter().filter(|event| matches!(event, Event::ChunkEnd(_))).count();
            let chunks = frames.iter().filter(|frame| matches!(frame, Frame::Chunk(_))).count();
            prop_assert_eq!(ends, chunks);
            let mut others = frames.iter().filter(|frame| !matches!(frame, Frame::Chunk(_)));
            for event in &whole {
                if let Event::Frame(frame) = event {
                    prop_assert_eq!(Some(frame), others.next());
                }
            }
            prop_assert_eq!(others.next(), None);
        }

        /// A flow that ends anywhere leaves nothing behind that keeps another one from delivering the messages.
        #[test]
        fn recv_codec_abandons_what_a_flow_has_not_delivered(
            lengths in any_lengths(),
            known in any_known(),
            cut: Index,
            has_checksums: bool,
        ) {
            let wire: Vec<u8> = frames(&lengths, 512)
                .iter()
                .flat_map(|frame| on_wire(*frame, has_checksums))
                .collect();
            let (mut messages, mut torn, mut other) =
                (messages(&lengths, &known), Reader::new(has_checksums), Reader::new(has_checksums));
            prop_assert!(torn.read(&mut messages, &wire[..cut.index(wire.len())]).is_empty());
            torn.end(&mut messages);
            prop_assert!(other.read(&mut messages, &wire).is_empty());
            check(&messages, &lengths);
        }

        #[test]
        fn recv_codec_reads_any_bytes_without_panic(
            parts in proptest::collection::vec(
                prop_oneof![
                    any::<[u8; FRAME_BYTES]>().prop_map(|bytes| bytes.to_vec()),
                    // Of a known kind.
                    (any::<[u8; FRAME_BYTES]>(), 1u8..9).prop_map(|(mut bytes, kind)| {
                        bytes[..4].copy_from_slice(&[kind, 0, 0, 0]);
                        bytes.to_vec()
                    }),
                    // A chunk of any message.
                    (0u64..4, 0u64..4, 0u32..600, 0u64..1100).prop_map(|(message, at, length, total)| {
                        let Frame::Chunk(header) = chunk(message, 128 * at, length, total) else {
                            panic!("a chunk")
                        };
                        on_wire(Frame::Chunk(header), true)
                    }),
                ],
                1..12,
            ),
            split in 1usize..100,
            has_checksums: bool,
        ) {
            let mut messages = messages(&[0, 100, 1000], &[]);
            let mut reader = Reader::new(has_checksums);
            let wire = parts.concat();
            for part in wire.chunks(split) {
                if !reader.read(&mut messages, part).is_empty() {
                    break;
                }
            }
            reader.end(&mut messages);
            prop_assert!(reader.codec.is_between_frames());
            prop_assert!(messages.writes.iter().flatten().all(|writes| *writes <= 1));
        }
    }
}
