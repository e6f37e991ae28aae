//! Links between ranks: what every transport provides, the transports, and the mesh of links to all ranks of a group.

pub(crate) mod hierarchical;
pub(crate) mod link;
pub(crate) mod matching;
pub(crate) mod mesh;
pub(crate) mod shm;
pub(crate) mod tcp;
pub(crate) mod tls;
pub(crate) mod transport_kind;
