//! The functions of `mpi.h`.
#![expect(
    clippy::missing_safety_doc,
    reason = "the header states what callers must guarantee once, at its top"
)]

use std::ffi::{c_char, c_int, c_void};

use evenkeel_collectives::Call;

use crate::error::{Error, Result};
use crate::guard::guard;
use crate::handles::{COMM_NULL, length, reduction};
use crate::{buffer, world};

/// Waits for all ranks. The arguments are MPI's, and are not used.
#[unsafe(no_mangle)]
pub extern "C" fn MPI_Init(_argc: *mut c_int, _argv: *mut *mut *mut c_char) -> c_int {
    guard("MPI_Init", world::init)
}

/// Waits for all ranks, and leaves them.
#[unsafe(no_mangle)]
pub extern "C" fn MPI_Finalize() -> c_int {
    guard("MPI_Finalize", world::finalize)
}

/// This process's rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn MPI_Comm_rank(comm: c_int, rank: *mut c_int) -> c_int {
    guard("MPI_Comm_rank", || {
        let number = to_int(world::group(comm)?.rank())?;
        // SAFETY: the header requires a place for the result.
        unsafe { buffer::write(rank, number) }
    })
}

/// The number of ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn MPI_Comm_size(comm: c_int, size: *mut c_int) -> c_int {
    guard("MPI_Comm_size", || {
        let number = to_int(world::group(comm)?.size())?;
        // SAFETY: the header requires a place for the result.
        unsafe { buffer::write(size, number) }
    })
}

/// Makes the communicator of the ranks with the same color.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn MPI_Comm_split(
    comm: c_int,
    color: c_int,
    key: c_int,
    newcomm: *mut c_int,
) -> c_int {
    guard("MPI_Comm_split", || {
        let made = world::split(comm, color, key)?;
        // SAFETY: the header requires a place for the result.
        unsafe { buffer::write(newcomm, made) }
    })
}

/// Frees a communicator.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn MPI_Comm_free(comm: *mut c_int) -> c_int {
    guard("MPI_Comm_free", || {
        // SAFETY: the header requires a communicator.
        let freed = unsafe { comm.as_ref() }.copied();
        world::free(freed.ok_or_else(|| Error("the communicator is NULL".to_owned()))?)?;
        // SAFETY: the header requires a communicator.
        unsafe { buffer::write(comm, COMM_NULL) }
    })
}

/// Returns when all ranks have called it.
#[unsafe(no_mangle)]
pub extern "C" fn MPI_Barrier(comm: c_int) -> c_int {
    guard("MPI_Barrier", || Ok(world::group(comm)?.barrier(&Call::default())?))
}

/// Sends the root's buffer to all ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn MPI_Bcast(
    buffer: *mut c_void,
    count: c_int,
    datatype: c_int,
    root: c_int,
    comm: c_int,
) -> c_int {
    guard("MPI_Bcast", || {
        let group = world::group(comm)?;
        // SAFETY: the header requires a buffer of that many elements.
        let data = unsafe { buffer::received(buffer, length(count, datatype)?)? };
        Ok(group.broadcast(data, to_rank(root)?, &Call::default())?)
    })
}

/// Reduces the buffers of all ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn MPI_Allreduce(
    sendbuf: *const c_void,
    recvbuf: *mut c_void,
    count: c_int,
    datatype: c_int,
    op: c_int,
    comm: c_int,
) -> c_int {
    guard("MPI_Allreduce", || {
        let group = world::group(comm)?;
        let (reduction, length) = (reduction(datatype, op)?, length(count, datatype)?);
        // SAFETY: the header requires buffers of that many elements.
        let data = unsafe { buffer::received_with_own(sendbuf, recvbuf, length, 0..length)? };
        Ok(group.allreduce(data, &reduction, &Call::default())?)
    })
}

/// Gathers what all ranks send, at all ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn MPI_Allgather(
    sendbuf: *const c_void,
    sendcount: c_int,
    sendtype: c_int,
    recvbuf: *mut c_void,
    recvcount: c_int,
    recvtype: c_int,
    comm: c_int,
) -> c_int {
    guard("MPI_Allgather", || {
        let group = world::group(comm)?;
        let part = part(sendbuf, (sendcount, sendtype), (recvcount, recvtype))?;
        let (all, own) = (part * group.size(), part * group.rank()..part * (group.rank() + 1));
        // SAFETY: the header requires buffers of that many elements.
        let data = unsafe { buffer::received_with_own(sendbuf, recvbuf, all, own)? };
        Ok(group.allgather(data, &Call::default())?)
    })
}

/// Gathers what all ranks send, at the root.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn MPI_Gather(
    sendbuf: *const c_void,
    sendcount: c_int,
    sendtype: c_int,
    recvbuf: *mut c_void,
    recvcount: c_int,
    recvtype: c_int,
    root: c_int,
    comm: c_int,
) -> c_int {
    guard("MPI_Gather", || {
        let (group, root) = (world::group(comm)?, to_rank(root)?);
        if group.rank() != root {
            // SAFETY: the header requires a buffer of that many elements.
            let input = unsafe { buffer::sent(sendbuf, length(sendcount, sendtype)?)? };
            return Ok(group.gather(input, &mut [], root, &Call::default())?);
        }
        let part = part(sendbuf, (sendcount, sendtype), (recvcount, recvtype))?;
        let (all, own) = (part * group.size(), part * root..part * (root + 1));
        // SAFETY: the header requires buffers of that many elements.
        let output = unsafe { buffer::received_with_own(sendbuf, recvbuf, all, own.clone())? };
        let input = output[own].to_vec();
        Ok(group.gather(&input, output, root, &Call::default())?)
    })
}

/// The length in bytes of what each rank sends, which the receiver has to expect. The product with a number of ranks, of which each
/// is a process, does not overflow.
fn part(sendbuf: *const c_void, send: (c_int, c_int), receive: (c_int, c_int)) -> Result<usize> {
    let received = length(receive.0, receive.1)?;
    if !buffer::is_in_place(sendbuf) {
        let sent = length(send.0, send.1)?;
        if sent != received {
            return Err(Error(format!(
                "{sent} bytes are sent, and {received} received from each rank"
            )));
        }
    }
    Ok(received)
}

fn to_rank(root: c_int) -> Result<usize> {
    usize::try_from(root).map_err(|_| Error(format!("there is no rank {root}")))
}

fn to_int(number: usize) -> Result<c_int> {
    c_int::try_from(number).map_err(|_| Error(format!("{number} is more than an int holds")))
}
