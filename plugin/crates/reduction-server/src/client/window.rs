//! How many pieces a rank has on their way to a server.
//!
//! A piece waits at its server until every rank's part is there, so that whatever a rank sends ahead of the others only
//! lies there, and small operations wait behind it. What comes back in [`ENOUGH`] keeps the links busy.

use std::time::Duration;

/// As many pieces are on their way as come back in this time.
const ENOUGH: Duration = Duration::from_millis(30);
/// There may always be so many: of one, a rank sends while the server reduces another and a third comes back.
const LEAST: usize = 4;
/// Weight of a piece in the average.
const WEIGHT: f64 = 0.25;

/// Bounds the pieces on their way.
pub(super) struct Window {
    /// Most that the server takes.
    most: usize,
    /// Pieces, between `LEAST` and `most`.
    size: f64,
}

impl Window {
    /// Of at most so many pieces, and all of them at first.
    pub(super) fn new(most: usize) -> Self {
        Self { most, size: most as f64 }
    }

    /// Pieces that may be on their way now.
    pub(super) fn size(&self) -> usize {
        self.size.round() as usize
    }

    /// A piece has come back after so long. So many were on their way, itself included.
    pub(super) fn back(&mut self, took: Duration, flying: usize) {
        // As many come back in a time as are on their way (Little's law).
        let enough = flying as f64 * ENOUGH.as_secs_f64() / took.as_secs_f64().max(1e-9);
        let bounded = enough.max(LEAST as f64).min(self.most as f64);
        self.size += WEIGHT * (bounded - self.size);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the window becomes where the server gives back a piece in each such time, and not sooner than after `latency`.
    fn settled(each: Duration, latency: Duration) -> usize {
        let mut window = Window::new(12);
        for _ in 0..100 {
            let flying = window.size();
            window.back((each * flying as u32).max(latency), flying);
        }
        window.size()
    }

    #[test]
    fn as_many_are_on_their_way_as_come_back_in_a_while() {
        let none = Duration::ZERO;
        assert_eq!(settled(Duration::from_millis(9), none), LEAST, "3 would do");
        assert_eq!(settled(Duration::from_millis(5), none), 6);
        assert_eq!(settled(Duration::from_micros(300), none), 12);
        assert_eq!(settled(Duration::from_micros(300), Duration::from_millis(10)), 12);
    }

    #[test]
    fn a_rank_that_is_late_once_is_soon_forgotten() {
        let mut window = Window::new(12);
        (0..12).for_each(|_| window.back(Duration::from_secs(1), 12));
        assert_eq!(window.size(), LEAST);
        (0..12).for_each(|_| window.back(Duration::from_millis(2), LEAST));
        assert_eq!(window.size(), 12);
    }

    #[test]
    fn it_stays_below_what_the_server_takes() {
        let mut window = Window::new(2);
        window.back(Duration::from_secs(1), 2);
        assert_eq!(window.size(), 2);
        window.back(Duration::ZERO, 1);
        assert_eq!(window.size(), 2);
    }
}
