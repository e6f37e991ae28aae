//! A store that one process serves to all ranks over TCP.
//!
//! A request is an operation (one byte), a name and a value, each preceded by its length (four bytes, little-endian). The response
//! is a status (one byte) and a value preceded by its length. Every process that can reach the port can use the store. It is meant
//! for the job's own network, as launchers' stores are.

use std::io::{ErrorKind as IoErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Backoff, MAX_NAME, MAX_VALUE, MemoryStore, Store, check};
use evenkeel_transport::sync::lock;

use crate::accept::{ACCEPT_RETRY_DELAY, accept_all};
use crate::codec::{Reader, put};
use crate::error::{Error, Result, format_duration};

const SET: u8 = 1;
const GET: u8 = 2;
const ADD: u8 = 3;
const DELETE: u8 = 4;
const SET_ONCE: u8 = 5;

const NO_VALUE: u8 = 0;
const VALUE: u8 = 1;
const REFUSED: u8 = 2;

/// Maximum length of a request or response.
const MAX_BYTES: usize = 16 + MAX_NAME + MAX_VALUE;
/// Maximum number of ranks that are served at a time.
const MAX_CLIENTS: usize = 16_384;
/// How often the server checks whether to stop.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Serves a store to all ranks until it is dropped. Usually rank 0 runs it.
pub struct TcpStoreServer {
    address: SocketAddr,
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl TcpStoreServer {
    /// Serves at an address. Port 0 picks a free port.
    ///
    /// # Errors
    /// [`ErrorKind::Store`](crate::ErrorKind::Store) when the address cannot be listened on.
    pub fn bind(address: impl ToSocketAddrs) -> Result<Self> {
        let listener = TcpListener::bind(address)
            .map_err(|error| Error::of_store(format!("store server: {error}")))?;
        Self::serve(listener)
    }

    /// Serves with an existing listener.
    ///
    /// # Errors
    /// As [`TcpStoreServer::bind`].
    pub fn serve(listener: TcpListener) -> Result<Self> {
        let failed = |error: std::io::Error| Error::of_store(format!("store server: {error}"));
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let stopping = Arc::new(AtomicBool::new(false));
        let thread = {
            let stopping = Arc::clone(&stopping);
            let work = move || serve(&listener, &stopping);
            thread::Builder::new().name("evenkeel-store".to_owned()).spawn(work).map_err(failed)?
        };
        Ok(Self { address, stopping, thread: Some(thread) })
    }

    /// The address at which it serves.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for TcpStoreServer {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Relaxed);
        // Wakes the thread. If this fails, it checks after the poll interval.
        let _ = TcpStream::connect_timeout(&self.address, POLL_INTERVAL);
        if let Some(thread) = self.thread.take() {
            // The thread does not panic.
            let _ = thread.join();
        }
    }
}

struct Client {
    stream: TcpStream,
    received: Vec<u8>,
    to_send: Vec<u8>,
}

fn serve(listener: &TcpListener, stopping: &AtomicBool) {
    let store = MemoryStore::new();
    let mut clients: Vec<Client> = vec![];
    let mut out_of_sockets = false;
    while !stopping.load(Ordering::Relaxed) {
        let mut waited: Vec<_> = clients
            .iter()
            .map(|client| {
                let events = if client.to_send.is_empty() { PollFlags::IN } else { PollFlags::OUT };
                PollFd::new(&client.stream, events)
            })
            .chain((!out_of_sockets).then(|| PollFd::new(listener, PollFlags::IN)))
            .collect();
        let time =
            Timespec::try_from(if out_of_sockets { ACCEPT_RETRY_DELAY } else { POLL_INTERVAL })
                .unwrap_or_default();
        if poll(&mut waited, Some(&time)).is_err() {
            thread::sleep(Duration::from_millis(1));
        }
        let ready: Vec<bool> = waited.iter().map(|one| !one.revents().is_empty()).collect();
        let mut at = 0;
        clients.retain_mut(|client| {
            at += 1;
            !ready[at - 1] || client.serve(&store)
        });
        out_of_sockets = accept_all(listener, |stream| {
            // One client too many is disconnected.
            if clients.len() < MAX_CLIENTS && stream.set_nodelay(true).is_ok() {
                clients.push(Client { stream, received: vec![], to_send: vec![] });
            }
        });
    }
}

impl Client {
    /// Serves pending requests. Returns false when the client has disconnected or sent an invalid request.
    fn serve(&mut self, store: &MemoryStore) -> bool {
        let mut buffer = [0; 16 << 10];
        loop {
            if !self.to_send.is_empty() {
                match self.stream.write(&self.to_send) {
                    Ok(count) => drop(self.to_send.drain(..count)),
                    Err(error) if error.kind() == IoErrorKind::WouldBlock => return true,
                    Err(error) if error.kind() == IoErrorKind::Interrupted => {}
                    Err(_) => return false,
                }
                continue;
            }
            if let Some((response, used)) = response(store, &self.received) {
                self.received.drain(..used);
                self.to_send = response;
                continue;
            }
            if self.received.len() > MAX_BYTES {
                return false;
            }
            match self.stream.read(&mut buffer) {
                Ok(0) => return false,
                Ok(count) => self.received.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == IoErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == IoErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
    }
}

/// The response to the first request in the bytes, and the request's length. `None` if the request is incomplete.
fn response(store: &MemoryStore, bytes: &[u8]) -> Option<(Vec<u8>, usize)> {
    let mut reader = Reader::new(bytes);
    let operation = reader.byte()?;
    let (name, value) = (reader.bytes()?, reader.bytes()?);
    let used = 9 + name.len() + value.len();
    let name = String::from_utf8_lossy(name);
    let outcome = match operation {
        SET => store.set(&name, value).map(|()| None),
        GET => store.get(&name),
        SET_ONCE => store.set_once(&name, value).map(Some),
        DELETE => store.delete(&name).map(|()| None),
        ADD => value
            .try_into()
            .map_err(|_| Error::argument("the amount must have eight bytes"))
            .and_then(|amount| store.add(&name, i64::from_le_bytes(amount)))
            .map(|sum| Some(sum.to_le_bytes().to_vec())),
        _ => Err(Error::argument("no such operation")),
    };
    let (status, value) = match outcome {
        Ok(None) => (NO_VALUE, vec![]),
        Ok(Some(value)) => (VALUE, value),
        Err(error) => (REFUSED, error.to_string().into_bytes()),
    };
    let mut out = vec![status];
    put(&mut out, &value);
    Some((out, used))
}

/// A store that a [`TcpStoreServer`] serves.
pub struct TcpStore {
    server: String,
    timeout: Duration,
    /// `None` after an error of the connection.
    stream: Mutex<Option<TcpStream>>,
}

impl TcpStore {
    /// Connects to a server, which may start later. No later call takes longer than the timeout.
    ///
    /// # Errors
    /// [`ErrorKind::Store`](crate::ErrorKind::Store) when it cannot be reached in time.
    pub fn connect(server: &str, timeout: Duration) -> Result<Self> {
        let stream = connect(server, timeout)?;
        Ok(Self { server: server.to_owned(), timeout, stream: Mutex::new(Some(stream)) })
    }

    fn request(&self, operation: u8, name: &str, value: &[u8]) -> Result<Option<Vec<u8>>> {
        check(name, value)?;
        let mut request = vec![operation];
        put(&mut request, name.as_bytes());
        put(&mut request, value);
        let mut stream = lock(&self.stream);
        let mut connected = match stream.take() {
            Some(connected) => connected,
            None => connect(&self.server, self.timeout)?,
        };
        let failed = |error| Error::of_store(format!("store at {}: {error}", self.server));
        let (status, value) = exchange(&mut connected, &request).map_err(failed)?;
        *stream = Some(connected);
        match status {
            NO_VALUE => Ok(None),
            VALUE => Ok(Some(value)),
            _ => Err(Error::of_store(String::from_utf8_lossy(&value).into_owned())),
        }
    }
}

fn connect(server: &str, timeout: Duration) -> Result<TcpStream> {
    let deadline = Instant::now() + timeout;
    let mut backoff = Backoff::until(deadline);
    loop {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let tried = server.to_socket_addrs().and_then(|mut addresses| {
            let none = || std::io::Error::other("the name has no address");
            let stream = TcpStream::connect_timeout(&addresses.next().ok_or_else(none)?, left)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(timeout))?;
            stream.set_write_timeout(Some(timeout))?;
            Ok(stream)
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

fn exchange(stream: &mut TcpStream, request: &[u8]) -> std::io::Result<(u8, Vec<u8>)> {
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

impl Store for TcpStore {
    fn set(&self, name: &str, value: &[u8]) -> Result<()> {
        self.request(SET, name, value).map(|_| ())
    }

    fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.request(GET, name, &[])
    }

    fn add(&self, name: &str, amount: i64) -> Result<i64> {
        let sum = self.request(ADD, name, &amount.to_le_bytes())?.unwrap_or_default();
        let sum =
            sum.as_slice().try_into().map_err(|_| Error::of_store("the server is not a store"))?;
        Ok(i64::from_le_bytes(sum))
    }

    fn set_once(&self, name: &str, value: &[u8]) -> Result<Vec<u8>> {
        self.request(SET_ONCE, name, value)?
            .ok_or_else(|| Error::of_store("the server is not a store"))
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.request(DELETE, name, &[]).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::super::check_store_contract;
    use super::*;

    const TIME: Duration = Duration::from_secs(20);

    #[test]
    fn tcp_store_fulfils_the_contract() {
        let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
        let store = TcpStore::connect(&server.address().to_string(), TIME).unwrap();
        check_store_contract(&(Arc::new(store) as Arc<dyn Store>));
    }

    #[test]
    fn tcp_store_server_may_start_late() {
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        thread::scope(|scope| {
            let clients: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| TcpStore::connect(&address, TIME)?.add("n", 1)))
                .collect();
            let server = TcpStoreServer::bind(&address).unwrap();
            for client in clients {
                client.join().unwrap().unwrap();
            }
            assert_eq!(TcpStore::connect(&address, TIME).unwrap().add("n", 0).unwrap(), 8);
            drop(server);
        });
        let gone = TcpStore::connect(&address, Duration::from_millis(20));
        assert!(gone.err().unwrap().to_string().contains(&address));
    }

    #[test]
    fn invalid_request_closes_only_its_connection() {
        let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(server.address()).unwrap();
        client.set_read_timeout(Some(TIME)).unwrap();
        client.write_all(&[9, 1, 0, 0, 0, b'a', 0, 0, 0, 0]).unwrap();
        let mut status = [0; 1];
        client.read_exact(&mut status).unwrap();
        assert_eq!(status[0], REFUSED);
        let store = TcpStore::connect(&server.address().to_string(), TIME).unwrap();
        store.set("a", b"1").unwrap();
    }
}
