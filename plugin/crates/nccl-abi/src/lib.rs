//! The C structures of NCCL's plugin interfaces, for both sides of them: the plugin, which exports
//! the tables, and a host, which loads and calls them. They are `ncclNet` and `ncclCollNet` v6 to
//! v12, `ncclTuner` v2 to v6, and the events of a network for profilers.
//!
//! Definitions only. Sizes and offsets are asserted against what NCCL's own headers give on a
//! 64-bit machine, so a mistake here is a build failure and not a crash in a training job.
//!
//! Source: the headers `src/include/plugin/net/net_v{6..12}.h` of NCCL 2.30.7, and those that the
//! modules name.

mod collnet;
mod net;
mod profiler;
mod properties;
mod tuner;

use std::ffi::{c_char, c_int, c_ulong, c_void};

pub use collnet::{
    CollNetV6, CollNetV7, CollNetV8, CollNetV9, CollNetV10, CollNetV11, CollNetV12,
    CollNetWithContext, CollNetWithGlobalInit, ScatterGather,
};
pub use net::{
    NetV6, NetV7, NetV8, NetV9, NetV10, NetV11, NetV12, NetWithContext, NetWithGlobalInit,
};
pub use profiler::{
    EVENT_OF_IB_V1, EVENT_OF_SOCKET_V1, EVENT_START, EVENT_STOP, IbChunkV1, IbEventV1,
    ProfilerCallback, SocketChunkV1, SocketEventV1,
};
pub use properties::{
    PropertiesV6, PropertiesV7, PropertiesV8, PropertiesV9, PropertiesV10, PropertiesV11,
    PropertiesV12, VDeviceProperties,
};
pub use tuner::{
    COST_IGNORED, NvlDomainInfo, TunerConstants, TunerTable, TunerV2, TunerV3, TunerV4, TunerV5,
    TunerV6,
};

/// `ncclResult_t`: what every call returns.
pub type NcclResult = c_int;
/// The call succeeded.
pub const SUCCESS: NcclResult = 0;
/// A call of the local system failed.
pub const SYSTEM_ERROR: NcclResult = 2;
/// The contract between NCCL and the plugin was broken.
pub const INTERNAL_ERROR: NcclResult = 3;
/// An argument is invalid.
pub const INVALID_ARGUMENT: NcclResult = 4;
/// The caller's use or configuration is at fault, such as a message longer than the posted buffer.
pub const INVALID_USAGE: NcclResult = 5;
/// The peer closed, reset or timed out.
pub const REMOTE_ERROR: NcclResult = 6;

/// Memory of the host, in `ptrSupport` and as a type of `regMr`.
pub const PTR_HOST: c_int = 1;
/// Memory of a GPU.
pub const PTR_CUDA: c_int = 2;
/// The same, in `ptrSupport`: registered by `regMrDmaBuf`.
pub const PTR_DMABUF: c_int = 4;

/// Bytes of the handle that `listen` fills in and `connect` gets, every version.
pub const HANDLE_SIZE: usize = 128;
/// Requests that may be in flight on one connection, per receive of a group (NCCL 2.19 and later; 8
/// before).
pub const MAX_REQUESTS: usize = 32;
/// Maximum that NCCL accepts in `maxP2pBytes` and `maxCollBytes`: 1 TiB.
pub const MAX_NET_SIZE: usize = 1 << 40;
/// `netDeviceType` of a network that the host drives.
pub const DEVICE_HOST: c_int = 0;
/// `netDeviceVersion` of a network that the host drives.
pub const DEVICE_VERSION_INVALID: c_int = 0;
/// A rail or plane that is not known.
pub const RAIL_UNDEFINED: i16 = -1;
/// A traffic class that is not set.
pub const TRAFFIC_CLASS_UNDEFINED: c_int = -1;

/// `ncclDebugLogLevel`: only the version is logged.
pub const LOG_VERSION: c_int = 1;
/// Problems that need attention.
pub const LOG_WARN: c_int = 2;
/// Information, shown with `NCCL_DEBUG=INFO`.
pub const LOG_INFO: c_int = 3;
/// Every step.
pub const LOG_TRACE: c_int = 5;
/// The `NET` subsystem's bit.
pub const SUBSYSTEM_NET: c_ulong = 0x10;
/// The bits of `INIT` and `NET`, for lines about start and end.
pub const SUBSYSTEM_INIT_NET: c_ulong = 0x11;
/// Every subsystem's bit.
pub const SUBSYSTEM_ALL: c_ulong = !0;

/// `ncclDebugLogger_t`: level, subsystems, file or function, line, and `printf`'s arguments. It may
/// be called from any thread.
pub type Logger =
    unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...) -> ();

/// `ncclNetCommConfig`, v10 and later.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CommConfig {
    /// The plugin's own traffic class, or [`TRAFFIC_CLASS_UNDEFINED`].
    pub traffic_class: c_int,
}

/// `ncclNetCommAttr`, v11 and later: hints, -1 where undefined.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CommAttributes {
    /// Maximum number of peers at a time.
    pub max_concurrent_peers: i32,
    /// Minimum number of peers at a time.
    pub min_concurrent_peers: i32,
    /// Maximum number of connections to each peer.
    pub max_flows_per_peer: i32,
    /// Minimum number of connections to each peer.
    pub min_flows_per_peer: i32,
}

/// The bit of `ncclFuncAllReduce` in [`Attributes::op`].
pub const OP_ALL_REDUCE: u32 = 1 << 4;
/// The bit of `ncclFuncSend` in [`Attributes::op`].
pub const OP_SEND: u32 = 1 << 6;

/// `ncclNetAttr`, v11 and later.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Attributes {
    /// Hints for sending.
    pub send: CommAttributes,
    /// Hints for receiving.
    pub recv: CommAttributes,
    /// Bitmap of operations.
    pub op: u32,
    /// Bitmap of algorithms.
    pub algo: u32,
    /// Bitmap of protocols.
    pub proto: u32,
}

/// `ncclNetDeviceHandle`, v7 and later: device offload, which Evenkeel does not have.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct DeviceHandle {
    /// Kind of the network device.
    pub device_type: c_int,
    /// Version of its interface.
    pub version: c_int,
    /// The device's own object.
    pub handle: *mut c_void,
    /// Size of that object.
    pub size: usize,
    /// Whether the host's proxy thread has to make progress.
    pub need_proxy_progress: c_int,
}

const _: () = {
    assert!(size_of::<CommConfig>() == 4);
    assert!(size_of::<Attributes>() == 44);
    assert!(size_of::<DeviceHandle>() == 32);
};
