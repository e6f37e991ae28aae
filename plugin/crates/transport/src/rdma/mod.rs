//! RDMA: connections whose messages are written from memory to memory through verbs.
//!
//! A connection has a few queue pairs ([`queue_pairs`]) and one TCP connection, the control
//! connection ([`control`]). The control connection is opened and authenticated as a TCP flow is.
//! The two ends agree there on queue pairs, and its end shows that the peer is gone.
//!
//! For each posted buffer the receiver writes a credit into the sender's memory: address, key and
//! length of the buffer ([`credit`]; NCCL calls it CTS). The sender cuts the message into parts.
//! Each part goes to the queue pair with the fewest bytes in flight, and is written into the buffer
//! together with immediate data that says which part it is. The receiver counts the parts
//! ([`evenkeel_protocol::Arrivals`]), so the order among queue pairs does not matter. Messages of a
//! few KiB do not wait for a credit: they go to a ring in the receiver's memory and are copied from
//! there ([`eager`]).
//!
//! Where messages may be in memory that the processor cannot access ([`MemoryTypes`]), all wait for
//! credits and nothing is copied.
//!
//! A device may have several ports. The connection's queue pairs are dealt over the pairs of ports
//! of both ends, so each port takes the next part when it has room. Memory is registered with each
//! port, and credits have a key for each. Queue pairs of a port that fails are left alone while
//! those of others work, and are tried again from time to time.
//!
//! When a queue pair fails, both ends stop theirs. The receiver reports which parts it has, and the
//! sender sends the others again over other queue pairs while the failed one is replaced. When a
//! whole path fails, the connection moves to another pair of ports ([`failover`]).

mod adapter;
mod completion_polling;
mod control;
mod credit;
mod eager;
mod endpoint;
mod error;
mod events;
mod failover;
mod failure_streak;
mod flush;
mod memlock;
mod memory_types;
mod mr_cache;
mod queue_pairs;
mod range_map;
mod receiver;
mod region_cache;
mod regions;
mod sender;
#[cfg(test)]
mod tests;

pub(crate) use adapter::{Adapter, DiscoveredPort, PortDiscovery};
pub(crate) use eager::EAGER_BYTES;
pub(crate) use failover::FailoverCandidate;
pub use memory_types::MemoryTypes;
pub use mr_cache::{MrCache, MrHandle};
pub(crate) use receiver::Receiver;
pub(crate) use regions::Regions;
pub(crate) use sender::Sender;
