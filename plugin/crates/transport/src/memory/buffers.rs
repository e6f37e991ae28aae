//! Memory that callers lend for one message.

use std::ptr;
use std::sync::Arc;

use evenkeel_verbs::{Access, Context, MemoryRegion};

use super::polled_copy::copy_to_polled;
use crate::telemetry::chunk_events::MessageMark;

/// Memory that the caller lends for one message to send.
///
/// It is a pointer and a length, not a slice: the caller's GPU may touch the memory at any time, so
/// no Rust reference to it may exist. Only the kernel reads through it.
#[derive(Clone, Copy, Debug)]
pub struct SendBuffer {
    pub(super) start: *const u8,
    pub(super) length: usize,
    pub(super) mark: Option<MessageMark>,
}

/// Memory that the caller lends for one message to receive; see [`SendBuffer`].
#[derive(Clone, Copy, Debug)]
pub struct RecvBuffer {
    pub(super) start: *mut u8,
    pub(super) length: usize,
    pub(super) mark: Option<MessageMark>,
}

// SAFETY: the pointers are only handed to the kernel, which does not care which thread asks; the
// constructors' contract makes the memory valid on every thread.
unsafe impl Send for SendBuffer {}
// SAFETY: as above; the methods through a shared reference only copy the pointer.
unsafe impl Sync for SendBuffer {}
// SAFETY: as for `SendBuffer`.
unsafe impl Send for RecvBuffer {}
// SAFETY: as for `SendBuffer`.
unsafe impl Sync for RecvBuffer {}

impl SendBuffer {
    /// Lends `length` bytes from `start`.
    ///
    /// # Safety
    /// The memory must stay readable until the request made with it has been reported as done or failed by `Request::test`,
    /// or its connection has been closed, whichever is first. A caller that makes requests of its own with parts of the
    /// buffer reports to its own caller in the same way.
    pub unsafe fn new(start: *const u8, length: usize) -> Self {
        Self { start, length, mark: None }
    }

    /// The same memory, of a message whose chunks are to be observed.
    pub fn with_mark(self, mark: Option<MessageMark>) -> Self {
        Self { mark, ..self }
    }

    pub(crate) fn mark(&self) -> Option<MessageMark> {
        self.mark
    }

    /// Its first byte.
    pub(crate) fn start(&self) -> *const u8 {
        self.start
    }

    /// Lends static memory.
    pub fn from_static(bytes: &'static [u8]) -> Self {
        Self { start: bytes.as_ptr(), length: bytes.len(), mark: None }
    }

    /// Number of bytes lent.
    pub fn length(&self) -> usize {
        self.length
    }

    /// The checksum of its bytes, continued from `before`.
    pub(crate) fn checksum(&self, before: u32) -> u32 {
        checksum_of(self.start, self.length, before)
    }

    /// A part of it.
    ///
    /// # Panics
    /// When the part is not inside.
    pub fn part(&self, offset: usize, length: usize) -> Self {
        assert!(offset <= self.length && length <= self.length - offset);
        // SAFETY: `offset` is inside the lent memory, as asserted.
        Self { start: unsafe { self.start.add(offset) }, length, mark: self.mark }
    }
}

impl SendBuffer {
    /// Copies the bytes into a part of a larger message.
    ///
    /// # Panics
    /// When `into` has another length.
    pub fn copy_to(&self, into: &mut [u8]) {
        assert_eq!(into.len(), self.length);
        // SAFETY: the memory is readable for `length` bytes by the contract of the constructor, and
        // `into`, borrowed mutably and as long, is no part of it.
        unsafe { ptr::copy_nonoverlapping(self.start, into.as_mut_ptr(), self.length) };
    }
}

impl RecvBuffer {
    /// Copies a message that is sent, to keep it.
    ///
    /// # Panics
    /// When `message` has another length.
    pub(crate) fn copy_message(&self, message: SendBuffer) {
        assert_eq!(message.length, self.length);
        // SAFETY: both are lent for this many bytes by the contracts of their constructors: one to be read, the other to be
        // written by this buffer alone, so they do not overlap.
        unsafe { ptr::copy_nonoverlapping(message.start, self.start, self.length) };
    }

    /// The same memory, to send from what was copied there.
    pub(crate) fn as_send(&self) -> SendBuffer {
        SendBuffer { start: self.start, length: self.length, mark: None }
    }

    /// Copies bytes from a part of a larger message, for a receiver that may poll them meanwhile.
    ///
    /// # Panics
    /// When `from` has another length.
    pub fn copy_from(&self, from: &[u8]) {
        assert_eq!(from.len(), self.length);
        // SAFETY: the memory is this buffer's to write for `length` bytes by the contract of the
        // constructor, and `from`, which is as long, is no part of it. Others may only poll it.
        unsafe { copy_to_polled(from.as_ptr(), self.start, self.length) };
    }
}

impl SendBuffer {
    /// Its address, for devices.
    pub(crate) fn address(&self) -> u64 {
        self.start.addr() as u64
    }

    /// Registers it with a device, which reads it. The registration is dropped before the request is reported.
    pub(crate) fn register(
        &self,
        context: &Arc<Context>,
    ) -> Result<MemoryRegion, evenkeel_verbs::Error> {
        // SAFETY: the memory stays as long as the request is not reported by the contract of the constructor, which is
        // longer than the registration; it is only read.
        unsafe {
            MemoryRegion::register(context, self.start.cast_mut(), self.length, Access::LocalRead)
        }
    }
}

impl RecvBuffer {
    /// Its address, for devices.
    pub(crate) fn address(&self) -> u64 {
        self.start.addr() as u64
    }

    /// Registers it with a device, which the peer writes through. The registration is dropped before the request is
    /// reported, or is the caller's.
    pub(crate) fn register(
        &self,
        context: &Arc<Context>,
    ) -> Result<MemoryRegion, evenkeel_verbs::Error> {
        // SAFETY: the memory is the request's alone until that is reported, and stays until a registration is dropped, by
        // the contract of the constructor.
        unsafe { MemoryRegion::register(context, self.start, self.length, Access::RemoteReadWrite) }
    }
}

/// The checksum of lent memory, continued from `before`.
fn checksum_of(start: *const u8, length: usize, mut before: u32) -> u32 {
    // Through a copy: no reference to lent memory may exist.
    let mut block = [0; 4096];
    let mut done = 0;
    while done < length {
        let part = (length - done).min(block.len());
        // SAFETY: the callers' buffers are readable for `length` bytes by the contract of their constructors, as long as
        // their requests are not reported. Every caller that asks for a checksum ensures that. The block is on this stack
        // and at least as long as `part`.
        unsafe { ptr::copy_nonoverlapping(start.add(done), block.as_mut_ptr(), part) };
        before = evenkeel_protocol::checksum(before, &block[..part]);
        done += part;
    }
    before
}

impl RecvBuffer {
    /// Lends `length` bytes from `start`.
    ///
    /// # Safety
    /// The memory must stay writable, and nothing else may write to it, until the request made with it has been reported as
    /// done or failed by `Request::test`, or its connection has been closed, whichever is first. A caller that makes
    /// requests of its own with parts of the buffer reports to its own caller in the same way. Registered memory must stay
    /// mapped until the registration is dropped, and no reference to it may exist while messages are received there.
    pub unsafe fn new(start: *mut u8, length: usize) -> Self {
        Self { start, length, mark: None }
    }

    /// The same memory, of a message whose chunks are to be observed.
    pub fn with_mark(self, mark: Option<MessageMark>) -> Self {
        Self { mark, ..self }
    }

    pub(crate) fn mark(&self) -> Option<MessageMark> {
        self.mark
    }

    /// Its first byte.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start
    }

    /// Lends static memory.
    pub fn from_static(bytes: &'static mut [u8]) -> Self {
        Self { start: bytes.as_mut_ptr(), length: bytes.len(), mark: None }
    }

    /// Number of bytes lent.
    pub fn length(&self) -> usize {
        self.length
    }

    /// The checksum of its bytes, continued from `before`.
    #[cfg(test)]
    pub(crate) fn checksum(&self, before: u32) -> u32 {
        checksum_of(self.start, self.length, before)
    }

    /// A part of it.
    ///
    /// # Panics
    /// When the part is not inside.
    pub fn part(&self, offset: usize, length: usize) -> Self {
        assert!(offset <= self.length && length <= self.length - offset);
        // SAFETY: `offset` is inside the lent memory, as asserted.
        Self { start: unsafe { self.start.add(offset) }, length, mark: self.mark }
    }
}

/// Memory of this crate to send from.
pub(crate) struct Memory {
    start: *mut u8,
    length: usize,
}

// SAFETY: the memory is owned, and accessed only through the buffers that are lent of it.
unsafe impl Send for Memory {}

impl Memory {
    pub(crate) fn new(length: usize) -> Self {
        let memory = Box::into_raw(vec![0; length].into_boxed_slice());
        Self { start: memory.cast(), length }
    }

    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// Lends `length` bytes from `at` on. They are valid until this is dropped, and the buffer's alone until they are lent again.
    /// The caller ensures that it is not used longer, as for every buffer.
    ///
    /// # Panics
    /// When they are not inside.
    pub(crate) fn lend(&mut self, at: usize, length: usize) -> RecvBuffer {
        RecvBuffer { start: self.start, length: self.length, mark: None }.part(at, length)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let memory = ptr::slice_from_raw_parts_mut(self.start, self.length);
        // SAFETY: it came from a box of this length in `new` and is given back once.
        drop(unsafe { Box::from_raw(memory) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "offset <= self.length")]
    fn a_part_cannot_leave_its_buffer() {
        SendBuffer::from_static(b"abc").part(2, 2);
    }
}
