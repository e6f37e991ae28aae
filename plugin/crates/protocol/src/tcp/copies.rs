//! Where the copies of small messages are kept until the peer acknowledges them.

use std::collections::VecDeque;

/// Maximum number of messages. Receivers leave fewer unacknowledged, so that room becomes free.
const MAX_MESSAGES: usize = 256;
/// Bytes of a block of memory. A longer message has one of its own length.
pub const COPY_BLOCK_BYTES: usize = 32 << 10;
/// Bytes of the first block, if that has room for several messages. Most connections have few short messages at a time, and
/// there may be thousands of them.
const FIRST_BLOCK_BYTES: usize = 4 << 10;

/// The places of one connection's copies, in blocks of memory that its user has.
///
/// [`CopyRings::reserve`] says where a message is to be copied, or that another block is needed. After each call the user
/// takes back the blocks that are not needed any more ([`CopyRings::next_unused`]).
#[derive(Debug)]
pub struct CopyRings {
    /// Maximum bytes of the messages, and of more than one block.
    bytes: usize,
    /// By block. Messages go to the first with room, so that later ones become empty and are given back.
    rings: Vec<Option<Ring>>,
    /// Blocks that are not needed any more.
    unused: Vec<usize>,
    /// Bytes and number of the messages, and bytes of the blocks.
    used: usize,
    messages: usize,
    held: usize,
}

/// Messages in one block. Room becomes free when the oldest ones are released.
#[derive(Debug)]
struct Ring {
    /// Bytes of the block.
    length: usize,
    /// Where the next message is stored.
    next: usize,
    /// Oldest first.
    stored: VecDeque<StoredCopy>,
    /// Number of the oldest.
    first: u64,
}

#[derive(Debug)]
struct StoredCopy {
    start: usize,
    length: usize,
    released: bool,
}

/// The copy of a message, to be released.
#[derive(Debug, PartialEq, Eq)]
pub struct CopyId {
    block: usize,
    number: u64,
}

/// The outcome of [`CopyRings::reserve`].
#[derive(Debug, PartialEq, Eq)]
pub enum CopyReservation {
    /// The message has this place until it is released.
    Place {
        /// Number of the block.
        block: usize,
        /// First byte in the block.
        start: usize,
        /// Releases it.
        copy: CopyId,
    },
    /// There is room in another block of this many bytes ([`CopyRings::add_block`]).
    NeedsBlock(usize),
    /// There is no room before others are released.
    Full,
}

impl CopyRings {
    /// For this number of bytes.
    pub fn new(bytes: usize) -> Self {
        Self { bytes, rings: Vec::new(), unused: Vec::new(), used: 0, messages: 0, held: 0 }
    }

    /// Whether the peer should acknowledge soon: room for a message of this length is short, or will be.
    pub fn is_short(&self, length: u64) -> bool {
        self.used as u64 + length > self.bytes as u64 / 2 || self.messages >= MAX_MESSAGES / 2
    }

    /// A place for a message of this length.
    pub fn reserve(&mut self, length: usize) -> CopyReservation {
        if self.messages >= MAX_MESSAGES || length > self.bytes - self.used {
            return CopyReservation::Full;
        }
        let mut rings = self.rings.iter_mut().enumerate();
        let place = rings.find_map(|(block, ring)| Some((block, ring.as_mut()?.store(length)?)));
        if let Some((block, (start, number))) = place {
            self.used += length;
            self.messages += 1;
            return CopyReservation::Place { block, start, copy: CopyId { block, number } };
        }
        // Those without messages are too short for this one.
        (0..self.rings.len()).for_each(|block| self.drop_if_empty(block));
        let is_first = self.held == 0 && self.bytes >= 2 * COPY_BLOCK_BYTES;
        let length = match is_first && length <= FIRST_BLOCK_BYTES / 4 {
            true => FIRST_BLOCK_BYTES,
            false => length.max(COPY_BLOCK_BYTES),
        };
        if self.held > 0 && self.held + length > self.bytes {
            return CopyReservation::Full;
        }
        CopyReservation::NeedsBlock(length)
    }

    /// There is another block of this many bytes. Returns its number, which no block has that is in use.
    pub fn add_block(&mut self, length: usize) -> usize {
        self.held += length;
        let is_free = |block: &usize| self.rings[*block].is_none() && !self.unused.contains(block);
        let free = (0..self.rings.len()).find(is_free);
        let block = free.unwrap_or(self.rings.len());
        if block == self.rings.len() {
            self.rings.push(None);
        }
        self.rings[block] = Some(Ring { length, next: 0, stored: VecDeque::new(), first: 0 });
        block
    }

    /// The copy is not needed any more.
    pub fn release(&mut self, copy: CopyId) {
        let Some(Some(ring)) = self.rings.get_mut(copy.block) else { return };
        for oldest in ring.release(copy.number) {
            self.used -= oldest.length;
            self.messages -= 1;
        }
        // One block is kept while messages follow each other, and no short one beside it.
        let is_short = ring.length < COPY_BLOCK_BYTES;
        let is_block = |ring: &Ring| ring.length >= COPY_BLOCK_BYTES;
        let others = if is_short { &self.rings[..] } else { &self.rings[..copy.block] };
        if others.iter().flatten().any(is_block) {
            self.drop_if_empty(copy.block);
        }
    }

    /// Drops what an idle connection does not need.
    pub fn shrink(&mut self) {
        if self.messages == 0 {
            (0..self.rings.len()).for_each(|block| self.drop_if_empty(block));
        }
    }

    /// A block that is not needed any more, until there is none.
    pub fn next_unused(&mut self) -> Option<usize> {
        self.unused.pop()
    }

    fn drop_if_empty(&mut self, block: usize) {
        if let Some(ring) = self.rings[block].take_if(|ring| ring.stored.is_empty()) {
            self.held -= ring.length;
            self.unused.push(block);
        }
    }
}

impl Ring {
    /// Where a message of this length is stored, and its number, if there is room.
    fn store(&mut self, length: usize) -> Option<(usize, u64)> {
        let start = self.room_for(length)?;
        self.next = start + length;
        self.stored.push_back(StoredCopy { start, length, released: false });
        Some((start, self.first + self.stored.len() as u64 - 1))
    }

    fn room_for(&self, length: usize) -> Option<usize> {
        let Some(oldest) = self.stored.front().map(|stored| stored.start) else {
            return (length <= self.length).then_some(0);
        };
        if self.next < oldest {
            (length < oldest - self.next).then_some(self.next)
        } else if length <= self.length - self.next {
            Some(self.next)
        } else {
            (length < oldest).then_some(0)
        }
    }

    /// Removes the oldest copies that are not needed any more, now that this one is not.
    fn release(&mut self, number: u64) -> impl Iterator<Item = StoredCopy> + '_ {
        let index = number.checked_sub(self.first).map(|index| index as usize);
        if let Some(stored) = index.and_then(|index| self.stored.get_mut(index)) {
            stored.released = true;
        }
        std::iter::from_fn(|| {
            self.stored.front().filter(|stored| stored.released)?;
            self.first += 1;
            self.stored.pop_front()
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The blocks, and the copies that are not released.
    struct User {
        rings: CopyRings,
        /// Lengths of the blocks, by number.
        blocks: Vec<Option<usize>>,
        copies: VecDeque<Copy>,
        max_bytes: usize,
    }

    struct Copy {
        block: usize,
        start: usize,
        length: usize,
        id: CopyId,
    }

    impl User {
        fn new(max_bytes: usize) -> Self {
            let rings = CopyRings::new(max_bytes);
            Self { rings, blocks: Vec::new(), copies: VecDeque::new(), max_bytes }
        }

        fn held(&self) -> usize {
            self.blocks.iter().flatten().sum()
        }

        /// Reserves a place, and compares it with all others. Returns whether there was one.
        fn reserve(&mut self, length: usize) -> bool {
            loop {
                match self.rings.reserve(length) {
                    CopyReservation::Place { block, start, copy: id } => {
                        let room = self.blocks[block].expect("a block that is there");
                        assert!(start + length <= room, "outside of its block");
                        let is_apart = |other: &Copy| {
                            other.block != block
                                || other.start + other.length <= start
                                || start + length <= other.start
                        };
                        assert!(self.copies.iter().all(is_apart), "over another copy");
                        self.copies.push_back(Copy { block, start, length, id });
                        return true;
                    }
                    CopyReservation::NeedsBlock(bytes) => {
                        assert!(bytes >= length);
                        self.take_back();
                        let block = self.rings.add_block(bytes);
                        self.blocks.resize(self.blocks.len().max(block + 1), None);
                        assert_eq!(self.blocks[block].replace(bytes), None, "it is in use");
                        assert!(self.held() <= self.max_bytes.max(bytes), "too many blocks");
                    }
                    CopyReservation::Full => {
                        self.take_back();
                        return false;
                    }
                }
            }
        }

        /// Releases one of the oldest copies.
        fn release(&mut self, at: usize) {
            let Some(copy) = self.copies.remove(at) else { return };
            self.rings.release(copy.id);
            self.take_back();
        }

        fn take_back(&mut self) {
            while let Some(block) = self.rings.next_unused() {
                assert!(self.copies.iter().all(|copy| copy.block != block), "it has a copy");
                assert!(self.blocks[block].take().is_some(), "it is not there");
            }
        }
    }

    #[test]
    fn copies_reuse_released_room() {
        for (bytes, least) in [(1 << 20, 80), (COPY_BLOCK_BYTES, 2), (20_000, 2)] {
            let mut user = User::new(bytes);
            for round in 0..1000 {
                while user.reserve(10_000) {}
                let kept = user.copies.len();
                assert!(kept >= least, "{kept} messages fit into {bytes}");
                for step in 0..(1 + round % 100).min(kept) {
                    // Not always in order.
                    user.release((round + step) % user.copies.len().min(3));
                }
            }
        }
    }

    #[test]
    fn copies_are_short_of_room_before_it_is_full() {
        for (room, length) in [(1 << 20, 1), (1 << 15, 64), (1 << 15, 8256)] {
            let mut user = User::new(room);
            assert!(!user.rings.is_short(length as u64));
            let mut short = 0;
            while user.reserve(length) {
                short += usize::from(user.rings.is_short(length as u64));
            }
            assert!(short > 0, "{length} bytes in {room}");
        }
        assert!(CopyRings::new(1000).is_short(501), "there may never be room for it");
    }

    #[test]
    fn copies_of_few_short_messages_take_a_short_block() {
        let mut user = User::new(1 << 20);
        (0..3).for_each(|_| assert!(user.reserve(1024)));
        assert_eq!(user.held(), FIRST_BLOCK_BYTES);
        (0..3).for_each(|_| user.release(0));
        // Longer ones follow: it does not stay beside their block, and theirs stays.
        for length in [16_384, 1024] {
            assert!(user.reserve(length));
            assert_eq!(user.held(), COPY_BLOCK_BYTES);
            user.release(0);
        }
        assert_eq!((user.blocks.len(), user.held()), (1, COPY_BLOCK_BYTES));
    }

    #[test]
    fn copies_keep_a_block_for_short_messages_that_follow_each_other() {
        let mut user = User::new(1 << 20);
        for burst in 0..5 {
            for _ in 0..12 {
                assert!(user.reserve(1024));
                assert!(burst == 0 || user.held() == COPY_BLOCK_BYTES, "{} held", user.held());
            }
            (0..12).for_each(|_| user.release(0));
        }
        user.rings.shrink();
        user.take_back();
        assert_eq!(user.held(), 0);
    }

    #[test]
    fn copies_are_bounded_in_number() {
        let mut user = User::new(1 << 20);
        assert_eq!((0..1000).filter(|_| user.reserve(1)).count(), MAX_MESSAGES);
    }

    proptest! {
        /// No place is given twice, and no block is taken back that has a copy.
        #[test]
        fn copies_behave_like_separate_memories(
            bytes in prop_oneof![Just(20_000usize), Just(COPY_BLOCK_BYTES), Just(200_000usize)],
            steps in proptest::collection::vec(
                (0u8..4, prop_oneof![0usize..300, 4000usize..20_000, 30_000usize..70_000]),
                1..300,
            ),
        ) {
            let mut user = User::new(bytes);
            for (step, length) in steps {
                match step {
                    0 | 1 => {
                        let live: usize = user.copies.iter().map(|copy| copy.length).sum();
                        let has_place = user.reserve(length);
                        prop_assert!(!has_place || live + length <= bytes);
                        let is_alone = user.copies.is_empty();
                        prop_assert!(has_place || !is_alone || length > bytes);
                    }
                    2 => user.release(length % user.copies.len().clamp(1, 4)),
                    _ => {
                        user.rings.shrink();
                        user.take_back();
                        prop_assert!(!user.copies.is_empty() || user.held() == 0);
                    }
                }
            }
            while !user.copies.is_empty() {
                user.release(0);
            }
            user.rings.shrink();
            user.take_back();
            prop_assert_eq!(user.held(), 0);
            prop_assert_eq!((user.rings.used, user.rings.messages, user.rings.held), (0, 0, 0));
        }
    }
}
