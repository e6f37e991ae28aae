//! What peers whose messages are carried by RDMA say on their connection's only TCP connection, the lifeline.
//!
//! There they agree on queue pairs, one per *lane*, at the start and again when one has failed. The connector, who sends
//! the messages, offers a queue pair for a lane; the listener connects one of its own with it and answers with that; the
//! connector does the same and lets go. An offer that replaces a queue pair lists the parts of messages that were sent and
//! not acknowledged there. The listener answers which of them it has, after it has seen to it that nothing more comes by
//! the old one: what it has is not sent again, what it has not cannot come twice.
//!
//! Queue pairs are those of the two ports at whose addresses the lifeline ends. When nothing gets through there, the
//! connector opens another lifeline, from or to another address, and all begins anew on it: each side says its port, and the
//! connector offers a queue pair for each lane. What does not depend on the ports is said again if the peer has not heard it
//! ([`crate::ReplayBuffer`]).

use std::net::{IpAddr, Ipv6Addr};

use super::arrivals::WINDOW;
use crate::codec::{array, mapped};
use crate::limits::{MAX_ADDRESSES, MAX_QUEUE_PAIRS};

/// Most parts of messages that a lane has on their way.
pub const MAX_PARTS_IN_FLIGHT: usize = 64;
/// Bytes in front of each word: kind u8, lane u8, number of bytes that follow u16, zero u32.
const HEAD: usize = 8;
const PART: usize = 12;
const PORT: usize = 34;
const PAIR: usize = 8;
const ADDRESS: usize = 16;

/// What a peer says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlMessage {
    /// Where it is, and where to write to. The first word of each side on a connection's first lifeline, the second one on
    /// others.
    Port(PortInfo),
    /// The connector has a new queue pair for a lane. These parts may not have come by the old one.
    Offer(u8, QueuePairInfo, Vec<MessagePart>),
    /// The listener has one too. Of the parts it has those whose bit is set, the lowest for the first.
    Answer(u8, QueuePairInfo, u64),
    /// The connector's queue pair is connected: the listener may use it.
    Ready(u8),
    /// The listener's queue pair has failed.
    QueuePairFailed(u8),
    /// The connector waits for the buffer of a message (its number), which is so long (its length in bytes).
    CreditRequest(u64, u64),
    /// No more comes. The connector has sent all messages below this number.
    Close(u64),
    /// From the connector, before its first message: the messages' tag. As [`crate::Frame::Tag`], and 0 is said too.
    Tag(i32),
    /// From the listener, as [`crate::Frame::TagsDifferFrom`]. The buffers' tags come with their credits.
    TagsDifferFrom(u64),
    /// From the connector, as [`crate::Frame::SameTagBelow`], with the lengths in bytes of the messages from the one on of
    /// which the listener has spoken; 0 of those that it has in its ring.
    SameTagBelow(u64, Vec<u32>),
    /// The addresses of this side's other ports, by which the connection could go on; 1 to [`MAX_ADDRESSES`]. Not said where
    /// there is none.
    AlternateAddresses(Vec<IpAddr>),
    /// So many words that outlive a lifeline have been heard, from the first one on. The first word of each side on a
    /// lifeline that takes the place of another one.
    Ack(u64),
}

/// A port, and the memory there that the peer writes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortInfo {
    /// Its address.
    pub gid: [u8; 16],
    /// Its local identifier, on InfiniBand.
    pub lid: u16,
    /// Code of its largest packets.
    pub mtu: u8,
    /// Whether small messages may come before there is a buffer for them.
    pub eager: bool,
    /// What packets between the two ports are marked with, if the connector says this: traffic class and service level.
    pub marking: PacketMarking,
    /// Where the memory begins.
    pub address: u64,
    /// Its key.
    pub key: u32,
}

/// What tells packets from others on their way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacketMarking {
    /// Traffic class of the IP header.
    pub traffic_class: u8,
    /// Service level, on InfiniBand, at most [`PacketMarking::MAX_SERVICE_LEVEL`].
    pub service_level: u8,
}

impl PacketMarking {
    /// Highest service level.
    pub const MAX_SERVICE_LEVEL: u8 = 15;
}

/// A queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePairInfo {
    /// Its number.
    pub number: u32,
    /// Number of its first packet.
    pub sequence: u32,
}

/// A part of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessagePart {
    /// The message's number.
    pub message: u64,
    /// The part's number in it.
    pub index: u32,
}

/// Bytes that are no word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer says something on the lifeline that means nothing (kind {kind}, {length} bytes)")]
pub struct ControlMessageError {
    kind: u8,
    length: u16,
}

impl ControlMessage {
    /// Whether it holds whatever the lifeline and the ports are.
    pub fn is_replayed(&self) -> bool {
        match self {
            Self::CreditRequest(..)
            | Self::Close(_)
            | Self::Tag(_)
            | Self::TagsDifferFrom(_)
            | Self::SameTagBelow(..)
            | Self::AlternateAddresses(_) => true,
            Self::Port(_)
            | Self::Offer(..)
            | Self::Answer(..)
            | Self::Ready(_)
            | Self::QueuePairFailed(_)
            | Self::Ack(_) => false,
        }
    }

    /// The bytes to send. An offer's parts beyond [`MAX_PARTS_IN_FLIGHT`] are left out, lengths beyond [`WINDOW`], and addresses beyond
    /// [`MAX_ADDRESSES`].
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Vec::new();
        let (kind, lane) = match self {
            Self::Port(port) => {
                body.extend(port.gid);
                body.extend(port.lid.to_le_bytes());
                body.extend([port.mtu, port.eager.into()]);
                body.extend(port.key.to_le_bytes());
                body.extend(port.address.to_le_bytes());
                body.extend([port.marking.traffic_class, port.marking.service_level]);
                (1, 0)
            }
            Self::Offer(lane, pair, parts) => {
                body.extend(pair.encode());
                for part in parts.iter().take(MAX_PARTS_IN_FLIGHT) {
                    body.extend(part.message.to_le_bytes());
                    body.extend(part.index.to_le_bytes());
                }
                (2, *lane)
            }
            Self::Answer(lane, pair, have) => {
                body.extend(pair.encode());
                body.extend(have.to_le_bytes());
                (3, *lane)
            }
            Self::Ready(lane) => (4, *lane),
            Self::QueuePairFailed(lane) => (5, *lane),
            Self::CreditRequest(message, length) => {
                body.extend(message.to_le_bytes());
                body.extend(length.to_le_bytes());
                (6, 0)
            }
            Self::Close(messages) => {
                body.extend(messages.to_le_bytes());
                (7, 0)
            }
            Self::Tag(tag) => {
                body.extend(tag.to_le_bytes());
                (8, 0)
            }
            Self::TagsDifferFrom(from) => {
                body.extend(from.to_le_bytes());
                (9, 0)
            }
            Self::SameTagBelow(below, lengths) => {
                body.extend(below.to_le_bytes());
                for length in lengths.iter().take(WINDOW as usize) {
                    body.extend(length.to_le_bytes());
                }
                (10, 0)
            }
            Self::AlternateAddresses(addresses) => {
                for address in addresses.iter().take(MAX_ADDRESSES) {
                    body.extend(mapped(*address).octets());
                }
                (11, 0)
            }
            Self::Ack(words) => {
                body.extend(words.to_le_bytes());
                (12, 0)
            }
        };
        let length = (body.len() as u16).to_le_bytes();
        let mut out = vec![kind, lane, length[0], length[1], 0, 0, 0, 0];
        out.append(&mut body);
        out
    }

    /// The word that the bytes begin with, and its length; `None` while it is not whole.
    ///
    /// # Errors
    /// When they begin with no word.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, ControlMessageError> {
        let Some((head, rest)) = bytes.split_first_chunk::<HEAD>() else { return Ok(None) };
        let [kind, lane, low, high, zeros @ ..] = *head;
        let length = u16::from_le_bytes([low, high]);
        let error = ControlMessageError { kind, length };
        let most = PAIR + MAX_PARTS_IN_FLIGHT * PART;
        let laned = matches!(kind, 2..=5);
        if !(1..=12).contains(&kind)
            || usize::from(length) > most
            || zeros != [0; 4]
            || usize::from(lane) >= if laned { MAX_QUEUE_PAIRS } else { 1 }
        {
            return Err(error);
        }
        let Some(body) = rest.get(..length.into()) else { return Ok(None) };
        let word = match (kind, body.len()) {
            (1, PORT) => Self::Port(PortInfo::decode(body).ok_or(error)?),
            (2, length) if length >= PAIR && (length - PAIR).is_multiple_of(PART) => {
                let (pair, parts) = body.split_at(PAIR);
                let parts = parts.chunks_exact(PART).map(|part| MessagePart {
                    message: u64::from_le_bytes(array(part, 0)),
                    index: u32::from_le_bytes(array(part, 8)),
                });
                Self::Offer(lane, QueuePairInfo::decode(pair), parts.collect())
            }
            (3, 16) => {
                let have = u64::from_le_bytes(array(body, PAIR));
                Self::Answer(lane, QueuePairInfo::decode(body), have)
            }
            (4, 0) => Self::Ready(lane),
            (5, 0) => Self::QueuePairFailed(lane),
            (6, 16) => Self::CreditRequest(
                u64::from_le_bytes(array(body, 0)),
                u64::from_le_bytes(array(body, 8)),
            ),
            (7, 8) => Self::Close(u64::from_le_bytes(array(body, 0))),
            (8, 4) => Self::Tag(i32::from_le_bytes(array(body, 0))),
            (9, 8) => Self::TagsDifferFrom(u64::from_le_bytes(array(body, 0))),
            (10, length) if length >= 8 && length <= 8 + 4 * WINDOW as usize => {
                let (below, lengths) = body.split_at(8);
                let lengths = lengths.chunks_exact(4);
                if !lengths.remainder().is_empty() {
                    return Err(error);
                }
                let lengths = lengths.map(|length| u32::from_le_bytes(array(length, 0))).collect();
                Self::SameTagBelow(u64::from_le_bytes(array(below, 0)), lengths)
            }
            (11, length) if (ADDRESS..=MAX_ADDRESSES * ADDRESS).contains(&length) => {
                let addresses = body.chunks_exact(ADDRESS);
                if !addresses.remainder().is_empty() {
                    return Err(error);
                }
                let address = |bytes| Ipv6Addr::from(array::<ADDRESS>(bytes, 0)).to_canonical();
                Self::AlternateAddresses(addresses.map(address).collect())
            }
            (12, 8) => Self::Ack(u64::from_le_bytes(array(body, 0))),
            _ => return Err(error),
        };
        Ok(Some((word, HEAD + body.len())))
    }
}

impl PortInfo {
    fn decode(body: &[u8]) -> Option<Self> {
        let port = Self {
            gid: array(body, 0),
            lid: u16::from_le_bytes(array(body, 16)),
            mtu: body[18],
            eager: body[19] == 1,
            key: u32::from_le_bytes(array(body, 20)),
            address: u64::from_le_bytes(array(body, 24)),
            marking: PacketMarking { traffic_class: body[32], service_level: body[33] },
        };
        ((1..=5).contains(&port.mtu)
            && body[19] <= 1
            && body[33] <= PacketMarking::MAX_SERVICE_LEVEL)
            .then_some(port)
    }
}

impl QueuePairInfo {
    fn encode(self) -> [u8; PAIR] {
        let mut out = [0; PAIR];
        out[..4].copy_from_slice(&self.number.to_le_bytes());
        out[4..].copy_from_slice(&self.sequence.to_le_bytes());
        out
    }

    fn decode(body: &[u8]) -> Self {
        Self {
            number: u32::from_le_bytes(array(body, 0)),
            sequence: u32::from_le_bytes(array(body, 4)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn words() -> Vec<ControlMessage> {
        let pair = QueuePairInfo { number: 17, sequence: 0xab_cdef };
        let parts: Vec<MessagePart> = (0..MAX_PARTS_IN_FLIGHT as u32)
            .map(|index| MessagePart { message: 1 << 40, index })
            .collect();
        vec![
            ControlMessage::Port(PortInfo {
                gid: [7; 16],
                lid: 3,
                mtu: 5,
                eager: true,
                address: 0x7fff_0000_1000,
                key: 99,
                marking: PacketMarking { traffic_class: 0xff, service_level: 15 },
            }),
            ControlMessage::Offer(7, pair, vec![]),
            ControlMessage::Offer(0, pair, parts),
            ControlMessage::Answer(1, pair, u64::MAX),
            ControlMessage::Ready(0),
            ControlMessage::QueuePairFailed(3),
            ControlMessage::CreditRequest(9, 1 << 30),
            ControlMessage::Close(u64::MAX),
            ControlMessage::Tag(-5),
            ControlMessage::TagsDifferFrom(1 << 40),
            ControlMessage::SameTagBelow(1 << 50, vec![]),
            ControlMessage::SameTagBelow(
                64,
                (0..WINDOW as u32).map(|number| number << 24).collect(),
            ),
            ControlMessage::AlternateAddresses(vec![[10, 1, 2, 3].into()]),
            ControlMessage::AlternateAddresses(
                (1..=4).map(|last| [0xfd00, 0, 0, 0, 0, 0, 0, last].into()).collect(),
            ),
            ControlMessage::Ack(u64::MAX),
        ]
    }

    #[test]
    fn words_are_understood_one_after_the_other_and_however_they_come() {
        let said: Vec<u8> = words().iter().flat_map(ControlMessage::encode).collect();
        for step in [1, 7, said.len()] {
            let (mut heard, mut understood) = (Vec::new(), Vec::new());
            for bytes in said.chunks(step) {
                heard.extend(bytes);
                while let Some((word, used)) = ControlMessage::decode(&heard).unwrap() {
                    understood.push(word);
                    heard.drain(..used);
                }
            }
            assert_eq!(understood, words());
            assert!(heard.is_empty());
        }
    }

    #[test]
    fn what_means_nothing_is_refused_before_all_of_it_has_come() {
        for (at, value) in [(0, 0), (0, 13), (1, 8), (3, 0xff), (5, 1)] {
            let mut bytes = ControlMessage::Ready(1).encode();
            bytes[at] = value;
            assert!(ControlMessage::decode(&bytes).is_err(), "{bytes:?}");
        }
        let mut port = words()[0].encode();
        // No packet has this size.
        port[HEAD + 18] = 6;
        assert!(ControlMessage::decode(&port).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_taken_or_refused_without_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..64), kind in 0u8..14, length in 0u8..72,
        ) {
            let mut bytes = bytes;
            if bytes.len() >= HEAD {
                bytes[..HEAD].copy_from_slice(&[kind, 0, length, 0, 0, 0, 0, 0]);
            }
            if let Ok(Some((word, used))) = ControlMessage::decode(&bytes) {
                prop_assert_eq!(word.encode(), &bytes[..used]);
            }
        }
    }
}
