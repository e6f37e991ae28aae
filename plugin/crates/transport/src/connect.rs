//! The connecting side of the handshake.

use std::io::{self, Read};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use evenkeel_wire::{ConnectionId, Handle, Hello, WELCOME_BYTES, Welcome};
use socket2::{Domain, Socket, Type};

use crate::Context;
use crate::base::{not_now, prepare};
use crate::engine::{Engine, Readiness, Registration, Source, Workers};
use crate::error::{Error, ErrorKind};
use crate::send::{SendConnection, Sender};
use crate::sys::{self, lock};

/// An attempt to connect to a listener. Dropping it gives it up.
pub struct Connecting {
    attempt: Arc<Attempt>,
    engine: Arc<Engine>,
}

struct Attempt {
    context: Context,
    workers: Arc<Workers>,
    handle: Handle,
    connection: ConnectionId,
    /// The listener's address as this host reaches it.
    peer: SocketAddr,
    deadline: Instant,
    state: Mutex<State>,
}

struct State {
    callers: Vec<Arc<Caller>>,
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
    ) -> Result<Self, Error> {
        let peer = context.device.scoped(handle.addr);
        let what = format!("cannot connect to {peer} from {}", context.device.name());
        let fail = |error| Error::system(&what, &error);
        let connection = ConnectionId(sys::random().map_err(fail)?);
        let flows = context.settings.flows;
        let attempt = Arc::new(Attempt {
            deadline: Instant::now() + context.settings.connect_timeout,
            workers: Arc::clone(engine.workers()),
            context,
            handle: *handle,
            connection,
            peer,
            state: Mutex::new(State {
                callers: Vec::new(),
                welcomed: (0..flows).map(|_| None).collect(),
                outcome: None,
                over: false,
            }),
        });
        // From here on, dropping it on an error ends what has begun.
        let connecting = Self { attempt, engine };
        for flow in 0..flows {
            Caller::start(&connecting.attempt, flow).map_err(fail)?;
        }
        Ok(connecting)
    }

    /// The connection once all its flows are welcomed; `None` before. Never blocks. Not to be
    /// called again after it returned a connection or an error.
    ///
    /// # Errors
    /// [`ErrorKind::Remote`] when the listener cannot be reached, refuses, or has not answered
    /// within the connect timeout.
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
    /// Takes in a flow that has been welcomed.
    fn welcome(&self, flow: u16, socket: Socket) {
        let sockets = {
            let mut state = lock(&self.state);
            if state.over {
                return;
            }
            state.welcomed[usize::from(flow)] = Some(socket);
            if state.welcomed.iter().any(Option::is_none) {
                return;
            }
            std::mem::take(&mut state.welcomed).into_iter().flatten().collect()
        };
        let outcome = Sender::open(self.context.clone(), &self.workers, self.peer, sockets)
            .map_err(|error| Error::system("cannot watch a connection", &error));
        self.finish(Some(outcome));
    }

    fn fail(&self, what: &str) {
        let Context { log, device, label, .. } = &self.context;
        let message =
            format!("connect to {} from {} failed: {what} {label}", self.peer, device.name());
        if lock(&self.state).over {
            return;
        }
        log.warn(&format!("evenkeel: {message}"));
        self.finish(Some(Err(Error::new(ErrorKind::Remote, message).mark_logged())));
    }

    /// Ends the attempt, unless it is over, and leaves an outcome to be polled, or takes the one
    /// that nobody has polled.
    fn finish(
        &self,
        outcome: Option<Result<Arc<Sender>, Error>>,
    ) -> Option<Result<Arc<Sender>, Error>> {
        let (callers, unclaimed) = {
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
            (std::mem::take(&mut state.callers), unclaimed)
        };
        for caller in callers {
            caller.take_socket();
        }
        unclaimed
    }
}

/// One flow on its way to being welcomed.
struct Caller {
    attempt: Arc<Attempt>,
    flow: u16,
    registration: Registration,
    call: Mutex<Call>,
}

struct Call {
    /// `None` once the flow is welcomed or given up.
    socket: Option<Socket>,
    /// Whether TCP has connected and the hello is sent.
    hello_sent: bool,
    have: usize,
    welcome: [u8; WELCOME_BYTES],
}

impl Caller {
    fn start(attempt: &Arc<Attempt>, flow: u16) -> io::Result<()> {
        let kind = Type::STREAM.nonblocking().cloexec();
        let socket = Socket::new(Domain::for_address(attempt.peer), kind, None)?;
        prepare(&socket, &attempt.context)?;
        let local = attempt.context.device.local();
        if local.is_ipv4() == attempt.peer.is_ipv4() {
            // Packets must leave through the device that was asked for.
            sys::set_late_port(&socket)?;
            socket.bind(&local.into())?;
        }
        match socket.connect(&attempt.peer.into()) {
            Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => return Err(error),
            _ => {}
        }
        let call = Call { socket: None, hello_sent: false, have: 0, welcome: [0; WELCOME_BYTES] };
        let caller = Arc::new(Self {
            attempt: Arc::clone(attempt),
            flow,
            registration: attempt.workers.registration(),
            call: Mutex::new(call),
        });
        lock(&attempt.state).callers.push(Arc::clone(&caller));
        // The lock keeps the worker from the socket until it is in place.
        let mut call = lock(&caller.call);
        caller.registration.watch(&socket, Arc::<Self>::clone(&caller))?;
        call.socket = Some(socket);
        Ok(())
    }

    fn take_socket(&self) -> Option<Socket> {
        let socket = lock(&self.call).socket.take()?;
        self.registration.end(&socket);
        Some(socket)
    }

    /// Does the next step that is possible; the text says what went wrong.
    fn step(&self, readiness: Readiness) -> Result<(), String> {
        let attempt = &self.attempt;
        let mut call = lock(&self.call);
        let Call { socket: Some(socket), hello_sent, have, welcome } = &mut *call else {
            return Ok(());
        };
        if let Some(error) = socket.take_error().map_err(|error| error.to_string())? {
            return Err(error.to_string());
        }
        if !*hello_sent {
            if !readiness.writable {
                return Ok(());
            }
            let hello = Hello {
                nonce: attempt.handle.nonce,
                connection: attempt.connection,
                flow: self.flow,
                flows: attempt.context.settings.flows,
            };
            let hello = hello.encode();
            match socket.send_with_flags(&hello, libc::MSG_NOSIGNAL) {
                Ok(written) if written == hello.len() => *hello_sent = true,
                Ok(_) => return Err("a new socket has no room for the hello".to_owned()),
                Err(error) if not_now(&error) => return Ok(()),
                Err(error) => return Err(error.to_string()),
            }
        }
        while *have < WELCOME_BYTES {
            match sys::uninterrupted(|| (&*socket).read(&mut welcome[*have..])) {
                Ok(0) => return Err("the listener closed the connection".to_owned()),
                Ok(received) => *have += received,
                Err(error) if not_now(&error) => return Ok(()),
                Err(error) => return Err(error.to_string()),
            }
        }
        Welcome::check(welcome, attempt.connection).map_err(|error| error.to_string())?;
        drop(call);
        if let Some(socket) = self.take_socket() {
            attempt.welcome(self.flow, socket);
        }
        Ok(())
    }
}

impl Source for Caller {
    fn ready(&self, readiness: Readiness) {
        if let Err(what) = self.step(readiness) {
            self.attempt.fail(&what);
        }
    }

    fn tick(&self, now: Instant) {
        let attempt = &self.attempt;
        if now >= attempt.deadline {
            let welcomed = lock(&attempt.state).welcomed.iter().flatten().count();
            let settings = &attempt.context.settings;
            attempt.fail(&format!(
                "{welcomed} of {} flows answered within {} s",
                settings.flows,
                settings.connect_timeout.as_secs()
            ));
        }
    }

    fn abandoned(&self, why: &str) {
        self.attempt.fail(why);
    }
}
