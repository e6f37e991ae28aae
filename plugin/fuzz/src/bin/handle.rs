//! A listener's handle, which NCCL or a reduction client carries.
#![no_main]

use std::net::Ipv6Addr;

use evenkeel_fuzz::{fuzz_target, padded, within, write_seeds};
use evenkeel_protocol::{HANDLE_BYTES, Handle, MAX_ADDRESSES, Nonce};

fn seeds() -> Vec<Vec<u8>> {
    let addresses = [
        [10, 1, 2, 3].into(),
        Ipv6Addr::LOCALHOST.into(),
        [0; 4].into(),
        Ipv6Addr::from([0xfd; 16]).into(),
    ];
    let of = |count: usize| Handle {
        addresses: addresses[..count].to_vec(),
        port: 7,
        nonce: Nonce([9; 16]),
    };
    (1..=addresses.len()).map(|count| of(count).encode().to_vec()).collect()
}

fuzz_target!(init: write_seeds(seeds()), |input: &[u8]| {
    let bytes = padded::<HANDLE_BYTES>(input);
    if let Ok(handle) = within(256, || Handle::decode(&bytes)) {
        assert!((1..=MAX_ADDRESSES).contains(&handle.addresses.len()));
        assert_eq!(handle.encode(), bytes);
    }
});
