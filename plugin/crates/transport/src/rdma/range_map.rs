//! A map of ranges of addresses that finds one that covers given bytes.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

/// Minimum number of entries before those that have ended are removed.
const MIN_SWEEP: usize = 64;

/// Ranges of addresses with their objects, which others own. A search takes logarithmic time,
/// however ranges overlap.
pub(super) struct RangeMap<T> {
    /// The outermost ranges by their starts. None covers another one, so their ends are in the same
    /// order.
    outermost: BTreeMap<Start, Outermost<T>>,
    /// Number of entries, with those that are inside others.
    entries: usize,
    /// Number of entries at which those that have ended are removed.
    sweep_at: usize,
}

struct Outermost<T> {
    range: Range<T>,
    /// Ranges that this one covers. They are needed when it has ended.
    inside: Vec<Range<T>>,
}

struct Range<T> {
    start: u64,
    /// Address of the byte behind it.
    end: u64,
    object: Weak<T>,
}

impl<T> Range<T> {
    fn covers(&self, start: u64, end: u64) -> bool {
        self.start <= start && end <= self.end
    }

    fn has_ended(&self) -> bool {
        self.object.strong_count() == 0
    }
}

/// An address as a key, whose comparisons tests count.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Start(u64);

impl Ord for Start {
    fn cmp(&self, other: &Self) -> Ordering {
        #[cfg(test)]
        tests::COMPARISONS.with(|count| count.set(count.get() + 1));
        self.0.cmp(&other.0)
    }
}

impl PartialOrd for Start {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Default for RangeMap<T> {
    fn default() -> Self {
        Self { outermost: BTreeMap::new(), entries: 0, sweep_at: MIN_SWEEP }
    }
}

impl<T> RangeMap<T> {
    /// The object of a range that covers these bytes.
    pub(super) fn find(&mut self, start: u64, length: usize) -> Option<Arc<T>> {
        let end = start.checked_add(length as u64)?;
        loop {
            // Of the ranges that start early enough, the last one ends last.
            let (_, last) = self.outermost.range(..=Start(start)).next_back()?;
            if !last.range.covers(start, end) {
                return None;
            }
            if let Some(object) = last.range.object.upgrade() {
                return Some(object);
            }
            let key = Start(last.range.start);
            let inside = self.remove(key);
            self.insert_all(inside);
        }
    }

    /// Adds a range.
    pub(super) fn insert(&mut self, start: u64, length: usize, object: &Arc<T>) {
        let end = start.saturating_add(length as u64);
        if self.entries >= self.sweep_at {
            self.sweep();
        }
        self.insert_all(vec![Range { start, end, object: Arc::downgrade(object) }]);
    }

    fn insert_all(&mut self, mut pending: Vec<Range<T>>) {
        while let Some(range) = pending.pop() {
            if range.has_ended() {
                continue;
            }
            let before = self.outermost.range_mut(..=Start(range.start)).next_back();
            let covering = before.filter(|(_, last)| last.range.covers(range.start, range.end));
            if let Some((key, covering)) = covering {
                if covering.range.has_ended() {
                    let key = *key;
                    pending.push(range);
                    pending.extend(self.remove(key));
                } else {
                    covering.inside.push(range);
                    self.entries += 1;
                }
                continue;
            }
            let mut inside = Vec::new();
            while let Some((key, next)) = self.outermost.range(Start(range.start)..).next()
                && range.covers(next.range.start, next.range.end)
            {
                let key = *key;
                let Some(next) = self.outermost.remove(&key) else { break };
                inside.push(next.range);
                inside.extend(next.inside);
            }
            self.entries += 1;
            self.outermost.insert(Start(range.start), Outermost { range, inside });
        }
    }

    /// Removes an outermost range and returns those inside it.
    fn remove(&mut self, key: Start) -> Vec<Range<T>> {
        let inside = self.outermost.remove(&key).map(|removed| removed.inside).unwrap_or_default();
        self.entries -= 1 + inside.len();
        inside
    }

    /// Removes the ranges that have ended. It takes time for each entry, so it waits until there
    /// are twice as many.
    fn sweep(&mut self) {
        let all = std::mem::take(&mut self.outermost);
        self.entries = 0;
        let all = all.into_values().flat_map(|Outermost { range, mut inside }| {
            inside.push(range);
            inside
        });
        self.insert_all(all.collect());
        self.sweep_at = MIN_SWEEP.max(2 * self.entries);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        pub(super) static COMPARISONS: Cell<usize> = const { Cell::new(0) };
    }

    fn comparisons<R>(of: impl FnOnce() -> R) -> (R, usize) {
        let before = COMPARISONS.get();
        let result = of();
        (result, COMPARISONS.get() - before)
    }

    fn insert(map: &mut RangeMap<u64>, start: u64, length: usize) -> Arc<u64> {
        let object = Arc::new(start);
        map.insert(start, length, &object);
        object
    }

    /// A linear search would compare thousands.
    #[test]
    fn registrations_cost_a_message_a_logarithm_of_their_number() {
        const COUNT: u64 = 20_000;
        // A binary search needs 15 comparisons, a tree with some keys in each node a few times as
        // many.
        const MAX: usize = 15 * 8;
        let mut map = RangeMap::default();
        let (small, all) = comparisons(|| {
            let each = (0..COUNT).map(|at| insert(&mut map, at * 8192, 4096));
            each.collect::<Vec<_>>()
        });
        assert!(all <= COUNT as usize * 3 * MAX, "{all} comparisons for {COUNT} registrations");
        for at in (0..COUNT).step_by(777) {
            let (found, count) = comparisons(|| map.find(at * 8192 + 96, 4000));
            assert!(Arc::ptr_eq(&found.unwrap(), &small[at as usize]));
            assert!(count <= MAX, "{count} comparisons");
            let (found, count) = comparisons(|| map.find(at * 8192 + 97, 4000));
            assert!(found.is_none() && count <= MAX, "{count} comparisons");
        }
        // One that covers all others, and later ends.
        let large = insert(&mut map, 0, COUNT as usize * 8192);
        for at in [0, 1, COUNT / 2, COUNT - 1] {
            let (found, count) = comparisons(|| map.find(at * 8192 + 97, 4000));
            assert!(Arc::ptr_eq(&found.unwrap(), &large));
            assert!(count <= MAX, "{count} comparisons");
        }
        drop(large);
        assert!(map.find(97, 4000).is_none());
        let (found, count) = comparisons(|| map.find(8192, 4096));
        assert!(Arc::ptr_eq(&found.unwrap(), &small[1]) && count <= MAX, "{count} comparisons");
    }

    /// Compared with a search of all ranges, for random ranges that overlap, begin and end.
    #[test]
    fn overlapping_registrations_are_found_while_one_of_them_lasts() {
        let mut random = 1_u64;
        let mut next = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % below
        };
        let mut map = RangeMap::default();
        let mut live: Vec<(u64, usize, Arc<u64>)> = Vec::new();
        for _ in 0..20_000 {
            let (start, length) = (next(64), next(24) as usize);
            match next(5) {
                0 | 1 if live.len() < 40 => {
                    live.push((start, length, insert(&mut map, start, length)));
                }
                0..=2 if !live.is_empty() => {
                    live.swap_remove(next(live.len() as u64) as usize);
                }
                _ => {
                    let covers = |(from, room, _): &&(u64, usize, Arc<u64>)| {
                        *from <= start && start + length as u64 <= from + *room as u64
                    };
                    let found = map.find(start, length);
                    let expected = live.iter().filter(covers).count();
                    assert_eq!(found.is_some(), expected > 0, "{length} bytes from {start}");
                    let is_one = |found: &Arc<u64>| {
                        live.iter().filter(covers).any(|(.., object)| Arc::ptr_eq(found, object))
                    };
                    assert!(found.as_ref().is_none_or(is_one));
                }
            }
            assert!(map.entries <= 2 * MIN_SWEEP, "{} entries", map.entries);
        }
    }
}
