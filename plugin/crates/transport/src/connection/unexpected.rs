//! The memory of unexpected messages. It is bounded for a connection
//! ([`evenkeel_protocol::MAX_UNEXPECTED_BYTES`]) and for the process: beyond that, flows wait.

use std::sync::atomic::{AtomicUsize, Ordering};

use evenkeel_protocol::UnexpectedDelivery;

use crate::connection::request::Target;
use crate::memory::block::Block;
use crate::memory::buffers::RecvBuffer;

/// The tag matcher of a receiving connection.
pub(crate) type TagMatcher = evenkeel_protocol::TagMatcher<Target, UnexpectedMemory>;

/// An unexpected message and its request's buffer.
pub(crate) type Delivery = UnexpectedDelivery<Target, UnexpectedMemory>;

/// Copies an unexpected message into its buffer and completes it. Returns how many bytes of memory
/// are free again.
pub(crate) fn deliver(delivery: Delivery) -> u64 {
    let UnexpectedDelivery { buffer: target, length, memory, bytes } = delivery;
    let message = &memory.bytes()[..length as usize];
    target.buffer.part(0, message.len()).copy_from(message);
    target.complete(length);
    bytes
}

/// Maximum number of bytes of the process. The longest message fits.
const MAX_PROCESS_BYTES: usize = 4 << 30;

/// Bytes in use.
static PROCESS_BYTES: AtomicUsize = AtomicUsize::new(0);

/// How often memory was refused.
#[cfg(test)]
pub(crate) static REFUSALS: AtomicUsize = AtomicUsize::new(0);

/// Memory of an unexpected message.
pub(crate) struct UnexpectedMemory {
    block: Block,
    limited: Reservation<'static>,
}

impl UnexpectedMemory {
    /// Zeroed memory; `None` if the process has too much of it.
    pub(crate) fn new(bytes: usize) -> Option<Self> {
        let limited = Reservation::new(&PROCESS_BYTES, bytes, MAX_PROCESS_BYTES);
        #[cfg(test)]
        REFUSALS.fetch_add(limited.is_none().into(), Ordering::Relaxed);
        let limited = limited?;
        Some(Self { block: Block::new(bytes), limited })
    }

    /// All of it, for a message to receive, as [`Block::lend_mut`].
    pub(crate) fn lend_mut(&mut self) -> RecvBuffer {
        self.block.lend_mut(self.limited.bytes)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.block.bytes()
    }
}

/// Uses up what the process may have, until the result is dropped.
#[cfg(test)]
pub(crate) fn use_up() -> Reservation<'static> {
    let left = || MAX_PROCESS_BYTES - PROCESS_BYTES.load(Ordering::Relaxed);
    crate::test_support::until(|| Reservation::new(&PROCESS_BYTES, left(), MAX_PROCESS_BYTES))
}

/// A part of a number of bytes in use.
pub(crate) struct Reservation<'a> {
    used: &'a AtomicUsize,
    bytes: usize,
}

impl<'a> Reservation<'a> {
    fn new(used: &'a AtomicUsize, bytes: usize, limit: usize) -> Option<Self> {
        let add = |used: usize| used.checked_add(bytes).filter(|used| *used <= limit);
        used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
        Some(Self { used, bytes })
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unexpected_memory_is_bounded_for_the_process() {
        let used = AtomicUsize::new(0);
        let take = |bytes| Reservation::new(&used, bytes, 100);
        let first = take(60).expect("room");
        assert!(take(41).is_none() && take(usize::MAX).is_none());
        let second = take(40).expect("room");
        drop(first);
        assert!(take(60).is_some());
        drop(second);
        assert_eq!(used.load(Ordering::Relaxed), 0);
    }
}
