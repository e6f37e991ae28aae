//! Failover: a connection continues over another pair of ports when its present path fails.
//!
//! A path is a port of the sender's host and an address of the receiver's. The sender connects over
//! other paths ([`connect`]), and the receiver accepts the one that the sender chooses
//! ([`accept`]).

mod accept;
mod connect;
#[cfg(test)]
mod fused_tests;
#[cfg(test)]
mod tests;

pub(crate) use accept::FailoverCandidate;
pub(super) use connect::PathSearch;
