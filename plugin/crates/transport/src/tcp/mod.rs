//! TCP: connections whose messages are split over several flows, each a TCP connection.

pub(crate) mod chunk_stage;
pub(crate) mod lone_pacing;
pub(crate) mod receiver;
mod recv_flow;
mod repair;
pub(crate) mod retransmit_buffer;
mod send_flow;
mod send_queue;
pub(crate) mod sender;

/// Maximum number of flows at a time: each may have a replacement.
pub(crate) const MAX_FLOW_SLOTS: usize = 2 * evenkeel_protocol::MAX_FLOWS;
