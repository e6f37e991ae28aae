//! The times of each step of a piece at the server.

use std::time::Instant;

use evenkeel_reduction::Timeline;
use evenkeel_reduction::protocol::Piece;

/// The moments of a piece on its way through the server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moments {
    /// The first rank's part began to come.
    pub(crate) opened: Instant,
    /// The last part was there.
    pub(crate) complete: Instant,
    /// A thread began to reduce it.
    pub(crate) reducing: Instant,
    /// It was reduced.
    pub(crate) reduced: Instant,
    /// It was back from the servers above, if it goes there.
    pub(crate) settled: Instant,
}

/// Notes a piece that the server has sent to all.
pub(crate) fn record(timeline: &Timeline, piece: &Piece, moments: &Moments, sent: Instant) {
    let Moments { opened, complete, reducing, reduced, settled } = *moments;
    timeline.record(
        piece,
        &[
            ("recv", [opened, complete]),
            ("reduce", [reducing, reduced]),
            ("upstream", [reduced, settled]),
            ("send", [settled, sent]),
        ],
    );
}
