//! The sides of a session whose records the kernel makes or opens.

use std::io::{self, ErrorKind};

use evenkeel_tls::{KeyUse, MAX_PLAINTEXT, RecordError};
use socket2::Socket;

use crate::memory::buffers::{RecvBuffer, SendBuffer};
use crate::sys;

/// Size of the scratch buffer for discarding received bytes, which the kernel's TLS cannot skip.
const DROPPED: usize = 4096;

/// The sending direction. The kernel sends what it has taken, whether it is asked again or not.
#[derive(Debug, Default)]
pub(crate) struct KernelWriter {
    used: KeyUse,
}

impl KernelWriter {
    /// What its key has encrypted.
    pub(super) fn used(&mut self) -> &mut KeyUse {
        &mut self.used
    }

    /// As [`super::SendHalf::send_frames`].
    pub(super) fn send_frames<'a>(
        &mut self,
        socket: &Socket,
        frames: impl Iterator<Item = (&'a [u8], SendBuffer)>,
    ) -> io::Result<usize> {
        // Nothing may be sent with a key that is used up.
        self.used.add(0, 0).map_err(io::Error::other)?;
        let sent = sys::send_frames(socket, frames)?;
        // The last call may have used up a little more than all, of a limit that is far below where
        // it is unsafe.
        let _ = self.used.add(sent.div_ceil(MAX_PLAINTEXT), sent);
        Ok(sent)
    }
}

/// As [`super::RecvHalf::recv_with_header`].
pub(super) fn recv_with_header(
    socket: &Socket,
    payload: RecvBuffer,
    header: &mut [u8],
) -> io::Result<usize> {
    sys::recv_with_header(socket, payload, header).map_err(named)
}

/// As [`super::RecvHalf::discard`].
pub(super) fn discard(socket: &Socket, length: usize) -> io::Result<usize> {
    let mut bytes = [0; DROPPED];
    let part = &mut bytes[..length.min(DROPPED)];
    recv_with_header(socket, RecvBuffer::from_static(&mut []), part)
}

/// The kernel's errors about records, in the words of those that are opened here.
fn named(error: io::Error) -> io::Error {
    let what = match error.raw_os_error() {
        Some(libc::EBADMSG) => RecordError::Forged,
        // Another type than data, which is not asked for; and headers of other versions and
        // lengths.
        Some(libc::EIO | libc::EINVAL | libc::EMSGSIZE) => RecordError::NotARecord,
        _ => return error,
    };
    io::Error::new(ErrorKind::InvalidData, what)
}
