//! Repairs a sender's flows: dials, closes and checks them as [`evenkeel_protocol::Repair`] decides.

use std::sync::Arc;
use std::time::{Duration, Instant};

use evenkeel_protocol::{
    AcceptedFlow, DialFailure, FlowDeath, FlowDial, FlowReport, Outage, Pacer, Repair, RepairEvent,
    RepairSettings, Situation,
};

use crate::error::ErrorKind;
use crate::handshake::dial::{Destination, Dial, DialError, DialHandler};
use crate::runtime::descriptors;
use crate::runtime::extra_flows::ExtraFlowsLease;
use crate::stream::{SendHalf, Stream};
use crate::sync::lock;
use crate::sys;
use crate::tcp::MAX_FLOW_SLOTS;
use crate::tcp::send_flow::SendFlow;
use crate::tcp::sender::TcpSender;

/// What a sender keeps about the repair of its flows. Locked for no system call, and no other lock is taken meanwhile.
pub(crate) struct RepairState {
    pub(super) engine: Repair,
    /// Those that the engine waits for.
    dials: Vec<Arc<Dial>>,
    /// Flows that the connection has beyond those that are set.
    extra_flows: ExtraFlowsLease,
}

impl RepairState {
    /// For a connection that starts with this number of flows.
    pub(super) fn new(destination: &Destination, flows: u32) -> Self {
        let settings = &destination.context.settings;
        let settings = RepairSettings {
            flows: settings.flows.into(),
            max_flows: MAX_FLOW_SLOTS,
            addresses: destination.handle.addresses.len(),
            peer_timeout: settings.peer_timeout,
            recovery_timeout: settings.recovery_timeout,
            tries_paths: settings.repath != Some(false) && !settings.is_static(),
            pings: settings.encryption.is_some(),
        };
        let extra_flows = destination.workers.extra_flows.lease();
        Self { engine: Repair::new(settings, flows), dials: Vec::new(), extra_flows }
    }

    fn take_dial(&mut self, flow: u32) -> Option<Arc<Dial>> {
        let index = self.dials.iter().position(|dial| dial.flow() == flow)?;
        Some(self.dials.swap_remove(index))
    }
}

impl TcpSender {
    /// Tells the engine something, and then does without the lock what follows from that.
    fn repair_step<T>(self: &Arc<Self>, step: impl FnOnce(&mut RepairState, Duration) -> T) -> T {
        let now = self.epoch.elapsed();
        let mut repair = lock(&self.repair);
        let outcome = step(&mut repair, now);
        let has_timeout = repair.engine.next_timeout().is_some();
        let mut event = repair.engine.poll_event();
        drop(repair);
        if has_timeout {
            self.clock.request_tick();
        }
        while let Some(next) = event {
            self.run_repair(next);
            event = lock(&self.repair).engine.poll_event();
        }
        outcome
    }

    /// Does what the engine asks for. A flow that is not there any more has ended by itself.
    fn run_repair(self: &Arc<Self>, event: RepairEvent) {
        match event {
            RepairEvent::Dial(dial) => self.dial(dial),
            RepairEvent::CancelDial(flow) => {
                let dial = lock(&self.repair).take_dial(flow);
                if let Some(dial) = dial {
                    dial.take_stream();
                }
            }
            RepairEvent::End(flow, death) => {
                if let Some(flow) = self.flow(flow) {
                    self.base.counters.stalled.add((death == FlowDeath::Stalled).into());
                    self.flow_failed(&flow, &death.to_string());
                }
            }
            RepairEvent::Retire { number, is_slow } => {
                self.base.counters.repathed.add(is_slow.into());
                if let Some(flow) = self.flow(number) {
                    self.begin_to_retire(&flow);
                }
            }
            RepairEvent::Close(flow) => {
                if self.flow(flow).is_some_and(|flow| self.retire(&flow)) {
                    self.repair_step(|repair, _| repair.engine.handle_closed(flow));
                }
            }
            RepairEvent::WantFlows(count) => {
                let granted = self.repair_step(|repair, _| {
                    let granted = repair.extra_flows.take(count);
                    repair.engine.handle_extra_flows(granted);
                    granted
                });
                self.grow(granted);
            }
            RepairEvent::Ping => self.flows().iter().for_each(|flow| flow.ping()),
            RepairEvent::SegmentsLimited(bytes) => self.base.warn(&format!(
                "flows open and deliver nothing, as where only small packets pass: segments of new \
                 flows have at most {bytes} bytes now. Is the MTU the same on the whole path?"
            )),
            RepairEvent::Failed(failure) => self.fail(ErrorKind::Remote, &failure.to_string()),
        }
    }

    fn dial(self: &Arc<Self>, dial: FlowDial) {
        let FlowDial { number, binds, segment_limit, timeout } = dial;
        let (handler, deadline) = (Arc::<Self>::clone(self), Instant::now() + timeout);
        let destination = &self.destination;
        match Dial::start(destination, handler, number, binds, segment_limit, deadline) {
            Ok(dial) => {
                let mut repair = lock(&self.repair);
                if repair.engine.is_dialing(number) {
                    repair.dials.push(dial);
                } else {
                    // It has an outcome already, or was cancelled.
                    drop(repair);
                    dial.take_stream();
                }
            }
            Err(error) => {
                descriptors::report_shortage(&error, &*self.base.context.log);
                let (failure, what) = (DialFailure::NotStarted, error.to_string());
                self.repair_step(|repair, now| {
                    repair.engine.handle_dial_failed(now, number, failure, &what);
                });
            }
        }
    }

    /// A flow has failed and is removed.
    pub(super) fn on_flow_lost(self: &Arc<Self>, flow: &SendFlow, why: &str) {
        let path = sys::path_info(&flow.socket).ok();
        let repeats = lock(&self.queue).scheduler.must_retransmit();
        self.repair_step(|repair, now| {
            repair.engine.handle_ended(now, flow.number, path.as_ref(), why, repeats);
        });
    }

    /// Checks all flows. Returns whether to check them again at the next tick.
    pub(super) fn check_flows(
        self: &Arc<Self>,
        situation: &Situation,
        reports: &[FlowReport],
    ) -> bool {
        self.repair_step(|repair, now| {
            repair.engine.handle_timeout(now, situation, reports);
            repair.engine.next_timeout().is_some()
        })
    }

    /// How the flows are. Asks the kernel only while there is something to send.
    pub(super) fn report_flows(&self, is_busy: bool) -> Vec<FlowReport> {
        let flows: Vec<_> = {
            let mut queue = lock(&self.queue);
            let queue = &mut *queue;
            let flows = queue.flows.iter().flatten();
            flows.map(|flow| (Arc::clone(flow), queue.scheduler.is_drained(flow.slot))).collect()
        };
        let has_keys = self.base.context.settings.encryption.is_some();
        let is_worn =
            |half: &mut SendHalf| half.key_use().is_some_and(|used| used.is_nearly_used_up());
        let report = |(flow, is_drained): (Arc<SendFlow>, bool)| FlowReport {
            number: flow.number,
            is_drained,
            is_worn: has_keys && is_worn(&mut flow.writer.lock().half),
            bytes: flow.counters.bytes(),
            path: is_busy.then(|| sys::path_info(&flow.socket).ok()).flatten().unwrap_or_default(),
        };
        flows.into_iter().map(report).collect()
    }

    /// Repairs nothing any more.
    pub(super) fn stop_repair(&self) {
        let dials = {
            let mut repair = lock(&self.repair);
            repair.engine.handle_close();
            std::mem::take(&mut repair.dials)
        };
        for dial in dials {
            dial.take_stream();
        }
    }

    /// A flow takes no more chunks.
    fn begin_to_retire(&self, flow: &SendFlow) {
        let waiting = lock(&self.queue).choose(|choice, carried| choice.retire(flow.slot, carried));
        waiting.iter().for_each(|flow| flow.wake_worker());
    }

    /// Closes a flow that has nothing to deliver any more. Returns whether that is so.
    fn retire(&self, flow: &SendFlow) -> bool {
        let waiting = {
            let mut writer = flow.writer.lock();
            let mut queue = lock(&self.queue);
            let is_written = writer.codec.is_empty() && writer.half.is_flushed();
            if writer.closed || !is_written || !queue.scheduler.is_drained(flow.slot) {
                // Another thread may have wanted to write meanwhile.
                flow.wake_worker();
                return false;
            }
            writer.closed = true;
            queue.scheduler.flow_closed(flow.slot);
            queue.remove(flow)
        };
        waiting.iter().for_each(|flow| flow.wake_worker());
        flow.end();
        true
    }
}

impl DialHandler for TcpSender {
    fn on_welcome(self: Arc<Self>, flow: u32, stream: Stream) {
        let acked = sys::path_info(&stream.socket).map_or(0, |info| info.acked);
        let accepted = self.repair_step(|repair, now| {
            repair.take_dial(flow);
            repair.engine.handle_accepted(now, flow, acked)
        });
        let Some(AcceptedFlow { is_replacement, outage }) = accepted else { return };
        if let Err(error) = self.add_flow(flow, stream, Pacer::slow_start()) {
            match self.flow(flow) {
                Some(flow) => self.flow_failed(&flow, &error.to_string()),
                None => self.repair_step(|repair, _| repair.engine.handle_closed(flow)),
            }
            return;
        }
        self.base.counters.replaced.add(is_replacement.into());
        if let Some(Outage { length, cause }) = outage {
            self.base.counters.recovered.add(1);
            let gap = length.as_millis();
            self.base.info(&format!("recovered after {gap} ms without a flow ({cause})"));
        }
    }

    fn on_dial_error(self: Arc<Self>, flow: u32, error: DialError) {
        let failure = match error {
            DialError { is_refused: true, .. } => DialFailure::Refused,
            DialError { is_final: true, .. } => DialFailure::Final,
            DialError { .. } => DialFailure::Unanswered,
        };
        self.repair_step(|repair, now| {
            repair.take_dial(flow);
            repair.engine.handle_dial_failed(now, flow, failure, &error.what);
        });
    }
}
