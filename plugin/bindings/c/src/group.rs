//! Groups.

use std::ffi::c_char;
use std::ptr;

use evenkeel_collectives::{self as collectives, Launch, TransportKind, timeout_from_seconds};

use crate::error::Error;
use crate::last_error::guard;
use crate::pointers;
use crate::status::Status;
use crate::store::Store;

/// A rank's membership in a group.
pub struct Group(collectives::Group);

/// The options of a call. All ranks must pass the same, except for the timeout. Zeros, or NULL instead of the options, are the
/// defaults.
#[repr(C)]
pub struct Call {
    /// Operations with different tags may be in progress at the same time.
    pub tag: u32,
    /// Seconds for which the operation may make no progress; 0: the group's timeout.
    pub timeout: f64,
    /// The algorithm of an all-reduce: "ring", "ring_chunked", "halving_doubling", "recursive_doubling", "bcube" or "hierarchical".
    /// NULL: selected by the number of ranks and bytes.
    pub algorithm: *const c_char,
}

/// Joins the group of all `size` ranks that find each other in this store, as rank `rank`. Returns once all ranks have joined.
///
/// `transport` is how the ranks reach each other, the same for all: "tcp" or "tcp:INTERFACE" (such as "tcp:eth0"); "shm", shared
/// memory on one host; "auto" or "auto:INTERFACE", shared memory within hosts and TCP between them; or "tls" or "tls:INTERFACE", TCP
/// with TLS between ranks that authenticate by certificate. NULL is "tcp". The environment variables of the NCCL plugin set TCP.
/// Others name the PEM files for TLS: EVENKEEL_TLS_CERT (this rank's certificate), EVENKEEL_TLS_KEY (its key) and EVENKEEL_TLS_CA
/// (the certificates of the authority that signed the certificates of all ranks, or a folder of them).
///
/// `timeout` is how many seconds to wait for the other ranks, and the group's timeout from then on. Groups that exist at the same
/// time need separate stores or prefixes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_group_join(
    store: *const Store,
    rank: usize,
    size: usize,
    transport: *const c_char,
    timeout: f64,
    group: *mut *mut Group,
) -> Status {
    guard(|| {
        // SAFETY: the header requires a store and a string or NULL.
        let (store, transport_kind) =
            unsafe { (pointers::deref_object("store", store)?, parse_transport(transport)?) };
        let joined = collectives::Group::join(
            &*store.0,
            rank,
            size,
            &transport_kind,
            timeout_from_seconds(timeout)?,
        )?;
        // SAFETY: the header requires a pointer to write to.
        unsafe { pointers::return_object(group, Group(joined)) }
    })
}

/// Joins the group of this name of all ranks that a launcher has started: evenkeel-run, torchrun, mpirun or srun. The environment
/// has this process's rank, and the store: EVENKEEL_STORE, or MASTER_ADDR and MASTER_PORT, where rank 0 serves one. Groups that
/// exist at the same time need different names. The rest is as for evenkeel_group_join.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_group_join_launched(
    name: *const c_char,
    transport: *const c_char,
    timeout: f64,
    group: *mut *mut Group,
) -> Status {
    guard(|| {
        // SAFETY: the header requires strings, of which one may be NULL.
        let (name, transport_kind) =
            unsafe { (pointers::string("name", name)?, parse_transport(transport)?) };
        let joined =
            Launch::from_env()?.join(name, &transport_kind, timeout_from_seconds(timeout)?)?;
        // SAFETY: the header requires a pointer to write to.
        unsafe { pointers::return_object(group, Group(joined)) }
    })
}

/// Leaves a group and frees it. Waits up to a second until the other ranks have what this rank sent. They continue as long as they
/// need nothing more from it. NULL is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_group_free(group: *mut Group) {
    guard(|| {
        // SAFETY: the header requires a group that is not used.
        unsafe { pointers::free_object(group) };
        Ok(())
    });
}

/// This process's rank in the group, from 0; SIZE_MAX for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_group_rank(group: *const Group) -> usize {
    let mut rank = usize::MAX;
    // SAFETY: the header requires a group.
    unsafe {
        with(group, |group| {
            rank = group.rank();
            Ok(())
        })
    };
    rank
}

/// The number of ranks; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_group_size(group: *const Group) -> usize {
    let mut size = 0;
    // SAFETY: the header requires a group.
    unsafe {
        with(group, |group| {
            size = group.size();
            Ok(())
        })
    };
    size
}

/// Returns the error that ended the group, which cannot be used then, or EVENKEEL_OK.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_group_failure(group: *const Group) -> Status {
    // SAFETY: the header requires a group.
    unsafe { with(group, |group| group.failure().map_or(Ok(()), |error| Err(error.into()))) }
}

/// Aborts the group on all ranks. Their operations fail with this reason.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_group_abort(
    group: *const Group,
    reason: *const c_char,
) -> Status {
    // SAFETY: the header requires a group and a string.
    unsafe {
        with(group, |group| {
            group.abort(pointers::string("reason", reason)?);
            Ok(())
        })
    }
}

/// Makes a group of `count` of the ranks, numbered in the order given; NULL on the other ranks. It needs no message and uses this
/// group's connections. When one of the groups fails, so does the other. The ranks of the new group must make groups of the same
/// ranks in the same order. Either group may be freed first.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_group_sub(
    group: *const Group,
    ranks: *const usize,
    count: usize,
    sub: *mut *mut Group,
) -> Status {
    // SAFETY: the header requires a group, its ranks and a pointer to write to.
    unsafe {
        with(group, |group| give(sub, group.sub_group(pointers::slice("ranks", ranks, count)?)?))
    }
}

/// Makes the group of all ranks that pass the same color, in the order of their ranks here; NULL for a negative color. All ranks
/// call it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_group_split(
    group: *const Group,
    color: i64,
    call: *const Call,
    sub: *mut *mut Group,
) -> Status {
    // SAFETY: the header requires a group, a call or NULL and a pointer to write to.
    unsafe {
        with(group, |group| {
            let color = match color {
                ..0 => None,
                color => Some(u32::try_from(color).map_err(|_| {
                    Error::argument(format!("color {color}: less than 4294967296"))
                })?),
            };
            give(sub, group.split(color, &options(call)?)?)
        })
    }
}

/// Runs the body of a function of a group.
///
/// # Safety
/// `group` is null or a group.
pub(crate) unsafe fn with(
    group: *const Group,
    body: impl FnOnce(&collectives::Group) -> Result<(), Error>,
) -> Status {
    // SAFETY: the caller guarantees it.
    guard(|| body(&unsafe { pointers::deref_object("group", group) }?.0))
}

/// The options of a call.
///
/// # Safety
/// `call` is null or points to options.
pub(crate) unsafe fn options(call: *const Call) -> Result<collectives::Call, Error> {
    // SAFETY: the caller guarantees it.
    let Some(call) = (unsafe { call.as_ref() }) else { return Ok(collectives::Call::default()) };
    // SAFETY: the header requires a string or NULL.
    let algorithm = unsafe { pointers::string_or_none("algorithm", call.algorithm) }?;
    let timeout = (call.timeout != 0.0).then_some(call.timeout);
    Ok(collectives::Call::from_parts(call.tag, timeout, algorithm)?)
}

/// # Safety
/// `transport` is null or a string.
unsafe fn parse_transport(transport: *const c_char) -> Result<TransportKind, Error> {
    // SAFETY: the caller guarantees it.
    let name = unsafe { pointers::string_or_none("transport", transport) }?;
    Ok(TransportKind::from_name(name.unwrap_or("tcp"))?)
}

/// # Safety
/// `sub` is null or can be written.
unsafe fn give(sub: *mut *mut Group, group: Option<collectives::Group>) -> Result<(), Error> {
    // SAFETY: the caller guarantees it.
    unsafe {
        match group {
            Some(group) => pointers::return_object(sub, Group(group)),
            None => pointers::write_result(sub, ptr::null_mut()),
        }
    }
}
