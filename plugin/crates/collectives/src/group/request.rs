//! Nonblocking operations: a call starts one and returns a request, which is tested or awaited later.
//!
//! The operations of a [`Sequence`] run in the order in which they were started, on a thread of the group, or on the thread of a
//! caller that waits for its turn. Sequences do not wait for each other.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use evenkeel_transport::sync::lock;

use crate::error::{Error, ErrorKind, Result, format_duration};

use crate::recorder::Recorded;
use crate::wait::turn_timed_out;

use super::queue::{Callback, Sequence};
use super::{Call, Group};

/// An operation that was started. Dropping it does not end the operation.
#[derive(Debug)]
pub struct Request<T> {
    shared: Arc<Shared<T>>,
}

impl<T> Clone for Request<T> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

struct Shared<T> {
    state: Mutex<State<T>>,
    done: Condvar,
}

struct State<T> {
    outcome: Option<Result<T>>,
    on_done: Vec<Callback>,
}

impl<T> std::fmt::Debug for Shared<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let is_done = lock(&self.state).outcome.is_some();
        f.debug_struct("Request").field("is_done", &is_done).finish()
    }
}

impl<T> Request<T> {
    fn new() -> Self {
        let state = Mutex::new(State { outcome: None, on_done: vec![] });
        Self { shared: Arc::new(Shared { state, done: Condvar::new() }) }
    }

    /// A request that is done.
    pub fn ready(outcome: Result<T>) -> Self {
        let state = Mutex::new(State { outcome: Some(outcome), on_done: vec![] });
        Self { shared: Arc::new(Shared { state, done: Condvar::new() }) }
    }

    /// Sets the outcome. Returns the callbacks, which are to be called next.
    fn complete(&self, outcome: Result<T>) -> Vec<Callback> {
        let mut state = lock(&self.shared.state);
        state.outcome = Some(outcome);
        self.shared.done.notify_all();
        std::mem::take(&mut state.on_done)
    }

    /// Whether the operation is done. Does not block.
    pub fn test(&self) -> bool {
        lock(&self.shared.state).outcome.is_some()
    }

    /// Calls `callback` once the operation is done: at once if it is, otherwise on the thread that ran it. It may start operations
    /// and wait for them, also those of the same sequence.
    pub fn on_done(&self, callback: impl FnOnce() + Send + 'static) {
        {
            let mut state = lock(&self.shared.state);
            if state.outcome.is_none() {
                state.on_done.push(Box::new(callback));
                return;
            }
        }
        callback();
    }
}

impl<T: Clone> Request<T> {
    /// Waits until the operation is done, and returns its outcome. Without a limit, the operation's own timeout ends the wait.
    ///
    /// # Errors
    /// The operation's; [`ErrorKind::Timeout`] when it is not done within `limit`. It is still in progress then.
    pub fn wait(&self, limit: Option<Duration>) -> Result<T> {
        let deadline = limit.map(|limit| Instant::now() + limit);
        let mut state = lock(&self.shared.state);
        loop {
            if let Some(outcome) = &state.outcome {
                return outcome.clone();
            }
            state = match deadline {
                None => self.shared.done.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        let limit = format_duration(limit.unwrap_or_default());
                        let text = format!("the operation is still in progress after {limit}");
                        return Err(Error::new(ErrorKind::Timeout, text));
                    }
                    let waited = self.shared.done.wait_timeout(state, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

impl Group {
    /// Starts an operation, such as `|group| group.allreduce(..)`, and returns at once. It runs on a thread of the group, after the
    /// operations of the same sequence that were started before. Callers need not wait for it to make progress.
    ///
    /// A collective operation that is called directly, without [`Group::start`] or [`Group::in_order`], must not overlap with
    /// requests of the same tag.
    pub fn start<T: Send + 'static>(
        self: &Arc<Self>,
        sequence: Sequence,
        operation: impl FnOnce(&Self) -> Result<T> + Send + 'static,
    ) -> Request<T> {
        match self.check_usable() {
            Ok(()) => self.push(sequence, None, operation),
            Err(error) => Request::ready(Err(error)),
        }
    }

    /// As [`Group::start`], for one operation of the sequence with these options. The flight recorder has it from now on, under this
    /// name until it begins.
    pub fn start_call<T: Send + 'static>(
        self: &Arc<Self>,
        sequence: Sequence,
        name: &'static str,
        call: Call,
        operation: impl FnOnce(&Self, &Call) -> Result<T> + Send + 'static,
    ) -> Request<T> {
        if let Err(error) = self.check_usable() {
            return Request::ready(Err(error));
        }
        let record = self.record.schedule(sequence, name, &call);
        let call = Call { record: Some(record), ..call };
        self.push(sequence, Some(record), move |group| operation(group, &call))
    }

    fn push<T: Send + 'static>(
        self: &Arc<Self>,
        sequence: Sequence,
        record: Option<Recorded>,
        operation: impl FnOnce(&Self) -> Result<T> + Send + 'static,
    ) -> Request<T> {
        let request = Request::new();
        let (group, started) = (Arc::clone(self), request.clone());
        let task = move || {
            let outcome = catch_unwind(AssertUnwindSafe(|| operation(&group)));
            let defect = || Err(Error::new(ErrorKind::System, "defect: an operation panicked"));
            let outcome = outcome.unwrap_or_else(|_| defect());
            group.record_unbegun(record, &outcome);
            // Before the request is done: whoever waits for it may expect to hold the last reference.
            drop(group);
            started.complete(outcome)
        };
        if let Err(error) = self.queues.push(sequence, Box::new(task)) {
            let outcome = Err(Error::system("cannot start a thread for the operation", error));
            self.record_unbegun(record, &outcome);
            return Request::ready(outcome);
        }
        request
    }

    /// Runs an operation on the calling thread, after the operations of the same sequence that were started before.
    ///
    /// # Errors
    /// The operation's.
    pub fn in_order<T>(
        &self,
        sequence: Sequence,
        operation: impl FnOnce(&Self) -> Result<T>,
    ) -> Result<T> {
        self.take_turn(sequence, None, operation)
    }

    /// As [`Group::in_order`], but waits for its turn only as long as the call's own timeout, if it has one. The time counts anew when
    /// an operation before it ends. `operation` is one operation of the sequence, with the options that it gets. The flight recorder has
    /// it from now on, under this name until it begins.
    ///
    /// # Errors
    /// The operation's; [`ErrorKind::Timeout`] when its turn did not come. Then this rank leaves it out, as one that has timed out: the
    /// operations after it match those of the other ranks.
    pub fn in_order_within<T>(
        &self,
        sequence: Sequence,
        name: &'static str,
        call: &Call,
        operation: impl FnOnce(&Self, &Call) -> Result<T>,
    ) -> Result<T> {
        self.check_usable()?;
        let record = self.record.schedule(sequence, name, call);
        let call = Call { record: Some(record), ..call.clone() };
        let outcome = self.take_turn(sequence, call.timeout, |group| operation(group, &call));
        self.record_unbegun(Some(record), &outcome);
        outcome
    }

    /// Records the error of a call that ended before it began: its turn did not come, or its arguments were wrong.
    fn record_unbegun<T>(&self, record: Option<Recorded>, outcome: &Result<T>) {
        if let (Some(record), Err(error)) = (record, outcome) {
            self.record.end_scheduled(record, error);
        }
    }

    fn take_turn<T>(
        &self,
        sequence: Sequence,
        limit: Option<Duration>,
        operation: impl FnOnce(&Self) -> Result<T>,
    ) -> Result<T> {
        self.check_usable()?;
        self.queues.run(sequence, limit, || operation(self)).unwrap_or_else(|| {
            self.unfinished.store(true, Ordering::Relaxed);
            let limit = limit.unwrap_or(self.timeout);
            Err(self.renumbered(turn_timed_out(&self.mesh, sequence.tag(), limit)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Op;
    use crate::test_support::{TEST_TIMEOUT, run_ranks_shared, transports};
    use std::sync::mpsc;
    use std::thread;

    const FIRST: Sequence = Sequence::Collectives { tag: 0 };

    fn allreduce(values: Vec<i64>, tag: u32) -> impl FnOnce(&Group) -> Result<Vec<i64>> + Send {
        let mut values = values;
        move |group| {
            group.allreduce_of(&mut values, Op::Sum, &Call::default().tag(tag))?;
            Ok(values)
        }
    }

    #[test]
    fn requests_of_a_sequence_run_in_order() {
        for transport in transports() {
            run_ranks_shared(3, &transport, |group| {
                let requests: Vec<_> = (0..50)
                    .map(|i| {
                        let values = vec![i; 1 + i as usize * 200];
                        group.start(FIRST, allreduce(values, 0))
                    })
                    .collect();
                // A blocking call between them has its turn after them.
                let mut after = [1i64];
                group
                    .in_order(FIRST, |group| {
                        assert!(requests.iter().all(Request::test));
                        group.allreduce_of(&mut after, Op::Sum, &Call::default())
                    })
                    .unwrap();
                assert_eq!(after, [3]);
                for (i, request) in requests.iter().enumerate() {
                    let values = request.wait(Some(TEST_TIMEOUT)).unwrap();
                    assert!(values.iter().all(|value| *value == 3 * i as i64));
                }
            });
        }
    }

    /// The ranks start the operations of two tags in different orders, and each pair of messages crosses.
    #[test]
    fn requests_of_different_sequences_overlap() {
        for transport in transports() {
            run_ranks_shared(2, &transport, |group| {
                let tags = if group.rank() == 0 { [1, 2] } else { [2, 1] };
                let collectives = tags.map(|tag| {
                    let sequence = Sequence::Collectives { tag };
                    group.start(sequence, allreduce(vec![i64::from(tag); 100_000], tag))
                });
                let other = 1 - group.rank();
                // Receives are started first on both ranks.
                let received: Vec<_> = (0..3)
                    .map(|tag| {
                        group.start(Sequence::Receives { from: Some(other), tag }, move |group| {
                            let mut buffer = vec![0; 1 << 20];
                            let bytes =
                                group.recv(other, &mut buffer, &Call::default().tag(tag))?;
                            Ok((bytes, buffer[0]))
                        })
                    })
                    .collect();
                for tag in (0..3).rev() {
                    group
                        .in_order(Sequence::Sends { to: other, tag }, |group| {
                            group.send(other, &vec![tag as u8; 1 << 20], &Call::default().tag(tag))
                        })
                        .unwrap();
                }
                for (tag, request) in received.iter().enumerate() {
                    let outcome = request.wait(Some(TEST_TIMEOUT)).unwrap();
                    assert_eq!(outcome, (1 << 20, tag as u8));
                }
                for (tag, request) in tags.iter().zip(&collectives) {
                    let values = request.wait(Some(TEST_TIMEOUT)).unwrap();
                    assert!(values.iter().all(|value| *value == 2 * i64::from(*tag)));
                }
            });
        }
    }

    #[test]
    fn request_reports_errors_panics_and_limits() {
        run_ranks_shared(1, &transports()[0], |group| {
            let (release, held) = mpsc::channel::<()>();
            let slow = group.start(FIRST, move |_| {
                let _ = held.recv();
                Ok(7)
            });
            let (sender, notified) = mpsc::channel();
            slow.on_done(move || sender.send(()).unwrap());
            let error = slow.wait(Some(Duration::from_millis(1))).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Timeout);
            assert!(!slow.test() && notified.try_recv().is_err());
            release.send(()).unwrap();
            assert_eq!(slow.wait(Some(TEST_TIMEOUT)).unwrap(), 7);
            notified.recv_timeout(TEST_TIMEOUT).unwrap();

            let wrong = group.start(FIRST, |group| group.broadcast(&mut [0], 9, &Call::default()));
            assert_eq!(wrong.wait(None).unwrap_err().kind(), ErrorKind::Argument);
            let panicked = group.start(FIRST, |_| -> Result<()> { panic!("a defect on purpose") });
            assert_eq!(panicked.wait(None).unwrap_err().kind(), ErrorKind::System);
            // The sequence goes on.
            assert_eq!(group.start(FIRST, |_| Ok(1)).wait(Some(TEST_TIMEOUT)).unwrap(), 1);
        });
    }

    /// As in PyTorch, where a hook of a gradient's all-reduce starts another one and waits for it.
    #[test]
    fn request_callback_runs_operations_of_its_sequence() {
        run_ranks_shared(2, &transports()[0], |group| {
            let (release, held) = mpsc::channel::<()>();
            let first = group.start(FIRST, move |group| {
                let _ = held.recv_timeout(TEST_TIMEOUT);
                allreduce(vec![1], 0)(group)
            });
            let (sender, sums) = mpsc::channel();
            let (in_callback, before) = (Arc::clone(group), first.clone());
            first.on_done(move || {
                let first = before.wait(Some(TEST_TIMEOUT));
                let started = in_callback.start(FIRST, allreduce(vec![10], 0));
                let blocking = in_callback.in_order(FIRST, allreduce(vec![100], 0));
                let _ = sender.send([first, started.wait(Some(TEST_TIMEOUT)), blocking]);
            });
            // Another thread must run this one, since the callback waits for those after it.
            let queued = group.start(FIRST, allreduce(vec![1000], 0));
            release.send(()).unwrap();
            let sums = sums.recv_timeout(TEST_TIMEOUT).expect("the callback hangs");
            assert_eq!(sums.map(Result::unwrap), [[2], [20], [200]]);
            assert_eq!(queued.wait(Some(TEST_TIMEOUT)).unwrap(), [2000]);
            // The sequence goes on.
            let last = group.start(FIRST, allreduce(vec![3], 0));
            assert_eq!(last.wait(Some(TEST_TIMEOUT)).unwrap(), [6]);
        });
    }

    #[test]
    fn timeout_ends_the_wait_for_a_turn() {
        let (over, ended) = mpsc::channel();
        let (over, ended) = (Mutex::new(over), Mutex::new(ended));
        run_ranks_shared(2, &transports()[0], |group| {
            let short = Call::default().timeout(Duration::from_secs(1));
            if group.rank() == 0 {
                let first = group.start(FIRST, allreduce(vec![1], 0));
                let barrier = |group: &Group, call: &Call| group.barrier(call);
                let error = group.in_order_within(FIRST, "barrier", &short, barrier).unwrap_err();
                let last = group.start(FIRST, allreduce(vec![100], 0));
                let _ = lock(&over).send(());
                assert!(error.kind() == ErrorKind::Timeout && error.is_group_usable(), "{error}");
                assert_eq!(error.ranks(), [1], "{error}");
                assert!(error.to_string().contains("an earlier operation"), "{error}");
                assert_eq!(first.wait(Some(TEST_TIMEOUT)).unwrap(), [2]);
                assert_eq!(last.wait(Some(TEST_TIMEOUT)).unwrap(), [200]);
            } else {
                let _ = lock(&ended).recv_timeout(TEST_TIMEOUT / 6);
                assert_eq!(allreduce(vec![1], 0)(group).unwrap(), [2]);
                // The other rank has given it up, and does not take it for its next operation.
                let error = group.barrier(&short).unwrap_err();
                assert!(error.kind() == ErrorKind::Timeout && error.is_group_usable(), "{error}");
                assert_eq!(allreduce(vec![100], 0)(group).unwrap(), [200]);
            }
        });
    }

    #[test]
    fn idle_sequences_are_forgotten() {
        run_ranks_shared(2, &transports()[0], |group| {
            let other = 1 - group.rank();
            let started: Vec<_> = (0..20)
                .map(|tag| {
                    let call = Call::default().tag(tag);
                    let send = move |group: &Group| group.send(other, &[tag as u8], &call);
                    group.start(Sequence::Sends { to: other, tag }, send)
                })
                .collect();
            for tag in 0..20 {
                let (call, mut buffer) = (Call::default().tag(tag), [0]);
                let receive = |group: &Group| group.recv(other, &mut buffer, &call);
                group.in_order(Sequence::Receives { from: Some(other), tag }, receive).unwrap();
                assert_eq!(buffer, [tag as u8]);
            }
            started.iter().for_each(|send| send.wait(Some(TEST_TIMEOUT)).unwrap());
            let deadline = Instant::now() + TEST_TIMEOUT / 6;
            while group.queues.count() > 0 {
                assert!(Instant::now() < deadline, "{} sequences", group.queues.count());
                thread::yield_now();
            }
        });
    }

    #[test]
    fn abort_ends_requests_in_progress() {
        run_ranks_shared(2, &transports()[0], |group| {
            let other = 1 - group.rank();
            let waiting = group
                .start(Sequence::Receives { from: Some(other), tag: 5 }, move |group| {
                    group.recv(other, &mut [0], &Call::default().tag(5))
                });
            if group.rank() == 0 {
                group.abort("a test");
            }
            let error = waiting.wait(Some(TEST_TIMEOUT)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
        });
    }
}
