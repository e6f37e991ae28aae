//! Repairs the flows of a sender: replaces dead ones, and moves slow ones to another path.

mod dials;

use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::time::Duration;

use dials::Dials;
pub use dials::{DialFailure, FlowDial};

use crate::tcp::path::PathInfo;
use crate::tcp::repath::{FlowStats, Repath, RepathAction};

/// A time, counted from any moment that stays the same. Those of two threads may come a little out of order.
type Time = Duration;

/// How often flows are checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(125);
/// Number of parallel dials while chunks wait for a new flow: some may get dead paths, too.
const URGENT_DIALS: usize = 6;
/// Number of unanswered probes after which a path is dead, if another flow is answered. The kernel sends the first after
/// 0.02 s, the next after 0.06 and 0.14 s. Before Linux 6.15 it sends them after 0.2, 0.6 and 1.4 s.
const MAX_UNANSWERED: u8 = 3;
/// A path is also dead after this time, and twice the usual round trip, without an answer to the first probe.
const MIN_STALL_TIME: Duration = Duration::from_millis(100);
/// Bytes of frames without payload that a flow begins with, at most: its reports of dead flows pass where long packets do not.
const MAX_REPORTS: u64 = 4 << 10;
/// How long nothing moves before flows are pinged. It is doubled each time, up to the limit.
const MIN_PING_TIME: Duration = Duration::from_secs(1);
const MAX_PING_TIME: Duration = Duration::from_secs(64);

/// What a sender's owner sets.
#[derive(Clone, Copy, Debug)]
pub struct RepairSettings {
    /// Number of flows that the connection should have, without those that other paths are found with.
    pub flows: usize,
    /// Maximum number of flows at a time, with replacements.
    pub max_flows: usize,
    /// Number of addresses of the peer.
    pub addresses: usize,
    /// How long the peer's host may answer nothing.
    pub peer_timeout: Duration,
    /// How long to try to replace the flows when none is left.
    pub recovery_timeout: Duration,
    /// Whether other paths are tried.
    pub tries_paths: bool,
    /// Whether flows are pinged while nothing moves.
    pub pings: bool,
}

/// The state of a connection at a check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Situation {
    /// There are messages that the peer does not have.
    pub is_busy: bool,
    /// It was busy at the last check too, and has carried nothing since.
    pub has_stopped: bool,
    /// Something must be retransmitted that no flow has taken yet.
    pub must_retransmit: bool,
    /// Other paths might help: the hosts are not the limit.
    pub is_limited_by_paths: bool,
}

/// The state of a flow at a check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowReport {
    /// The flow's number.
    pub number: u32,
    /// The peer has acknowledged all that it took.
    pub is_drained: bool,
    /// Its keys are nearly used up.
    pub is_worn: bool,
    /// Payload bytes that it has carried.
    pub bytes: u64,
    /// Its path. Not looked at while the connection is not busy.
    pub path: PathInfo,
}

/// Why a flow is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlowDeath {
    /// The peer's host is silent.
    #[error("the peer's host has not answered for {} s", time.as_secs())]
    Silent {
        /// How long it is.
        time: Duration,
    },
    /// Its path is dead, and those of others are not.
    #[error("it stalled while others moved")]
    Stalled,
}

/// Why a sender cannot continue.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RepairFailure {
    /// No flow is left, and none could be opened in time.
    #[error(
        "all flows are lost ({cause}) and none could be opened within {} s",
        timeout.as_secs()
    )]
    FlowsLost {
        /// Why the last one ended.
        cause: String,
        /// How long it was tried.
        timeout: Duration,
    },
    /// No flow is left, and the peer takes no other.
    #[error("all flows are lost ({cause}) and no other could be opened: {refusal}")]
    Refused {
        /// Why the last one ended.
        cause: String,
        /// Why the last dial failed.
        refusal: String,
    },
    /// Only small packets pass.
    #[error(
        "flows open and deliver nothing, also with short segments: is the MTU the same on the whole path, \
         and does a firewall pass data?"
    )]
    NothingDelivered,
}

/// What to do after a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RepairEvent {
    /// Dial a flow. [`Repair::handle_accepted`] or [`Repair::handle_dial_failed`] follows, unless it is cancelled.
    Dial(FlowDial),
    /// Cancel the dial of this flow.
    CancelDial(u32),
    /// Give up this flow. [`Repair::handle_ended`] follows.
    End(u32, FlowDeath),
    /// Give this flow no more chunks.
    Retire {
        /// The flow's number.
        number: u32,
        /// A flow on a faster path has come in its place.
        is_slow: bool,
    },
    /// Close this flow, unless it has taken something meanwhile. [`Repair::handle_closed`] follows when it is closed.
    Close(u32),
    /// Get this many flows more from the process. [`Repair::handle_extra_flows`] follows.
    WantFlows(usize),
    /// Write something to each flow that the peer answers.
    Ping,
    /// Segments of new flows have at most so many bytes, since flows deliver nothing.
    SegmentsLimited(u32),
    /// The connection cannot continue. [`Repair::handle_close`] follows.
    Failed(RepairFailure),
}

/// A flow that was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcceptedFlow {
    /// It is in place of another one.
    pub is_replacement: bool,
    /// There was none before.
    pub outage: Option<Outage>,
}

/// A time without flows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outage {
    /// How long it was.
    pub length: Duration,
    /// Why the last flow ended.
    pub cause: String,
}

/// Decides which flows of a sender are dead, which are opened in their places and when, and when the sender gives up. It has no
/// sockets, locks or clocks, and its methods return at once.
///
/// There are four kinds of methods:
/// * `handle_*` tell it what has happened. After each, [`Repair::poll_event`] is called until there is nothing.
/// * [`Repair::poll_event`] says what to do next.
/// * [`Repair::next_timeout`] says when [`Repair::handle_timeout`] is due, which checks all flows.
/// * The others are queries.
#[derive(Debug)]
pub struct Repair {
    settings: RepairSettings,
    flows: Vec<Flow>,
    dials: Dials,
    repath: Repath,
    /// Flows that the process has granted beyond those of the settings.
    extra_flows: usize,
    /// Since when there is no flow.
    no_flow_since: Option<Time>,
    /// Why the last flow ended.
    cause: String,
    /// Whether there was something to retransmit at the last look.
    had_retransmits: bool,
    /// Whether there was nothing to send at the last check.
    was_idle: bool,
    next_check: Option<Time>,
    /// When flows are pinged next, and the time since the ping before.
    next_ping: Option<(Time, Duration)>,
    /// Nothing is repaired any more.
    is_over: bool,
    events: VecDeque<RepairEvent>,
}

#[derive(Clone, Copy, Debug)]
struct Flow {
    number: u32,
    /// Bytes that the peer's host had acknowledged when it was opened: those of the handshake.
    acked_at_first: u64,
    /// Its keys are nearly used up.
    is_worn: bool,
    state: FlowState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FlowState {
    Open,
    /// It takes no more chunks.
    Retiring,
    /// It is being given up.
    Ending,
}

/// What happens to flows.
impl Repair {
    /// For a connection that begins with this number of flows, which are added by [`Repair::handle_flow`].
    pub fn new(settings: RepairSettings, flows: u32) -> Self {
        let at_first = NonZeroUsize::new(flows as usize).unwrap_or(NonZeroUsize::MIN);
        Self {
            settings,
            flows: Vec::new(),
            dials: Dials::new(flows, settings.addresses),
            repath: Repath::new(at_first),
            extra_flows: 0,
            no_flow_since: None,
            cause: String::new(),
            had_retransmits: false,
            was_idle: false,
            next_check: None,
            next_ping: None,
            is_over: false,
            events: VecDeque::new(),
        }
    }

    /// A flow of the beginning is there. The peer's host has acknowledged so many bytes of it.
    pub fn handle_flow(&mut self, number: u32, acked: u64) {
        let (acked_at_first, state) = (acked, FlowState::Open);
        self.flows.push(Flow { number, acked_at_first, is_worn: false, state });
    }

    /// The listener has accepted this flow, and the peer's host has acknowledged so many bytes of it. `None`: it is not wanted any
    /// more.
    pub fn handle_accepted(&mut self, now: Time, number: u32, acked: u64) -> Option<AcceptedFlow> {
        if self.is_over || !self.dials.accepted(number) {
            return None;
        }
        let missing = self.wanted_flows().saturating_sub(self.count_flows().0);
        let needed = match self.repath.is_trial_running() {
            true => self.dials.count(),
            false => missing.saturating_sub(1),
        };
        self.cancel_dials(needed);
        self.handle_flow(number, acked);
        let outage = self
            .no_flow_since
            .take()
            .map(|since| Outage { length: now.saturating_sub(since), cause: self.cause.clone() });
        Some(AcceptedFlow { is_replacement: missing > 0, outage })
    }

    /// This flow could not be opened, for the reason that `what` says.
    pub fn handle_dial_failed(&mut self, now: Time, number: u32, failure: DialFailure, what: &str) {
        let has_flows = self.count_flows().1 > 0;
        if !self.is_over && self.dials.failed(now, number, failure, has_flows) {
            let (cause, refusal) = (self.cause.clone(), what.to_owned());
            self.fail(RepairFailure::Refused { cause, refusal });
        }
    }

    /// This flow has failed, for the reason that `why` says, and the kernel says this of its path. What it may not have delivered is
    /// sent again by others. `must_retransmit`: none of them has taken that yet.
    pub fn handle_ended(
        &mut self,
        now: Time,
        number: u32,
        path: Option<&PathInfo>,
        why: &str,
        must_retransmit: bool,
    ) {
        let Some(flow) = self.remove(number).filter(|_| !self.is_over) else { return };
        self.next_check.get_or_insert(now + CHECK_INTERVAL);
        why.clone_into(&mut self.cause);
        if let Some(path) = path {
            self.limit_segments(now, &flow, path);
        }
        self.replace(now, must_retransmit);
    }

    /// This flow has delivered everything and is closed, or could not be added.
    pub fn handle_closed(&mut self, number: u32) {
        self.remove(number);
    }

    /// The process has granted this many flows of [`RepairEvent::WantFlows`].
    pub fn handle_extra_flows(&mut self, granted: usize) {
        self.extra_flows += granted;
        self.repath.keep(granted);
    }

    /// The connection is over. Nothing is asked for any more, and all dials are cancelled.
    pub fn handle_close(&mut self) {
        self.is_over = true;
        self.dials.keep(0);
        self.events.clear();
    }

    fn remove(&mut self, number: u32) -> Option<Flow> {
        let index = self.flows.iter().position(|flow| flow.number == number)?;
        Some(self.flows.remove(index))
    }

    /// A flow has failed: limits the segments of new ones where flows open and deliver nothing. Fails if that does not help.
    fn limit_segments(&mut self, now: Time, flow: &Flow, path: &PathInfo) {
        let has_delivered = path.acked > flow.acked_at_first + MAX_REPORTS;
        if !has_delivered && path.unanswered == 0 {
            return;
        }
        if let Some(bytes) = self.dials.flow_failed(now, flow.number, has_delivered) {
            self.events.push_back(RepairEvent::SegmentsLimited(bytes));
        }
        let since = self.dials.deliver_nothing_since();
        if since.is_some_and(|at| now.saturating_sub(at) >= self.settings.recovery_timeout) {
            self.fail(RepairFailure::NothingDelivered);
        }
    }

    /// Dials flows in place of dead ones. Fails if that takes too long.
    fn replace(&mut self, now: Time, must_retransmit: bool) {
        if self.is_over {
            return;
        }
        let (live, all) = self.count_flows();
        if all == 0 {
            let since = *self.no_flow_since.get_or_insert(now);
            let timeout = self.settings.recovery_timeout;
            if now.saturating_sub(since) >= timeout {
                let cause = self.cause.clone();
                return self.fail(RepairFailure::FlowsLost { cause, timeout });
            }
        }
        let dials = self.dials.count();
        let mut missing = self.wanted_flows().saturating_sub(live + dials);
        // Retransmissions that no flow can take need a new flow, and everything waits for them.
        if std::mem::replace(&mut self.had_retransmits, must_retransmit) && must_retransmit {
            let urgent = URGENT_DIALS.min(self.settings.max_flows.saturating_sub(all));
            missing = missing.max(urgent.saturating_sub(dials));
        }
        if self.dials.may_start(now) {
            self.dial(missing);
        }
    }

    fn dial(&mut self, count: usize) {
        for _ in 0..count {
            self.events.push_back(RepairEvent::Dial(self.dials.start()));
        }
    }

    /// Cancels all dials beyond this number.
    fn cancel_dials(&mut self, needed: usize) {
        self.events.extend(self.dials.keep(needed).into_iter().map(RepairEvent::CancelDial));
    }

    fn fail(&mut self, failure: RepairFailure) {
        self.handle_close();
        self.events.push_back(RepairEvent::Failed(failure));
    }
}

/// Checks.
impl Repair {
    /// It is this time, the connection and its flows are in this state.
    pub fn handle_timeout(&mut self, now: Time, situation: &Situation, reports: &[FlowReport]) {
        if self.is_over {
            return;
        }
        self.ping(now, situation.has_stopped);
        if self.is_idle(situation.is_busy) {
            self.next_check = None;
            return;
        }
        self.next_check = Some(now + CHECK_INTERVAL);
        self.retire_worn(reports);
        self.replace(now, situation.must_retransmit);
        if self.is_over {
            return;
        }
        if situation.is_busy {
            self.find_dead_paths(reports);
        }
        if self.settings.tries_paths {
            let is_limited = situation.is_busy && situation.is_limited_by_paths;
            self.find_better_paths(now, is_limited, reports);
        }
        let is_drained = |flow: &&Flow| {
            let report = reports.iter().find(|report| report.number == flow.number);
            flow.state == FlowState::Retiring && report.is_some_and(|report| report.is_drained)
        };
        let drained = self.flows.iter().filter(is_drained);
        self.events.extend(drained.map(|flow| RepairEvent::Close(flow.number)));
    }

    /// When [`Repair::handle_timeout`] is due.
    pub fn next_timeout(&self) -> Option<Time> {
        self.next_check.filter(|_| !self.is_over)
    }

    /// The next thing to do.
    pub fn poll_event(&mut self) -> Option<RepairEvent> {
        self.events.pop_front()
    }

    /// Pings the flows of a connection on which nothing moves, less and less often: the peer may not have posted a buffer yet.
    /// Somebody who drops a record and answers for TCP is found by the record behind it, in both directions.
    fn ping(&mut self, now: Time, has_stopped: bool) {
        if !self.settings.pings {
            return;
        }
        if !has_stopped {
            self.next_ping = None;
            return;
        }
        let (at, wait) = *self.next_ping.get_or_insert((now + MIN_PING_TIME, MIN_PING_TIME));
        if now >= at {
            let wait = (2 * wait).min(MAX_PING_TIME);
            self.next_ping = Some((now + wait, wait));
            self.events.push_back(RepairEvent::Ping);
        }
    }

    /// Whether there is nothing to send, now and at the last check, and nothing to repair. Most connections are idle most of the
    /// time and must not cost anything then.
    fn is_idle(&mut self, is_busy: bool) -> bool {
        let was_idle = std::mem::replace(&mut self.was_idle, !is_busy);
        let (live, all) = self.count_flows();
        let is_whole = live == all && live >= self.wanted_flows() && self.dials.count() == 0;
        was_idle && !is_busy && is_whole
    }

    /// Flows whose keys are nearly used up count as missing, and take no more chunks once others have come in their place.
    fn retire_worn(&mut self, reports: &[FlowReport]) {
        for report in reports.iter().filter(|report| report.is_worn) {
            if let Some(flow) = self.flows.iter_mut().find(|flow| flow.number == report.number) {
                flow.is_worn = true;
            }
        }
        let open = self.flows.iter().filter(|flow| flow.state == FlowState::Open);
        let surplus = open.clone().count().saturating_sub(self.wanted_flows());
        let worn: Vec<_> = open.filter(|flow| flow.is_worn).map(|flow| flow.number).collect();
        worn.into_iter().take(surplus).for_each(|number| self.retire(number, false));
    }

    fn retire(&mut self, number: u32, is_slow: bool) {
        let is_this = |flow: &&mut Flow| flow.number == number && flow.state == FlowState::Open;
        if let Some(flow) = self.flows.iter_mut().find(is_this) {
            flow.state = FlowState::Retiring;
            self.events.push_back(RepairEvent::Retire { number, is_slow });
        }
    }

    /// Gives up flows that have stalled.
    fn find_dead_paths(&mut self, reports: &[FlowReport]) {
        let is_answered = |report: &FlowReport| report.path.unanswered == 0;
        // Others may have nothing to send any more, since a message waits for all its chunks.
        let is_any_answered = reports.iter().any(is_answered);
        for report in reports.iter().filter(|report| !report.is_drained && !is_answered(report)) {
            let PathInfo { unanswered, silent, .. } = report.path;
            let death = if unanswered >= 3 && silent >= self.settings.peer_timeout {
                FlowDeath::Silent { time: silent }
            } else if is_any_answered && is_stalled(&report.path) {
                FlowDeath::Stalled
            } else {
                continue;
            };
            if let Some(flow) = self.flows.iter_mut().find(|flow| flow.number == report.number) {
                flow.state = FlowState::Ending;
                self.events.push_back(RepairEvent::End(report.number, death));
            }
        }
    }

    /// Dials flows on other paths that may be faster, and retires slow ones.
    fn find_better_paths(&mut self, now: Time, is_limited: bool, reports: &[FlowReport]) {
        if !is_limited {
            self.repath.tick(now, false, &[]);
            return;
        }
        let open = self.flows.iter().filter(|flow| flow.state == FlowState::Open);
        let report = |flow: &Flow| reports.iter().find(|report| report.number == flow.number);
        let carried: Vec<_> = open
            .filter_map(report)
            .map(|report| FlowStats {
                flow: report.number,
                bytes: report.bytes,
                busy: report.path.busy,
            })
            .collect();
        // The new flows of a trial are compared without those on dead paths.
        let some_have_come = self.repath.is_trial_running() && carried.len() > self.wanted_flows();
        if self.dials.count() > 0 && !some_have_come {
            return;
        }
        match self.repath.tick(now, true, &carried) {
            RepathAction::Nothing => {}
            RepathAction::Open(count) => {
                let room = self.settings.max_flows.saturating_sub(self.flows.len());
                self.dial(count.min(room));
            }
            RepathAction::Keep(more) => self.events.push_back(RepairEvent::WantFlows(more)),
            RepathAction::Close(numbers) => {
                self.cancel_dials(0);
                for number in numbers {
                    self.retire(number, self.repath.predates_trial(number));
                }
            }
        }
    }
}

/// Queries.
impl Repair {
    /// Whether this flow is being dialed, and is still wanted.
    pub fn is_dialing(&self, number: u32) -> bool {
        self.dials.contains(number)
    }

    /// Number of times in a row that all dials failed.
    pub fn dial_failures(&self) -> u32 {
        self.dials.failures()
    }

    /// Number of flows that the connection should have.
    fn wanted_flows(&self) -> usize {
        self.settings.flows + self.extra_flows
    }

    /// Number of flows that need no replacement, and of all flows with those that retire.
    fn count_flows(&self) -> (usize, usize) {
        let all = self.flows.iter().filter(|flow| flow.state != FlowState::Ending);
        let lasts = |flow: &&Flow| flow.state == FlowState::Open && !flow.is_worn;
        (all.clone().filter(lasts).count(), all.count())
    }
}

/// Whether a flow has a dead path, given that others are answered.
fn is_stalled(path: &PathInfo) -> bool {
    let timeout = MIN_STALL_TIME.max(2 * path.usual_round_trip);
    path.unanswered >= MAX_UNANSWERED || path.unanswered > 0 && path.asked >= timeout
}

#[cfg(test)]
mod tests;
