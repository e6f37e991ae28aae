//! Clients that break the protocol: they are dropped, and others are not affected.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use evenkeel_reduction_kernels::{DataType, Op};
use evenkeel_testkit::TestRng;
use evenkeel_transport::{
    Block, Connecting, Handle, MemoryTypes, Nonce, SendConnection, Transport,
};

use crate::harness::{TIMEOUT, address, all_reduce, data, join, members, server, transport};

/// The nonce of every server's listener.
const NONCE: Nonce = Nonce(*b"evenkeel-reduce\x01");

fn connect(transport: &Transport, server: std::net::SocketAddr) -> SendConnection {
    let handle = Handle { addresses: vec![server.ip()], port: server.port(), nonce: NONCE };
    let connecting: Connecting =
        transport.connect(0, &handle, "hostile", MemoryTypes::HOST).unwrap();
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(connection) = connecting.poll().unwrap() {
            return connection;
        }
        assert!(Instant::now() < deadline);
        thread::yield_now();
    }
}

fn send(connection: &SendConnection, bytes: &[u8]) {
    let mut block = Block::new(bytes.len());
    block.bytes_mut().copy_from_slice(bytes);
    // The server may have closed it already.
    let _ = connection.send_block(&Arc::new(block), bytes.len());
}

#[test]
fn garbage_does_not_disturb_other_clients() {
    let server = server();
    let names = vec![server.address().to_string()];
    let transport = transport(&[("EVENKEEL_FLOWS", "1")]);
    let client = join(&transport, &names, &members(1, "honest")[0]);
    let mut garbage = TcpStream::connect(address(&server)).unwrap();
    garbage.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut rng = TestRng::new(5);
    let mut open = vec![];
    for round in 0..100 {
        let connection = connect(&transport, address(&server));
        // Random bytes, and almost a join.
        let mut bytes = rng.bytes(64 + round % 3 * 100);
        if round % 2 == 0 {
            bytes[..12].copy_from_slice(b"EVKL-RED\x02\0\x01\0");
        }
        send(&connection, &bytes);
        open.push(connection);
    }
    let own = data(1, DataType::Float32, 100_000);
    assert_eq!(all_reduce(&client, &own, DataType::Float32, Op::Sum).unwrap(), own);
    garbage.set_read_timeout(Some(TIMEOUT)).unwrap();
    assert!(matches!(garbage.read(&mut [0; 64]), Ok(0) | Err(_)), "garbage is answered");
    assert_eq!(server.communicators(), 1);
}

/// The rank leaves before all bytes of its part have arrived.
#[test]
fn rank_that_leaves_during_its_part_is_named() {
    let server = server();
    let names = vec![server.address().to_string()];
    let transport = transport(&[]);
    for round in 0..5 {
        let members = members(2, "");
        let honest = join(&transport, &names, &members[0]);
        let own = data(round, DataType::Float32, 256 << 10);
        let up = connect(&transport, address(&server));
        let home = transport.listen(0, "", MemoryTypes::HOST).unwrap();
        let mut hello = header(1);
        // At the first server of a list.
        let unique_id = u128::from_le_bytes(members[1].unique_id).rotate_left(16);
        hello[12..28].copy_from_slice(&unique_id.to_le_bytes());
        hello[36..44].copy_from_slice(&[1, 0, 0, 0, 2, 0, 0, 0]);
        hello[48..64].copy_from_slice(&[1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
        hello.extend_from_slice(&home.handle().encode());
        send(&up, &hello);
        let deadline = Instant::now() + TIMEOUT;
        let _down = loop {
            if let Some(down) = home.poll_accept().unwrap() {
                break down;
            }
            assert!(Instant::now() < deadline);
            thread::yield_now();
        };
        let mut part = header(3);
        part[28..36].copy_from_slice(&(own.len() as u64).to_le_bytes());
        part[36..40].copy_from_slice(&(own.len() as u32).to_le_bytes());
        part[40..42].copy_from_slice(&[DataType::Float32.code(), Op::Sum.code()]);
        send(&up, &part);
        // Several flows carry this; what follows is small and may arrive first.
        send(&up, &own);
        send(&up, &header(6));
        match all_reduce(&honest, &own, DataType::Float32, Op::Sum) {
            Ok(sum) => assert_eq!(sum.len(), own.len()),
            Err(error) => assert!(error.to_string().contains("rank 1"), "{error}"),
        }
    }
}

/// An empty header of this type.
fn header(code: u8) -> Vec<u8> {
    let mut bytes = vec![0; 64];
    bytes[..12].copy_from_slice(b"EVKL-RED\x02\0\0\0");
    bytes[10] = code;
    bytes
}
