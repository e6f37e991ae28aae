//! A drawing of when each piece was where, as SVG: a band for each server and each rank, in it a
//! bar for each piece, and in that a colour for each step.

use super::timeline_log::{Logs, Span};
use crate::error::Result;

const WIDTH: f64 = 960.0;
const LEFT: f64 = 90.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 52.0;
/// Below the bands.
const BOTTOM: f64 = 44.0;
/// Height of a bar, and of the room between bands.
const BAR: f64 = 5.0;
const GAP: f64 = 10.0;
/// Approximate number of marks on the axis.
const MARKS: f64 = 8.0;
/// Maximum number of bars that can still be read.
const MAX_BARS: usize = 50_000;

/// Told apart in grey, and by people who see no red.
const RECEIVE: &str = "#0072b2";
const REDUCE: &str = "#e69f00";
const SEND: &str = "#009e73";
const LEGEND: [(&str, &str); 3] = [("receive", RECEIVE), ("reduce", REDUCE), ("send", SEND)];

/// A piece: its steps and their colours.
type Bar = Vec<(Span, &'static str)>;

/// Draws a stretch of a run, given in milliseconds after its begin; without one, a reduction in the
/// middle.
///
/// # Errors
/// When nothing happened then, or too much to be drawn.
pub(super) fn draw(logs: &Logs, window: Option<[f64; 2]>) -> Result<String> {
    let servers = logs.servers.iter().enumerate().map(|(index, passages)| {
        let bars =
            passages.iter().map(|p| vec![(p.recv, RECEIVE), (p.reduce, REDUCE), (p.send, SEND)]);
        (format!("server {index}"), bars.collect::<Vec<Bar>>())
    });
    let clients = logs.clients.iter().enumerate().map(|(rank, client)| {
        let pieces = client.pieces.iter().map(|p| vec![(p.send, SEND), (p.recv, RECEIVE)]);
        // What notes no pieces, such as a ring, has operations.
        let operations = client.operations.iter().map(|o| vec![(o.e2e, SEND)]);
        let bars: Vec<Bar> =
            if client.pieces.is_empty() { operations.collect() } else { pieces.collect() };
        // Of several jobs, each counts its own.
        let name = match logs.jobs() {
            0 | 1 => format!("rank {rank}"),
            jobs => {
                let ranks = logs.clients.len() / jobs;
                format!("job {} rank {}", rank / ranks, rank % ranks)
            }
        };
        (name, bars)
    });
    let bands: Vec<(String, Vec<Bar>)> = servers.chain(clients).collect();
    let begins = bands.iter().flat_map(|(_, bars)| bars).map(|bar| bar[0].0[0]);
    let start = begins.reduce(f64::min).ok_or("there is nothing to draw")?;
    let [from, to] = match window {
        Some([from, to]) => [start + from / 1e3, start + to / 1e3],
        None => middle(logs).ok_or("there is nothing to draw")?,
    };
    let inside = |bar: &Bar| bar[0].0[0] < to && bar[bar.len() - 1].0[1] > from;
    let bands: Vec<(String, Vec<Vec<Bar>>)> = bands
        .into_iter()
        .map(|(name, bars)| (name, rows(bars.into_iter().filter(inside).collect())))
        .collect();
    let bars: usize = bands.iter().flat_map(|(_, rows)| rows).map(Vec::len).sum();
    if bars == 0 {
        let [from, to] = [from, to].map(|at| (at - start) * 1e3);
        return Err(format!("nothing happened from {from:.3} to {to:.3} ms: --xlim takes others"));
    }
    if bars > MAX_BARS {
        return Err(format!("{bars} pieces are too many to draw: give a shorter --xlim"));
    }
    Ok(svg(&bands, start, [from, to]))
}

/// One whole reduction of rank 0, in the middle of the run.
fn middle(logs: &Logs) -> Option<Span> {
    let client = logs.clients.first()?;
    let run = client.run.as_ref()?;
    let each = (run.task.size.div_ceil(run.task.chunksize.max(1)) as usize).max(1);
    let whole = client.operations.len() / each;
    let at = whole / 2 * each;
    let operations = client.operations.get(at..at + each)?;
    let end = operations.iter().map(|operation| operation.e2e[1]).reduce(f64::max)?;
    Some([operations.first()?.e2e[0], end])
}

/// Deals bars out to rows in which none overlaps another.
fn rows(mut bars: Vec<Bar>) -> Vec<Vec<Bar>> {
    bars.sort_by(|a, b| a[0].0[0].total_cmp(&b[0].0[0]));
    let mut rows: Vec<Vec<Bar>> = vec![];
    let mut ends: Vec<f64> = vec![];
    for bar in bars {
        let (begin, end) = (bar[0].0[0], bar[bar.len() - 1].0[1]);
        match ends.iter().position(|free| *free <= begin) {
            Some(row) => {
                ends[row] = end;
                rows[row].push(bar);
            }
            None => {
                ends.push(end);
                rows.push(vec![bar]);
            }
        }
    }
    rows
}

fn svg(bands: &[(String, Vec<Vec<Bar>>)], start: f64, [from, to]: Span) -> String {
    let height_of = |rows: &[Vec<Bar>]| rows.len().max(3) as f64 * BAR + GAP;
    let base = TOP + bands.iter().map(|(_, rows)| height_of(rows)).sum::<f64>();
    let x = |at: f64| {
        LEFT + (WIDTH - LEFT - RIGHT) * (at.clamp(from, to) - from) / (to - from).max(1e-9)
    };
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{:.0}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
         <text x=\"{LEFT}\" y=\"18\" font-weight=\"bold\">Each piece at servers and ranks</text>\n",
        base + BOTTOM
    );
    let mut add = |line: String| {
        out += &line;
        out.push('\n');
    };
    for (index, (name, colour)) in LEGEND.iter().enumerate() {
        let at = LEFT + 90.0 * index as f64;
        add(format!("<rect x=\"{at}\" y=\"28\" width=\"14\" height=\"10\" fill=\"{colour}\"/>"));
        add(format!("<text x=\"{}\" y=\"37\">{name}</text>", at + 19.0));
    }
    let ms = |at: f64| (at - start) * 1e3;
    let (first, last) = (ms(from), ms(to));
    let step = step(last - first);
    let mut mark = (first / step).ceil() * step;
    while mark <= last {
        let at = x(start + mark / 1e3);
        add(format!(
            "<line x1=\"{at:.1}\" y1=\"{TOP}\" x2=\"{at:.1}\" y2=\"{base:.1}\" stroke=\"#ddd\"/>"
        ));
        let digits = usize::from(step < 1.0) + usize::from(step < 0.1) * 2;
        add(format!(
            "<text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{mark:.digits$}</text>",
            base + 16.0
        ));
        mark += step;
    }
    add(format!(
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">ms</text>",
        f64::midpoint(LEFT, WIDTH - RIGHT),
        base + 34.0
    ));
    let mut top = TOP;
    for (name, rows) in bands {
        add(format!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{name}</text>",
            LEFT - 8.0,
            top + 12.0
        ));
        for (row, bars) in rows.iter().enumerate() {
            let y = top + BAR * row as f64;
            // One path for each colour, and a rectangle in it for each step: far shorter than an
            // element for each step.
            for (_, colour) in LEGEND {
                let mut path = String::new();
                for ([begin, end], of) in bars.iter().flatten() {
                    if *of != colour || *end <= from || *begin >= to {
                        continue;
                    }
                    let (left, right) = (x(*begin), x(*end));
                    let (width, height) = ((right - left).max(0.3), BAR - 1.0);
                    path += &format!("M{left:.1} {y:.1}h{width:.1}v{height:.1}h-{width:.1}z");
                }
                if !path.is_empty() {
                    add(format!("<path fill=\"{colour}\" d=\"{path}\"/>"));
                }
            }
        }
        top += height_of(rows);
    }
    out += "</svg>\n";
    out
}

/// A round distance between marks.
fn step(span: f64) -> f64 {
    let power = 10f64.powf((span / MARKS).max(1e-6).log10().floor());
    let round = [1.0, 2.0, 5.0].map(|factor| factor * power);
    round.into_iter().find(|step| span / step <= MARKS).unwrap_or(10.0 * power)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reduction::timeline_log::tests::two_ranks;

    #[test]
    fn timeline_plot_has_all_steps() {
        let svg = draw(&two_ranks(), None).unwrap();
        for part in ["server 0", "rank 0", "rank 1", RECEIVE, REDUCE, SEND, ">ms<", "</svg>"] {
            assert!(svg.contains(part), "no {part} in\n{svg}");
        }
        // Two pieces of three steps at the server, and two of two at each rank; each step is a
        // rectangle in a path.
        let paths = svg.lines().filter(|line| line.starts_with("<path "));
        assert_eq!(paths.map(|path| path.matches('M').count()).sum::<usize>(), 6 + 8, "{svg}");
        assert_eq!(svg.matches("height=\"10\" fill=").count(), LEGEND.len());
    }

    #[test]
    fn timeline_plot_window_cuts_the_rest() {
        let svg = draw(&two_ranks(), Some([0.0, 0.4])).unwrap();
        assert!(svg.contains("<path "), "{svg}");
        assert!(!svg.contains(&format!("<path fill=\"{REDUCE}\"")), "{svg}");
        assert!(draw(&two_ranks(), Some([50.0, 60.0])).unwrap_err().contains("nothing happened"));
    }

    #[test]
    fn timeline_plot_bars_do_not_overlap() {
        let bar = |begin: f64, end: f64| vec![([begin, end], SEND)];
        let rows = rows(vec![bar(2.0, 3.0), bar(0.0, 2.0), bar(1.0, 4.0)]);
        assert_eq!(rows, [vec![bar(0.0, 2.0), bar(2.0, 3.0)], vec![bar(1.0, 4.0)]]);
    }

    #[test]
    fn timeline_plot_ticks_are_round_numbers() {
        for (span, want) in [(20.0, 5.0), (16.0, 2.0), (1.0, 0.2), (800.0, 100.0)] {
            assert!((step(span) - want).abs() < 1e-9, "{span}: {}", step(span));
        }
    }
}
