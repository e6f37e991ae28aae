//! Listening, connecting, accepting and closing.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

use evenkeel_nccl_abi::{CommConfig, DeviceHandle, HANDLE_SIZE, NcclResult};
use evenkeel_transport::{RecvConnection, SendConnection};

use super::comm::{Comm, ListenComm};
use super::context::Context;
use super::init::traffic_class;
use crate::error::{PluginError, guard};
use crate::ffi::{device_index, handle_ref, out_param, take_arc, take_box};
use crate::plugin;

/// A context of the network or of CollNet, in which NCCL listens.
pub(crate) trait ListenContext {
    /// The call's name in log lines.
    const CALL: &'static str;

    /// Fills in the handle that peers need, and returns NCCL's listen comm.
    fn listen_comm(
        &self,
        device: usize,
        handle: &mut [u8; HANDLE_SIZE],
    ) -> Result<*mut c_void, PluginError>;
}

impl ListenContext for Context {
    const CALL: &'static str = "listen";

    fn listen_comm(
        &self,
        device: usize,
        handle: &mut [u8; HANDLE_SIZE],
    ) -> Result<*mut c_void, PluginError> {
        Ok(Arc::into_raw(self.listen(device, handle)?).cast_mut().cast())
    }
}

/// # Safety
/// As for the `listen` of NCCL's tables: `handle` is `HANDLE_SIZE` bytes to write to, `comm` an
/// out-pointer for the result.
pub(crate) unsafe fn listen_with(
    context: &impl ListenContext,
    device: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
) -> Result<(), PluginError> {
    // SAFETY: the caller guarantees it; bytes have no alignment and no invalid values.
    let handle = unsafe { out_param(handle.cast::<[u8; HANDLE_SIZE]>(), "handle") }?;
    // SAFETY: the caller guarantees it.
    let comm = unsafe { out_param(comm, "listenComm") }?;
    *comm = ptr::null_mut();
    *comm = context.listen_comm(device_index(device)?, handle)?;
    Ok(())
}

/// Listens in the global context.
pub(super) unsafe extern "C" fn listen_v6(
    device: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
) -> NcclResult {
    guard("listen", || {
        let context = plugin::global_context()?;
        // SAFETY: NCCL passes valid arguments of its table's function.
        unsafe { listen_with(&*context, device, handle, comm) }
    })
}

/// Takes a context.
pub(crate) unsafe extern "C" fn listen_v11<C: ListenContext>(
    context: *mut c_void,
    device: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
) -> NcclResult {
    guard(C::CALL, || {
        // SAFETY: NCCL passes a context that `init_v11` made and that is not finalized.
        let context = unsafe { handle_ref::<C>(context, "context") }?;
        // SAFETY: NCCL passes valid arguments of its table's function.
        unsafe { listen_with(context, device, handle, comm) }
    })
}

/// # Safety
/// As for the `connect` of NCCL's tables: `handle` is `HANDLE_SIZE` bytes, the same on each call,
/// `comm` an out-pointer for the result.
unsafe fn connect_with(
    context: &Context,
    device: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
    traffic_class: Option<u8>,
) -> Result<(), PluginError> {
    // SAFETY: the caller guarantees it; bytes have no alignment and no invalid values.
    let handle = unsafe { out_param(handle.cast::<[u8; HANDLE_SIZE]>(), "handle") }?;
    // SAFETY: the caller guarantees it.
    let comm = unsafe { out_param(comm, "sendComm") }?;
    *comm = ptr::null_mut();
    if let Some(connected) = context.connect(device_index(device)?, handle, traffic_class)? {
        *comm = Box::into_raw(Box::new(connected)).cast();
    }
    Ok(())
}

/// # Safety
/// As [`connect_with`]; `config` must be null or valid for reads.
unsafe fn connect_global(
    device: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
    config: *const CommConfig,
) -> NcclResult {
    guard("connect", || {
        let context = plugin::global_context()?;
        // SAFETY: the caller guarantees it.
        unsafe { connect_with(&context, device, handle, comm, traffic_class(config)) }
    })
}

/// Connects in the global context.
pub(super) unsafe extern "C" fn connect_v6(
    device: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL passes valid arguments of its table's function.
    unsafe { connect_global(device, handle, comm, ptr::null()) }
}

/// Takes an out-parameter for device offload as well, which stays as it is.
pub(super) unsafe extern "C" fn connect_v7(
    device: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
    _device_comm: *mut *mut DeviceHandle,
) -> NcclResult {
    // SAFETY: NCCL passes valid arguments of its table's function.
    unsafe { connect_global(device, handle, comm, ptr::null()) }
}

/// Takes the communicator's configuration as well.
pub(super) unsafe extern "C" fn connect_v10(
    device: c_int,
    config: *mut CommConfig,
    handle: *mut c_void,
    comm: *mut *mut c_void,
    _device_comm: *mut *mut DeviceHandle,
) -> NcclResult {
    // SAFETY: NCCL passes valid arguments of its table's function.
    unsafe { connect_global(device, handle, comm, config) }
}

/// Takes a context in place of the configuration, which `init_v11` was given.
pub(super) unsafe extern "C" fn connect_v11(
    context: *mut c_void,
    device: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
    _device_comm: *mut *mut DeviceHandle,
) -> NcclResult {
    guard("connect", || {
        // SAFETY: NCCL passes a context that `init_v11` made and that is not finalized.
        let context = unsafe { handle_ref::<Context>(context, "context") }?;
        // SAFETY: NCCL passes valid arguments of its table's function.
        unsafe { connect_with(context, device, handle, comm, None) }
    })
}

pub(super) unsafe extern "C" fn accept_v6(
    listen_comm: *mut c_void,
    comm: *mut *mut c_void,
) -> NcclResult {
    guard("accept", || {
        // SAFETY: NCCL passes a listen comm that `listen` made and that is not closed.
        let listener = unsafe { handle_ref::<ListenComm>(listen_comm, "listenComm") }?;
        // SAFETY: NCCL passes a valid out-pointer for the result.
        let comm = unsafe { out_param(comm, "recvComm") }?;
        *comm = ptr::null_mut();
        if let Some(accepted) = listener.accept()? {
            *comm = Box::into_raw(Box::new(accepted)).cast();
        }
        Ok(())
    })
}

/// Takes an out-parameter for device offload as well, which stays as it is.
pub(super) unsafe extern "C" fn accept_v7(
    listen_comm: *mut c_void,
    comm: *mut *mut c_void,
    _device_comm: *mut *mut DeviceHandle,
) -> NcclResult {
    // SAFETY: NCCL passes valid arguments of its table's function.
    unsafe { accept_v6(listen_comm, comm) }
}

pub(super) unsafe extern "C" fn close_send(comm: *mut c_void) -> NcclResult {
    guard("closeSend", || {
        // SAFETY: NCCL passes a comm that `connect` made, and closes it once.
        unsafe { take_box::<Comm<SendConnection>>(comm, "sendComm") }.map(drop)
    })
}

pub(super) unsafe extern "C" fn close_recv(comm: *mut c_void) -> NcclResult {
    guard("closeRecv", || {
        // SAFETY: NCCL passes a comm that `accept` made, and closes it once.
        unsafe { take_box::<Comm<RecvConnection>>(comm, "recvComm") }.map(drop)
    })
}

pub(super) unsafe extern "C" fn close_listen(comm: *mut c_void) -> NcclResult {
    guard("closeListen", || {
        // SAFETY: NCCL passes a listen comm that `listen` made, and closes it once.
        unsafe { take_arc::<ListenComm>(comm, "listenComm") }?.close();
        Ok(())
    })
}
