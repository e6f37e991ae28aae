//! NCCL's collectives, algorithms and protocols, with its numbers.

/// A collective that has several algorithms. Source of the numbers: `ncclFunc_t` in NCCL's
/// `nccl_common.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Every rank gets all parts.
    AllGather = 2,
    /// Every rank gets the reduction of one part.
    ReduceScatter = 3,
    /// Every rank gets the reduction of everything.
    AllReduce = 4,
}

impl Collective {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::AllGather, Self::ReduceScatter, Self::AllReduce];

    /// The collective with NCCL's number.
    pub fn from_number(number: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|collective| *collective as i32 == number)
    }
}

/// An algorithm whose cost is known. NCCL's others (NVLS) depend on what is inside a node.
/// Source of the numbers: `NCCL_ALGO_*` in NCCL's `nccl_tuner.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// Two binary trees over the nodes, each with half of the data.
    Tree = 0,
    /// A ring over all ranks.
    Ring = 1,
    /// Reduction servers, each of a node's GPUs with its own part. Only NVSwitch has it.
    CollNetDirect = 2,
    /// Reduction servers, a node's GPUs in a chain.
    CollNetChain = 3,
    /// Parallel aggregated trees, for nodes of one GPU.
    Pat = 6,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Tree, Self::Ring, Self::CollNetDirect, Self::CollNetChain, Self::Pat];

    /// The algorithm with NCCL's number.
    pub fn from_number(number: usize) -> Option<Self> {
        Self::ALL.into_iter().find(|algorithm| *algorithm as usize == number)
    }

    /// Its name in `NCCL_ALGO`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tree => "Tree",
            Self::Ring => "Ring",
            Self::CollNetDirect => "CollNetDirect",
            Self::CollNetChain => "CollNetChain",
            Self::Pat => "PAT",
        }
    }

    /// Whether it goes through reduction servers.
    pub fn uses_servers(self) -> bool {
        matches!(self, Self::CollNetDirect | Self::CollNetChain)
    }
}

/// A protocol between GPUs. Source of the numbers: `NCCL_PROTO_*` in NCCL's `nccl_tuner.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Four bytes of data and four of flag: low latency, twice the bytes.
    Ll = 0,
    /// 120 bytes of data and 8 of flag.
    Ll128 = 1,
    /// Data alone, with a flag for a whole slice.
    Simple = 2,
}

impl Protocol {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Ll, Self::Ll128, Self::Simple];

    /// The protocol with NCCL's number.
    pub fn from_number(number: usize) -> Option<Self> {
        Self::ALL.into_iter().find(|protocol| *protocol as usize == number)
    }

    /// Its name in `NCCL_PROTO`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ll => "LL",
            Self::Ll128 => "LL128",
            Self::Simple => "Simple",
        }
    }
}
