//! The CollNet tables of a plugin: a network that reduces.

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::ptr;
use std::rc::Rc;

use evenkeel_nccl_abi::{
    CollNetV6, CollNetV7, CollNetV8, CollNetV9, CollNetV10, CollNetV11, CollNetV12, HANDLE_SIZE,
    PTR_HOST,
};

use super::{Direction, Memory, Plugin, Region, check, evenkeel_bench_log, int};
use crate::error::Result;

/// The table of an initialized plugin, and the plugin.
struct Table {
    symbol: *const c_void,
    version: u32,
    /// From v11 on, the communicator's context.
    context: *mut c_void,
    /// NCCL initializes the network's table first, and ends it last.
    _network: Rc<super::Table>,
}

/// Calls a slot that takes the same arguments in every version.
macro_rules! call_any {
    ($table:expr, $slot:ident $arguments:tt) => {
        call!($table, $slot: [
            6 CollNetV6, 7 CollNetV7, 8 CollNetV8, 9 CollNetV9, 10 CollNetV10, 11 CollNetV11,
            12 CollNetV12
        ] $arguments)
    };
}

impl Drop for Table {
    fn drop(&mut self) {
        let context = self.context;
        if !context.is_null() {
            // The context is the one init gave; every object made from it holds this table, so none
            // is left.
            let ended = call!(self, finalize: [11 CollNetV11, 12 CollNetV12](context));
            if let Err(error) = ended {
                eprintln!("warning: {error}");
            }
        }
    }
}

/// A plugin as a network that reduces.
pub(crate) struct Collectives(Rc<Table>);

impl Collectives {
    /// Initializes the plugin's newest CollNet table.
    ///
    /// # Errors
    /// When it has none, its init fails, or it has no such device.
    pub(crate) fn open(plugin: &Plugin, device: usize) -> Result<Self> {
        let (version, symbol) = plugin
            .collective
            .ok_or_else(|| format!("{} has no ncclCollNet table", plugin.path.display()))?;
        let mut context = ptr::null_mut();
        // SAFETY: logger.c defines it with this signature.
        let logger = Some(evenkeel_bench_log as evenkeel_nccl_abi::Logger);
        let network = Rc::clone(&plugin.table);
        let mut table = Table { symbol, version, context, _network: network };
        // The place outlives the call.
        call!(table, init:
            [6 CollNetV6, 7 CollNetV7, 8 CollNetV8, 9 CollNetV9, 10 CollNetV10](logger),
            [11 CollNetV11, 12 CollNetV12](&raw mut context, 1, logger),
        )?;
        table.context = context;
        let mut devices = 0;
        // The place outlives the call.
        call_any!(table, devices(&raw mut devices))?;
        if int(device, "device index")? >= devices {
            return Err(format!(
                "{} has {devices} CollNet devices, device {device} is none of them: are reduction servers given?",
                plugin.name
            ));
        }
        Ok(Self(Rc::new(table)))
    }

    /// Whether it reduces elements of this type, both as NCCL numbers them.
    pub(crate) fn supports(&self, kind: c_int, op: c_int) -> Result<bool> {
        let mut supported = 0;
        // The place outlives the call.
        call_any!(self.0, reduce_support(kind, op, &raw mut supported))?;
        Ok(supported != 0)
    }

    /// Begins to make a communicator.
    pub(crate) fn listen(&self, device: usize) -> Result<CollListener> {
        let device = int(device, "device index")?;
        let mut handle = [0; HANDLE_SIZE];
        let mut raw = ptr::null_mut();
        let place = handle.as_mut_ptr().cast();
        let context = self.0.context;
        // The handle has the size that every version asks for; both places outlive the call.
        call!(self.0, listen:
            [6 CollNetV6, 7 CollNetV7, 8 CollNetV8, 9 CollNetV9, 10 CollNetV10](device, place, &raw mut raw),
            [11 CollNetV11, 12 CollNetV12](context, device, place, &raw mut raw),
        )?;
        if raw.is_null() {
            return Err("the plugin's listen gave no listener".to_owned());
        }
        Ok(CollListener { table: Rc::clone(&self.0), raw, handle })
    }
}

/// A rank that the others may know.
pub(crate) struct CollListener {
    table: Rc<Table>,
    raw: *mut c_void,
    handle: [u8; HANDLE_SIZE],
}

impl CollListener {
    /// What the others need.
    pub(crate) fn handle(&self) -> [u8; HANDLE_SIZE] {
        self.handle
    }

    /// Joins all ranks, whose handles these are. May block, as NCCL lets it.
    pub(crate) fn connect(self, mut handles: Vec<[u8; HANDLE_SIZE]>, rank: usize) -> Result<Coll> {
        let mut pointers: Vec<*mut c_void> =
            handles.iter_mut().map(|handle| handle.as_mut_ptr().cast()).collect();
        let (ranks, rank) = (int(pointers.len(), "number of ranks")?, int(rank, "rank")?);
        let mut raw = ptr::null_mut();
        let (all, listener) = (pointers.as_mut_ptr(), self.raw);
        // There is a handle for each rank; the listener is open, and the place outlives the call.
        call_any!(self.table, connect(all, ranks, rank, listener, &raw mut raw))?;
        if raw.is_null() {
            return Err("the plugin's connect gave no communicator".to_owned());
        }
        Ok(Coll(Rc::new(Comm { raw, listener: self })))
    }
}

impl Drop for CollListener {
    fn drop(&mut self) {
        let listener = self.raw;
        // It is closed once, here.
        if let Err(error) = call_any!(self.table, close_listen(listener)) {
            eprintln!("warning: {error}");
        }
    }
}

/// A communicator. It is closed when its owner and all its requests are gone.
struct Comm {
    raw: *mut c_void,
    listener: CollListener,
}

impl Drop for Comm {
    fn drop(&mut self) {
        let comm = self.raw;
        // It is closed once, here.
        if let Err(error) = call_any!(self.listener.table, close_coll(comm)) {
            eprintln!("warning: {error}");
        }
    }
}

/// One rank of a communicator.
pub(crate) struct Coll(Rc<Comm>);

/// What is reduced. Types and reductions have the numbers of NCCL.
#[derive(Clone, Copy)]
pub(crate) struct Elements {
    /// How many.
    pub(crate) count: usize,
    /// Their type.
    pub(crate) kind: c_int,
    /// What is done with them.
    pub(crate) op: c_int,
}

/// A registered region. It must be given back before the region goes.
pub(crate) struct Registered {
    comm: Rc<Comm>,
    memory: Rc<Memory>,
    raw: *mut c_void,
}

impl Drop for Registered {
    fn drop(&mut self) {
        let (comm, raw) = (self.comm.raw, self.raw);
        // Registered with this communicator, which is still open.
        if let Err(error) = call_any!(self.comm.listener.table, dereg_mr(comm, raw)) {
            eprintln!("warning: {error}");
        }
    }
}

impl Coll {
    /// Makes a region's memory known to the plugin.
    pub(crate) fn register(&self, region: &Region) -> Result<Registered> {
        let mut raw = ptr::null_mut();
        let table = &self.0.listener.table;
        let (comm, data, size) = (self.0.raw, region.0.start.as_ptr().cast(), region.0.size);
        let small = if table.version < 8 { int(size, "memory")? } else { 0 };
        // The memory lives until after its deregistration: the result holds it.
        call!(table, reg_mr:
            [6 CollNetV6, 7 CollNetV7](comm, data, small, PTR_HOST, &raw mut raw),
            [8 CollNetV8, 9 CollNetV9, 10 CollNetV10, 11 CollNetV11, 12 CollNetV12](comm, data, size, PTR_HOST, &raw mut raw),
        )?;
        Ok(Registered { comm: Rc::clone(&self.0), memory: Rc::clone(&region.0), raw })
    }

    /// Begins to reduce a part of a region of all ranks into the same part of another; nothing if
    /// the plugin has no room for it now.
    pub(crate) fn all_reduce(
        &self,
        from: &Registered,
        to: &Registered,
        part: Range<usize>,
        elements: Elements,
    ) -> Result<Option<CollRequest>> {
        let Elements { count, kind, op } = elements;
        let table = &self.0.listener.table;
        let small = if table.version < 9 { int(count, "number of elements")? } else { 0 };
        from.memory.claim(&part, Direction::Send)?;
        if let Err(error) = to.memory.claim(&part, Direction::Receive) {
            from.memory.release(&part, Direction::Send);
            return Err(error);
        }
        let mut claims = Claims {
            from: Rc::clone(&from.memory),
            to: Rc::clone(&to.memory),
            part: part.clone(),
            plugin_has_them: false,
        };
        // SAFETY: `claim` made sure that the part lies inside the memory.
        let send = unsafe { from.memory.start.as_ptr().add(part.start) }.cast();
        // SAFETY: as above.
        let recv = unsafe { to.memory.start.as_ptr().add(part.start) }.cast();
        let (comm, from, to) = (self.0.raw, from.raw, to.raw);
        let mut raw = ptr::null_mut();
        // The claimed parts stay untouched and allocated until the request is done, or for ever;
        // the place outlives the call.
        call!(table, iallreduce:
            [6 CollNetV6, 7 CollNetV7, 8 CollNetV8](comm, send, recv, small, kind, op, from, to, &raw mut raw),
            [9 CollNetV9, 10 CollNetV10, 11 CollNetV11, 12 CollNetV12](comm, send, recv, count, kind, op, from, to, &raw mut raw),
        )?;
        if raw.is_null() {
            return Ok(None);
        }
        claims.plugin_has_them = true;
        Ok(Some(CollRequest { comm: Rc::clone(&self.0), raw, claims }))
    }
}

/// Memory that a plugin may use. What it still has when this is dropped is never given back.
struct Claims {
    from: Rc<Memory>,
    to: Rc<Memory>,
    part: Range<usize>,
    plugin_has_them: bool,
}

impl Drop for Claims {
    fn drop(&mut self) {
        if self.plugin_has_them {
            std::mem::forget((Rc::clone(&self.from), Rc::clone(&self.to)));
        } else {
            self.from.release(&self.part, Direction::Send);
            self.to.release(&self.part, Direction::Receive);
        }
    }
}

/// An all-reduce in flight. One that is dropped before it is done keeps its memory for ever, as the
/// plugin may still use it.
pub(crate) struct CollRequest {
    comm: Rc<Comm>,
    raw: *mut c_void,
    claims: Claims,
}

impl CollRequest {
    /// Whether it is done. Not to be asked again then.
    pub(crate) fn test(&mut self) -> Result<bool> {
        if !self.claims.plugin_has_them {
            return Err("this request is done and was tested again".to_owned());
        }
        let (raw, mut done, mut size) = (self.raw, 0, 0);
        // The request is not done, so it is the plugin's; the communicator is open, as this request
        // holds it.
        call_any!(self.comm.listener.table, test(raw, &raw mut done, &raw mut size))?;
        self.claims.plugin_has_them = done == 0;
        Ok(done != 0)
    }
}
