//! Opens one flow to a listener.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use evenkeel_protocol::{
    CHALLENGE_BYTES, ConnectionId, HELLO_BYTES, Handle, HandshakeError, Hello, Refusal,
    WELCOME_BYTES, Welcome, is_challenge,
};
use socket2::{Domain, Socket, Type};

use crate::connection::base::{configure_socket, would_block};
use crate::context::Context;
use crate::error::Retry;
use crate::handshake::encryption::{TlsFailure, TlsHandshake};
use crate::runtime::reactor::{Readiness, Registration, Source, Workers};
use crate::stream::Stream;
use crate::sync::lock;
use crate::sys;

/// The part of the connect timeout after which a flow that is bound to its interface is dialed
/// without.
const BOUND_SHARE: u32 = 16;

/// The listener of a connection's flows: all that is needed to open another one.
pub(crate) struct Destination {
    pub(crate) context: Context,
    pub(crate) workers: Arc<Workers>,
    pub(crate) handle: Handle,
    /// The listener's first address as this host reaches it, for messages.
    pub(crate) peer: SocketAddr,
    pub(crate) connection: ConnectionId,
}

/// Which way a flow or control connection goes.
#[derive(Clone, Copy)]
pub(crate) struct Way {
    /// Its number.
    pub(crate) number: u32,
    /// It takes the addresses that a flow with this number takes.
    pub(crate) path: u32,
    /// Whether it leaves by its own interface where several are in the peer's subnet. It then
    /// receives by that interface only, which fails where the answers come by another one.
    pub(crate) binds: bool,
    /// Maximum bytes of its segments, where the hosts do not agree on one that passes.
    pub(crate) segment_limit: Option<u32>,
}

/// Why a flow was not accepted.
#[derive(Debug)]
pub(crate) struct DialError {
    /// Whether retrying is useless: the listener's process is gone, or the connection is closed
    /// there.
    pub(crate) is_final: bool,
    /// Whether nobody listens there.
    pub(crate) is_refused: bool,
    /// Whether the address has no way to the listener: it leads to another host, or to none.
    pub(crate) leads_astray: bool,
    pub(crate) retry: Retry,
    /// Whether the listener has no RDMA.
    pub(crate) no_rdma: bool,
    /// Whether the listener reports that it does not have the connection any more.
    pub(crate) is_gone: bool,
    pub(crate) what: String,
}

/// Receives the outcome of a dial.
pub(crate) trait DialHandler: Send + Sync {
    /// The listener has accepted the flow.
    fn on_welcome(self: Arc<Self>, flow: u32, stream: Stream);
    /// The flow could not be opened. Not called after [`Dial::take_stream`].
    fn on_dial_error(self: Arc<Self>, flow: u32, error: DialError);
}

/// A TCP connection that is being opened and is not accepted yet.
pub(crate) struct Dial {
    destination: Arc<Destination>,
    handler: Arc<dyn DialHandler>,
    flow: u32,
    /// The flow whose addresses it takes.
    path: u32,
    /// Number of queue pairs, for the control connection of an RDMA connection.
    queue_pairs: Option<u16>,
    deadline: Instant,
    /// For a flow that is bound to its interface: when TCP has to be connected.
    connected_by: Option<Instant>,
    registration: Registration,
    pub(super) state: Mutex<DialState>,
}

pub(super) struct DialState {
    /// `None` once the flow is accepted or cancelled.
    pub(super) stream: Option<Stream>,
    /// Whether TCP is connected.
    is_connected: bool,
    /// With encryption, as long as it is under way.
    tls: Option<Box<TlsHandshake>>,
    /// Sent once TCP is connected and, if that is required, encrypted.
    pub(super) hello: Option<[u8; HELLO_BYTES]>,
    /// Whether the listener's challenge is answered; true without a job key, and with encryption,
    /// which proves it.
    proved: bool,
    /// Bytes received of the expected answer: a challenge or a welcome.
    have: usize,
    answer: [u8; CHALLENGE_BYTES],
}

impl From<io::Error> for DialError {
    fn from(error: io::Error) -> Self {
        let is_refused = error.kind() == io::ErrorKind::ConnectionRefused;
        // Or the address can never be reached from here.
        let is_final = is_refused
            || [libc::EINVAL, libc::EAFNOSUPPORT].map(Some).contains(&error.raw_os_error());
        let unreachable = [io::ErrorKind::HostUnreachable, io::ErrorKind::NetworkUnreachable];
        let leads_astray = is_final || unreachable.contains(&error.kind());
        let dropped = [io::ErrorKind::ConnectionReset, io::ErrorKind::BrokenPipe];
        let retry = if dropped.contains(&error.kind()) { Retry::Later } else { Retry::Unknown };
        Self { is_final, is_refused, leads_astray, ..temporary(retry, &error.to_string()) }
    }
}

impl From<HandshakeError> for DialError {
    fn from(error: HandshakeError) -> Self {
        let busy = error == HandshakeError::Refused(Refusal::Busy);
        let no_rdma = error == HandshakeError::Refused(Refusal::NoRdma);
        let retry = if busy { Retry::Later } else { Retry::Never };
        let gone = [Refusal::Gone, Refusal::WrongListener].map(HandshakeError::Refused);
        let is_gone = gone.contains(&error);
        let (is_final, leads_astray) = (!busy, is_gone);
        Self { is_final, no_rdma, is_gone, leads_astray, ..temporary(retry, &error.to_string()) }
    }
}

impl From<TlsFailure> for DialError {
    fn from(failure: TlsFailure) -> Self {
        match failure {
            TlsFailure::Io(error) => error.into(),
            TlsFailure::Key(what) => Self::key(&what),
            TlsFailure::Refused(error) => error.into(),
            // Another path may leave the bytes as they are.
            TlsFailure::Invalid(what) => temporary(Retry::Later, &what),
        }
    }
}

impl DialError {
    /// Only one side has a job key, or the keys differ.
    fn key(what: &str) -> Self {
        Self { is_final: true, ..temporary(Retry::Never, what) }
    }
}

impl Dial {
    /// Starts to open a flow, with segments of at most this many bytes. The handler gets the
    /// outcome by the deadline. With `binds`, it leaves by its own interface where
    /// [`Dial::may_bind`] says so.
    pub(crate) fn start(
        destination: &Arc<Destination>,
        handler: Arc<dyn DialHandler>,
        flow: u32,
        binds: bool,
        segment_limit: Option<u32>,
        deadline: Instant,
    ) -> io::Result<Arc<Self>> {
        let way = Way { number: flow, path: flow, binds, segment_limit };
        Self::start_on(destination, handler, way, deadline)
    }

    /// As [`Dial::start`], on the path that a flow with another number takes.
    pub(crate) fn start_on(
        destination: &Arc<Destination>,
        handler: Arc<dyn DialHandler>,
        way: Way,
        deadline: Instant,
    ) -> io::Result<Arc<Self>> {
        let binds = way.binds && Self::may_bind(destination, way.path);
        Self::begin(destination, handler, Way { binds, ..way }, None, deadline)
    }

    /// Whether a flow may be bound to its interface: several are in the peer's subnet. It then gets
    /// answers by that interface only, so one that gets none is dialed again without.
    pub(crate) fn may_bind(destination: &Destination, flow: u32) -> bool {
        let Destination { context, handle, .. } = destination;
        let (_, peer) = context.device.path(flow, handle);
        // From a single RDMA port the route decides, also for control connections: there is no
        // other port to try.
        context.device.ports().len() != 1 && context.device.bound_interface(flow, &peer).is_some()
    }

    /// As [`Dial::start`], for a control connection of a connection with this number of queue
    /// pairs.
    pub(crate) fn control_connection(
        destination: &Arc<Destination>,
        handler: Arc<dyn DialHandler>,
        way: Way,
        queue_pairs: u16,
        deadline: Instant,
    ) -> io::Result<Arc<Self>> {
        Self::begin(destination, handler, way, Some(queue_pairs), deadline)
    }

    fn begin(
        destination: &Arc<Destination>,
        handler: Arc<dyn DialHandler>,
        Way { number: flow, path, binds, segment_limit }: Way,
        queue_pairs: Option<u16>,
        deadline: Instant,
    ) -> io::Result<Arc<Self>> {
        let Destination { context, workers, handle, .. } = &**destination;
        let (local, peer) = context.device.path(path, handle);
        let kind = Type::STREAM.nonblocking().cloexec();
        let socket = Socket::new(Domain::for_address(peer), kind, None)?;
        configure_socket(&socket, context)?;
        if let Some(bytes) = segment_limit {
            socket.set_tcp_mss(bytes)?;
        }
        if local.is_ipv4() == peer.is_ipv4() {
            // Without the option there are fewer ports, and no other difference.
            let _ = sys::set_port_at_connect(&socket);
            // Packets must leave through the device that was asked for.
            socket.bind(&local.into())?;
            if binds && let Some(interface) = context.device.bound_interface(path, &peer) {
                // Kernels before 5.7 ask for a privilege: without it the route decides.
                let _ = socket.bind_device(Some(interface.as_bytes()));
            }
        }
        match socket.connect(&peer.into()) {
            Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => return Err(error),
            _ => {}
        }
        let is_bound_flow = binds && queue_pairs.is_none();
        let connect_time = context.settings.connect_timeout / BOUND_SHARE;
        let identity = context.settings.encryption.as_ref();
        let tls = identity.map(TlsHandshake::connector).transpose();
        let tls = tls.map_err(|failure| io::Error::other(DialError::from(failure).what))?;
        let state = DialState {
            stream: None,
            is_connected: false,
            proved: context.settings.job_key.is_none() || tls.is_some(),
            tls,
            hello: None,
            have: 0,
            answer: [0; CHALLENGE_BYTES],
        };
        let dial = Arc::new(Self {
            destination: Arc::clone(destination),
            handler,
            flow,
            path,
            queue_pairs,
            deadline,
            connected_by: is_bound_flow.then(|| Instant::now() + connect_time),
            registration: workers.registration(),
            state: Mutex::new(state),
        });
        // The lock keeps the worker from the socket until it is in place.
        let mut state = lock(&dial.state);
        dial.registration.watch(&socket, Arc::<Self>::clone(&dial))?;
        dial.registration.request_tick();
        state.stream = Some(Stream::plain(socket));
        drop(state);
        Ok(dial)
    }

    /// Number of the flow that is being opened.
    pub(crate) fn flow(&self) -> u32 {
        self.flow
    }

    /// Whether TCP is connected.
    pub(crate) fn is_connected(&self) -> bool {
        lock(&self.state).is_connected
    }

    /// Number of the flow that takes its addresses by default.
    pub(crate) fn path(&self) -> u32 {
        self.path
    }

    /// Whether the flow is bound to its interface, and nobody has answered there.
    pub(crate) fn is_bound_in_vain(&self) -> bool {
        self.connected_by.is_some() && !self.is_connected()
    }

    /// Cancels the dial; its stream, unless it ended before.
    pub(crate) fn take_stream(&self) -> Option<Stream> {
        let stream = lock(&self.state).stream.take()?;
        self.registration.end(&stream);
        Some(stream)
    }

    /// Continues the handshake as far as possible. True when the flow is accepted.
    fn step(&self, readiness: Readiness) -> Result<bool, DialError> {
        let destination = &self.destination;
        let mut state = lock(&self.state);
        let DialState { stream: Some(stream), is_connected, tls, hello, proved, have, answer } =
            &mut *state
        else {
            return Ok(false);
        };
        // Later, reads report it, behind the bytes that came before.
        if !*is_connected && let Some(error) = stream.socket.take_error()? {
            return Err(error.into());
        }
        *is_connected |= readiness.writable;
        if !*is_connected {
            return Ok(false);
        }
        if let Some(mut handshake) = tls.take() {
            if !handshake.advance(&stream.socket)? {
                *tls = Some(handshake);
                return Ok(false);
            }
            handshake.finish(stream, destination.context.settings.kernel_tls)?;
        }
        let is_encrypted = stream.is_encrypted();
        let key = destination.context.settings.job_key.as_ref().filter(|_| !is_encrypted);
        let sent_hello = match hello {
            Some(hello) => hello,
            None => {
                let random = if key.is_some() { Some(sys::random()?) } else { None };
                let bytes = Hello {
                    nonce: destination.handle.nonce,
                    connection: destination.connection,
                    flow: self.flow,
                    flows: self.queue_pairs.unwrap_or(destination.context.settings.flows),
                    checksum: destination.context.settings.checksum,
                    rdma: self.queue_pairs.is_some(),
                    random,
                };
                let bytes = bytes.encode();
                if !send_bytes(stream, &bytes)? {
                    return Ok(false);
                }
                hello.insert(bytes)
            }
        };
        loop {
            // A listener that refuses the hello sends a welcome with the refusal instead of a
            // challenge.
            let challenged = !*proved && (*have < WELCOME_BYTES || is_challenge(answer));
            let want = match challenged && *have >= WELCOME_BYTES {
                true => CHALLENGE_BYTES,
                false => WELCOME_BYTES,
            };
            if *have < want {
                match stream.read(&mut answer[*have..want]) {
                    Ok(0) => {
                        return Err(temporary(Retry::Later, "the listener closed the connection"));
                    }
                    Ok(received) => *have += received,
                    Err(error) if would_block(&error) => return Ok(false),
                    Err(error) => return Err(error.into()),
                }
                continue;
            }
            let Some(key) = key.filter(|_| challenged) else { break };
            let proof = key
                .answer(sent_hello, answer)
                .ok_or_else(|| DialError::key("the listener does not have the job key"))?;
            if !send_bytes(stream, &proof)? {
                return Ok(false);
            }
            (*proved, *have) = (true, 0);
        }
        let (welcome, _) = answer.split_first_chunk().unwrap_or((&[0; WELCOME_BYTES], &[]));
        Welcome::check(welcome, destination.connection)?;
        if !*proved {
            return Err(DialError::key("the listener has no job key, but this side has one"));
        }
        Ok(true)
    }

    fn give_up(&self, error: DialError) {
        // The thread that takes the socket reports the outcome.
        if self.take_stream().is_some() {
            Arc::clone(&self.handler).on_dial_error(self.flow, error);
        }
    }
}

/// Sends a part of the handshake, which fits into a new socket. False if it is not connected yet.
fn send_bytes(stream: &mut Stream, bytes: &[u8]) -> Result<bool, DialError> {
    match stream.write(bytes) {
        Ok(written) if written == bytes.len() => Ok(true),
        Ok(_) => Err(temporary(Retry::Unknown, "a new socket has no room for the handshake")),
        Err(error) if would_block(&error) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn temporary(retry: Retry, what: &str) -> DialError {
    DialError {
        is_final: false,
        is_refused: false,
        leads_astray: false,
        retry,
        no_rdma: false,
        is_gone: false,
        what: what.to_owned(),
    }
}

impl Source for Dial {
    fn ready(&self, readiness: Readiness) {
        match self.step(readiness) {
            Ok(false) => {}
            Ok(true) => {
                if let Some(stream) = self.take_stream() {
                    Arc::clone(&self.handler).on_welcome(self.flow, stream);
                }
            }
            Err(error) => self.give_up(error),
        }
    }

    fn tick(&self, now: Instant) -> bool {
        let is_late = now >= self.deadline;
        let is_unanswered =
            self.connected_by.is_some_and(|by| now >= by) && self.is_bound_in_vain();
        if is_late {
            self.give_up(temporary(Retry::Unknown, "no answer in time"));
        } else if is_unanswered {
            self.give_up(temporary(Retry::Unknown, "no answer by its own interface"));
        }
        !is_late && !is_unanswered
    }

    fn abandoned(&self, why: &str) {
        self.give_up(DialError { is_final: true, ..temporary(Retry::Unknown, why) });
    }
}
