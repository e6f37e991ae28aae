//! A listener's part of the handshake: makes connections of the flows that have proved to be of its
//! peers.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use evenkeel_protocol::{ConnectionId, Hello, Nonce, Refusal};

use crate::connection::recv::Inbound;
use crate::context::Context;
use crate::device::Device;
use crate::error::{Error, ErrorKind};
use crate::handshake::listening_socket::ListeningSocket;
use crate::handshake::unauthenticated::{answer, send_welcome};
use crate::rdma;
use crate::runtime::notify::Notify;
use crate::runtime::reactor::{Readiness, Registration, Source, Workers};
use crate::settings::TransportMode;
use crate::stream::Stream;
use crate::sync::lock;
use crate::tcp::receiver::TcpReceiver;
use crate::weak::WeakMap;

/// Maximum number of connections that are incomplete or not accepted yet.
const MAX_UNACCEPTED: usize = 64;

/// The connections of a listener.
pub(super) struct Acceptor {
    pub(super) listening: Arc<ListeningSocket>,
    /// For timeouts.
    pub(super) clock: Registration,
    pub(super) nonce: Nonce,
    /// Notified of new connections. A listener with one never times out.
    pub(super) notified: Option<Arc<dyn Notify>>,
    pub(super) context: Context,
    /// Whether it listens at all addresses of this host.
    pub(super) everywhere: bool,
    pub(super) workers: Arc<Workers>,
    pub(super) state: Mutex<AcceptorState>,
}

#[derive(Default)]
pub(super) struct AcceptorState {
    /// No new connection is accepted.
    pub(super) closed: bool,
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
    /// Number of guards that keep it open.
    pub(super) guards: usize,
    /// Why the listener has failed.
    pub(super) failure: Option<Error>,
}

/// A connection of which some flows have arrived.
pub(super) struct Partial {
    pub(super) flows: Vec<Option<Stream>>,
    pub(super) peer: SocketAddr,
    pub(super) since: Instant,
}

/// Keeps a listener's nonce valid. Peers of accepted connections replace lost flows with it, also
/// after the listener is closed.
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
        acceptor.listening.remove(acceptor.nonce);
        acceptor.clock.end_ticks();
        state.agreeing.values().for_each(|receiver| receiver.close());
    }
}

impl Acceptor {
    /// Answers a peer's hello and, unless it is refused, adds its flow. A complete connection
    /// becomes ready. The error says why the flow is not admitted.
    pub(super) fn admit(
        self: &Arc<Self>,
        hello: &Hello,
        mut stream: Stream,
        peer: SocketAddr,
    ) -> Result<(), String> {
        if hello.rdma {
            return self.agree_queue_pairs(hello, stream, peer);
        }
        if self.context.settings.transport_mode == TransportMode::Rdma {
            return answer(&mut stream, hello.connection, Err(Refusal::RdmaOnly));
        }
        let mut state = lock(&self.state);
        if state.complete.is_known(&hello.connection) {
            let receiver = state.complete.live(&hello.connection);
            let receiver = receiver.filter(|receiver| receiver.is_open());
            drop(state);
            return join(receiver.as_ref(), hello, stream);
        }
        // A flow that has ended is not a part of the connection: its dialer knows, and dials it
        // again.
        answer(&mut stream, hello.connection, state.verdict(hello))?;
        state.add(hello, stream, peer);
        let Some(streams) = state.take_if_complete(&hello.connection) else {
            self.clock.request_tick();
            return Ok(());
        };
        let context = self.context_of(streams.first());
        match TcpReceiver::open(context, &self.workers, peer, streams) {
            Ok(receiver) => {
                Inbound::base(&*receiver).set_id(hello.connection);
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
    fn context_of(&self, flow: Option<&Stream>) -> Context {
        let mut context = self.context.clone();
        let local = flow.and_then(|flow| flow.socket.local_addr().ok()?.as_socket());
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

    /// Answers the hello of an RDMA connection and, unless it is refused, agrees on queue pairs.
    /// Then the connection becomes ready.
    fn agree_queue_pairs(
        self: &Arc<Self>,
        hello: &Hello,
        mut stream: Stream,
        peer: SocketAddr,
    ) -> Result<(), String> {
        if hello.flow > 0 {
            return self.failover(hello, stream);
        }
        let id = hello.connection;
        let by_rdma = self.context.settings.transport_mode != TransportMode::Tcp;
        let context = self.context_of(Some(&stream));
        let has_port = by_rdma && !context.device.ports().is_empty();
        let mut state = lock(&self.state);
        let waiting = state.partial.len() + state.ready.len() + state.agreeing.len();
        let outcome = match has_port {
            false => Err(Refusal::NoRdma),
            true if state.closed => Err(Refusal::Gone),
            true if waiting >= MAX_UNACCEPTED => Err(Refusal::Busy),
            true if state.agreeing.contains_key(&id) => Err(Refusal::Inconsistent),
            true => Ok(()),
        };
        answer(&mut stream, id, outcome)?;
        if outcome.is_err() {
            return Ok(());
        }
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
        let control = (stream, peer);
        match rdma::Receiver::open(context, workers, control, queue_pairs, elsewhere, opened) {
            Ok(receiver) => {
                receiver.base().set_id(id);
                drop(state.agreeing.insert(id, receiver));
            }
            Err(error) => {
                self.context
                    .log
                    .warn(&format!("evenkeel: connection from {peer} dropped: {error}"));
            }
        }
        Ok(())
    }

    /// Accepts a candidate for the control connection of an RDMA connection. The peer may choose it
    /// for failover.
    fn failover(&self, hello: &Hello, mut stream: Stream) -> Result<(), String> {
        let mut state = lock(&self.state);
        let receiver = state.agreed.live(&hello.connection);
        let receiver = receiver.filter(|receiver| receiver.is_open());
        let device = self.context_of(Some(&stream)).device;
        state.candidates.retain(|candidate| candidate.strong_count() > 0);
        let outcome = match &receiver {
            None => Err(Refusal::Gone),
            Some(_) if device.ports().is_empty() => Err(Refusal::NoRdma),
            Some(_) if device.is_down() => Err(Refusal::Busy),
            Some(_) if state.candidates.len() >= MAX_UNACCEPTED => Err(Refusal::Busy),
            Some(_) => Ok(()),
        };
        answer(&mut stream, hello.connection, outcome)?;
        if let Some(receiver) = receiver {
            let deadline = Instant::now() + self.context.settings.handshake_timeout;
            let control = (hello.flow, stream);
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

    /// Drops incomplete connections that are late. Returns whether some are left.
    fn tick(&self, now: Instant) -> bool {
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

    /// What log lines about its peers end with.
    pub(super) fn label(&self) -> String {
        let Context { device, label, .. } = &self.context;
        format!(" device={} {label}", device.name())
    }

    /// Fails the listener. The next poll reports the error.
    pub(super) fn fail(&self, kind: ErrorKind, what: &str) {
        let Context { device, label, .. } = &self.context;
        let line = format!("listener on {} failed: {what} {label}", device.name());
        lock(&self.state).failure.get_or_insert_with(|| Error::new(kind, line));
    }
}

impl AcceptorState {
    /// Whether a flow of an incomplete connection is accepted.
    fn verdict(&self, hello: &Hello) -> Result<(), Refusal> {
        let Partial { flows, .. } = match self.partial.get(&hello.connection) {
            _ if self.closed => return Err(Refusal::Gone),
            Some(partial) => partial,
            // A flow that replaces another one: the connection was complete, and is not known any
            // more.
            None if hello.flow >= hello.flows.into() => return Err(Refusal::Gone),
            None if self.partial.len() + self.ready.len() >= MAX_UNACCEPTED => {
                return Err(Refusal::Busy);
            }
            None => return Ok(()),
        };
        let is_one_of_them =
            flows.len() == usize::from(hello.flows) && hello.flow < u32::from(hello.flows);
        if is_one_of_them { Ok(()) } else { Err(Refusal::Inconsistent) }
    }

    /// Adds a flow that is accepted.
    fn add(&mut self, hello: &Hello, stream: Stream, peer: SocketAddr) {
        let partial = self.partial.entry(hello.connection).or_insert_with(|| Partial {
            flows: (0..hello.flows).map(|_| None).collect(),
            peer,
            since: Instant::now(),
        });
        if let Some(place) = partial.flows.get_mut(hello.flow as usize) {
            // A peer that dials a flow again has lost the one before.
            *place = Some(stream);
        }
    }

    /// The streams of a connection, if all its flows have arrived.
    fn take_if_complete(&mut self, connection: &ConnectionId) -> Option<Vec<Stream>> {
        if self.partial.get(connection)?.flows.iter().any(Option::is_none) {
            return None;
        }
        Some(self.partial.remove(connection)?.flows.into_iter().flatten().collect())
    }
}

/// Adds a flow to a connection that is complete, and answers its hello.
fn join(
    receiver: Option<&Arc<TcpReceiver>>,
    hello: &Hello,
    mut stream: Stream,
) -> Result<(), String> {
    let Some(receiver) = receiver else {
        return answer(&mut stream, hello.connection, Err(Refusal::Gone));
    };
    if hello.flow < u32::from(hello.flows) {
        // The dialer has not got the welcome of this flow, and dials it again. Nothing was sent on
        // the one before.
        receiver.on_flow_dead(hello.flow);
    }
    let joined = receiver.join(hello.flow, stream, |socket, half, verdict| {
        send_welcome(socket, half, hello.connection, verdict)
    });
    joined.map_err(|refusal| format!("refused: {refusal}"))
}

/// Registers a listener with a worker, for timeouts.
pub(super) struct Clock(pub(super) Arc<Acceptor>);

impl Source for Clock {
    fn ready(&self, _readiness: Readiness) {}

    fn tick(&self, now: Instant) -> bool {
        self.0.tick(now)
    }

    fn abandoned(&self, why: &str) {
        self.0.fail(ErrorKind::Internal, why);
    }
}
