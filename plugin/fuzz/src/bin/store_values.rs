//! Responses of a store's server, as a client reads a list of values in them.
#![no_main]

use evenkeel_collectives::fuzzing::{answer_request, decode_values, request};
use evenkeel_collectives::{MemoryStore, Store};
use evenkeel_fuzz::{fuzz_target, within, write_seeds};

const NAMES: usize = 4;

fn seeds() -> Vec<Vec<u8>> {
    let store = MemoryStore::new();
    for (name, value) in [("a", &b"one"[..]), ("b", &[7; 100])] {
        store.set(name, value).expect("a name and a value of valid lengths");
    }
    let names = [1, 0, 0, 0, b'a', 1, 0, 0, 0, b'b', 1, 0, 0, 0, b'c'];
    let response = answer_request(&store, &request(6, "", &names));
    response.map(|(response, _)| response[5..].to_vec()).into_iter().collect()
}

fuzz_target!(init: write_seeds(seeds()), |input: &[u8]| {
    // The values, and a place for each that was asked for: a longer list is refused before it is
    // kept.
    let limit = input.len() + 512;
    let Some(values) = within(limit, || decode_values(input, NAMES)) else { return };
    assert!((1..=NAMES).contains(&values.len()));
    let bytes: usize = values.iter().flatten().map(Vec::len).sum();
    assert!(bytes < input.len());
});
