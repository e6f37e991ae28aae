//! From errors to NCCL's result codes.

use std::panic::{AssertUnwindSafe, catch_unwind};

use evenkeel_nccl_abi::{
    INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, NcclResult, REMOTE_ERROR, SUCCESS,
    SYSTEM_ERROR,
};
use evenkeel_reduction::ClientError;
use evenkeel_transport::{Error, ErrorKind, Log, SettingsError};

use crate::logger::LOG;

/// Why a call fails.
#[derive(Debug)]
pub(crate) struct Failure {
    code: NcclResult,
    /// What to write to the log; `None` when the transport has done that.
    line: Option<String>,
}

impl Failure {
    /// NCCL passed something that makes no sense.
    pub(crate) fn argument(line: impl Into<String>) -> Self {
        Self { code: INVALID_ARGUMENT, line: Some(line.into()) }
    }

    /// The system lacks something.
    pub(crate) fn system(line: impl Into<String>) -> Self {
        Self { code: SYSTEM_ERROR, line: Some(line.into()) }
    }

    /// The same with something to add.
    pub(crate) fn with(self, more: &str) -> Self {
        Self { line: self.line.map(|line| line + more), ..self }
    }

    /// NCCL called what it must not call.
    pub(crate) fn contract(line: impl Into<String>) -> Self {
        Self { code: INTERNAL_ERROR, line: Some(line.into()) }
    }
}

impl From<Error> for Failure {
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

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        Self { code: REMOTE_ERROR, line: Some(error.to_string()) }
    }
}

impl From<SettingsError> for Failure {
    fn from(error: SettingsError) -> Self {
        Self { code: INVALID_USAGE, line: Some(error.to_string()) }
    }
}

/// Runs the body of a C function: no panic leaves it, and every failure is in the log.
pub(crate) fn guard(call: &str, body: impl FnOnce() -> Result<(), Failure>) -> NcclResult {
    let failure = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return SUCCESS,
        Ok(Err(failure)) => failure,
        Err(_) => Failure::contract("defect: panic"),
    };
    if let Some(line) = failure.line {
        LOG.warn(&format!("evenkeel: {call}: {line}"));
    }
    failure.code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_internal_error() {
        assert_eq!(guard("test", || panic!("for the test")), INTERNAL_ERROR);
    }

    #[test]
    fn failures_keep_their_code() {
        assert_eq!(guard("test", || Err(Failure::argument("x"))), INVALID_ARGUMENT);
        assert_eq!(guard("test", || Ok(())), SUCCESS);
    }
}
