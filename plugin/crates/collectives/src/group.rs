//! A group of ranks and its operations.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::choose::{self, Algorithm};
use crate::error::{Error, ErrorKind, Result};
use crate::link::{Key, Kind};
use crate::lock;
use crate::mesh::{MOST_BYTES, Mesh};
use crate::message::Wanted;
use crate::plan::{self, Action, Place, Plan, Transfer, consecutive};
use crate::pulse::{Failure, tell_all};
use crate::reduction::{Element, Reduction};
use crate::rendezvous::{Way, meet};
use crate::run::{Combine, Job, run};
use crate::store::Store;
use crate::{Op, bytes};

/// How long an operation may stand still, unless the group or the call says otherwise.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes that go on while the next are coming.
const PIECE: usize = 512 << 10;
/// The longest piece of an algorithm that does not cut: what a message can carry.
const WHOLE: usize = MOST_BYTES;

/// How an operation is to be done. All ranks must say the same, but for the timeout.
#[derive(Clone, Debug, Default)]
pub struct Call {
    tag: u32,
    timeout: Option<Duration>,
    algorithm: Option<Algorithm>,
}

impl Call {
    /// Operations with different tags may be in progress at the same time.
    pub fn tag(self, tag: u32) -> Self {
        Self { tag, ..self }
    }

    /// How long nothing may move in it. The group's, if this is not said.
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout: Some(timeout), ..self }
    }

    /// The algorithm of an all-reduce. By default it is chosen by the number of ranks and bytes.
    pub fn algorithm(self, algorithm: Algorithm) -> Self {
        Self { algorithm: Some(algorithm), ..self }
    }
}

/// One rank's part in a group. It can be used from several threads, with a tag for each.
pub struct Group {
    mesh: Arc<Mesh>,
    /// The numbers in the mesh.
    members: Vec<usize>,
    rank: usize,
    id: u64,
    timeout: Duration,
    /// The next operation of each tag.
    sequences: Mutex<HashMap<u32, u32>>,
    /// How many groups have been made of the same members.
    made: Mutex<HashMap<Vec<usize>, u64>>,
}

impl Group {
    /// Joins the group of all ranks that meet in this store. Returns once all have.
    ///
    /// The time is how long to wait for them, and the group's timeout from then on. A store may be used for one group at a time
    /// and under one prefix; what is left in it of earlier ones does no harm.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] naming the ranks that have not come, and the errors of the store and of the network.
    pub fn join(
        store: &dyn Store,
        rank: usize,
        size: usize,
        way: &Way,
        timeout: Duration,
    ) -> Result<Self> {
        let begun = Instant::now();
        let mesh = meet(store, rank, size, way, timeout)?;
        let mut identity = vec![];
        mesh.contacts()
            .iter()
            .for_each(|contact| bytes::put(&mut identity, &contact.id.to_le_bytes()));
        let group = Self {
            members: (0..size).collect(),
            mesh: Arc::new(mesh),
            rank,
            id: digest(&identity),
            timeout,
            sequences: Mutex::default(),
            made: Mutex::default(),
        };
        // Whoever returns first may be the one that serves the store.
        let left = timeout.saturating_sub(begun.elapsed()).max(Duration::from_secs(1));
        group.barrier(&Call::default().timeout(left))?;
        Ok(group)
    }

    /// This process's number in the group, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// A rank, for people: its host and process.
    pub fn describe(&self, rank: usize) -> String {
        self.members
            .get(rank)
            .map_or_else(|| format!("no rank {rank}"), |member| self.mesh.describe(*member))
    }

    /// How long an operation may stand still, unless its call says otherwise.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The error that ended the group, if it has ended: nothing more can be done with it.
    pub fn failure(&self) -> Option<Error> {
        self.mesh.pulse().failure().map(|failure| self.renumbered(failure.error()))
    }

    /// Ends the group for all ranks: their operations fail with this reason.
    pub fn abort(&self, reason: &str) {
        let text = format!("{} aborted: {reason}", self.mesh.describe(self.mesh.own()));
        let failure = Failure { kind: ErrorKind::Aborted, ranks: vec![], text };
        let failure = self.mesh.pulse().fail(failure);
        tell_all(self.mesh.contacts(), self.mesh.own(), &failure, TIMEOUT.min(self.timeout));
    }

    /// A group of some of the ranks, which are numbered in the order given; `None` on the others. It costs no message, and uses
    /// this group's connections: when one fails, so does the other. The ranks of the new group must make groups of the same
    /// ranks in the same order.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] when a rank is not there or is named twice.
    pub fn sub_group(&self, ranks: &[usize]) -> Result<Option<Self>> {
        let mut members = vec![];
        for rank in ranks {
            let Some(member) = self.members.get(*rank) else {
                return Err(Error::argument(format!(
                    "there is no rank {rank} in a group of {}",
                    self.size()
                )));
            };
            if members.contains(member) {
                return Err(Error::argument(format!("rank {rank} is named twice")));
            }
            members.push(*member);
        }
        let Some(rank) = ranks.iter().position(|rank| *rank == self.rank) else { return Ok(None) };
        let made = {
            let mut made = lock(&self.made);
            let made = made.entry(members.clone()).or_insert(0);
            *made += 1;
            *made
        };
        let mut identity = self.id.to_le_bytes().to_vec();
        identity.extend_from_slice(&made.to_le_bytes());
        bytes::put_list(&mut identity, members.iter());
        Ok(Some(Self {
            mesh: Arc::clone(&self.mesh),
            members,
            rank,
            id: digest(&identity),
            timeout: self.timeout,
            sequences: Mutex::default(),
            made: Mutex::default(),
        }))
    }

    /// The group of all ranks that give the same color, in the order of their numbers here; `None` without one. All ranks call it.
    ///
    /// # Errors
    /// As any operation.
    pub fn split(&self, color: Option<u32>, call: &Call) -> Result<Option<Self>> {
        let own = color.map_or(u64::MAX, u64::from);
        let mut colors = vec![0; 8 * self.size()];
        colors[8 * self.rank..][..8].copy_from_slice(&own.to_le_bytes());
        self.allgather(&mut colors, call)?;
        let (colors, _) = colors.as_chunks::<8>();
        let same: Vec<usize> = colors
            .iter()
            .enumerate()
            .filter(|(_, other)| u64::from_le_bytes(**other) == own)
            .map(|(rank, _)| rank)
            .collect();
        if color.is_some() { self.sub_group(&same) } else { Ok(None) }
    }

    /// Combines what all ranks have: afterwards all have the same.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] when the bytes are no whole number of elements; otherwise an error after which
    /// [`Error::is_group_usable`] says whether to go on. What is in the buffer then is undefined.
    pub fn allreduce(&self, data: &mut [u8], reduction: &Reduction<'_>, call: &Call) -> Result<()> {
        let count = elements(data.len(), reduction)?;
        let algorithm =
            call.algorithm.unwrap_or_else(|| choose::allreduce(self.size(), data.len()));
        let (plan, piece) = match algorithm {
            Algorithm::Ring => (plan::allreduce_ring(self.place(), count), WHOLE),
            Algorithm::RingChunked => (plan::allreduce_ring(self.place(), count), PIECE),
            Algorithm::HalvingDoubling => {
                (plan::allreduce_halving_doubling(self.place(), count), PIECE)
            }
            Algorithm::RecursiveDoubling => {
                (plan::allreduce_recursive_doubling(self.place(), count), PIECE)
            }
            Algorithm::Bcube { base } => {
                if base < 2 {
                    return Err(Error::argument(format!("bcube with base {base}: 2 or more")));
                }
                (plan::allreduce_bcube(self.place(), count, base), PIECE)
            }
        };
        self.reducing("allreduce", &plan, piece, data, reduction, call)
    }

    /// [`Group::allreduce`] of numbers.
    ///
    /// # Errors
    /// As [`Group::allreduce`].
    pub fn allreduce_of<T: Element>(&self, data: &mut [T], op: Op, call: &Call) -> Result<()> {
        self.allreduce(bytemuck::cast_slice_mut(data), &Reduction::of(T::TYPE, op), call)
    }

    /// Combines what all ranks have, for the root. What is in the others' buffers afterwards is undefined.
    ///
    /// # Errors
    /// As [`Group::allreduce`].
    pub fn reduce(
        &self,
        data: &mut [u8],
        root: usize,
        reduction: &Reduction<'_>,
        call: &Call,
    ) -> Result<()> {
        let count = elements(data.len(), reduction)?;
        self.check_root(root)?;
        let chain = choose::prefers_chain(self.size(), data.len(), PIECE);
        let plan = if chain { plan::reduce_chain } else { plan::reduce_tree };
        self.reducing("reduce", &plan(self.place(), count, root), PIECE, data, reduction, call)
    }

    /// Combines what all ranks have: afterwards rank i has part i, at its place in the buffer; what is in the rest is undefined.
    /// `counts` are the parts' numbers of elements. Gives the bytes of the own part.
    ///
    /// # Errors
    /// As [`Group::allreduce`].
    pub fn reduce_scatter(
        &self,
        data: &mut [u8],
        counts: &[usize],
        reduction: &Reduction<'_>,
        call: &Call,
    ) -> Result<Range<usize>> {
        let count = elements(data.len(), reduction)?;
        let parts = self.parts(counts, count, "elements in the buffer")?;
        let direct = choose::prefers_direct(self.size(), data.len());
        let plan = if direct { plan::reduce_scatter_direct } else { plan::reduce_scatter_ring };
        let plan = plan(self.place(), &parts);
        self.reducing("reduce_scatter", &plan, PIECE, data, reduction, call)?;
        let own = &parts[self.rank];
        Ok(own.start * reduction.element()..own.end * reduction.element())
    }

    /// Each rank has its part at its place in the buffer; afterwards all have all. The parts are of equal length.
    ///
    /// # Errors
    /// As [`Group::allreduce`].
    pub fn allgather(&self, data: &mut [u8], call: &Call) -> Result<()> {
        let lengths = self.equal(data.len())?;
        self.allgatherv(data, &lengths, call)
    }

    /// [`Group::allgather`] of parts of these lengths, in bytes.
    ///
    /// # Errors
    /// As [`Group::allreduce`].
    pub fn allgatherv(&self, data: &mut [u8], lengths: &[usize], call: &Call) -> Result<()> {
        let parts = self.parts(lengths, data.len(), "bytes in the buffer")?;
        let plan = match choose::prefers_direct(self.size(), data.len()) {
            true if self.size().is_power_of_two() => plan::allgather_recursive_doubling,
            true => plan::allgather_direct,
            false => plan::allgather_ring,
        };
        self.moving("allgather", &plan(self.place(), &parts), &[], data, call)
    }

    /// The root's bytes go to all.
    ///
    /// # Errors
    /// As [`Group::allreduce`].
    pub fn broadcast(&self, data: &mut [u8], root: usize, call: &Call) -> Result<()> {
        self.check_root(root)?;
        let chain = choose::prefers_chain(self.size(), data.len(), PIECE);
        let plan = if chain { plan::broadcast_chain } else { plan::broadcast_tree };
        self.moving("broadcast", &plan(self.place(), data.len(), root), &[], data, call)
    }

    /// Every rank's bytes go to the root, one rank's after the other's; all are of the same length. `output` is the root's.
    ///
    /// # Errors
    /// As [`Group::allreduce`].
    pub fn gather(&self, input: &[u8], output: &mut [u8], root: usize, call: &Call) -> Result<()> {
        self.gatherv(input, output, &vec![input.len(); self.size()], root, call)
    }

    /// [`Group::gather`] of parts of these lengths, in bytes.
    ///
    /// # Errors
    /// As [`Group::allreduce`].
    pub fn gatherv(
        &self,
        input: &[u8],
        output: &mut [u8],
        lengths: &[usize],
        root: usize,
        call: &Call,
    ) -> Result<()> {
        self.check_root(root)?;
        let parts = self.parts(lengths, lengths.iter().sum(), "bytes")?;
        let own = &parts[self.rank];
        exactly(input.len(), own.len(), "input")?;
        let plan = plan::gather(self.place(), &parts, root);
        if self.rank != root {
            return self.moving("gather", &plan, input, &mut [], call);
        }
        exactly(output.len(), lengths.iter().sum(), "output")?;
        output[own.clone()].copy_from_slice(input);
        self.moving("gather", &plan, &[], output, call)
    }

    /// The root's bytes go to the ranks, a part for each, of the same length. `input` is the root's.
    ///
    /// # Errors
    /// As [`Group::allreduce`].
    pub fn scatter(&self, input: &[u8], output: &mut [u8], root: usize, call: &Call) -> Result<()> {
        self.scatterv(input, output, &vec![output.len(); self.size()], root, call)
    }

    /// [`Group::scatter`] of parts of these lengths, in bytes.
    ///
    /// # Errors
    /// As [`Group::allreduce`].
    pub fn scatterv(
        &self,
        input: &[u8],
        output: &mut [u8],
        lengths: &[usize],
        root: usize,
        call: &Call,
    ) -> Result<()> {
        self.check_root(root)?;
        let parts = self.parts(lengths, lengths.iter().sum(), "bytes")?;
        let own = &parts[self.rank];
        exactly(output.len(), own.len(), "output")?;
        let plan = plan::scatter(self.place(), &parts, root);
        if self.rank != root {
            return self.moving("scatter", &plan, &[], output, call);
        }
        exactly(input.len(), lengths.iter().sum(), "input")?;
        output.copy_from_slice(&input[own.clone()]);
        self.moving("scatter", &plan, input, &mut [], call)
    }

    /// Part i of the input goes to rank i; part i of the output comes from rank i. All parts are of the same length.
    ///
    /// # Errors
    /// As [`Group::allreduce`].
    pub fn alltoall(&self, input: &[u8], output: &mut [u8], call: &Call) -> Result<()> {
        exactly(output.len(), input.len(), "output")?;
        let lengths = self.equal(input.len())?;
        self.alltoallv(input, &lengths, output, &lengths, call)
    }

    /// [`Group::alltoall`] of parts of these lengths, in bytes.
    ///
    /// # Errors
    /// As [`Group::allreduce`].
    pub fn alltoallv(
        &self,
        input: &[u8],
        sent: &[usize],
        output: &mut [u8],
        received: &[usize],
        call: &Call,
    ) -> Result<()> {
        let from = self.parts(sent, input.len(), "bytes in the input")?;
        let into = self.parts(received, output.len(), "bytes in the output")?;
        let (own, place) = (&from[self.rank], &into[self.rank]);
        exactly(place.len(), own.len(), "own part of the output")?;
        output[place.clone()].copy_from_slice(&input[own.clone()]);
        let plan = plan::alltoall(self.place(), &from, &into);
        self.moving("alltoall", &plan, input, output, call)
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// As [`Group::allreduce`].
    pub fn barrier(&self, call: &Call) -> Result<()> {
        self.moving("barrier", &plan::barrier(self.place()), &[], &mut [0], call)
    }

    /// Sends a message to another rank. Returns when the bytes may be changed: of a large message when the other has it.
    /// Messages of a tag arrive in their order.
    ///
    /// # Errors
    /// As [`Group::allreduce`]; [`ErrorKind::Argument`] for a message to oneself or of more than 1 GiB.
    pub fn send(&self, to: usize, bytes: &[u8], call: &Call) -> Result<()> {
        self.check_peer(to)?;
        if bytes.len() > WHOLE {
            return Err(Error::argument(format!(
                "a message of {} bytes: at most {WHOLE}",
                bytes.len()
            )));
        }
        let whole = Transfer { peer: to, action: Action::SendInput, range: 0..bytes.len() };
        let plan = Plan::message(whole);
        self.run("send", self.message(call), &plan, (1, WHOLE), bytes, &mut [], (&|_, _| {}, call))
    }

    /// Receives a message from another rank; gives its length, which may be less than there is room for.
    ///
    /// # Errors
    /// As [`Group::allreduce`]; one that is longer than the room ends the group.
    pub fn recv(&self, from: usize, room: &mut [u8], call: &Call) -> Result<usize> {
        self.check_peer(from)?;
        self.receive(&[self.members[from]], room, call).map(|(_, bytes)| bytes)
    }

    /// Receives a message from whichever rank sends one first; gives that rank and the message's length.
    ///
    /// # Errors
    /// As [`Group::recv`].
    pub fn recv_any(&self, room: &mut [u8], call: &Call) -> Result<(usize, usize)> {
        let others: Vec<usize> =
            self.members.iter().copied().filter(|member| *member != self.mesh.own()).collect();
        if others.is_empty() {
            return Err(Error::argument("there is no other rank to receive from"));
        }
        let (place, bytes) = self.receive(&others, room, call)?;
        let rank = self.members.iter().position(|member| *member == others[place]);
        Ok((rank.unwrap_or_default(), bytes))
    }

    fn receive(&self, from: &[usize], room: &mut [u8], call: &Call) -> Result<(usize, usize)> {
        let timeout = call.timeout.unwrap_or(self.timeout);
        let wanted = Wanted { mesh: &self.mesh, from, key: self.message(call), timeout };
        wanted.receive(room).map_err(|error| self.renumbered(error))
    }

    fn message(&self, call: &Call) -> Key {
        Key { kind: Kind::Message, group: self.id, tag: call.tag, sequence: 0, part: 0 }
    }

    fn place(&self) -> Place {
        Place { rank: self.rank, size: self.size() }
    }

    fn check_root(&self, root: usize) -> Result<()> {
        self.mesh.check_other(root, self.size())
    }

    fn check_peer(&self, rank: usize) -> Result<()> {
        self.mesh.check_other(rank, self.size())?;
        if rank == self.rank {
            return Err(Error::argument("a rank sends no messages to itself"));
        }
        Ok(())
    }

    /// Lengths of equal parts.
    fn equal(&self, bytes: usize) -> Result<Vec<usize>> {
        if !bytes.is_multiple_of(self.size()) {
            return Err(Error::argument(format!(
                "{bytes} bytes are not divisible by {} ranks",
                self.size()
            )));
        }
        Ok(vec![bytes / self.size(); self.size()])
    }

    fn parts(&self, lengths: &[usize], all: usize, what: &str) -> Result<Vec<Range<usize>>> {
        let sum = lengths.iter().try_fold(0usize, |sum, length| sum.checked_add(*length));
        if lengths.len() != self.size() || sum != Some(all) {
            return Err(Error::argument(format!(
                "{} lengths that make {sum:?}, for {} ranks and {all} {what}",
                lengths.len(),
                self.size()
            )));
        }
        Ok(consecutive(lengths))
    }

    fn reducing(
        &self,
        what: &'static str,
        plan: &Plan,
        piece: usize,
        data: &mut [u8],
        reduction: &Reduction<'_>,
        call: &Call,
    ) -> Result<()> {
        let combine = |into: &mut [u8], other: &[u8]| reduction.combine(into, other);
        let cut = (reduction.element(), piece);
        self.run(what, self.operation(call), plan, cut, &[], data, (&combine, call))
    }

    fn moving(
        &self,
        what: &'static str,
        plan: &Plan,
        input: &[u8],
        work: &mut [u8],
        call: &Call,
    ) -> Result<()> {
        self.run(what, self.operation(call), plan, (1, PIECE), input, work, (&|_, _| {}, call))
    }

    /// The next operation of the call's tag.
    fn operation(&self, call: &Call) -> Key {
        let sequence = {
            let mut sequences = lock(&self.sequences);
            let next = sequences.entry(call.tag).or_insert(0);
            let sequence = *next;
            *next = next.wrapping_add(1);
            sequence
        };
        self.mesh.raise_floor(self.id, call.tag, sequence);
        Key { kind: Kind::Collective, group: self.id, tag: call.tag, sequence, part: 0 }
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "each is what it is, and there is one place to say so"
    )]
    fn run(
        &self,
        what: &'static str,
        key: Key,
        plan: &Plan,
        (element, piece): (usize, usize),
        input: &[u8],
        work: &mut [u8],
        (combine, call): (Combine<'_>, &Call),
    ) -> Result<()> {
        let job = Job {
            mesh: &self.mesh,
            members: &self.members,
            key,
            what,
            timeout: call.timeout.unwrap_or(self.timeout),
            element,
            piece,
            combine,
        };
        run(&job, plan, input, work).map_err(|error| self.renumbered(error))
    }

    fn renumbered(&self, error: Error) -> Error {
        error.renumbered(|rank| self.members.iter().position(|member| *member == rank))
    }
}

fn elements(bytes: usize, reduction: &Reduction<'_>) -> Result<usize> {
    let element = reduction.element();
    if !bytes.is_multiple_of(element) {
        return Err(Error::argument(format!(
            "{bytes} bytes are no whole number of elements of {element} bytes"
        )));
    }
    Ok(bytes / element)
}

fn exactly(has: usize, wanted: usize, what: &str) -> Result<()> {
    if has == wanted {
        return Ok(());
    }
    Err(Error::argument(format!("the {what} has {has} bytes where {wanted} are needed")))
}

/// Fowler, Noll and Vo's 1a, 64 bits: a group's members agree on its identity without a message.
fn digest(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |digest, byte| {
        (digest ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{PATIENCE, ranks, ways};
    use crate::{DataType, MemoryStore, choose};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    const SUM: fn() -> Reduction<'static> = || Reduction::of(DataType::Int64, Op::Sum);

    fn value(rank: usize, i: usize) -> i64 {
        (rank * 1000 + i % 977) as i64
    }

    fn contribution(rank: usize, count: usize) -> Vec<i64> {
        (0..count).map(|i| value(rank, i)).collect()
    }

    fn total(size: usize, count: usize) -> Vec<i64> {
        (0..count).map(|i| (0..size).map(|rank| value(rank, i)).sum()).collect()
    }

    /// Over both transports, below and above the sizes at which they and the engine begin to cut.
    #[test]
    fn all_algorithms_add_up() {
        for way in ways() {
            for size in [1, 2, 3, 4, 5] {
                ranks(size, &way, |group| {
                    for algorithm in Algorithm::ALL {
                        for count in [0, 1, 3, 1000, 5000, 200_001] {
                            let mut data = contribution(group.rank(), count);
                            let call = Call::default().algorithm(algorithm);
                            group.allreduce_of(&mut data, Op::Sum, &call).unwrap();
                            assert!(data == total(size, count), "{algorithm:?} {size} {count}");
                        }
                    }
                });
            }
        }
    }

    #[test]
    fn all_operations_move_what_they_should() {
        for way in ways() {
            for size in [1, 2, 3, 4] {
                ranks(size, &way, |group| {
                    for length in [1, 8, 40_000, 700_000] {
                        operations(group, size, length);
                    }
                });
            }
        }
    }

    fn operations(group: &Group, size: usize, length: usize) {
        let (own, call) = (group.rank(), Call::default());
        let piece = |rank: usize| vec![rank as u8 + 1; length];
        let whole: Vec<u8> = (0..size).flat_map(piece).collect();
        for root in 0..size {
            let mut data = piece(own);
            group.broadcast(&mut data, root, &call).unwrap();
            assert!(data == piece(root));
            let mut gathered = vec![0; if own == root { whole.len() } else { 0 }];
            group.gather(&piece(own), &mut gathered, root, &call).unwrap();
            assert!(own != root || gathered == whole);
            let (input, mut output) = (if own == root { &whole[..] } else { &[] }, vec![0; length]);
            group.scatter(input, &mut output, root, &call).unwrap();
            assert!(output == piece(own));
            let mut sums = contribution(own, length);
            let bytes = bytemuck::cast_slice_mut(&mut sums);
            group.reduce(bytes, root, &SUM(), &call).unwrap();
            assert!(own != root || sums == total(size, length));
        }
        let mut data = vec![0; whole.len()];
        data[own * length..][..length].copy_from_slice(&piece(own));
        group.allgather(&mut data, &call).unwrap();
        assert!(data == whole);
        let mut output = vec![0; whole.len()];
        group.alltoall(&piece(own).repeat(size), &mut output, &call).unwrap();
        assert!(output == whole);
        let mut sums = contribution(own, length);
        let counts: Vec<usize> = plan::parts(&(0..length), size).iter().map(Range::len).collect();
        let bytes = bytemuck::cast_slice_mut(&mut sums);
        let part = group.reduce_scatter(bytes, &counts, &SUM(), &call).unwrap();
        assert!(
            sums[part.start / 8..part.end / 8] == total(size, length)[part.start / 8..part.end / 8]
        );
        group.barrier(&call).unwrap();
    }

    #[test]
    fn nobody_leaves_a_barrier_before_all_have_come() {
        let come = AtomicUsize::new(0);
        ranks(5, &Way::SharedMemory, |group| {
            for round in 1..=20 {
                come.fetch_add(1, Ordering::SeqCst);
                group.barrier(&Call::default()).unwrap();
                assert!(come.load(Ordering::SeqCst) >= 5 * round);
            }
        });
    }

    #[test]
    fn every_type_and_operation_is_the_same_on_all_ranks() {
        ranks(3, &Way::SharedMemory, |group| {
            for kind in DataType::ALL {
                for op in Op::ALL {
                    let mut data: Vec<u8> = (0..kind.bytes() * 37)
                        .map(|i| (i * 7 + group.rank() * 3) as u8 & 0x3f)
                        .collect();
                    group.allreduce(&mut data, &Reduction::of(kind, op), &Call::default()).unwrap();
                    let mut all = vec![0; 3 * data.len()];
                    all[group.rank() * data.len()..][..data.len()].copy_from_slice(&data);
                    group.allgather(&mut all, &Call::default()).unwrap();
                    assert!(all.chunks(data.len()).all(|one| one == data), "{kind:?} {op:?}");
                }
            }
            let larger = |into: &mut [u8], other: &[u8]| {
                into.iter_mut().zip(other).for_each(|(a, b)| *a = (*a).max(*b));
            };
            let mut data = [group.rank() as u8, 9 - group.rank() as u8];
            let own = Reduction::custom(1, &larger);
            group.allreduce(&mut data, &own, &Call::default()).unwrap();
            assert_eq!(data, [2, 9]);
        });
    }

    #[test]
    fn messages_come_in_order_from_one_and_from_any() {
        for way in ways() {
            ranks(3, &way, |group| {
                let (a, b) = (Call::default().tag(1), Call::default().tag(2));
                if group.rank() == 0 {
                    let mut room = vec![0; 200_000];
                    // The second tag first: what comes before it waits aside.
                    assert_eq!(group.recv(1, &mut room, &b).unwrap(), 1);
                    assert_eq!(room[0], 77);
                    for expected in [1, 100_000, 3] {
                        let bytes = group.recv(1, &mut room, &a).unwrap();
                        assert_eq!((bytes, room[0]), (expected, expected as u8));
                    }
                    let mut from: Vec<usize> =
                        (0..2).map(|_| group.recv_any(&mut room, &b).unwrap().0).collect();
                    from.sort_unstable();
                    assert_eq!(from, [1, 2]);
                } else {
                    if group.rank() == 1 {
                        group.send(0, &[1], &a).unwrap();
                        group.send(0, &[77], &b).unwrap();
                        group.send(0, &vec![100_000u32 as u8; 100_000], &a).unwrap();
                        group.send(0, &[3; 3], &a).unwrap();
                    }
                    group.send(0, &[0], &b).unwrap();
                }
                group.barrier(&Call::default()).unwrap();
            });
        }
    }

    #[test]
    fn tags_do_not_wait_for_each_other() {
        for way in ways() {
            ranks(2, &way, |group| {
                thread::scope(|scope| {
                    // In another order on each rank, and together.
                    for at in 0..4u32 {
                        let tag = if group.rank() == 0 { at } else { 3 - at };
                        scope.spawn(move || {
                            let call = Call::default().tag(tag);
                            for round in 0..20 {
                                let mut data = vec![i64::from(tag) + round; 30_000];
                                group.allreduce_of(&mut data, Op::Sum, &call).unwrap();
                                assert!(
                                    data.iter().all(|sum| *sum == 2 * (i64::from(tag) + round))
                                );
                            }
                        });
                    }
                });
            });
        }
    }

    #[test]
    fn groups_within_groups_have_numbers_of_their_own() {
        ranks(5, &Way::SharedMemory, |group| {
            let call = Call::default();
            let half = group.split(Some(group.rank() as u32 % 2), &call).unwrap().unwrap();
            assert_eq!(half.rank(), group.rank() / 2);
            let mut data = [group.rank() as i64];
            half.allreduce_of(&mut data, Op::Sum, &call).unwrap();
            assert_eq!(data[0], if group.rank() % 2 == 0 { 6 } else { 4 });
            let reversed = group.sub_group(&[4, 2, 0]).unwrap();
            assert_eq!(reversed.is_some(), group.rank() % 2 == 0);
            if let Some(reversed) = reversed {
                let mut data = [group.rank() as u8];
                reversed.broadcast(&mut data, 0, &call).unwrap();
                assert_eq!((data[0], reversed.rank()), (4, 2 - group.rank() / 2));
            }
            assert!(group.split(None, &call).unwrap().is_none());
            assert!(group.sub_group(&[0, 0]).is_err() && group.sub_group(&[5]).is_err());
        });
    }

    /// A rank that is late is named, and the group goes on when it has come.
    #[test]
    fn after_a_timeout_the_group_says_that_it_can_be_used_on() {
        let late = std::sync::Barrier::new(3);
        ranks(3, &Way::SharedMemory, |group| {
            let call = Call::default().timeout(Duration::from_millis(300));
            if group.rank() == 2 {
                late.wait();
            } else {
                let error = group.allreduce_of(&mut [1i64], Op::Sum, &call).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Timeout);
                assert!(error.is_group_usable() && group.failure().is_none(), "{error}");
                assert!(error.to_string().contains("rank 2"), "{error}");
                late.wait();
            }
            // It goes through the same operations as the others.
            let call = Call::default().timeout(Duration::from_secs(20));
            if group.rank() == 2 {
                let missed = group.allreduce_of(
                    &mut [1i64],
                    Op::Sum,
                    &call.clone().timeout(Duration::from_millis(300)),
                );
                assert!(missed.is_err_and(|error| error.is_group_usable()));
            }
            let mut data = [group.rank() as i64];
            group.allreduce_of(&mut data, Op::Sum, &call).unwrap();
            assert_eq!(data[0], 3);
        });
    }

    #[test]
    fn who_aborts_ends_it_for_all() {
        for way in ways() {
            ranks(3, &way, |group| {
                // All have joined when these have come.
                if group.rank() == 1 {
                    for other in [0, 2] {
                        group.recv(other, &mut [0], &Call::default()).unwrap();
                    }
                    group.abort("out of disk");
                }
                // Whichever is in progress ends with it.
                let sent = match group.rank() {
                    1 => Ok(()),
                    _ => group.send(1, &[1], &Call::default()),
                };
                let error = sent.and_then(|()| group.barrier(&Call::default())).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Aborted);
                assert!(error.to_string().contains("out of disk"), "{error}");
                assert!(!error.is_group_usable() && group.failure().is_some());
            });
        }
    }

    #[test]
    fn a_rank_that_leaves_is_named() {
        for way in ways() {
            let errors = Mutex::new(vec![]);
            ranks(3, &way, |group| {
                if group.rank() != 2 {
                    let call = Call::default().timeout(Duration::from_secs(5));
                    let error = group.allreduce_of(&mut [0i64; 4], Op::Sum, &call).unwrap_err();
                    lock(&errors).push(error);
                }
            });
            for error in lock(&errors).iter() {
                assert_eq!((error.kind(), error.ranks()), (ErrorKind::Lost, &[2][..]), "{error}");
            }
        }
    }

    /// Ranks end at different times: some are gone while others still look at what they got from them.
    #[test]
    fn who_leaves_after_the_last_operation_fails_nobody() {
        for way in ways() {
            for round in 0..40 {
                ranks(3 + round % 3, &way, |group| {
                    let bytes = group.size() * (PIECE + 1);
                    let call = Call::default();
                    if round % 4 == 0 {
                        group.alltoall(&vec![1; bytes], &mut vec![0; bytes], &call).unwrap();
                    } else {
                        group.barrier(&call).unwrap();
                    }
                });
            }
        }
    }

    #[test]
    fn what_came_from_a_rank_that_has_left_is_still_received() {
        for way in ways() {
            let left = std::sync::Barrier::new(2);
            let store = MemoryStore::new();
            let join = |rank| Group::join(&store, rank, 2, &way, PATIENCE).unwrap();
            let (early, late) = (Call::default().tag(1), Call::default().tag(2));
            thread::scope(|scope| {
                scope.spawn(|| {
                    let group = join(1);
                    group.broadcast(&mut [7], 1, &late).unwrap();
                    group.send(0, &[8], &early).unwrap();
                    group.send(0, &[9], &late).unwrap();
                    drop(group);
                    left.wait();
                });
                let group = join(0);
                let mut room = [0];
                // What the broadcast brings waits aside.
                group.recv(1, &mut room, &early).unwrap();
                left.wait();
                assert_eq!((group.recv(1, &mut room, &late).unwrap(), room), (1, [9]));
                group.broadcast(&mut room, 1, &late).unwrap();
                assert_eq!(room, [7]);
            });
        }
    }

    #[test]
    fn who_has_left_is_not_waited_for_when_others_may_send() {
        for way in ways() {
            let left = std::sync::Barrier::new(2);
            let store = MemoryStore::new();
            let join = |rank| Group::join(&store, rank, 3, &way, PATIENCE).unwrap();
            let call = Call::default();
            thread::scope(|scope| {
                scope.spawn(|| {
                    let group = join(1);
                    group.send(0, &[1], &call).unwrap();
                    drop(group);
                    left.wait();
                });
                scope.spawn(|| {
                    let group = join(2);
                    group.recv(0, &mut [0], &call).unwrap();
                    group.send(0, &[2], &call).unwrap();
                });
                let group = join(0);
                let mut room = [0];
                assert_eq!(group.recv_any(&mut room, &call).unwrap(), (1, 1));
                left.wait();
                let short = call.clone().timeout(Duration::from_millis(300));
                let error = group.recv_any(&mut room, &short).unwrap_err();
                assert!(error.kind() == ErrorKind::Timeout && error.ranks() == [2], "{error}");
                group.send(2, &[0], &call).unwrap();
                assert_eq!(group.recv_any(&mut room, &call).unwrap(), (2, 1));
            });
        }
    }

    #[test]
    fn different_counts_are_noticed() {
        for way in ways() {
            ranks(2, &way, |group| {
                let mut data = vec![0i64; 3 + group.rank()];
                let error = group.allreduce_of(&mut data, Op::Sum, &Call::default()).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
                assert!(error.to_string().contains("do all ranks use the same counts"), "{error}");
            });
        }
    }

    #[test]
    fn wrong_arguments_are_errors_and_do_no_harm() {
        ranks(2, &Way::SharedMemory, |group| {
            let call = Call::default();
            let wrong = [
                group.allreduce(&mut [0; 9], &SUM(), &call),
                group.broadcast(&mut [0], 2, &call),
                group.allgather(&mut [0; 3], &call),
                group.allgatherv(&mut [0; 3], &[1, usize::MAX], &call),
                group.alltoall(&[0; 2], &mut [0; 4], &call),
                group.send(group.rank(), &[0], &call),
                group.allreduce(
                    &mut [0; 8],
                    &SUM(),
                    &call.clone().algorithm(Algorithm::Bcube { base: 1 }),
                ),
            ];
            for result in wrong {
                let error = result.unwrap_err();
                assert!(error.kind() == ErrorKind::Argument && error.is_group_usable(), "{error}");
            }
            group.barrier(&call).unwrap();
        });
    }

    fn many(way: &Way) {
        ranks(32, way, |group| {
            assert_eq!(choose::allreduce(32, 8), Algorithm::RecursiveDoubling);
            let mut data = [group.rank() as i64];
            group.allreduce_of(&mut data, Op::Sum, &Call::default()).unwrap();
            assert_eq!(data[0], 31 * 16);
        });
    }

    #[test]
    fn many_ranks_share_a_process_and_its_memory() {
        many(&Way::SharedMemory);
    }

    /// With one set of threads for the transport.
    #[test]
    fn many_ranks_share_a_process_and_its_network() {
        many(&Way::Tcp(crate::Tcp::on("lo").unwrap()));
    }
}
