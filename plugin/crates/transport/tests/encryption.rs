//! Encrypted connections, through a relay that reads and changes what passes: what it learns, and
//! what it can do.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails there")]

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use evenkeel_transport::{
    Block, Handle, Listener, Log, MemoryTypes, Nonce, NullLog, NullNotify, RecvConnection,
    SendConnection, Settings, Transport,
};

/// Long enough for an emulated machine. Reached only if something is broken.
const TIMEOUT: Duration = Duration::from_secs(60);
const NONCE: Nonce = Nonce([7; 16]);
/// What is sent, over and over. The relay looks for it.
const PATTERN: &[u8] = b"a gradient nobody else may read ";

fn key(digit: &str) -> (&'static str, String) {
    ("EVENKEEL_JOB_KEY", digit.repeat(64))
}

fn required() -> (&'static str, String) {
    ("EVENKEEL_ENCRYPTION", "required".to_owned())
}

/// Whether the kernel is to encrypt, in all these tests: an environment variable, since most
/// kernels lack TLS.
fn kernel_tls() -> String {
    std::env::var("EVENKEEL_TEST_KTLS").unwrap_or_else(|_| "off".to_owned())
}

fn settings(variables: &[(&str, String)]) -> Result<Settings, String> {
    let defaults = [
        ("NCCL_SOCKET_IFNAME", "lo".to_owned()),
        ("EVENKEEL_TRANSPORT", "tcp".to_owned()),
        ("EVENKEEL_KTLS", kernel_tls()),
    ];
    let lookup = |name: &str| {
        let mut all = variables.iter().chain(&defaults);
        all.find(|(known, _)| *known == name).map(|(_, value)| value.clone())
    };
    Settings::from_lookup(lookup).map_err(|error| error.to_string())
}

fn transport(variables: &[(&str, String)]) -> Transport {
    Transport::new(settings(variables).unwrap(), Arc::new(NullLog)).unwrap()
}

fn encrypted() -> Transport {
    transport(&[required(), key("5")])
}

fn until<T>(mut poll: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(found) = poll() {
            return found;
        }
        assert!(Instant::now() < deadline, "nothing happens");
        thread::yield_now();
    }
}

fn listen(transport: &Transport) -> Listener {
    let any = (Ipv4Addr::LOCALHOST, 0).into();
    transport.listen_at(any, NONCE, "", Arc::new(NullNotify)).unwrap()
}

fn handle(address: SocketAddr) -> Handle {
    Handle { addresses: vec![address.ip()], port: address.port(), nonce: NONCE }
}

/// Both ends of a connection to a listener, through an address.
fn connect(
    from: &Transport,
    to: &Listener,
    through: SocketAddr,
) -> (SendConnection, RecvConnection) {
    let call = from.connect(0, &handle(through), "", MemoryTypes::HOST).unwrap();
    let (mut send, mut recv) = (None, None);
    until(|| {
        send = send.take().or_else(|| call.poll().unwrap());
        recv = recv.take().or_else(|| to.poll_accept().unwrap());
        (send.is_some() && recv.is_some()).then_some(())
    });
    (send.unwrap(), recv.unwrap())
}

fn message(length: usize) -> Block {
    let mut block = Block::new(length);
    for part in block.bytes_mut().chunks_mut(PATTERN.len()) {
        part.copy_from_slice(&PATTERN[..part.len()]);
    }
    block
}

/// Sends messages of these lengths, one after the other, and checks that they arrive as they are.
fn pass_messages(send: &SendConnection, recv: &RecvConnection, lengths: &[usize]) {
    for length in lengths {
        let message = Arc::new(message(*length));
        let mut received = recv.recv_block(Block::new(*length), *length).unwrap().ok().unwrap();
        let mut sent = send.send_block(&message, *length).unwrap().unwrap();
        let mut is_sent = false;
        let (arrived, size) = until(|| {
            is_sent = is_sent || sent.poll(true).unwrap();
            received.poll(true).unwrap()
        });
        assert_eq!(size, *length);
        assert!(arrived.bytes() == message.bytes(), "a wrong byte arrived");
        until(|| (is_sent || sent.poll(true).unwrap()).then_some(()));
    }
}

/// What a relay does to a connection in a direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attack {
    Nothing,
    /// Flips a bit of this byte of the stream.
    Flip(usize),
    /// Ends both directions before this byte.
    Cut(usize),
    /// Drops, sends twice, or delays behind the next one, the record with this number.
    Drop(usize),
    Repeat(usize),
    Swap(usize),
    /// Answers the dialer itself with these bytes, and passes on nothing.
    Answer(&'static [u8]),
    /// Changes the announcement's protocol version.
    Older,
}

/// To the listener, or back to the dialer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Towards {
    Listener,
    Dialer,
}

/// A man in the middle, at an address of his own.
struct Relay {
    address: SocketAddr,
    seen: Arc<Mutex<Vec<Vec<u8>>>>,
    attacks: Arc<AtomicUsize>,
    ended: Arc<AtomicBool>,
}

impl Relay {
    /// Passes bytes on to the listener. Attacks the first `count` connections.
    fn start(listener: SocketAddr, attack: Attack, towards: Towards, count: usize) -> Self {
        let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        socket.set_nonblocking(true).unwrap();
        let relay = Self {
            address: socket.local_addr().unwrap(),
            seen: Arc::default(),
            attacks: Arc::default(),
            ended: Arc::default(),
        };
        let (seen, attacks, ended) =
            (Arc::clone(&relay.seen), Arc::clone(&relay.attacks), Arc::clone(&relay.ended));
        thread::spawn(move || {
            let mut number = 0;
            while !ended.load(Ordering::Relaxed) {
                let Ok((dialer, _)) = socket.accept() else {
                    thread::sleep(Duration::from_millis(1));
                    continue;
                };
                dialer.set_nonblocking(false).unwrap();
                let attack = if number < count { attack } else { Attack::Nothing };
                number += 1;
                if let Attack::Answer(bytes) = attack {
                    let mut dialer = dialer;
                    attacks.fetch_add(1, Ordering::Relaxed);
                    let _ = dialer.write_all(bytes);
                    // Unread bytes would reset it.
                    let _ = dialer.read(&mut [0; 4096]);
                    continue;
                }
                let Ok(listener) = TcpStream::connect(listener) else { continue };
                for (direction, from, to) in
                    [(Towards::Listener, &dialer, &listener), (Towards::Dialer, &listener, &dialer)]
                {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let attack = if direction == towards { attack } else { Attack::Nothing };
                    let (seen, attacks) = (Arc::clone(&seen), Arc::clone(&attacks));
                    thread::spawn(move || pass(from, to, attack, direction, &seen, &attacks));
                }
            }
        });
        relay
    }

    /// Whether its connections carried these bytes, in a row.
    fn has_seen(&self, bytes: &[u8]) -> bool {
        let seen = self.seen.lock().unwrap();
        seen.iter().any(|stream| stream.windows(bytes.len()).any(|window| window == bytes))
    }

    fn bytes(&self) -> usize {
        self.seen.lock().unwrap().iter().map(Vec::len).sum()
    }

    fn attacks(&self) -> usize {
        self.attacks.load(Ordering::Relaxed)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
    }
}

/// Passes bytes in one direction of a connection.
fn pass(
    mut from: TcpStream,
    mut to: TcpStream,
    attack: Attack,
    direction: Towards,
    seen: &Mutex<Vec<Vec<u8>>>,
    attacks: &AtomicUsize,
) {
    let place = {
        let mut seen = seen.lock().unwrap();
        seen.push(Vec::new());
        seen.len() - 1
    };
    let mut passed = 0;
    // Bytes that are not passed on: a record that is not complete.
    let mut held = Vec::new();
    let mut delayed: Option<Vec<u8>> = None;
    let mut records = 0;
    let mut is_announced = direction == Towards::Dialer;
    let mut buffer = vec![0; 1 << 16];
    let count = || attacks.fetch_add(1, Ordering::Relaxed);
    loop {
        let received = match from.read(&mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(received) => received,
        };
        let bytes = &mut buffer[..received];
        seen.lock().unwrap()[place].extend_from_slice(bytes);
        let mut out = Vec::new();
        match attack {
            Attack::Drop(at) | Attack::Repeat(at) | Attack::Swap(at) => {
                held.extend_from_slice(bytes);
                if !is_announced && held.len() >= 16 {
                    out.extend(held.drain(..16));
                    is_announced = true;
                }
                while is_announced && held.len() >= 5 {
                    let length = 5 + usize::from(u16::from_be_bytes([held[3], held[4]]));
                    if held.len() < length {
                        break;
                    }
                    let record: Vec<u8> = held.drain(..length).collect();
                    let is_target = records == at;
                    records += 1;
                    match attack {
                        Attack::Drop(_) if is_target => drop(count()),
                        Attack::Repeat(_) if is_target => {
                            count();
                            out.extend_from_slice(&record);
                            out.extend_from_slice(&record);
                        }
                        Attack::Swap(_) if is_target => delayed = Some(record),
                        _ => {
                            out.extend_from_slice(&record);
                            if let Some(delayed) = delayed.take() {
                                count();
                                out.extend_from_slice(&delayed);
                            }
                        }
                    }
                }
            }
            Attack::Flip(at) => {
                if (passed..passed + received).contains(&at) {
                    count();
                    bytes[at - passed] ^= 1;
                }
                out.extend_from_slice(bytes);
            }
            Attack::Cut(at) if passed + received > at => {
                count();
                let _ = to.write_all(&bytes[..at - passed]);
                break;
            }
            Attack::Older => {
                if passed == 0 {
                    count();
                    bytes[8] -= 1;
                }
                out.extend_from_slice(bytes);
            }
            Attack::Cut(_) | Attack::Nothing | Attack::Answer(_) => out.extend_from_slice(bytes),
        }
        passed += received;
        if to.write_all(&out).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

const LENGTHS: [usize; 5] = [1, 100, 5000, 3 << 20, 8];

#[test]
fn encryption_hides_every_byte_that_was_sent() {
    for (variables, is_clear) in [(vec![key("5")], true), (vec![key("5"), required()], false)] {
        let near = transport(&variables);
        let listener = listen(&near);
        let relay = Relay::start(listener.address(), Attack::Nothing, Towards::Listener, 0);
        let (send, recv) = connect(&transport(&variables), &listener, relay.address);
        pass_messages(&send, &recv, &LENGTHS);
        assert!(relay.bytes() > LENGTHS.iter().sum::<usize>(), "the relay saw it all");
        // In clear it sees all of them: so it would see them.
        assert_eq!(relay.has_seen(&PATTERN[..8]), is_clear);
        assert_eq!(relay.has_seen(&NONCE.0), is_clear);
    }
}

#[test]
fn encryption_with_checksums_carries_messages_too() {
    let variables = [key("5"), required(), ("EVENKEEL_CHECKSUM", "1".to_owned())];
    let near = transport(&variables);
    let listener = listen(&near);
    let (send, recv) = connect(&transport(&variables), &listener, listener.address());
    pass_messages(&send, &recv, &LENGTHS);
}

/// The offsets are in the handshake, in the hello, in the first message, and in later ones.
#[test]
fn encrypted_flows_that_are_attacked_are_repaired() {
    let near = encrypted();
    let attacks = [
        (Attack::Flip(3), Towards::Listener),
        (Attack::Flip(40), Towards::Listener),
        (Attack::Flip(60), Towards::Dialer),
        (Attack::Flip(300), Towards::Dialer),
        (Attack::Flip(450), Towards::Listener),
        (Attack::Flip(20_000), Towards::Listener),
        (Attack::Flip(300_001), Towards::Listener),
        (Attack::Cut(10), Towards::Listener),
        (Attack::Cut(100), Towards::Dialer),
        (Attack::Cut(400), Towards::Listener),
        (Attack::Cut(200_000), Towards::Listener),
        (Attack::Drop(5), Towards::Listener),
        (Attack::Drop(12), Towards::Listener),
        (Attack::Repeat(6), Towards::Listener),
        (Attack::Repeat(20), Towards::Listener),
        (Attack::Swap(5), Towards::Listener),
        (Attack::Swap(15), Towards::Listener),
        (Attack::Repeat(7), Towards::Dialer),
        (Attack::Swap(7), Towards::Dialer),
    ];
    for (attack, towards) in attacks {
        let listener = listen(&near);
        // Half of the flows. Those that replace them are left alone.
        let relay = Relay::start(listener.address(), attack, towards, 2);
        let (send, recv) = connect(&encrypted(), &listener, relay.address);
        // Until every attack has come.
        for round in 0.. {
            pass_messages(&send, &recv, &LENGTHS);
            if relay.attacks() > 0 {
                break;
            }
            assert!(round < 100, "{attack:?} {towards:?} never came");
        }
        pass_messages(&send, &recv, &LENGTHS);
        assert!(!relay.has_seen(&PATTERN[..8]), "{attack:?} {towards:?}");
    }
}

/// What a dialer sent on a connection is sent again by somebody else, byte by byte.
#[test]
fn encrypted_flow_cannot_be_replayed() {
    let near = encrypted();
    let listener = listen(&near);
    let relay = Relay::start(listener.address(), Attack::Nothing, Towards::Listener, 0);
    let far = transport(&[required(), key("5"), ("EVENKEEL_REPATH", "off".to_owned())]);
    let (send, recv) = connect(&far, &listener, relay.address);
    pass_messages(&send, &recv, &LENGTHS);
    let recorded = relay.seen.lock().unwrap().clone();
    for bytes in recorded.iter().filter(|bytes| bytes.starts_with(b"EVKL-TLS")) {
        let mut replayed = TcpStream::connect(listener.address()).unwrap();
        replayed.set_read_timeout(Some(TIMEOUT)).unwrap();
        let _ = replayed.write_all(&bytes[..bytes.len().min(100_000)]);
        let mut answer = Vec::new();
        // The listener's half of a handshake and an alert, which nobody without the key can go on
        // with, and the end.
        match replayed.read_to_end(&mut answer) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
        }
    }
    pass_messages(&send, &recv, &LENGTHS);
    assert_eq!(recv.flows(), 4, "no flow was added");
    assert!(listener.poll_accept().unwrap().is_none(), "no connection was added");
}

/// The error of a dialer, through an address.
fn refused(from: &Transport, through: SocketAddr) -> String {
    let call = from.connect(0, &handle(through), "", MemoryTypes::HOST).unwrap();
    until(|| call.poll().err()).to_string()
}

#[test]
fn encryption_with_another_jobs_key_is_refused_by_name() {
    let near = encrypted();
    let listener = listen(&near);
    let error = refused(&transport(&[required(), key("6")]), listener.address());
    assert!(error.contains("does not have the job key"), "{error}");
    assert!(listener.poll_accept().unwrap().is_none());
}

#[test]
fn encryption_on_one_side_only_is_refused_by_name() {
    for (dialer, answerer) in [
        (vec![required(), key("5")], vec![key("5")]),
        (vec![required(), key("5")], vec![]),
        (vec![key("5")], vec![required(), key("5")]),
        (vec![], vec![required(), key("5")]),
    ] {
        let near = transport(&answerer);
        let listener = listen(&near);
        let error = refused(&transport(&dialer), listener.address());
        assert!(error.contains("EVENKEEL_ENCRYPTION"), "{dialer:?} {answerer:?}: {error}");
        assert!(listener.poll_accept().unwrap().is_none());
    }
}

#[test]
fn encryption_cannot_be_downgraded() {
    let near = encrypted();
    let listener = listen(&near);
    let dialer = transport(&[required(), key("5"), ("EVENKEEL_CONNECT_TIMEOUT", "2".to_owned())]);
    // A welcome in clear: magic, protocol version, accepted, zeros.
    const WELCOME: &[u8] = b"EVKL-WEL\x08\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    // The same with a refusal that ends a connection, or the use of RDMA: within a session it is
    // believed.
    const GONE: &[u8] = b"EVKL-WEL\x08\0\x05\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    const NO_RDMA: &[u8] = b"EVKL-WEL\x08\0\x07\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    for (attack, says) in [
        (Attack::Answer(WELCOME), "accepted in clear"),
        (Attack::Answer(GONE), "an answer in clear"),
        (Attack::Answer(NO_RDMA), "an answer in clear"),
        (Attack::Answer(b"SSH-2.0-OpenSSH_9.6\r\n"), "TLS"),
        (Attack::Older, "version"),
    ] {
        let relay = Relay::start(listener.address(), attack, Towards::Listener, usize::MAX);
        let error = refused(&dialer, relay.address);
        assert!(error.contains(says), "{attack:?}: {error}");
        assert!(relay.attacks() > 0);
    }
    assert!(listener.poll_accept().unwrap().is_none());
}

/// Keeps warnings.
#[derive(Default)]
struct Warnings(Mutex<Vec<String>>);

impl Log for Warnings {
    fn warn(&self, line: &str) {
        self.0.lock().unwrap().push(line.to_owned());
    }

    fn info(&self, _line: &str) {}
}

/// The processes encrypt themselves then, and say so.
#[test]
fn encryption_by_a_kernel_without_tls_is_that_of_the_processes() {
    let layers = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_available_ulp").unwrap();
    let has_tls = layers.split_whitespace().any(|layer| layer == "tls");
    let variables = [key("5"), required(), ("EVENKEEL_KTLS", "on".to_owned())];
    let warnings = Arc::new(Warnings::default());
    let log = Arc::clone(&warnings) as Arc<dyn Log>;
    let near = Transport::new(settings(&variables).unwrap(), log).unwrap();
    let listener = listen(&near);
    let (send, recv) = connect(&near, &listener, listener.address());
    pass_messages(&send, &recv, &LENGTHS);
    let warnings = warnings.0.lock().unwrap().join("\n");
    assert_eq!(warnings.contains("the kernel has no TLS"), !has_tls, "{warnings}");
}

#[test]
fn encryption_needs_a_key_and_no_rdma() {
    let error = settings(&[required()]).unwrap_err();
    assert!(error.contains("EVENKEEL_ENCRYPTION") && error.contains("EVENKEEL_JOB_KEY"), "{error}");
    let rdma = || ("EVENKEEL_TRANSPORT", "rdma".to_owned());
    let error = settings(&[required(), key("5"), rdma()]).unwrap_err();
    assert!(error.contains("EVENKEEL_RDMA_NETWORK=trusted"), "{error}");
    let trusted = ("EVENKEEL_RDMA_NETWORK", "trusted".to_owned());
    let status = |variables: &[(&str, String)]| settings(variables).unwrap().encryption_status();
    let tls = if kernel_tls() == "on" { "TLS 1.3 by the kernel" } else { "TLS 1.3" };
    assert_eq!(
        status(&[required(), key("5"), rdma(), trusted]),
        format!("encryption required ({tls}; RDMA in clear over a trusted network)")
    );
    assert_eq!(status(&[required(), key("5")]), format!("encryption required ({tls})"));
    assert_eq!(status(&[key("5")]), "encryption off");
}
