//! Reads frames from the records of a TLS session.

use std::io::{self, ErrorKind};
use std::ops::Range;

use evenkeel_tls::{HEADER_BYTES, MAX_RECORD, Opener, RecordError, record_length};
use socket2::Socket;

use super::buffer::{BUFFER_BYTES, RecordBuffer};
use crate::memory::buffers::RecvBuffer;
use crate::sys;

/// The receiving direction of a session. It holds memory only while it has bytes that nobody has
/// taken.
pub(crate) struct RecordReader {
    opener: Opener,
    buffer: Option<RecordBuffer>,
    /// Opened bytes that nobody has taken yet.
    opened: Range<usize>,
    /// Received bytes behind them, which are not opened yet.
    sealed: Range<usize>,
    /// Whether bytes behind the present record may be read from the socket.
    reads_ahead: bool,
    /// What the next read fails with: bytes before the failure were given out.
    failure: Option<io::Error>,
}

impl RecordReader {
    pub(super) fn new(opener: Opener) -> Self {
        Self { opener, buffer: None, opened: 0..0, sealed: 0..0, reads_ahead: false, failure: None }
    }

    pub(super) fn read_ahead(&mut self) {
        self.reads_ahead = true;
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    #[cfg(test)]
    pub(super) fn holds_memory(&self) -> bool {
        self.buffer.is_some()
    }

    pub(super) fn recv_with_header(
        &mut self,
        socket: &Socket,
        payload: RecvBuffer,
        header: &mut [u8],
    ) -> io::Result<usize> {
        let length = payload.length();
        self.take(socket, length + header.len(), |at, mut bytes| {
            if at < length {
                let (first, rest) = bytes.split_at(bytes.len().min(length - at));
                payload.part(at, first.len()).copy_from(first);
                bytes = rest;
            }
            if !bytes.is_empty() {
                let at = at.max(length) - length;
                header[at..at + bytes.len()].copy_from_slice(bytes);
            }
        })
    }

    pub(super) fn discard(&mut self, socket: &Socket, length: usize) -> io::Result<usize> {
        self.take(socket, length, |_, _| {})
    }

    /// Gives up to `room` bytes to `place`, with the number of those before. Returns fewer only if
    /// no more are available.
    fn take(
        &mut self,
        socket: &Socket,
        room: usize,
        mut place: impl FnMut(usize, &[u8]),
    ) -> io::Result<usize> {
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        let mut done = 0;
        let mut is_drained = false;
        let outcome = loop {
            if let Some(buffer) = &self.buffer {
                let part = self.opened.len().min(room - done);
                let from = self.opened.start;
                if part > 0 {
                    place(done, &buffer.bytes()[from..from + part]);
                }
                self.opened.start += part;
                done += part;
            }
            if done == room {
                break Ok(());
            }
            match self.open_next() {
                Ok(true) => continue,
                Ok(false) => {}
                Err(error) => break Err(io::Error::new(ErrorKind::InvalidData, error)),
            }
            // Without bytes to return, the socket must say itself that it has no more: it may also
            // have ended.
            if is_drained && done > 0 {
                break Ok(());
            }
            match self.fill(socket) {
                Ok(Filled::Bytes { is_all }) => is_drained = is_all,
                Ok(Filled::End) if self.sealed.is_empty() => break Ok(()),
                Ok(Filled::End) => {
                    let what = "the peer closed it in the middle of a TLS record";
                    break Err(io::Error::new(ErrorKind::UnexpectedEof, what));
                }
                Err(error) => break Err(error),
            }
        };
        if self.opened.is_empty() && self.sealed.is_empty() {
            self.buffer = None;
        }
        match outcome {
            Err(error) if done == 0 => Err(error),
            Err(error) => {
                if error.kind() != ErrorKind::WouldBlock {
                    self.failure = Some(error);
                }
                Ok(done)
            }
            Ok(()) => Ok(done),
        }
    }

    /// Opens the next record, if all of it is there.
    fn open_next(&mut self) -> Result<bool, RecordError> {
        let Some(buffer) = &mut self.buffer else { return Ok(false) };
        let sealed = &mut buffer.bytes_mut()[self.sealed.clone()];
        let Some(length) = record_length(sealed)? else { return Ok(false) };
        let Some(record) = sealed.get_mut(..length) else { return Ok(false) };
        let content = self.opener.open(record)?;
        let start = self.sealed.start + HEADER_BYTES;
        self.opened = start..start + content;
        self.sealed.start += length;
        Ok(true)
    }

    /// Reads from the socket. No opened byte is left.
    fn fill(&mut self, socket: &Socket) -> io::Result<Filled> {
        let bytes = self.buffer.get_or_insert_with(RecordBuffer::take).bytes_mut();
        if self.sealed.start + MAX_RECORD > BUFFER_BYTES || self.sealed.is_empty() {
            bytes.copy_within(self.sealed.clone(), 0);
            self.sealed = 0..self.sealed.len();
        }
        let mut end = BUFFER_BYTES;
        if !self.reads_ahead {
            let known = record_length(&bytes[self.sealed.clone()]).ok().flatten();
            end = self.sealed.start + known.unwrap_or(HEADER_BYTES);
        }
        let place = &mut bytes[self.sealed.end..end];
        let room = place.len();
        let received = sys::recv_with_header(socket, RecvBuffer::from_static(&mut []), place)?;
        self.sealed.end += received;
        Ok(match received {
            0 => Filled::End,
            _ => Filled::Bytes { is_all: received < room },
        })
    }
}

/// What a read from the socket has brought.
enum Filled {
    /// Whether it has no more now.
    Bytes {
        is_all: bool,
    },
    End,
}
