//! Checksums: corrupted bytes are detected and retransmitted.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use evenkeel_protocol::{
    ConnectionId, HANDLE_BYTES, HELLO_BYTES, HandshakeError, Hello, Refusal, WELCOME_BYTES, Welcome,
};
use evenkeel_testkit::TestRng;

use crate::flow_failures::exchange;
use crate::harness::{Handle, Net, Opaque, TIMEOUT, log_lines, run_in_child_process, until};
use crate::proxy::{Direction, Proxy, Tap};

/// Maximum number of bits to flip in one direction.
const MAX_FLIPPED: usize = 12;

/// Numbers of flipped bits: those on the way to the listener, and those from it.
pub(crate) type Flipped = Arc<[AtomicUsize; 2]>;

/// Connects through a proxy that flips a bit behind the handshake of some connections.
pub(crate) fn corrupting_pair(net: &Net) -> ((Opaque, Opaque), Proxy, Flipped) {
    let flipped = Flipped::default();
    let (of_proxy, rng) = (Arc::clone(&flipped), Mutex::new(TestRng::new(7)));
    let (pair, proxy) = Proxy::pair(net, move |connection, direction| -> Tap {
        let (index, handshake, range) = match direction {
            Direction::ToListener => (0, HELLO_BYTES, 200_000),
            Direction::FromListener => (1, WELCOME_BYTES, 1000),
        };
        // Of four connections, one is left alone, and one is corrupted in both directions.
        let corrupted =
            [[true, false], [false, true], [true, true], [false, false]][connection % 4][index];
        let at = handshake + rng.lock().unwrap().index(range);
        let flipped = Arc::clone(&of_proxy);
        let mut forwarded = 0;
        Box::new(move |bytes| {
            if let Some(at) = at.checked_sub(forwarded)
                && corrupted
                && at < bytes.len()
                && flipped[index].fetch_add(1, Ordering::Relaxed) < MAX_FLIPPED
            {
                bytes[at] ^= 1 << (at % 8);
            }
            forwarded += bytes.len();
        })
    });
    (pair, proxy, flipped)
}

#[test]
fn corrupted_bytes_are_detected_and_retransmitted() {
    let small = ("EVENKEEL_CHUNK_BYTES", "16384");
    run_in_child_process("checksum::child_corrupted", &[("EVENKEEL_CHECKSUM", "1"), small]);
}

#[test]
#[ignore = "part of another test"]
fn child_corrupted() {
    let net = Net::init(12, 0xc3c0).unwrap();
    let (pair, _proxy, flipped) = corrupting_pair(&net);
    let flipped = || [0, 1].map(|direction| flipped[direction].load(Ordering::Relaxed));
    let mut rng = TestRng::new(8);
    let sizes: Vec<usize> = (0..600).map(|_| *rng.choose(&[0, 1, 3000, 30_000, 200_000])).collect();
    // How many bytes which connection carries is random.
    for _ in 0..20 {
        exchange(&net, pair, &sizes, 8, |_| {});
        if flipped().iter().all(|flipped| *flipped > 2) {
            break;
        }
    }
    net.close_send(pair.0);
    net.close_recv(pair.1);
    // The sender may still have messages to deliver.
    let closed = until("both sides to close", || {
        let lines = log_lines("connection closed");
        (lines.len() == 2).then_some(lines)
    });
    let lines = log_lines("comm=0xc3c0");
    assert!(closed.is_some() && lines.iter().all(|line| line.level != 2), "{lines:?}");
    let corrupt = |other: &str| -> usize {
        let line = lines.iter().find(|line| line.text.contains(&format!(" {other}=0B"))).unwrap();
        line.text.split_once("corrupt=").unwrap().1.split(' ').next().unwrap().parse().unwrap()
    };
    let [to_listener, from_listener] = flipped();
    assert!(to_listener > 2 && corrupt("sent") > 0, "{to_listener} to the listener, {lines:?}");
    assert!(
        from_listener > 2 && corrupt("recv") > 0,
        "{from_listener} from the listener, {lines:?}"
    );
}

/// Parts of messages are retransmitted, and their checksums hold too.
#[test]
fn checksums_hold_while_flows_fail() {
    run_in_child_process("flow_failures::child_always", &[("EVENKEEL_CHECKSUM", "1")]);
}

#[test]
fn checksum_on_one_side_only_is_refused() {
    let net = Net::init(12, 0xc3c1).unwrap();
    let (listener, handle) = net.listen();
    let mut bytes = [0; HANDLE_BYTES];
    bytes.copy_from_slice(&handle.0[..HANDLE_BYTES]);
    let nonce = evenkeel_protocol::Handle::decode(&bytes).unwrap().nonce;
    let connection = ConnectionId([3; 16]);
    let hello =
        Hello { nonce, connection, flow: 0, flows: 1, checksum: true, rdma: false, random: None };
    let mut socket = TcpStream::connect(handle.address()).unwrap();
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    socket.write_all(&hello.encode()).unwrap();
    let mut welcome = [0; WELCOME_BYTES];
    socket.read_exact(&mut welcome).unwrap();
    let refused = Welcome::check(&welcome, connection).unwrap_err();
    assert_eq!(refused, HandshakeError::Refused(Refusal::Checksum));
    assert!(refused.to_string().contains("EVENKEEL_CHECKSUM"), "{refused}");
    let lines = until("the log", || {
        let lines = log_lines("comm=0xc3c1");
        lines.iter().any(|line| line.text.contains("EVENKEEL_CHECKSUM=on")).then_some(())
    });
    assert!(lines.is_some());
    net.close_listen(listener);
}

/// A rank whose environment differs gets the reason.
#[test]
fn connector_reports_the_mismatch() {
    run_in_child_process("checksum::child_refused", &[("EVENKEEL_CHECKSUM", "1")]);
}

#[test]
#[ignore = "part of another test"]
fn child_refused() {
    let net = Net::init(12, 0xc3c2).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let nonce = evenkeel_protocol::Nonce([9; 16]);
    let address = listener.local_addr().unwrap();
    let handle =
        evenkeel_protocol::Handle { addresses: vec![address.ip()], port: address.port(), nonce };
    let mut opaque = Handle([0; evenkeel_nccl_abi::HANDLE_SIZE]);
    opaque.0[..HANDLE_BYTES].copy_from_slice(&handle.encode());
    assert_eq!(net.poll_connect(&mut opaque), Ok(None));
    let (mut socket, _) = listener.accept().unwrap();
    let mut hello = [0; HELLO_BYTES];
    socket.read_exact(&mut hello).unwrap();
    let theirs = Hello::decode(&hello, nonce, false, false);
    assert_eq!(theirs, Err(HandshakeError::Checksum { theirs: true }));
    let connection = ConnectionId([0; 16]);
    let refusal = Welcome { connection, verdict: Err(Refusal::Checksum) };
    socket.write_all(&refusal.encode()).unwrap();
    until("an error", || net.poll_connect(&mut opaque).err()).expect("an error");
    let lines = log_lines("comm=0xc3c2");
    assert!(
        lines.iter().any(|line| line.text.contains("EVENKEEL_CHECKSUM is not the same")),
        "{lines:?}"
    );
}
