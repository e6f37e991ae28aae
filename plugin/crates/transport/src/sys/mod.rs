//! System calls that no safe crate offers. All unsafe code of this crate is here and in
//! [`crate::memory`].

mod fork;
mod interfaces;
mod kernel_tls;
mod link_changes;
mod link_facts;
mod process;
mod socket;
mod tcp_info;
mod time;

pub use fork::{Owner, keep_from_children};
pub(crate) use interfaces::{
    InterfaceAddress, InterfaceInfo, Interfaces, LinkState, drops_by_route, in_one_subnet,
    interfaces,
};
pub(crate) use kernel_tls::{KernelTls, allow_kernel_tls, has_kernel_tls, set_kernel_keys};
pub(crate) use link_changes::LinkChanges;
pub(crate) use link_facts::Reach;
pub use process::random;
pub(crate) use process::{ThreadUsage, block_signals, thread_usage, uninterrupted};
pub(crate) use socket::{
    accept, discard, recv_with_header, send_frames, set_min_retransmit_time, set_port_at_connect,
    set_unsent_limit, unacknowledged,
};
#[cfg(test)]
pub(crate) use socket::{drop_longer_packets, option};
pub(crate) use tcp_info::{PathFigures, path_figures, path_info};
pub(crate) use time::{coarse_nanoseconds, coarse_time, processor_time};
