//! How ranks find each other through a store.
//!
//! Each rank puts what others need to know of it under its name. Rank 0 asks each that has come whether it is there: what a
//! process of another run left behind, or one that has ended since, does not count. When all are there it puts the list of
//! members, which is good for those that find themselves in it.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::bytes::{Reader, put};
use crate::error::{Error, ErrorKind, Result, list, span};
use crate::mesh::{Member, Mesh};
use crate::pulse::{Answer, Contact, Pulse, ask_all};
use crate::store::{Patience, Store};
use crate::way::Way;

/// How long a rank that has come may take to answer.
const ANSWER: Duration = Duration::from_secs(1);
/// How often rank 0 says whom it waits for.
const SAY: Duration = Duration::from_millis(200);
const MEMBERS: &str = "members";
const WAITING: &str = "waiting";

fn encode(member: &Member, way: u8) -> Vec<u8> {
    let Member { contact: Contact { id, host, port }, address, name, machine } = member;
    let mut out = vec![way];
    out.extend_from_slice(&machine.to_le_bytes());
    out.extend_from_slice(&id.to_le_bytes());
    out.extend_from_slice(&u32::from(*port).to_le_bytes());
    put(&mut out, host.to_string().as_bytes());
    put(&mut out, address);
    put(&mut out, name.as_bytes());
    out
}

fn decode(bytes: &[u8]) -> Option<(Member, u8)> {
    let mut reader = Reader::new(bytes);
    let (way, machine) = (reader.byte()?, reader.long()?);
    let (id, port) = (reader.long()?, u16::try_from(reader.word()?).ok()?);
    let host: IpAddr = std::str::from_utf8(reader.bytes()?).ok()?.parse().ok()?;
    let address = reader.bytes()?.to_owned();
    let name = String::from_utf8_lossy(reader.bytes()?).into_owned();
    Some((Member { contact: Contact { id, host, port }, address, name, machine }, way))
}

fn name_of(rank: usize) -> String {
    format!("rank/{rank}")
}

/// Meets the other ranks; not all of them need to know yet that all are there.
pub(crate) fn meet(
    store: &dyn Store,
    rank: usize,
    size: usize,
    way: &Way,
    timeout: Duration,
) -> Result<Mesh> {
    if rank >= size {
        return Err(Error::argument(format!(
            "rank {rank} is not below the number of ranks, {size}"
        )));
    }
    let deadline = Instant::now() + timeout;
    let transport = way.open()?;
    let pulse = Pulse::new().map_err(|error| Error::system("cannot answer other ranks", error))?;
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let own = Member {
        contact: Contact { id: pulse.id(), host: transport.host(), port: pulse.port() },
        address: transport.address(),
        name: format!("{host}, process {}", std::process::id()),
        machine: way.host()?,
    };
    store.set(&name_of(rank), &encode(&own, way.code()))?;
    let members = if rank == 0 {
        let members = gather(store, own, size, way.code(), deadline, timeout)?;
        let mut all = vec![];
        members.iter().for_each(|member| put(&mut all, &encode(member, way.code())));
        store.set(MEMBERS, &all)?;
        members
    } else {
        find(store, &own, rank, size, deadline, timeout)?
    };
    Ok(Mesh::new(rank, way.clone(), transport, Arc::clone(&pulse), members))
}

/// Rank 0: waits until all are there.
fn gather(
    store: &dyn Store,
    own: Member,
    size: usize,
    way: u8,
    deadline: Instant,
    timeout: Duration,
) -> Result<Vec<Member>> {
    // What belongs to a group that has met here already, though its process may live on.
    let before = store.get(MEMBERS)?.and_then(|all| read_list(&all)).unwrap_or_default();
    let mut members: Vec<Option<Member>> = vec![None; size];
    members[0] = Some(own);
    let mut patience = Patience::until(deadline);
    let mut said: Option<Instant> = None;
    loop {
        let mut come = vec![];
        let mut complete = true;
        for (rank, place) in members.iter_mut().enumerate().skip(1) {
            // Also those that were there: one that was started again has another identity.
            let found = store.get(&name_of(rank))?;
            let Some((member, its_way)) = found.as_deref().and_then(decode) else {
                complete = false;
                continue;
            };
            if place.as_ref() == Some(&member) {
                continue;
            }
            if its_way != way {
                return Err(Error::new(
                    ErrorKind::Mismatch,
                    format!("rank {rank} ({}) uses another transport than rank 0", member.name),
                )
                .of([rank]));
            }
            complete = false;
            *place = None;
            if before.get(rank) != Some(&member) {
                come.push((rank, member));
            }
        }
        let contacts: Vec<_> = come.iter().map(|(_, member)| &member.contact).collect();
        let answers = ask_all(&contacts, ANSWER, deadline);
        for ((rank, member), answer) in come.into_iter().zip(answers) {
            if matches!(answer, Answer::Alive { .. }) {
                members[rank] = Some(member);
            }
        }
        if complete {
            return Ok(members.into_iter().flatten().collect());
        }
        let missing: Vec<usize> = (0..size).filter(|rank| members[*rank].is_none()).collect();
        if said.is_none_or(|said| said.elapsed() > SAY) {
            said = Some(Instant::now());
            store.set(WAITING, list(&missing).as_bytes())?;
        }
        if !missing.is_empty() && !patience.rest() {
            return Err(Error::new(
                ErrorKind::Timeout,
                format!("{} of {size} did not come within {}", list(&missing), span(timeout)),
            )
            .of(missing));
        }
    }
}

/// The others: wait for the list.
fn find(
    store: &dyn Store,
    own: &Member,
    rank: usize,
    size: usize,
    deadline: Instant,
    timeout: Duration,
) -> Result<Vec<Member>> {
    // Rank 0 gives up first, so that it can be heard why.
    let mut patience = Patience::until(deadline + SAY);
    loop {
        if let Some(members) = store.get(MEMBERS)?.and_then(|all| read_list(&all))
            && members.get(rank).is_some_and(|member| member.contact == own.contact)
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
        if !patience.rest() {
            return Err(nobody(store, size, timeout)?);
        }
    }
}

fn read_list(bytes: &[u8]) -> Option<Vec<Member>> {
    let mut reader = Reader::new(bytes);
    let mut members = vec![];
    while let Some(member) = reader.bytes() {
        members.push(decode(member)?.0);
    }
    Some(members)
}

/// Who did not come, as far as another rank than 0 can see.
fn nobody(store: &dyn Store, size: usize, timeout: Duration) -> Result<Error> {
    let mut found = vec![];
    for rank in 0..size {
        if let Some((member, _)) = store.get(&name_of(rank))?.as_deref().and_then(decode) {
            found.push((rank, member.contact));
        }
    }
    let contacts: Vec<_> = found.iter().map(|(_, contact)| contact).collect();
    let answers = ask_all(&contacts, ANSWER, Instant::now() + 2 * ANSWER);
    let answered = found.iter().zip(answers);
    let there: Vec<usize> = answered
        .filter(|(_, answer)| matches!(answer, Answer::Alive { .. }))
        .map(|((rank, _), _)| *rank)
        .collect();
    let missing: Vec<usize> = (0..size).filter(|rank| !there.contains(rank)).collect();
    let time = span(timeout);
    let text = if missing.is_empty() {
        let waiting = store.get(WAITING)?.unwrap_or_default();
        let waiting = String::from_utf8_lossy(&waiting).into_owned();
        format!("no list of members from rank 0 within {time}; it waited for {waiting}")
    } else {
        format!("{} of {size} did not come within {time}", list(&missing))
    };
    Ok(Error::new(ErrorKind::Timeout, text).of(missing))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryStore;
    use std::thread;

    const TIME: Duration = Duration::from_secs(30);

    fn meet_as(store: &MemoryStore, rank: usize, size: usize, time: Duration) -> Result<Mesh> {
        meet(store, rank, size, &Way::SharedMemory, time)
    }

    #[test]
    fn what_a_rank_says_of_itself_is_understood() {
        let contact = Contact { id: 9, host: "::1".parse().unwrap(), port: 7 };
        let name = "host, process 1".to_owned();
        let member = Member { contact, address: vec![1, 2, 3], name, machine: 5 };
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
                    scope.spawn(move || meet_as(store, rank, 4, Duration::from_millis(300)))
                })
                .into_iter()
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap().err().unwrap()).collect()
        });
        assert_eq!(errors[0].ranks(), [1, 3]);
        assert!(errors[0].to_string().contains("ranks 1 and 3 of 4 did not come within 300 ms"));
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
            let contact = Contact { id: rank as u64, host, port };
            let member = Member { contact, address: vec![], name: String::new(), machine: 0 };
            store.set(&name_of(rank), &encode(&member, Way::SharedMemory.code())).unwrap();
        }
        let begun = Instant::now();
        let error = meet_as(&store, 0, 21, Duration::from_millis(300)).err().unwrap();
        assert_eq!(error.ranks(), (1..=20).collect::<Vec<_>>());
        assert!(begun.elapsed() < 10 * ANSWER);
    }

    /// What an earlier run left in the store is nobody; a rank that comes late or comes again is waited for.
    #[test]
    fn who_was_there_before_does_not_count_and_who_comes_late_does() {
        let store = MemoryStore::new();
        thread::scope(|scope| {
            let first: Vec<_> = (0..3)
                .map(|rank| {
                    let store = &store;
                    scope.spawn(move || meet_as(store, rank, 3, TIME).unwrap())
                })
                .collect();
            first.into_iter().for_each(|rank| drop(rank.join().unwrap()));
        });
        // The same names have the old values now. Rank 1 comes twice.
        let before = store.get(&name_of(2)).unwrap();
        let again = |rank| {
            let store = store.clone();
            thread::spawn(move || meet_as(&store, rank, 3, TIME))
        };
        let (zero, one) = (again(0), again(1));
        let late = again(2);
        let meshes = [zero, one, late].map(|rank| rank.join().unwrap().unwrap());
        assert_ne!(store.get(&name_of(2)).unwrap(), before);
        assert!(meshes.iter().all(|mesh| mesh.contacts() == meshes[0].contacts()));
    }

    /// A program makes one group after the other in one store, and some ranks are slower than others to begin with the next.
    #[test]
    fn members_of_a_group_that_lives_on_do_not_count_as_come() {
        let store = MemoryStore::new();
        let met = std::sync::Barrier::new(2);
        thread::scope(|scope| {
            let zero = scope.spawn(|| {
                let first = meet_as(&store, 0, 2, TIME).unwrap();
                store.delete(WAITING).unwrap();
                met.wait();
                (first, meet_as(&store, 0, 2, TIME).unwrap())
            });
            let first = meet_as(&store, 1, 2, TIME).unwrap();
            met.wait();
            // Rank 0 looks for ranks of the second group, and says whom it waits for.
            let waits = [WAITING.to_owned()];
            assert_eq!(store.wait(&waits, TIME).unwrap(), [b"rank 1"]);
            let second = meet_as(&store, 1, 2, TIME).unwrap();
            let (other_first, other_second) = zero.join().unwrap();
            assert!(first.contacts() == other_first.contacts());
            assert!(second.contacts() == other_second.contacts());
            assert!(second.contacts() != first.contacts());
        });
    }
}
