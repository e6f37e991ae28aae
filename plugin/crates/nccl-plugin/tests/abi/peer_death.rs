//! Peers that die.

use std::env;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use evenkeel_nccl_abi::{HANDLE_SIZE, REMOTE_ERROR};

use crate::harness::{Handle, Net, Opaque, TIMEOUT, in_rdma_lab, log_lines, pattern, until};

/// The default of `EVENKEEL_PEER_TIMEOUT`.
pub(crate) const PEER_TIMEOUT: Duration = Duration::from_secs(15);

/// A process that is killed when it is dropped.
struct Peer(Child);

impl Peer {
    /// Starts an ignored test as a process of its own.
    fn start(test: &str, environment: &[(&str, String)]) -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args([test, "--exact", "--ignored", "--nocapture", "--test-threads=1"]);
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        Self(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap())
    }

    /// Waits for a line of output with `word`, and returns the rest of the line.
    fn wait_for(&mut self, word: &str) -> String {
        let output = BufReader::new(self.0.stdout.as_mut().unwrap());
        for line in output.lines() {
            let line = line.unwrap();
            if let Some((_, rest)) = line.split_once(word) {
                return rest.trim().to_owned();
            }
        }
        panic!("the peer ended without printing {word:?}");
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Fails only if the process has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn hex(handle: &Handle) -> String {
    handle.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Handle {
    let mut handle = Handle([0; HANDLE_SIZE]);
    for (index, byte) in handle.0.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * index..2 * index + 2], 16).unwrap();
    }
    handle
}

/// Sleeps until the parent kills this process or ends.
fn wait_until_killed() {
    let _ = std::io::stdin().read(&mut [0]);
}

#[test]
#[ignore = "part of another test"]
fn receiving_peer() {
    let net = Net::init(12, 0).unwrap();
    let (listener, handle) = net.listen();
    println!("handle {}", hex(&handle));
    until("a peer", || net.poll_accept(listener).unwrap()).unwrap();
    println!("connected");
    wait_until_killed();
}

#[test]
#[ignore = "part of another test"]
fn sending_peer() {
    let net = Net::init(12, 0).unwrap();
    let mut handle = from_hex(&env::var("PEER_HANDLE").unwrap());
    let comm = until("a peer", || net.poll_connect(&mut handle).unwrap()).unwrap();
    // One whole message, so that the receiver can wait until data flows. No other message follows,
    // since this process is killed.
    let data = pattern(0, 1000);
    // SAFETY: the data lives until the process ends.
    unsafe { net.isend(comm, data.as_ptr(), data.len()) }.unwrap().unwrap();
    println!("connected");
    if env::var_os("PEER_FORKS").is_some() {
        println!("forked {}", fork_sleeper());
    }
    wait_until_killed();
}

/// Forks a child that does nothing, as a worker that waits for data, and returns its process id.
fn fork_sleeper() -> libc::pid_t {
    // SAFETY: the child only makes system calls.
    match unsafe { libc::fork() } {
        0 => loop {
            // SAFETY: it takes plain numbers. The child ends with the alarm, whatever becomes of the test.
            unsafe {
                libc::alarm(2 * TIMEOUT.as_secs() as libc::c_uint);
                libc::pause();
            }
        },
        child => child,
    }
}

/// The child of a peer, which is killed when it is dropped.
struct Orphan(libc::pid_t);

impl Drop for Orphan {
    fn drop(&mut self) {
        // SAFETY: it takes plain numbers.
        unsafe { libc::kill(self.0, libc::SIGKILL) };
    }
}

#[test]
fn killed_peer_is_noticed_although_its_forked_child_lives() {
    let net = Net::init(12, 0xdead3).unwrap();
    let (listener, handle) = net.listen();
    let environment = [("PEER_HANDLE", hex(&handle)), ("PEER_FORKS", String::new())];
    let mut peer = Peer::start("peer_death::sending_peer", &environment);
    let comm = until("the peer", || net.poll_accept(listener).unwrap()).unwrap();
    let orphan = Orphan(peer.wait_for("forked ").parse().unwrap());
    let mut buffers = vec![vec![0; 1000]; 2];
    let requests: Vec<Opaque> = buffers
        .iter_mut()
        // SAFETY: the buffers live until the comm is closed.
        .map(|buffer| unsafe { net.irecv(comm, buffer.as_mut_ptr(), buffer.len()) })
        .map(|request| request.unwrap().unwrap())
        .collect();
    assert_eq!(net.finish(requests[0]), Ok(1000));
    let killed = Instant::now();
    peer.0.kill().unwrap();
    assert_eq!(net.finish(requests[1]), Err(REMOTE_ERROR));
    // Before any timeout: the kernel has told.
    assert!(killed.elapsed() < PEER_TIMEOUT, "took {:?}", killed.elapsed());
    // SAFETY: it takes plain numbers; signal 0 only asks whether the process exists.
    assert_eq!(unsafe { libc::kill(orphan.0, 0) }, 0, "the child has ended");
    net.close_recv(comm);
    net.close_listen(listener);
}

/// Every request fails before any timeout: the kernel has told.
fn all_fail_before_a_timeout(net: &Net, requests: &[Opaque], killed: Instant) {
    for request in requests {
        assert_eq!(net.finish(*request), Err(REMOTE_ERROR));
    }
    assert!(killed.elapsed() < PEER_TIMEOUT, "took {:?}", killed.elapsed());
}

#[test]
fn killed_receiver_fails_all_requests_of_the_sender() {
    let net = Net::init(12, 0xdead1).unwrap();
    let mut peer = Peer::start("peer_death::receiving_peer", &[]);
    let mut handle = from_hex(&peer.wait_for("handle "));
    let peer_address = handle.address();
    let comm = until("the peer", || net.poll_connect(&mut handle).unwrap()).unwrap();
    peer.wait_for("connected");
    // More than sockets buffer, so that requests are still in flight.
    let data = vec![1; 64 << 20];
    let requests: Vec<Opaque> = (0..4)
        // SAFETY: the data lives until the comm is closed.
        .map(|_| unsafe { net.isend(comm, data.as_ptr(), data.len()) }.unwrap().unwrap())
        .collect();
    let killed = Instant::now();
    peer.0.kill().unwrap();
    all_fail_before_a_timeout(&net, &requests, killed);
    // SAFETY: as above.
    assert_eq!(unsafe { net.isend(comm, data.as_ptr(), 1) }, Err(REMOTE_ERROR));
    net.close_send(comm);
    let warnings: Vec<_> =
        log_lines("comm=0xdead1").into_iter().filter(|line| line.level == 2).collect();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    let text = &warnings[0].text;
    assert!(text.contains(&peer_address.to_string()), "{text}");
    assert!(text.contains("4 requests") && text.contains("bytes in flight"), "{text}");
    let has_gids = text.contains("(GID ") && text.contains(", the peer's ::ffff:");
    assert_eq!(has_gids, in_rdma_lab(), "{text}");
}

#[test]
fn killed_sender_fails_all_requests_of_the_receiver() {
    let net = Net::init(12, 0xdead2).unwrap();
    let (listener, handle) = net.listen();
    let mut peer = Peer::start("peer_death::sending_peer", &[("PEER_HANDLE", hex(&handle))]);
    let comm = until("the peer", || net.poll_accept(listener).unwrap()).unwrap();
    let mut buffers = vec![vec![0; 1 << 20]; 5];
    let mut requests: Vec<Opaque> = buffers
        .iter_mut()
        // SAFETY: the buffers live until the comm is closed.
        .map(|buffer| unsafe { net.irecv(comm, buffer.as_mut_ptr(), buffer.len()) })
        .map(|request| request.unwrap().unwrap())
        .collect();
    assert_eq!(net.finish(requests.remove(0)), Ok(1000));
    peer.wait_for("connected");
    let killed = Instant::now();
    peer.0.kill().unwrap();
    all_fail_before_a_timeout(&net, &requests, killed);
    net.close_recv(comm);
    net.close_listen(listener);
    assert!(buffers[0][..1000] == pattern(0, 1000));
    let warnings: Vec<_> =
        log_lines("comm=0xdead2").into_iter().filter(|line| line.level == 2).collect();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    let peer = format!("receive from {}:", handle.address().ip());
    let text = &warnings[0].text;
    assert!(text.contains("4 requests") && text.contains(&peer), "{text}");
}

#[test]
fn messages_of_a_dead_peer_can_be_received() {
    let net = Net::init(12, 0x201).unwrap();
    let (send, recv) = net.pair();
    let data = pattern(3, 4000);
    for _ in 0..3 {
        // SAFETY: the data lives until the request is finished.
        let request = unsafe { net.isend(send, data.as_ptr(), data.len()) }.unwrap().unwrap();
        assert_eq!(net.finish(request), Ok(4000));
    }
    net.close_send(send);
    let mut buffer = vec![0; 4000];
    for _ in 0..3 {
        buffer.fill(0);
        // SAFETY: the buffer lives until the request is finished.
        let request = unsafe { net.irecv(recv, buffer.as_mut_ptr(), 4000) }.unwrap().unwrap();
        assert_eq!(net.finish(request), Ok(4000));
        assert!(buffer == data);
    }
    // SAFETY: the buffer lives until the comm is closed.
    let end = match unsafe { net.irecv(recv, buffer.as_mut_ptr(), 4000) } {
        Ok(request) => net.finish(request.unwrap()).unwrap_err(),
        Err(error) => error,
    };
    assert_eq!(end, REMOTE_ERROR);
    net.close_recv(recv);
}
