//! Flushes: makes received bytes visible in the memory of another device, such as a GPU.
//!
//! A completion reports a message when its bytes have left the network device. They are in host
//! memory before the processor can see the completion. GPU memory is elsewhere on the bus and may
//! get them later. A read takes the same route and does not pass earlier writes (PCI Express,
//! transaction ordering). Once the network device has read a byte there, the writes before it have
//! arrived. So a queue pair that is connected to itself reads the message's last byte, as in NCCL's
//! own RDMA transport.

//!
//! Each port has such a queue pair, since a read says nothing of what other devices have written. A
//! flush reads through all of them. Where one of several ports cannot read any more, the others go
//! on, and nothing more is received over it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use evenkeel_protocol::QueuePairInfo;
use evenkeel_verbs::{
    CompletionQueue, CompletionStatus, MemoryRegion, QueuePair, StagingBuffer, WorkCompletion,
};

use super::adapter::Adapter;
use super::error::system;
use super::queue_pairs::OwnPort;
use super::regions::Regions;
use crate::connection::request::{MAX_REQUESTS, Operation};
use crate::error::Error;
use crate::memory::buffers::RecvBuffer;

/// Maximum number of reads in flight.
const DEPTH: u32 = MAX_REQUESTS as u32;
/// How long after the failure of one of several ports what it has received is in memory. A bus
/// takes a small part of it.
const SETTLE_TIME: Duration = Duration::from_millis(500);

/// Reads bytes of this process's memory through its own devices.
pub(super) struct Flushes {
    /// In the ports' order.
    ports: Vec<PortFlush>,
    /// Flushes that were asked for while no port could read.
    waiting: Vec<WaitingFlush>,
}

struct WaitingFlush {
    regions: Regions,
    memory: RecvBuffer,
    operation: Arc<Operation>,
}

/// A flush that is not done.
struct PendingFlush {
    operation: Arc<Operation>,
    /// The memory whose last byte is read.
    memory: RecvBuffer,
    /// Number of ports that have not read it.
    left: AtomicUsize,
}

impl PendingFlush {
    /// A port has read the memory. The operation completes with the last one.
    fn read(&self) {
        if self.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.operation.complete(0);
        }
    }
}

impl Flushes {
    /// One of several ports that cannot read now, as it is down, is one whose reads have failed.
    pub(super) fn new(ports: &[OwnPort]) -> Result<Self, Error> {
        let flush = |port: &OwnPort| {
            let mut flush = PortFlush::unconnected(&port.adapter)?;
            match flush.connect() {
                Err(error) if ports.len() > 1 => flush.fail(error.to_string()),
                connected => connected?,
            }
            Ok(flush)
        };
        let ports = ports.iter().map(flush).collect::<Result<_, Error>>()?;
        Ok(Self { ports, waiting: Vec::new() })
    }

    /// Begins to read the last byte of this memory, which is in these regions. The operation
    /// completes with the last read.
    pub(super) fn begin(
        &mut self,
        regions: &Regions,
        memory: RecvBuffer,
        operation: &Arc<Operation>,
    ) -> Result<(), Error> {
        let pending = self.ports.iter().map(|port| port.pending.len()).max().unwrap_or_default();
        if pending.max(self.waiting.len()) >= MAX_REQUESTS {
            let what = format!("{MAX_REQUESTS} flushes are in flight, which is the maximum");
            return Err(Error::argument(what));
        }
        let can_read = |(number, port): &(usize, &mut PortFlush)| {
            port.failure.is_none() && regions.get(*number).is_some()
        };
        let readers: Vec<_> = self.ports.iter_mut().enumerate().filter(can_read).collect();
        let operation = Arc::clone(operation);
        if readers.is_empty() {
            self.waiting.push(WaitingFlush { regions: regions.clone(), memory, operation });
            return Ok(());
        }
        let left = AtomicUsize::new(readers.len());
        let flush = Arc::new(PendingFlush { operation, memory, left });
        for (number, port) in readers {
            if let Some(region) = regions.get(number) {
                port.begin(Arc::clone(region), &flush)?;
            }
        }
        Ok(())
    }

    /// Since when no port can read, and why.
    pub(super) fn failure(&self) -> Option<&(Instant, String)> {
        if self.ports.iter().any(|port| port.failure.is_none()) {
            return None;
        }
        self.ports.iter().filter_map(|port| port.failure.as_ref()).max_by_key(|(since, _)| *since)
    }

    /// Whether some port cannot read.
    pub(super) fn has_failed_port(&self) -> bool {
        self.ports.iter().any(|port| port.failure.is_some())
    }

    /// The ports of several that cannot read any more, each once, and why.
    pub(super) fn take_failed_ports(&mut self) -> Vec<(usize, String)> {
        if self.failure().is_some() {
            return Vec::new();
        }
        let ports = self.ports.iter_mut().enumerate();
        let failed = ports.filter_map(|(number, port)| {
            let (_, why) = port.failure.as_ref().filter(|_| !port.is_reported)?;
            port.is_reported = true;
            Some((number, why.clone()))
        });
        failed.collect()
    }

    /// Messages are received again over a port: it has to read again if it could not.
    pub(super) fn repair(&mut self, number: usize, port: &OwnPort) -> Result<(), Error> {
        let Some(place) = self.ports.get_mut(number).filter(|port| port.failure.is_some()) else {
            return Ok(());
        };
        match PortFlush::new(&port.adapter) {
            Ok(repaired) => {
                let failed = std::mem::replace(place, repaired);
                failed
                    .pending
                    .into_iter()
                    .try_for_each(|read| place.begin(read.region, &read.flush))
            }
            Err(error) => {
                place.fail(error.to_string());
                Ok(())
            }
        }
    }

    /// The flushes in flight, to be repeated through other devices. What these devices had received
    /// before the connection left them has long been in memory by then.
    pub(super) fn into_pending(self) -> impl Iterator<Item = (RecvBuffer, Arc<Operation>)> {
        let mut begun: Vec<Arc<PendingFlush>> = Vec::new();
        for read in self.ports.into_iter().flat_map(|port| port.pending) {
            if !begun.iter().any(|other| Arc::ptr_eq(other, &read.flush)) {
                begun.push(read.flush);
            }
        }
        let begun = begun.into_iter().map(|flush| (flush.memory, Arc::clone(&flush.operation)));
        begun.chain(self.waiting.into_iter().map(|waiting| (waiting.memory, waiting.operation)))
    }

    /// Completes the operations whose reads are done, and returns whether there were any reads.
    pub(super) fn poll(&mut self) -> Result<bool, Error> {
        let mut any = false;
        for port in &mut self.ports {
            any |= port.poll()?;
        }
        if self.failure().is_none() {
            for waiting in std::mem::take(&mut self.waiting) {
                self.begin(&waiting.regions, waiting.memory, &waiting.operation)?;
            }
            // The other ports can read.
            any |= self.ports.iter_mut().map(PortFlush::settle).fold(false, |any, one| any | one);
        }
        Ok(any)
    }
}

/// Reads through one port.
struct PortFlush {
    /// Declared before the memory that it uses: it is dropped first.
    pair: QueuePair,
    completions: Arc<CompletionQueue>,
    /// Where the bytes go; they are not used.
    sink: StagingBuffer,
    adapter: Arc<Adapter>,
    /// The reads in flight, oldest first.
    pending: VecDeque<PendingRead>,
    /// Since when the queue pair cannot read, and why.
    failure: Option<(Instant, String)>,
    /// Whether the failure was reported.
    is_reported: bool,
    polled: Vec<WorkCompletion>,
}

struct PendingRead {
    flush: Arc<PendingFlush>,
    /// Held while it is read.
    region: Arc<MemoryRegion>,
}

impl PortFlush {
    fn new(adapter: &Arc<Adapter>) -> Result<Self, Error> {
        let flush = Self::unconnected(adapter)?;
        flush.connect()?;
        Ok(flush)
    }

    /// With a queue pair that cannot read yet.
    fn unconnected(adapter: &Arc<Adapter>) -> Result<Self, Error> {
        let completions = Arc::new(CompletionQueue::new(&adapter.context, DEPTH).map_err(system)?);
        let pair =
            QueuePair::new(&completions, (DEPTH, 1), 0, adapter.number(), adapter.pkey_index())
                .map_err(system)?;
        let sink = StagingBuffer::new([&adapter.context], 1).map_err(system)?;
        Ok(Self {
            pair,
            completions,
            sink,
            adapter: Arc::clone(adapter),
            pending: VecDeque::new(),
            failure: None,
            is_reported: false,
            polled: Vec::new(),
        })
    }

    /// Connects the queue pair to itself. Fails where the port has no route to its own address.
    fn connect(&self) -> Result<(), Error> {
        let Self { adapter, sink, pair, .. } = self;
        let itself = QueuePairInfo { number: pair.number(), sequence: 0 };
        let marking = adapter.marking(None);
        let port = adapter.port_info(sink.region(&adapter.context), false, marking);
        let attributes = adapter.connect_attributes(&port, itself, 0, marking);
        pair.connect(&attributes).map_err(system)
    }

    fn begin(&mut self, region: Arc<MemoryRegion>, flush: &Arc<PendingFlush>) -> Result<(), Error> {
        let sink = (self.sink.region(&self.adapter.context), self.sink.address(0), 1);
        let last = flush.memory.address() + flush.memory.length() as u64 - 1;
        self.pair.post_read(0, sink, last, region.remote_key()).map_err(system)?;
        self.pending.push_back(PendingRead { flush: Arc::clone(flush), region });
        Ok(())
    }

    fn fail(&mut self, why: String) {
        let what = format!("cannot flush received bytes into memory: {why}");
        self.failure = Some((Instant::now(), what));
        self.is_reported = false;
    }

    /// After a read has failed, none completes.
    fn poll(&mut self) -> Result<bool, Error> {
        if self.pending.is_empty() || self.failure.is_some() {
            return Ok(false);
        }
        self.completions.poll(&mut self.polled).map_err(system)?;
        let any = !self.polled.is_empty();
        let mut polled = std::mem::take(&mut self.polled);
        for WorkCompletion { status, .. } in polled.drain(..) {
            match status {
                CompletionStatus::Failed(why) => {
                    self.fail(why);
                    break;
                }
                // Reads complete in order, and flushed work is reported after the work that has
                // failed.
                _ => {
                    if let Some(read) = self.pending.pop_front() {
                        read.flush.read();
                    }
                }
            }
        }
        self.polled = polled;
        Ok(any)
    }

    /// Completes the reads of a port that cannot read, once what it has received is in memory.
    /// Returns whether there were any.
    fn settle(&mut self) -> bool {
        let is_settled =
            self.failure.as_ref().is_some_and(|(since, _)| since.elapsed() >= SETTLE_TIME);
        if !is_settled || self.pending.is_empty() {
            return false;
        }
        self.pending.drain(..).for_each(|read| read.flush.read());
        true
    }
}
