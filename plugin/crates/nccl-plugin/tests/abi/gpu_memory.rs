//! Messages in memory that the processor cannot access, such as a GPU's.
//!
//! The tests need no GPU. They register host memory by its address, as a GPU's is, and then protect it from the processor.
//! Devices still read and write it, and any other access ends the process. The kernel's files that show a driver's support
//! for GPU memory are faked in a mount namespace.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::process::Command;
use std::{env, io, ptr};

use evenkeel_nccl_abi::{NetV12, PTR_CUDA, PTR_HOST, SUCCESS};

use crate::harness::{Net, Opaque, VERSIONS, log_lines, pattern, until};

/// Host memory on pages of its own, which can be protected from the processor.
pub(crate) struct ProtectedMemory {
    pub(crate) start: *mut u8,
    pub(crate) bytes: usize,
}

impl ProtectedMemory {
    pub(crate) fn new(bytes: usize) -> Self {
        let (access, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping touches no other memory.
        let start = unsafe { libc::mmap(ptr::null_mut(), bytes, access, kind, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED, "{}", io::Error::last_os_error());
        Self { start: start.cast(), bytes }
    }

    fn open(&self, open: bool) {
        let access = if open { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_NONE };
        // SAFETY: the mapping is this one's, and there is no reference to it: it is read and written by copies.
        assert_eq!(unsafe { libc::mprotect(self.start.cast(), self.bytes, access) }, 0);
    }

    pub(crate) fn fill(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.bytes);
        // SAFETY: they fit; the memory is open when this is called.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.start, bytes.len()) };
    }

    pub(crate) fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes];
        // SAFETY: as above.
        unsafe { ptr::copy_nonoverlapping(self.start, bytes.as_mut_ptr(), self.bytes) };
        bytes
    }
}

impl Drop for ProtectedMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's and given back once.
        unsafe { libc::munmap(self.start.cast(), self.bytes) };
    }
}

#[test]
#[ignore = "runs in the RDMA lab"]
fn offered_where_the_driver_supports_it() {
    run_with_peer_memory("gpu_memory::child", "rdma");
    run_with_peer_memory("gpu_memory::child_auto", "auto");
}

/// Runs a test in a process that sees a driver's support for GPU memory.
fn run_with_peer_memory(test: &str, transport: &str) {
    let script =
        "mount -t tmpfs none /sys/kernel/mm && mkdir -p /sys/kernel/mm/memory_peers/nv_mem &&
        echo 1.0 > /sys/kernel/mm/memory_peers/nv_mem/version && exec \"$0\" \"$@\"";
    let alone = [test, "--exact", "--ignored", "--nocapture"];
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script]).arg(env::current_exe().unwrap()).args(alone);
    command.env("EVENKEEL_TRANSPORT", transport);
    assert!(command.status().unwrap().success());
}

#[test]
#[ignore = "part of another test"]
fn child() {
    for version in VERSIONS {
        let mut net = Net::init(version, 0x6b0).unwrap();
        let (send, recv) = net.pair();
        for (seed, size) in [0, 8, 4096, 4097, 1 << 20].into_iter().enumerate() {
            carry(&net, (send, recv), seed, size);
        }
        net.close_send(send);
        net.close_recv(recv);
        net.finalize();
    }
    assert_eq!(ptr_support(), PTR_HOST | PTR_CUDA);
    assert!(!log_lines("rxe0:1: messages may be in GPU memory: peer memory").is_empty());
    assert!(log_lines("EVENKEEL_TRANSPORT").is_empty(), "{:?}", log_lines("EVENKEEL_TRANSPORT"));
}

/// What the device of a new communicator accepts.
fn ptr_support() -> c_int {
    let net = Net::init(12, 0x6b1).unwrap();
    let mut properties = MaybeUninit::uninit();
    // SAFETY: a place for the properties is passed, and they are used only if written.
    let properties = unsafe {
        let get = net.table::<NetV12>().get_properties.unwrap();
        assert_eq!(get(0, properties.as_mut_ptr()), SUCCESS);
        properties.assume_init()
    };
    properties.ptr_support
}

/// TCP may carry a connection of `auto`, so there is no GPU memory, and a warning says what would change that.
#[test]
#[ignore = "part of another test"]
fn child_auto() {
    assert_eq!(ptr_support(), PTR_HOST);
    let lines = log_lines("set EVENKEEL_TRANSPORT=rdma");
    let [line] = &lines[..] else { panic!("{:?}", log_lines("")) };
    assert!(line.level == 2 && line.text.contains("rxe0:1 (peer memory)"), "{line:?}");
}

/// Two messages of one request, tags out of order, with a flush: as NCCL receives into a GPU's memory.
fn carry(net: &Net, (send, recv): (Opaque, Opaque), seed: usize, size: usize) {
    const TAGS: [c_int; 2] = [5, -7];
    let memory: [ProtectedMemory; 4] =
        std::array::from_fn(|_| ProtectedMemory::new(size.next_multiple_of(4096) + 4096));
    let [from, to] = [&memory[..2], &memory[2..]];
    let all = [(send, &from[0]), (send, &from[1]), (recv, &to[0]), (recv, &to[1])];
    // SAFETY: the memory stays until all is deregistered.
    let register = |(comm, memory): (Opaque, &ProtectedMemory)| unsafe {
        net.register(comm, memory.start, memory.bytes, PTR_CUDA).expect("registered")
    };
    let registrations = all.map(register);
    for (at, from) in from.iter().enumerate() {
        from.fill(&pattern(seed + at, size));
    }
    memory.iter().for_each(|memory| memory.open(false));
    let group = [(to[0].start, size, TAGS[0]), (to[1].start, size + 9, TAGS[1])];
    // SAFETY: the memory stays until the requests are reported.
    let receiving = unsafe { net.irecv_group(recv, &group) }.unwrap().unwrap();
    let mut sending = [None; 2];
    let sending = until("both sends", || {
        // The other tag is posted first.
        for at in [1, 0] {
            if sending[at].is_none() {
                // SAFETY: as above.
                let sent = unsafe { net.isend_tagged(send, from[at].start, size, TAGS[at]) };
                sending[at] = sent.unwrap();
            }
        }
        sending[0].zip(sending[1])
    });
    let received = until("both messages", || net.test_group(receiving).unwrap());
    assert_eq!(received.unwrap(), [size; 2]);
    let flush = net.iflush(recv, &[(to[0].start, size), (to[1].start, size)]).unwrap();
    assert_eq!(flush.is_some(), size > 0, "there is something to flush");
    let (first, second) = sending.unwrap();
    for request in [Some(first), Some(second), flush].into_iter().flatten() {
        net.finish(request).unwrap();
    }
    memory.iter().for_each(|memory| memory.open(true));
    for (at, to) in to.iter().enumerate() {
        let bytes = to.read();
        assert!(bytes[..size] == pattern(seed + at, size), "{size} bytes, message {at}");
        assert!(bytes[size..].iter().all(|byte| *byte == 0), "behind {size} bytes");
    }
    for ((comm, _), registration) in all.into_iter().zip(registrations) {
        net.deregister(comm, registration);
    }
}
