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
    reported: Option<Duration>,
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
            reported: None,
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
        if changed || stands && is_due(self.reported, REFRESH, now) {
            report::verdict(&self.controller, &verdict.to_json());
            self.reported = Some(now);
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
