//! The limit on memory: buffers for clients are allocated only within a grant.

use std::sync::{Arc, Mutex};

use evenkeel_transport::sync::lock;

/// The bytes that all communicators share.
#[derive(Debug)]
pub(crate) struct MemoryBudget {
    total: u64,
    used: Mutex<Used>,
}

#[derive(Debug, Default)]
struct Used {
    granted: u64,
    peak: u64,
    communicators: u64,
}

/// Bytes of the budget. Dropping it returns them.
#[derive(Debug)]
pub(crate) struct MemoryGrant {
    budget: Arc<MemoryBudget>,
    bytes: u64,
}

impl MemoryBudget {
    pub(crate) fn new(total: u64) -> Arc<Self> {
        Arc::new(Self { total, used: Mutex::default() })
    }

    /// The limit, in bytes.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Bytes granted now, and the maximum at any time.
    pub(crate) fn granted(&self) -> (u64, u64) {
        let used = lock(&self.used);
        (used.granted, used.peak)
    }

    /// A communicator's fair share, in bytes.
    pub(crate) fn share(&self) -> u64 {
        self.total / lock(&self.used).communicators.max(1)
    }

    /// Counts a communicator that shares the budget.
    pub(crate) fn add_communicator(&self) {
        lock(&self.used).communicators += 1;
    }

    /// Counts a communicator no longer.
    pub(crate) fn remove_communicator(&self) {
        let communicators = &mut lock(&self.used).communicators;
        *communicators = communicators.saturating_sub(1);
    }

    /// Grants bytes, if that leaves `reserve` for others.
    pub(crate) fn grant(self: &Arc<Self>, bytes: u64, reserve: u64) -> Option<MemoryGrant> {
        let mut used = lock(&self.used);
        let granted = used.granted.checked_add(bytes)?;
        if granted.checked_add(reserve)? > self.total {
            return None;
        }
        used.granted = granted;
        used.peak = used.peak.max(granted);
        Some(MemoryGrant { budget: Arc::clone(self), bytes })
    }
}

impl Drop for MemoryGrant {
    fn drop(&mut self) {
        lock(&self.budget.used).granted -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_grants_never_exceed_the_budget() {
        let budget = MemoryBudget::new(100);
        let first = budget.grant(60, 0).unwrap();
        assert!(budget.grant(41, 0).is_none());
        assert!(budget.grant(30, 11).is_none(), "the rest is reserved");
        let second = budget.grant(40, 0).unwrap();
        assert!(budget.grant(1, 0).is_none());
        drop(first);
        assert_eq!(budget.granted(), (40, 100));
        drop(second);
        assert_eq!(budget.granted(), (0, 100));
        assert!(budget.grant(u64::MAX, 1).is_none());
    }

    #[test]
    fn memory_shares_of_communicators_are_equal() {
        let budget = MemoryBudget::new(100);
        assert_eq!(budget.share(), 100);
        (0..4).for_each(|_| budget.add_communicator());
        assert_eq!(budget.share(), 25);
        budget.remove_communicator();
        assert_eq!(budget.share(), 33);
    }
}
