//! Runs with all combinations of some settings, and which of them was best.

use std::ffi::OsString;
use std::process::ExitCode;
use std::str::FromStr;

use clap::{Args, Command, FromArgMatches};
use serde::Serialize;

use super::Options;
use super::hosts::Hosts;
use super::launch::Launch;
use crate::error::Result;
use crate::output::record;
use crate::ranks::spawn::arguments_without;
use crate::workload::Workload;

/// Maximum number of runs.
const MAX_RUNS: usize = 500;

/// The flags whose values a sweep may give.
const FLAGS: [&str; 7] =
    ["chunksize", "depth", "jobs", "piece", "servers", "server-threads", "split"];

/// The values that one setting takes.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sweep(Vec<Setting>);

/// One setting's value: of a flag, or of a variable of the environment.
#[derive(Clone, Debug, PartialEq)]
struct Setting {
    name: String,
    value: String,
}

impl FromStr for Sweep {
    type Err = String;

    fn from_str(text: &str) -> Result<Self> {
        let (name, values) =
            text.split_once('=').ok_or("NAME=VALUE,..., such as piece=64K,256K")?;
        let variable = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
        if !FLAGS.contains(&name) && (name.is_empty() || !name.chars().all(variable)) {
            return Err(format!(
                "{name:?}: {}, or a variable's name in capitals",
                FLAGS.join(", ")
            ));
        }
        let setting = |value: &str| Setting { name: name.to_owned(), value: value.to_owned() };
        Ok(Self(values.split(',').map(setting).collect()))
    }
}

/// A line with these settings.
fn text(settings: &[Setting]) -> String {
    let all: Vec<String> =
        settings.iter().map(|Setting { name, value }| format!("{name}={value}")).collect();
    all.join(" ")
}

/// The options and the environment of a run: those of a command line, with these settings in place
/// of what it has.
fn with(arguments: &[OsString], settings: &[Setting]) -> Result<(Options, Vec<(String, String)>)> {
    let is_flag = |setting: &&Setting| FLAGS.contains(&&*setting.name);
    let (flags, variables): (Vec<&Setting>, Vec<_>) = settings.iter().partition(is_flag);
    let flags = flags.iter().map(|flag| format!("--{}={}", flag.name, flag.value).into());
    let command = Options::augment_args(Command::new("reduction").args_override_self(true));
    let matches = command.try_get_matches_from(arguments.iter().cloned().chain(flags));
    let options = matches.and_then(|matches| Options::from_arg_matches(&matches));
    let first_line = |error: clap::Error| {
        let text = error.to_string();
        let line = text.lines().next().unwrap_or_default();
        format!("--sweep: {}", line.strip_prefix("error: ").unwrap_or(line))
    };
    let variable = |setting: &Setting| (setting.name.clone(), setting.value.clone());
    Ok((options.map_err(first_line)?, variables.into_iter().map(variable).collect()))
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
    let servers = |setting: &Setting| setting.name == "servers";
    if options.hosts.is_some() && all.iter().flatten().any(servers) {
        return Err("--sweep servers: the hosts' file says which servers there are".to_owned());
    }
    // All are read before the first run.
    let arguments = arguments_without(&["--sweep"]);
    let runs: Vec<_> =
        all.iter().map(|settings| with(&arguments, settings)).collect::<Result<_>>()?;
    let texts: Vec<String> = all.iter().map(|settings| text(settings)).collect();
    let width = texts.iter().map(String::len).max().unwrap_or(0).max(8);
    let mut outcomes: Vec<Outcome> = vec![];
    if !options.output.json {
        println!(
            "# {:width$} {:>12} {:>9} {:>12} {:>6}",
            "settings", "time (us)", "GB/s", "e2e (us)", "wrong"
        );
    }
    for ((options, environment), text) in runs.into_iter().zip(texts) {
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
        if !options.output.json {
            let Outcome { settings, time_us, algbw, e2e_us, wrong } = &outcome;
            println!("  {settings:width$} {time_us:>12.1} {algbw:>9.3} {e2e_us:>12.1} {wrong:>6}");
        }
        outcomes.push(outcome);
    }
    let best = best(&outcomes);
    if options.output.json {
        let wrong: u64 = outcomes.iter().map(|outcome| outcome.wrong).sum();
        let measured = serde_json::json!({"runs": outcomes, "best": best, "wrong": wrong});
        record::print(Options::NAME, vec![], &measured)?;
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
        let texts: Vec<_> = combinations(&sweeps).iter().map(|all| text(all)).collect();
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
    fn sweep_settings_replace_those_of_the_command_line() {
        let arguments =
            ["reduction", "--ranks", "2", "--depth", "4", "-n", "7"].map(OsString::from);
        let with_sweep = |text: &str| {
            let Sweep(settings) = text.parse::<Sweep>()?;
            with(&arguments, &settings)
        };
        let (options, environment) = with_sweep("depth=9").unwrap();
        assert_eq!((options.depth, options.run.iterations, environment), (9, 7, vec![]));
        let (options, environment) = with_sweep("EVENKEEL_FLOWS=2").unwrap();
        assert_eq!((options.depth, environment[0].1.as_str()), (4, "2"));
        for text in ["piece", "piece=", "piece=x", "depth=0", "depth=33", "colour=red", "=1"] {
            let error = with_sweep(text).err().unwrap_or_else(|| panic!("{text} is taken"));
            assert_eq!(error.lines().count(), 1, "{error}");
        }
    }
}
