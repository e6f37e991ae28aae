//! A picture of what each rank of a job waited for over time.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::time::Duration;

use crate::verdict::Verdict;
use crate::view::Process;

/// Number of judgements kept: ten minutes.
const MAX_MOMENTS: usize = 600;
/// Maximum number of processes, which are the rows of the picture.
pub(crate) const MAX_ROWS: usize = 64;

const CELL: usize = 2;
const ROW: usize = 14;
/// Width of the legend of one state.
const LEGEND: usize = 160;
const LEFT: usize = 150;
const TOP: usize = 46;

/// What a process did most of the time in one window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// It had no request.
    Uncalled,
    /// It waited for a peer.
    Peer,
    /// It waited for bytes under way.
    Wire,
    /// It sent no views.
    Silent,
}

impl State {
    const ALL: [(Self, &'static str, &'static str); 4] = [
        (Self::Uncalled, "#9aa5b1", "computes: no request"),
        (Self::Peer, "#e8b24a", "waits for a peer"),
        (Self::Wire, "#3d7ec2", "bytes under way"),
        (Self::Silent, "#c0392b", "does not answer"),
    ];

    fn colour(self) -> &'static str {
        Self::ALL.iter().find(|(state, ..)| *state == self).map_or("#000", |(_, colour, _)| colour)
    }
}

/// The state of all processes at one judgement.
#[derive(Clone, Debug)]
pub(crate) struct Moment {
    pub(crate) at: Duration,
    pub(crate) states: Vec<(Process, State)>,
}

/// The last minutes of a job.
#[derive(Debug, Default)]
pub struct Timeline {
    moments: VecDeque<(Moment, String)>,
}

impl Timeline {
    pub(crate) fn add(&mut self, moment: Moment) {
        if self.moments.len() >= MAX_MOMENTS {
            self.moments.pop_front();
        }
        self.moments.push_back((moment, String::new()));
    }

    /// Notes the verdict on the last moment.
    pub(crate) fn tell(&mut self, verdict: &Verdict) {
        if let (Some((_, words)), Some(suspect)) =
            (self.moments.back_mut(), verdict.suspects.first())
        {
            *words = suspect.words();
        }
    }

    /// Draws an SVG picture with a row for each process, a column for each judgement, and the
    /// suspects above.
    pub fn svg(&self) -> String {
        let Some((last, _)) = self.moments.back() else { return String::new() };
        let rows: Vec<&Process> = last.states.iter().map(|(process, _)| process).collect();
        let width = LEFT + (CELL * self.moments.len()).max(LEGEND * State::ALL.len()) + 20;
        let height = TOP + ROW * rows.len() + 46;
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>\n"
        );
        let mut put = |line: std::fmt::Arguments<'_>| {
            // Writing to a String cannot fail.
            let _ = out.write_fmt(line);
            out.push('\n');
        };
        put(format_args!(
            "<text x=\"{LEFT}\" y=\"14\">who waited for what, the last {} s</text>",
            self.seconds()
        ));
        for (row, process) in rows.iter().enumerate() {
            let y = TOP + ROW * row;
            let name = match process.rank {
                Some(rank) => format!("rank {rank} on {}", process.host),
                None => process.host.clone(),
            };
            put(format_args!("<text x=\"4\" y=\"{}\">{}</text>", y + 10, escaped(&name, 24)));
            self.runs(|moment, _| {
                let state = moment.states.iter().find(|(its, _)| its.id == process.id);
                state.map(|(_, state)| state.colour().to_owned())
            })
            .into_iter()
            .for_each(|(from, count, colour)| {
                put(format_args!(
                    "<rect x=\"{}\" y=\"{y}\" width=\"{}\" height=\"{}\" fill=\"{colour}\"/>",
                    LEFT + CELL * from,
                    CELL * count,
                    ROW - 2
                ));
            });
        }
        let named = self.runs(|_, words| (!words.is_empty()).then(|| words.to_owned()));
        for (from, count, words) in named {
            let (x, end) = (LEFT + CELL * from, LEFT + CELL * (from + count));
            put(format_args!(
                "<text x=\"{x}\" y=\"32\" fill=\"#c0392b\">{}</text>",
                escaped(&words, 60)
            ));
            put(format_args!(
                "<line x1=\"{x}\" y1=\"37\" x2=\"{end}\" y2=\"37\" stroke=\"#c0392b\" stroke-width=\"3\"/>"
            ));
        }
        for (at, (_, colour, words)) in State::ALL.iter().enumerate() {
            let (x, y) = (LEFT + LEGEND * at, TOP + ROW * rows.len() + 16);
            put(format_args!(
                "<rect x=\"{x}\" y=\"{y}\" width=\"10\" height=\"10\" fill=\"{colour}\"/>"
            ));
            put(format_args!("<text x=\"{}\" y=\"{}\">{words}</text>", x + 14, y + 9));
        }
        out.push_str("</svg>\n");
        out
    }

    fn seconds(&self) -> u64 {
        match (self.moments.front(), self.moments.back()) {
            (Some((first, _)), Some((last, _))) => (last.at - first.at).as_secs(),
            _ => 0,
        }
    }

    /// Run-length encodes a value over the moments: start, length and value of each run.
    fn runs(&self, value: impl Fn(&Moment, &str) -> Option<String>) -> Vec<(usize, usize, String)> {
        let mut runs: Vec<(usize, usize, String)> = Vec::new();
        for (at, (moment, words)) in self.moments.iter().enumerate() {
            let Some(value) = value(moment, words) else { continue };
            match runs.last_mut() {
                Some((from, count, last)) if *from + *count == at && *last == value => *count += 1,
                _ => runs.push((at, 1, value)),
            }
        }
        runs
    }
}

fn escaped(text: &str, most: usize) -> String {
    let mut out = String::new();
    for c in text.chars().take(most) {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            other => out.push(other),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::{Class, Place, Suspect};

    #[test]
    fn timeline_shows_each_process_and_whom_they_waited_for() {
        let mut timeline = Timeline::default();
        assert_eq!(timeline.svg(), "");
        let process = |id| Process {
            id,
            rank: Some(id as u32),
            host: format!("<n{id}>"),
            ..Process::default()
        };
        let suspect = Suspect {
            class: Class::Late,
            place: Place { rank: Some(1), host: "n1".into(), ..Place::default() },
            direction: None,
            peer: None,
            or_card: false,
            may_pass: false,
            share: 0.5,
            for_s: 3.0,
            waiting: 1,
            confidence: 0.9,
            evidence: String::new(),
        };
        for second in 0..MAX_MOMENTS as u64 + 10 {
            let states = vec![(process(0), State::Peer), (process(1), State::Uncalled)];
            timeline.add(Moment { at: Duration::from_secs(second), states });
            let suspects = if second > 300 { vec![suspect.clone()] } else { vec![] };
            timeline.tell(&Verdict { suspects, ..Verdict::default() });
        }
        let svg = timeline.svg();
        for part in
            ["rank 0 on &lt;n0&gt;", "rank 1 on n1</text>", "the last 599 s", "waits for a peer"]
        {
            assert!(svg.contains(part), "{part}: {svg}");
        }
        let bars = svg.matches(State::Peer.colour()).count();
        assert_eq!(bars, 2, "one run, and the legend: {svg}");
    }
}
