//! Peers of the library that are made by hand, so that a test chooses the bytes, their order and their pieces.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;

use evenkeel_nccl_abi::HANDLE_SIZE;
use evenkeel_protocol::{
    ChunkHeader, ConnectionId, FRAME_BYTES, Frame, HANDLE_BYTES, HELLO_BYTES, Hello, Nonce,
    WELCOME_BYTES, Welcome,
};
use evenkeel_testkit::TestRng;

use crate::harness::{Handle, Net, Opaque, TIMEOUT, until};

/// The value of bytes that were not written, or that are in use for something else.
pub(crate) const UNTOUCHED: u8 = 0xee;

/// The byte of a message at this offset. Never `UNTOUCHED`.
pub(crate) fn content(message: u64, at: u64) -> u8 {
    (message.wrapping_mul(101).wrapping_add(at.wrapping_mul(31)).wrapping_add(at / 251) % 0xee)
        as u8
}

/// Bytes of a message in this range. None is `UNTOUCHED`.
pub(crate) fn contents(message: u64, from: u64, to: u64) -> Vec<u8> {
    (from..to).map(|at| content(message, at)).collect()
}

/// A sender: its end of each flow.
pub(crate) struct Sender(pub(crate) Vec<TcpStream>);

impl Sender {
    /// Connects to a listener of the library.
    pub(crate) fn connect(net: &Net, flows: u16) -> (Self, Opaque) {
        let (listener, handle) = net.listen();
        let mut bytes = [0; HANDLE_BYTES];
        bytes.copy_from_slice(&handle.0[..HANDLE_BYTES]);
        let nonce = evenkeel_protocol::Handle::decode(&bytes).unwrap().nonce;
        let connection = ConnectionId([7; 16]);
        let sockets: Vec<TcpStream> = (0..flows)
            .map(|flow| {
                let mut socket = TcpStream::connect(handle.address()).unwrap();
                socket.set_nodelay(true).unwrap();
                socket.set_read_timeout(Some(TIMEOUT)).unwrap();
                let hello = Hello {
                    nonce,
                    connection,
                    flow: flow.into(),
                    flows,
                    checksum: false,
                    rdma: false,
                    random: None,
                };
                socket.write_all(&hello.encode()).unwrap();
                socket
            })
            .collect();
        let recv = until("accept", || net.poll_accept(listener).unwrap()).unwrap();
        net.close_listen(listener);
        for mut socket in &sockets {
            let mut welcome = [0; WELCOME_BYTES];
            socket.read_exact(&mut welcome).unwrap();
            Welcome::check(&welcome, connection).unwrap();
        }
        (Self(sockets), recv)
    }

    /// Writes on one flow, in one piece.
    pub(crate) fn write(&mut self, flow: usize, bytes: &[u8]) {
        self.0[flow].write_all(bytes).unwrap();
    }

    /// Writes on one flow, which the receiver may have ended.
    pub(crate) fn try_write(&mut self, flow: usize, bytes: &[u8]) {
        let _ = self.0[flow].write_all(bytes);
    }

    /// Waits until the receiver's host has acknowledged all that was written.
    pub(crate) fn delivered(&self) {
        let unsent = |socket: &TcpStream| {
            let mut bytes = -1;
            // SAFETY: the request writes one int.
            let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &mut bytes) };
            assert_eq!(result, 0);
            bytes
        };
        until("delivery", || self.0.iter().all(|socket| unsent(socket) == 0).then_some(()))
            .unwrap();
    }
}

/// A message in one chunk, whose acknowledgement may be delayed.
pub(crate) fn single_chunk(message: u64, data: &[u8]) -> Vec<u8> {
    single_chunk_with_ack(message, data, false)
}

pub(crate) fn single_chunk_with_ack(message: u64, data: &[u8], ack_wanted: bool) -> Vec<u8> {
    let total = data.len() as u64;
    let length = data.len() as u32;
    let chunk = ChunkHeader { message, offset: 0, length, total, ack_wanted };
    [&Frame::Chunk(chunk).encode(), data].concat()
}

/// A receiver: a listener with the flows that it has accepted.
pub(crate) struct Receiver {
    nonce: Nonce,
    pub(crate) listener: Option<TcpListener>,
    pub(crate) flows: Vec<Flow>,
    /// Bytes of messages received.
    pub(crate) received: u64,
}

pub(crate) struct Flow {
    pub(crate) stream: TcpStream,
    pub(crate) welcomed: bool,
    bytes: Vec<u8>,
    /// The chunk whose bytes are next, and their offset.
    chunk: Option<(ChunkHeader, u64)>,
    pub(crate) ended: bool,
}

impl Receiver {
    /// Listens. The library can connect to the handle.
    pub(crate) fn listen(rng: &mut TestRng) -> (Self, Handle) {
        Self::listen_at("127.0.0.1:0", rng)
    }

    /// The same at this address.
    pub(crate) fn listen_at(at: &str, rng: &mut TestRng) -> (Self, Handle) {
        let listener = TcpListener::bind(at).unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let nonce = Nonce(rng.array());
        let handle = evenkeel_protocol::Handle {
            addresses: vec![address.ip()],
            port: address.port(),
            nonce,
        };
        let mut bytes = [0; HANDLE_SIZE];
        bytes[..HANDLE_BYTES].copy_from_slice(&handle.encode());
        let receiver = Self { nonce, listener: Some(listener), flows: Vec::new(), received: 0 };
        (receiver, Handle(bytes))
    }

    /// Waits for the library to connect.
    pub(crate) fn connected(&mut self, net: &Net, handle: &mut Handle) -> Opaque {
        let send = until("a connection", || {
            self.step();
            net.poll_connect(handle).unwrap()
        });
        send.expect("a connection")
    }

    /// Reads until the library has ended every flow.
    pub(crate) fn drain(&mut self) {
        until("the end", || {
            self.step();
            self.flows.iter().all(|flow| flow.ended).then_some(())
        })
        .expect("the end");
    }

    /// Accepts a flow, if one is there.
    pub(crate) fn accept_one(&mut self) -> bool {
        let Some(Ok((stream, _))) = self.listener.as_ref().map(TcpListener::accept) else {
            return false;
        };
        stream.set_nonblocking(true).unwrap();
        let (bytes, chunk) = (Vec::new(), None);
        self.flows.push(Flow { stream, welcomed: false, bytes, chunk, ended: false });
        true
    }

    /// Reads from the flows that are accepted.
    pub(crate) fn read(&mut self) {
        for flow in &mut self.flows {
            self.received += flow.step(self.nonce);
        }
    }

    /// Accepts new flows, and reads from all.
    pub(crate) fn step(&mut self) {
        while self.accept_one() {}
        self.read();
    }

    pub(crate) fn welcomed(&self) -> usize {
        self.flows.iter().filter(|flow| flow.welcomed).count()
    }
}

impl Flow {
    /// Reads what is available and checks messages' bytes. Returns their number.
    fn step(&mut self, nonce: Nonce) -> u64 {
        let mut buffer = [0; 1 << 16];
        let mut received = 0;
        while !self.ended {
            match self.stream.read(&mut buffer) {
                Ok(0) => self.ended = true,
                Ok(read) => self.bytes.extend_from_slice(&buffer[..read]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => self.ended = true,
            }
            received += self.take(nonce);
        }
        received
    }

    fn take(&mut self, nonce: Nonce) -> u64 {
        let mut received = 0;
        if !self.welcomed {
            let Some((hello, rest)) = self.bytes.split_first_chunk::<HELLO_BYTES>() else {
                return 0;
            };
            let hello = Hello::decode(hello, nonce, false, false).unwrap();
            self.bytes = rest.to_vec();
            let welcome = Welcome { connection: hello.connection, verdict: Ok(()) };
            let _ = self.stream.write_all(&welcome.encode());
            self.welcomed = true;
        }
        loop {
            if let Some((chunk, at)) = &mut self.chunk {
                let have = self.bytes.len().min((chunk.end() - *at) as usize);
                for (byte, at) in self.bytes.drain(..have).zip(*at..) {
                    assert_eq!(byte, content(chunk.message, at), "of {chunk:?} at {at}");
                }
                *at += have as u64;
                received += have as u64;
                if *at < chunk.end() {
                    return received;
                }
                self.chunk = None;
            }
            let Some((frame, rest)) = self.bytes.split_first_chunk::<FRAME_BYTES>() else {
                return received;
            };
            if let Frame::Chunk(chunk) = Frame::decode(frame).unwrap() {
                self.chunk = Some((chunk, chunk.offset));
            }
            self.bytes = rest.to_vec();
        }
    }
}
