//! A TCP connection's bytes, in clear or in a TLS session. Who writes or reads frames need not know
//! which.

mod buffer;
mod kernel;
mod reader;
mod writer;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use evenkeel_tls::{HandshakeError, KeyUse, Session};
use socket2::Socket;

use crate::memory::buffers::{RecvBuffer, SendBuffer};
use crate::sys::{self, KernelTls};
use kernel::KernelWriter;
use reader::RecordReader;
use writer::RecordWriter;

/// A TCP connection, and how bytes go over it in each direction.
pub(crate) struct Stream {
    pub(crate) socket: Socket,
    pub(crate) send: SendHalf,
    pub(crate) recv: RecvHalf,
}

impl Stream {
    /// Without TLS.
    pub(crate) fn plain(socket: Socket) -> Self {
        Self { socket, send: SendHalf::default(), recv: RecvHalf::default() }
    }

    /// From here on, everything is encrypted. With `by_kernel`, the kernel does it in the
    /// directions in which it can.
    ///
    /// # Errors
    /// When the keys are no keys of their cipher.
    pub(crate) fn encrypt(
        &mut self,
        session: &Session,
        by_kernel: bool,
    ) -> Result<(), HandshakeError> {
        let (sealer, opener) = session.records()?;
        self.send = SendHalf::Records(Box::new(RecordWriter::new(sealer)));
        self.recv = RecvHalf::Records(Box::new(RecordReader::new(opener)));
        if by_kernel && sys::allow_kernel_tls(&self.socket).is_ok() {
            if sys::set_kernel_keys(&self.socket, KernelTls::Send, &session.send).is_ok() {
                self.send = SendHalf::Kernel(Box::default());
            }
            if sys::set_kernel_keys(&self.socket, KernelTls::Receive, &session.receive).is_ok() {
                self.recv = RecvHalf::Kernel;
            }
        }
        Ok(())
    }

    /// Whether it is in a TLS session.
    pub(crate) fn is_encrypted(&self) -> bool {
        !matches!(self.send, SendHalf::Plain)
    }

    /// Sends a part of a handshake. Returns the number of bytes taken, all of them if the socket
    /// has room.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.send.send_with_header(&self.socket, bytes, SendBuffer::from_static(&[]))
    }

    /// Receives a part of a handshake.
    pub(crate) fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.recv.read(&self.socket, into)
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The sending direction of a TCP connection.
#[derive(Default)]
pub(crate) enum SendHalf {
    /// As they are.
    #[default]
    Plain,
    /// In the records of a TLS session.
    Records(Box<RecordWriter>),
    /// In records that the kernel makes.
    Kernel(Box<KernelWriter>),
}

impl SendHalf {
    /// Sends `header`, then `payload`, as far as there is room. Returns the number of bytes taken
    /// of both together.
    pub(crate) fn send_with_header(
        &mut self,
        socket: &Socket,
        header: &[u8],
        payload: SendBuffer,
    ) -> io::Result<usize> {
        self.send_frames(socket, std::iter::once((header, payload)))
    }

    /// Sends frames, each with a header and a payload, in order and as far as there is room.
    /// Returns the number of bytes taken of all together. In a TLS session the socket may not have
    /// taken some of them yet ([`SendHalf::is_flushed`]).
    ///
    /// # Panics
    /// When there are more than [`evenkeel_protocol::MAX_FRAMES`].
    pub(crate) fn send_frames<'a>(
        &mut self,
        socket: &Socket,
        frames: impl Iterator<Item = (&'a [u8], SendBuffer)>,
    ) -> io::Result<usize> {
        match self {
            Self::Plain => sys::send_frames(socket, frames),
            Self::Records(writer) => writer.send_frames(socket, frames),
            Self::Kernel(writer) => writer.send_frames(socket, frames),
        }
    }

    /// What its key has encrypted; `None` without TLS.
    pub(crate) fn key_use(&mut self) -> Option<&mut KeyUse> {
        match self {
            Self::Plain => None,
            Self::Records(writer) => Some(writer.used()),
            Self::Kernel(writer) => Some(writer.used()),
        }
    }

    /// Whether the socket has all bytes that were taken.
    pub(crate) fn is_flushed(&self) -> bool {
        match self {
            Self::Plain | Self::Kernel(_) => true,
            Self::Records(writer) => writer.is_flushed(),
        }
    }

    /// Sends what was taken and the socket had no room for.
    ///
    /// # Errors
    /// As for a write: `WouldBlock` if some is left.
    pub(crate) fn flush(&mut self, socket: &Socket) -> io::Result<()> {
        match self {
            Self::Plain | Self::Kernel(_) => Ok(()),
            Self::Records(writer) => writer.flush(socket),
        }
    }
}

/// The receiving direction of a TCP connection.
#[derive(Default)]
pub(crate) enum RecvHalf {
    /// As they are.
    #[default]
    Plain,
    /// In the records of a TLS session. No byte is given out before its record is authenticated.
    Records(Box<RecordReader>),
    /// In records that the kernel opens. It gives out no byte before its record is authenticated
    /// either.
    Kernel,
}

impl RecvHalf {
    /// Receives into `payload`, then into `header`, as much as is available. Returns the number of
    /// bytes received in both together; 0 at the end of the stream.
    ///
    /// # Errors
    /// As for a read. `InvalidData` if the bytes are not the peer's
    /// ([`evenkeel_tls::RecordError`]).
    pub(crate) fn recv_with_header(
        &mut self,
        socket: &Socket,
        payload: RecvBuffer,
        header: &mut [u8],
    ) -> io::Result<usize> {
        match self {
            Self::Plain => sys::recv_with_header(socket, payload, header),
            Self::Records(reader) => reader.recv_with_header(socket, payload, header),
            Self::Kernel => kernel::recv_with_header(socket, payload, header),
        }
    }

    /// As [`RecvHalf::recv_with_header`], without a payload.
    pub(crate) fn read(&mut self, socket: &Socket, into: &mut [u8]) -> io::Result<usize> {
        self.recv_with_header(socket, RecvBuffer::from_static(&mut []), into)
    }

    /// Drops up to `length` bytes; 0 at the end of the stream.
    pub(crate) fn discard(&mut self, socket: &Socket, length: usize) -> io::Result<usize> {
        match self {
            Self::Plain => sys::discard(socket, length),
            Self::Records(reader) => reader.discard(socket, length),
            Self::Kernel => kernel::discard(socket, length),
        }
    }

    /// Whether it is known already, without an event of the socket, that the next read fails.
    pub(crate) fn has_failed(&self) -> bool {
        match self {
            Self::Plain | Self::Kernel => false,
            Self::Records(reader) => reader.has_failed(),
        }
    }

    /// From now on the peer sends without waiting, so reads need not stop at the end of a record.
    /// Until then nothing is read that whoever continues with the socket would miss an event for.
    pub(crate) fn read_ahead(&mut self) {
        if let Self::Records(reader) = self {
            reader.read_ahead();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use evenkeel_protocol::JobKey;
    use evenkeel_testkit::TestRng;
    use evenkeel_tls::{Handshake, JobIdentity, RecordError};

    use super::*;
    use crate::connection::base::would_block;
    use crate::memory::block::Block;

    /// The keys of both ends of a session.
    fn sessions() -> (Session, Session) {
        let identity = JobIdentity::of(&JobKey::parse(&"5".repeat(64)).unwrap()).unwrap();
        let mut near = Handshake::connector(&identity).unwrap();
        let mut far = Handshake::listener(&identity).unwrap();
        while !near.is_complete() || !far.is_complete() {
            for _ in 0..2 {
                let sent = near.to_send();
                let mut rest = &sent[..];
                while !rest.is_empty() {
                    let (next, later) = rest.split_at(far.wanted().min(rest.len()));
                    far.receive(next).unwrap();
                    rest = later;
                }
                std::mem::swap(&mut near, &mut far);
            }
        }
        (near.into_session().unwrap(), far.into_session().unwrap())
    }

    /// Both ends of an encrypted stream.
    fn pair() -> (Stream, Stream) {
        let (one, other) = UnixStream::pair().unwrap();
        encrypted(one.into(), other.into(), [false, false])
    }

    /// As [`pair`], over TCP. The kernel does it at these ends.
    fn kernel_pair(by_kernel: [bool; 2]) -> (Stream, Stream) {
        assert!(sys::has_kernel_tls(), "the kernel has no TLS: its module is not loaded");
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let one = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (other, _) = listener.accept().unwrap();
        let [one, other] = [one, other].map(Socket::from);
        // TCP's own buffers would take all that the tests send.
        for socket in [&one, &other] {
            socket.set_send_buffer_size(64 << 10).unwrap();
            socket.set_recv_buffer_size(64 << 10).unwrap();
        }
        let (one, other) = encrypted(one, other, by_kernel);
        for (stream, by_kernel) in [&one, &other].into_iter().zip(by_kernel) {
            assert_eq!(matches!(stream.send, SendHalf::Kernel(_)), by_kernel);
            assert_eq!(matches!(stream.recv, RecvHalf::Kernel), by_kernel);
        }
        (one, other)
    }

    fn encrypted(one: Socket, other: Socket, by_kernel: [bool; 2]) -> (Stream, Stream) {
        let (near, far) = sessions();
        let [mut one, mut other] = [one, other].map(|socket| {
            socket.set_nonblocking(true).unwrap();
            Stream::plain(socket)
        });
        one.encrypt(&near, by_kernel[0]).unwrap();
        other.encrypt(&far, by_kernel[1]).unwrap();
        (one, other)
    }

    /// The result once the bytes are there: TCP's arrive a little later.
    fn waited(mut read: impl FnMut() -> io::Result<usize>) -> usize {
        crate::test_support::until(|| match read() {
            Err(error) if would_block(&error) => None,
            other => Some(other.unwrap()),
        })
    }

    fn holds_memory(stream: &Stream) -> bool {
        let writes = match &stream.send {
            SendHalf::Plain | SendHalf::Kernel(_) => false,
            SendHalf::Records(writer) => !writer.is_flushed(),
        };
        match &stream.recv {
            RecvHalf::Plain | RecvHalf::Kernel => writes,
            RecvHalf::Records(reader) => writes || reader.holds_memory(),
        }
    }

    #[test]
    fn encrypted_stream_carries_frames_and_then_holds_no_memory() {
        carries_frames(&[pair, pair]);
    }

    /// The kernel's records are those that are made here, in both directions.
    #[test]
    #[ignore = "runs in the RDMA lab"]
    fn kernel_tls_carries_frames_from_and_to_either_side() {
        carries_frames(&[
            || kernel_pair([true, false]),
            || kernel_pair([false, true]),
            || kernel_pair([true, true]),
        ]);
    }

    /// Frames of any length, written as far as the socket takes them and read in any portions.
    fn carries_frames(pairs: &[fn() -> (Stream, Stream)]) {
        let mut random = TestRng::new(11);
        for (reads_ahead, pair) in pairs.iter().enumerate().map(|(at, pair)| (at % 2 == 1, pair)) {
            let (mut from, mut to) = pair();
            if reads_ahead {
                to.recv.read_ahead();
            }
            let mut payload = Block::new(1 << 20);
            payload.bytes_mut().copy_from_slice(&random.bytes(1 << 20));
            let header = [9; 40];
            let expected = [&header[..], payload.bytes()].concat();
            let (mut written, mut read) = (0, Vec::new());
            let mut was_full = false;
            while read.len() < expected.len() {
                let rest = &header[written.min(40)..];
                let at = written.saturating_sub(40);
                let part = payload.lend(1 << 20).part(at, (1 << 20) - at);
                match from.send.send_with_header(&from.socket, rest, part) {
                    Ok(taken) => written += taken,
                    Err(error) => {
                        assert!(would_block(&error), "{error}");
                        was_full = true;
                    }
                }
                let (first, second) = (random.below(70_000) as usize, random.below(50) as usize);
                let mut memory = Block::new(first);
                let mut next = vec![0; second + 1];
                let into = memory.lend_mut(first);
                match to.recv.recv_with_header(&to.socket, into, &mut next) {
                    Ok(received) => {
                        let in_first = received.min(first);
                        read.extend_from_slice(&memory.bytes()[..in_first]);
                        read.extend_from_slice(&next[..received - in_first]);
                    }
                    Err(error) => assert!(would_block(&error), "{error}"),
                }
            }
            assert!(read == expected, "the bytes are not those that were sent");
            assert!(was_full, "the socket never had too little room");
            assert_eq!(from.write(b"dropped, kept").unwrap(), 13);
            assert_eq!(waited(|| to.recv.discard(&to.socket, 9)), 9);
            let mut kept = [0; 10];
            assert_eq!(waited(|| to.read(&mut kept)), 4);
            assert_eq!(&kept[..4], b"kept");
            assert!(from.send.flush(&from.socket).is_ok());
            assert!(!holds_memory(&from) && !holds_memory(&to));
        }
    }

    #[test]
    fn encrypted_stream_ends_with_its_socket_or_in_the_middle_of_a_record() {
        let (mut from, mut to) = pair();
        assert_eq!(from.write(b"abc").unwrap(), 3);
        from.socket.shutdown(std::net::Shutdown::Write).unwrap();
        let mut bytes = [0; 10];
        assert_eq!(to.read(&mut bytes).unwrap(), 3);
        assert_eq!(to.read(&mut bytes).unwrap(), 0);
        let (from, mut to) = pair();
        from.socket.send(&[23, 3, 3, 0, 30, 1]).unwrap();
        from.socket.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(to.read(&mut bytes).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    /// What came before a forged record counts. The failure follows at the next read, though the
    /// socket has no event for it.
    #[test]
    fn forged_record_fails_the_stream_behind_what_is_authentic() {
        let (mut from, mut to) = pair();
        to.recv.read_ahead();
        assert_eq!(from.write(b"abc").unwrap(), 3);
        from.socket.send(&[&[23, 3, 3, 0, 30][..], &[7; 30]].concat()).unwrap();
        let mut bytes = [0; 10];
        assert_eq!(to.read(&mut bytes).unwrap(), 3);
        assert!(to.recv.has_failed());
        assert_eq!(to.read(&mut bytes).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    /// As [`forged_record_fails_the_stream_behind_what_is_authentic`].
    #[test]
    #[ignore = "runs in the RDMA lab"]
    fn kernel_tls_refuses_records_that_the_peer_has_not_sent() {
        let forged = [&[23, 3, 3, 0, 30][..], &[7; 30]].concat();
        for (sent, name) in [
            (forged, RecordError::Forged),
            (vec![23, 3, 3, 0xff, 0xff], RecordError::NotARecord),
            (vec![1; 40], RecordError::NotARecord),
        ] {
            // What is sent on the socket of a side without the kernel goes as it is.
            let (mut from, mut to) = kernel_pair([false, true]);
            assert_eq!(from.write(b"abc").unwrap(), 3);
            from.socket.send(&sent).unwrap();
            let mut bytes = [0; 10];
            assert_eq!(waited(|| to.read(&mut bytes)), 3);
            let error = crate::test_support::until(|| match to.read(&mut bytes) {
                Err(error) if would_block(&error) => None,
                other => Some(other.unwrap_err()),
            });
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
            assert_eq!(error.to_string(), name.to_string());
        }
    }

    #[test]
    #[ignore = "runs in the RDMA lab"]
    fn kernel_tls_ends_with_its_socket() {
        let (mut from, mut to) = kernel_pair([true, true]);
        assert_eq!(from.write(b"abc").unwrap(), 3);
        from.socket.shutdown(std::net::Shutdown::Write).unwrap();
        let mut bytes = [0; 10];
        assert_eq!(waited(|| to.read(&mut bytes)), 3);
        assert_eq!(waited(|| to.read(&mut bytes)), 0);
    }
}
