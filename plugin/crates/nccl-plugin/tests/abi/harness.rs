//! Loads the library and calls its tables as NCCL does, version by version.

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::net::SocketAddr;
use std::ops::Range;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};
use std::{env, mem, ptr, thread};

use evenkeel_nccl_abi::{
    CommConfig, HANDLE_SIZE, Logger, NcclResult, NetV6, NetV7, NetV8, NetV9, NetV10, NetV11,
    NetV12, ProfilerCallback, SUCCESS,
};
use evenkeel_testkit::plugin_library;
use evenkeel_transport::HANDLE_BYTES;
use libloading::Library;

/// Long enough for a loaded or emulated machine. It is reached only when something is broken.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(40);
/// All versions, newest first, in NCCL's order.
pub(crate) const VERSIONS: [u32; 7] = [12, 11, 10, 9, 8, 7, 6];

/// The library that Cargo built for these tests.
pub(crate) fn library_path() -> PathBuf {
    let test = env::current_exe().expect("path of the test");
    plugin_library(&test).unwrap_or_else(|error| panic!("{error}"))
}

/// Whether the tests run in the RDMA lab, over RDMA.
pub(crate) fn in_rdma_lab() -> bool {
    env::var_os("EVENKEEL_RDMALAB").is_some()
}

/// Sets the plugin's environment. Must be called first in each test.
pub(crate) fn environment() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let tcp = [
            ("NCCL_SOCKET_IFNAME", "lo"),
            ("EVENKEEL_HANDSHAKE_TIMEOUT", "1"),
            ("EVENKEEL_RAILS", "lo=3"),
        ];
        let rdma = [
            ("EVENKEEL_TRANSPORT", "rdma"),
            ("EVENKEEL_QUEUE_PAIRS", "4"),
            ("NCCL_IB_HCA", "=rxe0"),
            ("EVENKEEL_RAILS", "rxe0=3"),
        ];
        for (name, value) in if in_rdma_lab() { &rdma[..] } else { &tcp[..] } {
            if env::var_os(name).is_none() {
                // SAFETY: every test begins here, so none is past this point and reads the
                // environment; the library is not loaded yet.
                unsafe { env::set_var(name, value) };
            }
        }
    });
}

/// Runs an ignored test in a process of its own, since threads and the environment belong to the process.
pub(crate) fn run_in_child_process(test: &str, environment: &[(&str, &str)]) {
    let output = Command::new(env::current_exe().unwrap())
        .args([test, "--exact", "--ignored", "--nocapture", "--test-threads=1"])
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{output:?}");
}

/// A line of the plugin's log.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub(crate) level: c_int,
    pub(crate) text: String,
}

static LOG: Mutex<Vec<Line>> = Mutex::new(Vec::new());

/// The lines so far that contain `text`.
pub(crate) fn log_lines(text: &str) -> Vec<Line> {
    let log = LOG.lock().unwrap_or_else(PoisonError::into_inner);
    log.iter().filter(|line| line.text.contains(text)).cloned().collect()
}

unsafe extern "C" fn log(
    level: c_int,
    _subsystems: c_ulong,
    _file: *const c_char,
    _line: c_int,
    format: *const c_char,
    text: *const c_char,
) {
    // SAFETY: the plugin passes strings that end in a zero byte.
    let (format, text) = unsafe { (CStr::from_ptr(format), CStr::from_ptr(text)) };
    assert_eq!(format, c"%s");
    let text = text.to_string_lossy().into_owned();
    LOG.lock().unwrap_or_else(PoisonError::into_inner).push(Line { level, text });
}

pub(crate) fn logger() -> Logger {
    type Fixed =
        unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, *const c_char);
    // SAFETY: on Linux, a variadic call with these arguments passes them like a plain one, and
    // Rust cannot define variadic functions.
    unsafe { mem::transmute::<Fixed, Logger>(log) }
}

/// NCCL's opaque pointers. They may move between threads as NCCL moves them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Opaque(pub(crate) *mut c_void);
// SAFETY: the plugin's objects may be used from any thread, one at a time.
unsafe impl Send for Opaque {}
// SAFETY: through a shared reference the pointer can only be copied.
unsafe impl Sync for Opaque {}

impl Opaque {
    pub(crate) const NULL: Self = Self(ptr::null_mut());

    fn some(self) -> Option<Self> {
        (!self.0.is_null()).then_some(self)
    }
}

/// The result of a call that may not be ready.
pub(crate) type Polled = Result<Option<Opaque>, NcclResult>;

/// A handle without alignment, like NCCL's.
#[derive(Clone, Copy)]
pub(crate) struct Handle(pub(crate) [u8; HANDLE_SIZE]);

impl Handle {
    /// The listener's address.
    pub(crate) fn address(&self) -> SocketAddr {
        let mut bytes = [0; HANDLE_BYTES];
        bytes.copy_from_slice(&self.0[..HANDLE_BYTES]);
        let handle = evenkeel_transport::Handle::decode(&bytes).expect("a handle");
        SocketAddr::new(handle.addresses[0], handle.port)
    }
}

/// A loaded table of some version.
pub(crate) struct Net {
    pub(crate) version: u32,
    pub(crate) library: Library,
    /// The communicator's context from v11 on.
    pub(crate) context: Opaque,
    /// The communicator's configuration, from v10 on.
    config: Option<CommConfig>,
    /// The device that connections are opened from.
    pub(crate) from: c_int,
    /// The device that listeners are on.
    pub(crate) on: c_int,
    /// The profiler's handle that goes with each message.
    pub(crate) profile: Opaque,
    registrations: Mutex<Vec<Registered>>,
}

/// Registered memory.
struct Registered {
    comm: Opaque,
    memory: Range<usize>,
    mhandle: Opaque,
}

fn check(result: NcclResult) -> Result<(), NcclResult> {
    if result == SUCCESS { Ok(()) } else { Err(result) }
}

/// Calls a function of the table with the arguments of its version.
macro_rules! call {
    ($net:expr, $slot:ident: $([$($version:literal $table:ty),+] $arguments:tt),+ $(,)?) => {
        match $net.version {
            $($($version => ($net.table::<$table>().$slot.unwrap())$arguments,)+)+
            other => panic!("no version {other}"),
        }
    };
}

/// Calls a function that has the same arguments in all versions.
macro_rules! call_any {
    ($net:expr, $slot:ident $arguments:tt) => {
        call!($net, $slot: [
            6 NetV6, 7 NetV7, 8 NetV8, 9 NetV9, 10 NetV10, 11 NetV11, 12 NetV12
        ] $arguments)
    };
}

impl Net {
    /// Loads the library and initializes one of its tables; `communicator` marks log lines from
    /// v11 on.
    pub(crate) fn init(version: u32, communicator: u64) -> Result<Self, NcclResult> {
        Self::init_with(version, communicator, None)
    }

    /// The same for a communicator with a configuration.
    pub(crate) fn init_with(
        version: u32,
        communicator: u64,
        config: Option<CommConfig>,
    ) -> Result<Self, NcclResult> {
        Self::init_profiled(version, communicator, config, None)
    }

    /// The same with NCCL's callback for profilers.
    pub(crate) fn init_profiled(
        version: u32,
        communicator: u64,
        config: Option<CommConfig>,
        profiler: Option<ProfilerCallback>,
    ) -> Result<Self, NcclResult> {
        environment();
        // SAFETY: the library runs no code when it is loaded.
        let library = unsafe { Library::new(library_path()) }.expect("load the plugin");
        let mut net = Self {
            version,
            library,
            context: Opaque::NULL,
            config,
            from: 0,
            on: 0,
            profile: Opaque::NULL,
            registrations: Mutex::default(),
        };
        let mut place = config;
        let config = place.as_mut().map_or(ptr::null_mut(), ptr::from_mut);
        let (mut context, logger) = (ptr::null_mut(), Some(logger()));
        // SAFETY: the arguments are those of NCCL's header of the version.
        check(unsafe {
            call!(net, init:
                [6 NetV6, 7 NetV7, 8 NetV8, 9 NetV9] (logger),
                [10 NetV10] (logger, profiler),
                [11 NetV11, 12 NetV12] (&mut context, communicator, config, logger, profiler),
            )
        })?;
        net.context = Opaque(context);
        Ok(net)
    }

    /// The table, which must be of the type of this version.
    pub(crate) fn table<T>(&self) -> &T {
        let symbol = format!("ncclNetPlugin_v{}\0", self.version);
        // SAFETY: the symbol of a version is a static table of that version's type.
        unsafe { &**self.library.get::<*const T>(symbol.as_bytes()).expect("the table") }
    }

    pub(crate) fn finalize(&mut self) {
        let context = mem::replace(&mut self.context, Opaque::NULL).0;
        let result = match self.version {
            // SAFETY: the context came from init.
            11 => unsafe { (self.table::<NetV11>().finalize.unwrap())(context) },
            // SAFETY: the context came from init.
            12 => unsafe { (self.table::<NetV12>().finalize.unwrap())(context) },
            _ => SUCCESS,
        };
        assert_eq!(result, SUCCESS);
    }

    /// The communicator's context, from v11 on.
    pub(crate) fn context(&self) -> *mut c_void {
        self.context.0
    }

    pub(crate) fn name(&self) -> &CStr {
        // Every version's table begins with it.
        // SAFETY: the name ends in a zero byte and lives as long as the library.
        unsafe { CStr::from_ptr(*self.table::<*const c_char>()) }
    }

    pub(crate) fn devices(&self) -> c_int {
        let mut count = -1;
        // SAFETY: a place for the number is passed.
        assert_eq!(unsafe { call_any!(self, devices(&mut count)) }, SUCCESS);
        count
    }

    pub(crate) fn listen(&self) -> (Opaque, Handle) {
        let mut comm = ptr::null_mut();
        let mut handle = Handle([0xaa; HANDLE_SIZE]);
        let (context, place) = (self.context.0, handle.0.as_mut_ptr().cast());
        // SAFETY: the handle has room, the context is that of the table.
        let result = unsafe {
            call!(self, listen:
                [6 NetV6, 7 NetV7, 8 NetV8, 9 NetV9, 10 NetV10] (self.on, place, &mut comm),
                [11 NetV11, 12 NetV12] (context, self.on, place, &mut comm),
            )
        };
        assert_eq!(result, SUCCESS);
        (Opaque(comm), handle)
    }

    pub(crate) fn poll_connect(&self, handle: &mut Handle) -> Polled {
        let (mut comm, mut offload) = (ptr::null_mut(), ptr::null_mut());
        let mut place = self.config;
        let config = place.as_mut().map_or(ptr::null_mut(), ptr::from_mut);
        let (context, from) = (self.context.0, self.from);
        let handle = handle.0.as_mut_ptr().cast();
        // SAFETY: the same handle is passed on each call, the context is that of the table.
        check(unsafe {
            call!(self, connect:
                [6 NetV6] (from, handle, &mut comm),
                [7 NetV7, 8 NetV8, 9 NetV9] (from, handle, &mut comm, &mut offload),
                [10 NetV10] (from, config, handle, &mut comm, &mut offload),
                [11 NetV11, 12 NetV12] (context, from, handle, &mut comm, &mut offload),
            )
        })?;
        Ok(Opaque(comm).some())
    }

    pub(crate) fn poll_accept(&self, listener: Opaque) -> Polled {
        let (mut comm, mut offload) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the listener is open.
        check(unsafe {
            call!(self, accept:
                [6 NetV6] (listener.0, &mut comm),
                [7 NetV7, 8 NetV8, 9 NetV9, 10 NetV10, 11 NetV11, 12 NetV12]
                    (listener.0, &mut comm, &mut offload),
            )
        })?;
        Ok(Opaque(comm).some())
    }

    /// # Safety
    /// As NCCL: the memory stays as it is until the request is reported or the comm is closed.
    pub(crate) unsafe fn isend(&self, comm: Opaque, data: *const u8, size: usize) -> Polled {
        // SAFETY: passed on to the caller.
        unsafe { self.isend_tagged(comm, data, size, 0) }
    }

    /// # Safety
    /// As [`Net::isend`].
    pub(crate) unsafe fn isend_tagged(
        &self,
        comm: Opaque,
        data: *const u8,
        size: usize,
        tag: c_int,
    ) -> Polled {
        let (mut request, profile) = (ptr::null_mut(), self.profile.0);
        let mhandle = self.mhandle(comm, data, size);
        let (data, int) = (data.cast_mut().cast(), size as c_int);
        // SAFETY: passed on to the caller.
        check(unsafe {
            call!(self, isend:
                [6 NetV6, 7 NetV7, 8 NetV8] (comm.0, data, int, tag, mhandle, &mut request),
                [9 NetV9] (comm.0, data, size, tag, mhandle, &mut request),
                [10 NetV10, 11 NetV11, 12 NetV12]
                    (comm.0, data, size, tag, mhandle, profile, &mut request),
            )
        })?;
        Ok(Opaque(request).some())
    }

    /// # Safety
    /// As NCCL: the memory is the plugin's until the request is reported or the comm is closed.
    pub(crate) unsafe fn irecv(&self, comm: Opaque, data: *mut u8, size: usize) -> Polled {
        // SAFETY: passed on to the caller.
        unsafe { self.irecv_group(comm, &[(data, size, 0)]) }
    }

    /// Posts buffers, each with its size and tag.
    ///
    /// # Safety
    /// As [`Net::irecv`].
    pub(crate) unsafe fn irecv_group(
        &self,
        comm: Opaque,
        group: &[(*mut u8, usize, c_int)],
    ) -> Polled {
        // NCCL's hint that it does not need the completion. It must be overwritten.
        let mut request = ptr::without_provenance_mut(1);
        let count = group.len() as c_int;
        let mut data: Vec<*mut c_void> = group.iter().map(|(data, ..)| data.cast()).collect();
        let mut size: Vec<usize> = group.iter().map(|(_, size, _)| *size).collect();
        let mut int: Vec<c_int> = size.iter().map(|size| *size as c_int).collect();
        let mut tag: Vec<c_int> = group.iter().map(|(.., tag)| *tag).collect();
        let mhandle = group.iter().map(|(data, size, _)| self.mhandle(comm, *data, *size));
        let mut mhandle: Vec<*mut c_void> = mhandle.collect();
        let mut profile = vec![self.profile.0; group.len()];
        let (data, size, int, tag) =
            (data.as_mut_ptr(), size.as_mut_ptr(), int.as_mut_ptr(), tag.as_mut_ptr());
        let (mhandle, profile) = (mhandle.as_mut_ptr(), profile.as_mut_ptr());
        // SAFETY: passed on to the caller.
        check(unsafe {
            call!(self, irecv:
                [6 NetV6, 7 NetV7, 8 NetV8]
                    (comm.0, count, data, int, tag, mhandle, &mut request),
                [9 NetV9] (comm.0, count, data, size, tag, mhandle, &mut request),
                [10 NetV10, 11 NetV11, 12 NetV12]
                    (comm.0, count, data, size, tag, mhandle, profile, &mut request),
            )
        })?;
        Ok(Opaque(request).some())
    }

    /// Registers memory of a type, which ends with [`Net::deregister`].
    ///
    /// # Safety
    /// As NCCL: the memory stays until then.
    pub(crate) unsafe fn register(
        &self,
        comm: Opaque,
        data: *mut u8,
        size: usize,
        kind: c_int,
    ) -> Result<Opaque, NcclResult> {
        let mut mhandle = ptr::null_mut();
        let memory = data.addr()..data.addr() + size;
        let (data, int) = (data.cast(), size as c_int);
        // SAFETY: passed on to the caller.
        check(unsafe {
            call!(self, reg_mr:
                [6 NetV6, 7 NetV7] (comm.0, data, int, kind, &mut mhandle),
                [8 NetV8, 9 NetV9, 10 NetV10, 11 NetV11, 12 NetV12]
                    (comm.0, data, size, kind, &mut mhandle),
            )
        })?;
        let mhandle = Opaque(mhandle);
        self.registrations().push(Registered { comm, memory, mhandle });
        Ok(mhandle)
    }

    fn registrations(&self) -> MutexGuard<'_, Vec<Registered>> {
        self.registrations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The handle of registered memory, which NCCL passes with each message there; null for other memory.
    fn mhandle(&self, comm: Opaque, data: *const u8, size: usize) -> *mut c_void {
        let (start, end) = (data.addr(), data.addr() + size);
        let registrations = self.registrations();
        let found = registrations.iter().find(|known| {
            known.comm == comm && known.memory.start <= start && end <= known.memory.end
        });
        found.map_or(ptr::null_mut(), |known| known.mhandle.0)
    }

    pub(crate) fn deregister(&self, comm: Opaque, mhandle: Opaque) {
        self.registrations().retain(|known| known.mhandle != mhandle || known.comm != comm);
        // SAFETY: it was made with this comm, which is open.
        assert_eq!(unsafe { call_any!(self, dereg_mr(comm.0, mhandle.0)) }, SUCCESS);
    }

    /// Flushes received messages in registered memory.
    pub(crate) fn iflush(&self, comm: Opaque, group: &[(*mut u8, usize)]) -> Polled {
        let mut request = ptr::without_provenance_mut(1);
        let count = group.len() as c_int;
        let mut data: Vec<*mut c_void> = group.iter().map(|(data, _)| data.cast()).collect();
        let mut sizes: Vec<c_int> = group.iter().map(|(_, size)| *size as c_int).collect();
        let mhandle = group.iter().map(|(data, size)| self.mhandle(comm, *data, *size));
        let mut mhandle: Vec<*mut c_void> = mhandle.collect();
        let (data, sizes) = (data.as_mut_ptr(), sizes.as_mut_ptr());
        let mhandle = mhandle.as_mut_ptr();
        // SAFETY: the comm is open and the arrays have as many elements; the memory is only read.
        check(unsafe {
            call_any!(self, iflush(comm.0, count, data, sizes, mhandle, &mut request))
        })?;
        Ok(Opaque(request).some())
    }

    pub(crate) fn test(&self, request: Opaque) -> Result<Option<usize>, NcclResult> {
        let sizes = self.test_group(request)?;
        Ok(sizes.map(|sizes| *sizes.first().expect("size of a finished request")))
    }

    /// The sizes of a group's messages once all are received.
    pub(crate) fn test_group(&self, request: Opaque) -> Result<Option<Vec<usize>>, NcclResult> {
        let (mut done, mut sizes) = (-1, [-1; 9]);
        // SAFETY: the request is one of an open comm, and there is room for the largest group's sizes.
        check(unsafe { call_any!(self, test(request.0, &mut done, sizes.as_mut_ptr())) })?;
        assert!(done == 0 || done == 1);
        let sizes = sizes.iter().map_while(|size| usize::try_from(*size).ok()).collect();
        Ok((done == 1).then_some(sizes))
    }

    pub(crate) fn close_send(&self, comm: Opaque) {
        // SAFETY: the comm is open.
        assert_eq!(unsafe { call_any!(self, close_send(comm.0)) }, SUCCESS);
    }

    pub(crate) fn close_recv(&self, comm: Opaque) {
        // SAFETY: the comm is open.
        assert_eq!(unsafe { call_any!(self, close_recv(comm.0)) }, SUCCESS);
    }

    pub(crate) fn close_listen(&self, comm: Opaque) {
        // SAFETY: the listener is open.
        assert_eq!(unsafe { call_any!(self, close_listen(comm.0)) }, SUCCESS);
    }

    /// Connects to itself: the sending and the receiving comm.
    pub(crate) fn pair(&self) -> (Opaque, Opaque) {
        self.pair_at().0
    }

    /// Connects to itself: the sending and the receiving comm, and the listener's address.
    pub(crate) fn pair_at(&self) -> ((Opaque, Opaque), SocketAddr) {
        let (listener, mut handle) = self.listen();
        let address = handle.address();
        let pair = self.connect_to(listener, &mut handle);
        self.close_listen(listener);
        (pair, address)
    }

    /// Connects to its own listener by a handle: the sending and the receiving comm.
    pub(crate) fn connect_to(&self, listener: Opaque, handle: &mut Handle) -> (Opaque, Opaque) {
        let (mut send, mut recv) = (None, None);
        until("a connection", || {
            send = send.or_else(|| {
                self.poll_connect(handle).unwrap_or_else(|code| {
                    panic!("connect gave {code}; the log: {:?}", log_lines("connect"))
                })
            });
            recv = recv.or_else(|| self.poll_accept(listener).expect("accept"));
            send.zip(recv)
        })
        .expect("a connection")
    }

    /// Waits for a request.
    pub(crate) fn finish(&self, request: Opaque) -> Result<usize, NcclResult> {
        until("a request", || self.test(request).transpose()).expect("a request in time")
    }
}

/// Polls until there is a result or [`TIMEOUT`] is over.
pub(crate) fn until<T>(what: &str, mut poll: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(result) = poll() {
            return Some(result);
        }
        if Instant::now() > deadline {
            eprintln!("waited {TIMEOUT:?} for {what}");
            return None;
        }
        thread::yield_now();
    }
}

/// Bytes that differ between messages and positions.
pub(crate) fn pattern(seed: usize, length: usize) -> Vec<u8> {
    (0..length).map(|at| (at * 31 + seed * 101 + at / 251) as u8).collect()
}
