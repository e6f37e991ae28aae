//! The record of a rank: the calls that it is in, small enough to be compared between all ranks of
//! a job.
//!
//! `kubectl evenkeel why` reads it: `operator/internal/flightrecord/record.go` is the other end of
//! the format.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::report::{FlightRecord, RecordedCall, RecordedGroup};

/// The version of the format.
const VERSION: u32 = 1;

/// Calls in a row that have not completed, and are kept: the one that hangs, and the first that
/// wait behind it.
const MAX_WAITING: usize = 3;

/// What one rank of the job is in: of each order of calls the last one that completed, and the
/// first that did not.
#[derive(Debug, Serialize)]
pub struct RankRecord {
    version: u32,
    rank: usize,
    process: u32,
    time_ns: u64,
    groups: Vec<Group>,
    calls: Vec<Call>,
}

#[derive(Debug, Serialize)]
struct Group {
    id: String,
    name: String,
    rank: usize,
    ranks: Vec<usize>,
    waits_for: Vec<usize>,
}

#[derive(Debug, Serialize)]
struct Call {
    group: String,
    kind: &'static str,
    tag: u32,
    peer: Option<usize>,
    number: u32,
    operation: String,
    #[serde(rename = "type")]
    data_type: String,
    input_bytes: usize,
    output_bytes: usize,
    state: &'static str,
    created_ns: u64,
    started_ns: u64,
    ended_ns: u64,
    failure: String,
}

/// What the notes of calls of torch's backend begin with.
const TORCH_NOTE: &str = r#"{"torch":"#;

/// The note of a call of torch's backend: torch's name of it, and the type of its tensors.
#[derive(Deserialize)]
struct TorchNote {
    torch: String,
    dtype: String,
}

impl FlightRecord {
    /// This process's rank in the job: that in the first of its groups that exist. `None` without a
    /// group.
    pub fn rank(&self) -> Option<usize> {
        // Groups that are gone are listed as long as a call of theirs is kept, and the rank may
        // have changed since.
        let open = self.groups.iter().find(|group| group.is_open);
        open.or_else(|| self.groups.first()).and_then(own_rank)
    }

    /// The record of a rank of the job. `describe` returns what a group of a name is called, if
    /// that is not its name. Of ranks that are threads of this process, it has the calls of this
    /// one.
    pub fn rank_record(
        &self,
        rank: usize,
        describe: impl Fn(&str) -> Option<String>,
    ) -> RankRecord {
        let is_own = |group: &&RecordedGroup| own_rank(group) == Some(rank);
        let groups: Vec<_> = self.groups.iter().filter(is_own).collect();
        let ranks: HashMap<&str, usize> =
            groups.iter().map(|group| (group.id.as_str(), group.rank)).collect();
        let mut orders: Vec<Vec<&RecordedCall>> = vec![];
        let mut places = HashMap::new();
        for call in &self.calls {
            let is_own = ranks.get(call.group.as_str()) == Some(&call.rank);
            if !is_own || call.sequence.is_none() {
                continue;
            }
            // The root of a collective does not give it another order.
            let peer = if is_message(call) { call.peer } else { None };
            let order = (call.group.as_str(), call.kind, call.tag, peer);
            let place = *places.entry(order).or_insert_with(|| {
                orders.push(vec![]);
                orders.len() - 1
            });
            let calls = &mut orders[place];
            if call.state == "completed" {
                calls.clear();
            }
            if calls.len() <= MAX_WAITING {
                calls.push(call);
            }
        }
        RankRecord {
            version: VERSION,
            rank,
            process: self.process,
            time_ns: self.time_ns,
            groups: groups.into_iter().map(|group| Group::of(group, &describe)).collect(),
            calls: orders.into_iter().flatten().map(Call::of).collect(),
        }
    }
}

impl RankRecord {
    /// The record as JSON, of one line.
    pub fn to_json(&self) -> String {
        // Only numbers and texts: there is nothing that JSON cannot have.
        serde_json::to_string(self).unwrap_or_default()
    }
}

impl Group {
    fn of(group: &RecordedGroup, describe: impl Fn(&str) -> Option<String>) -> Self {
        let name = group.name.clone().unwrap_or_default();
        let described = if name.is_empty() { None } else { describe(&name) };
        Self {
            id: group.id.clone(),
            name: described.unwrap_or(name),
            rank: group.rank,
            ranks: group.ranks.clone(),
            waits_for: group.waits_for.clone(),
        }
    }
}

impl Call {
    fn of(call: &RecordedCall) -> Self {
        let (operation, data_type) = operation(call);
        Self {
            group: call.group.clone(),
            kind: call.kind,
            tag: call.tag,
            peer: call.peer,
            // As in the files for torch's reader, which counts messages from 1.
            number: call.sequence.unwrap_or(0).wrapping_add(u32::from(is_message(call))),
            operation,
            data_type,
            input_bytes: call.input_bytes,
            output_bytes: call.output_bytes,
            state: call.state,
            created_ns: call.created_ns,
            started_ns: call.started_ns.unwrap_or(0),
            ended_ns: call.ended_ns.unwrap_or(0),
            failure: call.failure.as_ref().map_or_else(String::new, |it| it.message.clone()),
        }
    }
}

fn own_rank(group: &RecordedGroup) -> Option<usize> {
    group.ranks.get(group.rank).copied()
}

fn is_message(call: &RecordedCall) -> bool {
    call.kind != "collective"
}

/// Torch's name of a call, and the type of its elements, empty if unknown: from the note of a call
/// of torch's backend, else from the call itself.
fn operation(call: &RecordedCall) -> (String, String) {
    let note = call.note.as_deref().filter(|note| note.starts_with(TORCH_NOTE));
    if let Some(note) = note.and_then(|note| serde_json::from_str::<TorchNote>(note).ok()) {
        return (note.torch, note.dtype);
    }
    let name = match call.name {
        "allreduce" => "all_reduce",
        // The parts of the ranks may differ in size.
        "reduce_scatter" => "reduce_scatter_v",
        "allgather" => "all_gather_v",
        "alltoall" => "all_to_all",
        name => name,
    };
    (name.to_owned(), call.data_type.clone().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::super::report::RecordedFailure;
    use super::*;

    /// What the operator's tests read.
    const OPERATORS: &str = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../../operator/internal/flightrecord/testdata/record.json"
    );

    fn completed() -> RecordedCall {
        RecordedCall {
            record_id: 0,
            group: "a".to_owned(),
            rank: 1,
            kind: "collective",
            name: "allreduce",
            sequence: Some(0),
            tag: 0,
            peer: None,
            input_bytes: 8,
            output_bytes: 8,
            data_type: Some("float32".to_owned()),
            state: "completed",
            created_ns: 1,
            started_ns: Some(2),
            ended_ns: Some(3),
            timeout_ms: 4,
            note: None,
            failure: None,
        }
    }

    fn waiting(number: u32) -> RecordedCall {
        let note = r#"{"torch":"all_gather","inputs":[[2]],"outputs":[[4]],"dtype":"int8"}"#;
        RecordedCall {
            state: "scheduled",
            name: "allgather",
            sequence: Some(number),
            started_ns: None,
            ended_ns: None,
            note: Some(note.to_owned()),
            ..completed()
        }
    }

    fn failed_message() -> RecordedCall {
        let failure =
            RecordedFailure { message: "recv: rank 4 is lost".to_owned(), ranks: vec![0] };
        RecordedCall {
            kind: "receive",
            name: "recv",
            peer: Some(0),
            data_type: None,
            state: "failed",
            failure: Some(failure),
            ..completed()
        }
    }

    fn group(id: &str, rank: usize) -> RecordedGroup {
        RecordedGroup {
            id: id.to_owned(),
            name: Some("0".to_owned()),
            rank,
            is_open: true,
            ranks: vec![4, 2],
            waits_for: if rank == 1 { vec![0] } else { vec![] },
            failure: None,
        }
    }

    #[test]
    fn rank_record_is_the_one_that_the_operator_reads() {
        let mut calls = vec![completed(), RecordedCall { sequence: Some(1), ..completed() }];
        calls.extend((2..9).map(waiting));
        calls.push(failed_message());
        calls.push(RecordedCall { group: "b".to_owned(), rank: 0, ..failed_message() });
        calls.push(RecordedCall { sequence: None, ..completed() });
        let record = FlightRecord {
            version: "0.1.0",
            process: 7,
            time_ns: 9,
            groups: vec![group("a", 1), group("b", 0)],
            calls,
        };
        assert_eq!(record.rank(), Some(2));
        let own = record.rank_record(2, |name| (name == "0").then(|| "default_pg".to_owned()));
        let value = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        assert_eq!(value(&own.to_json()), value(&std::fs::read_to_string(OPERATORS).unwrap()));
    }
}
