//! Stores, in which ranks find each other: small values under names, visible to all ranks.

mod file;
mod memory;
mod prefix;
mod redis;
mod tcp;

use std::sync::Arc;
use std::time::{Duration, Instant};

use evenkeel_transport::Owner;

use crate::backoff::Backoff;
use crate::error::{Error, ErrorKind, Result, format_duration};

pub use file::FileStore;
pub use memory::MemoryStore;
pub use prefix::PrefixStore;
pub use redis::RedisStore;
pub use tcp::{TcpStore, TcpStoreServer};
#[cfg(feature = "fuzzing")]
pub(crate) use tcp::{answer, decode_values};

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

    /// The values under several names, in their order. A store that can answers in one request.
    ///
    /// # Errors
    /// As [`Store::set`].
    fn get_many(&self, names: &[String]) -> Result<Vec<Option<Vec<u8>>>> {
        names.iter().map(|name| self.get(name)).collect()
    }

    /// Waits until the value under a name is another than the known one, where `None` stands for no value. Returns the value that is
    /// there then, and after the timeout the one that is there still. A store that can answers when the value changes; others are
    /// polled.
    ///
    /// # Errors
    /// As [`Store::set`].
    fn await_change(
        &self,
        name: &str,
        known: Option<&[u8]>,
        timeout: Duration,
    ) -> Result<Option<Vec<u8>>> {
        let mut backoff = Backoff::until(Instant::now() + timeout);
        loop {
            let value = self.get(name)?;
            if value.as_deref() != known || !backoff.wait() {
                return Ok(value);
            }
        }
    }

    /// Waits until all names have values and returns them, in the order of the names.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] naming the missing values; otherwise as [`Store::set`].
    fn wait(&self, names: &[String], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let deadline = Instant::now() + timeout;
        let mut found = vec![];
        for name in names {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.await_change(name, None, left)? {
                Some(value) => found.push(value),
                None => break,
            }
        }
        if found.len() == names.len() {
            return Ok(found);
        }
        let names = &names[found.len()..];
        let later = self.get_many(names)?;
        // The first one was missing until the end.
        let missing = names.iter().zip(&later).enumerate();
        let missing = missing.filter(|(at, (_, value))| *at == 0 || value.is_none());
        let missing: Vec<_> = missing.map(|(_, (name, _))| format!("{name:?}")).collect();
        Err(Error::new(
            ErrorKind::Timeout,
            format!("not in the store within {}: {}", format_duration(timeout), missing.join(", ")),
        ))
    }
}

/// Opens a store by its address: `file:/path/of/a/folder`, `tcp://host:port`, `redis://host:port`, or with TLS
/// `rediss://host:port`.
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
    if address.starts_with("redis://") || address.starts_with("rediss://") {
        return Ok(Arc::new(RedisStore::connect(address, timeout)?));
    }
    Err(Error::argument(format!(
        "{address:?} is not a store: use file:/folder, tcp://host:port, redis://host:port or rediss://host:port"
    )))
}

/// A forked child shares its parent's connections, and has a copy of its memory. What it would write, others would not read.
fn check_owner(owner: Owner) -> Result<()> {
    if owner.is_parent() {
        return Err(Error::of_store(
            "this process was forked from the one that opened the store: open one here, or call from the parent",
        ));
    }
    Ok(())
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
    use std::thread;

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
    let largest = vec![0x5a; MAX_VALUE];
    store.set("largest", &largest).unwrap();
    let names = ["largest", "large", "largest", "none"].map(str::to_owned);
    let found = store.get_many(&names).unwrap();
    let lengths = found.iter().map(|value| value.as_ref().map(Vec::len)).collect::<Vec<_>>();
    assert_eq!(lengths, [Some(MAX_VALUE), Some(3 << 20), Some(MAX_VALUE), None]);
    assert!(found[2].as_ref() == Some(&largest));
    store.delete("largest").unwrap();
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
    let several = ["y".to_owned(), "never".to_owned(), "x".to_owned()];
    let (one, two) = (Some(b"1".to_vec()), Some(b"2".to_vec()));
    assert_eq!(store.get_many(&several).unwrap(), [two.clone(), None, one.clone()]);
    assert!(store.get_many(&[]).unwrap().is_empty());
    // `await_change` returns at once what is not known, later what changes, and at the end what does not.
    let long = Duration::from_secs(20);
    assert_eq!(store.await_change("y", Some(b"1"), long).unwrap(), two);
    assert_eq!(store.await_change("y", None, long).unwrap(), two);
    assert_eq!(store.await_change("y", Some(b"2"), Duration::from_millis(20)).unwrap(), two);
    assert_eq!(store.await_change("never", None, Duration::ZERO).unwrap(), None);
    thread::scope(|scope| {
        let changed: Vec<_> = (0..8)
            .map(|_| scope.spawn(move || store.await_change("y", Some(b"2"), long).unwrap()))
            .collect();
        let deleted = scope.spawn(move || store.await_change("x", Some(b"1"), long).unwrap());
        store.set("y", b"2").unwrap();
        store.set("y", b"3").unwrap();
        store.delete("x").unwrap();
        for changed in changed {
            assert_eq!(changed.join().unwrap(), Some(b"3".to_vec()));
        }
        assert_eq!(deleted.join().unwrap(), None);
    });
    store.set("x", b"1").unwrap();
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
