//! The receiver: posts buffers, writes credits for them, and completes messages as their parts are
//! received.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use evenkeel_protocol::{
    ArrivalError, Arrivals, ControlMessage, MAX_MESSAGE_BYTES, MatchStep, MessagePart,
    QueuePairInfo, ReceivedMessage,
};
use evenkeel_verbs::{Access, StagingBuffer, WriteSource};

use super::control::PathFailure;
use super::credit::{CREDITS, Credit, CreditImmediate, credit_bytes};
use super::eager::{EAGER_BYTES, RING_BYTES, RingProgress, offset_of, with_buffer};
use super::endpoint::{Endpoint, EndpointCore, EndpointState, OnOpened};
use super::error::{ConnectionError, system};
use super::flush::Flushes;
use super::mr_cache::MrHandle;
use super::queue_pairs::{QueuePairEvent, QueuePairState, QueuePairs};
use super::regions::Regions;
use crate::Context;
use crate::connection::base::{Base, Direction, InFlight};
use crate::connection::recv::{Inbound, TaggedBuffer};
use crate::connection::request::{MAX_REQUESTS, Operation, Owner, Request, Target};
use crate::connection::unexpected::{Delivery, TagMatcher, UnexpectedMemory, deliver};
use crate::device::Device;
use crate::error::{Error, ErrorKind};
use crate::memory::buffers::RecvBuffer;
use crate::runtime::reactor::Workers;
use crate::stream::Stream;
use crate::sys;

/// Bytes of the staging buffer of a receiver with this number of ports.
pub(super) const fn staging_bytes(ports: usize) -> usize {
    RING_BYTES + CREDITS * credit_bytes(ports)
}

/// How long completions of received parts may take after the control connection has ended.
const LATE_COMPLETIONS: Duration = Duration::from_millis(500);
/// How long a sender may take to fail over after its host has reset the control connection.
const RESET_FAILOVER_TIMEOUT: Duration = Duration::from_secs(5);

/// The receiving end.
pub(crate) type Receiver = Endpoint<RecvState>;

/// The state of the receiving end.
pub(crate) struct RecvState {
    core: EndpointCore<()>,
    /// The ring that the sender writes eager messages to, from its first byte on, and copies of the
    /// credits in flight, from [`RING_BYTES`] on.
    staging: StagingBuffer,
    /// Number of ports for whose keys the copies have room.
    own_ports: usize,
    /// Number of ports for whose keys the sender's memory has room in each credit.
    sender_keys: usize,
    arrivals: Arrivals<PostedBuffer>,
    tags: TagMatcher,
    /// Lengths of the messages, from the next one on, that are unexpected and wait for memory.
    unexpected_lengths: VecDeque<usize>,
    /// Messages whose credits are to be written.
    pending_credits: VecDeque<u64>,
    ring_progress: RingProgress,
    /// The sender's offers that were not answered yet, by queue pair.
    offers: Vec<Option<(QueuePairInfo, Vec<MessagePart>)>>,
    /// The message for which the sender has requested a credit, and its length.
    credit_request: Option<(u64, u64)>,
    /// Number of messages that the sender had sent when it closed the connection.
    closed_after: Option<u64>,
    /// Since when there is no control connection, and why.
    control_lost: Option<(Instant, String)>,
    /// Whether the sender has other paths.
    has_alternates: bool,
    /// Number of the control connection.
    control_number: u32,
    /// Where messages may be in GPU memory.
    flush: Option<Flushes>,
}

struct PostedBuffer {
    buffer: RecvBuffer,
    tag: i32,
    /// The request's; `None` for an unexpected message.
    target: Option<Target>,
    /// Held while the sender may write to the buffer.
    regions: Regions,
}

impl Receiver {
    /// Starts to open a connection with this number of queue pairs, whose control connection is
    /// open. The sender may fail over to the `alternates`.
    pub(crate) fn open(
        context: Context,
        workers: &Arc<Workers>,
        (stream, peer): (Stream, SocketAddr),
        queue_pairs: usize,
        alternates: Vec<IpAddr>,
        on_opened: OnOpened,
    ) -> Result<Arc<Self>, Error> {
        let deadline = Instant::now() + context.settings.connect_timeout;
        let is_host_only = context.memory_types.is_host_only();
        let offers = (0..queue_pairs).map(|_| None).collect();
        // Credits are short, so their bytes in flight need no limit.
        let queue_pairs = QueuePairs::new(context.device.ports(), queue_pairs, u64::MAX)?;
        let own_ports = queue_pairs.ports().len();
        let bytes = staging_bytes(own_ports);
        let staging = StagingBuffer::new(queue_pairs.contexts(), bytes).map_err(system)?;
        let flush = match is_host_only {
            true => None,
            false => Some(Flushes::new(queue_pairs.ports())?),
        };
        let mut state = RecvState {
            core: EndpointCore::new(queue_pairs, stream, &context, on_opened, deadline),
            staging,
            own_ports,
            sender_keys: 1,
            arrivals: Arrivals::default(),
            tags: TagMatcher::default(),
            unexpected_lengths: VecDeque::new(),
            pending_credits: VecDeque::new(),
            ring_progress: RingProgress::default(),
            offers,
            credit_request: None,
            closed_after: None,
            control_lost: None,
            has_alternates: !alternates.is_empty(),
            control_number: 0,
            flush,
        };
        state.core.send_ports(&state.staging, 1);
        if !alternates.is_empty() {
            state.core.control.send(&ControlMessage::AlternateAddresses(alternates));
        }
        Self::start(context, Direction::Recv, peer, workers, state)
    }

    /// The sender has failed over, with the control connection of this number.
    pub(crate) fn accept_failover(self: &Arc<Self>, number: u32, device: &Device, stream: Stream) {
        self.with_state(|_, state| {
            // Bytes on an earlier control connection may be received late.
            if number <= state.control_number {
                return Ok(());
            }
            state.control_number = number;
            let why = match (state.core.queue_pairs.longest_down(), &state.control_lost) {
                (Some((_, why)), _) => why.to_owned(),
                (None, Some((_, why))) => why.clone(),
                (None, None) => "the sender has left that path".to_owned(),
            };
            Self::fail_over(self, state, device, stream, &why)?;
            Ok(())
        });
    }

    fn recv(this: &Arc<Self>, buffer: RecvBuffer) -> Result<Option<Request>, Error> {
        let operation = Operation::new();
        let accepted = Self::accept_buffers(this, 1, |state, base| {
            let regions = state.regions(&buffer, Regions::default())?;
            Ok(state.post_target(Target::new(buffer, &operation, 0), 0, regions, base))
        })?;
        Ok(accepted.then(|| Request::new(operation, Arc::clone(this) as Arc<dyn Owner>)))
    }

    fn recv_group(this: &Arc<Self>, group: &[TaggedBuffer<'_>]) -> Result<Option<Request>, Error> {
        let operation = Operation::of_group(group.len());
        let accepted = Self::accept_buffers(this, group.len(), |state, base| match group {
            [TaggedBuffer { buffer, tag, registration }] if state.tags.has_common_tag(*tag) => {
                let regions = state.regions(buffer, state.registered(buffer, *registration))?;
                Ok(state.post_target(Target::new(*buffer, &operation, 0), *tag, regions, base))
            }
            _ => {
                for (index, TaggedBuffer { buffer, tag, registration }) in group.iter().enumerate()
                {
                    let mut target = Target::new(*buffer, &operation, index);
                    target.registered = state.registered(buffer, *registration);
                    state.tags.post(*tag, buffer.length() as u64, target);
                }
                Ok(Ok(()))
            }
        })?;
        Ok(accepted.then(|| Request::new(operation, Arc::clone(this) as Arc<dyn Owner>)))
    }

    fn flush(
        this: &Arc<Self>,
        memory: RecvBuffer,
        registration: Option<&MrHandle>,
    ) -> Result<Request, Error> {
        if let Some(error) = this.failure() {
            return Err(error);
        }
        let operation = Operation::new();
        let mut begun = Ok(());
        this.with_state(|_, state| {
            let registered = state.registered(&memory, registration);
            begun = state.begin_flush(memory, registered, &operation);
            Ok(())
        });
        begun.map(|()| Request::new(operation, Arc::clone(this) as Arc<dyn Owner>))
    }

    /// Has `post` post this number of buffers if there is room, and returns whether there is. The
    /// outer errors of `post` are the caller's, the inner ones end the connection.
    fn accept_buffers(
        this: &Arc<Self>,
        count: usize,
        post: impl FnOnce(&mut RecvState, &Base) -> Result<Result<(), ConnectionError>, Error>,
    ) -> Result<bool, Error> {
        if let Some(error) = this.failure() {
            return Err(error);
        }
        let mut accepted = Ok(true);
        this.with_state(|endpoint, state| {
            let base = endpoint.base();
            let room = MAX_REQUESTS.min(state.arrivals.room());
            if state.outstanding() + count > room {
                accepted = Ok(false);
                return Ok(());
            }
            match post(state, base) {
                Ok(posted) => posted?,
                Err(error) => {
                    accepted = Err(error);
                    return Ok(());
                }
            }
            state.core.notify_owner(base);
            state.check_credit_request()?;
            state.post_work(base)?;
            state.core.notify_owner(base);
            state.check_unrecoverable(base)
        });
        accepted
    }
}

impl EndpointState for RecvState {
    type Note = ();
    // The sender considers a write done when its device has reported that.
    const PEER_CONFIRMS_WRITES: bool = false;

    fn core(&mut self) -> &mut EndpointCore<()> {
        &mut self.core
    }

    fn on_event(&mut self, event: QueuePairEvent<()>, base: &Base) -> Result<(), ConnectionError> {
        match event {
            // Only the sender probes.
            QueuePairEvent::Sent(..) | QueuePairEvent::Probed(_) => {}
            QueuePairEvent::Received(index, bytes, immediate) => {
                let slot = &self.core.queue_pairs.slots()[index];
                slot.carried.chunk(&base.counters, bytes.into());
                if let Some(received) = self.arrivals.part_received(bytes, immediate)? {
                    self.complete(received, base)?;
                }
            }
            QueuePairEvent::Failed(index, why) => {
                if self.core.queue_pairs.stop(index, &why) {
                    base.counters.lost.add(1);
                    self.core.control.send(&ControlMessage::QueuePairFailed(index as u8));
                }
            }
        }
        Ok(())
    }

    fn post_work(&mut self, base: &Base) -> Result<(), ConnectionError> {
        if let Some(flush) = &mut self.flush {
            self.core.owner_to_notify |= flush.poll()?;
            if let Some((_, why)) = flush.failure()
                && !self.has_alternates
            {
                return Err(ConnectionError(ErrorKind::System, why.clone()));
            }
            // Nothing more may arrive over a port that cannot flush. Its queue pairs are replaced,
            // and then it can again.
            for (port, why) in flush.take_failed_ports() {
                self.stop_port(port, &why, base);
            }
        }
        self.answer_offers(base)?;
        self.post_tagged_buffers(base)?;
        self.write_credits()?;
        self.report_ring_progress()
    }

    fn on_failover(&mut self, _base: &Base) -> Result<(), ConnectionError> {
        self.core.queue_pairs.set_ports(self.own_ports.min(self.sender_keys), 1);
        self.staging.reregister(self.core.queue_pairs.contexts()).map_err(system)?;
        for posted in self.arrivals.posted_mut() {
            if !posted.regions.is_empty() {
                let none = Regions::default();
                posted.regions = self.core.queue_pairs.recv_regions(&posted.buffer, none)?;
            }
        }
        if let Some(flush) = self.flush.take() {
            self.flush = Some(Flushes::new(self.core.queue_pairs.ports())?);
            for (memory, operation) in flush.into_pending() {
                self.begin_flush(memory, Regions::default(), &operation)?;
            }
        }
        self.offers.fill(None);
        self.control_lost = None;
        self.core.send_ports(&self.staging, 1);
        Ok(())
    }

    fn receive_control(&mut self, base: &Base) -> Result<(), ConnectionError> {
        while let Some(message) = self.core.control.receive() {
            self.on_control_message(message, base)?;
        }
        self.core.control.flush();
        if let Some(why) = self.core.control.ended() {
            let why = why.to_owned();
            self.control_lost.get_or_insert_with(|| (Instant::now(), why));
        }
        self.work(base)?;
        self.check_unrecoverable(base)
    }

    fn tick(&mut self, now: Instant, base: &Base) -> Result<(), ConnectionError> {
        self.core.check_deadlines(now)?;
        for index in self.core.queue_pairs.check_failures(now) {
            base.counters.lost.add(1);
            self.core.control.send(&ControlMessage::QueuePairFailed(index as u8));
        }
        let timeout = base.context.settings.recovery_timeout;
        if self.outstanding() > 0
            && let Some((since, why)) = self.core.queue_pairs.longest_down()
            && now.saturating_duration_since(since) >= timeout
        {
            let what = format!("{why}, and no other one for {} s", timeout.as_secs());
            return Err(ConnectionError::remote(what));
        }
        if let Some((since, why)) = self.flush.as_ref().and_then(Flushes::failure)
            && now.saturating_duration_since(*since) >= timeout
        {
            return Err(ConnectionError(ErrorKind::System, why.clone()));
        }
        self.receive_control(base)
    }

    fn has_deadlines(&self) -> bool {
        let flush_failed = || self.flush.as_ref().is_some_and(Flushes::has_failed_port);
        self.control_lost.is_some()
            || self.offers.iter().any(Option::is_some)
            // Memory may become free in other connections.
            || !self.unexpected_lengths.is_empty()
            || flush_failed()
    }

    fn in_flight(&self) -> InFlight {
        InFlight {
            requests: self.outstanding(),
            bytes: self.arrivals.posted().map(|(_, capacity, _)| capacity).sum(),
        }
    }

    fn update_waits(&self, base: &Base) {
        base.set_outstanding(self.outstanding() > 0, sys::coarse_time());
    }

    fn is_delivered(&self) -> bool {
        true
    }

    fn close_message(&self) -> ControlMessage {
        ControlMessage::Close(0)
    }

    fn release_regions(&mut self) {
        self.flush = None;
        self.arrivals.clear();
        self.tags.buffers_mut().for_each(|target| target.registered = Regions::default());
    }
}

impl RecvState {
    fn on_control_message(
        &mut self,
        message: ControlMessage,
        base: &Base,
    ) -> Result<(), ConnectionError> {
        match message {
            ControlMessage::Ports(keys, ports) if self.core.peer_ports.is_empty() => {
                self.sender_keys = keys.into();
                self.core.set_peer_ports(ports, self.own_ports.min(self.sender_keys))?;
                if self.core.is_opening() && !self.core.is_eager() {
                    self.tags = TagMatcher::advertise_all();
                }
            }
            ControlMessage::AlternateAddresses(_) => self.has_alternates = true,
            ControlMessage::Offer(index, pair, parts) => {
                let index = self.core.check_index(index)?;
                if self.core.queue_pairs.stop(index, "the peer's has failed") {
                    base.counters.lost.add(1);
                }
                self.offers[index] = Some((pair, parts));
            }
            ControlMessage::Ready(index) => {
                let index = self.core.check_index(index)?;
                if self.core.queue_pairs.activate(index) {
                    base.counters.replaced.add(1);
                    self.repeat_credits();
                }
                if let Some(flush) = &mut self.flush {
                    let port = self.core.queue_pairs.port_of(index);
                    flush.repair(port, &self.core.queue_pairs.ports()[port])?;
                }
            }
            ControlMessage::CreditRequest(message, length) => {
                self.credit_request = Some((message, length));
                self.check_credit_request()?;
            }
            ControlMessage::Close(messages) => self.closed_after = Some(messages),
            ControlMessage::Tag(tag) => self.tags.set_common_tag(tag),
            ControlMessage::SameTagBelow(below, lengths) => {
                self.accept_unexpected(below, &lengths, base)?;
            }
            other => {
                let what = format!("protocol error: the sender sent {other:?}");
                return Err(ConnectionError::remote(what));
            }
        }
        Ok(())
    }

    /// Number of buffers that wait for their messages.
    fn outstanding(&self) -> usize {
        self.arrivals.outstanding() + self.tags.waiting()
    }

    /// Whether devices access a buffer.
    fn needs_region(&self, buffer: &RecvBuffer) -> bool {
        let is_eager = buffer.length() <= EAGER_BYTES && self.core.is_eager();
        !is_eager && buffer.length() > 0
    }

    /// The regions in which the caller has registered a buffer, if any are needed.
    fn registered(&self, buffer: &RecvBuffer, registration: Option<&MrHandle>) -> Regions {
        let handle = registration.filter(|_| self.needs_region(buffer));
        let access = Access::RemoteReadWrite;
        let regions = handle.map(|handle| {
            let ports = self.core.queue_pairs.ports();
            handle.regions(ports, buffer.address(), buffer.length(), access)
        });
        regions.unwrap_or_default()
    }

    /// The memory regions that a buffer needs: those in which it is `registered`, unless the
    /// connection has failed over since.
    fn regions(&self, buffer: &RecvBuffer, registered: Regions) -> Result<Regions, Error> {
        match self.needs_region(buffer) {
            true => self.core.queue_pairs.recv_regions(buffer, registered),
            false => Ok(Regions::default()),
        }
    }

    /// Stops the queue pairs of a port.
    fn stop_port(&mut self, port: usize, why: &str, base: &Base) {
        for index in 0..self.core.queue_pairs.count() {
            if self.core.queue_pairs.port_of(index) == port
                && self.core.queue_pairs.stop(index, why)
            {
                base.counters.lost.add(1);
                self.core.control.send(&ControlMessage::QueuePairFailed(index as u8));
            }
        }
    }

    /// Starts to flush a received message.
    fn begin_flush(
        &mut self,
        memory: RecvBuffer,
        registered: Regions,
        operation: &Arc<Operation>,
    ) -> Result<(), Error> {
        let regions = self.regions(&memory, registered)?;
        match &mut self.flush {
            None => Err(Error::argument("host memory needs no flush")),
            Some(_) if regions.is_empty() => {
                Err(Error::argument("an empty message cannot be flushed"))
            }
            Some(flush) => flush.begin(&regions, memory, operation),
        }
    }

    /// Posts a request's buffer for the next message.
    fn post_target(
        &mut self,
        target: Target,
        tag: i32,
        regions: Regions,
        base: &Base,
    ) -> Result<(), ConnectionError> {
        let buffer = target.buffer;
        self.post(PostedBuffer { buffer, tag, target: Some(target), regions }, base)
    }

    fn post(&mut self, posted: PostedBuffer, base: &Base) -> Result<(), ConnectionError> {
        let needs_credit = self.needs_credit(&posted);
        let capacity = (posted.buffer.length() as u64).min(MAX_MESSAGE_BYTES);
        match self.arrivals.post(capacity, posted)? {
            (_, Some(received)) => self.complete(received, base)?,
            (message, None) if needs_credit => self.pending_credits.push_back(message),
            (_, None) => {}
        }
        Ok(())
    }

    /// Posts memory for unexpected messages, and the tagged buffers whose turn it is.
    fn post_tagged_buffers(&mut self, base: &Base) -> Result<(), ConnectionError> {
        loop {
            self.post_unexpected(base)?;
            if self.arrivals.room() == 0 {
                break;
            }
            let Some(step) = self.tags.next_step(self.arrivals.next())? else { break };
            match step {
                MatchStep::Post { tag, buffer: mut target, .. } => {
                    let registered = std::mem::take(&mut target.registered);
                    let regions = self.regions(&target.buffer, registered)?;
                    self.post_target(target, tag, regions, base)?;
                }
                MatchStep::AskSender => {
                    if let Some(from) = self.tags.asked_from() {
                        self.core.control.send(&ControlMessage::TagsDifferFrom(from));
                    }
                }
                MatchStep::Deliver(delivery) => self.deliver_unexpected(delivery),
            }
        }
        Ok(())
    }

    /// The sender has sent messages with the same tag, up to the one `below`, with these lengths.
    /// Those without a buffer are unexpected.
    fn accept_unexpected(
        &mut self,
        below: u64,
        lengths: &[u32],
        base: &Base,
    ) -> Result<(), ConnectionError> {
        let next = self.arrivals.next();
        let is_message = |length: &u32| u64::from(*length) <= MAX_MESSAGE_BYTES;
        let is_valid =
            below.checked_sub(next).is_some_and(|more| more <= self.arrivals.room() as u64)
                && lengths.iter().all(is_message);
        if !is_valid || !self.core.is_eager() || !self.tags.set_same_tag_below(below) {
            let what = "protocol error: the sender sent too many messages, or was not asked";
            return Err(ConnectionError::remote(what));
        }
        let count = (below - next) as usize;
        let lengths = lengths.iter().map(|length| *length as usize).chain(std::iter::repeat(0));
        // A message in the eager ring has no length here, and may be the longest one.
        let lengths = lengths.map(|length| length.max(EAGER_BYTES)).take(count);
        self.unexpected_lengths = lengths.collect();
        self.post_tagged_buffers(base)?;
        self.check_credit_request()
    }

    /// Posts memory for unexpected messages. Beyond the bounds of the connection and the process
    /// they wait, and so do those behind them.
    fn post_unexpected(&mut self, base: &Base) -> Result<(), ConnectionError> {
        while let Some(length) = self.unexpected_lengths.front().copied() {
            if !self.tags.has_unexpected_room(length as u64) {
                break;
            }
            let Some(mut memory) = UnexpectedMemory::new(length) else { break };
            self.unexpected_lengths.pop_front();
            let buffer = memory.lend_mut();
            self.tags.push_unexpected(self.arrivals.next(), length as u64, memory);
            let regions = self.regions(&buffer, Regions::default())?;
            self.post(PostedBuffer { buffer, tag: 0, target: None, regions }, base)?;
        }
        Ok(())
    }

    /// All parts of a message were received.
    fn complete(
        &mut self,
        received: ReceivedMessage<PostedBuffer>,
        base: &Base,
    ) -> Result<(), ConnectionError> {
        let ReceivedMessage { posted, message, length, eager_place } = received;
        if let Some(place) = eager_place {
            if !self.core.is_eager() {
                let what = "protocol error: an eager message, which was not agreed on";
                return Err(ConnectionError::remote(what));
            }
            let offset = offset_of(place, length as usize).ok_or_else(|| {
                ConnectionError::remote("protocol error: an eager message outside of the ring")
            })?;
            with_buffer(length as usize, |bytes| {
                self.staging.read(offset, bytes);
                posted.buffer.part(0, bytes.len()).copy_from(bytes);
            });
            self.ring_progress.copied_out(message, length as usize);
        }
        // The regions end, unless others hold them, before the caller has the memory back.
        drop(posted.regions);
        base.counters.message(length);
        match posted.target {
            Some(target) => {
                target.complete(length);
                self.core.owner_to_notify = true;
            }
            None => {
                let delivery = self.tags.unexpected_received(message, length)?;
                delivery.into_iter().for_each(|delivery| self.deliver_unexpected(delivery));
            }
        }
        Ok(())
    }

    fn deliver_unexpected(&mut self, delivery: Delivery) {
        self.tags.memory_freed(deliver(delivery));
        self.core.owner_to_notify = true;
    }

    /// Writes credits to the sender as far as queue pairs have room.
    fn write_credits(&mut self) -> Result<(), ConnectionError> {
        while let Some(message) = self.pending_credits.front().copied()
            && let Some(index) = self.core.queue_pairs.least_loaded()
            && let Some(port) = self.core.peer_port(index)
        {
            self.pending_credits.pop_front();
            let posted = self.arrivals.posted().find(|(number, ..)| *number == message);
            let Some((_, capacity, PostedBuffer { buffer, tag, regions, .. })) = posted else {
                continue;
            };
            // Without a region nothing is written to the buffer; the credit only advertises the
            // tag.
            let credit = Credit {
                address: if regions.is_empty() { 0 } else { buffer.address() },
                keys: regions.remote_keys(),
                capacity: capacity as u32,
                tag: *tag,
            };
            let offset = Credit::offset(message, self.sender_keys);
            let remote = (port.address + offset as u64, port.key);
            let bytes = credit.encode(message);
            let bytes = &bytes[..credit_bytes(self.own_ports.min(self.sender_keys))];
            let at = RING_BYTES + Credit::offset(message, self.own_ports);
            self.staging.write(at, bytes);
            let copy = (&self.staging, at);
            let immediate = CreditImmediate::encode_credit(message);
            self.core.queue_pairs.write_copy(index, bytes, copy, remote, immediate, ())?;
        }
        Ok(())
    }

    /// Reports to the sender that messages have left the eager ring, when there are enough of them.
    fn report_ring_progress(&mut self) -> Result<(), ConnectionError> {
        let progress = self.arrivals.first();
        if self.ring_progress.is_due(progress)
            && let Some(index) = self.core.queue_pairs.least_loaded()
            && let Some(port) = self.core.peer_port(index)
        {
            let (remote, empty) = ((port.address, port.key), WriteSource::Empty);
            let immediate = CreditImmediate::encode_ring_progress(progress);
            self.core.queue_pairs.write(index, empty, remote, immediate, ())?;
            self.ring_progress.reported(progress);
        }
        Ok(())
    }

    /// Fails if the message for which the sender has requested a credit does not fit into its
    /// buffer, once that is posted.
    fn check_credit_request(&mut self) -> Result<(), ConnectionError> {
        let Some((message, length)) = self.credit_request else { return Ok(()) };
        let posted = self.arrivals.posted().find(|(number, ..)| *number == message);
        let Some((_, capacity, posted)) = posted else { return Ok(()) };
        let needs_credit = self.needs_credit(posted);
        self.credit_request = None;
        if length <= capacity {
            // It may have been overwritten by an older one that came late.
            if needs_credit && !self.pending_credits.contains(&message) {
                self.pending_credits.push_back(message);
            }
            return Ok(());
        }
        Err(ArrivalError::TooLong { length, capacity }.into())
    }

    /// Answers offers of queue pairs that replace drained ones.
    fn answer_offers(&mut self, base: &Base) -> Result<(), ConnectionError> {
        for index in 0..self.core.queue_pairs.count() {
            let Some(port) = self.core.peer_port(index) else { return Ok(()) };
            let state = self.core.queue_pairs.state(index);
            if !matches!(state, QueuePairState::Unconnected | QueuePairState::Drained) {
                continue;
            }
            let Some((pair, parts)) = self.offers[index].take() else { continue };
            let mut received = 0;
            for (at, part) in parts.iter().enumerate() {
                received |= u64::from(self.arrivals.has(part.message, part.index)) << at;
            }
            let may_wait = !self.core.is_opening();
            let has_others = self.core.queue_pairs.port_pairs() > 1;
            if pair == QueuePairInfo::NONE && !has_others {
                let what = "protocol error: an offer without a queue pair";
                return Err(ConnectionError::remote(what));
            }
            let replaced = match pair {
                QueuePairInfo::NONE => Ok(QueuePairInfo::NONE),
                _ => self.core.queue_pairs.replace(index),
            };
            let mut own = match replaced {
                Ok(own) => own,
                Err(_) if has_others => QueuePairInfo::NONE,
                // The device may have room for a queue pair later, or the sender fails over.
                Err(_) if may_wait => {
                    self.offers[index] = Some((pair, parts));
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            self.core.queue_pairs.take_unconfirmed(index);
            if own != QueuePairInfo::NONE
                && let Err(error) = self.core.queue_pairs.connect(index, &port, pair, port.marking)
            {
                // The ports may have no route although their TCP addresses have. Without an answer,
                // the sender tries other paths.
                if !may_wait && !has_others {
                    return Err(error.into());
                }
                base.info(&format!("cannot connect a queue pair: {error}"));
                if !has_others {
                    continue;
                }
                own = QueuePairInfo::NONE;
            }
            if own == QueuePairInfo::NONE {
                self.core.queue_pairs.leave_empty(index);
            }
            if has_others && self.core.queue_pairs.down_reason(index).is_some() {
                // Some may have been lost with the queue pair, and the sender has stopped its own.
                self.repeat_credits();
            }
            self.core.control.send(&ControlMessage::Answer(index as u8, own, received));
        }
        Ok(())
    }

    /// Writes all credits again, and the progress of the ring: some may have been lost with a queue
    /// pair.
    fn repeat_credits(&mut self) {
        let all = self.arrivals.posted().filter(|(.., posted)| self.needs_credit(posted));
        self.pending_credits = all.map(|(number, ..)| number).collect();
        self.ring_progress.repeat();
    }

    /// Whether the sender learns of this buffer.
    fn needs_credit(&self, posted: &PostedBuffer) -> bool {
        !posted.regions.is_empty() || self.tags.advertises()
    }

    /// How long the sender may take to fail over, or to use the path again, if it has not closed
    /// the connection.
    fn failover_timeout(&self, base: &Base) -> Option<Duration> {
        Some(match self.core.control.path_failure()? {
            PathFailure::Unreachable => base.context.settings.recovery_timeout,
            PathFailure::Reset => RESET_FAILOVER_TIMEOUT,
        })
    }

    /// Fails if the messages of the posted buffers can never be received.
    fn check_unrecoverable(&self, base: &Base) -> Result<(), ConnectionError> {
        if self.outstanding() == 0 {
            return Ok(());
        }
        if self.closed_after.is_some_and(|messages| self.arrivals.first() >= messages) {
            return Err(ConnectionError::remote("the peer closed the connection"));
        }
        let Some((since, why)) = &self.control_lost else { return Ok(()) };
        let what = match self.failover_timeout(base) {
            Some(timeout) if since.elapsed() >= timeout => {
                format!("{why}, and no path for {} s", timeout.as_secs())
            }
            None if since.elapsed() >= LATE_COMPLETIONS => why.clone(),
            _ => return Ok(()),
        };
        Err(ConnectionError::remote(what))
    }
}

impl Inbound for Receiver {
    fn base(&self) -> &Base {
        self.base()
    }

    fn recv(self: Arc<Self>, buffer: RecvBuffer) -> Result<Option<Request>, Error> {
        Self::recv(&self, buffer)
    }

    fn recv_group(self: Arc<Self>, group: &[TaggedBuffer<'_>]) -> Result<Option<Request>, Error> {
        Self::recv_group(&self, group)
    }

    fn flush(
        self: Arc<Self>,
        memory: RecvBuffer,
        registration: Option<&MrHandle>,
    ) -> Result<Request, Error> {
        Self::flush(&self, memory, registration)
    }

    fn set_awaited(&self, is_awaited: bool) {
        let state = self.state();
        self.base().set_awaited(is_awaited);
        state.update_waits(self.base());
    }

    fn flows(&self) -> usize {
        self.base().context.settings.flows.into()
    }

    fn close(&self) {
        Self::close(self);
    }

    #[cfg(test)]
    fn break_path(&self, index: usize) {
        self.state().core.queue_pairs.break_queue_pair(index);
    }
}
