//! Requests of operations that were started with `wait=False`. What each method does is in `evenkeel/_evenkeel.pyi`.

use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use evenkeel_collectives::{self as collectives, Error, timeout_from_seconds};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::PySlice;

use crate::error::exception;

/// How often a wait looks for signals, such as Ctrl-C.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// What an operation gives.
#[derive(Clone)]
pub(crate) enum Outcome {
    Nothing,
    /// The elements of this rank's part.
    Part(Range<usize>),
    /// The sender, and the number of elements.
    Received(usize, usize),
}

impl Outcome {
    pub(crate) fn into_object(self, py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
        match self {
            Self::Nothing => Ok(py.None().into_bound(py)),
            // Without a step: a slice with step 1 would not be equal to `slice(start, stop)`.
            Self::Part(part) => py.get_type::<PySlice>().call1((part.start, part.end)),
            Self::Received(from, count) => (from, count).into_bound_py_any(py),
        }
    }
}

/// An operation that was started.
#[pyclass(frozen, module = "evenkeel")]
pub(crate) struct Request {
    request: collectives::Request<Outcome>,
    group: Weak<collectives::Group>,
}

impl Request {
    pub(crate) fn new(
        group: &Arc<collectives::Group>,
        request: collectives::Request<Outcome>,
    ) -> Self {
        Self { request, group: Arc::downgrade(group) }
    }

    fn outcome(&self, py: Python<'_>, limit: Option<Duration>) -> PyResult<Outcome> {
        let deadline = limit.map(|limit| Instant::now() + limit);
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let step = left.map_or(SIGNAL_INTERVAL, |left| left.min(SIGNAL_INTERVAL));
            let outcome = py.detach(|| self.request.wait(Some(step)));
            if self.request.test() || left.is_some_and(|left| left <= step) {
                return outcome.map_err(|error| exception(py, &error));
            }
            py.check_signals()?;
        }
    }
}

#[pymethods]
impl Request {
    #[pyo3(signature = (timeout=None))]
    fn wait<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Bound<'py, PyAny>> {
        let limit: Result<_, Error> = timeout.map(timeout_from_seconds).transpose();
        let limit = limit.map_err(|error| exception(py, &error))?;
        self.outcome(py, limit)?.into_object(py)
    }

    fn test(&self) -> bool {
        self.request.test()
    }

    fn cancel(&self, py: Python<'_>) -> bool {
        let group = self.group.upgrade().filter(|_| !self.request.test());
        let Some(group) = group else { return false };
        py.detach(|| {
            group.abort("a request was cancelled");
            drop(group);
        });
        true
    }

    fn add_done_callback(this: Py<Self>, py: Python<'_>, callback: Py<PyAny>) {
        let request = this.get().request.clone();
        py.detach(|| {
            request.on_done(move || {
                // While the interpreter finalizes, nobody waits for it any more.
                let _ = Python::try_attach(|py| {
                    if let Err(error) = callback.call1(py, (&this,)) {
                        error.write_unraisable(py, Some(callback.bind(py)));
                    }
                });
            });
        });
    }

    fn __repr__(&self) -> &'static str {
        if self.request.test() {
            "<evenkeel.Request: done>"
        } else {
            "<evenkeel.Request: in progress>"
        }
    }
}
