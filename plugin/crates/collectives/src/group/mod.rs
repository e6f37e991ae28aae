//! A group of ranks: joining, sub-groups, and how it ends.

pub(crate) mod call;
mod operations;
mod point_to_point;
mod queue;
pub(crate) mod receive;
mod reconfigure;
mod request;
mod window;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use evenkeel_transport::sync::lock;

use crate::bootstrap::rendezvous::bootstrap_mesh;
use crate::bootstrap::store::Store;
use crate::codec::{self, digest};
use crate::error::{Error, ErrorKind, Result};
use crate::links::mesh::Mesh;
use crate::links::transport_kind::TransportKind;
use crate::liveness::{GroupFailure, abort_group};
use crate::recorder::GroupRecord;

pub use call::Call;
pub use queue::Sequence;
pub use reconfigure::Reconfigure;
pub use request::Request;
pub use window::Window;

/// Maximum time to report that this rank aborts the group.
const MAX_ABORT_TIME: Duration = Duration::from_secs(30);

/// A rank's membership in a group. Several threads can use it, each with its own tag.
pub struct Group {
    mesh: Arc<Mesh>,
    /// The ranks of the mesh that are members.
    members: Vec<usize>,
    rank: usize,
    id: u64,
    /// The ranks of each host.
    hosts: Vec<Vec<usize>>,
    timeout: Duration,
    /// The rates of the ranks' links, once all ranks have set theirs.
    link_rates: Mutex<Option<Arc<[u64]>>>,
    /// Number of groups that have been made of the same members.
    made: Mutex<HashMap<Vec<usize>, u64>>,
    /// The operations that were started, those that wait for their turn, and the numbers of the next ones.
    queues: Arc<queue::Queues>,
    /// The rank that the next receive from any rank asks first; the number of ranks for rank 0.
    first_sender: AtomicUsize,
    /// An operation has failed: messages for it may still arrive.
    unfinished: AtomicBool,
    /// For each rank, its rank in the group that this one follows.
    previous_ranks: Vec<Option<usize>>,
    /// The first newcomer that this group and those before it have not considered.
    next_ticket: u64,
    /// It shares its mesh with the group of which it is a part.
    is_sub_group: bool,
    /// It was reconfigured.
    replaced: AtomicBool,
    /// What the flight recorder knows of it.
    record: Arc<GroupRecord>,
    /// How far the last call of `reconfigure` got.
    progress: Mutex<Option<reconfigure::Progress>>,
}

impl Group {
    /// Joins the group of all ranks that find each other in this store. Returns once all ranks have joined.
    ///
    /// `timeout` is how long to wait for the other ranks, and the group's timeout from then on. Groups that exist at the same time
    /// need separate stores or prefixes. Entries of earlier groups in the store do no harm.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] naming the ranks that have not joined, and the errors of the store and of the network.
    pub fn join(
        store: &dyn Store,
        rank: usize,
        size: usize,
        transport: &TransportKind,
        timeout: Duration,
    ) -> Result<Self> {
        let begun = Instant::now();
        let mesh = bootstrap_mesh(store, rank, size, transport, timeout)?;
        let group = Self::of_mesh(mesh, timeout);
        // The rank that serves the store must not return, and perhaps exit, before all ranks have the list of members.
        let left = timeout.saturating_sub(begun.elapsed()).max(Duration::from_secs(1));
        group.barrier(&Call::default().timeout(left))?;
        Ok(group)
    }

    /// The group of all ranks of a mesh.
    fn of_mesh(mesh: Mesh, timeout: Duration) -> Self {
        let mut identity = vec![];
        mesh.probe_addresses()
            .iter()
            .for_each(|probe_address| codec::put(&mut identity, &probe_address.id.to_le_bytes()));
        let members = (0..mesh.probe_addresses().len()).collect();
        let rank = mesh.own_rank();
        Self::of(Arc::new(mesh), members, rank, digest(&identity), timeout)
    }

    fn of(mesh: Arc<Mesh>, members: Vec<usize>, rank: usize, id: u64, timeout: Duration) -> Self {
        Self {
            hosts: mesh.group_by_host(&members),
            record: GroupRecord::new(&mesh, id, rank, &members, timeout),
            mesh,
            members,
            rank,
            id,
            timeout,
            link_rates: Mutex::default(),
            made: Mutex::default(),
            queues: Arc::default(),
            first_sender: AtomicUsize::new(0),
            unfinished: AtomicBool::new(false),
            previous_ranks: vec![],
            next_ticket: 1,
            is_sub_group: false,
            replaced: AtomicBool::new(false),
            progress: Mutex::default(),
        }
    }

    /// This process's rank, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// The ranks of each host. Hosts are in the order of their first ranks.
    pub fn hosts(&self) -> &[Vec<usize>] {
        &self.hosts
    }

    /// A rank for messages: its number, host and process.
    pub fn describe(&self, rank: usize) -> String {
        self.members
            .get(rank)
            .map_or_else(|| format!("no rank {rank}"), |member| self.mesh.describe(*member))
    }

    /// How long an operation may make no progress, unless its call sets another timeout.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Names the group for the flight recorder, and its ranks by their numbers in the job. The first name stays.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] when there is not one number for each rank.
    pub fn set_name(&self, name: &str, ranks: &[usize]) -> Result<()> {
        self.record.set_name(name, ranks)
    }

    /// The error that ended the group, if it has failed. The group cannot be used then.
    pub fn failure(&self) -> Option<Error> {
        let replaced = self.check_usable().err();
        let failure = || self.mesh.liveness().failure();
        replaced.or_else(|| failure().map(|failure| self.renumbered(failure.error())))
    }

    /// Aborts the group on all ranks. Their operations fail with this reason.
    pub fn abort(&self, reason: &str) {
        if self.mesh.liveness().is_forked() {
            return;
        }
        let text = format!("{} aborted: {reason}", self.mesh.describe(self.mesh.own_rank()));
        let failure = GroupFailure { kind: ErrorKind::Aborted, ranks: vec![], text };
        abort_group(
            self.mesh.liveness(),
            self.mesh.probe_addresses(),
            self.mesh.own_rank(),
            failure,
            MAX_ABORT_TIME.min(self.timeout),
        );
    }

    /// A group of some of the ranks, numbered in the order given; `None` on the other ranks. It needs no message and uses this
    /// group's connections. When one of the groups fails, so does the other. The ranks of the new group must make groups of the same
    /// ranks in the same order.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] when a rank does not exist or is named twice.
    pub fn sub_group(&self, ranks: &[usize]) -> Result<Option<Self>> {
        let mut members = Vec::with_capacity(ranks.len());
        let mut named = HashSet::new();
        for rank in ranks {
            let Some(member) = self.members.get(*rank) else {
                return Err(Error::argument(format!(
                    "there is no rank {rank} in a group of {}",
                    self.size()
                )));
            };
            if !named.insert(*member) {
                return Err(Error::argument(format!("rank {rank} is named twice")));
            }
            members.push(*member);
        }
        let Some(rank) = ranks.iter().position(|rank| *rank == self.rank) else { return Ok(None) };
        let made = {
            let mut made = lock(&self.made);
            let made = made.entry(members.clone()).or_insert(0);
            *made += 1;
            *made
        };
        let mut identity = self.id.to_le_bytes().to_vec();
        identity.extend_from_slice(&made.to_le_bytes());
        codec::put_list(&mut identity, members.iter());
        let mesh = Arc::clone(&self.mesh);
        let mut group = Self::of(mesh, members, rank, digest(&identity), self.timeout);
        group.is_sub_group = true;
        let rates = self.link_rates();
        let rates = rates.map(|rates| ranks.iter().map(|rank| rates[*rank]).collect());
        *lock(&group.link_rates) = rates;
        Ok(Some(group))
    }

    /// The group of all ranks that pass the same color, in the order of their ranks here; `None` without a color. All ranks call it.
    ///
    /// # Errors
    /// As any operation.
    pub fn split(&self, color: Option<u32>, call: &Call) -> Result<Option<Self>> {
        let own = color.map_or(u64::MAX, u64::from);
        let colors = self.gather_numbers(own, call)?;
        let same: Vec<usize> = (0..self.size()).filter(|rank| colors[*rank] == own).collect();
        if color.is_some() { self.sub_group(&same) } else { Ok(None) }
    }

    /// Sets the rate at which this rank's host can send and receive, in any unit that all ranks share, such as Mbit/s. All ranks call
    /// it, with no other operation in progress. From then on [`Algorithm::Direct`](crate::Algorithm::Direct) gives each rank a share
    /// of the buffer that fits its link, and an all-reduce that names no algorithm takes it where it should be faster. 0 stands for an
    /// unknown rate: if any rank sets it, the shares are equal again.
    ///
    /// The groups that are made of this one afterwards have the same rates. The group that [`Group::reconfigure`] returns has none.
    ///
    /// # Errors
    /// As any operation.
    pub fn set_link_rate(&self, rate: u64, call: &Call) -> Result<()> {
        let rates = self.gather_numbers(rate, call)?;
        *lock(&self.link_rates) = (!rates.contains(&0)).then(|| rates.into());
        Ok(())
    }

    /// The rates of the ranks' links, if all ranks have set theirs.
    fn link_rates(&self) -> Option<Arc<[u64]>> {
        lock(&self.link_rates).clone()
    }

    /// A number of each rank, at all ranks.
    fn gather_numbers(&self, own: u64, call: &Call) -> Result<Vec<u64>> {
        let mut bytes = vec![0; 8 * self.size()];
        bytes[8 * self.rank..][..8].copy_from_slice(&own.to_le_bytes());
        self.allgather(&mut bytes, call)?;
        Ok(bytes.as_chunks::<8>().0.iter().map(|number| u64::from_le_bytes(*number)).collect())
    }

    fn renumbered(&self, error: Error) -> Error {
        error.renumbered(|rank| self.members.iter().position(|member| *member == rank))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if self.mesh.liveness().is_forked() {
            // Its end would close the parent's links.
            std::mem::forget(Arc::clone(&self.mesh));
        } else if !self.unfinished.load(Ordering::Relaxed) {
            self.mesh.forget_group(self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Op;
    use crate::algorithms::cost_model;
    use crate::test_support::{run_ranks, transports};

    #[test]
    fn sub_groups_renumber_their_ranks() {
        run_ranks(5, &TransportKind::SharedMemory, |group| {
            let call = Call::default();
            let half = group.split(Some(group.rank() as u32 % 2), &call).unwrap().unwrap();
            assert_eq!(half.rank(), group.rank() / 2);
            let mut data = [group.rank() as i64];
            half.allreduce_of(&mut data, Op::Sum, &call).unwrap();
            assert_eq!(data[0], if group.rank() % 2 == 0 { 6 } else { 4 });
            let reversed = group.sub_group(&[4, 2, 0]).unwrap();
            assert_eq!(reversed.is_some(), group.rank() % 2 == 0);
            if let Some(reversed) = reversed {
                let mut data = [group.rank() as u8];
                reversed.broadcast(&mut data, 0, &call).unwrap();
                assert_eq!((data[0], reversed.rank()), (4, 2 - group.rank() / 2));
            }
            assert!(group.split(None, &call).unwrap().is_none());
            assert!(group.sub_group(&[0, 0]).is_err() && group.sub_group(&[5]).is_err());
        });
    }

    #[test]
    fn dropped_sub_groups_are_forgotten() {
        run_ranks(2, &TransportKind::SharedMemory, |group| {
            let call = Call::default();
            group.barrier(&call).unwrap();
            let before = group.mesh.remembered();
            for _ in 0..5 {
                let again = group.sub_group(&[1, 0]).unwrap().unwrap();
                again.barrier(&call).unwrap();
                assert_eq!(group.mesh.remembered(), before + 1);
            }
            assert_eq!(group.mesh.remembered(), before);
        });
    }

    /// A late rank is named, and the group works once it has called the operation.
    #[test]
    fn group_stays_usable_after_timeout() {
        let late = std::sync::Barrier::new(3);
        run_ranks(3, &TransportKind::SharedMemory, |group| {
            let call = Call::default().timeout(Duration::from_millis(1500));
            if group.rank() == 2 {
                late.wait();
            } else {
                let outcome = group.allreduce_of(&mut [1i64], Op::Sum, &call);
                // Before the assertions, so that one that fails leaves no rank at the barrier.
                late.wait();
                let error = outcome.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Timeout);
                assert!(error.is_group_usable() && group.failure().is_none(), "{error}");
                assert!(error.to_string().contains("rank 2"), "{error}");
            }
            // The late rank calls the same operations as the others.
            let call = Call::default().timeout(Duration::from_secs(20));
            if group.rank() == 2 {
                let missed = group.allreduce_of(
                    &mut [1i64],
                    Op::Sum,
                    &call.clone().timeout(Duration::from_millis(1500)),
                );
                assert!(missed.is_err_and(|error| error.is_group_usable()));
            }
            let mut data = [group.rank() as i64];
            group.allreduce_of(&mut data, Op::Sum, &call).unwrap();
            assert_eq!(data[0], 3);
        });
    }

    #[test]
    fn abort_ends_the_group_on_all_ranks() {
        for transport in transports() {
            run_ranks(3, &transport, |group| {
                // When these have arrived, all ranks have joined.
                if group.rank() == 1 {
                    for other in [0, 2] {
                        group.recv(other, &mut [0], &Call::default()).unwrap();
                    }
                    group.abort("out of disk");
                }
                // The abort ends the operation in progress, whichever it is.
                let sent = match group.rank() {
                    1 => Ok(()),
                    _ => group.send(1, &[1], &Call::default()),
                };
                let error = sent.and_then(|()| group.barrier(&Call::default())).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Aborted);
                assert!(error.to_string().contains("out of disk"), "{error}");
                assert!(!error.is_group_usable() && group.failure().is_some());
            });
        }
    }

    #[test]
    fn rank_that_leaves_is_named_as_lost() {
        for transport in transports() {
            let errors = Mutex::new(vec![]);
            run_ranks(3, &transport, |group| {
                if group.rank() != 2 {
                    let call = Call::default().timeout(Duration::from_secs(5));
                    let error = group.allreduce_of(&mut [0i64; 4], Op::Sum, &call).unwrap_err();
                    lock(&errors).push(error);
                }
            });
            for error in lock(&errors).iter() {
                assert_eq!((error.kind(), error.ranks()), (ErrorKind::Lost, &[2][..]), "{error}");
            }
        }
    }

    /// Both ends of a link that breaks are alive, and each finds that it has lost the other one.
    #[test]
    fn broken_link_is_named_alike_on_all_ranks() {
        for (transport, ends) in transports().iter().zip([(0, 1), (1, 0), (1, 2), (2, 0)]) {
            let errors = Mutex::new(vec![]);
            run_ranks(3, transport, |group| {
                group.barrier(&Call::default()).unwrap();
                if group.rank() == ends.0 {
                    assert!(group.mesh.abandon_send(ends.1, u64::MAX));
                }
                let mut calls = (0..100).map(|_| group.allgather(&mut [0; 300], &Call::default()));
                let error = calls.find_map(Result::err).unwrap();
                lock(&errors).push(error);
            });
            let errors = lock(&errors);
            assert!(errors.iter().all(|error| error.kind() == ErrorKind::Lost), "{errors:?}");
            assert!(errors.iter().all(|error| error.ranks() == errors[0].ranks()), "{errors:?}");
        }
    }

    /// Ranks leave at different times: some have left while others still receive what they sent.
    #[test]
    fn leaving_after_the_last_operation_fails_no_rank() {
        for transport in transports() {
            for round in 0..40 {
                run_ranks(3 + round % 3, &transport, |group| {
                    let bytes = group.size() * ((512 << 10) + 1);
                    let call = Call::default();
                    if round % 4 == 0 {
                        group.alltoall(&vec![1; bytes], &mut vec![0; bytes], &call).unwrap();
                    } else {
                        group.barrier(&call).unwrap();
                    }
                });
            }
        }
    }

    #[test]
    fn many_ranks_share_a_process() {
        run_ranks(32, &TransportKind::SharedMemory, |group| {
            assert_eq!(
                cost_model::default_allreduce(32, 8, 1, None),
                crate::Algorithm::RecursiveDoubling
            );
            let mut data = [group.rank() as i64];
            group.allreduce_of(&mut data, Op::Sum, &Call::default()).unwrap();
            assert_eq!(data[0], 31 * 16);
        });
    }
}
