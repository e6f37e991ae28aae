//! The messages of a sending connection, and the flows that may take them.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use evenkeel_protocol::{AdvertisedTags, CopyId, RoundTrips, Scheduler, TagGate};

use crate::connection::request::Operation;
use crate::memory::buffers::SendBuffer;
use crate::runtime::reactor::Linger;
use crate::tcp::retransmit_buffer::RetransmitBuffer;

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

/// What is completed when the peer has a message.
pub(super) enum SendCompletion {
    /// The request, which is done when the buffer is not needed any more.
    Pending(Arc<Operation>),
    /// Nothing: the request is done, and the buffer is a copy.
    Copied(CopyId),
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

    /// The flow in this slot has written its chunk. A small message that is written is copied, and its request is done.
    pub(super) fn written(&mut self, slot: usize) {
        if let Some(message) = self.scheduler.chunk_written(slot)
            && !self.copy_message(message)
        {
            self.uncopied.push_back(message);
        }
    }

    /// Copies a small message, unless there is no room or a flow is writing it again.
    pub(super) fn copy_message(&mut self, message: u64) -> bool {
        let Some(outgoing) = self.scheduler.payload_mut(message) else { return false };
        let SendCompletion::Pending(operation) = &outgoing.request else { return true };
        let Some((buffer, copy)) = self.retransmit_buffer.store(outgoing.buffer) else {
            return false;
        };
        operation.complete(outgoing.buffer.length() as u64);
        *outgoing = Outgoing { buffer, request: SendCompletion::Copied(copy) };
        self.requests -= 1;
        true
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
