//! How much memory this process may lock. Memory that is registered with a device is locked.

use std::fs;

use rustix::process::{Resource, getrlimit};

/// Less than any training needs, and more than what container runtimes give by default; pre-flight asks nodes for as much.
const LEAST: u64 = 64 << 20;
/// Number of the capability for which there is no limit (capabilities(7)).
const IPC_LOCK: u32 = 14;

/// Says what to do if this process may lock too little.
pub(super) fn check() -> Result<(), String> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    judge(getrlimit(Resource::Memlock).current, &status)
}

/// As [`check`] of a process with this limit in bytes, if it has one, and of which the kernel says that.
fn judge(limit: Option<u64>, status: &str) -> Result<(), String> {
    match limit {
        Some(bytes) if bytes < LEAST && !is_exempt(status) => Err(format!(
            "RDMA needs locked memory, of which this process may have {} KiB: raise the limit (ulimit -l; in Kubernetes LimitMEMLOCK of the container runtime's service), or give it the capability IPC_LOCK",
            bytes >> 10
        )),
        _ => Ok(()),
    }
}

/// Whether a process has the capability, given what the kernel says of it (proc_pid_status(5)).
fn is_exempt(status: &str) -> bool {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let set = line.and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    set.is_some_and(|set| set >> IPC_LOCK & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_capability_is_one_of_those_in_effect() {
        assert!(is_exempt("Name:\tx\nCapPrm:\t0000000000000000\nCapEff:\t0000000000004000\n"));
        assert!(is_exempt("CapEff:\t000001ffffffffff\n"));
        assert!(
            !is_exempt("CapPrm:\t000001ffffffffff\nCapEff:\t00000000a80425fb\n"),
            "a container"
        );
        assert!(!is_exempt(""));
    }

    #[test]
    fn too_low_a_limit_counts_unless_there_is_the_capability() {
        let error = judge(Some(8 << 20), "").unwrap_err();
        assert!(error.contains("8192 KiB") && error.contains("ulimit -l"), "{error}");
        assert_eq!(judge(Some(8 << 20), "CapEff:\t0000000000004000\n"), Ok(()));
        assert_eq!(judge(Some(LEAST), ""), Ok(()));
        assert_eq!(judge(None, ""), Ok(()));
    }
}
