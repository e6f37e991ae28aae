//! A store in a Redis server.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use redis::{Client, Cmd, Connection, FromRedisValue, TlsCertificates};

use super::{Store, check, check_owner};
use evenkeel_transport::Owner;
use evenkeel_transport::sync::lock;

use crate::error::{Error, Result, format_duration};
use crate::job_stream;

/// A store in an existing Redis server. Values stay after all ranks have left: use a prefix for each job. A forked child cannot use
/// it.
pub struct RedisStore {
    owner: Owner,
    address: String,
    connection: Mutex<Connection>,
}

impl RedisStore {
    /// Connects to `redis://host:port`, or with TLS to `rediss://host:port`. No later call takes longer than the timeout. A
    /// server's certificate must be signed by the authority in the file `EVENKEEL_TLS_CA`, or without that by one that this host
    /// trusts.
    ///
    /// # Errors
    /// [`ErrorKind::Store`](crate::ErrorKind::Store) when the server cannot be reached in time,
    /// [`ErrorKind::Argument`](crate::ErrorKind::Argument) without TLS where `EVENKEEL_ENCRYPTION=required`.
    pub fn connect(address: &str, timeout: Duration) -> Result<Self> {
        let is_encrypted = job_stream::identity()?.is_some();
        let authority = std::env::var_os("EVENKEEL_TLS_CA").filter(|file| !file.is_empty());
        Self::connect_as(is_encrypted, authority.map(PathBuf::from).as_deref(), address, timeout)
    }

    fn connect_as(
        is_encrypted: bool,
        authority: Option<&Path>,
        address: &str,
        timeout: Duration,
    ) -> Result<Self> {
        if is_encrypted && !address.starts_with("rediss://") {
            return Err(Error::argument(format!(
                "{address} is in clear, and EVENKEEL_ENCRYPTION=required: use rediss://"
            )));
        }
        let failed = |error: redis::RedisError| {
            Error::of_store(format!(
                "no Redis at {address} within {}: {error}",
                format_duration(timeout)
            ))
        };
        let client = match authority {
            Some(file) if address.starts_with("rediss://") => {
                let root_cert = authority_pem(file).map(Some).map_err(|error| {
                    Error::argument(format!("EVENKEEL_TLS_CA: {}: {error}", file.display()))
                })?;
                Client::build_with_tls(address, TlsCertificates { client_tls: None, root_cert })
            }
            _ => Client::open(address),
        };
        let client = client.map_err(failed)?;
        let connection = client.get_connection_with_timeout(timeout).map_err(failed)?;
        connection.set_read_timeout(Some(timeout)).map_err(failed)?;
        connection.set_write_timeout(Some(timeout)).map_err(failed)?;
        let (owner, connection) = (Owner::current(), Mutex::new(connection));
        Ok(Self { owner, address: address.to_owned(), connection })
    }

    fn query<T: FromRedisValue>(&self, command: &Cmd) -> Result<T> {
        check_owner(self.owner)?;
        let result = command.query(&mut *lock(&self.connection));
        result.map_err(|error| Error::of_store(format!("Redis at {}: {error}", self.address)))
    }
}

/// The certificates in a file, or in the files of a folder.
fn authority_pem(authority: &Path) -> std::io::Result<Vec<u8>> {
    if !authority.is_dir() {
        return std::fs::read(authority);
    }
    let mut all = Vec::new();
    for entry in authority.read_dir()? {
        let path = entry?.path();
        if path.is_file() {
            all.extend(std::fs::read(path)?);
            all.push(b'\n');
        }
    }
    Ok(all)
}

impl Store for RedisStore {
    fn set(&self, name: &str, value: &[u8]) -> Result<()> {
        check(name, value)?;
        self.query(redis::cmd("SET").arg(name).arg(value))
    }

    fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.query(redis::cmd("GET").arg(name))
    }

    fn get_many(&self, names: &[String]) -> Result<Vec<Option<Vec<u8>>>> {
        if names.is_empty() {
            return Ok(vec![]);
        }
        self.query(redis::cmd("MGET").arg(names))
    }

    fn add(&self, name: &str, amount: i64) -> Result<i64> {
        check(name, &[])?;
        self.query(redis::cmd("INCRBY").arg(name).arg(amount))
    }

    fn set_once(&self, name: &str, value: &[u8]) -> Result<Vec<u8>> {
        check(name, value)?;
        let _: i64 = self.query(redis::cmd("SETNX").arg(name).arg(value))?;
        self.get(name)?.ok_or_else(|| Error::of_store(format!("{name:?} was deleted")))
    }

    fn delete(&self, name: &str) -> Result<()> {
        let _: i64 = self.query(redis::cmd("DEL").arg(name))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::check_store_contract;
    use super::*;
    use crate::test_support::{Authority, RedisServer};
    use std::sync::Arc;

    #[test]
    fn redis_store_fulfils_the_contract() {
        let server = RedisServer::start();
        let store = RedisStore::connect(&server.address(), Duration::from_secs(20)).unwrap();
        check_store_contract(&(Arc::new(store) as Arc<dyn Store>));
    }

    #[test]
    fn redis_store_over_tls_fulfils_the_contract() {
        let authority = Authority::new("ours");
        let server = RedisServer::start_with_tls(&authority);
        let address = server.address();
        let time = Duration::from_secs(20);
        let file = authority.file();
        let store = RedisStore::connect_as(true, Some(&file), &address, time).unwrap();
        check_store_contract(&(Arc::new(store) as Arc<dyn Store>));
        let others = Authority::new("theirs");
        let other = others.file();
        let error = RedisStore::connect_as(true, Some(&other), &address, time).err().unwrap();
        assert!(error.to_string().contains("certificate"), "{error}");
    }

    #[test]
    fn redis_store_in_clear_is_refused_where_encryption_is_required() {
        let address = "redis://127.0.0.1:1";
        let store = RedisStore::connect_as(true, None, address, Duration::from_secs(5));
        let error = store.err().unwrap().to_string();
        assert!(error.contains("rediss://") && error.contains("EVENKEEL_ENCRYPTION"), "{error}");
    }

    #[test]
    fn redis_store_error_names_the_server() {
        let error = RedisStore::connect("redis://127.0.0.1:1", Duration::from_secs(5)).err();
        assert!(error.unwrap().to_string().contains("127.0.0.1:1"));
    }
}
