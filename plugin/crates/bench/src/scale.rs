//! `evenkeel-bench scale`: what many connections cost: time to open and to close, descriptors,
//! memory, and processor time while nothing is sent.

use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;

use crate::cli::options::RankOptions;
use crate::counters::{Counters, cpu_seconds, wakeups};
use crate::error::Result;
use crate::links::{Link, LinkOptions, complete};
use crate::output::record::{Network, Output, OutputOptions};
use crate::plugin_host::Region;
use crate::ranks::bootstrap::World;
use crate::ranks::wait::Driver;
use crate::workload::{self, Workload};

/// Bytes of the message that goes over each connection. NCCL's smallest ones are of this kind.
const MESSAGE_BYTES: usize = 1024;
/// The rank that listens and receives.
const RECEIVES: usize = 0;

/// What to open.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Rank 1 connects to rank 0. Without ranks given, both run on this machine.
  listen, open  seconds to open a listener for each connection, then to connect and accept all of them
  descriptors   of both ranks, for each connection
  memory        growth of both ranks' resident memory for each connection, after each has carried one message
  idle          share of a processor, and wake-ups of threads per second, of both ranks, while nothing is sent
  close         seconds to close all connections

Examples:
  evenkeel-bench scale --plugin ./libnccl-net-evenkeel.so --connections 1024
  evenkeel-bench scale --plain-sockets 2 --connections 1024   # as many sockets as NCCL's own have")]
pub(crate) struct Options {
    /// Connections
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=65_536), value_name = "N")]
    connections: u32,
    /// Seconds to be idle
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600), value_name = "SECONDS")]
    idle: u64,
    #[command(flatten)]
    output: OutputOptions,
    #[command(flatten)]
    ranks: RankOptions,
    #[command(flatten)]
    links: LinkOptions,
}

/// Runs one of the two ranks, or starts both.
///
/// # Errors
/// As [`workload::run`].
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    options.links.network.settle()?;
    workload::run(options, &options.ranks)
}

#[derive(Debug, Serialize)]
struct Report {
    network: Network,
    connections: u32,
    listen_s: f64,
    open_s: f64,
    descriptors: f64,
    memory_kib: f64,
    idle_percent: f64,
    wakeups_per_s: f64,
    close_s: f64,
}

impl Report {
    /// The table.
    fn text(&self) -> String {
        let Network { name, sha256, .. } = &self.network;
        let Self { connections, listen_s, open_s, close_s, .. } = self;
        let Self { descriptors, memory_kib, idle_percent, wakeups_per_s, .. } = self;
        format!(
            "# Network: {name}, sha256 {sha256}\n\
             # connections   listen(s)     open(s)    close(s)  descriptors memory(KiB)     idle(%)  wakeups/s\n\
             {connections:>13} {listen_s:>11.3} {open_s:>11.3} {close_s:>11.3} {descriptors:>12.2} {memory_kib:>11.1} {idle_percent:>11.2} {wakeups_per_s:>10.1}\n"
        )
    }
}

impl Workload for Options {
    const NAME: &'static str = "scale";
    const RANKS: Option<usize> = Some(2);
    type Ranks = World;

    fn output(&self) -> &OutputOptions {
        &self.output
    }

    fn measure(&self, world: &mut World, output: &Output) -> Result<u64> {
        let count = self.connections as usize;
        let fabric = self.links.open()?;
        // The threads of the library are not to count.
        let _first = fabric.warm_up()?;
        // Its memory is there before the first measurement, too.
        let region = Region::new(MESSAGE_BYTES * count)?;
        region.write(0..region.bytes(), |bytes| bytes.fill(1))?;
        let before = held(world)?;
        let begin = Instant::now();
        let (links, listen_s) = fabric.connect(count, RECEIVES, world)?;
        world.barrier()?;
        let open_s = begin.elapsed().as_secs_f64() - listen_s;
        send_one_message(world, &links, &region)?;
        // Acknowledgements, and whatever else follows a message, are not to count.
        thread::sleep(Duration::from_secs(1));
        let used = held(world)?;
        // Counting thousands of descriptors takes time, which is not to count: the processes begin
        // together after it.
        world.barrier()?;
        let (cpu, waits) = (cpu_seconds(), wakeups()?);
        thread::sleep(Duration::from_secs(self.idle));
        let idle = (cpu_seconds() - cpu, wakeups()?.saturating_sub(waits) as f64);
        let idle: Vec<(f64, f64)> = world.all_gather(&idle)?;
        let begin = Instant::now();
        drop(links);
        world.barrier()?;
        let close_s = begin.elapsed().as_secs_f64();
        let (each, seconds) = (f64::from(self.connections), self.idle as f64);
        let report = Report {
            network: fabric.network(),
            connections: self.connections,
            listen_s,
            open_s,
            descriptors: (used.0 - before.0) / each,
            memory_kib: (used.1 - before.1) / each,
            idle_percent: 100.0 * idle.iter().map(|idle| idle.0).sum::<f64>() / seconds,
            wakeups_per_s: idle.iter().map(|idle| idle.1).sum::<f64>() / seconds,
            close_s,
        };
        output.text(&report.text())?;
        output.finish(world, &report)?;
        Ok(0)
    }
}

/// Descriptors and KiB of resident memory that all ranks hold.
fn held(world: &mut World) -> Result<(f64, f64)> {
    let all: Vec<Counters> = world.all_gather(&Counters::now()?)?;
    let sum = |of: fn(&Counters) -> u64| all.iter().map(of).sum::<u64>() as f64;
    Ok((sum(|rank| rank.descriptors), sum(|rank| rank.resident_kib)))
}

/// Sends one message over each link, all at the same time.
fn send_one_message(world: &mut World, links: &[Link], region: &Region) -> Result<()> {
    let mut requests = vec![];
    for (at, link) in links.iter().enumerate() {
        link.register(region)?;
        let part = at * MESSAGE_BYTES..(at + 1) * MESSAGE_BYTES;
        requests.push(link.post(region, part, world)?);
    }
    for request in requests {
        complete([request], Driver::Sleep, world)?;
    }
    world.barrier()
}
