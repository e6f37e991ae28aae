//! What a host of plugins does with its own process: it forks, and asks the C library for its
//! memory.

use std::ffi::c_int;
use std::ptr;
use std::time::Duration;

use libloading::os::unix::Library;

use crate::error::Result;

/// Result of `mallinfo2(3)`.
#[repr(C)]
struct MallocInfo {
    /// `arena`, `ordblks`, `smblks`, `hblks`
    _before: [usize; 4],
    /// Bytes in blocks of their own.
    hblkhd: usize,
    /// `usmblks`, `fsmblks`
    _between: [usize; 2],
    /// Bytes in use of the heaps.
    uordblks: usize,
    /// `fordblks`, `keepcost`
    _after: [usize; 2],
}

/// Bytes that are allocated in the C library's heaps, which Rust and plugins share. None before
/// glibc 2.33.
pub(crate) fn allocated_bytes() -> Option<u64> {
    let library = Library::this();
    // SAFETY: the C library's function of this name has this type.
    let info =
        unsafe { library.get::<unsafe extern "C" fn() -> MallocInfo>(b"mallinfo2\0") }.ok()?;
    // SAFETY: it takes locks of its own, and touches no memory in use.
    let info = unsafe { info() };
    Some((info.hblkhd + info.uordblks) as u64)
}

/// Gives the system the memory back that the C library's heaps have free. Nothing where they
/// cannot.
pub(crate) fn give_back_free_memory() {
    let library = Library::this();
    // SAFETY: the C library's function of this name has this type.
    let trim = unsafe { library.get::<unsafe extern "C" fn(usize) -> c_int>(b"malloc_trim\0") };
    if let Ok(trim) = trim {
        // SAFETY: it takes locks of its own, and touches no memory in use.
        unsafe { trim(0) };
    }
}

/// Forks a child that keeps copies of all descriptors and memory, does nothing, and ends after this
/// time. As a data loader that never executes a program. Returns its process id.
///
/// # Errors
/// When the system has no room for a process.
pub(crate) fn fork_idle_child(time: Duration) -> Result<i32> {
    let milliseconds = c_int::try_from(time.as_millis()).unwrap_or(c_int::MAX);
    // SAFETY: the child calls only functions that are safe after a fork of a process with threads.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: no descriptor is passed.
            unsafe { libc::poll(ptr::null_mut(), 0, milliseconds) };
            // SAFETY: it ends the child at once.
            unsafe { libc::_exit(0) }
        }
        -1 => Err(format!("cannot fork: {}", std::io::Error::last_os_error())),
        child => Ok(child),
    }
}
