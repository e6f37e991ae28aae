//! `evenkeel-bench collective`: Gloo's benchmark over Evenkeel's collectives, with the same flags and columns.

mod benchmark_parser;
mod exercise;
mod mpirun;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use clap::builder::BoolishValueParser;
use clap::{ArgAction, Args, ValueEnum};
use evenkeel_collectives::{
    Auto, Call, Group, Launch, MemoryStore, Op, PrefixStore, Store, Tcp, TcpStoreServer, Tls,
    TransportKind,
};
use half::f16;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::cli;
use crate::cli::options::{RankOptions, host_and_port};
use crate::cli::time::time;
use crate::compute::ComputeOptions;
use crate::error::Result;
use crate::output::plot::{Chart, Line};
use crate::output::record::{Output, OutputOptions};
use crate::output::statistics::quantile;
use crate::ranks::bootstrap::RankConfig;
use crate::ranks::spawn::{check, spawn};
use crate::workload::{self, Ranks, Workload};
use benchmark_parser::{BenchmarkParser, INSTEAD};
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
    /// RDMA, or an error; --ib-device or NCCL_IB_HCA chooses the port. ibverbs is its other name
    #[value(alias = "ibverbs")]
    Rdma,
}

/// Times in seconds, and what was wrong with results.
type Measured = (Vec<f64>, Vec<String>);

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
  mpirun -np 4 evenkeel-bench collective --mpi allgather"
)]
pub(crate) struct Options {
    /// The benchmark; Gloo's CUDA benchmarks are missing
    #[arg(value_parser = BenchmarkParser, default_value = "allreduce")]
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
    /// Take rank and number of ranks from mpirun; on one host, Open MPI's ranks need no other place to meet
    #[arg(long, conflicts_with = "spawn")]
    mpi: bool,
    /// Rendezvous through this Redis server
    #[arg(short = 'h', long, value_name = "HOST", group = "place")]
    redis_host: Option<String>,
    /// Its port
    #[arg(short = 'p', long, default_value_t = 6379, value_name = "PORT")]
    redis_port: u16,
    /// Rendezvous through this folder, which all ranks share
    #[arg(long, value_name = "FOLDER", group = "place")]
    shared_path: Option<String>,
    /// Rendezvous through this store: file:FOLDER, tcp://HOST:PORT, redis://HOST:PORT or rediss://HOST:PORT
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
    /// Network interfaces for tcp, tls and auto, separated by commas; threads take turns at them [default: as NCCL_SOCKET_IFNAME says; with --spawn lo]
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    tcp_device: Vec<String>,
    /// RDMA devices for ibverbs, such as mlx5_0, separated by commas; threads take turns at them [default: as NCCL_IB_HCA says]
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    ib_device: Vec<String>,
    /// Port of these devices [default: 1]
    #[arg(long, requires = "ib_device", value_parser = clap::value_parser!(u8).range(1..), value_name = "PORT")]
    ib_port: Option<u8>,
    /// Index of the port's GID [default: as NCCL_IB_GID_INDEX says, else that of a RoCE v2 address]
    #[arg(long, requires = "ib_device", value_name = "INDEX")]
    ib_index: Option<u8>,
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
    #[arg(long, value_name = "BOOL", value_parser = BoolishValueParser::new(), action = ArgAction::Set, default_value_t = false, hide_default_value = true)]
    sync: bool,
    /// With --sync=true. Accepted too, without effect: the calling thread always polls for 2 ms before it sleeps
    #[arg(long, value_name = "BOOL", value_parser = BoolishValueParser::new(), action = ArgAction::Set, default_value_t = false, hide_default_value = true)]
    busy_poll: bool,
    /// Number of elements (float32; of pairwise_exchange bytes); several are separated by commas; -1: all from 1 to 5,000,000 [default: -1]
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
    /// The rates of the ranks' links in any unit, one for each rank, separated by commas: allreduce and allreduce_direct fit their shares to them
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..), value_name = "RATE")]
    link_rates: Vec<u64>,
    /// Elements of 16 bits (float16)
    #[arg(long)]
    halfprecision: bool,
    /// Messages of sendrecv_stress and isendirecv_stress
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000), value_name = "N")]
    messages: u32,
    /// Other ranks with which each rank of pairwise_exchange exchanges a part of its buffer
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=16), value_name = "N")]
    destinations: u16,
    #[command(flatten)]
    compute: ComputeOptions,
    /// Do not verify results
    #[arg(long)]
    no_verify: bool,
    /// Verify results, which is the default: takes back --no-verify before it
    #[arg(long, overrides_with = "no_verify")]
    verify: bool,
    /// For Gloo's CUDA benchmarks, which are missing
    #[arg(long)]
    gpudirect: bool,
    /// Show all errors that are found, not the first ones
    #[arg(long)]
    show_all_errors: bool,
    /// Show times in nanoseconds
    #[arg(long)]
    nanos: bool,
    #[command(flatten)]
    output: OutputOptions,
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
#[derive(Clone, Debug, Serialize)]
struct Row {
    bytes: usize,
    elements: usize,
    min_us: f64,
    p50_us: f64,
    p99_us: f64,
    max_us: f64,
    bandwidth_gbps: f64,
    iterations: usize,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    samples_us: Vec<f64>,
}

/// All that was measured.
#[derive(Debug, Serialize)]
struct Report {
    benchmark: String,
    transport: String,
    device: String,
    ranks: usize,
    threads: u16,
    inputs: u16,
    element: &'static str,
    verified: bool,
    /// Threads of this process that move bytes for all its ranks.
    io_threads: usize,
    rows: Vec<Row>,
    /// Those of rank 0, of which each size has a few.
    errors: Vec<String>,
    wrong: u64,
}

/// Measures.
///
/// # Errors
/// One line: which option makes no sense, which rank did not come or was lost.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    options.check()?;
    match options.spawn {
        Some(ranks) if options.in_process => options.run_threads(ranks),
        Some(ranks) => spawn(ranks),
        None => {
            let options = options.with_rank_of_mpirun()?;
            workload::measure(&options, options.join()?)
        }
    }
}

/// The ranks of a run: a group of all of them for each transport.
pub(crate) struct Groups {
    all: Vec<Arc<Group>>,
    /// The interfaces or RDMA ports of the transports.
    device: String,
    in_process: bool,
    /// The store's server, where this rank has it.
    _server: Option<TcpStoreServer>,
}

impl Ranks for Groups {
    fn rank(&self) -> usize {
        self.all[0].rank()
    }

    fn is_thread(&self) -> bool {
        self.in_process && self.rank() > 0
    }

    fn gather<T: Serialize + DeserializeOwned>(&mut self, mine: &T) -> Result<Vec<T>> {
        let (group, call) = (&self.all[0], Call::default());
        let text = |error: evenkeel_collectives::Error| error.to_string();
        let mine = serde_json::to_vec(mine).map_err(|error| error.to_string())?;
        let mut lengths = vec![0u64; group.size()];
        lengths[group.rank()] = mine.len() as u64;
        group.allgather(bytemuck::cast_slice_mut(&mut lengths), &call).map_err(text)?;
        let lengths: Vec<usize> = lengths.into_iter().map(|length| length as usize).collect();
        let mut all = vec![0; lengths.iter().sum()];
        let before: usize = lengths[..group.rank()].iter().sum();
        all[before..before + mine.len()].copy_from_slice(&mine);
        group.allgatherv(&mut all, &lengths, &call).map_err(text)?;
        let mut rest = &all[..];
        let value = |length: usize| {
            let (value, others) = rest.split_at(length);
            rest = others;
            serde_json::from_slice(value).map_err(|error| format!("a rank sent {error}"))
        };
        lengths.into_iter().map(value).collect()
    }

    /// The group has found the cause already.
    fn fail(self, seen: String) -> String {
        seen
    }
}

impl Workload for Options {
    const NAME: &'static str = "collective";
    const WRONG: &'static str = "results are wrong";
    type Ranks = Groups;

    fn output(&self) -> &OutputOptions {
        &self.output
    }

    fn measure(&self, ranks: &mut Groups, output: &Output) -> Result<u64> {
        let (element, element_bytes) = self.element();
        let mut report = Report {
            benchmark: self.benchmark.name(),
            transport: cli::name(&self.transport),
            device: ranks.device.clone(),
            ranks: ranks.all[0].size(),
            threads: self.threads,
            inputs: self.inputs,
            element,
            verified: !self.no_verify,
            io_threads: 0,
            rows: vec![],
            errors: vec![],
            wrong: 0,
        };
        output.text(&report.heading(self.nanos))?;
        for elements in self.element_counts() {
            let (times, errors) = if self.sends_bytes() {
                self.measure_all::<u8>(&ranks.all, elements)?
            } else if self.halfprecision {
                self.measure_all::<f16>(&ranks.all, elements)?
            } else {
                self.measure_all::<f32>(&ranks.all, elements)?
            };
            let samples_us = self.output.samples_us(&times);
            let row = Row { samples_us, ..Row::new(times, elements, element_bytes) };
            output.text(&row.line(self.nanos))?;
            report.rows.push(row);
            report.wrong += errors.len() as u64;
            let shown = if self.show_all_errors { errors.len() } else { MAX_ERRORS };
            let left = errors.len().saturating_sub(shown);
            report.errors.extend(errors.into_iter().take(shown));
            if left > 0 {
                report.errors.push(format!("{elements} elements: {left} more"));
            }
        }
        report.io_threads = io_threads();
        output.finish(ranks, &report)?;
        if let Some(file) = self.plot.as_ref().filter(|_| ranks.rank() == 0) {
            let drawn = report.chart().draw();
            std::fs::write(file, drawn).map_err(|error| format!("{}: {error}", file.display()))?;
        }
        if report.wrong > 0 {
            // Every rank prints its own errors.
            eprintln!("VERIFY ERRORS");
            report.errors.iter().for_each(|error| eprintln!("{error}"));
        }
        Ok(report.wrong)
    }
}

impl Options {
    /// # Errors
    /// When options do not go together.
    fn check(&self) -> Result<()> {
        let is_rdma = self.transport == Transport::Rdma;
        if self.gpudirect {
            return Err(format!(
                "--gpudirect needs a CUDA benchmark, and there is none: {INSTEAD}"
            ));
        }
        if self.busy_poll && !self.sync {
            return Err("--busy-poll=true goes with --sync=true only".to_owned());
        }
        if is_rdma && !self.tcp_device.is_empty() {
            return Err(
                "--tcp-device is no RDMA port: --ib-device or NCCL_IB_HCA chooses one".to_owned()
            );
        }
        if !is_rdma && !self.ib_device.is_empty() {
            return Err("--ib-device is for --transport ibverbs".to_owned());
        }
        self.spawn.map_or(Ok(()), |ranks| self.check_link_rates(ranks))
    }

    fn check_link_rates(&self, ranks: usize) -> Result<()> {
        let rates = self.link_rates.len();
        if rates == 0 || rates == ranks {
            return Ok(());
        }
        Err(format!("--link-rates has {rates} rates for {ranks} ranks: one for each"))
    }

    /// The options with the rank and the number of ranks that mpirun has set, if they are to be those.
    fn with_rank_of_mpirun(&self) -> Result<Self> {
        let mut options = self.clone();
        if self.mpi {
            let launch = mpirun::launch()?;
            (options.rank, options.size) = (Some(launch.rank), Some(launch.size));
        }
        Ok(options)
    }

    /// All ranks as threads of this process.
    fn run_threads(&self, ranks: usize) -> Result<ExitCode> {
        check(ranks)?;
        let transports = self.transports()?;
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        let rank =
            |rank| workload::measure(self, self.groups(&store, rank, ranks, &transports, None)?);
        let ended: Vec<Result<ExitCode>> = thread::scope(|scope| {
            let all: Vec<_> = (0..ranks).map(|number| scope.spawn(move || rank(number))).collect();
            all.into_iter().map(joined).collect()
        });
        let failed = ended.into_iter().find(|code| *code != Ok(ExitCode::SUCCESS));
        failed.unwrap_or(Ok(ExitCode::SUCCESS))
    }

    /// Whether the elements are bytes, whatever else is asked for, as in Gloo's benchmark.
    fn sends_bytes(&self) -> bool {
        self.benchmark == Benchmark::PairwiseExchange
    }

    /// The name of the elements' type, and its length in bytes.
    fn element(&self) -> (&'static str, usize) {
        match (self.sends_bytes(), self.halfprecision) {
            (true, _) => ("uint8", 1),
            (false, true) => ("float16", 2),
            (false, false) => ("float32", 4),
        }
    }

    /// The rows to measure. The sweep leaves out what cannot be divided between the destinations.
    fn element_counts(&self) -> Vec<usize> {
        let least = if self.sends_bytes() { self.destinations.into() } else { 0 };
        element_counts(&self.elements, least)
    }

    fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    /// How the ranks reach each other: over each of the devices, of which threads take turns.
    fn transports(&self) -> Result<Vec<TransportKind>> {
        let kind = |tcp: Tcp| match self.transport {
            Transport::Auto => Ok(TransportKind::Auto(Auto::new(tcp))),
            Transport::Tls => self.tls(tcp),
            _ => Ok(TransportKind::Tcp(tcp)),
        };
        match self.transport {
            Transport::Shm => Ok(vec![TransportKind::SharedMemory]),
            _ => self.networks()?.into_iter().map(kind).collect(),
        }
    }

    /// The networks over these devices.
    fn networks(&self) -> Result<Vec<Tcp>> {
        let here = self.spawned_by.is_some() || self.in_process;
        let port = self.ib_port.unwrap_or(1);
        let networks: evenkeel_collectives::Result<Vec<Tcp>> = match self.transport {
            Transport::Rdma if self.ib_device.is_empty() => Tcp::over_rdma().map(|tcp| vec![tcp]),
            Transport::Rdma => {
                let open = |device: &String| Tcp::over_rdma_port(device, port, self.ib_index);
                self.ib_device.iter().map(open).collect()
            }
            _ if !self.tcp_device.is_empty() => {
                self.tcp_device.iter().map(|device| Tcp::on(device)).collect()
            }
            _ if here => Tcp::on("lo").map(|tcp| vec![tcp]),
            _ => Tcp::from_env().map(|tcp| vec![tcp]),
        };
        networks.map_err(|error| error.to_string())
    }

    fn tls(&self, tcp: Tcp) -> Result<TransportKind> {
        let authority = self.ca_file.as_ref().or(self.ca_path.as_ref());
        let (Some(certificate), Some(key), Some(authority)) = (&self.cert, &self.pkey, authority)
        else {
            return Err(
                "--transport tls needs --cert, --pkey and --ca-file or --ca-path".to_owned()
            );
        };
        let tls = Tls::new(tcp, certificate, key, authority);
        tls.map(TransportKind::Tls).map_err(|error| error.to_string())
    }

    /// Joins the other ranks, over each transport.
    fn join(&self) -> Result<Groups> {
        let transports = self.transports()?;
        let named = match (&self.redis_host, &self.shared_path, &self.store) {
            (Some(host), ..) => Some(format!("redis://{host}:{}", self.redis_port)),
            (_, Some(folder), _) => Some(format!("file:{folder}")),
            (.., Some(address)) => Some(address.clone()),
            _ if self.master_addr.is_none() && (self.mpi || mpirun::is_parent()) => {
                Some(mpirun::session_store()?)
            }
            _ => None,
        };
        let text = |error: evenkeel_collectives::Error| error.to_string();
        let mut server = None;
        let launch = match named {
            // Ranks that were started here are tied to who started them, wherever they meet.
            Some(_) if self.spawned_by.is_none() => Launch { store: named, ..self.launched()? },
            named => {
                let RankConfig { rank, world_size, host, port, listener, .. } =
                    self.ranks().rank_config()?;
                let mut store = named;
                if let Some(listener) = listener.filter(|_| store.is_none()) {
                    server = Some(TcpStoreServer::serve(listener).map_err(text)?);
                    store = Some(format!("tcp://{}", host_and_port(&host, port)));
                }
                Launch { rank, size: world_size, master: Some((host, port)), store }
            }
        };
        let store = launch.open_store(self.timeout()).map_err(text)?;
        self.groups(&store, launch.rank, launch.size, &transports, server)
    }

    /// The groups of all ranks, one for each transport.
    fn groups(
        &self,
        store: &Arc<dyn Store>,
        rank: usize,
        size: usize,
        transports: &[TransportKind],
        server: Option<TcpStoreServer>,
    ) -> Result<Groups> {
        self.check_link_rates(size)?;
        let join = |(index, transport): (usize, &TransportKind)| {
            let store = PrefixStore::new(Arc::clone(store), &format!("{}/{index}", self.prefix));
            let group =
                Group::join(&store, rank, size, transport, self.timeout()).and_then(|group| {
                    if let Some(rate) = self.link_rates.get(rank) {
                        group.set_link_rate(*rate, &Call::default())?;
                    }
                    Ok(group)
                });
            group.map(Arc::new).map_err(|error| error.to_string())
        };
        let devices: Vec<&str> = transports.iter().map(device).collect();
        Ok(Groups {
            all: transports.iter().enumerate().map(join).collect::<Result<_>>()?,
            device: devices.join(","),
            in_process: self.in_process,
            _server: server,
        })
    }

    fn launched(&self) -> Result<Launch> {
        if let (Some(rank), Some(size)) = (self.rank, self.size) {
            return Ok(Launch { rank, size, master: None, store: None });
        }
        let launch =
            Launch::from_env().map_err(|error| format!("{error}; or give --rank and --size"))?;
        let (rank, size) = (self.rank.unwrap_or(launch.rank), self.size.unwrap_or(launch.size));
        Ok(Launch { rank, size, ..launch })
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
    fn measure_all<N: Number>(&self, groups: &[Arc<Group>], elements: usize) -> Result<Measured> {
        let results: Vec<Result<_>> = thread::scope(|scope| {
            let threads: Vec<_> = (0..u32::from(self.threads))
                .zip(groups.iter().cycle())
                .map(|(tag, group)| {
                    scope.spawn(move || self.measure_one::<N>(group, elements, tag))
                })
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

    fn measure_one<N: Number>(
        &self,
        group: &Arc<Group>,
        elements: usize,
        tag: u32,
    ) -> Result<Measured> {
        let text = |error: evenkeel_collectives::Error| error.to_string();
        let call = Call::default().tag(tag);
        let details = Details {
            inputs: self.inputs.into(),
            base: self.base.into(),
            messages: self.messages as usize,
            destinations: self.destinations.into(),
            tag,
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
            self.compute.compute()?;
            let begun = Instant::now();
            exercise.once(group, &call).map_err(text)?;
            samples.push(begun.elapsed().as_secs_f64());
        }
        Ok((samples, errors))
    }
}

/// The rows to measure. A negative number, or none, stands for the sweep from `least` on, as in Gloo's benchmark.
fn element_counts(given: &[i64], least: usize) -> Vec<usize> {
    let sweep = || SWEEP.into_iter().filter(|count| *count >= least).collect::<Vec<_>>();
    if given.is_empty() {
        return sweep();
    }
    let counts =
        |given: &i64| usize::try_from(*given).map_or_else(|_| sweep(), |count| vec![count]);
    given.iter().flat_map(counts).collect()
}

/// The interface or RDMA port of a transport; empty where it has none.
fn device(transport: &TransportKind) -> &str {
    match transport {
        TransportKind::Tcp(tcp) => tcp.device(),
        TransportKind::Tls(tls) => tls.device(),
        TransportKind::SharedMemory => "",
        TransportKind::Auto(auto) => auto.device(),
    }
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

impl Row {
    /// Of times in seconds, and elements of so many bytes.
    fn new(mut times: Vec<f64>, elements: usize, element: usize) -> Self {
        times.sort_by(f64::total_cmp);
        let us = |share: f64| quantile(&times, share) * 1e6;
        let (bytes, iterations) = (elements * element, times.len());
        let sum: f64 = times.iter().sum();
        let carried = bytes as f64 * iterations as f64;
        Self {
            bytes,
            elements,
            min_us: us(0.0),
            p50_us: us(0.5),
            p99_us: us(0.99),
            max_us: us(1.0),
            bandwidth_gbps: if sum > 0.0 { carried / sum / 1e9 } else { 0.0 },
            iterations,
            samples_us: vec![],
        }
    }

    /// Its line of the table.
    fn line(&self, nanos: bool) -> String {
        let Self { bytes, elements, min_us, p50_us, p99_us, max_us, .. } = *self;
        let Self { bandwidth_gbps, iterations, .. } = self;
        let times: String = [min_us, p50_us, p99_us, max_us]
            .map(|us| if nanos { format!("{:>12.0}", us * 1e3) } else { format!("{us:>12.1}") })
            .concat();
        format!("{bytes:>12}{elements:>12}{times}{bandwidth_gbps:>18.3}{iterations:>12}\n")
    }
}

impl Report {
    /// What is above the table.
    fn heading(&self, nanos: bool) -> String {
        let unit = if nanos { "ns" } else { "us" };
        let Self { benchmark, transport, device, ranks, threads, inputs, element, .. } = self;
        format!(
            "# {benchmark} of {element}, {ranks} ranks, {transport} {device}, {inputs} inputs, {threads} threads\n\
             {:>12}{:>12}{:>12}{:>12}{:>12}{:>12}{:>18}{:>12}\n",
            "size (B)",
            "elements",
            format!("min ({unit})"),
            format!("p50 ({unit})"),
            format!("p99 ({unit})"),
            format!("max ({unit})"),
            "bandwidth (GB/s)",
            "iterations"
        )
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_minus_one_is_the_sweep() {
        assert_eq!(element_counts(&[], 0), SWEEP);
        assert_eq!(element_counts(&[-1], 0), SWEEP);
        assert_eq!(element_counts(&[7, 0], 0), [7, 0]);
        assert_eq!(element_counts(&[-1, 1], 3), [&SWEEP[2..], &[1]].concat());
    }

    #[test]
    fn row_has_order_statistics() {
        let times = (1..=101).rev().map(|us| f64::from(us) / 1e6).collect();
        let row = Row::new(times, 250, 4);
        for (got, want) in
            [(row.min_us, 1.0), (row.p50_us, 51.0), (row.p99_us, 100.0), (row.max_us, 101.0)]
        {
            assert!((got - want).abs() < 1e-9, "{row:?}");
        }
        assert_eq!((row.bytes, row.iterations), (1000, 101));
        // 1000 bytes in 51 microseconds.
        assert!((row.bandwidth_gbps - 1000.0 / 51.0 / 1e3).abs() < 1e-9);
    }
}
