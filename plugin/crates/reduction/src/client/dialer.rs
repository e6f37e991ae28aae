//! Connects to one server.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use evenkeel_transport::{Connecting, Error, Handle, Transport};

use crate::error::ClientError;
use crate::protocol::NONCE;

/// Connects to one server, and names it in errors.
pub struct Dialer {
    pub(super) transport: Arc<Transport>,
    pub(super) device: usize,
    /// `host:port`, for errors.
    pub(super) name: String,
    pub(super) address: SocketAddr,
    pub(super) label: String,
    /// Number of flows of the connection.
    pub(super) flows: usize,
    /// How long the server may not respond.
    pub(super) timeout: Duration,
}

impl Dialer {
    /// Begins to connect to the server.
    pub(super) fn dial(&self) -> Result<Connecting, Error> {
        let addresses = vec![self.address.ip()];
        let handle = Handle { addresses, port: self.address.port(), nonce: NONCE };
        self.transport.try_connect(self.device, &handle, &self.label, self.flows)
    }

    /// Sets how long the server may not respond.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// An error that names the server.
    pub fn error(&self, what: &str) -> ClientError {
        ClientError::new(format!("reduction server {}: {what}", self.name))
    }
}
