//! MrHandle of memory, with comms of all kinds.

use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;
use std::ptr;

use evenkeel_nccl_abi::{NcclResult, PTR_CUDA, PTR_HOST};
use evenkeel_transport::{MrCache, MrHandle, RecvBuffer};

use crate::error::{PluginError, guard};
use crate::ffi::{Size, handle_ref, out_param};

pub(crate) unsafe extern "C" fn reg_mr<S: Size>(
    comm: *mut c_void,
    data: *mut c_void,
    size: S,
    kind: c_int,
    handle: *mut *mut c_void,
) -> NcclResult {
    guard("regMr", || {
        // SAFETY: NCCL passes a comm of some kind that is not closed; each begins with its MR cache.
        let mr_cache = unsafe { handle_ref::<MrCache>(comm, "comm") }?;
        // SAFETY: NCCL passes a valid out-pointer for the result.
        let handle = unsafe { out_param(handle, "mhandle") }?;
        *handle = ptr::null_mut();
        // SAFETY: NCCL keeps the memory until it has called `deregMr`, and leaves it to the requests that use it.
        let memory = unsafe { RecvBuffer::new(data.cast(), size.bytes()?) };
        let registered = match kind {
            PTR_HOST => mr_cache.register(memory)?,
            PTR_CUDA => Some(mr_cache.register_peer_memory(memory)?),
            _ => {
                return Err(PluginError::internal(format!(
                    "memory type {kind} is not supported, must be 1 (host) or 2 (GPU)"
                )));
            }
        };
        if let Some(registered) = registered {
            *handle = Box::into_raw(Box::new(registered)).cast();
        }
        Ok(())
    })
}

pub(super) unsafe extern "C" fn reg_mr_dma_buf(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    _kind: c_int,
    offset: u64,
    descriptor: c_int,
    handle: *mut *mut c_void,
) -> NcclResult {
    guard("regMrDmaBuf", || {
        // SAFETY: NCCL passes a comm of some kind that is not closed; each begins with its MR cache.
        let mr_cache = unsafe { handle_ref::<MrCache>(comm, "comm") }?;
        // SAFETY: NCCL passes a valid out-pointer for the result.
        let handle = unsafe { out_param(handle, "mhandle") }?;
        *handle = ptr::null_mut();
        if descriptor < 0 {
            return Err(PluginError::invalid_argument(format!(
                "file descriptor {descriptor} is invalid"
            )));
        }
        // SAFETY: NCCL keeps the descriptor open during the call, and nothing is done with one that is not a DMA buffer's.
        let buffer = unsafe { BorrowedFd::borrow_raw(descriptor) };
        let address = data.expose_provenance() as u64;
        let registered = mr_cache.register_dma_buffer(buffer, offset, address, size)?;
        *handle = Box::into_raw(Box::new(registered)).cast();
        Ok(())
    })
}

/// The registration of a message's memory; `None` where `reg_mr` returned none, as over TCP.
///
/// # Safety
/// The handle is one that `reg_mr` or `reg_mr_dma_buf` has returned and that is not deregistered, or null.
pub(super) unsafe fn registration<'a>(handle: *mut c_void) -> Option<&'a MrHandle> {
    // SAFETY: not null, so it was boxed there, and the box lives until `dereg_mr`. It is only read.
    unsafe { handle.cast_const().cast::<MrHandle>().as_ref() }
}

pub(crate) unsafe extern "C" fn dereg_mr(_comm: *mut c_void, handle: *mut c_void) -> NcclResult {
    guard("deregMr", || {
        if !handle.is_null() {
            // SAFETY: not null, so `reg_mr` boxed it, and NCCL gives it back once.
            drop(unsafe { Box::from_raw(handle.cast::<MrHandle>()) });
        }
        Ok(())
    })
}
