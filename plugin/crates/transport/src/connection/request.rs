//! Requests: messages that are being sent or received.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::Error;
use crate::memory::buffers::RecvBuffer;
use crate::rdma::Regions;
use crate::runtime::waiters;

/// Maximum number of outstanding requests of one connection.
pub const MAX_REQUESTS: usize = 32;

/// Maximum number of buffers in one grouped receive. NCCL's RDMA transport has the same.
pub const MAX_RECVS: usize = 8;

/// Completion of one request, shared by the caller and the thread that moves its bytes.
pub(crate) struct Operation {
    /// The length of each message, or `PENDING`. One word, so that completion and length become
    /// visible together.
    outcomes: [AtomicU64; MAX_RECVS],
    /// Number of messages.
    count: usize,
}

const PENDING: u64 = u64::MAX;

impl Operation {
    /// For one message.
    pub(crate) fn new() -> Arc<Self> {
        Self::of_group(1)
    }

    /// For this number of messages, 1 to [`MAX_RECVS`].
    pub(crate) fn of_group(count: usize) -> Arc<Self> {
        Arc::new(Self { outcomes: [const { AtomicU64::new(PENDING) }; MAX_RECVS], count })
    }

    /// Completes a request for one message. All earlier writes are visible to the thread that sees
    /// the completion.
    pub(crate) fn complete(&self, bytes: u64) {
        self.complete_one(0, bytes);
    }

    /// Completes one message of the request. All earlier writes are visible to the thread that sees
    /// the completion.
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

/// The destination of one message of a request.
#[derive(Clone)]
pub(crate) struct Target {
    pub(crate) buffer: RecvBuffer,
    /// The regions in which the caller has registered the buffer, over RDMA.
    pub(crate) registered: Regions,
    operation: Arc<Operation>,
    index: usize,
}

impl Target {
    /// The buffer with this index in its request.
    pub(crate) fn new(buffer: RecvBuffer, operation: &Arc<Operation>, index: usize) -> Self {
        Self { buffer, registered: Regions::default(), operation: Arc::clone(operation), index }
    }

    /// The message is received and has this length.
    pub(crate) fn complete(&self, bytes: u64) {
        self.operation.complete_one(self.index, bytes);
    }
}

/// The connection of a request that is not done.
pub(crate) trait Owner: Send + Sync {
    /// The connection's failure, if it has one. After it is returned, no buffer of the connection
    /// is accessed any more.
    fn failure(&self) -> Option<Error>;
    /// Does all work of the connection that is possible without waiting.
    fn progress(&self);
    /// Keeps the memory of an abandoned message until it can no longer be accessed.
    fn retain_memory(&self, memory: Box<dyn Any + Send + Sync>);
}

/// A message being sent or received, or a group of messages being received. Dropping it does not
/// cancel it. Closing its connection does.
pub struct Request {
    operation: Arc<Operation>,
    owner: Arc<dyn Owner>,
}

impl Request {
    pub(crate) fn new(operation: Arc<Operation>, owner: Arc<dyn Owner>) -> Self {
        Self { operation, owner }
    }

    /// The length of the message in bytes once it is sent or received; of a group, the first length
    /// once all are received. `None` before that. Never blocks.
    ///
    /// After it has returned a length or an error, the request's buffers are not accessed any more.
    ///
    /// # Errors
    /// The connection's failure, if that came before the request was done.
    pub fn test(&self) -> Result<Option<u64>, Error> {
        let Self { operation, owner } = self;
        if let Some(bytes) = operation.first_length_if_done() {
            return Ok(Some(bytes));
        }
        owner.progress();
        let Some(error) = owner.failure() else { return Ok(operation.first_length_if_done()) };
        // It may have completed in between, or while the failing connection quiesced.
        operation.first_length_if_done().map_or(Err(error), |bytes| Ok(Some(bytes)))
    }

    /// Length in bytes of the message in the buffer with this index. `None` while it is not
    /// received, and when there is no such buffer.
    pub fn length(&self, index: usize) -> Option<u64> {
        self.operation.length(index)
    }

    /// As [`Request::test`], without polling the network. For callers that are notified.
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

    /// Keeps memory that an abandoned request may still access.
    pub(crate) fn retain_memory(&self, memory: Box<dyn Any + Send + Sync>) {
        if self.operation.first_length_if_done().is_none() {
            self.owner.retain_memory(memory);
        }
    }
}
