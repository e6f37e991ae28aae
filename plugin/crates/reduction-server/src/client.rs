//! One rank of a communicator at its reduction servers.
//!
//! An operation's vector is cut into one range per server, and each range into pieces. A piece is sent to its server and
//! comes back reduced, straight into the caller's memory. Many pieces are on their way at a time, of one operation or of
//! several.

mod link;
mod pulse;
mod split;
mod way_in;
mod window;

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use evenkeel_reduction_kernels::{DataType, Op};
use evenkeel_transport::{RecvBuffer, SendBuffer, Transport};

use crate::lock;
use crate::packet::{Member, Piece};
use crate::timeline::Timeline;
use link::{Link, Range};
pub(crate) use pulse::Pulse;
pub(crate) use way_in::{Caller, Joined, join};

/// Most operations that are not done.
const MAX_OPERATIONS: usize = 64;
/// How long the other servers may take to hear why this rank cannot go on.
const FAREWELL: Duration = Duration::from_secs(1);

/// What went wrong, and at which server.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct ClientError(String);

impl ClientError {
    pub(crate) fn new(text: String) -> Self {
        Self(text)
    }
}

/// An operation that was begun.
#[derive(Debug)]
pub struct Ticket(u64);

/// A rank at its servers. Dropping it leaves them, at once and whatever is in flight; no buffer is touched afterwards.
pub struct Client {
    state: Mutex<State>,
}

struct State {
    /// By server; none once it has failed.
    links: Vec<Link>,
    sequence: u64,
    /// Most servers that an operation is cut over.
    split: usize,
    /// Ranges that are not done, by operation.
    running: HashMap<u64, usize>,
    /// Why it is about to fail, and since when: other servers are being told.
    failing: Option<(ClientError, Instant)>,
    failed: Option<ClientError>,
}

impl Client {
    /// Joins a communicator at all servers, `host:port` each, over a device. Blocks until all have answered, at most for
    /// `timeout`. A server that cannot be reached is tried again for 3 seconds; one that refuses is not.
    ///
    /// # Errors
    /// Names the servers that could not be reached, or the first one that refused.
    pub fn join(
        transport: &Arc<Transport>,
        device: usize,
        servers: &[String],
        member: &Member,
        timeout: Duration,
    ) -> Result<Self, ClientError> {
        let timeline = match transport.settings().reduction_timeline() {
            None => None,
            Some(path) => {
                let path = format!("{path}.{}", std::process::id());
                let opened = Timeline::open(Path::new(&path));
                let opened = opened.map_err(|error| ClientError(format!("{path}: {error}")))?;
                Some(Arc::new(opened))
            }
        };
        let joined = join(transport, device, servers, member, timeout)?;
        let links = joined.into_iter().map(|joined| Link::new(joined, timeline.clone())).collect();
        let running = HashMap::new();
        let split = transport.settings().reduction_split();
        let state = State { links, sequence: 0, split, running, failing: None, failed: None };
        Ok(Self { state: Mutex::new(state) })
    }

    /// Begins to reduce what all ranks have at `from`; the result goes to `to`, which must be as long and elsewhere. All
    /// ranks must begin the same operations in the same order. `None` when too many are not done: try again later. Never
    /// blocks.
    ///
    /// # Errors
    /// When the buffers do not fit, and when some server or rank was lost before.
    pub fn all_reduce(
        &self,
        from: SendBuffer,
        to: RecvBuffer,
        kind: DataType,
        op: Op,
    ) -> Result<Option<Ticket>, ClientError> {
        let total = from.length();
        if to.length() != total || !total.is_multiple_of(kind.bytes()) {
            return Err(ClientError(format!(
                "an all-reduce of {total} bytes of {kind:?} into {} bytes",
                to.length()
            )));
        }
        let mut state = lock(&self.state);
        state.check()?;
        if state.failing.is_some() {
            return state.progress().map(|()| None);
        }
        if state.running.len() >= MAX_OPERATIONS {
            return Ok(None);
        }
        let sequence = state.sequence;
        state.sequence += 1;
        let ranges = split::ranges(sequence, total, state.links.len(), state.split);
        state.running.insert(sequence, ranges.len());
        for (server, range) in ranges {
            let piece = Piece { sequence, offset: 0, total: total as u64, length: 0, kind, op };
            let link = &mut state.links[server];
            link.push(Range { piece, at: range.start, end: range.end, from, to });
        }
        state.progress()?;
        Ok(Some(Ticket(sequence)))
    }

    /// Whether the operation is done. Moves what can be moved of all operations. Never blocks.
    ///
    /// # Errors
    /// When some server or rank was lost. No operation goes on then, and no buffer is touched any more.
    pub fn test(&self, ticket: &Ticket) -> Result<bool, ClientError> {
        let mut state = lock(&self.state);
        if !state.is_done(ticket) {
            state.check()?;
            state.progress()?;
        }
        let done = state.is_done(ticket);
        if done {
            state.running.remove(&ticket.0);
        }
        Ok(done)
    }
}

impl State {
    fn check(&self) -> Result<(), ClientError> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    fn is_done(&self, ticket: &Ticket) -> bool {
        self.running.get(&ticket.0).is_none_or(|left| *left == 0)
    }

    fn progress(&mut self) -> Result<(), ClientError> {
        let now = Instant::now();
        if self.failing.is_none() {
            let mut failure = None;
            for (server, link) in self.links.iter_mut().enumerate() {
                let running = &mut self.running;
                let done = |sequence| {
                    if let Some(left) = running.get_mut(&sequence) {
                        *left -= 1;
                    }
                };
                if let Err(error) = link.progress(now, done) {
                    failure = Some((server, error));
                    break;
                }
            }
            let Some((server, error)) = failure else { return Ok(()) };
            drop(self.links.remove(server));
            // Other ranks hear why from the other servers, not only that this one is gone.
            self.links.iter_mut().for_each(|link| link.tell(&error));
            self.failing = Some((error, now));
        }
        let all_told = self.links.iter_mut().all(Link::is_told);
        match &self.failing {
            Some((error, since))
                if all_told || now.saturating_duration_since(*since) >= FAREWELL =>
            {
                // Connections must not touch memory that the caller takes back now.
                self.links.clear();
                self.failed = Some(error.clone());
                Err(error.clone())
            }
            _ => Ok(()),
        }
    }
}
