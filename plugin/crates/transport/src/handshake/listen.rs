//! Listens for connections.
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use evenkeel_protocol::{Handle, Nonce};
use socket2::{Domain, Socket, Type};

use crate::connection::recv::{Inbound, RecvConnection};
use crate::context::Context;
use crate::error::{Error, ErrorKind};
use crate::handshake::acceptor::{Acceptor, AcceptorGuard, AcceptorSource, BACKLOG, bind};
use crate::runtime::notify::Notify;
use crate::runtime::reactor::{Runtime, Source};
use crate::sync::lock;
use crate::sys;

/// Listens for peers that have its handle. Dropping it closes it, with all connections that are not accepted. Accepted
/// connections continue, and their peers can still replace flows.
pub struct Listener {
    acceptor: Arc<Acceptor>,
    guard: AcceptorGuard,
    handle: Handle,
    address: SocketAddr,
    /// When accepting times out; set by the first poll.
    deadline: OnceLock<Instant>,
    runtime: Arc<Runtime>,
}

/// Where a listener listens, and for which peers.
pub(crate) enum ListenMode {
    /// On the device, for peers that have the handle. Times out.
    Private,
    /// At an address that peers know, without a timeout. The owner is notified of connections. A connection belongs to the
    /// device whose address it arrived at.
    Public(SocketAddr, Nonce, Arc<dyn Notify>),
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
        sys::keep_from_children(&socket);
        let (nonce, notified) = match mode {
            ListenMode::Private => {
                if local.is_ipv6() && local.ip().is_unspecified() {
                    // Some addresses may be IPv4.
                    socket.set_only_v6(false).map_err(fail)?;
                }
                bind(&socket, local, context.settings.ports.as_ref()).map_err(fail)?;
                (Nonce(sys::random().map_err(fail)?), None)
            }
            ListenMode::Public(_, nonce, notified) => {
                // Connections of a previous process at this address may still exist.
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

    /// The address that it listens at.
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
    /// [`ErrorKind::Remote`] when no peer has connected within the accept timeout, which the first poll starts.
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
        RecvConnection::new(receiver, Box::new(self.guard.clone()), Arc::clone(&self.runtime))
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

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::time::Duration;

    use evenkeel_protocol::{ConnectionId, Hello, WELCOME_BYTES};

    use super::*;
    use crate::NullNotify;
    use crate::handshake::acceptor::MAX_UNAUTHENTICATED;
    use crate::test_support::transport;

    /// More peers connect than can be unauthenticated at a time, before the first handshake. All of them get an answer.
    #[test]
    fn burst_of_peers_is_answered_completely() {
        const PEERS: u8 = 200;
        assert!(usize::from(PEERS) > MAX_UNAUTHENTICATED);
        let transport = transport();
        let (any, nonce) = ("127.0.0.1:0".parse().unwrap(), Nonce([7; 16]));
        let listener = transport.listen_at(any, nonce, "", Arc::new(NullNotify)).unwrap();
        let mut peers = vec![];
        {
            // The lock stops all handshakes but the first.
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
