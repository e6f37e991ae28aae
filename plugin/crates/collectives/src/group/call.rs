//! How an operation is to be done.

use std::time::Duration;

use crate::algorithms::algorithm::Algorithm;

/// How an operation is to be done. All ranks must say the same, but for the timeout.
#[derive(Clone, Debug, Default)]
pub struct Call {
    pub(super) tag: u32,
    pub(super) timeout: Option<Duration>,
    pub(super) algorithm: Option<Algorithm>,
}

impl Call {
    /// Operations with different tags may be in progress at the same time. A group remembers every tag that was used: use some again
    /// and again, not a new one for each operation.
    pub fn tag(self, tag: u32) -> Self {
        Self { tag, ..self }
    }

    /// How long nothing may move in it. The group's, if this is not said.
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout: Some(timeout), ..self }
    }

    /// The algorithm of an all-reduce. By default it is chosen by the number of ranks and bytes.
    pub fn algorithm(self, algorithm: Algorithm) -> Self {
        Self { algorithm: Some(algorithm), ..self }
    }
}
