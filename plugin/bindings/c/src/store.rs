//! Stores.

use std::ffi::c_char;
use std::sync::Arc;

use evenkeel_collectives::{self as collectives, timeout_from_seconds};

use crate::last_error::guard;
use crate::pointers;
use crate::status::Status;

/// A store, in which ranks find each other.
pub struct Store(pub(crate) Arc<dyn collectives::Store>);

/// Opens a store by its address: "file:/path/of/a/folder", "tcp://host:port" (served by evenkeel-run or
/// evenkeel_group_join_launched) or "redis://host:port". Waits for its server for up to `timeout` seconds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_store_open(
    address: *const c_char,
    timeout: f64,
    store: *mut *mut Store,
) -> Status {
    guard(|| {
        // SAFETY: the header requires a string.
        let address = unsafe { pointers::string("address", address) }?;
        let opened = collectives::store::open(address, timeout_from_seconds(timeout)?)?;
        // SAFETY: the header requires a pointer to write to.
        unsafe { pointers::return_object(store, Store(opened)) }
    })
}

/// Creates a store in this process's memory, for ranks that are threads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_store_memory(store: *mut *mut Store) -> Status {
    guard(|| {
        let made = Store(Arc::new(collectives::MemoryStore::new()));
        // SAFETY: the header requires a pointer to write to.
        unsafe { pointers::return_object(store, made) }
    })
}

/// Creates a store of the names that begin with `prefix` and a slash in another store, so that several jobs or groups can share
/// that store. The other store may be freed first.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_store_prefix(
    store: *const Store,
    prefix: *const c_char,
    part: *mut *mut Store,
) -> Status {
    guard(|| {
        // SAFETY: the header requires a store and a string.
        let (store, prefix) = unsafe {
            (pointers::deref_object("store", store)?, pointers::string("prefix", prefix)?)
        };
        let made = collectives::PrefixStore::new(Arc::clone(&store.0), prefix);
        // SAFETY: the header requires a pointer to write to.
        unsafe { pointers::return_object(part, Store(Arc::new(made))) }
    })
}

/// Frees a store. Groups that have joined through it do not need it any more. NULL is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_store_free(store: *mut Store) {
    guard(|| {
        // SAFETY: the header requires a store that is not used.
        unsafe { pointers::free_object(store) };
        Ok(())
    });
}
