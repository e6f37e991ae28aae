//! The sending side of a connection, whatever carries its messages.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use evenkeel_protocol::MAX_MESSAGE_BYTES;

use crate::connection::base::Base;
use crate::connection::request::{Owner, Request};
use crate::error::Error;
use crate::memory::buffers::SendBuffer;
use crate::rdma::{MrCache, MrHandle};
use crate::runtime::notify::Notify;
use crate::runtime::reactor::Runtime;

/// How long a closed connection continues to deliver messages whose requests are done.
pub(crate) const LINGER: Duration = Duration::from_secs(10);

/// Sends messages to one peer, which receives them in the order of the calls.
///
/// Dropping it closes it at once, even with requests in flight. No buffer is accessed afterwards.
/// Messages whose requests are done are still delivered.
pub struct SendConnection {
    pub(crate) sender: Arc<dyn Outbound>,
    _runtime: Arc<Runtime>,
}

/// The sending side of a connection, whatever carries its messages.
pub(crate) trait Outbound: Owner {
    fn base(&self) -> &Base;
    /// As [`SendConnection::send`].
    fn send(self: Arc<Self>, buffer: SendBuffer) -> Result<Option<Request>, Error>;
    /// As [`SendConnection::send_tagged`].
    fn send_tagged(
        self: Arc<Self>,
        message: SendBuffer,
        tag: i32,
        registration: Option<&MrHandle>,
    ) -> Result<Option<Request>, Error>;
    /// As [`SendConnection::send_ahead`].
    fn send_ahead(self: Arc<Self>, buffer: SendBuffer) -> Result<Option<Request>, Error> {
        self.send(buffer)
    }
    /// The owner has closed the connection.
    fn owner_closed(self: Arc<Self>);
    /// As [`CloseHandle::is_closed`].
    fn is_delivered(&self) -> bool;
    /// Breaks a queue pair, as a device may, or a flow.
    #[cfg(test)]
    fn break_path(&self, index: usize);
    /// The keys of its flows are nearly used up.
    #[cfg(test)]
    fn wear_keys(&self);
    /// Number of its queue pairs.
    #[cfg(test)]
    fn queue_pairs(&self) -> usize;
    /// Its identifier in the handshake.
    #[cfg(test)]
    fn id(&self) -> evenkeel_protocol::ConnectionId;
}

impl SendConnection {
    pub(crate) fn new(sender: Arc<dyn Outbound>, runtime: Arc<Runtime>) -> Self {
        sender.base().log_opened();
        Self { sender, _runtime: runtime }
    }

    /// Starts to send a message; 0 bytes are a message too. `None` when
    /// [`MAX_REQUESTS`](crate::MAX_REQUESTS) are outstanding: retry later. Never blocks.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::ErrorKind::Argument) above [`MAX_MESSAGE_BYTES`]; else the
    /// connection's failure.
    pub fn send(&self, buffer: SendBuffer) -> Result<Option<Request>, Error> {
        self.check(&buffer)?;
        Arc::clone(&self.sender).send(buffer)
    }

    /// As [`SendConnection::send`], for a message with a tag. It goes to the first buffer with the
    /// same tag that has no message yet. Once the peer has posted different tags, `None` also means
    /// that the next buffer has another tag: retry later. Messages with the same tag keep their
    /// order.
    ///
    /// For callers that test all their requests repeatedly: small messages that start before the
    /// next test may be sent together. Either all messages of a connection have tags, or none has.
    ///
    /// With the `registration` of the buffer's memory, there is no search for it.
    ///
    /// # Errors
    /// As [`SendConnection::send`].
    pub fn send_tagged(
        &self,
        buffer: SendBuffer,
        tag: i32,
        registration: Option<&MrHandle>,
    ) -> Result<Option<Request>, Error> {
        self.check(&buffer)?;
        Arc::clone(&self.sender).send_tagged(buffer, tag, registration)
    }

    /// As [`SendConnection::send`], for a message that may wait for the next one, as with
    /// `MSG_MORE`. The caller sends the next one at once, and one system call sends both where
    /// possible.
    ///
    /// # Errors
    /// As [`SendConnection::send`].
    pub fn send_ahead(&self, buffer: SendBuffer) -> Result<Option<Request>, Error> {
        self.check(&buffer)?;
        Arc::clone(&self.sender).send_ahead(buffer)
    }

    /// Whether this message can be sent.
    fn check(&self, buffer: &SendBuffer) -> Result<(), Error> {
        let length = buffer.length() as u64;
        if length > MAX_MESSAGE_BYTES {
            return Err(Error::argument(format!(
                "message of {length} bytes: at most {MAX_MESSAGE_BYTES} can be sent"
            )));
        }
        self.sender.failure().map_or(Ok(()), Err)
    }

    /// From now on, notifies whenever a request is done and when the connection fails.
    pub fn notify(&self, notified: Arc<dyn Notify>) {
        self.sender.base().notify_with(notified);
    }

    /// The peer's address.
    pub fn peer(&self) -> SocketAddr {
        self.sender.base().peer()
    }

    /// Bytes sent so far. Over TCP they include incomplete messages.
    pub fn carried(&self) -> u64 {
        self.sender.base().moved()
    }

    /// Whether it has failed. Unlike the error of a message, the answer is not logged.
    pub fn has_failed(&self) -> bool {
        self.sender.base().failed()
    }

    /// Whether its flows, over TCP, keep their paths until they fail.
    pub fn keeps_paths(&self) -> bool {
        self.sender.base().context.settings.repath == Some(false)
    }

    /// The cache that registers memory for messages.
    pub fn mr_cache(&self) -> MrCache {
        self.sender.base().mr_cache()
    }

    /// Closes it, as dropping it does. The handle says when the peer does not need this process any
    /// more.
    pub fn close(self) -> CloseHandle {
        CloseHandle { sender: Arc::clone(&self.sender), _runtime: Arc::clone(&self._runtime) }
    }
}

/// A connection that its owner has closed.
pub struct CloseHandle {
    sender: Arc<dyn Outbound>,
    _runtime: Arc<Runtime>,
}

impl CloseHandle {
    /// Whether the peer has all messages whose requests were done, or will never have them. Never
    /// blocks.
    pub fn is_closed(&self) -> bool {
        self.sender.is_delivered()
    }
}

impl Drop for SendConnection {
    fn drop(&mut self) {
        Arc::clone(&self.sender).owner_closed();
    }
}
