//! The all-reduce algorithms and their names.

/// An all-reduce algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// Ring, with each part in one message.
    Ring,
    /// Ring in pieces, with several in flight.
    RingChunked,
    /// Recursive halving with reduction, then recursive doubling.
    HalvingDoubling,
    /// Exchange of the whole buffer with one other rank in each step.
    RecursiveDoubling,
    /// Exchange of parts among `base` ranks in each step.
    Bcube {
        /// At least 2.
        base: usize,
    },
    /// Each rank owns a share: all ranks send it their contributions to that, and it sends the result back. Contributions are added
    /// in the order of the ranks, and rounded once, so the result does not depend on the shares. They fit the ranks' links, see
    /// [`Group::set_link_rate`](crate::Group::set_link_rate).
    Direct,
    /// Within each host, then between hosts with each part once, then within each host again.
    Hierarchical,
}

impl Algorithm {
    /// One of each, with base 4 for bcube.
    pub const ALL: [Self; 7] = [
        Self::Ring,
        Self::RingChunked,
        Self::HalvingDoubling,
        Self::RecursiveDoubling,
        Self::Bcube { base: 4 },
        Self::Direct,
        Self::Hierarchical,
    ];

    /// The name, such as `ring_chunked`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::RingChunked => "ring_chunked",
            Self::HalvingDoubling => "halving_doubling",
            Self::RecursiveDoubling => "recursive_doubling",
            Self::Bcube { .. } => "bcube",
            Self::Direct => "direct",
            Self::Hierarchical => "hierarchical",
        }
    }

    /// The algorithm of this name, with base 4 for bcube.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|algorithm| algorithm.name() == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn algorithm_names_round_trip() {
        for algorithm in Algorithm::ALL {
            assert_eq!(Algorithm::from_name(algorithm.name()), Some(algorithm));
        }
        assert_eq!(Algorithm::from_name("best"), None);
    }
}
