//! Memory that messages are sent from and received into. Like [`crate::sys`], it contains unsafe
//! code.

pub(crate) mod block;
pub(crate) mod buffers;
mod polled_copy;
pub(crate) mod staging;
#[cfg(test)]
pub(crate) mod test_memory;
