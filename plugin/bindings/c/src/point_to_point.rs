//! Point-to-point messages between two ranks. They count in bytes.

use std::ffi::c_void;

use evenkeel_collectives::{self as collectives, Sequence};

use crate::call::{Call, operate};
use crate::group::Group;
use crate::pointers;
use crate::status::Status;

/// Sends a message to rank `to`. Returns when the bytes may be changed; for a large message that is when the other rank
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
        operate(
            group,
            |tag| Sequence::Sends { to, tag },
            "send",
            call,
            |_| {
                let data = pointers::bytes("data", data, bytes)?;
                Ok(move |group: &collectives::Group, call: &collectives::Call| {
                    group.send(to, data, call)
                })
            },
        )
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
        operate(
            group,
            |tag| Sequence::Receives { from: Some(from), tag },
            "recv",
            call,
            |_| {
                let data = pointers::bytes_mut("data", data, capacity)?;
                let received = Place(received);
                Ok(move |group: &collectives::Group, call: &collectives::Call| {
                    received.set(group.recv(from, data, call)?);
                    Ok(())
                })
            },
        )
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
        operate(
            group,
            |tag| Sequence::Receives { from: None, tag },
            "recv",
            call,
            |_| {
                let data = pointers::bytes_mut("data", data, capacity)?;
                let (from, received) = (Place(from), Place(received));
                Ok(move |group: &collectives::Group, call: &collectives::Call| {
                    let (rank, bytes) = group.recv_any(data, call)?;
                    from.set(rank);
                    received.set(bytes);
                    Ok(())
                })
            },
        )
    }
}

/// The place for a result, or null.
struct Place(*mut usize);

// SAFETY: the header states that nothing else uses the place until the operation is done.
unsafe impl Send for Place {}

impl Place {
    fn set(&self, value: usize) {
        if !self.0.is_null() {
            // SAFETY: the header requires a pointer to write to, or NULL.
            unsafe { self.0.write(value) };
        }
    }
}
