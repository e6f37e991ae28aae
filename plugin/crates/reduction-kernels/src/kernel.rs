//! The kernels: how elements of each type are combined by each reduction, and the loop over all
//! elements.
//!
//! An element is loaded into an accumulator, combined with those of the other sources in their
//! order, and stored. None of the steps branches, so the compiler vectorizes the loop with the
//! instructions that the enclosing function may use.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64;
use std::array;

use crate::float::{BFLOAT16, E4M3, E5M2, FLOAT16, NAN32, NAN64};

/// One reduction of elements of one type. An element has `N` bytes.
pub(crate) trait Kernel<const N: usize>: Copy {
    /// The accumulator.
    type Acc: Copy;
    /// Distance of prefetches, in bytes; 0 leaves prefetching to the processor. Where the
    /// conversion of an element takes several instructions, the processor does not prefetch far
    /// enough ahead.
    const PREFETCH_AHEAD: usize = 0;
    /// Whether the accumulator is exactly an element, so that a pass may leave it in the result.
    const EXACT: bool;
    fn load(self, bytes: [u8; N]) -> Self::Acc;
    fn combine(self, a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn store(self, acc: Self::Acc) -> [u8; N];
}

/// The sources: buffers of one length, in the order of their ranks.
#[derive(Clone, Copy)]
pub(crate) struct Sources<'a> {
    /// The first source; `None` if it is in the result's buffer.
    pub(crate) first: Option<&'a [u8]>,
    pub(crate) rest: &'a [&'a [u8]],
}

/// Total size of buffers that the L2 cache is expected to hold.
const L2_BYTES: usize = 1 << 20;

/// Reduces all elements. Each source is read from memory once, and the result is written once.
///
/// A pass reads up to `FAN_IN` sources. Each is a stream that the processor has to prefetch, and
/// buffers at the same offset of their pages compete for the same few lines of the L1 cache. Where
/// one pass is not enough, each pass is over a block of `BLOCK` elements, whose accumulators stay
/// in the cache: in the result if they are exactly elements, else beside it.
#[inline(always)]
pub(crate) fn run<K: Kernel<N>, const N: usize, const BLOCK: usize, const FAN_IN: usize>(
    kernel: K,
    sources: Sources<'_>,
    into: &mut [u8],
) {
    let uncached = into.len().saturating_mul(sources.rest.len() + 2) > L2_BYTES;
    let passes = sources.rest.len().div_ceil(FAN_IN);
    let mut accumulators =
        if passes > 1 && !K::EXACT { Some([kernel.load([0; N]); BLOCK]) } else { None };
    let accumulators = accumulators.as_mut_slice().as_flattened_mut();
    let (elements, tail) = into.as_chunks_mut::<N>();
    let size = if passes > 1 { BLOCK } else { elements.len().max(1) };
    let mut at = 0;
    for block in elements.chunks_mut(size) {
        let (from, n) = (at, block.len());
        at += n;
        let part = |source| part(source, from, n);
        let mut start = match sources.first {
            Some(first) => Start::Source(part(first)),
            None => Start::Result,
        };
        let mut left = sources.rest;
        while left.len() > FAN_IN {
            let (now, later) = left.split_at(FAN_IN);
            later.iter().take(FAN_IN).for_each(|next| prefetch(next, from * N));
            let now: [_; FAN_IN] = array::from_fn(|i| part(now[i]));
            let end = if K::EXACT { End::Result } else { End::Accumulators };
            match start {
                Start::Source(first) => {
                    pass(kernel, Start::Source(first), now, end, accumulators, block, uncached);
                }
                Start::Result => {
                    pass(kernel, Start::Result, now, end, accumulators, block, uncached)
                }
                Start::Accumulators => {
                    pass(kernel, Start::Accumulators, now, end, accumulators, block, uncached)
                }
            }
            start = if K::EXACT { Start::Result } else { Start::Accumulators };
            left = later;
        }
        if passes > 1 {
            let next = sources.first.iter().chain(sources.rest).take(1 + FAN_IN);
            next.for_each(|next| prefetch(next, at * N));
        }
        // The compiler makes a loop for each start and number of sources.
        macro_rules! last {
            ($start:expr, $($f:literal)+) => {
                match left.len() {
                    0 => pass(kernel, $start, [], End::Result, accumulators, block, uncached),
                    $($f if $f <= FAN_IN => {
                        let now: [_; $f] = array::from_fn(|i| part(left[i]));
                        pass(kernel, $start, now, End::Result, accumulators, block, uncached);
                    })+
                    _ => unreachable!("at most {FAN_IN} sources are left"),
                }
            };
        }
        match start {
            Start::Source(first) => last!(Start::Source(first), 1 2 3 4 5 6 7 8),
            Start::Result => last!(Start::Result, 1 2 3 4 5 6 7 8),
            Start::Accumulators => last!(Start::Accumulators, 1 2 3 4 5 6 7 8),
        }
    }
    run_tail(kernel, sources, at * N, tail);
}

/// Reduces the rest of less than an element, where an element is a vector of NCCL's elements.
#[inline(always)]
fn run_tail<K: Kernel<N>, const N: usize>(
    kernel: K,
    sources: Sources<'_>,
    at: usize,
    tail: &mut [u8],
) {
    if tail.is_empty() {
        return;
    }
    let mut padded = [0; N];
    padded[..tail.len()].copy_from_slice(match sources.first {
        Some(first) => &first[at..],
        None => tail,
    });
    let mut acc = kernel.load(padded);
    for source in sources.rest {
        padded[..tail.len()].copy_from_slice(&source[at..]);
        acc = kernel.combine(acc, kernel.load(padded));
    }
    tail.copy_from_slice(&kernel.store(acc)[..tail.len()]);
}

#[inline(always)]
fn part<const N: usize>(source: &[u8], at: usize, elements: usize) -> &[[u8; N]] {
    &source.as_chunks().0[at..][..elements]
}

/// Prefetches the beginning of what is read next. From there on the processor prefetches by itself.
#[inline(always)]
fn prefetch(source: &[u8], at: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..512).step_by(64) {
        prefetch_line(source.as_ptr().wrapping_add(at + line));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (source, at);
}

/// Prefetches the cache line of this address.
#[inline(always)]
fn prefetch_line(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint that accesses no memory; any address is valid.
    unsafe {
        x86_64::_mm_prefetch::<{ x86_64::_MM_HINT_T0 }>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Where a pass gets its accumulators.
#[derive(Clone, Copy)]
enum Start<'a, const N: usize> {
    Source(&'a [[u8; N]]),
    /// The buffer of the result.
    Result,
    /// The accumulators of the previous pass.
    Accumulators,
}

/// Where a pass leaves its accumulators.
enum End {
    Accumulators,
    Result,
}

/// One pass over a block; `uncached` if the buffers are not in the cache.
#[inline(always)]
fn pass<K: Kernel<N>, const N: usize, const F: usize>(
    kernel: K,
    start: Start<'_, N>,
    sources: [&[[u8; N]]; F],
    end: End,
    accumulators: &mut [K::Acc],
    block: &mut [[u8; N]],
    uncached: bool,
) {
    let n = block.len();
    let accumulators = match (&start, &end) {
        (Start::Accumulators, _) | (_, End::Accumulators) => &mut accumulators[..n],
        _ => accumulators,
    };
    let sources = sources.map(|source| &source[..n]);
    macro_rules! element {
        ($i:expr) => {
            let mut acc = match start {
                Start::Source(source) => kernel.load(source[..n][$i]),
                Start::Result => kernel.load(block[$i]),
                Start::Accumulators => accumulators[$i],
            };
            for source in sources {
                if K::PREFETCH_AHEAD > 0 && uncached {
                    prefetch_line(source[$i].as_ptr().wrapping_add(K::PREFETCH_AHEAD));
                }
                acc = kernel.combine(acc, kernel.load(source[$i]));
            }
            match end {
                End::Accumulators => accumulators[$i] = acc,
                End::Result => block[$i] = kernel.store(acc),
            }
        };
    }
    // With little work per vector, the loop is unrolled. The compiler unrolls loops over single
    // numbers.
    let mut done = 0;
    if N > 16 && F <= 2 {
        while done + 4 <= n {
            element!(done);
            element!(done + 1);
            element!(done + 2);
            element!(done + 3);
            done += 4;
        }
    }
    for i in done..n {
        element!(i);
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Sum;
#[derive(Clone, Copy)]
pub(crate) struct Prod;
#[derive(Clone, Copy)]
pub(crate) struct Max;
#[derive(Clone, Copy)]
pub(crate) struct Min;

/// An integer, for all reductions; sums and products wrap.
macro_rules! integer {
    ($name:ident, $type:ty) => {
        #[derive(Clone, Copy)]
        pub(crate) struct $name<Op>(pub(crate) Op);
        integer!($name, $type, Sum, |a, b| a.wrapping_add(b));
        integer!($name, $type, Prod, |a, b| a.wrapping_mul(b));
        integer!($name, $type, Max, |a, b| if b > a { b } else { a });
        integer!($name, $type, Min, |a, b| if b < a { b } else { a });
    };
    ($name:ident, $type:ty, $op:ty, |$a:ident, $b:ident| $combine:expr) => {
        impl Kernel<{ size_of::<$type>() }> for $name<$op> {
            type Acc = $type;
            const EXACT: bool = true;
            #[inline(always)]
            fn load(self, bytes: [u8; size_of::<$type>()]) -> $type {
                <$type>::from_ne_bytes(bytes)
            }
            #[inline(always)]
            fn combine(self, $a: $type, $b: $type) -> $type {
                $combine
            }
            #[inline(always)]
            fn store(self, acc: $type) -> [u8; size_of::<$type>()] {
                acc.to_ne_bytes()
            }
        }
    };
}

integer!(Int8, i8);
integer!(Uint8, u8);
integer!(Int32, i32);
integer!(Uint32, u32);
integer!(Int64, i64);
integer!(Uint64, u64);

/// Sum and product of a float, in the type `$acc`.
macro_rules! arithmetic {
    ($name:ident, $bits:ty, $acc:ty, |$load:ident| $decode:expr, |$store:ident| $encode:expr) => {
        #[derive(Clone, Copy)]
        pub(crate) struct $name<Op>(pub(crate) Op);
        arithmetic!($name, $bits, $acc, |$load| $decode, |$store| $encode, Sum, +);
        arithmetic!($name, $bits, $acc, |$load| $decode, |$store| $encode, Prod, *);
    };
    ($name:ident, $bits:ty, $acc:ty, |$load:ident| $decode:expr, |$store:ident| $encode:expr,
     $op:ty, $sign:tt) => {
        impl Kernel<{ size_of::<$bits>() }> for $name<$op> {
            type Acc = $acc;
            const EXACT: bool = size_of::<$acc>() == size_of::<$bits>();
            #[inline(always)]
            fn load(self, bytes: [u8; size_of::<$bits>()]) -> $acc {
                let $load = <$bits>::from_ne_bytes(bytes);
                $decode
            }
            #[inline(always)]
            fn combine(self, a: $acc, b: $acc) -> $acc {
                a $sign b
            }
            #[inline(always)]
            fn store(self, $store: $acc) -> [u8; size_of::<$bits>()] {
                let bits: $bits = $encode;
                bits.to_ne_bytes()
            }
        }
    };
}

arithmetic!(Float32, u32, f32, |bits| f32::from_bits(bits), |acc| {
    if acc.is_nan() { NAN32 } else { acc.to_bits() }
});
arithmetic!(Float64, u64, f64, |bits| f64::from_bits(bits), |acc| {
    if acc.is_nan() { NAN64 } else { acc.to_bits() }
});
arithmetic!(Float16, u16, f32, |bits| FLOAT16.decode(bits.into()), |acc| FLOAT16.encode(acc)
    as u16);
arithmetic!(Bfloat16, u16, f32, |bits| BFLOAT16.decode(bits.into()), |acc| {
    BFLOAT16.encode(acc) as u16
});
arithmetic!(Float8E4m3, u8, f32, |bits| E4M3.decode(bits.into()), |acc| E4M3.encode(acc) as u8);
arithmetic!(Float8E5m2, u8, f32, |bits| E5M2.decode(bits.into()), |acc| E5M2.encode(acc) as u8);

/// Minimum and maximum of a float, on its bits: numbers are mapped to signed integers of the same
/// order, and NaN to the integer that is never chosen over a number. Nothing is rounded.
macro_rules! ordered {
    ($name:ident, $bits:ty, $int:ty, $last:expr, $nan:expr) => {
        ordered!($name, $bits, $int, $last, $nan, Max, <$int>::MIN, |a, b| a.max(b));
        ordered!($name, $bits, $int, $last, $nan, Min, <$int>::MAX, |a, b| a.min(b));
    };
    ($name:ident, $bits:ty, $int:ty, $last:expr, $nan:expr, $op:ty, $loser:expr,
     |$a:ident, $b:ident| $combine:expr) => {
        impl Kernel<{ size_of::<$bits>() }> for $name<$op> {
            type Acc = $int;
            const EXACT: bool = true;
            #[inline(always)]
            fn load(self, bytes: [u8; size_of::<$bits>()]) -> $int {
                let bits = <$int>::from_ne_bytes(bytes);
                let magnitude = bits & <$int>::MAX;
                // All bits but the sign are inverted in negative numbers.
                let order = bits ^ (bits >> (<$int>::BITS - 1) & <$int>::MAX);
                if magnitude > $last { $loser } else { order }
            }
            #[inline(always)]
            fn combine(self, $a: $int, $b: $int) -> $int {
                $combine
            }
            #[inline(always)]
            fn store(self, order: $int) -> [u8; size_of::<$bits>()] {
                let bits = order ^ (order >> (<$int>::BITS - 1) & <$int>::MAX);
                let bits = if order == $loser { $nan } else { bits };
                bits.to_ne_bytes()
            }
        }
    };
}

ordered!(Float32, u32, i32, 0x7f80_0000, NAN32 as i32);
ordered!(Float64, u64, i64, 0x7ff0_0000_0000_0000, NAN64 as i64);
ordered!(Float16, u16, i16, FLOAT16.last as i16, FLOAT16.nan as i16);
ordered!(Bfloat16, u16, i16, BFLOAT16.last as i16, BFLOAT16.nan as i16);
ordered!(Float8E4m3, u8, i8, E4M3.last as i8, E4M3.nan as i8);
ordered!(Float8E5m2, u8, i8, E5M2.last as i8, E5M2.nan as i8);
