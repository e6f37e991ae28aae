//! Runs with all combinations of some settings, and which of them was best.

use std::process::ExitCode;
use std::str::FromStr;

use serde::Serialize;

use super::Options;
use super::hosts::Hosts;
use super::launch::Launch;
use crate::cli::size::Size;
use crate::error::Result;

/// Maximum number of runs.
const MAX_RUNS: usize = 500;

/// The values that one setting takes.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sweep(Vec<Setting>);

/// One setting's value.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Setting {
    /// Bytes of an operation.
    Chunksize(Size),
    /// Operations in flight.
    Depth(u16),
    /// Jobs at a time.
    Jobs(u16),
    /// Bytes that a server takes at once.
    Piece(Size),
    /// Servers on this machine.
    Servers(usize),
    /// Threads of each server.
    ServerThreads(u16),
    /// Servers that an operation is cut over.
    Split(u16),
    /// A variable of the environment.
    Variable(String, String),
}

impl FromStr for Sweep {
    type Err = String;

    fn from_str(text: &str) -> Result<Self> {
        let (name, values) =
            text.split_once('=').ok_or("NAME=VALUE,..., such as piece=64K,256K")?;
        let all = values.split(',').map(|value| Setting::read(name, value));
        all.collect::<Result<_>>().map(Self)
    }
}

impl Setting {
    fn read(name: &str, value: &str) -> Result<Self> {
        let number = |most: u16| {
            let number = value.parse().ok().filter(|number| (1..=most).contains(number));
            number.ok_or_else(|| format!("{name}={value}: 1 to {most}"))
        };
        let variable = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
        match name {
            "chunksize" => value.parse().map(Self::Chunksize),
            "depth" => number(32).map(Self::Depth),
            "jobs" => number(64).map(Self::Jobs),
            "piece" => value.parse().map(Self::Piece),
            "servers" => number(64).map(|number| Self::Servers(number.into())),
            "server-threads" => number(1024).map(Self::ServerThreads),
            "split" => number(64).map(Self::Split),
            _ if !name.is_empty() && name.chars().all(variable) => {
                Ok(Self::Variable(name.to_owned(), value.to_owned()))
            }
            _ => Err(format!(
                "{name:?}: chunksize, depth, jobs, piece, servers, server-threads, split or a variable's name in capitals"
            )),
        }
    }

    fn apply(&self, options: &mut Options, environment: &mut Vec<(String, String)>) {
        match self.clone() {
            Self::Chunksize(size) => options.chunksize = Some(size),
            Self::Depth(depth) => options.depth = depth,
            Self::Jobs(jobs) => options.jobs = jobs,
            Self::Piece(size) => options.piece = Some(size),
            Self::Servers(servers) => options.servers = Some(servers),
            Self::ServerThreads(threads) => options.server_threads = Some(threads),
            Self::Split(split) => options.split = Some(split),
            Self::Variable(name, value) => environment.push((name, value)),
        }
    }

    /// As it was given.
    fn text(&self) -> String {
        let size = |bytes: u64| match bytes {
            _ if bytes > 0 && bytes.is_multiple_of(1 << 20) => format!("{}M", bytes >> 20),
            _ if bytes > 0 && bytes.is_multiple_of(1 << 10) => format!("{}K", bytes >> 10),
            _ => bytes.to_string(),
        };
        match self {
            Self::Chunksize(bytes) => format!("chunksize={}", size(bytes.0)),
            Self::Depth(depth) => format!("depth={depth}"),
            Self::Jobs(jobs) => format!("jobs={jobs}"),
            Self::Piece(bytes) => format!("piece={}", size(bytes.0)),
            Self::Servers(servers) => format!("servers={servers}"),
            Self::ServerThreads(threads) => format!("server-threads={threads}"),
            Self::Split(split) => format!("split={split}"),
            Self::Variable(name, value) => format!("{name}={value}"),
        }
    }
}

/// Every setting with each of its values, in the order given: the last one changes fastest.
fn combinations(sweeps: &[Sweep]) -> Vec<Vec<Setting>> {
    sweeps.iter().fold(vec![vec![]], |all, Sweep(values)| {
        let longer = |one: &Vec<Setting>| {
            let one = one.clone();
            values.iter().map(move |value| {
                let mut one = one.clone();
                one.push(value.clone());
                one
            })
        };
        all.iter().flat_map(longer).collect()
    })
}

/// One run of them.
#[derive(Serialize)]
struct Outcome {
    settings: String,
    time_us: f64,
    /// GB/s.
    algbw: f64,
    /// Median of an operation, microseconds.
    e2e_us: f64,
    wrong: u64,
}

/// The fastest one. Wrong results are not fast.
fn best(outcomes: &[Outcome]) -> Option<&Outcome> {
    let right = outcomes.iter().filter(|outcome| outcome.wrong == 0);
    right.min_by(|a, b| a.time_us.total_cmp(&b.time_us))
}

/// Runs all combinations, one after the other, and prints them.
///
/// # Errors
/// When one cannot be run.
pub(super) fn run(options: &Options, hosts: &Hosts) -> Result<ExitCode> {
    let all = combinations(&options.sweep);
    if all.len() > MAX_RUNS {
        return Err(format!("{} combinations: at most {MAX_RUNS}", all.len()));
    }
    let servers = |setting: &Setting| matches!(setting, Setting::Servers(_));
    if options.hosts.is_some() && all.iter().flatten().any(servers) {
        return Err("--sweep servers: the hosts' file says which servers there are".to_owned());
    }
    let mut outcomes: Vec<Outcome> = vec![];
    let texts: Vec<String> = all
        .iter()
        .map(|settings| settings.iter().map(Setting::text).collect::<Vec<_>>().join(" "))
        .collect();
    let width = texts.iter().map(String::len).max().unwrap_or(0).max(8);
    if !options.json {
        println!(
            "# {:width$} {:>12} {:>9} {:>12} {:>6}",
            "settings", "time (us)", "GB/s", "e2e (us)", "wrong"
        );
    }
    for (settings, text) in all.iter().zip(texts) {
        let (mut options, mut environment) = (options.clone(), vec![]);
        settings.iter().for_each(|setting| setting.apply(&mut options, &mut environment));
        let local = match options.ranks.spawn {
            Some(ranks) => Some(Hosts::local(options.servers.unwrap_or(0), ranks)?),
            None => None,
        };
        let hosts = local.as_ref().unwrap_or(hosts);
        let launch = Launch { options: &options, hosts, environment: &environment };
        let ended = launch.run()?;
        if !ended.logs.has_run() {
            return Ok(ended.code);
        }
        let clients = ended.logs.of_clients()?;
        let outcome = Outcome {
            settings: text,
            time_us: clients.time_us,
            algbw: clients.algbw,
            e2e_us: clients.e2e.ok_or("nothing was measured")?.median,
            wrong: clients.wrong,
        };
        if !options.json {
            let Outcome { settings, time_us, algbw, e2e_us, wrong } = &outcome;
            println!("  {settings:width$} {time_us:>12.1} {algbw:>9.3} {e2e_us:>12.1} {wrong:>6}");
        }
        outcomes.push(outcome);
    }
    let best = best(&outcomes);
    if options.json {
        let text = serde_json::json!({"runs": outcomes, "best": best});
        println!("{text}");
    } else if let Some(best) = best {
        println!("# best: {}, {:.3} GB/s", best.settings, best.algbw);
    }
    let all_right = outcomes.iter().all(|outcome| outcome.wrong == 0);
    Ok(if all_right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sweep_runs_each_combination_once() {
        let sweeps: Vec<Sweep> =
            ["piece=64K,1M", "EVENKEEL_FLOWS=1,2,4"].map(|text| text.parse().unwrap()).into();
        let texts: Vec<_> = combinations(&sweeps)
            .iter()
            .map(|all| all.iter().map(Setting::text).collect::<Vec<_>>().join(" "))
            .collect();
        assert_eq!(texts.len(), 6);
        assert_eq!(texts[0], "piece=64K EVENKEEL_FLOWS=1");
        assert_eq!(texts[1], "piece=64K EVENKEEL_FLOWS=2");
        assert_eq!(texts[5], "piece=1M EVENKEEL_FLOWS=4");
    }

    #[test]
    fn sweep_best_is_the_fastest_correct_run() {
        let outcome = |(settings, time_us, wrong): (&str, f64, u64)| Outcome {
            settings: settings.to_owned(),
            time_us,
            algbw: 1.0,
            e2e_us: 1.0,
            wrong,
        };
        let chosen = |all: &[(&str, f64, u64)]| {
            let outcomes: Vec<_> = all.iter().copied().map(outcome).collect();
            best(&outcomes).map(|best| best.settings.clone())
        };
        let wrong = ("wrong", 5.0, 1);
        assert_eq!(chosen(&[("a", 30.0, 0), wrong, ("b", 10.0, 0), ("c", 20.0, 0)]).unwrap(), "b");
        assert_eq!(chosen(&[wrong]), None);
        assert_eq!(chosen(&[]), None);
    }

    #[test]
    fn sweep_refuses_unknown_settings() {
        for text in ["piece", "piece=", "piece=x", "depth=0", "depth=33", "colour=red", "=1"] {
            assert!(text.parse::<Sweep>().is_err(), "{text}");
        }
    }
}
