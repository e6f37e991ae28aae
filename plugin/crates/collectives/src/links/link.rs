//! The interface of a transport: ordered messages from one rank to another.
//!
//! Every rank has an [`Endpoint`]. The other ranks get its address through the store. A rank that sends to another rank for the
//! first time connects to that address and gets the [`Outgoing`] end of a link. The other rank accepts the [`Incoming`] end.
//! Nothing here blocks except [`Endpoint::sleep`]. A link does not know which operation a message belongs to, nor which rank is
//! at the other end: the first message of every link carries the sender's rank.

use std::net::IpAddr;
use std::time::Duration;

use crate::error::Result;
use crate::memory::{Source, Target};

/// Bytes of a message's header on the wire.
pub(crate) const HEADER_BYTES: usize = 32;
/// The first bytes of every header: protocol and version.
const MAGIC: [u8; 3] = *b"EK1";
/// Bits of a payload's length in a header. Those above are a collective operation's digest. Earlier versions left them 0, and refuse
/// such a length, so both versions name the other one in their first operation. A link with other magic is dropped without a word.
const LENGTH_BITS: u32 = 48;

/// What a message belongs to: receives are matched to messages by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) kind: Kind,
    pub(crate) group: u64,
    pub(crate) tag: u32,
    /// The number of the operation within group and tag.
    pub(crate) sequence: u32,
    /// The number of the message within the operation, between these two ranks.
    pub(crate) part: u32,
    /// A digest of the collective operation: its name, root, reduction and data type, which must be the same on all ranks. 0 for
    /// other messages.
    pub(crate) operation: u16,
}

impl Key {
    /// Whether two ranks have called different operations where they should have called the same.
    pub(crate) fn contradicts(&self, other: &Self) -> bool {
        self.kind == Kind::Collective
            && (Self { part: other.part, operation: other.operation, ..*self }) == *other
            && self.operation != other.operation
    }
}

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(crate) enum Kind {
    /// The first message of a link: `group` is the receiver's identity, `tag` the sender's rank.
    Hello = 0,
    /// A message of a collective operation.
    Collective = 1,
    /// A message from a `send` to a `recv`.
    Message = 2,
}

/// A message without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) key: Key,
    /// Bytes of the payload.
    pub(crate) length: u64,
}

impl Header {
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let Key { kind, group, tag, sequence, part, operation } = self.key;
        let length = self.length | u64::from(operation) << LENGTH_BITS;
        let mut out = [0; HEADER_BYTES];
        out[..3].copy_from_slice(&MAGIC);
        out[3] = kind as u8;
        out[4..8].copy_from_slice(&tag.to_le_bytes());
        out[8..16].copy_from_slice(&group.to_le_bytes());
        out[16..20].copy_from_slice(&sequence.to_le_bytes());
        out[20..24].copy_from_slice(&part.to_le_bytes());
        out[24..].copy_from_slice(&length.to_le_bytes());
        out
    }

    /// Reads what [`Header::encode`] wrote; `None` if it did not.
    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let kind = match bytes[3] {
            0 => Kind::Hello,
            1 => Kind::Collective,
            2 => Kind::Message,
            _ => return None,
        };
        let four = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let eight = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let (group, tag, sequence, part) = (eight(8), four(4), four(16), four(20));
        let (length, operation) = (eight(24) % (1 << LENGTH_BITS), eight(24) >> LENGTH_BITS);
        let key = Key { kind, group, tag, sequence, part, operation: operation as u16 };
        (bytes[..3] == MAGIC).then_some(Self { key, length })
    }
}

/// The state of a payload after it was submitted to a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Submitted {
    /// The link is done with the memory.
    Done,
    /// The link needs the memory until its number of completed payloads reaches this.
    Pending(u64),
}

/// Why a link failed, as text.
pub(crate) type LinkError = String;

/// A rank's end of a transport.
pub(crate) trait Endpoint: Send + Sync {
    /// The address that other ranks connect to.
    fn address(&self) -> Vec<u8>;
    /// The IP address at which this rank's process can be reached by TCP.
    fn ip(&self) -> IpAddr;
    /// Begins to connect to another rank. `None` when that rank cannot accept another link now: try again.
    fn connect(&self, address: &[u8]) -> Result<Option<Box<dyn Outgoing>>>;
    /// The next link from another rank, if one has connected.
    fn accept(&self) -> Result<Option<Box<dyn Incoming>>>;
    /// Sleeps until `is_ready` returns true, or for the time at most. `is_ready` is called after any event on any link of this
    /// endpoint.
    fn sleep(&self, time: Duration, is_ready: &mut dyn FnMut() -> bool);
}

/// The sending end of a link. Dropping it closes the link and releases all memory.
pub(crate) trait Outgoing: Send {
    /// Sends a message. `None` when the link cannot take one now.
    fn send(
        &mut self,
        header: &Header,
        payload: Source,
    ) -> std::result::Result<Option<Submitted>, LinkError>;
    /// Makes progress and returns the number of payloads completed so far.
    fn completed(&mut self) -> std::result::Result<u64, LinkError>;
    /// Bytes carried so far, exact enough to see that a long message makes progress.
    fn carried(&self) -> u64;
    /// Closes the link for sending. Returns true once this process may exit: what was sent arrives without it, or never will.
    fn close(&mut self) -> bool;
}

/// The receiving end of a link. Dropping it closes the link and releases all memory.
pub(crate) trait Incoming: Send {
    /// Makes progress and returns the next message's header, once it has arrived and its payload must be received next.
    fn next_header(&mut self) -> std::result::Result<Option<Header>, LinkError>;
    /// Receives the payload of the message whose header was returned last. `into` is as long as the payload.
    fn receive_payload(&mut self, into: Target) -> std::result::Result<Submitted, LinkError>;
    /// Makes progress and returns the number of payloads completed so far. The link's end is reported after what arrived before it.
    fn completed(&mut self) -> std::result::Result<u64, LinkError>;
    /// As [`Outgoing::carried`].
    fn carried(&self) -> u64;
    /// Whether an operation waits for a message. For links that account for waits.
    fn set_awaited(&mut self, _is_awaited: bool) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use evenkeel_testkit::TestRng;

    #[test]
    fn header_decodes_only_what_was_encoded() {
        let mut rng = TestRng::new(3);
        for kind in [Kind::Hello, Kind::Collective, Kind::Message] {
            let key = Key {
                kind,
                group: rng.next_u64(),
                tag: rng.next_u64() as u32,
                sequence: rng.next_u64() as u32,
                part: rng.next_u64() as u32,
                operation: rng.next_u64() as u16,
            };
            let header = Header { key, length: rng.next_u64() % (1 << LENGTH_BITS) };
            let bytes = header.encode();
            assert_eq!(Header::decode(&bytes), Some(header));
            for at in 0..3 {
                let mut wrong = bytes;
                wrong[at] ^= 1;
                assert_eq!(Header::decode(&wrong), None);
            }
            let mut wrong = bytes;
            wrong[3] = 3;
            assert_eq!(Header::decode(&wrong), None);
        }
    }
}
