//! The flight recorder. `evenkeel/flight_recorder.py` writes what it has kept in the format of PyTorch's.

use std::collections::HashMap;

use evenkeel_collectives::{self as collectives, FlightRecord};
use pyo3::prelude::*;

/// The last calls of this process, as JSON.
#[pyfunction]
pub(crate) fn flight_record(py: Python<'_>) -> String {
    py.detach(|| FlightRecord::read().to_json())
}

/// This process's rank in the job, and its record as JSON; `None` without a group. `describe` returns what a group of a name is
/// called, or `undefined`.
#[pyfunction]
pub(crate) fn rank_record(
    py: Python<'_>,
    describe: &Bound<'_, PyAny>,
) -> PyResult<Option<(usize, String)>> {
    let record = py.detach(FlightRecord::read);
    let Some(rank) = record.rank() else { return Ok(None) };
    let mut described = HashMap::new();
    for name in record.groups.iter().filter_map(|group| group.name.as_deref()) {
        let text: String = describe.call1((name,))?.extract()?;
        if text != "undefined" {
            described.insert(name.to_owned(), text);
        }
    }
    let own = record.rank_record(rank, |name| described.get(name).cloned());
    Ok(Some((rank, own.to_json())))
}

/// Calls `callback` when the record is to be written, with whether somebody asks for it.
#[pyfunction]
pub(crate) fn on_request(callback: Py<PyAny>) {
    collectives::on_request(move |is_asked| {
        let _ = Python::try_attach(|py| {
            if let Err(error) = callback.call1(py, (is_asked,)) {
                error.write_unraisable(py, Some(callback.bind(py)));
            }
        });
    });
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
