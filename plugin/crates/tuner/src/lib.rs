//! Chooses among NCCL's algorithms and protocols, for a network whose bandwidth and latency were
//! measured.
//!
//! NCCL estimates times from the speeds that devices report, and with the latencies of InfiniBand.
//! [`cost`] estimates them from measurements, and [`choice`] compares the two. Everything here is a
//! pure function of values that are the same on all ranks: ranks that chose differently would wait
//! for each other for ever.

mod algorithm;
mod choice;
mod cost;
mod settings;

pub use algorithm::{Algorithm, Collective, Protocol};
pub use choice::{IGNORED, choose, chunk_bytes};
pub use cost::{Network, Servers, seconds};
pub use settings::{SETTINGS, Settings};
