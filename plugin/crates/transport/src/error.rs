//! The error of this crate: a class for programs and a line for people.

use std::io;

/// The class of an error, which says who can act on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// A local system call failed.
    System,
    /// The peer closed, died, stopped answering or broke the protocol.
    Remote,
    /// A message was longer than the buffer posted for it.
    Truncated,
    /// A setting makes the transport unusable.
    Config,
    /// The caller broke the contract of the call.
    Argument,
    /// A defect of this library.
    Internal,
}

/// Whether a failed attempt to connect is worth a retry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Retry {
    /// Unknown: there was no answer, or the host reports that no process listens.
    #[default]
    Unknown,
    /// The listener exists, but is busy or has dropped the connection.
    Later,
    /// The listener refuses, and will again: keys or versions differ.
    Never,
}

/// An error with all that is known about it in one line.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    kind: ErrorKind,
    message: String,
    logged: bool,
}

impl Error {
    /// The class of the error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Whether the transport has logged it, because it happened outside of a call.
    pub fn is_logged(&self) -> bool {
        self.logged
    }

    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), logged: false }
    }

    pub(crate) fn mark_logged(self) -> Self {
        Self { logged: true, ..self }
    }

    pub(crate) fn argument(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Argument, message)
    }

    /// A local call named `what` failed.
    pub(crate) fn system(what: &str, error: &io::Error) -> Self {
        Self::new(ErrorKind::System, format!("{what}: {error}"))
    }
}

/// Why an attempt to connect failed.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{error}")]
pub struct ConnectError {
    error: Error,
    retry: Retry,
}

impl ConnectError {
    pub(crate) fn new(error: Error, retry: Retry) -> Self {
        Self { error, retry }
    }

    /// Whether a retry may succeed.
    pub fn retry(&self) -> Retry {
        self.retry
    }
}

impl From<ConnectError> for Error {
    fn from(ConnectError { error, .. }: ConnectError) -> Self {
        error
    }
}
