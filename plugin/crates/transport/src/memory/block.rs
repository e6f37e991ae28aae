//! Owned memory that a message takes with it.

use std::ptr;
use std::sync::OnceLock;

use super::buffers::{RecvBuffer, SendBuffer};
use crate::rdma::{MrCache, MrHandle};

/// Memory that belongs to its holder: its maker, or a message until that is sent or received.
pub struct Block {
    start: *mut u8,
    length: usize,
    /// With the device of the first message that needs it.
    registration: OnceLock<MrHandle>,
}

// SAFETY: the memory is owned, and written only through `&mut self` or by the message it was lent
// to, which has it alone.
unsafe impl Send for Block {}
// SAFETY: a shared reference only reads.
unsafe impl Sync for Block {}

impl Block {
    /// The given number of bytes, all zero.
    pub fn new(length: usize) -> Self {
        let memory = Box::into_raw(vec![0; length].into_boxed_slice());
        Self { start: memory.cast(), length, registration: OnceLock::new() }
    }

    /// Registers it for as long as it lives, unless it is registered already. So a block that is
    /// used for many messages is registered once. If registration fails, a message that needs it
    /// reports that.
    pub(crate) fn register_with(&self, registrar: &MrCache) {
        // The registration is dropped before the memory is freed. A peer may write there only for a
        // message that owns the memory.
        let memory = RecvBuffer { start: self.start, length: self.length, mark: None };
        if self.registration.get().is_none()
            && let Ok(Some(registration)) = registrar.register(memory)
        {
            // Another thread may have been faster.
            let _ = self.registration.set(registration);
        }
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the memory is owned, initialized and this long; nobody writes while a shared
        // reference exists.
        unsafe { std::slice::from_raw_parts(self.start, self.length) }
    }

    /// Its bytes, to be changed.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the reference is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.length) }
    }

    /// Its first bytes, for a message to send. The caller keeps the block, unchanged, as the
    /// contract of [`SendBuffer::new`] requires.
    ///
    /// # Panics
    /// When it is shorter.
    pub(crate) fn lend(&self, length: usize) -> SendBuffer {
        assert!(length <= self.length);
        SendBuffer { start: self.start, length, mark: None }
    }

    /// Its first bytes, for a message to receive. The caller keeps the block from all other use, as
    /// the contract of [`RecvBuffer::new`] requires.
    ///
    /// # Panics
    /// When it is shorter.
    pub(crate) fn lend_mut(&mut self, length: usize) -> RecvBuffer {
        assert!(length <= self.length);
        RecvBuffer { start: self.start, length, mark: None }
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
