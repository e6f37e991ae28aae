//! All parsers of a peer's bytes or text, on corrupted seeds: none panics, none accepts bytes that would be encoded
//! otherwise, and all decode what is encoded.
//!
//! The seeds, one a line with its name, are messages of this protocol version. They also pin its layout.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails there")]

use evenkeel_protocol::{
    CHALLENGE_BYTES, ChunkHeader, ConnectionId, FRAME_BYTES, Frame, HANDLE_BYTES, HELLO_BYTES,
    Handle, HandshakeError, Hello, JobKey, MAX_MESSAGE_BYTES, Nonce, PROOF_BYTES, Refusal,
    WELCOME_BYTES, Welcome,
};
use evenkeel_testkit::TestRng;

const ROUNDS: usize = 50_000;
const NONCE: Nonce = Nonce([0x11; 16]);
const CONNECTION: ConnectionId = ConnectionId([0x22; 16]);

fn seeds<const N: usize>(text: &str) -> Vec<[u8; N]> {
    let bytes = |line: &str| {
        let (name, hex) = line.split_once(' ').unwrap();
        assert_eq!(hex.len(), 2 * N, "{name}");
        std::array::from_fn(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap())
    };
    text.lines().map(bytes).collect()
}

/// Parses each seed as it is, then corrupted ones. `accepts` parses, checks the result, and returns whether the bytes were
/// accepted.
fn mutations<const N: usize>(seeds: &[[u8; N]], mut accepts: impl FnMut(&[u8; N]) -> bool) {
    for seed in seeds {
        assert!(accepts(seed), "not accepted: {seed:02x?}");
    }
    let mut rng = TestRng::new(1);
    let (mut accepted, mut refused) = (0, 0);
    for _ in 0..ROUNDS {
        let mut bytes = *rng.choose(seeds);
        if rng.one_in(4) {
            let at = rng.index(N);
            bytes[at..].copy_from_slice(&rng.choose(seeds)[at..]);
        }
        (0..=rng.below(3)).for_each(|_| rng.corrupt(&mut bytes));
        *(if accepts(&bytes) { &mut accepted } else { &mut refused }) += 1;
    }
    assert!(accepted > ROUNDS / 100 && refused > ROUNDS / 100, "{accepted} and {refused}");
}

#[test]
fn mutated_handles_are_parsed_or_refused() {
    mutations(&seeds::<HANDLE_BYTES>(include_str!("parser_seeds/handle.txt")), |bytes| {
        let Ok(handle) = Handle::decode(bytes) else { return false };
        assert_eq!(handle.encode(), *bytes);
        true
    });
}

#[test]
fn mutated_hellos_are_parsed_or_refused() {
    mutations(&seeds::<HELLO_BYTES>(include_str!("parser_seeds/hello.txt")), |bytes| {
        let all = [(false, false), (false, true), (true, false), (true, true)]
            .map(|(has_key, checksum)| Hello::decode(bytes, NONCE, has_key, checksum));
        for hello in all.iter().flatten() {
            assert_eq!(hello.encode(), *bytes);
            assert!(Hello::may_begin_with(bytes));
        }
        let accepted = all.iter().flatten().count();
        assert!(accepted <= 1, "on more than one condition");
        accepted == 1
    });
}

#[test]
fn mutated_welcomes_are_parsed_or_refused() {
    mutations(&seeds::<WELCOME_BYTES>(include_str!("parser_seeds/welcome.txt")), |bytes| {
        let verdict = match Welcome::check(bytes, CONNECTION) {
            Ok(()) => Ok(()),
            // A welcome for another connection.
            Err(HandshakeError::Refused(Refusal::Inconsistent)) if bytes[10] == 0 => return true,
            Err(HandshakeError::Refused(refusal)) => Err(refusal),
            Err(_) => return false,
        };
        let encoded = Welcome { connection: CONNECTION, verdict }.encode();
        // A refusal may be sent before the connection is known.
        assert_eq!(encoded[..16], bytes[..16]);
        assert!(verdict.is_err() || encoded == *bytes);
        true
    });
}

#[test]
fn mutated_frames_are_parsed_or_refused() {
    mutations(&seeds::<FRAME_BYTES>(include_str!("parser_seeds/frame.txt")), |bytes| {
        let Ok(frame) = Frame::decode(bytes) else { return false };
        assert_eq!(frame.encode(), *bytes);
        if let Frame::Chunk(chunk) = frame {
            assert!(chunk.end() <= chunk.total && chunk.total <= MAX_MESSAGE_BYTES);
        }
        true
    });
}

#[test]
fn mutated_sealed_frames_are_parsed_or_refused() {
    mutations(&seeds::<FRAME_BYTES>(include_str!("parser_seeds/sealed.txt")), |bytes| {
        // An attacker can compute checksums as well.
        let mut resealed = *bytes;
        let sum = evenkeel_protocol::checksum(0, &bytes[..28]);
        resealed[28..].copy_from_slice(&sum.to_le_bytes());
        assert_eq!(
            Frame::open(bytes).is_ok(),
            Frame::open(&resealed).is_ok() && resealed == *bytes
        );
        let Ok((frame, payload)) = Frame::open(&resealed) else { return false };
        assert_eq!(frame.seal(payload), resealed);
        true
    });
}

#[test]
fn mutated_challenges_and_proofs_are_parsed_or_refused() {
    let key = JobKey::parse(&"5a".repeat(32)).unwrap();
    let hello = seeds::<HELLO_BYTES>(include_str!("parser_seeds/hello.txt"))[0];
    let challenge = key.challenge(&hello, [0x33; 32]);
    let proof = key.answer(&hello, &challenge).unwrap();
    // Nothing that differs in any bit is accepted.
    let mut rng = TestRng::new(2);
    for _ in 0..2000 {
        let (mut other, mut answer) = (challenge, proof);
        rng.corrupt(&mut other);
        rng.corrupt(&mut answer);
        assert_eq!(key.answer(&hello, &other).is_some(), other == challenge);
        assert_eq!(key.accepts(&hello, &challenge, &answer), answer == proof);
        let bytes: [u8; CHALLENGE_BYTES] = rng.array();
        assert_eq!(key.answer(&hello, &bytes), None);
        assert!(!key.accepts(&hello, &bytes, &rng.array::<PROOF_BYTES>()));
    }
}

#[test]
fn mutated_job_keys_are_parsed_or_refused() {
    let mut rng = TestRng::new(3);
    let mut accepted = 0;
    for _ in 0..ROUNDS {
        let mut text = format!(" {}\n", "0aBf".repeat(16)).into_bytes();
        (0..rng.below(3)).for_each(|_| rng.mutate(&mut text));
        let text = String::from_utf8_lossy(&text);
        let is_key =
            |key: &str| key.len() == 64 && key.bytes().all(|byte| byte.is_ascii_hexdigit());
        assert_eq!(JobKey::parse(&text).is_some(), is_key(text.trim()), "{text:?}");
        accepted += usize::from(JobKey::parse(&text).is_some());
    }
    assert!(accepted > ROUNDS / 100 && accepted < ROUNDS, "{accepted}");
}

#[test]
fn parsers_decode_what_is_encoded() {
    let mut rng = TestRng::new(4);
    for _ in 0..ROUNDS {
        let addresses = (0..1 + rng.below(4))
            .map(|_| match rng.below(2) {
                0 => rng.array::<4>().into(),
                _ => rng.array::<16>().into(),
            })
            .collect();
        let handle = Handle { addresses, port: rng.next_u64() as u16, nonce: Nonce(rng.array()) };
        assert_eq!(Handle::decode(&handle.encode()), Ok(handle));

        let rdma = rng.one_in(2);
        let hello = Hello {
            nonce: Nonce(rng.array()),
            connection: ConnectionId(rng.array()),
            flow: if rdma { 0 } else { rng.next_u64() as u32 },
            flows: 1 + rng.below(if rdma { 8 } else { 64 }) as u16,
            checksum: rng.one_in(2),
            rdma,
            random: rng.one_in(2).then(|| rng.array()),
        };
        let has_key = hello.random.is_some();
        let decoded = Hello::decode(&hello.encode(), hello.nonce, has_key, hello.checksum);
        assert_eq!(decoded, Ok(hello));

        let frame = any_frame(&mut rng);
        assert_eq!(Frame::decode(&frame.encode()), Ok(frame));
        let sum = if matches!(frame, Frame::Chunk(_)) { rng.next_u64() as u32 } else { 0 };
        assert_eq!(Frame::open(&frame.seal(sum)), Ok((frame, sum)));
    }
}

fn any_frame(rng: &mut TestRng) -> Frame {
    match rng.below(8) {
        0 => Frame::Ack(rng.next_u64(), rng.next_u64() as u32),
        1 => Frame::FlowDead(rng.next_u64() as u32),
        2 => Frame::Close(rng.next_u64()),
        3 => Frame::Tag(rng.next_u64() as i32),
        4 => Frame::TagsDifferFrom(rng.next_u64()),
        5 => Frame::SameTagBelow(rng.next_u64()),
        6 => Frame::BufferTag(rng.next_u64(), rng.next_u64() as i32),
        _ => {
            let total = rng.below(MAX_MESSAGE_BYTES + 1);
            let offset = rng.below(total) / 128 * 128;
            let left = total - offset;
            let length = if rng.one_in(2) {
                left
            } else {
                (left.min(128) + rng.below(left)).min(left) / 128 * 128
            };
            let length = if length == 0 { left } else { length } as u32;
            let (message, ack_wanted) = (rng.next_u64(), rng.one_in(2));
            Frame::Chunk(ChunkHeader { message, offset, length, total, ack_wanted })
        }
    }
}
