//! What the flight recorder keeps of calls that complete, wait, and fail. In a process of its own: all groups share the ring.

#![allow(clippy::unwrap_used, reason = "a test that cannot continue fails there")]

use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use evenkeel_collectives::{
    Call, Error, ErrorKind, FlightRecord, Group, MemoryStore, Op, RecordedCall, Sequence,
    TransportKind, on_failure,
};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs `work` on the ranks of a group of this name.
fn run_ranks(name: &str, size: usize, work: impl Fn(&Arc<Group>) + Sync) {
    let store = MemoryStore::new();
    thread::scope(|scope| {
        for rank in 0..size {
            let (store, work) = (store.clone(), &work);
            scope.spawn(move || {
                let transport = TransportKind::SharedMemory;
                let group = Group::join(&store, rank, size, &transport, TIMEOUT).unwrap();
                let ranks: Vec<usize> = (0..size).map(|rank| 10 + rank).collect();
                group.set_name(name, &ranks).unwrap();
                work(&Arc::new(group));
            });
        }
    });
}

/// The calls of a rank of the group of this name, without the barrier with which it joined.
fn calls(name: &str, rank: usize) -> Vec<RecordedCall> {
    let record = FlightRecord::read();
    let group = record.groups.iter().find(|group| group.name.as_deref() == Some(name)).unwrap();
    let is_of_rank = |call: &RecordedCall| call.group == group.id && call.rank == rank;
    record.calls.into_iter().filter(is_of_rank).skip(1).collect()
}

/// Name, number, state and sizes.
fn words(call: &RecordedCall) -> String {
    let number = call.sequence.map_or(-1, i64::from);
    format!("{} {number} {} {} {}", call.name, call.state, call.input_bytes, call.output_bytes)
}

#[test]
fn calls_are_recorded_with_their_numbers_and_sizes() {
    run_ranks("sizes", 2, |group| {
        let (rank, other, call) = (group.rank(), 1 - group.rank(), Call::default());
        group.allreduce_of(&mut [1f32; 4], Op::Sum, &call).unwrap();
        group.allgather(&mut [0; 6], &call.clone().note("six bytes")).unwrap();
        if rank == 0 {
            group.send(other, &[0; 5], &call).unwrap();
        } else {
            group.recv_any(&mut [0; 9], &call).unwrap();
        }
        group.broadcast(&mut [0; 7], 1, &call).unwrap();
        let calls = calls("sizes", rank);
        let message = ["send 0 completed 5 0", "recv 0 completed 0 5"][rank];
        assert_eq!(
            calls.iter().map(words).collect::<Vec<_>>(),
            [
                "allreduce 1 completed 16 16",
                "allgather 2 completed 3 6",
                message,
                "broadcast 3 completed 7 7",
            ]
        );
        assert_eq!(calls[0].data_type.as_deref(), Some("float32"));
        assert_eq!(calls[1].note.as_deref(), Some("six bytes"));
        let peers: Vec<_> = calls.iter().map(|call| call.peer).collect();
        assert_eq!(peers, [None, None, Some(other), Some(1)]);
        for call in &calls {
            assert!(Some(call.created_ns) <= call.started_ns && call.started_ns <= call.ended_ns);
        }
        // The others' calls are read before one of them leaves.
        group.barrier(&call).unwrap();
    });
}

/// Rank 2 comes late: the record says which call failed, and whom it waited for. What waits behind a call is scheduled.
#[test]
fn failed_call_says_whom_it_waited_for() {
    // Rank 2 waits until the others are done, also if one of them has failed.
    let (present, all_done) = mpsc::channel::<()>();
    let (present, all_done) = (Mutex::new(vec![present.clone(), present]), Mutex::new(all_done));
    let failures = Arc::new(Mutex::new(vec![]));
    let seen = Arc::clone(&failures);
    on_failure(move |error: &Error| seen.lock().unwrap().push(error.to_string()));
    run_ranks("late", 3, |group| {
        let first = Sequence::Collectives { tag: 0 };
        if group.rank() == 2 {
            let _ = all_done.lock().unwrap().recv_timeout(TIMEOUT);
            return;
        }
        let _present = present.lock().unwrap().pop();
        let short = Call::default().timeout(Duration::from_secs(1));
        let (release, held) = mpsc::channel::<()>();
        let failing = group.start_call(first, "allreduce", short, move |group, call| {
            group.allreduce_of(&mut [1i64], Op::Sum, call).inspect_err(|_| {
                let _ = held.recv();
            })
        });
        let behind = Call::default().timeout(Duration::from_secs(1)).note("behind");
        let behind = group.start_call(first, "broadcast", behind, |group, call| {
            group.broadcast(&mut [0; 9], 9, call)
        });
        // Until it has failed, it is in progress, and the one behind it keeps its place.
        let deadline = Instant::now() + TIMEOUT;
        while calls("late", group.rank())[0].state != "failed" {
            assert!(Instant::now() < deadline, "{:?}", calls("late", group.rank()));
            thread::yield_now();
        }
        let recorded = calls("late", group.rank());
        assert_eq!(
            recorded.iter().map(words).collect::<Vec<_>>(),
            ["allreduce 1 failed 8 8", "broadcast 2 scheduled 0 0"]
        );
        assert_eq!(recorded[1].note.as_deref(), Some("behind"));
        let failure = recorded[0].failure.as_ref().unwrap();
        assert_eq!(failure.ranks, [2], "{}", failure.message);
        assert!(failure.message.contains("waiting for rank"), "{}", failure.message);
        assert!(failures.lock().unwrap().contains(&failure.message));
        release.send(()).unwrap();
        assert_eq!(failing.wait(None).unwrap_err().kind(), ErrorKind::Timeout);
        // A call whose arguments are wrong has ended too.
        assert_eq!(behind.wait(None).unwrap_err().kind(), ErrorKind::Argument);
        assert_eq!(calls("late", group.rank())[1].state, "failed");
    });
}

#[test]
fn record_is_json_with_the_ranks_of_the_job() {
    run_ranks("json", 2, |group| {
        group.barrier(&Call::default()).unwrap();
        let record = FlightRecord::read();
        let named = record.groups.iter().find(|group| group.name.as_deref() == Some("json"));
        assert_eq!(named.unwrap().ranks, [10, 11]);
        let json = record.to_json();
        assert!(json.starts_with("{\"version\":\"") && json.contains("\"name\":\"barrier\""));
        assert!(group.set_name("of one rank", &[1]).is_err());
    });
}
