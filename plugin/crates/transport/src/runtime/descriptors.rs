//! Raises this process's limit of file descriptors, and reports when none are left.

use std::io;
use std::sync::Once;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::telemetry::log::Log;

/// Raises the soft limit of open files to the hard limit, once per process. Container runtimes
/// often start processes with a soft limit of 1024, and each flow needs a descriptor.
pub(crate) fn raise_limit(log: &dyn Log) {
    static RAISED: Once = Once::new();
    RAISED.call_once(|| {
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        if current == maximum {
            return;
        }
        let (old, new) = (show(current), show(maximum));
        match setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
            Ok(()) => log.info(&format!(
                "evenkeel: the limit of open files was {old} and is now {new}, the hard limit"
            )),
            Err(error) => log.info(&format!(
                "evenkeel: the limit of open files stays {old}: it cannot be raised to {new}: {error}"
            )),
        }
    });
}

/// Whether a call failed for lack of descriptors, ports or socket memory, which may pass.
pub(crate) fn is_shortage(error: &io::Error) -> bool {
    advice(error).is_some()
}

/// Logs which resource ran out and what to do, once per process.
pub(crate) fn report_shortage(error: &io::Error, log: &dyn Log) {
    static REPORTED: Once = Once::new();
    let Some(advice) = advice(error) else { return };
    REPORTED.call_once(|| {
        log.warn(&format!("evenkeel: new connections wait: {error}: {advice}"));
    });
}

fn advice(error: &io::Error) -> Option<String> {
    Some(match error.raw_os_error()? {
        libc::EMFILE => format!(
            "this process may have {} open files: raise its hard limit (ulimit -Hn, LimitNOFILE), or set EVENKEEL_FLOWS to fewer flows",
            show(getrlimit(Resource::Nofile).current)
        ),
        libc::ENFILE => "raise fs.file-max on this host".to_owned(),
        libc::ENOBUFS | libc::ENOMEM => {
            "the kernel has no memory for sockets: raise net.ipv4.tcp_mem or the memory limit"
                .to_owned()
        }
        libc::EADDRNOTAVAIL | libc::EAGAIN => {
            "no local port is free: widen net.ipv4.ip_local_port_range".to_owned()
        }
        _ => return None,
    })
}

fn show(limit: Option<u64>) -> String {
    limit.map_or_else(|| "unlimited".to_owned(), |limit| limit.to_string())
}
