//! How peers find and recognise each other before any message is carried.

pub(crate) mod auth;
pub(crate) mod encrypted;
pub(crate) mod hello;
