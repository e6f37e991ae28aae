//! Clients on their way in: one thread accepts them, hears who they are, calls them back and lets them join.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use evenkeel_transport::{
    Block, Connecting, Listener, Notify, Receiving, RecvConnection, SendConnection,
};

use crate::lock;
use crate::server::Shared;
use crate::session::say;
use evenkeel_reduction::client::JoinedServer;
use evenkeel_reduction::protocol::{MESSAGE_BYTES, Member, Packet};

/// How long a client may take to say who it is and to be called back.
const PATIENCE: Duration = Duration::from_secs(10);
/// Most clients on their way in; when more come, the oldest is dropped.
const MOST: usize = 512;
/// How often clients on their way in are looked at.
const LOOK: Duration = Duration::from_millis(1);
/// How often anything is looked at.
const TIDY: Duration = Duration::from_millis(500);

/// Wakes the thread.
#[derive(Default)]
pub(crate) struct Bell {
    state: Mutex<Rung>,
    more: Condvar,
}

#[derive(Default)]
struct Rung {
    rung: bool,
    stopped: bool,
}

impl Bell {
    /// Ends the thread.
    pub(crate) fn stop(&self) {
        lock(&self.state).stopped = true;
        self.more.notify_all();
    }

    /// Waits until it is rung, or this long; false when it was stopped.
    fn wait(&self, most: Duration) -> bool {
        let state = lock(&self.state);
        let waited =
            self.more.wait_timeout_while(state, most, |state| !state.rung && !state.stopped);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.rung = false;
        !state.stopped
    }
}

impl Notify for Bell {
    fn notify(&self) {
        lock(&self.state).rung = true;
        self.more.notify_all();
    }
}

/// The thread's work.
pub(crate) struct Reception {
    shared: Arc<Shared>,
    listener: Listener,
    bell: Arc<Bell>,
    /// Oldest first.
    newcomers: VecDeque<Newcomer>,
}

struct Newcomer {
    up: RecvConnection,
    since: Instant,
    stage: Stage,
}

enum Stage {
    /// It is to say who it is.
    Hello(Receiving),
    /// It is being called back.
    Call(Member, Connecting),
    /// Its communicator's way up is awaited.
    Ascend(Member, SendConnection),
}

/// How far a newcomer is.
enum Step {
    /// Not there yet.
    Stay(Newcomer),
    /// It can join, by this way up.
    Ready(Member, Vec<JoinedServer>, RecvConnection, SendConnection),
    /// It is not welcome, and can be told why.
    Refuse(Member, SendConnection, String),
    /// It is of no use.
    Drop(String),
    /// It went without a word: somebody wanted to know whether the server lives.
    Gone,
}

impl Reception {
    pub(crate) fn new(shared: Arc<Shared>, listener: Listener, bell: Arc<Bell>) -> Self {
        Self { shared, listener, bell, newcomers: VecDeque::new() }
    }

    /// Receives clients until the bell is stopped.
    pub(crate) fn work(mut self) {
        let mut tidied = Instant::now();
        loop {
            let most = if self.newcomers.is_empty() { TIDY } else { LOOK };
            if !self.bell.wait(most) {
                return;
            }
            self.accept();
            for _ in 0..self.newcomers.len() {
                if let Some(newcomer) = self.newcomers.pop_front() {
                    self.step(newcomer);
                }
            }
            let now = Instant::now();
            if now.saturating_duration_since(tidied) >= TIDY {
                tidied = now;
                self.shared.tidy(now);
            }
        }
    }

    fn accept(&mut self) {
        loop {
            match self.listener.poll_accept() {
                Ok(Some(up)) => {
                    let since = Instant::now();
                    if let Ok(Ok(head)) = up.recv_block(Block::new(MESSAGE_BYTES), MESSAGE_BYTES) {
                        self.newcomers.push_back(Newcomer { up, since, stage: Stage::Hello(head) });
                    }
                    if self.newcomers.len() > MOST {
                        self.newcomers.pop_front();
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    self.shared.log.warn(&error.to_string());
                    return;
                }
            }
        }
    }

    fn step(&mut self, newcomer: Newcomer) {
        let peer = newcomer.up.peer();
        match newcomer.step(&self.shared) {
            Step::Stay(newcomer)
                if matches!(newcomer.stage, Stage::Ascend(..))
                    || newcomer.since.elapsed() < PATIENCE =>
            {
                self.newcomers.push_back(newcomer);
            }
            Step::Stay(_) => {
                let limit = PATIENCE.as_secs();
                self.shared.log.info(&format!("{peer} did not join within {limit} s"));
            }
            Step::Gone => {}
            Step::Drop(why) => {
                self.shared.metrics.refused.inc();
                self.shared.log.info(&format!("{peer} does not join: {why}"));
            }
            Step::Refuse(member, down, why) => self.refuse(&member, peer, &down, why),
            Step::Ready(member, above, up, down) => {
                if let Err((why, down)) = self.shared.admit(&member, above, up, down) {
                    self.refuse(&member, peer, &down, why);
                }
            }
        }
    }

    fn refuse(&self, member: &Member, peer: SocketAddr, down: &SendConnection, why: String) {
        self.shared.metrics.refused.inc();
        let (name, Member { comm_id, job, .. }) = (member.name(), member);
        self.shared.log.warn(&format!(
            "{name} at {peer} of communicator {comm_id:#x} of job {job:?} is refused: {why}"
        ));
        say(down, &Packet::Failed(why));
    }
}

impl Newcomer {
    fn step(self, shared: &Shared) -> Step {
        let Self { up, since, stage } = self;
        match stage {
            Stage::Hello(mut head) => {
                let (block, length) = match head.poll(true) {
                    Ok(None) => return Step::Stay(Self { up, since, stage: Stage::Hello(head) }),
                    Ok(Some(message)) => message,
                    Err(_) => return Step::Gone,
                };
                let message = block.bytes().get(..length).unwrap_or_default();
                let (member, handle) = match Packet::decode(message) {
                    Ok(Packet::Join(member, handle)) => (member, handle),
                    Ok(_) => return Step::Drop("it does not say who it is first".to_owned()),
                    Err(error) => return Step::Drop(error.to_string()),
                };
                let label = format!("comm={:#x}", member.comm_id);
                // The client knows among how many servers its flows are shared out.
                let device = shared.transport.device_of(&up);
                match shared.transport.try_connect(device, &handle, &label, up.flows()) {
                    Ok(call) => Step::Stay(Self { up, since, stage: Stage::Call(member, call) }),
                    Err(error) => Step::Drop(format!("it cannot be called back: {error}")),
                }
            }
            Stage::Call(member, call) => match call.poll() {
                Ok(None) => Step::Stay(Self { up, since, stage: Stage::Call(member, call) }),
                Ok(Some(down)) => {
                    Self { up, since, stage: Stage::Ascend(member, down) }.step(shared)
                }
                Err(error) => Step::Drop(format!("it cannot be called back: {error}")),
            },
            Stage::Ascend(member, down) => {
                match shared.ascend(&member, shared.transport.device_of(&up)) {
                    Ok(None) => Step::Stay(Self { up, since, stage: Stage::Ascend(member, down) }),
                    Ok(Some(above)) => Step::Ready(member, above, up, down),
                    Err(why) => Step::Refuse(member, down, why),
                }
            }
        }
    }
}
