//! What a transport has to offer: messages in order from one rank to another.
//!
//! A [`Endpoint`] is one rank's. It gives the bytes of an address, which the other ranks get through the store. Whoever has
//! something to say to a rank for the first time connects to its address and holds the [`Outgoing`] end of a link; the other
//! rank accepts the [`Incoming`] end. Nothing here waits, but for [`Endpoint::sleep`]. Which message is for which operation
//! is not a link's business; neither is which rank is behind it: the first message of every link says so.

use std::net::IpAddr;
use std::time::Duration;

use crate::error::Result;
use crate::memory::{Source, Target};

/// Bytes of a message's head on the wire.
pub(crate) const HEADER_BYTES: usize = 32;
/// In front of every header: who speaks something else, or another version, is not understood.
const MAGIC: [u8; 3] = *b"EK1";

/// What a message is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) kind: Kind,
    pub(crate) group: u64,
    pub(crate) tag: u32,
    /// Which operation of the group and tag.
    pub(crate) sequence: u32,
    /// Which message of the operation, between these two ranks.
    pub(crate) part: u32,
}

/// What kind of message it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(crate) enum Kind {
    /// The first of a link: `group` is the receiver's identity, `tag` the sender's rank.
    Hello = 0,
    /// Of a collective operation.
    Collective = 1,
    /// From a `send` to a `recv`.
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
        let Key { kind, group, tag, sequence, part } = self.key;
        let mut out = [0; HEADER_BYTES];
        out[..3].copy_from_slice(&MAGIC);
        out[3] = kind as u8;
        out[4..8].copy_from_slice(&tag.to_le_bytes());
        out[8..16].copy_from_slice(&group.to_le_bytes());
        out[16..20].copy_from_slice(&sequence.to_le_bytes());
        out[20..24].copy_from_slice(&part.to_le_bytes());
        out[24..].copy_from_slice(&self.length.to_le_bytes());
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
        let key = Key { kind, group: eight(8), tag: four(4), sequence: four(16), part: four(20) };
        (bytes[..3] == MAGIC).then_some(Self { key, length: eight(24) })
    }
}

/// What has become of a payload that was given to a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Submitted {
    /// The link is done with the memory.
    Done,
    /// The link needs it until it has finished as many loans as this says.
    Pending(u64),
}

/// Why a link cannot go on, for people.
pub(crate) type LinkError = String;

/// One rank's way to others.
pub(crate) trait Endpoint: Send + Sync {
    /// What others need to connect.
    fn address(&self) -> Vec<u8>;
    /// Where this rank's process can be reached by TCP.
    fn host(&self) -> IpAddr;
    /// Begins to connect to another rank; `None` when that rank cannot take another link now: ask again.
    fn connect(&self, address: &[u8]) -> Result<Option<Box<dyn Outgoing>>>;
    /// The next link from another rank, if one has come.
    fn accept(&self) -> Result<Option<Box<dyn Incoming>>>;
    /// Sleeps until `look` says that there is something, or for the time at most. `look` is asked after everything that may
    /// have happened on any link of this transport.
    fn sleep(&self, time: Duration, look: &mut dyn FnMut() -> bool);
}

/// The end of a link that sends. Dropping it ends the link and all loans.
pub(crate) trait Outgoing: Send {
    /// Sends a message; `None` when there is no room now.
    fn send(
        &mut self,
        header: &Header,
        payload: Source,
    ) -> std::result::Result<Option<Submitted>, LinkError>;
    /// Moves on what can move; the number of loans finished so far.
    fn finished(&mut self) -> std::result::Result<u64, LinkError>;
    /// Bytes carried so far, as exactly as it takes to see that a long message moves.
    fn carried(&self) -> u64;
    /// Nothing more is sent. Whether this process may end: all that was sent comes without it, or never will.
    fn close(&mut self) -> bool;
}

/// The end of a link that receives. Dropping it ends the link and all loans.
pub(crate) trait Incoming: Send {
    /// Moves on what can move; the next message's header, once that is there and nothing more can be done before it is taken.
    fn next_header(&mut self) -> std::result::Result<Option<Header>, LinkError>;
    /// Takes the payload of the message whose head was given last. `into` is as long as the payload.
    fn take(&mut self, into: Target) -> std::result::Result<Submitted, LinkError>;
    /// Moves on what can move; the number of loans finished so far. The link's end is told after what came before it.
    fn finished(&mut self) -> std::result::Result<u64, LinkError>;
    /// As [`Outgoing::carried`].
    fn carried(&self) -> u64;
}

#[cfg(test)]
mod tests {
    use super::*;
    use evenkeel_testkit::TestRng;

    #[test]
    fn heads_come_back_and_nothing_else_is_one() {
        let mut rng = TestRng::new(3);
        for kind in [Kind::Hello, Kind::Collective, Kind::Message] {
            let key = Key {
                kind,
                group: rng.next_u64(),
                tag: rng.next_u64() as u32,
                sequence: rng.next_u64() as u32,
                part: rng.next_u64() as u32,
            };
            let header = Header { key, length: rng.next_u64() };
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
