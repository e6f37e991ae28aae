//! The reduction server: every rank of a communicator sends its vector once and receives the sum
//! once. The server does the aggregation.
//!
//! [`Server`] serves any number of jobs and communicators at once. Clients use
//! [`evenkeel_reduction`].

mod accept;
mod communicator;
mod context;
mod key;
mod limits;
mod memory_budget;
mod metrics;
mod pool;
mod registry;
mod server;
mod timeline;
mod upstream;

pub use limits::{MIN_PIECE_BYTES, PIECE_BYTES};
pub use server::{Server, ServerError, ServerOptions};
