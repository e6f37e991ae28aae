//! Eager messages: small messages are sent without waiting for a buffer. They go to a ring in the
//! receiver's memory.
//!
//! The sender chooses each message's place in the ring, and the message's immediate data has it.
//! The receiver copies messages out as buffers are posted, and reports from time to time which have
//! left the ring. The ring is short: a connection whose receiver is ahead of its sender needs
//! little of it, and every connection has one, also when it is idle.

use std::collections::VecDeque;

use evenkeel_protocol::WINDOW;

/// Length in bytes of the longest eager message.
pub(crate) const EAGER_BYTES: usize = 4096;
/// Bytes of the ring.
pub(super) const RING_BYTES: usize = 4 * EAGER_BYTES;
/// Places are multiples of this number of bytes: a cache line.
const PLACE_BYTES: usize = 64;
/// Number of bytes, and of messages, that leave the ring before the sender is notified. What is
/// left is room for the longest message, wherever the free bytes begin.
const PROGRESS_BYTES: usize = RING_BYTES / 4;
const PROGRESS_MESSAGES: u64 = WINDOW / 4;

/// Calls `with` with a temporary buffer for an eager message. Most are short, and clearing room for
/// the longest would cost more than copying them.
pub(super) fn with_buffer<T>(length: usize, with: impl FnOnce(&mut [u8]) -> T) -> T {
    const SHORT: usize = 256;
    if length <= SHORT {
        with(&mut [0; SHORT][..length])
    } else {
        with(&mut [0; EAGER_BYTES][..length])
    }
}

/// The bytes of the ring that a message takes.
fn taken_bytes(length: usize) -> usize {
    length.next_multiple_of(PLACE_BYTES)
}

/// The place in the ring at this offset.
pub(super) fn place_of(offset: usize) -> u32 {
    (offset / PLACE_BYTES) as u32
}

/// The offset of a message that a peer has written to this place; `None` if it cannot be there.
pub(super) fn offset_of(place: u32, length: usize) -> Option<usize> {
    let offset = place as usize * PLACE_BYTES;
    let fits = length <= EAGER_BYTES && offset <= RING_BYTES && length <= RING_BYTES - offset;
    fits.then_some(offset)
}

/// The ring as the sender knows it. Its own copies of the messages are at the same offsets.
#[derive(Debug, Default)]
pub(super) struct EagerRing {
    /// The messages in the ring, by number, and the offsets where they begin.
    held: VecDeque<(u64, usize)>,
    /// Where the newest one ends.
    end: usize,
    /// Messages below this number have left the ring.
    left: u64,
}

impl EagerRing {
    /// Messages below this number have left the ring.
    pub(super) fn left(&self) -> u64 {
        self.left
    }

    /// The receiver has reported, or its credits show, that messages below this number have left
    /// the ring.
    pub(super) fn set_left(&mut self, below: u64) {
        self.left = self.left.max(below);
        while self.held.front().is_some_and(|(message, _)| *message < self.left) {
            self.held.pop_front();
        }
    }

    /// The offset for a message, which comes after all earlier ones; `None` if there is no room for
    /// it yet.
    pub(super) fn reserve(&mut self, message: u64, length: usize) -> Option<usize> {
        if message >= self.left + WINDOW {
            return None;
        }
        let bytes = taken_bytes(length);
        if bytes == 0 {
            return Some(0);
        }
        let start = match self.held.front() {
            None => 0,
            // The messages do not go round the end.
            Some((_, oldest)) if self.end > *oldest => match self.end + bytes <= RING_BYTES {
                true => self.end,
                false if bytes < *oldest => 0,
                false => return None,
            },
            Some((_, oldest)) if self.end + bytes < *oldest => self.end,
            Some(_) => return None,
        };
        self.held.push_back((message, start));
        self.end = start + bytes;
        Some(start)
    }
}

/// What the receiver has to report of the ring.
#[derive(Debug, Default)]
pub(super) struct RingProgress {
    /// Messages below this number are reported.
    reported: u64,
    /// Messages that were copied out and are not reported, and the bytes that they had in the ring.
    copied: Vec<(u64, usize)>,
    /// Whether the last report may have been lost.
    repeat: bool,
}

impl RingProgress {
    /// A message was copied out of the ring.
    pub(super) fn copied_out(&mut self, message: u64, length: usize) {
        self.copied.push((message, taken_bytes(length)));
    }

    /// The last report may have been lost with a queue pair.
    pub(super) fn repeat(&mut self) {
        self.repeat = true;
    }

    /// Whether to report that messages below this number have left the ring.
    pub(super) fn is_due(&self, left: u64) -> bool {
        if self.repeat || left >= self.reported + PROGRESS_MESSAGES {
            return true;
        }
        let copied = self.copied.iter().filter(|(message, _)| *message < left);
        copied.map(|(_, bytes)| bytes).sum::<usize>() >= PROGRESS_BYTES
    }

    /// It was reported.
    pub(super) fn reported(&mut self, left: u64) {
        (self.reported, self.repeat) = (left, false);
        self.copied.retain(|(message, _)| *message >= left);
    }
}

#[cfg(test)]
mod tests {
    use evenkeel_testkit::TestRng;

    use super::*;

    #[test]
    fn eager_ring_places_are_checked() {
        assert_eq!(offset_of(0, EAGER_BYTES), Some(0));
        assert_eq!(offset_of(place_of(128), 1), Some(128));
        assert_eq!(offset_of(place_of(RING_BYTES), 0), Some(RING_BYTES));
        assert_eq!(offset_of(place_of(RING_BYTES - 64), 64), Some(RING_BYTES - 64));
        assert_eq!(offset_of(place_of(RING_BYTES - 64), 65), None);
        assert_eq!(offset_of(0, EAGER_BYTES + 1), None);
        assert_eq!(offset_of(u32::MAX, 0), None);
    }

    #[test]
    fn eager_ring_holds_a_window_of_short_messages() {
        let mut ring = EagerRing::default();
        for message in 0..WINDOW {
            assert_eq!(ring.reserve(message, 8), Some(message as usize * PLACE_BYTES));
        }
        assert_eq!(ring.reserve(WINDOW, 8), None);
        ring.set_left(1);
        assert!(ring.reserve(WINDOW, 8).is_some());
        assert_eq!(ring.reserve(WINDOW + 1, 0), None, "empty ones too");
    }

    /// Messages of any length, copied out in any order: no two share bytes of the ring, and the
    /// sender never waits once the receiver has copied out all.
    #[test]
    fn eager_ring_never_stalls() {
        for seed in 0..200 {
            let mut rng = TestRng::new(seed);
            let (mut ring, mut progress) = (EagerRing::default(), RingProgress::default());
            // The messages in the ring: number, offset, length, and whether it was copied out.
            let mut inside: Vec<(u64, usize, usize, bool)> = Vec::new();
            for message in 0..300 {
                let length = *rng.choose(&[0, 8, 100, EAGER_BYTES - 64, EAGER_BYTES]);
                let length = if rng.one_in(3) { rng.index(EAGER_BYTES + 1) } else { length };
                let offset = loop {
                    if let Some(offset) = ring.reserve(message, length) {
                        break offset;
                    }
                    let waiting = inside.iter().filter(|(.., copied)| !copied).count();
                    assert!(waiting > 0, "seed {seed}: message {message} waits for nothing");
                    // The receiver copies one of the oldest ones out, and reports if it is due.
                    let at = rng.index(waiting.min(4));
                    let copied = inside.iter_mut().filter(|(.., copied)| !copied).nth(at).unwrap();
                    copied.3 = true;
                    progress.copied_out(copied.0, copied.2);
                    let first = inside.iter().find(|(.., copied)| !copied);
                    let left = first.map_or(message, |(number, ..)| *number);
                    if progress.is_due(left) {
                        progress.reported(left);
                        ring.set_left(left);
                        inside.retain(|(number, ..)| *number >= left);
                    }
                };
                assert_eq!(offset_of(place_of(offset), length), Some(offset));
                for (other, start, bytes, _) in &inside {
                    let apart = offset + length <= *start || start + bytes <= offset;
                    let is_apart = apart || length == 0 || *bytes == 0;
                    assert!(is_apart, "seed {seed}: messages {message} and {other}");
                }
                inside.push((message, offset, length, false));
            }
        }
    }
}
