//! The sender's half of failover: it looks for another path to the receiver.
//!
//! When nothing gets through on the present path, the sender connects over others, all at once, and
//! over the present one again if all have failed. Paths that are likely to stay on one rail go
//! first. The first path on which the listener answers is taken: queue pairs use the ports at whose
//! addresses the control connection ends.

use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use evenkeel_protocol::{Handle, MAX_ADDRESSES};
use socket2::{SockAddr, Socket};

use crate::Context;
use crate::device::Device;
use crate::handshake::dial::{Destination, Dial, DialError, DialHandler, Way};

/// How long an attempt waits for the listener's answer.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(2);
/// Shortest time between two rounds of attempts.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// The paths of a connection, and the attempts to connect over them.
pub(in crate::rdma) struct PathSearch {
    destination: Arc<Destination>,
    /// The sender that is notified of the attempts' outcomes; set once.
    sender: Option<Weak<dyn DialHandler>>,
    /// This host's ports, each a device; first those of the device that the connection began with.
    devices: Vec<Device>,
    /// The listener's addresses, in the same order.
    addresses: Vec<IpAddr>,
    current: Path,
    /// Paths that have failed since the last progress.
    failed: Vec<Path>,
    attempts: Vec<(Arc<Dial>, Path)>,
    /// Number of the next control connection.
    next_number: u32,
    /// Earliest time of the next round of attempts.
    not_before: Option<Instant>,
    /// Whether attempts leave by their own interface. With several ports, every second round of all
    /// paths does.
    binds: bool,
}

/// A path: indexes of a port and of an address.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Path {
    device: usize,
    address: usize,
}

impl Path {
    /// Whether its two ends have the same index, and so are probably on one rail.
    fn is_same_rail(&self) -> bool {
        self.device == self.address
    }
}

impl PathSearch {
    /// For a connection whose control connection is on this socket.
    pub(in crate::rdma) fn new(destination: &Arc<Destination>, control: &Socket) -> Self {
        let context = &destination.context;
        let mut devices = context.device.each_port();
        devices.extend(context.other_ports());
        let addresses = destination.handle.addresses.clone();
        let ip =
            |address: io::Result<SockAddr>| Some(address.ok()?.as_socket()?.ip().to_canonical());
        let from = ip(control.local_addr())
            .and_then(|ip| devices.iter().position(|device| device.addresses().contains(&ip)));
        let to = ip(control.peer_addr())
            .and_then(|ip| addresses.iter().position(|address| *address == ip));
        let current = Path { device: from.unwrap_or(0), address: to.unwrap_or(0) };
        Self {
            destination: Arc::clone(destination),
            sender: None,
            devices,
            addresses,
            current,
            failed: Vec::new(),
            attempts: Vec::new(),
            next_number: 1,
            not_before: None,
            binds: context.device.ports().len() > 1,
        }
    }

    pub(in crate::rdma) fn set_sender(&mut self, sender: Weak<dyn DialHandler>) {
        self.sender = Some(sender);
    }

    #[cfg(test)]
    pub(in crate::rdma) fn connection(&self) -> evenkeel_protocol::ConnectionId {
        self.destination.connection
    }

    /// The addresses of this host's other ports.
    pub(in crate::rdma) fn own_addresses(&self) -> Vec<IpAddr> {
        self.devices[1..].iter().flat_map(Device::addresses).collect()
    }

    /// Adds addresses at which the listener can be reached too.
    pub(in crate::rdma) fn add_addresses(&mut self, addresses: &[IpAddr]) {
        let new = addresses.iter().filter(|address| !self.addresses.contains(address));
        let new: Vec<_> = new.copied().collect();
        self.addresses.extend(new);
        self.addresses.truncate(1 + MAX_ADDRESSES);
    }

    /// Notes that the present path has failed, until [`PathSearch::mark_working`].
    pub(in crate::rdma) fn mark_failed(&mut self) {
        if !self.failed.contains(&self.current) {
            self.failed.push(self.current);
        }
    }

    /// Data has arrived on the present path: forgets failures and gives up all attempts.
    pub(in crate::rdma) fn mark_working(&mut self) {
        if !self.failed.is_empty() || !self.attempts.is_empty() {
            self.failed.clear();
            self.cancel();
        }
    }

    /// Connects over the paths that have not failed, or over all if all have.
    pub(in crate::rdma) fn start_attempts(&mut self, queue_pairs: u16, now: Instant) {
        let Some(sender) = self.sender.as_ref().and_then(Weak::upgrade) else { return };
        if !self.attempts.is_empty() || self.not_before.is_some_and(|time| now < time) {
            return;
        }
        self.not_before = Some(now + RETRY_INTERVAL);
        let all = (0..self.devices.len()).flat_map(|device| {
            (0..self.addresses.len()).map(move |address| Path { device, address })
        });
        let up = |path: &Path| !self.devices[path.device].is_down();
        let all: Vec<Path> = all.filter(up).collect();
        if all.iter().all(|path| self.failed.contains(path)) {
            self.failed.clear();
            self.binds = !self.binds && self.destination.context.device.ports().len() > 1;
        }
        let mut untried: Vec<Path> =
            all.into_iter().filter(|path| !self.failed.contains(path)).collect();
        // Hosts usually list their ports in the same order, so equal indexes are on one rail.
        if untried.iter().any(Path::is_same_rail) {
            untried.retain(Path::is_same_rail);
        }
        for path in untried {
            let Destination { context, workers, handle, peer, connection } = &*self.destination;
            let destination = Arc::new(Destination {
                context: Context { device: self.devices[path.device].clone(), ..context.clone() },
                workers: Arc::clone(workers),
                handle: Handle { addresses: vec![self.addresses[path.address]], ..handle.clone() },
                peer: *peer,
                connection: *connection,
            });
            let number = self.next_number;
            self.next_number += 1;
            let deadline = now + ATTEMPT_TIMEOUT;
            let sender = Arc::clone(&sender);
            let way = Way { number, path: 0, binds: self.binds, segment_limit: None };
            match Dial::control_connection(&destination, sender, way, queue_pairs, deadline) {
                Ok(attempt) => self.attempts.push((attempt, path)),
                // There is no route now, but there may be one later.
                Err(_) => self.failed.push(path),
            }
        }
    }

    /// The listener has accepted an attempt: returns the device of its path, which is the present
    /// one from now on. `None` if the attempt was given up. A port of the device that the
    /// connection began with stands for the whole device.
    pub(in crate::rdma) fn accepted(&mut self, number: u32) -> Option<Device> {
        let at = self.attempts.iter().position(|(attempt, _)| attempt.flow() == number)?;
        let (_, path) = self.attempts.swap_remove(at);
        self.cancel();
        self.current = path;
        let began = &self.destination.context.device;
        Some(match path.device < began.ports().len() {
            true => began.clone(),
            false => self.devices[path.device].clone(),
        })
    }

    /// An attempt has failed: returns whether its error shows that the peer is gone.
    pub(in crate::rdma) fn attempt_failed(&mut self, number: u32, error: &DialError) -> bool {
        let Some(at) = self.attempts.iter().position(|(attempt, _)| attempt.flow() == number)
        else {
            return false;
        };
        let (_, path) = self.attempts.swap_remove(at);
        if !self.failed.contains(&path) {
            self.failed.push(path);
        }
        // At another address another host may have answered.
        error.is_gone || error.is_final && path == self.current
    }

    /// Whether it tries to connect.
    pub(in crate::rdma) fn is_trying(&self) -> bool {
        !self.attempts.is_empty()
    }

    /// Gives up all attempts.
    pub(in crate::rdma) fn cancel(&mut self) {
        for (attempt, _) in self.attempts.drain(..) {
            attempt.take_stream();
        }
    }
}
