//! Processes that fork while messages are under way, as a training job does for its data loaders.

use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::{env, fs, ptr};

use evenkeel_nccl_abi::{INVALID_USAGE, PTR_HOST};

use crate::gpu_memory::ProtectedMemory;
use crate::harness::{Net, Opaque, TIMEOUT, pattern, run_in_child_process};

/// Short enough for every way in which a message may go: inline, by a copy, from the memory itself.
const SIZES: [usize; 5] = [8, 300, 4096, 5000, 300_000];
const ROUNDS: usize = 12;

#[test]
fn fork_amid_messages_garbles_nothing() {
    run_in_child_process("fork::child", &[]);
    run_in_child_process("fork::child", &[("RDMAV_FORK_SAFE", "1")]);
}

#[test]
fn forked_child_is_refused_and_leaves_its_parents_connections_alone() {
    run_in_child_process("fork::refusals", &[]);
}

#[test]
#[ignore = "part of another test"]
fn refusals() {
    let mut net = Net::init(12, 0xf1).unwrap();
    let (listener, mut handle) = net.listen();
    let (send, recv) = net.pair();
    let message = pattern(1, 5000);
    let mut buffer = vec![0; message.len()];
    // SAFETY: the memory stays until the request is finished, and is not used meanwhile.
    let request = unsafe { net.irecv(recv, buffer.as_mut_ptr(), buffer.len()) }.unwrap().unwrap();
    let said = stderr_of_child(|| {
        let memory = buffer.as_mut_ptr();
        // SAFETY: as above. Another process has the parent's copy of the memory.
        let results = unsafe {
            [
                Net::init(12, 0xf2).err(),
                net.poll_connect(&mut handle).err(),
                net.poll_accept(listener).err(),
                net.register(send, memory, 8, PTR_HOST).err(),
                net.isend(send, message.as_ptr(), message.len()).err(),
                net.irecv(recv, memory, 8).err(),
                net.iflush(recv, &[(memory, 8)]).err(),
                net.test(request).err(),
            ]
        };
        results == [Some(INVALID_USAGE); 8]
    });
    for call in ["init", "connect", "accept", "regMr", "isend", "irecv", "iflush", "test"] {
        let line = format!("evenkeel: {call}: this process was forked from one that uses NCCL");
        assert!(said.contains(&line), "{call}: {said}");
    }
    // SAFETY: as above.
    let sent = unsafe { net.isend(send, message.as_ptr(), message.len()) }.unwrap().unwrap();
    assert_eq!(net.finish(request), Ok(message.len()));
    assert!(net.finish(sent).is_ok() && buffer == message);
    net.close_send(send);
    net.close_recv(recv);
    net.close_listen(listener);
    net.finalize();
}

/// What a forked child writes to standard error while it does something, which must succeed.
fn stderr_of_child(work: impl FnOnce() -> bool) -> String {
    let (mut said, theirs) = io::pipe().unwrap();
    // SAFETY: the child uses what it has of its parent's memory, and ends here, by itself or by the alarm.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        // SAFETY: they take plain numbers.
        unsafe {
            libc::alarm(TIMEOUT.as_secs() as libc::c_uint);
            libc::dup2(theirs.as_raw_fd(), libc::STDERR_FILENO);
            libc::_exit(i32::from(!work()));
        }
    }
    drop(theirs);
    let mut text = String::new();
    said.read_to_string(&mut text).unwrap();
    let mut status = -1;
    // SAFETY: the child is this process's, and there is a place for its status.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "exit status and signal of the child, which wrote: {text}");
    text
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
