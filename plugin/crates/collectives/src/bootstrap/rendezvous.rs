//! Rendezvous: the ranks find each other through a store.
//!
//! Each rank writes its rank info under its key. Rank 0 probes each rank that has written one. Entries of an earlier run, or of
//! a process that has exited since, do not count. When all ranks are alive, rank 0 writes the list of members, and then its number.
//! The list is valid for the ranks that find themselves in it.
//!
//! The list is long, so the ranks wait for another number than the one before they wrote their info, and read the list then. Each
//! makes the same few requests, however many there are, if the store has [`Store::await_change`]. Rank 0 asks for many infos at once.

use std::time::{Duration, Instant};

use crate::backoff::Backoff;
use crate::bootstrap::candidate::{Candidate, decode, encode};
use crate::bootstrap::store::Store;
use crate::codec::{Reader, put};
use crate::error::{Error, ErrorKind, Result, format_duration, list_ranks};
use crate::links::mesh::{Mesh, RankInfo};
use crate::links::transport_kind::TransportKind;
use crate::liveness::{PeerStatus, probe_all};

/// How long a rank may take to respond to a probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// How often rank 0 publishes which ranks it waits for.
const WAITING_UPDATE_INTERVAL: Duration = Duration::from_millis(200);
const MEMBERS: &str = "members";
/// The name of the list's number, which is rank 0's identity.
const MEMBERS_NUMBER: &str = "members/number";
const WAITING: &str = "waiting";

fn rank_key(rank: usize) -> String {
    format!("rank/{rank}")
}

/// Finds the other ranks and makes the mesh of links to them. Some ranks may return later than this one.
pub(crate) fn bootstrap_mesh(
    store: &dyn Store,
    rank: usize,
    size: usize,
    transport: &TransportKind,
    timeout: Duration,
) -> Result<Mesh> {
    if rank >= size {
        return Err(Error::argument(format!(
            "rank {rank} is not below the number of ranks, {size}"
        )));
    }
    let deadline = Instant::now() + timeout;
    let candidate = Candidate::open(transport)?;
    let own = candidate.info().clone();
    let publish = || store.set(&rank_key(rank), &encode(&own, transport.code()));
    let members = if rank == 0 {
        publish()?;
        let number = own.probe_address.id.to_le_bytes();
        let members =
            collect_members(store, own.clone(), size, transport.code(), deadline, timeout)?;
        let mut all = vec![];
        members.iter().for_each(|member| put(&mut all, &encode(member, transport.code())));
        store.set(MEMBERS, &all)?;
        store.set(MEMBERS_NUMBER, &number)?;
        members
    } else {
        // No list before this can have this rank.
        let before = store.get(MEMBERS_NUMBER)?;
        publish()?;
        await_members(store, before, &own, rank, size, deadline, timeout)?
    };
    Ok(candidate.into_mesh(rank, members))
}

/// Rank 0: waits until all ranks have arrived.
fn collect_members(
    store: &dyn Store,
    own: RankInfo,
    size: usize,
    transport: u8,
    deadline: Instant,
    timeout: Duration,
) -> Result<Vec<RankInfo>> {
    // The members of an earlier group in this store. They do not count, even if their processes are alive.
    let before = store.get(MEMBERS)?.and_then(|all| read_list(&all)).unwrap_or_default();
    let mut members: Vec<Option<RankInfo>> = vec![None; size];
    members[0] = Some(own);
    let mut backoff = Backoff::until(deadline);
    let mut published: Option<Instant> = None;
    loop {
        // At the end all: one that was restarted has another identity.
        let all_arrived = members.iter().all(Option::is_some);
        let is_asked = |rank: &usize| *rank > 0 && (all_arrived || members[*rank].is_none());
        let asked: Vec<usize> = (0..size).filter(is_asked).collect();
        let keys: Vec<String> = asked.iter().copied().map(rank_key).collect();
        let mut arrived = vec![];
        let mut complete = true;
        for (rank, found) in asked.into_iter().zip(store.get_many(&keys)?) {
            let place = &mut members[rank];
            let Some((member, its_transport)) = found.as_deref().and_then(decode) else {
                complete = false;
                continue;
            };
            if place.as_ref() == Some(&member) {
                continue;
            }
            if its_transport != transport {
                return Err(Error::new(
                    ErrorKind::Mismatch,
                    format!("rank {rank} ({}) uses another transport than rank 0", member.name),
                )
                .with_ranks([rank]));
            }
            complete = false;
            *place = None;
            if before.get(rank) != Some(&member) {
                arrived.push((rank, member));
            }
        }
        let probe_addresses: Vec<_> =
            arrived.iter().map(|(_, member)| &member.probe_address).collect();
        let statuses = probe_all(&probe_addresses, PROBE_TIMEOUT, deadline);
        for ((rank, member), status) in arrived.into_iter().zip(statuses) {
            if matches!(status, PeerStatus::Alive { .. }) {
                members[rank] = Some(member);
            }
        }
        if complete {
            return Ok(members.into_iter().flatten().collect());
        }
        let missing: Vec<usize> = (0..size).filter(|rank| members[*rank].is_none()).collect();
        if published.is_none_or(|published| published.elapsed() > WAITING_UPDATE_INTERVAL) {
            published = Some(Instant::now());
            store.set(WAITING, list_ranks(&missing).as_bytes())?;
        }
        if !missing.is_empty() && !backoff.wait() {
            return Err(Error::new(
                ErrorKind::Timeout,
                format!(
                    "{} of {size} did not join within {}",
                    list_ranks(&missing),
                    format_duration(timeout)
                ),
            )
            .with_ranks(missing));
        }
    }
}

/// The other ranks: wait for the list of members.
fn await_members(
    store: &dyn Store,
    mut number: Option<Vec<u8>>,
    own: &RankInfo,
    rank: usize,
    size: usize,
    deadline: Instant,
    timeout: Duration,
) -> Result<Vec<RankInfo>> {
    // Rank 0 times out first, so that the ranks it waited for are known.
    let deadline = deadline + WAITING_UPDATE_INTERVAL;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let current = store.await_change(MEMBERS_NUMBER, number.as_deref(), left)?;
        if current == number {
            return Err(bootstrap_timeout(store, size, timeout)?);
        }
        number = current;
        let Some(members) = store.get(MEMBERS)?.and_then(|all| read_list(&all)) else { continue };
        if members.get(rank).is_some_and(|member| member.probe_address == own.probe_address) {
            if members.len() == size {
                return Ok(members);
            }
            return Err(Error::new(
                ErrorKind::Mismatch,
                format!(
                    "this rank was started as one of {size}, rank 0 as one of {}",
                    members.len()
                ),
            ));
        }
    }
}

pub(crate) fn read_list(bytes: &[u8]) -> Option<Vec<RankInfo>> {
    let mut reader = Reader::new(bytes);
    let mut members = vec![];
    while let Some(member) = reader.bytes() {
        members.push(decode(member)?.0);
    }
    Some(members)
}

/// The error of a timeout on a rank other than 0, naming the ranks that did not join as far as it can tell.
fn bootstrap_timeout(store: &dyn Store, size: usize, timeout: Duration) -> Result<Error> {
    let keys: Vec<String> = (0..size).map(rank_key).collect();
    let values = store.get_many(&keys)?.into_iter().enumerate();
    let found = values.filter_map(|(rank, value)| {
        decode(value.as_deref()?).map(|(member, _)| (rank, member.probe_address))
    });
    let found: Vec<_> = found.collect();
    let probe_addresses: Vec<_> = found.iter().map(|(_, probe_address)| probe_address).collect();
    let statuses = probe_all(&probe_addresses, PROBE_TIMEOUT, Instant::now() + 2 * PROBE_TIMEOUT);
    let alive: Vec<usize> = found
        .iter()
        .zip(statuses)
        .filter(|(_, status)| matches!(status, PeerStatus::Alive { .. }))
        .map(|((rank, _), _)| *rank)
        .collect();
    let missing: Vec<usize> = (0..size).filter(|rank| !alive.contains(rank)).collect();
    let time = format_duration(timeout);
    let text = if missing.is_empty() {
        let waiting = store.get(WAITING)?.unwrap_or_default();
        let waiting = String::from_utf8_lossy(&waiting).into_owned();
        format!("no list of members from rank 0 within {time}; it waited for {waiting}")
    } else {
        format!("{} of {size} did not join within {time}", list_ranks(&missing))
    };
    Ok(Error::new(ErrorKind::Timeout, text).with_ranks(missing))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryStore;
    use crate::liveness::ProbeAddress;
    use std::thread;

    const TIME: Duration = Duration::from_secs(30);

    fn join_mesh(store: &MemoryStore, rank: usize, size: usize, time: Duration) -> Result<Mesh> {
        bootstrap_mesh(store, rank, size, &TransportKind::SharedMemory, time)
    }

    #[test]
    fn ranks_that_do_not_join_are_named_on_all() {
        let store = MemoryStore::new();
        let errors: Vec<Error> = thread::scope(|scope| {
            let ranks: Vec<_> = [0, 2]
                .map(|rank| {
                    let store = &store;
                    scope.spawn(move || join_mesh(store, rank, 4, Duration::from_millis(300)))
                })
                .into_iter()
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap().err().unwrap()).collect()
        });
        assert_eq!(errors[0].ranks(), [1, 3]);
        assert!(errors[0].to_string().contains("ranks 1 and 3 of 4 did not join within 300 ms"));
        for error in &errors {
            assert_eq!(error.kind(), ErrorKind::Timeout);
            assert!(error.ranks().contains(&1) && error.ranks().contains(&3), "{error}");
        }
    }

    /// Hosts that are down do not respond, and each probe waits for its timeout: all at the same time.
    #[test]
    fn rendezvous_probes_silent_ranks_in_parallel() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let (host, port) = ("127.0.0.1".parse().unwrap(), silent.local_addr().unwrap().port());
        let store = MemoryStore::new();
        for rank in 1..=20 {
            let probe_address = ProbeAddress { id: rank as u64, host, port };
            let member =
                RankInfo { probe_address, address: vec![], name: String::new(), host_id: 0 };
            store
                .set(&rank_key(rank), &encode(&member, TransportKind::SharedMemory.code()))
                .unwrap();
        }
        let begun = Instant::now();
        let error = join_mesh(&store, 0, 21, Duration::from_millis(300)).err().unwrap();
        assert_eq!(error.ranks(), (1..=20).collect::<Vec<_>>());
        assert!(begun.elapsed() < 10 * PROBE_TIMEOUT);
    }

    /// Entries of an earlier run do not count. Rank 0 waits for ranks that join late or are restarted.
    #[test]
    fn rendezvous_ignores_stale_entries_and_awaits_late_ranks() {
        let store = MemoryStore::new();
        thread::scope(|scope| {
            let first: Vec<_> = (0..3)
                .map(|rank| {
                    let store = &store;
                    scope.spawn(move || join_mesh(store, rank, 3, TIME).unwrap())
                })
                .collect();
            first.into_iter().for_each(|rank| drop(rank.join().unwrap()));
        });
        // The same keys now have the values of the first group.
        let before = store.get(&rank_key(2)).unwrap();
        let again = |rank| {
            let store = store.clone();
            thread::spawn(move || join_mesh(&store, rank, 3, TIME))
        };
        let (zero, one) = (again(0), again(1));
        let late = again(2);
        let meshes = [zero, one, late].map(|rank| rank.join().unwrap().unwrap());
        assert_ne!(store.get(&rank_key(2)).unwrap(), before);
        assert!(meshes.iter().all(|mesh| mesh.probe_addresses() == meshes[0].probe_addresses()));
    }

    /// A program makes one group after the other in one store, and some ranks reach the next group later than others.
    #[test]
    fn rendezvous_ignores_members_of_a_live_group() {
        let store = MemoryStore::new();
        let met = std::sync::Barrier::new(2);
        thread::scope(|scope| {
            let zero = scope.spawn(|| {
                let first = join_mesh(&store, 0, 2, TIME).unwrap();
                store.delete(WAITING).unwrap();
                met.wait();
                (first, join_mesh(&store, 0, 2, TIME).unwrap())
            });
            let first = join_mesh(&store, 1, 2, TIME).unwrap();
            met.wait();
            // Rank 0 waits for the ranks of the second group, and publishes which.
            let waits = [WAITING.to_owned()];
            assert_eq!(store.wait(&waits, TIME).unwrap(), [b"rank 1"]);
            let second = join_mesh(&store, 1, 2, TIME).unwrap();
            let (other_first, other_second) = zero.join().unwrap();
            assert!(first.probe_addresses() == other_first.probe_addresses());
            assert!(second.probe_addresses() == other_second.probe_addresses());
            assert!(second.probe_addresses() != first.probe_addresses());
        });
    }
}
