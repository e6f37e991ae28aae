//! What one flow of a sender writes next, and when.

use std::time::Duration;

use crate::tags::TagGate;
use crate::tcp::frame::Frame;
use crate::tcp::pacing::{Pacer, Progress};
use crate::tcp::path::PathInfo;

/// A time, counted from any moment that stays the same.
type Time = Duration;

/// The state of a sender, as the decision of one flow needs it.
#[derive(Debug)]
pub struct WriteSituation<'a> {
    /// The tags of the messages.
    pub gate: &'a TagGate,
    /// The flow may take messages.
    pub takes_messages: bool,
    /// There is something that it may take.
    pub has_work: bool,
    /// No other flow takes messages.
    pub is_alone: bool,
    /// It leaves bytes to flows that deliver them earlier, or to other connections.
    pub is_paced: bool,
    /// Maximum bytes of a chunk.
    pub max_chunk: u64,
}

/// What to do next on a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteStep {
    /// Write this frame.
    Frame(Frame),
    /// Write what the scheduler has, in a chunk of at most so many bytes. If it has nothing:
    /// [`FlowWriter::poll_close`].
    Cut(u64),
    /// Ask the kernel, without the connection's lock, and poll again.
    Ask(KernelQuery),
    /// Too many bytes are in flight. Poll again after this time.
    Wait(Duration),
    /// There is nothing for this flow.
    Idle,
}

/// A question about a flow's socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelQuery {
    /// [`FlowWriter::handle_path`] follows.
    Path,
    /// The number of bytes that are not acknowledged. [`FlowWriter::handle_unacknowledged`]
    /// follows.
    Unacknowledged,
}

/// Decides what one flow of a sender writes. It has no socket, lock or clock, and its methods
/// return at once.
///
/// Each time the flow can write, [`FlowWriter::begin`] is called, and then
/// [`FlowWriter::poll_write`] until the kernel is asked nothing.
#[derive(Debug)]
pub struct FlowWriter {
    pacer: Pacer,
    /// Upper bound of the bytes that are not acknowledged: those of the last answer, and those
    /// written since. While the flow is not paced, those written since its last sample: that is
    /// enough to know whether another is worth it.
    outstanding: u64,
    /// The kernel has said how many there are since the flow can write.
    is_counted: bool,
    /// A sample of the path is due.
    wants_sample: bool,
    /// The last poll was one of a paced flow.
    is_paced: bool,
    /// The common tag was sent.
    has_sent_tag: bool,
    /// The number below which messages have it was sent.
    has_sent_same_tag_below: bool,
    has_sent_close: bool,
}

impl FlowWriter {
    /// A flow that starts with this pacer.
    pub fn new(pacer: Pacer) -> Self {
        Self {
            pacer,
            outstanding: 0,
            is_counted: false,
            wants_sample: false,
            is_paced: false,
            has_sent_tag: false,
            has_sent_same_tag_below: false,
            has_sent_close: false,
        }
    }

    /// The flow can write. Returns whether it is time to look at what the connection's flows
    /// deliver.
    pub fn begin(&mut self, now: Time) -> bool {
        self.is_counted = false;
        self.wants_sample = self.pacer.sample_due(now);
        if self.wants_sample {
            self.pacer.postpone_sample(now);
        }
        self.wants_sample
    }

    /// The socket has taken this many bytes.
    pub fn handle_written(&mut self, bytes: u64) {
        self.outstanding += bytes;
    }

    /// The socket took no more.
    pub fn handle_full(&mut self) {
        self.pacer.set_full();
    }

    /// So many bytes are not acknowledged.
    pub fn handle_unacknowledged(&mut self, bytes: u64) {
        self.outstanding = bytes;
        self.is_counted = true;
    }

    /// The kernel says this of the flow's path, or nothing. `shortest_round_trip` is the shortest
    /// of the connection's flows. Returns whether the path is congested, if that is known now.
    pub fn handle_path(
        &mut self,
        now: Time,
        path: Option<&PathInfo>,
        shortest_round_trip: Duration,
    ) -> Option<bool> {
        self.wants_sample = false;
        // One that is not backlogged delivers all that it takes. Others are compared with that.
        let path = path.filter(|_| self.pacer.is_backlogged(self.outstanding));
        if !self.is_paced {
            self.outstanding = 0;
        }
        let PathInfo { acked, busy, round_trip, usual_round_trip, retransmitted, .. } = *path?;
        Some(self.pacer.sample(
            now,
            Progress {
                acked,
                busy,
                round_trip,
                usual_round_trip,
                shortest_round_trip,
                retransmitted,
            },
        ))
    }

    /// What to do next.
    pub fn poll_write(&mut self, situation: &WriteSituation<'_>) -> WriteStep {
        if let Some(frame) = self.next_tag_frame(situation.gate) {
            return WriteStep::Frame(frame);
        }
        if !situation.takes_messages {
            return WriteStep::Idle;
        }
        if !situation.has_work {
            return WriteStep::Cut(situation.max_chunk);
        }
        self.is_paced = situation.is_paced;
        if self.is_paced {
            self.pacer.set_alone(situation.is_alone);
        }
        let is_over = self.is_paced && self.outstanding > self.pacer.max_outstanding();
        if is_over && !self.is_counted {
            return WriteStep::Ask(KernelQuery::Unacknowledged);
        }
        if self.wants_sample && (self.is_paced || self.pacer.is_backlogged(self.outstanding)) {
            return WriteStep::Ask(KernelQuery::Path);
        }
        if is_over {
            return WriteStep::Wait(self.pacer.wait(self.outstanding));
        }
        let chunk = self.is_paced.then(|| self.pacer.chunk(situation.max_chunk));
        WriteStep::Cut(chunk.unwrap_or(situation.max_chunk))
    }

    /// The last frame, once. The peer gets the messages below this number.
    pub fn poll_close(&mut self, below: u64) -> Option<Frame> {
        let is_first = !std::mem::replace(&mut self.has_sent_close, true);
        is_first.then_some(Frame::Close(below))
    }

    /// Whether [`FlowWriter::poll_close`] has had the last frame.
    pub fn has_sent_close(&self) -> bool {
        self.has_sent_close
    }

    /// A frame about tags that must be written on this flow before any further chunk.
    fn next_tag_frame(&mut self, gate: &TagGate) -> Option<Frame> {
        if !self.has_sent_tag
            && let Some(tag) = gate.tag()
        {
            self.has_sent_tag = true;
            // On a flow without a tag frame, the peer assumes the tag 0.
            if tag != 0 {
                return Some(Frame::Tag(tag));
            }
        }
        if !self.has_sent_same_tag_below
            && let Some(until) = gate.same_tag_below()
        {
            self.has_sent_same_tag_below = true;
            return Some(Frame::SameTagBelow(until));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX_CHUNK: u64 = 512 << 10;
    const CUT: WriteStep = WriteStep::Cut(MAX_CHUNK);
    const COUNT: WriteStep = WriteStep::Ask(KernelQuery::Unacknowledged);
    const SAMPLE: WriteStep = WriteStep::Ask(KernelQuery::Path);

    fn millis(count: u64) -> Time {
        Duration::from_millis(count)
    }

    /// One of several flows, with something to take.
    fn paced(gate: &TagGate) -> WriteSituation<'_> {
        WriteSituation {
            gate,
            takes_messages: true,
            has_work: true,
            is_alone: false,
            is_paced: true,
            max_chunk: MAX_CHUNK,
        }
    }

    fn unpaced(gate: &TagGate) -> WriteSituation<'_> {
        WriteSituation { is_alone: true, is_paced: false, ..paced(gate) }
    }

    /// A path on which so many bytes are acknowledged, at 1 MB per millisecond.
    fn path(megabytes: u64) -> PathInfo {
        let (acked, busy) = (megabytes * 1_000_000, millis(megabytes));
        PathInfo { acked, busy, ..PathInfo::default() }
    }

    #[test]
    fn flow_without_pacing_asks_nothing_while_it_delivers_all() {
        let gate = TagGate::default();
        let mut flow = FlowWriter::new(Pacer::default());
        for now in (0..100).map(millis) {
            let is_due = now.as_millis().is_multiple_of(5);
            assert_eq!(flow.begin(now), is_due, "{now:?}");
            assert_eq!(flow.poll_write(&unpaced(&gate)), CUT);
            flow.handle_written(1000);
        }
        assert_eq!(flow.poll_write(&unpaced(&gate)), CUT);
    }

    #[test]
    fn backlogged_flow_without_pacing_is_sampled_when_that_is_due() {
        let gate = TagGate::default();
        let mut flow = FlowWriter::new(Pacer::default());
        flow.begin(millis(0));
        flow.handle_written(4 * MAX_CHUNK);
        flow.begin(millis(1));
        assert_eq!(flow.poll_write(&unpaced(&gate)), CUT, "not due");
        flow.begin(millis(5));
        assert_eq!(flow.poll_write(&unpaced(&gate)), SAMPLE);
        assert_eq!(flow.handle_path(millis(5), Some(&path(1)), millis(1)), Some(false));
        assert_eq!(flow.poll_write(&unpaced(&gate)), CUT);
        flow.begin(millis(10));
        assert_eq!(flow.poll_write(&unpaced(&gate)), CUT, "nothing was written since");
    }

    #[test]
    fn paced_flow_waits_while_too_much_is_in_flight() {
        let gate = TagGate::default();
        let mut flow = FlowWriter::new(Pacer::default());
        assert!(flow.begin(millis(0)));
        assert_eq!(flow.poll_write(&paced(&gate)), SAMPLE);
        assert_eq!(flow.handle_path(millis(0), Some(&path(0)), millis(1)), None, "no backlog");
        assert_eq!(flow.poll_write(&paced(&gate)), CUT);
        flow.handle_written(100 * MAX_CHUNK);
        assert!(!flow.begin(millis(1)));
        assert_eq!(flow.poll_write(&paced(&gate)), COUNT, "it is an upper bound");
        flow.handle_unacknowledged(90 * MAX_CHUNK);
        let wait = flow.poll_write(&paced(&gate));
        assert!(matches!(wait, WriteStep::Wait(time) if time > Duration::ZERO), "{wait:?}");
        flow.begin(millis(2));
        assert_eq!(flow.poll_write(&paced(&gate)), COUNT, "later it may be less");
        flow.handle_unacknowledged(0);
        assert_eq!(flow.poll_write(&paced(&gate)), CUT);
    }

    /// What the kernel says of the path may leave less room than there was.
    #[test]
    fn paced_flow_is_counted_again_after_a_sample_that_makes_it_slower() {
        let gate = TagGate::default();
        let mut flow = FlowWriter::new(Pacer::default());
        flow.handle_written(400 << 10);
        flow.begin(millis(0));
        assert_eq!(flow.poll_write(&paced(&gate)), SAMPLE);
        let slow = PathInfo { acked: 10_000, busy: millis(10), ..PathInfo::default() };
        assert_eq!(flow.handle_path(millis(0), Some(&slow), millis(1)), Some(false));
        assert_eq!(flow.poll_write(&paced(&gate)), COUNT);
        flow.handle_unacknowledged(400 << 10);
        assert!(matches!(flow.poll_write(&paced(&gate)), WriteStep::Wait(_)));
        flow.handle_unacknowledged(0);
        let WriteStep::Cut(bytes) = flow.poll_write(&paced(&gate)) else {
            panic!("it may write");
        };
        assert!(bytes < MAX_CHUNK, "{bytes}");
    }

    #[test]
    fn flow_whose_kernel_does_not_answer_goes_on() {
        let gate = TagGate::default();
        let mut flow = FlowWriter::new(Pacer::default());
        flow.begin(millis(0));
        assert_eq!(flow.poll_write(&paced(&gate)), SAMPLE);
        assert_eq!(flow.handle_path(millis(0), None, Duration::ZERO), None);
        assert_eq!(flow.poll_write(&paced(&gate)), CUT);
    }

    #[test]
    fn flow_without_work_is_not_paced() {
        let gate = TagGate::default();
        let mut flow = FlowWriter::new(Pacer::default());
        flow.handle_written(100 * MAX_CHUNK);
        flow.begin(millis(0));
        let nothing = WriteSituation { has_work: false, ..paced(&gate) };
        assert_eq!(flow.poll_write(&nothing), CUT, "a report or the close");
        let unused = WriteSituation { takes_messages: false, ..paced(&gate) };
        assert_eq!(flow.poll_write(&unused), WriteStep::Idle);
    }

    #[test]
    fn flow_writes_tags_before_chunks_and_one_close() {
        let mut gate = TagGate::default();
        assert!(gate.admits(7, 0, || None));
        let mut flow = FlowWriter::new(Pacer::default());
        let unused = |gate| WriteSituation { takes_messages: false, ..unpaced(gate) };
        let step = flow.poll_write(&unused(&gate));
        assert_eq!(step, WriteStep::Frame(Frame::Tag(7)));
        assert_eq!(flow.poll_write(&unpaced(&gate)), CUT);
        gate.tags_differ_from(3, 5);
        let step = flow.poll_write(&unpaced(&gate));
        assert_eq!(step, WriteStep::Frame(Frame::SameTagBelow(5)));
        assert_eq!(flow.poll_write(&unpaced(&gate)), CUT);
        assert!(!flow.has_sent_close());
        assert_eq!((flow.poll_close(9), flow.poll_close(9)), (Some(Frame::Close(9)), None));
        assert!(flow.has_sent_close());
    }

    #[test]
    fn tag_zero_needs_no_frame() {
        let mut gate = TagGate::default();
        assert!(gate.admits(0, 0, || None));
        let mut flow = FlowWriter::new(Pacer::default());
        assert_eq!(flow.poll_write(&unpaced(&gate)), CUT);
    }
}
