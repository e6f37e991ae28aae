//! Credits, which the receiver writes into the sender's memory. NCCL calls them CTS (clear to
//! send).
//!
//! A credit describes the buffer that is posted for a message, with a key for each port of the
//! receiver that the sender may write through. The immediate data of the write says which message
//! it is for.
//! Writes of the receiver that carry no credit report instead how many messages have left the eager
//! ring.

use evenkeel_protocol::{MAX_PORTS, WINDOW};
use evenkeel_verbs::StagingBuffer;

/// Number of places for credits in the sender's memory. A message's place is its number modulo
/// this.
pub(super) const CREDITS: usize = 2 * WINDOW as usize;
/// Bytes of a credit with one key: the message's number plus one u64, address u64, key u32,
/// capacity u32, tag u32. Further keys u32 follow.
const ONE_KEY_BYTES: usize = 28;
/// Bytes of a credit with the most keys.
const MAX_CREDIT_BYTES: usize = credit_bytes(MAX_PORTS);

/// Bytes of a credit with this number of keys, at least 1.
pub(super) const fn credit_bytes(keys: usize) -> usize {
    ONE_KEY_BYTES + 4 * (keys - 1)
}

/// The bit of immediate data that reports the eager ring.
const RING_BIT: u32 = 1 << 31;

/// The buffer that is posted for a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Credit {
    pub(super) address: u64,
    /// For each port of the receiver; 0 where the buffer is not registered.
    pub(super) keys: [u32; MAX_PORTS],
    /// Bytes.
    pub(super) capacity: u32,
    /// The buffer's tag, where tags differ.
    pub(super) tag: i32,
}

/// What the immediate data of a write of the receiver says.
pub(super) enum CreditImmediate {
    /// A credit; the low bits of its message's number.
    Credit(u32),
    /// Messages that have left the eager ring; the low bits of their number.
    RingProgress(u32),
}

impl CreditImmediate {
    pub(super) fn decode(immediate: u32) -> Self {
        match immediate & RING_BIT {
            0 => Self::Credit(immediate),
            _ => Self::RingProgress(immediate & !RING_BIT),
        }
    }

    /// For the credit of a message.
    pub(super) fn encode_credit(message: u64) -> u32 {
        message as u32 & !RING_BIT
    }

    /// For the number of messages that have left the eager ring.
    pub(super) fn encode_ring_progress(messages: u64) -> u32 {
        RING_BIT | messages as u32 & !RING_BIT
    }

    /// The number of messages that have left the ring, given its low bits and an earlier one.
    /// `None` if there cannot be so many.
    pub(super) fn ring_progress(low_bits: u32, earlier: u64) -> Option<u64> {
        let more = u64::from(low_bits).wrapping_sub(earlier) & u64::from(!RING_BIT);
        (more <= WINDOW).then_some(earlier + more)
    }
}

impl Credit {
    /// Offset of a message's credit in the sender's memory, where credits have this number of keys.
    pub(super) fn offset(message: u64, keys: usize) -> usize {
        message as usize % CREDITS * credit_bytes(keys)
    }

    /// The first [`credit_bytes`] are the credit's.
    pub(super) fn encode(self, message: u64) -> [u8; MAX_CREDIT_BYTES] {
        let mut out = [0; MAX_CREDIT_BYTES];
        out[..8].copy_from_slice(&(message + 1).to_le_bytes());
        out[8..16].copy_from_slice(&self.address.to_le_bytes());
        out[20..24].copy_from_slice(&self.capacity.to_le_bytes());
        out[24..28].copy_from_slice(&self.tag.to_le_bytes());
        let (before, after) = out.split_at_mut(ONE_KEY_BYTES);
        let places = before[16..20].chunks_exact_mut(4).chain(after.chunks_exact_mut(4));
        places.zip(&self.keys).for_each(|(place, key)| place.copy_from_slice(&key.to_le_bytes()));
        out
    }

    /// The credit that was received with this number, and its message.
    pub(super) fn read(credits: &StagingBuffer, number: u32, keys: usize) -> Option<(u64, Self)> {
        let mut bytes = [0; MAX_CREDIT_BYTES];
        credits.read(Self::offset(number.into(), keys), &mut bytes[..credit_bytes(keys)]);
        Self::decode(&bytes)
    }

    fn decode(bytes: &[u8; MAX_CREDIT_BYTES]) -> Option<(u64, Self)> {
        let message = u64::from_le_bytes(bytes[..8].try_into().ok()?).checked_sub(1)?;
        let mut keys = [0; MAX_PORTS];
        let places = bytes[16..20].chunks_exact(4).chain(bytes[ONE_KEY_BYTES..].chunks_exact(4));
        for (key, place) in keys.iter_mut().zip(places) {
            *key = u32::from_le_bytes(place.try_into().ok()?);
        }
        let credit = Self {
            address: u64::from_le_bytes(bytes[8..16].try_into().ok()?),
            keys,
            capacity: u32::from_le_bytes(bytes[20..24].try_into().ok()?),
            tag: i32::from_le_bytes(bytes[24..28].try_into().ok()?),
        };
        Some((message, credit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credit_names_its_message() {
        let keys = [77, 78, 79, 80];
        let credit = Credit { address: 0x7f00_1234, keys, capacity: 1 << 30, tag: -3 };
        for message in [0, 5, 1 << 40] {
            assert_eq!(Credit::decode(&credit.encode(message)), Some((message, credit)));
            let immediate = CreditImmediate::encode_credit(message);
            let CreditImmediate::Credit(number) = CreditImmediate::decode(immediate) else {
                panic!("{immediate:#x} is no credit");
            };
            for keys in 1..=MAX_PORTS {
                assert_eq!(Credit::offset(number.into(), keys), Credit::offset(message, keys));
            }
        }
        assert_eq!(Credit::decode(&[0; MAX_CREDIT_BYTES]), None, "nothing was received");
    }

    #[test]
    fn credit_without_room_for_other_keys_has_the_first() {
        let credit = Credit { address: 1, keys: [77, 78, 79, 80], capacity: 2, tag: 3 };
        for keys in 1..=MAX_PORTS {
            let mut bytes = [0; MAX_CREDIT_BYTES];
            let length = credit_bytes(keys);
            bytes[..length].copy_from_slice(&credit.encode(7)[..length]);
            let (_, received) = Credit::decode(&bytes).unwrap();
            assert_eq!(received.keys[..keys], credit.keys[..keys]);
            assert!(received.keys[keys..].iter().all(|key| *key == 0));
        }
    }

    #[test]
    fn ring_progress_is_known_from_its_low_bits() {
        for earlier in [0, 5, (1 << 31) - 2, 1 << 40] {
            for messages in [earlier, earlier + 1, earlier + WINDOW] {
                let immediate = CreditImmediate::encode_ring_progress(messages);
                let CreditImmediate::RingProgress(low_bits) = CreditImmediate::decode(immediate)
                else {
                    panic!("{immediate:#x} is a credit");
                };
                assert_eq!(CreditImmediate::ring_progress(low_bits, earlier), Some(messages));
            }
            let immediate = CreditImmediate::encode_ring_progress(earlier + WINDOW + 1);
            assert_eq!(CreditImmediate::ring_progress(immediate & !RING_BIT, earlier), None);
        }
    }
}
