//! How calls fail: a number, and a line for the thread.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use evenkeel_collectives::{Error, ErrorKind};

use crate::pointers;

/// What a call gives: EVENKEEL_OK or one of the errors.
pub type Status = i32;

/// It is done.
pub const EVENKEEL_OK: Status = 0;
/// The caller broke the contract of the call; nothing was done.
pub const EVENKEEL_ARGUMENT: Status = 1;
/// Nothing happened for as long as was allowed, though every process that was asked is alive.
pub const EVENKEEL_TIMEOUT: Status = 2;
/// A rank's process has ended, stands still or cannot be reached.
pub const EVENKEEL_LOST: Status = 3;
/// Somebody aborted the group.
pub const EVENKEEL_ABORTED: Status = 4;
/// A local system call failed.
pub const EVENKEEL_SYSTEM: Status = 5;
/// The store cannot be used.
pub const EVENKEEL_STORE: Status = 6;
/// Ranks disagree on what they do.
pub const EVENKEEL_MISMATCH: Status = 7;
/// A defect of the library.
pub const EVENKEEL_INTERNAL: Status = 8;

/// Why a call fails.
pub(crate) struct Failure {
    status: Status,
    text: String,
    ranks: Vec<usize>,
    usable: bool,
}

impl Failure {
    /// The caller passed something that makes no sense.
    pub(crate) fn argument(text: impl Into<String>) -> Self {
        Self { status: EVENKEEL_ARGUMENT, text: text.into(), ranks: vec![], usable: true }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let status = match error.kind() {
            ErrorKind::Argument => EVENKEEL_ARGUMENT,
            ErrorKind::Timeout => EVENKEEL_TIMEOUT,
            ErrorKind::Lost => EVENKEEL_LOST,
            ErrorKind::Aborted => EVENKEEL_ABORTED,
            ErrorKind::System => EVENKEEL_SYSTEM,
            ErrorKind::Store => EVENKEEL_STORE,
            ErrorKind::Mismatch => EVENKEEL_MISMATCH,
        };
        let (ranks, usable) = (error.ranks().to_vec(), error.is_group_usable());
        Self { status, text: error.to_string(), ranks, usable }
    }
}

/// What the thread's last call that failed left.
struct Last {
    text: CString,
    ranks: Vec<usize>,
    usable: bool,
}

thread_local! {
    /// None has failed yet.
    static LAST: RefCell<Option<Last>> = const { RefCell::new(None) };
}

/// Runs the body of a function: no panic leaves it, and a failure is kept for the thread.
pub(crate) fn guard(body: impl FnOnce() -> Result<(), Failure>) -> Status {
    let failure = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return EVENKEEL_OK,
        Ok(Err(failure)) => failure,
        Err(_) => Failure {
            status: EVENKEEL_INTERNAL,
            text: "defect of libevenkeel: panic".to_owned(),
            ranks: vec![],
            usable: false,
        },
    };
    let Failure { status, text, ranks, usable } = failure;
    // A zero byte can only come from a name that somebody gave: show the line all the same.
    let text = CString::new(text.replace('\0', "?")).unwrap_or_default();
    LAST.set(Some(Last { text, ranks, usable }));
    status
}

/// The library's version, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn evenkeel_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// What went wrong in the last call of this thread that failed, in one line; empty if none has. Good until the thread's next
/// call.
#[unsafe(no_mangle)]
pub extern "C" fn evenkeel_last_error() -> *const c_char {
    LAST.with_borrow(|last| last.as_ref().map_or(c"".as_ptr(), |last| last.text.as_ptr()))
}

/// The ranks that caused what evenkeel_last_error says, as far as that is known: writes up to `room` of them, and gives how many
/// there are.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_last_error_ranks(ranks: *mut usize, room: usize) -> usize {
    LAST.with_borrow(|last| {
        let all = last.as_ref().map_or(&[][..], |last| &last.ranks);
        let shown = all.len().min(room);
        // SAFETY: the header asks for room for as many.
        if let Ok(into) = unsafe { pointers::slice_mut("ranks", ranks, shown) } {
            into.copy_from_slice(&all[..shown]);
        }
        all.len()
    })
}

/// Whether the group that was used can be used on after what evenkeel_last_error says. If not, every later call with it gives
/// the error that ended it: free it, and make another one.
#[unsafe(no_mangle)]
pub extern "C" fn evenkeel_last_error_group_usable() -> bool {
    LAST.with_borrow(|last| last.as_ref().is_none_or(|last| last.usable))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    fn last() -> String {
        // SAFETY: the text is good until the thread's next call.
        unsafe { CStr::from_ptr(evenkeel_last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_failure_is_kept_for_its_thread() {
        assert_eq!(last(), "");
        assert_eq!(guard(|| Err(Failure::argument("seven\0"))), EVENKEEL_ARGUMENT);
        assert_eq!((last().as_str(), evenkeel_last_error_group_usable()), ("seven?", true));
        std::thread::spawn(|| assert_eq!(last(), "")).join().unwrap();
        assert_eq!(guard(|| Ok(())), EVENKEEL_OK);
    }

    #[test]
    fn a_panic_becomes_an_internal_error() {
        assert_eq!(guard(|| panic!("for the test")), EVENKEEL_INTERNAL);
        assert!(last().contains("defect") && !evenkeel_last_error_group_usable());
    }

    #[test]
    fn ranks_are_told_as_far_as_there_is_room() {
        let failure = Failure { ranks: vec![3, 5], ..Failure::argument("") };
        guard(|| Err(failure));
        let mut ranks = [0; 4];
        // SAFETY: there is room for as many as are said.
        unsafe {
            assert_eq!(evenkeel_last_error_ranks(std::ptr::null_mut(), 0), 2);
            assert_eq!(evenkeel_last_error_ranks(ranks.as_mut_ptr(), 1), 2);
            assert_eq!(ranks, [3, 0, 0, 0]);
            assert_eq!(evenkeel_last_error_ranks(ranks.as_mut_ptr(), 4), 2);
        }
        assert_eq!(ranks, [3, 5, 0, 0]);
    }
}
