//! Calls: their options, and how they run on a group.

use std::ffi::c_char;

use evenkeel_collectives::{self as collectives, Sequence};

use crate::error::Error;
use crate::group::Group;
use crate::last_error::guard;
use crate::pointers;
use crate::request::Request;
use crate::status::Status;

/// The options of a call. All ranks must pass the same, except for the timeout. Zeros, or NULL instead of the options, are the
/// defaults.
#[repr(C)]
pub struct Call {
    /// Operations with different tags may be in progress at the same time.
    pub tag: u32,
    /// Seconds for which the operation may make no progress; 0: the group's timeout.
    pub timeout: f64,
    /// The algorithm of an all-reduce: "ring", "ring_chunked", "halving_doubling", "recursive_doubling", "bcube",
    /// "direct" or "hierarchical". NULL: selected by the number of ranks and bytes.
    pub algorithm: *const c_char,
    /// Where to write a request: the call starts the operation and returns. NULL: it waits for the operation. Not all ranks need the
    /// same.
    pub request: *mut *mut Request,
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

/// Runs an operation of a group once earlier operations of its sequence are done. If the call asks for a request, only starts it.
/// `prepare` checks the arguments. `name` is the operation, for the flight recorder.
///
/// # Safety
/// `group` is null or a group, and `call` is null or points to options. What the operation holds is valid until it is done.
pub(crate) unsafe fn operate<O>(
    group: *const Group,
    sequence: impl FnOnce(u32) -> Sequence,
    name: &'static str,
    call: *const Call,
    prepare: impl FnOnce(&collectives::Group) -> Result<O, Error>,
) -> Status
where
    O: FnOnce(&collectives::Group, &collectives::Call) -> collectives::Result<()> + Send + 'static,
{
    guard(|| {
        // SAFETY: the caller guarantees it.
        let (group, options, call) =
            unsafe { (&pointers::deref_object("group", group)?.0, options(call)?, call.as_ref()) };
        let operation = prepare(group)?;
        let sequence = sequence(call.map_or(0, |call| call.tag));
        let Some(request) = call.map(|call| call.request).filter(|request| !request.is_null())
        else {
            return Ok(group.in_order_within(sequence, name, &options, operation)?);
        };
        let started = group.start_call(sequence, name, options, operation);
        // SAFETY: the header requires a pointer to write to.
        unsafe { pointers::return_object(request, Request(started)) }
    })
}

/// The sequence of collective operations.
pub(crate) fn collectives_of(tag: u32) -> Sequence {
    Sequence::Collectives { tag }
}
