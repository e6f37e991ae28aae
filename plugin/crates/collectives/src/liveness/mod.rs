//! Liveness: which ranks are alive, and which ranks they wait for.
//!
//! A rank whose operation makes no progress probes the ranks that it waits for. A probe is a TCP connection of its own to a
//! responder thread, of which every process has one. The response is one of three: the rank is in no operation; it is in an
//! operation and waits in turn for these ranks; or its group has failed, and why. A rank that waits for a rank that waits for a
//! lost one finds the lost rank by probing transitively. A killed process refuses the connection. A stopped one accepts it and does
//! not respond. One behind a cut link does neither. No probes are sent while operations make progress. A rank that finds a failure
//! reports it to all others, so that they need not find it themselves.
//!
//! The responder responds only to requests with a member's identity, a random number that only the group's store has.

mod failure;
mod frame;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod probe;
mod responder;

pub(crate) use failure::GroupFailure;
pub(crate) use probe::{
    PeerStatus, ProbeAddress, ProbeReport, abort_group, end_group, probe_all, probe_transitively,
};
pub(crate) use responder::{Liveness, Operation};

/// Maximum number of ranks in a message.
const MAX_RANKS: usize = 256;
