//! What is measured between ranks. A workload says what it measures; how ranks start, meet, fail
//! and end is here.

use std::process::ExitCode;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::cli::options::RankOptions;
use crate::error::Result;
use crate::output::record::{Output, OutputOptions};
use crate::ranks::bootstrap::World;
use crate::ranks::spawn;

/// The ranks of a run, which have met.
pub(crate) trait Ranks {
    /// This rank.
    fn rank(&self) -> usize;

    /// Whether this rank is a thread of rank 0's process.
    fn is_thread(&self) -> bool {
        false
    }

    /// Gathers one value from every rank, in rank order. Returns once all ranks have called it.
    ///
    /// # Errors
    /// Names a rank that is lost.
    fn gather<T: Serialize + DeserializeOwned>(&mut self, mine: &T) -> Result<Vec<T>>;

    /// Ends the run for all ranks because of what this one saw. Gives its cause.
    fn fail(self, seen: String) -> String;
}

impl Ranks for World {
    fn rank(&self) -> usize {
        self.rank()
    }

    fn gather<T: Serialize + DeserializeOwned>(&mut self, mine: &T) -> Result<Vec<T>> {
        self.all_gather(mine)
    }

    fn fail(self, seen: String) -> String {
        self.fail(seen)
    }
}

/// Something that ranks measure together.
pub(crate) trait Workload {
    /// Its subcommand.
    const NAME: &'static str;
    /// The number of ranks where it is fixed: without ranks given, they are all started on this
    /// machine.
    const RANKS: Option<usize> = None;
    /// What can be wrong.
    const WRONG: &'static str = "wrong elements";
    /// How its ranks meet.
    type Ranks: Ranks;

    /// How to print what was measured.
    fn output(&self) -> &OutputOptions;

    /// Measures on this rank. Gives the number of what is wrong on all ranks.
    ///
    /// # Errors
    /// What this rank saw.
    fn measure(&self, ranks: &mut Self::Ranks, output: &Output) -> Result<u64>;
}

/// Starts all ranks on this machine, or runs one.
///
/// # Errors
/// One line: what went wrong, and which rank is the cause where that is known.
pub(crate) fn run<W: Workload<Ranks = World>>(
    workload: &W,
    options: &RankOptions,
) -> Result<ExitCode> {
    let default = W::RANKS.filter(|_| options.rank.is_none());
    let refused = |what: &str, ranks: usize| {
        let wrong = W::RANKS.is_some_and(|fixed| fixed != ranks);
        if wrong {
            Err(format!("{what} {ranks}: {} runs between two ranks", W::NAME))
        } else {
            Ok(())
        }
    };
    if let Some(ranks) = options.spawn.or(default) {
        refused("--spawn", ranks)?;
        return spawn::spawn(ranks);
    }
    let config = options.rank_config()?;
    refused("a world size of", config.world_size)?;
    measure(workload, World::join(config)?)
}

/// Measures on a rank that has met the others.
///
/// # Errors
/// As [`run`].
pub(crate) fn measure<W: Workload>(workload: &W, mut ranks: W::Ranks) -> Result<ExitCode> {
    let rank = ranks.rank();
    match workload.measure(&mut ranks, &Output::new(W::NAME, workload.output(), rank)) {
        Ok(0) => Ok(ExitCode::SUCCESS),
        Ok(wrong) => {
            if rank == 0 {
                eprintln!("error: {wrong} {}", W::WRONG);
            }
            Ok(ExitCode::FAILURE)
        }
        Err(seen) => Err(ranks.fail(seen)),
    }
}
