//! The receiver against a sender that speaks the protocol by hand, so that the bytes come in the order and the pieces
//! that a test wants.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;

use evenkeel_protocol::{
    ChunkHeader, ConnectionId, FRAME_BYTES, Frame, HANDLE_BYTES, Handle, Hello, WELCOME_BYTES,
    Welcome,
};

use crate::harness::{self, Net, Opaque, pattern, until};

/// The sender's end of each flow.
pub(crate) struct Sender(pub(crate) Vec<TcpStream>);

impl Sender {
    /// Connects to a listener of the library.
    pub(crate) fn connect(net: &Net, flows: u16) -> (Self, Opaque) {
        let (listener, handle) = net.listen();
        let mut bytes = [0; HANDLE_BYTES];
        bytes.copy_from_slice(&handle.0[..HANDLE_BYTES]);
        let nonce = Handle::decode(&bytes).unwrap().nonce;
        let connection = ConnectionId([7; 16]);
        let sockets: Vec<TcpStream> = (0..flows)
            .map(|flow| {
                let mut socket = TcpStream::connect(handle.address()).unwrap();
                socket.set_nodelay(true).unwrap();
                socket.set_read_timeout(Some(harness::PATIENCE)).unwrap();
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

    /// Waits until the receiver's system has all that was written.
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

/// A message in one chunk, whose acknowledgement may come late.
fn whole(message: u64, data: &[u8]) -> Vec<u8> {
    piece(message, data, false)
}

fn piece(message: u64, data: &[u8], ack_wanted: bool) -> Vec<u8> {
    let total = data.len() as u64;
    let length = data.len() as u32;
    let chunk = ChunkHeader { message, offset: 0, length, total, ack_wanted };
    [&Frame::Chunk(chunk).encode(), data].concat()
}

/// An empty message is nothing but a frame, which may have been read together with the end of the message before it when
/// that was as much as is read in one turn.
#[test]
fn a_frame_that_came_with_the_message_before_it_is_not_forgotten() {
    let net = Net::init(12, 0xba).unwrap();
    let (mut sender, recv) = Sender::connect(&net, 2);
    let large = pattern(0, 100_000);
    sender.write(0, &[whole(0, &large), whole(1, &[])].concat());
    sender.write(1, &whole(2, b"x"));
    sender.delivered();
    let mut received = vec![0; large.len()];
    let mut buffers = [0u8; 2];
    let pointers = [received.as_mut_ptr(), &raw mut buffers[0], &raw mut buffers[1]];
    let sizes = [received.len(), 1, 1];
    // SAFETY: the buffers outlive the connection.
    let requests: Vec<Opaque> = pointers
        .into_iter()
        .zip(sizes)
        .map(|(pointer, size)| unsafe { net.irecv(recv, pointer, size) }.unwrap().unwrap())
        .collect();
    let lengths: Vec<_> = requests.into_iter().map(|request| net.finish(request)).collect();
    assert_eq!(lengths, [Ok(large.len()), Ok(0), Ok(1)]);
    assert!(received == large);
    assert_eq!(buffers[1], b'x');
    net.close_recv(recv);
}

/// Posts a buffer of one byte, which must live as long as the connection.
fn post(net: &Net, recv: Opaque, byte: &mut u8) -> Opaque {
    // SAFETY: as the caller says.
    unsafe { net.irecv(recv, byte, 1) }.unwrap().unwrap()
}

/// Small messages on the first flow, for which the caller asks so diligently that the worker leaves them to it. Returns
/// the number of the next message.
fn make_the_caller_attend(net: &Net, recv: Opaque, sender: &mut Sender, byte: &mut u8) -> u64 {
    const MESSAGES: u64 = 10;
    for message in 0..MESSAGES {
        let request = post(net, recv, byte);
        for _ in 0..100 {
            assert_eq!(net.test(request), Ok(None));
        }
        sender.write(0, &whole(message, b"x"));
        assert_eq!(net.finish(request), Ok(1));
    }
    MESSAGES
}

#[test]
fn messages_arrive_also_when_a_diligent_caller_stops_asking() {
    let net = Net::init(12, 0xbb).unwrap();
    let (mut sender, recv) = Sender::connect(&net, 1);
    let (mut byte, mut bytes) = (0, [0; 3]);
    let next = make_the_caller_attend(&net, recv, &mut sender, &mut byte);
    let requests: Vec<_> = bytes.iter_mut().map(|byte| post(&net, recv, byte)).collect();
    for message in next..next + 3 {
        sender.write(0, &piece(message, b"y", true));
        // Nobody asks, and yet it is acknowledged.
        let mut frame = [0; FRAME_BYTES];
        while Frame::decode(&frame) != Ok(Frame::Ack(message + 1)) {
            sender.0[0].read_exact(&mut frame).unwrap();
        }
    }
    for request in requests {
        assert_eq!(net.test(request), Ok(Some(1)));
    }
    assert_eq!(bytes, *b"yyy");
    net.close_recv(recv);
}

#[test]
fn a_diligent_caller_gets_what_comes_on_any_flow() {
    let net = Net::init(12, 0xbc).unwrap();
    let (mut sender, recv) = Sender::connect(&net, 2);
    let (mut byte, mut bytes) = (0, [0; 30]);
    let next = make_the_caller_attend(&net, recv, &mut sender, &mut byte);
    for (message, byte) in (next..).zip(&mut bytes) {
        let request = post(&net, recv, byte);
        sender.write(message as usize / 3 % 2, &whole(message, &[message as u8]));
        assert_eq!(net.finish(request), Ok(1));
        assert_eq!(*byte, message as u8);
    }
    let large = pattern(1, 300_000);
    let mut received = vec![0; large.len()];
    // SAFETY: the buffer outlives the connection.
    let request = unsafe { net.irecv(recv, received.as_mut_ptr(), received.len()) };
    sender.write(0, &whole(next + 30, &large));
    assert_eq!(net.finish(request.unwrap().unwrap()), Ok(large.len()));
    assert!(received == large);
    net.close_recv(recv);
}
