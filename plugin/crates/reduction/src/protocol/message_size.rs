//! The sizes of messages.

/// Size of a header, in bytes.
pub const HEADER_BYTES: usize = 64;
/// Maximum payload in the same message as its header, in bytes.
pub(super) const INLINE_BYTES: usize = 8 << 10;
/// Maximum size of a message that begins with a header, in bytes.
pub const MESSAGE_BYTES: usize = HEADER_BYTES + INLINE_BYTES;
