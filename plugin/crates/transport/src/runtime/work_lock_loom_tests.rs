//! Test only: [`crate::runtime::work_lock`] and its tests under loom, in all interleavings of its
//! threads and with every value that memory can show them.

mod primitives {
    pub(crate) use loom::sync::atomic::{AtomicBool, Ordering, fence};
    pub(crate) use loom::sync::{Mutex, MutexGuard};
    pub(crate) use loom::thread;
    pub(crate) use std::sync::{PoisonError, TryLockError};

    /// Runs a test in every interleaving with at most two preemptions per thread: there are too
    /// many others.
    pub(crate) fn model(test: impl Fn() + Send + Sync + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(2);
        builder.check(test);
    }
}

#[path = "work_lock.rs"]
#[allow(clippy::duplicate_mod, reason = "with other building blocks it is another module")]
mod work_lock;
