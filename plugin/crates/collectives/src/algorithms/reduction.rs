//! Reductions: how the ranks' contributions are combined.

use std::fmt;

use bytemuck::Pod;
use evenkeel_reduction_kernels::{DataType, Op, reduce, reduce_in_place};

/// A reduction, which combines the ranks' contributions element by element. It must be associative and commutative.
#[derive(Clone, Copy)]
pub struct Reduction<'a>(Inner<'a>);

#[derive(Clone, Copy)]
enum Inner<'a> {
    Of(DataType, Op),
    Custom(usize, &'a (dyn Fn(&mut [u8], &[u8]) + Sync)),
}

impl<'a> Reduction<'a> {
    /// A predefined reduction on elements of a type. Floats of less than 32 bits are rounded after each step, except in
    /// [`Algorithm::Direct`](crate::Algorithm::Direct), which rounds once.
    pub fn of(kind: DataType, op: Op) -> Self {
        Self(Inner::Of(kind, op))
    }

    /// A custom reduction on elements of `bytes` bytes. `combine` combines the second slice into the first. Both hold the same whole
    /// number of elements, of any alignment.
    ///
    /// # Panics
    /// When `bytes` is 0.
    pub fn custom(bytes: usize, combine: &'a (dyn Fn(&mut [u8], &[u8]) + Sync)) -> Self {
        assert!(bytes > 0, "an element of no bytes");
        Self(Inner::Custom(bytes, combine))
    }

    /// For operations that only move bytes.
    pub(crate) fn none() -> Self {
        Self::custom(1, &|_, _| {})
    }

    /// Bytes of an element.
    pub fn element(&self) -> usize {
        match self.0 {
            Inner::Of(kind, _) => kind.bytes(),
            Inner::Custom(bytes, _) => bytes,
        }
    }

    /// The type of its elements; `None` for a custom one.
    pub(crate) fn data_type(&self) -> Option<DataType> {
        match self.0 {
            Inner::Of(kind, _) => Some(kind),
            Inner::Custom(..) => None,
        }
    }

    /// Tells reductions apart, except for custom ones.
    pub(crate) fn code(&self) -> [u8; 2] {
        match self.0 {
            Inner::Of(kind, op) => [kind as u8, op as u8],
            Inner::Custom(..) => [u8::MAX; 2],
        }
    }

    pub(crate) fn combine(&self, into: &mut [u8], other: &[u8]) {
        match self.0 {
            // Both sides hold the same whole number of elements, so there is no error.
            Inner::Of(kind, op) => drop(reduce_in_place(kind, op, into, &[other])),
            Inner::Custom(_, combine) => combine(into, other),
        }
    }

    /// Combines contributions of the same whole number of elements, in this order, into a buffer of the same length. Floats of less
    /// than 32 bits are rounded once, in the end.
    pub(crate) fn combine_in_order(&self, contributions: &[&[u8]], into: &mut [u8]) {
        match self.0 {
            // All have the same length, and there is at least one, so there is no error.
            Inner::Of(kind, op) => drop(reduce(kind, op, contributions, into)),
            Inner::Custom(_, combine) => {
                for (number, contribution) in contributions.iter().enumerate() {
                    match number {
                        0 => into.copy_from_slice(contribution),
                        _ => combine(into, contribution),
                    }
                }
            }
        }
    }
}

impl fmt::Debug for Reduction<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Inner::Of(kind, op) => write!(f, "{op:?} of {kind:?}"),
            Inner::Custom(bytes, _) => write!(f, "custom of {bytes} bytes"),
        }
    }
}

/// A number type of Rust with a predefined reduction.
pub trait Element: Pod {
    /// The data type.
    const TYPE: DataType;
}

macro_rules! elements {
    ($($rust:ty => $kind:ident,)+) => {
        $(impl Element for $rust {
            const TYPE: DataType = DataType::$kind;
        })+
    };
}

elements! {
    i8 => Int8, u8 => Uint8, i32 => Int32, u32 => Uint32, i64 => Int64, u64 => Uint64, f32 => Float32, f64 => Float64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn element_sizes_match_their_data_types() {
        fn same<T: Element>() {
            assert_eq!(size_of::<T>(), T::TYPE.bytes());
        }
        same::<i8>();
        same::<u8>();
        same::<i32>();
        same::<u32>();
        same::<i64>();
        same::<u64>();
        same::<f32>();
        same::<f64>();
    }

    #[test]
    fn custom_reduction_is_called() {
        let concatenate = |into: &mut [u8], other: &[u8]| {
            into.iter_mut().zip(other).for_each(|(a, b)| *a = *a << 4 | b);
        };
        let own = Reduction::custom(1, &concatenate);
        let mut into = [1, 2];
        own.combine(&mut into, &[3, 4]);
        assert_eq!((into, own.element()), ([0x13, 0x24], 1));
        own.combine_in_order(&[&[5, 6], &[7, 8]], &mut into);
        assert_eq!(into, [0x57, 0x68]);
    }
}
