//! A receiver and a scheduler over simulated flows, in virtual time. Flows deliver in any order and fail at any byte. A read
//! begins in one step and ends in another, so that others happen in between.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails there")]

use std::collections::VecDeque;
use std::time::Duration;

use evenkeel_protocol::{
    AdvertisedTags, ChunkAction, ChunkHeader, FlowEnd, FlowId, Frame, NextFrame, Part,
    PostedBuffer, Receiver, RecvCodec, RecvEvent, RecvFailure, RecvStep, RecvTimeouts, Reserve,
    Room, Schedule, Scheduler, TagGate, UnexpectedDelivery, checksum,
};
use evenkeel_testkit::TestRng;
use proptest::prelude::*;

const SLOTS: usize = 4;
const TIMEOUTS: RecvTimeouts =
    RecvTimeouts { connect: Duration::from_secs(30), recovery: Duration::from_secs(60) };

/// A message that is sent.
#[derive(Clone, Copy, Debug)]
struct Message {
    tag: i32,
    total: u64,
    /// Its sender waits for the acknowledgement.
    is_waited_for: bool,
}

/// Memory that a message is received into: that of a request, or of an unexpected message.
struct Buffer {
    bytes: Vec<u8>,
    /// How often each byte was written.
    writes: Vec<u8>,
    /// Nothing may be written any more.
    has_ended: bool,
}

/// A flow, and both of its users.
struct Flow {
    number: u32,
    /// Its slot in the scheduler, while the sender uses it.
    slot: Option<usize>,
    is_tag_sent: bool,
    is_same_tag_sent: bool,
    /// Frames that the sender will write next.
    taken: VecDeque<Frame>,
    /// The chunk that is being written, and how many of its bytes are.
    writing: Option<(ChunkHeader, u64)>,
    to_receiver: VecDeque<u8>,
    to_sender: VecDeque<Frame>,
    /// How it ends behind the last bytes.
    end: Option<FlowEnd>,
    reader: Option<Reader>,
    id: FlowId,
}

/// The receiver's user of a flow.
struct Reader {
    codec: RecvCodec<usize>,
    stage: Vec<u8>,
    /// A read has begun, and its bytes go there.
    place: Option<Place>,
    /// There is no buffer: it is read again when the receiver says so.
    is_waiting: bool,
    has_replies: bool,
    is_ack_due: bool,
}

/// Where bytes go: so many, and the header behind them.
#[derive(Clone, Copy)]
enum Place {
    Buffer { buffer: usize, start: usize, length: usize },
    Stage { start: usize, length: usize, whole: usize },
    Discard { length: usize },
    Header,
}

struct Simulation {
    rng: TestRng,
    now: Duration,
    has_checksums: bool,
    messages: Vec<Message>,
    scheduler: Scheduler<usize>,
    gate: TagGate,
    advertised: AdvertisedTags,
    /// Messages by their numbers in the connection.
    pushed: Vec<usize>,
    /// Messages that are reported to the sender's owner.
    sent: Vec<bool>,
    engine: Receiver<usize, usize, usize>,
    /// Buffers of requests are first, and each request has the number of its message.
    buffers: Vec<Buffer>,
    is_posted: Vec<bool>,
    received: Vec<bool>,
    /// All flows so far, by number.
    flows: Vec<Flow>,
    is_delivery_due: bool,
    copying: Option<UnexpectedDelivery<usize, usize>>,
    failure: Option<RecvFailure>,
}

/// The byte of a message at this place.
fn byte_of(message: usize, at: u64) -> u8 {
    (message as u64 * 31 + at * 7 + at / 251 + 1) as u8
}

impl Simulation {
    fn new(messages: Vec<Message>, seed: u64, schedule: Schedule, has_checksums: bool) -> Self {
        let count = messages.len();
        let mut simulation = Self {
            rng: TestRng::new(seed),
            now: Duration::from_secs(seed % 100),
            has_checksums,
            scheduler: Scheduler::new(schedule),
            gate: TagGate::default(),
            advertised: AdvertisedTags::default(),
            pushed: Vec::new(),
            sent: vec![false; count],
            engine: Receiver::new(Duration::ZERO, TIMEOUTS),
            buffers: Vec::new(),
            is_posted: vec![false; count],
            received: vec![false; count],
            messages,
            flows: Vec::new(),
            is_delivery_due: false,
            copying: None,
            failure: None,
        };
        for message in 0..count {
            let capacity = simulation.messages[message].total + simulation.rng.below(5);
            simulation.new_buffer(capacity as usize);
        }
        (0..SLOTS).for_each(|slot| simulation.open(slot));
        simulation
    }

    fn new_buffer(&mut self, capacity: usize) -> usize {
        let (bytes, writes) = (vec![0; capacity], vec![0; capacity]);
        self.buffers.push(Buffer { bytes, writes, has_ended: false });
        self.buffers.len() - 1
    }

    /// The sender dials a flow, and the receiver accepts it.
    fn open(&mut self, slot: usize) {
        let number = self.flows.len() as u32;
        let id = self.engine.handle_flow(number, false).unwrap().id;
        let codec = RecvCodec::new(self.has_checksums);
        let (is_waiting, has_replies, is_ack_due) = (false, false, false);
        let (stage, place) = (Vec::new(), None);
        self.scheduler.flow_opened(slot);
        self.flows.push(Flow {
            number,
            slot: Some(slot),
            is_tag_sent: false,
            is_same_tag_sent: false,
            taken: VecDeque::new(),
            writing: None,
            to_receiver: VecDeque::new(),
            to_sender: VecDeque::new(),
            end: None,
            reader: Some(Reader { codec, stage, place, is_waiting, has_replies, is_ack_due }),
            id,
        });
        self.engine.handle_answered(id);
        self.take_events();
    }

    fn in_slot(&self, slot: usize) -> Option<usize> {
        self.flows.iter().position(|flow| flow.slot == Some(slot))
    }

    /// Does what the receiver asks for, or notes that it is to be done.
    fn take_events(&mut self) {
        while let Some(event) = self.engine.poll_event() {
            let reader = |flows: &mut [Flow], id: FlowId, change: fn(&mut Reader)| {
                let flow = flows.iter_mut().find(|flow| flow.id == id).unwrap();
                change(flow.reader.as_mut().unwrap());
            };
            match event {
                RecvEvent::Complete(request, bytes) => self.complete(request, bytes),
                RecvEvent::Reply(id) => {
                    reader(&mut self.flows, id, |reader| reader.has_replies = true);
                }
                RecvEvent::Read(id) => {
                    reader(&mut self.flows, id, |reader| reader.is_waiting = false);
                }
                RecvEvent::Deliver => self.is_delivery_due = true,
                RecvEvent::Failed(failure) => self.failure = Some(failure),
            }
        }
    }

    /// All of a message is in the buffer of its request.
    fn complete(&mut self, message: usize, bytes: u64) {
        let Buffer { bytes: memory, writes, has_ended } = &mut self.buffers[message];
        assert_eq!(bytes, self.messages[message].total);
        assert!(!std::mem::replace(has_ended, true), "complete twice");
        for (at, (byte, writes)) in memory.iter().zip(writes).enumerate() {
            let is_inside = (at as u64) < bytes;
            let expected = if is_inside { byte_of(message, at as u64) } else { 0 };
            assert_eq!((*byte, *writes), (expected, is_inside.into()), "{message} at {at}");
        }
        self.received[message] = true;
    }

    /// The sender continues its current chunk, or takes new frames.
    fn write(&mut self, index: usize) {
        let Some(slot) = self.flows[index].slot else { return };
        if self.flows[index].writing.is_some() {
            return self.write_payload(index, slot);
        }
        if self.flows[index].taken.is_empty() {
            self.take_frames(index, slot);
        }
        let Some(frame) = self.flows[index].taken.pop_front() else { return };
        let mut sum = 0;
        if let Frame::Chunk(chunk) = &frame {
            let message = self.pushed[chunk.message as usize];
            let payload = (chunk.offset..chunk.end()).map(|at| byte_of(message, at));
            sum = checksum(0, &payload.collect::<Vec<_>>());
            self.flows[index].writing = Some((*chunk, 0));
        }
        let header = if self.has_checksums { frame.seal(sum) } else { frame.encode() };
        self.flows[index].to_receiver.extend(header);
        if matches!(frame, Frame::Chunk(ChunkHeader { length: 0, .. })) {
            self.write_payload(index, slot);
        }
    }

    fn write_payload(&mut self, index: usize, slot: usize) {
        let flow = &mut self.flows[index];
        let Some((chunk, written)) = flow.writing.as_mut() else { return };
        let message = self.pushed[chunk.message as usize];
        let left = u64::from(chunk.length) - *written;
        let count = if self.rng.one_in(2) { left } else { self.rng.below(left + 1) };
        let from = chunk.offset + *written;
        flow.to_receiver.extend((from..from + count).map(|at| byte_of(message, at)));
        *written += count;
        if *written == u64::from(chunk.length) {
            flow.writing = None;
            self.scheduler.chunk_written(slot);
            self.collect();
        }
    }

    fn take_frames(&mut self, index: usize, slot: usize) {
        let flow = &mut self.flows[index];
        // Before the flow's first chunk: else the receiver takes the tag for 0.
        if !flow.is_tag_sent
            && let Some(tag) = self.gate.tag()
        {
            flow.is_tag_sent = true;
            flow.taken.extend((tag != 0).then_some(Frame::Tag(tag)));
        }
        if !flow.is_same_tag_sent
            && let Some(below) = self.gate.same_tag_below()
        {
            flow.is_same_tag_sent = true;
            flow.taken.push_back(Frame::SameTagBelow(below));
        }
        while flow.taken.is_empty() || self.rng.one_in(4) && flow.taken.len() < 5 {
            flow.taken.push_back(match self.scheduler.next(slot, self.rng.below(900)) {
                Some(NextFrame::Chunk(chunk, message)) => {
                    assert!(!self.sent[*message], "a reported message is touched");
                    Frame::Chunk(chunk)
                }
                Some(NextFrame::FlowDead(number)) => Frame::FlowDead(number),
                None => break,
            });
        }
    }

    /// The sender takes the messages that are sent.
    fn collect(&mut self) {
        while let Some(sent) = self.scheduler.pop_sent() {
            // An unexpected message may not be in its buffer yet.
            let is_of = |chunk: &ChunkHeader| self.pushed[chunk.message as usize] == sent.payload;
            for flow in self.flows.iter().filter(|flow| flow.slot.is_some()) {
                assert!(!flow.writing.is_some_and(|(chunk, _)| is_of(&chunk)), "still written");
                let will = |frame: &Frame| matches!(frame, Frame::Chunk(chunk) if is_of(chunk));
                assert!(!flow.taken.iter().any(will), "still to be written");
            }
            self.sent[sent.payload] = true;
        }
    }

    /// The sender reads a frame of the receiver.
    fn read_reply(&mut self, index: usize) {
        let next = self.scheduler.next_message();
        match self.flows[index].to_sender.pop_front() {
            Some(Frame::Ack(below, _)) => {
                self.scheduler.acked(below).unwrap();
                self.collect();
            }
            Some(Frame::FlowDead(number)) => self.stop_sending(number as usize),
            Some(Frame::TagsDifferFrom(from)) => {
                self.gate.tags_differ_from(from, next);
                self.flows[index].is_same_tag_sent = false;
            }
            Some(Frame::BufferTag(number, tag)) => {
                assert!(self.advertised.insert(number, tag, next));
            }
            None => {}
            other => panic!("{other:?} to the sender"),
        }
    }

    /// A flow is dead for the sender.
    fn stop_sending(&mut self, index: usize) {
        let flow = &mut self.flows[index];
        if let Some(slot) = flow.slot.take() {
            flow.taken.clear();
            flow.writing = None;
            flow.to_sender.clear();
            self.scheduler.flow_failed(slot, flow.number);
            self.collect();
        }
    }

    /// A flow fails on the way: some of what is in flight still arrives.
    fn fail(&mut self, index: usize) {
        self.stop_sending(index);
        let flow = &mut self.flows[index];
        let kept = self.rng.index(flow.to_receiver.len() + 1);
        flow.to_receiver.truncate(kept);
        let what = "the test".to_owned();
        flow.end = Some(match self.rng.below(3) {
            0 => FlowEnd::Lost(what),
            1 => FlowEnd::Reset(what),
            _ => FlowEnd::Unreachable(what),
        });
    }

    /// The receiver ends a flow. A read that has begun ends first.
    fn end(&mut self, index: usize, why: &FlowEnd) {
        if self.rng.one_in(2) {
            self.end_read(index);
            self.report_received(index);
        }
        let flow = &mut self.flows[index];
        let Some(mut reader) = flow.reader.take() else { return };
        flow.end.get_or_insert_with(|| why.clone());
        let engine = &mut self.engine;
        reader.codec.abandon(|part| engine.handle_abandoned(part));
        engine.handle_ended(self.now, flow.id, why);
        self.take_events();
    }

    /// The receiver reads a flow, up to a read that has begun.
    fn begin_read(&mut self, index: usize) {
        loop {
            let (now, id) = (self.now, self.flows[index].id);
            let Some(reader) = &mut self.flows[index].reader else { return };
            if reader.is_waiting || reader.place.is_some() {
                return;
            }
            match reader.codec.next_step().unwrap() {
                RecvStep::Read => {
                    reader.place = Some(match reader.codec.room() {
                        Room::Header(_) => Place::Header,
                        Room::Buffer { buffer, start, end, .. } => {
                            let (start, length) = (start as usize, (end - start) as usize);
                            Place::Buffer { buffer, start, length }
                        }
                        Room::Stage { length: whole, start, end, .. } => {
                            Place::Stage { start, length: end - start, whole }
                        }
                        Room::Discard(length) | Room::DiscardChecked(length) => {
                            Place::Discard { length }
                        }
                    });
                    return;
                }
                RecvStep::Reserve { chunk, at } => {
                    let mut reserve = self.engine.poll_reserve(now, id, &chunk, at);
                    self.take_events();
                    while let Reserve::Memory(bytes) = reserve {
                        // The process may have too much.
                        let has_memory = !self.rng.one_in(4);
                        let memory = has_memory.then(|| self.new_buffer(bytes as usize));
                        let memory = memory.map(|memory| (memory, memory));
                        reserve = self.engine.handle_memory(now, id, &chunk, at, memory);
                        self.take_events();
                    }
                    let Some(reader) = &mut self.flows[index].reader else { return };
                    match reserve {
                        Reserve::Chunk(ChunkAction::NotPosted) => reader.is_waiting = true,
                        Reserve::Chunk(action) => reader.codec.reserved(action),
                        Reserve::Memory(_) | Reserve::Stop => return,
                    }
                }
                RecvStep::Received(part) => self.received(index, &part),
                RecvStep::ChunkEnd { .. } => reader.stage.clear(),
                RecvStep::FlowDead(number) => {
                    self.end(number as usize, &FlowEnd::Reported);
                    self.engine.handle_report(id);
                    self.take_events();
                    let Some(reader) = &mut self.flows[index].reader else { return };
                    reader.codec.flow_dead_handled(number);
                }
                RecvStep::Tag(tag) => {
                    self.engine.handle_tag(tag);
                    self.take_events();
                }
                RecvStep::SameTagBelow(below) => {
                    self.engine.handle_same_tag_below(below);
                    self.take_events();
                }
                RecvStep::Close(below) => panic!("the sender does not close: {below}"),
            }
        }
    }

    /// A part of a message is received.
    fn received(&mut self, index: usize, part: &Part<usize>) {
        let Some(reader) = &mut self.flows[index].reader else { return };
        let length = (part.end - part.start) as usize;
        if let Some(at) = part.staged_at {
            let staged = reader.stage[at..at + length].to_vec();
            self.copy(part.buffer, part.start as usize, &staged);
        }
        let (now, id) = (self.now, self.flows[index].id);
        let received = self.engine.handle_received(now, id, part.message, length as u64);
        self.take_events();
        if let Some(reader) = &mut self.flows[index].reader {
            reader.is_ack_due |= received.is_ack_due;
        }
    }

    /// Reports what a flow has received that ends.
    fn report_received(&mut self, index: usize) {
        while let Some(reader) = &mut self.flows[index].reader {
            match reader.codec.next_step().unwrap() {
                RecvStep::Received(part) => self.received(index, &part),
                RecvStep::ChunkEnd { .. } => reader.stage.clear(),
                _ => return,
            }
        }
    }

    /// Writes bytes to a buffer.
    fn copy(&mut self, buffer: usize, start: usize, bytes: &[u8]) {
        let Buffer { bytes: memory, writes, has_ended } = &mut self.buffers[buffer];
        assert!(!*has_ended || bytes.is_empty(), "written after the request ended");
        memory[start..start + bytes.len()].copy_from_slice(bytes);
        writes[start..start + bytes.len()].iter_mut().for_each(|count| *count += 1);
    }

    /// A read that has begun ends, with some of the bytes that are there.
    fn end_read(&mut self, index: usize) {
        let flow = &mut self.flows[index];
        let Some(reader) = &mut flow.reader else { return };
        let Some(place) = reader.place.take() else { return };
        let (length, next) = match reader.codec.room() {
            Room::Header(header) => (0, header.len()),
            Room::Buffer { start, end, header, .. } => ((end - start) as usize, header.len()),
            Room::Stage { start, end, header, .. } => (end - start, header.len()),
            Room::Discard(length) | Room::DiscardChecked(length) => (length, 0),
        };
        let there = flow.to_receiver.len().min(length + next);
        let count = if self.rng.one_in(2) { there } else { self.rng.index(there + 1) };
        let bytes: Vec<u8> = flow.to_receiver.drain(..count).collect();
        let (payload, header) = bytes.split_at(length.min(count));
        match reader.codec.room() {
            Room::Header(room)
            | Room::Buffer { header: room, .. }
            | Room::Stage { header: room, .. } => room[..header.len()].copy_from_slice(header),
            Room::Discard(_) | Room::DiscardChecked(_) => {}
        }
        if let Place::Stage { start, whole, .. } = place {
            reader.stage.resize(whole, 0);
            reader.stage[start..start + payload.len()].copy_from_slice(payload);
        }
        if count > 0 {
            let payload = if self.has_checksums { payload } else { &[] };
            reader.codec.received(count, payload);
        }
        match place {
            Place::Buffer { buffer, start, length: room } => {
                assert_eq!(room, length, "the place is the flow's until the read ends");
                self.copy(buffer, start, payload);
            }
            Place::Stage { length: room, .. } | Place::Discard { length: room } => {
                assert_eq!(room, length);
            }
            Place::Header => assert_eq!(length, 0),
        }
    }

    /// The receiver uses a flow.
    fn read(&mut self, index: usize) {
        self.begin_read(index);
        if self.rng.one_in(2) {
            return;
        }
        self.end_read(index);
        self.begin_read(index);
        let flow = &mut self.flows[index];
        let Some(reader) = &mut flow.reader else { return };
        if !flow.to_receiver.is_empty() {
            return;
        }
        if std::mem::take(&mut reader.is_ack_due) {
            reader.has_replies = true;
        }
        if let Some(end) = flow.end.clone()
            && !reader.is_waiting
        {
            self.end(index, &end);
        }
    }

    /// The receiver writes to a flow.
    fn reply(&mut self, index: usize) {
        let flow = &mut self.flows[index];
        if let Some(reader) = &mut flow.reader
            && std::mem::take(&mut reader.has_replies)
        {
            while let Some(frame) = self.engine.poll_reply(flow.id, 0) {
                // Frames on a dead flow are lost.
                if flow.slot.is_some() {
                    flow.to_sender.push_back(frame);
                }
            }
        }
    }

    /// The sender's owner sends the next message of some tag.
    fn send(&mut self) {
        let is_sent = |message: &usize| self.pushed.contains(message);
        let unsent: Vec<_> = (0..self.messages.len()).filter(|at| !is_sent(at)).collect();
        if unsent.is_empty() {
            return;
        }
        let Message { tag, .. } = self.messages[*self.rng.choose(&unsent)];
        let first = unsent.into_iter().find(|at| self.messages[*at].tag == tag).unwrap();
        let (next, advertised) = (self.scheduler.next_message(), &self.advertised);
        if self.gate.admits(tag, next, || advertised.tag(next)) {
            let Message { total, is_waited_for, .. } = self.messages[first];
            assert_eq!(self.scheduler.push(total, is_waited_for, first), self.pushed.len() as u64);
            self.pushed.push(first);
        }
    }

    /// The receiver's owner posts buffers, if it has few.
    fn post(&mut self, window: usize) {
        let mut group = Vec::new();
        let open = |simulation: &Self| {
            let posted = simulation.is_posted.iter().zip(&simulation.received);
            posted.filter(|(is_posted, is_received)| **is_posted && !**is_received).count()
        };
        while open(self) < window && (group.is_empty() || self.rng.one_in(3)) {
            let left: Vec<_> = (0..self.messages.len()).filter(|at| !self.is_posted[*at]).collect();
            if left.is_empty() {
                break;
            }
            // Requests of a tag are in order.
            let Message { tag, .. } = self.messages[*self.rng.choose(&left)];
            let first = left.into_iter().find(|at| self.messages[*at].tag == tag).unwrap();
            self.is_posted[first] = true;
            let capacity = self.buffers[first].bytes.len() as u64;
            group.push((tag, PostedBuffer { buffer: first, capacity, request: first }));
        }
        match &group[..] {
            [] => {}
            [(tag, posted)] if self.engine.has_common_tag(*tag) => {
                self.engine.handle_buffer(self.now, posted.clone(), *tag);
            }
            _ => self.engine.handle_tagged_buffers(self.now, group),
        }
        self.take_events();
    }

    /// Copies an unexpected message, in two steps.
    fn deliver(&mut self) {
        if let Some(UnexpectedDelivery { buffer, length, memory, bytes }) = self.copying.take() {
            let whole = &self.buffers[memory];
            assert!(whole.writes.iter().all(|writes| *writes == 1));
            let message = whole.bytes[..length as usize].to_vec();
            self.copy(buffer, 0, &message);
            self.buffers[memory].has_ended = true;
            self.complete(buffer, length);
            self.engine.handle_delivered(bytes);
            self.take_events();
        } else if self.is_delivery_due {
            self.copying = self.engine.poll_delivery();
            self.is_delivery_due = self.copying.is_some();
        }
    }

    /// Anything happens.
    fn step(&mut self, window: usize, failures: &mut u64) {
        if self.rng.one_in(10) {
            self.now += Duration::from_millis(self.rng.below(20));
            if self.engine.next_timeout().is_some_and(|next| next <= self.now) {
                self.engine.handle_timeout(self.now);
                self.take_events();
            }
        }
        if self.scheduler.must_retransmit() && self.rng.one_in(100) {
            // No flow may take it, so a new one is opened.
            let free = (SLOTS..).find(|slot| self.in_slot(*slot).is_none());
            self.open(free.unwrap());
        }
        if self.rng.one_in(4) {
            self.send();
        }
        if self.rng.one_in(4) {
            self.post(window);
        }
        if self.rng.one_in(2) {
            self.deliver();
        }
        let slots = self.flows.iter().filter_map(|flow| flow.slot).max().map_or(0, |last| last + 1);
        let slot = self.rng.index(slots.max(SLOTS));
        match self.in_slot(slot) {
            None if slot < SLOTS && self.rng.one_in(3) => self.open(slot),
            None => {}
            Some(index) if *failures > 0 && self.rng.one_in(50) => {
                *failures -= 1;
                match self.rng.one_in(3) {
                    true => self.end(index, &FlowEnd::Unreachable("the test".to_owned())),
                    false => self.fail(index),
                }
            }
            Some(index) => {
                self.write(index);
                if self.rng.one_in(2) {
                    self.read_reply(index);
                }
                // The sender notices by itself that a flow has ended, if nobody reports it.
                if self.flows[index].reader.is_none() && self.rng.one_in(20) {
                    self.stop_sending(index);
                }
            }
        }
        let readable: Vec<_> =
            (0..self.flows.len()).filter(|index| self.flows[*index].reader.is_some()).collect();
        if !readable.is_empty() {
            let index = *self.rng.choose(&readable);
            self.read(index);
            self.reply(index);
        }
    }
}

fn any_messages() -> impl Strategy<Value = Vec<Message>> {
    let message = (prop_oneof![Just(0), 1u64..3000], any::<bool>(), 0u32..3);
    (proptest::collection::vec(message, 1..40), any::<bool>()).prop_map(|(messages, has_tags)| {
        let message = |(total, is_waited_for, tag): (u64, bool, u32)| Message {
            tag: if has_tags { tag as i32 + 5 } else { 0 },
            total,
            is_waited_for,
        };
        messages.into_iter().map(message).collect()
    })
}

fn schedule(is_static: bool) -> Schedule {
    if is_static { Schedule::Static { min_share: 256 } } else { Schedule::Pull }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    /// Whatever flows fail, each byte is written once, no message is touched after it was reported, and all messages complete
    /// as long as new flows can be opened. No wait of a flow is forgotten.
    #[test]
    fn flow_failures_lose_and_repeat_no_byte(
        messages in any_messages(),
        seed: u64,
        failures in 0u64..30,
        window in 1usize..6,
        is_static: bool,
        has_checksums: bool,
    ) {
        let mut simulation = Simulation::new(messages, seed, schedule(is_static), has_checksums);
        let (mut failures, mut steps) = (failures, 0);
        while !(simulation.received.iter().chain(&simulation.sent).all(|done| *done)) {
            steps += 1;
            prop_assert!(steps < 200_000, "no progress");
            simulation.step(window, &mut failures);
            prop_assert_eq!(&simulation.failure, &None);
        }
        prop_assert_eq!((simulation.engine.requests(), simulation.engine.missing_bytes()), (0, 0));
    }

    /// The sender is gone at any moment, or the owner closes the connection. Requests that are not complete then are not
    /// touched any more, and no wait lasts for ever.
    #[test]
    fn receiver_that_loses_its_sender_or_is_closed_ends_every_wait(
        messages in any_messages(),
        seed: u64,
        steps in 0u32..3000,
        window in 1usize..6,
        has_checksums: bool,
        is_closed: bool,
    ) {
        let mut simulation = Simulation::new(messages, seed, Schedule::Pull, has_checksums);
        (0..steps).for_each(|_| simulation.step(window, &mut 5));
        prop_assert_eq!(&simulation.failure, &None);
        if is_closed {
            simulation.engine.handle_close();
        }
        for index in 0..simulation.flows.len() {
            simulation.fail(index);
            // What has arrived is still read, unless the connection is closed.
            for _ in 0..200 {
                simulation.read(index);
            }
            simulation.end(index, &FlowEnd::Expected);
        }
        while simulation.copying.is_some() || simulation.is_delivery_due {
            simulation.deliver();
        }
        let begin = simulation.now;
        while let Some(next) = simulation.engine.next_timeout() {
            prop_assert!(next <= begin + 3 * TIMEOUTS.recovery, "it waits for ever");
            simulation.now = simulation.now.max(next);
            simulation.engine.handle_timeout(simulation.now);
            simulation.take_events();
        }
        prop_assert_eq!(simulation.failure.is_some(), !is_closed && simulation.engine.requests() > 0);
        prop_assert!(simulation.flows.iter().all(|flow| flow.reader.is_none()));
    }
}
