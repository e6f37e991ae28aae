//! The library and its header as C programs see them.

mod header;
mod programs;
