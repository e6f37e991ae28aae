//! Executes a plan: in pieces, several at a time, each as soon as the pieces it depends on are done.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use crate::error::Result;
use crate::link::{Given, Key};
use crate::memory::{Source, Target};
use crate::mesh::{Mesh, Receipt, Trouble};
use crate::plan::{Action, Plan};
use crate::wait::{Look, Wait};

/// Pieces that are looked at together; more where a step has more transfers.
const WINDOW: usize = 16;

/// Combines what is received (second) with what is there (first); both hold the same whole number of elements.
pub(crate) type Combine<'a> = &'a (dyn Fn(&mut [u8], &[u8]) + Sync);

/// What is the same for all of an operation.
pub(crate) struct Job<'a> {
    pub(crate) mesh: &'a Mesh,
    /// The group's ranks by their numbers in the mesh.
    pub(crate) members: &'a [usize],
    /// Without its part.
    pub(crate) key: Key,
    /// The operation's name.
    pub(crate) what: &'static str,
    pub(crate) timeout: Duration,
    /// Bytes of an element of the plan's ranges.
    pub(crate) element: usize,
    /// Most bytes of a piece; the same on all ranks.
    pub(crate) piece: usize,
    pub(crate) combine: Combine<'a>,
}

struct Piece {
    peer: usize,
    action: Action,
    at: usize,
    length: usize,
    part: u32,
    state: State,
}

enum State {
    Waiting,
    /// The link needs the memory until it has finished so many loans.
    Sending(u64),
    Receiving(Arc<Receipt>, Vec<u8>),
    /// Not combined yet.
    Arrived(Vec<u8>),
    Done,
}

/// An operation on its way. Dropping it takes back all memory that was lent for it.
struct Flight<'a> {
    mesh: &'a Mesh,
    pieces: Vec<Piece>,
    /// All before are done.
    first: usize,
    window: usize,
    input: Source,
    work: Target,
    borrowed: PhantomData<(&'a [u8], &'a mut [u8])>,
}

/// Executes a plan on the memory given. Ends when all is done, or with an error, after which nothing is lent any more.
pub(crate) fn run(job: &Job<'_>, plan: &Plan, input: &[u8], work: &mut [u8]) -> Result<()> {
    let mut wait = Wait::new(job.mesh, job.what, job.key.tag, job.timeout)?;
    let largest = plan.steps().iter().map(Vec::len).max().unwrap_or(0);
    let mut flight = Flight {
        mesh: job.mesh,
        pieces: pieces(job, plan),
        first: 0,
        window: WINDOW.max(2 * largest),
        // SAFETY: parts of both are given to the mesh only, by the flight, which takes them back when it is dropped; it
        // does not outlive this call, and is not forgotten.
        input: unsafe { Source::lend(input) },
        // SAFETY: as above. The flight alone decides what reads and writes which part, see `is_blocked`.
        work: unsafe { Target::lend(work) },
        borrowed: PhantomData,
    };
    let result = flight.fly(job, &mut wait);
    let broken = flight.take_back();
    result.map_err(|error| if broken { job.mesh.half_way(error) } else { error })
}

/// The plan's transfers, step by step, each step piece by piece.
fn pieces(job: &Job<'_>, plan: &Plan) -> Vec<Piece> {
    let most = (job.piece / job.element).max(1) * job.element;
    let mut pieces = vec![];
    // Messages so far, to and from each rank.
    let mut parts: Vec<(usize, bool, u32)> = vec![];
    for step in plan.steps() {
        let mut more = true;
        let mut offset = 0;
        while more {
            more = false;
            for transfer in step {
                let bytes = transfer.range.len() * job.element;
                // One of nothing is one piece.
                if offset >= bytes.max(1) {
                    continue;
                }
                more |= offset + most < bytes;
                let (peer, sends) = (job.members[transfer.peer], transfer.action.is_send());
                let known = parts.iter().position(|(who, way, _)| (*who, *way) == (peer, sends));
                let place = known.unwrap_or_else(|| {
                    parts.push((peer, sends, 0));
                    parts.len() - 1
                });
                let part = parts[place].2;
                parts[place].2 += 1;
                pieces.push(Piece {
                    peer,
                    action: transfer.action,
                    at: transfer.range.start * job.element + offset,
                    length: most.min(bytes - offset),
                    part,
                    state: State::Waiting,
                });
            }
            offset += most;
        }
    }
    pieces
}

impl Piece {
    /// Whether it and another one touch the same bytes, and one of them writes.
    fn collides(&self, other: &Self) -> bool {
        use Action::{Send, SendInput};
        self.at < other.at + other.length
            && other.at < self.at + self.length
            && !matches!(
                (self.action, other.action),
                (SendInput, _) | (_, SendInput) | (Send, Send)
            )
    }

    fn is_done(&self) -> bool {
        matches!(self.state, State::Done)
    }
}

impl Flight<'_> {
    fn fly(&mut self, job: &Job<'_>, wait: &mut Wait<'_>) -> Result<()> {
        wait.until(self, Self::waits, |flight| {
            Ok(match flight.advance(job)? {
                _ if flight.first == flight.pieces.len() => Look::Done(()),
                true => Look::Moved,
                false => Look::Nothing,
            })
        })
    }

    fn in_window(&self) -> impl Iterator<Item = &Piece> {
        let end = self.pieces.len().min(self.first + self.window);
        self.pieces[self.first..end].iter().filter(|piece| !piece.is_done())
    }

    /// Whom the operation waits for, and how many bytes their links have carried.
    fn waits(&self) -> (Vec<usize>, u64) {
        let carried = self.in_window().map(|piece| match &piece.state {
            State::Sending(_) => self.mesh.carried_to(piece.peer),
            State::Receiving(receipt, _) => self.mesh.carried_from(piece.peer, receipt),
            _ => 0,
        });
        let carried = carried.fold(0, u64::wrapping_add);
        let begun = |piece: &&Piece| !matches!(piece.state, State::Waiting | State::Arrived(_));
        let mut ranks: Vec<_> = self.in_window().filter(begun).map(|piece| piece.peer).collect();
        if ranks.is_empty() {
            ranks = self.in_window().map(|piece| piece.peer).take(1).collect();
        }
        ranks.sort_unstable();
        ranks.dedup();
        (ranks, carried)
    }

    /// Does what can be done. Whether anything could.
    fn advance(&mut self, job: &Job<'_>) -> std::result::Result<bool, Trouble> {
        let mut moved = false;
        // Each link is asked once: pieces of one peer come in a row, mostly, and are done in their order.
        let (mut sent_to, mut heard_from) = (usize::MAX, usize::MAX);
        let mut at = self.first;
        while at < self.pieces.len() && at < self.first + self.window {
            let Piece { peer, state, .. } = &self.pieces[at];
            match state {
                // What is there needs its link no more: its sender may have left.
                State::Receiving(receipt, _) if heard_from != *peer && receipt.done().is_none() => {
                    heard_from = *peer;
                    moved |= self.mesh.progress(*peer, receipt)?;
                }
                State::Sending(_) if sent_to == *peer => {
                    at += 1;
                    continue;
                }
                _ => {}
            }
            while self.advance_one(job, at)? {
                moved = true;
            }
            if let Piece { peer, state: State::Sending(_), .. } = &self.pieces[at] {
                sent_to = *peer;
            }
            at += 1;
            while self.pieces.get(self.first).is_some_and(Piece::is_done) {
                self.first += 1;
            }
            at = at.max(self.first);
        }
        Ok(moved)
    }

    /// Brings a piece into its next state, if it can get there now.
    fn advance_one(&mut self, job: &Job<'_>, at: usize) -> std::result::Result<bool, Trouble> {
        let Piece { peer, at: offset, length, .. } = self.pieces[at];
        let next = match &self.pieces[at].state {
            State::Done => return Ok(false),
            State::Waiting => match self.begin(job, at)? {
                State::Waiting => return Ok(false),
                begun => begun,
            },
            State::Sending(number) if self.mesh.finished(peer)? >= *number => State::Done,
            State::Sending(_) => return Ok(false),
            State::Receiving(receipt, _) => match receipt.done() {
                None => return Ok(false),
                Some(bytes) if bytes != length => return Err(Trouble::counts(peer, bytes, length)),
                Some(_) => self.arrived(at),
            },
            State::Arrived(_) if self.is_blocked(at) => return Ok(false),
            State::Arrived(room) => {
                let into = self.work.part(offset, length);
                // SAFETY: no piece before this one that is not done touches these bytes, and none after it has begun to: no
                // link has them, and there is no other reference.
                (job.combine)(unsafe { into.bytes() }, &room[..length]);
                State::Done
            }
        };
        if let State::Arrived(room) = std::mem::replace(&mut self.pieces[at].state, next) {
            self.mesh.give_back(room);
        }
        Ok(true)
    }

    /// What is next for a piece that is there.
    fn arrived(&mut self, at: usize) -> State {
        let piece = &mut self.pieces[at];
        match std::mem::replace(&mut piece.state, State::Done) {
            State::Receiving(_, room) if piece.action == Action::Combine => State::Arrived(room),
            _ => State::Done,
        }
    }

    /// Begins a piece if it can begin now.
    fn begin(&self, job: &Job<'_>, at: usize) -> std::result::Result<State, Trouble> {
        let Piece { peer, action, length, part, at: offset, .. } = self.pieces[at];
        let key = Key { part, ..job.key };
        if action == Action::Combine {
            let mut room = self.mesh.room(length);
            // SAFETY: the room is kept with the piece, and not touched, until the receive is done or taken back.
            let into = unsafe { Target::lend(&mut room[..length]) };
            return Ok(State::Receiving(self.mesh.receive(peer, key, into), room));
        }
        if self.is_blocked(at) {
            return Ok(State::Waiting);
        }
        let source = match action {
            Action::Store => {
                let receipt = self.mesh.receive(peer, key, self.work.part(offset, length));
                return Ok(State::Receiving(receipt, vec![]));
            }
            Action::Send => self.work.source().part(offset, length),
            Action::SendInput | Action::Combine => self.input.part(offset, length),
        };
        Ok(match self.mesh.send(peer, key, source)? {
            None => State::Waiting,
            Some(Given::Done) => State::Done,
            Some(Given::Lent(number)) => State::Sending(number),
        })
    }

    /// Whether a piece has to wait for one before it that touches the same bytes.
    fn is_blocked(&self, at: usize) -> bool {
        let piece = &self.pieces[at];
        self.pieces[self.first..at].iter().any(|one| !one.is_done() && one.collides(piece))
    }

    /// Takes all memory back that links have. Whether links had to be ended for it.
    fn take_back(&mut self) -> bool {
        let mut broken = false;
        for piece in &mut self.pieces[self.first..] {
            match std::mem::replace(&mut piece.state, State::Done) {
                State::Sending(number) => broken |= self.mesh.abandon_send(piece.peer, number),
                State::Receiving(receipt, _room) if receipt.done().is_none() => {
                    broken |= self.mesh.abandon_receive(piece.peer, &receipt);
                }
                _ => {}
            }
        }
        broken
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        self.take_back();
    }
}
