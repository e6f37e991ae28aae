//! Bounds the number of pieces that a rank has in flight to a server.
//!
//! A piece waits at its server until every rank's part has arrived. So what a rank sends ahead of
//! the others does not finish sooner, and small operations queue behind it. As many pieces as come
//! back in [`TARGET_DELAY`] keep the links busy.

use std::time::Duration;

/// The window is the number of pieces that come back in this time.
const TARGET_DELAY: Duration = Duration::from_millis(30);
/// Minimum window: a rank sends one piece while another is reduced and a third comes back.
const MIN_WINDOW: usize = 4;
/// Weight of a piece in the moving average.
const WEIGHT: f64 = 0.25;

/// The number of pieces that may be in flight.
pub(super) struct Window {
    /// Maximum that the server takes.
    max: usize,
    /// Between `MIN_WINDOW` and `max`.
    size: f64,
}

impl Window {
    /// A window of at most `max` pieces, which begins with the maximum.
    pub(super) fn new(max: usize) -> Self {
        Self { max, size: max as f64 }
    }

    /// Number of pieces that may be in flight now.
    pub(super) fn size(&self) -> usize {
        self.size.round() as usize
    }

    /// A piece has come back after this round trip, when `in_flight` pieces were in flight, itself
    /// included.
    pub(super) fn completed(&mut self, round_trip: Duration, in_flight: usize) {
        // Pieces in flight are throughput times round trip (Little's law).
        let target =
            in_flight as f64 * TARGET_DELAY.as_secs_f64() / round_trip.as_secs_f64().max(1e-9);
        let bounded = target.max(MIN_WINDOW as f64).min(self.max as f64);
        self.size += WEIGHT * (bounded - self.size);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The window that is reached where the server returns a piece in each `interval`, and not
    /// sooner than after `latency`.
    fn converged(interval: Duration, latency: Duration) -> usize {
        let mut window = Window::new(12);
        for _ in 0..100 {
            let in_flight = window.size();
            window.completed((interval * in_flight as u32).max(latency), in_flight);
        }
        window.size()
    }

    #[test]
    fn window_is_what_comes_back_in_the_target_delay() {
        let none = Duration::ZERO;
        assert_eq!(converged(Duration::from_millis(9), none), MIN_WINDOW, "3 would do");
        assert_eq!(converged(Duration::from_millis(5), none), 6);
        assert_eq!(converged(Duration::from_micros(300), none), 12);
        assert_eq!(converged(Duration::from_micros(300), Duration::from_millis(10)), 12);
    }

    #[test]
    fn window_recovers_after_a_late_rank() {
        let mut window = Window::new(12);
        (0..12).for_each(|_| window.completed(Duration::from_secs(1), 12));
        assert_eq!(window.size(), MIN_WINDOW);
        (0..12).for_each(|_| window.completed(Duration::from_millis(2), MIN_WINDOW));
        assert_eq!(window.size(), 12);
    }

    #[test]
    fn window_stays_within_the_servers_maximum() {
        let mut window = Window::new(2);
        window.completed(Duration::from_secs(1), 2);
        assert_eq!(window.size(), 2);
        window.completed(Duration::ZERO, 1);
        assert_eq!(window.size(), 2);
    }
}
