//! Metrics of the live connections, in the text format of Prometheus.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, Weak};

use evenkeel_diagnosis::{Suspect, Verdict};
use evenkeel_protocol::PathInfo;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::connection::base::{Base, Direction};
use crate::rdma::Adapter;
use crate::sync::lock;
use crate::sys::PathFigures;
use crate::telemetry::counters::Counters;
use crate::telemetry::exporter::{Page, Pages};
use crate::telemetry::waits::{Calls, WaitTimes};
use crate::weak::WeakList;

/// A connection with metrics.
pub(crate) trait Observed: Send + Sync {
    /// Its present values.
    fn observe(&self) -> ConnectionObservation<'_>;
    /// What both kinds of connections share.
    fn base(&self) -> &Base;
    /// What the kernel knows of its flows' paths; nothing over RDMA.
    fn paths(&self) -> Vec<PathInfo> {
        Vec::new()
    }
    /// The present values of its flows.
    fn observe_flows(&self) -> Vec<FlowObservation>;
}

/// The values of a connection at some moment.
pub(crate) struct ConnectionObservation<'a> {
    /// `send` or `recv`.
    pub(crate) direction: &'static str,
    pub(crate) peer: SocketAddr,
    /// Name of the device that it was opened on.
    pub(crate) device: &'a str,
    /// As in its log lines.
    pub(crate) label: &'a str,
    pub(crate) counters: &'a Counters,
    pub(crate) waits: WaitTimes,
    /// Requests that are not done, and their bytes.
    pub(crate) requests: usize,
    pub(crate) bytes: u64,
}

/// The values of a flow at some moment.
pub(crate) struct FlowObservation {
    /// Its number in the connection.
    pub(crate) number: u32,
    /// Payload bytes moved.
    pub(crate) bytes: u64,
    /// Path figures from the kernel.
    pub(crate) path: PathFigures,
}

/// The connections of a process, and the RDMA ports that they may use.
#[derive(Default)]
pub(crate) struct Metrics {
    connections: Mutex<WeakList<dyn Observed>>,
    /// Whether any of them has requests.
    pub(crate) calls: Calls,
    /// Addresses of listening sockets, as long as they live.
    listening: Mutex<WeakList<SocketAddr>>,
    /// Who is waited for, if this process judges that.
    verdict: Mutex<Vec<Suspect>>,
    adapters: Vec<Arc<Adapter>>,
    /// Whether every TCP connection is encrypted.
    is_encrypted: bool,
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

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SuspectLabels {
    class: &'static str,
    rank: String,
    host: String,
    device: String,
    peer: String,
}

type OfConnection<M> = Family<ConnectionLabels, M>;
type OfFlow<M> = Family<FlowLabels, M>;

/// The metric families.
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
    wait_peer: OfConnection<Counter<f64, std::sync::atomic::AtomicU64>>,
    wait_wire: OfConnection<Counter<f64, std::sync::atomic::AtomicU64>>,
    wait_unposted: OfConnection<Counter<f64, std::sync::atomic::AtomicU64>>,
    uncalled: Family<Vec<(String, String)>, Counter<f64, std::sync::atomic::AtomicU64>>,
    suspects: Family<SuspectLabels, Gauge<f64, std::sync::atomic::AtomicU64>>,
    requests: OfConnection<Gauge>,
    pending: OfConnection<Gauge>,
    flow_bytes: OfFlow<Counter>,
    retransmits: OfFlow<Counter>,
    round_trip: OfFlow<Gauge<f64, std::sync::atomic::AtomicU64>>,
    rate: OfFlow<Gauge>,
    queued: OfFlow<Gauge>,
    registrations: Family<DeviceLabels, Counter>,
    reused: Family<DeviceLabels, Counter>,
    encryption: Gauge,
}

impl Metrics {
    /// With the counters of these RDMA ports, and whether every TCP connection is encrypted.
    pub(crate) fn new(adapters: Vec<Arc<Adapter>>, is_encrypted: bool) -> Self {
        Self { adapters, is_encrypted, ..Self::default() }
    }

    /// Includes a connection from now on, as long as it lives.
    pub(crate) fn watch(&self, connection: Weak<dyn Observed>) {
        lock(&self.connections).push(connection);
    }

    /// The live connections.
    pub(crate) fn connections(&self) -> Vec<Arc<dyn Observed>> {
        lock(&self.connections).live().collect()
    }

    /// A socket listens at this address as long as the result lives.
    pub(crate) fn listens(&self, address: SocketAddr) -> Arc<SocketAddr> {
        let listening = Arc::new(address);
        lock(&self.listening).push(Arc::downgrade(&listening));
        listening
    }

    /// Where this process listens, the latest last.
    pub(crate) fn listening(&self) -> Vec<SocketAddr> {
        lock(&self.listening).live().map(|address| *address).collect()
    }

    /// Where the peers listen that this process sends to.
    pub(crate) fn neighbours(&self) -> Vec<SocketAddr> {
        let live = self.connections();
        let sends = live.iter().filter(|its| its.base().direction_of() == Direction::Send);
        sends.map(|connection| connection.base().peer()).collect()
    }

    /// Who is waited for now.
    pub(crate) fn set_verdict(&self, verdict: &Verdict) {
        lock(&self.verdict).clone_from(&verdict.suspects);
    }

    /// The text that a scrape gets.
    fn render(&self) -> String {
        let connections = self.connections();
        let table = Table::default();
        for connection in &connections {
            table.add(&**connection);
        }
        if !connections.is_empty() {
            table.uncalled.get_or_create(&Vec::new()).inc_by(self.calls.uncalled().0.as_secs_f64());
        }
        for suspect in &*lock(&self.verdict) {
            let labels = SuspectLabels {
                class: suspect.class.name(),
                rank: suspect.place.rank.map_or_else(String::new, |rank| rank.to_string()),
                host: suspect.place.host.clone(),
                device: suspect.place.device.clone(),
                peer: suspect.peer.as_ref().map_or_else(String::new, |peer| peer.host.clone()),
            };
            table.suspects.get_or_create(&labels).set(suspect.confidence);
        }
        for adapter in &self.adapters {
            let labels = DeviceLabels { device: adapter.name().to_owned() };
            let memory = &adapter.regions;
            table.registrations.get_or_create(&labels).inc_by(memory.registered.get());
            table.reused.get_or_create(&labels).inc_by(memory.reused.get());
        }
        table.encryption.set(self.is_encrypted.into());
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
        let ConnectionObservation {
            direction,
            peer,
            device,
            label,
            counters,
            waits,
            requests,
            bytes,
        } = connection.observe();
        let labels = ConnectionLabels {
            direction,
            peer: peer.to_string(),
            device: device.to_owned(),
            comm: label.trim_start_matches("comm=").to_owned(),
        };
        let of_flow = |flow| FlowLabels {
            direction: labels.direction,
            peer: labels.peer.clone(),
            device: labels.device.clone(),
            comm: labels.comm.clone(),
            flow,
        };
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
        for (family, time) in [
            (&self.wait_peer, waits.peer),
            (&self.wait_wire, waits.wire),
            (&self.wait_unposted, waits.unposted),
        ] {
            family.get_or_create(&labels).inc_by(time.as_secs_f64());
        }
        self.requests.get_or_create(&labels).inc_by(requests as i64);
        self.pending.get_or_create(&labels).inc_by(bytes as i64);
        for FlowObservation { number, bytes, path } in connection.observe_flows() {
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
        let help = "Bytes that were sent or received again because a flow died";
        all.register_with_unit("repeated", help, bytes(), self.repeated);
        all.register("flows_lost", "Flows that died", self.lost);
        all.register("flows_replaced", "Flows opened in place of dead ones", self.replaced);
        let help = "Number of times that a new path replaced a slow one";
        all.register("repaths", help, self.repathed);
        let help = "Number of times that a connection recovered after it had lost all flows";
        all.register("recoveries", help, self.recovered);
        let help = "Flows that were closed because they stalled while others moved";
        all.register("stalls", help, self.stalled);
        let help = "Chunks and frames that did not match their checksum, and TLS records that were forged or changed";
        all.register("checksum_mismatches", help, self.corrupt);
        let help = "Time for which requests waited for the peer: a sender for a buffer, a receiver for a message's first bytes";
        all.register_with_unit("wait_peer", help, Unit::Seconds, self.wait_peer);
        let help = "Time for which requests waited for bytes under way";
        all.register_with_unit("wait_wire", help, Unit::Seconds, self.wait_wire);
        let help = "Time for which received bytes waited for this process to post a buffer";
        all.register_with_unit("wait_unposted", help, Unit::Seconds, self.wait_unposted);
        let help = "Whom the job's ranks wait for, with the confidence from 0 to 1; only the process that collects has it";
        all.register("suspect", help, self.suspects);
        let help = "Time for which the process had no request on any connection";
        all.register_with_unit("uncalled", help, Unit::Seconds, self.uncalled);
        all.register("requests_in_flight", "Requests that are not done", self.requests);
        let help = "Bytes of requests that are not done";
        all.register_with_unit("in_flight", help, bytes(), self.pending);
        all.register_with_unit("flow", "Payload bytes moved by a flow", bytes(), self.flow_bytes);
        all.register("flow_retransmits", "Segments that TCP retransmitted", self.retransmits);
        let help = "TCP's smoothed round-trip time";
        all.register_with_unit("flow_round_trip", help, Unit::Seconds, self.round_trip);
        let help = "Delivery rate that TCP last measured, per second";
        all.register_with_unit("flow_delivery_rate", help, bytes(), self.rate);
        let help = "Unsent bytes in the socket buffer";
        all.register_with_unit("flow_queued", help, bytes(), self.queued);
        let help = "Number of times that memory was registered with an RDMA port";
        all.register("memory_registrations", help, self.registrations);
        let help = "Number of times that a search for memory found it registered";
        all.register("memory_registrations_reused", help, self.reused);
        let help = "1 if every TCP connection is encrypted (EVENKEEL_ENCRYPTION=required), else 0";
        all.register("encryption_required", help, self.encryption);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_without_connections_say_what_encryption_is_in_force() {
        for is_encrypted in [false, true] {
            let page = Metrics::new(Vec::new(), is_encrypted).page("/metrics").unwrap();
            let figures: Vec<_> = page.body.lines().filter(|line| !line.starts_with('#')).collect();
            assert_eq!(
                figures,
                [format!("evenkeel_encryption_required {}", u8::from(is_encrypted))]
            );
        }
    }
}
