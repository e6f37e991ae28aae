//! What callers point to, as references that live as long as a call.

use std::ffi::{CStr, c_char, c_void};
use std::slice;

use crate::error::Error;

/// An object of this library.
///
/// # Safety
/// It is null, or what [`give`] gave and nobody has taken back; and it stays so while the reference lives.
pub(crate) unsafe fn object<'a, T>(what: &str, pointer: *const T) -> Result<&'a T, Error> {
    // SAFETY: it is an object, or null.
    unsafe { pointer.as_ref() }.ok_or_else(|| Error::argument(format!("the {what} is NULL")))
}

/// A text.
///
/// # Safety
/// It is null, or ends in a zero byte and is not changed while the reference lives.
pub(crate) unsafe fn text<'a>(what: &str, pointer: *const c_char) -> Result<&'a str, Error> {
    // SAFETY: it is a text, or null.
    unsafe { text_or_none(what, pointer) }?
        .ok_or_else(|| Error::argument(format!("the {what} is NULL")))
}

/// A text, unless it is null.
///
/// # Safety
/// As [`text`].
pub(crate) unsafe fn text_or_none<'a>(
    what: &str,
    pointer: *const c_char,
) -> Result<Option<&'a str>, Error> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: it is a text.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map(Some).map_err(|_| Error::argument(format!("the {what} is not UTF-8")))
}

/// `count` elements.
///
/// # Safety
/// They are there, unless there are none, and nobody changes them while the reference lives.
pub(crate) unsafe fn slice<'a, T>(
    what: &str,
    pointer: *const T,
    count: usize,
) -> Result<&'a [T], Error> {
    check(what, pointer, count)?;
    if count == 0 {
        return Ok(&[]);
    }
    // SAFETY: the caller sees to it; it is not null, and no longer than memory can be.
    Ok(unsafe { slice::from_raw_parts(pointer, count) })
}

/// `count` elements to write.
///
/// # Safety
/// They are there, unless there are none, and nobody else reads or changes them while the reference lives.
pub(crate) unsafe fn slice_mut<'a, T>(
    what: &str,
    pointer: *mut T,
    count: usize,
) -> Result<&'a mut [T], Error> {
    check(what, pointer, count)?;
    if count == 0 {
        return Ok(&mut []);
    }
    // SAFETY: the caller sees to it; it is not null, and no longer than memory can be.
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
    // SAFETY: the caller sees to it.
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
    // SAFETY: the caller sees to it.
    unsafe { slice_mut(what, pointer.cast(), count) }
}

/// Hands over an object; [`take`] takes it back.
///
/// # Safety
/// `out` is null or can be written.
pub(crate) unsafe fn give<T>(out: *mut *mut T, object: T) -> Result<(), Error> {
    let object = Box::new(object);
    if out.is_null() {
        return Err(nowhere());
    }
    // SAFETY: the caller sees to it.
    unsafe { out.write(Box::into_raw(object)) };
    Ok(())
}

/// Writes a result.
///
/// # Safety
/// `out` is null or can be written.
pub(crate) unsafe fn write<T>(out: *mut T, value: T) -> Result<(), Error> {
    if out.is_null() {
        return Err(nowhere());
    }
    // SAFETY: the caller sees to it.
    unsafe { out.write(value) };
    Ok(())
}

/// Frees an object.
///
/// # Safety
/// It is null, or what [`give`] gave and nobody uses any more.
pub(crate) unsafe fn take<T>(object: *mut T) {
    if !object.is_null() {
        // SAFETY: it is of a box, and nobody else takes it back.
        drop(unsafe { Box::from_raw(object) });
    }
}

fn nowhere() -> Error {
    Error::argument("the place for the result is NULL")
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
    fn what_cannot_be_is_an_error() {
        let number = [7u64];
        let data = number.as_ptr();
        // SAFETY: what is read is there; the rest is refused before it is read.
        unsafe {
            assert!(slice("data", data, 1).is_ok_and(|data| data == [7]));
            assert!(slice::<u64>("data", ptr::null(), 0).is_ok_and(<[u64]>::is_empty));
            assert!(slice::<u64>("data", ptr::null(), 1).is_err());
            assert!(slice("data", data.byte_add(1), 1).is_err());
            assert!(slice("data", data, usize::MAX / 8).is_err());
            assert!(slice("data", data, usize::MAX).is_err());
            assert!(text("name", ptr::null()).is_err());
            assert!(text("name", c"\xff".as_ptr()).is_err());
            assert!(text("name", c"x".as_ptr()).is_ok_and(|text| text == "x"));
            assert!(object::<u64>("group", ptr::null()).is_err());
            assert!(write(ptr::null_mut(), 1).is_err());
        }
    }
}
