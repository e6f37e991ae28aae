//! Datagrams between the processes of a job, from anybody. Only who has the job's key is heard,
//! where there is one.
#![no_main]

use std::time::Duration;

use evenkeel_diagnosis::View;
use evenkeel_diagnosis::election::Candidate;
use evenkeel_fuzz::{fuzz_target, job_key as key, within, write_seeds};

#[path = "../../../crates/transport/src/watch/datagram.rs"]
mod datagram;

use datagram::{Datagram, MAX_DATAGRAM};

fn seeds() -> Vec<Vec<u8>> {
    let address = |ip: [u8; 16]| (std::net::Ipv6Addr::from(ip), 7).into();
    let datagrams = [
        Datagram::Candidate(Candidate { rank: 1, id: 2, address: address([0xfd; 16]), beat: 3 }),
        Datagram::View(View { window: 1000, ..View::default() }),
        Datagram::Answer { collector: 5, interval: Duration::from_secs(2), verdict: "{}".into() },
    ];
    datagrams
        .iter()
        .flat_map(|datagram| [datagram.encode(None), datagram.encode(Some(&key()))])
        .collect()
}

fuzz_target!(init: write_seeds(seeds()), |input: &[u8]| {
    let bytes = &input[..input.len().min(MAX_DATAGRAM)];
    if let Some(datagram) = within(16 << 10, || Datagram::decode(bytes, None)) {
        let again = datagram.encode(None);
        assert!(again.len() <= MAX_DATAGRAM);
        // A view is encoded in more than one way.
        assert!(matches!(datagram, Datagram::View(_)) || again == bytes);
        let signed = datagram.encode(Some(&key()));
        assert_eq!(Datagram::decode(&signed, Some(&key())).map(|it| it.encode(None)), Some(again));
    }
    if let Some(datagram) = within(16 << 10, || Datagram::decode(bytes, Some(&key()))) {
        let (signed, tag) = bytes.split_last_chunk().expect("a datagram with a tag");
        assert_eq!(key().tag(signed), *tag);
        assert_eq!(Datagram::decode(signed, None), Some(datagram));
    }
});
