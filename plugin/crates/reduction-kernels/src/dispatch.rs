//! Selects the kernel for a data type and reduction, and the instruction set it is compiled for.

use crate::kernel::{self, Kernel, Max, Min, Prod, Sources, Sum};
#[cfg(target_arch = "x86_64")]
use crate::x86::{self, Avx2, Avx512};
use crate::{DataType, Op};

/// An instruction set that the kernels are compiled for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum InstructionSet {
    /// The minimum of the architecture: SSE2 on x86-64, NEON on aarch64.
    Baseline,
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
}

impl InstructionSet {
    /// All sets that this processor supports, the widest last.
    pub(crate) fn available() -> impl DoubleEndedIterator<Item = Self> {
        [
            Some(Self::Baseline),
            #[cfg(target_arch = "x86_64")]
            Avx2::detect().map(Self::Avx2),
            #[cfg(target_arch = "x86_64")]
            Avx512::detect().map(Self::Avx512),
        ]
        .into_iter()
        .flatten()
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Baseline if cfg!(target_arch = "aarch64") => "NEON",
            Self::Baseline if cfg!(target_arch = "x86_64") => "SSE2",
            Self::Baseline => "portable",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "AVX2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "AVX-512",
        }
    }

    /// Reduces buffers that all hold the same whole number of elements.
    pub(crate) fn reduce(self, kind: DataType, op: Op, sources: Sources<'_>, into: &mut [u8]) {
        #[cfg(target_arch = "x86_64")]
        macro_rules! vectors {
            ($($set:ident $kind:ident $bytes:literal $block:literal,)+) => {
                match (self, kind, op) {
                    $((Self::$set(set), DataType::$kind, Op::Sum) => {
                        let kernel = x86::$kind(set, Sum);
                        return set.run::<_, $bytes, $block, 8>(kernel, sources, into);
                    }
                    (Self::$set(set), DataType::$kind, Op::Prod) => {
                        let kernel = x86::$kind(set, Prod);
                        return set.run::<_, $bytes, $block, 1>(kernel, sources, into);
                    })+
                    _ => {}
                }
            };
        }
        // Bytes of an element and elements of a block: 16 KiB of each source, or 8 KiB of
        // accumulators. Sums are the common case; other reductions read one source in a pass, so
        // that fewer loops are compiled.
        #[cfg(target_arch = "x86_64")]
        vectors! {
            Avx2 Float32 32 512, Avx2 Float16 16 256, Avx2 Bfloat16 32 128,
            Avx512 Float32 64 256, Avx512 Float16 32 128, Avx512 Bfloat16 64 64,
        }
        macro_rules! scalars {
            ($($kind:ident $bytes:literal $block:literal,)+) => {
                match (kind, op) {$(
                    (DataType::$kind, Op::Sum) =>
                        self.run::<_, $bytes, $block, 4>(kernel::$kind(Sum), sources, into),
                    (DataType::$kind, Op::Prod) =>
                        self.run::<_, $bytes, $block, 1>(kernel::$kind(Prod), sources, into),
                    (DataType::$kind, Op::Max) =>
                        self.run::<_, $bytes, $block, 1>(kernel::$kind(Max), sources, into),
                    (DataType::$kind, Op::Min) =>
                        self.run::<_, $bytes, $block, 1>(kernel::$kind(Min), sources, into),
                )+}
            };
        }
        scalars! {
            Int8 1 16384, Uint8 1 16384,
            Int32 4 4096, Uint32 4 4096, Float32 4 4096,
            Int64 8 2048, Uint64 8 2048, Float64 8 2048,
            Float16 2 2048, Bfloat16 2 2048,
            Float8E4m3 1 2048, Float8E5m2 1 2048,
        }
    }

    fn run<K: Kernel<N>, const N: usize, const BLOCK: usize, const FAN_IN: usize>(
        self,
        kernel: K,
        sources: Sources<'_>,
        into: &mut [u8],
    ) {
        match self {
            Self::Baseline => kernel::run::<K, N, BLOCK, FAN_IN>(kernel, sources, into),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(set) => set.run::<K, N, BLOCK, FAN_IN>(kernel, sources, into),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(set) => set.run::<K, N, BLOCK, FAN_IN>(kernel, sources, into),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::reference;

    /// Every instruction set must give the result of the reference, into another buffer and in
    /// place.
    #[track_caller]
    fn assert_matches_reference(kind: DataType, op: Op, sources: &[&[u8]], offset: usize) {
        let bytes = sources[0].len();
        let mut want = vec![0; bytes];
        reference::reduce(kind, op, sources, &mut want).unwrap();
        for instructions in InstructionSet::available() {
            for in_place in [false, true] {
                let mut room = vec![0xa5; offset + bytes + 64];
                let into = &mut room[offset..][..bytes];
                let first = if in_place {
                    into.copy_from_slice(sources[0]);
                    None
                } else {
                    Some(sources[0])
                };
                instructions.reduce(kind, op, Sources { first, rest: &sources[1..] }, into);
                let wrong = (0..bytes / kind.bytes()).find(|i| {
                    let at = i * kind.bytes()..(i + 1) * kind.bytes();
                    into[at.clone()] != want[at]
                });
                if let Some(i) = wrong {
                    let at = i * kind.bytes()..(i + 1) * kind.bytes();
                    let from: Vec<_> = sources.iter().map(|source| &source[at.clone()]).collect();
                    panic!(
                        "{kind:?} {op:?} {} in place: {in_place}, element {i}: {:x?} from {from:x?}, want {:x?}",
                        instructions.name(),
                        &into[at.clone()],
                        &want[at.clone()],
                    );
                }
                let outside = room[..offset].iter().chain(&room[offset + bytes..]);
                assert!(outside.copied().all(|byte| byte == 0xa5), "wrote outside");
            }
        }
    }

    fn for_each_kernel(mut test: impl FnMut(DataType, Op)) {
        for kind in DataType::ALL {
            for op in Op::ALL {
                test(kind, op);
            }
        }
    }

    /// The last two bytes of an element: special numbers of all formats, or any bytes.
    fn high_bytes() -> impl Strategy<Value = [u8; 2]> {
        prop_oneof![
            4 => any::<[u8; 2]>(),
            1 => prop::sample::select(vec![
                [0x00, 0x00], [0x00, 0x80], [0x80, 0x00], [0x80, 0x7f], [0x80, 0xff], [0xc0, 0x7f],
                [0x81, 0xff], [0x7f, 0x7f], [0x7f, 0xff], [0xf0, 0x7f], [0xf8, 0x7f], [0xf0, 0xff],
                [0xef, 0x7f], [0x00, 0x7c], [0x00, 0xfc], [0xff, 0x7b], [0x01, 0x7c], [0x00, 0x7e],
                [0x7c, 0x7c], [0xfc, 0x7d], [0x7b, 0x7e], [0xfb, 0xfe], [0x01, 0x00], [0x01, 0x80],
                [0x00, 0x04], [0x80, 0x3f], [0x00, 0x3c], [0x38, 0x38], [0x80, 0xbf], [0x00, 0xbc],
            ]),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn instruction_sets_match_the_reference(
            n in 1..18usize,
            elements in 0..300usize,
            offsets in prop::collection::vec(0..64usize, 19),
            noise in any::<u64>(),
            tops in prop::collection::vec(high_bytes(), 64),
        ) {
            let mut state = noise;
            let mut next = || {
                // Marsaglia's xorshift; the pattern of the low bits is enough.
                state = state.max(1);
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state
            };
            for_each_kernel(|kind, op| {
                let size = kind.bytes();
                let buffers: Vec<Vec<u8>> = (0..n).map(|rank| {
                    let mut buffer = vec![0; offsets[rank] + elements * size];
                    for element in buffer[offsets[rank]..].chunks_exact_mut(size) {
                        let top = tops[next() as usize % tops.len()];
                        element.copy_from_slice(&next().to_le_bytes()[..size]);
                        let shown = size.min(2);
                        // One in four keeps low bits of zero: infinities and ties of float32.
                        if next().is_multiple_of(4) { element.fill(0) }
                        element[size - shown..].copy_from_slice(&top[2 - shown..]);
                    }
                    buffer
                }).collect();
                let sources: Vec<_> = (0..n).map(|rank| &buffers[rank][offsets[rank]..]).collect();
                assert_matches_reference(kind, op, &sources, offsets[18]);
            });
        }
    }

    #[test]
    fn instruction_sets_match_at_every_length() {
        let buffers: Vec<Vec<u8>> = (0..3usize)
            .map(|rank| (0..2400).map(|i| (i * (rank + 3) % 127) as u8).collect())
            .collect();
        for_each_kernel(|kind, op| {
            for elements in 0..=300 {
                let cut = |rank: usize| &buffers[rank][..elements * kind.bytes()];
                assert_matches_reference(kind, op, &[cut(0), cut(1), cut(2)], elements % 3);
            }
        });
    }

    /// Several blocks, the last one incomplete, and numbers of sources around the passes' limits.
    #[test]
    fn instruction_sets_match_with_many_sources() {
        const BYTES: usize = 34_080;
        let buffers: Vec<Vec<u8>> = (0..34usize)
            .map(|rank| (0..BYTES).map(|i| (i * (2 * rank + 3) % 251) as u8).collect())
            .collect();
        for_each_kernel(|kind, op| {
            // More bytes for one number: blocks are longer where the result holds the accumulators.
            for n in [1, 2, 5, 6, 9, 10, 13, 17, 18, 34] {
                let bytes = if n == 10 { BYTES } else { BYTES / 4 };
                let sources: Vec<_> = buffers[..n].iter().map(|buffer| &buffer[..bytes]).collect();
                assert_matches_reference(kind, op, &sources, n);
            }
        });
    }

    #[test]
    fn widest_instruction_set_is_used() {
        let available: Vec<_> = InstructionSet::available().map(InstructionSet::name).collect();
        println!("tested on this processor: {available:?}");
        assert_eq!(available.last().copied(), Some(crate::instruction_set()));
        let all: &[_] = match available[0] {
            "SSE2" => &["SSE2", "AVX2", "AVX-512"],
            only => &[only],
        };
        assert!(all.starts_with(&available), "{available:?}");
    }

    #[test]
    fn instruction_sets_match_for_all_pairs_of_bytes() {
        let left: Vec<u8> = (0..=u16::MAX).map(|pair| (pair >> 8) as u8).collect();
        let right: Vec<u8> = (0..=u16::MAX).map(|pair| pair as u8).collect();
        for kind in DataType::ALL.into_iter().filter(|kind| kind.bytes() == 1) {
            for op in Op::ALL {
                assert_matches_reference(kind, op, &[&left, &right], 0);
            }
        }
    }

    #[test]
    fn instruction_sets_match_for_all_16_bit_floats() {
        let every: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect();
        // Zeros, ones, the smallest and the largest numbers, infinities, NaN: of float16, then
        // bfloat16.
        for partner in [
            0x0000u16, 0x8000, 0x3c00, 0xbc00, 0x0001, 0x8001, 0x0400, 0x7bff, 0xfbff, 0x7c00,
            0xfc00, 0x7e00, 0xfe01, 0x1555, 0x3f80, 0xbf80, 0x0080, 0x7f7f, 0xff7f, 0x7f80, 0xff80,
            0x7fc0, 0xff81, 0x4049,
        ] {
            let partner = partner.to_ne_bytes().repeat(1 << 16);
            for kind in [DataType::Float16, DataType::Bfloat16] {
                for op in Op::ALL {
                    assert_matches_reference(kind, op, &[&every, &partner], 0);
                    assert_matches_reference(kind, op, &[&partner, &every], 0);
                }
            }
        }
    }
}
