//! `evenkeel-bench net`: messages from rank 1 to rank 0, or in both directions, through a plugin, as NCCL's proxy moves
//! them: several connections, several requests in flight on each, only the oldest tested.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::ops::Range;
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use evenkeel_nccl_abi::HANDLE_SIZE;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use crate::cli::options::{NetworkOptions, RankOptions};
use crate::cli::size::{Size, sweep};
use crate::error::Result;
use crate::output::report::Network;
use crate::plain_sockets::{PlainConnection, PlainOptions, PlainRequest};
use crate::plugin_host::{self, Connecting, Listener, Plugin, Receiver, Region, Sender, log};
use crate::ranks::bootstrap::World;
use crate::ranks::spawn;
use crate::ranks::wait::{Driver, Wait};

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
    /// Check every byte of the timed messages too, not only which message each is: that costs processor time
    #[arg(long)]
    check_all: bool,
    /// Rank 0 sends too, and rank 1 receives: that many connections in each direction, all at the same time
    #[arg(long)]
    both_ways: bool,
    /// One message at a time, there and back
    #[arg(long, conflicts_with_all = ["connections", "depth", "both_ways"])]
    ping_pong: bool,
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

impl Options {
    /// Every byte of this many messages is checked before any is only known by its first bytes.
    fn first(&self) -> u32 {
        2 * self.depth
    }

    /// What is checked of a message, of those after the first or of all where nothing is sent before.
    fn check(&self, message: u32) -> Check {
        let first = self.warmup == 0 && message < self.first();
        if self.check_all || first { Check::All } else { Check::Stamp }
    }
}

/// Runs one of the two ranks, or starts both.
///
/// # Errors
/// One line: what went wrong, and which rank is the cause where that is known.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    options.network.settle()?;
    let sizes = sweep(options.begin, options.end, options.factor)?;
    if let Some(ranks) = options.ranks.spawn.filter(|ranks| *ranks != 2) {
        return Err(format!("--spawn {ranks}: net runs between two ranks"));
    }
    if options.ranks.spawn.is_some() || options.ranks.rank.is_none() {
        return spawn::spawn(2);
    }
    let config = options.ranks.rank_config()?;
    if config.world_size != 2 {
        return Err(format!("a world size of {}: net runs between two ranks", config.world_size));
    }
    let mut world = World::join(config)?;
    match measure(options, &sizes, &mut world) {
        Ok(0) => Ok(ExitCode::SUCCESS),
        Ok(wrong) => {
            if world.rank() == 0 {
                eprintln!("error: {wrong} messages arrived with wrong content");
            }
            Ok(ExitCode::FAILURE)
        }
        Err(seen) => Err(world.fail(seen)),
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
    /// Seconds of processor time for each GB: of rank 1, and of rank 0.
    send_cpu: f64,
    receive_cpu: f64,
    /// Messages with wrong content.
    wrong: u64,
}

#[derive(Serialize)]
struct Report {
    network: Network,
    connections: u32,
    depth: u32,
    both_ways: bool,
    ping_pong: bool,
    rows: Vec<Row>,
}

/// The ranks' parts.
const RECEIVES: usize = 0;
const SENDS: usize = 1;

fn measure(options: &Options, sizes: &[u64], world: &mut World) -> Result<u64> {
    let most = sizes.iter().max().map_or(0, |size| *size as usize);
    let receivers: &[usize] =
        if options.ping_pong || options.both_ways { &[RECEIVES, SENDS] } else { &[RECEIVES] };
    let mut connections = vec![];
    let network = match options.plain.plain_sockets {
        Some(_) => {
            for receiver in receivers {
                connections.extend(connect_plain(options, world, most, *receiver)?);
            }
            options.plain.network()
        }
        None => {
            let (plugin, mut network) = options.network.open()?;
            world.all_gather(&network.name)?;
            for receiver in receivers {
                connections.extend(connect(options, &plugin, world, most, *receiver)?);
            }
            network.transport = log::transport();
            network
        }
    };
    let output = |error: io::Error| format!("cannot write the results: {error}");
    let print = world.rank() == 0;
    if print && !options.json {
        heading(options, &network).map_err(output)?;
    }
    let mut rows = vec![];
    for size in sizes {
        let size = usize::try_from(*size).map_err(|_| format!("{size} bytes are too many"))?;
        let mut run = Run { options, world, connections: &mut connections, size };
        let row = if options.ping_pong { run.round_trips() } else { run.row() }?;
        if print && !options.json {
            line(&row).map_err(output)?;
        }
        rows.push(row);
    }
    world.barrier()?;
    let wrong = rows.iter().map(|row| row.wrong).sum();
    if print && options.json {
        let Options { connections, depth, both_ways, ping_pong, .. } = *options;
        let depth = if ping_pong { 1 } else { depth };
        let report = Report { network, connections, depth, both_ways, ping_pong, rows };
        let mut out = io::stdout().lock();
        serde_json::to_writer(&mut out, &report).map_err(|error| error.to_string())?;
        writeln!(out).map_err(output)?;
    }
    Ok(wrong)
}

fn heading(options: &Options, network: &Network) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let Network { name, version, library, sha256, device, speed_mbps, transport, .. } = network;
    if options.plain.plain_sockets.is_some() {
        writeln!(out, "# Network: {name}")?;
    } else {
        writeln!(out, "# Network: {name} (ncclNet v{version}), {library}, sha256 {sha256}")?;
        let over = transport.as_deref().map_or_else(String::new, |name| format!(", over {name}"));
        writeln!(out, "# Device: {device}, {} Gbit/s{over}", *speed_mbps as f64 / 1e3)?;
    }
    if options.ping_pong {
        writeln!(out, "# One message at a time, there and back")?;
    } else {
        let Options { connections, depth, .. } = options;
        let each = if options.both_ways { " in each direction" } else { "" };
        writeln!(out, "# Connections: {connections}{each}, requests in flight on each: {depth}")?;
    }
    writeln!(
        out,
        "#{:>11} {:>11} {:>11} {:>11} {:>11} {:>11} {:>7}",
        "size", "time", "bandwidth", "p50", "p99", "CPU", "#wrong"
    )?;
    writeln!(
        out,
        "#{:>11} {:>11} {:>11} {:>11} {:>11} {:>11}",
        "(B)", "(us)", "(GB/s)", "(us)", "(us)", "(s/GB)"
    )?;
    out.flush()
}

fn line(row: &Row) -> io::Result<()> {
    let Row { size, time_us, bandwidth, p50_us, p99_us, send_cpu, receive_cpu, wrong } = row;
    let cpu = send_cpu + receive_cpu;
    let mut out = io::stdout().lock();
    writeln!(
        out,
        "{size:>12} {time_us:>11.2} {bandwidth:>11.3} {p50_us:>11.2} {p99_us:>11.2} {cpu:>11.3} {wrong:>7}"
    )?;
    out.flush()
}

enum End {
    Sender(Sender),
    Receiver(Receiver),
    Plain(PlainConnection),
}

impl End {
    fn receives(&self) -> bool {
        match self {
            Self::Sender(_) => false,
            Self::Receiver(_) => true,
            Self::Plain(plain) => !plain.sends(),
        }
    }
}

enum Request {
    Plugin(plugin_host::Request),
    Plain(PlainRequest),
}

/// One connection and the buffers of its requests in flight, one after the other.
struct Connection {
    end: End,
    buffer: Region,
}

impl Connection {
    /// Begins to move a message; nothing if there is no room for it now.
    fn post(&mut self, part: Range<usize>) -> Result<Option<Request>> {
        Ok(match &mut self.end {
            End::Sender(sender) => sender.isend(&self.buffer, part)?.map(Request::Plugin),
            End::Receiver(receiver) => receiver.irecv(&self.buffer, part)?.map(Request::Plugin),
            End::Plain(plain) => plain.post(part).map(Request::Plain),
        })
    }

    /// The length of the message, once it is moved.
    fn test(&mut self, request: &mut Request) -> Result<Option<usize>> {
        match (request, &mut self.end) {
            (Request::Plugin(request), _) => request.test(),
            (Request::Plain(request), End::Plain(plain)) => plain.test(request, &self.buffer),
            (Request::Plain(_), _) => Err("a request of another connection".to_owned()),
        }
    }
}

fn connect_plain(
    options: &Options,
    world: &mut World,
    most: usize,
    receiver: usize,
) -> Result<Vec<Connection>> {
    let ends = options.plain.connect(world, options.connections as usize, receiver)?;
    let size = most.checked_mul(options.depth as usize).ok_or("the buffers are too large")?;
    ends.into_iter()
        .map(|end| Ok(Connection { end: End::Plain(end), buffer: Region::new(size)? }))
        .collect()
}

fn connect(
    options: &Options,
    plugin: &Plugin,
    world: &mut World,
    most: usize,
    receiver: usize,
) -> Result<Vec<Connection>> {
    let count = options.connections as usize;
    let receives = world.rank() == receiver;
    let mut listeners: Vec<Listener> = vec![];
    if receives {
        for _ in 0..count {
            listeners.push(plugin.listen(options.network.device)?);
        }
    }
    let handles: Vec<Vec<u8>> =
        listeners.iter().map(|listener| listener.handle().to_vec()).collect();
    let handles = world.all_gather(&handles)?.swap_remove(receiver);
    let mut connecting: Vec<Connecting> = vec![];
    if !receives {
        for handle in handles {
            let handle: [u8; HANDLE_SIZE] = handle
                .try_into()
                .map_err(|_| "the peer shared a handle of another size".to_owned())?;
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
                format!("connection {at} with {}: {error}", world.describe(1 - world.rank()))
            })?;
        }
        wait.idle(world, || "connecting".to_owned())?;
    }
    let size = most.checked_mul(options.depth as usize).ok_or("the buffers are too large")?;
    ends.into_iter()
        .flatten()
        .map(|end| {
            let buffer = Region::new(size)?;
            match &end {
                End::Sender(sender) => sender.register(&buffer)?,
                End::Receiver(receiver) => receiver.register(&buffer)?,
                End::Plain(_) => {}
            }
            Ok(Connection { end, buffer })
        })
        .collect()
}

/// The messages of one size.
struct Run<'a> {
    options: &'a Options,
    world: &'a mut World,
    connections: &'a mut [Connection],
    size: usize,
}

/// A rank's seconds, median and 99th percentile of its messages' seconds, processor time, and number of wrong messages.
type Mine = (f64, f64, f64, f64, u64);

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
        let (mut latencies, mut wrong) = (vec![], 0);
        if options.warmup > 0 {
            wrong += self.stream(options.first(), |_| Check::All, &mut latencies)?;
            wrong +=
                self.stream(options.warmup, |message| options.check(message), &mut latencies)?;
        }
        latencies.clear();
        latencies.reserve(self.options.iterations as usize * self.connections.len());
        self.world.barrier()?;
        let (start, cpu) = (Instant::now(), processor_time());
        wrong +=
            self.stream(options.iterations, |message| options.check(message), &mut latencies)?;
        let seconds = start.elapsed().as_secs_f64();
        let cpu = processor_time() - cpu;
        latencies.sort_by(f64::total_cmp);
        // A receiver knows when all has arrived and what was wrong, a sender how long each message took.
        let receives = self.connections.iter().any(|connection| connection.end.receives());
        let mine = (
            if receives { seconds } else { 0.0 },
            percentile(&latencies, 0.5),
            percentile(&latencies, 0.99),
            cpu,
            wrong,
        );
        let all = self.world.all_gather(&mine)?;
        let longest = |of: fn(&Mine) -> f64| all.iter().map(of).fold(0.0, f64::max);
        let seconds = longest(|rank| rank.0);
        let messages = f64::from(self.options.iterations) * self.connections.len() as f64;
        let [send_cpu, receive_cpu] =
            [SENDS, RECEIVES].map(|rank| self.per_gigabyte(all[rank].3, messages));
        Ok(Row {
            size: self.size as u64,
            time_us: seconds / messages * 1e6,
            bandwidth: if seconds > 0.0 {
                self.size as f64 * messages / seconds / 1e9
            } else {
                0.0
            },
            p50_us: longest(|rank| rank.1) * 1e6,
            p99_us: longest(|rank| rank.2) * 1e6,
            send_cpu,
            receive_cpu,
            wrong: all.iter().map(|rank| rank.4).sum(),
        })
    }

    /// Seconds for each GB of these messages; 0 if they are empty.
    fn per_gigabyte(&self, seconds: f64, messages: f64) -> f64 {
        let bytes = self.size as f64 * messages;
        if bytes > 0.0 { seconds / bytes * 1e9 } else { 0.0 }
    }

    /// One message at a time from rank 1 to rank 0 and back.
    fn round_trips(&mut self) -> Result<Row> {
        let options = self.options;
        let mut wrong = 0;
        if options.warmup > 0 {
            wrong += self.bounce(options.first(), |_| Check::All, &mut vec![])?;
            wrong += self.bounce(options.warmup, |message| options.check(message), &mut vec![])?;
        }
        let mut trips = Vec::with_capacity(options.iterations as usize);
        self.world.barrier()?;
        let cpu = processor_time();
        wrong += self.bounce(options.iterations, |message| options.check(message), &mut trips)?;
        let cpu = processor_time() - cpu;
        let total: f64 = trips.iter().sum();
        trips.sort_by(f64::total_cmp);
        let mine = (total, percentile(&trips, 0.5), percentile(&trips, 0.99), cpu, wrong);
        let all = self.world.all_gather(&mine)?;
        let (total, p50, p99, ..) = all[SENDS];
        let count = f64::from(self.options.iterations);
        let [send_cpu, receive_cpu] =
            [SENDS, RECEIVES].map(|rank| self.per_gigabyte(all[rank].3, count));
        Ok(Row {
            size: self.size as u64,
            time_us: total / count * 1e6,
            bandwidth: if total > 0.0 { self.size as f64 * count / total / 1e9 } else { 0.0 },
            p50_us: p50 * 1e6,
            p99_us: p99 * 1e6,
            send_cpu,
            receive_cpu,
            wrong: all.iter().map(|(.., wrong)| wrong).sum(),
        })
    }

    /// Sends `count` messages there and back, adds each one's seconds to `trips`, and counts wrong ones.
    fn bounce(
        &mut self,
        count: u32,
        check: impl Fn(u32) -> Check,
        trips: &mut Vec<f64>,
    ) -> Result<u64> {
        let starts = self.world.rank() == SENDS;
        let part = 0..self.size;
        let mut wrong = 0;
        for message in 0..count {
            let check = check(message);
            let right = |bytes: &[u8]| is_filled(bytes, 0, message, check);
            if starts {
                self.connections[0]
                    .buffer
                    .write(part.clone(), |bytes| fill(bytes, 0, message, check))?;
                let back = self.post(1)?;
                let start = Instant::now();
                let there = self.post(0)?;
                let size = self.complete_trip(there, back)?;
                trips.push(start.elapsed().as_secs_f64());
                let right = self.connections[1].buffer.read(part.clone(), right)?;
                wrong += u64::from(size != self.size || !right);
            } else {
                let there = self.post(0)?;
                let size = self.complete(0, there)?;
                let [from, to] = &self.connections else {
                    return Err("two connections are needed".to_owned());
                };
                let right = from.buffer.read(part.clone(), |bytes| {
                    to.buffer
                        .write(part.clone(), |out| out.copy_from_slice(bytes))
                        .map(|()| right(bytes))
                })??;
                wrong += u64::from(size != self.size || !right);
                let back = self.post(1)?;
                self.complete(1, back)?;
            }
        }
        Ok(wrong)
    }

    /// Posts one transfer on a connection.
    fn post(&mut self, connection: usize) -> Result<Request> {
        let mut wait = Wait::new();
        loop {
            let size = self.size;
            if let Some(request) = self.connections[connection].post(0..size)? {
                return Ok(request);
            }
            wait.idle(self.world, || "posting a message".to_owned())?;
        }
    }

    /// Waits for a transfer and gives its length.
    fn complete(&mut self, connection: usize, mut request: Request) -> Result<usize> {
        let mut wait = self.options.driver.wait();
        loop {
            if let Some(size) = self.connections[connection].test(&mut request)? {
                return Ok(size);
            }
            wait.idle(self.world, || format!("moving a message of {} bytes", self.size))?;
        }
    }

    /// Waits for a message on its way there and for the one that comes back, and gives the latter's length. It asks for both in
    /// turn, as NCCL's proxy does: a plugin may move a message only while it is asked for it.
    fn complete_trip(&mut self, mut there: Request, mut back: Request) -> Result<usize> {
        let mut wait = self.options.driver.wait();
        let (mut sent, mut received) = (false, None);
        loop {
            if !sent {
                sent = self.connections[0].test(&mut there)?.is_some();
            }
            if received.is_none() {
                received = self.connections[1].test(&mut back)?;
            }
            match received {
                Some(size) if sent => return Ok(size),
                _ => {
                    wait.idle(self.world, || format!("moving a message of {} bytes", self.size))?
                }
            }
        }
    }

    /// Moves `count` messages on every connection, adds the seconds of each sent one to `latencies`, and counts wrong ones.
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
                    if !connection.end.receives() {
                        let fill = |bytes: &mut [u8]| fill(bytes, at, message, check(message));
                        connection.buffer.write(part.clone(), fill)?;
                    }
                    let request = connection.post(part).map_err(explain)?;
                    let Some(request) = request else { break };
                    in_flight.push_back(InFlight { request, message, since: Instant::now() });
                    posted[at] += 1;
                    moved = true;
                }
                if let Some(InFlight { request, message, since }) = in_flight.front_mut()
                    && let Some(size) = connection.test(request).map_err(explain)?
                {
                    if connection.end.receives() {
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

/// Seconds that the threads of this process have used, with their system calls.
fn processor_time() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// The value below which a share of the sorted ones lies; 0 if there is none.
fn percentile(sorted: &[f64], share: f64) -> f64 {
    let at = (sorted.len().saturating_sub(1) as f64 * share).round() as usize;
    sorted.get(at).copied().unwrap_or(0.0)
}

/// The number that marks a message.
fn stamp(connection: usize, message: u32) -> u64 {
    (connection as u64 + 1) << 32 | u64::from(message)
}

/// The `i`-th eight bytes of a message that is checked whole. They differ between messages and within a message.
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
