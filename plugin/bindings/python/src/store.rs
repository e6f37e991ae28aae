//! Stores.

use std::sync::{Arc, Mutex, PoisonError};

use evenkeel_collectives::{self as collectives, Error};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

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

/// The `store` argument of `init`: an address, or a store.
pub(crate) enum StoreArgument {
    Address(String),
    Store(Arc<dyn collectives::Store>),
}

impl StoreArgument {
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(store) = object.cast::<MemoryStore>() {
            return Ok(Self::Store(Arc::clone(&store.get().0)));
        }
        if let Ok(address) = object.extract() {
            return Ok(Self::Address(address));
        }
        for method in ["set", "get", "check", "add", "compare_set", "delete_key"] {
            if !object.hasattr(method)? {
                return Err(PyValueError::new_err(
                    "store must be an address such as 'tcp://host:port', 'file:/folder' or 'redis://host:port', a MemoryStore, or \
                     a torch.distributed.Store",
                ));
            }
        }
        Ok(Self::Store(Arc::new(TorchStore(object.clone().unbind()))))
    }
}

/// An object with the methods of `torch.distributed.Store`.
struct TorchStore(Py<PyAny>);

impl TorchStore {
    fn call<T>(&self, body: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>) -> Result<T, Error> {
        Python::attach(|py| body(self.0.bind(py)))
            .map_err(|error| Error::of_store(format!("the store of torch.distributed: {error}")))
    }
}

impl collectives::Store for TorchStore {
    fn set(&self, name: &str, value: &[u8]) -> Result<(), Error> {
        self.call(|store| {
            let value = PyBytes::new(store.py(), value);
            store.call_method1("set", (name, value)).map(drop)
        })
    }

    fn get(&self, name: &str) -> Result<Option<Vec<u8>>, Error> {
        self.call(|store| {
            // Its `get` waits for the value.
            if !store.call_method1("check", (vec![name],))?.is_truthy()? {
                return Ok(None);
            }
            store.call_method1("get", (name,))?.extract().map(Some)
        })
    }

    fn add(&self, name: &str, amount: i64) -> Result<i64, Error> {
        self.call(|store| store.call_method1("add", (name, amount))?.extract())
    }

    fn set_once(&self, name: &str, value: &[u8]) -> Result<Vec<u8>, Error> {
        self.call(|store| {
            let (nothing, value) = (PyBytes::new(store.py(), b""), PyBytes::new(store.py(), value));
            store.call_method1("compare_set", (name, nothing, value))?.extract()
        })
    }

    fn delete(&self, name: &str) -> Result<(), Error> {
        self.call(|store| store.call_method1("delete_key", (name,)).map(drop))
    }
}
