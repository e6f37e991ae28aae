//! Which message goes to which buffer, where messages and buffers have tags.
//!
//! An engine brings the n-th message to the n-th buffer, and knows nothing of tags. That is right as long as all have the same
//! tag, so then nothing is said of tags but the sender's, once. When a buffer with another tag is posted, the receiver asks
//! how far the sender has gone on: those messages are *plain*. Their bytes go *aside*, into memory of this side's own, so that
//! they stand in no other's way, and from there into the buffers of their tag. From then on the receiver tells of each buffer
//! that it has posted, and with which tag; the sender sends the n-th message when it has one with the n-th buffer's tag.
//!
//! So no message is on its way that has no buffer, and none waits for one that comes later. Messages with the same tag keep
//! their order. A group of buffers is no more than several buffers of one request.

use std::collections::VecDeque;

use crate::connection::request::Target;
use crate::memory::block::Block;
use crate::memory::buffers::RecvBuffer;

/// Most numbers that the buffers a sender hears of are ahead of its own. More than a receiver posts.
const FURTHEST: u64 = 4096;

/// Most plain messages that wait aside for their buffers. More than a sender has on their way; one that goes on all the same
/// waits, so that memory is bounded.
const MAX_UNEXPECTED: usize = 512;

/// What a sender heeds before it sends a message with a tag.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    /// That of its messages so far, or of the plain ones.
    tag: Option<i32>,
    /// The messages below this number are plain, if there are others.
    until: Option<u64>,
}

impl Gate {
    /// Where no message is plain: each waits for a buffer with its tag.
    pub(crate) fn told() -> Self {
        Self { tag: None, until: Some(0) }
    }

    /// Whether a message with this tag can be the next one, whose number is this. `told` gives the tag of that one's buffer,
    /// if the receiver has told of it.
    pub(crate) fn opens(
        &mut self,
        tag: i32,
        next: u64,
        told: impl FnOnce() -> Option<i32>,
    ) -> bool {
        match self.until {
            Some(until) if next >= until => told() == Some(tag),
            _ => *self.tag.get_or_insert(tag) == tag,
        }
    }

    /// The receiver says that tags differ from the buffer of this number on. Up to which number messages are plain, given that
    /// of the next one; it stays as it is.
    pub(crate) fn mix(&mut self, from: u64, next: u64) -> u64 {
        *self.until.get_or_insert_with(|| from.max(next))
    }

    /// The tag that all plain messages have.
    pub(crate) fn tag(&self) -> Option<i32> {
        self.tag
    }

    /// Up to which number messages are plain, if that has been asked.
    pub(crate) fn plain_until(&self) -> Option<u64> {
        self.until
    }
}

/// The tags of buffers that a receiver has told of, in whatever order and however often.
#[derive(Debug, Default)]
pub(crate) struct Told {
    first: u64,
    tags: VecDeque<Option<i32>>,
}

impl Told {
    /// The buffer of this number has this tag. `next` is that of the next message. False if no receiver would say that.
    pub(crate) fn hear(&mut self, number: u64, tag: i32, next: u64) -> bool {
        while self.first < next && self.tags.pop_front().is_some() {
            self.first += 1;
        }
        self.first = self.first.max(next);
        let Some(at) = number.checked_sub(self.first) else { return true };
        if at >= FURTHEST {
            return false;
        }
        let at = at as usize;
        if self.tags.len() <= at {
            self.tags.resize(at + 1, None);
        }
        self.tags[at] = Some(tag);
        true
    }

    /// The tag of the buffer of this number, if it is known.
    pub(crate) fn tag(&self, number: u64) -> Option<i32> {
        *self.tags.get(number.checked_sub(self.first)? as usize)?
    }
}

/// The buffers with tags that an engine has not been given yet.
#[derive(Default)]
pub(crate) struct Order {
    /// The tag of plain messages, once the sender has said it.
    theirs: Option<i32>,
    stage: Stage,
    /// In the order in which they were posted.
    held: VecDeque<(i32, Target)>,
    /// Plain messages that came before their buffers, the oldest first.
    aside: VecDeque<Aside>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    /// All have the same tag.
    #[default]
    Plain,
    /// Tags differ from the buffer of this number on; the sender is asked how far it has gone on.
    Asked(u64),
    /// The messages below this number are plain.
    Mixed(u64),
}

struct Aside {
    number: u64,
    /// Where it is or comes.
    block: Block,
    /// Bytes, once all of it is there.
    length: Option<usize>,
    /// Where it belongs, once that is posted.
    target: Option<Target>,
}

/// What is to be done next.
pub(crate) enum Step {
    /// Give the engine this buffer, which has this tag, for its next message; and tell the sender of it, if that has to know.
    Post(i32, Target, bool),
    /// Tell the sender that tags differ from the engine's next message on ([`Order::asks`]).
    Ask,
    /// Nothing: a request has got a message that was aside.
    Filled,
}

/// A message that does not fit into the buffer posted for it; bytes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TooLong {
    pub(crate) message: u64,
    pub(crate) length: u64,
    pub(crate) capacity: u64,
}

impl Order {
    /// Where no message is plain: the sender is told of each buffer, and no message goes aside.
    pub(crate) fn told() -> Self {
        // Any tag will do for messages that there are none of.
        Self { theirs: Some(0), stage: Stage::Mixed(0), ..Self::default() }
    }

    /// Whether the engine can be given a buffer with this tag at once, and nothing has to be said.
    pub(crate) fn is_plain(&self, tag: i32) -> bool {
        self.stage == Stage::Plain && self.theirs == Some(tag) && self.held.is_empty()
    }

    /// Whether there is nothing to be done before another buffer is posted.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.stage == Stage::Plain && self.held.is_empty()
    }

    /// Whether the sender has to know of buffers.
    pub(crate) fn is_mixed(&self) -> bool {
        matches!(self.stage, Stage::Mixed(_))
    }

    /// The number from which on tags differ, as long as the sender has not answered.
    pub(crate) fn asks(&self) -> Option<u64> {
        match self.stage {
            Stage::Asked(from) => Some(from),
            Stage::Plain | Stage::Mixed(_) => None,
        }
    }

    /// Takes a buffer in. [`Order::step`] says what becomes of it.
    pub(crate) fn hold(&mut self, tag: i32, target: Target) {
        self.held.push_back((tag, target));
    }

    /// Buffers that the engine does not know of, of requests that are not done.
    pub(crate) fn waiting(&self) -> usize {
        self.held.len()
    }

    /// The sender's messages have this tag, as long as they are plain.
    pub(crate) fn hear_tag(&mut self, tag: i32) {
        self.theirs.get_or_insert(tag);
    }

    /// The sender's messages below this number are plain. False if it was not asked.
    pub(crate) fn hear_plain_until(&mut self, until: u64) -> bool {
        if self.asks().is_some() {
            self.stage = Stage::Mixed(until);
        }
        self.is_mixed()
    }

    /// What to do now, until there is nothing; `next` is the number of the engine's next message.
    pub(crate) fn step(&mut self, next: u64) -> Result<Option<Step>, TooLong> {
        while let (Some((tag, _)), Some(theirs)) = (self.held.front(), self.theirs) {
            let is_plain = *tag == theirs;
            match self.stage {
                Stage::Plain if is_plain => {}
                Stage::Plain => {
                    self.stage = Stage::Asked(next);
                    return Ok(Some(Step::Ask));
                }
                Stage::Asked(_) => break,
                Stage::Mixed(until) => {
                    let unclaimed = self.aside.iter().position(|aside| aside.target.is_none());
                    if let Some(at) = unclaimed.filter(|_| is_plain) {
                        self.aside[at].target = self.held.pop_front().map(|(_, target)| target);
                        if self.settle(at)? {
                            return Ok(Some(Step::Filled));
                        }
                        continue;
                    }
                    // Plain messages are on their way that this one must not come before.
                    if next < until {
                        break;
                    }
                }
            }
            let is_mixed = self.is_mixed();
            return Ok(self
                .held
                .pop_front()
                .map(|(tag, target)| Step::Post(tag, target, is_mixed)));
        }
        Ok(None)
    }

    /// Whether a message of this number that has no buffer goes aside now.
    pub(crate) fn takes_aside(&self, number: u64) -> bool {
        let is_plain = match self.stage {
            Stage::Plain => false,
            Stage::Asked(_) => true,
            Stage::Mixed(until) => number < until,
        };
        is_plain && self.aside.len() < MAX_UNEXPECTED
    }

    /// Memory of so many bytes for a message that goes aside, the engine's next one.
    pub(crate) fn set_aside(&mut self, number: u64, bytes: usize) -> RecvBuffer {
        let mut block = Block::new(bytes);
        let buffer = block.lend_mut(bytes);
        self.aside.push_back(Aside { number, block, length: None, target: None });
        buffer
    }

    /// A message that went aside is all there; whether that was what a request waited for.
    pub(crate) fn came_aside(&mut self, number: u64, length: u64) -> Result<bool, TooLong> {
        let Some(at) = self.aside.iter().position(|aside| aside.number == number) else {
            return Ok(false);
        };
        self.aside[at].length = Some(length as usize);
        self.settle(at)
    }

    /// Brings a message to where it belongs, if both are there.
    fn settle(&mut self, at: usize) -> Result<bool, TooLong> {
        let Aside { number, block, length: Some(length), target: Some(target) } = &self.aside[at]
        else {
            return Ok(false);
        };
        let (length, capacity) = (*length, target.buffer.length());
        if length > capacity {
            let (length, capacity) = (length as u64, capacity as u64);
            return Err(TooLong { message: *number, length, capacity });
        }
        target.buffer.part(0, length).copy_from(&block.bytes()[..length]);
        target.complete(length as u64);
        self.aside.remove(at);
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use evenkeel_testkit::TestRng;

    use super::*;
    use crate::connection::request::Operation;

    fn target() -> Target {
        Target::new(RecvBuffer::from_static(&mut []), &Operation::new(), 0)
    }

    #[test]
    fn the_gate_opens_for_the_tag_whose_turn_it_is() {
        let mut gate = Gate::default();
        let none = || None;
        assert!(gate.opens(5, 0, none) && gate.opens(5, 1, none) && !gate.opens(6, 2, none));
        // The receiver has speaks of a later one: up to there nothing changes.
        assert_eq!(gate.mix(4, 2), 4);
        assert_eq!(gate.mix(4, 3), 4, "it has been said");
        assert!(gate.opens(5, 3, none) && !gate.opens(6, 3, || Some(6)));
        assert!(!gate.opens(5, 4, none), "not posted");
        assert!(!gate.opens(5, 4, || Some(6)) && gate.opens(6, 4, || Some(6)));
    }

    #[test]
    fn what_is_told_twice_or_late_or_out_of_order_is_known_once() {
        let mut told = Told::default();
        assert!(told.hear(6, 60, 5) && told.hear(5, 50, 5) && told.hear(5, 50, 5));
        assert_eq!(
            (told.tag(4), told.tag(5), told.tag(6), told.tag(7)),
            (None, Some(50), Some(60), None)
        );
        assert!(told.hear(5, 50, 6) && told.hear(7, 70, 6), "the first of them is sent");
        assert_eq!((told.tag(5), told.tag(6), told.tag(7)), (None, Some(60), Some(70)));
        assert!(told.hear(30, 1, 20) && !told.hear(20 + FURTHEST, 1, 20));
        assert_eq!((told.tag(20), told.tag(30)), (None, Some(1)));
    }

    #[test]
    fn one_tag_is_nobodys_business() {
        let mut order = Order::default();
        order.hold(3, target());
        assert!(order.step(0).unwrap().is_none(), "the sender's tag is not known");
        order.hear_tag(3);
        assert!(matches!(order.step(0), Ok(Some(Step::Post(3, _, false)))));
        assert!(order.is_plain(3) && !order.is_plain(4));
        assert!(!order.hear_plain_until(7), "nobody asked");
    }

    /// Where nothing may be copied, no message is sent before its buffer, whatever its tag, and none goes aside.
    #[test]
    fn where_no_message_is_plain_each_waits_for_its_buffer() {
        let mut gate = Gate::told();
        assert!(!gate.opens(0, 0, || None) && !gate.opens(0, 0, || Some(5)));
        assert!(gate.opens(5, 0, || Some(5)) && gate.opens(-3, 1, || Some(-3)));
        assert_eq!(gate.tag(), None, "there is no tag to be told");
        let mut order = Order::told();
        [4, 0, 4].into_iter().for_each(|tag| order.hold(tag, target()));
        for (number, expected) in [4, 0, 4].into_iter().enumerate() {
            let step = order.step(number as u64).unwrap();
            assert!(matches!(step, Some(Step::Post(tag, _, true)) if tag == expected));
            assert!(!order.takes_aside(number as u64));
        }
        assert!(order.step(3).unwrap().is_none() && !order.is_plain(4));
    }

    #[test]
    fn only_so_many_messages_wait_aside() {
        let mut order = Order::default();
        order.hear_tag(3);
        order.hold(4, target());
        assert!(matches!(order.step(0), Ok(Some(Step::Ask))));
        let mut number = 0;
        while order.takes_aside(number) {
            assert!(number < 10_000, "{number} messages are aside");
            order.set_aside(number, 8);
            number += 1;
        }
        assert_eq!(number, MAX_UNEXPECTED as u64);
    }

    /// Buffers and messages in random orders: each message gets to a buffer of its tag, the n-th to the n-th, and as soon as
    /// the sender has one for each buffer, all have come.
    #[test]
    fn each_message_gets_to_the_buffer_of_its_tag_and_turn() {
        for seed in 0..500 {
            let mut rng = TestRng::new(seed);
            let tags: Vec<i32> = (0..40).map(|_| rng.below(1 + seed % 4) as i32).collect();
            let (mut order, mut gate, mut told) =
                (Order::default(), Gate::default(), Told::default());
            // What the engine would do: its buffers, and messages by number.
            let (mut buffers, mut next) = (BTreeMap::new(), 0);
            let (mut sent, mut taken): (Vec<i32>, usize) = (Vec::new(), 0);
            let mut left = tags.clone();
            let (mut asked, mut answered) = (None, None);
            let mut to_post = tags.iter();
            let mut filled: Vec<(i32, u64)> = Vec::new();
            for _ in 0..10_000 {
                match rng.below(6) {
                    0 => to_post.next().into_iter().for_each(|tag| order.hold(*tag, target())),
                    1 | 2 => {
                        let number = sent.len() as u64;
                        let at = rng.index(left.len());
                        if left
                            .get(at)
                            .is_some_and(|tag| gate.opens(*tag, number, || told.tag(number)))
                        {
                            sent.push(left.swap_remove(at));
                        }
                    }
                    3 => {
                        if let Some(from) = asked {
                            answered = Some(gate.mix(from, sent.len() as u64));
                        }
                    }
                    4 => {
                        if let Some(until) = answered {
                            assert!(order.hear_plain_until(until));
                        }
                    }
                    // The next message comes, to its buffer or aside.
                    _ => {
                        if let Some(tag) = sent.get(taken) {
                            order.hear_tag(sent[0]);
                            let number = taken as u64;
                            if number < next {
                                if let Some(of) = buffers.remove(&number) {
                                    assert_eq!(of, *tag, "seed {seed}");
                                    filled.push((*tag, number));
                                }
                                taken += 1;
                            } else if order.takes_aside(number) {
                                assert_eq!(*tag, sent[0]);
                                order.set_aside(number, 1);
                                assert_eq!(order.came_aside(number, 0), Ok(false));
                                (next, taken) = (next + 1, taken + 1);
                            }
                        }
                    }
                }
                while let Some(step) = order.step(next).unwrap() {
                    match step {
                        Step::Post(tag, _, is_told) => {
                            if is_told {
                                assert!(told.hear(next, tag, sent.len() as u64));
                            }
                            buffers.insert(next, tag);
                            next += 1;
                        }
                        Step::Ask => asked = order.asks(),
                        Step::Filled => filled.push((sent[0], 0)),
                    }
                }
            }
            assert!(left.is_empty() && order.waiting() == 0, "seed {seed}: {left:?}");
            assert_eq!(filled.len(), tags.len(), "seed {seed}");
        }
    }
}
