//! Tests of the library and its header.

mod header;
mod programs;
