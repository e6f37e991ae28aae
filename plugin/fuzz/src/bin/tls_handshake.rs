//! The bytes of a TLS handshake, from anybody: how they are cut into records, their number, and
//! whose public key is accepted.
#![no_main]

use std::sync::LazyLock;

use evenkeel_fuzz::{fuzz_target, within, write_seeds};
use evenkeel_protocol::JobKey;
use evenkeel_tls::{Handshake, JobIdentity, MAX_HANDSHAKE_BYTES};

fn identity(digit: &str) -> JobIdentity {
    let key = JobKey::parse(&digit.repeat(64)).expect("a key of 64 digits");
    JobIdentity::of(&key).expect("an identity of any key")
}

static OURS: LazyLock<JobIdentity> = LazyLock::new(|| identity("1"));

fn connector(identity: &JobIdentity) -> Handshake {
    Handshake::connector(identity).expect("random numbers")
}

fn listener(identity: &JobIdentity) -> Handshake {
    Handshake::listener(identity).expect("random numbers")
}

/// What each side sends first, also one with another key. The first byte says which side the rest
/// is for.
fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = vec![];
    for theirs in [OURS.clone(), identity("2")] {
        let (mut near, mut far) = (connector(&OURS), listener(&theirs));
        let first = near.to_send();
        feed(&mut far, &first);
        let second = far.to_send();
        feed(&mut near, &second);
        let third = near.to_send();
        seeds.push([&[0], &first[..]].concat());
        seeds.push([&[1], &second[..]].concat());
        seeds.push([&[0], &first[..], &third[..]].concat());
    }
    seeds
}

/// Gives bytes to one side as a socket does, as many as are wanted. Returns their number.
fn feed(end: &mut Handshake, bytes: &[u8]) -> usize {
    let mut taken = 0;
    while taken < bytes.len() && end.wanted() > 0 {
        let next = &bytes[taken..][..end.wanted().min(bytes.len() - taken)];
        taken += next.len();
        if end.receive(next).is_err() {
            break;
        }
    }
    taken
}

fuzz_target!(init: write_seeds(seeds()), |input: &[u8]| {
    let Some((side, bytes)) = input.split_first() else { return };
    let mut end = if side % 2 == 0 { listener(&OURS) } else { connector(&OURS) };
    end.to_send();
    // The peer's bytes, and what the TLS library makes of them.
    let taken = within(1 << 20, || feed(&mut end, bytes));
    assert!(taken <= 2 * MAX_HANDSHAKE_BYTES, "{taken} bytes taken");
    end.to_send();
    // Nobody can sign for a session that has new random numbers.
    assert!(!end.is_complete());
    assert!(end.into_session().is_err());
});
