//! `evenkeel-bench collective`: Gloo's benchmark over Evenkeel's collectives, with the same flags and columns.

mod exercise;

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use clap::{ArgAction, Args, ValueEnum};
use evenkeel_collectives::{
    Auto, Call, Group, Launch, MemoryStore, Op, PrefixStore, Store, Tcp, TcpStore, TcpStoreServer,
    Tls, TransportKind, store,
};
use half::f16;
use serde::Serialize;

use crate::cli::options::RankOptions;
use crate::error::Result;
use crate::output::plot::{Chart, Line};
use crate::ranks::spawn::{check, spawn};
use exercise::{Benchmark, Details, Exercise, Number};

/// Elements of the sweep where no number is given.
const SWEEP: [usize; 21] = [
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000,
    500_000, 1_000_000, 2_000_000, 5_000_000,
];
/// Maximum number of samples of a row.
const MAX_ITERATIONS: u64 = 1_000_000;
/// Maximum number of errors shown for a row.
const MAX_ERRORS: usize = 3;

/// How the ranks reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Transport {
    Tcp,
    /// TCP, encrypted: --cert, --pkey and --ca-file or --ca-path are needed
    Tls,
    /// Shared memory
    Shm,
    /// Shared memory within a host, TCP between hosts
    Auto,
    /// RDMA, or an error; NCCL_IB_HCA chooses the port
    Rdma,
}

/// Times, and what was wrong with results.
type Measured = (Vec<Duration>, Vec<String>);

/// What to measure, between whom.
#[derive(Args, Clone, Debug)]
#[command(
    disable_help_flag = true,
    after_help = "\
Bandwidth is bytes of the buffer times iterations over the sum of the latencies, GB/s (10^9). Rank 0's times are shown.

Examples:
  evenkeel-bench collective --spawn 2
  evenkeel-bench collective --spawn 4 --transport shm --elements 1000 allreduce_ring_chunked
  evenkeel-bench collective --spawn 64 --in-process --elements 1
  evenkeel-bench collective --size 2 --rank 0 --redis-host 10.0.0.1 --prefix run-7 allreduce
  mpirun -np 4 evenkeel-bench collective --shared-path /shared/run-7 allgather"
)]
pub(crate) struct Options {
    /// The benchmark
    #[arg(value_enum, default_value_t = Benchmark::Allreduce)]
    benchmark: Benchmark,
    /// The number of ranks [else: the launcher's]
    #[arg(short, long, env = "WORLD_SIZE", value_name = "N")]
    size: Option<usize>,
    /// This process's rank, from 0 [else: the launcher's]
    #[arg(short, long, env = "RANK", value_name = "N")]
    rank: Option<usize>,
    /// Start this many ranks on this machine
    #[arg(long, value_name = "N", conflicts_with_all = ["rank", "size"])]
    spawn: Option<usize>,
    /// Start them as threads of this process
    #[arg(long, requires = "spawn", conflicts_with = "place")]
    in_process: bool,
    /// Rendezvous through this Redis server
    #[arg(short = 'h', long, value_name = "HOST", group = "place")]
    redis_host: Option<String>,
    /// Its port
    #[arg(short = 'p', long, default_value_t = 6379, value_name = "PORT")]
    redis_port: u16,
    /// Rendezvous through this folder, which all ranks share
    #[arg(long, value_name = "FOLDER", group = "place")]
    shared_path: Option<String>,
    /// Rendezvous through this store: file:FOLDER, tcp://HOST:PORT or redis://HOST:PORT
    #[arg(long, value_name = "ADDRESS", group = "place")]
    store: Option<String>,
    /// Name or address of rank 0, which serves a store if no other is named
    #[arg(long, env = "MASTER_ADDR", value_name = "HOST")]
    master_addr: Option<String>,
    /// Port of rank 0
    #[arg(long, env = "MASTER_PORT", value_name = "PORT")]
    master_port: Option<u16>,
    /// Key prefix of this run in the store; every run needs its own
    #[arg(short = 'x', long, default_value = "evenkeel", value_name = "NAME")]
    prefix: String,
    /// How the ranks reach each other; tcp also goes by the plugin's settings
    #[arg(short, long, value_enum, default_value_t = Transport::Tcp, value_name = "NAME")]
    transport: Transport,
    /// Network interface for tcp [default: as NCCL_SOCKET_IFNAME says; with --spawn lo]
    #[arg(long, value_name = "NAME")]
    tcp_device: Option<String>,
    /// Certificate that this rank shows, for tls: a PEM file
    #[arg(long, value_name = "FILE")]
    cert: Option<PathBuf>,
    /// Its key
    #[arg(long, value_name = "FILE")]
    pkey: Option<PathBuf>,
    /// Certificates of the authority that has signed all ranks' certificates
    #[arg(long, value_name = "FILE", conflicts_with = "ca_path")]
    ca_file: Option<PathBuf>,
    /// A folder of such files
    #[arg(long, value_name = "FOLDER")]
    ca_path: Option<PathBuf>,
    /// Accepted for Gloo's command lines, without effect: the calling thread always reads and writes the sockets
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", action = ArgAction::Set, default_value_t = false, hide_default_value = true)]
    sync: bool,
    /// Accepted for Gloo's command lines, without effect: the calling thread always polls for 2 ms before it sleeps
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", action = ArgAction::Set, default_value_t = false, hide_default_value = true)]
    busy_poll: bool,
    /// Number of elements (float32); several are separated by commas; -1: all from 1 to 5,000,000 [default: -1]
    #[arg(long, value_delimiter = ',', value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(-1..=1 << 40))]
    elements: Vec<i64>,
    /// How long to measure each row, such as 2s or 500ms
    #[arg(long, default_value = "2s", value_parser = time, value_name = "TIME")]
    iteration_time: Duration,
    /// Number of iterations, instead of a time
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=MAX_ITERATIONS), value_name = "N")]
    iteration_count: Option<u64>,
    /// Number of untimed iterations before that
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=100_000), value_name = "N")]
    warmup_iters: u64,
    /// Number of input buffers of each rank, which an allreduce combines first
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64), value_name = "N")]
    inputs: u16,
    /// Number of threads of each rank that run the benchmark at the same time, each with its own tag
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64), value_name = "N")]
    threads: u16,
    /// Base of allreduce_bcube
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(2..=64), value_name = "N")]
    base: u16,
    /// Elements of 16 bits (float16)
    #[arg(long)]
    halfprecision: bool,
    /// Messages of sendrecv_stress
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1_000_000), value_name = "N")]
    messages: u32,
    /// Other ranks of pairwise_exchange
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=128), value_name = "N")]
    destinations: u16,
    /// Do not verify results
    #[arg(long)]
    no_verify: bool,
    /// Show all errors that are found, not the first ones
    #[arg(long)]
    show_all_errors: bool,
    /// Show times in nanoseconds
    #[arg(long)]
    nanos: bool,
    /// One line of JSON instead of the table
    #[arg(long)]
    json: bool,
    /// Also draw the times by elements into this file, as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Seconds to wait for the other ranks, and later for any progress
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400), value_name = "SECONDS")]
    timeout: u64,
    /// The process that started this rank with --spawn
    #[arg(long, hide = true)]
    spawned_by: Option<i32>,
    /// Print help
    #[arg(long, action = ArgAction::Help)]
    help: Option<bool>,
}

/// A row, times in microseconds.
#[derive(Clone, Copy, Debug, Serialize)]
struct Row {
    bytes: usize,
    elements: usize,
    min_us: f64,
    p50_us: f64,
    p99_us: f64,
    max_us: f64,
    bandwidth_gbps: f64,
    iterations: usize,
}

/// All that was measured.
#[derive(Debug, Serialize)]
struct Report<'a> {
    benchmark: &'a str,
    transport: &'a str,
    device: &'a str,
    ranks: usize,
    threads: u16,
    inputs: u16,
    element: &'static str,
    verified: bool,
    /// Threads of this process that move bytes for all its ranks.
    io_threads: usize,
    rows: Vec<Row>,
    errors: Vec<String>,
}

/// Measures.
///
/// # Errors
/// One line: which option makes no sense, which rank did not come or was lost.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    let right = match options.spawn {
        Some(ranks) if options.in_process => options.run_threads(ranks)?,
        Some(ranks) => return spawn(ranks),
        None => {
            let transport = options.transport_kind()?;
            let (group, _server) = options.join(&transport)?;
            options.sweep(&transport, &group)?
        }
    };
    Ok(if right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl Options {
    /// All ranks as threads of this process. Whether all results were right.
    fn run_threads(&self, ranks: usize) -> Result<bool> {
        check(ranks)?;
        let (transport, store) = (self.transport_kind()?, MemoryStore::new());
        let rank = |rank| {
            let group = Group::join(&store, rank, ranks, &transport, self.timeout());
            self.sweep(&transport, &group.map_err(|error| error.to_string())?)
        };
        let ended: Vec<Result<bool>> = thread::scope(|scope| {
            let all: Vec<_> = (0..ranks).map(|number| scope.spawn(move || rank(number))).collect();
            all.into_iter().map(joined).collect()
        });
        ended.into_iter().try_fold(true, |all, right| Ok(all & right?))
    }

    /// Measures on one rank. Whether all results were right.
    fn sweep(&self, transport: &TransportKind, group: &Group) -> Result<bool> {
        let mut printer = Printer::start(self, transport, group)?;
        for elements in element_counts(&self.elements) {
            let (samples, errors) = if self.halfprecision {
                self.measure::<f16>(group, elements)?
            } else {
                self.measure::<f32>(group, elements)?
            };
            printer.row(&samples, elements, errors)?;
        }
        printer.report.io_threads = io_threads();
        // No rank leaves before all have their figures.
        group.barrier(&Call::default()).map_err(|error| error.to_string())?;
        printer.finish()
    }

    fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    fn transport_kind(&self) -> Result<TransportKind> {
        let text = |error: evenkeel_collectives::Error| error.to_string();
        let here = self.spawned_by.is_some() || self.in_process;
        let tcp = match &self.tcp_device {
            Some(_) if self.transport == Transport::Rdma => {
                return Err("--tcp-device is no RDMA port: NCCL_IB_HCA chooses one".to_owned());
            }
            None if self.transport == Transport::Rdma => Tcp::over_rdma(),
            Some(device) => Tcp::on(device),
            None if here => Tcp::on("lo"),
            None => Tcp::from_env(),
        };
        match self.transport {
            Transport::Tcp | Transport::Rdma => tcp.map(TransportKind::Tcp).map_err(text),
            Transport::Auto => tcp.map(|tcp| TransportKind::Auto(Auto::new(tcp))).map_err(text),
            Transport::Shm => Ok(TransportKind::SharedMemory),
            Transport::Tls => {
                let authority = self.ca_file.as_ref().or(self.ca_path.as_ref());
                let (Some(certificate), Some(key), Some(authority)) =
                    (&self.cert, &self.pkey, authority)
                else {
                    return Err("--transport tls needs --cert, --pkey and --ca-file or --ca-path"
                        .to_owned());
                };
                tcp.and_then(|tcp| Tls::new(tcp, certificate, key, authority))
                    .map(TransportKind::Tls)
                    .map_err(text)
            }
        }
    }

    /// Joins the other ranks; also gives the store's server where this rank has it.
    fn join(&self, transport: &TransportKind) -> Result<(Group, Option<TcpStoreServer>)> {
        let named = match (&self.redis_host, &self.shared_path, &self.store) {
            (Some(host), ..) => Some(format!("redis://{host}:{}", self.redis_port)),
            (_, Some(folder), _) => Some(format!("file:{folder}")),
            (.., store) => store.clone(),
        };
        let text = |error: evenkeel_collectives::Error| error.to_string();
        let mut server = None;
        let (rank, size, store): (_, _, Arc<dyn Store>) = match named {
            // Ranks that were started here are tied to who started them, wherever they meet.
            Some(address) if self.spawned_by.is_none() => {
                let (rank, size) = self.launched()?;
                (rank, size, store::open(&address, self.timeout()).map_err(text)?)
            }
            named => {
                let config = self.ranks().rank_config()?;
                let store = match named {
                    Some(address) => store::open(&address, self.timeout()).map_err(text)?,
                    None => {
                        if config.rank == 0 {
                            let serves = match config.listener {
                                Some(listener) => TcpStoreServer::serve(listener),
                                None => TcpStoreServer::bind(("0.0.0.0", config.port)),
                            };
                            server = Some(serves.map_err(text)?);
                        }
                        let address = format!("{}:{}", config.host, config.port);
                        Arc::new(TcpStore::connect(&address, self.timeout()).map_err(text)?)
                    }
                };
                (config.rank, config.world_size, store)
            }
        };
        let store = PrefixStore::new(store, &self.prefix);
        let group = Group::join(&store, rank, size, transport, self.timeout()).map_err(text)?;
        Ok((group, server))
    }

    fn launched(&self) -> Result<(usize, usize)> {
        if let (Some(rank), Some(size)) = (self.rank, self.size) {
            return Ok((rank, size));
        }
        let launch =
            Launch::from_env().map_err(|error| format!("{error}; or give --rank and --size"))?;
        Ok((self.rank.unwrap_or(launch.rank), self.size.unwrap_or(launch.size)))
    }

    fn ranks(&self) -> RankOptions {
        RankOptions {
            rank: self.rank,
            world_size: self.size,
            master_addr: self.master_addr.clone(),
            master_port: self.master_port,
            spawn: None,
            timeout: self.timeout,
            spawned_by: self.spawned_by,
        }
    }

    /// The times of all threads' iterations, and what was wrong with results.
    fn measure<N: Number>(&self, group: &Group, elements: usize) -> Result<Measured> {
        let results: Vec<Result<_>> = thread::scope(|scope| {
            let threads: Vec<_> = (0..u32::from(self.threads))
                .map(|tag| scope.spawn(move || self.measure_one::<N>(group, elements, tag)))
                .collect();
            threads.into_iter().map(joined).collect()
        });
        let (mut samples, mut errors) = (vec![], vec![]);
        for result in results {
            let (times, wrong) = result?;
            samples.extend(times);
            errors.extend(wrong);
        }
        Ok((samples, errors))
    }

    fn measure_one<N: Number>(&self, group: &Group, elements: usize, tag: u32) -> Result<Measured> {
        let text = |error: evenkeel_collectives::Error| error.to_string();
        let call = Call::default().tag(tag);
        let details = Details {
            inputs: self.inputs.into(),
            base: self.base.into(),
            messages: self.messages as usize,
            destinations: self.destinations.into(),
        };
        let mut exercise = Exercise::<N>::new(self.benchmark, group, elements, details)?;
        let mut errors = vec![];
        if !self.no_verify {
            exercise.fill();
            exercise.once(group, &call).map_err(text)?;
            errors = exercise.wrong();
        }
        // Repeated sums overflow to infinities and NaNs, which some processors compute slowly.
        exercise.clear();
        let mut warm = Duration::ZERO;
        for _ in 0..self.warmup_iters {
            let begun = Instant::now();
            exercise.once(group, &call).map_err(text)?;
            warm = begun.elapsed();
        }
        let mut iterations = [self.iteration_count.unwrap_or_else(|| {
            let each = warm.as_nanos().max(100);
            (self.iteration_time.as_nanos() / each).clamp(1, MAX_ITERATIONS.into()) as u64
        })];
        // All ranks run as many iterations as the slowest one estimates.
        group.allreduce_of(&mut iterations, Op::Min, &call).map_err(text)?;
        let mut samples = Vec::with_capacity(iterations[0] as usize);
        for _ in 0..iterations[0] {
            let begun = Instant::now();
            exercise.once(group, &call).map_err(text)?;
            samples.push(begun.elapsed());
        }
        Ok((samples, errors))
    }
}

/// The rows to measure. A negative number, or none, stands for the whole sweep, as in Gloo's benchmark.
fn element_counts(given: &[i64]) -> Vec<usize> {
    if given.is_empty() {
        return SWEEP.to_vec();
    }
    let counts =
        |given: &i64| usize::try_from(*given).map_or_else(|_| SWEEP.to_vec(), |count| vec![count]);
    given.iter().flat_map(counts).collect()
}

/// The result of a thread.
fn joined<T>(thread: thread::ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread.join().unwrap_or_else(|_| Err("a thread panicked".to_owned()))
}

/// How many threads of this process wait for the network.
fn io_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    // One that ends meanwhile has no name.
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
    tasks.filter_map(name).filter(|name| name.starts_with("evenkeel-io")).count()
}

/// A time such as 2s or 500ms.
fn time(text: &str) -> std::result::Result<Duration, String> {
    let wrong = || format!("{text:?} is not a time: write 2s or 500ms");
    let (number, unit) = match text.strip_suffix("ms") {
        Some(number) => (number, Duration::from_millis(1)),
        None => (text.strip_suffix('s').ok_or_else(wrong)?, Duration::from_secs(1)),
    };
    let number: u32 = number.parse().map_err(|_| wrong())?;
    if number == 0 || number > 86_400_000 { Err(wrong()) } else { Ok(unit * number) }
}

impl Row {
    fn new(samples: &[Duration], elements: usize, element: usize) -> Self {
        let mut sorted: Vec<f64> =
            samples.iter().map(|time| time.as_nanos() as f64 / 1e3).collect();
        sorted.sort_by(f64::total_cmp);
        let at = |part: f64| {
            let place = ((sorted.len() as f64 * part) as usize).min(sorted.len().saturating_sub(1));
            sorted.get(place).copied().unwrap_or(0.0)
        };
        let sum: f64 = sorted.iter().sum();
        let bytes = elements * element;
        let carried = bytes as f64 * sorted.len() as f64;
        Self {
            bytes,
            elements,
            min_us: at(0.0),
            p50_us: at(0.5),
            p99_us: at(0.99),
            max_us: at(1.0),
            bandwidth_gbps: if sum > 0.0 { carried / sum / 1e3 } else { 0.0 },
            iterations: sorted.len(),
        }
    }
}

impl Report<'_> {
    fn chart(&self) -> Chart {
        let line = |name: &str, of: fn(&Row) -> f64| Line {
            name: name.to_owned(),
            points: self.rows.iter().map(|row| (row.elements as f64, of(row))).collect(),
        };
        let Self { benchmark, transport, ranks, element, .. } = self;
        Chart {
            title: format!("{benchmark}, {ranks} ranks over {transport}"),
            x: format!("elements ({element})"),
            y: "us".to_owned(),
            lines: vec![
                line("p99", |row| row.p99_us),
                line("p50", |row| row.p50_us),
                line("min", |row| row.min_us),
            ],
        }
    }
}

/// Writes a run as it goes, on rank 0.
struct Printer<'a> {
    report: Report<'a>,
    options: &'a Options,
    prints: bool,
}

impl<'a> Printer<'a> {
    fn start(options: &'a Options, transport: &'a TransportKind, group: &Group) -> Result<Self> {
        let (transport, device) = match transport {
            TransportKind::Tcp(tcp) if options.transport == Transport::Rdma => {
                ("rdma", tcp.device())
            }
            TransportKind::Tcp(tcp) => ("tcp", tcp.device()),
            TransportKind::Tls(tls) => ("tls", tls.device()),
            TransportKind::SharedMemory => ("shm", ""),
            TransportKind::Auto(auto) => ("auto", auto.device()),
        };
        let report = Report {
            benchmark: options.benchmark.name(),
            transport,
            device,
            ranks: group.size(),
            threads: options.threads,
            inputs: options.inputs,
            element: if options.halfprecision { "float16" } else { "float32" },
            verified: !options.no_verify,
            io_threads: 0,
            rows: vec![],
            errors: vec![],
        };
        let printer = Self { report, options, prints: group.rank() == 0 };
        let unit = if options.nanos { "ns" } else { "us" };
        let mut text = format!(
            "# {} of {}, {} ranks, {transport} {device}, {} inputs, {} threads\n",
            options.benchmark.name(),
            printer.report.element,
            group.size(),
            options.inputs,
            options.threads
        );
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{:>12}{:>12}{:>12}{:>12}{:>12}{:>12}{:>18}{:>12}",
            "size (B)",
            "elements",
            format!("min ({unit})"),
            format!("p50 ({unit})"),
            format!("p99 ({unit})"),
            format!("max ({unit})"),
            "bandwidth (GB/s)",
            "iterations"
        );
        printer.say(&text)?;
        Ok(printer)
    }

    /// Prints, unless it is to be JSON.
    fn say(&self, text: &str) -> Result<()> {
        if self.prints && !self.options.json {
            print(text)?;
        }
        Ok(())
    }

    fn row(&mut self, samples: &[Duration], elements: usize, errors: Vec<String>) -> Result<()> {
        let element = if self.options.halfprecision { 2 } else { 4 };
        let row = Row::new(samples, elements, element);
        let scaled = |us: f64| {
            if self.options.nanos { format!("{:.0}", us * 1e3) } else { format!("{us:.1}") }
        };
        self.say(&format!(
            "{:>12}{:>12}{:>12}{:>12}{:>12}{:>12}{:>18.3}{:>12}\n",
            row.bytes,
            row.elements,
            scaled(row.min_us),
            scaled(row.p50_us),
            scaled(row.p99_us),
            scaled(row.max_us),
            row.bandwidth_gbps,
            row.iterations
        ))?;
        let shown = if self.options.show_all_errors { errors.len() } else { MAX_ERRORS };
        let left = errors.len().saturating_sub(shown);
        self.report.rows.push(row);
        self.report.errors.extend(errors.into_iter().take(shown));
        if left > 0 {
            self.report.errors.push(format!("{elements} elements: {left} more"));
        }
        Ok(())
    }

    /// Whether all results were right.
    fn finish(self) -> Result<bool> {
        if self.options.json && self.prints {
            let json = serde_json::to_string(&self.report);
            print(&format!("{}\n", json.map_err(|error| format!("cannot write JSON: {error}"))?))?;
        }
        if let Some(file) = self.options.plot.as_ref().filter(|_| self.prints) {
            let drawn = self.report.chart().draw();
            std::fs::write(file, drawn).map_err(|error| format!("{}: {error}", file.display()))?;
        }
        if self.report.errors.is_empty() {
            return Ok(true);
        }
        // Every rank prints its own errors.
        eprintln!("VERIFY ERRORS");
        self.report.errors.iter().for_each(|error| eprintln!("{error}"));
        Ok(false)
    }
}

fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|error| format!("cannot write the table: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_minus_one_is_the_sweep() {
        assert_eq!(element_counts(&[]), SWEEP);
        assert_eq!(element_counts(&[-1]), SWEEP);
        assert_eq!(element_counts(&[7, 0]), [7, 0]);
    }

    #[test]
    fn duration_is_parsed_or_refused() {
        assert_eq!(time("2s"), Ok(Duration::from_secs(2)));
        assert_eq!(time("500ms"), Ok(Duration::from_millis(500)));
        for wrong in ["", "2", "s", "0s", "-1s", "1.5s", "99999999999s"] {
            assert!(time(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn row_has_order_statistics() {
        let samples: Vec<_> = (1..=100).rev().map(Duration::from_micros).collect();
        let row = Row::new(&samples, 250, 4);
        assert_eq!((row.min_us, row.p50_us, row.p99_us, row.max_us), (1.0, 51.0, 100.0, 100.0));
        assert_eq!((row.bytes, row.iterations), (1000, 100));
        // 1000 bytes in 50.5 microseconds.
        assert!((row.bandwidth_gbps - 1000.0 / 50.5 / 1e3).abs() < 1e-9);
    }
}
