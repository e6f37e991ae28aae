//! Asynchronous events of an RDMA device: failed queue pairs and completion queues, and the state
//! of its ports.
//!
//! A worker waits for them, once for each device. It has the device's endpoints check what concerns
//! them. There are few events, so idle endpoints cost nothing.

use std::collections::HashSet;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex, Weak};

use evenkeel_verbs::{AsyncEvent, Context};

use crate::runtime::reactor::{Readiness, Registration, Source, Workers};
use crate::sync::lock;
use crate::telemetry::log::Log;
use crate::weak::WeakList;

/// Maximum number of failed queues of a kind that are remembered. An owner that has already
/// replaced its queue never asks for it.
const MAX_FAILED: usize = 4096;

/// What a device has reported. All its ports share this.
pub(super) struct DeviceEvents {
    pub(super) context: Arc<Context>,
    /// The device has failed for good.
    lost: AtomicBool,
    /// One bit for each port that is down.
    down: AtomicU16,
    /// Numbers of failed queue pairs, until their owners ask.
    failed_queue_pairs: Mutex<HashSet<u32>>,
    /// Failed completion queues, until their owners ask.
    failed_completion_queues: Mutex<HashSet<usize>>,
    /// Present while endpoints use the device.
    watch: Mutex<Weak<EventWatch>>,
    endpoints: Mutex<WeakList<dyn EventHandler>>,
    log: Arc<dyn Log>,
}

/// An endpoint that checks what a device has reported.
pub(super) trait EventHandler: Send + Sync {
    fn on_device_events(&self);
}

/// Keeps a worker waiting for the events of a device.
pub(super) struct EventWatch {
    events: Arc<DeviceEvents>,
    workers: Weak<Workers>,
    registration: Registration,
}

impl Drop for EventWatch {
    fn drop(&mut self) {
        self.registration.end(&*self.events.context);
    }
}

impl DeviceEvents {
    pub(super) fn new(context: &Arc<Context>, log: &Arc<dyn Log>) -> Self {
        Self {
            context: Arc::clone(context),
            lost: AtomicBool::new(false),
            down: AtomicU16::new(0),
            failed_queue_pairs: Mutex::default(),
            failed_completion_queues: Mutex::default(),
            watch: Mutex::default(),
            endpoints: Mutex::default(),
            log: Arc::clone(log),
        }
    }

    /// Calls the endpoint when the device has reported something, while the endpoint holds the
    /// result.
    pub(super) fn watch(
        self: &Arc<Self>,
        workers: &Arc<Workers>,
        endpoint: Weak<dyn EventHandler>,
    ) -> io::Result<Arc<EventWatch>> {
        lock(&self.endpoints).push(endpoint);
        let mut present = lock(&self.watch);
        let is_of_workers =
            |watch: &Arc<EventWatch>| watch.workers.as_ptr() == Arc::as_ptr(workers);
        if let Some(watch) = present.upgrade().filter(is_of_workers) {
            return Ok(watch);
        }
        let watch = Arc::new(EventWatch {
            events: Arc::clone(self),
            workers: Arc::downgrade(workers),
            registration: workers.registration(),
        });
        watch.registration.watch(&*self.context, Arc::new(EventSource(Arc::clone(self))))?;
        *present = Arc::downgrade(&watch);
        Ok(watch)
    }

    /// Whether this queue pair has failed; true for all once the device is lost.
    pub(super) fn queue_pair_failed(&self, pair: u32) -> bool {
        self.lost.load(Ordering::Relaxed) || lock(&self.failed_queue_pairs).remove(&pair)
    }

    /// Whether this completion queue has failed, since this was last asked.
    pub(super) fn completion_queue_failed(&self, queue: usize) -> bool {
        lock(&self.failed_completion_queues).remove(&queue)
    }

    /// Whether a port is down.
    pub(super) fn is_down(&self, port: u8) -> bool {
        if lock(&self.watch).strong_count() == 0 {
            // No endpoint uses the device, so nobody else reads its events.
            self.read_events();
        }
        self.lost.load(Ordering::Relaxed) || self.down.load(Ordering::Relaxed) & bit(port) != 0
    }

    /// Returns whether there were any.
    fn read_events(&self) -> bool {
        let name = self.context.name();
        let mut any = false;
        while let Some(event) = self.context.async_event() {
            any = true;
            match event {
                AsyncEvent::QueuePairFailed(number) => {
                    let mut failed = lock(&self.failed_queue_pairs);
                    if failed.len() < MAX_FAILED {
                        failed.insert(number);
                    }
                }
                AsyncEvent::CompletionQueueFailed(queue) => {
                    let mut failed = lock(&self.failed_completion_queues);
                    if failed.len() < MAX_FAILED {
                        failed.insert(queue);
                    }
                }
                AsyncEvent::DeviceLost => {
                    self.lost.store(true, Ordering::Relaxed);
                    self.log.warn(&format!("evenkeel: RDMA device {name} is lost"));
                }
                AsyncEvent::PortDown(port) => {
                    self.down.fetch_or(bit(port), Ordering::Relaxed);
                    self.log.warn(&format!("evenkeel: RDMA port {name}:{port} is down"));
                }
                AsyncEvent::PortUp(port) => {
                    self.down.fetch_and(!bit(port), Ordering::Relaxed);
                    self.log.info(&format!("evenkeel: RDMA port {name}:{port} is up again"));
                }
            }
        }
        any
    }
}

/// The device's descriptor of events, for its worker.
struct EventSource(Arc<DeviceEvents>);

impl Source for EventSource {
    fn ready(&self, _readiness: Readiness) {
        if self.0.read_events() {
            // Collected first, since an endpoint may fail over to another port of the device, and
            // watch it.
            let endpoints: Vec<_> = lock(&self.0.endpoints).live().collect();
            endpoints.iter().for_each(|endpoint| endpoint.on_device_events());
        }
    }

    // Endpoints notice failures by their completions, too.
    fn abandoned(&self, _why: &str) {}
}

/// The bit of a port. Ports are counted from 1, and a device has few.
fn bit(port: u8) -> u16 {
    1 << (port % 16)
}
