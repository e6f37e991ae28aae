//! Which server reduces which part of a vector. All ranks come to the same answer, because it depends on nothing else than
//! what they agree on.

use std::ops;

/// A range is not made smaller than this only to use one more server, in bytes.
const LEAST: usize = 32 << 10;
/// Ranges begin at multiples of this: it holds a whole number of elements of every type.
const ALIGN: usize = 128;

/// The ranges of an operation's vector of `total` bytes, each with its server. Small ones go to some servers only, as do all
/// if not more than `most` are to have a part. Servers take turns then.
pub(super) fn ranges(
    sequence: u64,
    total: usize,
    servers: usize,
    most: usize,
) -> Vec<(usize, ops::Range<usize>)> {
    let count = total.div_ceil(LEAST).clamp(1, servers.min(most).max(1));
    let each = total.div_ceil(count).next_multiple_of(ALIGN);
    // Operations that are on their way together go to different servers.
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
    fn ranges_cover_the_vector_once_and_no_server_twice() {
        let mut rng = TestRng::new(3);
        for _ in 0..10_000 {
            let servers = 1 + rng.below(9) as usize;
            let limit = 1 << rng.below(28);
            let total = rng.below(limit) as usize;
            let most = 1 + rng.below(9) as usize;
            let ranges = ranges(rng.next_u64(), total, servers, most);
            assert!(ranges.len() <= most);
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
    fn large_vectors_use_all_servers_evenly_and_small_ones_take_turns() {
        let lengths: Vec<_> = ranges(5, 1 << 20, 4, 64).into_iter().map(|(_, r)| r.len()).collect();
        assert_eq!(lengths, [1 << 18; 4]);
        let servers: Vec<_> = (0..4).map(|sequence| ranges(sequence, 1024, 3, 64)[0].0).collect();
        assert_eq!(servers, [0, 1, 2, 0]);
        let servers =
            |sequence| ranges(sequence, 1 << 20, 4, 2).into_iter().map(|(server, _)| server);
        assert_eq!((0..3).flat_map(servers).collect::<Vec<_>>(), [0, 1, 2, 3, 0, 1]);
    }
}
