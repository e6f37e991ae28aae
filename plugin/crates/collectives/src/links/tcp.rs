//! Links over Evenkeel's TCP transport.
//!
//! A small message is one message of the transport, an envelope of header and payload. The transport copies it, and the receiver
//! reads it into its own buffer. A large message is two: the header goes first, so that the receiver knows where the payload
//! belongs. Large payloads are not copied.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use evenkeel_transport::{
    CloseHandle, Connecting, ErrorKind as TransportErrorKind, HANDLE_BYTES, Handle, Listener, Log,
    MAX_REQUESTS, MemoryTypes, Notify, NullLog, RecvConnection, Request, Retry, SendConnection,
    Settings, StderrLog,
};

use crate::backoff::jittered;
use crate::error::{Error, Result};
use crate::links::link::{
    Endpoint, HEADER_BYTES, Header, Incoming, LinkError, Outgoing, Submitted,
};
use crate::memory::{Source, Target};

/// Maximum length of an envelope: what the transport writes and reads inline.
const MAX_ENVELOPE_BYTES: usize = 16 << 10;
/// Maximum length of a payload in an envelope.
const MAX_INLINE_PAYLOAD: usize = MAX_ENVELOPE_BYTES - HEADER_BYTES;

/// The delay before a rank that was too busy to accept a connection is dialed again, and how far it grows.
const MIN_REDIAL_DELAY: Duration = Duration::from_millis(50);
const MAX_REDIAL_DELAY: Duration = Duration::from_secs(1);

/// The interface whose ranks are all on this host.
const LOOPBACK: &str = "lo";
/// Maximum length of a message that the transport copies over the loopback interface, so that the sender need not wait for the
/// acknowledgement. Measured: copying a longer message takes longer than the acknowledgement.
const LOOPBACK_INLINE: usize = 128 << 10;
/// The chunk length over the loopback interface: a whole piece of an operation.
const LOOPBACK_CHUNK: usize = 1 << 20;

fn env(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// A filter of interfaces from Gloo's list of them, which has whole names.
fn gloo_interfaces(names: Option<String>) -> Option<String> {
    names.filter(|names| !names.is_empty()).map(|names| format!("={names}"))
}

/// This process's network, for all groups of the process.
///
/// It has many flows for each pair of ranks and a few threads for all pairs. The environment variables of the NCCL plugin set it. As
/// in the plugin, two ranks that both have an RDMA port use RDMA.
#[derive(Clone)]
pub struct Tcp {
    network: Arc<evenkeel_transport::Transport>,
    device: usize,
}

impl Tcp {
    /// Opens the network as the environment sets it. Where `NCCL_SOCKET_IFNAME` is not set, Gloo's `GLOO_SOCKET_IFNAME` names the
    /// interfaces.
    ///
    /// # Errors
    /// Names the variable whose value is invalid, or says that there is no usable interface.
    pub fn from_env() -> Result<Self> {
        let value = |name: &str, set: Option<String>| match name {
            "NCCL_SOCKET_IFNAME" => set.or_else(|| gloo_interfaces(env("GLOO_SOCKET_IFNAME"))),
            _ => set,
        };
        Self::open(value, false)
    }

    /// Opens the network as the environment sets it, but over this interface, such as `lo`.
    ///
    /// # Errors
    /// As [`Tcp::from_env`].
    pub fn on(interface: &str) -> Result<Self> {
        let value = |name: &str, set: Option<String>| match name {
            "NCCL_SOCKET_IFNAME" => Some(format!("={interface}")),
            // There is only one path, so more flows would only cost more.
            "EVENKEEL_FLOWS" if interface == LOOPBACK => set.or_else(|| Some("1".to_owned())),
            "EVENKEEL_INLINE_BYTES" if interface == LOOPBACK => {
                set.or_else(|| Some(LOOPBACK_INLINE.to_string()))
            }
            "EVENKEEL_CHUNK_BYTES" if interface == LOOPBACK => {
                set.or_else(|| Some(LOOPBACK_CHUNK.to_string()))
            }
            // An interface by name is not an RDMA port.
            "EVENKEEL_TRANSPORT" => Some("tcp".to_owned()),
            _ => set,
        };
        Self::open(value, interface == LOOPBACK)
    }

    /// Opens the network as the environment sets it, but requires RDMA.
    ///
    /// # Errors
    /// As [`Tcp::from_env`]; also when there is no usable RDMA port.
    pub fn over_rdma() -> Result<Self> {
        let value = |name: &str, set| match name {
            "EVENKEEL_TRANSPORT" => Some("rdma".to_owned()),
            _ => set,
        };
        Self::open(value, false)
    }

    /// Opens the network as the environment sets it, but requires RDMA over this port of a device such as `mlx5_0`. `gid_index`
    /// selects the GID.
    ///
    /// # Errors
    /// As [`Tcp::over_rdma`].
    pub fn over_rdma_port(device: &str, port: u8, gid_index: Option<u8>) -> Result<Self> {
        if device.is_empty() || device.contains([':', ',']) {
            return Err(Error::argument(format!(
                "{device:?} is not the name of an RDMA device, such as mlx5_0"
            )));
        }
        Self::open(rdma_port_setting(device, port, gid_index), false)
    }

    /// Opens the network. `value` gives a setting's value from its name and the environment's value. `single_host`: all ranks share
    /// the processors of this host, so the thread that waits for bytes moves them.
    fn open(
        value: impl Fn(&str, Option<String>) -> Option<String>,
        single_host: bool,
    ) -> Result<Self> {
        let mut settings = Settings::from_lookup(|name| value(name, env(name)))
            .map_err(|error| Error::argument(error.to_string()))?;
        if single_host {
            settings.set_caller_bytes(u64::MAX);
        }
        // Who asks whom the job waits for is told.
        let log: Arc<dyn Log> =
            if settings.watches() { Arc::new(StderrLog) } else { Arc::new(NullLog) };
        let network = evenkeel_transport::Transport::new(settings, log)
            .map_err(|error| Error::system("network", error))?;
        Ok(Self { network: Arc::new(network), device: 0 })
    }

    /// The interface in use.
    pub fn device(&self) -> &str {
        self.network.devices().get(self.device).map_or("", |device| device.name())
    }

    /// The IP address of the interface.
    pub(crate) fn ip(&self) -> IpAddr {
        let device = self.network.devices().get(self.device);
        let first = device.and_then(|device| device.addresses().first().copied());
        first.unwrap_or_else(|| Ipv4Addr::LOCALHOST.into())
    }

    /// Opens this rank's endpoint. `notified` is notified of every event that a thread sleeping on another transport may wait for.
    pub(crate) fn endpoint(&self, notified: Option<Arc<dyn Notify>>) -> Result<Box<dyn Endpoint>> {
        let listener = self.network.listen(self.device, "collectives", MemoryTypes::HOST);
        let listener = listener.map_err(|error| Error::system("network", error))?;
        Ok(Box::new(TcpEndpoint { tcp: self.clone(), listener, notified }))
    }
}

/// The value of a setting, from its name and the environment's value, where RDMA has to go over one port.
fn rdma_port_setting(
    device: &str,
    port: u8,
    gid_index: Option<u8>,
) -> impl Fn(&str, Option<String>) -> Option<String> {
    move |name, set| match (name, gid_index) {
        ("EVENKEEL_TRANSPORT", _) => Some("rdma".to_owned()),
        ("NCCL_IB_HCA", _) => Some(format!("={device}:{port}")),
        ("NCCL_IB_GID_INDEX", Some(index)) => Some(index.to_string()),
        _ => set,
    }
}

struct TcpEndpoint {
    tcp: Tcp,
    listener: Listener,
    notified: Option<Arc<dyn Notify>>,
}

impl Endpoint for TcpEndpoint {
    fn address(&self) -> Vec<u8> {
        self.listener.handle().encode().to_vec()
    }

    fn ip(&self) -> IpAddr {
        let first = self.listener.handle().addresses.first().copied();
        first.unwrap_or_else(|| Ipv4Addr::LOCALHOST.into())
    }

    fn connect(&self, address: &[u8]) -> Result<Option<Box<dyn Outgoing>>> {
        Ok(Some(Box::new(TcpOutgoing {
            connection: None,
            dialer: Some(Dialer::start(&self.tcp, address)?),
            notified: self.notified.clone(),
            close_handle: None,
            pending: VecDeque::new(),
            spare: vec![],
            submitted: 0,
            completed: 0,
        })))
    }

    fn accept(&self) -> Result<Option<Box<dyn Incoming>>> {
        match self.listener.poll_accept() {
            Ok(None) => Ok(None),
            Ok(Some(connection)) => {
                if let Some(notified) = &self.notified {
                    connection.notify(Arc::clone(notified));
                }
                // A header may come at any time, and nobody waits for it all the time.
                connection.set_awaited(false);
                Ok(Some(Box::new(TcpIncoming {
                    connection,
                    envelope: vec![0; MAX_ENVELOPE_BYTES],
                    envelope_request: None,
                    pending_header: None,
                    pending: VecDeque::new(),
                    submitted: 0,
                    completed: 0,
                    is_awaited: false,
                })))
            }
            // The listener timed out. Operations have their own timeouts.
            Err(error) if error.kind() == TransportErrorKind::Remote => Ok(None),
            Err(error) => Err(Error::system("network", error)),
        }
    }

    fn sleep(&self, time: Duration, is_ready: &mut dyn FnMut() -> bool) {
        evenkeel_transport::wait_for(time, || is_ready().then_some(()));
    }
}

/// Connects to a rank.
struct Dialer {
    tcp: Tcp,
    handle: Handle,
    /// `None` until the rank is dialed again.
    connecting: Option<Connecting>,
    redial_at: Instant,
    delay: Duration,
}

impl Dialer {
    /// Begins to connect to the rank that listens at this address.
    fn start(tcp: &Tcp, address: &[u8]) -> Result<Self> {
        let wrong = || Error::argument("the address is not that of a rank on TCP");
        let address: &[u8; HANDLE_BYTES] = address.try_into().map_err(|_| wrong())?;
        let handle = Handle::decode(address).map_err(|_| wrong())?;
        let connecting = Some(Self::dial(tcp, &handle)?);
        let (redial_at, delay) = (Instant::now(), MIN_REDIAL_DELAY);
        Ok(Self { tcp: tcp.clone(), handle, connecting, redial_at, delay })
    }

    fn dial(tcp: &Tcp, handle: &Handle) -> Result<Connecting> {
        // A link is as slow as the group's slowest rank, so its rate says nothing about its paths.
        let connecting = tcp.network.try_connect(tcp.device, handle, "collectives", usize::MAX);
        connecting.map_err(|error| Error::system("network", error))
    }

    /// The connection, once it is established. A rank to which many connect at once may drop some connections before it accepts
    /// them: it is dialed again, as long as an operation waits for it.
    fn poll(&mut self) -> std::result::Result<Option<SendConnection>, LinkError> {
        let Some(connecting) = &self.connecting else {
            if Instant::now() >= self.redial_at {
                let connecting = Self::dial(&self.tcp, &self.handle);
                self.connecting = Some(connecting.map_err(|error| error.to_string())?);
            }
            return Ok(None);
        };
        match connecting.poll() {
            Err(error) if error.retry() == Retry::Later => {
                self.connecting = None;
                self.redial_at = Instant::now() + jittered(self.delay);
                self.delay = (2 * self.delay).min(MAX_REDIAL_DELAY);
                Ok(None)
            }
            polled => polled.map_err(|error| error.to_string()),
        }
    }
}

/// A message that was submitted to the transport.
struct PendingMessage {
    request: Request,
    /// Its bytes, if this link owns them.
    copy: Option<Vec<u8>>,
}

struct TcpOutgoing {
    // Before the memory that is lent to it: fields are dropped in this order.
    connection: Option<SendConnection>,
    /// `None` once there is a connection.
    dialer: Option<Dialer>,
    notified: Option<Arc<dyn Notify>>,
    close_handle: Option<CloseHandle>,
    pending: VecDeque<PendingMessage>,
    spare: Vec<Vec<u8>>,
    submitted: u64,
    completed: u64,
}

impl TcpOutgoing {
    /// Whether the connection is established.
    fn is_open(&mut self) -> std::result::Result<bool, LinkError> {
        if let Some(dialer) = &mut self.dialer
            && let Some(connection) = dialer.poll()?
        {
            if let Some(notified) = self.notified.take() {
                connection.notify(notified);
            }
            self.connection = Some(connection);
            self.dialer = None;
        }
        Ok(self.connection.is_some())
    }

    /// Submits a message. `more_follows`: another message follows at once.
    fn submit(&self, bytes: Source, more_follows: bool) -> std::result::Result<Request, LinkError> {
        let connection = self.connection.as_ref().ok_or("not connected")?;
        let send = if more_follows { SendConnection::send_ahead } else { SendConnection::send };
        let request = send(connection, bytes.to_send()).map_err(|error| error.to_string())?;
        // The caller has checked that there is room.
        request.ok_or_else(|| "the transport takes no more messages".to_owned())
    }

    /// Sends bytes that this link owns. They are pending until the transport has copied them: a connection that is dropped earlier
    /// does not deliver them.
    fn send_copy(
        &mut self,
        copy: Vec<u8>,
        more_follows: bool,
    ) -> std::result::Result<Submitted, LinkError> {
        // SAFETY: the bytes of a vector stay where they are when it moves; it is kept until the transport is done with
        // them, or the connection, which is dropped first, is gone.
        let request = self.submit(unsafe { Source::lend(&copy) }, more_follows)?;
        if !more_follows
            && self.pending.is_empty()
            && request.test().map_err(|error| error.to_string())?.is_some()
        {
            self.spare.push(copy);
            return Ok(Submitted::Done);
        }
        Ok(self.add_pending(PendingMessage { request, copy: Some(copy) }))
    }

    fn add_pending(&mut self, message: PendingMessage) -> Submitted {
        self.pending.push_back(message);
        self.submitted += 1;
        Submitted::Pending(self.submitted)
    }
}

impl Outgoing for TcpOutgoing {
    fn send(
        &mut self,
        header: &Header,
        payload: Source,
    ) -> std::result::Result<Option<Submitted>, LinkError> {
        if !self.is_open()? {
            return Ok(None);
        }
        if !self.pending.is_empty() {
            self.completed()?;
        }
        if self.pending.len() + 2 > MAX_REQUESTS {
            return Ok(None);
        }
        let mut copy = self.spare.pop().unwrap_or_default();
        copy.clear();
        copy.extend_from_slice(&header.encode());
        if payload.length() <= MAX_INLINE_PAYLOAD {
            payload.append_to(&mut copy);
            return self.send_copy(copy, false).map(Some);
        }
        self.send_copy(copy, true)?;
        let request = self.submit(payload, false)?;
        Ok(Some(self.add_pending(PendingMessage { request, copy: None })))
    }

    fn completed(&mut self) -> std::result::Result<u64, LinkError> {
        while let Some(message) = self.pending.front() {
            if message.request.test().map_err(|error| error.to_string())?.is_none() {
                break;
            }
            if let Some(PendingMessage { copy: Some(copy), .. }) = self.pending.pop_front() {
                self.spare.push(copy);
            }
            self.completed += 1;
        }
        Ok(self.completed)
    }

    fn carried(&self) -> u64 {
        self.connection.as_ref().map_or(0, SendConnection::carried)
    }

    fn close(&mut self) -> bool {
        if let Some(connection) = self.connection.take() {
            self.close_handle = Some(connection.close());
        }
        self.close_handle.as_ref().is_none_or(CloseHandle::is_closed)
    }
}

struct TcpIncoming {
    // Before the memory that is lent to it: fields are dropped in this order.
    connection: RecvConnection,
    /// The buffer for headers and small payloads. Not accessed while `envelope_request` is pending.
    envelope: Vec<u8>,
    envelope_request: Option<Request>,
    /// The header of the message whose payload is received next.
    pending_header: Option<Header>,
    pending: VecDeque<Request>,
    submitted: u64,
    completed: u64,
    is_awaited: bool,
}

impl TcpIncoming {
    /// Posts the receive of the next envelope.
    fn post(&mut self) -> std::result::Result<(), LinkError> {
        if self.envelope_request.is_none() && self.pending_header.is_none() {
            // SAFETY: the bytes of a vector stay where they are when it moves, they are not accessed while the
            // request is pending, and the connection is dropped first.
            let envelope = unsafe { Target::lend(&mut self.envelope) };
            let request = self.connection.recv(envelope.to_recv());
            self.envelope_request = request.map_err(|error| error.to_string())?;
        }
        Ok(())
    }
}

impl Incoming for TcpIncoming {
    fn next_header(&mut self) -> std::result::Result<Option<Header>, LinkError> {
        self.post()?;
        if let Some(request) = &self.envelope_request
            && let Some(bytes) = request.test().map_err(|error| error.to_string())?
        {
            self.envelope_request = None;
            let wrong_protocol = || "it uses another protocol".to_owned();
            let header =
                self.envelope.first_chunk().and_then(Header::decode).ok_or_else(wrong_protocol)?;
            let inline = if header.length <= MAX_INLINE_PAYLOAD as u64 { header.length } else { 0 };
            if bytes != HEADER_BYTES as u64 + inline {
                return Err(wrong_protocol());
            }
            self.pending_header = Some(header);
        }
        Ok(self.pending_header)
    }

    fn receive_payload(&mut self, into: Target) -> std::result::Result<Submitted, LinkError> {
        let Some(header) = self.pending_header.take() else {
            return Err("there is no payload to receive".to_owned());
        };
        let given = if header.length <= MAX_INLINE_PAYLOAD as u64 {
            into.write(&self.envelope[HEADER_BYTES..HEADER_BYTES + header.length as usize]);
            Submitted::Done
        } else {
            let request =
                self.connection.recv(into.to_recv()).map_err(|error| error.to_string())?;
            let Some(request) = request else {
                self.pending_header = Some(header);
                return Err("the transport takes no more buffers".to_owned());
            };
            self.pending.push_back(request);
            self.submitted += 1;
            Submitted::Pending(self.submitted)
        };
        // The next message may have arrived already. If the connection failed, the next call reports it: this one has its message.
        let _ = self.post();
        Ok(given)
    }

    fn completed(&mut self) -> std::result::Result<u64, LinkError> {
        let before = self.completed;
        while let Some(request) = self.pending.front() {
            match request.test() {
                Ok(Some(_)) => self.completed += 1,
                Err(error) if self.completed == before => return Err(error.to_string()),
                Ok(None) | Err(_) => break,
            }
            self.pending.pop_front();
        }
        Ok(self.completed)
    }

    fn carried(&self) -> u64 {
        self.connection.carried()
    }

    fn set_awaited(&mut self, is_awaited: bool) {
        if std::mem::replace(&mut self.is_awaited, is_awaited) != is_awaited {
            self.connection.set_awaited(is_awaited);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::thread;

    use super::*;
    use crate::links::link::{Key, Kind};
    use crate::test_support::TEST_TIMEOUT;

    fn endpoint() -> TcpEndpoint {
        let tcp = Tcp::on(LOOPBACK).unwrap();
        let listener = tcp.network.listen(tcp.device, "", MemoryTypes::HOST).unwrap();
        TcpEndpoint { tcp, listener, notified: None }
    }

    #[test]
    fn rdma_port_is_set_for_the_transport() {
        let set = |name: &str, gid_index| {
            rdma_port_setting("mlx5_1", 2, gid_index)(name, Some("7".to_owned()))
        };
        for (name, gid_index, value) in [
            ("EVENKEEL_TRANSPORT", None, "rdma"),
            ("NCCL_IB_HCA", None, "=mlx5_1:2"),
            ("NCCL_IB_GID_INDEX", Some(3), "3"),
            ("NCCL_IB_GID_INDEX", None, "7"),
            ("EVENKEEL_FLOWS", None, "7"),
        ] {
            assert_eq!(set(name, gid_index).as_deref(), Some(value), "{name}");
        }
        for wrong in ["", "mlx5_1:2", "mlx5_0,mlx5_1"] {
            let error = Tcp::over_rdma_port(wrong, 1, None).map(drop).unwrap_err().to_string();
            assert!(error.contains(&format!("{wrong:?} is not")), "{error}");
        }
    }

    #[test]
    fn tcp_links_keep_their_paths() {
        let endpoint = endpoint();
        let mut dialer = Dialer::start(&endpoint.tcp, &endpoint.address()).unwrap();
        let deadline = Instant::now() + TEST_TIMEOUT;
        let mut accepted = None;
        let connection = loop {
            accepted = accepted.or_else(|| endpoint.listener.poll_accept().unwrap());
            if let Some(connection) = dialer.poll().unwrap() {
                break connection;
            }
            assert!(Instant::now() < deadline, "no connection");
            thread::yield_now();
        };
        assert!(connection.keeps_paths());
    }

    /// A busy rank drops connections that it has not accepted yet.
    #[test]
    fn tcp_link_dials_a_busy_rank_again() {
        let (rank, other) = (endpoint(), endpoint());
        let busy = TcpListener::bind((rank.ip(), 0)).unwrap();
        let mut handle = rank.listener.handle().clone();
        let port = std::mem::replace(&mut handle.port, busy.local_addr().unwrap().port());
        let ip = rank.ip();
        thread::spawn(move || {
            (0..2).for_each(|_| drop(busy.accept().unwrap()));
            let from = busy.accept().unwrap().0;
            let to = TcpStream::connect((ip, port)).unwrap();
            let (mut back_from, mut back_to) = (to.try_clone().unwrap(), from.try_clone().unwrap());
            thread::spawn(move || std::io::copy(&mut back_from, &mut back_to));
            std::io::copy(&mut { from }, &mut { to })
        });
        let deadline = Instant::now() + TEST_TIMEOUT;
        let mut link = other.connect(&handle.encode()).unwrap().unwrap();
        let key = Key { kind: Kind::Hello, group: 1, tag: 2, sequence: 3, part: 4, operation: 0 };
        let (mut incoming, mut sent) = (None, None);
        let received = loop {
            assert!(Instant::now() < deadline, "no message");
            sent = match sent {
                None => link.send(&Header { key, length: 0 }, Source::EMPTY).unwrap(),
                sent => sent,
            };
            incoming = incoming.or_else(|| rank.accept().unwrap());
            if let Some(incoming) = &mut incoming
                && let Some(received) = incoming.next_header().unwrap()
            {
                break received;
            }
            thread::yield_now();
        };
        assert_eq!(received.key, key);
    }
}
