//! The status that every function returns.

/// What every function that can fail returns: EVENKEEL_OK or one of the errors.
pub type Status = i32;

/// Success.
pub const EVENKEEL_OK: Status = 0;
/// The arguments of the call are invalid. Nothing was done.
pub const EVENKEEL_ARGUMENT: Status = 1;
/// Nothing moved for the whole timeout, although every process that was probed is alive.
pub const EVENKEEL_TIMEOUT: Status = 2;
/// A rank's process has exited, does not respond or cannot be reached.
pub const EVENKEEL_LOST: Status = 3;
/// A rank aborted the group.
pub const EVENKEEL_ABORTED: Status = 4;
/// A local system call failed.
pub const EVENKEEL_SYSTEM: Status = 5;
/// The store cannot be used.
pub const EVENKEEL_STORE: Status = 6;
/// The ranks called different operations, or passed different counts.
pub const EVENKEEL_MISMATCH: Status = 7;
/// A defect of the library.
pub const EVENKEEL_INTERNAL: Status = 8;
