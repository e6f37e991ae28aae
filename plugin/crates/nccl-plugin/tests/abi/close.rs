//! Closing with requests in flight: it does not wait for the peer, and touches no memory afterwards.

use std::thread;
use std::time::Instant;

use evenkeel_protocol::{ChunkHeader, Frame};
use evenkeel_testkit::TestRng;

use crate::harness::{Net, Opaque, TIMEOUT, run_in_child_process};
use crate::raw_peer::{self, UNTOUCHED, contents};

/// Maximum number of requests that NCCL has in flight.
const REQUESTS: usize = 8;
const SIZE: usize = 4 << 20;
/// What the plugin would wait for is far longer than [`TIMEOUT`]: closing that waits for a peer is told from a slow machine.
const TIMEOUTS: [(&str, &str); 2] =
    [("EVENKEEL_PEER_TIMEOUT", "300"), ("EVENKEEL_RECOVERY_TIMEOUT", "300")];

#[derive(Clone, Copy, Debug)]
enum Order {
    SenderFirst,
    ReceiverFirst,
    BothAtOnce,
}

/// The requests, and the memory that they were made with.
type Posted = Vec<(Opaque, Vec<u8>)>;

fn send_all(net: &Net, comm: Opaque, message: impl Fn(u64) -> Vec<u8>) -> Posted {
    let all = (0..REQUESTS as u64).map(|number| {
        let memory = message(number);
        // SAFETY: the memory lives and stays as it is until the comm is closed.
        let request = unsafe { net.isend(comm, memory.as_ptr(), SIZE) };
        (request.unwrap().unwrap(), memory)
    });
    all.collect()
}

fn receive_all(net: &Net, comm: Opaque) -> Posted {
    let all = (0..REQUESTS).map(|_| {
        let mut memory = vec![0; SIZE];
        // SAFETY: the memory lives, and is not used otherwise, until the comm is closed.
        let request = unsafe { net.irecv(comm, memory.as_mut_ptr(), SIZE) };
        (request.unwrap().unwrap(), memory)
    });
    all.collect()
}

/// Uses the memory for something else, as NCCL may do after closing.
fn reuse_memory(posted: &mut Posted) {
    posted.iter_mut().for_each(|(_, memory)| memory.fill(UNTOUCHED));
}

/// A byte over another connection shows that the threads are done with the previous ones.
fn exchange_a_byte(net: &Net) {
    let (send, recv) = net.pair();
    let mut byte = 0;
    // SAFETY: the byte lives until the requests are finished.
    let (sent, received) = unsafe {
        (net.isend(send, &7, 1).unwrap().unwrap(), net.irecv(recv, &mut byte, 1).unwrap().unwrap())
    };
    assert_eq!((net.finish(received), net.finish(sent), byte), (Ok(1), Ok(1), 7));
    net.close_send(send);
    net.close_recv(recv);
}

#[test]
fn both_sides_with_requests_in_flight() {
    run_in_child_process("close::child_both_sides", &TIMEOUTS);
}

#[test]
#[ignore = "part of another test"]
fn child_both_sides() {
    let net = Net::init(12, 0xab01).unwrap();
    for round in 0..4 {
        for order in [Order::SenderFirst, Order::ReceiverFirst, Order::BothAtOnce] {
            let (send, recv) = net.pair();
            let (mut incoming, mut outgoing) =
                (receive_all(&net, recv), send_all(&net, send, |_| vec![1; SIZE]));
            // Further into the transfer in each round.
            for _ in 0..round {
                let _ = net.test(incoming[0].0);
                let _ = net.test(outgoing[0].0);
            }
            let begun = Instant::now();
            let mut close_send = || {
                net.close_send(send);
                reuse_memory(&mut outgoing);
            };
            let mut close_recv = || {
                net.close_recv(recv);
                reuse_memory(&mut incoming);
            };
            match order {
                Order::SenderFirst => (close_send(), close_recv()),
                Order::ReceiverFirst => (close_recv(), close_send()),
                Order::BothAtOnce => thread::scope(|scope| {
                    let other = scope.spawn(close_send);
                    (close_recv(), other.join().unwrap())
                }),
            };
            assert!(begun.elapsed() < TIMEOUT, "{order:?} took {:?}", begun.elapsed());
            exchange_a_byte(&net);
            for (_, memory) in incoming {
                assert!(memory.iter().all(|byte| *byte == UNTOUCHED), "{order:?}: written to");
            }
        }
    }
}

#[test]
fn sender_closes_while_peer_does_not_read() {
    run_in_child_process("close::child_sender", &TIMEOUTS);
}

#[test]
#[ignore = "part of another test"]
fn child_sender() {
    let net = Net::init(12, 0xab02).unwrap();
    let (mut peer, mut handle) = raw_peer::Receiver::listen(&mut TestRng::new(1));
    let send = peer.connected(&net, &mut handle);
    let mut outgoing = send_all(&net, send, |number| contents(number, 0, SIZE as u64));
    assert_eq!(net.test(outgoing[0].0), Ok(None));
    let begun = Instant::now();
    net.close_send(send);
    reuse_memory(&mut outgoing);
    assert!(begun.elapsed() < TIMEOUT, "took {:?}", begun.elapsed());
    // The peer receives the memory's former contents only.
    peer.drain();
    assert!(peer.received < (REQUESTS * SIZE) as u64, "nothing was in flight");
}

#[test]
fn receiver_closes_while_peer_stalls() {
    run_in_child_process("close::child_receiver", &TIMEOUTS);
}

#[test]
#[ignore = "part of another test"]
fn child_receiver() {
    let net = Net::init(12, 0xab03).unwrap();
    let (mut peer, recv) = raw_peer::Sender::connect(&net, 2);
    let mut incoming = receive_all(&net, recv);
    // Half of a chunk on each flow.
    let half = SIZE as u64 / 2;
    let halves = [0, half].map(|offset| {
        let (length, total) = (half as u32, SIZE as u64);
        let chunk = ChunkHeader { message: 0, offset, length, total, ack_wanted: true };
        let bytes = contents(0, offset, offset + half);
        let (before, after) = bytes.split_at(bytes.len() / 2);
        ([&Frame::Chunk(chunk).encode(), before].concat(), after.to_vec())
    });
    for (flow, (before, _)) in halves.iter().enumerate() {
        peer.write(flow, before);
    }
    peer.delivered();
    assert_eq!(net.test(incoming[0].0), Ok(None));
    let begun = Instant::now();
    net.close_recv(recv);
    reuse_memory(&mut incoming);
    assert!(begun.elapsed() < TIMEOUT, "took {:?}", begun.elapsed());
    for (flow, (_, after)) in halves.iter().enumerate() {
        peer.try_write(flow, after);
    }
    exchange_a_byte(&net);
    for (_, memory) in incoming {
        assert!(memory.iter().all(|byte| *byte == UNTOUCHED), "written to after close");
    }
}
