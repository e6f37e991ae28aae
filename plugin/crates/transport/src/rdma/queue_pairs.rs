//! The queue pairs of one end of a connection, the work in flight on them, and their failures.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use evenkeel_protocol::{MAX_PARTS_IN_FLIGHT, PacketMarking, PortInfo, QueuePairInfo, WINDOW};
use evenkeel_verbs::{
    Access, CompletionQueue, CompletionStatus, Context, MemoryRegion, QueuePair, StagingBuffer,
    WorkCompletion, WriteRequest, WriteSource,
};

use super::adapter::Adapter;
use super::eager::RING_BYTES;
use super::error::{gids, system};
use super::regions::Regions;
use crate::error::Error;
use crate::memory::buffers::{RecvBuffer, SendBuffer};
use crate::sys::{self, PathFigures};
use crate::telemetry::counters::FlowCounters;
use crate::telemetry::metrics::FlowObservation;

/// Number of receives that are posted to a queue pair: as many as messages may be on their way.
/// Without any left, its device asks the peer's to wait. Long messages may have more parts, of
/// which few are sent ahead.
const POSTED_RECEIVES: usize = WINDOW as usize;
/// Room of a queue pair for receives.
const MAX_RECEIVES: u32 = POSTED_RECEIVES as u32;
/// Maximum number of writes in flight on a queue pair. Each has room in its device's queue, which
/// is pinned memory, also while the connection is idle; others go to another queue pair. A probe
/// has it before the first write.
const MAX_WRITES: usize = 32;
const _: () = assert!(MAX_WRITES <= MAX_PARTS_IN_FLIGHT);
/// Maximum number of bytes of an inline write, if the device supports that: mlx5's entries have
/// room for so many anyway.
const MAX_INLINE: u32 = 60;
/// Bytes that a probe reads: a packet of the largest MTU. The peer's memory begins with at least so
/// many.
pub(super) const PROBE_BYTES: u32 = 4096;
const _: () = assert!(PROBE_BYTES as usize <= RING_BYTES);
/// How long a failed queue pair may take to complete all its work.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(500);

/// The bit that distinguishes the ids of receives.
const RECEIVE_BIT: u64 = 1 << 63;
/// The bit that distinguishes the id of a probe.
const PROBE_BIT: u64 = 1 << 62;

/// How long a queue pair that has not worked is left alone while those of other ports work.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);

/// A port of this end, with the completion queue of its queue pairs.
pub(super) struct OwnPort {
    pub(super) adapter: Arc<Adapter>,
    pub(super) completions: Arc<CompletionQueue>,
}

impl OwnPort {
    /// A port for this number of queue pairs.
    pub(super) fn open(adapter: &Arc<Adapter>, count: usize) -> Result<Self, Error> {
        let completions = new_completion_queue(adapter, count)?;
        Ok(Self { adapter: Arc::clone(adapter), completions })
    }
}

/// The queue pairs of one end, known by their index. `W` is what is noted of a write.
///
/// Each has a port of either end. A queue pair that fails has only the same two ports to use, but
/// what it carried goes to those of other ports.
pub(super) struct QueuePairs<W> {
    /// Never empty.
    ports: Vec<OwnPort>,
    /// Number of ports that are used, from the first one on.
    used: usize,
    /// Number of pairs of ports, of this end and the peer's, that have queue pairs.
    port_pairs: usize,
    /// The ports that the connection has used before.
    previous: Vec<Arc<Adapter>>,
    slots: Vec<QueuePairSlot<W>>,
    /// Maximum number of bytes in flight on a queue pair, unless it is a single write.
    max_in_flight: u64,
    polled: Vec<WorkCompletion>,
}

/// The place of a queue pair, which is replaced when it fails.
pub(super) struct QueuePairSlot<W> {
    state: QueuePairState,
    /// Whether there was a queue pair. The first one is opened with the connection, others when
    /// those before are full.
    opened: bool,
    pair: Option<QueuePair>,
    /// Number of the first packet that it sends.
    sequence: u32,
    /// Distinguishes the completions of this queue pair from those of its predecessors.
    generation: u32,
    /// The writes in flight and their bytes, oldest first.
    writes: VecDeque<(W, u64)>,
    bytes_in_flight: u64,
    /// Number of writes in flight that have failed or were flushed.
    flushed: usize,
    /// Writes of failed queue pairs of which this end does not know whether they reached the peer.
    unconfirmed: Vec<W>,
    /// Receives that are posted.
    receives: usize,
    /// Whether a probe is in flight.
    probing: bool,
    /// Since when it has not worked, and why.
    down: Option<(Instant, String)>,
    /// Set when its replacement has failed too, and the connection may have other ports: not
    /// replaced before this time.
    not_before: Option<Instant>,
    /// When it was offered to the peer last.
    offered: Option<Instant>,
    pub(super) carried: FlowCounters,
}

/// The state of a queue pair in its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueuePairState {
    /// There is no queue pair, or it is not connected.
    Unconnected,
    /// The queue pair receives, but the peer's may not yet.
    Connected,
    /// Both receive: it may send.
    Active,
    /// It has failed, and its work is completing.
    Draining,
    /// It has failed, and all its work is complete.
    Drained,
}

/// An event of the queue pair of this index.
pub(crate) enum QueuePairEvent<W> {
    /// A probe has succeeded: packets get through.
    Probed(usize),
    /// A write has reached the peer's memory; its bytes.
    Sent(usize, W, u64),
    /// A write of the peer was received; its bytes and immediate data.
    Received(usize, u32, u32),
    /// The queue pair has failed, and why.
    Failed(usize, String),
}

impl<W> QueuePairs<W> {
    /// This number of queue pairs, for at least one port.
    pub(super) fn new(
        adapters: &[Arc<Adapter>],
        count: usize,
        max_in_flight: u64,
    ) -> Result<Self, Error> {
        let ports = adapters.iter().map(|adapter| OwnPort::open(adapter, count));
        let ports = ports.collect::<Result<Vec<_>, _>>()?;
        let slot = |_| QueuePairSlot {
            state: QueuePairState::Unconnected,
            opened: false,
            pair: None,
            sequence: 0,
            generation: 0,
            writes: VecDeque::new(),
            bytes_in_flight: 0,
            flushed: 0,
            unconfirmed: Vec::new(),
            receives: 0,
            probing: false,
            down: None,
            not_before: None,
            offered: None,
            carried: FlowCounters::default(),
        };
        Ok(Self {
            used: ports.len(),
            port_pairs: ports.len(),
            ports,
            previous: Vec::new(),
            slots: (0..count).map(slot).collect(),
            max_in_flight,
            polled: Vec::new(),
        })
    }

    pub(super) fn count(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn slots(&self) -> &[QueuePairSlot<W>] {
        &self.slots
    }

    pub(super) fn state(&self, index: usize) -> QueuePairState {
        self.slots[index].state
    }

    /// The ports of this end that are used, in their order.
    pub(super) fn ports(&self) -> &[OwnPort] {
        &self.ports[..self.used]
    }

    /// All ports of this end, also those that the peer has no key for.
    pub(super) fn all_ports(&self) -> &[OwnPort] {
        &self.ports
    }

    /// The contexts of the devices of the ports that are used.
    pub(super) fn contexts(&self) -> impl Iterator<Item = &Arc<Context>> {
        self.ports().iter().map(|port| &port.adapter.context)
    }

    /// The GIDs of the ports of this end.
    pub(super) fn gids(&self) -> String {
        gids(self.ports().iter().map(|port| port.adapter.gid()))
    }

    /// The number of this end's port of a queue pair.
    pub(super) fn port_of(&self, index: usize) -> usize {
        index % self.used
    }

    /// This end's port of a queue pair.
    pub(super) fn adapter(&self, index: usize) -> &Arc<Adapter> {
        &self.ports[self.port_of(index)].adapter
    }

    /// The peer uses this number of ports, and this end at most `own` of its.
    pub(super) fn set_ports(&mut self, own: usize, peers: usize) {
        self.used = own.clamp(1, self.ports.len());
        self.port_pairs = self.used.max(peers).min(self.slots.len());
    }

    /// Number of pairs of ports that have queue pairs.
    pub(super) fn port_pairs(&self) -> usize {
        self.port_pairs
    }

    /// Whether a queue pair can be used. With several pairs of ports, the connection does without
    /// those that fail.
    pub(super) fn is_usable(&self) -> bool {
        self.slots.iter().any(|slot| slot.state == QueuePairState::Active)
    }

    /// Whether the connection does without queue pairs that do not work: those of other ports do.
    pub(super) fn can_do_without(&self) -> bool {
        self.port_pairs > 1 && self.is_usable()
    }

    /// Whether there is no queue pair in a slot.
    pub(super) fn is_empty(&self, index: usize) -> bool {
        self.slots[index].pair.is_none()
    }

    /// Whether a queue pair of another port can be used.
    pub(super) fn is_another_usable(&self, index: usize) -> bool {
        let port = self.port_of(index);
        let is_usable = |other: &usize| {
            self.port_of(*other) != port && self.slots[*other].state == QueuePairState::Active
        };
        (0..self.slots.len()).any(|other| is_usable(&other))
    }

    /// Arms all completion queues.
    pub(super) fn arm(&self) -> Result<(), Error> {
        self.ports.iter().try_for_each(|port| port.completions.arm().map_err(system))
    }

    /// Whether this slot has had a queue pair.
    pub(super) fn is_opened(&self, index: usize) -> bool {
        self.slots[index].opened
    }

    /// The next slot that has had no queue pair, if those of all slots before it with the same
    /// ports are active.
    pub(super) fn next_unopened(&self) -> Option<usize> {
        let is_next = |index: &usize| {
            let mut before = (index % self.port_pairs..*index).step_by(self.port_pairs);
            !self.slots[*index].opened
                && before.all(|other| self.slots[other].state == QueuePairState::Active)
        };
        (0..self.slots.len()).find(is_next)
    }

    /// Whether one has failed and is not replaced yet.
    pub(super) fn is_any_down(&self) -> bool {
        self.slots.iter().any(|slot| slot.down.is_some())
    }

    /// The memory regions of a buffer that the peer writes to: those of them that are `registered`
    /// with the present ports, and new ones.
    pub(super) fn recv_regions(
        &self,
        buffer: &RecvBuffer,
        mut registered: Regions,
    ) -> Result<Regions, Error> {
        let mut regions = Regions::default();
        for (number, port) in self.ports().iter().enumerate() {
            let context = &port.adapter.context;
            let region = match registered.take(number).filter(|region| region.is_of(context)) {
                Some(region) => Ok(region),
                None => self.region(
                    port,
                    buffer.address(),
                    buffer.length(),
                    Access::RemoteReadWrite,
                    |context| buffer.register(context),
                ),
            };
            match region {
                Ok(region) => regions.set(number, region),
                // The peer writes through the other ports.
                Err(_) if port.adapter.is_down() && self.can_do_without() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(regions)
    }

    /// The memory region with a port of a buffer that is sent.
    pub(super) fn send_region(
        &self,
        port: usize,
        buffer: &SendBuffer,
    ) -> Result<Arc<MemoryRegion>, Error> {
        let register = |context: &_| buffer.register(context);
        let (start, length) = (buffer.address(), buffer.length());
        self.region(&self.ports[port], start, length, Access::LocalRead, register)
    }

    fn region(
        &self,
        port: &OwnPort,
        start: u64,
        length: usize,
        access: Access,
        register: impl FnOnce(&Arc<Context>) -> Result<MemoryRegion, evenkeel_verbs::Error>,
    ) -> Result<Arc<MemoryRegion>, Error> {
        let previous = self.previous.iter().map(|adapter| &adapter.regions);
        port.adapter.regions.region(previous, start, length, access, register)
    }

    /// Moves to other ports, or starts again at these. All queue pairs end; completions that were
    /// not polled are lost.
    pub(super) fn move_to(&mut self, ports: Vec<OwnPort>, why: &str) {
        let gid = self.gids();
        let opened = self.slots.iter_mut().enumerate().filter(|(_, slot)| slot.opened);
        for (index, slot) in opened {
            slot.end();
            slot.state = QueuePairState::Unconnected;
            let what = || (Instant::now(), format!("queue pair {index} at {gid}: {why}"));
            slot.down.get_or_insert_with(what);
            slot.not_before = None;
        }
        (self.used, self.port_pairs) = (ports.len(), ports.len());
        for OwnPort { adapter, .. } in std::mem::replace(&mut self.ports, ports) {
            if !self.previous.iter().any(|other| Arc::ptr_eq(other, &adapter)) {
                self.previous.push(adapter);
            }
        }
    }

    /// Puts a new queue pair into a slot.
    pub(super) fn replace(&mut self, index: usize) -> Result<QueuePairInfo, Error> {
        let depth = (MAX_WRITES as u32, MAX_RECEIVES);
        let OwnPort { adapter, completions } = &self.ports[self.port_of(index)];
        let (number, pkey) = (adapter.number(), adapter.pkey_index());
        let slot = &mut self.slots[index];
        slot.opened = true;
        // The old one ends first: the device may have room for one only.
        slot.end();
        // A device that supports fewer inline bytes returns an error.
        let pair = QueuePair::new(completions, depth, MAX_INLINE, number, pkey)
            .or_else(|_| QueuePair::new(completions, depth, 0, number, pkey))
            .map_err(system)?;
        let random: [u8; 4] = sys::random().map_err(|error| Error::system("random", &error))?;
        slot.sequence = u32::from_le_bytes(random) & 0xff_ffff;
        slot.state = QueuePairState::Unconnected;
        let info = QueuePairInfo { number: pair.number(), sequence: slot.sequence };
        slot.pair = Some(pair);
        Ok(info)
    }

    /// Leaves a slot without a queue pair, as the peer's is.
    pub(super) fn leave_empty(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        slot.opened = true;
        slot.end();
        slot.state = QueuePairState::Unconnected;
    }

    /// A queue pair could not be connected: it is replaced later.
    pub(super) fn give_up(&mut self, index: usize, why: &str) {
        let gid = self.adapter(index).gid();
        let slot = &mut self.slots[index];
        slot.end();
        slot.state = QueuePairState::Drained;
        slot.down
            .get_or_insert_with(|| (Instant::now(), format!("queue pair {index} at {gid}: {why}")));
        slot.not_before = Some(Instant::now() + RETRY_INTERVAL);
    }

    /// Notes that a slot's queue pair is offered to the peer.
    pub(super) fn offered(&mut self, index: usize) {
        self.slots[index].offered = Some(Instant::now());
    }

    /// Whether a slot has failed again before it worked, and is left alone for a while.
    pub(super) fn is_left_alone(&self, index: usize) -> bool {
        self.slots[index].not_before.is_some()
    }

    /// Whether a slot is to have a new queue pair now.
    pub(super) fn is_to_replace(&self, index: usize) -> bool {
        let slot = &self.slots[index];
        slot.state == QueuePairState::Drained
            && slot.not_before.is_none_or(|time| Instant::now() >= time)
    }

    /// Whether the peer has not answered the offer of a replacement for this time.
    pub(super) fn is_any_unanswered(&self, now: Instant, timeout: Duration) -> bool {
        self.slots.iter().any(|slot| {
            let is_late = |since| now.saturating_duration_since(since) >= timeout;
            slot.state == QueuePairState::Unconnected
                && slot.down.is_some()
                && slot.offered.is_some_and(is_late)
        })
    }

    /// Connects a new queue pair with one of the peer.
    pub(super) fn connect(
        &mut self,
        index: usize,
        port: &PortInfo,
        peer: QueuePairInfo,
        marking: PacketMarking,
    ) -> Result<(), Error> {
        let sequence = self.slots[index].sequence;
        let attributes = self.adapter(index).connect_attributes(port, peer, sequence, marking);
        let id = self.id(index) | RECEIVE_BIT;
        let slot = &mut self.slots[index];
        let Some(pair) = &slot.pair else { return Ok(()) };
        pair.connect(&attributes).map_err(system)?;
        while slot.receives < POSTED_RECEIVES {
            pair.post_recv(id).map_err(system)?;
            slot.receives += 1;
        }
        slot.state = QueuePairState::Connected;
        Ok(())
    }

    /// The peer's queue pair receives: this one may send. Returns whether it replaces one that has
    /// failed.
    pub(super) fn activate(&mut self, index: usize) -> bool {
        let slot = &mut self.slots[index];
        if slot.state == QueuePairState::Connected {
            slot.state = QueuePairState::Active;
        }
        slot.not_before = None;
        slot.down.take().is_some()
    }

    /// The queue pair with the fewest bytes in flight, if it has room.
    pub(super) fn least_loaded(&self) -> Option<usize> {
        let has_room = |slot: &QueuePairSlot<W>| {
            slot.state == QueuePairState::Active
                && slot.writes.len() < MAX_WRITES
                && (slot.bytes_in_flight < self.max_in_flight || slot.writes.is_empty())
        };
        let slots = self.slots.iter().enumerate().filter(|(_, slot)| has_room(slot));
        slots
            .min_by_key(|(_, slot)| (slot.bytes_in_flight, slot.writes.len()))
            .map(|(index, _)| index)
    }

    /// Posts a write of a few bytes. They are inline if they fit, and else at this offset of a
    /// staging buffer.
    pub(super) fn write_copy(
        &mut self,
        index: usize,
        bytes: &[u8],
        (staging, offset): (&StagingBuffer, usize),
        remote: (u64, u32),
        immediate: u32,
        note: W,
    ) -> Result<(), Error> {
        let max_inline = self.slots[index].pair.as_ref().map_or(0, QueuePair::max_inline);
        let source = if bytes.is_empty() {
            WriteSource::Empty
        } else if bytes.len() <= max_inline {
            WriteSource::Inline(bytes)
        } else {
            let region = staging.region(&self.adapter(index).context);
            WriteSource::Region(region, staging.address(offset), bytes.len() as u32)
        };
        self.write(index, source, remote, immediate, note)
    }

    /// The work request that a write to this slot is, and the number of its queue pair.
    pub(super) fn next_work(&self, index: usize) -> (u64, u32) {
        (self.id(index), self.slots[index].pair.as_ref().map_or(0, QueuePair::number))
    }

    /// Posts a write to an active queue pair, to this address and key.
    pub(super) fn write(
        &mut self,
        index: usize,
        source: WriteSource<'_>,
        (remote_address, remote_key): (u64, u32),
        immediate: u32,
        note: W,
    ) -> Result<(), Error> {
        let bytes = match &source {
            WriteSource::Empty => 0,
            WriteSource::Inline(bytes) => bytes.len() as u64,
            WriteSource::Region(_, _, length) => u64::from(*length),
        };
        let id = self.id(index);
        let slot = &mut self.slots[index];
        let Some(pair) = &slot.pair else { return Ok(()) };
        let request = WriteRequest { id, source, remote_address, remote_key, immediate };
        pair.post_write(&request).map_err(system)?;
        slot.writes.push_back((note, bytes));
        slot.bytes_in_flight += bytes;
        Ok(())
    }

    /// Probes a connected queue pair: a read of [`PROBE_BYTES`] of the peer's memory shows whether
    /// packets of full length get through.
    pub(super) fn probe(
        &mut self,
        index: usize,
        (staging, offset): (&StagingBuffer, usize),
        (remote_address, remote_key): (u64, u32),
    ) -> Result<(), Error> {
        let id = self.id(index) | PROBE_BIT;
        let into = staging.region(&self.adapter(index).context);
        let address = staging.address(offset);
        let slot = &mut self.slots[index];
        let Some(pair) = &slot.pair else { return Ok(()) };
        pair.post_read(id, (into, address, PROBE_BYTES), remote_address, remote_key)
            .map_err(system)?;
        slot.probing = true;
        Ok(())
    }

    /// Polls the completion queues once. Returns whether there may be more completions.
    pub(super) fn poll(&mut self, events: &mut Vec<QueuePairEvent<W>>) -> Result<bool, Error> {
        let mut polled = std::mem::take(&mut self.polled);
        let mut any = false;
        for port in 0..self.ports.len() {
            self.ports[port].completions.poll(&mut polled).map_err(system)?;
            any |= !polled.is_empty();
            for completion in polled.drain(..) {
                self.completed(completion, events);
            }
        }
        self.polled = polled;
        Ok(any)
    }

    fn completed(&mut self, completion: WorkCompletion, events: &mut Vec<QueuePairEvent<W>>) {
        let WorkCompletion { id, status } = completion;
        let index = (id & 0xff) as usize;
        let (is_receive, is_probe) = (id & RECEIVE_BIT != 0, id & PROBE_BIT != 0);
        let generation = (id >> 8) as u32 & 0xff_ffff;
        let Some(slot) = self.slots.get_mut(index) else { return };
        if slot.generation != generation {
            return;
        }
        if is_probe {
            slot.probing = false;
        }
        match status {
            CompletionStatus::Done if is_probe => {
                // A queue pair that has failed meanwhile is replaced.
                if slot.state == QueuePairState::Connected {
                    events.push(QueuePairEvent::Probed(index));
                }
            }
            CompletionStatus::Done => {
                if let Some((note, bytes)) = slot.writes.pop_front() {
                    slot.bytes_in_flight -= bytes;
                    events.push(QueuePairEvent::Sent(index, note, bytes));
                }
            }
            CompletionStatus::Received { bytes, immediate } => {
                slot.receives -= 1;
                if matches!(slot.state, QueuePairState::Active | QueuePairState::Connected)
                    && let Some(pair) = &slot.pair
                {
                    match pair.post_recv(id) {
                        Ok(()) => slot.receives += 1,
                        Err(error) => events.push(QueuePairEvent::Failed(index, error.to_string())),
                    }
                }
                events.push(QueuePairEvent::Received(index, bytes, immediate));
            }
            CompletionStatus::Failed(_) | CompletionStatus::Flushed => {
                if is_receive {
                    slot.receives -= 1;
                } else if !is_probe {
                    slot.flushed += 1;
                }
                if let CompletionStatus::Failed(why) = status {
                    events.push(QueuePairEvent::Failed(index, why));
                } else if matches!(slot.state, QueuePairState::Active | QueuePairState::Connected) {
                    events.push(QueuePairEvent::Failed(index, "its work was flushed".to_owned()));
                }
            }
        }
        if slot.state == QueuePairState::Draining && slot.is_drained() {
            slot.state = QueuePairState::Drained;
        }
    }

    /// Stops a queue pair that receives. Returns whether this has stopped it. It is drained once
    /// all its work is complete.
    pub(super) fn stop(&mut self, index: usize, why: &str) -> bool {
        let (gid, has_others) = (self.adapter(index).gid(), self.port_pairs > 1);
        let slot = &mut self.slots[index];
        if !matches!(slot.state, QueuePairState::Active | QueuePairState::Connected) {
            return false;
        }
        if has_others && slot.down.is_some() {
            slot.not_before = Some(Instant::now() + RETRY_INTERVAL);
        }
        let number = slot.pair.as_ref().map_or(0, QueuePair::number);
        if let Some(pair) = &slot.pair {
            // Fails only when the device is gone, and then nothing is received any more either.
            let _ = pair.fail();
        }
        slot.state = match slot.is_drained() {
            true => QueuePairState::Drained,
            false => QueuePairState::Draining,
        };
        slot.down.get_or_insert_with(|| {
            (Instant::now(), format!("queue pair {index} (number {number}) at {gid}: {why}"))
        });
        true
    }

    /// Stops the queue pairs that the device reports as failed, and returns their indexes. Ends the
    /// drain of those that take too long.
    pub(super) fn check_failures(&mut self, now: Instant) -> Vec<usize> {
        let mut stopped = Vec::new();
        for index in 0..self.slots.len() {
            let adapter = Arc::clone(self.adapter(index));
            let slot = &mut self.slots[index];
            match (slot.state, &slot.down) {
                (QueuePairState::Draining, Some((since, _)))
                    if now.saturating_duration_since(*since) >= DRAIN_TIMEOUT =>
                {
                    slot.state = QueuePairState::Drained;
                }
                (QueuePairState::Active, _) => {
                    let number = slot.pair.as_ref().map(QueuePair::number);
                    if number.is_some_and(|number| adapter.queue_pair_failed(number))
                        && self.stop(index, "the device reports that it has failed")
                    {
                        stopped.push(index);
                    }
                }
                _ => {}
            }
        }
        stopped
    }

    /// The writes that were in flight on the failed queue pairs of a slot.
    pub(super) fn unconfirmed(&self, index: usize) -> &[W] {
        &self.slots[index].unconfirmed
    }

    /// Takes them out, when it is known whether they have reached the peer.
    pub(super) fn take_unconfirmed(&mut self, index: usize) -> Vec<W> {
        std::mem::take(&mut self.slots[index].unconfirmed)
    }

    /// Since when the queue pair that has been down for longest is down, and why. With several
    /// pairs of ports: since when none is active.
    pub(super) fn longest_down(&self) -> Option<(Instant, &str)> {
        let down = self.slots.iter().filter_map(|slot| slot.down.as_ref());
        let found = match self.port_pairs {
            1 => down.min_by_key(|(since, _)| *since),
            _ if self.is_usable() => None,
            _ => down.max_by_key(|(since, _)| *since),
        };
        found.map(|(since, why)| (*since, why.as_str()))
    }

    /// Why the queue pair of a slot does not work, if it does not.
    pub(super) fn down_reason(&self, index: usize) -> Option<&str> {
        self.slots[index].down.as_ref().map(|(_, why)| why.as_str())
    }

    /// What each has carried, for the metrics.
    pub(super) fn observe(&self) -> Vec<FlowObservation> {
        let observe = |(index, slot): (usize, &QueuePairSlot<W>)| FlowObservation {
            number: index as u32,
            bytes: slot.carried.bytes(),
            path: PathFigures::default(),
        };
        self.slots.iter().enumerate().map(observe).collect()
    }

    /// Ends all queue pairs: the device reads and writes nothing for the connection afterwards.
    pub(super) fn close(&mut self) {
        for slot in &mut self.slots {
            slot.pair = None;
            slot.state = QueuePairState::Unconnected;
            slot.writes.clear();
            slot.bytes_in_flight = 0;
        }
    }

    /// Makes a queue pair fail without noting it.
    #[cfg(test)]
    pub(super) fn break_queue_pair(&self, index: usize) {
        if let Some(pair) = &self.slots[index].pair {
            pair.fail().unwrap();
        }
    }

    /// The id of a slot's work: its index in the low 8 bits, and then the generation.
    fn id(&self, index: usize) -> u64 {
        u64::from(self.slots[index].generation) << 8 | index as u64
    }
}

impl<W> QueuePairSlot<W> {
    /// Ends its queue pair. The writes in flight are then unconfirmed.
    fn end(&mut self) {
        self.pair = None;
        self.unconfirmed.extend(self.writes.drain(..).map(|(note, _)| note));
        (self.bytes_in_flight, self.flushed, self.receives, self.probing) = (0, 0, 0, false);
        self.generation = (self.generation + 1) & 0xff_ffff;
    }

    /// Whether all work of its failed queue pair is complete.
    fn is_drained(&self) -> bool {
        self.receives == 0 && !self.probing && self.flushed >= self.writes.len()
    }
}

/// Room of the completion queue of this number of queue pairs: for the work of each, and for what
/// is left of a predecessor whose drain took too long. For two of them it is a power of two, with
/// the entry that devices add.
fn completion_queue_depth(count: usize) -> u32 {
    (MAX_WRITES as u32 + MAX_RECEIVES) * count as u32 + MAX_RECEIVES - 1
}

/// A completion queue for this number of queue pairs.
fn new_completion_queue(adapter: &Adapter, count: usize) -> Result<Arc<CompletionQueue>, Error> {
    let depth = completion_queue_depth(count);
    let queue = CompletionQueue::new(&adapter.context, depth).map_err(system)?;
    // Clears the failure of an earlier queue at the same address.
    adapter.completion_queue_failed(&queue);
    Ok(Arc::new(queue))
}

#[cfg(test)]
mod tests {
    use super::super::{receiver, sender};
    use super::*;

    /// A pair of connections, one in each direction, with two queue pairs each. Soft-RoCE's queues
    /// are in the kernel's memory, so this computes what mlx5 has in the process's, by the sizes of
    /// its structures.
    #[test]
    fn idle_pair_pins_little_memory_with_mlx5() {
        const COUNT: usize = 2;
        let pages = |bytes: usize| bytes.next_multiple_of(4096);
        // Room for a control segment and the longest operation, which binds a memory window, and
        // for inline bytes.
        let entry = 16 + 176 + (4 + MAX_INLINE as usize).next_multiple_of(16);
        let sends = (MAX_WRITES * entry.next_multiple_of(64)).next_power_of_two();
        let receives = POSTED_RECEIVES.next_power_of_two() * 16;
        let completions = (completion_queue_depth(COUNT) as usize + 1).next_power_of_two() * 64;
        let queues = pages(completions) + COUNT * pages(sends + receives);
        let staging =
            [sender::StagingLayout::new(1).bytes(), receiver::staging_bytes(1)].map(pages);
        let pinned: usize = staging.iter().map(|staging| staging + queues).sum();
        assert!(pinned <= 128 << 10, "{pinned} bytes, of which {queues} are in queues of each");
    }
}
