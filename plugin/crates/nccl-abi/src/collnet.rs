//! `ncclCollNet`: the table of functions of a network that reduces, one layout per version.
//!
//! As in [`crate::net`], the order of the functions never changed. Some were added, and some got
//! more arguments.

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

use crate::{
    Logger, NcclResult, PropertiesV6, PropertiesV7, PropertiesV8, PropertiesV9, PropertiesV11,
    PropertiesV12,
};

type Function<F> = Option<F>;
type Init = unsafe extern "C" fn(Option<Logger>) -> NcclResult;
type InitContext = unsafe extern "C" fn(*mut *mut c_void, u64, Option<Logger>) -> NcclResult;
type Devices = unsafe extern "C" fn(*mut c_int) -> NcclResult;
type GetProperties<P> = unsafe extern "C" fn(c_int, *mut P) -> NcclResult;
type Listen = unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void) -> NcclResult;
type ListenContext =
    unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, *mut *mut c_void) -> NcclResult;
type Connect = unsafe extern "C" fn(
    *mut *mut c_void,
    c_int,
    c_int,
    *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
type ReduceSupport = unsafe extern "C" fn(c_int, c_int, *mut c_int) -> NcclResult;
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
type Iallreduce<Count> = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    *mut c_void,
    Count,
    c_int,
    c_int,
    *mut c_void,
    *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
type Iallgather<Size> = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    c_int,
    *mut ScatterGather<Size>,
    usize,
    usize,
    usize,
    *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
type Ireducescatter<Size> = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut ScatterGather<Size>,
    *mut c_void,
    usize,
    usize,
    usize,
    c_int,
    c_int,
    *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
type Iflush = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    c_int,
    *mut c_void,
    *mut *mut c_void,
) -> NcclResult;
type Test = unsafe extern "C" fn(*mut c_void, *mut c_int, *mut c_int) -> NcclResult;
type Close = unsafe extern "C" fn(*mut c_void) -> NcclResult;
type MakeVDevice = unsafe extern "C" fn(*mut c_int, *mut c_void) -> NcclResult;
type Finalize = unsafe extern "C" fn(*mut c_void) -> NcclResult;

/// `ncclNetSGE`: a part of a gathered or scattered vector. `Size` is `u32` in v8 and `usize` later.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ScatterGather<Size> {
    /// The memory's handle from `regMr`.
    pub registration: *mut c_void,
    /// Address of the memory.
    pub address: *mut c_void,
    /// Bytes.
    pub size: Size,
}

/// The layout of v6 and v7, which differ in their properties `P`.
#[allow(missing_docs, reason = "the functions are documented by NCCL's headers, under these names")]
#[repr(C)]
pub struct CollNetWithGlobalInit<P> {
    pub name: *const c_char,
    pub init: Function<Init>,
    pub devices: Function<Devices>,
    pub get_properties: Function<GetProperties<P>>,
    pub listen: Function<Listen>,
    pub connect: Function<Connect>,
    pub reduce_support: Function<ReduceSupport>,
    pub reg_mr: Function<RegMr<c_int>>,
    pub reg_mr_dma_buf: Function<RegMrDmaBuf>,
    pub dereg_mr: Function<DeregMr>,
    pub iallreduce: Function<Iallreduce<c_int>>,
    pub iflush: Function<Iflush>,
    pub test: Function<Test>,
    pub close_coll: Function<Close>,
    pub close_listen: Function<Close>,
}
/// `ncclCollNet_v6_t`, NCCL 2.13 to 2.18.
pub type CollNetV6 = CollNetWithGlobalInit<PropertiesV6>;
/// `ncclCollNet_v7_t`, NCCL 2.19.
pub type CollNetV7 = CollNetWithGlobalInit<PropertiesV7>;

/// `ncclCollNet_v8_t`, NCCL 2.20 to 2.23.
#[allow(missing_docs, reason = "the functions are documented by NCCL's headers, under these names")]
#[repr(C)]
pub struct CollNetV8 {
    pub name: *const c_char,
    pub init: Function<Init>,
    pub devices: Function<Devices>,
    pub get_properties: Function<GetProperties<PropertiesV8>>,
    pub listen: Function<Listen>,
    pub connect: Function<Connect>,
    pub reduce_support: Function<ReduceSupport>,
    pub reg_mr: Function<RegMr<usize>>,
    pub reg_mr_dma_buf: Function<RegMrDmaBuf>,
    pub dereg_mr: Function<DeregMr>,
    pub iallreduce: Function<Iallreduce<c_int>>,
    pub iallgather: Function<Iallgather<u32>>,
    pub ireducescatter: Function<Ireducescatter<u32>>,
    pub iflush: Function<Iflush>,
    pub test: Function<Test>,
    pub close_coll: Function<Close>,
    pub close_listen: Function<Close>,
}

/// `ncclCollNet_v9_t`, NCCL 2.24 and 2.25, and `ncclCollNet_v10_t`, 2.26 and 2.27.
#[allow(missing_docs, reason = "the functions are documented by NCCL's headers, under these names")]
#[repr(C)]
pub struct CollNetV9 {
    pub name: *const c_char,
    pub init: Function<Init>,
    pub devices: Function<Devices>,
    pub get_properties: Function<GetProperties<PropertiesV9>>,
    pub listen: Function<Listen>,
    pub connect: Function<Connect>,
    pub reduce_support: Function<ReduceSupport>,
    pub reg_mr: Function<RegMr<usize>>,
    pub reg_mr_dma_buf: Function<RegMrDmaBuf>,
    pub dereg_mr: Function<DeregMr>,
    pub iallreduce: Function<Iallreduce<usize>>,
    pub iallgather: Function<Iallgather<usize>>,
    pub ireducescatter: Function<Ireducescatter<usize>>,
    pub iflush: Function<Iflush>,
    pub test: Function<Test>,
    pub close_coll: Function<Close>,
    pub close_listen: Function<Close>,
    pub make_v_device: Function<MakeVDevice>,
}
/// `ncclCollNet_v10_t`: the same as v9.
pub type CollNetV10 = CollNetV9;

/// The layout of v11 and v12, which differ in their properties `P`.
#[allow(missing_docs, reason = "the functions are documented by NCCL's headers, under these names")]
#[repr(C)]
pub struct CollNetWithContext<P> {
    pub name: *const c_char,
    pub init: Function<InitContext>,
    pub devices: Function<Devices>,
    pub get_properties: Function<GetProperties<P>>,
    pub listen: Function<ListenContext>,
    pub connect: Function<Connect>,
    pub reduce_support: Function<ReduceSupport>,
    pub reg_mr: Function<RegMr<usize>>,
    pub reg_mr_dma_buf: Function<RegMrDmaBuf>,
    pub dereg_mr: Function<DeregMr>,
    pub iallreduce: Function<Iallreduce<usize>>,
    pub iallgather: Function<Iallgather<usize>>,
    pub ireducescatter: Function<Ireducescatter<usize>>,
    pub iflush: Function<Iflush>,
    pub test: Function<Test>,
    pub close_coll: Function<Close>,
    pub close_listen: Function<Close>,
    pub make_v_device: Function<MakeVDevice>,
    pub finalize: Function<Finalize>,
}
/// `ncclCollNet_v11_t`, NCCL 2.28 and 2.29.
pub type CollNetV11 = CollNetWithContext<PropertiesV11>;
/// `ncclCollNet_v12_t`, NCCL 2.30 and later.
pub type CollNetV12 = CollNetWithContext<PropertiesV12>;

// SAFETY: a table is read only, and its name points to a string that is never written or freed:
// NCCL reads it from any thread for as long as the library is loaded.
unsafe impl<P> Sync for CollNetWithGlobalInit<P> {}
// SAFETY: as above.
unsafe impl Sync for CollNetV8 {}
// SAFETY: as above.
unsafe impl Sync for CollNetV9 {}
// SAFETY: as above.
unsafe impl<P> Sync for CollNetWithContext<P> {}

const POINTER: usize = size_of::<usize>();
const _: () = {
    assert!(size_of::<CollNetV6>() == 15 * POINTER);
    assert!(size_of::<CollNetV7>() == 15 * POINTER);
    assert!(size_of::<CollNetV8>() == 17 * POINTER);
    assert!(size_of::<CollNetV9>() == 18 * POINTER);
    assert!(size_of::<CollNetV11>() == 19 * POINTER);
    assert!(size_of::<CollNetV12>() == 19 * POINTER);
    assert!(size_of::<ScatterGather<u32>>() == 24);
    assert!(size_of::<ScatterGather<usize>>() == 24);
    assert!(offset_of!(CollNetV6, iallreduce) == 10 * POINTER);
    assert!(offset_of!(CollNetV6, close_listen) == 14 * POINTER);
    assert!(offset_of!(CollNetV8, iallreduce) == 10 * POINTER);
    assert!(offset_of!(CollNetV8, close_listen) == 16 * POINTER);
    assert!(offset_of!(CollNetV9, test) == 14 * POINTER);
    assert!(offset_of!(CollNetV9, make_v_device) == 17 * POINTER);
    assert!(offset_of!(CollNetV11, listen) == 4 * POINTER);
    assert!(offset_of!(CollNetV12, finalize) == 18 * POINTER);
};
