//! Joins a communicator at all its servers.
//!
//! For each server: its name is resolved and a connection is opened, on which the client sends who
//! it is. The server connects back, and answers on that connection whether the client may join.

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use evenkeel_transport::{
    Block, Connecting, Error, Listener, MemoryTypes, PendingRecv, PendingSend, RecvConnection,
    Retry, SendConnection, Transport,
};

use super::dialer::Dialer;
use super::resolver::Resolver;
use crate::error::ClientError;
use crate::protocol::{MESSAGE_BYTES, Member, Packet};

/// How long to wait before the servers are polled first; doubled for each further poll, up to the
/// maximum.
const MIN_POLL_INTERVAL: Duration = Duration::from_micros(100);
const MAX_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// How long to wait before the next attempt at a server.
const RETRY_PAUSE: Duration = Duration::from_millis(200);
/// How long nobody may listen at a server's address. Its process may be about to start, but the
/// caller has other ways to reduce and does not wait longer. A server whose name has no address
/// yet, and one whose host has accepted the connection but whose process is slow to answer, because
/// it is loaded or many ranks join at once, are waited for until the timeout.
const REACH_TIMEOUT: Duration = Duration::from_secs(3);
/// Range of the window, in pieces, that a client accepts from a server: two messages each on a
/// connection that takes 32.
const WINDOW: (u32, u32) = (1, 15);

/// A server that was joined.
pub struct JoinedServer {
    /// Connects to the server again, and names it in errors.
    pub dialer: Dialer,
    /// To the server.
    pub up: SendConnection,
    /// From the server.
    pub down: RecvConnection,
    /// Maximum size of a piece, in bytes: a multiple of 128.
    pub piece_bytes: usize,
    /// Maximum number of pieces in flight.
    pub window: usize,
}

/// The attempts to join one server.
struct Attempt {
    name: String,
    stage: Stage,
    /// When a connection was first tried.
    dialed: Option<Instant>,
    /// Whether the server has accepted a connection, or has answered that it is busy.
    reached: bool,
    /// The last error.
    last_error: String,
    /// Number of failed attempts: selects one of several addresses.
    failures: usize,
}

enum Stage {
    /// Waits until this time before it connects.
    Pause(Instant),
    /// Connects to the server.
    Dial(Dialer, Listener, Connecting),
    /// Has sent who the client is; waits for the server to connect back.
    AwaitConnection(Dialer, Listener, SendConnection, PendingSend),
    /// Waits for the server's answer.
    AwaitAnswer(Dialer, SendConnection, RecvConnection, PendingRecv),
    /// Has joined.
    Joined(JoinedServer),
}

/// Joins at all servers.
///
/// # Errors
/// Names the first server that refused, or all servers that were not reached or not joined in time.
pub fn join(
    transport: &Arc<Transport>,
    device: usize,
    servers: &[String],
    member: &Member,
    timeout: Duration,
) -> Result<Vec<JoinedServer>, ClientError> {
    let start = Instant::now();
    let resolver = Resolver::start(servers);
    // A rank's flows use as many paths whether they go to one host or to several, and each flow has
    // its cost: pieces are delivered in order, so a piece on a slow flow delays those on others.
    let flows = (transport.settings().flows() / servers.len().max(1)).max(1);
    let mut attempts: Vec<Attempt> = servers
        .iter()
        .map(|name| Attempt {
            name: name.clone(),
            stage: Stage::Pause(start),
            dialed: None,
            reached: false,
            last_error: "its name is not resolved yet".to_owned(),
            failures: 0,
        })
        .collect();
    let mut interval = MIN_POLL_INTERVAL;
    loop {
        let mut all_joined = true;
        for (index, attempt) in attempts.iter_mut().enumerate() {
            let request = JoinRequest {
                transport,
                device,
                member,
                flows,
                timeout,
                resolver: &resolver,
                index,
            };
            attempt.step(&request)?;
            all_joined &= attempt.is_joined();
        }
        if all_joined {
            break;
        }
        let reach_timeout = REACH_TIMEOUT.min(timeout);
        let is_unreachable = |attempt: &Attempt| attempt.is_unreachable(reach_timeout);
        fail_if_any(&attempts, is_unreachable, "not reached", reach_timeout)?;
        if start.elapsed() >= timeout {
            fail_if_any(&attempts, |attempt| !attempt.is_joined(), "not joined", timeout)?;
        }
        thread::sleep(interval);
        interval = (2 * interval).min(MAX_POLL_INTERVAL);
    }
    let joined = attempts.into_iter().filter_map(|attempt| match attempt.stage {
        Stage::Joined(server) => Some(server),
        _ => None,
    });
    Ok(joined.collect())
}

/// Fails if there are such servers, naming them.
fn fail_if_any(
    attempts: &[Attempt],
    is_affected: impl Fn(&Attempt) -> bool,
    what: &str,
    within: Duration,
) -> Result<(), ClientError> {
    let all: Vec<String> = attempts
        .iter()
        .filter(|attempt| is_affected(attempt))
        .map(|attempt| format!("{} ({})", attempt.name, attempt.reason()))
        .collect();
    if all.is_empty() {
        return Ok(());
    }
    Err(ClientError::new(format!("{what} within {within:?}: reduction server {}", all.join(", "))))
}

/// What an attempt needs.
struct JoinRequest<'a> {
    transport: &'a Arc<Transport>,
    device: usize,
    member: &'a Member,
    flows: usize,
    timeout: Duration,
    resolver: &'a Resolver,
    /// Of the server in its list.
    index: usize,
}

impl JoinRequest<'_> {
    fn dial(&self, name: &str, address: SocketAddr) -> Result<Stage, Error> {
        let label = format!("comm={:#x}", self.member.comm_id);
        let listener = self.transport.listen(self.device, &label, MemoryTypes::HOST)?;
        let dialer = Dialer {
            transport: Arc::clone(self.transport),
            device: self.device,
            name: name.to_owned(),
            address,
            label,
            flows: self.flows,
            timeout: self.timeout,
        };
        let connecting = dialer.dial()?;
        Ok(Stage::Dial(dialer, listener, connecting))
    }
}

impl Attempt {
    fn is_joined(&self) -> bool {
        matches!(self.stage, Stage::Joined(_))
    }

    /// Whether the server has an address, and nobody has listened there for this time.
    fn is_unreachable(&self, timeout: Duration) -> bool {
        let is_connected =
            matches!(&self.stage, Stage::Dial(_, _, connecting) if connecting.is_connected());
        !self.reached
            && !is_connected
            && self.dialed.is_some_and(|dialed| dialed.elapsed() >= timeout)
    }

    /// What it waits for, or the last error.
    fn reason(&self) -> &str {
        match self.stage {
            Stage::Dial(..) if self.failures == 0 => "it does not answer",
            Stage::AwaitConnection(..) => "it does not connect back: can it reach this host?",
            Stage::AwaitAnswer(..) => "it does not answer whether this rank may join",
            Stage::Pause(_) | Stage::Dial(..) | Stage::Joined(_) => &self.last_error,
        }
    }

    /// Does the next step if it is possible.
    ///
    /// # Errors
    /// When the server refuses: it would again.
    fn step(&mut self, request: &JoinRequest<'_>) -> Result<(), ClientError> {
        let stage = std::mem::replace(&mut self.stage, Stage::Pause(Instant::now()));
        match self.next(stage, request) {
            Ok(stage) => {
                if matches!(stage, Stage::Dial(..)) {
                    self.dialed.get_or_insert_with(Instant::now);
                }
                self.reached |= matches!(stage, Stage::AwaitConnection(..));
                self.stage = stage;
            }
            Err(error) => {
                self.reached |= matches!(error, AttemptError::Busy(_));
                self.last_error = match error {
                    AttemptError::Retry(why) | AttemptError::Busy(why) => why,
                    AttemptError::Refused(error) => return Err(error),
                };
                self.failures += 1;
                self.stage = Stage::Pause(Instant::now() + RETRY_PAUSE);
            }
        }
        Ok(())
    }

    fn next(&self, stage: Stage, request: &JoinRequest<'_>) -> Result<Stage, AttemptError> {
        match stage {
            Stage::Pause(until) => self.begin(until, request),
            Stage::Dial(dialer, listener, connecting) => {
                poll_connect(dialer, listener, connecting, request)
            }
            Stage::AwaitConnection(dialer, listener, up, sending) => {
                poll_accept(dialer, listener, up, sending)
            }
            Stage::AwaitAnswer(dialer, up, down, head) => poll_answer(dialer, up, down, head),
            Stage::Joined(server) => Ok(Stage::Joined(server)),
        }
    }

    /// Connects to the server once its address is known.
    fn begin(&self, until: Instant, request: &JoinRequest<'_>) -> Result<Stage, AttemptError> {
        if Instant::now() < until {
            return Ok(Stage::Pause(until));
        }
        match request.resolver.lookup(request.index) {
            None => Ok(Stage::Pause(until)),
            Some(Err(why)) => Err(AttemptError::Retry(why)),
            Some(Ok(addresses)) => {
                let address = addresses.get(self.failures % addresses.len().max(1));
                let none = || AttemptError::Retry("it has no address".to_owned());
                Ok(request.dial(&self.name, *address.ok_or_else(none)?)?)
            }
        }
    }
}

/// Sends who the client is, once the connection is open.
fn poll_connect(
    dialer: Dialer,
    listener: Listener,
    connecting: Connecting,
    request: &JoinRequest<'_>,
) -> Result<Stage, AttemptError> {
    match connecting.poll() {
        Err(error) => {
            let why = error.to_string();
            Err(match error.retry() {
                Retry::Unknown => AttemptError::Retry(why),
                Retry::Later => AttemptError::Busy(why),
                Retry::Never => AttemptError::Refused(dialer.error(&why)),
            })
        }
        Ok(None) => Ok(Stage::Dial(dialer, listener, connecting)),
        Ok(Some(up)) => {
            let member = request.member.at_server(request.index);
            let join = Packet::Join(member, listener.handle().clone());
            let mut block = Block::new(MESSAGE_BYTES);
            let length = join.encode(block.bytes_mut());
            match up.send_block(&Arc::new(block), length)? {
                None => Err(AttemptError::queue_full()),
                Some(sending) => Ok(Stage::AwaitConnection(dialer, listener, up, sending)),
            }
        }
    }
}

/// Takes the connection that the server opens.
fn poll_accept(
    dialer: Dialer,
    listener: Listener,
    up: SendConnection,
    mut sending: PendingSend,
) -> Result<Stage, AttemptError> {
    let Some(down) = listener.poll_accept()? else {
        sending.poll(false)?;
        return Ok(Stage::AwaitConnection(dialer, listener, up, sending));
    };
    match down.recv_block(Block::new(MESSAGE_BYTES), MESSAGE_BYTES)? {
        Ok(head) => Ok(Stage::AwaitAnswer(dialer, up, down, head)),
        Err(_) => Err(AttemptError::queue_full()),
    }
}

/// Receives the server's answer.
fn poll_answer(
    dialer: Dialer,
    up: SendConnection,
    down: RecvConnection,
    mut head: PendingRecv,
) -> Result<Stage, AttemptError> {
    let Some((block, length)) = head.poll(true)? else {
        return Ok(Stage::AwaitAnswer(dialer, up, down, head));
    };
    let message = block.bytes().get(..length).unwrap_or_default();
    let why = match Packet::decode(message) {
        Ok(Packet::Joined { piece_bytes, window }) => {
            // Clamped: messages must fit, and memory is bounded whatever the server sends.
            let piece_bytes = (piece_bytes as usize / 128 * 128).clamp(128, 1 << 30);
            let window = window.clamp(WINDOW.0, WINDOW.1) as usize;
            return Ok(Stage::Joined(JoinedServer { dialer, up, down, piece_bytes, window }));
        }
        Ok(Packet::Failed(why)) => format!("refused: {why}"),
        Ok(other) => format!("it answers {other:?} to a join"),
        Err(error) => error.to_string(),
    };
    Err(AttemptError::Refused(dialer.error(&why)))
}

/// Why an attempt failed.
enum AttemptError {
    /// The next attempt may succeed.
    Retry(String),
    /// The next attempt may succeed: the server is reachable, and answered that it is busy.
    Busy(String),
    /// The server refuses this client.
    Refused(ClientError),
}

impl AttemptError {
    fn queue_full() -> Self {
        Self::Retry("a new connection takes no message".to_owned())
    }
}

impl From<Error> for AttemptError {
    fn from(error: Error) -> Self {
        Self::Retry(error.to_string())
    }
}
