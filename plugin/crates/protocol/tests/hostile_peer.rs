//! Hostile peers: whatever they send, no byte is written twice or out of slot, and no message is released while it is
//! being written.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails there")]

use evenkeel_protocol::{
    ChunkAction, ChunkHeader, Frame, NextFrame, Reassembly, Schedule, Scheduler,
};
use evenkeel_testkit::TestRng;

/// Chunks of nearby messages that may contradict each other, over flows that end at any byte.
#[test]
fn reassembly_survives_hostile_chunks() {
    let mut completed = 0;
    for seed in 0..2000 {
        let mut rng = TestRng::new(seed);
        let mut reassembly = Reassembly::default();
        let capacities: Vec<u64> = (0..8).map(|_| rng.below(5) * 128 + rng.below(3)).collect();
        let mut written: Vec<Vec<u8>> =
            capacities.iter().map(|capacity| vec![0; *capacity as usize]).collect();
        let mut done = vec![false; capacities.len()];
        // Ranges that are reserved and not reported: message, from, to.
        let mut reserved: Vec<(usize, u64, u64)> = Vec::new();
        let mut posted = 0;
        for _ in 0..100 {
            if posted < capacities.len() && rng.one_in(5) {
                reassembly.post(capacities[posted], posted);
                posted += 1;
            }
            if !reserved.is_empty() && rng.one_in(2) {
                let (message, from, to) = reserved.swap_remove(rng.index(reserved.len()));
                let until = if rng.one_in(3) { from + rng.below(to - from) } else { to };
                // A repeated empty message has no bytes to write.
                assert!(!done[message] || from == to, "written after it was reported");
                written[message][from as usize..until as usize]
                    .iter_mut()
                    .for_each(|times| *times += 1);
                let finished = reassembly.received(message as u64, until - from);
                reassembly.release(message as u64, until, to);
                if let Some(finished) = finished {
                    assert_eq!(finished.payload, message);
                    let total = finished.total as usize;
                    assert!(written[message][..total].iter().all(|times| *times == 1));
                    assert!(written[message][total..].iter().all(|times| *times == 0));
                    done[message] = true;
                    completed += 1;
                }
                continue;
            }
            let Some(chunk) = any_chunk(&mut rng, &capacities) else { continue };
            let mut at = chunk.offset;
            loop {
                match reassembly.reserve(&chunk, at) {
                    Ok(ChunkAction::Deliver { payload: &payload, end }) => {
                        assert_eq!(payload as u64, chunk.message);
                        assert!(end <= chunk.end() && end <= capacities[payload]);
                        reserved.push((payload, at, end));
                        at = end;
                    }
                    Ok(ChunkAction::Discard { end }) => at = end,
                    Ok(ChunkAction::NotPosted) => break,
                    Err(_) => break,
                }
                assert!(at <= chunk.end());
                if at == chunk.end() {
                    break;
                }
            }
        }
        assert!(reassembly.ack() <= posted as u64);
    }
    assert!(completed > 1000, "{completed}");
}

/// A chunk that decodes as a frame.
fn any_chunk(rng: &mut TestRng, capacities: &[u64]) -> Option<ChunkHeader> {
    let message = rng.index(capacities.len() + 1);
    let max = capacities.get(message).copied().unwrap_or(1000);
    let total = if rng.one_in(20) { rng.below(2 * max) } else { max };
    let offset = rng.below(total / 128 + 1) * 128;
    let length = if rng.one_in(2) { total - offset.min(total) } else { 128 };
    let (message, ack_wanted) = (message as u64, rng.one_in(2));
    let chunk = ChunkHeader { message, offset, length: length as u32, total, ack_wanted };
    match Frame::decode(&Frame::Chunk(chunk).encode()) {
        Ok(Frame::Chunk(chunk)) => Some(chunk),
        _ => None,
    }
}

/// Acknowledgements of any messages, and flows that the peer reports as dead.
#[test]
fn scheduler_survives_hostile_acknowledgements() {
    const SLOTS: usize = 3;
    let (mut accepted, mut refused) = (0, 0);
    for seed in 0..2000 {
        let mut rng = TestRng::new(seed);
        let schedules = [Schedule::Pull, Schedule::Static { min_share: 256 }];
        let mut scheduler = Scheduler::new(*rng.choose(&schedules));
        (0..SLOTS).for_each(|slot| scheduler.flow_opened(slot));
        // The message that each flow is writing.
        let mut writing: [Option<u64>; SLOTS] = [None; SLOTS];
        let (mut pushed, mut released) = (0, 0);
        for _ in 0..100 {
            let slot = rng.index(SLOTS);
            match rng.below(5) {
                0 => {
                    scheduler.push(rng.below(1000), rng.one_in(2), pushed);
                    pushed += 1;
                }
                1 if writing[slot].is_none() => match scheduler.next(slot, rng.below(600)) {
                    Some(NextFrame::Chunk(chunk, payload)) => {
                        assert_eq!(chunk.message, *payload);
                        assert!(chunk.message >= released, "a message that was released");
                        writing[slot] = Some(chunk.message);
                    }
                    Some(NextFrame::FlowDead(_)) | None => {}
                },
                2 => {
                    if writing[slot].take().is_some() {
                        scheduler.chunk_written(slot);
                    }
                }
                3 if rng.one_in(4) => {
                    scheduler.flow_failed(slot, slot as u32);
                    scheduler.flow_opened(slot);
                    writing[slot] = None;
                }
                _ => {
                    let below = if rng.one_in(4) { rng.next_u64() } else { rng.below(pushed + 2) };
                    match scheduler.acked(below) {
                        Ok(()) => accepted += 1,
                        Err(_) => refused += 1,
                    }
                }
            }
            while let Some(sent) = scheduler.pop_sent() {
                assert_eq!(sent.payload, released, "in order");
                assert!(!writing.contains(&Some(sent.payload)), "while it is written");
                released += 1;
            }
        }
    }
    assert!(accepted > 1000 && refused > 1000, "{accepted} and {refused}");
}
