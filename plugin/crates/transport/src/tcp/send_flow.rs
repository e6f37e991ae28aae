//! One TCP connection (flow) of a sending connection: writes chunks, reads acknowledgements.

use std::io;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use evenkeel_protocol::{
    FRAME_BYTES, FlowWriter, Frame, FrameError, FrameSlice, KernelQuery, MAX_FRAMES, Pacer,
    SendCodec, WriteSituation, WriteStep, Written,
};
use socket2::Socket;

use crate::connection::base::{WORKER_QUANTUM, would_block};
use crate::error::ErrorKind;
use crate::memory::buffers::SendBuffer;
use crate::runtime::reactor::{Readiness, Registration, Source};
use crate::runtime::work_lock::WorkLock;
use crate::stream::{RecvHalf, SendHalf};
use crate::sync::lock;
use crate::sys;
use crate::tcp::retransmit_buffer::CopyPlace;
use crate::tcp::send_queue::{CutFrame, SendQueue};
use crate::tcp::sender::TcpSender;
use crate::telemetry::chunk_events::{ChunkDescription, ChunkEvent};
use crate::telemetry::counters::FlowCounters;

/// Bytes of small messages that one system call batches.
const BATCH_BYTES: u64 = 64 << 10;

/// A number that no flow has.
const NO_FLOW: u32 = u32::MAX;

/// One TCP connection (flow).
pub(crate) struct SendFlow {
    pub(super) sender: Arc<TcpSender>,
    pub(crate) number: u32,
    pub(crate) slot: usize,
    pub(crate) socket: Socket,
    pub(super) registration: Registration,
    pub(crate) counters: FlowCounters,
    /// Its socket did not take everything, or is being written to. There is an event when it takes more.
    pub(super) is_full: AtomicBool,
    /// It is to write although its socket may not have changed.
    pub(super) is_woken: AtomicBool,
    /// The peer has ended its direction. The end is behind the last frames.
    pub(super) has_ended: AtomicBool,
    /// Held while the socket is written to.
    pub(super) writer: WorkLock<WriteState>,
    /// Held while the socket is read from.
    pub(super) frame_reader: WorkLock<FrameReader>,
}

pub(super) struct WriteState {
    pub(super) half: SendHalf,
    /// Nothing may be written any more.
    pub(super) closed: bool,
    /// Frames to write.
    pub(super) codec: SendCodec<Payload>,
    /// The copies of the chunks that are written and not reported to the scheduler yet, and the number of those chunks.
    copies: [Option<CopyPlace>; MAX_FRAMES],
    chunks_written: usize,
    /// Decides what is written next.
    pub(super) flow: FlowWriter,
}

/// What a frame carries.
pub(super) struct Payload {
    /// Empty if the frame is no chunk.
    buffer: SendBuffer,
    /// Where it is copied once it is written.
    copy: Option<CopyPlace>,
    /// Ends when the frame is written, or will not be.
    event: Option<ChunkEvent>,
}

/// Why a frame from the peer cannot be handled.
enum FrameFailure {
    /// It is corrupt: another flow may work.
    Corrupt(String),
    /// The connection cannot continue.
    Fatal(String),
}

impl From<String> for FrameFailure {
    fn from(what: String) -> Self {
        Self::Fatal(what)
    }
}

pub(super) struct FrameReader {
    pub(super) half: RecvHalf,
    pub(super) frames: [u8; 8 * FRAME_BYTES],
    pub(super) have: usize,
}

impl WriteState {
    pub(super) fn new(half: SendHalf, pace: Pacer, has_checksums: bool) -> Self {
        Self {
            half,
            closed: false,
            codec: SendCodec::new(has_checksums),
            copies: [const { None }; MAX_FRAMES],
            chunks_written: 0,
            flow: FlowWriter::new(pace),
        }
    }

    /// Whether the socket has not taken everything that was written last.
    fn is_blocked(&self) -> bool {
        match &self.half {
            SendHalf::Plain | SendHalf::Kernel(_) => !self.codec.is_empty(),
            // It takes frames in parts, as many as fit into its records.
            half @ SendHalf::Records(_) => !half.is_flushed(),
        }
    }

    /// Adds a frame.
    fn push(&mut self, CutFrame { frame, buffer, copy }: CutFrame) {
        self.codec.push(frame, Payload { buffer, copy, event: None });
    }

    /// These bytes were written. Copies small messages that are, without any lock that others wait for.
    fn wrote(&mut self, bytes: usize) -> Written {
        self.codec.wrote(bytes, |Payload { buffer, copy, event }| {
            drop(event);
            if let Some(copy) = &copy {
                copy.fill(buffer);
            }
            self.copies[self.chunks_written] = copy;
            self.chunks_written += 1;
        })
    }

    /// Reports to the queue what was written by this flow. Returns whether there was something.
    pub(super) fn report_written(&mut self, slot: usize, queue: &mut SendQueue) -> bool {
        let chunks = std::mem::take(&mut self.chunks_written);
        self.copies[..chunks].iter_mut().for_each(|copy| queue.written(slot, copy.take()));
        chunks > 0
    }

    /// Nothing more is written. Returns the places of copies that are not reported, to be released.
    pub(super) fn take_copies(&mut self) -> [Option<CopyPlace>; 2 * MAX_FRAMES] {
        let mut copies = [const { None }; 2 * MAX_FRAMES];
        let mut places = copies.iter_mut();
        let mut keep = |copy: Option<CopyPlace>| {
            if copy.is_some()
                && let Some(place) = places.next()
            {
                *place = copy;
            }
        };
        self.chunks_written = 0;
        self.copies.iter_mut().for_each(|copy| keep(copy.take()));
        self.codec.clear(|payload| keep(payload.copy));
        copies
    }

    /// Encodes the frames that were added.
    fn encode(&mut self) {
        self.codec.encode(|payload| payload.buffer.checksum(0));
    }
}

impl SendFlow {
    /// Makes the worker, or a caller that polls, write.
    pub(super) fn wake_worker(&self) {
        self.is_woken.store(true, Ordering::Relaxed);
        self.registration.wake(&self.socket);
    }

    pub(super) fn shutdown(&self) {
        // Fails only if the peer was faster.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    pub(super) fn end(&self) {
        self.sender.base.ended(self.counters.bytes());
        self.registration.end(&self.socket);
        self.shutdown();
    }

    /// A caller writes, and does the work of the worker.
    pub(super) fn write_as_caller(&self, limit: u64) {
        self.writer.run(|writer| {
            let begin = Instant::now();
            if self.write_with(writer, limit) > 0 {
                self.sender.add_caller_work(begin.elapsed());
            }
        });
    }

    /// Writes about so many bytes at most, if there are as many.
    pub(super) fn write(&self, limit: u64) {
        self.writer.run(|writer| {
            self.write_with(writer, limit);
        });
    }

    /// Writes a frame that changes nothing and that the peer answers, unless there are frames to write anyway.
    pub(super) fn ping(&self) {
        self.writer.run(|mut writer| {
            if !writer.closed && writer.codec.is_empty() {
                writer.push(CutFrame::empty(Frame::FlowDead(NO_FLOW)));
                writer.encode();
                self.write_with(writer, 0);
            }
        });
    }

    /// Writes until the socket takes no more, nothing is left, or more than `limit` bytes are written. In the last case the
    /// owner of the polling continues. Returns the number of bytes written.
    fn write_with(&self, mut guard: MutexGuard<'_, WriteState>, limit: u64) -> u64 {
        let mut moved = 0;
        let error = loop {
            let writer = &mut *guard;
            if writer.closed || self.sender.base.failed() {
                return moved;
            }
            if !writer.half.is_flushed() {
                // Before the call: an event may come during it.
                self.is_full.store(true, Ordering::Relaxed);
                match writer.half.flush(&self.socket) {
                    Ok(()) => self.is_full.store(false, Ordering::Relaxed),
                    Err(error) if would_block(&error) => {
                        writer.flow.handle_full();
                        return moved;
                    }
                    Err(error) => break error,
                }
            }
            if writer.codec.is_empty() {
                self.take_frames(writer);
                if writer.codec.is_empty() {
                    return moved;
                }
                continue;
            }
            if moved > limit {
                self.wake_worker();
                return moved;
            }
            // Before the call: an event may come during it.
            self.is_full.store(true, Ordering::Relaxed);
            let frames = writer.codec.slices().map(|FrameSlice { header, payload, start, end }| {
                (header, payload.buffer.part(start, end - start))
            });
            match writer.half.send_frames(&self.socket, frames) {
                Ok(sent) => {
                    moved += sent as u64;
                    writer.flow.handle_written(sent as u64);
                    self.wrote(writer, sent);
                    if writer.is_blocked() {
                        writer.flow.handle_full();
                        return moved;
                    }
                    self.is_full.store(false, Ordering::Relaxed);
                }
                Err(error) if would_block(&error) => {
                    writer.flow.handle_full();
                    return moved;
                }
                Err(error) => break error,
            }
        };
        drop(guard);
        // The peer may have sent a reason.
        self.read_frames();
        self.sender.flow_failed(self, &error.to_string());
        moved
    }

    /// Accounts for written bytes.
    fn wrote(&self, writer: &mut WriteState, sent: usize) {
        let Written { chunks, bytes } = writer.wrote(sent);
        if chunks > 0 {
            self.counters.chunks(&self.sender.base.counters, chunks, bytes);
            self.sender.on_chunks_written(bytes);
        }
    }

    /// Fills the list of frames to write. It stays empty if there is nothing to send, or too much is in flight. In both
    /// cases the flow is called again later.
    fn take_frames(&self, writer: &mut WriteState) {
        let sender = &self.sender;
        let now = sender.epoch.elapsed();
        if writer.flow.begin(now) {
            sender.adapt(self);
        }
        let mut guard = lock(&sender.queue);
        if self.report_written(writer, &mut guard) {
            // The tick closes the connection; here the flow is locked.
            return;
        }
        let mut wait = None;
        let other = loop {
            let queue = &mut *guard;
            match writer.flow.poll_write(&self.situation(queue, now)) {
                WriteStep::Frame(frame) => writer.push(CutFrame::empty(frame)),
                WriteStep::Cut(limit) => break self.cut(writer, queue, limit),
                WriteStep::Ask(query) => {
                    drop(guard);
                    guard = self.ask(writer, now, query);
                }
                WriteStep::Wait(time) => {
                    wait = Some(time);
                    break queue.take_idle_for_work();
                }
                WriteStep::Idle => {
                    let is_idle = !queue.choice.is_retiring(self.slot);
                    queue.choice.set_idle(self.slot, is_idle);
                    // It may be the one that was woken for the work.
                    break queue.take_idle_for_work();
                }
            }
        };
        drop(guard);
        if let Some(time) = wait {
            self.registration.set_timer_by_callers(Instant::now() + time);
        }
        if let Some(other) = other {
            other.wake_worker();
        }
        // A checksum takes time, and the queue is not locked here. The messages stay in place while a flow writes them.
        writer.encode();
        let socket = self.socket.as_raw_fd();
        for Payload { buffer, event, .. } in writer.codec.payloads_mut() {
            let bytes = buffer.length();
            let describe = || ChunkDescription::Tcp { socket, is_sent: true, bytes };
            *event = ChunkEvent::begin(buffer.mark(), describe);
        }
    }

    /// Reports what was written. Returns whether that was the last of a closed connection.
    fn report_written(&self, writer: &mut WriteState, queue: &mut SendQueue) -> bool {
        let before = queue.requests;
        if !writer.report_written(self.slot, queue) {
            return false;
        }
        if queue.requests < before {
            self.sender.base.notify();
        }
        self.sender.complete_acked(queue)
    }

    fn situation<'a>(&self, queue: &'a SendQueue, now: Duration) -> WriteSituation<'a> {
        let sender = &self.sender;
        let is_alone = queue.choice.used() <= 1;
        WriteSituation {
            gate: &queue.gate,
            takes_messages: queue.takes_messages(self.slot),
            has_work: queue.scheduler.has_work() || queue.scheduler.has_static_share(self.slot),
            is_alone,
            // A flow without others is paced where the network is congested.
            is_paced: !is_alone || sender.lone_pacing().is_on(sender.epoch + now),
            max_chunk: sender.base.context.settings.chunk_bytes,
        }
    }

    /// Asks the kernel, without the queue's lock.
    fn ask(
        &self,
        writer: &mut WriteState,
        now: Duration,
        query: KernelQuery,
    ) -> MutexGuard<'_, SendQueue> {
        let sender = &self.sender;
        match query {
            KernelQuery::Unacknowledged => {
                writer.flow.handle_unacknowledged(sys::unacknowledged(&self.socket));
                lock(&sender.queue)
            }
            KernelQuery::Path => {
                let path = sys::path_info(&self.socket).ok();
                let mut queue = lock(&sender.queue);
                let shortest = path.map_or(Duration::ZERO, |path| {
                    queue.round_trips.note(now, self.slot, path.usual_round_trip)
                });
                if let Some(is_congested) = writer.flow.handle_path(now, path.as_ref(), shortest) {
                    sender.lone_pacing().sampled(sender.epoch + now, is_congested);
                }
                queue
            }
        }
    }

    /// Takes a chunk of at most `limit` bytes or small messages, if there are any. Returns a flow to wake for what is left.
    fn cut(&self, writer: &mut WriteState, queue: &mut SendQueue, limit: u64) -> Option<Arc<Self>> {
        let settings = &self.sender.base.context.settings;
        let (small, most) = (settings.caller_bytes, settings.chunk_bytes);
        let next = queue.cut(self.slot, limit).or_else(|| {
            let close = queue.lingering.as_ref().and_then(|_| {
                let below = queue.scheduler.next_message();
                writer.flow.poll_close(below)
            });
            close.map(CutFrame::empty)
        });
        queue.choice.set_idle(self.slot, next.is_none());
        let next = next?;
        let mut bytes = next.buffer.length() as u64;
        writer.push(next);
        if bytes > small {
            // Callers that do the work of workers write on idle flows themselves.
            let callers_lead = self.sender.callers_lead();
            return if callers_lead { None } else { queue.take_idle_for_work() };
        }
        // Small messages that wait already are added: a system call costs as much as a small message.
        let mut messages = 1;
        while !writer.codec.is_full()
            && bytes < BATCH_BYTES
            && queue.scheduler.next_unstarted_message().is_some_and(|length| length <= small)
            && let Some(next) = queue.cut(self.slot, small.min(most))
        {
            bytes += next.buffer.length() as u64;
            messages += 1;
            writer.push(next);
        }
        queue.deferral.handle_taken(self.slot, messages);
        None
    }

    /// Reads frames from the peer.
    fn read_frames(&self) {
        self.frame_reader.run(|frame_reader| self.read_frames_with(frame_reader));
    }

    pub(super) fn read_frames_with(&self, mut frame_reader: MutexGuard<'_, FrameReader>) {
        let sender = &self.sender;
        let ended = loop {
            let FrameReader { half, frames, have } = &mut *frame_reader;
            let room = frames.len() - *have;
            match half.read(&self.socket, &mut frames[*have..]) {
                Ok(0) => break "the peer closed it".to_owned(),
                Ok(received) => {
                    *have += received;
                    let full = received == room || half.has_failed();
                    match self.handle_frames(&mut frame_reader) {
                        Ok(()) => {}
                        Err(FrameFailure::Corrupt(what)) => {
                            sender.base.counters.corrupt.add(1);
                            break what;
                        }
                        Err(FrameFailure::Fatal(what)) => {
                            drop(frame_reader);
                            sender.fail(ErrorKind::Remote, &what);
                            return;
                        }
                    }
                    if !full && !self.has_ended.load(Ordering::Relaxed) {
                        return;
                    }
                }
                Err(error) if would_block(&error) => return,
                Err(error) => {
                    let is_forged = error.kind() == io::ErrorKind::InvalidData;
                    sender.base.counters.corrupt.add(is_forged.into());
                    break error.to_string();
                }
            }
        };
        drop(frame_reader);
        sender.flow_failed(self, &ended);
    }

    /// Handles the complete frames that were read.
    fn handle_frames(&self, frame_reader: &mut FrameReader) -> Result<(), FrameFailure> {
        let FrameReader { frames, have, .. } = frame_reader;
        let whole = *have - *have % FRAME_BYTES;
        let mut acked = None;
        for bytes in frames[..whole].chunks_exact(FRAME_BYTES) {
            let mut frame = [0; FRAME_BYTES];
            frame.copy_from_slice(bytes);
            let (frame, _) = self.sender.base.decode(&frame).map_err(|error| match error {
                FrameError::Checksum => FrameFailure::Corrupt(error.to_string()),
                error => FrameFailure::Fatal(format!("protocol error: {error}")),
            })?;
            match frame {
                Frame::Ack(below, unposted) => {
                    acked = acked.max(Some(below));
                    self.sender.base.waits.peer_says(unposted);
                }
                Frame::FlowDead(number) => self.sender.on_flow_dead(number),
                Frame::TagsDifferFrom(from) => self.sender.on_tags_differ(from),
                Frame::BufferTag(number, tag) => self.sender.on_buffer_tag(number, tag)?,
                Frame::Close(_) => {
                    if let Some(below) = acked {
                        self.sender.on_ack(below)?;
                    }
                    return Err("the peer closed the connection".to_owned().into());
                }
                Frame::Chunk(_) | Frame::Tag(_) | Frame::SameTagBelow(_) => {
                    return Err("protocol error: the receiver sent data".to_owned().into());
                }
            }
        }
        frames.copy_within(whole..*have, 0);
        *have -= whole;
        acked.map_or(Ok(()), |below| Ok(self.sender.on_ack(below)?))
    }
}

impl Source for SendFlow {
    fn ready(&self, readiness: Readiness) {
        if readiness.ended {
            self.has_ended.store(true, Ordering::Relaxed);
        }
        if readiness.readable || readiness.ended {
            self.read_frames();
        }
        // A timer, or a wish of another thread, or room: an event for bytes to read says too that there is room.
        let is_woken = self.is_woken.swap(false, Ordering::Relaxed);
        let has_room = readiness.writable && self.is_full.load(Ordering::Relaxed);
        if is_woken || has_room || !readiness.readable {
            self.write(WORKER_QUANTUM);
        }
    }

    fn abandoned(&self, why: &str) {
        self.sender.fail(ErrorKind::Internal, why);
    }
}
