//! Decides whether flows are paced that are alone in their connections.
//!
//! Pacing leaves bytes to flows that deliver them earlier. A flow without others has none to leave them to, and pacing cuts its
//! messages into more system calls. But where many hosts send to one (incast), messages that are written at once overrun the
//! queue in front of it, and all wait for what is lost. Whose bursts did that cannot be told from one flow's path, so the
//! decision is one for all connections of a process.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// They are paced for this time, counted from the first sample: the first messages show how the network is.
const AT_FIRST: Duration = Duration::from_millis(250);
/// How long they are paced after a path was congested.
const MEMORY: Duration = Duration::from_secs(300);

/// Whether flows that are alone in their connections are paced.
pub(crate) struct LonePacing {
    epoch: Instant,
    /// Milliseconds since the epoch; `NOT_YET` before the first sample.
    until: AtomicU64,
}

const NOT_YET: u64 = u64::MAX;

impl Default for LonePacing {
    fn default() -> Self {
        Self { epoch: Instant::now(), until: AtomicU64::new(NOT_YET) }
    }
}

impl LonePacing {
    /// Whether they are paced now.
    pub(crate) fn is_on(&self, now: Instant) -> bool {
        self.millis(now) < self.until.load(Ordering::Relaxed)
    }

    /// A flow was sampled: whether its path was congested.
    pub(crate) fn sampled(&self, now: Instant, is_congested: bool) {
        if is_congested {
            self.until.store(self.millis(now + MEMORY), Ordering::Relaxed);
        } else {
            // Fails where another flow was sampled before.
            let first = self.millis(now + AT_FIRST);
            let _ =
                self.until.compare_exchange(NOT_YET, first, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    fn millis(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.epoch).as_millis() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A flow is sampled each second from second 10 on, and its path is congested in some of them. Returns the first second in which
    /// it is not paced, after each of these.
    fn unpaced_from(congested: &[u64]) -> Vec<u64> {
        let pacing = LonePacing::default();
        let at = |second| pacing.epoch + Duration::from_secs(second);
        assert!(pacing.is_on(at(9)));
        let mut was_on = true;
        let mut ends = vec![];
        for second in 10..1000 {
            let is_on = pacing.is_on(at(second));
            if was_on && !is_on {
                ends.push(second);
            }
            was_on = is_on;
            pacing.sampled(at(second), congested.contains(&second));
        }
        ends
    }

    #[test]
    fn lone_flows_are_paced_until_no_path_was_congested_for_a_while() {
        assert_eq!(unpaced_from(&[]), [11]);
        assert_eq!(unpaced_from(&[10]), [310]);
        assert_eq!(unpaced_from(&[20, 200]), [11, 500]);
        assert_eq!(unpaced_from(&[20, 500]), [11, 320, 800]);
    }
}
