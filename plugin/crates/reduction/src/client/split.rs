//! Which server reduces which range of a vector. The answer is the same on all ranks: it depends
//! only on values that all ranks have in common.

use std::ops;

/// Minimum size of a range, in bytes. Vectors that are smaller go to fewer servers.
const MIN_RANGE_BYTES: usize = 32 << 10;
/// Ranges begin at multiples of this, which is a whole number of elements of every type.
const ALIGN: usize = 128;

/// The ranges of an operation's vector of `total` bytes, each with its server. Where there are
/// fewer ranges than servers, since the vector is small or `max_servers` is, servers take turns.
pub(super) fn ranges(
    sequence: u64,
    total: usize,
    servers: usize,
    max_servers: usize,
) -> Vec<(usize, ops::Range<usize>)> {
    let count = total.div_ceil(MIN_RANGE_BYTES).clamp(1, servers.min(max_servers).max(1));
    let each = total.div_ceil(count).next_multiple_of(ALIGN);
    // Operations in flight at the same time go to different servers.
    let turn = sequence.wrapping_mul(count as u64);
    let first = if count < servers { (turn % servers as u64) as usize } else { 0 };
    (0..count)
        .map(|part| (part * each).min(total)..((part + 1) * each).min(total))
        .enumerate()
        .filter(|(_, range)| !range.is_empty())
        .map(|(part, range)| ((first + part) % servers, range))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use evenkeel_testkit::TestRng;

    #[test]
    fn split_covers_the_vector_and_no_server_twice() {
        let mut rng = TestRng::new(3);
        for _ in 0..10_000 {
            let servers = 1 + rng.below(9) as usize;
            let limit = 1 << rng.below(28);
            let total = rng.below(limit) as usize;
            let max_servers = 1 + rng.below(9) as usize;
            let ranges = ranges(rng.next_u64(), total, servers, max_servers);
            assert!(ranges.len() <= max_servers);
            let mut at = 0;
            let mut used = vec![false; servers];
            for (server, range) in ranges {
                assert_eq!(range.start, at);
                assert!(!range.is_empty() && range.start % ALIGN == 0);
                assert!(!std::mem::replace(&mut used[server], true));
                at = range.end;
            }
            assert_eq!(at, total);
        }
    }

    #[test]
    fn split_is_even_and_small_vectors_take_turns() {
        let lengths: Vec<_> = ranges(5, 1 << 20, 4, 64).into_iter().map(|(_, r)| r.len()).collect();
        assert_eq!(lengths, [1 << 18; 4]);
        let servers: Vec<_> = (0..4).map(|sequence| ranges(sequence, 1024, 3, 64)[0].0).collect();
        assert_eq!(servers, [0, 1, 2, 0]);
        let servers =
            |sequence| ranges(sequence, 1 << 20, 4, 2).into_iter().map(|(server, _)| server);
        assert_eq!((0..3).flat_map(servers).collect::<Vec<_>>(), [0, 1, 2, 3, 0, 1]);
    }
}
