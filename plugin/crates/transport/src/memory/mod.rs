//! Memory that messages are sent from and received into.

pub(crate) mod block;
pub(crate) mod buffers;
#[cfg(test)]
pub(crate) mod protected;
