//! The limit of locked memory (`RLIMIT_MEMLOCK`). Memory that is registered with an RDMA device is
//! locked.

use std::fs;

use rustix::process::{Resource, getrlimit};

/// Minimum limit in bytes: less than any training needs, and more than container runtimes give by
/// default. Pre-flight checks nodes for the same limit.
const MIN_MEMLOCK: u64 = 64 << 20;
/// Number of the capability that lifts the limit (capabilities(7)).
const CAP_IPC_LOCK: u32 = 14;

/// Fails with what to do about it if this process may lock too little memory.
pub(super) fn check() -> Result<(), String> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    check_limit(getrlimit(Resource::Memlock).current, &status)
}

/// As [`check`], given the limit in bytes, if there is one, and the process's status file
/// (proc_pid_status(5)).
fn check_limit(limit: Option<u64>, status: &str) -> Result<(), String> {
    match limit {
        Some(bytes) if bytes < MIN_MEMLOCK && !is_exempt(status) => Err(format!(
            "RDMA needs locked memory, of which this process may have {} KiB: raise the limit (ulimit -l; in Kubernetes LimitMEMLOCK of the container runtime's service), or give it the capability IPC_LOCK",
            bytes >> 10
        )),
        _ => Ok(()),
    }
}

/// Whether the process has the capability that lifts the limit.
fn is_exempt(status: &str) -> bool {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let set = line.and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    set.is_some_and(|set| set >> CAP_IPC_LOCK & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memlock_exemption_needs_the_effective_capability() {
        assert!(is_exempt("Name:\tx\nCapPrm:\t0000000000000000\nCapEff:\t0000000000004000\n"));
        assert!(is_exempt("CapEff:\t000001ffffffffff\n"));
        assert!(
            !is_exempt("CapPrm:\t000001ffffffffff\nCapEff:\t00000000a80425fb\n"),
            "a container"
        );
        assert!(!is_exempt(""));
    }

    #[test]
    fn memlock_limit_is_checked_without_the_capability() {
        let error = check_limit(Some(8 << 20), "").unwrap_err();
        assert!(error.contains("8192 KiB") && error.contains("ulimit -l"), "{error}");
        assert_eq!(check_limit(Some(8 << 20), "CapEff:\t0000000000004000\n"), Ok(()));
        assert_eq!(check_limit(Some(MIN_MEMLOCK), ""), Ok(()));
        assert_eq!(check_limit(None, ""), Ok(()));
    }
}
