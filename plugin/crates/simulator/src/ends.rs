//! What both ends of a connection see, and what must hold for it.

use std::collections::{BTreeMap, BTreeSet};

/// Messages of a connection as its users see them. It checks that each byte comes into its place
/// once.
#[derive(Debug, Default)]
pub(crate) struct Ends {
    /// Messages that the sender's user has sent, and those whose memory it has back.
    pub(crate) pushed: u64,
    pub(crate) sent: u64,
    /// Buffers that the receiver's user has posted, and messages that it has, in order.
    pub(crate) posted: u64,
    pub(crate) received: u64,
    /// Bytes of complete messages.
    pub(crate) bytes: u64,
    /// What must hold and does not.
    pub(crate) failure: Option<String>,
    /// Bytes in place, of messages that are not complete.
    places: BTreeMap<u64, Vec<(u64, u64)>>,
    /// Messages that are complete before one that is not.
    early: BTreeSet<u64>,
}

impl Ends {
    /// Something does not hold. The first one is kept.
    pub(crate) fn fail(&mut self, what: String) {
        self.failure.get_or_insert(what);
    }

    /// These bytes of a message were written into its buffer.
    pub(crate) fn place(&mut self, message: u64, start: u64, end: u64) {
        if message < self.received || self.early.contains(&message) {
            return self.fail(format!("message {message} was written to after it was complete"));
        }
        let places = self.places.entry(message).or_default();
        let index = places.partition_point(|place| place.0 < start);
        let is_free = places.get(index).is_none_or(|next| next.0 >= end)
            && index.checked_sub(1).is_none_or(|before| places[before].1 <= start);
        if let Some(before) = index.checked_sub(1)
            && is_free
            && places[before].1 == start
        {
            places[before].1 = end;
        } else {
            places.insert(index, (start, end));
        }
        if !is_free {
            self.fail(format!("bytes {start} to {end} of message {message} came twice"));
        }
    }

    /// A message of this length is reported as complete.
    pub(crate) fn complete(&mut self, message: u64, bytes: u64) {
        let mut places = self.places.remove(&message).unwrap_or_default();
        places.dedup_by(|next, before| {
            let follows = before.1 == next.0;
            before.1 = if follows { next.1 } else { before.1 };
            follows
        });
        if places != [(0, bytes)] {
            let place = format!("message {message} of {bytes} bytes is complete with {places:?}");
            self.fail(place);
        }
        if message < self.received || !self.early.insert(message) {
            self.fail(format!("message {message} is complete twice"));
        }
        self.bytes += bytes;
        while self.early.remove(&self.received) {
            self.received += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_is_complete_with_each_byte_once() {
        let mut ends = Ends::default();
        ends.place(1, 0, 10);
        ends.place(0, 5, 10);
        ends.place(0, 0, 5);
        ends.complete(1, 10);
        assert_eq!((ends.received, ends.bytes), (0, 10));
        ends.complete(0, 10);
        assert_eq!((ends.received, ends.bytes, ends.failure), (2, 20, None));
    }

    #[test]
    fn bytes_that_come_twice_or_not_at_all_are_failures() {
        let failure = |places: &[(u64, u64)], is_late| {
            let mut ends = Ends::default();
            places.iter().for_each(|(start, end)| ends.place(0, *start, *end));
            ends.complete(0, 10);
            if is_late {
                ends.place(0, 0, 5);
            }
            ends.failure.unwrap()
        };
        assert!(failure(&[(0, 5)], false).contains("complete with [(0, 5)]"));
        assert!(failure(&[(0, 6), (5, 10)], false).contains("came twice"));
        assert!(failure(&[(0, 10), (3, 4)], false).contains("came twice"));
        assert!(failure(&[(0, 10)], true).contains("after it was complete"));
    }
}
