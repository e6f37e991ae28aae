//! The processes of a run: how they are started, find each other and wait for each other.

pub(crate) mod bootstrap;
pub(crate) mod child;
pub(crate) mod spawn;
pub(crate) mod wait;
