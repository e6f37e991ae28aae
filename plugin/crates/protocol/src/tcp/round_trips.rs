//! The round trips of a connection's flows.

use std::time::Duration;

/// What a flow's round trip was longer ago than this says nothing about now.
const MEMORY: Duration = Duration::from_millis(100);

/// The smoothed round trips of a connection's flows, by slot.
///
/// Times are given as durations since any fixed moment.
#[derive(Debug, Default)]
pub struct RoundTrips {
    /// When each was noted, and what it was.
    noted: Vec<(Duration, Duration)>,
}

impl RoundTrips {
    /// Notes the round trip of the flow in this slot. Returns the shortest that was noted lately, which is this one where no
    /// other flow has had a shorter one.
    pub fn note(&mut self, now: Duration, slot: usize, round_trip: Duration) -> Duration {
        if self.noted.len() <= slot {
            self.noted.resize(slot + 1, (Duration::ZERO, Duration::MAX));
        }
        self.noted[slot] = (now, round_trip);
        let is_recent = |at: Duration| now.saturating_sub(at) <= MEMORY;
        let recent = self.noted.iter().filter(|(at, _)| is_recent(*at));
        recent.map(|(_, round_trip)| *round_trip).fold(round_trip, Duration::min)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortest_round_trip_is_that_of_any_flow_that_was_noted_lately() {
        let mut round_trips = RoundTrips::default();
        let mut note = |now, slot, round_trip| {
            let millis = Duration::from_millis;
            round_trips.note(millis(now), slot, millis(round_trip)).as_millis()
        };
        assert_eq!(note(0, 3, 20), 20);
        assert_eq!(note(0, 0, 30), 20);
        assert_eq!(note(50, 1, 5), 5);
        assert_eq!(note(100, 0, 30), 5);
        assert_eq!(note(151, 0, 30), 30, "the others have not been noted for a while");
    }
}
