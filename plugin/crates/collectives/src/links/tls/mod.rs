//! Links over TCP with TLS 1.3: what goes over them is encrypted, and both sides show a certificate of the group's authority.
//!
//! One TCP connection for each link. The rank that sends connects; a thread of the one that receives lets it in (`acceptor`).
//! After that callers move the bytes themselves, as through shared memory.

mod acceptor;
mod certificates;
mod stream;

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::{Timespec, epoll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, Connection};

use crate::error::{Error, Result};
use crate::links::link::{
    Endpoint, HEADER_BYTES, Header, Incoming, LinkError, Outgoing, Submitted,
};
use crate::links::tcp::Tcp;
use crate::memory::{Source, Target};
use acceptor::Acceptor;
use certificates::Certificates;
use stream::Stream;

/// Most messages that wait for room in a connection.
const MAX_WAITING: usize = 32;
/// Others that sleep on an endpoint where somebody sleeps already.
const SHORT_SLEEP: Duration = Duration::from_millis(1);

/// This process's network, encrypted.
#[derive(Clone)]
pub struct Tls {
    tcp: Tcp,
    certificates: Certificates,
}

impl Tls {
    /// Over the interface of `tcp`, with the certificate in a PEM file, its key in another, and the certificates of the
    /// authority that signs everybody's in a third one or in the files of a folder.
    ///
    /// Whoever has a certificate of this authority is let in, whatever the name in it.
    ///
    /// # Errors
    /// Names the file that cannot be used, and why.
    pub fn new(tcp: Tcp, certificate: &Path, key: &Path, authority: &Path) -> Result<Self> {
        Ok(Self { tcp, certificates: Certificates::read(certificate, key, authority)? })
    }

    /// Over the interface of `tcp`, with the files that the environment names: `EVENKEEL_TLS_CERT`, `EVENKEEL_TLS_KEY` and
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
        let listener = TcpListener::bind((host, 0)).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let acceptor =
            Acceptor::open(listener, Arc::clone(&self.certificates.server)).map_err(failed)?;
        let waits =
            epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| failed(error.into()))?;
        let endpoint = TlsEndpoint {
            certificates: self.certificates.clone(),
            address,
            acceptor,
            waits,
            listening: Mutex::default(),
        };
        endpoint.watch(endpoint.acceptor.accepted_event()).map_err(failed)?;
        Ok(Box::new(endpoint))
    }
}

struct TlsEndpoint {
    certificates: Certificates,
    address: SocketAddr,
    acceptor: Acceptor,
    /// Everything that a sleeper may wait for, told of once for each change.
    waits: OwnedFd,
    /// Held by who sleeps there.
    listening: Mutex<()>,
}

impl TlsEndpoint {
    fn watch(&self, what: impl AsFd) -> std::io::Result<()> {
        let all = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP;
        let data = epoll::EventData::new_u64(0);
        Ok(epoll::add(&self.waits, what, data, all | epoll::EventFlags::ET)?)
    }

    fn call(&self, to: SocketAddr) -> std::io::Result<TcpStream> {
        let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(family, SocketType::STREAM, flags, None)?;
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

    fn host(&self) -> IpAddr {
        self.address.ip()
    }

    fn connect(&self, address: &[u8]) -> Result<Option<Box<dyn Outgoing>>> {
        let to: Option<SocketAddr> =
            std::str::from_utf8(address).ok().and_then(|text| text.parse().ok());
        let to = to.ok_or_else(|| Error::argument("the address is not that of a rank on TLS"))?;
        let failed = |error: std::io::Error| Error::system("TLS", error);
        let socket = self.call(to).map_err(failed)?;
        self.watch(&socket).map_err(failed)?;
        let client = Arc::clone(&self.certificates.client);
        let session = ClientConnection::new(client, ServerName::from(to.ip()))
            .map_err(|error| Error::system("TLS", error))?;
        Ok(Some(Box::new(TlsOutgoing {
            stream: Stream::new(socket, Connection::Client(session)),
            open: false,
            waiting: VecDeque::new(),
            lent: 0,
            carried: 0,
            left: false,
        })))
    }

    fn accept(&self) -> Result<Option<Box<dyn Incoming>>> {
        let Some(stream) = self.acceptor.accept() else { return Ok(None) };
        self.watch(&stream).map_err(|error| Error::system("TLS", error))?;
        Ok(Some(Box::new(TlsIncoming {
            stream,
            header: [0; HEADER_BYTES],
            have: 0,
            taking: None,
            lent: 0,
            finished: 0,
            carried: 0,
        })))
    }

    fn sleep(&self, time: Duration, look: &mut dyn FnMut() -> bool) {
        // What happens after this look is told.
        if look() {
            return;
        }
        let Ok(_listening) = self.listening.try_lock() else {
            std::thread::sleep(time.min(SHORT_SLEEP));
            return;
        };
        let time = Timespec::try_from(time).unwrap_or_default();
        let mut events = [std::mem::MaybeUninit::<epoll::Event>::uninit(); 16];
        // An interrupted or failed wait is a short one: who sleeps looks again.
        let _ = epoll::wait(&self.waits, &mut events, Some(&time));
    }
}

struct TlsOutgoing {
    stream: Stream,
    /// The other side has let this one in.
    open: bool,
    /// What is not with the socket yet, and how much of head and payload the session has.
    waiting: VecDeque<Waiting>,
    lent: u64,
    /// Bytes of payloads that the session has taken.
    carried: u64,
    left: bool,
}

struct Waiting {
    header: [u8; HEADER_BYTES],
    payload: Source,
    at: usize,
}

impl Waiting {
    fn is_given(&self) -> bool {
        self.at == HEADER_BYTES + self.payload.length()
    }
}

impl TlsOutgoing {
    /// Whether messages can be sent.
    fn is_open(&mut self) -> std::result::Result<bool, LinkError> {
        if !self.open && self.stream.shake_hands()? {
            let mut welcome = [0];
            // SAFETY: the borrow outlives the call.
            self.open = self.stream.receive(unsafe { Target::lend(&mut welcome) })? > 0;
        }
        Ok(self.open)
    }

    /// Moves on what can move.
    fn pump(&mut self) -> std::result::Result<(), LinkError> {
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
                if !next.is_given() {
                    break;
                }
            }
            if !self.stream.flush()? {
                return Ok(());
            }
            // The socket has all that the session had.
            while self.waiting.front().is_some_and(Waiting::is_given) {
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
        self.lent += 1;
        self.pump()?;
        Ok(Some(if self.waiting.is_empty() {
            Submitted::Done
        } else {
            Submitted::Pending(self.lent)
        }))
    }

    fn finished(&mut self) -> std::result::Result<u64, LinkError> {
        if !self.waiting.is_empty() {
            self.pump()?;
        }
        Ok(self.lent - self.waiting.len() as u64)
    }

    fn carried(&self) -> u64 {
        self.carried
    }

    fn close(&mut self) -> bool {
        if !std::mem::replace(&mut self.left, true) && self.waiting.is_empty() {
            self.stream.say_goodbye();
        }
        // With the socket, it comes without this process.
        self.pump().is_err() || !self.stream.is_full() && self.waiting.is_empty()
    }
}

struct TlsIncoming {
    stream: Stream,
    header: [u8; HEADER_BYTES],
    /// Bytes of it that are there.
    have: usize,
    /// Where a payload goes, and how much of it is there.
    taking: Option<(Target, usize)>,
    lent: u64,
    finished: u64,
    /// Bytes of payloads.
    carried: u64,
}

impl TlsIncoming {
    fn pump(&mut self) -> std::result::Result<(), LinkError> {
        while let Some((into, at)) = self.taking {
            if at == into.length() {
                self.taking = None;
                self.finished += 1;
                break;
            }
            let bytes = self.stream.receive(into.part(at, into.length() - at))?;
            if bytes == 0 {
                break;
            }
            self.taking = Some((into, at + bytes));
            self.carried += bytes as u64;
        }
        Ok(())
    }
}

impl Incoming for TlsIncoming {
    fn next_header(&mut self) -> std::result::Result<Option<Header>, LinkError> {
        self.pump()?;
        if self.taking.is_some() {
            return Ok(None);
        }
        while self.have < HEADER_BYTES {
            // SAFETY: the borrow outlives the call.
            let rest = unsafe { Target::lend(&mut self.header[self.have..]) };
            match self.stream.receive(rest)? {
                0 => return Ok(None),
                bytes => self.have += bytes,
            }
        }
        Header::decode(&self.header).map(Some).ok_or_else(|| "it speaks something else".to_owned())
    }

    fn take(&mut self, into: Target) -> std::result::Result<Submitted, LinkError> {
        self.have = 0;
        self.lent += 1;
        self.taking = Some((into, 0));
        self.pump()?;
        Ok(Submitted::Pending(self.lent))
    }

    fn finished(&mut self) -> std::result::Result<u64, LinkError> {
        self.pump()?;
        Ok(self.finished)
    }

    fn carried(&self) -> u64 {
        self.carried
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Authority, TEST_TIMEOUT};
    use crate::{ErrorKind, Group, MemoryStore, TransportKind};
    use std::io::{Read, Write};
    use std::thread;

    /// Certificates of one authority, with names of their own, are covered by every test of all ways.
    #[test]
    fn who_has_a_certificate_of_another_authority_is_refused() {
        let (ours, others) = (Authority::new("ours"), Authority::new("theirs"));
        let (certificate, key) = others.sign("stranger");
        // It trusts the others, who do not trust it.
        let stranger = Tls::new(Tcp::on("lo").unwrap(), &certificate, &key, &ours.file()).unwrap();
        for (zero, one) in [(ours.tls("zero"), others.tls("one")), (ours.tls("zero"), stranger)] {
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
            let said = errors.each_ref().map(ToString::to_string);
            // By the one who looks first.
            let says = ["is not signed by", "refuses this rank's certificate"];
            let named = |text: &String| says.iter().any(|why| text.contains(why));
            assert!(said.iter().any(named), "{said:?}");
            for error in &errors {
                assert!(!error.is_group_usable() && error.kind() == ErrorKind::Lost, "{said:?}");
            }
        }
    }

    #[test]
    fn files_that_cannot_be_used_are_named() {
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
        // A folder of authorities is one, too.
        let folder = ours.file().parent().unwrap().to_owned();
        std::fs::remove_file(&key).unwrap();
        std::fs::remove_file(folder.join("rank.pem")).unwrap();
        let (certificate, key) = others.sign("other");
        assert!(Tls::new(Tcp::on("lo").unwrap(), &certificate, &key, &folder).is_ok());
    }

    #[test]
    fn the_environment_names_the_files() {
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

    /// Who speaks no TLS is dropped, and keeps nobody from coming in.
    #[test]
    fn strangers_are_dropped() {
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
