//! Bootstrap of a run: a star of plain TCP connections around rank 0. The ranks join, gather small
//! facts from each other, and agree on the cause of a failure.
//!
//! Messages are JSON after a length of four bytes, big endian. Rank 0 decides which rank caused a
//! failure: the one whose connection closed without a report. The other ranks report what they saw
//! and wait for that verdict.
//!
//! This does not use Evenkeel's own collectives: a benchmark must not lean on what it measures.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::Result;

/// Raised with every change of the messages.
const PROTOCOL: u32 = 1;
/// Maximum length of a message in bytes. The facts of 10,000 ranks fit.
const MAX_MESSAGE: usize = 8 << 20;
/// Time that a connection has to send its hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of connections that have not sent their hello.
const MAX_PENDING: usize = 64;
/// The first probe of an idle connection, the time between two, and how many may stay unanswered.
const PROBE_IDLE: Duration = Duration::from_secs(5);
const PROBE_INTERVAL: Duration = Duration::from_secs(2);
const PROBES: u32 = 3;
/// After this time a machine that does not answer counts as unreachable: when the last probe is
/// unanswered.
const PEER_TIMEOUT: Duration = Duration::from_secs(11);
/// Time that rank 0 waits, after a failure, for a connection to close.
const VERDICT_GRACE: Duration = Duration::from_secs(1);
/// Time that the other ranks wait for the verdict.
const VERDICT_TIMEOUT: Duration = Duration::from_secs(3);

#[derive(Debug, Serialize, Deserialize)]
enum Message {
    Hello { protocol: u32, rank: usize, world_size: usize, host: String },
    Ranks(Vec<RankInfo>),
    Contribution(Value),
    All(Vec<Value>),
    Failed(String),
    Verdict(String),
}

/// A rank's machine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RankInfo {
    /// Its name.
    pub(crate) host: String,
    /// Its address, as rank 0 sees it.
    pub(crate) address: String,
}

/// Which rank this is and where to find rank 0.
pub(crate) struct RankConfig {
    /// This rank.
    pub(crate) rank: usize,
    /// The number of ranks.
    pub(crate) world_size: usize,
    /// Rank 0's name or address.
    pub(crate) host: String,
    /// Rank 0's port.
    pub(crate) port: u16,
    /// Rank 0's listener, if the parent process opened it.
    pub(crate) listener: Option<TcpListener>,
    /// Timeout of every wait.
    pub(crate) timeout: Duration,
}

/// A connection between rank 0 and another.
struct Connection {
    stream: TcpStream,
    opened: Instant,
    inbox: Vec<u8>,
    messages: VecDeque<Message>,
    ended: bool,
    /// It has ended because nothing came back from the other machine.
    unreachable: bool,
}

impl Connection {
    fn new(stream: TcpStream) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        // A machine that vanishes does not close its connections: keepalive finds out.
        sockopt::set_socket_keepalive(&stream, true)?;
        sockopt::set_tcp_keepidle(&stream, PROBE_IDLE)?;
        sockopt::set_tcp_keepintvl(&stream, PROBE_INTERVAL)?;
        sockopt::set_tcp_keepcnt(&stream, PROBES)?;
        // While a message is unacknowledged the kernel sends no probes, and repeats the message for
        // a quarter of an hour.
        sockopt::set_tcp_user_timeout(&stream, PEER_TIMEOUT.as_millis() as u32)?;
        let (opened, messages) = (Instant::now(), VecDeque::new());
        Ok(Self { stream, opened, inbox: vec![], messages, ended: false, unreachable: false })
    }

    /// Reads what has arrived. A connection that breaks, or sends no valid message, has ended.
    fn receive(&mut self) {
        let mut buffer = [0; 16 << 10];
        while !self.ended {
            match self.stream.read(&mut buffer) {
                Ok(0) => self.ended = true,
                Ok(count) => self.inbox.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    let lost_on_the_way = [
                        ErrorKind::TimedOut,
                        ErrorKind::HostUnreachable,
                        ErrorKind::NetworkUnreachable,
                    ];
                    self.unreachable = lost_on_the_way.contains(&error.kind());
                    self.ended = true;
                }
            }
            while let Some((length, rest)) = self.inbox.split_first_chunk::<4>() {
                let length = u32::from_be_bytes(*length) as usize;
                let Some(body) = rest.get(..length) else {
                    self.ended |= length > MAX_MESSAGE;
                    break;
                };
                let Ok(message) = serde_json::from_slice(body) else {
                    self.ended = true;
                    return;
                };
                self.messages.push_back(message);
                self.inbox.drain(..4 + length);
            }
        }
    }

    /// Sends a message within the time.
    fn send(&mut self, message: &Message, timeout: Duration) -> Result<()> {
        let deadline = Instant::now() + timeout;
        let body = serde_json::to_vec(message).map_err(|error| format!("a message: {error}"))?;
        let length = u32::try_from(body.len()).map_err(|_| "a message is too long".to_owned())?;
        let bytes = [&length.to_be_bytes(), &body[..]].concat();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            match self.stream.write(rest) {
                Ok(count) => rest = &rest[count..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err("it does not read what was sent to it".to_owned());
                    }
                    wait([PollFd::new(&self.stream, PollFlags::OUT)], left);
                }
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(())
    }

    /// What to wait for until more arrives; nothing after its end.
    fn readable(&self) -> Option<PollFd<'_>> {
        (!self.ended).then(|| PollFd::new(&self.stream, PollFlags::IN))
    }

    /// What the other end said of a failure.
    fn failure(&self) -> Option<&Message> {
        let is_failure =
            |message: &&Message| matches!(message, Message::Failed(_) | Message::Verdict(_));
        self.messages.iter().find(is_failure)
    }
}

/// Waits until one of these is ready, or the time has passed.
fn wait<'a>(ready: impl IntoIterator<Item = PollFd<'a>>, time: Duration) {
    let mut ready: Vec<_> = ready.into_iter().collect();
    // An interrupted or failed wait is a short one: the callers check again and have deadlines.
    let _ = poll(&mut ready, Some(&Timespec::try_from(time).unwrap_or_default()));
}

/// The ranks of a run, joined.
pub(crate) struct World {
    rank: usize,
    ranks: Vec<RankInfo>,
    timeout: Duration,
    /// On rank 0 the others in order, elsewhere rank 0 alone.
    connections: Vec<Connection>,
}

impl World {
    /// Waits until all ranks are there.
    ///
    /// # Errors
    /// Names the ranks that did not come, or says why rank 0 could not be reached or refused this
    /// one.
    pub(crate) fn join(config: RankConfig) -> Result<Self> {
        if config.rank == 0 { accept_ranks(config) } else { join_rank_0(&config) }
    }

    /// This rank.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// Every rank's machine.
    pub(crate) fn ranks(&self) -> &[RankInfo] {
        &self.ranks
    }

    /// Timeout of every wait.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// A rank as it is printed: number, host, address.
    pub(crate) fn describe(&self, rank: usize) -> String {
        describe(rank, &self.ranks[rank])
    }

    /// Gathers one value from every rank, in rank order. Returns once all ranks have called it.
    pub(crate) fn all_gather<T: Serialize + DeserializeOwned>(
        &mut self,
        mine: &T,
    ) -> Result<Vec<T>> {
        let value = serde_json::to_value(mine).map_err(|error| error.to_string())?;
        let all = if self.rank == 0 {
            self.gather(value)?
        } else {
            self.send_to_all(&Message::Contribution(value))?;
            self.wait_for_all()?
        };
        let read =
            |value| serde_json::from_value(value).map_err(|error| format!("a rank sent {error}"));
        all.into_iter().map(read).collect()
    }

    /// Waits until all ranks are here.
    pub(crate) fn barrier(&mut self) -> Result<()> {
        self.all_gather(&()).map(|_| ())
    }

    /// Checks, without blocking, whether a rank failed or was lost.
    pub(crate) fn check(&mut self) -> Result<()> {
        for connection in &mut self.connections {
            connection.receive();
        }
        self.check_received()
    }

    /// [`check`](Self::check) of what was received before.
    fn check_received(&self) -> Result<()> {
        for (at, connection) in self.connections.iter().enumerate() {
            match connection.failure() {
                Some(Message::Failed(text)) => {
                    return Err(format!("{}: {text}", self.describe(self.peer(at))));
                }
                Some(Message::Verdict(text)) => return Err(text.clone()),
                _ if connection.ended => return Err(self.lost_rank(at)),
                _ => {}
            }
        }
        Ok(())
    }

    /// The rank at the other end of a connection.
    fn peer(&self, connection: usize) -> usize {
        if self.rank == 0 { connection + 1 } else { 0 }
    }

    /// What has become of the rank at the other end of a connection that has ended.
    fn lost_rank(&self, connection: usize) -> String {
        let rank = self.describe(self.peer(connection));
        match self.connections[connection].unreachable {
            true => format!("{rank} cannot be reached: its machine or the network to it is down"),
            false => format!("{rank} is gone: its process or its machine has ended"),
        }
    }

    /// Receives until something is found; nothing after the timeout.
    fn receive_until<T>(
        &mut self,
        timeout: Duration,
        mut find: impl FnMut(&mut Self) -> Option<T>,
    ) -> Option<T> {
        let deadline = Instant::now() + timeout;
        loop {
            self.connections.iter_mut().for_each(Connection::receive);
            if let Some(found) = find(self) {
                return Some(found);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            wait(self.connections.iter().filter_map(Connection::readable), left);
        }
    }

    fn send_to_all(&mut self, message: &Message) -> Result<()> {
        for at in 0..self.connections.len() {
            if let Err(error) = self.connections[at].send(message, self.timeout) {
                return Err(format!("cannot send to {}: {error}", self.describe(self.peer(at))));
            }
        }
        Ok(())
    }

    fn gather(&mut self, mine: Value) -> Result<Vec<Value>> {
        let mut shared: Vec<Option<Value>> = vec![None; self.connections.len()];
        let gathered = self.receive_until(self.timeout, |world| {
            if let Err(seen) = world.check_received() {
                return Some(Err(seen));
            }
            for (place, connection) in shared.iter_mut().zip(&mut world.connections) {
                if place.is_none()
                    && let Some(Message::Contribution(value)) = connection.messages.pop_front()
                {
                    *place = Some(value);
                }
            }
            shared.iter().all(Option::is_some).then_some(Ok(()))
        });
        gathered.unwrap_or_else(|| {
            let silent = shared.iter().enumerate().filter(|(_, value)| value.is_none());
            let silent: Vec<_> = silent.map(|(at, _)| self.describe(at + 1)).collect();
            Err(format!("nothing from {} for {:?}", silent.join(", "), self.timeout))
        })?;
        let all: Vec<_> = std::iter::once(mine).chain(shared.into_iter().flatten()).collect();
        self.send_to_all(&Message::All(all.clone()))?;
        Ok(all)
    }

    fn wait_for_all(&mut self) -> Result<Vec<Value>> {
        let received = self.receive_until(self.timeout, |world| {
            let messages = &mut world.connections[0].messages;
            // First: rank 0 leaves after the last values, and its end may arrive with them.
            match messages.pop_front_if(|message| matches!(message, Message::All(_))) {
                Some(Message::All(all)) => Some(Ok(all)),
                _ => world.check_received().err().map(Err),
            }
        });
        let silent = || Err(format!("nothing from {} for {:?}", self.describe(0), self.timeout));
        received.unwrap_or_else(silent)
    }

    /// Ends the run for all ranks because of what this one saw. Gives the verdict, the same on all
    /// ranks.
    pub(crate) fn fail(mut self, seen: String) -> String {
        if self.rank == 0 { self.decide_verdict(seen) } else { self.report_failure(seen) }
    }

    fn decide_verdict(&mut self, seen: String) -> String {
        // The rank that closed without a report is the cause; ranks that reported only noticed it.
        let silent = |connection: &Connection| connection.ended && connection.failure().is_none();
        let grace = if self.connections.is_empty() { Duration::ZERO } else { VERDICT_GRACE };
        let lost = self.receive_until(grace, |world| world.connections.iter().position(silent));
        let verdict = lost.map_or(seen, |at| self.lost_rank(at));
        let message = Message::Verdict(verdict.clone());
        for connection in &mut self.connections {
            // Ranks that do not get the verdict see this connection close.
            let _ = connection.send(&message, HELLO_TIMEOUT);
            let _ = connection.stream.shutdown(Shutdown::Write);
        }
        verdict
    }

    fn report_failure(&mut self, seen: String) -> String {
        // If rank 0 is lost this fails, and the end of its connection says so below.
        let _ = self.connections[0].send(&Message::Failed(seen.clone()), VERDICT_TIMEOUT);
        let verdict =
            self.receive_until(VERDICT_TIMEOUT, |world| match world.connections[0].failure() {
                Some(Message::Verdict(text)) => Some(text.clone()),
                _ => world.connections[0].ended.then(|| world.lost_rank(0)),
            });
        verdict.unwrap_or(seen)
    }
}

fn describe(rank: usize, member: &RankInfo) -> String {
    format!("rank {rank} ({}, {})", member.host, member.address)
}

fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Rank 0: waits for the others.
fn accept_ranks(config: RankConfig) -> Result<World> {
    let deadline = Instant::now() + config.timeout;
    let listener = match config.listener {
        Some(listener) => listener,
        None => listen(config.port)?,
    };
    listener.set_nonblocking(true).map_err(|error| format!("listener: {error}"))?;
    let mut found: Vec<Option<(Connection, RankInfo)>> =
        (1..config.world_size).map(|_| None).collect();
    let mut pending: Vec<Connection> = vec![];
    loop {
        while let Ok((stream, _)) = listener.accept() {
            // One of too many is closed.
            pending.extend(Connection::new(stream).ok().filter(|_| pending.len() < MAX_PENDING));
        }
        let waiting = std::mem::take(&mut pending).into_iter();
        pending = waiting.filter_map(|connection| take_hello(connection, &mut found)).collect();
        for (at, place) in found.iter_mut().enumerate() {
            // A rank that leaves before all have joined may join again, as a restarted pod does.
            if let Some((connection, member)) = place {
                connection.receive();
                if connection.ended {
                    eprintln!("{} left; waiting for it to join again", describe(at + 1, member));
                    *place = None;
                }
            }
        }
        let missing = found.iter().enumerate().filter(|(_, place)| place.is_none());
        let missing: Vec<_> = missing.map(|(at, _)| (at + 1).to_string()).collect();
        if missing.is_empty() {
            break;
        }
        if Instant::now() >= deadline {
            return Err(format!(
                "rank {} did not join within {:?}: is its process running, and can it reach port {} here?",
                missing.join(", "),
                config.timeout,
                listener.local_addr().map_or(config.port, |address| address.port()),
            ));
        }
        let next = pending.iter().map(|connection| connection.opened + HELLO_TIMEOUT);
        let next = next.fold(deadline, Instant::min);
        let waiting = found.iter().flatten().map(|(connection, _)| connection).chain(&pending);
        let ready = waiting.filter_map(Connection::readable);
        wait(
            ready.chain([PollFd::new(&listener, PollFlags::IN)]),
            next.saturating_duration_since(Instant::now()),
        );
    }
    let (connections, others): (Vec<_>, Vec<_>) = found.into_iter().flatten().unzip();
    let own = connections.first().and_then(|connection| connection.stream.local_addr().ok());
    let address = own.map_or_else(|| config.host.clone(), canonical);
    let mut ranks = vec![RankInfo { host: hostname(), address }];
    ranks.extend(others);
    let mut world = World { rank: 0, ranks, timeout: config.timeout, connections };
    match world.send_to_all(&Message::Ranks(world.ranks.clone())) {
        Ok(()) => Ok(world),
        Err(seen) => Err(world.fail(seen)),
    }
}

/// On all addresses: the address that the others use may be a Service's, which cannot be bound
/// here.
fn listen(port: u16) -> Result<TcpListener> {
    // The first takes connections over IPv4 too. The second is for hosts without IPv6.
    let all: [SocketAddr; 2] =
        [(Ipv6Addr::UNSPECIFIED, port).into(), (Ipv4Addr::UNSPECIFIED, port).into()];
    TcpListener::bind(&all[..]).map_err(|error| {
        format!("rank 0 cannot listen on port {port}: {error}; choose another MASTER_PORT")
    })
}

fn canonical(address: SocketAddr) -> String {
    address.ip().to_canonical().to_string()
}

/// Adds a connection to the ranks once its hello has arrived; gives it back until then.
fn take_hello(
    mut connection: Connection,
    found: &mut [Option<(Connection, RankInfo)>],
) -> Option<Connection> {
    connection.receive();
    let (others, world_size) = (found.len(), found.len() + 1);
    let address = connection.stream.peer_addr().map_or_else(|_| "?".to_owned(), canonical);
    let refusal = match connection.messages.pop_front() {
        None if !connection.ended && connection.opened.elapsed() < HELLO_TIMEOUT => {
            return Some(connection);
        }
        Some(Message::Hello { protocol, rank, world_size: theirs, host }) => {
            match found.get_mut(rank.wrapping_sub(1)) {
                _ if protocol != PROTOCOL => {
                    "another version of evenkeel-bench runs on rank 0; use the same everywhere"
                        .to_owned()
                }
                _ if theirs != world_size => {
                    format!("rank 0 runs with {world_size} ranks, this one with {theirs}")
                }
                None => format!("rank {rank} is not in 1 to {others}"),
                Some(Some((_, member))) => format!(
                    "{} has joined already; give every process its own rank",
                    describe(rank, member)
                ),
                Some(place) => {
                    *place = Some((connection, RankInfo { host, address }));
                    return None;
                }
            }
        }
        _ => {
            eprintln!("dropped a connection from {address}: it is not a rank of this run");
            return None;
        }
    };
    let _ = connection.send(&Message::Verdict(refusal.clone()), HELLO_TIMEOUT);
    eprintln!("refused {address}: {refusal}");
    None
}

/// The other ranks: connects to rank 0 and waits until all have joined.
fn join_rank_0(config: &RankConfig) -> Result<World> {
    let deadline = Instant::now() + config.timeout;
    let mut last = "not tried yet".to_owned();
    while Instant::now() < deadline {
        match try_join(config, deadline) {
            Ok(world) => return Ok(world),
            Err(JoinError::Refused(why)) => return Err(why),
            Err(JoinError::Retry(why)) => last = why,
        }
        // Rank 0 may not run yet, and its name may not resolve yet.
        thread::sleep(Duration::from_millis(100));
    }
    Err(format!(
        "rank 0 was not found at {}:{} within {:?}: {last}",
        config.host, config.port, config.timeout
    ))
}

enum JoinError {
    Retry(String),
    Refused(String),
}

fn try_join(config: &RankConfig, deadline: Instant) -> std::result::Result<World, JoinError> {
    let again = |error: std::io::Error| JoinError::Retry(error.to_string());
    let addresses = (config.host.as_str(), config.port).to_socket_addrs().map_err(again)?;
    let mut connected = Err(JoinError::Retry("its name has no address".to_owned()));
    for address in addresses {
        connected = TcpStream::connect_timeout(&address, HELLO_TIMEOUT).map_err(again);
        if connected.is_ok() {
            break;
        }
    }
    let mut connection = connected.and_then(|stream| Connection::new(stream).map_err(again))?;
    let hello = Message::Hello {
        protocol: PROTOCOL,
        rank: config.rank,
        world_size: config.world_size,
        host: hostname(),
    };
    let left = deadline.saturating_duration_since(Instant::now());
    connection.send(&hello, left).map_err(JoinError::Retry)?;
    let (rank, timeout) = (config.rank, config.timeout);
    let mut world = World { rank, ranks: vec![], timeout, connections: vec![connection] };
    let received = world.receive_until(left, |world| {
        let connection = &mut world.connections[0];
        let retry = |why: &str| Some(Err(JoinError::Retry(why.to_owned())));
        match connection.messages.pop_front() {
            Some(Message::Ranks(ranks)) if ranks.len() == config.world_size => Some(Ok(ranks)),
            Some(Message::Verdict(why)) => Some(Err(JoinError::Refused(why))),
            Some(_) => retry("the process that listens there is not rank 0"),
            None if connection.ended => retry("it closed the connection"),
            None => None,
        }
    });
    let late = || {
        Err(JoinError::Refused(format!(
            "rank 0 was reached, but not all {} ranks have joined after {timeout:?}",
            config.world_size
        )))
    };
    world.ranks = received.unwrap_or_else(late)?;
    Ok(world)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(rank: usize, world_size: usize, port: u16) -> RankConfig {
        let (host, timeout) = ("127.0.0.1".to_owned(), Duration::from_secs(20));
        RankConfig { rank, world_size, host, port, listener: None, timeout }
    }

    /// Runs `body` as every rank of a world, each on its own thread.
    fn run<T: Send>(world_size: usize, body: impl Fn(World) -> T + Sync) -> Vec<T> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut listener = Some(listener);
        thread::scope(|scope| {
            let ranks: Vec<_> = (0..world_size)
                .map(|rank| {
                    let listener = listener.take();
                    let config = RankConfig { listener, ..config(rank, world_size, port) };
                    let body = &body;
                    scope.spawn(move || body(World::join(config).unwrap()))
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn all_gather_is_in_rank_order() {
        let shared = run(4, |mut world| {
            let rank = world.rank();
            (0..3).map(|round| world.all_gather(&(rank * 10 + round)).unwrap()).collect::<Vec<_>>()
        });
        assert!(shared.iter().all(|got| got[2] == [2, 12, 22, 32]), "{shared:?}");
    }

    /// The values and the end of rank 0 arrive at any two moments.
    #[test]
    fn rank_0_may_leave_after_the_last_values() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let me = RankInfo { host: "host".to_owned(), address: "127.0.0.1".to_owned() };
        let world = |rank, stream| World {
            rank,
            ranks: vec![me.clone(); 2],
            timeout: Duration::from_secs(20),
            connections: vec![Connection::new(stream).unwrap()],
        };
        for _ in 0..5_000 {
            let mut last = world(1, TcpStream::connect(listener.local_addr().unwrap()).unwrap());
            let mut first = world(0, listener.accept().unwrap().0);
            let leaves = thread::spawn(move || first.barrier());
            last.barrier().unwrap();
            leaves.join().unwrap().unwrap();
        }
    }

    #[test]
    fn verdict_names_the_lost_rank_everywhere() {
        let said = run(3, |mut world| match world.rank() {
            1 => String::new(),
            _ => {
                let seen = world.all_gather(&()).unwrap_err();
                world.fail(seen)
            }
        });
        assert!(said[0].starts_with("rank 1 (") && said[0].contains("is gone"), "{said:?}");
        assert_eq!(said[0], said[2]);
    }

    #[test]
    fn verdict_quotes_the_failed_rank_everywhere() {
        let said = run(3, |mut world| match world.rank() {
            2 => world.fail("the disk is on fire".to_owned()),
            _ => {
                let seen = world.all_gather(&()).unwrap_err();
                world.fail(seen)
            }
        });
        assert!(said[1].contains("rank 2") && said[1].contains("the disk is on fire"), "{said:?}");
        assert_eq!(said[0], said[1]);
    }

    #[test]
    fn bootstrap_refuses_foreign_and_duplicate_connections() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::scope(|scope| {
            let root = scope.spawn(move || {
                let listener = Some(listener);
                let config = RankConfig { listener, ..config(0, 3, address.port()) };
                let mut world = World::join(config).unwrap();
                world.barrier().unwrap();
            });
            let mut foreign = TcpStream::connect(address).unwrap();
            foreign.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
            let one = scope.spawn(move || {
                World::join(config(1, 3, address.port())).unwrap().barrier().unwrap();
            });
            let other_world = World::join(config(2, 4, address.port())).err().unwrap();
            assert!(other_world.contains("3 ranks"), "{other_world}");
            let outside = World::join(config(7, 3, address.port())).err().unwrap();
            assert!(outside.contains("rank 7"), "{outside}");
            World::join(config(2, 3, address.port())).unwrap().barrier().unwrap();
            root.join().unwrap();
            one.join().unwrap();
        });
    }

    #[test]
    fn bootstrap_timeout_names_the_missing_ranks() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (listener, timeout) = (Some(listener), Duration::from_millis(50));
        let error = World::join(RankConfig { listener, timeout, ..config(0, 3, 0) }).err().unwrap();
        assert!(error.starts_with("rank 1, 2 did not join"), "{error}");
    }
}
