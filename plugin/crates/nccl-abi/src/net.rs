//! `ncclNet`: the table of functions that a plugin exports, one layout per version.
//!
//! The order of the slots never changed from v6 to v12; arguments did. Slots are `Option` because a null function
//! pointer is legal for some of them and must not be undefined behaviour for any.

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

use crate::{
    Attributes, CommConfig, DeviceHandle, Logger, NcclResult, ProfilerCallback, PropertiesV6,
    PropertiesV7, PropertiesV8, PropertiesV9, PropertiesV11, PropertiesV12,
};

type Slot<F> = Option<F>;
type Devices = unsafe extern "C" fn(*mut c_int) -> NcclResult;
type GetProperties<P> = unsafe extern "C" fn(c_int, *mut P) -> NcclResult;
type Listen = unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void) -> NcclResult;
type Accept =
    unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut *mut DeviceHandle) -> NcclResult;
type RegMr<Size> =
    unsafe extern "C" fn(*mut c_void, *mut c_void, Size, c_int, *mut *mut c_void) -> NcclResult;
type RegMrDmaBuf = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    usize,
    c_int,
    u64,
    c_int,
    *mut *mut c_void,
) -> NcclResult;
type DeregMr = unsafe extern "C" fn(*mut c_void, *mut c_void) -> NcclResult;
type Isend<Size> = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    Size,
    c_int,
    *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
type Irecv<Size> = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut *mut c_void,
    *mut Size,
    *mut c_int,
    *mut *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
type IsendProfiled = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    usize,
    c_int,
    *mut c_void,
    *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
type IrecvProfiled = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut *mut c_void,
    *mut usize,
    *mut c_int,
    *mut *mut c_void,
    *mut *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
type Iflush = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut *mut c_void,
    *mut c_int,
    *mut *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
type Test = unsafe extern "C" fn(*mut c_void, *mut c_int, *mut c_int) -> NcclResult;
type Close = unsafe extern "C" fn(*mut c_void) -> NcclResult;
type GetDeviceMr = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut *mut c_void) -> NcclResult;
type IrecvConsumed = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> NcclResult;
type MakeVDevice = unsafe extern "C" fn(*mut c_int, *mut c_void) -> NcclResult;

type InitGlobal = unsafe extern "C" fn(Option<Logger>) -> NcclResult;
type InitProfiled = unsafe extern "C" fn(Option<Logger>, Option<ProfilerCallback>) -> NcclResult;
type InitContext = unsafe extern "C" fn(
    *mut *mut c_void,
    u64,
    *mut CommConfig,
    Option<Logger>,
    Option<ProfilerCallback>,
) -> NcclResult;
type ListenContext =
    unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, *mut *mut c_void) -> NcclResult;
type ConnectV6 = unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void) -> NcclResult;
type ConnectV7 = unsafe extern "C" fn(
    c_int,
    *mut c_void,
    *mut *mut c_void,
    *mut *mut DeviceHandle,
) -> NcclResult;
type ConnectV10 = unsafe extern "C" fn(
    c_int,
    *mut CommConfig,
    *mut c_void,
    *mut *mut c_void,
    *mut *mut DeviceHandle,
) -> NcclResult;
type ConnectContext = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut c_void,
    *mut *mut c_void,
    *mut *mut DeviceHandle,
) -> NcclResult;
type AcceptV6 = unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> NcclResult;
type Finalize = unsafe extern "C" fn(*mut c_void) -> NcclResult;
type SetAttributes = unsafe extern "C" fn(*mut c_void, *mut Attributes) -> NcclResult;

/// `ncclNet_v6_t`, NCCL 2.13 to 2.18.
#[allow(missing_docs, reason = "the slots are documented by NCCL's headers, under these names")]
#[repr(C)]
pub struct NetV6 {
    pub name: *const c_char,
    pub init: Slot<InitGlobal>,
    pub devices: Slot<Devices>,
    pub get_properties: Slot<GetProperties<PropertiesV6>>,
    pub listen: Slot<Listen>,
    pub connect: Slot<ConnectV6>,
    pub accept: Slot<AcceptV6>,
    pub reg_mr: Slot<RegMr<c_int>>,
    pub reg_mr_dma_buf: Slot<RegMrDmaBuf>,
    pub dereg_mr: Slot<DeregMr>,
    pub isend: Slot<Isend<c_int>>,
    pub irecv: Slot<Irecv<c_int>>,
    pub iflush: Slot<Iflush>,
    pub test: Slot<Test>,
    pub close_send: Slot<Close>,
    pub close_recv: Slot<Close>,
    pub close_listen: Slot<Close>,
}

/// The layout of v7 and v8, which differ in their properties `P` and in the type `R` of a registration's size.
#[allow(missing_docs, reason = "the slots are documented by NCCL's headers, under these names")]
#[repr(C)]
pub struct NetWithGlobalInit<P, R> {
    pub name: *const c_char,
    pub init: Slot<InitGlobal>,
    pub devices: Slot<Devices>,
    pub get_properties: Slot<GetProperties<P>>,
    pub listen: Slot<Listen>,
    pub connect: Slot<ConnectV7>,
    pub accept: Slot<Accept>,
    pub reg_mr: Slot<RegMr<R>>,
    pub reg_mr_dma_buf: Slot<RegMrDmaBuf>,
    pub dereg_mr: Slot<DeregMr>,
    pub isend: Slot<Isend<c_int>>,
    pub irecv: Slot<Irecv<c_int>>,
    pub iflush: Slot<Iflush>,
    pub test: Slot<Test>,
    pub close_send: Slot<Close>,
    pub close_recv: Slot<Close>,
    pub close_listen: Slot<Close>,
    pub get_device_mr: Slot<GetDeviceMr>,
    pub irecv_consumed: Slot<IrecvConsumed>,
}
/// `ncclNet_v7_t`, NCCL 2.19.
pub type NetV7 = NetWithGlobalInit<PropertiesV7, c_int>;
/// `ncclNet_v8_t`, NCCL 2.20 to 2.23.
pub type NetV8 = NetWithGlobalInit<PropertiesV8, usize>;

/// `ncclNet_v9_t`, NCCL 2.24 and 2.25.
#[allow(missing_docs, reason = "the slots are documented by NCCL's headers, under these names")]
#[repr(C)]
pub struct NetV9 {
    pub name: *const c_char,
    pub init: Slot<InitGlobal>,
    pub devices: Slot<Devices>,
    pub get_properties: Slot<GetProperties<PropertiesV9>>,
    pub listen: Slot<Listen>,
    pub connect: Slot<ConnectV7>,
    pub accept: Slot<Accept>,
    pub reg_mr: Slot<RegMr<usize>>,
    pub reg_mr_dma_buf: Slot<RegMrDmaBuf>,
    pub dereg_mr: Slot<DeregMr>,
    pub isend: Slot<Isend<usize>>,
    pub irecv: Slot<Irecv<usize>>,
    pub iflush: Slot<Iflush>,
    pub test: Slot<Test>,
    pub close_send: Slot<Close>,
    pub close_recv: Slot<Close>,
    pub close_listen: Slot<Close>,
    pub get_device_mr: Slot<GetDeviceMr>,
    pub irecv_consumed: Slot<IrecvConsumed>,
    pub make_v_device: Slot<MakeVDevice>,
}

/// `ncclNet_v10_t`, NCCL 2.26 and 2.27.
#[allow(missing_docs, reason = "the slots are documented by NCCL's headers, under these names")]
#[repr(C)]
pub struct NetV10 {
    pub name: *const c_char,
    pub init: Slot<InitProfiled>,
    pub devices: Slot<Devices>,
    pub get_properties: Slot<GetProperties<PropertiesV9>>,
    pub listen: Slot<Listen>,
    pub connect: Slot<ConnectV10>,
    pub accept: Slot<Accept>,
    pub reg_mr: Slot<RegMr<usize>>,
    pub reg_mr_dma_buf: Slot<RegMrDmaBuf>,
    pub dereg_mr: Slot<DeregMr>,
    pub isend: Slot<IsendProfiled>,
    pub irecv: Slot<IrecvProfiled>,
    pub iflush: Slot<Iflush>,
    pub test: Slot<Test>,
    pub close_send: Slot<Close>,
    pub close_recv: Slot<Close>,
    pub close_listen: Slot<Close>,
    pub get_device_mr: Slot<GetDeviceMr>,
    pub irecv_consumed: Slot<IrecvConsumed>,
    pub make_v_device: Slot<MakeVDevice>,
}

/// The layout of v11 and v12, which differ in their properties `P`.
#[allow(missing_docs, reason = "the slots are documented by NCCL's headers, under these names")]
#[repr(C)]
pub struct NetWithContext<P> {
    pub name: *const c_char,
    pub init: Slot<InitContext>,
    pub devices: Slot<Devices>,
    pub get_properties: Slot<GetProperties<P>>,
    pub listen: Slot<ListenContext>,
    pub connect: Slot<ConnectContext>,
    pub accept: Slot<Accept>,
    pub reg_mr: Slot<RegMr<usize>>,
    pub reg_mr_dma_buf: Slot<RegMrDmaBuf>,
    pub dereg_mr: Slot<DeregMr>,
    pub isend: Slot<IsendProfiled>,
    pub irecv: Slot<IrecvProfiled>,
    pub iflush: Slot<Iflush>,
    pub test: Slot<Test>,
    pub close_send: Slot<Close>,
    pub close_recv: Slot<Close>,
    pub close_listen: Slot<Close>,
    pub get_device_mr: Slot<GetDeviceMr>,
    pub irecv_consumed: Slot<IrecvConsumed>,
    pub make_v_device: Slot<MakeVDevice>,
    pub finalize: Slot<Finalize>,
    pub set_net_attr: Slot<SetAttributes>,
}
/// `ncclNet_v11_t`, NCCL 2.28 and 2.29.
pub type NetV11 = NetWithContext<PropertiesV11>;
/// `ncclNet_v12_t`, NCCL 2.30 and later.
pub type NetV12 = NetWithContext<PropertiesV12>;

// SAFETY: a table is read only, and its name points to a string that is never written or freed: NCCL reads it from any
// thread for as long as the library is loaded.
unsafe impl Sync for NetV6 {}
// SAFETY: as above.
unsafe impl<P, R> Sync for NetWithGlobalInit<P, R> {}
// SAFETY: as above.
unsafe impl Sync for NetV9 {}
// SAFETY: as above.
unsafe impl Sync for NetV10 {}
// SAFETY: as above.
unsafe impl<P> Sync for NetWithContext<P> {}

const POINTER: usize = size_of::<usize>();
const _: () = {
    assert!(size_of::<NetV6>() == 17 * POINTER);
    assert!(size_of::<NetV7>() == 19 * POINTER);
    assert!(size_of::<NetV8>() == 19 * POINTER);
    assert!(size_of::<NetV9>() == 20 * POINTER);
    assert!(size_of::<NetV10>() == 20 * POINTER);
    assert!(size_of::<NetV11>() == 22 * POINTER);
    assert!(size_of::<NetV12>() == 22 * POINTER);
    // The order of the slots is the same in every version: check the first, the last common and the last of each.
    assert!(offset_of!(NetV6, init) == POINTER);
    assert!(offset_of!(NetV6, isend) == 10 * POINTER);
    assert!(offset_of!(NetV6, test) == 13 * POINTER);
    assert!(offset_of!(NetV6, close_listen) == 16 * POINTER);
    assert!(offset_of!(NetV7, isend) == 10 * POINTER);
    assert!(offset_of!(NetV8, irecv_consumed) == 18 * POINTER);
    assert!(offset_of!(NetV9, make_v_device) == 19 * POINTER);
    assert!(offset_of!(NetV10, isend) == 10 * POINTER);
    assert!(offset_of!(NetV10, make_v_device) == 19 * POINTER);
    assert!(offset_of!(NetV11, isend) == 10 * POINTER);
    assert!(offset_of!(NetV11, finalize) == 20 * POINTER);
    assert!(offset_of!(NetV12, set_net_attr) == 21 * POINTER);
};
