//! Memory regions: memory that a device, and peers that have its key, may access.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::sync::Arc;

use crate::ffi;
use crate::pages::Pages;
use crate::{Context, Error};

/// The access that a memory region grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The device reads it, to send.
    LocalRead,
    /// The device reads and writes it, and so do peers that have its key.
    RemoteReadWrite,
}

impl Access {
    fn flags(self) -> u32 {
        match self {
            // Reading needs no flag.
            Self::LocalRead => 0,
            Self::RemoteReadWrite => {
                ffi::ACCESS_LOCAL_WRITE | ffi::ACCESS_REMOTE_WRITE | ffi::ACCESS_REMOTE_READ
            }
        }
    }
}

/// The bytes of a memory region, and the access to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRange {
    start: u64,
    length: usize,
    access: Access,
}

impl MemoryRange {
    /// The address of its first byte.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Number of bytes.
    pub fn length(&self) -> usize {
        self.length
    }

    /// The access to them.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Whether it grants this access.
    pub fn allows(&self, access: Access) -> bool {
        self.access == Access::RemoteReadWrite || access == Access::LocalRead
    }

    /// Whether it contains all of these bytes.
    pub fn covers(&self, start: u64, length: usize) -> bool {
        let offset = start.checked_sub(self.start);
        offset.is_some_and(|offset| {
            offset <= self.length as u64 && length as u64 <= self.length as u64 - offset
        })
    }
}

/// A memory region (MR). Dropping it ends the registration.
pub struct MemoryRegion {
    context: Arc<Context>,
    raw: *mut ffi::Mr,
    range: MemoryRange,
}

// SAFETY: the library may be called from any thread, and the keys never change.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// Registers memory. Where the device supports it, its writes may be reordered on the bus
    /// (relaxed ordering), but not with completions.
    ///
    /// # Errors
    /// When the memory is not the process's or may not be locked (ulimit -l), or when the device
    /// has no room.
    ///
    /// # Safety
    /// The memory must stay mapped until the region is dropped. No reference may exist to the part
    /// that peers are asked to write to.
    pub unsafe fn register(
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
            // SAFETY: the domain is the context's; the caller vouches for the memory.
            raw = unsafe {
                register(domain, start.cast(), length, start.expose_provenance() as u64, relaxed)
            };
        }
        if raw.is_null() {
            // SAFETY: as above.
            raw = unsafe { (functions.reg_mr)(domain, start.cast(), length, flags as i32) };
        }
        let start = start.expose_provenance() as u64;
        Self::registered(context, raw, MemoryRange { start, length, access })
    }

    /// Registers memory of another device, such as a GPU, by its DMA-BUF: `length` bytes from
    /// `offset` in the buffer, which have the address `start` in this process.
    ///
    /// # Errors
    /// When the library, the kernel or the device does not support it.
    pub fn register_dma_buffer(
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
        let flags = Access::RemoteReadWrite.flags();
        let register = |flags| {
            // SAFETY: the domain is the context's and the descriptor is open. The kernel keeps the
            // buffer, which is not memory of this process.
            unsafe {
                register(context.domain, offset, length, start, buffer.as_raw_fd(), flags as i32)
            }
        };
        let mut raw = register(flags | ffi::ACCESS_RELAXED_ORDERING);
        if raw.is_null() {
            raw = register(flags);
        }
        Self::registered(
            context,
            raw,
            MemoryRange { start, length, access: Access::RemoteReadWrite },
        )
    }

    /// Whether the library, the kernel and the device support DMA-BUF. Tries an invalid descriptor:
    /// where DMA-BUF is not supported, that is the error, and not the descriptor.
    pub fn supports_dma_buffers(context: &Arc<Context>) -> bool {
        let Some(register) = context.functions.reg_dmabuf_mr else { return false };
        // SAFETY: the domain is the context's; -1 is not a descriptor, so nothing is registered.
        let raw = unsafe { register(context.domain, 0, 0, 0, -1, 0) };
        let why = std::io::Error::last_os_error().raw_os_error();
        raw.is_null()
            && !matches!(why, Some(libc::EOPNOTSUPP | libc::EPROTONOSUPPORT | libc::ENOSYS))
    }

    fn registered(
        context: &Arc<Context>,
        raw: *mut ffi::Mr,
        range: MemoryRange,
    ) -> Result<Self, Error> {
        if raw.is_null() {
            let what = format!("cannot register {} bytes with {}", range.length, context.name());
            return Err(match Error::last(what) {
                Error::Call { what, error } if error.raw_os_error() == Some(libc::ENOMEM) => {
                    let what =
                        format!("{what} (the limit of locked memory, ulimit -l, may be too low)");
                    Error::Call { what, error }
                }
                other => other,
            });
        }
        Ok(Self { context: Arc::clone(context), raw, range })
    }

    /// Whether it is registered with this open device.
    pub fn is_of(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.context, context)
    }

    /// Its bytes, and the access to them.
    pub fn range(&self) -> MemoryRange {
        self.range
    }

    /// The address of its first byte.
    pub fn start(&self) -> u64 {
        self.range.start
    }

    /// The key with which peers access it (`rkey`).
    pub fn remote_key(&self) -> u32 {
        // SAFETY: the registration ends when this is dropped.
        unsafe { (*self.raw).rkey }
    }

    pub(crate) fn local_key(&self) -> u32 {
        // SAFETY: the registration ends when this is dropped.
        unsafe { (*self.raw).lkey }
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: it was registered once and is deregistered once.
        unsafe { (self.context.functions.dereg_mr)(self.raw) };
    }
}

/// Registered memory of this process. Peers write to it and it is copied from, or it is copied to
/// and then sent. No reference to its bytes ever exists.
pub struct StagingBuffer {
    /// One for each device that accesses it. Dropped before the memory is freed.
    regions: Vec<MemoryRegion>,
    pages: Pages,
    length: usize,
}

impl StagingBuffer {
    /// A buffer of `length` bytes, all zero, for these devices: at least one.
    ///
    /// # Errors
    /// As [`MemoryRegion::register`].
    ///
    /// # Panics
    /// Without a device.
    pub fn new<'a>(
        contexts: impl IntoIterator<Item = &'a Arc<Context>>,
        length: usize,
    ) -> Result<Self, Error> {
        let pages = Pages::new(length).map_err(|error| Error::Call {
            what: format!("cannot allocate {length} bytes for RDMA"),
            error,
        })?;
        let mut buffer = Self { regions: Vec::new(), pages, length };
        buffer.reregister(contexts)?;
        Ok(buffer)
    }

    /// Registers it with other devices instead, at least one. Its bytes stay the same.
    ///
    /// # Errors
    /// As [`MemoryRegion::register`]; the previous registrations then stay.
    ///
    /// # Panics
    /// Without a device.
    pub fn reregister<'a>(
        &mut self,
        contexts: impl IntoIterator<Item = &'a Arc<Context>>,
    ) -> Result<(), Error> {
        let start = self.pages.start();
        let mut regions: Vec<MemoryRegion> = Vec::new();
        for context in contexts {
            // Two ports of a device share its registration.
            if regions.iter().any(|region| region.is_of(context)) {
                continue;
            }
            // SAFETY: the buffer owns the memory, drops the regions first and gives out no
            // reference.
            regions.push(unsafe {
                MemoryRegion::register(context, start, self.length, Access::RemoteReadWrite)
            }?);
        }
        assert!(!regions.is_empty());
        self.regions = regions;
        Ok(())
    }

    /// Its memory region with a device.
    ///
    /// # Panics
    /// When it is not registered with the device.
    pub fn region(&self, context: &Arc<Context>) -> &MemoryRegion {
        match self.regions.iter().find(|region| region.is_of(context)) {
            Some(region) => region,
            None => panic!("a staging buffer is not registered with {}", context.name()),
        }
    }

    /// The address of the byte at `offset`.
    pub fn address(&self, offset: usize) -> u64 {
        self.pages.start().expose_provenance() as u64 + offset as u64
    }

    /// Copies bytes out. What a peer wrote is there once its completion was polled.
    ///
    /// # Panics
    /// When they are not inside the buffer.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        assert!(offset <= self.length && into.len() <= self.length - offset);
        // SAFETY: the bytes are inside the owned memory, as asserted, and `into` is elsewhere.
        unsafe {
            ptr::copy_nonoverlapping(self.pages.start().add(offset), into.as_mut_ptr(), into.len())
        };
    }

    /// Copies bytes in, to be sent. The caller first waits for the completion of what was sent from
    /// there before.
    ///
    /// # Panics
    /// When they are not inside the buffer.
    pub fn write(&self, offset: usize, from: &[u8]) {
        assert!(offset <= self.length && from.len() <= self.length - offset);
        // SAFETY: as for `read`.
        unsafe {
            ptr::copy_nonoverlapping(from.as_ptr(), self.pages.start().add(offset), from.len())
        };
    }
}

impl Drop for StagingBuffer {
    fn drop(&mut self) {
        // Before the memory is freed.
        self.regions.clear();
    }
}
