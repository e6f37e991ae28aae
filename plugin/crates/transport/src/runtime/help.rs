//! Decides when workers help callers that have more work than one thread can do.
//!
//! It judges by the process's own processor time. The host's load counts threads on processors that
//! this process may not use, and a sandbox may hide it.

use std::time::{Duration, Instant};

/// Length of a measurement.
const PERIOD: Duration = Duration::from_millis(20);
/// Callers are overloaded if they spend at least this share of the time on workers' work.
const OVERLOAD: f64 = 0.8;
/// Callers count as preempted if they have a processor for less than this share of the time that
/// they want one.
const ON_PROCESSOR: f64 = 0.9;
/// How long workers help before callers are measured again.
const HELP_TIME: Duration = Duration::from_millis(500);
/// How often to check, while workers help, whether they take the callers' processors.
const TRIAL: Duration = Duration::from_millis(40);
/// Time without help after a trial that took processors from callers. Doubled each time, up to the
/// limit.
const MIN_BACKOFF: Duration = Duration::from_secs(4);
const MAX_BACKOFF: Duration = Duration::from_secs(32);

/// Running totals of a process.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Totals {
    /// Time that callers spent on workers' work.
    pub(crate) worked: Duration,
    /// Number of callers' turns with events, and of those events.
    pub(crate) turns: u64,
    pub(crate) events: u64,
    /// Time in which polling callers did not sleep, and the part in which they had a processor.
    pub(crate) awake: Duration,
    pub(crate) ran: Duration,
    /// Processor time of the whole process.
    pub(crate) process: Duration,
}

/// Whether workers help.
#[derive(Debug, Default)]
pub(crate) struct Help {
    /// When the measurement began, and the totals at that time.
    since: Option<(Instant, Totals)>,
    /// Until when workers help, while they do.
    until: Option<Instant>,
    /// No help begins before this time.
    not_before: Option<Instant>,
    backoff: Duration,
}

impl Totals {
    fn since(&self, before: &Self) -> Self {
        Self {
            worked: self.worked.saturating_sub(before.worked),
            turns: self.turns.saturating_sub(before.turns),
            events: self.events.saturating_sub(before.events),
            awake: self.awake.saturating_sub(before.awake),
            ran: self.ran.saturating_sub(before.ran),
            process: self.process.saturating_sub(before.process),
        }
    }

    /// Whether callers had a processor whenever they wanted one.
    fn is_undisturbed(&self) -> bool {
        self.ran >= self.awake.mul_f64(ON_PROCESSOR)
    }
}

impl Help {
    /// Whether callers may begin to lead. They may not while workers help.
    pub(crate) fn may_lead(&mut self, now: Instant, totals: impl FnOnce() -> Totals) -> bool {
        let Some(until) = self.until else {
            self.since = None;
            return true;
        };
        if now >= until {
            self.backoff = Duration::ZERO;
            self.stop();
            return true;
        }
        let Some((since, before)) = self.since else { return false };
        if now.saturating_duration_since(since) < TRIAL {
            return false;
        }
        let totals = totals();
        self.since = Some((now, totals));
        if totals.since(&before).is_undisturbed() {
            return false;
        }
        self.backoff = (2 * self.backoff).clamp(MIN_BACKOFF, MAX_BACKOFF);
        self.not_before = Some(now + self.backoff);
        self.stop();
        true
    }

    /// Whether workers must begin to help callers that lead. They must if the callers are
    /// overloaded, there are events for several threads, and this process leaves one of its
    /// `processors` unused.
    pub(crate) fn must_begin(
        &mut self,
        now: Instant,
        totals: &Totals,
        processors: impl FnOnce() -> usize,
    ) -> bool {
        let (since, before) = *self.since.get_or_insert((now, *totals));
        let time = now.saturating_duration_since(since);
        if time < PERIOD {
            return false;
        }
        self.since = Some((now, *totals));
        let done = totals.since(&before);
        let must_begin = done.worked > time.mul_f64(OVERLOAD)
            && done.events >= 2 * done.turns
            && done.is_undisturbed()
            && self.not_before.is_none_or(|time| now >= time)
            && done.process + time <= time * processors() as u32;
        if must_begin {
            self.until = Some(now + HELP_TIME);
        }
        must_begin
    }

    fn stop(&mut self) {
        (self.until, self.since) = (None, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_millis(5);

    /// What a process does in each unit of time, all in shares of it.
    #[derive(Clone, Copy)]
    struct Load {
        /// A caller's work.
        worked: f64,
        /// A caller's processor, while it leads and while workers help.
        ran: [f64; 2],
        /// The other threads' processors.
        others: f64,
        events: u64,
    }

    const BUSY: Load = Load { worked: 0.95, ran: [1.0, 1.0], others: 0.0, events: 3 };

    /// The share of this time in which workers help.
    fn helped(load: Load, processors: usize, length: Duration) -> f64 {
        let (mut help, mut totals) = (Help::default(), Totals::default());
        let begin = Instant::now();
        let (mut is_on, mut on) = (false, 0);
        let steps = (length.as_millis() / STEP.as_millis()) as u32;
        for step in 0..steps {
            let now = begin + step * STEP;
            if is_on {
                is_on = !help.may_lead(now, || totals);
            } else {
                is_on = help.must_begin(now, &totals, || processors);
            }
            let ran = load.ran[usize::from(is_on)];
            totals.worked += STEP.mul_f64(load.worked);
            totals.turns += 1;
            totals.events += load.events;
            totals.awake += STEP;
            totals.ran += STEP.mul_f64(ran);
            totals.process += STEP.mul_f64(ran + load.others);
            on += u32::from(is_on);
        }
        f64::from(on) / f64::from(steps)
    }

    #[test]
    fn workers_help_an_overloaded_caller_on_processors_that_the_process_leaves_unused() {
        const LENGTH: Duration = Duration::from_secs(10);
        for (load, processors) in [
            (BUSY, 2),
            (Load { others: 6.9, ..BUSY }, 9),
            // Others of the host are busy elsewhere.
            (BUSY, 16),
        ] {
            let share = helped(load, processors, LENGTH);
            assert!(share > 0.9, "{share} of the time on {processors}");
        }
        for (why, load, processors) in [
            ("the only processor", BUSY, 1),
            ("all processors are in use", Load { others: 0.5, ..BUSY }, 2),
            ("little to do", Load { worked: 0.5, ..BUSY }, 16),
            ("one event at a time", Load { events: 1, ..BUSY }, 16),
            ("others keep the caller off", Load { ran: [0.7, 0.7], ..BUSY }, 16),
        ] {
            assert_eq!(helped(load, processors, LENGTH), 0.0, "{why}");
        }
    }

    /// Other processes use the processors that this one leaves unused.
    #[test]
    fn help_that_takes_processors_from_callers_is_seldom_tried() {
        let share = helped(Load { ran: [1.0, 0.6], ..BUSY }, 2, Duration::from_secs(60));
        assert!(share > 0.0 && share < 0.01, "{share} of the time");
    }
}
