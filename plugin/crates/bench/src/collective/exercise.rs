//! What `evenkeel-bench collective` does again and again, and how its results are checked.

use std::sync::{Arc, Mutex};

use bytemuck::Pod;
use clap::ValueEnum;
use evenkeel_collectives::{Algorithm, Call, DataType, Error, Group, Op, Reduction, Sequence};
use evenkeel_transport::sync::lock;
use half::f16;

use crate::cli;
use crate::error::Result;

/// What can be measured. Names are Gloo's where it has the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum Benchmark {
    /// By the algorithm that is chosen for the number of ranks and bytes
    Allreduce,
    #[value(alias = "new_allreduce_ring")]
    AllreduceRing,
    AllreduceRingChunked,
    AllreduceHalvingDoubling,
    AllreduceRecursiveDoubling,
    AllreduceBcube,
    /// Each rank owns a share of the buffer (--link-rates)
    AllreduceDirect,
    AllreduceHierarchical,
    /// The buffers of each rank, without the other ranks (--inputs)
    AllreduceLocal,
    /// Rank 0 to all
    #[value(alias = "broadcast_one_to_all")]
    Broadcast,
    /// To rank 0
    Reduce,
    ReduceScatter,
    #[value(alias = "allgather_ring")]
    Allgather,
    /// Rank i has i + 1 shares
    AllgatherV,
    Alltoall,
    /// Rank i sends j + 1 shares to rank j
    AlltoallV,
    /// To rank 0
    Gather,
    /// From rank 0
    Scatter,
    #[value(alias = "barrier_all_to_all", alias = "barrier_all_to_one")]
    Barrier,
    /// A part of the buffer, in bytes, with each rank whose number differs in one of the low bits (--destinations)
    PairwiseExchange,
    /// Rank 0 to rank 1 and back
    SendrecvRoundtrip,
    /// Many messages from rank 0 to rank 1 (--messages), each awaited before the next
    SendrecvStress,
    /// The same, all started before the first is awaited
    IsendirecvStress,
}

/// What elements are.
pub(crate) trait Number: Pod + Send + Sync {
    const TYPE: DataType;
    /// Numbers up to which all whole ones are exact.
    const EXACT: usize;

    fn from_f32(number: f32) -> Self;
    fn to_f32(self) -> f32;
}

impl Number for f32 {
    const TYPE: DataType = DataType::Float32;
    const EXACT: usize = 1 << 24;

    fn from_f32(number: f32) -> Self {
        number
    }

    fn to_f32(self) -> f32 {
        self
    }
}

impl Number for f16 {
    const TYPE: DataType = DataType::Float16;
    const EXACT: usize = 1 << 11;

    fn from_f32(number: f32) -> Self {
        Self::from_f32(number)
    }

    fn to_f32(self) -> f32 {
        self.to_f32()
    }
}

/// What `pairwise_exchange` sends, as Gloo's.
impl Number for u8 {
    const TYPE: DataType = DataType::Uint8;
    const EXACT: usize = 1 << 8;

    fn from_f32(number: f32) -> Self {
        // Through a wider type, so that -1 is no number that a rank sends.
        number as i32 as Self
    }

    fn to_f32(self) -> f32 {
        self.into()
    }
}

/// What some benchmarks need to know.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Details {
    /// Buffers of each rank.
    pub(crate) inputs: usize,
    /// Base of bcube.
    pub(crate) base: usize,
    /// Messages of a stress.
    pub(crate) messages: usize,
    /// Other ranks of a pairwise exchange.
    pub(crate) destinations: usize,
    /// The tag of all calls.
    pub(crate) tag: u32,
}

/// A benchmark with its buffers.
pub(crate) struct Exercise<N> {
    benchmark: Benchmark,
    details: Details,
    /// What each rank has of an element is below this, so that all sums are exact.
    below: usize,
    rank: usize,
    ranks: usize,
    /// What a rank contributes; of an all-reduce, also the result.
    inputs: Vec<Vec<N>>,
    output: Vec<N>,
    algorithm: Option<Algorithm>,
    /// Elements, by rank, of operations whose parts differ.
    shares: Vec<usize>,
}

impl Benchmark {
    /// As it is given.
    pub(crate) fn name(self) -> String {
        cli::name(&self)
    }

    fn is_allreduce(self) -> bool {
        self.name().starts_with("allreduce")
    }
}

/// Element i of buffer k of a rank, below a limit.
fn value(below: usize, rank: usize, buffer: usize, i: usize) -> f32 {
    (((i % 89) + 3 * rank + 7 * buffer) % below) as f32
}

impl<N: Number> Exercise<N> {
    /// # Errors
    /// Says which benchmark this number of ranks does not do.
    pub(crate) fn new(
        benchmark: Benchmark,
        group: &Group,
        elements: usize,
        details: Details,
    ) -> Result<Self> {
        let (rank, ranks) = (group.rank(), group.size());
        let Details { inputs, base, destinations, .. } = details;
        let two =
            [Benchmark::SendrecvRoundtrip, Benchmark::SendrecvStress, Benchmark::IsendirecvStress];
        if two.contains(&benchmark) && ranks != 2 {
            return Err(format!("{} is for 2 ranks, there are {ranks}", benchmark.name()));
        }
        if inputs > 1 && !benchmark.is_allreduce() {
            return Err(format!("--inputs {inputs}: only an allreduce has several"));
        }
        if benchmark == Benchmark::PairwiseExchange {
            let multiple = 1 << destinations;
            if !ranks.is_multiple_of(multiple) {
                return Err(format!(
                    "pairwise_exchange with --destinations {destinations} is for {multiple} ranks or a multiple, there are {ranks}"
                ));
            }
            if elements < destinations {
                return Err(format!(
                    "pairwise_exchange of {elements} elements with --destinations {destinations}: at least one byte for each"
                ));
            }
        }
        let algorithm = match benchmark {
            Benchmark::AllreduceRing => Some(Algorithm::Ring),
            Benchmark::AllreduceRingChunked => Some(Algorithm::RingChunked),
            Benchmark::AllreduceHalvingDoubling => Some(Algorithm::HalvingDoubling),
            Benchmark::AllreduceRecursiveDoubling => Some(Algorithm::RecursiveDoubling),
            Benchmark::AllreduceBcube => Some(Algorithm::Bcube { base }),
            Benchmark::AllreduceDirect => Some(Algorithm::Direct),
            Benchmark::AllreduceHierarchical => Some(Algorithm::Hierarchical),
            _ => None,
        };
        let even: Vec<usize> =
            (0..ranks).map(|r| elements / ranks + usize::from(r < elements % ranks)).collect();
        let growing: Vec<usize> = (1..=ranks).map(|shares| shares * elements).collect();
        let (shares, own, output) = match benchmark {
            Benchmark::AllgatherV => {
                let all = growing.iter().sum();
                (growing.clone(), growing[rank], all)
            }
            Benchmark::AlltoallV => {
                let all = growing.iter().sum();
                (growing.clone(), all, growing[rank] * ranks)
            }
            Benchmark::Allgather => (vec![elements; ranks], elements, elements * ranks),
            Benchmark::Gather => {
                (vec![elements; ranks], elements, if rank == 0 { elements * ranks } else { 0 })
            }
            Benchmark::Scatter => {
                (vec![elements; ranks], if rank == 0 { elements * ranks } else { 0 }, elements)
            }
            Benchmark::Alltoall => (vec![elements; ranks], elements * ranks, elements * ranks),
            Benchmark::ReduceScatter => (even, elements, 0),
            Benchmark::Barrier => (vec![], 0, 0),
            _ => (vec![], elements, elements),
        };
        let below = (N::EXACT / (ranks * inputs)).max(1);
        let inputs = (0..inputs).map(|_| vec![N::zeroed(); own]).collect();
        let output = vec![N::zeroed(); output];
        Ok(Self { benchmark, details, below, rank, ranks, inputs, output, algorithm, shares })
    }

    /// Element i of buffer k of a rank: small whole numbers, whose sums are exact.
    fn value(&self, rank: usize, buffer: usize, i: usize) -> f32 {
        value(self.below, rank, buffer, i)
    }

    /// Fills in what this rank contributes.
    pub(crate) fn fill(&mut self) {
        for (buffer, input) in self.inputs.iter_mut().enumerate() {
            for (i, element) in input.iter_mut().enumerate() {
                *element = N::from_f32(value(self.below, self.rank, buffer, i));
            }
        }
        self.output.fill(N::from_f32(-1.0));
    }

    /// Sets all input to zero.
    pub(crate) fn clear(&mut self) {
        self.inputs.iter_mut().for_each(|input| input.fill(N::zeroed()));
    }

    /// Runs it once.
    ///
    /// # Errors
    /// Those of the operation.
    pub(crate) fn once(
        &mut self,
        group: &Arc<Group>,
        call: &Call,
    ) -> std::result::Result<(), Error> {
        let call = match self.algorithm {
            Some(algorithm) => &call.clone().algorithm(algorithm),
            None => call,
        };
        let sum = Reduction::of(N::TYPE, Op::Sum);
        let lengths = |shares: &[usize]| -> Vec<usize> {
            shares.iter().map(|share| share * size_of::<N>()).collect()
        };
        let (rank, ranks) = (self.rank, self.ranks);
        let output = bytemuck::cast_slice_mut(&mut self.output);
        let Some((first, others)) = self.inputs.split_first_mut() else { return Ok(()) };
        for other in others.iter() {
            let add =
                |(into, number): (&mut N, &N)| *into = N::from_f32(into.to_f32() + number.to_f32());
            first.iter_mut().zip(other).for_each(add);
        }
        let input: &mut [u8] = bytemuck::cast_slice_mut(first);
        match self.benchmark {
            Benchmark::Allreduce
            | Benchmark::AllreduceRing
            | Benchmark::AllreduceRingChunked
            | Benchmark::AllreduceHalvingDoubling
            | Benchmark::AllreduceRecursiveDoubling
            | Benchmark::AllreduceBcube
            | Benchmark::AllreduceDirect
            | Benchmark::AllreduceHierarchical => group.allreduce(input, &sum, call)?,
            // The sum of this rank's buffers is there already.
            Benchmark::AllreduceLocal => {}
            Benchmark::Broadcast => group.broadcast(input, 0, call)?,
            Benchmark::Reduce => group.reduce(input, 0, &sum, call)?,
            Benchmark::ReduceScatter => {
                group.reduce_scatter(input, &self.shares, &sum, call)?;
            }
            Benchmark::Allgather | Benchmark::AllgatherV => {
                let before: usize = lengths(&self.shares[..rank]).iter().sum();
                output[before..before + input.len()].copy_from_slice(input);
                group.allgatherv(output, &lengths(&self.shares), call)?;
            }
            Benchmark::Alltoall => group.alltoall(input, output, call)?,
            Benchmark::AlltoallV => {
                let received = vec![self.shares[rank]; ranks];
                let (sent, received) = (lengths(&self.shares), lengths(&received));
                group.alltoallv(input, &sent, output, &received, call)?;
            }
            Benchmark::Gather => group.gather(input, output, 0, call)?,
            Benchmark::Scatter => group.scatter(input, output, 0, call)?,
            Benchmark::Barrier => group.barrier(call)?,
            Benchmark::PairwiseExchange => {
                let destinations = self.details.destinations;
                let part = input.len() / destinations;
                let parts = input.chunks_exact(part).zip(output.chunks_exact_mut(part));
                for (bit, (sent, received)) in (0..destinations).zip(parts) {
                    let partner = rank ^ (1 << bit);
                    exchange(group, partner, sent, received, call)?;
                    // Each has what the other sent before the next part goes.
                    exchange(group, partner, &[0; 4], &mut [0; 4], call)?;
                }
            }
            Benchmark::SendrecvStress if rank == 0 => {
                for _ in 0..self.details.messages {
                    group.send(1, input, call)?;
                }
            }
            Benchmark::SendrecvStress => {
                for _ in 0..self.details.messages {
                    group.recv(0, output, call)?;
                }
            }
            Benchmark::IsendirecvStress => {
                let buffer = if rank == 0 { &mut *first } else { &mut self.output };
                start_all(group, buffer, self.details, call)?;
            }
            Benchmark::SendrecvRoundtrip if rank == 0 => {
                group.send(1, input, call)?;
                group.recv(1, output, call)?;
            }
            Benchmark::SendrecvRoundtrip => {
                group.recv(0, output, call)?;
                group.send(0, output, call)?;
            }
        }
        for other in others {
            other.copy_from_slice(first);
        }
        Ok(())
    }

    /// What is wrong with the result of [`Exercise::fill`] and then [`Exercise::once`], one line for each element.
    pub(crate) fn wrong(&self) -> Vec<String> {
        let ranks = self.ranks;
        let buffers = self.inputs.len();
        let local =
            |rank: usize, i: usize| -> f32 { (0..buffers).map(|k| self.value(rank, k, i)).sum() };
        let total = |i: usize| -> f32 { (0..ranks).map(|rank| local(rank, i)).sum() };
        let first = &self.inputs[0][..];
        let elements = first.len();
        let mine: usize = self.shares.iter().take(self.rank).sum();
        // What the result is, from which element on, and what each element should be.
        let (result, want): (&[N], Box<dyn Fn(usize) -> f32 + '_>) = match self.benchmark {
            Benchmark::AllreduceLocal => (first, Box::new(|i| local(self.rank, i))),
            benchmark if benchmark.is_allreduce() => (first, Box::new(total)),
            Benchmark::Broadcast => (first, Box::new(|i| self.value(0, 0, i))),
            Benchmark::Reduce if self.rank == 0 => (first, Box::new(total)),
            Benchmark::ReduceScatter => {
                let own = self.shares[self.rank];
                (&first[mine..mine + own], Box::new(move |i| total(mine + i)))
            }
            Benchmark::Allgather | Benchmark::AllgatherV | Benchmark::Gather => {
                (&self.output, Box::new(|i| self.gathered(i)))
            }
            Benchmark::Alltoall | Benchmark::AlltoallV => {
                let share = self.shares[self.rank];
                (&self.output, Box::new(move |i| self.value(i / share, 0, mine + i % share)))
            }
            Benchmark::Scatter => (&self.output, Box::new(move |i| self.value(0, 0, mine + i))),
            Benchmark::PairwiseExchange => {
                let destinations = self.details.destinations;
                let part = elements / destinations;
                let partner = move |i: usize| self.rank ^ (1 << (i / part));
                let result = &self.output[..part * destinations];
                (result, Box::new(move |i| self.value(partner(i), 0, i)))
            }
            Benchmark::SendrecvRoundtrip => (&self.output, Box::new(|i| self.value(0, 0, i))),
            Benchmark::SendrecvStress | Benchmark::IsendirecvStress if self.rank == 1 => {
                (&self.output, Box::new(|i| self.value(0, 0, i)))
            }
            _ => (&[], Box::new(|_| 0.0)),
        };
        let element = |i: usize| (result[i].to_f32().to_bits() != want(i).to_bits()).then_some(i);
        (0..result.len())
            .filter_map(element)
            .map(|i| {
                format!(
                    "rank {}, {elements} elements, element {i}: {} where {} is right",
                    self.rank,
                    result[i].to_f32(),
                    want(i)
                )
            })
            .collect()
    }

    /// Element i of all ranks' contributions in a row.
    fn gathered(&self, mut i: usize) -> f32 {
        for (rank, share) in self.shares.iter().enumerate() {
            if i < *share {
                return self.value(rank, 0, i);
            }
            i -= share;
        }
        f32::NAN
    }
}

/// Sends to another rank what it receives, and receives what it sends.
fn exchange(
    group: &Group,
    with: usize,
    sent: &[u8],
    received: &mut [u8],
    call: &Call,
) -> std::result::Result<(), Error> {
    let mut lengths = vec![0; group.size()];
    lengths[with] = sent.len();
    group.alltoallv(sent, &lengths, received, &lengths, call)
}

/// Starts all messages from rank 0 to rank 1, and then waits for them. All are of the same buffer.
fn start_all<N: Number>(
    group: &Arc<Group>,
    buffer: &mut Vec<N>,
    details: Details,
    call: &Call,
) -> std::result::Result<(), Error> {
    let (sends, tag) = (group.rank() == 0, details.tag);
    let sequence = if sends {
        Sequence::Sends { to: 1, tag }
    } else {
        Sequence::Receives { from: Some(0), tag }
    };
    let shared = Arc::new(Mutex::new(std::mem::take(buffer)));
    let message = |_: usize| {
        let (shared, call) = (Arc::clone(&shared), call.clone());
        group.start(sequence, move |group| {
            let mut elements = lock(&shared);
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut elements[..]);
            if sends {
                group.send(1, bytes, &call)
            } else {
                group.recv(0, bytes, &call).map(|_| ())
            }
        })
    };
    let requests: Vec<_> = (0..details.messages).map(message).collect();
    // Also after a failure: the buffer is free once all have ended.
    let ended: Vec<_> = requests.iter().map(|request| request.wait(None)).collect();
    *buffer = std::mem::take(&mut *lock(&shared));
    ended.into_iter().collect()
}
