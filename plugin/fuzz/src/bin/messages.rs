//! What an authenticated peer sends after the handshake: chunks that contradict each other, and
//! acknowledgements of anything.
#![no_main]

use std::collections::VecDeque;

use evenkeel_fuzz::{Steps, fuzz_target, write_seeds};
use evenkeel_protocol::{
    Abandoned, ChunkAction, ChunkHeader, Frame, MAX_CHUNK_BYTES, NextFrame, Reassembly, RecvCodec,
    RecvStep, Room, Schedule, Scheduler, checksum,
};

const SLOTS: usize = 3;
const MESSAGES: usize = 8;
/// Flows of the receiving side.
const FLOWS: usize = 2;
/// Maximum number of bytes on the way.
const MAX_ON_WIRE: usize = 256 << 10;

fn seeds() -> Vec<Vec<u8>> {
    // A message in two chunks, the second of them on another flow, and an empty message.
    let received = |checksums| {
        let post = |capacity: u8| vec![0, 0, capacity];
        let first = vec![1, 0, 0, 0, 128, 0, 0, 1, 3, 50, 3, 255];
        let second = vec![6, 0, 128, 0, 128, 0, 0, 1, 8, 200];
        let empty = vec![1, 1, 0, 0, 0, 0, 0, 0, 3, 255, 4];
        [vec![0, checksums], post(1), post(0), first, second, empty].concat()
    };
    let close = Frame::Close(2).encode();
    // Frames that are no chunks, and a flow that ends in the middle of one; messages, their frames
    // and acknowledgements.
    vec![
        received(0),
        received(1),
        [&[0, 0, 2, 32][..], &close, &[3, 32, 2, 20], &close[..20], &[3, 7, 3, 30, 129]].concat(),
        vec![1, 0, 0, 1, 1, 0, 1, 0, 1, 2, 0, 3, 0, 1, 1, 0, 0, 3, 0, 4, 1],
    ]
}

/// The receiving side: its buffers, and how often each byte was written.
#[derive(Default)]
struct Receiver {
    reassembly: Reassembly<usize>,
    buffers: Vec<Vec<u8>>,
    done: Vec<bool>,
}

impl Receiver {
    fn write(&mut self, buffer: usize, start: u64, end: u64) {
        // A repeated empty message has no bytes to write.
        assert!(!self.done[buffer] || start == end, "written after it was reported");
        self.buffers[buffer][start as usize..end as usize].iter_mut().for_each(|times| *times += 1);
    }

    fn received(&mut self, message: u64, bytes: u64) {
        let Some(finished) = self.reassembly.received(message, bytes) else { return };
        assert_eq!(finished.payload as u64, message);
        let (inside, behind) = self.buffers[finished.payload].split_at(finished.total as usize);
        assert!(inside.iter().all(|times| *times == 1), "each byte once");
        assert!(behind.iter().all(|times| *times == 0), "none behind the message");
        self.done[finished.payload] = true;
    }
}

/// One flow, and the bytes on it that are not read.
struct Flow {
    codec: RecvCodec<usize>,
    wire: VecDeque<u8>,
}

impl Flow {
    fn new(has_checksums: bool) -> Self {
        Self { codec: RecvCodec::new(has_checksums), wire: VecDeque::new() }
    }

    /// Reads at most this many bytes at a time. Returns whether the flow can be used any more.
    fn read(&mut self, receiver: &mut Receiver, most: usize) -> bool {
        loop {
            match self.codec.next_step() {
                Ok(RecvStep::Read) if self.wire.is_empty() => return true,
                Ok(RecvStep::Read) => self.read_once(receiver, most),
                Ok(RecvStep::Reserve { chunk, at }) => {
                    let action = receiver.reassembly.reserve(&chunk, at);
                    match action.map(|action| action.map(|buffer| *buffer)) {
                        Ok(ChunkAction::NotPosted) => return true,
                        Ok(action) => {
                            if let ChunkAction::Deliver { payload, end } = action {
                                assert_eq!(payload as u64, chunk.message);
                                assert!(end as usize <= receiver.buffers[payload].len());
                            }
                            self.codec.reserved(action);
                        }
                        Err(_) => return false,
                    }
                }
                Ok(RecvStep::Received(part)) => {
                    if part.staged_at.is_some() {
                        receiver.write(part.buffer, part.start, part.end);
                    }
                    receiver.received(part.message, part.end - part.start);
                }
                Ok(RecvStep::FlowDead(number)) => self.codec.flow_dead_handled(number),
                Ok(
                    RecvStep::ChunkEnd { .. }
                    | RecvStep::Close(_)
                    | RecvStep::Tag(_)
                    | RecvStep::SameTagBelow(_),
                ) => {}
                Err(error) => {
                    assert_eq!(self.codec.next_step(), Err(error));
                    return false;
                }
            }
        }
    }

    fn read_once(&mut self, receiver: &mut Receiver, most: usize) {
        let there = self.wire.len().min(most);
        let mut take = |payload: usize, header: &mut [u8]| {
            let bytes: Vec<u8> = self.wire.drain(..payload.min(there)).collect();
            let next = header.len().min(there - bytes.len());
            header.iter_mut().zip(self.wire.drain(..next)).for_each(|(to, from)| *to = from);
            (bytes.len() + next, bytes)
        };
        let (count, payload) = match self.codec.room() {
            Room::Buffer { buffer, start, end, header } => {
                let (count, payload) = take((end - start) as usize, header);
                receiver.write(buffer, start, start + payload.len() as u64);
                (count, payload)
            }
            Room::Stage { length, start, end, header } => {
                assert!(start < end && end <= length && length as u64 <= MAX_CHUNK_BYTES);
                take(end - start, header)
            }
            Room::Header(header) => take(0, header),
            Room::Discard(length) | Room::DiscardChecked(length) => take(length, &mut []),
        };
        assert!(count > 0);
        self.codec.received(count, &payload);
    }

    /// Ends the flow. What it has not delivered may come on another one.
    fn end(&mut self, receiver: &mut Receiver) {
        self.codec.abandon(|Abandoned { message, start, received, end }| {
            if received > start {
                receiver.received(message, received - start);
            }
            receiver.reassembly.release(message, received, end);
        });
    }
}

/// The receiving side. No byte is written twice or out of its buffer, and no message is released
/// while it is written.
fn receive(steps: &mut Steps<'_>) {
    let has_checksums = steps.next_byte().is_some_and(|choice| choice % 2 == 1);
    let mut receiver = Receiver::default();
    let mut flows: [Flow; FLOWS] = std::array::from_fn(|_| Flow::new(has_checksums));
    while let Some(step) = steps.next_byte() {
        let flow = &mut flows[usize::from(step / 5) % FLOWS];
        match step % 5 {
            0 if receiver.buffers.len() < MESSAGES => {
                let capacity = steps.short() % 1024;
                receiver.reassembly.post(capacity, receiver.buffers.len());
                receiver.buffers.push(vec![0; capacity as usize]);
                receiver.done.push(false);
            }
            1 if flow.wire.len() < MAX_ON_WIRE => {
                let chunk = ChunkHeader {
                    message: steps.next_byte().unwrap_or_default().into(),
                    offset: steps.short(),
                    length: steps.short() as u32,
                    total: steps.short(),
                    ack_wanted: step > 127,
                };
                let payload = vec![0; chunk.length as usize];
                let header = match has_checksums {
                    false => Frame::Chunk(chunk).encode(),
                    // Now and then it is wrong.
                    true => Frame::Chunk(chunk).seal(checksum(0, &payload) ^ u32::from(step > 250)),
                };
                flow.wire.extend(header);
                flow.wire.extend(payload);
            }
            2 if flow.wire.len() < MAX_ON_WIRE => {
                let length = steps.next_byte().unwrap_or_default();
                flow.wire.extend(steps.take(length.into()));
            }
            3 => {
                let most = steps.next_byte().unwrap_or_default().max(1);
                if !flow.read(&mut receiver, most.into()) {
                    flow.end(&mut receiver);
                    *flow = Flow::new(has_checksums);
                }
            }
            _ if step > 127 => {
                flow.end(&mut receiver);
                *flow = Flow::new(has_checksums);
            }
            _ => {
                let acknowledged = receiver.reassembly.ack() as usize;
                assert!(acknowledged <= receiver.buffers.len());
                assert!(receiver.done[..acknowledged].iter().all(|done| *done));
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
