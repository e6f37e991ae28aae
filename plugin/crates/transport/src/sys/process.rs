//! Interrupted calls, random bytes and signals.

use std::io;
use std::mem;
use std::num::NonZero;
use std::ptr;

/// Repeats a call that a signal interrupted.
pub(crate) fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Fills an array with random bytes from the kernel.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        let rest = &mut bytes[filled..];
        filled += uninterrupted(|| {
            // SAFETY: pointer and length are those of `rest`.
            let got = unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) };
            usize::try_from(got).map_err(|_| io::Error::last_os_error())
        })?;
    }
    Ok(bytes)
}

/// Keeps the process's signal handlers, such as Python's, off the calling thread.
pub(crate) fn block_signals() {
    // SAFETY: a zeroed sigset_t is valid memory for sigfillset to initialise; pthread_sigmask
    // reads it and changes the mask of this thread only.
    unsafe {
        let mut all: libc::sigset_t = mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, ptr::null_mut());
    }
}

/// Whether the host has a processor that runs nothing now. False if that is not known.
pub(crate) fn has_idle_processor() -> bool {
    // proc_loadavg(5), such as "0.20 0.18 0.12 1/80 11206": 1 of 80 threads is running, this one.
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let running = text.split([' ', '/']).nth(3).and_then(|running| running.parse().ok());
    let processors = std::thread::available_parallelism().map_or(0, NonZero::get);
    running.is_some_and(|running: usize| running < processors)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_bytes_differ() {
        assert_ne!(random::<16>().unwrap(), random::<16>().unwrap());
    }
}
