//! One TCP connection (flow) of a receiving connection: reads chunks, writes acknowledgements.

use std::collections::VecDeque;
use std::io;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use evenkeel_protocol::{
    ChunkHeader, FRAME_BYTES, Frame, FrameError, MAX_CHUNK_BYTES, ReassemblyError,
};
use socket2::Socket;

use crate::connection::base::{Base, WORKER_QUANTUM, would_block};
use crate::connection::unexpected::TagMatcher;
use crate::error::ErrorKind;
use crate::memory::buffers::{RecvBuffer, SendBuffer};
use crate::runtime::reactor::{Readiness, Registration, Source};
use crate::runtime::work_lock::WorkLock;
use crate::stream::{RecvHalf, SendHalf};
use crate::sync::lock;
use crate::tcp::chunk_checksum::ChunkChecksum;
use crate::tcp::recv_queue::RecvQueue;
use crate::telemetry::chunk_events::{ChunkDescription, ChunkEvent};
use crate::telemetry::counters::FlowCounters;
use crate::telemetry::waits::Waits;

/// What a flow needs of its connection.
pub(super) trait RecvFlowOwner: Sized + Send + Sync {
    fn base(&self) -> &Base;
    fn queue(&self) -> &Mutex<RecvQueue<RecvFlow<Self>>>;
    /// What to do with the next bytes of a chunk. `None`, and the flow waits, when no buffer is posted for it yet.
    fn reserve(
        &self,
        slot: usize,
        chunk: &ChunkHeader,
        at: u64,
    ) -> Result<Option<ReadStage>, ReassemblyError>;
    /// A part of a message is in its buffer. Sends an acknowledgement only if it cannot wait until there is nothing more to
    /// read.
    fn on_received(&self, flow: &RecvFlow<Self>, message: u64, bytes: u64);
    /// The acknowledgement to send when there is nothing more to read, if one is due.
    fn ack_due(&self) -> Option<u64>;
    /// Changes the tag matcher and runs its next steps. `change` returns whether the change is valid.
    fn update_tags(&self, change: impl FnOnce(&mut TagMatcher) -> bool);
    /// A flow has ended. The sender sends its chunks again on others.
    fn flow_ended(self: &Arc<Self>, flow: &RecvFlow<Self>, end: FlowEnd);
    /// The peer reports a dead flow. It will send again what the flow had not delivered.
    fn on_flow_dead(self: &Arc<Self>, number: u32);
    /// Fails the connection if its posted buffers can never be filled.
    fn check_unrecoverable(&self, now: Instant);
    fn fail(&self, kind: ErrorKind, what: &str);
}

/// One TCP connection (flow).
pub(super) struct RecvFlow<O: RecvFlowOwner> {
    pub(super) receiver: Arc<O>,
    pub(super) number: u32,
    pub(super) slot: usize,
    pub(super) socket: Socket,
    pub(super) registration: Registration,
    pub(super) counters: FlowCounters,
    /// The peer has ended its direction. The end is behind the last bytes.
    pub(super) has_ended: AtomicBool,
    /// It is to be read although there may be no new bytes.
    pub(super) is_woken: AtomicBool,
    /// Held while the socket is read.
    pub(super) reading: WorkLock<ReadState>,
    /// Held while the socket is written to.
    pub(super) replies: Mutex<ReplyState>,
}

pub(super) struct ReadState {
    pub(super) half: RecvHalf,
    /// Nothing may be read any more.
    pub(super) closed: bool,
    pub(super) stage: ReadStage,
    pub(super) header: [u8; FRAME_BYTES],
    /// If the peers have agreed on checksums.
    pub(super) checksum: Option<ChunkChecksum>,
    /// A part of a message was received, and an acknowledgement may be due.
    pub(super) has_received: bool,
    /// Of the part of a message that is being received.
    pub(super) event: Option<ChunkEvent>,
}

#[derive(Clone, Copy)]
pub(super) enum ReadStage {
    /// `have` bytes of the next frame are read.
    Header { have: usize },
    /// The peer reports a dead flow.
    FlowDead { number: u32 },
    /// The next bytes of the chunk start at `at`. Its message may not have a buffer yet.
    Reserve { chunk: ChunkHeader, at: u64 },
    /// The bytes from `start` to `end` go into the buffer; those before `at` are there.
    Deliver { chunk: ChunkHeader, buffer: RecvBuffer, start: u64, at: u64, end: u64 },
    /// The bytes up to `end` were received before.
    Discard { chunk: ChunkHeader, at: u64, end: u64 },
    /// The chunk does not match its checksum.
    Corrupt,
}

/// Why a flow has ended.
pub(super) enum FlowEnd {
    /// The peer has ended it and may, because it does not need it any more.
    Expected,
    /// It was closed, or carried wrong bytes.
    Lost(String),
    /// It was reset, by the peer's system or on the path.
    Reset(String),
    /// The peer's host did not answer, there is no route to it, this host has ended the flow, or somebody has changed its
    /// bytes.
    Unreachable(String),
}

impl From<io::Error> for FlowEnd {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::ConnectionReset => Self::Reset(error.to_string()),
            _ => Self::Unreachable(error.to_string()),
        }
    }
}

/// What follows a stage.
enum StageOutcome {
    /// The next stage, without reading.
    Next,
    /// Bytes were read.
    Received(Received),
    /// The socket has nothing now.
    WouldBlock,
    /// The peer reported this flow as dead.
    FlowDead(u32),
    /// No buffer is posted for the next bytes.
    NoBuffer,
    /// The flow has ended.
    Ended(FlowEnd),
    /// The connection fails.
    Failed(ErrorKind, String),
}

/// Why no more is read now.
enum ReadPause {
    /// The socket has nothing, or others are to be read first.
    NoBytes,
    NoBuffer,
    Ended(FlowEnd),
    Failed(ErrorKind, String),
}

/// What one call has read.
struct Received {
    bytes: usize,
    /// It was less than there was room for. The next bytes are an event.
    is_all: bool,
}

impl ReadStage {
    /// Whether there is nothing to do before more bytes are read.
    fn wants_bytes(&self) -> bool {
        match self {
            Self::Header { have } => *have < FRAME_BYTES,
            Self::Deliver { .. } | Self::Discard { .. } => true,
            Self::FlowDead { .. } | Self::Reserve { .. } | Self::Corrupt => false,
        }
    }
}

/// Frames to write to the sender.
#[derive(Default)]
pub(super) struct ReplyState {
    pub(super) half: SendHalf,
    pub(super) closed: bool,
    /// Why nothing more can be written. The kernel reports an error once, and whoever reads then sees the end of the stream.
    pub(super) error: Option<io::Error>,
    /// Whether the dialer knows that the flow is accepted. No frame may be written before that.
    pub(super) is_answered: bool,
    /// Encoded frames, and how much of them is written.
    pub(super) bytes: Vec<u8>,
    pub(super) written: usize,
    pub(super) ack: Option<u64>,
    pub(super) dead_flows: VecDeque<u32>,
    /// The buffer from which tags differ.
    pub(super) tags_differ_from: Option<u64>,
    /// Buffers by number, and their tags.
    pub(super) buffer_tags: VecDeque<(u64, i32)>,
}

impl ReplyState {
    /// The next frame to write. Acknowledgements are last: a sender that has one has the other frames too.
    fn next(&mut self, waits: &Waits) -> Option<Frame> {
        let dead_flows = self.dead_flows.pop_front().map(Frame::FlowDead);
        dead_flows
            .or_else(|| self.tags_differ_from.take().map(Frame::TagsDifferFrom))
            .or_else(|| {
                self.buffer_tags.pop_front().map(|(number, tag)| Frame::BufferTag(number, tag))
            })
            .or_else(|| self.ack.take().map(|below| Frame::Ack(below, waits.unposted_word())))
    }

    /// Whether everything encoded is written.
    fn is_between(&self) -> bool {
        self.written == self.bytes.len()
    }
}

impl<O: RecvFlowOwner> RecvFlow<O> {
    /// Makes the worker, or a caller that polls, read it.
    pub(super) fn wake_worker(&self) {
        self.is_woken.store(true, Ordering::Relaxed);
        self.registration.wake(&self.socket);
    }

    pub(super) fn read(&self, limit: u64) {
        self.reading.run(|reading| self.read_with(reading, limit));
    }

    /// Reads until the socket has no more, the next chunk has no buffer, or more than `limit` bytes are read and processed. In
    /// the last case the worker continues.
    pub(super) fn read_with<'a>(&'a self, mut guard: MutexGuard<'a, ReadState>, limit: u64) {
        let receiver = &self.receiver;
        let mut moved = 0;
        let mut is_drained = false;
        let pause = loop {
            let reading = &mut *guard;
            if reading.closed || receiver.base().failed() {
                return;
            }
            if is_drained && reading.stage.wants_bytes() {
                break ReadPause::NoBytes;
            }
            // There is no event for bytes that are read already.
            if moved > limit && reading.stage.wants_bytes() {
                self.wake_worker();
                break ReadPause::NoBytes;
            }
            match self.run_stage(reading) {
                StageOutcome::Next => {}
                StageOutcome::Received(Received { bytes, is_all }) => {
                    moved += bytes as u64;
                    is_drained = is_all && !self.has_ended.load(Ordering::Relaxed);
                }
                StageOutcome::WouldBlock => break ReadPause::NoBytes,
                StageOutcome::FlowDead(number) => {
                    // The other flow's lock is needed. Two flows that hold theirs could wait for each other.
                    drop(guard);
                    guard = self.handle_flow_dead(number);
                }
                StageOutcome::NoBuffer => break ReadPause::NoBuffer,
                StageOutcome::Ended(why) => break ReadPause::Ended(why),
                StageOutcome::Failed(kind, what) => break ReadPause::Failed(kind, what),
            }
        };
        if std::mem::take(&mut guard.has_received)
            && let Some(below) = receiver.ack_due()
        {
            self.reply(|replies| replies.ack = Some(below));
        }
        drop(guard);
        match pause {
            ReadPause::NoBytes => {}
            ReadPause::NoBuffer => receiver.check_unrecoverable(Instant::now()),
            ReadPause::Ended(why) => receiver.flow_ended(self, why),
            ReadPause::Failed(kind, what) => receiver.fail(kind, &what),
        }
    }

    /// Does what the stage asks for: processes what is read, or reads from the socket.
    fn run_stage(&self, reading: &mut ReadState) -> StageOutcome {
        match reading.stage {
            ReadStage::Header { have: FRAME_BYTES } => self.handle_frame(reading),
            ReadStage::Header { have } => self.read_header(reading, have),
            ReadStage::FlowDead { number } => StageOutcome::FlowDead(number),
            ReadStage::Reserve { chunk, at } => self.reserve(reading, &chunk, at),
            ReadStage::Deliver { chunk, buffer, at, end, .. } => {
                let rest = match &mut reading.checksum {
                    None => buffer.part(at as usize, (end - at) as usize),
                    Some(checksum) => checksum.place(at, end),
                };
                self.read_payload(reading, rest, end == chunk.end())
            }
            ReadStage::Discard { at, end, .. } => self.discard(reading, (end - at) as usize),
            ReadStage::Corrupt => {
                self.receiver.base().counters.corrupt.add(1);
                let why = "a chunk that does not match its checksum";
                StageOutcome::Ended(FlowEnd::Lost(why.to_owned()))
            }
        }
    }

    /// Acts on a frame header that is complete.
    fn handle_frame(&self, reading: &mut ReadState) -> StageOutcome {
        let receiver = &self.receiver;
        let (frame, sum) = match receiver.base().decode(&reading.header) {
            Ok(decoded) => decoded,
            Err(error @ FrameError::Checksum) => {
                return StageOutcome::Ended(FlowEnd::Lost(error.to_string()));
            }
            Err(error) => {
                return StageOutcome::Failed(ErrorKind::Remote, format!("protocol error: {error}"));
            }
        };
        match frame {
            Frame::Chunk(chunk) => {
                if let Some(checksum) = &mut reading.checksum {
                    let length = chunk.length;
                    if u64::from(length) > MAX_CHUNK_BYTES {
                        let what = format!(
                            "protocol error: a chunk of {length} bytes, but the limit is {MAX_CHUNK_BYTES}"
                        );
                        return StageOutcome::Failed(ErrorKind::Remote, what);
                    }
                    checksum.begin(&chunk, sum);
                }
                reading.stage = ReadStage::Reserve { chunk, at: chunk.offset };
            }
            Frame::FlowDead(number) => reading.stage = ReadStage::FlowDead { number },
            Frame::Close(messages) => {
                reading.stage = ReadStage::Header { have: 0 };
                let below = {
                    let mut queue = lock(receiver.queue());
                    // It may deliver fewer than it has announced on another flow, if it gives up.
                    queue.is_sender_open = true;
                    queue.closes_at = Some(queue.closes_at.map_or(messages, |at| at.min(messages)));
                    queue.reassembly.ack()
                };
                self.reply(|replies| replies.ack = Some(below));
            }
            Frame::Tag(tag) => {
                reading.stage = ReadStage::Header { have: 0 };
                receiver.update_tags(|tags| {
                    tags.set_common_tag(tag);
                    true
                });
            }
            Frame::SameTagBelow(below) => {
                reading.stage = ReadStage::Header { have: 0 };
                receiver.update_tags(|tags| tags.set_same_tag_below(below));
            }
            Frame::Ack(..) | Frame::TagsDifferFrom(_) | Frame::BufferTag(..) => {
                let what = "protocol error: the sender sent a frame that only receivers send";
                return StageOutcome::Failed(ErrorKind::Remote, what.to_owned());
            }
        }
        StageOutcome::Next
    }

    /// Ends a flow that the peer reported as dead, and acknowledges that. Called without the lock, which it takes again.
    fn handle_flow_dead(&self, number: u32) -> MutexGuard<'_, ReadState> {
        self.receiver.on_flow_dead(number);
        let below = {
            let mut queue = lock(self.receiver.queue());
            queue.is_sender_open = true;
            queue.reassembly.ack()
        };
        self.reply(|replies| replies.ack = Some(below));
        let mut reading = self.reading.lock();
        // Another thread may have handled it in between.
        if matches!(reading.stage, ReadStage::FlowDead { number: still } if still == number) {
            reading.stage = ReadStage::Header { have: 0 };
        }
        reading
    }

    fn read_header(&self, reading: &mut ReadState, have: usize) -> StageOutcome {
        let no_payload = RecvBuffer::from_static(&mut []);
        let header = &mut reading.header[have..];
        let result = reading.half.recv_with_header(&self.socket, no_payload, header);
        self.after_read(reading, result, FRAME_BYTES - have)
    }

    /// Reserves a part of the message's buffer for the next bytes of the chunk.
    fn reserve(&self, reading: &mut ReadState, chunk: &ChunkHeader, at: u64) -> StageOutcome {
        match self.receiver.reserve(self.slot, chunk, at) {
            Ok(Some(stage)) => {
                reading.stage = stage;
                if let ReadStage::Deliver { buffer, at, end, .. } = stage {
                    let (socket, bytes) = (self.socket.as_raw_fd(), (end - at) as usize);
                    let describe = || ChunkDescription::Tcp { socket, is_sent: false, bytes };
                    reading.event = ChunkEvent::begin(buffer.mark(), describe);
                }
                self.finish_part(reading);
                StageOutcome::Next
            }
            Ok(None) => StageOutcome::NoBuffer,
            Err(error) => {
                let kind = match error {
                    ReassemblyError::TooLong { .. } => ErrorKind::Truncated,
                    ReassemblyError::TotalChanged { .. }
                    | ReassemblyError::TooFragmented { .. } => ErrorKind::Remote,
                };
                StageOutcome::Failed(kind, error.to_string())
            }
        }
    }

    /// Reads into the rest of the reserved part.
    fn read_payload(
        &self,
        reading: &mut ReadState,
        rest: RecvBuffer,
        is_last: bool,
    ) -> StageOutcome {
        // The next frame follows the chunk's end, often in the same call.
        let next = if is_last { FRAME_BYTES } else { 0 };
        let room = rest.length() + next;
        let header = &mut reading.header[..next];
        let result = reading.half.recv_with_header(&self.socket, rest, header);
        self.after_read(reading, result, room)
    }

    /// Drops bytes that were received before.
    fn discard(&self, reading: &mut ReadState, length: usize) -> StageOutcome {
        let half = &mut reading.half;
        let result = match &mut reading.checksum {
            None => half.discard(&self.socket, length),
            Some(checksum) => self.discard_checked(half, checksum, length),
        };
        // It may drop less than there is.
        self.after_read(reading, result, 0)
    }

    /// Continues after a call that had this much room.
    fn after_read(
        &self,
        reading: &mut ReadState,
        result: io::Result<usize>,
        room: usize,
    ) -> StageOutcome {
        match result {
            Ok(0) => StageOutcome::Ended(self.end_of_stream(reading)),
            Ok(received) => {
                let is_all = received < room && !reading.half.has_failed();
                self.advance(reading, received);
                StageOutcome::Received(Received { bytes: received, is_all })
            }
            Err(error) if would_block(&error) => StageOutcome::WouldBlock,
            Err(error) => {
                let is_forged = error.kind() == io::ErrorKind::InvalidData;
                self.receiver.base().counters.corrupt.add(is_forged.into());
                StageOutcome::Ended(error.into())
            }
        }
    }

    /// Reads bytes that were received before, since the checksum covers them.
    fn discard_checked(
        &self,
        half: &mut RecvHalf,
        checksum: &mut ChunkChecksum,
        length: usize,
    ) -> io::Result<usize> {
        let mut bytes = [0; 4096];
        let room = length.min(bytes.len());
        let received = half.read(&self.socket, &mut bytes[..room])?;
        checksum.discarded(&bytes[..received]);
        Ok(received)
    }

    /// Why the flow ended that has nothing more to read.
    fn end_of_stream(&self, reading: &ReadState) -> FlowEnd {
        if let Some(error) = lock(&self.replies).error.take() {
            return error.into();
        }
        match reading.stage {
            ReadStage::Header { have: 0 } => FlowEnd::Expected,
            _ => FlowEnd::Lost("the peer closed it in the middle of a message".to_owned()),
        }
    }

    /// Accounts for bytes that were read.
    fn advance(&self, reading: &mut ReadState, received: usize) {
        if let (Some(checksum), ReadStage::Deliver { at, end, .. }) =
            (&mut reading.checksum, &reading.stage)
        {
            let taken = (received as u64).min(end - at);
            checksum.received(*at, taken);
        }
        match &mut reading.stage {
            ReadStage::Header { have } => *have += received,
            ReadStage::Deliver { at, end, .. } | ReadStage::Discard { at, end, .. } => {
                let taken = (received as u64).min(*end - *at);
                *at += taken;
                if at == end {
                    let have = received - taken as usize;
                    self.finish_part(reading);
                    if let ReadStage::Header { have: none } = &mut reading.stage {
                        *none = have;
                    }
                }
            }
            ReadStage::FlowDead { .. } | ReadStage::Reserve { .. } | ReadStage::Corrupt => {}
        }
    }

    /// Continues when the current part of a chunk is complete.
    fn finish_part(&self, reading: &mut ReadState) {
        let (chunk, at) = match reading.stage {
            ReadStage::Deliver { chunk, buffer, start, at, end } if at == end => {
                reading.has_received = true;
                // Before the request may be reported.
                reading.event = None;
                match &mut reading.checksum {
                    None => self.receiver.on_received(self, chunk.message, end - start),
                    Some(checksum) => checksum.part_received(buffer, start, end),
                }
                (chunk, end)
            }
            ReadStage::Discard { chunk, at, end } if at == end => (chunk, end),
            _ => return,
        };
        reading.stage = if at == chunk.end() {
            if let Some(checksum) = &mut reading.checksum {
                if !checksum.matches() {
                    reading.stage = ReadStage::Corrupt;
                    return;
                }
                checksum.deliver(|message, bytes| self.receiver.on_received(self, message, bytes));
            }
            self.counters.chunk(&self.receiver.base().counters, chunk.length.into());
            ReadStage::Header { have: 0 }
        } else {
            ReadStage::Reserve { chunk, at }
        };
    }

    /// Stops reading, and releases what was reserved for this flow. False if it had stopped already.
    pub(super) fn quiesce(&self) -> bool {
        let mut reading = self.reading.lock();
        if std::mem::replace(&mut reading.closed, true) {
            return false;
        }
        let stage = std::mem::replace(&mut reading.stage, ReadStage::Header { have: 0 });
        reading.event = None;
        let is_checked = reading.checksum.is_some();
        if let Some(checksum) = &mut reading.checksum {
            let mut queue = lock(self.receiver.queue());
            checksum.drop_parts(|message, from, to| queue.reassembly.release(message, from, to));
        }
        if let ReadStage::Deliver { chunk, start, mut at, end, .. } = stage {
            if is_checked {
                // They are not verified.
                at = start;
            }
            let mut queue = lock(self.receiver.queue());
            // This does not complete the message: more is missing.
            queue.reassembly.received(chunk.message, at - start);
            queue.reassembly.release(chunk.message, at, end);
        }
        true
    }

    /// Writes frames to the sender, now or as soon as the socket takes them.
    pub(super) fn reply(&self, change: impl FnOnce(&mut ReplyState)) {
        let mut replies = lock(&self.replies);
        change(&mut replies);
        self.write(&mut replies);
    }

    fn write(&self, replies: &mut ReplyState) {
        while replies.is_answered && !replies.closed {
            if let Err(error) = replies.half.flush(&self.socket) {
                return self.write_failed(replies, error);
            }
            if replies.is_between() {
                replies.bytes.clear();
                replies.written = 0;
                while let Some(frame) = replies.next(&self.receiver.base().waits) {
                    replies.bytes.extend(self.receiver.base().encode(frame));
                }
                if replies.bytes.is_empty() {
                    return;
                }
            }
            let nothing = SendBuffer::from_static(&[]);
            let rest = &replies.bytes[replies.written..];
            match replies.half.send_with_header(&self.socket, rest, nothing) {
                Ok(sent) => replies.written += sent,
                Err(error) => return self.write_failed(replies, error),
            }
        }
    }

    /// A write has failed: it is tried again later, or the reading side ends the flow.
    fn write_failed(&self, replies: &mut ReplyState, error: io::Error) {
        if !would_block(&error) && error.kind() != io::ErrorKind::BrokenPipe {
            replies.error.get_or_insert(error);
            // If it is not the socket that has failed.
            self.shutdown();
        }
    }

    /// Sends a close frame, if the socket takes it, and ends the flow. Before that it acknowledges all messages below this
    /// one: the sender has delivered them.
    pub(super) fn send_close(&self, below: u64) {
        let mut replies = lock(&self.replies);
        replies.ack = Some(below);
        self.write(&mut replies);
        let was_closed = std::mem::replace(&mut replies.closed, true);
        if !was_closed && replies.is_answered && replies.is_between() {
            let nothing = SendBuffer::from_static(&[]);
            // If the buffer is full, the end of the stream informs the peer.
            let peer_closed = self.receiver.base().encode(Frame::Close(below));
            let _ = replies.half.send_with_header(&self.socket, &peer_closed, nothing);
        }
        self.shutdown();
    }

    pub(super) fn shutdown(&self) {
        // Fails only if the peer was faster.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    pub(super) fn close(&self) {
        self.receiver.base().ended(self.counters.bytes());
        self.registration.end(&self.socket);
        self.shutdown();
    }
}

impl<O: RecvFlowOwner> Source for RecvFlow<O> {
    fn ready(&self, readiness: Readiness) {
        if readiness.ended {
            self.has_ended.store(true, Ordering::Relaxed);
            // A flow that waits for a buffer is not read, so its end would not be noticed there.
            let mut queue = lock(self.receiver.queue());
            if let Some(entry) = queue.flows.get_mut(self.slot).and_then(Option::as_mut)
                && entry.flow.number == self.number
            {
                entry.ended = true;
            }
        }
        if readiness.readable || self.is_woken.swap(false, Ordering::Relaxed) {
            self.read(WORKER_QUANTUM);
        }
        if readiness.ended {
            self.receiver.check_unrecoverable(Instant::now());
        }
        if readiness.writable {
            self.reply(|_| {});
        }
    }

    fn abandoned(&self, why: &str) {
        self.receiver.fail(ErrorKind::Internal, why);
    }
}
