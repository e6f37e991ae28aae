//! What a client and a server say to each other: messages of a header and a little payload. What is larger than that
//! little comes as the next message, bare, so that it is read straight to where it belongs.
//!
//! Every message begins with 64 bytes: magic 8, version u16, type u16, then 52 bytes that depend on the type. Integers are
//! little-endian. Each direction is a connection of its own, which carries messages in order. A client says [`Packet::Join`]
//! first, the server [`Packet::Joined`] or [`Packet::Failed`]. Then come parts and results, both in the client's order.

use std::io;

use evenkeel_reduction_kernels::{DataType, Op};
use evenkeel_transport::{HANDLE_BYTES, Handle, Nonce};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::seat::TreePosition;

/// What a server's listener takes for a handle's nonce: its address is known, so there is nothing to keep secret. Who must
/// be kept out needs a job key.
pub(crate) const NONCE: Nonce = Nonce(*b"evenkeel-reduce\x01");

/// Version of this protocol. Peers of different versions refuse each other.
pub(crate) const VERSION: u16 = 2;
/// Bytes of a header.
pub(crate) const HEADER_BYTES: usize = 64;
/// Largest payload that comes in the message of its header.
pub(crate) const INLINE_BYTES: usize = 8 << 10;
/// Largest message that begins with a header.
pub(crate) const MESSAGE_BYTES: usize = HEADER_BYTES + INLINE_BYTES;
/// Most ranks of a communicator.
pub const MAX_RANKS: u32 = 4096;
/// Longest name of a job, in bytes.
pub(crate) const MAX_JOB_BYTES: usize = 63;

const MAGIC: [u8; 8] = *b"EVKL-RED";
/// Longest text of a failure, in bytes.
const MAX_TEXT_BYTES: usize = 1024;

/// Bytes that are no message of this protocol, or one that makes no sense.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PacketError {
    /// Another protocol altogether.
    #[error("a message of {0} bytes that is none of the reduction protocol")]
    NotOurs(usize),
    /// Another version.
    #[error("the peer speaks version {0} of the reduction protocol, this side version {VERSION}")]
    Version(u16),
    /// A field is outside its range.
    #[error("{field} is {value}: {wanted}")]
    OutOfRange {
        /// Which field.
        field: &'static str,
        /// What it was.
        value: u64,
        /// What it may be.
        wanted: &'static str,
    },
}

/// Which rank of which communicator a client is, or which leaf: a server that brings its ranks' sums to a server above it, as
/// one rank brings its vector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Random bytes that all ranks of the communicator share, and nobody else.
    pub group: [u8; 16],
    /// NCCL's number for the communicator, for people.
    pub communicator: u64,
    /// This rank, below `ranks`; of a leaf, its number.
    pub rank: u32,
    /// The number of ranks, or of leaves, 1 to [`MAX_RANKS`].
    pub ranks: u32,
    /// With which others it has its servers.
    pub seat: TreePosition,
    /// Whether it is a leaf.
    pub is_leaf: bool,
    /// The job's name; may be empty.
    pub job: String,
}

impl Member {
    /// What it goes by at the server of this number in its list: each of these sums other parts of the vectors, and they
    /// may all go to one server above them.
    pub(crate) fn at(&self, server: usize) -> Self {
        let group = u128::from_le_bytes(self.group).rotate_left(16) ^ server as u128;
        Self { group: group.to_le_bytes(), ..self.clone() }
    }

    /// The leaf that all with the same servers are together.
    pub(crate) fn leaf(&self) -> Self {
        let TreePosition { leaf, leaves, .. } = self.seat;
        let seat = TreePosition::alone(leaf, leaves);
        Self { rank: leaf, ranks: leaves, seat, is_leaf: true, ..self.clone() }
    }

    /// For people.
    pub(crate) fn name(&self) -> String {
        format!("{} {}", if self.is_leaf { "leaf" } else { "rank" }, self.rank)
    }

    /// For people: what the one with this index and the same servers is called before it is known.
    pub(crate) fn name_of(&self, index: u32) -> String {
        match self.seat.leaves {
            1 => Self { rank: index, ..self.clone() }.name(),
            _ => format!("number {index} of the leaf's ranks"),
        }
    }

    /// Bytes for [`Member::group`], from the kernel.
    ///
    /// # Errors
    /// When it has none.
    pub fn new_group() -> io::Result<[u8; 16]> {
        let mut group = [0; 16];
        // So few come at once.
        getrandom(&mut group, GetRandomFlags::empty())?;
        Ok(group)
    }
}

/// Which elements of which operation a part or a result holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Counts the communicator's operations.
    pub(crate) sequence: u64,
    /// Where in the operation's vector it begins, in bytes.
    pub(crate) offset: u64,
    /// Bytes of the operation's vector.
    pub(crate) total: u64,
    /// Bytes: a whole number of elements, at least one.
    pub(crate) length: u32,
    /// Type of the elements.
    pub(crate) kind: DataType,
    /// What is done with them.
    pub(crate) op: Op,
}

impl Piece {
    /// Whether its payload comes in the message of its header.
    pub(crate) fn is_inline(&self) -> bool {
        self.length as usize <= INLINE_BYTES
    }

    /// Bytes of the message that begins with its header.
    pub(crate) fn message_bytes(&self) -> usize {
        HEADER_BYTES + if self.is_inline() { self.length as usize } else { 0 }
    }
}

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Packet {
    /// The client's first: who it is, and where it listens for the server's connection.
    Join(Member, Handle),
    /// The server's first, when the client is welcome.
    Joined {
        /// Largest piece, in bytes.
        chunk: u32,
        /// Most pieces that can be on their way.
        window: u32,
    },
    /// What one rank has of a piece. Its payload follows the header, here or in the next message.
    Part(Piece),
    /// What all ranks have of a piece, reduced. Its payload follows as that of a part does.
    Result(Piece),
    /// The server or the client cannot go on, and why. Nothing comes after it.
    Failed(String),
    /// The client goes, and nothing is amiss.
    Leave,
}

impl Packet {
    /// Writes the message, but for payload, to the front of `into`, which must hold [`MESSAGE_BYTES`]; gives its length.
    pub(crate) fn encode(&self, into: &mut [u8]) -> usize {
        into[..HEADER_BYTES].fill(0);
        into[..8].copy_from_slice(&MAGIC);
        into[8..10].copy_from_slice(&VERSION.to_le_bytes());
        into[10..12].copy_from_slice(&self.code().to_le_bytes());
        let body = &mut into[12..];
        match self {
            Self::Join(member, handle) => {
                body[..16].copy_from_slice(&member.group);
                body[16..24].copy_from_slice(&member.communicator.to_le_bytes());
                body[24..28].copy_from_slice(&member.rank.to_le_bytes());
                body[28..32].copy_from_slice(&member.ranks.to_le_bytes());
                let job = &member.job.as_bytes()[..member.job.len().min(MAX_JOB_BYTES)];
                body[32] = job.len() as u8;
                body[33] = member.is_leaf.into();
                let TreePosition { index, count, leaf, leaves } = member.seat;
                for (at, field) in [(36, index), (40, count), (44, leaf), (48, leaves)] {
                    body[at..at + 4].copy_from_slice(&field.to_le_bytes());
                }
                let rest = &mut into[HEADER_BYTES..];
                rest[..HANDLE_BYTES].copy_from_slice(&handle.encode());
                rest[HANDLE_BYTES..HANDLE_BYTES + job.len()].copy_from_slice(job);
                return HEADER_BYTES + HANDLE_BYTES + job.len();
            }
            Self::Joined { chunk, window } => {
                body[..4].copy_from_slice(&chunk.to_le_bytes());
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

    /// Reads a message. Of a part or result, the payload may or may not be in it.
    ///
    /// # Errors
    /// When it is none, or makes no sense.
    pub(crate) fn decode(message: &[u8]) -> Result<Self, PacketError> {
        let Some((header, rest)) = message.split_first_chunk::<HEADER_BYTES>() else {
            return Err(PacketError::NotOurs(message.len()));
        };
        if header[..8] != MAGIC {
            return Err(PacketError::NotOurs(message.len()));
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
            2 => Self::Joined { chunk: u32_at(body, 0), window: u32_at(body, 4) },
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

/// A text for people. It becomes part of log lines, and must not begin another one.
fn text(bytes: &[u8]) -> String {
    let bytes = &bytes[..bytes.len().min(MAX_TEXT_BYTES)];
    String::from_utf8_lossy(bytes).chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn join(body: &[u8], rest: &[u8]) -> Result<(Member, Handle), PacketError> {
    let out = |field, value: u64, wanted| PacketError::OutOfRange { field, value, wanted };
    let (rank, ranks) = (u32_at(body, 24), u32_at(body, 28));
    if ranks == 0 || ranks > MAX_RANKS {
        return Err(out("the number of ranks", ranks.into(), "1 to 4096 are possible"));
    }
    if rank >= ranks {
        return Err(out("the rank", rank.into(), "it must be below the number of ranks"));
    }
    let is_leaf = body[33] != 0;
    let seat = TreePosition {
        index: u32_at(body, 36),
        count: u32_at(body, 40),
        leaf: u32_at(body, 44),
        leaves: u32_at(body, 48),
    };
    let TreePosition { index, count, leaf, leaves } = seat;
    if index >= count || count > ranks {
        return Err(out("the seat", index.into(), "it must be below those of its servers' ranks"));
    }
    if leaf >= leaves || leaves > ranks - count + 1 || (leaves == 1) != (count == ranks) {
        return Err(out("the leaf", leaf.into(), "all leaves together must have all ranks"));
    }
    if leaves == 1 && index != rank || is_leaf && leaves > 1 {
        return Err(out("the seat", index.into(), "without a tree it is the rank"));
    }
    let length = usize::from(body[32]);
    let Some((handle, job)) = rest.split_first_chunk::<HANDLE_BYTES>() else {
        return Err(out("the length of a join", rest.len() as u64, "a handle must be in it"));
    };
    if length > MAX_JOB_BYTES || job.len() != length {
        return Err(out(
            "the job's name's length",
            length as u64,
            "at most 63, as the message has",
        ));
    }
    let handle = Handle::decode(handle)
        .map_err(|_| out("the handle", 0, "where the client listens must be in it"))?;
    let mut group = [0; 16];
    group.copy_from_slice(&body[..16]);
    // It becomes part of log lines and labels.
    let name = |c: char| c.is_ascii_alphanumeric() || "-._/".contains(c);
    let job = String::from_utf8_lossy(job);
    let job = job.chars().map(|c| if name(c) { c } else { '?' }).collect();
    let communicator = u64_at(body, 16);
    Ok((Member { group, communicator, rank, ranks, seat, is_leaf, job }, handle))
}

fn piece(body: &[u8], inline: usize) -> Result<Piece, PacketError> {
    let out = |field, value: u64, wanted| PacketError::OutOfRange { field, value, wanted };
    let kind = DataType::from_code(body[28])
        .ok_or_else(|| out("the type of elements", body[28].into(), "0 to 11"))?;
    let op =
        Op::from_code(body[29]).ok_or_else(|| out("the reduction", body[29].into(), "0 to 3"))?;
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
        return Err(out("the length", length, "a whole number of elements, at least one"));
    }
    if piece.offset.checked_add(length).is_none_or(|end| end > piece.total) {
        return Err(out("the offset", piece.offset, "the piece must lie within the operation"));
    }
    if inline != piece.message_bytes() - HEADER_BYTES {
        return Err(out(
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
            group: [3; 16],
            communicator: 0xabc,
            rank: 2,
            ranks: 4,
            seat: TreePosition { index: 0, count: 2, leaf: 1, leaves: 2 },
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
            Packet::Joined { chunk: 262_144, window: 8 },
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
    fn messages_come_back() {
        for packet in packets() {
            assert_eq!(Packet::decode(&encoded(&packet)), Ok(packet));
        }
    }

    #[test]
    fn servers_of_one_list_and_of_one_above_another_are_told_apart() {
        let Some(Packet::Join(member, _)) = packets().into_iter().next() else { panic!() };
        let member = Member { group: Member::new_group().unwrap(), ..member };
        let mut groups = vec![];
        for server in 0..64 {
            groups.push(member.at(server).group);
            groups.extend((0..64).map(|above| member.at(server).leaf().at(above).group));
        }
        groups.sort_unstable();
        groups.dedup();
        assert_eq!(groups.len(), 64 + 64 * 64);
    }

    #[test]
    fn texts_are_cut() {
        let packet = Packet::Failed("x".repeat(5000));
        let Ok(Packet::Failed(text)) = Packet::decode(&encoded(&packet)) else { panic!() };
        assert_eq!(text.len(), MAX_TEXT_BYTES);
    }

    #[test]
    fn texts_are_one_line() {
        let packet = Packet::Failed("lost\nwarning: \u{1b}[31mall is well".to_owned());
        let heard = Packet::decode(&encoded(&packet));
        assert_eq!(heard, Ok(Packet::Failed("lost warning:  [31mall is well".to_owned())));
    }

    #[test]
    fn other_versions_are_named() {
        let mut message = encoded(&Packet::Leave);
        message[8] = 9;
        assert_eq!(Packet::decode(&message), Err(PacketError::Version(9)));
    }

    /// Whatever comes, it is refused or means what it says.
    #[test]
    fn any_bytes_are_a_message_or_refused() {
        let mut rng = TestRng::new(11);
        let packets = packets();
        let (mut taken, mut refused) = (0, 0);
        for _ in 0..50_000 {
            let mut message = encoded(rng.choose(&packets));
            (0..rng.below(3)).for_each(|_| rng.mutate(&mut message));
            match Packet::decode(&message) {
                Ok(Packet::Part(piece) | Packet::Result(piece)) => {
                    taken += 1;
                    assert!(
                        piece.length > 0 && piece.offset + u64::from(piece.length) <= piece.total
                    );
                    assert_eq!(piece.message_bytes(), message.len());
                    assert_eq!(piece.length as usize % piece.kind.bytes(), 0);
                }
                Ok(Packet::Join(member, _)) => {
                    taken += 1;
                    assert!(member.rank < member.ranks && member.ranks <= MAX_RANKS);
                    let TreePosition { index, count, leaf, leaves } = member.seat;
                    assert!(index < count && count <= member.ranks && leaf < leaves);
                    assert!(member.job.len() <= MAX_JOB_BYTES);
                }
                Ok(_) => taken += 1,
                Err(_) => refused += 1,
            }
        }
        assert!(taken > 1000 && refused > 1000, "{taken} and {refused}");
    }
}
