//! Where verdicts are told: the log, the status folder, the metrics, and Evenkeel's controller.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use evenkeel_diagnosis::{Outcome, Timeline, Verdict};

use super::WatchContext;
use super::views::LongWait;
use crate::telemetry::log::Log;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::report;

/// How often the same is logged at most.
const REPEAT: Duration = Duration::from_secs(60);
/// How often a verdict is reported while it stands, and the timeline written.
const REFRESH: Duration = Duration::from_secs(10);
/// How often it is reported that nobody is suspected any more. A datagram may be lost.
const ENDS_REPORTED: u8 = 3;

/// When the controller is told.
#[derive(Debug, Default)]
struct Reports {
    last: Option<Duration>,
    /// How often the end of the last verdict is still to be reported.
    ends_left: u8,
}

impl Reports {
    /// Whether a report is sent now. `stands`: somebody is suspected; `changed`: others than before.
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

/// Tells verdicts, each as often as its readers need it.
pub(super) struct Outlets {
    log: Arc<dyn Log>,
    metrics: Arc<Metrics>,
    controller: report::Target,
    folder: Option<PathBuf>,
    wait_limit: Duration,
    /// The verdict that was told last.
    told: Verdict,
    logged: Option<Duration>,
    wait_logged: Option<Duration>,
    reports: Reports,
    drawn: Option<Duration>,
}

impl Outlets {
    pub(super) fn new(context: &WatchContext) -> Self {
        Self {
            log: Arc::clone(&context.log),
            metrics: Arc::clone(&context.metrics),
            controller: report::Target::from_env(),
            folder: context.settings.status_folder().map(Path::to_path_buf),
            wait_limit: context.settings.wait_limit(),
            told: Verdict::default(),
            logged: None,
            wait_logged: None,
            reports: Reports::default(),
            drawn: None,
        }
    }

    /// The verdict that all ranks get: the log, and the file of this process.
    pub(super) fn told(&mut self, verdict: &Verdict, now: Duration) {
        let is_same = names(verdict) == names(&self.told);
        let kind = |verdict: &Verdict| (verdict.outcome, verdict.ranks);
        let changed = !is_same || kind(verdict) != kind(&self.told);
        if verdict.outcome == Outcome::Suspect {
            if !is_same || is_due(self.logged, REPEAT, now) {
                self.log.warn(&format!("evenkeel: {}", verdict.text));
                self.logged = Some(now);
            }
        } else if !names(&self.told).is_empty() {
            let over = names(&self.told).join(" and ");
            self.log.info(&format!("evenkeel: ranks no longer wait for {over}"));
            self.logged = None;
        }
        self.told = verdict.clone();
        if changed {
            self.write(&format!("verdict.{}", std::process::id()), &(verdict.to_json() + "\n"));
        }
    }

    /// The verdict of this process, which collects: the controller, the metrics and the picture.
    pub(super) fn judged(&mut self, verdict: &Verdict, timeline: &Timeline, now: Duration) {
        let stands = !verdict.suspects.is_empty();
        let changed = names(verdict) != names(&self.told);
        if self.reports.are_due(stands, changed, now) {
            report::verdict(&self.controller, &verdict.to_json());
        }
        self.metrics.set_verdict(verdict);
        if self.folder.is_some() && (changed || is_due(self.drawn, REFRESH, now)) {
            self.write("timeline.svg", &timeline.svg());
            self.drawn = Some(now);
        }
    }

    /// The longest wait of this process. It is logged beyond a limit, even if nobody is named.
    pub(super) fn waits(&mut self, longest: Option<LongWait>, now: Duration) {
        let Some(wait) = longest.filter(|wait| wait.time >= self.wait_limit) else {
            self.wait_logged = None;
            return;
        };
        if is_due(self.wait_logged, REPEAT, now) && self.told.suspects.is_empty() {
            self.log.warn(&format!("evenkeel: {}", wait.words()));
            self.wait_logged = Some(now);
        }
    }

    /// Writes a file of the status folder, whole or not at all.
    fn write(&self, name: &str, text: &str) {
        let Some(folder) = &self.folder else { return };
        let temporary = folder.join(format!(".{name}.{}", std::process::id()));
        // The folder may be gone: the job does not depend on it.
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
    verdict.suspects.iter().map(evenkeel_diagnosis::Suspect::words).collect()
}

fn is_due(last: Option<Duration>, interval: Duration, now: Duration) -> bool {
    last.is_none_or(|last| now >= last + interval)
}

#[cfg(test)]
mod tests {
    use super::*;

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
