//! Decides which thread moves a flow's bytes: its worker, or a calling thread that polls so often that waking the worker
//! would only take the processor from it.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::runtime::reactor::Registration;

/// Number of chunks in a row on one flow, and of polls in a row, before a caller owns the polling of a flow.
const MIN_STREAK: u32 = 32;
/// Maximum time between two polls in a row. The worker checks after this time whether the caller still polls.
const LEASE: Duration = Duration::from_millis(1);
const NO_SLOT: usize = usize::MAX;

/// The flow that has carried a connection's latest chunks, as all threads see it.
#[derive(Debug)]
pub(crate) struct HotFlow {
    /// A slot and, in the lower half, the number of chunks in a row on it.
    streak: AtomicU64,
    /// The slot of the flow that callers poll, or `NO_SLOT`.
    polled: AtomicUsize,
}

impl HotFlow {
    pub(crate) fn new() -> Self {
        Self { streak: AtomicU64::new(0), polled: AtomicUsize::new(NO_SLOT) }
    }

    /// A chunk is sent or received on the flow in this slot.
    pub(crate) fn on_chunk(&self, slot: usize) {
        // An update that is lost between threads only shortens the streak.
        let streak = self.streak.load(Ordering::Relaxed);
        let next = match (streak >> 32) as usize == slot {
            true if streak as u32 >= MIN_STREAK => return,
            true => streak + 1,
            false => (slot as u64) << 32 | 1,
        };
        self.streak.store(next, Ordering::Relaxed);
    }

    /// Whether all recent chunks were in this slot.
    fn is_on(&self, slot: usize) -> bool {
        let streak = self.streak.load(Ordering::Relaxed);
        (streak >> 32) as usize == slot && streak as u32 >= MIN_STREAK
    }

    /// The slot of the flow that callers poll.
    pub(crate) fn polled_slot(&self) -> Option<usize> {
        Some(self.polled.load(Ordering::Relaxed)).filter(|slot| *slot != NO_SLOT)
    }

    /// The slot that callers should poll each time, if there is one.
    pub(crate) fn slot(&self) -> Option<usize> {
        if let Some(polled) = self.polled_slot() {
            return Some(polled);
        }
        let streak = self.streak.load(Ordering::Relaxed);
        (streak as u32 >= MIN_STREAK).then_some((streak >> 32) as usize)
    }
}

/// The owner of the polling of one flow in one direction: its worker or a caller. Guarded by the flow's work lock.
#[derive(Debug)]
pub(crate) struct PollOwner {
    slot: usize,
    polls: u32,
    last: Option<Instant>,
    /// While a caller owns the polling: when the worker checks next.
    check_at: Option<Instant>,
}

impl PollOwner {
    /// Owned by the worker at first.
    pub(crate) fn new(slot: usize) -> Self {
        Self { slot, polls: 0, last: None, check_at: None }
    }

    /// Whether a caller owns the polling.
    pub(crate) fn is_caller(&self) -> bool {
        self.check_at.is_some()
    }

    /// A caller polls. It becomes the owner if it polls often and all recent chunks were on this flow. The worker gets no
    /// events of the socket then.
    pub(crate) fn on_caller_poll(
        &mut self,
        hot_flow: &HotFlow,
        registration: &Registration,
        socket: &socket2::Socket,
    ) {
        let now = Instant::now();
        let last = self.last.replace(now);
        if !hot_flow.is_on(self.slot) {
            self.polls = 0;
            self.release(hot_flow, registration, socket);
            return;
        }
        let in_a_row = last.is_some_and(|last| now.duration_since(last) <= LEASE);
        self.polls = if in_a_row { self.polls.saturating_add(1) } else { 0 };
        let free = || {
            let (polled, order) = (&hot_flow.polled, Ordering::Relaxed);
            polled.compare_exchange(NO_SLOT, self.slot, order, order).is_ok()
        };
        if !self.is_caller() && self.polls >= MIN_STREAK && free() {
            registration.pause(socket);
            self.schedule_check(now, registration);
        }
    }

    /// The worker was called. It becomes the owner if no caller has polled for a while.
    pub(crate) fn on_worker(
        &mut self,
        hot_flow: &HotFlow,
        registration: &Registration,
        socket: &socket2::Socket,
    ) {
        if !self.is_caller() {
            return;
        }
        match self.last.filter(|last| last.elapsed() < LEASE) {
            Some(last) => self.schedule_check(last, registration),
            None => self.release(hot_flow, registration, socket),
        }
    }

    /// Called with each work. The worker's check may have come while another thread had the lock, which schedules the next
    /// check in its place.
    pub(crate) fn renew(&mut self, registration: &Registration) {
        if let Some(check_at) = self.check_at {
            let now = Instant::now();
            if now >= check_at {
                self.schedule_check(now, registration);
            }
        }
    }

    /// The worker owns the polling from now on, including events that are pending.
    pub(crate) fn release(
        &mut self,
        hot_flow: &HotFlow,
        registration: &Registration,
        socket: &socket2::Socket,
    ) {
        if self.check_at.take().is_some() {
            hot_flow.polled.store(NO_SLOT, Ordering::Relaxed);
            registration.resume(socket);
        }
    }

    fn schedule_check(&mut self, from: Instant, registration: &Registration) {
        let check_at = from + LEASE;
        self.check_at = Some(check_at);
        registration.set_timer(check_at);
    }
}
