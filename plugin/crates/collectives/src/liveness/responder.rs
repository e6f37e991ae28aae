//! The members of groups in this process, and the responder thread that answers probes for all of them.

use std::collections::{HashMap, VecDeque};
use std::io::{self, ErrorKind as IoErrorKind, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant};

use evenkeel_tls::JobIdentity;
use evenkeel_transport::Owner;
use evenkeel_transport::sync::lock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::MAX_RANKS;
use super::failure::GroupFailure;
use super::frame::{
    ALIVE, FAILED, HEADER_BYTES, PROBE, REPORT_FAILURE, UNKNOWN, frame, is_complete,
};
use crate::accept::{ACCEPT_RETRY_DELAY, accept_all, listen, ports, prepare_listener};
use crate::codec::{Reader, put_list};
use crate::error::{ErrorKind, Result};
use crate::job_stream::{self, JobStream};

/// Maximum number of open connections. One more replaces the oldest.
const MAX_CONNECTIONS: usize = 256;
/// How long a connection may take to send its request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// How often the thread checks whether this process still has members.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Why a group cannot be used in a forked child: its links and threads belong to the parent.
fn forked() -> GroupFailure {
    let text = "this process was forked from the one that made the group: make a group here, or call from the parent";
    GroupFailure { kind: ErrorKind::System, ranks: vec![], text: text.to_owned() }
}

/// This process's state as a member of a group: its failure, and the ranks that it waits for.
pub(crate) struct Liveness {
    id: u64,
    /// The process that made it.
    owner: Owner,
    failed: AtomicBool,
    state: Mutex<MemberState>,
    /// Keeps the responder thread running.
    responder: Arc<Responder>,
}

#[derive(Default)]
struct MemberState {
    failure: Option<GroupFailure>,
    /// The ranks that each operation in progress waits for, by the operation's number.
    waiting: HashMap<u64, Vec<usize>>,
    next: u64,
}

impl MemberState {
    fn awaited(&self) -> Vec<usize> {
        let mut ranks: Vec<usize> = self.waiting.values().flatten().copied().collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }
}

impl Liveness {
    /// A new member.
    ///
    /// # Errors
    /// When the responder thread cannot be started.
    pub(crate) fn new() -> io::Result<Arc<Self>> {
        let responder = Responder::get()?;
        let liveness = Arc::new(Self {
            id: u64::from_le_bytes(evenkeel_transport::random()?),
            owner: Owner::current(),
            failed: AtomicBool::new(false),
            state: Mutex::default(),
            responder,
        });
        lock(&liveness.responder.members).insert(liveness.id, Arc::downgrade(&liveness));
        Ok(liveness)
    }

    /// The member's identity.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// The port of the responder.
    pub(crate) fn port(&self) -> u16 {
        self.responder.port
    }

    /// Whether this is a forked child of the process that made the group.
    pub(crate) fn is_forked(&self) -> bool {
        self.owner.is_parent()
    }

    /// # Errors
    /// When this is a forked child.
    pub(crate) fn check_not_forked(&self) -> Result<()> {
        if self.is_forked() { Err(forked().error()) } else { Ok(()) }
    }

    /// The failure of the group, if it has failed. In a forked child it has, and no lock is taken: another thread of the parent may
    /// have held it.
    pub(crate) fn failure(&self) -> Option<GroupFailure> {
        if self.is_forked() {
            return Some(forked());
        }
        if !self.failed.load(Ordering::Acquire) {
            return None;
        }
        lock(&self.state).failure.clone()
    }

    /// Records a failure of the group. The first failure stays; it is returned.
    pub(crate) fn fail(&self, failure: GroupFailure) -> GroupFailure {
        let failure = lock(&self.state).failure.get_or_insert(failure).clone();
        self.failed.store(true, Ordering::Release);
        failure
    }

    /// The ranks that this one's operations in progress wait for.
    pub(crate) fn awaited(&self) -> Vec<usize> {
        lock(&self.state).awaited()
    }

    /// Registers an operation, which ends when the value is dropped.
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
    /// Records that the operation waits for these ranks.
    pub(crate) fn waits_for(&self, ranks: Vec<usize>) {
        lock(&self.liveness.state).waiting.insert(self.number, ranks);
    }
}

impl Drop for Operation<'_> {
    fn drop(&mut self) {
        lock(&self.liveness.state).waiting.remove(&self.number);
    }
}

/// The responder thread of all members of this process.
struct Responder {
    /// The process with the thread.
    owner: Owner,
    port: u16,
    /// What probes of and by this process are encrypted with.
    identity: Option<JobIdentity>,
    members: Mutex<HashMap<u64, Weak<Liveness>>>,
}

static RESPONDER: Mutex<Weak<Responder>> = Mutex::new(Weak::new());

/// What this process encrypts its probes with.
pub(super) fn identity() -> io::Result<Option<JobIdentity>> {
    let current = lock(&RESPONDER).upgrade();
    match current {
        Some(responder) => Ok(responder.identity.clone()),
        None => job_stream::identity().map_err(io::Error::other),
    }
}

impl Responder {
    fn get() -> io::Result<Arc<Self>> {
        let mut current = lock(&RESPONDER);
        // A forked child needs one of its own: that of its parent knows the parent's groups only.
        if let Some(responder) = current.upgrade().filter(|known| !known.owner.is_parent()) {
            return Ok(responder);
        }
        let responder = Self::start(job_stream::identity().map_err(io::Error::other)?)?;
        *current = Arc::downgrade(&responder);
        Ok(responder)
    }

    fn start(identity: Option<JobIdentity>) -> io::Result<Arc<Self>> {
        let ports = ports()?;
        // Where the system has no IPv6, the error that counts is that of IPv4.
        let listener = listen(Ipv6Addr::UNSPECIFIED.into(), ports.as_ref())
            .or_else(|_| listen(Ipv4Addr::UNSPECIFIED.into(), ports.as_ref()))?;
        prepare_listener(&listener)?;
        let port = listener.local_addr()?.port();
        let owner = Owner::current();
        let responder = Arc::new(Self { owner, port, identity, members: Mutex::default() });
        let weak = Arc::downgrade(&responder);
        thread::Builder::new()
            .name("evenkeel-alive".to_owned())
            .spawn(move || run_responder(&listener, &weak))?;
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
        let mut body = vec![];
        let state = lock(&member.state);
        let mut waiting = state.awaited();
        waiting.truncate(MAX_RANKS);
        body.push(u8::from(!state.waiting.is_empty()));
        put_list(&mut body, waiting.iter());
        frame(id, ALIVE, &body)
    }
}

struct ProbeConnection {
    stream: JobStream,
    received: Vec<u8>,
    deadline: Instant,
}

impl ProbeConnection {
    /// Reads the request and responds. Returns false when the connection is finished.
    fn serve(&mut self, responder: &Responder) -> bool {
        let mut buffer = [0; 1024];
        match self.stream.is_mismatched() {
            Ok(false) => {}
            Err(error) if error.kind() == IoErrorKind::WouldBlock => return true,
            Ok(true) | Err(_) => return false,
        }
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
                    // The response fits into the socket's buffer. A prober that does not get it times out.
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
        let mut polled: Vec<_> = connections
            .iter()
            .map(|connection| PollFd::new(&connection.stream, PollFlags::IN))
            .chain((!out_of_sockets).then(|| PollFd::new(listener, PollFlags::IN)))
            .collect();
        let time =
            Timespec::try_from(if out_of_sockets { ACCEPT_RETRY_DELAY } else { POLL_INTERVAL })
                .unwrap_or_default();
        if poll(&mut polled, Some(&time)).is_err() {
            thread::sleep(Duration::from_millis(1));
        }
        let Some(responder) = responder.upgrade() else { return };
        out_of_sockets = accept_all(listener, |stream| {
            let deadline = Instant::now() + REQUEST_TIMEOUT;
            let Ok(stream) = JobStream::accept(stream, responder.identity.as_ref()) else { return };
            let mut connection = ProbeConnection { stream, received: vec![], deadline };
            // Usually the request is there already.
            if connection.serve(&responder) {
                connections.push_back(connection);
            }
            if connections.len() > MAX_CONNECTIONS
                && let Some(mut oldest) = connections.pop_front()
            {
                oldest.serve(&responder);
            }
        });
        // Requests first: they may have come in time, and this process not.
        let now = Instant::now();
        connections
            .retain_mut(|connection| connection.serve(&responder) && now < connection.deadline);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    use evenkeel_transport::Settings;

    use crate::test_support::TEST_TIMEOUT;

    fn identity(digit: &str) -> JobIdentity {
        let key = digit.repeat(64);
        let lookup = |name: &str| match name {
            "EVENKEEL_ENCRYPTION" => Some("required".to_owned()),
            "EVENKEEL_JOB_KEY" => Some(key.clone()),
            _ => None,
        };
        Settings::from_lookup(lookup).unwrap().encryption().unwrap().clone()
    }

    /// The kind of the response to a probe.
    fn probe(responder: &Responder, identity: Option<&JobIdentity>) -> io::Result<u8> {
        let socket = TcpStream::connect((Ipv4Addr::LOCALHOST, responder.port))?;
        socket.set_read_timeout(Some(TEST_TIMEOUT))?;
        let mut stream = JobStream::connect(socket, identity)?;
        stream.write_all(&frame(7, PROBE, &[]))?;
        let mut response = [0; HEADER_BYTES];
        stream.read_exact(&mut response)?;
        Ok(response[16])
    }

    #[test]
    fn encrypted_probes_are_answered_to_the_job_only() {
        let responder = Responder::start(Some(identity("5"))).unwrap();
        assert_eq!(probe(&responder, Some(&identity("5"))).unwrap(), UNKNOWN);
        assert!(probe(&responder, Some(&identity("6"))).is_err(), "another key");
        assert!(probe(&responder, None).is_err(), "in clear");
        let clear = Responder::start(None).unwrap();
        assert!(probe(&clear, Some(&identity("5"))).is_err());
        assert_eq!(probe(&clear, None).unwrap(), UNKNOWN);
    }
}
