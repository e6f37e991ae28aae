//! The threads that drive communicators and reduce.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::lock;
use crate::session::Session;

/// Something to be done.
pub(crate) enum Task {
    /// Something is new at a communicator's connections.
    Drive(Arc<Session>),
    /// All parts of a piece are there.
    Reduce(Arc<Session>, u64),
}

/// What is to be done next. There is one entry for each communicator and one for each piece that is complete, so that its
/// length is bounded by what was admitted.
#[derive(Default)]
pub(crate) struct Pool {
    tasks: Mutex<Tasks>,
    more: Condvar,
}

#[derive(Default)]
struct Tasks {
    queue: VecDeque<Task>,
    stopped: bool,
}

impl Pool {
    /// Has a task done soon; once stopped, never.
    pub(crate) fn push(&self, task: Task) {
        {
            let mut tasks = lock(&self.tasks);
            if tasks.stopped {
                return;
            }
            tasks.queue.push_back(task);
        }
        self.more.notify_one();
    }

    /// Ends all threads once they have done what they are at.
    pub(crate) fn stop(&self) {
        let left = {
            let mut tasks = lock(&self.tasks);
            tasks.stopped = true;
            std::mem::take(&mut tasks.queue)
        };
        drop(left);
        self.more.notify_all();
    }

    /// Does tasks until the pool is stopped.
    pub(crate) fn work(&self) {
        loop {
            let task = {
                let mut tasks = lock(&self.tasks);
                loop {
                    if tasks.stopped {
                        return;
                    }
                    if let Some(task) = tasks.queue.pop_front() {
                        break task;
                    }
                    tasks = self.more.wait(tasks).unwrap_or_else(PoisonError::into_inner);
                }
            };
            match task {
                Task::Drive(session) => session.drive(),
                Task::Reduce(session, number) => session.reduce(number),
            }
        }
    }
}
