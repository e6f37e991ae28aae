//! What a listener gets first, from anybody: an announcement of encryption, or a hello and the
//! proof behind it.
#![no_main]

use evenkeel_fuzz::{fuzz_target, job_key, padded, within, write_seeds};
use evenkeel_protocol::{
    CHALLENGE_BYTES, ConnectionId, ENCRYPTED_BYTES, Encrypted, HELLO_BYTES, Hello, Nonce,
    PROOF_BYTES,
};

const NONCE: Nonce = Nonce([0x11; 16]);

fn hello(checksum: bool, rdma: bool, random: Option<[u8; 12]>) -> [u8; HELLO_BYTES] {
    let connection = ConnectionId([0x22; 16]);
    Hello { nonce: NONCE, connection, flow: 3, flows: 4, checksum, rdma, random }.encode()
}

fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = vec![Encrypted::encode().to_vec()];
    for (checksum, rdma) in [(false, false), (true, false), (false, true), (true, true)] {
        seeds.push(hello(checksum, rdma, None).to_vec());
        let with_key = hello(checksum, rdma, Some([7; 12]));
        let challenge = job_key().challenge(&with_key, [0x33; 32]);
        let proof = job_key().answer(&with_key, &challenge).expect("a challenge of the same key");
        seeds.push([&with_key[..], &proof].concat());
    }
    seeds
}

fuzz_target!(init: write_seeds(seeds()), |input: &[u8]| {
    // Beginnings of a message stay such as bytes arrive, until one is wrong.
    for length in 1..=input.len().min(HELLO_BYTES) {
        let (before, now) = (&input[..length - 1], &input[..length]);
        assert!(Hello::may_begin_with(before) || !Hello::may_begin_with(now));
        assert!(Encrypted::may_begin_with(before) || !Encrypted::may_begin_with(now));
    }
    let announcement = padded::<ENCRYPTED_BYTES>(input);
    if within(0, || Encrypted::check(&announcement)).is_ok() {
        assert_eq!(announcement, Encrypted::encode());
        assert!(!Hello::may_begin_with(&announcement));
    }
    let bytes = padded::<HELLO_BYTES>(input);
    let mut accepted = 0;
    for (has_key, checksum) in [(false, false), (false, true), (true, false), (true, true)] {
        // A refusal has a text of a few words.
        if let Ok(hello) = within(64, || Hello::decode(&bytes, NONCE, has_key, checksum)) {
            assert_eq!(hello.encode(), bytes);
            assert_eq!(Hello::listener(&bytes), Ok(NONCE));
            assert_eq!((hello.random.is_some(), hello.checksum), (has_key, checksum));
            accepted += 1;
        }
    }
    assert!(accepted <= 1, "on more than one condition");
    let key = job_key();
    let challenge: [u8; CHALLENGE_BYTES] = key.challenge(&bytes, [0x33; 32]);
    let proof = padded::<PROOF_BYTES>(input.get(HELLO_BYTES..).unwrap_or_default());
    assert_eq!(key.accepts(&bytes, &challenge, &proof), key.answer(&bytes, &challenge) == Some(proof));
});
