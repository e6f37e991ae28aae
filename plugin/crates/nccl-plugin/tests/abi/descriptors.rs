//! Descriptors that are used up, and kernels that refuse options. Each test has a process of its own, since limits and
//! filters belong to the process.

use std::os::fd::AsRawFd;
use std::{fs, ptr};

use crate::harness::{Net, log_lines, run_in_child_process, until};

fn limit() -> libc::rlimit {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limit is written to a place on this stack.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) }, 0);
    limit
}

fn set_limit(soft: u64, hard: u64) {
    let limit = libc::rlimit { rlim_cur: soft, rlim_max: hard };
    // SAFETY: the limit is read from this stack.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
}

#[test]
fn soft_descriptor_limit_is_raised() {
    run_in_child_process("descriptors::child_soft", &[]);
}

#[test]
#[ignore = "part of another test"]
fn child_soft() {
    let hard = limit().rlim_max;
    assert!(hard > 400, "the test needs more descriptors than {hard}");
    set_limit(64, hard);
    let net = Net::init(12, 0xfd1).unwrap();
    let pairs: Vec<_> = (0..16).map(|_| net.pair()).collect();
    assert_eq!(limit().rlim_cur, hard);
    let lines = log_lines("the limit of open files");
    assert!(lines.len() == 1 && lines[0].text.contains("was 64"), "{lines:?}");
    for (send, recv) in pairs {
        net.close_send(send);
        net.close_recv(recv);
    }
}

#[test]
fn connections_wait_for_descriptors() {
    run_in_child_process("descriptors::child_hard", &[]);
}

#[test]
#[ignore = "part of another test"]
fn child_hard() {
    let net = Net::init(12, 0xfd2).unwrap();
    let (send, recv) = net.pair();
    let (listener, mut handle) = net.listen();
    let in_use: Vec<u64> = fs::read_dir("/proc/self/fd")
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap())
        .collect();
    // Some flows of the dialer fit, and none of the acceptor.
    let last = (0..).filter(|number| !in_use.contains(number)).nth(1).unwrap();
    set_limit(last + 1, last + 1);
    let (mut waiting, mut accepted) = (None, None);
    let mut poll = || {
        waiting = waiting.or_else(|| net.poll_connect(&mut handle).expect("connect waits"));
        accepted = accepted.or_else(|| net.poll_accept(listener).expect("accept waits"));
        waiting.zip(accepted)
    };
    let warned = until("a warning", || {
        assert!(poll().is_none(), "there are descriptors for all");
        (!log_lines("open files").iter().all(|line| line.level != 2)).then_some(())
    });
    warned.expect("a warning");
    net.close_send(send);
    net.close_recv(recv);
    let (send, recv) = until("a connection", poll).expect("a connection");
    let warnings: Vec<_> = log_lines("").into_iter().filter(|line| line.level == 2).collect();
    assert!(warnings.len() == 1 && warnings[0].text.contains("ulimit -Hn"), "{warnings:?}");
    net.close_send(send);
    net.close_recv(recv);
    net.close_listen(listener);
}

#[test]
fn accepting_waits_for_descriptors() {
    run_in_child_process("descriptors::child_accepting", &[("EVENKEEL_FLOWS", "1")]);
}

/// The dialer takes the only descriptor. When there is one again, nothing happens on the listening socket that would say so.
#[test]
#[ignore = "part of another test"]
fn child_accepting() {
    let net = Net::init(12, 0xfd4).unwrap();
    let (send, recv) = net.pair();
    let (listener, mut handle) = net.listen();
    let spare = fs::File::open("/dev/null").unwrap();
    let lowest = fs::File::open("/dev/null").unwrap().as_raw_fd() as u64;
    set_limit(lowest + 1, lowest + 1);
    let (mut dialed, mut accepted) = (None, None);
    let mut poll = || {
        dialed = dialed.or_else(|| net.poll_connect(&mut handle).expect("connect waits"));
        accepted = accepted.or_else(|| net.poll_accept(listener).expect("accept waits"));
        dialed.zip(accepted)
    };
    let warned = until("a warning", || {
        assert!(poll().is_none(), "there are descriptors for both");
        log_lines("open files").iter().any(|line| line.level == 2).then_some(())
    });
    warned.expect("a warning");
    drop(spare);
    let (other_send, other_recv) = until("a connection", poll).expect("a connection");
    for (send, recv) in [(send, recv), (other_send, other_recv)] {
        net.close_send(send);
        net.close_recv(recv);
    }
    net.close_listen(listener);
}

#[test]
fn options_that_only_tune_may_be_refused() {
    run_in_child_process("descriptors::child_refused_options", &[]);
}

#[test]
#[ignore = "part of another test"]
fn child_refused_options() {
    refuse_options(&[libc::TCP_NOTSENT_LOWAT, libc::IP_BIND_ADDRESS_NO_PORT]);
    let net = Net::init(12, 0xfd3).unwrap();
    let (send, recv) = net.pair();
    net.close_send(send);
    net.close_recv(recv);
}

/// Makes `setsockopt` fail for these options, in this thread and in those that it starts, as a sandbox does.
fn refuse_options(options: &[libc::c_int]) {
    // struct seccomp_data: the call's number is at 0, the third argument's lower half at 32.
    let load = |at: u32| libc::sock_filter {
        code: (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16,
        jt: 0,
        jf: 0,
        k: at,
    };
    let skip_unless = |value: u32, jt: u8, jf: u8| libc::sock_filter {
        code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
        jt,
        jf,
        k: value,
    };
    let answer =
        |k: u32| libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k };
    let allow = answer(libc::SECCOMP_RET_ALLOW);
    let mut program =
        vec![load(0), skip_unless(libc::SYS_setsockopt as u32, 1, 0), allow, load(32)];
    for option in options {
        program.push(skip_unless(*option as u32, 0, 1));
        program.push(answer(libc::SECCOMP_RET_ERRNO | libc::ENOPROTOOPT as u32));
    }
    program.push(allow);
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the kernel copies the program, which lives until the call has returned.
    let result = unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, ptr::from_ref(&filter))
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}
