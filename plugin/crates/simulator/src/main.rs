//! evenkeel-simulate: the protocol's policies over simulated networks, in virtual time.
//!
//! Hosts have simulated kernels ([`kernel`]) with TCP connections ([`tcp`], [`congestion`]) over a
//! network of drop-tail queues ([`network`]). A connection of the protocol ([`evenkeel`]) runs the
//! code that is shipped, as do other ways to share out messages ([`sockets`]) that it is compared
//! with. All that is random follows from a seed, and the same seed gives the same run.
//!
//! It models no processors, no memory and no kernel: what it says of rates is a ratio between
//! contenders at best.

mod checks;
mod collectives;
mod congestion;
mod ends;
mod evenkeel;
mod events;
mod experiments;
mod kernel;
mod load;
mod network;
mod sockets;
mod stream;
mod tcp;

use std::process::ExitCode;

use clap::{Parser, Subcommand, ValueEnum};

use crate::checks::Case as Check;
use crate::congestion::Algorithm;
use crate::events::MILLISECOND;
use crate::experiments::{CASES, Case, Named};

/// The protocol's policies over simulated networks, in virtual time.
#[derive(Debug, Parser)]
#[command(name = "evenkeel-simulate")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Check what must hold, on networks that are drawn from seeds.
    Check {
        /// Number of seeds.
        #[arg(long, default_value_t = 1)]
        seeds: u64,
        /// The first of them.
        #[arg(long, default_value_t = 0)]
        seed: u64,
    },
    /// List the cases that can be run.
    List,
    /// Run a case with a contender, and report what it measures as JSON.
    Run {
        /// The case.
        #[arg(long)]
        case: String,
        /// The contender, such as evenkeel, evenkeel-8-fixed, equal-16, pull-8 or spraying.
        #[arg(long)]
        contender: Named,
        /// The congestion control of its flows.
        #[arg(long, value_enum, default_value_t = Congestion::Bbr)]
        congestion: Congestion,
        /// What all that is random follows from.
        #[arg(long, default_value_t = 0)]
        seed: u64,
        /// How long it lasts in virtual time, in milliseconds.
        #[arg(long)]
        length: Option<u64>,
    },
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Congestion {
    Bbr,
    Cubic,
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("evenkeel-simulate: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<(), String> {
    match command {
        Command::Check { seeds, seed } => check(seed, seeds),
        Command::List => {
            CASES.iter().for_each(|case| println!("{}", case.name));
            Ok(())
        }
        Command::Run { case, contender, congestion, seed, length } => {
            let algorithm = match congestion {
                Congestion::Bbr => Algorithm::Bbr,
                Congestion::Cubic => Algorithm::Cubic,
            };
            let length = length.map(|millis| millis.saturating_mul(MILLISECOND));
            let report = Case::find(&case)?.run(&contender, algorithm, seed, length)?;
            let report = serde_json::to_string(&report);
            println!("{}", report.map_err(|error| format!("write the report: {error}"))?);
            Ok(())
        }
    }
}

/// Checks seeds. Each that fails is named with the command that repeats it.
fn check(first: u64, seeds: u64) -> Result<(), String> {
    let mut failed = 0;
    for seed in (first..).take(usize::try_from(seeds).unwrap_or(usize::MAX)) {
        if let Err(failure) = Check::new(seed).check() {
            failed += 1;
            println!("seed {seed}: {failure} (evenkeel-simulate check --seed {seed})");
        }
    }
    match failed {
        0 => Ok(()),
        _ => Err(format!("{failed} of {seeds} seeds failed")),
    }
}
