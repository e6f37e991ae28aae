//! Collective operations that move data without combining it. They count in bytes.

use std::ffi::c_void;

use evenkeel_collectives as collectives;

use crate::call::{Call, collectives_of, operate};
use crate::group::Group;
use crate::pointers;
use crate::reductions::parts;
use crate::status::Status;

/// Sends the bytes of rank `root` to all ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_broadcast(
    group: *const Group,
    data: *mut c_void,
    bytes: usize,
    root: usize,
    call: *const Call,
) -> Status {
    // SAFETY: the header requires a group, a buffer, and a call or NULL.
    unsafe {
        operate(group, collectives_of, "broadcast", call, |_| {
            let data = pointers::bytes_mut("data", data, bytes)?;
            Ok(move |group: &collectives::Group, call: &collectives::Call| {
                group.broadcast(data, root, call)
            })
        })
    }
}

/// Each rank passes its part at its place in the buffer. Afterwards all ranks have all parts. `lengths` are the lengths of the parts
/// in bytes, one for each rank, whose sum is `bytes`; NULL: equal parts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_allgather(
    group: *const Group,
    data: *mut c_void,
    bytes: usize,
    lengths: *const usize,
    call: *const Call,
) -> Status {
    // SAFETY: the header requires a group, a buffer, a number for each rank, and a call or NULL.
    unsafe {
        operate(group, collectives_of, "allgather", call, |group| {
            let data = pointers::bytes_mut("data", data, bytes)?;
            let lengths = parts(group, lengths, bytes, "bytes")?;
            Ok(move |group: &collectives::Group, call: &collectives::Call| {
                group.allgatherv(data, &lengths, call)
            })
        })
    }
}

/// Gathers the inputs of all ranks at rank `root`, in the order of the ranks. The root passes `output` of `output_bytes`; the others
/// pass NULL and 0. `lengths` are the lengths of the inputs in bytes, one for each rank, the same on all ranks; NULL: all are as long
/// as this rank's.
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
    // SAFETY: as the header requires.
    unsafe {
        gather_or_scatter(
            group,
            input,
            output,
            (lengths, input_bytes),
            root,
            call,
            ("gather", collectives::Group::gatherv),
        )
    }
}

/// Scatters the input of rank `root`, a part for each rank. The root passes `input` of `input_bytes`; the others pass NULL and 0.
/// `lengths` are the lengths of the outputs in bytes, one for each rank, the same on all ranks; NULL: all are as long as this rank's.
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
    // SAFETY: as the header requires.
    unsafe {
        gather_or_scatter(
            group,
            input,
            output,
            (lengths, output_bytes),
            root,
            call,
            ("scatter", collectives::Group::scatterv),
        )
    }
}

/// Runs a gather or a scatter. The lengths are given, or all are equal.
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
    (name, operation): (
        &'static str,
        impl FnOnce(
            &collectives::Group,
            &[u8],
            &mut [u8],
            &[usize],
            usize,
            &collectives::Call,
        ) -> collectives::Result<()>
        + Send
        + 'static,
    ),
) -> Status {
    // SAFETY: the caller guarantees it.
    unsafe {
        operate(group, collectives_of, name, call, |group| {
            let input = pointers::bytes("input", input, input_bytes)?;
            let output = pointers::bytes_mut("output", output, output_bytes)?;
            let lengths = match lengths.is_null() {
                true => vec![equal; group.size()],
                false => pointers::slice("list of lengths", lengths, group.size())?.to_vec(),
            };
            Ok(move |group: &collectives::Group, call: &collectives::Call| {
                operation(group, input, output, &lengths, root, call)
            })
        })
    }
}

/// Sends part i of the input to rank i; part i of the output comes from rank i. `sent` and `received` are the lengths of the parts in
/// bytes, one for each rank; NULL: equal parts.
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
    // SAFETY: the header requires a group, buffers, a number for each rank, and a call or NULL.
    unsafe {
        operate(group, collectives_of, "alltoall", call, |group| {
            let input = pointers::bytes("input", input, input_bytes)?;
            let output = pointers::bytes_mut("output", output, output_bytes)?;
            let sent = parts(group, sent, input_bytes, "bytes in the input")?;
            let received = parts(group, received, output_bytes, "bytes in the output")?;
            Ok(move |group: &collectives::Group, call: &collectives::Call| {
                group.alltoallv(input, &sent, output, &received, call)
            })
        })
    }
}

/// Returns when all ranks have called it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_barrier(group: *const Group, call: *const Call) -> Status {
    // SAFETY: the header requires a group, and a call or NULL.
    unsafe { operate(group, collectives_of, "barrier", call, |_| Ok(collectives::Group::barrier)) }
}
