//! What an all-reduce run prints: nccl-tests' columns, or JSON with the same names.

use std::io::{self, Write};

use serde::{Deserialize, Serialize};

use crate::element::{Op, Type};

/// One half of a row: the operation out of place or in place.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Measured {
    /// Mean time of one operation over iterations and ranks, microseconds.
    pub(crate) time_us: f64,
    /// Bytes of the buffer per time, GB/s (10^9).
    pub(crate) algbw: f64,
    /// What each link carried: `algbw * 2(n-1)/n`, GB/s.
    pub(crate) busbw: f64,
    /// Wrong elements on all ranks; none if nothing was checked.
    pub(crate) wrong: Option<u64>,
}

impl Measured {
    /// From the mean seconds of one operation on `bytes` bytes among `ranks`.
    pub(crate) fn new(seconds: f64, bytes: u64, ranks: usize, wrong: Option<u64>) -> Self {
        let algbw = if seconds > 0.0 { bytes as f64 / seconds / 1e9 } else { 0.0 };
        let busbw = algbw * 2.0 * (ranks as f64 - 1.0) / ranks as f64;
        Self { time_us: seconds * 1e6, algbw, busbw, wrong }
    }
}

/// One row.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Row {
    /// Bytes.
    pub(crate) size: u64,
    /// Elements.
    pub(crate) count: u64,
    /// Separate buffers.
    pub(crate) out_of_place: Measured,
    /// One buffer.
    pub(crate) in_place: Measured,
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
    /// What carried the messages of its connections, `tcp` or `rdma`, or `mixed`; none where there are none, or the plugin
    /// does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) transport: Option<String>,
}

/// A rank's machine and network.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct RankLine {
    /// The rank.
    pub(crate) rank: usize,
    /// Its machine's name.
    pub(crate) host: String,
    /// Its machine's address.
    pub(crate) address: String,
    /// What carries its data.
    pub(crate) network: Network,
}

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    #[serde(rename = "type")]
    pub(crate) kind: &'static str,
    pub(crate) redop: &'static str,
    pub(crate) ranks: Vec<RankLine>,
    pub(crate) rows: Vec<Row>,
    /// Bytes of all-reduces that rank 0 sent through the plugin.
    pub(crate) sent_bytes: u64,
    /// Time of a small message from one rank to the next, microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) latency_us: Option<f64>,
    pub(crate) wrong: u64,
    pub(crate) average_busbw: f64,
}

/// Writes a run as it goes.
pub(crate) struct Printer {
    report: Report,
    json: bool,
}

impl Printer {
    /// Writes the heading, unless it is to be JSON.
    pub(crate) fn start(ranks: Vec<RankLine>, kind: Type, op: Op, json: bool) -> io::Result<Self> {
        let report = Report {
            kind: kind.name(),
            redop: op.name(),
            ranks,
            rows: vec![],
            sent_bytes: 0,
            latency_us: None,
            wrong: 0,
            average_busbw: 0.0,
        };
        if !json {
            let mut out = io::stdout().lock();
            for line in &report.ranks {
                let RankLine { rank, host, address, network } = line;
                if *rank == 0 {
                    let Network { name, version, library, sha256, .. } = network;
                    writeln!(
                        out,
                        "# Network: {name} (ncclNet v{version}), {library}, sha256 {sha256}"
                    )?;
                }
                let Network { name, device, speed_mbps, .. } = network;
                let gbps = *speed_mbps as f64 / 1e3;
                writeln!(
                    out,
                    "#  Rank {rank:2} {host} {address}: {name} on {device}, {gbps} Gbit/s"
                )?;
            }
            writeln!(out, "#")?;
            writeln!(out, "#{:62}{:<34}in-place", "", "out-of-place")?;
            let half = format!("{:>10} {:>7} {:>7} {:>6}", "time", "algbw", "busbw", "#wrong");
            writeln!(
                out,
                "#{:>11} {:>13} {:>9} {:>7} {:>7} {half} {half}",
                "size", "count", "type", "redop", "root"
            )?;
            let half = format!("{:>10} {:>7} {:>7} {:>6}", "(us)", "(GB/s)", "(GB/s)", "");
            let line = format!(
                "#{:>11} {:>13} {:>9} {:>7} {:>7} {half} {half}",
                "(B)", "(elements)", "", "", ""
            );
            writeln!(out, "{}", line.trim_end())?;
            out.flush()?;
        }
        Ok(Self { report, json })
    }

    /// Adds a row.
    pub(crate) fn row(&mut self, row: Row) -> io::Result<()> {
        let wrong = |measured: Measured| measured.wrong.unwrap_or(0);
        self.report.wrong += wrong(row.out_of_place) + wrong(row.in_place);
        if !self.json {
            let mut out = io::stdout().lock();
            let Report { kind, redop, .. } = self.report;
            write!(out, "{:>12} {:>13} {kind:>9} {redop:>7} {:>7}", row.size, row.count, -1)?;
            for half in [row.out_of_place, row.in_place] {
                let wrong = half.wrong.map_or_else(|| "N/A".to_owned(), |wrong| wrong.to_string());
                write!(
                    out,
                    " {:>10} {:>7.2} {:>7.2} {wrong:>6}",
                    time(half.time_us),
                    half.algbw,
                    half.busbw
                )?;
            }
            writeln!(out)?;
            out.flush()?;
        }
        self.report.rows.push(row);
        Ok(())
    }

    /// Writes what is left and gives the number of wrong elements. `transports` are what carried each rank's messages, `latency`
    /// is in seconds.
    pub(crate) fn finish(
        mut self,
        sent_bytes: u64,
        transports: Vec<Option<String>>,
        latency: Option<f64>,
    ) -> io::Result<u64> {
        for (rank, transport) in self.report.ranks.iter_mut().zip(transports) {
            rank.network.transport = transport;
        }
        let all: Vec<_> =
            self.report.rows.iter().flat_map(|row| [row.out_of_place, row.in_place]).collect();
        let sum: f64 = all.iter().map(|measured| measured.busbw).sum();
        self.report.average_busbw = if all.is_empty() { 0.0 } else { sum / all.len() as f64 };
        self.report.sent_bytes = sent_bytes;
        self.report.latency_us = latency.map(|seconds| seconds * 1e6);
        let mut out = io::stdout().lock();
        if self.json {
            serde_json::to_writer(&mut out, &self.report)?;
            writeln!(out)?;
        } else {
            let network = self.report.ranks.first().map(|rank| &rank.network);
            let name = network.map_or("", |network| &network.name);
            let over = network.and_then(|network| network.transport.as_deref());
            let over = over.map_or_else(String::new, |transport| format!(" over {transport}"));
            let verdict = if self.report.wrong == 0 { "OK" } else { "FAILED" };
            writeln!(out, "# Network: {name} carried {sent_bytes} bytes from rank 0{over}")?;
            if let Some(us) = self.report.latency_us {
                writeln!(out, "# Latency: {us:.2} us from one rank to the next")?;
            }
            writeln!(out, "# Out of bounds values : {} {verdict}", self.report.wrong)?;
            writeln!(out, "# Avg bus bandwidth    : {:.4}", self.report.average_busbw)?;
        }
        out.flush()?;
        Ok(self.report.wrong)
    }
}

/// As nccl-tests: fewer digits the longer it took.
fn time(us: f64) -> String {
    match us {
        _ if us >= 10_000.0 => format!("{us:.0}"),
        _ if us >= 100.0 => format!("{us:.1}"),
        _ => format!("{us:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_bandwidth_is_per_link() {
        let two = Measured::new(1e-3, 1_000_000, 2, Some(0));
        assert!((two.algbw - 1.0).abs() < 1e-9 && (two.busbw - 1.0).abs() < 1e-9);
        let four = Measured::new(1e-3, 1_000_000, 4, None);
        assert!((four.busbw - 1.5).abs() < 1e-9);
        assert_eq!(Measured::new(0.0, 1, 1, None).algbw, 0.0);
    }

    #[test]
    fn time_column_has_a_fixed_width() {
        assert_eq!(time(12.345), "12.35");
        assert_eq!(time(1234.56), "1234.6");
        assert_eq!(time(123_456.7), "123457");
    }
}
