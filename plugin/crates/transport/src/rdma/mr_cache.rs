//! Registration of message memory by its owner. Messages in such memory then need no registration
//! of their own.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use evenkeel_verbs::{Access, Context, MemoryRegion};

use super::adapter::Adapter;
use super::memory_types::MemoryTypes;
use super::queue_pairs::OwnPort;
use super::region_cache::OwnedMemory;
use super::regions::Regions;
use crate::device::Device;
use crate::error::Error;
use crate::memory::buffers::RecvBuffer;

/// Memory that is registered with a device, until this is dropped. A message with the handle needs
/// no search for its region; without one, it is found in the device's cache.
pub struct MrHandle {
    /// With the device, and with those that its connections may fail over to.
    regions: Vec<Arc<MemoryRegion>>,
    /// For host memory, which is registered with other devices when they need it.
    _owned: Vec<Arc<OwnedMemory>>,
}

impl fmt::Debug for MrHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranges = self.regions.iter().map(|region| region.range());
        f.debug_tuple("MrHandle").field(&ranges.collect::<Vec<_>>()).finish()
    }
}

impl MrHandle {
    /// The regions with these ports that have these bytes and grant the access.
    pub(super) fn regions(
        &self,
        ports: &[OwnPort],
        start: u64,
        length: usize,
        access: Access,
    ) -> Regions {
        let mut regions = Regions::default();
        for (number, port) in ports.iter().enumerate() {
            if let Some(region) = self.region(&port.adapter.context, start, length, access) {
                regions.set(number, region);
            }
        }
        regions
    }

    /// The region with this device, if it has these bytes and grants the access.
    fn region(
        &self,
        context: &Arc<Context>,
        start: u64,
        length: usize,
        access: Access,
    ) -> Option<Arc<MemoryRegion>> {
        let fits = |region: &&Arc<MemoryRegion>| {
            let range = region.range();
            region.is_of(context) && range.covers(start, length) && range.allows(access)
        };
        self.regions.iter().find(fits).cloned()
    }
}

/// Registers memory with a device, for all connections that use it.
pub struct MrCache {
    /// The device's ports. Empty where TCP carries messages, which need no registration.
    adapters: Vec<Arc<Adapter>>,
    /// Ports to which connections may fail over, for GPU memory: it cannot be registered at that
    /// time.
    failover_adapters: Vec<Arc<Adapter>>,
    /// The memory in which the connections' messages may be.
    memory_types: MemoryTypes,
}

impl MrCache {
    /// For memory of these types and for connections of this device, which may fail over to the
    /// others.
    pub(crate) fn new(
        device: &Device,
        others: impl Iterator<Item = Device>,
        memory_types: MemoryTypes,
    ) -> Self {
        let adapters = device.ports().to_vec();
        let is_own = |other: &Arc<Adapter>| adapters.iter().any(|own| Arc::ptr_eq(own, other));
        let others = others.filter(|_| !memory_types.is_host_only());
        let others = others.flat_map(|device| device.ports().to_vec());
        let failover_adapters = others.filter(|other| !is_own(other)).collect();
        Self { adapters, failover_adapters, memory_types }
    }

    /// Registers host memory; `None` where messages need no registration.
    ///
    /// # Errors
    /// [`ErrorKind::System`](crate::ErrorKind::System) when the memory is not the process's or may
    /// not be locked.
    pub fn register(&self, memory: RecvBuffer) -> Result<Option<MrHandle>, Error> {
        if self.adapters.is_empty() {
            return Ok(None);
        }
        let regions = self.register_own(|adapter| adapter.regions.buffer_region(memory))?;
        let owned = self.adapters.iter().map(|adapter| adapter.regions.add_owned(memory));
        Ok(Some(MrHandle { regions, _owned: owned.collect() }))
    }

    /// Registers GPU memory by its address, which the GPU's driver resolves. The contract is that
    /// of [`RecvBuffer::new`].
    ///
    /// # Errors
    /// [`ErrorKind::System`](crate::ErrorKind::System) when no driver knows the memory,
    /// [`ErrorKind::Argument`](crate::ErrorKind::Argument) where messages may not be in such
    /// memory.
    pub fn register_peer_memory(&self, memory: RecvBuffer) -> Result<MrHandle, Error> {
        if self.adapters.is_empty() || !self.memory_types.peer_memory {
            return Err(self.not_supported("memory of a GPU by its address"));
        }
        self.register_all(|adapter| adapter.regions.buffer_region(memory))
    }

    /// Registers the memory of a DMA-BUF: `length` bytes from `offset` in it, which have this
    /// `address`.
    ///
    /// # Errors
    /// [`ErrorKind::System`](crate::ErrorKind::System) when the device cannot do that,
    /// [`ErrorKind::Argument`](crate::ErrorKind::Argument) where messages may not be in such
    /// memory.
    pub fn register_dma_buffer(
        &self,
        buffer: BorrowedFd<'_>,
        offset: u64,
        address: u64,
        length: usize,
    ) -> Result<MrHandle, Error> {
        if self.adapters.is_empty() || !self.memory_types.dma_buffers {
            return Err(self.not_supported("a DMA buffer"));
        }
        self.register_all(|adapter| {
            let (none, access) = (std::iter::empty(), Access::RemoteReadWrite);
            adapter.regions.region(none, address, length, access, |context| {
                MemoryRegion::register_dma_buffer(context, buffer, offset, address, length)
            })
        })
    }

    /// Registers memory with the device's ports, as [`MrCache::register_own`], and with those of
    /// the others that accept it.
    fn register_all(
        &self,
        register: impl Fn(&Adapter) -> Result<Arc<MemoryRegion>, Error>,
    ) -> Result<MrHandle, Error> {
        let mut regions = self.register_own(&register)?;
        // A port that refuses the memory only rules out failover to it.
        regions.extend(self.failover_adapters.iter().filter_map(|adapter| register(adapter).ok()));
        Ok(MrHandle { regions, _owned: Vec::new() })
    }

    /// Registers memory with the device's ports, which must succeed. Of several ports, those that
    /// are down need not.
    fn register_own(
        &self,
        register: impl Fn(&Adapter) -> Result<Arc<MemoryRegion>, Error>,
    ) -> Result<Vec<Arc<MemoryRegion>>, Error> {
        let (mut regions, mut refused) = (Vec::new(), None);
        for adapter in &self.adapters {
            match register(adapter) {
                Ok(region) => regions.push(region),
                Err(error) if adapter.is_down() => refused = Some(error),
                Err(error) => return Err(error),
            }
        }
        match refused {
            Some(error) if regions.is_empty() => Err(error),
            _ => Ok(regions),
        }
    }

    fn not_supported(&self, what: &str) -> Error {
        let names: Vec<_> = self.adapters.iter().map(|adapter| adapter.name()).collect();
        let carrier = if names.is_empty() { "TCP".to_owned() } else { names.join("+") };
        let taken = match self.memory_types.names() {
            names if names.is_empty() => "host memory".to_owned(),
            names => format!("host memory, {names}"),
        };
        Error::argument(format!("a connection over {carrier} takes {taken}, not {what}"))
    }
}
