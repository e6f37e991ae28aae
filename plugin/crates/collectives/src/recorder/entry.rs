//! What is recorded of a call.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use evenkeel_reduction_kernels::DataType;

use crate::error::Error;
use crate::group::{Call, Sequence};

use super::group::GroupRecord;

/// How far a call has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// It waits for the calls before it.
    Scheduled,
    Started,
    Completed,
    Failed,
}

impl State {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Scheduled => "scheduled",
            Self::Started => "started",
            Self::Completed => "completed",
            Self::Failed => "failed",
        }
    }
}

/// An operation and its operands, as its caller knows them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Called {
    pub(crate) what: &'static str,
    /// The root, or the other rank of a message, in the group's numbers; `None` if there is none or it is not known yet.
    pub(crate) peer: Option<usize>,
    pub(crate) input_bytes: usize,
    pub(crate) output_bytes: usize,
    /// The type of a reduction's elements.
    pub(crate) data_type: Option<DataType>,
}

impl Called {
    /// An operation that reads and writes this many bytes on this rank.
    pub(crate) fn of(what: &'static str, input_bytes: usize, output_bytes: usize) -> Self {
        Self { what, peer: None, input_bytes, output_bytes, data_type: None }
    }

    /// The same with a root, or with the other rank of a message.
    pub(crate) fn with(self, peer: usize) -> Self {
        Self { peer: Some(peer), ..self }
    }
}

/// A call in the ring.
pub(super) struct Entry {
    pub(super) id: u64,
    pub(super) group: Arc<GroupRecord>,
    pub(super) state: State,
    pub(super) sequence: Sequence,
    /// The number among the collectives of its tag, or among the messages between two ranks in one direction.
    pub(super) number: Option<u32>,
    /// The operation.
    pub(super) name: &'static str,
    /// `None` as long as it is scheduled.
    pub(super) called: Option<Called>,
    pub(super) timeout: Duration,
    pub(super) note: Option<Arc<str>>,
    pub(super) created: SystemTime,
    pub(super) started: Option<SystemTime>,
    pub(super) ended: Option<SystemTime>,
    pub(super) failure: Option<Box<Error>>,
}

impl Entry {
    /// A call that waits for its turn.
    pub(super) fn scheduled(
        id: u64,
        group: &Arc<GroupRecord>,
        sequence: Sequence,
        name: &'static str,
        call: &Call,
    ) -> Self {
        Self {
            id,
            group: Arc::clone(group),
            state: State::Scheduled,
            sequence,
            number: None,
            name,
            called: None,
            timeout: call.timeout.unwrap_or_else(|| group.timeout()),
            note: call.note.clone(),
            created: SystemTime::now(),
            started: None,
            ended: None,
            failure: None,
        }
    }

    pub(super) fn start(&mut self, called: Called, number: Option<u32>) {
        self.state = State::Started;
        self.name = called.what;
        (self.called, self.number) = (Some(called), number);
        self.started = Some(SystemTime::now());
    }

    pub(super) fn end(&mut self, error: Option<&Error>) {
        self.state = if error.is_some() { State::Failed } else { State::Completed };
        self.failure = error.cloned().map(Box::new);
        self.ended = Some(SystemTime::now());
    }
}

/// The place of a call in the ring: its number in the process. It may have been overwritten since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Recorded(pub(super) u64);
