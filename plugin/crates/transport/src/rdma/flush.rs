//! Flushes: makes received bytes visible in the memory of another device, such as a GPU.
//!
//! A completion reports a message when its bytes have left the network device. They are in host memory before the processor
//! can see the completion. GPU memory is elsewhere on the bus and may get them later. A read takes the same route and does
//! not pass earlier writes (PCI Express, transaction ordering). Once the network device has read a byte there, the writes
//! before it have arrived. So a queue pair that is connected to itself reads the message's last byte, as in NCCL's own RDMA
//! transport.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use evenkeel_protocol::QueuePairInfo;
use evenkeel_verbs::{
    CompletionQueue, CompletionStatus, MemoryRegion, QueuePair, StagingBuffer, WorkCompletion,
};

use super::adapter::Adapter;
use super::error::system;
use crate::connection::request::{MAX_REQUESTS, Operation};
use crate::error::Error;
use crate::memory::buffers::RecvBuffer;

/// Maximum number of reads in flight.
const DEPTH: u32 = MAX_REQUESTS as u32;

/// Reads bytes of this process's memory through its own device.
pub(super) struct Flush {
    /// Declared before the memory that it uses: it is dropped first.
    pair: QueuePair,
    completions: Arc<CompletionQueue>,
    /// Where the bytes go; they are not used.
    sink: StagingBuffer,
    /// The reads in flight, oldest first.
    pending: VecDeque<PendingFlush>,
    /// Since when the queue pair cannot read, and why.
    failure: Option<(Instant, String)>,
    polled: Vec<WorkCompletion>,
}

/// An operation, and the memory whose last byte is read for it.
struct PendingFlush {
    operation: Arc<Operation>,
    memory: RecvBuffer,
    /// Held while it is read.
    _region: Arc<MemoryRegion>,
}

impl Flush {
    pub(super) fn new(adapter: &Adapter) -> Result<Self, Error> {
        let completions = Arc::new(CompletionQueue::new(&adapter.context, DEPTH).map_err(system)?);
        let pair =
            QueuePair::new(&completions, (DEPTH, 1), 0, adapter.number(), adapter.pkey_index())
                .map_err(system)?;
        let sink = StagingBuffer::new(&adapter.context, 1).map_err(system)?;
        let itself = QueuePairInfo { number: pair.number(), sequence: 0 };
        let marking = adapter.marking(None);
        let port = adapter.port_info(sink.region(), false, marking);
        let attributes = adapter.connect_attributes(&port, itself, 0, marking);
        pair.connect(&attributes).map_err(system)?;
        Ok(Self {
            pair,
            completions,
            sink,
            pending: VecDeque::new(),
            failure: None,
            polled: Vec::new(),
        })
    }

    /// Begins to read the last byte of this memory, which is in the region. The operation completes with the read.
    pub(super) fn begin(
        &mut self,
        region: Arc<MemoryRegion>,
        memory: RecvBuffer,
        operation: &Arc<Operation>,
    ) -> Result<(), Error> {
        if self.pending.len() == MAX_REQUESTS {
            let what = format!("{MAX_REQUESTS} flushes are in flight, which is the maximum");
            return Err(Error::argument(what));
        }
        let sink = (self.sink.region(), self.sink.address(0), 1);
        if self.failure.is_none() {
            let last = memory.address() + memory.length() as u64 - 1;
            self.pair.post_read(0, sink, last, region.remote_key()).map_err(system)?;
        }
        let operation = Arc::clone(operation);
        self.pending.push_back(PendingFlush { operation, memory, _region: region });
        Ok(())
    }

    /// Since when the queue pair cannot read, and why.
    pub(super) fn failure(&self) -> Option<&(Instant, String)> {
        self.failure.as_ref()
    }

    /// The flushes in flight, to be repeated through another device. What this device had received before the connection
    /// left it has long been in memory by then.
    pub(super) fn into_pending(self) -> impl Iterator<Item = (RecvBuffer, Arc<Operation>)> {
        self.pending.into_iter().map(|pending| (pending.memory, pending.operation))
    }

    /// Completes the operations whose reads are done, and returns whether there were any. After a read has failed, none
    /// completes.
    pub(super) fn poll(&mut self) -> Result<bool, Error> {
        if self.pending.is_empty() || self.failure.is_some() {
            return Ok(false);
        }
        self.completions.poll(&mut self.polled).map_err(system)?;
        let any = !self.polled.is_empty();
        for WorkCompletion { status, .. } in self.polled.drain(..) {
            match status {
                CompletionStatus::Failed(why) => {
                    let what = format!("cannot flush received bytes into memory: {why}");
                    self.failure = Some((Instant::now(), what));
                    break;
                }
                // Reads complete in order, and flushed work is reported after the work that has failed.
                _ => {
                    if let Some(pending) = self.pending.pop_front() {
                        pending.operation.complete(0);
                    }
                }
            }
        }
        Ok(any)
    }
}
