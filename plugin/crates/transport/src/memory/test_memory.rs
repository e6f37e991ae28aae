//! Test only: memory that the processor cannot access, like a GPU's.

use std::io;
use std::ptr;
use std::sync::OnceLock;

use super::buffers::{RecvBuffer, SendBuffer};
use crate::rdma::{MrCache, MrHandle};

/// Memory that can be made inaccessible to the processor, like a GPU's. Devices can access it once
/// it is registered.
pub(crate) struct ProtectedMemory {
    start: *mut u8,
    length: usize,
    /// Length of the mapping.
    mapped: usize,
    is_open: bool,
    registration: OnceLock<MrHandle>,
}

// SAFETY: the memory is owned, and written only through `&mut self` or by the message it was lent
// to, which has it alone.
unsafe impl Send for ProtectedMemory {}

impl ProtectedMemory {
    /// The given number of bytes, all zero, accessible to the processor.
    pub(crate) fn new(length: usize) -> Self {
        let mapped = length.max(1).next_multiple_of(4096);
        let (access, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping touches no other memory.
        let start = unsafe { libc::mmap(ptr::null_mut(), mapped, access, kind, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED, "{}", io::Error::last_os_error());
        let registration = OnceLock::new();
        Self { start: start.cast(), length, mapped, is_open: true, registration }
    }

    /// Registers it like a GPU's memory, for as long as it lives.
    pub(crate) fn register_with(&self, registrar: &MrCache) {
        let memory = RecvBuffer { start: self.start, length: self.mapped, mark: None };
        let registration = registrar.register_peer_memory(memory).unwrap();
        assert!(self.registration.set(registration).is_ok(), "registered twice");
    }

    /// Whether the processor may access it from now on. Otherwise an access is a fault (SIGSEGV).
    pub(crate) fn open(&mut self, open: bool) {
        let access = if open { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_NONE };
        // SAFETY: the mapping is owned, and no reference to it exists while this is borrowed
        // mutably.
        let result = unsafe { libc::mprotect(self.start.cast(), self.mapped, access) };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        self.is_open = open;
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        assert!(self.is_open);
        // SAFETY: the memory is owned, initialized, this long, and can be read, as asserted; nobody
        // writes while a shared reference exists.
        unsafe { std::slice::from_raw_parts(self.start, self.length) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(self.is_open);
        // SAFETY: as above, and the reference is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.length) }
    }

    /// As [`Block::lend`].
    pub(crate) fn lend(&self, length: usize) -> SendBuffer {
        assert!(length <= self.length);
        SendBuffer { start: self.start, length, mark: None }
    }

    /// As [`Block::lend_mut`].
    pub(crate) fn lend_mut(&mut self, length: usize) -> RecvBuffer {
        assert!(length <= self.length);
        RecvBuffer { start: self.start, length, mark: None }
    }
}

impl Drop for ProtectedMemory {
    fn drop(&mut self) {
        drop(self.registration.take());
        // SAFETY: the mapping is owned and given back once.
        unsafe { libc::munmap(self.start.cast(), self.mapped) };
    }
}
