//! The RDMA engine: connections whose messages go from memory to memory by verbs.
//!
//! A connection has a few *lanes*, each a pair of connected queue pairs, and one TCP connection, the *lifeline*: it was
//! opened and authenticated as a flow is, the peers agree on queue pairs there, and its end tells that the peer is gone.
//!
//! The receiver writes a *credit* into the sender's memory for each buffer that is posted: where it is, its key, its
//! length. The sender cuts the message into parts; the lane with the least on its way takes the next part, and writes it
//! where it belongs together with a number that says which part it is. The receiver counts the parts
//! ([`evenkeel_protocol::Arrivals`]), so lanes need no order among each other. Messages of a few KiB do not wait for a credit:
//! they go to a ring in the receiver's memory and are copied from there.
//!
//! Where messages may be in memory that the processor cannot reach ([`MemoryTypes`]), all wait for credits and nothing is copied.
//!
//! When a queue pair fails, both sides stop theirs; the receiver tells which parts it has, and the sender sends the others
//! again by other lanes, while the lane gets new queue pairs.

mod adapter;
mod control;
mod endpoint;
mod events;
mod failover;
mod flush;
mod memlock;
mod memory_types;
mod mr_cache;
mod queue_pairs;
mod receiver;
mod region_cache;
mod sender;
#[cfg(test)]
mod tests;

pub(crate) use adapter::{Adapter, DiscoveredPort, PortDiscovery};
pub(crate) use failover::FailoverCandidate;
pub use memory_types::MemoryTypes;
pub use mr_cache::{MrCache, MrHandle};
pub(crate) use receiver::Receiver;
pub(crate) use sender::Sender;

use std::time::Duration;

use evenkeel_protocol::ArrivalError;

use crate::error::{Error, ErrorKind, TooLong};

/// Longest message that goes to the receiver's ring, in bytes.
pub(crate) const EAGER_BYTES: usize = 4096;
/// How long a failed queue pair may take to tell of all its work.
const DRAIN: Duration = Duration::from_millis(500);
/// Marks a number as that of the messages that have left the ring.
const ROOM: u32 = 1 << 31;

/// Hears whether a connection could be opened.
pub(crate) type Opened = Box<dyn FnOnce(Result<(), Error>) + Send>;

/// Calls `with` with room for a small message. Most are short, and to clear room for the longest costs more than to copy them.
fn with_room<T>(length: usize, with: impl FnOnce(&mut [u8]) -> T) -> T {
    const SHORT: usize = 256;
    if length <= SHORT {
        with(&mut [0; SHORT][..length])
    } else {
        with(&mut [0; EAGER_BYTES][..length])
    }
}

/// Why a connection cannot go on.
pub(crate) struct ConnectionError(ErrorKind, String);

impl From<Error> for ConnectionError {
    fn from(error: Error) -> Self {
        Self(error.kind(), error.to_string())
    }
}

impl From<TooLong> for ConnectionError {
    fn from(TooLong { length, capacity, .. }: TooLong) -> Self {
        ArrivalError::TooLong { length, capacity }.into()
    }
}

impl From<ArrivalError> for ConnectionError {
    fn from(error: ArrivalError) -> Self {
        let kind = match error {
            ArrivalError::TooLong { .. } => ErrorKind::Truncated,
            ArrivalError::NotPosted | ArrivalError::BeyondLast => ErrorKind::Remote,
        };
        Self(kind, error.to_string())
    }
}
