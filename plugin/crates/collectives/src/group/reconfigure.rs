//! Going on with other members: without the ranks that are lost, and with newcomers.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use evenkeel_transport::sync::lock;

use crate::bootstrap::agreement::{
    Agreement, MAX_SILENT_PROBES, Members, PROBE_TIMEOUT, WATCH_INTERVAL, await_admission,
};
use crate::bootstrap::candidate::Candidate;
use crate::bootstrap::store::Store;
use crate::error::{Error, ErrorKind, Result, format_duration};
use crate::links::transport_kind::TransportKind;
use crate::liveness::{GroupFailure, PeerStatus, end_group};

use super::Group;

/// The longest wait for another rank's note before this one looks whether the group has failed meanwhile.
const MAX_NOTE_WAIT: Duration = Duration::from_millis(50);

/// How a group is reconfigured. All ranks must pass the same, except for the timeout.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reconfigure {
    min_size: usize,
    timeout: Option<Duration>,
}

impl Reconfigure {
    /// Waits for newcomers until the group has at least this many ranks. By default nobody waits for newcomers; those that already
    /// wait are taken in.
    pub fn min_size(self, min_size: usize) -> Self {
        Self { min_size, ..self }
    }

    /// How long to wait for the other ranks. Defaults to the group's timeout.
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout: Some(timeout), ..self }
    }
}

/// How far a call of [`Group::reconfigure`] got that failed. The next call goes on from there, since the other ranks may have agreed on
/// a list that has this rank.
pub(super) enum Progress {
    /// This rank has registered with the others.
    Registered(Candidate),
    /// The ranks have agreed on this group, and not all of them had come.
    Agreed(Box<Group>),
}

/// What all steps of a call share.
struct Request<'a> {
    store: &'a dyn Store,
    min_size: usize,
    deadline: Instant,
    timeout: Duration,
}

impl Group {
    /// The group that follows this one: all ranks of this one that are alive, in the order of their ranks, and then the newcomers
    /// that wait in [`Group::join_as_newcomer`]. All live ranks call it: after an error that ended the group, or at any other time
    /// between operations. This group cannot be used afterwards, and no sub-group of it. A group of which it is a sub-group can.
    ///
    /// All ranks that return a group return the same one: the store decides. Each has come to it, so nobody is in it who died before
    /// the agreement. If a rank dies meanwhile, the rest agree again. `store` is the one, or the prefix, through which the group was
    /// joined; it must outlive the ranks that are lost. Sub-groups that take newcomers in need prefixes of their own.
    ///
    /// A rank that is stopped is lost once it has not responded for two seconds, so a shorter timeout ends in an error then.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] when a live rank has not called it, or there are too few ranks: call it again, which goes on where this
    /// call ended, or drop this group. [`ErrorKind::Lost`] naming this rank when the others went on without it: it may come back by
    /// [`Group::join_as_newcomer`]. [`ErrorKind::Store`] when the store cannot be reached.
    pub fn reconfigure(&self, store: &dyn Store, options: &Reconfigure) -> Result<Self> {
        let timeout = options.timeout.unwrap_or(self.timeout);
        let deadline = Instant::now() + timeout;
        let request = Request { store, min_size: options.min_size, deadline, timeout };
        self.check_usable()?;
        let next = self.follow(&request)?;
        self.replaced.store(true, Ordering::Release);
        if !self.is_sub_group {
            self.mesh.liveness().fail(replaced());
        }
        Ok(next)
    }

    /// Joins the next group that ranks which share this store or prefix [reconfigure](Group::reconfigure).
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] when there is none in time; otherwise as [`Group::reconfigure`].
    pub fn join_as_newcomer(
        store: &dyn Store,
        transport: &TransportKind,
        timeout: Duration,
    ) -> Result<Self> {
        let deadline = Instant::now() + timeout;
        let candidate = Candidate::open(transport)?;
        let members = await_admission(store, &candidate, deadline, timeout)?;
        let next = Self::of_members(candidate, members, timeout)?;
        let request = Request { store, min_size: 0, deadline, timeout };
        let next = match next.meet(&request) {
            Ok(()) => next,
            Err(error) if is_retried(&error) => next.follow(&request)?,
            Err(error) => return Err(error),
        };
        let previous_ranks = vec![None; next.size()];
        Ok(next.with_previous_ranks(previous_ranks))
    }

    fn with_previous_ranks(mut self, previous_ranks: Vec<Option<usize>>) -> Self {
        self.previous_ranks = previous_ranks;
        self
    }

    /// For each rank, its rank in the group that was [reconfigured](Group::reconfigure); `None` for a newcomer. Empty if this group
    /// follows no other one.
    pub fn previous_ranks(&self) -> &[Option<usize>] {
        &self.previous_ranks
    }

    /// # Errors
    /// When the group was reconfigured, or this is a forked child of the process that made it.
    pub(super) fn check_usable(&self) -> Result<()> {
        self.mesh.liveness().check_not_forked()?;
        if self.replaced.load(Ordering::Acquire) { Err(replaced().error()) } else { Ok(()) }
    }

    /// Agrees on the next group and meets its ranks. If one of them is lost meanwhile, the same from that group on.
    fn follow(&self, request: &Request<'_>) -> Result<Self> {
        let mut progress = lock(&self.progress);
        let next = match progress.take() {
            Some(Progress::Agreed(next)) => *next,
            registered => {
                let candidate = match registered {
                    Some(Progress::Registered(candidate)) => candidate,
                    _ => Candidate::open(self.mesh.transport())?,
                };
                match self.agree(request, &candidate) {
                    Ok(members) => Self::of_members(candidate, members, self.timeout)?,
                    Err(error) => {
                        *progress = Some(Progress::Registered(candidate));
                        return Err(error);
                    }
                }
            }
        };
        let newer = match next.meet(request) {
            Ok(()) => return Ok(next),
            Err(error) if is_retried(&error) => next.follow(request),
            Err(error) => Err(error),
        };
        newer
            .map(|newer| {
                // As seen from this group.
                let previous = newer.previous_ranks.iter();
                let previous =
                    previous.map(|rank| rank.and_then(|rank| *next.previous_ranks.get(rank)?));
                let previous = previous.collect();
                newer.with_previous_ranks(previous)
            })
            .map_err(|error| {
                let numbered =
                    error.renumbered(|rank| next.previous_ranks.get(rank).copied().flatten());
                *progress = Some(Progress::Agreed(Box::new(next)));
                numbered
            })
    }

    fn agree(&self, request: &Request<'_>, candidate: &Candidate) -> Result<Members> {
        let addresses = self.mesh.probe_addresses();
        let agreement = Agreement {
            store: request.store,
            group: self.id,
            old: self.members.iter().map(|member| &addresses[*member]).collect(),
            old_rank: self.rank,
            next_ticket: self.next_ticket,
            min_size: request.min_size,
            deadline: request.deadline,
            timeout: request.timeout,
        };
        agreement.agree(candidate)
    }

    fn of_members(candidate: Candidate, members: Members, timeout: Duration) -> Result<Self> {
        let defect = || Error::of_store("this rank is not in the list of members");
        let rank = members.rank_of(&candidate).ok_or_else(defect)?;
        let Members { members, next_ticket } = members;
        let previous_ranks = members.iter().map(|member| member.old_rank).collect();
        let infos = members.into_iter().map(|member| member.info).collect();
        let mut group = Self::of_mesh(candidate.into_mesh(rank, infos), timeout);
        group.next_ticket = next_ticket;
        Ok(group.with_previous_ranks(previous_ranks))
    }

    /// Waits until all ranks of a group that was agreed on have come. The ranks are a binary tree: each notes in the store that it
    /// has come once those below it have, so all have when rank 0 has. A note can be written again, so a rank whose request of the
    /// store failed, or that has timed out, can go on. Each rank watches the next one meanwhile.
    fn meet(&self, request: &Request<'_>) -> Result<()> {
        let note = |rank: usize| format!("reconfigure/{:016x}/met/{rank}", self.id);
        let have_all_come = || Ok::<_, Error>(request.store.get(&note(0))?.is_some());
        let below = [2 * self.rank + 1, 2 * self.rank + 2];
        let mut awaited: Vec<usize> =
            below.into_iter().filter(|rank| *rank < self.size()).collect();
        let mut has_noted = false;
        let liveness = self.mesh.liveness();
        let watched = (self.rank + 1) % self.size();
        let (mut watched_at, mut silent_probes) = (Instant::now(), 0);
        loop {
            if awaited.is_empty() && !has_noted {
                request.store.set(&note(self.rank), &[])?;
                has_noted = true;
            }
            let left = request.deadline.saturating_duration_since(Instant::now());
            let next = note(awaited.last().copied().unwrap_or(0));
            if request.store.await_change(&next, None, left.min(MAX_NOTE_WAIT))?.is_some() {
                match awaited.pop() {
                    Some(_) => continue,
                    None => return Ok(()),
                }
            }
            if let Some(failure) = liveness.failure() {
                return Err(failure.error());
            }
            if watched != self.rank && watched_at.elapsed() >= WATCH_INTERVAL {
                let left = || request.deadline.saturating_duration_since(Instant::now());
                let status = self.mesh.probe_addresses()[watched].probe(PROBE_TIMEOUT.min(left()));
                watched_at = Instant::now();
                // The deadline may have ended the probe: then silence does not count.
                silent_probes = match status {
                    PeerStatus::Lost(_) => silent_probes + u32::from(!left().is_zero()),
                    _ => 0,
                };
                let is_lost = status == PeerStatus::Left || status.has_exited();
                // It may have come, and have left since all had.
                if (is_lost || silent_probes >= MAX_SILENT_PROBES) && !have_all_come()? {
                    return Err(self.end_as_lost(watched));
                }
            }
            if left.is_zero() {
                let time = format_duration(request.timeout);
                let text =
                    format!("reconfigure: not all ranks of the next group came within {time}");
                return Err(Error::new(ErrorKind::Timeout, text));
            }
        }
    }

    /// Ends the group on all ranks, since this one was lost while they met.
    fn end_as_lost(&self, rank: usize) -> Error {
        let text = format!("reconfigure: {} was lost meanwhile", self.mesh.describe(rank));
        let failure = GroupFailure { kind: ErrorKind::Lost, ranks: vec![rank], text };
        let addresses = self.mesh.probe_addresses();
        let liveness = self.mesh.liveness();
        end_group(liveness, addresses, self.rank, failure, &[rank], PROBE_TIMEOUT).error()
    }
}

/// Whether the ranks that are left agree again.
fn is_retried(error: &Error) -> bool {
    error.kind() == ErrorKind::Lost
}

fn replaced() -> GroupFailure {
    let text = "the group was reconfigured: use the one that `reconfigure` returned".to_owned();
    GroupFailure { kind: ErrorKind::Aborted, ranks: vec![], text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::{TEST_TIMEOUT, transports};
    use crate::{Call, MemoryStore, Op};
    use std::sync::Barrier;
    use std::sync::atomic::AtomicBool;
    use std::thread;

    fn sum(group: &Group, value: i64) -> Result<i64> {
        let mut values = vec![value; 5000];
        group.allreduce_of(&mut values, Op::Sum, &Call::default())?;
        assert!(values.iter().all(|each| *each == values[0]));
        Ok(values[0])
    }

    /// Runs ranks that join a group, as threads.
    fn run(
        size: usize,
        transport: &TransportKind,
        timeout: Duration,
        rank: impl Fn(Group, &MemoryStore) + Sync,
    ) {
        let store = MemoryStore::new();
        thread::scope(|scope| {
            for number in 0..size {
                let (store, rank) = (&store, &rank);
                scope.spawn(move || {
                    rank(Group::join(store, number, size, transport, timeout).unwrap(), store)
                });
            }
        });
    }

    #[test]
    fn reconfigure_drops_lost_ranks_and_takes_newcomers_in() {
        for transport in transports() {
            let (died, alone) = (Barrier::new(4), Barrier::new(4));
            run(4, &transport, TEST_TIMEOUT, |group, store| {
                if group.rank() == 1 {
                    drop(group);
                    died.wait();
                    alone.wait();
                    let group = Group::join_as_newcomer(store, &transport, TEST_TIMEOUT).unwrap();
                    assert_eq!((group.rank(), group.previous_ranks()), (3, &[None; 4][..]));
                    assert_eq!(sum(&group, 1).unwrap(), 4);
                    return;
                }
                died.wait();
                let error = sum(&group, 1).unwrap_err();
                assert!(error.kind() == ErrorKind::Lost && error.ranks() == [1], "{error}");
                let next = group.reconfigure(store, &Reconfigure::default()).unwrap();
                assert_eq!(next.previous_ranks(), [Some(0), Some(2), Some(3)]);
                assert_eq!(next.previous_ranks()[next.rank()], Some(group.rank()));
                drop(group);
                assert_eq!(sum(&next, 1).unwrap(), 3);
                alone.wait();
                // The group is healthy, and waits for the newcomer.
                let whole = next.reconfigure(store, &Reconfigure::default().min_size(4)).unwrap();
                assert_eq!(whole.previous_ranks(), [Some(0), Some(1), Some(2), None]);
                let error = sum(&next, 1).unwrap_err();
                assert!(error.to_string().contains("reconfigured"), "{error}");
                assert_eq!(sum(&whole, 1).unwrap(), 4);
            });
        }
    }

    /// A message that was sent in the old group is not received in the new one.
    #[test]
    fn reconfigure_discards_messages_of_the_old_group() {
        for transport in transports() {
            run(2, &transport, TEST_TIMEOUT, |group, store| {
                let call = Call::default();
                if group.rank() == 0 {
                    group.send(1, b"old", &call).unwrap();
                }
                group.barrier(&call).unwrap();
                let next = group.reconfigure(store, &Reconfigure::default()).unwrap();
                if group.rank() == 0 {
                    next.send(1, b"new", &call).unwrap();
                } else {
                    let mut buffer = [0; 3];
                    assert_eq!((next.recv(0, &mut buffer, &call).unwrap(), &buffer), (3, b"new"));
                }
                next.barrier(&call).unwrap();
            });
        }
    }

    /// Rank 0 is to propose, registers and dies. Later, all but one rank are gone.
    #[test]
    fn reconfigure_survives_the_death_of_ranks_that_call_it() {
        let (registered, left) = (Barrier::new(3), Barrier::new(2));
        run(3, &transports()[0], TEST_TIMEOUT, |group, store| {
            if group.rank() == 0 {
                let short = Reconfigure::default().min_size(9).timeout(Duration::from_millis(50));
                let error = group.reconfigure(store, &short).err().unwrap();
                assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
                drop(group);
                registered.wait();
                return;
            }
            registered.wait();
            let next = group.reconfigure(store, &Reconfigure::default()).unwrap();
            assert_eq!(next.previous_ranks(), [Some(1), Some(2)]);
            if next.rank() == 0 {
                drop((next, group));
                left.wait();
            } else {
                left.wait();
                let last = next.reconfigure(store, &Reconfigure::default()).unwrap();
                assert_eq!((last.size(), last.previous_ranks()), (1, &[Some(1)][..]));
                assert_eq!(sum(&last, 7).unwrap(), 7);
            }
        });
    }

    /// A store that shows the decision only to those who try to make it: as if all looked before the first one decides.
    struct Undecided<'a>(&'a MemoryStore);

    impl Store for Undecided<'_> {
        fn set(&self, name: &str, value: &[u8]) -> Result<()> {
            self.0.set(name, value)
        }
        fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
            if name.ends_with("/members") { Ok(None) } else { self.0.get(name) }
        }
        fn add(&self, name: &str, amount: i64) -> Result<i64> {
            self.0.add(name, amount)
        }
        fn set_once(&self, name: &str, value: &[u8]) -> Result<Vec<u8>> {
            self.0.set_once(name, value)
        }
        fn delete(&self, name: &str) -> Result<()> {
            self.0.delete(name)
        }
    }

    /// Two ranks each believe that the other one is lost: the store takes the first list, and the other rank gets an error.
    #[test]
    fn reconfigure_never_makes_two_groups_of_one() {
        run(2, &transports()[0], TEST_TIMEOUT, |group, store| {
            let candidate = Candidate::open(group.mesh.transport()).unwrap();
            let agreement = Agreement {
                store: &Undecided(store),
                group: group.id,
                // As a rank that cannot reach the other one, and so is the lowest.
                old: vec![&group.mesh.probe_addresses()[group.rank()]],
                old_rank: 0,
                next_ticket: 1,
                min_size: 0,
                deadline: Instant::now() + TEST_TIMEOUT,
                timeout: TEST_TIMEOUT,
            };
            let agreed = agreement.agree(&candidate);
            if let Err(error) = &agreed {
                assert!(error.kind() == ErrorKind::Lost && !error.is_group_usable(), "{error}");
                assert!(error.to_string().contains("went on without this rank"), "{error}");
            }
            let went_on = i64::from(agreed.is_ok());
            assert_eq!(sum(&group, went_on).unwrap(), 1);
        });
    }

    #[test]
    fn reconfigure_names_live_ranks_that_do_not_call_it() {
        let done = Barrier::new(3);
        run(3, &transports()[0], TEST_TIMEOUT, |group, store| {
            if group.rank() != 1 {
                let brief = Reconfigure::default().timeout(Duration::from_millis(500));
                let error = group.reconfigure(store, &brief).err().unwrap();
                assert!(error.kind() == ErrorKind::Timeout && error.ranks() == [1], "{error}");
                assert!(error.to_string().contains("rank 1 did not call it"), "{error}");
            }
            done.wait();
            // They may try again.
            let next = group.reconfigure(store, &Reconfigure::default()).unwrap();
            assert_eq!(next.size(), 3);
        });
    }

    #[test]
    fn reconfigured_sub_group_leaves_its_parent_usable() {
        run(4, &transports()[0], TEST_TIMEOUT, |group, store| {
            let color = Some(group.rank() as u32 / 2);
            let sub = group.split(color, &Call::default()).unwrap().unwrap();
            let next = sub.reconfigure(store, &Reconfigure::default()).unwrap();
            assert_eq!((sum(&next, 1).unwrap(), sum(&group, 1).unwrap()), (2, 4));
            let error = sum(&sub, 1).unwrap_err();
            assert!(
                !error.is_group_usable() && error.to_string().contains("reconfigured"),
                "{error}"
            );
            let error = sub.reconfigure(store, &Reconfigure::default()).err().unwrap();
            assert!(error.to_string().contains("reconfigured"), "{error}");
            assert!(sub.failure().is_some() && group.failure().is_none());
        });
    }

    /// The others take rank 1 in while its calls time out, and wait for it then.
    #[test]
    fn reconfigure_that_timed_out_goes_on_when_called_again() {
        let timed_out = Barrier::new(2);
        run(2, &transports()[0], TEST_TIMEOUT, |group, store| {
            let brief = Reconfigure::default().timeout(Duration::from_secs(1));
            let decision = format!("reconfigure/{:016x}/members", group.id);
            // Rank 1 does not see the decision, and rank 0 has nobody to meet.
            let begun = Instant::now();
            while store.get(&decision).unwrap().is_none() {
                let called = match group.rank() {
                    0 => group.reconfigure(store, &brief),
                    _ => group.reconfigure(&Undecided(store), &brief),
                };
                let error = called.err().unwrap();
                assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
                assert!(error.is_group_usable() && begun.elapsed() < TEST_TIMEOUT, "{error}");
            }
            timed_out.wait();
            let next = group.reconfigure(store, &Reconfigure::default()).unwrap();
            assert_eq!(next.previous_ranks(), [Some(0), Some(1)]);
            assert_eq!(sum(&next, 1).unwrap(), 2);
        });
    }

    /// A store that fails at the first note that a rank has come, before or after it has the note.
    struct FailsOnce<'a> {
        store: &'a MemoryStore,
        has_effect: bool,
        has_failed: AtomicBool,
    }

    impl FailsOnce<'_> {
        fn once<T>(&self, name: &str, request: impl Fn() -> Result<T>) -> Result<T> {
            if !name.contains("/met") || self.has_failed.swap(true, Ordering::Relaxed) {
                return request();
            }
            if self.has_effect {
                request()?;
            }
            Err(Error::of_store("the connection broke"))
        }
    }

    impl Store for FailsOnce<'_> {
        fn set(&self, name: &str, value: &[u8]) -> Result<()> {
            self.once(name, || self.store.set(name, value))
        }
        fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
            self.store.get(name)
        }
        fn add(&self, name: &str, amount: i64) -> Result<i64> {
            self.once(name, || self.store.add(name, amount))
        }
        fn set_once(&self, name: &str, value: &[u8]) -> Result<Vec<u8>> {
            self.store.set_once(name, value)
        }
        fn delete(&self, name: &str) -> Result<()> {
            self.store.delete(name)
        }
    }

    /// Rank 0 must not go on before the others have come, and all must after a second call.
    #[test]
    fn reconfigure_goes_on_after_a_store_request_failed() {
        for has_effect in [false, true] {
            run(4, &transports()[0], TEST_TIMEOUT, |group, store| {
                let brief = Reconfigure::default().timeout(TEST_TIMEOUT / 3);
                let failing = FailsOnce { store, has_effect, has_failed: AtomicBool::new(false) };
                let next = match group.rank() {
                    0 => group.reconfigure(store, &brief),
                    _ => {
                        let error = group.reconfigure(&failing, &brief).err().unwrap();
                        assert_eq!(error.kind(), ErrorKind::Store, "{error}");
                        group.reconfigure(&failing, &brief)
                    }
                };
                assert_eq!(sum(&next.unwrap(), 1).unwrap(), 4);
            });
        }
    }

    #[test]
    fn newcomer_without_a_group_times_out() {
        let store = MemoryStore::new();
        let joined = Group::join_as_newcomer(&store, &transports()[0], Duration::from_millis(100));
        let error = joined.err().unwrap();
        assert!(error.kind() == ErrorKind::Timeout && error.to_string().contains("newcomer"));
    }
}
