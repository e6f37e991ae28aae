//! Stores, in which ranks find each other: small values under names, visible to all ranks.

mod file;
mod memory;
mod prefix;
mod redis;
mod tcp;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result, format_duration};

pub use file::FileStore;
pub use memory::MemoryStore;
pub use prefix::PrefixStore;
pub use redis::RedisStore;
pub use tcp::{TcpStore, TcpStoreServer};

/// Maximum length of a name in bytes.
pub const MAX_NAME: usize = 1024;
/// Maximum length of a value in bytes.
pub const MAX_VALUE: usize = 16 << 20;

/// Small values under names. Each call sees the effects of every earlier call of any rank. Calls may block on the network, but no
/// longer than the store's own timeout.
pub trait Store: Send + Sync {
    /// Stores a value under a name and replaces an existing one.
    ///
    /// # Errors
    /// [`ErrorKind::Store`] when the store cannot be reached or refuses the request.
    fn set(&self, name: &str, value: &[u8]) -> Result<()>;

    /// The value under a name, if there is one.
    ///
    /// # Errors
    /// As [`Store::set`].
    fn get(&self, name: &str) -> Result<Option<Vec<u8>>>;

    /// Adds to the number under a name, which starts at 0, and returns the sum. Other ranks read it with `add` only.
    ///
    /// # Errors
    /// As [`Store::set`]; also when the value is not a number.
    fn add(&self, name: &str, amount: i64) -> Result<i64>;

    /// Stores a value under a name that has none, and returns the value that is there afterwards: of all ranks that call this, the
    /// first one decides. Other calls must not store or delete a value of this name.
    ///
    /// # Errors
    /// As [`Store::set`].
    fn set_once(&self, name: &str, value: &[u8]) -> Result<Vec<u8>>;

    /// Deletes a value. A missing value is no error.
    ///
    /// # Errors
    /// As [`Store::set`].
    fn delete(&self, name: &str) -> Result<()>;

    /// Waits until all names have values and returns them, in the order of the names.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] naming the missing values; otherwise as [`Store::set`].
    fn wait(&self, names: &[String], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let deadline = Instant::now() + timeout;
        let mut found: Vec<Option<Vec<u8>>> = vec![None; names.len()];
        let mut backoff = Backoff::until(deadline);
        loop {
            for (place, name) in found.iter_mut().zip(names) {
                if place.is_none() {
                    *place = self.get(name)?;
                }
            }
            if found.iter().all(Option::is_some) {
                return Ok(found.into_iter().flatten().collect());
            }
            if !backoff.wait() {
                let missing = names.iter().zip(&found).filter(|(_, value)| value.is_none());
                let missing: Vec<_> = missing.map(|(name, _)| format!("{name:?}")).collect();
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!(
                        "not in the store within {}: {}",
                        format_duration(timeout),
                        missing.join(", ")
                    ),
                ));
            }
        }
    }
}

/// Exponential backoff between polls, up to a deadline.
pub(crate) struct Backoff {
    deadline: Instant,
    delay: Duration,
}

impl Backoff {
    pub(crate) fn until(deadline: Instant) -> Self {
        Self { deadline, delay: Duration::from_millis(1) }
    }

    /// The time until the deadline.
    pub(crate) fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Waits before the next poll. Returns false once the deadline has passed.
    pub(crate) fn wait(&mut self) -> bool {
        let left = self.left();
        thread::sleep(self.delay.min(left));
        self.delay = (self.delay * 3 / 2).min(Duration::from_millis(50));
        !left.is_zero()
    }
}

/// Opens a store by its address: `file:/path/of/a/folder`, `tcp://host:port` or `redis://host:port`.
///
/// # Errors
/// [`ErrorKind::Argument`] when it is none of these; [`ErrorKind::Store`] when the store cannot be reached in time.
pub fn open(address: &str, timeout: Duration) -> Result<Arc<dyn Store>> {
    if let Some(folder) = address.strip_prefix("file:") {
        return Ok(Arc::new(FileStore::open(folder)?));
    }
    if let Some(server) = address.strip_prefix("tcp://") {
        return Ok(Arc::new(TcpStore::connect(server, timeout)?));
    }
    if address.starts_with("redis://") {
        return Ok(Arc::new(RedisStore::connect(address, timeout)?));
    }
    Err(Error::argument(format!(
        "{address:?} is not a store: use file:/folder, tcp://host:port or redis://host:port"
    )))
}

fn check(name: &str, value: &[u8]) -> Result<()> {
    if name.is_empty() || name.len() > MAX_NAME {
        return Err(Error::argument(format!("a name of {} bytes: 1 to {MAX_NAME}", name.len())));
    }
    if value.len() > MAX_VALUE {
        return Err(Error::argument(format!(
            "a value of {} bytes: at most {MAX_VALUE}",
            value.len()
        )));
    }
    Ok(())
}

/// Checks the contract that every store must fulfil.
#[cfg(test)]
pub(crate) fn check_store_contract(store: &Arc<dyn Store>) {
    assert_eq!(store.get("a").unwrap(), None);
    store.set("a", b"one").unwrap();
    store.set("a", b"\0two\r\n").unwrap();
    assert_eq!(store.get("a").unwrap().as_deref(), Some(&b"\0two\r\n"[..]));
    store.set("a/b:c %2F\u{e9}", b"").unwrap();
    assert_eq!(store.get("a/b:c %2F\u{e9}").unwrap().as_deref(), Some(&b""[..]));
    assert_eq!(store.get("a/b").unwrap(), None);
    store.delete("a").unwrap();
    store.delete("a").unwrap();
    assert_eq!(store.get("a").unwrap(), None);
    let large = vec![0xa5; 3 << 20];
    store.set("large", &large).unwrap();
    assert!(store.get("large").unwrap() == Some(large));
    assert!(store.set("", b"").is_err() && store.set(&"x".repeat(2000), b"").is_err());
    assert_eq!(store.add("n", 5).unwrap(), 5);
    assert_eq!(store.add("n", -7).unwrap(), -2);
    let each = 50;
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..each {
                    store.add("m", 1).unwrap();
                }
            });
        }
    });
    assert_eq!(store.add("m", 0).unwrap(), 4 * each);
    let decided: Vec<_> = thread::scope(|scope| {
        let ranks: Vec<_> = (0..8u8)
            .map(|rank| scope.spawn(move || store.set_once("once", &[rank]).unwrap()))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(decided.iter().all(|value| *value == decided[0] && value.len() == 1));
    assert_eq!(store.set_once("once", b"").unwrap(), decided[0]);
    assert_eq!(store.get("once").unwrap().as_ref(), Some(&decided[0]));
    // `wait` returns values that are stored later.
    thread::scope(|scope| {
        let names = ["x".to_owned(), "y".to_owned()];
        let waiting = scope.spawn(move || store.wait(&names, Duration::from_secs(20)));
        store.set("y", b"2").unwrap();
        store.set("x", b"1").unwrap();
        assert_eq!(waiting.join().unwrap().unwrap(), [b"1", b"2"]);
    });
    let names = ["x".to_owned(), "never".to_owned()];
    let error = store.wait(&names, Duration::from_millis(20)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(error.to_string().contains("\"never\"") && !error.to_string().contains("\"x\""));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn store_addresses_are_checked() {
        for wrong in ["", "redis", "http://h:1", "tcp://", "tcp://h", "redis://"] {
            assert!(open(wrong, Duration::from_millis(10)).is_err(), "{wrong}");
        }
    }
}
