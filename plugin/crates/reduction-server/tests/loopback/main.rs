//! Servers and clients over loopback, as threads of one process; the program itself as another
//! process.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails there")]

mod faults;
mod harness;
mod hostile;
mod leaving;
mod program;
mod sums;
mod tree;
