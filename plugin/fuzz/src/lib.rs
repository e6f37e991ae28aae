//! What all fuzz targets share: their seeds, and a limit of what a parser may allocate.
//!
//! Each file in `bin` is a program of libFuzzer that feeds one parser. It asserts more than that
//! nothing panics: bytes that are accepted are those that would be encoded, and what is allocated
//! depends on the bytes there are, not on a length that they announce. `make fuzz` builds and runs
//! them.

use std::alloc::System;
use std::path::Path;

use evenkeel_protocol::JobKey;
pub use libfuzzer_sys::fuzz_target;
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Writes seeds into the folder that `EVENKEEL_FUZZ_SEEDS` names, if it does.
///
/// # Panics
/// When they cannot be written.
pub fn write_seeds(seeds: impl IntoIterator<Item = Vec<u8>>) {
    let Some(folder) = std::env::var_os("EVENKEEL_FUZZ_SEEDS") else { return };
    for (number, seed) in seeds.into_iter().enumerate() {
        let file = Path::new(&folder).join(format!("seed-{number:02}"));
        std::fs::write(&file, seed).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    }
}

/// Runs a parser, which may allocate so many bytes altogether.
///
/// # Panics
/// When it allocates more.
pub fn within<T>(max_bytes: usize, parse: impl FnOnce() -> T) -> T {
    let region = Region::new(ALLOCATOR);
    let parsed = parse();
    let allocated = region.change().bytes_allocated;
    assert!(allocated <= max_bytes, "{allocated} bytes allocated, at most {max_bytes} expected");
    parsed
}

/// The key of a job.
///
/// # Panics
/// Never.
pub fn job_key() -> JobKey {
    JobKey::parse(&"5a".repeat(32)).expect("a key of 64 digits")
}

/// Numbers that steer a stateful target. They are 0 behind the end of the input.
#[derive(Debug)]
pub struct Steps<'a>(&'a [u8]);

impl<'a> Steps<'a> {
    /// Those of this input.
    pub fn new(input: &'a [u8]) -> Self {
        Self(input)
    }

    /// The next byte; `None` behind the last.
    pub fn next_byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// The next bytes, fewer at the end.
    pub fn take(&mut self, length: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(length.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// A number up to 65,535.
    pub fn short(&mut self) -> u64 {
        let low = self.next_byte().unwrap_or_default();
        u16::from_le_bytes([low, self.next_byte().unwrap_or_default()]).into()
    }

    /// Any number.
    pub fn long(&mut self) -> u64 {
        (0..4).fold(0, |number, place| number | self.short() << (16 * place))
    }
}

/// The first `N` bytes, and zeros where the input is shorter.
pub fn padded<const N: usize>(input: &[u8]) -> [u8; N] {
    std::array::from_fn(|at| input.get(at).copied().unwrap_or_default())
}
