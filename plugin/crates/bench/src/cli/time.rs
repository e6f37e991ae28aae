//! Lengths of time such as `500ms`, `2s`, `30m` or `1h`.

use std::time::Duration;

/// The longest one: what is longer is a mistake.
const MAX: Duration = Duration::from_secs(10_000 * 3600);

/// Reads one, of more than nothing.
///
/// # Errors
/// Says how to write one.
pub(crate) fn time(text: &str) -> Result<Duration, String> {
    let units = [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000)];
    let read = units.iter().find_map(|(unit, milliseconds)| {
        let number: u64 = text.strip_suffix(unit)?.parse().ok()?;
        number.checked_mul(*milliseconds).map(Duration::from_millis)
    });
    read.filter(|time| !time.is_zero() && *time <= MAX)
        .ok_or_else(|| format!("{text:?} is not a time: write 500ms, 2s or 30m"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duration_is_parsed_or_refused() {
        for (text, seconds) in [("500ms", 0.5), ("2s", 2.0), ("30m", 1800.0), ("1h", 3600.0)] {
            assert_eq!(time(text).map(|time| time.as_secs_f64()), Ok(seconds));
        }
        for wrong in ["", "2", "s", "0s", "-1s", "1.5s", "99999999999s", "soon"] {
            assert!(time(wrong).is_err(), "{wrong}");
        }
    }
}
