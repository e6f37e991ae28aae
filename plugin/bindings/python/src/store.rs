//! Stores.

use std::sync::{Arc, Mutex, PoisonError};

use evenkeel_collectives as collectives;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error::exception;

/// A store in this process's memory.
#[pyclass(frozen, module = "evenkeel")]
pub(crate) struct MemoryStore(pub(crate) Arc<dyn collectives::Store>);

#[pymethods]
impl MemoryStore {
    #[new]
    fn new() -> Self {
        Self(Arc::new(collectives::MemoryStore::new()))
    }
}

/// Serves a store.
#[pyclass(frozen, module = "evenkeel")]
pub(crate) struct StoreServer {
    address: String,
    /// `None` once it is closed.
    server: Mutex<Option<collectives::TcpStoreServer>>,
}

#[pymethods]
impl StoreServer {
    #[new]
    #[pyo3(signature = (address="127.0.0.1:0"))]
    fn new(py: Python<'_>, address: &str) -> PyResult<Self> {
        let server = py
            .detach(|| collectives::TcpStoreServer::bind(address))
            .map_err(|error| exception(py, &error))?;
        let address = format!("tcp://{}", server.address());
        Ok(Self { address, server: Mutex::new(Some(server)) })
    }

    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    fn close(&self, py: Python<'_>) {
        let server = self.server.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(server));
    }

    fn __enter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.close(py);
    }
}

/// The `store` argument of `init`: an address, or a store of this process.
pub(crate) enum StoreArgument {
    Address(String),
    Memory(Arc<dyn collectives::Store>),
}

impl StoreArgument {
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(store) = object.cast::<MemoryStore>() {
            return Ok(Self::Memory(Arc::clone(&store.get().0)));
        }
        object.extract().map(Self::Address).map_err(|_| {
            PyValueError::new_err(
                "store must be an address such as 'tcp://host:port', 'file:/folder' or 'redis://host:port', or a MemoryStore",
            )
        })
    }
}
