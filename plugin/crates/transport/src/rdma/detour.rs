//! Other ways to a peer.
//!
//! A way is a port of this host and an address of the listener's. When nothing gets through by a connection's, its sender
//! calls the listener by others, those that are likely to be of one rail first, and takes the first one by which there is an
//! answer: the queue pairs go where the lifeline goes.

use std::net::IpAddr;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use evenkeel_protocol::{Handle, MAX_ADDRESSES};

use super::send::Sender;
use crate::Context;
use crate::device::Device;
use crate::handshake::dial::{Call, CallError, Caller, Destination};

/// How long a call waits for the listener's welcome.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long after calls began others are made, if those have failed.
const PAUSE: Duration = Duration::from_millis(500);

pub(super) struct Detour {
    destination: Arc<Destination>,
    /// Who is connected with whom they call.
    caller: Weak<Sender>,
    /// Ports of this host, and addresses of the listener's; first those that the connection began with.
    devices: Vec<Device>,
    addresses: Vec<IpAddr>,
    current: Way,
    /// Those by which nobody answered, or nothing got through, since anything has.
    failed: Vec<Way>,
    calls: Vec<(Arc<Call>, Way)>,
    next_number: u32,
    not_before: Option<Instant>,
}

/// A way, by its places in the lists.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Way {
    device: usize,
    address: usize,
}

impl Way {
    fn is_straight(&self) -> bool {
        self.device == self.address
    }
}

impl Detour {
    pub(super) fn new(destination: &Arc<Destination>) -> Self {
        let context = &destination.context;
        let mut devices = vec![context.device.clone()];
        devices.extend(context.other_ports());
        Self {
            destination: Arc::clone(destination),
            caller: Weak::new(),
            devices,
            addresses: destination.handle.addresses.iter().take(1).copied().collect(),
            current: Way { device: 0, address: 0 },
            failed: Vec::new(),
            calls: Vec::new(),
            next_number: 1,
            not_before: None,
        }
    }

    pub(super) fn set_caller(&mut self, caller: &Arc<Sender>) {
        self.caller = Arc::downgrade(caller);
    }

    #[cfg(test)]
    pub(super) fn connection(&self) -> evenkeel_protocol::ConnectionId {
        self.destination.connection
    }

    /// The addresses of this host's other ports.
    pub(super) fn own_addresses(&self) -> Vec<IpAddr> {
        self.devices[1..].iter().flat_map(Device::addresses).collect()
    }

    /// The listener can be reached there as well.
    pub(super) fn hear(&mut self, addresses: &[IpAddr]) {
        let new = addresses.iter().filter(|address| !self.addresses.contains(address));
        let new: Vec<_> = new.copied().collect();
        self.addresses.extend(new);
        self.addresses.truncate(1 + MAX_ADDRESSES);
    }

    /// Whether there is any way but the one.
    pub(super) fn exists(&self) -> bool {
        self.devices.len() * self.addresses.len() > 1
    }

    /// Nothing gets through by the present way, until [`Detour::works`].
    pub(super) fn blame(&mut self) {
        if !self.failed.contains(&self.current) {
            self.failed.push(self.current);
        }
    }

    /// Something has come through.
    pub(super) fn works(&mut self) {
        if !self.failed.is_empty() || !self.calls.is_empty() {
            self.failed.clear();
            self.stop();
        }
    }

    /// Calls by ways that have not failed, or by all if all have.
    pub(super) fn search(&mut self, lanes: u16, now: Instant) {
        let Some(caller) = self.caller.upgrade() else { return };
        if !self.calls.is_empty() || self.not_before.is_some_and(|time| now < time) {
            return;
        }
        self.not_before = Some(now + PAUSE);
        let all = (0..self.devices.len()).flat_map(|device| {
            (0..self.addresses.len()).map(move |address| Way { device, address })
        });
        let up = |way: &Way| self.devices[way.device].rdma().is_some_and(|port| !port.is_down());
        let all: Vec<Way> = all.filter(up).collect();
        if all.iter().all(|way| self.failed.contains(way)) {
            self.failed.clear();
        }
        let mut untried: Vec<Way> =
            all.into_iter().filter(|way| !self.failed.contains(way)).collect();
        // Hosts are alike: ports at the same place in both lists are on one rail.
        if untried.iter().any(Way::is_straight) {
            untried.retain(Way::is_straight);
        }
        for way in untried {
            let Destination { context, workers, handle, peer, connection } = &*self.destination;
            let destination = Arc::new(Destination {
                context: Context { device: self.devices[way.device].clone(), ..context.clone() },
                workers: Arc::clone(workers),
                handle: Handle { addresses: vec![self.addresses[way.address]], ..handle.clone() },
                peer: *peer,
                connection: *connection,
            });
            let caller: Arc<dyn Caller> = Arc::<Sender>::clone(&caller);
            let number = self.next_number;
            self.next_number += 1;
            match Call::lifeline(&destination, caller, number, lanes, now + PATIENCE) {
                Ok(call) => self.calls.push((call, way)),
                // There is no route, but one may come.
                Err(_) => self.failed.push(way),
            }
        }
    }

    /// The listener has answered a call, by whose way the connection goes on, unless it was given up: the port.
    pub(super) fn take(&mut self, number: u32) -> Option<Device> {
        let at = self.calls.iter().position(|(call, _)| call.flow() == number)?;
        let (_, way) = self.calls.swap_remove(at);
        self.stop();
        self.current = way;
        Some(self.devices[way.device].clone())
    }

    /// A call has failed. Whether that says that the peer is gone.
    pub(super) fn not_welcomed(&mut self, number: u32, error: &CallError) -> bool {
        let Some(at) = self.calls.iter().position(|(call, _)| call.flow() == number) else {
            return false;
        };
        let (_, way) = self.calls.swap_remove(at);
        if !self.failed.contains(&way) {
            self.failed.push(way);
        }
        // By other ways somebody else may answer.
        error.is_gone || error.is_final && way == self.current
    }

    /// Gives up all calls.
    pub(super) fn stop(&mut self) {
        for (call, _) in self.calls.drain(..) {
            call.take_socket();
        }
    }
}
