//! Medians.

/// The median; 0 without values.
pub(crate) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        length if length % 2 == 1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}

/// Sorted numbers, for statistics that leave one of them out.
pub(crate) struct Sorted(Vec<f64>);

impl Sorted {
    pub(crate) fn new(numbers: impl Iterator<Item = f64>) -> Self {
        let mut numbers: Vec<f64> = numbers.collect();
        numbers.sort_by(f64::total_cmp);
        Self(numbers)
    }

    /// The median of all other numbers; 0 if there are none.
    pub(crate) fn median_without(&self, number: f64) -> f64 {
        let left_out = self.0.partition_point(|other| other.total_cmp(&number).is_lt());
        let count = self.0.len().saturating_sub(1);
        let other = |at: usize| self.0[at + usize::from(at >= left_out)];
        match count {
            0 => 0.0,
            count if count % 2 == 1 => other(count / 2),
            _ => (other(count / 2 - 1) + other(count / 2)) / 2.0,
        }
    }

    /// The largest of all other numbers; 0 if there are none.
    pub(crate) fn max_without(&self, number: f64) -> f64 {
        match self.0[..] {
            [.., second, last] => {
                if last.total_cmp(&number).is_eq() {
                    second
                } else {
                    last
                }
            }
            _ => 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn middle_of_the_others_is_that_of_numbers_without_one() {
        for numbers in [&[3.0][..], &[1.0, 2.0], &[5.0, 1.0, 3.0], &[2.0, 2.0, 7.0, 1.0]] {
            let sorted = Sorted::new(numbers.iter().copied());
            for (at, number) in numbers.iter().enumerate() {
                let others = || {
                    let others = numbers.iter().enumerate().filter(move |(other, _)| *other != at);
                    others.map(|(_, number)| *number)
                };
                assert_eq!(sorted.median_without(*number), median(others()), "{numbers:?} {at}");
                assert_eq!(
                    sorted.max_without(*number),
                    others().fold(0.0, f64::max),
                    "{numbers:?}"
                );
            }
        }
    }
}
