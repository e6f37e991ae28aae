//! Joins the group of all ranks that a launcher started, from what the launcher set in the environment.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use evenkeel_transport::sync::lock;

use crate::bootstrap::launcher_env::Launch;
use crate::bootstrap::store::{PrefixStore, Store, TcpStore, TcpStoreServer, open};
use crate::error::{Error, Result};
use crate::group::Group;
use crate::links::transport_kind::TransportKind;

/// The stores that this process serves at launchers' ports. They stay until the process exits: a rank that joins the next group
/// must not connect to a store that is about to close.
static SERVED: Mutex<Vec<(u16, TcpStoreServer)>> = Mutex::new(vec![]);

impl Launch {
    /// Joins the group of this name, of all ranks that were launched. The ranks find each other in the launcher's
    /// [`store`](Launch::store), or in one that rank 0 serves at the [`master`](Launch::master) address. The timeout is that of
    /// [`Group::join`].
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::ErrorKind::Argument) when the launcher sets neither; otherwise as [`Group::join`].
    pub fn join(&self, name: &str, transport: &TransportKind, timeout: Duration) -> Result<Group> {
        let store = PrefixStore::new(self.open_store(timeout)?, name);
        Group::join(&store, self.rank, self.size, transport, timeout)
    }

    /// Opens the store that [`Launch::join`] uses, where a group's names have its name as a prefix.
    ///
    /// # Errors
    /// As [`Launch::join`].
    pub fn open_store(&self, timeout: Duration) -> Result<Arc<dyn Store>> {
        Ok(match (&self.store, &self.master) {
            (Some(address), _) => open(address, timeout)?,
            (None, Some((host, port))) => {
                if self.rank == 0 {
                    serve(*port)?;
                }
                Arc::new(TcpStore::connect(&host_and_port(host, *port), timeout)?)
            }
            (None, None) => {
                return Err(Error::argument(
                    "the ranks have no store to bootstrap from: set EVENKEEL_STORE, or MASTER_ADDR and MASTER_PORT",
                ));
            }
        })
    }
}

/// An address of IPv6 is in brackets there.
fn host_and_port(host: &str, port: u16) -> String {
    match host.contains(':') && !host.starts_with('[') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    }
}

fn serve(port: u16) -> Result<()> {
    let mut served = lock(&SERVED);
    if served.iter().all(|(other, _)| *other != port) {
        // The first takes connections over IPv4 too. The second is for hosts without IPv6.
        let all: [SocketAddr; 2] =
            [(Ipv6Addr::UNSPECIFIED, port).into(), (Ipv4Addr::UNSPECIFIED, port).into()];
        let server = TcpStoreServer::bind(&all[..]).map_err(|error| {
            Error::of_store(format!("rank 0 cannot serve at MASTER_PORT, {port}: {error}"))
        })?;
        served.push((port, server));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::TEST_TIMEOUT;
    use crate::{Call, Op};
    use std::net::TcpListener;
    use std::thread;

    #[test]
    fn ranks_join_at_the_launchers_master_repeatedly() {
        for host in ["127.0.0.1", "::1", "localhost"] {
            let port = TcpListener::bind("[::]:0").unwrap().local_addr().unwrap().port();
            let launch =
                |rank| Launch { rank, size: 3, master: Some((host.to_owned(), port)), store: None };
            thread::scope(|scope| {
                for rank in 0..3 {
                    scope.spawn(move || {
                        for name in ["first", "second", "first"] {
                            let transport = TransportKind::from_name("tcp:lo").unwrap();
                            let group = launch(rank).join(name, &transport, TEST_TIMEOUT).unwrap();
                            let mut sum = [rank as i64];
                            group.allreduce_of(&mut sum, Op::Sum, &Call::default()).unwrap();
                            assert_eq!(sum, [3]);
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn error_of_a_taken_master_port_names_it() {
        let taken = TcpListener::bind("[::]:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let master = Some(("127.0.0.1".to_owned(), port));
        let launch = Launch { rank: 0, size: 2, master, store: None };
        let error = launch.open_store(TEST_TIMEOUT).map(drop).unwrap_err();
        assert!(error.to_string().contains(&format!("MASTER_PORT, {port}")), "{error}");
    }

    #[test]
    fn error_without_a_store_names_the_variables() {
        let launch = Launch { rank: 0, size: 1, master: None, store: None };
        let error =
            launch.join("", &TransportKind::SharedMemory, TEST_TIMEOUT).map(drop).unwrap_err();
        assert!(error.to_string().contains("EVENKEEL_STORE"), "{error}");
    }
}
