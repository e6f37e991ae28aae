//! In-network reduction through servers: the protocol, and the client. The server is
//! `evenkeel-reduction-server`.
//!
//! Every rank of a communicator sends its vector once and receives the sum once. The servers
//! between them do the aggregation. That moves half the bytes of a ring over each rank's link.
//!
//! [`Client`] is one rank of one communicator at all its servers. It uses [`evenkeel_transport`]:
//! one connection in each direction between a client and a server.
//!
//! A result depends only on what the ranks sent. Parts are reduced in the ranks' order, all at
//! once, in at least float32. The result has the same bits whatever the size of pieces, the number
//! of servers and threads, and the order of arrival. In a tree of servers, each leaf reduces the
//! parts of its own ranks, and the upstream server reduces the sums of the leaves: the same tree
//! gives the same bits.

pub mod client;
mod error;
pub mod protocol;
mod server_list_digest;
mod settings;
mod timeline;
mod tree_position;

pub use client::{Client, Ticket};
pub use error::ClientError;
pub use protocol::{MAX_RANKS, Member};
pub use server_list_digest::{SERVER_LIST_DIGEST_BYTES, ServerListDigest};
pub use settings::{SETTINGS, Settings, parse_servers};
pub use timeline::Timeline;
pub use tree_position::TreePosition;
