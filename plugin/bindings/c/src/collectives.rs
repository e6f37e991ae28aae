//! Collective operations that move data without combining it. They count in bytes.

use std::ffi::c_void;

use evenkeel_collectives as collectives;

use crate::group::{Call, Group, options, with};
use crate::pointers;
use crate::reductions::parts;
use crate::status::Status;

/// Gives all ranks the bytes of rank `root`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_broadcast(
    group: *const Group,
    data: *mut c_void,
    bytes: usize,
    root: usize,
    call: *const Call,
) -> Status {
    // SAFETY: the header asks for a group, a buffer, and a call or NULL.
    unsafe {
        with(group, |group| {
            let data = pointers::bytes_mut("data", data, bytes)?;
            Ok(group.broadcast(data, root, &options(call)?)?)
        })
    }
}

/// Each rank has its part at its place in the buffer; afterwards all have all. `lengths` are the parts' bytes, one for each rank,
/// which make `bytes` together; NULL: equal parts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_allgather(
    group: *const Group,
    data: *mut c_void,
    bytes: usize,
    lengths: *const usize,
    call: *const Call,
) -> Status {
    // SAFETY: the header asks for a group, a buffer, a number for each rank, and a call or NULL.
    unsafe {
        with(group, |group| {
            let data = pointers::bytes_mut("data", data, bytes)?;
            let lengths = parts(group, lengths, bytes, "bytes")?;
            Ok(group.allgatherv(data, &lengths, &options(call)?)?)
        })
    }
}

/// Every rank's bytes go to rank `root`, one rank's after the other's. `output` is the root's, and has `output_bytes`; the others pass
/// NULL and 0. `lengths` are the inputs' bytes, one for each rank, the same on all ranks; NULL: all are as long as this rank's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_gather(
    group: *const Group,
    input: *const c_void,
    input_bytes: usize,
    output: *mut c_void,
    output_bytes: usize,
    lengths: *const usize,
    root: usize,
    call: *const Call,
) -> Status {
    let (input, output) = ((input, input_bytes), (output, output_bytes));
    // SAFETY: as the header asks.
    unsafe {
        gather_or_scatter(
            group,
            input,
            output,
            (lengths, input_bytes),
            root,
            call,
            collectives::Group::gatherv,
        )
    }
}

/// The bytes of rank `root` go to the ranks, a part for each. `input` is the root's, and has `input_bytes`; the others pass NULL and 0.
/// `lengths` are the outputs' bytes, one for each rank, the same on all ranks; NULL: all are as long as this rank's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_scatter(
    group: *const Group,
    input: *const c_void,
    input_bytes: usize,
    output: *mut c_void,
    output_bytes: usize,
    lengths: *const usize,
    root: usize,
    call: *const Call,
) -> Status {
    let (input, output) = ((input, input_bytes), (output, output_bytes));
    // SAFETY: as the header asks.
    unsafe {
        gather_or_scatter(
            group,
            input,
            output,
            (lengths, output_bytes),
            root,
            call,
            collectives::Group::scatterv,
        )
    }
}

/// To or from one rank. The lengths are given, or all are the same.
///
/// # Safety
/// A group, buffers, a number for each rank or null, and a call or null.
unsafe fn gather_or_scatter(
    group: *const Group,
    (input, input_bytes): (*const c_void, usize),
    (output, output_bytes): (*mut c_void, usize),
    (lengths, equal): (*const usize, usize),
    root: usize,
    call: *const Call,
    operation: impl FnOnce(
        &collectives::Group,
        &[u8],
        &mut [u8],
        &[usize],
        usize,
        &collectives::Call,
    ) -> collectives::Result<()>,
) -> Status {
    // SAFETY: the caller sees to it.
    unsafe {
        with(group, |group| {
            let input = pointers::bytes("input", input, input_bytes)?;
            let output = pointers::bytes_mut("output", output, output_bytes)?;
            let call = options(call)?;
            let lengths: &[usize] = match lengths.is_null() {
                true => &vec![equal; group.size()],
                false => pointers::slice("list of lengths", lengths, group.size())?,
            };
            Ok(operation(group, input, output, lengths, root, &call)?)
        })
    }
}

/// Part i of the input goes to rank i; part i of the output comes from rank i. `sent` and `received` are the parts' bytes, one for
/// each rank; NULL: equal parts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_alltoall(
    group: *const Group,
    input: *const c_void,
    input_bytes: usize,
    sent: *const usize,
    output: *mut c_void,
    output_bytes: usize,
    received: *const usize,
    call: *const Call,
) -> Status {
    // SAFETY: the header asks for a group, buffers, a number for each rank, and a call or NULL.
    unsafe {
        with(group, |group| {
            let input = pointers::bytes("input", input, input_bytes)?;
            let output = pointers::bytes_mut("output", output, output_bytes)?;
            let sent = parts(group, sent, input_bytes, "bytes in the input")?;
            let received = parts(group, received, output_bytes, "bytes in the output")?;
            Ok(group.alltoallv(input, &sent, output, &received, &options(call)?)?)
        })
    }
}

/// Returns when all ranks have called it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_barrier(group: *const Group, call: *const Call) -> Status {
    // SAFETY: the header asks for a group, and a call or NULL.
    unsafe { with(group, |group| Ok(group.barrier(&options(call)?)?)) }
}
