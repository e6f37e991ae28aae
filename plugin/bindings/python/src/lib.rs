//! The Python module `evenkeel._evenkeel`: [`evenkeel_collectives`] for numpy arrays and tensors. Its manual is
//! `evenkeel/_evenkeel.pyi`.
//!
//! [`memory`] has all unsafe code: access to the memory of Python objects while an operation runs.

mod error;
mod flight_recorder;
mod group;
mod memory;
mod request;
mod store;

use pyo3::prelude::*;

#[pymodule(gil_used = false)]
#[pyo3(name = "_evenkeel")]
fn evenkeel_python(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<group::Group>()?;
    module.add_class::<memory::RawMemory>()?;
    module.add_class::<request::Request>()?;
    module.add_class::<store::MemoryStore>()?;
    module.add_class::<store::StoreServer>()?;
    module.add_function(wrap_pyfunction!(flight_recorder::flight_record, module)?)?;
    module.add_function(wrap_pyfunction!(flight_recorder::on_failure, module)?)?;
    module.add_function(wrap_pyfunction!(flight_recorder::on_request, module)?)?;
    module.add_function(wrap_pyfunction!(flight_recorder::rank_record, module)?)?;
    module.add_function(wrap_pyfunction!(group::init, module)?)?;
    module.add_function(wrap_pyfunction!(group::join_as_newcomer, module)?)
}
