//! How long a receiver waits for its sender, and what ends it.

use std::time::Duration;

use super::Time;
use crate::tcp::reassembly::ReassemblyError;

/// How long a receiver whose flows were closed waits for a new one. A live sender has noticed it too, and opens one at once.
const CLOSED_TIMEOUT: Duration = Duration::from_millis(500);
/// How long a receiver waits of whose flows one was reset. Something on the path may have done it, and may let nothing through
/// for a while. A live sender dials again and again.
const RESET_TIMEOUT: Duration = Duration::from_secs(10);

/// The times that a receiver's owner sets.
#[derive(Clone, Copy, Debug)]
pub struct RecvTimeouts {
    /// How long a sender tries to open a connection.
    pub connect: Duration,
    /// How long a sender tries to replace its flows.
    pub recovery: Duration,
}

/// Why a flow has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FlowEnd {
    /// The peer has ended it and may, because it does not need it any more.
    Expected,
    /// The peer has reported it as dead, by another flow or by dialing it again.
    Reported,
    /// It was closed, or carried wrong bytes.
    Lost(String),
    /// It was reset, by the peer's system or on the path.
    Reset(String),
    /// The peer's host did not answer, there is no route to it, this host has ended the flow, or somebody has changed its
    /// bytes.
    Unreachable(String),
}

/// Why a receiver cannot continue.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecvFailure {
    /// The peer's messages contradict each other, or a posted buffer.
    #[error(transparent)]
    Message(#[from] ReassemblyError),
    /// The peer answers what it was not asked.
    #[error("protocol error: the peer sent SameTagBelow without being asked")]
    NotAsked,
    /// The peer sends no more messages, and buffers are posted for some.
    #[error("the peer closed the connection")]
    PeerClosed,
    /// Each flow has bytes of a message that has no buffer.
    #[error(
        "flows wait for buffers of later messages, and none delivered message {message} within {} ms",
        timeout.as_millis()
    )]
    NotDelivered {
        /// Number of the message that is due.
        message: u64,
        /// How long the receiver has waited for it.
        timeout: Duration,
    },
    /// No flow is left.
    #[error(
        "all flows are lost ({cause}) and the peer opened no other within {} ms",
        timeout.as_millis()
    )]
    FlowsLost {
        /// Why the last one ended.
        cause: String,
        /// How long the receiver has waited for another one.
        timeout: Duration,
    },
}

/// What the flows and the posted buffers wait for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Situation {
    /// A flow can deliver something for the posted buffers.
    pub(super) has_open_flow: bool,
    /// The peer has not ended all flows.
    pub(super) has_live_flow: bool,
    /// Buffers wait for their messages.
    pub(super) is_outstanding: bool,
    /// All messages below this number are complete.
    pub(super) complete_below: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    Failed,
    Closed,
}

/// The life of a connection.
#[derive(Debug)]
pub(super) struct Life {
    timeouts: RecvTimeouts,
    state: State,
    /// When this side has opened it. The sender has tried to since before that.
    opened: Time,
    /// Since when no flow can deliver what the posted buffers wait for.
    stuck_since: Option<Time>,
    /// How long to wait for a new flow when none is left.
    replacement_timeout: Duration,
    /// Whether the sender has opened the connection: it has said something, or has replaced a flow. Before that it may not
    /// have got the answers of all flows, and dials some again.
    is_sender_open: bool,
    /// The highest number of a flow so far.
    highest: u32,
    /// What that was when the time was prolonged last. A chunk on a later flow shows that the sender gets through.
    last_suspect: u32,
    /// When a flow was ended by anything but its sender the last time.
    last_trouble: Option<Time>,
    /// Why the last flow ended.
    cause: String,
    /// The peer closes the connection once the messages below this number are delivered.
    closes_at: Option<u64>,
}

impl Life {
    pub(super) fn new(now: Time, timeouts: RecvTimeouts) -> Self {
        Self {
            timeouts,
            state: State::Open,
            opened: now,
            stuck_since: None,
            replacement_timeout: CLOSED_TIMEOUT,
            is_sender_open: false,
            highest: 0,
            last_suspect: 0,
            last_trouble: None,
            cause: String::new(),
            closes_at: None,
        }
    }

    /// Whether it has neither failed nor been closed.
    pub(super) fn is_open(&self) -> bool {
        self.state == State::Open
    }

    pub(super) fn is_closed(&self) -> bool {
        self.state == State::Closed
    }

    /// Fails, if it is open.
    pub(super) fn fail(&mut self) {
        if self.is_open() {
            self.state = State::Failed;
        }
    }

    pub(super) fn close(&mut self) {
        self.state = State::Closed;
    }

    /// The peer closes the connection. It may deliver fewer messages than it has announced on another flow, if it gives up.
    pub(super) fn peer_closes(&mut self, messages: u64) {
        self.is_sender_open = true;
        self.closes_at = Some(self.closes_at.map_or(messages, |at| at.min(messages)));
    }

    pub(super) fn is_peer_closing(&self) -> bool {
        self.closes_at.is_some()
    }

    /// The sender has opened the connection.
    pub(super) fn sender_is_open(&mut self) {
        self.is_sender_open = true;
    }

    /// A flow is added. Its dialer may know already that it is accepted. Returns whether none could deliver anything before.
    pub(super) fn flow_added(&mut self, number: u32, is_answered: bool) -> bool {
        // A flow that is dialed again keeps its number.
        self.is_sender_open |= !is_answered && number > self.highest;
        self.highest = self.highest.max(number);
        let was_stuck = self.stuck_since.take().is_some();
        if was_stuck {
            // The sender lives. It may give this flow up before it knows that it is accepted, and tries again.
            self.replacement_timeout = self.timeouts.recovery;
        }
        was_stuck
    }

    /// A flow has ended.
    pub(super) fn flow_ended(&mut self, now: Time, end: &FlowEnd) {
        let RecvTimeouts { connect, recovery } = self.timeouts;
        let timeout = match end {
            FlowEnd::Expected => return,
            // The sender gets through by the flow of the report. What has ended the other one may end that too, and the
            // sender then dials again.
            FlowEnd::Reported => {
                self.note_trouble(now, RESET_TIMEOUT.min(recovery));
                if self.cause.is_empty() {
                    "the peer reported one as dead".clone_into(&mut self.cause);
                }
                return;
            }
            FlowEnd::Lost(_) => None,
            FlowEnd::Reset(_) => Some(RESET_TIMEOUT.min(recovery)),
            FlowEnd::Unreachable(_) => Some(recovery),
        };
        if let Some(timeout) = timeout {
            // Until then it may try to open the connection.
            let opening = match self.is_sender_open {
                true => Duration::ZERO,
                false => connect.saturating_sub(now.saturating_sub(self.opened)),
            };
            self.note_trouble(now, timeout.max(opening));
            self.last_suspect = self.highest;
        }
        if let FlowEnd::Lost(why) | FlowEnd::Reset(why) | FlowEnd::Unreachable(why) = end {
            why.clone_into(&mut self.cause);
        }
    }

    /// The sender may need this time for its next flow, if not longer.
    fn note_trouble(&mut self, now: Time, timeout: Duration) {
        self.replacement_timeout = self.replacement_timeout.max(timeout);
        self.last_trouble = Some(now);
    }

    /// A chunk has come by the flow of this number. One that is newer than the trouble shows that the sender gets through again.
    /// It may still not know of all flows that ended here, and close the one that it got through by, since it takes them for
    /// alive. So the trouble is over when nothing follows it for a while.
    pub(super) fn chunk_came(&mut self, now: Time, number: u32) {
        self.is_sender_open = true;
        if self.replacement_timeout <= CLOSED_TIMEOUT || number <= self.last_suspect {
            return;
        }
        let is_over = self.last_trouble.is_none_or(|at| now.saturating_sub(at) >= RESET_TIMEOUT);
        let timeout = if is_over { CLOSED_TIMEOUT } else { RESET_TIMEOUT };
        self.replacement_timeout = self.replacement_timeout.min(timeout);
    }

    /// Notes since when the posted buffers can never be filled. Returns why the connection fails, if that is long enough.
    /// `message` is the number of the one that is due.
    pub(super) fn check(
        &mut self,
        now: Time,
        situation: &Situation,
        message: impl FnOnce() -> u64,
    ) -> Option<RecvFailure> {
        let Situation { has_open_flow, has_live_flow, is_outstanding, .. } = *situation;
        if has_open_flow {
            self.stuck_since = None;
            return None;
        }
        if has_live_flow && !is_outstanding {
            return None;
        }
        self.stuck_since.get_or_insert(now);
        if self.deadline(situation)? > now {
            return None;
        }
        let timeout = self.patience(situation);
        Some(if self.is_peer_done(situation) || !has_live_flow && self.cause.is_empty() {
            RecvFailure::PeerClosed
        } else if has_live_flow {
            RecvFailure::NotDelivered { message: message(), timeout }
        } else {
            RecvFailure::FlowsLost { cause: self.cause.clone(), timeout }
        })
    }

    /// Whether no flow could deliver anything at the last check.
    pub(super) fn is_stuck(&self) -> bool {
        self.stuck_since.is_some()
    }

    /// When the connection fails, if nothing happens.
    pub(super) fn deadline(&self, situation: &Situation) -> Option<Time> {
        let since = self.stuck_since.filter(|_| situation.is_outstanding)?;
        Some(since + self.patience(situation))
    }

    /// How long it waits while no flow can deliver anything.
    fn patience(&self, situation: &Situation) -> Duration {
        match (situation.has_live_flow, self.is_peer_done(situation)) {
            (true, _) => self.timeouts.recovery,
            (false, true) => Duration::ZERO,
            // The sender may not get through either, and tries as long.
            (false, false) => self.replacement_timeout,
        }
    }

    /// Whether the peer has closed the connection, and everything is there that it sends.
    fn is_peer_done(&self, situation: &Situation) -> bool {
        self.closes_at.is_some_and(|below| situation.complete_below >= below)
    }
}
