//! What the server has done, by job, and what it holds, in the text format of OpenMetrics.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use evenkeel_transport::{Page, Pages};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use crate::budget::Budget;
use crate::lock;

/// Which job.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Label {
    job: String,
}

type Times = Family<Label, Histogram, fn() -> Histogram>;

/// Most jobs that are told apart: names come from clients, and labels stay.
const MAX_JOBS: usize = 1000;

/// Everything that is counted.
pub(crate) struct Metrics {
    received: Family<Label, Counter>,
    sent: Family<Label, Counter>,
    pieces: Family<Label, Counter>,
    failures: Family<Label, Counter>,
    climbed: Family<Label, Counter>,
    descended: Family<Label, Counter>,
    communicators: Family<Label, Gauge>,
    ranks: Family<Label, Gauge>,
    receive: Times,
    reduce: Times,
    climb: Times,
    send: Times,
    /// Jobs that have a label.
    jobs: Mutex<HashSet<String>>,
    /// Joins that were refused.
    pub(crate) refused: Counter,
    registry: Registry,
}

/// What is counted of one job.
#[derive(Clone)]
pub(crate) struct JobMetrics {
    /// Bytes of parts that have come.
    pub(crate) received: Counter,
    /// Bytes of results that have gone.
    pub(crate) sent: Counter,
    /// Pieces reduced.
    pub(crate) pieces: Counter,
    /// Communicators that could not go on.
    pub(crate) failures: Counter,
    /// Bytes of sums that have gone to servers above.
    pub(crate) climbed: Counter,
    /// Bytes of results that have come from there.
    pub(crate) descended: Counter,
    /// Communicators there are.
    pub(crate) communicators: Gauge,
    /// Ranks that are connected.
    pub(crate) ranks: Gauge,
    /// Seconds from a piece's first byte to its last part's last.
    pub(crate) receive: Histogram,
    /// Seconds of reducing a piece.
    pub(crate) reduce: Histogram,
    /// Seconds from then until it is back from the servers above.
    pub(crate) climb: Histogram,
    /// Seconds from then until all ranks have it.
    pub(crate) send: Histogram,
}

impl Metrics {
    pub(crate) fn new(budget: &Arc<Budget>) -> Self {
        let histogram = || Times::new_with_constructor(seconds);
        let mut this = Self {
            received: Family::default(),
            sent: Family::default(),
            pieces: Family::default(),
            failures: Family::default(),
            climbed: Family::default(),
            descended: Family::default(),
            communicators: Family::default(),
            ranks: Family::default(),
            receive: histogram(),
            reduce: histogram(),
            climb: histogram(),
            send: histogram(),
            jobs: Mutex::default(),
            refused: Counter::default(),
            registry: Registry::with_prefix("evenkeel_reduction"),
        };
        this.register(budget);
        this
    }

    /// The counters of one job.
    pub(crate) fn of(&self, job: &str) -> JobMetrics {
        let known = {
            let mut jobs = lock(&self.jobs);
            jobs.contains(job) || (jobs.len() < MAX_JOBS && jobs.insert(job.to_owned()))
        };
        let label = Label { job: if known { job } else { "others" }.to_owned() };
        JobMetrics {
            received: self.received.get_or_create_owned(&label),
            sent: self.sent.get_or_create_owned(&label),
            pieces: self.pieces.get_or_create_owned(&label),
            failures: self.failures.get_or_create_owned(&label),
            climbed: self.climbed.get_or_create_owned(&label),
            descended: self.descended.get_or_create_owned(&label),
            communicators: self.communicators.get_or_create_owned(&label),
            ranks: self.ranks.get_or_create_owned(&label),
            receive: self.receive.get_or_create_owned(&label),
            reduce: self.reduce.get_or_create_owned(&label),
            climb: self.climb.get_or_create_owned(&label),
            send: self.send.get_or_create_owned(&label),
        }
    }

    fn register(&mut self, budget: &Arc<Budget>) {
        let all = &mut self.registry;
        let help = "Bytes of parts that clients have sent";
        all.register_with_unit("received", help, Unit::Bytes, self.received.clone());
        let help = "Bytes of results that clients have got";
        all.register_with_unit("sent", help, Unit::Bytes, self.sent.clone());
        all.register("pieces", "Pieces reduced", self.pieces.clone());
        all.register("failures", "Communicators that could not go on", self.failures.clone());
        let help = "Bytes of sums that have gone to servers above";
        all.register_with_unit("upstream_sent", help, Unit::Bytes, self.climbed.clone());
        let help = "Bytes of results that have come from servers above";
        all.register_with_unit("upstream_received", help, Unit::Bytes, self.descended.clone());
        all.register("communicators", "Communicators there are", self.communicators.clone());
        all.register("ranks", "Ranks that are connected", self.ranks.clone());
        let help = "From a piece's first part until the last is there";
        all.register_with_unit("receive", help, Unit::Seconds, self.receive.clone());
        let help = "Reducing a piece";
        all.register_with_unit("reduce", help, Unit::Seconds, self.reduce.clone());
        let help = "From a piece's being reduced until it is back from the servers above";
        all.register_with_unit("upstream", help, Unit::Seconds, self.climb.clone());
        let help =
            "From a piece's being reduced, by servers above as well, until all ranks have it";
        all.register_with_unit("send", help, Unit::Seconds, self.send.clone());
        all.register("joins_refused", "Clients that were not welcome", self.refused.clone());
        all.register_collector(Box::new(Memory(Arc::clone(budget))));
    }

    fn render(&self) -> String {
        let mut text = String::new();
        match encode(&mut text, &self.registry) {
            Ok(()) => text,
            // Writing to a String cannot fail.
            Err(_) => String::new(),
        }
    }
}

/// From 10 microseconds to 20 seconds.
fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(10e-6, 2.0, 22))
}

/// The budget as a scrape finds it.
#[derive(Debug)]
struct Memory(Arc<Budget>);

impl Collector for Memory {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let (now, most) = self.0.granted();
        let bound = self.0.total();
        for (name, help, value) in [
            ("memory", "Bytes of buffers that are granted", now),
            ("memory_most", "The most bytes of buffers at any time", most),
            ("memory_bound", "Bytes of buffers that may be granted", bound),
        ] {
            let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            let unit = Unit::Bytes;
            let encoder =
                encoder.encode_descriptor(name, help, Some(&unit), gauge.metric_type())?;
            gauge.encode(encoder)?;
        }
        Ok(())
    }
}

/// What is served over HTTP.
pub(crate) struct Site {
    pub(crate) metrics: Arc<Metrics>,
    /// No new jobs are taken.
    pub(crate) draining: Arc<AtomicBool>,
    /// Communicators there are.
    pub(crate) sessions: Arc<AtomicI64>,
}

impl Pages for Site {
    fn page(&self, path: &str) -> Option<Page> {
        let text = |status, body: String| Some(Page { status, kind: "text/plain", body });
        match path {
            "/metrics" => Some(Page::open_metrics(self.metrics.render())),
            "/healthz" => text("200 OK", "ok\n".to_owned()),
            "/readyz" if self.draining.load(Ordering::Acquire) => {
                let left = self.sessions.load(Ordering::Acquire);
                let body = format!("shutting down: {left} communicators are left\n");
                text("503 Service Unavailable", body)
            }
            "/readyz" => text("200 OK", "ok\n".to_owned()),
            _ => None,
        }
    }
}
