//! `evenkeel-bench`: everything that measures.

mod allreduce;
mod cli;
mod collective;
mod compute;
mod counters;
mod element;
mod error;
mod links;
mod net;
mod output;
mod plain_sockets;
mod plugin_host;
mod ranks;
mod reduction;
mod scale;
mod settings;
mod soak;
mod tuner;
mod workload;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Measures networks for distributed training through any NCCL net plugin, without a GPU
#[derive(Parser)]
#[command(
    version,
    max_term_width = 100,
    after_help = "\
Examples:
  evenkeel-bench allreduce --spawn 2 --plugin ./libnccl-net-evenkeel.so
  evenkeel-bench collective --spawn 2
  evenkeel-bench net --plugin ./libnccl-net-evenkeel.so --connections 2
  evenkeel-bench reduction --ranks 4 --servers 2 --plugin ./libnccl-net-evenkeel.so

NCCL_DEBUG=INFO shows the plugin's own log on standard error."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Ring all-reduce between ranks, every element checked, in nccl-tests' columns
    Allreduce(allreduce::Options),
    /// Collectives without a GPU, with the flags and columns of Gloo's benchmark
    Collective(collective::Options),
    /// Messages from one process to another, as NCCL's proxy moves them
    Net(net::Options),
    /// All-reduce through reduction servers, every element checked, with the time of each step
    Reduction(reduction::Options),
    /// What many connections cost: to open, to keep, to close
    Scale(scale::Options),
    /// Many connections for a long time while processes, flows and the network fail, every byte
    /// checked
    Soak(soak::Options),
    /// Which of NCCL's algorithms the plugin's tuner chooses for a network, beside NCCL's own
    /// choice
    Tuner(tuner::Options),
    /// What can be set in the plugin's environment, and whether the values are valid
    Settings(settings::Options),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Allreduce(options) => allreduce::run(&options),
        Command::Collective(options) => collective::run(&options),
        Command::Net(options) => net::run(&options),
        Command::Reduction(options) => reduction::run(&options),
        Command::Scale(options) => scale::run(&options),
        Command::Soak(options) => soak::run(&options),
        Command::Tuner(options) => tuner::run(&options).map(|()| ExitCode::SUCCESS),
        Command::Settings(options) => settings::run(&options).map(|()| ExitCode::SUCCESS),
    };
    result.unwrap_or_else(|error| {
        // In one write: ranks of a host share standard error, and their lines should not mix.
        let _ = io::stderr().write_all(format!("error: {error}\n").as_bytes());
        ExitCode::FAILURE
    })
}
