//! Going on with other members: without the ranks that are lost, and with newcomers.

use std::time::{Duration, Instant};

use crate::bootstrap::agreement::{Agreement, Members, await_admission};
use crate::bootstrap::candidate::Candidate;
use crate::bootstrap::store::Store;
use crate::error::{Error, ErrorKind, Result};
use crate::links::transport_kind::TransportKind;
use crate::liveness::GroupFailure;

use super::{Call, Group};

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

impl Group {
    /// The group that follows this one: all ranks of this one that are alive, in the order of their ranks, and then the newcomers
    /// that wait in [`Group::join_as_newcomer`]. All live ranks call it: after an error that ended the group, or at any other time
    /// between operations. This group cannot be used afterwards.
    ///
    /// All ranks that return a group return the same one: the store decides. Each has talked to all others in it, so nobody is in it
    /// who died before. If a rank dies meanwhile, the rest agree again. `store` is the one, or the prefix, through which the group
    /// was joined; it must outlive the ranks that are lost.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] when a live rank has not called it, or there are too few ranks; call it again, or abort.
    /// [`ErrorKind::Lost`] naming this rank when the others went on without it: it may come back by [`Group::join_as_newcomer`].
    /// [`ErrorKind::Store`] when the store cannot be reached.
    pub fn reconfigure(&self, store: &dyn Store, options: &Reconfigure) -> Result<Self> {
        let timeout = options.timeout.unwrap_or(self.timeout);
        let deadline = Instant::now() + timeout;
        let mut next = self.follow(store, options.min_size, deadline, timeout)?;
        while !next.is_complete(deadline)? {
            let newer = next.follow(store, options.min_size, deadline, timeout)?;
            // As seen from this group.
            let previous = newer.previous_ranks.iter();
            let previous =
                previous.map(|rank| rank.and_then(|rank| *next.previous_ranks.get(rank)?));
            let previous = previous.collect();
            next = newer.with_previous_ranks(previous);
        }
        let failure = GroupFailure {
            kind: ErrorKind::Aborted,
            ranks: vec![],
            text: "the group was reconfigured: use the one that `reconfigure` returned".to_owned(),
        };
        self.mesh.liveness().fail(failure);
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
        let next = match next.is_complete(deadline)? {
            true => next,
            false => next.reconfigure(
                store,
                &Reconfigure::default().timeout(deadline.saturating_duration_since(Instant::now())),
            )?,
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

    /// Agrees on the next group, whose ranks may not be connected yet.
    fn follow(
        &self,
        store: &dyn Store,
        min_size: usize,
        deadline: Instant,
        timeout: Duration,
    ) -> Result<Self> {
        let candidate = Candidate::open(self.mesh.transport())?;
        let addresses = self.mesh.probe_addresses();
        let agreement = Agreement {
            store,
            group: self.id,
            old: self.members.iter().map(|member| &addresses[*member]).collect(),
            old_rank: self.rank,
            next_ticket: self.next_ticket,
            min_size,
            deadline,
            timeout,
        };
        let members = agreement.agree(&candidate)?;
        Self::of_members(candidate, members, self.timeout)
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

    /// Whether all ranks have come. Not, when one is lost.
    fn is_complete(&self, deadline: Instant) -> Result<bool> {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_secs(1));
        match self.barrier(&Call::default().timeout(left)) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::Lost && Instant::now() < deadline => Ok(false),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::{TEST_TIMEOUT, transports};
    use crate::{MemoryStore, Op};
    use std::sync::Barrier;
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
    fn newcomer_without_a_group_times_out() {
        let store = MemoryStore::new();
        let joined = Group::join_as_newcomer(&store, &transports()[0], Duration::from_millis(100));
        let error = joined.err().unwrap();
        assert!(error.kind() == ErrorKind::Timeout && error.to_string().contains("newcomer"));
    }
}
