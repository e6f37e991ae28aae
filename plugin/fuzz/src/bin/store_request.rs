//! Requests to a store's server, from every process that reaches its port, unless the job encrypts.
#![no_main]

use evenkeel_collectives::MemoryStore;
use evenkeel_collectives::fuzzing::{MAX_RESPONSE, answer_request, request};
use evenkeel_fuzz::{fuzz_target, within, write_seeds};

const SET: u8 = 1;
const GET: u8 = 2;
const ADD: u8 = 3;
const DELETE: u8 = 4;
const SET_ONCE: u8 = 5;
const GET_MANY: u8 = 6;
const AWAIT_CHANGE: u8 = 7;

fn seeds() -> Vec<Vec<u8>> {
    let names = [1, 0, 0, 0, b'a', 1, 0, 0, 0, b'b'];
    let wait = [100, 0, 0, 0, 0, 0, 0, 0, 1, b'1'];
    let mut seeds = vec![
        request(SET, "a", b"1"),
        request(GET, "a", b""),
        request(ADD, "n", &5i64.to_le_bytes()),
        request(DELETE, "a", b""),
        request(SET_ONCE, "b", b"2"),
        request(GET_MANY, "", &names),
        request(AWAIT_CHANGE, "a", &wait),
    ];
    seeds.push(seeds.concat());
    seeds
}

fuzz_target!(init: write_seeds(seeds()), |input: &[u8]| {
    let store = MemoryStore::new();
    let mut rest = input;
    loop {
        // What is stored and answered was in the input: a value, at most all that fits into it, for
        // each name asked for.
        let limit = (16 << 10) + 4 * input.len() + input.len() * input.len();
        let Some((response, used)) = within(limit, || answer_request(&store, rest)) else { break };
        assert!((9..=rest.len()).contains(&used), "{used} of {}", rest.len());
        assert!(answer_request(&MemoryStore::new(), &rest[..used - 1]).is_none(), "answered early");
        assert!((5..=MAX_RESPONSE).contains(&response.len()));
        let length = [response[1], response[2], response[3], response[4]];
        assert_eq!(u32::from_le_bytes(length) as usize, response.len() - 5);
        assert!(response[0] <= 2);
        // What was just stored is there.
        let name = u32::from_le_bytes([rest[1], rest[2], rest[3], rest[4]]) as usize;
        let name = std::str::from_utf8(&rest[5..][..name]);
        if let (SET, 0, Ok(name)) = (rest[0], response[0], name) {
            let stored = answer_request(&store, &request(GET, name, &[]));
            let value = &rest[9 + name.len()..used];
            assert_eq!(stored.map(|(response, _)| response[5..].to_vec()).as_deref(), Some(value));
        }
        rest = &rest[used..];
    }
});
