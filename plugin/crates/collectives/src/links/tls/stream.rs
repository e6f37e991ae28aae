//! A socket and the TLS session over it. Nothing here blocks.

use std::io::{self, ErrorKind as IoErrorKind, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

use rustls::{AlertDescription, CertificateError, Connection, Error as TlsError};

use crate::links::link::LinkError;
use crate::memory::{Source, Target};

/// Maximum number of bytes that a session buffers until the socket takes them.
const MAX_BUFFERED: usize = 256 << 10;
pub(super) const GONE: &str = "its process has exited or has closed the group";

pub(super) struct Stream {
    socket: TcpStream,
    session: Connection,
}

/// A socket written by single writes. Vectored writes would raise SIGPIPE when the other end is closed.
struct UnvectoredWriter<'a>(&'a TcpStream);

impl Write for UnvectoredWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Stream {
    /// A session over a nonblocking socket.
    pub(super) fn new(socket: TcpStream, mut session: Connection) -> Self {
        session.set_buffer_limit(Some(MAX_BUFFERED));
        Self { socket, session }
    }

    /// Whether the session has bytes that the socket has not taken yet.
    pub(super) fn is_full(&self) -> bool {
        self.session.wants_write()
    }

    /// Writes the session's bytes to the socket. Returns whether the socket took all of them.
    pub(super) fn flush(&mut self) -> Result<bool, LinkError> {
        while self.session.wants_write() {
            match self.session.write_tls(&mut UnvectoredWriter(&self.socket)) {
                Ok(0) => return Ok(false),
                Ok(_) => {}
                Err(error) if error.kind() == IoErrorKind::Interrupted => {}
                Err(error) if error.kind() == IoErrorKind::WouldBlock => return Ok(false),
                // A process that refuses a certificate sends the reason before it closes.
                Err(error) => {
                    return Err(match self.fill() {
                        Err(why) => why,
                        Ok(_) => ended(&error),
                    });
                }
            }
        }
        Ok(true)
    }

    /// Reads from the socket once. Returns the number of bytes, 0 at its end, and `None` when nothing has arrived.
    fn fill(&mut self) -> Result<Option<usize>, LinkError> {
        loop {
            match self.session.read_tls(&mut &self.socket) {
                Ok(bytes) => {
                    if let Err(error) = self.session.process_new_packets() {
                        // Sends the alert to the other side, if it still reads.
                        let _ = self.session.write_tls(&mut UnvectoredWriter(&self.socket));
                        return Err(explain(&error));
                    }
                    return Ok(Some(bytes));
                }
                Err(error) if error.kind() == IoErrorKind::Interrupted => {}
                Err(error) if error.kind() == IoErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(ended(&error)),
            }
        }
    }

    /// Continues the handshake. Returns whether it is complete.
    pub(super) fn handshake(&mut self) -> Result<bool, LinkError> {
        self.flush()?;
        while self.session.is_handshaking() {
            match self.fill()? {
                None => break,
                Some(0) => return Err(GONE.to_owned()),
                Some(_) => {
                    self.flush()?;
                }
            }
        }
        Ok(!self.session.is_handshaking())
    }

    /// Gives bytes to the session. Returns the number that it took.
    pub(super) fn send(&mut self, bytes: Source) -> Result<usize, LinkError> {
        bytes.write_to(&mut self.session.writer()).map_err(|error| ended(&error))
    }

    /// Receives into the memory, which is not empty. Returns the number of bytes, 0 when none has arrived.
    pub(super) fn receive(&mut self, into: Target) -> Result<usize, LinkError> {
        loop {
            match into.read_from(&mut self.session.reader()) {
                Ok(0) => return Err(GONE.to_owned()),
                Ok(bytes) => return Ok(bytes),
                Err(error) if error.kind() == IoErrorKind::WouldBlock => {
                    if self.fill()?.is_none() {
                        return Ok(0);
                    }
                }
                Err(_) => return Err(GONE.to_owned()),
            }
        }
    }

    /// Ends the sending direction.
    pub(super) fn send_close_notify(&mut self) {
        self.session.send_close_notify();
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn ended(error: &io::Error) -> LinkError {
    match error.kind() {
        IoErrorKind::ConnectionReset | IoErrorKind::BrokenPipe => GONE.to_owned(),
        _ => error.to_string(),
    }
}

/// A TLS error as text.
fn explain(error: &TlsError) -> LinkError {
    use AlertDescription as Alert;
    match error {
        TlsError::InvalidCertificate(
            CertificateError::UnknownIssuer | CertificateError::BadSignature,
        ) => "its certificate is not signed by the authority that this rank trusts".to_owned(),
        TlsError::InvalidCertificate(what) => format!("its certificate: {what:?}"),
        TlsError::AlertReceived(
            Alert::UnknownCA
            | Alert::BadCertificate
            | Alert::DecryptError
            | Alert::CertificateUnknown,
        ) => "it refuses this rank's certificate: its authority has not signed that".to_owned(),
        TlsError::AlertReceived(Alert::CertificateExpired) => {
            "it refuses this rank's certificate: that has expired".to_owned()
        }
        error => format!("TLS: {error}"),
    }
}
