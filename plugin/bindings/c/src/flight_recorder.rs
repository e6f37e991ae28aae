//! The flight recorder.

use std::ffi::c_char;

use evenkeel_collectives::FlightRecord;

use crate::error::Error;
use crate::group::{Group, with};
use crate::last_error::guard;
use crate::pointers;
use crate::status::{EVENKEEL_SYSTEM, Status};

/// Writes the last calls of this process, of all its groups, to a file, as JSON: which call each group is in, its number, sizes and
/// state, whom it waits for, and why it failed. For a look at a program that hangs, from another thread, or after an error.
///
/// Where EVENKEEL_FLIGHT_RECORDER names the start of a path, such as /tmp/rank_, every process with a group also answers the requests
/// of `kubectl evenkeel why` in that folder, from a thread of its own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_flight_recorder_dump(path: *const c_char) -> Status {
    guard(|| {
        // SAFETY: the header requires a string.
        let path = unsafe { pointers::string("path", path) }?;
        std::fs::write(path, FlightRecord::read().to_json()).map_err(|error| Error {
            status: EVENKEEL_SYSTEM,
            message: format!("cannot write the flight recorder to {path}: {error}"),
            ranks: vec![],
            group_usable: true,
        })
    })
}

/// Names a group for the flight recorder, and its ranks by their numbers in the job: one number for each rank. The first name stays.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_group_set_name(
    group: *const Group,
    name: *const c_char,
    ranks: *const usize,
    count: usize,
) -> Status {
    // SAFETY: the header requires a group, a string and this many numbers.
    unsafe {
        with(group, |group| {
            let ranks = pointers::slice("ranks", ranks, count)?;
            Ok(group.set_name(pointers::string("name", name)?, ranks)?)
        })
    }
}
