//! Buffers in a GPU's memory, staged through pinned host memory. The CUDA driver is loaded on first use.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::{self, NonNull};
use std::sync::Mutex;

use evenkeel_transport::sync::lock;
use libloading::Library;

use crate::error::{Error, Result};

const LIBRARY: &str = "libcuda.so.1";
const SUCCESS: i32 = 0;

/// The CUDA driver and one GPU.
pub struct Cuda {
    driver: Driver,
    device: i32,
    context: *mut c_void,
    /// The staging buffer. It grows with the staged buffers, and one operation at a time has it.
    staging: Mutex<Option<Pinned>>,
}

// SAFETY: the driver may be called from any thread, and each call makes the context current for its duration.
unsafe impl Send for Cuda {}
// SAFETY: as above; the staging memory is behind a lock.
unsafe impl Sync for Cuda {}

/// Host memory that the driver has pinned.
struct Pinned {
    start: NonNull<u8>,
    length: usize,
}

/// The functions of the CUDA driver API that are needed, by their names.
#[derive(Clone, Copy)]
#[expect(non_snake_case, reason = "they are the driver's names")]
struct Calls {
    cuInit: unsafe extern "C" fn(u32) -> i32,
    cuDeviceGet: unsafe extern "C" fn(*mut i32, i32) -> i32,
    cuDevicePrimaryCtxRetain: unsafe extern "C" fn(*mut *mut c_void, i32) -> i32,
    cuDevicePrimaryCtxRelease_v2: unsafe extern "C" fn(i32) -> i32,
    cuCtxPushCurrent_v2: unsafe extern "C" fn(*mut c_void) -> i32,
    cuCtxPopCurrent_v2: unsafe extern "C" fn(*mut *mut c_void) -> i32,
    cuMemHostAlloc: unsafe extern "C" fn(*mut *mut c_void, usize, u32) -> i32,
    cuMemFreeHost: unsafe extern "C" fn(*mut c_void) -> i32,
    cuMemcpyDtoH_v2: unsafe extern "C" fn(*mut c_void, u64, usize) -> i32,
    cuMemcpyHtoD_v2: unsafe extern "C" fn(u64, *const c_void, usize) -> i32,
    cuGetErrorString: unsafe extern "C" fn(i32, *mut *const c_char) -> i32,
}

struct Driver {
    calls: Calls,
    /// Keeps the functions loaded.
    #[cfg_attr(not(test), expect(dead_code, reason = "it is only held"))]
    library: Option<Library>,
}

impl Driver {
    fn load(name: &str) -> Result<Self> {
        let missing = |error: libloading::Error| {
            Error::system("CUDA buffers need the NVIDIA driver", format!("{name}: {error}"))
        };
        // SAFETY: the library of this name is the CUDA driver, which may be loaded at any time.
        let library = unsafe { Library::new(name) }.map_err(missing)?;
        macro_rules! calls {
            ($($call:ident)+) => {
                // SAFETY: these are the functions' types in the driver's header.
                Calls { $($call: unsafe {
                    *library.get(concat!(stringify!($call), "\0").as_bytes()).map_err(missing)?
                },)+ }
            };
        }
        let calls = calls!(
            cuInit cuDeviceGet cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease_v2 cuCtxPushCurrent_v2
            cuCtxPopCurrent_v2 cuMemHostAlloc cuMemFreeHost cuMemcpyDtoH_v2 cuMemcpyHtoD_v2 cuGetErrorString
        );
        Ok(Self { calls, library: Some(library) })
    }

    fn check(&self, what: &str, status: i32) -> Result<()> {
        if status == SUCCESS {
            return Ok(());
        }
        let mut text = ptr::null();
        // SAFETY: the driver writes a pointer to a static string, or writes nothing.
        let known = unsafe { (self.calls.cuGetErrorString)(status, &raw mut text) } == SUCCESS;
        let why = if known && !text.is_null() {
            // SAFETY: the string is valid as long as the driver is loaded.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        } else {
            format!("error {status}")
        };
        Err(Error::system(format!("CUDA: {what}"), why))
    }
}

impl Cuda {
    /// Loads the driver and opens a GPU by its number.
    ///
    /// # Errors
    /// [`ErrorKind::System`](crate::ErrorKind::System) when there is no driver or no such GPU.
    pub fn open(device: u16) -> Result<Self> {
        Self::with(Driver::load(LIBRARY)?, device.into())
    }

    fn with(driver: Driver, ordinal: i32) -> Result<Self> {
        let (calls, mut device, mut context) = (driver.calls, 0, ptr::null_mut());
        // SAFETY: it may be called any number of times.
        driver.check("cuInit", unsafe { (calls.cuInit)(0) })?;
        // SAFETY: the driver writes a number.
        let got = unsafe { (calls.cuDeviceGet)(&raw mut device, ordinal) };
        driver.check(&format!("GPU {ordinal}"), got)?;
        // SAFETY: the driver writes a pointer; it is released when this is dropped.
        let retained = unsafe { (calls.cuDevicePrimaryCtxRetain)(&raw mut context, device) };
        driver.check("cuDevicePrimaryCtxRetain", retained)?;
        Ok(Self { driver, device, context, staging: Mutex::default() })
    }

    /// Runs an operation, such as any of a group, on bytes of the GPU's memory. They are copied to the host before and, unless the
    /// operation fails, back afterwards.
    ///
    /// # Errors
    /// Those of the driver and of the operation.
    ///
    /// # Safety
    /// The address is the start of `bytes` bytes of this GPU's memory, and nothing else uses them meanwhile: kernels and copies of
    /// other streams that use them have finished.
    pub unsafe fn staged<T>(
        &self,
        address: u64,
        bytes: usize,
        operation: impl FnOnce(&mut [u8]) -> Result<T>,
    ) -> Result<T> {
        let Self { driver, .. } = self;
        let mut staging = lock(&self.staging);
        let start = self.staging_buffer(&mut staging, bytes)?;
        self.with_context(|| {
            // SAFETY: the staging buffer is long enough, and the caller guarantees that the GPU's memory is valid.
            let copied =
                unsafe { (driver.calls.cuMemcpyDtoH_v2)(start.as_ptr().cast(), address, bytes) };
            driver.check("copy to the host", copied)
        })?;
        // SAFETY: the staging buffer is long enough, has been written, and belongs to this call while the lock is held.
        let done = operation(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), bytes) })?;
        self.with_context(|| {
            // SAFETY: as above.
            let copied =
                unsafe { (driver.calls.cuMemcpyHtoD_v2)(address, start.as_ptr().cast(), bytes) };
            driver.check("copy to the GPU", copied)
        })?;
        Ok(done)
    }

    /// Pinned memory of at least this many bytes.
    fn staging_buffer(&self, staging: &mut Option<Pinned>, bytes: usize) -> Result<NonNull<u8>> {
        if let Some(pinned) = staging.as_ref().filter(|pinned| pinned.length >= bytes) {
            return Ok(pinned.start);
        }
        self.free(staging.take());
        let length = bytes.max(1);
        let start = self.with_context(|| {
            let mut start = ptr::null_mut();
            // SAFETY: the driver writes a pointer; it is freed by `free`.
            let pinned = unsafe { (self.driver.calls.cuMemHostAlloc)(&raw mut start, length, 0) };
            self.driver.check(&format!("{length} bytes of pinned memory"), pinned)?;
            NonNull::new(start.cast()).ok_or_else(|| Error::system("CUDA", "memory at zero"))
        })?;
        *staging = Some(Pinned { start, length });
        Ok(start)
    }

    fn free(&self, pinned: Option<Pinned>) {
        let Some(Pinned { start, .. }) = pinned else { return };
        // Memory that cannot be freed stays until the process exits.
        let _ = self.with_context(|| {
            // SAFETY: it is from `cuMemHostAlloc`, and no borrow of it is left.
            let freed = unsafe { (self.driver.calls.cuMemFreeHost)(start.as_ptr().cast()) };
            self.driver.check("cuMemFreeHost", freed)
        });
    }

    /// Calls a function while the GPU's context is current on this thread.
    fn with_context<T>(&self, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let Self { driver, context, .. } = self;
        // SAFETY: the context is retained as long as this lives; it is popped below.
        let pushed = unsafe { (driver.calls.cuCtxPushCurrent_v2)(*context) };
        driver.check("cuCtxPushCurrent", pushed)?;
        let result = call();
        let mut popped = ptr::null_mut();
        // SAFETY: this pops the context that was pushed; the driver writes a pointer.
        let status = unsafe { (driver.calls.cuCtxPopCurrent_v2)(&raw mut popped) };
        result.and_then(|done| driver.check("cuCtxPopCurrent", status).map(|()| done))
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        let pinned = lock(&self.staging).take();
        self.free(pinned);
        // SAFETY: it was retained once, when it was opened. A failure cannot be handled here.
        let _ = unsafe { (self.driver.calls.cuDevicePrimaryCtxRelease_v2)(self.device) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::run_ranks;
    use crate::{Call, DataType, ErrorKind, Op, Reduction, TransportKind};

    /// A fake driver with one GPU, whose memory is the host's.
    mod fake_driver {
        use super::*;

        pub(super) unsafe extern "C" fn init(_: u32) -> i32 {
            SUCCESS
        }

        pub(super) unsafe extern "C" fn device(device: *mut i32, ordinal: i32) -> i32 {
            // SAFETY: as the driver's contract has it.
            unsafe { *device = ordinal };
            if ordinal == 0 { SUCCESS } else { 101 }
        }

        pub(super) unsafe extern "C" fn retain(_: *mut *mut c_void, _: i32) -> i32 {
            SUCCESS
        }

        pub(super) unsafe extern "C" fn release(_: i32) -> i32 {
            SUCCESS
        }

        pub(super) unsafe extern "C" fn push(_: *mut c_void) -> i32 {
            SUCCESS
        }

        pub(super) unsafe extern "C" fn pop(_: *mut *mut c_void) -> i32 {
            SUCCESS
        }

        pub(super) unsafe extern "C" fn alloc(
            start: *mut *mut c_void,
            length: usize,
            _: u32,
        ) -> i32 {
            let block = vec![0u64; length.div_ceil(8) + 1].into_boxed_slice();
            let words = block.len() as u64;
            let block = Box::into_raw(block).cast::<u64>();
            // SAFETY: the length is kept in front of the memory that is returned.
            unsafe {
                *block = words;
                *start = block.add(1).cast();
            }
            SUCCESS
        }

        pub(super) unsafe extern "C" fn free(start: *mut c_void) -> i32 {
            // SAFETY: from `alloc`.
            unsafe {
                let block = start.cast::<u64>().sub(1);
                let words = *block as usize;
                drop(Box::from_raw(ptr::slice_from_raw_parts_mut(block, words)));
            }
            SUCCESS
        }

        pub(super) unsafe extern "C" fn down(to: *mut c_void, from: u64, bytes: usize) -> i32 {
            // SAFETY: as the driver's contract has it.
            unsafe { ptr::copy_nonoverlapping(from as *const u8, to.cast(), bytes) };
            SUCCESS
        }

        pub(super) unsafe extern "C" fn up(to: u64, from: *const c_void, bytes: usize) -> i32 {
            // SAFETY: as the driver's contract has it.
            unsafe { ptr::copy_nonoverlapping(from.cast(), to as *mut u8, bytes) };
            SUCCESS
        }

        pub(super) unsafe extern "C" fn text(status: i32, text: *mut *const c_char) -> i32 {
            // SAFETY: as the driver's contract has it.
            unsafe { *text = c"invalid device ordinal".as_ptr() };
            i32::from(status != 101)
        }
    }

    fn fake_driver() -> Driver {
        let calls = Calls {
            cuInit: fake_driver::init,
            cuDeviceGet: fake_driver::device,
            cuDevicePrimaryCtxRetain: fake_driver::retain,
            cuDevicePrimaryCtxRelease_v2: fake_driver::release,
            cuCtxPushCurrent_v2: fake_driver::push,
            cuCtxPopCurrent_v2: fake_driver::pop,
            cuMemHostAlloc: fake_driver::alloc,
            cuMemFreeHost: fake_driver::free,
            cuMemcpyDtoH_v2: fake_driver::down,
            cuMemcpyHtoD_v2: fake_driver::up,
            cuGetErrorString: fake_driver::text,
        };
        Driver { calls, library: None }
    }

    #[test]
    fn staged_operation_copies_with_a_fake_driver() {
        run_ranks(3, &TransportKind::SharedMemory, |group| {
            let cuda = Cuda::with(fake_driver(), 0).unwrap();
            let sum = Reduction::of(DataType::Int64, Op::Sum);
            for count in [1usize, 1000, 10] {
                let mut on_gpu = vec![group.rank() as i64; count];
                let address = on_gpu.as_mut_ptr() as u64;
                // SAFETY: the fake GPU's memory is the vector's, which nothing else uses.
                let done = unsafe {
                    cuda.staged(address, 8 * count, |data| {
                        group.allreduce(data, &sum, &Call::default())
                    })
                };
                done.unwrap();
                assert!(on_gpu.iter().all(|number| *number == 3));
            }
        });
    }

    #[test]
    fn missing_cuda_driver_or_gpu_is_named() {
        let error = Driver::load("libcuda-that-is-not-there.so").map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::System);
        assert!(error.to_string().contains("CUDA buffers need the NVIDIA driver"), "{error}");
        let error = Cuda::with(fake_driver(), 7).map(drop).unwrap_err();
        assert_eq!(error.to_string(), "CUDA: GPU 7: invalid device ordinal");
    }

    #[test]
    #[ignore = "needs a GPU and its driver: run it there with --ignored"]
    fn staged_operation_copies_gpu_memory() {
        const BYTES: usize = 1 << 20;
        let cuda = Cuda::open(0).unwrap();
        let patterns = [7usize, 11].map(|factor| -> Vec<u8> {
            (0..BYTES).map(|i| (i.wrapping_mul(factor) >> 3) as u8).collect()
        });
        let buffers = [GpuBuffer::new(&cuda, BYTES), GpuBuffer::new(&cuda, BYTES)];
        for (buffer, pattern) in buffers.iter().zip(&patterns) {
            // SAFETY: the buffer has as many bytes, and nothing else uses it.
            let written = unsafe {
                cuda.staged(buffer.address, BYTES, |data| {
                    data.copy_from_slice(pattern);
                    Ok(())
                })
            };
            written.unwrap();
        }
        // The staging buffer has the second pattern: the first one can only come from the GPU.
        for (buffer, pattern) in buffers.iter().zip(&patterns) {
            // SAFETY: as above.
            let same = unsafe { cuda.staged(buffer.address, BYTES, |data| Ok(data == pattern)) };
            assert!(same.unwrap());
        }
    }

    /// Memory of a GPU, which only tests allocate.
    struct GpuBuffer<'a> {
        cuda: &'a Cuda,
        address: u64,
    }

    impl<'a> GpuBuffer<'a> {
        fn new(cuda: &'a Cuda, bytes: usize) -> Self {
            let library = cuda.driver.library.as_ref().unwrap();
            let mut address = 0;
            cuda.with_context(|| {
                // SAFETY: this is the function's type in the driver's header; the driver writes an address.
                let status = unsafe {
                    let allocate = library
                        .get::<unsafe extern "C" fn(*mut u64, usize) -> i32>(b"cuMemAlloc_v2\0")
                        .unwrap();
                    allocate(&raw mut address, bytes)
                };
                cuda.driver.check("cuMemAlloc", status)
            })
            .unwrap();
            Self { cuda, address }
        }
    }

    impl Drop for GpuBuffer<'_> {
        fn drop(&mut self) {
            let library = self.cuda.driver.library.as_ref().unwrap();
            let freed = self.cuda.with_context(|| {
                // SAFETY: this is the function's type in the driver's header; the memory is freed once.
                let status = unsafe {
                    let free =
                        library.get::<unsafe extern "C" fn(u64) -> i32>(b"cuMemFree_v2\0").unwrap();
                    free(self.address)
                };
                self.cuda.driver.check("cuMemFree", status)
            });
            assert!(freed.is_ok() || std::thread::panicking());
        }
    }
}
