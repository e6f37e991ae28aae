//! Processes that fork while messages are under way, as a training job does for its data loaders.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::{env, fs, ptr};

use evenkeel_nccl_abi::PTR_HOST;

use crate::gpu_memory::ProtectedMemory;
use crate::harness::{Net, Opaque, pattern, run_in_child_process};

/// Short enough for every way in which a message may go: inline, by a copy, from the memory itself.
const SIZES: [usize; 5] = [8, 300, 4096, 5000, 300_000];
const ROUNDS: usize = 12;

#[test]
fn fork_amid_messages_garbles_nothing() {
    run_in_child_process("fork::child", &[]);
    run_in_child_process("fork::child", &[("RDMAV_FORK_SAFE", "1")]);
}

/// Objects between which the allocator may put others.
fn heap_objects() -> Vec<Vec<u8>> {
    (0..500).map(|at| vec![at as u8; 1000]).collect()
}

#[test]
#[ignore = "part of another test"]
fn child() {
    let mut heap = heap_objects();
    let mut net = Net::init(12, 0xf0).unwrap();
    let (send, recv) = net.pair();
    heap.extend(heap_objects());
    let mut children = Vec::new();
    // As NCCL's, the memory of messages shares no page with other objects, and is registered.
    let memory = || SIZES.map(ProtectedMemory::new);
    let (from, to) = (memory(), memory());
    let all = from.iter().map(|memory| (send, memory)).chain(to.iter().map(|to| (recv, to)));
    // SAFETY: the memory stays until it is deregistered.
    let register = |(comm, memory): (Opaque, &ProtectedMemory)| unsafe {
        (comm, net.register(comm, memory.start, memory.bytes, PTR_HOST).unwrap())
    };
    let registered: Vec<_> = all.map(register).collect();
    for round in 0..ROUNDS {
        let messages = SIZES.map(|size| pattern(round * 7 + size, size));
        from.iter().zip(&messages).for_each(|(memory, message)| memory.fill(message));
        // SAFETY: the memory stays until the requests are finished, and is not used meanwhile.
        let post = |memory: &ProtectedMemory| unsafe {
            net.irecv(recv, memory.start, memory.bytes).unwrap().unwrap()
        };
        let receiving: Vec<_> = to.iter().map(post).collect();
        // SAFETY: as above.
        let start = |memory: &ProtectedMemory| unsafe {
            net.isend(send, memory.start, memory.bytes).unwrap().unwrap()
        };
        let mut sending: Vec<_> = from[..3].iter().map(start).collect();
        if env::var_os("RDMAV_FORK_SAFE").is_none() {
            children_have_all_pages();
        }
        match round {
            2 | 7 => children.push(Child::fork(&mut heap)),
            4 => exec_a_program(),
            _ => {}
        }
        sending.extend(from[3..].iter().map(start));
        for (request, size) in receiving.into_iter().zip(SIZES) {
            assert_eq!(net.finish(request), Ok(size));
        }
        sending.into_iter().for_each(|request| assert!(net.finish(request).is_ok()));
        assert!(to.iter().map(ProtectedMemory::read).eq(messages), "round {round}");
    }
    registered.into_iter().for_each(|(comm, mhandle)| net.deregister(comm, mhandle));
    Child::end_all(&children);
    net.close_send(send);
    net.close_recv(recv);
    net.finalize();
}

/// The kernel, which is new, copies for children what devices use: no page has to be withheld from them (`dc`).
fn children_have_all_pages() {
    let maps = fs::read_to_string("/proc/self/smaps").unwrap();
    let mut mapping = "";
    for line in maps.lines() {
        match line.strip_prefix("VmFlags:") {
            Some(flags) if mapping.contains(" rw-p 00000000 00:00 0 ") => {
                assert!(!flags.split(' ').any(|flag| flag == "dc"), "{mapping}:{flags}");
            }
            Some(_) => {}
            None if line.split(' ').next().is_some_and(|word| !word.ends_with(':')) => {
                mapping = line
            }
            None => {}
        }
    }
}

/// A process that has this one's memory until its pipe is closed, and then uses its heap.
struct Child {
    id: libc::pid_t,
    pipe: libc::c_int,
}

impl Child {
    fn fork(heap: &mut [Vec<u8>]) -> Self {
        let mut ends = [0; 2];
        // SAFETY: there is room for both ends. The child only makes system calls and accesses memory that it has: other
        // threads may have held locks when it was made.
        unsafe {
            assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0);
            let [read, pipe] = ends;
            let id = libc::fork();
            assert!(id >= 0);
            if id == 0 {
                libc::close(pipe);
                let mut byte = 0_u8;
                // Returns when the parent closes its end.
                libc::read(read, ptr::from_mut(&mut byte).cast(), 1);
                for object in heap {
                    let first = object.as_mut_ptr();
                    first.write_volatile(first.read_volatile().wrapping_add(1));
                }
                libc::_exit(0);
            }
            libc::close(read);
            Self { id, pipe }
        }
    }

    /// All pipes are closed first: the later children have those of the earlier ones.
    fn end_all(children: &[Self]) {
        for child in children {
            // SAFETY: the pipe is the child's, and is closed once.
            unsafe { libc::close(child.pipe) };
        }
        for child in children {
            let mut status = -1;
            // SAFETY: the child is this process's, and there is a place for its status.
            assert_eq!(unsafe { libc::waitpid(child.id, &mut status, 0) }, child.id);
            assert_eq!(status, 0, "a child could not use its heap");
        }
    }
}

/// By a fork: without a step before the program starts, the standard library would not make one.
fn exec_a_program() {
    let mut command = Command::new("true");
    // SAFETY: the step does nothing.
    unsafe { command.pre_exec(|| Ok(())) };
    assert!(command.status().unwrap().success());
}
