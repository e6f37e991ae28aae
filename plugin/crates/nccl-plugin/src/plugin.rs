//! The process's plugin: one transport, and the contexts that use it.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use evenkeel_protocol::PROTOCOL_VERSION;
use evenkeel_transport::report::{Outcome, report};
use evenkeel_transport::sync::lock;
use evenkeel_transport::{Log, Settings, Transport};

use crate::error::PluginError;
use crate::logger::{LOG, SharedLog};
use crate::net::context::Context;

/// The reason, in log lines, why devices of a job with reduction servers support host memory only. NCCL reads a device's
/// memory types before it connects, and uses the device for both.
const HOST_MEMORY_ONLY: &str =
    "reduction servers use host memory, unless EVENKEEL_REDUCTION_SERVERS is unset";

/// The process's plugin.
static PLUGIN: Mutex<Plugin> = Mutex::new(Plugin {
    transport: None,
    reduction: None,
    global: None,
    contexts: 0,
    finalized: Vec::new(),
});

struct Plugin {
    transport: Option<Arc<Transport>>,
    /// The settings of reduction servers, read with those of the transport.
    reduction: Option<Arc<evenkeel_reduction::Settings>>,
    /// The context of tables without contexts (up to v10).
    global: Option<Arc<Context>>,
    /// Contexts of tables with contexts that are not finalized.
    contexts: usize,
    /// Contexts that are finalized and may still be used.
    finalized: Vec<Arc<Context>>,
}

impl Plugin {
    /// The transport. A new one is made when nothing uses the last one, since the environment may have changed. NCCL turns to
    /// another network where there is none, so the reason is reported.
    fn transport(&mut self) -> Result<Arc<Transport>, PluginError> {
        let transport = self.current_transport();
        if let Err(error) = &transport {
            report(Outcome::Failed, error.reason());
        }
        transport
    }

    fn current_transport(&mut self) -> Result<Arc<Transport>, PluginError> {
        if let Some(transport) = &self.transport
            && (self.contexts > 0 || transport.in_use())
        {
            return Ok(Arc::clone(transport));
        }
        let settings = Settings::from_env()?;
        let reduction = evenkeel_reduction::Settings::from_env()?;
        // The tuner reads them for each communicator. A value that it would refuse is reported here, where it can be.
        evenkeel_tuner::Settings::from_env()?;
        let status_folder = settings.status_folder().map(Path::to_path_buf);
        let encryption = settings.encryption_status();
        let transport = Arc::new(if reduction.servers.is_empty() {
            Transport::new(settings, Arc::new(SharedLog))?
        } else {
            Transport::with_host_memory_only(settings, HOST_MEMORY_ONLY, Arc::new(SharedLog))?
        });
        let devices: Vec<String> = transport
            .devices()
            .iter()
            .map(|device| format!("{} {} Mb/s", device.name(), device.speed()))
            .collect();
        let status = format!(
            "version {}, protocol {PROTOCOL_VERSION}, {encryption}, devices: {}",
            env!("CARGO_PKG_VERSION"),
            devices.join(", ")
        );
        LOG.info(&format!("evenkeel: {status}"));
        report(Outcome::Loaded, &status);
        if let Some(folder) = status_folder {
            let file = folder.join(format!("plugin.{}", std::process::id()));
            if let Err(error) = fs::write(&file, status + "\n") {
                // The file will be missing, but the job can run without it.
                LOG.warn(&format!("evenkeel: EVENKEEL_STATUS_DIR: {}: {error}", file.display()));
            }
        }
        self.transport = Some(Arc::clone(&transport));
        self.reduction = Some(Arc::new(reduction));
        Ok(transport)
    }
}

/// `init` of tables without contexts.
pub(crate) fn init_global() -> Result<(), PluginError> {
    let mut plugin = lock(&PLUGIN);
    let transport = plugin.transport()?;
    // A context that is in use is kept, with the attempts of other threads.
    if !plugin.global.as_ref().is_some_and(|global| global.uses(&transport)) {
        plugin.global = Some(Arc::new(Context::new(transport, String::new(), None)));
    }
    Ok(())
}

/// `init` of tables with contexts: one context per communicator.
pub(crate) fn init_context(
    communicator: u64,
    traffic_class: Option<u8>,
) -> Result<Arc<Context>, PluginError> {
    let mut plugin = lock(&PLUGIN);
    let transport = plugin.transport()?;
    plugin.contexts += 1;
    let label = format!("comm={communicator:#x}");
    Ok(Arc::new(Context::new(transport, label, traffic_class)))
}

/// The process's transport for CollNet, made if the network's table is not initialized yet, and the settings of reduction
/// servers.
pub(crate) fn transport_for_collnet()
-> Result<(Arc<Transport>, Arc<evenkeel_reduction::Settings>), PluginError> {
    let mut plugin = lock(&PLUGIN);
    let transport = match &plugin.transport {
        Some(transport) => Arc::clone(transport),
        None => plugin.transport()?,
    };
    let reduction = plugin.reduction.clone();
    let reduction = reduction.ok_or_else(|| PluginError::internal("called before init"))?;
    Ok((transport, reduction))
}

/// `finalize`: releases what NCCL has not closed.
pub(crate) fn finalize(context: &Context) {
    context.release();
    let mut plugin = lock(&PLUGIN);
    plugin.contexts = plugin.contexts.saturating_sub(1);
}

/// `finalize` of a context that may still be used until there is no other one: it is released with the last one.
pub(crate) fn finalize_with_last(context: Arc<Context>) {
    let unused = {
        let mut plugin = lock(&PLUGIN);
        plugin.contexts = plugin.contexts.saturating_sub(1);
        plugin.finalized.push(context);
        if plugin.contexts > 0 {
            return;
        }
        std::mem::take(&mut plugin.finalized)
    };
    unused.iter().for_each(|context| context.release());
}

/// The context of tables without contexts.
pub(crate) fn global_context() -> Result<Arc<Context>, PluginError> {
    let global = lock(&PLUGIN).global.clone();
    global.ok_or_else(|| PluginError::internal("called before init"))
}

/// The process's transport, once there is one.
pub(crate) fn transport() -> Result<Arc<Transport>, PluginError> {
    let transport = lock(&PLUGIN).transport.clone();
    transport.ok_or_else(|| PluginError::internal("called before init"))
}
