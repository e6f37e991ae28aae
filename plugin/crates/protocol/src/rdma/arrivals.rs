//! Which messages have been received over RDMA. Each is counted exactly once, whatever queue pair
//! carries its parts and in whatever order.
//!
//! A part is announced by a number of 32 bits, the immediate data: which message, which part of it,
//! and whether it is the last one.

use std::collections::VecDeque;

/// Maximum number of messages from the oldest incomplete one to the newest one that may be sent.
pub const WINDOW: u64 = 64;
/// Message numbers are sent modulo this. It is twice [`WINDOW`], so that repeated parts of old
/// messages differ from new ones.
const NUMBER_MODULUS: u64 = 128;
/// Maximum number of parts of a message.
pub const MAX_PARTS: u32 = 1 << 23;

/// The immediate data of a part.
///
/// Layout: the highest bit marks the last part, the next one a whole small message in the
/// receiver's eager ring. Then follow seven bits of the message's number, and 23 of the part's, or
/// of the place in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Immediate {
    /// The message's number modulo [`NUMBER_MODULUS`].
    message: u32,
    /// The part's number; the place of an eager message.
    index: u32,
    last: bool,
    eager: bool,
}

impl Immediate {
    /// A part of a message, written to the buffer posted for it.
    pub fn part(message: u64, index: u32, last: bool) -> Self {
        Self { message: (message % NUMBER_MODULUS) as u32, index, last, eager: false }
    }

    /// A whole message, written to this place of the eager ring. The receiver does not know places:
    /// it reports which messages have left the ring.
    ///
    /// # Panics
    /// When the place is not below [`MAX_PARTS`].
    pub fn eager(message: u64, place: u32) -> Self {
        assert!(place < MAX_PARTS);
        Self { message: (message % NUMBER_MODULUS) as u32, index: place, last: true, eager: true }
    }

    /// The number.
    pub fn encode(self) -> u32 {
        u32::from(self.last) << 31 | u32::from(self.eager) << 30 | self.message << 23 | self.index
    }

    fn decode(number: u32) -> Self {
        Self {
            message: number >> 23 & (NUMBER_MODULUS as u32 - 1),
            index: number & (MAX_PARTS - 1),
            last: number >> 31 == 1,
            eager: number >> 30 & 1 == 1,
        }
    }
}

/// Why a part is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArrivalError {
    /// The message is longer than its buffer.
    #[error(
        "a message of {length} bytes does not fit into the buffer of {capacity} bytes posted for it"
    )]
    TooLong {
        /// Bytes of the message.
        length: u64,
        /// Bytes of the buffer.
        capacity: u64,
    },
    /// A part of a message for which no buffer is posted.
    #[error("protocol error: a part of a message without a buffer")]
    NotPosted,
    /// The parts contradict each other.
    #[error("protocol error: a part beyond the last one")]
    BeyondLast,
}

/// A message that has been received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceivedMessage<T> {
    /// The value that its buffer was posted with.
    pub posted: T,
    /// Its number.
    pub message: u64,
    /// Its length in bytes.
    pub length: u64,
    /// Its place in the eager ring, if it is there; else it is in its posted buffer.
    pub eager_place: Option<u32>,
}

/// The messages of one connection.
#[derive(Debug)]
pub struct Arrivals<T> {
    /// Number of the oldest incomplete message.
    first: u64,
    /// The messages from that one on.
    messages: VecDeque<Message<T>>,
    /// Number of the next message for which a buffer is posted.
    next: u64,
}

#[derive(Debug)]
struct Message<T> {
    /// Bytes of the posted buffer and its value; none before it is posted, and none once the
    /// message is complete.
    posted: Option<(u64, T)>,
    /// Its length and its place, if it is in the eager ring.
    eager: Option<(u64, u32)>,
    parts: Parts,
    /// Bytes received.
    bytes: u64,
    /// Number of parts, once the last one has been received.
    count: Option<u32>,
    complete: bool,
}

/// A set of parts. Few messages have more than the first 64.
#[derive(Debug, Default)]
struct Parts {
    first: u64,
    more: Vec<u64>,
    count: u32,
}

impl Parts {
    fn contains(&self, index: u32) -> bool {
        let (block, bit) = (index as usize / 64, index % 64);
        let bits = if block == 0 { Some(&self.first) } else { self.more.get(block - 1) };
        bits.is_some_and(|bits| bits >> bit & 1 == 1)
    }

    /// Returns false if it was in the set.
    fn insert(&mut self, index: u32) -> bool {
        if self.contains(index) {
            return false;
        }
        let (block, bit) = (index as usize / 64, index % 64);
        if block == 0 {
            self.first |= 1 << bit;
        } else {
            if self.more.len() < block {
                self.more.resize(block, 0);
            }
            self.more[block - 1] |= 1 << bit;
        }
        self.count += 1;
        true
    }
}

impl<T> Default for Arrivals<T> {
    fn default() -> Self {
        Self { first: 0, messages: VecDeque::new(), next: 0 }
    }
}

impl<T> Default for Message<T> {
    fn default() -> Self {
        Self {
            posted: None,
            eager: None,
            parts: Parts::default(),
            bytes: 0,
            count: None,
            complete: false,
        }
    }
}

impl<T> Arrivals<T> {
    /// Number of the oldest incomplete message. Those before it have left the eager ring.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// Number of the message that the next buffer is for.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// The number of buffers that may be posted.
    pub fn room(&self) -> usize {
        (self.first + WINDOW - self.next) as usize
    }

    /// Whether a buffer may be posted.
    pub fn has_room(&self) -> bool {
        self.room() > 0
    }

    /// Number of incomplete messages that have a buffer.
    pub fn outstanding(&self) -> usize {
        self.messages.iter().filter(|message| message.posted.is_some()).count()
    }

    /// The values of their buffers.
    pub fn posted_mut(&mut self) -> impl Iterator<Item = &mut T> {
        let posted = self.messages.iter_mut().filter_map(|message| message.posted.as_mut());
        posted.map(|(_, posted)| posted)
    }

    /// Their numbers, and the sizes and values of their buffers.
    pub fn posted(&self) -> impl Iterator<Item = (u64, u64, &T)> {
        let numbered = (self.first..).zip(&self.messages);
        numbered.filter_map(|(number, message)| {
            let (capacity, posted) = message.posted.as_ref()?;
            Some((number, *capacity, posted))
        })
    }

    /// Drops the values of all posted buffers, when nothing more can be received.
    pub fn clear(&mut self) {
        self.messages.iter_mut().for_each(|message| message.posted = None);
    }

    /// Posts a buffer of `capacity` bytes for the next message. Returns its number, and the message
    /// if it has already been received.
    ///
    /// # Errors
    /// When the message that has been received is longer.
    ///
    /// # Panics
    /// When no buffer may be posted.
    pub fn post(
        &mut self,
        capacity: u64,
        posted: T,
    ) -> Result<(u64, Option<ReceivedMessage<T>>), ArrivalError> {
        assert!(self.has_room());
        let number = self.next;
        self.next += 1;
        let message = self.message(number);
        message.posted = Some((capacity, posted));
        let arrived = match message.eager {
            Some((length, place)) => Some(self.complete(number, length, Some(place))?),
            None => None,
        };
        Ok((number, arrived))
    }

    /// Records a part: its bytes and its immediate data. Returns the message if it is complete now.
    ///
    /// # Errors
    /// [`ArrivalError`] when no correct peer could have sent it.
    pub fn part_received(
        &mut self,
        bytes: u32,
        immediate: u32,
    ) -> Result<Option<ReceivedMessage<T>>, ArrivalError> {
        let part = Immediate::decode(immediate);
        let ahead = u64::from(part.message).wrapping_sub(self.first) % NUMBER_MODULUS;
        if ahead >= WINDOW {
            // It is repeated, and was received over another queue pair.
            return Ok(None);
        }
        let number = self.first + ahead;
        let next = self.next;
        let message = self.message(number);
        if message.complete || message.eager.is_some() {
            return Ok(None);
        }
        if part.eager {
            message.eager = Some((bytes.into(), part.index));
            if number >= next {
                return Ok(None);
            }
            return self.complete(number, bytes.into(), Some(part.index)).map(Some);
        }
        let Some((capacity, _)) = message.posted else { return Err(ArrivalError::NotPosted) };
        if part.last {
            message.count = Some(part.index + 1);
        }
        if message.count.is_some_and(|count| part.index >= count) {
            return Err(ArrivalError::BeyondLast);
        }
        if !message.parts.insert(part.index) {
            return Ok(None);
        }
        message.bytes += u64::from(bytes);
        let length = message.bytes;
        if length > capacity {
            return Err(ArrivalError::TooLong { length, capacity });
        }
        if message.count != Some(message.parts.count) {
            return Ok(None);
        }
        self.complete(number, length, None).map(Some)
    }

    /// Whether a part has been received.
    pub fn has(&self, message: u64, index: u32) -> bool {
        match message.checked_sub(self.first) {
            None => true,
            Some(at) => self.messages.get(at as usize).is_some_and(|message| {
                message.complete || message.eager.is_some() || message.parts.contains(index)
            }),
        }
    }

    /// The entry of a message of the window.
    fn message(&mut self, number: u64) -> &mut Message<T> {
        let at = (number - self.first) as usize;
        while self.messages.len() <= at {
            self.messages.push_back(Message::default());
        }
        &mut self.messages[at]
    }

    fn complete(
        &mut self,
        number: u64,
        length: u64,
        eager_place: Option<u32>,
    ) -> Result<ReceivedMessage<T>, ArrivalError> {
        let message = self.message(number);
        let Some((capacity, posted)) = message.posted.take() else {
            return Err(ArrivalError::NotPosted);
        };
        if length > capacity {
            message.posted = Some((capacity, posted));
            return Err(ArrivalError::TooLong { length, capacity });
        }
        message.complete = true;
        while self.messages.front().is_some_and(|message| message.complete) {
            self.messages.pop_front();
            self.first += 1;
        }
        Ok(ReceivedMessage { posted, message: number, length, eager_place })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn part(message: u64, index: u32, last: bool) -> u32 {
        Immediate::part(message, index, last).encode()
    }

    #[test]
    fn arrivals_complete_a_message_from_parts_in_any_order() {
        let mut arrivals = Arrivals::default();
        assert_eq!(arrivals.post(1000, 'a'), Ok((0, None)));
        assert_eq!(arrivals.part_received(100, part(0, 2, true)), Ok(None));
        assert_eq!(arrivals.part_received(400, part(0, 0, false)), Ok(None));
        assert_eq!(arrivals.part_received(400, part(0, 0, false)), Ok(None), "the same once more");
        assert!(arrivals.has(0, 0) && !arrivals.has(0, 1) && arrivals.has(0, 2));
        let all = ReceivedMessage { posted: 'a', message: 0, length: 900, eager_place: None };
        assert_eq!(arrivals.part_received(400, part(0, 1, false)), Ok(Some(all)));
        assert!(arrivals.has(0, 1), "of a message that is complete");
        assert_eq!(arrivals.part_received(400, part(0, 1, false)), Ok(None), "long ago");
        assert_eq!((arrivals.first(), arrivals.outstanding()), (1, 0));
    }

    #[test]
    fn arrivals_keep_eager_messages_until_a_buffer_is_posted() {
        let mut arrivals = Arrivals::default();
        assert_eq!(arrivals.part_received(8, Immediate::eager(1, 7).encode()), Ok(None));
        assert_eq!(arrivals.post(10, 'a'), Ok((0, None)));
        let early = ReceivedMessage { posted: 'b', message: 1, length: 8, eager_place: Some(7) };
        assert_eq!(arrivals.post(10, 'b'), Ok((1, Some(early))));
        assert_eq!(arrivals.first(), 0, "the eager ring is in use");
        let empty = ReceivedMessage { posted: 'a', message: 0, length: 0, eager_place: Some(0) };
        assert_eq!(arrivals.part_received(0, Immediate::eager(0, 0).encode()), Ok(Some(empty)));
        assert_eq!(arrivals.first(), 2);
    }

    #[test]
    fn arrivals_refuse_impossible_parts() {
        let mut arrivals = Arrivals::default();
        assert_eq!(arrivals.part_received(8, part(0, 0, true)), Err(ArrivalError::NotPosted));
        arrivals.post(10, 'a').unwrap();
        let long = ArrivalError::TooLong { length: 11, capacity: 10 };
        assert_eq!(arrivals.part_received(11, Immediate::eager(0, 0).encode()), Err(long));
        arrivals.post(10, 'b').unwrap();
        let long = ArrivalError::TooLong { length: 12, capacity: 10 };
        assert_eq!(arrivals.part_received(12, part(1, 0, false)), Err(long));
        arrivals.post(10, 'c').unwrap();
        arrivals.part_received(1, part(2, 1, true)).unwrap();
        assert_eq!(arrivals.part_received(1, part(2, 2, false)), Err(ArrivalError::BeyondLast));
    }

    #[test]
    fn arrivals_window_moves_with_the_oldest_message() {
        let mut arrivals = Arrivals::default();
        for number in 0..WINDOW {
            assert_eq!(arrivals.post(8, number), Ok((number, None)));
        }
        assert!(!arrivals.has_room());
        for number in 1..WINDOW {
            arrivals.part_received(8, part(number, 0, true)).unwrap().unwrap();
        }
        assert!(!arrivals.has_room());
        arrivals.part_received(8, part(0, 0, true)).unwrap().unwrap();
        assert!(arrivals.has_room());
        assert_eq!(arrivals.first(), WINDOW);
    }

    proptest! {
        /// However parts are mixed and repeated, each message is received once, and whole.
        #[test]
        fn arrivals_count_each_message_once(
            order in proptest::collection::vec((0u64..6, 0u32..5), 60..200),
        ) {
            let mut arrivals = Arrivals::default();
            for number in 0..6u64 {
                arrivals.post(100, number).unwrap();
            }
            let mut received = Vec::new();
            let rest = (0..6).flat_map(|message| (0..5).map(move |index| (message, index)));
            for (message, index) in order.into_iter().chain(rest) {
                if let Some(all) = arrivals.part_received(10, part(message, index, index == 4)).unwrap() {
                    prop_assert_eq!(all.length, 50);
                    prop_assert_eq!(all.posted, message);
                    received.push(message);
                }
            }
            received.sort_unstable();
            prop_assert_eq!(received, vec![0, 1, 2, 3, 4, 5]);
        }

        #[test]
        fn arrivals_take_any_immediate_data_without_panic(numbers in proptest::collection::vec(any::<u32>(), 0..100)) {
            let mut arrivals = Arrivals::default();
            for number in numbers {
                let _ = arrivals.part_received(5, number);
                if arrivals.has_room() {
                    let _ = arrivals.post(u64::MAX, ());
                }
            }
        }
    }
}
