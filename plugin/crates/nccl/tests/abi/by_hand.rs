//! The receiver against a sender that speaks the protocol by hand, so that the bytes come in the order and the pieces
//! that a test wants.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;

use evenkeel_wire::{
    ChunkHeader, ConnectionId, Frame, HANDLE_BYTES, Handle, Hello, WELCOME_BYTES, Welcome,
};

use crate::harness::{self, Net, Opaque, pattern, until};

/// The sender's end of each flow.
struct Sender(Vec<TcpStream>);

impl Sender {
    /// Connects to a listener of the library.
    fn connect(net: &Net, flows: u16) -> (Self, Opaque) {
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
                let hello = Hello { nonce, connection, flow: flow.into(), flows, random: None };
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
    fn write(&mut self, flow: usize, bytes: &[u8]) {
        self.0[flow].write_all(bytes).unwrap();
    }

    /// Waits until the receiver's system has all that was written.
    fn delivered(&self) {
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

/// A message in one chunk.
fn whole(message: u64, data: &[u8]) -> Vec<u8> {
    let total = data.len() as u64;
    let length = data.len() as u32;
    let chunk = ChunkHeader { message, offset: 0, length, total, ack_wanted: false };
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
