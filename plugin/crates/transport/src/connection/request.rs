//! A message on its way.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::Error;
use crate::memory::buffers::RecvBuffer;
use crate::runtime::waiters;

/// Most requests of one connection that may be outstanding.
pub const MAX_REQUESTS: usize = 32;

/// Most buffers of a group that one request receives. NCCL's own RDMA transport says as many.
pub const MAX_RECVS: usize = 8;

/// Completion of one request, shared by the caller and whoever moves its bytes.
pub(crate) struct Operation {
    /// Of each message its length, or `PENDING`. One word, so that whoever sees the completion sees
    /// the length.
    outcomes: [AtomicU64; MAX_RECVS],
    /// How many messages there are.
    count: usize,
}

const PENDING: u64 = u64::MAX;

impl Operation {
    /// For one message.
    pub(crate) fn new() -> Arc<Self> {
        Self::of_group(1)
    }

    /// For so many messages, 1 to [`MAX_RECVS`].
    pub(crate) fn of_group(count: usize) -> Arc<Self> {
        Arc::new(Self { outcomes: [const { AtomicU64::new(PENDING) }; MAX_RECVS], count })
    }

    /// Marks a request for one message as done. Everything written before is visible to who sees it done.
    pub(crate) fn complete(&self, bytes: u64) {
        self.complete_one(0, bytes);
    }

    /// Marks one message of the request as done. Everything written before is visible to who sees it done.
    fn complete_one(&self, index: usize, bytes: u64) {
        self.outcomes[index].store(bytes, Ordering::Release);
        waiters::wake_all();
    }

    /// Length of one of the messages, once it is done.
    fn length(&self, index: usize) -> Option<u64> {
        match self.outcomes[..self.count].get(index)?.load(Ordering::Acquire) {
            PENDING => None,
            bytes => Some(bytes),
        }
    }

    /// Length of the first message once all are done.
    fn first_length_if_done(&self) -> Option<u64> {
        let first = self.length(0)?;
        (1..self.count).all(|index| self.length(index).is_some()).then_some(first)
    }
}

/// Where one message of a request goes.
#[derive(Clone)]
pub(crate) struct Target {
    pub(crate) buffer: RecvBuffer,
    operation: Arc<Operation>,
    index: usize,
}

impl Target {
    /// The buffer of this number in its request.
    pub(crate) fn new(buffer: RecvBuffer, operation: &Arc<Operation>, index: usize) -> Self {
        Self { buffer, operation: Arc::clone(operation), index }
    }

    /// The message is there, and so long.
    pub(crate) fn complete(&self, bytes: u64) {
        self.operation.complete_one(self.index, bytes);
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
    fn retain_memory(&self, memory: Box<dyn Any + Send + Sync>);
}

/// A message being sent or received, or a group of messages being received. Dropping it does not cancel it; closing its connection does.
pub struct Request {
    operation: Arc<Operation>,
    owner: Arc<dyn Owner>,
}

impl Request {
    pub(crate) fn new(operation: Arc<Operation>, owner: Arc<dyn Owner>) -> Self {
        Self { operation, owner }
    }

    /// The message's length in bytes once it is sent or received, of a group the first one's once all are; `None` before.
    /// Never blocks.
    ///
    /// After it has returned a length or an error, the request's buffers are not touched any more.
    ///
    /// # Errors
    /// The failure of the connection, when that came before the request was done.
    pub fn test(&self) -> Result<Option<u64>, Error> {
        let Self { operation, owner } = self;
        if let Some(bytes) = operation.first_length_if_done() {
            return Ok(Some(bytes));
        }
        owner.progress();
        let Some(error) = owner.failure() else { return Ok(operation.first_length_if_done()) };
        // It may have completed in between, or while the failing connection came to rest.
        operation.first_length_if_done().map_or(Err(error), |bytes| Ok(Some(bytes)))
    }

    /// Length in bytes of the message that one buffer of a group has received, counted from 0; `None` while it is not there,
    /// and when there is no such buffer.
    pub fn length(&self, index: usize) -> Option<u64> {
        self.operation.length(index)
    }

    /// As [`Request::test`], without a look at the network: for who is notified.
    ///
    /// # Errors
    /// As [`Request::test`].
    pub fn peek(&self) -> Result<Option<u64>, Error> {
        let Self { operation, owner } = self;
        if let Some(bytes) = operation.first_length_if_done() {
            return Ok(Some(bytes));
        }
        let Some(error) = owner.failure() else { return Ok(None) };
        operation.first_length_if_done().map_or(Err(error), |bytes| Ok(Some(bytes)))
    }

    /// Keeps memory that the request may still need, when nobody waits for it any more.
    pub(crate) fn retain_memory(&self, memory: Box<dyn Any + Send + Sync>) {
        if self.operation.first_length_if_done().is_none() {
            self.owner.retain_memory(memory);
        }
    }
}
