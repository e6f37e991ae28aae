//! The worker threads. They wait for sockets and timers and call the sources registered for them.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};

use crate::error::Error;
use crate::handshake::listening_socket::ListeningSockets;
use crate::memory::staging::StagingPool;
use crate::runtime::alarms::{Alarms, Timer};
use crate::runtime::caller_polling::{CallerPolling, MAX_PAUSE, SeenTurn, Turn};
use crate::runtime::extra_flows::ExtraFlows;
use crate::runtime::flow_count::FlowCountControllers;
use crate::runtime::waiters;
use crate::sync::lock;
use crate::sys;
use crate::tcp::lone_pacing::LonePacing;
use crate::tcp::retransmit_buffer::RetransmitPool;
use crate::telemetry::exporter::Exporter;
use crate::watch::Watch;

/// How often sources with timeouts check them. It delays no events.
const TICK: Duration = Duration::from_millis(125);
/// The token of the worker's own wake-up.
const WAKE: u64 = 0;
/// Maximum number of events per turn.
const MAX_EVENTS: usize = 64;
/// Waits of up to this time are not rounded up to whole milliseconds.
const MAX_EXACT_WAIT: Duration = Duration::from_millis(10);

thread_local! {
    /// Address of the worker that this thread runs; 0 on other threads.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
    /// Work deferred until the current source returns.
    static DEFERRED: RefCell<VecDeque<Box<dyn FnOnce()>>> = const { RefCell::new(VecDeque::new()) };
}

/// Runs `work` on the calling thread once it holds no lock of a connection. Returns false without
/// running it if the thread is no worker. Meant for short work after a
/// [notification](crate::Notify), without waking another thread. The work must not block, because
/// sockets wait for it.
pub fn defer_on_worker(work: impl FnOnce() + 'static) -> bool {
    let here = CURRENT.get() != 0;
    if here {
        DEFERRED.with_borrow_mut(|deferred| deferred.push_back(Box::new(work)));
    }
    here
}

/// What changed on a socket since the last call.
#[derive(Clone, Copy)]
pub(crate) struct Readiness {
    /// There may be something to read, including the end of the stream.
    pub(crate) readable: bool,
    /// There may be room to write.
    pub(crate) writable: bool,
    /// The peer ended its direction, or the socket has an error.
    pub(crate) ended: bool,
}

/// Something registered with a worker. One thread at a time calls it, a worker or a polling caller.
/// Callers' other calls may run concurrently.
pub(crate) trait Source: Send + Sync {
    /// Called after the socket's state changed or after [`Registration::wake`]. It is not called
    /// again until the next change, so it must read and write as far as possible or wake itself.
    fn ready(&self, readiness: Readiness);
    /// Checks timeouts after [`Registration::request_tick`]. Returns whether to call it again at
    /// the next tick. An idle source returns false and costs nothing.
    fn tick(&self, _now: Instant) -> bool {
        false
    }
    /// Called if the worker ends, or after the source panicked. The worker does not call the source
    /// again.
    fn abandoned(&self, why: &str);
}

/// Owns the running workers. Dropping it stops and joins them, unless a worker drops it. Only
/// handles given to callers own a `Runtime`; sources own [`Workers`]. A caller may drop its last
/// handle in [`defer_on_worker`], and thus on a worker.
pub(crate) struct Runtime {
    workers: Arc<Workers>,
    threads: Vec<JoinHandle<()>>,
    _exporter: Option<Exporter>,
    _watch: Option<Watch>,
}

/// The workers as seen by sources.
pub(crate) struct Workers {
    all: Vec<Arc<Worker>>,
    next: AtomicUsize,
    /// Number of closed connections that still deliver messages.
    lingering: Arc<AtomicUsize>,
    caller_polling: Arc<CallerPolling>,
    pub(crate) flow_counts: FlowCountControllers,
    pub(crate) extra_flows: Arc<ExtraFlows>,
    pub(crate) staging: Arc<StagingPool>,
    pub(crate) retransmit_pool: Arc<RetransmitPool>,
    pub(crate) lone_pacing: LonePacing,
    pub(crate) listening_sockets: ListeningSockets,
}

struct Worker {
    epoll: OwnedFd,
    wake: OwnedFd,
    stop: AtomicBool,
    lingering: Arc<AtomicUsize>,
    caller_polling: Arc<CallerPolling>,
    /// Held while a thread calls sources.
    turn: Mutex<()>,
    sources: Mutex<HashMap<u64, Arc<dyn Source>>>,
    /// When to call sources without an event.
    alarms: Mutex<Alarms>,
    ticks: Mutex<TickRequests>,
    next_token: AtomicU64,
    /// Nanoseconds that it did not spend waiting.
    worked: AtomicU64,
}

/// The sources to call at the next tick.
#[derive(Default)]
struct TickRequests {
    /// When the next tick is. `None` while there are no sources and none is being called.
    due: Option<Instant>,
    /// Tokens, each with the flag that marks it as being in the list.
    sources: Vec<(u64, Arc<AtomicBool>)>,
}

impl Runtime {
    /// Starts `count` workers. The exporter and the watch live as long as the workers.
    pub(crate) fn start(
        count: usize,
        exporter: Option<Exporter>,
        watch: Option<Watch>,
    ) -> Result<Arc<Self>, Error> {
        let fail = |error: io::Error| Error::system("cannot start I/O threads", &error);
        let lingering = Arc::new(AtomicUsize::new(0));
        let caller_polling = Arc::default();
        let all = (0..count)
            .map(|_| Worker::new(&lingering, &caller_polling).map(Arc::new))
            .collect::<io::Result<Vec<_>>>()
            .map_err(fail)?;
        let workers = Arc::new(Workers {
            all,
            next: AtomicUsize::new(0),
            lingering,
            caller_polling,
            flow_counts: FlowCountControllers::default(),
            extra_flows: Arc::default(),
            staging: Arc::default(),
            retransmit_pool: Arc::default(),
            lone_pacing: LonePacing::default(),
            listening_sockets: ListeningSockets::default(),
        });
        // From here on, dropping the runtime stops the threads that have started.
        let mut runtime = Self { workers, threads: Vec::new(), _exporter: exporter, _watch: watch };
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
            // The threads end by themselves. This thread must wait neither for a peer nor for
            // itself.
            return;
        }
        for thread in self.threads.drain(..) {
            // A worker catches its sources' panics, so the result is of no use.
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
        Registration { worker, token, tick_requested: Arc::default() }
    }

    /// Time that workers did not spend waiting, plus time that callers spent on workers' work.
    pub(crate) fn worked(&self) -> Duration {
        let worked = self.all.iter().map(|worker| worker.worked.load(Ordering::Relaxed));
        Duration::from_nanos(worked.sum::<u64>() + self.caller_polling.worked())
    }

    /// Number of threads that may do workers' work at once. Only one caller at a time runs a turn.
    pub(crate) fn threads(&self) -> usize {
        if self.callers_lead() { 1 } else { self.all.len() }
    }

    /// Whether callers poll so often that they do the workers' work.
    pub(crate) fn callers_lead(&self) -> bool {
        self.caller_polling.leads()
    }

    /// Makes progress on all connections for a caller that polls one of them, whose last known turn
    /// is given. Makes no system call if a turn ran since the connection was last polled.
    pub(crate) fn caller_polls(&self, seen: &SeenTurn) {
        if CURRENT.get() != 0 {
            // A worker is running a turn anyway.
            return;
        }
        if waiters::is_about_to_sleep() {
            if self.caller_polling.sleeps() {
                self.all.iter().for_each(|worker| worker.wake());
            }
            self.run_turn();
            return;
        }
        let Turn::Run { streak, begins } = self.caller_polling.poll(seen) else { return };
        if begins {
            // They wait for events and would wake up in vain.
            self.all.iter().for_each(|worker| worker.wake());
        }
        self.run_turn();
        drop(streak);
    }

    fn run_turn(&self) {
        let begin = Instant::now();
        let events = self.all.iter().map(|worker| worker.caller_turn(begin)).sum();
        if events > 0 {
            self.caller_polling.add_turn(events);
            self.add_caller_work(begin.elapsed());
        }
    }

    /// Adds time that a caller spent on workers' work.
    pub(crate) fn add_caller_work(&self, time: Duration) {
        self.caller_polling.add_work(time);
    }

    /// Keeps the workers running until the result is dropped, even if the runtime is dropped
    /// before.
    pub(crate) fn linger(self: &Arc<Self>) -> Linger {
        self.lingering.fetch_add(1, Ordering::AcqRel);
        Linger(Arc::clone(self))
    }
}

/// Keeps the workers running while it exists.
pub(crate) struct Linger(Arc<Workers>);

impl Drop for Linger {
    fn drop(&mut self) {
        if self.0.lingering.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.all.iter().for_each(|worker| worker.wake());
        }
    }
}

/// Registers one source with a worker.
pub(crate) struct Registration {
    worker: Arc<Worker>,
    token: u64,
    /// Whether it is in the list for the next tick.
    tick_requested: Arc<AtomicBool>,
}

fn interest() -> epoll::EventFlags {
    epoll::EventFlags::IN
        | epoll::EventFlags::OUT
        | epoll::EventFlags::RDHUP
        | epoll::EventFlags::ET
}

impl Registration {
    /// Watches the socket. The worker calls the source with the socket's current state and after
    /// each change.
    pub(crate) fn watch(&self, socket: impl AsFd, source: Arc<dyn Source>) -> io::Result<()> {
        self.watch_ticks(source);
        let data = epoll::EventData::new_u64(self.token);
        epoll::add(&self.worker.epoll, socket, data, interest()).map_err(|error| {
            lock(&self.worker.sources).remove(&self.token);
            error.into()
        })
    }

    /// Registers a source without a socket, for ticks only.
    pub(crate) fn watch_ticks(&self, source: Arc<dyn Source>) {
        lock(&self.worker.sources).insert(self.token, source);
    }

    /// Makes the worker call [`Source::tick`] at its next tick, and at each further tick as long as
    /// that returns true. The call sees everything done before under a lock that it takes. Cheap if
    /// already requested.
    pub(crate) fn request_tick(&self) {
        if !self.tick_requested.load(Ordering::Relaxed) {
            self.worker.request_tick(self.token, &self.tick_requested);
        }
    }

    /// Makes the worker call the source at this time, or soon after, as if its socket had become
    /// writable. While callers do the workers' work, the call may be later by the pause that they
    /// may make.
    pub(crate) fn set_timer(&self, at: Instant) {
        self.set(at, Timer::Prompt);
    }

    /// As [`Registration::set_timer`], for work that can wait until callers poll again or workers
    /// take over.
    pub(crate) fn set_timer_by_callers(&self, at: Instant) {
        self.set(at, Timer::ByCallers);
    }

    fn set(&self, at: Instant, timer: Timer) {
        let must_wake = lock(&self.worker.alarms).set(self.token, at, timer);
        if must_wake {
            self.worker.wake();
        }
    }

    /// Makes the worker call the source as if the socket's state had changed. Setting the same
    /// interest again makes the kernel report the current state once more (epoll_ctl(2),
    /// EPOLL_CTL_MOD).
    pub(crate) fn wake(&self, socket: impl AsFd) {
        let data = epoll::EventData::new_u64(self.token);
        // Fails only if the socket is no longer watched, and then no call is needed.
        let _ = epoll::modify(&self.worker.epoll, socket, data, interest());
    }

    /// Stops watching the socket. A call of the source may still be running.
    pub(crate) fn end(&self, socket: impl AsFd) {
        // Fails only if the socket is not watched.
        let _ = epoll::delete(&self.worker.epoll, socket);
        self.end_ticks();
    }

    /// Ends [`Registration::watch_ticks`].
    pub(crate) fn end_ticks(&self) {
        // Dropped after the lock is released, because it may be the last reference to a connection.
        let source = lock(&self.worker.sources).remove(&self.token);
        drop(source);
        lock(&self.worker.alarms).cancel(self.token);
    }
}

impl Worker {
    fn new(lingering: &Arc<AtomicUsize>, caller_polling: &Arc<CallerPolling>) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let data = epoll::EventData::new_u64(WAKE);
        // Level-triggered, because a caller's turn may see it, but only the worker clears it.
        epoll::add(&epoll, &wake, data, epoll::EventFlags::IN)?;
        Ok(Self {
            epoll,
            wake,
            stop: AtomicBool::new(false),
            lingering: Arc::clone(lingering),
            caller_polling: Arc::clone(caller_polling),
            turn: Mutex::default(),
            sources: Mutex::new(HashMap::new()),
            alarms: Mutex::default(),
            ticks: Mutex::default(),
            next_token: AtomicU64::new(WAKE + 1),
            worked: AtomicU64::new(0),
        })
    }

    fn wake(&self) {
        // Fails only after 2^64 wake-ups that the worker has not cleared.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Whether the calling thread is this worker.
    fn is_current(&self) -> bool {
        CURRENT.get() == ptr::from_ref(self).addr()
    }

    fn run(&self) {
        sys::block_signals();
        CURRENT.set(ptr::from_ref(self).addr());
        let mut buffer = [MaybeUninit::<epoll::Event>::uninit(); MAX_EVENTS];
        let mut woke = Instant::now();
        let mut lease = None;
        while !self.stop.load(Ordering::Acquire) || self.lingering.load(Ordering::Acquire) > 0 {
            let asleep = Instant::now();
            self.worked.fetch_add((asleep - woke).as_nanos() as u64, Ordering::Relaxed);
            lease = self.caller_polling.lease(lease, asleep);
            let waited = match lease {
                Some(lease) => self.wait_as_reserve(asleep, lease.until).map(|()| &mut [][..]),
                None => self.wait_for_events(asleep, &mut buffer),
            };
            lock(&self.alarms).wake();
            woke = Instant::now();
            let events = match waited {
                Ok(events) => events,
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => {
                    let why = format!("an I/O thread cannot go on: epoll_wait: {error}");
                    let sources: Vec<_> = lock(&self.sources).values().cloned().collect();
                    sources.iter().for_each(|source| source.abandoned(&why));
                    return;
                }
            };
            if lease.is_some() || events.iter().any(|event| event.data.u64() == WAKE) {
                // Clears it. Fails if there was no wake-up.
                let _ = rustix::io::read(&self.wake, &mut [0; 8]);
            }
            let _turn = lock(&self.turn);
            self.dispatch(events);
            let now = Instant::now();
            self.fire_timers(now);
            if self.next_tick().is_some_and(|due| now >= due) {
                self.tick(now);
            }
        }
    }

    /// Waits for events, the next timer or the next tick, and without end if there is none of
    /// these.
    fn wait_for_events<'a>(
        &self,
        now: Instant,
        buffer: &'a mut [MaybeUninit<epoll::Event>],
    ) -> rustix::io::Result<&'a mut [epoll::Event]> {
        let until = lock(&self.alarms).sleep(self.next_tick());
        let mut time = until.map(|until| until.saturating_duration_since(now));
        if let Some(exact) = time.filter(|time| !time.is_zero() && *time <= MAX_EXACT_WAIT) {
            // epoll_pwait counts in milliseconds. epoll_pwait2 needs Linux 5.11, and a seccomp
            // profile that has it.
            let events = &mut [PollFd::new(&self.epoll, PollFlags::IN)];
            poll(events, Some(&timespec(exact)))?;
            time = Some(Duration::ZERO);
        }
        let time = time.map(timespec);
        epoll::wait(&self.epoll, buffer, time.as_ref()).map(|(events, _)| events)
    }

    /// Leaves events to callers until the end of a lease, and waits for the timers that they do not
    /// fire.
    fn wait_as_reserve(&self, now: Instant, limit: Instant) -> rustix::io::Result<()> {
        let until = lock(&self.alarms).sleep_as_reserve(now, limit, MAX_PAUSE);
        let time = timespec(until.saturating_duration_since(now));
        let wake = &mut [PollFd::new(&self.wake, PollFlags::IN)];
        poll(wake, Some(&time)).map(|_| ())
    }

    /// When the next tick is, if a source has requested one.
    fn next_tick(&self) -> Option<Instant> {
        lock(&self.ticks).due
    }

    fn request_tick(&self, token: u64, requested: &Arc<AtomicBool>) {
        let is_first = {
            let mut ticks = lock(&self.ticks);
            if requested.swap(true, Ordering::Relaxed) {
                return;
            }
            ticks.sources.push((token, Arc::clone(requested)));
            let is_first = ticks.due.is_none();
            ticks.due.get_or_insert_with(|| Instant::now() + TICK);
            is_first
        };
        if is_first && !self.is_current() && !self.caller_polling.leads() {
            self.wake();
        }
    }

    /// Calls the sources that requested a tick.
    fn tick(&self, now: Instant) {
        let requests = std::mem::take(&mut lock(&self.ticks).sources);
        for (token, requested) in requests {
            // Before the call, because a request made meanwhile may be for something that the call
            // does not see.
            requested.store(false, Ordering::Relaxed);
            let source = lock(&self.sources).get(&token).cloned();
            let Some(source) = source else { continue };
            let mut is_left = false;
            Self::guard(&*source, |source| is_left = source.tick(now));
            if is_left {
                self.request_tick(token, &requested);
            }
        }
        let mut ticks = lock(&self.ticks);
        ticks.due = (!ticks.sources.is_empty()).then_some(now + TICK);
    }

    /// Takes the current events for a caller, unless another thread does. Returns their number.
    fn caller_turn(&self, now: Instant) -> usize {
        let _turn = match self.turn.try_lock() {
            Ok(turn) => turn,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return 0,
        };
        let mut buffer = [MaybeUninit::<epoll::Event>::uninit(); MAX_EVENTS];
        // If it fails, the worker reports that.
        let taken = epoll::wait(&self.epoll, &mut buffer, Some(&Timespec::default()));
        let Ok((events, _)) = taken else { return 0 };
        self.dispatch(events);
        self.fire_timers(now);
        events.len()
    }

    /// Calls the sources of these events. The turn's lock is held.
    fn dispatch(&self, events: &[epoll::Event]) {
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
    }

    fn fire_timers(&self, now: Instant) {
        let due = || lock(&self.alarms).pop_due(now);
        while let Some(token) = due() {
            let source = lock(&self.sources).get(&token).cloned();
            if let Some(source) = source {
                let readiness = Readiness { readable: false, writable: true, ended: false };
                Self::guard(&*source, |source| source.ready(readiness));
            }
        }
    }

    /// Calls a source. A panic in one source must not stop the others.
    fn guard(source: &dyn Source, mut call: impl FnMut(&dyn Source)) {
        if catch_unwind(AssertUnwindSafe(|| call(source))).is_err() {
            source.abandoned("defect: an I/O thread panicked");
        }
        while let Some(work) = DEFERRED.with_borrow_mut(VecDeque::pop_front) {
            // Its owner reports the defect where possible. Other sources continue.
            let _ = catch_unwind(AssertUnwindSafe(work));
        }
    }
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs() as _, tv_nsec: time.subsec_nanos() as _ }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::request::Request;
    use crate::memory::buffers::{RecvBuffer, SendBuffer};
    use crate::test_support::{transport, until};
    use crate::{MemoryTypes, test_support};

    /// A source that asks for some ticks.
    struct Asks {
        registration: Registration,
        left: AtomicUsize,
    }

    fn source(workers: &Workers, left: usize) -> Arc<Asks> {
        let registration = workers.registration();
        let source = Arc::new(Asks { registration, left: left.into() });
        source.registration.watch_ticks(Arc::<Asks>::clone(&source));
        source
    }

    impl Source for Asks {
        fn ready(&self, _readiness: Readiness) {}

        fn tick(&self, _now: Instant) -> bool {
            self.left.fetch_sub(1, Ordering::Relaxed) > 1
        }

        fn abandoned(&self, why: &str) {
            panic!("{why}");
        }
    }

    /// A source that notes when its timer fires.
    struct Fires {
        registration: Registration,
        fired: Mutex<Option<Instant>>,
    }

    impl Source for Fires {
        fn ready(&self, _readiness: Readiness) {
            lock(&self.fired).get_or_insert_with(Instant::now);
        }

        fn abandoned(&self, why: &str) {
            panic!("{why}");
        }
    }

    /// The shortest of the times that a timer of this length took, each of them set after
    /// `prepare`.
    fn shortest(workers: &Workers, length: Duration, mut prepare: impl FnMut()) -> Duration {
        let registration = workers.registration();
        let source = Arc::new(Fires { registration, fired: Mutex::default() });
        source.registration.watch_ticks(Arc::<Fires>::clone(&source));
        let times = (0..50).map(|_| {
            prepare();
            *lock(&source.fired) = None;
            let begin = Instant::now();
            source.registration.set_timer(begin + length);
            until(|| *lock(&source.fired)) - begin
        });
        let shortest = times.min().unwrap();
        source.registration.end_ticks();
        shortest
    }

    #[test]
    fn timer_is_not_rounded_to_milliseconds() {
        let runtime = Runtime::start(1, None, None).unwrap();
        let length = Duration::from_micros(250);
        let time = shortest(runtime.workers(), length, || {});
        assert!(time >= length && time < 3 * length, "{time:?} in place of {length:?}");
    }

    #[test]
    fn timer_fires_soon_where_callers_that_led_do_not_poll() {
        let runtime = Runtime::start(1, None, None).unwrap();
        let workers = runtime.workers();
        let time = shortest(workers, MAX_PAUSE, || {
            let seen = SeenTurn::default();
            until(|| (!workers.callers_lead()).then_some(()));
            until(|| {
                workers.caller_polls(&seen);
                workers.callers_lead().then_some(())
            });
        });
        assert!(time >= MAX_PAUSE && time < 3 * MAX_PAUSE, "{time:?} in place of {MAX_PAUSE:?}");
    }

    /// Returns once no worker has a tick to make.
    fn wait_for_idle_workers(workers: &Workers) {
        until(|| workers.all.iter().all(|worker| worker.next_tick().is_none()).then_some(()));
    }

    #[test]
    fn tick_is_called_only_while_it_is_requested() {
        let runtime = Runtime::start(1, None, None).unwrap();
        let (asks, silent) = (source(runtime.workers(), 3), source(runtime.workers(), 3));
        let worker = &runtime.workers().all[0];
        for round in 0..2 {
            asks.left.store(3, Ordering::Relaxed);
            (0..5).for_each(|_| asks.registration.request_tick());
            assert!(worker.next_tick().is_some(), "round {round}");
            wait_for_idle_workers(runtime.workers());
            assert_eq!(asks.left.load(Ordering::Relaxed), 0);
            // One that is watched again, as after a failover, may ask again.
            asks.registration.end_ticks();
            asks.registration.watch_ticks(Arc::<Asks>::clone(&asks));
        }
        assert_eq!(silent.left.load(Ordering::Relaxed), 3);
        [asks, silent].iter().for_each(|source| source.registration.end_ticks());
    }

    #[test]
    fn idle_connections_request_no_ticks_and_hold_no_copies() {
        const PAIRS: usize = 20;
        let transport = transport();
        let listener = transport.listen(0, "", MemoryTypes::HOST).unwrap();
        let pairs: Vec<_> = (0..PAIRS)
            .map(|_| test_support::connected(&transport, &listener, listener.handle()))
            .collect();
        let runtime = transport.runtime().unwrap();
        wait_for_idle_workers(runtime.workers());
        for length in [100, 1 << 20] {
            for (send, recv) in &pairs {
                let memory = || Box::leak(vec![1; length].into_boxed_slice());
                let received = recv.recv(RecvBuffer::from_static(memory())).unwrap().unwrap();
                let sent = send.send(SendBuffer::from_static(memory())).unwrap().unwrap();
                let done = |request: &Request| request.test().unwrap();
                assert_eq!(until(|| done(&received)), length as u64);
                until(|| done(&sent));
            }
            wait_for_idle_workers(runtime.workers());
            assert_eq!(runtime.workers().retransmit_pool.used(), 0);
        }
    }

    #[test]
    fn caller_polling_that_ends_leaves_the_work_to_workers() {
        const LENGTH: usize = 8 << 20;
        let (send, recv) = test_support::pair();
        let memory = || Box::leak(vec![1; LENGTH].into_boxed_slice());
        for _ in 0..3 {
            let to = memory();
            let received = recv.recv(RecvBuffer::from_static(to)).unwrap().unwrap();
            (0..1000).for_each(|_| assert_eq!(received.test().unwrap(), None));
            let sent = send.send(SendBuffer::from_static(memory())).unwrap().unwrap();
            // From here on nobody polls.
            assert_eq!(until(|| received.peek().unwrap()), LENGTH as u64);
            until(|| sent.peek().unwrap());
        }
    }

    #[test]
    fn caller_polling_moves_many_connections_by_one_connections_polls() {
        const PAIRS: usize = 10;
        let transport = transport();
        let listener = transport.listen(0, "", MemoryTypes::HOST).unwrap();
        let pairs: Vec<_> = (0..PAIRS)
            .map(|_| test_support::connected(&transport, &listener, listener.handle()))
            .collect();
        let runtime = transport.runtime().unwrap();
        let memory = || Box::leak(vec![1; 100_000].into_boxed_slice());
        let waits = pairs[0].1.recv(RecvBuffer::from_static(memory())).unwrap().unwrap();
        let poll = || assert_eq!(waits.test().unwrap(), None);
        until(|| {
            poll();
            runtime.workers().callers_lead().then_some(())
        });
        let requests: Vec<_> = pairs[1..]
            .iter()
            .flat_map(|(send, recv)| {
                let received = recv.recv(RecvBuffer::from_static(memory())).unwrap().unwrap();
                let sent = send.send(SendBuffer::from_static(memory())).unwrap().unwrap();
                [received, sent]
            })
            .collect();
        until(|| {
            poll();
            requests.iter().all(|request| request.peek().unwrap().is_some()).then_some(())
        });
    }
}
