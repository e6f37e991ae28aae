//! Messages over RDMA: the control connection, and which parts have been received.

pub(crate) mod arrivals;
pub(crate) mod control;
pub(crate) mod replay;
