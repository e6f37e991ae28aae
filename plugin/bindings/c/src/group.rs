//! Groups.

use std::ffi::c_char;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use evenkeel_collectives::{
    self as collectives, Launch, Reconfigure, TransportKind, timeout_from_seconds,
};

use crate::call::{Call, options};
use crate::error::Error;
use crate::last_error::guard;
use crate::pointers;
use crate::status::Status;
use crate::store::Store;

/// A rank's membership in a group.
pub struct Group(pub(crate) Arc<collectives::Group>);

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
    // SAFETY: the header requires a store, a string or NULL, and a pointer to write to.
    unsafe {
        join_with(store, transport, timeout, group, |store, transport, timeout| {
            collectives::Group::join(store, rank, size, transport, timeout)
        })
    }
}

/// Joins a group through a store.
///
/// # Safety
/// A store or null, a string or null, and a pointer to write to or null.
unsafe fn join_with(
    store: *const Store,
    transport: *const c_char,
    timeout: f64,
    group: *mut *mut Group,
    join: impl FnOnce(
        &dyn collectives::Store,
        &TransportKind,
        Duration,
    ) -> collectives::Result<collectives::Group>,
) -> Status {
    guard(|| {
        // SAFETY: the caller guarantees it.
        let (store, transport) =
            unsafe { (pointers::deref_object("store", store)?, parse_transport(transport)?) };
        let joined = join(&*store.0, &transport, timeout_from_seconds(timeout)?)?;
        // SAFETY: the caller guarantees it.
        unsafe { pointers::return_object(group, Group(Arc::new(joined))) }
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
        unsafe { pointers::return_object(group, Group(Arc::new(joined))) }
    })
}

/// Makes the group that follows this one: the ranks of this one that are alive, in the order of their ranks, and then the newcomers
/// that wait in evenkeel_group_join_as_newcomer. All live ranks call it: after an error that ended the group, or at any other time
/// between operations. Afterwards this group cannot be used, and is freed as always.
///
/// `store` is the one, or the prefix, through which the group was joined; it must outlive the ranks that are lost. The ranks wait for
/// newcomers until there are at least `min_size` ranks. `timeout` is in seconds; 0: the group's.
///
/// EVENKEEL_TIMEOUT: a live rank has not called it, or there are too few ranks. Call it again, or free this group. EVENKEEL_LOST naming
/// this rank: the others went on without it, and it may come back as a newcomer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_group_reconfigure(
    group: *const Group,
    store: *const Store,
    min_size: usize,
    timeout: f64,
    next: *mut *mut Group,
) -> Status {
    // SAFETY: the header requires a group, a store and a pointer to write to.
    unsafe {
        with(group, |group| {
            let store = pointers::deref_object("store", store)?;
            // Before the ranks agree: a group that cannot be returned would be lost.
            pointers::check_result(next)?;
            let mut options = Reconfigure::default().min_size(min_size);
            if timeout != 0.0 {
                options = options.timeout(timeout_from_seconds(timeout)?);
            }
            let next_group = group.reconfigure(&*store.0, &options)?;
            pointers::return_object(next, Group(Arc::new(next_group)))
        })
    }
}

/// Joins the next group that ranks which share this store or prefix make by evenkeel_group_reconfigure. Waits for `timeout` seconds,
/// which are the group's timeout from then on. The rest is as for evenkeel_group_join.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_group_join_as_newcomer(
    store: *const Store,
    transport: *const c_char,
    timeout: f64,
    group: *mut *mut Group,
) -> Status {
    // SAFETY: the header requires a store, a string or NULL, and a pointer to write to.
    unsafe { join_with(store, transport, timeout, group, collectives::Group::join_as_newcomer) }
}

/// For each rank of a group that follows another one, its rank in that one; SIZE_MAX for a newcomer. Writes up to `capacity` of them,
/// and returns their number: 0 if the group follows no other one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_group_previous_ranks(
    group: *const Group,
    ranks: *mut usize,
    capacity: usize,
) -> usize {
    let mut count = 0;
    // SAFETY: the header requires a group, and room for that many.
    unsafe {
        with(group, |group| {
            let previous = group.previous_ranks();
            count = previous.len();
            let shown = count.min(capacity);
            let into = pointers::slice_mut("ranks", ranks, shown)?;
            for (place, rank) in into.iter_mut().zip(previous) {
                *place = rank.unwrap_or(usize::MAX);
            }
            Ok(())
        })
    };
    count
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
            refuse_request("evenkeel_group_split", call)?;
            give(sub, group.split(color, &options(call)?)?)
        })
    }
}

/// Sets the rate at which this rank's host can send and receive, in any unit that all ranks share, such as Mbit/s. All ranks call it,
/// with no other operation in progress; it waits for them. From then on the algorithm "direct" gives each rank a share of the buffer
/// that fits its link, and an all-reduce that names no algorithm takes it where it should be faster. 0 stands for an unknown rate: if
/// any rank sets it, the shares are equal again. Groups that are made of this one afterwards have the same rates.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_group_set_link_rate(
    group: *const Group,
    rate: u64,
    call: *const Call,
) -> Status {
    // SAFETY: the header requires a group, and a call or NULL.
    unsafe {
        with(group, |group| {
            refuse_request("evenkeel_group_set_link_rate", call)?;
            Ok(group.set_link_rate(rate, &options(call)?)?)
        })
    }
}

/// An error for a function that always waits if the call asks for a request.
///
/// # Safety
/// `call` is null or points to options.
unsafe fn refuse_request(function: &str, call: *const Call) -> Result<(), Error> {
    // SAFETY: the caller guarantees it.
    if unsafe { call.as_ref() }.is_some_and(|call| !call.request.is_null()) {
        return Err(Error::argument(format!("{function} waits: it has no request")));
    }
    Ok(())
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
            Some(group) => pointers::return_object(sub, Group(Arc::new(group))),
            None => pointers::write_result(sub, ptr::null_mut()),
        }
    }
}
