//! One run of servers and ranks, from start to end.

use std::env;
use std::os::fd::OwnedFd;
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use super::hosts::Hosts;
use super::servers::Servers;
use super::timeline_log::Logs;
use super::{Options, RunType};
use crate::cli;
use crate::cli::options::local_listener;
use crate::error::Result;
use crate::ranks::child::{Text, this_program};
use crate::ranks::spawn::Running;

/// Default port of rank 0, for ranks on several hosts.
const MASTER_PORT: u16 = 29_500;
/// How long the output of a rank that has ended may stay open.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(30);

/// What to run where.
pub(super) struct Launch<'a> {
    pub(super) options: &'a Options,
    pub(super) hosts: &'a Hosts,
    /// More for the environment of servers and ranks.
    pub(super) environment: &'a [(String, String)],
}

/// What came of it.
pub(super) struct Ended {
    /// Of the first rank that failed, if one did.
    pub(super) code: ExitCode,
    pub(super) logs: Logs,
}

impl Launch<'_> {
    /// Starts servers, if the run needs some, and ranks, and waits for their end. All of them end
    /// when this process does.
    ///
    /// # Errors
    /// Says what could not be started, or what does not end.
    pub(super) fn run(&self) -> Result<Ended> {
        let Self { options, hosts, environment } = self;
        let mut environment = environment.to_vec();
        if let Some(split) = options.split {
            environment.push(("EVENKEEL_REDUCTION_SPLIT".to_owned(), split.to_string()));
        }
        let mut servers = None;
        if options.run_type == RunType::Servers && !hosts.servers.is_empty() {
            let started = Servers::start(options, &hosts.servers, &environment)?;
            let addresses = started.addresses().join(",");
            environment.push(("EVENKEEL_REDUCTION_SERVERS".to_owned(), addresses));
            servers = Some(started);
        }
        let (code, clients) = self.ranks(&environment)?;
        let servers = servers.map_or(Ok(vec![]), Servers::finish)?;
        Ok(Ended { code, logs: Logs::new(clients, servers)? })
    }

    /// Runs all ranks of all jobs; gives what each wrote, the jobs one after the other.
    fn ranks(&self, environment: &[(String, String)]) -> Result<(ExitCode, Vec<String>)> {
        let Self { options, hosts, .. } = self;
        let own = this_program()?;
        let program = options.bench_program.as_ref().unwrap_or(&own);
        let mut running = Running::default();
        let mut written = vec![];
        for job in 0..options.jobs {
            let listener = if hosts.are_here() { Some(local_listener()?) } else { None };
            let port = match &listener {
                Some((_, address)) => address.port(),
                None => options.ranks.master_port.unwrap_or(MASTER_PORT).saturating_add(job),
            };
            for (rank, host) in hosts.clients.iter().enumerate() {
                let fail = |error: std::io::Error| format!("rank {rank}: {error}");
                let mut more = environment.to_vec();
                if options.jobs > 1 {
                    // So that the servers' metrics distinguish them.
                    more.push(("EVENKEEL_JOB".to_owned(), format!("bench-{job}")));
                }
                let name = format!("evenkeel-bench-{}-{job}-{rank}", std::process::id());
                let timeline = env::temp_dir().join(name);
                for (name, value) in [
                    ("EVENKEEL_REDUCTION_TIMELINE", timeline.to_string_lossy().into_owned()),
                    ("RANK", rank.to_string()),
                    ("WORLD_SIZE", hosts.clients.len().to_string()),
                    ("MASTER_ADDR", hosts.clients[0].address.clone()),
                    ("MASTER_PORT", port.to_string()),
                ] {
                    more.push((name.to_owned(), value));
                }
                let mut arguments = arguments(options);
                let input = match &listener {
                    Some((listener, _)) => {
                        arguments
                            .extend(["--spawned-by".to_owned(), std::process::id().to_string()]);
                        match rank {
                            0 => Stdio::from(OwnedFd::from(listener.try_clone().map_err(fail)?)),
                            _ => Stdio::null(),
                        }
                    }
                    None => Stdio::piped(),
                };
                let mut command = host.command(program, &arguments, &more);
                let mut child =
                    command.stdin(input).stdout(Stdio::piped()).spawn().map_err(fail)?;
                written.push(Text::of(child.stdout.take()));
                running.add(child);
            }
        }
        let code = running.wait()?;
        let written = written.iter().enumerate().map(|(rank, text)| {
            text.finish(OUTPUT_TIMEOUT).map_err(|error| format!("rank {rank}: {error}"))
        });
        Ok((code, written.collect::<Result<_>>()?))
    }
}

/// Those of a rank.
fn arguments(options: &Options) -> Vec<String> {
    let run = &options.run;
    let given = [
        ("--run-type", Some(cli::name(&options.run_type))),
        ("--driver", Some(cli::name(&options.driver))),
        ("--size", Some(options.size.0.to_string())),
        ("--chunksize", options.chunksize.map(|size| size.0.to_string())),
        ("--depth", Some(options.depth.to_string())),
        ("--iters", Some(run.iterations.to_string())),
        ("--warmup_iters", Some(run.warmup.to_string())),
        ("--check", Some(run.check.to_string())),
        ("--datatype", Some(run.kind.name())),
        ("--op", Some(run.op.name())),
        ("--timeout", Some(options.ranks.timeout.to_string())),
        ("--plugin", options.network.plugin.clone()),
        ("--transport", options.network.transport.as_ref().map(cli::name)),
        ("--api", options.network.api.map(|version| version.to_string())),
        ("--device", Some(options.network.device.to_string())),
    ];
    let mut all = vec!["reduction".to_owned(), "--watched".to_owned()];
    for (name, value) in given {
        all.extend(value.map(|value| [name.to_owned(), value]).into_iter().flatten());
    }
    all
}
