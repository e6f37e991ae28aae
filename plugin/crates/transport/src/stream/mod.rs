//! A TCP connection's bytes, in clear or in a TLS session. Who writes or reads frames need not know which.

mod buffer;
mod reader;
mod writer;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use evenkeel_tls::{Opener, Sealer};
use socket2::Socket;

use crate::memory::buffers::{RecvBuffer, SendBuffer};
use crate::sys;
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

    /// From here on, everything is encrypted.
    pub(crate) fn encrypt(&mut self, (sealer, opener): (Sealer, Opener)) {
        self.send = SendHalf::Records(Box::new(RecordWriter::new(sealer)));
        self.recv = RecvHalf::Records(Box::new(RecordReader::new(opener)));
    }

    /// Whether it is in a TLS session.
    pub(crate) fn is_encrypted(&self) -> bool {
        matches!(self.send, SendHalf::Records(_))
    }

    /// Sends a part of a handshake. Returns the number of bytes taken, all of them if the socket has room.
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
}

impl SendHalf {
    /// Sends `header`, then `payload`, as far as there is room. Returns the number of bytes taken of both together.
    pub(crate) fn send_with_header(
        &mut self,
        socket: &Socket,
        header: &[u8],
        payload: SendBuffer,
    ) -> io::Result<usize> {
        self.send_frames(socket, std::iter::once((header, payload)))
    }

    /// Sends frames, each with a header and a payload, in order and as far as there is room. Returns the number of bytes
    /// taken of all together. In a TLS session the socket may not have taken some of them yet ([`SendHalf::is_flushed`]).
    ///
    /// # Panics
    /// When there are more than [`sys::MAX_FRAMES`].
    pub(crate) fn send_frames<'a>(
        &mut self,
        socket: &Socket,
        frames: impl Iterator<Item = (&'a [u8], SendBuffer)>,
    ) -> io::Result<usize> {
        match self {
            Self::Plain => sys::send_frames(socket, frames),
            Self::Records(writer) => writer.send_frames(socket, frames),
        }
    }

    /// Whether the socket has all bytes that were taken.
    pub(crate) fn is_flushed(&self) -> bool {
        match self {
            Self::Plain => true,
            Self::Records(writer) => writer.is_flushed(),
        }
    }

    /// Sends what was taken and the socket had no room for.
    ///
    /// # Errors
    /// As for a write: `WouldBlock` if some is left.
    pub(crate) fn flush(&mut self, socket: &Socket) -> io::Result<()> {
        match self {
            Self::Plain => Ok(()),
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
}

impl RecvHalf {
    /// Receives into `payload`, then into `header`, as much as is available. Returns the number of bytes received in both
    /// together; 0 at the end of the stream.
    ///
    /// # Errors
    /// As for a read. `InvalidData` if the bytes are not the peer's ([`evenkeel_tls::RecordError`]).
    pub(crate) fn recv_with_header(
        &mut self,
        socket: &Socket,
        payload: RecvBuffer,
        header: &mut [u8],
    ) -> io::Result<usize> {
        match self {
            Self::Plain => sys::recv_with_header(socket, payload, header),
            Self::Records(reader) => reader.recv_with_header(socket, payload, header),
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
        }
    }

    /// Whether it is known already, without an event of the socket, that the next read fails.
    pub(crate) fn has_failed(&self) -> bool {
        match self {
            Self::Plain => false,
            Self::Records(reader) => reader.has_failed(),
        }
    }

    /// From now on the peer sends without waiting, so reads need not stop at the end of a record. Until then nothing is read
    /// that whoever continues with the socket would miss an event for.
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
    use evenkeel_tls::{Handshake, JobIdentity};

    use super::*;
    use crate::connection::base::would_block;
    use crate::memory::block::Block;

    /// Both ends of an encrypted stream.
    fn pair() -> (Stream, Stream) {
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
        let (one, other) = UnixStream::pair().unwrap();
        let [mut one, mut other] = [one, other].map(|socket| {
            socket.set_nonblocking(true).unwrap();
            Stream::plain(socket.into())
        });
        one.encrypt(near.into_session().unwrap());
        other.encrypt(far.into_session().unwrap());
        (one, other)
    }

    fn holds_memory(stream: &Stream) -> bool {
        let writes = match &stream.send {
            SendHalf::Plain => false,
            SendHalf::Records(writer) => !writer.is_flushed(),
        };
        match &stream.recv {
            RecvHalf::Plain => writes,
            RecvHalf::Records(reader) => writes || reader.holds_memory(),
        }
    }

    /// Frames of any length, written as far as the socket takes them and read in any portions.
    #[test]
    fn encrypted_stream_carries_frames_and_then_holds_no_memory() {
        let mut random = TestRng::new(11);
        for reads_ahead in [false, true] {
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

    /// What came before a forged record counts. The failure follows at the next read, though the socket has no event for it.
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
}
