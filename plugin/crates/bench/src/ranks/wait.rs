//! Waiting for a plugin as NCCL's progress thread does: polling, and yielding the processor in
//! between. A wait has a timeout and checks the other ranks. After some time without progress it
//! sleeps between polls, longer and longer: many ranks may share one machine's processors.
//! [`Driver::Nccl`] never sleeps, as NCCL's thread.

use std::thread;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::ranks::bootstrap::World;

/// Polls without progress before the first sleep. They take longer than a round trip.
const POLLS_BEFORE_SLEEP: u32 = 100;
/// The first sleep. The kernel adds its timers' slack, some 50 microseconds.
const MIN_SLEEP: Duration = Duration::from_micros(20);
/// A sleep is this fraction of the time without progress, which bounds by how much it prolongs a
/// wait.
const SLEEP_FRACTION: u32 = 32;
/// Maximum sleep.
const MAX_SLEEP: Duration = Duration::from_micros(500);
/// Polls without progress between checks of the clock and of the other ranks.
const POLLS_PER_CHECK: u32 = 1024;
/// Maximum time between two checks, should single polls be slow.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// How a thread asks for completions. It goes round all connections, and asks for the oldest
/// request of each.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Driver {
    /// As NCCL's proxy: it yields the processor after a round in which nothing moved
    Nccl,
    /// It sleeps after many such rounds, longer and longer, and leaves the processors to others
    Sleep,
}

impl Driver {
    /// A wait that begins at its first idle poll.
    pub(crate) fn wait(self) -> Wait {
        match self {
            Self::Nccl => Wait { sleeps: false, ..Wait::new() },
            Self::Sleep => Wait::new(),
        }
    }
}

/// One wait for progress. Every success begins a new one.
pub(crate) struct Wait {
    sleeps: bool,
    idle: u32,
    since: Option<Instant>,
    checked: Option<Instant>,
}

impl Wait {
    /// A wait that begins at its first idle poll.
    pub(crate) fn new() -> Self {
        Self { sleeps: true, idle: 0, since: None, checked: None }
    }

    /// There was progress.
    pub(crate) fn progress(&mut self) {
        *self = Self { sleeps: self.sleeps, ..Self::new() };
    }

    /// There was no progress: yields, and from time to time checks whether to go on.
    ///
    /// # Errors
    /// When another rank failed, or nothing happened for the world's timeout while waiting for
    /// `what`.
    pub(crate) fn idle(&mut self, world: &mut World, what: impl FnOnce() -> String) -> Result<()> {
        self.idle += 1;
        if self.idle.is_multiple_of(POLLS_PER_CHECK) || self.since.is_none() {
            let now = Instant::now();
            let since = *self.since.get_or_insert(now);
            if self.checked.is_none_or(|checked| now - checked >= CHECK_INTERVAL) {
                self.checked = Some(now);
                world.check()?;
            }
            if now - since >= world.timeout() {
                return Err(format!("no progress for {:?} while {}", world.timeout(), what()));
            }
        }
        match self.since {
            Some(since) if self.sleeps && self.idle >= POLLS_BEFORE_SLEEP => {
                thread::sleep((since.elapsed() / SLEEP_FRACTION).clamp(MIN_SLEEP, MAX_SLEEP));
            }
            _ => thread::yield_now(),
        }
        Ok(())
    }
}
