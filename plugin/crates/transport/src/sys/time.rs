//! Clocks of the kernel.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds of the coarse monotonic clock. It moves every few milliseconds, and costs no access
/// to hardware.
pub(crate) fn coarse_nanoseconds() -> u64 {
    let time = clock_gettime(ClockId::MonotonicCoarse);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The time of [`coarse_nanoseconds`].
pub(crate) fn coarse_time() -> Duration {
    Duration::from_nanos(coarse_nanoseconds())
}

/// The time that all threads of this process have spent on processors.
pub(crate) fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
