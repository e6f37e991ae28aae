//! Which bytes of which message have arrived.

use std::collections::{BTreeMap, VecDeque};

use crate::ChunkHeader;

/// Why a chunk cannot be taken. Each means that the peer and this side disagree, so the
/// connection cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReassemblyError {
    /// The message does not fit into the buffer posted for it.
    #[error(
        "message {message} truncated: the peer sends {total} bytes, the receive buffer holds {capacity}"
    )]
    TooLong {
        /// Number of the message.
        message: u64,
        /// What the peer sends, in bytes.
        total: u64,
        /// What was posted, in bytes.
        capacity: u64,
    },
    /// Two chunks of a message disagree on its length.
    #[error("message {message}: a chunk says {total} bytes in all, an earlier one {earlier}")]
    TotalChanged {
        /// Number of the message.
        message: u64,
        /// What this chunk says.
        total: u64,
        /// What an earlier chunk said.
        earlier: u64,
    },
    /// These bytes came before.
    #[error("message {message}: bytes {start}..{end} arrived twice")]
    Duplicate {
        /// Number of the message.
        message: u64,
        /// First byte of the chunk.
        start: u64,
        /// One past its last byte.
        end: u64,
    },
}

/// What to do with a chunk whose header has arrived.
#[derive(Debug, PartialEq, Eq)]
pub enum Claim<T> {
    /// Its bytes belong at `header.offset` of the buffer that was posted with this value.
    Deliver(T),
    /// No buffer is posted for its message yet: ask again after the next post.
    NotPosted,
}

/// A message whose last byte has arrived.
#[derive(Debug, PartialEq, Eq)]
pub struct Completed<T> {
    /// What its buffer was posted with.
    pub payload: T,
    /// Its length in bytes.
    pub total: u64,
}

/// The receive buffers posted on one connection and what has arrived in them.
///
/// The n-th posted buffer takes the n-th message. For each chunk, [`Reassembly::claim`] reserves
/// its range and [`Reassembly::arrived`] reports that the bytes are in place.
#[derive(Debug)]
pub struct Reassembly<T> {
    /// Posted and not complete, or complete behind one that is not.
    posted: VecDeque<Incoming<T>>,
    /// Number of the front message.
    first: u64,
}

#[derive(Debug)]
struct Incoming<T> {
    capacity: u64,
    /// Known from the first chunk on.
    total: Option<u64>,
    /// Claimed ranges, start to end, disjoint and merged.
    claimed: BTreeMap<u64, u64>,
    arrived: u64,
    done: bool,
    payload: T,
}

impl<T: Clone> Default for Reassembly<T> {
    fn default() -> Self {
        Self { posted: VecDeque::new(), first: 0 }
    }
}

impl<T: Clone> Reassembly<T> {
    /// Adds a buffer of `capacity` bytes for the next message; returns that message's number.
    pub fn post(&mut self, capacity: u64, payload: T) -> u64 {
        self.posted.push_back(Incoming {
            capacity,
            total: None,
            claimed: BTreeMap::new(),
            arrived: 0,
            done: false,
            payload,
        });
        self.first + self.posted.len() as u64 - 1
    }

    /// Reserves the range of a chunk whose header has arrived.
    ///
    /// # Errors
    /// [`ReassemblyError`] when the chunk does not fit the posted buffer or came before.
    pub fn claim(&mut self, chunk: &ChunkHeader) -> Result<Claim<T>, ReassemblyError> {
        let ChunkHeader { message, offset: start, total, .. } = *chunk;
        let end = chunk.end();
        let duplicate = ReassemblyError::Duplicate { message, start, end };
        let Some(index) = message.checked_sub(self.first) else { return Err(duplicate) };
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        let Some(incoming) = self.posted.get_mut(index) else { return Ok(Claim::NotPosted) };
        if incoming.done {
            return Err(duplicate);
        }
        let capacity = incoming.capacity;
        if total > capacity {
            return Err(ReassemblyError::TooLong { message, total, capacity });
        }
        match incoming.total {
            None => incoming.total = Some(total),
            Some(earlier) if earlier != total => {
                return Err(ReassemblyError::TotalChanged { message, total, earlier });
            }
            Some(_) => {}
        }
        if !incoming.reserve(start, end) {
            return Err(duplicate);
        }
        Ok(Claim::Deliver(incoming.payload.clone()))
    }

    /// Tells that the bytes of a claimed chunk are in place. Returns the message when it is
    /// complete.
    pub fn arrived(&mut self, chunk: &ChunkHeader) -> Option<Completed<T>> {
        let index = usize::try_from(chunk.message.checked_sub(self.first)?).ok()?;
        let incoming = self.posted.get_mut(index)?;
        incoming.arrived += u64::from(chunk.length);
        let total = incoming.total?;
        if incoming.arrived < total || incoming.done {
            return None;
        }
        incoming.done = true;
        let completed = Completed { payload: incoming.payload.clone(), total };
        while self.posted.front().is_some_and(|incoming| incoming.done) {
            self.posted.pop_front();
            self.first += 1;
        }
        Some(completed)
    }

    /// Posted buffers whose message is not complete.
    pub fn outstanding(&self) -> usize {
        self.posted.iter().filter(|incoming| !incoming.done).count()
    }

    /// Bytes that outstanding messages still lack, as far as their lengths are known.
    pub fn missing_bytes(&self) -> u64 {
        self.posted.iter().filter_map(|incoming| Some(incoming.total? - incoming.arrived)).sum()
    }
}

impl<T> Incoming<T> {
    /// Adds a range unless it overlaps one that is there.
    fn reserve(&mut self, start: u64, end: u64) -> bool {
        if start == end {
            // Only an empty message has an empty chunk, and only one: it marks itself as seen.
            return self.claimed.insert(0, 0).is_none();
        }
        let before = self.claimed.range(..=start).next_back().map(|(s, e)| (*s, *e));
        let after = self.claimed.range(start..).next().map(|(s, e)| (*s, *e));
        if before.is_some_and(|(_, e)| e > start) || after.is_some_and(|(s, _)| s < end) {
            return false;
        }
        let mut merged = (start, end);
        if let Some((s, e)) = before
            && e == start
        {
            merged.0 = s;
        }
        if let Some((s, e)) = after
            && s == end
        {
            self.claimed.remove(&s);
            merged.1 = e;
        }
        self.claimed.insert(merged.0, merged.1);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Scheduler;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    fn chunk(message: u64, offset: u64, length: u32, total: u64) -> ChunkHeader {
        ChunkHeader { message, offset, length, total }
    }

    #[test]
    fn waits_for_the_post() {
        let mut reassembly = Reassembly::default();
        let header = chunk(0, 0, 10, 10);
        assert_eq!(reassembly.claim(&header), Ok(Claim::NotPosted));
        assert_eq!(reassembly.post(64, 'a'), 0);
        assert_eq!(reassembly.claim(&header), Ok(Claim::Deliver('a')));
        assert_eq!(reassembly.missing_bytes(), 10);
        assert_eq!(reassembly.arrived(&header), Some(Completed { payload: 'a', total: 10 }));
        assert_eq!(reassembly.outstanding(), 0);
        assert!(matches!(reassembly.claim(&header), Err(ReassemblyError::Duplicate { .. })));
    }

    #[test]
    fn too_long_a_message_is_refused_whole() {
        let mut reassembly = Reassembly::default();
        reassembly.post(100, ());
        assert_eq!(
            reassembly.claim(&chunk(0, 0, 101, 101)),
            Err(ReassemblyError::TooLong { message: 0, total: 101, capacity: 100 })
        );
        reassembly.claim(&chunk(0, 0, 100, 100)).unwrap();
    }

    #[test]
    fn overlaps_and_contradictions_are_refused() {
        let mut reassembly = Reassembly::default();
        reassembly.post(1024, ());
        reassembly.claim(&chunk(0, 256, 256, 1024)).unwrap();
        for (offset, length) in [(256, 256), (384, 128), (128, 256), (0, 1024), (384, 256)] {
            let refused = reassembly.claim(&chunk(0, offset, length, 1024));
            assert!(matches!(refused, Err(ReassemblyError::Duplicate { .. })), "{offset}");
        }
        let refused = reassembly.claim(&chunk(0, 0, 128, 512));
        assert!(matches!(refused, Err(ReassemblyError::TotalChanged { .. })));
        reassembly.claim(&chunk(0, 0, 256, 1024)).unwrap();
        reassembly.claim(&chunk(0, 512, 512, 1024)).unwrap();
    }

    #[test]
    fn an_empty_message_arrives_once() {
        let mut reassembly = Reassembly::default();
        reassembly.post(8, 'a');
        reassembly.post(8, 'b');
        let second = chunk(1, 0, 0, 0);
        assert_eq!(reassembly.claim(&second), Ok(Claim::Deliver('b')));
        assert!(reassembly.claim(&second).is_err());
        assert_eq!(reassembly.arrived(&second), Some(Completed { payload: 'b', total: 0 }));
        assert!(reassembly.claim(&second).is_err());
    }

    proptest! {
        /// Whatever flows pull which chunks, whatever flow the receiver hears first, and however
        /// late buffers are posted: each byte arrives once, in its place.
        #[test]
        fn any_interleaving_delivers_each_byte_once(
            totals in proptest::collection::vec(0u64..3000, 1..12),
            flows in 1usize..9,
            seed: u64,
        ) {
            let mut scheduler = Scheduler::default();
            let mut reassembly = Reassembly::default();
            for (index, total) in totals.iter().enumerate() {
                scheduler.push(*total, index);
            }
            let mut wires: Vec<VecDeque<ChunkHeader>> = vec![VecDeque::new(); flows];
            let mut seen: Vec<Vec<u8>> = totals.iter().map(|t| vec![0; *t as usize]).collect();
            let mut posted = 0;
            let mut completed = 0;
            let mut random = seed;
            let mut choose = || {
                random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
                (random >> 33) as usize
            };
            while completed < totals.len() {
                if posted < totals.len() && choose().is_multiple_of(4) {
                    reassembly.post(totals[posted] + choose() as u64 % 5, posted);
                    posted += 1;
                }
                if let Some(chunk) = scheduler.next_chunk(choose() as u64 % 700) {
                    scheduler.written(&chunk.header);
                    wires[choose() % flows].push_back(chunk.header);
                }
                let flow = choose() % flows;
                let Some(header) = wires[flow].front().copied() else { continue };
                match reassembly.claim(&header) {
                    Ok(Claim::NotPosted) => {
                        prop_assert!(header.message >= posted as u64);
                    }
                    Ok(Claim::Deliver(index)) => {
                        prop_assert_eq!(index as u64, header.message);
                        for byte in header.offset..header.end() {
                            seen[index][byte as usize] += 1;
                        }
                        wires[flow].pop_front();
                        if let Some(done) = reassembly.arrived(&header) {
                            prop_assert_eq!(done.total, totals[done.payload]);
                            prop_assert!(seen[done.payload].iter().all(|times| *times == 1));
                            completed += 1;
                        }
                    }
                    Err(error) => prop_assert!(false, "{error}"),
                }
            }
        }
    }
}
