//! Joining a group by what the environment and a few words say: what programs in other languages do.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::bootstrap::launcher_env::Launch;
use crate::bootstrap::store::{PrefixStore, Store, TcpStore, TcpStoreServer, open};
use crate::error::{Error, Result};
use crate::{Algorithm, Auto, Call, Group, Tcp, Tls, TransportKind, lock};

/// The stores that this process serves at launchers' ports. They stay until it ends: whoever comes for the next group must not
/// find one that is about to go.
static SERVED: Mutex<Vec<(u16, TcpStoreServer)>> = Mutex::new(vec![]);

/// The networks that groups of this process share, by interface. Those of a process that has forked this one have no threads
/// here, so each has the process's number.
static NETWORKS: Mutex<Vec<(u32, Option<String>, Tcp)>> = Mutex::new(vec![]);

impl Launch {
    /// Joins the group of this name, of all ranks that were launched. They meet in the launcher's [`store`](Launch::store) or in
    /// one that rank 0 serves at its [`master`](Launch::master) address. The time is that of [`Group::join`].
    ///
    /// # Errors
    /// [`ErrorKind::Argument`](crate::ErrorKind::Argument) when the launcher names no place to meet; otherwise as [`Group::join`].
    pub fn join(&self, name: &str, transport: &TransportKind, timeout: Duration) -> Result<Group> {
        let store: Arc<dyn Store> = match (&self.store, &self.master) {
            (Some(address), _) => open(address, timeout)?,
            (None, Some((host, port))) => {
                if self.rank == 0 {
                    serve(*port)?;
                }
                Arc::new(TcpStore::connect(&format!("{host}:{port}"), timeout)?)
            }
            (None, None) => {
                return Err(Error::argument(
                    "no place for the ranks to meet: set EVENKEEL_STORE, or MASTER_ADDR and MASTER_PORT",
                ));
            }
        };
        Group::join(&PrefixStore::new(store, name), self.rank, self.size, transport, timeout)
    }
}

impl TransportKind {
    /// The transport of this name: `shm`, `tcp`, `tcp:INTERFACE`, or `auto` or `tls` in the place of `tcp`. All that are named in a process
    /// share its networks; for `tls` the environment names the certificates, see [`Tls::from_env`].
    ///
    /// # Errors
    /// Says which names there are, or why there is no network.
    pub fn from_name(name: &str) -> Result<Self> {
        let (kind, interface) = match name.split_once(':') {
            Some((kind, interface)) => (kind, Some(interface)),
            None => (name, None),
        };
        match (kind, interface) {
            ("shm", None) => Ok(Self::SharedMemory),
            (_, Some("")) => Err(no_way(name)),
            ("tcp", _) => network(interface).map(Self::Tcp),
            ("auto", _) => network(interface).map(Auto::new).map(Self::Auto),
            ("tls", _) => network(interface).and_then(Tls::from_env).map(Self::Tls),
            _ => Err(no_way(name)),
        }
    }
}

fn no_way(name: &str) -> Error {
    Error::argument(format!(
        "{name:?} is no transport for ranks to reach each other: shm, or tcp, auto or tls, each also with :INTERFACE"
    ))
}

/// This process's network over an interface, or as the environment says.
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

impl Call {
    /// What is said in numbers and names; the timeout in seconds.
    ///
    /// # Errors
    /// Says which values there are.
    pub fn of(tag: u32, timeout: Option<f64>, algorithm: Option<&str>) -> Result<Self> {
        let mut call = Self::default().tag(tag);
        if let Some(timeout) = timeout {
            call = call.timeout(seconds(timeout)?);
        }
        if let Some(name) = algorithm {
            call = call.algorithm(Algorithm::from_name(name).ok_or_else(|| {
                let names = Algorithm::ALL.map(Algorithm::name).join(", ");
                Error::argument(format!("there is no algorithm {name:?}: {names}"))
            })?);
        }
        Ok(call)
    }
}

/// A time that is given in seconds.
///
/// # Errors
/// [`ErrorKind::Argument`](crate::ErrorKind::Argument) when it is none: negative, say.
pub fn seconds(seconds: f64) -> Result<Duration> {
    match Duration::try_from_secs_f64(seconds) {
        // About 30 years: what is longer overflows clocks.
        Ok(time) if !time.is_zero() && seconds <= 1e9 => Ok(time),
        _ => Err(Error::argument(format!(
            "a timeout of {seconds} seconds: more than 0, at most 1e9"
        ))),
    }
}

fn serve(port: u16) -> Result<()> {
    let mut served = lock(&SERVED);
    if served.iter().all(|(other, _)| *other != port) {
        served.push((port, TcpStoreServer::bind(("0.0.0.0", port))?));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TEST_TIMEOUT;
    use crate::{ErrorKind, Op};
    use std::net::TcpListener;
    use std::thread;

    #[test]
    fn ranks_meet_where_the_launcher_says_again_and_again() {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let launch = |rank| Launch {
            rank,
            size: 3,
            master: Some(("127.0.0.1".to_owned(), port)),
            store: None,
        };
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

    #[test]
    fn without_a_place_to_meet_it_says_what_to_set() {
        let launch = Launch { rank: 0, size: 1, master: None, store: None };
        let error =
            launch.join("", &TransportKind::SharedMemory, TEST_TIMEOUT).map(drop).unwrap_err();
        assert!(error.to_string().contains("EVENKEEL_STORE"), "{error}");
    }

    #[test]
    fn calls_are_made_of_numbers_and_names() {
        assert!(Call::of(7, Some(0.5), Some("ring")).is_ok() && Call::of(0, None, None).is_ok());
        let error = Call::of(0, None, Some("guess")).unwrap_err().to_string();
        assert!(error.contains("guess") && error.contains("ring_chunked"), "{error}");
        assert_eq!(seconds(1.5).unwrap(), Duration::from_millis(1500));
        for wrong in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e10, 1e-12] {
            assert!(Call::of(0, Some(wrong), None).is_err(), "{wrong}");
        }
    }

    #[test]
    fn ways_have_names_and_networks_are_shared() {
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
