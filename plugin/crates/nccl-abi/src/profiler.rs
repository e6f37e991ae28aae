//! What a network plugin tells NCCL's profilers: `ncclProfilerCallback_t`, and the descriptions of
//! its events.
//!
//! Sources: `src/include/nccl_common.h`, `src/include/plugin/nccl_profiler.h`, and `net_ib_v1.h`
//! and `net_socket_v1.h` in `src/include/plugin/profiler` of NCCL 2.30.7.

use std::ffi::{c_int, c_void};
use std::mem::offset_of;

use crate::NcclResult;

/// `ncclProfilerCallback_t`: a place for the event's handle, one of the calls below, the handle
/// that NCCL passed with the message, the kind and version of the description, and the description.
/// It may be called from any thread.
pub type ProfilerCallback =
    unsafe extern "C" fn(*mut *mut c_void, c_int, *mut c_void, i64, *mut c_void) -> NcclResult;

/// An event begins. The place of its handle stays as it is if no profiler wants it.
pub const EVENT_START: c_int = 0;
/// An event has ended.
pub const EVENT_STOP: c_int = 1;

/// The description is a [`IbEventV1`].
pub const EVENT_OF_IB_V1: i64 = 1 << 16 | 1;
/// The description is a [`SocketEventV1`].
pub const EVENT_OF_SOCKET_V1: i64 = 2 << 16 | 1;

/// `ncclProfilerNetSockDescr_v1_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SocketEventV1 {
    /// 1: bytes through a socket.
    pub kind: u8,
    /// What it describes, a union's only member.
    pub chunk: SocketChunkV1,
}

/// Bytes through a socket.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SocketChunkV1 {
    /// The socket.
    pub socket: c_int,
    /// 0: sent, 1: received, as `NCCL_SOCKET_SEND` and `NCCL_SOCKET_RECV`.
    pub operation: c_int,
    /// Number of bytes.
    pub length: usize,
}

/// `ncclProfilerNetIbDescr_v1_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct IbEventV1 {
    /// 1: a work request of a queue pair.
    pub kind: u8,
    /// What it describes, a union's only member.
    pub chunk: IbChunkV1,
}

/// A work request of a queue pair.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct IbChunkV1 {
    /// Index of the device among those that the connection uses.
    pub device: c_int,
    /// `wr_id`.
    pub work_request: u64,
    /// `ibv_wr_opcode`.
    pub opcode: c_int,
    /// The queue pair's number.
    pub queue_pair: c_int,
    /// Number of bytes.
    pub length: usize,
}

const _: () = {
    assert!(size_of::<SocketEventV1>() == 24);
    assert!(offset_of!(SocketEventV1, chunk.socket) == 8);
    assert!(offset_of!(SocketEventV1, chunk.operation) == 12);
    assert!(offset_of!(SocketEventV1, chunk.length) == 16);
    assert!(size_of::<IbEventV1>() == 40);
    assert!(offset_of!(IbEventV1, chunk.device) == 8);
    assert!(offset_of!(IbEventV1, chunk.work_request) == 16);
    assert!(offset_of!(IbEventV1, chunk.opcode) == 24);
    assert!(offset_of!(IbEventV1, chunk.queue_pair) == 28);
    assert!(offset_of!(IbEventV1, chunk.length) == 32);
};
