//! What is known of a job: its processes, and the connections between them.

use crate::view::Process;

/// Bytes of a segment, about.
const SEGMENT: f64 = 1448.0;

/// What is known of a job in some time.
#[derive(Clone, Debug, Default)]
pub struct Job {
    /// The time, in seconds.
    pub window: f64,
    /// The processes.
    pub members: Vec<Member>,
    /// The connections between them.
    pub links: Vec<Link>,
}

impl Job {
    /// Which members are the job's ranks: those that have a number, if any has. Others serve them, as reduction servers do, which
    /// are ready for whatever comes and never call.
    pub(crate) fn ranks(&self) -> Vec<bool> {
        let has_number = |member: &Member| member.process.rank.is_some();
        let some_have = self.members.iter().any(has_number);
        self.members.iter().map(|member| has_number(member) || !some_have).collect()
    }
}

/// What is known of a process. Shares are of the time for which it has sent views.
#[derive(Clone, Debug, Default)]
pub struct Member {
    /// Who it is.
    pub process: Process,
    /// The share in which no connection had a request.
    pub uncalled: f64,
    /// How much more that usually is in this job than the middle of all, if that is known.
    pub usual_excess: Option<f64>,
    /// How long it has not called now, in seconds.
    pub uncalled_for: f64,
    /// How much later than it asked for its own thread ran, as a share.
    pub starved: f64,
    /// How long nothing has come from it, in seconds, if that is longer than it should be.
    pub silent_for: Option<f64>,
    /// Bytes have come from it since: only what it says gets lost.
    pub is_unheard: bool,
}

/// A connection, with what both ends have seen. Shares are of the time.
#[derive(Clone, Debug, Default)]
pub struct Link {
    /// Index of the sending member; `None`: it has not sent a view of this connection.
    pub from: Option<usize>,
    /// Index of the receiving member.
    pub to: Option<usize>,
    /// The sender's device.
    pub from_device: String,
    /// The receiver's device.
    pub to_device: String,
    /// The sender had requests that were not done.
    pub pending: f64,
    /// The receiver had buffers posted.
    pub wanted: f64,
    /// The receiver had bytes and no buffer for them. Where it does not say: as `refused`.
    pub unposted: f64,
    /// The sender had messages and knew of no buffer for them.
    pub refused: f64,
    /// Bytes were not acknowledged, and the receiver's window was not what they waited for; 0: not measured.
    pub unacknowledged: f64,
    /// How long the present requests of either end are outstanding, in seconds.
    pub outstanding_for: f64,
    /// Bytes moved, a second.
    pub rate: f64,
    /// The longest smoothed round trip, in seconds; 0: not measured.
    pub round_trip: f64,
    /// Segments retransmitted, a second.
    pub retransmits: f64,
    /// Whether its last segments are not answered at all.
    pub is_unanswered: bool,
    /// Whether an end has moved bytes lately.
    pub moves: bool,
}

impl Link {
    /// The share in which bytes were under way.
    pub(crate) fn wire(&self) -> f64 {
        let wire = (self.pending - self.unposted).max(0.0);
        // Bytes that nobody has asked for yet are not late.
        if self.to.is_some() { wire.min(self.wanted) } else { wire }
    }

    /// The share in which the receiver waited for the sender's caller.
    pub(crate) fn waits_for_sender(&self) -> f64 {
        if self.from.is_some() { (self.wanted - self.wire()).max(0.0) } else { self.wanted }
    }

    /// The share in which the sender waited for the receiver's caller.
    pub(crate) fn waits_for_receiver(&self) -> f64 {
        self.unposted.min(self.pending.max(self.unposted))
    }

    /// The share of its segments that are sent again.
    pub(crate) fn loss(&self) -> f64 {
        let segments = self.rate / SEGMENT;
        if segments > 0.0 { self.retransmits / (segments + self.retransmits) } else { 0.0 }
    }

    /// The share in which bytes were under way, also such that nobody had asked for yet: they take as long.
    pub(crate) fn under_way(&self) -> f64 {
        self.wire().max(self.unacknowledged)
    }
}
