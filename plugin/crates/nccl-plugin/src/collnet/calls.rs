//! The functions in the tables, which translate arguments and nothing else.

use std::ffi::{c_int, c_void};
use std::{ptr, slice};

use evenkeel_nccl_abi::{HANDLE_SIZE, Logger, NcclResult};
use evenkeel_transport::{RecvBuffer, SendBuffer};

use super::comm::{self, AllReduce, CollNetComm, CollNetContext, CollNetListenComm};
use crate::error::{PluginError, guard};
use crate::ffi::{Size, handle_ref, out_param, take_box};
use crate::logger::LOG;
use crate::net::connect::{ListenContext, listen_with};
use crate::request_pool::PooledRequest;

pub(super) unsafe extern "C" fn init_v6(logger: Option<Logger>) -> NcclResult {
    guard("CollNet init", || {
        LOG.set(logger);
        CollNetContext::new(0).map(|_| ())
    })
}

pub(super) unsafe extern "C" fn init_v11(
    context: *mut *mut c_void,
    communicator: u64,
    logger: Option<Logger>,
) -> NcclResult {
    guard("CollNet init", || {
        LOG.set(logger);
        // SAFETY: NCCL passes a valid out-pointer for the context.
        let out = unsafe { out_param(context, "context") }?;
        // NCCL gives up a table without devices, and does not finalize its context. Version 2.28.3 calls `finalize` through a null
        // table, unless the context is null.
        *out = match comm::device_count()? {
            0 => ptr::null_mut(),
            _ => Box::into_raw(Box::new(CollNetContext::new(communicator)?)).cast(),
        };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn finalize_v11(context: *mut c_void) -> NcclResult {
    guard("CollNet finalize", || {
        if context.is_null() {
            return Ok(()); // that of a table without devices
        }
        // SAFETY: a context that is not null came from `init_v11`, and NCCL finalizes it once.
        unsafe { take_box::<CollNetContext>(context, "context") }.map(drop)
    })
}

pub(super) unsafe extern "C" fn devices(count: *mut c_int) -> NcclResult {
    guard("CollNet devices", || {
        // SAFETY: NCCL passes a valid out-pointer for the number.
        *unsafe { out_param(count, "count") }? =
            c_int::try_from(comm::device_count()?).unwrap_or(c_int::MAX);
        Ok(())
    })
}

impl ListenContext for CollNetContext {
    const CALL: &'static str = "CollNet listen";

    fn listen_comm(
        &self,
        device: usize,
        handle: &mut [u8; HANDLE_SIZE],
    ) -> Result<*mut c_void, PluginError> {
        Ok(Box::into_raw(Box::new(self.listen(device, handle)?)).cast())
    }
}

pub(super) unsafe extern "C" fn listen_v6(
    device: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
) -> NcclResult {
    guard(CollNetContext::CALL, || {
        // SAFETY: NCCL passes valid arguments of its table's function.
        unsafe { listen_with(&CollNetContext::new(0)?, device, handle, comm) }
    })
}

pub(super) unsafe extern "C" fn connect(
    handles: *mut *mut c_void,
    ranks: c_int,
    rank: c_int,
    listen_comm: *mut c_void,
    comm: *mut *mut c_void,
) -> NcclResult {
    guard("CollNet connect", || {
        let count = |number: c_int, what: &str| {
            usize::try_from(number)
                .map_err(|_| PluginError::invalid_argument(format!("{what} is negative: {number}")))
        };
        let (ranks, rank) = (count(ranks, "the number of ranks")?, count(rank, "the rank")?);
        if rank >= ranks {
            return Err(PluginError::invalid_argument(format!(
                "rank {rank} is not below the number of ranks, {ranks}"
            )));
        }
        if handles.is_null() {
            return Err(PluginError::invalid_argument("handles is null"));
        }
        // SAFETY: NCCL passes an array of one handle per rank, which it leaves alone during the call.
        let handles = unsafe { slice::from_raw_parts(handles.cast_const(), ranks) };
        let handles = handles
            .iter()
            // SAFETY: each handle is `HANDLE_SIZE` bytes.
            .map(|handle| unsafe { handle_ref::<[u8; HANDLE_SIZE]>(*handle, "a rank's handle") })
            .collect::<Result<Vec<_>, _>>()?;
        // SAFETY: NCCL passes a listen comm that `listen` made and that is not closed.
        let listener = unsafe { handle_ref::<CollNetListenComm>(listen_comm, "listenComm") }?;
        // SAFETY: NCCL passes a valid out-pointer for the result.
        let comm = unsafe { out_param(comm, "collComm") }?;
        *comm = ptr::null_mut();
        *comm = Box::into_raw(Box::new(listener.connect(&handles, rank)?)).cast();
        Ok(())
    })
}

pub(super) unsafe extern "C" fn reduce_support(
    kind: c_int,
    op: c_int,
    supported: *mut c_int,
) -> NcclResult {
    guard("CollNet reduceSupport", || {
        // SAFETY: NCCL passes a valid out-pointer for the answer.
        *unsafe { out_param(supported, "supported") }? = comm::is_supported(kind, op).into();
        Ok(())
    })
}

pub(super) unsafe extern "C" fn iallreduce<S: Size>(
    comm: *mut c_void,
    send: *mut c_void,
    recv: *mut c_void,
    count: S,
    kind: c_int,
    op: c_int,
    _send_handle: *mut c_void,
    _recv_handle: *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    guard("iallreduce", || {
        let length = comm::bytes_of(count.bytes()?, kind)?;
        if length > 0 && (send.is_null() || recv.is_null()) {
            return Err(PluginError::invalid_argument("data is null"));
        }
        // SAFETY: NCCL passes a comm that `connect` made and that is not closed.
        let comm = unsafe { handle_ref::<CollNetComm>(comm, "collComm") }?;
        // SAFETY: NCCL passes a valid out-pointer for the result.
        let request = unsafe { out_param(request, "request") }?;
        *request = ptr::null_mut();
        // SAFETY: NCCL leaves the memory alone until `test` has reported the request or the comm
        // is closed.
        let from = unsafe { SendBuffer::new(send.cast_const().cast(), length) };
        // SAFETY: NCCL gives the memory away until `test` has reported the request or the comm is
        // closed.
        let to = unsafe { RecvBuffer::new(recv.cast(), length) };
        if let Some(started) = comm.all_reduce(from, to, kind, op)? {
            *request = ptr::from_ref(started).cast_mut().cast();
        }
        Ok(())
    })
}

pub(super) unsafe extern "C" fn iflush(
    _comm: *mut c_void,
    _data: *mut c_void,
    _size: c_int,
    _handle: *mut c_void,
    _request: *mut *mut c_void,
) -> NcclResult {
    guard("CollNet iflush", || Err(PluginError::internal("host memory needs no flush")))
}

pub(super) unsafe extern "C" fn test(
    request: *mut c_void,
    done: *mut c_int,
    size: *mut c_int,
) -> NcclResult {
    guard("CollNet test", || {
        // SAFETY: NCCL passes a valid out-pointer for the result.
        let done = unsafe { out_param(done, "done") }?;
        *done = 0;
        // SAFETY: NCCL passes a request of a comm that is not closed: one in its pool.
        let pending = unsafe { handle_ref::<PooledRequest<AllReduce>>(request, "request") }?;
        if let Some(finished) = pending.take_if_done(AllReduce::is_done)? {
            *done = 1;
            if !size.is_null() {
                // SAFETY: not null, and NCCL passes room for one size.
                unsafe { size.write(c_int::try_from(finished.bytes()).unwrap_or(c_int::MAX)) };
            }
        }
        Ok(())
    })
}

pub(super) unsafe extern "C" fn close_coll(comm: *mut c_void) -> NcclResult {
    guard("closeColl", || {
        // SAFETY: NCCL passes a comm that `connect` made, and closes it once.
        unsafe { take_box::<CollNetComm>(comm, "collComm") }.map(drop)
    })
}

pub(super) unsafe extern "C" fn close_listen(comm: *mut c_void) -> NcclResult {
    guard("CollNet closeListen", || {
        // SAFETY: NCCL passes a listen comm that `listen` made, and closes it once.
        unsafe { take_box::<CollNetListenComm>(comm, "listenComm") }.map(drop)
    })
}
