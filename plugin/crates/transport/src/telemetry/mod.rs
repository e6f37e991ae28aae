//! The log, the counters and the metrics.

pub(crate) mod counters;
pub(crate) mod exporter;
pub(crate) mod log;
pub(crate) mod metrics;
