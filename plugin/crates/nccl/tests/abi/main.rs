//! The library through its C tables, in the order in which NCCL's proxy calls them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails there")]

mod by_hand;
mod data;
mod faults;
mod from_c;
mod harness;
mod lifecycle;
mod peers;
mod symbols;
