//! Devices, and connections between peers over TCP or RDMA.
//!
//! A [`Transport`] knows the devices of this host. [`Transport::listen`] returns a [`Listener`], whose [`Handle`] the peer
//! passes to [`Transport::connect`]. Both sides are polled and never block. The connecting side gets a [`SendConnection`],
//! the listener a [`RecvConnection`]: messages go one way. Each request is polled by [`Request::test`], but makes progress
//! without it. A few worker threads, shared by all connections of the process, move the bytes. They start with the first
//! listener or connection and stop with the last.
//!
//! The peers agree on TCP or RDMA when a connection is opened, and callers need not know: TCP uses several flows, RDMA
//! several queue pairs between two ports.
//!
//! A failure of a connection is reported by all its requests and by one log line. Errors of a call itself are left to the
//! caller to log: [`Error::is_logged`] tells them apart.

mod connection;
mod context;
mod device;
mod error;
mod handshake;
mod memory;
mod rdma;
mod runtime;
pub mod settings;
mod stream;
pub mod sync;
mod sys;
mod tcp;
mod telemetry;
#[cfg(test)]
mod test_support;
pub mod weak;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, Weak};

pub use connection::owned::{PendingRecv, PendingSend};
pub use connection::recv::{RecvConnection, TaggedBuffer};
pub use connection::request::{MAX_RECVS, MAX_REQUESTS, Request};
pub use connection::send::{CloseHandle, SendConnection};
pub use device::Device;
pub use error::{ConnectError, Error, ErrorKind, Retry};
pub use evenkeel_protocol::{HANDLE_BYTES, Handle, MAX_MESSAGE_BYTES, Nonce};
pub use handshake::connect::Connecting;
pub use handshake::listen::Listener;
pub use memory::block::Block;
pub use memory::buffers::{RecvBuffer, SendBuffer};
pub use rdma::{MemoryTypes, MrCache, MrHandle};
pub use runtime::notify::{Notify, NullNotify};
pub use runtime::reactor::defer_on_worker;
pub use runtime::waiters::wait_for;
pub use settings::Settings;
pub use settings::rails::Rail;
pub use settings::table::SettingsError;
pub use sys::random;
pub use telemetry::exporter::{Exporter, Page, Pages};
pub use telemetry::log::{Log, NullLog};
pub use telemetry::report;

use context::Context;
use handshake::listen::ListenMode;
use runtime::descriptors;
use runtime::reactor::Runtime;
use sync::lock;
use telemetry::metrics::Metrics;

/// The network, as this process uses it.
pub struct Transport {
    settings: Arc<Settings>,
    log: Arc<dyn Log>,
    devices: Arc<[Device]>,
    metrics: Arc<Metrics>,
    /// Alive as long as a listener, a connection or an attempt to connect is.
    runtime: Mutex<Weak<Runtime>>,
}

impl Transport {
    /// Discovers devices. Starts nothing.
    ///
    /// # Errors
    /// [`ErrorKind::System`] when the interfaces cannot be listed, [`ErrorKind::Config`] when none may be used.
    pub fn new(settings: Settings, log: Arc<dyn Log>) -> Result<Self, Error> {
        Self::with_memory(settings, None, log)
    }

    /// As [`Transport::new`], for messages in host memory only, whatever the devices support. Logs the reason if a device
    /// supports GPU memory.
    ///
    /// # Errors
    /// As [`Transport::new`].
    pub fn with_host_memory_only(
        settings: Settings,
        reason: &str,
        log: Arc<dyn Log>,
    ) -> Result<Self, Error> {
        Self::with_memory(settings, Some(reason), log)
    }

    fn with_memory(
        settings: Settings,
        host_memory_only: Option<&str>,
        log: Arc<dyn Log>,
    ) -> Result<Self, Error> {
        if let Some(file) = settings.exposed_key_file() {
            log.warn(&format!(
                "evenkeel: EVENKEEL_JOB_KEY_FILE: {} can be read by every user of this host: chmod o-r",
                file.display()
            ));
        }
        if settings.rdma_left_out && device::host_has_rdma() {
            log.warn(
                "evenkeel: RDMA is not used: it cannot be encrypted, and EVENKEEL_ENCRYPTION=required (EVENKEEL_RDMA_NETWORK)",
            );
        }
        let devices = device::discover(&settings, host_memory_only, &log)?;
        let adapters = devices.iter().filter_map(Device::rdma).cloned().collect();
        let unmatched = settings.rails.unmatched(devices.iter().map(Device::name));
        if !unmatched.is_empty() {
            let (unmatched, names) = (unmatched.join(", "), names(&devices));
            log.warn(&format!(
                "evenkeel: EVENKEEL_RAILS names {unmatched}, which this host does not have; it has {names}"
            ));
        }
        let is_encrypted = settings.encryption.is_some();
        Ok(Self {
            settings: Arc::new(settings),
            log,
            devices: devices.into(),
            metrics: Arc::new(Metrics::new(adapters, is_encrypted)),
            runtime: Mutex::new(Weak::new()),
        })
    }

    /// The devices, in a stable order. Never empty.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Whether a listener, a connection or an attempt to connect exists.
    pub fn in_use(&self) -> bool {
        lock(&self.runtime).strong_count() > 0
    }

    /// Opens a listener on a device. `label` goes into the log lines of its connections. Messages are in memory of these
    /// types: the host's, or [`Device::memory_types`].
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] for an unknown device, [`ErrorKind::System`] when the socket cannot be opened.
    pub fn listen(
        &self,
        device: usize,
        label: &str,
        memory_types: MemoryTypes,
    ) -> Result<Listener, Error> {
        let context = Context { memory_types, ..self.context(device, label)? };
        Listener::open(self.runtime()?, context, ListenMode::Private)
    }

    /// Opens a listener at an address and with a nonce that peers know. It never times out, and notifies its owner of
    /// connections. `label` goes into the log lines of its connections.
    ///
    /// # Errors
    /// [`ErrorKind::System`] when the socket cannot be opened.
    pub fn listen_at(
        &self,
        address: SocketAddr,
        nonce: Nonce,
        label: &str,
        notified: Arc<dyn Notify>,
    ) -> Result<Listener, Error> {
        // At the wildcard address, the first device stands for all until a peer connects.
        let at = |device: &Device| device.addresses().contains(&address.ip());
        let device = self.devices.iter().position(at).unwrap_or(0);
        let context = self.context(device, label)?;
        let port = ListenMode::Public(address, nonce, notified);
        Listener::open(self.runtime()?, context, port)
    }

    /// Number of the device at which a connection arrived. Its peer can be reached by it.
    pub fn device_of(&self, connection: &RecvConnection) -> usize {
        let name = connection.receiver.base().context.device.name();
        self.devices.iter().position(|device| device.name() == name).unwrap_or(0)
    }

    /// The settings that it was made with.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The rail of a device, if the settings name it.
    pub fn rail(&self, device: usize) -> Option<Rail> {
        self.settings.rails.of(self.devices.get(device)?.name())
    }

    /// The cache that registers memory for messages over a device.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] for an unknown device.
    pub fn mr_cache(&self, device: usize) -> Result<MrCache, Error> {
        let device = self.context(device, "")?.device;
        Ok(MrCache::new(&device, std::iter::empty(), MemoryTypes::HOST))
    }

    /// Starts to connect to a listener from a device. `label` goes into the log lines of the connection. Messages are in
    /// memory of these types, as for [`Transport::listen`].
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] for an unknown device, [`ErrorKind::System`] when a socket cannot be opened.
    pub fn connect(
        &self,
        device: usize,
        handle: &Handle,
        label: &str,
        memory_types: MemoryTypes,
    ) -> Result<Connecting, Error> {
        self.connect_with_traffic_class(device, handle, label, memory_types, None)
    }

    /// As [`Transport::connect`]. RDMA packets have this traffic class, unless the settings set another one.
    ///
    /// # Errors
    /// As [`Transport::connect`].
    pub fn connect_with_traffic_class(
        &self,
        device: usize,
        handle: &Handle,
        label: &str,
        memory_types: MemoryTypes,
        traffic_class: Option<u8>,
    ) -> Result<Connecting, Error> {
        let context = Context { memory_types, traffic_class, ..self.context(device, label)? };
        Connecting::start(self.runtime()?, context, handle, false)
    }

    /// As [`Transport::connect`], in host memory, for one of many connections that all go at the pace of the slowest. It
    /// has this number of flows, from 1 to the setting's. They keep their paths until they fail, unless the settings say
    /// otherwise: such a connection's throughput says nothing about its own paths, and a trial on one would delay all. A
    /// failure is not logged, since the caller may retry.
    ///
    /// # Errors
    /// As [`Transport::connect`].
    pub fn try_connect(
        &self,
        device: usize,
        handle: &Handle,
        label: &str,
        flows: usize,
    ) -> Result<Connecting, Error> {
        let mut context = self.context(device, label)?;
        let mut settings = Settings::clone(&self.settings);
        settings.flows = u16::try_from(flows).unwrap_or(u16::MAX).clamp(1, settings.flows);
        settings.repath = settings.repath.or(Some(false));
        context.settings = Arc::new(settings);
        Connecting::start(self.runtime()?, context, handle, true)
    }

    fn context(&self, device: usize, label: &str) -> Result<Context, Error> {
        let device = self.devices.get(device).ok_or_else(|| {
            Error::argument(format!("no device {device}: there are {}", self.devices.len()))
        })?;
        Ok(Context {
            settings: Arc::clone(&self.settings),
            log: Arc::clone(&self.log),
            device: device.clone(),
            devices: Arc::clone(&self.devices),
            label: label.to_owned(),
            metrics: Arc::clone(&self.metrics),
            memory_types: MemoryTypes::HOST,
            traffic_class: None,
        })
    }

    fn runtime(&self) -> Result<Arc<Runtime>, Error> {
        let mut current = lock(&self.runtime);
        if let Some(runtime) = current.upgrade() {
            return Ok(runtime);
        }
        descriptors::raise_limit(&*self.log);
        let exporter = match &self.settings.metrics[..] {
            [] => None,
            addresses => {
                let metrics: Arc<Metrics> = Arc::clone(&self.metrics);
                match Exporter::start(addresses, metrics) {
                    Ok(exporter) => {
                        let address = exporter.address();
                        self.log.info(&format!("evenkeel: metrics at http://{address}/metrics"));
                        Some(exporter)
                    }
                    Err(error) => {
                        // Training continues without metrics.
                        let line = format!("evenkeel: no metrics: EVENKEEL_METRICS: {error}");
                        self.log.warn(&line);
                        None
                    }
                }
            }
        };
        let runtime = Runtime::start(self.settings.workers, exporter)?;
        *current = Arc::downgrade(&runtime);
        Ok(runtime)
    }
}

fn names(devices: &[Device]) -> String {
    devices.iter().map(Device::name).collect::<Vec<_>>().join(", ")
}
