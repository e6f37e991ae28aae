//! The sum of a leaf's parts, as it is sent upstream.
//!
//! Sums and products of narrow floats travel in float32, so that they are rounded once and not at
//! each level. A piece that is wider in float32 travels in several fragments.

use evenkeel_reduction::protocol::Piece;
use evenkeel_reduction_kernels::{partial_type, reduce_in_place, reduce_partial, round_partial};
use evenkeel_transport::Block;

/// The sum of a piece's parts.
pub(crate) struct PartialSum {
    /// As the leaf's ranks know it.
    pub(super) piece: Piece,
    /// By fragment: the sum, and memory for the result.
    pub(super) fragments: Vec<(Block, Block)>,
}

/// A piece's result, as an upstream server has returned it.
pub(crate) struct UpstreamResult {
    /// The piece's number.
    pub(crate) number: u64,
    /// By fragment: reduced over all leaves.
    pub(super) fragments: Vec<Block>,
    /// Memory that is not needed any more.
    pub(crate) spare: Vec<Block>,
}

/// The bytes that a piece has on its way upstream.
pub(crate) fn upstream_bytes(piece: &Piece) -> u64 {
    fragments(piece, usize::MAX).iter().map(|fragment| u64::from(fragment.length)).sum()
}

/// The fragments of a piece: pieces of at most this size, as the upstream server knows them.
pub(super) fn fragments(piece: &Piece, piece_bytes: usize) -> Vec<Piece> {
    let kind = partial_type(piece.kind, piece.op).unwrap_or(piece.kind);
    let factor = kind.bytes() / piece.kind.bytes();
    let length = piece.length as usize * factor;
    let fragment = |at: usize| Piece {
        offset: piece.offset * factor as u64 + at as u64,
        total: piece.total * factor as u64,
        length: (length - at).min(piece_bytes) as u32,
        kind,
        ..*piece
    };
    (0..length).step_by(piece_bytes).map(fragment).collect()
}

impl PartialSum {
    /// Reduces a leaf's parts, in their order, to fragments of at most `piece_bytes`. Takes the
    /// memory it needs from `parts` and `spare`.
    ///
    /// # Errors
    /// A defect of this program.
    pub(crate) fn reduce(
        piece: Piece,
        piece_bytes: usize,
        parts: &mut Vec<Block>,
        spare: &mut Vec<Block>,
    ) -> Result<Self, String> {
        let defect = |error| format!("defect: {error}");
        let mut block = || spare.pop().unwrap_or_else(|| Block::new(piece_bytes));
        let length = piece.length as usize;
        let Piece { kind, op, .. } = piece;
        if partial_type(kind, op).is_none() {
            let mut sum = parts.remove(0);
            let others: Vec<&[u8]> = parts.iter().map(|part| &part.bytes()[..length]).collect();
            reduce_in_place(kind, op, &mut sum.bytes_mut()[..length], &others).map_err(defect)?;
            return Ok(Self { piece, fragments: vec![(sum, block())] });
        }
        let mut sums = vec![];
        let mut at = 0;
        for fragment in fragments(&piece, piece_bytes) {
            let mut sum = block();
            let bytes = fragment.length as usize;
            let narrow = bytes / fragment.kind.bytes() * kind.bytes();
            let own: Vec<&[u8]> = parts.iter().map(|part| &part.bytes()[at..at + narrow]).collect();
            reduce_partial(kind, op, &own, &mut sum.bytes_mut()[..bytes]).map_err(defect)?;
            at += narrow;
            sums.push((sum, block()));
        }
        Ok(Self { piece, fragments: sums })
    }
}

impl UpstreamResult {
    /// Takes the piece's result, in its own type, in one block of at least `piece_bytes`.
    ///
    /// # Errors
    /// A defect of this program.
    pub(crate) fn take_result(
        &mut self,
        piece: &Piece,
        piece_bytes: usize,
    ) -> Result<Block, String> {
        let defect = || "defect: a piece came back in other fragments than were sent".to_owned();
        if partial_type(piece.kind, piece.op).is_none() {
            return self.fragments.pop().ok_or_else(defect);
        }
        let mut result = self.spare.pop().unwrap_or_else(|| Block::new(piece_bytes));
        let mut at = 0;
        for (fragment, block) in fragments(piece, piece_bytes).iter().zip(&self.fragments) {
            let bytes = fragment.length as usize;
            let narrowed = bytes / fragment.kind.bytes() * piece.kind.bytes();
            let into = result.bytes_mut().get_mut(at..at + narrowed).ok_or_else(defect)?;
            round_partial(piece.kind, &block.bytes()[..bytes], into)
                .map_err(|error| format!("defect: {error}"))?;
            at += narrowed;
        }
        self.spare.append(&mut self.fragments);
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use evenkeel_reduction_kernels::{DataType, Op, reference};

    fn piece(kind: DataType, op: Op, length: usize) -> Piece {
        let (total, offset) = (1 << 20, 128);
        Piece { sequence: 3, offset, total, length: length as u32, kind, op }
    }

    #[test]
    fn narrow_sums_are_sent_upstream_in_float32() {
        let sent = fragments(&piece(DataType::Float16, Op::Sum, 1000), 1024);
        let got: Vec<_> = sent.iter().map(|one| (one.offset, one.length, one.total)).collect();
        assert_eq!(got, [(256, 1024, 2 << 20), (1280, 976, 2 << 20)]);
        assert!(sent.iter().all(|one| one.kind == DataType::Float32));
        for (kind, op) in [(DataType::Float32, Op::Sum), (DataType::Float16, Op::Max)] {
            let piece = piece(kind, op, 1000);
            assert_eq!(fragments(&piece, 1024), [piece]);
        }
    }

    /// Where the order of additions does not matter, the sum of two leaves' sums is what one server
    /// with all parts computes.
    #[test]
    fn sum_of_leaves_is_that_of_one_server() {
        const PIECE_BYTES: usize = 1024;
        for kind in DataType::ALL {
            for op in [Op::Sum, Op::Max] {
                let length = PIECE_BYTES - 24;
                let piece = piece(kind, op, length);
                // Numbers that all formats add without rounding.
                let part = |rank: usize| -> Vec<u8> {
                    let bits = |i: usize| (i * (rank + 1) % 5) as u8;
                    let zeros = vec![0; kind.bytes()];
                    (0..length / kind.bytes())
                        .flat_map(|i| {
                            let mut element = zeros.clone();
                            // A small number in integers; the top of a float: 0, or a power of two.
                            element[kind.bytes() - 1] =
                                [0x00, 0x38, 0x38, 0x30, 0x00][bits(i) as usize];
                            element
                        })
                        .collect()
                };
                let block = |bytes: &[u8]| {
                    let mut block = Block::new(PIECE_BYTES);
                    block.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
                    block
                };
                let all: Vec<_> = (0..4).map(part).collect();
                let leaf = |ranks: [usize; 2]| {
                    let mut parts = ranks.map(|rank| block(&all[rank])).into();
                    let mut spare = vec![];
                    PartialSum::reduce(piece, PIECE_BYTES, &mut parts, &mut spare).unwrap()
                };
                let (left, right) = (leaf([0, 1]), leaf([2, 3]));
                let mut upstream = UpstreamResult { number: 0, fragments: vec![], spare: vec![] };
                for ((fragment, (mut sum, _)), (other, _)) in
                    fragments(&piece, PIECE_BYTES).iter().zip(left.fragments).zip(right.fragments)
                {
                    let bytes = fragment.length as usize;
                    let others = [&other.bytes()[..bytes]];
                    reduce_in_place(fragment.kind, op, &mut sum.bytes_mut()[..bytes], &others)
                        .unwrap();
                    upstream.fragments.push(sum);
                }
                let got = upstream.take_result(&piece, PIECE_BYTES).unwrap();
                let sources: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
                let mut want = vec![0; length];
                reference::reduce(kind, op, &sources, &mut want).unwrap();
                assert!(got.bytes()[..length] == want, "{op:?} of {kind:?}");
            }
        }
    }
}
