//! The order of a group's operations: those of a sequence run one after another.
//!
//! Each sequence that has operations has a queue. A thread of the queue runs those that were started. It is started when it is
//! needed, and ends when it has been idle for [`MAX_IDLE_TIME`].

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

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

impl Sequence {
    /// The tag of its operations.
    pub(super) fn tag(self) -> u32 {
        match self {
            Self::Collectives { tag } | Self::Sends { tag, .. } | Self::Receives { tag, .. } => tag,
        }
    }
}

pub(super) type Callback = Box<dyn FnOnce() + Send>;

/// An operation for the thread. Returns the callbacks of its request.
pub(super) type Task = Box<dyn FnOnce() -> Vec<Callback> + Send>;

/// The queues of a group. A queue without a thread and without an operation is forgotten: programs may use a new tag for each
/// message.
#[derive(Default)]
pub(super) struct Queues {
    queues: Mutex<HashMap<Sequence, Arc<Queue>>>,
    /// The number of the next collective operation of each tag.
    numbers: Mutex<HashMap<u32, u32>>,
}

/// The operations of a sequence. Each has a ticket, and the tickets are served in order.
struct Queue {
    sequence: Sequence,
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
    /// Tickets of callers who no longer wait for their turn.
    given_up: BTreeSet<u64>,
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

    /// Serves the next ticket that was not given up. Returns how many were.
    fn serve_next(&mut self) -> usize {
        let mut given_up = 0;
        self.serving += 1;
        while self.given_up.remove(&self.serving) {
            self.serving += 1;
            given_up += 1;
        }
        given_up
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
    /// The number of the next collective operation of a tag.
    pub(super) fn take_number(&self, tag: u32) -> u32 {
        let mut numbers = lock(&self.numbers);
        let next = numbers.entry(tag).or_insert(0);
        let number = *next;
        *next = next.wrapping_add(1);
        number
    }

    /// Runs an operation on the calling thread, after those that were started before. `None` if for as long as `limit` none of them
    /// has ended. A collective operation has taken its number even so, as on the ranks that run it: in its turn, so that those before
    /// it and behind it have the same numbers on all ranks.
    pub(super) fn run<T>(
        &self,
        sequence: Sequence,
        limit: Option<Duration>,
        operation: impl FnOnce() -> T,
    ) -> Option<T> {
        let (queue, ticket) = {
            let mut queues = lock(&self.queues);
            let queue = queues.entry(sequence).or_insert_with(|| Queue::new(sequence));
            // Under the lock: a queue with an operation is not forgotten.
            let ticket = lock(&queue.state).take_ticket();
            (Arc::clone(queue), ticket)
        };
        let outcome = queue.await_turn(ticket, limit).then(|| {
            // Also after a panic, so that others do not wait for ever.
            let _turn = Turn { queue: &queue, queues: self };
            operation()
        });
        self.forget_idle(sequence);
        outcome
    }

    /// Adds a task for the thread of a sequence.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub(super) fn push(self: &Arc<Self>, sequence: Sequence, task: Task) -> std::io::Result<()> {
        let mut queues = lock(&self.queues);
        let queue = queues.entry(sequence).or_insert_with(|| Queue::new(sequence));
        let mut state = lock(&queue.state);
        queue.ensure_thread(&mut state, self)?;
        let ticket = state.take_ticket();
        state.tasks.push_back((ticket, task));
        queue.wake_thread(&state);
        Ok(())
    }

    fn forget_idle(&self, sequence: Sequence) {
        let mut queues = lock(&self.queues);
        if queues.get(&sequence).is_some_and(|queue| queue.is_idle()) {
            queues.remove(&sequence);
        }
    }

    /// The number of queues.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        lock(&self.queues).len()
    }
}

impl Queue {
    fn new(sequence: Sequence) -> Arc<Self> {
        let (state, has_task, served) = Default::default();
        Arc::new(Self { sequence, state, has_task, served })
    }

    fn is_idle(&self) -> bool {
        let state = lock(&self.state);
        !state.has_thread && state.serving == state.next_ticket
    }

    /// Waits until a ticket is served. Returns false, and gives it up, if for as long as `limit` no operation has ended.
    fn await_turn(&self, ticket: u64, limit: Option<Duration>) -> bool {
        let mut state = lock(&self.state);
        let (mut serving, mut since) = (state.serving, Instant::now());
        while state.serving != ticket {
            if state.serving != serving {
                (serving, since) = (state.serving, Instant::now());
            }
            state = match limit.map(|limit| limit.saturating_sub(since.elapsed())) {
                // The operations before it have their own timeouts.
                None => self.served.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => {
                    state.given_up.insert(ticket);
                    return false;
                }
                Some(left) => {
                    let waited = self.served.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        true
    }

    fn ensure_thread(
        self: &Arc<Self>,
        state: &mut QueueState,
        queues: &Arc<Queues>,
    ) -> std::io::Result<()> {
        if !state.has_thread {
            let (queue, queues) = (Arc::clone(self), Arc::clone(queues));
            thread::Builder::new().name("evenkeel-op".to_owned()).spawn(move || {
                queue.run_tasks(&queues);
                queues.forget_idle(queue.sequence);
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
    fn run_tasks(self: &Arc<Self>, queues: &Arc<Queues>) {
        let mut state = lock(&self.state);
        loop {
            if let Some(task) = state.take_task() {
                drop(state);
                let turn = Turn { queue: self, queues };
                let callbacks = task();
                // Callbacks may wait for the next operation.
                drop(turn);
                if !callbacks.is_empty() && !self.call_back(callbacks, queues) {
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
    fn call_back(self: &Arc<Self>, callbacks: Vec<Callback>, queues: &Arc<Queues>) -> bool {
        {
            let mut state = lock(&self.state);
            state.has_thread = false;
            if !state.tasks.is_empty() {
                // If no thread can be started now, the next task tries again, and this thread comes back.
                let _ = self.ensure_thread(&mut state, queues);
            }
        }
        callbacks.into_iter().for_each(|callback| callback());
        !std::mem::replace(&mut lock(&self.state).has_thread, true)
    }
}

/// The turn of an operation. Dropping it lets the next one run.
struct Turn<'a> {
    queue: &'a Queue,
    queues: &'a Queues,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.queue.state);
        let given_up = state.serve_next();
        if let Sequence::Collectives { tag } = self.queue.sequence {
            for _ in 0..given_up {
                self.queues.take_number(tag);
            }
        }
        self.queue.wake_thread(&state);
        self.queue.served.notify_all();
    }
}
