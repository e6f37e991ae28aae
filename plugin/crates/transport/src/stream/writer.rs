//! Writes frames as the records of a TLS session.

use std::io;
use std::ops::Range;

use evenkeel_tls::{
    HEADER_BYTES, KeyUse, MAX_PLAINTEXT, MAX_RECORD, OVERHEAD, RecordError, Sealer,
};
use socket2::Socket;

use super::buffer::RecordBuffer;
use crate::connection::base::would_block;
use crate::memory::buffers::SendBuffer;
use crate::sys;

/// The sending direction of a session. It holds memory only while the socket has not taken all
/// records.
pub(crate) struct RecordWriter {
    sealer: Sealer,
    /// Sealed records, and which part of them the socket has not taken.
    pending: Option<(RecordBuffer, Range<usize>)>,
}

/// Records that are being filled, one behind the other.
struct Records<'a> {
    sealer: &'a mut Sealer,
    bytes: &'a mut [u8],
    /// Where the present record begins.
    at: usize,
    /// Bytes that it carries so far.
    length: usize,
    /// Bytes that all of them carry.
    taken: usize,
}

impl Records<'_> {
    /// Fills records with bytes from `copy`, which is called with a place in `length` bytes and
    /// with where to copy from there. Returns whether there was room for all.
    fn add(
        &mut self,
        length: usize,
        mut copy: impl FnMut(usize, &mut [u8]),
    ) -> Result<bool, RecordError> {
        let mut done = 0;
        while done < length {
            if self.length == MAX_PLAINTEXT {
                self.seal()?;
            }
            let rest = self.bytes.len().saturating_sub(self.at + OVERHEAD);
            let room = rest.min(MAX_PLAINTEXT) - self.length;
            if room == 0 {
                return Ok(false);
            }
            let part = room.min(length - done);
            let start = self.at + HEADER_BYTES + self.length;
            copy(done, &mut self.bytes[start..start + part]);
            self.length += part;
            self.taken += part;
            done += part;
        }
        Ok(true)
    }

    /// Seals the present record, unless it is empty, and begins another one.
    fn seal(&mut self) -> Result<(), RecordError> {
        if self.length > 0 {
            let end = self.at + self.length + OVERHEAD;
            self.sealer.seal(&mut self.bytes[self.at..end])?;
            (self.at, self.length) = (end, 0);
        }
        Ok(())
    }
}

impl RecordWriter {
    pub(super) fn new(sealer: Sealer) -> Self {
        const { assert!(super::buffer::BUFFER_BYTES.is_multiple_of(MAX_RECORD)) };
        Self { sealer, pending: None }
    }

    /// What its key has encrypted.
    pub(super) fn used(&mut self) -> &mut KeyUse {
        self.sealer.used()
    }

    pub(super) fn is_flushed(&self) -> bool {
        self.pending.is_none()
    }

    pub(super) fn flush(&mut self, socket: &Socket) -> io::Result<()> {
        let Some((buffer, left)) = &mut self.pending else { return Ok(()) };
        while left.start < left.end {
            let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
            let rest = &buffer.bytes()[left.clone()];
            left.start += sys::uninterrupted(|| socket.send_with_flags(rest, flags))?;
        }
        self.pending = None;
        Ok(())
    }

    /// As [`super::SendHalf::send_frames`]: takes bytes only when the socket has all that were
    /// taken before.
    pub(super) fn send_frames<'a>(
        &mut self,
        socket: &Socket,
        frames: impl Iterator<Item = (&'a [u8], SendBuffer)>,
    ) -> io::Result<usize> {
        self.flush(socket)?;
        let mut buffer = RecordBuffer::take();
        let bytes = buffer.bytes_mut();
        let mut records = Records { sealer: &mut self.sealer, bytes, at: 0, length: 0, taken: 0 };
        let mut frames = frames;
        let filled = frames.try_for_each(|(header, payload)| {
            let copy_header = |from: usize, into: &mut [u8]| {
                into.copy_from_slice(&header[from..from + into.len()]);
            };
            let copy_payload =
                |from: usize, into: &mut [u8]| payload.part(from, into.len()).copy_to(into);
            let mut has_room = records.add(header.len(), copy_header)?;
            if has_room {
                has_room = records.add(payload.length(), copy_payload)?;
            }
            if has_room { Ok(()) } else { Err(Stop::Full) }
        });
        if let Err(Stop::Failed(error)) = filled {
            return Err(io::Error::other(error));
        }
        records.seal().map_err(io::Error::other)?;
        let (taken, end) = (records.taken, records.at);
        self.pending = Some((buffer, 0..end));
        match self.flush(socket) {
            Err(error) if !would_block(&error) => Err(error),
            // They are this writer's now.
            _ => Ok(taken),
        }
    }
}

/// Why no more frames are added.
enum Stop {
    Full,
    Failed(RecordError),
}

impl From<RecordError> for Stop {
    fn from(error: RecordError) -> Self {
        Self::Failed(error)
    }
}
