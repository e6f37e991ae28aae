//! A job's processes and the connections between them, as seen in one window.

use crate::view::Process;

/// Approximate bytes of a TCP segment.
const SEGMENT: f64 = 1448.0;

/// A job as seen in one window.
#[derive(Clone, Debug, Default)]
pub struct Job {
    /// Length of the window, in seconds.
    pub window: f64,
    /// The processes.
    pub members: Vec<Member>,
    /// The connections between them.
    pub links: Vec<Link>,
}

impl Job {
    /// Which members are ranks of the job: those with a rank number, or all if none has one.
    /// Others, such as reduction servers, serve the ranks and never call by themselves.
    pub(crate) fn ranks(&self) -> Vec<bool> {
        let has_number = |member: &Member| member.process.rank.is_some();
        let some_have = self.members.iter().any(has_number);
        self.members.iter().map(|member| has_number(member) || !some_have).collect()
    }
}

/// A process as seen in the window. Shares are of the time that its views cover.
#[derive(Clone, Debug, Default)]
pub struct Member {
    /// The process's identity.
    pub process: Process,
    /// Share of the time in which no connection had a request.
    pub uncalled: f64,
    /// How far `uncalled` usually exceeds the job's median, once enough was seen to tell.
    pub usual_excess: Option<f64>,
    /// Seconds since it last had a request.
    pub uncalled_for: f64,
    /// Scheduling delay of the plugin's own thread, as a share of the time.
    pub starved: f64,
    /// Seconds since its last view, if views are overdue.
    pub silent_for: Option<f64>,
    /// Whether peers received bytes from it since then, so that only its views get lost.
    pub is_unheard: bool,
}

/// A connection as seen by both ends. Shares are of the time.
#[derive(Clone, Debug, Default)]
pub struct Link {
    /// Index of the sending member; `None` if it sent no view of this connection.
    pub from: Option<usize>,
    /// Index of the receiving member; `None` if it sent no view of this connection.
    pub to: Option<usize>,
    /// The sender's device.
    pub from_device: String,
    /// The receiver's device.
    pub to_device: String,
    /// The sender had unfinished requests.
    pub pending: f64,
    /// The receiver had buffers posted.
    pub wanted: f64,
    /// The receiver had bytes but no buffer for them. Equals `refused` if the receiver does not
    /// report it.
    pub unposted: f64,
    /// The sender had messages but knew of no buffer for them.
    pub refused: f64,
    /// Bytes were unacknowledged although the receiver's window was open; 0 if not measured.
    pub unacknowledged: f64,
    /// Age of the oldest unfinished request of either end, in seconds.
    pub outstanding_for: f64,
    /// Bytes per second.
    pub rate: f64,
    /// The longest smoothed round trip, in seconds; 0 if not measured.
    pub round_trip: f64,
    /// Retransmitted segments per second.
    pub retransmits: f64,
    /// Whether its last segments get no answer at all.
    pub is_unanswered: bool,
    /// Whether either end moved bytes in its last view.
    pub moves: bool,
}

impl Link {
    /// Share of the time in which bytes were under way.
    pub(crate) fn wire(&self) -> f64 {
        let wire = (self.pending - self.unposted).max(0.0);
        // Bytes that the receiver has not asked for yet are not late.
        if self.to.is_some() { wire.min(self.wanted) } else { wire }
    }

    /// Share of the time in which the receiver waited for the sender's caller.
    pub(crate) fn waits_for_sender(&self) -> f64 {
        if self.from.is_some() { (self.wanted - self.wire()).max(0.0) } else { self.wanted }
    }

    /// Share of the time in which the sender waited for the receiver's caller.
    pub(crate) fn waits_for_receiver(&self) -> f64 {
        self.unposted.min(self.pending.max(self.unposted))
    }

    /// Share of its segments that are retransmissions.
    pub(crate) fn loss(&self) -> f64 {
        let segments = self.rate / SEGMENT;
        if segments > 0.0 { self.retransmits / (segments + self.retransmits) } else { 0.0 }
    }

    /// Share of the time in which bytes were under way, including bytes that the receiver had not
    /// asked for yet.
    pub(crate) fn under_way(&self) -> f64 {
        self.wire().max(self.unacknowledged)
    }
}
