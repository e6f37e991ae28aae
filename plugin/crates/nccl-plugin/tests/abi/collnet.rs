//! CollNet: all-reduce by reduction servers, which run in the test's process. Each test has a process of its own, since the
//! environment belongs to the process.

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::Duration;
use std::{env, ptr, thread};

use evenkeel_nccl_abi::{
    CollNetV6, CollNetV7, CollNetV8, CollNetV9, CollNetV10, CollNetV11, CollNetV12, HANDLE_SIZE,
    INTERNAL_ERROR, INVALID_ARGUMENT, NcclResult, NetV6, NetV7, NetV8, NetV9, NetV10, NetV11,
    NetV12, REMOTE_ERROR, SUCCESS,
};
use evenkeel_reduction_server::{Server, ServerOptions};
use evenkeel_transport::{NullLog, Settings};

use crate::harness::{
    Net, Opaque, VERSIONS, in_rdma_lab, log_lines, logger, run_in_child_process, until,
};

const FLOAT32: c_int = 7;
const SUM: c_int = 0;

/// Starts a reduction server; in the RDMA lab, at the lab's other port.
fn server() -> Server {
    let tcp = [("NCCL_SOCKET_IFNAME", "lo")];
    let rdma = [("EVENKEEL_TRANSPORT", "rdma"), ("NCCL_IB_HCA", "=rxe1")];
    let (given, listen) = match in_rdma_lab() {
        true => (&rdma[..], "10.77.0.2:0"),
        false => (&tcp[..], "127.0.0.1:0"),
    };
    let settings = Settings::from_lookup(|name| {
        let of_that_name = given.iter().find(|(other, _)| *other == name);
        of_that_name.map(|(_, value)| (*value).to_owned())
    });
    let options = ServerOptions {
        listen: listen.parse().unwrap(),
        metrics: None,
        memory: 64 << 20,
        timeout: Duration::from_secs(30),
        threads: 1,
        upstream: vec![],
        piece: evenkeel_reduction_server::PIECE_BYTES,
        timeline: None,
    };
    Server::start(settings.unwrap(), &options, Arc::new(NullLog)).unwrap()
}

/// Sets the servers in the environment. The plugin must not be loaded yet.
fn set_servers(servers: &[&Server]) {
    let names: Vec<String> = servers.iter().map(|server| server.address().to_string()).collect();
    // SAFETY: the servers' threads do not read the environment, and there are no others yet.
    unsafe { env::set_var("EVENKEEL_REDUCTION_SERVERS", names.join(",")) };
}

/// A CollNet table, beside the network's table of the same version, as NCCL initializes them.
struct CollNet {
    net: Net,
    context: Opaque,
}

/// Calls a function of the table with the arguments of its version.
macro_rules! call {
    ($it:expr, $slot:ident: $([$($version:literal $table:ty),+] $arguments:tt),+ $(,)?) => {
        match $it.net.version {
            $($($version => ($it.table::<$table>().$slot.unwrap())$arguments,)+)+
            other => panic!("no version {other}"),
        }
    };
}

/// Calls a function that has the same arguments in all versions.
macro_rules! call_any {
    ($it:expr, $slot:ident $arguments:tt) => {
        call!($it, $slot: [
            6 CollNetV6, 7 CollNetV7, 8 CollNetV8, 9 CollNetV9, 10 CollNetV10, 11 CollNetV11,
            12 CollNetV12
        ] $arguments)
    };
}

fn check(result: NcclResult) -> Result<(), NcclResult> {
    if result == SUCCESS { Ok(()) } else { Err(result) }
}

impl CollNet {
    fn init(version: u32) -> Self {
        let net = Net::init(version, 0xc011).unwrap();
        let mut this = Self { net, context: Opaque::NULL };
        let (mut context, logger) = (ptr::null_mut(), Some(logger()));
        // SAFETY: the arguments are those of NCCL's header of the version.
        let result = unsafe {
            call!(this, init:
                [6 CollNetV6, 7 CollNetV7, 8 CollNetV8, 9 CollNetV9, 10 CollNetV10] (logger),
                [11 CollNetV11, 12 CollNetV12] (&mut context, 0xc011, logger),
            )
        };
        assert_eq!(result, SUCCESS);
        this.context = Opaque(context);
        this
    }

    /// The table, which must be of the type of this version.
    fn table<T>(&self) -> &T {
        let symbol = format!("ncclCollNetPlugin_v{}\0", self.net.version);
        // SAFETY: the symbol of a version is a static table of that version's type.
        unsafe { &**self.net.library.get::<*const T>(symbol.as_bytes()).expect("the table") }
    }

    fn devices(&self) -> c_int {
        let mut count = -1;
        // SAFETY: a place for the number is passed.
        assert_eq!(unsafe { call_any!(self, devices(&mut count)) }, SUCCESS);
        count
    }

    /// Each device must have the same properties in both tables.
    fn has_properties_of_net(&self) {
        macro_rules! compare {
            ($($version:literal $coll:ident $net:ident),+) => {
                match self.net.version {
                    $($version => for device in 0..self.devices() {
                        let get = self.table::<$coll>().get_properties.unwrap();
                        let as_net = self.net.table::<$net>().get_properties.unwrap();
                        let (mut ours, mut theirs) = (MaybeUninit::uninit(), MaybeUninit::uninit());
                        // SAFETY: places for the properties are passed, and they are used only if written.
                        let (ours, theirs) = unsafe {
                            assert_eq!(get(device, ours.as_mut_ptr()), SUCCESS);
                            assert_eq!(as_net(device, theirs.as_mut_ptr()), SUCCESS);
                            (ours.assume_init(), theirs.assume_init())
                        };
                        assert_eq!(format!("{ours:?}"), format!("{theirs:?}"));
                    })+
                    version => panic!("version {version}"),
                }
            };
        }
        compare!(
            6 CollNetV6 NetV6, 7 CollNetV7 NetV7, 8 CollNetV8 NetV8, 9 CollNetV9 NetV9,
            10 CollNetV10 NetV10, 11 CollNetV11 NetV11, 12 CollNetV12 NetV12
        );
    }

    fn supports(&self, kind: c_int, op: c_int) -> bool {
        let mut supported = -1;
        // SAFETY: a place for the answer is passed.
        assert_eq!(unsafe { call_any!(self, reduce_support(kind, op, &mut supported)) }, SUCCESS);
        assert!(supported == 0 || supported == 1);
        supported == 1
    }

    fn listen(&self) -> (Opaque, [u8; HANDLE_SIZE]) {
        let mut comm = ptr::null_mut();
        let mut handle = [0xaa; HANDLE_SIZE];
        let place: *mut c_void = handle.as_mut_ptr().cast();
        // SAFETY: the handle has room, the context is that of the table.
        let result = unsafe {
            call!(self, listen:
                [6 CollNetV6, 7 CollNetV7, 8 CollNetV8, 9 CollNetV9, 10 CollNetV10]
                    (0, place, &mut comm),
                [11 CollNetV11, 12 CollNetV12] (self.context.0, 0, place, &mut comm),
            )
        };
        assert_eq!(result, SUCCESS);
        (Opaque(comm), handle)
    }

    fn connect(
        &self,
        handles: &[[u8; HANDLE_SIZE]],
        rank: usize,
        listener: Opaque,
    ) -> Result<Opaque, NcclResult> {
        let mut handles = handles.to_vec();
        let mut pointers: Vec<*mut c_void> =
            handles.iter_mut().map(|handle| handle.as_mut_ptr().cast()).collect();
        let (ranks, rank) = (pointers.len() as c_int, rank as c_int);
        let mut comm = ptr::dangling_mut();
        // SAFETY: there is a handle for each rank, and the listener is open.
        let result = unsafe {
            call_any!(self, connect(pointers.as_mut_ptr(), ranks, rank, listener.0, &mut comm))
        };
        // NCCL continues without servers if there is no comm.
        assert_eq!(comm.is_null(), result != SUCCESS);
        check(result)?;
        Ok(Opaque(comm))
    }

    /// # Safety
    /// As NCCL: the memory is the plugin's until the request is reported or the comm is closed.
    unsafe fn all_reduce(
        &self,
        comm: Opaque,
        from: &[f32],
        to: &mut [f32],
    ) -> Result<Option<Opaque>, NcclResult> {
        let (count, none) = (from.len(), ptr::null_mut());
        let (send, recv) = (from.as_ptr().cast_mut().cast(), to.as_mut_ptr().cast());
        let mut request = ptr::null_mut();
        // SAFETY: passed on to the caller.
        check(unsafe {
            call!(self, iallreduce:
                [6 CollNetV6, 7 CollNetV7, 8 CollNetV8]
                    (comm.0, send, recv, count as c_int, FLOAT32, SUM, none, none, &mut request),
                [9 CollNetV9, 10 CollNetV10, 11 CollNetV11, 12 CollNetV12]
                    (comm.0, send, recv, count, FLOAT32, SUM, none, none, &mut request),
            )
        })?;
        Ok((!request.is_null()).then_some(Opaque(request)))
    }

    fn test(&self, request: Opaque) -> Result<Option<usize>, NcclResult> {
        let (mut done, mut size) = (-1, -1);
        // SAFETY: the request is one of an open comm.
        check(unsafe { call_any!(self, test(request.0, &mut done, &mut size)) })?;
        Ok((done == 1).then(|| usize::try_from(size).expect("size of a finished request")))
    }

    fn close(&self, comm: Opaque, listener: Opaque) {
        // SAFETY: both are open.
        unsafe {
            assert_eq!(call_any!(self, close_coll(comm.0)), SUCCESS);
            assert_eq!(call_any!(self, close_listen(listener.0)), SUCCESS);
        }
    }

    fn finalize(mut self) {
        let result = match self.net.version {
            // SAFETY: the context came from init.
            11 => unsafe { (self.table::<CollNetV11>().finalize.unwrap())(self.context.0) },
            // SAFETY: the context came from init.
            12 => unsafe { (self.table::<CollNetV12>().finalize.unwrap())(self.context.0) },
            _ => SUCCESS,
        };
        assert_eq!(result, SUCCESS);
        self.net.finalize();
    }
}

#[test]
fn all_reduce_in_every_version() {
    run_in_child_process("collnet::child_versions", &[("EVENKEEL_FLOWS", "1")]);
}

#[test]
#[ignore = "part of another test"]
fn child_versions() {
    let servers = [server(), server()];
    set_servers(&servers.each_ref());
    for version in VERSIONS {
        let coll = CollNet::init(version);
        assert_eq!(coll.devices(), coll.net.devices());
        coll.has_properties_of_net();
        let listeners: Vec<_> = (0..3).map(|_| coll.listen()).collect();
        let handles: Vec<_> = listeners.iter().map(|(_, handle)| *handle).collect();
        thread::scope(|scope| {
            for (rank, (listener, _)) in listeners.iter().enumerate() {
                let (coll, handles, listener) = (&coll, &handles, *listener);
                scope.spawn(move || {
                    let comm = coll.connect(handles, rank, listener).unwrap_or_else(|code| {
                        panic!("connect gave {code}; the log: {:?}", log_lines(""))
                    });
                    for count in [1, 1000, 300_000] {
                        let of = |rank: usize, i: usize| (i % 1000 * (rank + 1)) as f32;
                        let from: Vec<f32> = (0..count).map(|i| of(rank, i)).collect();
                        let mut to = vec![f32::NAN; count];
                        // SAFETY: both live until the request is finished.
                        let request =
                            unsafe { coll.all_reduce(comm, &from, &mut to) }.unwrap().unwrap();
                        let done = until("a sum", || coll.test(request).transpose()).unwrap();
                        assert_eq!(done, Ok(count * 4));
                        let sum = |i| of(0, i) + of(1, i) + of(2, i);
                        assert!(to.iter().enumerate().all(|(i, got)| *got == sum(i)), "v{version}");
                    }
                    coll.close(comm, listener);
                });
            }
        });
        coll.finalize();
    }
    assert!(log_lines("joined 2 reduction servers").len() >= VERSIONS.len() * 3);
}

#[test]
fn requests_are_limited() {
    run_in_child_process("collnet::child_full", &[]);
}

#[test]
#[ignore = "part of another test"]
fn child_full() {
    let server = server();
    set_servers(&[&server]);
    let coll = CollNet::init(12);
    let (listener, handle) = coll.listen();
    let comm = coll.connect(&[handle], 0, listener).unwrap();
    let from = vec![1.0; 100_000];
    let mut to = vec![vec![0.0; from.len()]; 40];
    let mut requests = vec![];
    for to in &mut to {
        // SAFETY: all live until the comm is closed.
        match unsafe { coll.all_reduce(comm, &from, to) }.unwrap() {
            Some(request) => requests.push(request),
            None => break,
        }
    }
    assert_eq!(requests.len(), 32);
    for request in &requests {
        let done = until("a sum", || coll.test(*request).transpose()).unwrap();
        assert_eq!(done, Ok(400_000));
    }
    assert_eq!(coll.test(requests[0]), Err(INTERNAL_ERROR), "it is finished");
    assert!(to[..32].iter().all(|to| *to == from));
    // With operations in flight.
    for to in &mut to[..3] {
        // SAFETY: as above.
        assert!(unsafe { coll.all_reduce(comm, &from, to) }.unwrap().is_some());
    }
    coll.close(comm, listener);
    coll.finalize();
}

#[test]
fn results_are_reported_after_ten_tests() {
    run_in_child_process("collnet::child_spaced", &[]);
}

#[test]
#[ignore = "part of another test"]
fn child_spaced() {
    let server = server();
    set_servers(&[&server]);
    let coll = CollNet::init(6);
    let (listener, handle) = coll.listen();
    let comm = coll.connect(&[handle], 0, listener).unwrap();
    let from = vec![1.0; 1000];
    let mut to = vec![vec![0.0; from.len()]; 2];
    let mut requests = to.iter_mut().map(|to| {
        // SAFETY: both live until the request is finished.
        unsafe { coll.all_reduce(comm, &from, to) }.unwrap().unwrap()
    });
    let (first, second) = (requests.next().unwrap(), requests.next().unwrap());
    until("the second sum", || coll.test(second).transpose()).unwrap().unwrap();
    // So the first is complete, too.
    let early = (1..).find(|_| coll.test(first).unwrap().is_some());
    assert_eq!(early, Some(10), "number of tests until it is reported");
    coll.close(comm, listener);
    coll.finalize();
}

#[test]
fn data_types_and_reductions_match_the_kernels() {
    run_in_child_process("collnet::child_support", &[]);
}

#[test]
#[ignore = "part of another test"]
fn child_support() {
    let server = server();
    set_servers(&[&server]);
    let coll = CollNet::init(12);
    for kind in 0..12 {
        assert!((0..4).all(|op| coll.supports(kind, op)));
        // An average reaches the network as a sum.
        assert!(!coll.supports(kind, 4));
    }
    assert!(!coll.supports(12, SUM) && !coll.supports(-1, SUM) && !coll.supports(FLOAT32, -1));
    let (mut request, none) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: what is null or unknown must be refused before anything is read.
    let result = unsafe {
        let table = coll.table::<CollNetV12>();
        assert_eq!((table.iflush.unwrap())(none, none, 0, none, &mut request), INTERNAL_ERROR);
        (table.iallreduce.unwrap())(none, none, none, 1, FLOAT32, SUM, none, none, &mut request)
    };
    assert_eq!(result, INVALID_ARGUMENT);
    // SAFETY: every version's table begins with the name.
    let name = unsafe { std::ffi::CStr::from_ptr(*coll.table::<*const c_char>()) };
    assert_eq!(name, coll.net.name());
    coll.finalize();
}

#[test]
fn no_devices_without_servers() {
    run_in_child_process("collnet::child_off", &[]);
}

#[test]
#[ignore = "part of another test"]
fn child_off() {
    for version in VERSIONS {
        let coll = CollNet::init(version);
        assert_eq!(coll.devices(), 0);
        // NCCL 2.28.3 finalizes a context through the table that it gave up for want of devices: a null pointer.
        assert!(coll.context.0.is_null(), "version {version}");
        coll.finalize();
    }
    assert!(log_lines("").iter().all(|line| line.level != 2), "{:?}", log_lines(""));
}

#[test]
fn unreachable_servers_are_one_warning() {
    run_in_child_process(
        "collnet::child_unreachable",
        &[("EVENKEEL_REDUCTION_SERVERS", "127.0.0.1:1"), ("EVENKEEL_REDUCTION_TIMEOUT", "1")],
    );
}

#[test]
#[ignore = "part of another test"]
fn child_unreachable() {
    let coll = CollNet::init(12);
    let (listener, handle) = coll.listen();
    assert_eq!(coll.connect(&[handle, handle], 1, listener), Err(REMOTE_ERROR));
    let warnings: Vec<_> = log_lines("").into_iter().filter(|line| line.level == 2).collect();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    let text = &warnings[0].text;
    assert!(text.contains("127.0.0.1:1") && text.contains("NCCL continues without"), "{text}");
}

#[test]
fn lost_server_is_named_in_the_error() {
    run_in_child_process("collnet::child_lost", &[("EVENKEEL_REDUCTION_TIMEOUT", "5")]);
}

#[test]
#[ignore = "part of another test"]
fn child_lost() {
    let server = server();
    let name = server.address().to_string();
    set_servers(&[&server]);
    let coll = CollNet::init(12);
    let (listener, handle) = coll.listen();
    // The other rank never joins, so that the operation cannot complete.
    let comm = coll.connect(&[handle, handle], 0, listener).unwrap();
    let from = vec![1.0; 100_000];
    let mut to = vec![0.0; from.len()];
    // SAFETY: both live until the comm is closed.
    let request = unsafe { coll.all_reduce(comm, &from, &mut to) }.unwrap().unwrap();
    assert_eq!(coll.test(request), Ok(None));
    drop(server);
    let outcome = until("an error", || coll.test(request).transpose()).unwrap();
    assert_eq!(outcome, Err(REMOTE_ERROR));
    let named = log_lines(&format!("reduction server {name}"));
    assert!(named.iter().any(|line| line.level == 2), "{:?}", log_lines(""));
    coll.close(comm, listener);
    coll.finalize();
}
