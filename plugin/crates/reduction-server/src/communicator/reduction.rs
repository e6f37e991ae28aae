//! The reduction of one piece.

use std::time::Instant;

use evenkeel_reduction::protocol::Piece;
use evenkeel_reduction_kernels::reduce_in_place;
use evenkeel_transport::Block;

use super::piece_window::PieceWindow;
use super::slots::Slot;
use crate::upstream::PartialSum;

/// A piece that is being reduced, with the memory of its slot.
pub(super) struct PieceReduction {
    pub(super) piece: Piece,
    /// By rank. The first part becomes the result, unless that is sent upstream.
    pub(super) parts: Vec<Block>,
    pub(super) spare: Vec<Block>,
    /// Whether the sum is sent upstream.
    pub(super) is_partial: bool,
    /// The sum that is sent upstream.
    pub(super) partial_sum: Option<PartialSum>,
    pub(super) failure: Option<String>,
    pub(super) reducing: Instant,
    pub(super) reduced: Instant,
}

impl PieceReduction {
    /// Takes a piece's parts out of its slot, if all have arrived.
    pub(super) fn take(
        window: &mut PieceWindow<Slot>,
        number: u64,
        is_partial: bool,
    ) -> Option<Self> {
        let piece = *window.piece(number)?;
        let slot = window.slot_mut(number)?;
        let parts = slot.parts.iter_mut().map(Option::take).collect::<Option<Vec<_>>>()?;
        let spare = std::mem::take(&mut slot.spare);
        let now = Instant::now();
        Some(Self {
            piece,
            parts,
            spare,
            is_partial,
            partial_sum: None,
            failure: None,
            reducing: now,
            reduced: now,
        })
    }

    /// Reduces the parts.
    pub(super) fn run(&mut self, piece_bytes: usize) {
        let Piece { kind, op, length, .. } = self.piece;
        let length = length as usize;
        self.reducing = Instant::now();
        if self.is_partial {
            match PartialSum::reduce(self.piece, piece_bytes, &mut self.parts, &mut self.spare) {
                Ok(sum) => self.partial_sum = Some(sum),
                Err(why) => self.failure = Some(why),
            }
        } else if let Some((first, rest)) = self.parts.split_first_mut() {
            let others: Vec<&[u8]> = rest.iter().map(|part| &part.bytes()[..length]).collect();
            let done = reduce_in_place(kind, op, &mut first.bytes_mut()[..length], &others);
            self.failure = done.err().map(|error| format!("defect: {error}"));
        }
        self.reduced = Instant::now();
    }
}
