//! Log lines for NCCL's logger.

use std::ffi::{CString, c_int, c_ulong};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock};

use evenkeel_nccl_abi::{LOG_INFO, LOG_WARN, Logger, SUBSYSTEM_ALL, SUBSYSTEM_INIT_NET};
use evenkeel_transport::{Log, StderrLog};

/// The process's log. Lines before the first `init` are dropped.
pub(crate) static LOG: NcclLog =
    NcclLog { logger: RwLock::new(None), shows_warnings: AtomicBool::new(false) };

/// Writes through the logger that NCCL passed last.
pub(crate) struct NcclLog {
    logger: RwLock<Option<Logger>>,
    /// Whether NCCL shows warnings.
    shows_warnings: AtomicBool,
}

impl NcclLog {
    /// Replaces the logger by the one that an `init` was given.
    pub(crate) fn set(&self, logger: Option<Logger>) {
        *self.logger.write().unwrap_or_else(PoisonError::into_inner) = logger;
        // NCCL has set it from its files by now. It is not read later, when others may set variables.
        let level = std::env::var("NCCL_DEBUG").unwrap_or_default();
        self.shows_warnings.store(shows_warnings(&level), Ordering::Relaxed);
    }

    fn write(&self, level: c_int, subsystems: c_ulong, line: &str) {
        let logger = *self.logger.read().unwrap_or_else(PoisonError::into_inner);
        let Some(logger) = logger else { return };
        // A zero byte can only come from a name in the system. The line is logged without it.
        let line = CString::new(line.replace('\0', "?")).unwrap_or_default();
        // SAFETY: NCCL's logger may be called from any thread while NCCL is loaded, which it is as
        // long as it calls this library or keeps connections in it. The format takes one string,
        // and one is passed; all strings end in a zero byte and outlive the call.
        unsafe { logger(level, subsystems, c"evenkeel".as_ptr(), 0, c"%s".as_ptr(), line.as_ptr()) }
    }
}

impl Log for NcclLog {
    fn warn(&self, line: &str) {
        self.write(LOG_WARN, SUBSYSTEM_ALL, line);
    }

    fn info(&self, line: &str) {
        // NCCL_DEBUG=INFO shows INIT but not NET unless asked for.
        self.write(LOG_INFO, SUBSYSTEM_INIT_NET, line);
    }

    fn tell(&self, line: &str) {
        if self.shows_warnings.load(Ordering::Relaxed) {
            self.warn(line);
        } else {
            StderrLog.warn(line);
        }
    }
}

/// Whether NCCL shows warnings at this level, a value of `NCCL_DEBUG`. By default it shows none (`src/debug.cc`).
fn shows_warnings(level: &str) -> bool {
    ["WARN", "INFO", "ABORT", "TRACE"].iter().any(|shows| level.eq_ignore_ascii_case(shows))
}

/// The same log in the form that the transport takes.
pub(crate) struct SharedLog;

impl Log for SharedLog {
    fn warn(&self, line: &str) {
        LOG.warn(line);
    }

    fn info(&self, line: &str) {
        LOG.info(line);
    }

    fn tell(&self, line: &str) {
        LOG.tell(line);
    }
}

#[cfg(test)]
mod tests {
    use super::shows_warnings;

    #[test]
    fn warnings_are_shown_at_the_levels_of_nccl_that_show_them() {
        for (level, shows) in
            [("", false), ("VERSION", false), ("warn", true), ("INFO", true), ("TRACE", true)]
        {
            assert_eq!(shows_warnings(level), shows, "{level}");
        }
    }
}
