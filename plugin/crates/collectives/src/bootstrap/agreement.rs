//! The agreement on the members of the group that follows another one.
//!
//! Each rank of the old group that calls [`agree`] registers a new identity in the store. The lowest of them that is alive waits until
//! every other one has registered or is lost, and proposes a list: those that have registered, in the order of their old ranks, and
//! then the newcomers. The store takes one list for each group, the first. So ranks that differ about who is lost get the same list.
//! A rank that is not in it gets an error: the group went on without it. No bytes of the old group can arrive in the new one, since
//! its links are made to the new identities.
//!
//! Names in the store: `reconfigure/GROUP/rank/N`, `reconfigure/GROUP/members` (the decision), `newcomers` (their number),
//! `newcomer/N`, and `newcomer/N/members` (the name of the decision that has it).
//! `reconfigure/GROUP/met/N` of the new group: rank N has come to it, and those below it in a tree have.

use std::time::{Duration, Instant};

use crate::backoff::Backoff;
use crate::bootstrap::candidate::{Candidate, decode, encode};
use crate::bootstrap::store::Store;
use crate::codec::{Reader, put};
use crate::error::{Error, ErrorKind, Result, format_duration, list_ranks};
use crate::links::mesh::RankInfo;
use crate::liveness::{PeerStatus, ProbeAddress, probe_all};

/// How long a rank may take to respond to a probe.
pub(crate) const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// How many probes in turn a rank must leave without a response to be lost. One whose process has exited is lost at once.
pub(crate) const MAX_SILENT_PROBES: u32 = 2;
/// How often a rank checks that one that it waits for is still alive.
pub(crate) const WATCH_INTERVAL: Duration = Duration::from_millis(300);
const NEWCOMERS: &str = "newcomers";
/// The old rank of a newcomer, and the ticket of a rank that is none.
const NONE: u64 = u64::MAX;

/// A member of the agreed list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) info: RankInfo,
    /// Its rank in the old group; `None` for a newcomer.
    pub(crate) old_rank: Option<usize>,
    pub(crate) ticket: Option<u64>,
}

/// The agreed members, in the order of their ranks.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Members {
    pub(crate) members: Vec<Member>,
    /// Newcomers with lower tickets were considered.
    pub(crate) next_ticket: u64,
}

impl Members {
    pub(crate) fn encode(&self, transport: u8) -> Vec<u8> {
        let mut out = self.next_ticket.to_le_bytes().to_vec();
        for Member { info, old_rank, ticket } in &self.members {
            out.extend_from_slice(&old_rank.map_or(NONE, |rank| rank as u64).to_le_bytes());
            out.extend_from_slice(&ticket.unwrap_or(NONE).to_le_bytes());
            put(&mut out, &encode(info, transport));
        }
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(bytes);
        let next_ticket = reader.long()?;
        let mut members = vec![];
        while let Some(old_rank) = reader.long() {
            let ticket = reader.long()?;
            let (info, _) = decode(reader.bytes()?)?;
            let some = |number| (number != NONE).then_some(number);
            let old_rank = some(old_rank).map(usize::try_from).transpose().ok()?;
            members.push(Member { info, old_rank, ticket: some(ticket) });
        }
        Some(Self { members, next_ticket })
    }

    /// The rank of this candidate.
    pub(crate) fn rank_of(&self, candidate: &Candidate) -> Option<usize> {
        let id = candidate.info().probe_address.id;
        self.members.iter().position(|member| member.info.probe_address.id == id)
    }
}

/// What a rank needs to know to agree with the others.
pub(crate) struct Agreement<'a> {
    pub(crate) store: &'a dyn Store,
    pub(crate) group: u64,
    /// Where the ranks of the old group are probed.
    pub(crate) old: Vec<&'a ProbeAddress>,
    pub(crate) old_rank: usize,
    pub(crate) next_ticket: u64,
    pub(crate) min_size: usize,
    pub(crate) deadline: Instant,
    pub(crate) timeout: Duration,
}

/// What a rank knows about another one of the old group.
#[derive(Clone, Default)]
struct Peer {
    info: Option<RankInfo>,
    /// What it registered in a call that has timed out.
    stale: Option<RankInfo>,
    silent_probes: u32,
    is_gone: bool,
}

impl Peer {
    /// Takes a probe's result into account: of the registered identity if there is one, otherwise of the one in the old group. A probe
    /// without a response does not count if the deadline may have ended it.
    fn note(&mut self, status: &PeerStatus, is_over: bool) {
        match status {
            PeerStatus::Alive { .. } | PeerStatus::Failed(_) => self.silent_probes = 0,
            PeerStatus::Left if self.info.is_some() => self.stale = self.info.take(),
            PeerStatus::Left => self.is_gone = true,
            status if status.has_exited() => self.is_gone = true,
            PeerStatus::Lost(_) => {
                self.silent_probes += u32::from(!is_over);
                self.is_gone = self.silent_probes >= MAX_SILENT_PROBES;
            }
        }
    }
}

/// The newcomers that wait, with their tickets.
struct Newcomers {
    newcomers: Vec<(u64, RankInfo)>,
    /// The lowest ticket whose newcomer is still unknown.
    next_ticket: u64,
}

impl Agreement<'_> {
    fn name(&self, what: &str) -> String {
        format!("reconfigure/{:016x}/{what}", self.group)
    }

    fn rank_name(&self, rank: usize) -> String {
        self.name(&format!("rank/{rank}"))
    }

    /// Agrees on the members of the next group.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] naming the ranks that are alive and have not called it; [`ErrorKind::Lost`] naming this rank when the
    /// others go on without it; the errors of the store.
    pub(crate) fn agree(&self, own: &Candidate) -> Result<Members> {
        let code = own.transport().code();
        self.store.set(&self.rank_name(self.old_rank), &encode(own.info(), code))?;
        let mut peers = vec![Peer::default(); self.old.len()];
        peers[self.old_rank].info = Some(own.info().clone());
        let mut lowest = 0;
        let mut checked: Option<Instant> = None;
        let mut backoff = Backoff::until(self.deadline);
        let members = loop {
            if let Some(members) = self.store.get(&self.name("members"))? {
                break members;
            }
            if checked.is_none_or(|checked| checked.elapsed() >= WATCH_INTERVAL) {
                self.skip_gone(&mut peers, &mut lowest)?;
                checked = Some(Instant::now());
            }
            if lowest == self.old_rank
                && let Some(members) = self.survey(&mut peers, code)?
            {
                break self.store.set_once(&self.name("members"), &members.encode(code))?;
            }
            if !backoff.wait() {
                return Err(self.timed_out(&peers)?);
            }
        };
        let members = Members::decode(&members)
            .ok_or_else(|| Error::of_store("the store's list of members is invalid"))?;
        if members.rank_of(own).is_none() {
            let text = format!(
                "the group went on without this rank ({}): it was not found alive, or had timed out",
                own.info().name
            );
            return Err(Error::new(ErrorKind::Lost, text)
                .with_ranks([self.old_rank])
                .group_unusable());
        }
        for ticket in members.members.iter().filter_map(|member| member.ticket) {
            self.store.set(&admission_name(ticket), self.name("members").as_bytes())?;
        }
        Ok(members)
    }

    /// Reads what a rank has registered.
    fn look_up(&self, peers: &mut [Peer], rank: usize) -> Result<()> {
        if rank != self.old_rank {
            let found = self.store.get(&self.rank_name(rank))?;
            let found = found.as_deref().and_then(decode).map(|(info, _)| info);
            let peer = &mut peers[rank];
            peer.info = found.filter(|info| peer.stale.as_ref() != Some(info));
        }
        Ok(())
    }

    /// Skips the ranks that cannot propose any more. `lowest` is the lowest one that may.
    fn skip_gone(&self, peers: &mut [Peer], lowest: &mut usize) -> Result<()> {
        while *lowest < self.old_rank {
            self.look_up(peers, *lowest)?;
            let peer = &mut peers[*lowest];
            let is_registered = peer.info.is_some();
            let probed = peer.info.as_ref().map_or(self.old[*lowest], |info| &info.probe_address);
            let status = probed.probe(PROBE_TIMEOUT.min(self.left()));
            peer.note(&status, self.is_over());
            if peer.is_gone {
                *lowest += 1;
            } else if is_registered == peer.info.is_some() {
                break;
            }
        }
        Ok(())
    }

    fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
    }

    fn is_over(&self) -> bool {
        Instant::now() >= self.deadline
    }

    /// The list to propose, once every rank has registered or is gone.
    fn survey(&self, peers: &mut [Peer], transport: u8) -> Result<Option<Members>> {
        for rank in 0..peers.len() {
            if peers[rank].info.is_none() && !peers[rank].is_gone {
                self.look_up(peers, rank)?;
            }
        }
        let absent: Vec<usize> = (0..peers.len())
            .filter(|rank| peers[*rank].info.is_none() && !peers[*rank].is_gone)
            .collect();
        if !absent.is_empty() {
            let addresses: Vec<_> = absent.iter().map(|rank| self.old[*rank]).collect();
            let statuses = probe_all(&addresses, PROBE_TIMEOUT, self.deadline);
            let is_over = self.is_over();
            let noted = absent.iter().zip(&statuses);
            noted.for_each(|(rank, status)| peers[*rank].note(status, is_over));
            // At the next turn: a rank may have registered and left the old group since it was looked up.
            return Ok(None);
        }
        let Some(Newcomers { newcomers, next_ticket }) = self.newcomers(transport)? else {
            return Ok(None);
        };
        let registered: Vec<usize> =
            (0..peers.len()).filter(|rank| !peers[*rank].is_gone).collect();
        if registered.len() + newcomers.len() < self.min_size {
            return Ok(None);
        }
        // Some may have died since they registered.
        let infos = registered.iter().filter_map(|rank| peers[*rank].info.as_ref());
        let candidates: Vec<_> = infos.chain(newcomers.iter().map(|(_, info)| info)).collect();
        let addresses: Vec<_> = candidates.iter().map(|info| &info.probe_address).collect();
        let statuses = probe_all(&addresses, PROBE_TIMEOUT, self.deadline);
        let is_over = self.is_over();
        let (old_statuses, new_statuses) = statuses.split_at(registered.len());
        let mut complete = true;
        for (rank, status) in registered.iter().zip(old_statuses) {
            if *rank == self.old_rank || matches!(status, PeerStatus::Alive { .. }) {
                continue;
            }
            complete = false;
            peers[*rank].note(status, is_over);
        }
        if !complete {
            return Ok(None);
        }
        let undecided = newcomers.iter().zip(new_statuses).filter(|(_, status)| {
            !status.has_exited() && matches!(status, PeerStatus::Lost(_) | PeerStatus::Failed(_))
        });
        let next_ticket = undecided.map(|((ticket, _), _)| *ticket).fold(next_ticket, u64::min);
        let survivors = registered.iter().filter_map(|rank| {
            let info = peers[*rank].info.clone()?;
            Some(Member { info, old_rank: Some(*rank), ticket: None })
        });
        let newcomers = newcomers.iter().zip(new_statuses);
        let newcomers = newcomers.filter(|(_, status)| matches!(status, PeerStatus::Alive { .. }));
        let newcomers = newcomers.map(|((ticket, info), _)| Member {
            info: info.clone(),
            old_rank: None,
            ticket: Some(*ticket),
        });
        let members: Vec<_> = survivors.chain(newcomers).collect();
        Ok((members.len() >= self.min_size).then_some(Members { members, next_ticket }))
    }

    /// The newcomers that wait. `None` when the deadline has passed before all were read.
    fn newcomers(&self, transport: u8) -> Result<Option<Newcomers>> {
        let taken = u64::try_from(self.store.add(NEWCOMERS, 0)?).unwrap_or(0);
        let (mut newcomers, mut next_ticket) = (vec![], taken + 1);
        for ticket in self.next_ticket..=taken {
            if self.is_over() {
                return Ok(None);
            }
            if self.store.get(&admission_name(ticket))?.is_some() {
                continue;
            }
            match self.store.get(&newcomer_name(ticket))?.as_deref().and_then(decode) {
                None => next_ticket = next_ticket.min(ticket),
                Some((info, its_transport)) if its_transport == transport => {
                    newcomers.push((ticket, info));
                }
                Some(_) => {}
            }
        }
        Ok(Some(Newcomers { newcomers, next_ticket }))
    }

    fn timed_out(&self, peers: &[Peer]) -> Result<Error> {
        let (mut absent, mut silent) = (vec![], vec![]);
        for (rank, peer) in peers.iter().enumerate().filter(|(_, peer)| !peer.is_gone) {
            if self.store.get(&self.rank_name(rank))?.is_none() {
                absent.push(rank);
            } else if peer.silent_probes > 0 {
                silent.push(rank);
            }
        }
        let time = format_duration(self.timeout);
        let (what, ranks) = if !absent.is_empty() {
            (format!("{} did not call it", list_ranks(&absent)), absent)
        } else if !silent.is_empty() {
            (format!("{} called it and did not respond to probes", list_ranks(&silent)), silent)
        } else {
            let known = peers.iter().filter(|peer| !peer.is_gone).count();
            let least = self.min_size.max(1);
            (
                format!(
                    "{known} ranks and the newcomers did not become a group of {least} or more"
                ),
                vec![],
            )
        };
        let text = format!("reconfigure: {what} within {time}");
        Ok(Error::new(ErrorKind::Timeout, text).with_ranks(ranks))
    }
}

fn newcomer_name(ticket: u64) -> String {
    format!("newcomer/{ticket}")
}

fn admission_name(ticket: u64) -> String {
    format!("newcomer/{ticket}/members")
}

/// A newcomer: waits until a group takes it in.
///
/// # Errors
/// [`ErrorKind::Timeout`], and the errors of the store.
pub(crate) fn await_admission(
    store: &dyn Store,
    own: &Candidate,
    deadline: Instant,
    timeout: Duration,
) -> Result<Members> {
    let ticket = u64::try_from(store.add(NEWCOMERS, 1)?)
        .map_err(|_| Error::of_store("the number of newcomers in the store is invalid"))?;
    store.set(&newcomer_name(ticket), &encode(own.info(), own.transport().code()))?;
    let mut backoff = Backoff::until(deadline);
    loop {
        if let Some(name) = store.get(&admission_name(ticket))? {
            let members = store.get(&String::from_utf8_lossy(&name))?;
            let members = members.as_deref().and_then(Members::decode);
            return members.filter(|members| members.rank_of(own).is_some()).ok_or_else(|| {
                Error::of_store("the list of members that has this newcomer is not in the store")
            });
        }
        if !backoff.wait() {
            let time = format_duration(timeout);
            let text = format!(
                "no group took this newcomer in within {time}: its ranks call `reconfigure` for that"
            );
            return Err(Error::new(ErrorKind::Timeout, text));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::TEST_TIMEOUT;
    use crate::{MemoryStore, TransportKind};
    use std::net::{Ipv4Addr, TcpListener};
    use std::sync::{Arc, mpsc};
    use std::thread;

    /// A rank that is stopped: the kernel connects, and nobody answers.
    fn stopped(listener: &TcpListener) -> ProbeAddress {
        let port = listener.local_addr().unwrap().port();
        ProbeAddress { id: 1, host: Ipv4Addr::LOCALHOST.into(), port }
    }

    /// The second probe of the rank has less than its time.
    #[test]
    fn agreement_does_not_drop_a_rank_for_a_probe_that_its_deadline_ended() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let (store, stopped) = (MemoryStore::new(), stopped(&listener));
        let own = Candidate::open(&TransportKind::SharedMemory).unwrap();
        let timeout = PROBE_TIMEOUT + WATCH_INTERVAL + PROBE_TIMEOUT / 2;
        let agreement = Agreement {
            store: &store,
            group: 1,
            old: vec![&stopped, &own.info().probe_address],
            old_rank: 1,
            next_ticket: 1,
            min_size: 0,
            deadline: Instant::now() + timeout,
            timeout,
        };
        let error = agreement.agree(&own).unwrap_err();
        assert_eq!((error.kind(), error.ranks()), (ErrorKind::Timeout, &[0][..]), "{error}");
        assert_eq!(store.get(&agreement.name("members")).unwrap(), None);
    }

    #[test]
    fn agreement_ends_at_its_deadline_however_many_newcomers_there_were() {
        let (done, ended) = mpsc::channel();
        let store = Arc::new(MemoryStore::new());
        store.add(NEWCOMERS, i64::MAX).unwrap();
        thread::spawn(move || {
            let own = Candidate::open(&TransportKind::SharedMemory).unwrap();
            let timeout = Duration::from_millis(200);
            let agreement = Agreement {
                store: &*store,
                group: 1,
                old: vec![&own.info().probe_address],
                old_rank: 0,
                next_ticket: 1,
                min_size: 0,
                deadline: Instant::now() + timeout,
                timeout,
            };
            done.send(agreement.agree(&own)).unwrap();
        });
        let error = ended.recv_timeout(TEST_TIMEOUT).unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        assert!(error.to_string().contains("newcomers"), "{error}");
    }
}
