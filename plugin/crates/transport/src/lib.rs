//! Devices, and connections between peers over TCP or RDMA.
//!
//! A [`Transport`] knows the devices of this host. [`Transport::listen`] returns a [`Listener`],
//! whose [`Handle`] the peer passes to [`Transport::connect`]. Both sides are polled and never
//! block. The connecting side gets a [`SendConnection`], the listener a [`RecvConnection`]:
//! messages go one way. Each request is polled by [`Request::test`], but makes progress without it.
//! A few worker threads, shared by all connections of the process, move the bytes. They start with
//! the first listener or connection and stop with the last.
//!
//! The peers agree on TCP or RDMA when a connection is opened, and callers need not know: TCP uses
//! several flows, RDMA several queue pairs between the ports of both.
//!
//! A failure of a connection is reported by all its requests and by one log line. Errors of a call
//! itself are left to the caller to log: [`Error::is_logged`] tells them apart.

mod connection;
mod context;
mod device;
mod error;
mod handshake;
mod memory;
mod rdma;
mod runtime;
mod selection;
pub mod settings;
mod stream;
pub mod sync;
mod sys;
mod tcp;
mod telemetry;
#[cfg(test)]
mod test_support;
mod watch;
pub mod weak;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, OnceLock, Weak};

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
pub use sys::{Owner, keep_from_children, random};
pub use telemetry::chunk_events;
pub use telemetry::exporter::{Exporter, Page, Pages};
pub use telemetry::log::{Log, NullLog, StderrLog};
pub use telemetry::report;

use context::Context;
use handshake::listen::ListenMode;
use runtime::descriptors;
use runtime::reactor::Runtime;
use sync::lock;
use telemetry::metrics::Metrics;
use watch::{Watch, WatchContext};

/// How a connection is opened.
#[derive(Clone, Copy, Debug, Default)]
pub struct ConnectOptions {
    /// Traffic class of its RDMA packets, unless the settings set another one.
    pub traffic_class: Option<u8>,
    /// It begins with one TCP flow, whatever the setting: it is one of very many at a time. More
    /// are opened where they carry more.
    pub one_flow: bool,
}

/// Maximum number of devices that are made of several. NCCL has as many at most.
const MAX_FUSED: usize = 32;

/// A device that was made of several.
struct FusedDevice {
    device: Device,
    /// The numbers of those that it was made of.
    members: Vec<usize>,
}

/// The network, as this process uses it.
pub struct Transport {
    settings: Arc<Settings>,
    log: Arc<dyn Log>,
    devices: Arc<[Device]>,
    /// Devices that were made of several, in the order in which they were made.
    fused: [OnceLock<FusedDevice>; MAX_FUSED],
    /// Held while one is made.
    fusing: Mutex<()>,
    metrics: Arc<Metrics>,
    /// Alive as long as a listener, a connection or an attempt to connect is.
    runtime: Mutex<Weak<Runtime>>,
}

impl Transport {
    /// Discovers devices, and waits up to five seconds where those that are needed have no carrier.
    /// Starts nothing.
    ///
    /// # Errors
    /// [`ErrorKind::System`] when the interfaces cannot be listed, [`ErrorKind::Config`] when none
    /// may be used.
    pub fn new(settings: Settings, log: Arc<dyn Log>) -> Result<Self, Error> {
        Self::with_memory(settings, None, log)
    }

    /// As [`Transport::new`], for messages in host memory only, whatever the devices support. Logs
    /// the reason if a device supports GPU memory.
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
        if settings.kernel_tls_missing {
            log.warn(
                "evenkeel: EVENKEEL_KTLS=on: the kernel has no TLS 1.3, so the processes encrypt themselves: run modprobe tls on the host, with Linux 5.10 or later",
            );
        }
        if settings.rdma_left_out && device::host_has_rdma() {
            log.warn(
                "evenkeel: RDMA is not used: it cannot be encrypted, and EVENKEEL_ENCRYPTION=required (EVENKEEL_RDMA_NETWORK)",
            );
        }
        let devices = device::discover(&settings, host_memory_only, &log)?;
        let adapters: Vec<_> = devices.iter().flat_map(Device::ports).cloned().collect();
        if let Some(line) = settings.unused_line(!adapters.is_empty()) {
            log.warn(&line);
        }
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
            fused: [const { OnceLock::new() }; MAX_FUSED],
            fusing: Mutex::default(),
            metrics: Arc::new(Metrics::new(adapters, is_encrypted)),
            runtime: Mutex::new(Weak::new()),
        })
    }

    /// The devices of the host, in a stable order. Never empty. [`Transport::fuse`] makes more.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Makes one device of several, whose flows or queue pairs share its messages, as with
    /// `EVENKEEL_DEVICES=joined`. Returns its number, which comes after those of the host's
    /// devices. The same devices again give the same number.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] for unknown devices, [`ErrorKind::Config`] for those that cannot be
    /// one.
    pub fn fuse(&self, members: &[usize]) -> Result<usize, Error> {
        let _fusing = lock(&self.fusing);
        let known = |index: &usize| self.devices.get(*index).ok_or_else(|| self.no_device(*index));
        let devices = members.iter().map(known).collect::<Result<Vec<_>, _>>()?;
        let device = device::fuse(&devices)?;
        for (at, place) in self.fused.iter().enumerate() {
            let number = self.devices.len() + at;
            let made = place.get_or_init(|| {
                let (name, speed) = (device.name(), device.speed());
                self.log.info(&format!("evenkeel: device {number}: {name} {speed} Mb/s"));
                FusedDevice { device: device.clone(), members: members.to_vec() }
            });
            if made.members == members {
                return Ok(number);
            }
        }
        let what = format!("{MAX_FUSED} devices of several are the most");
        Err(Error::new(ErrorKind::Config, what))
    }

    /// A device of the host, or one that was made of several.
    pub fn device(&self, index: usize) -> Option<&Device> {
        let Some(at) = index.checked_sub(self.devices.len()) else {
            return self.devices.get(index);
        };
        Some(&self.fused.get(at)?.get()?.device)
    }

    /// The number of all devices, also those that were made of several.
    pub fn device_count(&self) -> usize {
        let made = self.fused.iter().take_while(|place| place.get().is_some()).count();
        self.devices.len() + made
    }

    /// The numbers of the host's devices that a device is made of: its own, if it is one of them.
    pub fn members(&self, index: usize) -> Vec<usize> {
        let at = index.checked_sub(self.devices.len());
        let fused = at.and_then(|at| self.fused.get(at)?.get());
        fused.map_or_else(|| vec![index], |fused| fused.members.clone())
    }

    fn no_device(&self, index: usize) -> Error {
        Error::argument(format!("no device {index}: there are {}", self.device_count()))
    }

    /// Whether a listener, a connection or an attempt to connect exists.
    pub fn in_use(&self) -> bool {
        lock(&self.runtime).strong_count() > 0
    }

    /// Opens a listener on a device. `label` goes into the log lines of its connections. Messages
    /// are in memory of these types: the host's, or [`Device::memory_types`].
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] for an unknown device, [`ErrorKind::System`] when the socket cannot
    /// be opened.
    pub fn listen(
        &self,
        device: usize,
        label: &str,
        memory_types: MemoryTypes,
    ) -> Result<Listener, Error> {
        let context = Context { memory_types, ..self.context(device, label)? };
        Listener::open(self.runtime()?, context, ListenMode::Private)
    }

    /// Opens a listener at an address and with a nonce that peers know. It never times out, and
    /// notifies its owner of connections. `label` goes into the log lines of its connections.
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
        self.settings.rails.of(self.device(device)?.name())
    }

    /// The cache that registers memory for messages over a device.
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] for an unknown device.
    pub fn mr_cache(&self, device: usize) -> Result<MrCache, Error> {
        let device = self.context(device, "")?.device;
        Ok(MrCache::new(&device, std::iter::empty(), MemoryTypes::HOST))
    }

    /// Starts to connect to a listener from a device. `label` goes into the log lines of the
    /// connection. Messages are in memory of these types, as for [`Transport::listen`].
    ///
    /// # Errors
    /// [`ErrorKind::Argument`] for an unknown device, [`ErrorKind::System`] when a socket cannot be
    /// opened.
    pub fn connect(
        &self,
        device: usize,
        handle: &Handle,
        label: &str,
        memory_types: MemoryTypes,
    ) -> Result<Connecting, Error> {
        self.connect_with(device, handle, label, memory_types, ConnectOptions::default())
    }

    /// As [`Transport::connect`], with options.
    ///
    /// # Errors
    /// As [`Transport::connect`].
    pub fn connect_with(
        &self,
        device: usize,
        handle: &Handle,
        label: &str,
        memory_types: MemoryTypes,
        options: ConnectOptions,
    ) -> Result<Connecting, Error> {
        let ConnectOptions { traffic_class, one_flow } = options;
        let mut context = Context { memory_types, traffic_class, ..self.context(device, label)? };
        // Static shares are for comparison with transports that keep their number of flows.
        if one_flow && !self.settings.is_static() {
            let mut settings = Settings::clone(&self.settings);
            settings.flows = 1;
            context.settings = Arc::new(settings);
        }
        Connecting::start(self.runtime()?, context, handle, false)
    }

    /// As [`Transport::connect`], in host memory, for one of many connections that all go at the
    /// pace of the slowest. It has this number of flows, from 1 to the setting's. They keep their
    /// paths until they fail, unless the settings say otherwise: such a connection's throughput
    /// says nothing about its own paths, and a trial on one would delay all. A failure is not
    /// logged, since the caller may retry.
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
        let device = self.device(device).ok_or_else(|| self.no_device(device))?;
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
        let watch = self.start_watch();
        let runtime = Runtime::start(self.settings.workers, exporter, watch)?;
        *current = Arc::downgrade(&runtime);
        Ok(runtime)
    }
}

impl Transport {
    /// Starts to watch what the job waits for, unless the settings say not to.
    fn start_watch(&self) -> Option<Watch> {
        if !self.settings.watch {
            return None;
        }
        let started = Watch::start(WatchContext {
            settings: Arc::clone(&self.settings),
            devices: Arc::clone(&self.devices),
            metrics: Arc::clone(&self.metrics),
            log: Arc::clone(&self.log),
        });
        if let Err(error) = &started {
            // Training continues without.
            self.log.warn(&format!("evenkeel: nobody watches what the job waits for: {error}"));
        }
        started.ok()
    }
}

fn names(devices: &[Device]) -> String {
    devices.iter().map(Device::name).collect::<Vec<_>>().join(", ")
}
