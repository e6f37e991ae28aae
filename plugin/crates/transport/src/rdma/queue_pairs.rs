//! The lanes of a connection: queue pairs, what is on its way on them, and what becomes of them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use evenkeel_protocol::{MAX_PARTS_IN_FLIGHT, PacketMarking, PortInfo, QueuePairInfo};
use evenkeel_verbs::{
    Access, CompletionQueue, CompletionStatus, Context, MemoryRegion, QueuePair, StagingBuffer,
    WorkCompletion, WriteRequest, WriteSource,
};

use super::{Adapter, DRAIN};
use crate::error::{Error, ErrorKind};
use crate::memory::buffers::{RecvBuffer, SendBuffer};
use crate::sys::{self, PathFigures};
use crate::telemetry::counters::FlowCounters;
use crate::telemetry::metrics::FlowObservation;

/// Writes of the peer that a queue pair makes room for. When there is no room, its device asks the peer's to wait.
const EXPECTED: usize = 256;
/// Work that a queue pair takes in each direction.
const DEPTH: u32 = EXPECTED as u32;
/// Bytes that are copied into a request, if the device can.
const INLINE: u32 = 256;

/// Marks the work of expecting a write among the numbers of works.
const EXPECTING: u64 = 1 << 63;
/// Marks the read that shows whether a queue pair gets through.
const PROBING: u64 = 1 << 62;

/// The lanes of one side. `W` is what is noted of a write.
pub(super) struct QueuePairs<W> {
    pub(super) adapter: Arc<Adapter>,
    /// Those that the connection has had.
    left: Vec<Arc<Adapter>>,
    pub(super) completions: Arc<CompletionQueue>,
    all: Vec<QueuePairSlot<W>>,
    /// Most bytes on their way on a lane before others take what is left.
    cap: u64,
    polled: Vec<WorkCompletion>,
}

pub(super) struct QueuePairSlot<W> {
    stage: QueuePairState,
    /// None when there is none yet, or none any more.
    pair: Option<QueuePair>,
    sequence: u32,
    /// Tells this queue pair's work from that of those before it.
    generation: u32,
    /// Writes that were posted and not told of, oldest first, and their bytes.
    writes: VecDeque<(W, u64)>,
    outstanding: u64,
    /// Of those, how many were given up.
    flushed: usize,
    /// Writes that were posted to queue pairs that have failed, and of which nobody here knows whether they came.
    unknown: Vec<W>,
    /// Writes of the peer that there is room for.
    expected: usize,
    /// Whether a probe is on its way.
    probing: bool,
    /// Since when it does not work, and why.
    down: Option<(Instant, String)>,
    pub(super) carried: FlowCounters,
}

/// What a lane can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueuePairState {
    /// There is no queue pair, or one that is not connected.
    Unconnected,
    /// The queue pair takes what comes, but the peer's does not yet.
    Connected,
    /// Both can send.
    Active,
    /// The queue pair has failed and tells of its work.
    Draining,
    /// It has told of all.
    Drained,
}

/// Something that a lane tells.
pub(crate) enum QueuePairEvent<W> {
    /// A lane that was probed gets through.
    Probed(usize),
    /// A write of so many bytes is where it was to go.
    Sent(usize, W, u64),
    /// A write of the peer has come: bytes and number.
    Received(usize, u32, u32),
    /// The queue pair has failed, and why.
    Failed(usize, String),
}

impl<W> QueuePairs<W> {
    pub(super) fn new(adapter: &Arc<Adapter>, count: usize, cap: u64) -> Result<Self, Error> {
        let completions = completions(adapter, count)?;
        let lane = |_| QueuePairSlot {
            stage: QueuePairState::Unconnected,
            pair: None,
            sequence: 0,
            generation: 0,
            writes: VecDeque::new(),
            outstanding: 0,
            flushed: 0,
            unknown: Vec::new(),
            expected: 0,
            probing: false,
            down: None,
            carried: FlowCounters::default(),
        };
        Ok(Self {
            adapter: Arc::clone(adapter),
            left: Vec::new(),
            completions,
            all: (0..count).map(lane).collect(),
            cap,
            polled: Vec::new(),
        })
    }

    pub(super) fn count(&self) -> usize {
        self.all.len()
    }

    pub(super) fn all(&self) -> &[QueuePairSlot<W>] {
        &self.all
    }

    pub(super) fn stage(&self, lane: usize) -> QueuePairState {
        self.all[lane].stage
    }

    pub(super) fn are_live(&self) -> bool {
        self.all.iter().all(|lane| lane.stage == QueuePairState::Active)
    }

    /// The registration of a buffer for what is written there.
    pub(super) fn target(&self, buffer: &RecvBuffer) -> Result<Arc<MemoryRegion>, Error> {
        let made = |context: &_| buffer.register(context);
        self.region(buffer.address(), buffer.length(), Access::RemoteReadWrite, made)
    }

    /// The registration of a buffer for what is sent.
    pub(super) fn payload(&self, buffer: &SendBuffer) -> Result<Arc<MemoryRegion>, Error> {
        let made = |context: &_| buffer.register(context);
        self.region(buffer.address(), buffer.length(), Access::LocalRead, made)
    }

    fn region(
        &self,
        start: u64,
        length: usize,
        access: Access,
        register: impl FnOnce(&Arc<Context>) -> Result<MemoryRegion, evenkeel_verbs::Error>,
    ) -> Result<Arc<MemoryRegion>, Error> {
        let previous = self.left.iter().map(|adapter| &adapter.regions);
        self.adapter.regions.region(previous, start, length, access, register)
    }

    /// A queue of another port, to go over to.
    pub(super) fn completions_at(&self, adapter: &Adapter) -> Result<Arc<CompletionQueue>, Error> {
        completions(adapter, self.all.len())
    }

    /// Leaves the port, or begins anew there: all queue pairs end, with what has come by them and was not taken.
    pub(super) fn move_to(
        &mut self,
        adapter: &Arc<Adapter>,
        completions: Arc<CompletionQueue>,
        why: &str,
    ) {
        let gid = self.adapter.gid();
        for (at, lane) in self.all.iter_mut().enumerate() {
            lane.end();
            lane.stage = QueuePairState::Unconnected;
            lane.down.get_or_insert_with(|| (Instant::now(), format!("lane {at} at {gid}: {why}")));
        }
        self.completions = completions;
        let left = std::mem::replace(&mut self.adapter, Arc::clone(adapter));
        if !self.left.iter().any(|other| Arc::ptr_eq(other, &left)) {
            self.left.push(left);
        }
    }

    /// Gives a lane a new queue pair.
    pub(super) fn renew(&mut self, lane: usize) -> Result<QueuePairInfo, Error> {
        let number = self.adapter.number();
        let lane = &mut self.all[lane];
        // The old one first: there may be room for one only.
        lane.end();
        // Devices that copy less say so by an error.
        let pair = QueuePair::new(&self.completions, DEPTH, INLINE, number)
            .or_else(|_| QueuePair::new(&self.completions, DEPTH, 0, number))
            .map_err(system)?;
        let random: [u8; 4] = sys::random().map_err(|error| Error::system("random", &error))?;
        lane.sequence = u32::from_le_bytes(random) & 0xff_ffff;
        lane.stage = QueuePairState::Unconnected;
        let word = QueuePairInfo { number: pair.number(), sequence: lane.sequence };
        lane.pair = Some(pair);
        Ok(word)
    }

    /// Connects a lane's new queue pair.
    pub(super) fn connect(
        &mut self,
        at: usize,
        port: &PortInfo,
        pair: QueuePairInfo,
        traffic: PacketMarking,
    ) -> Result<(), Error> {
        let peer = self.adapter.connect_attributes(port, pair, self.all[at].sequence, traffic);
        let id = self.id(at) | EXPECTING;
        let lane = &mut self.all[at];
        let Some(own) = &lane.pair else { return Ok(()) };
        own.connect(&peer).map_err(system)?;
        while lane.expected < EXPECTED {
            own.post_recv(id).map_err(system)?;
            lane.expected += 1;
        }
        lane.stage = QueuePairState::Connected;
        Ok(())
    }

    /// The peer takes what a lane sends.
    pub(super) fn go(&mut self, lane: usize) {
        let lane = &mut self.all[lane];
        if lane.stage == QueuePairState::Connected {
            lane.stage = QueuePairState::Active;
        }
        lane.down = None;
    }

    /// The lane that has least on its way, if it takes more.
    pub(super) fn best(&self) -> Option<usize> {
        let can = |lane: &QueuePairSlot<W>| {
            lane.stage == QueuePairState::Active
                && lane.writes.len() < MAX_PARTS_IN_FLIGHT
                && (lane.outstanding < self.cap || lane.writes.is_empty())
        };
        let lanes = self.all.iter().enumerate().filter(|(_, lane)| can(lane));
        lanes.min_by_key(|(_, lane)| (lane.outstanding, lane.writes.len())).map(|(at, _)| at)
    }

    /// Begins a write of a few bytes, which stay where they are in an outbox; into the request they are copied, if they fit.
    pub(super) fn write_copy(
        &mut self,
        at: usize,
        bytes: &[u8],
        (outbox, place): (&StagingBuffer, usize),
        to: (u64, u32),
        immediate: u32,
        note: W,
    ) -> Result<(), Error> {
        let inline = self.all[at].pair.as_ref().map_or(0, QueuePair::max_inline);
        let from = if bytes.is_empty() {
            WriteSource::Empty
        } else if bytes.len() <= inline {
            WriteSource::Inline(bytes)
        } else {
            WriteSource::Region(outbox.region(), outbox.address(place), bytes.len() as u32)
        };
        self.write(at, from, to, immediate, note)
    }

    /// Begins a write on a live lane.
    pub(super) fn write(
        &mut self,
        at: usize,
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
        let id = self.id(at);
        let lane = &mut self.all[at];
        let Some(pair) = &lane.pair else { return Ok(()) };
        pair.post_write(&WriteRequest { id, source, remote_address, remote_key, immediate })
            .map_err(system)?;
        lane.writes.push_back((note, bytes));
        lane.outstanding += bytes;
        Ok(())
    }

    /// Begins to read a byte of the peer's memory by a lane that is connected, which tells whether anything gets through.
    pub(super) fn probe(
        &mut self,
        at: usize,
        (into, place): (&MemoryRegion, u64),
        (from, key): (u64, u32),
    ) -> Result<(), Error> {
        let id = self.id(at) | PROBING;
        let lane = &mut self.all[at];
        let Some(pair) = &lane.pair else { return Ok(()) };
        pair.post_read(id, (into, place, 1), from, key).map_err(system)?;
        lane.probing = true;
        Ok(())
    }

    /// What the lanes tell, some at a time; whether there may be more.
    pub(super) fn poll(&mut self, told: &mut Vec<QueuePairEvent<W>>) -> Result<bool, Error> {
        let mut polled = std::mem::take(&mut self.polled);
        self.completions.poll(&mut polled).map_err(system)?;
        let any = !polled.is_empty();
        for WorkCompletion { id, status } in polled.drain(..) {
            let at = (id & 0xff) as usize;
            let (expecting, probing) = (id & EXPECTING != 0, id & PROBING != 0);
            let generation = (id >> 8) as u32 & 0xff_ffff;
            let Some(lane) = self.all.get_mut(at) else { continue };
            if lane.generation != generation {
                continue;
            }
            if probing {
                lane.probing = false;
            }
            match status {
                CompletionStatus::Done if probing => {
                    // One that has failed meanwhile begins anew.
                    if lane.stage == QueuePairState::Connected {
                        told.push(QueuePairEvent::Probed(at));
                    }
                }
                CompletionStatus::Done => {
                    if let Some((note, bytes)) = lane.writes.pop_front() {
                        lane.outstanding -= bytes;
                        told.push(QueuePairEvent::Sent(at, note, bytes));
                    }
                }
                CompletionStatus::Received { bytes, immediate } => {
                    lane.expected -= 1;
                    if matches!(lane.stage, QueuePairState::Active | QueuePairState::Connected)
                        && let Some(pair) = &lane.pair
                    {
                        match pair.post_recv(id) {
                            Ok(()) => lane.expected += 1,
                            Err(error) => told.push(QueuePairEvent::Failed(at, error.to_string())),
                        }
                    }
                    told.push(QueuePairEvent::Received(at, bytes, immediate));
                }
                CompletionStatus::Failed(_) | CompletionStatus::Flushed => {
                    if expecting {
                        lane.expected -= 1;
                    } else if !probing {
                        lane.flushed += 1;
                    }
                    if let CompletionStatus::Failed(why) = status {
                        told.push(QueuePairEvent::Failed(at, why));
                    } else if lane.stage == QueuePairState::Active
                        || lane.stage == QueuePairState::Connected
                    {
                        told.push(QueuePairEvent::Failed(at, "it was given up".to_owned()));
                    }
                }
            }
            if lane.stage == QueuePairState::Draining && lane.is_silent() {
                lane.stage = QueuePairState::Drained;
            }
        }
        self.polled = polled;
        Ok(any)
    }

    /// Stops a lane, unless it is stopped; whether it was not. It is drained when its queue pair has told of all its work.
    pub(super) fn stop(&mut self, at: usize, why: &str) -> bool {
        let lane = &mut self.all[at];
        if !matches!(lane.stage, QueuePairState::Active | QueuePairState::Connected) {
            return false;
        }
        let number = lane.pair.as_ref().map_or(0, QueuePair::number);
        if let Some(pair) = &lane.pair {
            // Fails only when the device is gone: then nothing comes any more either.
            let _ = pair.fail();
        }
        lane.stage =
            if lane.is_silent() { QueuePairState::Drained } else { QueuePairState::Draining };
        let gid = self.adapter.gid();
        lane.down.get_or_insert_with(|| {
            (Instant::now(), format!("queue pair {number} of lane {at} at {gid}: {why}"))
        });
        true
    }

    /// Stops lanes that their device has given up, and does not wait longer for those that don't tell of all their work.
    pub(super) fn look_after(&mut self, now: Instant) -> Vec<usize> {
        let mut stopped = Vec::new();
        for at in 0..self.all.len() {
            let lane = &mut self.all[at];
            match (lane.stage, &lane.down) {
                (QueuePairState::Draining, Some((since, _)))
                    if now.saturating_duration_since(*since) >= DRAIN =>
                {
                    lane.stage = QueuePairState::Drained;
                }
                (QueuePairState::Active, _) => {
                    let failed = lane.pair.as_ref().map(QueuePair::number);
                    if failed.is_some_and(|number| self.adapter.queue_pair_failed(number))
                        && self.stop(at, "the device has given it up")
                    {
                        stopped.push(at);
                    }
                }
                _ => {}
            }
        }
        stopped
    }

    /// What a lane had on its way when its queue pairs failed.
    pub(super) fn unknown(&self, lane: usize) -> &[W] {
        &self.all[lane].unknown
    }

    /// The same, now that somebody knows.
    pub(super) fn take_unknown(&mut self, lane: usize) -> Vec<W> {
        std::mem::take(&mut self.all[lane].unknown)
    }

    /// Since when the one that has not worked for longest does not, and why.
    pub(super) fn longest_down(&self) -> Option<(Instant, &str)> {
        let down = self.all.iter().filter_map(|lane| lane.down.as_ref());
        down.min_by_key(|(since, _)| *since).map(|(since, why)| (*since, why.as_str()))
    }

    /// What each has carried, for the metrics.
    pub(super) fn observe(&self) -> Vec<FlowObservation> {
        let observe = |(number, lane): (usize, &QueuePairSlot<W>)| FlowObservation {
            number: number as u32,
            bytes: lane.carried.bytes(),
            path: PathFigures::default(),
        };
        self.all.iter().enumerate().map(observe).collect()
    }

    /// Ends all queue pairs: nothing reads or writes for the connection afterwards.
    pub(super) fn close(&mut self) {
        for lane in &mut self.all {
            lane.pair = None;
            lane.stage = QueuePairState::Unconnected;
            lane.writes.clear();
            lane.outstanding = 0;
        }
    }

    /// Makes a queue pair fail, and says nothing.
    #[cfg(test)]
    pub(super) fn break_pair(&self, lane: usize) {
        if let Some(pair) = &self.all[lane].pair {
            pair.fail().unwrap();
        }
    }

    fn id(&self, lane: usize) -> u64 {
        u64::from(self.all[lane].generation) << 8 | lane as u64
    }
}

impl<W> QueuePairSlot<W> {
    /// Ends its queue pair: nobody knows then of what was on its way whether it has come.
    fn end(&mut self) {
        self.pair = None;
        self.unknown.extend(self.writes.drain(..).map(|(note, _)| note));
        (self.outstanding, self.flushed, self.expected, self.probing) = (0, 0, 0, false);
        self.generation = (self.generation + 1) & 0xff_ffff;
    }

    /// Whether its queue pair has told of all its work.
    fn is_silent(&self) -> bool {
        self.expected == 0 && !self.probing && self.flushed >= self.writes.len()
    }
}

/// A queue for so many lanes: for both directions of each, and for what is left of a queue pair that was replaced.
fn completions(adapter: &Adapter, lanes: usize) -> Result<Arc<CompletionQueue>, Error> {
    let depth = 4 * DEPTH * lanes as u32;
    let queue = CompletionQueue::new(&adapter.context, depth).map_err(system)?;
    // What is known of one before it at the same place is not of this one.
    adapter.completion_queue_failed(&queue);
    Ok(Arc::new(queue))
}

pub(super) fn system(error: evenkeel_verbs::Error) -> Error {
    Error::new(ErrorKind::System, error.to_string())
}
