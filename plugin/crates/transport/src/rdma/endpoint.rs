//! What the two sides of a connection have in common: who works on its state, how it opens, fails and ends.

use std::any::Any;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError, Weak};
use std::time::{Duration, Instant};

use evenkeel_protocol::{ControlMessage, PacketMarking, PortInfo};
use evenkeel_verbs::{Gid, MemoryRegion};
use socket2::Socket;

use super::control::ControlConnection;
use super::queue_pairs::{QueuePairEvent, QueuePairs, system};
use super::{ConnectionError, Opened};
use crate::Context;
use crate::connection::base::{Base, Direction, InFlight, TransportKind};
use crate::connection::request::Owner;
use crate::device::Device;
use crate::error::{Error, ErrorKind};
use crate::runtime::reactor::{Linger, Readiness, Registration, Source, Workers};
use crate::runtime::waiters;
use crate::sync::lock;
use crate::telemetry::metrics::{ConnectionObservation, FlowObservation, Observed};

/// Most rounds of completions that are taken at a time.
const ROUNDS: usize = 16;
/// So many visits between two looks of the worker, and completions are left to callers.
const DILIGENT: u32 = 8;
/// How long they are, at first.
const LEASE: Duration = Duration::from_millis(1);
/// And at most, while callers go on to come.
const LONGEST_LEASE: Duration = Duration::from_millis(8);

/// One side of a connection.
pub(crate) struct Endpoint<S> {
    base: Base,
    workers: Arc<Workers>,
    state: Mutex<S>,
    /// For the lifeline and for deadlines.
    ear: Registration,
    /// For completions.
    bell: Registration,
}

/// What a side does that the other one does not.
pub(crate) trait EndpointState: Send + Sized + 'static {
    /// What is noted of a write.
    type Note: Send;
    /// Whether the peer can say what was done, if the device does not tell any more.
    const PEER_KNOWS: bool;

    fn core(&mut self) -> &mut EndpointCore<Self::Note>;
    /// A lane tells something.
    fn take(
        &mut self,
        told: QueuePairEvent<Self::Note>,
        base: &Base,
    ) -> Result<(), ConnectionError>;
    /// Begins what can be begun.
    fn begin(&mut self, base: &Base) -> Result<(), ConnectionError>;
    /// The connection has another port and lifeline: all that depends on them begins anew.
    fn moved(&mut self, base: &Base) -> Result<(), ConnectionError>;
    /// Hears what the peer says, and works.
    fn hear(&mut self, base: &Base) -> Result<(), ConnectionError>;
    /// Looks at deadlines, hears and works.
    fn tick(&mut self, now: Instant, base: &Base) -> Result<(), ConnectionError>;
    fn in_flight(&self) -> InFlight;
    /// Whether somebody waits for completions, and not only memory to be used again.
    fn is_waited_for(&self) -> bool {
        true
    }
    /// Whether there is nothing for which a connection lingers when its owner has left.
    fn is_delivered(&self) -> bool;
    /// What the peer is told last.
    fn last_word(&self) -> ControlMessage;
    /// Ends the registrations of messages: no lane uses them any more.
    fn let_go(&mut self);

    /// Takes what lanes tell, this many times some, or until there is no more.
    fn drain(&mut self, rounds: usize, base: &Base) -> Result<(), ConnectionError> {
        let mut told = Vec::new();
        for _ in 0..rounds {
            let polled = self.core().lanes.poll(&mut told);
            for told in told.drain(..) {
                self.take(told, base)?;
            }
            if !polled? {
                break;
            }
        }
        Ok(())
    }

    /// Takes what has been done and begins what can be begun.
    fn work(&mut self, base: &Base) -> Result<(), ConnectionError> {
        self.drain(ROUNDS, base)?;
        self.begin(base)?;
        self.core().tell_news(base);
        Ok(())
    }
}

/// What the state of each side has.
pub(crate) struct EndpointCore<W> {
    pub(super) lanes: QueuePairs<W>,
    pub(super) lifeline: ControlConnection,
    /// The peer's.
    pub(super) port: Option<PortInfo>,
    /// The communicator's, if it has one.
    traffic_class: Option<u8>,
    /// Whether this side allows messages to be copied, and whether the peer does.
    eager: bool,
    peer_is_eager: bool,
    /// Whether requests are done of which the owner is not notified yet.
    pub(super) has_news: bool,
    opening: Option<(Opened, Instant)>,
    /// The owner has left, and what was promised is delivered until this time at most.
    pub(super) lingering: Option<(Linger, Instant)>,
    pub(super) callers: Callers,
    said_bye: bool,
    closed: bool,
}

impl<W> EndpointCore<W> {
    /// `opened` hears when all lanes are live, or why they will not be by the deadline.
    pub(super) fn new(
        lanes: QueuePairs<W>,
        socket: Socket,
        context: &Context,
        opened: Opened,
        deadline: Instant,
    ) -> Self {
        Self {
            lanes,
            lifeline: ControlConnection::new(socket, context.settings.peer_timeout),
            port: None,
            traffic_class: context.traffic_class,
            eager: context.memory_types.is_host_only(),
            peer_is_eager: false,
            has_news: false,
            opening: Some((opened, deadline)),
            lingering: None,
            callers: Callers::default(),
            said_bye: false,
            closed: false,
        }
    }

    /// Tells the peer of this side's port, and of the memory that it writes to.
    pub(super) fn say_port(&mut self, memory: &MemoryRegion) {
        let word = self.lanes.adapter.port_info(memory, self.eager, self.traffic());
        self.lifeline.say(&ControlMessage::Port(word));
    }

    /// What packets are marked with, if this side decides.
    pub(super) fn traffic(&self) -> PacketMarking {
        self.lanes.adapter.marking(self.traffic_class)
    }

    /// Whether small messages may come before there is a buffer for them: both sides have to allow it.
    pub(super) fn is_eager(&self) -> bool {
        self.eager && self.peer_is_eager
    }

    /// The peer has said its port.
    pub(super) fn hear_port(&mut self, port: PortInfo) -> Result<(), ConnectionError> {
        // What was promised of messages' memory holds as long as the connection.
        if !self.is_opening() && port.eager != self.peer_is_eager {
            let what = "protocol error: the peer has changed its mind about copies".to_owned();
            return Err(ConnectionError(ErrorKind::Remote, what));
        }
        self.port = Some(port);
        self.peer_is_eager = port.eager;
        Ok(())
    }

    /// Notifies the owner of what is done.
    pub(super) fn tell_news(&mut self, base: &Base) {
        if std::mem::take(&mut self.has_news) {
            base.notify();
        }
    }

    /// Whether the connection is not there yet.
    pub(super) fn is_opening(&self) -> bool {
        self.opening.is_some()
    }

    /// Fails when the connection should be there by now, or gone, or when nobody hears any more what its lanes do.
    pub(super) fn check_deadlines(&self, now: Instant) -> Result<(), ConnectionError> {
        if self.lanes.adapter.completion_queue_failed(&self.lanes.completions) {
            let name = self.lanes.adapter.name();
            return Err(ConnectionError(
                ErrorKind::System,
                format!("completion queue of {name} has failed"),
            ));
        }
        let what = if self.opening.as_ref().is_some_and(|(_, deadline)| now >= *deadline) {
            match self.lanes.longest_down() {
                Some((_, why)) => &format!("no queue pairs agreed on in time ({why})"),
                None => "no queue pairs agreed on in time",
            }
        } else if self.lingering.as_ref().is_some_and(|(_, deadline)| now >= *deadline) {
            "the last messages did not arrive in time"
        } else {
            return Ok(());
        };
        Err(ConnectionError(ErrorKind::Remote, what.to_owned()))
    }

    /// The lane that the peer speaks of.
    pub(super) fn known(&self, lane: u8) -> Result<usize, ConnectionError> {
        let lane = usize::from(lane);
        if lane < self.lanes.count() {
            return Ok(lane);
        }
        Err(ConnectionError(ErrorKind::Remote, format!("protocol error: no lane {lane}")))
    }
}

impl<S: EndpointState> Endpoint<S> {
    /// Begins to work on a state, whose lifeline has been welcomed.
    pub(super) fn start(
        context: Context,
        direction: Direction,
        peer: SocketAddr,
        workers: &Arc<Workers>,
        state: S,
    ) -> Result<Arc<Self>, Error> {
        let side = Arc::new(Self {
            base: Base::new(context, direction, TransportKind::Rdma, peer),
            workers: Arc::clone(workers),
            state: Mutex::new(state),
            ear: workers.registration(),
            bell: workers.registration(),
        });
        let observed: Weak<Self> = Arc::downgrade(&side);
        side.base.context.metrics.watch(observed);
        let watched = side.watch(&mut lock(&side.state));
        if let Err(ConnectionError(kind, what)) = watched {
            side.close();
            return Err(Error::new(kind, what));
        }
        Ok(side)
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

    /// Goes on by another port and lifeline, if that can be. What has come by the old ones counts; what is on its way does
    /// not.
    pub(super) fn move_to(
        this: &Arc<Self>,
        state: &mut S,
        device: &Device,
        socket: Socket,
        why: &str,
    ) -> Result<bool, ConnectionError> {
        let Some(adapter) = device.rdma() else { return Ok(false) };
        // A port that is good for nothing is not gone on by; the peer sees that when the lifeline ends.
        let Ok(completions) = state.core().lanes.completions_at(adapter) else { return Ok(false) };
        match state.drain(usize::MAX, &this.base) {
            Ok(()) => {}
            // A device that is lost tells nothing any more.
            Err(ConnectionError(ErrorKind::System, _)) if S::PEER_KNOWS => {}
            Err(problem) => return Err(problem),
        }
        let core = state.core();
        let before = Arc::clone(&core.lanes.adapter);
        this.bell.end(&*core.lanes.completions);
        this.ear.end(core.lifeline.socket());
        core.lanes.move_to(adapter, completions, why);
        core.lifeline.resume(socket, this.base.context.settings.peer_timeout);
        core.port = None;
        core.callers = Callers::default();
        this.base.move_to(device);
        this.base.counters.recovered.add(1);
        this.base.warn(&format!(
            "goes on by GID {} instead of {}: {why}",
            adapter.gid(),
            before.gid()
        ));
        state.moved(&this.base)?;
        this.watch(state)?;
        Ok(true)
    }

    /// Has the workers call for the lifeline and for completions.
    fn watch(self: &Arc<Self>, state: &mut S) -> Result<(), ConnectionError> {
        let core = state.core();
        core.lanes.completions.arm().map_err(system)?;
        let watched = self.ear.watch(core.lifeline.socket(), Arc::new(Ear(Arc::clone(self))));
        let bell = || Arc::new(Bell(Arc::clone(self)));
        watched
            .and_then(|()| self.bell.watch(&*core.lanes.completions, bell()))
            .map_err(|error| Error::system("cannot watch a connection", &error).into())
    }

    /// Does something to the state, and deals with what comes of it.
    pub(super) fn act(&self, act: impl FnOnce(&Self, &mut S) -> Result<(), ConnectionError>) {
        let mut state = self.state();
        if state.core().closed || self.base.failed() {
            return;
        }
        let result = act(self, &mut state);
        self.conclude(state, result);
    }

    fn conclude(&self, mut state: MutexGuard<'_, S>, result: Result<(), ConnectionError>) {
        let delivered = state.is_delivered();
        let core = state.core();
        let opened = match &result {
            Ok(()) if core.opening.is_none() || !core.lanes.are_live() => None,
            _ => core.opening.take(),
        };
        let over = delivered && core.lingering.is_some();
        drop(state);
        match (result, opened) {
            (Ok(()), None) => {}
            (Ok(()), Some((opened, _))) => opened(Ok(())),
            (Err(ConnectionError(kind, what)), None) => self.fail(kind, &what),
            (Err(ConnectionError(kind, what)), Some((opened, _))) => {
                opened(Err(Error::new(kind, what)))
            }
        }
        if over {
            self.close();
        }
    }

    fn fail(&self, kind: ErrorKind, what: &str) {
        let gids = {
            let mut state = self.state();
            let core = state.core();
            let peer =
                core.port.map_or_else(|| "unknown".to_owned(), |port| Gid(port.gid).to_string());
            format!("GID {}, the peer's {peer}", core.lanes.adapter.gid())
        };
        if self.base.fail(kind, &format!("{what} ({gids})"), &self.state().in_flight()) {
            // The peer must hear of it now, not when this side closes.
            self.come_to_rest();
            let lingers = self.state().core().lingering.is_some();
            if lingers {
                self.close();
            }
        }
    }

    /// Returns when no buffer is being touched and none will be again.
    fn come_to_rest(&self) {
        let mut state = self.state();
        let word = state.last_word();
        let core = state.core();
        if !std::mem::replace(&mut core.said_bye, true) {
            core.lifeline.say(&word);
            core.lifeline.shutdown();
        }
        core.lanes.close();
        // Registrations end before requests are reported.
        state.let_go();
    }

    /// Whether it has neither failed nor been closed.
    pub(crate) fn is_open(&self) -> bool {
        !self.base.failed() && !self.state().core().closed
    }

    /// Ends everything.
    pub(crate) fn close(&self) {
        // First, so that nothing begins anew meanwhile.
        let was_closed = std::mem::replace(&mut self.state().core().closed, true);
        self.come_to_rest();
        if was_closed {
            return;
        }
        let mut state = self.state();
        let core = state.core();
        self.ear.end(core.lifeline.socket());
        self.bell.end(&*core.lanes.completions);
        let (opening, lingering) = (core.opening.take(), core.lingering.take());
        core.lanes.all().iter().for_each(|lane| self.base.ended(lane.carried.bytes()));
        drop(state);
        // Nobody waits for it any more.
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
        self.come_to_rest();
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
        let armed = match core.callers.visit(waiters::is_about_to_sleep()) {
            true => core.lanes.completions.arm().map_err(|error| system(error).into()),
            false => Ok(()),
        };
        // After arming: what came before makes no event.
        let result = armed.and_then(|()| state.work(&self.base));
        self.conclude(state, result);
    }
}

impl<S: EndpointState> Observed for Endpoint<S> {
    fn observe(&self) -> ConnectionObservation<'_> {
        self.base.observe(&self.state().in_flight())
    }

    fn observe_flows(&self) -> Vec<FlowObservation> {
        self.state().core().lanes.observe()
    }
}

/// The lifeline, as its worker sees it.
struct Ear<S>(Arc<Endpoint<S>>);

impl<S: EndpointState> Source for Ear<S> {
    fn ready(&self, _readiness: Readiness) {
        self.0.act(|side, state| state.hear(&side.base));
    }

    fn tick(&self, now: Instant) {
        self.0.act(|side, state| state.tick(now, &side.base));
    }

    fn abandoned(&self, why: &str) {
        self.0.fail(ErrorKind::Internal, why);
    }
}

/// The queue of completions, as its worker sees it.
struct Bell<S>(Arc<Endpoint<S>>);

impl<S: EndpointState> Source for Bell<S> {
    fn ready(&self, readiness: Readiness) {
        self.0.act(|side, state| {
            if readiness.readable {
                state.core().lanes.completions.disarm();
            }
            state.work(&side.base)?;
            let waited_for = state.is_waited_for();
            let core = state.core();
            if let Some(lease) = core.callers.leave_to_them(waited_for) {
                side.bell.set_timer(Instant::now() + lease);
                return Ok(());
            }
            core.lanes.completions.arm().map_err(system)?;
            // What came in between makes no event.
            state.work(&side.base)
        });
    }

    fn has_deadlines(&self) -> bool {
        false
    }

    fn abandoned(&self, why: &str) {
        self.0.fail(ErrorKind::Internal, why);
    }
}

/// Who takes completions: the worker, whom each of them wakes, or callers who come so often that this would only take the
/// processor from them.
#[derive(Default)]
pub(super) struct Callers {
    /// Since the worker looked.
    visits: u32,
    /// Whether, since then, something was sent for which nobody waits.
    sent: bool,
    /// How long completions are left to callers, if they are.
    lease: Option<Duration>,
    /// Whether they are because nobody waits for any.
    in_passing: bool,
}

impl Callers {
    /// A caller is here. If it then falls asleep, the worker has to be woken again: whether that is to be seen to.
    fn visit(&mut self, is_about_to_sleep: bool) -> bool {
        if is_about_to_sleep {
            self.visits = 0;
            return self.lease.take().is_some();
        }
        self.visits = self.visits.saturating_add(1);
        false
    }

    /// A caller has sent something, for which somebody `waits` or not. Whether it is to be seen to that the worker is woken.
    pub(super) fn sends(&mut self, waits: bool) -> bool {
        self.sent |= !waits;
        waits && std::mem::take(&mut self.in_passing) && self.lease.take().is_some()
    }

    /// The worker is here. For how long completions are left to callers; `None` when it is to be woken by the next one.
    fn leave_to_them(&mut self, waited_for: bool) -> Option<Duration> {
        let (visits, sent) = (std::mem::take(&mut self.visits), std::mem::take(&mut self.sent));
        let diligent = visits >= DILIGENT;
        self.in_passing = !diligent && !waited_for && sent;
        self.lease = match self.lease {
            _ if self.in_passing => Some(LONGEST_LEASE),
            lease if diligent => Some(lease.map_or(LEASE, |lease| (2 * lease).min(LONGEST_LEASE))),
            _ => None,
        };
        self.lease
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn come(callers: &mut Callers, times: u32) {
        (0..times).for_each(|_| assert!(!callers.visit(false)));
    }

    #[test]
    fn completions_are_left_to_callers_as_long_as_they_come_often() {
        let mut callers = Callers::default();
        assert_eq!(callers.leave_to_them(true), None, "nobody came");
        come(&mut callers, DILIGENT - 1);
        assert_eq!(
            callers.leave_to_them(true),
            None,
            "who comes once for each message sleeps in between"
        );
        let mut lease = LEASE;
        while lease <= LONGEST_LEASE {
            come(&mut callers, DILIGENT);
            assert_eq!(callers.leave_to_them(true), Some(lease));
            lease *= 2;
        }
        come(&mut callers, DILIGENT);
        assert_eq!(callers.leave_to_them(true), Some(LONGEST_LEASE));
        assert_eq!(callers.leave_to_them(true), None, "they have gone");
        come(&mut callers, DILIGENT);
        assert_eq!(callers.leave_to_them(true), Some(LEASE));
    }

    #[test]
    fn a_caller_who_falls_asleep_leaves_completions_to_the_worker() {
        let mut callers = Callers::default();
        assert!(!callers.visit(true), "it is the worker's");
        come(&mut callers, DILIGENT);
        assert!(callers.leave_to_them(true).is_some());
        come(&mut callers, DILIGENT);
        assert!(callers.visit(true));
        assert!(!callers.visit(true), "once");
        assert_eq!(callers.leave_to_them(true), None);
    }

    #[test]
    fn for_what_nobody_waits_the_worker_is_not_woken_each_time() {
        let mut callers = Callers::default();
        assert_eq!(callers.leave_to_them(false), None, "nothing was sent");
        for _ in 0..3 {
            assert!(!callers.sends(false));
            assert_eq!(callers.leave_to_them(false), Some(LONGEST_LEASE));
        }
        assert!(callers.sends(true), "now somebody waits");
        assert!(!callers.sends(true), "once");
        assert_eq!(callers.leave_to_them(true), None);
        come(&mut callers, DILIGENT);
        assert!(callers.leave_to_them(true).is_some());
        assert!(!callers.sends(true), "who is diligent looks");
    }
}
