//! Which rank of which communicator a client is.

use std::io;

use evenkeel_transport::random;

use crate::tree_position::TreePosition;

/// Maximum number of ranks of a communicator.
pub const MAX_RANKS: u32 = 4096;
/// Maximum length of a job's name, in bytes.
pub(super) const MAX_JOB_BYTES: usize = 63;

/// Which rank of which communicator a client is. In a tree of servers, a leaf joins its upstream
/// servers as a rank does: it sends the sum of its ranks' vectors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Random bytes that identify the communicator; only its ranks know them.
    pub unique_id: [u8; 16],
    /// NCCL's id of the communicator, for log lines.
    pub comm_id: u64,
    /// This rank, below `ranks`; of a leaf, its index.
    pub rank: u32,
    /// The number of ranks, or of leaves, 1 to [`MAX_RANKS`].
    pub ranks: u32,
    /// Its place among the ranks with the same list of servers.
    pub position: TreePosition,
    /// Whether it is a leaf.
    pub is_leaf: bool,
    /// The job's name. May be empty.
    pub job: String,
}

impl Member {
    /// The member as the server with this index in its list knows it. Each server reduces other
    /// parts of the vectors, and all may have the same upstream server: the unique id tells their
    /// communicators apart.
    pub fn at_server(&self, index: usize) -> Self {
        let unique_id = u128::from_le_bytes(self.unique_id).rotate_left(16) ^ index as u128;
        Self { unique_id: unique_id.to_le_bytes(), ..self.clone() }
    }

    /// The leaf of all ranks with this list of servers.
    pub fn leaf(&self) -> Self {
        let TreePosition { leaf, leaves, .. } = self.position;
        let position = TreePosition::without_tree(leaf, leaves);
        Self { rank: leaf, ranks: leaves, position, is_leaf: true, ..self.clone() }
    }

    /// Its name in log lines and errors.
    pub fn name(&self) -> String {
        format!("{} {}", if self.is_leaf { "leaf" } else { "rank" }, self.rank)
    }

    /// The name of the rank with this index at the same servers, as long as that has not joined.
    pub fn name_of(&self, index: u32) -> String {
        match self.position.leaves {
            1 => Self { rank: index, ..self.clone() }.name(),
            _ => format!("number {index} of the leaf's ranks"),
        }
    }

    /// A new [`Member::unique_id`], from the kernel's random bytes.
    ///
    /// # Errors
    /// When there are none.
    pub fn new_unique_id() -> io::Result<[u8; 16]> {
        random()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unique_id_differs_at_every_server_of_a_tree() {
        let member = Member {
            unique_id: Member::new_unique_id().unwrap(),
            comm_id: 0xabc,
            rank: 2,
            ranks: 4,
            position: TreePosition { index: 0, count: 2, leaf: 1, leaves: 2 },
            is_leaf: false,
            job: String::new(),
        };
        let mut ids = vec![];
        for server in 0..64 {
            let leaf = member.at_server(server).leaf();
            ids.push(member.at_server(server).unique_id);
            ids.extend((0..64).map(|upstream| leaf.at_server(upstream).unique_id));
        }
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), 64 + 64 * 64);
    }
}
