//! The TLS handshake on a new TCP connection, before anything else.

use std::io;

use evenkeel_protocol::{Encrypted, HandshakeError, Refusal, WELCOME_BYTES, Welcome};
use evenkeel_tls::{Handshake, JobIdentity, MAX_RECORD};
use socket2::Socket;

use crate::connection::base::would_block;
use crate::memory::buffers::RecvBuffer;
use crate::stream::Stream;
use crate::sys;

/// A TLS handshake on a socket.
pub(super) struct TlsHandshake {
    handshake: Handshake,
    /// What the socket has not taken yet.
    unsent: Vec<u8>,
    /// Whether the listener may answer in clear, which it does to refuse; and the first bytes of
    /// the answer.
    refusal: Option<Vec<u8>>,
}

/// Why a connection is not encrypted.
#[derive(Debug)]
pub(super) enum TlsFailure {
    /// The socket has failed, or the peer has closed it.
    Io(io::Error),
    /// The peer has another job key, or none.
    Key(String),
    /// The listener has refused in clear.
    Refused(HandshakeError),
    /// The bytes are no handshake, or were changed on their way.
    Invalid(String),
}

impl From<io::Error> for TlsFailure {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<evenkeel_tls::HandshakeError> for TlsFailure {
    fn from(error: evenkeel_tls::HandshakeError) -> Self {
        use evenkeel_tls::HandshakeError;
        match error {
            HandshakeError::OtherKey | HandshakeError::RefusedKey => Self::Key(error.to_string()),
            HandshakeError::Invalid(_) => Self::Invalid(error.to_string()),
        }
    }
}

impl TlsHandshake {
    /// Of the side that dials.
    pub(super) fn connector(identity: &JobIdentity) -> Result<Box<Self>, TlsFailure> {
        let mut handshake = Handshake::connector(identity)?;
        // Together, so that a listener without encryption has read all when it refuses.
        let unsent = [&Encrypted::encode()[..], &handshake.to_send()].concat();
        Ok(Box::new(Self { handshake, unsent, refusal: Some(Vec::new()) }))
    }

    /// Of the side that listens, behind the announcement.
    pub(super) fn listener(identity: &JobIdentity) -> Result<Box<Self>, TlsFailure> {
        let handshake = Handshake::listener(identity)?;
        Ok(Box::new(Self { handshake, unsent: Vec::new(), refusal: None }))
    }

    /// Continues as far as the received bytes allow. True once the handshake is complete.
    pub(super) fn advance(&mut self, socket: &Socket) -> Result<bool, TlsFailure> {
        loop {
            if !self.flush(socket)? || self.handshake.is_complete() {
                return Ok(self.unsent.is_empty() && self.handshake.is_complete());
            }
            if let Some(answer) = &mut self.refusal
                && !answer.is_empty()
            {
                return Err(refusal(socket, answer)?);
            }
            let mut bytes = [0; MAX_RECORD];
            let wanted = self.handshake.wanted().min(bytes.len());
            let received = match receive(socket, &mut bytes[..wanted])? {
                Some(received) => &bytes[..received],
                None => return Ok(false),
            };
            if let Some(answer) = &mut self.refusal {
                if Welcome::may_begin_with(received) {
                    answer.extend_from_slice(received);
                    continue;
                }
                self.refusal = None;
            }
            let outcome = self.handshake.receive(received);
            self.unsent.extend(self.handshake.to_send());
            if let Err(error) = outcome {
                // The alert. The error is the reason, whether the peer learns it or not.
                let _ = self.flush(socket);
                return Err(error.into());
            }
        }
    }

    /// Whether the socket has taken everything.
    fn flush(&mut self, socket: &Socket) -> io::Result<bool> {
        while !self.unsent.is_empty() {
            let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
            match sys::uninterrupted(|| socket.send_with_flags(&self.unsent, flags)) {
                Ok(sent) => drop(self.unsent.drain(..sent)),
                Err(error) if would_block(&error) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Encrypts the stream that the handshake was on, as [`Stream::encrypt`].
    pub(super) fn finish(self, stream: &mut Stream, by_kernel: bool) -> Result<(), TlsFailure> {
        Ok(stream.encrypt(&self.handshake.into_session()?, by_kernel)?)
    }
}

/// Reads the rest of a refusal in clear, which begins with `answer`.
fn refusal(socket: &Socket, answer: &mut Vec<u8>) -> Result<TlsFailure, TlsFailure> {
    let mut welcome = [0; WELCOME_BYTES];
    while answer.len() < WELCOME_BYTES {
        // It is sent at once.
        let room = WELCOME_BYTES - answer.len();
        match receive(socket, &mut welcome[..room])? {
            Some(received) => answer.extend_from_slice(&welcome[..received]),
            None => return Err(TlsFailure::Invalid("a part of an answer in clear".to_owned())),
        }
    }
    welcome.copy_from_slice(answer);
    // Anybody on the way can write in clear. What would end a connection, or the use of RDMA,
    // counts within a session only.
    let is_said_in_clear = |refused: &HandshakeError| {
        matches!(
            refused,
            HandshakeError::Refused(Refusal::Encryption | Refusal::Version | Refusal::Busy)
                | HandshakeError::Version(_)
        )
    };
    Ok(match Welcome::refusal(&welcome) {
        Some(refused) if is_said_in_clear(&refused) => TlsFailure::Refused(refused),
        Some(refused) => TlsFailure::Invalid(format!("an answer in clear: {refused}")),
        None => TlsFailure::Invalid("the listener has accepted in clear".to_owned()),
    })
}

/// Reads at most `into`; `None` if nothing has arrived.
fn receive(socket: &Socket, into: &mut [u8]) -> Result<Option<usize>, TlsFailure> {
    match sys::recv_with_header(socket, RecvBuffer::from_static(&mut []), into) {
        Ok(0) => Err(io::Error::from(io::ErrorKind::ConnectionReset).into()),
        Ok(received) => Ok(Some(received)),
        Err(error) if would_block(&error) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
