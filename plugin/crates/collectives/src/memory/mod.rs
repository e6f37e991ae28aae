//! Memory that callers lend for the duration of an operation, and memory that processes share. This is the unsafe code of the
//! crate. Unsafe blocks elsewhere only lend memory, and each says why the memory lives long enough.

mod shared_mapping;

use std::io::{self, Read, Write};
use std::ptr::{self, NonNull};

use evenkeel_transport::{RecvBuffer, SendBuffer};

pub(crate) use shared_mapping::SharedMapping;

/// Lent bytes to send.
///
/// The creator guarantees that the bytes stay valid and unwritten until every link that got them reports that it is done with
/// them, or is dropped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    start: *const u8,
    length: usize,
}

/// Lent memory to receive into. As [`Source`], and nothing else reads or writes it.
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
    /// As documented at the type.
    pub(crate) unsafe fn lend(bytes: &[u8]) -> Self {
        Self { start: bytes.as_ptr(), length: bytes.len() }
    }

    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// `length` bytes, starting at `at`.
    ///
    /// # Panics
    /// When they are not inside the memory.
    pub(crate) fn part(&self, at: usize, length: usize) -> Self {
        assert!(at <= self.length && length <= self.length - at);
        // SAFETY: inside, as asserted.
        Self { start: unsafe { self.start.add(at) }, length }
    }

    /// Appends the bytes.
    pub(crate) fn append_to(&self, to: &mut Vec<u8>) {
        // SAFETY: the bytes are valid and not written, by the contract of the type.
        to.extend_from_slice(unsafe { std::slice::from_raw_parts(self.start, self.length) });
    }

    /// Writes the bytes, or the first of them, to a writer.
    ///
    /// # Errors
    /// The writer's.
    pub(crate) fn write_to(&self, to: &mut dyn Write) -> io::Result<usize> {
        // SAFETY: as in `append_to`.
        to.write(unsafe { std::slice::from_raw_parts(self.start, self.length) })
    }

    /// The same memory for the transport, under the same contract.
    pub(crate) fn to_send(self) -> SendBuffer {
        // SAFETY: the contract of `SendBuffer` is that of this type: its holder reports that it is done, or is dropped together
        // with its connection, before the memory is freed.
        unsafe { SendBuffer::new(self.start, self.length) }
    }
}

impl Target {
    /// No memory.
    pub(crate) const EMPTY: Self = Self { start: NonNull::dangling().as_ptr(), length: 0 };

    /// Lends memory.
    ///
    /// # Safety
    /// As documented at the type.
    pub(crate) unsafe fn lend(bytes: &mut [u8]) -> Self {
        Self { start: bytes.as_mut_ptr(), length: bytes.len() }
    }

    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// `length` bytes, starting at `at`.
    ///
    /// # Panics
    /// When they are not inside the memory.
    pub(crate) fn part(&self, at: usize, length: usize) -> Self {
        assert!(at <= self.length && length <= self.length - at);
        // SAFETY: inside, as asserted.
        Self { start: unsafe { self.start.add(at) }, length }
    }

    /// The memory as bytes to send.
    pub(crate) fn source(&self) -> Source {
        Source { start: self.start, length: self.length }
    }

    /// Writes bytes to the start of the memory.
    ///
    /// # Panics
    /// When the memory is too short.
    pub(crate) fn write(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.length);
        // SAFETY: the memory is ours to write, by the contract of the type; `bytes` is a reference and so lies elsewhere.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.start, bytes.len()) };
    }

    /// Reads once from a reader, into the start of the memory.
    ///
    /// # Errors
    /// The reader's.
    pub(crate) fn read_from(&self, from: &mut dyn Read) -> io::Result<usize> {
        // SAFETY: the memory is valid and nothing else reads or writes it, by the contract of the type.
        from.read(unsafe { std::slice::from_raw_parts_mut(self.start, self.length) })
    }

    /// The memory as a slice.
    ///
    /// # Safety
    /// While the reference lives, nothing else may read or write the memory, and no link may have it.
    pub(crate) unsafe fn bytes<'a>(self) -> &'a mut [u8] {
        // SAFETY: the memory is valid by the contract of the type, and the caller guarantees that this reference is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.length) }
    }

    /// The same memory for the transport, under the same contract.
    pub(crate) fn to_recv(self) -> RecvBuffer {
        // SAFETY: as in `Source::to_send`.
        unsafe { RecvBuffer::new(self.start, self.length) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_borrowed_memory_are_copied() {
        let mut buffer = [0u8; 8];
        // SAFETY: `buffer` outlives both, and no reference to it is used between.
        let target = unsafe { Target::lend(&mut buffer) };
        target.part(2, 3).write(b"abc");
        let mut copy = vec![];
        target.source().part(1, 5).append_to(&mut copy);
        assert_eq!(copy, b"\0abc\0");
    }

    #[test]
    #[should_panic(expected = "at <= self.length")]
    fn part_outside_the_memory_panics() {
        Source::EMPTY.part(0, 1);
    }
}
