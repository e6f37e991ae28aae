//! Memory of whole pages.

use std::io;
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use rustix::param::page_size;

/// Memory that starts at a page and shares no page with anything else.
///
/// rdma-core may withhold the pages of registered memory from child processes (see
/// [`crate::fork_protection`]). If other objects were on these pages, a child that uses them would
/// end with SIGSEGV.
pub(crate) struct Pages {
    start: *mut u8,
    /// A multiple of a page.
    length: usize,
}

// SAFETY: the memory is owned, and only its address is given out.
unsafe impl Send for Pages {}
// SAFETY: as above. Bytes that a peer or another thread writes while they are copied may come out
// torn, as plain bytes.
unsafe impl Sync for Pages {}

impl Pages {
    /// Pages for this number of bytes, all zero.
    pub(crate) fn new(bytes: usize) -> io::Result<Self> {
        let length = bytes.max(1).checked_next_multiple_of(page_size());
        let length = length.ok_or(io::ErrorKind::OutOfMemory)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping touches no other memory.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), length, access, MapFlags::PRIVATE) }?;
        Ok(Self { start: start.cast(), length })
    }

    /// The first byte.
    pub(crate) fn start(&self) -> *mut u8 {
        self.start
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping is owned and given back once. An error would mean that it is none.
        let _ = unsafe { munmap(self.start.cast(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn staging_pages_are_aligned_and_shared_with_nothing() {
        let sizes = [0, 1, 64, page_size() - 1, page_size(), page_size() + 1, 300_000];
        let mut taken = std::collections::BTreeSet::new();
        let all: Vec<Pages> = sizes.iter().map(|size| Pages::new(*size).unwrap()).collect();
        for (pages, size) in all.iter().zip(sizes) {
            let start = pages.start().addr();
            assert_eq!(start % page_size(), 0, "{size} bytes at {start:#x}");
            assert!(pages.length % page_size() == 0 && pages.length >= size.max(1));
            for page in (start..start + pages.length).step_by(page_size()) {
                assert!(taken.insert(page), "{size} bytes share page {page:#x}");
            }
        }
        assert!(Pages::new(usize::MAX).is_err());
    }
}
