//! Bytes that change on their way: with checksums they are noticed and sent again.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use evenkeel_protocol::{
    ConnectionId, HANDLE_BYTES, HELLO_BYTES, HandshakeError, Hello, Refusal, WELCOME_BYTES, Welcome,
};
use evenkeel_testkit::TestRng;

use crate::faults::exchange;
use crate::harness::{self, Handle, Net, Opaque, log_lines, until};
use crate::lifecycle::run_alone;

/// Passes TCP connections on, and changes a bit here and there behind the handshake.
struct Middlebox {
    address: SocketAddr,
    state: Arc<State>,
    accepting: Option<JoinHandle<()>>,
}

struct State {
    stopped: AtomicBool,
    /// Bits changed: those that go to the listener, and those that come from it.
    changed: [AtomicUsize; 2],
    /// Connections passed on so far.
    passed: AtomicUsize,
    rng: Mutex<TestRng>,
}

/// Most bits to change in one direction.
const MOST: usize = 12;

impl Middlebox {
    fn to(listener: SocketAddr) -> Self {
        let door = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = door.local_addr().unwrap();
        let state = Arc::new(State {
            stopped: AtomicBool::new(false),
            changed: [AtomicUsize::new(0), AtomicUsize::new(0)],
            passed: AtomicUsize::new(0),
            rng: Mutex::new(TestRng::new(7)),
        });
        let shared = Arc::clone(&state);
        let accepting = thread::spawn(move || {
            for near in door.incoming() {
                if shared.stopped.load(Ordering::Acquire) {
                    return;
                }
                // The listener may be gone.
                let Ok(far) = TcpStream::connect(listener) else { continue };
                shared.pass(near.unwrap(), far);
            }
        });
        Self { address, state, accepting: Some(accepting) }
    }

    fn changed(&self) -> [usize; 2] {
        [0, 1].map(|direction| self.state.changed[direction].load(Ordering::Relaxed))
    }
}

impl Drop for Middlebox {
    fn drop(&mut self) {
        self.state.stopped.store(true, Ordering::Release);
        // Wakes the thread; the others end with their connections.
        let _ = TcpStream::connect(self.address);
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
    }
}

impl State {
    fn pass(self: &Arc<Self>, near: TcpStream, far: TcpStream) {
        let (near, far) = (Arc::new(near), Arc::new(far));
        let ways = [
            (0, Arc::clone(&near), Arc::clone(&far), HELLO_BYTES, 200_000),
            (1, far, near, WELCOME_BYTES, 1000),
        ];
        // Of four, one is left alone, and one is spoilt in both directions.
        let spoils = [[true, false], [false, true], [true, true], [false, false]]
            [self.passed.fetch_add(1, Ordering::Relaxed) % 4];
        for (direction, from, to, handshake, range) in ways {
            let at = handshake + self.rng.lock().unwrap().index(range);
            let spoilt = spoils[direction].then_some(at);
            let state = Arc::clone(self);
            thread::spawn(move || {
                let mut buffer = [0; 1 << 14];
                let mut passed = 0;
                while let Ok(read @ 1..) = (&*from).read(&mut buffer) {
                    let changed = &state.changed[direction];
                    if let Some(at) = spoilt.and_then(|at| at.checked_sub(passed))
                        && at < read
                        && changed.fetch_add(1, Ordering::Relaxed) < MOST
                    {
                        buffer[at] ^= 1 << (at % 8);
                    }
                    passed += read;
                    if (&*to).write_all(&buffer[..read]).is_err() {
                        break;
                    }
                }
                let _ = from.shutdown(Shutdown::Both);
                let _ = to.shutdown(Shutdown::Both);
            });
        }
    }
}

/// Connects to itself through a middlebox: the sending and the receiving comm.
fn pair_through(net: &Net) -> ((Opaque, Opaque), Middlebox) {
    let (listener, mut handle) = net.listen();
    let middlebox = Middlebox::to(handle.address());
    let mut bytes = [0; HANDLE_BYTES];
    bytes.copy_from_slice(&handle.0[..HANDLE_BYTES]);
    let mut elsewhere = evenkeel_protocol::Handle::decode(&bytes).unwrap();
    elsewhere.port = middlebox.address.port();
    handle.0[..HANDLE_BYTES].copy_from_slice(&elsewhere.encode());
    let pair = net.connect_to(listener, &mut handle);
    net.close_listen(listener);
    (pair, middlebox)
}

#[test]
fn changed_bytes_are_noticed_and_sent_again() {
    let small = ("EVENKEEL_CHUNK_BYTES", "16384");
    run_alone("garbled::alone_garbled", &[("EVENKEEL_CHECKSUM", "1"), small]);
}

#[test]
#[ignore = "part of another test"]
fn alone_garbled() {
    let net = Net::init(12, 0xc3c0).unwrap();
    let (pair, middlebox) = pair_through(&net);
    let mut rng = TestRng::new(8);
    let sizes: Vec<usize> = (0..600).map(|_| *rng.choose(&[0, 1, 3000, 30_000, 200_000])).collect();
    // How far which connection comes is a matter of chance.
    for _ in 0..20 {
        exchange(&net, pair, &sizes, 8, |_| {});
        if middlebox.changed().iter().all(|changed| *changed > 2) {
            break;
        }
    }
    net.close_send(pair.0);
    net.close_recv(pair.1);
    // The sender may still deliver what it promised.
    let words = until("last words", || {
        let lines = log_lines("connection closed");
        (lines.len() == 2).then_some(lines)
    });
    let lines = log_lines("comm=0xc3c0");
    assert!(words.is_some() && lines.iter().all(|line| line.level != 2), "{lines:?}");
    let corrupt = |other: &str| -> usize {
        let line = lines.iter().find(|line| line.text.contains(&format!(" {other}=0B"))).unwrap();
        line.text.split_once("corrupt=").unwrap().1.split(' ').next().unwrap().parse().unwrap()
    };
    let [towards, back] = middlebox.changed();
    assert!(towards > 2 && corrupt("sent") > 0, "{towards} changed on their way there, {lines:?}");
    assert!(back > 2 && corrupt("recv") > 0, "{back} changed on their way back, {lines:?}");
}

/// What came before comes again in parts, and counts too.
#[test]
fn checksums_are_right_although_flows_break() {
    run_alone("faults::alone_always", &[("EVENKEEL_CHECKSUM", "1")]);
}

#[test]
fn checksums_that_only_one_side_wants_are_refused() {
    let net = Net::init(12, 0xc3c1).unwrap();
    let (listener, handle) = net.listen();
    let mut bytes = [0; HANDLE_BYTES];
    bytes.copy_from_slice(&handle.0[..HANDLE_BYTES]);
    let nonce = evenkeel_protocol::Handle::decode(&bytes).unwrap().nonce;
    let connection = ConnectionId([3; 16]);
    let hello =
        Hello { nonce, connection, flow: 0, flows: 1, checksum: true, rdma: false, random: None };
    let mut socket = TcpStream::connect(handle.address()).unwrap();
    socket.set_read_timeout(Some(harness::PATIENCE)).unwrap();
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

/// As a rank of the job would whose environment differs.
#[test]
fn the_connector_says_what_differs() {
    run_alone("garbled::alone_refused", &[("EVENKEEL_CHECKSUM", "1")]);
}

#[test]
#[ignore = "part of another test"]
fn alone_refused() {
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
