//! Peers that die, and connections that are no peers.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, thread};

use evenkeel_nccl_abi::{HANDLE_SIZE, REMOTE_ERROR};

use evenkeel_protocol::PROTOCOL_VERSION;

use crate::harness::{Handle, Net, Opaque, PATIENCE, in_rdma_lab, log_lines, pattern, until};

/// Ends with the process that owns it, and never outlives the test.
struct Peer(Child);

impl Peer {
    /// Starts one of the ignored tests below as a process of its own.
    fn start(test: &str, environment: &[(&str, String)]) -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args([test, "--exact", "--ignored", "--nocapture", "--test-threads=1"]);
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        Self(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap())
    }

    /// The rest of the first line of its output that begins with `word`.
    fn says(&mut self, word: &str) -> String {
        let output = BufReader::new(self.0.stdout.as_mut().unwrap());
        for line in output.lines() {
            let line = line.unwrap();
            if let Some((_, rest)) = line.split_once(word) {
                return rest.trim().to_owned();
            }
        }
        panic!("the peer ended without saying {word:?}");
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Fails only if it has ended.
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

/// Sleeps until the parent kills it or goes away.
fn wait_for_the_end() {
    let _ = std::io::stdin().read(&mut [0]);
}

#[test]
#[ignore = "part of another test"]
fn peer_that_receives() {
    let net = Net::init(12, 0).unwrap();
    let (listener, handle) = net.listen();
    println!("handle {}", hex(&handle));
    until("a peer", || net.poll_accept(listener).unwrap()).unwrap();
    println!("connected");
    wait_for_the_end();
}

#[test]
#[ignore = "part of another test"]
fn peer_that_sends() {
    let net = Net::init(12, 0).unwrap();
    let mut handle = from_hex(&env::var("PEER_HANDLE").unwrap());
    let comm = until("a peer", || net.poll_connect(&mut handle).unwrap()).unwrap();
    // Half of a message: the rest never comes, since the second message's receiver gets killed
    // before. One whole message first, so that the receiver knows that data flows.
    let data = pattern(0, 1000);
    // SAFETY: the data lives until the process ends.
    unsafe { net.isend(comm, data.as_ptr(), data.len()) }.unwrap().unwrap();
    println!("connected");
    wait_for_the_end();
}

/// Every request fails within a second after the kill.
fn all_fail_soon(net: &Net, requests: &[Opaque], killed: Instant) {
    for request in requests {
        assert_eq!(net.finish(*request), Err(REMOTE_ERROR));
    }
    assert!(killed.elapsed() < Duration::from_secs(1), "took {:?}", killed.elapsed());
}

#[test]
fn a_killed_receiver_fails_every_request_of_the_sender() {
    let net = Net::init(12, 0xdead1).unwrap();
    let mut peer = Peer::start("peers::peer_that_receives", &[]);
    let mut handle = from_hex(&peer.says("handle "));
    let peer_address = handle.address();
    let comm = until("the peer", || net.poll_connect(&mut handle).unwrap()).unwrap();
    peer.says("connected");
    // More than sockets buffer, so that requests are still in flight.
    let data = vec![1; 64 << 20];
    let requests: Vec<Opaque> = (0..4)
        // SAFETY: the data lives until the comm is closed.
        .map(|_| unsafe { net.isend(comm, data.as_ptr(), data.len()) }.unwrap().unwrap())
        .collect();
    let killed = Instant::now();
    peer.0.kill().unwrap();
    all_fail_soon(&net, &requests, killed);
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
fn a_killed_sender_fails_every_request_of_the_receiver() {
    let net = Net::init(12, 0xdead2).unwrap();
    let (listener, handle) = net.listen();
    let mut peer = Peer::start("peers::peer_that_sends", &[("PEER_HANDLE", hex(&handle))]);
    let comm = until("the peer", || net.poll_accept(listener).unwrap()).unwrap();
    let mut buffers = vec![vec![0; 1 << 20]; 5];
    let mut requests: Vec<Opaque> = buffers
        .iter_mut()
        // SAFETY: the buffers live until the comm is closed.
        .map(|buffer| unsafe { net.irecv(comm, buffer.as_mut_ptr(), buffer.len()) })
        .map(|request| request.unwrap().unwrap())
        .collect();
    assert_eq!(net.finish(requests.remove(0)), Ok(1000));
    peer.says("connected");
    let killed = Instant::now();
    peer.0.kill().unwrap();
    all_fail_soon(&net, &requests, killed);
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
fn what_a_dead_peer_sent_before_can_still_be_received() {
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

#[test]
fn a_listener_that_is_gone_is_an_error_and_no_hang() {
    let net = Net::init(12, 0x202).unwrap();
    let (listener, mut handle) = net.listen();
    net.close_listen(listener);
    let failed = until("an error", || net.poll_connect(&mut handle).err());
    assert!(failed.is_some());
    assert!(!log_lines(&handle.address().to_string()).is_empty());
}

/// Waits until the other side has closed.
fn is_dropped(stream: &mut TcpStream) {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    match stream.read(&mut [0; 64]) {
        Ok(0) => {}
        Ok(bytes) => panic!("a stranger was answered with {bytes} bytes"),
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
    }
}

#[test]
fn strangers_are_dropped_and_the_peer_still_connects() {
    let net = Net::init(12, 0x57a).unwrap();
    let (listener, mut handle) = net.listen();
    let addr = handle.address();
    let mut garbage = TcpStream::connect(addr).unwrap();
    garbage.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut silent = TcpStream::connect(addr).unwrap();
    // Half a hello: the magic of a real one, then nothing.
    let mut half = TcpStream::connect(addr).unwrap();
    half.write_all(b"EVKL-HEL").unwrap();
    // A whole hello, for another listener: what a peer of an earlier job would send.
    let mut stale = TcpStream::connect(addr).unwrap();
    let mut hello = [0; 64];
    hello[..8].copy_from_slice(b"EVKL-HEL");
    hello[8..10].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
    hello[12] = 1;
    stale.write_all(&hello).unwrap();
    drop(TcpStream::connect(addr).unwrap());
    assert_eq!(net.poll_accept(listener), Ok(None));
    // The deadline for a hello is one second in these tests.
    for stranger in [&mut garbage, &mut stale, &mut silent, &mut half] {
        is_dropped(stranger);
    }
    assert_eq!(net.poll_accept(listener), Ok(None));
    let (mut send, mut recv) = (None, None);
    until("the peer", || {
        send = send.or_else(|| net.poll_connect(&mut handle).unwrap());
        recv = recv.or_else(|| net.poll_accept(listener).unwrap());
        send.zip(recv)
    })
    .expect("the peer connects");
    net.close_send(send.unwrap());
    net.close_recv(recv.unwrap());
    net.close_listen(listener);
    let dropped: Vec<_> =
        log_lines("comm=0x57a").into_iter().filter(|line| line.text.contains("dropped")).collect();
    assert_eq!(dropped.len(), 5, "{dropped:?}");
}

#[test]
fn a_flood_of_silent_connections_does_not_keep_the_peer_out() {
    let net = Net::init(12, 0xf100d).unwrap();
    let (listener, mut handle) = net.listen();
    let addr = handle.address();
    let mut flood: Vec<TcpStream> = (0..200).map(|_| TcpStream::connect(addr).unwrap()).collect();
    let (mut send, mut recv) = (None, None);
    until("the peer", || {
        send = send.or_else(|| net.poll_connect(&mut handle).unwrap());
        recv = recv.or_else(|| net.poll_accept(listener).unwrap());
        send.zip(recv)
    })
    .expect("the peer connects");
    flood.iter_mut().for_each(is_dropped);
    net.close_send(send.unwrap());
    net.close_recv(recv.unwrap());
    net.close_listen(listener);
}

#[test]
fn many_connections_at_once_from_many_threads() {
    let threads: Vec<_> = (0..8)
        .map(|seed| {
            thread::spawn(move || {
                let mut net = Net::init(12, 0x204).unwrap();
                let (send, recv) = net.pair();
                for round in 0..20 {
                    let data = pattern(seed * 20 + round, 50_000 * (round % 5));
                    let mut buffer = vec![0; data.len()];
                    // SAFETY: the buffers live until the requests are finished.
                    let (out, back) = unsafe {
                        let out = net.isend(send, data.as_ptr(), data.len()).unwrap().unwrap();
                        let back = net.irecv(recv, buffer.as_mut_ptr(), buffer.len());
                        (out, back.unwrap().unwrap())
                    };
                    assert_eq!(net.finish(out), Ok(data.len()));
                    assert_eq!(net.finish(back), Ok(data.len()));
                    assert!(buffer == data);
                }
                net.close_send(send);
                net.close_recv(recv);
                net.finalize();
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}
