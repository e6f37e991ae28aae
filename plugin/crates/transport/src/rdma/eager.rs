//! Eager messages: small messages are sent without waiting for a buffer. They go to a ring in the receiver's memory.

/// Length in bytes of the longest eager message, and of a slot of the ring.
pub(crate) const EAGER_BYTES: usize = 4096;

/// Calls `with` with a temporary buffer for an eager message. Most are short, and clearing room for the longest would cost
/// more than copying them.
pub(super) fn with_buffer<T>(length: usize, with: impl FnOnce(&mut [u8]) -> T) -> T {
    const SHORT: usize = 256;
    if length <= SHORT {
        with(&mut [0; SHORT][..length])
    } else {
        with(&mut [0; EAGER_BYTES][..length])
    }
}
