//! The memory that a communicator's pieces pass through.

use std::sync::Arc;
use std::time::Instant;

use evenkeel_reduction::protocol::{MESSAGE_BYTES, Packet, Piece};
use evenkeel_transport::Block;

use crate::limits::slot_bytes;
use crate::memory_budget::{MemoryBudget, MemoryGrant};
use crate::timeline::PieceTimes;

/// Memory for one piece.
pub(super) struct Slot {
    /// The ranks' parts, by rank.
    pub(super) parts: Vec<Option<Block>>,
    /// For sums that are sent upstream, and the results that come back.
    pub(super) spare: Vec<Block>,
    /// The header of the result, and the result itself if it is small.
    pub(super) head: Arc<Block>,
    pub(super) result: Option<Arc<Block>>,
    pub(super) times: PieceTimes,
    /// `None` for the slot that the communicator always has.
    grant: Option<MemoryGrant>,
}

/// The slots of a communicator: the first is always granted, others as long as memory is left.
pub(super) struct SlotPool {
    free: Vec<Slot>,
    /// Number of slots, in use or free.
    count: u64,
    budget: Arc<MemoryBudget>,
    ranks: u32,
    slot_bytes: u64,
}

impl SlotPool {
    pub(super) fn new(
        budget: Arc<MemoryBudget>,
        piece_bytes: u64,
        ranks: u32,
        upstream_servers: usize,
    ) -> Self {
        let slot_bytes = slot_bytes(piece_bytes, ranks, upstream_servers);
        Self { free: Vec::new(), count: 0, budget, ranks, slot_bytes }
    }

    /// A slot for a new piece, if there is memory.
    pub(super) fn take(&mut self) -> Option<Slot> {
        let times = PieceTimes::opened_at(Instant::now());
        if let Some(slot) = self.free.pop() {
            return Some(Slot { times, ..slot });
        }
        let grant = if self.count == 0 {
            None
        } else if (self.count + 1) * self.slot_bytes > self.budget.share() {
            return None;
        } else {
            // The reserve lets a new communicator start without waiting for this one.
            Some(self.budget.grant(self.slot_bytes, self.budget.total() / 4)?)
        };
        self.count += 1;
        Some(Slot {
            parts: (0..self.ranks).map(|_| None).collect(),
            spare: Vec::new(),
            head: Arc::new(Block::new(MESSAGE_BYTES)),
            result: None,
            times,
            grant,
        })
    }

    /// Takes back the slot of a piece that is done.
    pub(super) fn release(&mut self, mut slot: Slot) {
        if let Some(result) = slot.result.take().and_then(Arc::into_inner) {
            match &mut slot.parts[0] {
                // A sum in float32 leaves all parts in place.
                Some(_) => slot.spare.push(result),
                part => *part = Some(result),
            }
        }
        self.free.push(slot);
        self.trim();
    }

    /// Returns free memory beyond the fair share to the budget.
    pub(super) fn trim(&mut self) {
        while self.count > 1 && self.count * self.slot_bytes > self.budget.share() {
            let granted = self.free.iter().position(|slot| slot.grant.is_some());
            let Some(at) = granted else { return };
            self.free.swap_remove(at);
            self.count -= 1;
        }
    }
}

impl Slot {
    /// Takes back the memory of the last ranks' parts.
    pub(super) fn return_parts(&mut self, parts: Vec<Block>) {
        let first = self.parts.len() - parts.len();
        for (place, part) in self.parts[first..].iter_mut().zip(parts) {
            *place = Some(part);
        }
    }

    /// Stores the result of the piece.
    pub(super) fn set_result(&mut self, piece: Piece, result: Block) {
        // The old header is shared as long as a rank that has left holds it.
        if Arc::get_mut(&mut self.head).is_none() {
            self.head = Arc::new(Block::new(MESSAGE_BYTES));
        }
        if let Some(head) = Arc::get_mut(&mut self.head) {
            let at = Packet::Result(piece).encode(head.bytes_mut());
            if piece.is_inline() {
                let length = piece.length as usize;
                head.bytes_mut()[at..at + length].copy_from_slice(&result.bytes()[..length]);
            }
        }
        self.result = Some(Arc::new(result));
    }
}
