//! The record of a run: one line of JSON, in which what a workload measured is beside what every
//! run has.

use clap::Args;
use serde::{Deserialize, Serialize};

use crate::counters::Counters;
use crate::error::Result;
use crate::ranks::spawn::arguments_without;
use crate::workload::Ranks;

/// How to print what was measured.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct OutputOptions {
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
    /// With --json: at most this many times of each row too, picked evenly, as samples_us
    #[arg(long, default_value_t = 0, requires = "json", value_name = "N")]
    samples: usize,
}

impl OutputOptions {
    /// Whether rows of the record have samples.
    pub(crate) fn has_samples(&self) -> bool {
        self.samples > 0
    }

    /// The samples that a row of the record has, in microseconds, of those that were measured, in
    /// seconds.
    pub(crate) fn samples_us(&self, seconds: &[f64]) -> Vec<f64> {
        let step = seconds.len().div_ceil(self.samples.max(1)).max(1);
        seconds.iter().step_by(step).take(self.samples).map(|time| time * 1e6).collect()
    }
}

/// What carried the data.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Network {
    /// The plugin's own name.
    pub(crate) name: String,
    /// Version of the interface in use.
    pub(crate) version: u32,
    /// File of the library.
    pub(crate) library: String,
    /// First twelve digits of its SHA-256.
    pub(crate) sha256: String,
    /// The device's name.
    pub(crate) device: String,
    /// The device's speed as the plugin has it, Mbit/s.
    pub(crate) speed_mbps: i64,
    /// Number of the plugin's devices, of which this is one.
    pub(crate) devices: usize,
    /// What carried the messages of its connections, `tcp` or `rdma`, or `mixed`; none where there
    /// are none, or the plugin does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) transport: Option<String>,
}

impl Network {
    /// The line of it above a table.
    pub(crate) fn line(&self) -> String {
        let Self { name, version, library, sha256, .. } = self;
        match version {
            0 => format!("# Network: {name}\n"),
            _ => format!("# Network: {name} (ncclNet v{version}), {library}, sha256 {sha256}\n"),
        }
    }
}

/// A process of the run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Process {
    rank: usize,
    host: String,
    /// What it has used until the end.
    counters: Counters,
}

impl Process {
    /// The process of this rank, as it is now.
    ///
    /// # Errors
    /// When /proc cannot be read.
    pub(crate) fn now(rank: usize) -> Result<Self> {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Ok(Self { rank, host, counters: Counters::now()? })
    }
}

/// The machine of this process.
#[derive(Serialize)]
struct Machine {
    processor: String,
    processors: usize,
    kernel: String,
}

impl Machine {
    fn here() -> Self {
        // A machine that does not say what it is has no name in the record.
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        Self {
            processor: model.map_or_else(String::new, |(_, model)| model.to_owned()),
            processors: std::thread::available_parallelism().map_or(0, usize::from),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        }
    }
}

#[derive(Serialize)]
struct Record<'a, F: Serialize> {
    /// This program's version.
    evenkeel_bench: &'static str,
    workload: &'static str,
    /// Those of rank 0, or of the process that started all ranks and printed this.
    args: Vec<String>,
    /// That of rank 0.
    machine: Machine,
    processes: Vec<Process>,
    /// What the workload measured, and how.
    #[serde(flatten)]
    measured: &'a F,
}

/// Prints the record of a run.
///
/// # Errors
/// When it cannot be written.
pub(crate) fn print(
    workload: &'static str,
    processes: Vec<Process>,
    measured: &impl Serialize,
) -> Result<()> {
    let arguments = arguments_without(&["--spawned-by"]);
    let record = Record {
        evenkeel_bench: env!("CARGO_PKG_VERSION"),
        workload,
        args: arguments.iter().map(|argument| argument.to_string_lossy().into_owned()).collect(),
        machine: Machine::here(),
        processes,
        measured,
    };
    let json = serde_json::to_string(&record).map_err(|error| format!("the record: {error}"))?;
    super::write(&format!("{json}\n"))
}

/// The output of a rank. Only rank 0 prints: text as the run goes, or the record at its end.
pub(crate) struct Output {
    workload: &'static str,
    options: OutputOptions,
    prints: bool,
}

impl Output {
    /// What this rank prints.
    pub(crate) fn new(workload: &'static str, options: &OutputOptions, rank: usize) -> Self {
        Self { workload, options: options.clone(), prints: rank == 0 }
    }

    /// Prints text for people.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn text(&self, text: &str) -> Result<()> {
        if self.prints && !self.options.json { super::write(text) } else { Ok(()) }
    }

    /// Prints the record. All ranks call it together, while their connections are open: it returns
    /// once all have.
    ///
    /// # Errors
    /// Names a rank that is lost, or says why the record cannot be written.
    pub(crate) fn finish(&self, ranks: &mut impl Ranks, measured: &impl Serialize) -> Result<()> {
        let own = if ranks.is_thread() { None } else { Some(Process::now(ranks.rank())?) };
        let processes = ranks.gather(&own)?;
        if self.prints && self.options.json {
            print(self.workload, processes.into_iter().flatten().collect(), measured)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_picked_evenly() {
        let of = |samples, count: usize| {
            let seconds: Vec<f64> = (0..count).map(|second| second as f64).collect();
            OutputOptions { json: true, samples }.samples_us(&seconds)
        };
        assert!(of(0, 5).is_empty() && of(3, 0).is_empty());
        assert_eq!(of(9, 2), [0.0, 1e6]);
        assert_eq!(of(3, 6), [0.0, 2e6, 4e6]);
    }
}
