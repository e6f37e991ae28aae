//! What ranks of a group read in the store and from each other. The store is outside of the group.
#![no_main]

use evenkeel_collectives::fuzzing::GroupValue;
use evenkeel_fuzz::{fuzz_target, within, write_seeds};

fn seeds() -> Vec<Vec<u8>> {
    let kinds = GroupValue::ALL.into_iter().enumerate();
    kinds
        .flat_map(|(number, kind)| {
            kind.examples().into_iter().map(move |value| [&[number as u8], &value[..]].concat())
        })
        .collect()
}

fuzz_target!(init: write_seeds(seeds()), |input: &[u8]| {
    let Some((number, bytes)) = input.split_first() else { return };
    let kind = GroupValue::ALL[usize::from(*number) % GroupValue::ALL.len()];
    // A rank of 32 bytes at least becomes one of some hundred, and the values are encoded again
    // here.
    let limit = (4 << 10) + 32 * bytes.len();
    let Some(encoded) = within(limit, || kind.decode(bytes)) else { return };
    match kind {
        GroupValue::Header => assert_eq!(encoded, bytes[..encoded.len()]),
        GroupValue::Response if encoded.is_empty() => {}
        // Hosts may be written in more than one way, and texts are cut: what is encoded does not
        // change any more.
        _ => assert_eq!(kind.decode(&encoded), Some(encoded.clone())),
    }
});
