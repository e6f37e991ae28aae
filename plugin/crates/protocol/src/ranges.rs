//! A set of byte ranges of a message.

/// Disjoint ranges, in order, none touching the next. Few in practice: one per flow and gap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ranges(Vec<(u64, u64)>);

impl Ranges {
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Number of ranges.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// Whether `at` is in the set, and up to where that holds, at most `end`.
    pub(crate) fn run(&self, at: u64, end: u64) -> (bool, u64) {
        let next = self.0.partition_point(|(_, stop)| *stop <= at);
        match self.0.get(next) {
            Some((start, stop)) if *start <= at => (true, end.min(*stop)),
            Some((start, _)) => (false, end.min(*start)),
            None => (false, end),
        }
    }

    /// Adds a range of which nothing is in the set.
    pub(crate) fn add(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        let next = self.0.partition_point(|(_, stop)| *stop < start);
        let touches_before = self.0.get(next).is_some_and(|(_, stop)| *stop == start);
        let after = next + usize::from(touches_before);
        let touches_after = self.0.get(after).is_some_and(|(begin, _)| *begin == end);
        match (touches_before, touches_after) {
            (false, false) => self.0.insert(next, (start, end)),
            (true, false) => self.0[next].1 = end,
            (false, true) => self.0[after].0 = start,
            (true, true) => {
                self.0[next].1 = self.0[after].1;
                self.0.remove(after);
            }
        }
    }

    /// Removes a range, all of which is in the set.
    pub(crate) fn remove(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        let index = self.0.partition_point(|(_, stop)| *stop <= start);
        let Some((begin, stop)) = self.0.get(index).copied() else { return };
        debug_assert!(begin <= start && end <= stop);
        match (begin < start, end < stop) {
            (false, false) => {
                self.0.remove(index);
            }
            (true, false) => self.0[index].1 = start,
            (false, true) => self.0[index].0 = end,
            (true, true) => {
                self.0[index].1 = start;
                self.0.insert(index + 1, (end, stop));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Behaves like an array of flags.
        #[test]
        fn ranges_behave_like_a_set_of_bytes(steps in proptest::collection::vec((0u64..64, 0u64..64), 1..100)) {
            let mut ranges = Ranges::default();
            let mut flags = [false; 64];
            for (a, b) in steps {
                let (start, end) = (a.min(b), a.max(b));
                let mut at = start;
                while at < end {
                    let (inside, stop) = ranges.run(at, end);
                    prop_assert!(at < stop && stop <= end);
                    for flag in &mut flags[at as usize..stop as usize] {
                        prop_assert_eq!(*flag, inside);
                        *flag = !inside;
                    }
                    if inside { ranges.remove(at, stop) } else { ranges.add(at, stop) }
                    at = stop;
                }
                for pair in ranges.0.windows(2) {
                    prop_assert!(pair[0].1 < pair[1].0);
                }
                prop_assert!(ranges.0.iter().all(|(start, stop)| start < stop));
            }
        }
    }
}
