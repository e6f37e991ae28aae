//! A store for the threads of one process.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use super::{Store, check, check_owner};
use evenkeel_transport::Owner;
use evenkeel_transport::sync::lock;

use crate::error::{Error, Result};

type Values = HashMap<String, Arc<[u8]>>;

/// A store for the threads of one process. Clones are the same store. A forked child cannot use it.
#[derive(Clone)]
pub struct MemoryStore {
    owner: Owner,
    values: Arc<Mutex<Values>>,
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self { owner: Owner::current(), values: Arc::default() }
    }
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// The value under a name, without a copy.
    pub(super) fn get_shared(&self, name: &str) -> Option<Arc<[u8]>> {
        lock(&self.values).get(name).cloned()
    }

    fn values(&self) -> Result<MutexGuard<'_, Values>> {
        check_owner(self.owner)?;
        Ok(lock(&self.values))
    }
}

/// Adds to a number that is stored as eight bytes, or is missing.
pub(super) fn add_to(value: Option<&[u8]>, name: &str, amount: i64) -> Result<i64> {
    let before = match value {
        None => 0,
        Some(value) => {
            let number = value.try_into().map(i64::from_le_bytes);
            number.map_err(|_| {
                Error::of_store(format!("{name:?} is not a number written by `add`"))
            })?
        }
    };
    Ok(before.wrapping_add(amount))
}

impl Store for MemoryStore {
    fn set(&self, name: &str, value: &[u8]) -> Result<()> {
        check(name, value)?;
        self.values()?.insert(name.to_owned(), value.into());
        Ok(())
    }

    fn get(&self, name: &str) -> Result<Option<Vec<u8>>> {
        Ok(self.values()?.get(name).map(|value| value.to_vec()))
    }

    fn add(&self, name: &str, amount: i64) -> Result<i64> {
        check(name, &[])?;
        let mut values = self.values()?;
        let sum = add_to(values.get(name).map(|value| &**value), name, amount)?;
        values.insert(name.to_owned(), sum.to_le_bytes().as_slice().into());
        Ok(sum)
    }

    fn set_once(&self, name: &str, value: &[u8]) -> Result<Vec<u8>> {
        check(name, value)?;
        let mut values = self.values()?;
        Ok(values.entry(name.to_owned()).or_insert_with(|| value.into()).to_vec())
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.values()?.remove(name);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::check_store_contract;
    use super::*;

    #[test]
    fn memory_store_fulfils_the_contract() {
        check_store_contract(&(Arc::new(MemoryStore::new()) as Arc<dyn Store>));
    }
}
