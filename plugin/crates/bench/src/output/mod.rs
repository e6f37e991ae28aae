//! What is printed and drawn: tables, JSON, statistics and plots.

pub(crate) mod plot;
pub(crate) mod record;
pub(crate) mod statistics;

use std::io::{self, Write};

use crate::error::Result;

/// Writes to standard output at once.
///
/// # Errors
/// When it cannot be written.
pub(crate) fn write(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|error| format!("cannot write the results: {error}"))
}
