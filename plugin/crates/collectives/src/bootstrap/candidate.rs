//! A rank that is not in a group yet: its endpoint is open, and its rank info tells other ranks how to reach it.

use std::net::IpAddr;
use std::sync::Arc;

use crate::codec::{Reader, put};
use crate::error::{Error, Result};
use crate::links::link::Endpoint;
use crate::links::mesh::{Mesh, RankInfo};
use crate::links::transport_kind::TransportKind;
use crate::liveness::{Liveness, ProbeAddress};

/// A rank that is not in a group yet. Its identity is random, and no other candidate has it.
pub(crate) struct Candidate {
    transport: TransportKind,
    endpoint: Box<dyn Endpoint>,
    liveness: Arc<Liveness>,
    info: RankInfo,
}

impl Candidate {
    /// Opens an endpoint of this transport.
    ///
    /// # Errors
    /// Those of the system.
    pub(crate) fn open(transport: &TransportKind) -> Result<Self> {
        let endpoint = transport.open()?;
        let liveness = Liveness::new()
            .map_err(|error| Error::system("cannot start the liveness responder", error))?;
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let info = RankInfo {
            probe_address: ProbeAddress {
                id: liveness.id(),
                host: endpoint.ip(),
                port: liveness.port(),
            },
            address: endpoint.address(),
            name: format!("{host}, process {}", std::process::id()),
            host_id: transport.host_id()?,
        };
        Ok(Self { transport: transport.clone(), endpoint, liveness, info })
    }

    pub(crate) fn info(&self) -> &RankInfo {
        &self.info
    }

    pub(crate) fn transport(&self) -> &TransportKind {
        &self.transport
    }

    /// Makes the mesh of links to these members, of which this rank is one.
    pub(crate) fn into_mesh(self, rank: usize, members: Vec<RankInfo>) -> Mesh {
        let Self { transport, endpoint, liveness, .. } = self;
        Mesh::new(rank, transport, endpoint, liveness, members)
    }
}

/// Encodes a rank's info and the number of its transport.
pub(crate) fn encode(member: &RankInfo, transport: u8) -> Vec<u8> {
    let RankInfo { probe_address: ProbeAddress { id, host, port }, address, name, host_id } =
        member;
    let mut out = vec![transport];
    out.extend_from_slice(&host_id.to_le_bytes());
    out.extend_from_slice(&id.to_le_bytes());
    out.extend_from_slice(&u32::from(*port).to_le_bytes());
    put(&mut out, host.to_string().as_bytes());
    put(&mut out, address);
    put(&mut out, name.as_bytes());
    out
}

/// Reads what [`encode`] wrote; `None` if it did not.
pub(crate) fn decode(bytes: &[u8]) -> Option<(RankInfo, u8)> {
    let mut reader = Reader::new(bytes);
    let (transport, host_id) = (reader.byte()?, reader.long()?);
    let (id, port) = (reader.long()?, u16::try_from(reader.word()?).ok()?);
    let host: IpAddr = std::str::from_utf8(reader.bytes()?).ok()?.parse().ok()?;
    let address = reader.bytes()?.to_owned();
    let name = String::from_utf8_lossy(reader.bytes()?).into_owned();
    Some((
        RankInfo { probe_address: ProbeAddress { id, host, port }, address, name, host_id },
        transport,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_info_round_trips() {
        let probe_address = ProbeAddress { id: 9, host: "::1".parse().unwrap(), port: 7 };
        let name = "host, process 1".to_owned();
        let member = RankInfo { probe_address, address: vec![1, 2, 3], name, host_id: 5 };
        let bytes = encode(&member, 2);
        assert_eq!(decode(&bytes), Some((member, 2)));
        assert!((0..bytes.len()).all(|length| decode(&bytes[..length]).is_none()));
    }
}
