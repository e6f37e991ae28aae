//! `libevenkeel`: [`evenkeel_collectives`] for programs in C. `include/evenkeel.h` is generated from these files, and their comments
//! are its manual.
//!
//! The functions only convert arguments. Every call returns a [`status`] and records the thread's [`last_error`].
#![expect(
    clippy::missing_safety_doc,
    reason = "the header states what callers must guarantee once, at its top (cbindgen.toml)"
)]

pub mod call;
pub mod collectives;
mod error;
pub mod flight_recorder;
pub mod group;
pub mod last_error;
pub mod point_to_point;
mod pointers;
pub mod reductions;
pub mod request;
pub mod status;
pub mod store;
pub mod version;
