//! Decisions of a receiver, in virtual time.

use super::*;
use crate::tags::MAX_UNEXPECTED_BYTES;

/// Buffers and requests are numbers, and unexpected messages have no memory.
type Engine = Receiver<u32, u32, ()>;
type Event = RecvEvent<u32>;

const CONNECT: Duration = Duration::from_secs(30);
const RECOVERY: Duration = Duration::from_secs(60);
const RESET: Duration = Duration::from_secs(10);
const CLOSED: Duration = Duration::from_millis(500);

fn seconds(seconds: u64) -> Time {
    Duration::from_secs(seconds)
}

/// A receiver with one flow, which has the number 0.
fn receiver() -> (Engine, FlowId) {
    let mut engine = Engine::new(Time::ZERO, RecvTimeouts { connect: CONNECT, recovery: RECOVERY });
    let flow = engine.handle_flow(0, true).unwrap().id;
    (engine, flow)
}

fn join(engine: &mut Engine, number: u32) -> FlowId {
    let flow = engine.handle_flow(number, false).unwrap().id;
    engine.handle_answered(flow);
    flow
}

fn buffer(capacity: u64, request: u32) -> PostedBuffer<u32, u32> {
    PostedBuffer { buffer: request, capacity, request }
}

fn chunk(message: u64, offset: u64, length: u64, total: u64) -> ChunkHeader {
    ChunkHeader { message, offset, length: length as u32, total, ack_wanted: false }
}

/// A flow brings a chunk. Returns what follows.
fn receive(engine: &mut Engine, now: Time, flow: FlowId, chunk: ChunkHeader) -> Vec<Event> {
    let mut reserve = engine.poll_reserve(now, flow, &chunk, chunk.offset);
    if matches!(reserve, Reserve::Memory(_)) {
        reserve = engine.handle_memory(now, flow, &chunk, chunk.offset, Some(((), 99)));
    }
    if let Reserve::Chunk(ChunkAction::Deliver { end, .. }) = reserve {
        assert_eq!(end, chunk.end());
        engine.handle_received(now, flow, chunk.message, end - chunk.offset);
    }
    events(engine)
}

fn events(engine: &mut Engine) -> Vec<Event> {
    std::iter::from_fn(|| engine.poll_event()).collect()
}

fn replies(engine: &mut Engine, flow: FlowId) -> Vec<Frame> {
    std::iter::from_fn(|| engine.poll_reply(flow, 0)).collect()
}

/// A flow ends. Returns for how long the receiver waits for another one.
fn patience(engine: &mut Engine, now: Time, flow: FlowId, end: &FlowEnd) -> Duration {
    engine.handle_ended(now, flow, end);
    match engine.life.deadline(&engine.situation()) {
        Some(deadline) if engine.is_open() => deadline - now,
        _ => Duration::ZERO,
    }
}

/// Why it fails at this time, but not before.
fn failure_at(engine: &mut Engine, at: Time) -> Option<RecvFailure> {
    engine.handle_timeout(at - Duration::from_nanos(1));
    assert!(engine.is_open(), "it waits until then");
    assert!(engine.next_timeout().is_some_and(|next| next <= at), "nobody would tell it the time");
    engine.handle_timeout(at);
    failure(engine)
}

fn failure(engine: &mut Engine) -> Option<RecvFailure> {
    events(engine).into_iter().find_map(|event| match event {
        RecvEvent::Failed(failure) => Some(failure),
        _ => None,
    })
}

fn reset() -> FlowEnd {
    FlowEnd::Reset("a reset".to_owned())
}

/// What resets all flows may let nothing through for a while, and the sender gives up some attempts before it gets through.
#[test]
fn receiver_waits_for_a_sender_that_does_not_get_through() {
    let now = seconds(100);
    let (mut engine, flow) = receiver();
    engine.handle_buffer(now, buffer(2000, 0), 0);
    assert_eq!(patience(&mut engine, now, flow, &reset()), RESET);
    let flow = join(&mut engine, 4);
    // The sender has given it up before it was accepted.
    assert_eq!(patience(&mut engine, now, flow, &FlowEnd::Expected), RECOVERY);
    let (flow, other) = (join(&mut engine, 5), join(&mut engine, 6));
    engine.handle_ended(now, other, &reset());
    // It was there before another one was reset.
    receive(&mut engine, now, flow, chunk(0, 0, 1024, 2000));
    assert_eq!(patience(&mut engine, now, flow, &FlowEnd::Expected), RECOVERY);
    let flow = join(&mut engine, 7);
    let events = receive(&mut engine, now, flow, chunk(0, 1024, 976, 2000));
    assert_eq!(events[0], RecvEvent::Complete(0, 2000));
    engine.handle_buffer(now, buffer(2000, 1), 0);
    // The sender got through, and may still take flows for alive that were reset here.
    assert_eq!(patience(&mut engine, now, flow, &FlowEnd::Expected), RESET);
    let flow = join(&mut engine, 8);
    let now = now + RESET;
    receive(&mut engine, now, flow, chunk(1, 0, 1024, 2000));
    // Now its process is gone.
    assert_eq!(patience(&mut engine, now, flow, &FlowEnd::Expected), CLOSED);
    let failure = failure_at(&mut engine, now + CLOSED);
    let cause = "a reset".to_owned();
    assert_eq!(failure, Some(RecvFailure::FlowsLost { cause, timeout: CLOSED }));
}

/// The sender may not have got the answers of all flows, and tries to open the connection.
#[test]
fn receiver_waits_as_long_as_its_sender_tries_to_open_the_connection() {
    let posted = || {
        let (mut engine, flow) = receiver();
        engine.handle_buffer(Time::ZERO, buffer(2000, 0), 0);
        (engine, flow)
    };
    let (mut silent, flow) = posted();
    assert_eq!(patience(&mut silent, seconds(1), flow, &reset()), CONNECT - seconds(1));
    // It has given up by now if it has not opened the connection.
    let (mut old, flow) = posted();
    assert_eq!(patience(&mut old, CONNECT, flow, &reset()), RESET);
    let (mut spoken, flow) = posted();
    receive(&mut spoken, seconds(1), flow, chunk(0, 0, 1024, 2000));
    assert_eq!(patience(&mut spoken, seconds(1), flow, &reset()), RESET);
    let (mut unreachable, flow) = posted();
    let end = FlowEnd::Unreachable("no route".to_owned());
    assert_eq!(patience(&mut unreachable, seconds(1), flow, &end), RECOVERY);
    // The sender's process has ended.
    let (mut closed, flow) = posted();
    assert_eq!(patience(&mut closed, seconds(1), flow, &FlowEnd::Expected), CLOSED);
    assert_eq!(failure_at(&mut closed, seconds(1) + CLOSED), Some(RecvFailure::PeerClosed));
}

/// A sender that has closed the connection still delivers, on other flows if it loses some.
#[test]
fn receiver_waits_for_what_a_closing_sender_delivers() {
    let now = seconds(100);
    let (mut engine, flow) = receiver();
    (0..2).for_each(|request| engine.handle_buffer(now, buffer(2000, request), 0));
    engine.handle_peer_close(flow, 1);
    assert_eq!(replies(&mut engine, flow), [Frame::Ack(0, 0)]);
    assert_eq!(patience(&mut engine, now, flow, &reset()), RESET);
    let flow = join(&mut engine, 4);
    let events = receive(&mut engine, now, flow, chunk(0, 0, 2000, 2000));
    assert_eq!(events[..2], [RecvEvent::Complete(0, 2000), RecvEvent::Reply(flow)]);
    assert_eq!(replies(&mut engine, flow), [Frame::Ack(1, 0)], "it may wait for that");
    // Nothing follows.
    engine.handle_ended(now, flow, &reset());
    assert_eq!(failure(&mut engine), Some(RecvFailure::PeerClosed));
}

/// What the only flow brings has no buffer yet, and what is due does not come.
#[test]
fn receiver_whose_flows_wait_for_later_buffers_names_the_message_that_is_due() {
    let (mut engine, flow) = receiver();
    engine.handle_buffer(Time::ZERO, buffer(2000, 0), 0);
    assert_eq!(receive(&mut engine, seconds(1), flow, chunk(1, 0, 8, 8)), []);
    let failure = failure_at(&mut engine, seconds(1) + RECOVERY);
    assert_eq!(failure, Some(RecvFailure::NotDelivered { message: 0, timeout: RECOVERY }));
}

/// The reset of a flow that waits for a buffer is not noticed here, and the sender reports it.
#[test]
fn receiver_waits_for_a_sender_that_has_reported_a_dead_flow() {
    let now = seconds(100);
    let (mut engine, first) = receiver();
    engine.handle_buffer(now, buffer(1, 0), 0);
    receive(&mut engine, now, first, chunk(0, 0, 1, 1));
    let second = join(&mut engine, 4);
    assert_eq!(engine.flow_with_number(0), Some(first));
    engine.handle_ended(now, first, &FlowEnd::Reported);
    assert_eq!(engine.flow_with_number(0), None);
    engine.handle_report(second);
    assert_eq!(replies(&mut engine, second), [Frame::Ack(1, 0)]);
    engine.handle_buffer(now, buffer(2000, 1), 0);
    // The sender has given it up, and dials again.
    assert_eq!(patience(&mut engine, now, second, &FlowEnd::Expected), RESET);
}

#[test]
fn receiver_reports_a_lost_flow_on_all_others() {
    let (mut engine, first) = receiver();
    let (second, third) = (join(&mut engine, 1), engine.handle_flow(2, false).unwrap().id);
    events(&mut engine);
    engine.handle_ended(Time::ZERO, second, &FlowEnd::Lost("closed".to_owned()));
    assert_eq!(events(&mut engine), [first, third].map(RecvEvent::Reply));
    assert_eq!(replies(&mut engine, first), [Frame::FlowDead(1)]);
    assert_eq!(replies(&mut engine, third), [], "its dialer is not answered");
    engine.handle_answered(third);
    assert_eq!(replies(&mut engine, third), [Frame::FlowDead(1)]);
    // Nothing is asked of a flow that is not there, also when another has its slot.
    let other = join(&mut engine, 3);
    assert_eq!((other.slot(), other == second), (second.slot(), false));
    engine.handle_report(other);
    assert_eq!(replies(&mut engine, second), []);
    assert_eq!(replies(&mut engine, other), [Frame::Ack(0, 0)]);
}

#[test]
fn receiver_acknowledges_the_last_messages_when_nothing_follows() {
    let (mut engine, flow) = receiver();
    (0..3).for_each(|request| engine.handle_buffer(Time::ZERO, buffer(10, request), 0));
    let mut now = Time::ZERO;
    for message in 0..3 {
        let events = receive(&mut engine, now, flow, chunk(message, 0, 10, 10));
        assert_eq!(events, [RecvEvent::Complete(message as u32, 10)]);
        now += IDLE_ACK_DELAY / 2;
    }
    let next = engine.next_timeout().unwrap();
    assert_eq!(next, IDLE_ACK_DELAY);
    engine.handle_timeout(next);
    assert_eq!(events(&mut engine), [], "others have followed");
    let next = engine.next_timeout().unwrap();
    engine.handle_timeout(next);
    assert_eq!(events(&mut engine), [RecvEvent::Reply(flow)]);
    assert_eq!(replies(&mut engine, flow), [Frame::Ack(3, 0)]);
    engine.handle_timeout(next + IDLE_ACK_DELAY);
    assert_eq!((events(&mut engine), engine.next_timeout()), (vec![], None));
}

#[test]
fn receiver_acknowledges_once_what_a_sender_waits_for() {
    let (mut engine, flow) = receiver();
    let other = join(&mut engine, 1);
    events(&mut engine);
    engine.handle_buffer(Time::ZERO, buffer(10, 0), 0);
    let header = ChunkHeader { ack_wanted: true, ..chunk(0, 0, 10, 10) };
    engine.poll_reserve(Time::ZERO, flow, &header, 0);
    let received = engine.handle_received(Time::ZERO, flow, 0, 10);
    assert_eq!(received, Received { completed: Some(10), is_ack_due: true });
    assert_eq!(events(&mut engine), [RecvEvent::Complete(0, 10)], "there may be more to read");
    assert_eq!(replies(&mut engine, flow), [Frame::Ack(1, 0)]);
    assert_eq!(replies(&mut engine, other), []);
}

/// An unexpected message may be received while its sender waits, and the next one has no memory.
#[test]
fn unexpected_messages_beyond_the_limit_wait() {
    let now = Time::ZERO;
    let (mut engine, flow) = receiver();
    let other = join(&mut engine, 1);
    events(&mut engine);
    engine.handle_tagged_buffers(now, [(5, buffer(8, 5))]);
    let length = MAX_UNEXPECTED_BYTES;
    let events = receive(&mut engine, now, flow, chunk(0, 0, length, length));
    assert_eq!(events, [flow, other].map(RecvEvent::Reply));
    assert_eq!(replies(&mut engine, flow), [Frame::TagsDifferFrom(0), Frame::Ack(1, 0)]);
    assert_eq!(replies(&mut engine, other), [Frame::TagsDifferFrom(0)]);
    engine.handle_same_tag_below(2);
    assert_eq!(receive(&mut engine, now, other, chunk(1, 0, 1000, 1000)), []);
    // It is retried from time to time, and waits again.
    let next = engine.next_timeout().unwrap();
    engine.handle_timeout(next);
    assert_eq!(self::events(&mut engine), [RecvEvent::Read(other)]);
    assert_eq!(receive(&mut engine, next, other, chunk(1, 0, 1000, 1000)), []);
    assert!(engine.next_timeout().is_some());
    let buffers = [(0, buffer(length, 1)), (0, buffer(1000, 2))];
    engine.handle_tagged_buffers(next, buffers);
    assert_eq!(self::events(&mut engine), [RecvEvent::Deliver]);
    let first = engine.poll_delivery().unwrap();
    assert_eq!((first.buffer, first.length, engine.requests()), (1, length, 3));
    engine.handle_delivered(first.bytes);
    assert_eq!((self::events(&mut engine), engine.requests()), (vec![RecvEvent::Read(other)], 2));
    // All messages with the common tag are there, and the other buffer is advertised.
    let events = receive(&mut engine, next, other, chunk(1, 0, 1000, 1000));
    assert_eq!(events, [RecvEvent::Reply(flow), RecvEvent::Deliver]);
    assert_eq!(replies(&mut engine, flow), [Frame::BufferTag(2, 5)]);
    assert_eq!(engine.poll_delivery().unwrap().buffer, 2);
}

/// Other connections have the memory. None of this one's flows notices when they give it back.
#[test]
fn unexpected_message_without_memory_is_retried_while_another_flow_is_idle() {
    let (mut engine, flow) = receiver();
    join(&mut engine, 1);
    events(&mut engine);
    engine.handle_tagged_buffers(Time::ZERO, [(5, buffer(8, 5))]);
    let header = chunk(0, 0, 10, 10);
    assert_eq!(engine.poll_reserve(Time::ZERO, flow, &header, 0), Reserve::Memory(10));
    let waits = Reserve::Chunk(ChunkAction::NotPosted);
    assert_eq!(engine.handle_memory(Time::ZERO, flow, &header, 0, None), waits);
    events(&mut engine);
    let next = engine.next_timeout().expect("a time");
    engine.handle_timeout(next);
    assert_eq!(events(&mut engine), [RecvEvent::Read(flow)]);
    assert_eq!(engine.poll_reserve(next, flow, &header, 0), Reserve::Memory(10));
}

#[test]
fn receiver_takes_nothing_more_when_it_has_failed_or_is_closed() {
    let ends: [fn(&mut Engine); 3] = [
        |engine| {
            engine.handle_same_tag_below(3);
            assert_eq!(events(engine), [RecvEvent::Failed(RecvFailure::NotAsked)]);
            engine.handle_failure();
        },
        Engine::handle_failure,
        |engine| {
            assert!(engine.handle_close() && !engine.handle_close());
            engine.close_flows();
        },
    ];
    for end in ends {
        let (mut engine, flow) = receiver();
        (0..2).for_each(|request| engine.handle_buffer(Time::ZERO, buffer(10, request), 0));
        receive(&mut engine, Time::ZERO, flow, chunk(0, 0, 10, 10));
        let second = chunk(1, 0, 10, 10);
        engine.poll_reserve(Time::ZERO, flow, &second, 0);
        end(&mut engine);
        // What was reserved before is received.
        assert_eq!(engine.handle_received(Time::ZERO, flow, 1, 10).completed, Some(10));
        assert_eq!(events(&mut engine)[0], RecvEvent::Complete(1, 10));
        assert_eq!(replies(&mut engine, flow), [Frame::Ack(2, 0), Frame::Close(2)]);
        engine.handle_buffer(Time::ZERO, buffer(10, 2), 0);
        assert_eq!(engine.poll_reserve(Time::ZERO, flow, &chunk(2, 0, 10, 10), 0), Reserve::Stop);
        assert_eq!(engine.handle_flow(9, true), Err(Refusal::Gone));
        engine.handle_ended(Time::ZERO, flow, &reset());
        engine.handle_timeout(seconds(1000));
        assert_eq!((engine.next_timeout(), failure(&mut engine)), (None, None));
    }
}

#[test]
fn receiver_copies_nothing_more_when_it_is_quiesced() {
    let (mut engine, flow) = receiver();
    engine.handle_tagged_buffers(Time::ZERO, [(5, buffer(8, 5))]);
    receive(&mut engine, Time::ZERO, flow, chunk(0, 0, 10, 10));
    engine.handle_tagged_buffers(Time::ZERO, [(0, buffer(10, 0))]);
    assert_eq!(events(&mut engine), [RecvEvent::Deliver]);
    engine.handle_quiesced();
    assert_eq!(engine.poll_delivery(), None);
}

#[test]
fn receiver_refuses_flows_that_it_has_or_has_no_room_for() {
    let (mut engine, _) = receiver();
    assert_eq!(engine.handle_flow(0, false), Err(Refusal::Inconsistent));
    for number in 1..MAX_SLOTS as u32 {
        join(&mut engine, number);
    }
    assert_eq!(engine.handle_flow(1000, false), Err(Refusal::Busy));
}

#[test]
fn receiver_accounts_for_its_waits() {
    let (mut engine, flow) = receiver();
    let waits = |outstanding, unposted, arriving| RecvWaits { outstanding, unposted, arriving };
    assert_eq!(engine.waits(), waits(false, false, false));
    receive(&mut engine, Time::ZERO, flow, chunk(0, 0, 10, 20));
    assert_eq!(engine.waits(), waits(false, true, false));
    engine.handle_buffer(Time::ZERO, buffer(20, 0), 0);
    assert_eq!(events(&mut engine), [RecvEvent::Read(flow)]);
    assert_eq!(engine.waits(), waits(true, false, false));
    receive(&mut engine, Time::ZERO, flow, chunk(0, 0, 10, 20));
    assert_eq!(engine.waits(), waits(true, false, true));
    receive(&mut engine, Time::ZERO, flow, chunk(0, 10, 10, 20));
    assert_eq!(engine.waits(), waits(false, false, false));
}
