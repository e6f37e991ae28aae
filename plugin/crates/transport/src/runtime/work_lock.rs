//! A lock for work that whoever is there may do: nobody waits for it.

use super::primitives::{
    AtomicBool, Mutex, MutexGuard, Ordering, PoisonError, TryLockError, fence,
};

/// Guards what only one thread at a time works on. A thread that finds another one at it leaves
/// word and goes its way; the other one looks again.
#[derive(Debug, Default)]
pub(crate) struct WorkLock<T> {
    wanted: AtomicBool,
    state: Mutex<T>,
}

impl<T> WorkLock<T> {
    pub(crate) fn new(state: T) -> Self {
        Self { wanted: AtomicBool::new(false), state: Mutex::new(state) }
    }

    /// Does the work, unless another thread is at it, which then does it once more.
    pub(crate) fn run(&self, mut work: impl FnMut(MutexGuard<'_, T>)) {
        // A swap keeps what others' words publish visible to who takes this one back; a store would not.
        self.wanted.swap(true, Ordering::Release);
        self.try_run(|state, _| work(state));
    }

    /// Does the work, unless another thread is at it. The work is told whether somebody has left word: nobody else will do then
    /// what that one asks for.
    pub(crate) fn try_run(&self, mut work: impl FnMut(MutexGuard<'_, T>, bool)) {
        loop {
            // Either the other thread sees the word that was left, or this one gets the lock.
            fence(Ordering::SeqCst);
            let state = match self.state.try_lock() {
                Ok(state) => state,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return,
            };
            // The work sees what the words that are taken back here are about.
            let asked = self.wanted.swap(false, Ordering::Acquire);
            work(state, asked);
            fence(Ordering::SeqCst);
            if !self.wanted.load(Ordering::Relaxed) {
                return;
            }
        }
    }

    /// Waits until nobody is at it. ControlMessage that is left meanwhile is not heard: for ending the work,
    /// or for making it be done again.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::super::primitives::{model, thread};
    use super::*;
    use std::sync::Arc;

    /// Each thread asks for something and takes its turn: when all have gone their ways, all is done.
    fn is_done(threads: usize) {
        let asked: Arc<[AtomicBool]> = (0..threads).map(|_| AtomicBool::new(false)).collect();
        let work = Arc::new(WorkLock::new(vec![false; threads]));
        let ask = |index: usize| {
            let (asked, work) = (Arc::clone(&asked), Arc::clone(&work));
            move || {
                asked[index].store(true, Ordering::Relaxed);
                work.run(|mut done| {
                    let all = done.iter_mut().zip(&*asked);
                    all.for_each(|(done, asked)| *done |= asked.load(Ordering::Relaxed));
                });
            }
        };
        let others: Vec<_> = (1..threads).map(|index| thread::spawn(ask(index))).collect();
        ask(0)();
        others.into_iter().for_each(|other| other.join().unwrap());
        assert_eq!(*work.lock(), vec![true; threads]);
    }

    #[test]
    fn no_word_is_lost() {
        model(|| is_done(2));
        model(|| is_done(3));
    }

    #[test]
    fn who_only_looks_in_hears_the_word_of_others() {
        model(|| {
            let work = Arc::new(WorkLock::new(false));
            let asks = Arc::clone(&work);
            let other = thread::spawn(move || asks.run(|mut done| *done = true));
            work.try_run(|mut done, asked| *done |= asked);
            other.join().unwrap();
            assert!(*work.lock());
        });
    }

    #[test]
    fn who_is_there_does_it_once_more() {
        model(|| {
            let work = WorkLock::new(0);
            let mut times = 0;
            work.run(|state| {
                times += 1;
                if times == 1 {
                    work.run(|_| panic!("somebody is at it"));
                }
                drop(state);
            });
            assert_eq!(times, 2);
        });
    }
}
