//! TCP connections that have not proved yet that they are flows of a peer.

use std::io::{self, Read};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, Weak};
use std::time::{Duration, Instant};

use evenkeel_protocol::{
    CHALLENGE_BYTES, ConnectionId, HELLO_BYTES, HandshakeError, Hello, PROOF_BYTES, Refusal,
};
use socket2::Socket;

use crate::connection::base::would_block;
use crate::handshake::acceptor::{Acceptor, send_welcome};
use crate::runtime::reactor::{Readiness, Registration, Source};
use crate::sync::lock;
use crate::sys;

/// A TCP connection that has not shown yet that it is a flow of a peer.
pub(super) struct Unauthenticated {
    pub(super) listener: Weak<Acceptor>,
    pub(super) peer: SocketAddr,
    pub(super) registration: Registration,
    pub(super) since: Instant,
    pub(super) handshake: Mutex<HandshakeState>,
}

pub(super) struct HandshakeState {
    /// `None` once the stranger is a peer or turned away.
    pub(super) socket: Option<Socket>,
    /// Bytes of the hello.
    pub(super) have: usize,
    pub(super) hello: [u8; HELLO_BYTES],
    /// With a job key, once the hello is there.
    pub(super) challenge: Option<Challenge>,
}

pub(super) struct Challenge {
    pub(super) sent: [u8; CHALLENGE_BYTES],
    /// Bytes of the proof.
    pub(super) have: usize,
    pub(super) proof: [u8; PROOF_BYTES],
}

/// Why a stranger is not a peer.
struct Rejection {
    why: String,
    /// What to tell one that speaks the protocol.
    refusal: Option<Refusal>,
}

impl From<String> for Rejection {
    fn from(why: String) -> Self {
        Self { why, refusal: None }
    }
}

impl From<io::Error> for Rejection {
    fn from(error: io::Error) -> Self {
        error.to_string().into()
    }
}

impl From<HandshakeError> for Rejection {
    fn from(error: HandshakeError) -> Self {
        let refusal = match error {
            HandshakeError::Version(_) => Some(Refusal::Version),
            HandshakeError::Authentication { .. } => Some(Refusal::Authentication),
            HandshakeError::Checksum { .. } => Some(Refusal::Checksum),
            _ => None,
        };
        Self { why: error.to_string(), refusal }
    }
}

impl HandshakeState {
    /// Reads what is there, and answers a hello with a challenge if there is a job key; the hello, once all is there that
    /// shows a peer.
    fn advance(&mut self, listener: &Acceptor) -> Result<Option<Hello>, Rejection> {
        let Self { socket: Some(socket), have, hello, challenge } = self else { return Ok(None) };
        while *have < HELLO_BYTES {
            let Some(received) = receive(socket, &mut hello[*have..], *have)? else {
                return Ok(None);
            };
            *have += received;
            if !Hello::may_begin_with(&hello[..*have]) {
                return Err(HandshakeError::NotEvenkeel("peer").into());
            }
        }
        let settings = &listener.context.settings;
        let key = settings.job_key.as_ref();
        let decoded = Hello::decode(hello, listener.nonce, key.is_some(), settings.checksum)?;
        let Some(key) = key else { return Ok(Some(decoded)) };
        let challenge = match challenge {
            Some(challenge) => challenge,
            None => {
                let sent = key.challenge(hello, sys::random()?);
                // A new socket has room for it; if not, its peer will give up.
                socket.send_with_flags(&sent, libc::MSG_NOSIGNAL)?;
                challenge.insert(Challenge { sent, have: 0, proof: [0; PROOF_BYTES] })
            }
        };
        while challenge.have < PROOF_BYTES {
            let Some(received) = receive(
                socket,
                &mut challenge.proof[challenge.have..],
                HELLO_BYTES + challenge.have,
            )?
            else {
                return Ok(None);
            };
            challenge.have += received;
        }
        if key.accepts(hello, &challenge.sent, &challenge.proof) {
            return Ok(Some(decoded));
        }
        let refusal = Some(Refusal::Authentication);
        Err(Rejection { why: "it does not have the job key".to_owned(), refusal })
    }
}

/// Reads what is there, at most `into`; none if there is nothing now. `before` bytes came earlier.
fn receive(socket: &Socket, into: &mut [u8], before: usize) -> Result<Option<usize>, Rejection> {
    match sys::uninterrupted(|| (&*socket).read(into)) {
        Ok(0) => Err(format!("it closed after {before} bytes").into()),
        Ok(received) => Ok(Some(received)),
        Err(error) if would_block(&error) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

impl Unauthenticated {
    pub(super) fn take_socket(&self) -> Option<Socket> {
        let socket = lock(&self.handshake).socket.take()?;
        self.registration.end(&socket);
        Some(socket)
    }

    fn forget(&self, listener: &Acceptor, dropped: bool) {
        let mut state = lock(&listener.state);
        state.unauthenticated.retain(|other| !std::ptr::eq(&raw const **other, self));
        state.dropped += u64::from(dropped);
    }

    pub(super) fn drop_connection(&self, why: &str) {
        self.take_socket();
        if let Some(listener) = self.listener.upgrade() {
            self.forget(&listener, true);
            listener.info(&format!("connection from {} dropped: {why}", self.peer));
        }
    }

    /// Goes on with the handshake as far as the bytes that are there allow; the text says why the stranger is not a peer.
    fn advance(&self) -> Result<(), String> {
        let Some(listener) = self.listener.upgrade() else { return Ok(()) };
        let advanced = lock(&self.handshake).advance(&listener);
        match advanced {
            Ok(None) => Ok(()),
            Ok(Some(hello)) => {
                let Some(socket) = self.take_socket() else { return Ok(()) };
                self.forget(&listener, false);
                listener
                    .admit(&hello, socket, self.peer)
                    .map_err(|refusal| format!("refused: {refusal}"))
            }
            Err(Rejection { why, refusal }) => {
                if let (Some(refusal), Some(socket)) = (refusal, self.take_socket()) {
                    send_welcome(&socket, ConnectionId([0; 16]), Err(refusal));
                }
                Err(why)
            }
        }
    }
}

impl Source for Unauthenticated {
    fn ready(&self, readiness: Readiness) {
        if !readiness.readable && !readiness.ended {
            return;
        }
        if let Err(why) = self.advance() {
            self.drop_connection(&why);
        }
        if let Some(listener) = self.listener.upgrade()
            && listener.is_full.load(Ordering::SeqCst)
        {
            listener.accept_all();
        }
    }

    fn tick(&self, now: Instant) {
        let limit = self
            .listener
            .upgrade()
            .map_or(Duration::ZERO, |listener| listener.context.settings.handshake_timeout);
        if now.saturating_duration_since(self.since) < limit {
            return;
        }
        let have = lock(&self.handshake).have;
        self.drop_connection(&format!("no hello within {} s ({have} bytes)", limit.as_secs()));
    }

    fn abandoned(&self, why: &str) {
        self.drop_connection(why);
    }
}
