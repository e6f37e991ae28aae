//! The exported tables. Functions here translate arguments and nothing else; where versions differ
//! only in a type, one generic body serves them.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::Arc;

use evenkeel_nccl_abi::{
    CommConfig, DEVICE_HOST, DEVICE_VERSION_INVALID, DeviceHandle, HANDLE_SIZE, Logger, NcclResult,
    NetV6, NetV7, NetV8, NetV9, NetV10, NetV11, NetV12, PTR_CUDA, PTR_DMABUF, PTR_HOST,
    ProfilerCallback, PropertiesV6, PropertiesV7, PropertiesV8, PropertiesV9, PropertiesV11,
    PropertiesV12, RAIL_UNDEFINED, VDeviceProperties,
};
use evenkeel_transport::{
    MAX_RECVS, MemoryTypes, MrCache, MrHandle, RecvBuffer, RecvConnection, SendBuffer,
    SendConnection, Tagged,
};

use crate::failure::{Failure, guard};
use crate::logger::LOG;
use crate::plugin::{self, Comm, Context, DeviceProperties, ListenComm, MAX_BYTES, Slot};

/// The name that users may ask for with `NCCL_NET`.
pub(crate) const NAME: &CStr = c"Evenkeel";
/// Connections are limited by file descriptors only; this is what NCCL's own sockets say.
const MAX_COMMS: c_int = 65536;

/// A reference to what a pointer from NCCL points to.
///
/// # Safety
/// `pointer` must be null or valid for reads as a `T` for as long as the result is used.
pub(crate) unsafe fn object<'a, T>(pointer: *const c_void, what: &str) -> Result<&'a T, Failure> {
    // SAFETY: passed on to the caller.
    unsafe { pointer.cast::<T>().as_ref() }
        .ok_or_else(|| Failure::argument(format!("{what} is null")))
}

/// A mutable reference to where NCCL wants a result, or to what it lends.
///
/// # Safety
/// `pointer` must be null or valid for reads and writes as a `T`, for this thread only, for as long
/// as the result is used.
pub(crate) unsafe fn place<'a, T>(pointer: *mut T, what: &str) -> Result<&'a mut T, Failure> {
    // SAFETY: passed on to the caller.
    unsafe { pointer.as_mut() }.ok_or_else(|| Failure::argument(format!("{what} is null")))
}

pub(crate) fn index(device: c_int) -> Result<usize, Failure> {
    usize::try_from(device).map_err(|_| Failure::argument(format!("no device {device}")))
}

// Initialization

unsafe extern "C" fn init(logger: Option<Logger>) -> NcclResult {
    LOG.set(logger);
    guard("init", plugin::init_global)
}

unsafe extern "C" fn init_profiled(
    logger: Option<Logger>,
    _profiler: Option<ProfilerCallback>,
) -> NcclResult {
    LOG.set(logger);
    guard("init", plugin::init_global)
}

unsafe extern "C" fn init_context(
    context: *mut *mut c_void,
    communicator: u64,
    config: *mut CommConfig,
    logger: Option<Logger>,
    _profiler: Option<ProfilerCallback>,
) -> NcclResult {
    LOG.set(logger);
    guard("init", || {
        // SAFETY: NCCL passes a place for the context.
        let place = unsafe { place(context, "context") }?;
        // SAFETY: NCCL passes a configuration, or null.
        let class = unsafe { traffic_class(config) };
        *place = Arc::into_raw(plugin::init_context(communicator, class)?).cast_mut().cast();
        Ok(())
    })
}

/// What a communicator's packets are to be marked with; none where it does not say, or something that is no traffic class.
///
/// # Safety
/// `config` must be null or valid for reads.
unsafe fn traffic_class(config: *const CommConfig) -> Option<u8> {
    // SAFETY: passed on to the caller.
    let class = unsafe { config.as_ref() }?.traffic_class;
    u8::try_from(class).ok()
}

unsafe extern "C" fn finalize(context: *mut c_void) -> NcclResult {
    guard("finalize", || {
        // SAFETY: a context that is not null came from `init_context`, and NCCL finalizes it once.
        let context = unsafe { take_arc::<Context>(context, "context") }?;
        plugin::finalize(&context);
        Ok(())
    })
}

/// Takes back an object that was handed out by `Arc::into_raw`.
///
/// # Safety
/// `pointer` must be null or such an object, not taken back before.
pub(crate) unsafe fn take_arc<T>(pointer: *mut c_void, what: &str) -> Result<Arc<T>, Failure> {
    if pointer.is_null() {
        return Err(Failure::argument(format!("{what} is null")));
    }
    // SAFETY: passed on to the caller.
    Ok(unsafe { Arc::from_raw(pointer.cast_const().cast()) })
}

// Devices

unsafe extern "C" fn devices(count: *mut c_int) -> NcclResult {
    guard("devices", || {
        // SAFETY: NCCL passes a place for the number.
        *unsafe { place(count, "count") }? =
            c_int::try_from(plugin::device_count()?).unwrap_or(c_int::MAX);
        Ok(())
    })
}

/// A version's properties.
pub(crate) trait Properties {
    fn describe(device: &DeviceProperties) -> Self;
}

pub(crate) unsafe extern "C" fn get_properties<P: Properties>(
    device: c_int,
    properties: *mut P,
) -> NcclResult {
    guard("getProperties", || {
        let described = P::describe(&plugin::device_properties(index(device)?)?);
        if properties.is_null() {
            return Err(Failure::argument("properties is null"));
        }
        // SAFETY: not null, and NCCL passes a place for the table version's properties, which need
        // not be initialized.
        unsafe { properties.write(described) };
        Ok(())
    })
}

fn pci_path(device: &DeviceProperties) -> *const c_char {
    device.pci_path.map_or(ptr::null(), CStr::as_ptr)
}

/// Which types of memory `regMr` and `regMrDmaBuf` take.
fn ptr_support(reach: MemoryTypes) -> c_int {
    let beside = [(reach.peer_memory, PTR_CUDA), (reach.dma_buffers, PTR_DMABUF)];
    beside.iter().filter(|(is, _)| *is).fold(PTR_HOST, |all, (_, kind)| all | kind)
}

fn rail_id(number: Option<u16>) -> i16 {
    number.and_then(|number| i16::try_from(number).ok()).unwrap_or(RAIL_UNDEFINED)
}

fn v_props<const N: usize>(device: &DeviceProperties) -> VDeviceProperties<N> {
    let mut devices = [0; N];
    devices[0] = device.index as c_int;
    VDeviceProperties { count: 1, devices }
}

/// What each version says: fields that all have, and those listed.
macro_rules! describe {
    ($version:ident, $device:ident, { $($more:tt)* }) => {
        impl Properties for $version {
            fn describe($device: &DeviceProperties) -> Self {
                Self {
                    name: $device.name.as_ptr(),
                    pci_path: pci_path($device),
                    guid: $device.guid,
                    ptr_support: ptr_support($device.reach),
                    speed: $device.speed,
                    port: $device.port,
                    latency: 0.0,
                    max_comms: MAX_COMMS,
                    max_recvs: MAX_RECVS as c_int,
                    $($more)*
                }
            }
        }
    };
}

describe!(PropertiesV6, device, {});
describe!(PropertiesV7, device, {
    net_device_type: DEVICE_HOST,
    net_device_version: DEVICE_VERSION_INVALID,
});
describe!(PropertiesV8, device, {
    // A registration with an RDMA port is good for all connections over it.
    reg_is_global: (device.port > 0).into(),
    net_device_type: DEVICE_HOST,
    net_device_version: DEVICE_VERSION_INVALID,
});
describe!(PropertiesV9, device, {
    // A registration with an RDMA port is good for all connections over it.
    reg_is_global: (device.port > 0).into(),
    force_flush: 0,
    net_device_type: DEVICE_HOST,
    net_device_version: DEVICE_VERSION_INVALID,
    v_props: v_props(device),
    max_p2p_bytes: MAX_BYTES,
    max_coll_bytes: MAX_BYTES,
});
describe!(PropertiesV11, device, {
    // A registration with an RDMA port is good for all connections over it.
    reg_is_global: (device.port > 0).into(),
    force_flush: 0,
    net_device_type: DEVICE_HOST,
    net_device_version: DEVICE_VERSION_INVALID,
    v_props: v_props(device),
    max_p2p_bytes: MAX_BYTES,
    max_coll_bytes: MAX_BYTES,
    max_multi_request_size: 1,
});
describe!(PropertiesV12, device, {
    // A registration with an RDMA port is good for all connections over it.
    reg_is_global: (device.port > 0).into(),
    force_flush: 0,
    net_device_type: DEVICE_HOST,
    net_device_version: DEVICE_VERSION_INVALID,
    v_props: v_props(device),
    max_p2p_bytes: MAX_BYTES,
    max_coll_bytes: MAX_BYTES,
    max_multi_request_size: 1,
    rail_id: rail_id(device.rail.map(|rail| rail.number)),
    plane_id: rail_id(device.rail.and_then(|rail| rail.plane)),
});

// Connections

/// A context that listens.
pub(crate) trait Listens {
    /// The call, for people.
    const CALL: &'static str;

    /// Fills in the handle that peers need; gives NCCL's listen comm.
    fn start(&self, device: usize, handle: &mut [u8; HANDLE_SIZE]) -> Result<*mut c_void, Failure>;
}

impl Listens for Context {
    const CALL: &'static str = "listen";

    fn start(&self, device: usize, handle: &mut [u8; HANDLE_SIZE]) -> Result<*mut c_void, Failure> {
        Ok(Arc::into_raw(self.listen(device, handle)?).cast_mut().cast())
    }
}

/// # Safety
/// As for the `listen` of NCCL's tables: `handle` is `HANDLE_SIZE` bytes to write to, `comm` a
/// place for the result.
pub(crate) unsafe fn listen_with(
    context: &impl Listens,
    device: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
) -> Result<(), Failure> {
    // SAFETY: passed on to the caller; bytes have no alignment and no invalid values.
    let handle = unsafe { place(handle.cast::<[u8; HANDLE_SIZE]>(), "handle") }?;
    // SAFETY: passed on to the caller.
    let comm = unsafe { place(comm, "listenComm") }?;
    *comm = ptr::null_mut();
    *comm = context.start(index(device)?, handle)?;
    Ok(())
}

unsafe extern "C" fn listen(
    device: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
) -> NcclResult {
    guard("listen", || {
        let context = plugin::global_context()?;
        // SAFETY: NCCL passes what its table says.
        unsafe { listen_with(&*context, device, handle, comm) }
    })
}

pub(crate) unsafe extern "C" fn listen_in_context<C: Listens>(
    context: *mut c_void,
    device: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
) -> NcclResult {
    guard(C::CALL, || {
        // SAFETY: NCCL passes a context that `init_context` made and that is not finalized.
        let context = unsafe { object::<C>(context, "context") }?;
        // SAFETY: NCCL passes what its table says.
        unsafe { listen_with(context, device, handle, comm) }
    })
}

/// # Safety
/// As for the `connect` of NCCL's tables: `handle` is `HANDLE_SIZE` bytes, the same on each call,
/// `comm` a place for the result.
unsafe fn connect_with(
    context: &Context,
    device: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
    traffic_class: Option<u8>,
) -> Result<(), Failure> {
    // SAFETY: passed on to the caller; bytes have no alignment and no invalid values.
    let handle = unsafe { place(handle.cast::<[u8; HANDLE_SIZE]>(), "handle") }?;
    // SAFETY: passed on to the caller.
    let comm = unsafe { place(comm, "sendComm") }?;
    *comm = ptr::null_mut();
    if let Some(connected) = context.connect(index(device)?, handle, traffic_class)? {
        *comm = Box::into_raw(Box::new(connected)).cast();
    }
    Ok(())
}

/// # Safety
/// As [`connect_with`]; `config` must be null or valid for reads.
unsafe fn connect_globally(
    device: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
    config: *const CommConfig,
) -> NcclResult {
    guard("connect", || {
        let context = plugin::global_context()?;
        // SAFETY: passed on to the caller.
        unsafe { connect_with(&context, device, handle, comm, traffic_class(config)) }
    })
}

unsafe extern "C" fn connect(
    device: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL passes what its table says.
    unsafe { connect_globally(device, handle, comm, ptr::null()) }
}

unsafe extern "C" fn connect_offload(
    device: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
    _device_comm: *mut *mut DeviceHandle,
) -> NcclResult {
    // SAFETY: NCCL passes what its table says.
    unsafe { connect_globally(device, handle, comm, ptr::null()) }
}

unsafe extern "C" fn connect_configured(
    device: c_int,
    config: *mut CommConfig,
    handle: *mut c_void,
    comm: *mut *mut c_void,
    _device_comm: *mut *mut DeviceHandle,
) -> NcclResult {
    // SAFETY: NCCL passes what its table says.
    unsafe { connect_globally(device, handle, comm, config) }
}

unsafe extern "C" fn connect_in_context(
    context: *mut c_void,
    device: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
    _device_comm: *mut *mut DeviceHandle,
) -> NcclResult {
    guard("connect", || {
        // SAFETY: NCCL passes a context that `init_context` made and that is not finalized.
        let context = unsafe { object::<Context>(context, "context") }?;
        // SAFETY: NCCL passes what its table says.
        unsafe { connect_with(context, device, handle, comm, None) }
    })
}

unsafe extern "C" fn accept(listen_comm: *mut c_void, comm: *mut *mut c_void) -> NcclResult {
    guard("accept", || {
        // SAFETY: NCCL passes a listen comm that `listen` made and that is not closed.
        let listener = unsafe { object::<ListenComm>(listen_comm, "listenComm") }?;
        // SAFETY: NCCL passes a place for the result.
        let comm = unsafe { place(comm, "recvComm") }?;
        *comm = ptr::null_mut();
        if let Some(accepted) = listener.accept()? {
            *comm = Box::into_raw(Box::new(accepted)).cast();
        }
        Ok(())
    })
}

unsafe extern "C" fn accept_offload(
    listen_comm: *mut c_void,
    comm: *mut *mut c_void,
    _device_comm: *mut *mut DeviceHandle,
) -> NcclResult {
    // SAFETY: NCCL passes what its table says.
    unsafe { accept(listen_comm, comm) }
}

unsafe extern "C" fn close_send(comm: *mut c_void) -> NcclResult {
    guard("closeSend", || {
        // SAFETY: NCCL passes a comm that `connect` made, and closes it once.
        unsafe { close_comm::<SendConnection>(comm) }
    })
}

unsafe extern "C" fn close_recv(comm: *mut c_void) -> NcclResult {
    guard("closeRecv", || {
        // SAFETY: NCCL passes a comm that `accept` made, and closes it once.
        unsafe { close_comm::<RecvConnection>(comm) }
    })
}

/// # Safety
/// `comm` must be null or a `Comm<C>` that was boxed, not closed before.
unsafe fn close_comm<C>(comm: *mut c_void) -> Result<(), Failure> {
    if comm.is_null() {
        return Err(Failure::argument("comm is null"));
    }
    // SAFETY: passed on to the caller.
    drop(unsafe { Box::from_raw(comm.cast::<Comm<C>>()) });
    Ok(())
}

unsafe extern "C" fn close_listen(comm: *mut c_void) -> NcclResult {
    guard("closeListen", || {
        // SAFETY: NCCL passes a listen comm that `listen` made, and closes it once.
        unsafe { take_arc::<ListenComm>(comm, "listenComm") }?.close();
        Ok(())
    })
}

// Memory

/// The type of a size in some version of the tables.
pub(crate) trait Size: Copy {
    fn bytes(self) -> Result<usize, Failure>;
}

impl Size for usize {
    fn bytes(self) -> Result<usize, Failure> {
        Ok(self)
    }
}

impl Size for c_int {
    fn bytes(self) -> Result<usize, Failure> {
        usize::try_from(self).map_err(|_| Failure::argument(format!("a size of {self} bytes")))
    }
}

pub(crate) unsafe extern "C" fn reg_mr<S: Size>(
    comm: *mut c_void,
    data: *mut c_void,
    size: S,
    kind: c_int,
    registration: *mut *mut c_void,
) -> NcclResult {
    guard("regMr", || {
        // SAFETY: NCCL passes a comm of some kind that is not closed; each begins with its registrar.
        let registrar = unsafe { object::<MrCache>(comm, "comm") }?;
        // SAFETY: NCCL passes a place for the result.
        let registration = unsafe { place(registration, "mhandle") }?;
        *registration = ptr::null_mut();
        // SAFETY: NCCL keeps the memory until it has called `deregMr`, and leaves it to the requests that use it.
        let memory = unsafe { RecvBuffer::new(data.cast(), size.bytes()?) };
        let made = match kind {
            PTR_HOST => registrar.register(memory)?,
            PTR_CUDA => Some(registrar.register_peer_memory(memory)?),
            _ => {
                return Err(Failure::contract(format!(
                    "memory of type {kind}: host (1) or GPU (2)"
                )));
            }
        };
        if let Some(made) = made {
            *registration = Box::into_raw(Box::new(made)).cast();
        }
        Ok(())
    })
}

unsafe extern "C" fn reg_mr_dma_buf(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    _kind: c_int,
    offset: u64,
    descriptor: c_int,
    registration: *mut *mut c_void,
) -> NcclResult {
    guard("regMrDmaBuf", || {
        // SAFETY: NCCL passes a comm of some kind that is not closed; each begins with its registrar.
        let registrar = unsafe { object::<MrCache>(comm, "comm") }?;
        // SAFETY: NCCL passes a place for the result.
        let registration = unsafe { place(registration, "mhandle") }?;
        *registration = ptr::null_mut();
        if descriptor < 0 {
            return Err(Failure::argument(format!("no descriptor: {descriptor}")));
        }
        // SAFETY: NCCL keeps the descriptor open during the call, and nothing is done with one that is not a DMA buffer's.
        let buffer = unsafe { BorrowedFd::borrow_raw(descriptor) };
        let address = data.expose_provenance() as u64;
        let made = registrar.register_dma_buffer(buffer, offset, address, size)?;
        *registration = Box::into_raw(Box::new(made)).cast();
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn dereg_mr(
    _comm: *mut c_void,
    registration: *mut c_void,
) -> NcclResult {
    guard("deregMr", || {
        if !registration.is_null() {
            // SAFETY: not null, so `reg_mr` boxed it, and NCCL gives it back once.
            drop(unsafe { Box::from_raw(registration.cast::<MrHandle>()) });
        }
        Ok(())
    })
}

// Requests

/// # Safety
/// As for the `isend` of NCCL's tables.
unsafe fn send_message<S: Size>(
    comm: *mut c_void,
    data: *mut c_void,
    size: S,
    tag: c_int,
    request: *mut *mut c_void,
) -> NcclResult {
    guard("isend", || {
        let length = size.bytes()?;
        if data.is_null() && length > 0 {
            return Err(Failure::argument("data is null"));
        }
        // SAFETY: NCCL passes a comm that `connect` made and that is not closed.
        let comm = unsafe { object::<Comm<SendConnection>>(comm, "sendComm") }?;
        // SAFETY: NCCL passes a place for the result.
        let request = unsafe { place(request, "request") }?;
        *request = ptr::null_mut();
        // SAFETY: NCCL leaves the memory alone until `test` has reported the request or the comm
        // is closed.
        let buffer = unsafe { SendBuffer::new(data.cast_const().cast(), length) };
        if let Some(slot) = comm.send(buffer, tag)? {
            *request = ptr::from_ref(slot).cast_mut().cast();
        }
        Ok(())
    })
}

unsafe extern "C" fn isend<S: Size>(
    comm: *mut c_void,
    data: *mut c_void,
    size: S,
    tag: c_int,
    _registration: *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL passes what its table says.
    unsafe { send_message(comm, data, size, tag, request) }
}

unsafe extern "C" fn isend_profiled(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    tag: c_int,
    _registration: *mut c_void,
    _profile: *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL passes what its table says.
    unsafe { send_message(comm, data, size, tag, request) }
}

/// How many buffers a group has.
fn group_size(count: c_int) -> Result<usize, Failure> {
    let size = usize::try_from(count).ok().filter(|size| (1..=MAX_RECVS).contains(size));
    size.ok_or_else(|| {
        Failure::contract(format!("{count} receives in a group: maxRecvs is {MAX_RECVS}"))
    })
}

/// # Safety
/// As for the `irecv` of NCCL's tables.
unsafe fn post_buffers<S: Size>(
    comm: *mut c_void,
    count: c_int,
    data: *mut *mut c_void,
    sizes: *mut S,
    tags: *mut c_int,
    request: *mut *mut c_void,
) -> NcclResult {
    guard("irecv", || {
        let count = group_size(count)?;
        let nothing = Tagged { buffer: RecvBuffer::from_static(&mut []), tag: 0 };
        let mut group = [nothing; MAX_RECVS];
        for (index, slot) in group[..count].iter_mut().enumerate() {
            // SAFETY: NCCL passes arrays of `count` elements; null is noticed, since nothing is added to it before that.
            let (data, size, tag) = unsafe {
                place(data, "data")?;
                place(sizes, "sizes")?;
                place(tags, "tags")?;
                (*data.add(index), *sizes.add(index), *tags.add(index))
            };
            let length = size.bytes()?;
            if data.is_null() && length > 0 {
                return Err(Failure::argument("data is null"));
            }
            // SAFETY: NCCL gives the memory away until `test` has reported the request or the comm is
            // closed.
            *slot = Tagged { buffer: unsafe { RecvBuffer::new(data.cast(), length) }, tag };
        }
        // SAFETY: NCCL passes a comm that `accept` made and that is not closed.
        let comm = unsafe { object::<Comm<RecvConnection>>(comm, "recvComm") }?;
        // SAFETY: NCCL passes a place for the result. What is in it may be a hint: it is not read.
        let request = unsafe { place(request, "request") }?;
        *request = ptr::null_mut();
        if let Some(slot) = comm.recv(&group[..count])? {
            *request = ptr::from_ref(slot).cast_mut().cast();
        }
        Ok(())
    })
}

unsafe extern "C" fn irecv<S: Size>(
    comm: *mut c_void,
    count: c_int,
    data: *mut *mut c_void,
    sizes: *mut S,
    tags: *mut c_int,
    _registrations: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL passes what its table says.
    unsafe { post_buffers(comm, count, data, sizes, tags, request) }
}

unsafe extern "C" fn irecv_profiled(
    comm: *mut c_void,
    count: c_int,
    data: *mut *mut c_void,
    sizes: *mut usize,
    tags: *mut c_int,
    _registrations: *mut *mut c_void,
    _profiles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL passes what its table says.
    unsafe { post_buffers(comm, count, data, sizes, tags, request) }
}

unsafe extern "C" fn iflush(
    comm: *mut c_void,
    count: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    _registrations: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    guard("iflush", || {
        // SAFETY: NCCL passes a place for the result.
        let request = unsafe { place(request, "request") }?;
        // Without a request, there was nothing to do.
        *request = ptr::null_mut();
        let mut last = None;
        for index in 0..group_size(count)? {
            // SAFETY: NCCL passes arrays of `count` elements; null is noticed, since nothing is added to it before that.
            let (start, size) = unsafe {
                place(data, "data")?;
                place(sizes, "sizes")?;
                (*data.add(index), *sizes.add(index))
            };
            if size != 0 {
                last = Some((start, size.bytes()?));
            }
        }
        let Some((start, length)) = last else { return Ok(()) };
        // SAFETY: NCCL passes a comm that `accept` made and that is not closed.
        let comm = unsafe { object::<Comm<RecvConnection>>(comm, "recvComm") }?;
        // SAFETY: NCCL keeps the memory until `test` has reported the request or the comm is closed; it is only read.
        let message = unsafe { RecvBuffer::new(start.cast(), length) };
        *request = ptr::from_ref(comm.flush(message)?).cast_mut().cast();
        Ok(())
    })
}

unsafe extern "C" fn test(request: *mut c_void, done: *mut c_int, sizes: *mut c_int) -> NcclResult {
    guard("test", || {
        // SAFETY: NCCL passes a place for the result.
        let done = unsafe { place(done, "done") }?;
        *done = 0;
        // SAFETY: NCCL passes a request of a comm that is not closed: one of its slots.
        let slot = unsafe { object::<Slot>(request, "request") }?;
        if let Some(request) = slot.test()? {
            *done = 1;
            if !sizes.is_null() {
                for (index, bytes) in (0..).map_while(|index| request.length(index)).enumerate() {
                    // SAFETY: not null, and NCCL passes room for as many sizes as the request has messages.
                    unsafe { sizes.add(index).write(c_int::try_from(bytes).unwrap_or(c_int::MAX)) };
                }
            }
        }
        Ok(())
    })
}

// Tables

/// The first slots with what all versions share filled in.
macro_rules! table {
    ($symbol:ident: $table:ident, { $($own:tt)* }) => {
        /// NCCL finds the table by this name.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals, reason = "the name is NCCL's")]
        static $symbol: $table = $table {
            name: NAME.as_ptr(),
            devices: Some(devices),
            reg_mr: Some(reg_mr),
            reg_mr_dma_buf: Some(reg_mr_dma_buf),
            dereg_mr: Some(dereg_mr),
            iflush: Some(iflush),
            test: Some(test),
            close_send: Some(close_send),
            close_recv: Some(close_recv),
            close_listen: Some(close_listen),
            $($own)*
        };
    };
}

table!(ncclNetPlugin_v6: NetV6, {
    init: Some(init),
    get_properties: Some(get_properties),
    listen: Some(listen),
    connect: Some(connect),
    accept: Some(accept),
    isend: Some(isend),
    irecv: Some(irecv),
});

table!(ncclNetPlugin_v7: NetV7, {
    init: Some(init),
    get_properties: Some(get_properties),
    listen: Some(listen),
    connect: Some(connect_offload),
    accept: Some(accept_offload),
    isend: Some(isend),
    irecv: Some(irecv),
    get_device_mr: None,
    irecv_consumed: None,
});

table!(ncclNetPlugin_v8: NetV8, {
    init: Some(init),
    get_properties: Some(get_properties),
    listen: Some(listen),
    connect: Some(connect_offload),
    accept: Some(accept_offload),
    isend: Some(isend),
    irecv: Some(irecv),
    get_device_mr: None,
    irecv_consumed: None,
});

table!(ncclNetPlugin_v9: NetV9, {
    init: Some(init),
    get_properties: Some(get_properties),
    listen: Some(listen),
    connect: Some(connect_offload),
    accept: Some(accept_offload),
    isend: Some(isend),
    irecv: Some(irecv),
    get_device_mr: None,
    irecv_consumed: None,
    make_v_device: None,
});

table!(ncclNetPlugin_v10: NetV10, {
    init: Some(init_profiled),
    get_properties: Some(get_properties),
    listen: Some(listen),
    connect: Some(connect_configured),
    accept: Some(accept_offload),
    isend: Some(isend_profiled),
    irecv: Some(irecv_profiled),
    get_device_mr: None,
    irecv_consumed: None,
    make_v_device: None,
});

table!(ncclNetPlugin_v11: NetV11, {
    init: Some(init_context),
    get_properties: Some(get_properties),
    listen: Some(listen_in_context::<Context>),
    connect: Some(connect_in_context),
    accept: Some(accept_offload),
    isend: Some(isend_profiled),
    irecv: Some(irecv_profiled),
    get_device_mr: None,
    irecv_consumed: None,
    make_v_device: None,
    finalize: Some(finalize),
    set_net_attr: None,
});

table!(ncclNetPlugin_v12: NetV12, {
    init: Some(init_context),
    get_properties: Some(get_properties),
    listen: Some(listen_in_context::<Context>),
    connect: Some(connect_in_context),
    accept: Some(accept_offload),
    isend: Some(isend_profiled),
    irecv: Some(irecv_profiled),
    get_device_mr: None,
    irecv_consumed: None,
    make_v_device: None,
    finalize: Some(finalize),
    set_net_attr: None,
});
