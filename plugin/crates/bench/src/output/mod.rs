//! What is printed and drawn: tables, JSON, statistics and plots.

pub(crate) mod plot;
pub(crate) mod record;
pub(crate) mod statistics;
