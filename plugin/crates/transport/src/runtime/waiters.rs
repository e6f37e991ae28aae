//! Lets callers sleep until a request may be done.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::sync::lock;

/// One for the whole process: sleepers are rare, and one that wakes up in vain checks and sleeps
/// again.
static WAITERS: Waiters = Waiters::new();

thread_local! {
    /// Whether this thread will sleep if its current check fails.
    static ABOUT_TO_SLEEP: Cell<bool> = const { Cell::new(false) };
}

struct Waiters {
    sleepers: AtomicUsize,
    changes: Mutex<u64>,
    changed: Condvar,
}

/// Waits until `check` returns something or the time is over. It calls `check` again after every
/// completion or failure in this process. `check` must not block.
pub fn wait_for<T>(time: Duration, mut check: impl FnMut() -> Option<T>) -> Option<T> {
    WAITERS.wait_for(time, &mut check)
}

/// Whether the calling thread will sleep if it finds nothing. Then another thread must do the work
/// that it waits for.
pub(crate) fn is_about_to_sleep() -> bool {
    ABOUT_TO_SLEEP.get()
}

/// Wakes sleepers, because something changed that they may wait for.
pub(crate) fn wake_all() {
    WAITERS.wake_all();
}

impl Waiters {
    const fn new() -> Self {
        Self { sleepers: AtomicUsize::new(0), changes: Mutex::new(0), changed: Condvar::new() }
    }

    fn wake_all(&self) {
        // Either the sleeper sees the change, or this thread sees the sleeper.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            *lock(&self.changes) += 1;
            self.changed.notify_all();
        }
    }

    fn wait_for<T>(&self, time: Duration, check: &mut dyn FnMut() -> Option<T>) -> Option<T> {
        let deadline = Instant::now() + time;
        let _asleep = Asleep::new(&self.sleepers);
        loop {
            let seen = *lock(&self.changes);
            fence(Ordering::SeqCst);
            if let Some(found) = AboutToSleep::with(&mut *check) {
                return Some(found);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let changes = lock(&self.changes);
            // Poisoned or not, the counter is consistent.
            let _ = self.changed.wait_timeout_while(changes, left, |changes| *changes == seen);
        }
    }
}

/// Marks a check as the last one before sleep, and undoes that even if the check panics.
struct AboutToSleep;

impl AboutToSleep {
    fn with<T>(check: impl FnOnce() -> T) -> T {
        ABOUT_TO_SLEEP.set(true);
        let _marked = Self;
        check()
    }
}

impl Drop for AboutToSleep {
    fn drop(&mut self) {
        ABOUT_TO_SLEEP.set(false);
    }
}

struct Asleep<'a>(&'a AtomicUsize);

impl<'a> Asleep<'a> {
    fn new(sleepers: &'a AtomicUsize) -> Self {
        sleepers.fetch_add(1, Ordering::SeqCst);
        Self(sleepers)
    }
}

impl Drop for Asleep<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::thread;

    #[test]
    fn waiter_wakes_at_once() {
        static DONE: AtomicBool = AtomicBool::new(false);
        let waiters = Waiters::new();
        let begin = Instant::now();
        for _ in 0..200 {
            DONE.store(false, Ordering::Relaxed);
            thread::scope(|scope| {
                scope.spawn(|| {
                    DONE.store(true, Ordering::Relaxed);
                    waiters.wake_all();
                });
                let found = waiters.wait_for(Duration::from_secs(60), &mut || {
                    DONE.load(Ordering::Relaxed).then_some(())
                });
                let awake = begin.elapsed() < Duration::from_secs(60);
                assert!(found.is_some() && awake, "slept through it");
            });
        }
        assert_eq!(waiters.sleepers.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn waiter_times_out() {
        let mut checks = 0;
        let found: Option<()> = Waiters::new().wait_for(Duration::from_millis(1), &mut || {
            checks += 1;
            assert!(is_about_to_sleep());
            None
        });
        assert!(found.is_none() && checks > 0);
        assert!(!is_about_to_sleep());
    }
}
