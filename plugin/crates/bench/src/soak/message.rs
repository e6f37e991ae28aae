//! The messages of a connection: which lengths they have and what is in them, by the seed, so that
//! both ends know.

use evenkeel_testkit::TestRng;

/// Maximum length of a message, in bytes.
pub(super) const MAX_BYTES: usize = 256 << 10;

/// The messages of one connection.
#[derive(Clone, Copy)]
pub(super) struct Messages {
    seed: u64,
}

impl Messages {
    /// Those of the connection with this number.
    pub(super) fn of(seed: u64, connection: u64) -> Self {
        Self {
            seed: TestRng::new(seed ^ connection.wrapping_mul(0x9e37_79b9_7f4a_7c15)).next_u64(),
        }
    }

    fn rng(self, number: u64) -> TestRng {
        TestRng::new(self.seed.wrapping_add(number))
    }

    /// The length of the message with this number: most are short, and some are around the limits
    /// of protocols.
    pub(super) fn length(self, number: u64) -> usize {
        let mut rng = self.rng(number);
        match rng.below(8) {
            0 => rng.index(9),
            1 | 2 => rng.index(4098),
            3 | 4 => rng.index(16 << 10),
            5 | 6 => rng.index(64 << 10),
            _ => rng.index(MAX_BYTES + 1),
        }
    }

    /// Writes the message with this number.
    pub(super) fn fill(self, number: u64, bytes: &mut [u8]) {
        let mut word = self.rng(number).next_u64();
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
            word = word.wrapping_mul(0x2545_f491_4f6c_dd1d).wrapping_add(number | 1);
        }
    }

    /// Where these bytes differ from the message with this number, if they do.
    pub(super) fn difference(self, number: u64, bytes: &[u8]) -> Option<usize> {
        let mut word = self.rng(number).next_u64();
        for (at, chunk) in bytes.chunks(8).enumerate() {
            let wanted = word.to_le_bytes();
            if chunk != &wanted[..chunk.len()] {
                let inside = chunk.iter().zip(wanted).position(|(byte, wanted)| *byte != wanted);
                return Some(at * 8 + inside.unwrap_or(0));
            }
            word = word.wrapping_mul(0x2545_f491_4f6c_dd1d).wrapping_add(number | 1);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn soak_messages_differ_in_every_bit_that_is_wrong() {
        let messages = Messages::of(7, 3);
        let mut bytes = vec![0; 1003];
        messages.fill(5, &mut bytes);
        assert_eq!(messages.difference(5, &bytes), None);
        assert!(messages.difference(6, &bytes).is_some(), "another message of the connection");
        assert!(Messages::of(7, 4).difference(5, &bytes).is_some(), "another connection");
        for at in [0, 8, 500, 1002] {
            bytes[at] ^= 1;
            assert_eq!(messages.difference(5, &bytes), Some(at));
            bytes[at] ^= 1;
        }
    }

    #[test]
    fn soak_messages_have_all_lengths() {
        let lengths: Vec<_> = (0..4000).map(|number| Messages::of(1, 2).length(number)).collect();
        assert!(lengths.contains(&0) && lengths.iter().all(|length| *length <= MAX_BYTES));
        assert!(lengths.iter().any(|length| *length > MAX_BYTES / 2));
    }
}
