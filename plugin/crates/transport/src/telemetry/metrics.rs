//! What the live connections have done, in the text format of Prometheus.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::connection::base::{Base, InFlight};
use crate::rdma::Adapter;
use crate::sys::PathFigures;
use crate::telemetry::exporter::{Page, Pages};

/// A connection that can be looked at.
pub(crate) trait Observed: Send + Sync {
    /// What it has in common with all others.
    fn base(&self) -> &Base;
    /// What is not done.
    fn in_flight(&self) -> InFlight;
    /// Its flows.
    fn flows(&self) -> Vec<FlowObservation>;
}

/// A flow at some moment.
pub(crate) struct FlowObservation {
    /// Its number in the connection.
    pub(crate) number: u32,
    /// Payload bytes moved.
    pub(crate) bytes: u64,
    /// What the kernel says of its path.
    pub(crate) path: PathFigures,
}

/// The connections of a process, and the RDMA ports that they may use.
#[derive(Default)]
pub(crate) struct Metrics {
    connections: Mutex<Vec<Weak<dyn Observed>>>,
    adapters: Vec<Arc<Adapter>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ConnectionLabels {
    direction: &'static str,
    peer: String,
    device: String,
    comm: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DeviceLabels {
    device: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FlowLabels {
    direction: &'static str,
    peer: String,
    device: String,
    comm: String,
    flow: u32,
}

type OfConnection<M> = Family<ConnectionLabels, M>;
type OfFlow<M> = Family<FlowLabels, M>;

/// The metrics, with their help.
#[derive(Default)]
struct Table {
    bytes: OfConnection<Counter>,
    chunks: OfConnection<Counter>,
    repeated: OfConnection<Counter>,
    lost: OfConnection<Counter>,
    replaced: OfConnection<Counter>,
    repathed: OfConnection<Counter>,
    recovered: OfConnection<Counter>,
    stalled: OfConnection<Counter>,
    corrupt: OfConnection<Counter>,
    requests: OfConnection<Gauge>,
    pending: OfConnection<Gauge>,
    flow_bytes: OfFlow<Counter>,
    retransmits: OfFlow<Counter>,
    round_trip: OfFlow<Gauge<f64, std::sync::atomic::AtomicU64>>,
    rate: OfFlow<Gauge>,
    queued: OfFlow<Gauge>,
    registrations: Family<DeviceLabels, Counter>,
    reused: Family<DeviceLabels, Counter>,
}

impl Metrics {
    /// Shows these ports too.
    pub(crate) fn new(adapters: Vec<Arc<Adapter>>) -> Self {
        Self { connections: Mutex::default(), adapters }
    }

    /// Shows a connection from now on, as long as it lives.
    pub(crate) fn watch(&self, connection: Weak<dyn Observed>) {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        connections.retain(|connection| connection.strong_count() > 0);
        connections.push(connection);
    }

    /// What a scrape gets.
    fn render(&self) -> String {
        let connections: Vec<Arc<dyn Observed>> = {
            let connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
            connections.iter().filter_map(Weak::upgrade).collect()
        };
        let table = Table::default();
        for connection in &connections {
            table.add(&**connection);
        }
        for adapter in &self.adapters {
            let labels = DeviceLabels { device: adapter.name().to_owned() };
            let memory = &adapter.regions;
            table.registrations.get_or_create(&labels).inc_by(memory.registered.get());
            table.reused.get_or_create(&labels).inc_by(memory.reused.get());
        }
        let mut text = String::new();
        match encode(&mut text, &table.register()) {
            Ok(()) => text,
            // Writing to a String cannot fail.
            Err(_) => String::new(),
        }
    }
}

impl Pages for Metrics {
    fn page(&self, path: &str) -> Option<Page> {
        (path == "/metrics").then(|| Page::open_metrics(self.render()))
    }
}

impl Table {
    fn add(&self, connection: &dyn Observed) {
        let base = connection.base();
        let labels = ConnectionLabels {
            direction: base.direction(),
            peer: base.peer().to_string(),
            device: base.context.device.name().to_owned(),
            comm: base.context.label.trim_start_matches("comm=").to_owned(),
        };
        let of_flow = |flow| FlowLabels {
            direction: labels.direction,
            peer: labels.peer.clone(),
            device: labels.device.clone(),
            comm: labels.comm.clone(),
            flow,
        };
        let counters = &base.counters;
        for (family, value) in [
            (&self.bytes, counters.bytes()),
            (&self.chunks, counters.chunks()),
            (&self.repeated, counters.repeated.get()),
            (&self.lost, counters.lost.get()),
            (&self.replaced, counters.replaced.get()),
            (&self.repathed, counters.repathed.get()),
            (&self.recovered, counters.recovered.get()),
            (&self.stalled, counters.stalled.get()),
            (&self.corrupt, counters.corrupt.get()),
        ] {
            family.get_or_create(&labels).inc_by(value);
        }
        let InFlight { requests, bytes } = connection.in_flight();
        self.requests.get_or_create(&labels).inc_by(requests as i64);
        self.pending.get_or_create(&labels).inc_by(bytes as i64);
        for FlowObservation { number, bytes, path } in connection.flows() {
            let labels = of_flow(number);
            self.flow_bytes.get_or_create(&labels).inc_by(bytes);
            self.retransmits.get_or_create(&labels).inc_by(path.retransmits);
            self.round_trip.get_or_create(&labels).set(path.round_trip.as_secs_f64());
            self.rate.get_or_create(&labels).set(path.delivery_rate as i64);
            self.queued.get_or_create(&labels).set(path.queued as i64);
        }
    }

    fn register(self) -> Registry {
        let mut all = Registry::with_prefix("evenkeel");
        let bytes = || Unit::Bytes;
        all.register_with_unit("message", "Bytes of complete messages", bytes(), self.bytes);
        all.register("chunks", "Chunks moved", self.chunks);
        let help = "Bytes that were sent again, or came again, because a flow died";
        all.register_with_unit("repeated", help, bytes(), self.repeated);
        all.register("flows_lost", "Flows that died", self.lost);
        all.register("flows_replaced", "Flows opened in place of dead ones", self.replaced);
        let help = "Times that a new path took the place of a slow one";
        all.register("repaths", help, self.repathed);
        let help = "Times that no flow was left and the connection went on";
        all.register("recoveries", help, self.recovered);
        let help = "Flows given up because they stood still while others moved";
        all.register("stalls", help, self.stalled);
        let help = "Chunks and frames that did not match their checksum";
        all.register("checksum_mismatches", help, self.corrupt);
        all.register("requests_in_flight", "Requests that are not done", self.requests);
        let help = "Bytes of requests that are not done";
        all.register_with_unit("in_flight", help, bytes(), self.pending);
        all.register_with_unit("flow", "Payload bytes moved by a flow", bytes(), self.flow_bytes);
        all.register("flow_retransmits", "Segments that TCP sent again", self.retransmits);
        let help = "TCP's smoothed round-trip time";
        all.register_with_unit("flow_round_trip", help, Unit::Seconds, self.round_trip);
        let help = "What TCP last delivered in a second";
        all.register_with_unit("flow_delivery_rate", help, bytes(), self.rate);
        let help = "Bytes that wait in the socket unsent";
        all.register_with_unit("flow_queued", help, bytes(), self.queued);
        let help = "Times that memory was registered with an RDMA port";
        all.register("memory_registrations", help, self.registrations);
        let help = "Times that memory was used which was registered already";
        all.register("memory_registrations_reused", help, self.reused);
        all
    }
}
