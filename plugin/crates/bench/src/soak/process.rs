//! A process of a soak, as its supervisor sees it: what it is told and says, and what it holds.

use std::io::{self, BufRead, BufReader, Write};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use super::Options;
use crate::counters::Counters;
use crate::error::Result;
use crate::ranks::child::{Started, this_program};

/// What a process may hold more at the end. The allocator keeps some free memory that it cannot
/// give back.
const MAX_RESIDENT_GROWTH_KIB: u64 = 16 << 10;
/// Live allocations: tables of the plugin that grow with the number of connections keep their size.
const MAX_ALLOCATED_GROWTH_KIB: u64 = 512;
/// How long a process may take to end.
const END_TIMEOUT: Duration = Duration::from_secs(60);
/// The job's key, and a wrong one.
const KEYS: [&str; 2] = [
    "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff",
    "99112233445566778899aabbccddeeff00112233445566778899aabbccddeeff",
];

/// A line of a process, or its end.
pub(super) struct Event {
    pub(super) place: usize,
    /// Which of the processes in this place.
    pub(super) life: u32,
    pub(super) line: Option<String>,
}

/// A process with ends of connections.
pub(super) struct Process {
    place: usize,
    process: Started,
    input: ChildStdin,
    pub(super) life: u32,
    /// What it held when all connections were closed for the first time.
    baseline: Option<Counters>,
    last: Option<Counters>,
    /// Whether it was told to report what it holds.
    pub(super) is_asked: bool,
}

impl Process {
    /// Starts a process in this place. The last place's has another job key than the others'.
    pub(super) fn start(
        options: &Options,
        seed: u64,
        (place, life): (usize, u32),
        events: Sender<Event>,
    ) -> Result<Self> {
        let key = KEYS[usize::from(place == options.wrong_key_place())];
        let mut command = Command::new(this_program()?);
        command.args(["soak", "--part", "worker", "--seed", &seed.to_string()]);
        command.args(["--spawned-by", &std::process::id().to_string()]);
        command.args(["--device", &options.network.device.to_string()]);
        if let Some(plugin) = &options.network.plugin {
            command.args(["--plugin", plugin]);
        }
        command.env("NCCL_SOCKET_IFNAME", "lo").env("EVENKEEL_JOB_KEY", key);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("a process: {error}"))?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (Some(input), Some(output)) = (input, output) else {
            return Err("a process without pipes".to_owned());
        };
        thread::spawn(move || {
            let lines = BufReader::new(output).lines().map_while(io::Result::ok).map(Some);
            for line in lines.chain([None]) {
                if events.send(Event { place, life, line }).is_err() {
                    break;
                }
            }
        });
        Ok(Self {
            place,
            process: Started(child),
            input,
            life,
            baseline: None,
            last: None,
            is_asked: false,
        })
    }

    pub(super) fn tell(&mut self, line: &str) -> Result<()> {
        let told = writeln!(self.input, "{line}").and_then(|()| self.input.flush());
        told.map_err(|error| format!("process {} has ended: {error}", self.place))
    }

    /// Has it report what it holds.
    pub(super) fn ask_usage(&mut self) -> Result<()> {
        self.is_asked = true;
        self.tell("usage")
    }

    /// It says what it holds, in this line.
    pub(super) fn take_usage(&mut self, line: &str) -> Result<()> {
        let usage = line.strip_prefix("usage ").and_then(|json| serde_json::from_str(json).ok());
        self.last = Some(usage.ok_or_else(|| format!("process {} says {line:?}", self.place))?);
        self.is_asked = false;
        Ok(())
    }

    /// Compares what it holds without a connection with what that was the first time.
    pub(super) fn compare_usage(&mut self) -> Result<()> {
        let Some(now) = self.last else { return Ok(()) };
        let then = *self.baseline.get_or_insert(now);
        for (what, then, now, more) in [
            ("descriptors", then.descriptors, now.descriptors, 0),
            ("threads", then.threads, now.threads, 0),
            ("KiB of memory", then.resident_kib, now.resident_kib, MAX_RESIDENT_GROWTH_KIB),
            ("allocated KiB", then.allocated_kib, now.allocated_kib, MAX_ALLOCATED_GROWTH_KIB),
        ] {
            if now > then + more {
                return Err(format!(
                    "process {} holds {now} {what} without a connection, after {then} before",
                    self.place
                ));
            }
        }
        Ok(())
    }

    /// What it held the first and the last time.
    pub(super) fn usage(&self) -> Option<(Counters, Counters)> {
        Some((self.baseline?, self.last?))
    }

    /// Ends it.
    pub(super) fn end(&mut self) -> Result<()> {
        self.tell("end")?;
        let status = self.process.wait(END_TIMEOUT);
        let status = status.map_err(|error| format!("process {}: {error}", self.place))?;
        if !status.success() {
            return Err(format!("process {} ended with {status}", self.place));
        }
        Ok(())
    }
}
