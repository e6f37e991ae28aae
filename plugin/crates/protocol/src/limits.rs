//! Limits that both peers keep to.

/// Maximum length of a message, in bytes. NCCL's requests are never longer.
pub const MAX_MESSAGE_BYTES: u64 = 1 << 30;
/// Messages are split only at multiples of this many bytes: NCCL's LL128 protocol relies on lines
/// of 128 bytes arriving whole.
pub const CHUNK_ALIGN: u64 = 128;
/// Maximum length of a chunk that carries a checksum, in bytes. The receiver holds it back until it
/// is verified.
pub const MAX_CHUNK_BYTES: u64 = 16 << 20;
/// Maximum number of flows of a connection.
pub const MAX_FLOWS: usize = 64;
/// Maximum number of queue pairs of a connection.
pub const MAX_QUEUE_PAIRS: usize = 8;
/// Maximum number of addresses of a listener.
pub const MAX_ADDRESSES: usize = 4;
