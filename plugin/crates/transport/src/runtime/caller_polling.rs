//! Who moves a flow's bytes: its worker, or a caller who comes so often that waking anybody would only take the processor
//! from it.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::runtime::reactor::Registration;

/// So many chunks in a row on one flow, and so many visits in a row, are needed for a caller to attend it.
const MIN_STREAK: u32 = 32;
/// Visits are in a row while no more time than this lies between them. The worker looks after it whether the caller still
/// comes.
const LEASE: Duration = Duration::from_millis(1);
const NO_SLOT: usize = usize::MAX;

/// Where a connection's work is, as those who come by see it.
#[derive(Debug)]
pub(crate) struct HotFlow {
    /// A place and, in the lower half, how many chunks in a row were there.
    streak: AtomicU64,
    /// The place of the flow that callers attend, or `NOWHERE`.
    polled: AtomicUsize,
}

impl HotFlow {
    pub(crate) fn new() -> Self {
        Self { streak: AtomicU64::new(0), polled: AtomicUsize::new(NO_SLOT) }
    }

    /// A chunk goes or comes on the flow in this place.
    pub(crate) fn on_chunk(&self, slot: usize) {
        // What gets lost between threads makes a streak shorter, no more.
        let streak = self.streak.load(Ordering::Relaxed);
        let next = match (streak >> 32) as usize == slot {
            true if streak as u32 >= MIN_STREAK => return,
            true => streak + 1,
            false => (slot as u64) << 32 | 1,
        };
        self.streak.store(next, Ordering::Relaxed);
    }

    /// Whether all work has lately been in this place.
    fn is_on(&self, slot: usize) -> bool {
        let streak = self.streak.load(Ordering::Relaxed);
        (streak >> 32) as usize == slot && streak as u32 >= MIN_STREAK
    }

    /// The place of the flow that callers attend.
    pub(crate) fn polled_slot(&self) -> Option<usize> {
        Some(self.polled.load(Ordering::Relaxed)).filter(|slot| *slot != NO_SLOT)
    }

    /// Where callers are to come by each time, if it is one place.
    pub(crate) fn slot(&self) -> Option<usize> {
        if let Some(polled) = self.polled_slot() {
            return Some(polled);
        }
        let streak = self.streak.load(Ordering::Relaxed);
        (streak as u32 >= MIN_STREAK).then_some((streak >> 32) as usize)
    }
}

/// Who moves the bytes of one flow, in one direction. Kept by whoever has the turn.
#[derive(Debug)]
pub(crate) struct PollOwner {
    slot: usize,
    polls: u32,
    last: Option<Instant>,
    /// While a caller attends: when the worker was asked to look again.
    check_at: Option<Instant>,
}

impl PollOwner {
    /// The worker's, at first.
    pub(crate) fn new(slot: usize) -> Self {
        Self { slot, polls: 0, last: None, check_at: None }
    }

    /// Whether a caller attends.
    pub(crate) fn is_caller(&self) -> bool {
        self.check_at.is_some()
    }

    /// A caller has come. It attends if it comes often, and all work is here; the worker then hears of nothing.
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

    /// The worker is here. If no caller has come for a while, it is the worker's again.
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

    /// To be called in each turn: the worker may have come to look while somebody else had it, who does so in its place.
    pub(crate) fn renew(&mut self, registration: &Registration) {
        if let Some(check_at) = self.check_at {
            let now = Instant::now();
            if now >= check_at {
                self.schedule_check(now, registration);
            }
        }
    }

    /// It is the worker's from now on, what there is already included.
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
