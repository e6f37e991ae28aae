//! The table of all-reduces, in nccl-tests' columns, and the record with the same names.

use serde::Serialize;

use crate::element::{Op, Type};
use crate::output::record::Network;

/// One half of a row: the operation out of place or in place.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Measured {
    /// Mean time of one operation over iterations and ranks, microseconds.
    pub(super) time_us: f64,
    /// Bytes of the buffer per time, GB/s (10^9).
    pub(super) algbw: f64,
    /// What each link carried: `algbw * 2(n-1)/n`, GB/s.
    pub(super) busbw: f64,
    /// Wrong elements on all ranks; none if nothing was checked.
    pub(super) wrong: Option<u64>,
    /// Times of operations on rank 0.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) samples_us: Vec<f64>,
}

impl Measured {
    /// From the mean seconds of one operation on `bytes` bytes among `ranks`.
    pub(super) fn new(seconds: f64, bytes: u64, ranks: usize, wrong: Option<u64>) -> Self {
        let algbw = if seconds > 0.0 { bytes as f64 / seconds / 1e9 } else { 0.0 };
        let busbw = algbw * 2.0 * (ranks as f64 - 1.0) / ranks as f64;
        Self { time_us: seconds * 1e6, algbw, busbw, wrong, samples_us: vec![] }
    }
}

/// One row.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    /// Bytes.
    pub(super) size: u64,
    /// Elements.
    pub(super) count: u64,
    /// Separate buffers.
    pub(super) out_of_place: Measured,
    /// One buffer.
    pub(super) in_place: Measured,
}

impl Row {
    /// Both halves.
    pub(super) fn halves(&self) -> [&Measured; 2] {
        [&self.out_of_place, &self.in_place]
    }

    /// Its line of the table.
    pub(super) fn line(&self, kind: Type, op: Op) -> String {
        let (kind, op) = (kind.name(), op.name());
        let mut line = format!("{:>12} {:>13} {kind:>9} {op:>7} {:>7}", self.size, self.count, -1);
        for half in self.halves() {
            let wrong = half.wrong.map_or_else(|| "N/A".to_owned(), |wrong| wrong.to_string());
            let Measured { time_us, algbw, busbw, .. } = half;
            line += &format!(" {:>10} {algbw:>7.2} {busbw:>7.2} {wrong:>6}", time(*time_us));
        }
        line + "\n"
    }
}

/// A rank's machine and network.
#[derive(Clone, Debug, Serialize)]
pub(super) struct RankLine {
    /// The rank.
    pub(super) rank: usize,
    /// Its machine's name.
    pub(super) host: String,
    /// Its machine's address.
    pub(super) address: String,
    /// What carries its data.
    pub(super) network: Network,
}

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) redop: String,
    pub(super) ranks: Vec<RankLine>,
    pub(super) rows: Vec<Row>,
    /// Bytes of all-reduces that rank 0 sent through the plugin.
    pub(super) sent_bytes: u64,
    /// Time of a small message from one rank to the next, microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) latency_us: Option<f64>,
    pub(super) wrong: u64,
    pub(super) average_busbw: f64,
}

impl Report {
    /// The lines after the table.
    pub(super) fn summary(&self) -> String {
        let network = self.ranks.first().map(|rank| &rank.network);
        let name = network.map_or("", |network| &network.name);
        let over = network.and_then(|network| network.transport.as_deref());
        let over = over.map_or_else(String::new, |transport| format!(" over {transport}"));
        let Self { sent_bytes, wrong, average_busbw, .. } = self;
        let latency = self.latency_us.map_or_else(String::new, |us| {
            format!("# Latency: {us:.2} us from one rank to the next\n")
        });
        let verdict = if *wrong == 0 { "OK" } else { "FAILED" };
        format!(
            "# Network: {name} carried {sent_bytes} bytes from rank 0{over}\n{latency}\
             # Out of bounds values : {wrong} {verdict}\n\
             # Avg bus bandwidth    : {average_busbw:.4}\n"
        )
    }
}

/// What is above the table.
pub(super) fn heading(ranks: &[RankLine]) -> String {
    let mut text = ranks.first().map_or_else(String::new, |rank| rank.network.line());
    for RankLine { rank, host, address, network } in ranks {
        let Network { name, device, speed_mbps, .. } = network;
        let gbps = *speed_mbps as f64 / 1e3;
        text += &format!("#  Rank {rank:2} {host} {address}: {name} on {device}, {gbps} Gbit/s\n");
    }
    text += &format!("#\n#{:62}{:<34}in-place\n", "", "out-of-place");
    let half = format!("{:>10} {:>7} {:>7} {:>6}", "time", "algbw", "busbw", "#wrong");
    text += &format!(
        "#{:>11} {:>13} {:>9} {:>7} {:>7} {half} {half}\n",
        "size", "count", "type", "redop", "root"
    );
    let half = format!("{:>10} {:>7} {:>7}", "(us)", "(GB/s)", "(GB/s)");
    text + &format!("#{:>11} {:>13} {:25} {half} {:6} {half}\n", "(B)", "(elements)", "", "")
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
