//! Finds what a running job waits for: sends this process's view to the job's collector and
//! publishes the collector's verdict.
//!
//! One thread per process does this over UDP. Its sockets use the addresses and ports of the TCP
//! listening sockets, which peers know. All decisions are made by `evenkeel_diagnosis`. Datagrams
//! are signed with the job key if there is one. They are not encrypted: they carry host names and
//! figures, but no data. No transfer depends on them. Where they are blocked, each rank still
//! reports its own waits.

mod datagram;
mod outlets;
mod route;
mod views;

use std::collections::HashMap;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use evenkeel_diagnosis::election::{Candidate, Election};
use evenkeel_diagnosis::{Collector, Process, Verdict};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use socket2::SockRef;

use crate::device::Device;
use crate::settings::Settings;
use crate::sys;
use crate::telemetry::log::Log;
use crate::telemetry::metrics::Metrics;
use datagram::{Datagram, MAX_DATAGRAM};
use outlets::Outlets;
use route::route;
use views::Views;

/// How often the thread runs. Its scheduling delay shows whether the process gets CPU time.
const TICK: Duration = Duration::from_millis(100);
/// Interval between heartbeats.
const BEAT: Duration = Duration::from_secs(1);
/// Maximum number of neighbours to send each candidate to.
const MAX_TOLD: usize = 8;
/// How long to remember a neighbour without a connection, known only by its datagrams.
const NEIGHBOUR_TIME: Duration = Duration::from_secs(20);
const MAX_NEIGHBOURS: usize = 1024;
/// Maximum number of sockets. The latest listening sockets take precedence.
const MAX_SOCKETS: usize = 8;
/// Receive buffer of a socket, in bytes.
const RECEIVE_BUFFER: usize = 4 << 20;
/// Maximum number of datagrams to read from a socket before the thread checks its clock.
const MAX_BATCH: usize = 4096;

/// Owns the thread. Dropping it stops and joins the thread.
pub(crate) struct Watch {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread needs from the transport.
pub(crate) struct WatchContext {
    pub(crate) settings: Arc<Settings>,
    pub(crate) devices: Arc<[Device]>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) log: Arc<dyn Log>,
}

impl Watch {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the system cannot create the thread or its eventfd.
    pub(crate) fn start(context: WatchContext) -> std::io::Result<Self> {
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let stopped = Arc::clone(&stop);
        // Here and not in the thread, because it reads the environment, which the caller may change
        // later.
        let mut watcher = Watcher::new(context);
        let thread =
            std::thread::Builder::new().name("evenkeel-watch".to_owned()).spawn(move || {
                sys::block_signals();
                watcher.run(&stopped);
            })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // Fails only after 2^64 writes.
        let _ = rustix::io::write(&self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            // The thread does not panic, and it has no result.
            let _ = thread.join();
        }
    }
}

/// The state of the thread.
struct Watcher {
    context: WatchContext,
    epoch: Instant,
    process: Process,
    /// Each with the address of its listening socket.
    sockets: Vec<(SocketAddr, UdpSocket)>,
    /// `None` until there is a socket.
    election: Option<Election>,
    views: Views,
    /// Some while this process is the collector.
    collector: Option<Collector>,
    /// The last other process known to collect.
    predecessor: Option<Process>,
    /// How long to wait between two views.
    interval: Duration,
    /// Addresses of neighbours, and when each last sent a datagram.
    heard: HashMap<SocketAddr, Duration>,
    outlets: Outlets,
    /// Rotates through the neighbours if there are more than [`MAX_TOLD`].
    turn: usize,
}

impl Watcher {
    fn new(context: WatchContext) -> Self {
        let process = this_process(context.settings.node.clone());
        Self {
            epoch: Instant::now(),
            sockets: Vec::new(),
            election: None,
            views: Views::new(process.clone()),
            collector: None,
            predecessor: None,
            interval: BEAT,
            heard: HashMap::new(),
            outlets: Outlets::new(&context, process.id),
            turn: 0,
            process,
            context,
        }
    }

    fn now(&self) -> Duration {
        self.epoch.elapsed()
    }

    fn run(&mut self, stop: &OwnedFd) {
        let (mut next_tick, mut next_beat, mut next_view) = (TICK, BEAT, BEAT);
        loop {
            let began = self.now();
            let left = next_tick.saturating_sub(began) + Duration::from_micros(50);
            let waited = self.wait(stop, left);
            // Read before the work, so that the thread's own work, such as writing a file, does not
            // count as delay.
            let now = self.now();
            match waited {
                Wait::Stopped => return self.leave(),
                Wait::Readable => self.receive(),
                Wait::TimedOut => {}
            }
            if now < next_tick {
                continue;
            }
            self.views.add_delay(now - next_tick.max(began));
            next_tick = now + TICK;
            if now >= next_beat {
                next_beat = now + BEAT;
                self.bind();
                self.beat();
            }
            if now >= next_view {
                next_view = now + self.interval;
                self.look();
            }
        }
    }

    fn wait(&self, stop: &OwnedFd, time: Duration) -> Wait {
        let mut waited = vec![PollFd::new(stop, PollFlags::IN)];
        waited.extend(self.sockets.iter().map(|(_, socket)| PollFd::new(socket, PollFlags::IN)));
        let time = Timespec { tv_sec: time.as_secs() as _, tv_nsec: time.subsec_nanos().into() };
        match poll(&mut waited, Some(&time)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => Wait::TimedOut,
            Ok(_) if !waited[0].revents().is_empty() => Wait::Stopped,
            Ok(_) => Wait::Readable,
            Err(_) => Wait::Stopped,
        }
    }

    /// Opens a socket for each new listening socket. A process that listens nowhere gets a socket
    /// at any port.
    fn bind(&mut self) {
        let mut listening = self.context.metrics.listening();
        if listening.is_empty() {
            listening.extend(self.own_ip().map(|ip| SocketAddr::new(ip, 0)));
        }
        self.sockets.retain(|(beside, _)| listening.contains(beside));
        for address in listening.into_iter().rev().take(MAX_SOCKETS) {
            if self.sockets.iter().any(|(beside, _)| *beside == address) {
                continue;
            }
            // The UDP port may be in use. The other sockets suffice then.
            if let Ok(socket) = UdpSocket::bind(address)
                && socket.set_nonblocking(true).is_ok()
            {
                // A thousand ranks send views within a second. The kernel may limit the size.
                let _ = SockRef::from(&socket).set_recv_buffer_size(RECEIVE_BUFFER);
                self.sockets.push((address, socket));
            }
        }
        let address = self.sockets.first().and_then(|(_, socket)| self.reachable(socket));
        match (address, &self.election) {
            (Some(address), None) => {
                let (rank, id) = (self.process.rank.unwrap_or(u32::MAX), self.process.id);
                let me = Candidate { rank, id, address, beat: 0 };
                self.election = Some(Election::new(me, self.now()));
            }
            (Some(address), Some(election)) if election.me().address != address => {
                let me = Candidate { address, ..election.me() };
                self.election = Some(Election::new(me, self.now()));
            }
            (None, Some(_)) => self.election = None,
            _ => {}
        }
    }

    fn own_ip(&self) -> Option<std::net::IpAddr> {
        self.context.devices.first()?.addresses().first().copied()
    }

    /// The address at which others reach a socket.
    fn reachable(&self, socket: &UdpSocket) -> Option<SocketAddr> {
        let mut address = socket.local_addr().ok()?;
        if address.ip().is_unspecified() {
            address.set_ip(self.own_ip()?);
        }
        Some(address)
    }

    /// Beats, announces a changed candidate to the neighbours, and starts or stops the collector.
    fn beat(&mut self) {
        let now = self.now();
        self.heard.retain(|_, last| now < *last + NEIGHBOUR_TIME);
        let Some(election) = &mut self.election else { return };
        let news = election.beat(now);
        let is_collector = election.is_collector();
        let deposed =
            self.predecessor.as_ref().is_some_and(|other| election.has_deposed(other.id, now));
        if let Some(news) = news {
            self.tell(news, None);
        }
        if is_collector && self.collector.is_none() {
            let mut collector = Collector::new(self.process.id);
            if deposed && let Some(predecessor) = self.predecessor.take() {
                collector.succeed(predecessor, now);
            }
            self.collector = Some(collector);
        } else if !is_collector && self.collector.take().is_some() {
            self.outlets.collects_no_more();
        }
    }

    /// Sends a candidate to neighbours, except to the one that it came from.
    fn tell(&mut self, candidate: Candidate, not: Option<SocketAddr>) {
        let mut neighbours = self.context.metrics.neighbours();
        neighbours.extend(self.heard.keys().copied());
        neighbours.sort_unstable();
        neighbours.dedup();
        neighbours.retain(|neighbour| Some(*neighbour) != not);
        let bytes = Datagram::Candidate(candidate).encode(self.context.settings.job_key());
        let count = neighbours.len();
        for at in 0..count.min(MAX_TOLD) {
            self.send(&bytes, neighbours[(self.turn + at) % count]);
        }
        self.turn = self.turn.wrapping_add(MAX_TOLD);
    }

    fn send(&self, bytes: &[u8], to: SocketAddr) {
        let address =
            |(beside, socket): &(SocketAddr, UdpSocket)| socket.local_addr().unwrap_or(*beside);
        let own: Vec<SocketAddr> = self.sockets.iter().map(address).collect();
        if let Some((at, to)) = route(&own, to) {
            let _ = self.sockets[at].1.send_to(bytes, to); // a lost datagram is repeated
        }
    }

    /// Sends this process's view, or adds it and judges if this process is the collector.
    fn look(&mut self) {
        let now = self.now();
        let view = self.views.next(&self.context.metrics, now);
        let waits = self.views.longest_wait();
        match &mut self.collector {
            Some(collector) => {
                collector.add(view, now);
                let verdict = collector.judge(now).clone();
                self.interval = collector.interval();
                let timeline = collector.timeline();
                self.outlets.judged(&verdict, timeline, now);
                self.outlets.told(&verdict, now);
            }
            None => {
                if let Some(election) = &self.election {
                    let bytes = Datagram::View(view).encode(self.context.settings.job_key());
                    self.send(&bytes, election.collector().address);
                }
            }
        }
        self.outlets.waits(waits, now);
    }

    fn receive(&mut self) {
        let mut buffer = [0; MAX_DATAGRAM + 1];
        for at in 0..self.sockets.len() {
            for _ in 0..MAX_BATCH {
                let Ok((length, from)) = self.sockets[at].1.recv_from(&mut buffer) else { break };
                let key = self.context.settings.job_key();
                if let Some(datagram) = Datagram::decode(&buffer[..length], key) {
                    let from = SocketAddr::new(from.ip().to_canonical(), from.port());
                    self.on_datagram(datagram, from);
                }
            }
        }
    }

    fn on_datagram(&mut self, datagram: Datagram, from: SocketAddr) {
        let now = self.now();
        match datagram {
            Datagram::Candidate(candidate) => {
                if self.heard.len() < MAX_NEIGHBOURS || self.heard.contains_key(&from) {
                    self.heard.insert(from, now);
                }
                let Some(election) = &mut self.election else { return };
                if election.heard(candidate, now) {
                    self.tell(candidate, Some(from));
                }
            }
            Datagram::View(view) => {
                let Some(collector) = &mut self.collector else { return };
                collector.add(view, now);
                let answer = Datagram::Answer {
                    collector: collector.id(),
                    interval: collector.interval(),
                    verdict: collector.verdict().to_json(),
                };
                let bytes = answer.encode(self.context.settings.job_key());
                self.send(&bytes, from);
            }
            Datagram::Answer { collector, interval, verdict } => {
                let Some(election) = &mut self.election else { return };
                election.answered(collector, now);
                let is_mine = election.collector().id == collector;
                if is_mine && let Some(verdict) = Verdict::from_json(verdict.as_bytes()) {
                    self.interval = interval.clamp(BEAT, 10 * BEAT);
                    let rank = Some(election.collector().rank).filter(|rank| *rank != u32::MAX);
                    let host = verdict.collector_host.clone();
                    self.predecessor =
                        Some(Process { id: collector, rank, host, pod: String::new() });
                    self.outlets.told(&verdict, now);
                }
            }
        }
    }

    /// Tells the collector that this process has closed its last connection, so that it is not
    /// suspected.
    fn leave(&mut self) {
        let now = self.now();
        if let Some(election) = &self.election
            && !election.is_collector()
        {
            let view = self.views.last(now);
            let bytes = Datagram::View(view).encode(self.context.settings.job_key());
            self.send(&bytes, election.collector().address);
        }
        self.outlets.leave();
    }
}

enum Wait {
    TimedOut,
    Readable,
    Stopped,
}

/// This process's identity. The rank comes from the environment of one of several launchers.
fn this_process(node: Option<String>) -> Process {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let ranks = [
        "RANK",
        "OMPI_COMM_WORLD_RANK",
        "PMIX_RANK",
        "PMI_RANK",
        "SLURM_PROCID",
        "JOB_COMPLETION_INDEX",
    ];
    let rank = ranks.iter().find_map(|name| variable(name)?.parse().ok());
    // Without random numbers, the time serves as identifier.
    let id = sys::random().unwrap_or_else(|_| sys::coarse_nanoseconds().to_ne_bytes());
    let host = || rustix::system::uname().nodename().to_string_lossy().into_owned();
    Process {
        id: u64::from_ne_bytes(id),
        rank,
        host: node.unwrap_or_else(host),
        pod: variable("EVENKEEL_POD_UID").unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests;
