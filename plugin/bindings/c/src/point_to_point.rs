//! Messages between two ranks. They count in bytes.

use std::ffi::c_void;

use crate::group::{Call, Group, options, with};
use crate::pointers;
use crate::status::Status;

/// Sends a message of up to 1 GiB to rank `to`. Returns when the bytes may be changed: of a large message when the other has it.
/// Messages of a tag arrive in their order.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_send(
    group: *const Group,
    data: *const c_void,
    bytes: usize,
    to: usize,
    call: *const Call,
) -> Status {
    // SAFETY: the header asks for a group, a buffer, and a call or NULL.
    unsafe {
        with(group, |group| {
            Ok(group.send(to, pointers::bytes("data", data, bytes)?, &options(call)?)?)
        })
    }
}

/// Receives a message of up to `room` bytes from rank `from`; `received`, unless it is NULL, gets its length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_recv(
    group: *const Group,
    data: *mut c_void,
    room: usize,
    from: usize,
    received: *mut usize,
    call: *const Call,
) -> Status {
    // SAFETY: the header asks for a group, a buffer, a place to write or NULL, and a call or NULL.
    unsafe {
        with(group, |group| {
            let data = pointers::bytes_mut("data", data, room)?;
            let bytes = group.recv(from, data, &options(call)?)?;
            if received.is_null() { Ok(()) } else { pointers::write(received, bytes) }
        })
    }
}

/// Receives a message from whichever rank sends one first; `from` and `received`, unless they are NULL, get that rank and the
/// message's length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_recv_any(
    group: *const Group,
    data: *mut c_void,
    room: usize,
    from: *mut usize,
    received: *mut usize,
    call: *const Call,
) -> Status {
    // SAFETY: the header asks for a group, a buffer, places to write or NULL, and a call or NULL.
    unsafe {
        with(group, |group| {
            let data = pointers::bytes_mut("data", data, room)?;
            let (rank, bytes) = group.recv_any(data, &options(call)?)?;
            for (place, value) in [(from, rank), (received, bytes)] {
                if !place.is_null() {
                    pointers::write(place, value)?;
                }
            }
            Ok(())
        })
    }
}
