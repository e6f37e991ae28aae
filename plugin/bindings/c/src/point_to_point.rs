//! Point-to-point messages between two ranks. They count in bytes.

use std::ffi::c_void;

use crate::group::{Call, Group, options, with};
use crate::pointers;
use crate::status::Status;

/// Sends a message of up to 1 GiB to rank `to`. Returns when the bytes may be changed; for a large message that is when the other rank
/// has received it. Messages of a tag arrive in order.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_send(
    group: *const Group,
    data: *const c_void,
    bytes: usize,
    to: usize,
    call: *const Call,
) -> Status {
    // SAFETY: the header requires a group, a buffer, and a call or NULL.
    unsafe {
        with(group, |group| {
            Ok(group.send(to, pointers::bytes("data", data, bytes)?, &options(call)?)?)
        })
    }
}

/// Receives a message of up to `capacity` bytes from rank `from`. Its length is written to `received`, unless that is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_recv(
    group: *const Group,
    data: *mut c_void,
    capacity: usize,
    from: usize,
    received: *mut usize,
    call: *const Call,
) -> Status {
    // SAFETY: the header requires a group, a buffer, a pointer to write to or NULL, and a call or NULL.
    unsafe {
        with(group, |group| {
            let data = pointers::bytes_mut("data", data, capacity)?;
            let bytes = group.recv(from, data, &options(call)?)?;
            if received.is_null() { Ok(()) } else { pointers::write_result(received, bytes) }
        })
    }
}

/// Receives a message from the first rank that sends one. That rank and the message's length are written to `from` and `received`,
/// unless they are NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_recv_any(
    group: *const Group,
    data: *mut c_void,
    capacity: usize,
    from: *mut usize,
    received: *mut usize,
    call: *const Call,
) -> Status {
    // SAFETY: the header requires a group, a buffer, pointers to write to or NULL, and a call or NULL.
    unsafe {
        with(group, |group| {
            let data = pointers::bytes_mut("data", data, capacity)?;
            let (rank, bytes) = group.recv_any(data, &options(call)?)?;
            for (place, value) in [(from, rank), (received, bytes)] {
                if !place.is_null() {
                    pointers::write_result(place, value)?;
                }
            }
            Ok(())
        })
    }
}
