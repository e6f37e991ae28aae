//! A message on its way.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::bell;
use crate::error::Error;

/// Most requests of one connection that may be outstanding.
pub const MAX_REQUESTS: usize = 32;

/// Completion of one request, shared by the caller and whoever moves its bytes.
pub(crate) struct Operation {
    /// Length of the message, or `PENDING`. One word, so that whoever sees the completion sees
    /// the length.
    outcome: AtomicU64,
}

const PENDING: u64 = u64::MAX;

impl Operation {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { outcome: AtomicU64::new(PENDING) })
    }

    /// Marks the request as done. Everything written before is visible to who sees it done.
    pub(crate) fn complete(&self, bytes: u64) {
        self.outcome.store(bytes, Ordering::Release);
        bell::ring();
    }

    fn done(&self) -> Option<u64> {
        match self.outcome.load(Ordering::Acquire) {
            PENDING => None,
            bytes => Some(bytes),
        }
    }
}

/// What a request asks its connection when it is not done.
pub(crate) trait Owner: Send + Sync {
    /// The connection's failure, if it has one. After it is returned, no buffer of the connection
    /// is touched any more.
    fn failure(&self) -> Option<Error>;
    /// Does what is to be done for the connection and can be done at once. Waits for nothing.
    fn progress(&self);
    /// Keeps memory until nobody can touch it any more: a message that is not done was given up.
    fn keep(&self, lent: Box<dyn Any + Send + Sync>);
}

/// A message being sent or received. Dropping it does not cancel it; closing its connection does.
pub struct Request {
    operation: Arc<Operation>,
    owner: Arc<dyn Owner>,
}

impl Request {
    pub(crate) fn new(operation: Arc<Operation>, owner: Arc<dyn Owner>) -> Self {
        Self { operation, owner }
    }

    /// The message's length in bytes once it is sent or received; `None` before. Never blocks.
    ///
    /// After it has returned a length or an error, the request's buffer is not touched any more.
    ///
    /// # Errors
    /// The failure of the connection, when that came before the request was done.
    pub fn test(&self) -> Result<Option<u64>, Error> {
        let Self { operation, owner } = self;
        if let Some(bytes) = operation.done() {
            return Ok(Some(bytes));
        }
        owner.progress();
        let Some(error) = owner.failure() else { return Ok(operation.done()) };
        // It may have completed in between, or while the failing connection came to rest.
        operation.done().map_or(Err(error), |bytes| Ok(Some(bytes)))
    }

    /// As [`Request::test`], without a look at the network: for who is notified.
    ///
    /// # Errors
    /// As [`Request::test`].
    pub fn look(&self) -> Result<Option<u64>, Error> {
        let Self { operation, owner } = self;
        if let Some(bytes) = operation.done() {
            return Ok(Some(bytes));
        }
        let Some(error) = owner.failure() else { return Ok(None) };
        operation.done().map_or(Err(error), |bytes| Ok(Some(bytes)))
    }

    /// Keeps memory that the request may still need, when nobody waits for it any more.
    pub(crate) fn keep(&self, lent: Box<dyn Any + Send + Sync>) {
        if self.operation.done().is_none() {
            self.owner.keep(lent);
        }
    }
}
