//! The thread's last error: its message and ranks, and the guard that records it.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::Error;
use crate::pointers;
use crate::status::{EVENKEEL_INTERNAL, EVENKEEL_OK, Status};

/// The error of the thread's last call that failed.
struct LastError {
    message: CString,
    ranks: Vec<usize>,
    group_usable: bool,
}

thread_local! {
    /// `None` until a call of this thread fails.
    static LAST_ERROR: RefCell<Option<LastError>> = const { RefCell::new(None) };
}

/// Runs the body of an exported function. No panic unwinds into C, and an error becomes the thread's last error.
pub(crate) fn guard(body: impl FnOnce() -> Result<(), Error>) -> Status {
    let error = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return EVENKEEL_OK,
        Ok(Err(error)) => error,
        Err(_) => Error {
            status: EVENKEEL_INTERNAL,
            message: "defect of libevenkeel: panic".to_owned(),
            ranks: vec![],
            group_usable: false,
        },
    };
    let Error { status, message, ranks, group_usable } = error;
    // A zero byte can only come from a name that the caller passed. The message is shown nevertheless.
    let message = CString::new(message.replace('\0', "?")).unwrap_or_default();
    LAST_ERROR.set(Some(LastError { message, ranks, group_usable }));
    status
}

/// The error of the last call of this thread that failed, in one line; empty if none has failed. Valid until the thread's next
/// call.
#[unsafe(no_mangle)]
pub extern "C" fn evenkeel_last_error() -> *const c_char {
    LAST_ERROR.with_borrow(|last| last.as_ref().map_or(c"".as_ptr(), |last| last.message.as_ptr()))
}

/// The ranks that caused the last error, as far as known. Writes up to `capacity` of them, and returns their number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_last_error_ranks(ranks: *mut usize, capacity: usize) -> usize {
    LAST_ERROR.with_borrow(|last| {
        let all = last.as_ref().map_or(&[][..], |last| &last.ranks);
        let shown = all.len().min(capacity);
        // SAFETY: the header requires room for that many.
        if let Ok(into) = unsafe { pointers::slice_mut("ranks", ranks, shown) } {
            into.copy_from_slice(&all[..shown]);
        }
        all.len()
    })
}

/// Whether the group is still usable after the last error. If not, every later call returns the error that ended the group: free
/// it, and make another one.
#[unsafe(no_mangle)]
pub extern "C" fn evenkeel_last_error_group_usable() -> bool {
    LAST_ERROR.with_borrow(|last| last.as_ref().is_none_or(|last| last.group_usable))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::EVENKEEL_ARGUMENT;
    use std::ffi::CStr;

    fn last() -> String {
        // SAFETY: the text is good until the thread's next call.
        unsafe { CStr::from_ptr(evenkeel_last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn last_error_belongs_to_its_thread() {
        assert_eq!(last(), "");
        assert_eq!(guard(|| Err(Error::argument("seven\0"))), EVENKEEL_ARGUMENT);
        assert_eq!((last().as_str(), evenkeel_last_error_group_usable()), ("seven?", true));
        std::thread::spawn(|| assert_eq!(last(), "")).join().unwrap();
        assert_eq!(guard(|| Ok(())), EVENKEEL_OK);
    }

    #[test]
    fn panic_becomes_internal_error() {
        assert_eq!(guard(|| panic!("for the test")), EVENKEEL_INTERNAL);
        assert!(last().contains("defect") && !evenkeel_last_error_group_usable());
    }

    #[test]
    fn last_error_ranks_fill_the_room_given() {
        let error = Error { ranks: vec![3, 5], ..Error::argument("") };
        guard(|| Err(error));
        let mut ranks = [0; 4];
        // SAFETY: there is room for that many ranks.
        unsafe {
            assert_eq!(evenkeel_last_error_ranks(std::ptr::null_mut(), 0), 2);
            assert_eq!(evenkeel_last_error_ranks(ranks.as_mut_ptr(), 1), 2);
            assert_eq!(ranks, [3, 0, 0, 0]);
            assert_eq!(evenkeel_last_error_ranks(ranks.as_mut_ptr(), 4), 2);
        }
        assert_eq!(ranks, [3, 5, 0, 0]);
    }
}
