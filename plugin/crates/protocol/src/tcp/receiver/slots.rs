//! A set of flows by slot.

use super::MAX_SLOTS;

const WORDS: usize = MAX_SLOTS.div_ceil(64);

/// Slots for which there is something to do.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SlotSet([u64; WORDS]);

impl SlotSet {
    pub(super) fn insert(&mut self, slot: usize) {
        self.0[slot / 64] |= 1 << (slot % 64);
    }

    pub(super) fn remove(&mut self, slot: usize) {
        self.0[slot / 64] &= !(1 << (slot % 64));
    }

    /// Takes out the lowest slot.
    pub(super) fn pop(&mut self) -> Option<usize> {
        let at = self.0.iter().position(|word| *word != 0)?;
        let slot = at * 64 + self.0[at].trailing_zeros() as usize;
        self.remove(slot);
        Some(slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slot_set_has_each_slot_once() {
        let mut set = SlotSet::default();
        let slots = [0, 63, 64, 130, MAX_SLOTS - 1];
        slots.iter().chain(&slots).for_each(|slot| set.insert(*slot));
        set.remove(130);
        let all: Vec<_> = std::iter::from_fn(|| set.pop()).collect();
        assert_eq!(all, [0, 63, 64, MAX_SLOTS - 1]);
    }
}
