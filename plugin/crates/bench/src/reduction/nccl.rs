//! NCCL itself, driven by nccl-tests on GPUs, and what that says as one of our own reports.

use std::io::ErrorKind;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use super::Options;
use super::timeline_log::{Line, Logs, Run, Task};
use crate::error::Result;
use crate::ranks::child::{Started, Text, lines};

/// Runs NCCL's benchmark and reports what it measured, out of place.
///
/// # Errors
/// One line: that it is not installed, that it failed, or that it printed nothing.
pub(super) fn run(options: &Options) -> Result<ExitCode> {
    let output = Benchmark::start(options)?.lines(Duration::from_secs(options.ranks.timeout))?;
    let run = read(&output)?;
    let wrong = run.wrong;
    let line =
        serde_json::to_string(&Line::Run(run)).map_err(|error| format!("the log: {error}"))?;
    let logs = Logs::new(vec![line], vec![])?;
    if let Some(folder) = &options.log_dir {
        logs.write(folder)?;
    }
    super::report(options, &logs)?;
    Ok(if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The running program.
struct Benchmark {
    process: Started,
    /// For people.
    name: String,
}

impl Benchmark {
    fn start(options: &Options) -> Result<Self> {
        let mut words = options.nccl_tests.split_whitespace();
        let name =
            words.next().ok_or("--nccl-tests is empty: a program such as all_reduce_perf")?;
        let (size, run) = (options.size.0.to_string(), &options.run);
        let mut command = Command::new(name);
        command.args(words).args(["-b", &size, "-e", &size]);
        for (option, value) in [
            ("-g", options.ranks.spawn.unwrap_or(1).to_string()),
            ("-n", run.iterations.to_string()),
            ("-w", run.warmup.to_string()),
            ("-c", run.check.to_string()),
            ("-d", run.kind.name()),
            ("-o", run.op.name()),
        ] {
            command.args([option, &value]);
        }
        if let Some(plugin) = &options.network.plugin {
            command.env("NCCL_NET_PLUGIN", plugin);
        }
        let started = command
            .env("NCCL_COLLNET_ENABLE", "0")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        match started {
            Ok(child) => Ok(Self { process: Started(child), name: name.to_owned() }),
            Err(error) if error.kind() == ErrorKind::NotFound => Err(format!(
                "{name}: no such program; build NVIDIA's nccl-tests, and say where it is: --nccl-tests FILE"
            )),
            Err(error) => Err(format!("{name}: {error}")),
        }
    }

    /// Its output, once it has ended with success. It is killed when it prints nothing for
    /// `timeout`.
    fn lines(mut self, timeout: Duration) -> Result<Vec<String>> {
        let errors = Text::of(self.process.0.stderr.take());
        let receiver = lines(self.process.0.stdout.take());
        let mut output = vec![];
        loop {
            match receiver.recv_timeout(timeout) {
                Ok(line) => output.push(line),
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    return Err(format!("{} printed nothing for {timeout:?}", self.name));
                }
            }
        }
        let failed = |error: String| format!("{}: {error}", self.name);
        let status = self.process.wait(timeout).map_err(failed)?;
        if status.success() {
            return Ok(output);
        }
        let errors = errors.finish(timeout).map_err(failed)?;
        let last = errors.lines().rev().chain(output.iter().rev().map(String::as_str));
        let last =
            last.map(str::trim).find(|line| !line.is_empty()).unwrap_or("it printed nothing");
        let gpu = if Path::new("/dev/nvidia0").exists() { "" } else { "; this machine has no GPU" };
        Err(format!("{}, {status}: {last}{gpu}", self.name))
    }
}

/// What nccl-tests printed: a line for each rank, a heading, and a line for the size.
fn read(output: &[String]) -> Result<Run> {
    let words = |line: &String| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let lines: Vec<Vec<String>> = output.iter().map(words).collect();
    let none = || "nccl-tests printed no line that is a measurement".to_owned();
    let starts =
        |line: &[String], with: &[&str]| line.len() > with.len() && line[..with.len()] == *with;
    let ranks = lines.iter().filter(|line| starts(line, &["#", "Rank"])).count();
    let heading = lines.iter().find(|line| starts(line, &["#", "size"])).ok_or_else(none)?;
    let is_row = |line: &&Vec<String>| line.first().is_some_and(|word| word.parse::<u64>().is_ok());
    let row = lines.iter().find(is_row).ok_or_else(none)?;
    let field = |name: &str| {
        let at = heading[1..].iter().position(|word| word == name);
        let value = at.and_then(|at| row.get(at));
        value.ok_or_else(|| format!("nccl-tests printed no column {name}"))
    };
    let number = |name: &str| -> Result<f64> {
        let text = field(name)?;
        text.parse().map_err(|_| format!("nccl-tests printed {text:?} as {name}"))
    };
    let task = Task {
        network: "NCCL, by nccl-tests".to_owned(),
        ranks,
        size: number("size")? as u64,
        chunksize: number("size")? as u64,
        kind: field("type")?.clone(),
        redop: field("redop")?.clone(),
        driver: None,
    };
    // Where nothing is checked it says N/A.
    let wrong = if field("#wrong")? == "N/A" { 0 } else { number("#wrong")? as u64 };
    Ok(Run { task, rank: 0, seconds: number("time")? / 1e6, cpu: None, process: None, wrong })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nccl_tests_output_is_read_by_column_heading() {
        let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
        let heading = "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong";
        let ranks = "#  Rank  0 Group  0 Pid 7 on gpu-0 device  0 [0x07]\n#  Rank  1 Group  0 Pid 7 on gpu-0 device  1 [0x0b]";
        let row = "    67108864      16777216     float     sum      -1   1250.0   53.69   53.69      3   1230.1   54.56   54.56      0";
        let run =
            read(&lines(&format!("# nThread 1\n{ranks}\n{heading}\n{row}\n# Avg bus"))).unwrap();
        assert_eq!((run.task.ranks, run.task.size, run.wrong), (2, 67_108_864, 3));
        assert!((run.seconds - 1.25e-3).abs() < 1e-12 && run.task.kind == "float", "{run:?}");
        let unchecked = row.replace(" 3 ", " N/A ");
        let run = read(&lines(&format!("{heading}\n{unchecked}"))).unwrap();
        assert_eq!(run.wrong, 0);
        assert!(read(&lines("# nThread 1")).unwrap_err().contains("no line"));
        let error =
            read(&lines(&format!("{heading}\n{}", row.replace(" 3 ", " many ")))).unwrap_err();
        assert!(error.contains("many") && error.contains("#wrong"), "{error}");
        let old = heading.replace("#wrong", "error");
        assert!(read(&lines(&format!("{old}\n{row}"))).unwrap_err().contains("#wrong"));
    }
}
