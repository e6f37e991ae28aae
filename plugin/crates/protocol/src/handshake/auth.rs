//! Authentication: peers prove to each other that they have the same job key, without revealing it.
//!
//! After a [`crate::Hello`] with this method, the listener sends a challenge: fresh random bytes of
//! its own and a proof that it has the key. The connector checks it and answers with its own proof.
//! Both proofs cover the whole hello, which has the connector's random bytes and the identity of
//! the connection, and the challenge's random bytes. A recorded exchange is therefore useless on
//! any other flow. Proofs are HMAC-SHA-256 (RFC 2104, FIPS 198-1), compared in constant time.

use std::fmt;

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::hello::HELLO_BYTES;

/// Length of a challenge, in bytes: magic 8, random 32, the listener's proof 32.
pub const CHALLENGE_BYTES: usize = 72;
/// Length of a connector's proof, in bytes.
pub const PROOF_BYTES: usize = 32;
/// Length of the tag of a datagram, in bytes.
pub const TAG_BYTES: usize = 16;

const MAGIC: [u8; 8] = *b"EVKL-CHA";
const RANDOM: std::ops::Range<usize> = 8..40;
const LISTENER: &[u8] = b"evenkeel listener";
const CONNECTOR: &[u8] = b"evenkeel connector";
const DATAGRAM: &[u8] = b"evenkeel datagram";

/// The secret that a job's ranks share.
#[derive(Clone, PartialEq, Eq)]
pub struct JobKey([u8; 32]);

// Secrets stay out of logs.
impl fmt::Debug for JobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobKey(..)")
    }
}

impl JobKey {
    /// Reads a key of 64 hexadecimal digits, with white space around it.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim().as_bytes();
        let mut key = [0; 32];
        if text.len() != 64 {
            return None;
        }
        for (byte, digits) in key.iter_mut().zip(text.chunks_exact(2)) {
            let digit = |at: usize| char::from(digits[at]).to_digit(16);
            *byte = (digit(0)? << 4 | digit(1)?) as u8;
        }
        Some(Self(key))
    }

    /// The tag of a datagram, which shows that a process of the job has sent it. It may be repeated
    /// by anybody.
    pub fn tag(&self, datagram: &[u8]) -> [u8; TAG_BYTES] {
        let proof = self.of_datagram(datagram).finalize().into_bytes();
        let mut tag = [0; TAG_BYTES];
        tag.copy_from_slice(&proof[..TAG_BYTES]);
        tag
    }

    /// Whether a datagram has the [`JobKey::tag`] of a process with the same key.
    pub fn has_tagged(&self, datagram: &[u8], tag: &[u8; TAG_BYTES]) -> bool {
        self.of_datagram(datagram).verify_truncated_left(tag).is_ok()
    }

    fn of_datagram(&self, datagram: &[u8]) -> Hmac<Sha256> {
        // An HMAC takes keys of any length.
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("a key of 32 bytes");
        mac.update(DATAGRAM);
        mac.update(datagram);
        mac
    }

    /// The listener's answer to a hello; `random` must be fresh for each.
    pub fn challenge(&self, hello: &[u8; HELLO_BYTES], random: [u8; 32]) -> [u8; CHALLENGE_BYTES] {
        let mut out = [0; CHALLENGE_BYTES];
        out[..RANDOM.start].copy_from_slice(&MAGIC);
        out[RANDOM].copy_from_slice(&random);
        let proof = self.mac(LISTENER, hello, &random).finalize().into_bytes();
        out[RANDOM.end..].copy_from_slice(&proof);
        out
    }

    /// The connector's answer to a challenge; `None` when the listener does not have the key.
    pub fn answer(
        &self,
        hello: &[u8; HELLO_BYTES],
        challenge: &[u8; CHALLENGE_BYTES],
    ) -> Option<[u8; PROOF_BYTES]> {
        let (random, proof) = (&challenge[RANDOM], &challenge[RANDOM.end..]);
        if !is_challenge(challenge) {
            return None;
        }
        self.mac(LISTENER, hello, random).verify_slice(proof).ok()?;
        Some(self.mac(CONNECTOR, hello, random).finalize().into_bytes().into())
    }

    /// Whether the connector that answered a challenge has the key.
    pub fn accepts(
        &self,
        hello: &[u8; HELLO_BYTES],
        challenge: &[u8; CHALLENGE_BYTES],
        proof: &[u8; PROOF_BYTES],
    ) -> bool {
        self.mac(CONNECTOR, hello, &challenge[RANDOM]).verify_slice(proof).is_ok()
    }

    /// A secret for another purpose, which reveals nothing about the key (HKDF-Expand of RFC 5869,
    /// one block).
    pub fn derive(&self, purpose: &str) -> [u8; 32] {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("a key of 32 bytes");
        mac.update(purpose.as_bytes());
        mac.update(&[1]);
        mac.finalize().into_bytes().into()
    }

    fn mac(&self, role: &[u8], hello: &[u8; HELLO_BYTES], random: &[u8]) -> Hmac<Sha256> {
        // An HMAC takes keys of any length.
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("a key of 32 bytes");
        mac.update(role);
        mac.update(hello);
        mac.update(random);
        mac
    }
}

/// Whether the listener's answer, of which at least 8 bytes are there, is a challenge and not a
/// welcome.
pub fn is_challenge(answer: &[u8]) -> bool {
    answer.starts_with(&MAGIC)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(byte: u8) -> JobKey {
        JobKey([byte; 32])
    }

    #[test]
    fn job_key_is_64_hexadecimal_digits() {
        let text = "00112233445566778899aAbBcCdDeEfF00112233445566778899aabbccddeeff";
        let key = JobKey::parse(&format!(" {text}\n")).unwrap();
        assert_eq!((key.0[1], key.0[10]), (0x11, 0xaa));
        for bad in
            ["", "00", &text[1..], &format!("{text}0"), &text.replace('a', "g"), &"é".repeat(32)]
        {
            assert_eq!(JobKey::parse(bad), None, "{bad}");
        }
        assert!(!format!("{key:?}").contains("17"));
    }

    /// Against RFC 5869's formula, worked out with Python's `hmac`.
    #[test]
    fn job_key_derives_secrets_by_purpose() {
        let digits = key(1).derive("evenkeel test").map(|byte| format!("{byte:02x}")).concat();
        assert_eq!(digits, "0f6fe14e387f58734ba9507fbad086ea68db5cc3fb31cef01ce455792c4310fa");
        assert_ne!(key(1).derive("a"), key(1).derive("b"));
    }

    #[test]
    fn job_key_shared_by_both_peers_is_accepted() {
        let hello = [7; HELLO_BYTES];
        let challenge = key(1).challenge(&hello, [9; 32]);
        let proof = key(1).answer(&hello, &challenge).unwrap();
        assert!(key(1).accepts(&hello, &challenge, &proof));
    }

    #[test]
    fn job_key_mismatch_is_detected_on_both_sides() {
        let hello = [7; HELLO_BYTES];
        let challenge = key(1).challenge(&hello, [9; 32]);
        assert_eq!(key(2).answer(&hello, &challenge), None);
        let other = key(2).challenge(&hello, [9; 32]);
        let proof = key(2).answer(&hello, &other).unwrap();
        assert!(!key(1).accepts(&hello, &challenge, &proof));
    }

    #[test]
    fn proof_cannot_be_replayed() {
        let (hello, random) = ([7; HELLO_BYTES], [9; 32]);
        let challenge = key(1).challenge(&hello, random);
        let proof = key(1).answer(&hello, &challenge).unwrap();
        let mut other_hello = hello;
        other_hello[63] ^= 1;
        assert!(!key(1).accepts(&other_hello, &challenge, &proof), "on another flow");
        let again = key(1).challenge(&hello, [8; 32]);
        assert!(!key(1).accepts(&hello, &again, &proof), "after another challenge");
        let mut reflected = [0; PROOF_BYTES];
        reflected.copy_from_slice(&challenge[RANDOM.end..]);
        assert!(!key(1).accepts(&hello, &challenge, &reflected), "the listener's own");
    }

    proptest! {
        #[test]
        fn challenge_and_proof_detect_any_change(at in 0..CHALLENGE_BYTES + PROOF_BYTES, bit in 0..8) {
            let hello = [7; HELLO_BYTES];
            let mut challenge = key(1).challenge(&hello, [9; 32]);
            let mut proof = key(1).answer(&hello, &challenge).unwrap();
            match at.checked_sub(CHALLENGE_BYTES) {
                None => {
                    challenge[at] ^= 1u8 << bit;
                    prop_assert_eq!(key(1).answer(&hello, &challenge), None);
                }
                Some(at) => {
                    proof[at] ^= 1u8 << bit;
                    prop_assert!(!key(1).accepts(&hello, &challenge, &proof));
                }
            }
        }
    }
}
