//! What several subcommands take on their command line.

pub(crate) mod options;
pub(crate) mod size;
pub(crate) mod time;

/// The name of a value as it is given on the command line.
pub(crate) fn name(value: &impl clap::ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}
