//! One TCP connection (flow) of a receiving connection: reads chunks, writes acknowledgements.

use std::io;
use std::iter;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use evenkeel_protocol::{
    ChunkAction, ChunkHeader, FlowEnd, FlowId, Part, RecvCodec, RecvStep, Reserve, Room,
};
use socket2::Socket;

use crate::connection::base::{WORKER_QUANTUM, would_block};
use crate::connection::unexpected::UnexpectedMemory;
use crate::error::ErrorKind;
use crate::memory::buffers::{RecvBuffer, SendBuffer};
use crate::runtime::reactor::{Readiness, Registration, Source};
use crate::runtime::work_lock::WorkLock;
use crate::stream::{RecvHalf, SendHalf, Stream};
use crate::sync::lock;
use crate::tcp::chunk_stage::ChunkStage;
use crate::tcp::receiver::TcpReceiver;
use crate::telemetry::chunk_events::{ChunkDescription, ChunkEvent};
use crate::telemetry::counters::FlowCounters;

/// Maximum number of frames that are written at a time.
const MAX_REPLIES: usize = 16;

/// One TCP connection (flow). Lock order: `reading`, then `writing`, then the connection's lock.
pub(super) struct RecvFlow {
    receiver: Arc<TcpReceiver>,
    pub(super) number: u32,
    pub(super) id: FlowId,
    pub(super) socket: Socket,
    registration: Registration,
    pub(super) counters: FlowCounters,
    /// The peer has ended its direction. The end is behind the last bytes.
    has_ended: AtomicBool,
    /// It is to be read although there may be no new bytes.
    is_woken: AtomicBool,
    /// The socket may have refused bytes.
    is_unwritten: AtomicBool,
    /// Held while the socket is read.
    pub(super) reading: WorkLock<ReadState>,
    /// Held while the socket is written to.
    writing: WorkLock<WriteState>,
    /// Why nothing more can be written. The kernel reports an error once, and whoever reads then sees the end of the stream.
    write_error: Mutex<Option<io::Error>>,
}

pub(super) struct ReadState {
    half: RecvHalf,
    /// Nothing may be read any more.
    pub(super) closed: bool,
    codec: RecvCodec<RecvBuffer>,
    stage: ChunkStage,
    /// An acknowledgement is due when there is nothing more to read.
    is_ack_due: bool,
    /// Of the part of a message that is being received.
    event: Option<ChunkEvent>,
}

/// Frames that are being written to the sender.
struct WriteState {
    half: SendHalf,
    /// Nothing may be written any more.
    closed: bool,
    /// Encoded frames, and how much of them is written.
    bytes: Vec<u8>,
    written: usize,
}

/// Why a flow ended whose socket has failed.
fn flow_end(error: &io::Error) -> FlowEnd {
    match error.kind() {
        io::ErrorKind::ConnectionReset => FlowEnd::Reset(error.to_string()),
        _ => FlowEnd::Unreachable(error.to_string()),
    }
}

/// Why no more is read now.
enum ReadPause {
    /// The socket has nothing, others are to be read first, or there is no buffer.
    Wait,
    Ended(FlowEnd),
    Failed(String),
}

/// What one call has read.
struct Received {
    bytes: usize,
    /// It was less than there was room for. The next bytes are an event.
    is_all: bool,
}

impl RecvFlow {
    pub(super) fn new(receiver: Arc<TcpReceiver>, number: u32, id: FlowId, stream: Stream) -> Self {
        let Stream { socket, send, recv } = stream;
        let (checksum, workers) = (receiver.base.context.settings.checksum, &receiver.workers);
        let reading = ReadState {
            half: recv,
            closed: false,
            codec: RecvCodec::new(checksum),
            stage: ChunkStage::new(&workers.staging),
            is_ack_due: false,
            event: None,
        };
        let writing = WriteState { half: send, closed: false, bytes: Vec::new(), written: 0 };
        Self {
            number,
            id,
            socket,
            registration: workers.registration(),
            counters: FlowCounters::default(),
            has_ended: AtomicBool::new(false),
            is_woken: AtomicBool::new(false),
            is_unwritten: AtomicBool::new(false),
            reading: WorkLock::new(reading),
            writing: WorkLock::new(writing),
            write_error: Mutex::new(None),
            receiver,
        }
    }

    /// Registers it with its worker.
    pub(super) fn watch(self: &Arc<Self>) -> io::Result<()> {
        self.registration.watch(&self.socket, Arc::<Self>::clone(self))?;
        if self.reading.lock().closed {
            // It may have been closed before the watch began.
            self.registration.end(&self.socket);
        }
        Ok(())
    }

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
    fn read_with<'a>(&'a self, mut guard: MutexGuard<'a, ReadState>, limit: u64) {
        let receiver = &self.receiver;
        let mut moved = 0;
        let mut is_drained = false;
        let pause = loop {
            let reading = &mut *guard;
            let step = reading.codec.next_step();
            // What is received is reported in any case.
            let is_received = matches!(step, Ok(RecvStep::Received(_) | RecvStep::ChunkEnd { .. }));
            if !is_received && (reading.closed || receiver.base.failed()) {
                return;
            }
            match step {
                Ok(RecvStep::Read) if is_drained => break ReadPause::Wait,
                Ok(RecvStep::Read) if moved > limit => {
                    // There is no event for bytes that are read already.
                    self.wake_worker();
                    break ReadPause::Wait;
                }
                Ok(RecvStep::Read) => match self.read_once(reading) {
                    Ok(Received { bytes, is_all }) => {
                        moved += bytes as u64;
                        is_drained = is_all && !self.has_ended.load(Ordering::Relaxed);
                    }
                    Err(pause) => break pause,
                },
                Ok(RecvStep::Reserve { chunk, at }) => {
                    if !self.reserve(reading, &chunk, at) {
                        break ReadPause::Wait;
                    }
                }
                Ok(RecvStep::Received(part)) => self.part_received(reading, &part),
                Ok(RecvStep::ChunkEnd { length }) => {
                    reading.stage.clear();
                    self.counters.chunk(&receiver.base.counters, length.into());
                }
                Ok(RecvStep::FlowDead(number)) => {
                    // The other flow's lock is needed. Two flows that hold theirs could wait for each other.
                    drop(guard);
                    guard = self.handle_flow_dead(number);
                }
                Ok(RecvStep::Close(messages)) => {
                    receiver.step(|locked, _| locked.engine.handle_peer_close(self.id, messages));
                }
                Ok(RecvStep::Tag(tag)) => receiver.step(|locked, _| locked.engine.handle_tag(tag)),
                Ok(RecvStep::SameTagBelow(below)) => {
                    receiver.step(|locked, _| locked.engine.handle_same_tag_below(below));
                }
                Err(error) if error.is_corrupt() => {
                    receiver.base.counters.corrupt.add(1);
                    break ReadPause::Ended(FlowEnd::Lost(error.to_string()));
                }
                Err(error) => break ReadPause::Failed(error.to_string()),
            }
        };
        if std::mem::take(&mut guard.is_ack_due) {
            self.reply();
        }
        drop(guard);
        match pause {
            ReadPause::Wait => {}
            ReadPause::Ended(why) => receiver.flow_ended(self, &why),
            ReadPause::Failed(what) => receiver.fail(ErrorKind::Remote, &what),
        }
    }

    /// Ends a flow that the peer reported as dead, and acknowledges that. Called without the lock, which it takes again.
    fn handle_flow_dead(&self, number: u32) -> MutexGuard<'_, ReadState> {
        self.receiver.on_flow_dead(number);
        self.receiver.step(|locked, _| locked.engine.handle_report(self.id));
        let mut reading = self.reading.lock();
        // Another thread may have handled it in between.
        reading.codec.flow_dead_handled(number);
        reading
    }

    /// Reserves a part of the message's buffer for the next bytes of the chunk. Returns whether the flow goes on.
    fn reserve(&self, reading: &mut ReadState, chunk: &ChunkHeader, at: u64) -> bool {
        let mut reserve =
            self.receiver.step(|locked, now| locked.engine.poll_reserve(now, self.id, chunk, at));
        while let Reserve::Memory(bytes) = reserve {
            // Without the lock: it may be large.
            let memory = UnexpectedMemory::new(bytes as usize).map(|mut memory| {
                let buffer = memory.lend_mut();
                (memory, buffer)
            });
            reserve = self
                .receiver
                .step(|locked, now| locked.engine.handle_memory(now, self.id, chunk, at, memory));
        }
        let Reserve::Chunk(action) = reserve else { return false };
        match &action {
            ChunkAction::Deliver { payload: buffer, end } => {
                let (socket, bytes) = (self.socket.as_raw_fd(), (end - at) as usize);
                let describe = || ChunkDescription::Tcp { socket, is_sent: false, bytes };
                // That of the part before, if the chunk is not verified yet.
                reading.event = None;
                reading.event = ChunkEvent::begin(buffer.mark(), describe);
            }
            ChunkAction::Discard { end } => {
                self.receiver.base.counters.repeated.add(end - at);
            }
            ChunkAction::NotPosted => return false,
        }
        reading.codec.reserved(action);
        true
    }

    /// A part of a message is received.
    fn part_received(&self, reading: &mut ReadState, part: &Part<RecvBuffer>) {
        let Part { message, buffer, start, end, staged_at } = *part;
        let length = (end - start) as usize;
        if let Some(staged_at) = staged_at {
            let bytes = reading.stage.bytes(staged_at, staged_at + length);
            buffer.part(start as usize, length).copy_from(bytes);
        }
        // Before the request may be reported.
        reading.event = None;
        reading.is_ack_due |= self.receiver.step(|locked, now| {
            let received = locked.engine.handle_received(now, self.id, message, end - start);
            if let Some(bytes) = received.completed {
                self.receiver.base.counters.message(bytes);
            }
            received.is_ack_due
        });
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
            Err(error) if would_block(&error) => Err(ReadPause::Wait),
            Err(error) => {
                let is_forged = error.kind() == io::ErrorKind::InvalidData;
                self.receiver.base.counters.corrupt.add(is_forged.into());
                Err(ReadPause::Ended(flow_end(&error)))
            }
        }
    }

    /// Why the flow ended that has nothing more to read.
    fn end_of_stream(&self, reading: &ReadState) -> FlowEnd {
        if let Some(error) = lock(&self.write_error).take() {
            return flow_end(&error);
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
        let mut locked = self.receiver.lock();
        reading.codec.abandon(|part| locked.engine.handle_abandoned(part));
        true
    }

    /// Answers its dialer. No frame is written meanwhile.
    pub(super) fn answer(&self, answer: impl FnOnce(&Socket, &mut SendHalf) -> io::Result<()>) {
        if let Err(error) = answer(&self.socket, &mut self.writing.lock().half) {
            lock(&self.write_error).get_or_insert(error);
        }
    }

    /// Writes frames to the sender, now or as soon as the socket takes them.
    pub(super) fn reply(&self) {
        self.writing.run(|mut writing| self.write(&mut writing));
    }

    fn write(&self, writing: &mut WriteState) {
        // Before the socket may refuse bytes: its next event is then taken for the rest.
        self.is_unwritten.store(true, Ordering::SeqCst);
        match self.write_all(writing) {
            Ok(()) => self.is_unwritten.store(false, Ordering::SeqCst),
            Err(error) if would_block(&error) => {}
            // The reading side ends the flow.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
            Err(error) => {
                lock(&self.write_error).get_or_insert(error);
                // If it is not the socket that has failed.
                self.shutdown();
            }
        }
    }

    fn write_all(&self, writing: &mut WriteState) -> io::Result<()> {
        let mut are_all_taken = false;
        while !writing.closed {
            writing.half.flush(&self.socket)?;
            if writing.written == writing.bytes.len() {
                writing.bytes.clear();
                writing.written = 0;
                if are_all_taken {
                    return Ok(());
                }
                are_all_taken = self.take_replies(&mut writing.bytes);
                if writing.bytes.is_empty() {
                    return Ok(());
                }
            }
            let nothing = SendBuffer::from_static(&[]);
            let rest = &writing.bytes[writing.written..];
            writing.written += writing.half.send_with_header(&self.socket, rest, nothing)?;
        }
        Ok(())
    }

    /// Encodes frames to write. Returns whether there were no more. Whoever adds one later calls [`RecvFlow::reply`].
    fn take_replies(&self, bytes: &mut Vec<u8>) -> bool {
        let base = &self.receiver.base;
        let unposted_ms = base.waits.unposted_word();
        let mut frames = [None; MAX_REPLIES];
        {
            let mut locked = self.receiver.lock();
            let taken = iter::from_fn(|| locked.engine.poll_reply(self.id, unposted_ms));
            frames.iter_mut().zip(taken).for_each(|(frame, taken)| *frame = Some(taken));
        }
        for frame in frames.iter().flatten() {
            bytes.extend(base.encode(*frame));
        }
        frames[MAX_REPLIES - 1].is_none()
    }

    /// Writes the last frames, if the socket takes them, and ends the flow. If the socket's buffer is full, the end of the
    /// stream informs the peer.
    pub(super) fn end_replies(&self) {
        let mut writing = self.writing.lock();
        self.write(&mut writing);
        writing.closed = true;
        self.shutdown();
    }

    fn shutdown(&self) {
        // Fails only if the peer was faster.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    pub(super) fn close(&self) {
        self.receiver.base.ended(self.counters.bytes());
        self.registration.end(&self.socket);
        self.shutdown();
    }
}

impl Source for RecvFlow {
    fn ready(&self, readiness: Readiness) {
        if readiness.ended {
            self.has_ended.store(true, Ordering::Relaxed);
        }
        if readiness.readable || self.is_woken.swap(false, Ordering::Relaxed) {
            self.read(WORKER_QUANTUM);
        }
        if readiness.ended {
            // A flow that waits for a buffer is not read, so its end would not be noticed there.
            self.receiver.step(|locked, now| locked.engine.handle_hang_up(now, self.id));
        }
        if readiness.writable && self.is_unwritten.load(Ordering::SeqCst) {
            self.reply();
        }
    }

    fn abandoned(&self, why: &str) {
        self.receiver.fail(ErrorKind::Internal, why);
    }
}
