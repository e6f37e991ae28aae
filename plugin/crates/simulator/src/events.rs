//! What happens when, in virtual time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A time in nanoseconds since the simulation began.
pub(crate) type Time = u64;

/// A microsecond.
pub(crate) const MICROSECOND: Time = 1000;
/// A millisecond.
pub(crate) const MILLISECOND: Time = 1_000_000;
/// A second.
pub(crate) const SECOND: Time = 1_000_000_000;

/// Events in the order of their times. Those of the same time come in the order in which they were
/// added, so a run is the same each time.
#[derive(Debug)]
pub(crate) struct Events<E> {
    heap: BinaryHeap<Reverse<Entry<E>>>,
    added: u64,
}

#[derive(Debug)]
struct Entry<E> {
    at: Time,
    number: u64,
    event: E,
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.number) == (other.at, other.number)
    }
}

impl<E> Eq for Entry<E> {}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

impl<E> Default for Events<E> {
    fn default() -> Self {
        Self { heap: BinaryHeap::new(), added: 0 }
    }
}

impl<E> Events<E> {
    /// This happens then.
    pub(crate) fn add(&mut self, at: Time, event: E) {
        self.added += 1;
        self.heap.push(Reverse(Entry { at, number: self.added, event }));
    }

    /// When the next event happens.
    pub(crate) fn next_time(&self) -> Option<Time> {
        self.heap.peek().map(|Reverse(entry)| entry.at)
    }

    /// Takes out the next event.
    pub(crate) fn pop(&mut self) -> Option<(Time, E)> {
        self.heap.pop().map(|Reverse(entry)| (entry.at, entry.event))
    }

    /// Number of events that are still to happen.
    pub(crate) fn len(&self) -> usize {
        self.heap.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_the_order_of_time_and_then_of_addition() {
        let mut events = Events::default();
        for (at, event) in [(5, 'c'), (3, 'a'), (5, 'd'), (3, 'b')] {
            events.add(at, event);
        }
        assert_eq!((events.next_time(), events.len()), (Some(3), 4));
        let all: Vec<_> = std::iter::from_fn(|| events.pop()).collect();
        assert_eq!(all, [(3, 'a'), (3, 'b'), (5, 'c'), (5, 'd')]);
    }
}
