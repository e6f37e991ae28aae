//! Access to the memory of numpy arrays, tensors and other objects without copies, by Python's buffer protocol or by DLPack.
//!
//! The memory is not protected from other threads, as in every library that works on arrays without the interpreter's lock. During
//! an operation no other thread may change an array, or read one that is written. The package's manual states this.

use std::ffi::{CStr, c_void};
use std::{ptr, slice};

use evenkeel_collectives::DataType;
use pyo3::buffer::{ElementType, PyUntypedBuffer};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};

/// The names of the types in numpy, ml_dtypes and torch.
const NAMES: [(&str, DataType); 12] = [
    ("int8", DataType::Int8),
    ("uint8", DataType::Uint8),
    ("int32", DataType::Int32),
    ("uint32", DataType::Uint32),
    ("int64", DataType::Int64),
    ("uint64", DataType::Uint64),
    ("float16", DataType::Float16),
    ("float32", DataType::Float32),
    ("float64", DataType::Float64),
    ("bfloat16", DataType::Bfloat16),
    ("float8_e4m3fn", DataType::Float8E4m3),
    ("float8_e5m2", DataType::Float8E5m2),
];

/// The memory of an object, which stays valid while this value lives.
pub(crate) struct Memory {
    start: *mut u8,
    bytes: usize,
    /// Bytes of an element.
    item: usize,
    /// `None` for a type that can be moved but not reduced.
    kind: Option<DataType>,
    writable: bool,
    /// Released when this value is dropped.
    _owner: Owner,
}

// SAFETY: the memory is valid on every thread, and the package requires of its users that nothing else uses it meanwhile. The owner
// can be moved to and dropped on any thread.
unsafe impl Send for Memory where Owner: Send {}

#[expect(dead_code, reason = "the values are only held and dropped")]
enum Owner {
    Buffer(PyUntypedBuffer),
    Capsule(Py<PyCapsule>),
    Object(Py<PyAny>),
}

/// Memory by its address, for `evenkeel.torch`: a tensor's, which is faster than by DLPack. The caller guarantees that `bytes` bytes
/// are there while the owner lives.
#[pyclass(frozen, module = "evenkeel._evenkeel")]
pub(crate) struct RawMemory {
    address: usize,
    bytes: usize,
    item: usize,
    #[expect(dead_code, reason = "it is only held")]
    owner: Py<PyAny>,
}

#[pymethods]
impl RawMemory {
    #[new]
    fn new(address: usize, bytes: usize, item: usize, owner: Py<PyAny>) -> Self {
        Self { address, bytes, item, owner }
    }
}

impl Memory {
    /// Borrows an object's memory. `name` is the argument's name, for errors. `dtype` overrides the element type.
    pub(crate) fn of(name: &str, object: &Bound<'_, PyAny>, dtype: Option<&str>) -> PyResult<Self> {
        let mut memory = match object.cast::<RawMemory>() {
            Ok(raw) => Self::of_raw(raw.get(), object),
            Err(_) => Self::of_object(name, object)?,
        };
        if let Some(dtype) = dtype {
            let found = NAMES.iter().find(|(name, _)| *name == dtype);
            let (_, kind) = found.ok_or_else(|| {
                PyValueError::new_err(format!("there is no dtype {dtype:?}: {}", all_names()))
            })?;
            if !memory.bytes.is_multiple_of(kind.bytes()) {
                return Err(PyValueError::new_err(format!(
                    "{name} has {} bytes: not a whole number of {dtype}",
                    memory.bytes
                )));
            }
            (memory.kind, memory.item) = (Some(*kind), kind.bytes());
        }
        Ok(memory)
    }

    fn of_raw(raw: &RawMemory, object: &Bound<'_, PyAny>) -> Self {
        let RawMemory { address, bytes, item, .. } = *raw;
        let start = ptr::with_exposed_provenance_mut(address);
        let owner = Owner::Object(object.clone().unbind());
        Self { start, bytes, item: item.max(1), kind: None, writable: true, _owner: owner }
    }

    fn of_object(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        match PyUntypedBuffer::get(object) {
            Ok(buffer) => Self::of_buffer(name, buffer),
            Err(_) if object.hasattr(intern!(object.py(), "__dlpack__"))? => {
                Self::of_capsule(name, capsule(name, object)?)
            }
            Err(_) => Err(PyTypeError::new_err(format!(
                "{name} is a {}: a numpy array, a tensor on the CPU, or anything with the buffer protocol or __dlpack__",
                object.get_type().name()?
            ))),
        }
    }

    /// As [`Memory::of`], for memory that the operation writes.
    pub(crate) fn writable(
        name: &str,
        object: &Bound<'_, PyAny>,
        dtype: Option<&str>,
    ) -> PyResult<Self> {
        let memory = Self::of(name, object, dtype)?;
        if memory.writable {
            return Ok(memory);
        }
        Err(PyValueError::new_err(format!("{name} cannot be written")))
    }

    /// Empty memory, for an omitted argument.
    pub(crate) fn none(py: Python<'_>) -> PyResult<Self> {
        Self::of("nothing", pyo3::types::PyBytes::new(py, b"").as_any(), None)
            .map(|nothing| Self { writable: true, ..nothing })
    }

    /// Bytes of an element.
    pub(crate) fn item(&self) -> usize {
        self.item
    }

    /// Number of elements.
    pub(crate) fn count(&self) -> usize {
        self.bytes / self.item
    }

    /// The type, for a reduction.
    pub(crate) fn kind(&self, name: &str) -> PyResult<DataType> {
        self.kind.ok_or_else(|| {
            PyTypeError::new_err(format!(
                "{name} has elements that cannot be reduced: {}, in this machine's byte order (pass dtype= if the array does not have the type)",
                all_names()
            ))
        })
    }

    /// The bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        if self.bytes == 0 {
            return &[];
        }
        // SAFETY: this many bytes start there, and the owner keeps them while `self` lives. The package requires of its users that
        // nothing else changes them meanwhile.
        unsafe { slice::from_raw_parts(self.start, self.bytes) }
    }

    /// The bytes, writable.
    ///
    /// # Panics
    /// When the memory cannot be written.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(self.writable, "checked when the memory was borrowed");
        if self.bytes == 0 {
            return &mut [];
        }
        // SAFETY: as `bytes`; the owner allows writing. `self` is borrowed as long as they are, and `check_disjoint` has checked that the
        // other memory of the call does not overlap.
        unsafe { slice::from_raw_parts_mut(self.start, self.bytes) }
    }

    /// Fails if two memories of a call have bytes in common.
    pub(crate) fn check_disjoint(&self, other: &Self) -> PyResult<()> {
        let ends = |memory: &Self| memory.start.addr() + memory.bytes;
        let common = self.start.addr() < ends(other) && other.start.addr() < ends(self);
        if common && self.bytes > 0 && other.bytes > 0 {
            return Err(PyValueError::new_err("input and output overlap"));
        }
        Ok(())
    }

    fn of_buffer(name: &str, buffer: PyUntypedBuffer) -> PyResult<Self> {
        if !buffer.is_c_contiguous() {
            return Err(not_contiguous(name));
        }
        // An array of any number of dimensions has at least one byte in an element.
        let (item, bytes) = (buffer.item_size().max(1), buffer.len_bytes());
        Ok(Self {
            start: buffer.buf_ptr().cast(),
            bytes,
            item,
            kind: kind_of_format(buffer.format()),
            writable: !buffer.readonly(),
            _owner: Owner::Buffer(buffer),
        })
    }

    fn of_capsule(name: &str, capsule: Bound<'_, PyCapsule>) -> PyResult<Self> {
        const VERSIONED: &CStr = c"dltensor_versioned";
        const PLAIN: &CStr = c"dltensor";
        const READ_ONLY_OR_COPIED: u64 = 1 | 2;
        let wrong = |what: &str| PyTypeError::new_err(format!("{name}: __dlpack__ gave {what}"));
        let (tensor, writable) = if capsule.is_valid_checked(Some(VERSIONED)) {
            let managed: *const VersionedTensor =
                capsule.pointer_checked(Some(VERSIONED))?.as_ptr().cast();
            // SAFETY: DLPack specifies that a capsule of this name has such a structure, of which the version is first in every
            // version, and keeps it until the capsule, which is held, is freed or renamed.
            let major = unsafe { (*managed).major };
            if major != 1 {
                return Err(wrong(&format!("DLPack of version {major}, not 1")));
            }
            // SAFETY: as above, and the version is the one that is known here.
            unsafe { (&raw const (*managed).tensor, (*managed).flags & READ_ONLY_OR_COPIED == 0) }
        } else if capsule.is_valid_checked(Some(PLAIN)) {
            // Its structure begins with the tensor. Tensors of this version are writable.
            (capsule.pointer_checked(Some(PLAIN))?.as_ptr().cast_const().cast::<Tensor>(), true)
        } else {
            return Err(wrong("no tensor, or one that has already been consumed"));
        };
        // SAFETY: as above: it is valid while the capsule is held.
        let tensor = unsafe { &*tensor };
        if ![CPU, PINNED].contains(&tensor.device_type) {
            return Err(not_on_cpu(name, tensor.device_type));
        }
        let dimensions = usize::try_from(tensor.dimensions)
            .map_err(|_| wrong("an invalid number of dimensions"))?;
        let numbers = |of: *const i64| -> &[i64] {
            // SAFETY: DLPack specifies one for each dimension.
            if dimensions == 0 { &[] } else { unsafe { slice::from_raw_parts(of, dimensions) } }
        };
        if dimensions > 0 && tensor.shape.is_null() {
            return Err(wrong("no shape"));
        }
        let shape = numbers(tensor.shape);
        let bits = usize::from(tensor.bits) * usize::from(tensor.lanes);
        if bits == 0 || !bits.is_multiple_of(8) {
            return Err(wrong(&format!("elements of {bits} bits")));
        }
        let item = bits / 8;
        let bytes = shape
            .iter()
            .try_fold(item, |bytes, length| bytes.checked_mul(usize::try_from(*length).ok()?));
        let bytes = bytes
            .filter(|bytes| isize::try_from(*bytes).is_ok())
            .ok_or_else(|| wrong("an impossible shape"))?;
        if !tensor.strides.is_null() && bytes > 0 && !is_contiguous(shape, numbers(tensor.strides))
        {
            return Err(not_contiguous(name));
        }
        let start = if bytes == 0 {
            ptr::null_mut()
        } else {
            if tensor.data.is_null() {
                return Err(wrong("no data"));
            }
            let offset = usize::try_from(tensor.byte_offset).map_err(|_| wrong("an offset"))?;
            tensor.data.cast::<u8>().wrapping_add(offset)
        };
        let kind = (tensor.lanes == 1).then(|| kind_of_code(tensor.code, tensor.bits)).flatten();
        Ok(Self { start, bytes, item, kind, writable, _owner: Owner::Capsule(capsule.unbind()) })
    }
}

/// `DLDeviceType`: CPU memory, and pinned CPU memory that a GPU can access.
const CPU: i32 = 1;
const PINNED: i32 = 3;

/// `DLTensor` of DLPack 0.2 to 1.1, with the structures in it written out. `DLManagedTensor` begins with it.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device_type: i32,
    device: i32,
    dimensions: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    /// In elements; null for C-contiguous elements.
    strides: *const i64,
    byte_offset: u64,
}

/// `DLManagedTensorVersioned` of DLPack 1.
#[repr(C)]
struct VersionedTensor {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: *const c_void,
    flags: u64,
    tensor: Tensor,
}

/// Gets an object's DLPack capsule.
fn capsule<'py>(name: &str, object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyCapsule>> {
    let py = object.py();
    let (device, _): (i32, i32) =
        object.call_method0(intern!(py, "__dlpack_device__"))?.extract()?;
    if ![CPU, PINNED].contains(&device) {
        return Err(not_on_cpu(name, device));
    }
    // torch exports no tensor that requires gradients, such as a model's parameters, but it exports the same tensor detached.
    let requires_grad = match object.getattr_opt(intern!(py, "requires_grad"))? {
        Some(flag) => flag.is_truthy()?,
        None => false,
    };
    let object = if requires_grad { &object.call_method0(intern!(py, "detach"))? } else { object };
    let version = PyDict::new(py);
    version.set_item(intern!(py, "max_version"), (1, 0))?;
    let method = intern!(py, "__dlpack__");
    let capsule = match object.call_method(method, (), Some(&version)) {
        // An exporter of before DLPack 1.0 does not know the argument.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => object.call_method0(method),
        other => other,
    };
    capsule?
        .cast_into()
        .map_err(|_| PyTypeError::new_err(format!("{name}: __dlpack__ gave no capsule")))
}

fn kind_of_format(format: &CStr) -> Option<DataType> {
    let foreign: &[u8] = if cfg!(target_endian = "little") { b">!" } else { b"<" };
    let first = format.to_bytes().first()?;
    if foreign.contains(first) {
        return None;
    }
    match ElementType::from_format(format) {
        ElementType::SignedInteger { bytes: 1 } => Some(DataType::Int8),
        ElementType::SignedInteger { bytes: 4 } => Some(DataType::Int32),
        ElementType::SignedInteger { bytes: 8 } => Some(DataType::Int64),
        ElementType::UnsignedInteger { bytes: 1 } => Some(DataType::Uint8),
        ElementType::UnsignedInteger { bytes: 4 } => Some(DataType::Uint32),
        ElementType::UnsignedInteger { bytes: 8 } => Some(DataType::Uint64),
        ElementType::Float { bytes: 2 } => Some(DataType::Float16),
        ElementType::Float { bytes: 4 } => Some(DataType::Float32),
        ElementType::Float { bytes: 8 } => Some(DataType::Float64),
        _ => None,
    }
}

/// `DLDataTypeCode`.
fn kind_of_code(code: u8, bits: u8) -> Option<DataType> {
    match (code, bits) {
        (0, 8) => Some(DataType::Int8),
        (0, 32) => Some(DataType::Int32),
        (0, 64) => Some(DataType::Int64),
        (1, 8) => Some(DataType::Uint8),
        (1, 32) => Some(DataType::Uint32),
        (1, 64) => Some(DataType::Uint64),
        (2, 16) => Some(DataType::Float16),
        (2, 32) => Some(DataType::Float32),
        (2, 64) => Some(DataType::Float64),
        (4, 16) => Some(DataType::Bfloat16),
        (10, 8) => Some(DataType::Float8E4m3),
        (12, 8) => Some(DataType::Float8E5m2),
        _ => None,
    }
}

/// Whether the elements are C-contiguous.
fn is_contiguous(shape: &[i64], strides: &[i64]) -> bool {
    let mut next = 1i64;
    shape.iter().zip(strides).rev().all(|(length, stride)| {
        let fits = *length == 1 || *stride == next;
        next = next.saturating_mul(*length);
        fits
    })
}

fn not_contiguous(name: &str) -> PyErr {
    PyValueError::new_err(format!(
        "{name} is not C-contiguous: use numpy.ascontiguousarray or tensor.contiguous()"
    ))
}

fn not_on_cpu(name: &str, device: i32) -> PyErr {
    PyValueError::new_err(format!(
        "{name} is not in the memory of the CPU (DLPack device {device}): for tensors on GPUs use NCCL with evenkeel-run"
    ))
}

fn all_names() -> String {
    NAMES.map(|(name, _)| name).join(", ")
}
