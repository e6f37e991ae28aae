//! The client of a store server.

use std::io::{ErrorKind as IoErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use evenkeel_tls::JobIdentity;
use evenkeel_transport::Owner;
use evenkeel_transport::sync::lock;

use super::super::{Store, check, check_owner};
use super::{ADD, AWAIT_CHANGE, DELETE, GET, GET_MANY, MAX_BYTES, NO_VALUE, SET, SET_ONCE, VALUE};
use crate::backoff::Backoff;
use crate::codec::{Reader, put};
use crate::error::{Error, Result, format_duration};
use crate::job_stream::{self, JobStream};

/// Maximum number of connections that are kept for the next requests. Threads that share a store have one each.
const MAX_SPARE_CONNECTIONS: usize = 4;
/// Maximum number of names in a request.
const MAX_NAMES: usize = 4096;
/// The longest time for which one request waits at the server.
const MAX_SERVER_WAIT: Duration = Duration::from_secs(10);
/// How much later than asked the server may end a wait: it looks now and then, and may be busy.
const MAX_LATENESS: Duration = Duration::from_secs(1);

/// A store that a [`TcpStoreServer`](super::TcpStoreServer) serves. A forked child cannot use it.
pub struct TcpStore {
    owner: Owner,
    server: String,
    timeout: Duration,
    identity: Option<JobIdentity>,
    /// The connections that no request uses. One that has failed is not kept.
    connections: Mutex<Vec<JobStream>>,
}

impl TcpStore {
    /// Connects to a server, which may start later. No later call takes longer than the timeout, unless it waits for a value. With
    /// `EVENKEEL_ENCRYPTION=required` the connection is encrypted.
    ///
    /// # Errors
    /// [`ErrorKind::Store`](crate::ErrorKind::Store) when it cannot be reached in time, or is not encrypted as this process is.
    pub fn connect(server: &str, timeout: Duration) -> Result<Self> {
        Self::connect_as(job_stream::identity()?, server, timeout)
    }

    pub(super) fn connect_as(
        identity: Option<JobIdentity>,
        server: &str,
        timeout: Duration,
    ) -> Result<Self> {
        let connection = connect(identity.as_ref(), server, timeout)?;
        let connections = Mutex::new(vec![connection]);
        let (owner, server) = (Owner::current(), server.to_owned());
        Ok(Self { owner, server, timeout, identity, connections })
    }

    fn request(&self, operation: u8, name: &str, value: &[u8]) -> Result<Option<Vec<u8>>> {
        self.request_within(self.timeout, operation, name, value)
    }

    /// Sends a request whose response takes no longer than this.
    fn request_within(
        &self,
        time: Duration,
        operation: u8,
        name: &str,
        value: &[u8],
    ) -> Result<Option<Vec<u8>>> {
        check_owner(self.owner)?;
        let mut request = vec![operation];
        put(&mut request, name.as_bytes());
        put(&mut request, value);
        // The lock is not held meanwhile: a request may wait for what another thread stores.
        let spare = lock(&self.connections).pop();
        let mut connection = match spare {
            Some(connection) => connection,
            None => connect(self.identity.as_ref(), &self.server, self.timeout)?,
        };
        let failed = |error| Error::of_store(format!("store at {}: {error}", self.server));
        connection.socket().set_read_timeout(Some(time)).map_err(failed)?;
        let (status, value) = exchange(&mut connection, &request).map_err(failed)?;
        let mut connections = lock(&self.connections);
        if connections.len() < MAX_SPARE_CONNECTIONS {
            connections.push(connection);
        }
        drop(connections);
        match status {
            NO_VALUE => Ok(None),
            VALUE => Ok(Some(value)),
            _ => Err(Error::of_store(String::from_utf8_lossy(&value).into_owned())),
        }
    }
}

fn no_store() -> Error {
    Error::of_store("the server is not a store")
}

fn connect(identity: Option<&JobIdentity>, server: &str, timeout: Duration) -> Result<JobStream> {
    let deadline = Instant::now() + timeout;
    let mut backoff = Backoff::until(deadline);
    loop {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let tried = server.to_socket_addrs().and_then(|addresses| {
            let stream = connect_to_any(addresses.as_slice(), left)?;
            stream.set_nodelay(true)?;
            stream.set_write_timeout(Some(timeout))?;
            stream.set_read_timeout(Some(left))?;
            JobStream::connect(stream, identity)
        });
        match tried {
            Ok(stream) => return Ok(stream),
            Err(error) if error.kind() == IoErrorKind::InvalidInput || !backoff.wait() => {
                return Err(Error::of_store(format!(
                    "no store at {server:?} within {}: {error}",
                    format_duration(timeout)
                )));
            }
            Err(_) => {}
        }
    }
}

/// Connects to the first address that accepts. A host may have addresses of both families, and the server only one.
fn connect_to_any(addresses: &[SocketAddr], time: Duration) -> std::io::Result<TcpStream> {
    let each = time / u32::try_from(addresses.len()).unwrap_or(u32::MAX).max(1);
    let mut failed = std::io::Error::other("the name has no address");
    for address in addresses {
        match TcpStream::connect_timeout(address, each) {
            Ok(stream) => return Ok(stream),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

fn exchange(stream: &mut JobStream, request: &[u8]) -> std::io::Result<(u8, Vec<u8>)> {
    stream.write_all(request)?;
    let mut front = [0; 5];
    stream.read_exact(&mut front)?;
    let length = u32::from_le_bytes([front[1], front[2], front[3], front[4]]) as usize;
    if length > MAX_BYTES {
        return Err(std::io::Error::other("the server is not a store"));
    }
    let mut value = vec![0; length];
    stream.read_exact(&mut value)?;
    Ok((front[0], value))
}

/// The values in a response to [`GET_MANY`], of so many names; `None` if it has none, or too many.
pub(crate) fn decode_values(bytes: &[u8], names: usize) -> Option<Vec<Option<Vec<u8>>>> {
    let mut reader = Reader::new(bytes);
    let mut values = vec![];
    while let Some(status) = reader.byte() {
        // Of more than were asked for none is kept: each takes more memory than its byte in the response.
        if values.len() == names {
            return None;
        }
        values.push(match status {
            NO_VALUE => None,
            _ => Some(reader.bytes()?.to_owned()),
        });
    }
    (!values.is_empty()).then_some(values)
}

impl Store for TcpStore {
    fn set(&self, name: &str, value: &[u8]) -> Result<()> {
        check(name, value)?;
        self.request(SET, name, value).map(|_| ())
    }

    fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
        check(name, &[])?;
        self.request(GET, name, &[])
    }

    fn get_many(&self, names: &[String]) -> Result<Vec<Option<Vec<u8>>>> {
        let mut found = Vec::with_capacity(names.len());
        while found.len() < names.len() {
            let mut list = vec![];
            for name in names[found.len()..].iter().take(MAX_NAMES) {
                check(name, &[])?;
                put(&mut list, name.as_bytes());
            }
            // The values of so many of them as fit into a response.
            let values = self.request(GET_MANY, "", &list)?.ok_or_else(no_store)?;
            let values = decode_values(&values, names.len() - found.len()).ok_or_else(no_store)?;
            found.extend(values);
        }
        Ok(found)
    }

    fn await_change(
        &self,
        name: &str,
        known: Option<&[u8]>,
        timeout: Duration,
    ) -> Result<Option<Vec<u8>>> {
        check(name, known.unwrap_or_default())?;
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let time = left.min(MAX_SERVER_WAIT);
            let mut request = (time.as_millis() as u64).to_le_bytes().to_vec();
            request.push(if known.is_some() { VALUE } else { NO_VALUE });
            request.extend_from_slice(known.unwrap_or_default());
            let within = time + self.timeout.max(MAX_LATENESS);
            let value = self.request_within(within, AWAIT_CHANGE, name, &request)?;
            if value.as_deref() != known || Instant::now() >= deadline {
                return Ok(value);
            }
        }
    }

    fn add(&self, name: &str, amount: i64) -> Result<i64> {
        check(name, &[])?;
        let sum = self.request(ADD, name, &amount.to_le_bytes())?.unwrap_or_default();
        Ok(i64::from_le_bytes(sum.as_slice().try_into().map_err(|_| no_store())?))
    }

    fn set_once(&self, name: &str, value: &[u8]) -> Result<Vec<u8>> {
        check(name, value)?;
        self.request(SET_ONCE, name, value)?.ok_or_else(no_store)
    }

    fn delete(&self, name: &str) -> Result<()> {
        check(name, &[])?;
        self.request(DELETE, name, &[]).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn tcp_store_takes_as_many_values_as_it_asked_for() {
        let some = [VALUE, 2, 0, 0, 0, b'a', b'b'];
        let values = [&some[..], &[NO_VALUE]].concat();
        assert_eq!(decode_values(&values, 3), Some(vec![Some(b"ab".to_vec()), None]), "the first");
        assert_eq!(decode_values(&values, 1), None, "too many");
        assert_eq!(decode_values(&[], 1), None, "none");
        assert_eq!(decode_values(&some[..6], 1), None, "cut");
    }

    #[test]
    fn tcp_store_is_found_at_any_address_of_its_host() {
        let time = Duration::from_secs(20);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let serves = listener.local_addr().unwrap();
        // Nothing listens at this port of the other family.
        let refuses = SocketAddr::from((std::net::Ipv6Addr::LOCALHOST, serves.port()));
        for addresses in [[refuses, serves], [serves, refuses]] {
            assert!(
                connect_to_any(&addresses, time).is_ok_and(|s| s.peer_addr().unwrap() == serves)
            );
        }
        assert!(connect_to_any(&[refuses], time).is_err() && connect_to_any(&[], time).is_err());
    }
}
