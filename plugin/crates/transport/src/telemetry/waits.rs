//! How long connections wait, and for what: the peer, the wire, or their own caller.
//!
//! Only changes cost anything: a stopwatch that is set to the state that it has already compares one number. Its clock is the
//! kernel's coarse one, which reads no hardware. It moves every few milliseconds, so single waits are rough. Sums are right on
//! average, as waits do not begin in step with it.

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crate::sys;

const RELAXED: Ordering = Ordering::Relaxed;

/// Nanoseconds of the coarse clock.
fn now() -> u64 {
    nanoseconds(sys::coarse_time())
}

/// A time in nanoseconds, never [`Calls::STOPPED`].
fn nanoseconds(time: Duration) -> u64 {
    (time.as_nanos() as u64).max(1)
}

/// Measures how long something is so, over all the times that it is. One thread sets it at a time; any thread reads it.
#[derive(Debug, Default)]
pub(crate) struct Stopwatch {
    /// While it does not run, how long it has run, in nanoseconds. While it runs, that less the time when it began. Shifted by
    /// [`RUNS`]: in one word, so that a reader never misses what has passed until it is stopped.
    word: AtomicU64,
    /// When it began the last time.
    since: AtomicU64,
}

/// The bit of [`Stopwatch::word`] that says that it runs.
const RUNS: u64 = 1;

impl Stopwatch {
    /// Runs from this time of the coarse clock on, or does not. Returns whether that is a change. The times of two threads may
    /// come a little out of order.
    pub(crate) fn set(&self, runs: bool, now: Duration) -> bool {
        let word = self.word.load(RELAXED);
        if runs == (word & RUNS != 0) {
            return false;
        }
        let now = nanoseconds(now);
        match runs {
            true => self.start(now),
            false => {
                let end = now.max(self.since.load(RELAXED));
                self.word.store((word ^ RUNS).wrapping_add(end << 1), RELAXED);
            }
        }
        true
    }

    /// Runs from this time on. It did not run before.
    fn start(&self, now: u64) {
        self.since.store(now, RELAXED);
        let word = self.word.load(RELAXED).wrapping_sub(now << 1) | RUNS;
        // A reader that sees the word sees the beginning too.
        self.word.store(word, Ordering::Release);
    }

    /// Whether it runs.
    pub(crate) fn runs(&self) -> bool {
        self.word.load(RELAXED) & RUNS != 0
    }

    /// How long it has run in all, and how long it has run this time; zero: it does not run.
    pub(crate) fn read(&self) -> (Duration, Duration) {
        let mut word = self.word.load(Ordering::Acquire);
        while word & RUNS != 0 {
            let now = now();
            let again = self.word.load(Ordering::Acquire);
            if again == word {
                let total = (word ^ RUNS).wrapping_add(now << 1) >> 1;
                let running = now.saturating_sub(self.since.load(RELAXED));
                return (Duration::from_nanos(total), Duration::from_nanos(running));
            }
            // It was stopped before the clock was read, which would count too much.
            word = again;
        }
        (Duration::from_nanos(word >> 1), Duration::ZERO)
    }
}

/// The waits of one connection.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    /// A request is not done, or the caller has a message that the peer has no buffer for.
    pub(crate) outstanding: Stopwatch,
    /// A message cannot move for want of a buffer. On the receiving side: bytes are there, and the caller has posted none. On
    /// the sending side: the peer has advertised none.
    pub(crate) unposted: Stopwatch,
    /// A message has begun to arrive, and is not complete.
    pub(crate) arriving: Stopwatch,
    /// On the sending side: the peer's `unposted`, in milliseconds, as its last acknowledgement had it.
    peer_unposted: AtomicU32,
    /// The same without wrapping.
    peer_unposted_total: AtomicU64,
    /// The largest values read so far: what is told never shrinks.
    told: [AtomicU64; 3],
}

/// How long a connection has waited so far. What is left of `outstanding` is neither: messages were moving, or it was idle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WaitTimes {
    /// Requests were not done.
    pub(crate) outstanding: Duration,
    /// For the peer: a sender for a buffer, a receiver for the first bytes of a message.
    pub(crate) peer: Duration,
    /// For bytes that were under way.
    pub(crate) wire: Duration,
    /// The receiver had bytes and no buffer for them: its caller has not asked.
    pub(crate) unposted: Duration,
    /// How long the present requests are outstanding; zero: there are none.
    pub(crate) outstanding_for: Duration,
}

impl Waits {
    /// What a receiver's acknowledgement says of [`Waits::unposted`]: milliseconds, modulo 2^32.
    pub(crate) fn unposted_word(&self) -> u32 {
        self.unposted.read().0.as_millis() as u32
    }

    /// The peer's [`Waits::unposted_word`]. Acknowledgements of different flows may overtake each other.
    pub(crate) fn peer_says(&self, word: u32) {
        let ahead = word.wrapping_sub(self.peer_unposted.load(RELAXED));
        if ahead != 0 && ahead < 1 << 31 {
            self.peer_unposted.store(word, RELAXED);
            self.peer_unposted_total.fetch_add(ahead.into(), RELAXED);
        }
    }

    /// The times of a sender.
    pub(crate) fn sender_times(&self) -> WaitTimes {
        let (outstanding, outstanding_for) = self.outstanding.read();
        let told = Duration::from_millis(self.peer_unposted_total.load(RELAXED));
        let peer = (self.unposted.read().0 + told).min(outstanding);
        let wire = outstanding - peer;
        self.never_shrinking(WaitTimes {
            outstanding,
            peer,
            wire,
            unposted: Duration::ZERO,
            outstanding_for,
        })
    }

    /// The times of a receiver.
    pub(crate) fn receiver_times(&self) -> WaitTimes {
        let (outstanding, outstanding_for) = self.outstanding.read();
        let wire = self.arriving.read().0.min(outstanding);
        let (peer, unposted) = (outstanding - wire, self.unposted.read().0);
        self.never_shrinking(WaitTimes { outstanding, peer, wire, unposted, outstanding_for })
    }

    /// A wait is assigned when its end is known, so a sum may look smaller for a moment.
    fn never_shrinking(&self, times: WaitTimes) -> WaitTimes {
        let most = |at: usize, time: Duration| {
            let nanoseconds = time.as_nanos() as u64;
            let before = self.told[at].fetch_max(nanoseconds, RELAXED);
            Duration::from_nanos(before.max(nanoseconds))
        };
        WaitTimes {
            peer: most(0, times.peer),
            wire: most(1, times.wire),
            unposted: most(2, times.unposted),
            ..times
        }
    }
}

/// The connections of a process with requests that are not done. While there are none, the process has not called.
#[derive(Debug)]
pub(crate) struct Calls {
    outstanding: AtomicUsize,
    /// When the last one ended; [`Calls::STOPPED`] while there are some.
    idle_since: AtomicU64,
    idle: AtomicU64,
}

impl Default for Calls {
    fn default() -> Self {
        Self {
            outstanding: AtomicUsize::new(0),
            idle_since: AtomicU64::new(now()),
            idle: AtomicU64::new(0),
        }
    }
}

impl Calls {
    /// The start of an idle time that has ended.
    const STOPPED: u64 = 0;

    /// A connection has requests that are not done, or has none any more, from this time of the coarse clock on.
    pub(crate) fn change(&self, is_outstanding: bool, now: Duration) {
        let now = nanoseconds(now);
        // Of the two threads of a race, one sees what the other has done: the count and the time are in one order.
        let order = Ordering::SeqCst;
        if is_outstanding {
            if self.outstanding.fetch_add(1, order) == 0 {
                self.end_idle(now);
            }
        } else if self.outstanding.fetch_sub(1, order) == 1 {
            self.idle_since.store(now, order);
            if self.outstanding.load(order) > 0 {
                self.end_idle(now);
            }
        }
    }

    fn end_idle(&self, now: u64) {
        let since = self.idle_since.swap(Self::STOPPED, Ordering::SeqCst);
        if since != Self::STOPPED {
            self.idle.fetch_add(now.saturating_sub(since), RELAXED);
        }
    }

    /// How long there were no requests in all, and how long there are none this time; zero: there are some.
    pub(crate) fn uncalled(&self) -> (Duration, Duration) {
        let since = self.idle_since.load(RELAXED);
        let running = if since == Self::STOPPED { 0 } else { now().saturating_sub(since) };
        let total = self.idle.load(RELAXED) + running;
        (Duration::from_nanos(total), Duration::from_nanos(running))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits until the coarse clock has moved by some steps.
    fn let_time_pass() {
        let begin = now();
        while now() < begin + 20_000_000 {
            std::thread::yield_now();
        }
    }

    #[test]
    fn waits_stopwatch_counts_only_while_it_runs() {
        let watch = Stopwatch::default();
        assert!(!watch.set(false, sys::coarse_time()));
        let_time_pass();
        assert_eq!(watch.read(), Default::default());
        assert!(watch.set(true, sys::coarse_time()) && !watch.set(true, sys::coarse_time()));
        let_time_pass();
        let (total, running) = watch.read();
        assert!(running >= Duration::from_millis(20) && total >= running, "{total:?} {running:?}");
        assert!(watch.set(false, sys::coarse_time()));
        let (stopped, running) = watch.read();
        assert!(stopped >= total && running.is_zero(), "{stopped:?} {running:?}");
        let_time_pass();
        assert_eq!(watch.read().0, stopped);
    }

    /// Two threads have read the clock, and the later one was first.
    #[test]
    fn waits_stopwatch_is_not_set_back_by_an_earlier_time() {
        let watch = Stopwatch::default();
        watch.set(true, Duration::from_millis(104));
        watch.set(false, Duration::from_millis(100));
        assert_eq!(watch.read().0, Duration::ZERO);
        watch.set(true, Duration::from_millis(200));
        watch.set(false, Duration::from_millis(250));
        assert_eq!(watch.read().0, Duration::from_millis(50));
    }

    /// A reader in between would tell a connection that it has not waited.
    #[test]
    fn waits_stopwatch_loses_no_run_while_it_is_stopped() {
        const RUN: Duration = Duration::from_secs(10);
        let watch = Stopwatch::default();
        let is_done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut before = Duration::ZERO;
                while !is_done.load(RELAXED) {
                    let (total, _) = watch.read();
                    // The threads read the clock at different times.
                    assert!(total + RUN / 2 >= before, "{total:?} after {before:?}");
                    before = total;
                }
            });
            for _ in 0..500_000 {
                watch.start(now().saturating_sub(RUN.as_nanos() as u64));
                watch.set(false, sys::coarse_time());
            }
            is_done.store(true, RELAXED);
            reader.join().unwrap();
        });
    }

    #[test]
    fn waits_word_of_the_peer_wraps_and_ignores_old_ones() {
        let waits = Waits::default();
        let total = || waits.peer_unposted_total.load(RELAXED);
        waits.peer_says(u32::MAX / 2);
        waits.peer_says(u32::MAX - 9);
        let before = total();
        waits.peer_says(u32::MAX - 20);
        assert_eq!(total(), before, "an older one");
        waits.peer_says(10);
        assert_eq!(total(), before + 20);
    }

    #[test]
    fn waits_of_a_sender_are_the_wire_unless_the_peer_had_no_buffer() {
        let waits = Waits::default();
        waits.outstanding.set(true, sys::coarse_time());
        let_time_pass();
        let_time_pass();
        waits.outstanding.set(false, sys::coarse_time());
        let before = waits.sender_times();
        assert_eq!((before.peer, before.wire), (Duration::ZERO, before.outstanding));
        waits.peer_says(15);
        let after = waits.sender_times();
        assert_eq!(after.peer, Duration::from_millis(15));
        assert_eq!(after.wire, before.wire, "a counter never shrinks");
    }

    #[test]
    fn waits_of_a_process_are_uncalled_only_without_any_request() {
        let calls = Calls::default();
        calls.change(true, sys::coarse_time());
        calls.change(true, sys::coarse_time());
        let (idle, running) = calls.uncalled();
        assert!(running.is_zero());
        calls.change(false, sys::coarse_time());
        let_time_pass();
        assert_eq!(calls.uncalled(), (idle, Duration::ZERO));
        calls.change(false, sys::coarse_time());
        let_time_pass();
        let (total, running) = calls.uncalled();
        assert!(running >= Duration::from_millis(20) && total >= idle + running);
    }

    #[test]
    fn waits_of_a_process_survive_races() {
        let calls = Calls::default();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        calls.change(true, sys::coarse_time());
                        calls.change(false, sys::coarse_time());
                    }
                });
            }
        });
        assert!(!calls.uncalled().1.is_zero() || calls.idle_since.load(RELAXED) != Calls::STOPPED);
        calls.change(true, sys::coarse_time());
        assert_eq!(calls.idle_since.load(RELAXED), Calls::STOPPED);
    }
}

/// Both ends of a connection, whose callers are late in turn.
#[cfg(test)]
mod connection_tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails there")]

    use std::time::Instant;

    use super::*;
    use crate::test_support::{pair, until};
    use crate::{RecvBuffer, RecvConnection, SendBuffer, SendConnection};

    const LONG: Duration = Duration::from_millis(60);
    /// The coarse clock may be this late.
    const CLOCK_STEP: Duration = Duration::from_millis(10);

    fn from() -> SendBuffer {
        SendBuffer::from_static(vec![1; 100_000].leak())
    }

    fn to() -> RecvBuffer {
        RecvBuffer::from_static(vec![0; 100_000].leak())
    }

    fn times(send: &SendConnection, recv: &RecvConnection) -> (WaitTimes, WaitTimes) {
        (send.sender.base().wait_times(), recv.receiver.base().wait_times())
    }

    #[test]
    fn waits_for_a_late_sender_are_the_receivers_wait_for_its_peer() {
        let (send, recv) = pair();
        let received = recv.recv(to()).unwrap().unwrap();
        until(|| (times(&send, &recv).1.peer >= LONG).then_some(()));
        assert_eq!(times(&send, &recv).0, WaitTimes::default(), "the sender waits for nobody");
        let sending = Instant::now();
        let sent = send.send(from()).unwrap().unwrap();
        until(|| {
            (sent.test().unwrap().is_some() && received.test().unwrap().is_some()).then_some(())
        });
        let (of_sender, of_receiver) = times(&send, &recv);
        assert!(of_receiver.peer >= LONG, "{of_receiver:?}");
        assert!(of_receiver.wire <= sending.elapsed() + CLOCK_STEP, "{of_receiver:?}");
        assert!(of_sender.peer.is_zero(), "{of_sender:?}");
        assert!(of_receiver.outstanding_for.is_zero() && of_sender.outstanding_for.is_zero());
    }

    #[test]
    fn waits_for_a_buffer_are_the_senders_wait_for_its_peer() {
        let (send, recv) = pair();
        let sent = send.send(from()).unwrap().unwrap();
        until(|| (times(&send, &recv).1.unposted >= LONG).then_some(()));
        assert!(times(&send, &recv).1.outstanding.is_zero(), "the receiver's caller wants nothing");
        let receiving = Instant::now();
        let received = recv.recv(to()).unwrap().unwrap();
        until(|| {
            (sent.test().unwrap().is_some() && received.test().unwrap().is_some()).then_some(())
        });
        let (of_sender, of_receiver) = times(&send, &recv);
        // The acknowledgement has said it.
        assert!(of_sender.peer >= LONG - CLOCK_STEP, "{of_sender:?}");
        let waited = receiving.elapsed() + CLOCK_STEP;
        assert!(of_receiver.outstanding <= waited, "{of_receiver:?} in {waited:?}");
    }
}
