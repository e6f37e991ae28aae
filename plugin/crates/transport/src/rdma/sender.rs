//! The sending side.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use evenkeel_protocol::{
    ControlMessage, Immediate, MAX_MESSAGE_BYTES, MessagePart, PortInfo, QueuePairInfo, WINDOW,
};
use evenkeel_verbs::{MemoryRegion, StagingBuffer, WriteSource};
use socket2::Socket;

use super::control::PathFailure;
use super::endpoint::{Endpoint, EndpointCore, EndpointState};
use super::failover::PathSearch;
use super::queue_pairs::{QueuePairEvent, QueuePairState, QueuePairs, system};
use super::receiver::{CREDIT_BYTES, CREDITS, Credit};
use super::{Adapter, ConnectionError, EAGER_BYTES, Opened, ROOM, with_room};
use crate::connection::base::{Base, Direction, InFlight};
use crate::connection::request::{MAX_REQUESTS, Operation, Owner, Request};
use crate::connection::send::{LINGER, Outbound};
use crate::connection::tag_matching::TagGate;
use crate::error::{Error, ErrorKind};
use crate::handshake::dial::{Destination, DialError, DialHandler};
use crate::memory::buffers::SendBuffer;

/// Parts on a lane before another lane takes what is left.
const PARTS_AHEAD: u64 = 4;
/// Messages on their way before a caller who sends another one looks which of them have come.
const UNSEEN: usize = 16;
/// Times in a row that lanes may fail before anything has come through.
const MAX_FAILURES: u32 = 64;
/// How long the peer may take to connect a queue pair before other ways to it are looked for.
const ANSWER_PATIENCE: Duration = Duration::from_secs(2);
/// The same after it has come by another way: it may have to register much memory first.
const MOVE_PATIENCE: Duration = Duration::from_secs(5);

/// The side that sends.
pub(crate) type Sender = Endpoint<SendState>;

/// What it works on.
pub(crate) struct SendState {
    core: EndpointCore<MessagePart>,
    /// Where the receiver writes credits.
    credits: StagingBuffer,
    /// Those that have come, each in the place of its message's number: what lies there may be half of the next one.
    granted: Vec<Option<(u64, Credit)>>,
    /// Copies of small messages, each in the place of its number until it has come.
    outbox: StagingBuffer,
    /// Most bytes of a part.
    part_bytes: u64,
    /// Messages from the oldest one that is not done.
    messages: VecDeque<Outgoing>,
    /// The oldest one's number.
    first: u64,
    /// The next one to begin, or go on with.
    next: u64,
    /// Small messages below this number have room in the receiver's ring.
    ring_end: u64,
    gate: TagGate,
    /// Parts that are to be sent again.
    again: VecDeque<MessagePart>,
    /// Messages whose requests are not done. Those of small messages are as soon as there is a copy.
    requests: usize,
    /// QueuePairs that have failed since anything has come through; when the first of them did, and the last.
    failures: u32,
    failing: Option<(Instant, Instant)>,
    /// Those lanes, a bit for each; whether one of them has failed again.
    failed: u8,
    failed_again: bool,
    failover: PathSearch,
    /// When the present way was taken.
    moved: Instant,
    /// Since when nothing is heard of the peer, and why.
    silent: Option<(Instant, String)>,
    /// The message whose buffer the receiver was last told to be waited for.
    wanted: Option<u64>,
}

struct Outgoing {
    /// Not touched any more once there is a copy.
    buffer: SendBuffer,
    length: u64,
    /// Whether there is a copy, in the outbox.
    copied: bool,
    operation: Arc<Operation>,
    /// Where it goes, if it is not small.
    credit: Option<Credit>,
    region: Option<Arc<MemoryRegion>>,
    /// Parts that were begun.
    begun: u32,
    /// Of those, the ones that have come.
    came: u32,
    done: bool,
}

impl Sender {
    /// Begins to make a connection on a lifeline that has been welcomed.
    pub(crate) fn open(
        destination: &Arc<Destination>,
        adapter: &Arc<Adapter>,
        socket: Socket,
        deadline: Instant,
        opened: Opened,
    ) -> Result<Arc<Self>, Error> {
        let context = destination.context.clone();
        let settings = Arc::clone(&context.settings);
        let part_bytes = settings.chunk_bytes;
        let mailbox = |bytes| StagingBuffer::new(&adapter.context, bytes).map_err(system);
        let lanes =
            QueuePairs::new(adapter, settings.queue_pairs.into(), PARTS_AHEAD * part_bytes)?;
        let mut state = SendState {
            core: EndpointCore::new(lanes, socket, &context, opened, deadline),
            // A byte more, for what probes read.
            credits: mailbox(CREDITS * CREDIT_BYTES + 1)?,
            granted: vec![None; CREDITS],
            outbox: mailbox(WINDOW as usize * EAGER_BYTES)?,
            part_bytes,
            messages: VecDeque::new(),
            first: 0,
            next: 0,
            ring_end: WINDOW,
            gate: TagGate::default(),
            again: VecDeque::new(),
            requests: 0,
            failures: 0,
            failing: None,
            failed: 0,
            failed_again: false,
            failover: PathSearch::new(destination),
            moved: Instant::now(),
            silent: None,
            wanted: None,
        };
        state.introduce()?;
        let elsewhere = state.failover.own_addresses();
        if !elsewhere.is_empty() {
            state.core.lifeline.say(&ControlMessage::AlternateAddresses(elsewhere));
        }
        let workers = &destination.workers;
        let sender = Self::start(context, Direction::Send, destination.peer, workers, state)?;
        let this: Weak<Self> = Arc::downgrade(&sender);
        sender.state().failover.set_sender(this);
        Ok(sender)
    }

    fn send(
        this: &Arc<Self>,
        buffer: SendBuffer,
        tag: Option<i32>,
    ) -> Result<Option<Request>, Error> {
        let length = buffer.length() as u64;
        if length > MAX_MESSAGE_BYTES {
            return Err(Error::argument(format!(
                "message of {length} bytes: at most {MAX_MESSAGE_BYTES} can be sent"
            )));
        }
        if let Some(error) = this.failure() {
            return Err(error);
        }
        let operation = Operation::new();
        let mut full = false;
        this.act(|side, state| {
            if state.messages.len() >= UNSEEN {
                state.drain(1, side.base())?;
                state.begin(side.base())?;
                state.core.tell_news(side.base());
            }
            if state.requests >= MAX_REQUESTS || state.messages.len() as u64 >= WINDOW {
                full = true;
                return Ok(());
            }
            if let Some(tag) = tag
                && !state.opens(tag)
            {
                // What opens the gate may have come.
                state.work(side.base())?;
                full = !state.opens(tag);
                if full {
                    return Ok(());
                }
            }
            state.messages.push_back(Outgoing {
                buffer,
                length,
                copied: false,
                operation: Arc::clone(&operation),
                credit: None,
                region: None,
                begun: 0,
                came: 0,
                done: false,
            });
            state.requests += 1;
            state.begin(side.base())?;
            // What could begin before has begun: if one is done now it is this message, and who sends it sees that.
            let news = std::mem::take(&mut state.core.has_news);
            if state.core.callers.sends(!news) {
                state.core.lanes.completions.arm().map_err(system)?;
                state.work(side.base())?;
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
    const PEER_KNOWS: bool = true;

    fn core(&mut self) -> &mut EndpointCore<MessagePart> {
        &mut self.core
    }

    fn take(
        &mut self,
        told: QueuePairEvent<MessagePart>,
        base: &Base,
    ) -> Result<(), ConnectionError> {
        match told {
            QueuePairEvent::Probed(lane) => {
                self.core.lanes.go(lane);
                self.core.lifeline.say(&ControlMessage::Ready(lane as u8));
                if !self.core.is_opening() {
                    base.counters.replaced.add(1);
                }
            }
            QueuePairEvent::Sent(lane, part, bytes) => {
                (self.failures, self.failing) = (0, None);
                (self.failed, self.failed_again) = (0, false);
                // Without a lifeline the way is no good for long, whatever comes through.
                if self.silent.is_none() {
                    self.failover.mark_working();
                }
                self.core.lanes.all()[lane].carried.chunk(&base.counters, bytes);
                self.came(part, base);
            }
            QueuePairEvent::Received(_, _, immediate) => {
                if immediate & ROOM == 0 {
                    let credit = Credit::read(&self.credits, immediate);
                    self.granted[immediate as usize % CREDITS] = credit;
                } else {
                    // How many messages have left the ring.
                    let taken = u64::from(immediate & !ROOM);
                    let known = self.ring_end - WINDOW;
                    let ahead = taken.wrapping_sub(known) & u64::from(!ROOM);
                    if ahead <= WINDOW {
                        self.ring_end += ahead;
                    }
                }
            }
            QueuePairEvent::Failed(lane, why) => {
                if self.core.lanes.stop(lane, &why) {
                    self.lost(lane, base);
                }
            }
        }
        Ok(())
    }

    fn begin(&mut self, _base: &Base) -> Result<(), ConnectionError> {
        self.offer_anew();
        let Some(port) = self.core.port else { return Ok(()) };
        while let Some(lane) = self.core.lanes.best() {
            let repeated = self.again.front().copied();
            let number = repeated.map_or(self.next, |part| part.message);
            if !self.has_place(number)? {
                break;
            }
            if let Some(part) = repeated {
                self.again.pop_front();
                self.write(lane, part, &port)?;
                continue;
            }
            let Some(message) = self.messages.get_mut((number - self.first) as usize) else {
                break;
            };
            let part = MessagePart { message: number, index: message.begun };
            message.begun += 1;
            if message.begun == parts(message.length, self.part_bytes) {
                self.next += 1;
            }
            self.write(lane, part, &port)?;
        }
        Ok(())
    }

    fn moved(&mut self, base: &Base) -> Result<(), ConnectionError> {
        let context = &self.core.lanes.adapter.context;
        for mailbox in [&mut self.credits, &mut self.outbox] {
            mailbox.reregister(context).map_err(system)?;
        }
        // Where messages go is told anew, for the peer's port of now.
        self.granted.fill(None);
        for message in &mut self.messages {
            (message.credit, message.region) = (None, None);
        }
        let (now, patience) = (Instant::now(), base.context.settings.recovery_timeout);
        (self.moved, self.failed_again, self.silent) = (now, false, None);
        if self.failing.is_some_and(|(_, last)| now.saturating_duration_since(last) >= patience) {
            // What happened long ago is over.
            (self.failures, self.failing, self.failed) = (0, None, 0);
        }
        Ok(self.introduce()?)
    }

    fn hear(&mut self, base: &Base) -> Result<(), ConnectionError> {
        while let Some(word) = self.core.lifeline.hear() {
            match word {
                ControlMessage::Port(port) if self.core.port.is_none() => {
                    self.core.hear_port(port)?;
                    if self.core.is_opening() && !self.core.is_eager() {
                        self.gate = TagGate::advertised_only();
                    }
                }
                ControlMessage::AlternateAddresses(addresses) => {
                    self.failover.add_addresses(&addresses)
                }
                ControlMessage::Answer(lane, pair, have) => {
                    self.answered(lane, pair, have, base)?
                }
                ControlMessage::QueuePairFailed(lane) => {
                    let lane = self.core.known(lane)?;
                    if self.core.lanes.stop(lane, "the peer's has failed") {
                        self.lost(lane, base);
                    }
                }
                ControlMessage::TagsDifferFrom(from) => {
                    let next = self.next_number();
                    let until = self.gate.tags_differ_from(from, next);
                    let length = |number: u64| {
                        let at = number.checked_sub(self.first)? as usize;
                        Some(self.messages.get(at)?.length as u32)
                    };
                    let lengths = (from..until).map(|number| length(number).unwrap_or_default());
                    let lengths = lengths.take(WINDOW as usize).collect();
                    self.core.lifeline.say(&ControlMessage::SameTagBelow(until, lengths));
                }
                ControlMessage::Close(_) => {
                    // What was acknowledged before the peer went is done.
                    self.drain(usize::MAX, base)?;
                    let what = "the peer closed the connection".to_owned();
                    return Err(ConnectionError(ErrorKind::Remote, what));
                }
                other => return Err(unexpected(&other)),
            }
        }
        self.core.lifeline.flush();
        let Some(why) = self.core.lifeline.ended().map(str::to_owned) else {
            return self.work(base);
        };
        if self.core.lifeline.cut().is_some() && self.can_move() {
            self.silent.get_or_insert_with(|| (Instant::now(), why));
            return self.work(base);
        }
        self.drain(usize::MAX, base)?;
        Err(ConnectionError(ErrorKind::Remote, why))
    }

    fn tick(&mut self, now: Instant, base: &Base) -> Result<(), ConnectionError> {
        self.core.check_deadlines(now)?;
        for lane in self.core.lanes.look_after(now) {
            self.lost(lane, base);
        }
        let patience = base.context.settings.recovery_timeout;
        if let Some((since, why)) = self.core.lanes.longest_down() {
            let since = self.failing.map_or(since, |(first, _)| first);
            let late = now.saturating_duration_since(since) >= patience;
            if late || self.failures > MAX_FAILURES {
                let seconds = patience.as_secs();
                let how = if late {
                    format!("and no other one for {seconds} s")
                } else {
                    format!("{} of them in a row", self.failures)
                };
                return Err(ConnectionError(ErrorKind::Remote, format!("{why}, {how}")));
            }
        }
        if let Some((since, why)) = &self.silent
            && now.saturating_duration_since(*since) >= patience
        {
            let what = format!("{why}, and by no other way for {} s", patience.as_secs());
            return Err(ConnectionError(ErrorKind::Remote, what));
        }
        if self.core.is_opening() && self.failed_again && base.context.settings.may_use_tcp() {
            return Err(ConnectionError(ErrorKind::Remote, self.trouble()));
        }
        self.update_failover(now, base);
        self.want();
        self.hear(base)
    }

    fn in_flight(&self) -> InFlight {
        let pending = self.messages.iter().filter(|message| !message.done);
        InFlight { requests: self.requests, bytes: pending.map(|message| message.length).sum() }
    }

    fn is_waited_for(&self) -> bool {
        self.requests > 0 || self.core.lingering.is_some()
    }

    fn is_delivered(&self) -> bool {
        self.messages.is_empty()
    }

    fn last_word(&self) -> ControlMessage {
        ControlMessage::Close(self.first)
    }

    fn let_go(&mut self) {
        self.failover.cancel();
        self.messages.iter_mut().for_each(|message| message.region = None);
    }
}

impl SendState {
    /// Tells the peer of the port, and offers queue pairs.
    fn introduce(&mut self) -> Result<(), Error> {
        self.core.say_port(self.credits.region());
        for lane in 0..self.core.lanes.count() {
            self.offer(lane)?;
        }
        Ok(())
    }

    /// Offers a new queue pair for a lane.
    fn offer(&mut self, lane: usize) -> Result<(), Error> {
        let pair = self.core.lanes.renew(lane)?;
        let parts = self.core.lanes.unknown(lane).to_vec();
        self.core.lifeline.say(&ControlMessage::Offer(lane as u8, pair, parts));
        Ok(())
    }

    /// Whether it may go on by another way.
    fn can_move(&self) -> bool {
        !self.core.is_opening() && self.failover.has_alternatives()
    }

    /// Looks for another way to the peer if nothing gets through by the present one.
    fn update_failover(&mut self, now: Instant, base: &Base) {
        if !self.can_move() {
            return;
        }
        let is_late = |since: Instant| match since <= self.moved {
            true => now.saturating_duration_since(self.moved) >= MOVE_PATIENCE,
            false => now.saturating_duration_since(since) >= ANSWER_PATIENCE,
        };
        let down = self.core.lanes.longest_down().map(|(since, _)| since);
        let is_dead = self.failed_again
            || down.is_some_and(|since| self.core.lanes.adapter.is_down() || is_late(since))
            || self.core.lifeline.cut() == Some(PathFailure::Unreachable);
        if is_dead {
            self.failover.mark_failed();
        }
        if is_dead || self.silent.is_some() {
            self.failover.start_attempts(base.context.settings.queue_pairs, now);
        } else {
            self.failover.cancel();
        }
    }

    /// Why the present way is left.
    fn trouble(&self) -> String {
        let down = self.core.lanes.longest_down().map(|(_, why)| why);
        let silent = self.silent.as_ref().map(|(_, why)| why.as_str());
        down.or(silent).unwrap_or("nothing gets through").to_owned()
    }

    /// Whether there is where a message can go.
    fn has_place(&mut self, number: u64) -> Result<bool, ConnectionError> {
        let eager = self.core.is_eager();
        let at = number.checked_sub(self.first).map(|at| at as usize);
        let Some(message) = at.and_then(|at| self.messages.get_mut(at)) else { return Ok(true) };
        let length = message.length;
        if message.copied || length <= EAGER_BYTES as u64 && eager {
            return Ok(number < self.ring_end);
        }
        if message.credit.is_some() {
            return Ok(true);
        }
        let granted = self.granted[number as usize % CREDITS];
        let Some((_, credit)) = granted.filter(|(of, _)| *of == number) else { return Ok(false) };
        self.ring_end = self.ring_end.max(number + 1);
        if length > u64::from(credit.capacity) {
            let capacity = credit.capacity;
            self.core.lifeline.say(&ControlMessage::CreditRequest(number, length));
            let what = format!(
                "a message of {length} bytes does not fit into the buffer of {capacity} bytes posted for it"
            );
            return Err(ConnectionError(ErrorKind::Remote, what));
        }
        if length > 0 {
            message.region = Some(self.core.lanes.payload(&message.buffer)?);
        }
        message.credit = Some(credit);
        Ok(true)
    }

    /// Number of the next message that is sent.
    fn next_number(&self) -> u64 {
        self.first + self.messages.len() as u64
    }

    /// Whether a message with this tag can be the next one.
    fn opens(&mut self, tag: i32) -> bool {
        let next = self.next_number();
        let credit = self.granted[next as usize % CREDITS].filter(|(of, _)| *of == next);
        let said = self.gate.tag();
        let opens = self.gate.admits(tag, next, || credit.map(|(_, credit)| credit.tag));
        if self.gate.tag() != said {
            self.core.lifeline.say(&ControlMessage::Tag(tag));
        }
        opens
    }

    fn lost(&mut self, lane: usize, base: &Base) {
        self.failed_again |= self.failed >> lane & 1 == 1;
        self.failed |= 1 << lane;
        let (now, patience) = (Instant::now(), base.context.settings.recovery_timeout);
        self.failing = match self.failing {
            Some((first, last)) if now.saturating_duration_since(last) < patience => {
                Some((first, now))
            }
            // What happened long ago is over, also if nothing was sent since.
            _ => {
                (self.failures, self.failed, self.failed_again) = (0, 1 << lane, false);
                Some((now, now))
            }
        };
        self.failures += 1;
        base.counters.lost.add(1);
    }

    /// A part of a message has come.
    fn came(&mut self, part: MessagePart, base: &Base) {
        let Some(at) = part.message.checked_sub(self.first) else { return };
        let part_bytes = self.part_bytes;
        let Some(message) = self.messages.get_mut(at as usize) else { return };
        message.came += 1;
        if message.came < parts(message.length, part_bytes) {
            return;
        }
        message.done = true;
        message.region = None;
        base.counters.message(message.length);
        if !message.copied {
            message.operation.complete(message.length);
            self.requests -= 1;
            self.core.has_news = true;
        }
        while self.messages.front().is_some_and(|message| message.done) {
            self.messages.pop_front();
            self.first += 1;
        }
    }

    /// Offers new queue pairs for lanes that have failed.
    fn offer_anew(&mut self) {
        for lane in 0..self.core.lanes.count() {
            if self.core.lanes.stage(lane) != QueuePairState::Drained {
                continue;
            }
            // A device that has no queue pair now may have one later: the next tick asks again.
            let _ = self.offer(lane);
        }
    }

    /// Begins a part on a lane.
    fn write(
        &mut self,
        lane: usize,
        part: MessagePart,
        port: &PortInfo,
    ) -> Result<(), ConnectionError> {
        let Some(at) = part.message.checked_sub(self.first) else { return Ok(()) };
        let Some(message) = self.messages.get_mut(at as usize) else { return Ok(()) };
        let length = message.length;
        let Some(credit) = message.credit else {
            let slot = (part.message % WINDOW) as usize * EAGER_BYTES;
            let to = (port.address + slot as u64, port.key);
            let number = Immediate::eager(part.message).encode();
            let (lanes, outbox) = (&mut self.core.lanes, &self.outbox);
            return with_room(length as usize, |bytes| {
                if message.copied {
                    outbox.read(slot, bytes);
                } else {
                    message.buffer.copy_to(bytes);
                    outbox.write(slot, bytes);
                    message.copied = true;
                    message.operation.complete(length);
                    self.requests -= 1;
                    self.core.has_news = true;
                }
                Ok(lanes.write_copy(lane, bytes, (outbox, slot), to, number, part)?)
            });
        };
        let offset = u64::from(part.index) * self.part_bytes;
        let bytes = (length - offset).min(self.part_bytes);
        let last = offset + bytes == length;
        let number = Immediate::part(part.message, part.index, last).encode();
        let from = match &message.region {
            Some(region) => {
                WriteSource::Region(region, message.buffer.address() + offset, bytes as u32)
            }
            None => WriteSource::Empty,
        };
        let to = (credit.address + offset, credit.key);
        Ok(self.core.lanes.write(lane, from, to, number, part)?)
    }

    /// The peer has a queue pair for the one that was offered.
    fn answered(
        &mut self,
        lane: u8,
        pair: QueuePairInfo,
        have: u64,
        base: &Base,
    ) -> Result<(), ConnectionError> {
        let lane = self.core.known(lane)?;
        let Some(port) = self.core.port else {
            return Err(ConnectionError(ErrorKind::Remote, "protocol error: no port".to_owned()));
        };
        if self.core.lanes.stage(lane) != QueuePairState::Unconnected {
            return Err(ConnectionError(
                ErrorKind::Remote,
                "protocol error: nothing offered".to_owned(),
            ));
        }
        let (traffic, can_move) = (self.core.traffic(), self.can_move());
        let into = (self.credits.region(), self.credits.address(CREDITS * CREDIT_BYTES));
        let lanes = &mut self.core.lanes;
        let begun = lanes.connect(lane, &port, pair, traffic);
        if let Err(error) = begun.and_then(|()| lanes.probe(lane, into, (port.address, port.key))) {
            if !can_move {
                return Err(error.into());
            }
            // The ports may not reach each other, though their addresses do: another way is looked for.
            base.info(&format!("cannot connect a queue pair: {error}"));
            return Ok(());
        }
        let unknown = lanes.take_unknown(lane);
        for (at, part) in unknown.into_iter().enumerate() {
            if have >> at & 1 == 1 {
                self.came(part, base);
            } else {
                base.counters.repeated.add(self.bytes_of(part));
                self.again.push_back(part);
            }
        }
        Ok(())
    }

    fn bytes_of(&self, part: MessagePart) -> u64 {
        let at = part.message.saturating_sub(self.first) as usize;
        let length = self.messages.get(at).map_or(0, |message| message.length);
        length.saturating_sub(u64::from(part.index) * self.part_bytes).min(self.part_bytes)
    }

    /// Says what is waited for, once: a small buffer brings no credit, and no message that is longer.
    fn want(&mut self) {
        let waits = self.messages.get((self.next - self.first) as usize);
        let waits = waits.filter(|message| message.credit.is_none());
        if let Some(message) = waits
            && self.wanted != Some(self.next)
        {
            self.wanted = Some(self.next);
            self.core.lifeline.say(&ControlMessage::CreditRequest(self.next, message.length));
        }
    }
}

/// Number of parts of a message.
fn parts(length: u64, part_bytes: u64) -> u32 {
    length.div_ceil(part_bytes).max(1) as u32
}

fn unexpected(word: &ControlMessage) -> ConnectionError {
    ConnectionError(ErrorKind::Remote, format!("protocol error: the receiver says {word:?}"))
}

impl DialHandler for Sender {
    fn on_welcome(self: Arc<Self>, number: u32, socket: Socket) {
        self.act(|_, state| {
            let Some(device) = state.failover.accepted(number) else { return Ok(()) };
            let why = state.trouble();
            if !Self::move_to(&self, state, &device, socket, &why)? {
                state.failover.mark_failed();
            }
            Ok(())
        });
    }

    fn on_dial_error(self: Arc<Self>, number: u32, error: DialError) {
        self.act(|_, state| {
            if !state.failover.attempt_failed(number, &error) {
                return Ok(());
            }
            let what = format!("{}, and {}", state.trouble(), error.what);
            Err(ConnectionError(ErrorKind::Remote, what))
        });
    }
}

impl Outbound for Sender {
    fn base(&self) -> &Base {
        self.base()
    }

    fn send(self: Arc<Self>, buffer: SendBuffer) -> Result<Option<Request>, Error> {
        Self::send(&self, buffer, None)
    }

    fn send_tagged(
        self: Arc<Self>,
        buffer: SendBuffer,
        tag: i32,
    ) -> Result<Option<Request>, Error> {
        Self::send(&self, buffer, Some(tag))
    }

    fn owner_closed(self: Arc<Self>) {
        let mut state = self.state();
        let promised = state.requests == 0 && !state.messages.is_empty();
        if promised && !self.base().failed() {
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
    fn break_path(&self, lane: usize) {
        self.state().core.lanes.break_pair(lane);
    }

    #[cfg(test)]
    fn id(&self) -> evenkeel_protocol::ConnectionId {
        self.state().failover.connection()
    }

    #[cfg(test)]
    fn queue_pairs(&self) -> usize {
        self.state().core.lanes.count()
    }
}
