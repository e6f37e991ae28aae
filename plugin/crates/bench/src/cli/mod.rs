//! What several subcommands take on their command line.

pub(crate) mod options;
pub(crate) mod size;
