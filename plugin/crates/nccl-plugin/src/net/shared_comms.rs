//! Whether NCCL may share a connection between GPUs.
//!
//! With PXN, one process sends the messages of several GPUs of its host. NCCL shares a connection between them if `maxRecvs` is
//! above 1 (`src/transport/net.cc`). Before 2.27 it asks for one connection for each GPU, and each end keeps the one that it gets
//! first. The two ends may keep different ones here, since connections are opened while nobody polls them, and then wait for each
//! other for ever. Since 2.27 NCCL asks for one.

use std::ffi::{c_int, c_void};
use std::mem::{self, MaybeUninit};
use std::sync::atomic::{AtomicBool, Ordering};

use evenkeel_nccl_abi::Logger;
use evenkeel_transport::{Log, MAX_RECVS};

use crate::logger::LOG;

/// `NCCL_VERSION_CODE` of 2.27.3, the first release of 2.27.
const ASKS_ONCE: c_int = 22703;

/// Whether the NCCL that has called `init` last asks for one connection. That of a process is always the same.
static IS_SAFE: AtomicBool = AtomicBool::new(false);

/// Notes which NCCL calls `init` of a table before v11: the one that the logger is part of.
pub(super) fn note_caller(logger: Option<Logger>) {
    let version = logger.and_then(version_of);
    let is_safe = version.is_some_and(|version| version >= ASKS_ONCE);
    IS_SAFE.store(is_safe, Ordering::Relaxed);
    if !is_safe {
        let which = version.map_or_else(|| "of unknown version".to_owned(), words);
        LOG.info(&format!(
            "evenkeel: NCCL {which} opens a connection for each GPU: before 2.27 it cannot share them safely"
        ));
    }
}

/// Notes that NCCL calls `init` of v11 or later, which 2.28 was the first to have.
pub(super) fn note_recent_caller() {
    IS_SAFE.store(true, Ordering::Relaxed);
}

/// `maxRecvs` of all devices. With 1, NCCL shares no connections.
pub(super) fn max_recvs() -> c_int {
    if IS_SAFE.load(Ordering::Relaxed) { MAX_RECVS as c_int } else { 1 }
}

/// A version code as people write it.
fn words(code: c_int) -> String {
    format!("{}.{}.{}", code / 10000, code / 100 % 100, code % 100)
}

/// The version of the NCCL whose function this is, such as 22105. `None` where it exports no `ncclGetVersion`, or is part of the
/// program itself.
fn version_of(logger: Logger) -> Option<c_int> {
    let mut place = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: any address may be asked about, and there is a place for the answer.
    let found = unsafe { libc::dladdr(logger as *const c_void, place.as_mut_ptr()) };
    // SAFETY: all zeros are a valid value as well: null pointers.
    let file = unsafe { place.assume_init() }.dli_fname;
    if found == 0 || file.is_null() {
        return None;
    }
    // SAFETY: the name is a string that lives as long as its library, which is loaded already. So none is loaded, and no code runs.
    let library = unsafe { libc::dlopen(file, libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if library.is_null() {
        return None;
    }
    // SAFETY: the library is open, and the name ends in a zero byte.
    let function = unsafe { libc::dlsym(library, c"ncclGetVersion".as_ptr()) };
    let mut version = 0;
    let is_known = !function.is_null() && {
        // SAFETY: `nccl.h` declares it so. A function's pointer has the size of any other, and this one is not null.
        let get_version = unsafe {
            mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_int) -> c_int>(function)
        };
        // SAFETY: a place for the number is passed.
        unsafe { get_version(&raw mut version) == 0 }
    };
    // SAFETY: it was opened above. Its caller keeps it loaded.
    unsafe { libc::dlclose(library) };
    is_known.then_some(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_codes_are_read() {
        assert_eq!((words(22105), words(22703)), ("2.21.5".to_owned(), "2.27.3".to_owned()));
    }
}
