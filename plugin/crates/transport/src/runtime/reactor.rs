//! The worker threads: they wait for sockets and timers, and call the sources registered for them.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

use crate::error::Error;
use crate::memory::staging::StagingPool;
use crate::runtime::flow_count::FlowCountControllers;
use crate::sync::lock;
use crate::sys;
use crate::telemetry::exporter::Exporter;

/// How often sources check their timeouts. Events are never delayed by it.
const TICK: Duration = Duration::from_millis(125);
/// The token of the worker's own wake-up.
const WAKE: u64 = 0;

thread_local! {
    /// Address of the worker that runs on this thread; 0 on other threads.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
    /// Work that was deferred until the present source returns.
    static DEFERRED: RefCell<VecDeque<Box<dyn FnOnce()>>> = const { RefCell::new(VecDeque::new()) };
}

/// Runs `work` on the calling thread as soon as it holds no lock of a connection. Returns false, and does not run it, if
/// the thread is no worker. For short work after a [notification](crate::Notify), without waking another thread. The work
/// must not block, since sockets wait for it.
pub fn defer_on_worker(work: impl FnOnce() + 'static) -> bool {
    let here = CURRENT.get() != 0;
    if here {
        DEFERRED.with_borrow_mut(|deferred| deferred.push_back(Box::new(work)));
    }
    here
}

/// What has changed on a socket since the last call.
#[derive(Clone, Copy)]
pub(crate) struct Readiness {
    /// There may be something to read, including the end of the stream.
    pub(crate) readable: bool,
    /// There may be room to write.
    pub(crate) writable: bool,
    /// The peer has ended its direction, or the socket has an error.
    pub(crate) ended: bool,
}

/// Something registered with a worker. Called by one worker at a time, but concurrently with callers' threads.
pub(crate) trait Source: Send + Sync {
    /// The socket's state changed, or [`Registration::wake`] was called. Not called again until the next change, so it must
    /// use up everything or wake itself.
    fn ready(&self, readiness: Readiness);
    /// Checks timeouts, from time to time.
    fn tick(&self, _now: Instant) {}
    /// Whether [`Source::tick`] does anything. Most sources are flows, whose connection checks their timeouts.
    fn has_deadlines(&self) -> bool {
        true
    }
    /// The worker will not call the source again, or cannot tell whether it is intact.
    fn abandoned(&self, why: &str);
}

/// The running workers. Dropping it stops and joins them, unless a worker drops it. Sources keep [`Workers`], and only what
/// callers hold keeps a `Runtime`. A caller may have dropped that in [`defer_on_worker`].
pub(crate) struct Runtime {
    workers: Arc<Workers>,
    threads: Vec<JoinHandle<()>>,
    _exporter: Option<Exporter>,
}

/// The workers, as sources use them.
pub(crate) struct Workers {
    all: Vec<Arc<Worker>>,
    next: AtomicUsize,
    /// Number of closed connections that still deliver messages.
    lingering: Arc<AtomicUsize>,
    /// Nanoseconds in which callers did work of workers.
    caller_work: AtomicU64,
    pub(crate) flow_counts: FlowCountControllers,
    pub(crate) staging: Arc<StagingPool>,
}

struct Worker {
    epoll: OwnedFd,
    wake: OwnedFd,
    stop: AtomicBool,
    lingering: Arc<AtomicUsize>,
    sources: Mutex<HashMap<u64, Arc<dyn Source>>>,
    /// Timers of sources: when to call them without an event. Few at any time.
    timers: Mutex<Vec<(Instant, u64)>>,
    next_token: AtomicU64,
    /// Nanoseconds in which it was not waiting.
    worked: AtomicU64,
}

impl Runtime {
    /// Starts `count` workers. The exporter lives as long as they do.
    pub(crate) fn start(count: usize, exporter: Option<Exporter>) -> Result<Arc<Self>, Error> {
        let fail = |error: io::Error| Error::system("cannot start I/O threads", &error);
        let lingering = Arc::new(AtomicUsize::new(0));
        let all = (0..count)
            .map(|_| Worker::new(&lingering).map(Arc::new))
            .collect::<io::Result<Vec<_>>>()
            .map_err(fail)?;
        let workers = Arc::new(Workers {
            all,
            next: AtomicUsize::new(0),
            lingering,
            caller_work: AtomicU64::new(0),
            flow_counts: FlowCountControllers::default(),
            staging: Arc::default(),
        });
        // From here on, dropping the runtime stops the threads that have started.
        let mut runtime = Self { workers, threads: Vec::new(), _exporter: exporter };
        for index in 0..count {
            let worker = Arc::clone(&runtime.workers.all[index]);
            let thread = std::thread::Builder::new()
                .name(format!("evenkeel-io-{index}"))
                .spawn(move || worker.run())
                .map_err(fail)?;
            runtime.threads.push(thread);
        }
        Ok(Arc::new(runtime))
    }

    pub(crate) fn workers(&self) -> &Arc<Workers> {
        &self.workers
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        for worker in &self.workers.all {
            worker.stop.store(true, Ordering::Release);
            worker.wake();
        }
        let by_worker = self.workers.all.iter().any(|worker| worker.is_current());
        if by_worker || self.workers.lingering.load(Ordering::Acquire) > 0 {
            // The threads end by themselves. This thread must not wait for a peer here, nor for itself.
            return;
        }
        for thread in self.threads.drain(..) {
            // A worker catches its sources' panics, so there is no result to use.
            let _ = thread.join();
        }
    }
}

impl Workers {
    /// A registration with the next worker in turn.
    pub(crate) fn registration(&self) -> Registration {
        let index = self.next.fetch_add(1, Ordering::Relaxed) % self.all.len();
        let worker = Arc::clone(&self.all[index]);
        let token = worker.next_token.fetch_add(1, Ordering::Relaxed);
        Registration { worker, token }
    }

    /// The time that workers have not spent waiting, and that callers have spent on their work.
    pub(crate) fn worked(&self) -> Duration {
        let worked = self.all.iter().map(|worker| worker.worked.load(Ordering::Relaxed));
        Duration::from_nanos(worked.sum::<u64>() + self.caller_work.load(Ordering::Relaxed))
    }

    /// Adds time that a caller has spent on work of workers.
    pub(crate) fn add_caller_work(&self, time: Duration) {
        self.caller_work.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Keeps the workers running, also without their runtime, until the result is dropped.
    pub(crate) fn linger(self: &Arc<Self>) -> Linger {
        self.lingering.fetch_add(1, Ordering::AcqRel);
        Linger(Arc::clone(self))
    }
}

/// Keeps the workers running.
pub(crate) struct Linger(Arc<Workers>);

impl Drop for Linger {
    fn drop(&mut self) {
        if self.0.lingering.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.all.iter().for_each(|worker| worker.wake());
        }
    }
}

/// The registration of one source with a worker.
pub(crate) struct Registration {
    worker: Arc<Worker>,
    token: u64,
}

fn interest() -> epoll::EventFlags {
    epoll::EventFlags::IN
        | epoll::EventFlags::OUT
        | epoll::EventFlags::RDHUP
        | epoll::EventFlags::ET
}

impl Registration {
    /// Watches the socket: the source is called with its present state and on each change.
    pub(crate) fn watch(&self, socket: impl AsFd, source: Arc<dyn Source>) -> io::Result<()> {
        self.watch_ticks(source);
        let data = epoll::EventData::new_u64(self.token);
        epoll::add(&self.worker.epoll, socket, data, interest()).map_err(|error| {
            lock(&self.worker.sources).remove(&self.token);
            error.into()
        })
    }

    /// Calls [`Source::tick`] of the source, without a socket.
    pub(crate) fn watch_ticks(&self, source: Arc<dyn Source>) {
        let first = {
            let mut sources = lock(&self.worker.sources);
            sources.insert(self.token, source);
            sources.len() == 1
        };
        if first {
            // The worker sleeps without a limit while it has no source.
            self.worker.wake();
        }
    }

    /// Makes the worker call the source at this time, or soon after, as if its socket had become writable.
    pub(crate) fn set_timer(&self, at: Instant) {
        let earliest = {
            let mut timers = lock(&self.worker.timers);
            let earliest = timers.iter().all(|(other, _)| at < *other);
            match timers.iter_mut().find(|(_, token)| *token == self.token) {
                Some(timer) => timer.0 = at,
                None => timers.push((at, self.token)),
            }
            earliest
        };
        if earliest && !self.worker.is_current() {
            self.worker.wake();
        }
    }

    /// Makes the worker call the source as if the socket's state had changed. Setting the same interest again makes the
    /// kernel report the present state once more.
    pub(crate) fn wake(&self, socket: impl AsFd) {
        let data = epoll::EventData::new_u64(self.token);
        // Fails only if the socket is no longer watched. Then no call is needed.
        let _ = epoll::modify(&self.worker.epoll, socket, data, interest());
    }

    /// The worker gets no events of the socket, and no thread pays for them, until [`Registration::resume`].
    pub(crate) fn pause(&self, socket: impl AsFd) {
        // Fails only if the socket is not watched.
        let _ = epoll::delete(&self.worker.epoll, socket);
    }

    /// Ends [`Registration::pause`]: the worker gets an event for the present state and for each change.
    pub(crate) fn resume(&self, socket: impl AsFd) {
        let data = epoll::EventData::new_u64(self.token);
        // There was room for it before.
        let _ = epoll::add(&self.worker.epoll, socket, data, interest());
    }

    /// Ends the watch. A call of the source may still be running.
    pub(crate) fn end(&self, socket: impl AsFd) {
        // Fails only if the socket is not watched.
        let _ = epoll::delete(&self.worker.epoll, socket);
        self.end_ticks();
    }

    /// Ends [`Registration::watch_ticks`].
    pub(crate) fn end_ticks(&self) {
        // Dropped after the lock is released: it may be the last reference to a connection.
        let source = lock(&self.worker.sources).remove(&self.token);
        drop(source);
        lock(&self.worker.timers).retain(|(_, token)| *token != self.token);
    }
}

impl Worker {
    fn new(lingering: &Arc<AtomicUsize>) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let data = epoll::EventData::new_u64(WAKE);
        epoll::add(&epoll, &wake, data, epoll::EventFlags::IN | epoll::EventFlags::ET)?;
        Ok(Self {
            epoll,
            wake,
            stop: AtomicBool::new(false),
            lingering: Arc::clone(lingering),
            sources: Mutex::new(HashMap::new()),
            timers: Mutex::default(),
            next_token: AtomicU64::new(WAKE + 1),
            worked: AtomicU64::new(0),
        })
    }

    fn wake(&self) {
        // Edge-triggered: each write is an event, and the counter is never read. The write fails only after 2
        // 64 wake-ups.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Whether the calling thread is this worker.
    fn is_current(&self) -> bool {
        CURRENT.get() == ptr::from_ref(self).addr()
    }

    fn run(&self) {
        sys::block_signals();
        CURRENT.set(ptr::from_ref(self).addr());
        let mut buffer = [MaybeUninit::<epoll::Event>::uninit(); 64];
        let mut next_tick = Instant::now() + TICK;
        let mut woke = Instant::now();
        while !self.stop.load(Ordering::Acquire) || self.lingering.load(Ordering::Acquire) > 0 {
            let asleep = Instant::now();
            self.worked.fetch_add((asleep - woke).as_nanos() as u64, Ordering::Relaxed);
            let timeout = if lock(&self.sources).is_empty() {
                None
            } else {
                let timer = lock(&self.timers).iter().map(|(at, _)| *at).min();
                let next = timer.map_or(next_tick, |at| at.min(next_tick));
                let left = next.saturating_duration_since(asleep);
                Some(Timespec { tv_sec: 0, tv_nsec: left.as_nanos() as _ })
            };
            let events = match epoll::wait(&self.epoll, &mut buffer, timeout.as_ref()) {
                Ok((events, _)) => events,
                Err(rustix::io::Errno::INTR) => {
                    woke = Instant::now();
                    continue;
                }
                Err(error) => {
                    let why = format!("an I/O thread cannot go on: epoll_wait: {error}");
                    let sources: Vec<_> = lock(&self.sources).values().cloned().collect();
                    sources.iter().for_each(|source| source.abandoned(&why));
                    return;
                }
            };
            woke = Instant::now();
            for event in events {
                let flags = event.flags;
                let source = lock(&self.sources).get(&event.data.u64()).cloned();
                let Some(source) = source else { continue };
                let end = epoll::EventFlags::HUP | epoll::EventFlags::RDHUP;
                let readiness = Readiness {
                    readable: flags.intersects(epoll::EventFlags::IN | end),
                    writable: flags.intersects(epoll::EventFlags::OUT),
                    ended: flags.intersects(epoll::EventFlags::ERR | end),
                };
                Self::guard(&*source, |source| source.ready(readiness));
            }
            let now = Instant::now();
            self.fire_timers(now);
            if now >= next_tick {
                next_tick = now + TICK;
                let mut sources = Vec::new();
                let all = lock(&self.sources);
                sources.extend(all.values().filter(|source| source.has_deadlines()).cloned());
                drop(all);
                for source in sources {
                    Self::guard(&*source, |source| source.tick(now));
                }
            }
        }
    }

    fn fire_timers(&self, now: Instant) {
        let due = |timers: &Mutex<Vec<(Instant, u64)>>| {
            let mut timers = lock(timers);
            let index = timers.iter().position(|(at, _)| *at <= now)?;
            Some(timers.swap_remove(index).1)
        };
        while let Some(token) = due(&self.timers) {
            let source = lock(&self.sources).get(&token).cloned();
            if let Some(source) = source {
                let readiness = Readiness { readable: false, writable: true, ended: false };
                Self::guard(&*source, |source| source.ready(readiness));
            }
        }
    }

    /// A defect in one source must not stop the worker of the others.
    fn guard(source: &dyn Source, call: impl Fn(&dyn Source)) {
        if catch_unwind(AssertUnwindSafe(|| call(source))).is_err() {
            source.abandoned("defect: an I/O thread panicked");
        }
        while let Some(work) = DEFERRED.with_borrow_mut(VecDeque::pop_front) {
            // Its owner reports a defect where possible; others continue.
            let _ = catch_unwind(AssertUnwindSafe(work));
        }
    }
}
