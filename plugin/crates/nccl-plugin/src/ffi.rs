//! Helpers for the C side of the tables: pointers, sizes and device numbers from NCCL.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use crate::error::PluginError;

/// A reference to the object behind a pointer that NCCL passes back, such as a comm or a request.
///
/// # Safety
/// `pointer` must be null or valid for reads as a `T` for as long as the result is used.
pub(crate) unsafe fn handle_ref<'a, T>(
    pointer: *const c_void,
    what: &str,
) -> Result<&'a T, PluginError> {
    // SAFETY: the caller guarantees it.
    unsafe { pointer.cast::<T>().as_ref() }
        .ok_or_else(|| PluginError::invalid_argument(format!("{what} is null")))
}

/// A mutable reference to an out-parameter, or to memory that NCCL lends for the call.
///
/// # Safety
/// `pointer` must be null or valid for reads and writes as a `T`, for this thread only, for as long
/// as the result is used.
pub(crate) unsafe fn out_param<'a, T>(
    pointer: *mut T,
    what: &str,
) -> Result<&'a mut T, PluginError> {
    // SAFETY: the caller guarantees it.
    unsafe { pointer.as_mut() }
        .ok_or_else(|| PluginError::invalid_argument(format!("{what} is null")))
}

/// Takes back an object that was handed out by `Arc::into_raw`.
///
/// # Safety
/// `pointer` must be null or such an object, not taken back before.
pub(crate) unsafe fn take_arc<T>(pointer: *mut c_void, what: &str) -> Result<Arc<T>, PluginError> {
    if pointer.is_null() {
        return Err(PluginError::invalid_argument(format!("{what} is null")));
    }
    // SAFETY: the caller guarantees it.
    Ok(unsafe { Arc::from_raw(pointer.cast_const().cast()) })
}

/// Takes back an object that was handed out by `Box::into_raw`.
///
/// # Safety
/// `pointer` must be null or such an object, not taken back before.
pub(crate) unsafe fn take_box<T>(pointer: *mut c_void, what: &str) -> Result<Box<T>, PluginError> {
    if pointer.is_null() {
        return Err(PluginError::invalid_argument(format!("{what} is null")));
    }
    // SAFETY: the caller guarantees it.
    Ok(unsafe { Box::from_raw(pointer.cast::<T>()) })
}

/// The index of a device, which NCCL passes as a C integer.
pub(crate) fn device_index(device: c_int) -> Result<usize, PluginError> {
    usize::try_from(device)
        .map_err(|_| PluginError::invalid_argument(format!("device {device} does not exist")))
}

/// The type of a size, which grew from `int` to `size_t` with the versions of the tables.
pub(crate) trait Size: Copy {
    fn bytes(self) -> Result<usize, PluginError>;
}

impl Size for usize {
    fn bytes(self) -> Result<usize, PluginError> {
        Ok(self)
    }
}

impl Size for c_int {
    fn bytes(self) -> Result<usize, PluginError> {
        usize::try_from(self)
            .map_err(|_| PluginError::invalid_argument(format!("size {self} is negative")))
    }
}
