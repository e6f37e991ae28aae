//! Memory that a device, and peers that know its key, may touch.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::sync::Arc;

use crate::ffi;
use crate::{Context, Error};

/// What may be done with registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The device reads it to send.
    Send,
    /// The device writes what comes, which whoever knows the key may send, and reads to send.
    All,
}

impl Access {
    fn flags(self) -> u32 {
        match self {
            // A device that only reads needs no right.
            Self::Send => 0,
            Self::All => {
                ffi::ACCESS_LOCAL_WRITE | ffi::ACCESS_REMOTE_WRITE | ffi::ACCESS_REMOTE_READ
            }
        }
    }
}

/// Which bytes are registered, and for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    start: u64,
    length: usize,
    access: Access,
}

impl Span {
    /// Whether this may be done with it.
    pub fn allows(&self, access: Access) -> bool {
        self.access == Access::All || access == Access::Send
    }

    /// Whether all of these bytes are in it.
    pub fn covers(&self, start: u64, length: usize) -> bool {
        let offset = start.checked_sub(self.start);
        offset.is_some_and(|offset| {
            offset <= self.length as u64 && length as u64 <= self.length as u64 - offset
        })
    }
}

/// Registered memory. Dropping it ends the registration.
pub struct MemoryRegion {
    context: Arc<Context>,
    raw: *mut ffi::Mr,
    span: Span,
}

// SAFETY: the library may be called from any thread, and the keys never change.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// Registers memory. Where the device can, what it writes may take the bus in any order but for completions.
    ///
    /// # Errors
    /// When the memory is not the process's, may not be locked (ulimit -l), or the device has no more room.
    ///
    /// # Safety
    /// The memory must stay mapped until the region is dropped, and nobody may hold a reference to what peers are asked to
    /// write to.
    pub unsafe fn new(
        context: &Arc<Context>,
        start: *mut u8,
        length: usize,
        access: Access,
    ) -> Result<Self, Error> {
        let (functions, domain) = (context.functions, context.domain);
        let flags = access.flags();
        let mut raw = ptr::null_mut();
        if let Some(register) = functions.reg_mr_iova2 {
            let relaxed = flags | ffi::ACCESS_RELAXED_ORDERING;
            // SAFETY: the domain is the context's; what may be done with the memory is up to the caller.
            raw = unsafe {
                register(domain, start.cast(), length, start.expose_provenance() as u64, relaxed)
            };
        }
        if raw.is_null() {
            // SAFETY: as above.
            raw = unsafe { (functions.reg_mr)(domain, start.cast(), length, flags as i32) };
        }
        let start = start.expose_provenance() as u64;
        Self::made(context, raw, Span { start, length, access })
    }

    /// Registers memory of another device, a GPU say, that a DMA buffer stands for: `length` bytes from `offset` in the
    /// buffer, which are at `start` in this process's addresses.
    ///
    /// # Errors
    /// When the library, the kernel or the device cannot do that.
    pub fn of_dma_buffer(
        context: &Arc<Context>,
        buffer: BorrowedFd<'_>,
        offset: u64,
        start: u64,
        length: usize,
    ) -> Result<Self, Error> {
        let register = context
            .functions
            .reg_dmabuf_mr
            .ok_or_else(|| Error::code("libibverbs has no ibv_reg_dmabuf_mr", libc::EOPNOTSUPP))?;
        let flags = Access::All.flags();
        let register = |flags| {
            // SAFETY: the domain is the context's and the descriptor is open; the kernel keeps the buffer, and this
            // process's memory is none of it.
            unsafe {
                register(context.domain, offset, length, start, buffer.as_raw_fd(), flags as i32)
            }
        };
        let mut raw = register(flags | ffi::ACCESS_RELAXED_ORDERING);
        if raw.is_null() {
            raw = register(flags);
        }
        Self::made(context, raw, Span { start, length, access: Access::All })
    }

    /// Whether the library, the kernel and the device can do that. Asks them for a buffer that is none: only who cannot at
    /// all does not look at it.
    pub fn can_be_of_dma_buffers(context: &Arc<Context>) -> bool {
        let Some(register) = context.functions.reg_dmabuf_mr else { return false };
        // SAFETY: the domain is the context's; -1 is no descriptor, so nothing is registered.
        let raw = unsafe { register(context.domain, 0, 0, 0, -1, 0) };
        let why = std::io::Error::last_os_error().raw_os_error();
        raw.is_null()
            && !matches!(why, Some(libc::EOPNOTSUPP | libc::EPROTONOSUPPORT | libc::ENOSYS))
    }

    fn made(context: &Arc<Context>, raw: *mut ffi::Mr, span: Span) -> Result<Self, Error> {
        if raw.is_null() {
            let what = format!("cannot register {} bytes with {}", span.length, context.name());
            return Err(match Error::last(what) {
                Error::Call { what, error } if error.raw_os_error() == Some(libc::ENOMEM) => {
                    let what =
                        format!("{what} (the limit of locked memory, ulimit -l, may be too low)");
                    Error::Call { what, error }
                }
                other => other,
            });
        }
        Ok(Self { context: Arc::clone(context), raw, span })
    }

    /// Which bytes, and for what.
    pub fn span(&self) -> Span {
        self.span
    }

    /// Where it begins.
    pub fn start(&self) -> u64 {
        self.span.start
    }

    /// The key with which peers reach it.
    pub fn remote_key(&self) -> u32 {
        // SAFETY: the registration is this one's until it is dropped.
        unsafe { (*self.raw).rkey }
    }

    pub(crate) fn local_key(&self) -> u32 {
        // SAFETY: the registration is this one's until it is dropped.
        unsafe { (*self.raw).lkey }
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: it was registered once and is given back once.
        unsafe { (self.context.functions.dereg_mr)(self.raw) };
    }
}

/// Registered memory of one's own, for what peers write and what is copied out, or in before it is sent. No reference to
/// its bytes ever exists.
pub struct StagingBuffer {
    /// Dropped before the memory is given back.
    region: Option<MemoryRegion>,
    start: *mut u8,
    length: usize,
}

// SAFETY: the memory is owned; it is only copied from and to.
unsafe impl Send for StagingBuffer {}
// SAFETY: bytes that a peer or another thread writes while they are copied may come out torn, as plain bytes.
unsafe impl Sync for StagingBuffer {}

impl StagingBuffer {
    /// So many bytes, all zero.
    ///
    /// # Errors
    /// As [`MemoryRegion::new`].
    pub fn new(context: &Arc<Context>, length: usize) -> Result<Self, Error> {
        let memory = Box::into_raw(vec![0u8; length].into_boxed_slice());
        let mut mailbox = Self { region: None, start: memory.cast(), length };
        // SAFETY: the memory is owned by the mailbox, which drops the region first and hands out no reference.
        let region = unsafe { MemoryRegion::new(context, mailbox.start, length, Access::All) }?;
        mailbox.region = Some(region);
        Ok(mailbox)
    }

    /// Registers it with another device instead. Its bytes stay.
    ///
    /// # Errors
    /// As [`MemoryRegion::new`]; it is then registered as before.
    pub fn move_to(&mut self, context: &Arc<Context>) -> Result<(), Error> {
        // SAFETY: as in `new`.
        let region = unsafe { MemoryRegion::new(context, self.start, self.length, Access::All) }?;
        self.region = Some(region);
        Ok(())
    }

    /// Its registration.
    pub fn region(&self) -> &MemoryRegion {
        match &self.region {
            Some(region) => region,
            // `new` hands out none without.
            None => unreachable!("a mailbox is registered"),
        }
    }

    /// Where the byte at `offset` is.
    pub fn address(&self, offset: usize) -> u64 {
        self.region().start() + offset as u64
    }

    /// Copies bytes out. What came before the completion that tells of them is there.
    ///
    /// # Panics
    /// When they are not inside.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        assert!(offset <= self.length && into.len() <= self.length - offset);
        // SAFETY: the bytes are inside the owned memory, as asserted, and `into` is elsewhere.
        unsafe { ptr::copy_nonoverlapping(self.start.add(offset), into.as_mut_ptr(), into.len()) };
    }

    /// Copies bytes in, to be sent. Whoever does so waits for the completion of what was sent from there before.
    ///
    /// # Panics
    /// When they are not inside.
    pub fn write(&self, offset: usize, from: &[u8]) {
        assert!(offset <= self.length && from.len() <= self.length - offset);
        // SAFETY: as for `read`.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), self.start.add(offset), from.len()) };
    }
}

impl Drop for StagingBuffer {
    fn drop(&mut self) {
        self.region = None;
        let memory = ptr::slice_from_raw_parts_mut(self.start, self.length);
        // SAFETY: it came from a box of this length in `new` and is given back once.
        drop(unsafe { Box::from_raw(memory) });
    }
}
