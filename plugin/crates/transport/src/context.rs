//! What a listener or a connection is opened with.

use std::sync::Arc;

use crate::device::{self, Device};
use crate::rdma::MemoryTypes;
use crate::settings::Settings;
use crate::telemetry::log::Log;
use crate::telemetry::metrics::Metrics;

/// Settings, devices and outputs of a listener or a connection.
#[derive(Clone)]
pub(crate) struct Context {
    pub(crate) settings: Arc<Settings>,
    pub(crate) log: Arc<dyn Log>,
    pub(crate) device: Device,
    /// All devices of this host.
    pub(crate) devices: Arc<[Device]>,
    pub(crate) label: String,
    pub(crate) metrics: Arc<Metrics>,
    /// The memory types that messages may be in.
    pub(crate) memory_types: MemoryTypes,
    /// The traffic class of RDMA packets, unless the settings set one.
    pub(crate) traffic_class: Option<u8>,
}

impl Context {
    /// The other RDMA ports that a connection can fail over to.
    pub(crate) fn other_ports(&self) -> impl Iterator<Item = Device> {
        device::other_ports(&self.device, &self.devices).into_iter().cloned()
    }
}
