//! A store within another store, under a prefix.

use std::sync::Arc;
use std::time::Duration;

use super::Store;
use crate::error::Result;

/// The names of another store that begin with a prefix, so that several jobs or groups can share a store.
#[derive(Clone)]
pub struct PrefixStore {
    store: Arc<dyn Store>,
    prefix: String,
}

impl PrefixStore {
    /// The part of `store` whose names begin with `prefix` and a slash.
    pub fn new(store: Arc<dyn Store>, prefix: &str) -> Self {
        Self { store, prefix: prefix.to_owned() }
    }

    fn name(&self, name: &str) -> String {
        if name.is_empty() { String::new() } else { format!("{}/{name}", self.prefix) }
    }
}

impl Store for PrefixStore {
    fn set(&self, name: &str, value: &[u8]) -> Result<()> {
        self.store.set(&self.name(name), value)
    }

    fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.store.get(&self.name(name))
    }

    fn get_many(&self, names: &[String]) -> Result<Vec<Option<Vec<u8>>>> {
        let names: Vec<_> = names.iter().map(|name| self.name(name)).collect();
        self.store.get_many(&names)
    }

    fn await_change(
        &self,
        name: &str,
        known: Option<&[u8]>,
        timeout: Duration,
    ) -> Result<Option<Vec<u8>>> {
        self.store.await_change(&self.name(name), known, timeout)
    }

    fn add(&self, name: &str, amount: i64) -> Result<i64> {
        self.store.add(&self.name(name), amount)
    }

    fn set_once(&self, name: &str, value: &[u8]) -> Result<Vec<u8>> {
        self.store.set_once(&self.name(name), value)
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.store.delete(&self.name(name))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{MemoryStore, check_store_contract};
    use super::*;

    #[test]
    fn prefix_store_is_isolated_from_its_parent() {
        let whole: Arc<dyn Store> = Arc::new(MemoryStore::new());
        let part: Arc<dyn Store> = Arc::new(PrefixStore::new(Arc::clone(&whole), "job-1"));
        whole.set("a", b"other").unwrap();
        check_store_contract(&part);
        assert_eq!(whole.get("a").unwrap().as_deref(), Some(&b"other"[..]));
        assert_eq!(whole.get("job-1/x").unwrap().as_deref(), Some(&b"1"[..]));
    }
}
