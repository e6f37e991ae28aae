//! The client's error.

/// What failed, and at which server.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct ClientError(String);

impl ClientError {
    pub(crate) fn new(text: String) -> Self {
        Self(text)
    }
}
