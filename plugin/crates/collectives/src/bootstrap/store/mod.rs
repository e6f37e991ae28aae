//! Where ranks find each other: small values under names, seen by all.

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

/// The longest name, in bytes.
pub const MAX_NAME: usize = 1024;
/// The longest value, in bytes.
pub const MAX_VALUE: usize = 16 << 20;

/// Small values under names. Each call sees what any rank's call did before. Calls may take as long as the network does, but
/// no longer than the store's own timeout.
pub trait Store: Send + Sync {
    /// Puts a value under a name, in the place of one that is there.
    ///
    /// # Errors
    /// [`ErrorKind::Store`] when the store cannot be reached or refuses.
    fn set(&self, name: &str, value: &[u8]) -> Result<()>;

    /// The value under a name, if there is one.
    ///
    /// # Errors
    /// As [`Store::set`].
    fn get(&self, name: &str) -> Result<Option<Vec<u8>>>;

    /// Adds to the number under a name, which begins at 0, and gives the sum. Others see it with `add` only.
    ///
    /// # Errors
    /// As [`Store::set`]; also when what is there is no number.
    fn add(&self, name: &str, amount: i64) -> Result<i64>;

    /// Removes a value. One that is not there is no error.
    ///
    /// # Errors
    /// As [`Store::set`].
    fn delete(&self, name: &str) -> Result<()>;

    /// Waits until all names have values and gives these, in the order of the names.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] naming what is not there when the time is over; or as [`Store::set`].
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

/// Rests between looks, longer from time to time.
pub(crate) struct Backoff {
    deadline: Instant,
    rest: Duration,
}

impl Backoff {
    pub(crate) fn until(deadline: Instant) -> Self {
        Self { deadline, rest: Duration::from_millis(1) }
    }

    /// Rests; false when the time is over.
    pub(crate) fn wait(&mut self) -> bool {
        let left = self.deadline.saturating_duration_since(Instant::now());
        thread::sleep(self.rest.min(left));
        self.rest = (self.rest * 3 / 2).min(Duration::from_millis(50));
        !left.is_zero()
    }
}

/// Opens a store by its address: `file:/path/of/a/folder`, `tcp://host:port` or `redis://host:port`.
///
/// # Errors
/// [`ErrorKind::Argument`] when it is none of these; [`ErrorKind::Store`] when the store cannot be reached within the time.
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
        "{address:?} is no store: file:/folder, tcp://host:port or redis://host:port"
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

/// What every store must do.
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
    // Whoever waits is given what comes later.
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
    fn addresses_say_which_store() {
        for wrong in ["", "redis", "http://h:1", "tcp://", "tcp://h", "redis://"] {
            assert!(open(wrong, Duration::from_millis(10)).is_err(), "{wrong}");
        }
    }
}
