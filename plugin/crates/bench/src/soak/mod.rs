//! `evenkeel-bench soak`: many connections between several processes for a long time, while flows are reset, processes are
//! killed and forked, and the network changes. Every byte is checked, and what the processes hold at the end.

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
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use crate::cli::options::NetworkOptions;
use crate::error::Result;
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

fn time(text: &str) -> std::result::Result<Duration, String> {
    let units = [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000)];
    let parsed = units.iter().find_map(|(unit, milliseconds)| {
        let number: u64 = text.strip_suffix(unit)?.parse().ok()?;
        number.checked_mul(*milliseconds).map(Duration::from_millis)
    });
    parsed.filter(|time| !time.is_zero()).ok_or_else(|| "a time such as 90s or 30m".to_owned())
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
        set_parent_process_death_signal(Some(Signal::KILL))
            .map_err(|error| format!("cannot tie this process to its parent: {error}"))?;
        if getppid().is_none_or(|now| now.as_raw_nonzero().get() != parent) {
            return Err("the process that started this one is gone".to_owned());
        }
    }
    match options.part {
        None => in_namespace(options),
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
    command.arg("--net").arg(program()?);
    command.args(std::env::args_os().skip(1)).args(["--part", "supervisor"]);
    if options.seed.is_none() {
        command.args(["--seed", &seed.to_string()]);
    }
    command.args(["--spawned-by", &std::process::id().to_string()]);
    let status = command.status().map_err(|error| format!("unshare: {error}"))?;
    Ok(ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1)))
}

fn program() -> Result<std::path::PathBuf> {
    std::env::current_exe().map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn soak_durations_have_units() {
        assert_eq!(time("30m"), Ok(Duration::from_secs(1800)));
        assert_eq!(time("90s"), Ok(Duration::from_secs(90)));
        assert!(time("30").is_err() && time("0s").is_err() && time("soon").is_err());
    }
}
