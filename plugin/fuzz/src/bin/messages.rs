//! What an authenticated peer sends after the handshake: chunks that contradict each other, and acknowledgements of anything.
#![no_main]

use evenkeel_fuzz::{Steps, fuzz_target, write_seeds};
use evenkeel_protocol::{
    ChunkAction, ChunkHeader, Frame, NextFrame, Reassembly, Schedule, Scheduler,
};

const SLOTS: usize = 3;
const MESSAGES: usize = 8;

fn seeds() -> Vec<Vec<u8>> {
    // Buffers, a message in two chunks, an empty one; messages, their frames and acknowledgements.
    vec![
        vec![0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 128, 0, 0, 1, 2, 0, 1, 128, 0, 128, 0, 0, 1, 1, 3, 3],
        vec![0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 3],
        vec![1, 0, 0, 1, 1, 0, 1, 0, 1, 2, 0, 3, 0, 1, 1, 0, 0, 3, 0, 4, 1],
    ]
}

/// The receiving side. No byte is written twice or out of its buffer, and no message is released while it is written.
fn receive(steps: &mut Steps<'_>) {
    let mut reassembly = Reassembly::default();
    let mut buffers: Vec<Vec<u8>> = vec![];
    let mut done: Vec<bool> = vec![];
    // Ranges that are reserved and not reported: message, from, to.
    let mut reserved: Vec<(usize, u64, u64)> = vec![];
    while let Some(step) = steps.next_byte() {
        match step % 4 {
            0 if buffers.len() < MESSAGES => {
                let capacity = steps.short() % 1024;
                reassembly.post(capacity, buffers.len());
                buffers.push(vec![0; capacity as usize]);
                done.push(false);
            }
            1 | 2 => {
                let chunk = ChunkHeader {
                    message: steps.next_byte().unwrap_or_default().into(),
                    offset: steps.short(),
                    length: steps.short() as u32,
                    total: steps.short(),
                    ack_wanted: step > 127,
                };
                let Ok(Frame::Chunk(chunk)) = Frame::decode(&Frame::Chunk(chunk).encode()) else {
                    continue;
                };
                let mut at = chunk.offset;
                loop {
                    match reassembly.reserve(&chunk, at) {
                        Ok(ChunkAction::Deliver { payload, end }) => {
                            assert_eq!(payload as u64, chunk.message);
                            assert!(end <= chunk.end() && end as usize <= buffers[payload].len());
                            reserved.push((payload, at, end));
                            assert!(end > at || chunk.length == 0);
                            at = end;
                        }
                        Ok(ChunkAction::Discard { end }) => {
                            assert!(end > at || chunk.length == 0);
                            at = end;
                        }
                        Ok(ChunkAction::NotPosted) | Err(_) => break,
                    }
                    assert!(at <= chunk.end());
                    if at == chunk.end() {
                        break;
                    }
                }
            }
            _ if !reserved.is_empty() => {
                let place = usize::from(step / 4) % reserved.len();
                let (message, from, to) = reserved.swap_remove(place);
                let until = if step > 127 { from + steps.short() % (to - from).max(1) } else { to };
                // A repeated empty message has no bytes to write.
                assert!(!done[message] || from == to, "written after it was reported");
                for times in &mut buffers[message][from as usize..until as usize] {
                    *times += 1;
                }
                let finished = reassembly.received(message as u64, until - from);
                reassembly.release(message as u64, until, to);
                if let Some(finished) = finished {
                    assert_eq!(finished.payload, message);
                    let (inside, behind) = buffers[message].split_at(finished.total as usize);
                    assert!(inside.iter().all(|times| *times == 1), "each byte once");
                    assert!(behind.iter().all(|times| *times == 0), "none behind the message");
                    done[message] = true;
                }
            }
            _ => {
                let acknowledged = reassembly.ack();
                assert!(acknowledged <= buffers.len() as u64);
                assert!(done[..acknowledged as usize].iter().all(|done| *done));
            }
        }
    }
}

/// The sending side. What is released was acknowledged, in order, and is not being written.
fn send(steps: &mut Steps<'_>) {
    let schedules = [Schedule::Pull, Schedule::Static { min_share: 256 }];
    let choice = steps.next_byte().unwrap_or_default();
    let mut scheduler = Scheduler::new(schedules[usize::from(choice % 2)]);
    (0..SLOTS).for_each(|slot| scheduler.flow_opened(slot));
    let mut writing: [Option<u64>; SLOTS] = [None; SLOTS];
    let (mut pushed, mut released) = (0, 0);
    while let Some(step) = steps.next_byte() {
        let slot = usize::from(step / 8) % SLOTS;
        match step % 8 {
            0 | 1 => {
                scheduler.push(steps.short() % 4096, step > 127, pushed);
                pushed += 1;
            }
            2 | 3 if writing[slot].is_none() => match scheduler.next(slot, steps.short()) {
                Some(NextFrame::Chunk(chunk, payload)) => {
                    assert_eq!(chunk.message, *payload);
                    assert!(chunk.message >= released, "a message that was released");
                    assert_eq!(
                        Frame::decode(&Frame::Chunk(chunk).encode()),
                        Ok(Frame::Chunk(chunk))
                    );
                    writing[slot] = Some(chunk.message);
                }
                Some(NextFrame::FlowDead(_)) | None => {}
            },
            4 if writing[slot].take().is_some() => {
                scheduler.chunk_written(slot);
            }
            5 => {
                scheduler.flow_failed(slot, slot as u32);
                scheduler.flow_opened(slot);
                writing[slot] = None;
            }
            _ => {
                let below = if step > 127 { steps.long() } else { steps.short() % (pushed + 2) };
                assert!(below <= pushed || scheduler.acked(below).is_err());
                let _ = scheduler.acked(below);
            }
        }
        while let Some(sent) = scheduler.pop_sent() {
            assert_eq!(sent.payload, released, "in order");
            assert!(!writing.contains(&Some(sent.payload)), "while it is written");
            released += 1;
        }
    }
}

fuzz_target!(init: write_seeds(seeds()), |input: &[u8]| {
    let mut steps = Steps::new(input);
    let Some(side) = steps.next_byte() else { return };
    if side.is_multiple_of(2) { receive(&mut steps) } else { send(&mut steps) }
});
