//! The receiving side of a connection, whatever carries its messages.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::connection::base::Base;
use crate::connection::request::{MAX_RECVS, Request};
use crate::error::Error;
use crate::memory::buffers::RecvBuffer;
use crate::rdma::MrCache;
use crate::runtime::notify::Notify;
use crate::runtime::reactor::Runtime;

/// A buffer for a message with a tag.
#[derive(Clone, Copy, Debug)]
pub struct TaggedBuffer {
    /// Where it goes.
    pub buffer: RecvBuffer,
    /// Its tag.
    pub tag: i32,
}

/// Receives messages from one peer, in the order in which it sends them, or those of each tag in their order.
///
/// Dropping it closes it, at once and whatever is in flight; no buffer is touched afterwards.
pub struct RecvConnection {
    pub(crate) receiver: Arc<dyn Inbound>,
    /// Where the peer can replace flows.
    _acceptor: Box<dyn Send + Sync>,
    _runtime: Arc<Runtime>,
}

/// The receiving side of a connection, whatever carries its messages.
pub(crate) trait Inbound: Send + Sync {
    fn base(&self) -> &Base;
    /// As [`RecvConnection::recv`].
    fn recv(self: Arc<Self>, buffer: RecvBuffer) -> Result<Option<Request>, Error>;
    /// As [`RecvConnection::recv_group`], of as many buffers as there may be.
    fn recv_group(self: Arc<Self>, group: &[TaggedBuffer]) -> Result<Option<Request>, Error>;
    /// As [`RecvConnection::flush`].
    fn flush(self: Arc<Self>, _memory: RecvBuffer) -> Result<Request, Error> {
        Err(Error::argument("host memory needs no flush"))
    }
    /// As [`RecvConnection::flows`].
    fn flows(&self) -> usize;
    /// Ends everything.
    fn close(&self);
    /// Breaks a queue pair, as its device may.
    #[cfg(test)]
    fn break_path(&self, index: usize);
}

impl RecvConnection {
    pub(crate) fn new(
        receiver: Arc<dyn Inbound>,
        acceptor: Box<dyn Send + Sync>,
        runtime: Arc<Runtime>,
    ) -> Self {
        receiver.base().log_opened();
        Self { receiver, _acceptor: acceptor, _runtime: runtime }
    }

    /// Posts a buffer for the next message. `None` when [`MAX_REQUESTS`](crate::MAX_REQUESTS) are outstanding: try again
    /// later. Never blocks.
    ///
    /// # Errors
    /// The connection's failure.
    pub fn recv(&self, buffer: RecvBuffer) -> Result<Option<Request>, Error> {
        Arc::clone(&self.receiver).recv(buffer)
    }

    /// Posts 1 to [`MAX_RECVS`] buffers, each for the next message with its tag that no other one is posted for; the request
    /// is done when all have come. `None` when more than [`MAX_REQUESTS`](crate::MAX_REQUESTS) would be outstanding: try again later. Never blocks.
    ///
    /// A message whose buffer comes before another one's may wait for that to be sent, as far as both have been sent since
    /// the peer knows that there are different tags. All messages of a connection have tags, or none has.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::ErrorKind::Argument) for another number of buffers; else the connection's failure.
    pub fn recv_group(&self, group: &[TaggedBuffer]) -> Result<Option<Request>, Error> {
        if !(1..=MAX_RECVS).contains(&group.len()) {
            let count = group.len();
            return Err(Error::argument(format!("a group of {count} buffers: 1 to {MAX_RECVS}")));
        }
        Arc::clone(&self.receiver).recv_group(group)
    }

    /// Begins to make what has come visible to the GPU in whose memory it is: the last message there, or all of a group, of
    /// which this is the last one that is not empty. The request is done when it is, and has the length 0. Never blocks.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::ErrorKind::Argument) where messages are in host memory, which needs none, for no bytes, and when as many as may be
    /// are on their way; else the connection's failure.
    pub fn flush(&self, message: RecvBuffer) -> Result<Request, Error> {
        Arc::clone(&self.receiver).flush(message)
    }

    /// Has this called from now on whenever a request is done and when the connection fails.
    pub fn notify(&self, notified: Arc<dyn Notify>) {
        self.receiver.base().notify_with(notified);
    }

    /// Where the peer is.
    pub fn peer(&self) -> SocketAddr {
        self.receiver.base().peer()
    }

    /// Bytes received so far, over TCP also those of messages that are not whole yet.
    pub fn carried(&self) -> u64 {
        self.receiver.base().moved()
    }

    /// Registers memory for messages.
    pub fn mr_cache(&self) -> MrCache {
        self.receiver.base().mr_cache()
    }

    /// How many flows it has now, or would have over TCP.
    pub fn flows(&self) -> usize {
        self.receiver.flows()
    }
}

impl Drop for RecvConnection {
    fn drop(&mut self) {
        self.receiver.close();
    }
}
