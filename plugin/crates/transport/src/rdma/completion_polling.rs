//! Whether the worker thread is woken by each completion, or leaves completions to callers that
//! poll often.
//!
//! A caller that polls takes completions itself. Waking the worker as well would only take the
//! processor from it. The worker then gives callers a lease: it does not arm the completion queue,
//! and looks again when the lease is over.

use std::time::Duration;

/// Number of polls during a lease, or between two completions, from which on callers poll often.
const MIN_POLLS: u32 = 8;
/// The first lease.
const MIN_LEASE: Duration = Duration::from_millis(1);
/// The longest lease, after callers have kept polling.
const MAX_LEASE: Duration = Duration::from_millis(8);

/// Which thread takes the completions of a connection.
#[derive(Default)]
pub(super) struct CompletionPolling {
    /// Polls by callers since the worker last ran.
    polls: u32,
    /// Whether something was sent since then for whose completion nothing waits.
    sent: bool,
    /// How long completions are left to callers, if they are.
    lease: Option<Duration>,
    /// Whether the lease was given because nothing waits for completions.
    is_idle_lease: bool,
}

impl CompletionPolling {
    /// A caller polls. Returns whether the completion queue has to be armed: the caller is about to
    /// sleep, and completions were left to callers.
    pub(super) fn caller_polls(&mut self, will_sleep: bool) -> bool {
        if will_sleep {
            self.polls = 0;
            return self.lease.take().is_some();
        }
        self.polls = self.polls.saturating_add(1);
        false
    }

    /// A caller has sent something. `is_waited_for` says whether it is not done yet. Returns
    /// whether the completion queue has to be armed: completions were left to callers because
    /// nothing waited for them.
    pub(super) fn caller_sends(&mut self, is_waited_for: bool) -> bool {
        self.sent |= !is_waited_for;
        is_waited_for && std::mem::take(&mut self.is_idle_lease) && self.lease.take().is_some()
    }

    /// The worker runs. Returns how long completions are left to callers; `None` when the next one
    /// is to wake the worker.
    pub(super) fn worker_runs(&mut self, is_waited_for: bool) -> Option<Duration> {
        let (polls, sent) = (std::mem::take(&mut self.polls), std::mem::take(&mut self.sent));
        let often = polls >= MIN_POLLS;
        self.is_idle_lease = !often && !is_waited_for && sent;
        self.lease = match self.lease {
            _ if self.is_idle_lease => Some(MAX_LEASE),
            lease if often => Some(lease.map_or(MIN_LEASE, |lease| (2 * lease).min(MAX_LEASE))),
            _ => None,
        };
        self.lease
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn poll(polling: &mut CompletionPolling, times: u32) {
        (0..times).for_each(|_| assert!(!polling.caller_polls(false)));
    }

    #[test]
    fn completions_are_left_to_callers_that_poll_often() {
        let mut polling = CompletionPolling::default();
        assert_eq!(polling.worker_runs(true), None, "no caller has polled");
        poll(&mut polling, MIN_POLLS - 1);
        assert_eq!(
            polling.worker_runs(true),
            None,
            "a caller that polls once for each message sleeps in between"
        );
        let mut lease = MIN_LEASE;
        while lease <= MAX_LEASE {
            poll(&mut polling, MIN_POLLS);
            assert_eq!(polling.worker_runs(true), Some(lease));
            lease *= 2;
        }
        poll(&mut polling, MIN_POLLS);
        assert_eq!(polling.worker_runs(true), Some(MAX_LEASE));
        assert_eq!(polling.worker_runs(true), None, "the callers have stopped");
        poll(&mut polling, MIN_POLLS);
        assert_eq!(polling.worker_runs(true), Some(MIN_LEASE));
    }

    #[test]
    fn a_caller_that_sleeps_leaves_completions_to_the_worker() {
        let mut polling = CompletionPolling::default();
        assert!(!polling.caller_polls(true), "the worker has them");
        poll(&mut polling, MIN_POLLS);
        assert!(polling.worker_runs(true).is_some());
        poll(&mut polling, MIN_POLLS);
        assert!(polling.caller_polls(true));
        assert!(!polling.caller_polls(true), "only once");
        assert_eq!(polling.worker_runs(true), None);
    }

    #[test]
    fn completions_that_nothing_waits_for_do_not_wake_the_worker() {
        let mut polling = CompletionPolling::default();
        assert_eq!(polling.worker_runs(false), None, "nothing was sent");
        for _ in 0..3 {
            assert!(!polling.caller_sends(false));
            assert_eq!(polling.worker_runs(false), Some(MAX_LEASE));
        }
        assert!(polling.caller_sends(true), "now something waits");
        assert!(!polling.caller_sends(true), "only once");
        assert_eq!(polling.worker_runs(true), None);
        poll(&mut polling, MIN_POLLS);
        assert!(polling.worker_runs(true).is_some());
        assert!(!polling.caller_sends(true), "a caller that polls often sees it");
    }
}
