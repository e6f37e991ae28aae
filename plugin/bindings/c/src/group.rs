//! Groups.

use std::ffi::c_char;
use std::ptr;

use evenkeel_collectives::{self as collectives, Launch, TransportKind, timeout_from_seconds};

use crate::error::Error;
use crate::last_error::guard;
use crate::pointers;
use crate::status::Status;
use crate::store::Store;

/// One rank's part in a group.
pub struct Group(collectives::Group);

/// How an operation is to be done. All ranks must say the same, but for the timeout. Filled with zeros, or NULL in its place, it
/// asks for nothing special.
#[repr(C)]
pub struct Call {
    /// Operations with different tags may be in progress at the same time.
    pub tag: u32,
    /// Seconds for which nothing may move in it; 0: the group's timeout.
    pub timeout: f64,
    /// The algorithm of an all-reduce: "ring", "ring_chunked", "halving_doubling", "recursive_doubling" or "bcube". NULL: chosen by
    /// the number of ranks and bytes.
    pub algorithm: *const c_char,
}

/// Joins the group of all `size` ranks that meet in this store, as rank `rank`. Returns once all have.
///
/// `transport` is how the ranks reach each other, the same for all: "tcp", "tcp:INTERFACE" (such as "tcp:eth0"), "shm", shared
/// memory of one host, "auto" or "auto:INTERFACE", shared memory within hosts and TCP between them, or "tls" or "tls:INTERFACE",
/// encrypted TCP between ranks that show certificates; NULL is "tcp". Environment variables set TCP, the same as for the NCCL
/// plugin, and name the PEM files for TLS: EVENKEEL_TLS_CERT (this rank's certificate), EVENKEEL_TLS_KEY (its key) and
/// EVENKEEL_TLS_CA (the certificates of the authority that has signed all ranks', or a folder of them). `timeout` is how many seconds to wait for the others, and the group's
/// timeout from then on. A store may be used for one group at a time and under one prefix.
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
        // SAFETY: the header asks for a store and a text or NULL.
        let (store, transport_kind) =
            unsafe { (pointers::object("store", store)?, parse_transport(transport)?) };
        let joined = collectives::Group::join(
            &*store.0,
            rank,
            size,
            &transport_kind,
            timeout_from_seconds(timeout)?,
        )?;
        // SAFETY: the header asks for a place to write.
        unsafe { pointers::give(group, Group(joined)) }
    })
}

/// Joins the group of this name of all ranks that a launcher has started: evenkeel-run, torchrun, mpirun, srun. The environment
/// says which rank this is, and where to meet: EVENKEEL_STORE, or MASTER_ADDR and MASTER_PORT, where rank 0 serves a store.
/// Groups that live at the same time have different names. The rest is as for evenkeel_group_join.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_group_join_launched(
    name: *const c_char,
    transport: *const c_char,
    timeout: f64,
    group: *mut *mut Group,
) -> Status {
    guard(|| {
        // SAFETY: the header asks for texts, of which one may be NULL.
        let (name, transport_kind) =
            unsafe { (pointers::text("name", name)?, parse_transport(transport)?) };
        let joined =
            Launch::from_env()?.join(name, &transport_kind, timeout_from_seconds(timeout)?)?;
        // SAFETY: the header asks for a place to write.
        unsafe { pointers::give(group, Group(joined)) }
    })
}

/// Leaves a group and frees it. Waits up to a second until the others have what this rank sent; they go on as long as they need
/// nothing more from it. NULL is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_group_free(group: *mut Group) {
    guard(|| {
        // SAFETY: the header asks for a group that nobody uses.
        unsafe { pointers::take(group) };
        Ok(())
    });
}

/// This process's number in the group, from 0; SIZE_MAX for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_group_rank(group: *const Group) -> usize {
    let mut rank = usize::MAX;
    // SAFETY: the header asks for a group.
    unsafe {
        with(group, |group| {
            rank = group.rank();
            Ok(())
        })
    };
    rank
}

/// How many ranks there are; 0 for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_group_size(group: *const Group) -> usize {
    let mut size = 0;
    // SAFETY: the header asks for a group.
    unsafe {
        with(group, |group| {
            size = group.size();
            Ok(())
        })
    };
    size
}

/// Gives the error that ended the group, which then nothing more can be done with, or EVENKEEL_OK.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_group_failure(group: *const Group) -> Status {
    // SAFETY: the header asks for a group.
    unsafe { with(group, |group| group.failure().map_or(Ok(()), |error| Err(error.into()))) }
}

/// Ends the group for all ranks: their operations fail with this reason.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_group_abort(
    group: *const Group,
    reason: *const c_char,
) -> Status {
    // SAFETY: the header asks for a group and a text.
    unsafe {
        with(group, |group| {
            group.abort(pointers::text("reason", reason)?);
            Ok(())
        })
    }
}

/// Makes a group of `count` of the ranks, which are numbered in the order given; it is NULL on the others. It costs no message,
/// and uses this group's connections: when one fails, so does the other. The ranks of the new group must make groups of the same
/// ranks in the same order. Either may be freed before the other.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_group_sub(
    group: *const Group,
    ranks: *const usize,
    count: usize,
    sub: *mut *mut Group,
) -> Status {
    // SAFETY: the header asks for a group, its ranks and a place to write.
    unsafe {
        with(group, |group| give(sub, group.sub_group(pointers::slice("ranks", ranks, count)?)?))
    }
}

/// Makes the group of all ranks that give the same color, in the order of their numbers here; NULL for a negative color. All ranks
/// call it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_group_split(
    group: *const Group,
    color: i64,
    call: *const Call,
    sub: *mut *mut Group,
) -> Status {
    // SAFETY: the header asks for a group, a call or NULL and a place to write.
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
    // SAFETY: the caller sees to it.
    guard(|| body(&unsafe { pointers::object("group", group) }?.0))
}

/// A call's options.
///
/// # Safety
/// `call` is null or points to options.
pub(crate) unsafe fn options(call: *const Call) -> Result<collectives::Call, Error> {
    // SAFETY: the caller sees to it.
    let Some(call) = (unsafe { call.as_ref() }) else { return Ok(collectives::Call::default()) };
    // SAFETY: the header asks for a text or NULL.
    let algorithm = unsafe { pointers::text_or_none("algorithm", call.algorithm) }?;
    let timeout = (call.timeout != 0.0).then_some(call.timeout);
    Ok(collectives::Call::from_parts(call.tag, timeout, algorithm)?)
}

/// # Safety
/// `transport` is null or a text.
unsafe fn parse_transport(transport: *const c_char) -> Result<TransportKind, Error> {
    // SAFETY: the caller sees to it.
    let name = unsafe { pointers::text_or_none("transport", transport) }?;
    Ok(TransportKind::from_name(name.unwrap_or("tcp"))?)
}

/// # Safety
/// `sub` is null or can be written.
unsafe fn give(sub: *mut *mut Group, group: Option<collectives::Group>) -> Result<(), Error> {
    // SAFETY: the caller sees to it.
    unsafe {
        match group {
            Some(group) => pointers::give(sub, Group(group)),
            None => pointers::write(sub, ptr::null_mut()),
        }
    }
}
