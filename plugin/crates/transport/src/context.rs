//! What a listener or a connection is opened with.

use std::sync::Arc;

use crate::device::{self, Device};
use crate::rdma::MemoryTypes;
use crate::settings::Settings;
use crate::telemetry::log::Log;
use crate::telemetry::metrics::Metrics;

/// What a listener or a connection was opened with.
#[derive(Clone)]
pub(crate) struct Context {
    pub(crate) settings: Arc<Settings>,
    pub(crate) log: Arc<dyn Log>,
    pub(crate) device: Device,
    /// All of this host's.
    pub(crate) devices: Arc<[Device]>,
    pub(crate) label: String,
    pub(crate) metrics: Arc<Metrics>,
    /// The memory in which messages may be.
    pub(crate) memory_types: MemoryTypes,
    /// What packets are marked with over RDMA, unless the settings say.
    pub(crate) traffic_class: Option<u8>,
}

impl Context {
    /// The other RDMA ports by which a connection can go on.
    pub(crate) fn other_ports(&self) -> impl Iterator<Item = Device> {
        device::other_ports(&self.device, &self.devices).into_iter().cloned()
    }
}
