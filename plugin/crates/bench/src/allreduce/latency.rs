//! The latency of a ring: a message of a few bytes goes round it, and each rank passes it on as soon as it has it.
//!
//! Ranks poll and never sleep. The driver of the all-reduces sleeps between polls, which costs a small message up to half a
//! millisecond, more than the network takes.

use std::time::{Duration, Instant};

use crate::allreduce::ring::Ring;
use crate::error::Result;
use crate::plugin_host::{Receiver, Region, Request, Sender};
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

/// Seconds from one rank to the next, on rank 0: the lower quartile of the rounds, as whatever disturbs a round prolongs it. None on
/// other ranks, and where there is only one. All ranks call it together.
///
/// # Errors
/// Names the neighbour whose transfer broke, or that made no progress within the world's timeout.
pub(crate) fn measure(ring: &Ring, world: &mut World) -> Result<Option<f64>> {
    let Some((sender, receiver)) = ring.ends() else {
        return Ok(None);
    };
    let buffer = Region::new(2 * SIZE)?;
    ring.register(&buffer)?;
    world.barrier()?;
    let mut link = Link { sender, receiver, buffer, world };
    if link.world.rank() == 0 {
        let ranks = link.world.ranks().len() as f64;
        Ok(lower_quartile(link.start_rounds()?).map(|seconds| seconds / ranks))
    } else {
        link.pass_on()?;
        Ok(None)
    }
}

/// The first half of the buffer is sent, the second is received.
struct Link<'a> {
    sender: &'a Sender,
    receiver: &'a Receiver,
    buffer: Region,
    world: &'a mut World,
}

impl Link<'_> {
    /// Seconds of the rounds that count.
    fn start_rounds(&mut self) -> Result<Vec<f64>> {
        let mut rounds = Vec::with_capacity(ROUNDS);
        let first = Instant::now();
        loop {
            let last = rounds.len() + 1 >= ROUNDS || first.elapsed() >= LIMIT;
            self.buffer.write(0..SIZE, |bytes| bytes[0] = u8::from(last))?;
            let mut back = self.receive()?;
            let start = Instant::now();
            let mut there = self.send()?;
            let (mut sent, mut received) = (false, false);
            let mut wait = Driver::Nccl.wait();
            // Both in turn: a plugin may move a message only while it is asked for it.
            loop {
                sent = sent || is_whole(&mut there)?;
                received = received || is_whole(&mut back)?;
                if sent && received {
                    break;
                }
                wait.idle(self.world, || "sending a message round".to_owned())?;
            }
            rounds.push(start.elapsed().as_secs_f64());
            if last {
                break;
            }
        }
        Ok(rounds.split_off(WARM_UP.min(rounds.len() - 1)))
    }

    /// Passes the message on until it came for the last time.
    fn pass_on(&mut self) -> Result<()> {
        loop {
            let from = self.receive()?;
            self.complete(from)?;
            let last = self.buffer.read(SIZE..2 * SIZE, |bytes| bytes[0])?;
            self.buffer.write(0..SIZE, |bytes| bytes[0] = last)?;
            let to = self.send()?;
            self.complete(to)?;
            if last != 0 {
                return Ok(());
            }
        }
    }

    fn send(&mut self) -> Result<Request> {
        let mut wait = Driver::Nccl.wait();
        loop {
            if let Some(request) = self.sender.isend(&self.buffer, 0..SIZE)? {
                return Ok(request);
            }
            wait.idle(self.world, || "posting a message".to_owned())?;
        }
    }

    fn receive(&mut self) -> Result<Request> {
        let mut wait = Driver::Nccl.wait();
        loop {
            if let Some(request) = self.receiver.irecv(&self.buffer, SIZE..2 * SIZE)? {
                return Ok(request);
            }
            wait.idle(self.world, || "posting a receive".to_owned())?;
        }
    }

    fn complete(&mut self, mut request: Request) -> Result<()> {
        let mut wait = Driver::Nccl.wait();
        while !is_whole(&mut request)? {
            wait.idle(self.world, || "passing a message on".to_owned())?;
        }
        Ok(())
    }
}

/// Whether the transfer has ended.
fn is_whole(request: &mut Request) -> Result<bool> {
    match request.test()? {
        None => Ok(false),
        Some(SIZE) => Ok(true),
        Some(size) => Err(format!("a message of {size} bytes came where {SIZE} belong")),
    }
}

/// None of none.
fn lower_quartile(mut seconds: Vec<f64>) -> Option<f64> {
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len().saturating_sub(1) / 4).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_is_the_lower_quartile() {
        assert_eq!(lower_quartile(vec![]), None);
        assert_eq!(lower_quartile(vec![3.0]), Some(3.0));
        assert_eq!(lower_quartile(vec![9.0, 1.0, 8.0, 2.0, 7.0]), Some(2.0));
    }
}
