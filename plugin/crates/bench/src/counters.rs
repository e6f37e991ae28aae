//! What this process uses: processor time, wake-ups, descriptors, threads, memory.

use std::fs;
use std::io;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::plugin_host::process::allocated_bytes;

/// What a process has used since it started, and what it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
pub(crate) struct Counters {
    /// Seconds of a processor, of all threads, with their system calls.
    pub(crate) cpu_s: f64,
    /// How often a thread that still runs began to wait.
    pub(crate) wakeups: u64,
    pub(crate) descriptors: u64,
    pub(crate) threads: u64,
    /// Resident memory.
    pub(crate) resident_kib: u64,
    /// Allocated and not freed; 0 where the C library does not say.
    pub(crate) allocated_kib: u64,
}

impl Counters {
    /// Reads them. Counting thousands of descriptors takes time.
    ///
    /// # Errors
    /// When /proc cannot be read.
    pub(crate) fn now() -> Result<Self> {
        let entries = |folder: &str| {
            let entries = fs::read_dir(folder).map_err(failed(folder))?;
            Ok::<_, String>(entries.count() as u64)
        };
        let status = "/proc/self/status";
        let memory = field(&fs::read_to_string(status).map_err(failed(status))?, "VmRSS:");
        Ok(Self {
            cpu_s: cpu_seconds(),
            wakeups: wakeups()?,
            // One is that of the folder.
            descriptors: entries("/proc/self/fd")?.saturating_sub(1),
            threads: entries("/proc/self/task")?,
            resident_kib: memory,
            allocated_kib: allocated_bytes().unwrap_or(0) >> 10,
        })
    }
}

/// Seconds of a processor that the threads of this process have used, with their system calls.
pub(crate) fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// How often the threads of this process began to wait.
///
/// # Errors
/// When /proc cannot be read.
pub(crate) fn wakeups() -> Result<u64> {
    let tasks = "/proc/self/task";
    let mut waits = 0;
    for thread in fs::read_dir(tasks).map_err(failed(tasks))? {
        let path = thread.map_err(failed(tasks))?.path().join("status");
        // A thread that ends meanwhile has no file.
        let status = fs::read_to_string(path).unwrap_or_default();
        waits += field(&status, "voluntary_ctxt_switches:");
    }
    Ok(waits)
}

fn failed(file: &str) -> impl Fn(io::Error) -> String {
    move |error| format!("{file}: {error}")
}

/// A number of a file of /proc; 0 if it is not there.
fn field(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_grow_with_descriptors_and_allocations() {
        let before = Counters::now().unwrap();
        let kept = (fs::File::open("/dev/null").unwrap(), vec![1u8; 40 << 20]);
        let after = Counters::now().unwrap();
        // Other tests run beside this one.
        assert!(before.descriptors > 0 && before.threads > 0 && before.resident_kib > 0);
        assert!(after.cpu_s > before.cpu_s, "{after:?}");
        if after.allocated_kib > 0 {
            assert!(after.allocated_kib > 40 << 10, "{after:?}");
        }
        drop(kept);
    }
}
