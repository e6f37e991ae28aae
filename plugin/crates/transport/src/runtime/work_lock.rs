//! A lock for work that any thread can do, so that no thread waits for it.

use super::primitives::{
    AtomicBool, Mutex, MutexGuard, Ordering, PoisonError, TryLockError, fence,
};

/// Guards state that one thread at a time works on. A thread that finds it locked leaves a request
/// and goes on. The holder then runs the work again.
#[derive(Debug, Default)]
pub(crate) struct WorkLock<T> {
    wanted: AtomicBool,
    state: Mutex<T>,
}

impl<T> WorkLock<T> {
    pub(crate) fn new(state: T) -> Self {
        Self { wanted: AtomicBool::new(false), state: Mutex::new(state) }
    }

    /// Runs the work. If another thread holds the lock, that thread runs its work once more
    /// instead.
    pub(crate) fn run(&self, mut work: impl FnMut(MutexGuard<'_, T>)) {
        // A swap makes what other requests publish visible to the thread that takes this one. A
        // store would not.
        self.wanted.swap(true, Ordering::Release);
        self.try_run(|state, _| work(state));
    }

    /// Runs the work, unless another thread holds the lock. The flag tells the work whether a
    /// request was left, which no other thread will serve.
    pub(crate) fn try_run(&self, mut work: impl FnMut(MutexGuard<'_, T>, bool)) {
        loop {
            // Either the other thread sees the request, or this one gets the lock.
            fence(Ordering::SeqCst);
            let state = match self.state.try_lock() {
                Ok(state) => state,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return,
            };
            // The work sees what the threads wrote before they left the requests taken here.
            let asked = self.wanted.swap(false, Ordering::Acquire);
            work(state, asked);
            fence(Ordering::SeqCst);
            if !self.wanted.load(Ordering::Relaxed) {
                return;
            }
        }
    }

    /// Waits for the lock. Requests left meanwhile are lost. Meant for ending the work, or for
    /// making it run again.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::super::primitives::{model, thread};
    use super::*;
    use std::sync::Arc;

    /// Each thread requests something and runs the work. In the end, all requests must be done.
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
    fn work_lock_loses_no_request() {
        model(|| is_done(2));
        model(|| is_done(3));
    }

    #[test]
    fn try_run_sees_requests_of_others() {
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
    fn holder_runs_the_work_again() {
        model(|| {
            let work = WorkLock::new(0);
            let mut times = 0;
            work.run(|state| {
                times += 1;
                if times == 1 {
                    work.run(|_| panic!("the lock is held"));
                }
                drop(state);
            });
            assert_eq!(times, 2);
        });
    }
}
