//! Connections of stores and probes between the processes of a job, encrypted where the job requires it.

use std::io::{self, ErrorKind as IoErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use evenkeel_tls::JobIdentity;
use evenkeel_transport::{Settings, keep_from_children};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, Connection, ServerConnection};

use crate::error::{Error, Result};

/// What a server answers to a peer that does not encrypt, or that encrypts when it does not.
pub(crate) const MISMATCH: &str = "EVENKEEL_ENCRYPTION is not the same on all ranks";
/// First byte of a TLS handshake: the type of its record.
const HANDSHAKE: u8 = 22;

/// What this process encrypts its connections with; `None` where the job does not require it. From the environment, as of all
/// transports.
///
/// # Errors
/// Names the variable that has no valid value.
pub(crate) fn identity() -> Result<Option<JobIdentity>> {
    // Without it, nothing else in the environment matters here.
    if std::env::var_os("EVENKEEL_ENCRYPTION").is_none_or(|value| value.is_empty()) {
        return Ok(None);
    }
    let settings = Settings::from_env().map_err(|error| Error::argument(error.to_string()))?;
    Ok(settings.encryption().cloned())
}

/// A socket, and the TLS session over it if there is one. Reads and writes block as the socket does.
pub(crate) struct JobStream {
    socket: TcpStream,
    session: Option<Box<Connection>>,
    /// Whether the first bytes of the peer are still to be seen, of a connection that was accepted.
    is_new: bool,
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

impl JobStream {
    /// A connection that this process has opened. The socket blocks, with timeouts; this waits for the handshake.
    ///
    /// # Errors
    /// Those of the socket, and of a peer that is not one of the job's.
    pub(crate) fn connect(socket: TcpStream, identity: Option<&JobIdentity>) -> io::Result<Self> {
        keep_from_children(&socket);
        let Some(identity) = identity else {
            return Ok(Self { socket, session: None, is_new: false });
        };
        // Peers are known by their key. The name is not sent.
        let name = ServerName::IpAddress(std::net::Ipv4Addr::UNSPECIFIED.into());
        let session = ClientConnection::new(Arc::clone(identity.connector()), name)
            .map_err(io::Error::other)?;
        let mut stream = Self { socket, session: Some(Box::new(session.into())), is_new: false };
        while stream.session.as_ref().is_some_and(|session| session.is_handshaking()) {
            stream.receive()?;
        }
        stream.flush()?;
        Ok(stream)
    }

    /// A connection that this process has accepted. Reads do the handshake.
    ///
    /// # Errors
    /// When the TLS library has no random numbers.
    pub(crate) fn accept(socket: TcpStream, identity: Option<&JobIdentity>) -> io::Result<Self> {
        let session = identity
            .map(|identity| ServerConnection::new(Arc::clone(identity.listener())))
            .transpose()
            .map_err(io::Error::other)?;
        Ok(Self { socket, session: session.map(|session| Box::new(session.into())), is_new: true })
    }

    /// Whether the peer has still to prove that it is one of the job's.
    pub(crate) fn is_handshaking(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.is_handshaking())
    }

    pub(crate) fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// Whether the peer of a connection that was accepted encrypts and this process does not, or the other way round. Such a peer
    /// can be told in clear, by [`JobStream::socket`].
    pub(crate) fn is_mismatched(&mut self) -> io::Result<bool> {
        if !self.is_new {
            return Ok(false);
        }
        let mut first = [0; 1];
        let peeked = self.socket.peek(&mut first)?;
        self.is_new = peeked == 0;
        Ok(peeked > 0 && (first[0] == HANDSHAKE) != self.session.is_some())
    }

    /// Sends what the session has for the peer.
    fn send(&mut self) -> io::Result<()> {
        let Some(session) = &mut self.session else { return Ok(()) };
        while session.wants_write() {
            session.write_tls(&mut UnvectoredWriter(&self.socket))?;
        }
        Ok(())
    }

    /// Gives the session what the peer has sent.
    fn receive(&mut self) -> io::Result<()> {
        self.send()?;
        let Some(session) = &mut self.session else { return Ok(()) };
        if session.read_tls(&mut &self.socket)? == 0 && session.is_handshaking() {
            return Err(IoErrorKind::UnexpectedEof.into());
        }
        if let Err(error) = session.process_new_packets() {
            // An alert, which tells the peer. The error is the reason, whether the peer learns it or not.
            let _ = self.send();
            return Err(explain(error));
        }
        match self.send() {
            // Later.
            Err(error) if error.kind() != IoErrorKind::WouldBlock => Err(error),
            _ => Ok(()),
        }
    }
}

fn explain(error: rustls::Error) -> io::Error {
    use rustls::{AlertDescription, CertificateError, Error as TlsError, InvalidMessage};
    match error {
        TlsError::InvalidCertificate(CertificateError::UnknownIssuer)
        | TlsError::AlertReceived(AlertDescription::UnknownCA) => {
            io::Error::new(IoErrorKind::InvalidInput, "it does not have this rank's job key")
        }
        TlsError::InvalidMessage(InvalidMessage::InvalidContentType) => {
            io::Error::new(IoErrorKind::InvalidInput, MISMATCH)
        }
        error => io::Error::new(IoErrorKind::InvalidData, error),
    }
}

impl Read for JobStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            let Some(session) = &mut self.session else { return self.socket.read(into) };
            match session.reader().read(into) {
                Err(error) if error.kind() == IoErrorKind::WouldBlock => self.receive()?,
                // The peer sends no end of its own: what it has sent is complete by its length.
                Err(error) if error.kind() == IoErrorKind::UnexpectedEof => return Ok(0),
                done => return done,
            }
        }
    }
}

impl Write for JobStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.send()?;
        let Some(session) = &mut self.session else { return self.socket.write_vectored(parts) };
        let written = session.writer().write_vectored(parts)?;
        match self.send() {
            Err(error) if error.kind() != IoErrorKind::WouldBlock => Err(error),
            // The session has them, and sends them with the next write or read.
            _ => Ok(written),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.send()
    }
}

impl AsFd for JobStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
