//! How the ranks of a group reach each other, and which of them share a host.

use crate::codec::digest;
use crate::error::{Error, Result};
use crate::links::hierarchical::HierarchicalEndpoint;
use crate::links::link::Endpoint;
use crate::links::shm::ShmEndpoint;
use crate::links::tcp::Tcp;
use crate::links::tls::Tls;

/// How the ranks of a group reach each other; the same for all.
#[derive(Clone)]
pub enum TransportKind {
    /// By TCP.
    Tcp(Tcp),
    /// By TCP, encrypted; ranks show certificates.
    Tls(Tls),
    /// Through shared memory: all ranks are on one host.
    SharedMemory,
    /// Through shared memory to ranks of the same host, by TCP to others.
    Auto(Auto),
}

/// Shared memory within a host and TCP between hosts.
///
/// Processes are on the same host when they have the same kernel, network namespace and user: containers that cannot share
/// memory count as hosts of their own.
#[derive(Clone)]
pub struct Auto {
    pub(crate) tcp: Tcp,
    host: Option<String>,
}

impl Auto {
    /// Ranks that are not on this host are reached over this network.
    pub fn new(tcp: Tcp) -> Self {
        Self { tcp, host: None }
    }

    /// Takes ranks that say the same name, and no others, for ranks of the same host.
    pub fn on_host(self, name: &str) -> Self {
        Self { host: Some(name.to_owned()), ..self }
    }

    /// The interface of the network.
    pub fn device(&self) -> &str {
        self.tcp.device()
    }
}

impl TransportKind {
    pub(crate) fn open(&self) -> Result<Box<dyn Endpoint>> {
        match self {
            Self::Tcp(tcp) => tcp.endpoint(None),
            Self::Tls(tls) => tls.endpoint(),
            Self::SharedMemory => Ok(Box::new(ShmEndpoint::open(None)?)),
            Self::Auto(auto) => Ok(Box::new(HierarchicalEndpoint::open(&auto.tcp, self.host()?)?)),
        }
    }

    /// Tells ways apart that do not understand each other.
    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Tcp(_) => 1,
            Self::SharedMemory => 2,
            Self::Tls(_) => 3,
            Self::Auto(_) => 4,
        }
    }

    /// What ranks of one host have in common, and no others.
    pub(crate) fn host(&self) -> Result<u64> {
        if let Self::Auto(Auto { host: Some(name), .. }) = self {
            return Ok(digest(name.as_bytes()));
        }
        let failed = |error| Error::system("which host this is", error);
        let boot = std::fs::read("/proc/sys/kernel/random/boot_id").map_err(failed)?;
        let network = std::fs::read_link("/proc/self/ns/net").map_err(failed)?;
        let user = rustix::process::geteuid().as_raw();
        Ok(digest(&[&boot, network.as_os_str().as_encoded_bytes(), &user.to_le_bytes()].concat()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_told_apart_by_their_names_if_they_have_one() {
        let tcp = Tcp::on("lo").unwrap();
        let here = TransportKind::SharedMemory.host().unwrap();
        let host = |auto: &Auto| TransportKind::Auto(auto.clone()).host().unwrap();
        let auto = Auto::new(tcp);
        assert_eq!(host(&auto), here);
        let (one, other) = (auto.clone().on_host("one"), auto.on_host("other"));
        assert!(host(&one) != host(&other) && host(&one) != here);
        assert_eq!(host(&one), host(&other.on_host("one")));
    }
}
