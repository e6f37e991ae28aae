//! The plugin's error type, and its way to NCCL's result codes.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use evenkeel_nccl_abi::{
    INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, NcclResult, REMOTE_ERROR, SUCCESS,
    SYSTEM_ERROR,
};
use evenkeel_reduction::ClientError;
use evenkeel_transport::{Error, ErrorKind, Log, Owner, SettingsError};

use crate::logger::LOG;

/// Why a call fails: a result code for NCCL and a line for the log.
#[derive(Debug)]
pub(crate) struct PluginError {
    code: NcclResult,
    /// The line for the log; `None` when the transport has logged it.
    line: Option<String>,
}

impl PluginError {
    /// NCCL passed an invalid argument.
    pub(crate) fn invalid_argument(line: impl Into<String>) -> Self {
        Self { code: INVALID_ARGUMENT, line: Some(line.into()) }
    }

    /// The user's configuration does not allow it.
    pub(crate) fn invalid_usage(line: impl Into<String>) -> Self {
        Self { code: INVALID_USAGE, line: Some(line.into()) }
    }

    /// A system call failed.
    pub(crate) fn system(line: impl Into<String>) -> Self {
        Self { code: SYSTEM_ERROR, line: Some(line.into()) }
    }

    /// The reason; that of the transport's own errors is in the log only.
    pub(crate) fn reason(&self) -> &str {
        self.line.as_deref().unwrap_or("the log of the process says why")
    }

    /// The same with more text at the end.
    pub(crate) fn with(self, more: &str) -> Self {
        Self { line: self.line.map(|line| line + more), ..self }
    }

    /// NCCL broke the interface's contract, or the plugin has a defect.
    pub(crate) fn internal(line: impl Into<String>) -> Self {
        Self { code: INTERNAL_ERROR, line: Some(line.into()) }
    }
}

impl From<Error> for PluginError {
    fn from(error: Error) -> Self {
        let code = match error.kind() {
            ErrorKind::System => SYSTEM_ERROR,
            ErrorKind::Remote => REMOTE_ERROR,
            ErrorKind::Truncated | ErrorKind::Config => INVALID_USAGE,
            ErrorKind::Argument => INVALID_ARGUMENT,
            ErrorKind::Internal => INTERNAL_ERROR,
        };
        Self { code, line: (!error.is_logged()).then(|| error.to_string()) }
    }
}

impl From<ClientError> for PluginError {
    fn from(error: ClientError) -> Self {
        Self { code: REMOTE_ERROR, line: Some(error.to_string()) }
    }
}

impl From<SettingsError> for PluginError {
    fn from(error: SettingsError) -> Self {
        Self { code: INVALID_USAGE, line: Some(error.to_string()) }
    }
}

/// Runs the body of a C function. No panic leaves it, and every error is logged. A forked child of the process that made the
/// first call is refused: the I/O threads are its parent's, and so are the connections.
pub(crate) fn guard(call: &str, body: impl FnOnce() -> Result<(), PluginError>) -> NcclResult {
    static OWNER: OnceLock<Owner> = OnceLock::new();
    if OWNER.get_or_init(Owner::current).is_parent() {
        warn_in_child(call);
        return INVALID_USAGE;
    }
    let error = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return SUCCESS,
        Ok(Err(error)) => error,
        Err(_) => PluginError::internal("internal error: panic"),
    };
    if let Some(line) = error.line {
        LOG.warn(&format!("evenkeel: {call}: {line}"));
    }
    error.code
}

/// Writes to standard error: another thread of the parent may have held a lock of NCCL's logger.
fn warn_in_child(call: &str) {
    let line = format!(
        "evenkeel: {call}: this process was forked from one that uses NCCL: start it anew, by spawn or exec\n"
    );
    // SAFETY: the bytes are there. If nobody reads the line, the call fails nevertheless.
    unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guard_turns_a_panic_into_an_internal_error() {
        assert_eq!(guard("test", || panic!("for the test")), INTERNAL_ERROR);
    }

    #[test]
    fn guard_returns_the_error_code() {
        assert_eq!(guard("test", || Err(PluginError::invalid_argument("x"))), INVALID_ARGUMENT);
        assert_eq!(guard("test", || Ok(())), SUCCESS);
    }
}
