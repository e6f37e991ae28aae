//! Bootstrap: how the processes of a group find each other, through a store and the environment that their launcher set.

pub(crate) mod agreement;
pub(crate) mod candidate;
pub(crate) mod env_join;
pub(crate) mod launcher_env;
pub(crate) mod rendezvous;
pub mod store;
