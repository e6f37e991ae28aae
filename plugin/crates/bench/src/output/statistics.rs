//! Durations in one line: how many, their mean, spread, middle and ends.

use serde::{Deserialize, Serialize};

/// Of some durations, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Statistics {
    /// How many.
    pub(crate) len: usize,
    /// Their mean.
    pub(crate) avg: f64,
    /// The standard deviation of all of them.
    pub(crate) sd: f64,
    /// The middle one; of an even number the mean of the two in the middle.
    pub(crate) median: f64,
    /// The shortest.
    pub(crate) min: f64,
    /// The longest.
    pub(crate) max: f64,
}

impl Statistics {
    /// Of durations in seconds; none of none.
    pub(crate) fn of(mut seconds: Vec<f64>) -> Option<Self> {
        seconds.sort_by(f64::total_cmp);
        let len = seconds.len();
        let (min, max) = (*seconds.first()? * 1e6, *seconds.last()? * 1e6);
        let avg = seconds.iter().sum::<f64>() / len as f64;
        let square = seconds.iter().map(|one| (one - avg).powi(2)).sum::<f64>() / len as f64;
        let median = (seconds[(len - 1) / 2] + seconds[len / 2]) / 2.0;
        Some(Self { len, avg: avg * 1e6, sd: square.sqrt() * 1e6, median: median * 1e6, min, max })
    }

    /// The heading above lines.
    pub(crate) fn heading() -> String {
        format!(
            "{:>16} {:>8} {:>11} {:>11} {:>11} {:>11} {:>11}",
            "(us)", "len", "avg", "sd", "median", "min", "max"
        )
    }

    /// A line of it.
    pub(crate) fn line(&self, name: &str) -> String {
        let Self { len, avg, sd, median, min, max } = self;
        format!("{name:>16} {len:>8} {avg:>11.1} {sd:>11.1} {median:>11.1} {min:>11.1} {max:>11.1}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_of_known_numbers() {
        let four = Statistics::of(vec![4e-6, 1e-6, 3e-6, 2e-6]).unwrap();
        assert_eq!(four.len, 4);
        for (got, want) in [(four.avg, 2.5), (four.median, 2.5), (four.min, 1.0), (four.max, 4.0)] {
            assert!((got - want).abs() < 1e-9, "{four:?}");
        }
        assert!((four.sd - 1.25f64.sqrt()).abs() < 1e-9);
        assert_eq!(Statistics::of(vec![5.0]).unwrap().median, 5e6);
        assert_eq!(Statistics::of(vec![]), None);
    }
}
