//! Sends, receives and flushes, and testing whether they are done.

use std::ffi::{c_int, c_void};
use std::ptr;

use evenkeel_nccl_abi::NcclResult;
use evenkeel_transport::{
    MAX_RECVS, MrHandle, RecvBuffer, RecvConnection, Request, SendBuffer, SendConnection,
    TaggedBuffer,
};

use super::comm::Comm;
use super::memory::registration;
use crate::error::{PluginError, guard};
use crate::ffi::{Size, handle_ref, out_param};
use crate::request_pool::PooledRequest;

/// # Safety
/// As for the `isend` of NCCL's tables.
unsafe fn send_message<S: Size>(
    comm: *mut c_void,
    data: *mut c_void,
    size: S,
    tag: c_int,
    handle: *mut c_void,
    profile: *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    guard("isend", || {
        let length = size.bytes()?;
        if data.is_null() && length > 0 {
            return Err(PluginError::invalid_argument("data is null"));
        }
        // SAFETY: NCCL passes a comm that `connect` made and that is not closed.
        let comm = unsafe { handle_ref::<Comm<SendConnection>>(comm, "sendComm") }?;
        // SAFETY: NCCL passes a valid out-pointer for the result.
        let request = unsafe { out_param(request, "request") }?;
        *request = ptr::null_mut();
        // SAFETY: NCCL leaves the memory alone until `test` has reported the request or the comm
        // is closed.
        let buffer = unsafe { SendBuffer::new(data.cast_const().cast(), length) };
        // SAFETY: NCCL passes the handle of the memory's registration, which lasts until the request is done.
        let registration = unsafe { registration(handle) };
        if let Some(started) = comm.send(buffer, tag, registration, profile)? {
            *request = ptr::from_ref(started).cast_mut().cast();
        }
        Ok(())
    })
}

pub(super) unsafe extern "C" fn isend_v6<S: Size>(
    comm: *mut c_void,
    data: *mut c_void,
    size: S,
    tag: c_int,
    handle: *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL passes valid arguments of its table's function.
    unsafe { send_message(comm, data, size, tag, handle, ptr::null_mut(), request) }
}

/// Takes a profiler's handle as well.
pub(super) unsafe extern "C" fn isend_v10(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    tag: c_int,
    handle: *mut c_void,
    profile: *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL passes valid arguments of its table's function.
    unsafe { send_message(comm, data, size, tag, handle, profile, request) }
}

/// The registration at this index of an array.
///
/// # Safety
/// The array is null, or has a handle there as [`registration`] requires.
unsafe fn registration_of<'a>(handles: *mut *mut c_void, index: usize) -> Option<&'a MrHandle> {
    if handles.is_null() {
        return None;
    }
    // SAFETY: passed on to the caller.
    unsafe { registration(*handles.add(index)) }
}

/// The number of buffers of a group.
fn group_size(count: c_int) -> Result<usize, PluginError> {
    let size = usize::try_from(count).ok().filter(|size| (1..=MAX_RECVS).contains(size));
    size.ok_or_else(|| {
        PluginError::internal(format!(
            "{count} receives in a group, must be 1 to {MAX_RECVS} (maxRecvs)"
        ))
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
    (handles, profiles): (*mut *mut c_void, *mut *mut c_void),
    request: *mut *mut c_void,
) -> NcclResult {
    guard("irecv", || {
        let count = group_size(count)?;
        let buffer = RecvBuffer::from_static(&mut []);
        let empty = TaggedBuffer { buffer, tag: 0, registration: None };
        let (mut group, mut marked) = ([empty; MAX_RECVS], [ptr::null_mut(); MAX_RECVS]);
        for (index, tagged) in group[..count].iter_mut().enumerate() {
            // SAFETY: NCCL passes arrays of `count` elements; null is refused before anything is added to it.
            let (data, size, tag) = unsafe {
                out_param(data, "data")?;
                out_param(sizes, "sizes")?;
                out_param(tags, "tags")?;
                (*data.add(index), *sizes.add(index), *tags.add(index))
            };
            let length = size.bytes()?;
            if data.is_null() && length > 0 {
                return Err(PluginError::invalid_argument("data is null"));
            }
            // SAFETY: NCCL gives the memory away until `test` has reported the request or the comm is
            // closed.
            let buffer = unsafe { RecvBuffer::new(data.cast(), length) };
            if !profiles.is_null() {
                // SAFETY: NCCL passes an array of as many profiler's handles, or null.
                marked[index] = unsafe { *profiles.add(index) };
            }
            // SAFETY: NCCL passes an array of as many handles of registrations, which last until the request is done.
            let registration = unsafe { registration_of(handles, index) };
            *tagged = TaggedBuffer { buffer, tag, registration };
        }
        // SAFETY: NCCL passes a comm that `accept` made and that is not closed.
        let comm = unsafe { handle_ref::<Comm<RecvConnection>>(comm, "recvComm") }?;
        // SAFETY: NCCL passes a valid out-pointer for the result. What is in it may be a hint: it is not read.
        let request = unsafe { out_param(request, "request") }?;
        *request = ptr::null_mut();
        if let Some(started) = comm.recv(&mut group[..count], &marked[..count])? {
            *request = ptr::from_ref(started).cast_mut().cast();
        }
        Ok(())
    })
}

pub(super) unsafe extern "C" fn irecv_v6<S: Size>(
    comm: *mut c_void,
    count: c_int,
    data: *mut *mut c_void,
    sizes: *mut S,
    tags: *mut c_int,
    handles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL passes valid arguments of its table's function.
    unsafe { post_buffers(comm, count, data, sizes, tags, (handles, ptr::null_mut()), request) }
}

/// Takes profiler's handles as well.
pub(super) unsafe extern "C" fn irecv_v10(
    comm: *mut c_void,
    count: c_int,
    data: *mut *mut c_void,
    sizes: *mut usize,
    tags: *mut c_int,
    handles: *mut *mut c_void,
    profiles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL passes valid arguments of its table's function.
    unsafe { post_buffers(comm, count, data, sizes, tags, (handles, profiles), request) }
}

pub(super) unsafe extern "C" fn iflush(
    comm: *mut c_void,
    count: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    handles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    guard("iflush", || {
        // SAFETY: NCCL passes a valid out-pointer for the result.
        let request = unsafe { out_param(request, "request") }?;
        // A null request means that there is nothing to flush.
        *request = ptr::null_mut();
        let mut last = None;
        for index in 0..group_size(count)? {
            // SAFETY: NCCL passes arrays of `count` elements; null is refused before anything is added to it.
            let (start, size) = unsafe {
                out_param(data, "data")?;
                out_param(sizes, "sizes")?;
                (*data.add(index), *sizes.add(index))
            };
            if size != 0 {
                last = Some((index, start, size.bytes()?));
            }
        }
        let Some((index, start, length)) = last else { return Ok(()) };
        // SAFETY: NCCL passes a comm that `accept` made and that is not closed.
        let comm = unsafe { handle_ref::<Comm<RecvConnection>>(comm, "recvComm") }?;
        // SAFETY: NCCL keeps the memory until `test` has reported the request or the comm is closed; it is only read.
        let message = unsafe { RecvBuffer::new(start.cast(), length) };
        // SAFETY: NCCL passes an array of `count` handles of registrations, which last until the request is done.
        let registration = unsafe { registration_of(handles, index) };
        *request = ptr::from_ref(comm.flush(message, registration)?).cast_mut().cast();
        Ok(())
    })
}

pub(super) unsafe extern "C" fn test(
    request: *mut c_void,
    done: *mut c_int,
    sizes: *mut c_int,
) -> NcclResult {
    guard("test", || {
        // SAFETY: NCCL passes a valid out-pointer for the result.
        let done = unsafe { out_param(done, "done") }?;
        *done = 0;
        // SAFETY: NCCL passes a request of a comm that is not closed: one in its pool.
        let pending = unsafe { handle_ref::<PooledRequest<Request>>(request, "request") }?;
        if let Some(request) = pending.take_if_done(|request| Ok(request.test()?.is_some()))? {
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
