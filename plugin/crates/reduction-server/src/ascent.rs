//! How communicators whose ranks are at several leaves get to the servers above this one.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use evenkeel_transport::Transport;

use crate::lock;
use crate::server::{FAREWELL, Key, key};
use evenkeel_reduction::client::{JoinedServer, join};
use evenkeel_reduction::protocol::Member;

/// Most communicators that are on their way up: each is a thread for a while. Others wait.
const MOST: usize = 64;

/// The servers above this one.
pub(crate) struct Ascents {
    transport: Arc<Transport>,
    servers: Vec<String>,
    /// How long one may show no sign of life. Joining them may take half of that, so that ranks, who wait as long, hear what
    /// went wrong.
    timeout: Duration,
    known: Mutex<HashMap<Key, Ascent>>,
}

struct Ascent {
    outcome: Arc<Mutex<Outcome>>,
    begun: Instant,
}

enum Outcome {
    Pending,
    Done(Result<Vec<JoinedServer>, String>),
    /// A communicator has it.
    Taken,
}

impl Ascents {
    pub(crate) fn new(transport: Arc<Transport>, servers: Vec<String>) -> Self {
        let timeout = transport.settings().reduction_timeout();
        Self { transport, servers, timeout, known: Mutex::default() }
    }

    /// Whether there is anything above this server.
    pub(crate) fn lead_nowhere(&self) -> bool {
        self.servers.is_empty()
    }

    /// The way up for a communicator, to which this rank came by the device; `None` as long as it is not there. Given once.
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) fn of(
        &self,
        member: &Member,
        device: usize,
    ) -> Result<Option<Vec<JoinedServer>>, String> {
        let mut known = lock(&self.known);
        if let Some(ascent) = known.get(&key(member)) {
            let mut outcome = lock(&ascent.outcome);
            return match std::mem::replace(&mut *outcome, Outcome::Taken) {
                Outcome::Pending => {
                    *outcome = Outcome::Pending;
                    Ok(None)
                }
                Outcome::Done(Ok(joined)) => Ok(Some(joined)),
                Outcome::Done(Err(why)) => {
                    // All its ranks are to hear why.
                    *outcome = Outcome::Done(Err(why.clone()));
                    Err(why)
                }
                Outcome::Taken => Err("the communicator is over".to_owned()),
            };
        }
        if known.values().filter(|ascent| ascent.is_pending()).count() >= MOST {
            return Ok(None);
        }
        let outcome = Arc::new(Mutex::new(Outcome::Pending));
        let (told, transport) = (Arc::clone(&outcome), Arc::clone(&self.transport));
        let (servers, leaf, timeout) = (self.servers.clone(), member.leaf(), self.timeout);
        let work = move || {
            let joined = join(&transport, device, &servers, &leaf, timeout / 2);
            let joined = joined.map_err(|error| format!("upstream {error}")).map(|mut all| {
                all.iter_mut().for_each(|joined| joined.dialer.set_timeout(timeout));
                all
            });
            *lock(&told) = Outcome::Done(joined);
        };
        thread::Builder::new()
            .name("evenkeel-ascend".to_owned())
            .spawn(work)
            .map_err(|error| format!("cannot start a thread: {error}"))?;
        known.insert(key(member), Ascent { outcome, begun: Instant::now() });
        Ok(None)
    }

    /// Forgets what nobody asks for any more.
    pub(crate) fn tidy(&self, now: Instant) {
        let keep = self.timeout + FAREWELL;
        lock(&self.known).retain(|_, ascent| {
            ascent.is_pending() || now.saturating_duration_since(ascent.begun) < keep
        });
    }
}

impl Ascent {
    fn is_pending(&self) -> bool {
        matches!(*lock(&self.outcome), Outcome::Pending)
    }
}
