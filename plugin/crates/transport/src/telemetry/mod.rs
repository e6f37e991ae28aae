//! The log, the counters, the metrics, the waits, and the report to the controller.

pub mod chunk_events;
pub(crate) mod counters;
pub(crate) mod exporter;
pub(crate) mod log;
pub(crate) mod metrics;
pub mod report;
pub(crate) mod waits;
