//! Links through shared memory, between processes of one host or threads of one process.
//!
//! Each link is a ring buffer in memory that only its two processes map. The sender creates it and passes it over a Unix socket.
//! The socket also wakes a sleeping peer, and its end shows that the peer's process exited. A killed process leaves nothing behind.

use std::collections::VecDeque;
use std::io::{self, ErrorKind as IoErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use evenkeel_transport::sync::lock;
use evenkeel_transport::{Notify, keep_from_children};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg,
    sendmsg, socket_with, sockopt,
};

use crate::error::{Error, Result};
use crate::links::link::{
    Endpoint, HEADER_BYTES, Header, Incoming, LinkError, Outgoing, Submitted,
};
use crate::memory::{SharedMapping, Source, Target};

/// Bytes of the ring buffer: large enough to stream, small enough for a cache.
const RING_BYTES: usize = 256 << 10;
/// Offset of the ring buffer in the mapping. The words before it have a cache line each.
const RING_OFFSET: usize = 4096;
/// Offset of the number of bytes that the sender has written.
const WRITTEN: usize = 0;
/// Offset of the number of bytes that the receiver has read.
const READ: usize = 128;
/// Offset of the flag that the sender sleeps and must be woken.
const SENDER_SLEEPS: usize = 256;
/// Offset of the flag that the receiver sleeps and must be woken.
const RECEIVER_SLEEPS: usize = 384;
/// Maximum number of senders that have connected and not passed a ring yet.
const MAX_CONNECTING: usize = 1024;
/// Maximum number of messages that wait for room in a ring.
const MAX_WAITING: usize = 32;
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
/// How long a thread sleeps when another one already sleeps on the endpoint.
const SHORT_SLEEP: Duration = Duration::from_millis(1);

pub(crate) struct ShmEndpoint {
    listener: UnixListener,
    name: Vec<u8>,
    /// What the addresses of all ranks of this host begin with.
    host: Vec<u8>,
    /// All open links.
    links: Mutex<Vec<Weak<ShmLink>>>,
    /// Held by the thread that polls the sockets.
    sleeping: Mutex<()>,
    /// Senders that have connected and not passed their rings yet.
    connecting: Mutex<VecDeque<UnixStream>>,
    /// Also wakes a sleeping thread.
    waker: Option<Arc<Waker>>,
}

/// Wakes a thread that sleeps on shared memory, for events on another transport.
pub(crate) struct Waker {
    event: OwnedFd,
    asleep: AtomicBool,
}

impl Waker {
    /// # Errors
    /// When no event descriptor can be created.
    pub(crate) fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { event, asleep: AtomicBool::new(false) })
    }
}

impl Notify for Waker {
    fn notify(&self) {
        // Either the sleeping thread sees the event, or this thread sees that it sleeps.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) {
            // A full counter wakes as well.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }
}

/// One side of a link.
struct ShmLink {
    ring: SharedMapping,
    stream: UnixStream,
    /// Offsets of the flags that this side sleeps, and that the other does.
    own_word: usize,
    peer_word: usize,
    /// The other side's process has exited or has dropped the link.
    gone: AtomicBool,
}

impl ShmEndpoint {
    /// An endpoint for the ranks that give the same bytes for their host.
    ///
    /// # Errors
    /// When the socket cannot be created.
    pub(crate) fn open(host: &[u8], waker: Option<Arc<Waker>>) -> Result<Self> {
        let what = "shared memory";
        let unique = evenkeel_transport::random().map_err(|error| Error::system(what, error))?;
        let unique = u64::from_le_bytes(unique);
        let name = format!("evenkeel-{unique:016x}").into_bytes();
        let listener = SocketAddr::from_abstract_name(&name)
            .and_then(|address| UnixListener::bind_addr(&address))
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .map_err(|error| Error::system(what, error))?;
        keep_from_children(&listener);
        Ok(Self {
            listener,
            name,
            host: host.to_vec(),
            links: Mutex::default(),
            sleeping: Mutex::new(()),
            connecting: Mutex::default(),
            waker,
        })
    }

    fn add_link(
        &self,
        ring: SharedMapping,
        stream: UnixStream,
        own_word: usize,
        peer_word: usize,
    ) -> io::Result<Arc<ShmLink>> {
        stream.set_nonblocking(true)?;
        // Its end tells the other side that this process has exited, also while a child of it lives.
        keep_from_children(&stream);
        let link =
            Arc::new(ShmLink { ring, stream, own_word, peer_word, gone: AtomicBool::new(false) });
        let mut links = lock(&self.links);
        links.retain(|link| link.strong_count() > 0);
        links.push(Arc::downgrade(&link));
        Ok(link)
    }

    /// Connects to another rank and passes it a new ring. `None` when the rank's backlog is full.
    fn pass_ring(&self, name: &[u8]) -> io::Result<Option<Arc<ShmLink>>> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match connect(&stream, &SocketAddrUnix::new_abstract_name(name)?) {
            Err(Errno::AGAIN) => return Ok(None),
            connected => connected?,
        }
        let stream = UnixStream::from(stream);
        let file = memfd_create("evenkeel", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, (RING_OFFSET + RING_BYTES) as u64)?;
        // Neither side can shrink the memory while the other accesses it.
        fcntl_add_seals(&file, SEALS)?;
        let ring = SharedMapping::map(&file, RING_OFFSET + RING_BYTES)?;
        let files = [file.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ancillary.push(SendAncillaryMessage::ScmRights(&files));
        sendmsg(&stream, &[IoSlice::new(&[1])], &mut ancillary, SendFlags::NOSIGNAL)?;
        self.add_link(ring, stream, SENDER_SLEEPS, RECEIVER_SLEEPS).map(Some)
    }

    /// Receives the ring that a sender passes. `None` if it is not a ring, or not from this user.
    fn receive_ring(&self, stream: &UnixStream) -> io::Result<Option<(SharedMapping, UnixStream)>> {
        if sockopt::socket_peercred(stream)?.uid != rustix::process::geteuid() {
            return Ok(None);
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        recvmsg(
            stream,
            &mut [IoSliceMut::new(&mut byte)],
            &mut ancillary,
            RecvFlags::CMSG_CLOEXEC,
        )?;
        let file: Option<OwnedFd> = ancillary.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        let Some(file) = file else { return Ok(None) };
        // Reading memory that its sender has shrunk would kill this process.
        let has_right_size = fstat(&file)?.st_size == (RING_OFFSET + RING_BYTES) as i64;
        if !has_right_size || !fcntl_get_seals(&file)?.contains(SEALS) {
            return Ok(None);
        }
        Ok(Some((SharedMapping::map(&file, RING_OFFSET + RING_BYTES)?, stream.try_clone()?)))
    }
}

impl Endpoint for ShmEndpoint {
    fn address(&self) -> Vec<u8> {
        [&self.host[..], &self.name].concat()
    }

    fn ip(&self) -> IpAddr {
        Ipv4Addr::LOCALHOST.into()
    }

    fn connect(&self, address: &[u8]) -> Result<Option<Box<dyn Outgoing>>> {
        let name = address.strip_prefix(&self.host[..]).ok_or_else(|| {
            Error::argument(
                "shared memory connects ranks of one host only, and that rank is on another",
            )
        })?;
        let link = self.pass_ring(name).map_err(|error| {
            Error::new(
                crate::ErrorKind::Lost,
                format!("shared memory: {error} (ranks must share a network namespace)"),
            )
        })?;
        let Some(link) = link else { return Ok(None) };
        let waiting = VecDeque::new();
        Ok(Some(Box::new(ShmOutgoing { link, written: 0, waiting, submitted: 0, completed: 0 })))
    }

    fn accept(&self) -> Result<Option<Box<dyn Incoming>>> {
        let failed = |error: io::Error| Error::system("shared memory", error);
        let mut connecting = lock(&self.connecting);
        while connecting.len() < MAX_CONNECTING {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(true).map_err(failed)?;
                    keep_from_children(&stream);
                    connecting.push_back(stream);
                }
                Err(error) if error.kind() == IoErrorKind::Interrupted => {}
                Err(error)
                    if [IoErrorKind::WouldBlock, IoErrorKind::ConnectionAborted]
                        .contains(&error.kind()) =>
                {
                    break;
                }
                Err(error) => return Err(failed(error)),
            }
        }
        for _ in 0..connecting.len() {
            let Some(stream) = connecting.pop_front() else { break };
            match self.receive_ring(&stream) {
                Ok(Some((ring, stream))) => {
                    let link = self.add_link(ring, stream, RECEIVER_SLEEPS, SENDER_SLEEPS);
                    let link = link.map_err(failed)?;
                    return Ok(Some(Box::new(ShmIncoming {
                        link,
                        read: 0,
                        pending_header: None,
                        receiving: None,
                        submitted: 0,
                        completed: 0,
                    })));
                }
                // The sender has connected and not passed its ring yet.
                Err(error) if error.kind() == IoErrorKind::WouldBlock => {
                    connecting.push_back(stream)
                }
                // A process that passes no ring is not a rank.
                Ok(None) | Err(_) => {}
            }
        }
        Ok(None)
    }

    fn sleep(&self, time: Duration, is_ready: &mut dyn FnMut() -> bool) {
        let Ok(_listening) = self.sleeping.try_lock() else {
            if !is_ready() {
                std::thread::sleep(time.min(SHORT_SLEEP));
            }
            return;
        };
        let links: Vec<_> = lock(&self.links)
            .iter()
            .filter_map(Weak::upgrade)
            .filter(|link| !link.gone.load(Ordering::Relaxed))
            .collect();
        links.iter().for_each(|link| link.ring.word(link.own_word).store(1, Ordering::Relaxed));
        let set_asleep = |asleep| {
            self.waker.iter().for_each(|waker| waker.asleep.store(asleep, Ordering::Relaxed));
        };
        set_asleep(true);
        // Either the peers see the flags, or this thread sees what they have done.
        fence(Ordering::SeqCst);
        if !is_ready() {
            let mut waited: Vec<_> = links
                .iter()
                .map(|link| PollFd::new(&link.stream, PollFlags::IN))
                .chain([PollFd::new(&self.listener, PollFlags::IN)])
                .chain(self.waker.iter().map(|waker| PollFd::new(&waker.event, PollFlags::IN)))
                .collect();
            let time = Timespec::try_from(time).unwrap_or_default();
            // An interrupted or failed wait is a short one: the caller polls again.
            let _ = poll(&mut waited, Some(&time));
        }
        set_asleep(false);
        if let Some(waker) = &self.waker {
            // Fails when there was no event.
            let _ = rustix::io::read(&waker.event, &mut [0; 8]);
        }
        for link in &links {
            link.ring.word(link.own_word).store(0, Ordering::Relaxed);
            link.read_socket();
        }
    }
}

impl ShmLink {
    /// Reads the socket: wake-up bytes, or the end of the other side.
    fn read_socket(&self) {
        let mut bytes = [0; 64];
        loop {
            match (&self.stream).read(&mut bytes) {
                Ok(0) => self.gone.store(true, Ordering::Release),
                Ok(_) => continue,
                Err(error) if error.kind() == IoErrorKind::Interrupted => continue,
                Err(error) if error.kind() == IoErrorKind::WouldBlock => {}
                Err(_) => self.gone.store(true, Ordering::Release),
            }
            return;
        }
    }

    /// Wakes the other side if it sleeps.
    fn wake(&self) {
        fence(Ordering::SeqCst);
        let word = self.ring.word(self.peer_word);
        if word.load(Ordering::Relaxed) != 0 && word.swap(0, Ordering::Relaxed) != 0 {
            // A full socket wakes as well. A broken one is noticed by `read_socket`.
            let _ = (&self.stream).write(&[1]);
        }
    }

    fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Number of bytes in the ring, of which the other side wrote one counter. An impossible number is an error.
    fn filled(written: u64, read: u64) -> std::result::Result<usize, LinkError> {
        let filled = written.wrapping_sub(read);
        if filled <= RING_BYTES as u64 {
            Ok(filled as usize)
        } else {
            Err("its ring is corrupt".to_owned())
        }
    }
}

const GONE: &str = "its process has exited or has closed the group";

struct ShmOutgoing {
    link: Arc<ShmLink>,
    /// Bytes written so far.
    written: u64,
    /// Messages that did not fit into the ring.
    waiting: VecDeque<Waiting>,
    submitted: u64,
    completed: u64,
}

struct Waiting {
    header: [u8; HEADER_BYTES],
    payload: Source,
    /// Bytes of header and payload that are written.
    at: usize,
}

impl ShmOutgoing {
    fn room(&self) -> std::result::Result<usize, LinkError> {
        let read = self.link.ring.long(READ).load(Ordering::Acquire);
        Ok(RING_BYTES - ShmLink::filled(self.written, read)?)
    }

    /// Writes bytes that fit into the ring.
    fn put(&mut self, bytes: Source) {
        let at = (self.written % RING_BYTES as u64) as usize;
        let first = bytes.length().min(RING_BYTES - at);
        self.link.ring.write(RING_OFFSET + at, bytes.part(0, first));
        self.link.ring.write(RING_OFFSET, bytes.part(first, bytes.length() - first));
        self.written += bytes.length() as u64;
    }

    fn put_header(&mut self, header: &[u8]) {
        // SAFETY: the borrow outlives the call, which copies.
        self.put(unsafe { Source::lend(header) });
    }

    fn publish(&self) {
        self.link.ring.long(WRITTEN).store(self.written, Ordering::Release);
        self.link.wake();
    }

    fn make_progress(&mut self) -> std::result::Result<(), LinkError> {
        let before = self.written;
        while let Some(mut next) = self.waiting.pop_front() {
            let mut room = self.room()?;
            if next.at < HEADER_BYTES && room > 0 {
                let part = room.min(HEADER_BYTES - next.at);
                self.put_header(&next.header[next.at..next.at + part]);
                next.at += part;
                room -= part;
            }
            if next.at >= HEADER_BYTES {
                let from = next.at - HEADER_BYTES;
                let part = room.min(next.payload.length() - from);
                self.put(next.payload.part(from, part));
                next.at += part;
            }
            if next.at < HEADER_BYTES + next.payload.length() {
                self.waiting.push_front(next);
                break;
            }
            self.completed += 1;
        }
        if self.written != before {
            self.publish();
        }
        if !self.waiting.is_empty() && self.link.is_gone() {
            return Err(GONE.to_owned());
        }
        Ok(())
    }
}

impl Outgoing for ShmOutgoing {
    fn send(
        &mut self,
        header: &Header,
        payload: Source,
    ) -> std::result::Result<Option<Submitted>, LinkError> {
        if self.link.is_gone() {
            return Err(GONE.to_owned());
        }
        let header = header.encode();
        if self.waiting.is_empty() && HEADER_BYTES + payload.length() <= self.room()? {
            self.put_header(&header);
            self.put(payload);
            self.publish();
            return Ok(Some(Submitted::Done));
        }
        if self.waiting.len() >= MAX_WAITING {
            return Ok(None);
        }
        self.waiting.push_back(Waiting { header, payload, at: 0 });
        self.submitted += 1;
        let number = self.submitted;
        self.make_progress()?;
        Ok(Some(Submitted::Pending(number)))
    }

    fn completed(&mut self) -> std::result::Result<u64, LinkError> {
        if !self.waiting.is_empty() {
            self.make_progress()?;
        }
        Ok(self.completed)
    }

    fn carried(&self) -> u64 {
        self.written
    }

    fn close(&mut self) -> bool {
        // The ring stays readable for the other side.
        true
    }
}

struct ShmIncoming {
    link: Arc<ShmLink>,
    /// Bytes read so far.
    read: u64,
    /// The header of the message whose payload is received next.
    pending_header: Option<Header>,
    /// The memory for a payload, and how many bytes have been received.
    receiving: Option<(Target, usize)>,
    submitted: u64,
    completed: u64,
}

impl ShmIncoming {
    fn filled(&self) -> std::result::Result<usize, LinkError> {
        ShmLink::filled(self.link.ring.long(WRITTEN).load(Ordering::Acquire), self.read)
    }

    /// Reads bytes that are in the ring.
    fn get(&mut self, into: Target) {
        let at = (self.read % RING_BYTES as u64) as usize;
        let first = into.length().min(RING_BYTES - at);
        self.link.ring.read(RING_OFFSET + at, into.part(0, first));
        self.link.ring.read(RING_OFFSET, into.part(first, into.length() - first));
        self.read += into.length() as u64;
    }

    fn publish(&self) {
        self.link.ring.long(READ).store(self.read, Ordering::Release);
        self.link.wake();
    }

    fn make_progress(&mut self) -> std::result::Result<(), LinkError> {
        let Some((into, at)) = self.receiving else { return Ok(()) };
        // Checked first: then everything that was written before the end is visible.
        let gone = self.link.is_gone();
        let part = self.filled()?.min(into.length() - at);
        if part > 0 {
            self.get(into.part(at, part));
            self.publish();
        } else if gone && at < into.length() {
            return Err(GONE.to_owned());
        }
        if at + part == into.length() {
            self.receiving = None;
            self.completed += 1;
        } else {
            self.receiving = Some((into, at + part));
        }
        Ok(())
    }
}

impl Incoming for ShmIncoming {
    fn next_header(&mut self) -> std::result::Result<Option<Header>, LinkError> {
        if self.receiving.is_some() {
            self.make_progress()?;
        }
        if self.pending_header.is_none() && self.receiving.is_none() {
            let gone = self.link.is_gone();
            if self.filled()? >= HEADER_BYTES {
                let mut bytes = [0; HEADER_BYTES];
                // SAFETY: the borrow outlives the call, which copies.
                self.get(unsafe { Target::lend(&mut bytes) });
                let header =
                    Header::decode(&bytes).ok_or_else(|| "its ring is corrupt".to_owned())?;
                self.pending_header = Some(header);
            } else if gone {
                return Err(GONE.to_owned());
            }
        }
        Ok(self.pending_header)
    }

    fn receive_payload(&mut self, into: Target) -> std::result::Result<Submitted, LinkError> {
        self.pending_header = None;
        self.submitted += 1;
        self.receiving = Some((into, 0));
        if into.length() == 0 {
            self.publish();
        }
        self.make_progress()?;
        Ok(Submitted::Pending(self.submitted))
    }

    fn completed(&mut self) -> std::result::Result<u64, LinkError> {
        self.make_progress()?;
        Ok(self.completed)
    }

    fn carried(&self) -> u64 {
        self.read
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{accept, bind, listen};

    #[test]
    fn shm_connect_returns_none_while_backlog_is_full() {
        let own = ShmEndpoint::open(b"host", None).unwrap();
        let name = format!(
            "evenkeel-test-{:016x}",
            u64::from_le_bytes(evenkeel_transport::random().unwrap())
        )
        .into_bytes();
        let flags = SocketFlags::CLOEXEC;
        let other = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        bind(&other, &SocketAddrUnix::new_abstract_name(&name).unwrap()).unwrap();
        listen(&other, 1).unwrap();
        let address = [&own.host[..], &name].concat();
        let mut links = vec![];
        while let Some(link) = own.connect(&address).unwrap() {
            links.push(link);
            assert!(links.len() < 100, "the backlog never fills");
        }
        let _taken = accept(&other).unwrap();
        assert!(own.connect(&address).unwrap().is_some());
    }
}
