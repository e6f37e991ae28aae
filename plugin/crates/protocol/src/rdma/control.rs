//! Control messages: what peers over RDMA send on the connection's only TCP connection, the control
//! connection.
//!
//! They set up the queue pairs, at the start and again when one has failed. The connector, which
//! sends the messages, offers a queue pair. The listener connects one of its own with it and
//! answers with that. The connector connects its own as well, and reports that it is ready. An
//! offer that replaces a queue pair lists the parts of messages that were sent there and not
//! acknowledged. The listener first makes sure that nothing more arrives over the old queue pair,
//! and then answers which of the parts it has. Those are not sent again, and the others cannot
//! arrive twice.
//!
//! Each side may use several ports. The queue pair of index `i` is between the ports of index `i`
//! modulo their number on each side. Where a side cannot have a queue pair, it sends the number 0
//! in its place, and the queue pair is offered again later.
//!
//! When the path of the control connection fails, the connector opens another one, from or to
//! another address. Both sides then send their ports again, and the connector offers all queue
//! pairs again. Messages that do not depend on the ports are replayed if the peer has not received
//! them ([`crate::ReplayBuffer`]).

use std::net::{IpAddr, Ipv6Addr};

use super::arrivals::WINDOW;
use crate::codec::{array, mapped};
use crate::limits::{MAX_ADDRESSES, MAX_QUEUE_PAIRS};

/// Maximum number of ports of a side of a connection.
pub const MAX_PORTS: usize = MAX_ADDRESSES;
/// Maximum number of parts of messages that a queue pair has in flight.
pub const MAX_PARTS_IN_FLIGHT: usize = 64;
/// Length of a message's header: kind u8, index of the queue pair u8, length of the body u16, zero
/// u32.
const HEADER: usize = 8;
const PART: usize = 12;
const PORT: usize = 34;
const PAIR: usize = 8;
const ADDRESS: usize = 16;

/// A control message. The first field of those about a queue pair is its index in the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlMessage {
    /// The sender's ports, 1 to [`MAX_PORTS`], and the memory to write to. It is each side's first
    /// message on a connection's first control connection, and the second one on others. From the
    /// connector also the number of the listener's ports for whose keys its memory has room in each
    /// credit, 1 to [`MAX_PORTS`]; 1 from the listener.
    Ports(u8, Vec<PortInfo>),
    /// The connector has a new queue pair. These parts may not have been received over the old one.
    Offer(u8, QueuePairInfo, Vec<MessagePart>),
    /// The listener has one too. It has received the parts whose bit is set; the lowest bit is for
    /// the first part.
    Answer(u8, QueuePairInfo, u64),
    /// The connector's queue pair is connected: the listener may use it.
    Ready(u8),
    /// The listener's queue pair has failed.
    QueuePairFailed(u8),
    /// The connector waits for the buffer of a message: its number and its length in bytes.
    CreditRequest(u64, u64),
    /// The connection is closed. The connector has sent all messages below this number.
    Close(u64),
    /// From the connector, before its first message: the messages' tag. As [`crate::Frame::Tag`],
    /// but 0 is sent too.
    Tag(i32),
    /// From the listener, as [`crate::Frame::TagsDifferFrom`]. Credits carry the buffers' tags.
    TagsDifferFrom(u64),
    /// From the connector, as [`crate::Frame::SameTagBelow`]. It has the lengths in bytes of the
    /// messages from the listener's number on; 0 for those that are in the listener's eager ring.
    SameTagBelow(u64, Vec<u32>),
    /// The addresses of this side's other ports, to which the connection can fail over; 1 to
    /// [`MAX_ADDRESSES`]. Not sent where there is none.
    AlternateAddresses(Vec<IpAddr>),
    /// The number of replayed messages received, from the connection's first one on. It is each
    /// side's first message on a control connection that replaces another.
    Ack(u64),
}

/// A port, and the memory there that the peer writes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortInfo {
    /// Its GID.
    pub gid: [u8; 16],
    /// Its local identifier, on InfiniBand.
    pub lid: u16,
    /// Its path MTU, as a verbs code.
    pub mtu: u8,
    /// Whether small messages may be sent before a buffer is posted for them.
    pub eager: bool,
    /// Marking of the packets between the two ports; the connector's holds for both.
    pub marking: PacketMarking,
    /// Address of the memory.
    pub address: u64,
    /// Its key.
    pub key: u32,
}

/// Marking of packets for quality of service.
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

/// A queue pair, or that there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePairInfo {
    /// Its number; 0 if there is none. Numbers 0 and 1 belong to the fabric's management.
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

/// Bytes that are no control message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid control message (kind {kind}, {length} bytes)")]
pub struct ControlMessageError {
    kind: u8,
    length: u16,
}

impl ControlMessage {
    /// Whether the message is valid on any control connection and between any ports, and is
    /// therefore replayed.
    pub fn is_replayed(&self) -> bool {
        match self {
            Self::CreditRequest(..)
            | Self::Close(_)
            | Self::Tag(_)
            | Self::TagsDifferFrom(_)
            | Self::SameTagBelow(..)
            | Self::AlternateAddresses(_) => true,
            Self::Ports(..)
            | Self::Offer(..)
            | Self::Answer(..)
            | Self::Ready(_)
            | Self::QueuePairFailed(_)
            | Self::Ack(_) => false,
        }
    }

    /// The bytes to send. Ports beyond [`MAX_PORTS`], parts of an offer beyond
    /// [`MAX_PARTS_IN_FLIGHT`], lengths beyond [`WINDOW`] and addresses beyond [`MAX_ADDRESSES`]
    /// are left out.
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Vec::new();
        let (kind, index) = match self {
            Self::Ports(keys, ports) => {
                ports.iter().take(MAX_PORTS).for_each(|port| port.encode(&mut body));
                (1, keys.saturating_sub(1))
            }
            Self::Offer(index, pair, parts) => {
                body.extend(pair.encode());
                for part in parts.iter().take(MAX_PARTS_IN_FLIGHT) {
                    body.extend(part.message.to_le_bytes());
                    body.extend(part.index.to_le_bytes());
                }
                (2, *index)
            }
            Self::Answer(index, pair, have) => {
                body.extend(pair.encode());
                body.extend(have.to_le_bytes());
                (3, *index)
            }
            Self::Ready(index) => (4, *index),
            Self::QueuePairFailed(index) => (5, *index),
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
            Self::Ack(count) => {
                body.extend(count.to_le_bytes());
                (12, 0)
            }
        };
        let length = (body.len() as u16).to_le_bytes();
        let mut out = vec![kind, index, length[0], length[1], 0, 0, 0, 0];
        out.append(&mut body);
        out
    }

    /// The message that the bytes begin with, and its length; `None` while it is incomplete.
    ///
    /// # Errors
    /// When the bytes begin with no valid message.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, ControlMessageError> {
        let Some((head, rest)) = bytes.split_first_chunk::<HEADER>() else { return Ok(None) };
        let [kind, index, low, high, zeros @ ..] = *head;
        let length = u16::from_le_bytes([low, high]);
        let error = ControlMessageError { kind, length };
        let max = PAIR + MAX_PARTS_IN_FLIGHT * PART;
        let max_index = match kind {
            1 => MAX_PORTS,
            2..=5 => MAX_QUEUE_PAIRS,
            _ => 1,
        };
        if !(1..=12).contains(&kind)
            || usize::from(length) > max
            || zeros != [0; 4]
            || usize::from(index) >= max_index
        {
            return Err(error);
        }
        let Some(body) = rest.get(..length.into()) else { return Ok(None) };
        let message = match (kind, body.len()) {
            (1, length) if (PORT..=MAX_PORTS * PORT).contains(&length) => {
                let ports = body.chunks_exact(PORT);
                if !ports.remainder().is_empty() {
                    return Err(error);
                }
                let ports: Option<Vec<_>> = ports.map(PortInfo::decode).collect();
                Self::Ports(index + 1, ports.ok_or(error)?)
            }
            (2, length) if length >= PAIR && (length - PAIR).is_multiple_of(PART) => {
                let (pair, parts) = body.split_at(PAIR);
                let parts = parts.chunks_exact(PART).map(|part| MessagePart {
                    message: u64::from_le_bytes(array(part, 0)),
                    index: u32::from_le_bytes(array(part, 8)),
                });
                Self::Offer(index, QueuePairInfo::decode(pair), parts.collect())
            }
            (3, 16) => {
                let have = u64::from_le_bytes(array(body, PAIR));
                Self::Answer(index, QueuePairInfo::decode(body), have)
            }
            (4, 0) => Self::Ready(index),
            (5, 0) => Self::QueuePairFailed(index),
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
        Ok(Some((message, HEADER + body.len())))
    }
}

impl PortInfo {
    fn encode(&self, out: &mut Vec<u8>) {
        out.extend(self.gid);
        out.extend(self.lid.to_le_bytes());
        out.extend([self.mtu, self.eager.into()]);
        out.extend(self.key.to_le_bytes());
        out.extend(self.address.to_le_bytes());
        out.extend([self.marking.traffic_class, self.marking.service_level]);
    }

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
    /// There is no queue pair.
    pub const NONE: Self = Self { number: 0, sequence: 0 };

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

    fn messages() -> Vec<ControlMessage> {
        let pair = QueuePairInfo { number: 17, sequence: 0xab_cdef };
        let parts: Vec<MessagePart> = (0..MAX_PARTS_IN_FLIGHT as u32)
            .map(|index| MessagePart { message: 1 << 40, index })
            .collect();
        let port = PortInfo {
            gid: [7; 16],
            lid: 3,
            mtu: 5,
            eager: true,
            address: 0x7fff_0000_1000,
            key: 99,
            marking: PacketMarking { traffic_class: 0xff, service_level: 15 },
        };
        vec![
            ControlMessage::Ports(1, vec![port]),
            ControlMessage::Ports(
                MAX_PORTS as u8,
                (1..=MAX_PORTS as u32).map(|key| PortInfo { key, ..port }).collect(),
            ),
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
    fn control_messages_decode_from_any_fragments() {
        let sent: Vec<u8> = messages().iter().flat_map(ControlMessage::encode).collect();
        for step in [1, 7, sent.len()] {
            let (mut received, mut decoded) = (Vec::new(), Vec::new());
            for bytes in sent.chunks(step) {
                received.extend(bytes);
                while let Some((message, used)) = ControlMessage::decode(&received).unwrap() {
                    decoded.push(message);
                    received.drain(..used);
                }
            }
            assert_eq!(decoded, messages());
            assert!(received.is_empty());
        }
    }

    #[test]
    fn control_message_is_refused_by_its_header() {
        for (at, value) in [(0, 0), (0, 13), (1, 8), (3, 0xff), (5, 1)] {
            let mut bytes = ControlMessage::Ready(1).encode();
            bytes[at] = value;
            assert!(ControlMessage::decode(&bytes).is_err(), "{bytes:?}");
        }
        let mut port = messages()[0].encode();
        // There is no such MTU.
        port[HEADER + 18] = 6;
        assert!(ControlMessage::decode(&port).is_err());
        // More ports, and more keys, than a side may have.
        let mut ports = messages()[1].encode();
        ports[2] += PORT as u8;
        ports.extend([0; PORT]);
        assert!(ControlMessage::decode(&ports).is_err());
        let mut keys = messages()[1].encode();
        keys[1] = MAX_PORTS as u8;
        assert!(ControlMessage::decode(&keys).is_err());
    }

    proptest! {
        #[test]
        fn control_message_decodes_any_bytes_without_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..64), kind in 0u8..14, length in 0u8..72,
        ) {
            let mut bytes = bytes;
            if bytes.len() >= HEADER {
                bytes[..HEADER].copy_from_slice(&[kind, 0, length, 0, 0, 0, 0, 0]);
            }
            if let Ok(Some((message, used))) = ControlMessage::decode(&bytes) {
                prop_assert_eq!(message.encode(), &bytes[..used]);
            }
        }
    }
}
