//! Repairs a sender's flows: replaces dead ones, and moves slow ones to another path.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use evenkeel_protocol::{Pacer, RepathAction};

use crate::error::ErrorKind;
use crate::handshake::dial::{Dial, DialError, DialHandler};
use crate::runtime::descriptors;
use crate::stream::{SendHalf, Stream};
use crate::sync::lock;
use crate::sys::{self, PathInfo};
use crate::tcp::MAX_FLOW_SLOTS;
use crate::tcp::repair_state::RepairState;
use crate::tcp::send_flow::{SendFlow, SendFlowOwner};
use crate::tcp::sender::TcpSender;

/// How long a dial waits for the listener's answer before another path is tried. The n-th time in a row it is n times as
/// long, up to the limit.
const DIAL_TIMEOUT: Duration = Duration::from_millis(400);
const MAX_DIAL_TIMEOUT: Duration = Duration::from_secs(5);
/// Number of parallel dials while chunks wait for a new flow: some may get dead paths, too.
const URGENT_DIALS: usize = 6;
/// Of this many dials in a row, one leaves the interface to the route. Where several are in the peer's subnet, the answers may
/// come by another interface than before.
const DIALS_BY_ROUTE: u32 = 4;
/// Number of unanswered probes after which a path is dead, if another flow is answered. The kernel sends the first after
/// 0.02 s, the next after 0.06 and 0.14 s. Before Linux 6.15 it sends them after 0.2, 0.6 and 1.4 s.
const MAX_UNANSWERED: u8 = 3;
/// Bytes of frames without payload that a flow begins with, at most: its reports of dead flows pass where long packets do not.
const MAX_REPORTS: u64 = 4 << 10;
/// A path is also dead after this time, and twice the usual round trip, without an answer to the first probe.
const MIN_STALL_TIME: Duration = Duration::from_millis(100);

impl TcpSender {
    /// A flow has failed and is removed.
    pub(crate) fn on_flow_lost(self: &Arc<Self>, why: &str) {
        why.clone_into(&mut lock(&self.repair).cause);
        self.replace(Instant::now());
    }

    /// A flow has failed: limits the segments of new ones where flows open and deliver nothing. Fails the connection if that
    /// does not help within the recovery timeout.
    pub(crate) fn limit_segments(&self, flow: &SendFlow<Self>) {
        let Ok(info) = sys::path_info(&flow.socket) else { return };
        let has_delivered = info.acked > flow.acked_at_first + MAX_REPORTS;
        if !has_delivered && info.unanswered == 0 {
            return;
        }
        let now = self.epoch().elapsed();
        let (limit, fails_since) = {
            let mut repair = lock(&self.repair);
            let next = repair.next_number;
            let is_new = repair.segments.flow_failed(now, flow.number, next, has_delivered);
            let limit = repair.segments.bytes().filter(|_| is_new);
            (limit, repair.segments.fails_since())
        };
        if let Some(bytes) = limit {
            self.base.warn(&format!(
                "flows open and deliver nothing, as where only small packets pass: segments of new \
                 flows have at most {bytes} bytes now. Is the MTU the same on the whole path?"
            ));
        }
        let timeout = self.base.context.settings.recovery_timeout;
        if fails_since.is_some_and(|since| now.saturating_sub(since) >= timeout) {
            let what = "flows open and deliver nothing, also with short segments: is the MTU the same \
                        on the whole path, and does a firewall pass data?";
            self.fail(ErrorKind::Remote, what);
        }
    }

    /// Checks all flows, at each tick. Returns whether there is something to check at the next tick.
    pub(crate) fn repair_flows(self: &Arc<Self>, now: Instant, busy: bool) -> bool {
        if self.is_over() || self.is_idle(busy) {
            return false;
        }
        self.renew_keys();
        self.replace(now);
        if busy {
            self.find_dead_paths();
        }
        self.find_better_paths(now, busy);
        true
    }

    /// Whether there is nothing to send, now and at the last tick, and nothing to repair. Most connections are idle most of
    /// the time and must not cost anything then.
    fn is_idle(&self, busy: bool) -> bool {
        let (live, all) = self.count_flows();
        let mut repair = lock(&self.repair);
        let was_idle = std::mem::replace(&mut repair.was_idle, !busy);
        let whole = live == all && live == self.wanted_flows(&repair);
        was_idle && !busy && whole && repair.dials.is_empty()
    }

    /// Flows whose keys are nearly used up count as missing, and take no more chunks once others have come in their place.
    fn renew_keys(&self) {
        if self.base.context.settings.encryption.is_none() {
            return;
        }
        let mut flows = self.flows();
        flows.retain(|flow| !flow.retiring.load(Ordering::Relaxed));
        for flow in &flows {
            let is_worn =
                |half: &mut SendHalf| half.key_use().is_some_and(|used| used.is_nearly_used_up());
            if !flow.worn.load(Ordering::Relaxed) && is_worn(&mut flow.writer.lock().half) {
                flow.worn.store(true, Ordering::Relaxed);
            }
        }
        let surplus = flows.len().saturating_sub(self.wanted_flows(&lock(&self.repair)));
        let worn = flows.iter().filter(|flow| flow.worn.load(Ordering::Relaxed));
        worn.take(surplus).for_each(|flow| self.begin_to_retire(flow));
    }

    /// Opens flows in place of dead ones. Fails the connection if that takes too long.
    fn replace(self: &Arc<Self>, now: Instant) {
        if self.is_over() {
            return;
        }
        let settings = &self.base.context.settings;
        let (live, all) = self.count_flows();
        let repeats = lock(&self.queue).scheduler.must_retransmit();
        let mut repair = lock(&self.repair);
        if all == 0 {
            let since = *repair.no_flow_since.get_or_insert(now);
            let limit = settings.recovery_timeout;
            if now.saturating_duration_since(since) >= limit {
                let what = format!(
                    "all flows are lost ({}) and none could be opened within {} s",
                    repair.cause,
                    limit.as_secs()
                );
                drop(repair);
                self.fail(ErrorKind::Remote, &what);
                return;
            }
        }
        let wanted = self.wanted_flows(&repair);
        let mut missing = wanted.saturating_sub(live + repair.dials.len());
        // Retransmissions that no flow can take need a new flow, and everything waits for them.
        if std::mem::replace(&mut repair.had_retransmits, repeats) && repeats {
            let urgent = URGENT_DIALS.min(MAX_FLOW_SLOTS.saturating_sub(all));
            missing = missing.max(urgent.saturating_sub(repair.dials.len()));
        }
        if missing > 0 && repair.not_before.is_none_or(|time| now >= time) {
            self.dial(&mut repair, missing, now);
        }
    }

    /// Number of flows that the connection should have.
    fn wanted_flows(&self, repair: &RepairState) -> usize {
        usize::from(self.base.context.settings.flows) + repair.extra_flows.flows()
    }

    /// Number of flows that need no replacement, and of all flows with those that drain.
    fn count_flows(&self) -> (usize, usize) {
        let queue = lock(&self.queue);
        let all = queue.flows.iter().flatten();
        let lasts = |flow: &&Arc<SendFlow<Self>>| {
            !flow.retiring.load(Ordering::Relaxed) && !flow.worn.load(Ordering::Relaxed)
        };
        (all.clone().filter(lasts).count(), all.count())
    }

    fn dial(self: &Arc<Self>, repair: &mut RepairState, count: usize, now: Instant) {
        for _ in 0..count {
            let timeout = (DIAL_TIMEOUT * (1 + repair.failures)).min(MAX_DIAL_TIMEOUT);
            let flow = repair.next_number;
            repair.next_number += 1;
            let handler = Arc::<Self>::clone(self);
            let binds = !(repair.failures + 1).is_multiple_of(DIALS_BY_ROUTE);
            let limit = repair.segments.bytes();
            match Dial::start(&self.destination, handler, flow, binds, limit, now + timeout) {
                Ok(dial) => repair.dials.push(dial),
                // Out of descriptors or ports, or no route: that may pass.
                Err(error) => {
                    descriptors::report_shortage(&error, &*self.base.context.log);
                    repair.back_off(now);
                }
            }
        }
    }

    /// Cancels all dials.
    pub(crate) fn stop_repair(&self) {
        let dials = std::mem::take(&mut lock(&self.repair).dials);
        for dial in dials {
            dial.take_stream();
        }
    }

    /// Closes flows that have stalled.
    fn find_dead_paths(self: &Arc<Self>) {
        let flows = self.flows();
        let clear: Vec<bool> = {
            let mut queue = lock(&self.queue);
            flows.iter().map(|flow| queue.scheduler.is_drained(flow.slot)).collect()
        };
        if clear.iter().all(|clear| *clear) {
            return;
        }
        let timeout = self.base.context.settings.peer_timeout;
        let info = |flow: &SendFlow<Self>| sys::path_info(&flow.socket).unwrap_or_default();
        let (idle, busy): (Vec<_>, Vec<_>) = flows.iter().zip(clear).partition(|(_, clear)| *clear);
        let busy: Vec<_> = busy.into_iter().map(|(flow, _)| (flow, info(flow))).collect();
        if busy.iter().all(|(_, info)| info.unanswered == 0) {
            return;
        }
        // Others may have nothing to send any more, since a message waits for all its chunks.
        let answered = busy.iter().any(|(_, info)| info.unanswered == 0)
            || idle.iter().any(|(flow, _)| info(flow).unanswered == 0);
        for (flow, info) in &busy {
            let silent = info.silent;
            if info.unanswered >= 3 && silent >= timeout {
                let what = format!("the peer's host has not answered for {} s", silent.as_secs());
                self.flow_failed(flow, &what);
            } else if is_stalled(info) && answered {
                self.base.counters.stalled.add(1);
                self.flow_failed(flow, "it stalled while others moved");
            }
        }
    }

    /// Opens flows on other paths that may be faster, and closes slow ones.
    fn find_better_paths(self: &Arc<Self>, now: Instant, busy: bool) {
        let flows = self.flows();
        for flow in flows.iter().filter(|flow| flow.retiring.load(Ordering::Relaxed)) {
            self.retire(flow);
        }
        let settings = &self.base.context.settings;
        if settings.repath == Some(false) || settings.is_static() {
            return;
        }
        let limited = busy && self.flow_count.is_limited_by_paths();
        if !limited {
            lock(&self.repair).repath.tick(now - self.epoch(), false, &[]);
            return;
        }
        let live: Vec<_> =
            flows.iter().filter(|flow| !flow.retiring.load(Ordering::Relaxed)).collect();
        let carried: Vec<_> = live.iter().map(|flow| flow.carried()).collect();
        let mut repair = lock(&self.repair);
        // The new flows of a trial are compared without those on dead paths.
        let some_have_come =
            repair.repath.is_trial_running() && live.len() > self.wanted_flows(&repair);
        if !repair.dials.is_empty() && !some_have_come {
            return;
        }
        match repair.repath.tick(now - self.epoch(), true, &carried) {
            RepathAction::Nothing => {}
            RepathAction::Open(count) => {
                let count = count.min(MAX_FLOW_SLOTS.saturating_sub(flows.len()));
                self.dial(&mut repair, count, now);
            }
            RepathAction::Keep(more) => {
                let granted = repair.extra_flows.take(more);
                repair.repath.keep(granted);
                drop(repair);
                self.grow(granted);
            }
            RepathAction::Close(numbers) => {
                let old =
                    numbers.iter().filter(|number| repair.repath.predates_trial(**number)).count();
                let unanswered = std::mem::take(&mut repair.dials);
                drop(repair);
                for dial in unanswered {
                    dial.take_stream();
                }
                self.base.counters.repathed.add(old as u64);
                for flow in live.iter().filter(|flow| numbers.contains(&flow.number)) {
                    self.begin_to_retire(flow);
                    self.retire(flow);
                }
            }
        }
    }
}

/// Whether a flow has a dead path, given that others are answered.
fn is_stalled(info: &PathInfo) -> bool {
    let timeout = MIN_STALL_TIME.max(2 * info.usual_round_trip);
    info.unanswered >= MAX_UNANSWERED || info.unanswered > 0 && info.asked >= timeout
}

impl DialHandler for TcpSender {
    fn on_welcome(self: Arc<Self>, flow: u32, stream: Stream) {
        let (live, _) = self.count_flows();
        let (in_place_of_another, outage, surplus) = {
            let mut repair = lock(&self.repair);
            let missing = self.wanted_flows(&repair).saturating_sub(live);
            repair.dials.retain(|dial| dial.flow() != flow);
            (repair.failures, repair.not_before) = (0, None);
            repair.refusals.clear();
            let needed = match repair.repath.is_trial_running() {
                true => repair.dials.len(),
                false => missing.saturating_sub(1).min(repair.dials.len()),
            };
            (missing > 0, repair.no_flow_since.take(), repair.dials.split_off(needed))
        };
        for dial in surplus {
            dial.take_stream();
        }
        if self.add_flow(flow, stream, Pacer::slow_start()).is_err() {
            return;
        }
        self.base.counters.replaced.add(in_place_of_another.into());
        if let Some(since) = outage {
            self.base.counters.recovered.add(1);
            let cause = lock(&self.repair).cause.clone();
            let gap = since.elapsed().as_millis();
            self.base.info(&format!("recovered after {gap} ms without a flow ({cause})"));
        }
    }

    fn on_dial_error(self: Arc<Self>, flow: u32, error: DialError) {
        let (_, all) = self.count_flows();
        let now = Instant::now();
        let (cause, is_final) = {
            let mut repair = lock(&self.repair);
            repair.dials.retain(|dial| dial.flow() != flow);
            if repair.dials.is_empty() {
                repair.back_off(now);
            }
            let is_final = match (all, error.is_refused) {
                (0, true) => {
                    let addresses = self.destination.handle.addresses.len().max(1);
                    let address = flow as usize % addresses;
                    repair.refusals.refused(now - self.epoch(), address, addresses)
                }
                (0, false) => error.is_final,
                // The peer's process is there.
                _ => {
                    repair.refusals.clear();
                    false
                }
            };
            (repair.cause.clone(), is_final)
        };
        if is_final {
            let what = format!(
                "all flows are lost ({cause}) and no other could be opened: {}",
                error.what
            );
            self.fail(ErrorKind::Remote, &what);
        }
    }
}
