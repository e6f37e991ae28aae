//! The commands as users run them: real processes, the real plugin.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails there")]

mod allreduce;
mod collective;
mod cut;
mod flags;
mod hosts;
mod interfaces;
mod ipv6;
mod lost;
mod metrics;
mod net;
mod process;
mod rdma;
mod record;
mod reduction;
mod scale;
mod security;
mod soak;
