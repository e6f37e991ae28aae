//! The receiving side.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use evenkeel_protocol::{
    ArrivalError, Arrivals, ControlMessage, MAX_MESSAGE_BYTES, MessagePart, QueuePairInfo,
    ReceivedMessage, WINDOW,
};
use evenkeel_verbs::{MemoryRegion, StagingBuffer, WriteSource};
use socket2::Socket;

use super::control::PathFailure;
use super::endpoint::{Endpoint, EndpointCore, EndpointState};
use super::flush::Flush;
use super::queue_pairs::{QueuePairEvent, QueuePairState, QueuePairs, system};
use super::{Adapter, ConnectionError, EAGER_BYTES, Opened, ROOM, with_room};
use crate::Context;
use crate::connection::base::{Base, Direction, InFlight};
use crate::connection::recv::{Inbound, TaggedBuffer};
use crate::connection::request::{MAX_REQUESTS, Operation, Owner, Request, Target};
use crate::connection::tag_matching::{MatchStep, TagMatcher};
use crate::device::Device;
use crate::error::{Error, ErrorKind};
use crate::memory::buffers::RecvBuffer;
use crate::runtime::reactor::Workers;

/// Places for credits in the sender's memory; a message's is that of its number modulo this.
pub(super) const CREDITS: usize = 2 * WINDOW as usize;
/// Bytes of a credit: the message's number plus one u64, address u64, key u32, capacity u32, tag u32.
pub(super) const CREDIT_BYTES: usize = 28;
/// Messages that leave the ring before the sender is told so.
const ROOM_STEP: u64 = WINDOW / 4;
/// How long what was acknowledged may take to be told of once the sender is gone.
const LATE: Duration = Duration::from_millis(500);
/// How long a sender may take to come by another way when its host knows nothing of the one it had.
const DETOUR: Duration = Duration::from_secs(5);

/// Where a message goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Credit {
    pub(super) address: u64,
    pub(super) key: u32,
    /// Bytes.
    pub(super) capacity: u32,
    /// The buffer's tag, where tags differ.
    pub(super) tag: i32,
}

impl Credit {
    fn place(message: u64) -> usize {
        message as usize % CREDITS * CREDIT_BYTES
    }

    fn encode(self, message: u64) -> [u8; CREDIT_BYTES] {
        let mut out = [0; CREDIT_BYTES];
        out[..8].copy_from_slice(&(message + 1).to_le_bytes());
        out[8..16].copy_from_slice(&self.address.to_le_bytes());
        out[16..20].copy_from_slice(&self.key.to_le_bytes());
        out[20..24].copy_from_slice(&self.capacity.to_le_bytes());
        out[24..].copy_from_slice(&self.tag.to_le_bytes());
        out
    }

    /// The number that comes with a message's credit.
    fn number(message: u64) -> u32 {
        message as u32 & !ROOM
    }

    /// The credit that has come with this number, and the message that it is of.
    pub(super) fn read(credits: &StagingBuffer, number: u32) -> Option<(u64, Self)> {
        let mut bytes = [0; CREDIT_BYTES];
        credits.read(Self::place(number.into()), &mut bytes);
        Self::decode(&bytes)
    }

    fn decode(bytes: &[u8; CREDIT_BYTES]) -> Option<(u64, Self)> {
        let message = u64::from_le_bytes(bytes[..8].try_into().ok()?).checked_sub(1)?;
        let credit = Self {
            address: u64::from_le_bytes(bytes[8..16].try_into().ok()?),
            key: u32::from_le_bytes(bytes[16..20].try_into().ok()?),
            capacity: u32::from_le_bytes(bytes[20..24].try_into().ok()?),
            tag: i32::from_le_bytes(bytes[24..].try_into().ok()?),
        };
        Some((message, credit))
    }
}

/// The side that receives.
pub(crate) type Receiver = Endpoint<RecvState>;

/// What it works on.
pub(crate) struct RecvState {
    core: EndpointCore<()>,
    /// Where small messages come.
    ring: StagingBuffer,
    /// Copies of credits on their way.
    outbox: StagingBuffer,
    arrivals: Arrivals<Posted>,
    tags: TagMatcher,
    /// Messages whose credits are to be written.
    uncredited: VecDeque<u64>,
    /// So many messages have left the ring, as the sender knows.
    told_room: u64,
    /// What the sender has offered for lanes that are not ready for it.
    offered: Vec<Option<(QueuePairInfo, Vec<MessagePart>)>>,
    /// A message that the sender waits with, and its length.
    wanted: Option<(u64, u64)>,
    /// The sender has sent all messages below this one, and nothing else.
    bye: Option<u64>,
    /// Since when nothing more is heard, and why.
    gone: Option<(Instant, String)>,
    /// Whether the sender may come by another way then.
    can_move: bool,
    /// Number of the lifeline.
    lifeline_number: u32,
    /// Where messages may be in memory that has them later than the host's would.
    flush: Option<Flush>,
}

struct Posted {
    buffer: RecvBuffer,
    tag: i32,
    /// Whose buffer it is; nobody's for a message that goes aside.
    target: Option<Target>,
    /// Held while the sender may write there.
    region: Option<Arc<MemoryRegion>>,
}

impl Receiver {
    /// Begins to make a connection of so many lanes on a lifeline that has been welcomed. The sender may come `elsewhere`,
    /// too.
    pub(crate) fn open(
        context: Context,
        adapter: &Arc<Adapter>,
        workers: &Arc<Workers>,
        (socket, peer): (Socket, SocketAddr),
        lanes: usize,
        elsewhere: Vec<IpAddr>,
        opened: Opened,
    ) -> Result<Arc<Self>, Error> {
        let mailbox = |bytes| StagingBuffer::new(&adapter.context, bytes).map_err(system);
        let deadline = Instant::now() + context.settings.connect_timeout;
        let is_host = context.memory_types.is_host_only();
        // Credits are short: no lane has enough of them.
        let all = QueuePairs::new(adapter, lanes, u64::MAX)?;
        let mut state = RecvState {
            core: EndpointCore::new(all, socket, &context, opened, deadline),
            ring: mailbox(WINDOW as usize * EAGER_BYTES)?,
            outbox: mailbox(CREDITS * CREDIT_BYTES)?,
            arrivals: Arrivals::default(),
            tags: TagMatcher::default(),
            uncredited: VecDeque::new(),
            told_room: 0,
            offered: (0..lanes).map(|_| None).collect(),
            wanted: None,
            bye: None,
            gone: None,
            can_move: !elsewhere.is_empty(),
            lifeline_number: 0,
            flush: if is_host { None } else { Some(Flush::new(adapter)?) },
        };
        state.core.say_port(state.ring.region());
        if !elsewhere.is_empty() {
            state.core.lifeline.say(&ControlMessage::AlternateAddresses(elsewhere));
        }
        Self::start(context, Direction::Recv, peer, workers, state)
    }

    /// The sender has come by another way, with the lifeline of this number.
    pub(crate) fn fail_over(self: &Arc<Self>, number: u32, device: &Device, socket: Socket) {
        self.act(|_, state| {
            // What was said on one before may come late.
            if number <= state.lifeline_number {
                return Ok(());
            }
            state.lifeline_number = number;
            let why = match (state.core.lanes.longest_down(), &state.gone) {
                (Some((_, why)), _) => why.to_owned(),
                (None, Some((_, why))) => why.clone(),
                (None, None) => "the sender has left that way".to_owned(),
            };
            Self::move_to(self, state, device, socket, &why)?;
            Ok(())
        });
    }

    fn recv(this: &Arc<Self>, buffer: RecvBuffer) -> Result<Option<Request>, Error> {
        let operation = Operation::new();
        let accepted = Self::take_in(this, 1, |state, base| {
            let region = state.region(&buffer)?;
            Ok(state.post(Target::new(buffer, &operation, 0), 0, region, base))
        })?;
        Ok(accepted.then(|| Request::new(operation, Arc::clone(this) as Arc<dyn Owner>)))
    }

    fn recv_group(this: &Arc<Self>, group: &[TaggedBuffer]) -> Result<Option<Request>, Error> {
        let operation = Operation::of_group(group.len());
        let accepted = Self::take_in(this, group.len(), |state, base| match group {
            [TaggedBuffer { buffer, tag }] if state.tags.has_common_tag(*tag) => {
                let region = state.region(buffer)?;
                Ok(state.post(Target::new(*buffer, &operation, 0), *tag, region, base))
            }
            _ => {
                for (index, TaggedBuffer { buffer, tag }) in group.iter().enumerate() {
                    state.tags.post(*tag, Target::new(*buffer, &operation, index));
                }
                Ok(Ok(()))
            }
        })?;
        Ok(accepted.then(|| Request::new(operation, Arc::clone(this) as Arc<dyn Owner>)))
    }

    fn flush(this: &Arc<Self>, memory: RecvBuffer) -> Result<Request, Error> {
        if let Some(error) = this.failure() {
            return Err(error);
        }
        let operation = Operation::new();
        let mut begun = Ok(());
        this.act(|_, state| {
            begun = state.begin_flush(memory, &operation);
            Ok(())
        });
        begun.map(|()| Request::new(operation, Arc::clone(this) as Arc<dyn Owner>))
    }

    /// Takes so many buffers in, by `post`, if there is room for them; whether there is. The outer errors of `post` are the
    /// caller's, the inner ones the connection's.
    fn take_in(
        this: &Arc<Self>,
        count: usize,
        post: impl FnOnce(&mut RecvState, &Base) -> Result<Result<(), ConnectionError>, Error>,
    ) -> Result<bool, Error> {
        if let Some(error) = this.failure() {
            return Err(error);
        }
        let mut accepted = Ok(true);
        this.act(|side, state| {
            let room = MAX_REQUESTS.min(state.arrivals.room());
            if state.outstanding() + count > room {
                accepted = Ok(false);
                return Ok(());
            }
            match post(state, side.base()) {
                Ok(posted) => posted?,
                Err(error) => {
                    accepted = Err(error);
                    return Ok(());
                }
            }
            state.core.tell_news(side.base());
            state.check_wanted()?;
            state.begin(side.base())?;
            state.core.tell_news(side.base());
            state.judge(side.base())
        });
        accepted
    }
}

impl EndpointState for RecvState {
    type Note = ();
    // The sender takes what its device has acknowledged for done.
    const PEER_KNOWS: bool = false;

    fn core(&mut self) -> &mut EndpointCore<()> {
        &mut self.core
    }

    fn take(&mut self, told: QueuePairEvent<()>, base: &Base) -> Result<(), ConnectionError> {
        match told {
            // Only the sender probes.
            QueuePairEvent::Sent(..) | QueuePairEvent::Probed(_) => {}
            QueuePairEvent::Received(lane, bytes, immediate) => {
                self.core.lanes.all()[lane].carried.chunk(&base.counters, bytes.into());
                if let Some(arrived) = self.arrivals.part_received(bytes, immediate)? {
                    self.complete(arrived, base)?;
                }
            }
            QueuePairEvent::Failed(lane, why) => {
                if self.core.lanes.stop(lane, &why) {
                    base.counters.lost.add(1);
                    self.core.lifeline.say(&ControlMessage::QueuePairFailed(lane as u8));
                }
            }
        }
        Ok(())
    }

    fn begin(&mut self, base: &Base) -> Result<(), ConnectionError> {
        if let Some(flush) = &mut self.flush {
            self.core.has_news |= flush.poll()?;
            if let Some((_, why)) = flush.failure()
                && !self.can_move
            {
                return Err(ConnectionError(ErrorKind::System, why.clone()));
            }
        }
        self.settle(base)?;
        self.post_by_tags(base)?;
        let Some(port) = self.core.port else { return Ok(()) };
        while let Some(message) = self.uncredited.front().copied()
            && let Some(lane) = self.core.lanes.best()
        {
            self.uncredited.pop_front();
            let posted = self.arrivals.posted().find(|(number, ..)| *number == message);
            let Some((_, capacity, Posted { buffer, tag, region, .. })) = posted else {
                continue;
            };
            // Without a registration there is nothing to be written; the sender has to know the tag.
            let credit = Credit {
                address: region.as_ref().map_or(0, |_| buffer.address()),
                key: region.as_ref().map_or(0, |region| region.remote_key()),
                capacity: capacity as u32,
                tag: *tag,
            };
            let place = Credit::place(message);
            let to = (port.address + place as u64, port.key);
            let bytes = credit.encode(message);
            self.outbox.write(place, &bytes);
            let number = Credit::number(message);
            self.core.lanes.write_copy(lane, &bytes, (&self.outbox, place), to, number, ())?;
        }
        let taken = self.arrivals.first();
        if taken >= self.told_room + ROOM_STEP
            && let Some(lane) = self.core.lanes.best()
        {
            let number = ROOM | taken as u32 & !ROOM;
            self.core.lanes.write(
                lane,
                WriteSource::Empty,
                (port.address, port.key),
                number,
                (),
            )?;
            self.told_room = taken;
        }
        Ok(())
    }

    fn moved(&mut self, _base: &Base) -> Result<(), ConnectionError> {
        let context = &self.core.lanes.adapter.context;
        for mailbox in [&mut self.ring, &mut self.outbox] {
            mailbox.reregister(context).map_err(system)?;
        }
        for posted in self.arrivals.posted_mut() {
            if posted.region.is_some() {
                posted.region = Some(self.core.lanes.target(&posted.buffer)?);
            }
        }
        if let Some(flush) = self.flush.take() {
            self.flush = Some(Flush::new(&self.core.lanes.adapter)?);
            for (memory, operation) in flush.into_pending() {
                self.begin_flush(memory, &operation)?;
            }
        }
        self.offered.fill(None);
        self.gone = None;
        self.core.say_port(self.ring.region());
        Ok(())
    }

    fn hear(&mut self, base: &Base) -> Result<(), ConnectionError> {
        while let Some(word) = self.core.lifeline.hear() {
            match word {
                ControlMessage::Port(port) if self.core.port.is_none() => {
                    self.core.hear_port(port)?;
                    if self.core.is_opening() && !self.core.is_eager() {
                        self.tags = TagMatcher::advertise_all();
                    }
                }
                ControlMessage::AlternateAddresses(_) => self.can_move = true,
                ControlMessage::Offer(lane, pair, parts) => {
                    let lane = self.core.known(lane)?;
                    if self.core.lanes.stop(lane, "the peer's has failed") {
                        base.counters.lost.add(1);
                    }
                    self.offered[lane] = Some((pair, parts));
                }
                ControlMessage::Ready(lane) => {
                    let lane = self.core.known(lane)?;
                    self.core.lanes.go(lane);
                    if !self.core.is_opening() {
                        base.counters.replaced.add(1);
                        self.tell_again();
                    }
                }
                ControlMessage::CreditRequest(message, length) => {
                    self.wanted = Some((message, length));
                    self.check_wanted()?;
                }
                ControlMessage::Close(messages) => self.bye = Some(messages),
                ControlMessage::Tag(tag) => self.tags.set_common_tag(tag),
                ControlMessage::SameTagBelow(until, lengths) => {
                    self.set_aside(until, &lengths, base)?
                }
                other => {
                    let what = format!("protocol error: the sender says {other:?}");
                    return Err(ConnectionError(ErrorKind::Remote, what));
                }
            }
        }
        self.core.lifeline.flush();
        if let Some(why) = self.core.lifeline.ended() {
            let why = why.to_owned();
            self.gone.get_or_insert_with(|| (Instant::now(), why));
        }
        self.work(base)?;
        self.judge(base)
    }

    fn tick(&mut self, now: Instant, base: &Base) -> Result<(), ConnectionError> {
        self.core.check_deadlines(now)?;
        for lane in self.core.lanes.look_after(now) {
            base.counters.lost.add(1);
            self.core.lifeline.say(&ControlMessage::QueuePairFailed(lane as u8));
        }
        let patience = base.context.settings.recovery_timeout;
        if self.outstanding() > 0
            && let Some((since, why)) = self.core.lanes.longest_down()
            && now.saturating_duration_since(since) >= patience
        {
            let what = format!("{why}, and no other one for {} s", patience.as_secs());
            return Err(ConnectionError(ErrorKind::Remote, what));
        }
        if let Some((since, why)) = self.flush.as_ref().and_then(Flush::failure)
            && now.saturating_duration_since(*since) >= patience
        {
            return Err(ConnectionError(ErrorKind::System, why.clone()));
        }
        self.hear(base)
    }

    fn in_flight(&self) -> InFlight {
        InFlight {
            requests: self.outstanding(),
            bytes: self.arrivals.posted().map(|(_, capacity, _)| capacity).sum(),
        }
    }

    fn is_delivered(&self) -> bool {
        true
    }

    fn last_word(&self) -> ControlMessage {
        ControlMessage::Close(0)
    }

    fn let_go(&mut self) {
        self.flush = None;
        self.arrivals.clear();
    }
}

impl RecvState {
    /// Buffers that wait for their messages.
    fn outstanding(&self) -> usize {
        self.arrivals.outstanding() + self.tags.waiting()
    }

    /// The registration that a buffer needs.
    fn region(&self, buffer: &RecvBuffer) -> Result<Option<Arc<MemoryRegion>>, Error> {
        let by_ring = buffer.length() <= EAGER_BYTES && self.core.is_eager();
        if by_ring || buffer.length() == 0 {
            return Ok(None);
        }
        self.core.lanes.target(buffer).map(Some)
    }

    /// Begins to read the last byte of what has come.
    fn begin_flush(&mut self, memory: RecvBuffer, operation: &Arc<Operation>) -> Result<(), Error> {
        let region = self.region(&memory)?;
        match (&mut self.flush, region) {
            (Some(flush), Some(region)) => flush.begin(region, memory, operation),
            (None, _) => Err(Error::argument("host memory needs no flush")),
            (_, None) => Err(Error::argument("nothing has come that could be flushed")),
        }
    }

    /// Posts a buffer for the next message.
    fn post(
        &mut self,
        target: Target,
        tag: i32,
        region: Option<Arc<MemoryRegion>>,
        base: &Base,
    ) -> Result<(), ConnectionError> {
        let buffer = target.buffer;
        self.place(Posted { buffer, tag, target: Some(target), region }, base)
    }

    fn place(&mut self, posted: Posted, base: &Base) -> Result<(), ConnectionError> {
        let needs_credit = posted.region.is_some() || self.tags.advertises();
        let capacity = (posted.buffer.length() as u64).min(MAX_MESSAGE_BYTES);
        match self.arrivals.post(capacity, posted)? {
            (_, Some(arrived)) => self.complete(arrived, base)?,
            (message, None) if needs_credit => self.uncredited.push_back(message),
            (_, None) => {}
        }
        Ok(())
    }

    /// Posts the buffers with tags whose turn it is.
    fn post_by_tags(&mut self, base: &Base) -> Result<(), ConnectionError> {
        while self.arrivals.room() > 0
            && let Some(step) = self.tags.next_step(self.arrivals.next())?
        {
            match step {
                MatchStep::Post(tag, target, _) => {
                    let region = self.region(&target.buffer)?;
                    self.post(target, tag, region, base)?;
                }
                MatchStep::AskSender => {
                    if let Some(from) = self.tags.asked_from() {
                        self.core.lifeline.say(&ControlMessage::TagsDifferFrom(from));
                    }
                }
                MatchStep::Delivered => self.core.has_news = true,
            }
        }
        Ok(())
    }

    /// The sender has messages below `until` that are plain: they have these lengths, and go aside.
    fn set_aside(
        &mut self,
        until: u64,
        lengths: &[u32],
        base: &Base,
    ) -> Result<(), ConnectionError> {
        let next = self.arrivals.next();
        let is_right =
            until.checked_sub(next).is_some_and(|more| more <= self.arrivals.room() as u64);
        if !is_right || !self.core.is_eager() || !self.tags.set_same_tag_below(until) {
            let what = "protocol error: the sender has gone on too far, or was not asked";
            return Err(ConnectionError(ErrorKind::Remote, what.to_owned()));
        }
        for (at, number) in (next..until).enumerate() {
            let length = lengths.get(at).map_or(0, |length| *length as usize);
            // What is in the ring may be as long as a place there.
            let buffer = self.tags.buffer_unexpected(number, length.max(EAGER_BYTES));
            let region = self.region(&buffer)?;
            self.place(Posted { buffer, tag: 0, target: None, region }, base)?;
        }
        self.check_wanted()
    }

    fn complete(
        &mut self,
        arrived: ReceivedMessage<Posted>,
        base: &Base,
    ) -> Result<(), ConnectionError> {
        let ReceivedMessage { posted, message, length, is_eager } = arrived;
        if is_eager {
            if !self.core.is_eager() {
                let what = "protocol error: a message is to be copied, which was not agreed on";
                return Err(ConnectionError(ErrorKind::Remote, what.to_owned()));
            }
            let place = (message % WINDOW) as usize * EAGER_BYTES;
            // What is longer than a place of the ring did not fit into it.
            with_room((length as usize).min(EAGER_BYTES), |bytes| {
                self.ring.read(place, bytes);
                posted.buffer.part(0, bytes.len()).copy_from(bytes);
            });
        }
        // The registration ends, unless others hold it, before the caller has the memory back.
        drop(posted.region);
        base.counters.message(length);
        match posted.target {
            Some(target) => {
                target.complete(length);
                self.core.has_news = true;
            }
            None => self.core.has_news |= self.tags.unexpected_received(message, length)?,
        }
        Ok(())
    }

    /// Whether what the sender waits with fits into its buffer, once there is one.
    fn check_wanted(&mut self) -> Result<(), ConnectionError> {
        let Some((message, length)) = self.wanted else { return Ok(()) };
        let posted = self.arrivals.posted().find(|(number, ..)| *number == message);
        let Some((_, capacity, _)) = posted else { return Ok(()) };
        self.wanted = None;
        if length <= capacity {
            return Ok(());
        }
        Err(ArrivalError::TooLong { length, capacity }.into())
    }

    /// Takes offers for lanes by which nothing comes any more.
    fn settle(&mut self, base: &Base) -> Result<(), ConnectionError> {
        let Some(port) = self.core.port else { return Ok(()) };
        for lane in 0..self.core.lanes.count() {
            if !matches!(
                self.core.lanes.stage(lane),
                QueuePairState::Unconnected | QueuePairState::Drained
            ) {
                continue;
            }
            let Some((pair, parts)) = self.offered[lane].take() else { continue };
            let mut have = 0;
            for (at, part) in parts.iter().enumerate() {
                let came = self.arrivals.has(part.message, part.index);
                have |= u64::from(came) << at;
            }
            let may_wait = self.can_move && !self.core.is_opening();
            let own = match self.core.lanes.renew(lane) {
                Ok(own) => own,
                // The device may have a queue pair later, or the sender comes by another way.
                Err(_) if may_wait => {
                    self.offered[lane] = Some((pair, parts));
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            self.core.lanes.take_unknown(lane);
            if let Err(error) = self.core.lanes.connect(lane, &port, pair, port.marking) {
                // The ports may not reach each other, though their addresses do: the sender looks for another way when it
                // gets no answer.
                if !may_wait {
                    return Err(error.into());
                }
                base.info(&format!("cannot connect a queue pair: {error}"));
                continue;
            }
            self.core.lifeline.say(&ControlMessage::Answer(lane as u8, own, have));
        }
        Ok(())
    }

    /// Some of what the sender was told may have been lost with a queue pair.
    fn tell_again(&mut self) {
        let is_mixed = self.tags.advertises();
        let needs = |posted: &Posted| posted.region.is_some() || is_mixed;
        let all = self.arrivals.posted().filter(|(.., posted)| needs(posted));
        self.uncredited = all.map(|(number, ..)| number).collect();
        self.told_room = self.arrivals.first().saturating_sub(ROOM_STEP);
    }

    /// How long the sender may take to come by another way, if it may come at all.
    fn detour(&self, base: &Base) -> Option<Duration> {
        let cut = self.core.lifeline.cut().filter(|_| self.can_move)?;
        Some(match cut {
            PathFailure::Unreachable => base.context.settings.recovery_timeout,
            PathFailure::Reset => DETOUR,
        })
    }

    /// Fails when what is posted can never come.
    fn judge(&self, base: &Base) -> Result<(), ConnectionError> {
        if self.outstanding() == 0 {
            return Ok(());
        }
        let all_came = self.bye.is_some_and(|messages| self.arrivals.first() >= messages);
        match &self.gone {
            _ if all_came => {
                Err(ConnectionError(ErrorKind::Remote, "the peer closed the connection".to_owned()))
            }
            Some((since, why)) => {
                let what = match self.detour(base) {
                    Some(patience) if since.elapsed() >= patience => {
                        format!("{why}, and by no other way for {} s", patience.as_secs())
                    }
                    None if since.elapsed() >= LATE => why.clone(),
                    _ => return Ok(()),
                };
                Err(ConnectionError(ErrorKind::Remote, what))
            }
            None => Ok(()),
        }
    }
}

impl Inbound for Receiver {
    fn base(&self) -> &Base {
        self.base()
    }

    fn recv(self: Arc<Self>, buffer: RecvBuffer) -> Result<Option<Request>, Error> {
        Self::recv(&self, buffer)
    }

    fn recv_group(self: Arc<Self>, group: &[TaggedBuffer]) -> Result<Option<Request>, Error> {
        Self::recv_group(&self, group)
    }

    fn flush(self: Arc<Self>, memory: RecvBuffer) -> Result<Request, Error> {
        Self::flush(&self, memory)
    }

    fn flows(&self) -> usize {
        self.base().context.settings.flows.into()
    }

    fn close(&self) {
        Self::close(self);
    }

    #[cfg(test)]
    fn break_path(&self, lane: usize) {
        self.state().core.lanes.break_pair(lane);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_credit_says_which_message_it_is_of() {
        let credit = Credit { address: 0x7f00_1234, key: 77, capacity: 1 << 30, tag: -3 };
        for message in [0, 5, 1 << 40] {
            assert_eq!(Credit::decode(&credit.encode(message)), Some((message, credit)));
            let number = Credit::number(message);
            assert_eq!(Credit::place(number.into()), Credit::place(message));
        }
        assert_eq!(Credit::decode(&[0; CREDIT_BYTES]), None, "nothing has come");
    }
}
