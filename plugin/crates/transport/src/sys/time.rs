//! The kernel's coarse clock.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of the coarse monotonic clock. It moves every few milliseconds, and costs no access to hardware.
pub(crate) fn coarse_nanoseconds() -> u64 {
    let time = clock_gettime(ClockId::MonotonicCoarse);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
