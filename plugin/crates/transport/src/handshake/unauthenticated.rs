//! TCP connections that have not proved yet that they are flows of a peer.

use std::io::{self, Read};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use evenkeel_protocol::{
    CHALLENGE_BYTES, ConnectionId, HELLO_BYTES, HandshakeError, Hello, Nonce, PROOF_BYTES, Refusal,
    Welcome,
};
use socket2::Socket;

use crate::connection::base::would_block;
use crate::runtime::reactor::{Readiness, Registration, Source};
use crate::settings::Settings;
use crate::sync::lock;
use crate::sys;

/// The listener, as a connection sees it that has to prove itself.
pub(super) trait Admission: Send + Sync {
    /// The nonce that peers must present.
    fn nonce(&self) -> Nonce;
    fn settings(&self) -> &Settings;
    /// The peer has proved itself. Sends it a welcome or a refusal.
    fn admit(
        self: Arc<Self>,
        hello: &Hello,
        socket: Socket,
        peer: SocketAddr,
    ) -> Result<(), Refusal>;
    /// The connection is admitted or dropped, and does not count any more.
    fn remove(&self, connection: &Unauthenticated, dropped: bool);
    /// Accepts more connections if some were left to the kernel.
    fn accept_waiting(self: Arc<Self>);
    /// Writes a line to the log.
    fn info(&self, line: &str);
}

/// A TCP connection that has not proved yet that it is a flow of a peer.
pub(super) struct Unauthenticated {
    admission: Weak<dyn Admission>,
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
            _ => None,
        };
        Self { why: error.to_string(), refusal }
    }
}

impl HandshakeState {
    /// Reads what has arrived. With a job key, answers the hello with a challenge. Returns the hello once the peer has proved
    /// itself.
    fn advance(&mut self, nonce: Nonce, settings: &Settings) -> Result<Option<Hello>, Rejection> {
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
        let key = settings.job_key.as_ref();
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

/// Sends the answer to a hello. A new socket has room for it. If the peer is gone, its connection reports that.
pub(super) fn send_welcome(
    socket: &Socket,
    connection: ConnectionId,
    verdict: Result<(), Refusal>,
) {
    let welcome = Welcome { connection, verdict };
    let _ = socket.send_with_flags(&welcome.encode(), libc::MSG_NOSIGNAL);
}

impl Unauthenticated {
    /// A connection whose handshake begins with [`Unauthenticated::start`].
    pub(super) fn new(
        admission: Weak<dyn Admission>,
        peer: SocketAddr,
        registration: Registration,
    ) -> Arc<Self> {
        let handshake =
            HandshakeState { socket: None, have: 0, hello: [0; HELLO_BYTES], challenge: None };
        Arc::new(Self {
            admission,
            peer,
            registration,
            since: Instant::now(),
            handshake: Mutex::new(handshake),
        })
    }

    /// Begins the handshake on this socket.
    pub(super) fn start(self: &Arc<Self>, socket: Socket) {
        // The lock keeps the worker from the socket until it is in place.
        let mut handshake = lock(&self.handshake);
        let source: Arc<dyn Source> = Arc::<Self>::clone(self);
        if let Err(error) = self.registration.watch(&socket, source) {
            drop(handshake);
            self.drop_connection(&error.to_string());
            return;
        }
        handshake.socket = Some(socket);
        self.registration.request_tick();
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
        if let Some(admission) = self.admission.upgrade() {
            admission.remove(self, true);
            admission.info(&format!("connection from {} dropped: {why}", self.peer));
        }
    }

    /// Continues the handshake as far as the received bytes allow. The error says why the connection is not admitted.
    fn advance(&self) -> Result<(), String> {
        let Some(admission) = self.admission.upgrade() else { return Ok(()) };
        let advanced = lock(&self.handshake).advance(admission.nonce(), admission.settings());
        match advanced {
            Ok(None) => Ok(()),
            Ok(Some(hello)) => {
                let Some(socket) = self.take_socket() else { return Ok(()) };
                admission.remove(self, false);
                admission
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
        if let Some(admission) = self.admission.upgrade() {
            admission.accept_waiting();
        }
    }

    fn tick(&self, now: Instant) -> bool {
        let limit = self
            .admission
            .upgrade()
            .map_or(Duration::ZERO, |admission| admission.settings().handshake_timeout);
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
