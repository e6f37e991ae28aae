//! Requests: operations that are started now and awaited later.

use evenkeel_collectives::{self as collectives, Sequence, timeout_from_seconds};

use crate::error::Error;
use crate::group::{Call, Group, options};
use crate::last_error::guard;
use crate::pointers;
use crate::status::Status;

/// An operation that was started, by a call with a pointer in `request`.
pub struct Request(collectives::Request<()>);

/// Whether the operation is done. Does not block. True for NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_request_is_done(request: *const Request) -> bool {
    let mut is_done = true;
    guard(|| {
        // SAFETY: the header requires a request or NULL.
        is_done = unsafe { pointers::deref_object("request", request) }?.0.test();
        Ok(())
    });
    is_done
}

/// Waits until the operation is done, for `timeout` seconds at most, and returns its status. 0: until it is done, which the operation's
/// own timeout bounds. After EVENKEEL_TIMEOUT the operation is still in progress unless evenkeel_request_is_done. A request can be
/// awaited several times, and by several threads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_request_wait(request: *const Request, timeout: f64) -> Status {
    guard(|| {
        // SAFETY: the header requires a request.
        let request = unsafe { pointers::deref_object("request", request) }?;
        let limit = match timeout {
            0.0 => None,
            seconds => Some(timeout_from_seconds(seconds)?),
        };
        Ok(request.0.wait(limit)?)
    })
}

/// Frees a request. Waits until its operation is done, so that the buffers can be freed afterwards. To end operations earlier, abort the
/// group. NULL is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_request_free(request: *mut Request) {
    guard(|| {
        // SAFETY: the header requires a request or NULL.
        if let Some(request) = unsafe { request.as_ref() } {
            // Whoever wants to know the outcome has asked for it.
            let _ = request.0.wait(None);
        }
        // SAFETY: the header requires a request that is not used.
        unsafe { pointers::free_object(request) };
        Ok(())
    });
}

/// Runs an operation of a group, after those of its sequence that were started before; or starts it, if the call asks for a request.
/// `prepare` checks the arguments.
///
/// # Safety
/// `group` is null or a group, and `call` is null or points to options. What the operation holds is valid until it is done.
pub(crate) unsafe fn operate<O>(
    group: *const Group,
    sequence: impl FnOnce(u32) -> Sequence,
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
            return Ok(group.in_order_within(sequence, &options, operation)?);
        };
        let started = group.start_call(sequence, options, operation);
        // SAFETY: the header requires a pointer to write to.
        unsafe { pointers::return_object(request, Request(started)) }
    })
}

/// The sequence of collective operations.
pub(crate) fn collectives_of(tag: u32) -> Sequence {
    Sequence::Collectives { tag }
}
