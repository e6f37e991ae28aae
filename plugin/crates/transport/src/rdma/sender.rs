//! The sender: cuts messages into parts and writes them into the receiver's memory.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use evenkeel_protocol::{
    ControlMessage, Immediate, MAX_PORTS, MAX_QUEUE_PAIRS, MessagePart, PortInfo, QueuePairInfo,
    TagGate, WINDOW,
};
use evenkeel_verbs::{Access, Gid, StagingBuffer, WriteSource};

use super::control::PathFailure;
use super::credit::{CREDITS, Credit, CreditImmediate, credit_bytes};
use super::eager::{EAGER_BYTES, EagerRing, RING_BYTES, place_of, with_buffer};
use super::endpoint::{Endpoint, EndpointCore, EndpointState, OnOpened};
use super::error::{ConnectionError, system};
use super::failover::PathSearch;
use super::failure_streak::FailureStreak;
use super::mr_cache::MrHandle;
use super::queue_pairs::{PROBE_BYTES, QueuePairEvent, QueuePairState, QueuePairs};
use super::regions::Regions;
use crate::connection::base::{Base, Direction, InFlight};
use crate::connection::request::{MAX_REQUESTS, Operation, Owner, Request};
use crate::connection::send::{LINGER, Outbound};
use crate::error::{Error, ErrorKind};
use crate::handshake::dial::{Destination, DialError, DialHandler};
use crate::memory::buffers::SendBuffer;
use crate::stream::Stream;
use crate::sys;
use crate::telemetry::chunk_events::{ChunkDescription, ChunkEvent};

/// Maximum number of full parts in flight on a queue pair. Other queue pairs take what is left.
/// With several ports each has a share of it: a message ends with the parts that its slowest port
/// has taken.
const PARTS_AHEAD: u64 = 4;
/// Number of messages in flight from which on a caller that sends another one polls completions
/// first.
const POLL_THRESHOLD: usize = 16;
/// Maximum number of failures of queue pairs in a row, without a write that succeeds.
const MAX_FAILURES: u32 = 64;
/// How long the peer may take to connect a queue pair. After that, other paths are tried.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// The same after a failover: the peer may have to register much memory first.
const FAILOVER_ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The sender's staging buffer: credits, from its first byte on, bytes that probes overwrite, and
/// copies of eager messages.
#[derive(Clone, Copy)]
pub(super) struct StagingLayout {
    /// Number of keys that a credit has room for.
    keys: usize,
}

impl StagingLayout {
    /// With room for this number of keys in each credit, 1 to [`MAX_PORTS`].
    pub(super) fn new(keys: usize) -> Self {
        Self { keys: keys.clamp(1, MAX_PORTS) }
    }

    /// Offset of the bytes that probes overwrite.
    fn probed(self) -> usize {
        CREDITS * credit_bytes(self.keys)
    }

    /// Offset of the copies of eager messages.
    fn copies(self) -> usize {
        (self.probed() + PROBE_BYTES as usize).next_multiple_of(64)
    }

    /// Bytes of the buffer.
    pub(super) fn bytes(self) -> usize {
        self.copies() + RING_BYTES
    }
}

/// The sending end.
pub(crate) type Sender = Endpoint<SendState>;

/// The state of the sending end.
pub(crate) struct SendState {
    core: EndpointCore<MessagePart>,
    /// What the receiver writes, and copies of eager messages.
    staging: StagingBuffer,
    layout: StagingLayout,
    /// The credits received, by message number modulo [`CREDITS`]. They are copied when they are
    /// complete: the memory may already hold half of a later one.
    received_credits: Vec<Option<(u64, Credit)>>,
    /// The receiver's eager ring. The copies have the same offsets, and stay until they are
    /// acknowledged.
    ring: EagerRing,
    /// Maximum number of bytes of a part.
    part_bytes: u64,
    /// The messages that are not done, from the oldest one on, and later ones.
    messages: VecDeque<OutgoingMessage>,
    /// Number of the oldest message.
    first: u64,
    /// Number of the next message of which parts are to be sent for the first time.
    next: u64,
    tags: TagGate,
    /// Parts that are to be sent again.
    retransmissions: VecDeque<MessagePart>,
    /// Number of messages whose requests are not done. The request of an eager message is done once
    /// the message is copied.
    requests: usize,
    /// The caller has a message, and the peer has advertised no buffer for it.
    is_refused: bool,
    failures: FailureStreak,
    failover: PathSearch,
    /// Since when the present path is used.
    path_since: Instant,
    /// Since when there is no control connection, and why.
    control_lost: Option<(Instant, String)>,
    /// The message for which a credit was last requested.
    requested_credit: Option<u64>,
    /// Whether the peer does not answer, although queue pairs carry messages: the control
    /// connection's port may have failed.
    is_unanswered: bool,
    /// Queue pairs that the log says the connection does without, one bit for each.
    left_alone: u8,
}

struct OutgoingMessage {
    /// Not accessed any more once the message is copied.
    buffer: SendBuffer,
    length: u64,
    /// Its offset in the eager ring, if it is eager and has room there.
    ring_offset: Option<usize>,
    /// Whether it is copied there.
    copied: bool,
    operation: Arc<Operation>,
    /// Its destination, if it is not eager.
    credit: Option<Credit>,
    /// With the ports that have sent parts of it, and with those for which its caller has
    /// registered it.
    regions: Regions,
    /// Number of parts that were sent.
    parts_sent: u32,
    /// Number of parts that were acknowledged.
    parts_acked: u32,
    done: bool,
    /// Those of parts on their way, by the parts' numbers. Empty for messages that are not
    /// observed.
    events: Vec<Option<ChunkEvent>>,
}

impl OutgoingMessage {
    /// A part goes to a queue pair, perhaps again.
    fn begin_event(&mut self, part: MessagePart, description: ChunkDescription) {
        let Some(event) = ChunkEvent::begin(self.buffer.mark(), || description) else { return };
        let at = part.index as usize;
        if self.events.len() <= at {
            self.events.resize_with(at + 1, || None);
        }
        self.events[at] = Some(event);
    }

    /// A part has reached the peer.
    fn end_event(&mut self, part: MessagePart) {
        if let Some(event) = self.events.get_mut(part.index as usize) {
            *event = None;
        }
    }
}

impl Sender {
    /// The number of queue pairs of a connection. Each pair of ports has as many as the setting
    /// says, as far as possible.
    pub(crate) fn queue_pair_count(destination: &Destination) -> u16 {
        let count =
            destination.context.settings.queue_pairs as usize * Self::port_pairs(destination);
        count.min(MAX_QUEUE_PAIRS) as u16
    }

    /// The number of pairs of ports, as far as it is known before the connection is open.
    pub(crate) fn port_pairs(destination: &Destination) -> usize {
        destination.context.device.ports().len().max(destination.handle.addresses.len())
    }

    /// Starts to open a connection whose control connection is open.
    pub(crate) fn open(
        destination: &Arc<Destination>,
        stream: Stream,
        deadline: Instant,
        on_opened: OnOpened,
    ) -> Result<Arc<Self>, Error> {
        let context = destination.context.clone();
        let settings = Arc::clone(&context.settings);
        let part_bytes = settings.chunk_bytes;
        let port_pairs = Self::port_pairs(destination);
        let max_in_flight = (PARTS_AHEAD / port_pairs as u64).max(1) * part_bytes;
        let count = Self::queue_pair_count(destination).into();
        let mut queue_pairs = QueuePairs::new(context.device.ports(), count, max_in_flight)?;
        queue_pairs.set_ports(queue_pairs.ports().len(), port_pairs);
        let layout = StagingLayout::new(port_pairs);
        let staging = StagingBuffer::new(queue_pairs.contexts(), layout.bytes()).map_err(system)?;
        let failover = PathSearch::new(destination, &stream.socket);
        let mut state = SendState {
            core: EndpointCore::new(queue_pairs, stream, &context, on_opened, deadline),
            staging,
            layout,
            received_credits: vec![None; CREDITS],
            ring: EagerRing::default(),
            part_bytes,
            messages: VecDeque::new(),
            first: 0,
            next: 0,
            tags: TagGate::default(),
            retransmissions: VecDeque::new(),
            requests: 0,
            is_refused: false,
            failures: FailureStreak::default(),
            failover,
            path_since: Instant::now(),
            control_lost: None,
            requested_credit: None,
            is_unanswered: false,
            left_alone: 0,
        };
        state.send_port_and_offers()?;
        let addresses = state.failover.own_addresses();
        if !addresses.is_empty() {
            state.core.control.send(&ControlMessage::AlternateAddresses(addresses));
        }
        let workers = &destination.workers;
        let sender = Self::start(context, Direction::Send, destination.peer, workers, state)?;
        sender.base().set_id(destination.connection);
        let this: Weak<Self> = Arc::downgrade(&sender);
        sender.state().failover.set_sender(this);
        Ok(sender)
    }

    fn send(
        this: &Arc<Self>,
        buffer: SendBuffer,
        tag: Option<i32>,
        registration: Option<&MrHandle>,
    ) -> Result<Option<Request>, Error> {
        let length = buffer.length() as u64;
        let operation = Operation::new();
        let mut full = false;
        this.with_state(|endpoint, state| {
            let base = endpoint.base();
            if state.messages.len() >= POLL_THRESHOLD {
                state.poll_completions(1, base)?;
                state.post_work(base)?;
                state.core.notify_owner(base);
            }
            if state.requests >= MAX_REQUESTS || state.messages.len() as u64 >= WINDOW {
                full = true;
                return Ok(());
            }
            if let Some(tag) = tag
                && !state.admits_tag(tag)
            {
                // The credit that admits it may have been received meanwhile.
                state.work(base)?;
                full = !state.admits_tag(tag);
                state.is_refused = full;
                if full {
                    return Ok(());
                }
            }
            let regions = registration.filter(|_| !state.is_eager(length)).map(|handle| {
                let ports = state.core.queue_pairs.ports();
                handle.regions(ports, buffer.address(), buffer.length(), Access::LocalRead)
            });
            state.messages.push_back(OutgoingMessage {
                buffer,
                length,
                ring_offset: None,
                copied: false,
                operation: Arc::clone(&operation),
                credit: None,
                regions: regions.unwrap_or_default(),
                parts_sent: 0,
                parts_acked: 0,
                events: Vec::new(),
                done: false,
            });
            state.requests += 1;
            state.is_refused = false;
            state.post_work(base)?;
            // Earlier messages that could be sent were sent before. So what is done now is this
            // message, as the caller sees.
            let done = std::mem::take(&mut state.core.owner_to_notify);
            if state.core.completion_polling.caller_sends(!done) {
                state.core.queue_pairs.arm()?;
                state.work(base)?;
            }
            Ok(())
        });
        if full {
            return Ok(None);
        }
        Ok(Some(Request::new(operation, Arc::clone(this) as Arc<dyn Owner>)))
    }
}

impl EndpointState for SendState {
    type Note = MessagePart;
    const PEER_CONFIRMS_WRITES: bool = true;

    fn core(&mut self) -> &mut EndpointCore<MessagePart> {
        &mut self.core
    }

    fn on_event(
        &mut self,
        event: QueuePairEvent<MessagePart>,
        base: &Base,
    ) -> Result<(), ConnectionError> {
        match event {
            QueuePairEvent::Probed(index) => {
                let replaces = self.core.queue_pairs.activate(index);
                if self.left_alone >> index & 1 == 1 {
                    self.left_alone &= !(1 << index);
                    let name = self.core.queue_pairs.adapter(index).name();
                    base.info(&format!("queue pair {index} at {name} carries messages again"));
                }
                self.core.control.send(&ControlMessage::Ready(index as u8));
                base.counters.replaced.add(replaces.into());
            }
            QueuePairEvent::Sent(index, part, bytes) => {
                self.failures = FailureStreak::default();
                // Without a control connection the path will not last, even if it works now.
                if self.control_lost.is_none() && !self.is_unanswered {
                    self.failover.mark_working();
                }
                self.core.queue_pairs.slots()[index].carried.chunk(&base.counters, bytes);
                self.part_acked(part, base);
            }
            QueuePairEvent::Received(_, _, immediate) => match CreditImmediate::decode(immediate) {
                CreditImmediate::Credit(number) => {
                    let place = &mut self.received_credits[number as usize % CREDITS];
                    let credit = Credit::read(&self.staging, number, self.layout.keys);
                    // One that was repeated over another queue pair may come after that of a later
                    // message, in the same place.
                    let message =
                        |credit: &Option<(u64, Credit)>| credit.map(|(message, _)| message);
                    if message(&credit) > message(place) {
                        *place = credit;
                    }
                }
                CreditImmediate::RingProgress(low_bits) => {
                    let known = self.ring.left();
                    if let Some(left) = CreditImmediate::ring_progress(low_bits, known) {
                        self.ring.set_left(left);
                    }
                }
            },
            QueuePairEvent::Failed(index, why) => {
                if self.core.queue_pairs.stop(index, &why) {
                    self.queue_pair_failed(index, base);
                }
            }
        }
        Ok(())
    }

    fn post_work(&mut self, base: &Base) -> Result<(), ConnectionError> {
        self.offer_replacements();
        if self.core.peer_ports.is_empty() {
            return Ok(());
        }
        loop {
            let again = self.retransmissions.front().copied();
            let number = again.map_or(self.next, |part| part.message);
            if !self.has_destination(number)? {
                break;
            }
            let Some(index) = self.core.queue_pairs.least_loaded() else {
                self.open_another();
                break;
            };
            if let Some(part) = again {
                self.retransmissions.pop_front();
                self.write(index, part, base)?;
                continue;
            }
            let Some(message) = self.messages.get_mut((number - self.first) as usize) else {
                break;
            };
            let part = MessagePart { message: number, index: message.parts_sent };
            message.parts_sent += 1;
            if message.parts_sent == part_count(message.length, self.part_bytes) {
                self.next += 1;
            }
            self.write(index, part, base)?;
        }
        Ok(())
    }

    fn on_failover(&mut self, base: &Base) -> Result<(), ConnectionError> {
        self.staging.reregister(self.core.queue_pairs.contexts()).map_err(system)?;
        // The receiver writes new credits, with the keys of its present port.
        self.received_credits.fill(None);
        for message in &mut self.messages {
            (message.credit, message.regions) = (None, Regions::default());
        }
        let now = Instant::now();
        self.failures.on_failover(now, base.context.settings.recovery_timeout);
        (self.path_since, self.control_lost) = (now, None);
        (self.is_unanswered, self.left_alone) = (false, 0);
        Ok(self.send_port_and_offers()?)
    }

    fn receive_control(&mut self, base: &Base) -> Result<(), ConnectionError> {
        while let Some(message) = self.core.control.receive() {
            self.on_control_message(message, base)?;
        }
        self.core.control.flush();
        let Some(why) = self.core.control.ended().map(str::to_owned) else {
            return self.work(base);
        };
        if self.core.control.path_failure().is_some() && self.can_fail_over() {
            self.control_lost.get_or_insert_with(|| (Instant::now(), why));
            return self.work(base);
        }
        self.poll_completions(usize::MAX, base)?;
        Err(ConnectionError::remote(why))
    }

    fn tick(&mut self, now: Instant, base: &Base) -> Result<(), ConnectionError> {
        self.core.check_deadlines(now)?;
        for index in self.core.queue_pairs.check_failures(now) {
            self.queue_pair_failed(index, base);
        }
        let timeout = base.context.settings.recovery_timeout;
        if let Some((since, why)) = self.core.queue_pairs.longest_down() {
            let since = self.failures.span.map_or(since, |(first, _)| first);
            let late = now.saturating_duration_since(since) >= timeout;
            let count = self.failures.count;
            if late || count > MAX_FAILURES {
                let how = match late {
                    true => format!("and no other one for {} s", timeout.as_secs()),
                    false => format!("{count} failures in a row"),
                };
                return Err(ConnectionError::remote(format!("{why}, {how}")));
            }
        }
        if let Some((since, why)) = &self.control_lost
            && now.saturating_duration_since(*since) >= timeout
        {
            let what = format!("{why}, and no path for {} s", timeout.as_secs());
            return Err(ConnectionError::remote(what));
        }
        let may_use_tcp = base.context.settings.may_use_tcp();
        if self.core.is_opening() && self.failures.repeated && may_use_tcp {
            return Err(ConnectionError::remote(self.failure_reason()));
        }
        self.update_failover(now);
        self.request_credit();
        self.receive_control(base)
    }

    fn has_deadlines(&self) -> bool {
        self.control_lost.is_some() || self.failover.is_trying() || self.waits_for_credit()
    }

    fn in_flight(&self) -> InFlight {
        let pending = self.messages.iter().filter(|message| !message.done);
        InFlight { requests: self.requests, bytes: pending.map(|message| message.length).sum() }
    }

    fn update_waits(&self, base: &Base) {
        let now = sys::coarse_time();
        base.set_outstanding(self.requests > 0 || self.is_refused, now);
        let unsent = self.messages.get((self.next - self.first) as usize);
        let waits_for_credit = unsent
            .is_some_and(|message| message.credit.is_none() && !self.is_eager(message.length));
        base.waits.unposted.set(self.is_refused || waits_for_credit, now);
    }

    fn is_waited_for(&self) -> bool {
        self.requests > 0 || self.core.lingering.is_some()
    }

    fn is_delivered(&self) -> bool {
        self.messages.is_empty()
    }

    fn close_message(&self) -> ControlMessage {
        ControlMessage::Close(self.first)
    }

    fn release_regions(&mut self) {
        self.failover.cancel();
        self.messages.iter_mut().for_each(|message| {
            message.regions = Regions::default();
            message.events.clear();
        });
    }
}

impl SendState {
    /// Sends the peer this end's ports, and offers the first queue pair of each pair of ports and
    /// those that were opened before.
    fn send_port_and_offers(&mut self) -> Result<(), Error> {
        self.core.send_ports(&self.staging, self.layout.keys);
        let port_pairs = self.core.queue_pairs.port_pairs();
        for index in 0..self.core.queue_pairs.count() {
            if index >= port_pairs && !self.core.queue_pairs.is_opened(index) {
                continue;
            }
            match self.offer(index) {
                Ok(()) => {}
                // One of several ports.
                Err(_) if port_pairs > 1 => self.offer_none(index),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// All queue pairs are full: offers another one, if there may be more.
    fn open_another(&mut self) {
        if let Some(index) = self.core.queue_pairs.next_unopened() {
            // Without room for it at the device, the connection does without.
            let _ = self.offer(index);
        }
    }

    /// Offers a new queue pair.
    fn offer(&mut self, index: usize) -> Result<(), Error> {
        let pair = self.core.queue_pairs.replace(index)?;
        self.send_offer(index, pair);
        Ok(())
    }

    /// Asks which parts the peer has of those that a queue pair has carried. This end cannot have
    /// another one there.
    fn offer_none(&mut self, index: usize) {
        self.core.queue_pairs.leave_empty(index);
        self.send_offer(index, QueuePairInfo::NONE);
    }

    fn send_offer(&mut self, index: usize, pair: QueuePairInfo) {
        let parts = self.core.queue_pairs.unconfirmed(index).to_vec();
        self.core.control.send(&ControlMessage::Offer(index as u8, pair, parts));
        self.core.queue_pairs.offered(index);
    }

    /// Offers replacements for queue pairs that have failed.
    fn offer_replacements(&mut self) {
        for index in 0..self.core.queue_pairs.count() {
            if !self.core.queue_pairs.is_to_replace(index) {
                continue;
            }
            // A device without room for one may have room later: the next tick tries again.
            if self.offer(index).is_err() && self.core.queue_pairs.can_do_without() {
                self.offer_none(index);
            }
        }
    }

    fn on_control_message(
        &mut self,
        message: ControlMessage,
        base: &Base,
    ) -> Result<(), ConnectionError> {
        match message {
            ControlMessage::Ports(_, mut ports) if self.core.peer_ports.is_empty() => {
                // Credits have no keys for others.
                ports.truncate(self.layout.keys);
                self.core.set_peer_ports(ports, MAX_PORTS)?;
                if self.core.is_opening() && !self.core.is_eager() {
                    self.tags = TagGate::advertised_only();
                }
            }
            ControlMessage::AlternateAddresses(addresses) => {
                self.failover.add_addresses(&addresses);
            }
            ControlMessage::Answer(index, pair, received) => {
                self.on_answer(index, pair, received, base)?;
            }
            ControlMessage::QueuePairFailed(index) => {
                let index = self.core.check_index(index)?;
                if self.core.queue_pairs.stop(index, "the peer's has failed") {
                    self.queue_pair_failed(index, base);
                }
            }
            ControlMessage::TagsDifferFrom(from) => {
                let next = self.next_number();
                let below = self.tags.tags_differ_from(from, next);
                let length = |number: u64| {
                    let at = number.checked_sub(self.first)? as usize;
                    Some(self.messages.get(at)?.length as u32)
                };
                let lengths = (from..below).map(|number| length(number).unwrap_or_default());
                let lengths = lengths.take(WINDOW as usize).collect();
                self.core.control.send(&ControlMessage::SameTagBelow(below, lengths));
            }
            ControlMessage::Close(_) => {
                // Writes that were acknowledged before the peer closed are done.
                self.poll_completions(usize::MAX, base)?;
                return Err(ConnectionError::remote("the peer closed the connection"));
            }
            other => {
                let what = format!("protocol error: the receiver sent {other:?}");
                return Err(ConnectionError::remote(what));
            }
        }
        Ok(())
    }

    /// The peer has connected a queue pair with the one that was offered.
    fn on_answer(
        &mut self,
        index: u8,
        pair: QueuePairInfo,
        received: u64,
        base: &Base,
    ) -> Result<(), ConnectionError> {
        let index = self.core.check_index(index)?;
        let Some(port) = self.core.peer_port(index) else {
            return Err(ConnectionError::remote("protocol error: an answer without a port"));
        };
        if self.core.queue_pairs.state(index) != QueuePairState::Unconnected {
            return Err(ConnectionError::remote("protocol error: an answer without an offer"));
        }
        let (marking, can_fail_over) = (self.core.marking(index), self.can_fail_over());
        let has_others = self.core.queue_pairs.port_pairs() > 1;
        let into = (&self.staging, self.layout.probed());
        let queue_pairs = &mut self.core.queue_pairs;
        if pair == QueuePairInfo::NONE || queue_pairs.is_empty(index) {
            if !has_others {
                let what = "protocol error: an answer without a queue pair";
                return Err(ConnectionError::remote(what));
            }
            queue_pairs.give_up(index, "one of the two ports cannot have another one");
        } else {
            let connected = queue_pairs.connect(index, &port, pair, marking);
            let probed =
                connected.and_then(|()| queue_pairs.probe(index, into, (port.address, port.key)));
            match probed {
                Ok(()) => {}
                Err(error) if has_others => queue_pairs.give_up(index, &error.to_string()),
                Err(error) if !can_fail_over => return Err(error.into()),
                // The ports may have no route although their TCP addresses have: other paths are
                // tried.
                Err(error) => {
                    base.info(&format!("cannot connect a queue pair: {error}"));
                    return Ok(());
                }
            }
        }
        if self.core.queue_pairs.is_left_alone(index) && self.core.queue_pairs.is_empty(index) {
            self.queue_pair_failed(index, base);
        }
        let unconfirmed = self.core.queue_pairs.take_unconfirmed(index);
        for (at, part) in unconfirmed.into_iter().enumerate() {
            if received >> at & 1 == 1 {
                self.part_acked(part, base);
            } else {
                base.counters.repeated.add(self.bytes_of(part));
                self.retransmissions.push_back(part);
            }
        }
        Ok(())
    }

    /// Whether the connection outlives a path: where there is no other one, the same may work
    /// again.
    fn can_fail_over(&self) -> bool {
        !self.core.is_opening()
    }

    /// Tries other paths if nothing gets through on the present one, and stops doing so if
    /// something does.
    fn update_failover(&mut self, now: Instant) {
        if !self.can_fail_over() {
            return;
        }
        let is_late = |since: Instant| match since <= self.path_since {
            true => now.saturating_duration_since(self.path_since) >= FAILOVER_ANSWER_TIMEOUT,
            false => now.saturating_duration_since(since) >= ANSWER_TIMEOUT,
        };
        let queue_pairs = &self.core.queue_pairs;
        let is_past = |since: Instant, timeout| now.saturating_duration_since(since) >= timeout;
        // Nobody has answered where queue pairs of other ports work.
        self.is_unanswered = queue_pairs.can_do_without()
            && queue_pairs.is_any_unanswered(now, ANSWER_TIMEOUT)
            && is_past(self.path_since, FAILOVER_ANSWER_TIMEOUT);
        let is_down = || queue_pairs.ports().iter().all(|port| port.adapter.is_down());
        let down = queue_pairs.longest_down().map(|(since, _)| since);
        let is_dead = self.is_unanswered
            || self.failures.repeated && !queue_pairs.can_do_without()
            || down.is_some_and(|since| is_down() || is_late(since))
            || self.core.control.path_failure() == Some(PathFailure::Unreachable);
        if is_dead {
            self.failover.mark_failed();
        }
        if is_dead || self.control_lost.is_some() {
            let count = self.core.queue_pairs.count() as u16;
            self.failover.start_attempts(count, now);
        } else {
            self.failover.cancel();
        }
    }

    /// Why the present path has failed.
    fn failure_reason(&self) -> String {
        let down = self.core.queue_pairs.longest_down().map(|(_, why)| why);
        let control_lost = self.control_lost.as_ref().map(|(_, why)| why.as_str());
        down.or(control_lost).unwrap_or("nothing gets through").to_owned()
    }

    fn queue_pair_failed(&mut self, index: usize, base: &Base) {
        if !self.core.queue_pairs.can_do_without() {
            self.failures.add(index, Instant::now(), base.context.settings.recovery_timeout);
        }
        base.counters.lost.add(1);
        self.report_left_alone(index, base);
    }

    /// Logs once that the connection does without a queue pair.
    fn report_left_alone(&mut self, index: usize, base: &Base) {
        let queue_pairs = &self.core.queue_pairs;
        if self.left_alone >> index & 1 == 1
            || !queue_pairs.is_left_alone(index)
            || !queue_pairs.can_do_without()
        {
            return;
        }
        self.left_alone |= 1 << index;
        let (name, why) = (queue_pairs.adapter(index).name(), queue_pairs.down_reason(index));
        let peer =
            self.core.peer_port(index).map_or_else(String::new, |port| Gid(port.gid).to_string());
        base.warn(&format!(
            "the connection does without port {name} to GID {peer} until it works again: {}",
            why.unwrap_or_default()
        ));
    }

    /// Whether it is known where a message goes: it has a credit, or room in the eager ring.
    fn has_destination(&mut self, number: u64) -> Result<bool, ConnectionError> {
        let at = number.checked_sub(self.first).map(|at| at as usize);
        let Some(message) = at.and_then(|at| self.messages.get(at)) else { return Ok(true) };
        let length = message.length;
        if message.ring_offset.is_some() {
            return Ok(true);
        }
        if self.is_eager(length) {
            let offset = self.ring.reserve(number, length as usize);
            if let Some(message) = at.and_then(|at| self.messages.get_mut(at)) {
                message.ring_offset = offset;
            }
            return Ok(offset.is_some());
        }
        if message.credit.is_some() {
            return Ok(true);
        }
        let received = self.received_credits[number as usize % CREDITS];
        let Some((_, credit)) = received.filter(|(of, _)| *of == number) else { return Ok(false) };
        // The receiver posts no buffer beyond its window.
        self.ring.set_left((number + 1).saturating_sub(WINDOW));
        if length > u64::from(credit.capacity) {
            let capacity = credit.capacity;
            // The receiver fails by this message, too.
            self.core.control.send(&ControlMessage::CreditRequest(number, length));
            let what = format!(
                "a message of {length} bytes does not fit into the buffer of {capacity} bytes posted for it"
            );
            return Err(ConnectionError::remote(what));
        }
        let Some(message) = at.and_then(|at| self.messages.get_mut(at)) else { return Ok(true) };
        message.credit = Some(credit);
        Ok(true)
    }

    /// Whether a message of this length is copied to the receiver's ring.
    fn is_eager(&self, length: u64) -> bool {
        length <= EAGER_BYTES as u64 && self.core.is_eager()
    }

    /// Number of the next message that the caller sends.
    fn next_number(&self) -> u64 {
        self.first + self.messages.len() as u64
    }

    /// Whether the next message may have this tag.
    fn admits_tag(&mut self, tag: i32) -> bool {
        let next = self.next_number();
        let credit = self.received_credits[next as usize % CREDITS].filter(|(of, _)| *of == next);
        let advertised = self.tags.tag();
        let admits = self.tags.admits(tag, next, || credit.map(|(_, credit)| credit.tag));
        if self.tags.tag() != advertised {
            self.core.control.send(&ControlMessage::Tag(tag));
        }
        admits
    }

    /// A part of a message has reached the receiver's memory.
    fn part_acked(&mut self, part: MessagePart, base: &Base) {
        let Some(at) = part.message.checked_sub(self.first) else { return };
        let part_bytes = self.part_bytes;
        let Some(message) = self.messages.get_mut(at as usize) else { return };
        message.parts_acked += 1;
        // Before the request may be reported.
        message.end_event(part);
        if message.parts_acked < part_count(message.length, part_bytes) {
            return;
        }
        message.done = true;
        message.regions = Regions::default();
        base.counters.message(message.length);
        if !message.copied {
            message.operation.complete(message.length);
            self.requests -= 1;
            self.core.owner_to_notify = true;
        }
        while self.messages.front().is_some_and(|message| message.done) {
            self.messages.pop_front();
            self.first += 1;
        }
    }

    /// Posts the write of a part.
    fn write(
        &mut self,
        index: usize,
        part: MessagePart,
        base: &Base,
    ) -> Result<(), ConnectionError> {
        let Some(at) = part.message.checked_sub(self.first) else { return Ok(()) };
        let Some(message) = self.messages.get_mut(at as usize) else { return Ok(()) };
        let length = message.length;
        if let Some(ring_offset) = message.ring_offset {
            let Some(port) = self.core.peer_port(index) else { return Ok(()) };
            return self.write_eager(index, part, ring_offset, &port);
        }
        let Some(credit) = message.credit else { return Ok(()) };
        let port = self.core.queue_pairs.port_of(index);
        if length > 0 && message.regions.get(port).is_none() {
            match self.core.queue_pairs.send_region(port, &message.buffer) {
                Ok(region) => message.regions.set(port, region),
                Err(error) if self.core.queue_pairs.is_another_usable(index) => {
                    // Other ports carry it.
                    if self.core.queue_pairs.stop(index, &error.to_string()) {
                        self.queue_pair_failed(index, base);
                    }
                    self.retransmissions.push_front(part);
                    return Ok(());
                }
                Err(error) => return Err(error.into()),
            }
        }
        let offset = u64::from(part.index) * self.part_bytes;
        let bytes = (length - offset).min(self.part_bytes);
        let last = offset + bytes == length;
        let immediate = Immediate::part(part.message, part.index, last).encode();
        let (work_request, queue_pair) = self.core.queue_pairs.next_work(index);
        let described = ChunkDescription::Rdma { work_request, queue_pair, bytes: bytes as usize };
        message.begin_event(part, described);
        let source = match message.regions.get(port) {
            Some(region) => {
                WriteSource::Region(region, message.buffer.address() + offset, bytes as u32)
            }
            None => WriteSource::Empty,
        };
        let key = credit.keys[index % self.core.peer_ports.len().clamp(1, MAX_PORTS)];
        let remote = (credit.address + offset, key);
        Ok(self.core.queue_pairs.write(index, source, remote, immediate, part)?)
    }

    /// Posts the write of an eager message, which is its only part.
    fn write_eager(
        &mut self,
        index: usize,
        part: MessagePart,
        ring_offset: usize,
        port: &PortInfo,
    ) -> Result<(), ConnectionError> {
        let Some(at) = part.message.checked_sub(self.first) else { return Ok(()) };
        let Some(message) = self.messages.get_mut(at as usize) else { return Ok(()) };
        let length = message.length;
        let remote = (port.address + ring_offset as u64, port.key);
        let immediate = Immediate::eager(part.message, place_of(ring_offset)).encode();
        let (queue_pairs, copies) = (&mut self.core.queue_pairs, &self.staging);
        let offset = self.layout.copies() + ring_offset;
        with_buffer(length as usize, |bytes| {
            if message.copied {
                copies.read(offset, bytes);
            } else {
                let (work_request, queue_pair) = queue_pairs.next_work(index);
                let bytes_sent = bytes.len();
                // The request may be reported as soon as the message is copied, so the event ends
                // here.
                drop(ChunkEvent::begin(message.buffer.mark(), || ChunkDescription::Rdma {
                    work_request,
                    queue_pair,
                    bytes: bytes_sent,
                }));
                message.buffer.copy_to(bytes);
                copies.write(offset, bytes);
                message.copied = true;
                message.operation.complete(length);
                self.requests -= 1;
                self.core.owner_to_notify = true;
            }
            Ok(queue_pairs.write_copy(index, bytes, (copies, offset), remote, immediate, part)?)
        })
    }

    fn bytes_of(&self, part: MessagePart) -> u64 {
        let at = part.message.saturating_sub(self.first) as usize;
        let length = self.messages.get(at).map_or(0, |message| message.length);
        length.saturating_sub(u64::from(part.index) * self.part_bytes).min(self.part_bytes)
    }

    /// Requests the credit that the next message waits for, once. Small buffers get no credit,
    /// since eager messages need none, so without the request the receiver would not notice that a
    /// message is too long for one.
    fn request_credit(&mut self) {
        if self.waits_for_credit()
            && let Some(message) = self.messages.get((self.next - self.first) as usize)
        {
            self.requested_credit = Some(self.next);
            self.core.control.send(&ControlMessage::CreditRequest(self.next, message.length));
        }
    }

    /// Whether the next message waits for its credit, which was not requested yet.
    fn waits_for_credit(&self) -> bool {
        let waiting = self.messages.get((self.next - self.first) as usize);
        waiting.is_some_and(|message| message.credit.is_none())
            && self.requested_credit != Some(self.next)
    }
}

/// Number of parts of a message.
fn part_count(length: u64, part_bytes: u64) -> u32 {
    length.div_ceil(part_bytes).max(1) as u32
}

impl DialHandler for Sender {
    fn on_welcome(self: Arc<Self>, number: u32, stream: Stream) {
        self.with_state(|_, state| {
            let Some(device) = state.failover.accepted(number) else { return Ok(()) };
            let why = state.failure_reason();
            if !Self::fail_over(&self, state, &device, stream, &why)? {
                state.failover.mark_failed();
            }
            Ok(())
        });
    }

    fn on_dial_error(self: Arc<Self>, number: u32, error: DialError) {
        self.with_state(|_, state| {
            if !state.failover.attempt_failed(number, &error) {
                return Ok(());
            }
            let what = format!("{}, and {}", state.failure_reason(), error.what);
            Err(ConnectionError(ErrorKind::Remote, what))
        });
    }
}

impl Outbound for Sender {
    fn base(&self) -> &Base {
        self.base()
    }

    fn send(self: Arc<Self>, buffer: SendBuffer) -> Result<Option<Request>, Error> {
        Self::send(&self, buffer, None, None)
    }

    fn send_tagged(
        self: Arc<Self>,
        buffer: SendBuffer,
        tag: i32,
        registration: Option<&MrHandle>,
    ) -> Result<Option<Request>, Error> {
        Self::send(&self, buffer, Some(tag), registration)
    }

    fn owner_closed(self: Arc<Self>) {
        let mut state = self.state();
        let undelivered = state.requests == 0 && !state.messages.is_empty();
        if undelivered && !self.base().failed() {
            let until = Instant::now() + LINGER;
            state.core.lingering = Some((self.workers().linger(), until));
        } else {
            drop(state);
            self.close();
        }
    }

    fn is_delivered(&self) -> bool {
        self.base().failed() || self.state().messages.is_empty()
    }

    #[cfg(test)]
    fn break_path(&self, index: usize) {
        self.state().core.queue_pairs.break_queue_pair(index);
    }

    #[cfg(test)]
    fn wear_keys(&self) {
        unreachable!("RDMA has no keys");
    }

    #[cfg(test)]
    fn id(&self) -> evenkeel_protocol::ConnectionId {
        self.state().failover.connection()
    }

    #[cfg(test)]
    fn queue_pairs(&self) -> usize {
        self.state().core.queue_pairs.count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn staging_layout_has_a_place_for_each() {
        for keys in 1..=MAX_PORTS {
            let layout = StagingLayout::new(keys);
            let last = Credit::offset(CREDITS as u64 - 1, keys) + credit_bytes(keys);
            assert_eq!(layout.probed(), last);
            assert!(layout.copies() >= last + PROBE_BYTES as usize);
            assert!(layout.copies().is_multiple_of(64));
            assert_eq!(layout.bytes(), layout.copies() + RING_BYTES);
        }
    }
}
