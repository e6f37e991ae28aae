//! The accepting side of the handshake.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Read};
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use evenkeel_protocol::{
    CHALLENGE_BYTES, ConnectionId, HELLO_BYTES, Handle, HandshakeError, Hello, Nonce, PROOF_BYTES,
    Refusal, Welcome,
};
use socket2::{Domain, Socket, Type};

use crate::Context;
use crate::connection::base::{configure_socket, would_block};
use crate::connection::recv::{Inbound, RecvConnection};
use crate::device::Device;
use crate::error::{Error, ErrorKind};
use crate::rdma;
use crate::runtime::notify::Notify;
use crate::runtime::reactor::{Readiness, Registration, Runtime, Source, Workers};
use crate::settings::TransportMode;
use crate::sync::lock;
use crate::sys;
use crate::tcp::receiver::TcpReceiver;

/// Most TCP connections that have not shown yet that they are peers. When more come, those that had their time make room, and
/// else the kernel holds the new ones.
const MAX_UNAUTHENTICATED: usize = 128;
/// How long it may take a peer to show that it is one when many come at once. Who has said nothing for longer is dropped if
/// others wait.
const MIN_HANDSHAKE_TIME: Duration = Duration::from_millis(200);
/// Most connections of which some flows have arrived, or that nobody has accepted yet.
const MAX_UNACCEPTED: usize = 64;
/// TCP connections that the kernel holds until a worker accepts them.
const BACKLOG: i32 = 512;

/// Waits for peers that were given its handle. Dropping it closes it, with all that was not
/// accepted. What was accepted goes on, and its peers can still replace flows.
pub struct Listener {
    acceptor: Arc<Acceptor>,
    guard: AcceptorGuard,
    handle: Handle,
    address: SocketAddr,
    /// When to give up; set by the first poll.
    deadline: OnceLock<Instant>,
    runtime: Arc<Runtime>,
}

/// Where and for whom a listener listens.
pub(crate) enum ListenMode {
    /// At the device, for those who are given the handle; it gives up when nobody comes.
    Private,
    /// At an address that peers know, for ever; who listens hears of what has come. A connection is of the device at whose
    /// address it has come.
    Public(SocketAddr, Nonce, Arc<dyn Notify>),
}

struct Acceptor {
    socket: Socket,
    registration: Registration,
    nonce: Nonce,
    /// Hears of what has come; who has one waits for ever.
    notified: Option<Arc<dyn Notify>>,
    context: Context,
    /// Whether it listens at all addresses of this host.
    everywhere: bool,
    workers: Arc<Workers>,
    /// Whether some were left to the kernel.
    is_full: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// No new connection is taken.
    closed: bool,
    /// Oldest first.
    unauthenticated: VecDeque<Arc<Unauthenticated>>,
    partial: HashMap<ConnectionId, Partial>,
    ready: VecDeque<Arc<dyn Inbound>>,
    /// Connections whose peers are agreeing on queue pairs.
    agreeing: HashMap<ConnectionId, Arc<rdma::Receiver>>,
    /// Connections that flows may join: what is ready and what was accepted.
    complete: HashMap<ConnectionId, Weak<TcpReceiver>>,
    /// The same of those whose lifelines others may replace.
    agreed: HashMap<ConnectionId, Weak<rdma::Receiver>>,
    /// Those others, on which nothing was said yet.
    candidates: Vec<Weak<rdma::FailoverCandidate>>,
    /// How many keep the socket open.
    guards: usize,
    /// Why the listener cannot go on.
    failure: Option<Error>,
    /// Strangers turned away so far.
    dropped: u64,
}

/// A connection of which some flows have arrived.
struct Partial {
    flows: Vec<Option<Socket>>,
    peer: SocketAddr,
    since: Instant,
}

impl Listener {
    pub(crate) fn open(
        runtime: Arc<Runtime>,
        context: Context,
        mode: ListenMode,
    ) -> Result<Self, Error> {
        let others: Vec<IpAddr> =
            context.other_ports().flat_map(|device| device.addresses()).collect();
        let local = match &mode {
            ListenMode::Private => context.device.listening(&others),
            ListenMode::Public(address, ..) => *address,
        };
        let what = match &mode {
            ListenMode::Private => {
                format!("cannot listen on {} ({})", context.device.name(), local.ip())
            }
            ListenMode::Public(..) => format!("cannot listen at {local}"),
        };
        let fail = |error| Error::system(&what, &error);
        let kind = Type::STREAM.nonblocking().cloexec();
        let socket = Socket::new(Domain::for_address(local), kind, None).map_err(fail)?;
        let (nonce, notified) = match mode {
            ListenMode::Private => {
                if local.is_ipv6() && local.ip().is_unspecified() {
                    // Some addresses may be of the other family.
                    socket.set_only_v6(false).map_err(fail)?;
                }
                bind(&socket, local, context.settings.ports.as_ref()).map_err(fail)?;
                (Nonce(sys::random().map_err(fail)?), None)
            }
            ListenMode::Public(_, nonce, notified) => {
                // Connections of the process that listened here before may not be over yet.
                socket.set_reuse_address(true).map_err(fail)?;
                socket.bind(&local.into()).map_err(fail)?;
                (nonce, Some(notified))
            }
        };
        socket.listen(BACKLOG).map_err(fail)?;
        let addr = socket.local_addr().map_err(fail)?;
        let addr = addr.as_socket().ok_or_else(|| Error::argument("not an IP socket"))?;
        let workers = Arc::clone(runtime.workers());
        let acceptor = Arc::new(Acceptor {
            socket,
            registration: workers.registration(),
            nonce,
            notified,
            context,
            everywhere: local.ip().is_unspecified(),
            workers,
            is_full: AtomicBool::new(false),
            state: Mutex::default(),
        });
        let source: Arc<dyn Source> = Arc::new(AcceptorSource(Arc::clone(&acceptor)));
        acceptor.registration.watch(&acceptor.socket, source).map_err(fail)?;
        let handle =
            Handle { addresses: acceptor.context.device.addresses(), port: addr.port(), nonce };
        let guard = AcceptorGuard::of(&acceptor);
        Ok(Self { acceptor, guard, handle, address: addr, deadline: OnceLock::new(), runtime })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What the peer needs to connect.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// The next connection; `None` while there is none. Never blocks.
    ///
    /// # Errors
    /// [`ErrorKind::Remote`] when no peer has come within the accept timeout of the first poll.
    pub fn poll_accept(&self) -> Result<Option<RecvConnection>, Error> {
        let mut state = lock(&self.acceptor.state);
        if let Some(receiver) = state.ready.pop_front() {
            drop(state);
            return Ok(Some(self.connection(receiver)));
        }
        if let Some(error) = &state.failure {
            return Err(error.clone());
        }
        if self.acceptor.notified.is_some() {
            return Ok(None);
        }
        let context = &self.acceptor.context;
        let timeout = context.settings.accept_timeout;
        let deadline = self.deadline.get_or_init(|| Instant::now() + timeout);
        if Instant::now() < *deadline {
            return Ok(None);
        }
        Err(Error::new(
            ErrorKind::Remote,
            format!(
                "no peer connected to {:?}, port {}, within {} s ({} incomplete connections, {} unauthenticated connections dropped) {}",
                self.handle.addresses,
                self.handle.port,
                timeout.as_secs(),
                state.partial.len(),
                state.dropped,
                context.label,
            ),
        ))
    }
}

impl Listener {
    fn connection(&self, receiver: Arc<dyn Inbound>) -> RecvConnection {
        RecvConnection::new(receiver, self.guard.clone(), Arc::clone(&self.runtime))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let (ready, agreeing) = {
            let mut state = lock(&self.acceptor.state);
            state.closed = true;
            state.partial.clear();
            (std::mem::take(&mut state.ready), std::mem::take(&mut state.agreeing))
        };
        agreeing.values().for_each(|receiver| receiver.close());
        for receiver in ready {
            drop(self.connection(receiver));
        }
    }
}

/// Keeps the socket of a listener open: a connection's peer opens new flows in place of lost ones
/// there, long after the listener is closed.
pub(crate) struct AcceptorGuard(Arc<Acceptor>);

impl AcceptorGuard {
    fn of(acceptor: &Arc<Acceptor>) -> Self {
        lock(&acceptor.state).guards += 1;
        Self(Arc::clone(acceptor))
    }
}

impl Clone for AcceptorGuard {
    fn clone(&self) -> Self {
        Self::of(&self.0)
    }
}

impl Drop for AcceptorGuard {
    fn drop(&mut self) {
        let acceptor = &self.0;
        let state = {
            let mut state = lock(&acceptor.state);
            state.guards -= 1;
            if state.guards > 0 {
                return;
            }
            let closed = State { closed: true, ..State::default() };
            std::mem::replace(&mut *state, closed)
        };
        acceptor.registration.end(&acceptor.socket);
        // The worker may hold a reference a little longer; nobody may be let in meanwhile.
        let _ = acceptor.socket.shutdown(Shutdown::Both);
        for connection in state.unauthenticated {
            connection.take_socket();
        }
        state.agreeing.values().for_each(|receiver| receiver.close());
    }
}

impl Acceptor {
    /// Takes every TCP connection that waits at the door, as long as there is room.
    fn accept_all(self: &Arc<Self>) {
        self.is_full.store(false, Ordering::SeqCst);
        loop {
            if !self.has_room() {
                // The next who is heard or had its time makes room.
                self.is_full.store(true, Ordering::SeqCst);
                return;
            }
            match sys::uninterrupted(|| self.socket.accept()) {
                Ok((socket, peer)) => {
                    if let Some(peer) = peer.as_socket() {
                        self.receive(socket, peer);
                    }
                }
                Err(error) if would_block(&error) => return,
                Err(error) if is_of_connection(&error) => {}
                Err(error) if self.notified.is_some() => {
                    // The next tick tries again: others, who are connected, need this process.
                    self.info(&format!("cannot accept: {error}"));
                    return;
                }
                Err(error) => {
                    // Out of descriptors, say. The peer's patience is limited too.
                    self.fail(ErrorKind::System, &format!("cannot accept: {error}"));
                    return;
                }
            }
        }
    }

    /// Whether one more stranger can be heard: there are few, or the oldest had its time and can be dropped.
    fn has_room(&self) -> bool {
        let state = lock(&self.state);
        state.unauthenticated.len() < MAX_UNAUTHENTICATED
            || state
                .unauthenticated
                .front()
                .is_some_and(|oldest| oldest.since.elapsed() >= MIN_HANDSHAKE_TIME)
    }

    fn receive(self: &Arc<Self>, socket: Socket, peer: SocketAddr) {
        let prepared =
            socket.set_nonblocking(true).and_then(|()| configure_socket(&socket, &self.context));
        if let Err(error) = prepared {
            self.info(&format!("connection from {peer} dropped: {error}"));
            return;
        }
        let connection = Arc::new(Unauthenticated {
            listener: Arc::downgrade(self),
            peer,
            registration: self.workers.registration(),
            since: Instant::now(),
            handshake: Mutex::new(HandshakeState {
                socket: None,
                have: 0,
                hello: [0; HELLO_BYTES],
                challenge: None,
            }),
        });
        let evicted = {
            let mut state = lock(&self.state);
            if state.guards == 0 {
                return;
            }
            state.unauthenticated.push_back(Arc::clone(&connection));
            if state.unauthenticated.len() > MAX_UNAUTHENTICATED {
                state.unauthenticated.pop_front()
            } else {
                None
            }
        };
        if let Some(evicted) = evicted {
            evicted.drop_connection("too many connections that say nothing");
        }
        // The lock keeps the worker from the socket until it is in place.
        let mut handshake = lock(&connection.handshake);
        let source: Arc<dyn Source> = Arc::<Unauthenticated>::clone(&connection);
        if let Err(error) = connection.registration.watch(&socket, source) {
            drop(handshake);
            connection.drop_connection(&error.to_string());
            return;
        }
        handshake.socket = Some(socket);
    }

    /// Answers a peer's hello and, unless it is refused, takes its flow in. Complete connections
    /// become ready.
    fn admit(
        self: &Arc<Self>,
        hello: &Hello,
        socket: Socket,
        peer: SocketAddr,
    ) -> Result<(), Refusal> {
        if hello.rdma {
            return self.agree_queue_pairs(hello, socket, peer);
        }
        if self.context.settings.transport_mode == TransportMode::Rdma {
            send_welcome(&socket, hello.connection, Err(Refusal::RdmaOnly));
            return Err(Refusal::RdmaOnly);
        }
        let mut state = lock(&self.state);
        if let Some(receiver) = state.complete.get(&hello.connection) {
            let receiver = receiver.upgrade().filter(|receiver| receiver.is_open());
            drop(state);
            return join(receiver.as_ref(), hello, socket);
        }
        let place = state.place_for(hello, peer);
        send_welcome(
            &socket,
            hello.connection,
            place.as_ref().map(|_| ()).map_err(|refusal| *refusal),
        );
        *place? = Some(socket);
        let Some(sockets) = state.take_if_complete(&hello.connection) else { return Ok(()) };
        let context = self.context_of(sockets.first());
        match TcpReceiver::open(context, &self.workers, peer, sockets) {
            Ok(receiver) => {
                state.complete.retain(|_, receiver| receiver.strong_count() > 0);
                state.complete.insert(hello.connection, Arc::downgrade(&receiver));
                state.ready.push_back(receiver);
                if let Some(notified) = &self.notified {
                    notified.notify();
                }
            }
            Err(error) => self.context.log.warn(&format!(
                "evenkeel: connection from {peer} dropped: cannot watch it: {error}"
            )),
        }
        Ok(())
    }

    /// What a connection is opened with whose first flow this is.
    fn context_of(&self, flow: Option<&Socket>) -> Context {
        let mut context = self.context.clone();
        let local = flow.and_then(|flow| flow.local_addr().ok()?.as_socket());
        let Some(local) = local.map(|local| local.ip().to_canonical()) else { return context };
        let is_there = |device: &&Device| device.addresses().contains(&local);
        // Several devices may have one address.
        if !is_there(&&context.device)
            && let Some(device) = context.devices.iter().find(is_there)
        {
            context.device = device.clone();
        }
        context
    }

    /// Answers a peer whose messages are to be carried by RDMA and, unless it is refused, agrees with it on queue pairs.
    /// Then the connection becomes ready.
    fn agree_queue_pairs(
        self: &Arc<Self>,
        hello: &Hello,
        socket: Socket,
        peer: SocketAddr,
    ) -> Result<(), Refusal> {
        if hello.flow > 0 {
            return self.failover(hello, socket);
        }
        let id = hello.connection;
        let by_rdma = self.context.settings.transport_mode != TransportMode::Tcp;
        let context = self.context_of(Some(&socket));
        let device = context.device.clone();
        let adapter = device.rdma().filter(|_| by_rdma);
        let mut state = lock(&self.state);
        let waiting = state.partial.len() + state.ready.len() + state.agreeing.len();
        let outcome = match adapter {
            None => Err(Refusal::NoRdma),
            Some(_) if state.closed => Err(Refusal::Gone),
            Some(_) if waiting >= MAX_UNACCEPTED => Err(Refusal::Busy),
            Some(_) if state.agreeing.contains_key(&id) => Err(Refusal::Inconsistent),
            Some(adapter) => Ok(adapter),
        };
        send_welcome(&socket, id, outcome.map(|_| ()));
        let adapter = outcome?;
        let listener = Arc::downgrade(self);
        let opened = Box::new(move |opened: Result<(), Error>| {
            if let Some(listener) = listener.upgrade() {
                listener.queue_pairs_agreed(id, peer, opened);
            }
        });
        let workers = &self.workers;
        let queue_pairs = usize::from(hello.flows);
        // The lock keeps the outcome back until the connection is noted.
        let others = context.other_ports().filter(|_| self.everywhere);
        let elsewhere = others.flat_map(|device| device.addresses()).collect();
        let control = (socket, peer);
        match rdma::Receiver::open(
            context,
            adapter,
            workers,
            control,
            queue_pairs,
            elsewhere,
            opened,
        ) {
            Ok(receiver) => drop(state.agreeing.insert(id, receiver)),
            Err(error) => {
                self.context
                    .log
                    .warn(&format!("evenkeel: connection from {peer} dropped: {error}"));
            }
        }
        Ok(())
    }

    /// Lets a lifeline take the place of a connection's, if the peer chooses it.
    fn failover(&self, hello: &Hello, socket: Socket) -> Result<(), Refusal> {
        let mut state = lock(&self.state);
        let receiver = state.agreed.get(&hello.connection).and_then(Weak::upgrade);
        let receiver = receiver.filter(|receiver| receiver.is_open());
        let device = self.context_of(Some(&socket)).device;
        state.candidates.retain(|candidate| candidate.strong_count() > 0);
        let outcome = match &receiver {
            None => Err(Refusal::Gone),
            Some(_) if device.rdma().is_none() => Err(Refusal::NoRdma),
            Some(_) if device.rdma().is_some_and(|port| port.is_down()) => Err(Refusal::Busy),
            Some(_) if state.candidates.len() >= MAX_UNAUTHENTICATED => Err(Refusal::Busy),
            Some(_) => Ok(()),
        };
        send_welcome(&socket, hello.connection, outcome);
        outcome?;
        if let Some(receiver) = receiver {
            let deadline = Instant::now() + self.context.settings.handshake_timeout;
            let control = (hello.flow, socket);
            let workers = &self.workers;
            let candidate =
                rdma::FailoverCandidate::watch(workers, &receiver, device, control, deadline);
            state.candidates.push(Arc::downgrade(&candidate));
        }
        Ok(())
    }

    /// The peers have agreed on queue pairs, or cannot.
    fn queue_pairs_agreed(&self, id: ConnectionId, peer: SocketAddr, opened: Result<(), Error>) {
        let mut state = lock(&self.state);
        let Some(receiver) = state.agreeing.remove(&id) else { return };
        match opened {
            Ok(()) => {
                state.agreed.retain(|_, receiver| receiver.strong_count() > 0);
                state.agreed.insert(id, Arc::downgrade(&receiver));
                state.ready.push_back(receiver);
                if let Some(notified) = &self.notified {
                    notified.notify();
                }
            }
            Err(error) => {
                drop(state);
                receiver.close();
                self.context
                    .log
                    .warn(&format!("evenkeel: connection from {peer} dropped: {error}"));
            }
        }
    }

    fn tick(self: &Arc<Self>, now: Instant) {
        self.accept_all();
        let timeout = self.context.settings.connect_timeout;
        let mut late = Vec::new();
        lock(&self.state).partial.retain(|_, partial| {
            let keep = now.saturating_duration_since(partial.since) < timeout;
            if !keep {
                let arrived = partial.flows.iter().flatten().count();
                late.push((partial.peer, arrived, partial.flows.len()));
            }
            keep
        });
        for (peer, arrived, flows) in late {
            self.context.log.warn(&format!(
                "evenkeel: connection from {peer} dropped: {arrived} of {flows} flows arrived within {} s",
                timeout.as_secs()
            ));
        }
    }

    /// Ends the listener with an error, for the next poll to report.
    fn fail(&self, kind: ErrorKind, what: &str) {
        let Context { device, label, .. } = &self.context;
        let line = format!("listener on {} failed: {what} {label}", device.name());
        lock(&self.state).failure.get_or_insert_with(|| Error::new(kind, line));
    }

    fn info(&self, line: &str) {
        let Context { log, device, label, .. } = &self.context;
        log.info(&format!("evenkeel: listener on {}: {line} {label}", device.name()));
    }
}

impl State {
    /// Where the socket of a peer's flow goes.
    fn place_for(
        &mut self,
        hello: &Hello,
        peer: SocketAddr,
    ) -> Result<&mut Option<Socket>, Refusal> {
        let known = self.partial.contains_key(&hello.connection);
        if self.closed {
            return Err(Refusal::Gone);
        }
        if !known && self.partial.len() + self.ready.len() >= MAX_UNACCEPTED {
            return Err(Refusal::Busy);
        }
        let partial = self.partial.entry(hello.connection).or_insert_with(|| Partial {
            flows: (0..hello.flows).map(|_| None).collect(),
            peer,
            since: Instant::now(),
        });
        let same_count = partial.flows.len() == usize::from(hello.flows);
        match partial.flows.get_mut(hello.flow as usize) {
            Some(place) if same_count && place.is_none() => Ok(place),
            _ => Err(Refusal::Inconsistent),
        }
    }

    /// The sockets of a connection of which all flows have arrived.
    fn take_if_complete(&mut self, connection: &ConnectionId) -> Option<Vec<Socket>> {
        if self.partial.get(connection)?.flows.iter().any(Option::is_none) {
            return None;
        }
        Some(self.partial.remove(connection)?.flows.into_iter().flatten().collect())
    }
}

/// Binds a listening socket to an address, at a port of the range if there is one.
fn bind(socket: &Socket, local: SocketAddr, ports: Option<&RangeInclusive<u16>>) -> io::Result<()> {
    let Some(ports) = ports else { return socket.bind(&local.into()) };
    for port in ports.clone() {
        match socket.bind(&SocketAddr::new(local.ip(), port).into()) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            bound => return bound,
        }
    }
    let (first, last) = (ports.start(), ports.end());
    let what =
        format!("all ports of EVENKEEL_PORTS={first}-{last} are in use; each connection needs one");
    Err(io::Error::new(io::ErrorKind::AddrInUse, what))
}

/// Whether an error of `accept` is one of the connection that was to be accepted, not of the
/// listener.
fn is_of_connection(error: &io::Error) -> bool {
    const OF_CONNECTION: [i32; 9] = [
        libc::ECONNABORTED,
        libc::ENETDOWN,
        libc::EPROTO,
        libc::ENOPROTOOPT,
        libc::EHOSTDOWN,
        libc::ENONET,
        libc::EHOSTUNREACH,
        libc::EOPNOTSUPP,
        libc::ENETUNREACH,
    ];
    error.raw_os_error().is_some_and(|errno| OF_CONNECTION.contains(&errno))
}

/// Lets a flow join a connection that is complete.
fn join(receiver: Option<&Arc<TcpReceiver>>, hello: &Hello, socket: Socket) -> Result<(), Refusal> {
    let outcome = match receiver {
        None => Err(Refusal::Gone),
        Some(_) if hello.flow < u32::from(hello.flows) => Err(Refusal::Inconsistent),
        Some(_) => Ok(()),
    };
    // The welcome goes before anything that the connection has to say on the flow.
    send_welcome(&socket, hello.connection, outcome);
    outcome?;
    receiver
        .is_some_and(|receiver| receiver.add_flow(hello.flow, socket).is_ok())
        .then_some(())
        .ok_or(Refusal::Gone)
}

/// Sends the answer to a hello. A new socket has room for it; if the peer is gone, its connection
/// will say so.
fn send_welcome(socket: &Socket, connection: ConnectionId, outcome: Result<(), Refusal>) {
    let welcome = Welcome { connection, verdict: outcome };
    let _ = socket.send_with_flags(&welcome.encode(), libc::MSG_NOSIGNAL);
}

/// The listening socket, as its worker sees it.
struct AcceptorSource(Arc<Acceptor>);

impl Source for AcceptorSource {
    fn ready(&self, _readiness: Readiness) {
        self.0.accept_all();
    }

    fn tick(&self, now: Instant) {
        self.0.tick(now);
    }

    fn abandoned(&self, why: &str) {
        self.0.fail(ErrorKind::Internal, why);
    }
}

/// A TCP connection that has not shown yet that it is a flow of a peer.
struct Unauthenticated {
    listener: Weak<Acceptor>,
    peer: SocketAddr,
    registration: Registration,
    since: Instant,
    handshake: Mutex<HandshakeState>,
}

struct HandshakeState {
    /// `None` once the stranger is a peer or turned away.
    socket: Option<Socket>,
    /// Bytes of the hello.
    have: usize,
    hello: [u8; HELLO_BYTES],
    /// With a job key, once the hello is there.
    challenge: Option<Challenge>,
}

struct Challenge {
    sent: [u8; CHALLENGE_BYTES],
    /// Bytes of the proof.
    have: usize,
    proof: [u8; PROOF_BYTES],
}

/// Why a stranger is not a peer.
struct Rejection {
    why: String,
    /// What to tell one that speaks the protocol.
    refusal: Option<Refusal>,
}

impl From<String> for Rejection {
    fn from(why: String) -> Self {
        Self { why, refusal: None }
    }
}

impl From<io::Error> for Rejection {
    fn from(error: io::Error) -> Self {
        error.to_string().into()
    }
}

impl From<HandshakeError> for Rejection {
    fn from(error: HandshakeError) -> Self {
        let refusal = match error {
            HandshakeError::Version(_) => Some(Refusal::Version),
            HandshakeError::Authentication { .. } => Some(Refusal::Authentication),
            HandshakeError::Checksum { .. } => Some(Refusal::Checksum),
            _ => None,
        };
        Self { why: error.to_string(), refusal }
    }
}

impl HandshakeState {
    /// Reads what is there, and answers a hello with a challenge if there is a job key; the hello, once all is there that
    /// shows a peer.
    fn advance(&mut self, listener: &Acceptor) -> Result<Option<Hello>, Rejection> {
        let Self { socket: Some(socket), have, hello, challenge } = self else { return Ok(None) };
        while *have < HELLO_BYTES {
            let Some(received) = receive(socket, &mut hello[*have..], *have)? else {
                return Ok(None);
            };
            *have += received;
            if !Hello::may_begin_with(&hello[..*have]) {
                return Err(HandshakeError::NotEvenkeel("peer").into());
            }
        }
        let settings = &listener.context.settings;
        let key = settings.job_key.as_ref();
        let decoded = Hello::decode(hello, listener.nonce, key.is_some(), settings.checksum)?;
        let Some(key) = key else { return Ok(Some(decoded)) };
        let challenge = match challenge {
            Some(challenge) => challenge,
            None => {
                let sent = key.challenge(hello, sys::random()?);
                // A new socket has room for it; if not, its peer will give up.
                socket.send_with_flags(&sent, libc::MSG_NOSIGNAL)?;
                challenge.insert(Challenge { sent, have: 0, proof: [0; PROOF_BYTES] })
            }
        };
        while challenge.have < PROOF_BYTES {
            let Some(received) = receive(
                socket,
                &mut challenge.proof[challenge.have..],
                HELLO_BYTES + challenge.have,
            )?
            else {
                return Ok(None);
            };
            challenge.have += received;
        }
        if key.accepts(hello, &challenge.sent, &challenge.proof) {
            return Ok(Some(decoded));
        }
        let refusal = Some(Refusal::Authentication);
        Err(Rejection { why: "it does not have the job key".to_owned(), refusal })
    }
}

/// Reads what is there, at most `into`; none if there is nothing now. `before` bytes came earlier.
fn receive(socket: &Socket, into: &mut [u8], before: usize) -> Result<Option<usize>, Rejection> {
    match sys::uninterrupted(|| (&*socket).read(into)) {
        Ok(0) => Err(format!("it closed after {before} bytes").into()),
        Ok(received) => Ok(Some(received)),
        Err(error) if would_block(&error) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

impl Unauthenticated {
    fn take_socket(&self) -> Option<Socket> {
        let socket = lock(&self.handshake).socket.take()?;
        self.registration.end(&socket);
        Some(socket)
    }

    fn forget(&self, listener: &Acceptor, dropped: bool) {
        let mut state = lock(&listener.state);
        state.unauthenticated.retain(|other| !std::ptr::eq(&raw const **other, self));
        state.dropped += u64::from(dropped);
    }

    fn drop_connection(&self, why: &str) {
        self.take_socket();
        if let Some(listener) = self.listener.upgrade() {
            self.forget(&listener, true);
            listener.info(&format!("connection from {} dropped: {why}", self.peer));
        }
    }

    /// Goes on with the handshake as far as the bytes that are there allow; the text says why the stranger is not a peer.
    fn advance(&self) -> Result<(), String> {
        let Some(listener) = self.listener.upgrade() else { return Ok(()) };
        let advanced = lock(&self.handshake).advance(&listener);
        match advanced {
            Ok(None) => Ok(()),
            Ok(Some(hello)) => {
                let Some(socket) = self.take_socket() else { return Ok(()) };
                self.forget(&listener, false);
                listener
                    .admit(&hello, socket, self.peer)
                    .map_err(|refusal| format!("refused: {refusal}"))
            }
            Err(Rejection { why, refusal }) => {
                if let (Some(refusal), Some(socket)) = (refusal, self.take_socket()) {
                    send_welcome(&socket, ConnectionId([0; 16]), Err(refusal));
                }
                Err(why)
            }
        }
    }
}

impl Source for Unauthenticated {
    fn ready(&self, readiness: Readiness) {
        if !readiness.readable && !readiness.ended {
            return;
        }
        if let Err(why) = self.advance() {
            self.drop_connection(&why);
        }
        if let Some(listener) = self.listener.upgrade()
            && listener.is_full.load(Ordering::SeqCst)
        {
            listener.accept_all();
        }
    }

    fn tick(&self, now: Instant) {
        let limit = self
            .listener
            .upgrade()
            .map_or(Duration::ZERO, |listener| listener.context.settings.handshake_timeout);
        if now.saturating_duration_since(self.since) < limit {
            return;
        }
        let have = lock(&self.handshake).have;
        self.drop_connection(&format!("no hello within {} s ({have} bytes)", limit.as_secs()));
    }

    fn abandoned(&self, why: &str) {
        self.drop_connection(why);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpStream;

    use evenkeel_protocol::WELCOME_BYTES;

    use super::*;
    use crate::NullNotify;
    use crate::test_support::transport;

    /// More peers than strangers are held come before the first is heard: all of them get an answer.
    #[test]
    fn peers_that_come_all_at_once_are_all_heard() {
        const PEERS: u8 = 200;
        assert!(usize::from(PEERS) > MAX_UNAUTHENTICATED);
        let transport = transport();
        let (any, nonce) = ("127.0.0.1:0".parse().unwrap(), Nonce([7; 16]));
        let listener = transport.listen_at(any, nonce, "", Arc::new(NullNotify)).unwrap();
        let mut peers = vec![];
        {
            // Nobody is heard meanwhile, nor taken in but the first.
            let _state = lock(&listener.acceptor.state);
            for peer in 0..PEERS {
                let mut stream = TcpStream::connect(listener.address()).unwrap();
                let hello = Hello {
                    nonce,
                    connection: ConnectionId([peer; 16]),
                    flow: 0,
                    flows: 1,
                    checksum: false,
                    rdma: false,
                    random: None,
                };
                stream.write_all(&hello.encode()).unwrap();
                stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
                peers.push(stream);
            }
        }
        for (peer, stream) in peers.iter_mut().enumerate() {
            // Welcome or busy.
            let mut answer = [0; WELCOME_BYTES];
            stream.read_exact(&mut answer).unwrap_or_else(|error| panic!("peer {peer}: {error}"));
        }
    }
}
