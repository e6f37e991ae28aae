//! The receiving side of a TCP connection with several flows: its sockets, its lock and its buffers. What it does is decided
//! by [`evenkeel_protocol::Receiver`].

use std::any::Any;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use evenkeel_protocol::{
    FlowEnd, FlowId, PathInfo, PostedBuffer, ReassemblyError, RecvEvent, RecvFailure, RecvTimeouts,
    RecvWaits, Refusal,
};
use socket2::Socket;

use crate::connection::base::{Base, Direction, InFlight, TransportKind, WORKER_QUANTUM};
use crate::connection::recv::{Inbound, TaggedBuffer};
use crate::connection::request::{MAX_REQUESTS, Operation, Owner, Request, Target};
use crate::connection::unexpected::{UnexpectedMemory, deliver};
use crate::context::Context;
use crate::error::{Error, ErrorKind};
use crate::memory::buffers::RecvBuffer;
use crate::runtime::caller_polling::SeenTurn;
use crate::runtime::reactor::{Readiness, Registration, Source, Workers};
use crate::runtime::work_lock::WorkLock;
use crate::stream::{SendHalf, Stream};
use crate::sync::lock;
use crate::sys;
use crate::tcp::recv_flow::RecvFlow;
use crate::telemetry::metrics::{ConnectionObservation, FlowObservation, Observed};

impl Inbound for TcpReceiver {
    fn base(&self) -> &Base {
        &self.base
    }

    fn recv(self: Arc<Self>, buffer: RecvBuffer) -> Result<Option<Request>, Error> {
        Self::recv(&self, buffer)
    }

    fn recv_group(self: Arc<Self>, group: &[TaggedBuffer<'_>]) -> Result<Option<Request>, Error> {
        Self::recv_group(&self, group)
    }

    fn set_awaited(&self, is_awaited: bool) {
        let now = sys::coarse_time();
        let locked = self.lock();
        self.base.set_awaited(is_awaited);
        self.base.set_outstanding(locked.waits.outstanding, now);
    }

    fn flows(&self) -> usize {
        Self::flows(self).len()
    }

    fn close(&self) {
        Self::close(self);
    }

    #[cfg(test)]
    fn break_path(&self, index: usize) {
        unreachable!("TCP has no queue pair {index}");
    }
}

type Engine = evenkeel_protocol::Receiver<RecvBuffer, Target, UnexpectedMemory>;

/// Maximum number of events that are taken at a time.
const EVENTS: usize = 4;

pub(crate) struct TcpReceiver {
    pub(super) base: Base,
    pub(super) workers: Arc<Workers>,
    /// Held for no system call, and no other lock is taken meanwhile.
    locked: Mutex<Locked>,
    /// Held while unexpected messages are copied into their buffers.
    delivering: WorkLock<()>,
    /// For timeouts of the connection. Flows have none.
    clock: Registration,
    seen_turn: SeenTurn,
}

/// The state of a receiver.
pub(super) struct Locked {
    pub(super) engine: Engine,
    /// By slot.
    flows: Vec<Option<Arc<RecvFlow>>>,
    /// What the connection's stopwatches have been told.
    waits: RecvWaits,
}

/// What to do after a step, without the lock.
enum Action {
    Complete(Target, u64),
    Reply(Arc<RecvFlow>),
    Read(Arc<RecvFlow>),
    Deliver,
    Failed(RecvFailure),
}

/// Who reads flows that waited for a buffer.
#[derive(Clone, Copy)]
enum Reader {
    /// The caller, who has posted it.
    Caller,
    /// Their worker, or a caller that polls.
    Worker,
}

impl Locked {
    fn flow(&self, flow: FlowId) -> Option<Arc<RecvFlow>> {
        let there = self.flows.get(flow.slot())?.as_ref()?;
        (there.id == flow).then(|| Arc::clone(there))
    }

    /// What to do for this event. Nothing, if its flow is being closed.
    fn action(&self, event: RecvEvent<Target>) -> Option<Action> {
        Some(match event {
            RecvEvent::Complete(target, bytes) => Action::Complete(target, bytes),
            RecvEvent::Reply(flow) => Action::Reply(self.flow(flow)?),
            RecvEvent::Read(flow) => Action::Read(self.flow(flow)?),
            RecvEvent::Deliver => Action::Deliver,
            RecvEvent::Failed(failure) => Action::Failed(failure),
        })
    }
}

impl TcpReceiver {
    /// Opens a connection with flows that were accepted.
    pub(crate) fn open(
        context: Context,
        workers: &Arc<Workers>,
        peer: SocketAddr,
        streams: Vec<Stream>,
    ) -> io::Result<Arc<Self>> {
        let timeouts = RecvTimeouts {
            connect: context.settings.connect_timeout,
            recovery: context.settings.recovery_timeout,
        };
        let receiver = Arc::new(Self {
            base: Base::new(context, Direction::Recv, TransportKind::Tcp, peer),
            workers: Arc::clone(workers),
            locked: Mutex::new(Locked {
                engine: Engine::new(sys::coarse_time(), timeouts),
                flows: Vec::new(),
                waits: RecvWaits::default(),
            }),
            delivering: WorkLock::default(),
            clock: workers.registration(),
            seen_turn: SeenTurn::default(),
        });
        receiver.clock.watch_ticks(Arc::new(Clock(Arc::clone(&receiver))));
        let observed: Weak<Self> = Arc::downgrade(&receiver);
        receiver.base.context.metrics.watch(observed);
        // All are there before any is read: the sender may report one as dead on another.
        let flows = streams.into_iter().enumerate().map(|(number, stream)| {
            let flow = receiver.insert_flow(number as u32, stream, true);
            flow.map_err(|(refusal, _)| io::Error::other(refusal.to_string()))
        });
        let watched = flows
            .collect::<io::Result<Vec<_>>>()
            .and_then(|flows| flows.iter().try_for_each(|flow| flow.watch()));
        if let Err(error) = watched {
            receiver.close();
            return Err(error);
        }
        Ok(receiver)
    }

    /// Whether another flow can be added.
    pub(crate) fn is_open(&self) -> bool {
        self.lock().engine.is_open()
    }

    /// Adds a flow, and answers its dialer by `answer`. The flow is there before the dialer knows that it is accepted. The
    /// sender may use it and lose it at once, and the report must find it: its chunks are sent again on another flow.
    pub(crate) fn join(
        self: &Arc<Self>,
        number: u32,
        stream: Stream,
        answer: impl FnOnce(&Socket, &mut SendHalf, Result<(), Refusal>) -> io::Result<()>,
    ) -> Result<(), Refusal> {
        let flow = match self.insert_flow(number, stream, false) {
            Ok(flow) => flow,
            Err((refusal, mut stream)) => {
                // If the dialer is gone, nobody misses the answer.
                let _ = answer(&stream.socket, &mut stream.send, Err(refusal));
                return Err(refusal);
            }
        };
        flow.answer(|socket, half| answer(socket, half, Ok(())));
        self.step(|locked, _| locked.engine.handle_answered(flow.id));
        flow.watch().map_err(|error| {
            self.flow_ended(&flow, &FlowEnd::Lost(error.to_string()));
            Refusal::Busy
        })
    }

    /// Adds a flow, unless the connection is over, has too many flows, or has this one already. Nothing is written to the flow
    /// before its dialer is answered.
    fn insert_flow(
        self: &Arc<Self>,
        number: u32,
        mut stream: Stream,
        is_answered: bool,
    ) -> Result<Arc<RecvFlow>, (Refusal, Stream)> {
        stream.recv.read_ahead();
        // While an acknowledgement is unacknowledged, the kernel sends no keepalive probes, and repeats it for a quarter of an
        // hour. Not for flows that send: a peer that does not read would end them. Fails only where there is no TCP.
        let peer_timeout = self.base.context.settings.peer_timeout;
        let _ = stream.socket.set_tcp_user_timeout(Some(peer_timeout));
        let mut locked = self.lock();
        let added = match locked.engine.handle_flow(number, is_answered) {
            Ok(added) => added,
            Err(refusal) => return Err((refusal, stream)),
        };
        let flow = Arc::new(RecvFlow::new(Arc::clone(self), number, added.id, stream));
        let slot = added.id.slot();
        if slot == locked.flows.len() {
            locked.flows.push(None);
        }
        locked.flows[slot] = Some(Arc::clone(&flow));
        drop(locked);
        self.base.counters.recovered.add(added.has_recovered.into());
        Ok(flow)
    }

    fn flows(&self) -> Vec<Arc<RecvFlow>> {
        self.lock().flows.iter().flatten().map(Arc::clone).collect()
    }

    fn recv(this: &Arc<Self>, buffer: RecvBuffer) -> Result<Option<Request>, Error> {
        if let Some(error) = this.failure() {
            return Err(error);
        }
        let operation = Operation::new();
        let is_posted = this.step_by(Reader::Caller, |Locked { engine, .. }, now| {
            let has_room = engine.requests() < MAX_REQUESTS;
            if has_room {
                engine.handle_buffer(now, posted(buffer, &operation, 0), 0);
            }
            has_room
        });
        let owner = || Arc::clone(this) as Arc<dyn Owner>;
        Ok(is_posted.then(|| Request::new(operation, owner())))
    }

    fn recv_group(this: &Arc<Self>, group: &[TaggedBuffer<'_>]) -> Result<Option<Request>, Error> {
        if let Some(error) = this.failure() {
            return Err(error);
        }
        let operation = Operation::of_group(group.len());
        let is_posted = this.step_by(Reader::Caller, |Locked { engine, .. }, now| {
            if engine.requests() + group.len() > MAX_REQUESTS {
                return false;
            }
            match group {
                [TaggedBuffer { buffer, tag, .. }] if engine.has_common_tag(*tag) => {
                    engine.handle_buffer(now, posted(*buffer, &operation, 0), *tag);
                }
                _ => {
                    let tagged = group.iter().enumerate().map(|(index, tagged)| {
                        (tagged.tag, posted(tagged.buffer, &operation, index))
                    });
                    engine.handle_tagged_buffers(now, tagged);
                }
            }
            true
        });
        let owner = || Arc::clone(this) as Arc<dyn Owner>;
        Ok(is_posted.then(|| Request::new(operation, owner())))
    }

    /// The state, for what nothing follows from.
    pub(super) fn lock(&self) -> MutexGuard<'_, Locked> {
        lock(&self.locked)
    }

    /// Tells the engine something or asks it, and then does without the lock what follows from that.
    pub(super) fn step<T>(&self, step: impl FnOnce(&mut Locked, Duration) -> T) -> T {
        self.step_by(Reader::Worker, step)
    }

    fn step_by<T>(&self, reader: Reader, step: impl FnOnce(&mut Locked, Duration) -> T) -> T {
        let now = sys::coarse_time();
        let mut locked = self.lock();
        let outcome = step(&mut locked, now);
        loop {
            let mut actions = [const { None }; EVENTS];
            let mut count = 0;
            while count < EVENTS
                && let Some(event) = locked.engine.poll_event()
            {
                actions[count] = locked.action(event);
                count += 1;
            }
            self.note_waits(&mut locked, now);
            let has_timeout = locked.engine.next_timeout().is_some();
            drop(locked);
            if has_timeout {
                self.clock.request_tick();
            }
            actions.into_iter().flatten().for_each(|action| self.run(action, reader));
            if count < EVENTS {
                return outcome;
            }
            locked = self.lock();
        }
    }

    fn run(&self, action: Action, reader: Reader) {
        match (action, reader) {
            (Action::Complete(target, bytes), _) => {
                target.complete(bytes);
                self.base.notify();
            }
            (Action::Reply(flow), _) => flow.reply(),
            (Action::Read(flow), Reader::Worker) => flow.wake_worker(),
            (Action::Read(flow), Reader::Caller) => flow.read(match self.workers.callers_lead() {
                true => WORKER_QUANTUM,
                false => self.base.context.settings.caller_bytes,
            }),
            (Action::Deliver, _) => self.deliver_unexpected(),
            (Action::Failed(failure), _) => self.fail(kind_of(&failure), &failure.to_string()),
        }
    }

    /// Accounts for what the connection waits for now.
    fn note_waits(&self, locked: &mut Locked, now: Duration) {
        let waits = locked.engine.waits();
        if waits != std::mem::replace(&mut locked.waits, waits) {
            self.base.set_outstanding(waits.outstanding, now);
            self.base.waits.unposted.set(waits.unposted, now);
            self.base.waits.arriving.set(waits.arriving, now);
        }
    }

    /// Copies unexpected messages into their buffers. If another thread is at it, that thread goes on.
    fn deliver_unexpected(&self) {
        self.delivering.run(|_delivering| self.copy_unexpected());
    }

    /// Copies the unexpected messages that have buffers. Called with `delivering`.
    fn copy_unexpected(&self) {
        loop {
            let delivery = self.lock().engine.poll_delivery();
            let Some(delivery) = delivery else { return };
            // Without the lock: it may be long.
            let freed = deliver(delivery);
            self.base.notify();
            self.step(|locked, _| locked.engine.handle_delivered(freed));
        }
    }

    /// A flow has ended.
    pub(super) fn flow_ended(&self, flow: &RecvFlow, end: &FlowEnd) {
        if !flow.quiesce() {
            return;
        }
        flow.close();
        if *end != FlowEnd::Expected {
            self.base.counters.lost.add(1);
        }
        self.step(|locked, now| {
            // Not there if the connection was closed in between.
            if let Some(slot) = locked.flows.get_mut(flow.id.slot()) {
                *slot = None;
            }
            locked.engine.handle_ended(now, flow.id, end);
        });
    }

    /// The peer reports a dead flow. It will send again what the flow had not delivered.
    pub(crate) fn on_flow_dead(&self, number: u32) {
        let flow = {
            let locked = self.lock();
            locked.engine.flow_with_number(number).and_then(|flow| locked.flow(flow))
        };
        if let Some(flow) = flow {
            self.flow_ended(&flow, &FlowEnd::Reported);
        }
    }

    pub(super) fn fail(&self, kind: ErrorKind, what: &str) {
        if self.base.fail(kind, what, &self.in_flight()) {
            // The peer must be informed now, not when this side closes.
            self.lock().engine.handle_failure();
            self.flows().iter().for_each(|flow| flow.end_replies());
        }
    }

    fn in_flight(&self) -> InFlight {
        let Locked { engine, .. } = &*self.lock();
        InFlight { requests: engine.requests(), bytes: engine.missing_bytes() }
    }

    /// Returns when no buffer is being written, and none will be. Waits only for system calls that do not block.
    pub(super) fn quiesce(&self) {
        for flow in self.flows() {
            flow.quiesce();
        }
        // Messages that are there are still delivered, and none after them.
        let _delivering = self.delivering.lock();
        self.copy_unexpected();
        self.lock().engine.handle_quiesced();
    }

    /// Closes the connection.
    pub(super) fn close(&self) {
        // Told first, so that every flow is quiesced, also one that is being added. A second call to close waits for that
        // too.
        let is_first = self.step(|locked, _| locked.engine.handle_close());
        self.quiesce();
        if !is_first {
            return;
        }
        let flows = {
            let mut locked = self.lock();
            locked.engine.close_flows();
            std::mem::take(&mut locked.flows)
        };
        for flow in flows.iter().flatten() {
            flow.end_replies();
            flow.close();
        }
        self.clock.end_ticks();
        self.base.log_closed();
    }
}

/// A buffer of a request, with this index in it.
fn posted(
    buffer: RecvBuffer,
    operation: &Arc<Operation>,
    index: usize,
) -> PostedBuffer<RecvBuffer, Target> {
    let request = Target::new(buffer, operation, index);
    PostedBuffer { buffer, capacity: buffer.length() as u64, request }
}

fn kind_of(failure: &RecvFailure) -> ErrorKind {
    match failure {
        RecvFailure::Message(ReassemblyError::TooLong { .. }) => ErrorKind::Truncated,
        RecvFailure::Message(
            ReassemblyError::TotalChanged { .. } | ReassemblyError::TooFragmented { .. },
        )
        | RecvFailure::NotAsked
        | RecvFailure::PeerClosed
        | RecvFailure::NotDelivered { .. }
        | RecvFailure::FlowsLost { .. } => ErrorKind::Remote,
    }
}

impl Observed for TcpReceiver {
    fn observe(&self) -> ConnectionObservation<'_> {
        self.base.observe(&Self::in_flight(self))
    }

    fn base(&self) -> &Base {
        &self.base
    }

    fn paths(&self) -> Vec<PathInfo> {
        let paths = Self::flows(self);
        paths.iter().filter_map(|flow| sys::path_info(&flow.socket).ok()).collect()
    }

    fn observe_flows(&self) -> Vec<FlowObservation> {
        let observe = |flow: &Arc<RecvFlow>| FlowObservation {
            number: flow.number,
            bytes: flow.counters.bytes(),
            path: sys::path_figures(&flow.socket).unwrap_or_default(),
        };
        Self::flows(self).iter().map(observe).collect()
    }
}

impl Owner for TcpReceiver {
    fn retain_memory(&self, memory: Box<dyn Any + Send + Sync>) {
        self.base.retain_memory(memory);
    }

    fn failure(&self) -> Option<Error> {
        let error = self.base.failure()?;
        self.quiesce();
        Some(error)
    }

    fn progress(&self) {
        self.workers.caller_polls(&self.seen_turn);
    }
}

/// Registers the connection with a worker, for its timeouts.
struct Clock(Arc<TcpReceiver>);

impl Source for Clock {
    fn ready(&self, _readiness: Readiness) {}

    fn tick(&self, _now: Instant) -> bool {
        // Requests the next one itself if a timeout is left.
        self.0.step(|locked, now| locked.engine.handle_timeout(now));
        false
    }

    fn abandoned(&self, why: &str) {
        self.0.fail(ErrorKind::Internal, why);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::sync::Barrier;
    use std::thread;

    use evenkeel_protocol::{ChunkHeader, FRAME_BYTES, Frame, MAX_UNEXPECTED_BYTES};
    use rustix::event::{PollFd, PollFlags, poll};
    use socket2::{SockFilter, SockRef};

    use super::*;
    use crate::{NullLog, Settings, Transport, test_support};

    /// After a close nothing is written to the buffers, whatever flows are added meanwhile.
    #[test]
    fn close_quiesces_flows_that_are_being_added() {
        let transport = test_support::transport();
        let runtime = transport.runtime().unwrap();
        for _ in 0..200 {
            let context = transport.context(0, "").unwrap();
            let peer = "127.0.0.1:1".parse().unwrap();
            let receiver = TcpReceiver::open(context, runtime.workers(), peer, Vec::new()).unwrap();
            let sockets: Vec<_> = (0..64).map(|_| UnixStream::pair().unwrap().0).collect();
            let begin = Barrier::new(2);
            let entered = thread::scope(|scope| {
                let entering = scope.spawn(|| {
                    begin.wait();
                    let sockets = sockets.into_iter().enumerate();
                    let insert_flow = |(number, socket): (usize, UnixStream)| {
                        receiver.insert_flow(number as u32, Stream::plain(socket.into()), true).ok()
                    };
                    sockets.map_while(insert_flow).collect::<Vec<_>>()
                });
                begin.wait();
                // Some are there, and more are being added.
                while receiver.flows().len() < 8 {
                    thread::yield_now();
                }
                receiver.close();
                entering.join().unwrap()
            });
            assert!(entered.iter().all(|flow| flow.reading.lock().closed));
        }
    }

    /// A chunk of message 0, without its bytes.
    fn chunk(length: u32) -> [u8; FRAME_BYTES] {
        let total = length.into();
        Frame::Chunk(ChunkHeader { message: 0, offset: 0, length, total, ack_wanted: true })
            .encode()
    }

    /// Reads frames until there is an acknowledgement.
    fn wait_for_ack(mut flow: &UnixStream) {
        let mut frame = [0; FRAME_BYTES];
        while !matches!(Frame::decode(&frame), Ok(Frame::Ack(..))) {
            flow.read_exact(&mut frame).unwrap();
        }
    }

    /// A sender that is told of a new flow may lose it, report that on another one, and send the bytes again there, all
    /// before the thread that has told it goes on. What the lost flow still holds must not count.
    #[test]
    fn flow_that_dies_while_it_joins_delivers_nothing() {
        let transport = test_support::transport();
        let runtime = transport.runtime().unwrap();
        let context = transport.context(0, "").unwrap();
        let peer = "127.0.0.1:1".parse().unwrap();
        let (near, mut far) = UnixStream::pair().unwrap();
        let receiver =
            TcpReceiver::open(context, runtime.workers(), peer, vec![Stream::plain(near.into())])
                .unwrap();
        let memory = Box::leak(vec![0; 2000].into_boxed_slice());
        let request =
            TcpReceiver::recv(&receiver, RecvBuffer::from_static(memory)).unwrap().unwrap();
        let (joining, mut lost) = UnixStream::pair().unwrap();
        let _ = receiver.join(4, Stream::plain(joining.into()), |_, _, verdict| {
            assert_eq!(verdict, Ok(()));
            lost.write_all(&chunk(2000)).unwrap();
            lost.write_all(&[1; 1000]).unwrap();
            far.write_all(&Frame::FlowDead(4).encode()).unwrap();
            wait_for_ack(&far);
            Ok(())
        });
        receiver.flows().iter().for_each(|flow| flow.read(1 << 20));
        far.write_all(&chunk(2000)).unwrap();
        far.write_all(&[2; 2000]).unwrap();
        assert_eq!(test_support::until(|| request.test().unwrap()), 2000);
        receiver.close();
    }

    /// A TCP connection from a peer.
    fn flow() -> (Socket, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let near = Socket::from(listener.accept().unwrap().0);
        near.set_nonblocking(true).unwrap();
        (near, far)
    }

    fn reset(flow: TcpStream) {
        SockRef::from(&flow).set_linger(Some(Duration::ZERO)).unwrap();
    }

    /// A receiver with one flow, and the flow's other end.
    fn receiver(transport: &Transport) -> (Arc<TcpReceiver>, TcpStream) {
        let context = transport.context(0, "").unwrap();
        let peer = "127.0.0.1:1".parse().unwrap();
        let (near, far) = flow();
        let runtime = transport.runtime().unwrap();
        (
            TcpReceiver::open(context, runtime.workers(), peer, vec![Stream::plain(near)]).unwrap(),
            far,
        )
    }

    /// Posts a buffer of this length.
    fn post(receiver: &Arc<TcpReceiver>, length: usize) -> Request {
        let memory = Box::leak(vec![0; length].into_boxed_slice());
        TcpReceiver::recv(receiver, RecvBuffer::from_static(memory)).unwrap().unwrap()
    }

    /// Whether a receiver fails that has no flow left, and gets none for this time.
    fn fails_after(receiver: &Arc<TcpReceiver>, time: Duration) -> bool {
        test_support::until(|| receiver.flows().is_empty().then_some(()));
        receiver.step(|locked, now| locked.engine.handle_timeout(now + time));
        receiver.base.failed()
    }

    /// Part of a message of this length, from this offset, as the sender writes it.
    fn part_of(message: u64, total: u64, offset: u64, length: u32) -> Vec<u8> {
        let header = ChunkHeader { message, offset, length, total, ack_wanted: true };
        [&Frame::Chunk(header).encode()[..], &vec![1; length as usize]].concat()
    }

    /// More than the receiver waits for a flow in place of one that its sender has closed, and less than for one in place of
    /// one that was reset.
    const NOT_LONG: Duration = Duration::from_secs(1);

    #[test]
    fn receiver_waits_longer_for_a_new_flow_after_a_reset_than_after_a_close() {
        let transport = test_support::transport();
        let _runtime = transport.runtime().unwrap();
        let (closed, far) = receiver(&transport);
        let _request = post(&closed, 2000);
        drop(far);
        assert!(fails_after(&closed, NOT_LONG));
        let error = closed.base.failure().unwrap().to_string();
        assert!(error.contains("the peer closed the connection"), "{error}");
        let (lost, far) = receiver(&transport);
        let _request = post(&lost, 2000);
        reset(far);
        assert!(!fails_after(&lost, NOT_LONG));
        let (near, mut far) = flow();
        lost.join(4, Stream::plain(near), |_, _, _| Ok(())).unwrap();
        far.write_all(&part_of(0, 2000, 0, 1024)).unwrap();
        drop(far);
        assert!(fails_after(&lost, transport.settings.recovery_timeout));
        let error = lost.base.failure().unwrap().to_string();
        assert!(error.contains("all flows are lost (") && error.contains("reset"), "{error}");
        closed.close();
        lost.close();
    }

    /// No acknowledgement gets through, and the kernel probes no flow with unacknowledged bytes. The report of the first flow
    /// that ends is such bytes on the other one.
    #[test]
    fn outage_after_an_acknowledgement_ends_all_flows() {
        let settings = Settings::from_lookup(|name: &str| match name {
            "NCCL_SOCKET_IFNAME" => Some("lo".to_owned()),
            "EVENKEEL_PEER_TIMEOUT" => Some("1".to_owned()),
            _ => None,
        });
        let transport = Transport::new(settings.unwrap(), Arc::new(NullLog)).unwrap();
        let _runtime = transport.runtime().unwrap();
        let (receiver, mut far) = receiver(&transport);
        let (near, other) = flow();
        receiver.join(4, Stream::plain(near), |_, _, _| Ok(())).unwrap();
        let (first, _next) = (post(&receiver, 1), post(&receiver, 2000));
        let drop_all = [SockFilter::new((libc::BPF_RET | libc::BPF_K) as u16, 0, 0, 0)];
        for silent in [&far, &other] {
            SockRef::from(silent).attach_filter(&drop_all).unwrap();
        }
        far.write_all(&part_of(0, 1, 0, 1)).unwrap();
        test_support::until(|| first.test().unwrap());
        test_support::until(|| receiver.flows().is_empty().then_some(()));
        assert_eq!(receiver.base.counters.lost.get(), 2);
        assert!(fails_after(&receiver, Duration::from_secs(3600)));
        let error = receiver.base.failure().unwrap().to_string();
        assert!(error.contains("timed out"), "{error}");
        receiver.close();
    }

    /// The kernel reports the reset to whoever uses the flow first: here to an acknowledgement, as when flows report each other.
    #[test]
    fn reset_that_a_write_notices_is_no_orderly_end() {
        let transport = test_support::transport();
        let runtime = transport.runtime().unwrap();
        let context = transport.context(0, "").unwrap();
        let peer = "127.0.0.1:1".parse().unwrap();
        let (near, far) = flow();
        let receiver =
            TcpReceiver::open(context, runtime.workers(), peer, vec![Stream::plain(near)]).unwrap();
        let _request = post(&receiver, 2000);
        let flow = receiver.flows().remove(0);
        let reading = flow.reading.lock();
        reset(far);
        let hang_up = &mut [PollFd::new(&flow.socket, PollFlags::empty())];
        assert_eq!(poll(hang_up, None), Ok(1));
        receiver.step(|locked, _| locked.engine.handle_report(flow.id));
        drop(reading);
        flow.read(1);
        test_support::until(|| receiver.flows().is_empty().then_some(()));
        assert_eq!(receiver.base.counters.lost.get(), 1);
        assert!(!fails_after(&receiver, NOT_LONG));
        receiver.close();
    }

    /// Posts a buffer of this length and with this tag.
    fn post_tagged(receiver: &Arc<TcpReceiver>, length: usize, tag: i32) -> Request {
        let buffer = RecvBuffer::from_static(Box::leak(vec![0; length].into_boxed_slice()));
        let group = [TaggedBuffer { buffer, tag, registration: None }];
        TcpReceiver::recv_group(receiver, &group).unwrap().unwrap()
    }

    /// The copy may be long. Meanwhile others use the connection, and when it fails the message is not lost.
    #[test]
    fn unexpected_message_is_copied_without_the_lock_of_its_connection() {
        let transport = test_support::transport();
        let _runtime = transport.runtime().unwrap();
        let (receiver, mut far) = receiver(&transport);
        let _another_tag = post_tagged(&receiver, 8, 5);
        far.write_all(&part_of(0, 1000, 0, 1000)).unwrap();
        test_support::until(|| (receiver.base.counters.bytes() == 1000).then_some(()));
        let delivering = receiver.delivering.lock();
        let request = post_tagged(&receiver, 1000, 0);
        assert_eq!(request.peek().unwrap(), None, "another thread copies");
        assert_eq!(receiver.in_flight().requests, 2);
        receiver.fail(ErrorKind::Remote, "the test ends it");
        drop(delivering);
        assert_eq!(request.peek().unwrap(), Some(1000));
        assert_eq!(receiver.in_flight().requests, 1);
        receiver.close();
    }

    /// The sender's next message has no memory, and waits with its flow until the one before has a buffer.
    #[test]
    fn unexpected_messages_beyond_the_limit_wait() {
        const LONG: usize = MAX_UNEXPECTED_BYTES as usize;
        const PART: usize = 1 << 20;
        let transport = test_support::transport();
        let runtime = transport.runtime().unwrap();
        let context = transport.context(0, "").unwrap();
        let peer = "127.0.0.1:1".parse().unwrap();
        let ((near, mut far), (other_near, mut other)) =
            (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let streams = [near, other_near].map(|socket| Stream::plain(socket.into())).into();
        let receiver = TcpReceiver::open(context, runtime.workers(), peer, streams).unwrap();
        let post = |length, tag| post_tagged(&receiver, length, tag);
        let _another_tag = post(8, 5);
        let header = |message, offset: usize, length: usize, total: usize| {
            let (offset, length, total) = (offset as u64, length as u32, total as u64);
            Frame::Chunk(ChunkHeader { message, offset, length, total, ack_wanted: true }).encode()
        };
        far.write_all(&header(0, 0, PART, LONG)).unwrap();
        // The receiver asks which messages have the common tag.
        let mut asked = [0; FRAME_BYTES];
        far.read_exact(&mut asked).unwrap();
        assert_eq!(Frame::decode(&asked), Ok(Frame::TagsDifferFrom(0)));
        other.write_all(&Frame::SameTagBelow(2).encode()).unwrap();
        other.write_all(&header(1, 0, 1000, 1000)).unwrap();
        other.write_all(&[2; 1000]).unwrap();
        // It is retried from time to time, and waits again.
        test_support::until(|| receiver.lock().engine.next_timeout());
        let (first, second) = (post(LONG, 0), post(1000, 0));
        for at in (0..LONG).step_by(PART) {
            if at > 0 {
                far.write_all(&header(0, at, PART, LONG)).unwrap();
            }
            far.write_all(&vec![1; PART]).unwrap();
        }
        assert_eq!(test_support::until(|| first.test().unwrap()), LONG as u64);
        assert_eq!(test_support::until(|| second.test().unwrap()), 1000);
        receiver.close();
    }
}
