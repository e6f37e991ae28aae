//! Who is alive, and what whoever is alive waits for.
//!
//! A rank whose operation does not move asks the rank that it waits for, over a TCP connection of its own, which one thread
//! of every process answers: it is alive; it is in an operation, and waits in turn for these ranks; or its group has failed,
//! and why. Who waits for somebody who waits for a lost rank finds that rank by asking on. A process that was killed refuses
//! the connection, one that stands still takes it and says nothing, one behind a cut link does neither. Nothing is sent while
//! all goes well. What one rank found out it tells all others, so that they need not find out themselves.
//!
//! An answer is given to whoever knows a member's identity, a random number that only the group's store has.

use std::collections::{HashMap, VecDeque};
use std::io::{self, ErrorKind as IoErrorKind, Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::accept::{ACCEPT_RETRY_DELAY, accept_all};
use crate::codec::{Reader, put, put_list};
use crate::error::{Error, ErrorKind};
use crate::lock;

const MAGIC: &[u8; 8] = b"EKalive1";
/// Magic, identity, kind and length of what follows.
const HEADER_BYTES: usize = 8 + 8 + 1 + 2;
/// The longest that follows.
const MAX_BODY_BYTES: usize = 4096;
/// Ranks that are told of at most.
const MAX_RANKS: usize = 256;
/// Characters of a failure's text.
const MAX_TEXT: usize = 1000;
/// Connections that are being answered; when more come, the oldest is dropped.
const MAX_CONNECTIONS: usize = 256;
/// How long a connection may take to say what it wants.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// How often the thread looks whether anybody needs it.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Ranks that are asked or told at a time.
const MAX_CONCURRENT_PROBES: usize = 64;

const PROBE: u8 = 0;
const REPORT_FAILURE: u8 = 1;
const UNKNOWN: u8 = 2;
const ALIVE: u8 = 3;
const FAILED: u8 = 4;

/// Why a group cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GroupFailure {
    pub(crate) kind: ErrorKind,
    pub(crate) ranks: Vec<usize>,
    pub(crate) text: String,
}

impl GroupFailure {
    pub(crate) fn error(&self) -> Error {
        Error::new(self.kind, self.text.clone()).with_ranks(self.ranks.clone()).group_unusable()
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = vec![match self.kind {
            ErrorKind::Aborted => 1,
            ErrorKind::Mismatch => 2,
            _ => 0,
        }];
        put_list(&mut out, self.ranks.iter().take(MAX_RANKS));
        let text: String = self.text.chars().take(MAX_TEXT / 4).collect();
        put(&mut out, text.as_bytes());
        out
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(bytes);
        let kind = match reader.byte()? {
            1 => ErrorKind::Aborted,
            2 => ErrorKind::Mismatch,
            _ => ErrorKind::Lost,
        };
        let ranks = reader.list()?;
        Some(Self { kind, ranks, text: String::from_utf8_lossy(reader.bytes()?).into_owned() })
    }
}

/// A member of a group, as others in its process and elsewhere see it.
pub(crate) struct Liveness {
    id: u64,
    failed: AtomicBool,
    state: Mutex<MemberState>,
    /// Keeps the thread that answers.
    responder: Arc<Responder>,
}

#[derive(Default)]
struct MemberState {
    failure: Option<GroupFailure>,
    /// Whom the operations in progress wait for, by their numbers.
    waiting: HashMap<u64, Vec<usize>>,
    next: u64,
}

impl Liveness {
    /// A new member.
    ///
    /// # Errors
    /// When the thread that answers for this process cannot be started.
    pub(crate) fn new() -> io::Result<Arc<Self>> {
        let responder = Responder::get()?;
        let liveness = Arc::new(Self {
            id: crate::random()?,
            failed: AtomicBool::new(false),
            state: Mutex::default(),
            responder,
        });
        lock(&liveness.responder.members).insert(liveness.id, Arc::downgrade(&liveness));
        Ok(liveness)
    }

    /// Its identity.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Where its process answers.
    pub(crate) fn port(&self) -> u16 {
        self.responder.port
    }

    /// Why the group cannot go on, if that is so.
    pub(crate) fn failure(&self) -> Option<GroupFailure> {
        if !self.failed.load(Ordering::Acquire) {
            return None;
        }
        lock(&self.state).failure.clone()
    }

    /// The group cannot go on. The first failure stays; it is given back.
    pub(crate) fn fail(&self, failure: GroupFailure) -> GroupFailure {
        let failure = lock(&self.state).failure.get_or_insert(failure).clone();
        self.failed.store(true, Ordering::Release);
        failure
    }

    /// An operation begins; it ends when the value is dropped.
    pub(crate) fn operation(&self) -> Operation<'_> {
        let mut state = lock(&self.state);
        state.next += 1;
        let number = state.next;
        state.waiting.insert(number, vec![]);
        Operation { liveness: self, number }
    }
}

impl Drop for Liveness {
    fn drop(&mut self) {
        lock(&self.responder.members).remove(&self.id);
    }
}

/// An operation in progress.
pub(crate) struct Operation<'a> {
    liveness: &'a Liveness,
    number: u64,
}

impl Operation<'_> {
    /// It waits for these ranks now.
    pub(crate) fn waits_for(&self, ranks: Vec<usize>) {
        lock(&self.liveness.state).waiting.insert(self.number, ranks);
    }
}

impl Drop for Operation<'_> {
    fn drop(&mut self) {
        lock(&self.liveness.state).waiting.remove(&self.number);
    }
}

/// The thread that answers for all members of this process.
struct Responder {
    port: u16,
    members: Mutex<HashMap<u64, Weak<Liveness>>>,
}

static RESPONDER: Mutex<Weak<Responder>> = Mutex::new(Weak::new());

impl Responder {
    fn get() -> io::Result<Arc<Self>> {
        let mut current = lock(&RESPONDER);
        if let Some(responder) = current.upgrade() {
            return Ok(responder);
        }
        let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0))
            .or_else(|_| TcpListener::bind(("0.0.0.0", 0)))?;
        listener.set_nonblocking(true)?;
        let port = listener.local_addr()?.port();
        let responder = Arc::new(Self { port, members: Mutex::default() });
        let weak = Arc::downgrade(&responder);
        thread::Builder::new()
            .name("evenkeel-alive".to_owned())
            .spawn(move || run_responder(&listener, &weak))?;
        *current = Arc::downgrade(&responder);
        Ok(responder)
    }

    fn respond(&self, request: &[u8]) -> Vec<u8> {
        let mut reader = Reader::new(&request[8..]);
        let (id, kind) = (reader.long().unwrap_or(0), reader.byte().unwrap_or(PROBE));
        let member = lock(&self.members).get(&id).and_then(Weak::upgrade);
        let Some(member) = member else { return frame(id, UNKNOWN, &[]) };
        if kind == REPORT_FAILURE
            && let Some(failure) = GroupFailure::decode(&request[HEADER_BYTES..])
        {
            member.fail(failure);
        }
        if let Some(failure) = member.failure() {
            return frame(id, FAILED, &failure.encode());
        }
        let mut text = vec![];
        let state = lock(&member.state);
        let mut waiting: Vec<usize> = state.waiting.values().flatten().copied().collect();
        waiting.sort_unstable();
        waiting.dedup();
        waiting.truncate(MAX_RANKS);
        text.push(u8::from(!state.waiting.is_empty()));
        put_list(&mut text, waiting.iter());
        frame(id, ALIVE, &text)
    }
}

fn frame(id: u64, kind: u8, text: &[u8]) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend_from_slice(&id.to_le_bytes());
    out.push(kind);
    out.extend_from_slice(&(text.len() as u16).to_le_bytes());
    out.extend_from_slice(text);
    out
}

/// Whether a frame is complete; `None` when it can never be one.
fn is_complete(bytes: &[u8]) -> Option<bool> {
    if !MAGIC.starts_with(&bytes[..bytes.len().min(8)]) {
        return None;
    }
    let Some(length) = bytes.get(HEADER_BYTES - 2..HEADER_BYTES) else { return Some(false) };
    let length = usize::from(u16::from_le_bytes([length[0], length[1]]));
    (length <= MAX_BODY_BYTES).then_some(bytes.len() >= HEADER_BYTES + length)
}

struct ProbeConnection {
    stream: TcpStream,
    received: Vec<u8>,
    deadline: Instant,
}

impl ProbeConnection {
    /// Hears more; false when there is nothing more to do for it.
    fn serve(&mut self, responder: &Responder) -> bool {
        let mut buffer = [0; 1024];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return false,
                Ok(count) => self.received.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == IoErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == IoErrorKind::Interrupted => {}
                Err(_) => return false,
            }
            match is_complete(&self.received) {
                Some(false) => {}
                Some(true) => {
                    // It fits into a socket's buffer. Who does not get it finds that out.
                    let _ = self.stream.write_all(&responder.respond(&self.received));
                    return false;
                }
                None => return false,
            }
        }
    }
}

fn run_responder(listener: &TcpListener, responder: &Weak<Responder>) {
    let mut connections: VecDeque<ProbeConnection> = VecDeque::new();
    let mut out_of_sockets = false;
    while responder.strong_count() > 0 {
        let mut waited: Vec<_> = connections
            .iter()
            .map(|connection| PollFd::new(&connection.stream, PollFlags::IN))
            .chain((!out_of_sockets).then(|| PollFd::new(listener, PollFlags::IN)))
            .collect();
        let time =
            Timespec::try_from(if out_of_sockets { ACCEPT_RETRY_DELAY } else { POLL_INTERVAL })
                .unwrap_or_default();
        if poll(&mut waited, Some(&time)).is_err() {
            thread::sleep(Duration::from_millis(1));
        }
        let Some(responder) = responder.upgrade() else { return };
        out_of_sockets = accept_all(listener, |stream| {
            let deadline = Instant::now() + REQUEST_TIMEOUT;
            connections.push_back(ProbeConnection { stream, received: vec![], deadline });
            if connections.len() > MAX_CONNECTIONS {
                connections.pop_front();
            }
        });
        let now = Instant::now();
        connections
            .retain_mut(|connection| now < connection.deadline && connection.serve(&responder));
    }
}

const EXITED: &str = "its process has exited";
const UNRESPONSIVE: &str = "its process does not respond";
const UNREACHABLE: &str = "its host cannot be reached";

/// Where a member of a group answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProbeAddress {
    pub(crate) id: u64,
    pub(crate) host: IpAddr,
    pub(crate) port: u16,
}

/// What asking a member gave.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PeerStatus {
    /// Alive, in an operation or not, and waiting for these ranks.
    Alive { busy: bool, waiting: Vec<usize> },
    /// Alive, but the group has failed there.
    Failed(GroupFailure),
    /// It has left the group, in peace or because of a failure.
    Left,
    /// Not alive, and in which way.
    Lost(&'static str),
}

impl ProbeAddress {
    /// Asks the member, for no longer than the time.
    pub(crate) fn probe(&self, time: Duration) -> PeerStatus {
        self.exchange(PROBE, &[], time)
    }

    fn report(&self, failure: &GroupFailure, time: Duration) {
        self.exchange(REPORT_FAILURE, &failure.encode(), time);
    }

    fn exchange(&self, kind: u8, text: &[u8], time: Duration) -> PeerStatus {
        let deadline = Instant::now() + time;
        let address = SocketAddr::new(self.host, self.port);
        let mut stream = match TcpStream::connect_timeout(&address, time) {
            Ok(stream) => stream,
            Err(error) if error.kind() == IoErrorKind::ConnectionRefused => {
                return PeerStatus::Lost(EXITED);
            }
            Err(_) => return PeerStatus::Lost(UNREACHABLE),
        };
        let mut received = vec![];
        let asked = stream.write_all(&frame(self.id, kind, text));
        while asked.is_ok() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || stream.set_read_timeout(Some(left)).is_err() {
                return PeerStatus::Lost(UNRESPONSIVE);
            }
            let mut buffer = [0; 1024];
            match stream.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => received.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == IoErrorKind::Interrupted => {}
                Err(error)
                    if [IoErrorKind::WouldBlock, IoErrorKind::TimedOut].contains(&error.kind()) =>
                {
                    return PeerStatus::Lost(UNRESPONSIVE);
                }
                Err(_) => break,
            }
            match is_complete(&received) {
                Some(false) => {}
                Some(true) => {
                    return decode_response(&received).unwrap_or(PeerStatus::Lost(EXITED));
                }
                None => break,
            }
        }
        // Somebody else has the port now, or the process ended just then.
        PeerStatus::Lost(EXITED)
    }
}

fn decode_response(bytes: &[u8]) -> Option<PeerStatus> {
    let mut reader = Reader::new(&bytes[HEADER_BYTES..]);
    match bytes[16] {
        ALIVE => {
            let busy = reader.byte()? != 0;
            Some(PeerStatus::Alive { busy, waiting: reader.list()? })
        }
        FAILED => GroupFailure::decode(&bytes[HEADER_BYTES..]).map(PeerStatus::Failed),
        UNKNOWN => Some(PeerStatus::Left),
        _ => None,
    }
}

/// What asking around gave.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ProbeReport {
    /// Ranks that are not alive, and in which way.
    pub(crate) lost: Vec<(usize, &'static str)>,
    /// Ranks that have left. What they sent may still come.
    pub(crate) left: Vec<usize>,
    /// What somebody had found out before.
    pub(crate) failure: Option<GroupFailure>,
    /// Ranks that are alive and in no operation.
    pub(crate) idle: Vec<usize>,
}

/// Asks these members, some at a time, each for no longer than the time. Who is not asked by the deadline cannot be reached.
pub(crate) fn probe_all(
    probe_addresses: &[&ProbeAddress],
    each: Duration,
    deadline: Instant,
) -> Vec<PeerStatus> {
    let next = AtomicUsize::new(0);
    let probe_next = || {
        let mut answers = vec![];
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(probe_address) = probe_addresses.get(at) else { return answers };
            let left = deadline.saturating_duration_since(Instant::now());
            let asked = !left.is_zero();
            let answer = if asked {
                probe_address.probe(each.min(left))
            } else {
                PeerStatus::Lost(UNREACHABLE)
            };
            answers.push((at, answer));
        }
    };
    let mut answers: Vec<(usize, PeerStatus)> = thread::scope(|scope| {
        let asking: Vec<_> = probe_addresses
            .iter()
            .take(MAX_CONCURRENT_PROBES)
            .map(|_| scope.spawn(probe_next))
            .collect();
        asking.into_iter().filter_map(|answers| answers.join().ok()).flatten().collect()
    });
    answers.sort_unstable_by_key(|(at, _)| *at);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

/// Asks ranks, and the ranks that they wait for in turn, until nothing new comes or the time is over.
pub(crate) fn probe_transitively(
    probe_addresses: &[ProbeAddress],
    own: usize,
    first: Vec<usize>,
    time: Duration,
) -> ProbeReport {
    let deadline = Instant::now() + time;
    let mut report = ProbeReport::default();
    let mut asked = vec![false; probe_addresses.len()];
    if let Some(place) = asked.get_mut(own) {
        *place = true;
    }
    let mut next = first;
    loop {
        next.retain(|rank| {
            asked.get_mut(*rank).is_some_and(|asked| !std::mem::replace(asked, true))
        });
        let left = deadline.saturating_duration_since(Instant::now());
        if next.is_empty() || left.is_zero() {
            return report;
        }
        // What the first ones say comes before the others are asked.
        let later = next.split_off(next.len().min(MAX_CONCURRENT_PROBES));
        later.iter().for_each(|rank| asked[*rank] = false);
        let now = std::mem::replace(&mut next, later);
        let of: Vec<_> = now.iter().map(|rank| &probe_addresses[*rank]).collect();
        for (rank, answer) in now.into_iter().zip(probe_all(&of, left, deadline)) {
            match answer {
                PeerStatus::Lost(how) => report.lost.push((rank, how)),
                PeerStatus::Left => report.left.push(rank),
                PeerStatus::Failed(failure) => report.failure = Some(failure),
                PeerStatus::Alive { busy: false, .. } => report.idle.push(rank),
                PeerStatus::Alive { waiting, .. } => next.extend(waiting),
            }
        }
        if report.failure.is_some() {
            return report;
        }
    }
}

/// Tells all other ranks that the group has failed, but for the ranks that caused it.
pub(crate) fn report_failure(
    probe_addresses: &[ProbeAddress],
    own: usize,
    failure: &GroupFailure,
    time: Duration,
) {
    let others: Vec<_> = probe_addresses
        .iter()
        .enumerate()
        .filter(|(rank, _)| *rank != own && !failure.ranks.contains(rank))
        .map(|(_, probe_address)| probe_address)
        .collect();
    for some in others.chunks(MAX_CONCURRENT_PROBES) {
        thread::scope(|scope| {
            for probe_address in some {
                scope.spawn(move || probe_address.report(failure, time));
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    const TIME: Duration = Duration::from_secs(5);

    fn probe_address(liveness: &Liveness) -> ProbeAddress {
        ProbeAddress { id: liveness.id(), host: Ipv4Addr::LOCALHOST.into(), port: liveness.port() }
    }

    #[test]
    fn whoever_is_waited_for_in_the_end_is_found() {
        let members: Vec<_> = (0..4).map(|_| Liveness::new().unwrap()).collect();
        let mut probe_addresses: Vec<_> =
            members.iter().map(|member| probe_address(member)).collect();
        // Nobody has this port: it is given back before anybody asks.
        probe_addresses[3].port =
            TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let one = members[1].operation();
        one.waits_for(vec![2]);
        let two = members[2].operation();
        two.waits_for(vec![3, 0]);
        let report = probe_transitively(&probe_addresses, 0, vec![1], TIME);
        assert_eq!(report.lost, [(3, "its process has exited")]);
        assert!(report.idle.is_empty() && report.failure.is_none());
        drop(two);
        let report = probe_transitively(&probe_addresses, 0, vec![1], TIME);
        assert_eq!((report.lost, report.idle), (vec![], vec![2]));
    }

    #[test]
    fn a_failure_is_told_and_the_first_one_stays() {
        let members: Vec<_> = (0..3).map(|_| Liveness::new().unwrap()).collect();
        let probe_addresses: Vec<_> = members.iter().map(|member| probe_address(member)).collect();
        let failure = GroupFailure {
            kind: ErrorKind::Lost,
            ranks: vec![1],
            text: "rank 1 is lost".to_owned(),
        };
        report_failure(&probe_addresses, 0, &failure, TIME);
        assert_eq!(members[2].failure(), Some(failure.clone()));
        assert_eq!((members[0].failure(), members[1].failure()), (None, None));
        let other = GroupFailure { text: "something else".to_owned(), ..failure.clone() };
        assert_eq!(members[2].fail(other), failure);
        assert_eq!(probe_transitively(&probe_addresses, 0, vec![2], TIME).failure, Some(failure));
    }

    #[test]
    fn who_takes_the_connection_and_says_nothing_stands_still() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = Ipv4Addr::LOCALHOST.into();
        let silent = ProbeAddress { id: 1, host, port: listener.local_addr().unwrap().port() };
        let answer = silent.probe(Duration::from_millis(50));
        assert_eq!(answer, PeerStatus::Lost("its process does not respond"));
    }

    #[test]
    fn garbage_gets_no_answer_and_others_still_do() {
        let member = Liveness::new().unwrap();
        let mut stranger = TcpStream::connect(("127.0.0.1", member.port())).unwrap();
        stranger.set_read_timeout(Some(TIME)).unwrap();
        stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        assert_eq!(stranger.read(&mut [0; 8]).unwrap_or(0), 0);
        let known = probe_address(&member);
        assert_eq!(known.probe(TIME), PeerStatus::Alive { busy: false, waiting: vec![] });
        let unknown = ProbeAddress { id: known.id ^ 1, ..known };
        assert_eq!(unknown.probe(TIME), PeerStatus::Left);
    }
}
