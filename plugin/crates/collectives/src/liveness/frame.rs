//! The messages between probing ranks and responders.

const MAGIC: &[u8; 8] = b"EKalive1";
/// Magic, identity, kind, and length of the body.
pub(super) const HEADER_BYTES: usize = 8 + 8 + 1 + 2;
/// Maximum length of a body.
const MAX_BODY_BYTES: usize = 4096;

/// Request: is this member alive?
pub(super) const PROBE: u8 = 0;
/// Request: the group has failed, for the reason in the body.
pub(super) const REPORT_FAILURE: u8 = 1;
/// Response: there is no such member.
pub(super) const UNKNOWN: u8 = 2;
/// Response: the member is alive, and waits for the ranks in the body.
pub(super) const ALIVE: u8 = 3;
/// Response: the member's group has failed, for the reason in the body.
pub(super) const FAILED: u8 = 4;

/// Encodes a message.
pub(super) fn frame(id: u64, kind: u8, body: &[u8]) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend_from_slice(&id.to_le_bytes());
    out.push(kind);
    out.extend_from_slice(&(body.len() as u16).to_le_bytes());
    out.extend_from_slice(body);
    out
}

/// Whether the bytes are a complete message. `None` when they are not the beginning of one.
pub(super) fn is_complete(bytes: &[u8]) -> Option<bool> {
    if !MAGIC.starts_with(&bytes[..bytes.len().min(8)]) {
        return None;
    }
    let Some(length) = bytes.get(HEADER_BYTES - 2..HEADER_BYTES) else { return Some(false) };
    let length = usize::from(u16::from_le_bytes([length[0], length[1]]));
    (length <= MAX_BODY_BYTES).then_some(bytes.len() >= HEADER_BYTES + length)
}
