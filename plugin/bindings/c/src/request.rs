//! Requests: operations that are started now and awaited later.

use evenkeel_collectives::{self as collectives, timeout_from_seconds};

use crate::last_error::guard;
use crate::pointers;
use crate::status::Status;

/// An operation that was started, by a call with a pointer in `request`.
pub struct Request(pub(crate) collectives::Request<()>);

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
