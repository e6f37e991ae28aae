//! What the sending side of a connection decides, without its sockets, locks, clocks and memory.

pub(crate) mod choice;
pub(crate) mod deferral;
pub(crate) mod repair;
pub(crate) mod writer;
pub(crate) mod writing;
