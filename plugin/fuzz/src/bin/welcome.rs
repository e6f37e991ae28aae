//! What a connector gets first: a welcome, or a challenge and then a welcome.
#![no_main]

use evenkeel_fuzz::{fuzz_target, job_key, padded, within, write_seeds};
use evenkeel_protocol::{
    CHALLENGE_BYTES, ConnectionId, HELLO_BYTES, HandshakeError, Refusal, WELCOME_BYTES, Welcome,
    is_challenge,
};

const CONNECTION: ConnectionId = ConnectionId([0x22; 16]);
const HELLO: [u8; HELLO_BYTES] = [0x44; HELLO_BYTES];
const REFUSALS: [Refusal; 10] = [
    Refusal::Version,
    Refusal::Authentication,
    Refusal::Inconsistent,
    Refusal::Busy,
    Refusal::Gone,
    Refusal::Checksum,
    Refusal::NoRdma,
    Refusal::RdmaOnly,
    Refusal::WrongListener,
    Refusal::Encryption,
];

fn seeds() -> Vec<Vec<u8>> {
    let verdicts = REFUSALS.into_iter().map(Err).chain([Ok(())]);
    let welcomes =
        verdicts.map(|verdict| Welcome { connection: CONNECTION, verdict }.encode().to_vec());
    welcomes.chain([job_key().challenge(&HELLO, [0x33; 32]).to_vec()]).collect()
}

fuzz_target!(init: write_seeds(seeds()), |input: &[u8]| {
    let bytes = padded::<WELCOME_BYTES>(input);
    let checked = within(64, || Welcome::check(&bytes, CONNECTION));
    let verdict = match &checked {
        Ok(()) => Some(Ok(())),
        Err(HandshakeError::Refused(refusal)) => Some(Err(*refusal)),
        Err(_) => None,
    };
    if let Some(verdict) = verdict {
        assert!(Welcome::may_begin_with(&bytes));
        let encoded = Welcome { connection: CONNECTION, verdict }.encode();
        // A welcome for another connection is as if refused.
        let is_of_another = verdict == Err(Refusal::Inconsistent) && bytes[10..12] == [0; 2];
        // A refusal may be sent before the connection is known.
        assert!(is_of_another || encoded[..16] == bytes[..16]);
        assert!(verdict.is_err() || encoded == bytes);
    }
    let refusal = within(64, || Welcome::refusal(&bytes));
    assert!(refusal.is_some() || Welcome::may_begin_with(&bytes));
    assert!(checked.is_err() || refusal.is_none());

    let challenge = padded::<CHALLENGE_BYTES>(input);
    assert_eq!(is_challenge(input), input.len() >= 8 && is_challenge(&challenge));
    assert!(!is_challenge(input) || !Welcome::may_begin_with(input));
    let key = job_key();
    if let Some(proof) = key.answer(&HELLO, &challenge) {
        assert!(key.accepts(&HELLO, &challenge, &proof));
        assert_eq!(key.challenge(&HELLO, padded(&challenge[8..])), challenge);
    }
});
