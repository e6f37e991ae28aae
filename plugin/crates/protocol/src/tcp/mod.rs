//! Messages over TCP flows: frames, and which flow carries which bytes.

pub(crate) mod copies;
pub(crate) mod flow_count;
pub(crate) mod frame;
pub(crate) mod pacing;
pub(crate) mod path;
pub(crate) mod reassembly;
pub(crate) mod receiver;
pub(crate) mod recv_codec;
pub(crate) mod refusals;
pub(crate) mod repath;
pub(crate) mod round_trips;
pub(crate) mod scheduler;
pub(crate) mod segments;
pub(crate) mod send_codec;
pub(crate) mod sender;
