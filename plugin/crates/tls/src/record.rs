//! The record layer of a session (RFC 8446, section 5): one direction each, in memory that the
//! caller has.

use ring::aead::{
    AES_128_GCM, AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey,
};
use rustls::ConnectionTrafficSecrets;

/// Bytes in front of a record's ciphertext: type, version, length.
pub const HEADER_BYTES: usize = 5;
/// Maximum number of bytes that a record carries.
pub const MAX_PLAINTEXT: usize = 1 << 14;
/// What a record adds to the bytes that it carries: header, content type and tag.
pub const OVERHEAD: usize = HEADER_BYTES + 1 + TAG_BYTES;
/// Maximum length of a record that is accepted. Sealers make no padding, so theirs are no longer
/// than this either.
pub const MAX_RECORD: usize = MAX_PLAINTEXT + OVERHEAD;

const TAG_BYTES: usize = 16;
const IV_BYTES: usize = 12;
const APPLICATION_DATA: u8 = 23;
/// The version in every record of TLS 1.3 (section 5.1).
const LEGACY_VERSION: [u8; 2] = [3, 3];
/// Maximum number of cipher blocks under one key, one more for each record. With AES-GCM an
/// attacker's advantage stays below 2^-57 (section 5.5, whose limit is 2^24.5 records of full
/// length).
const MAX_BLOCKS: u64 = 3 << 33;
/// From so many on, a key is nearly used up: what is left is some 27 GB.
const NEARLY_MAX_BLOCKS: u64 = MAX_BLOCKS / 16 * 15;
const BLOCK_BYTES: usize = 16;

/// Why a record is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// The bytes are no record of this protocol.
    #[error("it carried bytes that are no TLS record")]
    NotARecord,
    /// The record is not the next one of the peer: it was changed, dropped, repeated, moved or made
    /// by somebody else.
    #[error("it carried a TLS record that the peer has not sent, or not at this place")]
    Forged,
    /// An authentic record of a kind that peers do not send.
    #[error("it carried a TLS record of type {0}")]
    Unexpected(u8),
    /// So much was sent that a new session is needed.
    #[error("its keys are used up")]
    KeyUsedUp,
}

/// How records are encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cipher {
    /// AES-128-GCM.
    Aes128Gcm,
    /// AES-256-GCM.
    Aes256Gcm,
    /// ChaCha20-Poly1305.
    ChaCha20Poly1305,
}

/// The keys of one direction of a session, for a [`Sealer`], an [`Opener`], or the kernel. They are
/// forgotten with it.
pub struct TrafficKeys {
    /// Which of the fields below has them.
    cipher: Cipher,
    /// The number of the next record.
    sequence: u64,
    secrets: ConnectionTrafficSecrets,
}

impl TrafficKeys {
    /// `None` for a cipher that this crate does not know.
    pub(crate) fn new((sequence, secrets): (u64, ConnectionTrafficSecrets)) -> Option<Self> {
        let cipher = match &secrets {
            ConnectionTrafficSecrets::Aes128Gcm { .. } => Cipher::Aes128Gcm,
            ConnectionTrafficSecrets::Aes256Gcm { .. } => Cipher::Aes256Gcm,
            ConnectionTrafficSecrets::Chacha20Poly1305 { .. } => Cipher::ChaCha20Poly1305,
            _ => return None,
        };
        Some(Self { cipher, sequence, secrets })
    }

    /// How records are encrypted.
    pub fn cipher(&self) -> Cipher {
        self.cipher
    }

    /// The number of the next record, from 0.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// The key, of 16 or 32 bytes, and the 12 bytes that nonces are made of (section 5.3).
    pub fn key_and_iv(&self) -> (&[u8], &[u8]) {
        match &self.secrets {
            ConnectionTrafficSecrets::Aes128Gcm { key, iv }
            | ConnectionTrafficSecrets::Aes256Gcm { key, iv }
            | ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => (key.as_ref(), iv.as_ref()),
            // `new` takes no others.
            _ => (&[], &[]),
        }
    }
}

/// How much a key has encrypted.
#[derive(Debug, Default)]
pub struct KeyUse {
    blocks: u64,
}

impl KeyUse {
    /// Counts records that carry so many bytes together.
    ///
    /// # Errors
    /// [`RecordError::KeyUsedUp`]: they may not be sent.
    pub fn add(&mut self, records: usize, bytes: usize) -> Result<(), RecordError> {
        // A block more for each record, and one that is not full.
        self.blocks += 2 * records as u64 + (bytes / BLOCK_BYTES) as u64;
        if self.blocks > MAX_BLOCKS { Err(RecordError::KeyUsedUp) } else { Ok(()) }
    }

    /// Whether it is time for another session, while this one can still send.
    pub fn is_nearly_used_up(&self) -> bool {
        self.blocks > NEARLY_MAX_BLOCKS
    }
}

/// Key and nonces of one direction.
struct Direction {
    key: LessSafeKey,
    iv: [u8; IV_BYTES],
    sequence: u64,
}

impl Direction {
    fn new(keys: &TrafficKeys) -> Option<Self> {
        let algorithm = match keys.cipher {
            Cipher::Aes128Gcm => &AES_128_GCM,
            Cipher::Aes256Gcm => &AES_256_GCM,
            Cipher::ChaCha20Poly1305 => &CHACHA20_POLY1305,
        };
        let (key, iv) = keys.key_and_iv();
        let key = LessSafeKey::new(UnboundKey::new(algorithm, key).ok()?);
        let sequence = keys.sequence;
        Some(Self { key, iv: iv.try_into().ok()?, sequence })
    }

    /// The nonce of the next record (section 5.3). None is used twice.
    fn next_nonce(&mut self) -> Result<Nonce, RecordError> {
        let mut nonce = self.iv;
        for (byte, sequence) in nonce[IV_BYTES - 8..].iter_mut().zip(self.sequence.to_be_bytes()) {
            *byte ^= sequence;
        }
        self.sequence = self.sequence.checked_add(1).ok_or(RecordError::KeyUsedUp)?;
        Ok(Nonce::assume_unique_for_key(nonce))
    }
}

/// The sending direction of a session.
pub struct Sealer {
    direction: Direction,
    used: KeyUse,
}

/// The receiving direction of a session. The limit of the keys is the sender's: what it has sealed
/// may be opened.
pub struct Opener(Direction);

impl Sealer {
    /// `None` for keys that are no keys of their cipher.
    pub fn new(keys: &TrafficKeys) -> Option<Self> {
        Some(Self { direction: Direction::new(keys)?, used: KeyUse::default() })
    }

    /// What its key has encrypted.
    pub fn used(&mut self) -> &mut KeyUse {
        &mut self.used
    }

    /// Makes a record of the bytes that were stored in it behind [`HEADER_BYTES`]. Room for the
    /// rest of the [`OVERHEAD`] follows them.
    ///
    /// # Errors
    /// [`RecordError::KeyUsedUp`]: nothing more may be sent.
    ///
    /// # Panics
    /// When the record is shorter than the overhead, or longer than [`MAX_RECORD`].
    pub fn seal(&mut self, record: &mut [u8]) -> Result<(), RecordError> {
        assert!((OVERHEAD..=MAX_RECORD).contains(&record.len()));
        let (header, rest) = record.split_at_mut(HEADER_BYTES);
        let length = (rest.len() as u16).to_be_bytes();
        let [major, minor] = LEGACY_VERSION;
        header.copy_from_slice(&[APPLICATION_DATA, major, minor, length[0], length[1]]);
        let (content, place) = rest.split_at_mut(rest.len() - TAG_BYTES);
        if let Some(content_type) = content.last_mut() {
            *content_type = APPLICATION_DATA;
        }
        self.used.add(1, content.len())?;
        let nonce = self.direction.next_nonce()?;
        let sealed =
            self.direction.key.seal_in_place_separate_tag(nonce, Aad::from(&*header), content);
        // Fails only for lengths that no record has.
        let tag = sealed.map_err(|_| RecordError::KeyUsedUp)?;
        place.copy_from_slice(tag.as_ref());
        Ok(())
    }
}

impl Opener {
    /// `None` for keys that are no keys of their cipher.
    pub fn new(keys: &TrafficKeys) -> Option<Self> {
        Direction::new(keys).map(Self)
    }

    /// Opens a whole record in place. Its bytes are then behind [`HEADER_BYTES`]; returns their
    /// number.
    ///
    /// # Errors
    /// When it is not the next record of the peer. The session cannot continue then.
    pub fn open(&mut self, record: &mut [u8]) -> Result<usize, RecordError> {
        if record_length(record)? != Some(record.len()) {
            return Err(RecordError::NotARecord);
        }
        let (header, sealed) = record.split_at_mut(HEADER_BYTES);
        let nonce = self.0.next_nonce()?;
        let opened = self.0.key.open_in_place(nonce, Aad::from(&*header), sealed);
        let content = opened.map_err(|_| RecordError::Forged)?;
        // Padding of zeros follows the type.
        let end = content.iter().rposition(|byte| *byte != 0).ok_or(RecordError::Unexpected(0))?;
        match content[end] {
            APPLICATION_DATA => Ok(end),
            other => Err(RecordError::Unexpected(other)),
        }
    }
}

/// The length of the record that begins with these bytes; `None` if they are too few to know.
///
/// # Errors
/// [`RecordError::NotARecord`] at the first byte with which none begins, or when it would be too
/// long.
pub fn record_length(bytes: &[u8]) -> Result<Option<usize>, RecordError> {
    let [major, minor] = LEGACY_VERSION;
    let begin = [APPLICATION_DATA, major, minor];
    if bytes.iter().zip(begin).any(|(got, want)| *got != want) {
        return Err(RecordError::NotARecord);
    }
    let Some(header) = bytes.get(..HEADER_BYTES) else { return Ok(None) };
    let length = HEADER_BYTES + usize::from(u16::from_be_bytes([header[3], header[4]]));
    if (OVERHEAD..=MAX_RECORD).contains(&length) {
        Ok(Some(length))
    } else {
        Err(RecordError::NotARecord)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn direction(algorithm: u8) -> Direction {
        let algorithm = if algorithm == 0 { &CHACHA20_POLY1305 } else { &AES_256_GCM };
        let key = LessSafeKey::new(UnboundKey::new(algorithm, &[7; 32]).unwrap());
        Direction { key, iv: [9; IV_BYTES], sequence: 0 }
    }

    fn record(sealer: &mut Sealer, bytes: &[u8]) -> Vec<u8> {
        let mut record = vec![0; bytes.len() + OVERHEAD];
        record[HEADER_BYTES..][..bytes.len()].copy_from_slice(bytes);
        sealer.seal(&mut record).unwrap();
        record
    }

    fn ends(algorithm: u8) -> (Sealer, Opener) {
        let sealer = Sealer { direction: direction(algorithm), used: KeyUse::default() };
        (sealer, Opener(direction(algorithm)))
    }

    #[test]
    fn record_carries_its_bytes_in_order() {
        for algorithm in 0..2 {
            let (mut sealer, mut opener) = ends(algorithm);
            for length in [0, 1, 15, 16, 17, 1000, MAX_PLAINTEXT] {
                let bytes: Vec<u8> = (0..length).map(|at| at as u8).collect();
                let mut record = record(&mut sealer, &bytes);
                assert_eq!(record_length(&record).unwrap(), Some(record.len()));
                let opened = opener.open(&mut record).unwrap();
                assert_eq!(record[HEADER_BYTES..][..opened], bytes);
            }
        }
    }

    #[test]
    fn record_that_is_repeated_or_moved_is_refused() {
        let (mut sealer, mut opener) = ends(1);
        let [first, second, third] = [b"first", b"secnd", b"third"].map(|b| record(&mut sealer, b));
        assert_eq!(opener.open(&mut second.clone()), Err(RecordError::Forged), "moved");
        let mut opener_again = Opener(direction(1));
        assert_eq!(opener_again.open(&mut first.clone()), Ok(5));
        assert_eq!(opener_again.open(&mut first.clone()), Err(RecordError::Forged), "repeated");
        let mut opener_again = Opener(direction(1));
        assert_eq!(opener_again.open(&mut first.clone()), Ok(5));
        assert_eq!(opener_again.open(&mut third.clone()), Err(RecordError::Forged), "dropped");
    }

    #[test]
    fn key_is_not_used_beyond_its_limit() {
        let (mut sealer, _) = ends(1);
        sealer.used.blocks = MAX_BLOCKS - 3;
        let mut last = vec![0; OVERHEAD];
        assert_eq!(sealer.seal(&mut last), Ok(()));
        assert_eq!(sealer.seal(&mut last), Err(RecordError::KeyUsedUp));
    }

    #[test]
    fn key_that_is_nearly_used_up_can_still_send() {
        let (mut sealer, mut opener) = ends(1);
        sealer.used().add(0, MAX_BLOCKS as usize / 16 * 15 * BLOCK_BYTES).unwrap();
        assert!(!sealer.used().is_nearly_used_up());
        let mut record = record(&mut sealer, b"a");
        assert!(sealer.used().is_nearly_used_up());
        assert_eq!(opener.open(&mut record), Ok(1));
        assert_eq!(sealer.used().add(0, 25_000_000_000), Ok(()), "bytes");
    }

    #[test]
    fn authentic_record_of_another_type_is_named() {
        let (mut sealer, mut opener) = ends(1);
        let mut alert = vec![23, 3, 3, 0, 19, 1, 0, 21];
        let nonce = sealer.direction.next_nonce().unwrap();
        let (header, content) = alert.split_at_mut(HEADER_BYTES);
        let tag = sealer
            .direction
            .key
            .seal_in_place_separate_tag(nonce, Aad::from(&*header), content)
            .unwrap();
        alert.extend(tag.as_ref());
        assert_eq!(opener.open(&mut alert), Err(RecordError::Unexpected(21)));
    }

    proptest! {
        #[test]
        fn record_with_any_flipped_bit_is_refused(length in 0..300usize, at: prop::sample::Index, bit in 0..8) {
            let (mut sealer, mut opener) = ends(1);
            let mut record = record(&mut sealer, &vec![5; length]);
            let at = at.index(record.len());
            record[at] ^= 1u8 << bit;
            prop_assert!(opener.open(&mut record).is_err());
        }

        #[test]
        fn record_of_any_bytes_is_refused_without_panic(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..400), valid_header: bool,
        ) {
            if valid_header && bytes.len() >= OVERHEAD {
                let length = (bytes.len() - HEADER_BYTES) as u16;
                bytes[..3].copy_from_slice(&[23, 3, 3]);
                bytes[3..5].copy_from_slice(&length.to_be_bytes());
            }
            let (_, mut opener) = ends(0);
            prop_assert!(opener.open(&mut bytes).is_err());
        }
    }
}
