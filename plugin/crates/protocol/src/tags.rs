//! Tag matching: which message with a tag goes into which buffer with a tag.
//!
//! The transport delivers the n-th message into the n-th buffer and ignores tags. That is right as
//! long as all tags are the same, so at first the sender sends its tag only once: the *common tag*.
//!
//! When the receiver posts a buffer with another tag, it asks how many messages the sender has
//! started. Those messages have the common tag. If their buffers are not posted yet they go to the
//! *unexpected-message queue*, in memory of the receiver, and do not block messages with other
//! tags. Later they are copied into the buffers with their tag. From then on the receiver
//! advertises each posted buffer with its tag. The sender sends the n-th message when it has one
//! with the tag of the n-th buffer.
//!
//! So no message is sent before its buffer is posted, and none waits for a later buffer. Messages
//! with the same tag keep their order. The buffers of a group are separate buffers of one request.
//!
//! Nothing here touches a message's bytes: [`TagMatcher`] returns what is to be copied
//! ([`MatchStep::Deliver`]), and its user copies it where no lock is held.

use std::collections::VecDeque;

/// Maximum distance between the sender's next message and an advertised buffer. Receivers post
/// fewer.
const MAX_AHEAD: u64 = 4096;

/// Maximum length of the unexpected-message queue. Senders have fewer messages in flight. If one
/// sends more, they wait, so that memory is bounded.
const MAX_UNEXPECTED: usize = 512;

/// Maximum number of bytes of a connection's unexpected messages, unless one message alone is
/// longer.
pub const MAX_UNEXPECTED_BYTES: u64 = 64 << 20;

/// A message that is longer than the buffer posted for it. The two sides disagree, so the
/// connection cannot continue.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "message {message} truncated: the peer sends {length} bytes, the receive buffer holds {capacity}"
)]
pub struct TooLong {
    /// Number of the message.
    pub message: u64,
    /// Length of the peer's message, in bytes.
    pub length: u64,
    /// Size of the posted buffer, in bytes.
    pub capacity: u64,
}

/// Decides when a sender may send a message with a tag.
#[derive(Debug, Default)]
pub struct TagGate {
    /// The common tag.
    tag: Option<i32>,
    /// Messages below this number have the common tag. `None` while all have it.
    below: Option<u64>,
}

impl TagGate {
    /// For connections without a common tag: each message waits for a buffer with its tag.
    pub fn advertised_only() -> Self {
        Self { tag: None, below: Some(0) }
    }

    /// Whether the next message, with this number, may have this tag. `advertised` gives the tag of
    /// its buffer, if the receiver has advertised it.
    pub fn admits(
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

    /// The receiver reports that tags differ from this buffer on. Returns the number of the first
    /// message that need not have the common tag, given that of the next one. It never changes.
    pub fn tags_differ_from(&mut self, from: u64, next: u64) -> u64 {
        *self.below.get_or_insert_with(|| from.max(next))
    }

    /// The common tag.
    pub fn tag(&self) -> Option<i32> {
        self.tag
    }

    /// The number below which messages have the common tag, if the receiver has asked.
    pub fn same_tag_below(&self) -> Option<u64> {
        self.below
    }
}

/// The tags of advertised buffers, in any order and with repetitions.
#[derive(Debug, Default)]
pub struct AdvertisedTags {
    first: u64,
    tags: VecDeque<Option<i32>>,
}

impl AdvertisedTags {
    /// Notes the tag of a buffer. `next` is the number of the next message. False if no valid
    /// receiver would advertise it.
    pub fn insert(&mut self, number: u64, tag: i32, next: u64) -> bool {
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
    pub fn tag(&self, number: u64) -> Option<i32> {
        *self.tags.get(number.checked_sub(self.first)? as usize)?
    }
}

/// The buffers with tags that the transport has not been given yet, and the unexpected messages.
/// `B` is a posted buffer, `M` the memory of an unexpected message.
///
/// After each change, its user takes what is to be done from [`TagMatcher::next_step`] until there
/// is nothing.
#[derive(Debug)]
pub struct TagMatcher<B, M> {
    /// The common tag, once the sender has sent it.
    common_tag: Option<i32>,
    mode: TagMode,
    /// In the order in which they were posted.
    posted: VecDeque<TaggedReceive<B>>,
    /// The unexpected-message queue: messages that arrived before their buffers, oldest first.
    /// Those with a buffer are in front.
    unexpected: VecDeque<Unexpected<B, M>>,
    /// Bytes of the memory of unexpected messages, also of those that are being copied.
    unexpected_bytes: u64,
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

#[derive(Debug)]
struct TaggedReceive<B> {
    tag: i32,
    /// Bytes that the buffer holds.
    capacity: u64,
    buffer: B,
}

#[derive(Debug)]
struct Unexpected<B, M> {
    message: u64,
    memory: M,
    /// Bytes of the memory.
    bytes: u64,
    /// Length in bytes, once all of the message is there.
    length: Option<u64>,
    /// Its buffer, once that is posted.
    receive: Option<TaggedReceive<B>>,
}

/// What to do next.
#[derive(Debug, PartialEq, Eq)]
pub enum MatchStep<B, M> {
    /// Give the transport this buffer for its next message.
    Post {
        /// The buffer's tag.
        tag: i32,
        /// The buffer.
        buffer: B,
        /// Whether to advertise it to the sender.
        is_advertised: bool,
    },
    /// Report to the sender that tags differ from the transport's next message on
    /// ([`TagMatcher::asked_from`]).
    AskSender,
    /// Copy an unexpected message into its buffer.
    Deliver(UnexpectedDelivery<B, M>),
}

/// An unexpected message and the buffer that it belongs into. It fits.
#[derive(Debug, PartialEq, Eq)]
pub struct UnexpectedDelivery<B, M> {
    /// The buffer.
    pub buffer: B,
    /// Length of the message, in bytes.
    pub length: u64,
    /// The memory that holds the message.
    pub memory: M,
    /// Bytes of the memory. They count until [`TagMatcher::memory_freed`].
    pub bytes: u64,
}

impl<B, M> Default for TagMatcher<B, M> {
    fn default() -> Self {
        Self {
            common_tag: None,
            mode: TagMode::default(),
            posted: VecDeque::new(),
            unexpected: VecDeque::new(),
            unexpected_bytes: 0,
        }
    }
}

impl<B, M> TagMatcher<B, M> {
    /// For connections without a common tag: each buffer is advertised, and no message is
    /// unexpected.
    pub fn advertise_all() -> Self {
        // No message has the common tag, so its value does not matter.
        Self { common_tag: Some(0), mode: TagMode::Different(0), ..Self::default() }
    }

    /// Whether a buffer with this tag can go to the transport at once, without a frame to the
    /// sender.
    pub fn has_common_tag(&self, tag: i32) -> bool {
        self.mode == TagMode::Same && self.common_tag == Some(tag) && self.posted.is_empty()
    }

    /// Whether there is nothing to do before another buffer is posted.
    pub fn is_idle(&self) -> bool {
        self.mode == TagMode::Same && self.posted.is_empty()
    }

    /// Whether buffers are advertised to the sender.
    pub fn advertises(&self) -> bool {
        matches!(self.mode, TagMode::Different(_))
    }

    /// The number from which tags differ, while the sender has not answered.
    pub fn asked_from(&self) -> Option<u64> {
        match self.mode {
            TagMode::Asked(from) => Some(from),
            TagMode::Same | TagMode::Different(_) => None,
        }
    }

    /// Adds a buffer that holds `capacity` bytes.
    pub fn post(&mut self, tag: i32, capacity: u64, buffer: B) {
        self.posted.push_back(TaggedReceive { tag, capacity, buffer });
    }

    /// The buffers that the transport does not have.
    pub fn buffers_mut(&mut self) -> impl Iterator<Item = &mut B> {
        let matched = self.unexpected.iter_mut().filter_map(|message| message.receive.as_mut());
        self.posted.iter_mut().chain(matched).map(|receive| &mut receive.buffer)
    }

    /// Number of buffers that neither the transport nor an unexpected message has.
    pub fn waiting(&self) -> usize {
        self.posted.len()
    }

    /// The sender has sent its common tag. The first one counts.
    pub fn set_common_tag(&mut self, tag: i32) {
        self.common_tag.get_or_insert(tag);
    }

    /// The sender's messages below this number have the common tag. False if it was not asked.
    pub fn set_same_tag_below(&mut self, below: u64) -> bool {
        if self.asked_from().is_some() {
            self.mode = TagMode::Different(below);
        }
        self.advertises()
    }

    /// The next step, until there is none. `next` is the number of the transport's next message.
    ///
    /// # Errors
    /// [`TooLong`] when an unexpected message does not fit into its buffer.
    pub fn next_step(&mut self, next: u64) -> Result<Option<MatchStep<B, M>>, TooLong> {
        let Some(common_tag) = self.common_tag else { return Ok(None) };
        // Buffers with the common tag take unexpected messages ahead of buffers with other tags.
        // What those wait for may need the memory.
        while let Some(at) = self.unexpected.iter().position(|message| message.receive.is_none())
            && let Some(buffer) = self.posted.iter().position(|posted| posted.tag == common_tag)
        {
            self.unexpected[at].receive = self.posted.remove(buffer);
            if let Some(delivery) = self.take_delivery(at)? {
                return Ok(Some(MatchStep::Deliver(delivery)));
            }
        }
        let Some(first) = self.posted.front() else { return Ok(None) };
        match self.mode {
            TagMode::Same if first.tag == common_tag => {}
            TagMode::Same => {
                self.mode = TagMode::Asked(next);
                return Ok(Some(MatchStep::AskSender));
            }
            TagMode::Asked(_) => return Ok(None),
            // Messages with the common tag are in flight that this buffer must not overtake.
            TagMode::Different(below) if next < below => return Ok(None),
            TagMode::Different(_) => {}
        }
        let is_advertised = self.advertises();
        Ok(self.posted.pop_front().map(|TaggedReceive { tag, buffer, .. }| MatchStep::Post {
            tag,
            buffer,
            is_advertised,
        }))
    }

    /// Whether a message with this number and without a buffer is unexpected.
    pub fn accepts_unexpected(&self, message: u64) -> bool {
        let is_common = match self.mode {
            TagMode::Same => false,
            TagMode::Asked(_) => true,
            TagMode::Different(below) => message < below,
        };
        is_common && self.unexpected.len() < MAX_UNEXPECTED
    }

    /// Whether the memory of unexpected messages may grow by this many bytes. One message may
    /// always be there.
    pub fn has_unexpected_room(&self, bytes: u64) -> bool {
        let used = self.unexpected_bytes;
        used == 0 || used.saturating_add(bytes) <= MAX_UNEXPECTED_BYTES
    }

    /// The transport's next message is unexpected, and is received into memory of this many bytes.
    pub fn push_unexpected(&mut self, message: u64, bytes: u64, memory: M) {
        self.unexpected_bytes = self.unexpected_bytes.saturating_add(bytes);
        let (length, receive) = (None, None);
        self.unexpected.push_back(Unexpected { message, memory, bytes, length, receive });
    }

    /// All of an unexpected message is there, and has this length in bytes. Returns what is to be
    /// copied, if its buffer is posted.
    ///
    /// # Errors
    /// As [`TagMatcher::next_step`].
    pub fn unexpected_received(
        &mut self,
        message: u64,
        length: u64,
    ) -> Result<Option<UnexpectedDelivery<B, M>>, TooLong> {
        let Some(at) = self.unexpected.iter().position(|received| received.message == message)
        else {
            return Ok(None);
        };
        self.unexpected[at].length = Some(length);
        self.take_delivery(at)
    }

    /// Takes out an unexpected message, if it is complete and has a buffer.
    fn take_delivery(&mut self, at: usize) -> Result<Option<UnexpectedDelivery<B, M>>, TooLong> {
        let Unexpected { message, length: Some(length), receive: Some(receive), .. } =
            &self.unexpected[at]
        else {
            return Ok(None);
        };
        let (message, length, capacity) = (*message, *length, receive.capacity);
        if length > capacity {
            return Err(TooLong { message, length, capacity });
        }
        let delivered = self.unexpected.remove(at);
        Ok(delivered.and_then(|Unexpected { memory, bytes, receive, .. }| {
            Some(UnexpectedDelivery { buffer: receive?.buffer, length, memory, bytes })
        }))
    }

    /// The memory of a delivered message is free again: `bytes` of its [`UnexpectedDelivery`].
    pub fn memory_freed(&mut self, bytes: u64) {
        self.unexpected_bytes = self.unexpected_bytes.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

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

    /// A buffer, and the number of an unexpected message as its memory.
    type Matcher = TagMatcher<char, u64>;

    fn post(tag: i32, buffer: char, is_advertised: bool) -> Option<MatchStep<char, u64>> {
        Some(MatchStep::Post { tag, buffer, is_advertised })
    }

    #[test]
    fn single_tag_is_not_advertised() {
        let mut matcher = Matcher::default();
        matcher.post(3, 8, 'a');
        assert_eq!(matcher.next_step(0), Ok(None), "the sender's tag is not known");
        matcher.set_common_tag(3);
        matcher.set_common_tag(4);
        assert_eq!(matcher.next_step(0), Ok(post(3, 'a', false)));
        assert!(matcher.has_common_tag(3) && !matcher.has_common_tag(4));
        assert!(!matcher.set_same_tag_below(7), "the receiver has not asked");
    }

    /// Without copies no message is sent before its buffer, whatever its tag, and none is
    /// unexpected.
    #[test]
    fn without_a_common_tag_messages_wait_for_buffers() {
        let mut gate = TagGate::advertised_only();
        assert!(!gate.admits(0, 0, || None) && !gate.admits(0, 0, || Some(5)));
        assert!(gate.admits(5, 0, || Some(5)) && gate.admits(-3, 1, || Some(-3)));
        assert_eq!(gate.tag(), None, "there is no tag to be advertised");
        let mut matcher = Matcher::advertise_all();
        [4, 0, 4].into_iter().for_each(|tag| matcher.post(tag, 8, 'a'));
        for (number, expected) in [4, 0, 4].into_iter().enumerate() {
            assert_eq!(matcher.next_step(number as u64), Ok(post(expected, 'a', true)));
            assert!(!matcher.accepts_unexpected(number as u64));
        }
        assert!(matcher.next_step(3) == Ok(None) && !matcher.has_common_tag(4));
    }

    #[test]
    fn buffer_with_another_tag_waits_for_messages_in_flight() {
        let mut matcher = Matcher::default();
        matcher.set_common_tag(3);
        matcher.post(4, 8, 'a');
        assert_eq!(matcher.next_step(5), Ok(Some(MatchStep::AskSender)));
        assert_eq!((matcher.asked_from(), matcher.waiting()), (Some(5), 1));
        assert_eq!(matcher.next_step(5), Ok(None), "the sender has not answered");
        assert!(matcher.set_same_tag_below(6) && matcher.asked_from().is_none());
        assert_eq!(matcher.next_step(5), Ok(None), "message 5 has the common tag");
        assert_eq!(matcher.next_step(6), Ok(post(4, 'a', true)));
        assert_eq!((matcher.next_step(7), matcher.waiting()), (Ok(None), 0));
    }

    /// In both orders of the buffer and the end of the message.
    #[test]
    fn unexpected_message_is_delivered_once_it_is_complete_and_has_a_buffer() {
        for is_posted_first in [false, true] {
            let mut matcher = Matcher::default();
            matcher.set_common_tag(3);
            matcher.post(4, 8, 'a');
            assert_eq!(matcher.next_step(0), Ok(Some(MatchStep::AskSender)));
            matcher.push_unexpected(0, 100, 0);
            matcher.push_unexpected(1, 100, 1);
            // It goes ahead of the buffer with the other tag, which was posted before.
            let delivery = UnexpectedDelivery { buffer: 'b', length: 70, memory: 0, bytes: 100 };
            if is_posted_first {
                matcher.post(3, 70, 'b');
                assert_eq!(matcher.next_step(2), Ok(None));
                assert_eq!(matcher.unexpected_received(0, 70), Ok(Some(delivery)));
            } else {
                assert_eq!(matcher.unexpected_received(0, 70), Ok(None));
                matcher.post(3, 70, 'b');
                assert_eq!(matcher.next_step(2), Ok(Some(MatchStep::Deliver(delivery))));
            }
            assert_eq!((matcher.next_step(2), matcher.waiting()), (Ok(None), 1));
            assert_eq!(matcher.unexpected_received(0, 70), Ok(None), "it is delivered");
        }
    }

    #[test]
    fn unexpected_message_that_does_not_fit_its_buffer_is_too_long() {
        let mut matcher = Matcher::default();
        matcher.set_common_tag(3);
        matcher.post(4, 8, 'a');
        assert_eq!(matcher.next_step(0), Ok(Some(MatchStep::AskSender)));
        matcher.push_unexpected(0, 100, 0);
        matcher.push_unexpected(1, 100, 1);
        assert_eq!(matcher.unexpected_received(0, 71), Ok(None));
        matcher.post(3, 70, 'b');
        let too_long = |message| TooLong { message, length: 71, capacity: 70 };
        assert_eq!(matcher.next_step(2), Err(too_long(0)));
        matcher.post(3, 70, 'c');
        assert_eq!(matcher.next_step(2), Ok(None));
        assert_eq!(matcher.unexpected_received(1, 71), Err(too_long(1)));
        // The connection fails, and their requests with it.
        assert_eq!(matcher.buffers_mut().map(|buffer| *buffer).collect::<String>(), "abc");
    }

    #[test]
    fn unexpected_message_queue_is_bounded() {
        let mut matcher = Matcher::default();
        matcher.set_common_tag(3);
        matcher.post(4, 8, 'a');
        assert!(!matcher.accepts_unexpected(0), "the sender was not asked");
        assert_eq!(matcher.next_step(0), Ok(Some(MatchStep::AskSender)));
        let mut number = 0;
        while matcher.accepts_unexpected(number) {
            assert!(number < 10_000, "{number} messages are unexpected");
            matcher.push_unexpected(number, 8, number);
            number += 1;
        }
        assert_eq!(number, MAX_UNEXPECTED as u64);
    }

    #[test]
    fn unexpected_memory_counts_until_it_is_free() {
        let mut matcher = Matcher::default();
        matcher.set_common_tag(3);
        matcher.post(4, 8, 'a');
        assert_eq!(matcher.next_step(0), Ok(Some(MatchStep::AskSender)));
        assert!(matcher.has_unexpected_room(MAX_UNEXPECTED_BYTES + 1), "one alone may be longer");
        matcher.push_unexpected(0, 100, 0);
        let rest = MAX_UNEXPECTED_BYTES - 100;
        assert!(matcher.has_unexpected_room(rest) && !matcher.has_unexpected_room(rest + 1));
        assert!(!matcher.has_unexpected_room(u64::MAX));
        assert_eq!(matcher.unexpected_received(0, 0), Ok(None));
        matcher.post(3, 0, 'b');
        assert!(matches!(matcher.next_step(1), Ok(Some(MatchStep::Deliver(_)))));
        assert!(!matcher.has_unexpected_room(rest + 1), "it is being copied");
        matcher.memory_freed(100);
        assert!(matcher.has_unexpected_room(MAX_UNEXPECTED_BYTES + 1));
    }

    /// What a buffer or a message is to the naive model: its tag, and how many with this tag were
    /// before it. The n-th message with a tag belongs into the n-th buffer with it.
    type Numbered = (i32, usize);

    fn numbered(tags: &[i32]) -> VecDeque<Numbered> {
        let mut counts = BTreeMap::<i32, usize>::new();
        let number = |tag: &i32| {
            let count = counts.entry(*tag).or_default();
            *count += 1;
            (*tag, *count - 1)
        };
        tags.iter().map(number).collect()
    }

    /// A sender and a receiver, and what is between them.
    #[derive(Default)]
    struct Pair {
        gate: TagGate,
        advertised: AdvertisedTags,
        /// Messages in the order in which they were sent, and how many of them have arrived.
        sent: Vec<Numbered>,
        arrived: usize,
        /// The receiver's question, and the sender's answer.
        asked: Option<u64>,
        answered: Option<u64>,
        matcher: TagMatcher<Numbered, Numbered>,
        /// The transport's buffers by message, and its next message. Those without a buffer are
        /// unexpected.
        buffers: BTreeMap<u64, Option<Numbered>>,
        next: u64,
        /// Buffers that are filled.
        filled: usize,
        /// Bytes of unexpected messages whose memory is not free.
        unexpected: u64,
    }

    impl Pair {
        /// Sends the message if it may be sent.
        fn send(&mut self, message: Numbered) -> bool {
            let number = self.sent.len() as u64;
            let is_admitted = self.gate.admits(message.0, number, || self.advertised.tag(number));
            if is_admitted {
                self.sent.push(message);
            }
            is_admitted
        }

        /// The next message arrives, if it has a buffer or is unexpected.
        fn arrive(&mut self) {
            let Some(message) = self.sent.get(self.arrived).copied() else { return };
            self.matcher.set_common_tag(self.sent[0].0);
            let number = self.arrived as u64;
            if number == self.next && self.matcher.accepts_unexpected(number) {
                self.matcher.push_unexpected(number, 1, message);
                self.buffers.insert(number, None);
                (self.next, self.unexpected) = (self.next + 1, self.unexpected + 1);
            }
            let Some(buffer) = self.buffers.remove(&number) else { return };
            self.arrived += 1;
            match buffer {
                Some(buffer) => self.fill(buffer, message),
                None => {
                    let delivery = self.matcher.unexpected_received(number, 1).unwrap();
                    delivery.into_iter().for_each(|delivery| self.deliver(delivery));
                }
            }
        }

        fn deliver(&mut self, delivery: UnexpectedDelivery<Numbered, Numbered>) {
            self.fill(delivery.buffer, delivery.memory);
            self.matcher.memory_freed(delivery.bytes);
            self.unexpected -= 1;
        }

        fn fill(&mut self, buffer: Numbered, message: Numbered) {
            assert_eq!(buffer, message, "the model's buffer");
            self.filled += 1;
        }

        fn run_steps(&mut self) {
            while let Some(step) = self.matcher.next_step(self.next).unwrap() {
                match step {
                    MatchStep::Post { tag, buffer, is_advertised } => {
                        assert_eq!(tag, buffer.0);
                        if is_advertised {
                            let sent = self.sent.len() as u64;
                            assert!(self.advertised.insert(self.next, tag, sent));
                        }
                        self.buffers.insert(self.next, Some(buffer));
                        self.next += 1;
                    }
                    MatchStep::AskSender => self.asked = self.matcher.asked_from(),
                    MatchStep::Deliver(delivery) => self.deliver(delivery),
                }
            }
            let room = MAX_UNEXPECTED_BYTES - self.unexpected;
            assert!(self.matcher.has_unexpected_room(room));
            assert_eq!(self.matcher.has_unexpected_room(room + 1), self.unexpected == 0);
        }
    }

    proptest! {
        /// Whatever the order of buffers, messages, questions and answers, each message goes where
        /// the naive model puts it. All are received as soon as there is a message for each buffer.
        #[test]
        fn tag_matching_behaves_like_a_queue_for_each_tag(
            (posts, sends) in (1i32..5)
                .prop_flat_map(|tags| proptest::collection::vec(0..tags, 1..40))
                .prop_flat_map(|tags| (Just(tags.clone()), Just(tags).prop_shuffle())),
            steps in proptest::collection::vec((0u8..5, any::<proptest::sample::Index>()), 0..300),
        ) {
            let mut pair = Pair::default();
            let (mut posts, mut sends) = (numbered(&posts), numbered(&sends));
            let count = posts.len();
            // In the end everything happens that still can: a round for each buffer, its message,
            // and the question.
            let rounds = (0..3 * count + 3).flat_map(|_| {
                let sends = (0..count).map(|at| (1, at));
                [(0, 0)].into_iter().chain(sends).chain([(2, 0), (3, 0), (4, 0)])
            });
            let drawn = steps.into_iter().map(|(step, at)| (step, at.index(count)));
            for (step, at) in drawn.chain(rounds) {
                match step {
                    0 => {
                        if let Some(buffer) = posts.pop_front() {
                            pair.matcher.post(buffer.0, 1, buffer);
                        }
                    }
                    // Messages with the same tag are sent in order.
                    1 => {
                        if let Some((tag, number)) = sends.get(at).copied()
                            && !sends.iter().any(|(of, before)| *of == tag && *before < number)
                            && pair.send((tag, number))
                        {
                            sends.remove(at);
                        }
                    }
                    2 => {
                        if let Some(from) = pair.asked {
                            let next = pair.sent.len() as u64;
                            pair.answered = Some(pair.gate.tags_differ_from(from, next));
                        }
                    }
                    3 => {
                        if let Some(below) = pair.answered {
                            prop_assert!(pair.matcher.set_same_tag_below(below));
                        }
                    }
                    _ => pair.arrive(),
                }
                pair.run_steps();
            }
            prop_assert!(posts.is_empty() && sends.is_empty(), "{sends:?} are left");
            prop_assert_eq!((pair.filled, pair.matcher.waiting(), pair.unexpected), (count, 0, 0));
        }
    }
}
