//! `evenkeel-reduction-server`: the server as a program.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};
use evenkeel_reduction_server::{MIN_PIECE_BYTES, Server, ServerOptions};
use evenkeel_transport::{Log, Settings};
use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// How often the number of communicators is checked while the server drains.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Maximum of --piece: a client has a dozen pieces in flight.
const MAX_PIECE_BYTES: u64 = 16 << 20;

/// Sums gradients for the ranks of training jobs
#[derive(Parser)]
#[command(
    version,
    max_term_width = 100,
    after_help = "\
Examples:
  evenkeel-reduction-server serve
  EVENKEEL_JOB_KEY_FILE=/etc/evenkeel/key evenkeel-reduction-server serve --metrics 0.0.0.0:9470 --memory 4GiB
  A leaf, one in each rack, whose sums an upstream server reduces:
    evenkeel-reduction-server serve --upstream 10.0.9.1:7470

The jobs' ranks set EVENKEEL_REDUCTION_SERVERS=host:port,... and NCCL_COLLNET_ENABLE=1. The server connects back to each rank,
so each must be able to connect to the other. `evenkeel-bench settings` lists the transport's settings."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve until SIGTERM; then refuse new communicators and end with the last
    Serve(Serve),
}

#[derive(clap::Args)]
struct Serve {
    /// Where to listen; [::] is all addresses, IPv4 as well
    #[arg(long, default_value = "[::]:7470", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// Upstream servers, host:port, that reduce the sums of this server and of other leaves: for
    /// jobs whose ranks have different lists of servers, such as those of their rack. All leaves
    /// must have the same upstream servers, in the same order
    #[arg(long, value_delimiter = ',', value_parser = server, value_name = "HOST:PORT,...")]
    upstream: Vec<String>,
    /// Where to serve /metrics, /healthz and /readyz [default: nowhere]
    #[arg(long, value_name = "ADDR:PORT")]
    metrics: Option<SocketAddr>,
    /// Maximum memory for buffers, over all jobs
    #[arg(long, default_value = "1GiB", value_parser = size, value_name = "SIZE")]
    memory: u64,
    /// Threads that reduce [default: the cores that this process may use]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024), value_name = "N")]
    threads: Option<u16>,
    /// How long to wait for running communicators after SIGTERM
    #[arg(long, default_value = "30s", value_parser = seconds, value_name = "TIME")]
    drain_timeout: Duration,
    /// Maximum size of the pieces in which a vector is received, reduced and sent; less for many
    /// ranks with little memory
    #[arg(long, default_value = "256KiB", value_parser = piece, value_name = "SIZE")]
    piece: u64,
    /// File for the times at which each piece was received, reduced and sent, one line each; - is
    /// standard output
    #[arg(long, value_name = "FILE")]
    timeline: Option<PathBuf>,
    /// End as with SIGTERM when standard input is closed, so that the server does not outlive its
    /// parent process
    #[arg(long)]
    until_stdin_closes: bool,
}

/// Logs to standard error.
struct Stderr;

impl Log for Stderr {
    fn warn(&self, line: &str) {
        eprintln!("warning: {line}");
    }

    fn info(&self, line: &str) {
        eprintln!("{line}");
    }
}

fn main() -> ExitCode {
    let Command::Serve(options) = Cli::parse().command;
    match serve(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(options: &Serve) -> Result<(), String> {
    // Gradients stay out of core dumps and away from debuggers.
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    setrlimit(Resource::Core, none)
        .and_then(|()| set_dumpable_behavior(DumpableBehavior::NotDumpable))
        .map_err(|error| format!("cannot turn core dumps off: {error}"))?;
    // Before any thread starts, so that no signal is missed.
    let mut signals = Signals::new([SIGTERM, SIGINT])
        .map_err(|error| format!("cannot wait for signals: {error}"))?;
    let settings = Settings::from_env().map_err(|error| error.to_string())?;
    let reduction = evenkeel_reduction::Settings::from_env().map_err(|error| error.to_string())?;
    if !settings.has_job_key() {
        Stderr
            .warn("no job key (EVENKEEL_JOB_KEY_FILE): any client that reaches the port can join");
    }
    let encryption = settings.encryption_status();
    // This respects the CPU affinity and the control group's quota.
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let threads = options.threads.map_or(cores, usize::from);
    let started = Server::start(
        settings,
        &ServerOptions {
            listen: options.listen,
            metrics: options.metrics,
            upstream: options.upstream.clone(),
            memory: options.memory,
            timeout: reduction.timeout,
            threads,
            piece: options.piece,
            timeline: options.timeline.clone(),
        },
        Arc::new(Stderr),
    );
    let server = started.map_err(|error| error.to_string())?;
    let metrics = match server.metrics_address() {
        Some(address) => format!("http://{address}/metrics"),
        None => "off".to_owned(),
    };
    eprintln!(
        "listening at {}, metrics {metrics}, {} bytes for buffers, {threads} threads, {}, {encryption}",
        server.address(),
        options.memory,
        evenkeel_reduction_kernels::instruction_set()
    );
    if options.until_stdin_closes {
        thread::spawn(|| {
            let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
            // Fails only for an invalid signal.
            let _ = signal_hook::low_level::raise(SIGTERM);
        });
    }
    let _ = signals.forever().next();
    server.drain();
    let left = server.communicators();
    eprintln!(
        "shutting down: waiting for {left} communicators, at most {:?}",
        options.drain_timeout
    );
    let deadline = Instant::now() + options.drain_timeout;
    while server.communicators() > 0 && Instant::now() < deadline {
        if signals.pending().next().is_some() {
            eprintln!("a second signal: ending at once");
            break;
        }
        thread::sleep(DRAIN_POLL_INTERVAL);
    }
    Ok(())
}

fn server(text: &str) -> Result<String, String> {
    let mut server = evenkeel_reduction::parse_servers(text).unwrap_or_default();
    let wrong = || "it takes host:port, with a name or an address".to_owned();
    server.pop().ok_or_else(wrong)
}

fn size(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let wrong =
        || "it takes a number of bytes, or of KiB, MiB, GiB or TiB, such as 512MiB".to_owned();
    let shift = match unit.trim() {
        "" => 0,
        "K" | "KiB" | "Ki" => 10,
        "M" | "MiB" | "Mi" => 20,
        "G" | "GiB" | "Gi" => 30,
        "T" | "TiB" | "Ti" => 40,
        _ => return Err(wrong()),
    };
    let number: u64 = number.parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).ok_or_else(|| "it is too large".to_owned())
}

fn piece(text: &str) -> Result<u64, String> {
    let fits = |bytes: &u64| {
        (MIN_PIECE_BYTES..=MAX_PIECE_BYTES).contains(bytes) && bytes.is_multiple_of(128)
    };
    let wrong = || "it takes 16KiB to 16MiB, in multiples of 128 bytes".to_owned();
    size(text).ok().filter(fits).ok_or_else(wrong)
}

fn seconds(text: &str) -> Result<Duration, String> {
    let number = text.strip_suffix('s').unwrap_or(text);
    let number = number.parse().ok().filter(|seconds| *seconds <= 86_400);
    number.map(Duration::from_secs).ok_or_else(|| "it takes seconds, such as 30s".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_parsed_or_rejected() {
        assert_eq!(size("1GiB"), Ok(1 << 30));
        assert_eq!(size("512M"), Ok(512 << 20));
        assert_eq!(size("100"), Ok(100));
        assert!(size("GiB").is_err() && size("1 parsec").is_err() && size("99999999TiB").is_err());
        assert_eq!(piece("256KiB"), Ok(evenkeel_reduction_server::PIECE_BYTES), "the default");
        assert_eq!(piece("1MiB"), Ok(1 << 20));
        assert!(piece("8KiB").is_err() && piece("20000").is_err() && piece("1GiB").is_err());
        assert_eq!(server("root:7470"), Ok("root:7470".to_owned()));
        assert!(server("root").is_err() && server("http://root:1").is_err());
        assert_eq!(seconds("30s"), Ok(Duration::from_secs(30)));
        assert_eq!(seconds("5"), Ok(Duration::from_secs(5)));
        assert!(seconds("soon").is_err() && seconds("1000000").is_err());
    }
}
