//! `evenkeel-bench net`: messages from rank 1 to rank 0, or in both directions, through a plugin,
//! as NCCL's proxy moves them: several connections, several requests in flight on each, only the
//! oldest tested.

use std::collections::VecDeque;
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use serde::{Deserialize, Serialize};

use crate::cli::options::RankOptions;
use crate::cli::size::{Size, sweep};
use crate::counters::cpu_seconds;
use crate::error::Result;
use crate::links::{Link, LinkOptions, Request, complete};
use crate::output::record::{Network, Output, OutputOptions};
use crate::output::statistics::quantile;
use crate::plugin_host::Region;
use crate::ranks::bootstrap::World;
use crate::ranks::wait::Driver;
use crate::workload::{self, Workload};

/// What to measure.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Rank 1 sends, rank 0 receives. Without ranks given, both run on this machine.
Every byte of the first messages of each size is checked, then messages are timed. With -w 0 nothing is sent before the
timed messages: every byte of the first of them is checked.
  time       seconds of a size's messages over their number
  bandwidth  bytes of all connections per time, GB/s (10^9)
  p50, p99   from posting a message to its completion at the sender
  CPU        seconds of all threads of both ranks, with their system calls, for each GB
With --both-ways there are as many connections in the other direction, and both ranks send and receive at the same time: the
bandwidth is that of both directions together.
With --ping-pong rank 0 sends each message back before the next one comes; the times are those of whole round trips.

Examples:
  evenkeel-bench net --plugin ./libnccl-net-evenkeel.so
  evenkeel-bench net --plugin ./libnccl-net-evenkeel.so --connections 512 --depth 8 -b 64K -e 64K
  evenkeel-bench net --plain-sockets 1 --connections 512 --depth 8 -b 64K -e 64K   # without a plugin
  evenkeel-bench net --plugin ./libnccl-net-evenkeel.so --connections 8 --both-ways -b 128K -e 128K
  evenkeel-bench net --plugin ./libnccl-net-evenkeel.so --ping-pong -b 8 -e 8 -n 10000
  evenkeel-bench net --plugin ./libnccl-net-evenkeel.so --transport rdma
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
    /// Messages before those; 0: none at all, the checked ones are timed too
    #[arg(short = 'w', long = "warmup_iters", default_value_t = 8, value_name = "N")]
    warmup: u32,
    /// Connections
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096), value_name = "N")]
    connections: u32,
    /// Requests in flight on each connection
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=8), value_name = "N")]
    depth: u32,
    /// How each rank's one thread asks for completions
    #[arg(long, value_enum, default_value_t = Driver::Nccl, value_name = "DRIVER")]
    driver: Driver,
    /// Check every byte of the timed messages too, not only which message each is: that costs
    /// processor time
    #[arg(long)]
    check_all: bool,
    /// Rank 0 sends too, and rank 1 receives: that many connections in each direction, all at the
    /// same time
    #[arg(long)]
    both_ways: bool,
    /// One message at a time, there and back
    #[arg(long, conflicts_with_all = ["connections", "depth", "both_ways"])]
    ping_pong: bool,
    #[command(flatten)]
    output: OutputOptions,
    #[command(flatten)]
    ranks: RankOptions,
    #[command(flatten)]
    links: LinkOptions,
}

impl Options {
    /// Every byte of this many messages is checked before any is only known by its first bytes.
    fn first(&self) -> u32 {
        2 * self.depth
    }

    /// What is checked of a message, of those after the first or of all where nothing is sent
    /// before.
    fn check(&self, message: u32) -> Check {
        let first = self.warmup == 0 && message < self.first();
        if self.check_all || first { Check::All } else { Check::Stamp }
    }
}

/// Runs one of the two ranks, or starts both.
///
/// # Errors
/// As [`workload::run`], or which option makes no sense.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    options.links.network.settle()?;
    options.sizes()?;
    workload::run(options, &options.ranks)
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
    /// Seconds of processor time for each GB: of rank 1, and of rank 0.
    send_cpu: f64,
    receive_cpu: f64,
    /// Messages with wrong content.
    wrong: u64,
    /// Times of messages at rank 1.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    samples_us: Vec<f64>,
}

#[derive(Serialize)]
struct Report {
    network: Network,
    connections: u32,
    depth: u32,
    both_ways: bool,
    ping_pong: bool,
    rows: Vec<Row>,
    wrong: u64,
}

/// The ranks' parts.
const RECEIVES: usize = 0;
const SENDS: usize = 1;

impl Workload for Options {
    const NAME: &'static str = "net";
    const RANKS: Option<usize> = Some(2);
    const WRONG: &'static str = "messages arrived with wrong content";
    type Ranks = World;

    fn output(&self) -> &OutputOptions {
        &self.output
    }

    fn measure(&self, world: &mut World, output: &Output) -> Result<u64> {
        let sizes = self.sizes()?;
        let fabric = self.links.open()?;
        let receivers: &[usize] =
            if self.ping_pong || self.both_ways { &[RECEIVES, SENDS] } else { &[RECEIVES] };
        let most = sizes.iter().max().map_or(0, |size| *size as usize);
        let bytes = most.checked_mul(self.depth as usize).ok_or("the buffers are too large")?;
        let (count, mut connections) = (self.connections as usize, vec![]);
        for receiver in receivers {
            for link in fabric.connect(count, *receiver, world)?.0 {
                let buffer = Region::new(bytes)?;
                link.register(&buffer)?;
                connections.push(Connection { link, buffer });
            }
        }
        let network = fabric.network();
        output.text(&self.heading(&network))?;
        let mut rows = vec![];
        for size in sizes {
            let size = usize::try_from(size).map_err(|_| format!("{size} bytes are too many"))?;
            let mut run = Run { options: self, world, connections: &mut connections, size };
            let row = run.row()?;
            output.text(&row.line())?;
            rows.push(row);
        }
        let Self { connections, depth, both_ways, ping_pong, .. } = *self;
        let depth = if ping_pong { 1 } else { depth };
        let wrong = rows.iter().map(|row| row.wrong).sum();
        let report = Report { network, connections, depth, both_ways, ping_pong, rows, wrong };
        output.finish(world, &report)?;
        Ok(wrong)
    }
}

impl Options {
    fn sizes(&self) -> Result<Vec<u64>> {
        sweep(self.begin, self.end, self.factor)
    }

    /// What is above the table.
    fn heading(&self, network: &Network) -> String {
        let mut text = network.line();
        let Network { version, device, speed_mbps, transport, .. } = network;
        // Plain sockets have no device.
        if *version > 0 {
            let over = transport.as_deref().map(|name| format!(", over {name}"));
            let (over, gbps) = (over.unwrap_or_default(), *speed_mbps as f64 / 1e3);
            text += &format!("# Device: {device}, {gbps} Gbit/s{over}\n");
        }
        let Self { connections, depth, .. } = self;
        let each = if self.both_ways { " in each direction" } else { "" };
        text += &match self.ping_pong {
            true => "# One message at a time, there and back\n".to_owned(),
            false => {
                format!("# Connections: {connections}{each}, requests in flight on each: {depth}\n")
            }
        };
        for titles in [
            ["size", "time", "bandwidth", "p50", "p99", "CPU", "#wrong"],
            ["(B)", "(us)", "(GB/s)", "(us)", "(us)", "(s/GB)", ""],
        ] {
            let [first, middle @ .., last] = titles;
            let middle: String = middle.iter().map(|title| format!(" {title:>11}")).collect();
            text += format!("#{first:>11}{middle}{last:>8}").trim_end();
            text.push('\n');
        }
        text
    }
}

impl Row {
    /// Its line of the table.
    fn line(&self) -> String {
        let Self { size, time_us, bandwidth, p50_us, p99_us, wrong, .. } = self;
        let cpu = self.send_cpu + self.receive_cpu;
        format!(
            "{size:>12} {time_us:>11.2} {bandwidth:>11.3} {p50_us:>11.2} {p99_us:>11.2} {cpu:>11.3} {wrong:>7}\n"
        )
    }
}

/// One connection and the buffers of its requests in flight, one after the other.
struct Connection {
    link: Link,
    buffer: Region,
}

/// The messages of one size.
struct Run<'a> {
    options: &'a Options,
    world: &'a mut World,
    connections: &'a mut [Connection],
    size: usize,
}

/// What a rank measured of the messages of one size.
#[derive(Deserialize, Serialize)]
struct Mine {
    /// Until all messages were there; 0 where that is not known.
    seconds: f64,
    p50: f64,
    p99: f64,
    cpu: f64,
    wrong: u64,
    samples_us: Vec<f64>,
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
        let options = self.options;
        let (mut times, mut wrong) = (vec![], 0);
        if options.warmup > 0 {
            wrong += self.messages(options.first(), |_| Check::All, &mut times)?;
            wrong += self.messages(options.warmup, |message| options.check(message), &mut times)?;
        }
        times.clear();
        times.reserve(options.iterations as usize * self.connections.len());
        self.world.barrier()?;
        let (start, cpu) = (Instant::now(), cpu_seconds());
        wrong += self.messages(options.iterations, |message| options.check(message), &mut times)?;
        let seconds = start.elapsed().as_secs_f64();
        let cpu = cpu_seconds() - cpu;
        let samples_us = options.output.samples_us(&times);
        // A receiver knows when all has arrived and what was wrong, a sender how long each message
        // took, or each round trip.
        let seconds = match options.ping_pong {
            true => times.iter().sum(),
            false if self.connections.iter().any(|one| one.link.receives()) => seconds,
            false => 0.0,
        };
        times.sort_by(f64::total_cmp);
        let (p50, p99) = (quantile(&times, 0.5), quantile(&times, 0.99));
        let mut all = self.world.all_gather(&Mine { seconds, p50, p99, cpu, wrong, samples_us })?;
        let longest = |of: fn(&Mine) -> f64| all.iter().map(of).fold(0.0, f64::max);
        let (seconds, p50, p99) =
            (longest(|mine| mine.seconds), longest(|mine| mine.p50), longest(|mine| mine.p99));
        let directions = if options.ping_pong { 1 } else { self.connections.len() };
        let messages = f64::from(options.iterations) * directions as f64;
        let bytes = self.size as f64 * messages;
        let per = |value: f64, of: f64| if of > 0.0 { value / of } else { 0.0 };
        Ok(Row {
            size: self.size as u64,
            time_us: seconds / messages * 1e6,
            bandwidth: per(bytes, seconds) / 1e9,
            p50_us: p50 * 1e6,
            p99_us: p99 * 1e6,
            send_cpu: per(all[SENDS].cpu, bytes) * 1e9,
            receive_cpu: per(all[RECEIVES].cpu, bytes) * 1e9,
            wrong: all.iter().map(|mine| mine.wrong).sum(),
            samples_us: std::mem::take(&mut all[SENDS].samples_us),
        })
    }

    /// Moves `count` messages on every connection, adds the seconds of each to `times` where they
    /// are known, and counts wrong ones.
    fn messages(
        &mut self,
        count: u32,
        check: impl Fn(u32) -> Check,
        times: &mut Vec<f64>,
    ) -> Result<u64> {
        match self.options.ping_pong {
            true => self.bounce(count, check, times),
            false => self.stream(count, check, times),
        }
    }

    /// Sends `count` messages there and back, adds each one's seconds to `trips`, and counts wrong
    /// ones.
    fn bounce(
        &mut self,
        count: u32,
        check: impl Fn(u32) -> Check,
        trips: &mut Vec<f64>,
    ) -> Result<u64> {
        let starts = self.world.rank() == SENDS;
        let part = 0..self.size;
        let [there, back] = &*self.connections else {
            return Err("two connections are needed".to_owned());
        };
        let (world, driver) = (&mut *self.world, self.options.driver);
        let mut wrong = 0;
        for message in 0..count {
            let check = check(message);
            let right = |bytes: &[u8]| is_filled(bytes, 0, message, check);
            let (size, right) = if starts {
                there.buffer.write(part.clone(), |bytes| fill(bytes, 0, message, check))?;
                let received = back.link.post(&back.buffer, part.clone(), world)?;
                let start = Instant::now();
                let sent = there.link.post(&there.buffer, part.clone(), world)?;
                let [_, size] = complete([sent, received], driver, world)?;
                trips.push(start.elapsed().as_secs_f64());
                (size, back.buffer.read(part.clone(), right)?)
            } else {
                let received = there.link.post(&there.buffer, part.clone(), world)?;
                let [size] = complete([received], driver, world)?;
                let right = there.buffer.read(part.clone(), |bytes| {
                    let copy = |out: &mut [u8]| out.copy_from_slice(bytes);
                    back.buffer.write(part.clone(), copy).map(|()| right(bytes))
                })??;
                let sent = back.link.post(&back.buffer, part.clone(), world)?;
                complete([sent], driver, world)?;
                (size, right)
            };
            wrong += u64::from(size != self.size || !right);
        }
        Ok(wrong)
    }

    /// Moves `count` messages on every connection, adds the seconds of each sent one to
    /// `latencies`, and counts wrong ones.
    fn stream(
        &mut self,
        count: u32,
        check: impl Fn(u32) -> Check,
        latencies: &mut Vec<f64>,
    ) -> Result<u64> {
        struct InFlight {
            request: Request,
            message: u32,
            since: Instant,
        }
        let depth = self.options.depth;
        let mut posted = vec![0; self.connections.len()];
        let mut in_flight: Vec<VecDeque<InFlight>> =
            self.connections.iter().map(|_| VecDeque::with_capacity(depth as usize)).collect();
        let peer = self.world.describe(1 - self.world.rank());
        let explain = |error: String| format!("with {peer}: {error}");
        let mut wrong = 0;
        let mut wait = self.options.driver.wait();
        loop {
            let mut moved = false;
            let mut left = false;
            for (at, connection) in self.connections.iter_mut().enumerate() {
                let in_flight = &mut in_flight[at];
                let range = |message: u32| {
                    let start = (message % depth) as usize * self.size;
                    start..start + self.size
                };
                while posted[at] < count && in_flight.len() < depth as usize {
                    let message = posted[at];
                    let part = range(message);
                    if !connection.link.receives() {
                        let fill = |bytes: &mut [u8]| fill(bytes, at, message, check(message));
                        connection.buffer.write(part.clone(), fill)?;
                    }
                    let request = connection.link.try_post(&connection.buffer, part);
                    let request = request.map_err(explain)?;
                    let Some(request) = request else { break };
                    in_flight.push_back(InFlight { request, message, since: Instant::now() });
                    posted[at] += 1;
                    moved = true;
                }
                if let Some(InFlight { request, message, since }) = in_flight.front_mut()
                    && let Some(size) = request.test().map_err(explain)?
                {
                    if connection.link.receives() {
                        let right = |bytes: &[u8]| is_filled(bytes, at, *message, check(*message));
                        let right = connection.buffer.read(range(*message), right)?;
                        wrong += u64::from(size != self.size || !right);
                    } else {
                        latencies.push(since.elapsed().as_secs_f64());
                    }
                    in_flight.pop_front();
                    moved = true;
                }
                left |= posted[at] < count || !in_flight.is_empty();
            }
            if !left {
                return Ok(wrong);
            }
            if moved {
                wait.progress();
            } else {
                wait.idle(self.world, || {
                    format!("moving messages of {} bytes with {peer}", self.size)
                })?;
            }
        }
    }
}

/// The number that marks a message.
fn stamp(connection: usize, message: u32) -> u64 {
    (connection as u64 + 1) << 32 | u64::from(message)
}

/// The `i`-th eight bytes of a message that is checked whole. They differ between messages and
/// within a message.
fn word(stamp: u64, i: usize) -> [u8; 8] {
    (stamp ^ i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()
}

fn fill(bytes: &mut [u8], connection: usize, message: u32, check: Check) {
    let stamp = stamp(connection, message);
    if check == Check::Stamp {
        bytes.iter_mut().zip(stamp.to_le_bytes()).for_each(|(config, byte)| *config = byte);
        return;
    }
    let (words, rest) = bytes.as_chunks_mut::<8>();
    let whole = words.len();
    words.iter_mut().enumerate().for_each(|(i, config)| *config = word(stamp, i));
    rest.iter_mut().zip(word(stamp, whole)).for_each(|(config, byte)| *config = byte);
}

fn is_filled(bytes: &[u8], connection: usize, message: u32, check: Check) -> bool {
    let stamp = stamp(connection, message);
    if check == Check::Stamp {
        return bytes.iter().zip(stamp.to_le_bytes()).all(|(got, want)| *got == want);
    }
    let (words, rest) = bytes.as_chunks::<8>();
    let last = word(stamp, words.len());
    words.iter().enumerate().all(|(i, got)| *got == word(stamp, i)) && rest == &last[..rest.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_stamps_are_unique() {
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
