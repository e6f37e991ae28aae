//! What the flight recorder has kept, for other programs.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use serde::Serialize;

use crate::group::Sequence;

use super::entry::Entry;
use super::group::GroupRecord;
use super::ring::RING;

/// The calls of this process that the flight recorder has kept.
#[derive(Debug, Serialize)]
pub struct FlightRecord {
    /// The version of Evenkeel.
    pub version: &'static str,
    /// The process's number on its host.
    pub process: u32,
    /// When this was read, in nanoseconds since 1970.
    pub time_ns: u64,
    /// The groups, in the order in which they were made.
    pub groups: Vec<RecordedGroup>,
    /// The calls, in the order in which they were recorded.
    pub calls: Vec<RecordedCall>,
}

/// A group in a [`FlightRecord`].
#[derive(Debug, Serialize)]
pub struct RecordedGroup {
    /// The same on all ranks, in hexadecimal.
    pub id: String,
    /// The name of [`Group::set_name`](crate::Group::set_name).
    pub name: Option<String>,
    /// This process's rank.
    pub rank: usize,
    /// Whether the group, or another one with the same connections, still exists. One that is gone is listed as long as a call of it
    /// is kept.
    pub is_open: bool,
    /// The numbers of the ranks in the job.
    pub ranks: Vec<usize>,
    /// The ranks that the operations in progress wait for. Groups that share their connections have the same.
    pub waits_for: Vec<usize>,
    /// Why the group has ended, if it has.
    pub failure: Option<String>,
}

/// A call in a [`FlightRecord`].
#[derive(Debug, Serialize)]
pub struct RecordedCall {
    /// Its number in the process.
    pub record_id: u64,
    /// The group's [`RecordedGroup::id`].
    pub group: String,
    /// The rank that called it, in the group's numbers. Ranks that are threads share a process.
    pub rank: usize,
    /// `collective`, `send` or `receive`.
    pub kind: &'static str,
    /// The operation.
    pub name: &'static str,
    /// The number among the collectives of its tag, or among the messages between two ranks in one direction. Of a collective that
    /// is scheduled, the number that it will have, if the call before it is kept.
    pub sequence: Option<u32>,
    /// The tag of the call.
    pub tag: u32,
    /// The root, or the other rank of a message.
    pub peer: Option<usize>,
    /// Bytes that this rank passes.
    pub input_bytes: usize,
    /// Bytes that this rank gets.
    pub output_bytes: usize,
    /// The type of a reduction's elements.
    pub data_type: Option<String>,
    /// `scheduled`, `started`, `completed` or `failed`.
    pub state: &'static str,
    /// When it was called, in nanoseconds since 1970.
    pub created_ns: u64,
    /// When it began.
    pub started_ns: Option<u64>,
    /// When it ended.
    pub ended_ns: Option<u64>,
    /// How long it may make no progress, in milliseconds.
    pub timeout_ms: u64,
    /// The text of [`Call::note`](crate::Call::note).
    pub note: Option<String>,
    /// Why it failed.
    pub failure: Option<RecordedFailure>,
}

/// The error of a call in a [`FlightRecord`].
#[derive(Debug, Serialize)]
pub struct RecordedFailure {
    /// The error's text.
    pub message: String,
    /// The ranks that caused it, or that it waited for.
    pub ranks: Vec<usize>,
}

impl FlightRecord {
    /// Reads the calls that are kept. Calls go on meanwhile.
    pub fn read() -> Self {
        let groups = GroupRecord::all();
        let mut calls = RING.read(RecordedCall::of);
        number_scheduled(&mut calls);
        Self {
            version: env!("CARGO_PKG_VERSION"),
            process: std::process::id(),
            time_ns: nanoseconds(SystemTime::now()),
            groups: groups.iter().map(|group| RecordedGroup::of(group)).collect(),
            calls,
        }
    }

    /// The record as JSON, of one line.
    pub fn to_json(&self) -> String {
        // Only numbers and texts: there is nothing that JSON cannot have.
        serde_json::to_string(self).unwrap_or_default()
    }
}

impl RecordedGroup {
    fn of(group: &GroupRecord) -> Self {
        let (waits_for, failure) = group.waits();
        Self {
            id: hexadecimal(group.id()),
            name: group.name().map(str::to_owned),
            rank: group.rank(),
            is_open: group.is_open(),
            ranks: group.ranks().to_vec(),
            waits_for,
            failure,
        }
    }
}

impl RecordedCall {
    fn of(entry: &Entry) -> Self {
        let called = entry.called.as_ref();
        let (kind, tag, peer) = match entry.sequence {
            Sequence::Collectives { tag } => ("collective", tag, None),
            Sequence::Sends { to, tag } => ("send", tag, Some(to)),
            Sequence::Receives { from, tag } => ("receive", tag, from),
        };
        Self {
            record_id: entry.id,
            group: hexadecimal(entry.group.id()),
            rank: entry.group.rank(),
            kind,
            name: entry.name,
            sequence: entry.number,
            tag,
            peer: called.and_then(|called| called.peer).or(peer),
            input_bytes: called.map_or(0, |called| called.input_bytes),
            output_bytes: called.map_or(0, |called| called.output_bytes),
            data_type: called
                .and_then(|called| called.data_type)
                .map(|kind| format!("{kind:?}").to_lowercase()),
            state: entry.state.name(),
            created_ns: nanoseconds(entry.created),
            started_ns: entry.started.map(nanoseconds),
            ended_ns: entry.ended.map(nanoseconds),
            timeout_ms: u64::try_from(entry.timeout.as_millis()).unwrap_or(u64::MAX),
            note: entry.note.as_deref().map(str::to_owned),
            failure: entry.failure.as_ref().map(|error| RecordedFailure {
                message: error.to_string(),
                ranks: error.ranks().to_vec(),
            }),
        }
    }
}

/// Gives the scheduled collectives the numbers that they will have: they run in the order in which they were scheduled.
fn number_scheduled(calls: &mut [RecordedCall]) {
    let mut last: HashMap<(String, usize, u32), u32> = HashMap::new();
    for call in calls.iter_mut().filter(|call| call.kind == "collective") {
        let sequence = (call.group.clone(), call.rank, call.tag);
        if call.sequence.is_none() && call.state == "scheduled" {
            call.sequence = last.get(&sequence).map(|last| last.wrapping_add(1));
        }
        if let Some(number) = call.sequence {
            last.insert(sequence, number);
        }
    }
}

fn hexadecimal(id: u64) -> String {
    format!("{id:016x}")
}

fn nanoseconds(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
