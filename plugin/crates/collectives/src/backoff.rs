//! Delays between attempts. They are random in part, so that the ranks of a group do not try again at the same moments.

use std::thread;
use std::time::{Duration, Instant};

/// The longest delay between polls.
const MAX_POLL_DELAY: Duration = Duration::from_millis(50);

/// Exponential backoff between polls, up to a deadline.
pub(crate) struct Backoff {
    deadline: Instant,
    delay: Duration,
}

impl Backoff {
    pub(crate) fn until(deadline: Instant) -> Self {
        Self { deadline, delay: Duration::from_millis(1) }
    }

    /// The time until the deadline.
    pub(crate) fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Waits before the next poll. Returns false once the deadline has passed.
    pub(crate) fn wait(&mut self) -> bool {
        let left = self.left();
        thread::sleep(jittered(self.delay).min(left));
        self.delay = (self.delay * 3 / 2).min(MAX_POLL_DELAY);
        !left.is_zero()
    }
}

/// A random time between half of a delay and all of it.
pub(crate) fn jittered(delay: Duration) -> Duration {
    // Without random numbers, the delay as it is.
    let random = evenkeel_transport::random().map_or(u32::MAX, u32::from_le_bytes);
    delay.mul_f64(0.5 + 0.5 * f64::from(random) / f64::from(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jittered_delays_differ_and_stay_within_bounds() {
        let delay = Duration::from_millis(100);
        let all: Vec<_> = (0..1000).map(|_| jittered(delay)).collect();
        assert!(all.iter().all(|each| *each >= delay / 2 && *each <= delay));
        let early = all.iter().filter(|each| **each < delay * 3 / 4).count();
        assert!((300..700).contains(&early), "{early}");
    }
}
