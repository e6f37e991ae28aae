//! Joins the upstream servers, for communicators whose ranks are at several leaves.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use evenkeel_reduction::Member;
use evenkeel_reduction::client::{JoinedServer, join};
use evenkeel_transport::Transport;
use evenkeel_transport::sync::lock;

use crate::key::CommunicatorKey;
use crate::limits::ENDED_RETENTION;

/// Maximum number of communicators that are joining at a time, each in a thread of its own. Others
/// wait.
const MAX_JOINING: usize = 64;

/// The upstream servers of this server.
pub(crate) struct UpstreamServers {
    transport: Arc<Transport>,
    servers: Vec<String>,
    /// How long a server may not respond. Joining may take half of that: ranks wait for the whole,
    /// and are to receive the reason of a failure.
    timeout: Duration,
    joins: Mutex<HashMap<CommunicatorKey, Join>>,
}

/// One communicator's join.
struct Join {
    outcome: Arc<Mutex<Outcome>>,
    begun: Instant,
}

enum Outcome {
    Pending,
    Done(Result<Vec<JoinedServer>, String>),
    /// The communicator was given its connections.
    Taken,
}

impl UpstreamServers {
    pub(crate) fn new(transport: Arc<Transport>, servers: Vec<String>, timeout: Duration) -> Self {
        Self { transport, servers, timeout, joins: Mutex::default() }
    }

    /// Whether this server has no upstream.
    pub(crate) fn is_empty(&self) -> bool {
        self.servers.is_empty()
    }

    /// Joins the upstream servers for the communicator of a rank that connected over this device.
    /// Returns the connections once, and `None` before they are open.
    ///
    /// # Errors
    /// Why the communicator cannot join.
    pub(crate) fn join(
        &self,
        member: &Member,
        device: usize,
    ) -> Result<Option<Vec<JoinedServer>>, String> {
        let key = CommunicatorKey::of(member);
        let mut joins = lock(&self.joins);
        if let Some(join) = joins.get(&key) {
            return join.take();
        }
        if joins.values().filter(|join| join.is_pending()).count() < MAX_JOINING {
            joins.insert(key, self.start(member, device)?);
        }
        Ok(None)
    }

    fn start(&self, member: &Member, device: usize) -> Result<Join, String> {
        let outcome = Arc::new(Mutex::new(Outcome::Pending));
        let (result, transport) = (Arc::clone(&outcome), Arc::clone(&self.transport));
        let (servers, leaf, timeout) = (self.servers.clone(), member.leaf(), self.timeout);
        let work = move || {
            let joined = join(&transport, device, &servers, &leaf, timeout / 2);
            let joined = joined.map_err(|error| format!("upstream {error}")).map(|mut servers| {
                servers.iter_mut().for_each(|server| server.dialer.set_timeout(timeout));
                servers
            });
            *lock(&result) = Outcome::Done(joined);
        };
        thread::Builder::new()
            .name("evenkeel-uplink".to_owned())
            .spawn(work)
            .map_err(|error| format!("cannot start a thread: {error}"))?;
        Ok(Join { outcome, begun: Instant::now() })
    }

    /// Drops joins that no rank asks for any more.
    pub(crate) fn expire(&self, now: Instant) {
        let keep = self.timeout + ENDED_RETENTION;
        lock(&self.joins).retain(|_, join| {
            join.is_pending() || now.saturating_duration_since(join.begun) < keep
        });
    }
}

impl Join {
    fn is_pending(&self) -> bool {
        matches!(*lock(&self.outcome), Outcome::Pending)
    }

    /// The connections, the first time after they are open.
    fn take(&self) -> Result<Option<Vec<JoinedServer>>, String> {
        let mut outcome = lock(&self.outcome);
        match std::mem::replace(&mut *outcome, Outcome::Taken) {
            Outcome::Pending => {
                *outcome = Outcome::Pending;
                Ok(None)
            }
            Outcome::Done(Ok(joined)) => Ok(Some(joined)),
            Outcome::Done(Err(why)) => {
                // Each of the ranks receives the reason.
                *outcome = Outcome::Done(Err(why.clone()));
                Err(why)
            }
            Outcome::Taken => Err("the communicator is over".to_owned()),
        }
    }
}
