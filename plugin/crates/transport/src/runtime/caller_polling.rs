//! Decides which threads run the workers' turns: the workers themselves, or callers that poll so
//! often that waking a worker would only take a processor from them.
//!
//! A polling caller runs a turn: it takes the events of all sockets at once and calls their
//! sources. While callers lead, the workers do not wait for events. They check from time to time
//! whether callers still poll. If the callers have more work than one thread can do, the workers
//! join in ([`Help`]).

use std::cell::Cell;
use std::num::NonZero;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use crate::runtime::help::{Help, Totals};
use crate::sys::{self, ThreadUsage};

/// Minimum number of consecutive turns, and the minimum time that they span, before callers lead.
const MIN_TURNS: u32 = 32;
const MIN_TIME: Duration = Duration::from_micros(100);
/// Maximum time between two consecutive turns.
pub(crate) const MAX_PAUSE: Duration = Duration::from_millis(1);
/// Time after which workers check whether callers still poll. A caller that was preempted comes
/// back within a few milliseconds. One that sleeps hands the turns back at once.
const MIN_LEASE: Duration = Duration::from_millis(4);
/// The longest lease, after callers have kept polling.
const MAX_LEASE: Duration = Duration::from_millis(8);
/// How often a polling caller records the processor time that it gets.
const USAGE_INTERVAL: Duration = Duration::from_millis(1);

thread_local! {
    /// Its address identifies the thread.
    static THREAD: u8 = const { 0 };
    /// When this thread last recorded its processor time, and the value.
    static USAGE: Cell<Option<(Instant, ThreadUsage)>> = const { Cell::new(None) };
}

fn this_thread() -> usize {
    THREAD.with(|thread| std::ptr::from_ref(thread).addr())
}

/// State about all polling callers of a process.
#[derive(Debug, Default)]
pub(crate) struct CallerPolling {
    leads: AtomicBool,
    /// The thread that ran the last turn.
    leader: AtomicUsize,
    /// Number of polls. Concurrent callers may lose counts.
    polls: AtomicU64,
    /// Number of the last turn.
    turn: AtomicU64,
    streak: Mutex<Option<Streak>>,
    /// Nanoseconds in which callers did work of workers.
    worked: AtomicU64,
    /// Number of turns with events, and of their events.
    events: [AtomicU64; 2],
    /// Nanoseconds in which polling callers did not sleep, and in which they had a processor.
    usage: [AtomicU64; 2],
    help: Mutex<Help>,
}

/// A worker leaves the turns to callers for a time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lease {
    time: Duration,
    pub(crate) until: Instant,
    /// Number of polls when it began.
    polls: u64,
}

/// A run of consecutive turns.
#[derive(Debug)]
pub(crate) struct Streak {
    began: Instant,
    last: Instant,
    turns: u32,
}

/// The last turn that a connection knows of.
#[derive(Debug, Default)]
pub(crate) struct SeenTurn(AtomicU64);

/// What a caller must do.
pub(crate) enum Turn<'a> {
    /// Nothing: a turn ran since the connection was last polled, or another caller is running one.
    Skip,
    /// Run a turn, and keep this value until the turn is over.
    Run {
        streak: MutexGuard<'a, Option<Streak>>,
        /// Whether callers begin to lead, so that the workers must be told.
        begins: bool,
    },
}

impl CallerPolling {
    /// Whether callers run the turns.
    pub(crate) fn leads(&self) -> bool {
        self.leads.load(Ordering::Relaxed)
    }

    /// Handles a caller's poll of a connection. A caller that polls many connections needs one turn
    /// for all of them, which is due when it polls a connection for the second time.
    pub(crate) fn poll(&self, seen: &SeenTurn) -> Turn<'_> {
        let polls = self.polls.load(Ordering::Relaxed);
        // A lost update between threads does no harm.
        self.polls.store(polls + 1, Ordering::Relaxed);
        let turn = self.turn.load(Ordering::Relaxed);
        if self.leads() && seen.0.load(Ordering::Relaxed) != turn {
            seen.0.store(turn, Ordering::Relaxed);
            return Turn::Skip;
        }
        let Some(mut streak) = try_lock(&self.streak) else { return Turn::Skip };
        seen.0.store(turn + 1, Ordering::Relaxed);
        self.turn.store(turn + 1, Ordering::Relaxed);
        self.leader.store(this_thread(), Ordering::Relaxed);
        let now = Instant::now();
        self.note_usage(now);
        let begins = match &mut *streak {
            Some(streak) if now.duration_since(streak.last) <= MAX_PAUSE => {
                streak.turns = streak.turns.saturating_add(1);
                streak.last = now;
                streak.turns >= MIN_TURNS && now.duration_since(streak.began) >= MIN_TIME
            }
            streak => {
                *streak = Some(Streak { began: now, last: now, turns: 1 });
                false
            }
        };
        let begins = begins && !self.leads() && self.may_lead(now);
        if begins {
            self.leads.store(true, Ordering::Relaxed);
        }
        Turn::Run { streak, begins }
    }

    /// Notes that a caller is about to sleep. Returns whether it led, so that the workers must take
    /// over.
    pub(crate) fn sleeps(&self) -> bool {
        let led = self.leads() && self.leader.load(Ordering::Relaxed) == this_thread();
        led && self.end()
    }

    /// Checks, once a worker's lease is over, whether callers polled during it. Returns the next
    /// lease, or none if the worker takes over.
    pub(crate) fn lease(&self, before: Option<Lease>, now: Instant) -> Option<Lease> {
        if !self.leads() {
            return None;
        }
        let polls = self.polls.load(Ordering::Relaxed);
        let next = |time: Duration| Some(Lease { time, until: now + time, polls });
        let Some(before) = before else { return next(MIN_LEASE) };
        if now < before.until {
            // The worker woke up for a timer.
            return Some(before);
        }
        // A turn may take longer than the lease.
        let poll = before.polls != polls || try_lock(&self.streak).is_none();
        if !poll || self.need_help(now) {
            self.end();
            return None;
        }
        next((2 * before.time).min(MAX_LEASE))
    }

    /// Nanoseconds in which callers did work of workers.
    pub(crate) fn worked(&self) -> u64 {
        self.worked.load(Ordering::Relaxed)
    }

    /// Adds time that a caller spent on workers' work.
    pub(crate) fn add_work(&self, time: Duration) {
        self.worked.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Notes that a caller ran a turn with this many events.
    pub(crate) fn add_turn(&self, events: usize) {
        self.events[0].fetch_add(1, Ordering::Relaxed);
        self.events[1].fetch_add(events as u64, Ordering::Relaxed);
    }

    /// Records the polling thread's processor time since the last record, unless it slept in
    /// between.
    fn note_usage(&self, now: Instant) {
        let before = USAGE.get();
        if before.is_some_and(|(at, _)| now.saturating_duration_since(at) < USAGE_INTERVAL) {
            return;
        }
        // Without these numbers, workers help as if callers were never preempted.
        let usage = sys::thread_usage().ok();
        USAGE.set(usage.map(|usage| (now, usage)));
        if let Some(((at, before), usage)) = before.zip(usage)
            && usage.sleeps == before.sleeps
        {
            let times = [now.saturating_duration_since(at), usage.ran.saturating_sub(before.ran)];
            for (total, time) in self.usage.iter().zip(times) {
                total.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
            }
        }
    }

    fn totals(&self) -> Totals {
        let [turns, events] = [0, 1].map(|index| self.events[index].load(Ordering::Relaxed));
        let [awake, ran] =
            [0, 1].map(|index| Duration::from_nanos(self.usage[index].load(Ordering::Relaxed)));
        let worked = Duration::from_nanos(self.worked());
        Totals { worked, turns, events, awake, ran, process: sys::processor_time() }
    }

    fn may_lead(&self, now: Instant) -> bool {
        try_lock(&self.help).is_some_and(|mut help| help.may_lead(now, || self.totals()))
    }

    /// Whether workers must help the callers that lead.
    fn need_help(&self, now: Instant) -> bool {
        let Some(mut help) = try_lock(&self.help) else { return false };
        help.must_begin(now, &self.totals(), || available_parallelism().map_or(1, NonZero::get))
    }

    fn end(&self) -> bool {
        if let Some(mut streak) = try_lock(&self.streak) {
            *streak = None;
        }
        self.leads.swap(false, Ordering::Relaxed)
    }
}

fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(PoisonError::into_inner(poisoned)),
        Err(TryLockError::WouldBlock) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// Whether it runs a turn.
    fn poll(polling: &CallerPolling, seen: &SeenTurn) -> bool {
        matches!(polling.poll(seen), Turn::Run { .. })
    }

    /// Polls until callers lead. They must poll often for some time.
    fn lead(polling: &CallerPolling, seen: &SeenTurn) {
        let mut polls = 0;
        while !polling.leads() {
            assert!(poll(polling, seen), "each poll runs a turn");
            polls += 1;
        }
        assert!(polls >= MIN_TURNS, "{polls} polls");
    }

    #[test]
    fn caller_polling_needs_one_turn_for_many_connections() {
        let polling = CallerPolling::default();
        let seen: [SeenTurn; 100] = std::array::from_fn(|_| SeenTurn::default());
        lead(&polling, &seen[0]);
        for round in 0..10 {
            let turns = seen.iter().filter(|seen| poll(&polling, seen)).count();
            assert!(turns <= 1, "round {round}: {turns} turns");
        }
        assert!(poll(&polling, &seen[0]) || poll(&polling, &seen[0]), "alone it runs turns");
    }

    #[test]
    fn caller_polling_has_one_turn_at_a_time() {
        let polling = CallerPolling::default();
        let (one, other) = (SeenTurn::default(), SeenTurn::default());
        let turn = polling.poll(&one);
        assert!(matches!(turn, Turn::Run { .. }) && !poll(&polling, &other));
        drop(turn);
        assert!(poll(&polling, &other));
    }

    #[test]
    fn caller_polling_notes_what_processor_time_callers_get() {
        const TIME: Duration = Duration::from_millis(20);
        let (polling, seen) = (CallerPolling::default(), SeenTurn::default());
        while polling.totals().awake < TIME {
            poll(&polling, &seen);
        }
        let before = polling.totals();
        assert!(before.ran > Duration::ZERO && before.ran <= before.awake + USAGE_INTERVAL);
        assert!(before.process >= before.ran, "{before:?}");
        thread::sleep(TIME);
        poll(&polling, &seen);
        assert!(polling.totals().awake < before.awake + TIME, "it has slept");
    }

    #[test]
    fn caller_polling_ends_when_nobody_polls() {
        let polling = CallerPolling::default();
        let mut now = Instant::now();
        assert!(polling.lease(None, now).is_none(), "nobody leads");
        let seen = SeenTurn::default();
        lead(&polling, &seen);
        let mut lease = polling.lease(None, now).unwrap();
        for _ in 0..5 {
            poll(&polling, &seen);
            now = lease.until;
            lease = polling.lease(Some(lease), now).unwrap();
            assert!(lease.until > now && lease.until <= now + MAX_LEASE);
        }
        // Each worker sees the polls, not only the first one that checks.
        poll(&polling, &seen);
        let over = Some(lease);
        now = lease.until;
        assert!(polling.lease(over, now).is_some() && polling.lease(over, now).is_some());
        let lease = polling.lease(over, now).unwrap();
        let early = lease.until - Duration::from_micros(1);
        assert_eq!(polling.lease(Some(lease), early).unwrap().until, lease.until, "not over yet");
        assert!(polling.lease(Some(lease), lease.until).is_none() && !polling.leads());
        assert!(poll(&polling, &seen) && !polling.leads(), "it begins anew");
    }

    #[test]
    fn caller_polling_ends_when_the_leader_sleeps() {
        let polling = CallerPolling::default();
        let seen = SeenTurn::default();
        lead(&polling, &seen);
        thread::scope(|scope| {
            let other = scope.spawn(|| polling.sleeps());
            assert!(!other.join().unwrap(), "another thread sleeps");
        });
        assert!(polling.leads() && polling.sleeps());
        assert!(!polling.leads() && !polling.sleeps(), "only once");
    }
}
