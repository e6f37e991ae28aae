//! What happens to an RDMA device by itself.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex};

use evenkeel_verbs::{Context, Event};

use crate::sync::lock;
use crate::telemetry::log::Log;

/// Most queues that are remembered: nobody looks at those whose owners were faster.
const MAX_FAILED: usize = 4096;

/// What has happened to a device, for all of its ports: whoever asks hears it for the others, too.
pub(super) struct Events {
    pub(super) context: Arc<Context>,
    /// The device cannot go on.
    lost: AtomicBool,
    /// Bit of each port that carries no traffic.
    down: AtomicU16,
    /// Queue pairs that the device has given up, by number, until their owners look.
    failed: Mutex<HashSet<u32>>,
    /// The same of completion queues.
    mute: Mutex<HashSet<usize>>,
    log: Arc<dyn Log>,
}

impl Events {
    pub(super) fn of(context: &Arc<Context>, log: &Arc<dyn Log>) -> Self {
        Self {
            context: Arc::clone(context),
            lost: AtomicBool::new(false),
            down: AtomicU16::new(0),
            failed: Mutex::default(),
            mute: Mutex::default(),
            log: Arc::clone(log),
        }
    }

    /// Whether the device has given up this queue pair; true for all when it is lost.
    pub(super) fn has_failed(&self, pair: u32) -> bool {
        self.hear();
        self.lost.load(Ordering::Relaxed) || lock(&self.failed).remove(&pair)
    }

    /// Whether a completion queue tells nothing any more.
    pub(super) fn is_mute(&self, queue: usize) -> bool {
        self.hear();
        lock(&self.mute).remove(&queue)
    }

    /// Whether nothing gets through a port now, as far as the device says.
    pub(super) fn is_down(&self, port: u8) -> bool {
        self.hear();
        self.lost.load(Ordering::Relaxed) || self.down.load(Ordering::Relaxed) & bit(port) != 0
    }

    fn hear(&self) {
        let name = self.context.name();
        while let Some(event) = self.context.event() {
            match event {
                Event::QueuePair(number) => {
                    let mut failed = lock(&self.failed);
                    if failed.len() < MAX_FAILED {
                        failed.insert(number);
                    }
                }
                Event::CompletionQueue(queue) => {
                    let mut mute = lock(&self.mute);
                    if mute.len() < MAX_FAILED {
                        mute.insert(queue);
                    }
                }
                Event::DeviceLost => {
                    self.lost.store(true, Ordering::Relaxed);
                    self.log.warn(&format!("evenkeel: RDMA device {name} is lost"));
                }
                Event::PortDown(port) => {
                    self.down.fetch_or(bit(port), Ordering::Relaxed);
                    self.log.warn(&format!("evenkeel: RDMA port {name}:{port} is down"));
                }
                Event::PortUp(port) => {
                    self.down.fetch_and(!bit(port), Ordering::Relaxed);
                    self.log.info(&format!("evenkeel: RDMA port {name}:{port} is up again"));
                }
            }
        }
    }
}

/// Ports are counted from 1, and few.
fn bit(port: u8) -> u16 {
    1 << (port % 16)
}
