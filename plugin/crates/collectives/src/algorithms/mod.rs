//! The algorithms of collective operations: which one an operation uses, its plan, and the executor that runs plans.

pub(crate) mod algorithm;
pub(crate) mod cost_model;
pub(crate) mod executor;
pub(crate) mod plan;
pub(crate) mod reduction;
pub(crate) mod shares;
