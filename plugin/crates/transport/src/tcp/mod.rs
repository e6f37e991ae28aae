//! Connections whose messages TCP carries, over several flows.

pub(crate) mod chunk_checksum;
pub(crate) mod receiver;
mod recv_flow;
pub(crate) mod repair;
pub(crate) mod retransmit_buffer;
mod send_flow;
pub(crate) mod sender;

/// Most flows at a time: each may have one that is to take its place.
pub(crate) const MAX_FLOW_SLOTS: usize = 2 * evenkeel_protocol::MAX_FLOWS;
