//! Messages: their format, and how one is sent.

use std::sync::Arc;

use evenkeel_reduction_kernels::{DataType, Op};
use evenkeel_transport::{Block, HANDLE_BYTES, Handle, Nonce, PendingSend, SendConnection};

use super::member::{MAX_JOB_BYTES, MAX_RANKS, Member};
use super::message_size::{HEADER_BYTES, MESSAGE_BYTES};
use super::piece::Piece;
use crate::tree_position::TreePosition;

/// The nonce in the handle of every server's listener. Its address is configured, so the nonce is
/// no secret: only a job key keeps other clients out.
pub const NONCE: Nonce = Nonce(*b"evenkeel-reduce\x01");

/// Version of this protocol. Peers of different versions reject each other.
const VERSION: u16 = 2;
const MAGIC: [u8; 8] = *b"EVKL-RED";
/// Maximum length of the text of a failure, in bytes.
const MAX_TEXT_BYTES: usize = 1024;

/// Bytes that are not a valid message of this protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PacketError {
    /// Another protocol.
    #[error("a message of {0} bytes that is not of the reduction protocol")]
    WrongProtocol(usize),
    /// Another version.
    #[error("the peer has version {0} of the reduction protocol, this side version {VERSION}")]
    Version(u16),
    /// A field is outside its range.
    #[error("{field} is {value}: {wanted}")]
    OutOfRange {
        /// Which field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// Valid values.
        wanted: &'static str,
    },
}

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Packet {
    /// The client's first message: its rank, and where it listens for the server's connection.
    Join(Member, Handle),
    /// The server's first message: the client has joined.
    Joined {
        /// Maximum size of a piece, in bytes.
        piece_bytes: u32,
        /// Maximum number of pieces in flight.
        window: u32,
    },
    /// One rank's part of a piece. Its payload follows the header, in this message or the next one.
    Part(Piece),
    /// The reduction of all ranks' parts of a piece. Its payload follows as that of a part does.
    Result(Piece),
    /// The sender has failed, and why. Its last message.
    Failed(String),
    /// The client leaves without an error.
    Leave,
}

impl Packet {
    /// Writes the message without payload to the front of `into`, which must hold
    /// [`MESSAGE_BYTES`]. Returns its length.
    pub fn encode(&self, into: &mut [u8]) -> usize {
        into[..HEADER_BYTES].fill(0);
        into[..8].copy_from_slice(&MAGIC);
        into[8..10].copy_from_slice(&VERSION.to_le_bytes());
        into[10..12].copy_from_slice(&self.code().to_le_bytes());
        let body = &mut into[12..];
        match self {
            Self::Join(member, handle) => {
                body[..16].copy_from_slice(&member.unique_id);
                body[16..24].copy_from_slice(&member.comm_id.to_le_bytes());
                body[24..28].copy_from_slice(&member.rank.to_le_bytes());
                body[28..32].copy_from_slice(&member.ranks.to_le_bytes());
                let job = &member.job.as_bytes()[..member.job.len().min(MAX_JOB_BYTES)];
                body[32] = job.len() as u8;
                body[33] = member.is_leaf.into();
                let TreePosition { index, count, leaf, leaves } = member.position;
                for (at, field) in [(36, index), (40, count), (44, leaf), (48, leaves)] {
                    body[at..at + 4].copy_from_slice(&field.to_le_bytes());
                }
                let rest = &mut into[HEADER_BYTES..];
                rest[..HANDLE_BYTES].copy_from_slice(&handle.encode());
                rest[HANDLE_BYTES..HANDLE_BYTES + job.len()].copy_from_slice(job);
                return HEADER_BYTES + HANDLE_BYTES + job.len();
            }
            Self::Joined { piece_bytes, window } => {
                body[..4].copy_from_slice(&piece_bytes.to_le_bytes());
                body[4..8].copy_from_slice(&window.to_le_bytes());
            }
            Self::Part(piece) | Self::Result(piece) => {
                body[..8].copy_from_slice(&piece.sequence.to_le_bytes());
                body[8..16].copy_from_slice(&piece.offset.to_le_bytes());
                body[16..24].copy_from_slice(&piece.total.to_le_bytes());
                body[24..28].copy_from_slice(&piece.length.to_le_bytes());
                body[28] = piece.kind.code();
                body[29] = piece.op.code();
            }
            Self::Failed(text) => {
                let text = &text.as_bytes()[..text.len().min(MAX_TEXT_BYTES)];
                into[HEADER_BYTES..HEADER_BYTES + text.len()].copy_from_slice(text);
                return HEADER_BYTES + text.len();
            }
            Self::Leave => {}
        }
        HEADER_BYTES
    }

    /// Parses a message. The payload of a part or result may be in it.
    ///
    /// # Errors
    /// When it is not a valid message of this protocol.
    pub fn decode(message: &[u8]) -> Result<Self, PacketError> {
        let Some((header, rest)) = message.split_first_chunk::<HEADER_BYTES>() else {
            return Err(PacketError::WrongProtocol(message.len()));
        };
        if header[..8] != MAGIC {
            return Err(PacketError::WrongProtocol(message.len()));
        }
        let version = u16::from_le_bytes([header[8], header[9]]);
        if version != VERSION {
            return Err(PacketError::Version(version));
        }
        let code = u16::from_le_bytes([header[10], header[11]]);
        let body = &header[12..];
        let packet = match code {
            1 => {
                let (member, handle) = join(body, rest)?;
                Self::Join(member, handle)
            }
            2 => Self::Joined { piece_bytes: u32_at(body, 0), window: u32_at(body, 4) },
            3 => Self::Part(piece(body, rest.len())?),
            4 => Self::Result(piece(body, rest.len())?),
            5 => Self::Failed(text(rest)),
            6 => Self::Leave,
            other => {
                let wanted = "a type of message from 1 to 6";
                return Err(PacketError::OutOfRange { field: "type", value: other.into(), wanted });
            }
        };
        Ok(packet)
    }

    /// Sends the message, without payload, over a connection. `None` when that is not possible.
    pub fn send(&self, connection: &SendConnection) -> Option<PendingSend> {
        let mut block = Block::new(MESSAGE_BYTES);
        let length = self.encode(block.bytes_mut());
        connection.send_block(&Arc::new(block), length).ok().flatten()
    }

    /// Sends a last message, unless the connection has failed: then nobody misses it, and a warning
    /// would mislead.
    pub fn send_last(&self, connection: &SendConnection) -> Option<PendingSend> {
        if connection.has_failed() { None } else { self.send(connection) }
    }

    fn code(&self) -> u16 {
        match self {
            Self::Join(..) => 1,
            Self::Joined { .. } => 2,
            Self::Part(_) => 3,
            Self::Result(_) => 4,
            Self::Failed(_) => 5,
            Self::Leave => 6,
        }
    }
}

/// A failure's text. Control characters become spaces: the text is part of log lines, and must not
/// begin another one.
fn text(bytes: &[u8]) -> String {
    let bytes = &bytes[..bytes.len().min(MAX_TEXT_BYTES)];
    String::from_utf8_lossy(bytes).chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn join(body: &[u8], rest: &[u8]) -> Result<(Member, Handle), PacketError> {
    let out_of_range = |field, value: u64, wanted| PacketError::OutOfRange { field, value, wanted };
    let (rank, ranks) = (u32_at(body, 24), u32_at(body, 28));
    if ranks == 0 || ranks > MAX_RANKS {
        return Err(out_of_range("the number of ranks", ranks.into(), "1 to 4096 are possible"));
    }
    if rank >= ranks {
        return Err(out_of_range("the rank", rank.into(), "it must be below the number of ranks"));
    }
    let is_leaf = body[33] != 0;
    let position = TreePosition {
        index: u32_at(body, 36),
        count: u32_at(body, 40),
        leaf: u32_at(body, 44),
        leaves: u32_at(body, 48),
    };
    let TreePosition { index, count, leaf, leaves } = position;
    if index >= count || count > ranks {
        return Err(out_of_range(
            "the tree position",
            index.into(),
            "it must be below the number of the leaf's ranks",
        ));
    }
    if leaf >= leaves || leaves > ranks - count + 1 || (leaves == 1) != (count == ranks) {
        return Err(out_of_range("the leaf", leaf.into(), "each rank belongs to exactly one leaf"));
    }
    if leaves == 1 && index != rank || is_leaf && leaves > 1 {
        return Err(out_of_range(
            "the tree position",
            index.into(),
            "without a tree it is the rank",
        ));
    }
    let length = usize::from(body[32]);
    let Some((handle, job)) = rest.split_first_chunk::<HANDLE_BYTES>() else {
        return Err(out_of_range(
            "the length of a join",
            rest.len() as u64,
            "it must contain a handle",
        ));
    };
    if length > MAX_JOB_BYTES || job.len() != length {
        return Err(out_of_range(
            "the job's name's length",
            length as u64,
            "at most 63, as the message has",
        ));
    }
    let handle = Handle::decode(handle)
        .map_err(|_| out_of_range("the handle", 0, "it must hold the client's address"))?;
    let mut unique_id = [0; 16];
    unique_id.copy_from_slice(&body[..16]);
    // The name becomes part of log lines and labels.
    let is_valid = |c: char| c.is_ascii_alphanumeric() || "-._/".contains(c);
    let job = String::from_utf8_lossy(job);
    let job = job.chars().map(|c| if is_valid(c) { c } else { '?' }).collect();
    let comm_id = u64_at(body, 16);
    Ok((Member { unique_id, comm_id, rank, ranks, position, is_leaf, job }, handle))
}

fn piece(body: &[u8], inline: usize) -> Result<Piece, PacketError> {
    let out_of_range = |field, value: u64, wanted| PacketError::OutOfRange { field, value, wanted };
    let kind = DataType::from_code(body[28])
        .ok_or_else(|| out_of_range("the type of elements", body[28].into(), "0 to 11"))?;
    let op = Op::from_code(body[29])
        .ok_or_else(|| out_of_range("the reduction", body[29].into(), "0 to 3"))?;
    let piece = Piece {
        sequence: u64_at(body, 0),
        offset: u64_at(body, 8),
        total: u64_at(body, 16),
        length: u32_at(body, 24),
        kind,
        op,
    };
    let length = u64::from(piece.length);
    if length == 0 || !length.is_multiple_of(kind.bytes() as u64) {
        return Err(out_of_range("the length", length, "a whole number of elements, at least one"));
    }
    if piece.offset.checked_add(length).is_none_or(|end| end > piece.total) {
        return Err(out_of_range(
            "the offset",
            piece.offset,
            "the piece must lie within the operation",
        ));
    }
    if inline != piece.message_bytes() - HEADER_BYTES {
        return Err(out_of_range(
            "the payload with the header",
            inline as u64,
            "all of it up to 8 KiB, else none",
        ));
    }
    Ok(piece)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].first_chunk().copied().map_or(0, u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().copied().map_or(0, u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use evenkeel_testkit::TestRng;

    fn packets() -> Vec<Packet> {
        let handle =
            Handle { addresses: vec!["10.0.0.1".parse().unwrap()], port: 7, nonce: Nonce([9; 16]) };
        let member = Member {
            unique_id: [3; 16],
            comm_id: 0xabc,
            rank: 2,
            ranks: 4,
            position: TreePosition { index: 0, count: 2, leaf: 1, leaves: 2 },
            is_leaf: false,
            job: "team-a/llama".to_owned(),
        };
        let leaf = member.leaf();
        let piece = Piece {
            sequence: 77,
            offset: 1 << 40,
            total: 1 << 41,
            length: 256 << 10,
            kind: DataType::Bfloat16,
            op: Op::Max,
        };
        vec![
            Packet::Join(member, handle.clone()),
            Packet::Join(leaf, handle),
            Packet::Joined { piece_bytes: 262_144, window: 8 },
            Packet::Part(piece),
            Packet::Result(Piece { length: 8 << 10, ..piece }),
            Packet::Failed("rank 2 was lost".to_owned()),
            Packet::Leave,
        ]
    }

    fn encoded(packet: &Packet) -> Vec<u8> {
        let mut message = vec![0xee; MESSAGE_BYTES];
        let mut length = packet.encode(&mut message);
        if let Packet::Part(piece) | Packet::Result(piece) = packet {
            length = piece.message_bytes();
        }
        message.truncate(length);
        message
    }

    #[test]
    fn packets_survive_encode_and_decode() {
        for packet in packets() {
            assert_eq!(Packet::decode(&encoded(&packet)), Ok(packet));
        }
    }

    #[test]
    fn long_failure_text_is_truncated() {
        let packet = Packet::Failed("x".repeat(5000));
        let Ok(Packet::Failed(text)) = Packet::decode(&encoded(&packet)) else { panic!() };
        assert_eq!(text.len(), MAX_TEXT_BYTES);
    }

    #[test]
    fn failure_text_is_one_line() {
        let packet = Packet::Failed("lost\nwarning: \u{1b}[31mall is well".to_owned());
        let decoded = Packet::decode(&encoded(&packet));
        assert_eq!(decoded, Ok(Packet::Failed("lost warning:  [31mall is well".to_owned())));
    }

    #[test]
    fn other_protocol_version_is_named() {
        let mut message = encoded(&Packet::Leave);
        message[8] = 9;
        assert_eq!(Packet::decode(&message), Err(PacketError::Version(9)));
    }

    #[test]
    fn decoded_packet_is_valid_or_rejected() {
        let mut rng = TestRng::new(11);
        let packets = packets();
        let (mut decoded, mut rejected) = (0, 0);
        for _ in 0..50_000 {
            let mut message = encoded(rng.choose(&packets));
            (0..rng.below(3)).for_each(|_| rng.mutate(&mut message));
            match Packet::decode(&message) {
                Ok(Packet::Part(piece) | Packet::Result(piece)) => {
                    decoded += 1;
                    assert!(
                        piece.length > 0 && piece.offset + u64::from(piece.length) <= piece.total
                    );
                    assert_eq!(piece.message_bytes(), message.len());
                    assert_eq!(piece.length as usize % piece.kind.bytes(), 0);
                }
                Ok(Packet::Join(member, _)) => {
                    decoded += 1;
                    assert!(member.rank < member.ranks && member.ranks <= MAX_RANKS);
                    let TreePosition { index, count, leaf, leaves } = member.position;
                    assert!(index < count && count <= member.ranks && leaf < leaves);
                    assert!(member.job.len() <= MAX_JOB_BYTES);
                }
                Ok(_) => decoded += 1,
                Err(_) => rejected += 1,
            }
        }
        assert!(decoded > 1000 && rejected > 1000, "{decoded} and {rejected}");
    }
}
