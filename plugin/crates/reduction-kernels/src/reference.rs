//! The reference: the same reductions, one element after the other, in simple code.
//!
//! The fast kernels must match it in every bit; tests and benchmarks compare them with it.

use std::cmp::Ordering;

use half::{bf16, f16};

use crate::{DataType, Op, ReduceError, check};

/// As [`crate::reduce`], but slow.
///
/// # Errors
/// As [`crate::reduce`].
pub fn reduce(
    kind: DataType,
    op: Op,
    sources: &[&[u8]],
    into: &mut [u8],
) -> Result<(), ReduceError> {
    check(kind, sources, into.len(), 0)?;
    if sources.is_empty() {
        return Err(ReduceError::NoSource);
    }
    for at in (0..into.len()).step_by(kind.bytes()) {
        let element = Element { sources, at };
        let into = &mut into[at..][..kind.bytes()];
        match kind {
            DataType::Int8 => into.copy_from_slice(&element.int8(op).to_ne_bytes()),
            DataType::Uint8 => into.copy_from_slice(&element.uint8(op).to_ne_bytes()),
            DataType::Int32 => into.copy_from_slice(&element.int32(op).to_ne_bytes()),
            DataType::Uint32 => into.copy_from_slice(&element.uint32(op).to_ne_bytes()),
            DataType::Int64 => into.copy_from_slice(&element.int64(op).to_ne_bytes()),
            DataType::Uint64 => into.copy_from_slice(&element.uint64(op).to_ne_bytes()),
            DataType::Float32 => {
                let result = element.float32(op, f32::from_ne_bytes);
                let bits = if result.is_nan() { 0x7fc0_0000 } else { result.to_bits() };
                into.copy_from_slice(&bits.to_ne_bytes());
            }
            DataType::Float64 => {
                let result = element.float64(op, f64::from_ne_bytes);
                let bits = if result.is_nan() { 0x7ff8_0000_0000_0000 } else { result.to_bits() };
                into.copy_from_slice(&bits.to_ne_bytes());
            }
            DataType::Float16 => {
                let result = element.float32(op, |bytes| f16::from_ne_bytes(bytes).to_f32());
                let bits = if result.is_nan() { 0x7e00 } else { f16::from_f32(result).to_bits() };
                into.copy_from_slice(&bits.to_ne_bytes());
            }
            DataType::Bfloat16 => {
                let result = element.float32(op, |bytes| bf16::from_ne_bytes(bytes).to_f32());
                let bits = if result.is_nan() { 0x7fc0 } else { bf16::from_f32(result).to_bits() };
                into.copy_from_slice(&bits.to_ne_bytes());
            }
            DataType::Float8E4m3 => {
                into[0] = E4M3.code(op, element.float32(op, |[code]| E4M3.value(code)));
            }
            DataType::Float8E5m2 => {
                into[0] = E5M2.code(op, element.float32(op, |[code]| E5M2.value(code)));
            }
        }
    }
    Ok(())
}

/// The elements at byte `at` of all sources.
#[derive(Clone, Copy)]
struct Element<'a> {
    sources: &'a [&'a [u8]],
    at: usize,
}

impl<'a> Element<'a> {
    fn values<const N: usize, T: 'a>(
        self,
        decode: impl Fn([u8; N]) -> T + 'a,
    ) -> impl Iterator<Item = T> + 'a {
        self.sources.iter().map(move |source| {
            let mut bytes = [0; N];
            bytes.copy_from_slice(&source[self.at..][..N]);
            decode(bytes)
        })
    }
}

macro_rules! integer {
    ($name:ident, $type:ty) => {
        fn $name(self, op: Op) -> $type {
            let values = self.values(<$type>::from_ne_bytes);
            match op {
                Op::Sum => values.reduce(<$type>::wrapping_add),
                Op::Prod => values.reduce(<$type>::wrapping_mul),
                Op::Max => values.max(),
                Op::Min => values.min(),
            }
            .unwrap_or_default()
        }
    };
}

macro_rules! float {
    ($name:ident, $type:ident) => {
        /// NaN for no values: a minimum and a maximum skip all NaN.
        fn $name<const N: usize>(self, op: Op, decode: impl Fn([u8; N]) -> $type + 'a) -> $type {
            let values = self.values(decode);
            let numbers = |value: &$type| !value.is_nan();
            match op {
                Op::Sum => values.reduce(|a, b| a + b),
                Op::Prod => values.reduce(|a, b| a * b),
                Op::Max => values.filter(numbers).max_by($type::total_cmp),
                Op::Min => values.filter(numbers).min_by($type::total_cmp),
            }
            .unwrap_or($type::NAN)
        }
    };
}

impl<'a> Element<'a> {
    integer!(int8, i8);
    integer!(uint8, u8);
    integer!(int32, i32);
    integer!(uint32, u32);
    integer!(int64, i64);
    integer!(uint64, u64);
    float!(float32, f32);
    float!(float64, f64);
}

/// A float of 8 bits, as the OCP specification defines it.
struct Float8 {
    mantissa: u32,
    bias: i32,
    /// The code of the largest number.
    largest: u8,
    /// The code of infinity, if there is one.
    infinity: Option<u8>,
    /// The code that stands for all NaN.
    nan: u8,
}

const E4M3: Float8 = Float8 { mantissa: 3, bias: 7, largest: 0x7e, infinity: None, nan: 0x7f };
const E5M2: Float8 =
    Float8 { mantissa: 2, bias: 15, largest: 0x7b, infinity: Some(0x7c), nan: 0x7e };

impl Float8 {
    fn value(&self, code: u8) -> f32 {
        let magnitude = code & 0x7f;
        let fraction = f32::from(magnitude & ((1 << self.mantissa) - 1));
        let fraction = fraction / (1 << self.mantissa) as f32;
        let value = match i32::from(magnitude >> self.mantissa) {
            _ if self.infinity == Some(magnitude) => f32::INFINITY,
            _ if magnitude > self.largest => f32::NAN,
            0 => fraction * 2f32.powi(1 - self.bias),
            exponent => (1.0 + fraction) * 2f32.powi(exponent - self.bias),
        };
        if code == magnitude { value } else { -value }
    }

    /// The nearest number, ties to even. A minimum or maximum is infinite only if a source is.
    fn code(&self, op: Op, value: f32) -> u8 {
        if value.is_nan() {
            return self.nan;
        }
        let sign = if value.is_sign_negative() { 0x80 } else { 0 };
        if let (true, Op::Max | Op::Min, Some(infinity)) = (value.is_infinite(), op, self.infinity)
        {
            return sign | infinity;
        }
        let value = f64::from(value.abs().min(self.value(self.largest)));
        let off = |code: u8| (f64::from(self.value(code)) - value).abs();
        let nearest = |a: u8, b: u8| match off(a).total_cmp(&off(b)) {
            Ordering::Less => a,
            Ordering::Greater => b,
            Ordering::Equal if a.is_multiple_of(2) => a,
            Ordering::Equal => b,
        };
        sign | (0..=self.largest).reduce(nearest).unwrap_or(self.nan)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp8_codes_have_the_specified_values() {
        let e4m3 = [0x01, 0x07, 0x08, 0x38, 0x7e, 0xfe].map(|code| E4M3.value(code));
        let (tiny, one) = (2f32.powi(-9), 1.0);
        assert_eq!(e4m3, [tiny, 7.0 * tiny, 8.0 * tiny, one, 448.0, -448.0]);
        let e5m2 = [0x01, 0x03, 0x04, 0x3c, 0x7b, 0xfc].map(|code| E5M2.value(code));
        let tiny = 2f32.powi(-16);
        assert_eq!(e5m2, [tiny, 3.0 * tiny, 4.0 * tiny, one, 57344.0, f32::NEG_INFINITY]);
        assert!([0x7f, 0xff].iter().all(|&code| E4M3.value(code).is_nan()));
        assert!([0x7d, 0x7f, 0xfe].iter().all(|&code| E5M2.value(code).is_nan()));
    }

    #[test]
    fn fp8_encoding_is_exact_or_rounded() {
        for format in [E4M3, E5M2] {
            for code in 0..=255 {
                let value = format.value(code);
                if value.is_finite() {
                    assert_eq!(format.code(Op::Sum, value), code);
                }
            }
            assert_eq!(format.code(Op::Sum, f32::INFINITY), format.largest);
            assert_eq!(format.code(Op::Sum, f32::MIN), 0x80 | format.largest);
        }
        assert_eq!(E5M2.code(Op::Max, f32::INFINITY), 0x7c);
        assert_eq!([17.0, 19.0].map(|value| E4M3.code(Op::Sum, value)), [0x58, 0x5a], "ties");
    }
}
