//! Chooses which flows of a sender take its messages, and which one is woken for the next.

use std::cmp::Reverse;
use std::time::Duration;

/// A time, counted from any moment that stays the same.
type Time = Duration;

/// How long all flows are used after a time without progress and answers. By then a dead path is detected.
const ALL_FLOWS_TIME: Duration = Duration::from_secs(1);

/// The flows of a sender, by slots, of which there are 128.
///
/// A flow that finds nothing to send becomes *idle*. Whoever has a message takes an idle flow and wakes it. Of the flows that are
/// there, those are *used* that have carried most, as many as are worth their cost. The others take only what these cannot.
///
/// The methods that change which flows are used ask `carried` for the bytes that the flow in a slot has carried, and return
/// whether others are used from now on: some of them may be idle while there is work.
#[derive(Debug)]
pub struct FlowChoice {
    /// Flows (as bits) that are there.
    open: u128,
    /// Flows that take no more chunks.
    retiring: u128,
    idle: u128,
    used: u128,
    /// Number of flows to use, and its maximum.
    count: usize,
    max: usize,
    /// All are used until this time.
    all_until: Option<Time>,
}

impl FlowChoice {
    /// For a connection that keeps at most `max` flows, of which it uses `count`.
    pub fn new(count: usize, max: usize) -> Self {
        Self { open: 0, retiring: 0, idle: 0, used: 0, count, max, all_until: None }
    }

    /// There is a flow in this slot.
    pub fn handle_flow(&mut self, slot: usize, carried: impl Fn(usize) -> u64) -> bool {
        self.open |= 1 << slot;
        self.choose(carried)
    }

    /// The flow in this slot is removed.
    pub fn handle_ended(&mut self, slot: usize, carried: impl Fn(usize) -> u64) -> bool {
        let others = !(1_u128 << slot);
        self.open &= others;
        self.retiring &= others;
        self.idle &= others;
        self.choose(carried)
    }

    /// The flow in this slot takes no more chunks.
    pub fn retire(&mut self, slot: usize, carried: impl Fn(usize) -> u64) -> bool {
        self.retiring |= (1 << slot) & self.open;
        self.choose(carried)
    }

    /// The flow in this slot has found something to send, or nothing.
    pub fn set_idle(&mut self, slot: usize, is_idle: bool) {
        self.idle = self.idle & !(1 << slot) | (u128::from(is_idle) << slot) & self.open;
    }

    /// All flows have something to send.
    pub fn end_idle(&mut self) {
        self.idle = 0;
    }

    /// Takes an idle flow that may have work: with `all` any, otherwise one that is used.
    pub fn take_idle(&mut self, all: bool) -> Option<usize> {
        let idle = if all { self.idle } else { self.idle & self.used };
        let slot = (idle != 0).then(|| idle.trailing_zeros() as usize)?;
        self.idle &= !(1 << slot);
        Some(slot)
    }

    /// It is this time. `is_stuck`: nothing has moved for a while, and not all flows are answered. The dead one may be used and
    /// another would move, so for a while all are used.
    pub fn handle_check(
        &mut self,
        now: Time,
        is_stuck: bool,
        carried: impl Fn(usize) -> u64,
    ) -> bool {
        if is_stuck {
            self.all_until = Some(now + ALL_FLOWS_TIME);
            return self.set_count(self.max, carried);
        }
        self.all_until = self.all_until.filter(|until| now < *until);
        false
    }

    /// So many flows are worth their cost.
    pub fn use_flows(&mut self, count: usize, carried: impl Fn(usize) -> u64) -> bool {
        self.all_until.is_none() && self.set_count(count, carried)
    }

    /// The connection keeps this many more flows than before. Returns their number.
    pub fn grow(&mut self, more: usize) -> usize {
        self.max += more;
        self.max
    }

    fn set_count(&mut self, count: usize, carried: impl Fn(usize) -> u64) -> bool {
        std::mem::replace(&mut self.count, count) != count && self.choose(carried)
    }

    /// Uses all flows, or those that have carried most.
    fn choose(&mut self, carried: impl Fn(usize) -> u64) -> bool {
        let before = self.used;
        self.used = self.open & !self.retiring;
        let most = if self.count < self.max { self.count } else { usize::MAX };
        while self.used.count_ones() as usize > most {
            let used = (0..128).filter(|slot: &usize| self.used & 1 << *slot != 0);
            // Of those that have carried the same, the last.
            let Some(least) = used.max_by_key(|slot| (Reverse(carried(*slot)), *slot)) else {
                break;
            };
            self.used &= !(1 << least);
        }
        self.used != before
    }

    /// Whether the flow in this slot takes messages; with `all`, each one does that takes chunks.
    pub fn takes_messages(&self, slot: usize, all: bool) -> bool {
        let wanted = if all { self.open & !self.retiring } else { self.used };
        wanted & 1 << slot != 0
    }

    /// Whether the flow in this slot takes chunks at all.
    pub fn is_retiring(&self, slot: usize) -> bool {
        self.retiring & 1 << slot != 0
    }

    /// Whether the flow in this slot adapts the number of flows that are used.
    pub fn is_leader(&self, slot: usize) -> bool {
        self.used.trailing_zeros() as usize == slot
    }

    /// Whether there are as many flows as the connection keeps. While other paths are tried, there are more.
    pub fn is_complete(&self) -> bool {
        self.open.count_ones() as usize == self.max
    }

    /// Whether all flows are used, since nothing moved.
    pub fn uses_all(&self) -> bool {
        self.all_until.is_some()
    }

    /// Number of flows that are used.
    pub fn used(&self) -> usize {
        self.used.count_ones() as usize
    }

    /// Number of flows that are idle.
    pub fn idle(&self) -> usize {
        self.idle.count_ones() as usize
    }
}

#[cfg(test)]
mod tests {
    use evenkeel_testkit::TestRng;

    use super::*;

    /// A choice among this many flows. The later a flow was opened, the less it has carried.
    fn choice(count: usize, flows: usize) -> FlowChoice {
        let mut choice = FlowChoice::new(count, flows);
        assert!((0..flows).all(|slot| choice.handle_flow(slot, carried) == (slot < count)));
        choice
    }

    fn carried(slot: usize) -> u64 {
        1000 - slot as u64
    }

    fn used(choice: &FlowChoice) -> Vec<usize> {
        (0..128).filter(|slot| choice.takes_messages(*slot, false)).collect()
    }

    #[test]
    fn flows_are_used_that_have_carried_most() {
        let mut choice = choice(2, 4);
        assert_eq!(used(&choice), [0, 1]);
        assert!(choice.use_flows(3, |slot| slot as u64) && !choice.use_flows(3, carried));
        assert_eq!(used(&choice), [1, 2, 3]);
        choice.handle_ended(2, |_| 0);
        assert_eq!(used(&choice), [0, 1, 3]);
        choice.retire(0, |_| 0);
        assert_eq!((used(&choice), choice.is_leader(1)), (vec![1, 3], true));
        choice.use_flows(4, |_| 0);
        assert_eq!(used(&choice), [1, 3], "one that retires takes no more");
        assert!(choice.takes_messages(1, true) && !choice.takes_messages(0, true));
    }

    #[test]
    fn idle_flow_is_taken_once() {
        let mut choice = choice(1, 2);
        assert_eq!(choice.take_idle(true), None);
        (0..2).for_each(|slot| choice.set_idle(slot, true));
        assert_eq!((choice.take_idle(false), choice.take_idle(false)), (Some(0), None));
        assert_eq!((choice.take_idle(true), choice.idle()), (Some(1), 0));
        choice.set_idle(5, true);
        assert_eq!(choice.take_idle(true), None, "it is not there");
    }

    #[test]
    fn all_flows_are_used_for_a_while_when_nothing_moves() {
        let second = Duration::from_secs(1);
        let mut choice = choice(1, 4);
        choice.handle_check(second, true, carried);
        assert_eq!((choice.used(), choice.uses_all()), (4, true));
        choice.use_flows(1, carried);
        choice.handle_check(second * 2 - Duration::from_millis(1), false, carried);
        choice.use_flows(1, carried);
        assert_eq!(choice.used(), 4, "not yet");
        choice.handle_check(second * 2, false, carried);
        choice.use_flows(1, carried);
        assert_eq!((choice.used(), choice.uses_all()), (1, false));
    }

    /// Whatever happens, no flow is used or woken that is not there, and there is always one to use.
    #[test]
    fn flow_choice_never_names_a_flow_that_is_not_there() {
        for seed in 0..500 {
            let mut rng = TestRng::new(seed);
            let max = 1 + rng.index(16);
            let mut choice = FlowChoice::new(1 + rng.index(max), max);
            let (mut open, mut retiring) = (0_u128, 0_u128);
            let mut now = Duration::ZERO;
            for _ in 0..300 {
                let slot = rng.index(2 * max);
                let weights: Vec<u64> = (0..128).map(|_| rng.below(5)).collect();
                let carried = |slot: usize| weights[slot];
                let is_there = open & 1 << slot != 0;
                match rng.below(7) {
                    0 if !is_there => {
                        open |= 1 << slot;
                        choice.handle_flow(slot, carried);
                    }
                    1 if is_there => {
                        open &= !(1 << slot);
                        retiring &= !(1 << slot);
                        choice.handle_ended(slot, carried);
                    }
                    2 if is_there => {
                        retiring |= 1 << slot;
                        choice.retire(slot, carried);
                    }
                    3 => {
                        choice.use_flows(1 + rng.index(max), carried);
                    }
                    4 => {
                        now += Duration::from_millis(rng.below(500));
                        choice.handle_check(now, rng.one_in(4), carried);
                    }
                    5 => {
                        let taken = choice.take_idle(rng.one_in(2));
                        assert!(taken.is_none_or(|slot| open & 1 << slot != 0), "seed {seed}");
                    }
                    _ => choice.set_idle(slot, rng.one_in(2)),
                }
                let live = open & !retiring;
                let names = used(&choice);
                assert!(names.iter().all(|slot| live & 1 << *slot != 0), "seed {seed}");
                assert_eq!(names.is_empty(), live == 0, "seed {seed}");
                assert!(choice.idle() <= open.count_ones() as usize);
            }
        }
    }
}
