//! The messages of a sending connection, and the flows that may take them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use evenkeel_protocol::{
    AdvertisedTags, ChunkHeader, Deferral, FlowChoice, Frame, NextFrame, RoundTrips, Scheduler,
    TagGate,
};

use crate::connection::request::Operation;
use crate::memory::buffers::SendBuffer;
use crate::runtime::reactor::Linger;
use crate::tcp::retransmit_buffer::{CopyPlace, RetransmitBuffer};
use crate::tcp::send_flow::SendFlow;

/// Guarded by the lock of its connection.
pub(crate) struct SendQueue {
    pub(crate) scheduler: Scheduler<Outgoing>,
    pub(super) gate: TagGate,
    /// Buffers that the peer has advertised.
    pub(super) advertised_tags: AdvertisedTags,
    /// By slot.
    pub(super) flows: Vec<Option<Arc<SendFlow>>>,
    pub(super) choice: FlowChoice,
    pub(super) deferral: Deferral,
    /// There is a timer that ends a deferral.
    pub(super) has_timer: bool,
    pub(super) round_trips: RoundTrips,
    /// Bytes carried at the last tick, if there was something to send.
    pub(super) carried: Option<u64>,
    /// Messages whose requests are not done.
    pub(super) requests: usize,
    pub(super) retransmit_buffer: RetransmitBuffer,
    /// Small messages that are written, and for which the retransmit buffer had no room.
    pub(super) uncopied: VecDeque<u64>,
    /// No flow may be added any more.
    pub(super) closed: bool,
    /// The owner has closed the connection, which still delivers messages whose requests are done.
    pub(super) lingering: Option<(Linger, Instant)>,
}

/// A message that the peer does not have yet.
pub(crate) struct Outgoing {
    pub(super) buffer: SendBuffer,
    pub(super) request: SendCompletion,
}

/// A frame for a flow.
pub(super) struct CutFrame {
    pub(super) frame: Frame,
    /// The payload; empty if it is no chunk.
    pub(super) buffer: SendBuffer,
    /// Where the payload is copied once it is written.
    pub(super) copy: Option<CopyPlace>,
}

impl CutFrame {
    pub(super) fn empty(frame: Frame) -> Self {
        Self { frame, buffer: SendBuffer::from_static(&[]), copy: None }
    }
}

/// What is completed when the peer has a message.
pub(super) enum SendCompletion {
    /// The request, which is done when the buffer is not needed any more.
    Pending(Arc<Operation>),
    /// Nothing: the request is done, and the buffer is this copy.
    Copied(CopyPlace),
}

impl SendQueue {
    /// Takes out an idle flow that may have work.
    pub(super) fn take_idle(&mut self) -> Option<Arc<SendFlow>> {
        let slot = self.choice.take_idle(self.needs_all_flows())?;
        self.flows.get(slot)?.clone()
    }

    /// The same, if there is work left that no flow takes now.
    pub(super) fn take_idle_for_work(&mut self) -> Option<Arc<SendFlow>> {
        if self.scheduler.has_work() { self.take_idle() } else { None }
    }

    /// Whether the flow in this slot may have work.
    pub(super) fn takes_messages(&self, slot: usize) -> bool {
        self.choice.takes_messages(slot, self.needs_all_flows())
    }

    /// Retransmissions cannot use every flow, and all flows send a close frame.
    fn needs_all_flows(&self) -> bool {
        self.scheduler.must_retransmit() || self.lingering.is_some()
    }

    /// Makes a change that decides which flows are used. It gets the bytes that the flow in a slot has carried. Returns flows to
    /// wake for waiting work.
    #[must_use]
    pub(super) fn choose(
        &mut self,
        change: impl FnOnce(&mut FlowChoice, &dyn Fn(usize) -> u64) -> bool,
    ) -> Vec<Arc<SendFlow>> {
        let flow = |slot: usize| self.flows.get(slot).and_then(Option::as_ref);
        let carried = |slot| flow(slot).map_or(0, |flow| flow.counters.bytes());
        let is_changed = change(&mut self.choice, &carried);
        if !is_changed || !self.scheduler.has_work() {
            return Vec::new();
        }
        std::iter::from_fn(|| self.take_idle()).collect()
    }

    /// The next frame of the scheduler for the flow in this slot, in chunks of at most `limit` bytes. A small message that is one
    /// chunk gets a place for its copy, if there is room.
    pub(super) fn cut(&mut self, slot: usize, limit: u64) -> Option<CutFrame> {
        Some(match self.scheduler.next(slot, limit)? {
            NextFrame::Chunk(header, Outgoing { buffer, request }) => {
                let ChunkHeader { offset, length, total, ack_wanted, .. } = header;
                let is_whole = u64::from(length) == total;
                let is_pending = matches!(request, SendCompletion::Pending(_));
                let copy = match is_whole && is_pending && !ack_wanted {
                    true => self.retransmit_buffer.reserve(length as usize),
                    false => None,
                };
                let buffer = buffer.part(offset as usize, length as usize);
                CutFrame { frame: Frame::Chunk(header), buffer, copy }
            }
            NextFrame::FlowDead(number) => CutFrame::empty(Frame::FlowDead(number)),
        })
    }

    /// The flow in this slot has written its chunk, and has copied it if that has a place. The request of a message that is copied is
    /// done.
    pub(super) fn written(&mut self, slot: usize, copy: Option<CopyPlace>) {
        let written = self.scheduler.chunk_written(slot);
        if let Some(copy) = copy {
            self.keep_copy(written, copy);
        }
        if let Some(message) = written
            && !self.copy_message(message)
        {
            self.uncopied.push_back(message);
        }
    }

    /// Copies a small message that had no place before it was written, or was written in parts. Not if there is no room now, or a
    /// flow is writing it again. True if it is copied already.
    pub(super) fn copy_message(&mut self, message: u64) -> bool {
        let Some(outgoing) = self.scheduler.payload_mut(message) else { return false };
        if matches!(outgoing.request, SendCompletion::Pending(_)) {
            let buffer = outgoing.buffer;
            let Some(copy) = self.retransmit_buffer.reserve(buffer.length()) else { return false };
            copy.fill(buffer);
            self.keep_copy(Some(message), copy);
        }
        true
    }

    /// This is the copy of a message that is written: its request is done. If it is not, or is written again, the copy is not used.
    fn keep_copy(&mut self, message: Option<u64>, copy: CopyPlace) {
        let outgoing = message.and_then(|message| self.scheduler.payload_mut(message));
        if let Some(Outgoing { buffer, request }) = outgoing
            && let SendCompletion::Pending(operation) = request
        {
            operation.complete(buffer.length() as u64);
            *buffer = copy.message();
            *request = SendCompletion::Copied(copy);
            self.requests -= 1;
        } else {
            self.retransmit_buffer.release(copy);
        }
    }

    /// Removes a flow. Returns those to wake for waiting work.
    #[must_use]
    pub(super) fn remove(&mut self, flow: &SendFlow) -> Vec<Arc<SendFlow>> {
        // Not there if the connection was closed in between.
        if let Some(slot) = self.flows.get_mut(flow.slot) {
            *slot = None;
        }
        self.deferral.handle_ended(flow.slot);
        self.choose(|choice, carried| choice.handle_ended(flow.slot, carried))
    }
}
