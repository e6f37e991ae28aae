//! NCCL's comms: one listener, or one connection with its requests.

use std::ffi::c_void;
use std::iter;
use std::sync::Mutex;

use evenkeel_nccl_abi::MAX_REQUESTS;
use evenkeel_transport::sync::lock;
use evenkeel_transport::{
    Listener, MAX_RECVS, MrCache, MrHandle, RecvBuffer, RecvConnection, Request, SendBuffer,
    SendConnection, TaggedBuffer,
};

use crate::error::PluginError;
use crate::profiler::ProfiledMessage;
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
        Ok(accepted.map(Comm::new_recv))
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
    /// As many for each request as that can have messages. Behind the connection, which is closed before they are dropped.
    profiled: Box<[ProfiledMessage]>,
}

impl<C> Comm<C> {
    /// The messages of the request with this index, as profilers see them.
    fn profiled(&self, request: usize) -> &[ProfiledMessage] {
        let each = self.profiled.len() / MAX_REQUESTS;
        &self.profiled[request * each..][..each]
    }

    fn with_messages(mr_cache: MrCache, connection: C, each: usize) -> Self {
        let profiled = iter::repeat_with(ProfiledMessage::default).take(MAX_REQUESTS * each);
        let profiled = profiled.collect();
        Self { mr_cache, connection, requests: RequestPool::new(), profiled }
    }
}

impl Comm<SendConnection> {
    pub(super) fn new_send(connection: SendConnection) -> Self {
        Self::with_messages(connection.mr_cache(), connection, 1)
    }

    /// Starts to send. `None` when no request is free, or when another tag's message must be sent before. NCCL's profiler knows
    /// the message by `profile`, unless that is null.
    pub(super) fn send(
        &self,
        buffer: SendBuffer,
        tag: i32,
        registration: Option<&MrHandle>,
        profile: *mut c_void,
    ) -> Result<Option<&PooledRequest<Request>>, PluginError> {
        // NCCL tests each request until it is done.
        self.requests.start(|index| {
            // SAFETY: the request is free, so its message before is reported, and this is dropped after the connection.
            let mark = unsafe { self.profiled(index)[0].mark(profile) };
            Ok(self.connection.send_tagged(buffer.with_mark(mark), tag, registration)?)
        })
    }
}

impl Comm<RecvConnection> {
    pub(super) fn new_recv(connection: RecvConnection) -> Self {
        Self::with_messages(connection.mr_cache(), connection, MAX_RECVS)
    }

    /// Posts a group of buffers. `None` when no request is free. NCCL's profiler knows the messages by `profiles`, in this order,
    /// those that are not null.
    pub(super) fn recv(
        &self,
        group: &mut [TaggedBuffer<'_>],
        profiles: &[*mut c_void],
    ) -> Result<Option<&PooledRequest<Request>>, PluginError> {
        self.requests.start(|index| {
            let messages = group.iter_mut().zip(profiles).zip(self.profiled(index));
            for ((tagged, profile), message) in messages {
                // SAFETY: as in `send`.
                tagged.buffer = tagged.buffer.with_mark(unsafe { message.mark(*profile) });
            }
            Ok(self.connection.recv_group(group)?)
        })
    }

    /// Starts to flush received data, so that it is visible in the memory that it was written to.
    pub(super) fn flush(
        &self,
        message: RecvBuffer,
        registration: Option<&MrHandle>,
    ) -> Result<&PooledRequest<Request>, PluginError> {
        self.requests
            .start(|_| Ok(Some(self.connection.flush(message, registration)?)))?
            .ok_or_else(|| PluginError::internal("no request is free for a flush"))
    }
}
