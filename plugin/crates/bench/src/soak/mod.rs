//! `evenkeel-bench soak`: many connections between several processes for a long time, while flows
//! are reset, processes are killed and forked, and the network changes. Every byte is checked, and
//! what the processes hold at the end.

mod ledger;
mod message;
mod network;
mod process;
mod summary;
mod supervisor;
mod worker;

use std::process::{Command, ExitCode};
use std::time::Duration;

use clap::Args;

use crate::cli::options::NetworkOptions;
use crate::cli::time::time;
use crate::error::Result;
use crate::ranks::child::{end_with, this_program};
use supervisor::Soak;
use worker::Worker;

/// What to do to which connections.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Needs root, iproute2 (ip, tc, ss), nftables and util-linux: everything happens on the loopback of a network namespace of its own.

Examples:
  evenkeel-bench soak --plugin ./libnccl-net-evenkeel.so --duration 30m
  The same faults again:
    evenkeel-bench soak --plugin ./libnccl-net-evenkeel.so --seed 7

Exit status: 0 when no message was lost or wrong and nothing is left, 1 otherwise, 2 for bad flags.")]
pub(crate) struct Options {
    /// How long, such as 90s or 30m
    #[arg(long, default_value = "30m", value_parser = time, value_name = "TIME")]
    duration: Duration,
    /// Seed of messages and faults [default: from the clock]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Connections that are open at a time
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=4096), value_name = "N")]
    connections: u32,
    /// Processes that they are between. Every other one is killed now and then
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=64), value_name = "N")]
    processes: u32,
    /// Let no process be killed and no fault happen
    #[arg(long)]
    no_faults: bool,
    /// This process is a part of a soak
    #[arg(long, hide = true)]
    part: Option<Part>,
    /// The process that started this one
    #[arg(long, hide = true)]
    spawned_by: Option<i32>,
    #[command(flatten)]
    network: NetworkOptions,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    Supervisor,
    Worker,
}

impl Options {
    /// The place of the process that has another job key: the last one.
    fn wrong_key_place(&self) -> usize {
        self.processes as usize
    }
}

/// Runs a soak, or one of its processes.
///
/// # Errors
/// One line: what went wrong, on which connection, and the seed.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    if let Some(parent) = options.spawned_by {
        end_with(parent)?;
    }
    match options.part {
        None => {
            options.network.settle()?;
            in_namespace(options)
        }
        Some(Part::Worker) => {
            let (plugin, _) = options.network.open()?;
            let seed = options.seed.unwrap_or(0);
            Worker::new(plugin, options.network.device, seed).run()?;
            Ok(ExitCode::SUCCESS)
        }
        Some(Part::Supervisor) => {
            let seed = options.seed.unwrap_or(0);
            let soak = Soak::start(options, seed)?;
            soak.run().map_err(|why| format!("{why}; again with --seed {seed}"))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Starts the supervisor in a network namespace of its own.
fn in_namespace(options: &Options) -> Result<ExitCode> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let seed = options.seed.unwrap_or_else(|| now.map_or(1, |now| now.as_millis() as u64));
    let mut command = Command::new("unshare");
    command.arg("--net").arg(this_program()?);
    command.args(std::env::args_os().skip(1)).args(["--part", "supervisor"]);
    if options.seed.is_none() {
        command.args(["--seed", &seed.to_string()]);
    }
    command.args(["--spawned-by", &std::process::id().to_string()]);
    let status = command.status().map_err(|error| format!("unshare: {error}"))?;
    Ok(ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1)))
}
