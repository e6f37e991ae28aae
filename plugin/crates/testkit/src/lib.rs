//! Test helpers: a deterministic random number generator, corruption of bytes, and the plugin that
//! Cargo built.

mod plugin_library;

pub use plugin_library::plugin_library;

/// Numbers that parsers get wrong: limits of types, of messages and of chunks, and their
/// neighbours.
const BOUNDARY_VALUES: [u64; 12] = [
    0,
    1,
    127,
    128,
    u16::MAX as u64,
    (1 << 30) - 128,
    1 << 30,
    (1 << 30) + 1,
    u32::MAX as u64,
    1 << 63,
    u64::MAX - 127,
    u64::MAX,
];

/// A deterministic random number generator (xorshift64). The same seed gives the same numbers.
#[derive(Clone, Debug)]
pub struct TestRng(u64);

impl TestRng {
    /// A generator with this seed.
    pub fn new(seed: u64) -> Self {
        // A state of zero would stay zero. Neighbouring seeds must differ from the first number on.
        Self((seed ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9).max(1))
    }

    /// A uniform number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        // The lowest bits of a xorshift are mixed worst.
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d).rotate_left(32)
    }

    /// A number below `limit`; 0 when that is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next_u64() % limit.max(1)
    }

    /// A number below `limit`; 0 when that is 0.
    pub fn index(&mut self, limit: usize) -> usize {
        self.below(limit as u64) as usize
    }

    /// True with a probability of 1 in `times`.
    pub fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// An element of a slice.
    ///
    /// # Panics
    /// When the slice is empty.
    pub fn choose<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.index(from.len())]
    }

    /// This many random bytes.
    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.next_u64() as u8).collect()
    }

    /// An array of random bytes.
    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        std::array::from_fn(|_| self.next_u64() as u8)
    }

    /// Corrupts bytes in one place and keeps the length.
    pub fn corrupt(&mut self, bytes: &mut [u8]) {
        if bytes.is_empty() {
            return;
        }
        let at = self.index(bytes.len());
        match self.below(4) {
            0 => bytes[at] ^= 1 << self.below(8),
            1 => bytes[at] = self.next_u64() as u8,
            2 => {
                let (number, width) = (*self.choose(&BOUNDARY_VALUES), *self.choose(&[1, 2, 4, 8]));
                let at = at - at % width;
                let places = bytes[at..].iter_mut().take(width);
                places.zip(number.to_le_bytes()).for_each(|(place, byte)| *place = byte);
            }
            _ => {
                let from = self.index(bytes.len());
                let length = self.index(bytes.len() - at.max(from));
                bytes.copy_within(from..from + length, at);
            }
        }
    }

    /// Corrupts bytes in one place. The length may change.
    pub fn mutate(&mut self, bytes: &mut Vec<u8>) {
        let at = self.index(bytes.len() + 1);
        let end = at + self.index(bytes.len() + 1 - at);
        match self.below(6) {
            0 => drop(bytes.drain(at..end)),
            1 => bytes.truncate(at),
            2 => bytes.extend_from_within(at..end),
            3 => bytes.insert(at, self.next_u64() as u8),
            _ => self.corrupt(bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rng_is_deterministic() {
        let bytes = |seed| TestRng::new(seed).bytes(32);
        assert_eq!(bytes(1), bytes(1));
        assert_ne!(bytes(1), bytes(2));
    }

    #[test]
    fn rng_is_uniform() {
        let mut rng = TestRng::new(0);
        let mut counts = [0; 10];
        (0..10_000).for_each(|_| counts[rng.index(10)] += 1);
        assert!(counts.iter().all(|count| (800..1200).contains(count)), "{counts:?}");
    }

    #[test]
    fn corrupt_changes_every_byte_at_every_length() {
        let mut rng = TestRng::new(0);
        for length in 0..20 {
            let mut changed = vec![false; length];
            for _ in 0..1000 {
                let before = rng.bytes(length);
                let mut after = before.clone();
                rng.corrupt(&mut after);
                let differ = before.iter().zip(&after).map(|(before, after)| before != after);
                changed.iter_mut().zip(differ).for_each(|(changed, differs)| *changed |= differs);
                rng.mutate(&mut after);
            }
            assert!(changed.iter().all(|changed| *changed), "of {length}");
        }
    }
}
