//! The collective operations of a group.

use std::ops::Range;
use std::sync::atomic::Ordering;

use crate::Op;
use crate::algorithms::algorithm::Algorithm;
use crate::algorithms::cost_model;
use crate::algorithms::executor::{Job, execute};
use crate::algorithms::plan::{self, Plan, Position, consecutive};
use crate::algorithms::reduction::{Element, Reduction};
use crate::algorithms::shares::shares;
use crate::codec::digest;
use crate::error::{Error, Result};
use crate::links::link::{Key, Kind};
use crate::links::matching::MAX_MESSAGE_BYTES;
use crate::recorder::Called;

use super::{Call, Group, Sequence};

/// Maximum length of a piece: a rank forwards one piece while it receives the next.
const MAX_PIECE: usize = 512 << 10;
/// The same over TCP within a host. There the processors limit all ranks, and what matters is how often they wait for each other.
const MAX_PIECE_ON_HOST: usize = 1 << 20;
/// Maximum length of a piece of a direct all-reduce. A shorter one would cost its sender and receiver more time. Of longer ones, fewer
/// would be on their way to different ranks at a time, and the links would idle more.
const DIRECT_PIECE: usize = 64 << 10;
/// The piece of an algorithm that does not cut its messages: the longest message.
const UNCUT_PIECE: usize = MAX_MESSAGE_BYTES;

impl Group {
    /// Reduces the buffers of all ranks. Afterwards all ranks have the same result.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::ErrorKind::Argument) when the bytes are not a whole number of elements. After any other error
    /// [`Error::is_group_usable`] tells whether the group still works, and the contents of the buffer are undefined.
    pub fn allreduce(&self, data: &mut [u8], reduction: &Reduction<'_>, call: &Call) -> Result<()> {
        let count = elements(data.len(), reduction)?;
        let hosts = self.hosts();
        let rates = self.link_rates();
        let algorithm = call.algorithm.unwrap_or_else(|| {
            cost_model::default_allreduce(self.size(), data.len(), hosts.len(), rates.as_deref())
        });
        let mut must_agree = 0;
        let piece = if algorithm == Algorithm::Ring { UNCUT_PIECE } else { self.max_piece() };
        let plan = match algorithm {
            Algorithm::Hierarchical => {
                plan::allreduce_hierarchical(self.position(), count, hosts, |place, part| {
                    let bytes = part * reduction.element();
                    flat_plan(
                        cost_model::default_allreduce(place.size, bytes, place.size, None),
                        place,
                        part,
                    )
                })
            }
            Algorithm::Bcube { base } if base < 2 => {
                return Err(Error::argument(format!("bcube with base {base}: 2 or more")));
            }
            Algorithm::Direct => {
                let even = || std::iter::repeat_n(1, self.size()).collect();
                let rates = rates.unwrap_or_else(even);
                // Ranks with other rates would send ranges of the same lengths for other parts of the buffer.
                must_agree = rates_digest(&rates);
                let shares = shares(&rates, count);
                plan::allreduce_direct(self.position(), &shares, DIRECT_PIECE / reduction.element())
            }
            algorithm => flat_plan(algorithm, self.position(), count),
        };
        let called = Called::of("allreduce", data.len(), data.len());
        self.reduce_with((called, must_agree), &plan, piece, data, reduction, call)
    }

    /// [`Group::allreduce`] of numbers.
    ///
    /// # Errors
    /// As [`Group::allreduce`].
    pub fn allreduce_of<T: Element>(&self, data: &mut [T], op: Op, call: &Call) -> Result<()> {
        self.allreduce(bytemuck::cast_slice_mut(data), &Reduction::of(T::TYPE, op), call)
    }

    /// Reduces the buffers of all ranks to the root. Afterwards the contents of the other ranks' buffers are undefined.
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
        let chain = cost_model::prefers_chain(self.size(), data.len(), self.max_piece());
        let plan = if chain { plan::reduce_chain } else { plan::reduce_tree };
        self.reduce_with(
            (Called::of("reduce", data.len(), data.len()).with(root), root),
            &plan(self.position(), count, root),
            self.max_piece(),
            data,
            reduction,
            call,
        )
    }

    /// Reduces the buffers of all ranks and scatters the result. Afterwards rank i has part i, at its place in the buffer; the rest of
    /// the buffer is undefined. `counts` are the numbers of elements of the parts. Returns the byte range of this rank's part.
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
        let direct = cost_model::prefers_direct(self.size(), data.len());
        let plan = if direct { plan::reduce_scatter_direct } else { plan::reduce_scatter_ring };
        let plan = plan(self.position(), &parts);
        let own = &parts[self.rank];
        let own = own.start * reduction.element()..own.end * reduction.element();
        let called = Called::of("reduce_scatter", data.len(), own.len());
        self.reduce_with((called, 0), &plan, self.max_piece(), data, reduction, call)?;
        Ok(own)
    }

    /// Each rank passes its part at its place in the buffer. Afterwards all ranks have all parts. The parts have the same length.
    ///
    /// # Errors
    /// As [`Group::allreduce`].
    pub fn allgather(&self, data: &mut [u8], call: &Call) -> Result<()> {
        let lengths = self.equal_lengths(data.len())?;
        self.allgatherv(data, &lengths, call)
    }

    /// [`Group::allgather`] with parts of these lengths in bytes.
    ///
    /// # Errors
    /// As [`Group::allreduce`].
    pub fn allgatherv(&self, data: &mut [u8], lengths: &[usize], call: &Call) -> Result<()> {
        let parts = self.parts(lengths, data.len(), "bytes in the buffer")?;
        let plan = match cost_model::prefers_direct(self.size(), data.len()) {
            true if self.size().is_power_of_two() => plan::allgather_recursive_doubling,
            true => plan::allgather_direct,
            false => plan::allgather_ring,
        };
        let called = Called::of("allgather", parts[self.rank].len(), data.len());
        self.transfer(called, &plan(self.position(), &parts), &[], data, call)
    }

    /// Sends the root's buffer to all ranks.
    ///
    /// # Errors
    /// As [`Group::allreduce`].
    pub fn broadcast(&self, data: &mut [u8], root: usize, call: &Call) -> Result<()> {
        self.check_root(root)?;
        let chain = cost_model::prefers_chain(self.size(), data.len(), self.max_piece());
        let plan = if chain { plan::broadcast_chain } else { plan::broadcast_tree };
        self.transfer(
            Called::of("broadcast", data.len(), data.len()).with(root),
            &plan(self.position(), data.len(), root),
            &[],
            data,
            call,
        )
    }

    /// Gathers the inputs of all ranks at the root, in the order of the ranks. All have the same length. Only the root passes `output`.
    ///
    /// # Errors
    /// As [`Group::allreduce`].
    pub fn gather(&self, input: &[u8], output: &mut [u8], root: usize, call: &Call) -> Result<()> {
        self.gatherv(input, output, &vec![input.len(); self.size()], root, call)
    }

    /// [`Group::gather`] with inputs of these lengths in bytes.
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
        let (parts, own, all) = self.rooted_parts(lengths, root)?;
        check_length(input.len(), own.len(), "input")?;
        let plan = plan::gather(self.position(), &parts, root);
        let called = |output| Called::of("gather", input.len(), output).with(root);
        if self.rank != root {
            return self.transfer(called(0), &plan, input, &mut [], call);
        }
        check_length(output.len(), all, "output")?;
        output[own].copy_from_slice(input);
        self.transfer(called(all), &plan, &[], output, call)
    }

    /// Scatters the root's input, a part for each rank. All parts have the same length. Only the root passes `input`.
    ///
    /// # Errors
    /// As [`Group::allreduce`].
    pub fn scatter(&self, input: &[u8], output: &mut [u8], root: usize, call: &Call) -> Result<()> {
        self.scatterv(input, output, &vec![output.len(); self.size()], root, call)
    }

    /// [`Group::scatter`] with parts of these lengths in bytes.
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
        let (parts, own, all) = self.rooted_parts(lengths, root)?;
        check_length(output.len(), own.len(), "output")?;
        let plan = plan::scatter(self.position(), &parts, root);
        let called = |input| Called::of("scatter", input, own.len()).with(root);
        if self.rank != root {
            return self.transfer(called(0), &plan, &[], output, call);
        }
        check_length(input.len(), all, "input")?;
        output.copy_from_slice(&input[own.clone()]);
        self.transfer(called(all), &plan, input, &mut [], call)
    }

    /// Sends part i of the input to rank i; part i of the output comes from rank i. All parts have the same length.
    ///
    /// # Errors
    /// As [`Group::allreduce`].
    pub fn alltoall(&self, input: &[u8], output: &mut [u8], call: &Call) -> Result<()> {
        check_length(output.len(), input.len(), "output")?;
        let lengths = self.equal_lengths(input.len())?;
        self.alltoallv(input, &lengths, output, &lengths, call)
    }

    /// [`Group::alltoall`] with parts of these lengths in bytes.
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
        check_length(place.len(), own.len(), "own part of the output")?;
        output[place.clone()].copy_from_slice(&input[own.clone()]);
        let plan = plan::alltoall(self.position(), &from, &into);
        let called = Called::of("alltoall", input.len(), output.len());
        self.transfer(called, &plan, input, output, call)
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// As [`Group::allreduce`].
    pub fn barrier(&self, call: &Call) -> Result<()> {
        let called = Called::of("barrier", 0, 0);
        self.transfer(called, &plan::barrier(self.position()), &[], &mut [0], call)
    }

    fn position(&self) -> Position {
        Position { rank: self.rank, size: self.size() }
    }

    fn check_root(&self, root: usize) -> Result<()> {
        self.mesh.check_rank(root, self.size())
    }

    /// The parts of a gather or scatter, this rank's part, and the total number of bytes.
    fn rooted_parts(
        &self,
        lengths: &[usize],
        root: usize,
    ) -> Result<(Vec<Range<usize>>, Range<usize>, usize)> {
        self.check_root(root)?;
        // An overflowing sum of lengths is refused by `parts`.
        let all = lengths.iter().fold(0usize, |all, length| all.saturating_add(*length));
        let parts = self.parts(lengths, all, "bytes")?;
        let own = parts[self.rank].clone();
        Ok((parts, own, all))
    }

    /// The lengths of equal parts.
    fn equal_lengths(&self, bytes: usize) -> Result<Vec<usize>> {
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

    /// `must_agree` is the operation's root, or what else all ranks must pass alike; 0 if there is nothing.
    fn reduce_with(
        &self,
        (called, must_agree): (Called, usize),
        plan: &Plan,
        piece: usize,
        data: &mut [u8],
        reduction: &Reduction<'_>,
        call: &Call,
    ) -> Result<()> {
        let called = Called { data_type: reduction.data_type(), ..called };
        let key = self.operation(digest_of(called.what, must_agree, reduction.code()), call);
        self.run(called, key, plan, piece, &[], data, (reduction, call))
    }

    /// As [`Group::reduce_with`], without a reduction.
    fn transfer(
        &self,
        called: Called,
        plan: &Plan,
        input: &[u8],
        work: &mut [u8],
        call: &Call,
    ) -> Result<()> {
        self.run(
            called,
            self.operation(digest_of(called.what, called.peer.unwrap_or(0), [0; 2]), call),
            plan,
            self.max_piece(),
            input,
            work,
            (&Reduction::none(), call),
        )
    }

    /// Maximum length of a piece, the same on all ranks.
    fn max_piece(&self) -> usize {
        if self.mesh.is_plain_tcp() && self.hosts.len() == 1 {
            MAX_PIECE_ON_HOST
        } else {
            MAX_PIECE
        }
    }

    /// The key of the next operation of the call's tag.
    fn operation(&self, operation: u16, call: &Call) -> Key {
        let sequence = self.queues.take_number(call.tag);
        let (kind, group, tag) = (Kind::Collective, self.id, call.tag);
        let key = Key { kind, group, tag, sequence, part: 0, operation };
        self.mesh.begin_operation(&key);
        key
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "the arguments differ between operations, and this is the one place that takes them"
    )]
    pub(super) fn run(
        &self,
        called: Called,
        key: Key,
        plan: &Plan,
        piece: usize,
        input: &[u8],
        work: &mut [u8],
        (reduction, call): (&Reduction<'_>, &Call),
    ) -> Result<()> {
        self.check_usable()?;
        let job = Job {
            mesh: &self.mesh,
            members: &self.members,
            rank: self.rank,
            key,
            what: called.what,
            timeout: call.timeout.unwrap_or(self.timeout),
            reduction,
            piece,
        };
        let (sequence, number) = match (key.kind, called.peer) {
            (Kind::Message, Some(to)) => {
                (Sequence::Sends { to, tag: call.tag }, self.record.message_number(to, false))
            }
            _ => (Sequence::Collectives { tag: call.tag }, Some(key.sequence)),
        };
        let record = self.record.start(sequence, call, called, number);
        let outcome = execute(&job, plan, input, work).map_err(|error| {
            self.unfinished.store(true, Ordering::Relaxed);
            self.renumbered(error)
        });
        self.record.end(record, outcome.as_ref().err());
        outcome
    }
}

/// The digest of what all ranks must call alike. Not 0, which earlier versions sent.
fn digest_of(what: &str, must_agree: usize, reduction: [u8; 2]) -> u16 {
    let all = [what.as_bytes(), &(must_agree as u32).to_le_bytes(), &reduction].concat();
    let digest = digest(&all);
    ((digest ^ digest >> 16 ^ digest >> 32 ^ digest >> 48) as u16).max(1)
}

/// The digest of the rates that ranks use for the shares of an all-reduce.
fn rates_digest(rates: &[u64]) -> usize {
    let bytes: Vec<u8> = rates.iter().flat_map(|rate| rate.to_le_bytes()).collect();
    digest(&bytes) as usize
}

fn elements(bytes: usize, reduction: &Reduction<'_>) -> Result<usize> {
    let element = reduction.element();
    if !bytes.is_multiple_of(element) {
        return Err(Error::argument(format!(
            "{bytes} bytes are not a whole number of elements of {element} bytes"
        )));
    }
    Ok(bytes / element)
}

fn check_length(has: usize, wanted: usize, what: &str) -> Result<()> {
    if has == wanted {
        return Ok(());
    }
    Err(Error::argument(format!("the {what} has {has} bytes where {wanted} are needed")))
}

/// The plan of an algorithm that ignores which ranks share a host.
fn flat_plan(algorithm: Algorithm, at: Position, count: usize) -> Plan {
    match algorithm {
        Algorithm::Ring | Algorithm::RingChunked => plan::allreduce_ring(at, count),
        Algorithm::HalvingDoubling => plan::allreduce_halving_doubling(at, count),
        Algorithm::RecursiveDoubling => plan::allreduce_recursive_doubling(at, count),
        Algorithm::Bcube { base } => plan::allreduce_bcube(at, count, base),
        Algorithm::Direct => plan::allreduce_direct(at, &plan::parts(&(0..count), at.size), count),
        Algorithm::Hierarchical => {
            let alone = vec![(0..at.size).collect()];
            plan::allreduce_hierarchical(at, count, &alone, plan::allreduce_recursive_doubling)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::{run_ranks, run_ranks_with, transports};
    use crate::{Auto, DataType, ErrorKind, Tcp, TransportKind};
    use evenkeel_reduction_kernels::reduce;
    use evenkeel_testkit::TestRng;
    use evenkeel_transport::sync::lock;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::thread;
    use std::time::Duration;

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

    /// Over all transports, below and above the sizes at which they and the executor begin to cut.
    #[test]
    fn every_allreduce_algorithm_sums() {
        for transport in transports() {
            for size in [1, 2, 3, 4, 5] {
                run_ranks(size, &transport, |group| {
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

    /// Ranks are spread unevenly over hosts. Ranks of the same host use shared memory.
    #[test]
    fn hierarchical_allreduce_sums_over_hosts() {
        let on = |host: &str| TransportKind::Auto(Auto::new(Tcp::on("lo").unwrap()).on_host(host));
        for (size, hosts) in [(2, 2), (4, 2), (5, 2), (6, 3)] {
            let transport = |rank: usize| on(["a", "b", "c"][rank % hosts]);
            run_ranks_with(size, transport, |group| {
                assert_eq!(group.hosts().len(), hosts);
                for count in [1, 3, 5000, 200_001] {
                    let mut data = contribution(group.rank(), count);
                    group.allreduce_of(&mut data, Op::Sum, &Call::default()).unwrap();
                    assert!(data == total(size, count), "{size} on {hosts}, {count}");
                }
                check_every_collective(group, size, 40_000);
            });
        }
    }

    #[test]
    fn every_collective_gives_the_right_result() {
        for transport in transports() {
            for size in [1, 2, 3, 4] {
                run_ranks(size, &transport, |group| {
                    for length in [1, 8, 40_000, 700_000] {
                        check_every_collective(group, size, length);
                    }
                });
            }
        }
    }

    fn check_every_collective(group: &Group, size: usize, length: usize) {
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
    fn barrier_waits_for_all_ranks() {
        let arrived = AtomicUsize::new(0);
        run_ranks(5, &TransportKind::SharedMemory, |group| {
            for round in 1..=20 {
                arrived.fetch_add(1, Ordering::SeqCst);
                group.barrier(&Call::default()).unwrap();
                assert!(arrived.load(Ordering::SeqCst) >= 5 * round);
            }
        });
    }

    /// The inputs are small whole numbers, which every type represents exactly, with sums and products that it does as well. So the
    /// expected bytes do not depend on the order of the ranks.
    #[test]
    fn every_type_and_reduction_gives_the_right_value() {
        const SIZE: usize = 3;
        const COUNT: usize = 37;
        let input = |rank: usize, i: usize| ((i + rank) % 4) as u8;
        run_ranks(SIZE, &TransportKind::SharedMemory, |group| {
            for kind in DataType::ALL {
                for op in Op::ALL {
                    let encoded = |value: &dyn Fn(usize) -> u8| -> Vec<u8> {
                        (0..COUNT).flat_map(|i| encode(kind, value(i))).collect()
                    };
                    let mut data = encoded(&|i| input(group.rank(), i));
                    group.allreduce(&mut data, &Reduction::of(kind, op), &Call::default()).unwrap();
                    let expected = encoded(&|i| {
                        let inputs = (0..SIZE).map(|rank| input(rank, i));
                        match op {
                            Op::Sum => inputs.sum(),
                            Op::Prod => inputs.product(),
                            Op::Max => inputs.max().unwrap(),
                            Op::Min => inputs.min().unwrap(),
                        }
                    });
                    assert_eq!(data, expected, "{kind:?} {op:?}");
                }
            }
        });
    }

    /// Values that are rounded in every step are the same on all ranks too.
    #[test]
    fn every_type_and_reduction_agrees_on_all_ranks() {
        run_ranks(3, &TransportKind::SharedMemory, |group| {
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
        });
    }

    /// Random bits of an element: numbers of all magnitudes, infinities and NaNs of every kind.
    fn bits(kind: DataType, rank: usize, count: usize) -> Vec<u8> {
        TestRng::new(rank as u64).bytes(count * kind.bytes())
    }

    /// What the owner of any share must compute: the contributions in the order of the ranks, rounded once.
    fn reduced_in_order(kind: DataType, op: Op, size: usize, count: usize) -> Vec<u8> {
        let inputs: Vec<Vec<u8>> = (0..size).map(|rank| bits(kind, rank, count)).collect();
        let sources: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
        let mut into = vec![0; count * kind.bytes()];
        reduce(kind, op, &sources, &mut into).unwrap();
        into
    }

    fn direct() -> Call {
        Call::default().algorithm(Algorithm::Direct)
    }

    /// The result has the bits of a reduction in the order of the ranks, whoever owns which share.
    #[test]
    fn direct_allreduce_has_the_same_bits_for_all_shares() {
        const COUNT: usize = 257;
        for size in 2..=9 {
            run_ranks(size, &TransportKind::SharedMemory, |group| {
                let me = group.rank();
                let rates: [&dyn Fn(usize) -> u64; 4] = [
                    &|_| 1,
                    &|rank| 100 + rank as u64 * 10,
                    &|rank| if rank == size / 2 { 6 } else { 10 },
                    &|rank| if rank == 0 { 1000 } else { 1 },
                ];
                for rate in rates {
                    group.set_link_rate(rate(me), &Call::default()).unwrap();
                    for kind in DataType::ALL {
                        for op in Op::ALL {
                            let mut data = bits(kind, me, COUNT);
                            group
                                .allreduce(&mut data, &Reduction::of(kind, op), &direct())
                                .unwrap();
                            let want = reduced_in_order(kind, op, size, COUNT);
                            assert!(data == want, "{kind:?} {op:?}, {size} ranks");
                        }
                    }
                }
            });
        }
    }

    /// In several rounds, over all transports; some ranks own nothing.
    #[test]
    fn direct_allreduce_of_any_length_sums_with_uneven_shares() {
        for transport in transports() {
            for (size, rates) in [(1, &[5][..]), (2, &[1, 9]), (3, &[2, 4, 5]), (4, &[9, 9, 1, 8])]
            {
                run_ranks(size, &transport, |group| {
                    group.set_link_rate(rates[group.rank()], &Call::default()).unwrap();
                    for count in [0, 1, 3, 5000, 600_001] {
                        let mut data = contribution(group.rank(), count);
                        group.allreduce_of(&mut data, Op::Sum, &direct()).unwrap();
                        assert!(data == total(size, count), "{size} ranks, {count} elements");
                    }
                });
            }
        }
    }

    /// Members of a sub-group keep their rates, in its order. Without the rate of one rank, the shares are equal again.
    #[test]
    fn link_rates_follow_the_ranks() {
        run_ranks(4, &TransportKind::SharedMemory, |group| {
            let call = Call::default();
            assert_eq!(group.link_rates(), None);
            group.set_link_rate(10 + group.rank() as u64, &call).unwrap();
            assert_eq!(group.link_rates().as_deref(), Some(&[10, 11, 12, 13][..]));
            if let Some(some) = group.sub_group(&[3, 0, 2]).unwrap() {
                assert_eq!(some.link_rates().as_deref(), Some(&[13, 10, 12][..]));
                let mut data = contribution(some.rank(), 1000);
                some.allreduce_of(&mut data, Op::Sum, &direct()).unwrap();
                assert!(data == total(3, 1000));
            }
            group.set_link_rate(if group.rank() == 2 { 0 } else { 5 }, &call).unwrap();
            assert_eq!(group.link_rates(), None);
        });
    }

    /// Only a direct all-reduce rounds once, so the bits tell whether a call took it that names no algorithm.
    #[test]
    fn known_link_rates_choose_a_direct_allreduce_where_it_pays() {
        const COUNT: usize = 300_000;
        run_ranks(4, &TransportKind::SharedMemory, |group| {
            let me = group.rank();
            let want = reduced_in_order(DataType::Bfloat16, Op::Sum, 4, COUNT);
            for (rates, is_direct) in [([10, 10, 10, 2], true), ([10; 4], false)] {
                group.set_link_rate(rates[me], &Call::default()).unwrap();
                let mut data = bits(DataType::Bfloat16, me, COUNT);
                let sum = Reduction::of(DataType::Bfloat16, Op::Sum);
                group.allreduce(&mut data, &sum, &Call::default()).unwrap();
                assert_eq!(data == want, is_direct, "links of {rates:?}");
            }
        });
    }

    /// The lengths of the shares agree between the two ranks, so only their rates differ.
    #[test]
    fn different_link_rates_are_a_mismatch() {
        run_ranks(2, &TransportKind::SharedMemory, |group| {
            *lock(&group.link_rates) = Some(Arc::from([1, 2 + group.rank() as u64]));
            let done = group.allreduce_of(&mut [1i64; 8], Op::Sum, &direct());
            let error = done.and_then(|()| group.barrier(&Call::default())).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
        });
    }

    #[test]
    fn lost_owner_of_a_share_is_named() {
        for transport in transports() {
            run_ranks(4, &transport, |group| {
                group.set_link_rate(10 + group.rank() as u64, &Call::default()).unwrap();
                if group.rank() != 3 {
                    let call = direct().timeout(Duration::from_secs(5));
                    let mut data = vec![1i64; 100_000];
                    let error = group.allreduce_of(&mut data, Op::Sum, &call).unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
                    assert_eq!(error.ranks(), [3], "{error}");
                }
            });
        }
    }

    #[test]
    fn custom_reduction_is_applied() {
        run_ranks(3, &TransportKind::SharedMemory, |group| {
            let larger = |into: &mut [u8], other: &[u8]| {
                into.iter_mut().zip(other).for_each(|(a, b)| *a = (*a).max(*b));
            };
            let mut data = [group.rank() as u8, 9 - group.rank() as u8];
            let own = Reduction::custom(1, &larger);
            for call in [Call::default(), direct()] {
                group.allreduce(&mut data, &own, &call).unwrap();
                assert_eq!(data, [2, 9]);
            }
        });
    }

    /// The bytes of a whole number from 0 to 8 as an element of a type.
    fn encode(kind: DataType, value: u8) -> Vec<u8> {
        // Sign, exponent and mantissa of a float with this many exponent and mantissa bits.
        let float = |exponent_bits: u32, mantissa_bits: u32| {
            let Some(exponent) = value.checked_ilog2() else { return 0 };
            let bias = (1u32 << (exponent_bits - 1)) - 1;
            let fraction = u32::from(value) - (1 << exponent);
            (exponent + bias) << mantissa_bits | fraction << mantissa_bits >> exponent
        };
        match kind {
            DataType::Int8 | DataType::Uint8 => vec![value],
            DataType::Int32 | DataType::Uint32 => u32::from(value).to_le_bytes().to_vec(),
            DataType::Int64 | DataType::Uint64 => u64::from(value).to_le_bytes().to_vec(),
            DataType::Float16 => (float(5, 10) as u16).to_le_bytes().to_vec(),
            DataType::Float32 => f32::from(value).to_le_bytes().to_vec(),
            DataType::Float64 => f64::from(value).to_le_bytes().to_vec(),
            DataType::Bfloat16 => (float(8, 7) as u16).to_le_bytes().to_vec(),
            DataType::Float8E4m3 => vec![float(4, 3) as u8],
            DataType::Float8E5m2 => vec![float(5, 2) as u8],
        }
    }

    #[test]
    fn operations_with_different_tags_run_concurrently() {
        for transport in transports() {
            run_ranks(2, &transport, |group| {
                thread::scope(|scope| {
                    // In a different order on each rank, and concurrently.
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
    fn different_counts_are_a_mismatch() {
        for transport in transports() {
            run_ranks(2, &transport, |group| {
                let mut data = vec![0i64; 3 + group.rank()];
                let error = group.allreduce_of(&mut data, Op::Sum, &Call::default()).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
                assert!(error.to_string().contains("do all ranks use the same counts"), "{error}");
            });
        }
    }

    /// The lengths agree, so only what was called differs. A rank that has already returned finds it in its next call.
    #[test]
    fn different_operations_are_a_mismatch() {
        type Operation = fn(&Group, &mut [u8]) -> Result<()>;
        fn allreduce(group: &Group, data: &mut [u8], kind: DataType, op: Op) -> Result<()> {
            group.allreduce(data, &Reduction::of(kind, op), &Call::default())
        }
        fn broadcast(group: &Group, data: &mut [u8], root: usize) -> Result<()> {
            group.broadcast(data, root, &Call::default())
        }
        let pairs: [[Operation; 2]; 4] = [
            [
                |group, data| allreduce(group, data, DataType::Int64, Op::Sum),
                |group, data| broadcast(group, data, 1),
            ],
            [|group, data| broadcast(group, data, 0), |group, data| broadcast(group, data, 1)],
            [
                |group, data| allreduce(group, data, DataType::Int64, Op::Sum),
                |group, data| allreduce(group, data, DataType::Int64, Op::Max),
            ],
            [
                |group, data| allreduce(group, data, DataType::Int64, Op::Sum),
                |group, data| allreduce(group, data, DataType::Float64, Op::Sum),
            ],
        ];
        for transport in transports() {
            for operations in pairs {
                run_ranks(2, &transport, |group| {
                    let done = operations[group.rank()](group, &mut [0; 8]);
                    let error = done.and_then(|()| group.barrier(&Call::default())).unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
                    assert!(error.to_string().contains("the same operations"), "{error}");
                });
            }
        }
    }

    #[test]
    fn invalid_arguments_leave_the_group_usable() {
        run_ranks(2, &TransportKind::SharedMemory, |group| {
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
}
