//! Errors that end a connection.

use evenkeel_protocol::{ArrivalError, TooLong};
use evenkeel_verbs::Gid;

use crate::error::{Error, ErrorKind};

/// Why a connection cannot continue.
pub(crate) struct ConnectionError(pub(super) ErrorKind, pub(super) String);

impl ConnectionError {
    /// The peer's fault, or that of the network.
    pub(super) fn remote(what: impl Into<String>) -> Self {
        Self(ErrorKind::Remote, what.into())
    }
}

impl From<Error> for ConnectionError {
    fn from(error: Error) -> Self {
        Self(error.kind(), error.to_string())
    }
}

impl From<TooLong> for ConnectionError {
    fn from(TooLong { length, capacity, .. }: TooLong) -> Self {
        ArrivalError::TooLong { length, capacity }.into()
    }
}

impl From<ArrivalError> for ConnectionError {
    fn from(error: ArrivalError) -> Self {
        let kind = match error {
            ArrivalError::TooLong { .. } => ErrorKind::Truncated,
            ArrivalError::NotPosted | ArrivalError::BeyondLast => ErrorKind::Remote,
        };
        Self(kind, error.to_string())
    }
}

/// An error of a verbs call.
pub(super) fn system(error: evenkeel_verbs::Error) -> Error {
    Error::new(ErrorKind::System, error.to_string())
}

/// GIDs in an error or a log line.
pub(super) fn gids(gids: impl Iterator<Item = Gid>) -> String {
    gids.map(|gid| gid.to_string()).collect::<Vec<_>>().join("+")
}
