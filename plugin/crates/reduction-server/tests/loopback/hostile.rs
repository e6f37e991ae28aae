//! Clients that are none, or break the protocol: they are dropped, and nobody else notices.

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

use crate::harness::{PATIENCE, address, all_reduce, data, join, members, server, transport};

/// What any client knows.
const NONCE: Nonce = Nonce(*b"evenkeel-reduce\x01");

fn call(transport: &Transport, server: std::net::SocketAddr) -> SendConnection {
    let handle = Handle { addresses: vec![server.ip()], port: server.port(), nonce: NONCE };
    let call: Connecting = transport.connect(0, &handle, "hostile", MemoryTypes::HOST).unwrap();
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(connection) = call.poll().unwrap() {
            return connection;
        }
        assert!(Instant::now() < deadline);
        thread::yield_now();
    }
}

fn say(connection: &SendConnection, bytes: &[u8]) {
    let mut block = Block::new(bytes.len());
    block.bytes_mut().copy_from_slice(bytes);
    // It may have been closed already.
    let _ = connection.send_block(&Arc::new(block), bytes.len());
}

#[test]
fn strangers_and_nonsense_do_not_disturb_others() {
    let server = server();
    let names = vec![server.address().to_string()];
    let transport = transport(&[("EVENKEEL_FLOWS", "1")]);
    let client = join(&transport, &names, &members(1, "honest")[0]);
    let mut garbage = TcpStream::connect(address(&server)).unwrap();
    garbage.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut rng = TestRng::new(5);
    let mut open = vec![];
    for round in 0..100 {
        let connection = call(&transport, address(&server));
        // From nothing like the protocol to almost a join.
        let mut bytes = rng.bytes(64 + round % 3 * 100);
        if round % 2 == 0 {
            bytes[..12].copy_from_slice(b"EVKL-RED\x02\0\x01\0");
        }
        say(&connection, &bytes);
        open.push(connection);
    }
    let own = data(1, DataType::Float32, 100_000);
    assert_eq!(all_reduce(&client, &own, DataType::Float32, Op::Sum).unwrap(), own);
    garbage.set_read_timeout(Some(PATIENCE)).unwrap();
    assert!(matches!(garbage.read(&mut [0; 64]), Ok(0) | Err(_)), "the stranger is not answered");
    assert_eq!(server.communicators(), 1);
}

/// A rank that says goodbye before what it promised has come: nobody waits for that.
#[test]
fn a_rank_that_leaves_in_the_middle_of_its_part_is_named() {
    let server = server();
    let names = vec![server.address().to_string()];
    let transport = transport(&[]);
    for round in 0..5 {
        let members = members(2, "");
        let honest = join(&transport, &names, &members[0]);
        let own = data(round, DataType::Float32, 256 << 10);
        let up = call(&transport, address(&server));
        let home = transport.listen(0, "", MemoryTypes::HOST).unwrap();
        let mut hello = front(1);
        // At the first server of a list.
        let unique_id = u128::from_le_bytes(members[1].unique_id).rotate_left(16);
        hello[12..28].copy_from_slice(&unique_id.to_le_bytes());
        hello[36..44].copy_from_slice(&[1, 0, 0, 0, 2, 0, 0, 0]);
        hello[48..64].copy_from_slice(&[1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
        hello.extend_from_slice(&home.handle().encode());
        say(&up, &hello);
        let deadline = Instant::now() + PATIENCE;
        let _down = loop {
            if let Some(down) = home.poll_accept().unwrap() {
                break down;
            }
            assert!(Instant::now() < deadline);
            thread::yield_now();
        };
        let mut part = front(3);
        part[28..36].copy_from_slice(&(own.len() as u64).to_le_bytes());
        part[36..40].copy_from_slice(&(own.len() as u32).to_le_bytes());
        part[40..42].copy_from_slice(&[DataType::Float32.code(), Op::Sum.code()]);
        say(&up, &part);
        // Several flows carry this; what follows is small and may be there before.
        say(&up, &own);
        say(&up, &front(6));
        match all_reduce(&honest, &own, DataType::Float32, Op::Sum) {
            Ok(sum) => assert_eq!(sum.len(), own.len()),
            Err(error) => assert!(error.to_string().contains("rank 1"), "{error}"),
        }
    }
}

/// A header of this type with nothing in it.
fn front(code: u8) -> Vec<u8> {
    let mut bytes = vec![0; 64];
    bytes[..12].copy_from_slice(b"EVKL-RED\x02\0\0\0");
    bytes[10] = code;
    bytes
}
