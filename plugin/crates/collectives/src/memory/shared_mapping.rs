//! Memory that two processes map.

use std::io;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::{Source, Target};

/// Memory that two processes map: atomic words that both may change at any time, and bytes that one of them owns at a time.
pub(crate) struct SharedMapping {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: it is only reached through atomics and copies between raw pointers.
unsafe impl Send for SharedMapping {}
// SAFETY: as above.
unsafe impl Sync for SharedMapping {}

impl SharedMapping {
    /// Maps a file of this many bytes.
    ///
    /// # Errors
    /// When the system does not map it.
    pub(crate) fn map(file: impl AsFd, length: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing. The file is sealed against
        // shrinking before it is mapped, see `links::shm`, so no access faults.
        let start = unsafe {
            mmap(
                ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                0,
            )
        }?;
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mapped at zero"))?;
        Ok(Self { start, length })
    }

    /// The 32-bit word at an offset in bytes.
    ///
    /// # Panics
    /// When the offset is outside the mapping or not aligned.
    pub(crate) fn word(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at + 4 <= self.length);
        // SAFETY: inside and aligned, since mappings begin at pages; both processes reach it by atomics only.
        unsafe { AtomicU32::from_ptr(self.start.as_ptr().add(at).cast()) }
    }

    /// The 64-bit word at an offset in bytes.
    ///
    /// # Panics
    /// When the offset is outside the mapping or not aligned.
    pub(crate) fn long(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.length);
        // SAFETY: as in `word`.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(at).cast()) }
    }

    /// Copies bytes to an offset. The ring decides which process may write which bytes. A peer that breaks this rule corrupts its
    /// data, as it could by sending wrong data, and nothing else: bytes are not interpreted here.
    ///
    /// # Panics
    /// When they do not fit at the offset.
    pub(crate) fn write(&self, at: usize, from: Source) {
        assert!(at <= self.length && from.length <= self.length - at);
        // SAFETY: both sides are valid for the length, as asserted and by the contract of `Source`, and do not overlap,
        // since this mapping is never lent.
        unsafe {
            ptr::copy_nonoverlapping(from.start, self.start.as_ptr().add(at), from.length);
        }
    }

    /// Copies bytes from an offset; see [`SharedMapping::write`].
    ///
    /// # Panics
    /// When the mapping has fewer bytes at the offset.
    pub(crate) fn read(&self, at: usize, into: Target) {
        assert!(at <= self.length && into.length <= self.length - at);
        // SAFETY: as in `write`.
        unsafe {
            ptr::copy_nonoverlapping(self.start.as_ptr().add(at), into.start, into.length);
        }
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, of this length, and nothing borrowed from it is left. A mapping that
        // cannot be removed stays until the process ends.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.length) };
    }
}
