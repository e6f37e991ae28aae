//! Where ranks find each other.

use std::ffi::c_char;
use std::sync::Arc;

use evenkeel_collectives::{self as collectives, timeout_from_seconds};

use crate::last_error::guard;
use crate::pointers;
use crate::status::Status;

/// Where ranks find each other.
pub struct Store(pub(crate) Arc<dyn collectives::Store>);

/// Opens a store by its address: "file:/path/of/a/folder", "tcp://host:port" (as evenkeel-run and evenkeel_group_join_launched
/// serve it) or "redis://host:port"; waits for its server no longer than `timeout` seconds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_store_open(
    address: *const c_char,
    timeout: f64,
    store: *mut *mut Store,
) -> Status {
    guard(|| {
        // SAFETY: the header asks for a text.
        let address = unsafe { pointers::text("address", address) }?;
        let opened = collectives::store::open(address, timeout_from_seconds(timeout)?)?;
        // SAFETY: the header asks for a place to write.
        unsafe { pointers::give(store, Store(opened)) }
    })
}

/// Makes a store in this process's memory, for ranks that are threads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_store_memory(store: *mut *mut Store) -> Status {
    guard(|| {
        let made = Store(Arc::new(collectives::MemoryStore::new()));
        // SAFETY: the header asks for a place to write.
        unsafe { pointers::give(store, made) }
    })
}

/// The part of a store whose names begin with `prefix` and a slash: several jobs, or groups, can share a store so. The first
/// store may be freed before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_store_prefix(
    store: *const Store,
    prefix: *const c_char,
    part: *mut *mut Store,
) -> Status {
    guard(|| {
        // SAFETY: the header asks for a store and a text.
        let (store, prefix) =
            unsafe { (pointers::object("store", store)?, pointers::text("prefix", prefix)?) };
        let made = collectives::PrefixStore::new(Arc::clone(&store.0), prefix);
        // SAFETY: the header asks for a place to write.
        unsafe { pointers::give(part, Store(Arc::new(made))) }
    })
}

/// Frees a store. Groups that have met in it do not need it. NULL is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn evenkeel_store_free(store: *mut Store) {
    guard(|| {
        // SAFETY: the header asks for a store that nobody uses.
        unsafe { pointers::take(store) };
        Ok(())
    });
}
