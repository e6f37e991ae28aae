//! What is printed and drawn: tables, JSON, statistics and plots.

pub(crate) mod plot;
pub(crate) mod report;
pub(crate) mod statistics;
