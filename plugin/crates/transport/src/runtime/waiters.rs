//! Callers who sleep until a request may be done.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::sync::lock;

/// One for the process: who sleeps is rare, and who is woken in vain looks and sleeps on.
static BELL: Bell = Bell::new();

thread_local! {
    /// Whether this thread falls asleep if what it looks for now is not there.
    static LAST_LOOK: Cell<bool> = const { Cell::new(false) };
}

struct Bell {
    sleepers: AtomicUsize,
    rung: Mutex<u64>,
    changed: Condvar,
}

/// Waits until `look` gives something, or for the time at most. It is asked again after every completion or failure of a
/// request or connection of this process; it must not wait itself.
pub fn wait_for<T>(time: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    BELL.wait_for(time, &mut look)
}

/// Whether the calling thread falls asleep if it finds nothing: then somebody else has to move what it waits for.
pub(crate) fn falls_asleep() -> bool {
    LAST_LOOK.get()
}

/// Something has changed that a sleeper may wait for.
pub(crate) fn ring() {
    BELL.ring();
}

impl Bell {
    const fn new() -> Self {
        Self { sleepers: AtomicUsize::new(0), rung: Mutex::new(0), changed: Condvar::new() }
    }

    fn ring(&self) {
        // Either the sleeper sees what has changed, or this sees the sleeper.
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            *lock(&self.rung) += 1;
            self.changed.notify_all();
        }
    }

    fn wait_for<T>(&self, time: Duration, look: &mut dyn FnMut() -> Option<T>) -> Option<T> {
        let deadline = Instant::now() + time;
        let _asleep = Asleep::new(&self.sleepers);
        loop {
            let heard = *lock(&self.rung);
            fence(Ordering::SeqCst);
            if let Some(found) = LastLook::with(&mut *look) {
                return Some(found);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let rung = lock(&self.rung);
            // Poisoned or not, the counter is whole.
            let _ = self.changed.wait_timeout_while(rung, left, |rung| *rung == heard);
        }
    }
}

/// Marks a look as the last one before sleep, also when it panics.
struct LastLook;

impl LastLook {
    fn with<T>(look: impl FnOnce() -> T) -> T {
        LAST_LOOK.set(true);
        let _marked = Self;
        look()
    }
}

impl Drop for LastLook {
    fn drop(&mut self) {
        LAST_LOOK.set(false);
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
    fn what_is_rung_for_is_found_at_once() {
        static DONE: AtomicBool = AtomicBool::new(false);
        let bell = Bell::new();
        let begin = Instant::now();
        for _ in 0..200 {
            DONE.store(false, Ordering::Relaxed);
            thread::scope(|scope| {
                scope.spawn(|| {
                    DONE.store(true, Ordering::Relaxed);
                    bell.ring();
                });
                let found = bell.wait_for(Duration::from_secs(60), &mut || {
                    DONE.load(Ordering::Relaxed).then_some(())
                });
                let awake = begin.elapsed() < Duration::from_secs(60);
                assert!(found.is_some() && awake, "slept through it");
            });
        }
        assert_eq!(bell.sleepers.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn the_time_is_the_longest_wait() {
        let mut looks = 0;
        let found: Option<()> = Bell::new().wait_for(Duration::from_millis(1), &mut || {
            looks += 1;
            assert!(falls_asleep());
            None
        });
        assert!(found.is_none() && looks > 0);
        assert!(!falls_asleep());
    }
}
