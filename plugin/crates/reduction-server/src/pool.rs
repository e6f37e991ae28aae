//! The threads that drive communicators and reduce pieces.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};

use evenkeel_transport::sync::lock;

/// Work for the pool.
type Task = Box<dyn FnOnce() + Send>;

/// A queue of tasks. It holds at most one task per communicator and one per complete piece, so the
/// number of admitted communicators bounds its length.
#[derive(Default)]
pub(crate) struct TaskPool {
    tasks: Mutex<Tasks>,
    more: Condvar,
}

#[derive(Default)]
struct Tasks {
    queue: VecDeque<Task>,
    stopped: bool,
}

impl TaskPool {
    /// Queues a task. It is dropped if the pool is stopped.
    pub(crate) fn push(&self, task: impl FnOnce() + Send + 'static) {
        {
            let mut tasks = lock(&self.tasks);
            if tasks.stopped {
                return;
            }
            tasks.queue.push_back(Box::new(task));
        }
        self.more.notify_one();
    }

    /// Drops queued tasks, and ends each thread after its current task.
    pub(crate) fn stop(&self) {
        let left = {
            let mut tasks = lock(&self.tasks);
            tasks.stopped = true;
            std::mem::take(&mut tasks.queue)
        };
        drop(left);
        self.more.notify_all();
    }

    /// Runs tasks until the pool is stopped.
    pub(crate) fn run(&self) {
        while let Some(task) = self.next() {
            task();
        }
    }

    fn next(&self) -> Option<Task> {
        let mut tasks = lock(&self.tasks);
        loop {
            if tasks.stopped {
                return None;
            }
            if let Some(task) = tasks.queue.pop_front() {
                return Some(task);
            }
            tasks = self.more.wait(tasks).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
