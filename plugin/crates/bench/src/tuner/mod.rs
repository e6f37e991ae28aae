//! `evenkeel-bench tuner`: what the plugin's tuner chooses, beside NCCL's own choice.

mod nccl;

use std::fmt::Write as _;

use clap::Args;
use evenkeel_tuner::{
    Algorithm, Collective, Network, Protocol, Servers, choose, chunk_bytes, seconds,
};

use crate::error::Result;
use crate::output;
use nccl::Model;

/// The network.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  evenkeel-bench tuner --nodes 8 --bandwidth 9400 --latency 35
  evenkeel-bench tuner --nodes 64 --bandwidth 9400 --latency 35 --servers 16")]
pub(crate) struct Options {
    /// Number of nodes, each with one rank
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(2..))]
    nodes: u16,
    /// Bandwidth of a node and of a server in each direction, and the speed that devices report to
    /// NCCL, Mb/s: EVENKEEL_TUNER_BANDWIDTH
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    bandwidth: u32,
    /// Measured time of a small message, half a round trip, microseconds: EVENKEEL_TUNER_LATENCY
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    latency: u32,
    /// Number of reduction servers
    #[arg(long, default_value_t = 0)]
    servers: u16,
    /// Print the page of the documentation
    #[arg(long)]
    markdown: bool,
}

/// Sizes from 1 KiB to 1 GiB.
fn sizes() -> impl Iterator<Item = usize> {
    (10..=30).map(|power| 1 << power)
}

/// A network as measured, and as its devices describe it to NCCL.
#[derive(Clone, Copy)]
struct Case {
    network: Network,
    /// GB/s.
    speed: f64,
}

/// Both choices for one size.
struct Choices {
    nccl: (Algorithm, Protocol),
    ours: (Algorithm, Protocol),
}

const ALL_REDUCE: Collective = Collective::AllReduce;

impl Case {
    fn choices(&self, bytes: usize) -> Result<Choices> {
        let collnet = self.network.servers.is_some();
        let model = Model { nodes: self.network.nodes, speed: self.speed, collnet };
        let table = |algorithm, protocol| model.micros(algorithm, protocol, bytes);
        let pairs = Algorithm::ALL.into_iter().flat_map(|algorithm| {
            Protocol::ALL.into_iter().map(move |protocol| (algorithm, protocol))
        });
        let micros = |pair: &(Algorithm, Protocol)| table(pair.0 as usize, pair.1 as usize);
        let nccl = pairs
            .filter(|pair| micros(pair) >= 0.0)
            .min_by(|a, b| micros(a).total_cmp(&micros(b)))
            .ok_or("NCCL has no algorithm")?;
        let ours = choose(&self.network, ALL_REDUCE, bytes, (7, 3), table).unwrap_or(nccl);
        Ok(Choices { nccl, ours })
    }

    /// Estimated seconds of an algorithm and protocol that NCCL offers.
    fn seconds(&self, (algorithm, protocol): (Algorithm, Protocol), bytes: usize) -> Result<f64> {
        seconds(&self.network, ALL_REDUCE, algorithm, protocol, bytes)
            .ok_or_else(|| format!("{} has no estimate", algorithm.name()))
    }
}

fn name((algorithm, protocol): (Algorithm, Protocol)) -> String {
    // Reduction servers have one protocol.
    if algorithm.uses_servers() {
        "servers".to_owned()
    } else {
        format!("{} {}", algorithm.name(), protocol.name())
    }
}

fn size(bytes: usize) -> String {
    match bytes {
        0..1_048_576 => format!("{} KiB", bytes >> 10),
        1_048_576..1_073_741_824 => format!("{} MiB", bytes >> 20),
        _ => format!("{} GiB", bytes >> 30),
    }
}

fn time(seconds: f64) -> String {
    match seconds {
        ..1e-3 => format!("{:.0} us", seconds * 1e6),
        1e-3..1.0 => format!("{:.1} ms", seconds * 1e3),
        _ => format!("{seconds:.1} s"),
    }
}

/// Prints the table of a network, or the page.
///
/// # Errors
/// Says what could not be printed.
pub(crate) fn run(options: &Options) -> Result<()> {
    output::write(&if options.markdown { markdown()? } else { plain(options)? })
}

/// Bytes a second of Mb/s.
fn bytes_of(megabits: u32) -> f64 {
    f64::from(megabits) * 1e6 / 8.0
}

fn plain(options: &Options) -> Result<String> {
    let Options { bandwidth, latency, .. } = *options;
    let shown = Shown { title: "", bandwidth, latency, speed: bandwidth };
    let case = shown.case(options.nodes.into(), options.servers.into());
    let mut text = format!(
        "{:>8}  {:<14} {:>9}  {:<14} {:>9}  {:>9}\n",
        "size", "NCCL", "estimate", "Evenkeel", "estimate", "chunk"
    );
    for bytes in sizes() {
        let Choices { nccl, ours } = case.choices(bytes)?;
        let chunk = chunk_bytes(&case.network, ALL_REDUCE, ours.0, ours.1, bytes, 2);
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{:>8}  {:<14} {:>9}  {:<14} {:>9}  {:>9}",
            size(bytes),
            name(nccl),
            time(case.seconds(nccl, bytes)?),
            name(ours),
            time(case.seconds(ours, bytes)?),
            chunk.map_or_else(|| "NCCL's".to_owned(), size)
        );
    }
    Ok(text)
}

/// A network of the page: what it is, what was measured (Mb/s and microseconds), and the speed that
/// its devices report (Mb/s).
struct Shown {
    title: &'static str,
    bandwidth: u32,
    latency: u32,
    speed: u32,
}

impl Shown {
    /// This number of nodes with one rank each, and of servers with the bandwidth of a node.
    fn case(&self, nodes: usize, servers: usize) -> Case {
        let bandwidth = bytes_of(self.bandwidth);
        let servers = (servers > 0).then_some(Servers { count: servers, bandwidth });
        let latency = f64::from(self.latency) * 1e-6;
        let network = Network { nodes, ranks: nodes, bandwidth, latency, servers };
        Case { network, speed: bytes_of(self.speed) / 1e9 }
    }
}

const SHOWN: [Shown; 3] = [
    Shown { title: "One card of 10 Gbit/s", bandwidth: 9_400, latency: 30, speed: 10_000 },
    Shown {
        title: "Four cards of 1 Gbit/s, joined (`EVENKEEL_DEVICES=joined`)",
        bandwidth: 3_760,
        latency: 60,
        speed: 4_000,
    },
    Shown {
        title: "One card of 10 Gbit/s and one of 1 Gbit/s, joined",
        bandwidth: 10_300,
        latency: 60,
        speed: 11_000,
    },
];

const NODES: [usize; 3] = [2, 8, 64];

/// What servers there are: the words of the page, and their number for so many nodes.
type ServerCount = (&'static str, fn(usize) -> usize);

const SERVERS: [ServerCount; 3] = [
    ("without reduction servers", |_| 0),
    ("with one reduction server", |_| 1),
    ("with one reduction server for each node", |nodes| nodes),
];

fn markdown() -> Result<String> {
    let mut text = "\
# What the tuner chooses

Written by `evenkeel-bench tuner --markdown`; do not edit. **Everything here is computed; nothing is
measured.** A machine with GPUs has not been available. The times are estimates of one model for
both choices, so they compare choices and promise no speed.

NCCL estimates how long each of its algorithms takes, and uses the fastest. It knows the speed that
a device reports. It does not know the latency of TCP, nor how many reduction servers there are, nor
what a network really carries. The plugin's tuner knows these from [settings](../settings.md). It
replaces NCCL's choice where another is estimated to take less than 80 percent of its time.

```
EVENKEEL_TUNER_BANDWIDTH=9400
EVENKEEL_TUNER_LATENCY=30
```

`spec.environment` of a NetworkProfile gives them to all pods of a job. They must be the same on all
ranks: ranks that choose differently wait for each other for ever. So the tuner never uses what a
rank finds out by itself. Without both settings NCCL chooses alone, as with `EVENKEEL_TUNER=0`.
With `tuner: {source: Preflight}`, a profile gives new jobs what
[checks measured](../operate.md#nccls-algorithms). By hand, a check reports the bandwidth
(`medianBusBandwidth`, in bytes: times 8, in millions), and `evenkeel-bench net --ping-pong` measures
the latency: half of its round trip. `evenkeel-bench tuner` prints these tables for any network.

**What it never does.** It takes no algorithm that NCCL does not offer, or that `NCCL_ALGO` or
`NCCL_PROTO` exclude. It leaves the number of channels, and operations in a group, to NCCL. Where
NCCL prefers an algorithm that depends on what is inside a node (NVLS), that stays. NCCL 2.21 does
not say what it would choose: there the tuner only avoids reduction servers that are too few. From
NCCL 2.30 on it also sets the size of the chunks that trees and reduction servers take at once.
RCCL 2.13 knows no tuners.

**The model** is that of latency and bandwidth, alpha and beta: its formulas and their sources are
in `plugin/crates/tuner/src/cost.rs`. NCCL's own choice follows from the constants and formulas of
NCCL 2.30.7, for one Ampere GPU in each node and an Intel host, in
`plugin/crates/bench/src/tuner/nccl.rs`.

All tables are of all-reduces. A cell has NCCL's choice, and the tuner's if it is another, with the
estimate of each.
"
    .to_owned();
    for shown in &SHOWN {
        let _ = writeln!(
            text,
            "\n## {}\n\nMeasured: {} Mb/s and {} microseconds. The device reports {} Mb/s. These are examples.",
            shown.title, shown.bandwidth, shown.latency, shown.speed
        );
        for (words, count) in SERVERS {
            let heading: Vec<String> = NODES.iter().map(|nodes| format!("{nodes} nodes")).collect();
            let _ = writeln!(
                text,
                "\n### {}, {words}\n\n| size | {} |\n|---|---|---|---|",
                shown.title,
                heading.join(" | ")
            );
            for bytes in sizes() {
                let row: Result<Vec<String>> =
                    NODES.iter().map(|nodes| cell(shown, *nodes, count(*nodes), bytes)).collect();
                let _ = writeln!(text, "| {} | {} |", size(bytes), row?.join(" | "));
            }
        }
    }
    Ok(text)
}

fn cell(shown: &Shown, nodes: usize, servers: usize, bytes: usize) -> Result<String> {
    let case = shown.case(nodes, servers);
    let Choices { nccl, ours } = case.choices(bytes)?;
    let shown = |choice| {
        Ok::<_, String>(format!("{} {}", name(choice), time(case.seconds(choice, bytes)?)))
    };
    if nccl == ours { shown(nccl) } else { Ok(format!("{}, **{}**", shown(nccl)?, shown(ours)?)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tuner_page_is_up_to_date() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/results/tuner.md");
        let written = std::fs::read_to_string(page).unwrap_or_default();
        assert!(
            written == markdown().unwrap(),
            "docs/results/tuner.md is old: cargo run -p evenkeel-bench -- tuner --markdown > docs/results/tuner.md"
        );
    }

    #[test]
    fn tuner_page_has_no_choice_that_costs_more_than_nccls() {
        for shown in &SHOWN {
            for nodes in NODES {
                for (_, count) in SERVERS {
                    let case = shown.case(nodes, count(nodes));
                    for bytes in sizes() {
                        let Choices { nccl, ours } = case.choices(bytes).unwrap();
                        let cost = |choice| case.seconds(choice, bytes).unwrap();
                        assert!(cost(ours) <= cost(nccl));
                    }
                }
            }
        }
    }
}
