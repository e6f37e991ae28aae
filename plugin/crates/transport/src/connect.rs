//! The connecting side of a new connection.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use evenkeel_wire::{ConnectionId, Handle};
use socket2::Socket;

use crate::Context;
use crate::call::{Call, CallError, Caller, Destination};
use crate::engine::Engine;
use crate::error::{Error, ErrorKind};
use crate::send::{SendConnection, Sender};
use crate::sys::{self, lock};

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
    /// What came of it, until it is taken.
    outcome: Option<Result<Arc<Sender>, Error>>,
    /// No more is to come: succeeded, failed or given up.
    over: bool,
}

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
                outcome: None,
                over: false,
            }),
        });
        // From here on, dropping it on an error ends what has begun.
        let connecting = Self { attempt, engine };
        {
            // The lock keeps outcomes back until all calls are noted.
            let mut state = lock(&connecting.attempt.state);
            for flow in 0..flows.into() {
                let attempt = &connecting.attempt;
                let caller = Arc::<Attempt>::clone(attempt);
                let call = Call::start(&attempt.destination, caller, flow, deadline);
                state.calls.push(call.map_err(fail)?);
            }
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
            drop(SendConnection::new(sender, Arc::clone(&self.engine)));
        }
    }
}

impl Attempt {
    /// Ends the attempt, unless it is over, and leaves an outcome to be polled, or takes the one
    /// that nobody has polled.
    fn finish(
        &self,
        outcome: Option<Result<Arc<Sender>, Error>>,
    ) -> Option<Result<Arc<Sender>, Error>> {
        let (calls, unclaimed) = {
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
            (std::mem::take(&mut state.calls), unclaimed)
        };
        for call in calls {
            call.take_socket();
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
            if let Some(place) = state.welcomed.get_mut(flow as usize) {
                *place = Some(socket);
            }
            if state.welcomed.iter().any(Option::is_none) {
                return;
            }
            std::mem::take(&mut state.welcomed).into_iter().flatten().collect()
        };
        let outcome = Sender::open(Arc::clone(&self.destination), sockets)
            .map_err(|error| Error::system("cannot watch a connection", &error));
        self.finish(Some(outcome));
    }

    fn not_welcomed(self: Arc<Self>, _flow: u32, error: CallError) {
        let Destination { context, peer, .. } = &*self.destination;
        let Context { log, device, label, settings, .. } = context;
        let welcomed = {
            let state = lock(&self.state);
            if state.over {
                return;
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
        let message = format!("connect to {peer} from {} failed: {what} {label}", device.name());
        let mut error = Error::new(ErrorKind::Remote, message).with_answer(answer);
        if !self.quiet {
            log.warn(&format!("evenkeel: {error}"));
            error = error.mark_logged();
        }
        self.finish(Some(Err(error)));
    }
}
