//! Links over TCP with TLS 1.3: encrypted, and both sides authenticate with a certificate of the group's authority.
//!
//! Each link is one TCP connection. The sending rank connects. A thread of the receiving rank accepts it after the handshake
//! (`acceptor`). From then on callers move the bytes themselves, as through shared memory.

mod acceptor;
mod certificates;
mod stream;

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use evenkeel_transport::keep_from_children;
use rustix::event::{Timespec, epoll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, Connection};

use crate::accept::{listen, ports};
use crate::error::{Error, Result};
use crate::links::link::{
    Endpoint, HEADER_BYTES, Header, Incoming, LinkError, Outgoing, Submitted,
};
use crate::links::tcp::Tcp;
use crate::memory::{Source, Target};
use acceptor::Acceptor;
use certificates::Certificates;
use stream::Stream;

/// Maximum number of messages that wait for room in a connection.
const MAX_WAITING: usize = 32;
/// How long a thread sleeps when another one already sleeps on the endpoint.
const SHORT_SLEEP: Duration = Duration::from_millis(1);

/// This process's network, with TLS.
#[derive(Clone)]
pub struct Tls {
    tcp: Tcp,
    certificates: Certificates,
}

impl Tls {
    /// TLS over the interface of `tcp`. The certificate and its key are PEM files. The certificates of the authority that signs the
    /// certificates of all ranks are in a PEM file or in the files of a folder.
    ///
    /// Every process with a certificate of this authority is accepted, whatever the name in the certificate.
    ///
    /// # Errors
    /// Names the file that cannot be used, and why.
    pub fn new(tcp: Tcp, certificate: &Path, key: &Path, authority: &Path) -> Result<Self> {
        Ok(Self { tcp, certificates: Certificates::read(certificate, key, authority)? })
    }

    /// TLS over the interface of `tcp`, with the files that the environment names: `EVENKEEL_TLS_CERT`, `EVENKEEL_TLS_KEY` and
    /// `EVENKEEL_TLS_CA`.
    ///
    /// # Errors
    /// Names the variable that is not set; as [`Tls::new`].
    pub fn from_env(tcp: Tcp) -> Result<Self> {
        Self::from_lookup(tcp, |name| std::env::var_os(name).map(PathBuf::from))
    }

    fn from_lookup(tcp: Tcp, lookup: impl Fn(&str) -> Option<PathBuf>) -> Result<Self> {
        let file = |name: &str, what: &str| {
            let found = lookup(name).filter(|path| !path.as_os_str().is_empty());
            found.ok_or_else(|| Error::argument(format!("TLS: {name} is not set: {what}")))
        };
        let certificate = file("EVENKEEL_TLS_CERT", "the PEM file with this rank's certificate")?;
        let key = file("EVENKEEL_TLS_KEY", "the PEM file with the certificate's key")?;
        let authority = file(
            "EVENKEEL_TLS_CA",
            "the PEM file, or a folder of them, with the certificates of the authority that signs all ranks'",
        )?;
        Self::new(tcp, &certificate, &key, &authority)
    }

    /// The interface in use.
    pub fn device(&self) -> &str {
        self.tcp.device()
    }

    pub(crate) fn endpoint(&self) -> Result<Box<dyn Endpoint>> {
        let host = self.tcp.ip();
        let failed = |error: std::io::Error| Error::system("TLS", error);
        let listener = ports().and_then(|ports| listen(host, ports.as_ref())).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let acceptor =
            Acceptor::open(listener, Arc::clone(&self.certificates.server)).map_err(failed)?;
        let events =
            epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| failed(error.into()))?;
        let endpoint = TlsEndpoint {
            certificates: self.certificates.clone(),
            address,
            acceptor,
            events,
            sleeping: Mutex::default(),
        };
        endpoint.watch(endpoint.acceptor.accepted_event()).map_err(failed)?;
        Ok(Box::new(endpoint))
    }
}

struct TlsEndpoint {
    certificates: Certificates,
    address: SocketAddr,
    acceptor: Acceptor,
    /// An epoll instance with every socket and event that a sleeping thread may wait for, edge-triggered.
    events: OwnedFd,
    /// Held by the thread that sleeps on `events`.
    sleeping: Mutex<()>,
}

impl TlsEndpoint {
    fn watch(&self, what: impl AsFd) -> std::io::Result<()> {
        let all = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP;
        let data = epoll::EventData::new_u64(0);
        Ok(epoll::add(&self.events, what, data, all | epoll::EventFlags::ET)?)
    }

    fn dial(&self, to: SocketAddr) -> std::io::Result<TcpStream> {
        let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(family, SocketType::STREAM, flags, None)?;
        keep_from_children(&socket);
        if self.address.is_ipv4() == to.is_ipv4() {
            bind(&socket, &SocketAddr::new(self.address.ip(), 0))?;
        }
        match connect(&socket, &to) {
            Ok(()) | Err(rustix::io::Errno::INPROGRESS) => {}
            Err(error) => return Err(error.into()),
        }
        let socket = TcpStream::from(socket);
        socket.set_nodelay(true)?;
        Ok(socket)
    }
}

impl Endpoint for TlsEndpoint {
    fn address(&self) -> Vec<u8> {
        self.address.to_string().into_bytes()
    }

    fn ip(&self) -> IpAddr {
        self.address.ip()
    }

    fn connect(&self, address: &[u8]) -> Result<Option<Box<dyn Outgoing>>> {
        let to: Option<SocketAddr> =
            std::str::from_utf8(address).ok().and_then(|text| text.parse().ok());
        let to = to.ok_or_else(|| Error::argument("the address is not that of a rank on TLS"))?;
        let failed = |error: std::io::Error| Error::system("TLS", error);
        let socket = self.dial(to).map_err(failed)?;
        self.watch(&socket).map_err(failed)?;
        let client = Arc::clone(&self.certificates.client);
        let session = ClientConnection::new(client, ServerName::from(to.ip()))
            .map_err(|error| Error::system("TLS", error))?;
        Ok(Some(Box::new(TlsOutgoing {
            stream: Stream::new(socket, Connection::Client(session)),
            open: false,
            waiting: VecDeque::new(),
            submitted: 0,
            carried: 0,
            close_sent: false,
        })))
    }

    fn accept(&self) -> Result<Option<Box<dyn Incoming>>> {
        let Some(stream) = self.acceptor.accept() else { return Ok(None) };
        self.watch(&stream).map_err(|error| Error::system("TLS", error))?;
        Ok(Some(Box::new(TlsIncoming {
            stream,
            header: [0; HEADER_BYTES],
            header_received: 0,
            receiving: None,
            submitted: 0,
            completed: 0,
            carried: 0,
        })))
    }

    fn sleep(&self, time: Duration, is_ready: &mut dyn FnMut() -> bool) {
        // Events after this check end the wait below.
        if is_ready() {
            return;
        }
        let Ok(_listening) = self.sleeping.try_lock() else {
            std::thread::sleep(time.min(SHORT_SLEEP));
            return;
        };
        let time = Timespec::try_from(time).unwrap_or_default();
        let mut events = [std::mem::MaybeUninit::<epoll::Event>::uninit(); 16];
        // An interrupted or failed wait is a short one: the caller polls again.
        let _ = epoll::wait(&self.events, &mut events, Some(&time));
    }
}

struct TlsOutgoing {
    stream: Stream,
    /// The other side has accepted the certificate.
    open: bool,
    /// Messages that the socket has not taken completely.
    waiting: VecDeque<Waiting>,
    submitted: u64,
    /// Bytes of payloads that the session has taken.
    carried: u64,
    close_sent: bool,
}

struct Waiting {
    header: [u8; HEADER_BYTES],
    payload: Source,
    /// Bytes of header and payload that the session has taken.
    at: usize,
}

impl Waiting {
    fn is_buffered(&self) -> bool {
        self.at == HEADER_BYTES + self.payload.length()
    }
}

impl TlsOutgoing {
    /// Whether messages can be sent.
    fn is_open(&mut self) -> std::result::Result<bool, LinkError> {
        if !self.open && self.stream.handshake()? {
            let mut welcome = [0];
            // SAFETY: the borrow outlives the call.
            self.open = self.stream.receive(unsafe { Target::lend(&mut welcome) })? > 0;
        }
        Ok(self.open)
    }

    /// Writes as much as the session and the socket take.
    fn make_progress(&mut self) -> std::result::Result<(), LinkError> {
        loop {
            for next in &mut self.waiting {
                if next.at < HEADER_BYTES {
                    // SAFETY: the borrow outlives the call, which copies.
                    let rest = unsafe { Source::lend(&next.header[next.at..]) };
                    next.at += self.stream.send(rest)?;
                }
                if next.at >= HEADER_BYTES {
                    let from = next.at - HEADER_BYTES;
                    let rest = next.payload.part(from, next.payload.length() - from);
                    let taken = self.stream.send(rest)?;
                    next.at += taken;
                    self.carried += taken as u64;
                }
                if !next.is_buffered() {
                    break;
                }
            }
            if !self.stream.flush()? {
                return Ok(());
            }
            // The socket has taken everything that the session had.
            while self.waiting.front().is_some_and(Waiting::is_buffered) {
                self.waiting.pop_front();
            }
            if self.waiting.is_empty() {
                return Ok(());
            }
        }
    }
}

impl Outgoing for TlsOutgoing {
    fn send(
        &mut self,
        header: &Header,
        payload: Source,
    ) -> std::result::Result<Option<Submitted>, LinkError> {
        if !self.is_open()? || self.waiting.len() >= MAX_WAITING {
            return Ok(None);
        }
        self.waiting.push_back(Waiting { header: header.encode(), payload, at: 0 });
        self.submitted += 1;
        self.make_progress()?;
        Ok(Some(if self.waiting.is_empty() {
            Submitted::Done
        } else {
            Submitted::Pending(self.submitted)
        }))
    }

    fn completed(&mut self) -> std::result::Result<u64, LinkError> {
        if !self.waiting.is_empty() {
            self.make_progress()?;
        }
        Ok(self.submitted - self.waiting.len() as u64)
    }

    fn carried(&self) -> u64 {
        self.carried
    }

    fn close(&mut self) -> bool {
        if !std::mem::replace(&mut self.close_sent, true) && self.waiting.is_empty() {
            self.stream.send_close_notify();
        }
        // What the socket has taken arrives without this process.
        self.make_progress().is_err() || !self.stream.is_full() && self.waiting.is_empty()
    }
}

struct TlsIncoming {
    stream: Stream,
    header: [u8; HEADER_BYTES],
    /// Bytes of the header that have been received.
    header_received: usize,
    /// The memory for a payload, and how many bytes have been received.
    receiving: Option<(Target, usize)>,
    submitted: u64,
    completed: u64,
    /// Bytes of payloads received.
    carried: u64,
}

impl TlsIncoming {
    fn make_progress(&mut self) -> std::result::Result<(), LinkError> {
        while let Some((into, at)) = self.receiving {
            if at == into.length() {
                self.receiving = None;
                self.completed += 1;
                break;
            }
            let bytes = self.stream.receive(into.part(at, into.length() - at))?;
            if bytes == 0 {
                break;
            }
            self.receiving = Some((into, at + bytes));
            self.carried += bytes as u64;
        }
        Ok(())
    }
}

impl Incoming for TlsIncoming {
    fn next_header(&mut self) -> std::result::Result<Option<Header>, LinkError> {
        self.make_progress()?;
        if self.receiving.is_some() {
            return Ok(None);
        }
        while self.header_received < HEADER_BYTES {
            // SAFETY: the borrow outlives the call.
            let rest = unsafe { Target::lend(&mut self.header[self.header_received..]) };
            match self.stream.receive(rest)? {
                0 => return Ok(None),
                bytes => self.header_received += bytes,
            }
        }
        Header::decode(&self.header).map(Some).ok_or_else(|| "it uses another protocol".to_owned())
    }

    fn receive_payload(&mut self, into: Target) -> std::result::Result<Submitted, LinkError> {
        self.header_received = 0;
        self.submitted += 1;
        self.receiving = Some((into, 0));
        self.make_progress()?;
        Ok(Submitted::Pending(self.submitted))
    }

    fn completed(&mut self) -> std::result::Result<u64, LinkError> {
        self.make_progress()?;
        Ok(self.completed)
    }

    fn carried(&self) -> u64 {
        self.carried
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::{Authority, TEST_TIMEOUT};
    use crate::{ErrorKind, Group, MemoryStore, TransportKind};
    use std::io::{Read, Write};
    use std::thread;

    /// Certificates of one authority, with different names, are covered by every test that runs over all transports.
    #[test]
    fn tls_refuses_certificate_of_another_authority() {
        let (ours, others) = (Authority::new("ours"), Authority::new("theirs"));
        let (certificate, key) = others.sign("untrusted");
        // It trusts the other ranks, which do not trust it.
        let untrusted = Tls::new(Tcp::on("lo").unwrap(), &certificate, &key, &ours.file()).unwrap();
        for (zero, one) in [(ours.tls("zero"), others.tls("one")), (ours.tls("zero"), untrusted)] {
            let store = MemoryStore::new();
            let join = |rank: usize, tls: Tls| {
                let error =
                    Group::join(&store, rank, 2, &TransportKind::Tls(tls), TEST_TIMEOUT).map(drop);
                error.unwrap_err()
            };
            let errors = thread::scope(|scope| {
                let one = scope.spawn(|| join(1, one));
                [join(0, zero), one.join().unwrap()]
            });
            let messages = errors.each_ref().map(ToString::to_string);
            // One of the two sides notices first.
            let says = ["is not signed by", "refuses this rank's certificate"];
            let named = |text: &String| says.iter().any(|why| text.contains(why));
            assert!(messages.iter().any(named), "{messages:?}");
            for error in &errors {
                assert!(
                    !error.is_group_usable() && error.kind() == ErrorKind::Lost,
                    "{messages:?}"
                );
            }
        }
    }

    #[test]
    fn unusable_tls_files_are_named() {
        let (ours, others) = (Authority::new("ours"), Authority::new("theirs"));
        let (certificate, key) = ours.sign("rank");
        let (_, other_key) = others.sign("rank");
        let nowhere = Path::new("/nowhere.pem");
        for (certificate, key, authority, says) in [
            (nowhere, &*key, &*ours.file(), "/nowhere.pem"),
            (&*certificate, nowhere, &*ours.file(), "/nowhere.pem"),
            (&*certificate, &*key, nowhere, "/nowhere.pem"),
            (&*certificate, &*certificate, &*ours.file(), "rank.pem"),
            (&*key, &*key, &*ours.file(), "no certificate in it"),
            (&*certificate, &*other_key, &*ours.file(), "rank.key"),
        ] {
            let tls = Tls::new(Tcp::on("lo").unwrap(), certificate, key, authority);
            let error = tls.map(drop).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Argument, "{error}");
            assert!(error.to_string().contains(says), "{error}");
        }
        // A folder of certificates is an authority too.
        let folder = ours.file().parent().unwrap().to_owned();
        std::fs::remove_file(&key).unwrap();
        std::fs::remove_file(folder.join("rank.pem")).unwrap();
        let (certificate, key) = others.sign("other");
        assert!(Tls::new(Tcp::on("lo").unwrap(), &certificate, &key, &folder).is_ok());
    }

    #[test]
    fn tls_files_come_from_the_environment() {
        let ours = Authority::new("ours");
        let (certificate, key) = ours.sign("rank");
        let files = [
            ("EVENKEEL_TLS_CERT", certificate),
            ("EVENKEEL_TLS_KEY", key),
            ("EVENKEEL_TLS_CA", ours.file()),
        ];
        let without = |missing: &str| {
            let found = |name: &str| files.iter().find(|(known, _)| *known == name);
            Tls::from_lookup(Tcp::on("lo").unwrap(), |name| {
                Some(if name == missing { PathBuf::new() } else { found(name)?.1.clone() })
            })
        };
        assert!(without("nothing").is_ok());
        for (missing, _) in &files {
            let error = without(missing).map(drop).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Argument, "{error}");
            assert!(error.to_string().contains(&format!("{missing} is not set")), "{error}");
        }
    }

    /// Connections without TLS are dropped, and do not keep ranks from connecting.
    #[test]
    fn unauthenticated_tls_connections_are_dropped() {
        let endpoint = Authority::new("ours").tls("rank").endpoint().unwrap();
        let address = String::from_utf8(endpoint.address()).unwrap();
        let mut silent = vec![];
        for _ in 0..300 {
            silent.push(TcpStream::connect(&address).unwrap());
        }
        let mut garbage = TcpStream::connect(&address).unwrap();
        garbage.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        garbage.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let mut answer = vec![];
        // An alert, or an end.
        let _ = garbage.read_to_end(&mut answer);
        assert!(endpoint.accept().unwrap().is_none());
    }
}
