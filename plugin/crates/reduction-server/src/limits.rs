//! The server's limits, and how much memory a communicator needs.

use std::time::Duration;

use evenkeel_reduction::protocol::MESSAGE_BYTES;

/// Maximum number of open pieces of a communicator: two messages each, on a connection that takes
/// 32.
pub(crate) const MAX_OPEN_PIECES: usize = 12;
/// Default size of a piece, in bytes. With smaller pieces results begin to flow sooner; larger ones
/// cost less per byte.
pub const PIECE_BYTES: u64 = 256 << 10;
/// Minimum size that pieces may be limited to, in bytes. It is larger than a payload in the same
/// message as its header.
pub const MIN_PIECE_BYTES: u64 = 16 << 10;
/// The size of pieces is chosen so that one piece of each of this many communicators fits into
/// memory.
const TARGET_COMMUNICATORS: u64 = 128;
/// Maximum size of a connection's retransmit buffer: small messages that the rank has not
/// acknowledged.
pub(crate) const RETRANSMIT_BYTES: usize = 32 << 10;
/// How long a communicator is kept that failed, so that its ranks and upstream servers receive the
/// reason, or that all who had joined have left, so that the others learn that they have.
pub(crate) const ENDED_RETENTION: Duration = Duration::from_secs(10);
/// How long a server that ends waits for its upstream servers to read that, and how often it looks.
pub(crate) const END_REPORT_TIMEOUT: Duration = Duration::from_secs(1);
pub(crate) const END_REPORT_POLL: Duration = Duration::from_millis(1);
/// Maximum growth of a piece on its way upstream: fp8 travels as float32.
const MAX_WIDENING: u64 = 4;

/// The size of a communicator's pieces, at most `max`: a multiple of 128 bytes.
pub(crate) fn piece_bytes(memory: u64, max: u64, ranks: u32) -> u64 {
    let fair = memory / TARGET_COMMUNICATORS / u64::from(ranks);
    fair.min(max).max(MIN_PIECE_BYTES) / 128 * 128
}

/// The memory of a piece's slot, where sums go to this number of upstream servers.
pub(crate) fn slot_bytes(piece_bytes: u64, ranks: u32, upstream_servers: usize) -> u64 {
    // The sum that is sent, and the result that comes back.
    let upstream = if upstream_servers > 0 { 2 * MAX_WIDENING * piece_bytes } else { 0 };
    piece_bytes * u64::from(ranks) + upstream + MESSAGE_BYTES as u64
}

/// The memory that a communicator has for as long as it exists: messages and retransmit buffers of
/// the connections with ranks and upstream servers, and one slot.
pub(crate) fn communicator_bytes(piece_bytes: u64, ranks: u32, upstream_servers: usize) -> u64 {
    let ranks_bytes = u64::from(ranks) * (MESSAGE_BYTES + RETRANSMIT_BYTES) as u64;
    // For each open piece, its header and that of the result.
    let upstream_bytes =
        upstream_servers * (2 * MAX_OPEN_PIECES * MESSAGE_BYTES + RETRANSMIT_BYTES);
    slot_bytes(piece_bytes, ranks, upstream_servers) + ranks_bytes + upstream_bytes as u64
}
