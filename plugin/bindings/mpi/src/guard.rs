//! The boundary to C: no panic crosses it, and an error ends the process.

use std::ffi::c_int;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::{io, ptr};

use crate::error::{Error, Result};
use crate::handles::SUCCESS;
use crate::world;

/// Runs the body of the function of this name. No panic unwinds into C, and an error ends the process: programs that rely on
/// MPI's default error handler do not look at what a function returns.
pub(crate) fn guard(name: &str, body: impl FnOnce() -> Result<()>) -> c_int {
    let message = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return SUCCESS,
        Ok(Err(Error(message))) => message,
        Err(_) => "defect of libevenkeel-mpi: panic".to_owned(),
    };
    end(&format!("{name}: {message}"))
}

fn end(what: &str) -> ! {
    let line = format!("evenkeel-mpi: {}{what}\n", world::describe());
    // One write: the ranks of a host may share this file. Without stderr nobody can be told.
    let _ = io::stderr().write_all(line.as_bytes());
    world::abort(what);
    // SAFETY: NULL stands for all streams of the process.
    unsafe { libc::fflush(ptr::null_mut()) };
    // SAFETY: it takes any status and does not return. Exit handlers do not run: those of CUDA and NCCL could wait for a collective
    // operation that needs the ranks which are lost.
    unsafe { libc::_exit(1) }
}
