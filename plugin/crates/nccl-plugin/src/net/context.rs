//! A context: the listeners and connection attempts of one communicator.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use evenkeel_nccl_abi::{Attributes, HANDLE_SIZE, OP_ALL_REDUCE, OP_SEND};
use evenkeel_transport::sync::lock;
use evenkeel_transport::weak::WeakList;
use evenkeel_transport::{
    ConnectOptions, Connecting, Device, Error, HANDLE_BYTES, Handle, MemoryTypes, SendConnection,
    Transport,
};

use super::comm::{Comm, ListenComm};
use crate::error::PluginError;

/// Where in NCCL's handle the connecting side stores the number of its attempt; zero before the first call.
/// NCCL passes the same buffer to each call of `connect`.
const TICKET: std::ops::Range<usize> = HANDLE_BYTES..HANDLE_BYTES + 8;

const _: () = assert!(TICKET.end <= HANDLE_SIZE);

/// The listeners and connection attempts of one communicator. Tables without contexts share one.
pub(crate) struct Context {
    transport: Arc<Transport>,
    /// For log lines.
    label: String,
    /// Traffic class of the communicator's packets.
    traffic_class: Option<u8>,
    /// The connections that NCCL opens now go to many peers at a time.
    has_many_peers: AtomicBool,
    attempts: Mutex<HashMap<u64, Connecting>>,
    listeners: Mutex<WeakList<ListenComm>>,
    next_ticket: AtomicU64,
}

/// Number of peers at a time above which their connections spread over all paths by themselves.
const MANY_PEERS: i32 = 16;

/// Whether connections are for point-to-point messages with many peers at a time. Those of collectives have few.
fn have_many_peers(attributes: &Attributes) -> bool {
    let is_point_to_point = attributes.op & OP_SEND != 0 && attributes.op & OP_ALL_REDUCE == 0;
    is_point_to_point && attributes.send.max_concurrent_peers > MANY_PEERS
}

impl Context {
    pub(crate) fn new(transport: Arc<Transport>, label: String, traffic_class: Option<u8>) -> Self {
        Self {
            transport,
            label,
            traffic_class,
            has_many_peers: AtomicBool::new(false),
            attempts: Mutex::default(),
            listeners: Mutex::default(),
            next_ticket: AtomicU64::new(1),
        }
    }

    /// Whether this is the context's transport.
    pub(crate) fn uses(&self, transport: &Arc<Transport>) -> bool {
        Arc::ptr_eq(&self.transport, transport)
    }

    /// Takes what NCCL says of the connections that it opens next, or of the operation that begins.
    pub(crate) fn set_attributes(&self, attributes: &Attributes) {
        // An operation's attributes have its bit alone, and come from another thread. They change nothing: the connections are
        // open, and buffers may be polled by a GPU unless it is certain that they are not.
        if attributes.op.count_ones() > 1 {
            self.has_many_peers.store(have_many_peers(attributes), Ordering::Relaxed);
        }
    }

    /// Opens a listener and writes its handle.
    pub(crate) fn listen(
        &self,
        device: usize,
        handle: &mut [u8; HANDLE_SIZE],
    ) -> Result<Arc<ListenComm>, PluginError> {
        let listener = self.transport.listen(device, &self.label, self.memory_types(device))?;
        handle.fill(0);
        handle[..HANDLE_BYTES].copy_from_slice(&listener.handle().encode());
        let comm = Arc::new(ListenComm::new(listener));
        lock(&self.listeners).push(Arc::downgrade(&comm));
        Ok(comm)
    }

    /// Starts to connect, or polls the attempt that the handle names. The call's traffic class goes before the context's.
    pub(crate) fn connect(
        &self,
        device: usize,
        handle: &mut [u8; HANDLE_SIZE],
        traffic_class: Option<u8>,
    ) -> Result<Option<Comm<SendConnection>>, PluginError> {
        let mut ticket = [0; 8];
        ticket.copy_from_slice(&handle[TICKET]);
        let mut ticket = u64::from_le_bytes(ticket);
        if ticket == 0 {
            let mut encoded = [0; HANDLE_BYTES];
            encoded.copy_from_slice(&handle[..HANDLE_BYTES]);
            let peer = Handle::decode(&encoded).map_err(|error| {
                PluginError::invalid_argument(format!("invalid handle: {error}"))
            })?;
            let memory = self.memory_types(device);
            let (label, class) = (&self.label, traffic_class.or(self.traffic_class));
            let one_flow = self.has_many_peers.load(Ordering::Relaxed);
            let options = ConnectOptions { traffic_class: class, one_flow };
            let attempt = self.transport.connect_with(device, &peer, label, memory, options)?;
            // NCCL does not report that it aborts a communicator while that connects. Tables before v11 have no `finalize`.
            attempt.cancel_when_abandoned();
            ticket = self.next_ticket.fetch_add(1, Ordering::Relaxed);
            handle[TICKET].copy_from_slice(&ticket.to_le_bytes());
            let mut attempts = lock(&self.attempts);
            attempts.retain(|_, other| !other.is_abandoned());
            attempts.insert(ticket, attempt);
        }
        let mut attempts = lock(&self.attempts);
        let attempt = attempts.get(&ticket).ok_or_else(|| {
            PluginError::internal(
                "the connection attempt is finished, or was cancelled since it was not polled",
            )
        })?;
        let outcome = attempt.poll();
        let finished = match outcome {
            Ok(None) => return Ok(None),
            Ok(Some(_)) | Err(_) => attempts.remove(&ticket),
        };
        drop(attempts);
        drop(finished);
        let connection = outcome.map_err(Error::from)?;
        Ok(connection.map(Comm::new_send))
    }

    /// The memory types that the device advertises. NCCL registers memory only later, so connections are made for all of them.
    fn memory_types(&self, device: usize) -> MemoryTypes {
        self.transport.device(device).map_or(MemoryTypes::HOST, Device::memory_types)
    }

    /// Drops the attempts and closes the listeners that NCCL has left open.
    pub(crate) fn release(&self) {
        let attempts = std::mem::take(&mut *lock(&self.attempts));
        drop(attempts);
        let listeners = std::mem::take(&mut *lock(&self.listeners));
        listeners.live().for_each(|listener| listener.close());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use evenkeel_nccl_abi::CommAttributes;

    #[test]
    fn attributes_of_many_peers_are_those_of_point_to_point_messages() {
        let with = |op, peers| {
            let side = CommAttributes {
                max_concurrent_peers: peers,
                min_concurrent_peers: 1,
                max_flows_per_peer: 2,
                min_flows_per_peer: 1,
            };
            have_many_peers(&Attributes {
                send: side,
                recv: side,
                op,
                algo: u32::MAX,
                proto: u32::MAX,
            })
        };
        const OP_RECV: u32 = 1 << 7;
        assert!(with(OP_SEND | OP_RECV, 17));
        assert!(!with(OP_SEND | OP_RECV, 16) && !with(OP_SEND | OP_RECV, -1));
        // Undefined: all bits.
        assert!(!with(u32::MAX, 64));
    }
}
