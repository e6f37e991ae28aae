//! A piece of an operation's vector: what is sent, reduced and returned at once.

use evenkeel_reduction_kernels::{DataType, Op};

use super::message_size::{HEADER_BYTES, INLINE_BYTES};

/// Which elements of which operation a part or a result consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Number of the operation in its communicator.
    pub sequence: u64,
    /// Offset in the operation's vector, in bytes.
    pub offset: u64,
    /// Size of the operation's vector, in bytes.
    pub total: u64,
    /// Size in bytes: a whole number of elements, at least one.
    pub length: u32,
    /// Type of the elements.
    pub kind: DataType,
    /// The reduction.
    pub op: Op,
}

impl Piece {
    /// Whether its payload is in the same message as its header.
    pub fn is_inline(&self) -> bool {
        self.length as usize <= INLINE_BYTES
    }

    /// Size of the message that begins with its header.
    pub fn message_bytes(&self) -> usize {
        HEADER_BYTES + if self.is_inline() { self.length as usize } else { 0 }
    }
}
