//! Failures of queue pairs in a row, by which the sender decides that a path has failed.

use std::time::{Duration, Instant};

/// The failures of queue pairs since a write has last succeeded.
#[derive(Default)]
pub(super) struct FailureStreak {
    pub(super) count: u32,
    /// Times of the first one and the last one.
    pub(super) span: Option<(Instant, Instant)>,
    /// The queue pairs, one bit for each.
    queue_pairs: u8,
    /// Whether one of them has failed again since the last failover.
    pub(super) repeated: bool,
}

impl FailureStreak {
    /// A queue pair has failed. Failures longer ago than the timeout are forgotten, also if nothing
    /// was sent since.
    pub(super) fn add(&mut self, index: usize, now: Instant, timeout: Duration) {
        if !self.is_recent(now, timeout) {
            *self = Self::default();
        }
        self.repeated |= self.queue_pairs >> index & 1 == 1;
        self.queue_pairs |= 1 << index;
        self.span = Some((self.span.map_or(now, |(first, _)| first), now));
        self.count += 1;
    }

    /// The connection has another path.
    pub(super) fn on_failover(&mut self, now: Instant, timeout: Duration) {
        self.repeated = false;
        if !self.is_recent(now, timeout) {
            *self = Self::default();
        }
    }

    fn is_recent(&self, now: Instant, timeout: Duration) -> bool {
        self.span.is_some_and(|(_, last)| now.saturating_duration_since(last) < timeout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_streak_forgets_what_is_long_past() {
        let (start, timeout) = (Instant::now(), Duration::from_secs(30));
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut failures = FailureStreak::default();
        failures.add(0, at(0), timeout);
        failures.add(1, at(1), timeout);
        assert!(!failures.repeated && failures.count == 2);
        failures.add(0, at(2), timeout);
        assert!(failures.repeated && failures.span == Some((at(0), at(2))));
        failures.on_failover(at(3), timeout);
        assert!(!failures.repeated && failures.count == 3);
        failures.add(1, at(4), timeout);
        assert!(failures.repeated, "it has failed on the path before, too");
        failures.add(1, at(34), timeout);
        assert!(!failures.repeated && failures.count == 1);
        assert_eq!(failures.span, Some((at(34), at(34))));
        failures.on_failover(at(64), timeout);
        assert!(failures.count == 0 && failures.span.is_none());
    }
}
