//! Lets in who has the right certificate: a thread that takes connections and shakes hands, so that who sends something small need
//! not wait until this rank looks.

use std::collections::VecDeque;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustls::{Connection, ServerConfig, ServerConnection};

use crate::accept::{REST, take_all};
use crate::link::Broken;
use crate::lock;
use crate::memory::Source;

use super::stream::Stream;

/// How long a connection may take to show its certificate: much longer than a rank on a busy machine needs, since a rank that is
/// dropped here is lost.
const HANDSHAKE: Duration = Duration::from_secs(30);
/// Connections that are shaking hands; the oldest is dropped for another one.
const MAX_UNAUTHENTICATED: usize = 256;
/// What a connection is told that has been let in.
pub(super) const WELCOME: &[u8; 1] = b"W";

pub(super) struct Door {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    come: Mutex<VecDeque<Stream>>,
    closed: AtomicBool,
    /// Wakes the thread.
    wake: OwnedFd,
    /// Rung when somebody has come.
    bell: OwnedFd,
}

struct Stranger {
    stream: Stream,
    since: Instant,
    /// Whether the welcome is with the session.
    welcomed: bool,
}

impl Door {
    /// # Errors
    /// When the system gives no thread or descriptor.
    pub(super) fn open(listener: TcpListener, config: Arc<ServerConfig>) -> std::io::Result<Self> {
        listener.set_nonblocking(true)?;
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let shared = Arc::new(Shared {
            come: Mutex::default(),
            closed: AtomicBool::new(false),
            wake: event()?,
            bell: event()?,
        });
        let inside = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("evenkeel-tls".to_owned())
            .spawn(move || inside.attend(&listener, &config))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Becomes readable when somebody has come.
    pub(super) fn bell(&self) -> &OwnedFd {
        &self.shared.bell
    }

    /// The next connection that has been let in.
    pub(super) fn accept(&self) -> Option<Stream> {
        lock(&self.shared.come).pop_front()
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::Release);
        ring(&self.shared.wake);
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported by its own message.
            let _ = thread.join();
        }
    }
}

/// Adds one to an event counter, which is full after 2^64 of them only.
fn ring(event: &OwnedFd) {
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

impl Shared {
    fn attend(&self, listener: &TcpListener, config: &Arc<ServerConfig>) {
        let mut strangers: VecDeque<Stranger> = VecDeque::new();
        while !self.closed.load(Ordering::Acquire) {
            let resting = take_all(listener, |socket| {
                // Who cannot be talked to has hung up, or memory is short.
                let Ok(session) = ServerConnection::new(Arc::clone(config)) else { return };
                if socket.set_nodelay(true).is_err() {
                    return;
                }
                if strangers.len() >= MAX_UNAUTHENTICATED {
                    strangers.pop_front();
                }
                let stream = Stream::new(socket, Connection::Server(session));
                let since = Instant::now();
                strangers.push_back(Stranger { stream, since, welcomed: false });
            });
            for _ in 0..strangers.len() {
                let Some(mut stranger) = strangers.pop_front() else { break };
                match stranger.go_on() {
                    Ok(true) => {
                        lock(&self.come).push_back(stranger.stream);
                        ring(&self.bell);
                    }
                    Ok(false) if stranger.since.elapsed() < HANDSHAKE => {
                        strangers.push_back(stranger);
                    }
                    // Who is too slow, or has no right certificate, is nobody.
                    Ok(false) | Err(_) => {}
                }
            }
            let oldest = strangers.iter().map(|stranger| stranger.since).min();
            let left = oldest.map(|since| HANDSHAKE.saturating_sub(since.elapsed()));
            let time = left.into_iter().chain(resting.then_some(REST)).min();
            let time = time.map(|time| Timespec::try_from(time).unwrap_or_default());
            let mut waited = vec![PollFd::new(&self.wake, PollFlags::IN)];
            if !resting {
                waited.push(PollFd::new(listener, PollFlags::IN));
            }
            waited.extend(strangers.iter().map(|stranger| {
                let full =
                    if stranger.stream.is_full() { PollFlags::OUT } else { PollFlags::empty() };
                PollFd::new(&stranger.stream, PollFlags::IN | full)
            }));
            // An interrupted or failed wait is a short one.
            let _ = poll(&mut waited, time.as_ref());
        }
    }
}

impl Stranger {
    /// Whether it has been let in, and told so.
    fn go_on(&mut self) -> Result<bool, Broken> {
        if !self.stream.shake_hands()? {
            return Ok(false);
        }
        if !self.welcomed {
            // SAFETY: the bytes are static.
            self.welcomed = self.stream.send(unsafe { Source::lend(WELCOME) })? > 0;
        }
        Ok(self.stream.flush()? && self.welcomed)
    }
}
