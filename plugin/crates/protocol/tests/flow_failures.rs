//! Scheduler and reassembly over simulated flows that deliver in any order and fail at any byte.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails there")]

use std::collections::VecDeque;

use evenkeel_protocol::{
    ChunkAction, ChunkHeader, Frame, NextFrame, Reassembly, Schedule, Scheduler,
};
use evenkeel_testkit::TestRng;
use proptest::prelude::*;

const SLOTS: usize = 4;

/// A frame in flight, and how many bytes of its payload have been written.
struct InFlight {
    frame: Frame,
    written: u64,
}

/// A chunk at the head of a flow that the receiver is reading.
struct Reading {
    chunk: ChunkHeader,
    at: u64,
    /// Up to where the bytes are assigned, and whether they are to be delivered.
    assigned: Option<(u64, bool)>,
}

struct Flow {
    number: u32,
    slot: usize,
    /// Whether the sender uses it.
    open: bool,
    /// Whether the receiver reads from it.
    read: bool,
    /// Frames that the sender will write next.
    taken: VecDeque<Frame>,
    to_receiver: VecDeque<InFlight>,
    to_sender: VecDeque<Frame>,
    reading: Option<Reading>,
}

#[derive(Default)]
struct Simulation {
    scheduler: Scheduler<usize>,
    reassembly: Reassembly<usize>,
    /// All flows so far, by number.
    flows: Vec<Flow>,
    /// How often each byte of each message was written into its buffer.
    buffers: Vec<Vec<u8>>,
    received: Vec<bool>,
    sent: Vec<bool>,
}

impl Simulation {
    fn open(&mut self, slot: usize) {
        self.scheduler.flow_opened(slot);
        self.flows.push(Flow {
            number: self.flows.len() as u32,
            slot,
            open: true,
            read: true,
            taken: VecDeque::new(),
            to_receiver: VecDeque::new(),
            to_sender: VecDeque::new(),
            reading: None,
        });
    }

    fn in_slot(&self, slot: usize) -> Option<usize> {
        self.flows.iter().position(|flow| flow.open && flow.slot == slot)
    }

    /// The sender continues its current frame, or takes a new one.
    fn write(&mut self, index: usize, rng: &mut TestRng) {
        let flow = &mut self.flows[index];
        if let Some(InFlight { frame: Frame::Chunk(chunk), written }) = flow.to_receiver.back_mut()
            && *written < u64::from(chunk.length)
        {
            let left = u64::from(chunk.length) - *written;
            *written += 1 + rng.below(left);
            if *written == u64::from(chunk.length) {
                self.scheduler.chunk_written(flow.slot);
                self.collect();
            }
            return;
        }
        while flow.taken.is_empty() || rng.one_in(4) && flow.taken.len() < 5 {
            flow.taken.push_back(match self.scheduler.next(flow.slot, rng.below(900)) {
                Some(NextFrame::Chunk(chunk, message)) => {
                    assert_eq!(*message as u64, chunk.message);
                    assert!(!self.sent[*message], "a reported message is touched");
                    Frame::Chunk(chunk)
                }
                Some(NextFrame::FlowDead(number)) => Frame::FlowDead(number),
                None => break,
            });
        }
        let Some(frame) = flow.taken.pop_front() else { return };
        let empty = matches!(frame, Frame::Chunk(ChunkHeader { length: 0, .. }));
        flow.to_receiver.push_back(InFlight { frame, written: 0 });
        if empty {
            self.scheduler.chunk_written(flow.slot);
        }
    }

    /// The sender takes the messages that are sent.
    fn collect(&mut self) {
        while let Some(sent) = self.scheduler.pop_sent() {
            assert!(self.received[sent.payload], "reported before it was received");
            for flow in self.flows.iter().filter(|flow| flow.open) {
                if let Some(InFlight { frame: Frame::Chunk(chunk), written }) =
                    flow.to_receiver.back()
                {
                    let writing = *written < u64::from(chunk.length);
                    assert!(!writing || chunk.message != sent.payload as u64, "still written");
                }
                let will = |frame: &Frame| matches!(frame, Frame::Chunk(chunk) if chunk.message == sent.payload as u64);
                assert!(!flow.taken.iter().any(will), "still to be written");
            }
            self.sent[sent.payload] = true;
        }
    }

    fn read_ack(&mut self, index: usize) {
        if let Some(Frame::Ack(below, _)) = self.flows[index].to_sender.pop_front() {
            self.scheduler.acked(below).unwrap();
            self.collect();
        }
    }

    /// The flow fails: some of what is in flight still arrives.
    fn fail(&mut self, index: usize, rng: &mut TestRng) {
        let flow = &mut self.flows[index];
        flow.open = false;
        flow.taken.clear();
        self.scheduler.flow_failed(flow.slot, flow.number);
        // Bytes that were read have arrived.
        let read = flow.reading.as_ref().map(|reading| reading.at - reading.chunk.offset);
        let keep = usize::from(read.is_some());
        let kept = keep + rng.below(1 + (flow.to_receiver.len() - keep) as u64) as usize;
        flow.to_receiver.truncate(kept);
        let min_written = if kept == 1 { read.unwrap_or(0) } else { 0 };
        if let Some(last) = flow.to_receiver.back_mut() {
            last.written = min_written + rng.below(1 + last.written - min_written);
        }
        flow.to_sender.clear();
        self.collect();
    }

    /// The receiver stops reading from the flow.
    fn stop_reading(&mut self, index: usize) {
        let flow = &mut self.flows[index];
        flow.read = false;
        if let Some(Reading { chunk, at, assigned: Some((end, true)) }) = flow.reading.take() {
            self.reassembly.release(chunk.message, at, end);
        }
    }

    /// The receiver reads some of what has arrived.
    fn read(&mut self, index: usize, rng: &mut TestRng) {
        let flow = &mut self.flows[index];
        if !flow.read {
            return;
        }
        let Some(front) = flow.to_receiver.front() else {
            if !flow.open {
                self.stop_reading(index);
            }
            return;
        };
        let (frame, written) = (front.frame, front.written);
        let chunk = match frame {
            Frame::Chunk(chunk) => chunk,
            Frame::FlowDead(number) => {
                flow.to_receiver.pop_front();
                self.stop_reading(number as usize);
                let ack = Frame::Ack(self.reassembly.ack(), 0);
                self.answer(index, ack);
                return;
            }
            other => panic!("{other:?} to the receiver"),
        };
        let reading =
            flow.reading.get_or_insert(Reading { chunk, at: chunk.offset, assigned: None });
        let (end, deliver) = match reading.assigned {
            Some(assigned) => assigned,
            None => match self.reassembly.reserve(&chunk, reading.at).unwrap() {
                ChunkAction::NotPosted => return,
                ChunkAction::Deliver { payload, end } => {
                    assert_eq!(payload as u64, chunk.message);
                    (end, true)
                }
                ChunkAction::Discard { end } => (end, false),
            },
        };
        let have = (chunk.offset + written).min(end);
        let until = reading.at + rng.below(1 + have - reading.at);
        let (from, at) = (reading.at, if rng.one_in(3) { have } else { until });
        reading.at = at;
        reading.assigned = (at < end).then_some((end, deliver));
        let over = at == chunk.end();
        let dead = !flow.open && at == chunk.offset + written && !over;
        if over {
            flow.reading = None;
            flow.to_receiver.pop_front();
        }
        if deliver {
            let message = chunk.message as usize;
            assert!(!self.received[message] || from == at, "written after it was reported");
            self.buffers[message][from as usize..at as usize]
                .iter_mut()
                .for_each(|byte| *byte += 1);
            if (at > from || chunk.length == 0)
                && let Some(done) = self.reassembly.received(chunk.message, at - from)
            {
                assert_eq!((done.payload, done.total), (message, chunk.total));
                assert!(self.buffers[message].iter().all(|times| *times == 1));
                assert!(!std::mem::replace(&mut self.received[message], true));
            }
        }
        if dead {
            self.stop_reading(index);
        }
        if let Some(below) = self.reassembly.ack_due() {
            self.answer(index, Frame::Ack(below, 0));
        }
    }

    fn answer(&mut self, index: usize, frame: Frame) {
        // Frames on a dead flow are lost.
        if self.flows[index].open {
            self.flows[index].to_sender.push_back(frame);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    /// Whatever flows fail, each byte is written once, no message is touched after it was reported, and
    /// all messages complete as long as new flows can be opened.
    #[test]
    fn flow_failures_lose_and_repeat_no_byte(
        totals in proptest::collection::vec((0u64..3000, any::<bool>()), 1..40),
        seed: u64,
        failures in 0u64..30,
        window in 1usize..6,
        is_static: bool,
    ) {
        let mut rng = TestRng::new(seed);
        let mut simulation = Simulation {
            buffers: totals.iter().map(|(total, _)| vec![0; *total as usize]).collect(),
            received: vec![false; totals.len()],
            sent: vec![false; totals.len()],
            scheduler: Scheduler::new(if is_static { Schedule::Static { min_share: 256 } } else { Schedule::Pull }),
            ..Simulation::default()
        };
        (0..SLOTS).for_each(|slot| simulation.open(slot));
        let (mut pushed, mut posted, mut failures) = (0, 0, failures);
        // A message without a waiting sender may stay unacknowledged.
        let waited_for = totals.iter().rposition(|(_, waits)| *waits).map_or(0, |last| last + 1);
        let mut steps = 0;
        while !(simulation.received.iter().all(|done| *done) && simulation.sent[..waited_for].iter().all(|done| *done)) {
            steps += 1;
            prop_assert!(steps < 1_000_000, "no progress");
            if simulation.scheduler.must_retransmit() && rng.one_in(100) {
                // No flow may take it, so a new one is opened.
                let free = (SLOTS..).find(|slot| simulation.in_slot(*slot).is_none());
                simulation.open(free.unwrap());
            }
            let slots = simulation.flows.iter().map(|flow| flow.slot + 1).max().unwrap_or(SLOTS);
            let slot = rng.below(slots as u64) as usize;
            if pushed < totals.len() && rng.one_in(4) {
                let (total, waits) = totals[pushed];
                simulation.scheduler.push(total, waits, pushed);
                pushed += 1;
            }
            // Buffers are posted as others complete.
            let done = simulation.received.iter().take_while(|done| **done).count();
            if posted < totals.len() && posted < done + window && rng.one_in(4) {
                simulation.reassembly.post(totals[posted].0 + rng.below(5), posted);
                posted += 1;
            }
            match simulation.in_slot(slot) {
                None if slot < SLOTS && rng.one_in(3) => simulation.open(slot),
                None => {}
                Some(index) if failures > 0 && rng.one_in(50) => {
                    failures -= 1;
                    simulation.fail(index, &mut rng);
                }
                Some(index) => {
                    simulation.write(index, &mut rng);
                    if rng.one_in(2) {
                        simulation.read_ack(index);
                    }
                }
            }
            let index = rng.below(simulation.flows.len() as u64) as usize;
            simulation.read(index, &mut rng);
        }
    }
}
