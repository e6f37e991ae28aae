//! `evenkeel-bench scale`: what many connections cost: time to open and to close, descriptors, memory, and processor time
//! while nothing is sent.

use std::fs;
use std::io::{self, Write};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use evenkeel_nccl_abi::HANDLE_SIZE;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::cli::options::{NetworkOptions, RankOptions};
use crate::error::Result;
use crate::output::report::Network;
use crate::plain_sockets::{PlainConnection, PlainOptions, PlainRequest};
use crate::plugin_host::{Connecting, Listener, Plugin, Receiver, Region, Request, Sender};
use crate::ranks::bootstrap::World;
use crate::ranks::spawn;
use crate::ranks::wait::Wait;

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
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ranks: RankOptions,
    #[command(flatten)]
    network: NetworkOptions,
    #[command(flatten)]
    plain: PlainOptions,
}

/// Runs one of the two ranks, or starts both.
///
/// # Errors
/// One line: what went wrong, and which rank is the cause where that is known.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    options.network.settle()?;
    if let Some(ranks) = options.ranks.spawn.filter(|ranks| *ranks != 2) {
        return Err(format!("--spawn {ranks}: scale runs between two ranks"));
    }
    if options.ranks.spawn.is_some() || options.ranks.rank.is_none() {
        return spawn::spawn(2);
    }
    let config = options.ranks.rank_config()?;
    if config.world_size != 2 {
        return Err(format!("a world size of {}: scale runs between two ranks", config.world_size));
    }
    let mut world = World::join(config)?;
    match measure(options, &mut world) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(seen) => Err(world.fail(seen)),
    }
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

/// What a process uses.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Usage {
    descriptors: f64,
    /// Resident memory, KiB.
    memory: f64,
}

impl Usage {
    fn now() -> Result<Self> {
        let failed = |error: io::Error| format!("/proc/self: {error}");
        let status = fs::read_to_string("/proc/self/status").map_err(failed)?;
        Ok(Self {
            // One is that of the folder.
            descriptors: fs::read_dir("/proc/self/fd").map_err(failed)?.count() as f64 - 1.0,
            memory: field(&status, "VmRSS:"),
        })
    }

    /// What all ranks use.
    fn of_all(world: &mut World) -> Result<Self> {
        let all = world.all_gather(&Self::now()?)?;
        Ok(Self {
            descriptors: all.iter().map(|usage| usage.descriptors).sum(),
            memory: all.iter().map(|usage| usage.memory).sum(),
        })
    }
}

/// What the threads of a process have done since it started.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Work {
    /// Seconds of a processor, with system calls.
    processor: f64,
    /// How often a thread began to wait.
    waits: f64,
}

impl Work {
    fn now() -> Result<Self> {
        let failed = |error: io::Error| format!("/proc/self/task: {error}");
        let mut waits = 0.0;
        for thread in fs::read_dir("/proc/self/task").map_err(failed)? {
            let path = thread.map_err(failed)?.path().join("status");
            waits += field(&fs::read_to_string(path).map_err(failed)?, "voluntary_ctxt_switches:");
        }
        let time = clock_gettime(ClockId::ProcessCPUTime);
        Ok(Self { processor: time.tv_sec as f64 + time.tv_nsec as f64 / 1e9, waits })
    }

    /// What this process does for a while; the caller sleeps.
    fn during(time: Duration) -> Result<Self> {
        let before = Self::now()?;
        thread::sleep(time);
        let after = Self::now()?;
        Ok(Self {
            processor: after.processor - before.processor,
            waits: after.waits - before.waits,
        })
    }
}

/// A number of a file of /proc; 0 if it is not there.
fn field(text: &str, name: &str) -> f64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0.0)
}

/// The connections. Dropping them closes them.
enum Ends {
    Senders(Vec<Sender>),
    Receivers(Vec<Receiver>),
    Plain(Vec<PlainConnection>),
}

fn measure(options: &Options, world: &mut World) -> Result<()> {
    let plugin = match options.plain.plain_sockets {
        Some(_) => None,
        None => Some(options.network.open()?),
    };
    // The library starts its threads with the first listener or connection. They are not to count.
    let _first = plugin.as_ref().map(|(plugin, _)| plugin.listen(options.network.device));
    // Its memory is there before the first measurement, too.
    let region = Region::new(MESSAGE_BYTES * options.connections as usize)?;
    region.write(0..region.bytes(), |bytes| bytes.fill(1))?;
    let before = Usage::of_all(world)?;
    let begin = Instant::now();
    let mut listen_s = 0.0;
    let (network, mut ends) = match plugin.as_ref() {
        None => {
            let plain = options.plain.connect(world, options.connections as usize, 0)?;
            (options.plain.network(), Ends::Plain(plain))
        }
        Some((plugin, network)) => {
            let listeners = listen(options, plugin, world)?;
            world.barrier()?;
            listen_s = begin.elapsed().as_secs_f64();
            (network.clone(), connect(options, plugin, world, listeners)?)
        }
    };
    world.barrier()?;
    let open_s = begin.elapsed().as_secs_f64() - listen_s;
    send_one_message(world, &mut ends, &region)?;
    // Acknowledgements, and whatever else follows a message, are not to count.
    let settle = Duration::from_secs(1);
    thread::sleep(settle);
    let used = Usage::of_all(world)?;
    // Counting thousands of descriptors takes time, which is not to count: the processes begin together after it.
    world.barrier()?;
    let work = Work::during(Duration::from_secs(options.idle))?;
    let idle = world.all_gather(&work)?;
    let begin = Instant::now();
    drop(ends);
    world.barrier()?;
    let close_s = begin.elapsed().as_secs_f64();
    let each = f64::from(options.connections);
    let report = Report {
        network,
        connections: options.connections,
        listen_s,
        open_s,
        descriptors: (used.descriptors - before.descriptors) / each,
        memory_kib: (used.memory - before.memory) / each,
        idle_percent: 100.0 * idle.iter().map(|work| work.processor).sum::<f64>()
            / options.idle as f64,
        wakeups_per_s: idle.iter().map(|work| work.waits).sum::<f64>() / options.idle as f64,
        close_s,
    };
    if world.rank() == 0 {
        print(&report, options.json)
            .map_err(|error| format!("cannot write the results: {error}"))?;
    }
    Ok(())
}

fn print(report: &Report, json: bool) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if json {
        serde_json::to_writer(&mut out, report)?;
        return writeln!(out);
    }
    let Network { name, sha256, .. } = &report.network;
    writeln!(out, "# Network: {name}, sha256 {sha256}")?;
    writeln!(
        out,
        "# connections   listen(s)     open(s)    close(s)  descriptors memory(KiB)     idle(%)  wakeups/s"
    )?;
    let Report { connections, listen_s, open_s, close_s, .. } = report;
    let Report { descriptors, memory_kib, idle_percent, wakeups_per_s, .. } = report;
    writeln!(
        out,
        "{connections:>13} {listen_s:>11.3} {open_s:>11.3} {close_s:>11.3} {descriptors:>12.2} {memory_kib:>11.1} {idle_percent:>11.2} {wakeups_per_s:>10.1}"
    )
}

/// A listener for each connection, and their handles.
fn listen(
    options: &Options,
    plugin: &Plugin,
    world: &mut World,
) -> Result<(Vec<Listener>, Vec<Vec<u8>>)> {
    let count = if world.rank() == RECEIVES { options.connections } else { 0 };
    let listeners = (0..count)
        .map(|_| plugin.listen(options.network.device))
        .collect::<Result<Vec<Listener>>>()?;
    let handles: Vec<Vec<u8>> =
        listeners.iter().map(|listener| listener.handle().to_vec()).collect();
    Ok((listeners, world.all_gather(&handles)?.swap_remove(RECEIVES)))
}

fn connect(
    options: &Options,
    plugin: &Plugin,
    world: &mut World,
    (listeners, handles): (Vec<Listener>, Vec<Vec<u8>>),
) -> Result<Ends> {
    if world.rank() == RECEIVES {
        return poll_all(listeners, Listener::accept, world).map(Ends::Receivers);
    }
    let connecting = handles
        .into_iter()
        .map(|handle| {
            let handle: [u8; HANDLE_SIZE] = handle
                .try_into()
                .map_err(|_| "the peer shared a handle of another size".to_owned())?;
            plugin.connect(options.network.device, handle)
        })
        .collect::<Result<Vec<Connecting>>>()?;
    poll_all(connecting, Connecting::poll, world).map(Ends::Senders)
}

/// Polls until each has a result, and drops it then.
fn poll_all<T, R>(
    of: Vec<T>,
    poll: impl Fn(&mut T) -> Result<Option<R>>,
    world: &mut World,
) -> Result<Vec<R>> {
    let mut left = of;
    let mut results = Vec::with_capacity(left.len());
    let mut wait = Wait::new();
    while !left.is_empty() {
        let before = left.len();
        let mut at = 0;
        while at < left.len() {
            match poll(&mut left[at])? {
                Some(result) => {
                    results.push(result);
                    drop(left.swap_remove(at));
                }
                None => at += 1,
            }
        }
        if left.len() < before {
            wait.progress();
        } else {
            wait.idle(world, || format!("opening connections: {} are left", left.len()))?;
        }
    }
    Ok(results)
}

/// Sends one message over each connection, all at the same time.
fn send_one_message(world: &mut World, ends: &mut Ends, region: &Region) -> Result<()> {
    let part = |at: usize| at * MESSAGE_BYTES..(at + 1) * MESSAGE_BYTES;
    let full = || "no room for a message".to_owned();
    let mut requests: Vec<Request> = vec![];
    match ends {
        Ends::Senders(senders) => {
            for (at, sender) in senders.iter().enumerate() {
                sender.register(region)?;
                requests.push(sender.isend(region, part(at))?.ok_or_else(full)?);
            }
        }
        Ends::Receivers(receivers) => {
            for (at, receiver) in receivers.iter().enumerate() {
                receiver.register(region)?;
                requests.push(receiver.irecv(region, part(at))?.ok_or_else(full)?);
            }
        }
        Ends::Plain(plain) => {
            let mut left = vec![];
            for (at, connection) in plain.iter_mut().enumerate() {
                let request = connection.post(part(at)).ok_or_else(full)?;
                left.push((connection, request));
            }
            let poll = |(connection, request): &mut (&mut PlainConnection, PlainRequest)| {
                connection.test(request, region)
            };
            poll_all(left, poll, world)?;
        }
    }
    poll_all(requests, Request::test, world)?;
    world.barrier()
}
