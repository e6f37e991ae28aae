//! Messages of the reduction protocol, from a client or a server with the job's key.
#![no_main]

use evenkeel_fuzz::{fuzz_target, within, write_seeds};
use evenkeel_protocol::{Handle, Nonce};
use evenkeel_reduction::protocol::{HEADER_BYTES, MESSAGE_BYTES, Packet, Piece};
use evenkeel_reduction::{MAX_RANKS, Member, TreePosition};
use evenkeel_reduction_kernels::{DataType, Op};

fn packets() -> Vec<Packet> {
    let handle = Handle { addresses: vec![[10, 0, 0, 1].into()], port: 7, nonce: Nonce([9; 16]) };
    let member = Member {
        unique_id: [3; 16],
        comm_id: 0xabc,
        rank: 2,
        ranks: 4,
        position: TreePosition { index: 0, count: 2, leaf: 1, leaves: 2 },
        is_leaf: false,
        job: "team-a/llama".to_owned(),
    };
    let (kind, op) = (DataType::Bfloat16, Op::Max);
    let piece =
        Piece { sequence: 77, offset: 1 << 40, total: 1 << 41, length: 256 << 10, kind, op };
    vec![
        Packet::Join(member.clone(), handle.clone()),
        Packet::Join(member.leaf(), handle),
        Packet::Joined { piece_bytes: 262_144, window: 8 },
        Packet::Part(piece),
        Packet::Result(Piece { length: 64, ..piece }),
        Packet::Failed("rank 2 was lost".to_owned()),
        Packet::Leave,
    ]
}

fn encoded(packet: &Packet) -> Vec<u8> {
    let mut message = vec![0; MESSAGE_BYTES];
    let mut length = packet.encode(&mut message);
    if let Packet::Part(piece) | Packet::Result(piece) = packet {
        length = piece.message_bytes();
    }
    message.truncate(length);
    message
}

fuzz_target!(init: write_seeds(packets().iter().map(encoded)), |input: &[u8]| {
    // Texts of a failure have at most 1,024 bytes, each of which may become a character of three.
    let Ok(packet) = within(16 << 10, || Packet::decode(input)) else { return };
    match &packet {
        Packet::Part(piece) | Packet::Result(piece) => {
            assert!(piece.length > 0 && piece.offset + u64::from(piece.length) <= piece.total);
            assert_eq!(piece.message_bytes(), input.len());
            assert!((piece.length as usize).is_multiple_of(piece.kind.bytes()));
        }
        Packet::Join(member, _) => {
            assert!(member.rank < member.ranks && member.ranks <= MAX_RANKS);
            let TreePosition { index, count, leaf, leaves } = member.position;
            assert!(index < count && count <= member.ranks && leaf < leaves);
            let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"-._/?".contains(&byte);
            assert!(member.job.bytes().all(is_valid), "a name that is no label");
        }
        Packet::Failed(text) => assert!(!text.contains(char::is_control), "more than one line"),
        Packet::Joined { .. } | Packet::Leave => {}
    }
    // What was understood is understood again, and says the same. Unused fields and characters that
    // are replaced are not kept.
    let again = encoded(&packet);
    match (Packet::decode(&again), &packet) {
        (Ok(Packet::Failed(_)), Packet::Failed(_)) => {}
        (decoded, _) => assert_eq!(decoded.as_ref(), Ok(&packet)),
    }
    assert_eq!(again[..12], input[..12]);
    assert!(again.len() >= HEADER_BYTES);
});
