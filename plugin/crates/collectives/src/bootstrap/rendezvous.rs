//! How ranks find each other through a store.
//!
//! Each rank puts what others need to know of it under its name. Rank 0 asks each that has arrived whether it is there: what a
//! process of another run left behind, or one that has ended since, does not count. When all are there it puts the list of
//! members, which is good for those that find themselves in it.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::bootstrap::store::{Backoff, Store};
use crate::codec::{Reader, put};
use crate::error::{Error, ErrorKind, Result, format_duration, list_ranks};
use crate::links::mesh::{Mesh, RankInfo};
use crate::links::transport_kind::TransportKind;
use crate::liveness::{Liveness, PeerStatus, ProbeAddress, probe_all};

/// How long a rank that has arrived may take to answer.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// How often rank 0 says whom it waits for.
const WAITING_UPDATE_INTERVAL: Duration = Duration::from_millis(200);
const MEMBERS: &str = "members";
const WAITING: &str = "waiting";

fn encode(member: &RankInfo, transport: u8) -> Vec<u8> {
    let RankInfo { probe_address: ProbeAddress { id, host, port }, address, name, host_id } =
        member;
    let mut out = vec![transport];
    out.extend_from_slice(&host_id.to_le_bytes());
    out.extend_from_slice(&id.to_le_bytes());
    out.extend_from_slice(&u32::from(*port).to_le_bytes());
    put(&mut out, host.to_string().as_bytes());
    put(&mut out, address);
    put(&mut out, name.as_bytes());
    out
}

fn decode(bytes: &[u8]) -> Option<(RankInfo, u8)> {
    let mut reader = Reader::new(bytes);
    let (transport, host_id) = (reader.byte()?, reader.long()?);
    let (id, port) = (reader.long()?, u16::try_from(reader.word()?).ok()?);
    let host: IpAddr = std::str::from_utf8(reader.bytes()?).ok()?.parse().ok()?;
    let address = reader.bytes()?.to_owned();
    let name = String::from_utf8_lossy(reader.bytes()?).into_owned();
    Some((
        RankInfo { probe_address: ProbeAddress { id, host, port }, address, name, host_id },
        transport,
    ))
}

fn rank_key(rank: usize) -> String {
    format!("rank/{rank}")
}

/// Meets the other ranks; not all of them need to know yet that all are there.
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
    let endpoint = transport.open()?;
    let liveness =
        Liveness::new().map_err(|error| Error::system("cannot answer other ranks", error))?;
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let own = RankInfo {
        probe_address: ProbeAddress {
            id: liveness.id(),
            host: endpoint.host(),
            port: liveness.port(),
        },
        address: endpoint.address(),
        name: format!("{host}, process {}", std::process::id()),
        host_id: transport.host()?,
    };
    store.set(&rank_key(rank), &encode(&own, transport.code()))?;
    let members = if rank == 0 {
        let members = collect_members(store, own, size, transport.code(), deadline, timeout)?;
        let mut all = vec![];
        members.iter().for_each(|member| put(&mut all, &encode(member, transport.code())));
        store.set(MEMBERS, &all)?;
        members
    } else {
        await_members(store, &own, rank, size, deadline, timeout)?
    };
    Ok(Mesh::new(rank, transport.clone(), endpoint, Arc::clone(&liveness), members))
}

/// Rank 0: waits until all are there.
fn collect_members(
    store: &dyn Store,
    own: RankInfo,
    size: usize,
    transport: u8,
    deadline: Instant,
    timeout: Duration,
) -> Result<Vec<RankInfo>> {
    // What belongs to a group that has met here already, though its process may live on.
    let before = store.get(MEMBERS)?.and_then(|all| read_list(&all)).unwrap_or_default();
    let mut members: Vec<Option<RankInfo>> = vec![None; size];
    members[0] = Some(own);
    let mut backoff = Backoff::until(deadline);
    let mut published: Option<Instant> = None;
    loop {
        let mut arrived = vec![];
        let mut complete = true;
        for (rank, place) in members.iter_mut().enumerate().skip(1) {
            // Also those that were there: one that was started again has another identity.
            let found = store.get(&rank_key(rank))?;
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
        let answers = probe_all(&probe_addresses, PROBE_TIMEOUT, deadline);
        for ((rank, member), answer) in arrived.into_iter().zip(answers) {
            if matches!(answer, PeerStatus::Alive { .. }) {
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
                    "{} of {size} did not arrived within {}",
                    list_ranks(&missing),
                    format_duration(timeout)
                ),
            )
            .with_ranks(missing));
        }
    }
}

/// The others: wait for the list.
fn await_members(
    store: &dyn Store,
    own: &RankInfo,
    rank: usize,
    size: usize,
    deadline: Instant,
    timeout: Duration,
) -> Result<Vec<RankInfo>> {
    // Rank 0 gives up first, so that it can be heard why.
    let mut backoff = Backoff::until(deadline + WAITING_UPDATE_INTERVAL);
    loop {
        if let Some(members) = store.get(MEMBERS)?.and_then(|all| read_list(&all))
            && members.get(rank).is_some_and(|member| member.probe_address == own.probe_address)
        {
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
        if !backoff.wait() {
            return Err(bootstrap_timeout(store, size, timeout)?);
        }
    }
}

fn read_list(bytes: &[u8]) -> Option<Vec<RankInfo>> {
    let mut reader = Reader::new(bytes);
    let mut members = vec![];
    while let Some(member) = reader.bytes() {
        members.push(decode(member)?.0);
    }
    Some(members)
}

/// Who did not arrived, as far as another rank than 0 can see.
fn bootstrap_timeout(store: &dyn Store, size: usize, timeout: Duration) -> Result<Error> {
    let mut found = vec![];
    for rank in 0..size {
        if let Some((member, _)) = store.get(&rank_key(rank))?.as_deref().and_then(decode) {
            found.push((rank, member.probe_address));
        }
    }
    let probe_addresses: Vec<_> = found.iter().map(|(_, probe_address)| probe_address).collect();
    let answers = probe_all(&probe_addresses, PROBE_TIMEOUT, Instant::now() + 2 * PROBE_TIMEOUT);
    let answered = found.iter().zip(answers);
    let there: Vec<usize> = answered
        .filter(|(_, answer)| matches!(answer, PeerStatus::Alive { .. }))
        .map(|((rank, _), _)| *rank)
        .collect();
    let missing: Vec<usize> = (0..size).filter(|rank| !there.contains(rank)).collect();
    let time = format_duration(timeout);
    let text = if missing.is_empty() {
        let waiting = store.get(WAITING)?.unwrap_or_default();
        let waiting = String::from_utf8_lossy(&waiting).into_owned();
        format!("no list of members from rank 0 within {time}; it waited for {waiting}")
    } else {
        format!("{} of {size} did not arrived within {time}", list_ranks(&missing))
    };
    Ok(Error::new(ErrorKind::Timeout, text).with_ranks(missing))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryStore;
    use std::thread;

    const TIME: Duration = Duration::from_secs(30);

    fn join_mesh(store: &MemoryStore, rank: usize, size: usize, time: Duration) -> Result<Mesh> {
        bootstrap_mesh(store, rank, size, &TransportKind::SharedMemory, time)
    }

    #[test]
    fn what_a_rank_says_of_itself_is_understood() {
        let probe_address = ProbeAddress { id: 9, host: "::1".parse().unwrap(), port: 7 };
        let name = "host, process 1".to_owned();
        let member = RankInfo { probe_address, address: vec![1, 2, 3], name, host_id: 5 };
        let bytes = encode(&member, 2);
        assert_eq!(decode(&bytes), Some((member, 2)));
        assert!((0..bytes.len()).all(|length| decode(&bytes[..length]).is_none()));
    }

    #[test]
    fn who_does_not_come_is_named_by_all() {
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
        assert!(errors[0].to_string().contains("ranks 1 and 3 of 4 did not arrived within 300 ms"));
        for error in &errors {
            assert_eq!(error.kind(), ErrorKind::Timeout);
            assert!(error.ranks().contains(&1) && error.ranks().contains(&3), "{error}");
        }
    }

    /// Hosts that are gone do not answer, and each is given a while: all at the same time.
    #[test]
    fn those_that_say_nothing_are_asked_together() {
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

    /// What an earlier run left in the store is nobody; a rank that comes late or comes again is waited for.
    #[test]
    fn who_was_there_before_does_not_count_and_who_comes_late_does() {
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
        // The same names have the old values now. Rank 1 comes twice.
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

    /// A program makes one group after the other in one store, and some ranks are slower than others to begin with the next.
    #[test]
    fn members_of_a_group_that_lives_on_do_not_count_as_come() {
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
            // Rank 0 looks for ranks of the second group, and says whom it waits for.
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
