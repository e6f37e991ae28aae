//! RDMA verbs: devices, memory regions and queue pairs of rdma-core's `libibverbs`. The library is
//! loaded at run time, so programs that use this crate also start where it is missing.
//!
//! The crate transcribes the part of the C interface that it needs, some 25 functions and a dozen
//! structures. Existing bindings need cmake, libclang or the library itself at build time, or do
//! not start without it. All unsafe code here is about that interface.
//!
//! The crate's interface is safe, except for the registration of memory: a peer that has a region's
//! key may read and write the region. Memory that devices and peers access is a pointer and a
//! length here, never a reference.

mod completion_queue;
mod context;
mod ffi;
mod memory;
mod pages;
mod port;
mod queue_pair;

use std::io;

pub use completion_queue::{CompletionQueue, CompletionStatus, WorkCompletion};
pub use context::{AsyncEvent, Context, devices};
pub use ffi::fork_protection;
pub use memory::{Access, MemoryRange, MemoryRegion, StagingBuffer};
pub use port::{Gid, GidKind, Port, gids};
pub use queue_pair::{ConnectAttributes, QueuePair, WriteRequest, WriteSource};

/// Why RDMA is not available, or why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// rdma-core is not installed.
    #[error("libibverbs.so.1 cannot be loaded: {0}")]
    NoLibrary(String),
    /// A call failed.
    #[error("{what}: {error}")]
    Call {
        /// The call and its object.
        what: String,
        /// The error number that it returned.
        error: io::Error,
    },
}

impl Error {
    /// From errno, after a call failed.
    fn last(what: impl Into<String>) -> Self {
        Self::Call { what: what.into(), error: io::Error::last_os_error() }
    }

    /// From the error number that a call returned.
    fn code(what: impl Into<String>, code: i32) -> Self {
        Self::Call { what: what.into(), error: io::Error::from_raw_os_error(code) }
    }
}
