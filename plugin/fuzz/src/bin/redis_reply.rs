//! Replies of a Redis server, which is outside of the job, as the store reads them.
#![no_main]

use evenkeel_fuzz::{fuzz_target, within, write_seeds};
use redis::{FromRedisValue, Value};

fn seeds() -> Vec<Vec<u8>> {
    [
        "+OK\r\n",
        "-ERR unknown command\r\n",
        ":42\r\n",
        "$5\r\nvalue\r\n",
        "$-1\r\n",
        "*3\r\n$1\r\na\r\n$-1\r\n$0\r\n\r\n",
        "*-1\r\n",
        "_\r\n",
        "#t\r\n",
        ",3.5\r\n",
        "(3492890328409238509324850943850943825024385\r\n",
        "=7\r\ntxt:abc\r\n",
        "%1\r\n+a\r\n:1\r\n",
        "~1\r\n+a\r\n",
        ">2\r\n+message\r\n+a\r\n",
        "!3\r\nERR\r\n",
    ]
    .map(|reply| reply.as_bytes().to_vec())
    .into()
}

fuzz_target!(init: write_seeds(seeds()), |input: &[u8]| {
    // For an announced length the library reserves room for 4,096 values at most.
    let lines = input.iter().filter(|byte| **byte == b'\n').count();
    let limit = (1 << 20) * (1 + lines);
    let Ok(value) = within(limit, || redis::parse_redis_value(input)) else { return };
    let _ = <()>::from_redis_value(value.clone());
    let _ = i64::from_redis_value(value.clone());
    let _ = Vec::<Option<Vec<u8>>>::from_redis_value(value.clone());
    let bytes = Option::<Vec<u8>>::from_redis_value(value.clone());
    if let (Value::BulkString(read), Ok(bytes)) = (&value, bytes) {
        assert_eq!(bytes.as_ref(), Some(read));
    }
});
