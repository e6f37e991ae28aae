//! The flight recorder. `evenkeel/flight_recorder.py` writes what it has kept in the format of PyTorch's.

use evenkeel_collectives::{self as collectives, FlightRecord};
use pyo3::prelude::*;

/// The last calls of this process, as JSON.
#[pyfunction]
pub(crate) fn flight_record(py: Python<'_>) -> String {
    py.detach(|| FlightRecord::read().to_json())
}

/// Calls `callback` with the error's text after an operation has failed, on the thread that ran it.
#[pyfunction]
pub(crate) fn on_failure(callback: Py<PyAny>) {
    collectives::on_failure(move |error| {
        let text = error.to_string();
        // While the interpreter finalizes, nobody can be told any more.
        let _ = Python::try_attach(|py| {
            if let Err(error) = callback.call1(py, (text,)) {
                error.write_unraisable(py, Some(callback.bind(py)));
            }
        });
    });
}
