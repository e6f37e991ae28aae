//! What a sender keeps about the repair of its flows.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use evenkeel_protocol::{Refusals, Repath, SegmentLimit};

use crate::handshake::dial::Dial;
use crate::runtime::extra_flows::ExtraFlowsLease;

/// Delay after a first failed dial. Doubled for each further one, up to the limit.
const FIRST_DELAY: Duration = Duration::from_millis(20);
const MAX_DELAY: Duration = Duration::from_secs(2);

/// The state of dials and replacements.
pub(crate) struct RepairState {
    pub(super) dials: Vec<Arc<Dial>>,
    /// Number of the next flow.
    pub(super) next_number: u32,
    /// Number of times in a row that all dials failed.
    pub(super) failures: u32,
    pub(super) not_before: Option<Instant>,
    /// Since when there is no flow.
    pub(super) no_flow_since: Option<Instant>,
    /// Dials that were refused while there is no flow.
    pub(super) refusals: Refusals,
    /// The limit on the segments of new flows.
    pub(super) segments: SegmentLimit,
    /// Why the last flow failed.
    pub(super) cause: String,
    /// Whether there was something to retransmit at the last tick.
    pub(super) had_retransmits: bool,
    /// Whether there was nothing to send at the last tick.
    pub(super) was_idle: bool,
    pub(super) repath: Repath,
    /// When encrypted flows are pinged next while nothing moves, and the time since the ping before.
    pub(super) next_ping: Option<(Instant, Duration)>,
    /// Flows that it has beyond those that are set.
    pub(super) extra_flows: ExtraFlowsLease,
}

impl RepairState {
    /// For a connection that starts with this number of flows. It should have one at least.
    pub(crate) fn new(flows: u32, extra_flows: ExtraFlowsLease) -> Self {
        Self {
            dials: Vec::new(),
            next_number: flows,
            failures: 0,
            not_before: None,
            no_flow_since: None,
            refusals: Refusals::default(),
            segments: SegmentLimit::default(),
            cause: String::new(),
            had_retransmits: false,
            was_idle: false,
            repath: Repath::new(NonZeroUsize::new(flows as usize).unwrap_or(NonZeroUsize::MIN)),
            next_ping: None,
            extra_flows,
        }
    }

    /// Delays the next dial, after a failed one.
    pub(super) fn back_off(&mut self, now: Instant) {
        let delay = FIRST_DELAY * (1 << self.failures.min(10));
        self.failures += 1;
        self.not_before = Some(now + delay.min(MAX_DELAY));
    }
}
