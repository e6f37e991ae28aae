//! A host of NCCL's network plugins: loads one, whichever version of the interface it speaks, and
//! calls it as NCCL's proxy does. All that is unsafe here lies behind this module's types, which a
//! caller cannot misuse: memory lives as long as a plugin may touch it, and is not read or written
//! while it does.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::{Cell, RefCell};
use std::ffi::{CStr, OsStr, c_char, c_int, c_ulong, c_void};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::{fs, mem, slice};

use evenkeel_nccl_abi::{
    CommConfig, DeviceHandle, HANDLE_SIZE, NcclResult, NetV6, NetV7, NetV8, NetV9, NetV10, NetV11,
    NetV12, PTR_HOST, PropertiesV6, PropertiesV7, PropertiesV8, PropertiesV9, PropertiesV11,
    PropertiesV12, SUCCESS, TRAFFIC_CLASS_UNDEFINED,
};
use libloading::Library;

use crate::error::Result;

pub(crate) mod log;
pub(crate) mod process;

/// The versions of the interface, newest first as NCCL looks for them.
pub(crate) const VERSIONS: [u32; 7] = [12, 11, 10, 9, 8, 7, 6];

unsafe extern "C" {
    fn evenkeel_bench_log(
        level: c_int,
        subsystems: c_ulong,
        file: *const c_char,
        line: c_int,
        format: *const c_char,
        ...
    );
}

// Called by evenkeel_bench_log with the formatted line.
#[unsafe(no_mangle)]
extern "C" fn evenkeel_bench_line(level: c_int, line: *const c_char) {
    // SAFETY: logger.c passes a buffer that vsnprintf ended with a zero byte.
    let line = unsafe { CStr::from_ptr(line) };
    log::line(level, line.to_string_lossy().trim_end());
}

/// The table of an initialized plugin. The library stays mapped until the process ends, as plugins
/// may have threads.
struct Table {
    symbol: *const c_void,
    version: u32,
    /// From v11 on, the communicator's context.
    context: *mut c_void,
}

/// Calls a slot with the arguments that its version takes.
macro_rules! call {
    ($table:expr, $slot:ident: $([$($version:literal $layout:ty),+] $arguments:tt),+ $(,)?) => {
        match $table.version {
            $($($version => {
                // SAFETY: the symbol was looked up under the name of this version's table, and the
                // library stays mapped.
                let slot = unsafe { &*$table.symbol.cast::<$layout>() }.$slot;
                match slot {
                    // SAFETY: the arguments are what NCCL's header asks for in this version; each
                    // caller says why they are valid.
                    Some(function) => check(stringify!($slot), unsafe { function $arguments }),
                    None => Err(format!("the plugin's table v{} has no {}", $table.version, stringify!($slot))),
                }
            })+)+
            other => Err(format!("ncclNet v{other} is not known")),
        }
    };
}

/// Calls a slot that takes the same arguments in every version.
macro_rules! call_any {
    ($table:expr, $slot:ident $arguments:tt) => {
        call!($table, $slot: [6 NetV6, 7 NetV7, 8 NetV8, 9 NetV9, 10 NetV10, 11 NetV11, 12 NetV12] $arguments)
    };
}

// After the macro, which it uses.
pub(crate) mod collnet;

fn check(call: &str, result: NcclResult) -> Result<()> {
    if result == SUCCESS {
        return Ok(());
    }
    let name = match result {
        1 => "unhandled CUDA error",
        2 => "system error",
        3 => "internal error",
        4 => "invalid argument",
        5 => "invalid usage",
        6 => "remote error",
        7 => "in progress",
        _ => "unknown error",
    };
    let warning = log::take_warning();
    let why = if warning.is_empty() { String::new() } else { format!(": {warning}") };
    Err(format!("the plugin's {call} gave {name} ({result}){why}"))
}

fn int(value: usize, what: &str) -> Result<c_int> {
    c_int::try_from(value).map_err(|_| format!("{what} of {value} does not fit this version"))
}

impl Drop for Table {
    fn drop(&mut self) {
        let context = self.context;
        if !context.is_null() {
            // The context is the one init gave; every object made from it holds this table, so none
            // is left.
            let ended = call!(self, finalize: [11 NetV11, 12 NetV12](context));
            if let Err(error) = ended {
                eprintln!("warning: {error}");
            }
        }
    }
}

/// What a plugin says of one of its devices.
#[derive(Clone, Debug)]
pub(crate) struct Device {
    /// Its name.
    pub(crate) name: String,
    /// Mbit/s.
    pub(crate) speed: i64,
}

/// A loaded and initialized plugin.
pub(crate) struct Plugin {
    table: Rc<Table>,
    name: String,
    path: PathBuf,
    /// The newest CollNet table, if there is one.
    collective: Option<(u32, *const c_void)>,
}

impl Plugin {
    /// Loads the plugin that `spec` names as `NCCL_NET_PLUGIN` does (a path, a file name or the
    /// `NAME` of `libnccl-net-NAME.so`; none: `libnccl-net.so`), with the newest table it has, or
    /// with version `api`.
    ///
    /// # Errors
    /// Says which files were tried, or which tables the library lacks, or what its init gave.
    pub(crate) fn load(spec: Option<&str>, api: Option<u32>) -> Result<Self> {
        let candidates = match spec {
            None | Some("") => vec!["libnccl-net.so".to_owned()],
            Some(spec) if spec.contains('/') => vec![spec.to_owned()],
            Some(spec) => vec![spec.to_owned(), format!("libnccl-net-{spec}.so")],
        };
        let mut problems = vec![];
        let library = candidates.iter().find_map(|file| {
            // SAFETY: loading runs the library's constructors; the user chose the library, as one
            // does for NCCL.
            let loaded = unsafe { Library::new(OsStr::new(file)) };
            loaded.map_err(|error| problems.push(format!("{file}: {error}"))).ok()
        });
        let Some(library) = library else {
            return Err(format!(
                "no plugin loaded: {}; set --plugin or NCCL_NET_PLUGIN to the plugin's path",
                problems.join("; ")
            ));
        };
        let tried =
            VERSIONS.iter().copied().filter(|version| api.is_none_or(|api| api == *version));
        let found = tried.clone().find_map(|version| {
            let name = format!("ncclNetPlugin_v{version}");
            // SAFETY: the symbol is used as an address only; what lies there is NCCL's table of
            // this version.
            let symbol =
                unsafe { library.get::<*const c_void>(name.as_bytes()).ok()?.try_as_raw_ptr()? };
            Some((version, symbol.cast_const()))
        });
        let Some((version, symbol)) = found else {
            let wanted: Vec<_> = tried.map(|version| format!("v{version}")).collect();
            return Err(format!(
                "{} has no ncclNet table of version {}",
                candidates.join(" or "),
                wanted.join(", ")
            ));
        };
        let collective = VERSIONS.iter().find_map(|version| {
            let name = format!("ncclCollNetPlugin_v{version}");
            // SAFETY: as above.
            let symbol =
                unsafe { library.get::<*const c_void>(name.as_bytes()).ok()?.try_as_raw_ptr()? };
            Some((*version, symbol.cast_const()))
        });
        let path = mapped_file(symbol).unwrap_or_else(|| PathBuf::from(&candidates[0]));
        mem::forget(library);
        // SAFETY: every version's table begins with its name.
        let name = unsafe { *symbol.cast::<*const c_char>() };
        let name = text(name);
        let mut context = ptr::null_mut();
        let mut config = CommConfig { traffic_class: TRAFFIC_CLASS_UNDEFINED };
        // SAFETY: logger.c defines it with this signature.
        let logger = Some(evenkeel_bench_log as evenkeel_nccl_abi::Logger);
        let mut table = Table { symbol, version, context };
        // The pointers are to locals that outlive the call, or null where the header allows it.
        call!(table, init:
            [6 NetV6, 7 NetV7, 8 NetV8, 9 NetV9](logger),
            [10 NetV10](logger, None),
            [11 NetV11, 12 NetV12](&raw mut context, 1, &raw mut config, logger, None),
        )?;
        table.context = context;
        Ok(Self { table: Rc::new(table), name, path, collective })
    }

    /// The name it gives itself.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The version of the interface in use.
    pub(crate) fn version(&self) -> u32 {
        self.table.version
    }

    /// The file it was loaded from.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// What it says of all its devices.
    pub(crate) fn devices(&self) -> Result<Vec<Device>> {
        let mut count = 0;
        // `count` outlives the call.
        call_any!(self.table, devices(&raw mut count))?;
        (0..count).map(|device| self.device(device)).collect()
    }

    fn device(&self, device: c_int) -> Result<Device> {
        macro_rules! read {
            ($layout:ty, $properties:ty, $version:literal) => {{
                // SAFETY: zeroes are valid for all fields: numbers and pointers.
                let mut properties = unsafe { mem::zeroed::<$properties>() };
                // `properties` outlives the call.
                call!(self.table, get_properties: [$version $layout](device, &raw mut properties))?;
                (properties.name, properties.speed)
            }};
        }
        let (name, speed) = match self.table.version {
            6 => read!(NetV6, PropertiesV6, 6),
            7 => read!(NetV7, PropertiesV7, 7),
            8 => read!(NetV8, PropertiesV8, 8),
            9 => read!(NetV9, PropertiesV9, 9),
            10 => read!(NetV10, PropertiesV9, 10),
            11 => read!(NetV11, PropertiesV11, 11),
            _ => read!(NetV12, PropertiesV12, 12),
        };
        Ok(Device { name: text(name), speed: i64::from(speed) })
    }

    /// Listens on a device.
    pub(crate) fn listen(&self, device: usize) -> Result<Listener> {
        let device = int(device, "device index")?;
        let mut handle = [0; HANDLE_SIZE];
        let mut raw = ptr::null_mut();
        let place = handle.as_mut_ptr().cast();
        let context = self.table.context;
        // The handle has the size that every version asks for; both places outlive the call.
        call!(self.table, listen:
            [6 NetV6, 7 NetV7, 8 NetV8, 9 NetV9, 10 NetV10](device, place, &raw mut raw),
            [11 NetV11, 12 NetV12](context, device, place, &raw mut raw),
        )?;
        if raw.is_null() {
            return Err("the plugin's listen gave no listener".to_owned());
        }
        Ok(Listener { table: Rc::clone(&self.table), raw, handle })
    }

    /// Begins to connect from a device to a listener's handle.
    pub(crate) fn connect(&self, device: usize, handle: [u8; HANDLE_SIZE]) -> Result<Connecting> {
        let device = int(device, "device index")?;
        Ok(Connecting { table: Rc::clone(&self.table), device, handle: Box::new(handle) })
    }
}

/// A plugin's string; it lives as long as the plugin.
fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return "(none)".to_owned();
    }
    // SAFETY: the interface says that names are strings that end in a zero byte.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

/// The file that is mapped at an address.
fn mapped_file(address: *const c_void) -> Option<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines().find_map(|line| {
        let (from, to) = line.split_once(' ')?.0.split_once('-')?;
        let span = usize::from_str_radix(from, 16).ok()?..usize::from_str_radix(to, 16).ok()?;
        let path = &line[line.find('/')?..];
        span.contains(&address.addr()).then(|| PathBuf::from(path))
    })
}

/// A listener.
pub(crate) struct Listener {
    table: Rc<Table>,
    raw: *mut c_void,
    handle: [u8; HANDLE_SIZE],
}

impl Listener {
    /// What a peer connects to.
    pub(crate) fn handle(&self) -> [u8; HANDLE_SIZE] {
        self.handle
    }

    /// A connection that receives, if one is complete.
    pub(crate) fn accept(&mut self) -> Result<Option<Connection>> {
        let mut raw = ptr::null_mut();
        let mut device: *mut DeviceHandle = ptr::null_mut();
        let listener = self.raw;
        // The listener is open until dropped; both places outlive the call.
        call!(self.table, accept:
            [6 NetV6](listener, &raw mut raw),
            [7 NetV7, 8 NetV8, 9 NetV9, 10 NetV10, 11 NetV11, 12 NetV12](listener, &raw mut raw, &raw mut device),
        )?;
        Ok(Comm::new(&self.table, raw, Direction::Receive).map(Connection))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let listener = self.raw;
        // It is closed once, here.
        if let Err(error) = call_any!(self.table, close_listen(listener)) {
            eprintln!("warning: {error}");
        }
    }
}

/// A connection on its way. The plugin may keep state in the handle, so it stays where it is.
pub(crate) struct Connecting {
    table: Rc<Table>,
    device: c_int,
    handle: Box<[u8; HANDLE_SIZE]>,
}

impl Connecting {
    /// The connection, which sends, if it is complete.
    pub(crate) fn poll(&mut self) -> Result<Option<Connection>> {
        let mut raw = ptr::null_mut();
        let mut offload: *mut DeviceHandle = ptr::null_mut();
        let mut config = CommConfig { traffic_class: TRAFFIC_CLASS_UNDEFINED };
        let (context, device) = (self.table.context, self.device);
        let handle = self.handle.as_mut_ptr().cast();
        // The handle is writable and the same in each call; the other places outlive the call.
        call!(self.table, connect:
            [6 NetV6](device, handle, &raw mut raw),
            [7 NetV7, 8 NetV8, 9 NetV9](device, handle, &raw mut raw, &raw mut offload),
            [10 NetV10](device, &raw mut config, handle, &raw mut raw, &raw mut offload),
            [11 NetV11, 12 NetV12](context, device, handle, &raw mut raw, &raw mut offload),
        )?;
        Ok(Comm::new(&self.table, raw, Direction::Send).map(Connection))
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Send,
    Receive,
}

/// One end of a connection. It is closed when its owner and all its requests are gone.
struct Comm {
    table: Rc<Table>,
    raw: *mut c_void,
    direction: Direction,
    registered: RefCell<Vec<(Rc<Memory>, *mut c_void)>>,
}

impl Comm {
    fn new(table: &Rc<Table>, raw: *mut c_void, direction: Direction) -> Option<Rc<Self>> {
        let table = Rc::clone(table);
        let registered = RefCell::default();
        (!raw.is_null()).then(|| Rc::new(Self { table, raw, direction, registered }))
    }

    fn register(&self, region: &Region) -> Result<()> {
        let mut registration = ptr::null_mut();
        let (comm, data, size) = (self.raw, region.0.start.as_ptr().cast(), region.0.size);
        let small = if self.table.version < 8 { int(size, "memory")? } else { 0 };
        // The memory lives until after its deregistration: `registered` holds it.
        call!(self.table, reg_mr:
            [6 NetV6, 7 NetV7](comm, data, small, PTR_HOST, &raw mut registration),
            [8 NetV8, 9 NetV9, 10 NetV10, 11 NetV11, 12 NetV12](comm, data, size, PTR_HOST, &raw mut registration),
        )?;
        self.registered.borrow_mut().push((Rc::clone(&region.0), registration));
        Ok(())
    }

    fn registration(&self, memory: &Rc<Memory>) -> Result<*mut c_void> {
        let registered = self.registered.borrow();
        let found = registered.iter().find(|(known, _)| Rc::ptr_eq(known, memory));
        found
            .map(|(_, registration)| *registration)
            .ok_or_else(|| "this memory is not registered with this connection".to_owned())
    }

    /// Posts a transfer between a part of a region and the peer; nothing if the plugin has no room
    /// for it now.
    fn post(self: &Rc<Self>, region: &Region, part: Range<usize>) -> Result<Option<Request>> {
        let memory = &region.0;
        let mut registration = self.registration(memory)?;
        let mut size = part.len();
        // Every version's test reports sizes in an int.
        let mut small = int(size, "message")?;
        memory.claim(&part, self.direction)?;
        // SAFETY: `claim` made sure that the part lies inside the memory.
        let mut data: *mut c_void = unsafe { memory.start.as_ptr().add(part.start) }.cast();
        let (mut raw, mut tag, mut profile) = (ptr::null_mut(), 0, ptr::null_mut());
        let comm = self.raw;
        // The claimed part stays untouched and allocated until the request is done or the
        // connection closed; the places of irecv's arrays of one outlive the call.
        let posted = match self.direction {
            Direction::Send => call!(self.table, isend:
                [6 NetV6, 7 NetV7, 8 NetV8](comm, data, small, tag, registration, &raw mut raw),
                [9 NetV9](comm, data, size, tag, registration, &raw mut raw),
                [10 NetV10, 11 NetV11, 12 NetV12](comm, data, size, tag, registration, profile, &raw mut raw),
            ),
            Direction::Receive => call!(self.table, irecv:
                [6 NetV6, 7 NetV7, 8 NetV8](comm, 1, &raw mut data, &raw mut small, &raw mut tag, &raw mut registration, &raw mut raw),
                [9 NetV9](comm, 1, &raw mut data, &raw mut size, &raw mut tag, &raw mut registration, &raw mut raw),
                [10 NetV10, 11 NetV11, 12 NetV12](comm, 1, &raw mut data, &raw mut size, &raw mut tag, &raw mut registration, &raw mut profile, &raw mut raw),
            ),
        };
        if posted.is_err() || raw.is_null() {
            memory.release(&part, self.direction);
            return posted.map(|()| None);
        }
        Ok(Some(Request { comm: Rc::clone(self), raw, memory: Some(Rc::clone(memory)), part }))
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        let comm = self.raw;
        for (_, registration) in self.registered.borrow().iter() {
            let registration = *registration;
            // Registered with this connection, which is still open.
            if let Err(error) = call_any!(self.table, dereg_mr(comm, registration)) {
                eprintln!("warning: {error}");
            }
        }
        // It is closed once, here.
        let closed = match self.direction {
            Direction::Send => call_any!(self.table, close_send(comm)),
            Direction::Receive => call_any!(self.table, close_recv(comm)),
        };
        if let Err(error) = closed {
            eprintln!("warning: {error}");
        }
    }
}

/// One end of a connection, which sends or receives.
pub(crate) struct Connection(Rc<Comm>);

impl Connection {
    /// Whether this is the end that receives.
    pub(crate) fn receives(&self) -> bool {
        self.0.direction == Direction::Receive
    }

    /// Makes a region's memory known to the plugin.
    pub(crate) fn register(&self, region: &Region) -> Result<()> {
        self.0.register(region)
    }

    /// Begins to send or receive a part of a registered region; nothing if the plugin has no room
    /// for it now.
    pub(crate) fn post(&self, region: &Region, part: Range<usize>) -> Result<Option<Request>> {
        self.0.post(region, part)
    }
}

/// A transfer in flight. One that is dropped before it is done keeps its memory until the
/// connection is closed, as the plugin may still use it.
pub(crate) struct Request {
    comm: Rc<Comm>,
    raw: *mut c_void,
    /// None once it is done.
    memory: Option<Rc<Memory>>,
    part: Range<usize>,
}

impl Request {
    /// The number of bytes transferred, once it is done.
    pub(crate) fn test(&mut self) -> Result<Option<usize>> {
        let Some(memory) = &self.memory else {
            return Err("this request is done and was tested again".to_owned());
        };
        let (raw, mut done, mut size) = (self.raw, 0, 0);
        // The request is not done, so it is the plugin's; the connection is open, as this request
        // holds it.
        call_any!(self.comm.table, test(raw, &raw mut done, &raw mut size))?;
        if done == 0 {
            return Ok(None);
        }
        memory.release(&self.part, self.comm.direction);
        self.memory = None;
        match usize::try_from(size) {
            Ok(size) if size <= self.part.len() => Ok(Some(size)),
            _ => Err(format!(
                "the plugin says that {size} bytes went through a part of {}",
                self.part.len()
            )),
        }
    }
}

/// Zeroed memory on page boundaries that plugins may use. A clone is the same memory.
#[derive(Clone)]
pub(crate) struct Region(Rc<Memory>);

struct Memory {
    start: NonNull<u8>,
    size: usize,
    /// What plugins use now: few, as many as there are requests in flight.
    claims: RefCell<Vec<(Range<usize>, Direction)>>,
    /// Closures that read now, or that write (-1).
    open: Cell<isize>,
}

const PAGE: usize = 4096;

impl Memory {
    fn layout(size: usize) -> Result<Layout> {
        Layout::from_size_align(size.max(1), PAGE).map_err(|_| format!("{size} bytes are too many"))
    }

    fn inside(&self, part: &Range<usize>) -> Result<()> {
        if part.start <= part.end && part.end <= self.size {
            return Ok(());
        }
        Err(format!("bytes {part:?} of a region of {}", self.size))
    }

    /// Whether a plugin uses bytes of the part, in a way that `conflicts`.
    fn used(&self, part: &Range<usize>, conflicts: impl Fn(Direction) -> bool) -> bool {
        let overlaps = |a: &Range<usize>| a.start < part.end && part.start < a.end;
        self.claims.borrow().iter().any(|(claimed, how)| conflicts(*how) && overlaps(claimed))
    }

    fn claim(&self, part: &Range<usize>, direction: Direction) -> Result<()> {
        self.inside(part)?;
        let open = self.open.get();
        let other = |how| direction == Direction::Receive || how == Direction::Receive;
        if open < 0 || (open > 0 && direction == Direction::Receive) || self.used(part, other) {
            return Err(format!("bytes {part:?} are in use"));
        }
        self.claims.borrow_mut().push((part.clone(), direction));
        Ok(())
    }

    fn release(&self, part: &Range<usize>, direction: Direction) {
        let mut claims = self.claims.borrow_mut();
        if let Some(at) = claims.iter().position(|(known, how)| known == part && *how == direction)
        {
            claims.swap_remove(at);
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Ok(layout) = Self::layout(self.size) {
            // SAFETY: allocated with this layout, and nobody refers to it: a connection holds the
            // memory that is registered with it, and so all that its requests use, until it is
            // closed.
            unsafe { dealloc(self.start.as_ptr(), layout) };
        }
    }
}

/// Restores how a region was open when a closure over it ends, also by a panic.
struct Opened<'a>(&'a Cell<isize>, isize);

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        self.0.set(self.1);
    }
}

impl Region {
    /// Memory of `size` bytes.
    pub(crate) fn new(size: usize) -> Result<Self> {
        let layout = Memory::layout(size)?;
        // SAFETY: the layout's size is at least 1.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })
            .ok_or_else(|| format!("no memory for a buffer of {size} bytes"))?;
        Ok(Self(Rc::new(Memory { start, size, claims: RefCell::default(), open: Cell::new(0) })))
    }

    /// Its size.
    pub(crate) fn bytes(&self) -> usize {
        self.0.size
    }

    /// Reads a part that no plugin is writing.
    pub(crate) fn read<T>(&self, part: Range<usize>, with: impl FnOnce(&[u8]) -> T) -> Result<T> {
        let memory = &self.0;
        memory.inside(&part)?;
        let open = memory.open.get();
        if open < 0 || memory.used(&part, |how| how == Direction::Receive) {
            return Err(format!("bytes {part:?} are being written"));
        }
        memory.open.set(open + 1);
        let _opened = Opened(&memory.open, open);
        // SAFETY: inside the allocation, which was zeroed; nobody writes it before `with` ends: no
        // plugin does, `claim` refuses receives and `write` refuses while `open` is above zero.
        Ok(with(unsafe {
            slice::from_raw_parts(memory.start.as_ptr().add(part.start), part.len())
        }))
    }

    /// Writes a part that no plugin is using.
    pub(crate) fn write<T>(
        &self,
        part: Range<usize>,
        with: impl FnOnce(&mut [u8]) -> T,
    ) -> Result<T> {
        let memory = &self.0;
        memory.inside(&part)?;
        if memory.open.get() != 0 || memory.used(&part, |_| true) {
            return Err(format!("bytes {part:?} are in use"));
        }
        memory.open.set(-1);
        let _opened = Opened(&memory.open, 0);
        // SAFETY: inside the allocation, which was zeroed; nobody else reads or writes it before
        // `with` ends: no plugin does, and `claim`, `read` and `write` refuse while `open` is below
        // zero.
        Ok(with(unsafe {
            slice::from_raw_parts_mut(memory.start.as_ptr().add(part.start), part.len())
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_is_exclusive_while_written() {
        let region = Region::new(100).unwrap();
        region
            .write(0..10, |bytes| {
                bytes.fill(7);
                assert!(region.read(50..60, |_| ()).is_err());
                assert!(region.write(50..60, |_| ()).is_err());
                assert!(region.0.claim(&(50..60), Direction::Send).is_err());
            })
            .unwrap();
        region
            .read(0..10, |bytes| {
                assert_eq!(bytes, [7; 10]);
                assert!(region.read(0..10, |_| ()).is_ok());
                assert!(region.write(50..60, |_| ()).is_err());
                assert!(region.0.claim(&(50..60), Direction::Receive).is_err());
            })
            .unwrap();
        assert!(region.write(0..101, |_| ()).is_err());
    }

    #[test]
    fn buffer_in_use_by_a_plugin_is_untouchable() {
        let region = Region::new(100).unwrap();
        region.0.claim(&(0..10), Direction::Send).unwrap();
        region.0.claim(&(0..10), Direction::Send).unwrap();
        region.0.claim(&(20..30), Direction::Receive).unwrap();
        assert!(region.read(0..20, |_| ()).is_ok());
        assert!(region.write(9..12, |_| ()).is_err());
        assert!(region.read(29..31, |_| ()).is_err());
        assert!(region.0.claim(&(25..26), Direction::Send).is_err());
        region.0.release(&(0..10), Direction::Send);
        assert!(region.write(9..12, |_| ()).is_err(), "one of two sends is left");
        region.0.release(&(0..10), Direction::Send);
        assert!(region.write(9..12, |_| ()).is_ok());
    }
}
