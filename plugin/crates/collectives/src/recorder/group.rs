//! A group as the flight recorder knows it, and the records of its calls.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use evenkeel_transport::sync::lock;

use crate::error::{Error, ErrorKind, Result};
use crate::group::{Call, Sequence};
use crate::links::mesh::Mesh;

use super::entry::{Called, Entry, Recorded, State};
use super::ring::RING;
use super::{call_failure_hook, requests};

/// Groups that exist, and closed groups with a call in the ring. Making a group removes the others.
static GROUPS: Mutex<Vec<Weak<GroupRecord>>> = Mutex::new(vec![]);

/// A group's name and its ranks' numbers outside of Evenkeel.
struct Name {
    name: String,
    ranks: Vec<usize>,
}

/// What the flight recorder knows of a group. It lives as long as a call of the group is kept.
pub(crate) struct GroupRecord {
    id: u64,
    rank: usize,
    /// The ranks of the mesh that are members.
    members: Vec<usize>,
    timeout: Duration,
    /// The group's connections, as long as it exists.
    mesh: Weak<Mesh>,
    name: OnceLock<Name>,
    /// An error has ended the group, and was reported to the failure hook.
    ended: AtomicBool,
    /// The number of the next message to and from each rank. Made with the first message.
    messages: OnceLock<Box<[[AtomicU32; 2]]>>,
}

impl GroupRecord {
    /// Records a group.
    pub(crate) fn new(
        mesh: &Arc<Mesh>,
        id: u64,
        rank: usize,
        members: &[usize],
        timeout: Duration,
    ) -> Arc<Self> {
        let record = Arc::new(Self {
            id,
            rank,
            members: members.to_vec(),
            timeout,
            mesh: Arc::downgrade(mesh),
            name: OnceLock::new(),
            ended: AtomicBool::new(false),
            messages: OnceLock::new(),
        });
        let mut groups = lock(&GROUPS);
        groups.retain(|group| group.strong_count() > 0);
        groups.push(Arc::downgrade(&record));
        drop(groups);
        requests::answer();
        record
    }

    /// A group of one rank without connections.
    #[cfg(test)]
    pub(super) fn alone(timeout: Duration) -> Arc<Self> {
        Arc::new(Self {
            id: 1,
            rank: 0,
            members: vec![0],
            timeout,
            mesh: Weak::new(),
            name: OnceLock::new(),
            ended: AtomicBool::new(false),
            messages: OnceLock::new(),
        })
    }

    /// All groups that are known, in the order in which they were made.
    pub(super) fn all() -> Vec<Arc<Self>> {
        lock(&GROUPS).iter().filter_map(Weak::upgrade).collect()
    }

    /// Names the group, and its ranks by their numbers in the job. The first name stays.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] when there is not one number for each rank.
    pub(crate) fn set_name(&self, name: &str, ranks: &[usize]) -> Result<()> {
        let size = self.members.len();
        if ranks.len() != size {
            let text = format!("{} numbers for the {size} ranks of a group", ranks.len());
            return Err(Error::argument(text));
        }
        self.name.get_or_init(|| Name { name: name.to_owned(), ranks: ranks.to_vec() });
        Ok(())
    }

    /// The same on all ranks, and no other group's.
    pub(super) fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn name(&self) -> Option<&str> {
        self.name.get().map(|name| name.name.as_str())
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// The ranks' numbers in the job, as far as they are known: else those in the group that was joined.
    pub(super) fn ranks(&self) -> &[usize] {
        self.name.get().map_or(&self.members, |name| &name.ranks)
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Whether the group, or another one with the same connections, still exists.
    pub(super) fn is_open(&self) -> bool {
        self.mesh.strong_count() > 0
    }

    /// The ranks that the operations in progress on the group's connections wait for, in the group's numbers; and the text of the
    /// error that ended the group.
    pub(super) fn waits(&self) -> (Vec<usize>, Option<String>) {
        // In a forked child another thread of the parent may have held the locks.
        let mesh = self.mesh.upgrade().filter(|mesh| !mesh.liveness().is_forked());
        let Some(mesh) = mesh else { return (vec![], None) };
        let number = |rank| self.members.iter().position(|member| *member == rank);
        let awaited = mesh.liveness().awaited().into_iter().filter_map(number).collect();
        (awaited, mesh.liveness().failure().map(|failure| failure.text))
    }

    /// Records a call that waits for its turn.
    pub(crate) fn schedule(
        self: &Arc<Self>,
        sequence: Sequence,
        name: &'static str,
        call: &Call,
    ) -> Recorded {
        RING.add(|id| Entry::scheduled(id, self, sequence, name, call))
    }

    /// Records that a call begins: in its record if it was scheduled, or a new one.
    pub(crate) fn start(
        self: &Arc<Self>,
        sequence: Sequence,
        call: &Call,
        called: Called,
        number: Option<u32>,
    ) -> Recorded {
        if let Some(scheduled) = call.record {
            let start = |entry: &mut Entry| {
                let is_scheduled = entry.state == State::Scheduled;
                if is_scheduled {
                    entry.start(called, number);
                }
                is_scheduled
            };
            if RING.change(scheduled, start) == Some(true) {
                return scheduled;
            }
        }
        RING.add(|id| {
            let mut entry = Entry::scheduled(id, self, sequence, called.what, call);
            entry.start(called, number);
            entry
        })
    }

    /// The number of the next message to a rank, or from it.
    pub(crate) fn message_number(&self, peer: usize, is_received: bool) -> Option<u32> {
        let messages =
            self.messages.get_or_init(|| self.members.iter().map(|_| Default::default()).collect());
        let next = &messages.get(peer)?[usize::from(is_received)];
        Some(next.fetch_add(1, Ordering::Relaxed))
    }

    /// Records which rank has sent a message, and its length.
    pub(crate) fn received(&self, record: Recorded, from: usize, bytes: usize) {
        RING.change(record, |entry| {
            if let Some(called) = &mut entry.called {
                called.output_bytes = bytes;
                if called.peer.is_none() {
                    called.peer = Some(from);
                    entry.number = self.message_number(from, true);
                }
            }
        });
    }

    /// Records how a call has ended.
    pub(crate) fn end(&self, record: Recorded, error: Option<&Error>) {
        RING.change(record, |entry| entry.end(error));
        if let Some(error) = error {
            self.report(error);
        }
    }

    /// Records how a call has ended that was scheduled and did not begin.
    pub(crate) fn end_scheduled(&self, record: Recorded, error: &Error) {
        let end = |entry: &mut Entry| {
            let is_scheduled = entry.state == State::Scheduled;
            if is_scheduled {
                entry.end(Some(error));
            }
            is_scheduled
        };
        if RING.change(record, end) == Some(true) {
            self.report(error);
        }
    }

    fn report(&self, error: &Error) {
        let is_news = error.is_group_usable() || !self.ended.swap(true, Ordering::Relaxed);
        if is_news && error.kind() != ErrorKind::Argument {
            call_failure_hook(error);
        }
    }
}
