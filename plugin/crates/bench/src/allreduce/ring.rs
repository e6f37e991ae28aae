//! A ring of ranks over a plugin, and all-reduce over it: every rank sends to the next and receives
//! from the one before, slice by slice, several in flight, as NCCL's ring does through its proxy.
//!
//! Step `s` of `2(n-1)`: send block `rank - s`, receive block `rank - s - 1`, both modulo `n`. In
//! the first `n-1` steps what arrives is reduced into the block, in the others it is the block's
//! result. So what is sent in a step is what arrived in the step before, and what arrives can be
//! sent on slice by slice.

use std::collections::VecDeque;
use std::ops::Range;

use crate::element::{Op, Type};
use crate::error::Result;
use crate::links::{Link, Listening, Request};
use crate::plugin_host::{Plugin, Region};
use crate::ranks::bootstrap::World;
use crate::ranks::wait::Driver;

/// The longest message, bytes: a multiple of every element's size.
const SLICE: usize = 1 << 20;
/// Messages in flight in each direction.
const DEPTH: usize = 4;

/// The connections of one rank.
pub(crate) struct Ring {
    rank: usize,
    ranks: usize,
    /// From the rank before, and to the next one. None where there is only one rank.
    ends: Option<[Link; 2]>,
    /// A place for each message that is to be reduced.
    scratch: Region,
    next: String,
    previous: String,
    driver: Driver,
    sent: u64,
}

/// The buffers of an all-reduce.
pub(crate) struct Buffers<'a> {
    /// What this rank contributes; the result's buffer itself for an operation in place.
    pub(crate) own: &'a Region,
    /// Where the result goes.
    pub(crate) result: &'a Region,
    /// Whether both are the same.
    pub(crate) in_place: bool,
}

impl Ring {
    /// Connects to the neighbours through one of the plugin's devices. All ranks call it together.
    /// The driver is that of the operations.
    ///
    /// # Errors
    /// Names the neighbour that could not be connected to, and what the plugin said.
    pub(crate) fn connect(
        plugin: &Plugin,
        device: usize,
        driver: Driver,
        world: &mut World,
    ) -> Result<Self> {
        let (rank, ranks) = (world.rank(), world.ranks().len());
        let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let mut ring = Self {
            rank,
            ranks,
            ends: None,
            scratch: Region::new(SLICE * DEPTH)?,
            next: world.describe(next),
            previous: world.describe(previous),
            driver,
            sent: 0,
        };
        if ranks > 1 {
            let listening = Listening::start(plugin, device, 1, world)?;
            let links = listening.open(plugin, device, (previous, next), world)?;
            let ends: [Link; 2] = links.try_into().map_err(|_| "a ring of other links")?;
            ends[0].register(&ring.scratch)?;
            ring.ends = Some(ends);
        }
        Ok(ring)
    }

    /// Makes a buffer known to both connections.
    pub(crate) fn register(&self, region: &Region) -> Result<()> {
        self.ends.iter().flatten().try_for_each(|link| link.register(region))
    }

    /// The links from the rank before and to the next one; none where there is only one rank.
    pub(crate) fn ends(&self) -> Option<&[Link; 2]> {
        self.ends.as_ref()
    }

    /// Bytes of all-reduces that this rank has sent through the plugin.
    pub(crate) fn sent(&self) -> u64 {
        self.sent
    }

    /// Reduces `count` elements of all ranks into every rank's result.
    ///
    /// # Errors
    /// Names the neighbour whose transfer broke, or that made no progress within the world's
    /// timeout.
    pub(crate) fn all_reduce(
        &mut self,
        world: &mut World,
        buffers: &Buffers<'_>,
        count: usize,
        kind: Type,
        op: Op,
    ) -> Result<()> {
        let Some([receiver, sender]) = &self.ends else {
            return copy(buffers, count * kind.bytes());
        };
        let plan = Plan { rank: self.rank, ranks: self.ranks, count, element: kind.bytes() };
        let mut sends = plan.moves(Plan::sent_block);
        let mut receives = plan.moves(Plan::received_block);
        let (mut sending, mut receiving) =
            (VecDeque::with_capacity(DEPTH), VecDeque::with_capacity(DEPTH));
        // Moves done in each direction, and the slot of scratch for the next reduction.
        let (mut sent, mut received, mut slot) = (Done::default(), Done::default(), 0);
        let mut next_send = sends.next();
        let mut next_receive = receives.next();
        let mut wait = self.driver.wait();
        loop {
            let mut moved = false;
            while receiving.len() < DEPTH
                && let Some(step) = &next_receive
                && plan.may_receive(step, &sent)
            {
                let (region, part) = if plan.reduces(step.step) {
                    let start = slot % DEPTH * SLICE;
                    (&self.scratch, start..start + step.part.len())
                } else {
                    (buffers.result, step.part.clone())
                };
                let posted = receiver.try_post(region, part);
                let Some(request) =
                    posted.map_err(|error| receive_error(&self.previous, &error))?
                else {
                    break;
                };
                let scratch = plan.reduces(step.step).then_some(slot % DEPTH * SLICE);
                slot += usize::from(scratch.is_some());
                receiving.push_back(Receiving { request, step: step.clone(), scratch });
                next_receive = receives.next();
                moved = true;
            }
            while sending.len() < DEPTH
                && let Some(step) = &next_send
                && plan.may_send(step, &received)
            {
                let region = if step.step == 0 { buffers.own } else { buffers.result };
                let posted = sender.try_post(region, step.part.clone());
                let Some(request) = posted.map_err(|error| send_error(&self.next, &error))? else {
                    break;
                };
                sending.push_back((request, step.clone()));
                next_send = sends.next();
                moved = true;
            }
            if let Some(Receiving { request, step, scratch }) = receiving.front_mut() {
                let done = request.test().map_err(|error| receive_error(&self.previous, &error))?;
                if let Some(size) = done {
                    if size != step.part.len() {
                        let want = step.part.len();
                        return Err(format!(
                            "{} sent {size} bytes where {want} belong",
                            self.previous
                        ));
                    }
                    if let Some(start) = *scratch {
                        reduce(buffers, &self.scratch, start, &step.part, kind, op)?;
                    }
                    received.add(step);
                    receiving.pop_front();
                    moved = true;
                }
            }
            if let Some((request, step)) = sending.front_mut() {
                let done = request.test().map_err(|error| send_error(&self.next, &error))?;
                if done.is_some() {
                    self.sent += step.part.len() as u64;
                    sent.add(step);
                    sending.pop_front();
                    moved = true;
                }
            }
            if moved {
                wait.progress();
                continue;
            }
            if receiving.is_empty()
                && sending.is_empty()
                && next_receive.is_none()
                && next_send.is_none()
            {
                return Ok(());
            }
            wait.idle(world, || match receiving.is_empty() && next_receive.is_none() {
                true => format!("sending to {}", self.next),
                false => format!("receiving from {}", self.previous),
            })?;
        }
    }
}

struct Receiving {
    request: Request,
    step: Move,
    /// Where in scratch it arrives, if it is to be reduced.
    scratch: Option<usize>,
}

fn receive_error(previous: &str, error: &str) -> String {
    format!("receiving from {previous}: {error}")
}

fn send_error(next: &str, error: &str) -> String {
    format!("sending to {next}: {error}")
}

fn copy(buffers: &Buffers<'_>, bytes: usize) -> Result<()> {
    if buffers.in_place {
        return Ok(());
    }
    buffers.own.read(0..bytes, |own| {
        buffers.result.write(0..bytes, |result| result.copy_from_slice(own))
    })?
}

fn reduce(
    buffers: &Buffers<'_>,
    scratch: &Region,
    start: usize,
    part: &Range<usize>,
    kind: Type,
    op: Op,
) -> Result<()> {
    let write = |own: Option<&[u8]>| {
        scratch.read(start..start + part.len(), |other| {
            buffers.result.write(part.clone(), |into| kind.reduce(op, own, other, into))
        })?
    };
    if buffers.in_place {
        write(None)
    } else {
        buffers.own.read(part.clone(), |own| write(Some(own)))?
    }
}

/// One message of an all-reduce.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Move {
    step: usize,
    slice: usize,
    /// Bytes of the buffer.
    part: Range<usize>,
}

/// How far a direction has come: moves are done in order.
#[derive(Default)]
struct Done(Option<(usize, usize)>);

impl Done {
    fn add(&mut self, done: &Move) {
        self.0 = Some((done.step, done.slice));
    }

    fn includes(&self, step: usize, slice: usize) -> bool {
        self.0 >= Some((step, slice))
    }
}

/// Which rank sends which block in which step.
struct Plan {
    rank: usize,
    ranks: usize,
    count: usize,
    element: usize,
}

impl Plan {
    fn reduces(&self, step: usize) -> bool {
        step < self.ranks - 1
    }

    fn sent_block(&self, step: usize) -> usize {
        (self.rank + 2 * self.ranks - step) % self.ranks
    }

    fn received_block(&self, step: usize) -> usize {
        (self.rank + 2 * self.ranks - step - 1) % self.ranks
    }

    /// A block's bytes: blocks differ by one element at most.
    fn block(&self, block: usize) -> Range<usize> {
        let (small, larger) = (self.count / self.ranks, self.count % self.ranks);
        let start = block * small + block.min(larger);
        let end = start + small + usize::from(block < larger);
        start * self.element..end * self.element
    }

    /// All of a direction's messages in order. Empty blocks have none, on either side.
    fn moves(&self, block: impl Fn(&Self, usize) -> usize) -> impl Iterator<Item = Move> {
        (0..2 * (self.ranks - 1)).flat_map(move |step| {
            let block = self.block(block(self, step));
            let slices = block.len().div_ceil(SLICE);
            (0..slices).map(move |slice| {
                let start = block.start + slice * SLICE;
                Move { step, slice, part: start..block.end.min(start + SLICE) }
            })
        })
    }

    /// What is sent in a step arrived in the one before.
    fn may_send(&self, step: &Move, received: &Done) -> bool {
        step.step == 0 || received.includes(step.step - 1, step.slice)
    }

    /// A block's result arrives where the block was sent from, `ranks - 1` steps before.
    fn may_receive(&self, step: &Move, sent: &Done) -> bool {
        self.reduces(step.step) || sent.includes(step.step - (self.ranks - 1), step.slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(rank: usize, ranks: usize, count: usize) -> Plan {
        Plan { rank, ranks, count, element: 4 }
    }

    #[test]
    fn ring_sends_match_the_next_ranks_receives() {
        for ranks in 2..6 {
            for count in [0, 1, 2, 7, 1000, 3 << 20] {
                for rank in 0..ranks {
                    let sends: Vec<_> = plan(rank, ranks, count).moves(Plan::sent_block).collect();
                    let next = plan((rank + 1) % ranks, ranks, count);
                    let receives: Vec<_> = next.moves(Plan::received_block).collect();
                    assert_eq!(sends, receives, "{ranks} ranks, {count} elements, rank {rank}");
                }
            }
        }
    }

    #[test]
    fn ring_blocks_cover_all_elements_once() {
        for (ranks, count) in [(2, 1), (3, 10), (5, 1_000_003)] {
            let plan = plan(0, ranks, count);
            let mut end = 0;
            for block in 0..ranks {
                assert_eq!(plan.block(block).start, end);
                end = plan.block(block).end;
            }
            assert_eq!(end, count * 4);
        }
    }

    #[test]
    fn ring_step_sends_what_the_last_step_received() {
        for ranks in 2..6 {
            for rank in 0..ranks {
                let plan = plan(rank, ranks, 1);
                for step in 1..2 * (ranks - 1) {
                    assert_eq!(plan.sent_block(step), plan.received_block(step - 1));
                }
                for step in ranks - 1..2 * (ranks - 1) {
                    assert_eq!(plan.received_block(step), plan.sent_block(step - (ranks - 1)));
                }
            }
        }
    }
}
