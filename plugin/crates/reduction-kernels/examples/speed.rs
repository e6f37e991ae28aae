//! The speed of sums, compared with adding two arrays into a third, in cache and in memory.
//!
//! `cargo run --release -p evenkeel-reduction-kernels --example speed`
//!
//! The result is bytes read and written per second: the add moves three arrays, a reduction of n
//! sources n + 1. Both use the same memory, from the same page on, with their buffers one after the
//! other. Time is the thread's own. All run in turns. Each number is the median of the runs, then
//! half of the range between the 10th and 90th percentile. With `--json`, only the medians are
//! printed, one object a line.
//!
//! "Loads alone" is an upper bound: all sources are read, as if they were one buffer, and converted
//! to float32, but neither added nor rounded nor stored. It counts the bytes that a sum would move.

use std::hint::black_box;
use std::process::ExitCode;
use std::time::Duration;

use evenkeel_reduction_kernels::{DataType, Op, ReduceError, instruction_set, reduce};
use rustix::time::{ClockId, clock_gettime};

const RUNS: usize = 25;
const RUN: Duration = Duration::from_millis(2);
const PAGE: usize = 4096;
const SOURCES: [usize; 4] = [2, 4, 8, 16];
const KINDS: [(DataType, &str); 5] = [
    (DataType::Float32, "float32"),
    (DataType::Float16, "float16"),
    (DataType::Bfloat16, "bfloat16"),
    (DataType::Float8E4m3, "fp8 e4m3"),
    (DataType::Int32, "int32"),
];

/// Reads a source and converts it to float32; the result depends on all of it.
type Load = fn(&[u8]) -> u32;
const LOADS: [(&str, Load); 3] =
    [("float32", load_float32), ("float16", load_float16), ("bfloat16", load_bfloat16)];

fn main() -> ExitCode {
    match measure() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("speed: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure() -> Result<(), ReduceError> {
    let json = std::env::args().nth(1).is_some_and(|argument| argument == "--json");
    let out = Text { json };
    out.line(&format!(
        "{}; GB/s and, in brackets, of the add over as much memory",
        instruction_set()
    ));
    // The total size of a case's buffers: within the L1 cache of common servers, within their L2 or
    // L3 cache, and beyond all caches.
    for (place, total) in [("24 KiB", 24 << 10), ("512 KiB", 512 << 10), ("256 MiB", 256 << 20)] {
        out.line(&format!("\n{place}"));
        // Close to 1 in every format.
        let mut memory = vec![0x3c; total + PAGE];
        let memory = page(&mut memory);
        for n in SOURCES {
            let array = total / 3 / 256 * 256;
            let bytes = total / (n + 1) / 256 * 256;
            let mut rates = vec![Vec::new(); 1 + KINDS.len() + LOADS.len()];
            for _ in 0..RUNS {
                let mut rates = rates.iter_mut();
                let mut push = |rate| rates.next().expect("a rate of each").push(rate);
                let (a, rest) = memory.split_at_mut(array);
                let (b, rest) = rest.split_at_mut(array);
                let c = &mut rest[..array];
                push(rate(3 * array, || add(black_box(a), black_box(b), black_box(c))));
                let (sources, rest) = memory.split_at_mut(n * bytes);
                let into = &mut rest[..bytes];
                let slices: Vec<_> = sources.chunks_exact(bytes).collect();
                for (kind, _) in KINDS {
                    reduce(kind, Op::Sum, &slices, into)?;
                    push(rate((n + 1) * bytes, || {
                        let done = reduce(kind, Op::Sum, black_box(&slices), black_box(into));
                        debug_assert!(done.is_ok());
                    }));
                }
                for (_, load) in LOADS {
                    push(rate((n + 1) * bytes, || {
                        black_box(load(black_box(sources)));
                    }));
                }
            }
            let (reference, spread) = median(&mut rates[0]);
            let mut line = format!("{n:>2} sources  add {reference:6.1} ±{spread:4.1}");
            let mut object = format!(
                "{{\"instructions\":\"{}\",\"total\":\"{place}\",\"sources\":{n},\"add\":{reference}",
                instruction_set()
            );
            let (sums, loads) = rates[1..].split_at_mut(KINDS.len());
            for ((_, name), rates) in KINDS.iter().zip(sums) {
                let (rate, spread) = median(rates);
                line += &format!("  {name} {rate:6.1} ±{spread:4.1} ({:4.2})", rate / reference);
                object += &format!(",\"{name}\":{rate}");
            }
            line += "  loads alone";
            for ((name, _), rates) in LOADS.iter().zip(loads) {
                let (rate, _) = median(rates);
                line += &format!("  {name} {rate:6.1} ({:4.2})", rate / reference);
                object += &format!(",\"{name} loads\":{rate}");
            }
            out.line(&line);
            out.object(&format!("{object}}}"));
        }
    }
    Ok(())
}

/// Output as text or as JSON.
struct Text {
    json: bool,
}

impl Text {
    fn line(&self, text: &str) {
        if !self.json {
            println!("{text}");
        }
    }

    fn object(&self, text: &str) {
        if self.json {
            println!("{text}");
        }
    }
}

/// The memory from the first whole page on.
fn page(memory: &mut [u8]) -> &mut [u8] {
    let skip = memory.as_ptr().align_offset(PAGE);
    &mut memory[skip..]
}

#[inline(never)]
fn add(a: &[u8], b: &[u8], c: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        #[target_feature(enable = "avx512f")]
        fn widest(a: &[u8], b: &[u8], c: &mut [u8]) {
            plain(a, b, c);
        }
        // SAFETY: the processor has what the function is compiled for.
        return unsafe { widest(a, b, c) };
    }
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        #[target_feature(enable = "avx2")]
        fn wide(a: &[u8], b: &[u8], c: &mut [u8]) {
            plain(a, b, c);
        }
        // SAFETY: the processor has what the function is compiled for.
        return unsafe { wide(a, b, c) };
    }
    plain(a, b, c);
}

#[inline(always)]
fn plain(a: &[u8], b: &[u8], c: &mut [u8]) {
    let (a, b, c) = (a.as_chunks().0, b.as_chunks().0, c.as_chunks_mut().0);
    for ((a, b), c) in a.iter().zip(b).zip(c) {
        *c = (f32::from_ne_bytes(*a) + f32::from_ne_bytes(*b)).to_ne_bytes();
    }
}

/// A function over the words of a source, compiled for the widest instruction set of the processor.
macro_rules! widest {
    ($name:ident, $plain:ident) => {
        fn $name(source: &[u8]) -> u32 {
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx512f") {
                #[target_feature(enable = "avx512f")]
                fn widest(source: &[u8]) -> u32 {
                    $plain(source)
                }
                // SAFETY: the processor has what the function is compiled for.
                return unsafe { widest(source) };
            }
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx2") {
                #[target_feature(enable = "avx2")]
                fn wide(source: &[u8]) -> u32 {
                    $plain(source)
                }
                // SAFETY: the processor has what the function is compiled for.
                return unsafe { wide(source) };
            }
            $plain(source)
        }
    };
}

widest!(load_float32, words);
widest!(load_bfloat16, pairs);

#[inline(always)]
fn words(source: &[u8]) -> u32 {
    source.as_chunks().0.iter().fold(0, |all, word| all ^ u32::from_ne_bytes(*word))
}

#[inline(always)]
fn pairs(source: &[u8]) -> u32 {
    let (mut even, mut odd) = (0, 0);
    for word in source.as_chunks().0 {
        let word = u32::from_ne_bytes(*word);
        even ^= word << 16;
        odd ^= word & 0xffff_0000;
    }
    even ^ odd.rotate_left(7)
}

/// With the processor's conversion instruction, where it has one.
fn load_float16(source: &[u8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if let Some(all) = convert_float16(source) {
        return all;
    }
    let halves = source.as_chunks().0.iter().map(|half| half::f16::from_ne_bytes(*half));
    halves.fold(0, |all, half| all ^ half.to_f32_const().to_bits())
}

#[cfg(target_arch = "x86_64")]
fn convert_float16(source: &[u8]) -> Option<u32> {
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx512f")]
    fn widest(source: &[u8]) -> u32 {
        let mut all = [_mm512_setzero_si512(); 4];
        for vectors in source.as_chunks::<128>().0 {
            for (all, halves) in all.iter_mut().zip(vectors.as_chunks::<32>().0) {
                // SAFETY: reads the 32 bytes of `halves`; no alignment is needed.
                let halves = unsafe { _mm256_loadu_si256(halves.as_ptr().cast()) };
                *all = _mm512_xor_si512(*all, _mm512_castps_si512(_mm512_cvtph_ps(halves)));
            }
        }
        let [a, b, c, d] = all;
        let all = _mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_xor_si512(c, d));
        _mm512_reduce_or_epi32(all).cast_unsigned()
    }

    #[target_feature(enable = "avx2,f16c")]
    fn wide(source: &[u8]) -> u32 {
        let mut all = [_mm256_setzero_si256(); 4];
        for vectors in source.as_chunks::<64>().0 {
            for (all, halves) in all.iter_mut().zip(vectors.as_chunks::<16>().0) {
                // SAFETY: reads the 16 bytes of `halves`; no alignment is needed.
                let halves = unsafe { _mm_loadu_si128(halves.as_ptr().cast()) };
                *all = _mm256_xor_si256(*all, _mm256_castps_si256(_mm256_cvtph_ps(halves)));
            }
        }
        let [a, b, c, d] = all;
        let all = _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d));
        _mm256_extract_epi32::<0>(all).cast_unsigned()
    }

    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has what the function is compiled for.
        return Some(unsafe { widest(source) });
    }
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
        // SAFETY: the processor has what the function is compiled for.
        return Some(unsafe { wide(source) });
    }
    None
}

/// GB/s of work that moves `bytes`, repeated for [`RUN`]. Time is that of this thread, so other
/// threads on the processor do not count.
fn rate(bytes: usize, mut work: impl FnMut()) -> f64 {
    // Reading the clock is a system call: its time must be small compared with the work, also where
    // that is fast.
    let batch = (32 << 20) / bytes as u32 + 1;
    let start = thread_time();
    let mut times = 0u32;
    loop {
        for _ in 0..batch {
            work();
        }
        times += batch;
        let elapsed = thread_time().saturating_sub(start);
        if elapsed >= RUN {
            return f64::from(times) * bytes as f64 / elapsed.as_secs_f64() / 1e9;
        }
    }
}

fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

fn median(rates: &mut [f64]) -> (f64, f64) {
    rates.sort_by(f64::total_cmp);
    let at = |part: usize| rates[(rates.len() - 1) * part / 10];
    (at(5), (at(9) - at(1)) / 2.0)
}
