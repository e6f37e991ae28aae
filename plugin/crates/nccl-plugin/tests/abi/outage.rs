//! Paths on which nothing comes through for a while.

use std::fs;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, RawFd};
use std::thread;
use std::time::{Duration, Instant};

use crate::flow_failures::flow_sockets;
use crate::harness::{Net, log_lines, pattern, run_in_child_process, until};

/// A dead path is found after some seconds. There is more time than the test needs to recover.
const TIMEOUTS: [(&str, &str); 2] =
    [("EVENKEEL_PEER_TIMEOUT", "1"), ("EVENKEEL_RECOVERY_TIMEOUT", "35")];

/// A receiver gives up a sender that does not replace closed flows, after less time.
const HOLD: Duration = Duration::from_secs(2);

/// The descriptor of the listening socket at this address.
fn listening_socket(at: SocketAddr) -> RawFd {
    let is_there = |fd: &RawFd| {
        // SAFETY: used for the two calls below only, which fail if it was closed meanwhile.
        let borrowed = unsafe { BorrowedFd::borrow_raw(*fd) };
        let socket = socket2::SockRef::from(&borrowed);
        socket.is_listener().is_ok_and(|listens| listens)
            && socket.local_addr().is_ok_and(|local| local.as_socket() == Some(at))
    };
    let descriptors = fs::read_dir("/proc/self/fd").unwrap();
    let mut numbers = descriptors
        .map(|entry| entry.unwrap().file_name().to_str().unwrap().parse::<RawFd>().unwrap());
    numbers.find(is_there).expect("the listening socket")
}

/// The socket gets no packet any more, and its host does not answer.
fn silence(fd: RawFd) {
    let mut drop_all =
        libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: 0 };
    let program = libc::sock_fprog { len: 1, filter: &mut drop_all };
    set_option(fd, libc::SO_ATTACH_FILTER, &program);
}

/// The socket gets packets again.
fn heal(fd: RawFd) {
    set_option(fd, libc::SO_DETACH_FILTER, &0);
}

fn set_option<T>(fd: RawFd, option: libc::c_int, value: &T) {
    let length = size_of::<T>() as libc::socklen_t;
    let value = std::ptr::from_ref(value).cast();
    // SAFETY: the value is borrowed for the call and as long as stated.
    let result = unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, option, value, length) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// No packet gets through for longer than a flow lives, and for less time than a connection.
fn survives_outage(label: u64, length: usize, busy: bool) {
    let net = Net::init(12, label).unwrap();
    let ((send, recv), listener) = net.pair_at();
    let data = pattern(5, length);
    let mut buffer = vec![0; length];
    // SAFETY: the buffer lives until the request is finished.
    let receipt = unsafe { net.irecv(recv, buffer.as_mut_ptr(), length) }.unwrap().unwrap();
    // SAFETY: the data lives until the request is finished.
    let send_message = || unsafe { net.isend(send, data.as_ptr(), length) }.unwrap().unwrap();
    let accepting = listening_socket(listener);
    let sockets = flow_sockets(listener);
    assert!(sockets.sending.len() >= 4 && sockets.receiving.len() >= 4);
    silence(accepting);
    sockets.sending.into_iter().chain(sockets.receiving).for_each(silence);
    let early = busy.then(send_message);
    until("the end of all flows", || {
        assert_eq!(net.test(receipt), Ok(None), "{:?}", log_lines("failed"));
        thread::sleep(Duration::from_millis(10));
        flow_sockets(listener).receiving.is_empty().then_some(())
    })
    .expect("the end of all flows");
    let since = Instant::now();
    while since.elapsed() < HOLD {
        assert_eq!(net.test(receipt), Ok(None), "{:?}", log_lines("failed"));
        thread::sleep(Duration::from_millis(10));
    }
    heal(accepting);
    let sent = early.unwrap_or_else(send_message);
    assert_eq!(net.finish(receipt), Ok(length), "{:?}", log_lines("failed"));
    assert_eq!(net.finish(sent), Ok(length));
    assert!(buffer == data);
    net.close_send(send);
    net.close_recv(recv);
    let warnings: Vec<_> = log_lines("").into_iter().filter(|line| line.level == 2).collect();
    assert!(warnings.is_empty(), "{warnings:?}");
}

#[test]
fn outage_longer_than_the_peer_timeout_loses_nothing() {
    run_in_child_process("outage::child_idle", &TIMEOUTS);
}

#[test]
#[ignore = "part of another test"]
fn child_idle() {
    survives_outage(0x0a1, 100_000, false);
}

#[test]
fn outage_while_a_message_is_sent_loses_nothing() {
    run_in_child_process("outage::child_busy", &TIMEOUTS);
}

#[test]
#[ignore = "part of another test"]
fn child_busy() {
    survives_outage(0x0a2, 32 << 20, true);
}
