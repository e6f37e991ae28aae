//! One TCP connection (flow) of a receiving connection: reads chunks, writes acknowledgements.

use std::collections::VecDeque;
use std::io;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use evenkeel_protocol::{
    Abandoned, ChunkAction, ChunkHeader, Frame, Part, ReassemblyError, RecvCodec, RecvStep, Room,
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
use crate::tcp::chunk_stage::ChunkStage;
use crate::tcp::recv_queue::RecvQueue;
use crate::telemetry::chunk_events::{ChunkDescription, ChunkEvent};
use crate::telemetry::counters::FlowCounters;
use crate::telemetry::waits::Waits;

/// What a flow needs of its connection.
pub(super) trait RecvFlowOwner: Sized + Send + Sync {
    fn base(&self) -> &Base;
    fn queue(&self) -> &Mutex<RecvQueue<RecvFlow<Self>>>;
    /// What to do with the next bytes of a chunk. The flow waits when no buffer is posted for it yet.
    fn reserve(
        &self,
        slot: usize,
        chunk: &ChunkHeader,
        at: u64,
    ) -> Result<ChunkAction<RecvBuffer>, ReassemblyError>;
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
    pub(super) codec: RecvCodec<RecvBuffer>,
    pub(super) stage: ChunkStage,
    /// A part of a message was received, and an acknowledgement may be due.
    pub(super) has_received: bool,
    /// Of the part of a message that is being received.
    pub(super) event: Option<ChunkEvent>,
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
            let step = reading.codec.next_step();
            // What is received is reported in any case.
            let is_received = matches!(step, Ok(RecvStep::Received(_) | RecvStep::ChunkEnd { .. }));
            if !is_received && (reading.closed || receiver.base().failed()) {
                return;
            }
            match step {
                Ok(RecvStep::Read) if is_drained => break ReadPause::NoBytes,
                Ok(RecvStep::Read) if moved > limit => {
                    // There is no event for bytes that are read already.
                    self.wake_worker();
                    break ReadPause::NoBytes;
                }
                Ok(RecvStep::Read) => match self.read_once(reading) {
                    Ok(Received { bytes, is_all }) => {
                        moved += bytes as u64;
                        is_drained = is_all && !self.has_ended.load(Ordering::Relaxed);
                    }
                    Err(pause) => break pause,
                },
                Ok(RecvStep::Reserve { chunk, at }) => {
                    if let Err(pause) = self.reserve(reading, &chunk, at) {
                        break pause;
                    }
                }
                Ok(RecvStep::Received(part)) => self.part_received(reading, &part),
                Ok(RecvStep::ChunkEnd { length }) => {
                    reading.stage.clear();
                    self.counters.chunk(&receiver.base().counters, length.into());
                }
                Ok(RecvStep::FlowDead(number)) => {
                    // The other flow's lock is needed. Two flows that hold theirs could wait for each other.
                    drop(guard);
                    guard = self.handle_flow_dead(number);
                }
                Ok(RecvStep::Close(messages)) => self.handle_close(messages),
                Ok(RecvStep::Tag(tag)) => receiver.update_tags(|tags| {
                    tags.set_common_tag(tag);
                    true
                }),
                Ok(RecvStep::SameTagBelow(below)) => {
                    receiver.update_tags(|tags| tags.set_same_tag_below(below));
                }
                Err(error) if error.is_corrupt() => {
                    receiver.base().counters.corrupt.add(1);
                    break ReadPause::Ended(FlowEnd::Lost(error.to_string()));
                }
                Err(error) => break ReadPause::Failed(ErrorKind::Remote, error.to_string()),
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

    /// The peer closes the connection. It may deliver fewer messages than it has announced on another flow, if it gives up.
    fn handle_close(&self, messages: u64) {
        let below = {
            let mut queue = lock(self.receiver.queue());
            queue.is_sender_open = true;
            queue.closes_at = Some(queue.closes_at.map_or(messages, |at| at.min(messages)));
            queue.reassembly.ack()
        };
        self.reply(|replies| replies.ack = Some(below));
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
        reading.codec.flow_dead_handled(number);
        reading
    }

    /// Reserves a part of the message's buffer for the next bytes of the chunk.
    fn reserve(
        &self,
        reading: &mut ReadState,
        chunk: &ChunkHeader,
        at: u64,
    ) -> Result<(), ReadPause> {
        let action = self.receiver.reserve(self.slot, chunk, at).map_err(|error| {
            let kind = match error {
                ReassemblyError::TooLong { .. } => ErrorKind::Truncated,
                ReassemblyError::TotalChanged { .. } | ReassemblyError::TooFragmented { .. } => {
                    ErrorKind::Remote
                }
            };
            ReadPause::Failed(kind, error.to_string())
        })?;
        match action {
            ChunkAction::Deliver { payload: buffer, end } => {
                let (socket, bytes) = (self.socket.as_raw_fd(), (end - at) as usize);
                let describe = || ChunkDescription::Tcp { socket, is_sent: false, bytes };
                // That of the part before, if the chunk is not verified yet.
                reading.event = None;
                reading.event = ChunkEvent::begin(buffer.mark(), describe);
            }
            ChunkAction::Discard { .. } => {}
            ChunkAction::NotPosted => return Err(ReadPause::NoBuffer),
        }
        reading.codec.reserved(action);
        Ok(())
    }

    /// A part of a message is received.
    fn part_received(&self, reading: &mut ReadState, part: &Part<RecvBuffer>) {
        let Part { message, buffer, start, end, staged_at } = *part;
        let length = (end - start) as usize;
        if let Some(staged_at) = staged_at {
            let bytes = reading.stage.bytes(staged_at, staged_at + length);
            buffer.part(start as usize, length).copy_from(bytes);
        }
        reading.has_received = true;
        // Before the request may be reported.
        reading.event = None;
        self.receiver.on_received(self, message, end - start);
    }

    /// Reads from the socket once.
    fn read_once(&self, reading: &mut ReadState) -> Result<Received, ReadPause> {
        let ReadState { half, codec, stage, .. } = reading;
        let mut staged = 0..0;
        let (result, room) = match codec.room() {
            Room::Header(header) => {
                let room = header.len();
                (half.read(&self.socket, header), room)
            }
            Room::Buffer { buffer, start, end, header } => {
                let rest = buffer.part(start as usize, (end - start) as usize);
                let room = rest.length() + header.len();
                (half.recv_with_header(&self.socket, rest, header), room)
            }
            Room::Stage { length, start, end, header } => {
                staged = start..end;
                let place = stage.place(length, start, end);
                let room = place.length() + header.len();
                (half.recv_with_header(&self.socket, place, header), room)
            }
            // It may drop less than there is.
            Room::Discard(length) => (half.discard(&self.socket, length), 0),
            Room::DiscardChecked(length) => return self.discard_checked(reading, length),
        };
        let received = self.after_read(reading, result)?;
        let ReadState { half, codec, stage, .. } = reading;
        let payload = stage.bytes(staged.start, staged.end.min(staged.start + received));
        codec.received(received, payload);
        Ok(Received { bytes: received, is_all: received < room && !half.has_failed() })
    }

    /// Reads bytes that were received before, since the checksum covers them.
    fn discard_checked(
        &self,
        reading: &mut ReadState,
        length: usize,
    ) -> Result<Received, ReadPause> {
        let mut bytes = [0; 4096];
        let room = length.min(bytes.len());
        let result = reading.half.read(&self.socket, &mut bytes[..room]);
        let received = self.after_read(reading, result)?;
        reading.codec.received(received, &bytes[..received]);
        Ok(Received { bytes: received, is_all: false })
    }

    /// The number of bytes that were read, or why there are none.
    fn after_read(
        &self,
        reading: &ReadState,
        result: io::Result<usize>,
    ) -> Result<usize, ReadPause> {
        match result {
            Ok(0) => Err(ReadPause::Ended(self.end_of_stream(reading))),
            Ok(received) => Ok(received),
            Err(error) if would_block(&error) => Err(ReadPause::NoBytes),
            Err(error) => {
                let is_forged = error.kind() == io::ErrorKind::InvalidData;
                self.receiver.base().counters.corrupt.add(is_forged.into());
                Err(ReadPause::Ended(error.into()))
            }
        }
    }

    /// Why the flow ended that has nothing more to read.
    fn end_of_stream(&self, reading: &ReadState) -> FlowEnd {
        if let Some(error) = lock(&self.replies).error.take() {
            return error.into();
        }
        match reading.codec.is_between_frames() {
            true => FlowEnd::Expected,
            false => FlowEnd::Lost("the peer closed it in the middle of a message".to_owned()),
        }
    }

    /// Stops reading, and releases what was reserved for this flow. False if it had stopped already.
    pub(super) fn quiesce(&self) -> bool {
        let mut reading = self.reading.lock();
        if std::mem::replace(&mut reading.closed, true) {
            return false;
        }
        reading.event = None;
        reading.stage.clear();
        let mut queue = lock(self.receiver.queue());
        reading.codec.abandon(|Abandoned { message, start, received, end }| {
            // This does not complete the message: more is missing.
            if received > start {
                queue.reassembly.received(message, received - start);
            }
            queue.reassembly.release(message, received, end);
        });
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
