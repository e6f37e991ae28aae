//! The all-reduce algorithms and their names.

/// A way to do an all-reduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// Around a ring, each part in one message.
    Ring,
    /// Around a ring in pieces, several on the way at a time.
    RingChunked,
    /// Ranges are halved while they are combined, and doubled while they are told.
    HalvingDoubling,
    /// Everything is exchanged with one other rank in each step.
    RecursiveDoubling,
    /// Parts are exchanged among as many ranks as the base in each step.
    Bcube {
        /// At least 2.
        base: usize,
    },
    /// Within each host first, then between hosts, each part once, then within hosts again.
    Hierarchical,
}

impl Algorithm {
    /// One of each, bcube with base 4.
    pub const ALL: [Self; 6] = [
        Self::Ring,
        Self::RingChunked,
        Self::HalvingDoubling,
        Self::RecursiveDoubling,
        Self::Bcube { base: 4 },
        Self::Hierarchical,
    ];

    /// Its name, such as `ring_chunked`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::RingChunked => "ring_chunked",
            Self::HalvingDoubling => "halving_doubling",
            Self::RecursiveDoubling => "recursive_doubling",
            Self::Bcube { .. } => "bcube",
            Self::Hierarchical => "hierarchical",
        }
    }

    /// The algorithm of this name; bcube with base 4.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|algorithm| algorithm.name() == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back() {
        for algorithm in Algorithm::ALL {
            assert_eq!(Algorithm::from_name(algorithm.name()), Some(algorithm));
        }
        assert_eq!(Algorithm::from_name("best"), None);
    }
}
