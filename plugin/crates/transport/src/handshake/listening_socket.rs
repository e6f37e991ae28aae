//! The listening socket of an address, which all listeners of a process share: the hello says which
//! one is meant.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use evenkeel_protocol::Nonce;
use socket2::{Domain, Socket, Type};

use crate::connection::base::{configure_socket, would_block};
use crate::context::Context;
use crate::error::ErrorKind;
use crate::handshake::acceptor::Acceptor;
use crate::handshake::unauthenticated::Unauthenticated;
use crate::runtime::descriptors;
use crate::runtime::reactor::{Readiness, Registration, Source, Workers};
use crate::settings::Settings;
use crate::sync::lock;
use crate::sys;
use crate::telemetry::log::Log;

/// Maximum number of unauthenticated TCP connections. When more arrive, the oldest is dropped after
/// its minimum time. Until then the kernel holds the new ones. A peer sends its hello at once, so
/// its connection hardly ever counts here.
pub(super) const MAX_UNAUTHENTICATED: usize = 512;

/// How long a peer may take for the handshake when many arrive at once. After that its connection
/// is dropped if others wait.
const MIN_HANDSHAKE_TIME: Duration = Duration::from_millis(200);

/// TCP connections that the kernel holds until a worker accepts them. The kernel lowers it to
/// `net.core.somaxconn`.
const BACKLOG: i32 = 1 << 16;

/// Maximum number of connections that a worker accepts before it serves others.
const MAX_ACCEPTS: usize = 64;

/// The listening sockets that listeners share, by the address that they asked for. They close with
/// their last listener.
#[derive(Default)]
pub(crate) struct ListeningSockets(Mutex<HashMap<SocketAddr, Arc<ListeningSocket>>>);

/// A listening socket, and the TCP connections that have not proved yet whom they are for.
pub(super) struct ListeningSocket {
    socket: Socket,
    /// Where it listens.
    address: SocketAddr,
    /// The address that listeners share it by.
    shared_by: Option<SocketAddr>,
    /// Until it is closed, this address is known.
    _listens: Arc<SocketAddr>,
    registration: Registration,
    workers: Arc<Workers>,
    settings: Arc<Settings>,
    log: Arc<dyn Log>,
    /// Whether connections were left to the kernel.
    is_full: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The listeners, by the nonce that their peers present.
    acceptors: HashMap<Nonce, Weak<Acceptor>>,
    /// Oldest first.
    unauthenticated: VecDeque<Arc<Unauthenticated>>,
    /// Number of unauthenticated connections dropped so far.
    dropped: u64,
    closed: bool,
}

impl ListeningSockets {
    /// The listening socket at this address, with port 0. It is opened if there is none.
    pub(super) fn shared(
        &self,
        address: SocketAddr,
        context: &Context,
        workers: &Arc<Workers>,
    ) -> io::Result<Arc<ListeningSocket>> {
        let mut all = lock(&self.0);
        if let Some(socket) = all.get(&address) {
            return Ok(Arc::clone(socket));
        }
        let socket = match &context.settings.ports {
            None => listen(address, false, context)?,
            Some(ports) => listen_in(address, ports, context)?,
        };
        let socket = ListeningSocket::watch(socket, Some(address), context, workers)?;
        all.insert(address, Arc::clone(&socket));
        Ok(socket)
    }
}

/// A socket that listens at an address. `reuse`: also while connections of a closed socket at this
/// address exist.
fn listen(address: SocketAddr, reuse: bool, context: &Context) -> io::Result<Socket> {
    let kind = Type::STREAM.nonblocking().cloexec();
    let socket = Socket::new(Domain::for_address(address), kind, None)?;
    // Accepted sockets inherit the options.
    configure_socket(&socket, context)?;
    if address.is_ipv6() && address.ip().is_unspecified() {
        // Some addresses may be IPv4.
        socket.set_only_v6(false)?;
    }
    socket.set_reuse_address(reuse)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket)
}

/// A socket that listens at the first port of a range at which nobody else does.
fn listen_in(
    address: SocketAddr,
    ports: &RangeInclusive<u16>,
    context: &Context,
) -> io::Result<Socket> {
    for port in ports.clone() {
        let mut address = address;
        address.set_port(port);
        match listen(address, true, context) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            outcome => return outcome,
        }
    }
    let (first, last) = (ports.start(), ports.end());
    let what =
        format!("all ports of EVENKEEL_PORTS={first}-{last} are in use; each process needs one");
    Err(io::Error::new(io::ErrorKind::AddrInUse, what))
}

impl ListeningSocket {
    /// A listening socket at an address that peers know, for one listener.
    pub(super) fn public(
        address: SocketAddr,
        context: &Context,
        workers: &Arc<Workers>,
    ) -> io::Result<Arc<Self>> {
        Self::watch(listen(address, true, context)?, None, context, workers)
    }

    fn watch(
        socket: Socket,
        shared_by: Option<SocketAddr>,
        context: &Context,
        workers: &Arc<Workers>,
    ) -> io::Result<Arc<Self>> {
        let address = socket.local_addr()?.as_socket();
        let address = address.ok_or_else(|| io::Error::other("not an IP socket"))?;
        let listening = Arc::new(Self {
            address,
            _listens: context.metrics.listens(address),
            socket,
            shared_by,
            registration: workers.registration(),
            workers: Arc::clone(workers),
            settings: Arc::clone(&context.settings),
            log: Arc::clone(&context.log),
            is_full: AtomicBool::new(false),
            state: Mutex::default(),
        });
        let source = Arc::new(ListeningSource(Arc::clone(&listening)));
        listening.registration.watch(&listening.socket, source)?;
        Ok(listening)
    }

    /// Where it listens.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(super) fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Number of unauthenticated connections dropped so far.
    pub(super) fn dropped(&self) -> u64 {
        lock(&self.state).dropped
    }

    fn is_open(&self) -> bool {
        !lock(&self.state).closed
    }

    /// From now on, connections with its nonce are for this listener. False if the socket is
    /// closed: another one is needed.
    pub(super) fn add(&self, acceptor: &Arc<Acceptor>) -> bool {
        let mut state = lock(&self.state);
        let is_open = !state.closed;
        if is_open {
            state.acceptors.insert(acceptor.nonce, Arc::downgrade(acceptor));
        }
        is_open
    }

    /// Nothing is for the listener with this nonce any more. The last one closes the socket.
    pub(super) fn remove(&self, nonce: Nonce) {
        // A listener that needs its port meanwhile waits for this lock.
        let mut all = lock(&self.workers.listening_sockets.0);
        let unauthenticated = {
            let mut state = lock(&self.state);
            state.acceptors.remove(&nonce);
            if !state.acceptors.is_empty() || std::mem::replace(&mut state.closed, true) {
                return;
            }
            std::mem::take(&mut state.unauthenticated)
        };
        self.registration.end(&self.socket);
        // The worker may hold a reference a little longer. No connection may be accepted meanwhile.
        let _ = self.socket.shutdown(Shutdown::Both);
        let closed = self.shared_by.and_then(|address| all.remove(&address));
        drop(all);
        drop(closed);
        for connection in unauthenticated {
            connection.take_stream();
        }
    }

    /// The listener with this nonce.
    pub(super) fn acceptor(&self, nonce: Nonce) -> Option<Arc<Acceptor>> {
        lock(&self.state).acceptors.get(&nonce)?.upgrade()
    }

    /// Accepts all waiting TCP connections, as long as there is room.
    fn accept_all(self: &Arc<Self>) {
        self.is_full.store(false, Ordering::SeqCst);
        for _ in 0..MAX_ACCEPTS {
            if !self.has_room() {
                // The next one that is admitted or times out makes room.
                self.is_full.store(true, Ordering::SeqCst);
                self.registration.request_tick();
                return;
            }
            match sys::uninterrupted(|| sys::accept(&self.socket)) {
                Ok((socket, peer)) => self.receive(socket, peer),
                Err(error) if would_block(&error) => return,
                Err(error) if is_of_connection(&error) => {}
                Err(error) => {
                    // The next tick tries again, and the kernel holds the connections until then.
                    if descriptors::is_shortage(&error) {
                        descriptors::report_shortage(&error, &*self.log);
                    } else if self.is_open() {
                        self.info(&format!("cannot accept: {error}"));
                    } else {
                        return;
                    }
                    self.registration.request_tick();
                    return;
                }
            }
        }
        // Others first.
        self.registration.wake(&self.socket);
    }

    /// Accepts more connections if some were left to the kernel.
    pub(super) fn accept_waiting(self: &Arc<Self>) {
        if self.is_full.load(Ordering::SeqCst) {
            self.accept_all();
        }
    }

    /// Whether one more connection can be accepted: there are few, or the oldest has had its
    /// minimum time.
    fn has_room(&self) -> bool {
        let unauthenticated = &lock(&self.state).unauthenticated;
        unauthenticated.len() < MAX_UNAUTHENTICATED
            || unauthenticated.front().is_some_and(|oldest| oldest.age() >= MIN_HANDSHAKE_TIME)
    }

    fn receive(self: &Arc<Self>, socket: Socket, peer: SocketAddr) {
        sys::keep_from_children(&socket);
        let connection =
            Unauthenticated::new(Arc::downgrade(self), peer, self.workers.registration());
        let evicted = {
            let mut state = lock(&self.state);
            if state.closed {
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

    /// The connection is admitted or dropped, and does not count any more.
    pub(super) fn forget(&self, connection: &Unauthenticated, dropped: bool) {
        let mut state = lock(&self.state);
        // Nearly always one of the latest.
        let at = state
            .unauthenticated
            .iter()
            .rposition(|other| std::ptr::eq(&raw const **other, connection));
        if let Some(at) = at {
            state.unauthenticated.remove(at);
        }
        state.dropped += u64::from(dropped);
    }

    /// Writes a line to the log.
    pub(super) fn info(&self, line: &str) {
        self.log.info(&format!("evenkeel: listener at {}: {line}", self.address));
    }

    /// Fails all listeners.
    fn fail(&self, why: &str) {
        let acceptors: Vec<_> =
            lock(&self.state).acceptors.values().filter_map(Weak::upgrade).collect();
        acceptors.iter().for_each(|acceptor| acceptor.fail(ErrorKind::Internal, why));
    }
}

/// Whether an error of `accept` belongs to the connection that was to be accepted, not to the
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

/// Registers the listening socket with a worker.
struct ListeningSource(Arc<ListeningSocket>);

impl Source for ListeningSource {
    fn ready(&self, _readiness: Readiness) {
        self.0.accept_all();
    }

    fn tick(&self, _now: Instant) -> bool {
        // It requests the next tick itself if connections are left.
        self.0.accept_all();
        false
    }

    fn abandoned(&self, why: &str) {
        self.0.fail(why);
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use super::*;
    use crate::test_support::{transport, until};

    #[test]
    fn accepted_sockets_inherit_the_options_of_flows() {
        let context = transport().context(0, "").unwrap();
        let socket = listen("127.0.0.1:0".parse().unwrap(), false, &context).unwrap();
        let address = socket.local_addr().unwrap().as_socket().unwrap();
        let _peer = TcpStream::connect(address).unwrap();
        let (accepted, _) = until(|| sys::accept(&socket).ok());
        let options = |socket: &Socket| {
            let names = [
                (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
                (libc::IPPROTO_TCP, libc::TCP_NODELAY),
                (libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT),
                (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
                (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL),
                (libc::IPPROTO_TCP, libc::TCP_KEEPCNT),
            ];
            names.map(|(level, name)| sys::option(socket, level, name))
        };
        assert_eq!(options(&accepted), options(&socket));
        assert!(accepted.nonblocking().unwrap() && accepted.tcp_nodelay().unwrap());
    }
}
