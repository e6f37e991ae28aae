//! What a sender knows of a flow's path.

use std::time::Duration;

/// The kernel's information about a TCP connection and its path (`TCP_INFO`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathInfo {
    /// Number of unanswered retransmissions or probes since the peer last answered. A live peer that does not read answers
    /// window probes, so it never counts as silent.
    pub unanswered: u8,
    /// Time since the last of them, or since the last data; zero if that is not known.
    pub asked: Duration,
    /// Time since the peer's host last acknowledged anything.
    pub silent: Duration,
    /// Bytes that the peer's host has acknowledged so far.
    pub acked: u64,
    /// Time with unacknowledged data and an open receive window.
    pub busy: Duration,
    /// Minimum round trip.
    pub round_trip: Duration,
    /// Smoothed round trip.
    pub usual_round_trip: Duration,
    /// Segments retransmitted so far.
    pub retransmitted: u64,
}
