//! How a client gets to its servers: names are resolved, each server is called, told who is there, and calls back.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use evenkeel_transport::{
    Block, Connecting, Error, Handle, Listener, Receiving, RecvConnection, SendConnection, Sending,
    Transport,
};

use super::ClientError;
use super::link::Link;
use crate::lock;
use crate::packet::{MESSAGE_BYTES, Member, NONCE, Packet};

/// How long to wait before the first look whether a server has answered; doubled for each further one, up to the limit.
const FIRST_LOOK: Duration = Duration::from_micros(100);
const LAST_LOOK: Duration = Duration::from_millis(10);
/// How long to wait before a server is tried again.
const PAUSE: Duration = Duration::from_millis(200);

/// Knows how to call one server.
pub(super) struct Caller {
    transport: Arc<Transport>,
    device: usize,
    /// `host:port`, for people.
    name: String,
    address: SocketAddr,
    label: String,
    /// How long it may be out of reach.
    pub(super) timeout: Duration,
}

impl Caller {
    /// Begins to connect to the server.
    pub(super) fn call(&self) -> Result<Connecting, Error> {
        let addresses = vec![self.address.ip()];
        let handle = Handle { addresses, port: self.address.port(), nonce: NONCE };
        self.transport.try_connect(self.device, &handle, &self.label)
    }

    /// An error that names the server.
    pub(super) fn error(&self, what: &str) -> ClientError {
        ClientError(format!("reduction server {}: {what}", self.name))
    }
}

/// A server on the way to being joined.
struct Attempt {
    name: String,
    stage: Stage,
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
    Done(Link),
}

/// Joins at all servers.
///
/// # Errors
/// Names the first server that refused, or one that was not reached in time.
pub(super) fn join(
    transport: &Arc<Transport>,
    device: usize,
    servers: &[String],
    member: &Member,
    timeout: Duration,
) -> Result<Vec<Link>, ClientError> {
    let deadline = Instant::now() + timeout;
    let names = Names::resolve(servers);
    let mut attempts: Vec<Attempt> = Vec::new();
    for name in servers {
        let stage = Stage::Pause(Instant::now());
        let (name, last) = (name.clone(), "its name is not resolved yet".to_owned());
        attempts.push(Attempt { name, stage, last, failures: 0 });
    }
    let mut look = FIRST_LOOK;
    loop {
        let mut all = true;
        for (index, attempt) in attempts.iter_mut().enumerate() {
            let way = Way { transport, device, member, timeout, names: &names, index };
            attempt.step(&way)?;
            all &= matches!(attempt.stage, Stage::Done(_));
        }
        if all {
            break;
        }
        if Instant::now() >= deadline {
            let unreached = attempts.iter().filter(|a| !matches!(a.stage, Stage::Done(_)));
            let what: Vec<String> =
                unreached.map(|attempt| format!("{} ({})", attempt.name, attempt.why())).collect();
            return Err(ClientError(format!(
                "not reached within {} s: reduction server {}",
                timeout.as_secs(),
                what.join(", ")
            )));
        }
        thread::sleep(look);
        look = (2 * look).min(LAST_LOOK);
    }
    let links = attempts.into_iter().filter_map(|attempt| match attempt.stage {
        Stage::Done(link) => Some(link),
        _ => None,
    });
    Ok(links.collect())
}

/// What an attempt needs.
struct Way<'a> {
    transport: &'a Arc<Transport>,
    device: usize,
    member: &'a Member,
    timeout: Duration,
    names: &'a Names,
    index: usize,
}

impl Way<'_> {
    fn call(&self, name: &str, address: SocketAddr) -> Result<Stage, Error> {
        let label = format!("comm={:#x}", self.member.communicator);
        let listener = self.transport.listen(self.device, &label)?;
        let caller = Caller {
            transport: Arc::clone(self.transport),
            device: self.device,
            name: name.to_owned(),
            address,
            label,
            timeout: self.timeout,
        };
        let call = caller.call()?;
        Ok(Stage::Call(caller, listener, call))
    }
}

impl Attempt {
    /// Why it is not done.
    fn why(&self) -> String {
        match &self.stage {
            Stage::Pause(_) | Stage::Done(_) => self.last.clone(),
            Stage::Call(caller, ..) => format!("no answer from {}", caller.address),
            Stage::Greet(caller, listener, ..) => format!(
                "{} answers and does not call back: can it connect to {}?",
                caller.address,
                listener.address()
            ),
            Stage::Hear(caller, ..) => {
                format!("{} has called back and says nothing", caller.address)
            }
        }
    }

    /// Does the next step if it is possible.
    ///
    /// # Errors
    /// When the server refuses: it would again.
    fn step(&mut self, way: &Way<'_>) -> Result<(), ClientError> {
        let stage = std::mem::replace(&mut self.stage, Stage::Pause(Instant::now()));
        match self.next(stage, way) {
            Ok(stage) => self.stage = stage,
            Err(Trouble::Final(error)) => return Err(error),
            Err(Trouble::Again(why)) => {
                self.last = why;
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
            Stage::Call(caller, listener, call) => match call.poll()? {
                None => Stage::Call(caller, listener, call),
                Some(up) => {
                    let join = Packet::Join(way.member.clone(), listener.handle().clone());
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
                            Stage::Done(Link::new(caller, up, down, chunk, window))
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
            Stage::Done(link) => Stage::Done(link),
        })
    }
}

enum Trouble {
    /// It may go better next time.
    Again(String),
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
    known: Arc<Mutex<Vec<Answer>>>,
    stop: Arc<AtomicBool>,
}

/// What is known of a name; `None` before there is an answer.
type Answer = Option<Result<Vec<SocketAddr>, String>>;

impl Names {
    fn resolve(servers: &[String]) -> Self {
        let literal: Vec<Answer> = servers
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

    fn of(&self, index: usize) -> Answer {
        lock(&self.known)[index].clone()
    }
}

impl Drop for Names {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}
