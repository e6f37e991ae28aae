//! A digest of a rank's list of servers. Ranks exchange it with NCCL's handles, to see which of
//! them have the same list.

/// Size of a digest, in bytes.
pub const SERVER_LIST_DIGEST_BYTES: usize = 12;

/// A digest of a list of servers, with the number of servers and the maximum number that an
/// operation is split over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerListDigest([u8; SERVER_LIST_DIGEST_BYTES]);

impl ServerListDigest {
    /// The digest of [`Settings::servers`](crate::Settings::servers) and
    /// [`Settings::split`](crate::Settings::split).
    pub fn new(servers: &[String], split: usize) -> Self {
        // FNV-1a, 64 bits: there is nothing to gain by making two lists look alike.
        let digest = servers.join(",").bytes().fold(0xcbf2_9ce4_8422_2325u64, |digest, byte| {
            (digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let mut bytes = [0; SERVER_LIST_DIGEST_BYTES];
        bytes[..8].copy_from_slice(&digest.to_le_bytes());
        bytes[8..10].copy_from_slice(&(servers.len() as u16).to_le_bytes());
        bytes[10..].copy_from_slice(&(split as u16).to_le_bytes());
        Self(bytes)
    }

    /// As it was received from another rank.
    pub fn from_bytes(bytes: [u8; SERVER_LIST_DIGEST_BYTES]) -> Self {
        Self(bytes)
    }

    /// As it is sent to other ranks.
    pub fn to_bytes(self) -> [u8; SERVER_LIST_DIGEST_BYTES] {
        self.0
    }

    /// Number of servers in the list.
    pub(crate) fn servers(self) -> u16 {
        u16::from_le_bytes([self.0[8], self.0[9]])
    }

    /// Maximum number of servers that an operation is split over.
    pub(crate) fn split(self) -> u16 {
        u16::from_le_bytes([self.0[10], self.0[11]])
    }
}
