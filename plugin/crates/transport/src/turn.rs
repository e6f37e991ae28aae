//! A lock for work that whoever is there may do: nobody waits for it.

use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// Guards what only one thread at a time works on. A thread that finds another one at it leaves
/// word and goes its way; the other one looks again.
#[derive(Debug, Default)]
pub(crate) struct Turn<T> {
    wanted: AtomicBool,
    state: Mutex<T>,
}

impl<T> Turn<T> {
    pub(crate) fn new(state: T) -> Self {
        Self { wanted: AtomicBool::new(false), state: Mutex::new(state) }
    }

    /// Does the work, unless another thread is at it, which then does it once more.
    pub(crate) fn take(&self, work: impl FnMut(MutexGuard<'_, T>)) {
        self.wanted.store(true, Ordering::Relaxed);
        self.take_if_free(work);
    }

    /// Does the work, unless another thread is at it.
    pub(crate) fn take_if_free(&self, mut work: impl FnMut(MutexGuard<'_, T>)) {
        loop {
            // Either the other thread sees the word that was left, or this one gets the lock.
            fence(Ordering::SeqCst);
            let state = match self.state.try_lock() {
                Ok(state) => state,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return,
            };
            self.wanted.store(false, Ordering::Relaxed);
            work(state);
            fence(Ordering::SeqCst);
            if !self.wanted.load(Ordering::Relaxed) {
                return;
            }
        }
    }

    /// Waits until nobody is at it. Word that is left meanwhile is not heard: for ending the work,
    /// or for making it be done again.
    pub(crate) fn wait(&self) -> MutexGuard<'_, T> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn no_word_is_lost() {
        let turn = Turn::new(0);
        let todo = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..10_000 {
                        todo.fetch_add(1, Ordering::SeqCst);
                        turn.take(|mut done| *done += todo.swap(0, Ordering::SeqCst));
                    }
                });
            }
        });
        assert_eq!(*turn.wait(), 40_000);
    }

    #[test]
    fn who_is_there_does_it_once_more() {
        let turn = Turn::new(0);
        let mut times = 0;
        turn.take(|state| {
            times += 1;
            if times == 1 {
                turn.take(|_| panic!("somebody is at it"));
            }
            drop(state);
        });
        assert_eq!(times, 2);
    }
}
