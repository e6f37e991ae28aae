//! When a sender dials flows, and how.

use std::time::Duration;

use super::Time;
use crate::tcp::refusals::Refusals;
use crate::tcp::segments::SegmentLimit;

/// How long a dial waits for the listener's answer before another path is tried. The n-th time in a row it is n times as
/// long, up to the limit.
const DIAL_TIMEOUT: Duration = Duration::from_millis(400);
const MAX_DIAL_TIMEOUT: Duration = Duration::from_secs(5);
/// Delay after a first failed dial. Doubled for each further one, up to the limit.
const FIRST_DELAY: Duration = Duration::from_millis(20);
const MAX_DELAY: Duration = Duration::from_secs(2);
/// Of this many dials in a row, one leaves the interface to the route. Where several are in the peer's subnet, the answers may
/// come by another interface than before.
const DIALS_BY_ROUTE: u32 = 4;

/// A flow to dial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowDial {
    /// The flow's number. No other flow of the connection has it.
    pub number: u32,
    /// Whether it leaves by its own interface where several are in the peer's subnet.
    pub binds: bool,
    /// Maximum bytes of its segments, where the hosts do not agree on one that passes.
    pub segment_limit: Option<u32>,
    /// How long to wait for the listener's answer.
    pub timeout: Duration,
}

/// Why a flow could not be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DialFailure {
    /// This host has no descriptor, port or route for it.
    NotStarted,
    /// Another one may succeed.
    Unanswered,
    /// Nobody listens there.
    Refused,
    /// The listener takes no flow of this connection any more.
    Final,
}

/// The flows that are being dialed.
#[derive(Debug)]
pub(super) struct Dials {
    open: Vec<u32>,
    /// Number of the next flow.
    next_number: u32,
    /// Number of times in a row that all dials failed.
    failures: u32,
    not_before: Option<Time>,
    /// Dials that were refused while there is no flow.
    refusals: Refusals,
    /// Addresses of the peer. Each flow takes the next one.
    addresses: usize,
    segments: SegmentLimit,
}

impl Dials {
    /// For a connection that begins with this number of flows, to a peer with so many addresses.
    pub(super) fn new(flows: u32, addresses: usize) -> Self {
        Self {
            open: Vec::new(),
            next_number: flows,
            failures: 0,
            not_before: None,
            refusals: Refusals::default(),
            addresses: addresses.max(1),
            segments: SegmentLimit::default(),
        }
    }

    /// Number of dials without an outcome.
    pub(super) fn count(&self) -> usize {
        self.open.len()
    }

    pub(super) fn contains(&self, number: u32) -> bool {
        self.open.contains(&number)
    }

    pub(super) fn failures(&self) -> u32 {
        self.failures
    }

    /// Whether the delay after the last failure is over.
    pub(super) fn may_start(&self, now: Time) -> bool {
        self.not_before.is_none_or(|time| now >= time)
    }

    /// Another flow to dial.
    pub(super) fn start(&mut self) -> FlowDial {
        let number = self.next_number;
        self.next_number += 1;
        self.open.push(number);
        FlowDial {
            number,
            binds: !(self.failures + 1).is_multiple_of(DIALS_BY_ROUTE),
            segment_limit: self.segments.bytes(),
            timeout: (DIAL_TIMEOUT * (1 + self.failures)).min(MAX_DIAL_TIMEOUT),
        }
    }

    /// The listener has accepted this flow. False if it is not wanted any more.
    pub(super) fn accepted(&mut self, number: u32) -> bool {
        if !self.end(number) {
            return false;
        }
        (self.failures, self.not_before) = (0, None);
        self.refusals.clear();
        true
    }

    /// This flow could not be opened. `has_flows`: the connection has others. Returns whether no other can be.
    pub(super) fn failed(
        &mut self,
        now: Time,
        number: u32,
        failure: DialFailure,
        has_flows: bool,
    ) -> bool {
        if !self.end(number) {
            return false;
        }
        if self.open.is_empty() || failure == DialFailure::NotStarted {
            let delay = FIRST_DELAY * (1 << self.failures.min(10));
            self.failures += 1;
            self.not_before = Some(now + delay.min(MAX_DELAY));
        }
        match failure {
            DialFailure::NotStarted => false,
            // The peer's process is there.
            _ if has_flows => {
                self.refusals.clear();
                false
            }
            DialFailure::Unanswered => false,
            DialFailure::Refused => {
                self.refusals.refused(now, number as usize % self.addresses, self.addresses)
            }
            DialFailure::Final => true,
        }
    }

    /// Keeps this number of dials, and returns the others.
    pub(super) fn keep(&mut self, count: usize) -> Vec<u32> {
        self.open.split_off(count.min(self.open.len()))
    }

    /// A flow has failed that had delivered something or not. Returns the limit on the segments of flows that are dialed from now
    /// on, if that is new.
    pub(super) fn flow_failed(
        &mut self,
        now: Time,
        number: u32,
        has_delivered: bool,
    ) -> Option<u32> {
        let is_new = self.segments.flow_failed(now, number, self.next_number, has_delivered);
        self.segments.bytes().filter(|_| is_new)
    }

    /// Since when flows open and deliver nothing, whatever their segments are.
    pub(super) fn deliver_nothing_since(&self) -> Option<Time> {
        self.segments.fails_since()
    }

    /// Whether there was one with this number.
    fn end(&mut self, number: u32) -> bool {
        let before = self.open.len();
        self.open.retain(|open| *open != number);
        self.open.len() < before
    }
}
