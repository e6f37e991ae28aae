//! Checks the pointers that callers pass, and converts them to slices that live as long as a call.

use std::ffi::c_void;
use std::ops::Range;
use std::{ptr, slice};

use crate::error::{Error, Result};

/// Whether it is `MPI_IN_PLACE`.
pub(crate) fn is_in_place(buffer: *const c_void) -> bool {
    buffer.addr() == usize::MAX
}

/// A buffer that is sent.
///
/// # Safety
/// It is null, `MPI_IN_PLACE` or of this length, and nothing changes it while the slice lives.
pub(crate) unsafe fn sent<'a>(buffer: *const c_void, length: usize) -> Result<&'a [u8]> {
    check("send buffer", buffer, length)?;
    if length == 0 {
        return Ok(&[]);
    }
    // SAFETY: the caller guarantees it, and it was checked.
    Ok(unsafe { slice::from_raw_parts(buffer.cast(), length) })
}

/// A buffer that is received into.
///
/// # Safety
/// It is null, `MPI_IN_PLACE` or of this length, and nothing else uses it while the slice lives.
pub(crate) unsafe fn received<'a>(buffer: *mut c_void, length: usize) -> Result<&'a mut [u8]> {
    check("receive buffer", buffer, length)?;
    if length == 0 {
        return Ok(&mut []);
    }
    // SAFETY: the caller guarantees it, and it was checked.
    Ok(unsafe { slice::from_raw_parts_mut(buffer.cast(), length) })
}

/// A buffer that is received into, with what this rank sends at its own place: copied there unless it is `MPI_IN_PLACE`.
///
/// # Safety
/// `receive` is as for [`received`]. `send` is null, `MPI_IN_PLACE` or as long as the place.
pub(crate) unsafe fn received_with_own<'a>(
    send: *const c_void,
    receive: *mut c_void,
    length: usize,
    own: Range<usize>,
) -> Result<&'a mut [u8]> {
    check("receive buffer", receive, length)?;
    if !is_in_place(send) {
        check("send buffer", send, own.len())?;
        if !own.is_empty() {
            // SAFETY: both were checked, and the place is a part of the buffer. They may overlap here: no slice exists yet.
            unsafe {
                let place = receive.cast::<u8>().add(own.start);
                ptr::copy(send.cast::<u8>(), place, own.len());
            }
        }
    }
    // SAFETY: the caller guarantees it.
    unsafe { received(receive, length) }
}

/// Writes a result.
///
/// # Safety
/// `place` is null or can be written.
pub(crate) unsafe fn write<T>(place: *mut T, value: T) -> Result<()> {
    if place.is_null() {
        return Err(Error("the pointer for the result is NULL".to_owned()));
    }
    // SAFETY: the caller guarantees it, and it is not null.
    unsafe { place.write(value) };
    Ok(())
}

fn check(what: &str, buffer: *const c_void, length: usize) -> Result<()> {
    if length == 0 {
        return Ok(());
    }
    if buffer.is_null() {
        return Err(Error(format!("the {what} is NULL, not {length} bytes")));
    }
    if is_in_place(buffer) {
        return Err(Error(format!("the {what} cannot be MPI_IN_PLACE here")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const IN_PLACE: *mut c_void = ptr::without_provenance_mut(usize::MAX);

    #[test]
    fn impossible_mpi_buffers_are_errors() {
        let mut data = [7u8, 8];
        let pointer: *mut c_void = data.as_mut_ptr().cast();
        // SAFETY: valid buffers are used; the others are refused before they are.
        unsafe {
            assert!(sent(ptr::null(), 0).is_ok_and(<[u8]>::is_empty));
            assert!(sent(ptr::null(), 1).is_err() && sent(IN_PLACE, 1).is_err());
            assert!(received(ptr::null_mut(), 1).is_err() && received(IN_PLACE, 1).is_err());
            assert!(received_with_own(ptr::null(), pointer, 2, 0..1).is_err());
            assert!(received_with_own(pointer, IN_PLACE, 2, 0..1).is_err());
            assert!(write(ptr::null_mut(), 1).is_err());
            assert!(sent(pointer, 2).is_ok_and(|sent| sent == [7, 8]));
        }
    }

    #[test]
    fn own_part_is_copied_unless_it_is_in_place() {
        let mut data = [1u8, 2, 3];
        let pointer: *mut c_void = data.as_mut_ptr().cast();
        let own = [9u8];
        // SAFETY: the buffers are as long as the calls say.
        unsafe {
            let all = received_with_own(IN_PLACE, pointer, 3, 1..2).unwrap();
            assert_eq!(all, [1, 2, 3]);
            let all = received_with_own(own.as_ptr().cast(), pointer, 3, 1..2).unwrap();
            assert_eq!(all, [1, 9, 3]);
        }
    }
}
