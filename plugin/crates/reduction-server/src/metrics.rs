//! Metrics of the server, by job, in the text format of OpenMetrics.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use evenkeel_transport::sync::lock;
use evenkeel_transport::{Page, Pages};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use crate::memory_budget::MemoryBudget;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct JobLabel {
    job: String,
}

type Times = Family<JobLabel, Histogram, fn() -> Histogram>;

/// Maximum number of jobs with a label of their own: names come from clients, and labels are kept.
const MAX_JOBS: usize = 1000;

/// The metrics of all jobs.
pub(crate) struct Metrics {
    received: Family<JobLabel, Counter>,
    sent: Family<JobLabel, Counter>,
    pieces: Family<JobLabel, Counter>,
    failures: Family<JobLabel, Counter>,
    upstream_sent: Family<JobLabel, Counter>,
    upstream_received: Family<JobLabel, Counter>,
    communicators: Family<JobLabel, Gauge>,
    ranks: Family<JobLabel, Gauge>,
    receive: Times,
    reduce: Times,
    upstream: Times,
    send: Times,
    /// Jobs that have a label of their own.
    jobs: Mutex<HashSet<String>>,
    /// Joins that were refused.
    pub(crate) refused: Counter,
    encryption: Gauge,
    registry: Registry,
}

/// The metrics of one job.
#[derive(Clone)]
pub(crate) struct JobMetrics {
    /// Bytes of parts received.
    pub(crate) received: Counter,
    /// Bytes of results sent.
    pub(crate) sent: Counter,
    /// Pieces reduced.
    pub(crate) pieces: Counter,
    /// Communicators that failed.
    pub(crate) failures: Counter,
    /// Bytes of sums sent to upstream servers.
    pub(crate) upstream_sent: Counter,
    /// Bytes of results received from upstream servers.
    pub(crate) upstream_received: Counter,
    /// Communicators that exist.
    pub(crate) communicators: Gauge,
    /// Ranks that are connected.
    pub(crate) ranks: Gauge,
    /// Seconds from a piece's first header until its last part has arrived.
    pub(crate) receive: Histogram,
    /// Seconds of a piece's reduction.
    pub(crate) reduce: Histogram,
    /// Seconds from then until the upstream server has returned the result.
    pub(crate) upstream: Histogram,
    /// Seconds from then until the result is sent to all ranks.
    pub(crate) send: Histogram,
}

impl Metrics {
    pub(crate) fn new(budget: &Arc<MemoryBudget>, is_encrypted: bool) -> Self {
        let histogram = || Times::new_with_constructor(seconds);
        let mut this = Self {
            received: Family::default(),
            sent: Family::default(),
            pieces: Family::default(),
            failures: Family::default(),
            upstream_sent: Family::default(),
            upstream_received: Family::default(),
            communicators: Family::default(),
            ranks: Family::default(),
            receive: histogram(),
            reduce: histogram(),
            upstream: histogram(),
            send: histogram(),
            jobs: Mutex::default(),
            refused: Counter::default(),
            encryption: Gauge::default(),
            registry: Registry::with_prefix("evenkeel_reduction"),
        };
        this.encryption.set(is_encrypted.into());
        this.register(budget);
        this
    }

    /// The metrics of one job.
    pub(crate) fn for_job(&self, job: &str) -> JobMetrics {
        let known = {
            let mut jobs = lock(&self.jobs);
            jobs.contains(job) || (jobs.len() < MAX_JOBS && jobs.insert(job.to_owned()))
        };
        let label = JobLabel { job: if known { job } else { "others" }.to_owned() };
        JobMetrics {
            received: self.received.get_or_create_owned(&label),
            sent: self.sent.get_or_create_owned(&label),
            pieces: self.pieces.get_or_create_owned(&label),
            failures: self.failures.get_or_create_owned(&label),
            upstream_sent: self.upstream_sent.get_or_create_owned(&label),
            upstream_received: self.upstream_received.get_or_create_owned(&label),
            communicators: self.communicators.get_or_create_owned(&label),
            ranks: self.ranks.get_or_create_owned(&label),
            receive: self.receive.get_or_create_owned(&label),
            reduce: self.reduce.get_or_create_owned(&label),
            upstream: self.upstream.get_or_create_owned(&label),
            send: self.send.get_or_create_owned(&label),
        }
    }

    fn register(&mut self, budget: &Arc<MemoryBudget>) {
        let all = &mut self.registry;
        let help = "1 if every connection is encrypted (EVENKEEL_ENCRYPTION=required), else 0";
        all.register("encryption_required", help, self.encryption.clone());
        let help = "Bytes of parts received from ranks";
        all.register_with_unit("received", help, Unit::Bytes, self.received.clone());
        let help = "Bytes of results sent to ranks";
        all.register_with_unit("sent", help, Unit::Bytes, self.sent.clone());
        all.register("pieces", "Pieces reduced", self.pieces.clone());
        all.register("failures", "Communicators that failed", self.failures.clone());
        let help = "Bytes of sums sent to upstream servers";
        all.register_with_unit("upstream_sent", help, Unit::Bytes, self.upstream_sent.clone());
        let help = "Bytes of results received from upstream servers";
        all.register_with_unit(
            "upstream_received",
            help,
            Unit::Bytes,
            self.upstream_received.clone(),
        );
        all.register("communicators", "Communicators that exist", self.communicators.clone());
        all.register("ranks", "Ranks that are connected", self.ranks.clone());
        let help = "Time from a piece's first header until its last part has arrived";
        all.register_with_unit("receive", help, Unit::Seconds, self.receive.clone());
        let help = "Time of a piece's reduction";
        all.register_with_unit("reduce", help, Unit::Seconds, self.reduce.clone());
        let help =
            "Time from a piece's reduction until the upstream server has returned the result";
        all.register_with_unit("upstream", help, Unit::Seconds, self.upstream.clone());
        let help = "Time from a piece's result until it is sent to all ranks";
        all.register_with_unit("send", help, Unit::Seconds, self.send.clone());
        all.register("joins_refused", "Joins that were refused", self.refused.clone());
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

/// Buckets from 10 microseconds to 20 seconds.
fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(10e-6, 2.0, 22))
}

/// The memory budget, read at each scrape.
#[derive(Debug)]
struct Memory(Arc<MemoryBudget>);

impl Collector for Memory {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let (now, peak) = self.0.granted();
        let limit = self.0.total();
        for (name, help, value) in [
            ("memory", "Bytes of buffers granted to communicators", now),
            ("memory_peak", "Maximum bytes of buffers granted at any time", peak),
            ("memory_limit", "Maximum bytes of buffers that may be granted", limit),
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

/// The pages served over HTTP.
pub(crate) struct MetricsPages {
    pub(crate) metrics: Arc<Metrics>,
    /// Whether new communicators are refused.
    pub(crate) draining: Arc<AtomicBool>,
    /// Number of communicators.
    pub(crate) communicators: Arc<AtomicI64>,
}

impl Pages for MetricsPages {
    fn page(&self, path: &str) -> Option<Page> {
        let text = |status, body: String| Some(Page { status, kind: "text/plain", body });
        match path {
            "/metrics" => Some(Page::open_metrics(self.metrics.render())),
            "/healthz" => text("200 OK", "ok\n".to_owned()),
            "/readyz" if self.draining.load(Ordering::Acquire) => {
                let left = self.communicators.load(Ordering::Acquire);
                let body = format!("shutting down: {left} communicators are left\n");
                text("503 Service Unavailable", body)
            }
            "/readyz" => text("200 OK", "ok\n".to_owned()),
            _ => None,
        }
    }
}
