//! One rank of a communicator at its reduction servers.
//!
//! An operation's vector is split into one range per server, and each range into pieces. A piece is
//! sent to its server, and the reduced piece is received straight into the caller's memory. Many
//! pieces are in flight at a time, of one operation or of several.

mod dialer;
mod join;
mod liveness;
mod resolver;
mod server_link;
mod split;
mod window;

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use evenkeel_reduction_kernels::{DataType, Op};
use evenkeel_transport::sync::lock;
use evenkeel_transport::{RecvBuffer, SendBuffer, Transport};

pub use dialer::Dialer;
pub use join::{JoinedServer, join};
pub use liveness::Liveness;

use crate::error::ClientError;
use crate::protocol::{Member, Piece};
use crate::settings::Settings;
use crate::timeline::Timeline;
use server_link::{Range, ServerLink};

/// Maximum number of outstanding operations.
const MAX_OPERATIONS: usize = 64;
/// How long to report a failure to the other servers before the client closes its connections.
const REPORT_TIMEOUT: Duration = Duration::from_secs(1);

/// An outstanding operation.
#[derive(Debug)]
pub struct Ticket(u64);

/// A rank at its servers. Dropping it leaves them at once, whatever is in flight; no buffer is
/// touched afterwards.
pub struct Client {
    state: Mutex<State>,
}

struct State {
    /// By server; empty once the client has failed.
    links: Vec<ServerLink>,
    sequence: u64,
    /// Maximum number of servers that an operation is split over.
    split: usize,
    /// Number of ranges that are not complete, by operation.
    outstanding: HashMap<u64, usize>,
    /// The failure while it is reported to the other servers, and since when.
    reporting: Option<(ClientError, Instant)>,
    failed: Option<ClientError>,
}

impl Client {
    /// Joins a communicator at all servers of the settings, over a device. Blocks until all have
    /// answered, at most for the timeout. A server that cannot be reached is retried for 3 seconds;
    /// one that refuses is not.
    ///
    /// # Errors
    /// Names the servers that could not be reached, or the first one that refused.
    pub fn join(
        transport: &Arc<Transport>,
        device: usize,
        member: &Member,
        settings: &Settings,
    ) -> Result<Self, ClientError> {
        let timeline = match &settings.timeline {
            None => None,
            Some(path) => {
                let path = format!("{path}.{}", std::process::id());
                let opened = Timeline::open(Path::new(&path));
                let error = |error| ClientError::new(format!("{path}: {error}"));
                Some(Arc::new(opened.map_err(error)?))
            }
        };
        let joined = join(transport, device, &settings.servers, member, settings.timeout)?;
        let links =
            joined.into_iter().map(|server| ServerLink::new(server, timeline.clone())).collect();
        let outstanding = HashMap::new();
        let split = settings.split;
        let state = State { links, sequence: 0, split, outstanding, reporting: None, failed: None };
        Ok(Self { state: Mutex::new(state) })
    }

    /// Begins an all-reduce of the vector at `from`. The result is written to `to`, which has the
    /// same length and does not overlap it. All ranks must begin the same operations in the same
    /// order. Returns `None` when too many operations are outstanding: try again later. Never
    /// blocks.
    ///
    /// # Errors
    /// When the buffers do not fit, and when a server or rank was lost before.
    pub fn all_reduce(
        &self,
        from: SendBuffer,
        to: RecvBuffer,
        kind: DataType,
        op: Op,
    ) -> Result<Option<Ticket>, ClientError> {
        let total = from.length();
        if to.length() != total || !total.is_multiple_of(kind.bytes()) {
            return Err(ClientError::new(format!(
                "an all-reduce of {total} bytes of {kind:?} into {} bytes",
                to.length()
            )));
        }
        let mut state = lock(&self.state);
        state.check()?;
        if state.reporting.is_some() {
            return state.progress().map(|()| None);
        }
        if state.outstanding.len() >= MAX_OPERATIONS {
            return Ok(None);
        }
        let sequence = state.sequence;
        state.sequence += 1;
        let ranges = split::ranges(sequence, total, state.links.len(), state.split);
        state.outstanding.insert(sequence, ranges.len());
        for (server, range) in ranges {
            let piece = Piece { sequence, offset: 0, total: total as u64, length: 0, kind, op };
            let link = &mut state.links[server];
            link.push(Range { piece, at: range.start, end: range.end, from, to });
        }
        state.progress()?;
        Ok(Some(Ticket(sequence)))
    }

    /// Whether the operation is complete. Makes progress on all operations. Never blocks.
    ///
    /// # Errors
    /// When a server or rank was lost. All operations fail then, and no buffer is touched any more.
    pub fn test(&self, ticket: &Ticket) -> Result<bool, ClientError> {
        let mut state = lock(&self.state);
        if !state.is_complete(ticket) {
            state.check()?;
            state.progress()?;
        }
        let complete = state.is_complete(ticket);
        if complete {
            state.outstanding.remove(&ticket.0);
        }
        Ok(complete)
    }
}

impl State {
    fn check(&self) -> Result<(), ClientError> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    fn is_complete(&self, ticket: &Ticket) -> bool {
        self.outstanding.get(&ticket.0).is_none_or(|left| *left == 0)
    }

    fn progress(&mut self) -> Result<(), ClientError> {
        let now = Instant::now();
        if self.reporting.is_none() {
            let Err((server, error)) = self.progress_links(now) else { return Ok(()) };
            drop(self.links.remove(server));
            // The other servers report the reason to the other ranks, which otherwise only see that
            // this one is gone.
            self.links.iter_mut().for_each(|link| link.report_failure(&error));
            self.reporting = Some((error, now));
        }
        let all_reported = self.links.iter_mut().all(ServerLink::is_reported);
        match &self.reporting {
            Some((error, since))
                if all_reported || now.saturating_duration_since(*since) >= REPORT_TIMEOUT =>
            {
                // Connections must not touch memory that the caller gets back now.
                self.links.clear();
                self.failed = Some(error.clone());
                Err(error.clone())
            }
            _ => Ok(()),
        }
    }

    /// Makes progress at all servers. An error has the index of its server.
    fn progress_links(&mut self, now: Instant) -> Result<(), (usize, ClientError)> {
        for (server, link) in self.links.iter_mut().enumerate() {
            let outstanding = &mut self.outstanding;
            let done = |sequence| {
                if let Some(left) = outstanding.get_mut(&sequence) {
                    *left -= 1;
                }
            };
            link.progress(now, done).map_err(|error| (server, error))?;
        }
        Ok(())
    }
}
