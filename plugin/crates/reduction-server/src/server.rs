//! The server: its options, threads and sockets.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use evenkeel_reduction::Timeline;
use evenkeel_reduction::protocol::NONCE;
use evenkeel_transport::{Error, Exporter, Listener, Log, Settings, Transport};

use crate::accept::{Acceptor, Waker};
use crate::context::Context;
use crate::limits::{RETRANSMIT_BYTES, communicator_bytes, piece_bytes};
use crate::memory_budget::MemoryBudget;
use crate::metrics::{Metrics, MetricsPages};
use crate::pool::TaskPool;
use crate::registry::CommunicatorRegistry;
use crate::upstream::UpstreamServers;

/// How to serve.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Where to listen; `[::]` is all addresses, also where there is no IPv6.
    pub listen: SocketAddr,
    /// Where to serve metrics and probes, if anywhere.
    pub metrics: Option<SocketAddr>,
    /// The upstream servers, `host:port`: they reduce the sums of this server and of other leaves,
    /// for communicators whose ranks have different lists of servers. Empty without a tree.
    pub upstream: Vec<String>,
    /// Maximum size of all buffers, over all jobs, in bytes.
    pub memory: u64,
    /// How long a rank or an upstream server may not respond.
    pub timeout: Duration,
    /// Number of threads that reduce, at least 1.
    pub threads: usize,
    /// Maximum size of a piece, a multiple of 128 bytes. Pieces are smaller where memory requires
    /// it.
    pub piece: u64,
    /// File for the times of each piece, if any; `-` is standard output.
    pub timeline: Option<PathBuf>,
}

/// A reduction server. Dropping it ends it, whatever is in flight.
pub struct Server {
    registry: Arc<CommunicatorRegistry>,
    address: SocketAddr,
    waker: Arc<Waker>,
    threads: Vec<JoinHandle<()>>,
    exporter: Option<Exporter>,
}

impl Server {
    /// Starts to serve.
    ///
    /// # Errors
    /// When a socket cannot be opened, the memory is too little, or a thread cannot be started.
    pub fn start(
        mut settings: Settings,
        options: &ServerOptions,
        log: Arc<dyn Log>,
    ) -> Result<Self, ServerError> {
        settings.limit_retransmit_buffer(RETRANSMIT_BYTES);
        let least = communicator_bytes(piece_bytes(options.memory, options.piece, 2), 2, 0);
        if options.memory < least {
            return Err(ServerError::Memory { given: options.memory, least });
        }
        let timeline = options.timeline.as_deref().map(open_timeline).transpose()?;
        let budget = MemoryBudget::new(options.memory);
        let timeout = options.timeout;
        let is_encrypted = settings.encryption().is_some();
        let transport = Arc::new(Transport::new(settings, Arc::clone(&log))?);
        let upstream =
            UpstreamServers::new(Arc::clone(&transport), options.upstream.clone(), timeout);
        let context = Arc::new(Context {
            transport,
            metrics: Arc::new(Metrics::new(&budget, is_encrypted)),
            budget,
            pool: TaskPool::default(),
            log,
            timeline,
            timeout,
        });
        let waker = Arc::new(Waker::default());
        let listener = listen(&context.transport, options.listen, &waker)?;
        let registry = CommunicatorRegistry::new(context, upstream, options.piece);
        // From here on, dropping it ends what was started.
        let mut server = Self {
            registry,
            address: listener.address(),
            waker,
            threads: Vec::new(),
            exporter: None,
        };
        server.exporter = options.metrics.map(|at| server.serve_metrics(at)).transpose()?;
        server.start_threads(options.threads.max(1), listener)?;
        Ok(server)
    }

    fn serve_metrics(&self, address: SocketAddr) -> Result<Exporter, ServerError> {
        let pages = MetricsPages {
            metrics: Arc::clone(&self.registry.context().metrics),
            draining: Arc::clone(self.registry.draining()),
            communicators: Arc::clone(self.registry.count()),
        };
        let addresses: Vec<_> = [address].into_iter().chain(as_ipv4(address)).collect();
        Exporter::start(&addresses, Arc::new(pages)).map_err(|error| ServerError::Io {
            what: format!("cannot serve metrics at {address}"),
            error,
        })
    }

    fn start_threads(&mut self, reducers: usize, listener: Listener) -> Result<(), ServerError> {
        for index in 0..reducers {
            let context = Arc::clone(self.registry.context());
            let work = move || context.pool.run();
            self.threads.push(start_thread(format!("evenkeel-sum-{index}"), work)?);
        }
        let acceptor = Acceptor::new(Arc::clone(&self.registry), listener, Arc::clone(&self.waker));
        self.threads.push(start_thread("evenkeel-join".to_owned(), || acceptor.run())?);
        Ok(())
    }

    /// The address it listens at.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The address it serves metrics at, if it does.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.exporter.as_ref().map(Exporter::address)
    }

    /// Refuses new communicators from now on.
    pub fn drain(&self) {
        self.registry.draining().store(true, Ordering::Release);
    }

    /// Number of communicators.
    pub fn communicators(&self) -> usize {
        self.registry.communicators()
    }

    /// Bytes of buffers granted now, and the maximum at any time.
    pub fn memory(&self) -> (u64, u64) {
        self.registry.context().budget.granted()
    }
}

/// `0.0.0.0` for `[::]`: what that means on a host without IPv6.
fn as_ipv4(address: SocketAddr) -> Option<SocketAddr> {
    let any = address.ip() == Ipv6Addr::UNSPECIFIED;
    any.then(|| (Ipv4Addr::UNSPECIFIED, address.port()).into())
}

fn open_timeline(path: &Path) -> Result<Timeline, ServerError> {
    Timeline::open(path).map_err(|error| ServerError::Io {
        what: format!("cannot write {}", path.display()),
        error,
    })
}

fn listen(
    transport: &Transport,
    address: SocketAddr,
    waker: &Arc<Waker>,
) -> Result<Listener, Error> {
    let listen = |address| {
        let waker: Arc<Waker> = Arc::clone(waker);
        transport.listen_at(address, NONCE, "reduction", waker)
    };
    listen(address).or_else(|error| as_ipv4(address).map_or(Err(error), listen))
}

fn start_thread(
    name: String,
    work: impl FnOnce() + Send + 'static,
) -> Result<JoinHandle<()>, ServerError> {
    thread::Builder::new()
        .name(name)
        .spawn(work)
        .map_err(|error| ServerError::Io { what: "cannot start a thread".to_owned(), error })
}

impl Drop for Server {
    fn drop(&mut self) {
        self.waker.stop();
        self.registry.context().pool.stop();
        for thread in self.threads.drain(..) {
            // A panic of the thread is of no consequence here.
            let _ = thread.join();
        }
        self.registry.end_all();
    }
}

/// Why a server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The transport cannot start.
    #[error(transparent)]
    Transport(#[from] Error),
    /// A system call failed.
    #[error("{what}: {error}")]
    Io {
        /// What failed.
        what: String,
        /// The system's error.
        error: io::Error,
    },
    /// The memory is too little for any communicator.
    #[error("{given} bytes of memory are too little: two ranks need at least {least}")]
    Memory {
        /// Bytes configured.
        given: u64,
        /// Bytes of the smallest communicator.
        least: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::sync::atomic::AtomicBool;
    use std::time::Instant;

    use evenkeel_reduction::{Member, TreePosition};
    use evenkeel_transport::{MemoryTypes, Notify, NullLog, RecvConnection, SendConnection};

    const TIMEOUT: Duration = Duration::from_secs(30);

    #[derive(Default)]
    struct Notified(AtomicBool);

    impl Notify for Notified {
        fn notify(&self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    fn wait_until<T>(mut poll: impl FnMut() -> Option<T>) -> T {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(found) = poll() {
                return found;
            }
            assert!(Instant::now() < deadline, "timed out");
            thread::yield_now();
        }
    }

    fn pair(transport: &Transport) -> (SendConnection, RecvConnection) {
        let listener = transport.listen(0, "", MemoryTypes::HOST).unwrap();
        let connecting = transport.connect(0, listener.handle(), "", MemoryTypes::HOST).unwrap();
        let send = wait_until(|| connecting.poll().unwrap());
        (send, wait_until(|| listener.poll_accept().unwrap()))
    }

    #[test]
    fn communicator_whose_first_rank_is_lost_at_join_is_removed() {
        let lo = |name: &str| (name == "NCCL_SOCKET_IFNAME").then(|| "lo".to_owned());
        let options = ServerOptions {
            listen: "127.0.0.1:0".parse().unwrap(),
            metrics: None,
            upstream: vec![],
            memory: 64 << 20,
            timeout: Duration::from_secs(30),
            threads: 1,
            piece: crate::PIECE_BYTES,
            timeline: None,
        };
        let settings = Settings::from_lookup(lo).unwrap();
        let server = Server::start(settings, &options, Arc::new(NullLog)).unwrap();
        let (_to_server, up) = pair(&server.registry.context().transport);
        let (down, from_server) = pair(&server.registry.context().transport);
        let gone = Arc::new(Notified::default());
        down.notify(Arc::<Notified>::clone(&gone));
        drop(from_server);
        wait_until(|| gone.0.load(Ordering::SeqCst).then_some(()));
        let unique_id = Member::new_unique_id().unwrap();
        let (position, job) = (TreePosition::without_tree(0, 2), String::new());
        let member =
            Member { unique_id, comm_id: 1, rank: 0, ranks: 2, position, is_leaf: false, job };
        assert!(server.registry.admit(&member, vec![], up, down).is_err());
        assert_eq!((server.communicators(), server.memory().0), (0, 0));
    }
}
