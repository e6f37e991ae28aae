//! The library through its C tables, in the order in which NCCL's proxy calls them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails there")]

mod abort;
mod by_hand;
mod collnet;
mod data;
mod faults;
mod from_c;
mod garbled;
mod gpu;
mod harness;
mod hostile;
mod lifecycle;
mod peers;
mod symbols;
mod traffic;
