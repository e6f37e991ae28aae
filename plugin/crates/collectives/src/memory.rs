//! Memory that callers lend for the time of an operation, and memory that processes share: the unsafe code of the crate. What
//! is unsafe elsewhere is to lend something, each with the reason why it stays there long enough.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64};

use evenkeel_transport::{RecvBuffer, SendBuffer};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Bytes to send, lent.
///
/// Who makes one sees to it that the bytes are there, and are not written, until every link that was given it says that it is
/// done with it, or is dropped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    start: *const u8,
    length: usize,
}

/// Room to receive into, lent. As [`Source`], and nobody else reads or writes it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    start: *mut u8,
    length: usize,
}

// SAFETY: the memory is valid on every thread, by the contract of the constructors.
unsafe impl Send for Source {}
// SAFETY: as above; through a shared reference it is only read.
unsafe impl Sync for Source {}
// SAFETY: as for `Source`.
unsafe impl Send for Target {}
// SAFETY: as for `Source`; the pointer is only copied through a shared reference.
unsafe impl Sync for Target {}

impl Source {
    /// No bytes.
    pub(crate) const EMPTY: Self = Self { start: NonNull::dangling().as_ptr(), length: 0 };

    /// Lends bytes.
    ///
    /// # Safety
    /// As the type says.
    pub(crate) unsafe fn lend(bytes: &[u8]) -> Self {
        Self { start: bytes.as_ptr(), length: bytes.len() }
    }

    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// `length` of the bytes, from `at` on.
    ///
    /// # Panics
    /// When they are not inside.
    pub(crate) fn part(&self, at: usize, length: usize) -> Self {
        assert!(at <= self.length && length <= self.length - at);
        // SAFETY: inside, as asserted.
        Self { start: unsafe { self.start.add(at) }, length }
    }

    /// Appends the bytes.
    pub(crate) fn append_to(&self, to: &mut Vec<u8>) {
        // SAFETY: the bytes are there and not written, by the contract of the type.
        to.extend_from_slice(unsafe { std::slice::from_raw_parts(self.start, self.length) });
    }

    /// Writes the bytes, or the first of them.
    ///
    /// # Errors
    /// The writer's.
    pub(crate) fn write_to(&self, to: &mut dyn Write) -> io::Result<usize> {
        // SAFETY: as in `append_to`.
        to.write(unsafe { std::slice::from_raw_parts(self.start, self.length) })
    }

    /// For the transport, under the same contract.
    pub(crate) fn to_send(self) -> SendBuffer {
        // SAFETY: the contract of `SendBuffer` is that of this type: its holder is dropped, and with it its connection, or
        // says that it is done, before the memory goes.
        unsafe { SendBuffer::new(self.start, self.length) }
    }
}

impl Target {
    /// No room.
    pub(crate) const EMPTY: Self = Self { start: NonNull::dangling().as_ptr(), length: 0 };

    /// Lends room.
    ///
    /// # Safety
    /// As the type says.
    pub(crate) unsafe fn lend(bytes: &mut [u8]) -> Self {
        Self { start: bytes.as_mut_ptr(), length: bytes.len() }
    }

    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// `length` of the bytes, from `at` on.
    ///
    /// # Panics
    /// When they are not inside.
    pub(crate) fn part(&self, at: usize, length: usize) -> Self {
        assert!(at <= self.length && length <= self.length - at);
        // SAFETY: inside, as asserted.
        Self { start: unsafe { self.start.add(at) }, length }
    }

    /// The room as bytes to send.
    pub(crate) fn source(&self) -> Source {
        Source { start: self.start, length: self.length }
    }

    /// Writes from its beginning.
    ///
    /// # Panics
    /// When there is not room enough.
    pub(crate) fn write(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.length);
        // SAFETY: the room is ours to write, by the contract of the type; `bytes` is a reference and so lies elsewhere.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.start, bytes.len()) };
    }

    /// Reads once, from its beginning on.
    ///
    /// # Errors
    /// The reader's.
    pub(crate) fn read_from(&self, from: &mut dyn Read) -> io::Result<usize> {
        // SAFETY: the room is there and nobody else reads or writes it, by the contract of the type.
        from.read(unsafe { std::slice::from_raw_parts_mut(self.start, self.length) })
    }

    /// The bytes themselves.
    ///
    /// # Safety
    /// Until the reference is gone nothing else may read or write them, nor may any link have them.
    pub(crate) unsafe fn bytes<'a>(self) -> &'a mut [u8] {
        // SAFETY: the room is there by the contract of the type, and for this reference alone, which the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.length) }
    }

    /// For the transport, under the same contract.
    pub(crate) fn to_recv(self) -> RecvBuffer {
        // SAFETY: as in `Source::to_send`.
        unsafe { RecvBuffer::new(self.start, self.length) }
    }
}

/// Memory that two processes share: words that both may change at any time, and bytes that belong to one of them at a time.
pub(crate) struct Shared {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: it is only reached through atomics and copies between raw pointers.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    /// Maps a file of this many bytes.
    ///
    /// # Errors
    /// When the system does not map it.
    pub(crate) fn map(file: impl AsFd, length: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing. The file is sealed against
        // shrinking before it is mapped, see `shm`, so no access faults.
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

    /// The word at an offset in bytes.
    ///
    /// # Panics
    /// When it is not inside or not aligned.
    pub(crate) fn word(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at + 4 <= self.length);
        // SAFETY: inside and aligned, since mappings begin at pages; both processes reach it by atomics only.
        unsafe { AtomicU32::from_ptr(self.start.as_ptr().add(at).cast()) }
    }

    /// The long word at an offset in bytes.
    ///
    /// # Panics
    /// When it is not inside or not aligned.
    pub(crate) fn long(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.length);
        // SAFETY: as in `word`.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(at).cast()) }
    }

    /// Copies bytes to an offset. Which bytes are whose to write is up to the ring; a peer that does not keep to it garbles
    /// the data, as it could by sending garbage, and nothing else: bytes are not interpreted here.
    ///
    /// # Panics
    /// When they do not fit there.
    pub(crate) fn write(&self, at: usize, from: Source) {
        assert!(at <= self.length && from.length <= self.length - at);
        // SAFETY: both sides are valid for the length, as asserted and by the contract of `Source`, and do not overlap,
        // since nobody lends this mapping.
        unsafe {
            ptr::copy_nonoverlapping(from.start, self.start.as_ptr().add(at), from.length);
        }
    }

    /// Copies bytes from an offset; see [`Shared::write`].
    ///
    /// # Panics
    /// When they do not lie there.
    pub(crate) fn read(&self, at: usize, into: Target) {
        assert!(at <= self.length && into.length <= self.length - at);
        // SAFETY: as in `write`.
        unsafe {
            ptr::copy_nonoverlapping(self.start.as_ptr().add(at), into.start, into.length);
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, of this length, and nothing borrowed from it is left. A mapping that
        // cannot be removed stays until the process ends.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_and_copies() {
        let mut room = [0u8; 8];
        // SAFETY: `room` outlives both, and no reference to it is used between.
        let target = unsafe { Target::lend(&mut room) };
        target.part(2, 3).write(b"abc");
        let mut copy = vec![];
        target.source().part(1, 5).append_to(&mut copy);
        assert_eq!(copy, b"\0abc\0");
    }

    #[test]
    #[should_panic(expected = "at <= self.length")]
    fn a_part_cannot_leave_its_memory() {
        Source::EMPTY.part(0, 1);
    }
}
