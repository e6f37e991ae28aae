//! The functions of the tuner's tables. None of them fails where it has nothing to say: NCCL would give the collective up, or
//! the communicator.

use std::env;
use std::ffi::{c_int, c_void};
use std::slice;

use evenkeel_nccl_abi::{COST_IGNORED, Logger, NcclResult, NvlDomainInfo, TunerConstants};
use evenkeel_transport::Log;
use evenkeel_tuner::{Algorithm, Collective, Network, Protocol, Settings, choose, chunk_bytes};

use crate::error::{PluginError, guard};
use crate::ffi::{handle_ref, out_param, take_box};
use crate::logger::LOG;

/// The tuner of one communicator; none where NCCL chooses alone.
type Context = Option<Network>;

/// The network as the environment describes it, or why NCCL chooses alone.
fn network(nodes: usize, ranks: usize) -> Result<Network, String> {
    let settings = Settings::from_env().map_err(|error| error.to_string())?;
    let reduction = evenkeel_reduction::Settings::from_env().map_err(|error| error.to_string())?;
    Ok(settings.network(nodes, ranks, reduction.servers.len())?)
}

/// # Safety
/// `context` must be null or valid for writes.
unsafe fn start(
    context: *mut *mut c_void,
    nodes: usize,
    ranks: usize,
    logger: Option<Logger>,
) -> NcclResult {
    guard("tuner's init", || {
        LOG.set(logger);
        // SAFETY: the caller guarantees it.
        let out = unsafe { out_param(context, "context") }?;
        let network = network(nodes, ranks);
        match &network {
            Ok(network) => LOG.info(&format!(
                "evenkeel: tuner: {} nodes, {:.0} Mb/s, {:.0} us, {} reduction servers",
                network.nodes,
                network.bandwidth * 8e-6,
                network.latency * 1e6,
                network.servers.map_or(0, |servers| servers.count)
            )),
            Err(why) => LOG.info(&format!("evenkeel: tuner: NCCL chooses alone: {why}")),
        }
        let tuner: Box<Context> = Box::new(network.ok());
        *out = Box::into_raw(tuner).cast();
        Ok(())
    })
}

pub(super) unsafe extern "C" fn init_v2(
    ranks: usize,
    nodes: usize,
    logger: Option<Logger>,
    context: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL passes a valid out-pointer for the context.
    unsafe { start(context, nodes, ranks, logger) }
}

/// Takes NCCL's own constants as well, which stay as they are: NCCL's model is judged, not changed.
pub(super) unsafe extern "C" fn init_v5(
    context: *mut *mut c_void,
    _communicator: u64,
    ranks: usize,
    nodes: usize,
    logger: Option<Logger>,
    _domains: *mut NvlDomainInfo,
    _constants: *mut TunerConstants,
) -> NcclResult {
    // SAFETY: NCCL passes a valid out-pointer for the context.
    unsafe { start(context, nodes, ranks, logger) }
}

pub(super) unsafe extern "C" fn finalize(context: *mut c_void) -> NcclResult {
    guard("tuner's finalize", || {
        // SAFETY: a context that is not null came from `init`, and NCCL finalizes it once.
        drop(unsafe { take_box::<Context>(context, "context") }?);
        Ok(())
    })
}

/// The first version has no cost table, so NCCL's own choice is not known. Only its habit is judged to take reduction servers
/// wherever it may.
pub(super) unsafe extern "C" fn get_coll_info_v2(
    context: *mut c_void,
    collective: c_int,
    bytes: usize,
    collnet: c_int,
    nvls: c_int,
    operations: c_int,
    algorithm: *mut c_int,
    protocol: *mut c_int,
    _channels: *mut c_int,
) -> NcclResult {
    guard("getCollInfo", || {
        // SAFETY: NCCL passes the context that `init` made.
        let tuner = unsafe { handle_ref::<Context>(context, "context") }?;
        let Some((network, collective)) = judged(tuner, collective, operations) else {
            return Ok(());
        };
        // What users exclude is not in the arguments either.
        let is_free = ["NCCL_ALGO", "NCCL_PROTO"].iter().all(|name| env::var_os(name).is_none());
        if collnet != 1 || nvls != 0 || !is_free {
            return Ok(());
        }
        const HABIT: f32 = 0.0;
        const OTHER: f32 = 1.0;
        let offered = |algorithm, protocol| match (
            Algorithm::from_number(algorithm),
            Protocol::from_number(protocol),
        ) {
            (Some(Algorithm::CollNetChain), Some(Protocol::Simple)) => HABIT,
            (Some(Algorithm::Ring | Algorithm::Tree), Some(Protocol::Ll | Protocol::Simple)) => {
                OTHER
            }
            _ => COST_IGNORED,
        };
        if let Some(chosen) = choose(network, collective, bytes, (6, 3), offered) {
            // SAFETY: NCCL passes valid out-pointers for both.
            unsafe {
                *out_param(algorithm, "algorithm")? = chosen.0 as c_int;
                *out_param(protocol, "protocol")? = chosen.1 as c_int;
            }
        }
        Ok(())
    })
}

pub(super) unsafe extern "C" fn get_coll_info_v3(
    context: *mut c_void,
    collective: c_int,
    bytes: usize,
    operations: c_int,
    costs: *mut f32,
    algorithms: c_int,
    protocols: c_int,
    channels: *mut c_int,
) -> NcclResult {
    // SAFETY: NCCL passes valid arguments of its table's function, which has one less.
    unsafe {
        get_coll_info_v4(
            context, collective, bytes, operations, costs, algorithms, protocols, 0, channels,
        )
    }
}

/// The number of channels stays NCCL's.
pub(super) unsafe extern "C" fn get_coll_info_v4(
    context: *mut c_void,
    collective: c_int,
    bytes: usize,
    operations: c_int,
    costs: *mut f32,
    algorithms: c_int,
    protocols: c_int,
    _registered: c_int,
    _channels: *mut c_int,
) -> NcclResult {
    guard("getCollInfo", || {
        // SAFETY: NCCL passes the context that `init` made.
        let tuner = unsafe { handle_ref::<Context>(context, "context") }?;
        let Some((network, collective)) = judged(tuner, collective, operations) else {
            return Ok(());
        };
        let (Ok(rows), Ok(columns)) = (usize::try_from(algorithms), usize::try_from(protocols))
        else {
            return Err(PluginError::invalid_argument("the cost table has a negative size"));
        };
        if costs.is_null() || rows * columns == 0 {
            return Err(PluginError::invalid_argument("there is no cost table"));
        }
        // SAFETY: not null, and NCCL passes a table of so many floats, for the call.
        let costs = unsafe { slice::from_raw_parts_mut(costs, rows * columns) };
        let chosen = choose(network, collective, bytes, (rows, columns), |row, column| {
            costs[row * columns + column]
        });
        if let Some((algorithm, protocol)) = chosen {
            // NCCL takes the least.
            costs[algorithm as usize * columns + protocol as usize] = 0.0;
        }
        Ok(())
    })
}

pub(super) unsafe extern "C" fn get_chunk_size(
    context: *mut c_void,
    collective: c_int,
    bytes: usize,
    algorithm: c_int,
    protocol: c_int,
    channels: c_int,
    chunk: *mut usize,
) -> NcclResult {
    guard("getChunkSize", || {
        // SAFETY: NCCL passes the context that `init` made.
        let tuner = unsafe { handle_ref::<Context>(context, "context") }?;
        let Some((network, collective)) = judged(tuner, collective, 1) else { return Ok(()) };
        let number = |number: c_int| usize::try_from(number).unwrap_or(usize::MAX);
        let (Some(algorithm), Some(protocol)) =
            (Algorithm::from_number(number(algorithm)), Protocol::from_number(number(protocol)))
        else {
            return Ok(());
        };
        let channels = usize::try_from(channels).unwrap_or(1);
        let wanted = chunk_bytes(network, collective, algorithm, protocol, bytes, channels);
        if let Some(wanted) = wanted {
            // SAFETY: NCCL passes a valid pointer to its own chunk size.
            *unsafe { out_param(chunk, "chunkSize") }? = wanted;
        }
        Ok(())
    })
}

/// The network and the collective, if the choice is not left to NCCL. The costs of operations that NCCL does together are left
/// to it: they share latencies in ways that only it knows.
fn judged(tuner: &Context, collective: c_int, operations: c_int) -> Option<(&Network, Collective)> {
    let network = tuner.as_ref()?;
    (operations <= 1).then_some((network, Collective::from_number(collective)?))
}
