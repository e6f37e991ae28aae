//! Accepts connections with the right certificate. A thread does the handshakes, so that the sender of a small message need not
//! wait until this rank polls.

use std::collections::VecDeque;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use evenkeel_transport::sync::lock;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustls::{Connection, ServerConfig, ServerConnection};

use crate::accept::{ACCEPT_RETRY_DELAY, accept_all, prepare_listener};
use crate::links::link::LinkError;
use crate::memory::Source;

use super::stream::Stream;

/// How long a handshake may take: much longer than a rank on a busy machine needs, since a rank that is
/// dropped here is lost.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of connections in the handshake. One more replaces the oldest.
const MAX_UNAUTHENTICATED: usize = 256;
/// The byte that a connection gets once its certificate is accepted.
pub(super) const WELCOME: &[u8; 1] = b"W";

pub(super) struct Acceptor {
    state: Arc<AcceptorState>,
    thread: Option<JoinHandle<()>>,
}

struct AcceptorState {
    accepted: Mutex<VecDeque<Stream>>,
    closed: AtomicBool,
    /// Wakes the thread.
    wake_event: OwnedFd,
    /// Signalled when a connection has been accepted.
    accepted_event: OwnedFd,
}

struct Unauthenticated {
    stream: Stream,
    since: Instant,
    /// Whether the session has taken the welcome.
    welcome_sent: bool,
}

impl Acceptor {
    /// # Errors
    /// When the thread or its events cannot be created.
    pub(super) fn open(listener: TcpListener, config: Arc<ServerConfig>) -> std::io::Result<Self> {
        prepare_listener(&listener)?;
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let state = Arc::new(AcceptorState {
            accepted: Mutex::default(),
            closed: AtomicBool::new(false),
            wake_event: event()?,
            accepted_event: event()?,
        });
        let serving = Arc::clone(&state);
        let thread = thread::Builder::new()
            .name("evenkeel-tls".to_owned())
            .spawn(move || serving.run(&listener, &config))?;
        Ok(Self { state, thread: Some(thread) })
    }

    /// Becomes readable when a connection has been accepted.
    pub(super) fn accepted_event(&self) -> &OwnedFd {
        &self.state.accepted_event
    }

    /// The next connection that has been accepted.
    pub(super) fn accept(&self) -> Option<Stream> {
        lock(&self.state.accepted).pop_front()
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.state.closed.store(true, Ordering::Release);
        signal(&self.state.wake_event);
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported by its own message.
            let _ = thread.join();
        }
    }
}

/// Signals an event. Its counter is full only after 2^64 signals.
fn signal(event: &OwnedFd) {
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

impl AcceptorState {
    fn run(&self, listener: &TcpListener, config: &Arc<ServerConfig>) {
        let mut unauthenticated: VecDeque<Unauthenticated> = VecDeque::new();
        while !self.closed.load(Ordering::Acquire) {
            let out_of_sockets = accept_all(listener, |socket| {
                // The other side has closed, or memory is short.
                let Ok(session) = ServerConnection::new(Arc::clone(config)) else { return };
                if socket.set_nodelay(true).is_err() {
                    return;
                }
                if unauthenticated.len() >= MAX_UNAUTHENTICATED {
                    unauthenticated.pop_front();
                }
                let stream = Stream::new(socket, Connection::Server(session));
                let since = Instant::now();
                unauthenticated.push_back(Unauthenticated { stream, since, welcome_sent: false });
            });
            for _ in 0..unauthenticated.len() {
                let Some(mut connection) = unauthenticated.pop_front() else { break };
                match connection.authenticate() {
                    Ok(true) => {
                        lock(&self.accepted).push_back(connection.stream);
                        signal(&self.accepted_event);
                    }
                    Ok(false) if connection.since.elapsed() < HANDSHAKE_TIMEOUT => {
                        unauthenticated.push_back(connection);
                    }
                    // It was too slow, or has no valid certificate.
                    Ok(false) | Err(_) => {}
                }
            }
            let oldest = unauthenticated.iter().map(|connection| connection.since).min();
            let left = oldest.map(|since| HANDSHAKE_TIMEOUT.saturating_sub(since.elapsed()));
            let time = left.into_iter().chain(out_of_sockets.then_some(ACCEPT_RETRY_DELAY)).min();
            let time = time.map(|time| Timespec::try_from(time).unwrap_or_default());
            let mut waited = vec![PollFd::new(&self.wake_event, PollFlags::IN)];
            if !out_of_sockets {
                waited.push(PollFd::new(listener, PollFlags::IN));
            }
            waited.extend(unauthenticated.iter().map(|connection| {
                let full =
                    if connection.stream.is_full() { PollFlags::OUT } else { PollFlags::empty() };
                PollFd::new(&connection.stream, PollFlags::IN | full)
            }));
            // An interrupted or failed wait is a short one.
            let _ = poll(&mut waited, time.as_ref());
        }
    }
}

impl Unauthenticated {
    /// Continues the handshake. Returns whether the connection is accepted and the welcome is sent.
    fn authenticate(&mut self) -> Result<bool, LinkError> {
        if !self.stream.handshake()? {
            return Ok(false);
        }
        if !self.welcome_sent {
            // SAFETY: the bytes are static.
            self.welcome_sent = self.stream.send(unsafe { Source::lend(WELCOME) })? > 0;
        }
        Ok(self.stream.flush()? && self.welcome_sent)
    }
}
