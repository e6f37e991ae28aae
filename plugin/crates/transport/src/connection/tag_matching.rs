//! Matches messages with tags to buffers with tags.
//!
//! The transport delivers the n-th message into the n-th buffer and ignores tags. That is right as long as all tags are the
//! same, so at first the sender sends its tag only once: the *common tag*.
//!
//! When the receiver posts a buffer with another tag, it asks how many messages the sender has started. Those messages have
//! the common tag. If their buffers are not posted yet they go to the *unexpected-message queue*, in memory of the
//! receiver, and do not block messages with other tags. Later they are copied into the buffers with their tag. From then on
//! the receiver advertises each posted buffer with its tag. The sender sends the n-th message when it has one with the tag
//! of the n-th buffer.
//!
//! So no message is sent before its buffer is posted, and none waits for a later buffer. Messages with the same tag keep
//! their order. The buffers of a group are separate buffers of one request.

use std::collections::VecDeque;

use crate::connection::request::Target;
use crate::connection::unexpected::{MAX_CONNECTION_BYTES, UnexpectedMemory};
use crate::error::TooLong;
use crate::memory::buffers::RecvBuffer;

/// Maximum distance between the sender's next message and an advertised buffer. Receivers post fewer.
const MAX_AHEAD: u64 = 4096;

/// Maximum length of the unexpected-message queue. Senders have fewer messages in flight. If one sends more, they wait, so
/// that memory is bounded.
const MAX_UNEXPECTED: usize = 512;

/// Decides when a sender may send a message with a tag.
#[derive(Debug, Default)]
pub(crate) struct TagGate {
    /// The common tag.
    tag: Option<i32>,
    /// Messages below this number have the common tag. `None` while all have it.
    below: Option<u64>,
}

impl TagGate {
    /// For connections without a common tag: each message waits for a buffer with its tag.
    pub(crate) fn advertised_only() -> Self {
        Self { tag: None, below: Some(0) }
    }

    /// Whether the next message, with this number, may have this tag. `advertised` gives the tag of its buffer, if the
    /// receiver has advertised it.
    pub(crate) fn admits(
        &mut self,
        tag: i32,
        next: u64,
        advertised: impl FnOnce() -> Option<i32>,
    ) -> bool {
        match self.below {
            Some(below) if next >= below => advertised() == Some(tag),
            _ => *self.tag.get_or_insert(tag) == tag,
        }
    }

    /// The receiver reports that tags differ from this buffer on. Returns the number of the first message that need not
    /// have the common tag, given that of the next one. It never changes.
    pub(crate) fn tags_differ_from(&mut self, from: u64, next: u64) -> u64 {
        *self.below.get_or_insert_with(|| from.max(next))
    }

    /// The common tag.
    pub(crate) fn tag(&self) -> Option<i32> {
        self.tag
    }

    /// The number below which messages have the common tag, if the receiver has asked.
    pub(crate) fn same_tag_below(&self) -> Option<u64> {
        self.below
    }
}

/// The tags of advertised buffers, in any order and with repetitions.
#[derive(Debug, Default)]
pub(crate) struct AdvertisedTags {
    first: u64,
    tags: VecDeque<Option<i32>>,
}

impl AdvertisedTags {
    /// Notes the tag of a buffer. `next` is the number of the next message. False if no valid receiver would advertise it.
    pub(crate) fn insert(&mut self, number: u64, tag: i32, next: u64) -> bool {
        while self.first < next && self.tags.pop_front().is_some() {
            self.first += 1;
        }
        self.first = self.first.max(next);
        let Some(at) = number.checked_sub(self.first) else { return true };
        if at >= MAX_AHEAD {
            return false;
        }
        let at = at as usize;
        if self.tags.len() <= at {
            self.tags.resize(at + 1, None);
        }
        self.tags[at] = Some(tag);
        true
    }

    /// The tag of this buffer, if it is known.
    pub(crate) fn tag(&self, number: u64) -> Option<i32> {
        *self.tags.get(number.checked_sub(self.first)? as usize)?
    }
}

/// The buffers with tags that the transport has not been given yet.
#[derive(Default)]
pub(crate) struct TagMatcher {
    /// The common tag, once the sender has sent it.
    common_tag: Option<i32>,
    mode: TagMode,
    /// In the order in which they were posted.
    posted: VecDeque<(i32, Target)>,
    /// The unexpected-message queue: messages that arrived before their buffers, oldest first.
    unexpected: VecDeque<Unexpected>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum TagMode {
    /// All tags are the same.
    #[default]
    Same,
    /// Tags differ from this buffer on. The sender has been asked for its next message.
    Asked(u64),
    /// Messages below this number have the common tag.
    Different(u64),
}

struct Unexpected {
    number: u64,
    memory: UnexpectedMemory,
    /// Length in bytes, once it is complete.
    length: Option<usize>,
    /// Its buffer, once that is posted.
    target: Option<Target>,
}

/// What to do next.
pub(crate) enum MatchStep {
    /// Give the transport this buffer for its next message, with this tag. Advertise it if the flag is set.
    Post(i32, Target, bool),
    /// Report to the sender that tags differ from the transport's next message on ([`TagMatcher::asked_from`]).
    AskSender,
    /// Nothing. An unexpected message was delivered to its request.
    Delivered,
}

impl TagMatcher {
    /// For connections without a common tag: each buffer is advertised, and no message is unexpected.
    pub(crate) fn advertise_all() -> Self {
        // No message has the common tag, so its value does not matter.
        Self { common_tag: Some(0), mode: TagMode::Different(0), ..Self::default() }
    }

    /// Whether a buffer with this tag can go to the transport at once, without a frame to the sender.
    pub(crate) fn has_common_tag(&self, tag: i32) -> bool {
        self.mode == TagMode::Same && self.common_tag == Some(tag) && self.posted.is_empty()
    }

    /// Whether there is nothing to do before another buffer is posted.
    pub(crate) fn is_idle(&self) -> bool {
        self.mode == TagMode::Same && self.posted.is_empty()
    }

    /// Whether buffers are advertised to the sender.
    pub(crate) fn advertises(&self) -> bool {
        matches!(self.mode, TagMode::Different(_))
    }

    /// The number from which tags differ, while the sender has not answered.
    pub(crate) fn asked_from(&self) -> Option<u64> {
        match self.mode {
            TagMode::Asked(from) => Some(from),
            TagMode::Same | TagMode::Different(_) => None,
        }
    }

    /// Adds a buffer. [`TagMatcher::next_step`] says what to do with it.
    pub(crate) fn post(&mut self, tag: i32, target: Target) {
        self.posted.push_back((tag, target));
    }

    /// The buffers of unfinished requests that the transport does not have.
    pub(crate) fn targets_mut(&mut self) -> impl Iterator<Item = &mut Target> {
        let posted = self.posted.iter_mut().map(|(_, target)| target);
        posted.chain(self.unexpected.iter_mut().filter_map(|message| message.target.as_mut()))
    }

    /// Number of buffers of unfinished requests that the transport does not have.
    pub(crate) fn waiting(&self) -> usize {
        self.posted.len()
    }

    /// The sender has sent its common tag.
    pub(crate) fn set_common_tag(&mut self, tag: i32) {
        self.common_tag.get_or_insert(tag);
    }

    /// The sender's messages below this number have the common tag. False if it was not asked.
    pub(crate) fn set_same_tag_below(&mut self, below: u64) -> bool {
        if self.asked_from().is_some() {
            self.mode = TagMode::Different(below);
        }
        self.advertises()
    }

    /// The next step, until there is none. `next` is the number of the transport's next message.
    pub(crate) fn next_step(&mut self, next: u64) -> Result<Option<MatchStep>, TooLong> {
        while let (Some((tag, _)), Some(common_tag)) = (self.posted.front(), self.common_tag) {
            let is_common = *tag == common_tag;
            // Buffers with the common tag take unexpected messages ahead of buffers with other tags. What those wait for may
            // need the memory.
            if let Some(at) = self.unexpected.iter().position(|message| message.target.is_none())
                && let Some(buffer) = self.posted.iter().position(|(tag, _)| *tag == common_tag)
            {
                self.unexpected[at].target = self.posted.remove(buffer).map(|(_, target)| target);
                if self.deliver_unexpected(at)? {
                    return Ok(Some(MatchStep::Delivered));
                }
                continue;
            }
            match self.mode {
                TagMode::Same if is_common => {}
                TagMode::Same => {
                    self.mode = TagMode::Asked(next);
                    return Ok(Some(MatchStep::AskSender));
                }
                TagMode::Asked(_) => break,
                // Messages with the common tag are in flight that this buffer must not overtake.
                TagMode::Different(below) if next < below => break,
                TagMode::Different(_) => {}
            }
            let is_advertised = self.advertises();
            return Ok(self
                .posted
                .pop_front()
                .map(|(tag, target)| MatchStep::Post(tag, target, is_advertised)));
        }
        Ok(None)
    }

    /// Whether a message with this number and without a buffer is unexpected.
    pub(crate) fn accepts_unexpected(&self, number: u64) -> bool {
        let is_common = match self.mode {
            TagMode::Same => false,
            TagMode::Asked(_) => true,
            TagMode::Different(below) => number < below,
        };
        is_common && self.unexpected.len() < MAX_UNEXPECTED
    }

    /// Whether the memory of unexpected messages may grow by this many bytes. One message may always be there.
    pub(crate) fn has_unexpected_room(&self, bytes: u64) -> bool {
        let used: usize = self.unexpected.iter().map(|unexpected| unexpected.memory.length()).sum();
        used == 0 || used as u64 + bytes <= MAX_CONNECTION_BYTES as u64
    }

    /// The buffer of an unexpected message, which is the transport's next one, in this memory.
    pub(crate) fn buffer_unexpected(
        &mut self,
        number: u64,
        mut memory: UnexpectedMemory,
    ) -> RecvBuffer {
        let buffer = memory.lend_mut();
        self.unexpected.push_back(Unexpected { number, memory, length: None, target: None });
        buffer
    }

    /// An unexpected message is complete. Returns whether a request waited for it.
    pub(crate) fn unexpected_received(
        &mut self,
        number: u64,
        length: u64,
    ) -> Result<bool, TooLong> {
        let Some(at) = self.unexpected.iter().position(|unexpected| unexpected.number == number)
        else {
            return Ok(false);
        };
        self.unexpected[at].length = Some(length as usize);
        self.deliver_unexpected(at)
    }

    /// Copies an unexpected message into its buffer, if both are there.
    fn deliver_unexpected(&mut self, at: usize) -> Result<bool, TooLong> {
        let Unexpected { number, memory, length: Some(length), target: Some(target) } =
            &self.unexpected[at]
        else {
            return Ok(false);
        };
        let (length, capacity) = (*length, target.buffer.length());
        if length > capacity {
            let (length, capacity) = (length as u64, capacity as u64);
            return Err(TooLong { message: *number, length, capacity });
        }
        target.buffer.part(0, length).copy_from(&memory.bytes()[..length]);
        target.complete(length as u64);
        self.unexpected.remove(at);
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
    fn gate_admits_only_the_next_buffers_tag() {
        let mut gate = TagGate::default();
        let none = || None;
        assert!(gate.admits(5, 0, none) && gate.admits(5, 1, none) && !gate.admits(6, 2, none));
        // The receiver reports a later buffer: up to there nothing changes.
        assert_eq!(gate.tags_differ_from(4, 2), 4);
        assert_eq!(gate.tags_differ_from(4, 3), 4, "it never changes");
        assert!(gate.admits(5, 3, none) && !gate.admits(6, 3, || Some(6)));
        assert!(!gate.admits(5, 4, none), "not posted");
        assert!(!gate.admits(5, 4, || Some(6)) && gate.admits(6, 4, || Some(6)));
    }

    #[test]
    fn advertised_tags_may_be_repeated_late_or_reordered() {
        let mut advertised = AdvertisedTags::default();
        assert!(
            advertised.insert(6, 60, 5)
                && advertised.insert(5, 50, 5)
                && advertised.insert(5, 50, 5)
        );
        assert_eq!(
            (advertised.tag(4), advertised.tag(5), advertised.tag(6), advertised.tag(7)),
            (None, Some(50), Some(60), None)
        );
        assert!(
            advertised.insert(5, 50, 6) && advertised.insert(7, 70, 6),
            "the first of them is sent"
        );
        assert_eq!(
            (advertised.tag(5), advertised.tag(6), advertised.tag(7)),
            (None, Some(60), Some(70))
        );
        assert!(advertised.insert(30, 1, 20) && !advertised.insert(20 + MAX_AHEAD, 1, 20));
        assert_eq!((advertised.tag(20), advertised.tag(30)), (None, Some(1)));
    }

    #[test]
    fn single_tag_is_not_advertised() {
        let mut matcher = TagMatcher::default();
        matcher.post(3, target());
        assert!(matcher.next_step(0).unwrap().is_none(), "the sender's tag is not known");
        matcher.set_common_tag(3);
        assert!(matches!(matcher.next_step(0), Ok(Some(MatchStep::Post(3, _, false)))));
        assert!(matcher.has_common_tag(3) && !matcher.has_common_tag(4));
        assert!(!matcher.set_same_tag_below(7), "the receiver has not asked");
    }

    /// Without copies no message is sent before its buffer, whatever its tag, and none is unexpected.
    #[test]
    fn without_a_common_tag_messages_wait_for_buffers() {
        let mut gate = TagGate::advertised_only();
        assert!(!gate.admits(0, 0, || None) && !gate.admits(0, 0, || Some(5)));
        assert!(gate.admits(5, 0, || Some(5)) && gate.admits(-3, 1, || Some(-3)));
        assert_eq!(gate.tag(), None, "there is no tag to be advertised");
        let mut matcher = TagMatcher::advertise_all();
        [4, 0, 4].into_iter().for_each(|tag| matcher.post(tag, target()));
        for (number, expected) in [4, 0, 4].into_iter().enumerate() {
            let step = matcher.next_step(number as u64).unwrap();
            assert!(matches!(step, Some(MatchStep::Post(tag, _, true)) if tag == expected));
            assert!(!matcher.accepts_unexpected(number as u64));
        }
        assert!(matcher.next_step(3).unwrap().is_none() && !matcher.has_common_tag(4));
    }

    #[test]
    fn unexpected_message_queue_is_bounded() {
        let mut matcher = TagMatcher::default();
        matcher.set_common_tag(3);
        matcher.post(4, target());
        assert!(matches!(matcher.next_step(0), Ok(Some(MatchStep::AskSender))));
        let mut number = 0;
        while matcher.accepts_unexpected(number) {
            assert!(number < 10_000, "{number} messages are unexpected");
            matcher.buffer_unexpected(number, UnexpectedMemory::new(8).unwrap());
            number += 1;
        }
        assert_eq!(number, MAX_UNEXPECTED as u64);
    }

    /// Random orders of buffers and messages: the n-th message with a tag goes to the n-th buffer with it. All are received
    /// as soon as the sender has one for each buffer.
    #[test]
    fn messages_match_buffers_by_tag_and_order() {
        for seed in 0..500 {
            let mut rng = TestRng::new(seed);
            let tags: Vec<i32> = (0..40).map(|_| rng.below(1 + seed % 4) as i32).collect();
            let (mut matcher, mut gate, mut advertised) =
                (TagMatcher::default(), TagGate::default(), AdvertisedTags::default());
            // What the transport would do: its buffers, and messages by number.
            let (mut buffers, mut next) = (BTreeMap::new(), 0);
            let (mut sent, mut taken): (Vec<i32>, usize) = (Vec::new(), 0);
            let mut left = tags.clone();
            let (mut asked, mut answered) = (None, None);
            let mut to_post = tags.iter();
            let mut filled: Vec<(i32, u64)> = Vec::new();
            for _ in 0..10_000 {
                match rng.below(6) {
                    0 => to_post.next().into_iter().for_each(|tag| matcher.post(*tag, target())),
                    1 | 2 => {
                        let number = sent.len() as u64;
                        let at = rng.index(left.len());
                        if left
                            .get(at)
                            .is_some_and(|tag| gate.admits(*tag, number, || advertised.tag(number)))
                        {
                            sent.push(left.swap_remove(at));
                        }
                    }
                    3 => {
                        if let Some(from) = asked {
                            answered = Some(gate.tags_differ_from(from, sent.len() as u64));
                        }
                    }
                    4 => {
                        if let Some(below) = answered {
                            assert!(matcher.set_same_tag_below(below));
                        }
                    }
                    // The next message arrives, in its buffer or unexpected.
                    _ => {
                        if let Some(tag) = sent.get(taken) {
                            matcher.set_common_tag(sent[0]);
                            let number = taken as u64;
                            if number < next {
                                if let Some(of) = buffers.remove(&number) {
                                    assert_eq!(of, *tag, "seed {seed}");
                                    filled.push((*tag, number));
                                }
                                taken += 1;
                            } else if matcher.accepts_unexpected(number) {
                                assert_eq!(*tag, sent[0]);
                                matcher
                                    .buffer_unexpected(number, UnexpectedMemory::new(1).unwrap());
                                assert_eq!(matcher.unexpected_received(number, 0), Ok(false));
                                (next, taken) = (next + 1, taken + 1);
                            }
                        }
                    }
                }
                while let Some(step) = matcher.next_step(next).unwrap() {
                    match step {
                        MatchStep::Post(tag, _, is_advertised) => {
                            if is_advertised {
                                assert!(advertised.insert(next, tag, sent.len() as u64));
                            }
                            buffers.insert(next, tag);
                            next += 1;
                        }
                        MatchStep::AskSender => asked = matcher.asked_from(),
                        MatchStep::Delivered => filled.push((sent[0], 0)),
                    }
                }
            }
            assert!(left.is_empty() && matcher.waiting() == 0, "seed {seed}: {left:?}");
            assert_eq!(filled.len(), tags.len(), "seed {seed}");
        }
    }
}
