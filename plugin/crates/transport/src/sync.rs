//! Helpers for locks.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex whose data stays consistent even if a holder panicked.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
