//! A store in a Redis server.

use std::sync::Mutex;
use std::time::Duration;

use redis::{Client, Cmd, Connection, FromRedisValue};

use super::{Store, check};
use evenkeel_transport::sync::lock;

use crate::error::{Error, Result, format_duration};

/// A store in an existing Redis server. Values stay after all ranks have left: use a prefix for each job.
pub struct RedisStore {
    address: String,
    connection: Mutex<Connection>,
}

impl RedisStore {
    /// Connects to `redis://host:port`. No later call takes longer than the timeout.
    ///
    /// # Errors
    /// [`ErrorKind::Store`](crate::ErrorKind::Store) when the server cannot be reached in time.
    pub fn connect(address: &str, timeout: Duration) -> Result<Self> {
        let failed = |error: redis::RedisError| {
            Error::of_store(format!(
                "no Redis at {address} within {}: {error}",
                format_duration(timeout)
            ))
        };
        let client = Client::open(address).map_err(failed)?;
        let connection = client.get_connection_with_timeout(timeout).map_err(failed)?;
        connection.set_read_timeout(Some(timeout)).map_err(failed)?;
        connection.set_write_timeout(Some(timeout)).map_err(failed)?;
        Ok(Self { address: address.to_owned(), connection: Mutex::new(connection) })
    }

    fn query<T: FromRedisValue>(&self, command: &Cmd) -> Result<T> {
        let result = command.query(&mut *lock(&self.connection));
        result.map_err(|error| Error::of_store(format!("Redis at {}: {error}", self.address)))
    }
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
    use crate::test_support::RedisServer;
    use std::sync::Arc;

    #[test]
    fn redis_store_fulfils_the_contract() {
        let server = RedisServer::start();
        let store = RedisStore::connect(&server.address(), Duration::from_secs(20)).unwrap();
        check_store_contract(&(Arc::new(store) as Arc<dyn Store>));
    }

    #[test]
    fn redis_store_error_names_the_server() {
        let error = RedisStore::connect("redis://127.0.0.1:1", Duration::from_secs(5)).err();
        assert!(error.unwrap().to_string().contains("127.0.0.1:1"));
    }
}
