//! The parts of a connection that do not depend on what carries its messages.

pub(crate) mod base;
pub(crate) mod owned;
pub(crate) mod recv;
pub(crate) mod request;
pub(crate) mod send;
#[cfg(test)]
pub(crate) mod tag_matching_tests;
pub(crate) mod unexpected;
