//! The order of a group's operations: those of a sequence run one after another.
//!
//! Each sequence that has operations has a queue. A thread of the queue runs those that were started. It is started when it is
//! needed, and ends when it has been idle for [`MAX_IDLE_TIME`].

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use evenkeel_transport::sync::lock;

/// How long a thread waits for another operation of its sequence before it ends.
const MAX_IDLE_TIME: Duration = Duration::from_secs(1);

/// Which operations of a group run one after another, in the order in which they were started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sequence {
    /// The collective operations of a tag.
    Collectives {
        /// The tag of their calls.
        tag: u32,
    },
    /// The messages of a tag to a rank.
    Sends {
        /// The receiver.
        to: usize,
        /// The tag of their calls.
        tag: u32,
    },
    /// The messages of a tag from a rank.
    Receives {
        /// The sender; `None` for receives from any rank.
        from: Option<usize>,
        /// The tag of their calls.
        tag: u32,
    },
}

pub(super) type Callback = Box<dyn FnOnce() + Send>;

/// An operation for the thread. Returns the callbacks of its request.
pub(super) type Task = Box<dyn FnOnce() -> Vec<Callback> + Send>;

/// The queues of a group. A queue without a thread and without an operation is forgotten: programs may use a new tag for each
/// message.
#[derive(Default)]
pub(super) struct Queues(Mutex<HashMap<Sequence, Arc<Queue>>>);

/// The operations of a sequence. Each has a ticket, and the tickets are served in order.
#[derive(Default)]
struct Queue {
    state: Mutex<QueueState>,
    /// For the thread: the operation that is next is one of its tasks.
    has_task: Condvar,
    /// For callers: the next ticket is served.
    served: Condvar,
}

#[derive(Default)]
struct QueueState {
    next_ticket: u64,
    serving: u64,
    /// Operations for the thread, with their tickets.
    tasks: VecDeque<(u64, Task)>,
    has_thread: bool,
    thread_waits: bool,
}

impl QueueState {
    fn take_ticket(&mut self) -> u64 {
        self.next_ticket += 1;
        self.next_ticket - 1
    }

    /// The thread's next task, if it is its turn.
    fn take_task(&mut self) -> Option<Task> {
        let (ticket, _) = self.tasks.front()?;
        if *ticket != self.serving {
            return None;
        }
        self.tasks.pop_front().map(|(_, task)| task)
    }
}

impl Queues {
    /// Runs an operation on the calling thread, after those that were started before.
    pub(super) fn run<T>(&self, sequence: Sequence, operation: impl FnOnce() -> T) -> T {
        let (queue, ticket) = {
            let mut queues = lock(&self.0);
            let queue = Arc::clone(queues.entry(sequence).or_default());
            // Under the lock: a queue with an operation is not forgotten.
            let ticket = lock(&queue.state).take_ticket();
            (queue, ticket)
        };
        let outcome = queue.run(ticket, operation);
        self.forget_idle(sequence);
        outcome
    }

    /// Adds a task for the thread of a sequence.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub(super) fn push(self: &Arc<Self>, sequence: Sequence, task: Task) -> std::io::Result<()> {
        let mut queues = lock(&self.0);
        let queue = queues.entry(sequence).or_default();
        let mut state = lock(&queue.state);
        queue.ensure_thread(&mut state, self, sequence)?;
        let ticket = state.take_ticket();
        state.tasks.push_back((ticket, task));
        queue.wake_thread(&state);
        Ok(())
    }

    fn forget_idle(&self, sequence: Sequence) {
        let mut queues = lock(&self.0);
        if queues.get(&sequence).is_some_and(|queue| queue.is_idle()) {
            queues.remove(&sequence);
        }
    }

    /// The number of queues.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        lock(&self.0).len()
    }
}

impl Queue {
    fn is_idle(&self) -> bool {
        let state = lock(&self.state);
        !state.has_thread && state.serving == state.next_ticket
    }

    fn run<T>(&self, ticket: u64, operation: impl FnOnce() -> T) -> T {
        let mut state = lock(&self.state);
        while state.serving != ticket {
            state = self.served.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        // Also after a panic, so that others do not wait for ever.
        let _turn = Turn(self);
        operation()
    }

    fn ensure_thread(
        self: &Arc<Self>,
        state: &mut QueueState,
        queues: &Arc<Queues>,
        sequence: Sequence,
    ) -> std::io::Result<()> {
        if !state.has_thread {
            let (queue, queues) = (Arc::clone(self), Arc::clone(queues));
            thread::Builder::new().name("evenkeel-op".to_owned()).spawn(move || {
                queue.run_tasks(&queues, sequence);
                queues.forget_idle(sequence);
            })?;
            state.has_thread = true;
        }
        Ok(())
    }

    fn wake_thread(&self, state: &QueueState) {
        let is_next = state.tasks.front().is_some_and(|(ticket, _)| *ticket == state.serving);
        if state.thread_waits && is_next {
            self.has_task.notify_one();
        }
    }

    /// The thread: runs tasks until there has been none for a while.
    fn run_tasks(self: &Arc<Self>, queues: &Arc<Queues>, sequence: Sequence) {
        let mut state = lock(&self.state);
        loop {
            if let Some(task) = state.take_task() {
                drop(state);
                let turn = Turn(self);
                let callbacks = task();
                // Callbacks may wait for the next operation.
                drop(turn);
                if !callbacks.is_empty() && !self.call_back(callbacks, queues, sequence) {
                    return;
                }
                state = lock(&self.state);
                continue;
            }
            let is_idle = state.tasks.is_empty();
            state.thread_waits = true;
            let waited = self
                .has_task
                .wait_timeout(state, MAX_IDLE_TIME)
                .unwrap_or_else(PoisonError::into_inner);
            state = waited.0;
            state.thread_waits = false;
            if is_idle && state.tasks.is_empty() && waited.1.timed_out() {
                state.has_thread = false;
                return;
            }
        }
    }

    /// Calls callbacks on the thread. Another thread runs the tasks meanwhile, since the callbacks may wait for them. Returns whether
    /// this thread goes on with the tasks.
    fn call_back(
        self: &Arc<Self>,
        callbacks: Vec<Callback>,
        queues: &Arc<Queues>,
        sequence: Sequence,
    ) -> bool {
        {
            let mut state = lock(&self.state);
            state.has_thread = false;
            if !state.tasks.is_empty() {
                // If no thread can be started now, the next task tries again, and this thread comes back.
                let _ = self.ensure_thread(&mut state, queues, sequence);
            }
        }
        callbacks.into_iter().for_each(|callback| callback());
        !std::mem::replace(&mut lock(&self.state).has_thread, true)
    }
}

/// The turn of an operation. Dropping it lets the next one run.
struct Turn<'a>(&'a Queue);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.serving += 1;
        self.0.wake_thread(&state);
        self.0.served.notify_all();
    }
}
