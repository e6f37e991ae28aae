//! TCP connections that have not proved yet that they are flows of a peer.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use evenkeel_protocol::{
    CHALLENGE_BYTES, ConnectionId, ENCRYPTED_BYTES, Encrypted, HELLO_BYTES, HandshakeError, Hello,
    PROOF_BYTES, Refusal, Welcome,
};
use evenkeel_tls::JobIdentity;
use socket2::Socket;

use crate::connection::base::would_block;
use crate::handshake::acceptor::Acceptor;
use crate::handshake::encryption::{TlsFailure, TlsHandshake};
use crate::handshake::listening_socket::ListeningSocket;
use crate::memory::buffers::SendBuffer;
use crate::runtime::reactor::{Readiness, Registration, Source};
use crate::stream::{SendHalf, Stream};
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
    stream: Option<Stream>,
    /// With encryption, as long as it is under way.
    tls: Option<Box<TlsHandshake>>,
    /// Bytes of the hello that were received; with encryption, first those of its announcement.
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
            HandshakeError::Encryption { .. } => Some(Refusal::Encryption),
            HandshakeError::WrongListener => Some(Refusal::WrongListener),
            _ => None,
        };
        Self { why: error.to_string(), refusal }
    }
}

impl From<TlsFailure> for Rejection {
    fn from(failure: TlsFailure) -> Self {
        // The peer has got an alert.
        match failure {
            TlsFailure::Io(error) => format!("it ended before it was encrypted: {error}").into(),
            TlsFailure::Key(why) | TlsFailure::Invalid(why) => why.into(),
            TlsFailure::Refused(error) => error.to_string().into(),
        }
    }
}

impl HandshakeState {
    /// The listener that the hello is for, once it is complete.
    fn acceptor(&self, listening: &ListeningSocket) -> Option<Arc<Acceptor>> {
        let hello = (self.have == HELLO_BYTES).then_some(&self.hello)?;
        listening.acceptor(Hello::listener(hello).ok()?)
    }

    /// Reads the announcement of encryption, and continues the TLS handshake. Returns whether the
    /// stream is encrypted.
    fn encrypt(&mut self, identity: &JobIdentity, by_kernel: bool) -> Result<bool, Rejection> {
        let Self { stream: Some(stream), tls, have, hello, .. } = self else { return Ok(false) };
        if stream.is_encrypted() {
            return Ok(true);
        }
        let mut handshake = match tls.take() {
            Some(handshake) => handshake,
            None => {
                while *have < ENCRYPTED_BYTES {
                    let place = &mut hello[*have..ENCRYPTED_BYTES];
                    let Some(received) = receive(stream, place, *have)? else { return Ok(false) };
                    *have += received;
                }
                let (announced, _) =
                    hello.split_first_chunk().unwrap_or((&[0; ENCRYPTED_BYTES], &[]));
                if Hello::may_begin_with(announced) {
                    drop_received(stream);
                    return Err(HandshakeError::Encryption { theirs: false }.into());
                }
                Encrypted::check(announced)?;
                *have = 0;
                TlsHandshake::listener(identity)?
            }
        };
        if !handshake.advance(&stream.socket)? {
            *tls = Some(handshake);
            return Ok(false);
        }
        handshake.finish(stream, by_kernel)?;
        Ok(true)
    }

    /// Reads what has arrived. With a job key, answers the hello with a challenge. Returns the
    /// hello once the peer has proved itself.
    fn advance(&mut self, listening: &ListeningSocket) -> Result<Option<Hello>, Rejection> {
        let settings = listening.settings();
        let is_encrypted = match &settings.encryption {
            None => false,
            Some(identity) if self.encrypt(identity, settings.kernel_tls)? => true,
            Some(_) => return Ok(None),
        };
        let Self { stream: Some(stream), have, hello, challenge, .. } = self else {
            return Ok(None);
        };
        while *have < HELLO_BYTES {
            let Some(received) = receive(stream, &mut hello[*have..], *have)? else {
                return Ok(None);
            };
            *have += received;
            let hello = &hello[..*have];
            if !Hello::may_begin_with(hello) {
                return Err(match Encrypted::may_begin_with(hello) {
                    true if !is_encrypted => {
                        drop_received(stream);
                        HandshakeError::Encryption { theirs: true }.into()
                    }
                    _ => HandshakeError::NotEvenkeel("peer").into(),
                });
            }
        }
        // Who has encrypted the connection has proved it.
        let key = settings.job_key.as_ref().filter(|_| !is_encrypted);
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
                stream.write(&sent)?;
                challenge.insert(Challenge { sent, have: 0, proof: [0; PROOF_BYTES] })
            }
        };
        while challenge.have < PROOF_BYTES {
            let Some(received) = receive(
                stream,
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

/// Drops what a peer has sent that is refused. Unread bytes at the close would reset the
/// connection, and the refusal with it.
fn drop_received(stream: &mut Stream) {
    let mut bytes = [0; 1024];
    // A peer sends no more than this before it has an answer.
    for _ in 0..4 {
        if !matches!(stream.read(&mut bytes), Ok(received) if received == bytes.len()) {
            return;
        }
    }
}

/// Reads at most `into`; `None` if nothing has arrived. `before` bytes were received earlier.
fn receive(
    stream: &mut Stream,
    into: &mut [u8],
    before: usize,
) -> Result<Option<usize>, Rejection> {
    match stream.read(into) {
        Ok(0) => Err(format!("it closed after {before} bytes").into()),
        Ok(received) => Ok(Some(received)),
        Err(error) if would_block(&error) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Sends the answer to a hello. A new socket has room for it.
///
/// # Errors
/// What has ended the socket meanwhile. The kernel reports that once: who reads then sees the end
/// of the stream, as if the peer had closed it.
pub(super) fn send_welcome(
    socket: &Socket,
    half: &mut SendHalf,
    connection: ConnectionId,
    verdict: Result<(), Refusal>,
) -> io::Result<()> {
    let welcome = Welcome { connection, verdict };
    let nothing = SendBuffer::from_static(&[]);
    half.send_with_header(socket, &welcome.encode(), nothing).map(|_| ())
}

/// As [`send_welcome`]. The error says why the connection is not admitted.
pub(super) fn answer(
    stream: &mut Stream,
    connection: ConnectionId,
    verdict: Result<(), Refusal>,
) -> Result<(), String> {
    let answered = send_welcome(&stream.socket, &mut stream.send, connection, verdict);
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
        let handshake = HandshakeState {
            stream: None,
            tls: None,
            have: 0,
            hello: [0; HELLO_BYTES],
            challenge: None,
        };
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
        lock(&self.handshake).stream = Some(Stream::plain(socket));
        // Nearly always the hello is there, and nothing has to be watched.
        if let Err(why) = self.advance() {
            return self.drop_connection(&why);
        }
        let watched = match &lock(&self.handshake).stream {
            Some(stream) => self.registration.watch(stream, Arc::<Self>::clone(self)),
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

    /// Ends the handshake; the stream, unless it ended before.
    pub(super) fn take_stream(&self) -> Option<Stream> {
        let stream = lock(&self.handshake).stream.take()?;
        self.registration.end(&stream);
        Some(stream)
    }

    pub(super) fn drop_connection(&self, why: &str) {
        self.take_stream();
        if let Some(listening) = self.listening.upgrade() {
            listening.forget(self, true);
            let acceptor = lock(&self.handshake).acceptor(&listening);
            let label = acceptor.map_or_else(String::new, |acceptor| acceptor.label());
            listening.info(&format!("connection from {} dropped: {why}{label}", self.peer));
        }
    }

    /// Continues the handshake as far as the received bytes allow. The error says why the
    /// connection is not admitted.
    fn advance(&self) -> Result<(), String> {
        let Some(listening) = self.listening.upgrade() else { return Ok(()) };
        let advanced = lock(&self.handshake).advance(&listening);
        match advanced {
            Ok(None) => Ok(()),
            Ok(Some(hello)) => {
                let Some(mut stream) = self.take_stream() else { return Ok(()) };
                listening.forget(self, false);
                match listening.acceptor(hello.nonce) {
                    Some(acceptor) => acceptor.admit(&hello, stream, self.peer),
                    // Closed meanwhile.
                    None => answer(&mut stream, hello.connection, Err(Refusal::WrongListener)),
                }
            }
            Err(Rejection { why, refusal }) => {
                if let (Some(refusal), Some(mut stream)) = (refusal, self.take_stream()) {
                    // If the peer is gone, nobody misses the answer.
                    let _ = answer(&mut stream, ConnectionId([0; 16]), Err(refusal));
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
