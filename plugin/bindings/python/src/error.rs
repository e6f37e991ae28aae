//! Converts errors to the exceptions of `evenkeel/errors.py`.

use evenkeel_collectives::{Error, ErrorKind};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// The exception for an error.
pub(crate) fn exception(py: Python<'_>, error: &Error) -> PyErr {
    try_exception(py, error).unwrap_or_else(|python_error| python_error)
}

fn try_exception(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let class = match error.kind() {
        ErrorKind::Argument => return Ok(PyValueError::new_err(error.to_string())),
        ErrorKind::Timeout => "TimeoutError",
        ErrorKind::Lost => "LostError",
        ErrorKind::Aborted => "AbortedError",
        ErrorKind::System => "Error",
        ErrorKind::Store => "StoreError",
        ErrorKind::Mismatch => "MismatchError",
    };
    let exception = py.import("evenkeel.errors")?.getattr(class)?.call1((error.to_string(),))?;
    exception.setattr("ranks", PyTuple::new(py, error.ranks())?)?;
    exception.setattr("group_usable", error.is_group_usable())?;
    Ok(PyErr::from_value(exception))
}
