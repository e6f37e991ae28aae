//! What is done to one element, for every type and reduction, and the loop that does it to all.
//!
//! An element comes in as bytes, is loaded into an accumulator, meets the others in the order of
//! their ranks and is stored as bytes. None of the steps branches, so the compiler turns the loop
//! over elements into whatever vector instructions the enclosing function may use.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64;
use std::array;

use crate::float::{BFLOAT16, E4M3, E5M2, FLOAT16, NAN32, NAN64};

/// One reduction of elements of one type, which have `N` bytes.
pub(crate) trait Kernel<const N: usize>: Copy {
    /// What is accumulated in.
    type Acc: Copy;
    /// Bytes ahead of what it reads that it asks memory for; 0 leaves it to the processor. Where an element takes some
    /// instructions to convert, the processor itself does not look far enough ahead.
    const AHEAD: usize = 0;
    /// Whether an element holds what is accumulated, so that a pass may leave it where the result goes.
    const EXACT: bool;
    fn load(self, bytes: [u8; N]) -> Self::Acc;
    fn combine(self, a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn store(self, acc: Self::Acc) -> [u8; N];
}

/// What is reduced: buffers of one length, in the order of their ranks.
#[derive(Clone, Copy)]
pub(crate) struct Sources<'a> {
    /// The first; `None` if it is where the result goes.
    pub(crate) first: Option<&'a [u8]>,
    pub(crate) rest: &'a [&'a [u8]],
}

/// Bytes of all buffers together that the second cache is trusted to hold.
const SECOND_CACHE: usize = 1 << 20;

/// Reduces all elements. Memory is asked for every source once, and given the result once.
///
/// A pass reads up to `FAN` sources: each is a stream that the processor has to foresee, and buffers
/// at the same place of their pages compete for the same few lines of the first cache. Where one pass
/// is not enough, each is over a block of `BLOCK` elements, which wait in the cache: where the result goes if elements
/// hold what is accumulated, else as accumulators beside it.
#[inline(always)]
pub(crate) fn run<K: Kernel<N>, const N: usize, const BLOCK: usize, const FAN: usize>(
    kernel: K,
    sources: Sources<'_>,
    into: &mut [u8],
) {
    let far = into.len().saturating_mul(sources.rest.len() + 2) > SECOND_CACHE;
    let passes = sources.rest.len().div_ceil(FAN);
    let mut waiting =
        if passes > 1 && !K::EXACT { Some([kernel.load([0; N]); BLOCK]) } else { None };
    let waiting = waiting.as_mut_slice().as_flattened_mut();
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
        while left.len() > FAN {
            let (now, later) = left.split_at(FAN);
            later.iter().take(FAN).for_each(|next| prefetch(next, from * N));
            let now: [_; FAN] = array::from_fn(|i| part(now[i]));
            let end = if K::EXACT { End::Result } else { End::Waiting };
            match start {
                Start::Source(first) => {
                    pass(kernel, Start::Source(first), now, end, waiting, block, far);
                }
                Start::Result => pass(kernel, Start::Result, now, end, waiting, block, far),
                Start::Waiting => pass(kernel, Start::Waiting, now, end, waiting, block, far),
            }
            start = if K::EXACT { Start::Result } else { Start::Waiting };
            left = later;
        }
        if passes > 1 {
            let next = sources.first.iter().chain(sources.rest).take(1 + FAN);
            next.for_each(|next| prefetch(next, at * N));
        }
        // Each call is a loop of its own, compiled for how it starts and how many sources it has.
        macro_rules! last {
            ($start:expr, $($f:literal)+) => {
                match left.len() {
                    0 => pass(kernel, $start, [], End::Result, waiting, block, far),
                    $($f if $f <= FAN => {
                        let now: [_; $f] = array::from_fn(|i| part(left[i]));
                        pass(kernel, $start, now, End::Result, waiting, block, far);
                    })+
                    _ => unreachable!("at most {FAN} sources are left"),
                }
            };
        }
        match start {
            Start::Source(first) => last!(Start::Source(first), 1 2 3 4 5 6 7 8),
            Start::Result => last!(Start::Result, 1 2 3 4 5 6 7 8),
            Start::Waiting => last!(Start::Waiting, 1 2 3 4 5 6 7 8),
        }
    }
    incomplete(kernel, sources, at * N, tail);
}

/// Reduces what is less than an element, where one is a vector of NCCL's elements.
#[inline(always)]
fn incomplete<K: Kernel<N>, const N: usize>(
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

/// Fetches the beginning of what is read next; from there on the processor goes ahead by itself.
#[inline(always)]
fn prefetch(source: &[u8], at: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..512).step_by(64) {
        prefetch_line(source.as_ptr().wrapping_add(at + line));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (source, at);
}

/// Fetches the line of the cache that this is in, if there is one.
#[inline(always)]
fn prefetch_line(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint that accesses nothing, for which any address will do.
    unsafe {
        x86_64::_mm_prefetch::<{ x86_64::_MM_HINT_T0 }>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Where a pass takes its accumulators from.
#[derive(Clone, Copy)]
enum Start<'a, const N: usize> {
    Source(&'a [[u8; N]]),
    /// What is there and will be overwritten.
    Result,
    /// The pass before.
    Waiting,
}

/// Where a pass leaves them.
enum End {
    Waiting,
    Result,
}

/// Once over a block; `far` if the buffers are not in a cache.
#[inline(always)]
fn pass<K: Kernel<N>, const N: usize, const F: usize>(
    kernel: K,
    start: Start<'_, N>,
    sources: [&[[u8; N]]; F],
    end: End,
    waiting: &mut [K::Acc],
    block: &mut [[u8; N]],
    far: bool,
) {
    let n = block.len();
    let waiting = match (&start, &end) {
        (Start::Waiting, _) | (_, End::Waiting) => &mut waiting[..n],
        _ => waiting,
    };
    let sources = sources.map(|source| &source[..n]);
    macro_rules! element {
        ($i:expr) => {
            let mut acc = match start {
                Start::Source(source) => kernel.load(source[..n][$i]),
                Start::Result => kernel.load(block[$i]),
                Start::Waiting => waiting[$i],
            };
            for source in sources {
                if K::AHEAD > 0 && far {
                    prefetch_line(source[$i].as_ptr().wrapping_add(K::AHEAD));
                }
                acc = kernel.combine(acc, kernel.load(source[$i]));
            }
            match end {
                End::Waiting => waiting[$i] = acc,
                End::Result => block[$i] = kernel.store(acc),
            }
        };
    }
    // Where there is little to do for a vector, several at a time; loops over numbers are the compiler's to widen.
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
/// order, and NaN to the integer that loses against every number. Nothing is rounded.
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
