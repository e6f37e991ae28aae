//! Options that the commands share: which network, and which rank of how many this is.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use clap::{Args, ValueEnum};
use sha2::{Digest, Sha256};

use crate::cli;
use crate::element::{Op, Type};
use crate::error::Result;
use crate::output::record::Network;
use crate::plugin_host::{Plugin, VERSIONS};
use crate::ranks::bootstrap::RankConfig;
use crate::ranks::child::{end_with, this_program};

/// Which plugin to load and how.
#[derive(Args, Clone, Debug)]
pub(crate) struct NetworkOptions {
    /// The plugin: a path, a file name, or the NAME of libnccl-net-NAME.so
    #[arg(long, env = "NCCL_NET_PLUGIN", value_name = "PLUGIN")]
    pub(crate) plugin: Option<String>,
    /// Use this version of ncclNet, 6 to 12, and no other [default: the newest the plugin has]
    #[arg(long, value_parser = clap::value_parser!(u32).range(i64::from(VERSIONS[6])..=i64::from(VERSIONS[0])), value_name = "VERSION")]
    pub(crate) api: Option<u32>,
    /// What carries messages, for Evenkeel's plugin: sets EVENKEEL_TRANSPORT
    #[arg(long, value_enum, value_name = "TRANSPORT")]
    pub(crate) transport: Option<Carrier>,
    /// Index of the plugin's device
    #[arg(long, default_value_t = 0, value_name = "INDEX")]
    pub(crate) device: usize,
}

/// What can carry messages.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Carrier {
    /// RDMA between peers that both have it, else TCP
    Auto,
    /// TCP
    Tcp,
    /// RDMA
    Rdma,
}

/// What the plugin reads to know.
const TRANSPORT: &str = "EVENKEEL_TRANSPORT";

impl NetworkOptions {
    /// Sees to it that this process's environment, and that of those it starts, is what was asked
    /// for: begins the program anew with another one.
    ///
    /// # Errors
    /// When it cannot begin anew.
    pub(crate) fn settle(&self) -> Result<()> {
        let Some(wanted) = self.transport.as_ref().map(cli::name) else { return Ok(()) };
        if std::env::var(TRANSPORT).is_ok_and(|value| value == wanted) {
            return Ok(());
        }
        let mut again = Command::new(this_program()?);
        let error = again.args(std::env::args_os().skip(1)).env(TRANSPORT, &wanted).exec();
        Err(format!("cannot begin anew with {TRANSPORT}={wanted}: {error}"))
    }

    /// Loads the plugin and says what it is.
    ///
    /// # Errors
    /// Says what is wrong with the plugin or which devices there are.
    pub(crate) fn open(&self) -> Result<(Plugin, Network)> {
        let plugin = Plugin::load(self.plugin.as_deref(), self.api)?;
        let devices = plugin.devices()?;
        let Some(device) = devices.get(self.device) else {
            return Err(format!(
                "{} has {} devices, --device {} is none of them; NCCL_SOCKET_IFNAME may hide interfaces",
                plugin.name(),
                devices.len(),
                self.device
            ));
        };
        let network = Network {
            name: plugin.name().to_owned(),
            version: plugin.version(),
            library: plugin.path().display().to_string(),
            sha256: digest(plugin.path().to_path_buf())?,
            device: device.name.clone(),
            speed_mbps: device.speed,
            devices: devices.len(),
            transport: None,
        };
        Ok((plugin, network))
    }
}

fn digest(path: PathBuf) -> Result<String> {
    let bytes = std::fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(Sha256::digest(bytes).iter().take(6).map(|byte| format!("{byte:02x}")).collect())
}

/// How often, and of what.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct RunOptions {
    /// Timed operations, of each size if there are several
    #[arg(short = 'n', long = "iters", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..), value_name = "N")]
    pub(crate) iterations: u32,
    /// Operations before those
    #[arg(short = 'w', long = "warmup_iters", default_value_t = 2, value_name = "N")]
    pub(crate) warmup: u32,
    /// Check every element of this many operations; 0: none
    #[arg(short = 'c', long = "check", default_value_t = 1, value_name = "N")]
    pub(crate) check: u32,
    /// Element type
    #[arg(short = 'd', long = "datatype", value_enum, default_value_t = Type::Float32, value_name = "TYPE")]
    pub(crate) kind: Type,
    /// Reduction
    #[arg(short = 'o', long = "op", value_enum, default_value_t = Op::Sum, value_name = "OP")]
    pub(crate) op: Op,
}

/// Which rank this is.
#[derive(Args, Clone, Debug)]
pub(crate) struct RankOptions {
    /// This process's rank, from 0 [else: OpenMPI's, else the completion index of an Indexed Job]
    #[arg(long, env = "RANK", value_name = "N")]
    pub(crate) rank: Option<usize>,
    /// The number of ranks [else: OpenMPI's]
    #[arg(long, env = "WORLD_SIZE", value_name = "N")]
    pub(crate) world_size: Option<usize>,
    /// Name or address of rank 0
    #[arg(long, env = "MASTER_ADDR", value_name = "HOST")]
    pub(crate) master_addr: Option<String>,
    /// Port of rank 0
    #[arg(long, env = "MASTER_PORT", value_name = "PORT")]
    pub(crate) master_port: Option<u16>,
    /// Start this many ranks on this machine
    #[arg(long, alias = "ranks", value_name = "N", conflicts_with_all = ["rank", "world_size", "master_addr", "master_port"])]
    pub(crate) spawn: Option<usize>,
    /// Seconds to wait for the other ranks to come, and later for any progress
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86_400), value_name = "SECONDS")]
    pub(crate) timeout: u64,
    /// The process that started this rank with --spawn; rank 0 has its listener as standard input
    #[arg(long, hide = true)]
    pub(crate) spawned_by: Option<i32>,
}

impl RankOptions {
    /// Which rank this is, checked.
    ///
    /// # Errors
    /// Says which of the four facts is missing or makes no sense.
    pub(crate) fn rank_config(&self) -> Result<RankConfig> {
        let missing = |what: &str, variable: &str| {
            format!("{what} is not known: set {variable}, or start all ranks here with --spawn N")
        };
        let variable = |name: &str| std::env::var(name).ok();
        let world = first(self.world_size, &["OMPI_COMM_WORLD_SIZE"], variable)?
            .ok_or_else(|| missing("the number of ranks", "WORLD_SIZE"))?;
        let rank = first(self.rank, &["OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX"], variable)?
            .ok_or_else(|| missing("this rank", "RANK"))?;
        if rank >= world {
            return Err(format!("rank {rank} is not below the world size, {world}"));
        }
        let host = self.master_addr.as_deref();
        let host = host.ok_or_else(|| missing("rank 0's address", "MASTER_ADDR"))?;
        // An IPv6 address may come in brackets, as before a port.
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let host = bare.unwrap_or(host).to_owned();
        let port = self.master_port.ok_or_else(|| missing("rank 0's port", "MASTER_PORT"))?;
        let mut listener = None;
        if let Some(parent) = self.spawned_by {
            end_with(parent)?;
            if rank == 0 {
                let input = std::io::stdin().as_fd().try_clone_to_owned();
                let input =
                    input.map_err(|error| format!("the listener as standard input: {error}"))?;
                listener = Some(TcpListener::from(input));
            }
        }
        let timeout = Duration::from_secs(self.timeout);
        Ok(RankConfig { rank, world_size: world, host, port, listener, timeout })
    }
}

/// What was given, else the first of the variables that is set: mpirun and Kubernetes' Indexed Jobs
/// say it in their own.
fn first(
    given: Option<usize>,
    names: &[&str],
    variable: impl Fn(&str) -> Option<String>,
) -> Result<Option<usize>> {
    if given.is_some() {
        return Ok(given);
    }
    for name in names {
        if let Some(value) = variable(name) {
            let number = value.parse().map_err(|_| format!("{name}={value}: not a number"))?;
            return Ok(Some(number));
        }
    }
    Ok(None)
}

/// A listener on loopback, over IPv6 where this machine has no other, and its address.
pub(crate) fn local_listener() -> Result<(TcpListener, SocketAddr)> {
    let both: [SocketAddr; 2] = [(Ipv4Addr::LOCALHOST, 0).into(), (Ipv6Addr::LOCALHOST, 0).into()];
    let bound = TcpListener::bind(&both[..])
        .and_then(|listener| listener.local_addr().map(|address| (listener, address)));
    bound.map_err(|error| format!("cannot listen on loopback: {error}"))
}

/// `host:port`, with an IPv6 address in brackets.
pub(crate) fn host_and_port(host: &str, port: u16) -> String {
    match host.contains(':') && !host.starts_with('[') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_from_flag_then_openmpi_then_job_index() {
        const RANK: [&str; 2] = ["OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX"];
        let index = |name: &str| (name == "JOB_COMPLETION_INDEX").then(|| "7".to_owned());
        let both = |name: &str| Some(if name.starts_with("OMPI") { "3" } else { "7" }.to_owned());
        assert_eq!(first(None, &RANK, index), Ok(Some(7)));
        assert_eq!(first(None, &RANK, both), Ok(Some(3)));
        assert_eq!(first(Some(0), &RANK, both), Ok(Some(0)));
        assert_eq!(first(None, &RANK, |_| None), Ok(None));
        let wrong = first(None, &RANK, |_| Some("many".to_owned()));
        assert_eq!(wrong, Err("OMPI_COMM_WORLD_RANK=many: not a number".to_owned()));
    }
}
