//! Asynchronous events of an RDMA device: failed queue pairs and completion queues, and the state of its ports.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex};

use evenkeel_verbs::{AsyncEvent, Context};

use crate::sync::lock;
use crate::telemetry::log::Log;

/// Maximum number of failed queues of a kind that are remembered. An owner that has already replaced its queue never asks
/// for it.
const MAX_FAILED: usize = 4096;

/// What a device has reported. All its ports share this: each query reads the events of all.
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
    log: Arc<dyn Log>,
}

impl DeviceEvents {
    pub(super) fn new(context: &Arc<Context>, log: &Arc<dyn Log>) -> Self {
        Self {
            context: Arc::clone(context),
            lost: AtomicBool::new(false),
            down: AtomicU16::new(0),
            failed_queue_pairs: Mutex::default(),
            failed_completion_queues: Mutex::default(),
            log: Arc::clone(log),
        }
    }

    /// Whether this queue pair has failed; true for all once the device is lost.
    pub(super) fn queue_pair_failed(&self, pair: u32) -> bool {
        self.read_events();
        self.lost.load(Ordering::Relaxed) || lock(&self.failed_queue_pairs).remove(&pair)
    }

    /// Whether this completion queue has failed, since this was last asked.
    pub(super) fn completion_queue_failed(&self, queue: usize) -> bool {
        self.read_events();
        lock(&self.failed_completion_queues).remove(&queue)
    }

    /// Whether a port is down.
    pub(super) fn is_down(&self, port: u8) -> bool {
        self.read_events();
        self.lost.load(Ordering::Relaxed) || self.down.load(Ordering::Relaxed) & bit(port) != 0
    }

    fn read_events(&self) {
        let name = self.context.name();
        while let Some(event) = self.context.async_event() {
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
    }
}

/// The bit of a port. Ports are counted from 1, and a device has few.
fn bit(port: u8) -> u16 {
    1 << (port % 16)
}
