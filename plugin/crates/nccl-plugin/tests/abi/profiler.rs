//! Events of chunks for NCCL's profiler, through the callback that NCCL passes to `init`.

use std::env;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use evenkeel_nccl_abi::{
    EVENT_OF_IB_V1, EVENT_OF_SOCKET_V1, EVENT_START, EVENT_STOP, IbEventV1, NcclResult, SUCCESS,
    SocketEventV1,
};

use crate::harness::{Net, Opaque, in_rdma_lab, pattern, run_in_child_process, until};

/// What the stub of a profiler has seen.
#[derive(Debug, Default)]
struct Seen {
    /// Handle of the message, whether it was sent, and the bytes of each event, by the event's number from 1 on.
    begun: Vec<(usize, bool, usize)>,
    /// Numbers of the events that have ended, in this order.
    ended: Vec<usize>,
}

static SEEN: Mutex<Seen> = Mutex::new(Seen { begun: Vec::new(), ended: Vec::new() });

/// As NCCL's callback with a profiler that wants all events.
unsafe extern "C" fn profile(
    event: *mut *mut c_void,
    kind: c_int,
    message: *mut c_void,
    id: i64,
    description: *mut c_void,
) -> NcclResult {
    let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the place of the handle is valid, and the description of the type that the id says.
    unsafe {
        match kind {
            EVENT_START => {
                let (is_sent, bytes) = if id == EVENT_OF_SOCKET_V1 {
                    let event = *description.cast::<SocketEventV1>();
                    assert!(event.kind == 1 && event.chunk.socket >= 0);
                    (event.chunk.operation == 0, event.chunk.length)
                } else {
                    assert_eq!(id, EVENT_OF_IB_V1);
                    let event = *description.cast::<IbEventV1>();
                    assert!(event.kind == 1 && event.chunk.queue_pair > 0);
                    (true, event.chunk.length)
                };
                seen.begun.push((message.addr(), is_sent, bytes));
                *event = ptr::without_provenance_mut(seen.begun.len());
            }
            EVENT_STOP => seen.ended.push((*event).addr()),
            other => panic!("no call {other}"),
        }
    }
    SUCCESS
}

/// As NCCL's callback without a profiler.
unsafe extern "C" fn no_profile(
    _event: *mut *mut c_void,
    kind: c_int,
    _message: *mut c_void,
    _id: i64,
    _description: *mut c_void,
) -> NcclResult {
    let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    if kind == EVENT_START {
        seen.begun.push((0, false, 0));
    } else {
        seen.ended.push(0);
    }
    SUCCESS
}

/// NCCL's handle of a message.
const MESSAGE: usize = 0x1230;

/// Sends one message, and checks that it arrives.
fn exchange(net: &Net, (send, recv): (Opaque, Opaque), length: usize) {
    let data = pattern(length, length);
    let mut place = vec![0; length];
    // SAFETY: the memory lives until both requests are finished, and is not used meanwhile.
    let (receiving, sending) = unsafe {
        let receiving = net.irecv(recv, place.as_mut_ptr(), length).unwrap().unwrap();
        (receiving, net.isend(send, data.as_ptr(), length).unwrap().unwrap())
    };
    assert_eq!(net.finish(receiving), Ok(length));
    assert_eq!(net.finish(sending), Ok(length));
    assert!(place == data);
}

/// Events of a message for which NCCL's example of a profiler has room (`MAX_EVENTS_PER_REQ`). It does not check that.
const ROOM: usize = 8;

#[test]
fn profiler_sees_chunks_begin_and_end() {
    run_in_child_process("profiler::child_events", &[]);
    // Checksums are for TCP only.
    if !in_rdma_lab() {
        run_in_child_process("profiler::child_events", &[("EVENKEEL_CHECKSUM", "1")]);
        let many_chunks = ("EVENKEEL_CHUNK_BYTES", "4096");
        run_in_child_process("profiler::child_events", &[many_chunks]);
    }
}

#[test]
#[ignore = "part of another test"]
fn child_events() {
    for version in [10, 11, 12] {
        let mut net = Net::init_profiled(version, 0x9f, None, Some(profile)).unwrap();
        net.profile = Opaque(ptr::without_provenance_mut(MESSAGE));
        let pair = net.pair();
        let lengths = [8, 3_000, 100_000, 3 << 20];
        let has_many_chunks = env::var_os("EVENKEEL_CHUNK_BYTES").is_some();
        for length in lengths {
            exchange(&net, pair, length);
            // The request is reported: nothing of its events is left.
            let mut seen = SEEN.lock().unwrap();
            let mut ended = std::mem::take(&mut seen.ended);
            ended.sort_unstable();
            assert_eq!(ended, (1..=seen.begun.len()).collect::<Vec<_>>(), "v{version}, {length}");
            assert!(seen.begun.iter().all(|(message, ..)| *message == MESSAGE));
            let chunks = |sent| {
                let of = seen.begun.iter().filter(|(_, is_sent, _)| *is_sent == sent);
                let bytes: Vec<usize> = of.map(|(.., bytes)| *bytes).collect();
                (bytes.len(), bytes.iter().sum::<usize>())
            };
            let check = |sent, length| match chunks(sent) {
                (ROOM, bytes) => assert!(bytes <= length, "v{version}, {length}: {bytes}"),
                (count, bytes) => {
                    assert!(count < ROOM, "v{version}, {length}: {count}");
                    assert_eq!(bytes, length, "v{version}");
                }
            };
            check(true, length);
            // An RDMA write arrives without work of the receiver.
            check(false, if in_rdma_lab() { 0 } else { length });
            let count = chunks(true).0;
            assert!(length < 1 << 20 || count > 1, "{count}");
            assert!(length < 1 << 20 || !has_many_chunks || count == ROOM, "{count}");
            seen.begun.clear();
        }
        net.close_send(pair.0);
        net.close_recv(pair.1);
        net.finalize();
    }
}

#[test]
fn profiler_events_end_with_the_connection() {
    run_in_child_process("profiler::child_close", &[]);
}

#[test]
#[ignore = "part of another test"]
fn child_close() {
    let mut net = Net::init_profiled(12, 0x9f, None, Some(profile)).unwrap();
    net.profile = Opaque(ptr::without_provenance_mut(MESSAGE));
    let (send, recv) = net.pair();
    // Nothing is posted for it: it fills the sockets and stays there.
    let data = pattern(1, 64 << 20);
    // SAFETY: the memory lives until the connection is closed.
    let request = unsafe { net.isend(send, data.as_ptr(), data.len()) }.unwrap();
    assert!(request.is_some());
    // Over RDMA nothing is sent to a buffer that is not posted.
    if !in_rdma_lab() {
        let begun = || (!SEEN.lock().unwrap().begun.is_empty()).then_some(());
        assert!(until("a chunk begins", begun).is_some());
    }
    net.close_send(send);
    let seen = SEEN.lock().unwrap();
    assert_eq!(seen.begun.iter().filter(|(_, is_sent, _)| *is_sent).count(), seen.ended.len());
    drop(seen);
    net.close_recv(recv);
}

#[test]
fn profiler_is_not_called_without_a_handle_and_not_to_end_what_it_did_not_begin() {
    run_in_child_process("profiler::child_none", &[]);
}

#[test]
#[ignore = "part of another test"]
fn child_none() {
    // As with a table without profilers: no handles.
    let mut net = Net::init_profiled(12, 0x9f, None, Some(no_profile)).unwrap();
    let pair = net.pair();
    exchange(&net, pair, 3 << 20);
    assert!(SEEN.lock().unwrap().begun.is_empty());
    // As NCCL without a profiler: handles, but no events.
    net.profile = Opaque(ptr::without_provenance_mut(MESSAGE));
    exchange(&net, pair, 3 << 20);
    let seen = SEEN.lock().unwrap();
    assert!(!seen.begun.is_empty() && seen.ended.is_empty(), "{seen:?}");
    drop(seen);
    net.close_send(pair.0);
    net.close_recv(pair.1);
    net.finalize();
}
