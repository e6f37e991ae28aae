//! Reduction servers: every rank of a communicator sends its vector once, gets the sum back once, and the servers in
//! between do the adding. That moves half the bytes of a ring over each rank's link.
//!
//! [`Server`] serves any number of jobs and communicators at once. It goes over [`evenkeel_transport`]: one connection each way between a client and a server.
//!
//! A result depends only on what the ranks sent: parts are reduced in the ranks' order, all at once, in at least float32.
//! It is bit-identical whatever the sizes of pieces, the number of servers and threads, and the order of arrival. In a tree
//! of servers each leaf reduces its own ranks' parts, and the server above what the leaves bring: the same tree gives the
//! same bits.

mod above;
mod ascent;
mod budget;
mod group;
mod metrics;
mod pool;
mod reception;
mod server;
mod session;
mod timeline;

pub use server::{Options, Server, ServerError};
pub use session::{MIN_PIECE_BYTES, PIECE_BYTES};

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex whose data stays consistent even if a holder panicked.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
