//! Opens the sending side of a connection.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use evenkeel_protocol::{ConnectionId, Handle};

use crate::connection::send::{Outbound, SendConnection};
use crate::context::Context;
use crate::error::{ConnectError, Error, ErrorKind, Retry};
use crate::handshake::dial::{Destination, Dial, DialError, DialHandler, Way};
use crate::rdma;
use crate::runtime::descriptors;
use crate::runtime::reactor::{Readiness, Registration, Runtime, Source};
use crate::settings::TransportMode;
use crate::stream::Stream;
use crate::sync::lock;
use crate::sys;
use crate::tcp::sender::TcpSender;

/// Delay before a flow is dialed again. It grows with the time that the attempt has taken, up to
/// the limit.
const MIN_RETRY_DELAY: Duration = Duration::from_millis(100);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(2);

/// Maximum number of paths that a process warns of.
const MAX_WARNED: usize = 64;

/// An attempt to connect to a listener. Dropping it cancels it.
pub struct Connecting {
    attempt: Arc<Attempt>,
}

struct Attempt {
    destination: Arc<Destination>,
    deadline: Instant,
    /// Whether the caller retries. Then a failure is returned by the poll at once, and is not
    /// logged.
    caller_retries: bool,
    /// Watched once a flow has failed, to dial it again.
    retry_clock: Registration,
    /// For [`Connecting::cancel_when_abandoned`].
    clock: Registration,
    state: Mutex<AttemptState>,
}

struct AttemptState {
    dials: Vec<Arc<Dial>>,
    accepted: Vec<Option<Stream>>,
    /// Flows that failed.
    retries: Vec<Redial>,
    /// Paths that lead to another host or to none, by the number of the first flow that would take
    /// each, and why. The flows of such a path take another one, as long as there is one.
    astray: BTreeMap<u32, String>,
    /// Why a flow failed last.
    cause: Option<String>,
    /// Whether RDMA is to carry the messages, as far as this side knows.
    use_rdma: bool,
    /// The path of the first control connection, and the number of them so far. Each takes another
    /// pair of ports, if there are several.
    control_path: (u32, u32),
    /// The RDMA connection whose queue pairs are not agreed on yet.
    agreeing: Option<Arc<rdma::Sender>>,
    /// The outcome, until it is polled.
    outcome: Option<Outcome>,
    /// Succeeded, failed or cancelled.
    over: bool,
    /// When it was last polled.
    polled: Instant,
    /// `None` once it is polled to its end, or cancelled.
    runtime: Option<Arc<Runtime>>,
}

/// A flow that is to be dialed again.
#[derive(Clone, Copy)]
struct Redial {
    flow: u32,
    /// Whether by its own interface, as in [`Dial::start`].
    binds: bool,
    at: Instant,
}

type Outcome = Result<Arc<dyn Outbound>, ConnectError>;

impl Connecting {
    pub(crate) fn start(
        runtime: Arc<Runtime>,
        context: Context,
        handle: &Handle,
        caller_retries: bool,
    ) -> Result<Self, Error> {
        let (_, peer) = context.device.path(0, handle);
        let what = format!("cannot connect to {peer} from {}", context.device.name());
        let connection = ConnectionId(sys::random().map_err(|error| Error::system(&what, &error))?);
        let flows = context.settings.flows;
        let use_rdma = context.settings.transport_mode != TransportMode::Tcp
            && !context.device.ports().is_empty();
        let first_up = context.device.ports().iter().position(|port| !port.is_down());
        let mut first = first_up.unwrap_or(0) as u32;
        if caller_retries && context.device.ports().len() > 1 {
            // Each try of the caller is another connection: by chance they take different paths.
            first = u32::from(connection.0[0]);
        }
        let deadline = Instant::now() + context.settings.connect_timeout;
        let workers = Arc::clone(runtime.workers());
        let (clock, retry_clock) = (workers.registration(), workers.registration());
        let destination =
            Destination { context, workers, handle: handle.clone(), peer, connection };
        let attempt = Arc::new(Attempt {
            destination: Arc::new(destination),
            deadline,
            caller_retries,
            retry_clock,
            clock,
            state: Mutex::new(AttemptState {
                dials: Vec::new(),
                accepted: (0..flows).map(|_| None).collect(),
                retries: Vec::new(),
                astray: BTreeMap::new(),
                cause: None,
                use_rdma,
                control_path: (first, 0),
                agreeing: None,
                outcome: None,
                over: false,
                polled: Instant::now(),
                runtime: Some(runtime),
            }),
        });
        // From here on, dropping it on an error cancels what has started.
        let connecting = Self { attempt };
        {
            // The lock delays outcomes until all dials are noted.
            let mut state = lock(&connecting.attempt.state);
            connecting.attempt.dial(&mut state).map_err(|error| {
                let why = connecting.attempt.explain(error);
                Error::new(ErrorKind::System, format!("{what}: {why}"))
            })?;
        }
        Ok(connecting)
    }

    /// The connection once all its flows are accepted; `None` before. Never blocks. Must not be
    /// called again after it returned a connection or an error.
    ///
    /// # Errors
    /// [`ErrorKind::Remote`] when nobody listens there, when the listener refuses
    /// ([`ConnectError::retry`]), or when not all flows are accepted within the connect timeout.
    pub fn poll(&self) -> Result<Option<SendConnection>, ConnectError> {
        let (sender, runtime) = {
            let mut state = lock(&self.attempt.state);
            state.polled = Instant::now();
            match state.outcome.take() {
                Some(outcome) => (outcome?, state.runtime.take()),
                None if state.runtime.is_some() => return Ok(None),
                None => return Err(self.attempt.abandoned_error()),
            }
        };
        self.attempt.clock.end_ticks();
        let runtime = runtime.ok_or_else(|| self.attempt.abandoned_error())?;
        Ok(Some(SendConnection::new(sender, runtime)))
    }

    /// Whether the listener's host has accepted a TCP connection, although the handshake may not
    /// have ended.
    pub fn is_connected(&self) -> bool {
        let state = lock(&self.attempt.state);
        state.agreeing.is_some()
            || state.accepted.iter().any(Option::is_some)
            || state.dials.iter().any(|dial| dial.is_connected())
            || matches!(state.outcome, Some(Ok(_)))
    }

    /// Makes the attempt cancel itself once it was not polled for the connect timeout, for callers
    /// that may forget it. Its sockets, and what only it keeps running, do not wait for the drop
    /// then.
    pub fn cancel_when_abandoned(&self) {
        self.attempt.clock.watch_ticks(Arc::<Attempt>::clone(&self.attempt));
        self.attempt.clock.request_tick();
    }

    /// Whether it holds nothing any more: it has cancelled itself, or has returned its connection.
    pub fn is_abandoned(&self) -> bool {
        lock(&self.attempt.state).runtime.is_none()
    }
}

impl Drop for Connecting {
    fn drop(&mut self) {
        self.attempt.cancel();
    }
}

impl Source for Attempt {
    fn ready(&self, _readiness: Readiness) {}

    fn tick(&self, now: Instant) -> bool {
        let polled = lock(&self.state).polled;
        let is_abandoned = now.saturating_duration_since(polled) >= self.poll_timeout();
        if is_abandoned {
            self.cancel();
        }
        !is_abandoned
    }

    fn abandoned(&self, _why: &str) {
        // The dials report it.
    }
}

impl Attempt {
    /// Starts to open the control connection, or all flows.
    fn dial(self: &Arc<Self>, state: &mut AttemptState) -> Result<(), DialError> {
        let flows = if state.use_rdma { 1 } else { self.destination.context.settings.flows };
        (0..flows.into()).try_for_each(|flow| self.dial_flow(state, flow, true))
    }

    /// Starts to open one flow, by its own interface if it `binds`, or the control connection.
    fn dial_flow(
        self: &Arc<Self>,
        state: &mut AttemptState,
        flow: u32,
        binds: bool,
    ) -> Result<(), DialError> {
        let log = &self.destination.context.log;
        let (destination, handler) = (&self.destination, Arc::<Self>::clone(self));
        let dial = match state.use_rdma {
            true => {
                let (first, done) = state.control_path;
                state.control_path.1 += 1;
                // Each path also as the route decides, in case that answers come by another
                // interface.
                let pairs = rdma::Sender::port_pairs(destination) as u32;
                let is_even_round = (done / pairs).is_multiple_of(2);
                let binds = destination.context.device.ports().len() > 1 && is_even_round;
                let segment_limit = None;
                let way = Way { number: flow, path: first + done, binds, segment_limit };
                let count = rdma::Sender::queue_pair_count(destination);
                let deadline = self.control_deadline();
                Dial::control_connection(destination, handler, way, count, deadline)
            }
            false => {
                let path = self.path(state, flow);
                let way = Way { number: flow, path, binds, segment_limit: None };
                Dial::start_on(destination, handler, way, self.deadline)
            }
        };
        match dial {
            Ok(dial) => {
                state.dials.push(dial);
                Ok(())
            }
            Err(error) => {
                descriptors::report_shortage(&error, &**log);
                let path = self.path(state, flow);
                let in_vain = !state.use_rdma && binds && Dial::may_bind(destination, path);
                self.redial(state, flow, path, in_vain, error.into())
            }
        }
    }

    /// The path of a flow, as the number of the flow that takes it by default.
    fn path(&self, state: &AttemptState, flow: u32) -> u32 {
        let Destination { context, handle, .. } = &*self.destination;
        let count = context.device.path_count(handle);
        let leads_there = |path: &u32| !state.astray.contains_key(&(path % count));
        (flow..flow.saturating_add(count)).find(leads_there).unwrap_or(flow)
    }

    /// Takes a path out of use. False if there is no other.
    fn give_up_path(&self, state: &mut AttemptState, path: u32, error: &DialError) -> bool {
        if state.use_rdma || !error.leads_astray {
            return false;
        }
        let Destination { context, handle, .. } = &*self.destination;
        let count = context.device.path_count(handle);
        state.astray.entry(path % count).or_insert_with(|| error.what.clone());
        (state.astray.len() as u32) < count
    }

    /// Warns, once for a process, of each path that leads astray while others do not.
    fn warn_of_paths(&self, astray: &BTreeMap<u32, String>) {
        static WARNED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
        let Destination { context, handle, .. } = &*self.destination;
        for (path, why) in astray {
            let (_, peer) = context.device.path(*path, handle);
            let way =
                format!("{} does not lead to {}", context.device.interface_name(*path), peer.ip());
            let mut warned = lock(&WARNED);
            if warned.len() < MAX_WARNED && warned.insert(way.clone()) {
                context.log.warn(&format!(
                    "evenkeel: {way} ({why}): the others carry its flows; NCCL_SOCKET_IFNAME can leave it out"
                ));
            }
        }
    }

    /// By when a control connection has to be accepted. With several pairs of ports, there is time
    /// for the others.
    fn control_deadline(&self) -> Instant {
        match rdma::Sender::port_pairs(&self.destination) as u32 {
            ..=1 => self.deadline,
            pairs => {
                let timeout = self.destination.context.settings.connect_timeout / (2 * pairs);
                self.deadline.min(Instant::now() + timeout)
            }
        }
    }

    /// Dials a flow again: at once on another path where its own leads astray, else later. Not
    /// where that is useless or the caller does it. One that was bound to its interface `in_vain`
    /// is not bound then. The caller does not know of that.
    fn redial(
        self: &Arc<Self>,
        state: &mut AttemptState,
        flow: u32,
        path: u32,
        in_vain: bool,
        error: DialError,
    ) -> Result<(), DialError> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if self.give_up_path(state, path, &error) {
            state.dials.retain(|dial| dial.flow() != flow);
            return self.dial_flow(state, flow, true);
        }
        if error.is_final || self.caller_retries && !in_vain || left.is_zero() {
            return Err(error);
        }
        if state.cause.replace(error.what).is_none() {
            self.retry_clock.watch_ticks(Arc::new(RetryClock(Arc::clone(self))));
            self.retry_clock.request_tick();
        }
        let taken = self.destination.context.settings.connect_timeout.saturating_sub(left);
        let delay = (taken / 2).clamp(MIN_RETRY_DELAY, MAX_RETRY_DELAY);
        state.dials.retain(|dial| dial.flow() != flow);
        state.retries.push(Redial { flow, binds: !in_vain, at: Instant::now() + delay });
        Ok(())
    }

    /// Dials the flows again whose time has come.
    fn retry_due(self: &Arc<Self>, now: Instant) {
        let error = {
            let mut state = lock(&self.state);
            if state.over || state.retries.is_empty() {
                return;
            }
            if now >= self.deadline {
                self.too_late(&state)
            } else {
                let (due, later) = state.retries.iter().partition(|redial| redial.at <= now);
                state.retries = later;
                let due: Vec<Redial> = due;
                let dialed = due.into_iter().try_for_each(|Redial { flow, binds, .. }| {
                    self.dial_flow(&mut state, flow, binds)
                });
                match dialed {
                    Ok(()) => return,
                    Err(error) => self.explain(error),
                }
            }
        };
        self.fail(error, Retry::Unknown);
    }

    /// What is missing at the deadline.
    fn too_late(&self, state: &AttemptState) -> String {
        let settings = &self.destination.context.settings;
        let (accepted, limit) =
            (state.accepted.iter().flatten().count(), settings.connect_timeout.as_secs());
        let cause = state.cause.as_ref().map_or_else(String::new, |cause| format!(" ({cause})"));
        format!("{accepted} of {} flows answered within {limit} s{cause}", settings.flows)
    }

    /// The listener has accepted the control connection: agrees on queue pairs.
    fn agree_queue_pairs(self: &Arc<Self>, stream: Stream) {
        let destination = &self.destination;
        let attempt = Arc::downgrade(self);
        let opened = Box::new(move |opened: Result<(), Error>| {
            let Some(attempt) = attempt.upgrade() else { return };
            let sender = lock(&attempt.state).agreeing.take();
            match (sender, opened) {
                (Some(sender), Ok(())) => {
                    if let Some(Ok(sender)) = attempt.finish(Some(Ok(sender))) {
                        sender.owner_closed();
                    }
                }
                (Some(sender), Err(error)) => {
                    sender.close();
                    attempt.fall_back(&error);
                }
                // Cancelled meanwhile.
                (None, _) => {}
            }
        });
        // The lock delays the outcome until the connection is noted.
        let mut state = lock(&self.state);
        if state.over {
            return;
        }
        match rdma::Sender::open(destination, stream, self.deadline, opened) {
            Ok(sender) => state.agreeing = Some(sender),
            Err(error) => {
                drop(state);
                self.fall_back(&error);
            }
        }
    }

    /// RDMA cannot carry the connection. Falls back to TCP if that is allowed.
    fn fall_back(self: &Arc<Self>, error: &Error) {
        let Destination { context, peer, .. } = &*self.destination;
        let state = lock(&self.state);
        if state.over {
            return;
        }
        if !context.settings.may_use_tcp() {
            drop(state);
            return self.fail(error.to_string(), Retry::Unknown);
        }
        let (device, label) = (context.device.name(), &context.label);
        context.log.warn(&format!(
            "evenkeel: TCP carries the connection to {peer}, since RDMA from {device} failed: {error} {label}"
        ));
        self.use_tcp(state);
    }

    /// Starts again, as if this side had no RDMA.
    fn use_tcp(self: &Arc<Self>, mut state: MutexGuard<'_, AttemptState>) {
        state.use_rdma = false;
        state.dials.clear();
        state.retries.clear();
        if let Err(error) = self.dial(&mut state) {
            drop(state);
            self.fail(self.explain(error), Retry::Unknown);
        }
    }

    /// Fails the attempt, unless it is over.
    fn fail(&self, what: String, retry: Retry) {
        if lock(&self.state).over {
            return;
        }
        let Destination { context, peer, .. } = &*self.destination;
        let Context { log, device, label, .. } = context;
        let message = format!("connect to {peer} from {} failed: {what} {label}", device.name());
        let mut error = Error::new(ErrorKind::Remote, message);
        if !self.caller_retries {
            log.warn(&format!("evenkeel: {error}"));
            error = error.mark_logged();
        }
        self.finish(Some(Err(ConnectError::new(error, retry))));
    }

    /// Why a dial failed, with the interface that may be wrong: an address that leads astray may
    /// lead back to its own host.
    fn explain(&self, error: DialError) -> String {
        let Destination { context, handle, .. } = &*self.destination;
        let (what, from) = (error.what, context.device.name());
        if !error.leads_astray {
            return what;
        }
        let is_loopback = |ip: &IpAddr| ip.is_loopback();
        if context.device.addresses().iter().any(is_loopback)
            && !handle.addresses.iter().all(is_loopback)
        {
            return format!("{what}: {from} reaches this host alone (NCCL_SOCKET_IFNAME)");
        }
        let own = sys::interfaces().map_or_else(|_| Vec::new(), |interfaces| interfaces.addresses);
        let is_own = |ip: &&IpAddr| own.iter().any(|address| address.ip == **ip);
        match handle.addresses.iter().find(is_own) {
            Some(ip) => format!(
                "{what}: {ip} is an address of this host, so a peer on another host must use another interface (NCCL_SOCKET_IFNAME)"
            ),
            None => what,
        }
    }

    /// How long it may go without a poll, if it is to cancel itself.
    fn poll_timeout(&self) -> Duration {
        self.destination.context.settings.connect_timeout
    }

    fn abandoned_error(&self) -> ConnectError {
        let Destination { context, peer, .. } = &*self.destination;
        let (device, label) = (context.device.name(), &context.label);
        let message = format!(
            "connect to {peer} from {device} was cancelled: it was not polled for {} s (EVENKEEL_CONNECT_TIMEOUT) {label}",
            self.poll_timeout().as_secs()
        );
        ConnectError::new(Error::new(ErrorKind::Remote, message), Retry::Unknown)
    }

    /// Ends the attempt and releases all that it holds. Nobody will get its outcome.
    fn cancel(&self) {
        if let Some(Ok(sender)) = self.finish(None) {
            sender.owner_closed();
        }
        self.clock.end_ticks();
        // Last, since it may be what keeps the workers running. Not under the lock, which they may
        // wait for.
        let runtime = lock(&self.state).runtime.take();
        drop(runtime);
    }

    /// Ends the attempt, unless it is over, and stores an outcome for the poll. Returns the outcome
    /// that will not be polled.
    fn finish(&self, outcome: Option<Outcome>) -> Option<Outcome> {
        let (dials, accepted, agreeing, unclaimed) = {
            let mut state = lock(&self.state);
            let unclaimed = match outcome {
                None => state.outcome.take(),
                Some(outcome) if state.over => Some(outcome),
                Some(outcome) => {
                    state.outcome = Some(outcome);
                    None
                }
            };
            state.over = true;
            let accepted = std::mem::take(&mut state.accepted);
            (std::mem::take(&mut state.dials), accepted, state.agreeing.take(), unclaimed)
        };
        drop(accepted);
        self.retry_clock.end_ticks();
        for dial in dials {
            dial.take_stream();
        }
        if let Some(sender) = agreeing {
            sender.close();
        }
        unclaimed
    }
}

impl DialHandler for Attempt {
    fn on_welcome(self: Arc<Self>, flow: u32, stream: Stream) {
        let (streams, astray) = {
            let mut state = lock(&self.state);
            if state.over {
                return;
            }
            if state.use_rdma {
                drop(state);
                return self.agree_queue_pairs(stream);
            }
            if let Some(place) = state.accepted.get_mut(flow as usize) {
                *place = Some(stream);
            }
            if state.accepted.iter().any(Option::is_none) {
                return;
            }
            let accepted = std::mem::take(&mut state.accepted);
            (accepted.into_iter().flatten().collect(), std::mem::take(&mut state.astray))
        };
        self.warn_of_paths(&astray);
        let outcome = TcpSender::open(Arc::clone(&self.destination), streams)
            .map(|sender| sender as Arc<dyn Outbound>)
            .map_err(|error| {
                let error = Error::system("cannot watch a connection", &error);
                ConnectError::new(error, Retry::Unknown)
            });
        if let Some(Ok(sender)) = self.finish(Some(outcome)) {
            // Cancelled meanwhile.
            sender.owner_closed();
        }
    }

    fn on_dial_error(self: Arc<Self>, flow: u32, error: DialError) {
        let settings = &self.destination.context.settings;
        let (what, retry) = {
            let mut state = lock(&self.state);
            if state.over {
                return;
            }
            if state.use_rdma && error.no_rdma && settings.may_use_tcp() {
                // The two sides have no RDMA in common.
                return self.use_tcp(state);
            }
            let retry = error.retry;
            let dial = state.dials.iter().find(|dial| dial.flow() == flow);
            let in_vain = dial.is_some_and(|dial| dial.is_bound_in_vain());
            let path = dial.map_or(flow, |dial| dial.path());
            match self.redial(&mut state, flow, path, in_vain, error) {
                Ok(()) => return,
                Err(_) if Instant::now() >= self.deadline => (self.too_late(&state), retry),
                Err(error) => (self.explain(error), retry),
            }
        };
        self.fail(what, retry);
    }
}

/// Registers an attempt with a worker, for retries.
struct RetryClock(Arc<Attempt>);

impl Source for RetryClock {
    fn ready(&self, _readiness: Readiness) {}

    fn tick(&self, now: Instant) -> bool {
        self.0.retry_due(now);
        // Until the attempt is over.
        true
    }

    fn abandoned(&self, why: &str) {
        self.0.fail(why.to_owned(), Retry::Unknown);
    }
}

#[cfg(test)]
mod tests;
