//! The error of a call.

use evenkeel_collectives as collectives;

/// Why a call fails, in one line.
#[derive(Debug)]
pub(crate) struct Error(pub(crate) String);

/// The result of a call's part.
pub(crate) type Result<T> = std::result::Result<T, Error>;

impl From<collectives::Error> for Error {
    fn from(error: collectives::Error) -> Self {
        Self(error.to_string())
    }
}
