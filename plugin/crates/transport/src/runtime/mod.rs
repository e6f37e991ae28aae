//! The worker threads that all connections of a process share, and how threads wait for each other.

mod alarms;
pub(crate) mod caller_polling;
pub(crate) mod descriptors;
pub(crate) mod extra_flows;
pub(crate) mod flow_count;
mod help;
pub(crate) mod notify;
pub(crate) mod reactor;
mod timers;
pub(crate) mod waiters;
pub(crate) mod work_lock;
#[cfg(test)]
mod work_lock_loom_tests;

/// The synchronization primitives of [`work_lock`], which its loom tests replace.
mod primitives {
    pub(crate) use std::sync::atomic::{AtomicBool, Ordering, fence};
    pub(crate) use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
    #[cfg(test)]
    pub(crate) use std::thread;

    /// Runs a test with real threads, in the interleavings that happen to occur.
    #[cfg(test)]
    pub(crate) fn model(test: impl Fn()) {
        (0..1000).for_each(|_| test());
    }
}
