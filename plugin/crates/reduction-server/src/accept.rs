//! Accepts clients. One thread receives who each client is, connects back to it, and admits it to
//! its communicator.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use evenkeel_reduction::Member;
use evenkeel_reduction::client::JoinedServer;
use evenkeel_reduction::protocol::{MESSAGE_BYTES, Packet};
use evenkeel_transport::sync::lock;
use evenkeel_transport::{
    Block, Connecting, Listener, Notify, PendingRecv, RecvConnection, SendConnection,
};

use crate::registry::CommunicatorRegistry;

/// How long a client may take to send who it is and to accept the server's connection.
const JOIN_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of clients that are joining; beyond that, the oldest is dropped.
const MAX_JOINING: usize = 512;
/// How often joining clients are polled.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// How often communicators are maintained.
const MAINTENANCE_INTERVAL: Duration = Duration::from_millis(500);

/// Wakes the acceptor.
#[derive(Default)]
pub(crate) struct Waker {
    state: Mutex<Wakeup>,
    changed: Condvar,
}

#[derive(Default)]
struct Wakeup {
    notified: bool,
    stopped: bool,
}

impl Waker {
    /// Ends the acceptor.
    pub(crate) fn stop(&self) {
        lock(&self.state).stopped = true;
        self.changed.notify_all();
    }

    /// Waits for a notification, at most for this time. Returns false if the acceptor is to end.
    fn wait(&self, timeout: Duration) -> bool {
        let state = lock(&self.state);
        let waited = self
            .changed
            .wait_timeout_while(state, timeout, |state| !state.notified && !state.stopped);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.notified = false;
        !state.stopped
    }
}

impl Notify for Waker {
    fn notify(&self) {
        lock(&self.state).notified = true;
        self.changed.notify_all();
    }
}

/// Accepts clients, and maintains the communicators now and then.
pub(crate) struct Acceptor {
    registry: Arc<CommunicatorRegistry>,
    listener: Listener,
    waker: Arc<Waker>,
    /// Oldest first.
    joining: VecDeque<JoiningClient>,
}

/// A client that is not admitted yet.
struct JoiningClient {
    up: RecvConnection,
    since: Instant,
    stage: Stage,
}

enum Stage {
    /// Waits for the client's first message.
    Hello(PendingRecv),
    /// Connects to the client.
    ConnectBack(Member, Connecting),
    /// Waits for its communicator's upstream connections.
    JoinUpstream(Member, SendConnection),
}

/// The result of a step.
enum Step {
    /// The client is not ready.
    Wait(JoiningClient),
    /// The client can be admitted, with these upstream connections.
    Ready(Member, Vec<JoinedServer>, RecvConnection, SendConnection),
    /// The client is refused and receives the reason.
    Refuse(Member, SendConnection, String),
    /// The client cannot be answered.
    Drop(String),
    /// The client closed the connection before it sent a message, as a liveness probe does.
    Closed,
}

impl Acceptor {
    pub(crate) fn new(
        registry: Arc<CommunicatorRegistry>,
        listener: Listener,
        waker: Arc<Waker>,
    ) -> Self {
        Self { registry, listener, waker, joining: VecDeque::new() }
    }

    /// Accepts clients until the waker is stopped.
    pub(crate) fn run(mut self) {
        let mut maintained = Instant::now();
        loop {
            let timeout =
                if self.joining.is_empty() { MAINTENANCE_INTERVAL } else { POLL_INTERVAL };
            if !self.waker.wait(timeout) {
                return;
            }
            self.accept();
            for _ in 0..self.joining.len() {
                if let Some(client) = self.joining.pop_front() {
                    self.step(client);
                }
            }
            let now = Instant::now();
            if now.saturating_duration_since(maintained) >= MAINTENANCE_INTERVAL {
                maintained = now;
                self.registry.maintain(now);
            }
        }
    }

    fn accept(&mut self) {
        loop {
            match self.listener.poll_accept() {
                Ok(Some(up)) => {
                    let since = Instant::now();
                    if let Ok(Ok(head)) = up.recv_block(Block::new(MESSAGE_BYTES), MESSAGE_BYTES) {
                        let stage = Stage::Hello(head);
                        self.joining.push_back(JoiningClient { up, since, stage });
                    }
                    if self.joining.len() > MAX_JOINING {
                        self.joining.pop_front();
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    self.registry.context().log.warn(&error.to_string());
                    return;
                }
            }
        }
    }

    fn step(&mut self, client: JoiningClient) {
        let peer = client.up.peer();
        let context = self.registry.context();
        match client.step(&self.registry) {
            Step::Wait(client)
                if matches!(client.stage, Stage::JoinUpstream(..))
                    || client.since.elapsed() < JOIN_TIMEOUT =>
            {
                self.joining.push_back(client);
            }
            Step::Wait(_) => {
                let seconds = JOIN_TIMEOUT.as_secs();
                context.log.info(&format!("{peer} did not join within {seconds} s"));
            }
            Step::Closed => {}
            Step::Drop(why) => {
                context.metrics.refused.inc();
                context.log.info(&format!("{peer} does not join: {why}"));
            }
            Step::Refuse(member, down, why) => self.refuse(&member, peer, &down, why),
            Step::Ready(member, upstream, up, down) => {
                if let Err((why, down)) = self.registry.admit(&member, upstream, up, down) {
                    self.refuse(&member, peer, &down, why);
                }
            }
        }
    }

    fn refuse(&self, member: &Member, peer: SocketAddr, down: &SendConnection, why: String) {
        let context = self.registry.context();
        context.metrics.refused.inc();
        let (name, Member { comm_id, job, .. }) = (member.name(), member);
        context.log.warn(&format!(
            "{name} at {peer} of communicator {comm_id:#x} of job {job:?} is refused: {why}"
        ));
        // A client that cannot be reached detects that by itself.
        drop(Packet::Failed(why).send(down));
    }
}

impl JoiningClient {
    fn step(self, registry: &CommunicatorRegistry) -> Step {
        let Self { up, since, stage } = self;
        match stage {
            Stage::Hello(head) => Self::receive_hello(up, since, head, registry),
            Stage::ConnectBack(member, connecting) => match connecting.poll() {
                Ok(None) => {
                    let stage = Stage::ConnectBack(member, connecting);
                    Step::Wait(Self { up, since, stage })
                }
                Ok(Some(down)) => {
                    let stage = Stage::JoinUpstream(member, down);
                    Self { up, since, stage }.step(registry)
                }
                Err(error) => Step::Drop(cannot_connect(&error.into())),
            },
            Stage::JoinUpstream(member, down) => {
                let device = registry.context().transport.device_of(&up);
                match registry.join_upstream(&member, device) {
                    Ok(None) => {
                        let stage = Stage::JoinUpstream(member, down);
                        Step::Wait(Self { up, since, stage })
                    }
                    Ok(Some(upstream)) => Step::Ready(member, upstream, up, down),
                    Err(why) => Step::Refuse(member, down, why),
                }
            }
        }
    }

    /// Receives who the client is, and begins to connect to it.
    fn receive_hello(
        up: RecvConnection,
        since: Instant,
        mut head: PendingRecv,
        registry: &CommunicatorRegistry,
    ) -> Step {
        let (block, length) = match head.poll(true) {
            Ok(None) => return Step::Wait(Self { up, since, stage: Stage::Hello(head) }),
            Ok(Some(message)) => message,
            Err(_) => return Step::Closed,
        };
        let message = block.bytes().get(..length).unwrap_or_default();
        let (member, handle) = match Packet::decode(message) {
            Ok(Packet::Join(member, handle)) => (member, handle),
            Ok(_) => return Step::Drop("its first message is not a join".to_owned()),
            Err(error) => return Step::Drop(error.to_string()),
        };
        let label = format!("comm={:#x}", member.comm_id);
        let transport = &registry.context().transport;
        let device = transport.device_of(&up);
        // The client has divided its flows by the number of its servers: this connection has as
        // many.
        match transport.try_connect(device, &handle, &label, up.flows()) {
            Ok(connecting) => {
                Step::Wait(Self { up, since, stage: Stage::ConnectBack(member, connecting) })
            }
            Err(error) => Step::Drop(cannot_connect(&error)),
        }
    }
}

fn cannot_connect(error: &evenkeel_transport::Error) -> String {
    format!("cannot connect back to it: {error}")
}
