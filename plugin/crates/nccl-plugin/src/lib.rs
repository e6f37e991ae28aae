//! `libnccl-net-evenkeel.so`: NCCL's network plugin tables, v6 to v12, over [`evenkeel_transport`].
//!
//! [`tables`] holds the C tables of the network and their functions, which only translate arguments.
//! [`plugin`] is what they all share. [`collnet`] and [`collective`] are the same for reduction
//! servers. [`logger`] brings log lines to NCCL.
//!
//! Nothing happens when the library is loaded: no thread, no file, no socket.

mod collective;
mod collnet;
mod failure;
mod logger;
mod plugin;
mod tables;
