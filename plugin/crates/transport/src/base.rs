//! What the two directions of a connection have in common: its flows, its failure, its last words.

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use socket2::{Socket, TcpKeepalive};

use crate::Context;
use crate::engine::{Registration, Workers};
use crate::error::{Error, ErrorKind};
use crate::sys;

/// Most bytes a worker moves on one flow before it looks at others.
pub(crate) const TURN_BYTES: u64 = 1 << 20;

/// One TCP connection of a connection.
pub(crate) struct Flow {
    pub(crate) socket: Socket,
    pub(crate) registration: Registration,
    /// Payload bytes moved.
    bytes: AtomicU64,
    chunks: AtomicU64,
}

impl Flow {
    /// Counts one chunk.
    pub(crate) fn count(&self, bytes: u32) {
        self.bytes.fetch_add(bytes.into(), Ordering::Relaxed);
        self.chunks.fetch_add(1, Ordering::Relaxed);
    }

    /// Lets the flow's worker have a look at it.
    pub(crate) fn kick(&self) {
        self.registration.kick(&self.socket);
    }
}

/// Which way the messages of a connection go, seen from here.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Send,
    Recv,
}

/// How much of a connection's work is not done.
pub(crate) struct InFlight {
    pub(crate) requests: usize,
    pub(crate) bytes: u64,
}

/// The flows of a connection and what has become of it.
pub(crate) struct Base {
    pub(crate) context: Context,
    pub(crate) flows: Vec<Flow>,
    direction: Direction,
    peer: SocketAddr,
    failure: OnceLock<Error>,
    /// Whether the failure has been written to the log.
    reported: AtomicBool,
}

impl Base {
    pub(crate) fn new(
        context: Context,
        workers: &Workers,
        direction: Direction,
        peer: SocketAddr,
        sockets: Vec<Socket>,
    ) -> Self {
        let flows = sockets
            .into_iter()
            .map(|socket| Flow {
                socket,
                registration: workers.registration(),
                bytes: AtomicU64::new(0),
                chunks: AtomicU64::new(0),
            })
            .collect();
        let reported = AtomicBool::new(false);
        Self { context, flows, direction, peer, failure: OnceLock::new(), reported }
    }

    pub(crate) fn failed(&self) -> bool {
        self.failure.get().is_some()
    }

    /// The failure, if there is one. It goes to the log the first time somebody asks.
    pub(crate) fn failure(&self) -> Option<Error> {
        let error = self.failure.get()?;
        if !self.reported.swap(true, Ordering::Relaxed) {
            self.context.log.warn(&format!("evenkeel: {error}"));
        }
        Some(error.clone().mark_logged())
    }

    /// Ends the connection with an error, unless it has one already. With requests in flight that
    /// is a failure to report at once; without, it matters only if somebody makes another request.
    pub(crate) fn fail(&self, kind: ErrorKind, what: &str, in_flight: &InFlight) {
        let Context { device, label, .. } = &self.context;
        let direction = match self.direction {
            Direction::Send => "send to",
            Direction::Recv => "receive from",
        };
        let message = format!(
            "{direction} {} failed: {what}; {} requests and {} bytes in flight; device {}{}",
            self.peer,
            in_flight.requests,
            in_flight.bytes,
            device.name(),
            label_suffix(label),
        );
        if self.failure.set(Error::new(kind, message)).is_ok() {
            if in_flight.requests > 0 {
                self.failure();
            }
            // The peer must hear of it now, not when this side closes.
            self.shutdown();
        }
    }

    /// Stops watching the flows, ends them and says what they carried.
    pub(crate) fn close(&self) {
        for flow in &self.flows {
            flow.registration.end(&flow.socket);
        }
        self.shutdown();
        let carried: Vec<u64> =
            self.flows.iter().map(|flow| flow.bytes.load(Ordering::Relaxed)).collect();
        let chunks: u64 = self.flows.iter().map(|flow| flow.chunks.load(Ordering::Relaxed)).sum();
        let total: u64 = carried.iter().sum();
        let (sent, received) = match self.direction {
            Direction::Send => (total, 0),
            Direction::Recv => (0, total),
        };
        self.context.log.info(&format!(
            "evenkeel: connection closed peer={} sent={sent}B recv={received}B chunks={chunks} flows={} {carried:?} device={}{}",
            self.peer,
            self.flows.len(),
            self.context.device.name(),
            label_suffix(&self.context.label),
        ));
    }

    fn shutdown(&self) {
        for flow in &self.flows {
            // Fails only when the peer was faster.
            let _ = flow.socket.shutdown(Shutdown::Both);
        }
    }
}

fn label_suffix(label: &str) -> String {
    if label.is_empty() { String::new() } else { format!(" {label}") }
}

/// Sets up a socket that is to become a flow.
pub(crate) fn prepare(socket: &Socket, context: &Context) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    sys::set_unsent_limit(socket, context.settings.chunk_bytes as u32)?;
    // Finds a dead host behind an idle flow; `sys::silence` finds one behind a busy flow. Half the
    // patience passes before the first probe, half over four probes.
    let patience = context.settings.peer_timeout;
    let keepalive = TcpKeepalive::new()
        .with_time((patience / 2).max(Duration::from_secs(1)))
        .with_interval((patience / 8).max(Duration::from_secs(1)))
        .with_retries(4);
    socket.set_tcp_keepalive(&keepalive)
}

/// Whether an I/O error only means "not now".
pub(crate) fn not_now(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}

/// The indices of the bits set in `bits`.
pub(crate) fn bits(mut bits: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lowest = (bits != 0).then_some(bits.trailing_zeros())?;
        bits &= bits - 1;
        Some(lowest as usize)
    })
}
