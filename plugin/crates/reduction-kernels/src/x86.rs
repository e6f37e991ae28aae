//! AVX2 and AVX-512: kernels compiled for them, and kernels with instructions that the compiler
//! does not choose by itself: the conversion of float16, and a fast unpacking of bfloat16.
//!
//! A value of [`Avx2`] or [`Avx512`] exists only on a processor that supports the instructions.
//! That makes every call of them in this file sound.

use std::arch::x86_64::*;

use crate::float::NAN32;
use crate::kernel::{self, Kernel, Prod, Sources, Sum};

/// Proof that this processor has AVX2 and F16C.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

/// Proof that this processor has AVX-512 F, BW, DQ and VL, which servers have had since 2017.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512(());

impl Avx2 {
    pub(crate) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
        found.then_some(Self(()))
    }
}

impl Avx512 {
    pub(crate) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        found.then_some(Self(()))
    }
}

macro_rules! compiled_for {
    ($set:ident, $features:literal) => {
        impl $set {
            /// As [`kernel::run`], with these instructions.
            pub(crate) fn run<
                K: Kernel<N>,
                const N: usize,
                const BLOCK: usize,
                const FAN_IN: usize,
            >(
                self,
                kernel: K,
                sources: Sources<'_>,
                into: &mut [u8],
            ) {
                #[target_feature(enable = $features)]
                fn compiled<
                    K: Kernel<N>,
                    const N: usize,
                    const BLOCK: usize,
                    const FAN_IN: usize,
                >(
                    kernel: K,
                    sources: Sources<'_>,
                    into: &mut [u8],
                ) {
                    kernel::run::<K, N, BLOCK, FAN_IN>(kernel, sources, into);
                }
                // SAFETY: `self` proves that the processor has these features.
                unsafe { compiled::<K, N, BLOCK, FAN_IN>(kernel, sources, into) }
            }
        }
    };
}

compiled_for!(Avx2, "avx2,f16c");
compiled_for!(Avx512, "avx512f,avx512bw,avx512dq,avx512vl");

/// A vector of float16, accumulated in one of float32.
#[derive(Clone, Copy)]
pub(crate) struct Float16<Set, Op>(pub(crate) Set, pub(crate) Op);

/// Two vectors of bfloat16, accumulated in one of the elements at even positions and one of those
/// at odd positions.
#[derive(Clone, Copy)]
pub(crate) struct Bfloat16<Set, Op>(pub(crate) Set, pub(crate) Op);

/// A vector of float32.
#[derive(Clone, Copy)]
pub(crate) struct Float32<Set, Op>(pub(crate) Set, pub(crate) Op);

macro_rules! vectors {
    ($set:ident, $op:ident, $combine:ident, $vector:ident, $half:literal, $both:literal) => {
        impl Kernel<$both> for Float32<$set, $op> {
            type Acc = $vector;
            const EXACT: bool = true;

            #[inline(always)]
            fn load(self, floats: [u8; $both]) -> $vector {
                self.0.load_float32(floats)
            }

            #[inline(always)]
            fn combine(self, a: $vector, b: $vector) -> $vector {
                // SAFETY: `self` holds the proof of the set, which has this instruction.
                unsafe { $combine(a, b) }
            }

            #[inline(always)]
            fn store(self, vector: $vector) -> [u8; $both] {
                self.0.store_float32(vector)
            }
        }

        impl Kernel<$half> for Float16<$set, $op> {
            type Acc = $vector;
            const PREFETCH_AHEAD: usize = 1024;
            const EXACT: bool = false;

            #[inline(always)]
            fn load(self, halves: [u8; $half]) -> $vector {
                self.0.load_float16(halves)
            }

            #[inline(always)]
            fn combine(self, a: $vector, b: $vector) -> $vector {
                // SAFETY: `self` holds the proof of the set, which has this instruction.
                unsafe { $combine(a, b) }
            }

            #[inline(always)]
            fn store(self, vector: $vector) -> [u8; $half] {
                self.0.store_float16(vector)
            }
        }

        impl Kernel<$both> for Bfloat16<$set, $op> {
            type Acc = [$vector; 2];
            const PREFETCH_AHEAD: usize = 1024;
            const EXACT: bool = false;

            #[inline(always)]
            fn load(self, halves: [u8; $both]) -> [$vector; 2] {
                self.0.load_bfloat16(halves)
            }

            #[inline(always)]
            fn combine(self, [a, b]: [$vector; 2], [c, d]: [$vector; 2]) -> [$vector; 2] {
                // SAFETY: `self` holds the proof of the set, which has this instruction.
                unsafe { [$combine(a, c), $combine(b, d)] }
            }

            #[inline(always)]
            fn store(self, [even, odd]: [$vector; 2]) -> [u8; $both] {
                self.0.store_bfloat16(even, odd)
            }
        }
    };
}

vectors!(Avx2, Sum, _mm256_add_ps, __m256, 16, 32);
vectors!(Avx2, Prod, _mm256_mul_ps, __m256, 16, 32);
vectors!(Avx512, Sum, _mm512_add_ps, __m512, 32, 64);
vectors!(Avx512, Prod, _mm512_mul_ps, __m512, 32, 64);

// Rounding is to nearest, ties to even; NaN becomes the canonical one.

impl Avx2 {
    #[inline(always)]
    fn load_float32(self, floats: [u8; 32]) -> __m256 {
        // SAFETY: `self` proves AVX; the unaligned load reads the 32 bytes of `floats`.
        unsafe { _mm256_loadu_ps(floats.as_ptr().cast()) }
    }

    #[inline(always)]
    fn store_float32(self, vector: __m256) -> [u8; 32] {
        let mut floats = [0; 32];
        // SAFETY: `self` proves AVX; the unaligned store writes the 32 bytes of `floats`.
        unsafe { _mm256_storeu_ps(floats.as_mut_ptr().cast(), self.canonical(vector)) };
        floats
    }

    /// Every NaN becomes the canonical one.
    #[inline(always)]
    fn canonical(self, vector: __m256) -> __m256 {
        // SAFETY: `self` proves AVX.
        unsafe {
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(vector, vector);
            _mm256_blendv_ps(vector, _mm256_set1_ps(f32::from_bits(NAN32)), nan)
        }
    }

    #[inline(always)]
    fn load_float16(self, halves: [u8; 16]) -> __m256 {
        // SAFETY: `self` proves F16C; the unaligned load reads the 16 bytes of `halves`.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(halves.as_ptr().cast())) }
    }

    #[inline(always)]
    fn store_float16(self, vector: __m256) -> [u8; 16] {
        let mut halves = [0; 16];
        // SAFETY: `self` proves AVX and F16C; the unaligned store writes the 16 bytes of `halves`.
        unsafe {
            let vector = self.canonical(vector);
            let rounded = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(vector);
            _mm_storeu_si128(halves.as_mut_ptr().cast(), rounded);
        }
        halves
    }

    #[inline(always)]
    fn load_bfloat16(self, halves: [u8; 32]) -> [__m256; 2] {
        // SAFETY: `self` proves AVX2; the unaligned load reads the 32 bytes of `halves`.
        unsafe {
            let both = _mm256_loadu_si256(halves.as_ptr().cast());
            let even = _mm256_slli_epi32::<16>(both);
            let odd = _mm256_and_si256(both, _mm256_set1_epi32(!0xffff));
            [_mm256_castsi256_ps(even), _mm256_castsi256_ps(odd)]
        }
    }

    #[inline(always)]
    fn store_bfloat16(self, even: __m256, odd: __m256) -> [u8; 32] {
        let mut halves = [0; 32];
        let (even, odd) = (self.round_upper_half(even), self.round_upper_half(odd));
        // SAFETY: `self` proves AVX2; the unaligned store writes the 32 bytes of `halves`.
        unsafe {
            let both = _mm256_blend_epi16::<0b1010_1010>(_mm256_srli_epi32::<16>(even), odd);
            _mm256_storeu_si256(halves.as_mut_ptr().cast(), both);
        }
        halves
    }

    /// The upper half of each 32-bit element becomes the rounded number; the lower half is
    /// unspecified.
    #[inline(always)]
    fn round_upper_half(self, vector: __m256) -> __m256i {
        // SAFETY: `self` proves AVX2.
        unsafe {
            let bits = _mm256_castps_si256(vector);
            let is_odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let half = _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7fff));
            let rounded = _mm256_castsi256_ps(_mm256_add_epi32(bits, half));
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(vector, vector);
            let canonical = _mm256_set1_ps(f32::from_bits(NAN32));
            _mm256_castps_si256(_mm256_blendv_ps(rounded, canonical, nan))
        }
    }
}

impl Avx512 {
    #[inline(always)]
    fn load_float32(self, floats: [u8; 64]) -> __m512 {
        // SAFETY: `self` proves AVX-512 F; the unaligned load reads the 64 bytes of `floats`.
        unsafe { _mm512_loadu_ps(floats.as_ptr().cast()) }
    }

    #[inline(always)]
    fn store_float32(self, vector: __m512) -> [u8; 64] {
        let mut floats = [0; 64];
        // SAFETY: `self` proves AVX-512 F; the unaligned store writes the 64 bytes of `floats`.
        unsafe { _mm512_storeu_ps(floats.as_mut_ptr().cast(), self.canonical(vector)) };
        floats
    }

    /// Every NaN becomes the canonical one.
    #[inline(always)]
    fn canonical(self, vector: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512 F.
        unsafe {
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(vector, vector);
            _mm512_mask_mov_ps(vector, nan, _mm512_set1_ps(f32::from_bits(NAN32)))
        }
    }

    #[inline(always)]
    fn load_float16(self, halves: [u8; 32]) -> __m512 {
        // SAFETY: `self` proves AVX-512 F; the unaligned load reads the 32 bytes of `halves`.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(halves.as_ptr().cast())) }
    }

    #[inline(always)]
    fn store_float16(self, vector: __m512) -> [u8; 32] {
        let mut halves = [0; 32];
        // SAFETY: `self` proves AVX-512 F; the unaligned store writes the 32 bytes of `halves`.
        unsafe {
            let vector = self.canonical(vector);
            let rounded = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(vector);
            _mm256_storeu_si256(halves.as_mut_ptr().cast(), rounded);
        }
        halves
    }

    #[inline(always)]
    fn load_bfloat16(self, halves: [u8; 64]) -> [__m512; 2] {
        // SAFETY: `self` proves AVX-512 F; the unaligned load reads the 64 bytes of `halves`.
        unsafe {
            let both = _mm512_loadu_si512(halves.as_ptr().cast());
            let even = _mm512_slli_epi32::<16>(both);
            let odd = _mm512_and_si512(both, _mm512_set1_epi32(!0xffff));
            [_mm512_castsi512_ps(even), _mm512_castsi512_ps(odd)]
        }
    }

    #[inline(always)]
    fn store_bfloat16(self, even: __m512, odd: __m512) -> [u8; 64] {
        let mut halves = [0; 64];
        let (even, odd) = (self.round_upper_half(even), self.round_upper_half(odd));
        // SAFETY: `self` proves AVX-512 F and BW; the unaligned store writes the 64 bytes of
        // `halves`.
        unsafe {
            let even = _mm512_srli_epi32::<16>(even);
            let both = _mm512_mask_mov_epi16(even, 0xaaaa_aaaa, odd);
            _mm512_storeu_si512(halves.as_mut_ptr().cast(), both);
        }
        halves
    }

    /// The upper half of each 32-bit element becomes the rounded number; the lower half is
    /// unspecified.
    #[inline(always)]
    fn round_upper_half(self, vector: __m512) -> __m512i {
        // SAFETY: `self` proves AVX-512 F.
        unsafe {
            let bits = _mm512_castps_si512(vector);
            let is_odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let half = _mm512_add_epi32(is_odd, _mm512_set1_epi32(0x7fff));
            let rounded = _mm512_add_epi32(bits, half);
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(vector, vector);
            _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(NAN32 as i32))
        }
    }
}
