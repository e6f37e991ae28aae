//! Decides how long a worker sleeps, and whether a new timer must wake it.

use std::time::{Duration, Instant};

use super::timers::Timers;

/// The timers of a worker's sources, and the worker's sleep.
#[derive(Debug, Default)]
pub(crate) struct Alarms {
    timers: Timers<Instant>,
    /// The prompt ones among them.
    prompt: Timers<Instant>,
    sleep: Sleep,
}

/// Which thread fires a timer while callers take events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Timer {
    /// The worker, unless a caller does so first.
    Prompt,
    /// Callers. If they stop polling, the timer waits until the worker's lease ends.
    ByCallers,
}

#[derive(Clone, Copy, Debug, Default)]
enum Sleep {
    /// Awake. The worker checks the timers before it sleeps.
    #[default]
    Awake,
    /// Asleep until this time or the next event.
    ForEvents { until: Option<Instant> },
    /// Asleep until this time while callers take events. A prompt timer may be late by `slack`.
    AsReserve { until: Instant, slack: Duration },
}

impl Alarms {
    /// Sets the timer of this token and replaces its former one. Returns whether the worker would
    /// sleep for too long and must be woken.
    #[must_use]
    pub(crate) fn set(&mut self, token: u64, at: Instant, timer: Timer) -> bool {
        self.timers.set(token, at);
        match timer {
            Timer::Prompt => self.prompt.set(token, at),
            Timer::ByCallers => self.prompt.cancel(token),
        }
        let is_too_long = match self.sleep {
            Sleep::Awake => false,
            Sleep::ForEvents { until } => until.is_none_or(|until| at < until),
            Sleep::AsReserve { until, slack } => timer == Timer::Prompt && at + slack < until,
        };
        if is_too_long {
            // One wake-up is enough, whatever else is set meanwhile.
            self.sleep = Sleep::Awake;
        }
        is_too_long
    }

    /// Removes the timer of this token, if there is one.
    pub(crate) fn cancel(&mut self, token: u64) {
        self.timers.cancel(token);
        self.prompt.cancel(token);
    }

    /// Removes a timer that is due. Returns its token.
    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<u64> {
        let token = self.timers.pop_due(now)?;
        self.prompt.cancel(token);
        Some(token)
    }

    /// Notes that the worker is about to wait for events, no longer than until `limit` if there is
    /// one. Returns the time to sleep until.
    pub(crate) fn sleep(&mut self, limit: Option<Instant>) -> Option<Instant> {
        let at = limit.into_iter().chain(self.timers.next()).min();
        self.sleep = Sleep::ForEvents { until: at };
        at
    }

    /// Notes that the worker is about to sleep, no longer than until `limit`, while callers take
    /// events and fire timers. The worker fires the prompt timers that they miss. Those may be late
    /// by `slack`, so that it need not wake up for each one. Returns the time to sleep until.
    pub(crate) fn sleep_as_reserve(
        &mut self,
        now: Instant,
        limit: Instant,
        slack: Duration,
    ) -> Instant {
        let next = self.prompt.next().map(|next| next.max(now + slack));
        let until = next.map_or(limit, |next| next.min(limit));
        self.sleep = Sleep::AsReserve { until, slack };
        until
    }

    /// Notes that the worker is awake.
    pub(crate) fn wake(&mut self) {
        self.sleep = Sleep::Awake;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLACK: Duration = Duration::from_millis(1);

    /// This many tenths of a millisecond after `begin`.
    fn after(begin: Instant, tenths: u32) -> Instant {
        begin + Duration::from_micros(100) * tenths
    }

    #[test]
    fn worker_sleeps_until_the_next_timer_or_its_limit() {
        let begin = Instant::now();
        // Timers, the limit, and until when it sleeps.
        for (timers, limit, until) in [
            (&[][..], None, None),
            (&[], Some(40), Some(40)),
            (&[70, 30], None, Some(30)),
            (&[70, 30], Some(40), Some(30)),
            (&[70], Some(40), Some(40)),
        ] {
            let mut alarms = Alarms::default();
            for (token, at) in timers.iter().enumerate() {
                assert!(
                    !alarms.set(token as u64, after(begin, *at), Timer::ByCallers),
                    "it is awake"
                );
            }
            let at = |tenths| after(begin, tenths);
            assert_eq!(alarms.sleep(limit.map(at)), until.map(at), "{timers:?} {limit:?}");
        }
    }

    #[test]
    fn worker_leaves_timers_to_callers_for_a_while() {
        let begin = Instant::now();
        for (timer, until) in [(None, 80), (Some(90), 80), (Some(25), 25), (Some(3), 10)] {
            let mut alarms = Alarms::default();
            if let Some(timer) = timer {
                assert!(!alarms.set(1, after(begin, timer), Timer::Prompt), "it is awake");
                assert!(!alarms.set(2, begin, Timer::ByCallers), "it is awake");
            }
            let at = alarms.sleep_as_reserve(begin, after(begin, 80), SLACK);
            assert_eq!(at, after(begin, until), "{timer:?}");
            assert!(!alarms.set(3, begin, Timer::ByCallers), "callers fire it");
        }
    }

    #[test]
    fn timer_that_fired_or_is_set_anew_is_no_longer_prompt() {
        let begin = Instant::now();
        let end: [fn(&mut Alarms, Instant); 3] = [
            |alarms, begin| assert_eq!(alarms.pop_due(begin), Some(1)),
            |alarms, _| alarms.cancel(1),
            |alarms, begin| assert!(!alarms.set(1, begin, Timer::ByCallers), "it is awake"),
        ];
        for end in end {
            let mut alarms = Alarms::default();
            assert!(!alarms.set(1, begin, Timer::Prompt), "it is awake");
            end(&mut alarms, begin);
            let limit = after(begin, 80);
            assert_eq!(alarms.sleep_as_reserve(begin, limit, SLACK), limit);
        }
    }

    #[test]
    fn timer_wakes_a_worker_that_would_be_late() {
        let begin = Instant::now();
        for (slack, timer, wakes) in [
            (Duration::ZERO, 29, true),
            (Duration::ZERO, 30, false),
            (SLACK, 19, true),
            (SLACK, 20, false),
        ] {
            let mut alarms = Alarms::default();
            match slack {
                Duration::ZERO => assert!(alarms.sleep(Some(after(begin, 30))).is_some()),
                _ => assert_eq!(
                    alarms.sleep_as_reserve(begin, after(begin, 30), slack),
                    after(begin, 30)
                ),
            }
            assert_eq!(
                alarms.set(1, after(begin, timer), Timer::Prompt),
                wakes,
                "{slack:?} {timer}"
            );
            assert!(!wakes || !alarms.set(2, begin, Timer::Prompt), "it is woken once");
        }
        let mut alarms = Alarms::default();
        assert_eq!(alarms.sleep(None), None);
        assert!(alarms.set(1, begin, Timer::ByCallers));
        alarms.sleep(None);
        alarms.wake();
        assert!(!alarms.set(1, begin, Timer::Prompt), "it is awake");
    }
}
