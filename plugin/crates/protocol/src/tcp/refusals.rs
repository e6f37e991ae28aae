//! Decides whether refused dials mean that the peer's process is gone.

use std::time::Duration;

/// Refusals count as final after this time. What resets flows, such as a firewall that is being changed, often refuses new ones
/// for a second or two.
const MIN_TIME: Duration = Duration::from_secs(2);

/// The dials that were refused since anything else was known of the peer's process.
///
/// Times are given as durations since any fixed moment.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    /// When the first was refused.
    since: Option<Duration>,
    /// The addresses that have refused.
    addresses: Vec<usize>,
}

impl Refusals {
    /// A dial to one of the peer's addresses, of which there are so many, was refused. Returns whether that is final: each has
    /// refused, and refusals have repeated for a while.
    pub(crate) fn refused(&mut self, now: Duration, address: usize, addresses: usize) -> bool {
        if !self.addresses.contains(&address) {
            self.addresses.push(address);
        }
        let since = *self.since.get_or_insert(now);
        now.saturating_sub(since) >= MIN_TIME && self.addresses.len() >= addresses
    }

    /// The peer's process is there.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// When refusals are final: of these addresses of two, each after so many milliseconds.
    fn is_final(refusals: &[(u64, usize)]) -> Vec<bool> {
        let mut all = Refusals::default();
        let refused = |(millis, address): &(u64, usize)| {
            all.refused(Duration::from_millis(*millis), *address, 2)
        };
        refusals.iter().map(refused).collect()
    }

    #[test]
    fn refusals_are_final_once_they_repeat_over_all_addresses() {
        for (refusals, expected) in [
            (&[(0, 0), (10, 1)][..], &[false, false][..]),
            (&[(0, 0), (1999, 1), (2000, 0)], &[false, false, true]),
            (&[(500, 0), (2000, 1), (2500, 1)], &[false, false, true]),
            (&[(0, 0), (5000, 0), (9000, 0)], &[false, false, false]),
            (&[(0, 0), (5000, 0), (9000, 1)], &[false, false, true]),
        ] {
            assert_eq!(is_final(refusals), expected, "{refusals:?}");
        }
    }

    #[test]
    fn refusals_are_forgotten_when_the_peer_is_there() {
        let mut refusals = Refusals::default();
        assert!(!refusals.refused(Duration::ZERO, 0, 1));
        refusals.clear();
        assert!(!refusals.refused(Duration::from_secs(9), 0, 1));
        assert!(refusals.refused(Duration::from_secs(11), 0, 1));
    }
}
