//! The memory regions of one device. Memory that is registered already is not registered again.

use std::sync::{Arc, Mutex};

use evenkeel_verbs::{Access, Context, MemoryRegion};

use super::range_map::RangeMap;
use crate::error::{Error, ErrorKind};
use crate::memory::buffers::RecvBuffer;
use crate::sync::lock;
use crate::telemetry::counters::Counter;

/// The memory regions of a device. Each user holds a reference to its region, which ends with the
/// last of them.
pub(crate) struct RegionCache {
    context: Arc<Context>,
    /// Searched for each message whose caller has not registered its memory itself.
    regions: Mutex<Regions>,
    /// Host memory that its owner has registered here, and that other devices may need after a
    /// failover.
    owned: Mutex<RangeMap<OwnedMemory>>,
    /// Number of registrations with the device.
    pub(crate) registered: Counter,
    /// Number of times that a region was found here.
    pub(crate) reused: Counter,
}

#[derive(Default)]
struct Regions {
    read_write: RangeMap<MemoryRegion>,
    read_only: RangeMap<MemoryRegion>,
}

impl Regions {
    fn find(&mut self, start: u64, length: usize, access: Access) -> Option<Arc<MemoryRegion>> {
        self.read_write.find(start, length).or_else(|| match access {
            Access::LocalRead => self.read_only.find(start, length),
            Access::RemoteReadWrite => None,
        })
    }

    fn insert(&mut self, region: &Arc<MemoryRegion>) {
        let range = region.range();
        let map = match range.access() {
            Access::LocalRead => &mut self.read_only,
            Access::RemoteReadWrite => &mut self.read_write,
        };
        map.insert(range.start(), range.length(), region);
    }
}

/// Host memory that its owner has registered.
pub(super) struct OwnedMemory {
    memory: RecvBuffer,
    /// Its regions with other devices.
    other_regions: Mutex<Vec<Arc<MemoryRegion>>>,
}

impl RegionCache {
    pub(crate) fn new(context: &Arc<Context>) -> Self {
        Self {
            context: Arc::clone(context),
            regions: Mutex::default(),
            owned: Mutex::default(),
            registered: Counter::default(),
            reused: Counter::default(),
        }
    }

    /// A region that covers these bytes; without one, `register` makes it.
    ///
    /// If the owner of the bytes has registered them with a `previous` port of the connection, all
    /// that was registered there is registered here too. That region lasts as long as the owner's.
    pub(crate) fn region<'a>(
        &self,
        previous: impl Iterator<Item = &'a Self>,
        start: u64,
        length: usize,
        access: Access,
        register: impl FnOnce(&Arc<Context>) -> Result<MemoryRegion, evenkeel_verbs::Error>,
    ) -> Result<Arc<MemoryRegion>, Error> {
        let mut regions = lock(&self.regions);
        if let Some(region) = regions.find(start, length, access) {
            self.reused.add(1);
            return Ok(region);
        }
        let mut others = previous.filter(|cache| !std::ptr::eq(*cache, self));
        let owned = others.find_map(|cache| lock(&cache.owned).find(start, length));
        // If the whole memory cannot be registered, the message's bytes may still be.
        let whole =
            owned.and_then(|owned| Some((owned.memory.register(&self.context).ok()?, owned)));
        let region = match whole {
            Some((region, owned)) => {
                let region = Arc::new(region);
                lock(&owned.other_regions).push(Arc::clone(&region));
                region
            }
            None => {
                let region = register(&self.context);
                Arc::new(region.map_err(|error| Error::new(ErrorKind::System, error.to_string()))?)
            }
        };
        self.registered.add(1);
        regions.insert(&region);
        Ok(region)
    }

    /// The region of a buffer that its owner registers.
    pub(super) fn buffer_region(&self, memory: RecvBuffer) -> Result<Arc<MemoryRegion>, Error> {
        let register = |context: &_| memory.register(context);
        let (start, length) = (memory.address(), memory.length());
        self.region(std::iter::empty(), start, length, Access::RemoteReadWrite, register)
    }

    /// Notes that an owner has registered host memory here, for as long as the result is held.
    pub(super) fn add_owned(&self, memory: RecvBuffer) -> Arc<OwnedMemory> {
        let owned = Arc::new(OwnedMemory { memory, other_regions: Mutex::default() });
        lock(&self.owned).insert(memory.address(), memory.length(), &owned);
        owned
    }
}
