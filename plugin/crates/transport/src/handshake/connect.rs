//! The connecting side of a new connection.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use evenkeel_protocol::{ConnectionId, Handle};
use socket2::Socket;

use crate::Context;
use crate::connection::send::{Outbound, SendConnection};
use crate::error::{Answer, Error, ErrorKind};
use crate::handshake::dial::{Call, CallError, Caller, Destination};
use crate::rdma;
use crate::runtime::reactor::Engine;
use crate::settings::Carrier;
use crate::sync::lock;
use crate::sys;
use crate::tcp::sender::Sender;

/// An attempt to connect to a listener. Dropping it gives it up.
pub struct Connecting {
    attempt: Arc<Attempt>,
    engine: Arc<Engine>,
}

struct Attempt {
    destination: Arc<Destination>,
    deadline: Instant,
    /// Whether a failure is told to who polls only.
    quiet: bool,
    state: Mutex<State>,
}

struct State {
    calls: Vec<Arc<Call>>,
    welcomed: Vec<Option<Socket>>,
    /// Whether messages are to be carried by RDMA, as far as this side knows.
    by_rdma: bool,
    /// The connection whose peers are agreeing on queue pairs.
    agreeing: Option<Arc<rdma::Sender>>,
    /// What came of it, until it is taken.
    outcome: Option<Outcome>,
    /// No more is to come: succeeded, failed or given up.
    over: bool,
}

type Outcome = Result<Arc<dyn Outbound>, Error>;

impl Connecting {
    pub(crate) fn start(
        engine: Arc<Engine>,
        context: Context,
        handle: &Handle,
        quiet: bool,
    ) -> Result<Self, Error> {
        let (_, peer) = context.device.path(0, handle);
        let what = format!("cannot connect to {peer} from {}", context.device.name());
        let fail = |error| Error::system(&what, &error);
        let connection = ConnectionId(sys::random().map_err(fail)?);
        let flows = context.settings.flows;
        let by_rdma = context.settings.carrier != Carrier::Tcp && context.device.rdma().is_some();
        let deadline = Instant::now() + context.settings.connect_timeout;
        let workers = Arc::clone(engine.workers());
        let destination =
            Destination { context, workers, handle: handle.clone(), peer, connection };
        let attempt = Arc::new(Attempt {
            destination: Arc::new(destination),
            deadline,
            quiet,
            state: Mutex::new(State {
                calls: Vec::new(),
                welcomed: (0..flows).map(|_| None).collect(),
                by_rdma,
                agreeing: None,
                outcome: None,
                over: false,
            }),
        });
        // From here on, dropping it on an error ends what has begun.
        let connecting = Self { attempt, engine };
        {
            // The lock keeps outcomes back until all calls are noted.
            let mut state = lock(&connecting.attempt.state);
            connecting.attempt.call(&mut state).map_err(fail)?;
        }
        Ok(connecting)
    }

    /// The connection once all its flows are welcomed; `None` before. Never blocks. Not to be
    /// called again after it returned a connection or an error.
    ///
    /// # Errors
    /// [`ErrorKind::Remote`] when the listener cannot be reached, refuses ([`Error::answer`]), or
    /// has not answered within the connect timeout.
    pub fn poll(&self) -> Result<Option<SendConnection>, Error> {
        match lock(&self.attempt.state).outcome.take() {
            None => Ok(None),
            Some(Ok(sender)) => Ok(Some(SendConnection::new(sender, Arc::clone(&self.engine)))),
            Some(Err(error)) => Err(error),
        }
    }
}

impl Drop for Connecting {
    fn drop(&mut self) {
        if let Some(Ok(sender)) = self.attempt.finish(None) {
            sender.leave();
        }
    }
}

impl Attempt {
    /// Begins to open the lifeline, or all flows.
    fn call(self: &Arc<Self>, state: &mut State) -> io::Result<()> {
        let Context { settings, .. } = &self.destination.context;
        let caller = || Arc::<Self>::clone(self);
        if state.by_rdma {
            let call =
                Call::lifeline(&self.destination, caller(), 0, settings.lanes, self.deadline)?;
            state.calls.push(call);
            return Ok(());
        }
        for flow in 0..settings.flows.into() {
            let call = Call::start(&self.destination, caller(), flow, self.deadline)?;
            state.calls.push(call);
        }
        Ok(())
    }

    /// The listener has taken the lifeline: agrees with it on queue pairs.
    fn agree(self: &Arc<Self>, socket: Socket) {
        let destination = &self.destination;
        let Some(adapter) = destination.context.device.rdma() else { return };
        let attempt = Arc::downgrade(self);
        let opened = Box::new(move |opened: Result<(), Error>| {
            let Some(attempt) = attempt.upgrade() else { return };
            let sender = lock(&attempt.state).agreeing.take();
            match (sender, opened) {
                (Some(sender), Ok(())) => {
                    if let Some(Ok(sender)) = attempt.finish(Some(Ok(sender))) {
                        sender.leave();
                    }
                }
                (Some(sender), Err(error)) => {
                    sender.close();
                    attempt.without_rdma(&error);
                }
                // Given up meanwhile.
                (None, _) => {}
            }
        });
        // The lock keeps the outcome back until the connection is noted.
        let mut state = lock(&self.state);
        if state.over {
            return;
        }
        match rdma::Sender::open(destination, adapter, socket, self.deadline, opened) {
            Ok(sender) => state.agreeing = Some(sender),
            Err(error) => {
                drop(state);
                self.without_rdma(&error);
            }
        }
    }

    /// RDMA cannot carry the connection: TCP does, if it may.
    fn without_rdma(self: &Arc<Self>, error: &Error) {
        let Destination { context, peer, .. } = &*self.destination;
        let state = lock(&self.state);
        if state.over {
            return;
        }
        if !context.settings.may_use_tcp() {
            drop(state);
            return self.fail(error.to_string(), Answer::None);
        }
        let (device, label) = (context.device.name(), &context.label);
        context.log.warn(&format!(
            "evenkeel: TCP carries the connection to {peer}, since RDMA from {device} cannot: {error} {label}"
        ));
        self.use_tcp(state);
    }

    /// Begins anew, as if this side had no RDMA.
    fn use_tcp(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        state.by_rdma = false;
        state.calls.clear();
        if let Err(error) = self.call(&mut state) {
            drop(state);
            self.fail(error.to_string(), Answer::None);
        }
    }

    /// Ends the attempt with an error, unless it is over; with what the listener said.
    fn fail(&self, what: String, answer: Answer) {
        if lock(&self.state).over {
            return;
        }
        let Destination { context, peer, .. } = &*self.destination;
        let Context { log, device, label, .. } = context;
        let message = format!("connect to {peer} from {} failed: {what} {label}", device.name());
        let mut error = Error::new(ErrorKind::Remote, message).with_answer(answer);
        if !self.quiet {
            log.warn(&format!("evenkeel: {error}"));
            error = error.mark_logged();
        }
        self.finish(Some(Err(error)));
    }

    /// Ends the attempt, unless it is over, and leaves an outcome to be polled, or takes the one
    /// that nobody has polled.
    fn finish(&self, outcome: Option<Outcome>) -> Option<Outcome> {
        let (calls, agreeing, unclaimed) = {
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
            (std::mem::take(&mut state.calls), state.agreeing.take(), unclaimed)
        };
        for call in calls {
            call.take_socket();
        }
        if let Some(sender) = agreeing {
            sender.close();
        }
        unclaimed
    }
}

impl Caller for Attempt {
    fn welcomed(self: Arc<Self>, flow: u32, socket: Socket) {
        let sockets = {
            let mut state = lock(&self.state);
            if state.over {
                return;
            }
            if state.by_rdma {
                drop(state);
                return self.agree(socket);
            }
            if let Some(place) = state.welcomed.get_mut(flow as usize) {
                *place = Some(socket);
            }
            if state.welcomed.iter().any(Option::is_none) {
                return;
            }
            std::mem::take(&mut state.welcomed).into_iter().flatten().collect()
        };
        let outcome = Sender::open(Arc::clone(&self.destination), sockets)
            .map(|sender| sender as Arc<dyn Outbound>)
            .map_err(|error| Error::system("cannot watch a connection", &error));
        self.finish(Some(outcome));
    }

    fn not_welcomed(self: Arc<Self>, _flow: u32, error: CallError) {
        let settings = &self.destination.context.settings;
        let welcomed = {
            let state = lock(&self.state);
            if state.over {
                return;
            }
            if state.by_rdma && error.no_rdma && settings.may_use_tcp() {
                // The two sides have no RDMA in common.
                return self.use_tcp(state);
            }
            state.welcomed.iter().flatten().count()
        };
        let answer = error.answer;
        let what = if Instant::now() >= self.deadline {
            let limit = settings.connect_timeout.as_secs();
            format!("{welcomed} of {} flows answered within {limit} s", settings.flows)
        } else {
            error.what
        };
        self.fail(what, answer);
    }
}
