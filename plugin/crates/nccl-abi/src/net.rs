//! `ncclNet`: the table of functions that a plugin exports, one layout per version.
//!
//! The order of the functions never changed from v6 to v12; arguments did. Functions are `Option`
//! because a null function pointer is legal for some of them and must not be undefined behaviour
//! for any.

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

use crate::{
    Attributes, CommConfig, DeviceHandle, Logger, NcclResult, ProfilerCallback, PropertiesV6,
    PropertiesV7, PropertiesV8, PropertiesV9, PropertiesV11, PropertiesV12,
};

type Function<F> = Option<F>;
type Devices = unsafe extern "C" fn(*mut c_int) -> NcclResult;
type GetProperties<P> = unsafe extern "C" fn(c_int, *mut P) -> NcclResult;
type ListenV6 = unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void) -> NcclResult;
type AcceptV7 =
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
type IsendV6<Size> = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    Size,
    c_int,
    *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
type IrecvV6<Size> = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut *mut c_void,
    *mut Size,
    *mut c_int,
    *mut *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
type IsendV10 = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    usize,
    c_int,
    *mut c_void,
    *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
type IrecvV10 = unsafe extern "C" fn(
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

type InitV6 = unsafe extern "C" fn(Option<Logger>) -> NcclResult;
type InitV10 = unsafe extern "C" fn(Option<Logger>, Option<ProfilerCallback>) -> NcclResult;
type InitV11 = unsafe extern "C" fn(
    *mut *mut c_void,
    u64,
    *mut CommConfig,
    Option<Logger>,
    Option<ProfilerCallback>,
) -> NcclResult;
type ListenV11 =
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
type ConnectV11 = unsafe extern "C" fn(
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
#[allow(missing_docs, reason = "the functions are documented by NCCL's headers, under these names")]
#[repr(C)]
pub struct NetV6 {
    pub name: *const c_char,
    pub init: Function<InitV6>,
    pub devices: Function<Devices>,
    pub get_properties: Function<GetProperties<PropertiesV6>>,
    pub listen: Function<ListenV6>,
    pub connect: Function<ConnectV6>,
    pub accept: Function<AcceptV6>,
    pub reg_mr: Function<RegMr<c_int>>,
    pub reg_mr_dma_buf: Function<RegMrDmaBuf>,
    pub dereg_mr: Function<DeregMr>,
    pub isend: Function<IsendV6<c_int>>,
    pub irecv: Function<IrecvV6<c_int>>,
    pub iflush: Function<Iflush>,
    pub test: Function<Test>,
    pub close_send: Function<Close>,
    pub close_recv: Function<Close>,
    pub close_listen: Function<Close>,
}

/// The layout of v7 and v8, which differ in their properties `P` and in the type `R` of a
/// registration's size.
#[allow(missing_docs, reason = "the functions are documented by NCCL's headers, under these names")]
#[repr(C)]
pub struct NetWithGlobalInit<P, R> {
    pub name: *const c_char,
    pub init: Function<InitV6>,
    pub devices: Function<Devices>,
    pub get_properties: Function<GetProperties<P>>,
    pub listen: Function<ListenV6>,
    pub connect: Function<ConnectV7>,
    pub accept: Function<AcceptV7>,
    pub reg_mr: Function<RegMr<R>>,
    pub reg_mr_dma_buf: Function<RegMrDmaBuf>,
    pub dereg_mr: Function<DeregMr>,
    pub isend: Function<IsendV6<c_int>>,
    pub irecv: Function<IrecvV6<c_int>>,
    pub iflush: Function<Iflush>,
    pub test: Function<Test>,
    pub close_send: Function<Close>,
    pub close_recv: Function<Close>,
    pub close_listen: Function<Close>,
    pub get_device_mr: Function<GetDeviceMr>,
    pub irecv_consumed: Function<IrecvConsumed>,
}
/// `ncclNet_v7_t`, NCCL 2.19.
pub type NetV7 = NetWithGlobalInit<PropertiesV7, c_int>;
/// `ncclNet_v8_t`, NCCL 2.20 to 2.23.
pub type NetV8 = NetWithGlobalInit<PropertiesV8, usize>;

/// `ncclNet_v9_t`, NCCL 2.24 and 2.25.
#[allow(missing_docs, reason = "the functions are documented by NCCL's headers, under these names")]
#[repr(C)]
pub struct NetV9 {
    pub name: *const c_char,
    pub init: Function<InitV6>,
    pub devices: Function<Devices>,
    pub get_properties: Function<GetProperties<PropertiesV9>>,
    pub listen: Function<ListenV6>,
    pub connect: Function<ConnectV7>,
    pub accept: Function<AcceptV7>,
    pub reg_mr: Function<RegMr<usize>>,
    pub reg_mr_dma_buf: Function<RegMrDmaBuf>,
    pub dereg_mr: Function<DeregMr>,
    pub isend: Function<IsendV6<usize>>,
    pub irecv: Function<IrecvV6<usize>>,
    pub iflush: Function<Iflush>,
    pub test: Function<Test>,
    pub close_send: Function<Close>,
    pub close_recv: Function<Close>,
    pub close_listen: Function<Close>,
    pub get_device_mr: Function<GetDeviceMr>,
    pub irecv_consumed: Function<IrecvConsumed>,
    pub make_v_device: Function<MakeVDevice>,
}

/// `ncclNet_v10_t`, NCCL 2.26 and 2.27.
#[allow(missing_docs, reason = "the functions are documented by NCCL's headers, under these names")]
#[repr(C)]
pub struct NetV10 {
    pub name: *const c_char,
    pub init: Function<InitV10>,
    pub devices: Function<Devices>,
    pub get_properties: Function<GetProperties<PropertiesV9>>,
    pub listen: Function<ListenV6>,
    pub connect: Function<ConnectV10>,
    pub accept: Function<AcceptV7>,
    pub reg_mr: Function<RegMr<usize>>,
    pub reg_mr_dma_buf: Function<RegMrDmaBuf>,
    pub dereg_mr: Function<DeregMr>,
    pub isend: Function<IsendV10>,
    pub irecv: Function<IrecvV10>,
    pub iflush: Function<Iflush>,
    pub test: Function<Test>,
    pub close_send: Function<Close>,
    pub close_recv: Function<Close>,
    pub close_listen: Function<Close>,
    pub get_device_mr: Function<GetDeviceMr>,
    pub irecv_consumed: Function<IrecvConsumed>,
    pub make_v_device: Function<MakeVDevice>,
}

/// The layout of v11 and v12, which differ in their properties `P`.
#[allow(missing_docs, reason = "the functions are documented by NCCL's headers, under these names")]
#[repr(C)]
pub struct NetWithContext<P> {
    pub name: *const c_char,
    pub init: Function<InitV11>,
    pub devices: Function<Devices>,
    pub get_properties: Function<GetProperties<P>>,
    pub listen: Function<ListenV11>,
    pub connect: Function<ConnectV11>,
    pub accept: Function<AcceptV7>,
    pub reg_mr: Function<RegMr<usize>>,
    pub reg_mr_dma_buf: Function<RegMrDmaBuf>,
    pub dereg_mr: Function<DeregMr>,
    pub isend: Function<IsendV10>,
    pub irecv: Function<IrecvV10>,
    pub iflush: Function<Iflush>,
    pub test: Function<Test>,
    pub close_send: Function<Close>,
    pub close_recv: Function<Close>,
    pub close_listen: Function<Close>,
    pub get_device_mr: Function<GetDeviceMr>,
    pub irecv_consumed: Function<IrecvConsumed>,
    pub make_v_device: Function<MakeVDevice>,
    pub finalize: Function<Finalize>,
    pub set_net_attr: Function<SetAttributes>,
}
/// `ncclNet_v11_t`, NCCL 2.28 and 2.29.
pub type NetV11 = NetWithContext<PropertiesV11>;
/// `ncclNet_v12_t`, NCCL 2.30 and later.
pub type NetV12 = NetWithContext<PropertiesV12>;

// SAFETY: a table is read only, and its name points to a string that is never written or freed:
// NCCL reads it from any thread for as long as the library is loaded.
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
    // The order of the functions is the same in every version: check the first, the last common and
    // the last of each.
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
