//! Interrupted calls, random bytes and signals.

use std::io;
use std::mem;
use std::ptr;
use std::time::Duration;

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

/// What a thread has used of processors so far.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ThreadUsage {
    /// Time on a processor.
    pub(crate) ran: Duration,
    /// Number of times that it gave its processor up in order to wait for something.
    pub(crate) sleeps: libc::c_long,
}

/// The usage of the calling thread (getrusage(2), `RUSAGE_THREAD`).
pub(crate) fn thread_usage() -> io::Result<ThreadUsage> {
    // SAFETY: a zeroed rusage is valid, since all its fields are integers, and getrusage writes no
    // more than one.
    let (result, usage) = unsafe {
        let mut usage: libc::rusage = mem::zeroed();
        (libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage), usage)
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let time = |time: libc::timeval| {
        Duration::from_secs(time.tv_sec as u64) + Duration::from_micros(time.tv_usec as u64)
    };
    let ran = time(usage.ru_utime) + time(usage.ru_stime);
    Ok(ThreadUsage { ran, sleeps: usage.ru_nvcsw })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_bytes_differ() {
        assert_ne!(random::<16>().unwrap(), random::<16>().unwrap());
    }

    #[test]
    fn thread_usage_counts_work_and_sleep() {
        let before = thread_usage().unwrap();
        let mut now = before;
        while now.ran < before.ran + Duration::from_millis(20) {
            now = thread_usage().unwrap();
        }
        let before = thread_usage().unwrap();
        std::thread::sleep(Duration::from_millis(1));
        let after = thread_usage().unwrap();
        assert!(after.sleeps > before.sleeps && after.ran >= before.ran, "{before:?} {after:?}");
    }
}
