//! `evenkeel-bench reduction`: all-reduces through a plugin's CollNet table, every element checked, and the time of each
//! step at the clients and at the servers.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use evenkeel_nccl_abi::HANDLE_SIZE;
use serde::{Deserialize, Serialize};

use crate::element::{Op, Type};
use crate::group::Group;
use crate::host::collective::{Coll, Collectives, Elements, Registered};
use crate::host::{Region, Result};
use crate::options::{NetworkOptions, RankOptions};
use crate::servers::{Passage, Servers};
use crate::size::Size;
use crate::spawn;
use crate::statistics::Statistics;
use crate::wait::Wait;

/// What to measure.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  Four ranks and two servers on this machine:
    evenkeel-bench reduction --ranks 4 --servers 2 --size 64M --plugin ./libnccl-net-evenkeel.so
  One rank, with servers that run elsewhere:
    EVENKEEL_REDUCTION_SERVERS=10.0.0.8:7470,10.0.0.9:7470 evenkeel-bench reduction \\
      --rank 0 --world-size 2 --master-addr 10.0.0.1 --master-port 29500
  As NCCL cuts a vector:
    evenkeel-bench reduction --ranks 2 --servers 2 --chunksize 512K --depth 8

Another plugin with a CollNet table is driven in the same way, without --servers.
Exit status: 0 when all went well, 1 when an element is wrong, a rank is lost or something else failed, 2 for bad flags.")]
pub(crate) struct Options {
    /// Bytes of the vector that all ranks reduce; K, M and G are powers of 1024
    #[arg(long, default_value = "64M", value_name = "SIZE")]
    size: Size,
    /// Bytes of each operation [default: the whole vector]
    #[arg(long, value_name = "SIZE")]
    chunksize: Option<Size>,
    /// Most operations in flight
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=32), value_name = "N")]
    depth: u16,
    /// Timed reductions of the vector
    #[arg(short = 'n', long = "iters", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..), value_name = "N")]
    iterations: u32,
    /// Reductions before those
    #[arg(short = 'w', long = "warmup_iters", default_value_t = 2, value_name = "N")]
    warmup: u32,
    /// Check every element of this many reductions; 0: none
    #[arg(short = 'c', long = "check", default_value_t = 1, value_name = "N")]
    check: u32,
    /// Element type
    #[arg(short = 'd', long = "datatype", value_enum, default_value_t = Type::Float32, value_name = "TYPE")]
    kind: Type,
    /// Reduction
    #[arg(short = 'o', long = "op", value_enum, default_value_t = Op::Sum, value_name = "OP")]
    op: Op,
    /// Start this many reduction servers on this machine
    #[arg(long, value_name = "N", requires = "spawn")]
    servers: Option<usize>,
    /// Threads of each of them [default: the cores]
    #[arg(long, value_name = "N", requires = "servers", value_parser = clap::value_parser!(u16).range(1..=1024))]
    server_threads: Option<u16>,
    /// Their program [default: evenkeel-reduction-server beside this one]
    #[arg(long, value_name = "FILE", requires = "servers")]
    server_program: Option<PathBuf>,
    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ranks: RankOptions,
    #[command(flatten)]
    network: NetworkOptions,
}

/// What the ranks measured.
#[derive(Debug, Serialize)]
struct Clients {
    ranks: usize,
    size: u64,
    chunksize: u64,
    #[serde(rename = "type")]
    kind: &'static str,
    redop: &'static str,
    /// Bytes of the vector per time, GB/s (10^9): mean over reductions and ranks.
    algbw: f64,
    wrong: u64,
    /// From an operation's begin to its end.
    e2e: Statistics,
    /// The call that begins it.
    req: Statistics,
}

/// What the servers noted.
#[derive(Debug, Serialize)]
struct OfServers {
    recv: Statistics,
    reduce: Statistics,
    send: Statistics,
}

/// Runs one rank, or starts servers and ranks.
///
/// # Errors
/// One line: what went wrong, and which rank is the cause where that is known.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let element = options.kind.bytes() as u64;
    let chunk = options.chunksize.map_or(options.size.0, |chunk| chunk.0);
    if options.size.0 < element || chunk < element {
        return Err(format!(
            "one {} has {element} bytes: nothing smaller can be reduced",
            options.kind.name()
        ));
    }
    if let Some(ranks) = options.ranks.spawn {
        let Some(count) = options.servers else { return spawn::spawn(ranks, &[]) };
        let servers =
            Servers::start(count, options.server_program.as_deref(), options.server_threads)?;
        let addresses = servers.addresses().join(",");
        let code = spawn::spawn(ranks, &[("EVENKEEL_REDUCTION_SERVERS", addresses)])?;
        print_servers(&servers.finish()?, options.json)?;
        return Ok(code);
    }
    let place = options.ranks.place()?;
    let mut group = Group::join(place)?;
    match measure(options, chunk / element * element, &mut group) {
        Ok(0) => Ok(ExitCode::SUCCESS),
        Ok(wrong) if group.rank() == 0 => {
            eprintln!("error: {wrong} wrong elements");
            Ok(ExitCode::FAILURE)
        }
        Ok(_) => Ok(ExitCode::FAILURE),
        Err(seen) => Err(group.fail(seen)),
    }
}

fn print_servers(all: &[Vec<Passage>], json: bool) -> Result<()> {
    let of = |step: fn(&Passage) -> [f64; 2]| {
        let times = all.iter().flatten().map(step).map(|[begin, end]| end - begin);
        Statistics::of(times.collect())
    };
    let steps = (of(|p| p.recv), of(|p| p.reduce), of(|p| p.send));
    let (Some(recv), Some(reduce), Some(send)) = steps else {
        return Err("the servers noted nothing".to_owned());
    };
    if json {
        let servers = OfServers { recv, reduce, send };
        return print_json("servers", &servers);
    }
    println!("# {} servers, each piece", all.len());
    println!("{}", Statistics::heading());
    for (name, line) in [("recv", recv), ("reduce", reduce), ("send", send)] {
        println!("{}", line.line(name));
    }
    Ok(())
}

fn print_json(name: &str, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string(value).map_err(|error| format!("the results: {error}"))?;
    println!("{{\"{name}\":{text}}}");
    Ok(())
}

/// Gives the number of wrong elements on all ranks.
fn measure(options: &Options, chunk: u64, group: &mut Group) -> Result<u64> {
    let (plugin, network) = options.network.open()?;
    let collectives = Collectives::open(&plugin, options.network.device)?;
    let (kind, op) = (options.kind.code(), options.op.code());
    if !collectives.supports(kind, op)? {
        return Err(format!(
            "{} does not reduce {} by {}",
            network.name,
            options.kind.name(),
            options.op.name()
        ));
    }
    let listener = collectives.listen(options.network.device)?;
    let handles = group.share(&listener.handle().to_vec())?;
    let handles: Option<Vec<[u8; HANDLE_SIZE]>> =
        handles.into_iter().map(|handle| handle.try_into().ok()).collect();
    let handles = handles.ok_or_else(|| "a rank shared no handle".to_owned())?;
    let coll = listener.connect(handles, group.rank())?;
    let element = options.kind.bytes();
    let bytes = options.size.0 as usize / element * element;
    let (own, result) = (Region::new(bytes)?, Region::new(bytes)?);
    let (from, to) = (coll.register(&own)?, coll.register(&result)?);
    let mut rank = Rank {
        options,
        coll: &coll,
        from: &from,
        to: &to,
        bytes,
        chunk: chunk as usize,
        times: Times::default(),
    };
    for _ in 0..options.warmup {
        rank.once(group)?;
    }
    rank.times = Times::default();
    group.barrier()?;
    let start = Instant::now();
    for _ in 0..options.iterations {
        rank.once(group)?;
    }
    let seconds = start.elapsed().as_secs_f64() / f64::from(options.iterations);
    let times = std::mem::take(&mut rank.times);
    let mut wrong = 0;
    for round in 0..u64::from(options.check) {
        result.write(0..bytes, |bytes| bytes.fill(0xa5))?;
        own.write(0..bytes, |bytes| options.kind.fill(bytes, group.rank(), round))?;
        rank.once(group)?;
        let ranks = group.members().len();
        wrong +=
            result.read(0..bytes, |bytes| options.kind.wrong(options.op, bytes, ranks, round))?;
    }
    let all: Vec<Mine> = group.share(&Mine { seconds, wrong, times })?;
    // Nobody leaves, and closes its connections, before all are done.
    group.barrier()?;
    let wrong = all.iter().map(|mine| mine.wrong).sum();
    if group.rank() == 0 {
        print_clients(options, &network.name, chunk, &all)?;
    }
    Ok(wrong)
}

/// What one rank measured.
#[derive(Serialize, Deserialize)]
struct Mine {
    /// Of one reduction of the vector.
    seconds: f64,
    wrong: u64,
    times: Times,
}

/// Seconds of each operation.
#[derive(Default, Serialize, Deserialize)]
struct Times {
    e2e: Vec<f64>,
    req: Vec<f64>,
}

fn print_clients(options: &Options, network: &str, chunk: u64, all: &[Mine]) -> Result<()> {
    let seconds = all.iter().map(|mine| mine.seconds).sum::<f64>() / all.len() as f64;
    let of = |which: fn(&Times) -> &Vec<f64>| {
        Statistics::of(all.iter().flat_map(|mine| which(&mine.times).clone()).collect())
    };
    let (Some(e2e), Some(req)) = (of(|times| &times.e2e), of(|times| &times.req)) else {
        return Err("nothing was measured".to_owned());
    };
    let clients = Clients {
        ranks: all.len(),
        size: options.size.0,
        chunksize: chunk,
        kind: options.kind.name(),
        redop: options.op.name(),
        algbw: options.size.0 as f64 / seconds / 1e9,
        wrong: all.iter().map(|mine| mine.wrong).sum(),
        e2e,
        req,
    };
    if options.json {
        return print_json("clients", &clients);
    }
    println!(
        "# {network}: {} ranks reduce {} bytes of {} in operations of {chunk}: {:.1} us, {:.3} GB/s, {} wrong",
        clients.ranks,
        clients.size,
        clients.kind,
        seconds * 1e6,
        clients.algbw,
        clients.wrong
    );
    println!("# Clients, each operation");
    println!("{}", Statistics::heading());
    println!("{}", e2e.line("e2e"));
    println!("{}", req.line("req"));
    Ok(())
}

/// This rank, ready.
struct Rank<'a> {
    options: &'a Options,
    coll: &'a Coll,
    from: &'a Registered,
    to: &'a Registered,
    bytes: usize,
    chunk: usize,
    times: Times,
}

impl Rank<'_> {
    /// Reduces the vector once, several operations at a time; the oldest one is asked, as NCCL does.
    fn once(&mut self, group: &mut Group) -> Result<()> {
        let (kind, op) = (self.options.kind, self.options.op);
        let mut running = VecDeque::new();
        let mut at = 0;
        let mut wait = Wait::new();
        while at < self.bytes || !running.is_empty() {
            let mut moved = false;
            while at < self.bytes && running.len() < usize::from(self.options.depth) {
                let part = at..(at + self.chunk).min(self.bytes);
                let count = part.len() / kind.bytes();
                let elements = Elements { count, kind: kind.code(), op: op.code() };
                let begin = Instant::now();
                let request = self.coll.all_reduce(self.from, self.to, part.clone(), elements)?;
                let Some(request) = request else { break };
                self.times.req.push(begin.elapsed().as_secs_f64());
                running.push_back((request, begin));
                at = part.end;
                moved = true;
            }
            if let Some((request, begin)) = running.front_mut()
                && request.test()?
            {
                self.times.e2e.push(begin.elapsed().as_secs_f64());
                running.pop_front();
                moved = true;
            }
            if moved {
                wait.progress();
            } else {
                wait.idle(group, || format!("all-reducing byte {at} of {}", self.bytes))?;
            }
        }
        Ok(())
    }
}
