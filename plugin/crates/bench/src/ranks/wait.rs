//! Waiting for a plugin: as NCCL's progress thread does, by asking again and again and yielding the processor in between,
//! but never longer than a deadline, and with an eye on the other ranks. Once nothing has moved for a while it naps
//! between questions, the longer the longer nothing moves: what is measured is to be the plugin, not the waiting, and on
//! one machine many ranks wait on the processors that others need.

use std::thread;
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::ranks::bootstrap::World;

/// Polls without progress before the first nap: more time than a round trip takes.
const BEFORE_NAPS: u32 = 400;
/// The first nap. The kernel adds its timers' slack, some 50 microseconds.
const NAP: Duration = Duration::from_micros(20);
/// A nap is this part of the time for which nothing has moved: so much longer may a wait be for it.
const PART: u32 = 32;
/// The longest nap.
const LONGEST_NAP: Duration = Duration::from_micros(500);
/// Polls without progress between looks at the clock and at the other ranks.
const BETWEEN_LOOKS: u32 = 1024;
/// The longest time between two looks, should single polls be slow.
const LOOK: Duration = Duration::from_millis(100);

/// One wait for progress. Every success begins a new one.
pub(crate) struct Wait {
    idle: u32,
    since: Option<Instant>,
    looked: Option<Instant>,
}

impl Wait {
    /// A wait that begins at its first idle poll.
    pub(crate) fn new() -> Self {
        Self { idle: 0, since: None, looked: None }
    }

    /// There was progress.
    pub(crate) fn progress(&mut self) {
        *self = Self::new();
    }

    /// There was none: yields, and now and then looks whether to go on.
    ///
    /// # Errors
    /// When another rank failed, or nothing happened for the world's timeout while waiting for `what`.
    pub(crate) fn idle(&mut self, world: &mut World, what: impl FnOnce() -> String) -> Result<()> {
        self.idle += 1;
        if self.idle.is_multiple_of(BETWEEN_LOOKS) || self.since.is_none() {
            let now = Instant::now();
            let since = *self.since.get_or_insert(now);
            if self.looked.is_none_or(|looked| now - looked >= LOOK) {
                self.looked = Some(now);
                world.check()?;
            }
            if now - since >= world.timeout() {
                return Err(format!("no progress for {:?} while {}", world.timeout(), what()));
            }
        }
        match self.since {
            Some(since) if self.idle >= BEFORE_NAPS => {
                thread::sleep((since.elapsed() / PART).clamp(NAP, LONGEST_NAP));
            }
            _ => thread::yield_now(),
        }
        Ok(())
    }
}
