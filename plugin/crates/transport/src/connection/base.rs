//! The state that both directions of a connection share: failure, counters, log lines.

use std::any::Any;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use evenkeel_protocol::{ConnectionId, FRAME_BYTES, Frame, FrameError};
use socket2::{Socket, TcpKeepalive};

use crate::context::Context;
use crate::device::Device;
use crate::error::{Error, ErrorKind};
use crate::rdma::{self, MemoryTypes, MrCache};
use crate::runtime::notify::Notify;
use crate::runtime::waiters;
use crate::sync::lock;
use crate::sys;
use crate::telemetry::counters::Counters;
use crate::telemetry::metrics::ConnectionObservation;
use crate::telemetry::waits::{WaitTimes, Waits};

/// Maximum number of bytes that a worker moves on one flow before it serves others.
pub(crate) const WORKER_QUANTUM: u64 = 1 << 20;

/// Minimum retransmission timeout beyond the usual round trip. With this value peers on Linux
/// acknowledge in less time, even when they delay acknowledgements. Otherwise they take up to 0.04
/// s, and a short message may be sent twice.
const MIN_RETRANSMIT_TIME: Duration = Duration::from_millis(20);

/// Maximum number of flows whose bytes are logged when a connection is closed.
const MAX_SHOWN: usize = 16;

/// The direction of a connection's messages, seen from this process.
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
    /// The name that [`crate::Settings`] uses.
    fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
        }
    }
}

/// Requests of a connection that are not done.
pub(crate) struct InFlight {
    pub(crate) requests: usize,
    pub(crate) bytes: u64,
}

/// A connection without its flows.
pub(crate) struct Base {
    pub(crate) context: Context,
    pub(crate) counters: Counters,
    pub(crate) waits: Waits,
    /// Whether the caller waits for what it has requested.
    awaited: AtomicBool,
    /// The same number at both ends.
    id: OnceLock<u64>,
    direction: Direction,
    transport: TransportKind,
    peer: SocketAddr,
    /// The device that carries it now. The context has the one that it was opened on.
    device: Mutex<Device>,
    failure: OnceLock<Error>,
    /// Whether the failure has been written to the log.
    reported: AtomicBool,
    /// Bytes carried by flows that have ended, largest first.
    ended: Mutex<Vec<u64>>,
    /// Notified of completions and of the failure.
    notified: OnceLock<Arc<dyn Notify>>,
    /// Memory of messages that were abandoned before they were done.
    retained: Mutex<Vec<Box<dyn Any + Send + Sync>>>,
}

impl Base {
    pub(crate) fn new(
        context: Context,
        direction: Direction,
        transport: TransportKind,
        peer: SocketAddr,
    ) -> Self {
        Self {
            device: Mutex::new(context.device.clone()),
            context,
            counters: Counters::default(),
            waits: Waits::default(),
            awaited: AtomicBool::new(true),
            id: OnceLock::new(),
            direction,
            transport,
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
            waits: self.wait_times(),
            requests: in_flight.requests,
            bytes: in_flight.bytes,
        }
    }

    /// The connection has this identifier in the handshake.
    pub(crate) fn set_id(&self, id: ConnectionId) {
        let mut number = [0; 8];
        number.copy_from_slice(&id.0[..8]);
        // The first one stays: a connection has one.
        let _ = self.id.set(u64::from_le_bytes(number));
    }

    /// A number that both ends have; 0 before it is known.
    pub(crate) fn id(&self) -> u64 {
        self.id.get().copied().unwrap_or_default()
    }

    /// The direction of its messages.
    pub(crate) fn direction_of(&self) -> Direction {
        self.direction
    }

    /// Whether requests are not done, from this time of the coarse clock on. Called with the connection's lock.
    pub(crate) fn set_outstanding(&self, is_outstanding: bool, now: Duration) {
        let is_outstanding = is_outstanding && self.awaited.load(Ordering::Relaxed);
        if self.waits.outstanding.set(is_outstanding, now) {
            self.context.metrics.calls.change(is_outstanding, now);
        }
    }

    /// Whether the caller waits for what it has requested. [`Base::set_outstanding`] follows, with
    /// the connection's lock.
    pub(crate) fn set_awaited(&self, is_awaited: bool) {
        self.awaited.store(is_awaited, Ordering::Relaxed);
    }

    /// How long it has waited so far.
    pub(crate) fn wait_times(&self) -> WaitTimes {
        match self.direction {
            Direction::Send => self.waits.sender_times(),
            Direction::Recv => self.waits.receiver_times(),
        }
    }

    /// The peer's address.
    pub(crate) fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Whether the memory of messages of this length has to be registered.
    pub(crate) fn needs_registration(&self, length: usize) -> bool {
        self.transport == TransportKind::Rdma && length > rdma::EAGER_BYTES
    }

    /// The cache that registers memory for messages.
    pub(crate) fn mr_cache(&self) -> MrCache {
        let memory_types = match self.transport {
            TransportKind::Tcp => MemoryTypes::HOST,
            TransportKind::Rdma => self.context.memory_types,
        };
        // A failover may move the connection to any of these ports.
        let began = std::iter::once(self.context.device.clone());
        MrCache::new(&lock(&self.device), began.chain(self.context.other_ports()), memory_types)
    }

    /// Another device carries the connection from now on.
    pub(crate) fn move_to(&self, device: &Device) {
        lock(&self.device).clone_from(device);
    }

    /// Name of the device that carries it now.
    pub(crate) fn device_name(&self) -> String {
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

    /// The failure, if there is one. The first call writes it to the log.
    pub(crate) fn failure(&self) -> Option<Error> {
        let error = self.failure.get()?;
        if !self.reported.swap(true, Ordering::Relaxed) {
            self.context.log.warn(&format!("evenkeel: {error}"));
        }
        Some(error.clone().mark_logged())
    }

    /// Fails the connection, unless it has failed already. Returns whether this call was the first.
    /// With requests in flight the failure is logged at once. Without, it matters only if another
    /// request is made.
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

    /// From now on, notifies when a request is done or the connection fails.
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

    /// Keeps memory as long as the connection exists.
    pub(crate) fn retain_memory(&self, memory: Box<dyn Any + Send + Sync>) {
        lock(&self.retained).push(memory);
    }

    /// Logs an event of the connection.
    pub(crate) fn info(&self, what: &str) {
        self.context.log.info(&self.line(what));
    }

    /// Logs an event of the connection that needs attention.
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

    /// Logs that the connection is open, and what carries its messages.
    pub(crate) fn log_opened(&self) {
        self.context.log.info(&format!(
            "evenkeel: connection opened peer={} direction={} transport={} device={}{}",
            self.peer,
            self.direction(),
            self.transport.name(),
            self.device_name(),
            self.label(),
        ));
    }

    /// Logs what the connection has carried, once it is closed and all its flows have ended.
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

    /// Encodes a frame without payload.
    pub(crate) fn encode(&self, frame: Frame) -> [u8; FRAME_BYTES] {
        if self.context.settings.checksum { frame.seal(0) } else { frame.encode() }
    }

    /// Decodes a frame and the checksum of its payload, 0 without checksums. Counts frames that do
    /// not match theirs.
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

impl Drop for Base {
    fn drop(&mut self) {
        // Requests that are not done never will be.
        self.set_outstanding(false, sys::coarse_time());
    }
}

/// Configures a socket that becomes a flow.
pub(crate) fn configure_socket(socket: &Socket, context: &Context) -> io::Result<()> {
    sys::keep_from_children(socket);
    socket.set_tcp_nodelay(true)?;
    // Without it a slow flow takes more chunks than it should. Sandboxes like gVisor may refuse the
    // option.
    let _ = sys::set_unsent_limit(socket, context.settings.chunk_bytes as u32);
    // A message waits for its last chunk, and all flows wait for the message. With the kernel's
    // default the wait is long when a new flow loses all its outstanding bytes in full queues. The
    // other flows stop and the queues drain. Then the answer to the kernel's probe arrives faster
    // than any before, and counts as one to the lost segments (RFC 8985, 6.2). Older kernels still
    // wait for 0.2 s.
    let _ = sys::set_min_retransmit_time(socket, MIN_RETRANSMIT_TIME);
    // Detects a dead host behind an idle flow. `sys::path_info` detects one behind a busy flow. The
    // first probe is sent after half the timeout; four probes share the other half.
    let timeout = context.settings.peer_timeout;
    let keepalive = TcpKeepalive::new()
        .with_time((timeout / 2).max(Duration::from_secs(1)))
        .with_interval((timeout / 8).max(Duration::from_secs(1)))
        .with_retries(4);
    socket.set_tcp_keepalive(&keepalive)
}

/// Whether an I/O error only means that the call would block.
pub(crate) fn would_block(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}
