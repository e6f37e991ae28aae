//! What happens to the network of a soak: its rate, its state, and its connections. The network is
//! the loopback of a network namespace of its own.

use std::io::Write;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use evenkeel_testkit::TestRng;

use crate::error::Result;

/// Maximum time in which nothing comes through. A connection that its owner has closed delivers for
/// longer.
const MAX_OUTAGE: Duration = Duration::from_millis(1500);
/// Maximum number of flows that are reset at once.
const MAX_RESETS: u64 = 8;

/// The kinds of faults of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// Another rate, or none.
    Rate,
    /// A share of the packets is lost, or none any more.
    Loss,
    /// Some flows are reset.
    Reset,
    /// Nothing comes through for a while, without any notice.
    Silence,
    /// The interface is down for a while.
    Down,
}

impl Fault {
    pub(super) const ALL: [Self; 5] =
        [Self::Rate, Self::Loss, Self::Reset, Self::Silence, Self::Down];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Rate => "rate changes",
            Self::Loss => "losses",
            Self::Reset => "resets",
            Self::Silence => "silences",
            Self::Down => "link down",
        }
    }
}

/// Brings up the loopback of this namespace.
pub(super) fn up() -> Result<()> {
    run("ip", &["link", "set", "lo", "up"])?;
    nft("table inet soak { chain out { type filter hook output priority 0; }; }")
}

/// Makes the network whole again.
pub(super) fn heal() -> Result<()> {
    // Absent unless a fault has set it.
    let _ = run("tc", &["qdisc", "del", "dev", "lo", "root"]);
    nft("flush chain inet soak out")
}

/// Lets a fault happen, and waits until it is over where that matters. Returns how many.
pub(super) fn inflict(fault: Fault, rng: &mut TestRng) -> Result<u64> {
    let outage = |rng: &mut TestRng| {
        Duration::from_millis(50 + rng.below(MAX_OUTAGE.as_millis() as u64 - 50))
    };
    match fault {
        Fault::Rate if rng.one_in(3) => heal()?,
        Fault::Rate => {
            let rate = format!("{}mbit", 20 + rng.below(2000));
            let limits = ["burst", "256kb", "latency", "50ms"];
            let shaped = ["qdisc", "replace", "dev", "lo", "root", "tbf", "rate", &rate];
            run("tc", &[&shaped[..], &limits].concat())?;
        }
        Fault::Loss => {
            let per_mille = rng.below(20);
            nft("flush chain inet soak out")?;
            if per_mille > 0 {
                nft(&format!("add rule inet soak out numgen random mod 1000 < {per_mille} drop"))?;
            }
        }
        Fault::Reset => return reset_some(rng),
        Fault::Silence => {
            nft("add rule inet soak out drop")?;
            thread::sleep(outage(rng));
            nft("flush chain inet soak out")?;
        }
        Fault::Down => {
            run("ip", &["link", "set", "lo", "down"])?;
            thread::sleep(outage(rng));
            run("ip", &["link", "set", "lo", "up"])?;
        }
    }
    Ok(1)
}

/// Resets some of the open flows. Returns how many.
fn reset_some(rng: &mut TestRng) -> Result<u64> {
    let list = output("ss", &["-H", "-t", "-n", "state", "established"])?;
    let ports: Vec<&str> = list
        .lines()
        .filter_map(|line| line.split_whitespace().nth(2)?.rsplit(':').next())
        .collect();
    let count = (1 + rng.below(MAX_RESETS)).min(ports.len() as u64);
    for _ in 0..count {
        let port = format!(":{}", ports[rng.index(ports.len())]);
        output("ss", &["-K", "-H", "-t", "sport", "=", &port])?;
    }
    Ok(count)
}

fn nft(commands: &str) -> Result<()> {
    let child = Command::new("nft").args(["-f", "-"]).stdin(Stdio::piped()).spawn();
    let mut child = child.map_err(|error| format!("nft: {error}"))?;
    let wrote = child.stdin.take().map(|mut input| input.write_all(commands.as_bytes()));
    let status = child.wait().map_err(|error| format!("nft: {error}"))?;
    match (status.success(), wrote) {
        (true, Some(Ok(()))) => Ok(()),
        _ => Err(format!("nft: {commands}: {status}")),
    }
}

fn run(program: &str, arguments: &[&str]) -> Result<()> {
    output(program, arguments).map(|_| ())
}

fn output(program: &str, arguments: &[&str]) -> Result<String> {
    let ran = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let ran = ran.map_err(|error| format!("{program}: {error}"))?;
    if !ran.status.success() {
        let said = String::from_utf8_lossy(&ran.stderr);
        return Err(format!("{program} {}: {}", arguments.join(" "), said.trim()));
    }
    Ok(String::from_utf8_lossy(&ran.stdout).into_owned())
}
