//! The times of each step of a piece at the server.

use std::time::Instant;

use evenkeel_reduction::Timeline;
use evenkeel_reduction::protocol::Piece;

/// When each step of a piece began and ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PieceTimes {
    /// The header of the first part had arrived.
    pub(crate) opened: Instant,
    /// The last part had arrived.
    pub(crate) complete: Instant,
    /// The reduction began.
    pub(crate) reducing: Instant,
    /// The reduction ended.
    pub(crate) reduced: Instant,
    /// The result was known: as `reduced`, or when the upstream server had returned it.
    pub(crate) result: Instant,
}

impl PieceTimes {
    /// Of a piece that is opened now.
    pub(crate) fn opened_at(now: Instant) -> Self {
        Self { opened: now, complete: now, reducing: now, reduced: now, result: now }
    }

    /// Records a piece whose result was sent to all ranks.
    pub(crate) fn record(&self, timeline: &Timeline, piece: &Piece, sent: Instant) {
        let Self { opened, complete, reducing, reduced, result } = *self;
        timeline.record(
            piece,
            &[
                ("recv", [opened, complete]),
                ("reduce", [reducing, reduced]),
                ("upstream", [reduced, result]),
                ("send", [result, sent]),
            ],
        );
    }
}
