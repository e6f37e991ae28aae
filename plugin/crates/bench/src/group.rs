//! How ranks find each other, share small facts and agree on what went wrong: a star around rank 0, over plain TCP.
//!
//! Messages are JSON after a length of four bytes, big endian. Rank 0 judges: a rank whose connection ends without a word
//! is the one that is lost; the others, whose transfers broke because of it, report and wait for the verdict.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::host::Result;

/// Raised with every change of the messages.
const PROTOCOL: u32 = 1;
/// The longest message: what 10 000 ranks share fits.
const MAX_MESSAGE: usize = 8 << 20;
/// How long a connection may take to say which rank it is.
const HELLO: Duration = Duration::from_secs(5);
/// Connections that have not said which rank they are.
const MAX_STRANGERS: usize = 64;
/// How long rank 0 waits, once something broke, to hear whose connection ends.
const JUDGE: Duration = Duration::from_secs(1);
/// How long another rank waits for the verdict.
const VERDICT: Duration = Duration::from_secs(3);

#[derive(Debug, Serialize, Deserialize)]
enum Message {
    Hello { protocol: u32, rank: usize, world: usize, host: String },
    Members(Vec<Member>),
    Share(Value),
    All(Vec<Value>),
    Failed(String),
    Verdict(String),
}

/// A rank's machine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Member {
    /// Its name.
    pub(crate) host: String,
    /// Its address, as rank 0 sees it.
    pub(crate) address: String,
}

/// Which rank this is and where to find rank 0.
pub(crate) struct Place {
    /// This rank.
    pub(crate) rank: usize,
    /// The number of ranks.
    pub(crate) world: usize,
    /// Rank 0's name or address.
    pub(crate) host: String,
    /// Rank 0's port.
    pub(crate) port: u16,
    /// Rank 0's listener, where something else opened it.
    pub(crate) listener: Option<TcpListener>,
    /// The longest wait for anything.
    pub(crate) timeout: Duration,
}

/// A connection between rank 0 and another.
struct Link {
    stream: TcpStream,
    inbox: Vec<u8>,
    messages: VecDeque<Message>,
    ended: bool,
}

impl Link {
    fn new(stream: TcpStream) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        // A machine that vanishes says nothing: ask it.
        sockopt::set_socket_keepalive(&stream, true)?;
        sockopt::set_tcp_keepidle(&stream, Duration::from_secs(5))?;
        sockopt::set_tcp_keepintvl(&stream, Duration::from_secs(2))?;
        sockopt::set_tcp_keepcnt(&stream, 3)?;
        Ok(Self { stream, inbox: vec![], messages: VecDeque::new(), ended: false })
    }

    /// Takes in what has arrived. A connection that breaks or talks nonsense has ended.
    fn receive(&mut self) {
        let mut buffer = [0; 16 << 10];
        while !self.ended {
            match self.stream.read(&mut buffer) {
                Ok(0) => self.ended = true,
                Ok(count) => self.inbox.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.ended = true,
            }
            while let Some((length, rest)) = self.inbox.split_first_chunk::<4>() {
                let length = u32::from_be_bytes(*length) as usize;
                if length > MAX_MESSAGE {
                    self.ended = true;
                    return;
                }
                let Some(body) = rest.get(..length) else { break };
                match serde_json::from_slice(body) {
                    Ok(message) => self.messages.push_back(message),
                    Err(_) => {
                        self.ended = true;
                        return;
                    }
                }
                self.inbox.drain(..4 + length);
            }
        }
    }

    /// Sends a message within the deadline.
    fn send(&mut self, message: &Message, deadline: Instant) -> Result<()> {
        let body = serde_json::to_vec(message).map_err(|error| format!("a message: {error}"))?;
        let length = u32::try_from(body.len()).map_err(|_| "a message is too long".to_owned())?;
        let mut bytes = length.to_be_bytes().to_vec();
        bytes.extend_from_slice(&body);
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            match self.stream.write(rest) {
                Ok(count) => rest = &rest[count..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err("it does not read what it is sent".to_owned());
                    }
                    wait(&[&*self], PollFlags::OUT, None, left);
                }
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(())
    }
}

/// Waits until a link, or the listener, is ready, or the time has passed.
fn wait(links: &[&Link], flags: PollFlags, listener: Option<&TcpListener>, time: Duration) {
    let mut waited: Vec<_> = links
        .iter()
        .filter(|link| !link.ended)
        .map(|link| PollFd::new(&link.stream, flags))
        .chain(listener.map(|listener| PollFd::new(listener, PollFlags::IN)))
        .collect();
    // Short enough that a caller's other conditions are looked at too.
    let time = Timespec::try_from(time.min(Duration::from_millis(100))).unwrap_or_default();
    // An interrupted or failed wait is a short one: the callers look again and have deadlines.
    let _ = poll(&mut waited, Some(&time));
}

/// The ranks of a run, joined.
pub(crate) struct Group {
    rank: usize,
    members: Vec<Member>,
    timeout: Duration,
    /// On rank 0 the others in order, elsewhere rank 0 alone.
    links: Vec<Link>,
}

impl Group {
    /// Waits until all ranks are there.
    ///
    /// # Errors
    /// Names the ranks that did not come, or says why rank 0 could not be reached or refused this one.
    pub(crate) fn join(place: Place) -> Result<Self> {
        if place.rank == 0 { gather(place) } else { enlist(&place) }
    }

    /// This rank.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// Every rank's machine.
    pub(crate) fn members(&self) -> &[Member] {
        &self.members
    }

    /// The longest wait for anything.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// A rank, for a person.
    pub(crate) fn describe(&self, rank: usize) -> String {
        describe(rank, &self.members[rank])
    }

    /// What every rank shares, in order of rank. Returns on all ranks only once all have called it.
    pub(crate) fn share<T: Serialize + DeserializeOwned>(&mut self, mine: &T) -> Result<Vec<T>> {
        let value = serde_json::to_value(mine).map_err(|error| error.to_string())?;
        let deadline = Instant::now() + self.timeout;
        let all = if self.rank == 0 {
            self.collect(value, deadline)?
        } else {
            self.links[0]
                .send(&Message::Share(value), deadline)
                .map_err(|error| format!("cannot send to {}: {error}", self.describe(0)))?;
            self.result(deadline)?
        };
        all.into_iter()
            .map(|value| {
                serde_json::from_value(value).map_err(|error| format!("a rank shared {error}"))
            })
            .collect()
    }

    /// Waits until all ranks are here.
    pub(crate) fn barrier(&mut self) -> Result<()> {
        self.share(&()).map(|_| ())
    }

    /// Looks, without waiting, whether a rank failed or is gone.
    pub(crate) fn check(&mut self) -> Result<()> {
        for link in &mut self.links {
            link.receive();
        }
        for (at, link) in self.links.iter().enumerate() {
            let rank = if self.rank == 0 { at + 1 } else { 0 };
            if let Some(said) = link.messages.iter().find_map(|message| match message {
                Message::Failed(text) => Some(format!("{}: {text}", self.describe(rank))),
                Message::Verdict(text) => Some(text.clone()),
                _ => None,
            }) {
                return Err(said);
            }
            if link.ended {
                return Err(self.gone(rank));
            }
        }
        Ok(())
    }

    fn gone(&self, rank: usize) -> String {
        format!("{} is gone: its process or its machine has ended", self.describe(rank))
    }

    fn collect(&mut self, mine: Value, deadline: Instant) -> Result<Vec<Value>> {
        let mut shared: Vec<Option<Value>> = vec![None; self.links.len()];
        loop {
            self.check()?;
            for (place, link) in shared.iter_mut().zip(&mut self.links) {
                if place.is_none()
                    && let Some(Message::Share(value)) = link.messages.pop_front()
                {
                    *place = Some(value);
                }
            }
            if shared.iter().all(Option::is_some) {
                break;
            }
            if Instant::now() >= deadline {
                let silent = shared.iter().enumerate().filter(|(_, value)| value.is_none());
                let silent: Vec<_> = silent.map(|(at, _)| self.describe(at + 1)).collect();
                return Err(format!("nothing from {} for {:?}", silent.join(", "), self.timeout));
            }
            let links: Vec<_> = self.links.iter().collect();
            wait(&links, PollFlags::IN, None, deadline - Instant::now());
        }
        let all: Vec<_> = std::iter::once(mine).chain(shared.into_iter().flatten()).collect();
        let message = Message::All(all);
        for at in 0..self.links.len() {
            if let Err(error) = self.links[at].send(&message, deadline) {
                return Err(format!("cannot send to {}: {error}", self.describe(at + 1)));
            }
        }
        let Message::All(all) = message else { return Err("a message changed".to_owned()) };
        Ok(all)
    }

    fn result(&mut self, deadline: Instant) -> Result<Vec<Value>> {
        loop {
            self.links[0].receive();
            if let Some(Message::All(_)) = self.links[0].messages.front()
                && let Some(Message::All(all)) = self.links[0].messages.pop_front()
            {
                return Ok(all);
            }
            self.check()?;
            if Instant::now() >= deadline {
                return Err(format!("nothing from {} for {:?}", self.describe(0), self.timeout));
            }
            wait(&[&self.links[0]], PollFlags::IN, None, deadline - Instant::now());
        }
    }

    /// Ends a run that counted wrong elements on all ranks, or failed: the program's exit status.
    ///
    /// # Errors
    /// What all ranks say of the failure.
    pub(crate) fn conclude(self, wrong: Result<u64>) -> Result<ExitCode> {
        match wrong {
            Ok(0) => Ok(ExitCode::SUCCESS),
            Ok(wrong) => {
                if self.rank == 0 {
                    eprintln!("error: {wrong} wrong elements");
                }
                Ok(ExitCode::FAILURE)
            }
            Err(seen) => Err(self.fail(seen)),
        }
    }

    /// Ends the run for all ranks because of what this one saw, and gives what all of them will say of it.
    pub(crate) fn fail(mut self, seen: String) -> String {
        if self.rank == 0 { self.judge(seen) } else { self.report(seen) }
    }

    fn judge(&mut self, seen: String) -> String {
        let deadline = Instant::now() + JUDGE;
        let mut verdict = seen;
        loop {
            for link in &mut self.links {
                link.receive();
            }
            // Whoever left without a word is the cause; those that reported were only the first to notice.
            let silent = |link: &Link| {
                link.ended
                    && !link.messages.iter().any(|message| matches!(message, Message::Failed(_)))
            };
            if let Some(at) = self.links.iter().position(silent) {
                verdict = self.gone(at + 1);
                break;
            }
            if Instant::now() >= deadline || self.links.is_empty() {
                break;
            }
            let links: Vec<_> = self.links.iter().collect();
            wait(&links, PollFlags::IN, None, deadline - Instant::now());
        }
        let message = Message::Verdict(verdict.clone());
        for link in &mut self.links {
            // Those that cannot hear it find out by our end.
            let _ = link.send(&message, Instant::now() + HELLO);
            let _ = link.stream.shutdown(Shutdown::Write);
        }
        verdict
    }

    fn report(&mut self, seen: String) -> String {
        let deadline = Instant::now() + VERDICT;
        // If rank 0 is gone this fails, and the end of its connection says so below.
        let _ = self.links[0].send(&Message::Failed(seen.clone()), deadline);
        loop {
            let link = &mut self.links[0];
            link.receive();
            let verdict = link.messages.iter().find_map(|message| match message {
                Message::Verdict(text) => Some(text.clone()),
                _ => None,
            });
            if let Some(verdict) = verdict {
                return verdict;
            }
            if link.ended {
                return self.gone(0);
            }
            if Instant::now() >= deadline {
                return seen;
            }
            wait(&[&self.links[0]], PollFlags::IN, None, deadline - Instant::now());
        }
    }
}

fn describe(rank: usize, member: &Member) -> String {
    format!("rank {rank} ({}, {})", member.host, member.address)
}

fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Rank 0: waits for the others.
fn gather(place: Place) -> Result<Group> {
    let deadline = Instant::now() + place.timeout;
    let listener = match place.listener {
        Some(listener) => listener,
        // Of all addresses: what the others use to reach us may be a service's, which is not ours to bind.
        None => TcpListener::bind(SocketAddr::from((Ipv6Addr::UNSPECIFIED, place.port)))
            .or_else(|_| TcpListener::bind(("0.0.0.0", place.port)))
            .map_err(|error| {
                format!(
                    "rank 0 cannot listen on port {}: {error}; choose another MASTER_PORT",
                    place.port
                )
            })?,
    };
    listener.set_nonblocking(true).map_err(|error| format!("listener: {error}"))?;
    let mut found: Vec<Option<(Link, Member)>> = (1..place.world).map(|_| None).collect();
    let mut strangers: Vec<(Link, SocketAddr, Instant)> = vec![];
    while found.iter().any(Option::is_none) {
        if Instant::now() >= deadline {
            let missing = found.iter().enumerate().filter(|(_, link)| link.is_none());
            let missing: Vec<_> = missing.map(|(at, _)| (at + 1).to_string()).collect();
            return Err(format!(
                "rank {} did not join within {:?}: is its process running, and can it reach port {} here?",
                missing.join(", "),
                place.timeout,
                listener.local_addr().map_or(place.port, |address| address.port()),
            ));
        }
        while let Ok((stream, from)) = listener.accept() {
            if strangers.len() < MAX_STRANGERS
                && let Ok(link) = Link::new(stream)
            {
                strangers.push((link, from, Instant::now() + HELLO));
            }
        }
        for (link, from, until) in std::mem::take(&mut strangers) {
            if let Some(waiting) = admit(link, from, until, place.world, &mut found) {
                strangers.push(waiting);
            }
        }
        let links: Vec<_> = strangers
            .iter()
            .map(|(link, ..)| link)
            .chain(found.iter().flatten().map(|(link, _)| link))
            .collect();
        wait(
            &links,
            PollFlags::IN,
            Some(&listener),
            deadline.saturating_duration_since(Instant::now()),
        );
        for (at, place) in found.iter_mut().enumerate() {
            // A rank that goes before all are there may come back, as a restarted pod does.
            if let Some((link, member)) = place {
                link.receive();
                if link.ended {
                    eprintln!("{} left; waiting for it to come back", describe(at + 1, member));
                    *place = None;
                }
            }
        }
    }
    let (links, others): (Vec<_>, Vec<_>) = found.into_iter().flatten().unzip();
    let own = links.first().and_then(|link| link.stream.local_addr().ok());
    let address = own.map_or_else(|| place.host.clone(), |address| canonical(address.ip()));
    let mut members = vec![Member { host: hostname(), address }];
    members.extend(others);
    let mut group = Group { rank: 0, members, timeout: place.timeout, links };
    let message = Message::Members(group.members.clone());
    for at in 0..group.links.len() {
        if let Err(error) = group.links[at].send(&message, deadline) {
            return Err(group.fail(format!("cannot send to a rank that just joined: {error}")));
        }
    }
    Ok(group)
}

fn canonical(address: IpAddr) -> String {
    address.to_canonical().to_string()
}

/// Makes a connection a member once it says which rank it is; gives it back while it has not.
fn admit(
    mut link: Link,
    from: SocketAddr,
    until: Instant,
    world: usize,
    found: &mut [Option<(Link, Member)>],
) -> Option<(Link, SocketAddr, Instant)> {
    link.receive();
    let address = canonical(from.ip());
    let refusal = match link.messages.pop_front() {
        Some(Message::Hello { protocol, .. }) if protocol != PROTOCOL => Some(
            "another version of evenkeel-bench runs on rank 0; use the same everywhere".to_owned(),
        ),
        Some(Message::Hello { world: theirs, .. }) if theirs != world => {
            Some(format!("rank 0 runs with {world} ranks, this one with {theirs}"))
        }
        Some(Message::Hello { rank, host, .. }) => {
            match rank.checked_sub(1).and_then(|at| found.get_mut(at)) {
                Some(place @ None) => {
                    *place = Some((link, Member { host, address }));
                    return None;
                }
                Some(Some((_, member))) => Some(format!(
                    "{} has joined already; give every process its own rank",
                    describe(rank, member)
                )),
                None => Some(format!("rank {rank} is not in 1 to {}", world.saturating_sub(1))),
            }
        }
        Some(_) => None,
        None if !link.ended && Instant::now() < until => return Some((link, from, until)),
        None => None,
    };
    match refusal {
        Some(refusal) => {
            let _ = link.send(&Message::Verdict(refusal.clone()), Instant::now() + HELLO);
            eprintln!("refused {address}: {refusal}");
        }
        None => eprintln!("dropped a connection from {address}: it is not a rank of this run"),
    }
    None
}

/// Another rank: finds rank 0 and waits until all are there.
fn enlist(place: &Place) -> Result<Group> {
    let deadline = Instant::now() + place.timeout;
    let mut last = "no try yet".to_owned();
    while Instant::now() < deadline {
        match enlist_once(place, deadline) {
            Ok(group) => return Ok(group),
            Err(Setback::Refused(why)) => return Err(why),
            Err(Setback::Again(why)) => last = why,
        }
        // Rank 0 may not run yet, nor its name be known.
        thread::sleep(Duration::from_millis(100));
    }
    Err(format!(
        "rank 0 was not found at {}:{} within {:?}: {last}",
        place.host, place.port, place.timeout
    ))
}

enum Setback {
    Again(String),
    Refused(String),
}

fn enlist_once(place: &Place, deadline: Instant) -> std::result::Result<Group, Setback> {
    let again = |error: std::io::Error| Setback::Again(error.to_string());
    let addresses = (place.host.as_str(), place.port).to_socket_addrs().map_err(again)?;
    let mut connected = Err(Setback::Again("its name has no address".to_owned()));
    for address in addresses {
        connected = TcpStream::connect_timeout(&address, HELLO).map_err(again);
        if connected.is_ok() {
            break;
        }
    }
    let mut link = connected.and_then(|stream| Link::new(stream).map_err(again))?;
    let hello = Message::Hello {
        protocol: PROTOCOL,
        rank: place.rank,
        world: place.world,
        host: hostname(),
    };
    link.send(&hello, deadline).map_err(Setback::Again)?;
    loop {
        link.receive();
        match link.messages.pop_front() {
            Some(Message::Members(members)) if members.len() == place.world => {
                let (rank, timeout) = (place.rank, place.timeout);
                return Ok(Group { rank, members, timeout, links: vec![link] });
            }
            Some(Message::Verdict(why)) => return Err(Setback::Refused(why)),
            Some(_) => return Err(Setback::Again("what answers there is not rank 0".to_owned())),
            None if link.ended => {
                return Err(Setback::Again("it closed the connection".to_owned()));
            }
            None if Instant::now() >= deadline => {
                return Err(Setback::Refused(format!(
                    "rank 0 is there, but not all {} ranks are, after {:?}",
                    place.world, place.timeout
                )));
            }
            None => wait(
                &[&link],
                PollFlags::IN,
                None,
                deadline.saturating_duration_since(Instant::now()),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(rank: usize, world: usize, port: u16, listener: Option<TcpListener>) -> Place {
        let timeout = Duration::from_secs(20);
        Place { rank, world, host: "127.0.0.1".to_owned(), port, listener, timeout }
    }

    /// Runs `body` as every rank of a group, each on its own thread.
    fn run<T: Send>(world: usize, body: impl Fn(Group) -> T + Sync) -> Vec<T> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut listener = Some(listener);
        thread::scope(|scope| {
            let ranks: Vec<_> = (0..world)
                .map(|rank| {
                    let place = place(rank, world, port, listener.take());
                    let body = &body;
                    scope.spawn(move || body(Group::join(place).unwrap()))
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn every_rank_gets_what_all_share_in_order() {
        let shared = run(4, |mut group| {
            let rank = group.rank();
            (0..3).map(|round| group.share(&(rank * 10 + round)).unwrap()).collect::<Vec<_>>()
        });
        assert!(shared.iter().all(|got| got[2] == [2, 12, 22, 32]), "{shared:?}");
    }

    #[test]
    fn a_rank_that_leaves_is_named_by_all_others() {
        let said = run(3, |mut group| match group.rank() {
            1 => String::new(),
            _ => {
                let seen = group.share(&()).unwrap_err();
                group.fail(seen)
            }
        });
        assert!(said[0].starts_with("rank 1 (") && said[0].contains("is gone"), "{said:?}");
        assert_eq!(said[0], said[2]);
    }

    #[test]
    fn a_rank_that_fails_is_quoted_by_all_others() {
        let said = run(3, |mut group| match group.rank() {
            2 => group.fail("the disk is on fire".to_owned()),
            _ => {
                let seen = group.share(&()).unwrap_err();
                group.fail(seen)
            }
        });
        assert!(said[1].contains("rank 2") && said[1].contains("the disk is on fire"), "{said:?}");
        assert_eq!(said[0], said[1]);
    }

    #[test]
    fn strangers_and_doubles_do_not_disturb() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::scope(|scope| {
            let root = scope.spawn(move || {
                let mut group = Group::join(place(0, 3, address.port(), Some(listener))).unwrap();
                group.barrier().unwrap();
            });
            let mut stranger = TcpStream::connect(address).unwrap();
            stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
            let one = scope.spawn(move || {
                Group::join(place(1, 3, address.port(), None)).unwrap().barrier().unwrap();
            });
            let other_world = Group::join(place(2, 4, address.port(), None)).err().unwrap();
            assert!(other_world.contains("3 ranks"), "{other_world}");
            let outside = Group::join(place(7, 3, address.port(), None)).err().unwrap();
            assert!(outside.contains("rank 7"), "{outside}");
            Group::join(place(2, 3, address.port(), None)).unwrap().barrier().unwrap();
            root.join().unwrap();
            one.join().unwrap();
        });
    }

    #[test]
    fn missing_ranks_are_named() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut place = place(0, 3, 0, Some(listener));
        place.timeout = Duration::from_millis(50);
        let error = Group::join(place).err().unwrap();
        assert!(error.starts_with("rank 1, 2 did not join"), "{error}");
    }
}
