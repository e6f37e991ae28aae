//! Limits segments where a path passes small packets only.

use std::time::Duration;

/// The limits in bytes, one after the other: for tunnels over Ethernet, for IPv6's minimum MTU (RFC 8200), and what every host
/// takes (RFC 9293, 3.7.1).
const LIMITS: [u32; 3] = [1400, 1220, 536];
/// Consecutive flows that open and deliver nothing, before the next limit is tried.
const MIN_FAILURES: u32 = 2;

/// The limit on the segments of a connection's flows.
///
/// Where hosts send longer packets than some link between them takes, and do not get its answer that says so, a flow opens and
/// delivers nothing: the packets of a handshake are small. Flows whose segments are short enough deliver. Where nothing passes
/// at all, flows that were open before deliver nothing either, but no further one opens. So only those are judged.
///
/// Times are given as durations since any fixed moment.
#[derive(Debug, Default)]
pub(crate) struct SegmentLimit {
    /// Number of limits that were set.
    step: usize,
    /// Flows with the present limit that delivered nothing.
    failures: u32,
    /// Number of the first flow with the present limit that was opened after others had failed.
    first: u32,
    /// Since when flows have delivered nothing.
    since: Option<Duration>,
}

impl SegmentLimit {
    /// Maximum bytes of a segment's payload (`TCP_MAXSEG`) of flows that are opened now. `None`: what the hosts agree on.
    pub(crate) fn bytes(&self) -> Option<u32> {
        self.step.checked_sub(1).map(|last| LIMITS[last])
    }

    /// The flow with this number has failed, and has delivered something or not. `next`: the number of the next flow. Returns
    /// whether there is another limit from now on.
    pub(crate) fn flow_failed(
        &mut self,
        now: Duration,
        number: u32,
        next: u32,
        has_delivered: bool,
    ) -> bool {
        if has_delivered {
            (self.failures, self.since) = (0, None);
            return false;
        }
        if self.since.is_none() {
            (self.since, self.first) = (Some(now), next);
        }
        if number < self.first {
            return false;
        }
        self.failures += 1;
        if self.failures < MIN_FAILURES || self.step == LIMITS.len() {
            return false;
        }
        (self.step, self.failures, self.first) = (self.step + 1, 0, next);
        true
    }

    /// Since when flows have delivered nothing, if the shortest segments made no difference.
    pub(crate) fn fails_since(&self) -> Option<Duration> {
        let is_last = self.step == LIMITS.len() && self.failures >= MIN_FAILURES;
        self.since.filter(|_| is_last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Flows fail one after the other, and each has delivered something or not. Returns the limits after each.
    fn limits(delivered: &[bool]) -> Vec<Option<u32>> {
        let mut limit = SegmentLimit::default();
        let fail = |(number, has_delivered): (usize, &bool)| {
            let number = number as u32;
            let before = limit.bytes();
            let is_new = limit.flow_failed(Duration::ZERO, number, number + 1, *has_delivered);
            assert_eq!(is_new, limit.bytes() != before);
            limit.bytes()
        };
        delivered.iter().enumerate().map(fail).collect()
    }

    #[test]
    fn segments_get_shorter_while_flows_deliver_nothing() {
        let (one, two, three) = (Some(1400), Some(1220), Some(536));
        for (delivered, expected) in [
            (&[false; 8][..], &[None, None, one, one, two, two, three, three][..]),
            (&[false, true, false, false, false], &[None, None, None, None, one]),
            (&[true; 4], &[None; 4]),
        ] {
            assert_eq!(limits(delivered), expected, "{delivered:?}");
        }
    }

    #[test]
    fn segments_are_not_judged_by_flows_with_longer_ones() {
        let mut limit = SegmentLimit::default();
        let mut fails = |number, next| limit.flow_failed(Duration::ZERO, number, next, false);
        assert!(!fails(0, 1) && !fails(1, 4) && fails(2, 4), "two that were opened later");
        assert!(!fails(3, 6), "it was opened before the limit was set");
        assert!(!fails(4, 6) && fails(5, 6));
    }

    /// Nothing passes for a while.
    #[test]
    fn segments_stay_where_only_flows_fail_that_were_open_before() {
        let mut limit = SegmentLimit::default();
        for number in 0..6 {
            assert!(!limit.flow_failed(Duration::ZERO, number, 6, false), "{number}");
        }
        assert_eq!(limit.bytes(), None);
    }

    #[test]
    fn segments_fail_where_the_shortest_make_no_difference() {
        let mut limit = SegmentLimit::default();
        let second = Duration::from_secs(1);
        for number in 0..9 {
            assert_eq!(limit.fails_since(), None);
            limit.flow_failed(second * (number + 1), number, number + 1, false);
        }
        assert_eq!(limit.fails_since(), Some(second));
        limit.flow_failed(second * 10, 9, 10, true);
        assert_eq!(limit.fails_since(), None);
    }
}
