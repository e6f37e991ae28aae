//! The error of a call, before it becomes a status and the thread's last error.

use evenkeel_collectives::{self as collectives, ErrorKind};

use crate::status::{
    EVENKEEL_ABORTED, EVENKEEL_ARGUMENT, EVENKEEL_LOST, EVENKEEL_MISMATCH, EVENKEEL_STORE,
    EVENKEEL_SYSTEM, EVENKEEL_TIMEOUT, Status,
};

/// Why a call fails.
pub(crate) struct Error {
    pub(crate) status: Status,
    pub(crate) message: String,
    pub(crate) ranks: Vec<usize>,
    pub(crate) group_usable: bool,
}

impl Error {
    /// An argument of the call is invalid.
    pub(crate) fn argument(message: impl Into<String>) -> Self {
        let message = message.into();
        Self { status: EVENKEEL_ARGUMENT, message, ranks: vec![], group_usable: true }
    }
}

impl From<collectives::Error> for Error {
    fn from(error: collectives::Error) -> Self {
        let status = match error.kind() {
            ErrorKind::Argument => EVENKEEL_ARGUMENT,
            ErrorKind::Timeout => EVENKEEL_TIMEOUT,
            ErrorKind::Lost => EVENKEEL_LOST,
            ErrorKind::Aborted => EVENKEEL_ABORTED,
            ErrorKind::System => EVENKEEL_SYSTEM,
            ErrorKind::Store => EVENKEEL_STORE,
            ErrorKind::Mismatch => EVENKEEL_MISMATCH,
        };
        let (ranks, group_usable) = (error.ranks().to_vec(), error.is_group_usable());
        Self { status, message: error.to_string(), ranks, group_usable }
    }
}
