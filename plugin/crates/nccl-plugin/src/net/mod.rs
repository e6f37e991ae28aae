//! `ncclNet`: the tables of the network, v6 to v12, and the functions in them.
//!
//! A function's suffix is the version of the table in which its signature appeared; one without a suffix serves all versions.

mod comm;
pub(crate) mod connect;
pub(crate) mod context;
pub(crate) mod device;
mod init;
pub(crate) mod memory;
mod request;
mod shared_comms;
mod vtable;

use std::ffi::CStr;

/// The network's name, which users can select with `NCCL_NET`.
pub(crate) const NAME: &CStr = c"Evenkeel";
