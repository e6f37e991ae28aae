//! The protocol between clients and reduction servers.
//!
//! A message is a header of 64 bytes and up to 8 KiB of payload. A larger payload is the next
//! message, without a header, so that it is received straight into its destination.
//!
//! A header begins with magic 8, version u16, type u16. The other 52 bytes depend on the type.
//! Integers are little-endian. Each direction is a connection of its own, which delivers messages
//! in order. The client's first message is [`Packet::Join`]; the server answers with
//! [`Packet::Joined`] or [`Packet::Failed`]. Parts and results follow, both in the client's order.

mod member;
mod message_size;
mod packet;
mod piece;

pub use member::{MAX_RANKS, Member};
pub use message_size::{HEADER_BYTES, MESSAGE_BYTES};
pub use packet::{NONCE, Packet, PacketError};
pub use piece::Piece;
