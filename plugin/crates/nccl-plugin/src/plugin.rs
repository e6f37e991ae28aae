//! What all versions of the table share, in Rust's terms.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use evenkeel_nccl_abi::{HANDLE_SIZE, MAX_REQUESTS};
use evenkeel_transport::{
    Connecting, Device, HANDLE_BYTES, Handle, Listener, Log, MAX_MESSAGE_BYTES, MemoryTypes,
    MrCache, Rail, RecvBuffer, RecvConnection, Request, SendBuffer, SendConnection, Settings,
    Tagged, Transport,
};

use crate::failure::Failure;
use crate::logger::{LOG, SharedLog};

/// Where in NCCL's handle the connecting side notes which attempt it is; zero until there is one.
/// NCCL passes the same buffer to each call of `connect`.
const TICKET: std::ops::Range<usize> = HANDLE_BYTES..HANDLE_BYTES + 8;

const _: () = assert!(TICKET.end <= HANDLE_SIZE);

/// The process's plugin.
static PLUGIN: Mutex<Plugin> = Mutex::new(Plugin { transport: None, global: None, contexts: 0 });

struct Plugin {
    transport: Option<Arc<Transport>>,
    /// The context of tables without contexts (up to v10).
    global: Option<Arc<Context>>,
    /// Contexts of tables with contexts that are not finalized.
    contexts: usize,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Plugin {
    /// The transport, made anew when nothing uses the last one: the environment may have changed.
    fn transport(&mut self) -> Result<Arc<Transport>, Failure> {
        if let Some(transport) = &self.transport
            && (self.contexts > 0 || transport.in_use())
        {
            return Ok(Arc::clone(transport));
        }
        let settings = Settings::from_env()?;
        let status_folder = settings.status_folder().map(Path::to_path_buf);
        let transport = Arc::new(Transport::new(settings, Arc::new(SharedLog))?);
        let devices: Vec<String> = transport
            .devices()
            .iter()
            .map(|device| format!("{} {} Mb/s", device.name(), device.speed()))
            .collect();
        let status =
            format!("version {}, devices: {}", env!("CARGO_PKG_VERSION"), devices.join(", "));
        LOG.info(&format!("evenkeel: {status}"));
        if let Some(folder) = status_folder {
            let file = folder.join(format!("plugin.{}", std::process::id()));
            if let Err(error) = fs::write(&file, status + "\n") {
                // Whoever asked will not hear of it; the job goes on.
                LOG.warn(&format!("evenkeel: EVENKEEL_STATUS_DIR: {}: {error}", file.display()));
            }
        }
        self.transport = Some(Arc::clone(&transport));
        Ok(transport)
    }
}

/// `init` of tables without contexts.
pub(crate) fn init_global() -> Result<(), Failure> {
    let mut plugin = lock(&PLUGIN);
    let transport = plugin.transport()?;
    // What another thread has begun to connect goes on.
    let same = |global: &Arc<Context>| Arc::ptr_eq(&global.transport, &transport);
    if !plugin.global.as_ref().is_some_and(same) {
        plugin.global = Some(Arc::new(Context::new(transport, String::new())));
    }
    Ok(())
}

/// `init` of tables with contexts: one context per communicator.
pub(crate) fn init_context(
    communicator: u64,
    traffic_class: Option<u8>,
) -> Result<Arc<Context>, Failure> {
    let mut plugin = lock(&PLUGIN);
    let transport = plugin.transport()?;
    plugin.contexts += 1;
    let label = format!("comm={communicator:#x}");
    Ok(Arc::new(Context { traffic_class, ..Context::new(transport, label) }))
}

/// The process's transport, for a table that NCCL initializes beside that of the network.
pub(crate) fn transport_for_collectives() -> Result<Arc<Transport>, Failure> {
    let mut plugin = lock(&PLUGIN);
    match &plugin.transport {
        Some(transport) => Ok(Arc::clone(transport)),
        None => plugin.transport(),
    }
}

/// `finalize`: gives back what NCCL has not closed.
pub(crate) fn finalize(context: &Context) {
    context.release();
    let mut plugin = lock(&PLUGIN);
    plugin.contexts = plugin.contexts.saturating_sub(1);
}

/// The context of tables without contexts.
pub(crate) fn global_context() -> Result<Arc<Context>, Failure> {
    let global = lock(&PLUGIN).global.clone();
    global.ok_or_else(|| Failure::contract("called before init"))
}

/// Number of devices.
pub(crate) fn device_count() -> Result<usize, Failure> {
    Ok(current_transport()?.devices().len())
}

/// What all versions of the properties have in common.
pub(crate) struct DeviceProperties {
    pub(crate) name: &'static CStr,
    pub(crate) pci_path: Option<&'static CStr>,
    pub(crate) index: usize,
    /// What devices of one card have in common, and others not.
    pub(crate) guid: u64,
    /// Mb/s.
    pub(crate) speed: i32,
    /// Number of the RDMA port, counted from 1; 0 where it is none.
    pub(crate) port: i32,
    /// The memory in which messages may be.
    pub(crate) reach: MemoryTypes,
    /// Where it belongs, if that is known.
    pub(crate) rail: Option<Rail>,
}

/// The properties of a device.
pub(crate) fn device_properties(index: usize) -> Result<DeviceProperties, Failure> {
    let transport = current_transport()?;
    let device = transport
        .devices()
        .get(index)
        .ok_or_else(|| Failure::argument(format!("no device {index}")))?;
    Ok(DeviceProperties {
        name: intern(device.name()),
        pci_path: device.pci_path().map(intern),
        index,
        guid: device.guid().unwrap_or(index as u64),
        speed: i32::try_from(device.speed()).unwrap_or(i32::MAX),
        port: device.port().into(),
        reach: device.reach(),
        rail: transport.rail(index),
    })
}

fn current_transport() -> Result<Arc<Transport>, Failure> {
    let transport = lock(&PLUGIN).transport.clone();
    transport.ok_or_else(|| Failure::contract("called before init"))
}

/// A C string that lives as long as the process. NCCL keeps names for ever, so they are never
/// freed; equal names share one string, so that they don't add up.
fn intern(text: &str) -> &'static CStr {
    static NAMES: Mutex<Vec<&'static CStr>> = Mutex::new(Vec::new());
    let mut names = lock(&NAMES);
    if let Some(known) = names.iter().find(|name| name.to_bytes() == text.as_bytes()) {
        return known;
    }
    let name: &'static CStr = Box::leak(CString::new(text).unwrap_or_default().into_boxed_c_str());
    names.push(name);
    name
}

/// What one communicator has opened.
pub(crate) struct Context {
    transport: Arc<Transport>,
    /// For log lines.
    label: String,
    /// What the communicator's packets are to be marked with.
    traffic_class: Option<u8>,
    attempts: Mutex<HashMap<u64, Connecting>>,
    listeners: Mutex<Vec<Weak<ListenComm>>>,
    next_ticket: AtomicU64,
}

impl Context {
    fn new(transport: Arc<Transport>, label: String) -> Self {
        Self {
            transport,
            label,
            traffic_class: None,
            attempts: Mutex::default(),
            listeners: Mutex::default(),
            next_ticket: AtomicU64::new(1),
        }
    }

    /// Opens a listener and writes its handle.
    pub(crate) fn listen(
        &self,
        device: usize,
        handle: &mut [u8; HANDLE_SIZE],
    ) -> Result<Arc<ListenComm>, Failure> {
        let listener = self.transport.listen(device, &self.label, self.reach(device))?;
        handle.fill(0);
        handle[..HANDLE_BYTES].copy_from_slice(&listener.handle().encode());
        let comm = Arc::new(ListenComm { listener: Mutex::new(Some(listener)) });
        let mut listeners = lock(&self.listeners);
        listeners.retain(|other| other.strong_count() > 0);
        listeners.push(Arc::downgrade(&comm));
        Ok(comm)
    }

    /// Begins to connect, or looks how far it is. Who calls may know the traffic class where the context does not.
    pub(crate) fn connect(
        &self,
        device: usize,
        handle: &mut [u8; HANDLE_SIZE],
        traffic_class: Option<u8>,
    ) -> Result<Option<Comm<SendConnection>>, Failure> {
        let mut ticket = [0; 8];
        ticket.copy_from_slice(&handle[TICKET]);
        let mut ticket = u64::from_le_bytes(ticket);
        if ticket == 0 {
            let mut encoded = [0; HANDLE_BYTES];
            encoded.copy_from_slice(&handle[..HANDLE_BYTES]);
            let peer = Handle::decode(&encoded)
                .map_err(|error| Failure::argument(format!("bad handle: {error}")))?;
            let reach = self.reach(device);
            let (label, class) = (&self.label, traffic_class.or(self.traffic_class));
            let attempt = self.transport.connect_in_class(device, &peer, label, reach, class)?;
            ticket = self.next_ticket.fetch_add(1, Ordering::Relaxed);
            handle[TICKET].copy_from_slice(&ticket.to_le_bytes());
            lock(&self.attempts).insert(ticket, attempt);
        }
        let mut attempts = lock(&self.attempts);
        let attempt = attempts
            .get(&ticket)
            .ok_or_else(|| Failure::contract("the attempt to connect is over"))?;
        let outcome = attempt.poll();
        let over = match outcome {
            Ok(None) => return Ok(None),
            Ok(Some(_)) | Err(_) => attempts.remove(&ticket),
        };
        drop(attempts);
        drop(over);
        Ok(outcome?.map(|connection| Comm::new(connection.registrar(), connection)))
    }

    /// The memory that NCCL was told a device takes. It registers it later, so that connections have to be made for it.
    fn reach(&self, device: usize) -> MemoryTypes {
        self.transport.devices().get(device).map_or(MemoryTypes::HOST, Device::reach)
    }

    fn release(&self) {
        let attempts = std::mem::take(&mut *lock(&self.attempts));
        drop(attempts);
        for listener in std::mem::take(&mut *lock(&self.listeners)) {
            if let Some(listener) = listener.upgrade() {
                listener.close();
            }
        }
    }
}

/// NCCL's listen comm.
pub(crate) struct ListenComm {
    /// `None` once closed.
    listener: Mutex<Option<Listener>>,
}

impl ListenComm {
    /// The next connection, if there is one.
    pub(crate) fn accept(&self) -> Result<Option<Comm<RecvConnection>>, Failure> {
        let listener = lock(&self.listener);
        let listener =
            listener.as_ref().ok_or_else(|| Failure::contract("the listener is closed"))?;
        let accepted = listener.poll_accept()?;
        Ok(accepted.map(|connection| Comm::new(connection.registrar(), connection)))
    }

    /// Closes the socket.
    pub(crate) fn close(&self) {
        let listener = lock(&self.listener).take();
        drop(listener);
    }
}

/// NCCL's send or receive comm.
#[repr(C)]
pub(crate) struct Comm<C> {
    /// First, because NCCL registers memory with comms of all kinds by one function.
    registrar: MrCache,
    connection: C,
    /// What NCCL's request pointers point to.
    slots: [Slot; MAX_REQUESTS],
    /// Where to look for a free slot first.
    next: AtomicUsize,
}

/// A place for one request.
#[derive(Default)]
pub(crate) struct Slot(Mutex<Option<Request>>);

impl Comm<SendConnection> {
    /// Begins to send; `None` when as many requests as possible are outstanding, or it is another tag's turn.
    pub(crate) fn send(&self, buffer: SendBuffer, tag: i32) -> Result<Option<&Slot>, Failure> {
        // NCCL tests each request until it is done.
        self.begin(|connection| Ok(connection.send_tagged(buffer, tag)?))
    }
}

impl Comm<RecvConnection> {
    /// Posts a group of buffers; `None` when as many requests as possible are outstanding.
    pub(crate) fn recv(&self, group: &[Tagged]) -> Result<Option<&Slot>, Failure> {
        self.begin(|connection| Ok(connection.recv_group(group)?))
    }

    /// Begins to make what has come visible in the memory where it is.
    pub(crate) fn flush(&self, message: RecvBuffer) -> Result<&Slot, Failure> {
        self.begin(|connection| Ok(Some(connection.flush(message)?)))?
            .ok_or_else(|| Failure::contract("too many requests to flush another one"))
    }
}

impl<C> Comm<C> {
    fn new(registrar: MrCache, connection: C) -> Self {
        Self { registrar, connection, slots: Default::default(), next: AtomicUsize::new(0) }
    }

    fn begin(
        &self,
        start: impl FnOnce(&C) -> Result<Option<Request>, Failure>,
    ) -> Result<Option<&Slot>, Failure> {
        let first = self.next.load(Ordering::Relaxed);
        for index in (0..MAX_REQUESTS).map(|step| (first + step) % MAX_REQUESTS) {
            let slot = &self.slots[index];
            let mut request = lock(&slot.0);
            if request.is_none() {
                *request = start(&self.connection)?;
                self.next.store(index + 1, Ordering::Relaxed);
                return Ok(request.is_some().then_some(slot));
            }
        }
        Ok(None)
    }
}

impl Slot {
    /// The request once it is done, which frees the slot.
    pub(crate) fn test(&self) -> Result<Option<Request>, Failure> {
        let mut request = lock(&self.0);
        let done = request
            .as_ref()
            .ok_or_else(|| Failure::contract("test of a finished request"))?
            .test()?;
        Ok(done.and_then(|_| request.take()))
    }
}

/// `maxP2pBytes` and `maxCollBytes`.
pub(crate) const MAX_BYTES: usize = MAX_MESSAGE_BYTES as usize;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_names_share_one_string() {
        assert_eq!(intern("eth0").as_ptr(), intern("eth0").as_ptr());
        assert_eq!(intern("eth1"), c"eth1");
    }
}
