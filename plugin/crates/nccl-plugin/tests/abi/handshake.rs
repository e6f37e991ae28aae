//! Connecting: closed listeners, unauthenticated connections, and many threads at once.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;

use evenkeel_protocol::PROTOCOL_VERSION;
use evenkeel_testkit::TestRng;
use socket2::{Domain, Socket, Type};

use crate::harness::{Net, TIMEOUT, log_lines, pattern, until};
use crate::raw_peer::Receiver;

#[test]
fn closed_listener_is_an_error_not_a_hang() {
    let net = Net::init(12, 0x202).unwrap();
    let (listener, mut handle) = net.listen();
    net.close_listen(listener);
    let failed = until("an error", || net.poll_connect(&mut handle).err());
    assert!(failed.is_some());
    assert!(!log_lines(&handle.address().to_string()).is_empty());
}

/// Waits until the other side has closed.
fn is_dropped(stream: &mut TcpStream) {
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    match stream.read(&mut [0; 64]) {
        Ok(0) => {}
        Ok(bytes) => panic!("an unauthenticated connection was answered with {bytes} bytes"),
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
    }
}

/// Connects from an address that nothing else here connects from. Log lines name the address, and other tests' connections
/// to other listeners may have the same port.
fn connect_as_stranger(addr: SocketAddr) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from(([127, 0, 77, 1], 0)).into()).unwrap();
    socket.connect(&addr.into()).unwrap();
    socket.into()
}

#[test]
fn unauthenticated_connections_are_dropped() {
    let net = Net::init(12, 0x57a).unwrap();
    let (listener, mut handle) = net.listen();
    let addr = handle.address();
    let mut garbage = connect_as_stranger(addr);
    garbage.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut silent = connect_as_stranger(addr);
    // Half a hello: the magic of a real one, then nothing.
    let mut half = connect_as_stranger(addr);
    half.write_all(b"EVKL-HEL").unwrap();
    // A whole hello for another listener, such as a peer of an earlier job would send.
    let mut stale = connect_as_stranger(addr);
    let mut hello = [0; 64];
    hello[..8].copy_from_slice(b"EVKL-HEL");
    hello[8..10].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
    hello[12] = 1;
    stale.write_all(&hello).unwrap();
    let closed = connect_as_stranger(addr);
    let strangers: Vec<_> = [&garbage, &stale, &silent, &half, &closed]
        .map(|stream| format!("connection from {} dropped", stream.local_addr().unwrap()))
        .to_vec();
    drop(closed);
    assert_eq!(net.poll_accept(listener), Ok(None));
    // It is told so, since its listener may just have closed.
    let mut refusal = [0; 32];
    stale.set_read_timeout(Some(TIMEOUT)).unwrap();
    stale.read_exact(&mut refusal).unwrap();
    assert_eq!(refusal[..8], *b"EVKL-WEL");
    assert_eq!(refusal[10..12], 9u16.to_le_bytes(), "no such listener");
    // The deadline for a hello is one second in these tests.
    for connection in [&mut garbage, &mut stale, &mut silent, &mut half] {
        is_dropped(connection);
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
    for stranger in strangers {
        assert_eq!(log_lines(&stranger).len(), 1, "{stranger}");
    }
}

#[test]
fn flood_of_silent_connections_does_not_block_the_peer() {
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

/// A listener drops connections when too many unauthenticated ones arrive, and a middlebox may reset one.
#[test]
fn handshake_of_a_flow_is_retried_when_it_is_dropped() {
    let net = Net::init(12, 0x205).unwrap();
    let (mut receiver, mut handle) = Receiver::listen(&mut TestRng::new(1));
    assert_eq!(net.poll_connect(&mut handle), Ok(None));
    let dropped = until("the first flows", || {
        let listener = receiver.listener.as_ref().unwrap();
        listener.accept().ok()
    });
    drop(dropped.expect("a flow"));
    let send = receiver.connected(&net, &mut handle);
    assert_eq!(receiver.welcomed(), 4);
    net.close_send(send);
    receiver.drain();
    assert!(log_lines("comm=0x205").iter().all(|line| line.level != 2));
}

#[test]
fn many_threads_connect_at_once() {
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
