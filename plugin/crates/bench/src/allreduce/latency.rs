//! The latency of a ring: a message of a few bytes goes round it, and each rank passes it on as
//! soon as it has it.
//!
//! Ranks poll and never sleep. The driver of the all-reduces sleeps between polls, which costs a
//! small message up to half a millisecond, more than the network takes.

use std::time::{Duration, Instant};

use crate::allreduce::ring::Ring;
use crate::error::Result;
use crate::links::{Link, Request, complete};
use crate::output::statistics::quantile;
use crate::plugin_host::Region;
use crate::ranks::bootstrap::World;
use crate::ranks::wait::Driver;

/// Bytes of the message. The first says whether it goes round for the last time.
const SIZE: usize = 8;
/// Rounds before those that count.
const WARM_UP: usize = 20;
/// All rounds, with those.
const ROUNDS: usize = 220;
/// No round begins later than this after the first.
const LIMIT: Duration = Duration::from_millis(500);

/// Seconds from one rank to the next, on rank 0: the lower quartile of the rounds, as whatever
/// disturbs a round prolongs it. None on other ranks, and where there is only one. All ranks call
/// it together.
///
/// # Errors
/// Names the neighbour whose transfer broke, or that made no progress within the world's timeout.
pub(crate) fn measure(ring: &Ring, world: &mut World) -> Result<Option<f64>> {
    let Some([receiver, sender]) = ring.ends() else {
        return Ok(None);
    };
    let buffer = Region::new(2 * SIZE)?;
    ring.register(&buffer)?;
    world.barrier()?;
    let mut link = Neighbours { sender, receiver, buffer, world };
    if link.world.rank() > 0 {
        link.pass_on()?;
        return Ok(None);
    }
    let ranks = link.world.ranks().len() as f64;
    let mut rounds = link.start_rounds()?;
    rounds.sort_by(f64::total_cmp);
    Ok(Some(quantile(&rounds, 0.25) / ranks))
}

/// The first half of the buffer is sent, the second is received.
struct Neighbours<'a> {
    sender: &'a Link,
    receiver: &'a Link,
    buffer: Region,
    world: &'a mut World,
}

impl Neighbours<'_> {
    /// Seconds of the rounds that count.
    fn start_rounds(&mut self) -> Result<Vec<f64>> {
        let mut rounds = Vec::with_capacity(ROUNDS);
        let first = Instant::now();
        loop {
            let last = rounds.len() + 1 >= ROUNDS || first.elapsed() >= LIMIT;
            self.buffer.write(0..SIZE, |bytes| bytes[0] = u8::from(last))?;
            let back = self.receiver.post(&self.buffer, SIZE..2 * SIZE, self.world)?;
            let start = Instant::now();
            let there = self.sender.post(&self.buffer, 0..SIZE, self.world)?;
            self.complete([there, back])?;
            rounds.push(start.elapsed().as_secs_f64());
            if last {
                return Ok(rounds.split_off(WARM_UP.min(rounds.len() - 1)));
            }
        }
    }

    /// Passes the message on until it came for the last time.
    fn pass_on(&mut self) -> Result<()> {
        loop {
            let from = self.receiver.post(&self.buffer, SIZE..2 * SIZE, self.world)?;
            self.complete([from])?;
            let last = self.buffer.read(SIZE..2 * SIZE, |bytes| bytes[0])?;
            self.buffer.write(0..SIZE, |bytes| bytes[0] = last)?;
            let to = self.sender.post(&self.buffer, 0..SIZE, self.world)?;
            self.complete([to])?;
            if last != 0 {
                return Ok(());
            }
        }
    }

    fn complete<const N: usize>(&mut self, requests: [Request; N]) -> Result<()> {
        let sizes = complete(requests, Driver::Nccl, self.world)?;
        match sizes.iter().find(|size| **size != SIZE) {
            Some(size) => Err(format!("a message of {size} bytes came where {SIZE} belong")),
            None => Ok(()),
        }
    }
}
