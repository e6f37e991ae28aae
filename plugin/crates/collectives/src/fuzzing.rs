//! What others can hand to this crate, parsed without sockets: for the fuzz targets in `plugin/fuzz`, and for nothing else.

#[cfg(not(debug_assertions))]
compile_error!(
    "the feature fuzzing is for plugin/fuzz, which has debug assertions: a release must not have it"
);

use crate::MemoryStore;
use crate::bootstrap::agreement::{Member, Members};
use crate::bootstrap::store::{MAX_NAME, MAX_VALUE};
use crate::bootstrap::{candidate, rendezvous, store};
use crate::codec::put;
use crate::links::link::{HEADER_BYTES, Header, Key, Kind};
use crate::links::mesh::RankInfo;
use crate::liveness::{ProbeAddress, fuzzing as liveness};

/// Maximum length of a response of a store's server: its status, and a value preceded by its length.
pub const MAX_RESPONSE: usize = 16 + MAX_NAME + MAX_VALUE;

/// What a store's server answers to the first request in the bytes, and the request's length; `None` while it is incomplete.
pub fn answer_request(store: &MemoryStore, bytes: &[u8]) -> Option<(Vec<u8>, usize)> {
    store::answer(store, bytes)
}

/// The values that a client of the store reads in a response to a request for so many; `None` if it refuses it.
pub fn decode_values(bytes: &[u8], names: usize) -> Option<Vec<Option<Vec<u8>>>> {
    store::decode_values(bytes, names)
}

/// A request: an operation, a name and a value.
pub fn request(operation: u8, name: &str, value: &[u8]) -> Vec<u8> {
    let mut out = vec![operation];
    put(&mut out, name.as_bytes());
    put(&mut out, value);
    out
}

/// What ranks of a group tell each other.
#[derive(Clone, Copy, Debug)]
pub enum GroupValue {
    /// How a rank is reached, in the store.
    Rank,
    /// The ranks of a new group, in the store.
    Ranks,
    /// The agreed members of the group that follows, in the store.
    Members,
    /// A response to a probe.
    Response,
    /// The header of a message.
    Header,
}

impl GroupValue {
    /// All kinds.
    pub const ALL: [Self; 5] =
        [Self::Rank, Self::Ranks, Self::Members, Self::Response, Self::Header];

    /// Reads a value. Returns it as it is encoded, and nothing for what is only read; `None` if it is not one.
    pub fn decode(self, bytes: &[u8]) -> Option<Vec<u8>> {
        match self {
            Self::Rank => candidate::decode(bytes)
                .map(|(info, transport)| candidate::encode(&info, transport)),
            Self::Ranks => rendezvous::read_list(bytes).map(|ranks| encode_ranks(&ranks)),
            Self::Members => Members::decode(bytes).map(|members| members.encode(1)),
            Self::Response => liveness::decode_response(bytes),
            Self::Header => {
                let header = Header::decode(bytes.first_chunk::<HEADER_BYTES>()?)?;
                Some(header.encode().to_vec())
            }
        }
    }

    /// Some valid ones.
    pub fn examples(self) -> Vec<Vec<u8>> {
        let ranks = ["::1", "10.0.0.1"].map(rank_info);
        match self {
            Self::Rank => ranks.iter().map(|info| candidate::encode(info, 2)).collect(),
            Self::Ranks => vec![encode_ranks(&ranks)],
            Self::Members => {
                let numbers = [(Some(3), None), (None, Some(5))];
                let members = ranks.into_iter().zip(numbers);
                let member = |(info, (old_rank, ticket))| Member { info, old_rank, ticket };
                let members = Members { members: members.map(member).collect(), next_ticket: 7 };
                vec![members.encode(1)]
            }
            Self::Response => liveness::responses(),
            Self::Header => {
                let key = Key {
                    kind: Kind::Message,
                    group: 5,
                    tag: 1,
                    sequence: 9,
                    part: 2,
                    operation: 0,
                };
                vec![Header { key, length: 1 << 20 }.encode().to_vec()]
            }
        }
    }
}

fn rank_info(host: &str) -> RankInfo {
    let host = host.parse().unwrap_or(std::net::Ipv4Addr::LOCALHOST.into());
    let probe_address = ProbeAddress { id: 9, host, port: 7 };
    let name = "host, process 1".to_owned();
    RankInfo { probe_address, address: vec![1, 2, 3], name, host_id: 5 }
}

fn encode_ranks(ranks: &[RankInfo]) -> Vec<u8> {
    let mut out = vec![];
    ranks.iter().for_each(|info| put(&mut out, &candidate::encode(info, 1)));
    out
}
