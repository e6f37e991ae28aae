//! The kinds of transport between the ranks of a group, by name too, and which ranks share a host.

use std::sync::{Mutex, Once};

use evenkeel_transport::sync::lock;
use evenkeel_transport::{Log, StderrLog};

use crate::codec::digest;
use crate::error::{Error, Result};
use crate::links::hierarchical::HierarchicalEndpoint;
use crate::links::link::Endpoint;
use crate::links::shm::ShmEndpoint;
use crate::links::tcp::Tcp;
use crate::links::tls::Tls;

/// Names the boot of the kernel, and so the machine (random(4)).
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// The networks that groups of this process share, by interface. A network inherited from a process that forked this one has no
/// threads here, so each entry has the process's number.
static NETWORKS: Mutex<Vec<(u32, Option<String>, Tcp)>> = Mutex::new(vec![]);

/// How the ranks of a group reach each other; the same for all ranks.
#[derive(Clone)]
pub enum TransportKind {
    /// TCP.
    Tcp(Tcp),
    /// TCP with TLS; ranks authenticate by certificate.
    Tls(Tls),
    /// Shared memory: all ranks are on one host.
    SharedMemory,
    /// Shared memory between ranks of the same host, TCP between hosts.
    Auto(Auto),
}

/// Shared memory within a host and TCP between hosts.
///
/// Processes are on the same host when they have the same kernel, network namespace and user. Containers that cannot share
/// memory count as separate hosts. Where the system does not say which kernel and network it is, as some sandboxes, TCP carries
/// all between processes, and a line to standard error says so.
#[derive(Clone)]
pub struct Auto {
    pub(crate) tcp: Tcp,
    host: Option<String>,
}

impl Auto {
    /// Reaches ranks of other hosts over this network.
    pub fn new(tcp: Tcp) -> Self {
        Self { tcp, host: None }
    }

    /// Treats ranks with the same host name, and no others, as ranks of the same host.
    pub fn on_host(self, name: &str) -> Self {
        Self { host: Some(name.to_owned()), ..self }
    }

    /// The interface of the network, such as `eth0`.
    pub fn device(&self) -> &str {
        self.tcp.device()
    }
}

impl TransportKind {
    /// Opens this rank's endpoint.
    pub(crate) fn open(&self) -> Result<Box<dyn Endpoint>> {
        match self {
            Self::Tcp(tcp) => tcp.endpoint(None),
            Self::Tls(tls) => tls.endpoint(),
            Self::SharedMemory => {
                Ok(Box::new(ShmEndpoint::open(&self.host_id()?.to_le_bytes(), None)?))
            }
            Self::Auto(auto) => {
                Ok(Box::new(HierarchicalEndpoint::open(&auto.tcp, self.host_id()?)?))
            }
        }
    }

    /// The number of the transport in the rank info. Ranks with different numbers cannot communicate.
    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Tcp(_) => 1,
            Self::SharedMemory => 2,
            Self::Tls(_) => 3,
            Self::Auto(_) => 4,
        }
    }

    /// A number that is the same on all ranks of one host, and different on other hosts. Where the system does not tell hosts
    /// apart, each process counts as a host, and TCP carries all between processes.
    pub(crate) fn host_id(&self) -> Result<u64> {
        if let Self::Auto(Auto { host: Some(name), .. }) = self {
            return Ok(digest(name.as_bytes()));
        }
        match (self, known_host_id()) {
            (_, Ok(id)) => Ok(id),
            (Self::SharedMemory, Err(error)) => Err(error),
            (Self::Auto(_), Err(error)) => {
                static WARNED: Once = Once::new();
                WARNED.call_once(|| {
                    StderrLog.warn(&format!(
                        "evenkeel: TCP carries all, also between ranks of one host: {error}"
                    ));
                });
                process_host_id()
            }
            (Self::Tcp(_) | Self::Tls(_), Err(_)) => process_host_id(),
        }
    }
}

/// The number of this host, by its kernel's boot, network namespace and user.
fn known_host_id() -> Result<u64> {
    // Sandboxes such as gVisor may have none of the files.
    let failed = |path: &str, error: std::io::Error| {
        Error::system("cannot identify this host", format!("{path}: {error}"))
    };
    let (boot, network) = (BOOT_ID, "/proc/self/ns/net");
    let boot = std::fs::read(boot).map_err(|error| failed(boot, error))?;
    let network = std::fs::read_link(network).map_err(|error| failed(network, error))?;
    let user = rustix::process::geteuid().as_raw();
    Ok(digest(&[&boot, network.as_os_str().as_encoded_bytes(), &user.to_le_bytes()].concat()))
}

/// A number that this process alone has, and keeps.
fn process_host_id() -> Result<u64> {
    static RANDOM: Mutex<Option<[u8; 16]>> = Mutex::new(None);
    let mut known = lock(&RANDOM);
    let random = match *known {
        Some(random) => random,
        None => {
            let random = evenkeel_transport::random();
            *known.insert(random.map_err(|error| Error::system("random numbers", error))?)
        }
    };
    // A forked child has the same random bytes.
    Ok(digest(&[&random[..], &std::process::id().to_le_bytes()].concat()))
}

impl TransportKind {
    /// The transport of this name: `shm`, `tcp` or `tcp:INTERFACE`, and `auto` and `tls` likewise. Transports made by name share the
    /// networks of the process. For `tls` the environment names the certificates, see [`Tls::from_env`].
    ///
    /// # Errors
    /// Lists the names, or says why there is no network.
    pub fn from_name(name: &str) -> Result<Self> {
        let (kind, interface) = match name.split_once(':') {
            Some((kind, interface)) => (kind, Some(interface)),
            None => (name, None),
        };
        match (kind, interface) {
            ("shm", None) => Ok(Self::SharedMemory),
            (_, Some("")) => Err(unknown_transport(name)),
            ("tcp", _) => network(interface).map(Self::Tcp),
            ("auto", _) => network(interface).map(Auto::new).map(Self::Auto),
            ("tls", _) => network(interface).and_then(Tls::from_env).map(Self::Tls),
            _ => Err(unknown_transport(name)),
        }
    }
}

fn unknown_transport(name: &str) -> Error {
    Error::argument(format!(
        "{name:?} is not a transport: use shm, or tcp, auto or tls, each also with :INTERFACE"
    ))
}

/// This process's network over an interface, or as the environment sets it.
fn network(interface: Option<&str>) -> Result<Tcp> {
    let process = std::process::id();
    let mut networks = lock(&NETWORKS);
    let known = networks.iter().find(|(of, on, _)| *of == process && on.as_deref() == interface);
    if let Some((.., tcp)) = known {
        return Ok(tcp.clone());
    }
    let tcp = interface.map_or_else(Tcp::from_env, Tcp::on)?;
    networks.push((process, interface.map(str::to_owned), tcp.clone()));
    Ok(tcp)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[test]
    fn named_hosts_have_different_host_ids() {
        let tcp = Tcp::on("lo").unwrap();
        let here = TransportKind::SharedMemory.host_id().unwrap();
        let host = |auto: &Auto| TransportKind::Auto(auto.clone()).host_id().unwrap();
        let auto = Auto::new(tcp);
        assert_eq!(host(&auto), here);
        let (one, other) = (auto.clone().on_host("one"), auto.on_host("other"));
        assert!(host(&one) != host(&other) && host(&one) != here);
        assert_eq!(host(&one), host(&other.on_host("one")));
    }

    #[test]
    fn transports_made_by_name_share_networks() {
        let network = |name| match TransportKind::from_name(name) {
            Ok(TransportKind::Tcp(tcp)) => tcp,
            _ => panic!("{name}"),
        };
        assert_eq!(network("tcp:lo").device(), "lo");
        let count = || lock(&NETWORKS).iter().filter(|(_, on, _)| on.is_some()).count();
        let before = count();
        network("tcp:lo");
        assert_eq!(count(), before);
        assert!(matches!(TransportKind::from_name("shm"), Ok(TransportKind::SharedMemory)));
        assert!(
            matches!(TransportKind::from_name("auto:lo"), Ok(TransportKind::Auto(auto)) if auto.device() == "lo")
        );
        assert_eq!(count(), before);
        for wrong in ["", "tcp:", "auto:", "tls:", "rdma", "shm:lo"] {
            let error = TransportKind::from_name(wrong).map(drop).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Argument, "{error}");
        }
    }
}
