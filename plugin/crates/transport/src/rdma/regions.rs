//! The memory regions of one message: one with each port of the connection that needs it.

use std::sync::Arc;

use evenkeel_protocol::MAX_PORTS;
use evenkeel_verbs::MemoryRegion;

/// A region with each port of this end, in their order, as far as the message needs them.
#[derive(Clone, Default)]
pub(crate) struct Regions([Option<Arc<MemoryRegion>>; MAX_PORTS]);

impl Regions {
    /// The region with a port.
    pub(super) fn get(&self, port: usize) -> Option<&Arc<MemoryRegion>> {
        self.0.get(port)?.as_ref()
    }

    /// Takes the region with a port out.
    pub(super) fn take(&mut self, port: usize) -> Option<Arc<MemoryRegion>> {
        self.0.get_mut(port)?.take()
    }

    /// Holds a region with a port.
    pub(super) fn set(&mut self, port: usize, region: Arc<MemoryRegion>) {
        if let Some(place) = self.0.get_mut(port) {
            *place = Some(region);
        }
    }

    /// Whether there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    /// The keys with which peers access the memory; 0 where it is not registered.
    pub(super) fn remote_keys(&self) -> [u32; MAX_PORTS] {
        self.0.each_ref().map(|region| region.as_ref().map_or(0, |region| region.remote_key()))
    }
}
