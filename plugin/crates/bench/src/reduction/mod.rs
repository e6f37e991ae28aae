//! `evenkeel-bench reduction`: all-reduces through reduction servers, a ring, or whatever another
//! plugin's CollNet table leads to, every element checked, with the time of each step at the
//! clients and at the servers.

mod hosts;
mod launch;
mod nccl;
mod rank;
mod servers;
mod sweep;
mod timeline_log;
mod timeline_plot;

use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

use clap::{Args, ValueEnum};

use crate::cli::options::{NetworkOptions, RankOptions, RunOptions};
use crate::cli::size::Size;
use crate::error::Result;
use crate::output::record::{self, OutputOptions};
use crate::ranks::wait::Driver;
use crate::workload::Workload;
use hosts::Hosts;
use launch::Launch;
use sweep::Sweep;
use timeline_log::Logs;

/// Maximum number of ranks of all jobs together: each is a process.
const MAX_RANKS: usize = 256;

/// What to measure.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  Four ranks and two servers on this machine:
    evenkeel-bench reduction --ranks 4 --servers 2 --size 64M --plugin ./libnccl-net-evenkeel.so
  The same vector round a ring of the same ranks, over the same plugin:
    evenkeel-bench reduction --ranks 4 --run-type ring --size 64M --plugin ./libnccl-net-evenkeel.so
  Another plugin that reduces:
    evenkeel-bench reduction --ranks 4 --run-type plugin --plugin ./libnccl-net-other.so
  NCCL itself on two GPUs of this machine, over the network as between machines, through nccl-tests:
    NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 evenkeel-bench reduction --ranks 2 --run-type nccl
  The same on two machines with a GPU each:
    evenkeel-bench reduction --ranks 1 --run-type nccl --nccl-tests 'mpirun -np 2 --host a,b all_reduce_perf'
  As NCCL cuts a vector, with a drawing, and the log kept:
    evenkeel-bench reduction --ranks 2 --servers 2 --chunksize 512K --plot run.svg --log-dir log
  The first 20 ms of it again, later:
    evenkeel-bench reduction --analyze log --plot begin.svg --xlim 0,20
  Each operation at one of four servers, which take turns, and not over all of them:
    evenkeel-bench reduction --ranks 4 --servers 4 --chunksize 512K --split 1
  Asked for completions as NCCL's proxy asks, which takes a processor for each rank:
    evenkeel-bench reduction --ranks 2 --servers 2 --driver nccl --json
  Which settings are best:
    evenkeel-bench reduction --ranks 2 --servers 2 --sweep piece=64K,256K,1M --sweep split=1,2
  Eight jobs at a time at two servers:
    evenkeel-bench reduction --jobs 8 --ranks 2 --servers 2 --size 16M
  On other machines, which ssh reaches:
    evenkeel-bench reduction --hosts hosts.yaml --plugin /opt/libnccl-net-evenkeel.so
  In pods, with the images of this project (docs/reduction.md has the pods):
    evenkeel-bench reduction --hosts pods.yaml --rsh 'kubectl exec -i {} -c main -- sh -c' \\
      --bench-program /usr/local/bin/evenkeel-bench --server-program /usr/local/bin/evenkeel-reduction-server \\
      --plugin /evenkeel/plugin/libnccl-net-evenkeel.so
  One rank, with servers that run elsewhere:
    EVENKEEL_REDUCTION_SERVERS=10.0.0.8:7470,10.0.0.9:7470 evenkeel-bench reduction \\
      --rank 0 --world-size 2 --master-addr 10.0.0.1 --master-port 29500

hosts.yaml:
  servers:
    - {name: cpu-0, address: 10.0.0.8, port: 7470, env: {EVENKEEL_FLOWS: 2}}
    - {name: cpu-1}          # address: the name; port: 7470
  clients:                   # rank 0 is the first
    - {name: gpu-0, env: {NCCL_SOCKET_IFNAME: eth0}}
    - {name: gpu-1}

Steps, in microseconds. Clients: e2e, an operation from its begin to its end; req, the call that begins it; send, until a
piece of it has been sent; recv, from then until its sum is there. Servers: recv, from the first rank's part of a piece
until the last one's is there; reduce; send, until all ranks have it.
Exit status: 0 when all went well, 1 when an element is wrong, a rank is lost or something else failed, 2 for bad flags.")]
pub(crate) struct Options {
    /// Bytes of the vector that all ranks reduce; K, M and G are powers of 1024
    #[arg(long, default_value = "64M", value_name = "SIZE")]
    size: Size,
    /// Bytes of each operation [default: the whole vector]; a ring takes it whole
    #[arg(long, value_name = "SIZE")]
    chunksize: Option<Size>,
    /// Maximum number of operations in flight
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=32), value_name = "N")]
    depth: u16,
    /// What reduces
    #[arg(long, value_enum, default_value_t = RunType::Servers, value_name = "TYPE")]
    run_type: RunType,
    /// How each rank's one thread asks for completions. Ranks that share a machine's processors do
    /// best to sleep
    #[arg(long, value_enum, default_value_t = Driver::Sleep, value_name = "DRIVER")]
    driver: Driver,
    #[command(flatten)]
    run: RunOptions,
    /// Number of jobs at a time, each with all ranks, at the same servers
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64), value_name = "N")]
    jobs: u16,
    /// Maximum number of servers that one operation is split over; operations rotate over the
    /// servers. Sets EVENKEEL_REDUCTION_SPLIT [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    split: Option<u16>,
    /// NCCL's benchmark, for --run-type nccl: a program, with what starts it and its arguments
    /// before those added here. Given --ranks N it drives N GPUs; the environment is its own, but
    /// for NCCL_COLLNET_ENABLE=0
    #[arg(long, default_value = "all_reduce_perf", value_name = "COMMAND")]
    nccl_tests: String,
    /// Start this many reduction servers on this machine
    #[arg(long, value_name = "N", requires = "spawn")]
    servers: Option<usize>,
    /// Threads of each server [default: the cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    server_threads: Option<u16>,
    /// Maximum bytes that a server receives, reduces and sends at once [default: the server's]
    #[arg(long, value_name = "SIZE")]
    piece: Option<Size>,
    /// The servers' program [default: evenkeel-reduction-server beside this one]
    #[arg(long, value_name = "FILE")]
    server_program: Option<PathBuf>,
    /// Start servers and ranks on the hosts of this YAML file
    #[arg(long, value_name = "FILE", conflicts_with_all = ["spawn", "servers", "rank", "world_size", "master_addr"])]
    hosts: Option<PathBuf>,
    /// What runs a line of shell on a host: it is given the host's name, in place of {} if that is
    /// there, and the line
    #[arg(long, default_value = "ssh", value_name = "COMMAND", requires = "hosts")]
    rsh: String,
    /// This program on the hosts [default: where it is here]
    #[arg(long, value_name = "FILE", requires = "hosts")]
    bench_program: Option<PathBuf>,
    /// Keep the timelines of servers and ranks in this folder
    #[arg(long, value_name = "DIR", conflicts_with = "sweep")]
    log_dir: Option<PathBuf>,
    /// Draw when each piece was where, as SVG
    #[arg(long, value_name = "FILE", conflicts_with = "sweep")]
    plot: Option<PathBuf>,
    /// What to draw, in milliseconds after the begin [default: one reduction in the middle]
    #[arg(long, value_name = "A,B", requires = "plot")]
    xlim: Option<Window>,
    /// Measure nothing: statistics and drawing of a folder that --log-dir left
    #[arg(long, value_name = "DIR", conflicts_with_all = ["spawn", "hosts", "log_dir", "sweep"])]
    analyze: Option<PathBuf>,
    /// Run with each of these values, and all combinations if there are several: of chunksize,
    /// depth, jobs, piece, servers, server-threads, split, or of a variable in the environment of
    /// servers and ranks
    #[arg(long, value_name = "NAME=VALUE,...")]
    sweep: Vec<Sweep>,
    #[command(flatten)]
    output: OutputOptions,
    /// A rank that something else watches: its log goes to standard output, and it ends when its
    /// standard input does
    #[arg(long, hide = true)]
    watched: bool,
    #[command(flatten)]
    ranks: RankOptions,
    #[command(flatten)]
    network: NetworkOptions,
}

/// What reduces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RunType {
    /// Reduction servers
    Servers,
    /// The ranks, in a ring
    Ring,
    /// What the plugin's own CollNet table leads to
    Plugin,
    /// NCCL as it is, on GPUs, through nccl-tests
    Nccl,
}

/// An interval of time, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Window([f64; 2]);

impl FromStr for Window {
    type Err = String;

    fn from_str(text: &str) -> Result<Self> {
        let read = |part: &str| part.trim().parse::<f64>().ok().filter(|ms| ms.is_finite());
        let ends = text.split_once(',').and_then(|(begin, end)| Some([read(begin)?, read(end)?]));
        let ends = ends.filter(|[begin, end]| 0.0 <= *begin && begin < end);
        ends.map(Self).ok_or_else(|| format!("{text:?}: two numbers of ms, such as 0,20"))
    }
}

/// Runs one rank, or starts servers and ranks, or analyzes the logs of an earlier run.
///
/// # Errors
/// One line: what went wrong, and which rank is the cause where that is known.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    options.network.settle()?;
    if let Some(folder) = &options.analyze {
        report(options, &Logs::read(folder)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let element = options.run.kind.bytes() as u64;
    let chunk = options.chunksize.unwrap_or(options.size);
    if options.size.0 < element || chunk.0 < element {
        return Err(format!(
            "one {} has {element} bytes: nothing smaller can be reduced",
            options.run.kind.name()
        ));
    }
    if options.run_type == RunType::Nccl {
        return if options.hosts.is_some() || !options.sweep.is_empty() || options.jobs > 1 {
            Err("--run-type nccl takes no --hosts, --sweep or --jobs: --nccl-tests 'mpirun ...' reaches other machines".to_owned())
        } else {
            nccl::run(options)
        };
    }
    let hosts = match (&options.hosts, options.ranks.spawn) {
        (Some(file), _) => Hosts::read(file, &options.rsh)?,
        (None, Some(ranks)) => Hosts::local(options.servers.unwrap_or(0), ranks)?,
        (None, None) if options.sweep.is_empty() && options.jobs == 1 => return rank::run(options),
        (None, None) => {
            return Err("--sweep and --jobs start ranks: --ranks N, or --hosts FILE".to_owned());
        }
    };
    if usize::from(options.jobs) * hosts.clients.len() > MAX_RANKS {
        return Err(format!(
            "{} jobs of {} ranks: at most {MAX_RANKS} ranks in all",
            options.jobs,
            hosts.clients.len()
        ));
    }
    if options.run_type == RunType::Servers && options.hosts.is_some() && hosts.servers.is_empty() {
        return Err("the hosts' file has no servers: give some, or another --run-type".to_owned());
    }
    if !options.sweep.is_empty() {
        return sweep::run(options, &hosts);
    }
    let ended = Launch { options, hosts: &hosts, environment: &[] }.run()?;
    if let Some(folder) = &options.log_dir {
        ended.logs.write(folder)?;
    }
    if ended.logs.has_run() {
        report(options, &ended.logs)?;
    }
    Ok(ended.code)
}

/// Prints and draws what was asked for.
fn report(options: &Options, logs: &Logs) -> Result<()> {
    if options.output.json {
        record::print(Options::NAME, logs.processes(), &logs.measured(&options.output)?)?;
    } else {
        print!("{}", logs.text()?);
    }
    if let Some(file) = &options.plot {
        let svg = timeline_plot::draw(logs, options.xlim.map(|window| window.0))?;
        std::fs::write(file, svg).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_is_parsed_or_refused() {
        assert_eq!("0, 20.5".parse(), Ok(Window([0.0, 20.5])));
        for text in ["", "1", "2,1", "1,1", "-1,2", "nan,1", "0,inf"] {
            assert!(text.parse::<Window>().is_err(), "{text}");
        }
    }
}
