//! `libevenkeel`: [`evenkeel_collectives`] for programs in C. `include/evenkeel.h` is made of these files, and their comments are
//! its manual.
//!
//! The functions only translate arguments. [`status`] is how they fail, [`pointers`] what they are given.
#![expect(
    clippy::missing_safety_doc,
    reason = "what callers must see to is said once, at the top of the header (cbindgen.toml)"
)]

pub mod group;
pub mod moving;
mod pointers;
pub mod reducing;
pub mod status;
pub mod store;
