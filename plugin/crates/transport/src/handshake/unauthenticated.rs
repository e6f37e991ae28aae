//! TCP connections that have not proved yet that they are flows of a peer.

use std::io::{self, Read};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use evenkeel_protocol::{
    CHALLENGE_BYTES, ConnectionId, HELLO_BYTES, HandshakeError, Hello, PROOF_BYTES, Refusal,
    Welcome,
};
use socket2::Socket;

use crate::connection::base::would_block;
use crate::handshake::acceptor::Acceptor;
use crate::handshake::listening_socket::ListeningSocket;
use crate::runtime::reactor::{Readiness, Registration, Source};
use crate::sync::lock;
use crate::sys;

/// A TCP connection that has not proved yet that it is a flow of a peer.
pub(super) struct Unauthenticated {
    listening: Weak<ListeningSocket>,
    peer: SocketAddr,
    registration: Registration,
    since: Instant,
    handshake: Mutex<HandshakeState>,
}

struct HandshakeState {
    /// `None` once the peer is admitted or dropped.
    socket: Option<Socket>,
    /// Bytes of the hello that were received.
    have: usize,
    hello: [u8; HELLO_BYTES],
    /// With a job key, once the hello is complete.
    challenge: Option<Challenge>,
}

struct Challenge {
    sent: [u8; CHALLENGE_BYTES],
    /// Bytes of the proof that were received.
    have: usize,
    proof: [u8; PROOF_BYTES],
}

/// Why a connection is not admitted.
struct Rejection {
    why: String,
    /// What to send to a peer that speaks the protocol.
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
            HandshakeError::WrongListener => Some(Refusal::WrongListener),
            _ => None,
        };
        Self { why: error.to_string(), refusal }
    }
}

impl HandshakeState {
    /// The listener that the hello is for, once it is complete.
    fn acceptor(&self, listening: &ListeningSocket) -> Option<Arc<Acceptor>> {
        let hello = (self.have == HELLO_BYTES).then_some(&self.hello)?;
        listening.acceptor(Hello::listener(hello).ok()?)
    }

    /// Reads what has arrived. With a job key, answers the hello with a challenge. Returns the hello once the peer has proved
    /// itself.
    fn advance(&mut self, listening: &ListeningSocket) -> Result<Option<Hello>, Rejection> {
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
        let settings = listening.settings();
        let key = settings.job_key.as_ref();
        let nonce = Hello::listener(hello)?;
        if listening.acceptor(nonce).is_none() {
            return Err(HandshakeError::WrongListener.into());
        }
        let decoded = Hello::decode(hello, nonce, key.is_some(), settings.checksum)?;
        let Some(key) = key else { return Ok(Some(decoded)) };
        let challenge = match challenge {
            Some(challenge) => challenge,
            None => {
                let sent = key.challenge(hello, sys::random()?);
                // A new socket has room for it. If this one has none, the peer times out.
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

/// Reads at most `into`; `None` if nothing has arrived. `before` bytes were received earlier.
fn receive(socket: &Socket, into: &mut [u8], before: usize) -> Result<Option<usize>, Rejection> {
    match sys::uninterrupted(|| (&*socket).read(into)) {
        Ok(0) => Err(format!("it closed after {before} bytes").into()),
        Ok(received) => Ok(Some(received)),
        Err(error) if would_block(&error) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Sends the answer to a hello. A new socket has room for it.
///
/// # Errors
/// What has ended the socket meanwhile. The kernel reports that once: who reads then sees the end of the stream, as if the
/// peer had closed it.
pub(super) fn send_welcome(
    socket: &Socket,
    connection: ConnectionId,
    verdict: Result<(), Refusal>,
) -> io::Result<()> {
    let welcome = Welcome { connection, verdict };
    socket.send_with_flags(&welcome.encode(), libc::MSG_NOSIGNAL).map(|_| ())
}

/// As [`send_welcome`]. The error says why the connection is not admitted.
pub(super) fn answer(
    socket: &Socket,
    connection: ConnectionId,
    verdict: Result<(), Refusal>,
) -> Result<(), String> {
    let answered = send_welcome(socket, connection, verdict);
    verdict.map_err(|refusal| format!("refused: {refusal}"))?;
    answered.map_err(|error| format!("it ended before it was admitted: {error}"))
}

impl Unauthenticated {
    /// A connection whose handshake begins with [`Unauthenticated::start`].
    pub(super) fn new(
        listening: Weak<ListeningSocket>,
        peer: SocketAddr,
        registration: Registration,
    ) -> Arc<Self> {
        let handshake =
            HandshakeState { socket: None, have: 0, hello: [0; HELLO_BYTES], challenge: None };
        Arc::new(Self {
            listening,
            peer,
            registration,
            since: Instant::now(),
            handshake: Mutex::new(handshake),
        })
    }

    /// Begins the handshake on this socket.
    pub(super) fn start(self: &Arc<Self>, socket: Socket) {
        lock(&self.handshake).socket = Some(socket);
        // Nearly always the hello is there, and nothing has to be watched.
        if let Err(why) = self.advance() {
            return self.drop_connection(&why);
        }
        let watched = match &lock(&self.handshake).socket {
            Some(socket) => self.registration.watch(socket, Arc::<Self>::clone(self)),
            None => return,
        };
        match watched {
            Ok(()) => self.registration.request_tick(),
            Err(error) => self.drop_connection(&error.to_string()),
        }
    }

    /// How long it has been connected.
    pub(super) fn age(&self) -> Duration {
        self.since.elapsed()
    }

    /// Ends the handshake; the socket, unless it ended before.
    pub(super) fn take_socket(&self) -> Option<Socket> {
        let socket = lock(&self.handshake).socket.take()?;
        self.registration.end(&socket);
        Some(socket)
    }

    pub(super) fn drop_connection(&self, why: &str) {
        self.take_socket();
        if let Some(listening) = self.listening.upgrade() {
            listening.forget(self, true);
            let acceptor = lock(&self.handshake).acceptor(&listening);
            let label = acceptor.map_or_else(String::new, |acceptor| acceptor.label());
            listening.info(&format!("connection from {} dropped: {why}{label}", self.peer));
        }
    }

    /// Continues the handshake as far as the received bytes allow. The error says why the connection is not admitted.
    fn advance(&self) -> Result<(), String> {
        let Some(listening) = self.listening.upgrade() else { return Ok(()) };
        let advanced = lock(&self.handshake).advance(&listening);
        match advanced {
            Ok(None) => Ok(()),
            Ok(Some(hello)) => {
                let Some(socket) = self.take_socket() else { return Ok(()) };
                listening.forget(self, false);
                match listening.acceptor(hello.nonce) {
                    Some(acceptor) => acceptor.admit(&hello, socket, self.peer),
                    // Closed meanwhile.
                    None => answer(&socket, hello.connection, Err(Refusal::WrongListener)),
                }
            }
            Err(Rejection { why, refusal }) => {
                if let (Some(refusal), Some(socket)) = (refusal, self.take_socket()) {
                    // If the peer is gone, nobody misses the answer.
                    let _ = send_welcome(&socket, ConnectionId([0; 16]), Err(refusal));
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
        if let Some(listening) = self.listening.upgrade() {
            listening.accept_waiting();
        }
    }

    fn tick(&self, now: Instant) -> bool {
        let limit = self
            .listening
            .upgrade()
            .map_or(Duration::ZERO, |listening| listening.settings().handshake_timeout);
        if now.saturating_duration_since(self.since) < limit {
            return true;
        }
        let have = lock(&self.handshake).have;
        self.drop_connection(&format!("no hello within {} s ({have} bytes)", limit.as_secs()));
        false
    }

    fn abandoned(&self, why: &str) {
        self.drop_connection(why);
    }
}
