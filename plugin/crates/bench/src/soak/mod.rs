//! `evenkeel-bench soak`: many connections between several processes for a long time, while flows are reset, processes are
//! killed and forked, and the network changes. Every byte is checked, and what the processes hold at the end.

mod message;
mod network;
mod worker;

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use evenkeel_testkit::TestRng;
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

use crate::cli::options::NetworkOptions;
use crate::error::Result;
use crate::plugin_host::process::Usage;
use network::Fault;
use worker::Worker;

/// How long a process may take for what it is told, beyond the faults.
const PATIENCE: Duration = Duration::from_secs(120);
/// Part of the time after which all connections are closed, and what the processes hold is compared.
const CHECKS: u32 = 6;
const MIN_PERIOD: Duration = Duration::from_secs(8);
const MAX_PERIOD: Duration = Duration::from_secs(180);
/// Time between faults, at most.
const MAX_CALM_MS: u64 = 1500;
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);
/// What a process may hold more at the end. The allocator keeps some free memory that it cannot give back.
const MAX_RESIDENT_GROWTH_KIB: u64 = 16 << 10;
/// Live allocations: tables of the plugin that grow with the number of connections keep their size.
const MAX_ALLOCATED_GROWTH_KIB: u64 = 512;
/// The job's key, and a wrong one.
const KEYS: [&str; 2] = [
    "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff",
    "99112233445566778899aabbccddeeff00112233445566778899aabbccddeeff",
];

/// What to do to which connections.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Needs root, iproute2 (ip, tc, ss), nftables and util-linux: everything happens on the loopback of a network namespace of its own.

Examples:
  evenkeel-bench soak --plugin ./libnccl-net-evenkeel.so --duration 30m
  The same faults again:
    evenkeel-bench soak --plugin ./libnccl-net-evenkeel.so --seed 7

Exit status: 0 when no message was lost or wrong and nothing is left, 1 otherwise, 2 for bad flags.")]
pub(crate) struct Options {
    /// How long, such as 90s or 30m
    #[arg(long, default_value = "30m", value_parser = time, value_name = "TIME")]
    duration: Duration,
    /// Seed of messages and faults [default: from the clock]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Connections that are open at a time
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=4096), value_name = "N")]
    connections: u32,
    /// Processes that they are between. Every other one is killed now and then
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=64), value_name = "N")]
    processes: u32,
    /// Let no process be killed and no fault happen
    #[arg(long)]
    no_faults: bool,
    /// This process is a part of a soak
    #[arg(long, hide = true)]
    part: Option<Part>,
    /// The process that started this one
    #[arg(long, hide = true)]
    spawned_by: Option<i32>,
    #[command(flatten)]
    network: NetworkOptions,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    Supervisor,
    Worker,
}

fn time(text: &str) -> std::result::Result<Duration, String> {
    let units = [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000)];
    let parsed = units.iter().find_map(|(unit, milliseconds)| {
        let number: u64 = text.strip_suffix(unit)?.parse().ok()?;
        number.checked_mul(*milliseconds).map(Duration::from_millis)
    });
    parsed.filter(|time| !time.is_zero()).ok_or_else(|| "a time such as 90s or 30m".to_owned())
}

/// Runs a soak, or one of its processes.
///
/// # Errors
/// One line: what went wrong, on which connection, and the seed.
pub(crate) fn run(options: &Options) -> Result<ExitCode> {
    if let Some(parent) = options.spawned_by {
        set_parent_process_death_signal(Some(Signal::KILL))
            .map_err(|error| format!("cannot tie this process to its parent: {error}"))?;
        if getppid().is_none_or(|now| now.as_raw_nonzero().get() != parent) {
            return Err("the process that started this one is gone".to_owned());
        }
    }
    match options.part {
        None => in_namespace(options),
        Some(Part::Worker) => {
            let (plugin, _) = options.network.open()?;
            let seed = options.seed.unwrap_or(0);
            Worker::new(plugin, options.network.device, seed).run()?;
            Ok(ExitCode::SUCCESS)
        }
        Some(Part::Supervisor) => {
            let seed = options.seed.unwrap_or(0);
            let mut soak = Soak::start(options, seed)?;
            let result = soak.run();
            soak.summary(result.is_ok());
            result.map_err(|why| format!("{why}; again with --seed {seed}"))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Starts the supervisor in a network namespace of its own.
fn in_namespace(options: &Options) -> Result<ExitCode> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let seed = options.seed.unwrap_or_else(|| now.map_or(1, |now| now.as_millis() as u64));
    let mut command = Command::new("unshare");
    command.arg("--net").arg(program()?);
    command.args(std::env::args_os().skip(1)).args(["--part", "supervisor"]);
    if options.seed.is_none() {
        command.args(["--seed", &seed.to_string()]);
    }
    command.args(["--spawned-by", &std::process::id().to_string()]);
    let status = command.status().map_err(|error| format!("unshare: {error}"))?;
    Ok(ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1)))
}

fn program() -> Result<std::path::PathBuf> {
    std::env::current_exe().map_err(|error| error.to_string())
}

/// A line of a process, or its end.
struct Event {
    process: usize,
    /// Which of the processes in this place.
    life: u32,
    line: Option<String>,
}

/// A process with ends of connections.
struct Process {
    child: Child,
    input: ChildStdin,
    life: u32,
    /// What it held when all connections were closed for the first time.
    baseline: Option<Usage>,
    last: Option<Usage>,
    /// Whether it was told to report what it holds.
    is_asked: bool,
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An end's report.
#[derive(Clone, Debug)]
struct Report {
    done: u64,
    /// Whether all its messages were done before it closed.
    is_whole: bool,
    why: String,
}

/// A connection between two processes.
struct Connection {
    from: usize,
    to: usize,
    /// Whether the sender was told to connect.
    connects: bool,
    /// Number of ends that are open.
    open: u32,
    sender: Option<Report>,
    receiver: Option<Report>,
    /// Whether one of its processes was killed.
    excused: bool,
    /// Until when it carries messages.
    until: Instant,
    is_finishing: bool,
    /// Since when it has to be opened or closed.
    since: Instant,
    /// The listener's handle, while a process without the job key tries it.
    tried: Option<String>,
}

/// What happened.
#[derive(Default)]
struct Counts {
    messages: u64,
    bytes: u64,
    opened: u64,
    closed: u64,
    /// Connections that ended with a killed process.
    cut: u64,
    kills: u64,
    forks: u64,
    wrong_keys: u64,
    faults: BTreeMap<&'static str, u64>,
    checks: u64,
}

struct Soak {
    options: Options,
    seed: u64,
    rng: TestRng,
    /// The one with the wrong key is the last.
    processes: Vec<Process>,
    sender: Sender<Event>,
    events: Receiver<Event>,
    connections: BTreeMap<u64, Connection>,
    next: u64,
    counts: Counts,
    begun: Instant,
    reported: Instant,
}

impl Soak {
    fn start(options: &Options, seed: u64) -> Result<Self> {
        network::up()?;
        let (sender, events) = mpsc::channel();
        let mut soak = Self {
            options: options.clone(),
            seed,
            rng: TestRng::new(seed),
            processes: Vec::new(),
            sender,
            events,
            connections: BTreeMap::new(),
            next: 1,
            counts: Counts::default(),
            begun: Instant::now(),
            reported: Instant::now(),
        };
        for place in 0..=soak.wrong_key_worker() {
            let process = soak.start_process(place, 0)?;
            soak.processes.push(process);
        }
        println!(
            "# Soak: {} connections, {} processes, {:?}, seed {seed}",
            options.connections, options.processes, options.duration
        );
        Ok(soak)
    }

    /// The place of the process that has another job key.
    fn wrong_key_worker(&self) -> usize {
        self.options.processes as usize
    }

    fn start_process(&self, place: usize, life: u32) -> Result<Process> {
        let key = KEYS[usize::from(place == self.wrong_key_worker())];
        let mut command = Command::new(program()?);
        command.args(["soak", "--part", "worker", "--seed", &self.seed.to_string()]);
        command.args(["--spawned-by", &std::process::id().to_string()]);
        command.args(["--device", &self.options.network.device.to_string()]);
        if let Some(plugin) = &self.options.network.plugin {
            command.args(["--plugin", plugin]);
        }
        command.env("NCCL_SOCKET_IFNAME", "lo").env("EVENKEEL_JOB_KEY", key);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("a process: {error}"))?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (Some(input), Some(output)) = (input, output) else {
            return Err("a process without pipes".to_owned());
        };
        let events = self.sender.clone();
        thread::spawn(move || {
            let lines = BufReader::new(output).lines().map_while(io::Result::ok).map(Some);
            for line in lines.chain([None]) {
                if events.send(Event { process: place, life, line }).is_err() {
                    break;
                }
            }
        });
        Ok(Process { child, input, life, baseline: None, last: None, is_asked: false })
    }

    fn run(&mut self) -> Result<()> {
        let period = (self.options.duration / CHECKS).clamp(MIN_PERIOD, MAX_PERIOD);
        let end = self.begun + self.options.duration;
        loop {
            let until = (Instant::now() + period).min(end);
            self.run_period(until)?;
            self.close_all()?;
            self.compare_usage()?;
            if Instant::now() + MIN_PERIOD / 2 >= end {
                return self.end_all();
            }
        }
    }

    /// Keeps the connections open, and lets faults happen.
    fn run_period(&mut self, until: Instant) -> Result<()> {
        let mut next_fault = Instant::now() + Duration::from_millis(MAX_CALM_MS);
        while Instant::now() < until {
            while self.connections.len() < self.options.connections as usize {
                self.open()?;
            }
            let now = Instant::now();
            self.finish(|connection| now >= connection.until)?;
            if !self.options.no_faults && now >= next_fault {
                self.fault()?;
                let calm = Duration::from_millis(self.rng.below(MAX_CALM_MS));
                next_fault = Instant::now() + calm;
            }
            self.wait(Duration::from_millis(20))?;
        }
        Ok(())
    }

    /// Opens a connection between two processes.
    fn open(&mut self) -> Result<()> {
        let processes = self.options.processes as usize;
        let from = self.rng.index(processes);
        let to = (from + 1 + self.rng.index(processes - 1)) % processes;
        let (number, now) = (self.next, Instant::now());
        self.next += 1;
        let lifetime = Duration::from_millis(500 + self.rng.below(30_000));
        self.connections.insert(
            number,
            Connection {
                from,
                to,
                connects: false,
                open: 0,
                sender: None,
                receiver: None,
                excused: false,
                until: now + lifetime,
                is_finishing: false,
                since: now,
                tried: None,
            },
        );
        self.counts.opened += 1;
        self.tell(to, &format!("listen {number}"))
    }

    /// Closes the open connections that are `due`.
    fn finish(&mut self, due: impl Fn(&Connection) -> bool) -> Result<()> {
        let now = Instant::now();
        let mut told = Vec::new();
        for (number, connection) in &mut self.connections {
            if connection.open == 2 && !connection.is_finishing && due(connection) {
                (connection.is_finishing, connection.since) = (true, now);
                told.push((connection.from, *number));
            }
        }
        told.iter().try_for_each(|(from, number)| self.tell(*from, &format!("finish {number}")))
    }

    fn fault(&mut self) -> Result<()> {
        match self.rng.below(10) {
            0 if self.options.processes > 1 => self.kill(),
            1 | 2 => {
                let place = self.rng.index(self.options.processes as usize);
                let time = 100 + self.rng.below(2000);
                self.counts.forks += 1;
                self.tell(place, &format!("fork {time}"))
            }
            _ => {
                let fault = *self.rng.choose(&Fault::ALL);
                let count = network::inflict(fault, &mut self.rng)?;
                *self.counts.faults.entry(fault.name()).or_default() += count;
                Ok(())
            }
        }
    }

    /// Kills one of the processes that may be, and starts another one in its place.
    fn kill(&mut self) -> Result<()> {
        let place = 1 + 2 * self.rng.index(self.options.processes as usize / 2);
        let life = self.processes[place].life + 1;
        // What it says from now on does not count.
        self.processes[place] = self.start_process(place, life)?;
        self.counts.kills += 1;
        let now = Instant::now();
        let touched: Vec<u64> = self
            .connections
            .iter()
            .filter(|(_, connection)| [connection.from, connection.to].contains(&place))
            .map(|(number, _)| *number)
            .collect();
        for number in touched {
            let Some(connection) = self.connections.get_mut(&number) else { continue };
            if !connection.excused {
                (connection.excused, connection.since) = (true, now);
            }
            let gone = Report { done: 0, is_whole: false, why: "it was killed".to_owned() };
            if connection.from == place {
                connection.sender.get_or_insert_with(|| gone.clone());
            }
            if connection.to == place {
                connection.receiver.get_or_insert(gone);
            }
            let absent = || Report { done: 0, is_whole: false, why: "it never was".to_owned() };
            if !connection.connects {
                connection.sender.get_or_insert_with(absent);
            }
            // A listener would wait for a peer that never comes. Whoever connects fails by itself.
            let listens = connection.open < 2 && connection.to != place;
            if listens {
                connection.receiver.get_or_insert_with(absent);
                let to = connection.to;
                self.tell(to, &format!("forget {number}"))?;
            }
            self.settle(number)?;
        }
        Ok(())
    }

    fn tell(&mut self, place: usize, line: &str) -> Result<()> {
        let process = &mut self.processes[place];
        let told = writeln!(process.input, "{line}").and_then(|()| process.input.flush());
        told.map_err(|error| format!("process {place} has ended: {error}"))
    }

    /// Handles what the processes say, for this time.
    fn wait(&mut self, time: Duration) -> Result<()> {
        let deadline = Instant::now() + time;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.events.recv_timeout(left) {
                Ok(event) => self.handle(&event)?,
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => return Err("no process is left".to_owned()),
            }
        }
        let now = Instant::now();
        let late = self.connections.iter().find(|(_, connection)| {
            let due = connection.open < 2 || connection.is_finishing || connection.excused;
            due && now - connection.since > PATIENCE
        });
        if let Some((number, Connection { from, to, open, excused, .. })) = late {
            let what = match (open, excused) {
                (0 | 1, _) => "was not opened",
                (_, true) => "did not fail, although a process was killed,",
                _ => "was not closed",
            };
            return Err(format!(
                "connection {number} from process {from} to {to} {what} within {PATIENCE:?}"
            ));
        }
        if self.reported.elapsed() >= PROGRESS_INTERVAL {
            self.reported = Instant::now();
            let Counts { messages, bytes, opened, kills, .. } = self.counts;
            let faults: u64 = self.counts.faults.values().sum();
            println!(
                "{:>6} s: {} connections open, {opened} opened, {messages} messages, {:.1} GB, {faults} faults, {kills} kills",
                self.begun.elapsed().as_secs(),
                self.connections.values().filter(|connection| connection.open == 2).count(),
                bytes as f64 / 1e9
            );
        }
        Ok(())
    }

    fn handle(&mut self, event: &Event) -> Result<()> {
        let place = event.process;
        if self.processes[place].life != event.life {
            return Ok(());
        }
        let Some(line) = &event.line else {
            return Err(format!("process {place} has ended without being told to"));
        };
        let mut words = line.splitn(4, ' ');
        let what = words.next().unwrap_or_default();
        let number = words.next().and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
        let rest: Vec<&str> = words.collect();
        match what {
            "moved" => {
                self.counts.bytes += number;
                self.counts.messages +=
                    rest.first().and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
                Ok(())
            }
            "usage" => {
                let all = line.split(' ').skip(1).filter_map(|word| word.parse().ok());
                let all: Vec<u64> = all.collect();
                let [descriptors, threads, resident_kib, allocated_kib] = all[..] else {
                    return Err(format!("process {place} says {line:?}"));
                };
                let usage = Usage { descriptors, threads, resident_kib, allocated_kib };
                let process = &mut self.processes[place];
                process.last = Some(usage);
                process.is_asked = false;
                Ok(())
            }
            "handle" => self.take_handle(number, rest.concat()),
            "open" | "lost" if place == self.wrong_key_worker() => {
                self.wrong_key_ended(number, what, &rest)
            }
            "open" => {
                if let Some(connection) = self.connections.get_mut(&number) {
                    connection.open += 1;
                }
                Ok(())
            }
            "sent" | "lost" | "received" => {
                let done = rest.first().and_then(|word| word.parse().ok()).unwrap_or(0);
                let why = rest.get(1).copied().unwrap_or_default().to_owned();
                let report = Report { done, is_whole: what == "sent", why };
                if let Some(connection) = self.connections.get_mut(&number) {
                    if !connection.is_finishing && !connection.excused {
                        connection.since = Instant::now();
                    }
                    connection.is_finishing = true;
                    match what {
                        "received" => connection.receiver = Some(report),
                        _ => connection.sender = Some(report),
                    }
                }
                self.settle(number)
            }
            "wrong" | "stuck" => Err(format!(
                "connection {number}, message {}: {}",
                rest.first().copied().unwrap_or_default(),
                rest[1.min(rest.len())..].join(" ")
            )),
            _ => Err(format!("process {place} says {line:?}")),
        }
    }

    /// Has the sender connect, now and then after one with a wrong key has tried.
    fn take_handle(&mut self, number: u64, handle: String) -> Result<()> {
        let by_wrong_key = !self.options.no_faults && self.rng.one_in(20);
        let wrong_key_worker = self.wrong_key_worker();
        let Some(connection) = self.connections.get_mut(&number) else { return Ok(()) };
        if by_wrong_key {
            connection.tried = Some(handle.clone());
            self.counts.wrong_keys += 1;
            return self.tell(wrong_key_worker, &format!("connect {number} {handle}"));
        }
        connection.connects = true;
        let from = connection.from;
        self.tell(from, &format!("connect {number} {handle}"))
    }

    fn wrong_key_ended(&mut self, number: u64, what: &str, rest: &[&str]) -> Result<()> {
        if what == "open" {
            return Err(format!("connection {number} was opened without the job key"));
        }
        let why = rest.get(1).copied().unwrap_or_default();
        let Some(connection) = self.connections.get_mut(&number) else { return Ok(()) };
        let Some(handle) = connection.tried.take() else { return Ok(()) };
        if why.is_empty() {
            return Err(format!("connection {number} was refused to a wrong key without a reason"));
        }
        // The sender does not wait for it any more if a process was killed.
        if connection.excused {
            return Ok(());
        }
        connection.connects = true;
        let from = connection.from;
        self.tell(from, &format!("connect {number} {handle}"))
    }

    /// Judges a connection once both ends have reported.
    fn settle(&mut self, number: u64) -> Result<()> {
        let Some(connection) = self.connections.get(&number) else { return Ok(()) };
        let (from, to) = (connection.from, connection.to);
        let name = format!("connection {number} from process {from} to {to}");
        if !connection.excused
            && let Some(Report { done, is_whole: false, why }) = &connection.sender
        {
            let other = connection.receiver.as_ref().map_or("it still receives", |it| &it.why);
            return Err(format!(
                "{name} failed after {done} messages, without cause: {why}; its receiver: {other}"
            ));
        }
        let (Some(sent), Some(received)) = (&connection.sender, &connection.receiver) else {
            return Ok(());
        };
        if connection.excused {
            self.counts.cut += 1;
        } else if sent.done != received.done {
            return Err(format!(
                "{name} lost messages: {} were sent and {} received: {}",
                sent.done, received.done, received.why
            ));
        } else {
            self.counts.closed += 1;
        }
        self.connections.remove(&number);
        Ok(())
    }

    /// Heals the network, and closes all connections.
    fn close_all(&mut self) -> Result<()> {
        network::heal()?;
        while !self.connections.is_empty() {
            self.finish(|_| true)?;
            self.wait(Duration::from_millis(20))?;
        }
        Ok(())
    }

    /// Compares what the processes hold with what they held when they were asked first.
    fn compare_usage(&mut self) -> Result<()> {
        for place in 0..self.processes.len() {
            self.processes[place].is_asked = true;
            self.tell(place, "usage")?;
        }
        let begun = Instant::now();
        while self.processes.iter().any(|process| process.is_asked) {
            if begun.elapsed() > PATIENCE {
                return Err("a process does not say what it holds".to_owned());
            }
            self.wait(Duration::from_millis(20))?;
        }
        self.counts.checks += 1;
        for (place, process) in self.processes.iter_mut().enumerate() {
            let Some(now) = process.last else { continue };
            let then = *process.baseline.get_or_insert(now);
            for (what, then, now, more) in [
                ("descriptors", then.descriptors, now.descriptors, 0),
                ("threads", then.threads, now.threads, 0),
                ("KiB of memory", then.resident_kib, now.resident_kib, MAX_RESIDENT_GROWTH_KIB),
                ("allocated KiB", then.allocated_kib, now.allocated_kib, MAX_ALLOCATED_GROWTH_KIB),
            ] {
                if now > then + more {
                    return Err(format!(
                        "process {place} holds {now} {what} without a connection, after {then} before"
                    ));
                }
            }
        }
        Ok(())
    }

    fn end_all(&mut self) -> Result<()> {
        for place in 0..self.processes.len() {
            self.tell(place, "end")?;
            let status = self.processes[place].child.wait();
            let status = status.map_err(|error| format!("process {place}: {error}"))?;
            if !status.success() {
                return Err(format!("process {place} ended with {status}"));
            }
        }
        Ok(())
    }

    fn summary(&self, is_whole: bool) {
        let Counts {
            messages, bytes, opened, closed, cut, kills, forks, wrong_keys, checks, ..
        } = self.counts;
        println!("#\n# {:<28} {:>12}", "what", "number");
        let time = self.begun.elapsed().as_secs();
        let gigabytes = (bytes as f64 / 1e9).round() as u64;
        let rows = [
            ("seconds", time),
            ("connections opened", opened),
            ("closed, every message there", closed),
            ("ended by a kill", cut),
            ("messages, every byte right", messages),
            ("GB", gigabytes),
            ("kills", kills),
            ("forks", forks),
            ("connects with a wrong key", wrong_keys),
        ];
        let faults = self.counts.faults.iter().map(|(name, count)| (*name, *count));
        for (name, count) in
            rows.into_iter().chain(faults).chain([("checks of what is held", checks)])
        {
            println!("  {name:<28} {count:>12}");
        }
        println!(
            "#\n# {:<8} {:>16} {:>12} {:>18} {:>18}",
            "process", "descriptors", "threads", "KiB", "allocated KiB"
        );
        for (place, process) in self.processes.iter().enumerate() {
            let (Some(then), Some(now)) = (process.baseline, process.last) else { continue };
            let pair = |then: u64, now: u64| format!("{then} -> {now}");
            println!(
                "  {place:<8} {:>16} {:>12} {:>18} {:>18}",
                pair(then.descriptors, now.descriptors),
                pair(then.threads, now.threads),
                pair(then.resident_kib, now.resident_kib),
                pair(then.allocated_kib, now.allocated_kib)
            );
        }
        println!(
            "# {}",
            if is_whole { "Nothing was lost, nothing is left" } else { "It did not hold" }
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn soak_durations_have_units() {
        assert_eq!(time("30m"), Ok(Duration::from_secs(1800)));
        assert_eq!(time("90s"), Ok(Duration::from_secs(90)));
        assert!(time("30").is_err() && time("0s").is_err() && time("soon").is_err());
    }
}
