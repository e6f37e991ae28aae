//! Groups. What each method does is in `evenkeel/_evenkeel.pyi`.

#![expect(clippy::too_many_arguments, reason = "they are the arguments of Python's methods")]

use std::sync::{Arc, Mutex, PoisonError};

use evenkeel_collectives::{
    self as collectives, Call, Error, Launch, Op, PrefixStore, Reconfigure, Reduction, Sequence,
    TransportKind, timeout_from_seconds,
};
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error::exception;
use crate::memory::Memory;
use crate::request::{Outcome, Request};
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
        let store = match store {
            Some(StoreArgument::Store(store)) => store,
            Some(StoreArgument::Address(address)) => {
                launch.store = Some(address);
                launch.open_store(timeout)?
            }
            None => launch.open_store(timeout)?,
        };
        let store = Arc::new(PrefixStore::new(store, name));
        let group =
            collectives::Group::join(&*store, launch.rank, launch.size, &transport_kind, timeout)?;
        Ok(Group::new(group, store))
    });
    joined.map_err(|error| exception(py, &error))
}

/// Joins the next group that the ranks of a group make by `reconfigure`.
#[pyfunction]
#[pyo3(signature = (store, *, name="default", transport="tcp", timeout=30.0))]
pub(crate) fn join_as_newcomer(
    py: Python<'_>,
    store: &Bound<'_, PyAny>,
    name: &str,
    transport: &str,
    timeout: f64,
) -> PyResult<Group> {
    let store = StoreArgument::of(store)?;
    let joined = py.detach(|| {
        let timeout = timeout_from_seconds(timeout)?;
        let transport_kind = TransportKind::from_name(transport)?;
        let store = match store {
            StoreArgument::Store(store) => store,
            StoreArgument::Address(address) => collectives::store::open(&address, timeout)?,
        };
        let store = Arc::new(PrefixStore::new(store, name));
        let group = collectives::Group::join_as_newcomer(&*store, &transport_kind, timeout)?;
        Ok(Group::new(group, store))
    });
    joined.map_err(|error: Error| exception(py, &error))
}

/// A rank's membership in a group.
#[pyclass(frozen, module = "evenkeel")]
pub(crate) struct Group {
    rank: usize,
    size: usize,
    previous_ranks: Vec<Option<usize>>,
    store: Arc<PrefixStore>,
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

    fn set_name(&self, py: Python<'_>, name: &str, ranks: Vec<usize>) -> PyResult<()> {
        self.open()?.set_name(name, &ranks).map_err(|error| exception(py, &error))
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
        let group = self.open()?;
        let made = py.detach(|| group.sub_group(&ranks)).map_err(|error| exception(py, &error))?;
        Ok(made.map(|made| Self::new(made, Arc::clone(&self.store))))
    }

    #[getter]
    fn previous_ranks(&self) -> Vec<Option<usize>> {
        self.previous_ranks.clone()
    }

    #[pyo3(signature = (*, min_size=0, timeout=None))]
    fn reconfigure(&self, py: Python<'_>, min_size: usize, timeout: Option<f64>) -> PyResult<Self> {
        let (group, store) = (self.open()?, Arc::clone(&self.store));
        let next = py.detach(|| {
            let mut options = Reconfigure::default().min_size(min_size);
            if let Some(timeout) = timeout {
                options = options.timeout(timeout_from_seconds(timeout)?);
            }
            group.reconfigure(&*store, &options).map(|next| Self::new(next, store))
        });
        next.map_err(|error: Error| exception(py, &error))
    }

    #[pyo3(signature = (color, *, tag=0, timeout=None))]
    fn split(
        &self,
        py: Python<'_>,
        color: Option<u32>,
        tag: u32,
        timeout: Option<f64>,
    ) -> PyResult<Option<Self>> {
        let (group, call) = (self.open()?, call(py, tag, timeout, None)?);
        let split = || {
            group.in_order_within(Sequence::Collectives { tag }, "split", &call, |group, call| {
                group.split(color, call)
            })
        };
        let made = py.detach(split).map_err(|error| exception(py, &error))?;
        Ok(made.map(|made| Self::new(made, Arc::clone(&self.store))))
    }

    #[pyo3(signature = (rate, *, tag=0, timeout=None))]
    fn set_link_rate(
        &self,
        py: Python<'_>,
        rate: u64,
        tag: u32,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let (group, call) = (self.open()?, call(py, tag, timeout, None)?);
        let set = || {
            group.in_order_within(
                Sequence::Collectives { tag },
                "set_link_rate",
                &call,
                |group, call| group.set_link_rate(rate, call),
            )
        };
        py.detach(set).map_err(|error| exception(py, &error))
    }

    #[pyo3(signature = (array, op="sum", *, algorithm=None, dtype=None, tag=0, timeout=None, note=None, wait=true))]
    fn allreduce<'py>(
        &self,
        array: &Bound<'py, PyAny>,
        op: &str,
        algorithm: Option<&str>,
        dtype: Option<&str>,
        tag: u32,
        timeout: Option<f64>,
        note: Option<String>,
        wait: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = array.py();
        let call =
            Call::from_parts(tag, timeout, algorithm).map_err(|error| exception(py, &error))?;
        let call = with_note(call, note);
        let mut memory = Memory::writable("array", array, dtype)?;
        let reduction = reduction(&memory, op)?;
        self.collective(py, "allreduce", tag, call, wait, move |group, call| {
            group.allreduce(memory.bytes_mut(), &reduction, call).map(|()| Outcome::Nothing)
        })
    }

    #[pyo3(signature = (array, op="sum", *, root=0, dtype=None, tag=0, timeout=None, note=None, wait=true))]
    fn reduce<'py>(
        &self,
        array: &Bound<'py, PyAny>,
        op: &str,
        root: usize,
        dtype: Option<&str>,
        tag: u32,
        timeout: Option<f64>,
        note: Option<String>,
        wait: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let call = call(array.py(), tag, timeout, note)?;
        let mut memory = Memory::writable("array", array, dtype)?;
        let reduction = reduction(&memory, op)?;
        self.collective(array.py(), "reduce", tag, call, wait, move |group, call| {
            group.reduce(memory.bytes_mut(), root, &reduction, call).map(|()| Outcome::Nothing)
        })
    }

    #[pyo3(signature = (array, op="sum", *, counts=None, dtype=None, tag=0, timeout=None, note=None, wait=true))]
    fn reduce_scatter<'py>(
        &self,
        array: &Bound<'py, PyAny>,
        op: &str,
        counts: Option<Vec<usize>>,
        dtype: Option<&str>,
        tag: u32,
        timeout: Option<f64>,
        note: Option<String>,
        wait: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let call = call(array.py(), tag, timeout, note)?;
        let mut memory = Memory::writable("array", array, dtype)?;
        let reduction = reduction(&memory, op)?;
        let (item, counts) = (memory.item(), self.counts(counts, memory.count())?);
        self.collective(array.py(), "reduce_scatter", tag, call, wait, move |group, call| {
            let part = group.reduce_scatter(memory.bytes_mut(), &counts, &reduction, call)?;
            Ok(Outcome::Part(part.start / item..part.end / item))
        })
    }

    #[pyo3(signature = (array, *, root=0, tag=0, timeout=None, note=None, wait=true))]
    fn broadcast<'py>(
        &self,
        array: &Bound<'py, PyAny>,
        root: usize,
        tag: u32,
        timeout: Option<f64>,
        note: Option<String>,
        wait: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let call = call(array.py(), tag, timeout, note)?;
        let mut memory = Memory::writable("array", array, None)?;
        self.collective(array.py(), "broadcast", tag, call, wait, move |group, call| {
            group.broadcast(memory.bytes_mut(), root, call).map(|()| Outcome::Nothing)
        })
    }

    #[pyo3(signature = (array, *, counts=None, tag=0, timeout=None, note=None, wait=true))]
    fn allgather<'py>(
        &self,
        array: &Bound<'py, PyAny>,
        counts: Option<Vec<usize>>,
        tag: u32,
        timeout: Option<f64>,
        note: Option<String>,
        wait: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let call = call(array.py(), tag, timeout, note)?;
        let mut memory = Memory::writable("array", array, None)?;
        let counts = self.counts(counts, memory.count())?;
        let lengths = lengths(&counts, memory.item())?;
        self.collective(array.py(), "allgather", tag, call, wait, move |group, call| {
            group.allgatherv(memory.bytes_mut(), &lengths, call).map(|()| Outcome::Nothing)
        })
    }

    #[pyo3(signature = (input, output=None, *, root=0, counts=None, tag=0, timeout=None, note=None, wait=true))]
    fn gather<'py>(
        &self,
        input: &Bound<'py, PyAny>,
        output: Option<&Bound<'py, PyAny>>,
        root: usize,
        counts: Option<Vec<usize>>,
        tag: u32,
        timeout: Option<f64>,
        note: Option<String>,
        wait: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, call) = (input.py(), call(input.py(), tag, timeout, note)?);
        let from = Memory::of("input", input, None)?;
        let mut into = output
            .map_or_else(|| Memory::none(py), |output| Memory::writable("output", output, None))?;
        from.check_disjoint(&into)?;
        let counts = counts.unwrap_or_else(|| vec![from.count(); self.size]);
        let lengths = lengths(&counts, from.item())?;
        self.collective(py, "gather", tag, call, wait, move |group, call| {
            let done = group.gatherv(from.bytes(), into.bytes_mut(), &lengths, root, call);
            done.map(|()| Outcome::Nothing)
        })
    }

    #[pyo3(signature = (output, input=None, *, root=0, counts=None, tag=0, timeout=None, note=None, wait=true))]
    fn scatter<'py>(
        &self,
        output: &Bound<'py, PyAny>,
        input: Option<&Bound<'py, PyAny>>,
        root: usize,
        counts: Option<Vec<usize>>,
        tag: u32,
        timeout: Option<f64>,
        note: Option<String>,
        wait: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, call) = (output.py(), call(output.py(), tag, timeout, note)?);
        let mut into = Memory::writable("output", output, None)?;
        let from =
            input.map_or_else(|| Memory::none(py), |input| Memory::of("input", input, None))?;
        from.check_disjoint(&into)?;
        let counts = counts.unwrap_or_else(|| vec![into.count(); self.size]);
        let lengths = lengths(&counts, into.item())?;
        self.collective(py, "scatter", tag, call, wait, move |group, call| {
            let done = group.scatterv(from.bytes(), into.bytes_mut(), &lengths, root, call);
            done.map(|()| Outcome::Nothing)
        })
    }

    #[pyo3(signature = (input, output, *, sent=None, received=None, tag=0, timeout=None, note=None, wait=true))]
    fn alltoall<'py>(
        &self,
        input: &Bound<'py, PyAny>,
        output: &Bound<'py, PyAny>,
        sent: Option<Vec<usize>>,
        received: Option<Vec<usize>>,
        tag: u32,
        timeout: Option<f64>,
        note: Option<String>,
        wait: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, call) = (input.py(), call(input.py(), tag, timeout, note)?);
        let from = Memory::of("input", input, None)?;
        let mut into = Memory::writable("output", output, None)?;
        from.check_disjoint(&into)?;
        let sent = lengths(&self.counts(sent, from.count())?, from.item())?;
        let received = lengths(&self.counts(received, into.count())?, into.item())?;
        self.collective(py, "alltoall", tag, call, wait, move |group, call| {
            let done = group.alltoallv(from.bytes(), &sent, into.bytes_mut(), &received, call);
            done.map(|()| Outcome::Nothing)
        })
    }

    #[pyo3(signature = (*, tag=0, timeout=None, note=None, wait=true))]
    fn barrier<'py>(
        &self,
        py: Python<'py>,
        tag: u32,
        timeout: Option<f64>,
        note: Option<String>,
        wait: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let call = call(py, tag, timeout, note)?;
        self.collective(py, "barrier", tag, call, wait, move |group, call| {
            group.barrier(call).map(|()| Outcome::Nothing)
        })
    }

    #[pyo3(signature = (array, to, *, tag=0, timeout=None, note=None, wait=true))]
    fn send<'py>(
        &self,
        array: &Bound<'py, PyAny>,
        to: usize,
        tag: u32,
        timeout: Option<f64>,
        note: Option<String>,
        wait: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let call = call(array.py(), tag, timeout, note)?;
        let memory = Memory::of("array", array, None)?;
        self.run(array.py(), Sequence::Sends { to, tag }, "send", call, wait, move |group, call| {
            group.send(to, memory.bytes(), call).map(|()| Outcome::Nothing)
        })
    }

    #[pyo3(signature = (array, source=None, *, tag=0, timeout=None, note=None, wait=true))]
    fn recv<'py>(
        &self,
        array: &Bound<'py, PyAny>,
        source: Option<usize>,
        tag: u32,
        timeout: Option<f64>,
        note: Option<String>,
        wait: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let call = call(array.py(), tag, timeout, note)?;
        let mut memory = Memory::writable("array", array, None)?;
        let item = memory.item();
        self.run(
            array.py(),
            Sequence::Receives { from: source, tag },
            "recv",
            call,
            wait,
            move |group, call| {
                let data = memory.bytes_mut();
                let (from, bytes) = match source {
                    Some(source) => (source, group.recv(source, data, call)?),
                    None => group.recv_any(data, call)?,
                };
                Ok(Outcome::Received(from, bytes / item))
            },
        )
    }
}

impl Group {
    fn new(group: collectives::Group, store: Arc<PrefixStore>) -> Self {
        let (rank, size, previous_ranks) =
            (group.rank(), group.size(), group.previous_ranks().to_vec());
        Self { rank, size, previous_ranks, store, group: Mutex::new(Some(Arc::new(group))) }
    }

    fn open(&self) -> PyResult<Arc<collectives::Group>> {
        let group = self.group.lock().unwrap_or_else(PoisonError::into_inner).clone();
        group.ok_or_else(|| PyValueError::new_err("the group is closed"))
    }

    /// Runs a collective operation, or starts it.
    fn collective<'py>(
        &self,
        py: Python<'py>,
        name: &'static str,
        tag: u32,
        call: Call,
        wait: bool,
        operation: impl FnOnce(&collectives::Group, &Call) -> Result<Outcome, Error> + Send + 'static,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.run(py, Sequence::Collectives { tag }, name, call, wait, operation)
    }

    /// Runs an operation without the interpreter's lock, so that other threads can run meanwhile, or starts it.
    fn run<'py>(
        &self,
        py: Python<'py>,
        sequence: Sequence,
        name: &'static str,
        call: Call,
        wait: bool,
        operation: impl FnOnce(&collectives::Group, &Call) -> Result<Outcome, Error> + Send + 'static,
    ) -> PyResult<Bound<'py, PyAny>> {
        let group = self.open()?;
        if !wait {
            let request = py.detach(|| group.start_call(sequence, name, call, operation));
            return Request::new(&group, request).into_bound_py_any(py);
        }
        // If another thread closes the group meanwhile, this call leaves it at its end.
        let outcome = py.detach(move || group.in_order_within(sequence, name, &call, operation));
        outcome.map_err(|error| exception(py, &error))?.into_object(py)
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

fn call(py: Python<'_>, tag: u32, timeout: Option<f64>, note: Option<String>) -> PyResult<Call> {
    let call = Call::from_parts(tag, timeout, None).map_err(|error| exception(py, &error))?;
    Ok(with_note(call, note))
}

fn with_note(call: Call, note: Option<String>) -> Call {
    match note {
        Some(note) => call.note(note),
        None => call,
    }
}

fn reduction(memory: &Memory, op: &str) -> PyResult<Reduction<'static>> {
    let op = match op {
        "sum" => Op::Sum,
        "prod" => Op::Prod,
        "max" => Op::Max,
        "min" => Op::Min,
        // Bit by bit, so the type does not matter.
        "band" => return Ok(Reduction::custom(1, &bitwise_and)),
        "bor" => return Ok(Reduction::custom(1, &bitwise_or)),
        "bxor" => return Ok(Reduction::custom(1, &bitwise_xor)),
        other => {
            return Err(PyValueError::new_err(format!(
                "there is no op {other:?}: sum, prod, max, min, band, bor or bxor"
            )));
        }
    };
    Ok(Reduction::of(memory.kind("array")?, op))
}

fn bitwise_and(into: &mut [u8], other: &[u8]) {
    into.iter_mut().zip(other).for_each(|(a, b)| *a &= b);
}

fn bitwise_or(into: &mut [u8], other: &[u8]) {
    into.iter_mut().zip(other).for_each(|(a, b)| *a |= b);
}

fn bitwise_xor(into: &mut [u8], other: &[u8]) {
    into.iter_mut().zip(other).for_each(|(a, b)| *a ^= b);
}

/// Numbers of elements, converted to bytes.
fn lengths(counts: &[usize], item: usize) -> PyResult<Vec<usize>> {
    let lengths = counts.iter().map(|count| count.checked_mul(item)).collect::<Option<_>>();
    lengths.ok_or_else(|| PyValueError::new_err("counts exceed the address space"))
}
