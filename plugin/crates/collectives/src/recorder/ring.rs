//! The ring of the last calls.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};

use evenkeel_transport::sync::lock;

use super::entry::{Entry, Recorded};

/// Number of calls that are kept: as many as PyTorch's flight recorder keeps by default.
const CAPACITY: usize = 2000;

/// The calls of this process.
pub(super) static RING: LazyLock<Ring> = LazyLock::new(|| Ring::new(CAPACITY));

pub(super) struct Ring {
    next: AtomicU64,
    /// The call of number n is in slot n modulo their number.
    slots: Box<[Mutex<Option<Entry>>]>,
}

impl Ring {
    fn new(capacity: usize) -> Self {
        let slots = (0..capacity).map(|_| Mutex::new(None)).collect();
        Self { next: AtomicU64::new(0), slots }
    }

    /// Adds a call, in the place of the oldest. `entry` gets its number.
    pub(super) fn add(&self, entry: impl FnOnce(u64) -> Entry) -> Recorded {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let entry = entry(id);
        let replaced = {
            let mut slot = lock(self.slot(id));
            // A later call may have been faster.
            match &*slot {
                Some(later) if later.id > id => None,
                _ => slot.replace(entry),
            }
        };
        // Outside of the lock: it may be the last that holds a group's record.
        drop(replaced);
        Recorded(id)
    }

    /// Changes a call, unless it has been overwritten. Returns what `change` returns.
    pub(super) fn change<T>(
        &self,
        Recorded(id): Recorded,
        change: impl FnOnce(&mut Entry) -> T,
    ) -> Option<T> {
        let mut slot = lock(self.slot(id));
        slot.as_mut().filter(|entry| entry.id == id).map(change)
    }

    /// Reads all calls that are kept, in the order of their numbers.
    pub(super) fn read<T>(&self, mut read: impl FnMut(&Entry) -> T) -> Vec<T> {
        let mut calls: Vec<(u64, T)> = vec![];
        for slot in &self.slots {
            let slot = lock(slot);
            calls.extend(slot.as_ref().map(|entry| (entry.id, read(entry))));
        }
        calls.sort_unstable_by_key(|(id, _)| *id);
        calls.into_iter().map(|(_, call)| call).collect()
    }

    fn slot(&self, id: u64) -> &Mutex<Option<Entry>> {
        &self.slots[(id % self.slots.len() as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::entry::Called;
    use super::super::group::GroupRecord;
    use super::*;
    use crate::group::{Call, Sequence};

    #[test]
    fn ring_keeps_the_last_calls() {
        let (ring, group) = (Ring::new(3), GroupRecord::alone(Duration::from_secs(1)));
        let sequence = Sequence::Collectives { tag: 0 };
        let add =
            || ring.add(|id| Entry::scheduled(id, &group, sequence, "barrier", &Call::default()));
        let all: Vec<_> = (0..5).map(|_| add()).collect();
        assert_eq!(ring.read(|entry| entry.id), [2, 3, 4]);
        // A call that was overwritten does not change the one in its place.
        let start = |entry: &mut Entry| entry.start(Called::of("barrier", 0, 0), Some(7));
        assert_eq!(ring.change(all[1], start), None);
        assert_eq!(ring.change(all[4], start), Some(()));
        assert_eq!(ring.read(|entry| entry.number), [None, None, Some(7)]);
    }
}
