//! How a client gets to its servers: names are resolved, each server is called, told who is there, and calls back.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use evenkeel_transport::{
    Answer, Block, Connecting, Error, Handle, Listener, MemoryTypes, Receiving, RecvConnection,
    SendConnection, Sending, Transport,
};

use super::ClientError;
use crate::lock;
use crate::packet::{MESSAGE_BYTES, Member, NONCE, Packet};

/// How long to wait before the first look whether a server has answered; doubled for each further one, up to the limit.
const FIRST_LOOK: Duration = Duration::from_micros(100);
const LAST_LOOK: Duration = Duration::from_millis(10);
/// How long to wait before a server is tried again.
const PAUSE: Duration = Duration::from_millis(200);

/// A server that has an address and takes no connection for so long is not waited for any longer: its process may be about
/// to start, but who waits has other ways to reduce. One whose name has no address yet is still to come.
const REACH: Duration = Duration::from_secs(3);

/// Knows how to call one server.
pub(crate) struct Caller {
    pub(super) transport: Arc<Transport>,
    pub(super) device: usize,
    /// `host:port`, for people.
    pub(super) name: String,
    pub(super) address: SocketAddr,
    pub(super) label: String,
    /// Of the connection.
    pub(super) flows: usize,
    /// How long it may be out of reach.
    pub(crate) timeout: Duration,
}

impl Caller {
    /// Begins to connect to the server.
    pub(crate) fn call(&self) -> Result<Connecting, Error> {
        let addresses = vec![self.address.ip()];
        let handle = Handle { addresses, port: self.address.port(), nonce: NONCE };
        self.transport.try_connect(self.device, &handle, &self.label, self.flows)
    }

    /// An error that names the server.
    pub(crate) fn error(&self, what: &str) -> ClientError {
        ClientError::new(format!("reduction server {}: {what}", self.name))
    }
}

/// A server that was joined.
pub(crate) struct Joined {
    pub(crate) caller: Caller,
    pub(crate) up: SendConnection,
    pub(crate) down: RecvConnection,
    /// Largest piece that it takes, in bytes: a multiple of 128.
    pub(crate) chunk: usize,
    /// Most pieces on their way.
    pub(crate) window: usize,
}

/// A server on the way to being joined.
struct Attempt {
    name: String,
    stage: Stage,
    /// When it was first called.
    called: Option<Instant>,
    /// Whether it is known to be there.
    reached: bool,
    /// What failed last.
    last: String,
    /// How often it has failed: which of several addresses is next.
    failures: usize,
}

enum Stage {
    /// Not before this time.
    Pause(Instant),
    /// It is being called.
    Call(Caller, Listener, Connecting),
    /// It has been told who is there, and is to call back.
    Greet(Caller, Listener, SendConnection, Sending),
    /// It is to say what it takes.
    Hear(Caller, SendConnection, RecvConnection, Receiving),
    /// It was joined.
    Done(Joined),
}

/// Joins at all servers.
///
/// # Errors
/// Names the first server that refused, or those that were not reached, or had not let the rank in, in time.
pub(crate) fn join(
    transport: &Arc<Transport>,
    device: usize,
    servers: &[String],
    member: &Member,
    timeout: Duration,
) -> Result<Vec<Joined>, ClientError> {
    let start = Instant::now();
    let names = Names::resolve(servers);
    // A rank's flows are spread over as many paths whether they go to one host or to several, and each has its price: pieces
    // go in order, so that one on a slow flow holds up those that came on others.
    let flows = (transport.settings().flows() / servers.len().max(1)).max(1);
    let mut attempts: Vec<Attempt> = servers
        .iter()
        .map(|name| Attempt {
            name: name.clone(),
            stage: Stage::Pause(start),
            called: None,
            reached: false,
            last: "its name is not resolved yet".to_owned(),
            failures: 0,
        })
        .collect();
    let mut look = FIRST_LOOK;
    loop {
        let mut all = true;
        for (index, attempt) in attempts.iter_mut().enumerate() {
            let way = Way { transport, device, member, flows, timeout, names: &names, index };
            attempt.step(&way)?;
            all &= attempt.is_done();
        }
        if all {
            break;
        }
        let reach = REACH.min(timeout);
        missing(&attempts, |attempt| attempt.is_out_of_reach(reach), "not reached", reach)?;
        if start.elapsed() >= timeout {
            missing(&attempts, |attempt| !attempt.is_done(), "not joined", timeout)?;
        }
        thread::sleep(look);
        look = (2 * look).min(LAST_LOOK);
    }
    let joined = attempts.into_iter().filter_map(|attempt| match attempt.stage {
        Stage::Done(joined) => Some(joined),
        _ => None,
    });
    Ok(joined.collect())
}

/// Fails if there are such servers, naming them.
fn missing(
    attempts: &[Attempt],
    is_missing: impl Fn(&Attempt) -> bool,
    what: &str,
    within: Duration,
) -> Result<(), ClientError> {
    let all: Vec<String> = attempts
        .iter()
        .filter(|attempt| is_missing(attempt))
        .map(|attempt| format!("{} ({})", attempt.name, attempt.trouble()))
        .collect();
    if all.is_empty() {
        return Ok(());
    }
    Err(ClientError::new(format!("{what} within {within:?}: reduction server {}", all.join(", "))))
}

/// What an attempt needs.
struct Way<'a> {
    transport: &'a Arc<Transport>,
    device: usize,
    member: &'a Member,
    flows: usize,
    timeout: Duration,
    names: &'a Names,
    index: usize,
}

impl Way<'_> {
    fn call(&self, name: &str, address: SocketAddr) -> Result<Stage, Error> {
        let label = format!("comm={:#x}", self.member.communicator);
        let listener = self.transport.listen(self.device, &label, MemoryTypes::HOST)?;
        let caller = Caller {
            transport: Arc::clone(self.transport),
            device: self.device,
            name: name.to_owned(),
            address,
            label,
            flows: self.flows,
            timeout: self.timeout,
        };
        let call = caller.call()?;
        Ok(Stage::Call(caller, listener, call))
    }
}

impl Attempt {
    fn is_done(&self) -> bool {
        matches!(self.stage, Stage::Done(_))
    }

    /// Whether it has been called for so long, in vain.
    fn is_out_of_reach(&self, reach: Duration) -> bool {
        !self.reached && self.called.is_some_and(|called| called.elapsed() >= reach)
    }

    /// What it waits for, or what failed last.
    fn trouble(&self) -> &str {
        match self.stage {
            Stage::Call(..) if self.failures == 0 => "it does not answer",
            Stage::Greet(..) => "it does not call back: can it reach this host?",
            Stage::Hear(..) => "it does not say whether this rank is welcome",
            Stage::Pause(_) | Stage::Call(..) | Stage::Done(_) => &self.last,
        }
    }

    /// Does the next step if it is possible.
    ///
    /// # Errors
    /// When the server refuses: it would again.
    fn step(&mut self, way: &Way<'_>) -> Result<(), ClientError> {
        let stage = std::mem::replace(&mut self.stage, Stage::Pause(Instant::now()));
        match self.next(stage, way) {
            Ok(stage) => {
                if matches!(stage, Stage::Call(..)) {
                    self.called.get_or_insert_with(Instant::now);
                }
                self.reached |= matches!(stage, Stage::Greet(..));
                self.stage = stage;
            }
            Err(trouble) => {
                self.reached |= matches!(trouble, Trouble::Busy(_));
                self.last = match trouble {
                    Trouble::Again(why) | Trouble::Busy(why) => why,
                    Trouble::Final(error) => return Err(error),
                };
                self.failures += 1;
                self.stage = Stage::Pause(Instant::now() + PAUSE);
            }
        }
        Ok(())
    }

    fn next(&self, stage: Stage, way: &Way<'_>) -> Result<Stage, Trouble> {
        Ok(match stage {
            Stage::Pause(until) if Instant::now() < until => Stage::Pause(until),
            Stage::Pause(until) => match way.names.of(way.index) {
                None => Stage::Pause(until),
                Some(Err(why)) => return Err(Trouble::Again(why)),
                Some(Ok(addresses)) => {
                    let address = addresses.get(self.failures % addresses.len().max(1));
                    let address =
                        address.ok_or_else(|| Trouble::Again("it has no address".to_owned()))?;
                    way.call(&self.name, *address)?
                }
            },
            Stage::Call(caller, listener, call) => match call.poll() {
                Err(error) => {
                    let why = error.to_string();
                    return Err(match error.answer() {
                        Answer::None => Trouble::Again(why),
                        Answer::Later => Trouble::Busy(why),
                        Answer::Never => Trouble::Final(caller.error(&why)),
                    });
                }
                Ok(None) => Stage::Call(caller, listener, call),
                Ok(Some(up)) => {
                    let join = Packet::Join(way.member.at(way.index), listener.handle().clone());
                    let mut block = Block::new(MESSAGE_BYTES);
                    let length = join.encode(block.bytes_mut());
                    match up.send_block(&Arc::new(block), length)? {
                        None => return Err(Trouble::Again("a new connection is full".to_owned())),
                        Some(sending) => Stage::Greet(caller, listener, up, sending),
                    }
                }
            },
            Stage::Greet(caller, listener, up, mut sending) => match listener.poll_accept()? {
                None => {
                    sending.poll(false)?;
                    Stage::Greet(caller, listener, up, sending)
                }
                Some(down) => match down.recv_block(Block::new(MESSAGE_BYTES), MESSAGE_BYTES)? {
                    Ok(head) => Stage::Hear(caller, up, down, head),
                    Err(_) => return Err(Trouble::Again("a new connection is full".to_owned())),
                },
            },
            Stage::Hear(caller, up, down, mut head) => match head.poll(true)? {
                None => Stage::Hear(caller, up, down, head),
                Some((block, length)) => {
                    let message = block.bytes().get(..length).unwrap_or_default();
                    match Packet::decode(message) {
                        Ok(Packet::Joined { chunk, window }) => {
                            // Whatever it says, messages fit and memory is no more than asked for.
                            let chunk = (chunk as usize / 128 * 128).clamp(128, 1 << 30);
                            let window = window.clamp(1, 15) as usize;
                            Stage::Done(Joined { caller, up, down, chunk, window })
                        }
                        Ok(Packet::Failed(why)) => {
                            return Err(Trouble::Final(caller.error(&format!("refused: {why}"))));
                        }
                        Ok(other) => {
                            let why = format!("it answers {other:?} to a join");
                            return Err(Trouble::Final(caller.error(&why)));
                        }
                        Err(error) => {
                            return Err(Trouble::Final(caller.error(&error.to_string())));
                        }
                    }
                }
            },
            Stage::Done(joined) => Stage::Done(joined),
        })
    }
}

enum Trouble {
    /// It may go better next time.
    Again(String),
    /// The same, and the server is there: it had no time or no room.
    Busy(String),
    /// It will not.
    Final(ClientError),
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Self::Again(error.to_string())
    }
}

/// The servers' addresses, looked up by a thread of its own: a name server may take its time.
struct Names {
    known: Arc<Mutex<Vec<Lookup>>>,
    stop: Arc<AtomicBool>,
}

/// What is known of a name; `None` before there is an answer.
type Lookup = Option<Result<Vec<SocketAddr>, String>>;

impl Names {
    fn resolve(servers: &[String]) -> Self {
        let literal: Vec<Lookup> = servers
            .iter()
            .map(|server| server.parse::<SocketAddr>().ok().map(|address| Ok(vec![address])))
            .collect();
        let unknown: Vec<(usize, String)> = servers
            .iter()
            .cloned()
            .enumerate()
            .filter(|(index, _)| literal[*index].is_none())
            .collect();
        let names = Self { known: Arc::new(Mutex::new(literal)), stop: Arc::default() };
        if unknown.is_empty() {
            return names;
        }
        let (known, stop) = (Arc::clone(&names.known), Arc::clone(&names.stop));
        let work = move || {
            // Again and again: the name of a server that is not there yet comes with it, and may then change.
            while !stop.load(Ordering::Relaxed) {
                for (index, server) in &unknown {
                    let answer = server.to_socket_addrs().map(Iterator::collect);
                    let answer = answer.map_err(|error| format!("name lookup: {error}"));
                    lock(&known)[*index] = Some(answer);
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                }
                thread::sleep(PAUSE);
            }
        };
        if let Err(error) = thread::Builder::new().name("evenkeel-names".to_owned()).spawn(work) {
            let why = format!("cannot start a thread: {error}");
            lock(&names.known)
                .iter_mut()
                .filter(|answer| answer.is_none())
                .for_each(|answer| *answer = Some(Err(why.clone())));
        }
        names
    }

    fn of(&self, index: usize) -> Lookup {
        lock(&self.known)[index].clone()
    }
}

impl Drop for Names {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
