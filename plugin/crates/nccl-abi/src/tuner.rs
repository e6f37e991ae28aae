//! `ncclTuner`: the table of functions of a tuner, one layout per version. NCCL looks for it in the
//! network plugin's library when `NCCL_TUNER_PLUGIN` is unset.
//!
//! Source: the headers `src/include/plugin/tuner/tuner_v{2..6}.h` of NCCL 2.30.7.

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

use crate::{Logger, NcclResult};

/// Numbers of algorithms, protocols, hardware links, GPU generations and scales in
/// [`TunerConstants`].
const ALGORITHMS: usize = 7;
const PROTOCOLS: usize = 3;
const LINKS: usize = 3;
const GENERATIONS: usize = 4;
const SCALES: usize = 3;

/// What an algorithm's entry in a cost table holds if NCCL must not choose it.
pub const COST_IGNORED: f32 = -1.0;

/// `ncclNvlDomainInfo`, v5 and later: how ranks are joined by NVLink.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct NvlDomainInfo {
    /// Number of domains.
    pub domains: c_int,
    /// Ranks of the smallest.
    pub min_ranks: c_int,
    /// Ranks of the largest.
    pub max_ranks: c_int,
}

/// `ncclTunerConstants`, v5 and later: the constants of NCCL's own model, which a tuner may change.
/// Microseconds and GB/s.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TunerConstants {
    /// To start an algorithm.
    pub base_latencies: [[f64; PROTOCOLS]; ALGORITHMS],
    /// A step over NVLink, PCIe or the network.
    pub hw_latencies: [[[f64; PROTOCOLS]; ALGORITHMS]; LINKS],
    /// Limits of the protocol LL.
    pub ll_max_bandwidths: [[f64; SCALES]; GENERATIONS],
    /// Limits of a channel: a ring with LL128.
    pub ring_ll128_max_bandwidths: [[f64; SCALES]; GENERATIONS],
    /// A tree with LL128.
    pub tree_ll128_max_bandwidths: [[f64; SCALES]; GENERATIONS],
    /// A tree.
    pub tree_max_bandwidths: [[f64; SCALES]; GENERATIONS],
    /// A tree with NVLink's sums.
    pub nvls_tree_max_bandwidths: [[f64; SCALES]; GENERATIONS],
}

type Function<F> = Option<F>;
type InitV2 = unsafe extern "C" fn(usize, usize, Option<Logger>, *mut *mut c_void) -> NcclResult;
type InitV5 = unsafe extern "C" fn(
    *mut *mut c_void,
    u64,
    usize,
    usize,
    Option<Logger>,
    *mut NvlDomainInfo,
    *mut TunerConstants,
) -> NcclResult;
type GetCollInfoV2 = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    usize,
    c_int,
    c_int,
    c_int,
    *mut c_int,
    *mut c_int,
    *mut c_int,
) -> NcclResult;
/// The cost table is declared as `float**`, and is an array of `numAlgo` times `numProto` floats.
type GetCollInfoV3 = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    usize,
    c_int,
    *mut f32,
    c_int,
    c_int,
    *mut c_int,
) -> NcclResult;
type GetCollInfoV4 = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    usize,
    c_int,
    *mut f32,
    c_int,
    c_int,
    c_int,
    *mut c_int,
) -> NcclResult;
type Finalize = unsafe extern "C" fn(*mut c_void) -> NcclResult;
type GetChunkSize =
    unsafe extern "C" fn(*mut c_void, c_int, usize, c_int, c_int, c_int, *mut usize) -> NcclResult;

/// The layout of v2 to v5, which differ in the signatures of `init` (`I`) and `getCollInfo` (`G`).
#[allow(missing_docs, reason = "the functions are documented by NCCL's headers, under these names")]
#[repr(C)]
pub struct TunerTable<I, G> {
    pub name: *const c_char,
    pub init: Function<I>,
    pub get_coll_info: Function<G>,
    /// `destroy` up to v4.
    pub finalize: Function<Finalize>,
}
/// `ncclTuner_v2_t`, NCCL 2.21.
pub type TunerV2 = TunerTable<InitV2, GetCollInfoV2>;
/// `ncclTuner_v3_t`, NCCL 2.22 and 2.23.
pub type TunerV3 = TunerTable<InitV2, GetCollInfoV3>;
/// `ncclTuner_v4_t`, NCCL 2.24 to 2.27.
pub type TunerV4 = TunerTable<InitV2, GetCollInfoV4>;
/// `ncclTuner_v5_t`, NCCL 2.28 and 2.29.
pub type TunerV5 = TunerTable<InitV5, GetCollInfoV4>;

/// `ncclTuner_v6_t`, NCCL 2.30 and later.
#[allow(missing_docs, reason = "the functions are documented by NCCL's headers, under these names")]
#[repr(C)]
pub struct TunerV6 {
    pub name: *const c_char,
    pub init: Function<InitV5>,
    pub get_coll_info: Function<GetCollInfoV4>,
    pub finalize: Function<Finalize>,
    pub get_chunk_size: Function<GetChunkSize>,
}

// SAFETY: a table is read only, and its name points to a string that is never written or freed:
// NCCL reads it from any thread for as long as the library is loaded.
unsafe impl<I, G> Sync for TunerTable<I, G> {}
// SAFETY: as above.
unsafe impl Sync for TunerV6 {}

const POINTER: usize = size_of::<usize>();
const _: () = {
    assert!(size_of::<NvlDomainInfo>() == 12);
    assert!(size_of::<TunerConstants>() == 1152);
    assert!(offset_of!(TunerConstants, hw_latencies) == 168);
    assert!(offset_of!(TunerConstants, ll_max_bandwidths) == 672);
    assert!(offset_of!(TunerConstants, nvls_tree_max_bandwidths) == 1056);
    assert!(size_of::<TunerV2>() == 4 * POINTER);
    assert!(size_of::<TunerV5>() == 4 * POINTER);
    assert!(size_of::<TunerV6>() == 5 * POINTER);
    assert!(offset_of!(TunerV2, get_coll_info) == 2 * POINTER);
    assert!(offset_of!(TunerV5, finalize) == 3 * POINTER);
    assert!(offset_of!(TunerV6, get_chunk_size) == 4 * POINTER);
};
