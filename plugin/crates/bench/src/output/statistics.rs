//! Order statistics, and durations in one line: how many, their mean, spread, middle and ends.

use serde::{Deserialize, Serialize};

/// The value below which a share of the sorted values lies, from 0 to 1; 0 if there are none. It is
/// interpolated between the two closest values (definition 7 of R. Hyndman and Y. Fan, "Sample
/// quantiles in statistical packages", 1996).
pub(crate) fn quantile(sorted: &[f64], share: f64) -> f64 {
    let at = sorted.len().saturating_sub(1) as f64 * share;
    let (Some(below), Some(above)) =
        (sorted.get(at.floor() as usize), sorted.get(at.ceil() as usize))
    else {
        return 0.0;
    };
    below + (above - below) * at.fract()
}

/// Of some durations, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Statistics {
    /// How many.
    pub(crate) len: usize,
    /// Their mean.
    pub(crate) avg: f64,
    /// The standard deviation of all of them.
    pub(crate) sd: f64,
    /// The [`quantile`] of one half.
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
        let median = quantile(&seconds, 0.5);
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
    fn quantile_is_between_the_closest_values() {
        let five = [1.0, 2.0, 7.0, 8.0, 9.0];
        for (share, want) in [(0.0, 1.0), (0.25, 2.0), (0.5, 7.0), (0.9, 8.6), (1.0, 9.0)] {
            assert!((quantile(&five, share) - want).abs() < 1e-9, "{share}");
        }
        assert_eq!((quantile(&[], 0.5), quantile(&[3.0], 0.99)), (0.0, 3.0));
    }

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
