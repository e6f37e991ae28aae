//! Makes what has come into another device's memory visible there.
//!
//! A message is told of when its bytes have left the network device. The host's memory has them before anybody can see that;
//! a GPU's, which is elsewhere on the bus, may get them later. A read takes the same way and does not pass them (PCI Express,
//! transaction ordering): when a byte that the network device has read there has come, they are there. So a queue pair that is
//! connected with itself reads the last one. NCCL's own RDMA transport does the same.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use evenkeel_protocol::QueuePairInfo;
use evenkeel_verbs::{
    Completion, CompletionQueue, MemoryRegion, Outcome, QueuePair, StagingBuffer,
};

use super::Adapter;
use super::queue_pairs::system;
use crate::connection::request::{MAX_REQUESTS, Operation};
use crate::error::Error;
use crate::memory::buffers::RecvBuffer;

/// Reads on their way, at most.
const DEPTH: u32 = MAX_REQUESTS as u32;

/// Reads a byte of this process's memory by its own device.
pub(super) struct Flush {
    /// Given up before what it reads and where to.
    pair: QueuePair,
    completions: Arc<CompletionQueue>,
    /// Where bytes go that nobody looks at.
    into: StagingBuffer,
    /// What waits for which read, the oldest first.
    waiting: VecDeque<Waiting>,
    /// Since when it cannot read, and why.
    broken: Option<(Instant, String)>,
    polled: Vec<Completion>,
}

/// An operation, and the memory whose last byte is read for it.
struct Waiting {
    operation: Arc<Operation>,
    memory: RecvBuffer,
    /// Held while it is read.
    _region: Arc<MemoryRegion>,
}

impl Flush {
    pub(super) fn new(adapter: &Adapter) -> Result<Self, Error> {
        let completions = Arc::new(CompletionQueue::new(&adapter.context, DEPTH).map_err(system)?);
        let pair = QueuePair::new(&completions, DEPTH, 0, adapter.number()).map_err(system)?;
        let into = StagingBuffer::new(&adapter.context, 1).map_err(system)?;
        let itself = QueuePairInfo { number: pair.number(), sequence: 0 };
        let traffic = adapter.traffic(None);
        let port = adapter.word(into.region(), false, traffic);
        pair.connect(&adapter.peer(&port, itself, 0, traffic)).map_err(system)?;
        Ok(Self {
            pair,
            completions,
            into,
            waiting: VecDeque::new(),
            broken: None,
            polled: Vec::new(),
        })
    }

    /// Begins to read the last byte of this memory, which is in the region, for the operation.
    pub(super) fn begin(
        &mut self,
        region: Arc<MemoryRegion>,
        memory: RecvBuffer,
        operation: &Arc<Operation>,
    ) -> Result<(), Error> {
        if self.waiting.len() == MAX_REQUESTS {
            let what =
                format!("{MAX_REQUESTS} flushes are on their way, which is all there may be");
            return Err(Error::argument(what));
        }
        let into = (self.into.region(), self.into.address(0), 1);
        if self.broken.is_none() {
            let last = memory.address() + memory.length() as u64 - 1;
            self.pair.read(0, into, last, region.remote_key()).map_err(system)?;
        }
        let operation = Arc::clone(operation);
        self.waiting.push_back(Waiting { operation, memory, _region: region });
        Ok(())
    }

    /// Since when it cannot read, and why.
    pub(super) fn broken(&self) -> Option<&(Instant, String)> {
        self.broken.as_ref()
    }

    /// What waits, to be read by another device. What came by this one before it was left is long in memory.
    pub(super) fn into_waiting(self) -> impl Iterator<Item = (RecvBuffer, Arc<Operation>)> {
        self.waiting.into_iter().map(|waiting| (waiting.memory, waiting.operation))
    }

    /// Completes the operations whose bytes have come; whether there were any. None does any more once one has failed.
    pub(super) fn look(&mut self) -> Result<bool, Error> {
        if self.waiting.is_empty() || self.broken.is_some() {
            return Ok(false);
        }
        self.completions.poll(&mut self.polled).map_err(system)?;
        let any = !self.polled.is_empty();
        for Completion { outcome, .. } in self.polled.drain(..) {
            match outcome {
                Outcome::Failed(why) => {
                    let what = format!("cannot flush what has come into memory: {why}");
                    self.broken = Some((Instant::now(), what));
                    break;
                }
                // Reads come in order. What was given up is told of after the one that has failed.
                _ => {
                    if let Some(waiting) = self.waiting.pop_front() {
                        waiting.operation.complete(0);
                    }
                }
            }
        }
        Ok(any)
    }
}
