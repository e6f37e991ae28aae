//! Who moves a flow's bytes: its worker, or a caller who comes so often that waking anybody would only take the processor
//! from it.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::runtime::reactor::Registration;

/// So many chunks in a row on one flow, and so many visits in a row, are needed for a caller to attend it.
const DILIGENT: u32 = 32;
/// Visits are in a row while no more time than this lies between them. The worker looks after it whether the caller still
/// comes.
const LEASE: Duration = Duration::from_millis(1);
const NOWHERE: usize = usize::MAX;

/// Where a connection's work is, as those who come by see it.
#[derive(Debug)]
pub(crate) struct Focus {
    /// A place and, in the lower half, how many chunks in a row were there.
    streak: AtomicU64,
    /// The place of the flow that callers attend, or `NOWHERE`.
    attended: AtomicUsize,
}

impl Focus {
    pub(crate) fn new() -> Self {
        Self { streak: AtomicU64::new(0), attended: AtomicUsize::new(NOWHERE) }
    }

    /// A chunk goes or comes on the flow in this place.
    pub(crate) fn chunk(&self, place: usize) {
        // What gets lost between threads makes a streak shorter, no more.
        let streak = self.streak.load(Ordering::Relaxed);
        let next = match (streak >> 32) as usize == place {
            true if streak as u32 >= DILIGENT => return,
            true => streak + 1,
            false => (place as u64) << 32 | 1,
        };
        self.streak.store(next, Ordering::Relaxed);
    }

    /// Whether all work has lately been in this place.
    fn is_on(&self, place: usize) -> bool {
        let streak = self.streak.load(Ordering::Relaxed);
        (streak >> 32) as usize == place && streak as u32 >= DILIGENT
    }

    /// The place of the flow that callers attend.
    pub(crate) fn attended(&self) -> Option<usize> {
        Some(self.attended.load(Ordering::Relaxed)).filter(|place| *place != NOWHERE)
    }

    /// Where callers are to come by each time, if it is one place.
    pub(crate) fn place(&self) -> Option<usize> {
        if let Some(attended) = self.attended() {
            return Some(attended);
        }
        let streak = self.streak.load(Ordering::Relaxed);
        (streak as u32 >= DILIGENT).then_some((streak >> 32) as usize)
    }
}

/// Who moves the bytes of one flow, in one direction. Kept by whoever has the turn.
#[derive(Debug)]
pub(crate) struct Attendance {
    place: usize,
    visits: u32,
    last: Option<Instant>,
    /// While a caller attends: when the worker was asked to look again.
    look: Option<Instant>,
}

impl Attendance {
    /// The worker's, at first.
    pub(crate) fn new(place: usize) -> Self {
        Self { place, visits: 0, last: None, look: None }
    }

    /// Whether a caller attends.
    pub(crate) fn is_callers(&self) -> bool {
        self.look.is_some()
    }

    /// A caller has come. It attends if it comes often, and all work is here; the worker then hears of nothing.
    pub(crate) fn visit(
        &mut self,
        focus: &Focus,
        registration: &Registration,
        socket: &socket2::Socket,
    ) {
        let now = Instant::now();
        let last = self.last.replace(now);
        if !focus.is_on(self.place) {
            self.visits = 0;
            self.end(focus, registration, socket);
            return;
        }
        let in_a_row = last.is_some_and(|last| now.duration_since(last) <= LEASE);
        self.visits = if in_a_row { self.visits.saturating_add(1) } else { 0 };
        let free = || {
            let (attended, order) = (&focus.attended, Ordering::Relaxed);
            attended.compare_exchange(NOWHERE, self.place, order, order).is_ok()
        };
        if !self.is_callers() && self.visits >= DILIGENT && free() {
            registration.leave(socket);
            self.ask_to_look(now, registration);
        }
    }

    /// The worker is here. If no caller has come for a while, it is the worker's again.
    pub(crate) fn look_after(
        &mut self,
        focus: &Focus,
        registration: &Registration,
        socket: &socket2::Socket,
    ) {
        if !self.is_callers() {
            return;
        }
        match self.last.filter(|last| last.elapsed() < LEASE) {
            Some(last) => self.ask_to_look(last, registration),
            None => self.end(focus, registration, socket),
        }
    }

    /// To be called in each turn: the worker may have come to look while somebody else had it, who does so in its place.
    pub(crate) fn renew(&mut self, registration: &Registration) {
        if let Some(look) = self.look {
            let now = Instant::now();
            if now >= look {
                self.ask_to_look(now, registration);
            }
        }
    }

    /// It is the worker's from now on, what there is already included.
    pub(crate) fn end(
        &mut self,
        focus: &Focus,
        registration: &Registration,
        socket: &socket2::Socket,
    ) {
        if self.look.take().is_some() {
            focus.attended.store(NOWHERE, Ordering::Relaxed);
            registration.rejoin(socket);
        }
    }

    fn ask_to_look(&mut self, from: Instant, registration: &Registration) {
        let look = from + LEASE;
        self.look = Some(look);
        registration.alarm(look);
    }
}
