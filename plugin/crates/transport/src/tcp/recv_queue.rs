//! The posted buffers of a receiving connection, and the flows that wait for them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use evenkeel_protocol::{ChunkHeader, MAX_MESSAGE_BYTES, Reassembly};

use crate::connection::request::Target;
use crate::connection::unexpected::{Delivery, TagMatcher, UnexpectedMemory};
use crate::memory::buffers::RecvBuffer;

/// How long a receiver whose flows were closed waits for a new one. A live sender has noticed it too, and opens one at once.
pub(super) const CLOSED_TIMEOUT: Duration = Duration::from_millis(500);
/// How long a receiver waits of whose flows one was reset. Something on the path may have done it, and may let nothing through
/// for a while. A live sender dials again and again.
pub(super) const RESET_TIMEOUT: Duration = Duration::from_secs(10);

/// Guarded by the lock of its connection, whose flows are of type `F`.
pub(super) struct RecvQueue<F> {
    pub(super) reassembly: Reassembly<Posted>,
    pub(super) tags: TagMatcher,
    /// Unexpected messages that are to be copied into their buffers, without this lock.
    pub(super) deliveries: VecDeque<Delivery>,
    /// Number of those, and of the one that is being copied.
    pub(super) undelivered: usize,
    /// Nothing is copied any more.
    pub(super) is_quiesced: bool,
    /// By slot.
    pub(super) flows: Vec<Option<FlowEntry<F>>>,
    /// Since when no flow can deliver what the posted buffers wait for.
    pub(super) stuck_since: Option<Instant>,
    /// How long to wait for a new flow when none is left.
    pub(super) replacement_timeout: Duration,
    /// Whether the sender has opened the connection: it has said something, or has replaced a flow. Before that it may not
    /// have got the answers of all flows, and dials some again.
    pub(super) is_sender_open: bool,
    /// When this side has opened it. The sender has tried to since before that.
    pub(super) opened: Instant,
    /// The highest number of a flow so far.
    pub(super) highest: u32,
    /// What that was when the time was prolonged last. A chunk on a later flow shows that the sender gets through.
    pub(super) last_suspect: u32,
    /// When a flow was ended by anything but its sender the last time.
    pub(super) last_trouble: Option<Instant>,
    /// Whether a flow waits for memory of an unexpected message.
    pub(super) is_starved: bool,
    /// Why the last flow ended.
    pub(super) cause: String,
    /// The peer closes the connection once the messages below this number are delivered.
    pub(super) closes_at: Option<u64>,
    /// No flow may be added any more.
    pub(super) closed: bool,
}

/// A flow and what it waits for.
pub(super) struct FlowEntry<F> {
    pub(super) flow: Arc<F>,
    /// The message whose buffer is not posted yet. The flow delivers nothing before that.
    pub(super) waits_for: Option<u64>,
    /// The peer has ended it. What it still holds can be read.
    pub(super) ended: bool,
}

/// The payload of a posted message.
#[derive(Clone)]
pub(super) struct Posted {
    pub(super) buffer: RecvBuffer,
    pub(super) tag: i32,
    /// The request's buffer; `None` for an unexpected message.
    pub(super) target: Option<Target>,
}

impl<F> RecvQueue<F> {
    /// Number of buffers that wait for their messages.
    pub(super) fn outstanding(&self) -> usize {
        self.reassembly.outstanding() + self.tags.waiting()
    }

    /// Number of requests' buffers that are not complete.
    pub(super) fn requests(&self) -> usize {
        self.outstanding() + self.undelivered
    }

    /// An unexpected message is to be copied into its buffer.
    pub(super) fn push_delivery(&mut self, delivery: Delivery) {
        self.deliveries.push_back(delivery);
        self.undelivered += 1;
    }

    /// An unexpected message is copied, and this much of its memory is free again. Returns whether a flow may have waited
    /// for that.
    pub(super) fn delivered(&mut self, freed: u64) -> bool {
        self.undelivered -= 1;
        self.tags.memory_freed(freed);
        std::mem::take(&mut self.is_starved)
    }

    /// Whether the peer has closed the connection, and everything is there that it sends.
    pub(super) fn is_peer_done(&self) -> bool {
        self.closes_at.is_some_and(|below| self.reassembly.has_all_below(below))
    }

    /// The sender may need this time for its next flow, if not longer.
    pub(super) fn prolong(&mut self, timeout: Duration) {
        self.note_trouble(timeout);
        self.last_suspect = self.highest;
    }

    fn note_trouble(&mut self, timeout: Duration) {
        self.replacement_timeout = self.replacement_timeout.max(timeout);
        self.last_trouble = Some(Instant::now());
    }

    /// The sender has reported a dead flow. It gets through by the flow of the report. What has ended the other one may end
    /// that too, and the sender then dials again.
    pub(super) fn flow_reported_dead(&mut self, timeout: Duration) {
        self.note_trouble(timeout);
        if self.cause.is_empty() {
            "the peer reported one as dead".clone_into(&mut self.cause);
        }
    }

    /// A chunk has come by this flow. One that is newer than the trouble shows that the sender gets through again. It may still
    /// not know of all flows that ended here, and close the one that it got through by, since it takes them for alive. So the
    /// trouble is over when nothing follows it for a while.
    pub(super) fn heard_from(&mut self, number: u32) {
        if self.replacement_timeout <= CLOSED_TIMEOUT || number <= self.last_suspect {
            return;
        }
        let is_over = self.last_trouble.is_none_or(|at| at.elapsed() >= RESET_TIMEOUT);
        let timeout = if is_over { CLOSED_TIMEOUT } else { RESET_TIMEOUT };
        self.replacement_timeout = self.replacement_timeout.min(timeout);
    }

    /// Posts a buffer for the next message. Returns the message's number.
    pub(super) fn post(&mut self, target: Target, tag: i32) -> u64 {
        let capacity = (target.buffer.length() as u64).min(MAX_MESSAGE_BYTES);
        let buffer = target.buffer;
        self.reassembly.post(capacity, Posted { buffer, tag, target: Some(target) })
    }

    /// Whether this chunk's message is the next one, is unexpected, and may have memory.
    pub(super) fn wants_unexpected(&mut self, chunk: &ChunkHeader) -> bool {
        let message = chunk.message;
        let wanted = self.tags.accepts_unexpected(message) && message == self.reassembly.next();
        let has_room = self.tags.has_unexpected_room(chunk.total);
        self.is_starved |= wanted && !has_room;
        wanted && has_room
    }

    /// Posts memory for the next message, which is unexpected.
    pub(super) fn post_unexpected(&mut self, chunk: &ChunkHeader, mut memory: UnexpectedMemory) {
        let buffer = memory.lend_mut();
        self.tags.push_unexpected(chunk.message, chunk.total, memory);
        self.reassembly.post(chunk.total, Posted { buffer, tag: 0, target: None });
    }

    /// The flow in this slot waits for this message's buffer.
    pub(super) fn wait(&mut self, slot: usize, message: u64) {
        if let Some(entry) = self.flows.get_mut(slot).and_then(Option::as_mut) {
            entry.waits_for = Some(message);
        }
    }

    /// Whether any flow can deliver something for the posted buffers.
    pub(super) fn is_open(&self) -> bool {
        self.flows.iter().flatten().any(|entry| entry.waits_for.is_none())
    }

    /// Whether a flow has bytes of a message without a buffer.
    pub(super) fn is_buffer_wanted(&self) -> bool {
        self.flows.iter().flatten().any(|entry| entry.waits_for.is_some())
    }

    /// Removes a flow from those that wait for this message's buffer.
    pub(super) fn take_waiting(&mut self, message: u64) -> Option<Arc<F>> {
        let entry =
            self.flows.iter_mut().flatten().find(|entry| entry.waits_for == Some(message))?;
        entry.waits_for = None;
        Some(Arc::clone(&entry.flow))
    }
}
