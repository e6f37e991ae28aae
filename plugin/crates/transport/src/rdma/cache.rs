//! Registered memory: what is registered once is not registered again.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, Weak};

use evenkeel_verbs::{Access, Context, Region, Span};

use crate::counters::Counter;
use crate::device::Device;
use crate::error::{Error, ErrorKind};
use crate::rdma::{Adapter, Reach};
use crate::sys::{RecvBuffer, lock};

/// The registrations of a device. Who uses one holds it; it ends with the last who does.
pub(crate) struct Cache {
    context: Arc<Context>,
    /// Looked through for each message: spans are compared faster than references are taken.
    regions: Mutex<Vec<(Span, Weak<Region>)>>,
    /// Calls of the device.
    pub(crate) registered: Counter,
    /// Times that none was needed.
    pub(crate) reused: Counter,
}

impl Cache {
    pub(crate) fn new(context: &Arc<Context>) -> Self {
        Self {
            context: Arc::clone(context),
            regions: Mutex::default(),
            registered: Counter::default(),
            reused: Counter::default(),
        }
    }

    /// A registration that covers these bytes, which `register` makes if there is none.
    pub(crate) fn region(
        &self,
        start: u64,
        length: usize,
        access: Access,
        register: impl FnOnce(&Arc<Context>) -> Result<Region, evenkeel_verbs::Error>,
    ) -> Result<Arc<Region>, Error> {
        let mut regions = lock(&self.regions);
        let fits = |span: &Span| span.covers(start, length) && span.allows(access);
        let mut known = regions.iter().filter(|(span, _)| fits(span));
        if let Some(region) = known.find_map(|(_, region)| region.upgrade()) {
            self.reused.add(1);
            return Ok(region);
        }
        let region = register(&self.context)
            .map_err(|error| Error::new(ErrorKind::System, error.to_string()))?;
        let region = Arc::new(region);
        self.registered.add(1);
        regions.retain(|(_, region)| region.strong_count() > 0);
        regions.push((region.span(), Arc::downgrade(&region)));
        Ok(region)
    }
}

/// Memory that is registered with a device, until this is dropped. Connections that use the memory then need
/// no call of the device for that.
pub struct Registration {
    _region: Arc<Region>,
}

/// Registers memory with a device, for all connections that use it.
pub struct Registrar {
    adapter: Option<Arc<Adapter>>,
    /// Of messages that the memory is for.
    reach: Reach,
}

impl Registrar {
    /// For memory of this reach that is used with connections of this device.
    pub(crate) fn new(device: &Device, reach: Reach) -> Self {
        Self { adapter: device.rdma().cloned(), reach }
    }

    /// Registers host memory; `None` where messages need no registration.
    ///
    /// # Errors
    /// [`ErrorKind::System`] when the memory is not the process's or may not be locked.
    pub fn register(&self, memory: RecvBuffer) -> Result<Option<Registration>, Error> {
        let Some(adapter) = &self.adapter else { return Ok(None) };
        Self::register_with(adapter, memory).map(Some)
    }

    /// Registers memory of a GPU by its address, which the GPU's driver knows. The contract is that of [`RecvBuffer::new`].
    ///
    /// # Errors
    /// [`ErrorKind::System`] when nobody knows the memory, [`ErrorKind::Argument`] where messages may not be in such memory.
    pub fn register_peer_memory(&self, memory: RecvBuffer) -> Result<Registration, Error> {
        let adapter = self.adapter.as_ref().filter(|_| self.reach.peer_memory);
        let adapter = adapter.ok_or_else(|| self.out_of_reach("memory of a GPU by its address"))?;
        Self::register_with(adapter, memory)
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
    ) -> Result<Registration, Error> {
        let adapter = self.adapter.as_ref().filter(|_| self.reach.dma_buffers);
        let adapter = adapter.ok_or_else(|| self.out_of_reach("a DMA buffer"))?;
        let region = adapter.memory.region(address, length, Access::All, |context| {
            Region::of_dma_buffer(context, buffer, offset, address, length)
        })?;
        Ok(Registration { _region: region })
    }

    fn register_with(adapter: &Adapter, memory: RecvBuffer) -> Result<Registration, Error> {
        let (address, length) = (memory.address(), memory.length());
        let made = |context: &_| memory.register(context);
        let region = adapter.memory.region(address, length, Access::All, made)?;
        Ok(Registration { _region: region })
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
