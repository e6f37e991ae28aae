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

use crate::accept::{REST, take_all};
use crate::bytes::{Reader, put, put_list};
use crate::error::{Error, ErrorKind};
use crate::lock;

const MAGIC: &[u8; 8] = b"EKpulse1";
/// Magic, identity, kind and length of what follows.
const FRONT: usize = 8 + 8 + 1 + 2;
/// The longest that follows.
const MOST: usize = 4096;
/// Ranks that are told of at most.
const MAX_RANKS: usize = 256;
/// Characters of a failure's text.
const MAX_TEXT: usize = 1000;
/// Connections that are being answered; when more come, the oldest is dropped.
const MAX_CALLERS: usize = 256;
/// How long a caller may take to say what it wants.
const CALLER_TIME: Duration = Duration::from_secs(2);
/// How often the thread looks whether anybody needs it.
const LOOK: Duration = Duration::from_millis(500);
/// Ranks that are asked or told at a time.
const AT_ONCE: usize = 64;

const ASK: u8 = 0;
const TELL: u8 = 1;
const UNKNOWN: u8 = 2;
const ALIVE: u8 = 3;
const FAILED: u8 = 4;

/// Why a group cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) kind: ErrorKind,
    pub(crate) ranks: Vec<usize>,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn error(&self) -> Error {
        Error::new(self.kind, self.text.clone()).of(self.ranks.clone()).ends_group()
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
pub(crate) struct Pulse {
    id: u64,
    failed: AtomicBool,
    state: Mutex<State>,
    /// Keeps the thread that answers.
    answerer: Arc<Answerer>,
}

#[derive(Default)]
struct State {
    failure: Option<Failure>,
    /// Whom the operations in progress wait for, by their numbers.
    waiting: HashMap<u64, Vec<usize>>,
    next: u64,
}

impl Pulse {
    /// A new member.
    ///
    /// # Errors
    /// When the thread that answers for this process cannot be started.
    pub(crate) fn new() -> io::Result<Arc<Self>> {
        let answerer = Answerer::get()?;
        let pulse = Arc::new(Self {
            id: crate::random()?,
            failed: AtomicBool::new(false),
            state: Mutex::default(),
            answerer,
        });
        lock(&pulse.answerer.members).insert(pulse.id, Arc::downgrade(&pulse));
        Ok(pulse)
    }

    /// Its identity.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Where its process answers.
    pub(crate) fn port(&self) -> u16 {
        self.answerer.port
    }

    /// Why the group cannot go on, if that is so.
    pub(crate) fn failure(&self) -> Option<Failure> {
        if !self.failed.load(Ordering::Acquire) {
            return None;
        }
        lock(&self.state).failure.clone()
    }

    /// The group cannot go on. The first failure stays; it is given back.
    pub(crate) fn fail(&self, failure: Failure) -> Failure {
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
        Operation { pulse: self, number }
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        lock(&self.answerer.members).remove(&self.id);
    }
}

/// An operation in progress.
pub(crate) struct Operation<'a> {
    pulse: &'a Pulse,
    number: u64,
}

impl Operation<'_> {
    /// It waits for these ranks now.
    pub(crate) fn waits_for(&self, ranks: Vec<usize>) {
        lock(&self.pulse.state).waiting.insert(self.number, ranks);
    }
}

impl Drop for Operation<'_> {
    fn drop(&mut self) {
        lock(&self.pulse.state).waiting.remove(&self.number);
    }
}

/// The thread that answers for all members of this process.
struct Answerer {
    port: u16,
    members: Mutex<HashMap<u64, Weak<Pulse>>>,
}

static ANSWERER: Mutex<Weak<Answerer>> = Mutex::new(Weak::new());

impl Answerer {
    fn get() -> io::Result<Arc<Self>> {
        let mut current = lock(&ANSWERER);
        if let Some(answerer) = current.upgrade() {
            return Ok(answerer);
        }
        let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0))
            .or_else(|_| TcpListener::bind(("0.0.0.0", 0)))?;
        listener.set_nonblocking(true)?;
        let port = listener.local_addr()?.port();
        let answerer = Arc::new(Self { port, members: Mutex::default() });
        let weak = Arc::downgrade(&answerer);
        thread::Builder::new()
            .name("evenkeel-pulse".to_owned())
            .spawn(move || answer_all(&listener, &weak))?;
        *current = Arc::downgrade(&answerer);
        Ok(answerer)
    }

    fn answer(&self, request: &[u8]) -> Vec<u8> {
        let mut reader = Reader::new(&request[8..]);
        let (id, kind) = (reader.long().unwrap_or(0), reader.byte().unwrap_or(ASK));
        let member = lock(&self.members).get(&id).and_then(Weak::upgrade);
        let Some(member) = member else { return frame(id, UNKNOWN, &[]) };
        if kind == TELL
            && let Some(failure) = Failure::decode(&request[FRONT..])
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
fn is_whole(bytes: &[u8]) -> Option<bool> {
    if !MAGIC.starts_with(&bytes[..bytes.len().min(8)]) {
        return None;
    }
    let Some(length) = bytes.get(FRONT - 2..FRONT) else { return Some(false) };
    let length = usize::from(u16::from_le_bytes([length[0], length[1]]));
    (length <= MOST).then_some(bytes.len() >= FRONT + length)
}

struct Caller {
    stream: TcpStream,
    heard: Vec<u8>,
    deadline: Instant,
}

impl Caller {
    /// Hears more; false when there is nothing more to do for it.
    fn hear(&mut self, answerer: &Answerer) -> bool {
        let mut buffer = [0; 1024];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return false,
                Ok(count) => self.heard.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == IoErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == IoErrorKind::Interrupted => {}
                Err(_) => return false,
            }
            match is_whole(&self.heard) {
                Some(false) => {}
                Some(true) => {
                    // It fits into a socket's buffer. Who does not get it finds that out.
                    let _ = self.stream.write_all(&answerer.answer(&self.heard));
                    return false;
                }
                None => return false,
            }
        }
    }
}

fn answer_all(listener: &TcpListener, answerer: &Weak<Answerer>) {
    let mut callers: VecDeque<Caller> = VecDeque::new();
    let mut resting = false;
    while answerer.strong_count() > 0 {
        let mut waited: Vec<_> = callers
            .iter()
            .map(|caller| PollFd::new(&caller.stream, PollFlags::IN))
            .chain((!resting).then(|| PollFd::new(listener, PollFlags::IN)))
            .collect();
        let time = Timespec::try_from(if resting { REST } else { LOOK }).unwrap_or_default();
        if poll(&mut waited, Some(&time)).is_err() {
            thread::sleep(Duration::from_millis(1));
        }
        let Some(answerer) = answerer.upgrade() else { return };
        resting = take_all(listener, |stream| {
            let deadline = Instant::now() + CALLER_TIME;
            callers.push_back(Caller { stream, heard: vec![], deadline });
            if callers.len() > MAX_CALLERS {
                callers.pop_front();
            }
        });
        let now = Instant::now();
        callers.retain_mut(|caller| now < caller.deadline && caller.hear(&answerer));
    }
}

const ENDED: &str = "its process has ended";
const STILL: &str = "its process stands still";
const FAR: &str = "its host cannot be reached";

/// Where a member of a group answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Contact {
    pub(crate) id: u64,
    pub(crate) host: IpAddr,
    pub(crate) port: u16,
}

/// What asking a member gave.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Alive, in an operation or not, and waiting for these ranks.
    Alive { busy: bool, waiting: Vec<usize> },
    /// Alive, but the group has failed there.
    Failed(Failure),
    /// It has left the group, in peace or because of a failure.
    Left,
    /// Not alive, and in which way.
    Lost(&'static str),
}

impl Contact {
    /// Asks the member, for no longer than the time.
    pub(crate) fn ask(&self, time: Duration) -> Answer {
        self.exchange(ASK, &[], time)
    }

    fn tell(&self, failure: &Failure, time: Duration) {
        self.exchange(TELL, &failure.encode(), time);
    }

    fn exchange(&self, kind: u8, text: &[u8], time: Duration) -> Answer {
        let deadline = Instant::now() + time;
        let address = SocketAddr::new(self.host, self.port);
        let mut stream = match TcpStream::connect_timeout(&address, time) {
            Ok(stream) => stream,
            Err(error) if error.kind() == IoErrorKind::ConnectionRefused => {
                return Answer::Lost(ENDED);
            }
            Err(_) => return Answer::Lost(FAR),
        };
        let mut heard = vec![];
        let asked = stream.write_all(&frame(self.id, kind, text));
        while asked.is_ok() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || stream.set_read_timeout(Some(left)).is_err() {
                return Answer::Lost(STILL);
            }
            let mut buffer = [0; 1024];
            match stream.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => heard.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == IoErrorKind::Interrupted => {}
                Err(error)
                    if [IoErrorKind::WouldBlock, IoErrorKind::TimedOut].contains(&error.kind()) =>
                {
                    return Answer::Lost(STILL);
                }
                Err(_) => break,
            }
            match is_whole(&heard) {
                Some(false) => {}
                Some(true) => return understand(&heard).unwrap_or(Answer::Lost(ENDED)),
                None => break,
            }
        }
        // Somebody else has the port now, or the process ended just then.
        Answer::Lost(ENDED)
    }
}

fn understand(bytes: &[u8]) -> Option<Answer> {
    let mut reader = Reader::new(&bytes[FRONT..]);
    match bytes[16] {
        ALIVE => {
            let busy = reader.byte()? != 0;
            Some(Answer::Alive { busy, waiting: reader.list()? })
        }
        FAILED => Failure::decode(&bytes[FRONT..]).map(Answer::Failed),
        UNKNOWN => Some(Answer::Left),
        _ => None,
    }
}

/// What asking around gave.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Findings {
    /// Ranks that are not alive, and in which way.
    pub(crate) lost: Vec<(usize, &'static str)>,
    /// Ranks that have left. What they sent may still come.
    pub(crate) left: Vec<usize>,
    /// What somebody had found out before.
    pub(crate) told: Option<Failure>,
    /// Ranks that are alive and in no operation.
    pub(crate) idle: Vec<usize>,
}

/// Asks these members, some at a time, each for no longer than the time. Who is not asked by the deadline cannot be reached.
pub(crate) fn ask_all(contacts: &[&Contact], each: Duration, deadline: Instant) -> Vec<Answer> {
    let next = AtomicUsize::new(0);
    let ask = || {
        let mut answers = vec![];
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(contact) = contacts.get(at) else { return answers };
            let left = deadline.saturating_duration_since(Instant::now());
            let asked = !left.is_zero();
            let answer = if asked { contact.ask(each.min(left)) } else { Answer::Lost(FAR) };
            answers.push((at, answer));
        }
    };
    let mut answers: Vec<(usize, Answer)> = thread::scope(|scope| {
        let asking: Vec<_> = contacts.iter().take(AT_ONCE).map(|_| scope.spawn(ask)).collect();
        asking.into_iter().filter_map(|answers| answers.join().ok()).flatten().collect()
    });
    answers.sort_unstable_by_key(|(at, _)| *at);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

/// Asks ranks, and the ranks that they wait for in turn, until nothing new comes or the time is over.
pub(crate) fn ask_around(
    contacts: &[Contact],
    own: usize,
    first: Vec<usize>,
    time: Duration,
) -> Findings {
    let deadline = Instant::now() + time;
    let mut findings = Findings::default();
    let mut asked = vec![false; contacts.len()];
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
            return findings;
        }
        // What the first ones say comes before the others are asked.
        let later = next.split_off(next.len().min(AT_ONCE));
        later.iter().for_each(|rank| asked[*rank] = false);
        let now = std::mem::replace(&mut next, later);
        let of: Vec<_> = now.iter().map(|rank| &contacts[*rank]).collect();
        for (rank, answer) in now.into_iter().zip(ask_all(&of, left, deadline)) {
            match answer {
                Answer::Lost(how) => findings.lost.push((rank, how)),
                Answer::Left => findings.left.push(rank),
                Answer::Failed(failure) => findings.told = Some(failure),
                Answer::Alive { busy: false, .. } => findings.idle.push(rank),
                Answer::Alive { waiting, .. } => next.extend(waiting),
            }
        }
        if findings.told.is_some() {
            return findings;
        }
    }
}

/// Tells all other ranks that the group has failed, but for the ranks that caused it.
pub(crate) fn tell_all(contacts: &[Contact], own: usize, failure: &Failure, time: Duration) {
    let others: Vec<_> = contacts
        .iter()
        .enumerate()
        .filter(|(rank, _)| *rank != own && !failure.ranks.contains(rank))
        .map(|(_, contact)| contact)
        .collect();
    for some in others.chunks(AT_ONCE) {
        thread::scope(|scope| {
            for contact in some {
                scope.spawn(move || contact.tell(failure, time));
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    const TIME: Duration = Duration::from_secs(5);

    fn contact(pulse: &Pulse) -> Contact {
        Contact { id: pulse.id(), host: Ipv4Addr::LOCALHOST.into(), port: pulse.port() }
    }

    #[test]
    fn whoever_is_waited_for_in_the_end_is_found() {
        let members: Vec<_> = (0..4).map(|_| Pulse::new().unwrap()).collect();
        let mut contacts: Vec<_> = members.iter().map(|member| contact(member)).collect();
        // Nobody has this port: it is given back before anybody asks.
        contacts[3].port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let one = members[1].operation();
        one.waits_for(vec![2]);
        let two = members[2].operation();
        two.waits_for(vec![3, 0]);
        let findings = ask_around(&contacts, 0, vec![1], TIME);
        assert_eq!(findings.lost, [(3, "its process has ended")]);
        assert!(findings.idle.is_empty() && findings.told.is_none());
        drop(two);
        let findings = ask_around(&contacts, 0, vec![1], TIME);
        assert_eq!((findings.lost, findings.idle), (vec![], vec![2]));
    }

    #[test]
    fn a_failure_is_told_and_the_first_one_stays() {
        let members: Vec<_> = (0..3).map(|_| Pulse::new().unwrap()).collect();
        let contacts: Vec<_> = members.iter().map(|member| contact(member)).collect();
        let failure =
            Failure { kind: ErrorKind::Lost, ranks: vec![1], text: "rank 1 is lost".to_owned() };
        tell_all(&contacts, 0, &failure, TIME);
        assert_eq!(members[2].failure(), Some(failure.clone()));
        assert_eq!((members[0].failure(), members[1].failure()), (None, None));
        let other = Failure { text: "something else".to_owned(), ..failure.clone() };
        assert_eq!(members[2].fail(other), failure);
        assert_eq!(ask_around(&contacts, 0, vec![2], TIME).told, Some(failure));
    }

    #[test]
    fn who_takes_the_connection_and_says_nothing_stands_still() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = Ipv4Addr::LOCALHOST.into();
        let silent = Contact { id: 1, host, port: listener.local_addr().unwrap().port() };
        let answer = silent.ask(Duration::from_millis(50));
        assert_eq!(answer, Answer::Lost("its process stands still"));
    }

    #[test]
    fn garbage_gets_no_answer_and_others_still_do() {
        let member = Pulse::new().unwrap();
        let mut stranger = TcpStream::connect(("127.0.0.1", member.port())).unwrap();
        stranger.set_read_timeout(Some(TIME)).unwrap();
        stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        assert_eq!(stranger.read(&mut [0; 8]).unwrap_or(0), 0);
        let known = contact(&member);
        assert_eq!(known.ask(TIME), Answer::Alive { busy: false, waiting: vec![] });
        let unknown = Contact { id: known.id ^ 1, ..known };
        assert_eq!(unknown.ask(TIME), Answer::Left);
    }
}
