//! Links through shared memory to ranks of this host, and by TCP to those of others.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::codec::{Reader, put};
use crate::error::{Error, Result};
use crate::links::link::{Endpoint, Incoming, Outgoing};
use crate::links::shm::{ShmEndpoint, Waker};
use crate::links::tcp::Tcp;

pub(crate) struct HierarchicalEndpoint {
    host: u64,
    shm: ShmEndpoint,
    tcp: Box<dyn Endpoint>,
}

impl HierarchicalEndpoint {
    /// # Errors
    /// Those of both.
    pub(crate) fn open(tcp: &Tcp, host: u64) -> Result<Self> {
        // Who sleeps hears of both: TCP rings where shared memory listens.
        let waker = Waker::new().map_err(|error| Error::system("shared memory", error))?;
        let waker = Arc::new(waker);
        let tcp = tcp.endpoint(Some(Arc::<Waker>::clone(&waker)))?;
        Ok(Self { host, shm: ShmEndpoint::open(Some(waker))?, tcp })
    }
}

impl Endpoint for HierarchicalEndpoint {
    fn address(&self) -> Vec<u8> {
        let mut out = self.host.to_le_bytes().to_vec();
        put(&mut out, &self.shm.address());
        put(&mut out, &self.tcp.address());
        out
    }

    fn host(&self) -> IpAddr {
        self.tcp.host()
    }

    fn connect(&self, address: &[u8]) -> Result<Option<Box<dyn Outgoing>>> {
        let mut reader = Reader::new(address);
        let parts = (|| Some((reader.long()?, reader.bytes()?, reader.bytes()?)))();
        match parts {
            None => Err(Error::argument("the address is not that of a rank on this transport")),
            Some((host, shm, _)) if host == self.host => self.shm.connect(shm),
            Some((.., tcp)) => self.tcp.connect(tcp),
        }
    }

    fn accept(&self) -> Result<Option<Box<dyn Incoming>>> {
        match self.shm.accept()? {
            None => self.tcp.accept(),
            link => Ok(link),
        }
    }

    fn sleep(&self, time: Duration, look: &mut dyn FnMut() -> bool) {
        self.shm.sleep(time, look);
    }
}
