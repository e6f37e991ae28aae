//! Bounds the flows that a process opens beyond the ones that its connections begin with.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum for all connections of a process. Each flow costs a descriptor on both sides and takes a
/// share of its path.
const MAX_EXTRA_FLOWS: usize = 48;

/// The extra flows of a process.
#[derive(Debug, Default)]
pub(crate) struct ExtraFlows(AtomicUsize);

/// The extra flows of one connection. Dropping it gives them back.
#[derive(Debug)]
pub(crate) struct ExtraFlowsLease {
    all: Arc<ExtraFlows>,
    flows: usize,
}

impl ExtraFlows {
    /// A lease without flows.
    pub(crate) fn lease(self: &Arc<Self>) -> ExtraFlowsLease {
        ExtraFlowsLease { all: Arc::clone(self), flows: 0 }
    }
}

impl ExtraFlowsLease {
    /// Takes this many more, or as many as are left. Returns the number taken.
    pub(crate) fn take(&mut self, wanted: usize) -> usize {
        let granted = |used: usize| wanted.min(MAX_EXTRA_FLOWS - used);
        let add = |used: usize| Some(used + granted(used));
        let order = Ordering::Relaxed;
        let before = self.all.0.fetch_update(order, order, add).unwrap_or(MAX_EXTRA_FLOWS);
        let taken = granted(before);
        self.flows += taken;
        taken
    }
}

impl Drop for ExtraFlowsLease {
    fn drop(&mut self) {
        self.all.0.fetch_sub(self.flows, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extra_flows_are_bounded_and_given_back() {
        let all = Arc::<ExtraFlows>::default();
        let (mut one, mut other) = (all.lease(), all.lease());
        assert_eq!((one.take(12), other.take(MAX_EXTRA_FLOWS)), (12, MAX_EXTRA_FLOWS - 12));
        assert_eq!(one.take(1), 0);
        drop(other);
        assert_eq!(one.take(MAX_EXTRA_FLOWS), MAX_EXTRA_FLOWS - 12);
        drop(one);
        assert_eq!(all.lease().take(1), 1);
    }
}
