//! One TCP connection (flow) of a sending connection: writes chunks, reads acknowledgements.

use std::io;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use evenkeel_protocol::{
    FRAME_BYTES, Frame, FrameError, FrameSlice, MAX_FRAMES, Pacer, PathInfo, Progress, SendCodec,
    TagGate, Written,
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
    /// A close frame was sent.
    pub(super) close_sent: bool,
    /// The common tag was sent.
    tag_sent: bool,
    /// The number below which messages have it was sent.
    same_tag_below_sent: bool,
    pace: Pacer,
    /// Upper bound of unacknowledged bytes: those of the last query, and those written since. Of a flow that is not paced, only
    /// those written since its last sample: that is enough to know whether another is due.
    outstanding: u64,
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
            close_sent: false,
            tag_sent: false,
            same_tag_below_sent: false,
            pace,
            outstanding: 0,
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

    /// A frame about tags that must be written on this flow before any further chunk.
    fn next_tag_frame(&mut self, gate: &TagGate) -> Option<Frame> {
        if !self.tag_sent
            && let Some(tag) = gate.tag()
        {
            self.tag_sent = true;
            // On a flow without a tag frame, the peer assumes the tag 0.
            if tag != 0 {
                return Some(Frame::Tag(tag));
            }
        }
        if !self.same_tag_below_sent
            && let Some(until) = gate.same_tag_below()
        {
            self.same_tag_below_sent = true;
            return Some(Frame::SameTagBelow(until));
        }
        None
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
                        writer.pace.set_full();
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
                    writer.outstanding += sent as u64;
                    self.wrote(writer, sent);
                    if writer.is_blocked() {
                        writer.pace.set_full();
                        return moved;
                    }
                    self.is_full.store(false, Ordering::Relaxed);
                }
                Err(error) if would_block(&error) => {
                    writer.pace.set_full();
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
        let Some(next) = self.next_frame(writer) else { return };
        let settings = &self.sender.base.context.settings;
        let (small, most) = (settings.caller_bytes, settings.chunk_bytes);
        let mut bytes = next.buffer.length() as u64;
        writer.push(next);
        if bytes <= small {
            // Small messages that wait already are added: a system call costs as much as a small message.
            let mut queue = lock(&self.sender.queue);
            while !writer.codec.is_full()
                && bytes < BATCH_BYTES
                && queue.scheduler.next_unstarted_message().is_some_and(|length| length <= small)
                && let Some(next) = queue.cut(self.slot, small.min(most))
            {
                bytes += next.buffer.length() as u64;
                writer.push(next);
            }
            queue.deferral.handle_taken(self.slot, writer.codec.len());
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

    /// The next frame to write, if there is one and it may be sent.
    fn next_frame(&self, writer: &mut WriteState) -> Option<CutFrame> {
        let sender = &self.sender;
        let now = sender.epoch.elapsed();
        let sample_due = writer.pace.sample_due(now);
        if sample_due {
            writer.pace.postpone_sample(now);
            sender.adapt(self);
        }
        let mut guard = lock(&sender.queue);
        let queue = &mut *guard;
        let mut over = false;
        let before = queue.requests;
        if writer.report_written(self.slot, queue) {
            if queue.requests < before {
                self.sender.base.notify();
            }
            over = sender.complete_acked(queue);
        }
        if over {
            // The tick closes the connection; here the flow is locked.
            return None;
        }
        if let Some(frame) = writer.next_tag_frame(&queue.gate) {
            queue.choice.set_idle(self.slot, false);
            return Some(CutFrame::empty(frame));
        }
        if !queue.takes_messages(self.slot) {
            let is_idle = !queue.choice.is_retiring(self.slot);
            queue.choice.set_idle(self.slot, is_idle);
            // It may be the one that was woken for the work.
            Self::pass_work_on(guard);
            return None;
        }
        let work = queue.scheduler.has_work() || queue.scheduler.has_static_share(self.slot);
        let mut limit = sender.base.context.settings.chunk_bytes;
        // Pacing leaves bytes to flows that deliver them earlier. A flow without others is paced where the network is
        // congested.
        if work {
            let is_alone = queue.choice.used() <= 1;
            drop(guard);
            if !is_alone || sender.lone_pacing().is_on(sender.epoch + now) {
                writer.pace.set_alone(is_alone);
                let Some(bytes) = self.pace(writer, now, sample_due, limit) else {
                    Self::pass_work_on(lock(&sender.queue));
                    return None;
                };
                limit = bytes;
            } else if sample_due && writer.pace.is_backlogged(writer.outstanding) {
                self.sample(writer, now);
                writer.outstanding = 0;
            }
            guard = lock(&sender.queue);
        }
        let queue = &mut *guard;
        let next = queue.cut(self.slot, limit).or_else(|| {
            let close = queue.lingering.is_some() && !writer.close_sent;
            writer.close_sent |= close;
            let below = queue.scheduler.next_message();
            close.then(|| CutFrame::empty(Frame::Close(below)))
        });
        queue.choice.set_idle(self.slot, next.is_none());
        let is_small = |payload: &SendBuffer| {
            payload.length() as u64 <= sender.base.context.settings.caller_bytes
        };
        // It takes small messages that wait together with a small one.
        if next.as_ref().is_some_and(|next| !is_small(&next.buffer)) && !sender.callers_lead() {
            Self::pass_work_on(guard);
        }
        next
    }

    /// Wakes an idle flow if there is work left that the present one does not take now.
    fn pass_work_on(mut guard: MutexGuard<'_, SendQueue>) {
        let queue = &mut *guard;
        let other = if queue.scheduler.has_work() { queue.take_idle() } else { None };
        drop(guard);
        if let Some(other) = other {
            other.wake_worker();
        }
    }

    /// How many bytes the flow may take at once, at most `limit`. `None`, and a timer is set, if too many are in flight.
    fn pace(
        &self,
        writer: &mut WriteState,
        now: Duration,
        sample_due: bool,
        limit: u64,
    ) -> Option<u64> {
        let mut most = writer.pace.max_outstanding();
        let mut is_exact = false;
        if writer.outstanding > most {
            writer.outstanding = sys::unacknowledged(&self.socket);
            is_exact = true;
        }
        if sample_due && self.sample(writer, now) {
            most = writer.pace.max_outstanding();
            if !is_exact && writer.outstanding > most {
                writer.outstanding = sys::unacknowledged(&self.socket);
            }
        }
        if writer.outstanding > most {
            let wait = writer.pace.wait(writer.outstanding);
            self.registration.set_timer_by_callers(Instant::now() + wait);
            return None;
        }
        Some(writer.pace.chunk(limit))
    }

    /// Notes the flow's round trip, and tells the pacer how far the flow is. False if the pacer knows no more than before.
    fn sample(&self, writer: &mut WriteState, now: Duration) -> bool {
        let Ok(info) = sys::path_info(&self.socket) else { return false };
        let PathInfo { acked, busy, round_trip, usual_round_trip, retransmitted, .. } = info;
        let shortest_round_trip =
            lock(&self.sender.queue).round_trips.note(now, self.slot, usual_round_trip);
        if !writer.pace.is_backlogged(writer.outstanding) {
            // It delivers all that it takes. Others are compared with that.
            return false;
        }
        let progress = Progress {
            acked,
            busy,
            round_trip,
            usual_round_trip,
            shortest_round_trip,
            retransmitted,
        };
        let is_congested = writer.pace.sample(now, progress);
        self.sender.lone_pacing().sampled(self.sender.epoch + now, is_congested);
        true
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
