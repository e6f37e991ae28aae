//! A store that one process serves to all ranks over TCP.
//!
//! A request is an operation (one byte), a name and a value, each preceded by its length (four bytes, little-endian). The response
//! is a status (one byte) and a value preceded by its length. With `EVENKEEL_ENCRYPTION=required` all of it is in a TLS session of
//! the job's processes. Otherwise every process that can reach the port can use the store.

mod client;
mod server;

use super::{MAX_NAME, MAX_VALUE};

pub use client::TcpStore;
pub use server::TcpStoreServer;
#[cfg(feature = "fuzzing")]
pub(crate) use {client::decode_values, server::answer};

const SET: u8 = 1;
const GET: u8 = 2;
const ADD: u8 = 3;
const DELETE: u8 = 4;
const SET_ONCE: u8 = 5;
/// The request's value is a list of names. The response's value has, for each, the byte [`VALUE`] and the value, or [`NO_VALUE`].
const GET_MANY: u8 = 6;
/// Answered once the value is another than the known one, or the time is over. The request's value is the time in milliseconds
/// (eight bytes), and the byte [`VALUE`] and the known value, or [`NO_VALUE`].
const AWAIT_CHANGE: u8 = 7;

const NO_VALUE: u8 = 0;
const VALUE: u8 = 1;
const REFUSED: u8 = 2;

/// Maximum length of a request or response.
const MAX_BYTES: usize = 16 + MAX_NAME + MAX_VALUE;

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::Arc;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::Store;
    use crate::bootstrap::store::check_store_contract;

    const TIME: Duration = Duration::from_secs(20);

    #[test]
    fn tcp_store_fulfils_the_contract() {
        let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
        let store = TcpStore::connect(&server.address().to_string(), TIME).unwrap();
        check_store_contract(&(Arc::new(store) as Arc<dyn Store>));
    }

    fn identity(digit: &str) -> Option<evenkeel_tls::JobIdentity> {
        let key = digit.repeat(64);
        let lookup = |name: &str| match name {
            "EVENKEEL_ENCRYPTION" => Some("required".to_owned()),
            "EVENKEEL_JOB_KEY" => Some(key.clone()),
            _ => None,
        };
        evenkeel_transport::Settings::from_lookup(lookup).unwrap().encryption().cloned()
    }

    /// A server at a free port.
    fn serve(identity: Option<evenkeel_tls::JobIdentity>) -> TcpStoreServer {
        TcpStoreServer::serve_as(identity, TcpListener::bind("127.0.0.1:0").unwrap()).unwrap()
    }

    #[test]
    fn encrypted_tcp_store_fulfils_the_contract() {
        let server = serve(identity("5"));
        let address = server.address().to_string();
        let store = TcpStore::connect_as(identity("5"), &address, TIME).unwrap();
        check_store_contract(&(Arc::new(store) as Arc<dyn Store>));
    }

    #[test]
    fn encrypted_tcp_store_carries_values_of_any_length() {
        let server = serve(identity("5"));
        let address = server.address().to_string();
        let store = TcpStore::connect_as(identity("5"), &address, TIME).unwrap();
        for length in [0, 1, 20_000, MAX_VALUE] {
            let value: Vec<u8> = (0..length).map(|at| at as u8).collect();
            store.set("value", &value).unwrap();
            assert!(store.get("value").unwrap().unwrap() == value, "{length}");
        }
    }

    /// Those that never prove that they are the job's would keep its own out.
    #[test]
    fn encrypted_tcp_store_disconnects_who_says_nothing() {
        let server = serve(identity("5"));
        let address = server.address().to_string();
        let store = TcpStore::connect_as(identity("5"), &address, TIME).unwrap();
        store.set("name", b"value").unwrap();
        for said in [&b""[..], &[22, 3, 1]] {
            let mut client = TcpStream::connect(server.address()).unwrap();
            client.write_all(said).unwrap();
            client.set_read_timeout(Some(TIME)).unwrap();
            assert!(matches!(client.read(&mut [0; 1]), Ok(0)), "{said:?}");
        }
        assert_eq!(store.get("name").unwrap().as_deref(), Some(&b"value"[..]));
    }

    #[test]
    fn encrypted_tcp_store_refuses_others_by_name() {
        let brief = Duration::from_millis(300);
        let connect = |ours, theirs| {
            let server = serve(theirs);
            let store = TcpStore::connect_as(ours, &server.address().to_string(), brief);
            store.and_then(|store| store.set("a", b"1")).unwrap_err().to_string()
        };
        let error = connect(identity("6"), identity("5"));
        assert!(error.contains("does not have this rank's job key"), "{error}");
        for (ours, theirs) in [(identity("5"), None), (None, identity("5"))] {
            let error = connect(ours, theirs);
            assert!(error.contains("EVENKEEL_ENCRYPTION is not the same"), "{error}");
        }
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

    /// A wait may be longer than the client's timeout, and the server looks only now and then which waits are over.
    #[test]
    fn tcp_store_waits_longer_than_its_timeout() {
        let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
        let brief = Duration::from_millis(60);
        let store = TcpStore::connect(&server.address().to_string(), brief).unwrap();
        assert_eq!(store.await_change("never", None, 5 * brief).unwrap(), None);
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
