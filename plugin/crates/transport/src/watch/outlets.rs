//! Publishes verdicts to the log, the status folder, the metrics and Evenkeel's controller.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use evenkeel_diagnosis::{Suspect, Timeline, Verdict};

use super::WatchContext;
use super::views::LongWait;
use crate::telemetry::log::Log;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::report;

/// Minimum time between two log lines about the same suspect.
const REPEAT: Duration = Duration::from_secs(60);
/// How often a standing verdict is reported and the timeline is written.
const REFRESH: Duration = Duration::from_secs(10);
/// How many times to report that nobody is suspected any more, because a datagram may be lost.
const ENDS_REPORTED: u8 = 3;

/// Schedules the reports to the controller.
#[derive(Debug, Default)]
struct Reports {
    last: Option<Duration>,
    /// How many more times to report the end of the last verdict.
    ends_left: u8,
}

impl Reports {
    /// Whether to send a report now. `stands` is whether somebody is suspected, and `changed`
    /// whether the suspects differ from the last report's.
    fn are_due(&mut self, stands: bool, changed: bool, now: Duration) -> bool {
        if changed {
            self.ends_left = if stands { 0 } else { ENDS_REPORTED };
        }
        let goes_on = stands || self.ends_left > 0;
        let due = changed || goes_on && is_due(self.last, REFRESH, now);
        if due {
            self.last = Some(now);
            self.ends_left = self.ends_left.saturating_sub(1);
        }
        due
    }
}

/// Schedules the log lines about suspects: at most one a minute for each suspect, and one when it
/// is over.
#[derive(Debug, Default)]
struct LoggedSuspects {
    /// Suspects that stand or were logged in the last minute, when, and whether their end is still
    /// to be logged.
    logged: Vec<(Suspect, Duration, bool)>,
}

impl LoggedSuspects {
    /// Whether a line about the first of these suspects is due, and the line about logged suspects
    /// that are over.
    fn next(&mut self, suspects: &[Suspect], now: Duration) -> (bool, Option<String>) {
        let mut over = Vec::new();
        for (suspect, _, stands) in &mut self.logged {
            if *stands && !suspects.iter().any(|other| other.is_same(suspect)) {
                *stands = false;
                over.push(suspect.words());
            }
        }
        self.logged.retain(|(_, at, stands)| *stands || now < *at + REPEAT);
        let over = (!over.is_empty())
            .then(|| format!("evenkeel: ranks no longer wait for {}", over.join(" and ")));
        let Some(first) = suspects.first() else { return (false, over) };
        match self.logged.iter_mut().find(|(suspect, ..)| suspect.is_same(first)) {
            Some((_, at, _)) if now < *at + REPEAT => (false, over),
            Some(known) => {
                *known = (first.clone(), now, true);
                (true, over)
            }
            None => {
                self.logged.push((first.clone(), now, true));
                (true, over)
            }
        }
    }
}

/// Publishes verdicts, at each outlet as often as its readers need them.
pub(super) struct Outlets {
    log: Arc<dyn Log>,
    metrics: Arc<Metrics>,
    controller: report::Target,
    folder: Option<PathBuf>,
    /// Names of this process's files there. They contain the identifier, because a process may load
    /// several libraries that watch.
    verdict_file: String,
    timeline_file: String,
    wait_limit: Duration,
    /// The last verdict that was published.
    told: Verdict,
    logged: LoggedSuspects,
    wait_logged: Option<Duration>,
    reports: Reports,
    drawn: Option<Duration>,
    written: Option<Duration>,
}

impl Outlets {
    pub(super) fn new(context: &WatchContext, id: u64) -> Self {
        Self {
            log: Arc::clone(&context.log),
            metrics: Arc::clone(&context.metrics),
            controller: report::Target::from_env(),
            folder: context.settings.status_folder().map(Path::to_path_buf),
            verdict_file: format!("verdict.{}.{id:016x}", std::process::id()),
            timeline_file: format!("timeline.{id:016x}.svg"),
            wait_limit: context.settings.wait_limit(),
            told: Verdict::default(),
            logged: LoggedSuspects::default(),
            wait_logged: None,
            reports: Reports::default(),
            drawn: None,
            written: None,
        }
    }

    /// Publishes the verdict that every rank gets, to the log and to this process's file.
    pub(super) fn told(&mut self, verdict: &Verdict, now: Duration) {
        let is_same = names(verdict) == names(&self.told);
        let kind = |verdict: &Verdict| (verdict.outcome, verdict.ranks);
        let changed = !is_same || kind(verdict) != kind(&self.told);
        let (is_news, over) = self.logged.next(&verdict.suspects, now);
        if let Some(over) = over {
            self.log.tell(&over);
        }
        if is_news {
            self.log.tell(&format!("evenkeel: {}", verdict.text));
        }
        self.told = verdict.clone();
        // The figures of a standing suspect change all the time.
        let stands = !verdict.suspects.is_empty();
        if changed || stands && is_due(self.written, REFRESH, now) {
            self.write(&self.verdict_file, &(verdict.to_json() + "\n"));
            self.written = Some(now);
        }
    }

    /// Publishes the collector's own verdict, to the controller, the metrics and the picture.
    pub(super) fn judged(&mut self, verdict: &Verdict, timeline: &Timeline, now: Duration) {
        let stands = !verdict.suspects.is_empty();
        let changed = names(verdict) != names(&self.told);
        if self.reports.are_due(stands, changed, now) {
            report::verdict(&self.controller, &verdict.to_json());
        }
        self.metrics.set_verdict(verdict);
        if self.folder.is_some() && (changed || is_due(self.drawn, REFRESH, now)) {
            self.write(&self.timeline_file, &timeline.svg());
            self.drawn = Some(now);
        }
    }

    /// Withdraws what the collector published, because this process no longer collects.
    pub(super) fn collects_no_more(&self) {
        self.metrics.set_verdict(&Verdict::default());
    }

    /// Publishes this process's longest wait. Beyond a limit it is logged even if nobody is named.
    pub(super) fn waits(&mut self, longest: Option<LongWait>, now: Duration) {
        let Some(wait) = longest.filter(|wait| wait.time >= self.wait_limit) else {
            self.wait_logged = None;
            return;
        };
        if is_due(self.wait_logged, REPEAT, now) && self.told.suspects.is_empty() {
            self.log.tell(&format!("evenkeel: {}", wait.words()));
            self.wait_logged = Some(now);
        }
    }

    /// Withdraws this process's waits. The picture stays.
    pub(super) fn leave(&self) {
        if let Some(folder) = &self.folder {
            let _ = fs::remove_file(folder.join(&self.verdict_file)); // it may never have been written
        }
    }

    /// Writes a file of the status folder atomically.
    fn write(&self, name: &str, text: &str) {
        let Some(folder) = &self.folder else { return };
        let temporary = folder.join(format!(".{name}.{}", std::process::id()));
        // The folder may be gone. The job does not depend on it.
        if fs::write(&temporary, text).is_ok() {
            let _ = fs::rename(&temporary, folder.join(name));
        }
    }
}

impl LongWait {
    fn words(&self) -> String {
        let (seconds, peer, device) = (self.time.as_secs(), self.peer, &self.device);
        let why = match (self.is_wire, self.sends) {
            (true, _) => "bytes are under way and do not arrive",
            (false, true) => {
                "it has no buffer for what this rank sends: its program has not called"
            }
            (false, false) => "it has sent nothing: its program has not called, or waits itself",
        };
        format!("this rank waits for {peer} for {seconds} s; {why}; device={device}")
    }
}

fn names(verdict: &Verdict) -> Vec<String> {
    verdict.suspects.iter().map(Suspect::words).collect()
}

fn is_due(last: Option<Duration>, interval: Duration, now: Duration) -> bool {
    last.is_none_or(|last| now >= last + interval)
}

#[cfg(test)]
mod tests {
    use evenkeel_diagnosis::{Class, Place};

    use super::*;

    #[test]
    fn suspect_is_logged_once_a_minute_and_its_end_once() {
        let suspect = |host: &str| {
            vec![Suspect {
                class: Class::Link,
                place: Place { host: host.into(), device: "eth0".into(), ..Place::default() },
                direction: None,
                peer: None,
                or_card: false,
                may_pass: false,
                share: 0.5,
                for_s: 0.0,
                waiting: 7,
                confidence: 0.9,
                evidence: String::new(),
            }]
        };
        let mut logged = LoggedSuspects::default();
        let mut lines = Vec::new();
        for second in 0..200_u64 {
            // It comes and goes each second for a minute and a half, and another one comes later.
            let suspects = match second {
                0..90 if second % 2 == 0 => suspect("n1"),
                100..110 => suspect("n2"),
                _ => Vec::new(),
            };
            let (is_due, over) = logged.next(&suspects, Duration::from_secs(second));
            if let Some(over) = over {
                lines.push((second, over));
            }
            if is_due {
                lines.push((second, suspects[0].place.host.clone()));
            }
        }
        let over = |host: &str| {
            format!("evenkeel: ranks no longer wait for card eth0 of {host}, both directions")
        };
        let expected = [
            (0, "n1".to_owned()),
            (1, over("n1")),
            (60, "n1".to_owned()),
            (61, over("n1")),
            (100, "n2".to_owned()),
            (110, over("n2")),
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn verdict_is_reported_while_it_stands_and_its_end_some_times() {
        let mut reports = Reports::default();
        let second = Duration::from_secs;
        let mut sent = |from: u64, to: u64, stands| {
            let is_sent = |at: &u64| reports.are_due(stands, *at == from, second(*at));
            (from..to).filter(is_sent).collect::<Vec<u64>>()
        };
        assert_eq!(sent(5, 30, true), [5, 15, 25]);
        assert_eq!(sent(30, 90, false), [30, 40, 50]);
        assert_eq!(sent(90, 101, true), [90, 100]);
    }
}
