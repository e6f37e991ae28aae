//! Records of an encrypted flow, changed, cut, moved and repeated by whoever is between the peers.
#![no_main]

use std::sync::LazyLock;

use evenkeel_fuzz::{Steps, fuzz_target, job_key, within, write_seeds};
use evenkeel_tls::{
    HEADER_BYTES, Handshake, JobIdentity, MAX_RECORD, OVERHEAD, Opener, RecordError, Sealer,
    record_length,
};

static IDENTITY: LazyLock<JobIdentity> =
    LazyLock::new(|| JobIdentity::of(&job_key()).expect("an identity of any key"));

/// A session, from one end to the other.
fn session() -> (Sealer, Opener) {
    let mut near = Handshake::connector(&IDENTITY).expect("random numbers");
    let mut far = Handshake::listener(&IDENTITY).expect("random numbers");
    while !near.is_complete() || !far.is_complete() {
        pass(&mut near, &mut far);
        pass(&mut far, &mut near);
    }
    let near = near.into_session().expect("a complete handshake");
    let far = far.into_session().expect("a complete handshake");
    let ends = Sealer::new(&near.send).zip(Opener::new(&far.receive));
    ends.expect("keys of their cipher")
}

fn pass(from: &mut Handshake, to: &mut Handshake) {
    let bytes = from.to_send();
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        let (next, left) = rest.split_at(to.wanted().min(rest.len()));
        to.receive(next).expect("the bytes of a peer with the same key");
        rest = left;
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let header = |length: u16| {
        let length = length.to_be_bytes();
        [&[1, 23, 3, 3, length[0], length[1]][..], &[0; 40]].concat()
    };
    // Records as they are, one that is repeated, one with a changed bit; bytes that begin as
    // records do.
    vec![
        vec![0, 4, 0, 0, 0, 9, 0, 0],
        vec![0, 4, 0, 0, 1, 4, 0, 0],
        vec![0, 4, 0, 0, 2, 7, 0, 1],
        header(40),
        header(17),
        header(16),
        header(u16::MAX),
    ]
}

fuzz_target!(init: write_seeds(seeds()), |input: &[u8]| {
    let Some((kind, rest)) = input.split_first() else { return };
    if kind % 2 == 1 { headers(rest) } else { changes(&mut Steps::new(rest)) }
});

/// Any bytes. No key is needed for these.
fn headers(bytes: &[u8]) {
    let length = within(0, || record_length(bytes));
    for cut in 0..bytes.len().min(HEADER_BYTES) {
        // What may become a record may have become one before.
        assert!(length.is_err() || record_length(&bytes[..cut]) == Ok(None));
    }
    match length {
        Ok(None) => assert!(bytes.len() < HEADER_BYTES),
        Ok(Some(length)) => {
            assert!((OVERHEAD..=MAX_RECORD).contains(&length));
            let (_, mut opener) = session();
            let mut record = vec![0; length];
            let there = bytes.len().min(length);
            record[..there].copy_from_slice(&bytes[..there]);
            assert_eq!(within(0, || opener.open(&mut record)), Err(RecordError::Forged));
        }
        Err(error) => assert_eq!(error, RecordError::NotARecord),
    }
}

/// Records of a peer. The first that is not the next one of the peer ends the session.
fn changes(steps: &mut Steps<'_>) {
    let (mut sealer, mut opener) = session();
    let mut last: Vec<u8> = vec![];
    while let Some(length) = steps.next_byte() {
        let plain = vec![length; length.into()];
        let mut sealed = vec![0; plain.len() + OVERHEAD];
        sealed[HEADER_BYTES..][..plain.len()].copy_from_slice(&plain);
        sealer.seal(&mut sealed).expect("a key that is not used up");
        let (place, change) = (steps.short() as usize, steps.next_byte().unwrap_or_default());
        let mut record = match change % 8 {
            1 => last.clone(),
            2 => sealed[..place % sealed.len()].to_vec(),
            3 => {
                let place = place % sealed.len();
                sealed[place] ^= change | 1;
                sealed.clone()
            }
            4 => [&sealed[..], &[0]].concat(),
            _ => sealed.clone(),
        };
        let is_next = !(1..=4).contains(&(change % 8));
        let opened = within(0, || opener.open(&mut record));
        if !is_next {
            assert!(opened.is_err());
            return;
        }
        assert_eq!(opened, Ok(plain.len()));
        assert_eq!(record[HEADER_BYTES..][..plain.len()], plain);
        last = sealed;
    }
}
