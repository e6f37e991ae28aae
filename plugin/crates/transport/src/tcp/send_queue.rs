//! The messages of a sending connection, and the flows that may take them.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use evenkeel_protocol::{
    AdvertisedTags, ChunkHeader, Frame, NextFrame, RoundTrips, Scheduler, TagGate,
};

use crate::connection::request::Operation;
use crate::memory::buffers::SendBuffer;
use crate::runtime::reactor::Linger;
use crate::tcp::retransmit_buffer::{CopyPlace, RetransmitBuffer};

/// What the queue needs of a flow.
pub(crate) trait QueuedFlow {
    fn slot(&self) -> usize;
    /// Bytes that it has carried.
    fn bytes(&self) -> u64;
    /// Whether it takes no more chunks.
    fn is_retiring(&self) -> bool;
}

/// Guarded by the lock of its connection, whose flows are of type `F`.
pub(crate) struct SendQueue<F> {
    pub(crate) scheduler: Scheduler<Outgoing>,
    pub(super) gate: TagGate,
    /// Buffers that the peer has advertised.
    pub(super) advertised_tags: AdvertisedTags,
    /// By slot.
    pub(crate) flows: Vec<Option<Arc<F>>>,
    /// Flows (as bits) that can take bytes and found nothing to send. A thread that queues a message removes bits and wakes
    /// those flows.
    pub(super) idle: u128,
    /// Flows (as bits) that take messages. The others only take retransmissions.
    pub(super) used: u128,
    /// Number of flows that take messages, and its maximum.
    pub(super) flow_count: usize,
    pub(super) max_flows: usize,
    /// After a tick without progress and answers, all flows are used until this time.
    pub(super) all_flows_until: Option<Instant>,
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

impl<F: QueuedFlow> SendQueue<F> {
    /// Takes out an idle flow that may have work.
    pub(super) fn take_idle(&mut self) -> Option<Arc<F>> {
        let idle = self.idle & self.wanted();
        let slot = (idle != 0).then(|| idle.trailing_zeros() as usize)?;
        self.idle &= !(1 << slot);
        self.flows[slot].clone()
    }

    /// The flows (as bits) that may have work. Retransmissions cannot use every flow, and all flows send a close frame.
    pub(super) fn wanted(&self) -> u128 {
        let all = self.scheduler.must_retransmit() || self.lingering.is_some();
        if all { u128::MAX } else { self.used }
    }

    /// Chooses the flows to use: all, or those that have carried most. Returns those to wake for waiting work.
    #[must_use]
    pub(super) fn choose_flows(&mut self) -> Vec<Arc<F>> {
        let live = self.flows.iter().flatten();
        let mut live: Vec<_> = live.filter(|flow| !flow.is_retiring()).collect();
        if self.flow_count < self.max_flows {
            live.sort_by_key(|flow| Reverse(flow.bytes()));
            live.truncate(self.flow_count);
        }
        self.used = live.iter().fold(0, |used, flow| used | 1 << flow.slot());
        let work = self.scheduler.has_work();
        std::iter::from_fn(|| if work { self.take_idle() } else { None }).collect()
    }

    /// Uses this number of flows from now on. Returns those to wake for waiting work.
    #[must_use]
    pub(super) fn set_flow_count(&mut self, flow_count: usize) -> Vec<Arc<F>> {
        if std::mem::replace(&mut self.flow_count, flow_count) == flow_count {
            return Vec::new();
        }
        self.choose_flows()
    }

    /// Whether the flow in this slot adapts the number of flows.
    pub(super) fn is_leader(&self, slot: usize) -> bool {
        self.used.trailing_zeros() as usize == slot
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
    pub(super) fn remove(&mut self, flow: &F) -> Vec<Arc<F>> {
        // Not there if the connection was closed in between.
        if let Some(slot) = self.flows.get_mut(flow.slot()) {
            *slot = None;
        }
        self.idle &= !(1 << flow.slot());
        self.choose_flows()
    }
}
