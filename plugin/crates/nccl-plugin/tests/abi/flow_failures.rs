//! Flows that fail while the peers live: no error, no wrong byte.
//!
//! Each test has a process of its own, since a descriptor may be reused by the time it is broken.

use std::collections::VecDeque;
use std::fs;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, RawFd};

use crate::harness::{Net, Opaque, log_lines, pattern, run_in_child_process, until};

/// The descriptors of a connection's flows in this process.
pub(crate) struct FlowSockets {
    pub(crate) sending: Vec<RawFd>,
    pub(crate) receiving: Vec<RawFd>,
}

/// Finds the established flows of connections to a listener.
pub(crate) fn flow_sockets(listener: SocketAddr) -> FlowSockets {
    let mut found = FlowSockets { sending: Vec::new(), receiving: Vec::new() };
    for entry in fs::read_dir("/proc/self/fd").unwrap() {
        let name = entry.unwrap().file_name();
        let fd: RawFd = name.to_str().unwrap().parse().unwrap();
        // SAFETY: used for the two calls below only, which fail if it was closed meanwhile.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        let socket = socket2::SockRef::from(&borrowed);
        let Ok(peer) = socket.peer_addr() else { continue };
        if peer.as_socket() == Some(listener) {
            found.sending.push(fd);
        } else if socket.local_addr().is_ok_and(|local| local.as_socket() == Some(listener)) {
            found.receiving.push(fd);
        }
    }
    found
}

#[derive(Clone, Copy, Debug)]
enum Break {
    /// A reset of both ends, as by a middlebox.
    Reset,
    /// One end is shut down for writing.
    HalfClose,
    /// One end is shut down for reading and writing.
    Close,
}

fn break_flow(fd: RawFd, how: Break) {
    match how {
        Break::Reset => {
            // SAFETY: an all-zero sockaddr is valid, AF_UNSPEC is 0.
            let nowhere: libc::sockaddr = unsafe { std::mem::zeroed() };
            let length = size_of::<libc::sockaddr>() as libc::socklen_t;
            // Connecting to AF_UNSPEC resets the connection.
            // SAFETY: the address is on this stack and as long as stated.
            unsafe { libc::connect(fd, &nowhere, length) };
        }
        // SAFETY: shutdown takes plain numbers.
        Break::HalfClose => drop(unsafe { libc::shutdown(fd, libc::SHUT_WR) }),
        // SAFETY: shutdown takes plain numbers.
        Break::Close => drop(unsafe { libc::shutdown(fd, libc::SHUT_RDWR) }),
    }
}

/// Sends messages of these sizes, up to `depth` in flight on both sides, calls `before` ahead of
/// each, and checks every byte.
pub(crate) fn exchange(
    net: &Net,
    (send, recv): (Opaque, Opaque),
    sizes: &[usize],
    depth: usize,
    mut before: impl FnMut(usize),
) {
    let longest = sizes.iter().copied().max().unwrap_or(0);
    let data = pattern(7, longest + 4 * sizes.len());
    let part = |index: usize| &data[4 * index..4 * index + sizes[index]];
    let mut buffers = vec![vec![0u8; longest + 16]; depth];
    let (mut sends, mut recvs) = (VecDeque::new(), VecDeque::new());
    let (mut sent, mut posted, mut done) = (0, 0, 0);
    let all = until("all messages", || {
        if posted < sizes.len() && recvs.len() < depth {
            let buffer = &mut buffers[posted % depth];
            buffer.fill(0xee);
            // SAFETY: the buffer lives as long as the comm and is read when its request is done.
            recvs.push_back(
                unsafe { net.irecv(recv, buffer.as_mut_ptr(), buffer.len()) }.unwrap().unwrap(),
            );
            posted += 1;
        }
        if sent < sizes.len() && sends.len() < depth {
            before(sent);
            let part = part(sent);
            // SAFETY: the data lives as long as the comm.
            sends
                .push_back(unsafe { net.isend(send, part.as_ptr(), part.len()) }.unwrap().unwrap());
            sent += 1;
        }
        if sends.front().is_some_and(|request| net.test(*request).unwrap().is_some()) {
            sends.pop_front();
        }
        if let Some(size) = recvs.front().and_then(|request| net.test(*request).unwrap()) {
            recvs.pop_front();
            let buffer = &buffers[done % depth];
            assert_eq!(size, sizes[done]);
            assert!(buffer[..size] == *part(done), "message {done} differs");
            assert!(buffer[size..].iter().all(|byte| *byte == 0xee), "message {done} overflows");
            done += 1;
        }
        (done == sizes.len() && sends.is_empty()).then_some(())
    });
    let (waiting, all_sizes) = (sends.len(), sizes.len());
    assert!(
        all.is_some(),
        "{done} of {all_sizes} messages arrived, {sent} were sent, {waiting} wait"
    );
}

#[test]
fn one_flow_fails_and_no_message_is_lost() {
    run_in_child_process("flow_failures::child_one", &[]);
}

#[test]
#[ignore = "part of another test"]
fn child_one() {
    for (index, how) in [Break::Reset, Break::HalfClose, Break::Close].into_iter().enumerate() {
        for at_sender in [true, false] {
            let label = 0x7a00 + 2 * index as u64 + u64::from(at_sender);
            let net = Net::init(12, label).unwrap();
            let (pair, listener) = net.pair_at();
            exchange(&net, pair, &[300_000; 60], 8, |message| {
                if message == 20 {
                    let sockets = flow_sockets(listener);
                    // More than 4 while another path is tried.
                    assert!(sockets.sending.len() >= 4 && sockets.receiving.len() >= 4);
                    break_flow(
                        if at_sender { sockets.sending[0] } else { sockets.receiving[0] },
                        how,
                    );
                }
            });
            until("a replacement", || (flow_sockets(listener).sending.len() >= 4).then_some(()))
                .expect("a replacement");
            net.close_send(pair.0);
            net.close_recv(pair.1);
            let lines = log_lines(&format!("comm={label:#x}"));
            assert!(lines.iter().all(|line| line.level != 2), "{how:?}: {lines:?}");
            assert!(
                lines.iter().any(|line| line.text.contains("lost=1")),
                "{how:?} at sender {at_sender}: {lines:?}"
            );
        }
    }
}

#[test]
fn all_flows_fail_and_the_connection_recovers() {
    run_in_child_process("flow_failures::child_all", &[]);
}

#[test]
#[ignore = "part of another test"]
fn child_all() {
    for (index, how) in [Break::Reset, Break::Close].into_iter().enumerate() {
        for at_sender in [true, false] {
            let label = 0x7b00 + 2 * index as u64 + u64::from(at_sender);
            let net = Net::init(12, label).unwrap();
            let (pair, listener) = net.pair_at();
            exchange(&net, pair, &[300_000; 60], 8, |message| {
                if message == 20 || message == 40 {
                    let sockets = flow_sockets(listener);
                    let fds = if at_sender { sockets.sending } else { sockets.receiving };
                    fds.into_iter().for_each(|fd| break_flow(fd, how));
                }
            });
            net.close_send(pair.0);
            net.close_recv(pair.1);
            let lines = log_lines(&format!("comm={label:#x}"));
            assert!(lines.iter().all(|line| line.level != 2), "{how:?}: {lines:?}");
            let lost = |text: &str| text.split_once("lost=")?.1.split(' ').next()?.parse().ok();
            let lost: Vec<u64> = lines.iter().filter_map(|line| lost(&line.text)).collect();
            assert!(lost.iter().any(|lost| *lost >= 8), "{how:?}: {lines:?}");
        }
    }
}

#[test]
fn flows_fail_repeatedly_under_messages_of_all_sizes() {
    run_in_child_process("flow_failures::child_always", &[]);
}

#[test]
#[ignore = "part of another test"]
fn child_always() {
    let net = Net::init(12, 0x7c00).unwrap();
    let (pair, listener) = net.pair_at();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut choose = |below: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random as usize % below
    };
    let sizes: Vec<usize> = (0..1500)
        .map(|_| match choose(4) {
            0 => choose(3),
            1 => choose(2000),
            2 => choose(16_384),
            _ => choose(400_000),
        })
        .collect();
    exchange(&net, pair, &sizes, 8, |_| {
        if choose(20) == 0 {
            let sockets = flow_sockets(listener);
            let fds = if choose(2) == 0 { sockets.sending } else { sockets.receiving };
            let how = [Break::Reset, Break::HalfClose, Break::Close][choose(3)];
            if !fds.is_empty() {
                break_flow(fds[choose(fds.len())], how);
            }
        }
    });
    net.close_send(pair.0);
    net.close_recv(pair.1);
    let lines = log_lines("comm=0x7c00");
    assert!(lines.iter().all(|line| line.level != 2), "{lines:?}");
    let none_corrupt = |text: &str| !text.contains("corrupt=") || text.contains("corrupt=0 ");
    assert!(lines.iter().all(|line| none_corrupt(&line.text)), "{lines:?}");
}

#[test]
fn static_shares_survive_flow_failures() {
    run_in_child_process("flow_failures::child_always", &[("EVENKEEL_SCHEDULE", "static")]);
    run_in_child_process("flow_failures::child_all", &[("EVENKEEL_SCHEDULE", "static")]);
}

#[test]
fn static_shares_are_equal() {
    run_in_child_process(
        "flow_failures::child_equal",
        &[("EVENKEEL_SCHEDULE", "static"), ("EVENKEEL_FLOWS", "3")],
    );
}

#[test]
#[ignore = "part of another test"]
fn child_equal() {
    let net = Net::init(12, 0x7e00).unwrap();
    let (pair, _) = net.pair_at();
    exchange(&net, pair, &[3 * 128 * 1024; 40], 8, |_| {});
    net.close_send(pair.0);
    net.close_recv(pair.1);
    let share = 40 * 128 * 1024;
    let shares = format!("flows=3 {:?}", [share; 3]);
    let lines = log_lines(&format!("sent={}B", 3 * share));
    assert!(lines.len() == 1 && lines[0].text.contains(&shares), "{lines:?}");
}

#[test]
fn small_messages_survive_flow_failures_and_close() {
    run_in_child_process("flow_failures::child_small", &[]);
}

#[test]
#[ignore = "part of another test"]
fn child_small() {
    let net = Net::init(12, 0x7d00).unwrap();
    let (pair, listener) = net.pair_at();
    let data = pattern(1, 1000);
    for _ in 0..20 {
        // SAFETY: the data lives as long as the comm.
        let request = unsafe { net.isend(pair.0, data.as_ptr(), 1000) }.unwrap().unwrap();
        assert_eq!(net.finish(request), Ok(1000), "a small message needs no receiver to be done");
    }
    flow_sockets(listener).receiving.into_iter().for_each(|fd| break_flow(fd, Break::Reset));
    net.close_send(pair.0);
    let mut buffer = vec![0; 1000];
    for message in 0..20 {
        buffer.fill(0);
        // SAFETY: the buffer lives until the request is finished.
        let request = unsafe { net.irecv(pair.1, buffer.as_mut_ptr(), 1000) }.unwrap().unwrap();
        assert_eq!(net.finish(request), Ok(1000), "message {message}");
        assert!(buffer == data);
    }
    net.close_recv(pair.1);
}
