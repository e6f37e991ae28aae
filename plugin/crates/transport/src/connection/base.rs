//! What the two directions of a connection have in common: its failure, its counters, its last
//! words.

use std::any::Any;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use evenkeel_protocol::{FRAME_BYTES, Frame, FrameError};
use socket2::{Socket, TcpKeepalive};

use crate::context::Context;
use crate::device::Device;
use crate::error::{Error, ErrorKind};
use crate::memory::buffers::SendBuffer;
use crate::rdma::{self, MemoryTypes, MrCache};
use crate::runtime::notify::Notify;
use crate::runtime::waiters;
use crate::sync::lock;
use crate::sys;
use crate::telemetry::counters::Counters;
use crate::telemetry::metrics::ConnectionObservation;

/// Most bytes a worker moves on one flow before it looks at others.
pub(crate) const WORKER_QUANTUM: u64 = 1 << 20;

/// How long what a flow has sent waits for its answer, beyond the usual round trip, until it is sent again. Peers on Linux
/// acknowledge within less even where they put it off, if they have this time from here; else within 0.04 s, and a short
/// message may be sent twice.
const MIN_RETRANSMIT_TIME: Duration = Duration::from_millis(20);

/// Most flows whose bytes are told when a connection is closed.
const MAX_SHOWN: usize = 16;

/// Which way the messages of a connection go, seen from here.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Send,
    Recv,
}

/// What carries the messages of a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum TransportKind {
    Tcp,
    Rdma,
}

impl TransportKind {
    /// As [`crate::Settings`] names it.
    fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
        }
    }
}

/// How much of a connection's work is not done.
pub(crate) struct InFlight {
    pub(crate) requests: usize,
    pub(crate) bytes: u64,
}

/// A connection but for its flows.
pub(crate) struct Base {
    pub(crate) context: Context,
    pub(crate) counters: Counters,
    direction: Direction,
    medium: TransportKind,
    peer: SocketAddr,
    /// What carries it now; the context has what it began with.
    device: Mutex<Device>,
    failure: OnceLock<Error>,
    /// Whether the failure has been written to the log.
    reported: AtomicBool,
    /// Bytes carried by flows that have ended, the largest ones.
    ended: Mutex<Vec<u64>>,
    /// Who wants to hear of completions and of the failure.
    notified: OnceLock<Arc<dyn Notify>>,
    /// Memory of messages that were given up before they were done.
    retained: Mutex<Vec<Box<dyn Any + Send + Sync>>>,
}

impl Base {
    pub(crate) fn new(
        context: Context,
        direction: Direction,
        medium: TransportKind,
        peer: SocketAddr,
    ) -> Self {
        Self {
            device: Mutex::new(context.device.clone()),
            context,
            counters: Counters::default(),
            direction,
            medium,
            peer,
            failure: OnceLock::new(),
            reported: AtomicBool::new(false),
            ended: Mutex::default(),
            notified: OnceLock::new(),
            retained: Mutex::default(),
        }
    }

    /// `send` or `recv`.
    pub(crate) fn direction(&self) -> &'static str {
        match self.direction {
            Direction::Send => "send",
            Direction::Recv => "recv",
        }
    }

    /// Its values for the metrics.
    pub(crate) fn observe(&self, in_flight: &InFlight) -> ConnectionObservation<'_> {
        ConnectionObservation {
            direction: self.direction(),
            peer: self.peer,
            device: self.context.device.name(),
            label: &self.context.label,
            counters: &self.counters,
            requests: in_flight.requests,
            bytes: in_flight.bytes,
        }
    }

    /// The peer's address.
    pub(crate) fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Whether the memory of messages of this length has to be registered.
    pub(crate) fn needs_registration(&self, length: usize) -> bool {
        self.medium == TransportKind::Rdma && length > rdma::EAGER_BYTES
    }

    /// Registers memory for messages.
    pub(crate) fn mr_cache(&self) -> MrCache {
        let memory_types = match self.medium {
            TransportKind::Tcp => MemoryTypes::HOST,
            TransportKind::Rdma => self.context.memory_types,
        };
        // Wherever the connection is, these are the ports that it may come to.
        let began = std::iter::once(self.context.device.clone());
        MrCache::new(&lock(&self.device), began.chain(self.context.other_ports()), memory_types)
    }

    /// Another device carries it from now on.
    pub(crate) fn move_to(&self, device: &Device) {
        lock(&self.device).clone_from(device);
    }

    fn device_name(&self) -> String {
        lock(&self.device).name().to_owned()
    }

    /// Bytes moved so far.
    pub(crate) fn moved(&self) -> u64 {
        // Over RDMA only whole messages are counted.
        self.counters.carried().max(self.counters.bytes())
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

    /// Ends the connection with an error, unless it has one already; tells whether this was it.
    /// With requests in flight that is a failure to report at once; without, it matters only if
    /// somebody makes another request.
    pub(crate) fn fail(&self, kind: ErrorKind, what: &str, in_flight: &InFlight) -> bool {
        let message = format!(
            "{} {} failed: {what}; {} requests and {} bytes in flight; device {}{}",
            match self.direction {
                Direction::Send => "send to",
                Direction::Recv => "receive from",
            },
            self.peer,
            in_flight.requests,
            in_flight.bytes,
            self.device_name(),
            self.label(),
        );
        let first = self.failure.set(Error::new(kind, message)).is_ok();
        waiters::wake_all();
        if first && in_flight.requests > 0 {
            self.failure();
        }
        if first {
            self.notify();
        }
        first
    }

    /// Calls this from now on when a request is done or the connection fails.
    pub(crate) fn notify_with(&self, notified: Arc<dyn Notify>) {
        // The first one stays: a connection has one owner.
        let _ = self.notified.set(notified);
    }

    /// A request is done, or the connection has failed.
    pub(crate) fn notify(&self) {
        if let Some(notified) = self.notified.get() {
            notified.notify();
        }
    }

    /// Keeps memory as long as this.
    pub(crate) fn retain_memory(&self, memory: Box<dyn Any + Send + Sync>) {
        lock(&self.retained).push(memory);
    }

    /// Something worth knowing happened to the connection.
    pub(crate) fn info(&self, what: &str) {
        self.context.log.info(&self.line(what));
    }

    /// Something happened to the connection that somebody should look after.
    pub(crate) fn warn(&self, what: &str) {
        self.context.log.warn(&self.line(what));
    }

    fn line(&self, what: &str) -> String {
        let (peer, device) = (self.peer, self.device_name());
        format!("evenkeel: peer={peer} {what} device={device}{}", self.label())
    }

    /// A flow that has carried this many bytes has ended.
    pub(crate) fn ended(&self, carried: u64) {
        let mut ended = lock(&self.ended);
        ended.push(carried);
        ended.sort_unstable_by(|a, b| b.cmp(a));
        ended.truncate(MAX_SHOWN);
    }

    /// Says that the connection is there, and what carries its messages.
    pub(crate) fn log_opened(&self) {
        self.context.log.info(&format!(
            "evenkeel: connection opened peer={} direction={} transport={} device={}{}",
            self.peer,
            self.direction(),
            self.medium.name(),
            self.device_name(),
            self.label(),
        ));
    }

    /// Says what the connection carried, now that it is closed and all its flows have ended.
    pub(crate) fn log_closed(&self) {
        let mut carried = std::mem::take(&mut *lock(&self.ended));
        carried.retain(|bytes| *bytes > 0);
        let total = self.counters.bytes();
        let (sent, received) = match self.direction {
            Direction::Send => (total, 0),
            Direction::Recv => (0, total),
        };
        self.context.log.info(&format!(
            "evenkeel: connection closed peer={} sent={sent}B recv={received}B {} flows={} {carried:?} device={}{}",
            self.peer,
            self.counters,
            carried.len(),
            self.device_name(),
            self.label(),
        ));
    }

    /// The bytes of a frame that no payload follows.
    pub(crate) fn encode(&self, frame: Frame) -> [u8; FRAME_BYTES] {
        self.encode_with(frame, SendBuffer::from_static(&[]))
    }

    /// The bytes of a frame that this payload follows.
    pub(crate) fn encode_with(&self, frame: Frame, payload: SendBuffer) -> [u8; FRAME_BYTES] {
        if self.context.settings.checksum {
            frame.seal(payload.checksum(0))
        } else {
            frame.encode()
        }
    }

    /// Reads a frame; also gives the checksum of its payload, 0 where there are none. One that has changed on its way is
    /// counted.
    pub(crate) fn decode(&self, bytes: &[u8; FRAME_BYTES]) -> Result<(Frame, u32), FrameError> {
        if !self.context.settings.checksum {
            return Frame::decode(bytes).map(|frame| (frame, 0));
        }
        let opened = Frame::open(bytes);
        self.counters.corrupt.add((opened == Err(FrameError::Checksum)).into());
        opened
    }

    fn label(&self) -> String {
        let label = &self.context.label;
        if label.is_empty() { String::new() } else { format!(" {label}") }
    }
}

/// Sets up a socket that is to become a flow.
pub(crate) fn configure_socket(socket: &Socket, context: &Context) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    sys::set_unsent_limit(socket, context.settings.chunk_bytes as u32)?;
    // A message waits for its last chunk, and all flows for the message. It is long when a flow that came while queues were
    // full loses all it has outstanding: the others stop, the queues drain, and the answer to the kernel's probe is faster
    // than any before, so that it is taken for one to what is lost (RFC 8985, 6.2). Older kernels go on waiting for 0.2 s.
    let _ = sys::set_min_retransmit_time(socket, MIN_RETRANSMIT_TIME);
    // Finds a dead host behind an idle flow; `sys::path_info` finds one behind a busy flow. Half the
    // timeout passes before the first probe, half over four probes.
    let timeout = context.settings.peer_timeout;
    let keepalive = TcpKeepalive::new()
        .with_time((timeout / 2).max(Duration::from_secs(1)))
        .with_interval((timeout / 8).max(Duration::from_secs(1)))
        .with_retries(4);
    socket.set_tcp_keepalive(&keepalive)
}

/// Whether an I/O error only means "not now".
pub(crate) fn would_block(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}
