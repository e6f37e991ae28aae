//! What a rank computes between two operations: it sleeps, as long as a file says. Whoever writes
//! the file makes a rank late.

use std::hash::{BuildHasher, RandomState};
use std::io::ErrorKind;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use clap::Args;

use crate::error::Result;

/// The longest time, milliseconds.
const MOST: u64 = 60_000;

/// How long a rank computes.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct ComputeOptions {
    /// Before each operation, sleep the milliseconds in this file: 40, or 20-60 to draw them anew
    /// each time. It is read each time; none means 0. FILE.once, if there is one, is for the next
    /// operation instead, and is removed. The times of allreduce contain it
    #[arg(long = "compute", value_name = "FILE")]
    file: Option<PathBuf>,
}

impl ComputeOptions {
    /// Computes.
    ///
    /// # Errors
    /// When the file cannot be read, or has something else.
    pub(crate) fn compute(&self) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let failed = |error: std::io::Error| format!("--compute {}: {error}", file.display());
        let once = file.with_added_extension("once");
        let text = match std::fs::read_to_string(&once) {
            Ok(text) => {
                std::fs::remove_file(&once).map_err(failed)?;
                text
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                match std::fs::read_to_string(file) {
                    Ok(text) => text,
                    Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
                    Err(error) => return Err(failed(error)),
                }
            }
            Err(error) => return Err(failed(error)),
        };
        let range = parse(&text).ok_or_else(|| {
            let file = file.display();
            format!(
                "--compute {file}: {:?} is not a time in milliseconds up to {MOST}, such as 40 or 20-60",
                text.trim()
            )
        })?;
        thread::sleep(Duration::from_millis(draw(range)));
        Ok(())
    }
}

/// One of these times. Each hasher of the standard library has another random key.
fn draw(times: RangeInclusive<u64>) -> u64 {
    times.start() + RandomState::new().hash_one(0) % (times.end() - times.start() + 1)
}

/// The times that a text allows, milliseconds.
fn parse(text: &str) -> Option<RangeInclusive<u64>> {
    let text = text.trim();
    let (least, most) = text.split_once('-').unwrap_or((text, text));
    let (least, most) = (least.parse().ok()?, most.parse().ok()?);
    (least <= most && most <= MOST).then_some(least..=most)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn times_are_one_number_or_two_in_order() {
        assert_eq!(parse("40\n"), Some(40..=40));
        assert_eq!(parse("20-60"), Some(20..=60));
        for wrong in ["", "-", "60-20", "60001", "1.5", "4 ms", "-4"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn every_time_of_a_range_is_drawn() {
        let drawn: std::collections::BTreeSet<u64> = (0..1000).map(|_| draw(3..=5)).collect();
        assert_eq!(drawn.into_iter().collect::<Vec<_>>(), [3, 4, 5]);
    }

    #[test]
    fn the_file_is_read_each_time() {
        let file = std::env::temp_dir().join(format!("evenkeel-compute-{}", std::process::id()));
        let options = ComputeOptions { file: Some(file.clone()) };
        options.compute().unwrap();
        std::fs::write(&file, "30").unwrap();
        let start = Instant::now();
        options.compute().unwrap();
        assert!(start.elapsed() >= Duration::from_millis(30));
        let once = file.with_added_extension("once");
        std::fs::write(&once, "60").unwrap();
        let start = Instant::now();
        options.compute().unwrap();
        assert!(start.elapsed() >= Duration::from_millis(60));
        assert!(!once.exists());
        std::fs::write(&file, "soon").unwrap();
        let error = options.compute().unwrap_err();
        assert!(error.contains("\"soon\" is not a time in milliseconds"), "{error}");
        std::fs::remove_file(&file).unwrap();
    }
}
