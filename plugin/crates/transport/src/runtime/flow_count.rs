//! How many of their flows the connections to one peer use.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, TryLockError, Weak};
use std::time::{Duration, Instant};

use evenkeel_protocol::FlowCount;

use crate::sync::lock;

/// What the connections to one peer find out together: they share hosts and paths, and one alone could not tell what it
/// gains by itself from what it takes from the others.
#[derive(Debug)]
pub(crate) struct Breadth {
    epoch: Instant,
    /// Bytes that all have carried.
    carried: AtomicU64,
    flows: AtomicUsize,
    paths_matter: AtomicBool,
    finding: Mutex<FlowCount>,
}

impl Breadth {
    fn new(flows: usize) -> Self {
        Self {
            epoch: Instant::now(),
            carried: AtomicU64::new(0),
            flows: AtomicUsize::new(flows),
            paths_matter: AtomicBool::new(true),
            finding: Mutex::new(FlowCount::new(flows)),
        }
    }

    /// How many flows each is to use.
    pub(crate) fn flows(&self) -> usize {
        self.flows.load(Ordering::Relaxed)
    }

    /// Whether other paths might be of use: not where the hosts are the limit.
    pub(crate) fn paths_matter(&self) -> bool {
        self.paths_matter.load(Ordering::Relaxed)
    }

    /// One of them has carried so many bytes.
    pub(crate) fn carried(&self, bytes: u64) {
        self.carried.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Some time has passed. `worked`: how long those who write have worked so far, all together.
    pub(crate) fn tick(&self, worked: Duration) {
        let mut finding = match self.finding.try_lock() {
            Ok(finding) => finding,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // Another one does it.
            Err(TryLockError::WouldBlock) => return,
        };
        let carried = self.carried.load(Ordering::Relaxed);
        if finding.tick(self.epoch.elapsed(), carried, worked) {
            self.flows.store(finding.in_use(), Ordering::Relaxed);
        }
        self.paths_matter.store(finding.paths_matter(), Ordering::Relaxed);
    }
}

/// That of each peer.
#[derive(Debug, Default)]
pub(crate) struct Breadths(Mutex<HashMap<IpAddr, Weak<Breadth>>>);

impl Breadths {
    /// For a connection of so many flows to this peer.
    pub(crate) fn of(&self, peer: IpAddr, flows: usize) -> Arc<Breadth> {
        let mut all = lock(&self.0);
        all.retain(|_, breadth| breadth.strong_count() > 0);
        let known = all.get(&peer).and_then(Weak::upgrade);
        known.unwrap_or_else(|| {
            let breadth = Arc::new(Breadth::new(flows));
            all.insert(peer, Arc::downgrade(&breadth));
            breadth
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_to_one_peer_share_it_as_long_as_there_is_one() {
        let breadths = Breadths::default();
        let [one, other] = ["192.0.2.1", "192.0.2.2"].map(|ip| ip.parse().unwrap());
        let first = breadths.of(one, 4);
        assert!(Arc::ptr_eq(&first, &breadths.of(one, 4)));
        assert!(!Arc::ptr_eq(&first, &breadths.of(other, 4)));
        drop(first);
        assert_eq!(breadths.of(one, 8).flows(), 8, "a new one");
    }
}
