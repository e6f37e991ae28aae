//! The error of this program: one line that a person can act on.

/// The result of everything that can fail here. The error is printed as it is.
pub(crate) type Result<T> = std::result::Result<T, String>;
