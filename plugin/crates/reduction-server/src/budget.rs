//! The bound on memory: nothing is allocated for clients that was not granted here.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// So many bytes for everybody.
#[derive(Debug)]
pub(crate) struct Budget {
    total: u64,
    used: Mutex<Used>,
}

#[derive(Debug, Default)]
struct Used {
    granted: u64,
    most: u64,
    /// Groups that share.
    groups: u64,
}

/// Some bytes of the budget, given back when this is dropped.
#[derive(Debug)]
pub(crate) struct Grant {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Budget {
    pub(crate) fn new(total: u64) -> Arc<Self> {
        Arc::new(Self { total, used: Mutex::default() })
    }

    fn used(&self) -> MutexGuard<'_, Used> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes in all.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Bytes granted now, and the most at any time.
    pub(crate) fn granted(&self) -> (u64, u64) {
        let used = self.used();
        (used.granted, used.most)
    }

    /// Bytes that each group may have while all want more.
    pub(crate) fn share(&self) -> u64 {
        self.total / self.used().groups.max(1)
    }

    /// A group has come, or gone.
    pub(crate) fn count_groups(&self, come: bool) {
        let groups = &mut self.used().groups;
        *groups = if come { *groups + 1 } else { groups.saturating_sub(1) };
    }

    /// Takes bytes, if that leaves `spare` for others.
    pub(crate) fn grant(self: &Arc<Self>, bytes: u64, spare: u64) -> Option<Grant> {
        let mut used = self.used();
        let granted = used.granted.checked_add(bytes)?;
        if granted.checked_add(spare)? > self.total {
            return None;
        }
        used.granted = granted;
        used.most = used.most.max(granted);
        Some(Grant { budget: Arc::clone(self), bytes })
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.budget.used().granted -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_granted_never_exceeds_the_total() {
        let budget = Budget::new(100);
        let first = budget.grant(60, 0).unwrap();
        assert!(budget.grant(41, 0).is_none());
        assert!(budget.grant(30, 11).is_none(), "others need the rest");
        let second = budget.grant(40, 0).unwrap();
        assert!(budget.grant(1, 0).is_none());
        drop(first);
        assert_eq!(budget.granted(), (40, 100));
        drop(second);
        assert_eq!(budget.granted(), (0, 100));
        assert!(budget.grant(u64::MAX, 1).is_none());
    }

    #[test]
    fn groups_have_equal_shares() {
        let budget = Budget::new(100);
        assert_eq!(budget.share(), 100);
        (0..4).for_each(|_| budget.count_groups(true));
        assert_eq!(budget.share(), 25);
        budget.count_groups(false);
        assert_eq!(budget.share(), 33);
    }
}
