//! NCCL's comms: one listener, or one connection with its requests.

use std::sync::Mutex;

use evenkeel_transport::sync::lock;
use evenkeel_transport::{
    Listener, MrCache, MrHandle, RecvBuffer, RecvConnection, Request, SendBuffer, SendConnection,
    TaggedBuffer,
};

use crate::error::PluginError;
use crate::request_pool::{PooledRequest, RequestPool};

/// NCCL's listen comm.
pub(crate) struct ListenComm {
    /// `None` once closed.
    listener: Mutex<Option<Listener>>,
}

impl ListenComm {
    pub(super) fn new(listener: Listener) -> Self {
        Self { listener: Mutex::new(Some(listener)) }
    }

    /// The next connection, if there is one.
    pub(super) fn accept(&self) -> Result<Option<Comm<RecvConnection>>, PluginError> {
        let listener = lock(&self.listener);
        let listener =
            listener.as_ref().ok_or_else(|| PluginError::internal("the listener is closed"))?;
        let accepted = listener.poll_accept()?;
        Ok(accepted.map(|connection| Comm::new(connection.mr_cache(), connection)))
    }

    /// Closes the socket.
    pub(super) fn close(&self) {
        let listener = lock(&self.listener).take();
        drop(listener);
    }
}

/// NCCL's send or receive comm.
#[repr(C)]
pub(crate) struct Comm<C> {
    /// First, because NCCL registers memory with comms of all kinds by one function.
    mr_cache: MrCache,
    connection: C,
    requests: RequestPool<Request>,
}

impl<C> Comm<C> {
    pub(super) fn new(mr_cache: MrCache, connection: C) -> Self {
        Self { mr_cache, connection, requests: RequestPool::new() }
    }
}

impl Comm<SendConnection> {
    /// Starts to send. `None` when no request is free, or when another tag's message must be sent before.
    pub(super) fn send(
        &self,
        buffer: SendBuffer,
        tag: i32,
        registration: Option<&MrHandle>,
    ) -> Result<Option<&PooledRequest<Request>>, PluginError> {
        // NCCL tests each request until it is done.
        self.requests.start(|| Ok(self.connection.send_tagged(buffer, tag, registration)?))
    }
}

impl Comm<RecvConnection> {
    /// Posts a group of buffers. `None` when no request is free.
    pub(super) fn recv(
        &self,
        group: &[TaggedBuffer<'_>],
    ) -> Result<Option<&PooledRequest<Request>>, PluginError> {
        self.requests.start(|| Ok(self.connection.recv_group(group)?))
    }

    /// Starts to flush received data, so that it is visible in the memory that it was written to.
    pub(super) fn flush(
        &self,
        message: RecvBuffer,
        registration: Option<&MrHandle>,
    ) -> Result<&PooledRequest<Request>, PluginError> {
        self.requests
            .start(|| Ok(Some(self.connection.flush(message, registration)?)))?
            .ok_or_else(|| PluginError::internal("no request is free for a flush"))
    }
}
