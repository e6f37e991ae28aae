//! Checks the pointers that callers pass, and converts them to references that live as long as a call.

use std::ffi::{CStr, c_char, c_void};
use std::slice;

use crate::error::Error;

/// A reference to an object of this library.
///
/// # Safety
/// It is null, or was returned by [`return_object`] and is not freed while the reference lives.
pub(crate) unsafe fn deref_object<'a, T>(what: &str, pointer: *const T) -> Result<&'a T, Error> {
    // SAFETY: it is an object, or null.
    unsafe { pointer.as_ref() }.ok_or_else(|| Error::argument(format!("the {what} is NULL")))
}

/// A string.
///
/// # Safety
/// It is null, or ends in a zero byte and is not changed while the reference lives.
pub(crate) unsafe fn string<'a>(what: &str, pointer: *const c_char) -> Result<&'a str, Error> {
    // SAFETY: it is a string, or null.
    unsafe { string_or_none(what, pointer) }?
        .ok_or_else(|| Error::argument(format!("the {what} is NULL")))
}

/// A string, unless it is null.
///
/// # Safety
/// As [`string`].
pub(crate) unsafe fn string_or_none<'a>(
    what: &str,
    pointer: *const c_char,
) -> Result<Option<&'a str>, Error> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: it is a string.
    let string = unsafe { CStr::from_ptr(pointer) };
    string.to_str().map(Some).map_err(|_| Error::argument(format!("the {what} is not UTF-8")))
}

/// `count` elements.
///
/// # Safety
/// They are valid, unless `count` is 0, and nothing changes them while the reference lives.
pub(crate) unsafe fn slice<'a, T>(
    what: &str,
    pointer: *const T,
    count: usize,
) -> Result<&'a [T], Error> {
    check(what, pointer, count)?;
    if count == 0 {
        return Ok(&[]);
    }
    // SAFETY: the caller guarantees it; it is not null, and its length is possible.
    Ok(unsafe { slice::from_raw_parts(pointer, count) })
}

/// `count` elements to write.
///
/// # Safety
/// They are valid, unless `count` is 0, and nothing else reads or changes them while the reference lives.
pub(crate) unsafe fn slice_mut<'a, T>(
    what: &str,
    pointer: *mut T,
    count: usize,
) -> Result<&'a mut [T], Error> {
    check(what, pointer, count)?;
    if count == 0 {
        return Ok(&mut []);
    }
    // SAFETY: the caller guarantees it; it is not null, and its length is possible.
    Ok(unsafe { slice::from_raw_parts_mut(pointer, count) })
}

/// As [`slice`], of bytes.
///
/// # Safety
/// As [`slice`].
pub(crate) unsafe fn bytes<'a>(
    what: &str,
    pointer: *const c_void,
    count: usize,
) -> Result<&'a [u8], Error> {
    // SAFETY: the caller guarantees it.
    unsafe { slice(what, pointer.cast(), count) }
}

/// As [`slice_mut`], of bytes.
///
/// # Safety
/// As [`slice_mut`].
pub(crate) unsafe fn bytes_mut<'a>(
    what: &str,
    pointer: *mut c_void,
    count: usize,
) -> Result<&'a mut [u8], Error> {
    // SAFETY: the caller guarantees it.
    unsafe { slice_mut(what, pointer.cast(), count) }
}

/// Returns an object to the caller; [`free_object`] frees it.
///
/// # Safety
/// `out` is null or can be written.
pub(crate) unsafe fn return_object<T>(out: *mut *mut T, object: T) -> Result<(), Error> {
    check_result(out)?;
    // SAFETY: the caller guarantees it, and it is not null.
    unsafe { out.write(Box::into_raw(Box::new(object))) };
    Ok(())
}

/// Checks that a result can be written.
pub(crate) fn check_result<T>(out: *mut T) -> Result<(), Error> {
    if out.is_null() { Err(Error::argument("the pointer for the result is NULL")) } else { Ok(()) }
}

/// Writes a result.
///
/// # Safety
/// `out` is null or can be written.
pub(crate) unsafe fn write_result<T>(out: *mut T, value: T) -> Result<(), Error> {
    check_result(out)?;
    // SAFETY: the caller guarantees it, and it is not null.
    unsafe { out.write(value) };
    Ok(())
}

/// Frees an object.
///
/// # Safety
/// It is null, or was returned by [`return_object`] and is not used any more.
pub(crate) unsafe fn free_object<T>(object: *mut T) {
    if !object.is_null() {
        // SAFETY: it is from a box, and this is the only call that frees it.
        drop(unsafe { Box::from_raw(object) });
    }
}

fn check<T>(what: &str, pointer: *const T, count: usize) -> Result<(), Error> {
    if count == 0 {
        return Ok(());
    }
    if pointer.is_null() {
        return Err(Error::argument(format!("the {what} is NULL, not {count} elements")));
    }
    if !pointer.is_aligned() {
        return Err(Error::argument(format!("the {what} is not aligned")));
    }
    match count.checked_mul(size_of::<T>()) {
        Some(bytes) if isize::try_from(bytes).is_ok() => Ok(()),
        _ => Err(Error::argument(format!(
            "the {what} would have {count} elements: more than memory"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr;

    #[test]
    fn impossible_pointers_are_errors() {
        let number = [7u64];
        let data = number.as_ptr();
        // SAFETY: valid pointers are read; the others are refused before they are read.
        unsafe {
            assert!(slice("data", data, 1).is_ok_and(|data| data == [7]));
            assert!(slice::<u64>("data", ptr::null(), 0).is_ok_and(<[u64]>::is_empty));
            assert!(slice::<u64>("data", ptr::null(), 1).is_err());
            assert!(slice("data", data.byte_add(1), 1).is_err());
            assert!(slice("data", data, usize::MAX / 8).is_err());
            assert!(slice("data", data, usize::MAX).is_err());
            assert!(string("name", ptr::null()).is_err());
            assert!(string("name", c"\xff".as_ptr()).is_err());
            assert!(string("name", c"x".as_ptr()).is_ok_and(|string| string == "x"));
            assert!(deref_object::<u64>("group", ptr::null()).is_err());
            assert!(write_result(ptr::null_mut(), 1).is_err());
        }
    }
}
