//! Decides which threads run the workers' turns: the workers, or callers that poll so often that waking a worker would only
//! take the processor from them.
//!
//! A caller that polls runs a turn: it takes the events of all sockets at once and calls their sources. While callers lead,
//! the workers do not wait for events, and look from time to time whether callers still poll. Where the callers have more to
//! do than one thread can, and the host has idle processors, the workers do their part again.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use crate::sys;

/// Number of turns in a row before callers lead, and the time that they take at least.
const MIN_TURNS: u32 = 32;
const MIN_TIME: Duration = Duration::from_micros(100);
/// Maximum time between two turns in a row.
pub(crate) const MAX_PAUSE: Duration = Duration::from_millis(1);
/// After this time workers look whether callers still poll. A caller that other processes keep off its processor comes back
/// within a few milliseconds; one that sleeps gives the turns back at once.
const MIN_LEASE: Duration = Duration::from_millis(4);
/// The longest lease, after callers have kept polling.
const MAX_LEASE: Duration = Duration::from_millis(8);
/// Over how long the load of callers is measured.
const LOAD_PERIOD: Duration = Duration::from_millis(20);
/// Load from which on workers help, if events come for several sockets at once.
const OVERLOAD: f64 = 0.8;
/// How long workers help. Then the callers' load is measured again.
const HELP_TIME: Duration = Duration::from_millis(500);

thread_local! {
    /// Its address identifies the thread.
    static THREAD: u8 = const { 0 };
}

fn this_thread() -> usize {
    THREAD.with(|thread| std::ptr::from_ref(thread).addr())
}

/// The polls of all callers of a process.
#[derive(Debug, Default)]
pub(crate) struct CallerPolling {
    leads: AtomicBool,
    /// The thread that ran the last turn.
    leader: AtomicUsize,
    /// Number of polls, or less if several callers poll.
    polls: AtomicU64,
    /// Number of the last turn.
    turn: AtomicU64,
    streak: Mutex<Option<Streak>>,
    /// Nanoseconds in which callers did work of workers.
    worked: AtomicU64,
    /// Number of turns with events, and of their events.
    events: [AtomicU64; 2],
    load: Mutex<Load>,
}

/// The load of callers.
#[derive(Debug, Default)]
struct Load {
    /// The beginning of the period, and the counters at that time.
    since: Option<(Instant, [u64; 3])>,
    /// Callers do not lead before this time.
    helped_until: Option<Instant>,
}

/// A worker leaves the turns to callers for a time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lease {
    time: Duration,
    pub(crate) until: Instant,
    /// Number of polls when it began.
    polls: u64,
}

/// Turns in a row.
#[derive(Debug)]
pub(crate) struct Streak {
    began: Instant,
    last: Instant,
    turns: u32,
}

/// The last turn that a connection knows of.
#[derive(Debug, Default)]
pub(crate) struct SeenTurn(AtomicU64);

/// What a caller is to do.
pub(crate) enum Turn<'a> {
    /// Nothing: all events up to now were taken since the connection was last asked, or another caller is taking them.
    Skip,
    /// Run a turn, and keep this until it is over.
    Run {
        streak: MutexGuard<'a, Option<Streak>>,
        /// From now on callers lead. The workers have to be told.
        begins: bool,
    },
}

impl CallerPolling {
    /// Whether callers run the turns.
    pub(crate) fn leads(&self) -> bool {
        self.leads.load(Ordering::Relaxed)
    }

    /// A caller asks a connection for progress. A caller that asks many connections needs one turn for all of them: it is
    /// due when it asks a connection for the second time.
    pub(crate) fn poll(&self, seen: &SeenTurn) -> Turn<'_> {
        let polls = self.polls.load(Ordering::Relaxed);
        // An update that is lost between threads does no harm.
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

    /// A caller is about to sleep. Returns whether it led, and the workers have to be told that they run the turns.
    pub(crate) fn sleeps(&self) -> bool {
        let led = self.leads() && self.leader.load(Ordering::Relaxed) == this_thread();
        led && self.end()
    }

    /// A worker looks whether callers have polled during its last lease, once that is over. Returns the present one, or none
    /// if the worker runs its turns from now on.
    pub(crate) fn lease(&self, before: Option<Lease>, now: Instant) -> Option<Lease> {
        if !self.leads() {
            return None;
        }
        let polls = self.polls.load(Ordering::Relaxed);
        let next = |time: Duration| Some(Lease { time, until: now + time, polls });
        let Some(before) = before else { return next(MIN_LEASE) };
        if now < before.until {
            // It woke up for a timer.
            return Some(before);
        }
        // A turn may take longer than the lease.
        let poll = before.polls != polls || try_lock(&self.streak).is_none();
        if !poll || self.need_help() {
            self.end();
            return None;
        }
        next((2 * before.time).min(MAX_LEASE))
    }

    /// Nanoseconds in which callers did work of workers.
    pub(crate) fn worked(&self) -> u64 {
        self.worked.load(Ordering::Relaxed)
    }

    /// Adds time that a caller has spent on work of workers.
    pub(crate) fn add_work(&self, time: Duration) {
        self.worked.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// A caller has run a turn with this many events.
    pub(crate) fn add_turn(&self, events: usize) {
        self.events[0].fetch_add(1, Ordering::Relaxed);
        self.events[1].fetch_add(events as u64, Ordering::Relaxed);
    }

    fn may_lead(&self, now: Instant) -> bool {
        let Some(mut load) = try_lock(&self.load) else { return false };
        load.since = None;
        load.helped_until.is_none_or(|until| now >= until)
    }

    /// Whether the callers have more to do than one thread can, and other processors are idle.
    fn need_help(&self) -> bool {
        let Some(mut load) = try_lock(&self.load) else { return false };
        let now = Instant::now();
        let [turns, events] = [0, 1].map(|index| self.events[index].load(Ordering::Relaxed));
        let counters = [self.worked(), turns, events];
        let (since, before) = *load.since.get_or_insert((now, counters));
        let time = now.duration_since(since);
        if time < LOAD_PERIOD {
            return false;
        }
        load.since = Some((now, counters));
        let [worked, turns, events] = [0, 1, 2].map(|index| counters[index] - before[index]);
        let is_overloaded = worked as f64 > time.as_nanos() as f64 * OVERLOAD;
        let need_help = is_overloaded && events >= 2 * turns && sys::has_idle_processor();
        if need_help {
            load.helped_until = Some(now + HELP_TIME);
        }
        need_help
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
        // Each worker sees the polls, not only the first one that looks.
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
