//! Registered memory: what is registered once is not registered again.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, Weak};

use evenkeel_verbs::{Access, Context, MemoryRegion, Span};

use crate::device::Device;
use crate::error::{Error, ErrorKind};
use crate::memory::buffers::RecvBuffer;
use crate::rdma::{Adapter, MemoryTypes};
use crate::sync::lock;
use crate::telemetry::counters::Counter;

/// The registrations of a device. Who uses one holds it; it ends with the last who does.
pub(crate) struct RegionCache {
    context: Arc<Context>,
    /// Looked through for each message: spans are compared faster than references are taken.
    regions: Mutex<Vec<(Span, Weak<MemoryRegion>)>>,
    /// Host memory that its owner has registered here, which other devices may come to need.
    owned: Mutex<Vec<Weak<Owned>>>,
    /// Calls of the device.
    pub(crate) registered: Counter,
    /// Times that none was needed.
    pub(crate) reused: Counter,
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

    /// A registration that covers these bytes, which `register` makes if there is none. If their owner has registered them
    /// with one of the ports that were `left`, all that was registered there is registered here too, for as long.
    pub(crate) fn region(
        &self,
        left: &[Arc<Adapter>],
        start: u64,
        length: usize,
        access: Access,
        register: impl FnOnce(&Arc<Context>) -> Result<MemoryRegion, evenkeel_verbs::Error>,
    ) -> Result<Arc<MemoryRegion>, Error> {
        let mut regions = lock(&self.regions);
        let fits = |span: &Span| span.covers(start, length) && span.allows(access);
        let mut known = regions.iter().filter(|(span, _)| fits(span));
        if let Some(region) = known.find_map(|(_, region)| region.upgrade()) {
            self.reused.add(1);
            return Ok(region);
        }
        let mut others =
            left.iter().filter(|adapter| !std::ptr::eq(&raw const adapter.memory, self));
        let owned = others.find_map(|adapter| adapter.memory.owned(start, length));
        // There may be room for the message's bytes where there is none for all.
        let whole =
            owned.and_then(|owned| Some((owned.memory.register(&self.context).ok()?, owned)));
        let region = match whole {
            Some((region, owned)) => {
                let region = Arc::new(region);
                lock(&owned.elsewhere).push(Arc::clone(&region));
                region
            }
            None => {
                let region = register(&self.context);
                Arc::new(region.map_err(|error| Error::new(ErrorKind::System, error.to_string()))?)
            }
        };
        self.registered.add(1);
        regions.retain(|(_, region)| region.strong_count() > 0);
        regions.push((region.span(), Arc::downgrade(&region)));
        Ok(region)
    }

    /// A registration of a buffer, by its owner.
    fn of(&self, memory: RecvBuffer) -> Result<Arc<MemoryRegion>, Error> {
        let made = |context: &_| memory.register(context);
        self.region(&[], memory.address(), memory.length(), Access::All, made)
    }

    /// What its owner has registered here that covers these bytes.
    fn owned(&self, start: u64, length: usize) -> Option<Arc<Owned>> {
        let owned = lock(&self.owned);
        let covers = |owned: &Arc<Owned>| {
            let before = start.checked_sub(owned.memory.address());
            let room = before.and_then(|before| (owned.memory.length() as u64).checked_sub(before));
            room.is_some_and(|room| room >= length as u64)
        };
        owned.iter().filter_map(Weak::upgrade).find(covers)
    }
}

/// Host memory that its owner has registered.
struct Owned {
    memory: RecvBuffer,
    /// Its registrations with other devices.
    elsewhere: Mutex<Vec<Arc<MemoryRegion>>>,
}

/// Memory that is registered with a device, until this is dropped. Connections that use the memory then need
/// no call of the device for that.
pub struct MrHandle {
    /// With the device, and with those by which its connections may go on.
    _regions: Vec<Arc<MemoryRegion>>,
    /// For host memory, with which others can be registered when they are needed.
    _owned: Option<Arc<Owned>>,
}

/// Registers memory with a device, for all connections that use it.
pub struct MrCache {
    adapter: Option<Arc<Adapter>>,
    /// Ports by which connections may go on that use memory beside the host's: it cannot be registered when they do so.
    others: Vec<Arc<Adapter>>,
    /// Of messages that the memory is for.
    reach: MemoryTypes,
}

impl MrCache {
    /// For memory of this reach that is used with connections of this device, which may go on by others.
    pub(crate) fn new(
        device: &Device,
        others: impl Iterator<Item = Device>,
        reach: MemoryTypes,
    ) -> Self {
        let others = others.filter(|other| !reach.is_host() && other.name() != device.name());
        let others = others.filter_map(|device| device.rdma().cloned()).collect();
        Self { adapter: device.rdma().cloned(), others, reach }
    }

    /// Registers host memory; `None` where messages need no registration.
    ///
    /// # Errors
    /// [`ErrorKind::System`] when the memory is not the process's or may not be locked.
    pub fn register(&self, memory: RecvBuffer) -> Result<Option<MrHandle>, Error> {
        let Some(adapter) = &self.adapter else { return Ok(None) };
        let region = adapter.memory.of(memory)?;
        let owned = Arc::new(Owned { memory, elsewhere: Mutex::default() });
        let mut all = lock(&adapter.memory.owned);
        all.retain(|owned| owned.strong_count() > 0);
        all.push(Arc::downgrade(&owned));
        Ok(Some(MrHandle { _regions: vec![region], _owned: Some(owned) }))
    }

    /// Registers memory of a GPU by its address, which the GPU's driver knows. The contract is that of [`RecvBuffer::new`].
    ///
    /// # Errors
    /// [`ErrorKind::System`] when nobody knows the memory, [`ErrorKind::Argument`] where messages may not be in such memory.
    pub fn register_peer_memory(&self, memory: RecvBuffer) -> Result<MrHandle, Error> {
        let adapter = self.adapter.as_ref().filter(|_| self.reach.peer_memory);
        let adapter = adapter.ok_or_else(|| self.out_of_reach("memory of a GPU by its address"))?;
        self.register_all(adapter, |adapter| adapter.memory.of(memory))
    }

    /// Registers memory that a DMA buffer stands for: `length` bytes from `offset` there, which are at `address`.
    ///
    /// # Errors
    /// [`ErrorKind::System`] when the device cannot do that, [`ErrorKind::Argument`] where messages may not be in such memory.
    pub fn register_dma_buffer(
        &self,
        buffer: BorrowedFd<'_>,
        offset: u64,
        address: u64,
        length: usize,
    ) -> Result<MrHandle, Error> {
        let adapter = self.adapter.as_ref().filter(|_| self.reach.dma_buffers);
        let adapter = adapter.ok_or_else(|| self.out_of_reach("a DMA buffer"))?;
        self.register_all(adapter, |adapter| {
            let cache = &adapter.memory;
            cache.region(&[], address, length, Access::All, |context| {
                MemoryRegion::of_dma_buffer(context, buffer, offset, address, length)
            })
        })
    }

    /// Registers memory with the port of this, which has to take it, and with the others that do.
    fn register_all(
        &self,
        adapter: &Adapter,
        register: impl Fn(&Adapter) -> Result<Arc<MemoryRegion>, Error>,
    ) -> Result<MrHandle, Error> {
        let mut regions = vec![register(adapter)?];
        // Without the others connections go on as long as the port does.
        regions.extend(self.others.iter().filter_map(|adapter| register(adapter).ok()));
        Ok(MrHandle { _regions: regions, _owned: None })
    }

    fn out_of_reach(&self, what: &str) -> Error {
        let carrier = self.adapter.as_ref().map_or("TCP", |adapter| adapter.name());
        let taken = match self.reach.names() {
            names if names.is_empty() => "host memory".to_owned(),
            names => format!("host memory, {names}"),
        };
        Error::argument(format!("a connection over {carrier} takes {taken}, not {what}"))
    }
}
