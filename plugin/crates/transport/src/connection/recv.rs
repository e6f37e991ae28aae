//! The receiving side of a connection, whatever carries its messages.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::connection::base::Base;
use crate::connection::request::{MAX_RECVS, Request};
use crate::error::Error;
use crate::memory::buffers::RecvBuffer;
use crate::rdma::{MrCache, MrHandle};
use crate::runtime::notify::Notify;
use crate::runtime::reactor::Runtime;

/// A buffer for a message with a tag.
#[derive(Clone, Copy, Debug)]
pub struct TaggedBuffer<'a> {
    /// Where the message is stored.
    pub buffer: RecvBuffer,
    /// Its tag.
    pub tag: i32,
    /// The registration of the buffer's memory, if the caller has it. Without it, the region is
    /// searched for.
    pub registration: Option<&'a MrHandle>,
}

/// Receives messages from one peer, in the order in which they are sent. With tags, the order holds
/// per tag.
///
/// Dropping it closes it at once, even with requests in flight. No buffer is accessed afterwards.
pub struct RecvConnection {
    pub(crate) receiver: Arc<dyn Inbound>,
    /// Keeps the listening socket open, where the peer replaces flows.
    _acceptor: Box<dyn Send + Sync>,
    _runtime: Arc<Runtime>,
}

/// The receiving side of a connection, whatever carries its messages.
pub(crate) trait Inbound: Send + Sync {
    fn base(&self) -> &Base;
    /// As [`RecvConnection::recv`].
    fn recv(self: Arc<Self>, buffer: RecvBuffer) -> Result<Option<Request>, Error>;
    /// As [`RecvConnection::recv_group`], with a valid number of buffers.
    fn recv_group(self: Arc<Self>, group: &[TaggedBuffer<'_>]) -> Result<Option<Request>, Error>;
    /// As [`RecvConnection::flush`].
    fn flush(
        self: Arc<Self>,
        _memory: RecvBuffer,
        _registration: Option<&MrHandle>,
    ) -> Result<Request, Error> {
        Err(Error::argument("host memory needs no flush"))
    }
    /// As [`RecvConnection::set_awaited`].
    fn set_awaited(&self, is_awaited: bool);
    /// As [`RecvConnection::flows`].
    fn flows(&self) -> usize;
    /// Closes the connection.
    fn close(&self);
    /// Breaks a queue pair, as a device may.
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

    /// Posts a buffer for the next message. `None` when [`MAX_REQUESTS`](crate::MAX_REQUESTS) are
    /// outstanding: retry later. Never blocks.
    ///
    /// # Errors
    /// The connection's failure.
    pub fn recv(&self, buffer: RecvBuffer) -> Result<Option<Request>, Error> {
        Arc::clone(&self.receiver).recv(buffer)
    }

    /// Posts 1 to [`MAX_RECVS`] buffers as one request. Each receives the next message with its
    /// tag; the request is done when all are received. `None` when more than
    /// [`MAX_REQUESTS`](crate::MAX_REQUESTS) would be outstanding: retry later. Never blocks.
    ///
    /// Once the peer knows that tags differ, a message may wait until the message for an earlier
    /// buffer is sent. Either all messages of a connection have tags, or none has.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::ErrorKind::Argument) for another number of buffers; else the
    /// connection's failure.
    pub fn recv_group(&self, group: &[TaggedBuffer<'_>]) -> Result<Option<Request>, Error> {
        if !(1..=MAX_RECVS).contains(&group.len()) {
            let count = group.len();
            return Err(Error::argument(format!("a group of {count} buffers: 1 to {MAX_RECVS}")));
        }
        Arc::clone(&self.receiver).recv_group(group)
    }

    /// Starts to make received data visible to the GPU that owns the memory. It covers the last
    /// message, or all of a group whose last message that is not empty is this one. The request has
    /// the length 0. Never blocks. With the `registration` of the message's memory, there is no
    /// search for it.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::ErrorKind::Argument) for host memory, which needs no flush,
    /// for an empty buffer, and when the maximum number of flushes is outstanding; else the
    /// connection's failure.
    pub fn flush(
        &self,
        message: RecvBuffer,
        registration: Option<&MrHandle>,
    ) -> Result<Request, Error> {
        Arc::clone(&self.receiver).flush(message, registration)
    }

    /// Whether the caller waits for messages from now on; it does until it says otherwise. A caller
    /// that keeps a buffer posted for messages that may come does not wait all the time. It matters
    /// only for what is told of waits.
    pub fn set_awaited(&self, is_awaited: bool) {
        self.receiver.set_awaited(is_awaited);
    }

    /// From now on, notifies whenever a request is done and when the connection fails.
    pub fn notify(&self, notified: Arc<dyn Notify>) {
        self.receiver.base().notify_with(notified);
    }

    /// The peer's address.
    pub fn peer(&self) -> SocketAddr {
        self.receiver.base().peer()
    }

    /// Bytes received so far. Over TCP they include incomplete messages.
    pub fn carried(&self) -> u64 {
        self.receiver.base().moved()
    }

    /// The cache that registers memory for messages.
    pub fn mr_cache(&self) -> MrCache {
        self.receiver.base().mr_cache()
    }

    /// Number of flows that it has now, or would have over TCP.
    pub fn flows(&self) -> usize {
        self.receiver.flows()
    }
}

impl Drop for RecvConnection {
    fn drop(&mut self) {
        self.receiver.close();
    }
}
