//! Collective operations between processes on CPUs, over Evenkeel's transport.
//!
//! A [`Group`] is a set of processes, or threads, each with a number: its rank. The ranks find each other through a [`Store`].
//! Their [`TransportKind`] is how they reach each other: TCP, TCP with TLS, shared memory on one host, or a mix. All ranks of a
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
//! * **Buffers** are bytes, of any alignment; [`Group::allreduce_of`] takes numbers. Reductions are NCCL's, of every type and
//!   operation, or [custom](Reduction::custom). The result of an all-reduce is bitwise the same on all ranks.
//! * **GPUs**: [`Cuda::staged`] copies a buffer of a GPU's memory to the host for an operation and back. Between GPUs NCCL is faster.
//! * **Nonblocking operations**: [`Group::start`] returns a [`Request`] to test or await. The operation makes progress by itself.
//! * **Concurrent operations**: operations with different [tags](Call::tag) do not wait for each other. Call them from different
//!   threads. Operations with the same tag must be called in the same order on all ranks, one at a time.
//! * **One-sided access** to the memory of other ranks goes through a [`Window`].
//! * **Failures**: an operation in which nothing moves for its [timeout](Call::timeout) returns an [`Error`] that names the awaited
//!   ranks. A rank whose process was killed, is stopped, or is behind a cut link is named by all others within that time, also by
//!   ranks that exchange nothing with it. Afterwards the group cannot be used ([`Error::is_group_usable`]).
//! * **Going on**: the ranks that are left, and newcomers, get the group that follows by [`Group::reconfigure`].
//! * **The flight recorder** keeps the last calls of the process, for a look at a hang: [`FlightRecord`].
//! * **Leaving** is no failure. A rank that drops its group, and the groups made of it, waits up to a second until the others have
//!   what it sent. They continue as long as they need nothing more from it.
//! * **Waiting** polls for two milliseconds, yielding the processor, and then sleeps.

mod accept;
mod algorithms;
mod backoff;
mod bootstrap;
mod codec;
mod cuda;
mod error;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod group;
mod job_stream;
mod links;
mod liveness;
mod memory;
mod recorder;
#[cfg(test)]
mod test_support;
mod wait;

pub use algorithms::algorithm::Algorithm;
pub use algorithms::reduction::{Element, Reduction};
pub use bootstrap::launcher_env::Launch;
pub use bootstrap::store;
pub use bootstrap::store::{
    FileStore, MemoryStore, PrefixStore, RedisStore, Store, TcpStore, TcpStoreServer,
};
pub use cuda::Cuda;
pub use error::{Error, ErrorKind, Result};
pub use evenkeel_reduction_kernels::{DataType, Op};
pub use group::call::timeout_from_seconds;
pub use group::{Call, Group, Reconfigure, Request, Sequence, Window};
pub use links::tcp::Tcp;
pub use links::tls::Tls;
pub use links::transport_kind::{Auto, TransportKind};
pub use recorder::{
    FlightRecord, RankRecord, RecordedCall, RecordedFailure, RecordedGroup, on_failure, on_request,
};
