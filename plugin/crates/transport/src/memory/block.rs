//! Memory that a message takes with it.

use std::ptr;
use std::sync::OnceLock;

use super::buffers::{RecvBuffer, SendBuffer};
use crate::rdma::{MrCache, MrHandle};

/// Memory that belongs to whoever has it: its maker, or a message until that is sent or received.
pub struct Block {
    start: *mut u8,
    length: usize,
    /// With the device of the first message that needs it.
    registration: OnceLock<MrHandle>,
}

// SAFETY: the memory is owned, and written only through `&mut self` or by the message it was lent to, which has it alone.
unsafe impl Send for Block {}
// SAFETY: a shared reference only reads.
unsafe impl Sync for Block {}

impl Block {
    /// So many bytes, all zero.
    pub fn new(length: usize) -> Self {
        let memory = Box::into_raw(vec![0; length].into_boxed_slice());
        Self { start: memory.cast(), length, registration: OnceLock::new() }
    }

    /// Registers it for as long as it lives, unless it is registered already: who uses a block for one message after the
    /// other is not to pay for each. Where that cannot be done, a message that needs it says so.
    pub(crate) fn register_with(&self, registrar: &MrCache) {
        // Of which the registration is dropped before the memory is given back; nobody is told to write there but for a
        // message that has it alone.
        let memory = RecvBuffer { start: self.start, length: self.length };
        if self.registration.get().is_none()
            && let Ok(Some(registration)) = registrar.register(memory)
        {
            // Somebody else may have been faster.
            let _ = self.registration.set(registration);
        }
    }

    /// What is in it.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the memory is owned, initialized and this long; nobody writes while a shared reference exists.
        unsafe { std::slice::from_raw_parts(self.start, self.length) }
    }

    /// What is in it, to be changed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the reference is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.length) }
    }

    /// Its first bytes, for a message to send. Whoever asks keeps the block, unchanged, as long as
    /// the contract of [`SendBuffer::new`] wants.
    ///
    /// # Panics
    /// When it is not as long.
    pub(crate) fn lend(&self, length: usize) -> SendBuffer {
        assert!(length <= self.length);
        SendBuffer { start: self.start, length }
    }

    /// Its first bytes, for a message to receive. Whoever asks keeps the block away from everybody
    /// as long as the contract of [`RecvBuffer::new`] wants.
    ///
    /// # Panics
    /// When it is not as long.
    pub(crate) fn lend_mut(&mut self, length: usize) -> RecvBuffer {
        assert!(length <= self.length);
        RecvBuffer { start: self.start, length }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        drop(self.registration.take());
        let memory = ptr::slice_from_raw_parts_mut(self.start, self.length);
        // SAFETY: it came from a box of this length in `new` and is given back once.
        drop(unsafe { Box::from_raw(memory) });
    }
}
