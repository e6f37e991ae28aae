//! `evenkeel-bench net`: messages from rank 1 to rank 0 through a plugin, as NCCL's proxy moves them: several
//! connections, several requests in flight on each, only the oldest tested.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use evenkeel_nccl_abi::HANDLE_SIZE;
use serde::Serialize;

use crate::group::Group;
use crate::host::{Connecting, Listener, Plugin, Receiver, Region, Request, Result, Sender};
use crate::options::{NetworkOptions, RankOptions};
use crate::report::Network;
use crate::size::{Size, sweep};
use crate::spawn;
use crate::wait::Wait;

/// What to measure.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Rank 1 sends, rank 0 receives. Without ranks given, both run on this machine.
Every byte of the first messages of each size is checked, then messages are timed.
  time       seconds of a size's messages over their number
  bandwidth  bytes of all connections per time, GB/s (10^9)
  p50, p99   from posting a message to its completion at the sender

Examples:
  evenkeel-bench net --plugin ./libnccl-net-evenkeel.so
  evenkeel-bench net --plugin ./libnccl-net-evenkeel.so --connections 2 --depth 8 -b 1M -e 1M
  Between machines, with the same two flags on both:
    evenkeel-bench net --rank 0 --world-size 2 --master-addr 10.0.0.1 --master-port 29500   # receives
    evenkeel-bench net --rank 1 --world-size 2 --master-addr 10.0.0.1 --master-port 29500   # sends")]
pub(crate) struct Options {
    /// Smallest message, bytes; K, M and G are powers of 1024
    #[arg(short = 'b', long = "minbytes", default_value = "64K", value_name = "SIZE")]
    begin: Size,
    /// Largest message
    #[arg(short = 'e', long = "maxbytes", default_value = "16M", value_name = "SIZE")]
    end: Size,
    /// Each size is this many times the one before
    #[arg(short = 'f', long = "stepfactor", default_value_t = 4, value_name = "N")]
    factor: u64,
    /// Timed messages of each size on each connection
    #[arg(short = 'n', long = "iters", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1_000_000), value_name = "N")]
    iterations: u32,
    /// Messages before those
    #[arg(short = 'w', long = "warmup_iters", default_value_t = 8, value_name = "N")]
    warmup: u32,
    /// Connections
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64), value_name = "N")]
    connections: u32,
    /// Requests in flight on each connection
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=8), value_name = "N")]
    depth: u32,
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ranks: RankOptions,
    #[command(flatten)]
    network: NetworkOptions,
}

/// Runs one of the two ranks, or starts both.
///
/// # Errors
/// One line: what went wrong, and which rank is the cause where that is known.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let sizes = sweep(options.begin, options.end, options.factor)?;
    if let Some(ranks) = options.ranks.spawn.filter(|ranks| *ranks != 2) {
        return Err(format!("--spawn {ranks}: net runs between two ranks"));
    }
    if options.ranks.spawn.is_some() || options.ranks.rank.is_none() {
        return spawn::spawn(2);
    }
    let place = options.ranks.place()?;
    if place.world != 2 {
        return Err(format!("a world size of {}: net runs between two ranks", place.world));
    }
    let mut group = Group::join(place)?;
    match measure(options, &sizes, &mut group) {
        Ok(0) => Ok(ExitCode::SUCCESS),
        Ok(wrong) => {
            if group.rank() == 0 {
                eprintln!("error: {wrong} messages arrived with wrong content");
            }
            Ok(ExitCode::FAILURE)
        }
        Err(seen) => Err(group.fail(seen)),
    }
}

#[derive(Debug, Serialize)]
struct Row {
    size: u64,
    /// Microseconds per message.
    time_us: f64,
    /// GB/s (10^9) of all connections.
    bandwidth: f64,
    p50_us: f64,
    p99_us: f64,
    /// Messages with wrong content.
    wrong: u64,
}

#[derive(Serialize)]
struct Report {
    network: Network,
    connections: u32,
    depth: u32,
    rows: Vec<Row>,
}

fn measure(options: &Options, sizes: &[u64], group: &mut Group) -> Result<u64> {
    let (plugin, network) = options.network.open()?;
    group.share(&network.name)?;
    let most = sizes.iter().max().map_or(0, |size| *size as usize);
    let mut lanes = connect(options, &plugin, group, most)?;
    let output = |error: io::Error| format!("cannot write the results: {error}");
    let print = group.rank() == 0;
    if print && !options.json {
        heading(options, &network).map_err(output)?;
    }
    let mut rows = vec![];
    for size in sizes {
        let size = usize::try_from(*size).map_err(|_| format!("{size} bytes are too many"))?;
        let mut run = Run { options, group, lanes: &mut lanes, size };
        let row = run.row()?;
        if print && !options.json {
            line(&row).map_err(output)?;
        }
        rows.push(row);
    }
    group.barrier()?;
    let wrong = rows.iter().map(|row| row.wrong).sum();
    if print && options.json {
        let (connections, depth) = (options.connections, options.depth);
        let report = Report { network, connections, depth, rows };
        let mut out = io::stdout().lock();
        serde_json::to_writer(&mut out, &report).map_err(|error| error.to_string())?;
        writeln!(out).map_err(output)?;
    }
    Ok(wrong)
}

fn heading(options: &Options, network: &Network) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let Network { name, version, library, sha256, device, speed_mbps } = network;
    writeln!(out, "# Network: {name} (ncclNet v{version}), {library}, sha256 {sha256}")?;
    writeln!(out, "# Device: {device}, {} Gbit/s", *speed_mbps as f64 / 1e3)?;
    writeln!(
        out,
        "# Connections: {}, requests in flight on each: {}",
        options.connections, options.depth
    )?;
    writeln!(
        out,
        "#{:>11} {:>11} {:>11} {:>11} {:>11} {:>7}",
        "size", "time", "bandwidth", "p50", "p99", "#wrong"
    )?;
    writeln!(out, "#{:>11} {:>11} {:>11} {:>11} {:>11}", "(B)", "(us)", "(GB/s)", "(us)", "(us)")?;
    out.flush()
}

fn line(row: &Row) -> io::Result<()> {
    let Row { size, time_us, bandwidth, p50_us, p99_us, wrong } = row;
    let mut out = io::stdout().lock();
    writeln!(
        out,
        "{size:>12} {time_us:>11.2} {bandwidth:>11.3} {p50_us:>11.2} {p99_us:>11.2} {wrong:>7}"
    )?;
    out.flush()
}

enum End {
    Sender(Sender),
    Receiver(Receiver),
}

/// One connection and the buffers of its requests in flight, one after the other.
struct Lane {
    end: End,
    buffer: Region,
}

fn connect(
    options: &Options,
    plugin: &Plugin,
    group: &mut Group,
    most: usize,
) -> Result<Vec<Lane>> {
    let count = options.connections as usize;
    let receives = group.rank() == 0;
    let mut listeners: Vec<Listener> = vec![];
    if receives {
        for _ in 0..count {
            listeners.push(plugin.listen(options.network.device)?);
        }
    }
    let handles: Vec<Vec<u8>> =
        listeners.iter().map(|listener| listener.handle().to_vec()).collect();
    let handles = group.share(&handles)?.swap_remove(0);
    let mut connecting: Vec<Connecting> = vec![];
    if !receives {
        for handle in handles {
            let handle: [u8; HANDLE_SIZE] = handle
                .try_into()
                .map_err(|_| "rank 0 shared a handle of another size".to_owned())?;
            connecting.push(plugin.connect(options.network.device, handle)?);
        }
    }
    let mut ends: Vec<Option<End>> = (0..count).map(|_| None).collect();
    let mut wait = Wait::new();
    while ends.iter().any(Option::is_none) {
        for (at, end) in ends.iter_mut().enumerate().filter(|(_, end)| end.is_none()) {
            *end = match receives {
                true => listeners[at].accept().map(|end| end.map(End::Receiver)),
                false => connecting[at].poll().map(|end| end.map(End::Sender)),
            }
            .map_err(|error| {
                format!("connection {at} with {}: {error}", group.describe(1 - group.rank()))
            })?;
        }
        wait.idle(group, || "connecting".to_owned())?;
    }
    let size = most.checked_mul(options.depth as usize).ok_or("the buffers are too large")?;
    ends.into_iter()
        .flatten()
        .map(|end| {
            let buffer = Region::new(size)?;
            match &end {
                End::Sender(sender) => sender.register(&buffer)?,
                End::Receiver(receiver) => receiver.register(&buffer)?,
            }
            Ok(Lane { end, buffer })
        })
        .collect()
}

/// The messages of one size.
struct Run<'a> {
    options: &'a Options,
    group: &'a mut Group,
    lanes: &'a mut [Lane],
    size: usize,
}

/// What is checked of a message.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Check {
    /// Every byte.
    All,
    /// The first bytes: which message of which connection it is.
    Stamp,
}

impl Run<'_> {
    fn row(&mut self) -> Result<Row> {
        let mut latencies = vec![];
        let mut wrong = self.stream(2 * self.options.depth, Check::All, &mut latencies)?;
        wrong += self.stream(self.options.warmup, Check::Stamp, &mut latencies)?;
        latencies.clear();
        latencies.reserve(self.options.iterations as usize * self.lanes.len());
        self.group.barrier()?;
        let start = Instant::now();
        wrong += self.stream(self.options.iterations, Check::Stamp, &mut latencies)?;
        let seconds = start.elapsed().as_secs_f64();
        latencies.sort_by(f64::total_cmp);
        let percentile = |share: f64| {
            let at = (latencies.len().saturating_sub(1) as f64 * share).round() as usize;
            latencies.get(at).copied().unwrap_or(0.0)
        };
        let mine = (seconds, percentile(0.5), percentile(0.99), wrong);
        let all = self.group.share(&mine)?;
        // The receiver knows when all has arrived and what was wrong, the sender how long each message took.
        let ((seconds, .., wrong), (_, p50, p99, _)) = (all[0], all[1]);
        let messages = f64::from(self.options.iterations) * self.lanes.len() as f64;
        Ok(Row {
            size: self.size as u64,
            time_us: seconds / messages * 1e6,
            bandwidth: if seconds > 0.0 {
                self.size as f64 * messages / seconds / 1e9
            } else {
                0.0
            },
            p50_us: p50 * 1e6,
            p99_us: p99 * 1e6,
            wrong,
        })
    }

    /// Moves `count` messages on every connection, adds each one's seconds to `latencies`, and counts wrong ones.
    fn stream(&mut self, count: u32, check: Check, latencies: &mut Vec<f64>) -> Result<u64> {
        struct Flight {
            request: Request,
            message: u32,
            since: Instant,
        }
        let depth = self.options.depth;
        let mut posted = vec![0; self.lanes.len()];
        let mut flights: Vec<VecDeque<Flight>> =
            self.lanes.iter().map(|_| VecDeque::with_capacity(depth as usize)).collect();
        let peer = self.group.describe(1 - self.group.rank());
        let explain = |error: String| format!("with {peer}: {error}");
        let mut wrong = 0;
        let mut wait = Wait::new();
        loop {
            let mut moved = false;
            let mut left = false;
            for (at, lane) in self.lanes.iter_mut().enumerate() {
                let flights = &mut flights[at];
                let place = |message: u32| {
                    let start = (message % depth) as usize * self.size;
                    start..start + self.size
                };
                while posted[at] < count && flights.len() < depth as usize {
                    let message = posted[at];
                    let part = place(message);
                    let request = match &lane.end {
                        End::Sender(sender) => {
                            lane.buffer
                                .write(part.clone(), |bytes| fill(bytes, at, message, check))?;
                            sender.isend(&lane.buffer, part)
                        }
                        End::Receiver(receiver) => receiver.irecv(&lane.buffer, part),
                    };
                    let Some(request) = request.map_err(explain)? else { break };
                    flights.push_back(Flight { request, message, since: Instant::now() });
                    posted[at] += 1;
                    moved = true;
                }
                if let Some(Flight { request, message, since }) = flights.front_mut()
                    && let Some(size) = request.test().map_err(explain)?
                {
                    latencies.push(since.elapsed().as_secs_f64());
                    if matches!(lane.end, End::Receiver(_)) {
                        let right = |bytes: &[u8]| is_filled(bytes, at, *message, check);
                        let right = lane.buffer.read(place(*message), right)?;
                        wrong += u64::from(size != self.size || !right);
                    }
                    flights.pop_front();
                    moved = true;
                }
                left |= posted[at] < count || !flights.is_empty();
            }
            if !left {
                return Ok(wrong);
            }
            if moved {
                wait.progress();
            } else {
                wait.idle(self.group, || {
                    format!("moving messages of {} bytes with {peer}", self.size)
                })?;
            }
        }
    }
}

/// The number that marks a message.
fn stamp(lane: usize, message: u32) -> u64 {
    (lane as u64 + 1) << 32 | u64::from(message)
}

/// Byte `i` of a message that is checked whole: no two messages of a run look alike, nor do two parts of one.
fn byte(stamp: u64, i: usize) -> u8 {
    let word = (stamp ^ (i as u64 >> 3)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    word.to_le_bytes()[i & 7]
}

fn fill(bytes: &mut [u8], lane: usize, message: u32, check: Check) {
    let stamp = stamp(lane, message);
    match check {
        Check::All => bytes.iter_mut().enumerate().for_each(|(i, place)| *place = byte(stamp, i)),
        Check::Stamp => {
            bytes.iter_mut().zip(stamp.to_le_bytes()).for_each(|(place, byte)| *place = byte)
        }
    }
}

fn is_filled(bytes: &[u8], lane: usize, message: u32, check: Check) -> bool {
    let stamp = stamp(lane, message);
    match check {
        Check::All => bytes.iter().enumerate().all(|(i, got)| *got == byte(stamp, i)),
        Check::Stamp => bytes.iter().zip(stamp.to_le_bytes()).all(|(got, want)| *got == want),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_told_from_every_other() {
        let mut bytes = vec![0; 1000];
        fill(&mut bytes, 1, 5, Check::All);
        assert!(is_filled(&bytes, 1, 5, Check::All));
        assert!(!is_filled(&bytes, 1, 6, Check::All));
        assert!(!is_filled(&bytes, 0, 5, Check::All));
        let (first, second) = bytes.split_at_mut(500);
        first[..8].swap_with_slice(&mut second[..8]);
        assert!(!is_filled(&bytes, 1, 5, Check::All), "parts that changed places");
        fill(&mut bytes, 1, 7, Check::Stamp);
        assert!(is_filled(&bytes, 1, 7, Check::Stamp));
        assert!(!is_filled(&bytes, 1, 8, Check::Stamp));
    }
}
