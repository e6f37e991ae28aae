//! The supervisor of a soak: opens and closes connections, and lets faults happen.

use std::collections::BTreeMap;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use evenkeel_testkit::TestRng;

use super::Options;
use super::ledger::{Connection, Ending, Report};
use super::network::{self, Fault};
use super::process::{Event, Process};
use super::summary::Counts;
use crate::error::Result;

/// How long a process may take for what it is told, beyond the faults.
const PATIENCE: Duration = Duration::from_secs(120);
/// Part of the time after which all connections are closed, and what the processes hold is
/// compared.
const CHECKS: u32 = 6;
const MIN_PERIOD: Duration = Duration::from_secs(8);
const MAX_PERIOD: Duration = Duration::from_secs(180);
/// Time between faults, at most.
const MAX_CALM_MS: u64 = 1500;
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// The processes and connections of a soak.
pub(super) struct Soak {
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
    /// Starts the processes.
    pub(super) fn start(options: &Options, seed: u64) -> Result<Self> {
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
        for place in 0..=options.wrong_key_place() {
            let process = soak.start_process(place, 0)?;
            soak.processes.push(process);
        }
        println!(
            "# Soak: {} connections, {} processes, {:?}, seed {seed}",
            options.connections, options.processes, options.duration
        );
        Ok(soak)
    }

    fn start_process(&self, place: usize, life: u32) -> Result<Process> {
        Process::start(&self.options, self.seed, (place, life), self.sender.clone())
    }

    /// Runs it to its end, and prints what happened.
    pub(super) fn run(mut self) -> Result<()> {
        let result = self.run_periods();
        self.counts.print(self.begun.elapsed(), &self.processes, result.is_ok());
        result
    }

    fn run_periods(&mut self) -> Result<()> {
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
        let number = self.next;
        self.next += 1;
        let lifetime = Duration::from_millis(500 + self.rng.below(30_000));
        self.connections.insert(number, Connection::new(from, to, lifetime));
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
        let touched: Vec<u64> = self
            .connections
            .iter()
            .filter(|(_, connection)| [connection.from, connection.to].contains(&place))
            .map(|(number, _)| *number)
            .collect();
        for number in touched {
            let Some(connection) = self.connections.get_mut(&number) else { continue };
            connection.excuse();
            let gone = || Report::absent("it was killed");
            if connection.from == place {
                connection.sender.get_or_insert_with(gone);
            }
            if connection.to == place {
                connection.receiver.get_or_insert_with(gone);
            }
            let absent = || Report::absent("it never was");
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
        self.processes[place].tell(line)
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
        for (number, connection) in &self.connections {
            if let Some(what) = connection.overdue(PATIENCE) {
                let Connection { from, to, .. } = connection;
                return Err(format!(
                    "connection {number} from process {from} to {to} {what} within {PATIENCE:?}"
                ));
            }
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
        let place = event.place;
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
            "usage" => self.processes[place].take_usage(line),
            "handle" => self.take_handle(number, rest.concat()),
            "open" | "lost" if place == self.options.wrong_key_place() => {
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
        let wrong_key_worker = self.options.wrong_key_place();
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
        let ending = connection.ending().map_err(|why| {
            let Connection { from, to, .. } = connection;
            format!("connection {number} from process {from} to {to} {why}")
        })?;
        match ending {
            None => return Ok(()),
            Some(Ending::Cut) => self.counts.cut += 1,
            Some(Ending::Whole) => self.counts.closed += 1,
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
        self.processes.iter_mut().try_for_each(Process::ask_usage)?;
        let begun = Instant::now();
        while self.processes.iter().any(|process| process.is_asked) {
            if begun.elapsed() > PATIENCE {
                return Err("a process does not say what it holds".to_owned());
            }
            self.wait(Duration::from_millis(20))?;
        }
        self.counts.checks += 1;
        self.processes.iter_mut().try_for_each(Process::compare_usage)
    }

    fn end_all(&mut self) -> Result<()> {
        self.processes.iter_mut().try_for_each(Process::end)
    }
}
