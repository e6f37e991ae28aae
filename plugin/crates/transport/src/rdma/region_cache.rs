//! The memory regions of one device. Memory that is registered already is not registered again.

use std::sync::{Arc, Mutex, Weak};

use evenkeel_verbs::{Access, Context, MemoryRange, MemoryRegion};

use crate::error::{Error, ErrorKind};
use crate::memory::buffers::RecvBuffer;
use crate::sync::lock;
use crate::telemetry::counters::Counter;

/// The memory regions of a device. Each user holds a reference to its region, which ends with the last of them.
pub(crate) struct RegionCache {
    context: Arc<Context>,
    /// Searched for each message. The range is kept beside the reference because comparing it is cheaper than upgrading.
    regions: Mutex<Vec<(MemoryRange, Weak<MemoryRegion>)>>,
    /// Host memory that its owner has registered here, and that other devices may need after a failover.
    owned: Mutex<Vec<Weak<OwnedMemory>>>,
    /// Number of registrations with the device.
    pub(crate) registered: Counter,
    /// Number of times that a region was found here.
    pub(crate) reused: Counter,
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
    /// If the owner of the bytes has registered them with a `previous` port of the connection, all that was registered
    /// there is registered here too. That region lasts as long as the owner's.
    pub(crate) fn region<'a>(
        &self,
        previous: impl Iterator<Item = &'a Self>,
        start: u64,
        length: usize,
        access: Access,
        register: impl FnOnce(&Arc<Context>) -> Result<MemoryRegion, evenkeel_verbs::Error>,
    ) -> Result<Arc<MemoryRegion>, Error> {
        let mut regions = lock(&self.regions);
        let fits = |range: &MemoryRange| range.covers(start, length) && range.allows(access);
        let mut known = regions.iter().filter(|(range, _)| fits(range));
        if let Some(region) = known.find_map(|(_, region)| region.upgrade()) {
            self.reused.add(1);
            return Ok(region);
        }
        let mut others = previous.filter(|cache| !std::ptr::eq(*cache, self));
        let owned = others.find_map(|cache| cache.owned(start, length));
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
        regions.retain(|(_, region)| region.strong_count() > 0);
        regions.push((region.range(), Arc::downgrade(&region)));
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
        let mut all = lock(&self.owned);
        all.retain(|owned| owned.strong_count() > 0);
        all.push(Arc::downgrade(&owned));
        owned
    }

    /// The memory that its owner has registered here and that covers these bytes.
    fn owned(&self, start: u64, length: usize) -> Option<Arc<OwnedMemory>> {
        let owned = lock(&self.owned);
        let covers = |owned: &Arc<OwnedMemory>| {
            let before = start.checked_sub(owned.memory.address());
            let room = before.and_then(|before| (owned.memory.length() as u64).checked_sub(before));
            room.is_some_and(|room| room >= length as u64)
        };
        owned.iter().filter_map(Weak::upgrade).find(covers)
    }
}
