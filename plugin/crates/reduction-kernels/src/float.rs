//! Conversions between float32 and narrower floats, without branches, so that the compiler
//! vectorizes a loop of them.

/// The canonical NaN of float32.
pub(crate) const NAN32: u32 = 0x7fc0_0000;
/// The canonical NaN of float64.
pub(crate) const NAN64: u64 = 0x7ff8_0000_0000_0000;

const INFINITY32: u32 = 0x7f80_0000;

/// A float of at most 16 bits: a sign, an exponent, then `mantissa` bits.
#[derive(Clone, Copy)]
pub(crate) struct Format {
    /// Bits of exponent and mantissa together; the sign is the bit above them.
    pub(crate) magnitude: u32,
    mantissa: u32,
    bias: u32,
    /// The result for a magnitude beyond the format's range: infinity, or the largest number.
    overflow: u32,
    /// The largest magnitude that is not NaN.
    pub(crate) last: u32,
    /// The magnitude of infinity, if the format has one.
    infinity: Option<u32>,
    /// The canonical NaN.
    pub(crate) nan: u32,
}

pub(crate) const FLOAT16: Format = Format {
    magnitude: 15,
    mantissa: 10,
    bias: 15,
    overflow: 0x7c00,
    last: 0x7c00,
    infinity: Some(0x7c00),
    nan: 0x7e00,
};

pub(crate) const BFLOAT16: Format = Format {
    magnitude: 15,
    mantissa: 7,
    bias: 127,
    overflow: 0x7f80,
    last: 0x7f80,
    infinity: Some(0x7f80),
    nan: 0x7fc0,
};

pub(crate) const E4M3: Format = Format {
    magnitude: 7,
    mantissa: 3,
    bias: 7,
    overflow: 0x7e,
    last: 0x7e,
    infinity: None,
    nan: 0x7f,
};

pub(crate) const E5M2: Format = Format {
    magnitude: 7,
    mantissa: 2,
    bias: 15,
    overflow: 0x7b,
    last: 0x7c,
    infinity: Some(0x7c),
    nan: 0x7e,
};

impl Format {
    /// Converts to float32. Exact: every number of the format is one of float32.
    #[inline(always)]
    pub(crate) fn decode(self, code: u32) -> f32 {
        let shift = 23 - self.mantissa;
        if self.bias == 127 {
            return f32::from_bits(code << shift);
        }
        let sign = code >> self.magnitude << 31;
        let magnitude = code & ((1 << self.magnitude) - 1);
        let widened = magnitude << shift;
        let normal = widened + ((127 - self.bias) << 23);
        // A subnormal is read as if it had the leading one of the smallest normal number, which is
        // then subtracted. No operand is a float32 subnormal: those are slow on some processors.
        let one = (128 - self.bias) << 23;
        let subnormal = (f32::from_bits(widened + one) - f32::from_bits(one)).to_bits();
        let number = if magnitude >> self.mantissa == 0 { subnormal } else { normal };
        let number = if self.infinity == Some(magnitude) { INFINITY32 } else { number };
        let number = if magnitude > self.last { NAN32 } else { number };
        f32::from_bits(sign | number)
    }

    /// Converts from float32. Rounds to nearest, ties to even; NaN becomes the canonical one.
    #[inline(always)]
    pub(crate) fn encode(self, value: f32) -> u32 {
        let shift = 23 - self.mantissa;
        let bits = value.to_bits();
        let sign = bits >> 31 << self.magnitude;
        let magnitude = bits & 0x7fff_ffff;
        let even = |bits: u32| {
            (bits.wrapping_add((1 << (shift - 1)) - 1).wrapping_add(bits >> shift & 1)) >> shift
        };
        let number = if self.bias == 127 {
            even(magnitude)
        } else {
            let normal = even(magnitude.wrapping_sub((127 - self.bias) << 23));
            // The last bit of this number is worth the smallest subnormal of the format, so adding
            // it makes the processor round there.
            let ruler = (127 + 24 - self.bias - self.mantissa) << 23;
            let sum = f32::from_bits(magnitude) + f32::from_bits(ruler);
            let subnormal = sum.to_bits().wrapping_sub(ruler);
            if magnitude < (128 - self.bias) << 23 { subnormal } else { normal }
        };
        let number = number.min(self.overflow);
        if magnitude > INFINITY32 { self.nan } else { sign | number }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of a magnitude by the definition of a format.
    fn value_of(format: Format, magnitude: u32) -> f64 {
        let fraction = f64::from(magnitude & ((1 << format.mantissa) - 1));
        let unit = f64::from(1 << format.mantissa);
        let exponent = (magnitude >> format.mantissa) as i32;
        let bias = format.bias as i32;
        match exponent {
            0 => fraction / unit * 2f64.powi(1 - bias),
            _ => (1.0 + fraction / unit) * 2f64.powi(exponent - bias),
        }
    }

    const ALL: [Format; 4] = [FLOAT16, BFLOAT16, E4M3, E5M2];

    #[test]
    fn float_codes_decode_to_their_value_and_back() {
        for format in ALL {
            for code in 0..2 << format.magnitude {
                let magnitude = code & ((1 << format.magnitude) - 1);
                let value = format.decode(code);
                if magnitude > format.last {
                    assert!(value.is_nan(), "{code:#x}");
                    assert_eq!(format.encode(value), format.nan);
                    continue;
                }
                assert_eq!(value.is_sign_negative(), code != magnitude, "{code:#x}");
                if format.infinity == Some(magnitude) {
                    assert!(value.is_infinite(), "{code:#x}");
                    assert_eq!(format.encode(value), code.min(code - magnitude + format.overflow));
                } else {
                    assert_eq!(f64::from(value.abs()), value_of(format, magnitude), "{code:#x}");
                    assert_eq!(format.encode(value), code);
                }
            }
        }
    }

    /// Rounding is monotonic, so it suffices to check around every number and every midpoint.
    #[test]
    fn float_encoding_rounds_to_nearest_ties_to_even() {
        for format in ALL {
            let largest = if format.infinity.is_some() { format.last - 1 } else { format.last };
            for lower in 0..largest {
                let middle = (value_of(format, lower) + value_of(format, lower + 1)) / 2.0;
                let tie = middle as f32;
                let even = lower + (lower & 1);
                for (sign, top) in [(1.0, 0), (-1.0, 1 << format.magnitude)] {
                    assert_eq!(format.encode(sign * tie.next_down()), top | lower, "{lower:#x}");
                    if f64::from(tie) == middle {
                        assert_eq!(format.encode(sign * tie), top | even, "{lower:#x}");
                    }
                    assert_eq!(format.encode(sign * tie.next_up()), top | (lower + 1));
                }
            }
        }
    }

    #[test]
    fn float_overflow_is_infinity_but_saturates_in_fp8() {
        let past = |format: Format| [format.encode(f32::MAX), format.encode(f32::NEG_INFINITY)];
        assert_eq!(past(FLOAT16), [0x7c00, 0xfc00]);
        assert_eq!(past(BFLOAT16), [0x7f80, 0xff80]);
        assert_eq!(past(E4M3), [0x7e, 0xfe]);
        assert_eq!(past(E5M2), [0x7b, 0xfb]);
        assert_eq!(FLOAT16.encode(65519.996), 0x7bff, "below the middle to the next power of two");
        assert_eq!(FLOAT16.encode(65520.0), 0x7c00, "the middle");
        assert_eq!(E4M3.encode(464.0), 0x7e, "where NaN would be if it were a number");
    }

    #[test]
    fn float_conversions_match_the_half_crate() {
        for code in 0..=u16::MAX {
            let (ours, theirs) = (FLOAT16.decode(code.into()), half::f16::from_bits(code));
            assert!(ours == theirs.to_f32_const() || ours.is_nan() && theirs.is_nan(), "{code:#x}");
            let (ours, theirs) = (BFLOAT16.decode(code.into()), half::bf16::from_bits(code));
            assert!(ours == theirs.to_f32_const() || ours.is_nan() && theirs.is_nan(), "{code:#x}");
        }
        // The stride is odd, so every pattern of low bits occurs with every exponent.
        for bits in (0..=u32::MAX).step_by(4099) {
            let value = f32::from_bits(bits);
            if !value.is_nan() {
                let halves = half::f16::from_f32_const(value).to_bits();
                assert_eq!(FLOAT16.encode(value), halves.into(), "{bits:#x}");
                let halves = half::bf16::from_f32_const(value).to_bits();
                assert_eq!(BFLOAT16.encode(value), halves.into(), "{bits:#x}");
            }
        }
    }
}
