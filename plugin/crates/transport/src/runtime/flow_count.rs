//! Controls the number of flows that the connections to one peer use.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, Instant};

use evenkeel_protocol::FlowCount;

use crate::sync::lock;
use crate::weak::WeakMap;

/// Measures together all connections to one peer that began with the same number of flows. They
/// share hosts and paths, so a single connection could not tell its own gain from what it takes
/// from the others.
#[derive(Debug)]
pub(crate) struct FlowCountController {
    epoch: Instant,
    /// Bytes carried by all of them.
    carried: AtomicU64,
    flows: AtomicUsize,
    is_limited_by_paths: AtomicBool,
    count: Mutex<FlowCount>,
}

impl FlowCountController {
    fn new(flows: usize) -> Self {
        Self {
            epoch: Instant::now(),
            carried: AtomicU64::new(0),
            flows: AtomicUsize::new(flows),
            is_limited_by_paths: AtomicBool::new(true),
            count: Mutex::new(FlowCount::new(flows)),
        }
    }

    /// The number of flows that each connection should use.
    pub(crate) fn flows(&self) -> usize {
        self.flows.load(Ordering::Relaxed)
    }

    /// Whether other paths might help. They cannot if the hosts are the bottleneck.
    pub(crate) fn is_limited_by_paths(&self) -> bool {
        self.is_limited_by_paths.load(Ordering::Relaxed)
    }

    /// Adds bytes that one of the connections carried.
    pub(crate) fn carried(&self, bytes: u64) {
        self.carried.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Notes the current number of flows of one of the connections.
    pub(crate) fn grow(&self, flows: usize) {
        let mut count = lock(&self.count);
        count.grow(flows);
        self.flows.store(count.in_use(), Ordering::Relaxed);
    }

    /// Measures since the last tick. `worked` is the total time that all threads have spent on
    /// sending, and `threads` is how many of them may work at once.
    pub(crate) fn tick(&self, worked: Duration, threads: usize) {
        let mut count = match self.count.try_lock() {
            Ok(count) => count,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // Another connection is measuring.
            Err(TryLockError::WouldBlock) => return,
        };
        let carried = self.carried.load(Ordering::Relaxed);
        if count.tick(self.epoch.elapsed(), carried, worked, threads) {
            self.flows.store(count.in_use(), Ordering::Relaxed);
        }
        self.is_limited_by_paths.store(count.is_limited_by_paths(), Ordering::Relaxed);
    }
}

/// The controllers by the peer's address and the number of flows that a connection begins with:
/// whether a flow pays for connections with one flow proves nothing about connections with four.
#[derive(Debug, Default)]
pub(crate) struct FlowCountControllers(Mutex<WeakMap<(IpAddr, usize), FlowCountController>>);

impl FlowCountControllers {
    /// The controller for a connection that begins with this number of flows to this peer.
    pub(crate) fn of(&self, peer: IpAddr, flows: usize) -> Arc<FlowCountController> {
        let mut all = lock(&self.0);
        let key = (peer, flows);
        all.live(&key).unwrap_or_else(|| {
            let controller = Arc::new(FlowCountController::new(flows));
            all.insert(key, &controller);
            controller
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flow_count_is_shared_per_peer() {
        let controllers = FlowCountControllers::default();
        let [one, other] = ["192.0.2.1", "192.0.2.2"].map(|ip| ip.parse().unwrap());
        let first = controllers.of(one, 4);
        assert!(Arc::ptr_eq(&first, &controllers.of(one, 4)));
        assert!(!Arc::ptr_eq(&first, &controllers.of(other, 4)));
        drop(first);
        assert_eq!(controllers.of(one, 8).flows(), 8, "a new one");
    }

    #[test]
    fn flow_count_of_later_connections_is_their_own() {
        let controllers = FlowCountControllers::default();
        let peer = "192.0.2.1".parse().unwrap();
        let one = controllers.of(peer, 1);
        let four = controllers.of(peer, 4);
        assert_eq!((one.flows(), four.flows()), (1, 4));
    }
}
