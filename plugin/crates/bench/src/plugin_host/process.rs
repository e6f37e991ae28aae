//! What a host of plugins does with its own process: it forks, and counts what it holds.

use std::ffi::c_int;
use std::fs;
use std::ptr;
use std::time::Duration;

use libloading::os::unix::Library;

use crate::error::Result;

/// What a process holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) descriptors: u64,
    pub(crate) threads: u64,
    /// Resident memory.
    pub(crate) resident_kib: u64,
    /// Allocated and not freed; 0 where the C library does not say.
    pub(crate) allocated_kib: u64,
}

/// What this process holds now. Memory that is free is given back first.
///
/// # Errors
/// When /proc cannot be read.
pub(crate) fn usage() -> Result<Usage> {
    let allocated_kib = allocated_bytes().unwrap_or(0) >> 10;
    let entries = |folder: &str| {
        let entries = fs::read_dir(folder).map_err(|error| format!("{folder}: {error}"))?;
        Ok::<_, String>(entries.count() as u64)
    };
    let status = fs::read_to_string("/proc/self/status").map_err(|error| error.to_string())?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let resident = line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok());
    Ok(Usage {
        descriptors: entries("/proc/self/fd")?,
        threads: entries("/proc/self/task")?,
        resident_kib: resident.ok_or("/proc/self/status has no VmRSS")?,
        allocated_kib,
    })
}

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

/// Bytes that are allocated in the C library's heaps, which Rust and plugins share. None before glibc 2.33.
fn allocated_bytes() -> Option<u64> {
    let library = Library::this();
    // SAFETY: the C library's function of this name has this type.
    let info =
        unsafe { library.get::<unsafe extern "C" fn() -> MallocInfo>(b"mallinfo2\0") }.ok()?;
    // SAFETY: as above.
    let trim =
        unsafe { library.get::<unsafe extern "C" fn(usize) -> c_int>(b"malloc_trim\0") }.ok()?;
    // SAFETY: both take locks of their own, and touch no memory in use.
    let info = unsafe {
        trim(0);
        info()
    };
    Some((info.hblkhd + info.uordblks) as u64)
}

/// Forks a child that keeps copies of all descriptors and memory, does nothing, and ends after this time. As a data loader
/// that never executes a program. Returns its process id.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_counts_descriptors_and_allocations() {
        let before = usage().unwrap();
        let kept = (fs::File::open("/dev/null").unwrap(), vec![1u8; 40 << 20]);
        let after = usage().unwrap();
        // Other tests run beside this one.
        assert!(before.descriptors > 0 && before.threads > 0 && before.resident_kib > 0);
        if after.allocated_kib > 0 {
            assert!(after.allocated_kib > 40 << 10, "{after:?}");
        }
        drop(kept);
    }
}
