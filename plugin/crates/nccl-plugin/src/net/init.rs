//! Initialization and finalization.

use std::ffi::c_void;
use std::sync::Arc;

use evenkeel_nccl_abi::{Attributes, CommConfig, Logger, NcclResult, ProfilerCallback};

use super::context::Context;
use super::shared_comms;
use crate::error::guard;
use crate::ffi::{handle_ref, out_param, take_arc};
use crate::logger::LOG;
use crate::{plugin, profiler};

pub(super) unsafe extern "C" fn init_v6(logger: Option<Logger>) -> NcclResult {
    guard("init", || {
        LOG.set(logger);
        shared_comms::note_caller(logger);
        plugin::init_global()
    })
}

/// Takes a callback for profilers as well.
pub(super) unsafe extern "C" fn init_v10(
    logger: Option<Logger>,
    profiler: Option<ProfilerCallback>,
) -> NcclResult {
    guard("init", || {
        LOG.set(logger);
        profiler::set(profiler);
        shared_comms::note_caller(logger);
        plugin::init_global()
    })
}

/// Makes a context per communicator, to which listeners and connections belong.
pub(super) unsafe extern "C" fn init_v11(
    context: *mut *mut c_void,
    communicator: u64,
    config: *mut CommConfig,
    logger: Option<Logger>,
    profiler: Option<ProfilerCallback>,
) -> NcclResult {
    guard("init", || {
        LOG.set(logger);
        profiler::set(profiler);
        shared_comms::note_recent_caller();
        // SAFETY: NCCL passes a valid out-pointer for the context.
        let out = unsafe { out_param(context, "context") }?;
        // SAFETY: NCCL passes a configuration, or null.
        let class = unsafe { traffic_class(config) };
        *out = Arc::into_raw(plugin::init_context(communicator, class)?).cast_mut().cast();
        Ok(())
    })
}

/// Takes hints about a context's connections and operations.
pub(super) unsafe extern "C" fn set_net_attr(
    context: *mut c_void,
    attributes: *mut Attributes,
) -> NcclResult {
    guard("setNetAttr", || {
        // SAFETY: NCCL passes a context that `init_v11` made and that is not finalized.
        let context = unsafe { handle_ref::<Context>(context, "context") }?;
        // SAFETY: NCCL passes the structure, which both versions have.
        let attributes = unsafe { out_param(attributes, "netAttr") }?;
        context.set_attributes(attributes);
        Ok(())
    })
}

/// Ends a context. Communicators that were split from its own may share its proxy, which NCCL 2.28.3 leaves with the context.
pub(super) unsafe extern "C" fn finalize_v11(context: *mut c_void) -> NcclResult {
    guard("finalize", || {
        // SAFETY: a context that is not null came from `init_v11`, and NCCL finalizes it once. It stays alive after that as long
        // as there are other contexts, those of the communicators that may use it.
        plugin::finalize_with_last(unsafe { take_arc::<Context>(context, "context") }?);
        Ok(())
    })
}

/// Ends a context, which is not used any more.
pub(super) unsafe extern "C" fn finalize_v12(context: *mut c_void) -> NcclResult {
    guard("finalize", || {
        // SAFETY: a context that is not null came from `init_v11`, and NCCL finalizes it once.
        let context = unsafe { take_arc::<Context>(context, "context") }?;
        plugin::finalize(&context);
        Ok(())
    })
}

/// The traffic class with which a communicator's packets are to be marked, if its configuration has a valid one.
///
/// # Safety
/// `config` must be null or valid for reads.
pub(super) unsafe fn traffic_class(config: *const CommConfig) -> Option<u8> {
    // SAFETY: the caller guarantees it.
    let class = unsafe { config.as_ref() }?.traffic_class;
    u8::try_from(class).ok()
}
