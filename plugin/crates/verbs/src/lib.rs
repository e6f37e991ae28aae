//! RDMA verbs: devices, memory and queue pairs of rdma-core's `libibverbs`, which is looked for at run time, so that what
//! is built with this crate also loads where the library is missing.
//!
//! The crate transcribes the part of the library's C interface that it needs, some 25 functions and a dozen structures,
//! rather than building on a binding: those want cmake, libclang or the library itself when they are built, or do not start
//! without it. All of its unsafe code is about that interface. What it offers is safe, but for the registration of memory:
//! whoever has a key may read and write what is registered. As in the transport's module of system calls, memory that
//! devices and peers touch is a pointer and a length here, never a reference.

mod context;
mod ffi;
mod memory;
mod port;
mod queue;

use std::io;

pub use context::{Context, Event, devices};
pub use memory::{Access, MemoryRegion, Span, StagingBuffer};
pub use port::{Gid, GidKind, Port, gids};
pub use queue::{Completion, CompletionQueue, Outcome, Payload, Peer, QueuePair, Write};

/// Why there is no RDMA, or why something of it failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// rdma-core is not installed.
    #[error("libibverbs.so.1 cannot be loaded: {0}")]
    NoLibrary(String),
    /// A call failed.
    #[error("{what}: {error}")]
    Call {
        /// Which call, and for what.
        what: String,
        /// The error number that it gave.
        error: io::Error,
    },
}

impl Error {
    /// A call failed that says why in errno.
    fn last(what: impl Into<String>) -> Self {
        Self::Call { what: what.into(), error: io::Error::last_os_error() }
    }

    /// A call gave this error number.
    fn code(what: impl Into<String>, code: i32) -> Self {
        Self::Call { what: what.into(), error: io::Error::from_raw_os_error(code) }
    }
}
