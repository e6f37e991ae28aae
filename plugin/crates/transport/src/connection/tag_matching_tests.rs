//! Test only: messages with tags and groups of buffers, over TCP and RDMA.

use std::collections::{HashMap, VecDeque};

use evenkeel_testkit::TestRng;

use crate::memory::block::Block;
use crate::memory::test_memory::ProtectedMemory;
use crate::test_support::{pair, until};
use crate::{
    ErrorKind, MAX_REQUESTS, MrCache, RecvBuffer, RecvConnection, Request, SendBuffer,
    SendConnection, TaggedBuffer,
};

/// Memory of a message.
pub(crate) trait MessageMemory: Sized {
    fn new(length: usize) -> Self;
    fn bytes(&self) -> &[u8];
    fn bytes_mut(&mut self) -> &mut [u8];
    /// Lends it to a message to send. It is not accessed until [`MessageMemory::take_back`].
    fn give(&mut self, registrar: &MrCache, length: usize) -> SendBuffer;
    /// Lends it to a message to receive.
    fn give_mut(&mut self, registrar: &MrCache, length: usize) -> RecvBuffer;
    /// The message is done.
    fn take_back(&mut self);
}

/// Memory with an `open` function that makes it accessible to the processor or not.
macro_rules! message_memory {
    ($memory:ident, $open:expr) => {
        impl MessageMemory for $memory {
            fn new(length: usize) -> Self {
                Self::new(length)
            }

            fn bytes(&self) -> &[u8] {
                self.bytes()
            }

            fn bytes_mut(&mut self) -> &mut [u8] {
                self.bytes_mut()
            }

            fn give(&mut self, registrar: &MrCache, length: usize) -> SendBuffer {
                self.register_with(registrar);
                $open(self, false);
                self.lend(length)
            }

            fn give_mut(&mut self, registrar: &MrCache, length: usize) -> RecvBuffer {
                self.register_with(registrar);
                $open(self, false);
                self.lend_mut(length)
            }

            fn take_back(&mut self) {
                $open(self, true);
            }
        }
    };
}

message_memory!(Block, |_: &mut Block, _: bool| {});
// Only devices can access it while a message has it.
message_memory!(ProtectedMemory, ProtectedMemory::open);

/// A message whose bytes identify it.
fn message<R: MessageMemory>(tag: i32, number: usize, length: usize) -> R {
    let mut block = R::new(length);
    let mark = tag.cast_unsigned() as usize * 131 + number * 31;
    let bytes = block.bytes_mut().iter_mut().enumerate();
    bytes.for_each(|(at, byte)| *byte = (at * 7 + at / 251 + mark) as u8);
    block
}

/// Buffers that were posted together.
struct Group<R = Block> {
    request: Request,
    blocks: Vec<R>,
}

/// Posts a group of buffers with these tags and lengths, if there is room for it.
fn post<R: MessageMemory>(recv: &RecvConnection, slots: &[(i32, usize)]) -> Option<Group<R>> {
    let mut blocks: Vec<R> = slots.iter().map(|(_, room)| R::new(*room)).collect();
    let tagged = blocks.iter_mut().zip(slots).map(|(block, (tag, room))| TaggedBuffer {
        buffer: block.give_mut(&recv.mr_cache(), *room),
        tag: *tag,
        registration: None,
    });
    let tagged: Vec<_> = tagged.collect();
    let request = recv.recv_group(&tagged).unwrap()?;
    Some(Group { request, blocks })
}

impl<R: MessageMemory> Group<R> {
    /// Waits for exactly these messages: tag, number among those with this tag, length.
    fn expect(mut self, messages: &[(i32, usize, usize)]) {
        until(|| self.request.test().unwrap());
        self.check(messages);
    }

    fn check(&mut self, messages: &[(i32, usize, usize)]) {
        self.blocks.iter_mut().for_each(R::take_back);
        for (index, (tag, number, length)) in messages.iter().enumerate() {
            assert_eq!(self.request.length(index), Some(*length as u64));
            let received = &self.blocks[index].bytes()[..*length];
            let sent: R = message(*tag, *number, *length);
            assert!(received == sent.bytes(), "tag {tag}: message {number}");
            let after = &self.blocks[index].bytes()[*length..];
            assert!(after.iter().all(|byte| *byte == 0), "tag {tag}: bytes after message {number}");
        }
        assert_eq!(self.request.length(messages.len()), None);
    }
}

/// A message in flight, and its memory.
type PendingSend<R = Block> = (Request, R);

fn begin(send: &SendConnection, tag: i32, number: usize, length: usize) -> Option<PendingSend> {
    let (block, buffer) = prepare(send, tag, number, length);
    Some((send.send_tagged(buffer, tag, None).unwrap()?, block))
}

fn prepare<R: MessageMemory>(
    send: &SendConnection,
    tag: i32,
    number: usize,
    length: usize,
) -> (R, SendBuffer) {
    let mut block: R = message(tag, number, length);
    let buffer = block.give(&send.mr_cache(), length);
    (block, buffer)
}

fn finish(sendings: impl IntoIterator<Item = PendingSend>) {
    for (request, _block) in sendings {
        until(|| request.test().unwrap());
    }
}

/// A group is done when all its messages are received, in whatever order they are sent.
pub(crate) fn check_group_waits_for_all_messages((send, recv): (SendConnection, RecvConnection)) {
    for length in [100, 100_000] {
        let group: Group = post(&recv, &[(7, length + 5), (-3, length), (7, length + 9)]).unwrap();
        // Some are not next, and one has no buffer: all are retried, as NCCL does.
        let mut wanted = vec![(-3, 0), (7, 0), (7, 1)];
        let mut sendings = Vec::new();
        until(|| {
            assert!(group.request.test().unwrap().is_none() || wanted.is_empty());
            // Messages with the same tag are sent in order.
            for (tag, number) in wanted.clone() {
                let is_first = !wanted.contains(&(tag, 0)) || number == 0;
                if is_first && let Some(sending) = begin(&send, tag, number, length + number) {
                    sendings.push(sending);
                    wanted.retain(|other| *other != (tag, number));
                }
            }
            wanted.is_empty().then_some(())
        });
        assert!(begin(&send, 5, 0, 1).is_none(), "no buffer with this tag is posted");
        group.expect(&[(7, 0, length), (-3, 0, length), (7, 1, length + 1)]);
        finish(sendings);
    }
}

/// However many messages of one tag are in flight, those of another tag get through.
pub(crate) fn check_unexpected_messages_do_not_block(
    pairs: impl Fn() -> (SendConnection, RecvConnection),
) {
    for (length, other) in [(300_000, 200_000), (50, 200_000), (5000, 10), (70, 30)] {
        let (send, recv) = pairs();
        let early: Vec<_> =
            (0..20).map(|number| begin(&send, 4, number, length).unwrap()).collect();
        for number in 0..3 {
            let group: Group = post(&recv, &[(9, other)]).unwrap();
            let sending = until(|| begin(&send, 9, number, other));
            group.expect(&[(9, number, other)]);
            finish([sending]);
        }
        // One more with the first tag, which waits.
        let mut more = None;
        for number in (0..20).step_by(4) {
            let slots = [(4, length); 4];
            let group: Group = post(&recv, &slots).unwrap();
            let expected: Vec<_> = (number..number + 4).map(|number| (4, number, length)).collect();
            group.expect(&expected);
            more = more.or_else(|| begin(&send, 4, 20, length));
        }
        assert!(more.is_none());
        let group: Group = post(&recv, &[(4, length), (9, other)]).unwrap();
        let sendings = [until(|| begin(&send, 4, 20, length)), until(|| begin(&send, 9, 3, other))];
        group.expect(&[(4, 20, length), (9, 3, other)]);
        finish(early.into_iter().chain(sendings));
    }
}

/// A message that is too long for its buffer fails the whole group, whether it arrives before the
/// buffer or after.
pub(crate) fn check_too_long_message_fails_its_group(
    pairs: impl Fn() -> (SendConnection, RecvConnection),
) {
    for (length, is_early) in [(100_000, false), (60, false), (100_000, true), (60, true)] {
        let (send, recv) = pairs();
        let mut sendings = Vec::new();
        if is_early {
            sendings.push(begin(&send, 2, 0, length).unwrap());
            let first: Group = post(&recv, &[(1, 10)]).unwrap();
            sendings.push(until(|| begin(&send, 1, 0, 10)));
            first.expect(&[(1, 0, 10)]);
        }
        let group: Group = post(&recv, &[(1, length), (2, length - 1)]).unwrap();
        let error = until(|| {
            let tag = if is_early { 1 } else { sendings.len() as i32 + 1 };
            if sendings.len() < 2
                && let Ok(sending) = try_begin(&send, tag, length)
            {
                sendings.extend(sending);
            }
            group.request.test().err()
        });
        assert_eq!(error.kind(), ErrorKind::Truncated, "{error}");
        assert!(error.to_string().contains(&format!("{length} bytes")), "{error}");
    }
}

fn try_begin(
    send: &SendConnection,
    tag: i32,
    length: usize,
) -> Result<Option<PendingSend>, crate::Error> {
    let (block, buffer) = prepare(send, tag, 0, length);
    Ok(send.send_tagged(buffer, tag, None)?.map(|request| (request, block)))
}

/// Random groups and messages with this number of tags. The n-th buffer with a tag must receive the
/// n-th message with it. `fault` is called from time to time.
pub(crate) fn check_random_groups<R: MessageMemory>(
    (send, recv): (SendConnection, RecvConnection),
    seed: u64,
    tags: u64,
    mut fault: impl FnMut(&SendConnection, &RecvConnection, usize),
) {
    const SLOTS: usize = 150;
    let mut rng = TestRng::new(seed);
    let mut to_post: VecDeque<Vec<(i32, usize)>> = VecDeque::new();
    let mut expected: VecDeque<Vec<(i32, usize, usize)>> = VecDeque::new();
    let mut to_send: HashMap<i32, VecDeque<(usize, usize)>> = HashMap::new();
    // The first of those, if it had to wait.
    let mut prepared: HashMap<i32, (R, SendBuffer)> = HashMap::new();
    let (mut slots, mut counts) = (0, HashMap::<i32, usize>::new());
    while slots < SLOTS {
        let (mut group, mut messages) = (Vec::new(), Vec::new());
        for _ in 0..1 + rng.index(8) {
            let tag = rng.below(tags) as i32 * 1000 - 1;
            let length = match rng.below(6) {
                0 => 0,
                1 | 2 => rng.index(300),
                3 => 4090 + rng.index(10),
                4 => rng.index(40_000),
                _ => rng.index(400_000),
            };
            let number = counts.entry(tag).or_default();
            group.push((tag, length + rng.index(2) * rng.index(6000)));
            messages.push((tag, *number, length));
            to_send.entry(tag).or_default().push_back((*number, length));
            *number += 1;
        }
        slots += group.len();
        to_post.push_back(group);
        expected.push_back(messages);
    }
    let (mut groups, mut sendings) =
        (VecDeque::<Group<R>>::new(), VecDeque::<PendingSend<R>>::new());
    let mut done = 0;
    // At times the sender is far ahead, at times the receiver.
    let mut eager = (1, 1);
    // The timeout applies to each step: on a slow machine all of them together take long.
    let mut step = || {
        let mut moved = false;
        if rng.one_in(50) {
            eager = (1 + rng.below(20), 1 + rng.below(20));
        }
        if rng.one_in(eager.0)
            && let Some(group) = to_post.front()
            && let Some(posted) = post(&recv, group)
        {
            groups.push_back(posted);
            to_post.pop_front();
            moved = true;
        }
        let mut ready: Vec<i32> = to_send.keys().copied().collect();
        ready.sort_unstable();
        while rng.one_in(eager.1)
            && !ready.is_empty()
            && let tag = ready.swap_remove(rng.index(ready.len()))
            && let Some(queue) = to_send.get_mut(&tag)
        {
            while let Some((number, length)) = queue.front() {
                let make = || prepare(&send, tag, *number, *length);
                let (block, buffer) = prepared.remove(&tag).unwrap_or_else(make);
                let Some(request) = send.send_tagged(buffer, tag, None).unwrap() else {
                    prepared.insert(tag, (block, buffer));
                    break;
                };
                sendings.push_back((request, block));
                queue.pop_front();
                moved = true;
                if rng.one_in(3) {
                    break;
                }
            }
            if queue.is_empty() {
                to_send.remove(&tag);
            }
        }
        while sendings.front().is_some_and(|(request, _)| request.test().unwrap().is_some()) {
            sendings.pop_front();
            moved = true;
        }
        while groups.front().is_some_and(|group| group.request.test().unwrap().is_some()) {
            let mut group = groups.pop_front().unwrap();
            let messages = expected.pop_front().unwrap();
            group.check(&messages);
            fault(&send, &recv, done);
            done += 1;
            moved = true;
        }
        let over = expected.is_empty() && sendings.is_empty();
        (moved || over).then_some(over)
    };
    while !until(&mut step) {}
}

#[test]
fn tagged_group_waits_for_all_messages() {
    check_group_waits_for_all_messages(pair());
}

#[test]
fn unexpected_messages_do_not_block_other_tags() {
    check_unexpected_messages_do_not_block(pair);
}

#[test]
fn too_long_tagged_message_fails_its_group() {
    check_too_long_message_fails_its_group(pair);
}

#[test]
fn random_tagged_groups_get_their_messages() {
    for seed in 0..12 {
        check_random_groups::<Block>(pair(), seed, 1 + seed % 5 * 2, |_, _, _| {});
    }
}

#[test]
fn dead_flows_lose_no_tagged_message() {
    for seed in 0..4 {
        check_random_groups::<Block>(pair(), 100 + seed, 3, |send, _, done| {
            if done % 8 == 1 {
                send.sender.break_path(done / 8);
            }
        });
    }
}

#[test]
fn tagged_groups_respect_the_request_limit() {
    let (_send, recv) = pair();
    let groups: Vec<Group> =
        (0..MAX_REQUESTS / 8).map(|_| post(&recv, &[(1, 8); 8]).unwrap()).collect();
    assert!(post::<Block>(&recv, &[(1, 8)]).is_none());
    assert!(post::<Block>(&recv, &[(2, 8); 2]).is_none());
    assert!(recv.recv_group(&[]).is_err());
    let buffer = Block::new(1).lend_mut(0);
    assert!(recv.recv_group(&[TaggedBuffer { buffer, tag: 0, registration: None }; 9]).is_err());
    drop(groups);
}
