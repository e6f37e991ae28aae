//! The one error of this crate: a class that code can match and a line that people can read.

use std::io;

/// Who can do something about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// A local system call failed.
    System,
    /// The peer closed, died, went silent or broke the protocol.
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

/// What a listener that has not taken a connection has let hear of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Retry {
    /// Nothing, or its host says that nobody listens there.
    #[default]
    Unknown,
    /// It is there, and has dropped the connection or is busy: later it may take one.
    Later,
    /// It refuses, and would again: the keys or the versions differ.
    Never,
}

/// What went wrong, with all that is known about it in one line.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    kind: ErrorKind,
    message: String,
    logged: bool,
    retry: Retry,
}

impl Error {
    /// The class of the error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Whether the transport has written it to the log, because it happened outside of any call.
    pub fn is_logged(&self) -> bool {
        self.logged
    }

    /// Of an attempt to connect: what was heard of the listener.
    pub fn retry(&self) -> Retry {
        self.retry
    }

    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), logged: false, retry: Retry::Unknown }
    }

    pub(crate) fn mark_logged(self) -> Self {
        Self { logged: true, ..self }
    }

    pub(crate) fn with_retry(self, retry: Retry) -> Self {
        Self { retry, ..self }
    }

    pub(crate) fn argument(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Argument, message)
    }

    /// A local call named `what` failed.
    pub(crate) fn system(what: &str, error: &io::Error) -> Self {
        Self::new(ErrorKind::System, format!("{what}: {error}"))
    }
}

/// A message that does not fit into the buffer posted for it; bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TooLong {
    pub(crate) message: u64,
    pub(crate) length: u64,
    pub(crate) capacity: u64,
}
