//! What an encrypted connection begins with, in clear, so that a peer without encryption can say
//! so.

use super::hello::{HandshakeError, PROTOCOL_VERSION, check_version};

/// Length of the announcement, in bytes: magic 8, version u16, zeros.
pub const ENCRYPTED_BYTES: usize = 16;

const MAGIC: [u8; 8] = *b"EVKL-TLS";

/// The announcement that a TLS handshake follows, and the hello within its session. A listener
/// without encryption answers it with a [`crate::Welcome`] in clear, which refuses.
#[derive(Clone, Copy, Debug)]
pub struct Encrypted;

impl Encrypted {
    /// The bytes to send first.
    pub fn encode() -> [u8; ENCRYPTED_BYTES] {
        let mut out = [0; ENCRYPTED_BYTES];
        out[..8].copy_from_slice(&MAGIC);
        out[8..10].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
        out
    }

    /// Whether the bytes received so far, which may be none, can still become the announcement.
    pub fn may_begin_with(received: &[u8]) -> bool {
        received.iter().zip(MAGIC).all(|(got, want)| *got == want)
    }

    /// Checks what was received.
    ///
    /// # Errors
    /// [`HandshakeError`] when it is not the announcement of this version.
    pub fn check(bytes: &[u8; ENCRYPTED_BYTES]) -> Result<(), HandshakeError> {
        if !Self::may_begin_with(bytes) {
            return Err(HandshakeError::NotEvenkeel("peer"));
        }
        check_version(bytes)?;
        if *bytes == Self::encode() {
            Ok(())
        } else {
            Err(HandshakeError::Unused("an encrypted connection"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Hello;

    #[test]
    fn encrypted_connection_is_announced() {
        let bytes = Encrypted::encode();
        assert_eq!(Encrypted::check(&bytes), Ok(()));
        assert!(Encrypted::may_begin_with(&[]) && Encrypted::may_begin_with(&bytes[..9]));
        assert!(!Hello::may_begin_with(&bytes));
        for at in 0..ENCRYPTED_BYTES {
            let mut changed = bytes;
            changed[at] ^= 1;
            let error = Encrypted::check(&changed).unwrap_err();
            let expected = match at {
                0..8 => HandshakeError::NotEvenkeel("peer"),
                8..10 => HandshakeError::Version(u16::from_le_bytes([changed[8], changed[9]])),
                _ => HandshakeError::Unused("an encrypted connection"),
            };
            assert_eq!(error, expected);
        }
    }
}
