//! Collective operations between processes: what Gloo is used for, over Evenkeel's transport.
//!
//! A [`Group`] is a set of processes (or threads) with numbers, the ranks. They find each other through a [`Store`] and reach
//! each other by TCP, encrypted if that is wanted, or, on one host, through shared memory: that is their [`TransportKind`]. All ranks of a
//! group call the same operations in the same order:
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use evenkeel_collectives::{Call, Group, MemoryStore, Op, TransportKind};
//!
//! let store = MemoryStore::new();
//! let ranks: Vec<_> = (0..3)
//!     .map(|rank| {
//!         let store = store.clone();
//!         std::thread::spawn(move || {
//!             let group = Group::join(&store, rank, 3, &TransportKind::SharedMemory, Duration::from_secs(30))?;
//!             let mut values = [rank as f32, 1.0];
//!             group.allreduce_of(&mut values, Op::Sum, &Call::default())?;
//!             Ok::<_, evenkeel_collectives::Error>(values)
//!         })
//!     })
//!     .collect();
//! for rank in ranks {
//!     assert_eq!(rank.join().unwrap().unwrap(), [3.0, 3.0]);
//! }
//! ```
//!
//! * **Buffers** are bytes, of any alignment; [`Group::allreduce_of`] takes numbers. Reductions are those of NCCL, every type and
//!   operation, or [your own](Reduction::custom). The result of an all-reduce is the same on all ranks, to the bit.
//! * **GPUs**: [`Cuda::staged`] brings a GPU's memory to the host for an operation. Between GPUs NCCL is faster.
//! * **Several operations at a time**: operations with different [tags](Call::tag) do not wait for each other; call them
//!   from different threads. Those with the same tag must be called in the same order everywhere, one at a time.
//! * **One-sided** access to memory of other ranks is what a [`Window`] is for.
//! * **Failures**: an operation in which nothing moves for its [timeout](Call::timeout) ends with an [`Error`] that names the ranks
//!   that were waited for. A rank whose process was killed, is stopped, or is behind a cut link is named by all others within
//!   that time, also by those that do not talk to it. Afterwards the group cannot be used, and says so
//!   ([`Error::is_group_usable`]); make another one.
//! * **Leaving** is no failure: a rank that drops its group, and the groups made of it, waits up to a second until the others
//!   have what it sent; they go on as long as they need nothing more from it.
//! * **Waiting** costs a processor for two milliseconds, which it yields to whoever wants it, and then nothing.

mod accept;
mod algorithms;
mod bootstrap;
mod codec;
mod cuda;
mod error;
mod group;
mod links;
mod liveness;
mod memory;
#[cfg(test)]
mod testing;
mod wait;

use std::fs::File;
use std::io::{self, Read};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub use algorithms::algorithm::Algorithm;
pub use algorithms::reduction::{Element, Reduction};
pub use bootstrap::env_join::seconds;
pub use bootstrap::launcher_env::Launch;
pub use bootstrap::store;
pub use bootstrap::store::{
    FileStore, MemoryStore, PrefixStore, RedisStore, Store, TcpStore, TcpStoreServer,
};
pub use cuda::Cuda;
pub use error::{Error, ErrorKind, Result};
pub use evenkeel_reduction_kernels::{DataType, Op};
pub use group::{Call, Group, Window};
pub use links::tcp::Tcp;
pub use links::tls::Tls;
pub use links::transport_kind::{Auto, TransportKind};

/// Locks a mutex whose data stays consistent even if a holder panicked.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A random number from the kernel.
pub(crate) fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}
