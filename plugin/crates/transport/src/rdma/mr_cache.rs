//! Registration of message memory by its owner. Messages in such memory then need no registration of their own.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use evenkeel_verbs::{Access, Context, MemoryRegion};

use super::adapter::Adapter;
use super::memory_types::MemoryTypes;
use super::region_cache::OwnedMemory;
use crate::device::Device;
use crate::error::Error;
use crate::memory::buffers::RecvBuffer;

/// Memory that is registered with a device, until this is dropped. A message with the handle needs no search for its region;
/// without one, it is found in the device's cache.
pub struct MrHandle {
    /// With the device, and with those that its connections may fail over to.
    regions: Vec<Arc<MemoryRegion>>,
    /// For host memory, which is registered with other devices when they need it.
    _owned: Option<Arc<OwnedMemory>>,
}

impl fmt::Debug for MrHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranges = self.regions.iter().map(|region| region.range());
        f.debug_tuple("MrHandle").field(&ranges.collect::<Vec<_>>()).finish()
    }
}

impl MrHandle {
    /// The region with this device, if it has these bytes and grants the access.
    pub(super) fn region(
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
    /// `None` where TCP carries messages, which need no registration.
    adapter: Option<Arc<Adapter>>,
    /// Ports to which connections may fail over, for GPU memory: it cannot be registered at that time.
    failover_adapters: Vec<Arc<Adapter>>,
    /// The memory in which the connections' messages may be.
    memory_types: MemoryTypes,
}

impl MrCache {
    /// For memory of these types and for connections of this device, which may fail over to the others.
    pub(crate) fn new(
        device: &Device,
        others: impl Iterator<Item = Device>,
        memory_types: MemoryTypes,
    ) -> Self {
        let others =
            others.filter(|other| !memory_types.is_host_only() && other.name() != device.name());
        let failover_adapters = others.filter_map(|device| device.rdma().cloned()).collect();
        Self { adapter: device.rdma().cloned(), failover_adapters, memory_types }
    }

    /// Registers host memory; `None` where messages need no registration.
    ///
    /// # Errors
    /// [`ErrorKind::System`](crate::ErrorKind::System) when the memory is not the process's or may not be locked.
    pub fn register(&self, memory: RecvBuffer) -> Result<Option<MrHandle>, Error> {
        let Some(adapter) = &self.adapter else { return Ok(None) };
        let region = adapter.regions.buffer_region(memory)?;
        let owned = adapter.regions.add_owned(memory);
        Ok(Some(MrHandle { regions: vec![region], _owned: Some(owned) }))
    }

    /// Registers GPU memory by its address, which the GPU's driver resolves. The contract is that of [`RecvBuffer::new`].
    ///
    /// # Errors
    /// [`ErrorKind::System`](crate::ErrorKind::System) when no driver knows the memory,
    /// [`ErrorKind::Argument`](crate::ErrorKind::Argument) where messages may not be in such memory.
    pub fn register_peer_memory(&self, memory: RecvBuffer) -> Result<MrHandle, Error> {
        let adapter = self.adapter.as_ref().filter(|_| self.memory_types.peer_memory);
        let adapter =
            adapter.ok_or_else(|| self.not_supported("memory of a GPU by its address"))?;
        self.register_all(adapter, |adapter| adapter.regions.buffer_region(memory))
    }

    /// Registers the memory of a DMA-BUF: `length` bytes from `offset` in it, which have this `address`.
    ///
    /// # Errors
    /// [`ErrorKind::System`](crate::ErrorKind::System) when the device cannot do that,
    /// [`ErrorKind::Argument`](crate::ErrorKind::Argument) where messages may not be in such memory.
    pub fn register_dma_buffer(
        &self,
        buffer: BorrowedFd<'_>,
        offset: u64,
        address: u64,
        length: usize,
    ) -> Result<MrHandle, Error> {
        let adapter = self.adapter.as_ref().filter(|_| self.memory_types.dma_buffers);
        let adapter = adapter.ok_or_else(|| self.not_supported("a DMA buffer"))?;
        self.register_all(adapter, |adapter| {
            let (none, access) = (std::iter::empty(), Access::RemoteReadWrite);
            adapter.regions.region(none, address, length, access, |context| {
                MemoryRegion::register_dma_buffer(context, buffer, offset, address, length)
            })
        })
    }

    /// Registers memory with the device's port, which must succeed, and with those of the others that accept it.
    fn register_all(
        &self,
        adapter: &Adapter,
        register: impl Fn(&Adapter) -> Result<Arc<MemoryRegion>, Error>,
    ) -> Result<MrHandle, Error> {
        let mut regions = vec![register(adapter)?];
        // A port that refuses the memory only rules out failover to it.
        regions.extend(self.failover_adapters.iter().filter_map(|adapter| register(adapter).ok()));
        Ok(MrHandle { regions, _owned: None })
    }

    fn not_supported(&self, what: &str) -> Error {
        let carrier = self.adapter.as_ref().map_or("TCP", |adapter| adapter.name());
        let taken = match self.memory_types.names() {
            names if names.is_empty() => "host memory".to_owned(),
            names => format!("host memory, {names}"),
        };
        Error::argument(format!("a connection over {carrier} takes {taken}, not {what}"))
    }
}
