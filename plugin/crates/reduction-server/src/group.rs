//! How far the ranks of one communicator are: which parts have come, what can be reduced, and which results are to be sent
//! to whom. No sockets, no memory, no clocks.
//!
//! Every rank sends its parts of the same pieces in the same order, at its own speed. The pieces of which some part has
//! come are the *window*; each has a slot, which is whatever the owner needs for it.

use std::collections::VecDeque;
use std::fmt;

use evenkeel_reduction::protocol::Piece;

/// A rank did what it must not do; the text goes on after the rank's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Violation(pub(crate) String);

/// The state of one communicator; `S` is a piece's slot.
#[derive(Debug)]
pub(crate) struct Group<S> {
    ranks: Vec<Rank>,
    /// Number of the window's first piece.
    first: u64,
    window: VecDeque<Entry<S>>,
    most: usize,
}

#[derive(Clone, Debug)]
struct Rank {
    /// For people.
    name: String,
    /// Number of the piece that its next part is of.
    next: u64,
    /// Number of the piece whose result it gets next.
    results: u64,
    left: bool,
}

#[derive(Debug)]
struct Entry<S> {
    piece: Piece,
    /// Parts that have not come.
    missing: usize,
    reduced: bool,
    /// Results that are not sent.
    unsent: usize,
    /// `None` once all is sent.
    slot: Option<S>,
}

/// Where a part belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// To the piece of this number.
    Open(u64),
    /// To a piece that needs a slot: [`Group::open`].
    Unopened,
    /// The window is full: it must wait.
    Full,
}

impl<S> Group<S> {
    /// A communicator of so many ranks, of which `most` pieces may be open at a time.
    pub(crate) fn new(ranks: usize, most: usize) -> Self {
        let rank = |rank| Rank { name: format!("rank {rank}"), next: 0, results: 0, left: false };
        Self { ranks: (0..ranks).map(rank).collect(), first: 0, window: VecDeque::new(), most }
    }

    /// What a rank is called, its number here until it says otherwise.
    pub(crate) fn name(&self, rank: usize) -> &str {
        &self.ranks[rank].name
    }

    /// A rank is called so.
    pub(crate) fn set_name(&mut self, rank: usize, name: String) {
        self.ranks[rank].name = name;
    }

    /// Where a rank's next part belongs, which it says is of this piece.
    pub(crate) fn place(&self, rank: usize, piece: &Piece) -> Result<Place, Violation> {
        let number = self.ranks[rank].next;
        if let Some(entry) = self.entry(number) {
            if entry.piece == *piece {
                return Ok(Place::Open(number));
            }
            return Err(Violation(format!(
                "is at {}, others at {}: all ranks must call the same operations in the same order",
                Shown(piece),
                Shown(&entry.piece)
            )));
        }
        if let Some(left) = self.ranks.iter().find(|rank| rank.left) {
            return Err(Violation(format!(
                "goes on with {}, and {} has left",
                Shown(piece),
                left.name
            )));
        }
        Ok(if self.window.len() < self.most { Place::Unopened } else { Place::Full })
    }

    /// Opens the piece after the last one; gives its number.
    pub(crate) fn open(&mut self, piece: Piece, slot: S) -> u64 {
        let missing = self.ranks.len();
        self.window.push_back(Entry {
            piece,
            missing,
            reduced: false,
            unsent: missing,
            slot: Some(slot),
        });
        self.first + self.window.len() as u64 - 1
    }

    /// A rank's part of an open piece begins to come: what it says next is of the next piece.
    pub(crate) fn begin(&mut self, rank: usize) {
        self.ranks[rank].next += 1;
    }

    /// All of a rank's part of a piece has come; true if it was the last.
    pub(crate) fn arrived(&mut self, number: u64) -> bool {
        let Some(entry) = self.entry_mut(number) else { return false };
        entry.missing = entry.missing.saturating_sub(1);
        entry.missing == 0
    }

    /// A piece is reduced.
    pub(crate) fn reduced(&mut self, number: u64) {
        if let Some(entry) = self.entry_mut(number) {
            entry.reduced = true;
        }
    }

    /// The piece whose result a rank can be sent next, if there is one.
    pub(crate) fn next_result(&self, rank: usize) -> Option<(u64, Piece)> {
        let number = self.ranks[rank].results;
        let entry = self.entry(number).filter(|entry| entry.reduced)?;
        (!self.ranks[rank].left).then_some((number, entry.piece))
    }

    /// A rank's next result is on its way.
    pub(crate) fn result_begun(&mut self, rank: usize) {
        self.ranks[rank].results += 1;
    }

    /// A result is sent. The piece's slot, if it was the last of that piece.
    pub(crate) fn sent(&mut self, number: u64) -> Option<S> {
        let entry = self.entry_mut(number)?;
        entry.unsent = entry.unsent.saturating_sub(1);
        let slot = if entry.unsent == 0 { entry.slot.take() } else { None };
        while self.window.front().is_some_and(|entry| entry.slot.is_none()) {
            self.window.pop_front();
            self.first += 1;
        }
        slot
    }

    /// A rank goes. The slots of pieces of which it was the last to get the result.
    pub(crate) fn leave(&mut self, rank: usize) -> Result<Vec<S>, Violation> {
        let state = &mut self.ranks[rank];
        state.left = true;
        let (next, results) = (state.next, state.results);
        let end = self.first + self.window.len() as u64;
        if next < end {
            let what = self.entry(next).map(|entry| Shown(&entry.piece).to_string());
            return Err(Violation(format!(
                "left before {}, which others have begun",
                what.unwrap_or_default()
            )));
        }
        self.ranks[rank].results = end;
        Ok((results..end).filter_map(|number| self.sent(number)).collect())
    }

    /// A piece's slot.
    pub(crate) fn slot(&self, number: u64) -> Option<&S> {
        self.entry(number)?.slot.as_ref()
    }

    /// A piece's slot.
    pub(crate) fn slot_mut(&mut self, number: u64) -> Option<&mut S> {
        self.entry_mut(number)?.slot.as_mut()
    }

    /// An open piece.
    pub(crate) fn piece(&self, number: u64) -> Option<&Piece> {
        self.entry(number).map(|entry| &entry.piece)
    }

    fn entry(&self, number: u64) -> Option<&Entry<S>> {
        let at = number.checked_sub(self.first)?;
        self.window.get(usize::try_from(at).ok()?)
    }

    fn entry_mut(&mut self, number: u64) -> Option<&mut Entry<S>> {
        let at = number.checked_sub(self.first)?;
        self.window.get_mut(usize::try_from(at).ok()?)
    }
}

/// A piece for people.
struct Shown<'a>(&'a Piece);

impl fmt::Display for Shown<'_> {
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

    /// Ranks that send at random times, reductions and sends that end at random times: every rank gets every result once
    /// and in order, no more pieces than allowed are open, and all slots come back.
    #[test]
    fn any_schedule_delivers_everything_in_order() {
        for seed in 0..300 {
            let mut rng = TestRng::new(seed);
            let ranks = 1 + rng.below(5) as usize;
            let most = 1 + rng.below(4) as usize;
            let pieces = rng.below(20);
            let mut group: Group<u64> = Group::new(ranks, most);
            let mut said = vec![0; ranks];
            let mut coming: Vec<u64> = vec![];
            let mut reducing: Vec<u64> = vec![];
            let mut sending: Vec<u64> = vec![];
            let mut got = vec![vec![]; ranks];
            let mut slots = 0;
            let mut steps = 0;
            while got.iter().any(|got| got.len() < pieces as usize) {
                steps += 1;
                assert!(steps < 100_000, "stuck with seed {seed}");
                let rank = rng.below(ranks as u64) as usize;
                match rng.below(4) {
                    0 if said[rank] < pieces => {
                        match group.place(rank, &piece(said[rank])).unwrap() {
                            Place::Full => assert_eq!(group.window.len(), most),
                            place => {
                                let number = match place {
                                    Place::Open(number) => number,
                                    _ => {
                                        slots += 1;
                                        group.open(piece(said[rank]), said[rank])
                                    }
                                };
                                assert_eq!(number, said[rank]);
                                group.begin(rank);
                                said[rank] += 1;
                                coming.push(number);
                            }
                        }
                    }
                    1 if !coming.is_empty() => {
                        let at = rng.below(coming.len() as u64) as usize;
                        let number = coming.swap_remove(at);
                        if group.arrived(number) {
                            reducing.push(number);
                        }
                    }
                    2 if !reducing.is_empty() => {
                        let at = rng.below(reducing.len() as u64) as usize;
                        group.reduced(reducing.swap_remove(at));
                    }
                    3 => {
                        if let Some((number, piece)) = group.next_result(rank) {
                            assert_eq!(number, piece.sequence);
                            group.result_begun(rank);
                            got[rank].push(number);
                            sending.push(number);
                        }
                        if !sending.is_empty() {
                            let at = rng.below(sending.len() as u64) as usize;
                            let number = sending.swap_remove(at);
                            slots -= usize::from(group.sent(number) == Some(number));
                        }
                    }
                    _ => {}
                }
                assert!(group.window.len() <= most);
            }
            for number in sending {
                slots -= usize::from(group.sent(number).is_some());
            }
            let all: Vec<u64> = (0..pieces).collect();
            assert!(got.iter().all(|got| *got == all));
            assert!(group.window.is_empty() && slots == 0, "{slots} slots are left");
        }
    }

    #[test]
    fn ranks_that_disagree_are_named_with_both_operations() {
        let mut group: Group<()> = Group::new(2, 4);
        group.open(piece(1), ());
        group.begin(0);
        let wrong = Piece { op: Op::Max, ..piece(1) };
        let error = group.place(1, &wrong).unwrap_err().0;
        assert!(error.contains("Max") && error.contains("Sum"), "{error}");
    }

    #[test]
    fn who_leaves_in_between_is_named_and_who_leaves_at_the_end_is_not() {
        let mut group: Group<u8> = Group::new(2, 4);
        group.open(piece(0), 7);
        group.begin(0);
        let error = group.clone_for_test().leave(1).unwrap_err().0;
        assert!(error.starts_with("left before operation 0"), "{error}");
        group.begin(1);
        assert!(!group.arrived(0));
        assert!(group.arrived(0));
        group.reduced(0);
        group.result_begun(0);
        assert_eq!(group.sent(0), None);
        // It does not wait for its result.
        assert_eq!(group.leave(1), Ok(vec![7]));
        assert!(group.window.is_empty());
        let error = group.place(0, &piece(1)).unwrap_err().0;
        assert!(error.contains("rank 1 has left"), "{error}");
    }

    impl Group<u8> {
        fn clone_for_test(&self) -> Self {
            let mut copy = Self::new(self.ranks.len(), self.most);
            copy.ranks.clone_from(&self.ranks);
            copy.first = self.first;
            for entry in &self.window {
                copy.open(entry.piece, 0);
            }
            copy
        }
    }
}
