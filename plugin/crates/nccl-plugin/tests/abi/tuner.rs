//! The tuner's tables, called as NCCL calls them.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;

use evenkeel_nccl_abi::{
    COST_IGNORED, INVALID_ARGUMENT, INVALID_USAGE, SUCCESS, TunerV2, TunerV3, TunerV4, TunerV5,
    TunerV6,
};
use libloading::Library;

use crate::harness::{Net, library_path, log_lines, logger, run_in_child_process};

const ALL_REDUCE: c_int = 4;
const RING: usize = 1;
const COLLNET_CHAIN: usize = 3;
const SIMPLE: usize = 2;

/// A loaded tuner of some version, for 16 nodes of one rank.
struct Tuner {
    version: u32,
    library: Library,
    context: *mut c_void,
}

/// NCCL's cost table: microseconds of each algorithm and protocol.
type Costs = [[f32; 3]; 7];

impl Tuner {
    fn init(version: u32) -> Self {
        // SAFETY: the library runs no code when it is loaded.
        let library = unsafe { Library::new(library_path()) }.unwrap();
        let (mut context, logger) = (ptr::null_mut(), Some(logger()));
        let (ranks, nodes) = (16, 16);
        let mut tuner = Self { version, library, context };
        // SAFETY: the arguments are those of NCCL's header of the version.
        let result = unsafe {
            match version {
                2 => (tuner.table::<TunerV2>().init.unwrap())(ranks, nodes, logger, &mut context),
                3 => (tuner.table::<TunerV3>().init.unwrap())(ranks, nodes, logger, &mut context),
                4 => (tuner.table::<TunerV4>().init.unwrap())(ranks, nodes, logger, &mut context),
                5 => (tuner.table::<TunerV5>().init.unwrap())(
                    &mut context,
                    7,
                    ranks,
                    nodes,
                    logger,
                    ptr::null_mut(),
                    ptr::null_mut(),
                ),
                _ => (tuner.table::<TunerV6>().init.unwrap())(
                    &mut context,
                    7,
                    ranks,
                    nodes,
                    logger,
                    ptr::null_mut(),
                    ptr::null_mut(),
                ),
            }
        };
        assert_eq!(result, SUCCESS);
        tuner.context = context;
        tuner
    }

    fn table<T>(&self) -> &T {
        let symbol = format!("ncclTunerPlugin_v{}\0", self.version);
        // SAFETY: the symbol of a version is a static table of that version's type.
        unsafe { &**self.library.get::<*const T>(symbol.as_bytes()).unwrap() }
    }

    /// Asks about an all-reduce with reduction servers, with a table or, in v2, without.
    fn ask(&self, bytes: usize, operations: c_int, costs: &mut Costs) -> Option<(usize, usize)> {
        let before = *costs;
        let (mut algorithm, mut protocol, mut channels) = (-1, -1, 0);
        let table = costs.as_mut_ptr().cast::<f32>();
        let (context, op) = (self.context, ALL_REDUCE);
        // SAFETY: the table has 7 times 3 floats, and all pointers outlive the call.
        let result = unsafe {
            match self.version {
                2 => (self.table::<TunerV2>().get_coll_info.unwrap())(
                    context,
                    op,
                    bytes,
                    1,
                    0,
                    operations,
                    &mut algorithm,
                    &mut protocol,
                    &mut channels,
                ),
                3 => (self.table::<TunerV3>().get_coll_info.unwrap())(
                    context,
                    op,
                    bytes,
                    operations,
                    table,
                    7,
                    3,
                    &mut channels,
                ),
                4 => (self.table::<TunerV4>().get_coll_info.unwrap())(
                    context,
                    op,
                    bytes,
                    operations,
                    table,
                    7,
                    3,
                    0,
                    &mut channels,
                ),
                5 => (self.table::<TunerV5>().get_coll_info.unwrap())(
                    context,
                    op,
                    bytes,
                    operations,
                    table,
                    7,
                    3,
                    0,
                    &mut channels,
                ),
                _ => (self.table::<TunerV6>().get_coll_info.unwrap())(
                    context,
                    op,
                    bytes,
                    operations,
                    table,
                    7,
                    3,
                    0,
                    &mut channels,
                ),
            }
        };
        assert_eq!((result, channels), (SUCCESS, 0));
        if self.version == 2 {
            return (algorithm >= 0).then_some((algorithm as usize, protocol as usize));
        }
        let changed: Vec<_> = (0..21)
            .map(|at| (at / 3, at % 3))
            .filter(|(row, column)| costs[*row][*column] != before[*row][*column])
            .collect();
        assert!(changed.len() <= 1, "{changed:?}");
        changed.first().copied()
    }

    fn finalize(self) {
        let finalize = match self.version {
            2 => self.table::<TunerV2>().finalize,
            3 => self.table::<TunerV3>().finalize,
            4 => self.table::<TunerV4>().finalize,
            5 => self.table::<TunerV5>().finalize,
            _ => self.table::<TunerV6>().finalize,
        };
        // SAFETY: the context came from init, and this is the last use of it.
        assert_eq!(unsafe { (finalize.unwrap())(self.context) }, SUCCESS);
    }
}

/// NCCL's table where it prefers reduction servers.
fn prefers_servers() -> Costs {
    let mut costs = [[COST_IGNORED; 3]; 7];
    costs[COLLNET_CHAIN][SIMPLE] = 10.0;
    costs[RING][SIMPLE] = 20.0;
    costs
}

const MEASURED: [(&str, &str); 2] =
    [("EVENKEEL_TUNER_BANDWIDTH", "10000"), ("EVENKEEL_TUNER_LATENCY", "30")];
const ONE_SERVER: (&str, &str) = ("EVENKEEL_REDUCTION_SERVERS", "10.0.0.1:7470");

#[test]
fn tuner_of_every_version_avoids_a_server_that_is_too_slow() {
    let [bandwidth, latency] = MEASURED;
    run_in_child_process("tuner::child_avoids", &[bandwidth, latency, ONE_SERVER]);
}

#[test]
#[ignore = "part of another test"]
fn child_avoids() {
    for version in 2..=6 {
        let tuner = Tuner::init(version);
        // One server of a node's speed for 16 nodes.
        let mut costs = prefers_servers();
        assert_eq!(tuner.ask(64 << 20, 1, &mut costs), Some((RING, SIMPLE)), "v{version}");
        if version > 2 {
            assert!(costs[RING][SIMPLE] < costs[COLLNET_CHAIN][SIMPLE]);
        }
        // Operations in a group are left to NCCL.
        assert_eq!(tuner.ask(64 << 20, 8, &mut prefers_servers()), None);
        tuner.finalize();
    }
    assert_eq!(log_lines("tuner: 16 nodes, 10000 Mb/s, 30 us, 1 reduction servers").len(), 5);
}

#[test]
fn tuner_leaves_all_to_nccl_unless_the_network_was_measured() {
    let [bandwidth, latency] = MEASURED;
    run_in_child_process("tuner::child_silent", &[ONE_SERVER]);
    run_in_child_process("tuner::child_silent", &[latency, ONE_SERVER]);
    run_in_child_process(
        "tuner::child_silent",
        &[bandwidth, latency, ONE_SERVER, ("EVENKEEL_TUNER", "0")],
    );
}

#[test]
#[ignore = "part of another test"]
fn child_silent() {
    for version in 2..=6 {
        let tuner = Tuner::init(version);
        assert_eq!(tuner.ask(64 << 20, 1, &mut prefers_servers()), None, "v{version}");
        tuner.finalize();
    }
    assert_eq!(log_lines("tuner: NCCL chooses alone: EVENKEEL_TUNER").len(), 5);
}

#[test]
fn tuner_without_a_table_respects_nccls_variables() {
    let [bandwidth, latency] = MEASURED;
    for excluding in [("NCCL_ALGO", "collnetchain"), ("NCCL_PROTO", "Simple")] {
        let all = [bandwidth, latency, ONE_SERVER, excluding];
        run_in_child_process("tuner::child_excluded", &all);
    }
}

#[test]
#[ignore = "part of another test"]
fn child_excluded() {
    let tuner = Tuner::init(2);
    assert_eq!(tuner.ask(64 << 20, 1, &mut prefers_servers()), None);
    tuner.finalize();
}

#[test]
fn tuner_sets_the_chunks_of_reduction_servers() {
    let [bandwidth, latency] = MEASURED;
    run_in_child_process("tuner::child_chunks", &[bandwidth, latency, ONE_SERVER]);
}

#[test]
#[ignore = "part of another test"]
fn child_chunks() {
    let tuner = Tuner::init(6);
    let get = tuner.table::<TunerV6>().get_chunk_size.unwrap();
    let chunk = |algorithm: usize, bytes| {
        let mut chunk = 12_345;
        // SAFETY: the context came from init, and the chunk outlives the call.
        let result = unsafe {
            get(
                tuner.context,
                ALL_REDUCE,
                bytes,
                algorithm as c_int,
                SIMPLE as c_int,
                2,
                &mut chunk,
            )
        };
        assert_eq!(result, SUCCESS);
        chunk
    };
    assert_eq!(chunk(RING, 1 << 30), 12_345, "NCCL's own");
    assert_eq!(chunk(99, 1 << 30), 12_345, "an algorithm that is not known");
    assert_eq!((chunk(COLLNET_CHAIN, 1 << 30), chunk(COLLNET_CHAIN, 1024)), (512 << 10, 32 << 10));
    tuner.finalize();
}

#[test]
fn tuner_refuses_invalid_arguments() {
    let [bandwidth, latency] = MEASURED;
    run_in_child_process("tuner::child_invalid", &[bandwidth, latency]);
}

#[test]
#[ignore = "part of another test"]
fn child_invalid() {
    let tuner = Tuner::init(6);
    let table = tuner.table::<TunerV6>();
    let (null, mut channels) = (ptr::null_mut(), 0);
    let mut costs = prefers_servers();
    let place = costs.as_mut_ptr().cast::<f32>();
    // SAFETY: what is not valid is null or negative, which is what is tried.
    unsafe {
        let get = table.get_coll_info.unwrap();
        let mut ask = |context, costs, rows| {
            get(context, ALL_REDUCE, 1 << 20, 1, costs, rows, 3, 0, &mut channels)
        };
        assert_eq!(ask(null, place, 7), INVALID_ARGUMENT);
        assert_eq!(ask(tuner.context, ptr::null_mut(), 7), INVALID_ARGUMENT);
        assert_eq!(ask(tuner.context, place, -1), INVALID_ARGUMENT);
        assert_eq!(ask(tuner.context, place, 7), SUCCESS);
        assert_eq!((table.finalize.unwrap())(null), INVALID_ARGUMENT);
        // Every version's table begins with its name.
        assert_eq!(CStr::from_ptr(table.name), c"Evenkeel");
    }
    tuner.finalize();
}

#[test]
fn tuner_setting_that_is_not_valid_keeps_the_plugin_from_starting() {
    run_in_child_process("tuner::child_setting", &[("EVENKEEL_TUNER_LATENCY", "30us")]);
}

#[test]
#[ignore = "part of another test"]
fn child_setting() {
    assert_eq!(Net::init(12, 0x7a).err(), Some(INVALID_USAGE));
    assert_eq!(log_lines("EVENKEEL_TUNER_LATENCY=\"30us\" is not valid").len(), 1);
    // NCCL may ask the tuner all the same, and goes on with another network.
    let tuner = Tuner::init(6);
    assert_eq!(tuner.ask(64 << 20, 1, &mut prefers_servers()), None);
    tuner.finalize();
}
