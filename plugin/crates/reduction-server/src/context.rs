//! What all communicators of a server share.

use std::sync::Arc;
use std::time::Duration;

use evenkeel_reduction::Timeline;
use evenkeel_transport::{Log, Transport};

use crate::memory_budget::MemoryBudget;
use crate::metrics::Metrics;
use crate::pool::TaskPool;

/// What all communicators of a server share.
pub(crate) struct Context {
    pub(crate) transport: Arc<Transport>,
    pub(crate) budget: Arc<MemoryBudget>,
    pub(crate) pool: TaskPool,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) log: Arc<dyn Log>,
    pub(crate) timeline: Option<Timeline>,
    /// How long a rank or an upstream server may not respond.
    pub(crate) timeout: Duration,
}
