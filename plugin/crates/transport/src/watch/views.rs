//! Makes this process's views from what its connections counted.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use evenkeel_diagnosis::{ConnectionView, MAX_CONNECTIONS, Process, View, select_connections};

use crate::connection::base::Direction;
use crate::telemetry::metrics::{Metrics, Observed};
use crate::telemetry::waits::WaitTimes;

/// A flow counts as unanswered after this many consecutive unanswered retransmissions over this
/// time.
const UNANSWERED: u8 = 2;
const SILENT: Duration = Duration::from_secs(1);
/// Number of idle connections in each view, which take turns: the collector must know their ends
/// before somebody waits for them.
const IDLE_SHOWN: usize = 8;

/// The counters at the last view.
pub(super) struct Views {
    process: Process,
    sequence: u32,
    at: Duration,
    uncalled: Duration,
    /// Scheduling delay of the thread since then.
    delay: Duration,
    connections: HashMap<u64, Counted>,
    longest: Option<LongWait>,
    /// Positions in the rotations through the idle connections and through all others.
    next_idle: usize,
    next_other: usize,
}

#[derive(Clone, Default)]
struct Counted {
    waits: WaitTimes,
    bytes: u64,
    retransmits: Option<u64>,
    /// For each flow, how long it had unacknowledged bytes.
    unacknowledged: Vec<Duration>,
    /// When these two were read, which is at the last view that included the connection.
    read: Duration,
}

/// The longest wait for outstanding requests.
#[derive(Clone, Debug)]
pub(super) struct LongWait {
    pub(super) time: Duration,
    pub(super) peer: SocketAddr,
    pub(super) sends: bool,
    /// Whether bytes are under way. If not, the peer has not called.
    pub(super) is_wire: bool,
    pub(super) device: String,
}

impl Views {
    pub(super) fn new(process: Process) -> Self {
        Self {
            process,
            sequence: 0,
            at: Duration::ZERO,
            uncalled: Duration::ZERO,
            delay: Duration::ZERO,
            connections: HashMap::new(),
            longest: None,
            next_idle: 0,
            next_other: 0,
        }
    }

    /// Adds scheduling delay of the thread.
    pub(super) fn add_delay(&mut self, delay: Duration) {
        self.delay += delay;
    }

    /// The longest wait at the last view.
    pub(super) fn longest_wait(&self) -> Option<LongWait> {
        self.longest.clone()
    }

    /// Makes the next view.
    pub(super) fn next(&mut self, metrics: &Metrics, now: Duration) -> View {
        let mut all: Vec<(ConnectionView, Arc<dyn Observed>)> = Vec::new();
        let (mut counted, mut devices): (HashMap<u64, Counted>, Vec<String>) = Default::default();
        let (mut open, mut idle) = (0, Vec::new());
        self.longest = None;
        for connection in metrics.connections() {
            let base = connection.base();
            if base.failed() {
                continue;
            }
            open += 1;
            let (id, waits, bytes) = (base.id(), base.wait_times(), base.moved());
            let known = self.connections.remove(&id);
            let is_new = known.is_none();
            let before = known.unwrap_or_default();
            let is_sender = base.direction_of() == Direction::Send;
            let is_idle = !is_new && waits == before.waits && bytes == before.bytes;
            counted.insert(id, Counted { waits, bytes, ..before });
            if is_idle {
                idle.push((ConnectionView { id, is_sender, ..Default::default() }, connection));
                continue;
            }
            let ms = |after: Duration, before: Duration| milliseconds(after.saturating_sub(before));
            let view = ConnectionView {
                id,
                is_sender,
                device: 0,
                outstanding: ms(waits.outstanding, before.waits.outstanding),
                peer: ms(waits.peer, before.waits.peer),
                wire: ms(waits.wire, before.waits.wire),
                unposted: ms(waits.unposted, before.waits.unposted),
                outstanding_for: milliseconds(waits.outstanding_for),
                kibibytes: ((bytes - before.bytes.min(bytes)) >> 10) as u32,
                ..ConnectionView::default()
            };
            all.push((view, connection));
        }
        let mut all = select_connections(all, &mut self.next_other);
        let shown = idle.len().min(IDLE_SHOWN).min(MAX_CONNECTIONS - all.len());
        let first = self.next_idle.checked_rem(idle.len()).unwrap_or_default();
        self.next_idle = first + shown;
        idle.rotate_left(first);
        all.extend(idle.into_iter().take(shown));
        let window = milliseconds(now.saturating_sub(self.at));
        let mut connections = Vec::with_capacity(all.len());
        for (mut view, connection) in all {
            let base = connection.base();
            let name = base.device_name();
            let device = devices.iter().position(|known| *known == name).unwrap_or_else(|| {
                devices.push(name.clone());
                devices.len() - 1
            });
            view.device = device as u8;
            if view.is_sender && view.outstanding > 0 {
                let known = counted.entry(view.id).or_default();
                // Scales what accumulated since then to the time of this view.
                let since = now.saturating_sub(std::mem::replace(&mut known.read, now));
                let of_view = f64::from(window) / f64::from(milliseconds(since).max(1));
                let mut retransmits = 0;
                let paths = connection.paths();
                // Flows share the bytes of a message, so the slowest flow determines how long they
                // are under way.
                let flows = paths.iter().zip(&known.unacknowledged);
                let longest = flows.map(|(path, before)| path.busy.saturating_sub(*before)).max();
                let longest = longest.unwrap_or_default().mul_f64(of_view);
                view.unacknowledged = milliseconds(longest).min(window);
                known.unacknowledged = paths.iter().map(|path| path.busy).collect();
                for path in paths {
                    let trip = path.usual_round_trip.as_micros() as u32;
                    view.round_trip = view.round_trip.max(trip);
                    retransmits += path.retransmitted;
                    view.is_unanswered |= path.unanswered >= UNANSWERED && path.silent >= SILENT;
                }
                let before = known.retransmits.replace(retransmits).unwrap_or(retransmits);
                let of_view = retransmits.saturating_sub(before) as f64 * of_view;
                view.retransmits = of_view.round() as u16; // as many as fit
            }
            let time = Duration::from_millis(view.outstanding_for.into());
            if self.longest.as_ref().is_none_or(|longest| longest.time < time) && !time.is_zero() {
                self.longest = Some(LongWait {
                    time,
                    peer: base.peer(),
                    sends: view.is_sender,
                    is_wire: view.wire > view.peer,
                    device: name,
                });
            }
            connections.push(view);
        }
        let (uncalled, uncalled_for) = metrics.calls.uncalled();
        let view = View {
            process: self.process.clone(),
            sequence: self.next_sequence(),
            window,
            uncalled: milliseconds(uncalled.saturating_sub(self.uncalled)),
            uncalled_for: milliseconds(uncalled_for),
            starved: milliseconds(self.delay),
            connections_open: open,
            devices,
            connections,
        };
        (self.at, self.uncalled, self.delay) = (now, uncalled, Duration::ZERO);
        self.connections = counted;
        view
    }

    /// The last view of a process, which has closed all connections.
    pub(super) fn last(&mut self, now: Duration) -> View {
        View {
            process: self.process.clone(),
            sequence: self.next_sequence(),
            window: milliseconds(now.saturating_sub(self.at)),
            ..View::default()
        }
    }

    fn next_sequence(&mut self) -> u32 {
        self.sequence += 1;
        self.sequence
    }
}

fn milliseconds(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}
