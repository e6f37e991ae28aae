//! The server: who is admitted, and the threads.

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use evenkeel_transport::{
    Error, Exporter, Log, RecvConnection, SendConnection, Settings, Transport,
};

use crate::ascent::Ascents;
use crate::budget::Budget;
use crate::lock;
use crate::metrics::{Metrics, Site};
use crate::pool::Pool;
use crate::reception::{Bell, Reception};
use crate::session::{COPIES_BYTES, Session, base_bytes, chunk_bytes};
use evenkeel_reduction::Timeline;
use evenkeel_reduction::client::JoinedServer;
use evenkeel_reduction::protocol::{Member, NONCE};

/// How long a communicator that failed is kept for its ranks to hear why.
pub(crate) const FAREWELL: Duration = Duration::from_secs(10);

/// Why nobody new is taken.
const DRAINING: &str = "the server is shutting down";

/// How to serve.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where to listen; `[::]` is all addresses, also where there is no IPv6.
    pub listen: SocketAddr,
    /// Where to serve metrics and probes, if anywhere.
    pub metrics: Option<SocketAddr>,
    /// The servers, `host:port`, that bring communicators together whose ranks have several lists of servers: what this one
    /// reduces goes there. Empty where there is nothing above it.
    pub upstream: Vec<String>,
    /// Most bytes of buffers, over all jobs.
    pub memory: u64,
    /// Threads that reduce, at least 1.
    pub threads: usize,
    /// Most bytes of a piece, a multiple of 128; less where memory does not allow it.
    pub piece: u64,
    /// Where to note each piece's moments, if anywhere; `-` is standard output.
    pub timeline: Option<PathBuf>,
}

/// A reduction server. Dropping it ends it, whatever is in flight.
pub struct Server {
    shared: Arc<Shared>,
    address: SocketAddr,
    bell: Arc<Bell>,
    threads: Vec<JoinHandle<()>>,
    exporter: Option<Exporter>,
}

/// What all parts of the server use.
pub(crate) struct Shared {
    pub(crate) transport: Arc<Transport>,
    ascents: Ascents,
    pub(crate) budget: Arc<Budget>,
    most_chunk: u64,
    pub(crate) pool: Pool,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) log: Arc<dyn Log>,
    pub(crate) timeline: Option<Timeline>,
    sessions: Mutex<HashMap<Key, Arc<Session>>>,
    count: Arc<AtomicI64>,
    draining: Arc<AtomicBool>,
}

/// What tells communicators apart.
pub(crate) type Key = (String, [u8; 16]);

pub(crate) fn key(member: &Member) -> Key {
    (member.job.clone(), member.unique_id)
}

impl Server {
    /// Starts to serve.
    ///
    /// # Errors
    /// When a socket cannot be opened, the memory is too little, or a thread cannot be started.
    pub fn start(
        mut settings: Settings,
        options: &Options,
        log: Arc<dyn Log>,
    ) -> Result<Self, ServerError> {
        settings.limit_retransmit_buffer(COPIES_BYTES);
        let least = base_bytes(chunk_bytes(options.memory, options.piece, 2), 2, 0);
        if options.memory < least {
            return Err(ServerError::Memory { given: options.memory, least });
        }
        let timeline = match &options.timeline {
            None => None,
            Some(path) => Some(Timeline::open(path).map_err(|error| ServerError::Io {
                what: format!("cannot write {}", path.display()),
                error,
            })?),
        };
        let budget = Budget::new(options.memory);
        let metrics = Arc::new(Metrics::new(&budget));
        let transport = Arc::new(Transport::new(settings, Arc::clone(&log))?);
        let shared = Arc::new(Shared {
            ascents: Ascents::new(Arc::clone(&transport), options.upstream.clone()),
            transport,
            budget,
            most_chunk: options.piece,
            pool: Pool::default(),
            metrics,
            log,
            timeline,
            sessions: Mutex::default(),
            count: Arc::default(),
            draining: Arc::default(),
        });
        let bell = Arc::new(Bell::default());
        let listener = {
            let listen = |address| {
                let notified: Arc<Bell> = Arc::clone(&bell);
                shared.transport.listen_at(address, NONCE, "reduction", notified)
            };
            listen(options.listen)
                .or_else(|error| in_version_4(options.listen).map_or(Err(error), listen))?
        };
        let address = listener.address();
        // From here on, dropping it ends what was started.
        let mut server = Self {
            shared: Arc::clone(&shared),
            address,
            bell: Arc::clone(&bell),
            threads: Vec::new(),
            exporter: None,
        };
        if let Some(address) = options.metrics {
            let site = Site {
                metrics: Arc::clone(&shared.metrics),
                draining: Arc::clone(&shared.draining),
                sessions: Arc::clone(&shared.count),
            };
            let addresses: Vec<_> = [address].into_iter().chain(in_version_4(address)).collect();
            let exporter = Exporter::start(&addresses, Arc::new(site)).map_err(|error| {
                ServerError::Io { what: format!("cannot serve metrics at {address}"), error }
            })?;
            server.exporter = Some(exporter);
        }
        let start = |name: String, work: Box<dyn FnOnce() + Send>| {
            thread::Builder::new().name(name).spawn(work).map_err(|error| ServerError::Io {
                what: "cannot start a thread".to_owned(),
                error,
            })
        };
        for index in 0..options.threads.max(1) {
            let shared = Arc::clone(&shared);
            let work = Box::new(move || shared.pool.work());
            server.threads.push(start(format!("evenkeel-sum-{index}"), work)?);
        }
        let reception = Reception::new(shared, listener, bell);
        server.threads.push(start("evenkeel-join".to_owned(), Box::new(|| reception.work()))?);
        Ok(server)
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where it serves metrics, if it does.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.exporter.as_ref().map(Exporter::address)
    }

    /// Takes no new communicators from now on.
    pub fn drain(&self) {
        self.shared.draining.store(true, Ordering::Release);
    }

    /// How many communicators there are.
    pub fn communicators(&self) -> usize {
        lock(&self.shared.sessions).len()
    }

    /// Bytes of buffers granted now, and the most at any time.
    pub fn memory(&self) -> (u64, u64) {
        self.shared.budget.granted()
    }
}

/// What `[::]` means on a host that has no IPv6.
fn in_version_4(address: SocketAddr) -> Option<SocketAddr> {
    let any = address.ip() == Ipv6Addr::UNSPECIFIED;
    any.then(|| (Ipv4Addr::UNSPECIFIED, address.port()).into())
}

impl Drop for Server {
    fn drop(&mut self) {
        self.bell.stop();
        self.shared.pool.stop();
        for thread in self.threads.drain(..) {
            // It does not panic, and if it did there would be nothing to hand on.
            let _ = thread.join();
        }
        self.shared.clear();
    }
}

/// Why a server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The transport cannot.
    #[error(transparent)]
    Transport(#[from] Error),
    /// Something of the system is missing.
    #[error("{what}: {error}")]
    Io {
        /// What was tried.
        what: String,
        /// What the system says.
        error: io::Error,
    },
    /// There is not enough memory for anybody.
    #[error("{given} bytes of memory are too little: two ranks need {least} at least")]
    Memory {
        /// Bytes that may be used.
        given: u64,
        /// Bytes of one small communicator.
        least: u64,
    },
}

impl Shared {
    /// The way up that a rank's communicator needs before the rank can be admitted, who came by the device; empty where the
    /// communicator has it or needs none, `None` as long as it is not there.
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) fn ascend(
        &self,
        member: &Member,
        device: usize,
    ) -> Result<Option<Vec<JoinedServer>>, String> {
        if member.is_leaf && !self.ascents.lead_nowhere() {
            return Err("this server has an upstream itself: a tree has two levels".to_owned());
        }
        if member.position.leaves == 1 || lock(&self.sessions).contains_key(&key(member)) {
            return Ok(Some(vec![]));
        }
        if self.ascents.lead_nowhere() {
            return Err(format!(
                "the ranks have {} lists of reduction servers and this server has no upstream: one list for all, or --upstream",
                member.position.leaves
            ));
        }
        if self.draining.load(Ordering::Acquire) {
            return Err(DRAINING.to_owned());
        }
        self.ascents.of(member, device)
    }

    /// Lets a rank join its communicator, which goes up this way; else says why not and gives the way back to it.
    pub(crate) fn admit(
        self: &Arc<Self>,
        member: &Member,
        above: Vec<JoinedServer>,
        up: RecvConnection,
        down: SendConnection,
    ) -> Result<(), (String, SendConnection)> {
        let session = match self.session(member, above) {
            Ok(session) => session,
            Err(why) => return Err((why, down)),
        };
        let joined = session.join(member, up, down);
        // Only one thread admits, so nobody else is about to join it.
        if joined.is_err() && session.is_unused() {
            self.end(&session);
        }
        joined
    }

    fn session(
        self: &Arc<Self>,
        member: &Member,
        above: Vec<JoinedServer>,
    ) -> Result<Arc<Session>, String> {
        let ranks = member.position.count;
        let others: Vec<Arc<Session>> = {
            let mut sessions = lock(&self.sessions);
            if let Some(session) = sessions.get(&key(member)) {
                return Ok(Arc::clone(session));
            }
            if self.draining.load(Ordering::Acquire) {
                return Err(DRAINING.to_owned());
            }
            if member.position.leaves > 1 && above.is_empty() {
                return Err("the communicator is over".to_owned());
            }
            // All leaves must cut alike: the servers above say how.
            let chunk = above.iter().map(|joined| joined.piece_bytes as u64).min();
            let own = || chunk_bytes(self.budget.total(), self.most_chunk, ranks);
            let chunk = chunk.unwrap_or_else(own);
            let bytes = base_bytes(chunk, ranks, above.len());
            self.budget.count_groups(true);
            if let Some(base) = self.budget.grant(bytes, 0) {
                let session = Session::new(Arc::clone(self), member, chunk, base, above);
                sessions.insert(key(member), Arc::clone(&session));
                self.count.fetch_add(1, Ordering::AcqRel);
                let others = sessions.values().cloned().collect::<Vec<_>>();
                drop(sessions);
                others.iter().for_each(|session| session.share());
                return Ok(session);
            }
            self.budget.count_groups(false);
            sessions.values().cloned().collect()
        };
        // Next time there may be room.
        others.iter().for_each(|session| session.share());
        let (granted, _) = self.budget.granted();
        Err(format!(
            "no memory for a communicator of {ranks} ranks: {granted} of {} bytes are in use",
            self.budget.total()
        ))
    }

    /// A communicator is over.
    pub(crate) fn end(&self, session: &Arc<Session>) {
        let removed = {
            let mut sessions = lock(&self.sessions);
            match sessions.get(&key(session.member())) {
                Some(same) if Arc::ptr_eq(same, session) => sessions.remove(&key(session.member())),
                _ => None,
            }
        };
        if removed.is_some() {
            self.budget.count_groups(false);
            self.count.fetch_sub(1, Ordering::AcqRel);
            session.close();
            if let Some(timeline) = &self.timeline {
                timeline.flush();
            }
        }
    }

    /// Ends communicators that have failed long ago, and looks after the others.
    pub(crate) fn tidy(&self, now: Instant) {
        self.ascents.tidy(now);
        let all: Vec<_> = lock(&self.sessions).values().cloned().collect();
        for session in all {
            let old = |at| now.saturating_duration_since(at) >= FAREWELL;
            if session.failed_at().is_some_and(old) {
                self.end(&session);
            } else {
                session.look_after(now);
            }
        }
    }

    fn clear(&self) {
        let all: Vec<_> = lock(&self.sessions).values().cloned().collect();
        all.iter().for_each(|session| self.end(session));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use evenkeel_reduction::TreePosition;
    use evenkeel_transport::{MemoryTypes, Notify};

    const PATIENCE: Duration = Duration::from_secs(30);

    struct Silence;

    impl Log for Silence {
        fn warn(&self, _line: &str) {}
        fn info(&self, _line: &str) {}
    }

    #[derive(Default)]
    struct Heard(AtomicBool);

    impl Notify for Heard {
        fn notify(&self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    fn until<T>(mut look: impl FnMut() -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = look() {
                return found;
            }
            assert!(Instant::now() < deadline, "nothing happens");
            thread::yield_now();
        }
    }

    fn pair(transport: &Transport) -> (SendConnection, RecvConnection) {
        let listener = transport.listen(0, "", MemoryTypes::HOST).unwrap();
        let call = transport.connect(0, listener.handle(), "", MemoryTypes::HOST).unwrap();
        let send = until(|| call.poll().unwrap());
        (send, until(|| listener.poll_accept().unwrap()))
    }

    #[test]
    fn a_communicator_whose_first_rank_goes_while_it_joins_leaves_nothing_behind() {
        let lo = |name: &str| (name == "NCCL_SOCKET_IFNAME").then(|| "lo".to_owned());
        let options = Options {
            listen: "127.0.0.1:0".parse().unwrap(),
            metrics: None,
            upstream: vec![],
            memory: 64 << 20,
            threads: 1,
            piece: crate::PIECE_BYTES,
            timeline: None,
        };
        let settings = Settings::from_lookup(lo).unwrap();
        let server = Server::start(settings, &options, Arc::new(Silence)).unwrap();
        let (_to_server, up) = pair(&server.shared.transport);
        let (down, from_server) = pair(&server.shared.transport);
        let gone = Arc::new(Heard::default());
        down.notify(Arc::<Heard>::clone(&gone));
        drop(from_server);
        until(|| gone.0.load(Ordering::SeqCst).then_some(()));
        let unique_id = Member::new_unique_id().unwrap();
        let (position, job) = (TreePosition::without_tree(0, 2), String::new());
        let member =
            Member { unique_id, comm_id: 1, rank: 0, ranks: 2, position, is_leaf: false, job };
        assert!(server.shared.admit(&member, vec![], up, down).is_err());
        assert_eq!((server.communicators(), server.memory().0), (0, 0));
    }
}
