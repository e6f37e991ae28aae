//! Groups. What each method does is in `evenkeel/_evenkeel.pyi`.

use std::sync::{Arc, Mutex, PoisonError};

use evenkeel_collectives::{
    self as collectives, Call, Error, Launch, Op, PrefixStore, Reduction, TransportKind,
    timeout_from_seconds,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PySlice;

use crate::error::exception;
use crate::memory::Memory;
use crate::store::StoreArgument;

/// Joins a group.
#[pyfunction]
#[pyo3(signature = (store=None, rank=None, size=None, *, name="default", transport="tcp", timeout=30.0))]
pub(crate) fn init(
    py: Python<'_>,
    store: Option<&Bound<'_, PyAny>>,
    rank: Option<usize>,
    size: Option<usize>,
    name: &str,
    transport: &str,
    timeout: f64,
) -> PyResult<Group> {
    if rank.is_some() != size.is_some() {
        return Err(PyValueError::new_err("rank and size are given together, or neither"));
    }
    let store = store.map(StoreArgument::of).transpose()?;
    let timeout = timeout_from_seconds(timeout).map_err(|error| exception(py, &error))?;
    let joined = py.detach(|| {
        let transport_kind = TransportKind::from_name(transport)?;
        let mut launch = Launch::from_lookup(|variable| match variable {
            "RANK" if rank.is_some() => rank.map(|rank| rank.to_string()),
            "WORLD_SIZE" if size.is_some() => size.map(|size| size.to_string()),
            other => std::env::var(other).ok(),
        })?;
        match store {
            Some(StoreArgument::Memory(store)) => {
                let store = PrefixStore::new(store, name);
                return collectives::Group::join(
                    &store,
                    launch.rank,
                    launch.size,
                    &transport_kind,
                    timeout,
                );
            }
            Some(StoreArgument::Address(address)) => launch.store = Some(address),
            None => {}
        }
        launch.join(name, &transport_kind, timeout)
    });
    joined.map(Group::new).map_err(|error| exception(py, &error))
}

/// A rank's membership in a group.
#[pyclass(frozen, module = "evenkeel")]
pub(crate) struct Group {
    rank: usize,
    size: usize,
    /// `None` once the group is closed.
    group: Mutex<Option<Arc<collectives::Group>>>,
}

#[pymethods]
impl Group {
    #[getter]
    fn rank(&self) -> usize {
        self.rank
    }

    #[getter]
    fn size(&self) -> usize {
        self.size
    }

    #[getter]
    fn timeout(&self) -> PyResult<f64> {
        Ok(self.open()?.timeout().as_secs_f64())
    }

    #[getter]
    fn failure(&self, py: Python<'_>) -> PyResult<Option<PyErr>> {
        Ok(self.open()?.failure().map(|error| exception(py, &error)))
    }

    fn describe(&self, rank: usize) -> PyResult<String> {
        Ok(self.open()?.describe(rank))
    }

    fn abort(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        let group = self.open()?;
        py.detach(|| group.abort(reason));
        Ok(())
    }

    fn close(&self, py: Python<'_>) {
        let group = self.group.lock().unwrap_or_else(PoisonError::into_inner).take();
        py.detach(|| drop(group));
    }

    fn __enter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        format!("<evenkeel.Group: rank {} of {}>", self.rank, self.size)
    }

    fn sub_group(&self, py: Python<'_>, ranks: Vec<usize>) -> PyResult<Option<Self>> {
        let made = self.run(py, |group| group.sub_group(&ranks))?;
        Ok(made.map(Self::new))
    }

    #[pyo3(signature = (color, *, tag=0, timeout=None))]
    fn split(
        &self,
        py: Python<'_>,
        color: Option<u32>,
        tag: u32,
        timeout: Option<f64>,
    ) -> PyResult<Option<Self>> {
        let call = call(py, tag, timeout)?;
        let made = self.run(py, |group| group.split(color, &call))?;
        Ok(made.map(Self::new))
    }

    #[pyo3(signature = (array, op="sum", *, algorithm=None, dtype=None, tag=0, timeout=None))]
    fn allreduce(
        &self,
        array: &Bound<'_, PyAny>,
        op: &str,
        algorithm: Option<&str>,
        dtype: Option<&str>,
        tag: u32,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let py = array.py();
        let call =
            Call::from_parts(tag, timeout, algorithm).map_err(|error| exception(py, &error))?;
        let mut memory = Memory::of("array", array, dtype)?;
        let reduction = reduction(&memory, op)?;
        let data = memory.bytes_mut("array")?;
        self.run(py, |group| group.allreduce(data, &reduction, &call))
    }

    #[pyo3(signature = (array, op="sum", *, root=0, dtype=None, tag=0, timeout=None))]
    fn reduce(
        &self,
        array: &Bound<'_, PyAny>,
        op: &str,
        root: usize,
        dtype: Option<&str>,
        tag: u32,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let call = call(array.py(), tag, timeout)?;
        let mut memory = Memory::of("array", array, dtype)?;
        let reduction = reduction(&memory, op)?;
        let data = memory.bytes_mut("array")?;
        self.run(array.py(), |group| group.reduce(data, root, &reduction, &call))
    }

    #[pyo3(signature = (array, op="sum", *, counts=None, dtype=None, tag=0, timeout=None))]
    fn reduce_scatter<'py>(
        &self,
        array: &Bound<'py, PyAny>,
        op: &str,
        counts: Option<Vec<usize>>,
        dtype: Option<&str>,
        tag: u32,
        timeout: Option<f64>,
    ) -> PyResult<Bound<'py, PySlice>> {
        let call = call(array.py(), tag, timeout)?;
        let mut memory = Memory::of("array", array, dtype)?;
        let reduction = reduction(&memory, op)?;
        let (item, counts) = (memory.item(), self.counts(counts, memory.count())?);
        let data = memory.bytes_mut("array")?;
        let part =
            self.run(array.py(), |group| group.reduce_scatter(data, &counts, &reduction, &call))?;
        // Without a step: a slice with step 1 would not be equal to `slice(start, stop)`.
        let slice = array.py().get_type::<PySlice>();
        Ok(slice.call1((part.start / item, part.end / item))?.cast_into()?)
    }

    #[pyo3(signature = (array, *, root=0, tag=0, timeout=None))]
    fn broadcast(
        &self,
        array: &Bound<'_, PyAny>,
        root: usize,
        tag: u32,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let call = call(array.py(), tag, timeout)?;
        let mut memory = Memory::of("array", array, None)?;
        let data = memory.bytes_mut("array")?;
        self.run(array.py(), |group| group.broadcast(data, root, &call))
    }

    #[pyo3(signature = (array, *, counts=None, tag=0, timeout=None))]
    fn allgather(
        &self,
        array: &Bound<'_, PyAny>,
        counts: Option<Vec<usize>>,
        tag: u32,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let call = call(array.py(), tag, timeout)?;
        let mut memory = Memory::of("array", array, None)?;
        let counts = self.counts(counts, memory.count())?;
        let lengths = lengths(&counts, memory.item())?;
        let data = memory.bytes_mut("array")?;
        self.run(array.py(), |group| group.allgatherv(data, &lengths, &call))
    }

    #[pyo3(signature = (input, output=None, *, root=0, counts=None, tag=0, timeout=None))]
    fn gather(
        &self,
        input: &Bound<'_, PyAny>,
        output: Option<&Bound<'_, PyAny>>,
        root: usize,
        counts: Option<Vec<usize>>,
        tag: u32,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let (py, call) = (input.py(), call(input.py(), tag, timeout)?);
        let from = Memory::of("input", input, None)?;
        let mut into =
            output.map_or_else(|| Memory::none(py), |output| Memory::of("output", output, None))?;
        from.check_disjoint(&into)?;
        let counts = counts.unwrap_or_else(|| vec![from.count(); self.size]);
        let lengths = lengths(&counts, from.item())?;
        let (from, into) = (from.bytes(), into.bytes_mut("output")?);
        self.run(py, |group| group.gatherv(from, into, &lengths, root, &call))
    }

    #[pyo3(signature = (output, input=None, *, root=0, counts=None, tag=0, timeout=None))]
    fn scatter(
        &self,
        output: &Bound<'_, PyAny>,
        input: Option<&Bound<'_, PyAny>>,
        root: usize,
        counts: Option<Vec<usize>>,
        tag: u32,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let (py, call) = (output.py(), call(output.py(), tag, timeout)?);
        let mut into = Memory::of("output", output, None)?;
        let from =
            input.map_or_else(|| Memory::none(py), |input| Memory::of("input", input, None))?;
        from.check_disjoint(&into)?;
        let counts = counts.unwrap_or_else(|| vec![into.count(); self.size]);
        let lengths = lengths(&counts, into.item())?;
        let (from, into) = (from.bytes(), into.bytes_mut("output")?);
        self.run(py, |group| group.scatterv(from, into, &lengths, root, &call))
    }

    #[pyo3(signature = (input, output, *, sent=None, received=None, tag=0, timeout=None))]
    fn alltoall(
        &self,
        input: &Bound<'_, PyAny>,
        output: &Bound<'_, PyAny>,
        sent: Option<Vec<usize>>,
        received: Option<Vec<usize>>,
        tag: u32,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let (py, call) = (input.py(), call(input.py(), tag, timeout)?);
        let from = Memory::of("input", input, None)?;
        let mut into = Memory::of("output", output, None)?;
        from.check_disjoint(&into)?;
        let sent = lengths(&self.counts(sent, from.count())?, from.item())?;
        let received = lengths(&self.counts(received, into.count())?, into.item())?;
        let (from, into) = (from.bytes(), into.bytes_mut("output")?);
        self.run(py, |group| group.alltoallv(from, &sent, into, &received, &call))
    }

    #[pyo3(signature = (*, tag=0, timeout=None))]
    fn barrier(&self, py: Python<'_>, tag: u32, timeout: Option<f64>) -> PyResult<()> {
        let call = call(py, tag, timeout)?;
        self.run(py, |group| group.barrier(&call))
    }

    #[pyo3(signature = (array, to, *, tag=0, timeout=None))]
    fn send(
        &self,
        array: &Bound<'_, PyAny>,
        to: usize,
        tag: u32,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let call = call(array.py(), tag, timeout)?;
        let memory = Memory::of("array", array, None)?;
        let data = memory.bytes();
        self.run(array.py(), |group| group.send(to, data, &call))
    }

    #[pyo3(signature = (array, source=None, *, tag=0, timeout=None))]
    fn recv(
        &self,
        array: &Bound<'_, PyAny>,
        source: Option<usize>,
        tag: u32,
        timeout: Option<f64>,
    ) -> PyResult<(usize, usize)> {
        let call = call(array.py(), tag, timeout)?;
        let mut memory = Memory::of("array", array, None)?;
        let item = memory.item();
        let data = memory.bytes_mut("array")?;
        let (from, bytes) = self.run(array.py(), |group| match source {
            Some(source) => group.recv(source, data, &call).map(|bytes| (source, bytes)),
            None => group.recv_any(data, &call),
        })?;
        Ok((from, bytes / item))
    }
}

impl Group {
    fn new(group: collectives::Group) -> Self {
        let (rank, size) = (group.rank(), group.size());
        Self { rank, size, group: Mutex::new(Some(Arc::new(group))) }
    }

    fn open(&self) -> PyResult<Arc<collectives::Group>> {
        let group = self.group.lock().unwrap_or_else(PoisonError::into_inner).clone();
        group.ok_or_else(|| PyValueError::new_err("the group is closed"))
    }

    /// Runs an operation without the interpreter's lock, so that other threads can run meanwhile.
    fn run<T: Send>(
        &self,
        py: Python<'_>,
        body: impl FnOnce(&collectives::Group) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let group = self.open()?;
        // If another thread closes the group meanwhile, this call leaves it at its end.
        py.detach(move || body(&group)).map_err(|error| exception(py, &error))
    }

    /// The numbers of elements of the parts: the given ones, or equal ones.
    fn counts(&self, given: Option<Vec<usize>>, all: usize) -> PyResult<Vec<usize>> {
        if let Some(given) = given {
            return Ok(given);
        }
        if !all.is_multiple_of(self.size) {
            let text = format!("{all} elements are not divisible by {} ranks", self.size);
            return Err(PyValueError::new_err(text));
        }
        Ok(vec![all / self.size; self.size])
    }
}

impl Drop for Group {
    /// A group that the interpreter collects leaves as in `close`.
    fn drop(&mut self) {
        let group = self.group.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        // While the interpreter finalizes, there is nothing to detach from.
        let _ = Python::try_attach(|py| py.detach(|| drop(group)));
    }
}

fn call(py: Python<'_>, tag: u32, timeout: Option<f64>) -> PyResult<Call> {
    Call::from_parts(tag, timeout, None).map_err(|error| exception(py, &error))
}

fn reduction(memory: &Memory, op: &str) -> PyResult<Reduction<'static>> {
    let op = match op {
        "sum" => Op::Sum,
        "prod" => Op::Prod,
        "max" => Op::Max,
        "min" => Op::Min,
        other => {
            return Err(PyValueError::new_err(format!(
                "there is no op {other:?}: sum, prod, max or min"
            )));
        }
    };
    Ok(Reduction::of(memory.kind("array")?, op))
}

/// Numbers of elements, converted to bytes.
fn lengths(counts: &[usize], item: usize) -> PyResult<Vec<usize>> {
    let lengths = counts.iter().map(|count| count.checked_mul(item)).collect::<Option<_>>();
    lengths.ok_or_else(|| PyValueError::new_err("counts exceed the address space"))
}
