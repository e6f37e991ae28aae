//! `ncclCollNet`: all-reduce by reduction servers, v6 to v12.
//!
//! Devices are those of the network's tables, in the same order and with the same properties, as NCCL requires. As in
//! [`crate::net`], a function's suffix is the version of the table in which its signature appeared.

mod calls;
mod comm;
mod vtable;
