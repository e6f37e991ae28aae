//! The hierarchical transport: shared memory to ranks of this host, TCP to ranks of other hosts.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::codec::{Reader, put};
use crate::error::{Error, Result};
use crate::links::link::{Endpoint, Incoming, Outgoing};
use crate::links::shm::{ShmEndpoint, Waker};
use crate::links::tcp::Tcp;

pub(crate) struct HierarchicalEndpoint {
    host_id: u64,
    shm: ShmEndpoint,
    tcp: Box<dyn Endpoint>,
}

impl HierarchicalEndpoint {
    /// # Errors
    /// Those of both transports.
    pub(crate) fn open(tcp: &Tcp, host_id: u64) -> Result<Self> {
        // A thread that sleeps on shared memory is also woken by TCP.
        let waker = Waker::new().map_err(|error| Error::system("shared memory", error))?;
        let waker = Arc::new(waker);
        let tcp = tcp.endpoint(Some(Arc::<Waker>::clone(&waker)))?;
        Ok(Self { host_id, shm: ShmEndpoint::open(&host_id.to_le_bytes(), Some(waker))?, tcp })
    }
}

impl Endpoint for HierarchicalEndpoint {
    fn address(&self) -> Vec<u8> {
        let mut out = self.host_id.to_le_bytes().to_vec();
        put(&mut out, &self.shm.address());
        put(&mut out, &self.tcp.address());
        out
    }

    fn ip(&self) -> IpAddr {
        self.tcp.ip()
    }

    fn connect(&self, address: &[u8]) -> Result<Option<Box<dyn Outgoing>>> {
        let mut reader = Reader::new(address);
        let parts = (|| Some((reader.long()?, reader.bytes()?, reader.bytes()?)))();
        match parts {
            None => Err(Error::argument("the address is not that of a rank with transport `auto`")),
            Some((host_id, shm, _)) if host_id == self.host_id => self.shm.connect(shm),
            Some((.., tcp)) => self.tcp.connect(tcp),
        }
    }

    fn accept(&self) -> Result<Option<Box<dyn Incoming>>> {
        match self.shm.accept()? {
            None => self.tcp.accept(),
            link => Ok(link),
        }
    }

    fn sleep(&self, time: Duration, is_ready: &mut dyn FnMut() -> bool) {
        self.shm.sleep(time, is_ready);
    }
}
