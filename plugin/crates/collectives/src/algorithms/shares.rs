//! Which part of the buffer each rank owns in a direct all-reduce, so that links of unequal rates are done at the same time.
//!
//! In a direct all-reduce of D bytes between p ranks, a rank that owns the share w sends its contribution to the other shares and
//! the result of its own to p - 1 ranks: (1 - w)D + (p - 1)wD = (1 + (p - 2)w)D bytes, and receives as many. So ranks with links of
//! the rates B are done at the same time T with shares w = (TB/D - 1)/(p - 2), where T = 2(p - 1)D / sum(B), as all shares together
//! are everything. A rank whose share would be negative owns nothing: it sends D and receives D, which no all-reduce can avoid. The
//! others share what is left by the same formula. Then T is the larger one of 2(p - 1)D / sum(B) and D / min(B), and no all-reduce
//! by the ranks alone takes less.

use std::ops::Range;

use crate::algorithms::plan::consecutive;

/// Rates are scaled so that the highest one is this. A lower rate is off by a millionth of it at most, and no product of a weight
/// and a number of elements overflows 128 bits.
const SCALE: u128 = 1 << 20;

/// The weights of the ranks' shares for links of these rates, in any unit. They depend on nothing else, and are integers, so all
/// ranks compute the same ones. With fewer than three ranks every split costs the same, and the weights are equal.
fn weights(rates: &[u64]) -> Vec<u128> {
    let equal = vec![1; rates.len()];
    let highest = rates.iter().copied().max().map_or(0, u128::from);
    if rates.len() < 3 || highest == 0 {
        return equal;
    }
    let rates: Vec<u128> = rates.iter().map(|rate| u128::from(*rate) * SCALE / highest).collect();
    let mut owners: Vec<usize> = (0..rates.len()).collect();
    loop {
        let sum: u128 = owners.iter().map(|rank| rates[*rank]).sum();
        // The share, but for the factor sum * (p - 2): with q owners T is (q + p - 2)D / sum.
        let factor = (owners.len() + rates.len() - 2) as u128;
        let before = owners.len();
        owners.retain(|rank| factor * rates[*rank] >= sum);
        if owners.len() == before {
            let mut weights = vec![0; rates.len()];
            owners.iter().for_each(|rank| weights[*rank] = factor * rates[*rank] - sum);
            return weights;
        }
    }
}

/// The range of `count` elements that each rank owns, for links of these rates. The ranges are consecutive and cover everything.
pub(crate) fn shares(rates: &[u64], count: usize) -> Vec<Range<usize>> {
    let weights = weights(rates);
    let all: u128 = weights.iter().sum();
    let mut before = 0;
    let mut end = 0;
    let lengths: Vec<usize> = weights
        .iter()
        .map(|weight| {
            before += weight;
            let start = std::mem::replace(&mut end, (count as u128 * before / all) as usize);
            end - start
        })
        .collect();
    consecutive(&lengths)
}

/// The time of a direct all-reduce with these shares, in multiples of the time in which the fastest link carries the buffer once.
pub(crate) fn relative_time(rates: &[u64]) -> f64 {
    let weights = weights(rates);
    let all = weights.iter().sum::<u128>().max(1) as f64;
    let others = rates.len().saturating_sub(2) as f64;
    let highest = rates.iter().copied().max().unwrap_or(1) as f64;
    let time = |(weight, rate): (&u128, &u64)| {
        (1.0 + others * *weight as f64 / all) * highest / *rate as f64
    };
    weights.iter().zip(rates).map(time).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use evenkeel_testkit::TestRng;

    /// No all-reduce by the ranks alone is faster, see the module's comment.
    fn bound(rates: &[u64]) -> f64 {
        let (lowest, highest) = (*rates.iter().min().unwrap(), *rates.iter().max().unwrap());
        let sum: u64 = rates.iter().sum();
        let all = 2.0 * (rates.len() - 1) as f64 * highest as f64 / sum as f64;
        all.max(highest as f64 / lowest as f64)
    }

    #[test]
    fn shares_cover_everything_and_meet_the_bound() {
        for seed in 0..2000 {
            let mut rng = TestRng::new(seed);
            let size = 1 + rng.index(40);
            let spread = [2, 10, 100_000][rng.index(3)];
            let rates: Vec<u64> =
                (0..size).map(|_| 1000 + rng.index(1000 * spread) as u64).collect();
            for count in [0, 1, size, 1 + rng.index(1 << 30)] {
                let ranges = shares(&rates, count);
                assert_eq!(ranges.len(), size);
                assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start), "{rates:?}");
                assert_eq!((ranges[0].start, ranges[size - 1].end), (0, count), "{rates:?}");
            }
            if size >= 3 {
                let over = relative_time(&rates) / bound(&rates);
                assert!((0.999..1.001).contains(&over), "{over} of the bound: {rates:?}");
            }
            // The load of each link, in elements, as the ranges have it.
            let count = 100_000_000;
            let load = |range: &Range<usize>| {
                count as f64 + (size as f64 - 2.0).max(0.0) * range.len() as f64
            };
            let highest = *rates.iter().max().unwrap() as f64;
            for (range, rate) in shares(&rates, count).iter().zip(&rates) {
                let time = load(range) / count as f64 * highest / *rate as f64;
                assert!(time <= relative_time(&rates) * 1.001, "{range:?} of {rates:?}");
            }
        }
    }

    #[test]
    fn slow_rank_owns_less_or_nothing() {
        let lengths =
            |rates: &[u64]| shares(rates, 8400).iter().map(Range::len).collect::<Vec<_>>();
        assert_eq!(lengths(&[7; 8]), [1050; 8]);
        // (14 * 60 / 760 - 1) / 6 of everything is 147.4.
        let slow = lengths(&[100, 100, 100, 60, 100, 100, 100, 100])[3];
        assert!((147..=148).contains(&slow), "{slow}");
        assert_eq!(lengths(&[100, 100, 40, 100])[2], 0);
        assert_eq!(lengths(&[1, 1, u64::MAX]), [0, 0, 8400]);
        // Between two ranks all splits cost the same.
        assert_eq!(lengths(&[1, 100]), [4200; 2]);
        assert_eq!(lengths(&[5]), [8400]);
    }

    #[test]
    fn rates_can_be_of_any_magnitude() {
        for rates in [vec![u64::MAX; 5], vec![1; 5], vec![u64::MAX, 1, 1, 1, u64::MAX]] {
            let ranges = shares(&rates, usize::MAX >> 1);
            assert_eq!(ranges[4].end, usize::MAX >> 1, "{rates:?}");
        }
    }
}
