//! Accepts TCP connections, and makes connections of those that prove to be peers.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use evenkeel_protocol::{ConnectionId, Hello, Nonce, Refusal};
use socket2::Socket;

use crate::connection::base::{configure_socket, would_block};
use crate::connection::recv::Inbound;
use crate::context::Context;
use crate::device::Device;
use crate::error::{Error, ErrorKind};
use crate::handshake::unauthenticated::{Admission, Unauthenticated, send_welcome};
use crate::rdma;
use crate::runtime::descriptors;
use crate::runtime::notify::Notify;
use crate::runtime::reactor::{Readiness, Registration, Source, Workers};
use crate::settings::{Settings, TransportMode};
use crate::sync::lock;
use crate::sys;
use crate::tcp::receiver::TcpReceiver;
use crate::weak::WeakMap;

/// Maximum number of unauthenticated TCP connections. When more arrive, the oldest is dropped after its minimum time. Until
/// then the kernel holds the new ones.
pub(super) const MAX_UNAUTHENTICATED: usize = 128;

/// How long a peer may take for the handshake when many arrive at once. After that its connection is dropped if others wait.
const MIN_HANDSHAKE_TIME: Duration = Duration::from_millis(200);

/// Maximum number of connections that are incomplete or not accepted yet.
const MAX_UNACCEPTED: usize = 64;

/// TCP connections that the kernel holds until a worker accepts them.
pub(super) const BACKLOG: i32 = 512;

/// The listening socket, and the connections that have arrived there.
pub(super) struct Acceptor {
    pub(super) socket: Socket,
    pub(super) registration: Registration,
    pub(super) nonce: Nonce,
    /// Notified of new connections. A listener with one never times out.
    pub(super) notified: Option<Arc<dyn Notify>>,
    pub(super) context: Context,
    /// Whether it listens at all addresses of this host.
    pub(super) everywhere: bool,
    pub(super) workers: Arc<Workers>,
    /// Whether connections were left to the kernel.
    pub(super) is_full: AtomicBool,
    pub(super) state: Mutex<AcceptorState>,
}

#[derive(Default)]
pub(super) struct AcceptorState {
    /// No new connection is accepted.
    pub(super) closed: bool,
    /// Oldest first.
    pub(super) unauthenticated: VecDeque<Arc<Unauthenticated>>,
    pub(super) partial: HashMap<ConnectionId, Partial>,
    pub(super) ready: VecDeque<Arc<dyn Inbound>>,
    /// RDMA connections whose queue pairs are not agreed on yet.
    pub(super) agreeing: HashMap<ConnectionId, Arc<rdma::Receiver>>,
    /// TCP connections that flows may join, ready or accepted.
    pub(super) complete: WeakMap<ConnectionId, TcpReceiver>,
    /// RDMA connections whose control connections may be replaced.
    pub(super) agreed: WeakMap<ConnectionId, rdma::Receiver>,
    /// Replacements that the peer has not chosen yet.
    pub(super) candidates: Vec<Weak<rdma::FailoverCandidate>>,
    /// Number of guards that keep the socket open.
    pub(super) guards: usize,
    /// Why the listener has failed.
    pub(super) failure: Option<Error>,
    /// Number of unauthenticated connections dropped so far.
    pub(super) dropped: u64,
}

/// A connection of which some flows have arrived.
pub(super) struct Partial {
    pub(super) flows: Vec<Option<Socket>>,
    pub(super) peer: SocketAddr,
    pub(super) since: Instant,
}

/// Keeps the socket of a listener open. Peers of accepted connections replace lost flows there, also after the listener is
/// closed.
pub(crate) struct AcceptorGuard(Arc<Acceptor>);

impl AcceptorGuard {
    pub(super) fn of(acceptor: &Arc<Acceptor>) -> Self {
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
            let closed = AcceptorState { closed: true, ..AcceptorState::default() };
            std::mem::replace(&mut *state, closed)
        };
        acceptor.registration.end(&acceptor.socket);
        // The worker may hold a reference a little longer. No connection may be accepted meanwhile.
        let _ = acceptor.socket.shutdown(Shutdown::Both);
        for connection in state.unauthenticated {
            connection.take_socket();
        }
        state.agreeing.values().for_each(|receiver| receiver.close());
    }
}

impl Acceptor {
    /// Accepts all waiting TCP connections, as long as there is room.
    pub(super) fn accept_all(self: &Arc<Self>) {
        self.is_full.store(false, Ordering::SeqCst);
        loop {
            if !self.has_room() {
                // The next one that is admitted or times out makes room.
                self.is_full.store(true, Ordering::SeqCst);
                self.registration.request_tick();
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
                Err(error) if descriptors::is_shortage(&error) => {
                    // The next tick tries again, and the kernel holds the connection until then.
                    descriptors::report_shortage(&error, &*self.context.log);
                    self.registration.request_tick();
                    return;
                }
                Err(error) if self.notified.is_some() => {
                    // The next tick tries again: connections that exist need this process.
                    self.info(&format!("cannot accept: {error}"));
                    self.registration.request_tick();
                    return;
                }
                Err(error) => {
                    self.fail(ErrorKind::System, &format!("cannot accept: {error}"));
                    return;
                }
            }
        }
    }

    /// Whether one more connection can be accepted: there are few, or the oldest has had its minimum time.
    fn has_room(&self) -> bool {
        let state = lock(&self.state);
        state.unauthenticated.len() < MAX_UNAUTHENTICATED
            || state
                .unauthenticated
                .front()
                .is_some_and(|oldest| oldest.age() >= MIN_HANDSHAKE_TIME)
    }

    fn receive(self: &Arc<Self>, socket: Socket, peer: SocketAddr) {
        let prepared =
            socket.set_nonblocking(true).and_then(|()| configure_socket(&socket, &self.context));
        if let Err(error) = prepared {
            self.info(&format!("connection from {peer} dropped: {error}"));
            return;
        }
        let admission: Weak<Self> = Arc::downgrade(self);
        let connection = Unauthenticated::new(admission, peer, self.workers.registration());
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
            evicted.drop_connection("too many unauthenticated connections");
        }
        connection.start(socket);
    }

    /// Answers a peer's hello and, unless it is refused, adds its flow. A complete connection becomes ready.
    fn admit_flow(
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
        if state.complete.is_known(&hello.connection) {
            let receiver = state.complete.live(&hello.connection);
            let receiver = receiver.filter(|receiver| receiver.is_open());
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
        let Some(sockets) = state.take_if_complete(&hello.connection) else {
            self.registration.request_tick();
            return Ok(());
        };
        let context = self.context_of(sockets.first());
        match TcpReceiver::open(context, &self.workers, peer, sockets) {
            Ok(receiver) => {
                state.complete.insert(hello.connection, &receiver);
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

    /// The context of a connection whose first flow this is.
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

    /// Answers the hello of an RDMA connection and, unless it is refused, agrees on queue pairs. Then the connection becomes
    /// ready.
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
        // The lock delays the outcome until the connection is in the table.
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

    /// Accepts a candidate for the control connection of an RDMA connection. The peer may choose it for failover.
    fn failover(&self, hello: &Hello, socket: Socket) -> Result<(), Refusal> {
        let mut state = lock(&self.state);
        let receiver = state.agreed.live(&hello.connection);
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

    /// The peers have agreed on queue pairs, or have failed to.
    fn queue_pairs_agreed(&self, id: ConnectionId, peer: SocketAddr, opened: Result<(), Error>) {
        let mut state = lock(&self.state);
        let Some(receiver) = state.agreeing.remove(&id) else { return };
        match opened {
            Ok(()) => {
                state.agreed.insert(id, &receiver);
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

    /// Accepts what was left to the kernel, and drops incomplete connections that are late. Returns whether some are left.
    fn tick(self: &Arc<Self>, now: Instant) -> bool {
        self.accept_all();
        let timeout = self.context.settings.connect_timeout;
        let mut late = Vec::new();
        let is_left = {
            let partial = &mut lock(&self.state).partial;
            partial.retain(|_, partial| {
                let keep = now.saturating_duration_since(partial.since) < timeout;
                if !keep {
                    let arrived = partial.flows.iter().flatten().count();
                    late.push((partial.peer, arrived, partial.flows.len()));
                }
                keep
            });
            !partial.is_empty()
        };
        for (peer, arrived, flows) in late {
            self.context.log.warn(&format!(
                "evenkeel: connection from {peer} dropped: {arrived} of {flows} flows arrived within {} s",
                timeout.as_secs()
            ));
        }
        is_left
    }

    /// Fails the listener. The next poll reports the error.
    pub(super) fn fail(&self, kind: ErrorKind, what: &str) {
        let Context { device, label, .. } = &self.context;
        let line = format!("listener on {} failed: {what} {label}", device.name());
        lock(&self.state).failure.get_or_insert_with(|| Error::new(kind, line));
    }

    fn info(&self, line: &str) {
        let Context { log, device, label, .. } = &self.context;
        log.info(&format!("evenkeel: listener on {}: {line} {label}", device.name()));
    }
}

impl Admission for Acceptor {
    fn nonce(&self) -> Nonce {
        self.nonce
    }

    fn settings(&self) -> &Settings {
        &self.context.settings
    }

    fn admit(
        self: Arc<Self>,
        hello: &Hello,
        socket: Socket,
        peer: SocketAddr,
    ) -> Result<(), Refusal> {
        self.admit_flow(hello, socket, peer)
    }

    fn remove(&self, connection: &Unauthenticated, dropped: bool) {
        let mut state = lock(&self.state);
        state.unauthenticated.retain(|other| !std::ptr::eq(&raw const **other, connection));
        state.dropped += u64::from(dropped);
    }

    fn accept_waiting(self: Arc<Self>) {
        if self.is_full.load(Ordering::SeqCst) {
            self.accept_all();
        }
    }

    fn info(&self, line: &str) {
        Self::info(self, line);
    }
}

impl AcceptorState {
    /// The slot for the socket of a peer's flow.
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
            // A peer that dials a flow again has lost the one before.
            Some(place) if same_count => Ok(place),
            _ => Err(Refusal::Inconsistent),
        }
    }

    /// The sockets of a connection, if all its flows have arrived.
    fn take_if_complete(&mut self, connection: &ConnectionId) -> Option<Vec<Socket>> {
        if self.partial.get(connection)?.flows.iter().any(Option::is_none) {
            return None;
        }
        Some(self.partial.remove(connection)?.flows.into_iter().flatten().collect())
    }
}

/// Binds a listening socket to an address, to a free port of the range if there is one.
pub(super) fn bind(
    socket: &Socket,
    local: SocketAddr,
    ports: Option<&RangeInclusive<u16>>,
) -> io::Result<()> {
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

/// Whether an error of `accept` belongs to the connection that was to be accepted, not to the listener.
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

/// Adds a flow to a connection that is complete, and answers its hello.
fn join(receiver: Option<&Arc<TcpReceiver>>, hello: &Hello, socket: Socket) -> Result<(), Refusal> {
    let Some(receiver) = receiver else {
        send_welcome(&socket, hello.connection, Err(Refusal::Gone));
        return Err(Refusal::Gone);
    };
    if hello.flow < u32::from(hello.flows) {
        // The dialer has not got the welcome of this flow, and dials it again. Nothing was sent on the one before.
        receiver.on_flow_dead(hello.flow);
    }
    receiver.join(hello.flow, socket, |socket, verdict| {
        send_welcome(socket, hello.connection, verdict);
    })
}

/// Registers the listening socket with a worker.
pub(super) struct AcceptorSource(pub(super) Arc<Acceptor>);

impl Source for AcceptorSource {
    fn ready(&self, _readiness: Readiness) {
        self.0.accept_all();
    }

    fn tick(&self, now: Instant) -> bool {
        self.0.tick(now)
    }

    fn abandoned(&self, why: &str) {
        self.0.fail(ErrorKind::Internal, why);
    }
}
