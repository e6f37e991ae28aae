//! The exported CollNet tables. Functions here translate arguments and nothing else. Devices are those of the network's
//! tables, in the same order and with the same properties, as NCCL wants it.

use std::ffi::{c_int, c_void};
use std::{ptr, slice};

use evenkeel_nccl_abi::{
    CollNetV6, CollNetV7, CollNetV8, CollNetV9, CollNetV10, CollNetV11, CollNetV12, HANDLE_SIZE,
    Logger, NcclResult,
};
use evenkeel_transport::{RecvBuffer, SendBuffer};

use crate::collective::{self, CollComm, CollSlot, Collectives, ListenColl};
use crate::failure::{Failure, guard};
use crate::logger::LOG;
use crate::tables::{
    Listens, NAME, Size, dereg_mr, get_properties, listen_in_context, listen_with, object, place,
    reg_mr,
};

unsafe extern "C" fn init(logger: Option<Logger>) -> NcclResult {
    LOG.set(logger);
    guard("CollNet init", || Collectives::new(0).map(|_| ()))
}

unsafe extern "C" fn init_context(
    context: *mut *mut c_void,
    communicator: u64,
    logger: Option<Logger>,
) -> NcclResult {
    LOG.set(logger);
    guard("CollNet init", || {
        // SAFETY: NCCL passes a place for the context.
        let place = unsafe { place(context, "context") }?;
        *place = Box::into_raw(Box::new(Collectives::new(communicator)?)).cast();
        Ok(())
    })
}

unsafe extern "C" fn finalize(context: *mut c_void) -> NcclResult {
    guard("CollNet finalize", || {
        // SAFETY: a context that is not null came from `init_context`, and NCCL finalizes it once.
        unsafe { take::<Collectives>(context, "context") }
    })
}

/// Gives an object back that was handed out by `Box::into_raw`.
///
/// # Safety
/// `pointer` must be null or such an object, not given back before.
unsafe fn take<T>(pointer: *mut c_void, what: &str) -> Result<(), Failure> {
    if pointer.is_null() {
        return Err(Failure::argument(format!("{what} is null")));
    }
    // SAFETY: passed on to the caller.
    drop(unsafe { Box::from_raw(pointer.cast::<T>()) });
    Ok(())
}

unsafe extern "C" fn devices(count: *mut c_int) -> NcclResult {
    guard("CollNet devices", || {
        // SAFETY: NCCL passes a place for the number.
        *unsafe { place(count, "count") }? =
            c_int::try_from(collective::device_count()?).unwrap_or(c_int::MAX);
        Ok(())
    })
}

impl Listens for Collectives {
    const CALL: &'static str = "CollNet listen";

    fn start(&self, device: usize, handle: &mut [u8; HANDLE_SIZE]) -> Result<*mut c_void, Failure> {
        Ok(Box::into_raw(Box::new(self.listen(device, handle)?)).cast())
    }
}

unsafe extern "C" fn listen(
    device: c_int,
    handle: *mut c_void,
    comm: *mut *mut c_void,
) -> NcclResult {
    guard(Collectives::CALL, || {
        // SAFETY: NCCL passes what its table says.
        unsafe { listen_with(&Collectives::new(0)?, device, handle, comm) }
    })
}

unsafe extern "C" fn connect(
    handles: *mut *mut c_void,
    ranks: c_int,
    rank: c_int,
    listen_comm: *mut c_void,
    comm: *mut *mut c_void,
) -> NcclResult {
    guard("CollNet connect", || {
        let count = |number: c_int, what: &str| {
            usize::try_from(number).map_err(|_| Failure::argument(format!("{number} as {what}")))
        };
        let (ranks, rank) = (count(ranks, "the number of ranks")?, count(rank, "the rank")?);
        if rank >= ranks {
            return Err(Failure::argument(format!("rank {rank} of {ranks}")));
        }
        if handles.is_null() {
            return Err(Failure::argument("handles is null"));
        }
        // SAFETY: NCCL passes an array of one handle per rank, which it leaves alone during the call.
        let handles = unsafe { slice::from_raw_parts(handles.cast_const(), ranks) };
        let handles = handles
            .iter()
            // SAFETY: each handle is `HANDLE_SIZE` bytes.
            .map(|handle| unsafe { object::<[u8; HANDLE_SIZE]>(*handle, "a rank's handle") })
            .collect::<Result<Vec<_>, _>>()?;
        // SAFETY: NCCL passes a listen comm that `listen` made and that is not closed.
        let listener = unsafe { object::<ListenColl>(listen_comm, "listenComm") }?;
        // SAFETY: NCCL passes a place for the result.
        let comm = unsafe { place(comm, "collComm") }?;
        *comm = ptr::null_mut();
        *comm = Box::into_raw(Box::new(listener.connect(&handles, rank)?)).cast();
        Ok(())
    })
}

unsafe extern "C" fn reduce_support(kind: c_int, op: c_int, supported: *mut c_int) -> NcclResult {
    guard("CollNet reduceSupport", || {
        // SAFETY: NCCL passes a place for the answer.
        *unsafe { place(supported, "supported") }? = collective::is_supported(kind, op).into();
        Ok(())
    })
}

unsafe extern "C" fn iallreduce<S: Size>(
    comm: *mut c_void,
    send: *mut c_void,
    recv: *mut c_void,
    count: S,
    kind: c_int,
    op: c_int,
    _send_registration: *mut c_void,
    _recv_registration: *mut c_void,
    request: *mut *mut c_void,
) -> NcclResult {
    guard("iallreduce", || {
        let length = collective::bytes_of(count.bytes()?, kind)?;
        if length > 0 && (send.is_null() || recv.is_null()) {
            return Err(Failure::argument("data is null"));
        }
        // SAFETY: NCCL passes a comm that `connect` made and that is not closed.
        let comm = unsafe { object::<CollComm>(comm, "collComm") }?;
        // SAFETY: NCCL passes a place for the result.
        let request = unsafe { place(request, "request") }?;
        *request = ptr::null_mut();
        // SAFETY: NCCL leaves the memory alone until `test` has reported the request or the comm
        // is closed.
        let from = unsafe { SendBuffer::new(send.cast_const().cast(), length) };
        // SAFETY: NCCL gives the memory away until `test` has reported the request or the comm is
        // closed.
        let to = unsafe { RecvBuffer::new(recv.cast(), length) };
        if let Some(slot) = comm.all_reduce(from, to, kind, op)? {
            *request = ptr::from_ref(slot).cast_mut().cast();
        }
        Ok(())
    })
}

unsafe extern "C" fn iflush(
    _comm: *mut c_void,
    _data: *mut c_void,
    _size: c_int,
    _registration: *mut c_void,
    _request: *mut *mut c_void,
) -> NcclResult {
    guard("CollNet iflush", || Err(Failure::contract("host memory needs no flush")))
}

unsafe extern "C" fn test(request: *mut c_void, done: *mut c_int, size: *mut c_int) -> NcclResult {
    guard("CollNet test", || {
        // SAFETY: NCCL passes a place for the result.
        let done = unsafe { place(done, "done") }?;
        *done = 0;
        // SAFETY: NCCL passes a request of a comm that is not closed: one of its slots.
        let slot = unsafe { object::<CollSlot>(request, "request") }?;
        if let Some(bytes) = slot.test()? {
            *done = 1;
            if !size.is_null() {
                // SAFETY: not null, and NCCL passes room for one size.
                unsafe { size.write(c_int::try_from(bytes).unwrap_or(c_int::MAX)) };
            }
        }
        Ok(())
    })
}

unsafe extern "C" fn close_coll(comm: *mut c_void) -> NcclResult {
    guard("closeColl", || {
        // SAFETY: NCCL passes a comm that `connect` made, and closes it once.
        unsafe { take::<CollComm>(comm, "collComm") }
    })
}

unsafe extern "C" fn close_listen(comm: *mut c_void) -> NcclResult {
    guard("CollNet closeListen", || {
        // SAFETY: NCCL passes a listen comm that `listen` made, and closes it once.
        unsafe { take::<ListenColl>(comm, "listenComm") }
    })
}

/// The first slots with what all versions share filled in.
macro_rules! table {
    ($symbol:ident: $table:ident, { $($own:tt)* }) => {
        /// NCCL finds the table by this name.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals, reason = "the name is NCCL's")]
        static $symbol: $table = $table {
            name: NAME.as_ptr(),
            devices: Some(devices),
            get_properties: Some(get_properties),
            connect: Some(connect),
            reduce_support: Some(reduce_support),
            reg_mr: Some(reg_mr),
            reg_mr_dma_buf: None,
            dereg_mr: Some(dereg_mr),
            iallreduce: Some(iallreduce),
            iflush: Some(iflush),
            test: Some(test),
            close_coll: Some(close_coll),
            close_listen: Some(close_listen),
            $($own)*
        };
    };
}

table!(ncclCollNetPlugin_v6: CollNetV6, { init: Some(init), listen: Some(listen), });

table!(ncclCollNetPlugin_v7: CollNetV7, { init: Some(init), listen: Some(listen), });

table!(ncclCollNetPlugin_v8: CollNetV8, {
    init: Some(init),
    listen: Some(listen),
    iallgather: None,
    ireducescatter: None,
});

table!(ncclCollNetPlugin_v9: CollNetV9, {
    init: Some(init),
    listen: Some(listen),
    iallgather: None,
    ireducescatter: None,
    make_v_device: None,
});

table!(ncclCollNetPlugin_v10: CollNetV10, {
    init: Some(init),
    listen: Some(listen),
    iallgather: None,
    ireducescatter: None,
    make_v_device: None,
});

table!(ncclCollNetPlugin_v11: CollNetV11, {
    init: Some(init_context),
    listen: Some(listen_in_context::<Collectives>),
    iallgather: None,
    ireducescatter: None,
    make_v_device: None,
    finalize: Some(finalize),
});

table!(ncclCollNetPlugin_v12: CollNetV12, {
    init: Some(init_context),
    listen: Some(listen_in_context::<Collectives>),
    iallgather: None,
    ireducescatter: None,
    make_v_device: None,
    finalize: Some(finalize),
});
