//! Starts all ranks of a run on this machine, as processes of their own.

use std::ffi::OsString;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::cli::options::local_listener;
use crate::error::Result;
use crate::ranks::child::Started;

/// Maximum number of ranks on one machine: each is a process with threads and sockets.
const MAX_RANKS: usize = 128;
/// How long the others may take to end by themselves once one failed.
const GRACE: Duration = Duration::from_secs(10);

/// Runs this program again as `ranks` ranks, with the same arguments. They end when this process
/// does.
///
/// # Errors
/// Says why a rank could not be started.
pub(crate) fn spawn(ranks: usize) -> Result<ExitCode> {
    check(ranks)?;
    let (listener, address) = local_listener()?;
    let mut running = Running::default();
    for rank in 0..ranks {
        let started = start(rank, ranks, &listener, address);
        running.add(started.map_err(|error| format!("rank {rank}: {error}"))?);
    }
    drop(listener);
    running.wait()
}

/// # Errors
/// When there are too many ranks for one machine.
pub(crate) fn check(ranks: usize) -> Result<()> {
    if !(1..=MAX_RANKS).contains(&ranks) {
        return Err(format!("--spawn {ranks}: 1 to {MAX_RANKS}"));
    }
    Ok(())
}

fn start(
    rank: usize,
    ranks: usize,
    listener: &TcpListener,
    address: SocketAddr,
) -> std::io::Result<Child> {
    let input = match rank {
        0 => Stdio::from(OwnedFd::from(listener.try_clone()?)),
        _ => Stdio::null(),
    };
    Command::new(std::env::current_exe()?)
        .args(arguments_without(&["--spawn", "--ranks"]))
        .args(["--spawned-by", &std::process::id().to_string()])
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", ranks.to_string())
        .env("MASTER_ADDR", address.ip().to_string())
        .env("MASTER_PORT", address.port().to_string())
        .stdin(input)
        .spawn()
}

/// This process's arguments without these flags and their values.
pub(crate) fn arguments_without(flags: &[&str]) -> Vec<OsString> {
    let mut kept = vec![];
    let mut all = std::env::args_os().skip(1);
    while let Some(argument) = all.next() {
        let text = argument.to_string_lossy();
        if flags.contains(&&*text) {
            all.next();
        } else if !text.split_once('=').is_some_and(|(flag, _)| flags.contains(&flag)) {
            kept.push(argument);
        }
    }
    kept
}

/// The ranks, killed if this is dropped before they end.
#[derive(Default)]
pub(crate) struct Running(Vec<Started>);

impl Running {
    /// One more.
    pub(crate) fn add(&mut self, rank: Child) {
        self.0.push(Started(rank));
    }

    /// Waits for all; gives the first failure's status. The ranks themselves notice when nothing
    /// moves.
    ///
    /// # Errors
    /// When one failed and the others went on.
    pub(crate) fn wait(mut self) -> Result<ExitCode> {
        let mut failed: Option<(ExitStatus, Instant)> = None;
        while !self.0.is_empty() {
            let mut left = vec![];
            let before = self.0.len();
            for mut rank in self.0.drain(..) {
                match rank.status()? {
                    None => left.push(rank),
                    Some(status) if !status.success() && failed.is_none() => {
                        failed = Some((status, Instant::now()));
                    }
                    Some(_) => {}
                }
            }
            let none_ended = left.len() == before;
            self.0 = left;
            if failed.is_some_and(|(_, since)| since.elapsed() > GRACE) {
                return Err("a rank failed and the others did not end; they were killed".to_owned());
            }
            if none_ended {
                thread::sleep(Duration::from_millis(5));
            }
        }
        Ok(match failed {
            None => ExitCode::SUCCESS,
            Some((status, _)) => {
                ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
            }
        })
    }
}
