//! Executes plans: in pieces, several at a time, each as soon as the pieces that it depends on are done.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use crate::algorithms::plan::{Action, Plan};
use crate::algorithms::reduction::Reduction;
use crate::error::Result;
use crate::links::link::{Key, Kind, Submitted};
use crate::links::matching::ReceiveRequest;
use crate::links::mesh::{Mesh, PeerError};
use crate::memory::{Source, Target};
use crate::wait::{Poll, Wait};

/// Number of pieces in progress at a time; more if a step has more transfers.
const WINDOW: usize = 16;

/// What all pieces of an operation have in common.
pub(crate) struct Job<'a> {
    pub(crate) mesh: &'a Mesh,
    /// The group's ranks by their numbers in the mesh.
    pub(crate) members: &'a [usize],
    /// This rank's number in the group.
    pub(crate) rank: usize,
    /// The key of its messages, without the part.
    pub(crate) key: Key,
    /// The operation's name.
    pub(crate) what: &'static str,
    pub(crate) timeout: Duration,
    /// How received data is combined. The plan's ranges count its elements.
    pub(crate) reduction: &'a Reduction<'a>,
    /// Maximum length of a piece in bytes, the same on all ranks.
    pub(crate) piece: usize,
}

struct Piece {
    /// The plan's step that it belongs to.
    step: usize,
    peer: usize,
    action: Action,
    at: usize,
    length: usize,
    part: u32,
    state: PieceState,
}

enum PieceState {
    Waiting,
    /// The link needs the memory until its number of completed payloads reaches this.
    Sending(u64),
    Receiving(Arc<ReceiveRequest>, Vec<u8>),
    /// Received and not combined yet.
    Arrived(Vec<u8>),
    Done,
}

/// An operation in progress. Dropping it takes back all memory that was lent for it.
struct Execution<'a> {
    mesh: &'a Mesh,
    plan: &'a Plan,
    pieces: Vec<Piece>,
    /// All pieces before this one are done.
    first: usize,
    window: usize,
    /// Number of sends in progress.
    sends: usize,
    /// The number of calls of `advance`, and the one that last polled the link from each rank.
    advances: u64,
    polled: Vec<u64>,
    input: Source,
    work: Target,
    borrowed: PhantomData<(&'a [u8], &'a mut [u8])>,
}

/// Executes a plan on the given memory. Returns when the plan is done, or with an error. Nothing is lent any more then.
pub(crate) fn execute(job: &Job<'_>, plan: &Plan, input: &[u8], work: &mut [u8]) -> Result<()> {
    let mut wait = Wait::new(job.mesh, job.what, job.key.tag, job.timeout)?;
    let mut execution = Execution {
        mesh: job.mesh,
        plan,
        pieces: pieces(job, plan),
        first: 0,
        window: WINDOW.max(plan.concurrency()),
        sends: 0,
        advances: 0,
        polled: vec![0; job.mesh.probe_addresses().len()],
        // SAFETY: parts of both are given to the mesh only, by the execution, which takes them back when it is dropped; it
        // does not outlive this call, and is not forgotten.
        input: unsafe { Source::lend(input) },
        // SAFETY: as above. The execution alone decides what reads and writes which part, see `is_blocked`.
        work: unsafe { Target::lend(work) },
        borrowed: PhantomData,
    };
    let result = execution.run(job, &mut wait);
    // The receiver of a message must not take a part of another one for the rest of this one.
    let is_cut = job.key.kind == Kind::Message && execution.first > 0;
    let broken = execution.reclaim() || is_cut;
    result
        .map_err(|error| if broken { job.mesh.end_group_on_partial_transfer(error) } else { error })
}

/// The plan's transfers, step by step, each cut into pieces.
fn pieces(job: &Job<'_>, plan: &Plan) -> Vec<Piece> {
    let element = job.reduction.element();
    let max_bytes = (job.piece / element).max(1) * element;
    let mut pieces = vec![];
    // Number of messages so far, to and from each rank.
    let mut parts: Vec<(usize, bool, u32)> = vec![];
    for (step, transfers) in plan.steps().iter().enumerate() {
        let mut more = true;
        let mut offset = 0;
        while more {
            more = false;
            for transfer in transfers {
                let bytes = transfer.range.len() * element;
                // An empty transfer is one piece.
                if offset >= bytes.max(1) {
                    continue;
                }
                more |= offset + max_bytes < bytes;
                let (peer, sends) = (job.members[transfer.peer], transfer.action.is_send());
                let known = parts
                    .iter()
                    .position(|(other, direction, _)| (*other, *direction) == (peer, sends));
                let place = known.unwrap_or_else(|| {
                    parts.push((peer, sends, 0));
                    parts.len() - 1
                });
                let part = parts[place].2;
                parts[place].2 += 1;
                pieces.push(Piece {
                    step,
                    peer,
                    action: transfer.action,
                    at: transfer.range.start * element + offset,
                    length: max_bytes.min(bytes - offset),
                    part,
                    state: PieceState::Waiting,
                });
            }
            offset += max_bytes;
        }
    }
    pieces
}

impl Piece {
    /// Whether this piece and another one touch the same bytes, and one of them writes.
    fn collides(&self, other: &Self) -> bool {
        use Action::{CombineInOrder, Send, SendInput};
        self.at < other.at + other.length
            && other.at < self.at + self.length
            && !matches!(
                (self.action, other.action),
                (SendInput, _) | (_, SendInput) | (Send, Send) | (CombineInOrder, CombineInOrder)
            )
    }

    fn is_done(&self) -> bool {
        matches!(self.state, PieceState::Done)
    }
}

impl Execution<'_> {
    fn run(&mut self, job: &Job<'_>, wait: &mut Wait<'_>) -> Result<()> {
        wait.until(self, Self::awaited, |execution| {
            Ok(match execution.advance(job)? {
                _ if execution.first == execution.pieces.len() => Poll::Done(()),
                true => Poll::Progress,
                false => Poll::Idle,
            })
        })
    }

    fn in_window(&self) -> impl Iterator<Item = &Piece> {
        let end = self.pieces.len().min(self.first + self.window);
        self.pieces[self.first..end].iter().filter(|piece| !piece.is_done())
    }

    /// The ranks that the operation waits for, and the bytes that their links have carried.
    fn awaited(&self) -> (Vec<usize>, u64) {
        let carried = self.in_window().map(|piece| match &piece.state {
            PieceState::Sending(_) => self.mesh.carried_to(piece.peer),
            PieceState::Receiving(request, _) => self.mesh.carried_from(piece.peer, request),
            _ => 0,
        });
        let carried = carried.fold(0, u64::wrapping_add);
        let begun =
            |piece: &&Piece| !matches!(piece.state, PieceState::Waiting | PieceState::Arrived(_));
        let mut ranks: Vec<_> = self.in_window().filter(begun).map(|piece| piece.peer).collect();
        if ranks.is_empty() {
            ranks = self.in_window().map(|piece| piece.peer).take(1).collect();
        }
        ranks.sort_unstable();
        ranks.dedup();
        (ranks, carried)
    }

    /// Makes progress. Returns whether there was any.
    fn advance(&mut self, job: &Job<'_>) -> std::result::Result<bool, PeerError> {
        self.advances += 1;
        let mut moved = self.end_sends()?;
        let mut at = self.first;
        while at < self.pieces.len() && at < self.first + self.window {
            let Piece { peer, state, .. } = &self.pieces[at];
            // A completed receive does not need its link any more: the sender may have left.
            if let PieceState::Receiving(request, _) = state
                && self.polled[*peer] != self.advances
                && request.done().is_none()
            {
                self.polled[*peer] = self.advances;
                moved |= self.mesh.progress(*peer, request)?;
            }
            while self.advance_one(job, at)? {
                moved = true;
            }
            at += 1;
            while self.pieces.get(self.first).is_some_and(Piece::is_done) {
                self.first += 1;
            }
            at = at.max(self.first);
        }
        Ok(moved)
    }

    /// Ends the sends whose links have completed them, so that the first ones in the plan take their places. Returns whether there
    /// were any.
    fn end_sends(&mut self) -> std::result::Result<bool, PeerError> {
        let before = self.sends;
        // Pieces to one peer mostly follow each other.
        let (mut to, mut completed) = (usize::MAX, 0);
        let end = self.pieces.len().min(self.first + self.window);
        for piece in &mut self.pieces[self.first..end] {
            let PieceState::Sending(number) = piece.state else { continue };
            if to != piece.peer {
                (to, completed) = (piece.peer, self.mesh.completed(piece.peer)?);
            }
            if completed >= number {
                piece.state = PieceState::Done;
                self.sends -= 1;
            }
        }
        Ok(self.sends < before)
    }

    /// Moves a piece to its next state, if it can proceed.
    fn advance_one(&mut self, job: &Job<'_>, at: usize) -> std::result::Result<bool, PeerError> {
        let Piece { peer, at: offset, length, .. } = self.pieces[at];
        let next = match &self.pieces[at].state {
            PieceState::Sending(_) | PieceState::Done => return Ok(false),
            PieceState::Waiting => match self.begin(job, at)? {
                PieceState::Waiting => return Ok(false),
                begun => begun,
            },
            PieceState::Receiving(request, _) => match request.done() {
                None => return Ok(false),
                Some(bytes) if bytes != length => {
                    return Err(PeerError::counts(peer, bytes, length));
                }
                Some(_) => self.arrived(at),
            },
            PieceState::Arrived(_) if self.is_blocked(at) => return Ok(false),
            PieceState::Arrived(_) if self.pieces[at].action == Action::CombineInOrder => {
                return Ok(self.combine_in_order(job, at));
            }
            PieceState::Arrived(buffer) => {
                let into = self.work.part(offset, length);
                // SAFETY: no piece before this one that is not done touches these bytes, and none after it has begun to: no
                // link has them, and there is no other reference.
                job.reduction.combine(unsafe { into.bytes() }, &buffer[..length]);
                PieceState::Done
            }
        };
        if let PieceState::Arrived(buffer) = std::mem::replace(&mut self.pieces[at].state, next) {
            self.mesh.return_buffer(buffer);
        }
        Ok(true)
    }

    /// Combines the contributions of all ranks to a range, once they have all arrived. `at` is the piece of one of them. Returns
    /// whether they are combined.
    fn combine_in_order(&mut self, job: &Job<'_>, at: usize) -> bool {
        let others = job.members.len() - 1;
        let Piece { at: offset, length, .. } = self.pieces[at];
        let belongs = |piece: &Piece| {
            piece.action == Action::CombineInOrder && piece.at == offset && piece.length == length
        };
        // The last one finds all others before it.
        if self.pieces.get(at + 1).is_some_and(belongs) {
            return false;
        }
        let first = (at + 1).saturating_sub(others);
        let mut contributions: Vec<&[u8]> = self.pieces[first..=at]
            .iter()
            .filter(|piece| belongs(piece))
            .filter_map(|piece| match &piece.state {
                PieceState::Arrived(buffer) => Some(&buffer[..length]),
                _ => None,
            })
            .collect();
        if contributions.len() < others {
            return false;
        }
        let mut own = self.mesh.take_buffer(length);
        // SAFETY: no piece before these that is not done touches these bytes, and none after them has begun to: no link has them,
        // and there is no other reference.
        let into = unsafe { self.work.part(offset, length).bytes() };
        own[..length].copy_from_slice(into);
        contributions.insert(job.rank, &own[..length]);
        job.reduction.combine_in_order(&contributions, into);
        self.mesh.return_buffer(own);
        for piece in &mut self.pieces[first..=at] {
            if let PieceState::Arrived(buffer) =
                std::mem::replace(&mut piece.state, PieceState::Done)
            {
                self.mesh.return_buffer(buffer);
            }
        }
        true
    }

    /// The next state of a piece that has arrived.
    fn arrived(&mut self, at: usize) -> PieceState {
        let piece = &mut self.pieces[at];
        match std::mem::replace(&mut piece.state, PieceState::Done) {
            PieceState::Receiving(_, buffer) if piece.action.is_combine() => {
                PieceState::Arrived(buffer)
            }
            _ => PieceState::Done,
        }
    }

    /// Starts a piece, if it can start now.
    fn begin(&mut self, job: &Job<'_>, at: usize) -> std::result::Result<PieceState, PeerError> {
        let Piece { step, peer, action, length, part, at: offset, .. } = self.pieces[at];
        let key = Key { part, ..job.key };
        if action.is_combine() {
            let mut buffer = self.mesh.take_buffer(length);
            // SAFETY: the buffer is kept with the piece, and not accessed, until the receive is done or taken back.
            let into = unsafe { Target::lend(&mut buffer[..length]) };
            return Ok(PieceState::Receiving(self.mesh.receive(peer, key, into), buffer));
        }
        let first = self.pieces[self.first].step;
        if action.is_send() && !self.plan.may_send(first, step, self.sends) || self.is_blocked(at) {
            return Ok(PieceState::Waiting);
        }
        let source = match action {
            Action::Store => {
                let request = self.mesh.receive(peer, key, self.work.part(offset, length));
                return Ok(PieceState::Receiving(request, vec![]));
            }
            Action::Send => self.work.source().part(offset, length),
            Action::SendInput | Action::Combine | Action::CombineInOrder => {
                self.input.part(offset, length)
            }
        };
        Ok(match self.mesh.send(peer, key, source)? {
            None => PieceState::Waiting,
            Some(Submitted::Done) => PieceState::Done,
            Some(Submitted::Pending(number)) => {
                self.sends += 1;
                PieceState::Sending(number)
            }
        })
    }

    /// Whether a piece must wait for an earlier one that touches the same bytes.
    fn is_blocked(&self, at: usize) -> bool {
        let piece = &self.pieces[at];
        self.pieces[self.first..at].iter().any(|one| !one.is_done() && one.collides(piece))
    }

    /// Takes back the memory that links have. Returns whether links had to be closed for it.
    fn reclaim(&mut self) -> bool {
        let mut broken = false;
        for piece in &mut self.pieces[self.first..] {
            match std::mem::replace(&mut piece.state, PieceState::Done) {
                PieceState::Sending(number) => broken |= self.mesh.abandon_send(piece.peer, number),
                PieceState::Receiving(request, _buffer) if request.done().is_none() => {
                    broken |= self.mesh.abandon_receive(piece.peer, &request);
                }
                _ => {}
            }
        }
        broken
    }
}

impl Drop for Execution<'_> {
    fn drop(&mut self) {
        self.reclaim();
    }
}
