//! What is done to one element, for every type and reduction, and the loop that does it to all.
//!
//! An element comes in as bytes, is loaded into an accumulator, meets the others in the order of
//! their ranks and is stored as bytes. None of the steps branches, so the compiler turns the loop
//! into whatever vector instructions the enclosing function may use.

use std::marker::PhantomData;

use crate::float::{BFLOAT16, E4M3, E5M2, FLOAT16, NAN32, NAN64};

/// One type of `N` bytes and one reduction.
pub(crate) trait Kernel<const N: usize> {
    /// What elements are accumulated in.
    type Acc: Copy;
    fn load(bytes: [u8; N]) -> Self::Acc;
    fn combine(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn store(acc: Self::Acc) -> [u8; N];
}

/// What is reduced: buffers of one length, in the order of their ranks.
#[derive(Clone, Copy)]
pub(crate) struct Sources<'a> {
    /// The first; `None` if it is where the result goes.
    pub(crate) first: Option<&'a [u8]>,
    pub(crate) rest: &'a [&'a [u8]],
}

/// Reduces whole groups of `L` elements from byte `from` on; returns where the first incomplete
/// group starts. All buffers are read once and `into` is written once: the accumulators of a group
/// stay in registers while the sources go by.
#[inline(always)]
pub(crate) fn run<K: Kernel<N>, const N: usize, const L: usize>(
    sources: Sources<'_>,
    into: &mut [u8],
    from: usize,
) -> usize {
    let (into, _) = into[from..].as_chunks_mut::<N>();
    let (into, _) = into.as_chunks_mut::<L>();
    let mut at = from;
    for into in into {
        let mut acc = match sources.first {
            Some(first) => group::<N, L>(first, at).map(K::load),
            None => into.map(K::load),
        };
        for source in sources.rest {
            let other = group::<N, L>(source, at);
            for lane in 0..L {
                acc[lane] = K::combine(acc[lane], K::load(other[lane]));
            }
        }
        *into = acc.map(K::store);
        at += N * L;
    }
    at
}

#[inline(always)]
fn group<const N: usize, const L: usize>(source: &[u8], at: usize) -> &[[u8; N]; L] {
    let (elements, _) = source[at..][..N * L].as_chunks::<N>();
    elements.first_chunk().expect("a slice of L elements")
}

pub(crate) struct Sum;
pub(crate) struct Prod;
pub(crate) struct Max;
pub(crate) struct Min;

/// An integer, for all reductions; sums and products wrap.
macro_rules! integer {
    ($name:ident, $type:ty) => {
        pub(crate) struct $name<Op>(PhantomData<Op>);
        integer!($name, $type, Sum, |a, b| a.wrapping_add(b));
        integer!($name, $type, Prod, |a, b| a.wrapping_mul(b));
        integer!($name, $type, Max, |a, b| if b > a { b } else { a });
        integer!($name, $type, Min, |a, b| if b < a { b } else { a });
    };
    ($name:ident, $type:ty, $op:ty, |$a:ident, $b:ident| $combine:expr) => {
        impl Kernel<{ size_of::<$type>() }> for $name<$op> {
            type Acc = $type;
            #[inline(always)]
            fn load(bytes: [u8; size_of::<$type>()]) -> $type {
                <$type>::from_ne_bytes(bytes)
            }
            #[inline(always)]
            fn combine($a: $type, $b: $type) -> $type {
                $combine
            }
            #[inline(always)]
            fn store(acc: $type) -> [u8; size_of::<$type>()] {
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
        pub(crate) struct $name<Op>(PhantomData<Op>);
        arithmetic!($name, $bits, $acc, |$load| $decode, |$store| $encode, Sum, +);
        arithmetic!($name, $bits, $acc, |$load| $decode, |$store| $encode, Prod, *);
    };
    ($name:ident, $bits:ty, $acc:ty, |$load:ident| $decode:expr, |$store:ident| $encode:expr,
     $op:ty, $sign:tt) => {
        impl Kernel<{ size_of::<$bits>() }> for $name<$op> {
            type Acc = $acc;
            #[inline(always)]
            fn load(bytes: [u8; size_of::<$bits>()]) -> $acc {
                let $load = <$bits>::from_ne_bytes(bytes);
                $decode
            }
            #[inline(always)]
            fn combine(a: $acc, b: $acc) -> $acc {
                a $sign b
            }
            #[inline(always)]
            fn store($store: $acc) -> [u8; size_of::<$bits>()] {
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
            #[inline(always)]
            fn load(bytes: [u8; size_of::<$bits>()]) -> $int {
                let bits = <$int>::from_ne_bytes(bytes);
                let magnitude = bits & <$int>::MAX;
                // All bits but the sign are inverted in negative numbers.
                let order = bits ^ (bits >> (<$int>::BITS - 1) & <$int>::MAX);
                if magnitude > $last { $loser } else { order }
            }
            #[inline(always)]
            fn combine($a: $int, $b: $int) -> $int {
                $combine
            }
            #[inline(always)]
            fn store(order: $int) -> [u8; size_of::<$bits>()] {
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
