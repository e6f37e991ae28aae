//! An ordered set of timers.

use std::collections::{BTreeSet, HashMap};

/// At most one timer per token. Each call makes O(log n) comparisons.
#[derive(Debug)]
pub(crate) struct Timers<T> {
    by_time: BTreeSet<(T, u64)>,
    times: HashMap<u64, T>,
}

impl<T> Default for Timers<T> {
    fn default() -> Self {
        Self { by_time: BTreeSet::new(), times: HashMap::new() }
    }
}

impl<T: Copy + Ord> Timers<T> {
    /// Sets the timer of this token and replaces its former one.
    pub(crate) fn set(&mut self, token: u64, at: T) {
        if let Some(before) = self.times.insert(token, at) {
            self.by_time.remove(&(before, token));
        }
        self.by_time.insert((at, token));
    }

    /// Removes the timer of this token, if there is one.
    pub(crate) fn cancel(&mut self, token: u64) {
        if let Some(at) = self.times.remove(&token) {
            self.by_time.remove(&(at, token));
        }
    }

    /// When the next timer is due.
    pub(crate) fn next(&self) -> Option<T> {
        self.by_time.first().map(|(at, _)| *at)
    }

    /// Removes the earliest timer that is due at this time. Returns its token.
    pub(crate) fn pop_due(&mut self, now: T) -> Option<u64> {
        let (_, token) = *self.by_time.first().filter(|(at, _)| *at <= now)?;
        self.by_time.pop_first();
        self.times.remove(&token);
        Some(token)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::cmp::Ordering;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    thread_local! {
        static COMPARISONS: Cell<u64> = const { Cell::new(0) };
    }

    /// A time that counts how often it is compared.
    #[derive(Clone, Copy, Debug)]
    struct Counted(u64);

    impl Ord for Counted {
        fn cmp(&self, other: &Self) -> Ordering {
            COMPARISONS.set(COMPARISONS.get() + 1);
            self.0.cmp(&other.0)
        }
    }

    impl PartialOrd for Counted {
        fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
            Some(self.cmp(other))
        }
    }

    impl PartialEq for Counted {
        fn eq(&self, other: &Self) -> bool {
            self.cmp(other) == Ordering::Equal
        }
    }

    impl Eq for Counted {}

    fn due(timers: &mut Timers<u64>, now: u64) -> Vec<u64> {
        std::iter::from_fn(|| timers.pop_due(now)).collect()
    }

    #[test]
    fn timers_are_due_in_the_order_of_their_times() {
        let mut timers = Timers::default();
        [(1, 30), (2, 10), (3, 20), (4, 40)].iter().for_each(|(token, at)| timers.set(*token, *at));
        assert_eq!((timers.next(), due(&mut timers, 9)), (Some(10), vec![]));
        assert_eq!(due(&mut timers, 30), [2, 3, 1]);
        assert_eq!((timers.next(), due(&mut timers, 40)), (Some(40), vec![4]));
        assert_eq!((timers.next(), due(&mut timers, u64::MAX)), (None, vec![]));
    }

    #[test]
    fn timer_is_replaced_and_cancelled() {
        let mut timers = Timers::default();
        timers.set(1, 10);
        timers.set(1, 30);
        assert_eq!((timers.next(), due(&mut timers, 29)), (Some(30), vec![]));
        timers.set(1, 20);
        assert_eq!(due(&mut timers, 29), [1], "once only");
        assert_eq!(due(&mut timers, 30), Vec::<u64>::new());
        timers.set(2, 10);
        timers.cancel(2);
        timers.cancel(3);
        assert_eq!((timers.next(), due(&mut timers, 30)), (None, vec![]));
    }

    /// Comparisons of this many timers that are set at once, and again whenever they are due.
    fn comparisons(count: u64) -> u64 {
        const ROUNDS: u64 = 4;
        let mut timers = Timers::default();
        (0..count).for_each(|token| timers.set(token, Counted(token % 97)));
        COMPARISONS.set(0);
        for round in 1..=ROUNDS {
            let (now, mut fired) = (Counted(round * 100), 0);
            while timers.next().is_some()
                && let Some(token) = timers.pop_due(now)
            {
                timers.set(token, Counted(round * 100 + 1 + token % 97));
                fired += 1;
            }
            assert_eq!(fired, count);
        }
        COMPARISONS.get()
    }

    #[test]
    fn many_timers_cost_little_more_than_few_each() {
        let (few, many) = (comparisons(1000), comparisons(4000));
        assert!(many < 6 * few, "{many} comparisons in place of {few} for 4 times as many timers");
    }

    #[derive(Clone, Debug)]
    enum Step {
        Set(u64, u64),
        Cancel(u64),
        Pop(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let (token, time) = (0..8u64, 0..50u64);
        prop_oneof![
            (token.clone(), time.clone()).prop_map(|(token, at)| Step::Set(token, at)),
            token.prop_map(Step::Cancel),
            time.prop_map(Step::Pop),
        ]
    }

    proptest! {
        #[test]
        fn timers_are_those_of_a_list(steps in vec(step(), 0..200)) {
            let (mut timers, mut list) = (Timers::default(), Vec::<(u64, u64)>::new());
            for step in steps {
                match step {
                    Step::Set(token, at) => {
                        list.retain(|(_, other)| *other != token);
                        list.push((at, token));
                        timers.set(token, at);
                    }
                    Step::Cancel(token) => {
                        list.retain(|(_, other)| *other != token);
                        timers.cancel(token);
                    }
                    Step::Pop(now) => {
                        let first = list.iter().copied().min().filter(|(at, _)| *at <= now);
                        list.retain(|timer| Some(*timer) != first);
                        prop_assert_eq!(timers.pop_due(now), first.map(|(_, token)| token));
                    }
                }
                prop_assert_eq!(timers.next(), list.iter().map(|(at, _)| *at).min());
            }
        }
    }
}
