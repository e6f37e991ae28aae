//! Listens for connections.
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use evenkeel_protocol::{Handle, Nonce};

use crate::connection::recv::{Inbound, RecvConnection};
use crate::context::Context;
use crate::error::{Error, ErrorKind};
use crate::handshake::acceptor::{Acceptor, AcceptorGuard, Clock};
use crate::handshake::listening_socket::ListeningSocket;
use crate::runtime::notify::Notify;
use crate::runtime::reactor::Runtime;
use crate::sync::lock;
use crate::sys;

/// How long a listener waits for the peer that has its handle: a rank may be busy for minutes
/// before it dials.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(600);

/// Listens for peers that have its handle. Dropping it closes it, with all connections that are not
/// accepted. Accepted connections continue, and their peers can still replace flows.
pub struct Listener {
    pub(super) acceptor: Arc<Acceptor>,
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
    /// At an address that peers know, without a timeout. The owner is notified of connections. A
    /// connection belongs to the device whose address it arrived at.
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
        let workers = Arc::clone(runtime.workers());
        let (shared, nonce, notified) = match mode {
            ListenMode::Private => (true, Nonce(sys::random().map_err(fail)?), None),
            ListenMode::Public(_, nonce, notified) => (false, nonce, Some(notified)),
        };
        let acceptor = loop {
            let listening = match shared {
                true => workers.listening_sockets.shared(local, &context, &workers),
                false => ListeningSocket::public(local, &context, &workers),
            };
            let acceptor = Arc::new(Acceptor {
                listening: listening.map_err(fail)?,
                clock: workers.registration(),
                nonce,
                notified: notified.clone(),
                context: context.clone(),
                everywhere: local.ip().is_unspecified(),
                workers: Arc::clone(&workers),
                state: Mutex::default(),
            });
            // Another thread may just have closed the last listener of the socket.
            if acceptor.listening.add(&acceptor) {
                break acceptor;
            }
        };
        acceptor.clock.watch_ticks(Arc::new(Clock(Arc::clone(&acceptor))));
        let address = acceptor.listening.address();
        let handle = Handle { addresses: context.device.addresses(), port: address.port(), nonce };
        let guard = AcceptorGuard::of(&acceptor);
        Ok(Self { acceptor, guard, handle, address, deadline: OnceLock::new(), runtime })
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
    /// [`ErrorKind::Remote`] when no peer has connected within the accept timeout, which the first
    /// poll starts.
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
        let deadline = self.deadline.get_or_init(|| Instant::now() + ACCEPT_TIMEOUT);
        if Instant::now() < *deadline {
            return Ok(None);
        }
        Err(Error::new(
            ErrorKind::Remote,
            format!(
                "no peer connected to {:?}, port {}, within {} s ({} incomplete connections, {} unauthenticated connections dropped) {}",
                self.handle.addresses,
                self.handle.port,
                ACCEPT_TIMEOUT.as_secs(),
                state.partial.len(),
                self.acceptor.listening.dropped(),
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

    use evenkeel_protocol::{ConnectionId, HandshakeError, Hello, Refusal, WELCOME_BYTES, Welcome};

    use super::*;
    use crate::handshake::listening_socket::MAX_UNAUTHENTICATED;
    use crate::memory::block::Block;
    use crate::test_support::{connected, transport, until};
    use crate::{MemoryTypes, NullLog, NullNotify, Settings, Transport};

    /// Settings over the loopback interface, with these ports.
    fn with_ports(ports: &str) -> Transport {
        let settings = Settings::from_lookup(|name| match name {
            "NCCL_SOCKET_IFNAME" => Some("lo".to_owned()),
            "EVENKEEL_PORTS" => Some(ports.to_owned()),
            _ => None,
        });
        Transport::new(settings.unwrap(), Arc::new(NullLog)).unwrap()
    }

    fn listeners(transport: &Transport, count: usize) -> Vec<Listener> {
        let listen = |_| transport.listen(0, "", MemoryTypes::HOST).unwrap();
        (0..count).map(listen).collect()
    }

    /// A listening socket at two ports that nobody uses, one after the other.
    fn two_free_ports() -> u16 {
        let free = |port: u16| std::net::TcpListener::bind(("127.0.0.1", port)).ok();
        until(|| {
            let first = free(0)?;
            let port = first.local_addr().unwrap().port();
            free(port.checked_add(1)?).map(|_| port)
        })
    }

    #[test]
    fn listeners_share_one_port_and_get_their_own_peers() {
        let port = two_free_ports();
        let transport = with_ports(&port.to_string());
        // The second time the port has connections that are closed and not forgotten by the kernel.
        for _ in 0..2 {
            let mut listeners = listeners(&transport, 50);
            assert!(listeners.iter().all(|listener| listener.address().port() == port));
            let other = with_ports(&format!("{port}-{}", port + 1));
            let next = other.listen(0, "", MemoryTypes::HOST).unwrap();
            assert_eq!(next.address().port(), port + 1, "the next port for another process");
            // Closing one does not hurt the others.
            let closed = listeners.remove(7).handle().clone();
            for (index, listener) in listeners.iter().enumerate() {
                let (send, recv) = connected(&transport, listener, listener.handle());
                let mut number = Block::new(4);
                number.bytes_mut().copy_from_slice(&(index as u32).to_le_bytes());
                let mut received = recv.recv_block(Block::new(4), 4).unwrap().ok().unwrap();
                let number = Arc::new(number);
                let _sent = send.send_block(&number, 4).unwrap().unwrap();
                let (arrived, _) = until(|| received.poll(true).unwrap());
                assert_eq!(arrived.bytes(), number.bytes());
            }
            let call = transport.connect(0, &closed, "", MemoryTypes::HOST).unwrap();
            let error = until(|| call.poll().err());
            assert!(error.to_string().contains("has no such listener"), "{error}");
        }
        let full = with_ports(&port.to_string());
        let _first = listeners(&transport, 1);
        let error = full.listen(0, "", MemoryTypes::HOST).err().unwrap().to_string();
        assert!(error.contains(&format!("EVENKEEL_PORTS={port}-{port}")), "{error}");
    }

    /// A flow in place of a lost one, of a connection that has ended here. It must not wait for
    /// others.
    #[test]
    fn flow_of_a_forgotten_connection_is_refused_and_leaves_nothing() {
        let transport = transport();
        let listener = transport.listen(0, "", MemoryTypes::HOST).unwrap();
        let hello = Hello {
            nonce: listener.handle().nonce,
            connection: ConnectionId([3; 16]),
            flow: 4,
            flows: 4,
            checksum: false,
            rdma: false,
            random: None,
        };
        let mut stream = TcpStream::connect(listener.address()).unwrap();
        stream.write_all(&hello.encode()).unwrap();
        let mut answer = [0; WELCOME_BYTES];
        stream.read_exact(&mut answer).unwrap();
        let refused = Err(HandshakeError::Refused(Refusal::Gone));
        assert_eq!(Welcome::check(&answer, hello.connection), refused);
        assert!(lock(&listener.acceptor.state).partial.is_empty());
    }

    /// More peers connect than can be unauthenticated at a time, before the first handshake. All of
    /// them get an answer.
    #[test]
    fn burst_of_peers_is_answered_completely() {
        const PEERS: u16 = 600;
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
                let mut id = [0; 16];
                id[..2].copy_from_slice(&peer.to_le_bytes());
                let hello = Hello {
                    nonce,
                    connection: ConnectionId(id),
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
