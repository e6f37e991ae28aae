//! Sizes as nccl-tests writes them: `8`, `64K`, `1M`, `2G` (powers of 1024), and sweeps over them.

use std::str::FromStr;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Size(pub(crate) u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let help =
            || format!("{text:?} is not a size: digits and at most one of K, M, G, such as 64K");
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let factor = match text[digits.len()..].to_ascii_uppercase().as_str() {
            "" | "B" => 1,
            "K" | "KB" => 1 << 10,
            "M" | "MB" => 1 << 20,
            "G" | "GB" => 1 << 30,
            _ => return Err(help()),
        };
        let number: u64 = digits.parse().map_err(|_| help())?;
        number.checked_mul(factor).map(Self).ok_or_else(|| format!("{text:?} is too large"))
    }
}

/// The sizes from `begin` to `end`, each `factor` times the one before.
///
/// # Errors
/// Says which bound or factor makes no sense.
pub(crate) fn sweep(begin: Size, end: Size, factor: u64) -> Result<Vec<u64>, String> {
    if begin > end {
        return Err(format!("the sweep begins at {} bytes, above its end at {}", begin.0, end.0));
    }
    if factor < 2 && begin != end {
        return Err(format!("step factor {factor}: 2 or more"));
    }
    let mut sizes = vec![];
    let mut size = begin.0;
    while size <= end.0 {
        sizes.push(size);
        match size.checked_mul(factor) {
            Some(next) if next > size => size = next,
            _ => break,
        }
    }
    Ok(sizes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_is_parsed_or_refused() {
        for (text, want) in [("8", 8), ("64K", 65_536), ("1m", 1 << 20), ("2GB", 2 << 30)] {
            assert_eq!(text.parse(), Ok(Size(want)), "{text}");
        }
        for text in ["", "K", "12X", "-1", "1.5M", "99999999999G"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }

    #[test]
    fn size_sweep_bounds() {
        assert_eq!(sweep(Size(8), Size(100), 2), Ok(vec![8, 16, 32, 64]));
        assert_eq!(sweep(Size(8), Size(8), 1), Ok(vec![8]));
        assert_eq!(sweep(Size(0), Size(4), 2), Ok(vec![0]));
        assert!(sweep(Size(8), Size(4), 2).is_err());
        assert!(sweep(Size(4), Size(8), 1).is_err());
    }
}
