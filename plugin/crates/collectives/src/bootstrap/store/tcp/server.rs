//! The server of a store: one thread for all clients.

use std::collections::{HashMap, HashSet};
use std::io::{ErrorKind as IoErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use evenkeel_tls::JobIdentity;
use evenkeel_transport::Owner;
use rustix::event::{Timespec, epoll};

use super::super::{MAX_VALUE, MemoryStore, Store, check};
use super::{
    ADD, AWAIT_CHANGE, DELETE, GET, GET_MANY, MAX_BYTES, NO_VALUE, REFUSED, SET, SET_ONCE, VALUE,
};
use crate::accept::{ACCEPT_RETRY_DELAY, accept_all, prepare_listener};
use crate::codec::{Reader, put};
use crate::error::{Error, Result};
use crate::job_stream::{self, JobStream, MISMATCH};

/// Maximum number of ranks that are served at a time.
const MAX_CLIENTS: usize = 16_384;
/// How long a client may take to prove that it is one of the job's.
const HANDSHAKE_TIME: Duration =
    if cfg!(test) { Duration::from_millis(500) } else { Duration::from_secs(10) };
/// How often the server checks whether to stop, and which waits are over.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The longest time that a request may wait.
const MAX_WAIT: Duration = Duration::from_secs(3600);
/// The listener's token among the events.
const LISTENER: u64 = 0;

/// Serves a store to all ranks until it is dropped. Usually rank 0 runs it. Dropping it in a forked child does nothing.
pub struct TcpStoreServer {
    owner: Owner,
    address: SocketAddr,
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl TcpStoreServer {
    /// Serves at an address. Port 0 picks a free port. With `EVENKEEL_ENCRYPTION=required`, the job's processes only.
    ///
    /// # Errors
    /// [`ErrorKind::Store`](crate::ErrorKind::Store) when the address cannot be listened on,
    /// [`ErrorKind::Argument`](crate::ErrorKind::Argument) when encryption is required and there is no key.
    pub fn bind(address: impl ToSocketAddrs) -> Result<Self> {
        let listener = TcpListener::bind(address)
            .map_err(|error| Error::of_store(format!("store server: {error}")))?;
        Self::serve(listener)
    }

    /// Serves with an existing listener.
    ///
    /// # Errors
    /// As [`TcpStoreServer::bind`].
    pub fn serve(listener: TcpListener) -> Result<Self> {
        Self::serve_as(job_stream::identity()?, listener)
    }

    pub(super) fn serve_as(identity: Option<JobIdentity>, listener: TcpListener) -> Result<Self> {
        let failed = |error: std::io::Error| Error::of_store(format!("store server: {error}"));
        prepare_listener(&listener).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let stopping = Arc::new(AtomicBool::new(false));
        let server = Server::new(identity, listener).map_err(failed)?;
        let thread = {
            let stopping = Arc::clone(&stopping);
            let work = move || server.run(&stopping);
            thread::Builder::new().name("evenkeel-store".to_owned()).spawn(work).map_err(failed)?
        };
        Ok(Self { owner: Owner::current(), address, stopping, thread: Some(thread) })
    }

    /// The address at which it serves.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for TcpStoreServer {
    fn drop(&mut self) {
        if self.owner.is_parent() {
            // The thread is the parent's, and serves on.
            std::mem::forget(self.thread.take());
            return;
        }
        self.stopping.store(true, Ordering::Relaxed);
        // Wakes the thread. If this fails, it checks after the poll interval.
        let _ = TcpStream::connect_timeout(&self.address, POLL_INTERVAL);
        if let Some(thread) = self.thread.take() {
            // The thread does not panic.
            let _ = thread.join();
        }
    }
}

struct Server {
    identity: Option<JobIdentity>,
    listener: TcpListener,
    /// An epoll instance with the listener and all clients, edge-triggered.
    events: OwnedFd,
    store: MemoryStore,
    clients: HashMap<u64, Client>,
    next_client: u64,
    /// The clients that wait for a change, by name.
    waiting: HashMap<String, HashSet<u64>>,
}

struct Client {
    stream: JobStream,
    since: Instant,
    received: Vec<u8>,
    to_send: Option<Response>,
    /// The change that its request waits for.
    awaited: Option<Awaited>,
}

struct Awaited {
    name: String,
    known: Option<Arc<[u8]>>,
    until: Instant,
}

/// A response. Its value is shared by all that are sent the same one.
struct Response {
    front: [u8; 5],
    value: Arc<[u8]>,
    sent: usize,
}

/// What a request leads to.
enum Outcome {
    Respond(Response),
    Await(Awaited),
}

impl Server {
    fn new(identity: Option<JobIdentity>, listener: TcpListener) -> std::io::Result<Self> {
        let events = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let interest = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&events, &listener, epoll::EventData::new_u64(LISTENER), interest)?;
        Ok(Self {
            identity,
            listener,
            events,
            store: MemoryStore::new(),
            clients: HashMap::new(),
            next_client: LISTENER + 1,
            waiting: HashMap::new(),
        })
    }

    fn run(mut self, stopping: &AtomicBool) {
        let mut events = [MaybeUninit::<epoll::Event>::uninit(); 256];
        let mut accept_at = None;
        let mut check_at = Instant::now() + POLL_INTERVAL;
        let time = Timespec::try_from(POLL_INTERVAL.min(ACCEPT_RETRY_DELAY)).unwrap_or_default();
        while !stopping.load(Ordering::Relaxed) {
            let ready: Vec<u64> = match epoll::wait(&self.events, &mut events, Some(&time)) {
                Ok((ready, _)) => ready.iter().map(|event| event.data.u64()).collect(),
                Err(_) => vec![],
            };
            for token in ready {
                match token {
                    LISTENER => accept_at = accept_at.or_else(|| Some(Instant::now())),
                    client => self.serve(client),
                }
            }
            let now = Instant::now();
            if accept_at.is_some_and(|at| at <= now) {
                accept_at = self.accept().then(|| now + ACCEPT_RETRY_DELAY);
            }
            if check_at <= now {
                self.end_waits(now);
                self.drop_unauthenticated(HANDSHAKE_TIME);
                check_at = now + POLL_INTERVAL;
            }
        }
    }

    /// Accepts all clients. Returns whether the process ran out of sockets.
    fn accept(&mut self) -> bool {
        let Self { identity, listener, events, clients, next_client, .. } = self;
        let mut accepted = vec![];
        let out_of_sockets = accept_all(listener, |stream| {
            let all = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP;
            let token = epoll::EventData::new_u64(*next_client);
            // One client too many is disconnected.
            if clients.len() < MAX_CLIENTS
                && stream.set_nodelay(true).is_ok()
                && epoll::add(&*events, &stream, token, all | epoll::EventFlags::ET).is_ok()
                && let Ok(stream) = JobStream::accept(stream, identity.as_ref())
            {
                let since = Instant::now();
                let client =
                    Client { stream, since, received: vec![], to_send: None, awaited: None };
                clients.insert(*next_client, client);
                accepted.push(*next_client);
                *next_client += 1;
            }
        });
        accepted.into_iter().for_each(|client| self.serve(client));
        if self.clients.len() >= MAX_CLIENTS {
            self.drop_unauthenticated(HANDSHAKE_TIME / 10);
        }
        out_of_sockets
    }

    /// Serves a client's pending requests, and answers those that wait for what these change.
    fn serve(&mut self, client: u64) {
        let mut changed = vec![];
        self.step(client, &mut changed);
        while let Some(name) = changed.pop() {
            for waiting in self.waiting.remove(&name).unwrap_or_default() {
                self.answer_wait(waiting, None);
                self.step(waiting, &mut changed);
            }
        }
    }

    /// Serves a client's pending requests. Adds the names whose values these change.
    fn step(&mut self, token: u64, changed: &mut Vec<String>) {
        let Some(client) = self.clients.get_mut(&token) else { return };
        let before = client.awaited.is_some();
        let is_connected = client.serve(&self.store, changed);
        match &client.awaited {
            Some(awaited) if !before => {
                self.waiting.entry(awaited.name.clone()).or_default().insert(token);
            }
            _ => {}
        }
        if !is_connected && let Some(client) = self.clients.remove(&token) {
            self.forget_wait(token, client.awaited);
        }
    }

    fn forget_wait(&mut self, client: u64, awaited: Option<Awaited>) {
        if let Some(Awaited { name, .. }) = awaited
            && let Some(waiting) = self.waiting.get_mut(&name)
        {
            waiting.remove(&client);
            if waiting.is_empty() {
                self.waiting.remove(&name);
            }
        }
    }

    /// Answers a client's wait if the value has changed, or the time is over. Otherwise it waits again.
    fn answer_wait(&mut self, token: u64, now: Option<Instant>) {
        let Some(client) = self.clients.get_mut(&token) else { return };
        let Some(awaited) = client.awaited.take() else { return };
        let value = self.store.get_shared(&awaited.name);
        if value == awaited.known && now.is_none_or(|now| now < awaited.until) {
            self.waiting.entry(awaited.name.clone()).or_default().insert(token);
            client.awaited = Some(awaited);
            return;
        }
        client.to_send = Some(Response::of(value));
        self.forget_wait(token, Some(awaited));
    }

    /// Disconnects those that have been connected for so long and have not proved that they are the job's.
    fn drop_unauthenticated(&mut self, time: Duration) {
        let is_in_time = |client: &Client| client.since.elapsed() < time;
        self.clients.retain(|_, client| !client.stream.is_handshaking() || is_in_time(client));
    }

    /// Answers the requests that have waited for their time.
    fn end_waits(&mut self, now: Instant) {
        let over = |client: &Client| client.awaited.as_ref().is_some_and(|one| one.until <= now);
        let over: Vec<u64> = self
            .clients
            .iter()
            .filter(|(_, client)| over(client))
            .map(|(token, _)| *token)
            .collect();
        for client in over {
            self.answer_wait(client, Some(now));
            self.serve(client);
        }
    }
}

impl Client {
    /// Serves pending requests. Adds the names whose values they change. Returns false when the client has disconnected or sent an
    /// invalid request.
    fn serve(&mut self, store: &MemoryStore, changed: &mut Vec<String>) -> bool {
        let mut buffer = [0; 16 << 10];
        match self.stream.is_mismatched() {
            Ok(false) => {}
            Ok(true) => {
                // In clear, as the peer can read it if it does not encrypt. The buffer of a new socket has room.
                let mut refusal = Response::new(REFUSED, Arc::from(MISMATCH.as_bytes()));
                let _ = refusal.send(&mut self.stream.socket());
                // Unread bytes would reset the connection, and the refusal with it.
                let _ = self.stream.socket().read(&mut buffer);
                return false;
            }
            Err(error) if error.kind() == IoErrorKind::WouldBlock => return true,
            Err(_) => return false,
        }
        loop {
            if let Some(response) = &mut self.to_send {
                match response.send(&mut self.stream) {
                    Ok(true) => self.to_send = None,
                    Ok(false) => {}
                    Err(error) if error.kind() == IoErrorKind::WouldBlock => return true,
                    Err(error) if error.kind() == IoErrorKind::Interrupted => {}
                    Err(_) => return false,
                }
                continue;
            }
            if self.awaited.is_none()
                && let Some((outcome, used)) = handle(store, &self.received, changed)
            {
                self.received.drain(..used);
                match outcome {
                    Outcome::Respond(response) => self.to_send = Some(response),
                    Outcome::Await(awaited) => self.awaited = Some(awaited),
                }
                continue;
            }
            if self.received.len() > MAX_BYTES {
                return false;
            }
            match self.stream.read(&mut buffer) {
                Ok(0) => return false,
                Ok(count) => self.received.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == IoErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == IoErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
    }
}

impl Response {
    fn new(status: u8, value: Arc<[u8]>) -> Self {
        let mut front = [status, 0, 0, 0, 0];
        front[1..].copy_from_slice(&(value.len() as u32).to_le_bytes());
        Self { front, value, sent: 0 }
    }

    /// The response with this value, or with none.
    fn of(value: Option<Arc<[u8]>>) -> Self {
        value.map_or_else(|| Self::new(NO_VALUE, Arc::default()), |value| Self::new(VALUE, value))
    }

    /// Sends as much as the socket takes. Returns whether that was the rest.
    fn send(&mut self, stream: &mut impl Write) -> std::io::Result<bool> {
        let front = &self.front[self.sent.min(self.front.len())..];
        let value = &self.value[self.sent.saturating_sub(self.front.len())..];
        self.sent += stream.write_vectored(&[IoSlice::new(front), IoSlice::new(value)])?;
        Ok(self.sent == self.front.len() + self.value.len())
    }
}

/// What the first request in the bytes leads to, and the request's length. `None` if the request is incomplete. Adds the name whose
/// value it changes.
fn handle(
    store: &MemoryStore,
    bytes: &[u8],
    changed: &mut Vec<String>,
) -> Option<(Outcome, usize)> {
    let mut reader = Reader::new(bytes);
    let operation = reader.byte()?;
    let (name, value) = (reader.bytes()?, reader.bytes()?);
    let used = 9 + name.len() + value.len();
    let name = String::from_utf8_lossy(name);
    let done = match operation {
        SET => store.set(&name, value).map(|()| None),
        GET => Ok(store.get_shared(&name)),
        GET_MANY => Ok(Some(get_many(store, value))),
        SET_ONCE => store.set_once(&name, value).map(|value| Some(value.into())),
        DELETE => store.delete(&name).map(|()| None),
        ADD => value
            .try_into()
            .map_err(|_| Error::argument("the amount must have eight bytes"))
            .and_then(|amount| store.add(&name, i64::from_le_bytes(amount)))
            .map(|sum| Some(sum.to_le_bytes().as_slice().into())),
        AWAIT_CHANGE => match Awaited::decode(&name, value) {
            Ok(awaited) if store.get_shared(&name) == awaited.known => {
                return Some((Outcome::Await(awaited), used));
            }
            Ok(_) => Ok(store.get_shared(&name)),
            Err(error) => Err(error),
        },
        _ => Err(Error::argument("no such operation")),
    };
    if [SET, SET_ONCE, DELETE, ADD].contains(&operation) && done.is_ok() {
        changed.push(name.into_owned());
    }
    let response = done.map_or_else(
        |error| Response::new(REFUSED, error.to_string().as_bytes().into()),
        Response::of,
    );
    Some((Outcome::Respond(response), used))
}

/// The response to the first request in the bytes, and the request's length. `None` if the request is incomplete. A wait is over at
/// once.
#[cfg(feature = "fuzzing")]
pub(crate) fn answer(store: &MemoryStore, bytes: &[u8]) -> Option<(Vec<u8>, usize)> {
    let (outcome, used) = handle(store, bytes, &mut vec![])?;
    let mut response = match outcome {
        Outcome::Respond(response) => response,
        Outcome::Await(awaited) => Response::of(store.get_shared(&awaited.name)),
    };
    let mut out = vec![];
    // A vector takes all of it.
    response.send(&mut out).ok().map(|_| (out, used))
}

/// The values of a list of names, encoded: of the first names, at least of one, that fit into a response.
fn get_many(store: &MemoryStore, names: &[u8]) -> Arc<[u8]> {
    let mut reader = Reader::new(names);
    let mut out = vec![];
    while let Some(name) = reader.bytes() {
        let value = store.get_shared(&String::from_utf8_lossy(name));
        if !out.is_empty() && out.len() + value.as_ref().map_or(0, |value| value.len()) > MAX_VALUE
        {
            break;
        }
        match value {
            None => out.push(NO_VALUE),
            Some(value) => {
                out.push(VALUE);
                put(&mut out, &value);
            }
        }
    }
    out.into()
}

impl Awaited {
    fn decode(name: &str, bytes: &[u8]) -> Result<Self> {
        check(name, &[])?;
        let mut reader = Reader::new(bytes);
        let fields = (|| Some((reader.long()?, reader.byte()?)))();
        let (time, is_known) =
            fields.ok_or_else(|| Error::argument("a wait needs a time and a known value"))?;
        let known = (is_known == VALUE).then(|| bytes[9..].into());
        let until = Instant::now() + Duration::from_millis(time).min(MAX_WAIT);
        Ok(Self { name: name.to_owned(), known, until })
    }
}
