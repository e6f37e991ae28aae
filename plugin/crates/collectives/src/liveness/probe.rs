//! Probing ranks, and reporting failures to them.

use std::io::{ErrorKind as IoErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::failure::GroupFailure;
use super::frame::{
    ALIVE, FAILED, HEADER_BYTES, PROBE, REPORT_FAILURE, UNKNOWN, frame, is_complete,
};
use super::responder::{self, Liveness};
use crate::backoff::Backoff;
use crate::codec::Reader;
use crate::job_stream::JobStream;

/// Maximum number of ranks that are probed, or get a report, at a time.
const MAX_CONCURRENT_PROBES: usize = 64;
/// The shortest time that a connection gets.
const MIN_EXCHANGE_TIME: Duration = Duration::from_millis(1);
/// Number of lower ranks that are asked first which failure ends the group.
const MIN_ASKED: usize = 4;

const EXITED: &str = "its process has exited";
const UNRESPONSIVE: &str = "its process does not respond";
const UNREACHABLE: &str = "its host cannot be reached";

/// Where a member of a group is probed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProbeAddress {
    pub(crate) id: u64,
    pub(crate) host: IpAddr,
    pub(crate) port: u16,
}

/// The result of probing a member.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PeerStatus {
    /// Alive, in an operation or not, and waiting for these ranks.
    Alive { busy: bool, waiting: Vec<usize> },
    /// Alive, but the group has failed there.
    Failed(GroupFailure),
    /// It has left the group, normally or because of a failure.
    Left,
    /// Not alive, and why.
    Lost(&'static str),
}

impl PeerStatus {
    /// Whether its process is known to have exited.
    pub(crate) fn has_exited(&self) -> bool {
        matches!(self, Self::Lost(EXITED))
    }
}

impl ProbeAddress {
    /// Probes the member, for no longer than the time.
    pub(crate) fn probe(&self, time: Duration) -> PeerStatus {
        self.exchange(PROBE, &[], time)
    }

    /// Reports a failure. Returns the one that ended the group there: this one, or an earlier one.
    fn report(&self, failure: &GroupFailure, time: Duration) -> Option<GroupFailure> {
        match self.exchange(REPORT_FAILURE, &failure.encode(), time) {
            PeerStatus::Failed(failure) => Some(failure),
            _ => None,
        }
    }

    fn exchange(&self, kind: u8, text: &[u8], time: Duration) -> PeerStatus {
        let mut backoff = Backoff::until(Instant::now() + time);
        loop {
            let left = backoff.left().max(MIN_EXCHANGE_TIME);
            if let Some(status) = self.exchange_once(kind, text, left) {
                return status;
            }
            if !backoff.wait() {
                return PeerStatus::Lost(UNRESPONSIVE);
            }
        }
    }

    /// One connection. `None` when it was closed before the response: a responder with too many connections closes some, so that
    /// is no proof of anything. The process has exited if the next connection is refused.
    fn exchange_once(&self, kind: u8, text: &[u8], time: Duration) -> Option<PeerStatus> {
        let deadline = Instant::now() + time;
        let address = SocketAddr::new(self.host, self.port);
        let socket = match TcpStream::connect_timeout(&address, time) {
            Ok(socket) => socket,
            Err(error) if error.kind() == IoErrorKind::ConnectionRefused => {
                return Some(PeerStatus::Lost(EXITED));
            }
            Err(_) => return Some(PeerStatus::Lost(UNREACHABLE)),
        };
        let left = deadline.saturating_duration_since(Instant::now()).max(MIN_EXCHANGE_TIME);
        let Ok(identity) = responder::identity() else { return None };
        let secured = socket
            .set_read_timeout(Some(left))
            .and_then(|()| JobStream::connect(socket, identity.as_ref()));
        let mut stream = match secured.map_err(|error| error.kind()) {
            Ok(stream) => stream,
            Err(IoErrorKind::WouldBlock | IoErrorKind::TimedOut) => {
                return Some(PeerStatus::Lost(UNRESPONSIVE));
            }
            // Nor are bytes before the handshake is complete: anybody on the way can write them.
            Err(_) => return None,
        };
        let mut received = vec![];
        let probed = stream.write_all(&frame(self.id, kind, text));
        while probed.is_ok() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || stream.socket().set_read_timeout(Some(left)).is_err() {
                return Some(PeerStatus::Lost(UNRESPONSIVE));
            }
            let mut buffer = [0; 1024];
            match stream.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => received.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == IoErrorKind::Interrupted => {}
                Err(error)
                    if [IoErrorKind::WouldBlock, IoErrorKind::TimedOut].contains(&error.kind()) =>
                {
                    return Some(PeerStatus::Lost(UNRESPONSIVE));
                }
                Err(_) => break,
            }
            // Bytes that are no response are those of another process, which has the port now.
            let other = PeerStatus::Lost(EXITED);
            match is_complete(&received) {
                Some(false) => {}
                Some(true) => return Some(decode_response(&received).unwrap_or(other)),
                None => return Some(other),
            }
        }
        None
    }
}

pub(super) fn decode_response(bytes: &[u8]) -> Option<PeerStatus> {
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

/// The result of probing transitively.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ProbeReport {
    /// Ranks that are not alive, and why.
    pub(crate) lost: Vec<(usize, &'static str)>,
    /// Ranks that have left. What they sent may still arrive.
    pub(crate) left: Vec<usize>,
    /// A failure that another rank had found before.
    pub(crate) failure: Option<GroupFailure>,
    /// Ranks that are alive and in no operation.
    pub(crate) idle: Vec<usize>,
}

/// Probes these members, a limited number at a time, each for no longer than `each`. Members not probed by the deadline count as
/// unreachable.
pub(crate) fn probe_all(
    probe_addresses: &[&ProbeAddress],
    each: Duration,
    deadline: Instant,
) -> Vec<PeerStatus> {
    let next = AtomicUsize::new(0);
    let probe_next = || {
        let mut statuses = vec![];
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(probe_address) = probe_addresses.get(at) else { return statuses };
            let left = deadline.saturating_duration_since(Instant::now());
            let probed = !left.is_zero();
            let status = if probed {
                probe_address.probe(each.min(left))
            } else {
                PeerStatus::Lost(UNREACHABLE)
            };
            statuses.push((at, status));
        }
    };
    let mut statuses: Vec<(usize, PeerStatus)> = thread::scope(|scope| {
        let probing: Vec<_> = probe_addresses
            .iter()
            .take(MAX_CONCURRENT_PROBES)
            .map(|_| scope.spawn(probe_next))
            .collect();
        probing.into_iter().filter_map(|statuses| statuses.join().ok()).flatten().collect()
    });
    statuses.sort_unstable_by_key(|(at, _)| *at);
    statuses.into_iter().map(|(_, status)| status).collect()
}

/// Probes ranks, and the ranks that they wait for in turn, until there are no new ones or the time is over.
pub(crate) fn probe_transitively(
    probe_addresses: &[ProbeAddress],
    own: usize,
    first: Vec<usize>,
    time: Duration,
) -> ProbeReport {
    let deadline = Instant::now() + time;
    let mut report = ProbeReport::default();
    let mut probed = vec![false; probe_addresses.len()];
    if let Some(place) = probed.get_mut(own) {
        *place = true;
    }
    let mut next = first;
    loop {
        next.retain(|rank| {
            probed.get_mut(*rank).is_some_and(|probed| !std::mem::replace(probed, true))
        });
        let left = deadline.saturating_duration_since(Instant::now());
        if next.is_empty() || left.is_zero() {
            return report;
        }
        // The first batch is probed before the rest: its result may be enough.
        let later = next.split_off(next.len().min(MAX_CONCURRENT_PROBES));
        later.iter().for_each(|rank| probed[*rank] = false);
        let now = std::mem::replace(&mut next, later);
        let of: Vec<_> = now.iter().map(|rank| &probe_addresses[*rank]).collect();
        for (rank, status) in now.into_iter().zip(probe_all(&of, left, deadline)) {
            match status {
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

/// Ends the group on all ranks, and returns the failure that ended it. Of several failures that ranks find at the same time, all
/// ranks get the one that the lowest rank which responds has got first, so that they name the same ranks. Ranks that are known to be
/// `dead` are not asked. The others that the failure names are: both ends of a broken link are alive, and each names the other one.
pub(crate) fn end_group(
    liveness: &Liveness,
    probe_addresses: &[ProbeAddress],
    own: usize,
    failure: GroupFailure,
    dead: &[usize],
    time: Duration,
) -> GroupFailure {
    let failure = liveness.fail(decided_failure(probe_addresses, own, failure, dead, time));
    report_failure(probe_addresses, own, &failure, dead, time);
    failure
}

/// Ends the group on this rank at once, and then on all others. Nobody is asked before: an abort names no lost rank.
pub(crate) fn abort_group(
    liveness: &Liveness,
    probe_addresses: &[ProbeAddress],
    own: usize,
    failure: GroupFailure,
    time: Duration,
) {
    let failure = liveness.fail(failure);
    report_failure(probe_addresses, own, &failure, &[], time);
}

/// The failure that ends the group: this one, or the one that the lowest rank which responds has got before.
fn decided_failure(
    probe_addresses: &[ProbeAddress],
    own: usize,
    failure: GroupFailure,
    dead: &[usize],
    time: Duration,
) -> GroupFailure {
    let lower = (0..own).filter(|rank| !dead.contains(rank));
    let mut left: Vec<_> = lower.filter_map(|rank| probe_addresses.get(rank)).collect();
    // Usually the first responds. Those that do not, such as all ranks of a host, take the time together, not each.
    let mut count = MIN_ASKED;
    while !left.is_empty() {
        let later = left.split_off(left.len().min(count));
        let asked = std::mem::replace(&mut left, later);
        let statuses = probe_all(&asked, time, Instant::now() + time);
        for (probe_address, status) in asked.into_iter().zip(statuses) {
            match status {
                PeerStatus::Failed(earlier) => return earlier,
                PeerStatus::Alive { .. } => {
                    if let Some(decided) = probe_address.report(&failure, time) {
                        return decided;
                    }
                }
                PeerStatus::Left | PeerStatus::Lost(_) => {}
            }
        }
        count = (2 * count).min(MAX_CONCURRENT_PROBES);
    }
    failure
}

/// Reports to all other ranks that the group has failed, except to dead ones.
fn report_failure(
    probe_addresses: &[ProbeAddress],
    own: usize,
    failure: &GroupFailure,
    dead: &[usize],
    time: Duration,
) {
    let others: Vec<_> = probe_addresses
        .iter()
        .enumerate()
        .filter(|(rank, _)| *rank != own && !dead.contains(rank))
        .map(|(_, probe_address)| probe_address)
        .collect();
    for some in others.chunks(MAX_CONCURRENT_PROBES) {
        thread::scope(|scope| {
            for probe_address in some {
                scope.spawn(move || {
                    probe_address.report(failure, time);
                });
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::liveness::Liveness;
    use std::net::{Ipv4Addr, TcpListener};

    const TIME: Duration = Duration::from_secs(5);

    fn probe_address(liveness: &Liveness) -> ProbeAddress {
        ProbeAddress { id: liveness.id(), host: Ipv4Addr::LOCALHOST.into(), port: liveness.port() }
    }

    #[test]
    fn transitive_probe_finds_the_lost_rank() {
        let members: Vec<_> = (0..4).map(|_| Liveness::new().unwrap()).collect();
        let mut probe_addresses: Vec<_> =
            members.iter().map(|member| probe_address(member)).collect();
        // Nothing listens at this port: the listener is dropped before the probe.
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

    /// Each of two ranks finds another rank lost. All ranks end with the same list.
    #[test]
    fn failures_found_at_the_same_time_become_one() {
        for _ in 0..20 {
            let members: Vec<_> = (0..6).map(|_| Liveness::new().unwrap()).collect();
            let addresses: Vec<_> = members.iter().map(|member| probe_address(member)).collect();
            let found = |own: usize, lost: usize| {
                let failure = GroupFailure {
                    kind: ErrorKind::Lost,
                    ranks: vec![lost],
                    text: format!("rank {lost} is lost"),
                };
                end_group(&members[own], &addresses, own, failure, &[lost], TIME)
            };
            let (one, other) = thread::scope(|scope| {
                let one = scope.spawn(|| found(2, 1));
                let other = scope.spawn(|| found(3, 4));
                (one.join().unwrap(), other.join().unwrap())
            });
            assert_eq!(one, other);
            for rank in (0..6).filter(|rank| !one.ranks.contains(rank)) {
                assert_eq!(members[rank].failure(), Some(one.clone()), "rank {rank}");
            }
        }
    }

    /// Addresses of processes that are stopped: the kernel connects, and nobody answers.
    fn silent(count: usize) -> (Vec<TcpListener>, Vec<ProbeAddress>) {
        let listeners: Vec<_> =
            (0..count).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap()).collect();
        let address = |listener: &TcpListener| ProbeAddress {
            id: 1,
            host: Ipv4Addr::LOCALHOST.into(),
            port: listener.local_addr().unwrap().port(),
        };
        let addresses = listeners.iter().map(address).collect();
        (listeners, addresses)
    }

    #[test]
    fn stopped_lower_ranks_delay_a_failure_together() {
        const TIME: Duration = Duration::from_secs(1);
        let (_stopped, mut addresses) = silent(12);
        let members: Vec<_> = (0..2).map(|_| Liveness::new().unwrap()).collect();
        addresses.extend(members.iter().map(|member| probe_address(member)));
        let text = "another is lost".to_owned();
        let failure = GroupFailure { kind: ErrorKind::Lost, ranks: vec![99], text };
        let begun = Instant::now();
        assert_eq!(end_group(&members[1], &addresses, 13, failure.clone(), &[], TIME), failure);
        // One after the other they would take 12 times the time.
        assert!(begun.elapsed() < 8 * TIME, "{:?}", begun.elapsed());
        assert_eq!(members[0].failure(), Some(failure));
    }

    #[test]
    fn abort_fails_the_own_rank_first() {
        let (stopped, mut addresses) = silent(1);
        let own = Liveness::new().unwrap();
        addresses.push(probe_address(&own));
        let text = "enough".to_owned();
        let failure = GroupFailure { kind: ErrorKind::Aborted, ranks: vec![], text };
        thread::scope(|scope| {
            scope.spawn(|| abort_group(&own, &addresses, 1, failure.clone(), TIME));
            let reported = stopped[0].accept().unwrap();
            assert_eq!(own.failure(), Some(failure.clone()));
            drop(reported);
        });
    }

    #[test]
    fn reported_failure_is_kept_and_first_one_wins() {
        let members: Vec<_> = (0..3).map(|_| Liveness::new().unwrap()).collect();
        let probe_addresses: Vec<_> = members.iter().map(|member| probe_address(member)).collect();
        let failure = GroupFailure {
            kind: ErrorKind::Lost,
            ranks: vec![1],
            text: "rank 1 is lost".to_owned(),
        };
        report_failure(&probe_addresses, 0, &failure, &[1], TIME);
        assert_eq!(members[2].failure(), Some(failure.clone()));
        assert_eq!((members[0].failure(), members[1].failure()), (None, None));
        let other = GroupFailure { text: "something else".to_owned(), ..failure.clone() };
        assert_eq!(members[2].fail(other), failure);
        assert_eq!(probe_transitively(&probe_addresses, 0, vec![2], TIME).failure, Some(failure));
    }

    #[test]
    fn probe_without_response_reports_unresponsive_process() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = Ipv4Addr::LOCALHOST.into();
        let silent = ProbeAddress { id: 1, host, port: listener.local_addr().unwrap().port() };
        let status = silent.probe(Duration::from_millis(50));
        assert_eq!(status, PeerStatus::Lost("its process does not respond"));
    }

    /// A responder that has too many connections closes some.
    #[test]
    fn probe_connection_that_closes_is_tried_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let busy = ProbeAddress { id: 1, host: Ipv4Addr::LOCALHOST.into(), port };
        thread::scope(|scope| {
            scope.spawn(|| {
                drop(listener.accept().unwrap());
                let (mut stream, _) = listener.accept().unwrap();
                let _ = stream.read_exact(&mut [0; HEADER_BYTES]);
                let _ = stream.write_all(&frame(1, UNKNOWN, &[]));
            });
            let status = busy.probe(TIME);
            // Ends the thread if the probe did not.
            let _ = TcpStream::connect((busy.host, port));
            assert_eq!(status, PeerStatus::Left);
        });
    }

    #[test]
    fn closed_probe_connections_are_no_proof_of_an_exit() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let busy = ProbeAddress { id: 1, host: Ipv4Addr::LOCALHOST.into(), port: address.port() };
        let over = std::sync::atomic::AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    drop(listener.accept().unwrap());
                }
            });
            let status = busy.probe(Duration::from_millis(200));
            over.store(true, Ordering::Relaxed);
            drop(TcpStream::connect(address).unwrap());
            assert_eq!(status, PeerStatus::Lost("its process does not respond"));
        });
        drop(listener);
        assert!(busy.probe(TIME).has_exited());
    }

    #[test]
    fn garbage_gets_no_response_and_probes_still_do() {
        let member = Liveness::new().unwrap();
        let mut client = TcpStream::connect(("127.0.0.1", member.port())).unwrap();
        client.set_read_timeout(Some(TIME)).unwrap();
        client.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        assert_eq!(client.read(&mut [0; 8]).unwrap_or(0), 0);
        let known = probe_address(&member);
        assert_eq!(known.probe(TIME), PeerStatus::Alive { busy: false, waiting: vec![] });
        let unknown = ProbeAddress { id: known.id ^ 1, ..known };
        assert_eq!(unknown.probe(TIME), PeerStatus::Left);
    }
}
