//! The open pieces of one communicator: which parts have arrived, which pieces are complete, and
//! which results are due to which rank. No sockets, no memory, no clocks.
//!
//! Every rank sends its parts of the same pieces in the same order, at its own speed. A piece is
//! open from its first part until its result is sent to all ranks. Each open piece has a slot, of a
//! type that the caller chooses.

use std::collections::VecDeque;
use std::fmt;

use evenkeel_reduction::protocol::Piece;

/// A rank broke the protocol. The text follows the rank's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Violation(pub(crate) String);

/// The open pieces of one communicator. `S` is the type of a piece's slot.
#[derive(Debug)]
pub(crate) struct PieceWindow<S> {
    ranks: Vec<Rank>,
    /// Number of the first open piece.
    first: u64,
    pieces: VecDeque<OpenPiece<S>>,
    max: usize,
}

#[derive(Clone, Debug)]
struct Rank {
    /// In errors.
    name: String,
    /// Number of the piece that its next part belongs to.
    next_part: u64,
    /// Number of the piece whose result is sent to it next.
    next_result: u64,
    left: bool,
}

#[derive(Debug)]
struct OpenPiece<S> {
    piece: Piece,
    /// Number of parts that have not arrived.
    missing: usize,
    reduced: bool,
    /// Number of ranks that the result is not sent to.
    unsent: usize,
    /// `None` once the result is sent to all ranks.
    slot: Option<S>,
}

/// Where a part goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// To the open piece with this number.
    Open(u64),
    /// To a new piece: call [`PieceWindow::open`].
    New,
    /// The window is full: the part must wait.
    Full,
}

impl<S> PieceWindow<S> {
    /// For this number of ranks, with at most `max` open pieces.
    pub(crate) fn new(ranks: usize, max: usize) -> Self {
        let rank =
            |rank| Rank { name: format!("rank {rank}"), next_part: 0, next_result: 0, left: false };
        Self { ranks: (0..ranks).map(rank).collect(), first: 0, pieces: VecDeque::new(), max }
    }

    /// A rank's name in errors.
    pub(crate) fn name(&self, rank: usize) -> &str {
        &self.ranks[rank].name
    }

    /// Sets a rank's name in errors.
    pub(crate) fn set_name(&mut self, rank: usize, name: String) {
        self.ranks[rank].name = name;
    }

    /// Where a rank's next part goes, whose header names this piece.
    pub(crate) fn place(&self, rank: usize, piece: &Piece) -> Result<Place, Violation> {
        let number = self.ranks[rank].next_part;
        if let Some(open) = self.open_piece(number) {
            if open.piece == *piece {
                return Ok(Place::Open(number));
            }
            return Err(Violation(format!(
                "sends {}, others send {}: all ranks must call the same operations in the same order",
                PieceText(piece),
                PieceText(&open.piece)
            )));
        }
        if let Some(left) = self.ranks.iter().find(|rank| rank.left) {
            return Err(Violation(format!(
                "sends {}, but {} has left",
                PieceText(piece),
                left.name
            )));
        }
        Ok(if self.pieces.len() < self.max { Place::New } else { Place::Full })
    }

    /// Opens the next piece. Returns its number.
    pub(crate) fn open(&mut self, piece: Piece, slot: S) -> u64 {
        let missing = self.ranks.len();
        self.pieces.push_back(OpenPiece {
            piece,
            missing,
            reduced: false,
            unsent: missing,
            slot: Some(slot),
        });
        self.first + self.pieces.len() as u64 - 1
    }

    /// A rank's part of an open piece begins to arrive. Its next part belongs to the next piece.
    pub(crate) fn part_begun(&mut self, rank: usize) {
        self.ranks[rank].next_part += 1;
    }

    /// A part has arrived. Returns true if the piece is complete.
    pub(crate) fn part_arrived(&mut self, number: u64) -> bool {
        let Some(open) = self.open_piece_mut(number) else { return false };
        open.missing = open.missing.saturating_sub(1);
        open.missing == 0
    }

    /// A piece is reduced.
    pub(crate) fn reduced(&mut self, number: u64) {
        if let Some(open) = self.open_piece_mut(number) {
            open.reduced = true;
        }
    }

    /// The next piece whose result can be sent to a rank.
    pub(crate) fn next_result(&self, rank: usize) -> Option<(u64, Piece)> {
        let number = self.ranks[rank].next_result;
        let open = self.open_piece(number).filter(|open| open.reduced)?;
        (!self.ranks[rank].left).then_some((number, open.piece))
    }

    /// A rank's next result is being sent.
    pub(crate) fn result_begun(&mut self, rank: usize) {
        self.ranks[rank].next_result += 1;
    }

    /// A result is sent to one rank. Returns the piece's slot if it was the last rank.
    pub(crate) fn result_sent(&mut self, number: u64) -> Option<S> {
        let open = self.open_piece_mut(number)?;
        open.unsent = open.unsent.saturating_sub(1);
        let slot = if open.unsent == 0 { open.slot.take() } else { None };
        while self.pieces.front().is_some_and(|open| open.slot.is_none()) {
            self.pieces.pop_front();
            self.first += 1;
        }
        slot
    }

    /// A rank leaves. Returns the slots of pieces whose result was due to no other rank.
    pub(crate) fn leave(&mut self, rank: usize) -> Result<Vec<S>, Violation> {
        let state = &mut self.ranks[rank];
        state.left = true;
        let (next_part, next_result) = (state.next_part, state.next_result);
        let end = self.first + self.pieces.len() as u64;
        if next_part < end {
            let what = self.piece(next_part).map(|piece| PieceText(piece).to_string());
            return Err(Violation(format!(
                "left before {}, which other ranks have begun",
                what.unwrap_or_default()
            )));
        }
        self.ranks[rank].next_result = end;
        Ok((next_result..end).filter_map(|number| self.result_sent(number)).collect())
    }

    /// A piece's slot.
    pub(crate) fn slot(&self, number: u64) -> Option<&S> {
        self.open_piece(number)?.slot.as_ref()
    }

    /// A piece's slot.
    pub(crate) fn slot_mut(&mut self, number: u64) -> Option<&mut S> {
        self.open_piece_mut(number)?.slot.as_mut()
    }

    /// An open piece.
    pub(crate) fn piece(&self, number: u64) -> Option<&Piece> {
        self.open_piece(number).map(|open| &open.piece)
    }

    fn open_piece(&self, number: u64) -> Option<&OpenPiece<S>> {
        let at = number.checked_sub(self.first)?;
        self.pieces.get(usize::try_from(at).ok()?)
    }

    fn open_piece_mut(&mut self, number: u64) -> Option<&mut OpenPiece<S>> {
        let at = number.checked_sub(self.first)?;
        self.pieces.get_mut(usize::try_from(at).ok()?)
    }
}

/// A piece in errors.
struct PieceText<'a>(&'a Piece);

impl fmt::Display for PieceText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Piece { sequence, offset, total, length, kind, op } = self.0;
        write!(
            f,
            "operation {sequence} ({op:?} of {total} bytes of {kind:?}, {length} from {offset})"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use evenkeel_reduction_kernels::{DataType, Op};
    use evenkeel_testkit::TestRng;

    fn piece(sequence: u64) -> Piece {
        let (kind, op) = (DataType::Float32, Op::Sum);
        Piece { sequence, offset: 0, total: 64, length: 64, kind, op }
    }

    /// Parts, reductions and sends end at random times. Every rank receives every result once and
    /// in order, the number of open pieces stays within the maximum, and all slots are returned.
    #[test]
    fn piece_window_delivers_results_in_order() {
        for seed in 0..300 {
            let mut rng = TestRng::new(seed);
            let ranks = 1 + rng.below(5) as usize;
            let max = 1 + rng.below(4) as usize;
            let pieces = rng.below(20);
            let mut window: PieceWindow<u64> = PieceWindow::new(ranks, max);
            let mut announced = vec![0; ranks];
            let mut arriving: Vec<u64> = vec![];
            let mut reducing: Vec<u64> = vec![];
            let mut sending: Vec<u64> = vec![];
            let mut received = vec![vec![]; ranks];
            let mut slots = 0;
            let mut steps = 0;
            while received.iter().any(|received| received.len() < pieces as usize) {
                steps += 1;
                assert!(steps < 100_000, "no progress with seed {seed}");
                let rank = rng.below(ranks as u64) as usize;
                match rng.below(4) {
                    0 if announced[rank] < pieces => {
                        match window.place(rank, &piece(announced[rank])).unwrap() {
                            Place::Full => assert_eq!(window.pieces.len(), max),
                            place => {
                                let number = match place {
                                    Place::Open(number) => number,
                                    _ => {
                                        slots += 1;
                                        window.open(piece(announced[rank]), announced[rank])
                                    }
                                };
                                assert_eq!(number, announced[rank]);
                                window.part_begun(rank);
                                announced[rank] += 1;
                                arriving.push(number);
                            }
                        }
                    }
                    1 if !arriving.is_empty() => {
                        let at = rng.below(arriving.len() as u64) as usize;
                        let number = arriving.swap_remove(at);
                        if window.part_arrived(number) {
                            reducing.push(number);
                        }
                    }
                    2 if !reducing.is_empty() => {
                        let at = rng.below(reducing.len() as u64) as usize;
                        window.reduced(reducing.swap_remove(at));
                    }
                    3 => {
                        if let Some((number, piece)) = window.next_result(rank) {
                            assert_eq!(number, piece.sequence);
                            window.result_begun(rank);
                            received[rank].push(number);
                            sending.push(number);
                        }
                        if !sending.is_empty() {
                            let at = rng.below(sending.len() as u64) as usize;
                            let number = sending.swap_remove(at);
                            slots -= usize::from(window.result_sent(number) == Some(number));
                        }
                    }
                    _ => {}
                }
                assert!(window.pieces.len() <= max);
            }
            for number in sending {
                slots -= usize::from(window.result_sent(number).is_some());
            }
            let all: Vec<u64> = (0..pieces).collect();
            assert!(received.iter().all(|received| *received == all));
            assert!(window.pieces.is_empty() && slots == 0, "{slots} slots are not returned");
        }
    }

    #[test]
    fn different_operations_of_ranks_are_named() {
        let mut window: PieceWindow<()> = PieceWindow::new(2, 4);
        window.open(piece(1), ());
        window.part_begun(0);
        let wrong = Piece { op: Op::Max, ..piece(1) };
        let error = window.place(1, &wrong).unwrap_err().0;
        assert!(error.contains("Max") && error.contains("Sum"), "{error}");
    }

    #[test]
    fn rank_that_leaves_before_a_piece_is_named() {
        let mut window: PieceWindow<u8> = PieceWindow::new(2, 4);
        window.open(piece(0), 7);
        window.part_begun(0);
        let error = window.clone_for_test().leave(1).unwrap_err().0;
        assert!(error.starts_with("left before operation 0"), "{error}");
        window.part_begun(1);
        assert!(!window.part_arrived(0));
        assert!(window.part_arrived(0));
        window.reduced(0);
        window.result_begun(0);
        assert_eq!(window.result_sent(0), None);
        // The rank leaves before its result is sent.
        assert_eq!(window.leave(1), Ok(vec![7]));
        assert!(window.pieces.is_empty());
        let error = window.place(0, &piece(1)).unwrap_err().0;
        assert!(error.contains("rank 1 has left"), "{error}");
    }

    impl PieceWindow<u8> {
        fn clone_for_test(&self) -> Self {
            let mut copy = Self::new(self.ranks.len(), self.max);
            copy.ranks.clone_from(&self.ranks);
            copy.first = self.first;
            for open in &self.pieces {
                copy.open(open.piece, 0);
            }
            copy
        }
    }
}
