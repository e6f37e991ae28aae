//! One TCP connection (flow) of a sending connection: writes chunks, reads acknowledgements.

use std::collections::VecDeque;
use std::io::Read;
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

use evenkeel_protocol::{
    ChunkHeader, FRAME_BYTES, FlowStats, Frame, FrameError, NextFrame, Pacer, Progress,
};
use socket2::Socket;

use crate::connection::base::{WORKER_QUANTUM, would_block};
use crate::connection::tag_matching::TagGate;
use crate::error::ErrorKind;
use crate::memory::buffers::SendBuffer;
use crate::runtime::caller_polling::PollOwner;
use crate::runtime::reactor::{Readiness, Registration, Source};
use crate::runtime::work_lock::WorkLock;
use crate::sync::lock;
use crate::sys::{self, MAX_FRAMES};
use crate::tcp::sender::{SendQueue, TcpSender};
use crate::telemetry::counters::FlowCounters;

/// Most bytes that a caller writes at a time.
const CALLER_BYTES: u64 = 128 << 10;

/// Bytes of small messages that are enough for one system call.
const BATCH_BYTES: u64 = 64 << 10;

/// So many small messages are written at once after one that was left to the caller's next visit was alone then.
const IMMEDIATE_WRITES: u32 = 64;

/// One TCP connection of a connection.
pub(crate) struct SendFlow {
    pub(super) sender: Arc<TcpSender>,
    pub(crate) number: u32,
    pub(crate) slot: usize,
    pub(crate) socket: Socket,
    pub(super) registration: Registration,
    pub(crate) counters: FlowCounters,
    /// It is to take no more chunks.
    pub(crate) retiring: AtomicBool,
    /// Its socket did not take all it had.
    pub(super) is_full: AtomicBool,
    /// Held while the socket is written to.
    pub(super) writer: WorkLock<WriteState>,
    /// Held while the socket is read from.
    pub(super) frame_reader: WorkLock<FrameReader>,
}

pub(super) struct WriteState {
    /// Nothing may be written any more.
    pub(super) closed: bool,
    /// What is to be written now, in this order; some of the first may be written. At most [`MAX_FRAMES`].
    pub(super) frames: VecDeque<PartlyWritten>,
    /// So many chunks have been written that the scheduler does not know of.
    pub(super) chunks_written: usize,
    /// The peer knows that no more messages come.
    pub(super) close_sent: bool,
    /// The peer knows what tag messages have.
    tag_sent: bool,
    /// The peer knows up to which message they all do.
    same_tag_below_sent: bool,
    pace: Pacer,
    /// Most bytes that can be outstanding: what there was when it was last asked, and what has
    /// been written since.
    outstanding: u64,
    poll_owner: PollOwner,
    /// So many small messages are written at once before a caller who attends leaves one to its next visit again.
    at_once: u32,
}

pub(super) struct PartlyWritten {
    frame: Frame,
    encoded: [u8; FRAME_BYTES],
    payload: SendBuffer,
    /// Bytes written of frame and payload together.
    pub(super) written: usize,
}

impl PartlyWritten {
    /// Nothing of it is written or encoded.
    pub(super) fn new((frame, payload): (Frame, SendBuffer)) -> Self {
        Self { frame, encoded: [0; FRAME_BYTES], payload, written: 0 }
    }

    /// What is not written yet of the frame and of its payload.
    fn rest(&self) -> (&[u8], SendBuffer) {
        let header = &self.encoded[self.written.min(FRAME_BYTES)..];
        let offset = self.written.saturating_sub(FRAME_BYTES);
        (header, self.payload.part(offset, self.payload.length() - offset))
    }
}

/// Why what a peer said cannot be acted on.
enum FrameFailure {
    /// It changed on its way: another flow may do better.
    Corrupt(String),
    /// The connection cannot go on.
    Fatal(String),
}

impl From<String> for FrameFailure {
    fn from(what: String) -> Self {
        Self::Fatal(what)
    }
}

pub(super) struct FrameReader {
    pub(super) frames: [u8; 8 * FRAME_BYTES],
    pub(super) have: usize,
}

impl WriteState {
    pub(super) fn new(slot: usize, pace: Pacer) -> Self {
        Self {
            closed: false,
            frames: VecDeque::with_capacity(MAX_FRAMES),
            chunks_written: 0,
            close_sent: false,
            tag_sent: false,
            same_tag_below_sent: false,
            pace,
            outstanding: 0,
            poll_owner: PollOwner::new(slot),
            at_once: 0,
        }
    }

    /// What the peer has to hear on this flow of the messages' tags before it hears of any that is cut from now on.
    fn next_tag_frame(&mut self, gate: &TagGate) -> Option<Frame> {
        if !self.tag_sent
            && let Some(tag) = gate.tag()
        {
            self.tag_sent = true;
            // The peer takes a flow that says nothing for one whose messages have the tag 0.
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
    /// Lets the flow's worker have a look at it.
    pub(super) fn wake_worker(&self) {
        self.registration.wake(&self.socket);
    }

    /// What it has done so far.
    pub(crate) fn carried(&self) -> FlowStats {
        let busy = sys::path_info(&self.socket).unwrap_or_default().busy;
        FlowStats { flow: self.number, bytes: self.counters.bytes(), busy }
    }

    /// No caller attends it any more.
    pub(super) fn release_caller(&self, writer: &mut WriteState) {
        writer.poll_owner.release(&self.sender.hot_flow, &self.registration, &self.socket);
    }

    pub(super) fn shutdown(&self) {
        // Fails only when the peer was faster.
        let _ = self.socket.shutdown(Shutdown::Both);
    }

    pub(super) fn end(&self) {
        self.sender.base.ended(self.counters.bytes());
        self.registration.end(&self.socket);
        self.shutdown();
    }

    /// A caller is here, and writes if it is the one who does, or in place of somebody who has come meanwhile.
    pub(super) fn on_caller_poll(&self) {
        self.writer.try_run(|mut writer, asked| {
            if !writer.closed {
                let hot_flow = &self.sender.hot_flow;
                writer.poll_owner.on_caller_poll(hot_flow, &self.registration, &self.socket);
            }
            if asked || writer.poll_owner.is_caller() {
                self.write_as_caller(writer);
            }
        });
    }

    /// There is something to write, and callers come here.
    pub(super) fn start(&self) {
        self.writer.run(|writer| {
            if writer.poll_owner.is_caller() {
                self.write_as_caller(writer);
            } else {
                self.wake_worker();
            }
        });
    }

    fn write_as_caller(&self, writer: MutexGuard<'_, WriteState>) {
        let begin = Instant::now();
        if self.write_with(writer, CALLER_BYTES) > 0 {
            self.sender.destination.workers.add_caller_work(begin.elapsed());
        }
    }

    /// There is a small message to write. `batched`: a caller who attends writes it at its next visit, with what it adds until
    /// then, if it does add to it.
    pub(super) fn write_small(&self, limit: u64, batched: bool) {
        self.writer.run(|mut writer| {
            if batched && !writer.closed {
                let hot_flow = &self.sender.hot_flow;
                writer.poll_owner.on_caller_poll(hot_flow, &self.registration, &self.socket);
                if writer.poll_owner.is_caller() {
                    if writer.at_once <= 1 {
                        writer.at_once = 0;
                        return;
                    }
                    writer.at_once -= 1;
                }
            }
            self.write_with(writer, limit);
        });
    }

    /// Writes until the socket takes no more, nothing is left, or more than `limit` bytes are
    /// written; in the last case the worker goes on, or the caller who attends. Returns how many bytes it has written.
    fn write_with(&self, mut guard: MutexGuard<'_, WriteState>, limit: u64) -> u64 {
        guard.poll_owner.renew(&self.registration);
        let mut moved = 0;
        let error = loop {
            let writer = &mut *guard;
            if writer.closed || self.sender.base.failed() {
                return moved;
            }
            if writer.frames.is_empty() {
                self.is_full.store(false, Ordering::Relaxed);
                self.take_frames(writer);
                if writer.frames.is_empty() {
                    return moved;
                }
                continue;
            }
            if moved > limit {
                // A caller who attends comes again.
                if !writer.poll_owner.is_caller() {
                    self.wake_worker();
                }
                return moved;
            }
            match sys::send_frames(&self.socket, writer.frames.iter().map(PartlyWritten::rest)) {
                Ok(sent) => {
                    moved += sent as u64;
                    writer.outstanding += sent as u64;
                    self.wrote(writer, sent);
                }
                Err(error) if would_block(&error) => {
                    self.is_full.store(true, Ordering::Relaxed);
                    return moved;
                }
                Err(error) => break error,
            }
        };
        drop(guard);
        // The peer may have said why.
        self.read_frames();
        self.sender.flow_failed(self, &error.to_string());
        moved
    }

    /// So many bytes have been written of the frames.
    fn wrote(&self, writer: &mut WriteState, mut sent: usize) {
        while sent > 0
            && let Some(frame) = writer.frames.front_mut()
        {
            let whole = FRAME_BYTES + frame.payload.length();
            let part = sent.min(whole - frame.written);
            frame.written += part;
            sent -= part;
            if frame.written < whole {
                return;
            }
            if let Frame::Chunk(ChunkHeader { length, .. }) = frame.frame {
                self.counters.chunk(&self.sender.base.counters, length.into());
                self.sender.flow_count.carried(length.into());
                writer.chunks_written += 1;
            }
            writer.frames.pop_front();
        }
    }

    /// Takes what to write next. Nothing: there is nothing, or too much is on its way; in both cases
    /// somebody will see to it that this is asked again.
    fn take_frames(&self, writer: &mut WriteState) {
        let Some(first) = self.next_frame(writer) else { return };
        let settings = &self.sender.base.context.settings;
        let (small, most) = (settings.caller_bytes, settings.chunk_bytes);
        let mut bytes = first.1.length() as u64;
        writer.frames.push_back(PartlyWritten::new(first));
        if bytes <= small {
            // What is small and there already goes with it: a system call costs as much as a small message.
            let mut queue = lock(&self.sender.queue);
            while writer.frames.len() < MAX_FRAMES
                && bytes < BATCH_BYTES
                && queue.scheduler.next_unstarted_message().is_some_and(|length| length <= small)
                && let Some(frame) = self.cut(&mut queue, small.min(most))
            {
                bytes += frame.1.length() as u64;
                writer.frames.push_back(PartlyWritten::new(frame));
            }
            if writer.frames.len() == 1 && writer.at_once == 0 {
                writer.at_once = IMMEDIATE_WRITES;
            }
        }
        // A checksum takes its time. The messages stay as they are while a flow writes them.
        for frame in &mut writer.frames {
            frame.encoded = self.sender.base.encode_with(frame.frame, frame.payload);
        }
    }

    /// What to write next, if there is something and it may go.
    fn next_frame(&self, writer: &mut WriteState) -> Option<(Frame, SendBuffer)> {
        let sender = &self.sender;
        let now = sender.epoch.elapsed();
        let look = writer.pace.sample_due(now);
        if look && let Ok(info) = sys::path_info(&self.socket) {
            let sys::PathInfo { acked, busy, round_trip, .. } = info;
            writer.pace.sample(now, Progress { acked, busy, round_trip });
        }
        let most = writer.pace.max_outstanding();
        if writer.outstanding > most {
            writer.outstanding = sys::unacknowledged(&self.socket);
        }
        let limit = writer.pace.chunk(sender.base.context.settings.chunk_bytes);
        if look {
            sender.adapt(self);
        }
        let mut guard = lock(&sender.queue);
        let queue = &mut *guard;
        let mut over = false;
        let written = std::mem::take(&mut writer.chunks_written);
        if written > 0 {
            let before = queue.requests;
            (0..written).for_each(|_| queue.written(self.slot));
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
            queue.idle &= !(1 << self.slot);
            return Some((frame, SendBuffer::from_static(&[])));
        }
        let retiring = self.retiring.load(Ordering::Relaxed);
        if retiring || queue.wanted() & 1 << self.slot == 0 {
            if !retiring {
                queue.idle |= 1 << self.slot;
            }
            // It may be the one that was told of the work.
            let other = if queue.scheduler.has_work() { queue.take_idle() } else { None };
            drop(guard);
            if let Some(other) = other {
                other.wake_worker();
            }
            return None;
        }
        let work = queue.scheduler.has_work() || queue.scheduler.has_static_share(self.slot);
        if writer.outstanding > most && work {
            drop(guard);
            let wait = writer.pace.wait(writer.outstanding);
            self.registration.set_timer(Instant::now() + wait);
            return None;
        }
        let next = self.cut(queue, limit).or_else(|| {
            let close = queue.lingering.is_some() && !writer.close_sent;
            writer.close_sent |= close;
            close.then(|| (Frame::Close, SendBuffer::from_static(&[])))
        });
        match next {
            Some(_) => queue.idle &= !(1 << self.slot),
            None => queue.idle |= 1 << self.slot,
        }
        next
    }

    /// What the scheduler has for this flow, in chunks of so many bytes at most.
    fn cut(&self, queue: &mut SendQueue, limit: u64) -> Option<(Frame, SendBuffer)> {
        match queue.scheduler.next(self.slot, limit)? {
            NextFrame::Chunk(header, outgoing) => {
                self.sender.hot_flow.on_chunk(self.slot);
                let ChunkHeader { offset, length, .. } = header;
                let payload = outgoing.buffer.part(offset as usize, length as usize);
                Some((Frame::Chunk(header), payload))
            }
            NextFrame::FlowDead(number) => {
                Some((Frame::FlowDead(number), SendBuffer::from_static(&[])))
            }
        }
    }

    /// Reads what the peer says.
    fn read_frames(&self) {
        self.frame_reader.run(|frame_reader| self.read_frames_with(frame_reader));
    }

    pub(super) fn read_frames_with(&self, mut frame_reader: MutexGuard<'_, FrameReader>) {
        let sender = &self.sender;
        let ended = loop {
            let FrameReader { frames, have } = &mut *frame_reader;
            let room = frames.len() - *have;
            match sys::uninterrupted(|| (&self.socket).read(&mut frames[*have..])) {
                Ok(0) => break "the peer closed it".to_owned(),
                Ok(received) => {
                    *have += received;
                    let full = received == room;
                    match self.handle_frames(&mut frame_reader) {
                        Ok(()) => {}
                        Err(FrameFailure::Corrupt(what)) => break what,
                        Err(FrameFailure::Fatal(what)) => {
                            drop(frame_reader);
                            sender.fail(ErrorKind::Remote, &what);
                            return;
                        }
                    }
                    if !full {
                        return;
                    }
                }
                Err(error) if would_block(&error) => return,
                Err(error) => break error.to_string(),
            }
        };
        drop(frame_reader);
        sender.flow_failed(self, &ended);
    }

    /// Acts on the whole frames that were read; the text says what is wrong with one.
    fn handle_frames(&self, frame_reader: &mut FrameReader) -> Result<(), FrameFailure> {
        let FrameReader { frames, have } = frame_reader;
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
                Frame::Ack(below) => acked = acked.max(Some(below)),
                Frame::FlowDead(number) => self.sender.on_flow_dead(number),
                Frame::TagsDifferFrom(from) => self.sender.on_tags_differ(from),
                Frame::BufferTag(number, tag) => self.sender.on_buffer_tag(number, tag)?,
                Frame::Close => {
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
        if readiness.readable || readiness.ended {
            self.read_frames();
        }
        if readiness.writable {
            self.writer.run(|mut writer| {
                let hot_flow = &self.sender.hot_flow;
                writer.poll_owner.on_worker(hot_flow, &self.registration, &self.socket);
                if !writer.poll_owner.is_caller() {
                    self.write_with(writer, WORKER_QUANTUM);
                }
            });
        }
    }

    fn has_deadlines(&self) -> bool {
        false
    }

    fn abandoned(&self, why: &str) {
        self.sender.fail(ErrorKind::Internal, why);
    }
}
