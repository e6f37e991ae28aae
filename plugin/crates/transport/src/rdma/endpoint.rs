//! What both ends of a connection share: how it opens, fails and closes, and which thread works on
//! its state.

use std::any::Any;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError, Weak};
use std::time::Instant;

use evenkeel_protocol::{ControlMessage, PacketMarking, PortInfo};
use evenkeel_verbs::{Gid, StagingBuffer};

use super::completion_polling::CompletionPolling;
use super::control::ControlConnection;
use super::error::{ConnectionError, gids};
use super::events::{EventHandler, EventWatch};
use super::queue_pairs::{OwnPort, QueuePairEvent, QueuePairs};
use crate::Context;
use crate::connection::base::{Base, Direction, InFlight, TransportKind};
use crate::connection::request::Owner;
use crate::device::Device;
use crate::error::{Error, ErrorKind};
use crate::runtime::reactor::{Linger, Readiness, Registration, Source, Workers};
use crate::runtime::waiters;
use crate::stream::Stream;
use crate::sync::lock;
use crate::telemetry::metrics::{ConnectionObservation, FlowObservation, Observed};

/// Maximum number of polls of the completion queue at a time.
const MAX_POLLS: usize = 16;

/// Called with the outcome of opening a connection.
pub(crate) type OnOpened = Box<dyn FnOnce(Result<(), Error>) + Send>;

/// One end of a connection.
pub(crate) struct Endpoint<S> {
    base: Base,
    workers: Arc<Workers>,
    state: Mutex<S>,
    /// For the control connection and for deadlines.
    control_registration: Registration,
    /// For the completion queue of each port.
    cq_registrations: Vec<Registration>,
}

/// The state of one end, and what differs between the sender and the receiver.
pub(crate) trait EndpointState: Send + Sized + 'static {
    /// What is noted of a write.
    type Note: Send;
    /// Whether the peer can report which writes it has, if the device does not any more.
    const PEER_CONFIRMS_WRITES: bool;

    fn core(&mut self) -> &mut EndpointCore<Self::Note>;
    fn on_event(
        &mut self,
        event: QueuePairEvent<Self::Note>,
        base: &Base,
    ) -> Result<(), ConnectionError>;
    /// Posts the work that can be posted.
    fn post_work(&mut self, base: &Base) -> Result<(), ConnectionError>;
    /// The connection has another port and control connection: resets what depends on them.
    fn on_failover(&mut self, base: &Base) -> Result<(), ConnectionError>;
    /// Receives control messages, and works.
    fn receive_control(&mut self, base: &Base) -> Result<(), ConnectionError>;
    /// Checks deadlines and what the device has reported, receives control messages, and works.
    fn tick(&mut self, now: Instant, base: &Base) -> Result<(), ConnectionError>;
    /// Whether something is due at a certain time, beside what [`EndpointCore::has_deadlines`]
    /// knows. All else is announced by events, so an idle connection has nothing to check.
    fn has_deadlines(&self) -> bool;
    fn in_flight(&self) -> InFlight;
    /// Accounts for what the connection waits for now.
    fn update_waits(&self, base: &Base);
    /// Whether something waits for completions, other than memory to be used again.
    fn is_waited_for(&self) -> bool {
        true
    }
    /// Whether nothing is left for which a connection lingers after its owner has closed it.
    fn is_delivered(&self) -> bool;
    /// The last control message.
    fn close_message(&self) -> ControlMessage;
    /// Drops the memory regions of messages: no queue pair uses them any more.
    fn release_regions(&mut self);

    /// Polls completions, up to this number of times or until there are none.
    fn poll_completions(&mut self, polls: usize, base: &Base) -> Result<(), ConnectionError> {
        let mut events = Vec::new();
        for _ in 0..polls {
            let polled = self.core().queue_pairs.poll(&mut events);
            for event in events.drain(..) {
                self.on_event(event, base)?;
            }
            if !polled? {
                break;
            }
        }
        Ok(())
    }

    /// Polls completions and posts the work that can be posted.
    fn work(&mut self, base: &Base) -> Result<(), ConnectionError> {
        self.poll_completions(MAX_POLLS, base)?;
        self.post_work(base)?;
        self.core().notify_owner(base);
        Ok(())
    }
}

/// The part of the state that both ends have.
pub(crate) struct EndpointCore<W> {
    pub(super) queue_pairs: QueuePairs<W>,
    pub(super) control: ControlConnection,
    /// The peer's ports, once they are known.
    pub(super) peer_ports: Vec<PortInfo>,
    /// The communicator's traffic class, if it has one.
    traffic_class: Option<u8>,
    /// Whether this end allows eager messages.
    eager: bool,
    /// Whether the peer allows eager messages.
    peer_is_eager: bool,
    /// Whether requests are done of which the owner is not notified yet.
    pub(super) owner_to_notify: bool,
    opening: Option<(OnOpened, Instant)>,
    /// Set when the owner has closed the connection and messages are still to be delivered; with
    /// the deadline.
    pub(super) lingering: Option<(Linger, Instant)>,
    pub(super) completion_polling: CompletionPolling,
    /// Report the events of the ports' devices.
    event_watches: Vec<Arc<EventWatch>>,
    close_sent: bool,
    closed: bool,
}

impl<W> EndpointCore<W> {
    /// `on_opened` is called when the first queue pair is active, or with the reason why it is not
    /// by the deadline.
    pub(super) fn new(
        queue_pairs: QueuePairs<W>,
        stream: Stream,
        context: &Context,
        on_opened: OnOpened,
        deadline: Instant,
    ) -> Self {
        Self {
            queue_pairs,
            control: ControlConnection::new(stream, context.settings.peer_timeout),
            peer_ports: Vec::new(),
            traffic_class: context.traffic_class,
            eager: context.memory_types.is_host_only(),
            peer_is_eager: false,
            owner_to_notify: false,
            opening: Some((on_opened, deadline)),
            lingering: None,
            completion_polling: CompletionPolling::default(),
            event_watches: Vec::new(),
            close_sent: false,
            closed: false,
        }
    }

    /// Sends the peer this end's ports, and the memory that the peer writes to, which has room for
    /// this number of keys in each credit.
    pub(super) fn send_ports(&mut self, memory: &StagingBuffer, keys: usize) {
        let info = |port: &OwnPort| {
            let (adapter, marking) = (&port.adapter, port.adapter.marking(self.traffic_class));
            adapter.port_info(memory.region(&adapter.context), self.eager, marking)
        };
        let ports = self.queue_pairs.ports().iter().map(info).collect();
        self.control.send(&ControlMessage::Ports(keys as u8, ports));
    }

    /// How packets of a queue pair are marked, if this end decides.
    pub(super) fn marking(&self, index: usize) -> PacketMarking {
        self.queue_pairs.adapter(index).marking(self.traffic_class)
    }

    /// The peer's port of a queue pair; `None` before it is known.
    pub(super) fn peer_port(&self, index: usize) -> Option<PortInfo> {
        let count = self.peer_ports.len().max(1);
        self.peer_ports.get(index % count).copied()
    }

    /// Whether small messages are eager: both ends have to allow it.
    pub(super) fn is_eager(&self) -> bool {
        self.eager && self.peer_is_eager
    }

    /// The peer has sent its ports, of which this end's queue pairs use these, with at most `own`
    /// of this end's.
    pub(super) fn set_peer_ports(
        &mut self,
        ports: Vec<PortInfo>,
        own: usize,
    ) -> Result<(), ConnectionError> {
        let is_eager = ports.iter().all(|port| port.eager);
        // The memory types of messages are those of the connection's start.
        if !self.is_opening() && is_eager != self.peer_is_eager {
            let what = "protocol error: the peer has changed whether it allows eager messages";
            return Err(ConnectionError::remote(what));
        }
        self.queue_pairs.set_ports(own, ports.len());
        self.peer_ports = ports;
        self.peer_is_eager = is_eager;
        Ok(())
    }

    /// Notifies the owner of requests that are done.
    pub(super) fn notify_owner(&mut self, base: &Base) {
        if std::mem::take(&mut self.owner_to_notify) {
            base.notify();
        }
    }

    /// Whether the connection is not open yet.
    pub(super) fn is_opening(&self) -> bool {
        self.opening.is_some()
    }

    /// Whether something is due at a certain time: the connection is being opened or closed, or has
    /// lost a queue pair or its control connection.
    fn has_deadlines(&self) -> bool {
        self.opening.is_some()
            || self.lingering.is_some()
            || self.queue_pairs.is_any_down()
            || self.control.ended().is_some()
    }

    /// Fails when a deadline for opening or lingering has passed, or when the completion queue has
    /// failed.
    pub(super) fn check_deadlines(&self, now: Instant) -> Result<(), ConnectionError> {
        for OwnPort { adapter, completions } in self.queue_pairs.all_ports() {
            if adapter.completion_queue_failed(completions) {
                let what = format!("completion queue of {} has failed", adapter.name());
                return Err(ConnectionError(ErrorKind::System, what));
            }
        }
        let what = if self.opening.as_ref().is_some_and(|(_, deadline)| now >= *deadline) {
            match self.queue_pairs.longest_down() {
                Some((_, why)) => &format!("no queue pairs were agreed on in time ({why})"),
                None => "no queue pairs were agreed on in time",
            }
        } else if self.lingering.as_ref().is_some_and(|(_, deadline)| now >= *deadline) {
            "the last messages did not arrive in time"
        } else {
            return Ok(());
        };
        Err(ConnectionError::remote(what))
    }

    /// Checks the index of a queue pair in a message of the peer.
    pub(super) fn check_index(&self, index: u8) -> Result<usize, ConnectionError> {
        let index = usize::from(index);
        if index < self.queue_pairs.count() {
            return Ok(index);
        }
        Err(ConnectionError::remote(format!("protocol error: no queue pair {index}")))
    }
}

impl<S: EndpointState> Endpoint<S> {
    /// Starts to work on a state, whose control connection is open.
    pub(super) fn start(
        context: Context,
        direction: Direction,
        peer: SocketAddr,
        workers: &Arc<Workers>,
        mut state: S,
    ) -> Result<Arc<Self>, Error> {
        let ports = state.core().queue_pairs.all_ports().len();
        let endpoint = Arc::new(Self {
            base: Base::new(context, direction, TransportKind::Rdma, peer),
            workers: Arc::clone(workers),
            state: Mutex::new(state),
            control_registration: workers.registration(),
            cq_registrations: (0..ports).map(|_| workers.registration()).collect(),
        });
        let observed: Weak<Self> = Arc::downgrade(&endpoint);
        endpoint.base.context.metrics.watch(observed);
        let watched = endpoint.watch(&mut lock(&endpoint.state));
        if let Err(ConnectionError(kind, what)) = watched {
            endpoint.close();
            return Err(Error::new(kind, what));
        }
        Ok(endpoint)
    }

    pub(super) fn base(&self) -> &Base {
        &self.base
    }

    pub(super) fn workers(&self) -> &Arc<Workers> {
        &self.workers
    }

    pub(super) fn state(&self) -> MutexGuard<'_, S> {
        lock(&self.state)
    }

    /// Fails over to other ports and another control connection, and returns whether that was
    /// possible. What was received over the old ones counts; what is in flight on them does not.
    pub(super) fn fail_over(
        this: &Arc<Self>,
        state: &mut S,
        device: &Device,
        stream: Stream,
        why: &str,
    ) -> Result<bool, ConnectionError> {
        // Without a completion queue a port is useless. One that is down keeps its place: it may
        // come back, and each port has its peer by its place.
        let count = state.core().queue_pairs.count();
        let adapters = device.ports();
        let ports = adapters.iter().filter_map(|adapter| OwnPort::open(adapter, count).ok());
        let ports: Vec<OwnPort> = ports.take(this.cq_registrations.len()).collect();
        if ports.iter().all(|port| port.adapter.is_down()) {
            // The peer sees that the new control connection is closed.
            return Ok(false);
        }
        match state.poll_completions(usize::MAX, &this.base) {
            Ok(()) => {}
            // A device that is lost reports nothing any more.
            Err(ConnectionError(ErrorKind::System, _)) if S::PEER_CONFIRMS_WRITES => {}
            Err(error) => return Err(error),
        }
        let core = state.core();
        let from = core.queue_pairs.gids();
        this.end_completions(core);
        this.control_registration.end(core.control.socket());
        core.queue_pairs.move_to(ports, why);
        core.control.replace_stream(stream, this.base.context.settings.peer_timeout);
        core.peer_ports.clear();
        core.completion_polling = CompletionPolling::default();
        this.base.move_to(device);
        this.base.counters.recovered.add(1);
        let to = core.queue_pairs.gids();
        this.base.warn(&match from == to {
            true => format!("connected again at GID {to}: {why}"),
            false => format!("failed over to GID {to} from {from}: {why}"),
        });
        state.on_failover(&this.base)?;
        this.watch(state)?;
        Ok(true)
    }

    /// Registers the control connection, the completion queues and the devices' events with the
    /// workers.
    fn watch(self: &Arc<Self>, state: &mut S) -> Result<(), ConnectionError> {
        let core = state.core();
        core.queue_pairs.arm()?;
        self.watch_all(core).map_err(|error| Error::system("cannot watch a connection", &error))?;
        self.control_registration.request_tick();
        Ok(())
    }

    fn watch_all(self: &Arc<Self>, core: &mut EndpointCore<S::Note>) -> io::Result<()> {
        let control = Arc::new(ControlSource(Arc::clone(self)));
        self.control_registration.watch(core.control.socket(), control)?;
        let ports = core.queue_pairs.all_ports().iter().zip(&self.cq_registrations);
        let mut event_watches = Vec::new();
        for (port, (OwnPort { adapter, completions }, registration)) in ports.enumerate() {
            let source = CompletionSource { endpoint: Arc::clone(self), port };
            registration.watch(&**completions, Arc::new(source))?;
            let this: Weak<Self> = Arc::downgrade(self);
            event_watches.push(adapter.watch_events(&self.workers, this)?);
        }
        core.event_watches = event_watches;
        Ok(())
    }

    /// Ends the registrations of the completion queues.
    fn end_completions(&self, core: &EndpointCore<S::Note>) {
        let ports = core.queue_pairs.all_ports().iter().zip(&self.cq_registrations);
        ports.for_each(|(port, registration)| registration.end(&*port.completions));
    }

    /// Whether the connection has to check something at the next tick.
    fn has_deadlines(&self, state: &mut S) -> bool {
        let is_live = !state.core().closed && !self.base.failed();
        is_live && (state.core().has_deadlines() || state.has_deadlines())
    }

    /// Works on the state, unless the connection has failed or is closed, and handles the result.
    pub(super) fn with_state(
        &self,
        work: impl FnOnce(&Self, &mut S) -> Result<(), ConnectionError>,
    ) {
        let mut state = self.state();
        if state.core().closed || self.base.failed() {
            return;
        }
        let result = work(self, &mut state);
        self.handle_result(state, result);
    }

    fn handle_result(&self, mut state: MutexGuard<'_, S>, result: Result<(), ConnectionError>) {
        state.update_waits(&self.base);
        let delivered = state.is_delivered();
        let core = state.core();
        let opening = match &result {
            Ok(()) if core.opening.is_none() || !core.queue_pairs.is_usable() => None,
            _ => core.opening.take(),
        };
        let is_done = delivered && core.lingering.is_some();
        if self.has_deadlines(&mut state) {
            self.control_registration.request_tick();
        }
        drop(state);
        match (result, opening) {
            (Ok(()), None) => {}
            (Ok(()), Some((on_opened, _))) => on_opened(Ok(())),
            (Err(ConnectionError(kind, what)), None) => self.fail(kind, &what),
            (Err(ConnectionError(kind, what)), Some((on_opened, _))) => {
                on_opened(Err(Error::new(kind, what)));
            }
        }
        if is_done {
            self.close();
        }
    }

    fn fail(&self, kind: ErrorKind, what: &str) {
        let gids = {
            let mut state = self.state();
            let core = state.core();
            let peer = match &core.peer_ports[..] {
                [] => "unknown".to_owned(),
                ports => gids(ports.iter().map(|port| Gid(port.gid))),
            };
            format!("GID {}, the peer's {peer}", core.queue_pairs.gids())
        };
        // The lock is not held while the owner is notified.
        let in_flight = self.state().in_flight();
        if self.base.fail(kind, &format!("{what} ({gids})"), &in_flight) {
            // The peer has to be notified now, not when this end is closed.
            self.quiesce();
            let lingers = self.state().core().lingering.is_some();
            if lingers {
                self.close();
            }
        }
    }

    /// After this returns, the device accesses no buffer of the connection any more.
    fn quiesce(&self) {
        let mut state = self.state();
        let message = state.close_message();
        let core = state.core();
        if !std::mem::replace(&mut core.close_sent, true) {
            core.control.send(&message);
            core.control.shutdown();
        }
        core.queue_pairs.close();
        // Regions end before requests are reported as failed.
        state.release_regions();
    }

    /// Whether it has neither failed nor been closed.
    pub(crate) fn is_open(&self) -> bool {
        !self.base.failed() && !self.state().core().closed
    }

    pub(crate) fn close(&self) {
        // Set first, so that no thread starts new work.
        let was_closed = std::mem::replace(&mut self.state().core().closed, true);
        self.quiesce();
        if was_closed {
            return;
        }
        let mut state = self.state();
        let core = state.core();
        self.control_registration.end(core.control.socket());
        self.end_completions(core);
        let (opening, lingering) = (core.opening.take(), core.lingering.take());
        let event_watches = std::mem::take(&mut core.event_watches);
        core.queue_pairs.slots().iter().for_each(|slot| self.base.ended(slot.carried.bytes()));
        drop(state);
        drop(event_watches);
        // The opener has given up the connection, so it is not notified.
        drop(opening);
        self.base.log_closed();
        drop(lingering);
    }
}

impl<S: EndpointState> Owner for Endpoint<S> {
    fn retain_memory(&self, memory: Box<dyn Any + Send + Sync>) {
        self.base.retain_memory(memory);
    }

    fn failure(&self) -> Option<Error> {
        let error = self.base.failure()?;
        self.quiesce();
        Some(error)
    }

    fn progress(&self) {
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        if state.core().closed || self.base.failed() {
            return;
        }
        let core = state.core();
        let armed = match core.completion_polling.caller_polls(waiters::is_about_to_sleep()) {
            true => core.queue_pairs.arm().map_err(Into::into),
            false => Ok(()),
        };
        // After arming, since earlier completions cause no event.
        let result = armed.and_then(|()| state.work(&self.base));
        self.handle_result(state, result);
    }
}

impl<S: EndpointState> EventHandler for Endpoint<S> {
    fn on_device_events(&self) {
        self.with_state(|endpoint, state| state.tick(Instant::now(), &endpoint.base));
    }
}

impl<S: EndpointState> Observed for Endpoint<S> {
    fn observe(&self) -> ConnectionObservation<'_> {
        self.base.observe(&self.state().in_flight())
    }

    fn base(&self) -> &Base {
        &self.base
    }

    fn observe_flows(&self) -> Vec<FlowObservation> {
        self.state().core().queue_pairs.observe()
    }
}

/// The control connection, for its worker.
struct ControlSource<S>(Arc<Endpoint<S>>);

impl<S: EndpointState> Source for ControlSource<S> {
    fn ready(&self, _readiness: Readiness) {
        self.0.with_state(|endpoint, state| state.receive_control(&endpoint.base));
    }

    fn tick(&self, now: Instant) -> bool {
        self.0.with_state(|endpoint, state| state.tick(now, &endpoint.base));
        // What is left has requested the next tick.
        false
    }

    fn abandoned(&self, why: &str) {
        self.0.fail(ErrorKind::Internal, why);
    }
}

/// The completion queue of a port, for its worker.
struct CompletionSource<S> {
    endpoint: Arc<Endpoint<S>>,
    /// The port's number.
    port: usize,
}

impl<S: EndpointState> Source for CompletionSource<S> {
    fn ready(&self, readiness: Readiness) {
        self.endpoint.with_state(|endpoint, state| {
            // After a failover there may be fewer.
            let port = state.core().queue_pairs.all_ports().get(self.port);
            if let Some(port) = port.filter(|_| readiness.readable) {
                port.completions.disarm();
            }
            state.work(&endpoint.base)?;
            let is_waited_for = state.is_waited_for();
            let core = state.core();
            if let Some(lease) = core.completion_polling.worker_runs(is_waited_for) {
                endpoint.cq_registrations[self.port].set_timer(Instant::now() + lease);
                return Ok(());
            }
            core.queue_pairs.arm()?;
            // Completions before arming cause no event.
            state.work(&endpoint.base)
        });
    }

    fn abandoned(&self, why: &str) {
        self.endpoint.fail(ErrorKind::Internal, why);
    }
}
