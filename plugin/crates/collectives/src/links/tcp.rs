//! Links over Evenkeel's TCP transport.
//!
//! A small message is one message of the transport: head and payload together, which the transport copies and the receiver
//! reads into a room of its own. Of a large one the head goes first, so that the receiver knows where the payload, a message of
//! its own, belongs: nothing large is copied.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use evenkeel_transport::{
    Connecting, ErrorKind as TransportErrorKind, Farewell, HANDLE_BYTES, Handle, Listener, Log,
    MAX_REQUESTS, MemoryTypes, Notify, RecvConnection, Request, SendConnection, Settings,
};

use crate::error::{Error, Result};
use crate::links::link::{
    Endpoint, HEADER_BYTES, Header, Incoming, LinkError, Outgoing, Submitted,
};
use crate::memory::{Source, Target};

/// The longest message of the transport that brings its payload with it: what the transport writes and reads inline.
const TOGETHER: usize = 16 << 10;
/// The longest such payload.
const SMALL: usize = TOGETHER - HEADER_BYTES;

/// The interface whose ranks are all on this host.
const LOOPBACK: &str = "lo";
/// What the transport copies there, so that a sender need not wait until its peer says that it has it. Measured: longer ones
/// take longer to be copied than that takes.
const LOOPBACK_INLINE: usize = 128 << 10;
/// What it takes at once there: a whole piece of an operation.
const LOOPBACK_CHUNK: usize = 1 << 20;

/// What goes wrong is told by the calls; what else happens to connections is in the transport's metrics.
struct Silence;

impl Log for Silence {
    fn warn(&self, _: &str) {}
    fn info(&self, _: &str) {}
}

/// This process's network, for all groups of the process.
///
/// Many flows for each pair of ranks, a few threads for all pairs; set by the environment variables that set the NCCL plugin. As there,
/// RDMA carries what goes between two ranks that both have it.
#[derive(Clone)]
pub struct Tcp {
    network: Arc<evenkeel_transport::Transport>,
    device: usize,
}

impl Tcp {
    /// Opens the network as the environment says.
    ///
    /// # Errors
    /// Names the variable that has no valid value, or says that there is no interface to use.
    pub fn from_env() -> Result<Self> {
        Self::open(|_, said| said, false)
    }

    /// Opens the network as the environment says, but over this interface, such as `lo`.
    ///
    /// # Errors
    /// As [`Tcp::from_env`].
    pub fn on(interface: &str) -> Result<Self> {
        let value = |name: &str, said: Option<String>| match name {
            "NCCL_SOCKET_IFNAME" => Some(format!("={interface}")),
            // There is one path only, and nothing to be fair to: more flows would only cost more.
            "EVENKEEL_FLOWS" if interface == LOOPBACK => said.or_else(|| Some("1".to_owned())),
            "EVENKEEL_INLINE_BYTES" if interface == LOOPBACK => {
                said.or_else(|| Some(LOOPBACK_INLINE.to_string()))
            }
            "EVENKEEL_CHUNK_BYTES" if interface == LOOPBACK => {
                said.or_else(|| Some(LOOPBACK_CHUNK.to_string()))
            }
            // Who names an interface does not mean an RDMA port.
            "EVENKEEL_TRANSPORT" => Some("tcp".to_owned()),
            _ => said,
        };
        Self::open(value, interface == LOOPBACK)
    }

    /// Opens the network as the environment says, but only if there is RDMA.
    ///
    /// # Errors
    /// As [`Tcp::from_env`]; when there is no RDMA port that can be used.
    pub fn over_rdma() -> Result<Self> {
        let value = |name: &str, said| match name {
            "EVENKEEL_TRANSPORT" => Some("rdma".to_owned()),
            _ => said,
        };
        Self::open(value, false)
    }

    /// Opens the network with these values of settings, given their names and what the environment says. `together`: all ranks
    /// share the processors of this host, and whoever waits for bytes moves them.
    fn open(
        value: impl Fn(&str, Option<String>) -> Option<String>,
        together: bool,
    ) -> Result<Self> {
        let mut settings = Settings::from_lookup(|name| {
            let said = std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
            value(name, said)
        })
        .map_err(|error| Error::argument(error.to_string()))?;
        if together {
            settings.callers_move(u64::MAX);
        }
        let network = evenkeel_transport::Transport::new(settings, Arc::new(Silence))
            .map_err(|error| Error::system("network", error))?;
        Ok(Self { network: Arc::new(network), device: 0 })
    }

    /// The interface in use.
    pub fn device(&self) -> &str {
        self.network.devices().get(self.device).map_or("", |device| device.name())
    }

    /// The interface's address.
    pub(crate) fn ip(&self) -> IpAddr {
        let device = self.network.devices().get(self.device);
        let first = device.and_then(|device| device.addresses().first().copied());
        first.unwrap_or_else(|| Ipv4Addr::LOCALHOST.into())
    }

    /// `notified` hears of all that those who sleep elsewhere than here may wait for.
    pub(crate) fn endpoint(&self, notified: Option<Arc<dyn Notify>>) -> Result<Box<dyn Endpoint>> {
        let listener = self.network.listen(self.device, "collectives", MemoryTypes::HOST);
        let listener = listener.map_err(|error| Error::system("network", error))?;
        Ok(Box::new(TcpEndpoint { tcp: self.clone(), listener, notified }))
    }
}

struct TcpEndpoint {
    tcp: Tcp,
    listener: Listener,
    notified: Option<Arc<dyn Notify>>,
}

impl TcpEndpoint {
    /// Begins to connect to the rank that listens at this address.
    fn call(&self, address: &[u8]) -> Result<Connecting> {
        let wrong = || Error::argument("the address is not that of a rank on TCP");
        let address: &[u8; HANDLE_BYTES] = address.try_into().map_err(|_| wrong())?;
        let handle = Handle::decode(address).map_err(|_| wrong())?;
        // A link goes at the pace of the group's slowest rank.
        let network = &self.tcp.network;
        let connecting = network.try_connect(self.tcp.device, &handle, "collectives", usize::MAX);
        connecting.map_err(|error| Error::system("network", error))
    }
}

impl Endpoint for TcpEndpoint {
    fn address(&self) -> Vec<u8> {
        self.listener.handle().encode().to_vec()
    }

    fn host(&self) -> IpAddr {
        let first = self.listener.handle().addresses.first().copied();
        first.unwrap_or_else(|| Ipv4Addr::LOCALHOST.into())
    }

    fn connect(&self, address: &[u8]) -> Result<Option<Box<dyn Outgoing>>> {
        Ok(Some(Box::new(TcpOutgoing {
            connection: None,
            connecting: Some(self.call(address)?),
            notified: self.notified.clone(),
            farewell: None,
            loans: VecDeque::new(),
            spare: vec![],
            lent: 0,
            finished: 0,
        })))
    }

    fn accept(&self) -> Result<Option<Box<dyn Incoming>>> {
        match self.listener.poll_accept() {
            Ok(None) => Ok(None),
            Ok(Some(connection)) => {
                if let Some(notified) = &self.notified {
                    connection.notify(Arc::clone(notified));
                }
                Ok(Some(Box::new(TcpIncoming {
                    connection,
                    room: vec![0; TOGETHER],
                    envelope: None,
                    current: None,
                    loans: VecDeque::new(),
                    lent: 0,
                    finished: 0,
                })))
            }
            // It has waited long for somebody to come; operations have deadlines of their own.
            Err(error) if error.kind() == TransportErrorKind::Remote => Ok(None),
            Err(error) => Err(Error::system("network", error)),
        }
    }

    fn sleep(&self, time: Duration, look: &mut dyn FnMut() -> bool) {
        evenkeel_transport::wait_for(time, || look().then_some(()));
    }
}

/// A message that the transport has.
struct Loan {
    request: Request,
    /// Its bytes, where they are ours.
    copy: Option<Vec<u8>>,
}

struct TcpOutgoing {
    // In front of what is lent to it: it is dropped first.
    connection: Option<SendConnection>,
    connecting: Option<Connecting>,
    notified: Option<Arc<dyn Notify>>,
    farewell: Option<Farewell>,
    loans: VecDeque<Loan>,
    spare: Vec<Vec<u8>>,
    lent: u64,
    finished: u64,
}

impl TcpOutgoing {
    /// Whether there is a connection.
    fn is_open(&mut self) -> std::result::Result<bool, LinkError> {
        if let Some(connecting) = &self.connecting
            && let Some(connection) = connecting.poll().map_err(|error| error.to_string())?
        {
            if let Some(notified) = self.notified.take() {
                connection.notify(notified);
            }
            self.connection = Some(connection);
            self.connecting = None;
        }
        Ok(self.connection.is_some())
    }

    /// `ahead`: another one follows at once.
    fn give(&self, bytes: Source, ahead: bool) -> std::result::Result<Request, LinkError> {
        let connection = self.connection.as_ref().ok_or("not connected")?;
        let send = if ahead { SendConnection::send_ahead } else { SendConnection::send };
        let request = send(connection, bytes.to_send()).map_err(|error| error.to_string())?;
        // There was room when it was looked for.
        request.ok_or_else(|| "the transport takes no more messages".to_owned())
    }

    /// Sends bytes that are ours. They count as lent until the transport has copied them: a connection that is dropped before
    /// that does not deliver them.
    fn give_copy(
        &mut self,
        copy: Vec<u8>,
        ahead: bool,
    ) -> std::result::Result<Submitted, LinkError> {
        // SAFETY: the bytes of a vector stay where they are when it moves; it is kept until the transport is done with
        // them, or the connection, which is dropped first, is gone.
        let request = self.give(unsafe { Source::lend(&copy) }, ahead)?;
        if !ahead
            && self.loans.is_empty()
            && request.test().map_err(|error| error.to_string())?.is_some()
        {
            self.spare.push(copy);
            return Ok(Submitted::Done);
        }
        Ok(self.lend(Loan { request, copy: Some(copy) }))
    }

    fn lend(&mut self, loan: Loan) -> Submitted {
        self.loans.push_back(loan);
        self.lent += 1;
        Submitted::Pending(self.lent)
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
        if !self.loans.is_empty() {
            self.finished()?;
        }
        if self.loans.len() + 2 > MAX_REQUESTS {
            return Ok(None);
        }
        let mut copy = self.spare.pop().unwrap_or_default();
        copy.clear();
        copy.extend_from_slice(&header.encode());
        if payload.length() <= SMALL {
            payload.append_to(&mut copy);
            return self.give_copy(copy, false).map(Some);
        }
        self.give_copy(copy, true)?;
        let request = self.give(payload, false)?;
        Ok(Some(self.lend(Loan { request, copy: None })))
    }

    fn finished(&mut self) -> std::result::Result<u64, LinkError> {
        while let Some(loan) = self.loans.front() {
            if loan.request.test().map_err(|error| error.to_string())?.is_none() {
                break;
            }
            if let Some(Loan { copy: Some(copy), .. }) = self.loans.pop_front() {
                self.spare.push(copy);
            }
            self.finished += 1;
        }
        Ok(self.finished)
    }

    fn carried(&self) -> u64 {
        self.connection.as_ref().map_or(0, SendConnection::carried)
    }

    fn close(&mut self) -> bool {
        if let Some(connection) = self.connection.take() {
            self.farewell = Some(connection.finish());
        }
        self.farewell.as_ref().is_none_or(Farewell::is_over)
    }
}

struct TcpIncoming {
    // In front of what is lent to it: it is dropped first.
    connection: RecvConnection,
    /// Where heads and small payloads arrive. Not touched while there is an envelope.
    room: Vec<u8>,
    envelope: Option<Request>,
    /// A head that is waiting to be taken.
    current: Option<Header>,
    loans: VecDeque<Request>,
    lent: u64,
    finished: u64,
}

impl TcpIncoming {
    /// Makes room for the next message.
    fn post(&mut self) -> std::result::Result<(), LinkError> {
        if self.envelope.is_none() && self.current.is_none() {
            // SAFETY: the bytes of a vector stay where they are when it moves, nobody touches them while there is an
            // envelope, and the connection is dropped first.
            let room = unsafe { Target::lend(&mut self.room) };
            let envelope = self.connection.recv(room.to_recv());
            self.envelope = envelope.map_err(|error| error.to_string())?;
        }
        Ok(())
    }
}

impl Incoming for TcpIncoming {
    fn next_header(&mut self) -> std::result::Result<Option<Header>, LinkError> {
        self.post()?;
        if let Some(envelope) = &self.envelope
            && let Some(bytes) = envelope.test().map_err(|error| error.to_string())?
        {
            self.envelope = None;
            let garbled = || "it speaks something else".to_owned();
            let header = self.room.first_chunk().and_then(Header::decode).ok_or_else(garbled)?;
            let with_it = if header.length <= SMALL as u64 { header.length } else { 0 };
            if bytes != HEADER_BYTES as u64 + with_it {
                return Err(garbled());
            }
            self.current = Some(header);
        }
        Ok(self.current)
    }

    fn take(&mut self, into: Target) -> std::result::Result<Submitted, LinkError> {
        let Some(header) = self.current.take() else {
            return Err("there is nothing to take".to_owned());
        };
        let given = if header.length <= SMALL as u64 {
            into.write(&self.room[HEADER_BYTES..HEADER_BYTES + header.length as usize]);
            Submitted::Done
        } else {
            let request =
                self.connection.recv(into.to_recv()).map_err(|error| error.to_string())?;
            let Some(request) = request else {
                self.current = Some(header);
                return Err("the transport takes no more buffers".to_owned());
            };
            self.loans.push_back(request);
            self.lent += 1;
            Submitted::Pending(self.lent)
        };
        // The next message may be on its way already. If nothing comes any more, the next call says so: this one has its message.
        let _ = self.post();
        Ok(given)
    }

    fn finished(&mut self) -> std::result::Result<u64, LinkError> {
        let before = self.finished;
        while let Some(request) = self.loans.front() {
            match request.test() {
                Ok(Some(_)) => self.finished += 1,
                Err(error) if self.finished == before => return Err(error.to_string()),
                Ok(None) | Err(_) => break,
            }
            self.loans.pop_front();
        }
        Ok(self.finished)
    }

    fn carried(&self) -> u64 {
        self.connection.carried()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn links_keep_their_paths() {
        let tcp = Tcp::on(LOOPBACK).unwrap();
        let listener = tcp.network.listen(tcp.device, "", MemoryTypes::HOST).unwrap();
        let endpoint = TcpEndpoint { tcp, listener, notified: None };
        let connecting = endpoint.call(&endpoint.address()).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut accepted = None;
        let connection = loop {
            accepted = accepted.or_else(|| endpoint.listener.poll_accept().unwrap());
            if let Some(connection) = connecting.poll().unwrap() {
                break connection;
            }
            assert!(Instant::now() < deadline, "nothing happens");
            std::thread::yield_now();
        };
        assert!(connection.keeps_paths());
    }
}
